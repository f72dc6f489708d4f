"""Time zones of sessions, processes and pipelines: random programs against Spark, and what a pipeline records."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import Row

from cairn.operations.intervals.run_interval import run_interval
from cairn.pipeline import Interval, Pipeline
from state_backend.values import errors
from tests.conformance.generator import ZONES
from tests.support.tiers import ALL

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

LONG = ALL
# (first seed, seeds, zone of the session, TZ; None: not set). Few in the suite: each starts a Spark of its own.
PROGRAMS: list[tuple[int, int, str, str | None]] = [(0, 2, "America/New_York", "America/New_York")]
if LONG:
    # More than 700 cases.
    PROGRAMS = [(100 * n, 4, zone, tz) for n, (zone, tz) in enumerate((z, tz) for z in ZONES for tz in (None, *ZONES))]


def run(*arguments: str, tz: str | None) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TZ"} | ({"TZ": tz} if tz else {})
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=1800)


@pytest.mark.parametrize(("first", "seeds", "zone", "tz"), PROGRAMS)
@pytest.mark.long("40 seconds for each pair of zones: a Spark of its own")
def test_generated_programs_match_spark_in_each_time_zone(first: int, seeds: int, zone: str, tz: str | None) -> None:
    arguments = ["--first", str(first), "--seeds", str(seeds), "--zone", zone, "--process-zone", tz or "UTC"]
    ran = run("tests.conformance.generator", *arguments, tz=tz)
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr[-2000:]}"
    assert "seeds that differ: none" in ran.stdout
    print(ran.stdout)


START = datetime(2024, 11, 3, 4, tzinfo=UTC)
HOUR = timedelta(hours=1)


class WallClock(StatefulProcessor):
    """Computes with wall time in all the ways that depend on a process's zone."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.last = handle.getValueState("last", "at timestamp, naive timestamp")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            before = self.last.get()
            self.last.update((row.at, datetime(2024, 11, 3, 1, 30)))
            at, naive = self.last.get()
            yield Row(
                user=key[0],
                elapsed=row.at.timestamp() - before[0].timestamp() if before else None,
                wall=f"{at} {at.hour} {datetime.fromtimestamp(row.at.timestamp())} {datetime.fromtimestamp(0)}",
                naive=naive.timestamp(),
                naive_out=naive,
            )
        self.handle.registerTimer(timerValues.getCurrentProcessingTimeInMs())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        yield Row(user=key[0], wall=f"{key}")


def read_rows(spark: SparkSession, interval: Interval) -> DataFrame:
    rows = [(user, interval.start + timedelta(minutes=m)) for user in "ab" for m in (0, 9, 30)]
    return spark.createDataFrame(rows, "user string, at timestamp")


def pipeline(**changes: Any) -> Pipeline:
    settings: dict[str, Any] = {
        "name": "hosts",
        "start": START,
        "source": read_rows,
        "key": ["user"],
        "order_by": ["at"],
        "processor": WallClock,
        "output_schema": "user string, elapsed double, wall string, naive double, naive_out timestamp",
        "max_parallelism": 8,
    }
    return Pipeline(**settings | changes)


def run_hours(spark: SparkSession, root: Path, first: int, end: int, **changes: Any) -> dict[str, Any]:
    """What the last checkpoint and all outputs of these hours hold."""
    rows: list[str] = []
    digest = 0
    for n in range(first, end):
        record = run_interval(spark, pipeline(**changes), Interval(START + n * HOUR, START + (n + 1) * HOUR), str(root))
        files = [root / "hosts" / f.handle.path for f in record.content.outputs]
        rows += sorted(repr(row) for file in files for row in pq.read_table(file).to_pylist())
        digest = record.content.digest
    return {"digest": digest, "rows": rows}


def test_a_pipeline_has_a_zone_of_its_own(spark: SparkSession, tmp_path: Path) -> None:
    """It is recorded. A session of another zone is refused; another zone must be named. The session keeps its own."""
    berlin: dict[str, Any] = {"time_zone": "Europe/Berlin"}
    rows = run_hours(spark, tmp_path, 0, 1, **berlin)["rows"]
    # 04:00 in UTC, and the epoch.
    assert any("2024-11-03 05:00:00 5 2024-11-03 05:00:00 1970-01-01 01:00:00" in row for row in rows)
    with pytest.raises(
        errors.UsageError, match="so far it ran in the time zone 'Europe/Berlin', but this Spark session has 'UTC'"
    ):
        run_hours(spark, tmp_path, 1, 2)
    assert run_hours(spark, tmp_path, 1, 2, time_zone="UTC")["digest"]
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
