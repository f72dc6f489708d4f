"""Changes of the aircraft's processor that somebody might try."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pyspark.sql import Row

from pipelines.aircraft import AIRCRAFT, AircraftHistory


class WrongMean(AircraftHistory):
    """A planted mistake: the mean is of one flight too many."""

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        return map(_wrong, super().handleInputRows(key, rows, timerValues))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        return map(_wrong, super().handleExpiredTimer(key, timerValues, expiredTimerInfo))


class LaterTimer(AircraftHistory):
    """Idle a day later, and a state more: the last day that an aircraft was seen, cancelled or not."""

    def init(self, handle: Any) -> None:
        super().init(handle)
        self._seen = handle.getValueState("seen", "day date")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        every = list(rows)
        yield from super().handleInputRows(key, iter(every), _Later(timerValues))
        if key[0] is not None:
            self._seen.update((every[-1].scheduled_departure.date(),))


class _Later:
    def __init__(self, values: Any) -> None:
        self._values = values

    def getCurrentProcessingTimeInMs(self) -> int:
        return int(self._values.getCurrentProcessingTimeInMs()) + 86_400_000


def _wrong(row: Row) -> Row:
    mean = row.prior_mean_delay_minutes
    return row if mean is None else Row(**(row.asDict() | {"prior_mean_delay_minutes": mean + 1.0}))


WRONG = replace(AIRCRAFT, processor=WrongMean)
LATER = replace(AIRCRAFT, processor=LaterTimer, version="later")
