"""Data intervals: half-open spans between two instants."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from state_backend.values.errors import UsageError

_NO_OFFSET = timedelta(0)


@dataclass(frozen=True, slots=True, order=True)
class Interval:
    """Airflow's data interval `[start, end)`.

    Both instants are UTC datetimes of whole milliseconds, and start < end. The constructor raises `UsageError` for a
    datetime without a time zone, because such a datetime names no instant.
    """

    start: datetime
    end: datetime

    def __post_init__(self) -> None:
        for name in ("start", "end"):
            try:
                object.__setattr__(self, name, _in_utc(getattr(self, name)))
            except UsageError as error:
                raise UsageError(f"an interval's {name}: {error}") from None
        if not self.start < self.end:
            raise UsageError(f"an interval needs start < end; got {self}")

    def __str__(self) -> str:
        return f"[{format_instant(self.start)}, {format_instant(self.end)})"

    @property
    def start_ms(self) -> int:
        return to_ms(self.start)

    @property
    def end_ms(self) -> int:
        return to_ms(self.end)

    def overlaps(self, other: Interval) -> bool:
        return self.start < other.end and other.start < self.end


def _in_utc(instant: datetime) -> datetime:
    # A record lists hundreds of intervals in UTC. For these, `from_ms(to_ms(instant))` takes three times as long.
    if type(instant) is datetime and instant.utcoffset() == _NO_OFFSET and not instant.microsecond % 1000:
        return instant.astimezone(UTC)
    return from_ms(to_ms(instant))


def to_ms(instant: datetime) -> int:
    if not isinstance(instant, datetime):
        raise UsageError(f"{instant!r} is a {type(instant).__name__}, not a datetime with a time zone")
    if instant.tzinfo is None:
        raise UsageError(f"{instant!r} has no time zone; for UTC, pass tzinfo=UTC")
    delta = instant - datetime(1970, 1, 1, tzinfo=UTC)
    if delta.microseconds % 1000:
        raise UsageError(f"{instant.isoformat()} is not a whole millisecond; leave out its last three digits")
    return delta.days * 86_400_000 + delta.seconds * 1000 + delta.microseconds // 1000


def from_ms(ms: int) -> datetime:
    return datetime.fromtimestamp(ms // 1000, tz=UTC).replace(microsecond=ms % 1000 * 1000)


# The first and last instant that tables show. Each has a date in every time zone, so Python, Spark and pandas can read
# it in any zone.
_SHOWN_MS = to_ms(datetime(1, 1, 2, tzinfo=UTC)), to_ms(datetime(9999, 12, 31, tzinfo=UTC))


def shown_ms(ms: int) -> int:
    """Return an instant, in milliseconds since the epoch, limited to the dates that tables and reports can show.

    A timer or an expiry time may be a number beyond all dates, which means "never". Tables show such a number as
    9999-12-31T00:00:00Z or 0001-01-02T00:00:00Z. The state keeps the exact number.
    """
    return min(max(ms, _SHOWN_MS[0]), _SHOWN_MS[1])


def format_instant(instant: datetime) -> str:
    """Format an instant for people: `2013-01-01T00:00:00Z`, with milliseconds only if they are not 0."""
    text = instant.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{text}.{instant.microsecond // 1000:03d}Z" if instant.microsecond else f"{text}Z"
