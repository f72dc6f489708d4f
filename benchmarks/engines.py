"""The two engines over the same files: ours an interval per file, Spark's Structured Streaming a micro-batch per file."""

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
from cairn.operations.run_interval import run_interval
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
    # As many as there are cores, and as ours has shards; the default of 200 would be a hundred times the fixed cost.
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
    """A fresh local Spark. Both engines log errors only: Spark's warns about every key that has no state yet."""
    spark = connect(master, "cairn benchmarks")
    spark.sparkContext.setLogLevel("ERROR")
    return spark


# --- ours -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One interval: its record and its wall time, from begin to the end of publishing and cleaning up."""

    record: Record
    wall_s: float

    @property
    def processing_s(self) -> float:
        """Processing and timers on the slowest shard: reading the routed rows, state, user code, output rows."""
        phases = self.record.content.durations_us
        return (phases["process"] + phases["timers"]) / 1e6


def interval(number: int) -> Interval:
    """The data interval of a batch."""
    return Interval(START + number * _HOUR, START + (number + 1) * _HOUR)


def pipeline_over(files: Sequence[Path], processor: type, output_schema: str, **settings: Any) -> Pipeline:
    """A pipeline whose n-th interval reads the n-th file."""
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
    """The first ``intervals`` intervals, one after the other; ``after`` is called untimed with each record."""
    timed = []
    for number in range(intervals):
        started_s = time.monotonic()
        record = run_interval(spark, pipeline, interval(number), str(root))
        timed.append(Timed(record=record, wall_s=time.monotonic() - started_s))
        after(record)
    return timed


def cairn_output(root: Path, timed: Sequence[Timed]) -> pa.Table:
    """All output rows."""
    return pa.concat_tables(
        pq.read_table(root / "bench" / file.handle.path) for t in timed for file in t.record.content.outputs
    )


def cairn_state(spark: SparkSession, root: Path, state: str) -> pa.Table:
    """Key columns and value columns of a state in the last checkpoint."""
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
) -> list[dict[str, Any]]:
    """Progress of every micro-batch of a query over the files, one file a batch. RuntimeError if it does not end."""
    for name, value in settings.items():
        spark.conf.set(name, value)
    rows = spark.readStream.schema(INPUT_SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(inputs))
    writer = query(rows).option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
    running = writer.start()
    if not running.awaitTermination(1_200):
        running.stop()
        raise RuntimeError("the streaming query did not end within 20 minutes")
    return [json.loads(progress.json) for progress in running.recentProgress]


def to_parquet(folder: Path) -> Callable[[DataFrame, int], None]:
    """A sink of updates, for ``foreachBatch``: streaming's own Parquet sink takes appended rows only."""

    def write(rows: DataFrame, batch: int) -> None:
        rows.write.parquet(str(folder / str(batch)))

    return write


def streaming_output(folder: Path) -> pa.Table:
    """All output rows; no attempt failed, so every file counts."""
    return pa.concat_tables(pq.ParquetFile(file).read() for file in sorted(folder.rglob("part-*.parquet")))


def streaming_state(spark: SparkSession, checkpoint: Path, state: str | None, columns: str = "value.*") -> pa.Table:
    """Key columns and value columns of a state after the last batch. ``state`` None: that of an aggregation."""
    reader = spark.read.format("statestore")
    if state is not None:
        reader = reader.option("stateVarName", state)
    return reader.load(str(checkpoint)).select("key.*", columns).toArrow()


def processing_s(progress: dict[str, Any]) -> float:
    """Time in the stateful operator: reading the shuffled rows, state, user code, output rows; without the commit of the
    state. Spark gives the sum over partitions; they run side by side, so this is the mean (ours is the slowest shard's)."""
    operator = progress["stateOperators"][0]
    summed_ms: int = operator["allUpdatesTimeMs"] + operator["allRemovalsTimeMs"]
    partitions: int = operator["numShufflePartitions"]
    return summed_ms / 1e3 / partitions
