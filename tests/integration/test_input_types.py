"""Columns of every type of Spark, which most processors never look at: what reaches Python, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import Row

from cairn.operations.intervals.run_interval import run_interval
from cairn.pipeline import Interval, Pipeline
from cairn.spark_versions import SINCE, has
from state_backend.values import errors
from tests.support.spark_streaming import skip_on

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

DAY = Interval(datetime(2024, 1, 1, tzinfo=UTC), datetime(2024, 1, 2, tzinfo=UTC))
POINT = "X'0101000000000000000000F03F0000000000000040'"
TYPES = {
    "collated": "'aB' collate utf8_lcase",
    "collated_items": "array('aB' collate utf8_lcase)",
    "time": "time'12:00:01.5'",
    **({"times": "array(time'12:00:01')"} if has("time") else {}),
    "day_time": "interval '1 2:3:4.5' day to second",
    "day_times": "array(interval '1' day)",
    "day_time_map": "map('a', interval '1' day)",
    "void": "null",
    "voids": "array()",
    "void_field": "struct(null as x)",
    "variant": "parse_json('{\"a\": 1}')",
    "variants": "array(parse_json('1'))",
    "variant_map": "map('a', parse_json('1'))",
    "variant_field": "struct(parse_json('1') as v)",
    "geography": f"st_geogfromwkb({POINT})",
    "geometry": f"st_geomfromwkb({POINT})",
    "char": "cast('a' as char(3))",
    "varchar": "cast('a' as varchar(3))",
    "negative_zeros": "array(-0d)",
    "nested": "struct(timestamp'2024-01-01' as t, array(struct(1 as x)) as a, map('k', timestamp_ntz'2024-01-01') as m)",
}
TYPES = {name: value for name, value in TYPES.items() if name not in SINCE or has(name)}


class ReprOfRows(StatefulProcessor):
    def init(self, handle: Any) -> None:
        pass

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            for name in TYPES:
                yield Row(name=name, found=f"{row[name]!r} {type(row[name]).__name__}")

    def close(self) -> None:
        pass


class ReprOfFrames(ReprOfRows):
    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        for frame in rows:
            found = [f"{frame[n].dtype} {frame[n][0]!r} {type(frame[n][0]).__name__}" for n in TYPES]
            yield pd.DataFrame({"name": list(TYPES), "found": found})


def with_every_type(rows: DataFrame) -> DataFrame:
    return rows.selectExpr("k", "at", *(f"{value} as {name}" for name, value in TYPES.items()))


def write_row(spark: SparkSession, folder: Path) -> str:
    spark.sql("select 'a' k, timestamp'1969-01-01' at union all select 'a', timestamp'2024-01-01'").coalesce(
        1
    ).write.parquet(str(folder))
    return str(folder)


def under_spark(spark: SparkSession, source: str, api: str, checkpoint: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    rows = spark.readStream.schema("k string, at timestamp").parquet(source).where("at > '1970-01-01'")
    grouped = with_every_type(rows).groupBy("k")
    if api == "row":
        skip_on("4.0", "Python has none for processors of rows")
    result = getattr(grouped, "transformWithState" if api == "row" else "transformWithStateInPandas")(
        statefulProcessor=ReprOfRows() if api == "row" else ReprOfFrames(),
        outputStructType="name string, found string",
        outputMode="Append",
        timeMode="None",
    )
    provider = "spark.sql.streaming.stateStore.providerClass"
    rocks = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    spark.conf.set(provider, rocks)
    try:
        writer = result.writeStream.trigger(availableNow=True).option("checkpointLocation", str(checkpoint))
        writer.foreachBatch(lambda batch, _: found.update(batch.collect())).start().awaitTermination()
    finally:
        spark.conf.unset(provider)
    return found


def pipeline_over(path: str, **changes: Any) -> Pipeline:
    settings: dict[str, Any] = {
        "name": "types",
        "start": DAY.start,
        "source": lambda spark, interval: with_every_type(spark.read.parquet(path)),
        "key": ["k"],
        "processor": ReprOfRows,
        "output_schema": "name string, found string",
        "time_mode": "event",
        "event_time": "at",
        "watermark_delay": timedelta(0),
        "parallelism": 1,
        "max_parallelism": 4,
    }
    return Pipeline(**settings | changes)


@pytest.mark.parametrize(
    "api",
    [
        pytest.param("row", marks=pytest.mark.long("ten seconds of Spark")),
        pytest.param("pandas", marks=pytest.mark.long("ten seconds of Spark")),
    ],
)
def test_every_type_reaches_the_handler_as_under_spark(spark: SparkSession, tmp_path: Path, api: str) -> None:
    """Sorted, beside a late row, which is written to a file with all of its columns."""
    source = write_row(spark, tmp_path / "source")
    theirs = under_spark(spark, source, api, tmp_path / "checkpoint")
    processor = ReprOfRows if api == "row" else ReprOfFrames
    record = run_interval(spark, pipeline_over(source, api=api, processor=processor), DAY, str(tmp_path / "root"))
    (output,) = [tmp_path / "root" / "types" / f.handle.path for f in record.content.outputs if not f.late]
    ours = {row["name"]: row["found"] for row in pq.read_table(output).to_pylist()}
    assert ours == theirs
    (late,) = [tmp_path / "root" / "types" / f.handle.path for f in record.content.outputs if f.late]
    (row,) = pq.read_table(late).to_pylist()
    assert list(row) == ["k", "at", *TYPES]
    assert (row["collated"], row["day_time"], row["negative_zeros"]) == ("aB", timedelta(1, 7384, 500_000), [-0.0])


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("interval '1-2' year to month", "'c' is interval year to month; interval year to month can't be passed"),
        ("make_interval(1, 2)", "'c' is interval; interval can't be passed to Python"),
        ("map('a', array(make_interval(1)))", "'c' is map<string,array<interval>>; interval can't be passed"),
    ],
)
def test_types_that_python_cannot_hold_are_refused(spark: SparkSession, tmp_path: Path, value: str, says: str) -> None:
    def source(spark: SparkSession, interval: Interval) -> DataFrame:
        return spark.sql(f"select 'a' k, timestamp'2024-01-01' at, {value} c")

    with pytest.raises(errors.SourceError) as raised:
        run_interval(spark, pipeline_over("", source=source), DAY, str(tmp_path))
    assert says in str(raised.value)
    assert "pipeline 'types', [2024-01-01" in str(raised.value)
    assert "in the source, drop the column, or cast it to STRING" in str(raised.value)
