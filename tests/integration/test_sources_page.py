"""The sources of docs/sources.md, as they stand there, read files by Spark. Its processors run in tests/unit/test_sources_page.py."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession, Window, functions

from cairn import Interval, Pipeline, run_interval, upstream
from cairn.errors import InputNotReady
from cairn.operations.intervals.read_source import read_source
from cairn.operations.intervals.stateful_source import stateful_operations
from cairn.processors import Deduplicate
from cairn.testing import PipelineTester
from state_backend.values.inputs import Untracked
from tests.support.doc_blocks import block_with
from tests.support.layout import REPOSITORY
from tests.support.stateful_plans import stateful_frames

PAGE = "docs/sources.md"
START = datetime(2024, 1, 1, tzinfo=UTC)
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
Write = Callable[[str, str, list[tuple[Any, ...]]], None]


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """A function that imports the block with this line, whose folders are the test's own."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def load(line: str) -> Any:
        # Python imports a name once: two tests that load the same block need two names.
        name = f"sources_page_{abs(hash((line, tmp_path)))}"
        text = block_with(PAGE, line).replace("/landed/", f"{tmp_path}/landed/")
        (tmp_path / f"{name}.py").write_text(text.replace("file:///data/state", f"file://{tmp_path}/state"))
        return importlib.import_module(name)

    return load


@pytest.fixture
def write(spark: SparkSession, tmp_path: Path) -> Write:
    def to_parquet(path: str, schema: str, rows: list[tuple[Any, ...]]) -> None:
        spark.createDataFrame(rows, schema).coalesce(1).write.parquet(f"{tmp_path}/landed/{path}")

    return to_parquet


def at(*clock: int) -> datetime:
    return datetime(2024, 1, 1, *clock)


def output(spark: SparkSession, tmp_path: Path, pipeline: Pipeline) -> list[dict[str, Any]]:
    from cairn import register_data_sources

    register_data_sources(spark)
    table = spark.read.format("keyed_output").options(root=f"file://{tmp_path}/state", pipeline=pipeline.name).load()
    return sorted((row.asDict() for row in table.collect()), key=str)


@pytest.mark.spark
def test_the_documented_source_of_price_changes_prices_each_sale_by_its_time(
    spark: SparkSession, page: Callable[[str], Any], write: Write, tmp_path: Path
) -> None:
    sales = page("def sales_and_prices(").SALES
    write("prices_at_start", "product string, price long", [("shoe", 50)])
    write(
        "sales/2024-01-01", "product string, at timestamp, pieces long", [("shoe", at(0, 5), 2), ("shoe", at(0, 15), 2)]
    )
    write("price_changes/2024-01-01", "product string, valid_from timestamp, price long", [("shoe", at(0, 10), 60)])
    record = run_interval(spark, sales, Interval(START, START + DAY), f"file://{tmp_path}/state")
    assert record.content.source_position == {"sales": "2024-01-01", "price_changes": "2024-01-01"}
    assert sorted(row["total"] for row in output(spark, tmp_path, sales)) == [100, 120]


@pytest.mark.spark
def test_one_query_over_several_intervals_gives_the_rows_of_each_interval(
    spark: SparkSession, page: Callable[[str], Any], write: Write, tmp_path: Path
) -> None:
    source = page("def read_payments(").read_payments
    write("payments", "user string, landed_at timestamp", [("ann", at(0, 5)), ("bob", at(1)), ("eve", at(2))])
    hours = [Interval(START + n * HOUR, START + (n + 1) * HOUR) for n in range(3)]
    rows, positions = source.read(spark, hours)
    for hour, position in zip(hours, positions, strict=True):
        alone, of_hour = source(spark, hour)
        (row,) = alone.collect()
        of_all = rows.where(functions.col("cairn_interval").between(hour.start, hour.end - HOUR / 2)).collect()
        assert ([row.user], of_hour) == ([one.user for one in of_all], position)


@pytest.mark.spark
def test_a_correction_of_a_joined_table_changes_the_source_offset(
    spark: SparkSession, page: Callable[[str], Any], write: Write, tmp_path: Path
) -> None:
    read = page("def orders_in_euro(").orders_in_euro
    write(
        "orders/2024-01-01",
        "order_id string, currency string, amount double",
        [("o1", "USD", 10.0), ("o2", "XXX", 1.0)],
    )
    rates = tmp_path / "landed/rates/2024-01-01.json"
    rates.parent.mkdir(parents=True)
    rates.write_text(json.dumps({"currency": "USD", "rate": 0.5}))
    rows, position = read(spark, Interval(START, START + DAY))
    assert sorted((row.order_id, row.euro) for row in rows.collect()) == [("o1", 5.0), ("o2", None)]
    rates.write_text(json.dumps({"currency": "USD", "rate": 0.6}))
    _, corrected = read(spark, Interval(START, START + DAY))
    assert position["orders"] == corrected["orders"] and position["rates"] != corrected["rates"]


@pytest.mark.spark
def test_the_documented_condition_finds_every_malformed_json_record(spark: SparkSession) -> None:
    """Of the bad records, `columnNameOfCorruptRecord` misses blank ones and text after the object; the page's condition finds them."""
    page = (REPOSITORY / "docs" / "incidents.md").read_text()
    (condition,) = re.findall(r"`(F\.col\(\"parsed\.wrong\"\).*?)`", page)
    bad = ["{bad", '{"a":"x"}', "null", "[]", "", "  ", '{"a":2} text']
    rows = spark.createDataFrame([(text,) for text in ['{"a":1}', '{"a":1}  ', *bad, '{"a":1}{"a":2}']], "value string")
    parsed = rows.withColumn(
        "parsed", functions.from_json("value", "a int, wrong string", {"columnNameOfCorruptRecord": "wrong"})
    ).cache()
    assert {row.value for row in parsed.filter("parsed.wrong IS NOT NULL").collect()} == {*bad[:4]}
    found = parsed.filter(eval(condition, {"F": functions})).collect()
    assert sorted(row.value for row in found) == sorted(bad)


@pytest.mark.spark
def test_a_source_that_compares_rows_logs_a_warning(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    events = spark.createDataFrame([("ann", 1, at())], "user string, n int, at timestamp")
    events.createOrReplaceTempView("events")
    others = events.withColumnsRenamed({"user": "customer", "n": "m", "at": "then"})
    frames = stateful_frames(events, others, functions, Window, spark.sql)
    assert {name: stateful_operations(rows) for name, (rows, _) in frames.items()} == {
        name: expected for name, (_, expected) in frames.items()
    }
    pipeline = Pipeline(
        name="warns",
        start=START,
        source=lambda spark, interval: events.dropDuplicates(["user"]),
        key=["user"],
        processor=type("Once", (Deduplicate,), {"horizon": None}),
        api="arrow",
    )
    for hour in range(2):
        run_interval(
            spark, pipeline, Interval(START + hour * HOUR, START + (hour + 1) * HOUR), f"file://{tmp_path}/state"
        )
    assert [text.partition(" (")[0] for text in caplog.messages if "stateful_source" in text] == [
        "pipeline 'warns': the source has dropDuplicates or distinct"
    ]


@pytest.mark.spark
def test_a_pipeline_reads_the_committed_output_of_an_upstream_pipeline(
    spark: SparkSession, page: Callable[[str], Any], tmp_path: Path
) -> None:
    sales, root = page("def sales_and_prices(").SALES, f"file://{tmp_path}/state"
    reader = replace(sales, name="reader", source=upstream("sales"))
    tester = PipelineTester(
        sales,
        input_schema="product string, at timestamp, kind string, pieces long, price long",
        initial_state=[("shoe", 50)],
        initial_schema="product string, price long",
        root=root,
    )
    sale = {"product": "shoe", "at": at(0, 5), "kind": "sale", "pieces": 2}
    whole = Interval(START, START + 2 * HOUR)
    first = tester.run([sale]).interval
    with pytest.raises(InputNotReady, match=r"it reads sales \[2024-01-01T01:00:00Z, .* has not committed it"):
        read_source(spark, reader, whole, root)
    tester.run([])  # an interval without output is committed too
    read = read_source(spark, reader, whole, root)
    assert [row.total for row in read.rows.collect()] == [100] and read.position["counts"] == {"rows": 1}
    tester.run([sale | {"pieces": 3}], first)
    again = read_source(spark, reader, whole, root)
    assert [row.total for row in again.rows.collect()] == [150] and again.position != read.position
    assert again.untracked == ()

    def by_itself(spark: SparkSession, _: Interval) -> Any:
        spark.read.format("keyed_output").options(root=root, pipeline="sales").load().createOrReplaceTempView("v")
        return spark.sql("select 's' as product where exists (select * from v)")

    free = read_source(spark, replace(sales, source=by_itself), whole, root)
    assert free.untracked == (Untracked(pipeline="sales", root=root),)
