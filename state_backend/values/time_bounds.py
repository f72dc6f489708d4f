"""Bounds of event times and of the lengths of time that are added to them.

Spark and Python know the years 1 to 9999. The sum of an event time and a length of time must lie in these years, or at
least fit 64 bits as an integer of microseconds.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from state_backend.values.errors import UsageError

# The longest length of time in a declaration: about 1,000 years.
LONGEST = timedelta(days=365_000)

_EPOCH, _MICROSECOND = datetime(1970, 1, 1, tzinfo=UTC), timedelta(microseconds=1)
# The first and the last event time, in microseconds since the epoch.
EARLIEST_US = (datetime.min.replace(tzinfo=UTC) - _EPOCH) // _MICROSECOND
LATEST_US = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // _MICROSECOND
LONGEST_US = LONGEST // _MICROSECOND


def check_length_of_time(what: str, value: timedelta, instead: str = "") -> None:
    """Raise `UsageError` if a length of time exceeds `LONGEST`. `what` begins the message, `instead` is advice."""
    if not -LONGEST <= value <= LONGEST:
        raise UsageError(f"{what} is {value!r}; the longest is timedelta(days={LONGEST.days}){instead}")
