"""The vectorised API through Spark: state, expiry, output, evolution and hot keys, against what the row API gives."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from cairn.aggregates import ApproxDistinct, Count, Last, Max, Mean, Min, RunningAggregate, Sum
from cairn.arrow_processor import ArrowProcessor, BatchResult, KeyedBatch, with_keys
from cairn.operations.intervals.run_interval import run_interval
from cairn.pipeline import Interval
from state_backend.values import errors
from tests.support.counting import counting, day
from tests.support.spark_tables import output_rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

ROWS: dict[datetime, list[tuple[Any, ...]]] = {}
SCHEMA = "user string, n long"
TTL_MS = 36 * 3_600_000


def read_rows(spark: SparkSession, interval: Interval) -> DataFrame:
    return spark.createDataFrame(ROWS.get(interval.start, []), SCHEMA)


@pytest.fixture(autouse=True)
def rows() -> Iterator[None]:
    ROWS.clear()
    ROWS[day(0).start] = [(f"user-{n % 700}", n) for n in range(2_000)] + [(None, 1), ("gone", 3)]
    ROWS[day(1).start] = [(f"user-{n}", n) for n in range(0, 1_000, 3)]
    ROWS[day(3).start] = [("user-1", 5), ("gone", -3), (None, 0)]
    yield
    ROWS.clear()


def pipeline(processor: type, **changes: Any) -> Any:
    settings = {
        "source": read_rows,
        "processor": processor,
        "api": "arrow" if issubclass(processor, ArrowProcessor) else "row",
        "output_schema": "user string, total long, times int",
        "order_by": ["n"],
    }
    return counting(**{**settings, **changes})


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

    pipe = pipeline(processor, source=source, parallelism=1)
    record = run_interval(spark, pipe, day(0), str(tmp_path))
    assert record.content.totals.keys_touched == 5_001
    rows = {user: (total, times) for user, total, times in output_rows(spark, tmp_path)}
    assert len(rows) == 5_001
    assert rows["hot"][0] == hot
    assert (rows["hot"][1] > 2) == (processor is Parts)


class Silent(ArrowProcessor):
    def init(self, handle: Any) -> None:
        handle.getValueState("total", "sum long")

    def handleBatch(self, batch: KeyedBatch) -> Any:
        raise NotImplementedError


def wrong(batch: KeyedBatch, **columns: Any) -> BatchResult:
    return BatchResult(states={"total": pa.table(columns)})


def test_a_processor_that_breaks_the_contract_is_told_what_to_do(spark: SparkSession, tmp_path: Path) -> None:
    """Through Spark's processes; each way to break it is in tests/unit/test_pipeline_tester.py."""
    ROWS[day(0).start] = [(f"user-{n}", n) for n in range(351)]
    bad = type("Bad", (Silent,), {"__module__": __name__, "handleBatch": lambda s, b: wrong(b, sum=[1])})
    with pytest.raises(errors.ProcessorError, match=r"(?s)states\['total'\] has 1 rows for 351 keys"):
        run_interval(spark, pipeline(bad, parallelism=1), day(0), str(tmp_path))
    assert not list(tmp_path.rglob("checkpoints/*"))


class Totals(RunningAggregate):
    """Declared out of alphabetical order on purpose: a class shipped by value arrives with its attributes sorted."""

    rows = Count()
    n_sum = Sum("n")
    low = Min("n")
    high = Max("n")
    mean = Mean("n")
    last_n = Last("n")
    distinct = ApproxDistinct("n")


@pytest.mark.long("seconds of Spark: tests/property/test_aggregate_laws.py has the laws")
def test_a_running_aggregate_is_what_sql_gives_over_all_intervals(spark: SparkSession, tmp_path: Path) -> None:
    pipe = pipeline(
        Totals,
        output_schema="user string, rows long, n_sum long, low long, high long, mean double, last_n long, distinct long",
    )
    for n in range(4):
        run_interval(spark, pipe, day(n), str(tmp_path))
    latest = {user: tuple(row) for n in range(4) for user, *row in output_rows(spark, tmp_path, day(n))}
    every = spark.createDataFrame([(*row, day) for day in ROWS for row in ROWS[day]], f"{SCHEMA}, day timestamp")
    expected = every.groupBy("user").agg(
        *[F.expr(e) for e in ("count(*)", "sum(n)", "min(n)", "max(n)", "avg(n)", "max_by(n, struct(day, n))")],
        F.countDistinct("n"),
    )
    assert latest == {row[0]: tuple(row)[1:] for row in expected.collect()}
