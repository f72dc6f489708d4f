"""Stopping a pipeline's DAG from outside Airflow, by Airflow's own command line as a child.

A paused DAG starts no task, also none of a run that is under way: an interval whose ``process`` has ended would wait for its
``checkpoint`` until somebody unpauses it. So whoever stops a pipeline

1. pauses the DAG, so that nothing new begins;
2. waits until no task of a running run is under way, twice in a row, since the scheduler may just have chosen one;
3. commits what was prepared and not committed, as the waiting ``checkpoint`` would have; that one finds itself done later,
   and runs the sink hook.

If anything fails, the DAG is unpaused again, unless it was paused before.
"""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from state_backend.checkpoint.coordinator import Coordinator
from state_backend.values.errors import CairnError, StorageUnavailable, UsageError
from state_backend.values.records import Prepared

log = logging.getLogger("cairn")

PROCESS, CHECKPOINT = "process", "checkpoint"
_UNDER_WAY = frozenset({"queued", "running", "restarting", "deferred"})
_ENDED = frozenset({"success", "failed", "upstream_failed", "skipped", "removed"})
_LOOKS_IN_A_ROW = 2


class DagControl(Protocol):
    """What stopping needs of Airflow."""

    def is_paused(self, dag_id: str) -> bool:
        """Whether new tasks of the DAG are held back now."""

    def pause(self, dag_id: str, paused: bool) -> None:
        """Pauses the DAG, or lets it go on."""

    def running(self, dag_id: str) -> Mapping[str, Mapping[str, str | None]]:
        """Of each run that has not ended, the state of each task (None: not begun)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopPlan:
    """``under_way``: tasks to wait for, as ``run/task``. ``uncommitted``: runs whose interval is processed, and whose commit
    the pause holds back."""

    under_way: tuple[str, ...]
    uncommitted: tuple[str, ...]


def plan_stop(running: Mapping[str, Mapping[str, str | None]]) -> StopPlan:
    """What a paused DAG's runs still wait for."""
    under_way = [f"{run}/{task}" for run, tasks in running.items() for task, at in tasks.items() if at in _UNDER_WAY]
    uncommitted = [
        run
        for run, tasks in running.items()
        if tasks.get(PROCESS) == "success" and tasks.get(CHECKPOINT) not in _ENDED | _UNDER_WAY
    ]
    return StopPlan(under_way=tuple(sorted(under_way)), uncommitted=tuple(sorted(uncommitted)))


@contextmanager
def stopped(
    airflow: DagControl,
    dag_id: str,
    *,
    timeout_s: float,
    wait: Callable[[float], None] = time.sleep,
    monotonic: Callable[[], float] = time.monotonic,
) -> Iterator[tuple[str, ...]]:
    """The DAG paused and at rest; gives the runs to commit. It stays paused if the body succeeds.

    Raises: StorageUnavailable naming the tasks that still ran after ``timeout_s``; the DAG is as it was then.
    """
    paused_before = airflow.is_paused(dag_id)
    try:
        airflow.pause(dag_id, True)
        deadline_s, quiet = monotonic() + timeout_s, 0
        while True:
            plan = plan_stop(airflow.running(dag_id))
            quiet = 0 if plan.under_way else quiet + 1
            if quiet == _LOOKS_IN_A_ROW:
                break
            if plan.under_way and monotonic() > deadline_s:
                raise StorageUnavailable(
                    f"DAG {dag_id!r} is not at rest after {timeout_s:.0f} s: {', '.join(plan.under_way)}; it is "
                    f"{'left paused, as it was' if paused_before else 'unpaused again'}. Try again with a longer --timeout"
                )
            wait(1.0)
        yield plan.uncommitted
    except BaseException:
        if not paused_before:
            airflow.pause(dag_id, False)
        raise


def commit_prepared(coordinator: Coordinator, runs: Sequence[str]) -> list[int]:
    """Commits the last attempt that each of these Airflow runs prepared; the ids. A run whose last attempt validation refused has
    nothing to commit: its ``checkpoint`` task would fail too, and an earlier try of it is not what the run stands for.

    Raises: as ``Coordinator.commit``; CorruptRecord if an attempt that can't be read may be the last one of a run. Without runs
    nothing is read.
    """
    if not runs:
        return []
    last = plan_commits(coordinator.prepared(), runs)
    return [coordinator.commit(attempt).id for attempt in last if not _is_refused(coordinator, attempt)]


def plan_commits(prepared: Sequence[Prepared], runs: Sequence[str]) -> tuple[str, ...]:
    """The last attempt of each run that prepared any, in the order of the runs."""
    by_run: dict[str, Prepared] = {}
    for attempt in sorted(prepared, key=_order):
        by_run[attempt.content.run.run_id] = attempt
    return tuple(by_run[run].content.attempt for run in runs if run in by_run)


def _is_refused(coordinator: Coordinator, attempt: str) -> bool:
    refused = coordinator.is_refused(attempt)
    if refused:
        log.warning("%s: attempt %s is not committed, since validation refused it", coordinator.pipeline, attempt)
    return refused


def _order(prepared: Prepared) -> tuple[int, int, int]:
    return prepared.content.run.clear_number, prepared.content.run.try_number, prepared.h0


class AirflowCli:
    """Airflow's command line, which talks to its database: it needs the environment that the scheduler has, and neither a
    token nor the API server. A call takes some seconds."""

    def __init__(self, command: Sequence[str] | None = None, *, timeout_s: float = 120.0) -> None:
        self._command = list(command) if command is not None else [_airflow()]
        self._timeout_s = timeout_s

    def is_paused(self, dag_id: str) -> bool:
        """Raises: UsageError if there is no such DAG."""
        (details,) = self._rows("dags", "details", dag_id)
        return str(details["is_paused"]) == "True"

    def pause(self, dag_id: str, paused: bool) -> None:
        """Raises: UsageError if there is no such DAG; StorageUnavailable if the command fails."""
        self._run("dags", "pause" if paused else "unpause", dag_id, "--yes")

    def running(self, dag_id: str) -> dict[str, dict[str, str | None]]:
        """As `DagControl.running`. A command per run, so some seconds each."""
        runs = self._rows("dags", "list-runs", dag_id, "--state", "running")
        return {run["run_id"]: self._tasks(dag_id, run["run_id"]) for run in runs}

    def _tasks(self, dag_id: str, run_id: str) -> dict[str, str | None]:
        rows = self._rows("tasks", "states-for-dag-run", dag_id, run_id)
        return {row["task_id"]: row["state"] or None for row in rows}

    def _rows(self, *arguments: str) -> list[dict[str, Any]]:
        said = self._run(*arguments, "--output", "json")
        # Warnings of a plugin or the configuration may come before it on stdout.
        for line in reversed(said.splitlines()):
            if line.startswith("["):
                try:
                    rows: list[dict[str, Any]] = json.loads(line)
                except ValueError:
                    continue
                return rows
        raise StorageUnavailable(f"airflow {' '.join(arguments)} answered no JSON, try again: {said.strip()[-500:]!r}")

    def _run(self, *arguments: str) -> str:
        what = f"airflow {' '.join(arguments)}"
        try:
            done = subprocess.run(
                [*self._command, *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=self._timeout_s,
                check=False,
            )
        except OSError as error:
            raise UsageError(f"can't run {self._command[0]!r}: {error}; --stop needs Airflow's command line") from error
        except subprocess.TimeoutExpired as error:
            raise StorageUnavailable(
                f"{what} did not end within {self._timeout_s:.0f} s; try again, or look whether Airflow answers"
            ) from error
        if done.returncode:
            raise self._refused(what, done.stdout, done.stderr)
        return done.stdout

    def _refused(self, what: str, *said: str) -> CairnError:
        text = " ".join(said).strip()
        lines = text.splitlines() or [""]
        if "does not exist" in text:
            return UsageError(f"{what}: {lines[-1]}; --dag names the pipeline's DAG, AIRFLOW_HOME the Airflow")
        return StorageUnavailable(f"{what} failed: {lines[-1]}; is AIRFLOW_HOME that of the Airflow that runs?")


def _airflow() -> str:
    beside = Path(sys.executable).with_name("airflow")
    return str(beside) if beside.exists() else shutil.which("airflow") or "airflow"
