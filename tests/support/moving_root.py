"""Two pipelines with every kind of state, for a root that moves between versions: one of rows, one of frames.

`python -m tests.support.moving_root ROOT LAST` processes the days from 1 to LAST that have no result, and prints the others by pipeline.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from datetime import UTC, timedelta
from decimal import Decimal
from random import Random
from typing import Any

import pandas as pd
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import Row

from cairn.operations.intervals.run_intervals import run_intervals
from cairn.pipeline import Interval, Pipeline
from cairn.spark.session import connect
from tests.support.checkpoints import DAY, START, day

PLACE = "place struct<city: string, at: array<double>>"
INPUT = f"user string, at timestamp, amount decimal(10,2), tag string, {PLACE}"
OUTPUT = (
    "user string, kind string, total decimal(20,2), last array<struct<amount: decimal(10,2), at: timestamp>>, "
    f"tags map<string, struct<seen: long, {PLACE}>>"
)


def rows_of(interval: Interval) -> list[tuple[Any, ...]]:
    """The rows of a day. One in six is of two days before, and comes too late."""
    random, rows = Random(str(interval)), []
    for n in range(90):
        user = None if n == 7 else f"user-{random.randrange(60)}"
        at = interval.start + timedelta(minutes=random.randrange(1440)) - (2 * DAY if n % 6 == 0 else 0 * DAY)
        place = None if n % 10 == 0 else (random.choice(["Wien", "Zürich"]), [random.random(), None])
        rows.append((user, at, Decimal(random.randrange(100_000)) / 100, random.choice("abc"), place))
    return rows


def reading(schema: str) -> Any:
    """A source that is no function of a module: its code is hashed by text."""
    return lambda spark, interval: (
        spark.createDataFrame(rows_of(interval), schema),
        {"rows": len(rows_of(interval)), "day": f"{interval.start:%F}"},
    )


class Seen(StatefulProcessor):
    """A value, a list and a map of each user, and a timer at noon of the day after the last row."""

    def init(self, handle: Any) -> None:
        self._handle = handle
        self._total = handle.getValueState("total", "sum decimal(20,2), rows long")
        self._last = handle.getListState("last", "amount decimal(10,2), at timestamp")
        self._tags = handle.getMapState("tags", "tag string", f"seen long, {PLACE}")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Any]:
        for row in rows:
            self._add(row)
        yield self._told(key, "seen")

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        if key[0] == "user-3":
            self._last.clear()
        yield self._told(key, "idle")

    def _add(self, row: Any) -> None:
        total, rows = self._total.get() or (Decimal(0), 0)
        self._total.update((total + row.amount, rows + 1))
        self._last.put([*self._last.get(), (row.amount, row.at)][-3:])
        seen = self._tags.getValue((row.tag,))
        self._tags.updateValue((row.tag,), ((seen[0] if seen else 0) + 1, row.place))
        for timer in list(self._handle.listTimers()):
            self._handle.deleteTimer(timer)
        noon = row.at.replace(hour=12, minute=0, tzinfo=UTC) + DAY
        self._handle.registerTimer(int(noon.timestamp() * 1000))

    def _told(self, key: Any, kind: str) -> Any:
        last = [Row(amount=amount, at=at) for amount, at in self._last.get()]
        tags = {tag: Row(seen=seen, place=place) for (tag,), (seen, place) in self._tags.iterator()}
        return Row(user=key[0], kind=kind, total=(self._total.get() or (None,))[0], last=last, tags=tags)


class SeenInFrames(Seen):
    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        for frame in rows:
            for row in frame.itertuples():
                self._add(row)
        yield self._told(key, "seen")

    def _told(self, key: Any, kind: str) -> Any:
        told = super()._told(key, kind)
        last = [{"amount": amount, "at": at} for amount, at in told.last]
        tags = {tag: {"seen": seen, "place": place} for tag, (seen, place) in told.tags.items()}
        return pd.DataFrame(
            {"user": [told.user], "kind": [kind], "total": [told.total], "last": [last], "tags": [tags]}
        )


PIPELINES = [
    Pipeline(
        name=api,
        start=START,
        source=reading(INPUT),
        key=["user"],
        processor=processor,
        api=api,  # type: ignore[arg-type]
        output_schema=OUTPUT,
        time_mode="event",
        event_time="at",
        watermark_delay=timedelta(hours=6),
        order_by=["at", "amount"],
        parallelism=2,
        max_parallelism=16,
    )
    for api, processor in (("row", Seen), ("pandas", SeenInFrames))
]


def go_on(spark: SparkSession, root: str, last: int) -> dict[str, list[int]]:
    """The days that kept their result, by pipeline."""
    days = [day(n) for n in range(1, last + 1)]
    found = {p.name: run_intervals(spark, p, days, root) for p in PIPELINES}
    return {name: [n for n, outcome in enumerate(of, 1) if not outcome.computed] for name, of in found.items()}


if __name__ == "__main__":
    logging.getLogger("py4j").setLevel(logging.WARNING)
    session = connect("local[2]", "a root that moves")
    print(json.dumps(go_on(session, sys.argv[1], int(sys.argv[2]))))
    session.stop()
