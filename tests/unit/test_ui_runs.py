"""The decisions of the Checkpoints pages about runs and tasks of Airflow: lag, who waits, why a try failed, strip and timeline."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.utils.state import DagRunState
from airflow.utils.types import DagRunType

from cairn_operators.failures import exit_failure
from cairn_ui.health_facts import lag_of
from cairn_ui.interval_strip import HIGHEST, LOWEST, Result, strip_of
from cairn_ui.run_timeline import timeline_of
from cairn_ui.try_reason import LogLine, reason_of
from cairn_ui.waiting_dags import WaitingDag, waiting_dags
from state_backend.inspection.pipeline_health import Facts
from state_backend.inspection.pipeline_status import Status
from state_backend.values.airflow_runs import DagRun, DagSchedule, FailingTask, TaskTry, read_run
from tests.support.checkpoints import day
from tests.support.shown_pipelines import plan

NOW = day(9).end + timedelta(hours=12)
BEGAN = datetime(2024, 1, 10, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return BEGAN + timedelta(seconds=seconds)


def run_of(number: int, state: str, ended_h: float | None = 1, began_h: float | None = 0.5, **changes: Any) -> DagRun:
    """The run of a day; hours count from the end of the day."""
    made: dict[str, Any] = {
        "run_id": f"{state}-{number}",
        "state": state,
        "start": day(number).start,
        "end": day(number).end,
        "due": day(number).end,
        "began": None if began_h is None else day(number).end + timedelta(hours=began_h),
        "ended": None if ended_h is None else day(number).end + timedelta(hours=ended_h),
    }
    return DagRun(**(made | changes))


def test_a_run_is_the_same_from_each_api_of_airflow() -> None:
    """The REST API gives texts; the execution API and the database give objects, with enums or texts for states."""
    times = {"logical_date": at(0), "data_interval_start": at(0), "data_interval_end": at(60), "start_date": at(70)}
    times |= {"queued_at": at(65), "run_after": at(60)}
    said = {"run_id": "r", "state": "running", "run_type": "backfill", "clear_number": 2, "end_date": None, **times}
    enums = {"state": DagRunState.RUNNING, "run_type": DagRunType.BACKFILL_JOB}
    rest = {name: value.isoformat() if isinstance(value, datetime) else value for name, value in said.items()}
    rest["dag_run_id"] = rest.pop("run_id")
    found = [read_run(DagRun, one) for one in (rest, SimpleNamespace(**said), SimpleNamespace(**said | enums))]
    assert found[0] == found[1] == found[2] and found[0].unfinished and found[0].interval is not None
    assert (found[0].run_id, found[0].run_type, found[0].began, found[0].ended) == ("r", "backfill", at(70), None)


@pytest.mark.parametrize(
    ("until", "newest", "schedule", "lag"),
    [
        (None, None, plan(), None),
        (None, day(1).end, plan(), None),
        (day(8).end, day(8).end, plan(), timedelta(hours=36)),
        (day(8).end, day(8).end, None, timedelta(hours=36)),
        # After the schedule's last run, the time goes on but the pipeline does not fall behind.
        (day(8).end, day(8).end, plan(next_due=None), timedelta(hours=24)),
        (day(8).end, day(8).end, plan(next_due=None, running=1), timedelta(hours=36)),
        (day(9).end, day(9).end, plan(next_due=None), timedelta()),
        (day(9).end, day(9).end, plan(next_due=None, asked_end=None), timedelta()),
        # The last interval has a checkpoint that can't be used.
        (day(7).end, day(9).end, plan(next_due=None, asked_end=None), timedelta(hours=48)),
        (day(11).end, day(11).end, plan(), timedelta()),
    ],
)
def test_the_lag_grows_until_the_schedule_has_run_its_last_interval(
    until: datetime | None, newest: datetime | None, schedule: DagSchedule | None, lag: timedelta | None
) -> None:
    assert lag_of(until, newest, schedule, NOW) == lag


@pytest.mark.parametrize(
    ("scheduled_by", "writes", "waiting"),
    [
        ({}, {}, []),
        ({"cairn://rides": ["report"]}, {}, [("report", ["cairn://rides"], [])]),
        ({"cairn://other": ["report"]}, {"report": ["cairn://rides"]}, []),
        # Through another DAG's asset, and an asset that two DAGs write.
        (
            {"cairn://rides": ["b", "a"], "x": ["c"]},
            {"a": ["x"], "b": ["x", "y"]},
            [("a", ["cairn://rides"], ["x"]), ("b", ["cairn://rides"], ["x", "y"]), ("c", ["x"], [])],
        ),
        # A circle ends, and the pipeline's own DAG does not wait for itself.
        (
            {"cairn://rides": ["a"], "x": ["rides", "a"]},
            {"a": ["x"], "rides": ["cairn://rides"]},
            [("a", ["cairn://rides", "x"], ["x"])],
        ),
    ],
)
def test_dags_that_wait_for_an_asset_are_listed(scheduled_by: Any, writes: Any, waiting: list[Any]) -> None:
    found = waiting_dags("cairn://rides", scheduled_by, writes, "rides")
    assert found == tuple(WaitingDag(dag_id=d, waits_for=tuple(f), writes=tuple(w)) for d, f, w in waiting)


RAISED = LogLine(level="error", text="Task failed", errors=(("ValueError", "\n first\nsecond"), ("KeyError", "cause")))


DRIVER = [
    LogLine(level="info", text=text) for text in ("a.b.OddError: odd", "KeyError: 3", "no Error: here", "Errors:")
]
KILLED = LogLine(
    level="critical",
    text="Process terminated by signal. Likely out of memory error (OOM). For more information, see https://airflow",
    signal="SIGKILL",
)
ENDED = LogLine(level="error", text="Task failed", errors=(("AirflowException", str(exit_failure(1))),))


@pytest.mark.parametrize(
    ("log", "events", "retry_reason", "reason"),
    [
        ([], [], None, None),
        ([LogLine(level="info", text="well")], [], None, None),
        ([RAISED, LogLine(level="error", text="later")], ["event"], "policy", "ValueError: first"),
        ([LogLine(level="error", text="x", errors=(("SystemExit", ""),))], [], None, "SystemExit"),
        # The driver's own exception, if it ended without a result.
        (
            [DRIVER[0], ENDED],
            [],
            None,
            "AirflowException: the Spark driver ended with code 1 and no result: a.b.OddError: odd",
        ),
        ([*DRIVER, ENDED], [], None, "AirflowException: the Spark driver ended with code 1 and no result: KeyError: 3"),
        ([ENDED], [], None, "AirflowException: the Spark driver ended with code 1 and no result; its log is above"),
        ([*DRIVER, RAISED], [], None, "ValueError: first"),
        ([LogLine(level="critical", text="killed\nby 9"), LogLine(level="info", text="end")], ["e"], "p", "killed"),
        ([KILLED], ["event"], "policy", "SIGKILL: Process terminated by signal. Likely out of memory error (OOM)."),
        ([], ["started", "Task did not emit heartbeat"], "policy", "Task did not emit heartbeat"),
        ([], [], "retry 1 of 7 in 5 s", "retry 1 of 7 in 5 s"),
        ([], [" \n "], None, None),
        ([LogLine(level="ERROR", text="x" * 400)], [], None, "x" * 299 + "…"),
    ],
)
def test_a_failed_try_shows_its_log_error(log: Any, events: Any, retry_reason: str | None, reason: str | None) -> None:
    assert reason_of(log, events, retry_reason) == reason


def test_the_interval_strip_shows_each_state_by_a_sign_and_a_word() -> None:
    runs = [run_of(n, "success") for n in range(1, 41)]
    runs[39] = run_of(40, "failed", 1.5)
    runs[38] = run_of(39, "running", None)
    runs[37] = run_of(38, "running", None, run_id="tried")
    runs[36] = run_of(37, "running", None, run_id="asleep")
    runs[35] = run_of(36, "queued", None, None)
    failing = FailingTask(dag_id="d", run_id="tried", interval=None, task_id="t", try_number=1, tries=2, ended=None)
    status = Status(next=day(42), base=1, problem=None, rerun=None, stale=(), quarantined=(), unpublished=())
    schedule = replace(plan(running=4), waiting=frozenset({"asleep"}))
    results = {day(n): Result(n, "") for n in range(1, 35)} | {
        day(35): Result(50, "stale"),
        day(33): Result(51, "quarantined"),
    }
    facts = Facts(now=NOW, status=status, schedule=schedule, failing=[failing], due=[day(41)])
    shown = strip_of(facts, results, tuple(runs))
    assert [cell.interval for cell in shown.cells] == [day(n) for n in range(12, 43)]
    assert [(cell.sign, cell.tone, cell.words) for cell in shown.cells[20:]] == [
        ("✓", "good", "done"),
        ("!", "bad", "quarantined"),
        ("✓", "good", "done"),
        ("~", "stale", "stale"),
        ("–", "info", "queued"),
        ("‖", "waits", "waiting"),
        ("↻", "warn", "failing"),
        ("…", "works", "running"),
        ("✗", "bad", "failed"),
        ("∅", "bad", "missing"),
        ("○", "next", "next"),
    ]
    assert [cell.checkpoint for cell in shown.cells[20:25]] == [32, 51, 34, 50, 0]
    assert shown.text.startswith("22 done, 1 quarantined, 1 stale") and "next" not in shown.text
    assert len({sign for sign, _, _ in shown.legend}) == len(shown.legend) == 9
    # A run that repeats an interval says more than the checkpoint that the interval has.
    again = strip_of(facts, results, (run_of(34, "success"), run_of(34, "running", None)))
    assert [cell.words for cell in again.cells if cell.interval == day(34)] == ["running"]
    heights = {cell.interval: cell.height for cell in shown.cells}
    assert heights[day(34)] < heights[day(40)] <= HIGHEST and heights[day(36)] == heights[day(41)] == LOWEST
    # Retention has dropped the checkpoint of a run that succeeded; a pipeline without a DAG has no runs.
    assert [cell.words for cell in strip_of(Facts(now=NOW), {}, (run_of(1, "success"),)).cells] == ["done"]
    assert [cell.words for cell in strip_of(Facts(now=NOW), {day(1): Result(1, "")}, ()).cells] == ["done"]
    assert (
        strip_of(Facts(now=NOW), {}, ()).cells
        == ()
        == strip_of(Facts(now=NOW), {}, (run_of(1, "failed", start=None),)).cells
    )


def one_try(task_id: str, *times: float | None, try_number: int = 1, state: str | None = "success") -> TaskTry:
    scheduled, queued, began, ended = (None if t is None else at(t) for t in times)
    return TaskTry(
        task_id=task_id,
        try_number=try_number,
        state=state,
        scheduled=scheduled,
        queued=queued,
        began=began,
        ended=ended,
    )


def the_run(state: str, ended: float | None) -> DagRun:
    end = None if ended is None else at(ended)
    return run_of(9, state, queued=at(-7), began=at(0), ended=end)


def test_a_timeline_has_the_time_of_the_scheduler_the_queue_and_validation() -> None:
    tries = [
        one_try("validate", 61, 62, 65, 95),
        one_try("process", 1, 2, 4, 14, state="failed"),
        one_try("process", 20, 21, 24, 54, try_number=2),
        one_try("checkpoint", 55, 56, 57, 60),
        one_try("mail", None, None, None, None, state=None),
    ]
    shown = timeline_of(the_run("success", 100), tries, at(500))
    assert [(line.of.task_id, line.of.try_number) for line in shown.lines] == [
        ("process", 1),
        ("process", 2),
        ("checkpoint", 1),
        ("validate", 1),
        ("mail", 1),
    ]
    assert [tuple(map(line.seconds.get, ("pause", "scheduler", "queue", "ran"))) for line in shown.lines] == [
        (None, 2, 2, 10),
        (6, 1, 3, 30),
        (None, 2, 1, 3),
        (None, 2, 3, 30),
        (None, None, None, None),
    ]
    assert (shown.turn, shown.whole) == (7, 100)
    assert [(name, seconds) for name, _, seconds in shown.totals] == [
        ("process", 40),
        ("checkpoint", 3),
        ("validate", 30),
        ("mail", 0),
        ("between tries", 6),
        ("waiting for the scheduler", 7),
        ("in the queue", 9),
    ]
    assert len({line.colour for line in shown.lines}) == 4
    first, second = shown.lines[:2]
    assert [(p.kind, p.at, p.share) for p in first.parts] == [
        ("scheduler", 0, 0.02),
        ("queue", 0.02, 0.02),
        ("failed", 0.04, 0.1),
    ]
    assert [p.kind for p in second.parts] == ["pause", "scheduler", "queue", "ran"]
    for line in shown.lines:
        assert all(p.at >= 0 and p.at + p.share <= 1 + 1e-9 for p in line.parts)


def test_a_timeline_counts_an_unfinished_task_up_to_now() -> None:
    deferred = one_try("process", 1, 40, 4, None, state="running")  # queued again after its trigger
    shown = timeline_of(the_run("running", None), [deferred], at(50))
    (line,) = shown.lines
    assert (line.seconds["scheduler"], line.seconds["queue"], line.seconds["ran"], shown.whole) == (1, None, 46, 50)
    assert [p.kind for p in line.parts] == ["scheduler", "ran"]
    # A person cleared the run: the earlier try has its figures but no place on the time line.
    cleared = [
        one_try("process", -90, -80, -70, -60, state="failed"),
        replace(one_try("process", 1, 2, 3, 9, try_number=2), most_retries=1),
    ]
    before, after = timeline_of(the_run("success", 10), cleared, at(50)).lines
    assert (before.seconds["ran"], before.parts, after.seconds.get("pause")) == (10, (), None)
    assert sum(p.share for p in after.parts) == pytest.approx(0.8)
    # A deferred task does not run while it waits.
    waits = replace(one_try("process", 1, 2, 4, None, state="deferred"), waits_since=at(10))
    (line,) = timeline_of(the_run("running", None), [waits], at(50)).lines
    assert (line.seconds["ran"], line.seconds["wait"]) == (6, 40)
    assert [p.kind for p in line.parts] == ["scheduler", "queue", "ran", "wait"]
    queued = timeline_of(run_of(9, "queued", None, None), [one_try("process", None, None, None, None)], at(50))
    assert (queued.whole, queued.turn, queued.lines[0].parts) == (None, None, ())
