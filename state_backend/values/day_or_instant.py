"""Read a day or an instant that a person has written, as in `2024-01-04` or `2024-01-04T06:00+01:00`."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, tzinfo

_DAY = re.compile(r"\d{4}-\d{2}-\d{2}|\d{8}")


def first_instant(text: str, zone: tzinfo = UTC) -> datetime:
    """Return the instant, or the first instant of the day.

    Args:
        text: A day or an instant in ISO format.
        zone: Time zone of a day, and of an instant without a time zone.

    Raises:
        ValueError: The text is neither a day nor an instant.
    """
    found = datetime.fromisoformat(text.strip())
    return (found if found.tzinfo is not None else found.replace(tzinfo=zone)).astimezone(UTC)


def last_instant(text: str, zone: tzinfo = UTC) -> datetime:
    """Return the instant, or the last millisecond of the day. The arguments and errors are those of `first_instant`."""
    if not _DAY.fullmatch(text.strip()):
        return first_instant(text, zone)
    following = datetime.fromisoformat(text.strip()) + timedelta(days=1)
    return following.replace(tzinfo=zone).astimezone(UTC) - timedelta(milliseconds=1)
