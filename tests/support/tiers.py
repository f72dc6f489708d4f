"""The tier of tests that runs: `fast`, `ci` or `all` in the variable CAIRN_TESTS; `ci` without it.

`fast` leaves out tests that need Spark, Airflow, a browser, a cluster or a storage server. `fast` and `ci` leave out tests that are marked
`long`; with `runs_in="ci"` only `fast` leaves the test out.
Some tests run fewer examples in `fast` and `ci`: they ask `ALL` or `at_tier`.

`make test-all` runs in parts: CAIRN_PASSED names a folder, where each run notes the tests that passed on this commit. A later run of the
same commit leaves these tests out. With uncommitted changes nothing is noted. With CAIRN_PART, a run begins no test after 50 minutes, and is
not whole while tests are left. Each run adds a line to this commit's file of parts, and shows the file.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.support.messages import Made, as_plain, from_plain

T = TypeVar("T")

NAMES = ("fast", "ci", "all")
TIER = os.environ.get("CAIRN_TESTS") or "ci"
if TIER not in NAMES:
    raise SystemExit(f"CAIRN_TESTS is {TIER!r}; use one of {', '.join(NAMES)}")
ALL = TIER == "all"
# pytest gives a test's children this variable. A run of pytest that a test starts notes nothing.
STARTED_BY_A_TEST = "PYTEST_CURRENT_TEST" in os.environ
# What a marker's tests need beside Python's packages: a program, and the command that installs it.
SOFTWARE = {
    "spark": ("java", "make java"),
    "airflow": ("java", "make java"),
    "browser": ("chromium", "apt-get install chromium chromium-driver"),
}
# No test takes half an hour more, so that a part ends within 80 minutes.
PART_S = float(os.environ.get("CAIRN_PART_SECONDS") or 50 * 60)
PART = os.environ.get("CAIRN_PART")
BEGAN_S = time.time()
if PART:  # The workers of xdist begin later, and get the end of the process that starts them.
    os.environ.setdefault("CAIRN_PART_ENDS", str(BEGAN_S + PART_S))
# How each test ended that this process heard of.
ENDED: dict[str, str] = {}
NOT_FAST = ("spark", "airflow", "browser", "cluster", "gcs", "s3", "azure")
REPOSITORY = Path(__file__).resolve().parents[2]


def at_tier(*, fast: T, ci: T, all: T) -> T:
    """Return the value of the tier that runs."""
    return {"fast": fast, "ci": ci, "all": all}[TIER]


def long_after(first: int, cases: Iterable[Any], reason: str, *, runs_in: str = "all") -> list[Any]:
    """Return the cases of a test for `parametrize`. All but the first ones are marked `long`."""
    marked = [_as_parameters(case) for case in cases]
    long = pytest.mark.long(reason, runs_in=runs_in)
    more = [pytest.param(*case.values, id=case.id, marks=[*case.marks, long]) for case in marked[first:]]
    return [*marked[:first], *more]


def _as_parameters(case: Any) -> Any:
    if isinstance(case, type(pytest.param())):
        return case
    return pytest.param(*case) if isinstance(case, tuple) else pytest.param(case)


def choose_tests(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests of other tiers, and tests that passed before on this commit."""
    if TIER == "fast":
        config.hook.pytest_deselected(items=[item for item in items if not _is_fast(item)])
        items[:] = [item for item in items if _is_fast(item)]
    if not ALL:
        for item in items:
            # A test may be long for one reason, and an example of it for another. Both must allow this tier.
            long = next((mark for mark in item.iter_markers("long") if not _runs(mark)), None)
            if long is not None:
                command = "make test" if long.kwargs.get("runs_in") == "ci" else "make test-all"
                item.add_marker(pytest.mark.skip(reason=f"long ({long.args[0]}): {command} runs it"))
    elif passed := {*_noted(".passed")}:
        done = [item for item in items if item.nodeid in passed]
        items[:] = [item for item in items if item.nodeid not in passed]
        config.hook.pytest_deselected(items=done)


def _is_fast(item: pytest.Item) -> bool:
    return not any(item.get_closest_marker(name) for name in NOT_FAST)


def _runs(long: pytest.Mark) -> bool:
    return NAMES.index(TIER) >= NAMES.index(long.kwargs.get("runs_in", "all"))


def is_part_over() -> bool:
    return bool(PART) and not STARTED_BY_A_TEST and time.time() >= float(os.environ["CAIRN_PART_ENDS"])


def remember_passed(report: pytest.TestReport) -> None:
    """Note a test that passed on this commit. Workers leave the notes to the process that started them."""
    if report.when == "call" or not report.passed:
        ENDED[report.nodeid] = "failed" if "failed" in (report.outcome, ENDED.get(report.nodeid)) else report.outcome
    if report.when == "call" and report.passed and "PYTEST_XDIST_WORKER" not in os.environ:
        _note(".passed", [report.nodeid])


def remember_errors(made: Sequence[Made]) -> list[Made]:
    """Note the errors that this run made, and return them with those of earlier runs on this commit."""
    _note(".errors", [json.dumps(one) for one in as_plain(made)])
    return [*made, *from_plain(json.loads(line) for line in _noted(".errors"))]


def remember_part(collected: int) -> int:
    """Note how this run ended, and return how many tests it did not begin."""
    left, how = collected - len(ENDED), Counter(ENDED.values())
    begun = time.strftime("%Y-%m-%d %H:%M", time.gmtime(BEGAN_S))
    ended = [f"{number} {outcome}" for outcome, number in sorted(how.items())] or ["nothing to run"]
    failed = [f"  failed: {test}" for test, outcome in sorted(ENDED.items()) if outcome == "failed"]
    minutes = (time.time() - BEGAN_S) / 60
    name = f"part {PART}" if PART else "without PART"
    _note(".parts", [f"{name}, {begun}, {minutes:.0f} minutes: {', '.join(ended)}; {left} tests left", *failed])
    return left


def parts() -> list[str]:
    """Return the lines about the runs on this commit so far."""
    return [*_noted(".parts")]


def missing_software() -> list[str]:
    """Return a line for each program that is not here, with the tests that need it and the command that installs it."""
    lines = []
    for program, command in {*SOFTWARE.values()}:
        if shutil.which(program) is None and not (program == "java" and "JAVA_HOME" in os.environ):
            needed = " and ".join(sorted(marker for marker, (name, _) in SOFTWARE.items() if name == program))
            lines.append(f"{program} is missing: tests marked {needed} can't run. To install it: {command}")
    return sorted(lines)


@cache
def _notes() -> Path | None:
    """Return the path of this commit's notes without suffix; None if nothing is noted."""
    folder = os.environ.get("CAIRN_PASSED")
    git = ["git", "-C", str(REPOSITORY)]
    if (
        not folder
        or STARTED_BY_A_TEST
        or subprocess.run([*git, "status", "--porcelain"], capture_output=True, check=True).stdout
    ):
        return None
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    return Path(folder) / commit


def _note(suffix: str, lines: Sequence[str]) -> None:
    if (notes := _notes()) is not None:
        notes.parent.mkdir(parents=True, exist_ok=True)
        with notes.with_name(notes.name + suffix).open("a") as out:
            out.writelines(f"{line}\n" for line in lines)


def _noted(suffix: str) -> list[str]:
    file = None if (notes := _notes()) is None else notes.with_name(notes.name + suffix)
    return file.read_text().splitlines() if file is not None and file.exists() else []
