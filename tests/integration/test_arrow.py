"""The vectorised API through Spark, for a key whose rows span several batches. What the API refuses is in tests/unit/test_pipeline_tester.py."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame

from cairn.arrow_processor import ArrowProcessor, BatchResult, KeyedBatch, with_keys
from cairn.operations.intervals.run_interval import run_interval
from cairn.pipeline import Interval
from tests.support.counting import counting, day
from tests.support.spark_tables import output_rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


class Parts(ArrowProcessor):
    """Counts rows and calls per key."""

    splits_keys = True

    def init(self, handle: Any) -> None:
        handle.getValueState("seen", "rows long, calls long")

    def handleBatch(self, batch: KeyedBatch) -> BatchResult:
        new = np.diff(batch.row_offsets)
        seen = batch.states["seen"]
        rows = seen["rows"].fill_null(0).to_numpy() + new
        calls = seen["calls"].fill_null(0).to_numpy() + 1
        output = with_keys(batch, pa.table({"total": rows, "times": calls.astype(np.int32)}))
        if batch.last_key_continues:
            output = output[:-1]
        return BatchResult(states={"seen": pa.table({"rows": rows, "calls": calls})}, output=output)


class Whole(Parts):
    splits_keys = False


@pytest.mark.parametrize("processor", [Parts, Whole])
def test_a_hot_key_is_split_only_where_that_is_allowed(spark: SparkSession, tmp_path: Path, processor: type) -> None:
    """Rounds hold 65,536 rows; the hot key has three times as many, and one output row all the same."""
    hot = 200_000

    def source(spark: SparkSession, interval: Interval) -> DataFrame:
        return spark.range(hot + 5_000).selectExpr(f"if(id < {hot}, 'hot', concat('k', id)) as user", "id as n")

    pipe = counting(
        source=source,
        processor=processor,
        api="arrow",
        output_schema="user string, total long, times int",
        order_by=["n"],
        parallelism=1,
    )
    record = run_interval(spark, pipe, day(0), str(tmp_path))
    assert record.content.totals.keys_touched == 5_001
    rows = {user: (total, times) for user, total, times in output_rows(spark, tmp_path)}
    assert len(rows) == 5_001
    assert rows["hot"][0] == hot
    assert (rows["hot"][1] > 2) == (processor is Parts)
