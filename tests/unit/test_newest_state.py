"""Which checkpoint a name means: the newest state is the valid checkpoint of the latest interval. Pure functions over the log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from state_backend.checkpoint.log import Log
from state_backend.checkpoint.newest_state import checkpoint_named, newest_state, no_checkpoint, overtaken
from state_backend.checkpoint.rewind import restorable
from state_backend.values.errors import StaleStateError
from state_backend.values.marks import Quarantine
from state_backend.values.records import Permissions, Record
from state_backend.values.retention import KeepLast
from tests.support.checkpoints import Folder, day, record
from tests.support.log_in_memory import log_in_memory

DAYS = (record(1, day(1)), record(2, day(2), 1), record(3, day(3), 2))
SAME = record(4, day(1), None, digest=DAYS[0].content.digest, reproduces=1)
OTHER = record(4, day(1), None, {1: None, 2: 4, 3: 4, 4: None})  # a correction of day 1
REWRITTEN = record(4, day(1), 1, kind="consolidate", digest=DAYS[0].content.digest, reproduces=1)
FORGOTTEN = record(4, day(3), 3, kind="forget")
RESTORED = record(4, day(1), 1, {1: None, 2: 4, 3: 4, 4: None}, kind="restore", digest=DAYS[0].content.digest)
AGAIN = record(4, day(3), 2)


def log_of(*records: Record, quarantined: tuple[int, ...] = (), dropped: tuple[int, ...] = ()) -> Log:
    last = replace(records[-1], retained=tuple(r for r in records[-1].retained if r.id not in dropped))
    entries = {r.id: r for r in (*records[:-1], last)}
    return log_in_memory(entries=entries, quarantined={i: Quarantine(id=i, reason="wrong") for i in quarantined})


@pytest.mark.parametrize(
    ("log", "latest", "ends"),
    [
        (log_of(DAYS[0]), 1, {1: 1}),
        (log_of(*DAYS), 3, {1: 1, 2: 2, 3: 3}),
        (log_of(*DAYS, quarantined=(3,)), 2, {1: 1, 2: 2, 3: None}),
        (log_of(*DAYS, quarantined=(1,)), None, {1: None, 2: None, 3: None}),
        # A re-run of an old day that leaves the same state, and a consolidation of an old checkpoint, are no newer state.
        (log_of(*DAYS, SAME), 3, {1: 4, 2: 2, 3: 3}),
        (log_of(*DAYS, REWRITTEN), 3, {1: 4, 2: 2, 3: 3}),
        # A correction of an old day makes the later days stale; if it is quarantined, the state before it counts.
        (log_of(*DAYS, OTHER), 4, {1: 4, 2: None, 3: None}),
        (log_of(*DAYS, OTHER, quarantined=(4,)), 1, {1: 1, 2: None, 3: None}),
        (log_of(*DAYS, FORGOTTEN), 4, {1: 1, 2: 2, 3: 4}),
        (log_of(*DAYS, RESTORED), 4, {1: 4, 2: None, 3: None}),
        (log_of(*DAYS, AGAIN), 4, {1: 1, 2: 2, 3: 4}),
        (log_of(*DAYS, AGAIN, quarantined=(4,)), 3, {1: 1, 2: 2, 3: 3}),
        # Retention dropped the re-run of day 3, while the result that it replaced is held.
        (
            log_of(*DAYS, AGAIN, record(5, day(2), 1, digest=DAYS[1].content.digest, reproduces=2), dropped=(4,)),
            5,
            {2: 5, 3: None},
        ),
    ],
)
def test_the_newest_state_is_the_valid_checkpoint_of_the_latest_interval(
    log: Log, latest: int | None, ends: dict[int, int | None]
) -> None:
    assert checkpoint_named(log, "latest") == latest == getattr(newest_state(log), "id", None)
    assert {n: checkpoint_named(log, day(n).end) for n in ends} == ends
    assert all(checkpoint_named(log, n) == n for n in log.retained)  # by its id, for whoever looks into it


def test_stale_checkpoints_after_the_newest_state_are_reported() -> None:
    log = log_of(*DAYS, OTHER)
    newest = newest_state(log)
    assert newest is not None
    assert overtaken(log, newest) == (
        "the newest state is checkpoint 4 of [2024-01-01T00:00:00Z, 2024-01-02T00:00:00Z). The checkpoints of later intervals, up to "
        "2024-01-04T00:00:00Z, are not valid: 2 is stale by 4, 3 is stale by 4"
    )
    assert overtaken(log_of(*DAYS, SAME), DAYS[2]) is None
    assert str(no_checkpoint(log, "p", day(3).end)) == (
        "pipeline 'p' has no usable checkpoint 2024-01-04 00:00:00+00:00: checkpoint 3 is stale by 4\n"
        "Usable checkpoints: 4 (to 2024-01-02T00:00:00Z)"
    )


def test_a_refused_fork_offers_no_stale_checkpoint() -> None:
    with pytest.raises(StaleStateError, match=r"(?s)checkpoint 3 is stale.*Usable checkpoints: 4$"):
        restorable(log_of(*DAYS, OTHER), 3, Permissions())


def corrected(folder: Folder) -> None:
    """Day 1 gets another result, then day 2 runs again; day 3 stays stale."""
    folder.run(day(1), "b1")
    folder.run(day(2), "b2")


def reproduced(folder: Folder) -> None:
    folder.run(day(1), "c1", digest=folder.coordinator.record(day(1).end).content.digest)


@pytest.mark.parametrize("then", [reproduced, lambda folder: folder.run(day(3), "d3")])
def test_no_commit_drops_the_newest_state(then: Callable[[Folder], Any]) -> None:
    """Under the tightest policy: a stale checkpoint of a later interval does not count in its place."""
    folder = Folder(policy=KeepLast(1))
    wide = Folder(folder.storage, days=3, policy=KeepLast(9))
    corrected(wide)
    newest = newest_state(wide.coordinator.log())
    assert newest is not None and newest.interval == day(2)
    then(folder)
    log = folder.coordinator.log()
    found = newest_state(log)
    assert found is not None and (found.id == newest.id or found.interval == day(3))


def test_retention_keeps_the_validated_state_of_the_latest_interval() -> None:
    """An old day runs again, leaves the same state and is validated: the validated state of the latest day stays."""
    folder, wide = Folder(policy=KeepLast(1)), Folder(policy=KeepLast(9))
    folder.storage = wide.storage
    folder.coordinator = folder.over(wide.storage)
    for n in (1, 2):
        wide.run(day(n), f"a{n}")
    wide.coordinator.mark_validated(2, "full")
    wide.run(day(3), "a3")
    reproduced(wide)
    wide.coordinator.mark_validated(4, "full")
    folder.run(day(4), "a4")
    assert set(folder.coordinator.log().retained) == {2, 5}
