"""Changes of the code tried on real flights, beside production; what it costs is printed (``pytest -s``)."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from cairn import output_files
from cairn.command.cli import app
from cairn.operations.coordinator_of import coordinator_of
from cairn.operations.intervals.run_intervals import run_intervals
from cairn.pipeline import Interval, Pipeline
from cairn.trials.promote_trial import plan_promotion, promote_past
from cairn.trials.try_code import Tried, try_code
from pipelines.aircraft import AIRCRAFT
from pipelines.land_flights import day_file, land
from state_backend.adapters.open_storage import join_url
from state_backend.checkpoint.trials import intervals_of_trial, remove_trial
from state_backend.inspection.compare_runs import Comparison, compare_runs
from tests.support.changed_aircraft import Airborne, LaterTimer, WrongMean
from tests.support.trials import bytes_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [
    pytest.mark.spark,
    pytest.mark.long("minutes"),
]
DAYS, BEGIN = 12, 4
KEY = ["kind", "tailnum", "row_number"]


def days(first: int) -> list[Interval]:
    starts = [AIRCRAFT.start + timedelta(days=n) for n in range(first, DAYS)]
    return [Interval(start, start + timedelta(days=1)) for start in starts]


@pytest.fixture(scope="module")
def production(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flights")
    land(folder, first=date(2013, 1, 1), last=date(2013, 1, 1) + timedelta(days=DAYS - 1))
    os.environ["CAIRN_FLIGHTS"] = str(folder)
    root = tmp_path_factory.mktemp("state")
    run_intervals(spark, AIRCRAFT, days(0), str(root))
    return root


def tried(spark: SparkSession, root: Path, pipeline: Pipeline, first: int, name: str) -> Tried:
    now_ms = time.time_ns() // 1_000_000
    return try_code(spark, pipeline, days(first), str(root), code="tests:CHANGED", trial=name, now_ms=now_ms)


def compared(root: Path, run: Tried, work: Path) -> Comparison:
    sides = []
    for above in (str(root), run.root):
        coordinator = coordinator_of(AIRCRAFT, above)
        sides.append((join_url(above, "aircraft"), coordinator.log(), coordinator.storage))
    return compare_runs(sides[0], sides[1], intervals_of_trial(run.trial), work / run.trial.name, key=KEY)


def made(root: str | Path) -> list[Any]:
    log = coordinator_of(AIRCRAFT, str(root)).log()
    latest = {r.content.interval: r.content for r in sorted(log.completed(), key=lambda r: r.id)}
    return [(i, c.digest, sorted(o.handle.crc32c for o in c.outputs)) for i, c in sorted(latest.items())]


def test_the_same_code_is_empty_and_costs_what_the_run_costs(
    spark: SparkSession, production: Path, tmp_path: Path
) -> None:
    before = bytes_of(production / "aircraft")
    began = time.monotonic()
    fresh = tmp_path / "fresh"
    run_intervals(spark, AIRCRAFT, days(0)[:BEGIN], str(fresh))
    begun = time.monotonic()
    run_intervals(spark, AIRCRAFT, days(BEGIN), str(fresh))
    plain_s = time.monotonic() - begun
    begun = time.monotonic()
    run = tried(spark, production, AIRCRAFT, BEGIN, "same")
    trial_s = time.monotonic() - begun
    begun = time.monotonic()
    found = compared(production, run, tmp_path)
    compare_s = time.monotonic() - begun
    uploaded = [sum(r.content.totals.uploaded_bytes for r in coordinator_of(AIRCRAFT, str(root)).log().completed()
                    if r.content.kind == "interval" and r.content.interval >= days(BEGIN)[0]) for root in (fresh, run.root)]  # fmt: skip
    print(
        f"plain {plain_s:.1f} s, trial {trial_s:.1f} s, fork {run.fork_s:.2f} s, compare {compare_s:.2f} s, uploaded "
        f"{uploaded[0]:,} and {uploaded[1]:,} bytes, load {os.getloadavg()[0]:.1f}, all {time.monotonic() - began:.0f} s"
    )
    assert found.same and uploaded[1] <= 1.2 * uploaded[0]
    # By counts, since seconds depend on who else uses the machine: the fork links its files, and no byte of them is written.
    forked = list((Path(run.root) / "aircraft" / "shared" / run.trial.attempt).iterdir())
    assert forked and all(file.stat().st_nlink > 1 for file in forked if file.suffix == ".sst")
    assert sum(file.stat().st_size for file in forked if file.stat().st_nlink == 1) < 64 * 1024
    assert bytes_of(production / "aircraft") == before
    remove_trial(str(production), run.trial)
    assert bytes_of(production / "aircraft") == before and not (production / ".trials").exists()


def test_a_mistake_in_the_mean_is_found_in_exactly_its_columns_and_keys(
    spark: SparkSession, production: Path, tmp_path: Path
) -> None:
    run = tried(spark, production, replace(AIRCRAFT, processor=WrongMean), BEGIN, "mean")
    found = compared(production, run, tmp_path)
    assert not found.states and not found.late and len(found.outputs) == DAYS - BEGIN
    assert {c["name"] for rows in found.outputs for c in rows["columns"]} == {"prior_mean_delay_minutes"}
    for rows, interval in zip(found.outputs, days(BEGIN), strict=True):
        files = output_files(str(production), "aircraft", start=interval.start, end=interval.end)
        known = sum(pq.read_table(f).column("prior_mean_delay_minutes").drop_null().length() for f in files)
        assert (rows["changed"], rows["only_old"], rows["only_new"]) == (known, 0, 0)
        (column,) = rows["columns"]
        assert column["largest"] == pytest.approx(1.0) and column["mean"] == pytest.approx(1.0)
    remove_trial(str(production), run.trial)


def test_a_field_that_an_older_state_lacks_is_shown_by_itself(
    spark: SparkSession, production: Path, tmp_path: Path
) -> None:
    """Of aircraft that departed on the days of the trial; what was not written again reads as null on both sides, and is no change."""
    grown = replace(AIRCRAFT, processor=Airborne)
    run = tried(spark, production, grown, BEGIN, "grown")
    flown = set()
    for interval in days(BEGIN):
        table = pq.read_table(Path(os.environ["CAIRN_FLIGHTS"]) / day_file(interval.start.date()))
        flown |= {f["tailnum"] for f in table.to_pylist() if f["departed"] and f["tailnum"] is not None}
    found = compared(production, run, tmp_path)
    (history,) = found.states
    assert not found.outputs and (history["state"], history["added"], history["removed"]) == ("history", 0, 0)
    assert history["changed"] == len(flown) and [(f["name"], f["changed"]) for f in history["fields"]] == [
        ("air_minutes", len(flown))
    ]
    words = ["compare", "grown", "--root", str(production), "--pipeline", "aircraft", "--limit", "1"]
    said = CliRunner().invoke(app, words).output
    assert f": {len(flown):,} changed\n  air_minutes: {len(flown):,} changed\n" in said and '"air_minutes": ' in said
    assert plan_promotion(spark, grown, str(production), trial="grown").again == ()
    remove_trial(str(production), run.trial)


def test_deployed_for_the_past_it_is_as_if_it_had_always_been(
    spark: SparkSession, production: Path, tmp_path: Path
) -> None:
    later = replace(AIRCRAFT, processor=LaterTimer)
    run = tried(spark, production, later, 0, "later")
    states = {s["state"]: s for s in compared(production, run, tmp_path).states}
    assert states["seen"]["added"] and not states["seen"]["removed"]
    timers = {f["name"]: f["largest"] for f in states["$timers"]["fields"]}
    assert timers == {"at_ms": 86_400_000.0}
    assert {f["name"] for f in states["history"]["fields"]} == {"idle_timer_ms"}

    plan = plan_promotion(spark, later, str(production), past=True)
    promote_past(spark, later, str(production), plan)
    assert made(production) == made(run.root)
    fresh = tmp_path / "fresh"
    run_intervals(spark, later, days(0), str(fresh))
    assert made(fresh) == made(production)
