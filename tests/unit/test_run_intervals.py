"""A range of intervals in one go, without Spark: each as if it had been run alone; what stays, what a failure leaves, what comes next."""

from __future__ import annotations

import time
import uuid
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cairn import KeepLast, testing
from cairn.operations.intervals.plan_interval import Attempt
from cairn.operations.intervals.plan_range import Progress
from cairn.operations.intervals.process_interval import process_interval
from cairn.operations.intervals.run_interval import finish_commit
from cairn.operations.intervals.run_intervals import Outcome, committed_alike, plan_intervals, run_intervals
from cairn.pipeline import Interval, Pipeline
from cairn.rows.local_rows import LocalRows
from cairn.spark.ddl import parse_ddl_locally
from state_backend.checkpoint.location import locate
from state_backend.checkpoint.record_reader import RecordReader
from state_backend.values.errors import CorruptFile, Rerun, SinkFailed, SourceError, UsageError, ValidationRefused
from state_backend.values.operation_parameters import Validate
from state_backend.values.records import Permissions, Record, RunRef
from state_backend.values.zones import zone_of
from tests.support.coordinator import coordinator_of
from tests.support.counting import DAYS, FEW_ROWS, INPUT_SCHEMA, counting, day, fresh_days
from tests.support.drivers import driven
from tests.support.ranges import files, made, ran
from tests.support.validating import validate_checkpoint

ASKED: list[Interval] = []
BROKEN: set[Interval] = set()
SESSION: Any = testing.PlanningSession("UTC")
WEEK = [day(n) for n in range(5)]


def read(spark: Any, interval: Interval) -> Any:
    """The rows of the day, with a position, so that it can be told whether they are the same."""
    ASKED.append(interval)
    if interval in BROKEN:
        raise OSError("the disk is gone")
    rows = DAYS.get(interval.start, [])
    return LocalRows(rows, parse_ddl_locally(INPUT_SCHEMA), zone_of("UTC"), "the input"), {"rows": repr(rows)}


def read_without_position(spark: Any, interval: Interval) -> Any:
    return read(spark, interval)[0]


def pipeline_of(**changes: Any) -> Pipeline:
    made = counting(**{"source": read, **changes})
    return replace(made, engine=replace(made.engine, cache_dir=None))


PIPELINE = pipeline_of()


days = fresh_days(FEW_ROWS, ASKED, BROKEN)


def run_all(root: Path, intervals: list[Interval] = WEEK, pipeline: Pipeline = PIPELINE, **more: Any) -> list[Outcome]:
    on_shards = partial(testing._on_shards, pipeline.processor)
    return run_intervals(SESSION, pipeline, intervals, str(root), on_shards=on_shards, **more)


def plan_all(root: Path, pipeline: Pipeline = PIPELINE, **more: Any) -> list[Outcome]:
    return plan_intervals(SESSION, pipeline, WEEK, str(root), **more)


def prepare_alone(root: Path, interval: Interval, **more: Any) -> str:
    attempt = str(uuid.uuid4())
    process_interval(
        SESSION,
        PIPELINE,
        locate(str(root), PIPELINE.name),
        Attempt(
            id=attempt,
            interval=interval,
            mode=more.pop("mode", "incremental"),
            run=RunRef(run_id="alone", clear_number=0, try_number=1),
        ),
        on_shards=partial(testing._on_shards, PIPELINE.processor),
    )
    return attempt


def run_alone(root: Path, interval: Interval, **more: Any) -> Record:
    coordinator, attempt = coordinator_of(PIPELINE, str(root)), prepare_alone(root, interval, **more)
    result = coordinator.commit(attempt)
    finish_commit(SESSION, PIPELINE, coordinator.at, result.id)
    assert result.record is not None
    return result.record


def test_a_range_gives_the_results_of_single_runs_and_keeps_them_if_repeated(tmp_path: Path) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    for interval in WEEK:
        run_alone(alone, interval)
    ASKED.clear()
    told: list[str] = []

    def tell(outcome: Outcome, progress: Progress) -> None:
        told.append(f"{outcome.checkpoint} {progress.done}/{progress.total}")
        assert outcome.record is not None and outcome.record.id == outcome.checkpoint

    outcomes = run_all(together, on_outcome=tell)
    assert made(PIPELINE, alone) == made(PIPELINE, together) and len(made(PIPELINE, alone)) == 5
    assert told == [f"{n} {n}/5" for n in range(1, 6)]
    assert [outcome.checkpoint for outcome in outcomes] == [1, 2, 3, 4, 5] and all(ran(outcomes))
    # 1,800 records were 184 to 355 MB at the end of a range.
    assert [outcome.record for outcome in outcomes] == [None] * 5
    assert ASKED == WEEK  # once each
    for kind in ("published", "settled", "checkpoints", "output"):
        counts = [sum(f"counting/{kind}/" in path for path in files(root)) for root in (alone, together)]
        assert counts[0] == counts[1] > 0, kind

    # Again: nothing is computed, nothing is written, and a plan says so before.
    there = files(together)
    assert not any(ran(plan_all(together)))
    again = run_all(together)
    assert not any(ran(again) + [outcome.ours for outcome in again]) and files(together) == there
    assert again[0].why == "keeps checkpoint 1: code and input are the same"


@pytest.mark.long("half a second", runs_in="ci")
def test_intervals_with_changed_input_or_code_and_later_intervals_are_recomputed(tmp_path: Path) -> None:
    run_all(tmp_path)
    DAYS[day(2).start] = [("bob", "kiwi", 7)]
    planned = plan_all(tmp_path)
    assert ran(planned) == [False, False, True, False, False]
    assert planned[2].why.startswith("checkpoint 3 had other input: ")
    assert planned[3].why.endswith(f"computed again if the new result of {day(2)} differs")
    assert ran(run_all(tmp_path, reprocess="none")) == [False] * 5
    outcomes = run_all(tmp_path)
    assert ran(outcomes) == [False, False, True, True, True]
    assert outcomes[4].why == "checkpoint 8, because checkpoint 5 is not valid: checkpoint 6 made it stale"
    assert not any(ran(run_all(tmp_path)))

    assert ran(plan_all(tmp_path, pipeline_of(order_by=["item"]))) == [True] * 5
    assert ran(plan_intervals(None, PIPELINE, WEEK, str(tmp_path))) == [True] * 5
    assert ran(run_all(tmp_path, WEEK[:2], reprocess="all")) == [True, True]
    assert not any(ran(plan_all(tmp_path)))  # the same results again make nothing stale


@pytest.mark.long("half a second", runs_in="ci")
def test_a_permission_for_the_first_computed_interval_does_not_count_for_later_ones(tmp_path: Path) -> None:
    allowed = Permissions(allow_gap=True)
    run_all(tmp_path, permissions=allowed)
    log, first = coordinator_of(PIPELINE, str(tmp_path)).log(), [True, False, False, False, False]
    assert [r.content.permissions == allowed for r in log.completed()] == first
    assert not any(ran(run_all(tmp_path, permissions=allowed)))
    DAYS[day(0).start].reverse()  # Other input, whose result is the same.
    assert ran(plan_all(tmp_path)) == ran(run_all(tmp_path, permissions=allowed)) == first


@pytest.mark.long("half a second", runs_in="ci")
def test_a_failure_stops_the_range_and_the_same_call_continues_at_the_failed_interval(tmp_path: Path) -> None:
    """The source of the next day is asked ahead; that it fails matters when it is that day's turn."""
    run = RunRef(run_id="manual__1", clear_number=0, try_number=1)
    BROKEN.add(day(3))
    with pytest.raises(SourceError, match="the disk is gone") as raised:
        run_all(tmp_path, reprocess="all", run=run)
    note = raised.value.__notes__[-1]
    assert (
        note.startswith("3 of 5 intervals were computed and committed before the failure, 0 kept their result")
        and str(day(3)) in note
    )
    assert [r.content.interval for r in coordinator_of(PIPELINE, str(tmp_path)).log().completed()] == WEEK[:3]
    assert not coordinator_of(PIPELINE, str(tmp_path)).unpublished()
    assert note.endswith("The same call continues there")
    with pytest.raises(SourceError) as raised:
        run_all(tmp_path / "unnamed", reprocess="all")
    assert raised.value.__notes__[-1].endswith("computes all of them again; to continue, begin there")

    BROKEN.clear()
    told: list[int] = []
    again = {"reprocess": "all", "run": replace(run, try_number=2)}
    outcomes = run_all(tmp_path, **again, on_outcome=lambda outcome, _: told.append(outcome.record.id))
    assert ran(outcomes) == [False, False, False, True, True] and all(outcome.ours for outcome in outcomes)
    assert told == [1, 2, 3, 4, 5], "the events of the earlier try's commits need their records"
    cleared = RunRef(run_id="manual__1", clear_number=1, try_number=3)
    assert all(outcome.ours for outcome in run_all(tmp_path, run=cleared))
    assert all(ran(run_all(tmp_path, WEEK[:2], reprocess="all", run=cleared)))


def test_a_failing_sink_stops_the_range_after_its_interval_is_committed(tmp_path: Path) -> None:
    called: list[int] = []

    def sink(spark: Any, paths: list[str], interval: Interval, checkpoint_id: int) -> None:
        called.append(checkpoint_id)
        if checkpoint_id == 2 and called.count(2) == 1:
            raise OSError("no")

    piped = pipeline_of(sink=sink)
    with pytest.raises(SinkFailed):
        run_all(tmp_path, WEEK[:3], piped)
    assert len(coordinator_of(piped, str(tmp_path)).log().completed()) == 2
    assert ran(run_all(tmp_path, WEEK[:3], piped)) == [False, False, True]
    assert called == [1, 2, 2, 3]


@pytest.mark.parametrize("stop", [OSError("no"), SystemExit("killed")], ids=["fails", "is stopped"])
@pytest.mark.parametrize("following", [0, 1])
def test_a_retry_calls_the_sink_for_what_an_earlier_try_committed(
    tmp_path: Path, stop: BaseException, following: int
) -> None:
    """Also if there is nothing left to compute; and as long as the sink fails, so does the retry, and nothing is computed behind it."""
    called: list[int] = []

    def sink(spark: Any, paths: list[str], interval: Interval, checkpoint_id: int) -> None:
        called.append(checkpoint_id)
        if checkpoint_id == 2 and called.count(2) <= 2:
            raise stop

    piped, days = pipeline_of(sink=sink), WEEK[: 2 + following]
    for tries in (1, 2):
        with pytest.raises((SinkFailed, SystemExit)):
            run_all(tmp_path, days, piped)
        assert called == [1, *[2] * tries] and coordinator_of(piped, str(tmp_path)).log().head_id == 2
    assert ran(run_all(tmp_path, days, piped)) == [False, False, *[True] * following]
    assert called == [1, 2, 2, 2, *[3] * following] and coordinator_of(piped, str(tmp_path)).unpublished() == []
    assert ran(run_all(tmp_path, days, piped)) == [False] * len(days) and called.count(2) == 3


@pytest.mark.long("half a second", runs_in="ci")
def test_a_clean_up_that_fails_keeps_the_next_interval_from_being_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise OSError("read-only")

    monkeypatch.setattr("cairn.operations.intervals.run_interval.try_clean_up", refused)
    with pytest.raises(OSError, match="read-only"):
        run_all(tmp_path)
    assert len(coordinator_of(PIPELINE, str(tmp_path)).log().completed()) == 1
    monkeypatch.undo()
    assert ran(run_all(tmp_path)) == [False, True, True, True, True]


def test_without_a_source_offset_every_interval_is_recomputed(tmp_path: Path) -> None:
    blind = pipeline_of(source=read_without_position)
    run_all(tmp_path, WEEK[:2], blind)
    outcomes = run_all(tmp_path, WEEK[:2], blind)
    assert all(ran(outcomes)) and "had the same code and input: the source records no position" in outcomes[0].why
    assert ran(run_all(tmp_path, WEEK[:2], blind, reprocess="none")) == [False, False]
    with pytest.raises(UsageError, match="without gaps"):
        run_all(tmp_path, [day(3), day(5)])
    with pytest.raises(UsageError, match="'some' is not one of changed, none, all"):
        run_all(tmp_path, reprocess="some")


def no_initial_state(spark: Any) -> Any:
    return LocalRows([], parse_ddl_locally(INPUT_SCHEMA), zone_of("UTC"), "the initial state")


def test_only_the_interval_that_reads_initial_state_is_computed_again(tmp_path: Path) -> None:
    starting = pipeline_of(initial_state=no_initial_state)
    run_all(tmp_path, WEEK[:2], starting)
    assert ran(run_all(tmp_path, WEEK[:2], starting)) == [True, False]


@pytest.mark.long("half a second", runs_in="ci")
def test_with_read_ahead_off_a_source_is_read_after_the_previous_commit(tmp_path: Path) -> None:
    """A source that depends on what the pipeline has written sees all that is committed."""
    seen: list[int] = []

    def chained(spark: Any, interval: Interval) -> Any:
        seen.append(coordinator_of(PIPELINE, str(tmp_path)).log().head_id)
        return read(spark, interval)

    run_all(tmp_path, WEEK, pipeline_of(source=chained, read_ahead=False))
    assert seen == [0, 1, 2, 3, 4]


def test_a_committed_interval_is_reused_by_another_run_unless_cleared_or_changed(tmp_path: Path) -> None:
    """As Airflow's own run of a day does: a clear, other input and another base are no reason to leave the day as it is."""

    def found(run_id: str = "scheduled__1", clear_number: int = 0) -> int | None:
        run = RunRef(run_id=run_id, clear_number=clear_number, try_number=1)
        there, _ = committed_alike(SESSION, PIPELINE, day(1), str(tmp_path), run=run)
        return there.id if there is not None else None

    assert found() is None
    mine = RunRef(run_id="mine", clear_number=0, try_number=1)
    run_all(tmp_path, WEEK[:3], run=mine)
    assert found() == 2 and found(clear_number=1) is None
    assert found("mine") is None  # a retry has its own rules
    DAYS[day(1).start] = [("ann", "kiwi", 3)]
    assert found() is None
    DAYS[day(1).start] = [("ann", "pear", 3)]
    DAYS[day(0).start] = []
    run_all(tmp_path, WEEK[3:4], replace(PIPELINE, retention=KeepLast(1)))
    assert found() == found("mine") == 2  # dropped, with its base: a retry can't compute it either
    run_all(tmp_path, WEEK[:1])
    assert found() is None


def test_the_mode_does_not_change_the_input_hash(tmp_path: Path) -> None:
    first, again = run_alone(tmp_path / "a", day(0)), run_alone(tmp_path / "b", day(0), mode="full")
    assert first.content.input_hash == again.content.input_hash is not None


def test_a_commit_looks_for_each_file_of_its_attempt(tmp_path: Path) -> None:
    run_alone(tmp_path, day(0))
    attempt = prepare_alone(tmp_path, day(1))
    coordinator = coordinator_of(PIPELINE, str(tmp_path))
    own = [path for path in files(tmp_path) if f"/{attempt}/" in path and not path.endswith("prepared.json")]
    assert {f"counting/{h.path}" for h in coordinator.load_prepared(attempt).written or ()} == {*own} != set()
    (tmp_path / own[0]).unlink()
    with pytest.raises(CorruptFile, match="Nothing is committed"):
        coordinator.commit(attempt)


@pytest.mark.long("half a second", runs_in="ci")
def test_the_driver_validates_files_without_spark(tmp_path: Path) -> None:
    root, result = tmp_path / "state", tmp_path / "result"

    def validated(**more: str) -> Any:
        return driven(Validate(root=str(root), code=f"{__name__}:PIPELINE", fast=True, **more), result)["ok"]

    records = [run_alone(root, day(n)) for n in range(3)]
    found = validated()
    assert (found["success"], found["checkpoint"], found["published"], found["rerun"]) == (True, 3, [], None)
    (root / "counting" / records[1].content.outputs[0].handle.path).write_bytes(b"")
    tried = validate_checkpoint(None, PIPELINE, str(root), records[1], fast=True, dry_run=True)
    assert not tried.success and not coordinator_of(PIPELINE, str(root)).log().quarantined
    found = validated(checkpoint="2")
    assert not found["success"] and found["published"] == [
        {"id": 2, "interval": str(day(1))},
        {"id": 3, "interval": str(day(2))},
    ]
    assert found["rerun"] == Rerun(first=day(1).start, last=day(2).start).as_json()
    DAYS[day(0).start] = [("ann", "pear", 2)]
    attempt = prepare_alone(root, day(0))
    coordinator = coordinator_of(PIPELINE, str(root))
    (output,) = coordinator.load_prepared(attempt).content.outputs
    data = (root / "counting" / output.handle.path).read_bytes()
    (root / "counting" / output.handle.path).write_bytes(b"")
    assert not validated(attempt=attempt)["success"]
    (root / "counting" / output.handle.path).write_bytes(data)
    with pytest.raises(ValidationRefused):
        coordinator.commit(attempt)


def test_the_phases_of_an_interval_cover_all_that_it_took(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    took_us: list[int] = []

    def watched(session: Any, job: Any, inputs: Any) -> Any:
        began = time.monotonic_ns()
        acks = testing._on_shards(PIPELINE.processor, session, job, inputs)
        took_us.append((time.monotonic_ns() - began) // 1000)
        return acks

    with caplog.at_level("INFO", "cairn"):
        run_intervals(SESSION, PIPELINE, WEEK[:1], str(tmp_path), on_shards=watched)
    phases = coordinator_of(PIPELINE, str(tmp_path)).record(1).content.durations_us
    assert phases.keys() == {"plan", "spark", "restore", "process", "timers", "consolidate", "upload"}
    assert sum(phases.values()) - phases["plan"] >= took_us[0]
    (told,) = [line for line in caplog.messages if " s: " in line]
    assert all(f"{phase} 0." in told for phase in (*phases, "prepare"))
    assert "other" not in told  # they add up to the wall time within a twentieth


def test_a_run_reads_only_the_newest_of_the_retained_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_all(tmp_path)
    read: list[int] = []
    plain = RecordReader._read
    monkeypatch.setattr(RecordReader, "_read", lambda self, n: read.append(n) or plain(self, n))
    assert run_all(tmp_path, [day(5)])[0].checkpoint == len(WEEK) + 1
    assert [n for n in read if n <= len(WEEK)] == [len(WEEK)]
