"""The main job without Airflow: real flights, day by day, against the same computed with pandas."""

from __future__ import annotations

from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from cairn.operations.intervals.plan_range import Progress
from cairn.operations.intervals.run_interval import run_interval
from cairn.operations.intervals.run_intervals import Outcome, run_intervals
from cairn.pipeline import Interval
from pipelines.aircraft import AIRCRAFT
from pipelines.land_flights import land
from state_backend.values.records import Record
from tests.oracles.aircraft import Expected, expected, row_order
from tests.support.coordinator import coordinator_of
from tests.support.spark_tables import state_table
from tests.support.validating import validate_checkpoint

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.long("two minutes: 120 days")]

FIRST = date(2013, 1, 1)
DAYS = 120


def day(n: int) -> Interval:
    start = AIRCRAFT.start + timedelta(days=n)
    return Interval(start, start + timedelta(days=1))


@pytest.fixture(scope="module")
def flights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flights")
    land(folder, first=FIRST, last=FIRST + timedelta(days=DAYS - 1))
    return folder


@pytest.fixture(scope="module")
def four_months(
    spark: SparkSession, flights: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[Record]]:
    root = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CAIRN_FLIGHTS", str(flights))
        records: list[Record] = []

        def keep(outcome: Outcome, _: Progress) -> None:
            assert outcome.record is not None
            records.append(outcome.record)

        # In one go: half of the time.
        run_intervals(spark, AIRCRAFT, [day(n) for n in range(DAYS)], str(root), on_outcome=keep)
    assert len(records) == DAYS
    return root, records


@pytest.fixture(scope="module")
def oracle() -> Expected:
    return expected(FIRST, DAYS)


@pytest.fixture(autouse=True)
def _flights(monkeypatch: pytest.MonkeyPatch, flights: Path) -> None:
    monkeypatch.setenv("CAIRN_FLIGHTS", str(flights))


def output_rows(root: Path, record: Record) -> list[dict[str, Any]]:
    files = [root / "aircraft" / f.handle.path for f in record.content.outputs]
    return sorted((row for f in files for row in pq.read_table(f).to_pylist()), key=row_order)


def test_outputs_are_those_of_pandas(four_months: tuple[Path, list[Record]], oracle: Expected) -> None:
    """Every field of every row of 120 days: each flight exactly once, with what was known before it, and the idle rows.
    Output files outlive their checkpoints, so all days are read."""
    root, records = four_months
    idle = 0
    for n, record in enumerate(records):
        rows = output_rows(root, record)
        assert rows == oracle.rows[FIRST + timedelta(days=n)]
        idle += sum(row["kind"] == "idle" for row in rows)
    assert idle > 5_000


def test_state_is_that_of_pandas(spark: SparkSession, four_months: tuple[Path, list[Record]], oracle: Expected) -> None:
    """Every field, after the idle timer and the expiry of routes have worked for a month."""
    root, records = four_months
    history = {
        row.key.tailnum: row.value.asDict()
        for row in state_table(spark, root, "history", pipeline="aircraft").collect()
    }
    assert history == oracle.history
    routes: dict[str, dict[tuple[str, str], int]] = {}
    for row in state_table(spark, root, "routes", pipeline="aircraft").collect():
        routes.setdefault(row.key.tailnum, {})[row.user_key.origin, row.user_key.dest] = row.value.flights
    assert routes == oracle.routes
    timers = {row.key.tailnum for row in state_table(spark, root, "$timers", pipeline="aircraft").collect()}
    assert timers == {tail for tail, fields in oracle.history.items() if fields["idle_timer_ms"] is not None}
    ever = {row["tailnum"] for rows in oracle.rows.values() for row in rows if row["departed"] and row["tailnum"]}
    assert set(routes) < ever, "no route has expired, so the test shows nothing of expiry"
    assert validate_checkpoint(spark, AIRCRAFT, str(root), records[-1]).success


def test_source_row_counts_are_recorded_in_the_checkpoint(four_months: tuple[Path, list[Record]]) -> None:
    """What a row may lack is counted in the checkpoint, and the rows that were read are the rows that were processed."""
    _, records = four_months
    first = records[0].content
    assert first.source_position["counts"] == {
        "rows": 842,
        "without_tail_number": 0,
        "cancelled": 4,
        "diverted": 1,
        "without_arrival_delay": 6,
    }
    for record in records:
        assert record.content.source_position["counts"]["rows"] == record.content.totals.input_rows


def test_uploaded_bytes_are_at_most_four_times_the_changed_bytes(four_months: tuple[Path, list[Record]]) -> None:
    """At most four times the bytes of the changed entries over the whole history, compactions included, and never a file
    that the base had."""
    root, records = four_months
    changed = sum(r.content.totals.changed_bytes for r in records[1:])
    uploaded = sum(r.content.totals.uploaded_bytes for r in records[1:])
    assert uploaded <= 4 * changed
    for record in records[1:]:
        own = [
            f.handle
            for s in record.content.shards
            if s.inline
            for f in s.inline.files
            if record.content.attempt in f.handle.path
        ]
        assert len(own) == record.content.totals.uploaded_files
        assert sum(h.size_bytes for h in own) <= record.content.totals.uploaded_bytes
    # And what no retained checkpoint needs is gone.
    kept = coordinator_of(AIRCRAFT, str(root)).log().completed()
    needed = {f.handle.path for r in kept for s in r.content.shards if s.inline for f in s.inline.files}
    there = {str(f.relative_to(root / "aircraft")) for f in (root / "aircraft" / "shared").rglob("*.sst")}
    assert there == needed


def test_rerun_of_a_day_gives_identical_output(spark: SparkSession, four_months: tuple[Path, list[Record]]) -> None:
    """A re-run of the last day: byte-identical output files and an equal digest; its base is the same."""
    root, records = four_months
    again = run_interval(spark, AIRCRAFT, day(DAYS - 1), str(root))
    assert again.reproduces == records[-1].id
    assert again.content.digest == records[-1].content.digest
    before, after = (
        [(root / "aircraft" / f.handle.path).read_bytes() for f in r.content.outputs] for r in (records[-1], again)
    )
    assert before == after


def test_another_parallelism_gives_the_same_state(
    spark: SparkSession, tmp_path: Path, four_months: tuple[Path, list[Record]]
) -> None:
    _, records = four_months
    for n, parallelism in enumerate((3, 5, 1)):
        record = run_interval(spark, replace(AIRCRAFT, parallelism=parallelism), day(n), str(tmp_path))
        assert record.content.digest == records[n].content.digest
