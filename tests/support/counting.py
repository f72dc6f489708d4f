"""A small pipeline over rows that a test makes: it uses every kind of state, timers and expiry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import Row

from cairn.pipeline import Interval, Pipeline

START = datetime(2024, 1, 1, tzinfo=UTC)
DAY = timedelta(days=1)
INPUT_SCHEMA = "user string, item string, amount long"
OUTPUT_SCHEMA = "user string, kind string, total long, items array<string>, last array<long>"

# What each day's source reads: (user, item, amount). Tests fill it; it lives on the driver only.
DAYS: dict[datetime, list[tuple[str | None, str, int]]] = {}


# Days of a few keys: one is null, and two days have no rows.
FEW_ROWS: dict[int, list[tuple[str | None, str, int]]] = {
    0: [("ann", "pear", 1), ("bob", "fig", 5), ("ann", "fig", 2), (None, "fig", 9)],
    1: [("ann", "pear", 3)],
    4: [("bob", "kiwi", 1)],
}


def day(n: int) -> Interval:
    """The n-th data interval, from 0."""
    return Interval(START + n * DAY, START + (n + 1) * DAY)


def put_days(rows: Mapping[int, list[tuple[str | None, str, int]]]) -> None:
    """Make these the rows of the days of these numbers, and leave all other days without rows."""
    DAYS.clear()
    DAYS.update({day(n).start: [*of_day] for n, of_day in rows.items()})


def fresh_days(rows: Mapping[int, list[tuple[str | None, str, int]]], *others: Any) -> Any:
    """Return a fixture for all tests of a module: `put_days` before each. Afterwards DAYS and the others are empty."""

    @pytest.fixture(autouse=True)
    def days() -> Iterator[None]:
        put_days(rows)
        yield
        for each in (DAYS, *others):
            each.clear()

    return days


def read_days(spark: SparkSession, interval: Interval) -> DataFrame:
    return spark.createDataFrame(DAYS.get(interval.start, []), INPUT_SCHEMA)


class Counting(StatefulProcessor):
    """Per user: a total, the items seen within three days, the last amounts, and a timer two days after the last row."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._total = handle.getValueState("total", "sum long, rows long")
        self._items = handle.getMapState("items", "item string", "seen long", 3 * 86_400_000)
        self._amounts = handle.getListState("amounts", "amount long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        total, count = self._total.get() or (0, 0)
        for row in rows:
            total, count = total + row.amount, count + 1
            seen = self._items.getValue((row.item,))
            self._items.updateValue((row.item,), ((seen[0] if seen else 0) + 1,))
            self._amounts.appendValue((row.amount,))
        self._total.update((total, count))
        for timer in list(self._handle.listTimers()):
            self._handle.deleteTimer(timer)
        self._handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + 2 * 86_400_000)
        yield self._row(key, "seen")

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        yield self._row(key, "idle")

    def _row(self, key: Any, kind: str) -> Row:
        items = [item for ((item,), _) in self._items.iterator()]
        amounts = [amount for (amount,) in self._amounts.get()]
        total = self._total.get()
        return Row(user=key[0], kind=kind, total=total[0] if total else None, items=items, last=amounts[-3:])


COUNTING = Pipeline(
    name="counting",
    start=START,
    source=read_days,
    key=["user"],
    processor=Counting,
    output_schema=OUTPUT_SCHEMA,
    time_mode="processing",
    order_by=["amount"],
    parallelism=2,
    max_parallelism=16,
)


def counting(**changes: Any) -> Pipeline:
    """The pipeline with some settings changed."""
    return replace(COUNTING, **changes)
