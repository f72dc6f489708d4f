"""Compute what the overview of a pipeline tells about its runs: since when it is broken, its lag, who waits, why a try failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import cast

from cairn_ui.airflow_values import TaskTry
from cairn_ui.broken_since import Broken, Unusable, Why
from cairn_ui.run_bars import Bars
from cairn_ui.waiting_dags import WaitingDag
from state_backend.checkpoint.log import Log
from state_backend.formats import paths
from state_backend.inspection.describe import newest_of_interval, state_of
from state_backend.values.airflow_runs import DagRun
from state_backend.values.intervals import Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedTry:
    """A try that failed."""

    run_id: str
    of: TaskTry
    # Why it failed, in one line; None if neither its log nor the database has a reason.
    reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRuns:
    """What the overview of a pipeline tells about its runs."""

    # The intervals at the end without a usable checkpoint; None if the pipeline is not broken.
    broken: Broken | None
    # Time since when the pipeline is broken; None if it is not broken, or if the time is not known.
    since: datetime | None
    # End of the last interval with a usable checkpoint; None without one.
    until: datetime | None
    # Time from `until` to now; None without a usable checkpoint.
    lag: timedelta | None
    bars: Bars
    waiting: tuple[WaitingDag, ...]
    asset: str
    failed: tuple[FailedTry, ...]
    # The command that runs the intervals in trouble again; None if the pipeline is not broken or has no DAG.
    command: str | None


def unusable_checkpoints(log: Log) -> list[Unusable]:
    """Return the retained checkpoints from which no interval may start.

    Call `load_states` first. Without it, the function sends its requests one after the other.
    """
    found = []
    for record in log.completed():
        word = state_of(log, record).partition(" ")[0]
        if word != "completed":
            by = {
                "stale": log.retained[record.id].stale_by,
                "replaced": newest_of_interval(log, record),
                "descends": log.quarantine_above(record.id),
            }.get(word)
            found.append(Unusable(id=record.id, interval=record.content.interval, why=cast(Why, word), by=by))
    return found


def newest_words(log: Log, unusable: Sequence[Unusable]) -> dict[Interval, str]:
    """Return the state of each interval's newest retained checkpoint, for the intervals where that one can't be used."""
    newest: dict[Interval, int] = {}
    for record in log.completed():
        newest[record.content.interval] = max(record.id, newest.get(record.content.interval, 0))
    return {one.interval: one.why for one in unusable if newest[one.interval] == one.id}


def mark_of(unusable: Unusable) -> str:
    """Return the path of the file whose time tells since when a checkpoint can't be used.

    It is the mark of the quarantine, or the record of the commit that made the checkpoint stale or replaced it.
    """
    if unusable.why in ("quarantined", "descends"):
        return paths.quarantine(unusable.by or unusable.id)
    return paths.record(unusable.by or unusable.id)


def run_to_explain(broken: Broken | None, runs: Sequence[DagRun]) -> str | None:
    """Return the run whose failed tries the overview explains; None if no run needs it."""
    if broken is not None and broken.first.run_id is not None:
        return broken.first.run_id
    return runs[-1].run_id if runs and (runs[-1].unfinished or runs[-1].state == "failed") else None


def tries_to_explain(tries: Sequence[TaskTry], most: int = 4) -> list[TaskTry]:
    """Return the failed tries of a run in the order of their ends. Of many tries, the first one and the last ones remain."""
    failed = sorted((t for t in tries if t.failed and t.ended is not None), key=lambda t: (t.ended, t.task_id))
    return failed if len(failed) <= most else [failed[0], *failed[len(failed) - most + 1 :]]
