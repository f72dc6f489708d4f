"""Retention is pure and composes; what is protected stays."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from state_backend.checkpoint.plan_retention import DEFAULT_POLICY, plan_retention, with_retention
from state_backend.values.errors import UsageError
from state_backend.values.intervals import Interval
from state_backend.values.marks import Quarantine
from state_backend.values.records import Record, Retained
from state_backend.values.retention import (
    AllOf,
    AnyOf,
    KeepLast,
    KeepPerDay,
    KeepQuarantined,
    KeepYounger,
    RetentionPolicy,
    default_retention,
    quarantined_days,
)
from tests.support.checkpoints import PIPELINE, START, Folder, content, day, record
from tests.support.coordinator import Coordinator
from tests.support.counting import counting
from tests.support.log_in_memory import log_in_memory


def ids(retained: tuple[Retained, ...]) -> list[int]:
    return [r.id for r in retained]


def days(n: int) -> list[Record]:
    return [record(i, day(i), i - 1 or None) for i in range(1, n + 1)]


def hours(n: int) -> list[Record]:
    """Each retains itself alone: no policy asks what a record retains, and a list of all before would make this quadratic."""
    hour = timedelta(hours=1)
    return [record(i, Interval(START + (i - 1) * hour, START + i * hour), None, {i: None}) for i in range(1, n + 1)]


# Day 1 is run again behind day 5.
RERUN = [*days(5), record(6, day(1))]


@pytest.mark.parametrize(
    ("policy", "records", "kept"),
    [
        (KeepLast(1), days(5), {5}),
        (KeepLast(3), days(5), {3, 4, 5}),
        (KeepLast(9), days(5), {1, 2, 3, 4, 5}),
        # The hour that ends at midnight is the day's last.
        (KeepPerDay(35), hours(72), {24, 48, 72}),
        (KeepPerDay(35), hours(60), {24, 48, 60}),
        # By the interval, and of one interval by the newest.
        (KeepPerDay(35), [*hours(72), *(record(n, hours(of)[-1].content.interval) for n, of in ((73, 24), (74, 5)))], {73, 48, 72}),
        # Time is logical, and counts from the latest end: a backfill of an old day expires nothing.
        (KeepPerDay(3), days(10), {8, 9, 10}),
        (KeepPerDay(3), [*days(10), record(11, day(1))], {8, 9, 10}),
        (KeepYounger(timedelta(days=3)), RERUN, {3, 4, 5}),
        (KeepYounger(timedelta(days=3)), [], set()),
        (AnyOf((KeepLast(1), KeepPerDay(2))), RERUN, {4, 5, 6}),
        (AnyOf(()), days(3), set()),
        (AllOf((KeepLast(4), KeepYounger(timedelta(days=2)))), RERUN, {4, 5}),
        (AllOf((AnyOf((KeepLast(1), KeepPerDay(2))), KeepYounger(timedelta(days=9)))), RERUN, {4, 5, 6}),
        (AnyOf((AllOf((KeepLast(2), KeepPerDay(2))), KeepLast(1))), RERUN, {5, 6}),
        (AllOf(()), RERUN, {1, 2, 3, 4, 5, 6}),
    ],
)  # fmt: skip
def test_policies_keep_by_count_per_day_and_age(policy: RetentionPolicy, records: list[Record], kept: set[int]) -> None:
    """F46, F48."""
    assert policy.keep(records) == kept


def test_the_default_keeps_all_of_two_days_and_the_last_checkpoint_of_each_of_35_days() -> None:
    assert DEFAULT_POLICY.keep(days(50)) == set(range(16, 51))
    hourly = default_retention(timedelta(hours=1))
    assert hourly.keep(hours(24 * 40)) == {*range(24 * 6, 24 * 41, 24), *range(24 * 38 + 1, 24 * 40 + 1)}
    assert default_retention(timedelta(minutes=1)) == AnyOf(
        (KeepLast(10), KeepYounger(timedelta(minutes=300)), KeepPerDay(35))
    )


def held(retention: RetentionPolicy, every: timedelta) -> list[int]:
    """How many intervals each retained checkpoint lies behind the newest one: at the midnight from which on the kept set repeats."""
    kept: list[Any] = []
    found: list[int] | None = None
    for n in range(1, 100_000):
        kept.append(SimpleNamespace(id=n, interval=Interval(START + (n - 1) * every, START + n * every)))
        chosen = retention.keep(kept)
        kept = [checkpoint for checkpoint in kept if checkpoint.id in chosen or checkpoint.id == n]
        if n * every % timedelta(days=1) == timedelta(0):
            before, found = found, [n - checkpoint.id for checkpoint in kept]
            if found == before:
                return found
    raise AssertionError(f"{retention} grows without end")


@pytest.mark.parametrize(
    ("retention", "every", "expected"),
    [
        (KeepLast(3), 24, (3, 1, 1)),
        (KeepYounger(timedelta(days=3)), 24, (3, 1, 1)),
        (AllOf((KeepLast(9), KeepPerDay(2))), 1, (2, 24, 2)),
        (KeepPerDay(3), 1, (3, 24, 3)),
        (AnyOf((KeepLast(2), KeepPerDay(2))), 1, (3, 23, 2)),
        # As docs/cost.md says.
        (default_retention(timedelta(hours=1)), 1, (81, 24, 33)),
        (default_retention(timedelta(days=1)), 24, (35, 1, 1)),
    ],
)
@pytest.mark.long("half a second", runs_in="ci")
def test_policy_retains_expected_counts(retention: RetentionPolicy, every: int, expected: tuple[int, int, int]) -> None:
    """Checkpoints, the widest gap, and those that have lost their base: the checkpoint of the interval before them."""
    behind = held(retention, timedelta(hours=every))
    gaps = [older - newer for older, newer in pairwise(behind)]
    assert (len(behind), max(gaps, default=0), 1 + sum(gap > 1 for gap in gaps)) == expected


@pytest.mark.parametrize("past", [1, 34])
def test_a_past_day_of_an_hourly_pipeline_can_be_run_again_hour_by_hour(past: int) -> None:
    """The state at its start is retained, and what each hour leaves is retained until the next one has started from it."""
    policy, before = default_retention(timedelta(hours=1)), hours(24 * 40 + 7)
    kept = policy.keep(before)
    held = [r for r in before if r.id in kept]
    first = 24 * (40 - past)
    for n, hour in enumerate(before[first : first + 24]):
        base = [r for r in held if r.content.interval.end == hour.content.interval.start]
        assert base, f"hour {n} of the day {past} days ago has no base"
        new = record(len(before) + 1 + n, hour.content.interval, None, {})
        kept = policy.keep([*held, new])
        held = [*(r for r in held if r.id in kept), new]


def test_a_policy_is_described_in_words() -> None:
    assert str(default_retention(timedelta(hours=1))) == (
        "the last 10 checkpoints and all of the last 2 days and the last one of each day for 35 days"
    )
    assert str(AllOf((KeepLast(3), KeepYounger(timedelta(hours=6))))) == (
        "the last 3 checkpoints that are also all of the last 6 hours"
    )


def test_the_new_checkpoint_is_retained_under_every_policy() -> None:
    """F45: at least one checkpoint is retained."""
    log = log_in_memory(entries={r.id: r for r in days(3)})
    assert ids(plan_retention(log, record(4, day(4), 3), {}, AnyOf(()))) == [4]


def test_a_re_run_of_an_old_interval_keeps_the_newest_state_and_the_checkpoint_of_the_latest_interval() -> None:
    log = log_in_memory(entries={r.id: r for r in days(3)})
    assert ids(plan_retention(log, record(4, day(1)), {3: 4}, AnyOf(()))) == [2, 3, 4]


def test_protected_checkpoints_are_retained() -> None:
    log = log_in_memory(entries={r.id: r for r in days(3)})
    assert ids(plan_retention(log, record(4, day(4), 3), {}, KeepLast(1), frozenset({2, 99}))) == [2, 4]


def test_quarantined_checkpoints_and_their_descendants_do_not_count_for_keep_last() -> None:
    log = log_in_memory(entries={r.id: r for r in days(5)}, quarantined={4: Quarantine(id=4, reason="wrong")})
    kept = ids(plan_retention(log, record(6, day(4), 3), {}, KeepLast(3)))
    assert [i for i in kept if i not in (4, 5)] == [2, 3, 6]


@pytest.mark.parametrize("refused", range(1, 6))
def test_a_quarantine_reaches_all_descendants_and_no_one_else(refused: int) -> None:
    """5 is a re-run of day 3 from 2: it descends from 1 and 2, not from 3 and 4. What is refused is dropped, unless it is the new
    one or protected."""
    records = [*days(4), record(5, day(3), 2)]
    log = log_in_memory(
        entries={r.id: r for r in records}, quarantined={refused: Quarantine(id=refused, reason="wrong")}
    )
    ancestors = {1: {1}, 2: {1, 2}, 3: {1, 2, 3}, 4: {1, 2, 3, 4}, 5: {1, 2, 5}}
    usable = {n for n in ancestors if refused not in ancestors[n]}
    assert {n for n in ancestors if log.quarantine_above(n) is None} == usable
    new = record(6, day(1))
    assert set(ids(plan_retention(log, new, {}, KeepLast(9)))) == usable | {6}
    assert set(ids(plan_retention(log, new, {}, KeepLast(9), frozenset({refused})))) == usable | {6, refused}


def test_a_dropped_checkpoint_never_comes_back() -> None:
    entries = {r.id: r for r in days(3)}
    entries[3] = replace(entries[3], retained=(Retained(id=2, stale_by=None), Retained(id=3, stale_by=None)))
    assert ids(plan_retention(log_in_memory(entries=entries), record(4, day(4), 3), {}, KeepLast(9))) == [2, 3, 4]


def test_new_stale_marks_are_added_and_existing_stale_marks_are_kept() -> None:
    entries = {r.id: r for r in days(3)}
    entries[3] = replace(entries[3], retained=tuple(Retained(id=i, stale_by=3 if i == 1 else None) for i in (1, 2, 3)))
    kept = plan_retention(log_in_memory(entries=entries), record(4, day(1)), {1: 4, 2: 4}, KeepLast(9))
    assert {r.id: r.stale_by for r in kept} == {1: 3, 2: 4, 3: None, 4: None}


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 12))
def test_retained_ids_are_sorted_bounded_and_include_the_new_checkpoint(n: int, last: int, per_day: int) -> None:
    log = log_in_memory(entries={r.id: r for r in days(n)})
    kept = ids(plan_retention(log, record(n + 1, day(n + 1), n), {}, AnyOf((KeepLast(last), KeepPerDay(per_day)))))
    assert kept == sorted(set(kept))
    assert kept[-1] == n + 1
    assert len(kept) <= last + per_day


def test_keep_quarantined_is_refused_inside_all_of() -> None:
    with pytest.raises(UsageError, match="KeepQuarantined is not about usable checkpoints, so it belongs in AnyOf"):
        AllOf((KeepLast(3), KeepQuarantined(7)))


def test_the_largest_keep_quarantined_of_a_policy_counts() -> None:
    policy = AnyOf((KeepQuarantined(3), AnyOf((KeepLast(1), KeepQuarantined(7))), KeepQuarantined(0)))
    assert (quarantined_days(policy), quarantined_days(KeepLast(1))) == (7, 14)


@pytest.mark.parametrize(
    "make",
    [
        lambda: KeepLast(-1),
        lambda: KeepLast(True),
        lambda: KeepLast("3"),  # type: ignore[arg-type]
        lambda: KeepPerDay(1.5),  # type: ignore[arg-type]
        lambda: KeepPerDay(10**9),
        lambda: KeepYounger(3),  # type: ignore[arg-type]
        lambda: KeepYounger(timedelta(seconds=-1)),
        lambda: KeepYounger(timedelta.max),
        lambda: AnyOf([KeepLast(1)]),  # type: ignore[arg-type]
        lambda: AllOf((KeepLast(1), 5)),  # type: ignore[arg-type]
        lambda: AnyOf(KeepLast(1)),  # type: ignore[arg-type]
        lambda: counting(retention=10),
        lambda: counting(retention=()),
    ],
)
def test_policy_arguments_of_wrong_type_or_range_are_refused(make: Any) -> None:
    with pytest.raises(UsageError, match="expected"):
        make()


@pytest.mark.parametrize("kind", ["interval", "restore", "consolidate"])
@pytest.mark.parametrize("own", [None, KeepLast(1)])
@pytest.mark.parametrize("newest", [None, KeepLast(2)])
def test_an_interval_uses_its_own_policy_and_other_commits_use_the_newest_record(
    newest: RetentionPolicy | None, own: RetentionPolicy | None, kind: Any
) -> None:
    """A rewind takes its content from an older record, whose policy no longer holds."""
    older = [record(1, day(1), retention=KeepLast(9)), record(2, day(2), 1, retention=newest)]
    log = log_in_memory(entries={r.id: r for r in older})
    expected = (own or newest) if kind == "interval" else (newest or own)
    made = with_retention(log, content(day(3), "a3", 2, kind=kind, retention=own))
    assert made.retention == (expected or DEFAULT_POLICY)
    assert replace(made, retention=own) == content(day(3), "a3", 2, kind=kind, retention=own)


def test_a_commit_without_a_given_policy_uses_the_recorded_policy() -> None:
    """The coordinator of an Airflow task knows no pipeline. An attempt that an older version prepared has no policy."""
    folder = Folder()
    kept = []
    for n, policy in enumerate([None, None, KeepLast(3), None, KeepLast(1), None, AnyOf((KeepLast(2),))], 1):
        folder.prepare(day(n), f"a{n}", retention=policy)
        made = Coordinator(folder.storage, PIPELINE).commit(f"a{n}").record
        assert made is not None
        kept.append((len(made.retained), made.content.retention))
    one, two, three = KeepLast(1), AnyOf((KeepLast(2),)), KeepLast(3)
    assert kept == [(1, DEFAULT_POLICY), (2, DEFAULT_POLICY), (3, three), (3, three), (1, one), (1, one), (2, two)]
    folder.prepare(day(8), "a8", retention=KeepLast(9))
    given = Coordinator(folder.storage, PIPELINE, policy=KeepLast(1)).commit("a8").record
    assert given is not None and [r.id for r in given.retained] == [8]
