"""The decisions of the Checkpoints pages about unusable checkpoints, about the tries that the overview explains, and about next steps."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from cairn_ui import next_steps
from cairn_ui.health_facts import mark_of, newest_results, run_to_explain, tries_to_explain, unusable_checkpoints
from cairn_ui.interval_strip import Result
from cairn_ui.pipelines_of_dags import PipelineRef
from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.checkpoint.log import read_log
from state_backend.formats import paths
from state_backend.inspection.pipeline_health import Broken, Trouble
from state_backend.values.airflow_runs import DagRun, DagSchedule, FailingTask, TaskTry
from tests.support.checkpoints import day
from tests.support.shown_pipelines import eventful

RIDES = PipelineRef(name="rides", root="file:///state", dag_id="rides", code="m:RIDES")


@pytest.mark.long("half a second", runs_in="ci")
def test_unusable_checkpoints_name_the_commit_that_made_them_unusable() -> None:
    storage = MemoryStorage("memory://ui/rides")
    eventful(storage)
    log = read_log(storage)
    found = unusable_checkpoints(log)
    assert {one.checkpoint: (one.why, one.by) for one in found} == {
        4: ("replaced", 7),
        5: ("replaced", 8),
        6: ("replaced", 9),
        11: ("replaced", 13),
        12: ("stale", 13),
        14: ("quarantined", None),
    }
    assert {one.checkpoint: mark_of(one) for one in found if one.checkpoint in (12, 14)} == {
        12: paths.record(13),
        14: paths.quarantine(14),
    }
    assert storage.stat(paths.quarantine(14)) is not None
    # Of each interval, the newest checkpoint counts: days 4 to 8 have a newer, usable one.
    results = newest_results(log, found)
    assert {i: one for i, one in results.items() if one.trouble} == {day(9): Result(14, "quarantined")}
    assert results[day(4)] == Result(7, "") and len(results) == 9


def of(state: str, run_id: str = "r") -> DagRun:
    return DagRun(run_id=run_id, state=state, start=day(1).start, end=day(1).end, due=day(1).end)


FAILED = Broken(first=Trouble(interval=day(1), why="failed", run_id="first"), last=day(1), counts=(("failed", 1),))
MISSING = Broken(first=Trouble(interval=day(1), why="missing"), last=day(1), counts=(("missing", 1),))


FAILING = FailingTask(dag_id="d", run_id="old", interval=day(1), task_id="process", try_number=1, tries=3, ended=None)


@pytest.mark.parametrize(
    ("broken", "failing", "runs", "explains"),
    [
        (None, [], [], None),
        (None, [], [of("failed", "old"), of("success")], None),
        (None, [], [of("success", "old"), of("failed")], "r"),
        (None, [], [of("running")], "r"),
        (None, [FAILING], [of("running")], "old"),  # in a backfill, a newer run waits
        (FAILED, [FAILING], [of("running")], "first"),
        (MISSING, [], [of("success")], None),
        (MISSING, [], [of("failed")], "r"),
    ],
)
def test_the_overview_explains_a_broken_run_before_a_failing_run_before_the_newest_run(
    broken: Broken | None, failing: list[FailingTask], runs: list[DagRun], explains: str | None
) -> None:
    assert run_to_explain(broken, failing, runs) == explains


def test_of_many_failed_tries_the_first_and_the_last_are_explained() -> None:
    def one(number: int, state: str) -> TaskTry:
        at = day(1).start + timedelta(hours=number)
        return TaskTry(task_id="process", try_number=number, state=state, began=at, ended=at)

    tries = [one(n, "failed") for n in range(1, 8)]
    mixed = [tries[2], one(8, "success"), tries[0], one(9, "up_for_retry"), one(10, "upstream_failed")]
    assert [t.try_number for t in tries_to_explain(mixed)] == [1, 3, 9]
    assert [t.try_number for t in tries_to_explain(tries)] == [1, 5, 6, 7]


def plan(**changes: Any) -> DagSchedule:
    return DagSchedule(**({"paused": False, "asked_end": None, "next_due": None, "running": 0} | changes))


@pytest.mark.parametrize(
    ("dag_id", "schedule", "said", "command"),
    [
        ("rides", None, "Look at the runs of DAG rides", "cairn status --root file:///state --pipeline rides"),
        ("rides", plan(paused=True), "is paused: unpause it", "cairn status --root file:///state --pipeline rides"),
        ("rides", plan(running=1, paused=True), "is in progress", "cairn status --root file:///state --pipeline rides"),
        ("a b", None, "DAG a b", "cairn status --root file:///state --pipeline rides --dag 'a b'"),
        (None, None, "advice", "cairn status --root file:///state --pipeline rides"),
    ],
)
def test_a_pipeline_without_checkpoint_gets_a_next_step_that_fits_its_dag(
    dag_id: str | None, schedule: DagSchedule | None, said: str, command: str
) -> None:
    step = next_steps.without_checkpoint(PipelineRef(name="rides", root="file:///state", dag_id=dag_id), schedule)
    assert said in step.text and step.command == command
    assert (step.link is None) == (dag_id is None) and (dag_id != "a b" or step.href == "/dags/a%20b")


@pytest.mark.parametrize(
    ("status", "heading", "link"),
    [
        (401, "You are not logged in", "Open Airflow"),
        (403, "You may not see this", "All pipelines"),
        (404, "Not found", "All pipelines"),
        (422, "The address of this page has a wrong value", "All pipelines"),
        (405, "The page failed", "All pipelines"),
        (500, "The page failed", "All pipelines"),
    ],
)
def test_each_http_error_gets_a_heading_and_a_link_to_another_page(status: int, heading: str, link: str) -> None:
    refusal = next_steps.after_error(status)
    assert (refusal.heading, refusal.step.link, refusal.step.airflow) == (heading, link, status == 401)
    of_pipeline = next_steps.after_error(status, RIDES)
    assert of_pipeline == refusal or (status, of_pipeline.step.link) == (404, "History of rides")


def test_every_empty_page_has_a_command_or_a_link() -> None:
    interval = day(9)
    steps = [
        next_steps.without_pipeline(None),
        next_steps.without_pipeline("rides"),
        next_steps.without_trial(RIDES, interval),
        next_steps.without_trial(RIDES, None),
        next_steps.without_docs(),
    ]
    assert all(step.text and (step.command or step.link) for step in steps)
    assert "--from 2024-01-09T00:00:00Z --to 2024-01-09T00:00:00Z" in str(steps[2].command)
    assert next_steps.after_failed_read(PipelineRef(name="a", root="{{ x }}")) is None
    step = next_steps.after_failed_read(RIDES)
    assert step is not None and step.command == "cairn status --root file:///state --pipeline rides"
