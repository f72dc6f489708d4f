"""The tool that plants faults: what each operator makes of a statement, and how a fault is found again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.tools.plant import Fault, Source, find, plant, replant, undo

TOY = b'''"""A file."""
LIMIT = 3
class Toy:
    def run(self, log, a: "int" = 1):
        """At most 3."""
        log.info("a", a < 3)
        os.fsync(a)
        a.wait()
        with self._lock, self._clock:
            swap(a, log)
        if a < 3:
            raise ValueError("a" < 3)
        elif a[1:] is None:
            total = f"{a < 3}" + show(True, help=a < 3)
        try:
            self.kept = a - 1
        except OSError:
            raise
    def __repr__(self):
        return show(1, 2)
'''
FAULTS = {
    ("removed fsync", "os.fsync(a)", "pass"),
    ("removed await", "a.wait()", "pass"),
    ("removed lock", "with self._lock, self._clock", "with self._clock"),
    ("swapped arguments", "swap(a, log)", "swap(log, a)"),
    ("removed statement", "swap(a, log)", "pass"),
    ("flipped comparison", "if a < 3", "if a <= 3"),
    ("off by one", "if a < 3", "if a < 4"),
    ("removed statement", 'raise ValueError("a" < 3)', "pass"),
    ("flipped comparison", "elif a[1:] is None", "elif a[1:] is not None"),
    ("off by one", "elif a[1:] is None", "elif a[2:] is None"),
    ("changed constant", 'total = f"{a < 3}" + show(True, help=a < 3)', 'total = f"{a < 3}" + show(False, help=a < 3)'),
    ("removed statement", "self.kept = a - 1", "pass"),
    ("off by one", "self.kept = a - 1", "self.kept = a - 0"),
    ("swallowed exception", "raise", "pass"),
}


def test_operators() -> None:
    faults = list(Source("jobs/toy.py", TOY).faults())
    assert {(fault.operator, fault.old, fault.new) for fault in faults} == FAULTS
    assert {(fault.path, fault.function) for fault in faults} == {("jobs/toy.py", "Toy.run")}


@pytest.mark.parametrize("fault", [*Source("jobs/toy.py", TOY).faults()], ids=lambda fault: fault.new)
def test_planted_and_undone(fault: Fault, tmp_path: Path) -> None:
    file = tmp_path / "jobs/toy.py"
    file.parent.mkdir()
    file.write_bytes(TOY)
    plant(fault, tmp_path)
    assert file.read_bytes().count(fault.new.encode()) == TOY.count(fault.new.encode()) + 1
    undo(tmp_path)
    assert file.read_bytes() == TOY


FAULT = Fault(operator="flipped comparison", path="jobs/toy.py", function="Toy.run", old="if a < 3", new="if a <= 3")


@pytest.mark.parametrize(
    ("path", "change", "function"),
    [
        ("jobs/toy.py", (b"swap", b"turn"), "Toy.run"),
        ("state_backend/new.py", (b"class Toy", b"class New"), "New.run"),
        ("jobs/toy.py", (b"def run", b"def go"), None),
        ("jobs/toy.py", (b"if a < 3", b"if a < 5"), None),
    ],
)
def test_found_again(
    path: str, change: tuple[bytes, bytes], function: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    source = Source(path, TOY.replace(*change))
    again = find(FAULT, source.statements())
    assert (again and again.function) == function
    now = replant([FAULT, FAULT], [source], 1)
    assert capsys.readouterr().err.count("vanished: ") == (0 if function else 2)
    if function:
        assert now == [replace(FAULT, path=path, function=function)] * 2
    else:
        assert now[0].operator == FAULT.operator and now[0] not in (FAULT, now[1])
