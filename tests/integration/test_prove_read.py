"""An interval whose rows are not those of the files that its position lists is not committed."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cairn.operations.intervals.run_interval import run_interval
from cairn.operations.intervals.run_intervals import run_intervals
from cairn.pipeline import Interval
from cairn.spark.session import FRESH_TABLES
from state_backend.values.errors import SourceError
from tests.support.coordinator import coordinator_of
from tests.support.counting import INPUT_SCHEMA, counting, day

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

LINE = '{"user": "ann", "item": "fig", "amount": 1}\n'


def described(*paths: Path) -> dict[str, Any]:
    data = [path.read_bytes() for path in paths]
    return {"files": [{"bytes": len(one), "sha256": hashlib.sha256(one).hexdigest()} for one in data]}


def test_rows_of_a_reused_frame_are_refused_if_its_files_have_changed(spark: SparkSession, tmp_path: Path) -> None:
    """The list of files is as old as the frame: here the frame of a former call of the source."""
    path = tmp_path / "input.json"
    path.write_text(LINE * 5)
    kept = spark.read.schema(INPUT_SCHEMA).json(f"file://{path}")

    def source(_: Any, __: Interval) -> Any:
        return kept, described(path)

    record = run_interval(spark, counting(source=source), day(0), str(tmp_path / "root"))
    assert record.content.totals.input_rows == 5
    path.write_text(LINE * 10)
    length = len(LINE) * 5
    with pytest.raises(
        SourceError, match=rf"lists files: 1 with {length * 2} bytes; Spark read: 1 with {length} bytes"
    ):
        run_interval(spark, counting(source=source), day(0), str(tmp_path / "root"))


def test_a_join_with_a_file_missing_from_the_source_offset_is_accepted(spark: SparkSession, tmp_path: Path) -> None:
    """With adaptive execution, parts of the executed plan lie in stages. The table to join is in no position."""
    for n, name in enumerate("abc"):
        (tmp_path / f"{name}.json").write_text(LINE * (n + 1))
    table, *inputs = (tmp_path / f"{name}.json" for name in "abc")

    def source(spark: SparkSession, _: Interval) -> Any:
        one, other = (spark.read.schema(INPUT_SCHEMA).json(f"file://{path}") for path in inputs)
        joined = spark.read.schema("item string").json(f"file://{table}").hint("shuffle_hash")
        return one.unionByName(other).join(joined, "item"), described(*inputs)

    record = run_interval(spark, counting(source=source), day(0), str(tmp_path / "root"))
    assert record.content.totals.input_rows == 5


@pytest.mark.parametrize("lines", [[0], [3, 0]])
def test_empty_files_are_read(spark: SparkSession, tmp_path: Path, lines: list[int]) -> None:
    """Spark leaves empty files out of its list, and adaptive execution a join without rows."""
    paths = [tmp_path / f"{n}.json" for n in range(len(lines))]
    for path, count in zip(paths, lines, strict=True):
        path.write_text(LINE * count)
    (tmp_path / "empty.json").touch()
    (tmp_path / "more.json").write_text(LINE)

    def source(spark: SparkSession, _: Interval) -> Any:
        read = spark.read.schema(INPUT_SCHEMA)
        rows = read.json([f"file://{path}" for path in paths])
        more, none = (read.json(f"file://{tmp_path}/{name}.json") for name in ("more", "empty"))
        joined = more.join(none.select("item").hint("shuffle_hash"), "item")
        return rows.unionByName(joined), described(*paths, tmp_path / "more.json", tmp_path / "empty.json")

    record = run_interval(spark, counting(source=source), day(0), str(tmp_path / "root"))
    assert record.content.totals.input_rows == sum(lines)


def test_cached_rows_are_refused_if_the_source_offset_lists_files(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "input.json"
    path.write_text(LINE)

    def source(spark: SparkSession, _: Interval) -> Any:
        return spark.read.schema(INPUT_SCHEMA).json(f"file://{path}").cache(), described(path)

    try:
        with pytest.raises(SourceError, match=r"come from Spark's cache.*\nDo not call cache\(\)"):
            run_interval(spark, counting(source=source), day(0), str(tmp_path / "root"))
    finally:
        spark.catalog.clearCache()


def test_a_table_of_files_is_listed_for_each_interval(spark: SparkSession, tmp_path: Path) -> None:
    """Spark keeps the list of a table in the session, unless a setting switches this off."""
    assert all(spark.conf.get(name) == value for name, value in FRESH_TABLES.items())
    folder = tmp_path / "table"
    folder.mkdir()
    spark.sql(f"CREATE TABLE listed ({INPUT_SCHEMA}) USING json LOCATION 'file://{folder}'")

    def source(spark: SparkSession, interval: Interval) -> Any:
        (folder / f"{interval.start:%d}.json").write_text(LINE)
        return spark.table("listed"), described(*folder.iterdir())

    try:
        run_intervals(spark, counting(source=source), [day(0), day(1), day(2)], str(tmp_path / "root"))
    finally:
        spark.sql("DROP TABLE listed")
    completed = coordinator_of(counting(), str(tmp_path / "root")).log().completed()
    assert [record.content.totals.input_rows for record in completed] == [1, 2, 3]
