"""Stop a pipeline's DAG from outside Airflow.

Airflow starts no task of a paused DAG, not even a task of a running DAG run. So an interval whose `process` task has
ended waits for its `checkpoint` task until the DAG is unpaused. Therefore `stopped` and its caller

1. pause the DAG, so that no new task starts;
2. wait until two checks in a row find no active task, since the scheduler may just have chosen a task;
3. commit what was prepared and not committed, as the waiting `checkpoint` task would. This task later finds the commit
   and only calls the sink.

If a step fails, `stopped` unpauses the DAG again, except if the DAG was paused before. `cairn pause` only takes steps 1
and 2, and leaves the DAG paused.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from state_backend.checkpoint.commit_attempt import commit
from state_backend.checkpoint.location import Location
from state_backend.checkpoint.prepared_attempts import uncommitted_attempts
from state_backend.formats import paths
from state_backend.values.environment import Variable
from state_backend.values.errors import CairnError, StorageUnavailable
from state_backend.values.frozen import frozen
from state_backend.values.records import Prepared

log = logging.getLogger("cairn")

PROCESS, CHECKPOINT = "process", "checkpoint"
_UNDER_WAY = frozenset({"queued", "running", "restarting", "deferred"})
_ENDED = frozenset({"success", "failed", "upstream_failed", "skipped", "removed"})
_LOOKS_IN_A_ROW = 2


class DagControl(Protocol):
    """The part of Airflow that stopping a DAG needs."""

    def is_paused(self, dag_id: str) -> bool: ...

    def pause(self, dag_id: str, paused: bool) -> None: ...

    def running(self, dag_id: str) -> Mapping[str, Mapping[str, str | None]]:
        """Return the state of each task by run id and task id, for the runs of a DAG that have not ended."""

    def before_commit(self, dag_id: str) -> Sequence[str]:
        """Return the ids of the tasks that the task `checkpoint` waits for."""


@frozen
class StopPlan:
    """What a paused DAG still needs: tasks to wait for, and ids of the runs that the caller must commit."""

    under_way: tuple[str, ...]  # Tasks to wait for, as "run/task".
    uncommitted: tuple[str, ...]  # Ids of the runs to commit.


def plan_stop(running: Mapping[str, Mapping[str, str | None]], gate: Sequence[str] = ()) -> StopPlan:
    """Return which tasks of a paused DAG to wait for, and which runs the caller must commit itself.

    That is a run whose task `process` has succeeded and whose task `checkpoint` has not begun: Airflow does not start
    it while the DAG is paused. `running`: States by run id and task id. `gate`: More tasks that must have succeeded.
    """
    under_way = [f"{run}/{task}" for run, tasks in running.items() for task, at in tasks.items() if at in _UNDER_WAY]
    uncommitted = [
        run
        for run, tasks in running.items()
        if all(tasks.get(task) == "success" for task in (PROCESS, *gate))
        and tasks.get(CHECKPOINT) not in _ENDED | _UNDER_WAY
    ]
    return StopPlan(under_way=tuple(sorted(under_way)), uncommitted=tuple(sorted(uncommitted)))


@contextmanager
def stopped(airflow: DagControl, dag_id: str, **how: Any) -> Iterator[tuple[str, ...]]:
    """Pause a DAG, wait until no task is active, and yield the ids of the runs that the caller must commit.

    After the `with` block the DAG stays paused. If the block fails, a DAG that was not paused before is unpaused. If
    this fails too, a warning says so, and the block's error is raised. `how`: Arguments of `pause_dag`.
    """
    paused_before = airflow.is_paused(dag_id)
    try:
        left = "The DAG is still paused" if paused_before else "The DAG is unpaused again"
        yield pause_dag(airflow, dag_id, left, gate=airflow.before_commit(dag_id), **how)
    except BaseException:
        if not paused_before:
            try:
                airflow.pause(dag_id, False)
            except CairnError as error:
                log.warning("DAG %s is still paused; unpause it when Airflow answers: %s", dag_id, error)
        raise


def pause_dag(
    airflow: DagControl,
    dag_id: str,
    left: str,
    *,
    gate: Sequence[str] = (),
    timeout_s: float,
    say: Callable[[str], None] = lambda text: None,
    wait: Callable[[float], None] = time.sleep,
    monotonic: Callable[[], float] = time.monotonic,
) -> tuple[str, ...]:
    """Pause a DAG, wait until no task is active, and return the ids of the runs with an uncommitted result.

    `left`: Sentence of the error after `timeout_s` that says whether the DAG is paused. `gate`: Tasks without whose
    success a result is left out. `say`: Prints the active tasks.
    """
    airflow.pause(dag_id, True)
    deadline_s, quiet, said = monotonic() + timeout_s, 0, ""
    while True:
        plan = plan_stop(running := airflow.running(dag_id), gate)
        quiet = 0 if plan.under_way else quiet + 1
        if quiet == _LOOKS_IN_A_ROW:
            for run in {*plan_stop(running).uncommitted} - {*plan.uncommitted}:
                log.warning("run %s of DAG %s stays uncommitted: %s did not succeed", run, dag_id, " or ".join(gate))
            return plan.uncommitted
        active = ", ".join(plan.under_way)
        if active and monotonic() > deadline_s:
            raise StorageUnavailable(
                f"tasks of DAG {dag_id!r} are still active after {timeout_s:.0f} s: {active}\n{left}. Try again with a longer "
                f"time in {Variable.AIRFLOW_WAIT}"
            )
        if active not in ("", said):
            say(f"waiting for: {active}")
            said = active
        wait(1.0)


def commit_prepared(at: Location, runs: Sequence[str]) -> list[int]:
    """Commit the last attempt that each of the Airflow runs `runs` prepared, and return the checkpoint ids.

    An attempt that validation refused is skipped. An earlier attempt of the same run does not replace it, since the
    run's `checkpoint` task would fail too.
    """
    if not runs:
        return []
    committed = []
    for attempt in plan_commits(uncommitted_attempts(at), runs):
        if at.storage.stat(paths.refused(attempt)) is not None:
            log.warning("%s: attempt %s is not committed, since validation refused it", at.pipeline, attempt)
        else:
            committed.append(commit(at, attempt).id)
    return committed


def plan_commits(prepared: Sequence[Prepared], runs: Sequence[str]) -> tuple[str, ...]:
    """Return the attempts to commit: for each run, the uuid of the last attempt that it prepared."""
    by_run: dict[str, Prepared] = {}
    for attempt in sorted(prepared, key=_order):
        by_run[attempt.content.run.run_id] = attempt
    return tuple(by_run[run].content.attempt for run in runs if run in by_run)


def _order(prepared: Prepared) -> tuple[int, int, int]:
    return prepared.content.run.clear_number, prepared.content.run.try_number, prepared.h0
