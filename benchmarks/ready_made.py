"""Bytes of state per key of the ready-made processors, and their speed beside Spark's own operators.

    python -m benchmarks.ready_made [--keys 100000]
    python -m benchmarks.ready_made --spark sessions sliding --keys 1000000 --rows 1000000

Bytes, without Spark: each processor gets one row per key in one interval, and writes a full checkpoint. The keys are
random UUIDs as strings of 36 characters. The other columns are given for each case. The figures are the sizes of the
files of state, which are compressed, and the sizes of the keys and values that the interval wrote, which are not.

Speed: both engines read the same files, one file for each interval or micro-batch, with the rows of one hour. Spark runs
its own operator with `Trigger.AvailableNow` and RocksDB. Cairn runs the processor with the watermark rule of Spark. Both
outputs must be equal. The figures are the CPU seconds of all processes, and the wall seconds of the whole run.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks import engines
from benchmarks.processes import with_cpu_s
from cairn import Pipeline
from cairn.aggregates import Count, Max, Sum
from cairn.processors import (
    Deduplicate,
    Funnel,
    History,
    IntervalJoin,
    Latest,
    LookupJoin,
    SessionWindow,
    SlidingWindow,
    TopN,
    TumblingWindow,
)
from cairn.testing import PipelineTester

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

START = datetime(2024, 1, 1, tzinfo=UTC)
SCHEMA = "id string, at timestamp, amount double, city string, gone boolean"


class First(Deduplicate):
    """The first row of each key."""

    horizon = timedelta(days=7)


class Last(First):
    """The last row of each key."""

    keep = "last"


class Newest(Latest):
    """The newest row of each key."""

    version = "at"


class Ever(Deduplicate):
    """The first row of each key, for ever."""

    horizon = None


class NewestOrDeleted(Latest):
    """The newest row of each key; each key is deleted."""

    version = "at"
    deleted = "gone"
    horizon = timedelta(days=7)


class Hourly(TumblingWindow):
    """Three aggregates of each hour."""

    size = timedelta(hours=1)
    rows = Count()
    total = Sum("amount")
    highest = Max("amount")


class Early(Hourly):
    """Windows with a version."""

    early = True


class Overlapping(SlidingWindow):
    """Three aggregates of each hour, every 20 minutes."""

    size = timedelta(hours=1)
    slide = timedelta(minutes=20)
    rows = Count()
    total = Sum("amount")
    highest = Max("amount")


class Visits(SessionWindow):
    """Three aggregates of each session."""

    gap = timedelta(minutes=10)
    rows = Count()
    total = Sum("amount")
    highest = Max("amount")


class Route(Funnel):
    """Two cities within an hour."""

    step = "city"
    steps = ("Oslo", "Rome")
    within = timedelta(hours=1)


class Best(TopN):
    """The ten best rows of each key."""

    n = 10
    order = "amount desc"


class Near(IntervalJoin):
    """Pairs of rows at most a day apart."""

    left, right = "a", "b"
    lower, upper = -timedelta(days=1), timedelta(days=1)


class NearOrAlone(Near):
    """Pairs, and rows without partner."""

    how = "full"


class AsOf(LookupJoin):
    """Facts with the version of their time."""

    facts, table = "a", "b"


SIDES = "id string, at timestamp, a_amount double, a_city string, b_amount double, b_city string, kind string"


def some_rows(keys: int, rows_per_key: int) -> pa.Table:
    """Return rows with random values, in a random order."""
    rng = random.Random(7)
    ids = [str(uuid.UUID(int=rng.getrandbits(128))) for _ in range(keys)] * rows_per_key
    times = [START + timedelta(microseconds=rng.randrange(3_600_000_000)) for _ in ids]
    return pa.table(
        {
            "id": ids,
            "at": pa.array(times, pa.timestamp("us", "UTC")),
            "amount": [rng.random() for _ in ids],
            "city": [rng.choice(("Amsterdam", "Berlin", "Oslo", "Rome")) for _ in ids],
            "gone": pc.equal(pa.array([rng.random() for _ in ids]), -1.0),
        }
    )


def rows_of_side(keys: int, side: str) -> pa.Table:
    """Return one row per key of one input of a join."""
    other = "b" if side == "a" else "a"
    rows = some_rows(keys, 1).select(["id", "at", "amount", "city"])
    rows = rows.rename_columns(["id", "at", f"{side}_amount", f"{side}_city"])
    rows = rows.append_column(f"{other}_amount", pa.nulls(keys, pa.float64()))
    rows = rows.append_column(f"{other}_city", pa.nulls(keys, pa.string()))
    return rows.append_column("kind", pa.array([side] * keys))


def measure(
    name: str,
    processor: type,
    keys: int,
    rows_per_key: int = 1,
    side: str | None = None,
    *,
    gone: bool = False,
    city: str | None = None,
    **settings: Any,
) -> None:
    """Run one interval, and print the bytes per key."""
    pipeline = Pipeline(
        name="bytes",
        start=START,
        source=lambda spark, interval: spark.range(0),
        key=["id"],
        api="arrow",
        processor=processor,
        order_by=["at"],
        **settings,
    )
    tester = PipelineTester(pipeline, input_schema=SIDES if side else SCHEMA, mode="full")
    rows = rows_of_side(keys, side) if side else some_rows(keys, rows_per_key)
    if gone:
        rows = rows.set_column(rows.column_names.index("gone"), "gone", pa.array([True] * len(rows)))
    if city is not None:
        rows = rows.set_column(rows.column_names.index("city"), "city", pa.array([city] * len(rows)))
    record = tester.run(rows).record
    assert record is not None
    totals = record.content.totals
    files, written = totals.state_bytes / keys, totals.changed_bytes / keys
    print(f"{name:44} {files:8.1f} bytes in files {written:8.1f} bytes of keys and values, per key", flush=True)


# --- beside Spark -----------------------------------------------------------------------------------------------------

DELAY = timedelta(minutes=30)
# Rows of one batch are at most 89 minutes apart.
LONG_DELAY = timedelta(minutes=90)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A processor and Spark's operator for the same output.

    Attributes:
        processor: The processor.
        query: Spark's query over rows with a watermark.
        delay: The delay of the watermark.
        new_keys: True if each batch has keys of its own. Spark may take a row for a duplicate until the next batch, long
            after its delay has passed.
    """

    processor: type
    query: Callable[[DataFrame], DataFrame]
    delay: timedelta = DELAY
    new_keys: bool = False


class FirstWithinDelay(Deduplicate):
    """The first row of each key within Spark's delay."""

    horizon = LONG_DELAY


def _deduplicated(rows: DataFrame) -> DataFrame:
    # Spark keeps any of the duplicates, so that only the key can be compared.
    return rows.dropDuplicatesWithinWatermark(["id"])


def _aggregated(window: Callable[[], Any], names: tuple[str, str]) -> Callable[[DataFrame], DataFrame]:
    def query(rows: DataFrame) -> DataFrame:
        from pyspark.sql import functions as F

        totals = rows.groupBy("id", window().alias("w")).agg(
            F.count("*").alias("rows"), F.sum("amount").alias("total"), F.max("amount").alias("highest")
        )
        bounds = [F.col("w.start").alias(names[0]), F.col("w.end").alias(names[1])]
        return totals.select("id", *bounds, "rows", "total", "highest")

    return query


def _window(*spans: str) -> Any:
    from pyspark.sql import functions as F

    return F.window("at", *spans)


def _session(gap: str) -> Any:
    from pyspark.sql import functions as F

    return F.session_window("at", gap)


_WINDOW, _SESSION = ("window_start", "window_end"), ("session_start", "session_end")
CASES = {
    "deduplicate": Case(processor=FirstWithinDelay, query=_deduplicated, delay=LONG_DELAY, new_keys=True),
    "tumbling": Case(processor=Hourly, query=_aggregated(lambda: _window("1 hour"), _WINDOW)),
    "sliding": Case(processor=Overlapping, query=_aggregated(lambda: _window("1 hour", "20 minutes"), _WINDOW)),
    "sessions": Case(processor=Visits, query=_aggregated(lambda: _session("10 minutes"), _SESSION)),
}


def write_inputs(folder: Path, keys: int, rows: int, batches: int, *, new_keys: bool = False) -> list[Path]:
    """Write one file for each hour: rows of random keys, a tenth of them up to 30 minutes late."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(7)
    files = []
    for batch in range(batches):
        minutes = rng.uniform(60 * batch, 60 * (batch + 1), rows)
        minutes -= np.where(rng.random(rows) < 0.1, rng.uniform(0, 29, rows), 0)
        at = np.int64(START.timestamp()) * 1_000_000 + (minutes * 60_000_000).astype(np.int64)
        table = pa.table(
            {
                "id": rng.integers(0, keys, rows) + (batch * keys if new_keys else 0),
                "at": pa.array(at).cast(pa.timestamp("us", "UTC")),
                # Whole numbers, whose sum does not depend on the order.
                "amount": rng.integers(0, 1000, rows).astype(np.float64),
            }
        )
        files.append(folder / f"{batch:04}.parquet")
        pq.write_table(table, files[-1])
    return files


SPEED_SCHEMA = "id bigint, at timestamp, amount double"


def beside_spark(name: str, keys: int, rows: int, batches: int) -> None:
    """Run both engines over the same files, compare their outputs, and print CPU and wall time per row."""
    case = CASES[name]
    # Spark's maintenance thread may still write into the folder.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made:
        folder = Path(made)
        files = write_inputs(folder / "inputs", keys, rows, batches, new_keys=case.new_keys)
        small = write_inputs(folder / "small", 1000, 1000, 2)
        spark = engines.start_spark()
        for setting, value in engines.PEER_SETTINGS.items():
            spark.conf.set(setting, value)
        spark.conf.set("spark.sql.streaming.noDataMicroBatches.enabled", "false")
        spark.conf.set("spark.sql.session.timeZone", "UTC")

        def with_cairn(inputs: Sequence[Path], root: Path) -> list[engines.Timed]:
            of_start = {engines.interval(number).start: str(file) for number, file in enumerate(inputs)}
            pipeline = Pipeline(
                name="bench",
                start=engines.START,
                source=lambda spark, interval: spark.read.schema(SPEED_SCHEMA).parquet(of_start[interval.start]),
                key=["id"],
                processor=case.processor,
                api="arrow",
                order_by=["at"],
                time_mode="event",
                event_time="at",
                watermark_delay=case.delay,
                watermark="observed",
            )
            return engines.run_cairn(spark, pipeline, root, len(inputs))

        def with_spark(inputs: Path, target: Path) -> list[dict[str, Any]]:
            def query(read: DataFrame) -> Any:
                result = case.query(read.withWatermark("at", f"{case.delay // timedelta(minutes=1)} minutes"))
                return result.writeStream.outputMode("append").format("parquet").option("path", str(target))

            return engines.run_streaming(
                spark, inputs, {}, query, checkpoint=target.with_suffix(".checkpoint"), schema=SPEED_SCHEMA
            )

        with_cairn(small, folder / "warm")
        with_spark(folder / "small", folder / "warm-spark")
        figures: dict[str, tuple[float, float]] = {}
        begun = time.monotonic()
        timed, cpu_s = with_cpu_s(lambda: with_cairn(files, folder / "root"))
        figures["cairn"] = (cpu_s, time.monotonic() - begun)
        begun = time.monotonic()
        progress, cpu_s = with_cpu_s(lambda: with_spark(folder / "inputs", folder / "spark"))
        figures["spark"] = (cpu_s, time.monotonic() - begun)
        in_operator = {
            "cairn": sum(t.processing_s for t in timed),
            "spark": sum(engines.processing_s(p) for p in progress),
        }
        ours, theirs = engines.cairn_output(folder / "root", timed), engines.streaming_output(folder / "spark")
        columns = ["id"] if name == "deduplicate" else theirs.column_names
        order = [(column, "ascending") for column in columns]
        schema = ours.select(columns).schema
        ours, theirs = (t.select(columns).cast(schema).sort_by(order) for t in (ours, theirs))
        equal = "equal" if ours.equals(theirs) else "DIFFERENT"
        for engine, (cpu, wall) in figures.items():
            per_row = 1e6 / (rows * batches)
            print(
                f"{name:12} {engine:6} CPU {cpu:7.1f} s {cpu * per_row:6.2f} µs/row, wall {wall:7.1f} s {wall * per_row:6.2f} µs/row, "
                f"operator {in_operator[engine]:6.1f} s",
                flush=True,
            )
        print(f"{name:12} outputs of {len(ours)} and {len(theirs)} rows are {equal}", flush=True)


def main() -> None:
    """Measure each processor."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--keys", type=int, default=100_000)
    arguments.add_argument("--spark", choices=CASES, nargs="+", default=[], help="measure the speed beside Spark")
    arguments.add_argument("--rows", type=int, default=1_000_000, help="rows of each batch, for --spark")
    arguments.add_argument("--batches", type=int, default=3, help="for --spark")
    given = arguments.parse_args()
    keys = given.keys
    for name in given.spark:
        beside_spark(name, keys, given.rows, given.batches)
    if given.spark:
        return
    timed: dict[str, Any] = {
        "time_mode": "event",
        "event_time": "at",
        "watermark_delay": timedelta(days=1),
        "watermark": "interval",
    }
    measure("Deduplicate, first", First, keys, **timed)
    measure("Deduplicate, last, a row of 4 columns", Last, keys, **timed)
    measure("Deduplicate, first, horizon None", Ever, keys)
    measure("Latest, a row of 4 columns", Newest, keys)
    measure("Latest, a deleted key", NewestOrDeleted, keys, gone=True)
    for changes in (1, 2, 10):
        measure(f"History, changes of 4 columns: {changes}", History, keys // changes, changes, **timed)
    measure("TumblingWindow, 1 open window of 3 aggregates", Hourly, keys, **timed)
    measure("TumblingWindow, the same with early", Early, keys, **timed)
    measure("SlidingWindow, 1 open pane of 3 aggregates", Overlapping, keys, **timed)
    measure("SessionWindow, 1 open session of 3 aggregates", Visits, keys, **timed)
    measure("Funnel, half of the rows are steps", Route, keys, **timed)
    for rows in (1, 2, 10):
        measure(f"Funnel, rows of the first step: {rows}", Route, keys // rows, rows, city="Oslo", **timed)
    measure("TopN, 1 row of 4 columns", Best, keys)
    measure("TopN, 10 rows of 4 columns", Best, keys // 10, 10)
    measure("IntervalJoin, inner, 1 row of 3 columns", Near, keys, side="a", **timed)
    measure("IntervalJoin, full, 1 row of 3 columns", NearOrAlone, keys, side="a", **timed)
    measure("LookupJoin, 1 version of 3 columns", AsOf, keys, side="b", **timed)
    measure("LookupJoin, 1 waiting fact of 3 columns", AsOf, keys, side="a", **timed)


if __name__ == "__main__":
    main()
