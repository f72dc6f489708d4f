"""A processor under Spark's own ``transformWithState``: the reference that ours is compared with.

One Parquet file is one micro-batch. Files are taken in the order of their modification times, so each gets its own second.
An empty file is a batch too: Spark counts files, not rows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyspark
import pytest

from cairn.spark.ddl import parse_ddl
from cairn.spark_versions import to_arrow_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, GroupedData, SparkSession
    from pyspark.sql.types import StructType

_CONF = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.shuffle.partitions": "2",
    # Else a query in processing time with AvailableNow runs empty batches for ever, and one in event time runs more
    # batches than there are files.
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    # A row read and written for each row counted; nothing here asks for the count.
    "spark.sql.streaming.stateStore.rocksdb.trackTotalNumberOfRows": "false",
}
_TIME_MODES = {"none": "None", "processing": "ProcessingTime", "event": "EventTime"}
_MTIME_S = 1_700_000_000

Rows = Sequence[tuple[Any, ...]]
# Per state and timers: what a state holds, as (key, user key or (), value, expiry in ms or None), unordered but for lists.
States = dict[str, list[tuple[Any, ...]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A processor with its input. ``batches``: the rows of each micro-batch, as tuples by ``input_schema`` (DDL).

    states: name -> "value", "list" or "map": what is read at the end. ``initial`` rows come by ``initial_schema``, which
    begins with the key columns. ``watermark_delay`` belongs to ``time_mode="event"``.
    """

    processor: Callable[[], Any]
    input_schema: str
    output_schema: str
    key: Sequence[str]
    batches: Sequence[Rows]
    states: Mapping[str, str]
    api: str = "row"
    time_mode: str = "processing"
    order_by: Sequence[str] = ("seq",)
    event_time: str = ""
    watermark_delay: timedelta = timedelta(0)
    initial_schema: str = ""
    initial: Rows = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What an engine made of a case.

    outputs: per batch, the rows in the order in which they came out, partition by partition.
    states: at the end; timers under "$timers" as (key, (), (expiry ms,), None).
    processing_times_ms, watermarks_ms: of each batch, as the engine's clock had them.
    """

    outputs: list[list[dict[str, Any]]]
    states: States
    processing_times_ms: list[int]
    watermarks_ms: list[int | None]


def has_row_operator() -> bool:
    """Whether this PySpark has `transformWithState` in Python; 4.0 has only `transformWithStateInPandas`."""
    from pyspark.sql import GroupedData

    return hasattr(GroupedData, "transformWithState")


def skip_on(version: str, difference: str) -> None:
    """Skip a test on a version of PySpark whose own operator differs from that of 4.3; docs/compared-with-spark.md lists the differences."""
    if pyspark.__version__.startswith(f"{version}."):
        pytest.skip(f"Spark {version}'s own operator differs: {difference}")


def ddl(spark: SparkSession, schema: str) -> StructType:
    return parse_ddl(spark, schema)


def write_batches(spark: SparkSession, case: Case, folder: Path) -> list[Path]:
    """One Parquet file for each batch."""
    schema = to_arrow_schema(ddl(spark, case.input_schema))
    folder.mkdir(parents=True)
    files = []
    for n, rows in enumerate(case.batches):
        columns = list(zip(*rows, strict=True)) or [()] * len(schema)
        arrays = [pa.array(column, type=field.type) for column, field in zip(columns, schema, strict=True)]
        file = folder / f"{n:05d}.parquet"
        pq.write_table(pa.Table.from_arrays(arrays, schema=schema), file)
        os.utime(file, (_MTIME_S + n, _MTIME_S + n))
        files.append(file)
    return files


def run_under_spark(
    spark: SparkSession,
    case: Case,
    files: Sequence[Path],
    checkpoint: Path,
    *,
    done: int = 0,
    initial: GroupedData | None = None,
    operator: Callable[[GroupedData], DataFrame] | None = None,
) -> Outcome:
    """Runs the case as a streaming query until its files are used up. ``done``: batches that an earlier call ran on the
    checkpoint; the outcome is that of the others. ``initial``: the initial state, if not the case's own. ``operator``: what
    runs in place of the case's processor; its states are not read."""
    if case.api == "row" and operator is None:
        skip_on("4.0", "Python has none for processors of rows")
    outputs: dict[int, list[dict[str, Any]]] = {}

    def collect(batch: DataFrame, batch_id: int) -> None:
        outputs[batch_id] = batch.toArrow().to_pylist()

    with streaming_settings(spark):
        stream = spark.readStream.schema(ddl(spark, case.input_schema)).option("maxFilesPerTrigger", 1)
        rows = stream.parquet(str(files[0].parent))
        if case.event_time:
            rows = rows.withWatermark(
                case.event_time, f"{case.watermark_delay // timedelta(milliseconds=1)} milliseconds"
            )
        grouped = rows.groupBy(*case.key)
        name = "transformWithState" if case.api == "row" else "transformWithStateInPandas"
        if case.initial_schema:
            # An RDD or a local relation would do too; a file is what a real initial state is.
            initial = spark.createDataFrame(list(case.initial), ddl(spark, case.initial_schema)).groupBy(*case.key)
        result = (
            operator(grouped)
            if operator
            else getattr(grouped, name)(
                statefulProcessor=case.processor(),
                outputStructType=ddl(spark, case.output_schema),
                outputMode="Append",
                timeMode=_TIME_MODES[case.time_mode],
                initialState=initial,
            )
        )
        writer = result.writeStream.trigger(availableNow=True).option("checkpointLocation", str(checkpoint))
        query = writer.foreachBatch(collect).start()
        try:
            query.awaitTermination()
        finally:
            query.stop()
        states = {} if operator else {n: _read_state(spark, checkpoint, n, kind) for n, kind in case.states.items()}
        if case.time_mode != "none" and not operator:
            states["$timers"] = _read_timers(spark, checkpoint)
    batches = range(done, len(files))
    offsets = [_offsets(checkpoint / "offsets" / str(n)) for n in batches]
    assert sorted(outputs) == list(batches), "one file was not one batch"
    return Outcome(
        outputs=[outputs[n] for n in batches],
        states=states,
        processing_times_ms=[o["batchTimestampMs"] for o in offsets],
        watermarks_ms=[o["batchWatermarkMs"] for o in offsets],
    )


@contextmanager
def streaming_settings(spark: SparkSession) -> Iterator[None]:
    before = {key: spark.conf.get(key, None) for key in _CONF}
    for key, value in _CONF.items():
        spark.conf.set(key, value)
    try:
        yield
    finally:
        for key, old in before.items():
            if old is None:
                spark.conf.unset(key)
            else:
                spark.conf.set(key, old)


def _offsets(file: Path) -> dict[str, Any]:
    """What Spark journals before a batch runs: version, then times and settings, then the source's position."""
    journaled: dict[str, Any] = json.loads(file.read_text().splitlines()[1])
    return journaled


def _read_state(spark: SparkSession, checkpoint: Path, name: str, kind: str) -> list[tuple[Any, ...]]:
    rows = spark.read.format("statestore").option("stateVarName", name).load(str(checkpoint)).collect()
    column = {"value": "value", "list": "list_element", "map": "user_map_value"}[kind]
    entries = []
    for row in rows:
        value, expiry_ms = row[column], None
        if "ttlExpirationMs" in value.__fields__:
            value, expiry_ms = value["value"], value["ttlExpirationMs"]
        user_key = tuple(row["user_map_key"]) if kind == "map" else ()
        entries.append((tuple(row["key"]), user_key, tuple(value), expiry_ms))
    return entries


def _read_timers(spark: SparkSession, checkpoint: Path) -> list[tuple[Any, ...]]:
    rows = spark.read.format("statestore").option("readRegisteredTimers", "true").load(str(checkpoint)).collect()
    return [(tuple(row["key"]), (), (row["expiration_timestamp_ms"],), None) for row in rows]
