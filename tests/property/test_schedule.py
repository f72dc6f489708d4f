"""Schedules against Airflow's own timetables, at the changes of the clocks of forty zones.

Where Airflow's runs differ, a test here says how. `docs/reference.md` says what the runs of these schedules do.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pendulum import DateTime

from state_backend.values.intervals import Interval
from state_backend.values.schedule import (
    Cron,
    Every,
    Schedule,
    are_same,
    decode,
    encode,
    first_interval,
    interval_around,
    interval_before,
    interval_from,
    next_interval,
    schedule_of,
    starting_between,
)
from tests.support.airflow_schedule import ZONES, changes_of, scheduled_by_airflow
from tests.support.tiers import at_tier

EXPRESSIONS = (
    *("@hourly", "@daily", "@weekly", "@monthly", "@quarterly", "@yearly"),
    *("0 6 * * 1-5", "30 2 * * *", "15 1-3 * * *", "*/30 2 * * *", "*/20 * * * *", "30 * * * 1-5", "0 */2 * * *"),
    *("0 0 1 * *", "0 0 31 * *", "0 0 L * *", "0 0 29 2 *", "0 12 1,15 * 1", "0 9 * * 1#1", "0 0 * * 7"),
)
# Each expression with the hours before and behind a change of clocks in which its intervals are looked at.
AT_CHANGES = {
    **dict.fromkeys(("0 0 * * *", "0 1 * * *", "0 2 * * *", "30 2 * * *", "*/30 2 * * *", "15 1-3 * * *"), 60),
    **{"0 */2 * * *": 24, "0 * * * *": 8, "30 * * * *": 8, "*/20 * * * *": 6, "30 * * * 1-5": 60, "0 0 * * 1": 216},
}
YEARS = (datetime(at_tier(fast=2024, ci=2024, all=2015), 2, 20, tzinfo=UTC), datetime(2024, 11, 10, tzinfo=UTC))
INSTANTS = st.integers(0, int((YEARS[1] - YEARS[0]).total_seconds() // 60)).map(
    lambda m: YEARS[0] + timedelta(minutes=m)
)
MOMENT = timedelta(milliseconds=1)
# Longer than any change of clocks, and than the six hours by which `changes_of` may be late.
SHADOW = timedelta(hours=10)
# What else Airflow's run after an interval may do close to a change of clocks, than to take the following interval: leave time out
# ("gap"), take time twice ("overlap"), or no run is created any more ("stops").
ANY = {"*/30 2 * * *": {"gap"}, "30 * * * 1-5": {"stops", "overlap"}}
HALF_HOURS = ("Australia/Lord_Howe", "Asia/Pyongyang", "America/Caracas", "Pacific/Norfolk")
LISTED = {
    **{key: {"stops", "overlap"} for key in product(("0 * * * *", "30 * * * *", "*/20 * * * *"), HALF_HOURS)},
    # Clocks that change by three and by two hours.
    **{
        key: {"gap", "overlap"}
        for key in product(("0 */2 * * *", "15 1-3 * * *"), ("Antarctica/Casey", "Antarctica/Troll"))
    },
}
SAMPLE = ("Europe/Berlin", "Africa/Cairo", "America/Sao_Paulo", "Antarctica/Casey", "Australia/Lord_Howe", "UTC")


@pytest.mark.parametrize("zone", at_tier(fast=SAMPLE[3:], ci=SAMPLE, all=ZONES))
@pytest.mark.parametrize("expression", AT_CHANGES)
def test_intervals_at_clock_changes_equal_airflows_except_listed_differences(expression: str, zone: str) -> None:
    schedule, around = Cron(expression, zone), timedelta(hours=AT_CHANGES[expression])
    # A schedule of every hour also counts a change in its pause of two days.
    reach = timedelta(days=3) if expression == "30 * * * 1-5" else SHADOW
    changes = changes_of(zone)[: at_tier(fast=2, ci=2, all=None)] or [datetime(2024, 3, 10, tzinfo=UTC)]
    for change in changes:
        one = first_interval(schedule, change - around)
        while one.end < change + around:
            following = next_interval(schedule, one)
            assert following.start == one.end
            assert first_interval(schedule, one.start) == interval_before(schedule, one.end) == one
            assert interval_around(schedule, one.start) == interval_around(schedule, one.end - MOMENT) == one
            assert first_interval(schedule, one.start + MOMENT) == following
            assert interval_from(schedule, one.start + MOMENT) is None
            assert interval_before(schedule, one.end - MOMENT) is None
            differs = how_airflow_differs(schedule, one, following)
            assert differs is None or differs in ANY.get(expression, LISTED.get((expression, zone), ())), one
            # Where the clock skips the time at which an interval ends, Airflow's range from its start begins one interval later.
            if scheduled_by_airflow(schedule, None, one.start) != one:
                assert any(one.start - reach < at < one.end + SHADOW for at in changes), one
            one = following


def how_airflow_differs(schedule: Schedule, last: Interval, following: Interval) -> str | None:
    """What Airflow's run after `last` does if it does not take the following interval."""
    try:
        run = scheduled_by_airflow(schedule, last, None)
    except ValueError as error:
        assert "did not advance" in str(error)
        return "stops"
    assert run is not None
    if run == following:
        return None
    return "gap" if run.start > last.end else "overlap" if run.start < last.end else f"other end, {run}"


def is_quiet(schedule: Cron, *instants: datetime) -> bool:
    """True if no clock changes within three days of these instants, nor of the boundaries around them."""
    spans = [interval_around(schedule, at) for at in instants]
    bounds = [*instants, *(bound for span in spans for bound in (span.start, span.end))]
    days = timedelta(days=3)
    return not any(at - days < change < at + days for at in bounds for change in changes_of(schedule.zone))


@given(
    expression=st.sampled_from(EXPRESSIONS), zone=st.sampled_from(ZONES), at=INSTANTS, minutes=st.integers(1, 100_000)
)
def test_an_interval_after_any_other_is_that_of_airflow(expression: str, zone: str, at: datetime, minutes: int) -> None:
    # The last interval may be of another schedule, which the pipeline had before.
    schedule, last = Cron(expression, zone), Interval(at, at + timedelta(minutes=minutes))
    first, following = first_interval(schedule, at), next_interval(schedule, last)
    around = interval_around(schedule, at)
    assert around.start <= at < around.end
    assert (interval_before(schedule, at) is not None) == (around.start == at)
    assert interval_from(schedule, at) == (first if first.start == at else None)
    assert last.start < following.start <= last.end or following.start == around.end
    if is_quiet(schedule, at, last.end, following.end, first.end):
        assert first == scheduled_by_airflow(schedule, None, at)
        assert following == scheduled_by_airflow(schedule, last, None)


@given(minutes=st.integers(1, 100_000), at=INSTANTS, length=st.integers(1, 10_000))
def test_intervals_of_a_timedelta_schedule_equal_airflows(minutes: int, at: datetime, length: int) -> None:
    schedule, last = schedule_of(timedelta(minutes=minutes), "UTC"), Interval(at, at + timedelta(minutes=length))
    assert next_interval(schedule, last) == scheduled_by_airflow(schedule, last, None)
    assert first_interval(schedule, at) == scheduled_by_airflow(schedule, None, at)
    assert interval_before(schedule, last.end) == Interval(last.end - timedelta(minutes=minutes), last.end)
    assert len(list(starting_between(schedule, at, at + 2 * timedelta(minutes=minutes)))) == 3


@given(
    schedule=st.builds(Cron, st.sampled_from(EXPRESSIONS), st.sampled_from(ZONES))
    | st.builds(Every, st.integers(1, 10**12))
)
def test_a_schedule_survives_its_encoding(schedule: Schedule) -> None:
    assert decode(encode(schedule)) == schedule
    assert are_same(schedule, decode(encode(schedule)))


def test_an_interval_starts_at_a_plain_datetime_not_a_pendulum_instant() -> None:
    # `Interval` keeps UTC datetimes, whatever instant Airflow gives.
    assert type(next_interval(Cron("@daily"), Interval(DateTime(2024, 1, 1, tzinfo=UTC), YEARS[1])).start) is datetime
