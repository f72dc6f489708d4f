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


class Airborne(AircraftHistory):
    """A field more in a state that is there: the minutes in the air, from now on."""

    def init(self, handle: Any) -> None:
        super().init(_Grown(handle))

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        every = list(rows)
        self._history.minutes = sum(row.air_time_minutes or 0 for row in every if row.departed)
        yield from super().handleInputRows(key, iter(every), timerValues)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        self._history.minutes = None
        yield from super().handleExpiredTimer(key, timerValues, expiredTimerInfo)


class _Grown:
    """A handle whose state "history" has the field ``air_minutes`` behind those that its processor knows."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    def getValueState(self, name: str, schema: str) -> Any:
        return _WithMinutes(self._handle.getValueState(name, f"{schema}, air_minutes long"))


class _WithMinutes:
    def __init__(self, state: Any) -> None:
        self._state = state
        self.minutes: int | None = None
        self._before: int | None = None

    def get(self) -> Any:
        found = self._state.get()
        self._before = None if found is None else found[-1]
        return None if found is None else tuple(found)[:-1]

    def update(self, values: tuple[Any, ...]) -> None:
        known = self._before if self.minutes is None else (self._before or 0) + self.minutes
        self._state.update((*values, known))


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
