"""Columns whose names differ in case only from those of earlier intervals, through Spark and into a table."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame

from cairn import sinks
from cairn.aggregates import RunningAggregate, Sum
from cairn.data_sources.register import register_data_sources
from cairn.operations.intervals import plan_interval
from cairn.operations.intervals.run_interval import run_interval
from cairn.pipeline import Interval, Pipeline
from cairn.processors import Latest, union_by_kind
from cairn.rows.column_names import ColumnNames
from state_backend.values.errors import StateSchemaError, UsageError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

START = datetime(2024, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)
# By hour: the input's schema, and rows with an event time in minutes after the hour.
INPUT: list[tuple[str, list[tuple[str, int, int, int]]]] = [
    ("k string, v int, seq int, at timestamp", [("a", 5, 1, 10), ("b", 6, 1, 10)]),
    ("K string, V int, SEQ int, AT timestamp", [("b", 7, 2, 10), ("b", 0, 0, -60)]),
    ("k string, v int, seq int, at timestamp", [("a", 8, 2, 10), ("a", 0, 0, -60)]),
]


def hour(n: int) -> Interval:
    return Interval(START + n * HOUR, START + (n + 1) * HOUR)


def read_hours(spark: SparkSession, interval: Interval) -> DataFrame:
    ddl, rows = INPUT[(interval.start - START) // HOUR]
    return spark.createDataFrame([(*row, interval.start + timedelta(minutes=at)) for *row, at in rows], ddl)


class Newest(Latest):
    version = "SEQ"
    deleted = None


class Total(RunningAggregate):
    total = Sum("v")


def pipeline(processor: Any, **changes: Any) -> Pipeline:
    return Pipeline(
        name=processor.__name__.lower(),
        start=START,
        source=read_hours,
        key=["K"],
        processor=processor,
        time_mode="event",
        event_time="At",
        watermark_delay=timedelta(0),
        watermark="interval",
        parallelism=1,
        max_parallelism=4,
        **changes,
    )


def table(spark: SparkSession, root: Path, name: str, **options: str) -> list[dict[str, Any]]:
    register_data_sources(spark)
    read = spark.read.format("keyed_output").options(root=str(root), pipeline=name, **options).load()
    return [row.asDict() for row in read.drop("at").orderBy(read.columns[:3]).collect()]


def state_of(spark: SparkSession, root: Path) -> dict[str, int]:
    read = spark.read.format("keyed_state").options(root=str(root), pipeline="newest", state="latest").load()
    return {row[0]: row[1] for row in read.selectExpr("key.k", "value.v").collect()}


@pytest.mark.parametrize("plant", [False, True])
def test_column_names_that_differ_in_case_are_the_same_column(
    spark: SparkSession, tmp_path: Path, plant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In state, output, late rows and both tables. With `plant`, nothing folds the names, and the next
    guard refuses the interval."""
    if plant:
        monkeypatch.setattr(ColumnNames, "spell", lambda self, recorded: [*self.names])
        monkeypatch.setattr(plan_interval, "check_spelling", lambda *of: None)
    there, late = (sinks.delta(f"file://{tmp_path}/{name}") for name in ("table", "late"))
    made = pipeline(Newest, sink=there.with_late_rows(late))

    def runs() -> tuple[Any, ...]:
        for n in range(3):
            run_interval(spark, made, hour(n), str(tmp_path))
        tables = [DeltaTable(f"{tmp_path}/{name}").to_pyarrow_table() for name in ("table", "late")]
        return (
            table(spark, tmp_path, "newest"),
            table(spark, tmp_path, "newest", late="true"),
            [sorted(zip(rows["k"].to_pylist(), rows["v"].to_pylist(), strict=True)) for rows in tables],
            state_of(spark, tmp_path),
        )

    expected = (
        [
            {"k": "a", "v": 5, "seq": 1},
            {"k": "a", "v": 8, "seq": 2},
            {"k": "b", "v": 6, "seq": 1},
            {"k": "b", "v": 7, "seq": 2},
        ],
        [{"k": "a", "v": 0, "seq": 0}, {"k": "b", "v": 0, "seq": 0}],
        [[("a", 5), ("a", 8), ("b", 6), ("b", 7)], [("a", 0), ("b", 0)]],
        {"a": 8, "b": 7},
    )
    if not plant:
        assert runs() == expected
        return
    with pytest.raises(StateSchemaError, match=r"state 'latest'.* version = SEQ"):
        runs()


def test_an_aggregate_finds_its_column_when_the_case_changes(spark: SparkSession, tmp_path: Path) -> None:
    for n in range(3):
        run_interval(spark, pipeline(Total), hour(n), str(tmp_path))
    assert table(spark, tmp_path, "total") == [
        {"k": "a", "total": 5},
        {"k": "a", "total": 13},
        {"k": "b", "total": 6},
        {"k": "b", "total": 13},
    ]


def test_output_that_differs_from_earlier_output_in_case_only_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    class Plain(Newest):
        version = None

    run_interval(spark, pipeline(Plain, output_schema="k string, v int, seq int, at timestamp"), hour(0), str(tmp_path))
    other = pipeline(Plain, output_schema="k string, V int, seq int, at timestamp")
    with pytest.raises(UsageError, match="output_schema has a column 'V', but earlier output spells it 'v'"):
        run_interval(spark, other, hour(1), str(tmp_path))


def test_a_new_name_in_a_union_may_be_the_name_of_another_column(spark: SparkSession) -> None:
    orders = spark.createDataFrame([(1, "open", "new")], "id int, status string, order_status string")
    (row,) = union_by_kind({"order": orders}, shared=["id"]).collect()
    assert row.asDict() == {"id": 1, "order_status": "open", "order_order_status": "new", "kind": "order"}
