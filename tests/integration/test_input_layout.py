"""How the input lies in files is nobody's business: the same rows give the same output and the same state."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import Row, StructType

from cairn.operations.intervals.run_interval import run_interval
from cairn.pipeline import Interval, Pipeline
from cairn.rows.row_order import bytes_of, bytes_of_values
from cairn.spark_versions import SINCE, has
from state_backend.values.intervals import from_ms
from tests.support.both_engines import run_under_cairn
from tests.support.differential_processors import (
    KEY,
    RESULT_SCHEMA,
    SCRIPT_SCHEMA,
    SCRIPT_STATES,
    Scripted,
    random_script,
)
from tests.support.spark_streaming import Case, write_batches

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

ENDS_MS = [1_704_067_200_000 + n * 3_600_000 for n in range(4)]


@pytest.mark.long("half a minute of Spark")
def test_split_merged_and_shuffled_files_give_the_same_rows_and_digest(spark: SparkSession, tmp_path: Path) -> None:
    """Three rows of a key share each ``seq``, and what they do depends on their order, which is that of their columns."""
    script = random_script(7, keys=9, ops=30, batches=len(ENDS_MS), prefixes=("", "long_"))
    case = Case(
        processor=Scripted,
        input_schema=SCRIPT_SCHEMA,
        output_schema=RESULT_SCHEMA,
        key=KEY,
        batches=[[(a, b, seq // 3, ts, op) for a, b, seq, ts, op in rows] for rows in script],
        states=SCRIPT_STATES,
    )
    whole = write_batches(spark, case, tmp_path / "whole")
    layouts = {"whole": whole} | {
        f"{parts} files": [_scattered(file, tmp_path / f"{parts}-{file.stem}", parts) for file in whole]
        for parts in (2, 7)
    }
    found = {}
    for name, files in layouts.items():
        outcome, records = run_under_cairn(spark, case, files, tmp_path / f"root {name}", ENDS_MS)
        found[name] = [
            (record.content.digest, rows, [f.handle.crc32c for f in record.content.outputs])
            for record, rows in zip(records, outcome.outputs, strict=True)
        ]
    assert found["2 files"] == found["whole"]
    assert found["7 files"] == found["whole"]
    assert len({digest for digest, *_ in found["whole"]}) == len(ENDS_MS)
    assert sum(len(rows) for _, rows, _ in found["whole"]) > 540


def _scattered(file: Path, folder: Path, parts: int) -> Path:
    """The rows of a file in another order, in several files."""
    table = pq.read_table(file)
    order: Sequence[int] = random.Random(parts).sample(range(table.num_rows), table.num_rows)
    folder.mkdir()
    for part in range(parts):
        pq.write_table(table.take(pa.array(order[part::parts], pa.int64())), folder / f"{parts - part:05d}.parquet")
    return folder


# By column: rows of one key that differ by that column alone. Spark takes most of them for equal, or can't sort them.
UNORDERED = {
    "key_double": ["0d", "-0d"],
    "key_items": ["array(struct(0d as x))", "array(struct(-0d as x))"],
    "double": ["0d", "-0d", "double('nan')", "-double('nan')", "1d"],
    "float": ["float(0)", "-float(0)", "float(-1)"],
    "doubles": ["array(0d, -0d)", "array(-0d, 0d)", "array(-0d, null)"],
    "struct": ["struct(0d as x, null as y)", "struct(-0d as x, null as y)", "null"],
    "collated": ["'aB' collate utf8_lcase", "'Ab' collate utf8_lcase", "'AB' collate utf8_lcase"],
    "collated_items": ["array('aB' collate utf8_lcase)", "array('Ab' collate utf8_lcase)"],
    "micros": [f"map('a', timestamp'2024-01-01 00:00:00.00000{n} UTC')" for n in range(3)],
    "entries": ["map('a', 1, 'b', 2)", "map('b', 2, 'a', 1)"],
    "zeros_in_map": ["map(1, struct(0d as x))", "map(1, struct(-0d as x))"],
    "repeated_hour": [f"map('a', timestamp'2024-11-03 0{n}:30:00 UTC')" for n in (4, 5, 6)],
    "instant": [f"timestamp'2024-11-03 0{n}:30:00 UTC'" for n in (4, 5, 6)],
    "variant": ["parse_json('1')", "parse_json('1.0')", "parse_json('\"1\"')", "to_variant_object(array(1d))"],
    "variants": ["array(parse_json('1'))", "array(parse_json('1.0'))"],
    "variant_at": [
        f"map('a', struct(parse_json('{v}') as v, timestamp'2024-11-03 05:30:00 UTC' as t))" for v in ("1", "1.0")
    ],
    "time": ["time'12:00:00.000001'", "time'12:00:00'"],
    "day_time": ["interval '1' day", "interval '-1' day"],
    "binary": ["x'00'", "x'0000'", "x'ff'"],
    "geography": [f"st_geogfromwkb(X'0101000000000000000000{n}03F0000000000000040')" for n in "F8"],
}
UNORDERED = {name: values for name, values in UNORDERED.items() if name not in SINCE or has(name)}


class ListsRows(StatefulProcessor):
    """Every row in turn; the last one is kept."""

    def init(self, handle: Any) -> None:
        self._last = handle.getValueState("last", "row string")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            text = repr(_without_zone(tuple(row)))
            self._last.update((text,))
            yield Row(key=repr(key), row=text)

    def close(self) -> None:
        pass


def _without_zone(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.timestamp()
    if isinstance(value, tuple | list):
        return [_without_zone(item) for item in value]
    return {k: _without_zone(v) for k, v in value.items()} if isinstance(value, dict) else value


def _backwards(values: list[Any]) -> list[Any]:
    return values[::-1]


def _shuffled(values: list[Any]) -> list[Any]:
    return random.Random(3).sample(values, len(values))


def _read_unordered(arranged: Callable[[list[Any]], list[Any]], spark: SparkSession, interval: Interval) -> DataFrame:
    vectors = arranged([("vector", Vectors.dense(x, 1.0)) for x in (0.0, -0.0, 1.0)])
    rows = spark.createDataFrame(vectors, StructType().add("k", "string").add("vector", VectorUDT()))
    for name, values in UNORDERED.items():
        part = spark.sql(f"select '{name}' k, explode(array({', '.join(arranged(values))})) {name}")
        rows = rows.unionByName(part, allowMissingColumns=True)
    return rows


@pytest.mark.long("half a minute: every type in three zones")
def test_rows_that_spark_takes_for_equal_come_in_one_order(spark: SparkSession, tmp_path: Path) -> None:
    """Whatever order they come in, in any time zone, with and without ANSI mode. Of keys that are equal, handlers see one."""

    pipeline = Pipeline(
        name="unordered",
        start=from_ms(ENDS_MS[0]),
        source=partial(_read_unordered, list),
        key=["k", "key_double", "key_items"],
        processor=ListsRows,
        output_schema="key string, row string",
        parallelism=2,
        max_parallelism=4,
    )
    interval = Interval(from_ms(ENDS_MS[0]), from_ms(ENDS_MS[1]))
    found, rows, before = set(), [], None
    for arranged, zone, ansi in (
        (list, "UTC", "true"),
        (_backwards, "America/New_York", "false"),
        (_shuffled, "Asia/Kolkata", "true"),
    ):
        with _session(spark, {"spark.sql.session.timeZone": zone, "spark.sql.ansi.enabled": ansi}):
            arranged_so = replace(pipeline, source=partial(_read_unordered, arranged))
            record = run_interval(spark, arranged_so, interval, str(tmp_path / zone))
        files = [tmp_path / zone / "unordered" / f.handle.path for f in record.content.outputs]
        rows = [row for file in files for row in pq.read_table(file).to_pylist()]
        assert [pair for pair in zip(before or rows, rows, strict=True) if pair[0] != pair[1]] == []
        before = rows
        found.add((record.content.digest, *(f.handle.crc32c for f in record.content.outputs)))
    assert len(found) == 1
    assert len(rows) == 3 + sum(map(len, UNORDERED.values()))
    keys = {row["key"] for row in rows}
    assert len(keys) == 1 + len(UNORDERED)
    assert {"('key_double', 0.0, None)", "('key_items', None, [{'x': 0.0}])"} <= keys
    assert len({row["row"] for row in rows}) == len(rows) - 1  # NaN with and without a sign are one


@pytest.mark.long("ten seconds of Spark")
def test_the_sort_bytes_of_rows_are_the_same_by_arrow_and_by_python_values(spark: SparkSession) -> None:
    """By the UDF of Arrow columns, and by that of PySpark 4.0, which gets Python's values."""
    rows = _read_unordered(list, spark, Interval(from_ms(0), from_ms(1))).drop("time", "geography")
    rows = rows.selectExpr(
        "*", "timestamp_ntz'2024-11-03 05:30:00.000001' n", "array(struct(null v, date'1600-03-01')) s"
    )
    columns = [(F.col(field.name), field.dataType) for field in rows.schema]
    found = rows.select(bytes_of(columns).alias("a"), bytes_of_values(columns).alias("b")).collect()
    assert len(found) > 50 and [(a, b) for a, b in found if a != b] == []


@contextmanager
def _session(spark: SparkSession, settings: dict[str, str]) -> Iterator[None]:
    before = {name: spark.conf.get(name) for name in settings}
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            spark.conf.set(name, value or "")
