"""Time zones of sessions, processes and hosts: random programs against Spark, and hosts against each other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from state_backend.values import errors
from tests.conformance.generator import ZONES
from tests.conformance.hosts import run_hours
from tests.support.tiers import ALL

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

LONG = ALL
# (first seed, seeds, zone of the session, TZ; None: not set). Few in the suite: each starts a Spark of its own.
PROGRAMS: list[tuple[int, int, str, str | None]] = [(0, 2, "America/New_York", "America/New_York")]
if LONG:
    # More than 2,000 cases.
    PROGRAMS = [(100 * n, 11, zone, tz) for n, (zone, tz) in enumerate((z, tz) for z in ZONES for tz in (None, *ZONES))]


def run(*arguments: str, tz: str | None) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TZ"} | ({"TZ": tz} if tz else {})
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=1800)


@pytest.mark.parametrize(("first", "seeds", "zone", "tz"), PROGRAMS)
@pytest.mark.long("40 seconds for each pair of zones: a Spark of its own")
def test_generated_programs(first: int, seeds: int, zone: str, tz: str | None) -> None:
    arguments = ["--first", str(first), "--seeds", str(seeds), "--zone", zone, "--process-zone", tz or "UTC"]
    ran = run("tests.conformance.generator", *arguments, tz=tz)
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr[-2000:]}"
    assert "seeds that differ: none" in ran.stdout
    print(ran.stdout)


@pytest.mark.long("a minute: a Spark of its own for each host")
def test_hosts_in_different_zones_agree(spark: SparkSession, tmp_path: Path) -> None:
    """One runs the first two hours, another the third; the state and what is computed from wall time are as on one host."""
    alone = run_hours(spark, tmp_path / "alone", 0, 3)
    first = run_hours(spark, tmp_path / "shared", 0, 2)
    ran = run("tests.conformance.hosts", str(tmp_path / "shared"), "2", "3", tz="America/New_York")
    second = json.loads(ran.stdout.splitlines()[-1])
    assert second["digest"] == alone["digest"]
    assert first["rows"] + second["rows"] == alone["rows"]
    assert os.environ["TZ"] == "UTC"


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
