"""Decide since when a pipeline is broken, how far it lags behind, and which failed tries explain it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Literal, cast

from state_backend.checkpoint.log import Log
from state_backend.formats import paths
from state_backend.inspection.describe import state_of
from state_backend.values.airflow_runs import DagRun, DagSchedule, TaskTry
from state_backend.values.frozen import frozen
from state_backend.values.intervals import Interval

# Airflow gets this time to run an interval that is due. After that, an interval without a checkpoint counts as missing.
GRACE = timedelta(minutes=10)
Why = Literal["failed", "quarantined", "stale", "descends", "replaced", "missing"]


@frozen
class Trouble:
    interval: Interval
    why: Why
    # Time at which the run failed, or at which a missing run was due. None for an unusable checkpoint: only the storage
    # knows the time of that commit or quarantine.
    since: datetime | None = None
    # The run that failed; None otherwise.
    run_id: str | None = None
    # Id of the retained checkpoint from which no interval may start; 0 if the interval has none.
    checkpoint: int = 0
    # Id of the commit that made the checkpoint stale or replaced it, or of its quarantined ancestor; None for a
    # quarantined checkpoint.
    by: int | None = None


@frozen
class Broken:
    """The intervals at the end of a pipeline that have no usable checkpoint."""

    first: Trouble
    last: Interval
    counts: tuple[tuple[str, int], ...]


def broken_since(
    unusable: Sequence[Trouble],
    runs: Sequence[DagRun],
    expected: Interval | None,
    schedule: DagSchedule | None,
    now: datetime,
) -> Broken | None:
    """Return since when a pipeline is broken; None if no interval after the last usable checkpoint is in trouble.

    An interval that is in progress for the first time is not in trouble.
    """
    newest = {one.interval: one for one in sorted(unusable, key=lambda one: one.checkpoint)}
    of_interval: dict[Interval, list[DagRun]] = {}
    for run in runs:
        if run.interval is not None:
            of_interval.setdefault(run.interval, []).append(run)
    known = sorted({*newest, *of_interval})
    found = [one for i in known if (one := newest.get(i) or _find_failed(i, of_interval[i])) is not None]
    if expected is not None and not any(i.start <= expected.start for i in known):
        due = min(_asked_until(schedule, now), now - GRACE)
        if expected.end <= due:
            found.insert(0, Trouble(interval=expected, why="missing", since=expected.end))
    if not found:
        return None
    counts = Counter(sorted(trouble.why for trouble in found))
    return Broken(first=found[0], last=found[-1].interval, counts=tuple(counts.most_common()))


def _find_failed(interval: Interval, runs: Sequence[DagRun]) -> Trouble | None:
    failed = [run for run in runs if run.state == "failed"]
    if not failed or any(run.unfinished for run in runs):
        return None
    first = min(failed, key=lambda run: (run.ended is None, run.ended or run.due or interval.end))
    return Trouble(interval=interval, why="failed", since=first.ended, run_id=first.run_id)


def _asked_until(schedule: DagSchedule | None, now: datetime) -> datetime:
    """Return the time up to which Airflow has asked, or should have asked, for intervals."""
    never = datetime.min.replace(tzinfo=now.tzinfo)
    if schedule is None:
        return never
    if schedule.next_due is not None and schedule.next_due <= now and not schedule.paused:
        return now
    return schedule.asked_end or never


def lag_of(
    processed_until: datetime | None, newest_end: datetime | None, schedule: DagSchedule | None, now: datetime
) -> timedelta | None:
    """Return how far a pipeline lags behind: from the end of its last usable interval until now.

    After the last run of a schedule, the lag ends at the end of the last interval that has a run or a checkpoint.
    """
    if processed_until is None:
        return None
    until = now
    if schedule is not None and schedule.next_due is None and not schedule.running:
        until = max(end for end in (processed_until, newest_end, schedule.asked_end) if end is not None)
    return max(timedelta(), until - processed_until)


def unusable_checkpoints(log: Log) -> list[Trouble]:
    """Return the retained checkpoints from which no interval may start.

    Call `load_states` first. Without it, the function sends its requests one after the other.
    """
    found = []
    for record in log.completed():
        # Such as `stale by 13`, or `quarantined`.
        if (state := state_of(log, record)) != "completed":
            why, by = cast(Why, state.partition(" ")[0]), re.search(r"\d+", state)
            made_by = int(by[0]) if by else None
            found.append(Trouble(interval=record.content.interval, why=why, checkpoint=record.id, by=made_by))
    return found


def newest_words(log: Log, unusable: Sequence[Trouble]) -> dict[Interval, str]:
    """Return the state of each interval's newest retained checkpoint, for the intervals where that one can't be
    used."""
    newest: dict[Interval, int] = {}
    for record in log.completed():
        newest[record.content.interval] = max(record.id, newest.get(record.content.interval, 0))
    return {one.interval: one.why for one in unusable if newest[one.interval] == one.checkpoint}


def mark_of(unusable: Trouble) -> str:
    """Return the path of the file whose time tells since when a checkpoint can't be used.

    It is the mark of the quarantine, or the record of the commit that made the checkpoint stale or replaced it.
    """
    if unusable.why in ("quarantined", "descends"):
        return paths.quarantine(unusable.by or unusable.checkpoint)
    return paths.record(unusable.by or unusable.checkpoint)


def run_to_explain(broken: Broken | None, runs: Sequence[DagRun]) -> str | None:
    """Return the run whose failed tries the overview explains; None if no run needs it."""
    if broken is not None and broken.first.run_id is not None:
        return broken.first.run_id
    return runs[-1].run_id if runs and (runs[-1].unfinished or runs[-1].state == "failed") else None


def tries_to_explain(tries: Sequence[TaskTry], most: int = 4) -> list[TaskTry]:
    """Return the failed tries of a run in the order of their ends. Of many tries, the first one and the last ones
    remain."""
    failed = sorted((t for t in tries if t.failed and t.ended is not None), key=lambda t: (t.ended, t.task_id))
    return failed if len(failed) <= most else [failed[0], *failed[len(failed) - most + 1 :]]
