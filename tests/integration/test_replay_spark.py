"""`cairn replay` of a source that needs Spark: Spark only filters the rows of the key."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cairn.operations.run_interval import run_interval
from cairn.pipeline import Interval
from cairn.replay.replay_key import replay_key
from tests.support.accounts import SCHEMA, accounts, day, days_of, position_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def read_with_spark(spark: Any, interval: Interval) -> Any:
    rows = spark.createDataFrame(
        [(*row, {"n": row[1]}) for row in days_of(interval)], f"{SCHEMA}, more map<string, long>"
    )
    return rows.where("amount > 0"), position_of(interval)


def test_rows_that_only_spark_can_order(spark: SparkSession, tmp_path: Path) -> None:
    pipeline = replace(accounts(source=read_with_spark), parallelism=1)
    for n in (1, 2, 3):
        run_interval(spark, pipeline, day(n), f"file://{tmp_path}")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for key, n, rows in (("ann", 2, 2), ("carl", 3, 0), ("dora", 2, 0)):
        found = replay_key(pipeline, key, day(n), f"file://{tmp_path}", spark=lambda: spark)
        assert (found.same, found.reasons, found.planned.with_spark) == (True, (), True), found.comparison
        assert len(found.planned.rows()) == rows
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
