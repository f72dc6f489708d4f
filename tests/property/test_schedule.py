"""Schedules against Airflow's own timetables, over years of instants and the changes of three zones' clocks."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from airflow.timetables.base import DataInterval, TimeRestriction
from airflow.timetables.interval import CronDataIntervalTimetable, DeltaDataIntervalTimetable
from hypothesis import given, strategies as st
from pendulum import DateTime, instance

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
from tests.support.tiers import at_tier

ZONES = ("UTC", "Europe/Berlin", "America/Los_Angeles", "Asia/Kolkata", "Australia/Lord_Howe")
EXPRESSIONS = (
    *("@hourly", "@daily", "@weekly", "@monthly", "@quarterly", "@yearly"),
    *("0 6 * * 1-5", "30 2 * * *", "15 1-3 * * *", "*/30 2 * * *", "*/20 * * * *", "30 * * * 1-5", "0 */2 * * *"),
    *("0 0 1 * *", "0 0 31 * *", "0 0 L * *", "0 0 29 2 *", "0 12 1,15 * 1", "0 9 * * 1#1", "0 0 * * 7"),
)
# From before a change of clocks in spring to behind the one in autumn.
YEARS = (datetime(2023, 1, 1, tzinfo=UTC), datetime(2025, 1, 1, tzinfo=UTC))
INSTANTS = st.integers(0, int((YEARS[1] - YEARS[0]).total_seconds() // 60)).map(lambda m: YEARS[0] + timedelta(minutes=m))


def timetable(schedule: Schedule) -> CronDataIntervalTimetable | DeltaDataIntervalTimetable:
    if isinstance(schedule, Cron):
        return CronDataIntervalTimetable(schedule.expression, schedule.zone)
    return DeltaDataIntervalTimetable(schedule.length)


def scheduled_by_airflow(
    schedule: Schedule, last: Interval | None, earliest: datetime | None, latest: datetime | None = None
) -> Interval | None:
    """The interval of the run that Airflow creates after `last`, in a DAG with catchup."""
    info = timetable(schedule).next_dagrun_info(
        last_automated_data_interval=None if last is None else DataInterval(instance(last.start), instance(last.end)),
        restriction=TimeRestriction(
            None if earliest is None else instance(earliest), None if latest is None else instance(latest), catchup=True
        ),
    )
    return None if info is None else Interval(info.data_interval.start, info.data_interval.end)


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_two_years_of_intervals_are_those_of_airflow(expression: str, zone: str) -> None:
    schedule = Cron(expression, zone)
    last = first_interval(schedule, YEARS[0])
    assert last == scheduled_by_airflow(schedule, None, YEARS[0])
    # Hourly schedules have 17,000 intervals in two years: the suite walks them around the changes of clocks only.
    steps = 0
    while last.end < YEARS[1]:
        following = next_interval(schedule, last)
        assert following == scheduled_by_airflow(schedule, last, None)
        assert following.start == last.end
        assert interval_before(schedule, following.end) == following
        assert interval_around(schedule, following.start) == following
        steps += 1
        if steps % 60 == 0 and last.end - last.start < timedelta(hours=6) and not at_tier(fast=False, ci=False, all=True):
            last = Interval(following.start, following.end + _leap(following.end))
            last = interval_around(schedule, last.end)
        else:
            last = following


def _leap(at: datetime) -> timedelta:
    """A leap over the weeks in which no zone changes its clocks: into March, April, October or November."""
    return timedelta(0) if at.month in (3, 4, 10, 11) and at.day in range(24, 32) or at.day in range(1, 13) else timedelta(days=7)


@given(expression=st.sampled_from(EXPRESSIONS), zone=st.sampled_from(ZONES), at=INSTANTS, minutes=st.integers(1, 100_000))
def test_an_interval_after_any_other_is_that_of_airflow(expression: str, zone: str, at: datetime, minutes: int) -> None:
    # The last interval may be of another schedule, which the pipeline had before.
    schedule, last = Cron(expression, zone), Interval(at, at + timedelta(minutes=minutes))
    assert next_interval(schedule, last) == scheduled_by_airflow(schedule, last, None)
    first = first_interval(schedule, at)
    assert first == scheduled_by_airflow(schedule, None, at)
    assert interval_from(schedule, at) == (first if first.start == at else None)
    around = interval_around(schedule, at)
    assert around.start <= at < around.end
    assert (interval_before(schedule, at) is not None) == (around.start == at)


@given(
    expression=st.sampled_from([e for e in EXPRESSIONS if e not in ("@hourly", "*/20 * * * *")]),
    zone=st.sampled_from(ZONES),
    first=INSTANTS,
    days=st.integers(0, 40),
)
def test_a_range_is_that_of_an_airflow_backfill(expression: str, zone: str, first: datetime, days: int) -> None:
    schedule, last = Cron(expression, zone), first + timedelta(days=days)
    expected, one = list[Interval](), scheduled_by_airflow(schedule, None, first, last)
    while one is not None:
        expected.append(one)
        one = scheduled_by_airflow(schedule, one, first, last)
    assert list(starting_between(schedule, first, last)) == expected


@given(minutes=st.integers(1, 100_000), at=INSTANTS, length=st.integers(1, 10_000))
def test_a_timedelta_is_that_of_airflow(minutes: int, at: datetime, length: int) -> None:
    schedule, last = schedule_of(timedelta(minutes=minutes), "UTC"), Interval(at, at + timedelta(minutes=length))
    assert next_interval(schedule, last) == scheduled_by_airflow(schedule, last, None)
    assert first_interval(schedule, at) == scheduled_by_airflow(schedule, None, at)
    assert interval_before(schedule, last.end) == Interval(last.end - timedelta(minutes=minutes), last.end)
    assert len(list(starting_between(schedule, at, at + 2 * timedelta(minutes=minutes)))) == 3


@given(schedule=st.builds(Cron, st.sampled_from(EXPRESSIONS), st.sampled_from(ZONES)) | st.builds(Every, st.integers(1, 10**12)))
def test_a_schedule_survives_its_encoding(schedule: Schedule) -> None:
    assert decode(encode(schedule)) == schedule
    assert are_same(schedule, decode(encode(schedule)))


def test_the_start_of_the_year_is_not_a_pendulum_instant() -> None:
    # `Interval` keeps UTC datetimes, whatever instant Airflow gives.
    assert type(next_interval(Cron("@daily"), Interval(DateTime(2024, 1, 1, tzinfo=UTC), YEARS[1])).start) is datetime
