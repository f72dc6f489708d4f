"""Healthy pipelines: every interval is validated with all expectations, and no expectation fails."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from cairn import ChangeExpectations
from cairn.testing import PipelineTester
from pipelines.aircraft import AIRCRAFT
from pipelines.aircraft import READ_SCHEMA as FLIGHTS
from pipelines.weather import READ_SCHEMA as OBSERVATIONS
from pipelines.weather import RECORDS, WEATHER
from tests.support.layout import REPOSITORY
from tests.support.tiers import at_tier

INTERVALS = at_tier(fast=3, ci=3, all=50)


def landed(folder: Path, program: str, *words: str) -> None:
    command = [sys.executable, "-m", f"pipelines.{program}", "--to", str(folder), *words]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)


def rows_of(folder: Path) -> Callable[[int], list[dict[str, Any]]]:
    """The rows of the n-th file, as its program wrote them."""
    files = sorted(folder.rglob("*.parquet"))
    return lambda n: pq.ParquetFile(files[n]).read().to_pylist()


def rules(name: str) -> tuple[dict[str, list[Any]], dict[str, ChangeExpectations]]:
    """Expectations on each state, and on its change, of each kind that validation has."""
    import great_expectations.expectations as gxe

    def kept_pairs(column: str) -> ChangeExpectations:
        grows = gxe.ExpectColumnPairValuesAToBeGreaterThanB(
            column_A=f"now_{column}",
            column_B=f"before_{column}",
            or_equal=True,
            ignore_row_if="either_value_is_missing",
        )
        return ChangeExpectations(no_row_lost=True, least_rows=1.0, pairs=[grows])

    if name == "aircraft":
        assert AIRCRAFT.expectations is not None
        return AIRCRAFT.expectations(), {"history": kept_pairs("flights"), "routes": kept_pairs("flights")}
    if name == "weather":
        positive = gxe.ExpectColumnValuesToBeBetween(column="observations", min_value=1)
        return {"windows": [positive]}, {"$timers": ChangeExpectations(no_row_lost=True)}
    unique = gxe.ExpectColumnValuesToBeUnique(column="key_origin")
    return {"aggregates": [unique]}, {"aggregates": kept_pairs("observations_count")}


@pytest.mark.long("ten seconds: it imports Great Expectations", runs_in="ci")
@pytest.mark.parametrize("name", ["aircraft", "weather", "weather_records"])
def test_healthy_intervals_have_no_finding(name: str, tmp_path: Path) -> None:
    own = f"file://{tmp_path}/state"
    if name == "aircraft":
        landed(tmp_path / "in", "land_flights", "--days", str(INTERVALS))
        tester = PipelineTester(AIRCRAFT, input_schema=FLIGHTS, every=timedelta(days=1), root=own)
    else:
        landed(tmp_path / "in", "land_weather", "--hours", str(INTERVALS))
        pipeline = WEATHER if name == "weather" else RECORDS
        tester = PipelineTester(pipeline, input_schema=OBSERVATIONS, every=timedelta(hours=1), root=own)
    rows = rows_of(tmp_path / "in")
    expectations, over_time = rules(name)
    for n in range(INTERVALS):
        tester.run(rows(n))
        assert tester.validate(expectations, over_time) == [], n
    assert tester.checkpoints[-1].id == INTERVALS  # Retention has dropped some before it.
