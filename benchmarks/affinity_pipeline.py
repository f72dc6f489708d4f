"""The pipeline of ``benchmarks.affinity``; it stands alone because the modules that it imports travel to executors."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import Row

from cairn.pipeline import Interval, Pipeline
from state_backend.adapters.rocks import EngineOptions

START = datetime(2024, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)
SHARDS = 16
KEYS = 32_000
# Of the keys, in each interval after the first, and in how many files its input is.
CHANGED = 0.05


def hour(n: int) -> Interval:
    """The n-th interval, from 0."""
    return Interval(START + n * HOUR, START + (n + 1) * HOUR)


def _source(spark: SparkSession, interval: Interval) -> DataFrame:
    n = (interval.start - START) // HOUR
    rows = spark.range(0, KEYS, 1, int(os.environ["CAIRN_INPUT_FILES"]))
    return rows if n == 0 else rows.filter(f"pmod(xxhash64(id, {n}), 100) < {round(100 * CHANGED)}")


class Blobs(StatefulProcessor):
    """512 bytes per key that do not compress; a row out says on which host."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._blob = handle.getValueState("blob", "n bigint, blob binary")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        n = (self._blob.get() or (0, b""))[0] + 1
        blob = b"".join(hashlib.sha256(f"{key[0]} {n} {part}".encode()).digest() for part in range(16))
        self._blob.update((n, bytearray(blob)))
        yield Row(host=os.environ["SPARK_LOCAL_IP"])


BLOBS = Pipeline(
    name="blobs",
    start=START,
    source=_source,
    key=["id"],
    processor=Blobs,
    output_schema="host string",
    parallelism=SHARDS,
    max_parallelism=64,
    engine=EngineOptions(),
)
