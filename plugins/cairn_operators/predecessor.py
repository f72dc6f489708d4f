"""May this interval be processed now, or has it to wait for the checkpoint of the interval before? A pure function.

Only the run of the interval before is looked at: whoever waits for it, waits for all before that. Airflow's own
``depends_on_past`` looks at the run with the next smaller logical date, which a manual run may be, and at a task that has
succeeded before the checkpoint is there; and where that one failed it waits without a word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from state_backend.checkpoint.interval_results import Result, results_of
from state_backend.checkpoint.lineage import choose_base
from state_backend.checkpoint.log import Log, interval_of, run_of
from state_backend.values.errors import CairnError, Rerun, StateGapError
from state_backend.values.intervals import Interval, from_ms
from state_backend.values.records import Permissions

_ENDED_BADLY = frozenset({"failed", "upstream_failed", "skipped", "removed"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PredecessorRun:
    """What Airflow says of a run whose data interval ends where ours starts. ``tasks``: states of its ``process`` and its
    ``checkpoint`` task by id (None: not scheduled yet, also after a clear); ``wanted``: the ids of those two."""

    run_id: str
    state: str
    clear_number: int
    wanted: tuple[str, ...]
    tasks: Mapping[str, str | None]

    @property
    def pending(self) -> bool:
        """Whether a checkpoint is still to come from it, as far as Airflow knows."""
        return self.state in ("queued", "running") and is_unfinished(self.wanted, self.tasks)

    def __str__(self) -> str:
        tasks = ", ".join(f"{name} {self.tasks.get(name) or 'not started'}" for name in self.wanted)
        return f"{self.run_id} ({self.state}; {tasks})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Go:
    """Process it. ``reason`` says what was decided, where that is not plain. ``there``: the interval has a result that counts, so that
    the driver looks whether it was made by the same code from the same input."""

    reason: str = ""
    there: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Defer until one of these runs has committed or ended. ``alone``: they are queued and nothing before us runs. ``soon``: they are at
    work, and wait for nobody."""

    reason: str
    runs: tuple[PredecessorRun, ...]
    alone: bool
    soon: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """No retry can help: the state that the interval starts from is not there and nobody is about to make it. ``rerun``: the
    intervals to run first, where that helps."""

    error: str
    message: str
    rerun: Rerun | None


def plan_start(
    log: Log,
    pipeline: str,
    interval: Interval,
    permissions: Permissions,
    runs: Sequence[PredecessorRun],
    *,
    earlier_running: bool = False,
    alone_for: timedelta = timedelta(0),
    patience: timedelta = timedelta(minutes=2),
) -> Go | Wait | Refuse:
    """What to do with ``interval``, given the log and the runs of the interval before it.

    A queued run is waited for, since it comes before us. But if nothing before us runs that would make room for it, and it
    did not start for ``patience`` (``alone_for`` so far), then Airflow's max_active_runs keeps it queued until this
    run has ended: it is not waited for. If it changes anything, it makes stale what is committed here, as if it had come later.
    """
    open_runs = tuple(run for run in runs if run.pending and not _has_committed(log, run, interval))
    left_alone = ""
    if open_runs:
        alone = not earlier_running and all(run.state == "queued" for run in open_runs)
        if not alone or alone_for < patience:
            soon = all(_is_at_work(log, run, interval) for run in open_runs)
            return Wait(reason=", ".join(map(str, open_runs)), runs=open_runs, alone=alone, soon=soon)
        left_alone = (
            f"{', '.join(map(str, open_runs))} did not start for {patience}: it is not waited for, since it may have to wait "
            "for this run to end"
        )
    if log.newest is None:
        return Go(reason=left_alone)  # the driver knows where the pipeline starts
    pipeline_start_ms = log.newest.content.pipeline_start_ms
    try:
        choose_base(log, pipeline, interval, permissions, pipeline_start_ms)
    except CairnError as error:
        there = _result(log, interval, pipeline_start_ms)
        if isinstance(error, StateGapError) and there is not None and there.dropped:
            # Whether it stays, or would have to be computed, which is refused then, the driver finds out.
            return Go(
                reason="the state that it starts from is dropped, and so is its own: it stays as it is if code and input are the same",
                there=True,
            )
        text = f"{error}\n{left_alone}" if left_alone else str(error)
        failed = [str(run) for run in runs if run.state == "failed"]
        if failed:
            text += f"\nThe run of the interval before failed: {', '.join(failed)}."
        return Refuse(error=type(error).__name__, message=text, rerun=error.rerun)
    there = _result(log, interval, pipeline_start_ms)
    return Go(reason=left_alone, there=there is not None)


def _result(log: Log, interval: Interval, pipeline_start_ms: int) -> Result | None:
    """The interval's result, if it counts. The log has looked up by then what this asks of it."""
    start = from_ms(pipeline_start_ms)
    result = results_of(log, [interval], Interval(start, start + timedelta(milliseconds=1))).get(interval)
    return result if result is not None and result.spoilt is None else None


def is_unfinished(wanted: Sequence[str], tasks: Mapping[str, str | None]) -> bool:
    """Whether of these tasks one is still to succeed, and none has ended otherwise."""
    states = [tasks.get(name) for name in wanted]
    return any(state != "success" for state in states) and not any(state in _ENDED_BADLY for state in states)


def _is_at_work(log: Log, run: PredecessorRun, interval: Interval) -> bool:
    """Whether its process computes, or has, and so its checkpoint is near. One whose own state is not there yet only waits: a pipeline's
    intervals are taken to be as long as each other; where they are not, the wait is the longer one, without a slot."""
    process, *rest = (run.tasks.get(name) for name in run.wanted)
    before_it = interval.start - (interval.end - interval.start)
    begun = log.newest is None or log.newest.content.interval.end >= before_it
    near = ("scheduled", "queued", "running")
    return begun and (
        process == "running" or (process == "success" and all(state in (None, *near, "success") for state in rest))
    )


def _has_committed(log: Log, run: PredecessorRun, interval: Interval) -> bool:
    """Whether the log has what the run made since it was cleared last; each clear raises the number."""
    return any(
        (run_of(entry).run_id, run_of(entry).clear_number) == (run.run_id, run.clear_number)
        and interval_of(entry).end == interval.start
        for entry in log.commits_near(Interval(interval.start - timedelta(milliseconds=1), interval.start))
    )
