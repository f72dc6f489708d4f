"""Find what the health of a pipeline depends on, how far it lags behind, and which failed tries explain it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import cast

from cairn_ui.interval_strip import Result
from state_backend.checkpoint.log import Log
from state_backend.formats import paths
from state_backend.inspection.describe import state_of
from state_backend.inspection.pipeline_health import Broken, Trouble, Why
from state_backend.values.airflow_runs import DagRun, DagSchedule, FailingTask, TaskTry
from state_backend.values.intervals import Interval


def lag_of(
    processed_until: datetime | None, newest_end: datetime | None, schedule: DagSchedule | None, now: datetime
) -> timedelta | None:
    """Return how long ago the last usable interval ended (`processed_until`); None if no interval is usable.

    After the last run of a finite schedule, the lag no longer grows: it is measured up to the end of the last interval
    that has a run or a checkpoint (`newest_end`), instead of up to `now`.
    """
    if processed_until is None:
        return None
    until = now
    if schedule is not None and schedule.next_due is None and not schedule.running:
        until = max(end for end in (processed_until, newest_end, schedule.asked_end) if end is not None)
    return max(timedelta(), until - processed_until)


def unusable_checkpoints(log: Log) -> list[Trouble]:
    """Return the retained checkpoints from which no interval may start.

    Call `load_states` first, which sends the requests in parallel. Otherwise this function sends one after the other.
    """
    found = []
    for record in log.completed():
        # The state is a text such as `stale by 13` or `quarantined`. Here `by` finds the checkpoint id in it, if any.
        if (state := state_of(log, record)) != "completed":
            why, by = cast(Why, state.partition(" ")[0]), re.search(r"\d+", state)
            made_by = int(by[0]) if by else None
            found.append(Trouble(interval=record.content.interval, why=why, checkpoint=record.id, by=made_by))
    return found


def newest_results(log: Log, unusable: Sequence[Trouble]) -> dict[Interval, Result]:
    """Return for each interval its newest retained checkpoint, and its trouble if `unusable` has the checkpoint."""
    newest: dict[Interval, int] = {}
    for record in log.completed():
        newest[record.content.interval] = max(record.id, newest.get(record.content.interval, 0))
    why = {one.checkpoint: one.why for one in unusable}
    return {interval: Result(n, why.get(n, "")) for interval, n in newest.items()}


def mark_of(unusable: Trouble) -> str:
    """Return the path of the file whose time tells since when a checkpoint can't be used.

    It is the mark of the quarantine, or the record of the commit that made the checkpoint stale or replaced it.
    """
    if unusable.why in ("quarantined", "descends"):
        return paths.quarantine(unusable.by or unusable.checkpoint)
    return paths.record(unusable.by or unusable.checkpoint)


def run_to_explain(broken: Broken | None, failing: Sequence[FailingTask], last: Sequence[DagRun]) -> str | None:
    """Return the id of the run whose failed tries the overview explains; None if no run needs an explanation.

    `last`: The newest runs. The explained run may be older: in a backfill, newer runs wait for a failing run.
    """
    if broken is not None and broken.first.run_id is not None:
        return broken.first.run_id
    if failing:
        return failing[0].run_id
    return last[-1].run_id if last and (last[-1].unfinished or last[-1].state == "failed") else None


def tries_to_explain(tries: Sequence[TaskTry], most: int = 4) -> list[TaskTry]:
    """Return the failed tries by the times of their ends. Of more than `most`, return the first and the last ones."""
    failed = sorted((t for t in tries if t.failed and t.ended is not None), key=lambda t: (t.ended, t.task_id))
    return failed if len(failed) <= most else [failed[0], *failed[len(failed) - most + 1 :]]
