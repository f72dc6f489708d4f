"""The two engines over the same files.

Cairn processes one interval for each file. Spark's Structured Streaming processes one micro-batch for each file.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.processors import INPUT_SCHEMA
from cairn.data_sources.keyed_state import KeyedState
from cairn.operations.intervals.run_interval import run_interval
from cairn.pipeline import Interval, Pipeline
from cairn.spark.session import connect
from state_backend.values.records import Record

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import DataStreamWriter

START = datetime(2024, 1, 1, tzinfo=UTC)
_HOUR = timedelta(hours=1)

_STORE = "spark.sql.streaming.stateStore"
PEER_SETTINGS = {
    # One partition for each core, as Cairn has one shard for each. Spark's default of 200 would have a hundred times
    # the fixed cost.
    "spark.sql.shuffle.partitions": "2",
    f"{_STORE}.providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
}
TUNED_SETTINGS = {
    f"{_STORE}.rocksdb.trackTotalNumberOfRows": "false",
    f"{_STORE}.rocksdb.changelogCheckpointing.enabled": "true",
}
TUNED = "spark tuned"
PEERS = {"spark": PEER_SETTINGS, TUNED: PEER_SETTINGS | TUNED_SETTINGS}


def start_spark(master: str = "local[2]") -> SparkSession:
    """Start a local Spark session.

    Both engines log errors only, because Spark logs a warning for every key that has no state yet.
    """
    spark = connect(master, "cairn benchmarks")
    spark.sparkContext.setLogLevel("ERROR")
    return spark


# --- ours -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One interval that was run and timed.

    Attributes:
        record: The record of the interval.
        wall_s: The wall time in seconds, from the start of the interval to the end of publishing and clean-up.
    """

    record: Record
    wall_s: float

    @property
    def processing_s(self) -> float:
        """Return the seconds of processing and timers on the slowest shard.

        This covers reading the routed rows, state, user code and output rows.
        """
        phases = self.record.content.durations_us
        return (phases["process"] + phases["timers"]) / 1e6


def interval(number: int) -> Interval:
    """Return the data interval of a batch."""
    return Interval(START + number * _HOUR, START + (number + 1) * _HOUR)


def pipeline_over(files: Sequence[Path], processor: type, output_schema: str, **settings: Any) -> Pipeline:
    """Return a pipeline whose n-th interval reads the n-th file."""
    of_start = {interval(number).start: str(file) for number, file in enumerate(files)}

    def source(spark: SparkSession, interval: Interval) -> DataFrame:
        return spark.read.schema(INPUT_SCHEMA).parquet(of_start[interval.start])

    return Pipeline(
        name="bench",
        start=START,
        source=source,
        key=["k"],
        processor=processor,
        output_schema=output_schema,
        time_mode="none",
        **settings,
    )


def run_cairn(
    spark: SparkSession,
    pipeline: Pipeline,
    root: Path,
    intervals: int,
    after: Callable[[Record], None] = lambda _: None,
) -> list[Timed]:
    """Run the first intervals in order.

    Args:
        spark: The session.
        pipeline: The pipeline.
        root: The root of the state.
        intervals: The number of intervals.
        after: A function that is called with each record, outside the measured time.
    """
    timed = []
    for number in range(intervals):
        started_s = time.monotonic()
        record = run_interval(spark, pipeline, interval(number), str(root))
        timed.append(Timed(record=record, wall_s=time.monotonic() - started_s))
        after(record)
    return timed


def cairn_output(root: Path, timed: Sequence[Timed]) -> pa.Table:
    """Return all output rows."""
    return pa.concat_tables(
        pq.read_table(root / "bench" / file.handle.path) for t in timed for file in t.record.content.outputs
    )


def cairn_state(spark: SparkSession, root: Path, state: str) -> pa.Table:
    """Return the key columns and value columns of a state in the newest checkpoint."""
    spark.dataSource.register(KeyedState)
    reader = spark.read.format("keyed_state").option("root", str(root)).option("pipeline", "bench")
    return reader.option("state", state).load().select("key.*", "value.*").toArrow()


# --- the peer ---------------------------------------------------------------------------------------------------------------


def run_streaming(
    spark: SparkSession,
    inputs: Path,
    settings: dict[str, str],
    query: Callable[[DataFrame], DataStreamWriter],
    *,
    checkpoint: Path,
    schema: str = INPUT_SCHEMA,
) -> list[dict[str, Any]]:
    """Run a streaming query over the input files, one file for each micro-batch.

    Returns:
        The progress report of every micro-batch.

    Raises:
        RuntimeError: The query does not end within 20 minutes.
    """
    for name, value in settings.items():
        spark.conf.set(name, value)
    rows = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(inputs))
    writer = query(rows).option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
    running = writer.start()
    if not running.awaitTermination(1_200):
        running.stop()
        raise RuntimeError("the streaming query did not end within 20 minutes")
    return [json.loads(progress.json) for progress in running.recentProgress]


def to_parquet(folder: Path) -> Callable[[DataFrame, int], None]:
    """Return a function for `foreachBatch` that writes each batch to Parquet.

    Spark's own Parquet sink takes appended rows only, and an aggregation gives updated rows.
    """

    def write(rows: DataFrame, batch: int) -> None:
        rows.write.parquet(str(folder / str(batch)))

    return write


def streaming_output(folder: Path) -> pa.Table:
    """Return all output rows. No task attempt failed, so every file counts."""
    return pa.concat_tables(pq.ParquetFile(file).read() for file in sorted(folder.rglob("part-*.parquet")))


def streaming_state(spark: SparkSession, checkpoint: Path, state: str | None, columns: str = "value.*") -> pa.Table:
    """Return the key columns and value columns of a state after the last batch.

    Args:
        spark: The session.
        checkpoint: The checkpoint folder of the query.
        state: The name of the state; None for the state of an aggregation.
        columns: The value columns to select.
    """
    reader = spark.read.format("statestore")
    if state is not None:
        reader = reader.option("stateVarName", state)
    return reader.load(str(checkpoint)).select("key.*", columns).toArrow()


def processing_s(progress: dict[str, Any]) -> float:
    """Return the seconds that a micro-batch spent in the stateful operator, without the commit of the state.

    This covers reading the shuffled rows, state, user code and output rows. Spark reports the sum over partitions,
    which run at the same time. So the result is the mean of the partitions, while Cairn's figure is that of the slowest
    shard.

    Args:
        progress: The progress report of the micro-batch.
    """
    operator = progress["stateOperators"][0]
    summed_ms: int = operator["allUpdatesTimeMs"] + operator["allRemovalsTimeMs"]
    partitions: int = operator["numShufflePartitions"]
    return summed_ms / 1e3 / partitions
