"""Plan which intervals of a pipeline to run again, in order, until the pipeline is healthy up to a date.

A pipeline is healthy if each interval has a valid result and no run of Airflow is at work. `plan_heal` decides from the
log and from Airflow's runs and backfills. It returns only the next steps: the caller carries them out, reads everything
again and calls it again. So a plan needs no memory, and a killed `cairn heal` continues where it stopped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from datetime import datetime, timedelta
from typing import Literal

from state_backend.chains.judge_inputs import Verdict
from state_backend.checkpoint.interval_results import spoilt_results
from state_backend.checkpoint.log import Log, base_of, interval_of, last_facts
from state_backend.checkpoint.newest_state import valid_states
from state_backend.values.airflow_runs import DagRun
from state_backend.values.frozen import frozen
from state_backend.values.intervals import Interval, format_instant, from_ms
from state_backend.values.records import SweepRecord
from state_backend.values.schedule import Schedule, first_interval

Reason = Literal["missing", "failed", "stale", "quarantined", "base dropped", "input changed"]
# A queued run of a backfill starts within seconds, if Airflow will ever start it.
QUEUED_PATIENCE = timedelta(seconds=30)


@frozen
class Health:
    """The state of a pipeline's results, as its log records them."""

    start: datetime | None  # Start of the pipeline; None for an empty log.
    results: Mapping[datetime, Interval]  # The intervals that have a result, by their start.
    spoilt: Mapping[datetime, Reason]  # Why a result is not valid, by the start of its interval.
    points: frozenset[datetime]  # Where an interval may start: the pipeline's start, and ends of usable checkpoints.
    jumps: Mapping[datetime, datetime]  # By the start of an interval after an allowed gap: the end of its base.
    # Results that wait for a result of another pipeline, each with the reason.
    waiting: Mapping[Interval, str] = field(default_factory=dict)

    @property
    def begin(self) -> datetime | None:
        """The latest of `points` up to the first interval that has no valid result; None for an empty log.

        The latest checkpoint that an interval may start from contains all intervals before its end. So an interval
        before that end without a result was left out on purpose: by `allow_gap`, a fork or a restore.
        """
        good_until = min([max(self.points), *self.spoilt]) if self.points else None
        return max((p for p in self.points if good_until and p <= good_until), default=good_until)

    def is_behind_waiting(self, start: datetime) -> bool:
        """Return True if the interval with this start, or an earlier one, waits for another pipeline."""
        return any(interval.start <= start for interval in self.waiting)

    def can_start_at(self, start: datetime) -> bool:
        """Return True if the interval with this start may run. An empty log allows any start.

        It runs from a usable checkpoint, over an allowed gap, or from empty state at the pipeline's start.
        """
        return not self.points or start in self.points or self.jumps.get(start) in self.points

    def is_skipped(self, start: datetime) -> bool:
        """Return True if a person allowed a gap over the interval with this start."""
        return any(base_end <= start < first for first, base_end in self.jumps.items())


def health_of(log: Log, outdated: Mapping[Interval, Verdict] | None = None) -> Health:
    """Return the state of a pipeline's results. `outdated`: The verdicts about their inputs (`Chains.judged`)."""
    if log.newest is None:
        return Health(start=None, results={}, spoilt={}, points=frozenset(), jumps={})
    start = from_ms(log.newest.content.pipeline_start_ms)
    usable = valid_states(log)
    outputs = sorted((f.interval, f.id) for f in last_facts(log.facts(None)) if f.kind == "interval")
    spoilt: dict[datetime, Reason] = {
        interval.start: "stale" if log.quarantine_above(result.id) is None else "quarantined"
        for interval, result in spoilt_results(log, dict(outputs)).items()
    }
    for interval, verdict in (outdated or {}).items():
        if verdict.kind == "stale":
            spoilt.setdefault(interval.start, "input changed")
    health = Health(
        start=start,
        results={interval.start: interval for interval, _ in outputs},
        spoilt=spoilt,
        points=frozenset({start, *(kept.interval.end for kept in usable)}),
        jumps={},
        waiting={i: v.why for i, v in (outdated or {}).items() if v.kind in ("pending", "unreadable")},
    )
    return with_jumps(health, log, outputs)


def with_jumps(health: Health, log: Log, outputs: Sequence[tuple[Interval, int]]) -> Health:
    """Return a copy of `health` with the jumps of those `outputs` (interval, commit id) that may have to run again.

    If intervals of a gap have run later, the jump begins at the end of the last such interval.
    """
    found, begin = {}, health.begin
    outputs = [(i, n) for i, n in outputs if begin is not None and i.start >= begin]
    log.entries.load(n for _, n in outputs)
    for interval, n in outputs:
        entry = log.entries[n]
        base_id = None if isinstance(entry, SweepRecord) else base_of(entry)
        base = None if base_id is None else log.entries[base_id]
        if base is not None and not isinstance(base, SweepRecord):
            end = interval_of(base).end
            if end < interval.start:
                end = max([end, *(one.end for one in health.results.values() if one.end <= interval.start)])
            if end < interval.start:
                found[interval.start] = end
    return replace(health, jumps=found)


def calendar_until(
    health: Health, begin: datetime, schedule: Schedule, last: datetime, now: datetime
) -> list[Interval]:
    """Return the intervals from `begin` on that start up to `last` and end up to `now`."""
    calendar: list[Interval] = []
    while begin <= last and (one := health.results.get(begin) or first_interval(schedule, begin)).end <= now:
        calendar.append(one)
        begin = one.end
    return calendar


@frozen
class AirflowRun(DagRun):
    """A run of the pipeline's DAG with a data interval."""

    start: datetime  # Start of the data interval.
    committed: bool = False  # True: the run failed after its task `checkpoint` had committed.


@frozen
class OpenBackfill:
    """A backfill of the pipeline's DAG that Airflow has not completed."""

    id: int
    first: datetime  # Start of its first interval.
    last: datetime  # Start of its last interval.
    paused: bool
    created: datetime
    at_work: int = 1  # Number of its runs that are queued or running.

    def __str__(self) -> str:
        return f"backfill {self.id} of {format_instant(self.first)} to {format_instant(self.last)}"


@frozen
class AirflowView:
    dag_id: str
    paused: bool
    runs: tuple[AirflowRun, ...]
    backfills: tuple[OpenBackfill, ...] = ()

    def latest(self) -> dict[datetime, AirflowRun]:
        """Return one run for each interval, by its start: the unfinished run, else the run that ended last."""

        def order(run: AirflowRun) -> tuple[bool, float, float]:
            return run.unfinished, _time(run.ended), _time(run.queued)

        return {run.start: run for run in sorted(self.runs, key=order)}


@frozen
class ToRun:
    interval: Interval
    reason: Reason


@frozen
class UnpauseDag:
    """Step: unpause the DAG, since Airflow starts no task of a paused DAG."""

    dag_id: str

    def __str__(self) -> str:
        return f"unpause DAG {self.dag_id}"


@frozen
class Adopt:
    """Step: unpause a paused backfill that runs the next interval, and wait for its runs."""

    backfill: OpenBackfill

    def __str__(self) -> str:
        return f"adopt {self.backfill}, which is paused: unpause it and wait for its runs"


@frozen
class EndBackfill:
    """Step: cancel an open backfill. Its queued runs fail; its started runs go on."""

    backfill: OpenBackfill
    why: str

    def __str__(self) -> str:
        return f"end {self.backfill}: {self.why}"


@frozen
class EndRun:
    """Step: mark a run as failed that Airflow will never start."""

    run: AirflowRun

    def __str__(self) -> str:
        return f"mark run {self.run.run_id} as failed: it is queued, and the backfill that it belongs to has ended"


@frozen
class WaitFor:
    run: AirflowRun
    backfill: OpenBackfill | None  # The open backfill that the run belongs to; None without one.

    def __str__(self) -> str:
        if self.backfill is None:
            return f"wait for run {self.run.run_id}, which is {self.run.state}"
        return f"adopt {self.backfill}: wait for its run {self.run.run_id}, which is {self.run.state}"


@frozen
class RunIntervals:
    to_run: tuple[ToRun, ...]
    allow_gap: bool = False  # True: the first interval starts from an older base, over a gap that a person allowed.

    @property
    def first(self) -> datetime:
        return self.to_run[0].interval.start

    @property
    def last(self) -> datetime:
        return self.to_run[-1].interval.start

    def __str__(self) -> str:
        counts = Counter(to_run.reason for to_run in self.to_run)
        reasons = ", ".join(f"{n} {reason}" for reason, n in counts.items())
        if len(self.to_run) == 1:
            return f"run the interval that starts at {format_instant(self.first)}: {self.to_run[0].reason}"
        return f"run {len(self.to_run)} intervals from {format_instant(self.first)} to {format_instant(self.last)}: {reasons}"


@frozen
class GiveUp:
    """Step: stop, because the run `run` ended during this `cairn heal` and did not repair the next interval."""

    to_run: ToRun  # The next interval, and why it must run.
    run: AirflowRun

    def __str__(self) -> str:
        start = format_instant(self.to_run.interval.start)
        if self.run.state == "failed":
            return f"stop: run {self.run.run_id} of the interval that starts at {start} failed"
        return (
            f"stop: run {self.run.run_id} of the interval that starts at {start} succeeded, but the interval is still "
            f"{self.to_run.reason} in the log"
        )


Step = UnpauseDag | Adopt | EndBackfill | EndRun | WaitFor | RunIntervals | GiveUp


@frozen
class HealPlan:
    """The next steps of `cairn heal --to DATE`. Intervals are in the order of time."""

    # The steps in order; empty if every interval up to `DATE` has a valid result.
    steps: tuple[Step, ...]
    to_run: tuple[ToRun, ...]  # All intervals that must run, each with the reason.
    unfinished: tuple[Interval, ...]  # Intervals that must run, or whose run is queued or running.
    running: int  # Number of intervals whose run is queued or running.
    skipped: tuple[Interval, ...]  # Intervals without a result in a gap that a person allowed.
    not_repeatable: tuple[AirflowRun, ...]  # Failed runs of intervals with a valid result, whose base was dropped.
    off_schedule: tuple[Interval, ...]  # Intervals whose result is not valid, but that are not in the calendar.


def plan_heal(
    health: Health,
    calendar: Sequence[Interval],
    airflow: AirflowView | None,
    *,
    first_seen: Mapping[str, datetime | None] | None = None,
    queued_for: timedelta = timedelta(0),
) -> HealPlan:
    """Return the next steps until all intervals of the calendar are healthy.

    `airflow`: Runs and backfills of the DAG; None if no Airflow runs the pipeline. `first_seen`: By run id, the value
    of `AirflowRun.began` when this `cairn heal` first saw the run. `queued_for`: How long the run that `cairn heal`
    waits for has been queued.
    """
    latest = airflow.latest() if airflow is not None else {}
    runs = [latest.get(interval.start) for interval in calendar]
    to_run, not_repeatable = intervals_to_run(health, calendar, runs)
    reachable = {i for i, one in enumerate(calendar) if not health.is_behind_waiting(one.start)}
    working = {i: run for i, run in enumerate(runs) if run is not None and run.unfinished and i in reachable}
    steps: list[Step] = []
    if airflow is not None and (to_run or working):
        steps += _steps_in_airflow(calendar, runs, airflow, to_run, working, first_seen or {}, queued_for)
    if not any(isinstance(step, GiveUp) for step in steps):
        steps += _blocks(health, calendar, to_run, working)
    fitting = {interval.start for interval in calendar}
    spoilt = [health.results[start] for start in sorted(health.spoilt)]
    return HealPlan(
        steps=tuple(steps),
        to_run=tuple(ToRun(interval=calendar[i], reason=to_run[i]) for i in sorted(to_run)),
        unfinished=tuple(calendar[i] for i in sorted({*to_run, *working})),
        running=len(working),
        skipped=tuple(i for i in calendar if i.start not in health.results and health.is_skipped(i.start)),
        not_repeatable=not_repeatable,
        off_schedule=tuple(i for i in spoilt if calendar and i.start <= calendar[-1].start and i.start not in fitting),
    )


def intervals_to_run(
    health: Health, calendar: Sequence[Interval], runs: Sequence[AirflowRun | None]
) -> tuple[dict[int, Reason], tuple[AirflowRun, ...]]:
    """Return (reasons, not_repeatable). `runs`: The run of each interval of the calendar, or None.

    `reasons`: Why an interval must run, by its index in the calendar. `not_repeatable`: Failed runs of intervals with a
    valid result. They can't run again, because their base was dropped.
    """
    to_run: dict[int, Reason] = {}
    not_repeatable = []
    newest = max(health.points, default=None)
    for i, run in enumerate(runs):
        start = calendar[i].start
        failed = run is not None and run.state == "failed"
        if start in health.spoilt:
            to_run[i] = health.spoilt[start]
        elif start in health.results:
            if run is not None and failed and not run.committed:
                if health.can_start_at(start):
                    to_run[i] = "failed"
                else:
                    not_repeatable.append(run)
        elif (newest is None or start >= newest) and not health.is_skipped(start):
            to_run[i] = "failed" if failed else "missing"
    to_run = {i: reason for i, reason in to_run.items() if not health.is_behind_waiting(calendar[i].start)}
    for i in sorted(to_run):
        at = i
        while not health.can_start_at(start := calendar[at].start):
            # Behind an allowed gap, the interval before is the one that ends where the gap begins.
            end = health.jumps.get(start, start)
            at = next((n for n in reversed(range(at)) if calendar[n].end <= end), -1)
            if at < 0 or at in to_run:
                break
            to_run[at] = "base dropped"
    return to_run, tuple(not_repeatable)


def _steps_in_airflow(
    calendar: Sequence[Interval],
    runs: Sequence[AirflowRun | None],
    airflow: AirflowView,
    to_run: Mapping[int, Reason],
    working: Mapping[int, AirflowRun],
    first_seen: Mapping[str, datetime | None],
    queued_for: timedelta,
) -> list[Step]:
    """Return the steps that come before `cairn heal` can create a backfill: for open backfills and unfinished runs.

    `to_run`, `working`: By index in the calendar, why an interval must run, and its unfinished run.
    """
    head = min([*to_run, *working])
    steps: list[Step] = [UnpauseDag(dag_id=airflow.dag_id)] if airflow.paused else []
    if head in working:
        run = working[head]
        owner = _owner(airflow, run)
        if run.state == "queued" and owner is not None and owner.paused:
            steps.append(Adopt(backfill=owner))
        elif run.state == "queued" and run.run_type == "backfill" and owner is None and queued_for >= QUEUED_PATIENCE:
            steps.append(EndRun(run=run))
        else:
            steps.append(WaitFor(run=run, backfill=owner))
        return steps
    ended, start = runs[head], format_instant(calendar[head].start)
    stuck = ended is not None and _has_had_its_chance(ended, runs[head - 1] if head else None, first_seen)
    why = f"none of its runs is for the interval that starts at {start}, which comes first"
    steps += [
        EndBackfill(backfill=backfill, why=f"its runs come after the interval that starts at {start}" if stuck else why)
        for backfill in airflow.backfills
        if backfill.at_work
    ]
    if stuck and ended is not None:
        steps.append(GiveUp(to_run=ToRun(interval=calendar[head], reason=to_run[head]), run=ended))
    return steps


def _has_had_its_chance(run: AirflowRun, before: AirflowRun | None, first_seen: Mapping[str, datetime | None]) -> bool:
    """Return True if `run` began under this `cairn heal`, after the run `before` of the previous interval had ended.

    If such a run did not repair its interval, another run would not either. `first_seen`: As in `plan_heal`.
    """
    if run.began is None or first_seen.get(run.run_id, run.began) == run.began:
        return False
    return before is None or before.ended is None or before.ended <= run.began


def _blocks(
    health: Health, calendar: Sequence[Interval], to_run: Mapping[int, Reason], working: Mapping[int, AirflowRun]
) -> list[Step]:
    """Return one `RunIntervals` for each group of intervals in `to_run` that one backfill can run.

    The backfill skips intervals whose run is queued or running (`working`). The keys of both are indexes in the
    calendar.
    """
    blocks: list[list[int]] = []
    alone = -1
    for i in sorted(i for i in to_run if i not in working):
        jumped = calendar[i].start in health.jumps and calendar[i].start not in health.points
        joined = bool(blocks) and not jumped and all(j in working for j in range(blocks[-1][-1] + 1, i))
        if joined and blocks[-1][0] != alone:
            blocks[-1].append(i)
        else:
            blocks.append([i])
        alone = i if jumped else alone
    return [
        RunIntervals(
            to_run=tuple(ToRun(interval=calendar[i], reason=to_run[i]) for i in block),
            # The permission counts for every run of a backfill, so an interval behind a gap gets a backfill of its own.
            allow_gap=calendar[block[0]].start in health.jumps and calendar[block[0]].start not in health.points,
        )
        for block in blocks
    ]


def _owner(airflow: AirflowView, run: AirflowRun) -> OpenBackfill | None:
    """Return the open backfill that a run belongs to; else None. Airflow's API does not tell, so the dates decide."""
    for backfill in airflow.backfills:
        late = run.queued is not None and run.queued < backfill.created
        if run.run_type == "backfill" and backfill.first <= run.start <= backfill.last and not late:
            return backfill
    return None


def _time(instant: datetime | None) -> float:
    return 0.0 if instant is None else instant.timestamp()
