"""Every operation killed at every storage call; ``python -m tests.crash_matrix`` runs all of it and prints what it counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.crash_matrix import OPERATIONS, Fault, InMemory, OnDisk, Operation, crash_matrix
from tests.support.tiers import ALL, long_after

WHOLE = ("sweep", "native savepoint", "claim")
# These take longer than the others, or repeat the calls of another operation.
LONGEST = ("forget", "drop of a quarantined day", "sweep of lost files")
BRIEF = ("interval", "canonical savepoint", "claim")


@pytest.mark.parametrize(
    "operation",
    [
        o
        if o.name == "interval"
        else pytest.param(o, marks=pytest.mark.long("seconds", runs_in="all" if o.name in LONGEST else "ci"))
        for o in OPERATIONS
    ],
    ids=lambda o: o.name,
)
def test_a_crash_at_any_call_leaves_the_old_state_or_the_new_one(operation: Operation, tmp_path: Path) -> None:
    """F2, F12, F49, F53, S3, S5, S6: before and after each write (with `make test-all`, of some each call: a read leaves what the write
    before it left), in memory; then the next try ends where an undisturbed one
    would, and a sweep leaves exactly what is named."""
    totals = crash_matrix(operation, InMemory(), tmp_path, only_writes=operation.name not in WHOLE or not ALL)
    assert totals.faults == totals.old + totals.new > 1
    assert totals.new > 0


@pytest.mark.parametrize(
    "operation",
    long_after(1, [pytest.param(o, id=o.name) for o in OPERATIONS if o.name in ("interval", "sweep")], "seconds"),
)
@pytest.mark.long("seconds", runs_in="ci")
def test_a_crash_at_any_disk_write_leaves_the_old_state_or_the_new_state(operation: Operation, tmp_path: Path) -> None:
    """F12, F53, S5: the same on a disk; all operations and calls are in the whole matrix."""
    totals = crash_matrix(operation, OnDisk(tmp_path / "root"), tmp_path / "work", only_writes=True)
    assert totals.faults == totals.old + totals.new > 15


@pytest.mark.parametrize("fault", ["answer lost", "out of reach"])
@pytest.mark.parametrize("operation", [o for o in OPERATIONS if o.name in BRIEF], ids=lambda o: o.name)
@pytest.mark.long("seconds", runs_in="ci")
def test_a_write_that_fails_is_undone_or_settled(operation: Operation, fault: Fault, tmp_path: Path) -> None:
    """F2, F18, F38, F54, S5, S7: what a process does that lives on may be no worse than to die."""
    totals = crash_matrix(operation, InMemory(), tmp_path, fault=fault, only_writes=True)
    assert totals.faults == totals.old + totals.new > 0


@pytest.mark.long("ten seconds")
def test_a_storage_out_of_reach_at_any_call_of_a_re_run_is_reported_as_such(tmp_path: Path) -> None:
    """F18, S5: the commit of a re-run reads the log of other intervals. A read that failed there must not end the attempt."""
    (operation,) = (o for o in OPERATIONS if o.name == "re-run")
    totals = crash_matrix(operation, InMemory(), tmp_path, fault="out of reach")
    assert totals.faults == totals.old + totals.new > 50
