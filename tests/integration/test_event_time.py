"""Event time through intervals: watermark, late rows, timers; and state that a pipeline starts with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import Row

from cairn.aggregates import Count, Sum
from cairn.operations.intervals.run_interval import run_interval
from cairn.pipeline import Interval, Pipeline
from cairn.processors import SessionWindow, SlidingWindow, TumblingWindow
from cairn.testing import PipelineTester
from state_backend.values import errors
from state_backend.values.records import Record
from tests.support.spark_streaming import streaming_settings
from tests.support.spark_tables import output_rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

START = datetime(2024, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)
# By start of interval: (user, minutes after START or None, amount).
HOURS: dict[datetime, list[tuple[str, int | None, int]]] = {}


def hour(n: int) -> Interval:
    return Interval(START + n * HOUR, START + (n + 1) * HOUR)


def ms(minutes: float) -> int:
    return int((START + timedelta(minutes=minutes)).timestamp() * 1000)


def read_hours(spark: SparkSession, interval: Interval) -> DataFrame:
    rows = [(user, m if m is None else START + timedelta(minutes=m), n) for user, m, n in HOURS.get(interval.start, [])]
    return spark.createDataFrame(rows, "user string, at timestamp, amount long")


class Windows(StatefulProcessor):
    """Sums per user and half hour; a window is emitted when the watermark passes its end."""

    def init(self, handle: Any) -> None:
        self._handle = handle
        self._sums = handle.getMapState("sums", "ends long", "sum long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            if row.at is None:
                continue
            at_ms = int(row.at.replace(tzinfo=UTC).timestamp() * 1000)
            ends = at_ms - at_ms % 1_800_000 + 1_800_000
            old = self._sums.getValue((ends,))
            self._sums.updateValue((ends,), ((old[0] if old else 0) + row.amount,))
            self._handle.registerTimer(ends)
        yield Row(user=key[0], what="seen", at=timerValues.getCurrentWatermarkInMs(), sum=None)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        ends = expiredTimerInfo.getExpiryTimeInMs()
        (total,) = self._sums.getValue((ends,))
        self._sums.removeKey((ends,))
        assert timerValues.getCurrentWatermarkInMs() >= ends
        yield Row(user=key.user, what="window", at=ends, sum=total)

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self._sums.updateValue((initialState.ends,), (initialState.sum,))
        self._handle.registerTimer(initialState.ends)


WINDOWS = {
    "name": "windows",
    "start": START,
    "source": read_hours,
    "key": ["user"],
    "processor": Windows,
    "output_schema": "user string, what string, at long, sum long",
    "time_mode": "event",
    "event_time": "at",
    "watermark_delay": timedelta(minutes=10),
    "max_parallelism": 16,
}


def windows(**changes: Any) -> Pipeline:
    return Pipeline(**{**WINDOWS, **changes})


@pytest.fixture(autouse=True)
def hours() -> Iterator[None]:
    HOURS.clear()
    HOURS[hour(0).start] = [("ann", 5, 1), ("ann", 25, 2), ("bob", 50, 4), ("bob", None, 100)]
    HOURS[hour(1).start] = [("ann", 29, 8), ("ann", 40, 16), ("ann", 45, 32), ("bob", 70, 64)]
    HOURS[hour(3).start] = [("bob", 200, 128), ("ann", 60, 8)]
    yield
    HOURS.clear()


def run(spark: SparkSession, root: Path, **changes: Any) -> list[Record]:
    return [run_interval(spark, windows(**changes), hour(n), str(root)) for n in range(5)]


def test_the_observed_watermark_applies_to_the_next_interval(spark: SparkSession, tmp_path: Path) -> None:
    """Spark's rule. The watermark after hour 0 is 00:40: timers up to it fire in hour 1, after rows as old. After hour 1 it is
    01:00, by which hour 2 fires; rows up to it are late in hour 3, and go to a file of their own."""
    records = run(spark, tmp_path)
    assert [r.content.time.watermark_ms for r in records] == [ms(40), ms(60), ms(60), ms(190), ms(190)]
    assert [r.content.time.late_watermark_ms for r in records] == [0, ms(40), ms(60), ms(60), ms(190)]
    assert [r.content.totals.late_rows for r in records] == [0, 0, 0, 1, 0]
    assert [r.content.totals.input_rows for r in records] == [4, 4, 0, 2, 0]
    assert output_rows(spark, tmp_path, hour(0), pipeline="windows") == [
        ("ann", "seen", 0, None),
        ("bob", "seen", 0, None),
    ]
    assert output_rows(spark, tmp_path, hour(1), pipeline="windows") == [
        ("ann", "seen", ms(40), None),
        ("ann", "window", ms(30), 11),
        ("bob", "seen", ms(40), None),
    ]
    at = START.replace(tzinfo=None)
    assert output_rows(spark, tmp_path, hour(3), pipeline="windows", late=True) == [
        ("ann", at + timedelta(minutes=60), 8)
    ]
    assert output_rows(spark, tmp_path, hour(2), pipeline="windows") == [
        ("ann", "window", ms(60), 48),
        ("bob", "window", ms(60), 4),
    ]
    # An interval without input closes what the one before it made due.
    assert output_rows(spark, tmp_path, hour(4), pipeline="windows") == [("bob", "window", ms(90), 64)]


class Tumbling(TumblingWindow):
    size = HOUR
    n = Count()
    total = Sum("amount")


class Sliding(SlidingWindow):
    size = HOUR
    slide = timedelta(minutes=20)
    n = Count()
    total = Sum("amount")


class Sessions(SessionWindow):
    gap = timedelta(minutes=10)
    n = Count()
    total = Sum("amount")


@pytest.mark.long("ten seconds of Spark")
@pytest.mark.parametrize(
    ("processor", "window"),
    [
        (Tumbling, lambda: F.window("at", "1 hour")),
        (Sliding, lambda: F.window("at", "1 hour", "20 minutes")),
        (Sessions, lambda: F.session_window("at", "10 minutes")),
    ],
)
def test_windows_count_the_rows_that_sparks_windows_count(
    spark: SparkSession, tmp_path: Path, processor: Any, window: Any
) -> None:
    """Rows are up to three hours late, the delay is 30 minutes. A batch of the next day closes all windows."""
    random, batches = Random(7), []
    for n in range(8):
        minutes = [60 * n + random.randrange(60) - random.choice((0, 0, 1)) * random.randrange(180) for _ in range(60)]
        batches.append([(random.choice("abcd"), START + timedelta(minutes=m), random.randrange(9)) for m in minutes])
    batches += [[("end", START + timedelta(days=n), 0)] for n in (1, 2, 3)]
    schema = pa.schema([("user", pa.string()), ("at", pa.timestamp("us", "UTC")), ("amount", pa.int64())])
    (tmp_path / "in").mkdir()
    for n, rows in enumerate(batches):
        file = tmp_path / "in" / f"{n:03}.parquet"
        pq.write_table(pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema), file)
        os.utime(file, (1_700_000_000 + n,) * 2)
    read = spark.readStream.schema("user string, at timestamp, amount long").option("maxFilesPerTrigger", 1)
    grouped = read.parquet(str(tmp_path / "in")).withWatermark("at", "30 minutes").groupBy("user", window().alias("w"))
    theirs: list[tuple[Any, ...]] = []

    def collect(batch: DataFrame, _: int) -> None:
        columns = (F.col(name).cast("long") for name in ("w.start", "w.end", "n", "total"))
        theirs.extend(tuple(row) for row in batch.select("user", *columns).collect())

    result = grouped.agg(F.count("*").alias("n"), F.sum("amount").alias("total"))
    writer = result.writeStream.trigger(availableNow=True).option("checkpointLocation", str(tmp_path / "checkpoint"))
    with streaming_settings(spark):
        writer.foreachBatch(collect).start().awaitTermination()

    pipeline = windows(processor=processor, api="arrow", output_schema=None, watermark_delay=timedelta(minutes=30))
    tester = PipelineTester(pipeline, input_schema="user string, at timestamp, amount long", every=HOUR)
    results = [tester.run(rows) for rows in batches]
    ours = [
        (row["user"], *(int(row[bound].timestamp()) for bound in processor.bounds), row["n"], row["total"])
        for result in results
        for row in result.output
    ]
    assert sorted(row for row in ours if row[0] != "end") == sorted(row for row in theirs if row[0] != "end")
    of_event_time = sum(
        at <= max(row[1] for row in batches[n - 2]) - timedelta(minutes=30)
        for n in range(2, 8)
        for _, at, _ in batches[n]
    )
    assert 0 < sum(len(result.late) for result in results) < of_event_time


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"event_time": None}, "needs event_time, as in"),
        ({"watermark_delay": None}, "needs watermark_delay"),
        ({"watermark_delay": timedelta(-1)}, "which is negative; give 0 or more"),
        ({"time_mode": "processing"}, "event_time and watermark_delay needs time_mode='event'"),
        ({"watermark": "seen"}, "watermark='seen' is not one of observed, interval"),
        ({"api": "numpy"}, "api='numpy' is not one of row, pandas, arrow"),
    ],
)
def test_invalid_event_time_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.UsageError, match=message):
        windows(**changes)
