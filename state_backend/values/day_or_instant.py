"""Read a day or an instant that a person has written, as in `2024-01-04` or `2024-01-04T06:00+01:00`."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, tzinfo

from state_backend.values.errors import UsageError

_DAY = re.compile(r"\d{4}-\d{2}-\d{2}|\d{8}")


def first_instant(name: str, text: str, zone: tzinfo = UTC) -> datetime:
    """Return the instant, or the first instant of the day."""
    found = _parse(name, text)
    return (found if found.tzinfo is not None else found.replace(tzinfo=zone)).astimezone(UTC)


def last_instant(name: str, text: str, zone: tzinfo = UTC) -> datetime:
    """Return the instant, or the last millisecond of the day. The arguments and errors are those of `first_instant`."""
    if not _DAY.fullmatch(text.strip()):
        return first_instant(name, text, zone)
    following = _parse(name, text) + timedelta(days=1)
    return following.replace(tzinfo=zone).astimezone(UTC) - timedelta(milliseconds=1)


def needs_zone(text: str) -> bool:
    """Return True if a day or an instant has no time zone of its own."""
    return _parse("the date", text).tzinfo is None


def _parse(name: str, text: str) -> datetime:
    try:
        return datetime.fromisoformat(text.strip())
    except ValueError as error:
        raise UsageError(f"{name} {text!r} is not a date or time like 2024-01-04 or 2024-01-04T06:00+00:00") from error
