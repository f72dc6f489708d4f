"""Stopping a DAG: what is waited for, what is committed in its place, and that a failure leaves it as it was."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from cairn.command.airflow_rest import AirflowRest
from cairn.command.stop_dag import StopPlan, commit_prepared, pause_dag, plan_stop, stopped
from state_backend.formats import paths
from state_backend.values.errors import CorruptRecord, StorageUnavailable
from tests.support.checkpoints import Folder, day, run

Runs = Mapping[str, Mapping[str, str | None]]
RUNNING: Runs = {"r": {"process": "running", "checkpoint": None}}
PROCESSED: Runs = {"r": {"process": "success", "checkpoint": None}}


class FakeDag:
    """Its runs are one of ``looks`` after the other; the last one stays."""

    def __init__(self, *looks: Runs, paused: bool = False) -> None:
        self.looks, self.paused, self.calls = list(looks), paused, 0

    def is_paused(self, dag_id: str) -> bool:
        return self.paused

    def pause(self, dag_id: str, paused: bool) -> None:
        self.paused = paused

    def before_commit(self, dag_id: str) -> tuple[str, ...]:
        return ("process", "validate") if dag_id == "gated" else ("process",)

    def running(self, dag_id: str) -> Runs:
        assert self.paused, "looked before it was paused"
        self.calls += 1
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]


@pytest.mark.parametrize(
    ("tasks", "under_way", "uncommitted"),
    [
        ({"process": "running", "checkpoint": None}, ["r/process"], []),
        ({"process": "queued", "checkpoint": None, "sweep": "restarting"}, ["r/process", "r/sweep"], []),
        ({"process": "up_for_retry", "checkpoint": None}, [], []),
        ({"process": "success", "checkpoint": "skipped"}, [], []),
        ({"process": "success", "checkpoint": None}, [], ["r"]),
        ({"process": "success", "checkpoint": "scheduled"}, [], ["r"]),
        ({"process": "success", "checkpoint": "up_for_retry"}, [], ["r"]),
        ({"process": "success", "checkpoint": "running"}, ["r/checkpoint"], []),
        ({"process": "success", "checkpoint": "success", "validate": "deferred"}, ["r/validate"], []),
        ({"process": "success", "checkpoint": "removed", "validate": None}, [], []),
        ({"process": "success", "checkpoint": "failed"}, [], []),
        ({"process": "success", "validate": "failed", "checkpoint": "upstream_failed"}, [], []),
    ],
)
def test_a_stop_plan_lists_active_tasks_and_processed_runs_without_a_commit(
    tasks: dict[str, str | None], under_way: list[str], uncommitted: list[str]
) -> None:
    assert plan_stop({"r": tasks}) == StopPlan(under_way=tuple(under_way), uncommitted=tuple(uncommitted))


def test_a_stop_waits_until_the_dag_was_idle_twice_and_keeps_it_paused() -> None:
    """The scheduler may have chosen a task just before the pause, so one quiet look is not enough."""
    dag, waits = FakeDag({}, RUNNING, RUNNING, PROCESSED), list[float]()
    with stopped(dag, "d", timeout_s=10, wait=waits.append) as runs:
        assert dag.paused
        assert (runs, dag.calls, waits) == (("r",), 5, [1.0] * 4)
    assert dag.paused


@pytest.mark.parametrize(("validate", "left"), [("success", ["r"]), ("scheduled", []), (None, [])])
def test_a_stop_leaves_out_a_result_that_the_gate_has_not_passed(
    validate: str | None, left: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    dag = FakeDag({"r": {"process": "success", "validate": validate, "checkpoint": None}})
    with stopped(dag, "gated", timeout_s=10, wait=lambda s: None) as runs:
        assert [*runs] == left and ("run r of DAG gated stays uncommitted" in caplog.text) == (not left)


@pytest.mark.parametrize("paused", [False, True])
def test_a_stop_that_times_out_names_the_task_and_restores_the_dags_pause_state(paused: bool) -> None:
    dag, now = FakeDag(RUNNING, paused=paused), iter(range(0, 1000, 5))
    with (
        pytest.raises(StorageUnavailable, match="still active after 10 s: r/process"),
        stopped(dag, "d", timeout_s=10, wait=lambda s: None, monotonic=lambda: float(next(now))),
    ):
        raise AssertionError("not reached")
    assert dag.paused == paused


def test_cairn_pause_reports_active_tasks_once_and_leaves_the_dag_paused() -> None:
    dag, said = FakeDag(RUNNING, RUNNING, PROCESSED), list[str]()
    assert pause_dag(dag, "d", "", timeout_s=10, say=said.append, wait=lambda s: None) == ("r",)
    assert (said, dag.paused) == (["waiting for: r/process"], True)
    dag, now = FakeDag(RUNNING), iter(range(0, 1000, 5))
    with pytest.raises(StorageUnavailable, match=r"still active after 10 s: r/process\nThe DAG is paused\."):
        pause_dag(dag, "d", "The DAG is paused", timeout_s=10, wait=lambda s: None, monotonic=lambda: float(next(now)))
    assert dag.paused


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_if_the_savepoint_fails_the_dag_is_as_before(paused: bool, error: type[BaseException]) -> None:
    dag = FakeDag({}, paused=paused)
    with pytest.raises(error), stopped(dag, "d", timeout_s=10, wait=lambda s: None):
        raise error
    assert dag.paused == paused


def test_if_airflow_does_not_unpause_the_dag_a_warning_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """The error of the savepoint is raised, not that of Airflow."""

    class Stubborn(FakeDag):
        def pause(self, dag_id: str, paused: bool) -> None:
            if not paused:
                raise StorageUnavailable("no Airflow answers")
            super().pause(dag_id, paused)

    with pytest.raises(OSError, match="disk full"), stopped(Stubborn({}), "d", timeout_s=10, wait=lambda s: None):
        raise OSError("disk full")
    assert "DAG d is still paused" in caplog.text and "no Airflow answers" in caplog.text


def test_the_last_try_of_a_run_is_committed_and_its_checkpoint_task_finds_it_done() -> None:
    """Two tries prepared day 2; another run's attempt and one that was committed before are left alone."""
    folder = Folder(days=1)
    folder.prepare(day(2), "the-first", run=run("r", try_number=1))  # Storage lists it behind the second try.
    folder.prepare(day(2), "second", run=run("r", try_number=2))
    folder.prepare(day(2), "other", run=run("q"))
    assert commit_prepared(folder.coordinator.at, ["r", "run-of-a1", "unknown"]) == [2]
    assert folder.coordinator.record(2).content.attempt == "second"
    assert folder.coordinator.commit("second").outcome == "already"
    assert commit_prepared(folder.coordinator.at, []) == []


def test_a_refused_attempt_is_not_committed_and_does_not_block_other_runs() -> None:
    """Of another run, of the one that is asked for, and its earlier try, which nobody meant to commit any more."""
    folder = Folder(days=1)
    folder.prepare(day(2), "tried", run=run("q", try_number=1))
    folder.prepare(day(2), "wrong", run=run("q", try_number=2))
    folder.coordinator.refuse("wrong", "validation refused it", ("two totals are negative",))
    folder.prepare(day(2), "right", run=run("r"))
    assert commit_prepared(folder.coordinator.at, ["q"]) == []
    assert commit_prepared(folder.coordinator.at, ["q", "r"]) == [2]
    assert folder.coordinator.record(2).content.attempt == "right"


def test_prepared_attempts_are_not_read_if_no_runs_are_given() -> None:
    folder = Folder()
    folder.storage.create(paths.prepared("damaged"), b"{")
    assert commit_prepared(folder.coordinator.at, []) == []
    folder.prepare(day(1), "a1", run=run("r"))
    with pytest.raises(CorruptRecord, match=r"attempts/damaged/prepared\.json"):
        commit_prepared(folder.coordinator.at, ["r"])
    assert folder.coordinator.log().head_id == 0


def test_running_tasks_are_read_from_all_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [f"scheduled__{n}+00:00" for n in range(3)]
    asked: list[str] = []

    def call(self: AirflowRest, method: str, path: str, body: object = None) -> object:
        asked.append(path)
        if path.endswith("/tasks"):
            return {"tasks": [{"task_id": "validate", "downstream_task_ids": ["checkpoint"]}]}
        at = int(path.partition("offset=")[2].partition("&")[0])
        if "taskInstances" in path:
            tasks = [{"task_id": "process", "state": "running"}, {"task_id": "checkpoint", "state": None}]
            return {"task_instances": tasks[at:], "total_entries": 2}
        assert "state=running" in path
        return {"dag_runs": [{"dag_run_id": run} for run in runs[at : at + 2]], "total_entries": 3}

    monkeypatch.setattr(AirflowRest, "call", call)
    found = AirflowRest("http://127.0.0.1:1").running("d")
    assert AirflowRest("http://127.0.0.1:1").before_commit("d") == ["validate"]
    assert found == {run: {"process": "running", "checkpoint": None} for run in runs}
    assert "/dagRuns/scheduled__0%2B00%3A00/taskInstances" in asked[2]


@pytest.mark.parametrize(
    "call", [lambda rest: rest.is_paused("d"), lambda rest: rest.pause("d", True), lambda rest: rest.running("d")]
)
def test_an_unreachable_airflow_is_reported_as_unavailable(call: Callable[[AirflowRest], object]) -> None:
    with pytest.raises(StorageUnavailable, match=r"no Airflow answers at http://127\.0\.0\.1:1"):
        call(AirflowRest("http://127.0.0.1:1", token="t"))
