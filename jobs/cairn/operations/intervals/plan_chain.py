"""Plan what `cairn heal --chain` runs in several pipelines: what is out of date, and what an assumed change may affect.

A change spreads in two ways. If an interval runs again and its rows differ, each result that has read these rows is
stale. If the state after an interval differs, all later results of the same pipeline are stale. `plan_chain` adds these
results to those that are out of date now, and the rule of `cairn heal` says which intervals then run. So a plan names
every interval that may run. When it is carried out, a change stops to spread where a re-run gives equal rows and state.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from datetime import datetime
from typing import NamedTuple

from cairn.operations.intervals.plan_heal import Health, Reason, calendar_until, intervals_to_run, with_jumps
from state_backend.chains.inputs_of import commits_in, span_within
from state_backend.chains.judge_inputs import Cause, Node, Verdict, find_problem, followed_in, inputs_in, root_of_edge
from state_backend.checkpoint.log import Fact
from state_backend.inspection.chain_of import At
from state_backend.values.frozen import frozen
from state_backend.values.inputs import Edge, InputRead
from state_backend.values.intervals import Interval, format_instant
from state_backend.values.records import Record
from state_backend.values.schedule import Schedule

_MOST_ROUNDS = 10_000


class Planned(NamedTuple):
    """Why an interval may run. If not `sure`, it runs only if the re-run of `cause` gives another result."""

    reason: Reason | str
    sure: bool
    cause: Cause | None  # Another interval or a restore, because of which the interval may run; None without one.


@frozen
class Stage:
    """One pipeline of a chain: the input of `plan_chain`, which returns a copy with the planned fields filled in."""

    at: At  # Root and name of the pipeline.
    node: Node  # Its log, with the results that the log records.
    health: Health  # Which results are valid now.
    # The verdicts about the results. In a returned stage: those that remain after the plan is carried out.
    judged: Mapping[Interval, Verdict]
    schedule: Schedule
    # Intervals that start after this instant do not run. None: only intervals with a result run.
    last: datetime | None
    # What the newest interval has read of its upstreams. Intervals without a result are assumed to read the same.
    reads: tuple[InputRead, ...]
    rerun: frozenset[Interval] = frozenset()  # The intervals that are assumed to run again.
    restored: Interval | None = None  # The state is assumed to be restored to this interval's end; None: it is not.
    # Planned: the intervals that may run.
    planned: Mapping[Interval, Planned] = field(default_factory=dict)
    # Planned: the intervals that wait for something that no run repairs, each with the reason.
    left_out: Mapping[Interval, str] = field(default_factory=dict)
    # Planned: the results whose records have no digests of an input, so that nobody can tell whether it has changed.
    untold: tuple[Interval, ...] = ()
    # Planned: the intervals that have a result after the plan is carried out, in order of time.
    outputs: tuple[Interval, ...] = ()


def plan_chain(stages: Sequence[Stage], now: datetime) -> tuple[Stage, ...]:
    """Return copies of the stages, in their order, with the planned fields filled in, such as intervals that may run.

    `stages`: Each comes after the stages that it reads (`chain_of`). An upstream without a stage counts as unreadable.
    `now`: Intervals that end later do not run.
    """
    # If pipelines read each other, the first round takes the results of a pipeline that comes later as they are now.
    found = {one.at: replace(one, judged={}, outputs=tuple(sorted(one.node.outputs))) for one in stages}
    for _ in range(_MOST_ROUNDS):  # Two rounds, but more if pipelines read each other.
        before = dict(found)
        for stage in stages:
            found[stage.at] = _plan_stage(stage, found, now)
        if before == found:
            break
    return tuple(found.values())


def _plan_stage(stage: Stage, found: Mapping[At, Stage], now: datetime) -> Stage:
    health, outputs, begins = stage.health, stage.node.outputs, stage.restored.end if stage.restored else None
    touched, untold = _touched(stage, found)
    own: dict[datetime, Reason] = {
        **{i.start: "input changed" for i in touched},
        **{start: why for start, why in health.spoilt.items() if begins is None or start >= begins},
        **{start: "stale" for start in health.results if begins is not None and start >= begins},
        **{i.start: "stale" for i in stage.rerun},
    }
    first = min(own, default=datetime.max.replace(tzinfo=now.tzinfo))
    assumed = replace(
        health,
        spoilt={start: own.get(start, "stale") for start in (*own, *health.results) if start >= first},
        points=frozenset(point for point in (*health.points, begins) if point is not None and point <= first),
        waiting={},
    )
    assumed = with_jumps(assumed, stage.node.log, sorted(outputs.items()))
    calendar = sorted(health.results.values())
    if stage.last is not None and assumed.begin is not None:
        calendar = calendar_until(assumed, assumed.begin, stage.schedule, stage.last, now)
    to_run = intervals_to_run(assumed, calendar, [None] * len(calendar))[0]
    asked = {*(i for i in health.waiting if begins is None or i.start >= begins), *(calendar[n] for n in to_run)}
    asked, left_out = {i for i in asked if calendar and i.start <= calendar[-1].start}, dict[Interval, str]()
    for interval in sorted(asked):
        if (why := _problem(stage, interval, found)) is not None:
            to_run = intervals_to_run(replace(assumed, waiting={interval: why}), calendar, [None] * len(calendar))[0]
            # `to_run` now lacks earlier intervals with good results that would run only to rebuild this one's base.
            behind = sorted(i for i in asked if i > interval)
            left_out = {interval: why} | dict.fromkeys(behind, f"it comes after {interval}")
            break
    planned, head = dict[int, Planned](), None
    for n in (n for n in sorted(to_run) if to_run[n] != "base dropped"):
        interval, start = calendar[n], calendar[n].start
        planned[n] = Planned("run again" if interval in stage.rerun else to_run[n], True, None)
        if begins is not None and start in health.results and start not in health.spoilt:
            planned[n] = Planned("stale", True, Cause(*stage.at, stage.restored))
        elif interval not in stage.rerun and interval in touched and to_run[n] == "input changed":
            planned[n] = Planned("input changed", False, touched[interval])
        elif to_run[n] == "stale" and start not in own:
            planned[n] = Planned("stale", False, Cause(*stage.at, head))
            continue
        head = interval
    following = max(planned, default=0)
    for n in sorted(to_run, reverse=True):
        if n not in planned:  # Run it again: the following interval needs its state.
            planned[n] = Planned("base dropped", planned[following].sure, Cause(*stage.at, calendar[following]))
        following = n
    runs = {calendar[n]: planned[n] for n in sorted(planned)}
    stay = stage.judged.keys() - _goes(stage, found) - runs.keys()
    beyond = {i: stage.judged[i] for i in stay if not calendar or i > calendar[-1]}
    judged = beyond | {i: Verdict(kind="pending", why=why) for i, why in left_out.items()}
    there = tuple(sorted({*outputs, *runs}))
    return replace(stage, planned=runs, left_out=left_out, untold=untold, outputs=there, judged=judged)


def _touched(stage: Stage, found: Mapping[At, Stage]) -> tuple[dict[Interval, Cause], tuple[Interval, ...]]:
    """Return (touched, untold). `found`: The stages that are planned so far.

    `touched`: By result of `stage`, an upstream interval that it has read and that may change. `untold`: The results
    whose records can't tell whether their input may change.
    """
    log, touched, untold = stage.node.log, dict[Interval, Cause](), list[Interval]()
    ups = {(root_of_edge(one.root, stage.at[0]), one.pipeline) for one in followed_in(log)} & found.keys()
    changes = [i.start for up in ups for i in (*found[up].planned, found[up].restored) if i is not None]
    at = stage.node.restored
    if at is not None and any(i.start < at.interval.end for i in stage.rerun):
        at = None  # If the re-run gives another result, the restored state is stale or replaced.
    if stage.restored is not None and (at is None or at.interval.end <= stage.restored.end):
        at = Fact(stage.restored, log.head_id + 1, "restore")
    wanted = [
        i
        for i, n in sorted(stage.node.outputs.items())
        if changes and i.end > min(changes) and (at is None or i.start >= at.interval.end or n > at.id)
    ]
    log.entries.load(stage.node.outputs[i] for i in wanted)
    for interval in wanted:
        entry, seen = log.entries[stage.node.outputs[interval]], list[tuple[Cause, bool]]()
        for read in inputs_in(entry):
            up = root_of_edge(read.edge.root, stage.at[0]), read.edge.pipeline
            if read.edge.tracked and up in found and (read.parts or read.log):
                seen += ((Cause(*up, one), told) for one, told in _seen(read, found[up]))
        if (cause := next((cause for cause, told in seen if told), None)) is not None:
            touched[interval] = cause
        elif seen or not (inputs_in(entry) or (isinstance(entry, Record) and entry.content.followed)):
            untold.append(interval)
    return touched, tuple(untold)


def _seen(read: InputRead, up: Stage) -> Iterator[tuple[Interval, bool]]:
    """Yield (interval of `up` in `read` that may change, True if the recorded digests can tell whether it changed)."""
    ends = read.edge.reads == "state"
    for one in [*_within([*up.planned], read.span), *([up.restored] if ends and up.restored is not None else [])]:
        if one.end == read.span.end or not ends:
            yield one, all(part.digest is not None for part in read.parts if ends or part.span.overlaps(one))


def _within(order: Sequence[Interval], span: Interval) -> list[Interval]:
    first, behind = (bisect_left(order, at, key=lambda i: i.start) for at in (span.start, span.end))
    return [i for i in order[max(0, first - 1) : behind] if i.overlaps(span)]


def _goes(stage: Stage, found: Mapping[At, Stage]) -> set[Interval]:
    """Return the intervals whose verdict gets obsolete, because the plan (`found`) runs the interval that caused it."""
    gone = set[Interval]()
    for interval, verdict in sorted(stage.judged.items()):
        if (cause := verdict.cause) is not None:
            up = found.get((cause.root, cause.pipeline))
            if cause.interval in (gone if up is None or up.at == stage.at else up.planned):
                gone.add(interval)
    return gone


def _problem(stage: Stage, interval: Interval, found: Mapping[At, Stage]) -> str | None:
    """Return why an interval can't read its upstreams when its turn in the plan comes; None if it can."""
    made = stage.node.outputs.get(interval)
    for read in stage.reads if made is None else inputs_in(stage.node.log.entries[made]):
        edge, up = read.edge, found.get((root_of_edge(read.edge.root, stage.at[0]), read.edge.pipeline))
        if made is not None and not read.parts and not read.log:
            continue  # The upstream had no commit yet when the interval read it.
        if up is None:
            return f"{edge.pipeline} can't be read"
        span = read.span if made is not None else span_within(up.node.log, edge, edge.anchor(interval, stage.schedule))
        commits = _commits(up, edge, span)
        if (part := up.node.elsewhere(edge, span, commits)) is not None:
            return f"{edge.pipeline} {part}: the pipeline began later, with another's state"
        problem = find_problem(up.node, edge, span, commits, up.judged)
        if problem is not None:
            return f"{edge.pipeline} {problem[0]}: {problem[1]}"
        if edge.reads == "state" and any(n and n not in up.node.log.retained for n in commits.values()):
            return f"retention has dropped the state of {edge.pipeline} at {format_instant(span.end)}"
    return None


def _commits(up: Stage, edge: Edge, span: Interval) -> dict[Interval, int]:
    """Return {interval: id of the commit that the edge will read} in `span`; 0 if the plan runs the interval again."""
    there = [i for i in _within(up.outputs, span) if edge.reads != "state" or (i.end == span.end and i in up.planned)]
    if edge.reads == "state" and not there:
        return commits_in(up.node.log, edge, span)
    return {i: 0 if i in up.planned else up.node.outputs[i] for i in there}
