"""Schedules of pipelines: where one data interval ends and the next one begins. Pure values without Airflow.

A schedule cuts time at its boundaries as Airflow's timetables with data intervals do: `Cron` as
`CronDataIntervalTimetable`, `Every` as `DeltaDataIntervalTimetable`.

A cron expression counts local time. When clocks change, a boundary moves as in Airflow:

- A local time that a clock skips becomes the same time after the skip: 02:30 becomes 03:30.
- A local time that comes twice means the second one, except under an expression that matches every hour: such an
  expression has both.

The boundaries of a cron expression are one row of instants: each interval begins where the one before ends. Airflow's
runs have the same intervals, except at some changes of clocks, where Airflow looks for a run's start by going back from
its end. Then Airflow starts a range one interval late, leaves a piece of time out, or takes a piece twice.

Source: airflow.timetables._cron, _delta and interval, of Airflow 3.3.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any, TypeAlias

from state_backend.values.errors import UsageError
from state_backend.values.intervals import Interval, format_instant
from state_backend.values.zones import zone_of

if TYPE_CHECKING:
    from croniter import croniter

# Source: airflow.utils.dates.cron_presets. Other names that croniter accepts, such as @midnight, stay as they are.
PRESETS = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@quarterly": "0 0 1 */3 *",
    "@yearly": "0 0 1 1 *",
}
# Longer than any change of clocks since 2012: Casey in Antarctica changes by three hours.
_CLOCKS_CHANGE = timedelta(hours=4)


@dataclass(frozen=True, slots=True)
class Cron:
    """A schedule whose boundaries are the times that a cron expression matches.

    Attributes:
        expression: Five fields as in `0 6 * * 1-5`, or a preset: @hourly, @daily, @weekly, @monthly, @quarterly,
            @yearly.
        zone: Name of the time zone in which the expression counts, such as "Europe/Berlin".

    `check` says whether the expression can be read. The constructor does not, so that all hosts can read records.
    """

    expression: str
    zone: str = "UTC"

    def __post_init__(self) -> None:
        if not isinstance(self.expression, str) or not isinstance(self.zone, str):
            raise UsageError(f"Cron({self.expression!r}, {self.zone!r}): both must be texts")
        fields = " ".join(self.expression.split())
        object.__setattr__(self, "expression", PRESETS.get(fields, fields))
        with suppress(UsageError):  # A host without data for the zone must still read the records of the pipeline.
            object.__setattr__(self, "zone", zone_of(self.zone).name)

    def __str__(self) -> str:
        return f"cron {self.expression!r} in {self.zone}"

    @property
    def rules(self) -> tzinfo:
        """The time zone in which a day of this schedule begins and ends."""
        return zone_of(self.zone).rules

    def check(self) -> None:
        """Raise `UsageError` if the expression is wrong or matches no time, or this host lacks the zone's data."""
        from croniter import CroniterError

        try:
            _Clock(self).around(datetime(2024, 1, 1, tzinfo=UTC))
        except CroniterError as error:
            raise UsageError(
                f"{self.expression!r} is no cron expression: {error}\nWrite five fields as in '0 6 * * 1-5', or a preset such as '@daily'"
            ) from None


@dataclass(frozen=True, slots=True)
class Every:
    """A schedule of intervals of one length. Each interval begins where the one before ends."""

    # Length of an interval in milliseconds, at least 1.
    ms: int

    def __post_init__(self) -> None:
        if self.ms < 1:
            raise UsageError(f"an interval of {self.ms} ms has no length; give at least 1 ms")

    def __str__(self) -> str:
        return f"every {timedelta(milliseconds=self.ms)}"

    @property
    def length(self) -> timedelta:
        return timedelta(milliseconds=self.ms)

    @property
    def rules(self) -> tzinfo:
        """The time zone in which a day of this schedule begins and ends: UTC."""
        return UTC

    def check(self) -> None:
        """Do nothing: the constructor has checked the length."""

    def around(self, at: datetime) -> Interval:
        """Return the interval that begins at `at`. A schedule of one length has no fixed boundaries."""
        return Interval(at, self.after(at))

    def after(self, boundary: datetime) -> datetime:
        return boundary + self.length


Schedule: TypeAlias = Cron | Every


class _Clock:
    """Finds the instants at which the intervals of a cron schedule begin and end."""

    def __init__(self, cron: Cron) -> None:
        from croniter import croniter

        self._rules = cron.rules
        self._ticks: croniter = croniter(cron.expression, start_time=datetime(2024, 1, 1))
        self._matches_every_hour = self._ticks.expanded[1] == ["*"]

    def around(self, at: datetime) -> Interval:
        start = self._before_changes(at)
        while (following := self.after(start)) <= at:
            start = following
        return Interval(start, following)

    def after(self, boundary: datetime) -> datetime:
        local = self._local(boundary)
        if not self._matches_every_hour and self._offset(boundary) != self._offset(boundary - _CLOCKS_CHANGE):
            # If the expression matches several times that the clock skips, Airflow ends a run at the first of them, and
            # begins the next run at the last. `back` finds the last: it is the match before the boundary's local time.
            last = self._instant(self._tick(local, back=True))
            if last > boundary:
                return last
        tick = self._tick(local)
        return boundary + (tick - local) if self._matches_every_hour else self._instant(tick)

    def _before_changes(self, at: datetime) -> datetime:
        """Return a boundary, at or before the instant `at`, that no change of clocks has moved."""
        local = self._local(at)
        tick = local if self._tick(self._tick(local, back=True)) == local else self._tick(local, back=True)
        while True:
            # If the expression matches every hour, `after` adds a length of time to the boundary. So if clocks change
            # between two matches, all later boundaries move too.
            since = self._tick(tick - _CLOCKS_CHANGE, back=True) if self._matches_every_hour else tick
            found = self._instant(tick)
            if self._offset(self._instant(since) - _CLOCKS_CHANGE) == self._offset(found + _CLOCKS_CHANGE):
                return found
            tick = self._tick(since, back=True)

    def _tick(self, local: datetime, *, back: bool = False) -> datetime:
        """Return the first local time after `local` that the expression matches; with `back`, the last before it."""
        self._ticks.set_current(local, force=True)
        tick: datetime = self._ticks.get_prev(datetime) if back else self._ticks.get_next(datetime)
        return tick

    def _local(self, at: datetime) -> datetime:
        return at.astimezone(self._rules).replace(tzinfo=None)

    def _offset(self, at: datetime) -> timedelta | None:
        return at.astimezone(self._rules).utcoffset()

    def _instant(self, local: datetime) -> datetime:
        # When a clock is set back, a local time comes twice: the smaller offset from UTC names the second. When a clock
        # is set forward, a local time is skipped: the smaller offset names the time that much later, 03:30 for 02:30.
        offsets = (local.replace(tzinfo=self._rules, fold=fold).utcoffset() for fold in (0, 1))
        return (local - min(offset for offset in offsets if offset is not None)).replace(tzinfo=UTC)


def schedule_of(value: Any, zone: str) -> Schedule:
    """Return `value` as a schedule: a cron text (in the time zone `zone`), a timedelta, a `Cron` or an `Every`."""
    if isinstance(value, timedelta):
        return Every(value // timedelta(milliseconds=1))
    found = Cron(value, zone) if isinstance(value, str) else value
    if not isinstance(found, Cron | Every):
        raise UsageError(
            f"{value!r} is no schedule; expected a cron text such as '0 6 * * 1-5' or '@daily', Cron(text, zone), or a timedelta"
        )
    found.check()
    return found


def are_same(one: Schedule, other: Schedule) -> bool:
    """Return True if two schedules are equal, or are cron texts of one meaning: `0 6 * * MON-FRI` and `0 6 * * 1-5`."""
    if isinstance(one, Cron) and isinstance(other, Cron):
        from croniter import croniter

        texts = (one.expression, other.expression)
        return one.zone == other.zone and (
            texts[0] == texts[1] or croniter.expand(texts[0]) == croniter.expand(texts[1])
        )
    return one == other


def encode(schedule: Schedule) -> dict[str, Any]:
    if isinstance(schedule, Every):
        return {"ms": schedule.ms}
    return {"expression": schedule.expression, "zone": schedule.zone}


def decode(values: dict[str, Any]) -> Schedule:
    return Every(**values) if "ms" in values else Cron(**values)


def first_interval(schedule: Schedule, start: datetime) -> Interval:
    """Return the first interval that begins at or after `start`."""
    return next(_from(schedule, start))


def next_interval(schedule: Schedule, last: Interval) -> Interval:
    """Return the interval that follows `last`.

    It begins where `last` ends. If no boundary of the schedule lies there (the schedule has changed), the interval
    begins at the boundary before, and so overlaps `last`, as in Airflow.
    """
    found = interval_around(schedule, last.end)
    return found if found.start > last.start else first_interval(schedule, found.end)


def starting_between(schedule: Schedule, first: datetime, last: datetime) -> Iterator[Interval]:
    """Yield the intervals that begin at or between two instants. Both instants are included."""
    return takewhile(lambda one: one.start <= last, _from(schedule, first))


def count_between(schedule: Schedule, first: datetime, last: datetime, most: int = 20_000) -> tuple[int, bool]:
    """Return (number of intervals that begin from `first` to `last`, True). Above `most`: (an estimate, False)."""
    if isinstance(schedule, Every):
        return max(0, (last - first) // schedule.length + 1), True
    counted = list(islice(starting_between(schedule, first, last), most + 1))
    if len(counted) <= most:
        return len(counted), True
    begun, at = counted[0].start, counted[-1].start
    return round(most * ((last - begun) / (at - begun))), False


def interval_from(schedule: Schedule, start: datetime) -> Interval | None:
    """Return the interval that begins at `start`; None if no boundary of the schedule lies there."""
    found = interval_around(schedule, start)
    return found if found.start == start else None


def interval_before(schedule: Schedule, end: datetime) -> Interval | None:
    """Return the interval that ends at `end`; None if no boundary of the schedule lies there."""
    if isinstance(schedule, Every):
        return Interval(end - schedule.length, end)
    found = interval_around(schedule, end - timedelta(milliseconds=1))
    return found if found.end == end else None


def interval_around(schedule: Schedule, at: datetime) -> Interval:
    """Return the interval of a cron schedule that contains `at`. Of an `Every`, return the one that begins at `at`."""
    return _clock(schedule).around(at)


def _from(schedule: Schedule, start: datetime) -> Iterator[Interval]:
    """Yield the intervals that begin at or after `start`, without end."""
    clock = _clock(schedule)
    one = clock.around(start)
    if one.start == start:
        yield one
    while True:
        one = Interval(one.end, clock.after(one.end))
        yield one


def _clock(schedule: Schedule) -> _Clock | Every:
    return _Clock(schedule) if isinstance(schedule, Cron) else schedule


def no_boundary(schedule: Schedule, at: datetime) -> str:
    """Return the message that no interval begins at `at`. It names the nearest beginnings before and after."""
    around = interval_around(schedule, at)
    return (
        f"no interval of the schedule ({schedule}) begins at {format_instant(at)}; the nearest begin at {format_instant(around.start)} "
        f"and {format_instant(around.end)}"
    )
