"""Decide whether an interval may be processed now, must wait for the checkpoint before it, or is refused.

Only the run of the interval directly before counts: that run waits for its own predecessor, and so on.

Airflow's `depends_on_past` does not suffice, for three reasons. It takes the run with the next smaller logical date,
which may be a manual run. It lets a run start as soon as the earlier `process` task has succeeded, although that
task's checkpoint is not committed yet. After a failure it waits without a message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta

from state_backend.checkpoint.choose_base import choose_base
from state_backend.checkpoint.interval_results import Result, results_of
from state_backend.checkpoint.log import Log, interval_of, run_of
from state_backend.checkpoint.newest_state import newest_state
from state_backend.values.errors import CairnError, Rerun, StaleStateError, StateGapError
from state_backend.values.frozen import frozen
from state_backend.values.intervals import Interval, from_ms
from state_backend.values.records import Permissions
from state_backend.values.schedule import Schedule, interval_before

_ENDED_BADLY = frozenset({"failed", "upstream_failed", "skipped", "removed"})


@frozen
class PredecessorRun:
    """A run whose data interval ends where the task's own interval starts, as Airflow reports it."""

    run_id: str
    state: str
    clear_number: int
    wanted: tuple[str, ...]  # Ids of the run's tasks that prepare and commit its checkpoint.
    # Airflow's state of the tasks in `wanted`, by task id. A state of None means that Airflow has not scheduled the
    # task yet, or that a person has cleared it.
    tasks: Mapping[str, str | None]

    @property
    def pending(self) -> bool:
        """True if, by Airflow's states, the run may still commit a checkpoint."""
        return self.state in ("queued", "running") and is_unfinished(self.wanted, self.tasks)

    def __str__(self) -> str:
        tasks = ", ".join(f"{name} {self.tasks.get(name) or 'not started'}" for name in self.wanted)
        return f"{self.run_id} ({self.state}; {tasks})"


@frozen
class Go:
    """The decision to process the interval now."""

    # Explanation for the task log; empty if there is nothing to explain.
    reason: str = ""
    there: bool = False  # True: the interval already has a usable result, which the driver may keep.


@frozen
class Wait:
    """The decision to wait: for a run of the interval before, or until a stale interval before has run again."""

    reason: str
    # The runs that may still commit the checkpoint from which this interval starts; empty if there is no such run.
    runs: tuple[PredecessorRun, ...]
    alone: bool  # True: all of `runs` are queued and no earlier run is running, so `start_patience` counts.
    soon: bool  # True: a commit is near, so the task waits in its worker slot.
    # Start of the last stale interval, which must be run again; None if the task waits for `runs`.
    heal_to: datetime | None = None
    # Start of the interval of `runs`, if the checkpoint that ends there is not committed yet: `runs` wait for it. None
    # if that checkpoint is committed, or if the task waits for no run.
    begins: datetime | None = None


@frozen
class Refuse:
    """The decision to fail the task for good, because no retry can help.

    The base checkpoint is missing or unusable and no run is about to make it, or the interval itself is not allowed.
    """

    error: str
    message: str
    # Intervals to run first; None if no re-run helps.
    rerun: Rerun | None


def plan_start(
    log: Log,
    pipeline: str,
    interval: Interval,
    permissions: Permissions,
    runs: Sequence[PredecessorRun],
    *,
    earlier_running: bool = False,
    earlier_queued: bool = False,
    alone_for: timedelta = timedelta(0),
    patience: timedelta = timedelta(minutes=2),
    schedule: Schedule | None = None,
    check_base: Callable[[], None] | None = None,
) -> Go | Wait | Refuse:
    """Decide whether `interval` may be processed now, must wait, or is refused.

    `runs`: The runs of the interval before. `alone_for`: For how long all of them have been queued while no earlier run
    was running. `earlier_running`, `earlier_queued`: True if a run with an earlier date is running, or queued.

    The task must wait while one of `runs` may still commit its checkpoint, with one exception. After `alone_for` has
    reached `patience`, the task goes on without them. Otherwise there could be a deadlock: by `max_active_runs`,
    Airflow may not start the queued runs before the task's own run has ended. If a queued run later commits another
    state, the task's checkpoint becomes stale.

    If the base checkpoint is stale and none of `runs` is about to replace it, the task waits too. If the task failed
    instead, Airflow would start the runs of later intervals, and they would fail one by one. Here too, the task does
    not wait if an earlier run has been queued for `patience`: that run may wait for the task's own run to end.

    `check_base`: Raises `StaleStateError` if other pipelines have replaced what the base read of them. None: only the
    driver checks this.
    """
    open_runs = tuple(run for run in runs if run.pending and not _has_committed(log, run, interval))
    left_alone = ""
    if open_runs:
        alone = not earlier_running and all(run.state == "queued" for run in open_runs)
        if not alone or alone_for < patience:
            before_it = _start_before(log, interval, schedule)
            # `begun`: True if the interval of `open_runs` can be computed, since the checkpoint from which it starts is
            # committed. If not, `open_runs` wait too, although Airflow may show their `process` tasks as running.
            newest = newest_state(log)
            begun = newest is None or newest.interval.end >= before_it
            return Wait(
                reason=", ".join(map(str, open_runs)),
                runs=open_runs,
                alone=alone,
                soon=begun and all(map(_is_at_work, open_runs)),
                begins=None if begun else before_it,
            )
        left_alone = (
            f"{', '.join(map(str, open_runs))} did not start within {patience}. This task does not wait longer, since Airflow may "
            "start that run only after this run has ended"
        )
    if log.newest is None:
        # The log is empty. The driver checks that the interval begins at `Pipeline.start`.
        return Go(reason=left_alone)
    pipeline_start_ms = log.newest.content.pipeline_start_ms
    try:
        choose_base(log, pipeline, interval, permissions, pipeline_start_ms, schedule=schedule)
        if check_base is not None:
            check_base()
    except CairnError as error:
        there = _result(log, interval, pipeline_start_ms)
        if isinstance(error, StateGapError) and there is not None and there.dropped:
            # The driver keeps the interval's result if code and input are the same. Otherwise the driver refuses the
            # interval, because the dropped base can't be restored.
            return Go(
                reason="retention has dropped this interval's base and its checkpoint. If code and input are the same, the result stays",
                there=True,
            )
        alone = earlier_queued and not earlier_running
        if isinstance(error, StaleStateError) and not left_alone and not (alone and alone_for >= patience):
            heal_to = error.rerun.last if error.rerun is not None else interval.start
            return Wait(reason=str(error), runs=(), alone=alone, soon=False, heal_to=heal_to)
        text = f"{error}\n{left_alone}" if left_alone else str(error)
        failed = [str(run) for run in runs if run.state == "failed"]
        if failed:
            text += f"\nThe run of the interval before failed: {', '.join(failed)}."
        return Refuse(error=type(error).__name__, message=text, rerun=error.rerun)
    there = _result(log, interval, pipeline_start_ms)
    return Go(reason=left_alone, there=there is not None)


def _result(log: Log, interval: Interval, pipeline_start_ms: int) -> Result | None:
    """Return the interval's committed result; None without one, or if a later commit made it unusable."""
    start = from_ms(pipeline_start_ms)
    result = results_of(log, [interval], Interval(start, start + timedelta(milliseconds=1))).get(interval)
    return result if result is not None and result.spoilt is None else None


def is_unfinished(wanted: Sequence[str], tasks: Mapping[str, str | None]) -> bool:
    """Return True unless all tasks in `wanted` succeeded, or one failed or was skipped. `tasks`: States by task id."""
    states = [tasks.get(name) for name in wanted]
    return any(state != "success" for state in states) and not any(state in _ENDED_BADLY for state in states)


def _start_before(log: Log, interval: Interval, schedule: Schedule | None) -> datetime:
    """Return the start of the interval before `interval`.

    Without a schedule, the interval before is assumed to be as long as `interval`. A wrong start does little harm: a
    waiting task would only keep its worker slot too long, or give it back too early.
    """
    schedule = schedule or log.schedule
    scheduled = interval_before(schedule, interval.start) if schedule is not None else None
    return interval.start - (interval.end - interval.start) if scheduled is None else scheduled.start


def _is_at_work(run: PredecessorRun) -> bool:
    """Return True if, by Airflow's task states, `run` is computing its interval or has computed it."""
    process, *rest = (run.tasks.get(name) for name in run.wanted)
    near = ("scheduled", "queued", "running")
    return process == "running" or (process == "success" and all(state in (None, *near, "success") for state in rest))


def _has_committed(log: Log, run: PredecessorRun, interval: Interval) -> bool:
    """Return True if `run` has committed the interval before `interval` since the run was last cleared.

    Each clear raises Airflow's `clear_number`, and a record keeps the `clear_number` of its run.
    """
    return any(
        (run_of(entry).run_id, run_of(entry).clear_number) == (run.run_id, run.clear_number)
        and interval_of(entry).end == interval.start
        for entry in log.commits_near(Interval(interval.start - timedelta(milliseconds=1), interval.start))
    )
