"""Parsers of texts that people write: a day, an instant as in `2024-01-04T06:00+01:00`, a checkpoint, a duration."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, tzinfo

from state_backend.values.errors import UsageError
from state_backend.values.intervals import format_instant

_SECONDS = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
_DAY = re.compile(r"\d{4}-\d{2}-\d{2}|\d{8}")


def first_instant(name: str, text: str, zone: tzinfo = UTC) -> datetime:
    found = _parse(name, text)
    return (found if found.tzinfo is not None else found.replace(tzinfo=zone)).astimezone(UTC)


def last_instant(name: str, text: str, zone: tzinfo = UTC) -> datetime:
    """Return the instant in a text; for a day, its last ms. `zone`: for a text without a zone; `name`: for errors."""
    if not _DAY.fullmatch(text.strip()):
        return first_instant(name, text, zone)
    following = _parse(name, text, days=1)
    return following.replace(tzinfo=zone).astimezone(UTC) - timedelta(milliseconds=1)


def needs_zone(text: str) -> bool:
    """Return True if a text with a day or an instant names no time zone."""
    return _parse("the date", text).tzinfo is None


def parse_checkpoint(text: str) -> str | int | datetime:
    """Parse the name of a checkpoint: "latest", an id, or the end of an interval with a time zone (a datetime)."""
    if text == "latest":
        return text
    if text.isdigit():
        return int(text)
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(
            f"checkpoint {text!r} is neither 'latest', nor an id, nor the end of an interval like 2013-01-02T00:00:00+00:00"
        ) from None
    if instant.tzinfo is None:
        raise UsageError(
            f"checkpoint {text!r} has no time zone; for UTC, write {format_instant(instant.replace(tzinfo=UTC))}"
        )
    return instant


def parse_instant(name: str, text: str) -> datetime:
    found = parse_checkpoint(text)
    if not isinstance(found, datetime):
        raise UsageError(f"{name} {text!r} is not a time with time zone; write it as in 2013-01-02T00:00:00+00:00")
    return found


def parse_duration(text: str) -> timedelta:
    """Return a duration from a text like 90s, 30m, 12h or 3d."""
    match = re.fullmatch(r"(\d{1,11})([smhd])", text)
    if match is None or (seconds := int(match[1]) * _SECONDS[match[2]]) > 999_999 * _SECONDS["d"]:
        raise UsageError(f"not a duration: {text!r}; expected a number and one of s, m, h, d, like 12h")
    return timedelta(seconds=seconds)


def format_duration(duration: timedelta) -> str:
    """Return a text for `parse_duration`, in the largest unit that divides the whole seconds, like 36h."""
    seconds = int(duration.total_seconds())
    return next(f"{seconds // one}{unit}" for unit, one in _SECONDS.items() if seconds % one == 0)


def _parse(name: str, text: str, days: int = 0) -> datetime:
    try:
        return datetime.fromisoformat(text.strip()) + timedelta(days=days)
    except (ValueError, OverflowError) as error:
        raise UsageError(f"{name} {text!r} is not a date or time like 2024-01-04 or 2024-01-04T06:00+00:00") from error
