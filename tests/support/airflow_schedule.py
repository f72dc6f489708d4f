"""The intervals that Airflow's own timetables give, and the zones and changes of clocks at which the tests ask."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import cache
from zoneinfo import ZoneInfo

from airflow.timetables.base import DataInterval, TimeRestriction
from airflow.timetables.interval import CronDataIntervalTimetable, DeltaDataIntervalTimetable
from pendulum import instance

from state_backend.values.intervals import Interval
from state_backend.values.schedule import Cron, Schedule

# Changes of one, two and three hours and of half an hour; at midnight; of the standard time; in the month of Ramadan; none.
_CITIES = {
    "Europe": "Berlin London Dublin Moscow Istanbul Chisinau",
    "Atlantic": "Azores",
    "America": "New_York Chicago Los_Angeles St_Johns Havana Sao_Paulo Asuncion Santiago Caracas Mexico_City Nuuk Scoresbysund",
    "Africa": "Cairo Casablanca Windhoek Juba",
    "Asia": "Beirut Amman Gaza Jerusalem Tehran Pyongyang Kolkata Kathmandu Tokyo",
    "Australia": "Sydney Lord_Howe",
    "Pacific": "Auckland Chatham Norfolk",
    "Antarctica": "Troll Casey",
}
ZONES = ("UTC", *(f"{region}/{city}" for region, cities in _CITIES.items() for city in cities.split()))
YEARS = (datetime(2015, 1, 1, tzinfo=UTC), datetime(2031, 1, 1, tzinfo=UTC))


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


def backfilled_by_airflow(schedule: Schedule, first: datetime, last: datetime) -> Iterator[Interval]:
    """The intervals of Airflow's backfill of a range."""
    one = scheduled_by_airflow(schedule, None, first, last)
    while one is not None:
        yield one
        one = scheduled_by_airflow(schedule, one, first, last)


@cache
def changes_of(zone: str, first: datetime = YEARS[0], last: datetime = YEARS[1]) -> list[datetime]:
    """The changes of a zone's clocks, each up to six hours late."""
    rules, step = ZoneInfo(zone), timedelta(hours=6)
    instants = [first + n * step for n in range((last - first) // step + 1)]
    offsets = [at.astimezone(rules).utcoffset() for at in instants]
    return [at for at, before, after in zip(instants[1:], offsets, offsets[1:], strict=False) if before != after]
