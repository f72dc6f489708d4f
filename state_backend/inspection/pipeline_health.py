"""Decide how healthy a pipeline is: one rule for the pages, the list of pipelines and the terminal. Pure functions.

The rule uses the facts that its caller has. The terminal does not ask Airflow, so its facts have no runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from itertools import takewhile
from typing import Literal, NamedTuple

from state_backend.checkpoint.log import Log
from state_backend.inspection.pipeline_status import Status, following_interval
from state_backend.values.airflow_runs import DagRun, DagSchedule, FailingTask
from state_backend.values.frozen import frozen
from state_backend.values.human_units import plural, span
from state_backend.values.intervals import Interval

# Airflow gets this time to run an interval that is due. After that, an interval without a checkpoint counts as missing.
GRACE = timedelta(minutes=10)
Why = Literal["failed", "quarantined", "stale", "descends", "replaced", "missing"]
BLOCKED = "next interval can't start"
Tone = Literal["good", "info", "warn", "bad"]
# The first finding is the pipeline's health. A mere note (`info`) comes after `good`, so it is not first.
_ORDER: tuple[Tone, ...] = ("bad", "warn", "good", "info")
_MOST_DUE = 2_000  # due intervals that are listed


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
    counts: tuple[tuple[str, int], ...]  # (kind of trouble, number of intervals), the most frequent first


class Finding(NamedTuple):
    tone: Tone
    text: str
    # Explanation, shown beside the label; empty for none.
    title: str = ""


@frozen
class Facts:
    """What is known about a pipeline."""

    now: datetime
    # Why the log can't be read now; None if it could be read.
    unreadable: str | None = None
    # The status by the newest reading of the log; None if the log was never read.
    status: Status | None = None
    begun: bool = True  # The log has a record.
    # The end of the newest usable state; None without one.
    until: datetime | None = None
    # The intervals after `until` that are due (`due_intervals`).
    due: Sequence[Interval] = ()
    # The checkpoints of intervals after `until` from which no interval may start.
    unusable: Sequence[Trouble] = ()
    # (number of valid checkpoints since the newest validated state, id of that state); None without a valid one.
    unvalidated: tuple[int, int | None] | None = None
    # The schedule of the DAG, its last runs and its first ones after `until`, and the failing tasks of its unfinished
    # runs. None and empty for a pipeline without a DAG, or if Airflow was not asked.
    schedule: DagSchedule | None = None
    runs: Sequence[DagRun] = ()
    failing: Sequence[FailingTask] = ()


def asked_until(schedule: DagSchedule | None, now: datetime) -> datetime | None:
    """Return the time up to which Airflow has asked, or should have asked, for intervals; None if it never did."""
    if schedule is None:
        return None
    if schedule.next_due is not None and schedule.next_due <= now:
        return now
    return schedule.asked_end


def due_intervals(log: Log, last: Interval | None, schedule: DagSchedule | None, now: datetime) -> list[Interval]:
    """Return the intervals after `last` that are due: for which Airflow has asked, or should have asked."""
    found: list[Interval] = []
    until = asked_until(schedule, now)
    if last is None or until is None:
        return found
    following = following_interval(log, last)
    while following.end <= min(until, now - GRACE) and len(found) < _MOST_DUE:
        found.append(following)
        following = following_interval(log, following)
    return found


def findings(facts: Facts) -> tuple[Finding, ...]:
    """Return the findings about a pipeline, the most severe first. The first finding is the pipeline's health.

    Without a problem, the first finding has the tone `good`. It has another tone while an interval that was due has no
    usable checkpoint, a task has failed, or the pipeline's log can't be read.
    """
    found = [*_findings(facts)]
    well = {one.tone for one in found} <= {"info"} and not _behind(facts)
    if well and not facts.begun:
        found.insert(0, Finding("info", "no checkpoint yet"))
    elif well:
        on_time = Finding("good", "on time", "Each interval that was due has a checkpoint")
        scheduled = facts.schedule is not None and facts.schedule.next_due is not None
        found.append(on_time if scheduled else Finding("good", "no problems"))
    return tuple(sorted(found, key=lambda one: _ORDER.index(one.tone)))


def _findings(facts: Facts) -> Iterator[Finding]:
    status = facts.status
    if facts.unreadable is not None:
        yield Finding("bad" if status is None else "warn", "unreadable", facts.unreadable)
    if status is None:
        return
    if status.problem is not None:
        yield Finding("bad", BLOCKED, status.problem)
    if refused := [str(n) for n, _ in status.quarantined]:
        yield Finding(
            "bad", f"{len(refused)} quarantined", f"Validation refused these checkpoints: {', '.join(refused)}"
        )
    yield from _of_runs(facts)
    if status.unpublished:
        title = "The output of these intervals is committed, but the sink has not taken it"
        yield Finding("warn", f"{len(status.unpublished)} unpublished", title)
    if stale := [f"{n} (changed by {by})" for n, by in status.stale]:
        title = "Computed from state that has changed since. Run the intervals of these checkpoints again: "
        yield Finding("warn", f"{len(stale)} stale", title + ", ".join(stale))
    for kind, number in Counter(verdict.kind for _, verdict in status.outdated).items():
        because = [f"{i} is {kind}: {verdict.why}" for i, verdict in status.outdated if verdict.kind == kind]
        yield Finding("warn", f"{number} {kind} by inputs", "; ".join(because[:3]))
    number, last = facts.unvalidated or (0, None)
    if number and last is not None:  # Else the pipeline is perhaps never validated.
        yield Finding("info", f"{number} not validated", f"The last validated checkpoint is {last}")


def _of_runs(facts: Facts) -> Iterator[Finding]:
    """Yield the findings that follow from the DAG's runs and its schedule."""
    schedule, found = facts.schedule, troubles(facts)
    if failed := [one.interval for one in found if one.why == "failed"]:
        yield Finding("bad", f"{len(failed)} failed", f"The run of {failed[0]} failed, and Airflow does not try again")
    if kept := sorted(i for i, runs in _by_interval(facts, after=False).items() if _find_failed(i, runs)):
        title = f"The run of {kept[0]} failed. An earlier result of this interval stays in use"
        yield Finding("warn", f"{plural(len(kept), 'run')} failed, results kept", title)
    if facts.failing:
        first = facts.failing[0]
        more = f", and {plural(len(facts.failing) - 1, 'other task')} failed" if len(facts.failing) > 1 else ""
        again = " Airflow tries again." if first.try_number < first.tries else ""
        title = f"{first.words(facts.now)}{more}.{again}"
        yield Finding("warn", "failing", title)
    if schedule is None:
        return
    behind = _behind(facts)
    late = "" if behind is None else span((facts.now - behind).total_seconds())
    if schedule.waiting:
        title = "A task waits, without a worker slot, for another interval or for another pipeline"
        yield Finding("info", "waiting", title)
    if schedule.paused:
        title = "The DAG is paused: Airflow creates no runs, and starts no task of the runs in progress"
        yield Finding("warn", f"paused, behind {late}" if behind is not None else "paused", title)
    elif schedule.running and behind is not None and not any(one.why == "missing" for one in found):
        yield Finding("info", "running", f"{plural(schedule.running, 'run')} in progress")
    elif schedule.next_due is None:
        # The schedule has ended, so no delay is shown. The last runs may have used another root, as in the demo.
        title = "The schedule has no more runs, and this root has no checkpoint of the last run's interval"
        ended = Finding("info", "no run due", "The schedule has no more runs")
        yield ended if behind is None else Finding("warn", "incomplete", title)
    elif behind is not None:
        title = "A run was due, but its interval has no usable checkpoint"
        if schedule.next_due <= facts.now - GRACE:
            title = "A run is due, but Airflow has not created it. Check that the scheduler is running"
        yield Finding("bad", f"late by {late}", title)


def _behind(facts: Facts) -> datetime | None:
    """Return since when an interval without a usable checkpoint is due; None if there is no such interval."""
    if facts.due:
        return facts.due[0].end
    until = asked_until(facts.schedule, facts.now)
    if facts.until is not None or until is None or facts.now - until < GRACE:
        # Airflow's next run may be overdue although the next interval, by the recorded schedule, has not ended.
        next_due = None if facts.schedule is None else facts.schedule.next_due
        return next_due if next_due is not None and facts.now - next_due > GRACE else None
    return until


def troubles(facts: Facts) -> list[Trouble]:
    """Return the intervals after the newest usable checkpoint that are in trouble, in the order of time.

    An interval whose first run is in progress is not in trouble. Nor is an interval that has no run because the DAG is
    paused or earlier runs are in progress.
    """
    newest = {one.interval: one for one in sorted(facts.unusable, key=lambda one: one.checkpoint)}
    of_interval = _by_interval(facts, after=True)
    known = sorted({*newest, *of_interval})
    found = [one for i in known if (one := newest.get(i) or _find_failed(i, of_interval[i])) is not None]
    schedule = facts.schedule
    for interval in facts.due:
        if schedule is None:
            break
        asked = schedule.asked_end is not None and interval.end <= schedule.asked_end
        comes = schedule.paused or schedule.running > 0
        covered = any(i.start < interval.end and interval.start < i.end for i in known)
        if not covered and (asked or not comes):
            found.append(Trouble(interval=interval, why="missing", since=interval.end))
    return sorted(found, key=lambda one: one.interval)


def _by_interval(facts: Facts, *, after: bool) -> dict[Interval, list[DagRun]]:
    """Return the runs of each interval: of those after the newest usable checkpoint, or of those up to it."""
    found: dict[Interval, list[DagRun]] = {}
    for run in facts.runs:
        if (i := run.interval) is not None and (facts.until is None or i.start >= facts.until) is after:
            found.setdefault(i, []).append(run)
    return found


def broken(facts: Facts) -> Broken | None:
    """Return from which to which interval a pipeline has no usable checkpoint; None if no interval is in trouble."""
    if not (found := troubles(facts)):
        return None
    counts = Counter(sorted(trouble.why for trouble in found))
    last = max([found[-1].interval, *facts.due[-1:]])
    return Broken(first=found[0], last=last, counts=tuple(counts.most_common()))


def _find_failed(interval: Interval, runs: Sequence[DagRun]) -> Trouble | None:
    # A later run of the interval that succeeded, also a manual one, makes up for the failure. A run in progress counts
    # as such a run, since it may yet succeed.
    last = sorted(runs, key=lambda run: (run.unfinished, run.ended or run.due or interval.end), reverse=True)
    failed = [*takewhile(lambda run: run.state == "failed", last)]
    if not failed:
        return None
    first = failed[-1]
    return Trouble(interval=interval, why="failed", since=first.ended, run_id=first.run_id)
