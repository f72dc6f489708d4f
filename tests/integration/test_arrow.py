"""The vectorised API through Spark: state, expiry, output, evolution and hot keys, against what the row API gives."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import Row

from cairn.aggregates import ApproxDistinct, Count, Last, Max, Mean, Min, RunningAggregate, Sum
from cairn.arrow_processor import ArrowProcessor, BatchResult, KeyedBatch, with_keys
from cairn.data_sources.keyed_output import KeyedOutput
from cairn.data_sources.keyed_state import KeyedState
from cairn.operations.intervals.run_interval import run_interval
from cairn.pipeline import Interval
from state_backend.values import errors
from tests.support.counting import START, counting, day

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


class Columns(ArrowProcessor):
    """Per user a total that is cleared when it reaches 0, and how often the user came lately."""

    def init(self, handle: Any) -> None:
        assert handle.key_schema.names == ["user"]
        assert handle.input_schema.names == ["user", "n"]
        handle.getValueState("total", "sum long, text string")
        handle.getValueState("lately", "times int", TTL_MS)

    def handleBatch(self, batch: KeyedBatch) -> BatchResult:
        new = np.add.reduceat(batch.rows["n"].to_numpy(), batch.row_offsets[:-1])
        total = batch.states["total"]["sum"].fill_null(0).to_numpy() + new
        times = batch.states["lately"]["times"].fill_null(0).to_numpy() + 1
        text = pc.binary_join_element_wise("sum", pc.cast(pa.array(total), pa.string()), " ")
        output = with_keys(batch, pa.table({"total": total, "times": times.astype(np.int32)}))
        return BatchResult(
            states={
                "total": pa.table({"text": text, "sum": total}),
                "lately": pa.table({"times": times.astype(np.int32)}),
            },
            cleared={"total": total == 0},
            output=output,
        )


class Rows(StatefulProcessor):
    """The same, row by row."""

    def init(self, handle: Any) -> None:
        self._total = handle.getValueState("total", "sum long, text string")
        self._lately = handle.getValueState("lately", "times int", TTL_MS)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        total = (self._total.get() or (0,))[0] + sum(row.n for row in rows)
        times = (self._lately.get() or (0,))[0] + 1
        if total:
            self._total.update((total, f"sum {total}"))
        else:
            self._total.clear()
        self._lately.update((times,))
        yield Row(user=key[0], total=total, times=times)


def pipeline(processor: type, **changes: Any) -> Any:
    settings = {
        "source": read_rows,
        "processor": processor,
        "api": "arrow" if issubclass(processor, ArrowProcessor) else "row",
        "output_schema": "user string, total long, times int",
        "order_by": ["n"],
    }
    return counting(**{**settings, **changes})


def table(spark: SparkSession, root: Path, name: str) -> list[tuple[Any, ...]]:
    spark.dataSource.register(KeyedState)
    reader = spark.read.format("keyed_state").option("root", str(root)).option("pipeline", "counting")
    return sorted((tuple(r) for r in reader.option("state", name).load().collect()), key=str)


def emitted(spark: SparkSession, root: Path) -> list[tuple[Any, ...]]:
    spark.dataSource.register(KeyedOutput)
    reader = spark.read.format("keyed_output").option("root", str(root)).option("pipeline", "counting")
    return sorted((tuple(r) for r in reader.load().collect()), key=str)


def test_columns_and_rows_leave_the_same_state(spark: SparkSession, tmp_path: Path) -> None:
    """Output, every entry with its expiry, counts and digests are those of the row API, over expiry and a rescale."""
    roots = {p: tmp_path / p.__name__ for p in (Columns, Rows)}
    for n in range(5):
        by_column, by_row = (
            run_interval(spark, pipeline(p, parallelism=1 + n % 2), day(n), str(root)).content
            for p, root in roots.items()
        )
        assert by_column.digest == by_row.digest
        for total in ("input_rows", "output_rows", "keys_touched", "keys", "entries"):
            assert getattr(by_column.totals, total) == getattr(by_row.totals, total), (n, total)
    assert emitted(spark, roots[Columns]) == emitted(spark, roots[Rows])
    for name in ("total", "lately"):
        assert table(spark, roots[Columns], name) == table(spark, roots[Rows], name)
    assert {key: value for (key,), value, *_ in table(spark, roots[Columns], "total")}["user-1"] == (2108, "sum 2108")
    assert [finding for *_, finding in table(spark, roots[Columns], "$check")] == [None]


class Wider(Columns):
    def init(self, handle: Any) -> None:
        handle.getValueState("total", "note string, sum long")
        handle.getValueState("lately", "times int", TTL_MS)

    def handleBatch(self, batch: KeyedBatch) -> BatchResult:
        state = batch.states["total"]
        old = state["sum"].fill_null(0)
        return BatchResult(
            states={"total": pa.table({"sum": old, "note": pa.nulls(len(old), pa.string())})},
            output=with_keys(batch, pa.table({"total": old, "times": pa.nulls(len(old), pa.int32())})),
        )


def test_older_rows_are_read_as_the_schema_is_now(spark: SparkSession, tmp_path: Path) -> None:
    run_interval(spark, pipeline(Columns), day(0), str(tmp_path))
    ROWS[day(1).start] = [("user-0", 0), ("user-1", 0), ("new", 0)]
    run_interval(spark, pipeline(Wider, dropped=["total.text"]), day(1), str(tmp_path))
    totals = {key: value for (key,), value, *_ in table(spark, tmp_path, "total")}
    assert totals["user-0"] == (None, 0 + 700 + 1400)
    assert totals["new"] == (None, 0)
    assert [finding for *_, finding in table(spark, tmp_path, "$check")] == [None, None]


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
    rows = {user: (total, times) for user, total, times in emitted(spark, tmp_path)}
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


def test_late_rows_are_late_for_columns_too(spark: SparkSession, tmp_path: Path) -> None:
    def source(spark: SparkSession, interval: Interval) -> DataFrame:
        rows = [("ann", 1, START), ("ann", 2, interval.start + timedelta(hours=3))]
        return spark.createDataFrame(rows, f"{SCHEMA}, at timestamp")

    pipe = pipeline(Parts, source=source, time_mode="event", event_time="at", watermark_delay=timedelta(0))
    records = [run_interval(spark, pipe, day(n), str(tmp_path)) for n in range(3)]
    assert [r.content.totals.late_rows for r in records] == [0, 0, 1]
    assert emitted(spark, tmp_path) == [("ann", 2, 1), ("ann", 4, 2), ("ann", 5, 3)]


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
    latest: dict[Any, tuple[Any, ...]] = {}
    spark.dataSource.register(KeyedOutput)
    reader = spark.read.format("keyed_output").option("root", str(tmp_path)).option("pipeline", "counting")
    for n in range(4):
        of_day = reader.option("start", day(n).start.isoformat()).option("end", day(n).end.isoformat())
        latest |= {row.user: tuple(row)[1:] for row in of_day.load().collect()}
    every = spark.createDataFrame([(*row, day) for day in ROWS for row in ROWS[day]], f"{SCHEMA}, day timestamp")
    expected = every.groupBy("user").agg(
        *[F.expr(e) for e in ("count(*)", "sum(n)", "min(n)", "max(n)", "avg(n)", "max_by(n, struct(day, n))")],
        F.countDistinct("n"),
    )
    assert latest == {row[0]: tuple(row)[1:] for row in expected.collect()}
