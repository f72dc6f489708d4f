"""`IntervalJoin` beside Spark's stream-stream join: wall time, CPU time, and equal results.

    python -m benchmarks.ready_made_joins [--rows 1000000] [--keys 1000000] [--batches 3]

Each batch is one hour with `rows` rows, half orders and half payments, of random keys. Both engines join the rows of a key
that are at most half an hour apart. One batch comes first, and is not measured. Spark runs the others in one query with
`Trigger.AvailableNow`, with state in RocksDB. Both engines read and write Parquet, in one session with two cores. CPU
seconds are those of Spark's JVM and all Python processes.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import functions as F

from benchmarks.engines import PEER_SETTINGS, cairn_output, interval, run_cairn, start_spark, streaming_output
from benchmarks.processes import with_cpu_s
from cairn import Pipeline
from cairn.processors import IntervalJoin, union_by_kind

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

HALF_AN_HOUR = timedelta(minutes=30)
SCHEMA = "id long, at timestamp, amount double"
SIDES = ("order", "payment")


class Paid(IntervalJoin):
    """Orders and payments at most half an hour apart."""

    left, right = SIDES
    lower, upper = -HALF_AN_HOUR, HALF_AN_HOUR


def write_inputs(folder: Path, rows: int, keys: int, batches: int) -> None:
    """Write a file for each side and batch."""
    chance = np.random.default_rng(7)
    for batch in range(batches + 1):
        begin = np.datetime64(interval(batch).start.replace(tzinfo=None), "us")
        for side in SIDES:
            count = rows // 2
            at = begin + chance.integers(0, 3_600_000_000, count).astype("timedelta64[us]")
            table = pa.table(
                {
                    "id": chance.integers(0, keys, count),
                    "at": pa.array(at, pa.timestamp("us", "UTC")),
                    "amount": chance.random(count),
                }
            )
            (folder / side).mkdir(parents=True, exist_ok=True)
            pq.write_table(table, folder / side / f"{batch:03}.parquet")


def pipeline(inputs: Path) -> Pipeline:
    """Return the pipeline that joins the files of both sides."""

    def source(spark: SparkSession, of: Any) -> DataFrame:
        number = (of.start - interval(0).start) // timedelta(hours=1)
        read = {side: spark.read.schema(SCHEMA).parquet(str(inputs / side / f"{number:03}.parquet")) for side in SIDES}
        return union_by_kind(read, shared=["id", "at"])

    return Pipeline(
        name="bench",
        start=interval(0).start,
        source=source,
        key=["id"],
        processor=Paid,
        api="arrow",
        time_mode="event",
        event_time="at",
        watermark_delay=timedelta(0),
        watermark="interval",
    )


def run_query(spark: SparkSession, landed: Path, folder: Path) -> None:
    """Join all files that have landed since the query before.

    Raises:
        RuntimeError: The query does not end within an hour.
    """
    sides = [
        spark.readStream.schema(SCHEMA)
        .option("maxFilesPerTrigger", 1)
        .parquet(str(landed / side))
        .withColumnsRenamed({name: f"{side}_{name}" for name in ("id", "at", "amount")})
        .withWatermark(f"{side}_at", "0 seconds")
        for side in SIDES
    ]
    near = F.expr(
        "order_id = payment_id AND payment_at BETWEEN order_at - INTERVAL 30 MINUTES AND order_at + INTERVAL 30 MINUTES"
    )
    writer = sides[0].join(sides[1], near).writeStream.format("parquet").option("path", str(folder / "output"))
    query = writer.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True).start()
    if not query.awaitTermination(3_600):
        query.stop()
        raise RuntimeError("the streaming query did not end within an hour")


def land(inputs: Path, landed: Path, batches: range) -> None:
    """Put files of both sides into the folders that the query reads."""
    for side in SIDES:
        (landed / side).mkdir(parents=True, exist_ok=True)
        for batch in batches:
            (landed / side / f"{batch:03}.parquet").hardlink_to(inputs / side / f"{batch:03}.parquet")


def pairs(rows: pa.Table, of_id: str) -> tuple[int, float]:
    """Return the number of pairs, and a sum that depends on the rows of each pair."""
    amounts = rows["order_amount"].to_numpy() * rows["payment_amount"].to_numpy() * (1 + rows[of_id].to_numpy())
    return rows.num_rows, round(float(np.sum(np.sort(amounts))), 3)


def main() -> None:
    """Run both engines, and print wall and CPU time of the measured batches.

    Raises:
        AssertionError: The results differ.
    """
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rows", type=int, default=1_000_000)
    arguments.add_argument("--keys", type=int, default=1_000_000)
    arguments.add_argument("--batches", type=int, default=3)
    given = arguments.parse_args()
    spark = start_spark()
    with tempfile.TemporaryDirectory(prefix="cairn-joins-") as made:
        folder = Path(made)
        write_inputs(folder / "inputs", given.rows, given.keys, given.batches)
        ours = pipeline(folder / "inputs")
        first = run_cairn(spark, ours, folder / "root", 1)
        land(folder / "inputs", folder / "landed", range(1))
        for name, value in PEER_SETTINGS.items():
            spark.conf.set(name, value)
        run_query(spark, folder / "landed", folder / "query")

        def cairn() -> Any:
            from cairn import run_interval

            return [run_interval(spark, ours, interval(n), str(folder / "root")) for n in range(1, given.batches + 1)]

        started = time.monotonic()
        records, cpu = with_cpu_s(cairn)
        rows = given.rows * given.batches
        print(f"cairn: {time.monotonic() - started:7.1f} s, {1e6 * cpu / rows:6.2f} us of CPU per row", flush=True)
        land(folder / "inputs", folder / "landed", range(1, given.batches + 1))
        started = time.monotonic()
        _, cpu = with_cpu_s(lambda: run_query(spark, folder / "landed", folder / "query"))
        print(f"spark: {time.monotonic() - started:7.1f} s, {1e6 * cpu / rows:6.2f} us of CPU per row", flush=True)
        files = [folder / "root" / "bench" / f.handle.path for record in records for f in record.content.outputs]
        found = pa.concat_tables([cairn_output(folder / "root", first), *map(pq.read_table, files)])
        assert pairs(found, "id") == pairs(streaming_output(folder / "query" / "output"), "order_id")
        print(f"{found.num_rows:,} pairs from each engine; bytes of state {records[-1].content.totals.state_bytes:,}")
    spark.stop()


if __name__ == "__main__":
    main()
