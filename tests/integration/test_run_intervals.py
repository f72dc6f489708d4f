"""A range of intervals in one go, on Spark: each as if it had been run alone; what stays, what a failure leaves, and what comes next."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from cairn.command import driver
from cairn.command.cli import app
from cairn.operations.plan_range import Progress
from cairn.operations.run_interval import coordinator_of, run_interval
from cairn.operations.run_intervals import Outcome, plan_intervals, run_intervals
from cairn.pipeline import Interval
from state_backend.values.errors import SinkFailed, SourceError, UsageError
from state_backend.values.records import Record, RunRef
from tests.support.counting import COUNTING, DAYS, INPUT_SCHEMA, counting, day

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

ASKED: list[Interval] = []
BROKEN: set[Interval] = set()


def read(spark: SparkSession, interval: Interval) -> tuple[DataFrame, dict[str, Any]]:
    """The rows of the day, with a position, so that it can be told whether they are the same."""
    ASKED.append(interval)
    if interval in BROKEN:
        raise OSError("the disk is gone")
    rows = DAYS.get(interval.start, [])
    return spark.createDataFrame(rows, INPUT_SCHEMA), {"rows": repr(rows)}


PIPELINE = counting(source=read)
WEEK = [day(n) for n in range(5)]


@pytest.fixture(autouse=True)
def days() -> Iterator[None]:
    for each in (DAYS, ASKED, BROKEN):
        each.clear()
    DAYS[day(0).start] = [("ann", "pear", 1), ("bob", "fig", 5), ("ann", "fig", 2), (None, "fig", 9)]
    DAYS[day(1).start] = [("ann", "pear", 3)]
    DAYS[day(4).start] = [("bob", "kiwi", 1)]
    yield
    for each in (DAYS, ASKED, BROKEN):
        each.clear()


def made(root: Path) -> list[Any]:
    """All of each checkpoint that does not depend on when, where and by which attempt it was made."""
    return [
        (
            *(record.id, record.reproduces, record.retained, record.summary),
            *(record.content.base_id, record.content.interval, record.content.digest, record.content.time),
            *(
                record.content.states,
                record.content.source_position,
                record.content.made_of,
                record.content.permissions,
            ),
            [(o.handle.size_bytes, o.handle.crc32c, o.rows, o.late) for o in record.content.outputs],
            [ref.inline and (ref.inline.key_group_states, len(ref.inline.files)) for ref in record.content.shards],
        )
        for record in coordinator_of(PIPELINE, str(root)).log().completed()
    ]


def files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def ran(outcomes: list[Outcome]) -> list[bool]:
    return [outcome.computed for outcome in outcomes]


def test_each_is_what_it_would_be_alone_and_stays_when_asked_again(spark: SparkSession, tmp_path: Path) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    for interval in WEEK:
        run_interval(spark, PIPELINE, interval, str(alone))
    ASKED.clear()
    told: list[str] = []

    def tell(outcome: Outcome, progress: Progress) -> None:
        told.append(f"{outcome.checkpoint} {progress.done}/{progress.total}")

    outcomes = run_intervals(spark, PIPELINE, WEEK, str(together), on_outcome=tell)
    assert made(alone) == made(together)
    assert told == [f"{n} {n}/5" for n in range(1, 6)]
    assert [outcome.checkpoint for outcome in outcomes] == [1, 2, 3, 4, 5] and all(ran(outcomes))
    assert ASKED == WEEK  # once each
    published = {path for path in files(together) if "/published/" in path}
    assert len(published) == 5

    # Again: nothing is computed, nothing is written, and a plan says so before.
    there = files(together)
    assert not any(ran(plan_intervals(spark, PIPELINE, WEEK, str(together))))
    again = run_intervals(spark, PIPELINE, WEEK, str(together))
    assert not any(ran(again)) and files(together) == there
    assert again[0].why == "stays checkpoint 1: the same code made it from the same input"

    # Other input of one day: that day, and what was made from it.
    DAYS[day(2).start] = [("bob", "kiwi", 7)]
    planned = plan_intervals(spark, PIPELINE, WEEK, str(together))
    assert ran(planned) == [False, False, True, False, False]
    assert planned[3].why.endswith(f"computed if the result of {day(2)} differs")
    assert ran(run_intervals(spark, PIPELINE, WEEK, str(together), reprocess="none")) == [False] * 5
    assert ran(run_intervals(spark, PIPELINE, WEEK, str(together))) == [False, False, True, True, True]
    DAYS[day(9).start] = []  # not of the range
    assert not any(ran(run_intervals(spark, PIPELINE, WEEK, str(together))))

    # Other settings are other code, and all of it again is all of it.
    wider = counting(source=read, order_by=["item"])
    assert ran(plan_intervals(spark, wider, WEEK, str(together))) == [True] * 5
    assert ran(run_intervals(spark, PIPELINE, WEEK[:2], str(together), reprocess="all")) == [True, True]


def test_a_failure_stops_it_and_the_same_call_goes_on_behind(spark: SparkSession, tmp_path: Path) -> None:
    """The source of the next day is asked ahead; that it fails matters when it is that day's turn."""
    run = RunRef(run_id="manual__1", clear_number=0, try_number=1)
    BROKEN.add(day(3))
    with pytest.raises(SourceError, match="the disk is gone") as raised:
        run_intervals(spark, PIPELINE, WEEK, str(tmp_path), reprocess="all", run=run)
    assert "3 of 5 intervals were computed and committed before" in str(raised.value.__notes__)
    assert str(day(3)) in str(raised.value.__notes__)
    log = coordinator_of(PIPELINE, str(tmp_path)).log()
    assert [record.content.interval for record in log.completed()] == WEEK[:3]
    assert not coordinator_of(PIPELINE, str(tmp_path)).unpublished()

    BROKEN.clear()
    again = RunRef(run_id="manual__1", clear_number=0, try_number=2)
    outcomes = run_intervals(spark, PIPELINE, WEEK, str(tmp_path), reprocess="all", run=again)
    assert ran(outcomes) == [False, False, False, True, True] and all(outcome.ours for outcome in outcomes)
    cleared = RunRef(run_id="manual__1", clear_number=1, try_number=3)
    assert all(ran(run_intervals(spark, PIPELINE, WEEK[:2], str(tmp_path), reprocess="all", run=cleared)))


def test_a_sink_that_fails_stops_it_behind_its_own_interval(spark: SparkSession, tmp_path: Path) -> None:
    called: list[int] = []

    def sink(spark: SparkSession | None, paths: list[str], interval: Interval, checkpoint_id: int) -> None:
        called.append(checkpoint_id)
        if checkpoint_id == 2 and called.count(2) == 1:
            raise OSError("no")

    piped = counting(source=read, sink=sink)
    with pytest.raises(SinkFailed):
        run_intervals(spark, piped, WEEK[:3], str(tmp_path))
    assert len(coordinator_of(piped, str(tmp_path)).log().completed()) == 2
    assert ran(run_intervals(spark, piped, WEEK[:3], str(tmp_path))) == [False, False, True]
    assert called == [1, 2, 2, 3]


def test_without_a_position_everything_is_computed_and_nothing_is_read_ahead_if_told_so(
    spark: SparkSession, tmp_path: Path
) -> None:
    """A source that depends on what the pipeline has written."""
    seen: list[int] = []

    def chained(spark: SparkSession, interval: Interval) -> DataFrame:
        seen.append(coordinator_of(COUNTING, str(tmp_path)).log().head_id)
        return spark.createDataFrame([("ann", "fig", len(seen))], INPUT_SCHEMA)

    run_intervals(spark, counting(source=chained), WEEK[:3], str(tmp_path), read_ahead=False)
    assert seen == [0, 1, 2]
    assert all(ran(plan_intervals(spark, counting(source=chained), WEEK[:3], str(tmp_path))))
    with pytest.raises(UsageError, match="without gaps"):
        run_intervals(spark, PIPELINE, [day(3), day(5)], str(tmp_path))


def test_the_command_line_runs_a_range(spark: SparkSession, tmp_path: Path) -> None:
    root = f"file://{tmp_path}"
    common = ["run", "tests.integration.test_run_intervals:PIPELINE", "--root", root, "--spark", "local[2]"]
    span = ["--from", "2024-01-01", "--to", "2024-01-03", "--every", "1d"]

    def said(*words: str) -> str:
        done = CliRunner().invoke(app, [*common, *words])
        assert done.exit_code == 0, done.output
        return done.output

    planned = said(*span, "--dry-run")
    assert "3 of 3 intervals would be computed; nothing was written" in planned and not files(tmp_path)
    lines = said(*span).splitlines()
    assert sum(": checkpoint " in line for line in lines) == 3
    assert "stays checkpoint 3" in said(*span)
    assert '"computed": false' in said(*span, "--reprocess", "none", "--json")
    assert "2 of 3 intervals would be computed" not in said(*span, "--reprocess", "none", "--dry-run")
    wrong = CliRunner().invoke(app, [*common, "--from", "2024-01-01"])
    assert wrong.exit_code == 2 and "--from and --to are given together" in wrong.output


def test_airflows_own_run_of_a_committed_day_computes_nothing(spark: SparkSession, tmp_path: Path) -> None:
    """By the driver that Airflow starts; a clear, another input or another base computes it."""

    def process(*, clear_number: int = 0) -> dict[str, Any]:
        result = tmp_path / "result.json"
        words = ["process", "--pipeline", "tests.integration.test_run_intervals:PIPELINE", "--root", str(tmp_path)]
        words += ["--spark", "local[2]", "--start", day(1).start.isoformat(), "--end", day(1).end.isoformat()]
        words += ["--run-id", "scheduled__1", "--clear-number", str(clear_number), "--try-number", "1"]
        assert driver.main([*words, "--attempt", str(uuid.uuid4()), "--result", str(result)]) == 0
        ok: dict[str, Any] = json.loads(result.read_text())["ok"]
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


def test_the_record_is_what_it_was_made_of(spark: SparkSession, tmp_path: Path) -> None:
    first = run_interval(spark, PIPELINE, day(0), str(tmp_path / "a"))
    again = run_interval(spark, PIPELINE, day(0), str(tmp_path / "b"), "full")
    assert isinstance(first, Record) and first.content.made_of == again.content.made_of is not None
    without = run_interval(spark, counting(name="other"), day(0), str(tmp_path / "c"))
    assert without.content.made_of is None
