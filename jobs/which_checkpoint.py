"""How a person names a checkpoint, in options of Spark's reader and on the command line, and a duration there."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

from state_backend.values.errors import UsageError


def parse_checkpoint(text: str) -> str | int | datetime:
    """``latest``, an id, or an interval end in ISO format with a time zone."""
    if text == "latest":
        return text
    if text.isdigit():
        return int(text)
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(
            f"checkpoint {text!r} is neither 'latest', an id, nor an interval end like 2013-01-02T00:00:00+00:00"
        ) from None
    if instant.tzinfo is None:
        raise UsageError(f"checkpoint {text!r} has no time zone")
    return instant


def parse_duration(text: str) -> timedelta:
    """``90s``, ``30m``, ``12h`` or ``3d``; UsageError otherwise."""
    match = re.fullmatch(r"(\d{1,6})([smhd])", text)
    if match is None:
        raise UsageError(f"not a duration: {text!r}; expected a number and one of s, m, h, d, like 12h")
    return int(match[1]) * timedelta(**{{"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}[match[2]]: 1})
