"""Intervals that are cut otherwise than those whose output is current: refused, or they replace it in the same commit."""

from __future__ import annotations

import random
from datetime import datetime, timedelta
from itertools import pairwise
from unittest import mock
from zoneinfo import ZoneInfo

import pytest

from state_backend.checkpoint import choose_base as lineage
from state_backend.checkpoint.choose_base import overlapping_outputs
from state_backend.checkpoint.clean_up_dropped import tombstone_of
from state_backend.checkpoint.rewind import rewind
from state_backend.checkpoint.sweep_files import sweep
from state_backend.formats import paths
from state_backend.inspection import verify
from state_backend.inspection.verify import VerifiedCheckpoint
from state_backend.values.errors import Rerun, StaleStateError, StateGapError, UsageError
from state_backend.values.intervals import Interval
from state_backend.values.records import Permissions
from state_backend.values.retention import KeepLast
from tests.support.bare_pipeline import bare_pipeline
from tests.support.checkpoints import DAY, START, Folder, content, day, record, run
from tests.support.log_in_memory import log_in_memory

HOUR = timedelta(hours=1)
REPLACE = Permissions(replace_overlapping=True)
NEW_YORK = ZoneInfo("America/New_York")


def hours(n: int, first: int = 0, last: int = 24) -> list[Interval]:
    """Those of the n-th day, from 1."""
    return [Interval(day(n).start + h * HOUR, day(n).start + (h + 1) * HOUR) for h in range(first, last)]


def halves(n: int) -> tuple[Interval, Interval]:
    noon = day(n).start + DAY / 2
    return Interval(day(n).start, noon), Interval(noon, day(n).end)


def current(folder: Folder) -> list[Interval]:
    return sorted(folder.coordinator.log().current_outputs())


AM, PM = halves(1)
TWO_DAYS = Interval(day(1).start, day(2).end)
LATE = Interval(PM.start, day(2).start + DAY / 2)

FOLDS: list[tuple[list[tuple[Interval, bool]], list[tuple[Interval, int]]]] = [
    ([(day(1), False), (day(2), True)], [(day(1), 1), (day(2), 2)]),  # they touch
    ([(day(1), False), (day(1), True)], [(day(1), 2)]),  # the same interval
    ([(day(1), False), (AM, True)], [(AM, 2)]),
    ([(day(1), False), (AM, True), (PM, True)], [(AM, 2), (PM, 3)]),
    ([(AM, False), (PM, False), (day(1), True)], [(day(1), 3)]),
    ([(day(1), False), (day(2), False), (LATE, True)], [(LATE, 3)]),
    ([(day(1), False), (AM, True), (day(1), True)], [(day(1), 3)]),
    ([(day(1), False), (TWO_DAYS, True), (day(2), True)], [(day(2), 3)]),  # day 1 does not come back
    ([(day(1), False), (AM, False), (PM, False)], [(AM, 2), (day(1), 1), (PM, 3)]),  # of a time without this rule
]


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize(("commits", "expected"), FOLDS)
def test_the_newest_result_of_overlapping_intervals_is_current(
    commits: list[tuple[Interval, bool]], expected: list[tuple[Interval, int]], dropped: bool
) -> None:
    records = [
        record(n, interval, None, {n: None} if dropped else None, permissions=Permissions(replace_overlapping=replaces))
        for n, (interval, replaces) in enumerate(commits, start=1)
    ]
    log = log_in_memory({r.id: tombstone_of(r) if dropped and r.id < len(records) else r for r in records})
    assert [(i, n) for i, (n, _) in sorted(log.current_outputs().items())] == expected


@pytest.mark.long("half a second", runs_in="ci")
def test_current_outputs_of_random_overlapping_intervals_match_a_full_scan() -> None:
    """The fold looks only near the interval; this looks everywhere."""
    source = random.Random(7)
    for _ in range(200):
        expected: dict[Interval, int] = {}
        entries = {}
        for n in range(1, 13):
            first = source.randrange(20)
            interval = Interval(START + first * HOUR, START + (first + source.choice((1, 1, 2, 5, 12))) * HOUR)
            replaces = source.random() < 0.5
            if replaces:
                expected = {i: by for i, by in expected.items() if i == interval or not i.overlaps(interval)}
            expected[interval] = n
            entries[n] = record(n, interval, permissions=Permissions(replace_overlapping=replaces))
        log = log_in_memory(entries)
        assert {i: n for i, (n, _) in log.current_outputs().items()} == expected
        for probe in hours(1):
            found = sorted((i, n) for i, n in expected.items() if i.overlaps(probe) and i != probe)
            assert overlapping_outputs(log, probe) == found


def test_half_of_a_committed_interval_is_refused_without_replace_overlapping() -> None:
    """Three checkpoints, and one read gave every row twice."""
    folder = Folder(days=1)
    with pytest.raises(UsageError, match="output of intervals with other boundaries overlaps this interval") as refused:
        folder.run(AM, "am")
    assert "[2024-01-01T00:00:00Z, 2024-01-02T00:00:00Z) (checkpoint 1)" in str(refused.value)
    assert refused.value.rerun == Rerun(first=AM.start, last=AM.end, replace_overlapping=True)
    assert current(folder) == [day(1)]


@pytest.mark.long("half a second", runs_in="ci")
def test_an_hourly_backfill_with_replace_overlapping_replaces_a_committed_day() -> None:
    """Each hour says that it replaces. The first one takes the day away; hours that have not run yet are missing until they do."""
    folder = Folder(days=3)
    with pytest.raises(UsageError, match="replace_overlapping"):
        folder.run(hours(2)[0], "h0")
    for n, h in enumerate(hours(2)):
        folder.run(h, f"h{n}", permissions=REPLACE)
        assert current(folder) == [day(1), *hours(2)[: n + 1], day(3)]
    # The state at the day's end is that of its last hour.
    assert folder.run(day(3), "d3 again").record.content.base_id == 3 + 24  # type: ignore[union-attr]


@pytest.mark.long("half a second", runs_in="ci")
def test_a_day_replaces_its_committed_hours_only_with_replace_overlapping() -> None:
    folder = Folder(days=1, policy=KeepLast(100))
    for n, h in enumerate(hours(2)):
        folder.run(h, f"h{n}")
    with pytest.raises(UsageError, match=r"\(checkpoint 4\)\n  and 21 more"):
        folder.run(day(2), "day")
    folder.run(day(2), "day", permissions=REPLACE)
    assert current(folder) == [day(1), day(2)]


def test_the_next_day_is_refused_until_both_halves_of_a_replaced_day_have_run() -> None:
    folder = Folder(days=2)
    folder.run(halves(2)[0], "am", permissions=REPLACE)
    with pytest.raises(StaleStateError) as refused:
        folder.run(day(3), "d3")
    noon = day(2).start + 12 * HOUR
    assert refused.value.rerun == Rerun(first=noon, last=noon)
    folder.run(halves(2)[1], "pm", permissions=REPLACE)
    folder.run(day(3), "d3")


@pytest.mark.parametrize(("at", "length"), [((2024, 3, 10), 23), ((2024, 11, 3), 25)])
def test_local_days_on_which_clocks_change_do_not_overlap(at: tuple[int, int, int], length: int) -> None:
    """Local days of 23 and 25 hours touch and do not overlap. A day of UTC among them does."""
    midnights = [datetime(*at, tzinfo=NEW_YORK) + n * DAY for n in (-1, 0, 1, 2)]  # wall time
    local = [Interval(a, b) for a, b in pairwise(midnights)]
    assert (local[1].end - local[1].start) // HOUR == length
    log = log_in_memory({n: record(n, interval) for n, interval in enumerate(local, start=1)})
    assert [overlapping_outputs(log, interval) for interval in local] == [[], [], []]
    of_utc = Interval(datetime(*at, tzinfo=ZoneInfo("UTC")), datetime(*at, tzinfo=ZoneInfo("UTC")) + DAY)
    assert overlapping_outputs(log, of_utc) == [(local[0], 1), (local[1], 2)]


@pytest.mark.parametrize("hours_to_the_next_midnight", [5, 19])
def test_days_of_a_new_time_zone_follow_only_after_the_gap_has_run(hours_to_the_next_midnight: int) -> None:
    """West and east of the old one: the days begin elsewhere. Once the hours between were run, the new days follow."""
    folder = Folder(days=3)
    midnight = day(4).start + hours_to_the_next_midnight * HOUR
    with pytest.raises(UsageError, match="with other boundaries overlaps"):
        folder.run(Interval(midnight - DAY, midnight), "overlaps")
    with pytest.raises(StateGapError):
        folder.run(Interval(midnight, midnight + DAY), "leaves a gap")
    folder.run(Interval(day(4).start, midnight), "between")
    folder.run(Interval(midnight, midnight + DAY), "new")
    assert len(current(folder)) == 5


def test_a_rewind_keeps_current_output_and_its_interval_boundaries() -> None:
    folder = Folder(days=3)
    rewind(folder.coordinator.at, 1, run=run("back"), attempt="back")
    assert current(folder) == [day(1), day(2), day(3)]
    with pytest.raises(UsageError, match="with other boundaries overlaps"):
        folder.run(halves(2)[0], "am")
    folder.run(halves(2)[0], "am", permissions=REPLACE)
    assert current(folder) == [day(1), halves(2)[0], day(3)]


def test_the_last_intact_checkpoint_is_found_despite_overlapping_output() -> None:
    folder = Folder(days=3)
    damaged = content(halves(3)[1], "x")
    sound = VerifiedCheckpoint(id=2, entries=0, findings=())
    with mock.patch.object(verify, "_checkpoint", lambda *_: sound):
        found = verify.intact_before(folder.storage, damaged)
    assert found is not None and found.id == 2


def test_verify_reports_overlapping_output_of_earlier_releases() -> None:
    folder = Folder(days=2)
    assert not [f for f in verify.verify_pipeline(folder.storage).findings if "overlap" in f]
    with mock.patch.object(lineage, "overlapping_outputs", lambda log, interval: []):
        folder.run(halves(1)[0], "am")
    (found,) = [f for f in verify.verify_pipeline(folder.storage).findings if "overlap" in f]
    assert "checkpoint 1" in found and "checkpoint 3" in found and "replace_overlapping" in found


def test_files_that_were_replaced_go_with_their_checkpoint_and_marks_with_the_sweep() -> None:
    folder = Folder(days=2, policy=KeepLast(2))
    folder.coordinator.publish(None)
    for n, half in enumerate(halves(2)):
        folder.run(half, f"h{n}", permissions=REPLACE)
        folder.publish_and_clean_up()
    folder.run(day(3), "d3")
    folder.publish_and_clean_up()
    left = {"a1": day(1), "h0": halves(2)[0], "h1": halves(2)[1], "d3": day(3)}
    assert folder.paths(paths.OUTPUT) == {paths.output(i, attempt, 0, 0) for attempt, i in left.items()}
    sweep(folder.storage, "counting", now_ms=10**15, min_age=timedelta(0))
    assert paths.published(day(2), 2) not in folder.paths() and paths.published(day(2), 3) in folder.paths()
    assert folder.coordinator.publish(None) == []


def test_the_sink_is_called_without_files_for_an_interval_whose_output_was_replaced() -> None:
    folder = Folder(days=2)
    calls: list[tuple[list[str], Interval, int]] = []
    pipeline = bare_pipeline(name="counting", sink=lambda spark, files, interval, n: calls.append((files, interval, n)))
    hook = pipeline.sink_hook(None, "root")
    folder.coordinator.publish(hook)
    folder.run(halves(2)[0], "am", permissions=REPLACE)
    calls.clear()
    assert folder.coordinator.publish(hook) == [(day(2), 3), (halves(2)[0], 3)]
    # First what is gone: nobody shall find the morning twice.
    assert calls == [([], day(2), 3), ([f"root/{paths.output(halves(2)[0], 'am', 0, 0)}"], halves(2)[0], 3)]
    assert folder.coordinator.publish(hook) == []
