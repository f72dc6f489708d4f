"""Schedules against Airflow's own timetables, over years of instants and the changes of three zones' clocks."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import cache

import pytest
from airflow.timetables.base import DataInterval, TimeRestriction
from airflow.timetables.interval import CronDataIntervalTimetable, DeltaDataIntervalTimetable
from hypothesis import example, given
from hypothesis import strategies as st
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
OFTEN = ("@hourly", "*/20 * * * *", "30 * * * 1-5", "0 */2 * * *")
STOPS = [(e, "Australia/Lord_Howe") for e in ("@hourly", "*/20 * * * *", "30 * * * 1-5")] + [
    ("30 * * * 1-5", zone) for zone in ("Europe/Berlin", "America/Los_Angeles")
]
YEARS = (datetime(at_tier(fast=2024, ci=2024, all=2021), 2, 20, tzinfo=UTC), datetime(2024, 11, 10, tzinfo=UTC))
# The days on which one of the zones changed its clocks in 2024. Schedules of hours and minutes are walked there only.
CHANGES = [
    (at, at + timedelta(days=3))
    for at in (
        datetime(2024, m, d, tzinfo=UTC)
        for m, d in ((3, 9), (3, 30), (4, 6), (10, 5), (10, 26), (11, 2))[:: at_tier(fast=3, ci=3, all=1)]
    )
]
INSTANTS = st.integers(0, int((YEARS[1] - YEARS[0]).total_seconds() // 60)).map(
    lambda m: YEARS[0] + timedelta(minutes=m)
)


@cache
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


@pytest.mark.parametrize(
    "zone", at_tier(fast=("Australia/Lord_Howe",), ci=("Europe/Berlin", "Australia/Lord_Howe"), all=ZONES)
)
@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_intervals_follow_each_other_as_in_airflow(expression: str, zone: str) -> None:
    schedule = Cron(expression, zone)
    for begin, end in CHANGES if expression in OFTEN else [YEARS]:
        last = first_interval(schedule, begin)
        assert last == scheduled_by_airflow(schedule, None, begin)
        while last.end < end:
            following = next_interval(schedule, last)
            try:
                assert following == scheduled_by_airflow(schedule, last, None)
            except (
                ValueError
            ) as error:  # Airflow's scheduler stops here, as at `30 * * * 1-5` behind the clocks' change.
                assert "did not advance" in str(error) and (expression, zone) in STOPS
                assert following.start > last.start
                break
            # In spring, Airflow leaves out half an hour of `*/30 2 * * *`: both of its boundaries lie in the skipped hour.
            if expression == "*/30 2 * * *" and following.start.month == 3:
                last = following
                continue
            assert following.start == last.end
            assert interval_before(schedule, following.end) == following
            assert interval_around(schedule, following.start) == following
            last = following


@given(
    expression=st.sampled_from(EXPRESSIONS), zone=st.sampled_from(ZONES), at=INSTANTS, minutes=st.integers(1, 100_000)
)
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
    expression=st.sampled_from([e for e in EXPRESSIONS if e not in OFTEN]),
    zone=st.sampled_from(ZONES),
    first=INSTANTS,
    days=st.integers(0, 40),
)
# In spring, Airflow leaves out half an hour of this expression.
@example(expression="*/30 2 * * *", zone="America/Los_Angeles", first=datetime(2024, 2, 25, tzinfo=UTC), days=20)
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


@given(
    schedule=st.builds(Cron, st.sampled_from(EXPRESSIONS), st.sampled_from(ZONES))
    | st.builds(Every, st.integers(1, 10**12))
)
def test_a_schedule_survives_its_encoding(schedule: Schedule) -> None:
    assert decode(encode(schedule)) == schedule
    assert are_same(schedule, decode(encode(schedule)))


def test_the_start_of_the_year_is_not_a_pendulum_instant() -> None:
    # `Interval` keeps UTC datetimes, whatever instant Airflow gives.
    assert type(next_interval(Cron("@daily"), Interval(DateTime(2024, 1, 1, tzinfo=UTC), YEARS[1])).start) is datetime
