"""When an interval waits for the checkpoint before its own, and how: the decision, what is asked of Airflow, the trigger."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.api.datamodels._generated import DagRunState, DagRunType

from cairn_operators import ProcessIntervalOperator, earlier_runs, previous_checkpoint_trigger
from cairn_operators.airflow_versions import AirflowFailException
from cairn_operators.predecessor import Go, PredecessorRun, Refuse, Wait, plan_start
from cairn_operators.previous_checkpoint_trigger import PreviousCheckpointTrigger
from cairn_operators.process_data_interval import before_us
from state_backend.checkpoint.log import Log
from state_backend.formats import paths
from state_backend.values.airflow_runs import DagRun, read_run
from state_backend.values.errors import Rerun, StorageUnavailable
from state_backend.values.intervals import Interval
from state_backend.values.records import Permissions, Record
from state_backend.values.retention import KeepLast
from state_backend.values.schedule import Cron, encode
from tests.support.airflow_names import TaskDeferred
from tests.support.checkpoints import DAY, PIPELINE, Folder, day, record, run
from tests.support.log_in_memory import log_in_memory
from tests.support.operator_calls import pipeline_dag
from tests.support.predecessor import MINUTE, NOW_S, TASKS, URL, Airflow, before, folder

__all__ = ["folder"]  # a fixture


def log_of(*records: Record) -> Log:
    return log_in_memory(entries={entry.id: entry for entry in records})


# Day 2 was committed by run day2, before any clear.
DAYS_1_2 = log_of(record(1, day(1)), record(2, day(2), 1, run=run("day2")))
DAY_1 = log_of(record(1, day(1)))
STALE = log_of(*DAYS_1_2.entries.values(), record(3, day(1), None, {1: 3, 2: 3, 3: None}))  # type: ignore[arg-type]


def decide(log: Log, *runs: PredecessorRun, interval: Interval | None = None, **more: Any) -> Go | Wait | Refuse:
    more.setdefault("permissions", Permissions())
    return plan_start(log, PIPELINE, interval or day(3), runs=runs, **more)


@pytest.mark.parametrize(
    ("log", "runs"),
    [
        pytest.param(DAYS_1_2, [], id="Airflow knows no run: the log has it"),
        pytest.param(DAYS_1_2, [before("success", "success", "success")], id="done"),
        pytest.param(DAYS_1_2, [before("running", "success", "success")], id="its validate still runs"),
        pytest.param(DAYS_1_2, [before("failed", "success", "success")], id="its validate failed"),
        pytest.param(DAYS_1_2, [before("running", "success", "running")], id="committed, still publishing"),
        pytest.param(DAYS_1_2, [before("running", "failed", "upstream_failed", clear=1)], id="re-run failed"),
        pytest.param(DAYS_1_2, [before("failed", None, None, clear=1)], id="re-run marked failed before it started"),
        pytest.param(log_of(), [], id="no log: the driver knows where the pipeline starts"),
    ],
)
def test_an_interval_goes_when_nothing_before_it_can_still_change(log: Log, runs: list[PredecessorRun]) -> None:
    assert decide(log, *runs) == Go()


@pytest.mark.parametrize(
    ("log", "runs"),
    [
        pytest.param(DAY_1, [before("running", "running", None)], id="runs for the first time"),
        pytest.param(DAY_1, [before("queued", None, None)], id="queued"),
        pytest.param(DAY_1, [before("running", "up_for_retry", None)], id="between two tries"),
        pytest.param(DAY_1, [before("running", "deferred", None)], id="waits itself"),
        pytest.param(DAY_1, [before("running", "success", "queued")], id="its checkpoint is not there yet"),
        pytest.param(DAYS_1_2, [before("running", "running", None, clear=1)], id="being re-processed"),
        pytest.param(DAYS_1_2, [before("queued", None, None, clear=1)], id="cleared, not started"),
        pytest.param(DAYS_1_2, [before("running", None, "success", clear=1)], id="process cleared alone"),
        pytest.param(STALE, [before("running", "running", None, clear=1)], id="stale, but being mended"),
        pytest.param(log_of(), [before("running", "running", None)], id="the very first is running"),
        pytest.param(
            DAYS_1_2,
            [before("success", "success", "success"), before("running", "running", None, run_id="manual")],
            id="a manual run of the same interval",
        ),
    ],
)
def test_an_interval_waits_for_the_run_before_it(log: Log, runs: list[PredecessorRun]) -> None:
    decision = decide(log, *runs)
    assert isinstance(decision, Wait) and decision.runs == (runs[-1],)
    assert decision.reason.startswith(runs[-1].run_id)


@pytest.mark.parametrize(
    ("process", "checkpoint", "log", "soon"),
    [
        ("running", None, DAY_1, True),
        ("success", None, DAY_1, True),
        ("success", "queued", DAY_1, True),
        ("success", "running", log_of(), True),
        ("running", None, log_of(record(1, day(0))), False),  # it waits itself, for the checkpoint of day 1
        ("deferred", None, DAY_1, False),
        ("queued", None, DAY_1, False),  # for a worker slot, perhaps for ours
        ("up_for_retry", None, DAY_1, False),
        ("success", "up_for_retry", DAY_1, False),
    ],
)
def test_a_slot_is_kept_only_while_the_run_before_is_at_work(
    process: str, checkpoint: str | None, log: Log, soon: bool
) -> None:
    decision = decide(log, before("running", process, checkpoint))
    assert isinstance(decision, Wait) and decision.soon is soon


@pytest.mark.parametrize(
    ("log", "begins"),
    [
        pytest.param(log_of(record(1, day(0))), day(2).start, id="the run before waits for day 1"),
        pytest.param(DAY_1, None, id="the run before can compute"),
        pytest.param(log_of(), None, id="the run before may be the first"),
    ],
)
def test_a_wait_has_the_checkpoint_end_that_the_previous_run_waits_for(log: Log, begins: datetime | None) -> None:
    decision = decide(log, before("running", "deferred", None))
    assert isinstance(decision, Wait) and decision.begins == begins


@pytest.mark.parametrize(
    ("runs", "text"),
    [
        ([], "run the interval that starts at 2024-01-02T00:00:00Z"),
        ([before("failed", "failed", "upstream_failed")], "interval before failed: day2 (failed;"),
        ([before("success", "success", "skipped")], "no checkpoint ends where the interval starts"),
    ],
)
def test_an_interval_whose_base_can_no_longer_come_is_refused(runs: list[PredecessorRun], text: str) -> None:
    decision = decide(DAY_1, *runs)
    assert isinstance(decision, Refuse) and decision.error == "StateGapError"
    assert text in decision.message


@pytest.mark.parametrize(
    ("runs", "blocked", "alone_for", "earlier_running", "waits"),
    [
        ([], False, DAY, False, True),
        ([before("success", "success", "success")], False, DAY, False, True),
        # An earlier run was cleared, and may wait for this one to end: then this one fails, as a deadlock helps nobody.
        ([], True, timedelta(0), False, True),
        ([], True, 2 * MINUTE, False, False),
        ([], True, 2 * MINUTE, True, True),
        # The run of the interval before was cleared, and waits for this one.
        ([before("queued", None, None, clear=1)], False, 2 * MINUTE, False, False),
    ],
)
def test_an_interval_waits_for_a_stale_base_unless_that_is_a_deadlock(
    runs: list[PredecessorRun], blocked: bool, alone_for: timedelta, earlier_running: bool, waits: bool
) -> None:
    """If the run failed, the runs behind it would fail one by one."""
    decision = decide(
        STALE, *runs, earlier_queued=blocked, earlier_running=earlier_running, alone_for=alone_for, patience=2 * MINUTE
    )
    if waits:
        assert isinstance(decision, Wait) and (decision.heal_to, decision.runs) == (day(2).start, ())
        assert decision.alone is (blocked and not earlier_running) and not decision.soon
        assert "its base, checkpoint 2, is stale" in decision.reason
    else:
        assert isinstance(decision, Refuse) and decision.error == "StaleStateError"
        assert "Run again the interval that starts at 2024-01-02T00:00:00Z" in decision.message


def test_a_permission_lets_an_interval_go() -> None:
    assert decide(DAY_1, permissions=Permissions(allow_gap=True)) == Go()
    assert decide(STALE, permissions=Permissions(allow_stale_base=True)) == Go()


def test_the_first_interval_waits_for_nobody() -> None:
    assert decide(DAYS_1_2, interval=day(1)) == Go(there=True)  # it has a result, at which the driver looks


QUEUED = before("queued", None, None, clear=1)


@pytest.mark.parametrize(
    ("alone_for", "earlier_running", "log", "expected"),
    [
        (timedelta(0), False, DAYS_1_2, Wait),
        (2 * MINUTE - timedelta(seconds=1), False, DAYS_1_2, Wait),
        (2 * MINUTE, False, DAYS_1_2, Go),
        (2 * MINUTE, True, DAYS_1_2, Wait),  # a slot gets free when that ends
        (2 * MINUTE, False, DAY_1, Refuse),
    ],
)
def test_a_queued_previous_run_is_waited_for_only_until_the_patience_ends(
    alone_for: timedelta, earlier_running: bool, log: Log, expected: type
) -> None:
    decision = decide(log, QUEUED, alone_for=alone_for, earlier_running=earlier_running, patience=2 * MINUTE)
    assert isinstance(decision, expected)
    if isinstance(decision, Wait):
        assert decision.alone is not earlier_running
    else:
        text = decision.reason if isinstance(decision, Go) else decision.message
        assert "did not start within 0:02:00" in text


def test_a_running_previous_run_is_waited_for_without_limit() -> None:
    running = before("running", "running", None)
    assert isinstance(decide(DAY_1, running, QUEUED, alone_for=DAY, patience=MINUTE), Wait)


# --- which runs are the ones before ---------------------------------------------------------------------------------------


def dag_run(run_id: str, logical: datetime, interval: Interval, kind: str = "scheduled") -> DagRun:
    said = SimpleNamespace(
        run_id=run_id,
        logical_date=logical,
        data_interval_start=interval.start,
        data_interval_end=interval.end,
        run_type=DagRunType(kind),
        state=DagRunState.RUNNING,
        clear_number=None,
    )
    return read_run(DagRun, said)


SCHEDULED = [dag_run(f"day{n}", day(n).start, day(n)) for n in range(1, 6)]
NOON = timedelta(hours=12)


@pytest.mark.parametrize(
    ("runs", "own", "interval", "expected"),
    [
        (SCHEDULED, "day3", day(3), ["day2"]),
        (SCHEDULED, "day1", day(1), []),
        (SCHEDULED[2:], "day3", day(3), []),
        # A manual run of day 1, triggered at noon of day 2, has a later logical date than the run of day 2.
        ([*SCHEDULED, dag_run("manual", day(2).start + NOON, day(1), "manual")], "day3", day(3), ["day2"]),
        ([*SCHEDULED, dag_run("manual", day(2).start + NOON, day(1), "manual")], "day2", day(2), ["manual", "day1"]),
        # This run is the manual one: the run of day 3 has the logical date before its own, and is not the one to wait for.
        ([*SCHEDULED, dag_run("manual", day(3).start + NOON, day(2), "manual")], "manual", day(2), ["day1"]),
    ],
)
def test_the_predecessor_is_the_newest_run_before_the_interval(
    monkeypatch: pytest.MonkeyPatch, runs: list[Any], own: str, interval: Interval, expected: list[str]
) -> None:
    monkeypatch.setattr(earlier_runs, "has", lambda name: True)

    def previous(dag_id: str, logical_date: datetime, state: str | None) -> Any:
        earlier = [r for r in runs if r.logical_date < logical_date]
        return max(earlier, key=lambda r: r.logical_date, default=None)

    def task_states(dag_id: str, run_ids: list[str], task_ids: list[str]) -> dict[str, Any]:
        assert (dag_id, task_ids) == ("d", list(TASKS))
        return {run_id: {"process": "running", "checkpoint": None} for run_id in run_ids}

    monkeypatch.setattr(earlier_runs, "_previous", previous)
    context = {"dag_run": SimpleNamespace(dag_id="d", run_id=own), "ti": SimpleNamespace(get_task_states=task_states)}
    found = earlier_runs.predecessor_runs(context, interval.start, interval.end, TASKS)
    assert [run.run_id for run in found] == expected
    assert all(run.pending and run.clear_number == 0 for run in found)


class OldAirflow:
    """The calls of a task to an Airflow that answers with an error if it must describe a run without a start."""

    task_id = "process"

    def __init__(self, *runs: tuple[str, datetime, str]) -> None:
        self.runs = runs

    def previous(self, dag_id: str, logical_date: datetime, state: str | None) -> DagRun | None:
        assert state == "running"
        earlier = [one for one in self.runs if one[1] < logical_date and one[2] == state]
        if not earlier:
            return None
        run_id, at, _ = max(earlier, key=lambda one: one[1])
        interval = day(2) if run_id.startswith("manual") else Interval(at, at + timedelta(days=1))
        return dag_run(run_id, at, interval, run_id.partition("__")[0])

    def get_task_states(self, **asked: Any) -> dict[str, dict[str, str | None]]:
        dates, ids = asked.get("logical_dates"), asked.get("run_ids")
        # An empty list of dates asks for all of them.
        there = [one for one in self.runs if (one[0] in ids if ids else not dates or one[1] in dates)]
        return {run_id: {"process": "running" if state == "running" else None} for run_id, _, state in there}

    def get_dr_count(self, dag_id: str, run_ids: list[str], states: list[str]) -> int:
        return sum(run_id in run_ids and state in states for run_id, _, state in self.runs)

    def context(self, monkeypatch: pytest.MonkeyPatch, own: str) -> dict[str, Any]:
        monkeypatch.setattr(earlier_runs, "has", lambda name: False)
        monkeypatch.setattr(earlier_runs, "_previous", self.previous)
        run = SimpleNamespace(dag_id="d", run_id=own, run_type=own.partition("__")[0])
        return {"ti": self, "dag_run": run, "data_interval_end": day(3).end}


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([], {}),
        ([("scheduled__2", day(2).start, "running")], {"scheduled__2": "running"}),
        ([("scheduled__2", day(2).start, "queued"), ("scheduled__1", day(1).start, "running")], {"scheduled__2": "queued"}),
        ([("backfill__2", day(2).start, "failed")], {"backfill__2": "failed"}),
        ([("backfill__2", day(2).start, "success"), ("scheduled__4", day(4).start, "queued")], {"backfill__2": "success"}),
        (
            [("manual__2", day(3).start + NOON, "running"), ("scheduled__2", day(2).start, "success")],
            {"manual__2": "running", "scheduled__2": "success"},
        ),
    ],
)  # fmt: skip
def test_predecessors_are_found_on_an_airflow_that_describes_only_running_runs(
    monkeypatch: pytest.MonkeyPatch, runs: list[Any], expected: dict[str, str]
) -> None:
    context = OldAirflow(*runs, ("scheduled__3", day(3).start, "running")).context(monkeypatch, "scheduled__3")
    found = earlier_runs.predecessor_runs(context, day(3).start, day(3).end, TASKS)
    assert {run.run_id: run.state for run in found} == expected
    assert all(run.clear_number == (0 if run.state == "running" else -1) for run in found)


def test_a_previous_run_that_starts_during_a_query_of_an_old_airflow_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Starts(OldAirflow):
        def get_task_states(self, **asked: Any) -> dict[str, dict[str, str | None]]:
            self.runs = tuple((run_id, at, "running") for run_id, at, _ in self.runs)
            return super().get_task_states(**asked)

    context = Starts(("scheduled__2", day(2).start, "queued")).context(monkeypatch, "scheduled__3")
    (found,) = earlier_runs.predecessor_runs(context, day(3).start, day(3).end, TASKS)
    assert (found.run_id, found.state) == ("scheduled__2", "running")


@pytest.mark.parametrize("text", ["@daily", None])
def test_a_start_off_the_schedule_has_a_previous_interval_of_equal_length(
    monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    """An interval of an hourly schedule that is daily now."""
    said = None if text is None else encode(Cron(expression=text, zone="UTC"))
    monkeypatch.setattr(earlier_runs, "schedule_of_dag", lambda dag: said)
    start = day(3).start + timedelta(hours=5)
    assert earlier_runs._starts_before({}, start, start + timedelta(hours=1), 1) == [start - timedelta(hours=1)]
    assert earlier_runs._scheduled(OldAirflow(("scheduled__2", day(2).start, "queued")), "d", [], TASKS) == set()


@pytest.mark.parametrize(
    ("own", "queued", "at", "blocked"),
    [
        ("scheduled", "scheduled", 1, True),
        ("scheduled", "backfill", 1, False),
        ("backfill", "backfill", 2, True),
        ("backfill", "scheduled", 2, False),
        ("scheduled", "scheduled", 4, False),
    ],
)
def test_a_run_blocks_only_earlier_queued_runs_of_its_type_on_an_old_airflow(
    monkeypatch: pytest.MonkeyPatch, own: str, queued: str, at: int, blocked: bool
) -> None:
    airflow = OldAirflow((f"{own}__3", day(3).start, "running"), (f"{queued}__x", day(at).start, "queued"))
    assert earlier_runs.is_earlier_blocked(airflow.context(monkeypatch, f"{own}__3"), day(3).start) is blocked


@pytest.mark.parametrize(
    ("own", "queued", "blocked"),
    [
        ("scheduled", None, False),
        ("scheduled", "scheduled", True),
        ("scheduled", "manual", True),
        ("scheduled", "backfill", False),  # a paused backfill, or one that counts its own runs
        ("backfill", "backfill", True),
        ("backfill", "scheduled", False),
    ],
)
def test_backfill_runs_and_other_runs_do_not_block_each_others_queued_runs(
    monkeypatch: pytest.MonkeyPatch, own: str, queued: str | None, blocked: bool
) -> None:
    monkeypatch.setattr(earlier_runs, "has", lambda name: True)
    found = None if queued is None else dag_run("day1", day(1).start, day(1), queued)
    monkeypatch.setattr(earlier_runs, "_previous", lambda _, __, state: found if state == "queued" else None)
    context = {"dag_run": SimpleNamespace(dag_id="d", run_id="day3", run_type=DagRunType(own))}
    assert earlier_runs.is_earlier_blocked(context, day(3).start) is blocked
    assert not earlier_runs.is_earlier_running(context, day(3).start)
    monkeypatch.setattr(earlier_runs, "_previous", lambda _, __, state: found if state == "running" else None)
    assert earlier_runs.is_earlier_running(context, day(3).start) is (found is not None)


@pytest.mark.parametrize(
    ("try_number", "clear_number", "expected"),
    [
        (1, 0, {"task": 400_000, "scheduler": 2_000_000}),
        (2, 0, {"task": 400_000}),  # between the two lies a try
        (3, 1, {"task": 400_000}),
    ],
)
def test_scheduler_time_is_reported_only_for_the_first_try_of_a_run(
    try_number: int, clear_number: int, expected: dict[str, int]
) -> None:
    run_start = day(3).start
    started = run_start + timedelta(seconds=2)
    run_of_day = SimpleNamespace(start_date=run_start, clear_number=clear_number)
    ti = SimpleNamespace(start_date=started, try_number=try_number)
    assert before_us(run_of_day, ti, started + timedelta(seconds=0.4)) == expected
    assert before_us(run_of_day, SimpleNamespace(try_number=1), started) == {}


@pytest.fixture
def airflow(monkeypatch: pytest.MonkeyPatch, folder: Folder) -> Airflow:
    return Airflow(monkeypatch, folder)


def test_the_task_defers_and_goes_on_when_the_checkpoint_is_there(airflow: Airflow) -> None:
    airflow.context["task"] = pipeline_dag().get_task("process")
    with pytest.raises(TaskDeferred) as first:
        airflow.begin()
    _, asked = first.value.trigger.serialize()
    assert (asked["url"], asked["head_id"], asked["end_ms"]) == (URL, 2, day(2).end_ms)
    assert (asked["clear_numbers"], asked["queued"], tuple(asked["task_ids"])) == ({"day2": 1}, [], TASKS)
    assert asked["until_ms"] == int((NOW_S + 3600) * 1000)
    # Whatever woke it, it looks at everything again.
    with pytest.raises(TaskDeferred) as second:
        airflow.resume(first.value, 60, "the day2 run is gone")
    assert second.value.trigger.serialize()[1]["until_ms"] == asked["until_ms"]
    airflow.runs = [before("running", "success", "success", clear=1)]
    assert airflow.resume(second.value, 60)["ran"]


def sleep_is(call: Callable[[float], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace `sleep` for this module only: threads of py4j, which other tests start, sleep too."""
    monkeypatch.setattr(
        "cairn_operators.process_data_interval.time", SimpleNamespace(monotonic=time.monotonic, sleep=call)
    )


def test_a_task_keeps_its_slot_for_a_checkpoint_that_is_near(
    airflow: Airflow, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    airflow.operator.wait_in_slot = timedelta(seconds=30)

    def commit(_: float) -> None:
        folder.run(day(2), "a3", run=run("day2", clear_number=1))
        airflow.runs = [before("running", "success", "running", clear=1)]

    sleep_is(commit, monkeypatch)
    assert airflow.begin()["ran"]


@pytest.mark.parametrize(
    ("took_s", "begins_ms"), [(4, day(4).start_ms), (6, None)], ids=["fits in the slot", "too long for the slot"]
)
def test_a_task_resumes_when_the_previous_run_can_begin_if_that_fits_in_the_slot(
    airflow: Airflow, folder: Folder, took_s: int, begins_ms: int | None
) -> None:
    """The run of day 5 waits for that of day 4, which waits for day 3. Of long intervals it only awaits the commit."""
    folder.run(day(2), "a3", durations_us={"plan": 1_000_000, "process": (took_s - 1) * 1_000_000})
    airflow.operator.wait_in_slot = timedelta(seconds=5)
    airflow.runs = [before("running", "deferred", None, run_id="day4")]
    airflow.context |= {"data_interval_start": day(5).start, "data_interval_end": day(5).end}
    with pytest.raises(TaskDeferred) as deferred:
        airflow.begin()
    _, asked = deferred.value.trigger.serialize()
    assert (asked["end_ms"], asked.get("begins_ms")) == (day(4).end_ms, begins_ms)


def test_on_kill_ends_a_task_that_waits_in_its_slot(airflow: Airflow, monkeypatch: pytest.MonkeyPatch) -> None:
    airflow.operator.wait_in_slot = timedelta(seconds=30)
    sleep_is(lambda _: airflow.operator.on_kill(), monkeypatch)
    with pytest.raises(SystemExit, match="while it waited for the checkpoint"):
        airflow.begin()


def test_a_task_fails_for_good_when_the_longest_wait_is_over(airflow: Airflow) -> None:
    with pytest.raises(TaskDeferred) as deferred:
        airflow.begin()
    with pytest.raises(AirflowFailException, match=r"waited 1:00:00 for .* from day2 .running; process running"):
        airflow.resume(deferred.value, 3600, "time is up")


def test_the_patience_for_a_queued_run_starts_when_no_earlier_run_is_running(airflow: Airflow) -> None:
    """The patience does not run while something earlier does."""
    airflow.runs, airflow.earlier_running = [QUEUED], True
    with pytest.raises(TaskDeferred) as first:
        airflow.begin()
    assert first.value.trigger.serialize()[1]["until_ms"] == int((NOW_S + 3600) * 1000)
    airflow.earlier_running = False
    with pytest.raises(TaskDeferred) as second:
        airflow.resume(first.value, 600)
    assert second.value.trigger.serialize()[1]["until_ms"] == int((NOW_S + 600 + 120) * 1000)
    assert airflow.resume(second.value, 121)["ran"]
    # Less than the patience is left of the longest wait.
    with pytest.raises(TaskDeferred) as last:
        airflow.resume(first.value, 3540 - 721)
    assert last.value.trigger.serialize()[1]["until_ms"] == int((NOW_S + 3600) * 1000)


def test_a_run_behind_a_stale_interval_waits_and_says_how_to_heal(
    airflow: Airflow, folder: Folder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    airflow.runs = [before("success", "success", "success")]
    folder.run(day(1), "a3")
    heal = f"cairn heal --root memory://predecessor --pipeline {PIPELINE} --to 2024-01-02T00:00:00Z --dag d"
    with pytest.raises(TaskDeferred) as first:
        airflow.begin()
    _, asked = first.value.trigger.serialize()
    assert (asked["url"], asked["clear_numbers"], asked["until_ms"]) == (URL, {}, int((NOW_S + 3600) * 1000))
    said = capsys.readouterr().out
    assert "its base, checkpoint 2, is stale" in said and heal in said
    # An earlier run was cleared, and is queued until this one ends.
    airflow.earlier_blocked = True
    with pytest.raises(TaskDeferred) as second:
        airflow.resume(first.value, 60, "another run was queued")
    assert second.value.trigger.serialize()[1]["until_ms"] == int((NOW_S + 60 + 120) * 1000)
    with pytest.raises(AirflowFailException, match="StaleStateError"):
        airflow.resume(second.value, 121)
    # Nobody heals.
    airflow.earlier_blocked = False
    with pytest.raises(AirflowFailException, match="waited 1:00:00 for") as failed:
        airflow.resume(first.value, 3600)
    assert heal in str(failed.value)
    # The triggerer has no access by the task's own connection, so the task itself looks every five minutes.
    monkeypatch.setattr("cairn_operators.process_data_interval.as_storage_identity", lambda _: nullcontext())
    airflow.operator.storage_conn_id, airflow.now_s = "gcs", NOW_S + 60
    with pytest.raises(TaskDeferred) as blind:
        airflow.operator.after_wait(airflow.context, None, **first.value.kwargs)
    asked = blind.value.trigger.serialize()[1]
    assert (asked["url"], asked["until_ms"]) == (None, int((NOW_S + 60 + 300) * 1000))
    # Somebody does.
    folder.run(day(2), "a4")
    assert airflow.resume(first.value, 1)["ran"]


def test_a_gap_is_refused_before_spark_is_started(
    airflow: Airflow, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProcessIntervalOperator, "run_driver", lambda *_, **__: pytest.fail("a driver was started"))
    airflow.runs = []
    airflow.context |= {"data_interval_start": day(5).start, "data_interval_end": day(5).end}
    with pytest.raises(AirflowFailException) as caught:
        airflow.begin()
    assert "StateGapError" in str(caught.value)
    heal = "\ncairn heal --root memory://predecessor --pipeline counting --to 2024-01-05T00:00:00Z --dag d"
    assert str(caught.value).endswith(heal)
    folder.run(day(5), "over a gap", permissions=Permissions(allow_gap=True))
    with pytest.raises(AirflowFailException) as caught:
        airflow.begin()
    assert str(caught.value).endswith("\ncairn backfill --dag d --from 2024-01-03T00:00:00Z --to 2024-01-05T00:00:00Z")


@pytest.fixture
def airflow_says(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Task states by run as Airflow would answer, and the number of runs in each state."""
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    says: dict[str, Any] = {"states": {"day2": {"process": "running", "checkpoint": None}}}
    count = lambda states, **_: sum(says.get(state, 0) for state in states)  # noqa: E731
    monkeypatch.setattr(RuntimeTaskInstance, "get_task_states", staticmethod(lambda **_: says["states"]))
    monkeypatch.setattr(RuntimeTaskInstance, "get_dr_count", staticmethod(count))
    monkeypatch.setattr(previous_checkpoint_trigger, "_FIRST_LOOK_S", 0.0)
    monkeypatch.setattr(previous_checkpoint_trigger, "_AIRFLOW_EVERY_S", 0.01)
    return says


def trigger(
    *,
    queued: Sequence[str] = (),
    seconds: float = 20,
    clear_number: int = 1,
    awaited: bool = True,
    end_ms: int = day(2).end_ms,
    begins_ms: int | None = None,
) -> PreviousCheckpointTrigger:
    until_ms = int((time.time() + seconds) * 1000)
    made = PreviousCheckpointTrigger(
        url=URL,
        head_id=1,
        end_ms=end_ms,
        dag_id="d",
        clear_numbers={"day2": clear_number} if awaited else {},
        task_ids=TASKS,
        queued=queued,
        until_ms=until_ms,
        poll_s=0.01,
        begins_ms=begins_ms,
    )
    path, arguments = made.serialize()
    assert path == "cairn_operators.previous_checkpoint_trigger.PreviousCheckpointTrigger"
    return PreviousCheckpointTrigger(**arguments)


def fires(made: PreviousCheckpointTrigger, then: Callable[[], object] = lambda: None) -> str:
    """Why it fired, after it has looked twice and ``then`` has happened."""

    async def go() -> str:
        waiting = asyncio.ensure_future(anext(made.run()))
        await asyncio.sleep(0.1)
        assert not waiting.done(), waiting
        then()
        event = await asyncio.wait_for(waiting, 10)
        return str(event.payload["why"])

    return asyncio.run(go())


@pytest.mark.parametrize(
    ("waited_s", "poll_s", "local", "then_s"),
    [
        (0, 0.4, False, 0.4),
        (8, 0.4, False, 0.4),
        (10, 0.4, False, 0.5),  # up to here within half a second of the checkpoint
        (20, 0.4, False, 1.0),
        (3600, 0.4, False, 2.0),
        (3600, 5.0, False, 5.0),  # what was asked for is not undercut
        (3600, 0.4, True, 0.4),
    ],
)
def test_long_waits_poll_remote_storage_less_often(waited_s: float, poll_s: float, local: bool, then_s: float) -> None:
    assert previous_checkpoint_trigger.pause_s(waited_s, poll_s, local=local) == then_s


@pytest.mark.parametrize(
    ("awaits", "runs", "why"),
    [
        # The checkpoint that is waited for, and no other.
        ({}, [run("day2", clear_number=0), run("day2", clear_number=1)], "checkpoint 4 is committed"),
        # While no run is awaited: any commit of the interval.
        ({"awaited": False}, [run("anybody")], "checkpoint 3 is committed"),
        # Day 3 is awaited, and starts from day 2.
        ({"end_ms": day(3).end_ms, "begins_ms": day(3).start_ms}, [run("anybody")], "the interval before can begin"),
    ],
)
@pytest.mark.usefixtures("airflow_says")
def test_the_trigger_fires_on_the_awaited_commit(folder: Folder, awaits: dict[str, Any], runs: Any, why: str) -> None:
    def commits() -> None:
        folder.run(day(1), "a2", digest=folder.coordinator.record(1).content.digest)
        time.sleep(0.1)
        for n, of in enumerate(runs, 3):
            folder.run(day(2), f"a{n}", run=of)

    assert fires(trigger(**awaits), commits) == why


@pytest.mark.usefixtures("folder")
def test_while_no_run_is_awaited_a_run_that_is_queued_ends_the_wait(airflow_says: dict[str, Any]) -> None:
    """Not one that was queued before, and not one that starts."""

    async def go() -> str:
        made = trigger(awaited=False)
        waiting = asyncio.ensure_future(anext(made.run()))
        for queued in (3, 2):
            airflow_says["queued"] = queued
            await asyncio.sleep(0.2)
            assert not waiting.done()
        airflow_says["queued"] = 3
        return str((await asyncio.wait_for(waiting, 10)).payload["why"])

    assert asyncio.run(go()) == "another run was queued"


@pytest.mark.parametrize(
    ("change", "queued", "why"),
    [
        ({"success": 1}, (), "1 of these runs ended: day2"),
        ({"failed": 1}, (), "1 of these runs ended: day2"),
        ({"states": {"day2": {"process": "failed", "checkpoint": None}}}, (), "run day2 has ended: "),
        ({"states": {"day2": {"process": "success", "checkpoint": "success"}}}, (), "run day2 has ended: "),
        ({"states": {}}, (), "run day2 was deleted"),
        ({"states": {"day2": {"process": "queued", "checkpoint": None}}}, ("day2",), "run day2 has started"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_the_trigger_fires_when_the_awaited_run_ends_starts_or_is_deleted(
    airflow_says: dict[str, Any], change: dict[str, Any], queued: tuple[str, ...], why: str
) -> None:
    if queued:
        airflow_says["states"] = {"day2": {"process": None, "checkpoint": None}}
    assert fires(trigger(queued=queued), lambda: airflow_says.update(change)).startswith(why)


def test_without_a_storage_url_the_trigger_polls_only_airflow(airflow_says: dict[str, Any], folder: Folder) -> None:
    made = trigger()
    made.url = None

    def commits() -> None:
        folder.run(day(2), "a2", run=run("day2", clear_number=1))
        time.sleep(0.1)
        airflow_says["states"] = {"day2": {"process": "success", "checkpoint": "success"}}

    assert fires(made, commits).startswith("run day2 has ended")


def test_the_storage_is_asked_often_and_airflow_rarely(
    folder: Folder, airflow_says: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    asked: list[str] = []
    states = lambda **_: asked.append("airflow") or airflow_says["states"]  # type: ignore[func-returns-value]  # noqa: E731
    monkeypatch.setattr(RuntimeTaskInstance, "get_task_states", staticmethod(states))
    monkeypatch.setattr(previous_checkpoint_trigger, "_AIRFLOW_EVERY_S", 60.0)
    made = trigger()
    committed = made.find_committed
    # At the first look, and ten times in what follows: however long the commit takes on a busy machine, Airflow is asked once.
    asked_at_commit: list[int] = []

    def commit_after_ten_looks(url: str) -> object:
        asked.append("storage")
        if asked.count("storage") == 10:
            folder.run(day(2), "a2", run=run("day2", clear_number=1))
            asked_at_commit.append(asked.count("airflow"))
        return committed(url)

    monkeypatch.setattr(made, "find_committed", commit_after_ten_looks)
    assert fires(made) == "checkpoint 2 is committed"
    assert asked_at_commit == [1] and asked.count("airflow") == 1


def test_an_interval_with_valid_output_but_dropped_state_goes_to_the_driver() -> None:
    """Its base is dropped too: it can stay as it is, and can't be computed."""
    dropping = Folder(policy=KeepLast(2))
    for n in range(1, 7):
        dropping.run(day(n), f"a{n}")
        dropping.coordinator.clean_up()
    log = dropping.coordinator.log()
    decision = plan_start(log, PIPELINE, day(3), Permissions(), [])
    assert isinstance(decision, Go) and decision.there
    assert isinstance(plan_start(log, PIPELINE, day(8), Permissions(), []), Refuse)
    # Its own state is retained, so it would be computed. `cairn heal` would run none of these intervals.
    refused = plan_start(log, PIPELINE, day(5), Permissions(), [])
    again = Rerun(first=day(1).start, last=day(5).start, though_valid=True)
    assert isinstance(refused, Refuse) and refused.rerun == again
    dropping.coordinator.quarantine(5, "wrong")
    refused = plan_start(dropping.coordinator.log(), PIPELINE, day(5), Permissions(), [])
    assert isinstance(refused, Refuse) and refused.rerun == Rerun(first=day(1).start, last=day(4).start)
    dropping.run(day(1), "changed")
    assert isinstance(plan_start(dropping.coordinator.log(), PIPELINE, day(3), Permissions(), []), Refuse)


@pytest.mark.usefixtures("airflow_says", "folder")
def test_the_trigger_fires_at_its_deadline_but_not_before_the_first_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fires(trigger(seconds=0.5)) == "the longest wait is over"
    monkeypatch.setattr(previous_checkpoint_trigger, "_FIRST_LOOK_S", 0.2)
    assert fires(trigger(seconds=0)) == "the longest wait is over"


@pytest.mark.usefixtures("airflow_says")
def test_storage_that_does_not_answer_is_asked_again(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.run(day(2), "a2", run=run("day2", clear_number=1))
    read, refused = type(folder.storage).read, []

    def read_later(self: Any, path: str) -> bytes:
        if path == paths.record(2) and len(refused) < 20:
            refused.append(path)
            raise StorageUnavailable("busy")
        return read(self, path)

    monkeypatch.setattr(type(folder.storage), "read", read_later)
    assert fires(trigger()) == "checkpoint 2 is committed"
    assert len(refused) == 20
