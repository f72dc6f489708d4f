"""Intervals of one pipeline, run by a process in whatever zone its TZ says.

    TZ=Asia/Kolkata python -m tests.conformance.hosts ROOT FIRST END

runs the intervals FIRST .. END-1 and prints the last checkpoint's digest and all rows that they emitted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import Row

from cairn.operations.intervals.run_interval import run_interval
from cairn.pipeline import Interval, Pipeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

START = datetime(2024, 11, 3, 4, tzinfo=UTC)
HOUR = timedelta(hours=1)


class WallClock(StatefulProcessor):
    """Computes with wall time in all the ways that depend on a process's zone."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.last = handle.getValueState("last", "at timestamp, naive timestamp")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            before = self.last.get()
            self.last.update((row.at, datetime(2024, 11, 3, 1, 30)))
            at, naive = self.last.get()
            yield Row(
                user=key[0],
                elapsed=row.at.timestamp() - before[0].timestamp() if before else None,
                wall=f"{at} {at.hour} {datetime.fromtimestamp(row.at.timestamp())} {datetime.fromtimestamp(0)}",
                naive=naive.timestamp(),
                naive_out=naive,
            )
        self.handle.registerTimer(timerValues.getCurrentProcessingTimeInMs())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        yield Row(user=key[0], wall=f"{key}")


def read_rows(spark: SparkSession, interval: Interval) -> DataFrame:
    rows = [(user, interval.start + timedelta(minutes=m)) for user in "ab" for m in (0, 9, 30)]
    return spark.createDataFrame(rows, "user string, at timestamp")


def pipeline(**changes: Any) -> Pipeline:
    settings: dict[str, Any] = {
        "name": "hosts",
        "start": START,
        "source": read_rows,
        "key": ["user"],
        "order_by": ["at"],
        "processor": WallClock,
        "output_schema": "user string, elapsed double, wall string, naive double, naive_out timestamp",
        "max_parallelism": 8,
    }
    return Pipeline(**settings | changes)


def run_hours(spark: SparkSession, root: Path, first: int, end: int, **changes: Any) -> dict[str, Any]:
    """What the last checkpoint and all outputs of these hours hold."""
    rows: list[str] = []
    digest = 0
    for n in range(first, end):
        record = run_interval(spark, pipeline(**changes), Interval(START + n * HOUR, START + (n + 1) * HOUR), str(root))
        files = [root / "hosts" / f.handle.path for f in record.content.outputs]
        rows += sorted(repr(row) for file in files for row in pq.read_table(file).to_pylist())
        digest = record.content.digest
    return {"digest": digest, "rows": rows}


if __name__ == "__main__":
    from cairn.spark.session import connect

    session = connect("local[1]", "hosts")
    session.sparkContext.setLogLevel("OFF")
    print(json.dumps(run_hours(session, Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
