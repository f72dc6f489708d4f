"""Decide in one line why a try of a task failed, from its log and from Airflow's database."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from state_backend.values.frozen import frozen

_LONGEST = 300
# Last words of the exception that `cairn_operators.failures.exit_failure` makes for a driver without a result. The log
# has the driver's own exception in an earlier line.
LOG_ABOVE = "; its log is above"
_ADVICE = " For more information, see "  # Airflow's link to its docs, in its message about a killed process.
_RAISED = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit): \S")


@frozen
class LogLine:
    # Level of the message, such as "error"; None if the message has none.
    level: str | None
    text: str
    errors: tuple[tuple[str, str], ...] = ()
    # Name of the signal that ended the task's process, such as SIGKILL; None without one.
    signal: str | None = None


def reason_of(log: Iterable[LogLine], events: Sequence[str], retry_reason: str | None) -> str | None:
    """Return why a try failed, as one line; None if neither the log nor the database has a reason.

    The first of these that exists is the reason: the last exception in the log, with the driver's own exception if the
    driver ended without a result; the last message of the log with the level error or critical; the last of `events`,
    which the scheduler recorded, such as a missing heartbeat; `retry_reason`, the reason of the retry policy.
    """
    exception = message = of_driver = None
    for line in log:
        if line.errors:
            name, text = line.errors[0]
            exception = f"{name}: {first_line(text)}" if first_line(text) else name
            if exception.endswith(LOG_ABOVE) and of_driver is not None:
                exception = f"{exception.removesuffix(LOG_ABOVE)}: {of_driver}"
        elif _RAISED.match(line.text):
            of_driver = first_line(line.text)
        elif (line.level or "").lower() in ("error", "critical"):
            message = first_line(line.text).partition(_ADVICE)[0]
            if line.signal is not None:
                message = f"{line.signal}: {message}"
    event = first_line(events[-1]) if events else None
    found = exception or message or event or (first_line(retry_reason) if retry_reason else None)
    return None if found is None else shorten(found)


def first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def shorten(text: str) -> str:
    """Return the text, cut to 300 characters with an ellipsis as the last one if it is longer."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1].rstrip()}…"
