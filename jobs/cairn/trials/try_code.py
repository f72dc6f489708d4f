"""Run changed code of a pipeline beside production, in a trial.

Production's state before an interval is forked into the trial's own root. In this root, the intervals from this one on
run with the new code, over the same input.

docs/design-state.md describes the trial of a chain ("Trials"). In this module, each pipeline of the chain is a level:
first the tried pipeline, then the pipelines that read it, directly or through others.

A trial writes nothing into production, except a lease while it links production's files. It calls no sink and updates
no Airflow asset. It is removed after a time. If a trial stops half-way, the same call continues it.
`state_backend.checkpoint.trials` lists what a stopped trial leaves on disk.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from cairn.operations.intervals.plan_interval import check_fits, in_zone_of
from cairn.operations.intervals.plan_range import boundaries_of, check_in_order, named_intervals
from cairn.operations.intervals.plan_reuse import settings_of, source_hash
from cairn.operations.intervals.process_interval import OnShards
from cairn.operations.intervals.read_source import Read, read_source
from cairn.operations.intervals.run_intervals import OnOutcome, Outcome, run_intervals
from cairn.operations.place import Place
from cairn.pipeline import Interval, Pipeline
from cairn.shipping.code_version import code_version
from cairn.shipping.ship_processor import code_hash
from cairn.spark.session import check_running, use_this_python, zone_of_session
from cairn.trials.compare_trial import compare_trial, comparison_lines, match_of, outdated_lines
from cairn.upstream_sources import Upstreams
from state_backend.adapters.open_storage import open_storage
from state_backend.chains.judge_inputs import inputs_in, root_of_edge
from state_backend.checkpoint.choose_base import plan_base
from state_backend.checkpoint.forgotten_keys import check_not_tried, check_restored
from state_backend.checkpoint.location import locate
from state_backend.checkpoint.log import Log, read_log
from state_backend.checkpoint.newest_state import newest_state, valid_states
from state_backend.checkpoint.rewind import fork
from state_backend.checkpoint.savepoints import read_savepoint
from state_backend.checkpoint.storage_clock import storage_now_ms
from state_backend.checkpoint.trials import (
    check_no_trial,
    check_same_trial,
    create_trial,
    production_root,
    read_trial,
    remove_trial_named,
    renew_trial,
    root_of_trial,
    trials_url,
)
from state_backend.inspection.chain_of import At, readers_of
from state_backend.inspection.compare_runs import describe_comparison
from state_backend.inspection.describe import describe_trial
from state_backend.values.airflow_commands import command_line
from state_backend.values.day_or_instant import format_duration
from state_backend.values.errors import CairnError, StateUnusable, UsageError
from state_backend.values.frozen import frozen
from state_backend.values.inputs import Edge, InputRead, TriedUpstream
from state_backend.values.intervals import format_instant, to_ms
from state_backend.values.marks import Savepoint, Trial, TrialBase
from state_backend.values.operation_parameters import TryCode
from state_backend.values.records import Content, Permissions, Record, own_run
from state_backend.values.retention import KeepLast, KeepYounger, RetentionPolicy
from state_backend.values.schedule import Schedule

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger("cairn")

# Every record lists all retained checkpoints. So a trial of more intervals retains only this many of its newest
# checkpoints, and later does not have the state that it began from. Of earlier checkpoints output and digest remain.
MOST_STATES = 300
_LISTED = 10


@frozen
class Tried:
    """A trial that was run."""

    trial: Trial
    root: str  # URL of the trial's own root.
    outcomes: list[Outcome]
    # Seconds that the fork took; 0 if the trial began empty or an earlier call made the fork.
    fork_s: float
    other_input: tuple[Interval, ...]  # As in `TrialPlan`.


@frozen
class TrialPlan:
    """The plan of a trial, made without writing."""

    trial: Trial
    # The trial as an earlier call wrote it, if this call continues the trial; None for a new trial.
    before: Trial | None
    source: str  # URL of the pipeline's folder in production, or of the savepoint's folder.
    # Checkpoint id or savepoint to fork; None begins with empty state.
    target: int | Savepoint | None
    asked: Mapping[Interval, Read]  # The answers of the source that are known already.
    other_input: tuple[Interval, ...]  # The intervals whose source position differs from that in production's record.


@frozen
class Level:
    """One pipeline of the trial: its code, and the intervals that it runs."""

    pipeline: Pipeline
    code: str  # Its `module:NAME`.
    intervals: tuple[Interval, ...]


def carry_out_try(request: TryCode, place: Place) -> dict[str, Any]:
    """Run the trial of the request. Return a description: the trial, counts and, if asked, its differences."""
    pipeline = place.load(request)
    rule = boundaries_of(pipeline, read_log(locate(request.root, pipeline.name).storage), request.every)
    head = Level(pipeline=pipeline, code=request.code, intervals=named_intervals(request.first, request.last, rule))
    name = request.trial or _name_of_trial(pipeline, head.intervals[0])
    levels = [head, *(_levels_below(request, place, head, name) if request.chain else ())]
    for level in levels[1:]:  # `try_code` plans the first level. The input of the others does not exist before it ran.
        plan_trial(None, level.pipeline, level.intervals, request.root, code=level.code, name=name, savepoint=None)
    spark, said, same, lines = place.connect(pipeline, "try"), list[dict[str, Any]](), True, list[str]()
    for level in levels:
        tried = try_code(
            spark,
            level.pipeline,
            level.intervals,
            request.root,
            code=level.code,
            trial=name,
            savepoint=request.savepoint if level is head else None,
            keep_for=request.keep_for,
            on_plan=lambda plan: _say_plan(plan, place),
            on_outcome=place.on_outcome,
        )
        said.append(
            describe_trial(tried.trial)
            | {
                "root": tried.root,
                "computed": sum(o.computed for o in tried.outcomes),
                "fork_seconds": round(tried.fork_s, 3),
                "other_input": [str(i) for i in tried.other_input],
            }
        )
    for level in levels if request.compare else ():
        match = match_of(request.match, level.pipeline.name, pipeline.name)
        trial, found = compare_trial(request.root, level.pipeline.name, name, match, 3)
        same = same and found.same
        lines += [*comparison_lines(trial, describe_comparison(found)), *outdated_lines(request.root, trial)]
    for line in lines:
        place.say(line)
    return said[0] | ({"same": same, "comparison": lines} if lines else {}) | {"dependants": said[1:]}


def _levels_below(request: TryCode, place: Place, head: Level, trial: str) -> list[Level]:
    """Return the pipelines that read the trial, directly or through others, upstream first. Write nothing.

    A reading pipeline runs those of production's intervals that read the trial, and nothing after the trial's end. A
    pipeline without such intervals is left out. `head`: The tried pipeline.
    """
    root, codes = request.root, dict(_named_codes(request.code_of))
    tried = _in_trial(root, head.pipeline.name, trial, head.intervals)
    readers = readers_of(root, head.pipeline.name)
    if unknown := codes.keys() - {*readers}:
        raise UsageError(f"--code-of names {min(unknown)}, which does not read {head.pipeline.name} below {root}")
    levels: list[Level] = []
    for name in readers:
        log = read_log(locate(root, name).storage)
        code = codes.get(name) or (log.newest.content.code if log.newest is not None else None)
        if code is None:
            raise UsageError(f"the records of {name} do not name its code; add --code-of {name}=module:NAME")
        pipeline = place.load(replace(request, code=code, pipeline=name))
        source = pipeline.source
        if isinstance(source, Upstreams):
            at = production_root(root)
            read = [(edge, tried.get((root_of_edge(edge.root, at), edge.pipeline))) for edge in source.edges.values()]
            spans = [(edge, one.span) for edge, one in read if one is not None]
            since = min((span.start for _, span in spans), default=None)
            there = [] if since is None else [interval for interval, _ in log.outputs_after(since)]
            if intervals := intervals_that_read(spans, there, log.schedule):
                pipeline = replace(pipeline, source=replace(source, tried=tried))
                levels.append(Level(pipeline=pipeline, code=code, intervals=intervals))
                tried = tried | _in_trial(root, name, trial, intervals)
                continue
        place.say(f"{name} is left out: production has no interval of it that reads the trial, and nothing behind it")
    return levels


def _named_codes(given: Sequence[str]) -> Iterator[tuple[str, str]]:
    for text in given:
        name, _, code = text.partition("=")
        if not name or ":" not in code:
            raise UsageError(f"--code-of is {text!r}; expected PIPELINE=module:NAME")
        yield name, code


def _in_trial(root: str, pipeline: str, trial: str, intervals: Sequence[Interval]) -> dict[At, TriedUpstream]:
    """Return {production's root and name of a tried pipeline: where readers in the same trial find its output}."""
    own = root_of_trial(root, pipeline, trial)
    span = Interval(intervals[0].start, intervals[-1].end)
    return {(production_root(own).rstrip("/"), pipeline): TriedUpstream(root=own, span=span)}


def intervals_that_read(
    spans: Sequence[tuple[Edge, Interval]], there: Iterable[Interval], schedule: Schedule | None
) -> tuple[Interval, ...]:
    """Return the intervals that a trial of a pipeline runs. `there`: The pipeline's intervals in production.

    These intervals begin with the first that reads the trial of any upstream. They end before the first gap, or
    before the first interval that reads past the end of an upstream's trial. `spans`: (upstream, time of its trial).
    """
    row: list[Interval] = []
    for interval in sorted(there):
        anchors = [(edge.anchor(interval, schedule), span) for edge, span in spans]
        if not row and not any(anchor.end > span.start for anchor, span in anchors):
            continue
        if any(anchor.end > span.end for anchor, span in anchors) or (row and interval.start != row[-1].end):
            break
        row.append(interval)
    return tuple(row)


def _say_plan(plan: TrialPlan, place: Place) -> None:
    trial = plan.trial
    begins = "empty state" if trial.base is None else f"the state of checkpoint {trial.base.id}"
    place.say(
        f"trial {trial.name} of {trial.pipeline}: code {trial.code_version or trial.code_hash[:8]}, from {begins}"
    )
    for interval in plan.other_input[:_LISTED]:
        place.say(
            f"{interval}: the input has changed: the source's position differs from that in production's checkpoint"
        )
    if len(plan.other_input) > _LISTED:
        place.say(f"the input of {len(plan.other_input) - _LISTED} more intervals has changed too")


def try_code(
    spark: SparkSession,
    pipeline: Pipeline,
    intervals: Sequence[Interval],
    root: str,
    *,
    code: str,
    trial: str | None = None,
    savepoint: str | None = None,
    keep_for: timedelta = TryCode.keep_for,
    mode: str = "incremental",
    now_ms: int | None = None,
    on_plan: Any = None,
    on_outcome: OnOutcome | None = None,
    on_shards: OnShards | None = None,
) -> Tried:
    """Run intervals with the code of this process beside production. Production does not change.

    After a failure, call this function again with the same arguments: it continues the trial.

    Args:
        spark: A session, classic or Spark Connect.
        pipeline: The pipeline with the new code.
        intervals: The intervals to run. Each starts where the one before ends.
        root: URL of production's root.
        code: `module:NAME` of the pipeline, which commands show to people.
        trial: Name of the trial; None makes a name from the first interval and the code.
        savepoint: URL of a native savepoint that ends where the first interval starts. None begins from production's
            state.
        keep_for: How long the trial stays, from the end of this call.
        mode: How checkpoints are stored: "incremental", "full" or "changelog".
        now_ms: Present time in milliseconds since the epoch; None for the storage's clock.
        on_plan: Function that gets the `TrialPlan` before anything is written.
        on_outcome: Function that gets each outcome with its record, and the progress.
        on_shards: Function that brings the rows to the shards and runs the job on each; None uses Spark.

    Returns:
        The trial and its outcomes. `compare_trial` compares them with production.

    Raises:
        UsageError: Production would refuse these intervals, and nothing was written; or the trial was removed while it
            ran.
        CairnError: An interval failed, as in `run_intervals`.

    Example:
        tried = try_code(spark, CLICKS, intervals, root, code="pipelines.clicks:CLICKS")
        trial, comparison = compare_trial(root, "clicks", tried.trial.name, match=["user"], limit=3)
    """
    check_running(spark)
    use_this_python(spark)
    trial = trial or _name_of_trial(pipeline, intervals[0])
    if (source := _reads_itself(pipeline)) is not None:
        tried_too = _in_trial(root, pipeline.name, trial, intervals)
        pipeline = replace(pipeline, source=replace(source, tried={**source.tried, **tried_too}))
    plan = plan_trial(spark, pipeline, intervals, root, code=code, name=trial, savepoint=savepoint)
    if on_plan is not None:
        on_plan(plan)
    if now_ms is None:
        now_ms = storage_now_ms(open_storage(trials_url(root, pipeline.name)))
    # No sweep may remove the trial while it runs, however short `keep_for` is.
    running = replace(plan.trial, ends_ms=_later(now_ms, max(keep_for, TryCode.keep_for)))
    own = root_of_trial(root, pipeline.name, running.name)
    began_s = time.monotonic()
    if plan.before is None:
        create_trial(root, running)
    elif not renew_trial(root, running):
        _clean_up_removed(root, running)
    try:
        fork_s = _fork(plan, pipeline, root, own)
        # A trial calls no sink.
        quiet = replace(pipeline, sink=None, retention=_retention(plan.trial))
        outcomes = run_intervals(
            *(spark, quiet, intervals, own, mode),
            run=own_run(f"trial__{_decided_by(pipeline, plan, zone_of_session(spark))}"),
            on_outcome=on_outcome,
            on_shards=on_shards,
            asked=plan.asked,
            before_commit=lambda _: _check_there(root, running),
        )
    except Exception as error:
        # If somebody removed the trial while it ran, the error may be arbitrary: raise a clear `UsageError` instead.
        _clean_up_removed(root, running, error)
        if isinstance(error, StateUnusable) and plan.before is not None:
            again = command_line("trials", root=root, pipeline=pipeline.name, remove=running.name)
            error.add_note(
                f"If trial {running.name!r} has dropped the state, remove the trial, and try again:\n{again}"
            )
        raise
    running = _renew(root, running, now_ms + int((time.monotonic() - began_s) * 1000), keep_for)
    return Tried(trial=running, root=own, outcomes=outcomes, fork_s=fork_s, other_input=plan.other_input)


def _decided_by(pipeline: Pipeline, plan: TrialPlan, session_zone: str) -> str:
    """Return a hash of code, settings and source positions. A repeat with the same hash keeps all valid results."""
    parts: list[Any] = [plan.trial.code_hash, settings_of(pipeline, pipeline.time_zone or session_zone)]
    parts += [pipeline.output_schema, sorted(pipeline.dropped)]
    source: Any = pipeline.source
    if isinstance(source, Upstreams):  # Changes of a tracked upstream make results stale. `tried` grows with the trial.
        unsure = not all(edge.tracked for edge in source.edges.values())
        source = replace(source, tried={})
    else:
        positions = [(str(i), read.position) for i, read in sorted(plan.asked.items()) if read.position]
        parts += positions
        unsure = bool(positions) and not pipeline.read_ahead  # The source is asked for later intervals in their turn.
    parts += [source_hash(function) for function in (source, pipeline.initial_state)]  # Random if it can't be hashed.
    if unsure:  # A hash that no earlier call had: each interval's position decides whether its result stays.
        parts.append(uuid.uuid4())
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def _retention(trial: Trial) -> RetentionPolicy:
    """Return the policy that keeps the fork and all states of the trial, however often an interval runs again."""
    length = trial.span.end - trial.span.start
    fits = length // timedelta(milliseconds=trial.length_ms) <= MOST_STATES
    return KeepYounger(length + timedelta(milliseconds=1)) if fits else KeepLast(MOST_STATES)


def _renew(root: str, trial: Trial, now_ms: int, keep: timedelta) -> Trial:
    trial = replace(trial, ends_ms=_later(now_ms, keep))
    if not renew_trial(root, trial):
        _clean_up_removed(root, trial)
    return trial


def _name_of_trial(pipeline: Pipeline, first: Interval) -> str:
    return f"{first.start:%Y%m%dT%H%M}-{code_hash(pipeline.processor, pipeline.name)[:8]}"


def plan_trial(
    spark: SparkSession | None,
    pipeline: Pipeline,
    intervals: Sequence[Interval],
    root: str,
    *,
    code: str,
    name: str,
    savepoint: str | None,
) -> TrialPlan:
    """Check that the intervals can be tried, and choose the state that the trial begins from. Write nothing.

    With `spark`, ask the source for each interval, or only for the first one if the pipeline reads its own output.
    Without, don't ask the source and don't check the schemas of input and state.
    """
    check_no_trial(root, "other trial")
    check_in_order(intervals)
    production = locate(root, pipeline.name)
    there = read_log(production.storage)
    first, last = intervals[0], intervals[-1]
    hashed = code_hash(pipeline.processor, pipeline.name)
    before = read_trial(root, pipeline.name, name)
    forked = _find_fork(pipeline, root, before)
    base, target, source = _base(there, pipeline, first, production.storage.url, savepoint, forked)
    if isinstance(target, Savepoint):
        check_restored(there, pipeline.name, target.content)
    else:
        check_not_tried(there, pipeline.name, first, target)
    _check_cut(there, pipeline, Interval(first.start, last.end), intervals)
    # Check the newest state too: once the code is deployed, the next interval starts from it.
    newest = newest_state(there)
    known = intervals[:1] if _reads_itself(pipeline) or not pipeline.read_ahead else intervals
    asked = ask_source(spark, pipeline, known, root) if spark is not None else {}
    for content in (base, there.whole(newest.id).content if newest is not None else None):
        if spark is not None and content is not None:
            check_fits(spark, pipeline, first, asked[first], content, there)
    made = Trial(
        name=name,
        pipeline=pipeline.name,
        code=code,
        code_hash=hashed,
        code_version=code_version(pipeline),
        span=Interval(first.start, last.end),
        length_ms=first.end_ms - first.start_ms,
        attempt=str(uuid.uuid4()),
        base=_trial_base(base, target, savepoint),
        ends_ms=0,
    )
    if before is not None:
        check_same_trial(before, made)
        _check_same_reads(pipeline, root, before)
        span = Interval(made.span.start, max(made.span.end, before.span.end))
        made = replace(made, attempt=before.attempt, span=span, base=before.base)
    # If the input comes from a tried upstream, it differs from production's on purpose.
    tried = isinstance(pipeline.source, Upstreams) and pipeline.source.tried
    other = () if tried else other_input(there, asked)
    return TrialPlan(trial=made, before=before, source=source, target=target, asked=asked, other_input=other)


def _check_same_reads(pipeline: Pipeline, root: str, before: Trial) -> None:
    """Raise `UsageError` if the trial read an upstream in production and would now read its trial, or vice versa.

    Otherwise the trial would keep the earlier results, which have another input, beside the new ones.
    """
    at, source = root_of_trial(root, pipeline.name, before.name), pipeline.source
    tried = source.tried if isinstance(source, Upstreams) else {}
    for interval, read in reads_of_trial(at, before) if isinstance(source, Upstreams) else ():
        above = root_of_edge(read.edge.root, at)
        one = tried.get((production_root(above), read.edge.pipeline))
        from_trial = one is not None and read.span.end > one.span.start
        if read.edge.pipeline != pipeline.name and from_trial != (above != production_root(above)):
            places = (f"its trial {before.name!r}", "production")
            now, then = places if from_trial else places[::-1]
            raise UsageError(
                f"trial {before.name!r} of {pipeline.name!r}, {interval}: it read {read.edge.pipeline} from {then}, but this call reads {now}\n"
                "Give the new trial another name, or remove the existing trial first:\n"
                + command_line("trials", root=root, pipeline=pipeline.name, remove=before.name)
            )


def reads_of_trial(at: str, trial: Trial) -> Iterator[tuple[Interval, InputRead]]:
    """Yield (interval of the trial, what it read of one upstream). `at`: The trial's root."""
    own = read_log(locate(at, trial.pipeline).storage)
    outputs = own.outputs_near(trial.span)
    own.entries.load(n for _, n in outputs)
    yield from ((interval, read) for interval, n in outputs for read in inputs_in(own.entries[n]))


def _trial_base(base: Content | None, target: Savepoint | int | None, savepoint: str | None) -> TrialBase | None:
    if base is None:
        return None
    base_id = target.checkpoint_id if isinstance(target, Savepoint) else target or 0
    return TrialBase(id=base_id, digest=base.digest, savepoint=savepoint)


def _base(
    there: Log,
    pipeline: Pipeline,
    first: Interval,
    folder: str,
    savepoint: str | None,
    forked: tuple[int, Content] | None,
) -> tuple[Content | None, int | Savepoint | None, str]:
    """Return (content, source, folder's URL) of the state that the trial begins from.

    `source`: The id of a checkpoint, or a savepoint. Empty state has no content and no source (None). `forked`: The
    checkpoint that an earlier call forked (`_find_fork`). It stays the base if production has dropped it.
    """
    if savepoint is not None:
        saved = read_savepoint(open_storage(savepoint))
        if saved.content.interval.end != first.start:
            raise UsageError(
                f"the savepoint {savepoint} holds the state at {format_instant(saved.content.interval.end)}, "
                f"but the trial begins at {format_instant(first.start)}\nBegin the trial where the savepoint ends"
            )
        return saved.content, saved, savepoint
    try:
        found = plan_base(there, pipeline.name, first, Permissions(replace_overlapping=True), to_ms(pipeline.start))
    except StateUnusable as error:
        if forked is not None and forked[0] not in there.retained and forked[1].interval.end == first.start:
            return forked[1], forked[0], folder
        raise UsageError(
            f"{pipeline.name}: a trial can't begin at {format_instant(first.start)}: production has no valid state at that time\n"
            f"The trial can begin at {_beginnings(there, pipeline)}, or from a savepoint (--savepoint)"
        ) from error
    return (None, None, folder) if found is None else (found.content, found.id, folder)


def _find_fork(pipeline: Pipeline, root: str, before: Trial | None) -> tuple[int, Content] | None:
    """Return (id, content) of the production checkpoint from which an earlier `try_code` began this trial; else None.

    The content is read from the trial's own log, whose first record is the fork, because production may have dropped
    the checkpoint since.
    """
    if before is None or before.base is None or before.base.savepoint is not None:
        return None
    own = read_log(locate(root_of_trial(root, pipeline.name, before.name), pipeline.name).storage)
    record = own.of_attempt(before.attempt)
    return (before.base.id, record.content) if isinstance(record, Record) else None


def _beginnings(there: Log, pipeline: Pipeline) -> str:
    """Return in words where a trial can begin: the pipeline's start, and the ends of the last usable checkpoints."""
    ends = sorted({kept.interval.end for kept in valid_states(there)})
    return " or ".join([f"{format_instant(pipeline.start)}, the pipeline's start", *map(format_instant, ends[-5:])])


def _check_cut(there: Log, pipeline: Pipeline, span: Interval, intervals: Sequence[Interval]) -> None:
    """Raise `UsageError` if production has results for this span in intervals with other boundaries.

    Results of such intervals could not be compared with the trial's, and the trial could not be deployed.
    """
    cut = {i for i, _ in there.outputs_near(span) if i.overlaps(span)} - {*intervals}
    if cut:
        other = min(cut)
        raise UsageError(
            f"{pipeline.name}: production has a result of {other}, but the trial's first interval is {min(intervals)}: the boundaries differ\n"
            f"Use the length of production's intervals: --every {format_duration(other.end - other.start)}"
        )


def _reads_itself(pipeline: Pipeline) -> Upstreams | None:
    """Return the pipeline's source if it reads the pipeline's own output; else None."""
    source = pipeline.source
    if not isinstance(source, Upstreams) or all(edge.pipeline != pipeline.name for edge in source.edges.values()):
        return None
    return source


def ask_source(
    spark: SparkSession, pipeline: Pipeline, intervals: Sequence[Interval], root: str
) -> dict[Interval, Read]:
    with in_zone_of(spark, pipeline.time_zone):
        return {interval: read_source(spark, pipeline, interval, root) for interval in intervals}


def other_input(there: Log, asked: Mapping[Interval, Read]) -> tuple[Interval, ...]:
    """Return the intervals whose input has changed: their source position now differs from the recorded position.

    Intervals without a recorded position are left out.
    """
    recorded = {}
    for record in sorted(there.completed(), key=lambda r: r.id):
        if record.content.kind == "interval":
            recorded[record.content.interval] = record.content.source_position
    # A record is JSON, which has lists in place of tuples. Convert the new positions alike before comparing.
    now = {i: json.loads(json.dumps(read.position)) for i, read in asked.items()}
    return tuple(i for i in asked if recorded.get(i) and recorded[i] != now[i])


def _fork(plan: TrialPlan, pipeline: Pipeline, root: str, own: str) -> float:
    """Fork the state that the trial begins with into the trial's root (`own`). Return seconds; 0 if it was forked."""
    if plan.target is None:
        return 0.0
    began = time.monotonic()
    into = locate(own, pipeline.name)
    log = read_log(into.storage)
    if log.of_attempt(plan.trial.attempt) is not None:
        return 0.0
    if log.head_id:
        raise UsageError(
            f"trial {plan.trial.name!r} can't begin: its folder has results of another trial of this name\nRemove them, and try again:\n"
            + command_line("trials", root=root, pipeline=pipeline.name, remove=plan.trial.name)
        )
    try:
        fork(
            open_storage(plan.source),
            plan.target,
            into,
            run=own_run(f"trial__{plan.trial.name}"),
            attempt=plan.trial.attempt,
            pipeline_start_ms=to_ms(pipeline.start),
        )
    except CairnError:
        # Ignore the error if another process, which runs this trial at the same time, has made the fork.
        if read_log(into.storage).of_attempt(plan.trial.attempt) is None:
            raise
    return time.monotonic() - began


def _check_there(root: str, trial: Trial, error: Exception | None = None) -> None:
    """Raise `UsageError` if the trial was removed, even if another trial of the same name exists now."""
    there = read_trial(root, trial.pipeline, trial.name)
    if there is None or there.attempt != trial.attempt:
        raise UsageError(f"trial {trial.name!r} of {trial.pipeline!r} was removed while it ran; try again") from error


def _clean_up_removed(root: str, trial: Trial, error: Exception | None = None) -> None:
    """If the trial was removed while it ran, delete the files that it has written since, and raise `UsageError`."""
    try:
        _check_there(root, trial, error)
    except UsageError:
        if read_trial(root, trial.pipeline, trial.name) is None:
            remove_trial_named(root, trial.pipeline, trial.name)
        raise


def _later(now_ms: int, keep: timedelta) -> int:
    return now_ms + keep // timedelta(milliseconds=1)
