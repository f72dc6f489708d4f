"""A range of intervals in one go, on Spark; what holds without Spark too is in tests/unit/test_run_intervals.py."""

from __future__ import annotations

import json
import shlex
import uuid
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from cairn.command.cli import app
from cairn.operations.intervals.run_interval import run_interval
from cairn.operations.intervals.run_intervals import plan_intervals, run_intervals
from cairn.pipeline import Interval
from cairn.spark.session import collect_once
from state_backend.values.operation_parameters import ProcessInterval
from state_backend.values.records import RunRef
from state_backend.values.retention import KeepLast
from tests.support.coordinator import coordinator_of
from tests.support.counting import DAYS, FEW_ROWS, INPUT_SCHEMA, counting, day, fresh_days
from tests.support.drivers import driven
from tests.support.ranges import files, made, ran
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

ASKED: list[Interval] = []


def read(spark: SparkSession, interval: Interval) -> tuple[DataFrame, dict[str, Any]]:
    """The rows of the day, with a position, so that it can be told whether they are the same."""
    ASKED.append(interval)
    rows = DAYS.get(interval.start, [])
    return spark.createDataFrame(rows, INPUT_SCHEMA), {"rows": repr(rows)}


PIPELINE = counting(source=read)
WEEK = [day(n) for n in range(5)]


days = fresh_days(FEW_ROWS, ASKED)


def test_intervals_of_a_range_equal_single_runs_and_are_kept_on_a_rerun(spark: SparkSession, tmp_path: Path) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    of_others = shuffle_files(spark)
    for interval in WEEK:
        run_interval(spark, PIPELINE, interval, str(alone))
    ASKED.clear()
    assert all(ran(run_intervals(spark, PIPELINE, WEEK, str(together))))
    assert made(PIPELINE, alone) == made(PIPELINE, together)
    assert ASKED == WEEK  # once each
    wait_until(lambda: not shuffle_files(spark) - of_others, 10, "no interval leaves shuffle files")

    # Again: nothing is computed, nothing is written, and a plan says so before.
    there = files(together)
    assert not any(ran(plan_intervals(spark, PIPELINE, WEEK, str(together))))
    again = run_intervals(spark, PIPELINE, WEEK, str(together))
    assert not any(ran(again)) and files(together) == there
    assert again[0].why == "keeps checkpoint 1: code and input are the same"


def shuffle_files(spark: SparkSession) -> set[Path]:
    folder = spark.conf.get("spark.local.dir")
    assert folder is not None
    return {*Path(folder).rglob("shuffle_*")}


def test_collect_once_keeps_the_shuffle_files_of_other_queries(spark: SparkSession) -> None:
    """A source may collect what it has made twice, and is not asked to compute it twice."""
    rows, of_others = spark.range(100).repartition(2), shuffle_files(spark)
    assert len(collect_once(spark, lambda: rows.where("id > 9"))) == 90
    assert len(rows.collect()) == len(rows.collect()) == 100
    assert shuffle_files(spark) - of_others
    assert spark.conf.get("spark.sql.classic.shuffleDependency.fileCleanup.enabled", None) is None


def test_the_command_line_runs_a_range(spark: SparkSession, tmp_path: Path) -> None:
    root = f"file://{tmp_path}"
    common = ["run", "--code", "tests.integration.test_run_intervals:PIPELINE", "--root", root, "--spark", "local[2]"]
    span = ["--from", "2024-01-01", "--to", "2024-01-03", "--every", "1d"]

    def said(*words: str) -> str:
        done = CliRunner().invoke(app, [*common, *words])
        assert done.exit_code == 0, done.output
        return done.output

    planned = said(*span, "--dry-run")
    assert "3 of 3 intervals would be computed; nothing was written" in planned and not files(tmp_path)
    lines = said(*span).splitlines()
    assert sum(": checkpoint " in line for line in lines) == 3
    assert "keeps checkpoint 3" in said(*span)
    DAYS[day(1).start] = [("ann", "kiwi", 3)]
    assert json.loads(said(*span, "--reprocess", "none", "--json"))["computed"] == 0
    again = json.loads(said("--from", "2024-01-02", "--every", "1d", "--json"))
    assert (again["computed"], again["kept"], len(again["intervals"])) == (1, 0, 1)
    assert again["intervals"][0] | {"why": ""} == {
        "start": "2024-01-02T00:00:00Z",
        "end": "2024-01-03T00:00:00Z",
        "computed": True,
        "checkpoint": again["checkpoint"],
        "why": "",
    }


def test_the_command_in_a_state_gap_error_lets_the_interval_run(spark: SparkSession, tmp_path: Path) -> None:
    short = replace(PIPELINE, retention=KeepLast(1))
    for interval in WEEK[:4]:
        run_interval(spark, short, interval, str(tmp_path))
    common = ["run", "--code", f"{__name__}:PIPELINE", "--root", str(tmp_path), "--every", "1d"]
    refused = CliRunner().invoke(app, [*common, "--from", "2024-01-03T00:00Z"])
    assert refused.exit_code == 1 and "StateGapError" in refused.stderr, refused.stderr
    assert "or begin at the pipeline's start: run the intervals that start from 2024-01-01T00:00:00Z" in refused.stderr
    command = shlex.split(refused.stderr.strip().splitlines()[-1])
    assert command[:2] == ["cairn", "run"] and command[command.index("--to") + 1] == "2024-01-03T00:00:00Z"
    done = CliRunner().invoke(app, command[1:])
    assert done.exit_code == 0, done.output
    again = CliRunner().invoke(app, [*common, "--from", "2024-01-03T00:00Z"])
    assert again.exit_code == 0, again.output


def test_heal_without_airflow_runs_the_quarantined_and_missing_intervals(spark: SparkSession, tmp_path: Path) -> None:
    """Three days, of which one was refused and another one was made stale; day 4 never ran. Then nothing is left to do."""
    root, name = f"file://{tmp_path}", PIPELINE.name
    run_intervals(spark, PIPELINE, WEEK[:3], root)
    coordinator_of(PIPELINE, root).quarantine(2, "a person says so")
    words = ["heal", "--code", "tests.integration.test_run_intervals:PIPELINE", "--root", root]
    words += ["--pipeline", name, "--to", WEEK[3].start.date().isoformat(), "--every", "1d", "--spark", "local[2]"]
    planned = CliRunner().invoke(app, [*words, "--dry-run"])
    assert planned.exit_code == 1 and "run 3 intervals" in planned.output
    assert "2 quarantined, 1 missing" in planned.output
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0 and "3 intervals ran" in done.output, done.output
    assert [line[-6:] for line in done.output.splitlines() if ": done, " in line] == ["1 of 3", "2 of 3", "3 of 3"]
    fresh = tmp_path / "fresh"
    run_intervals(spark, PIPELINE, WEEK[:4], str(fresh))
    made = [coordinator_of(PIPELINE, str(at)).record(WEEK[3].end) for at in (root, fresh)]
    assert made[0].content.digest == made[1].content.digest
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 0 and again.output.startswith(f"{name} is healthy up to "), again.output


def test_airflows_own_run_of_a_committed_day_computes_nothing(spark: SparkSession, tmp_path: Path) -> None:
    """By the driver that Airflow starts; a clear, another input or another base computes it."""

    def process(*, clear_number: int = 0) -> dict[str, Any]:
        request = ProcessInterval(
            root=str(tmp_path),
            code="tests.integration.test_run_intervals:PIPELINE",
            start=day(1).start,
            end=day(1).end,
            run=RunRef(run_id="scheduled__1", clear_number=clear_number, try_number=1),
            committed=True,
            attempt=str(uuid.uuid4()),
        )
        ok: dict[str, Any] = driven(request, tmp_path / "result.json", spark="local[2]")["ok"]
        return ok

    run_intervals(spark, PIPELINE, WEEK[:3], str(tmp_path))
    passed = process()
    assert passed["committed"] == 2 and passed["reused"]
    assert coordinator_of(PIPELINE, str(tmp_path)).commit(passed["attempt"]).outcome == "already"
    assert "committed" not in process(clear_number=1)
    DAYS[day(1).start] = [("ann", "kiwi", 3)]
    assert "committed" not in process()
    DAYS[day(1).start] = [("ann", "pear", 3)]
    DAYS[day(0).start] = []
    run_intervals(spark, PIPELINE, WEEK[:1], str(tmp_path))
    assert "committed" not in process()
