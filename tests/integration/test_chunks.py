"""Several intervals by one Spark job; what holds without Spark too is in tests/unit/test_plan_chunk.py and tests/property/test_chunks.py."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from datetime import timedelta
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor

from cairn.operations.intervals.plan_chunk import ChunkLimits
from cairn.operations.intervals.read_source import read_range
from cairn.operations.intervals.run_intervals import run_intervals
from cairn.pipeline import Interval
from cairn.range_sources import range_source
from cairn.upstream_sources import upstream, upstreams
from state_backend.chains.judge_inputs import Chains
from state_backend.values.errors import InputNotReady, SourceError
from state_backend.values.records import Content
from state_backend.values.retention import KeepLast
from tests.support.coordinator import coordinator_of
from tests.support.counting import INPUT_SCHEMA, counting, day
from tests.support.every_processor import SCHEMA, declared, row
from tests.support.in_chunks import results
from tests.support.layout import REPOSITORY
from tests.support.local_stack import SparkConnectServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

DAYS = [day(n) for n in range(11)]
IN_CHUNKS = "one Spark job computes"


def write_days(folder: Path) -> None:
    """Lines of each day: none, a few, and more than one batch of a task."""
    for n in range(len(DAYS)):
        rows = [
            f'{{"user": "u{i % 7}", "item": "i{i % 3}", "amount": {i % 11}}}'
            for i in range(n % 4 * 10 + 11_000 * (n == 5))
        ]
        (folder / f"{n}.json").write_text("".join(f"{row}\n" for row in rows))


def read_day(spark: Any, folder: Path, number: int) -> Any:
    path = folder / f"{number}.json"
    data = path.read_bytes()
    position = {"files": [{"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}]}
    rows = spark.read.schema(INPUT_SCHEMA).json(f"file://{path}")
    return rows.where(F.col("amount") != number), position


def read_days(spark: Any, folder: Path, intervals: Sequence[Interval]) -> Any:
    read = [(n, *read_day(spark, folder, n)) for n in map(DAYS.index, intervals)]
    paths = [f"file://{folder}/{n}.json" for n, _, _ in read]
    rows = spark.read.schema(INPUT_SCHEMA).json(paths).withColumn("of", F.expr(OF_FILE))
    at = F.timestamp_add("DAY", "of", F.lit(DAYS[0].start)).alias("cairn_interval")
    return rows.where("amount != of").select(at, "*").drop("of"), [position for _, _, position in read]


OF_FILE = "cast(regexp_extract(input_file_name(), '([0-9]+).json') as int)"


def pipeline_over(folder: Path, ranged: bool = False, **changes: Any) -> Any:
    def source(spark: Any, interval: Interval) -> Any:
        return read_day(spark, folder, DAYS.index(interval))

    @range_source
    def all_days(spark: Any, intervals: Sequence[Interval]) -> Any:
        return read_days(spark, folder, intervals)

    return counting(**{"source": all_days if ranged else source, "retention": KeepLast(50), **changes})


@pytest.mark.parametrize("ranged", [False, True])
def test_chunks_of_days_give_the_results_of_single_intervals(
    ranged: bool, spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cairn")
    write_days(tmp_path)
    sunk: list[tuple[Interval, int]] = []
    pipeline = pipeline_over(tmp_path, ranged, sink=lambda _, paths, interval, n: sunk.append((interval, n)))
    run_intervals(spark, pipeline, DAYS, str(tmp_path / "alone"), limits=ChunkLimits(intervals=1))
    assert IN_CHUNKS not in caplog.text
    asked: list[tuple[Sequence[Interval], bool]] = []

    def ask(spark: Any, pipeline: Any, intervals: Sequence[Interval], root: str) -> Any:
        asked.append((intervals, "cairn-range" in threading.current_thread().name))
        return read_range(spark, pipeline, intervals, root)

    with mock.patch("cairn.operations.intervals.run_intervals.read_range", ask):
        run_intervals(spark, pipeline, DAYS, str(tmp_path / "together"), limits=ChunkLimits(seconds=60))
    # The source is asked for the next chunk while a job runs, and once for each.
    assert [early for _, early in asked] == [False, *[True] * (len(asked) - 1)] if ranged else asked == []
    assert sorted(one for intervals, _ in asked for one in intervals) == (DAYS[1:] if ranged else [])
    assert [f"{IN_CHUNKS} {n} intervals" in caplog.text for n in (2, 4)] == [True, True]
    assert "one by one" not in caplog.text
    assert results(pipeline, tmp_path / "together") == results(pipeline, tmp_path / "alone")
    assert sunk == [(one, n) for n, one in enumerate(DAYS, 1)] * 2


@pytest.mark.parametrize("of_time", ["timestamp", "timestamp_ntz", "range"])
def test_chunks_with_observed_watermarks_give_the_results_of_single_intervals(
    of_time: str, spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cairn")

    def one_day(spark: Any, interval: Interval) -> Any:
        at = interval.start if of_time != "timestamp_ntz" else interval.start.replace(tzinfo=None)
        rows = [row(at + timedelta(minutes=m), m, f"u{m % 3}") for m in range(-400, 60, 45) if at.day % 4]
        return spark.createDataFrame(rows, SCHEMA.format(of_time.replace("range", "timestamp")))

    def days(spark: Any, intervals: Sequence[Interval]) -> Any:
        each = [
            one_day(spark, one).withColumn("cairn_interval", F.lit(one.end - timedelta(seconds=1))) for one in intervals
        ]
        return reduce(DataFrame.union, each), [{}] * len(each)

    source = range_source(days) if of_time == "range" else one_day
    pipeline = declared("TumblingWindow", day(0).start, source=source, watermark="observed", retention=KeepLast(50))
    for name, limits in (("together", ChunkLimits(seconds=60)), ("alone", ChunkLimits(intervals=1))):
        run_intervals(spark, pipeline, DAYS[:8], str(tmp_path / name), limits=limits)
    assert f"{IN_CHUNKS} 4 intervals" in caplog.text and "one by one" not in caplog.text
    assert results(pipeline, tmp_path / "together") == results(pipeline, tmp_path / "alone")


@pytest.mark.parametrize("ranged", [False, True])
def test_cached_rows_are_refused_if_the_source_lists_other_files(
    ranged: bool, spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_days(tmp_path)
    kept = {count: read_days(spark, tmp_path, DAYS[7 - count : 7])[0] for count in (1, 4)}
    with (tmp_path / "6.json").open("a") as file:
        file.write('{"user": "ann", "item": "fig", "amount": 1}\n')

    @range_source
    def days(spark: Any, intervals: Sequence[Interval]) -> Any:
        rows, positions = read_days(spark, tmp_path, intervals)
        return (kept[len(intervals)] if intervals[-1] == DAYS[6] else rows), positions

    def one_day(spark: Any, interval: Interval) -> Any:
        return days(spark, interval)

    pipeline = pipeline_over(tmp_path, source=days if ranged else one_day)
    with pytest.raises(SourceError, match=r"2024-01-07T.*lists files"):
        run_intervals(spark, pipeline, DAYS, str(tmp_path / "root"), limits=ChunkLimits(seconds=60))
    assert "job of 4 intervals failed" in caplog.text and ("2024-01-07T" in caplog.text or ranged)
    assert len(results(pipeline, tmp_path / "root")) == 6


def test_rows_outside_of_the_requested_intervals_are_refused(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Together the job fails, and alone the interval names the mistake."""

    @range_source
    def days(spark: Any, intervals: Sequence[Interval]) -> Any:
        late = timedelta(days=1 if DAYS[2] in intervals else 0)
        rows = [("ann", "fig", 1, one.start - late) for one in intervals]
        frame = spark.createDataFrame(rows, f"{INPUT_SCHEMA}, cairn_interval timestamp")
        return frame, [{"at": str(one)} for one in intervals]

    pipeline = pipeline_over(tmp_path, source=days)
    with pytest.raises(SourceError, match=r"2024-01-03T.*\n?.*cairn_interval outside of the intervals"):
        run_intervals(spark, pipeline, DAYS[:4], str(tmp_path / "root"), limits=ChunkLimits(seconds=60))
    assert "job of 2 intervals failed" in caplog.text
    assert len(results(pipeline, tmp_path / "root")) == 2


@pytest.mark.parametrize("why", ["can combine rows", "columns, types or nullability"])
def test_range_source_that_combines_rows_or_changes_schema_is_read_per_interval(
    why: str, spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    @range_source
    def days(spark: Any, intervals: Sequence[Interval]) -> Any:
        rows = spark.range(len(intervals)).selectExpr("'ann' as user", "'fig' as item", "1L as amount")
        if why == "can combine rows":
            rows = rows.distinct()
        elif len(intervals) > 1:
            rows = rows.withColumn("item", F.expr("nullif(item, '')"))
        return rows.withColumn("cairn_interval", F.lit(intervals[0].start)), [{"at": str(one)} for one in intervals]

    pipeline = pipeline_over(tmp_path, source=days, stateful_source="allow")
    run_intervals(spark, pipeline, DAYS[:7], str(tmp_path / "root"), limits=ChunkLimits(seconds=60))
    assert caplog.text.count("asks the source for one interval at a time") == caplog.text.count(why) == 1
    assert [sum(o[2] for o in r["outputs"]) for r in results(pipeline, tmp_path / "root")] == [1] * 7


WHY_ALONE = {
    "a union": "one by one: the source's query has a union",
    "its own output": "seems to read what this pipeline writes",
    "its sink's table": "one by one: the source might read what this pipeline's sink writes",
}


@pytest.mark.parametrize("reads", WHY_ALONE)
def test_source_with_a_union_or_its_own_output_runs_one_interval_at_a_time(
    reads: str, spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cairn")
    write_days(tmp_path)
    (written := tmp_path / "together" / "counting" / "output").mkdir(parents=True)

    def source(spark: Any, interval: Interval) -> Any:
        rows, position = read_day(spark, tmp_path, DAYS.index(interval))
        if reads == "a union":
            return rows.where("amount < 5").union(rows.where("amount >= 5")), position
        at = written if reads == "its own output" else tmp_path / "table"
        own = spark.read.schema("user string").option("recursiveFileLookup", True).parquet(str(at))
        return rows.join(own.limit(0), "user", "left_anti"), position

    (tmp_path / "table").mkdir()
    pipeline = pipeline_over(tmp_path, source=source, sink=(lambda *_: None) if "sink" in reads else None)
    run_intervals(spark, pipeline, DAYS[:5], str(tmp_path / "together"), limits=ChunkLimits(seconds=60))
    assert IN_CHUNKS not in caplog.text
    assert WHY_ALONE[reads] in caplog.text
    run_intervals(spark, pipeline, DAYS[:5], str(tmp_path / "alone"), limits=ChunkLimits(intervals=1))
    assert results(pipeline, tmp_path / "together") == results(pipeline, tmp_path / "alone")


class Seen(StatefulProcessor):
    """Count the rows of each key."""

    def init(self, handle: Any) -> None:
        self._count = handle.getValueState("count", "rows long")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        (before,) = self._count.get() or (0,)
        self._count.update((before + sum(1 for _ in rows),))
        yield Row(user=key[0], rows=self._count.get()[0])


COUNTS: dict[str, Any] = {"processor": Seen, "output_schema": "user string, rows long"}
PAIRS = [Interval(DAYS[n].start, DAYS[n + 1].end) for n in range(0, 10, 2)]
READS = {
    "rows": lambda root: upstream("counting", root=root),
    "late rows": lambda root: upstream("counting", root=root, late=True),
    "rows of a function": lambda root: upstreams(lambda _, __, up: up.where("rows > 0"), up=READS["rows"](root)),
    "a state": lambda root: upstreams(
        lambda _, __, up: up.selectExpr("key.user", "value.rows"), up=upstream("counting", root=root, state="count")
    ),
}


def pairs_of_days(folder: Path, reads: str) -> Any:
    """A pipeline that reads pairs of days of another one, which has not run yet."""
    source = READS[reads](str(folder / "days"))
    return counting(name="pairs", source=source, order_by=[], retention=KeepLast(50), **COUNTS)


@pytest.mark.parametrize("reads", READS)
def test_upstream_data_read_in_chunks_gives_the_results_of_single_intervals(
    reads: str, spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cairn")
    write_days(tmp_path)
    days, pipeline = pipeline_over(tmp_path, **COUNTS), pairs_of_days(tmp_path, reads)
    run_intervals(spark, days, DAYS[:9], str(tmp_path / "days"))
    found = {}
    for name, limits in (("alone", ChunkLimits(intervals=1)), ("together", ChunkLimits(seconds=60))):
        caplog.clear()
        with pytest.raises(InputNotReady, match="has not committed it" if reads != "a state" else "no checkpoint ends"):
            run_intervals(spark, pipeline, PAIRS, str(tmp_path / name), limits=limits)
        found[name] = results(pipeline, tmp_path / name)
        assert len(found[name]) == 4
    assert f"{IN_CHUNKS} 2 intervals" in caplog.text
    assert found["alone"] == found["together"]
    ends = [coordinator_of(pipeline, str(tmp_path / name)).log().completed()[-1].content.fresh_at for name in found]
    assert all(ends) and ends[0].upstreams == ends[1].upstreams


@pytest.mark.parametrize("reads", ["rows", "rows of a function"])
def test_chunk_that_read_upstream_rows_before_their_correction_is_not_committed(
    reads: str, spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_days(tmp_path)
    days, pipeline = pipeline_over(tmp_path, **COUNTS), pairs_of_days(tmp_path, reads)
    run_intervals(spark, days, DAYS[:10], str(tmp_path / "days"))

    def correct(content: Content) -> None:
        if content.interval == PAIRS[3]:
            (tmp_path / "9.json").write_text('{"user": "new", "item": "i", "amount": 1}\n')
            run_intervals(spark, days, DAYS[9:10], str(tmp_path / "days"))

    root = str(tmp_path / "together")
    run_intervals(spark, pipeline, PAIRS, root, limits=ChunkLimits(seconds=60), before_commit=correct)
    assert "another pipeline has changed what they read. Nothing of it is committed" in caplog.text
    assert Chains().judged(root, "pairs") == {}
    run_intervals(spark, pipeline, PAIRS, str(tmp_path / "alone"), limits=ChunkLimits(intervals=1))
    one, other = (results(pipeline, tmp_path / name)[-1] for name in ("alone", "together"))
    assert one["outputs"] == other["outputs"] and one["digest"] == other["digest"]


@pytest.mark.long("half a minute of Spark")
def test_chunks_on_a_spark_connect_server_give_the_results_of_single_intervals(tmp_path: Path) -> None:
    write_days(tmp_path)
    with SparkConnectServer(REPOSITORY, log_dir=tmp_path / "logs") as server:
        done = subprocess.run(
            [sys.executable, "-m", "tests.integration.test_chunks", server.url, str(tmp_path), server.token or ""],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY}/jobs"},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert [done.stderr.count(f"{IN_CHUNKS} {n} intervals") for n in (2, 4)] == [5, 5]
    assert "one by one" not in done.stderr
    for pipeline in (pairs_of_days(tmp_path, "rows"), pipeline_over(tmp_path)):
        assert results(pipeline, tmp_path / "together") == results(pipeline, tmp_path / "alone") != []
    made = [[one["digest"] for one in results(pipeline, tmp_path / name)] for name in ("alone", "ranged")]
    assert made[0] == made[1]


def main(url: str, folder: str, token: str) -> None:
    """Compute the days, and pairs of days that another pipeline has made, alone and together on a server."""
    from cairn.spark.session import connect

    logging.basicConfig(level=logging.INFO)
    session = connect(url, "chunks", token=token or None)
    for name, limits in (("together", 60), ("ranged", 60), ("alone", 0)):
        pipeline = pipeline_over(Path(folder), ranged=name == "ranged")
        run_intervals(session, pipeline, DAYS, f"{folder}/{name}", limits=ChunkLimits(seconds=limits))
    run_intervals(session, pipeline_over(Path(folder), **COUNTS), DAYS[:10], f"{folder}/days")
    for name, most in (("together", 64), ("alone", 1)):
        limited = ChunkLimits(intervals=most, seconds=60)
        run_intervals(session, pairs_of_days(Path(folder), "rows"), PAIRS, f"{folder}/{name}", limits=limited)


if __name__ == "__main__":
    main(*sys.argv[1:])
