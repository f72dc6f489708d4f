"""Decide since when a pipeline is broken, and how far it lags behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from cairn_ui.airflow_values import Schedule
from state_backend.values.airflow_runs import DagRun
from state_backend.values.intervals import Interval

# Airflow gets this time to run an interval that is due. After that, an interval without a checkpoint counts as missing.
GRACE = timedelta(minutes=10)
Why = Literal["failed", "quarantined", "stale", "descends", "replaced", "missing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unusable:
    """A retained checkpoint from which no interval may start."""

    id: int
    interval: Interval
    why: Why
    # Id of the commit that made it stale or replaced it, or of its quarantined ancestor; None for a quarantined
    # checkpoint.
    by: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """An interval that has no usable checkpoint, although it should."""

    interval: Interval
    why: Why
    # Time at which the run failed, or at which a missing run was due. None for an unusable checkpoint: only the storage
    # knows the time of that commit or quarantine.
    since: datetime | None = None
    # The run that failed; None otherwise.
    run_id: str | None = None
    # The unusable checkpoint; None otherwise.
    checkpoint: Unusable | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """The intervals at the end of a pipeline that have no usable checkpoint."""

    first: Trouble
    last: Interval
    counts: tuple[tuple[str, int], ...]


def broken_since(
    unusable: Sequence[Unusable],
    runs: Sequence[DagRun],
    expected: Interval | None,
    schedule: Schedule | None,
    now: datetime,
) -> Broken | None:
    """Return since when a pipeline is broken; None if no interval after the last usable checkpoint is in trouble.

    An interval that is in progress for the first time is not in trouble.
    """
    newest: dict[Interval, Unusable] = {}
    for one in sorted(unusable, key=lambda u: u.id):
        newest[one.interval] = one
    of_interval: dict[Interval, list[DagRun]] = {}
    for run in runs:
        if run.interval is not None:
            of_interval.setdefault(run.interval, []).append(run)
    known = sorted({*newest, *of_interval})
    found = [trouble for i in known if (trouble := _trouble(i, newest.get(i), of_interval.get(i, ()))) is not None]
    if expected is not None and not any(i.start <= expected.start for i in known):
        due = min(_asked_until(schedule, now), now - GRACE)
        if expected.end <= due:
            found.insert(0, Trouble(interval=expected, why="missing", since=expected.end))
    if not found:
        return None
    counts = Counter(trouble.why for trouble in found)
    return Broken(
        first=found[0],
        last=found[-1].interval,
        counts=tuple(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))),
    )


def _trouble(interval: Interval, unusable: Unusable | None, runs: Sequence[DagRun]) -> Trouble | None:
    failed = [run for run in runs if run.state == "failed"]
    if unusable is not None:
        return Trouble(interval=interval, why=unusable.why, checkpoint=unusable)
    if failed and not any(run.unfinished for run in runs):
        first = min(failed, key=lambda run: (run.ended is None, run.ended or run.due or interval.end))
        return Trouble(interval=interval, why="failed", since=first.ended, run_id=first.run_id)
    return None


def _asked_until(schedule: Schedule | None, now: datetime) -> datetime:
    """Return the time up to which Airflow has asked, or should have asked, for intervals."""
    never = datetime.min.replace(tzinfo=now.tzinfo)
    if schedule is None:
        return never
    if schedule.next_due is not None and schedule.next_due <= now and not schedule.paused:
        return now
    return schedule.asked_end or never


def lag_of(
    processed_until: datetime | None, newest_end: datetime | None, schedule: Schedule | None, now: datetime
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
