"""Section 5, one rule at a time: what a prepared attempt may do, given the log."""

from __future__ import annotations

from typing import Any

import pytest

from state_backend.checkpoint.clean_up_dropped import tombstone_of
from state_backend.checkpoint.decide_commit import Adopted, AlreadyCommitted, Create, plan_commit
from state_backend.checkpoint.log import Entry, Log
from state_backend.checkpoint.quarantine_consequences import computed_without, hidden_by_release
from state_backend.values.errors import BaseMoved, CorruptRecord, Fenced, StorageUnavailable
from state_backend.values.intervals import Interval
from state_backend.values.marks import Quarantine
from state_backend.values.records import Permissions, Prepared, Record, Retained, SweepRecord
from state_backend.values.retention import KeepLast
from tests.support.checkpoints import DAY, content, day, record, run
from tests.support.log_in_memory import log_in_memory

POLICY = KeepLast(10)
C1, C2, C3 = record(1, day(1)), record(2, day(2), 1), record(3, day(3), 2)


def plan(log: Log, prepared: Prepared) -> Create | AlreadyCommitted | Adopted:
    return plan_commit(log, prepared, POLICY)


def log_of(*entries: Entry, **options: Any) -> Log:
    return log_in_memory(entries={e.id: e for e in entries}, **options)


def mine(interval: Interval, base_id: int | None, h0: int, **changes: Any) -> Prepared:
    return Prepared(h0=h0, content=content(interval, changes.pop("attempt", "mine"), base_id, **changes))


@pytest.mark.parametrize(
    ("first", "last", "fenced"), [(1.5, 2.5, True), (0, 1.1, True), (0, 3, True), (0, 1, False), (2, 3, False)]
)
def test_overlap_fences_and_touching_does_not(first: float, last: float, fenced: bool) -> None:
    other = record(2, Interval(day(1).start + first * DAY, day(1).start + last * DAY), 1, {1: None, 2: None})
    prepared = mine(day(2), 1, 1)
    if fenced:
        with pytest.raises(Fenced):
            plan(log_of(C1, other), prepared)
    else:
        # Not fenced; whether the base still holds is the next question.
        try:
            plan(log_of(C1, other), prepared)
        except BaseMoved:
            assert (first, last) == (0, 1)


def test_what_was_committed_before_the_begin_does_not_fence() -> None:
    assert isinstance(plan(log_of(C1, C2), mine(day(2), 1, 2)), Create)


@pytest.mark.parametrize(
    ("kind", "base", "reproduces", "fenced"),
    [("interval", 2, None, True), ("interval", 1, 2, False), ("restore", 2, None, True), ("consolidate", 2, 2, False)],
)
def test_only_different_results_and_rewinds_fence(kind: str, base: int, reproduces: int | None, fenced: bool) -> None:
    other = record(3, day(2), base, kind=kind, reproduces=reproduces)
    if fenced:
        with pytest.raises(Fenced):
            plan(log_of(C1, C2, other), mine(day(2), 1, 2))
    else:
        assert isinstance(plan(log_of(C1, C2, other), mine(day(2), 1, 2)), Create)


@pytest.mark.parametrize(
    ("theirs", "base_id", "outcome"),
    [
        (run("r", 0, 1), 1, Create),  # an earlier try that commits late
        (run("r", 0, 2), 1, Adopted),  # the same try, twice: its result is ours
        (run("r", 0, 3), 1, Adopted),
        (run("r", 1, 1), 1, Fenced),  # cleared on purpose since
        (run("other", 0, 1), 1, Fenced),
        (run("r", 0, 3), None, Fenced),  # not from our base
    ],
)
def test_the_try_number_decides_if_a_concurrent_result_is_replaced_adopted_or_fences(
    theirs: Any, base_id: int | None, outcome: type
) -> None:
    other = record(2, day(2), base_id, run=theirs)
    prepared = mine(day(2), 1, 1, run=run("r", 0, 2))
    if outcome is Fenced:
        with pytest.raises(Fenced):
            plan(log_of(C1, other), prepared)
    else:
        made = plan(log_of(C1, other), prepared)
        assert type(made) is outcome
        assert made == Adopted(id=2) if outcome is Adopted else made.record.id == 3  # type: ignore[union-attr]


def test_a_cleared_run_replaces_a_late_commit_of_the_run_before() -> None:
    other = record(2, day(2), 1, run=run("r", 0, 9))
    assert isinstance(plan(log_of(C1, other), mine(day(2), 1, 1, run=run("r", 1, 1))), Create)


def sweep(id: int, *abandoned: str) -> SweepRecord:
    kept = tuple(Retained(id=i, stale_by=None) for i in range(1, id))
    return SweepRecord(id=id, retained=kept, sweep="s", abandoned=abandoned)


def test_a_sweep_record_is_not_retained_as_a_checkpoint_by_the_next_commit() -> None:
    made = plan(log_of(C1, sweep(2)), mine(day(2), 1, 1))
    assert isinstance(made, Create)
    assert [r.id for r in made.record.retained] == [1, 3]


@pytest.mark.parametrize(
    ("again", "says"),
    [
        # Failure 1: interval 3 begins on c2, interval 1 is run again, interval 3 wants to commit.
        (record(3, day(1), None, {1: 3, 2: 3, 3: None}), "stale"),
        # S34: what an attempt started from is compared by id, not by position.
        (record(3, day(2), 1, {1: None, 2: 3, 3: None}), "checkpoint 2, but the interval now starts from checkpoint 3"),
    ],
)
def test_a_commit_on_what_was_run_again_is_refused(again: Record, says: str) -> None:
    with pytest.raises(BaseMoved, match=says):
        plan(log_of(C1, C2, again), mine(day(3), 2, 2))


@pytest.mark.parametrize("shrunk", [False, True])
def test_a_commit_on_a_dropped_base_is_refused(shrunk: bool) -> None:
    """Failure 3: the base was there at begin; another commit dropped it. S34: nor does any other take its place."""
    two = tombstone_of(C2) if shrunk else C2
    with pytest.raises(BaseMoved):
        plan(log_of(C1, two, record(3, day(5), None, {1: None, 3: None})), mine(day(3), 2, 2))
    for other in (1, 99):
        with pytest.raises(BaseMoved, match=f"started from checkpoint {other}"):
            plan(log_of(C1, C2), mine(day(3), other, 2))


def test_a_commit_is_accepted_if_its_base_was_consolidated_meanwhile() -> None:
    log = log_of(C1, C2, record(3, day(2), 2, kind="consolidate", reproduces=2))
    assert isinstance(plan(log, mine(day(3), 2, 2)), Create)


def test_permissions_cover_what_was_stale_at_begin_and_no_more() -> None:
    log = log_of(C1, C2, record(3, day(1), None, {1: 3, 2: 3, 3: None}))
    allowed = Permissions(allow_stale_base=True)
    assert isinstance(plan(log, mine(day(3), 2, 3, permissions=allowed)), Create)
    with pytest.raises(BaseMoved):
        plan(log, mine(day(3), 2, 2, permissions=allowed))


def test_commit_decisions_do_not_depend_on_records_shrunk_to_tombstones() -> None:
    head = record(3, day(3), 2, {3: None})
    for interval, base_id, h0 in ((day(4), 3, 3), (day(1), None, 3)):
        whole = plan(log_of(C1, C2, head), mine(interval, base_id, h0))
        assert whole == plan(log_of(tombstone_of(C1), tombstone_of(C2), head), mine(interval, base_id, h0))


def test_a_commit_on_a_dropped_base_is_refused_even_if_its_consolidation_is_retained() -> None:
    """The attempt shares files that the consolidation does not: they are deleted with the dropped base."""
    consolidated = record(3, day(2), 2, {1: None, 3: None}, kind="consolidate", reproduces=2)
    with pytest.raises(BaseMoved):
        plan(log_of(C1, tombstone_of(C2), consolidated), mine(day(3), 2, 2))


@pytest.mark.parametrize("kind", ["restore", "consolidate"])
def test_a_rewind_and_a_consolidation_can_be_committed(kind: str) -> None:
    """An interval that runs meanwhile may still restore the base, so this commit does not drop the base."""
    prepared = mine(day(2), 2, 3, kind=kind, digest=C2.content.digest)
    made = plan(log_of(C1, C2, C3), prepared)
    assert isinstance(made, Create)
    assert [r.id for r in made.record.retained] == [1, 2, 3, 4]


def test_a_log_that_lost_its_end_takes_no_commit() -> None:
    """The attempt saw checkpoint 2; a copy of the log that lacks it is put back meanwhile."""
    with pytest.raises(CorruptRecord) as raised:
        plan(log_of(C1), mine(day(3), 2, 2))
    assert "00000000000000000002.json is missing" in str(raised.value)
    assert "Nothing is committed. Put the record back from a backup" in str(raised.value)


@pytest.mark.parametrize("kind", ["restore", "consolidate"])
@pytest.mark.parametrize("refused", [1, 2])
def test_what_was_quarantined_meanwhile_is_neither_restored_nor_consolidated(kind: str, refused: int) -> None:
    """The base itself, or an ancestor of the base."""
    log = log_of(C1, C2, quarantined={refused: Quarantine(id=refused, reason="a test says so")})
    with pytest.raises(BaseMoved, match=r"checkpoint 2 has been quarantined since this attempt began\nChoose a usable"):
        plan(log, mine(day(2), 2, 2, kind=kind))


def test_what_became_stale_meanwhile_is_not_restored() -> None:
    log = log_of(C1, C2, record(3, day(1), None, {1: 3, 2: 3, 3: None}))
    with pytest.raises(BaseMoved, match="checkpoint 3 has made checkpoint 2 stale since this attempt began"):
        plan(log, mine(day(2), 2, 2, kind="restore"))


def test_a_consolidation_of_a_stale_checkpoint_is_stale() -> None:
    log = log_of(C1, C2, record(3, day(1), None, {1: 3, 2: 3, 3: None}))
    made = plan(log, mine(day(2), 2, 3, kind="consolidate", digest=C2.content.digest))
    assert isinstance(made, Create)
    assert {r.id: r.stale_by for r in made.record.retained}[4] == 3


def test_nothing_is_committed_while_a_checkpoint_is_being_released() -> None:
    again = record(3, day(2), 1, {1: None, 2: None, 3: None}, digest=C3.content.digest)
    mark = Quarantine(id=3, reason="a test says so", releasing=True)
    log = log_of(C1, C2, again, quarantined={3: mark})
    with pytest.raises(StorageUnavailable, match=r"To finish it, run:\ncairn quarantine 3 --release"):
        plan(log, mine(day(3), 2, 3))
    assert plan(log, mine(day(2), 1, 1, attempt="a2")) == AlreadyCommitted(id=2)
    waits = log_of(C1, C2, again, quarantined={3: Quarantine(id=3, reason="a test says so")})
    assert isinstance(plan(waits, mine(day(3), 2, 3)), Create)


@pytest.mark.parametrize("retained", [{1: None, 2: None, 3: None, 4: None}, {4: None}])
@pytest.mark.parametrize("shrunk", [False, True])
def test_a_commit_with_permission_does_not_inherit_the_quarantine_of_its_base(
    shrunk: bool, retained: dict[int, int | None]
) -> None:
    three: Entry = record(3, day(3), 2, permissions=Permissions(allow_quarantined=True))
    three = tombstone_of(three) if shrunk and isinstance(three, Record) else three
    log = log_of(C1, C2, three, record(4, day(4), 3, retained), quarantined={2: Quarantine(id=2, reason="wrong")})
    assert [log.quarantine_above(n) for n in (2, 3, 4)] == [2, None, None]


@pytest.mark.parametrize(
    ("later", "retained", "quarantined", "without", "hidden"),
    [
        ((), {1: None, 2: None, 3: None}, {3}, None, None),
        ((4, day(3), 2), {1: None, 2: None, 3: None, 4: None}, {3}, 4, None),
        ((4, day(3), 3), {1: None, 2: None, 3: None, 4: None}, {3}, None, None),  # descends from 3
        ((4, day(3), 2), {1: None, 2: None, 3: None, 4: None}, {3, 4}, None, None),
        ((4, day(3), 2), {1: None, 2: None, 3: None, 4: 9}, {3}, None, None),  # stale anyway
        ((4, day(2), 1), {1: None, 2: None, 3: None, 4: None}, {3}, None, None),  # day 2 was run again
        ((4, day(1), None), {2: None, 4: None}, {3}, None, 2),
        ((4, day(1), None), {2: None, 4: None}, {2, 3}, None, None),
        ((4, day(1), None), {4: None}, {3}, None, None),
    ],
)
def test_release_checks_find_results_computed_without_or_hidden_by_the_checkpoint(
    later: Any, retained: dict[int, int | None], quarantined: set[int], without: int | None, hidden: int | None
) -> None:
    """Checkpoint 3 is a second result of day 2. It is quarantined, and may be dropped."""
    entries = [C1, C2, record(3, day(2), 1, {1: None, 2: None, 3: None})]
    entries += [record(*later, retained)] if later else []
    log = log_of(*entries, quarantined={n: Quarantine(id=n, reason="a test says so") for n in quarantined})
    assert (computed_without(log, 3), hidden_by_release(log, 3)) == (without, hidden)
