"""Data intervals: half-open spans of time, in milliseconds since the epoch, UTC."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from state_backend.values.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Interval:
    """Airflow's data interval ``[start, end)``. Both ends are milliseconds since 1970-01-01T00:00Z; start < end."""

    start_ms: int
    end_ms: int

    def __post_init__(self) -> None:
        if not self.start_ms < self.end_ms:
            raise UsageError(f"an interval needs start < end; got {format_ms(self.start_ms)} .. {format_ms(self.end_ms)}")

    def __str__(self) -> str:
        return f"[{format_ms(self.start_ms)}, {format_ms(self.end_ms)})"

    def overlaps(self, other: Interval) -> bool:
        """Whether some instant belongs to both."""
        return self.start_ms < other.end_ms and other.start_ms < self.end_ms

    @staticmethod
    def between(start: datetime, end: datetime) -> Interval:
        """The interval between two instants; a datetime without zone is refused, since it names no instant."""
        return Interval(start_ms=to_ms(start), end_ms=to_ms(end))


def to_ms(instant: datetime) -> int:
    """Milliseconds since the epoch. Refuses naive datetimes and parts of a millisecond."""
    if instant.tzinfo is None:
        raise UsageError(f"{instant!r} has no time zone, so it names no instant; pass tzinfo=UTC")
    delta = instant - datetime(1970, 1, 1, tzinfo=UTC)
    if delta.microseconds % 1000:
        raise UsageError(f"{instant.isoformat()} is not a whole millisecond")
    return delta.days * 86_400_000 + delta.seconds * 1000 + delta.microseconds // 1000


def from_ms(ms: int) -> datetime:
    """The inverse of ``to_ms``, in UTC."""
    return datetime.fromtimestamp(ms // 1000, tz=UTC).replace(microsecond=ms % 1000 * 1000)


def format_ms(ms: int) -> str:
    """For people and paths: ``2013-01-01T00:00:00Z``, with milliseconds only where there are some."""
    instant = from_ms(ms)
    text = instant.strftime("%Y-%m-%dT%H:%M:%S")
    return f"{text}.{ms % 1000:03d}Z" if ms % 1000 else f"{text}Z"
