"""The checkpoints that a run of a DAG restored and committed, as a tab of the run and of each of its task instances."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, NamedTuple

from fastapi import HTTPException, Request
from fastapi.responses import Response

from cairn_ui import database_runs, next_steps, shown_page
from cairn_ui.access import Asks, Rights
from cairn_ui.health_facts import tries_to_explain
from cairn_ui.log_pages import ids_of_run
from cairn_ui.pipelines_of_dags import PipelineRef
from cairn_ui.read_logs import Look, NotAnswered
from cairn_ui.run_timeline import timeline_of
from cairn_ui.shown_page import router
from state_backend.checkpoint.choose_base import plan_base
from state_backend.checkpoint.log import Log
from state_backend.inspection.describe import describe_entry
from state_backend.values.airflow_runs import DagRun, TaskTry
from state_backend.values.errors import CairnError
from state_backend.values.intervals import Interval
from state_backend.values.records import Permissions

# Longest wait of a page for the logs of tasks, in seconds. The read continues, so the page has the logs when reloaded.
_LOGS_WAIT_S = 2.0


@router.get("/run/{dag_id}/{run_id:path}")
def of_run(request: Request, rights: Asks, dag_id: str, run_id: str) -> Response:
    return _run(request, rights, dag_id, run_id, None)


@router.get("/task/{dag_id}/{task_id}/{run_id:path}")
def of_task(request: Request, rights: Asks, dag_id: str, task_id: str, run_id: str) -> Response:
    return _run(request, rights, dag_id, run_id, task_id)


def _run(request: Request, rights: Rights, dag_id: str, run_id: str, task_id: str | None) -> Response:
    if not rights.may_read_dag(dag_id):
        raise HTTPException(403, "You may not read this DAG")
    run = database_runs.run_of(dag_id, run_id)
    if run is None:
        raise HTTPException(404, "Airflow has no such run of this DAG")
    refs = rights.readable(ref for ref in shown_page.dags.pipelines() if ref.is_of(dag_id))
    looks = shown_page.reader.look_at_all(refs)
    now, tries = datetime.now(UTC), database_runs.tries_of(dag_id, run_id)
    own = next((ref for ref in refs if ref.dag_id == dag_id), None)
    return shown_page.page_of(
        request,
        "run.html",
        dag_id=dag_id,
        run=run,
        task_id=task_id,
        timeline=timeline_of(run, tries, now),
        waiting=[one for one in tries if one.waits is not None],
        failed=() if own is None else failed_tries(own, run_id, rights, tries),
        parts=[_part(ref, looks[ref.key], run, ref.dag_id == dag_id) for ref in refs],
        next=next_steps.without_pipeline(dag_id),
        running=run.unfinished,
    )


def _part(ref: PipelineRef, look: Look, run: DagRun, commits_here: bool) -> dict[str, Any]:
    interval, reading, ask = run.interval, look.reading, shown_page.reader.ask
    commits: list[dict[str, Any]] = []
    would, problem = None, look.problem
    if reading is not None:
        log = reading.log
        try:
            commits = ask(ref, f"run {run.run_id}", lambda _: _commits_of(log, run.run_id, interval))
            if not commits and interval is not None and commits_here:
                would = ask(ref, f"base {run.run_id}", lambda _: _would(log, ref.name, interval))
        except (CairnError, NotAnswered) as error:
            problem = str(error)
    step = next_steps.after_failed_read(ref)
    return {"ref": ref, "problem": problem, "commits": commits, "would": would, "next": step}


def _commits_of(log: Log, run_id: str, interval: Interval | None) -> list[dict[str, Any]]:
    rows = [describe_entry(log, n) for n in reversed(ids_of_run(log, run_id, interval))]
    return [row | {"restored": row["base"] and describe_entry(log, row["base"])} for row in rows]


def _would(log: Log, name: str, interval: Interval) -> dict[str, Any]:
    done = log.completed()
    if not done:
        return {"base": None, "problem": None}
    try:
        base = plan_base(log, name, interval, Permissions(), done[-1].content.pipeline_start_ms)
    except CairnError as error:
        return {"base": None, "problem": str(error)}
    return {"base": base.id if base is not None else None, "problem": None}


class FailedTry(NamedTuple):
    run_id: str
    of: TaskTry
    # Why the try failed, in one line; None if no reason was found, or if the user may not read logs.
    reason: str | None


def failed_tries(
    ref: PipelineRef, run_id: str, rights: Rights, tries: Sequence[TaskTry] | None = None
) -> list[FailedTry]:
    """Return the failed tries of a run, or of `tries` if given, each with its reason if the user may read logs.

    A reason is missing if the log can't be read within two seconds. A later call may have it.
    """
    dag_id = ref.dag_id or ""
    failed = tries_to_explain(database_runs.tries_of(dag_id, run_id) if tries is None else tries)
    found: dict[TaskTry, str | None] = {}
    if failed and rights.may_read_logs(dag_id):
        with suppress(NotAnswered):
            found = shown_page.reader.ask(
                ref,
                f"reasons {run_id}",
                lambda _: {one: shown_page.reasons.reason(dag_id, run_id, one) for one in failed},
                _LOGS_WAIT_S,
            )
    return [FailedTry(run_id, one, found.get(one)) for one in failed]
