"""The tool that plants faults: what each operator makes of a statement, and how a fault is found again."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tools.measure import Ran, covering
from tests.tools.plant import Fault, Source, draw, find, plant, replant, undo

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


def test_a_probe_stands_before_the_first_if_of_an_elif() -> None:
    lines = {one.text: TOY.splitlines()[one.line - 1].strip() for one in Source("jobs/toy.py", TOY).statements()}
    assert lines["elif a[1:] is None"] == b"if a < 3:"
    assert lines["raise"] == b"raise"


@pytest.mark.parametrize("fault", [*Source("jobs/toy.py", TOY).faults()], ids=lambda fault: fault.new)
def test_planted_and_undone(fault: Fault, tmp_path: Path) -> None:
    file = tmp_path / "jobs/toy.py"
    file.parent.mkdir()
    file.write_bytes(TOY)
    plant(fault, tmp_path)
    assert file.read_bytes().count(fault.new.encode()) == TOY.count(fault.new.encode()) + 1
    undo(tmp_path)
    assert file.read_bytes() == TOY


def test_rooms_and_operators_take_turns() -> None:
    faults = [fault for path in ("jobs/toy.py", "dags/a.py", "dags/b.py") for fault in Source(path, TOY).faults()]
    drawn = draw(faults, 7, 8)
    assert drawn == draw(faults, 7, 8) != draw(faults, 8, 8)
    assert Counter(fault.room for fault in drawn) == {"jobs": 4, "dags": 4}
    assert len({fault.operator for fault in drawn}) == 8
    assert len({(fault.path, fault.old) for fault in drawn}) == 8


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


def test_the_layout_of_lines_does_not_count() -> None:
    fault = replace(FAULT, operator="swapped arguments", old="swap(a, log)", new="swap(log, a)")
    assert find(
        fault,
        Source("jobs/toy.py", TOY.replace(b"(a, log)", b"(\n            a,\n            log,\n        )")).statements(),
    )


def test_which_tests_cover_a_statement() -> None:
    ran = [
        Ran("a::1", "5", "gw0", 0, 4),
        Ran("a::2", "5", "gw0", 4, 5),
        Ran("b::1", "6", "gw1", 0, 2),
        Ran("c::1", "5", "gw0", 5, 6),
    ]
    direct = covering([("0", "5", "b::1 (call)", "gw1", "1", "")], ran)
    setup = covering([("0", "5", "a::2 (setup)", "gw0", "4.5", "")], ran)
    of_server = covering([("0", "99", "b::1 (call)", "gw0", "5.5", "")], ran)
    unknown = covering([("0", "99", "None", "None", "1", "")], ran)
    assert [[*direct], [*setup], [*of_server], [*unknown]] == [
        ["b::1"],
        ["a::1", "a::2"],
        ["c::1", "b::1"],
        ["b::1", "a::1"],
    ]
