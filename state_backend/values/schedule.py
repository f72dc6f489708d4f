"""Schedules of pipelines: where one data interval ends and the next one begins. Pure values without Airflow.

A schedule cuts time at its boundaries, exactly as Airflow's timetables with data intervals do: `Cron` as
`CronDataIntervalTimetable`, `Every` as `DeltaDataIntervalTimetable`.

A cron expression counts local time. When clocks change, a boundary moves as in Airflow:

- A local time that a clock skips becomes the same time after the skip: 02:30 becomes 03:30.
- A local time that comes twice means the second one, except under an expression that matches every hour: such an
  expression has both.

Source: airflow.timetables._cron, _delta and interval, of Airflow 3.3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
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
# Longer than any change of clocks since 2012.
_CLOCKS_CHANGE = timedelta(hours=3)


@dataclass(frozen=True, slots=True)
class Cron:
    """A schedule whose boundaries are the times that a cron expression matches.

    Attributes:
        expression: Five fields as in `0 6 * * 1-5`, or a preset: @hourly, @daily, @weekly, @monthly, @quarterly, @yearly.
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
        """Raise `UsageError` if the expression can't be read or matches no time, or this host has no data for the zone."""
        from croniter import CroniterError

        try:
            _Clock(self).after(datetime(2024, 1, 1, tzinfo=UTC))
        except CroniterError as error:
            raise UsageError(
                f"{self.expression!r} is no cron expression: {error}\nWrite five fields as in '0 6 * * 1-5', or a preset such as '@daily'"
            ) from None

    def boundaries(self) -> tuple[Callable[[datetime], datetime], Callable[[datetime], datetime]]:
        """Return two functions of an instant: the first boundary after it, and the last boundary before it."""
        clock = _Clock(self)
        return clock.after, clock.before


@dataclass(frozen=True, slots=True)
class Every:
    """A schedule of intervals of one length. Each interval begins where the one before ends.

    Attributes:
        ms: Length of an interval in milliseconds, at least 1.
    """

    ms: int

    def __post_init__(self) -> None:
        if self.ms < 1:
            raise UsageError(f"an interval of {self.ms} ms has no length; give at least 1 ms")

    def __str__(self) -> str:
        return f"every {timedelta(milliseconds=self.ms)}"

    @property
    def length(self) -> timedelta:
        """Length of an interval."""
        return timedelta(milliseconds=self.ms)

    @property
    def rules(self) -> tzinfo:
        """The time zone in which a day of this schedule begins and ends: UTC."""
        return UTC

    def check(self) -> None:
        """Do nothing: the constructor has checked the length."""

    def boundaries(self) -> tuple[Callable[[datetime], datetime], Callable[[datetime], datetime]]:
        """Return two functions of an instant: the instant one length later, and the instant one length earlier."""
        return lambda at: at.astimezone(UTC) + self.length, lambda at: at.astimezone(UTC) - self.length


Schedule: TypeAlias = Cron | Every


class _Clock:
    """Boundaries of a cron expression before and after an instant, as Airflow's `CronMixin` computes them."""

    def __init__(self, cron: Cron) -> None:
        from croniter import croniter

        self._rules = cron.rules
        self._ticks: croniter = croniter(cron.expression, start_time=datetime(2024, 1, 1))
        self._matches_every_hour = self._ticks.expanded[1] == ["*"]

    def after(self, at: datetime) -> datetime:
        at = at.astimezone(UTC)
        local = at.astimezone(self._rules).replace(tzinfo=None)
        self._ticks.set_current(local, force=True)
        tick: datetime = self._ticks.get_next(datetime)
        return at + (tick - local) if self._matches_every_hour else self._instant(tick)

    def before(self, at: datetime) -> datetime:
        at = at.astimezone(UTC)
        local = at.astimezone(self._rules).replace(tzinfo=None)
        self._ticks.set_current(local, force=True)
        tick: datetime = self._ticks.get_prev(datetime)
        return at - (local - tick) if self._matches_every_hour else self._instant(tick)

    def _instant(self, local: datetime) -> datetime:
        # When a clock is set back, a local time comes twice: the smaller offset from UTC names the second. When a clock is
        # set forward, a local time is skipped: the smaller offset names the time that much later, 03:30 for 02:30.
        offsets = (local.replace(tzinfo=self._rules, fold=fold).utcoffset() for fold in (0, 1))
        return (local - min(offset for offset in offsets if offset is not None)).replace(tzinfo=UTC)


def schedule_of(value: Any, zone: str) -> Schedule:
    """Return the schedule that a text or a timedelta names.

    Args:
        value: A cron expression or preset, a timedelta, or a schedule.
        zone: Time zone of a cron expression.

    Raises:
        UsageError: The value names no schedule.
    """
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
    """Return True if two schedules have the same boundaries by their texts: `0 6 * * MON-FRI` equals `0 6 * * 1-5`."""
    if isinstance(one, Cron) and isinstance(other, Cron):
        from croniter import croniter

        texts = (one.expression, other.expression)
        return one.zone == other.zone and (
            texts[0] == texts[1] or croniter.expand(texts[0]) == croniter.expand(texts[1])
        )
    return one == other


def encode(schedule: Schedule) -> dict[str, Any]:
    """Return a schedule as JSON values, which `decode` reads."""
    if isinstance(schedule, Every):
        return {"ms": schedule.ms}
    return {"expression": schedule.expression, "zone": schedule.zone}


def decode(values: dict[str, Any]) -> Schedule:
    """Return the schedule that `encode` has written."""
    return Every(**values) if "ms" in values else Cron(**values)


# --- intervals ----------------------------------------------------------------------------------------------------------


def first_interval(schedule: Schedule, start: datetime) -> Interval:
    """Return the first interval that begins at or after `start`, as Airflow's first run has it."""
    after, before = schedule.boundaries()
    start = _aligned_forward(after, before, start) if isinstance(schedule, Cron) else start
    return Interval(start, after(start))


def next_interval(schedule: Schedule, last: Interval) -> Interval:
    """Return the interval that Airflow schedules after `last`.

    It begins where `last` ends. If no boundary of the schedule lies there (the schedule has changed), the interval begins
    at the boundary before, and so overlaps `last`.
    """
    after, before = schedule.boundaries()
    if isinstance(schedule, Every):
        return Interval(last.end, after(last.end))
    # The same steps as `_DataIntervalTimetable.next_dagrun_info`.
    previous = before(last.end)
    start = last.end if after(previous) == last.end else previous
    while start <= last.start:  # One step; more after some daylight saving changes, where Airflow raises an error.
        start = after(start)
    return Interval(start, after(start))


def starting_between(schedule: Schedule, first: datetime, last: datetime) -> Iterator[Interval]:
    """Yield the intervals that begin at or between two instants, as Airflow's backfill does. Both instants are included."""
    one = first_interval(schedule, first)
    while one.start <= last:
        yield one
        one = next_interval(schedule, one)


def count_between(schedule: Schedule, first: datetime, last: datetime, most: int = 20_000) -> tuple[int, bool]:
    """Return how many intervals begin at or between two instants, and True if the number is exact.

    Args:
        schedule: The schedule.
        first: Start of the first interval.
        last: The latest start.
        most: The number of boundaries of a cron expression that are counted, before the function extrapolates.
    """
    if isinstance(schedule, Every):
        return max(0, (last - first) // schedule.length + 1), True
    after, _ = schedule.boundaries()
    begun = at = first_interval(schedule, first).start
    found = 0
    while at <= last:
        if found == most:
            return round(found * ((last - begun) / (at - begun))), False
        at, found = after(at), found + 1
    return found, True


def interval_from(schedule: Schedule, start: datetime) -> Interval | None:
    """Return the interval that begins at `start`; None if no boundary of the schedule lies there."""
    found = first_interval(schedule, start)
    return found if found.start == start else None


def interval_before(schedule: Schedule, end: datetime) -> Interval | None:
    """Return the interval that ends at `end`; None if no boundary of the schedule lies there."""
    after, before = schedule.boundaries()
    if isinstance(schedule, Every):
        return Interval(before(end), end)
    start = _well_before(before, end)
    while (following := after(start)) < end:
        start = following
    return Interval(start, end) if following == end else None


def interval_around(schedule: Schedule, at: datetime) -> Interval:
    """Return the interval that contains an instant; under `Every`, the interval that begins there."""
    after, before = schedule.boundaries()
    if isinstance(schedule, Every):
        return Interval(at, after(at))
    start = _well_before(before, at)
    while (following := after(start)) <= at:
        start = following
    return Interval(start, following)


def _well_before(before: Callable[[datetime], datetime], at: datetime) -> datetime:
    """Return a boundary before an instant, and before any change of clocks close to the instant.

    Near a change, `before` skips boundaries or returns instants that are none. `after` finds all boundaries from here on.
    """
    return before(min(before(at), at) - _CLOCKS_CHANGE)


def _aligned_forward(
    after: Callable[[datetime], datetime], before: Callable[[datetime], datetime], at: datetime
) -> datetime:
    following = after(at)
    return following if before(following) != at else at


def no_boundary(schedule: Schedule, at: datetime) -> str:
    """Return a sentence that says that no interval begins at an instant, with the nearest beginnings."""
    around = interval_around(schedule, at)
    return (
        f"no interval of the schedule ({schedule}) begins at {format_instant(at)}; the nearest begin at {format_instant(around.start)} "
        f"and {format_instant(around.end)}"
    )
