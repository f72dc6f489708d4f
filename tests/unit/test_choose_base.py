"""Section 6: which state an interval starts from, and what a commit makes stale."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest

from state_backend.checkpoint.choose_base import choose_base, reproduces, stale_marks
from state_backend.checkpoint.clean_up_dropped import tombstone_of
from state_backend.checkpoint.dropped_checkpoint import explain_drop
from state_backend.checkpoint.interval_results import last_restore
from state_backend.checkpoint.log import Fact, Log
from state_backend.values.errors import CorruptRecord, Rerun, StaleStateError, StateGapError, StateUnusable, UsageError
from state_backend.values.intervals import Interval, format_instant
from state_backend.values.marks import Quarantine
from state_backend.values.records import Permissions, Record
from tests.support.checkpoints import DAY, PIPELINE, content, day, record, start_ms
from tests.support.log_in_memory import log_in_memory
from tests.support.schema_json import array, field, struct_of

GAP = Permissions(allow_gap=True)
STALE = Permissions(allow_stale_base=True)


def log_of(*records: Record, quarantined: tuple[int, ...] = (), dropped: tuple[int, ...] = ()) -> Log:
    entries = {r.id: tombstone_of(r) if r.id in dropped else r for r in records}
    return log_in_memory(entries=entries, quarantined={i: Quarantine(id=i, reason="wrong") for i in quarantined})


def base_id(log: Log, interval: Interval, permissions: Permissions = Permissions(), **options: Any) -> int | None:  # noqa: B008
    base = choose_base(log, PIPELINE, interval, permissions, start_ms(), **options)
    return None if base is None else base.id


DAYS_1_TO_3 = (record(1, day(1)), record(2, day(2), 1), record(3, day(3), 2))
# Day 1 is run again as 4, with another result.
RERUN = (*DAYS_1_TO_3, record(4, day(1), None, {1: 4, 2: 4, 3: 4, 4: None}))


@pytest.mark.parametrize(
    ("log", "n", "expected"),
    [
        # The first interval starts empty, always.
        (log_in_memory(entries={}), 1, None),
        *((log_of(*DAYS_1_TO_3), n, n - 1 or None) for n in (1, 2, 3, 4)),
        # Of several possible bases, the highest id is chosen; a quarantined re-run gives way to what was before.
        (log_of(*DAYS_1_TO_3, record(4, day(1), digest=DAYS_1_TO_3[0].content.digest)), 2, 4),
        (log_of(record(1, day(1)), record(2, day(1)), quarantined=(2,)), 2, 1),
        # A base may belong to an interval of another length.
        (log_of(record(1, Interval(day(1).start, day(3).end))), 4, 1),
    ],
)
def test_the_base_ends_where_the_interval_starts(log: Log, n: int, expected: int | None) -> None:
    assert base_id(log, day(n)) == expected


def test_an_interval_before_the_start_is_refused() -> None:
    with pytest.raises(UsageError, match="begins before the pipeline's start, 2024-01-01T00:00:00Z"):
        base_id(log_of(*DAYS_1_TO_3), day(0))


@pytest.mark.parametrize(
    ("asked", "quarantined", "expected"),
    [
        (3, (), None),
        (7, (), None),
        (1, (), "Usable checkpoints: 2 (to 2024-01-03T00:00:00Z), 3 (to 2024-01-04T00:00:00Z)"),
        (1, (3,), "Usable checkpoints: 2 (to 2024-01-03T00:00:00Z)"),
        (1, (2,), "Usable checkpoints: none"),
    ],
)
@pytest.mark.parametrize("shrunk", [(), (1,)])
def test_the_error_for_a_dropped_checkpoint_lists_the_usable_checkpoints(
    asked: int, quarantined: tuple[int, ...], expected: str | None, shrunk: tuple[int, ...]
) -> None:
    kept = replace(DAYS_1_TO_3[2], retained=DAYS_1_TO_3[2].retained[1:])
    log = log_of(*DAYS_1_TO_3[:2], kept, quarantined=quarantined, dropped=shrunk)
    dropped = (
        "checkpoint 1, the state at 2024-01-02T00:00:00Z, is no longer retained: retention dropped it and its files."
    )
    assert explain_drop(log, asked) == (None if expected is None else f"{dropped}\n{expected}")


@pytest.mark.parametrize(
    ("log", "permissions", "first"),
    [
        (log_of(*DAYS_1_TO_3), Permissions(), 4),
        (log_of(*DAYS_1_TO_3, quarantined=(3,)), Permissions(), 3),
        (log_of(*DAYS_1_TO_3, quarantined=(2,)), Permissions(), 2),  # 3 descends from 2
        (log_of(*RERUN), Permissions(), 2),  # 2 and 3 are stale
        (log_of(*RERUN), STALE, 4),
        (log_of(*DAYS_1_TO_3, quarantined=(1,)), Permissions(), 1),  # the first interval starts from nothing
    ],
)
def test_the_gap_error_proposes_a_rerun_from_the_nearest_usable_checkpoint(
    log: Log, permissions: Permissions, first: int
) -> None:
    with pytest.raises(StateGapError) as raised:
        base_id(log, day(7), permissions)
    assert raised.value.rerun == Rerun(first=day(first).start, last=day(6).start)
    none = "All checkpoints are quarantined or stale. Begin at the pipeline's start, 2024-01-01T00:00:00Z."
    nearest = f"The nearest usable checkpoints end at {format_instant(day(first).start)}."
    assert (none if first == 1 else nearest) in str(raised.value)
    again = f"run the intervals that start from {format_instant(day(first).start)} to 2024-01-06T00:00:00Z"
    assert again in str(raised.value)


@pytest.mark.parametrize(
    ("start", "end", "last"),
    [
        ("2024-01-04T06:00", "2024-01-05T06:00", None),  # a day from six to six: none fits before it
        ("2024-01-04T05:00", "2024-01-04T06:00", "2024-01-04T04:00"),  # hours, after days
        ("2024-01-06T23:00", "2024-01-07T23:00", "2024-01-06T22:59:59"),  # the day before had 23 hours
        ("2024-01-06T01:00", "2024-01-07T01:00", "2024-01-06T00:59:59"),  # or 25
    ],
)
def test_the_gap_error_of_an_unaligned_interval_proposes_no_reversed_range(
    start: str, end: str, last: str | None
) -> None:
    off = Interval(*(datetime.fromisoformat(f"{text}+00:00") for text in (start, end)))
    with pytest.raises(StateGapError) as raised:
        base_id(log_of(*DAYS_1_TO_3), off)
    if last is None:
        assert raised.value.rerun is None
        assert "Run the interval that starts at 2024-01-04T00:00:00Z" in str(raised.value)
    else:
        assert raised.value.rerun == Rerun(first=day(4).start, last=datetime.fromisoformat(f"{last}+00:00"))


def test_allow_gap_takes_the_latest_end_then_the_highest_id() -> None:
    same = [record(n, day(m), m - 1, digest=DAYS_1_TO_3[m - 1].content.digest) for n, m in ((4, 3), (5, 2))]
    assert base_id(log_of(*DAYS_1_TO_3, *same), day(9), GAP) == 4
    # It passes over stale checkpoints.
    stale = record(4, day(2), 1, {1: None, 2: 4, 3: 4, 4: None})
    assert base_id(log_of(*DAYS_1_TO_3, stale), day(9), GAP) == 4
    with pytest.raises(StateGapError):
        base_id(log_of(record(1, day(5))), day(3), GAP)


def test_allow_gap_passes_over_a_quarantined_checkpoint() -> None:
    log = log_of(*DAYS_1_TO_3, quarantined=(3,))
    with pytest.raises(StateUnusable):
        base_id(log, day(4))
    assert base_id(log, day(4), GAP) == 2
    assert base_id(log_of(*DAYS_1_TO_3, record(4, day(3), 2), quarantined=(4,)), day(4), GAP) == 3
    # Checkpoint 3 descends from the quarantined one.
    assert base_id(log_of(*DAYS_1_TO_3, quarantined=(2,)), day(4), GAP) == 1
    with pytest.raises(StateUnusable):
        base_id(log_of(*DAYS_1_TO_3, quarantined=(1,)), day(4), GAP)
    # A stale checkpoint is no gap.
    stale = log_of(*DAYS_1_TO_3, record(4, day(2), 1, {1: None, 2: 4, 3: 4, 4: None}))
    with pytest.raises(StaleStateError):
        base_id(stale, day(4), GAP)


@pytest.mark.parametrize(
    ("log", "n", "error", "says", "again"),
    [
        (
            *(log_in_memory(entries={}), 3, StateGapError),
            *(r"has no checkpoint\. Begin at the pipeline's start, 2024-01-01T00:00:00Z\.", (1, 2)),
        ),
        # A dropped base is a gap. A superseded result does not come back when the later one is dropped.
        (
            log_of(*DAYS_1_TO_3[:2], record(3, day(3), 2, {2: None, 3: None}), dropped=(1,)),
            *(
                2,
                StateGapError,
                r"The earliest ends at 2024-01-03T00:00:00Z.\nRestore an older savepoint",
                (1, 2, True),
            ),
        ),
        (
            log_of(record(1, day(1)), record(2, day(1)), record(3, day(2), 2, {1: None, 3: None}), dropped=(2,)),
            *(2, StateGapError, "The earliest ends at 2024-01-03T00:00:00Z", (1, 2, True)),
        ),
        (log_of(*RERUN), 4, StaleStateError, "checkpoint 3", (2, 3)),
        # A quarantined ancestor; ancestors are read from tombstones too.
        *((log_of(*DAYS_1_TO_3, quarantined=(n,)), 4, StateUnusable, "quarantined", (n, 3)) for n in (1, 2, 3)),
        (
            log_of(*DAYS_1_TO_3[:2], record(3, day(3), 2, {3: None}), quarantined=(1,), dropped=(1, 2)),
            *(4, StateUnusable, "quarantined", (1, 3)),
        ),
    ],
)
def test_an_interval_without_a_usable_base_is_refused_with_what_to_run_again(
    log: Log, n: int, error: type[StateUnusable], says: str, again: Sequence[int]
) -> None:
    with pytest.raises(error, match=says) as raised:
        base_id(log, day(n))
    first, last, *valid = again
    assert raised.value.rerun == Rerun(first=day(first).start, last=day(last).start, though_valid=bool(valid))


def test_allow_stale_base_covers_what_was_stale_at_begin_and_no_more() -> None:
    assert base_id(log_of(*RERUN), day(4), STALE) == 3
    assert base_id(log_of(*RERUN), day(4), STALE, as_of=4) == 3
    with pytest.raises(StaleStateError):
        base_id(log_of(*RERUN), day(4), STALE, as_of=3)


@pytest.mark.parametrize("what", ["digest", "watermark", "late watermark", "descriptors", "key", "interval"])
def test_a_result_with_any_difference_is_no_reproduction(what: str) -> None:
    same = content(day(2), "b", 1, digest=DAYS_1_TO_3[1].content.digest)
    different = {
        "digest": replace(same, digest=same.digest ^ 1),
        "watermark": replace(same, time=replace(same.time, watermark_ms=0)),
        "late watermark": replace(same, time=replace(same.time, late_watermark_ms=0)),
        "descriptors": replace(same, states=()),
        "key": replace(same, key_schema=key_schema("long")),
        "interval": replace(same, interval=Interval(day(2).start, day(2).end + DAY)),
    }[what]
    assert reproduces(log_of(*DAYS_1_TO_3), different) is None


def key_schema(data_type: Any, nullable: bool = True, **metadata: str) -> dict[str, Any]:
    return struct_of(field("k", data_type, nullable, **metadata))


PLAIN_KEY = key_schema(array("string", True))


@pytest.mark.parametrize("before", ["whole", "a tombstone"])
@pytest.mark.parametrize(
    ("key", "same"),
    [
        (PLAIN_KEY, True),
        (key_schema(array("string", False)), True),
        (key_schema(array("string", True), nullable=False), True),
        (key_schema(array("string", True), comment="who"), True),
        (key_schema(array("long", True)), False),
    ],
)
def test_a_comment_or_not_null_on_the_key_is_no_other_result(before: str, key: dict[str, Any], same: bool) -> None:
    """Day 2 is run again by a source that says the same of its key in other words."""
    first, second = record(1, day(1)), record(2, day(2), 1, key_schema=PLAIN_KEY)
    dropped = (2,) if before == "a tombstone" else ()
    again = content(day(2), "b", 1, digest=second.content.digest, key_schema=key)
    newest = record(3, day(5), None, {1: None, 3: None})
    assert reproduces(log_of(first, second, newest, dropped=dropped), again) == (2 if same else None)
    # Where the later of the two was dropped, the earlier one is a base still.
    third = record(3, day(2), 1, digest=again.digest, key_schema=key)
    log = log_of(first, second, third, record(4, day(1), None, {1: None, 2: None, 4: None}), dropped=(3,))
    if same:
        assert base_id(log, day(3)) == 2
    else:
        with pytest.raises(StateGapError):
            base_id(log, day(3))


def test_a_result_is_compared_with_the_last_result_of_its_interval_even_if_dropped() -> None:
    """Going back to the result before the last one is a change, even if the last one has been dropped."""
    first = record(1, day(1))
    log = log_of(first, record(2, day(1)), record(3, day(2), 2, {1: None, 3: None}), dropped=(2,))
    assert reproduces(log, content(day(1), "b", digest=first.content.digest)) is None


@pytest.mark.parametrize(("quarantined", "same"), [((), True), ((2,), False), ((1, 2), True)])
def test_a_result_is_compared_with_what_later_intervals_started_from(quarantined: tuple[int, ...], same: bool) -> None:
    """Day 2 starts from the first result of day 1, since the second one is quarantined. Then day 1 runs a third time."""
    log = log_of(record(1, day(1)), record(2, day(1)), record(3, day(2), 1), quarantined=quarantined)
    again = content(day(1), "b", digest=log.whole(2).content.digest)
    assert reproduces(log, again) == (2 if same else None)


@pytest.mark.parametrize(("then", "restored"), [("forget", 3), ("consolidate", 3), ("interval", None)])
def test_a_restore_stays_current_until_an_interval_replaces_its_state(then: Any, restored: int | None) -> None:
    log = log_of(
        record(1, day(1)), record(2, day(2), 1), record(3, day(2), 2, kind="restore"), record(4, day(2), 3, kind=then)
    )
    found = last_restore(log, [Fact(kept.interval, kept.id, kept.kind) for kept in log.kept])
    assert (found and found.id) == restored


@pytest.mark.parametrize(("kind", "base", "found"), [("interval", 1, 2), ("restore", 2, None), ("consolidate", 2, 2)])
def test_an_equal_result_is_a_reproduction_unless_it_is_a_rewind(kind: Any, base: int, found: int | None) -> None:
    again = content(day(2), "b", base, digest=DAYS_1_TO_3[1].content.digest, kind=kind)
    assert reproduces(log_of(*DAYS_1_TO_3), again) == found


@pytest.mark.parametrize(
    ("records", "interval", "stale"),
    [
        (DAYS_1_TO_3, day(1), {2, 3}),
        (DAYS_1_TO_3, day(2), {3}),
        (DAYS_1_TO_3, day(3), set()),
        (DAYS_1_TO_3, day(4), set()),
        # An overlapping interval.
        (DAYS_1_TO_3, Interval(day(2).start + DAY / 2, day(3).end), {2, 3}),
        # What is stale already gets no new mark.
        (RERUN, day(1), set()),
    ],
)
def test_a_commit_makes_stale_what_lies_after_its_start(
    records: tuple[Record, ...], interval: Interval, stale: set[int]
) -> None:
    """For other intervals than its own: what was the same interval is superseded. If its own were marked too, a quarantined re-run
    would leave nothing to go back to."""
    assert stale_marks(log_of(*records), content(interval, "b"), 5) == dict.fromkeys(stale, 5)


@pytest.mark.parametrize(
    ("log", "ask", "says"),
    [
        (log_of(*DAYS_1_TO_3, dropped=(3,)), lambda log: log.retained, "4.json is missing: .*3.json is a tombstone"),
        (
            log_of(*DAYS_1_TO_3, dropped=(2,)),
            lambda log: log.completed(),
            "2.json does not contain a whole record, but the newest",
        ),
        (
            log_of(DAYS_1_TO_3[2], quarantined=(1,)),
            lambda log: log.quarantine_above(3),
            "2.json is missing from the log: it is an ancestor of checkpoint 3",
        ),
    ],
)
def test_a_missing_record_is_reported_by_name(log: Log, ask: Callable[[Log], object], says: str) -> None:
    """Somebody deleted it, or a copy that was put back lacks it."""
    with pytest.raises(CorruptRecord, match=says) as raised:
        ask(log)
    assert re.search(r"\nPut (it|the missing record) back from a backup$", str(raised.value))
