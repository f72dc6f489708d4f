"""The same flights in Spark's own Structured Streaming: one query with ``Trigger.AvailableNow`` over the days that have landed since the last.

It runs the processor of the pipeline ``aircraft``, with its state in RocksDB and its output in Parquet, on a Spark Connect server.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.engines import PEER_SETTINGS
from cairn.data_sources.keyed_state import KeyedState
from cairn.spark.session import connect
from pipelines.aircraft import OUTPUT_SCHEMA, READ_SCHEMA, AircraftHistory
from pipelines.land_flights import FLIGHT_SCHEMA, day_file

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

COMPARED = ("tailnum", "flights", "delays_count", "delay_sum_minutes")
# By aircraft: flights, flights with a delay, minutes of delay. The rest of the state depends on the order of rows, and on the clock.
Totals = dict[str, tuple[int, ...]]


def land_and_run(server: str, flights: Path, folder: Path, days: Sequence[date]) -> None:
    """Adds the files of these days to the query's input, and runs it until it has read them. RuntimeError if it does not end."""
    (folder / "input").mkdir(parents=True, exist_ok=True)
    for day in days:
        part = folder / "input" / f"{day.isoformat()}.parquet"
        if not part.exists():  # a task that is tried again
            os.link(flights / day_file(day), part)
    spark = connect(server, "available now")
    try:
        # In processing time each batch says that another is due, also one without data: the query would never end.
        for name, value in {**PEER_SETTINGS, "spark.sql.streaming.noDataMicroBatches.enabled": "false"}.items():
            spark.conf.set(name, value)
        rows = spark.readStream.schema(READ_SCHEMA).parquet(f"file://{folder}/input").select(*FLIGHT_SCHEMA.names)
        result = rows.groupBy("tailnum").transformWithState(
            AircraftHistory(), OUTPUT_SCHEMA, "append", "processingTime"
        )
        writer = result.writeStream.outputMode("append").format("parquet").option("path", f"{folder}/output")
        query = writer.option("checkpointLocation", f"{folder}/checkpoint").trigger(availableNow=True).start()
        if not query.awaitTermination(600):
            query.stop()
            raise RuntimeError("the streaming query did not end within ten minutes")
    finally:
        spark.stop()


def totals_of_query(server: str, folder: Path) -> Totals:
    """What the query's state has after its last batch."""
    spark = connect(server, "available now")
    try:
        reader = spark.read.format("statestore").option("stateVarName", "history")
        return _totals(reader.load(f"{folder}/checkpoint").select("key.*", "value.*"))
    finally:
        spark.stop()


def totals_of_pipeline(server: str, root: Path) -> Totals:
    """What the newest checkpoint of the pipeline has."""
    spark = connect(server, "available now")
    try:
        spark.dataSource.register(KeyedState)
        reader = spark.read.format("keyed_state").option("root", str(root)).option("pipeline", "aircraft")
        return _totals(reader.option("state", "history").load().select("key.*", "value.*"))
    finally:
        spark.stop()


def _totals(frame: DataFrame) -> Totals:
    return {row[0]: tuple(row[1:]) for row in frame.select(*COMPARED).collect()}
