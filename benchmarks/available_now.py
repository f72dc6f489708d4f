"""The flights of 2013 in Spark's Structured Streaming, for comparison with Airflow's backfill.

Each call runs one query with `Trigger.AvailableNow` over the days that were added since the previous query. The query
runs on a Spark Connect server. It runs the processor of the pipeline `aircraft`, with state in RocksDB and output in
Parquet.
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
# For each aircraft: flights, flights with a delay, minutes of delay. The other fields of the state depend on the order
# of rows and on the clock.
Totals = dict[str, tuple[int, ...]]


def land_and_run(server: str, flights: Path, folder: Path, days: Sequence[date]) -> None:
    """Add the files of some days to the query's input, and run the query until it has read them.

    Raises:
        RuntimeError: The query does not end within ten minutes.
    """
    (folder / "input").mkdir(parents=True, exist_ok=True)
    for day in days:
        part = folder / "input" / f"{day.isoformat()}.parquet"
        if not part.exists():  # The file exists if Airflow retries the task.
            os.link(flights / day_file(day), part)
    spark = connect(server, "available now")
    try:
        # In processing time, Spark runs a batch without data after each batch. Then the query would never end, so such
        # batches are switched off.
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
    """Return the totals in the query's state after its last batch."""
    spark = connect(server, "available now")
    try:
        reader = spark.read.format("statestore").option("stateVarName", "history")
        return _totals(reader.load(f"{folder}/checkpoint").select("key.*", "value.*"))
    finally:
        spark.stop()


def totals_of_pipeline(server: str, root: Path) -> Totals:
    """Return the totals in the newest checkpoint of the pipeline."""
    spark = connect(server, "available now")
    try:
        spark.dataSource.register(KeyedState)
        reader = spark.read.format("keyed_state").option("root", str(root)).option("pipeline", "aircraft")
        return _totals(reader.option("state", "history").load().select("key.*", "value.*"))
    finally:
        spark.stop()


def _totals(frame: DataFrame) -> Totals:
    return {row[0]: tuple(row[1:]) for row in frame.select(*COMPARED).collect()}
