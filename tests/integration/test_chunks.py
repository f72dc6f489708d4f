"""Several intervals by one Spark job; what holds without Spark too is in tests/unit/test_plan_chunk.py and tests/property/test_chunks.py."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F

from cairn.operations.intervals.plan_chunk import ChunkLimits
from cairn.operations.intervals.run_intervals import run_intervals
from cairn.pipeline import Interval
from state_backend.values.errors import SourceError
from state_backend.values.retention import KeepLast
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


def pipeline_over(folder: Path, **changes: Any) -> Any:
    def source(spark: Any, interval: Interval) -> Any:
        return read_day(spark, folder, DAYS.index(interval))

    return counting(**{"source": source, "retention": KeepLast(50), **changes})


def test_days_of_files_are_what_they_are_one_by_one(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cairn")
    write_days(tmp_path)
    pipeline = pipeline_over(tmp_path)
    run_intervals(spark, pipeline, DAYS, str(tmp_path / "alone"), limits=ChunkLimits(intervals=1))
    assert IN_CHUNKS not in caplog.text
    run_intervals(spark, pipeline, DAYS, str(tmp_path / "together"), limits=ChunkLimits(seconds=60))
    assert [f"{IN_CHUNKS} {n} intervals" in caplog.text for n in (2, 4)] == [True, True]
    assert "one by one" not in caplog.text
    assert results(pipeline, tmp_path / "together") == results(pipeline, tmp_path / "alone")


@pytest.mark.parametrize("of_time", ["timestamp", "timestamp_ntz"])
def test_observed_watermarks_are_what_they_are_one_by_one(
    of_time: str, spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cairn")

    def source(spark: Any, interval: Interval) -> Any:
        at = interval.start if of_time == "timestamp" else interval.start.replace(tzinfo=None)
        rows = [row(at + timedelta(minutes=m), m, f"u{m % 3}") for m in range(-400, 60, 45) if at.day % 4]
        return spark.createDataFrame(rows, SCHEMA.format(of_time))

    pipeline = declared("TumblingWindow", day(0).start, source=source, watermark="observed", retention=KeepLast(50))
    for name, limits in (("together", ChunkLimits(seconds=60)), ("alone", ChunkLimits(intervals=1))):
        run_intervals(spark, pipeline, DAYS[:8], str(tmp_path / name), limits=limits)
    assert f"{IN_CHUNKS} 4 intervals" in caplog.text and "one by one" not in caplog.text
    assert results(pipeline, tmp_path / "together") == results(pipeline, tmp_path / "alone")


def test_rows_of_an_older_list_of_files_are_refused_in_the_middle_of_a_chunk(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_days(tmp_path)
    kept = spark.read.schema(INPUT_SCHEMA).json(f"file://{tmp_path}/6.json")
    with (tmp_path / "6.json").open("a") as file:
        file.write('{"user": "ann", "item": "fig", "amount": 1}\n')

    def source(spark: Any, interval: Interval) -> Any:
        number = DAYS.index(interval)
        rows, position = read_day(spark, tmp_path, number)
        return (kept if number == 6 else rows), position

    pipeline = pipeline_over(tmp_path, source=source)
    with pytest.raises(SourceError, match=r"2024-01-07T.*lists files"):
        run_intervals(spark, pipeline, DAYS, str(tmp_path / "root"), limits=ChunkLimits(seconds=60))
    assert "job of 4 intervals failed" in caplog.text and "2024-01-07T" in caplog.text
    assert len(results(pipeline, tmp_path / "root")) == 6


@pytest.mark.parametrize("reads", ["a union", "its own output"])
def test_a_source_is_run_one_by_one(
    reads: str, spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cairn")
    write_days(tmp_path)
    (written := tmp_path / "together" / "counting" / "output").mkdir(parents=True)

    def source(spark: Any, interval: Interval) -> Any:
        rows, position = read_day(spark, tmp_path, DAYS.index(interval))
        if reads == "a union":
            return rows.where("amount < 5").union(rows.where("amount >= 5")), position
        own = spark.read.schema("user string").option("recursiveFileLookup", True).parquet(str(written))
        return rows.join(own.limit(0), "user", "left_anti")

    pipeline = pipeline_over(tmp_path, source=source)
    run_intervals(spark, pipeline, DAYS[:5], str(tmp_path / "together"), limits=ChunkLimits(seconds=60))
    assert IN_CHUNKS not in caplog.text
    assert ("one by one" if reads == "a union" else "seems to read what this pipeline writes") in caplog.text
    run_intervals(spark, pipeline, DAYS[:5], str(tmp_path / "alone"), limits=ChunkLimits(intervals=1))
    assert results(pipeline, tmp_path / "together") == results(pipeline, tmp_path / "alone")


@pytest.mark.long("half a minute of Spark")
def test_days_on_a_spark_connect_server(tmp_path: Path) -> None:
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
    assert [f"{IN_CHUNKS} {n} intervals" in done.stderr for n in (2, 4)] == [True, True]
    assert "one by one" not in done.stderr
    pipeline = pipeline_over(tmp_path)
    assert results(pipeline, tmp_path / "together") == results(pipeline, tmp_path / "alone")


def main(url: str, folder: str, token: str) -> None:
    """Compute the days alone and together on a server."""
    from cairn.spark.session import connect

    logging.basicConfig(level=logging.INFO)
    session, pipeline = connect(url, "chunks", token=token or None), pipeline_over(Path(folder))
    for name, limits in (("together", ChunkLimits(seconds=60)), ("alone", ChunkLimits(intervals=1))):
        run_intervals(session, pipeline, DAYS, f"{folder}/{name}", limits=limits)


if __name__ == "__main__":
    main(*sys.argv[1:])
