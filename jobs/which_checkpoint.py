"""How a person names a checkpoint: in options of Spark's reader and on the command line."""

from __future__ import annotations

from datetime import datetime

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
