"""Promote a trial: production takes over the code, from the next interval on or for past intervals too.

For past intervals, production runs the trial's intervals again. Each is committed only if its state and output equal
the trial's. So production gets exactly the results that were reviewed. At the first difference the promotion stops, and
production keeps its own results from that interval on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cairn.operations.intervals.plan_interval import check_fits, in_zone_of
from cairn.operations.intervals.process_interval import OnShards
from cairn.operations.intervals.read_source import read_source
from cairn.operations.intervals.run_intervals import OnOutcome, Outcome, run_intervals
from cairn.operations.intervals.what_changed import made_of, what_changed
from cairn.operations.place import Place
from cairn.pipeline import Interval, Pipeline
from cairn.shipping.ship_processor import code_hash
from cairn.spark.session import check_running, use_this_python
from cairn.trials.compare_trial import compare_trial, comparison_lines, match_of, outdated_lines
from cairn.trials.try_code import ask_source, other_input, reads_of_trial
from cairn.upstream_sources import Upstreams
from state_backend.chains.judge_inputs import Chains, root_of_edge
from state_backend.chains.pin_inputs import Reader, check_earlier
from state_backend.checkpoint.choose_base import plan_base
from state_backend.checkpoint.location import locate
from state_backend.checkpoint.log import Log, read_log
from state_backend.checkpoint.newest_state import newest_state
from state_backend.checkpoint.rewind import plan_rewind
from state_backend.checkpoint.trials import (
    check_no_trial,
    find_trial,
    intervals_of_trial,
    production_root,
    root_of_trial,
)
from state_backend.inspection.chain_of import trials_of_chain
from state_backend.inspection.compare_logs import Made, made_within
from state_backend.inspection.compare_runs import describe_comparison
from state_backend.values.airflow_commands import command_line
from state_backend.values.errors import CairnError, NotAsTried, UsageError
from state_backend.values.frozen import frozen
from state_backend.values.intervals import format_instant, to_ms
from state_backend.values.marks import Trial
from state_backend.values.operation_parameters import PromoteTrial
from state_backend.values.records import Content, OutputFile, Permissions, Record, own_run
from state_backend.values.retention import AnyOf, KeepLast

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def carry_out_promotion(request: PromoteTrial, place: Place, *, agreed: bool = True) -> dict[str, Any]:
    """Promote the trial of the request. If not `agreed`, only plan and compare, and write nothing.

    `agreed` is False if a person must still agree. An operator of Airflow asks the person before it calls this.
    """
    pipeline, root = place.load(request), request.root
    spark = place.connect(pipeline, "promote")
    first = find_trial(root, pipeline.name, request.trial)
    trials, without = trials_of_chain(root, first) if request.chain else ([first], [])
    requests = [request, *(replace(request, code=trial.code, pipeline=trial.pipeline) for trial in trials[1:])]
    pipelines = [pipeline, *map(place.load, requests[1:])]
    # Nothing is promoted before all pipelines are checked.
    plans = [
        plan_promotion(spark, one, root, trial=first.name, past=request.past, together=trials) for one in pipelines
    ]
    if without:
        place.say(
            f"not in the trial: {', '.join(without)}. Afterwards their results may be out of date; to see them, run:\n"
            + command_line("status", root=root, pipeline=without[0])
        )
    said = list[dict[str, Any]]()
    for plan in plans:
        counts = {"again": len(plan.again), "behind": len(plan.behind)}
        said.append({"pipeline": plan.trial.pipeline, "trial": first.name, "promoted": agreed} | counts)
        # Tell how to undo the promotion before the first commit, because this process may be killed later.
        said[-1] |= _tell_way_back(request, place, plan) if agreed else _tell_plan(request, place, plan, first.pipeline)
    if not agreed:
        return said[0] | {"dependants": said[1:]}
    for one, plan, about in zip(pipelines, plans, said, strict=True) if request.past else ():
        outcomes = promote_past(spark, one, root, plan, on_outcome=place.on_outcome)
        about["checkpoint"] = outcomes[-1].checkpoint if outcomes else None
        place.say(f"{one.name}: {len(plan.again)} intervals have the results of the trial: their digests are equal")
    for one, asked in zip(pipelines, requests, strict=True):
        place.say(f"Let the DAG of {one.name} run {asked.code} from the next interval on")
    return said[0] | {"dependants": said[1:]}


def _tell_plan(request: PromoteTrial, place: Place, plan: PromotionPlan, head: str) -> dict[str, Any]:
    match = match_of(request.match, plan.trial.pipeline, head)
    trial, found = compare_trial(request.root, plan.trial.pipeline, plan.trial.name, match, 3)
    comparison = describe_comparison(found)
    for line in comparison_lines(trial, comparison):
        place.say(line)
    place.say(
        f"would run again in production: {len(plan.again)} intervals of the trial, {plan.trial.span}"
        if request.past
        else "this code can continue from production's state: no interval is run again"
    )
    if plan.behind:
        place.say(f"and {len(plan.behind)} later intervals, which the trial did not run")
    return {"comparison": comparison}


def _tell_way_back(request: PromoteTrial, place: Place, plan: PromotionPlan) -> dict[str, Any]:
    name = plan.trial.pipeline
    back = restore_command(read_log(locate(request.root, name).storage), plan, request.root)
    if back is not None or request.past:
        how = f"restore its state:\n{back}" if back else "run these intervals again: no checkpoint is before them"
        place.say(f"To go back, put the old code into the DAG of {name}, and {how}")
    return {"back": back, "checkpoint": None}


@frozen
class PromotionPlan:
    """The intervals that a promotion would run again in production, and the checkpoint that undoes the promotion."""

    trial: Trial
    # The trial's intervals that production runs again; empty if only the next interval gets the new code.
    again: tuple[Interval, ...]
    behind: tuple[Interval, ...]  # Production's intervals after the trial's last one, which run again too.
    # Record of the checkpoint to which `cairn restore` returns production, to undo the promotion. None if production
    # has no checkpoint, or starts from empty state at the first interval of `again`.
    back: Record | None


def plan_promotion(
    spark: SparkSession,
    pipeline: Pipeline,
    root: str,
    *,
    trial: str | None = None,
    past: bool = False,
    together: Sequence[Trial] = (),
) -> PromotionPlan:
    """Check whether production can take over a trial's code. Write nothing.

    Args:
        spark: A session, classic or Spark Connect.
        pipeline: The pipeline with the new code.
        root: URL of the folder that holds the pipelines.
        trial: Name of the trial; None for the pipeline's only trial.
        past: True plans to run the trial's intervals again in production.
        together: The trials of a chain that are promoted together, upstream first.

    Raises:
        UsageError: The code is not the code of the trial, or it can't continue from production's state. With `past`,
            also if the trial lacks intervals, or if the input or production's state before the trial has changed since.
        StaleStateError: With `past`, an input of an earlier interval has changed.
    """
    check_running(spark)
    use_this_python(spark)
    check_no_trial(root, "promotion")
    known = find_trial(root, pipeline.name, trial)
    hashed = code_hash(pipeline.processor, pipeline.name)
    if hashed != known.code_hash:
        raise UsageError(
            f"the code of {pipeline.name!r} has hash {hashed[:12]}, but trial {known.name!r} ran code with hash {known.code_hash[:12]} ({known.code})\n"
            "Only tried code can be promoted: give the trial's code, or try this code first"
        )
    there = read_log(locate(root, pipeline.name).storage)
    if not past:
        state = newest_state(there)
        newest = None if state is None else there.whole(state.id)
        if newest is not None:
            _check_next(spark, pipeline, newest, there, root)
        return PromotionPlan(trial=known, again=(), behind=(), back=newest)
    own = read_log(locate(root_of_trial(root, pipeline.name, known.name), pipeline.name).storage)
    tried = made_within(own, known.span)
    again = tuple(intervals_of_trial(known, tried))
    missing = [i for i in again if i not in tried]
    if missing:
        raise UsageError(
            f"trial {known.name!r} of {pipeline.name!r} is not complete: {len(missing)} of its {len(again)} intervals are missing, "
            f"the first is {missing[0]}\nRun the same cairn try again to complete it"
        )
    base = plan_base(there, pipeline.name, again[0], Permissions(), to_ms(pipeline.start))
    digest = None if base is None else base.content.digest
    if digest != (None if known.base is None else known.base.digest):
        raise UsageError(
            f"the state of {pipeline.name!r} at {format_instant(again[0].start)} is not the state that trial {known.name!r} began from\n"
            "An earlier interval was run again since, or the trial began from a savepoint. Remove the trial, and try again from the present state"
        )
    _check_inputs(spark, pipeline, root, known, own, together or (known,))
    check_earlier(Chains(), Reader(root=root, pipeline=pipeline.name, interval=again[0], schedule=None), there)
    end = max((c.content.interval.end for c in there.completed()), default=known.span.end)
    later = there.outputs_near(Interval(known.span.end, end)) if end > known.span.end else []
    behind = sorted(i for i, _ in later if i.start >= known.span.end)
    return PromotionPlan(trial=known, again=again, behind=tuple(_in_row(again[-1], behind)), back=base)


def promote_past(
    spark: SparkSession,
    pipeline: Pipeline,
    root: str,
    plan: PromotionPlan,
    *,
    mode: str = "incremental",
    on_outcome: OnOutcome | None = None,
    on_shards: OnShards | None = None,
) -> list[Outcome]:
    """Run the trial's intervals again in production, then the later ones. After a failure, the same call continues.

    All checkpoints that exist before this call are retained until the first commit after this call. So `cairn restore`
    can undo the promotion.

    Args:
        spark: A session, classic or Spark Connect.
        pipeline: The pipeline with the new code.
        root: URL of the folder that holds the pipelines.
        plan: The plan of `plan_promotion` with `past=True`.
        mode: How checkpoints are stored: "incremental", "full" or "changelog".
        on_outcome: Function that gets each outcome with its record, and the progress.
        on_shards: Function that brings the rows to the shards and runs the job on each; None uses Spark.

    Returns:
        The outcome of each interval.

    Raises:
        NotAsTried: An interval's result differs from the trial's. The message names the interval and the cause. This
            interval and all later intervals do not change.
        CairnError: An interval failed, as in `run_intervals`.

    Example:
        plan = plan_promotion(spark, CLICKS, root, past=True)
        promote_past(spark, CLICKS, root, plan)
    """
    trial = plan.trial
    own = read_log(locate(root_of_trial(root, pipeline.name, trial.name), pipeline.name).storage)
    tried = made_within(own, trial.span)

    def as_tried(content: Content) -> None:
        wanted = tried.get(content.interval)
        if wanted is None:
            return  # The interval comes after the trial's last one, so there is nothing to compare.
        why = other_than_tried(wanted, content)
        if why is not None:
            raise NotAsTried(
                f"{pipeline.name} {content.interval}: its result differs from that of trial {trial.name!r}: {why}\n"
                "This interval was not committed, and later intervals are unchanged\n"
                "Remove the trial, and try again"
            )

    intervals = [*plan.again, *plan.behind]
    # The same promotion again keeps its results. A promotion of other results is another run.
    results = [(str(i), one.digest, sorted(map(_file, one.outputs))) for i, one in sorted(tried.items())]
    reviewed = hashlib.sha256(repr((trial.code_hash, results)).encode()).hexdigest()[:12]
    kept = read_log(locate(root, pipeline.name).storage)
    retention = AnyOf((pipeline.retention_of(intervals[0]), KeepLast(len(kept.retained) + len(intervals))))
    return run_intervals(
        spark,
        replace(pipeline, retention=retention),
        intervals,
        root,
        mode,
        reprocess="all",
        run=own_run(f"promote__{trial.name}__{reviewed}"),
        on_outcome=on_outcome,
        on_shards=on_shards,
        before_commit=as_tried,
    )


def other_than_tried(tried: Made, content: Content) -> str | None:
    """Return in words how production's new result (`content`) differs from the trial's (`tried`); None if it does not.

    If both have the same number of shards, the rows, sizes and checksums of the output files are compared; else the
    numbers of rows and the digests of their values.
    """
    what = []
    if content.digest != tried.digest:
        what.append(f"its state has digest {content.digest:016x}, the trial's {tried.digest:016x}")
    if tried.content is not None and _watermarks(tried.content) != _watermarks(content):
        what.append("its watermarks differ from the trial's")
    alike = tried.content is None or tried.content.parallelism == content.parallelism
    for late in (False, True):
        ours, theirs = ([f for f in files if f.late == late] for files in (content.outputs, tried.outputs))
        same = sorted(map(_file, ours)) == sorted(map(_file, theirs)) if alike else _have_same_rows(ours, theirs)
        if not same:
            rows, counts = "late rows" if late else "output", [sum(f.rows for f in files) for files in (ours, theirs)]
            what.append(f"its {rows} ({counts[0]} rows) differs from the trial's ({counts[1]})")
    if not what:
        return None
    return f"{'; '.join(what)}. {_cause(tried.content, content)}"


def _have_same_rows(ours: Sequence[OutputFile], theirs: Sequence[OutputFile]) -> bool:
    """Return True if the rows are equal, in any order and in any files. An unknown digest counts as different."""
    digests = [[f.digest for f in files if f.rows] for files in (ours, theirs)]
    if None in digests[0] + digests[1]:
        return False
    one, other = (sum(d or 0 for d in found) % 2**64 for found in digests)
    return one == other and sum(f.rows for f in ours) == sum(f.rows for f in theirs)


def _watermarks(content: Content) -> tuple[int | None, int | None]:
    return content.time.watermark_ms, content.time.late_watermark_ms


def _file(file: OutputFile) -> tuple[int, int, int]:
    return file.rows, file.handle.size_bytes, file.handle.crc32c


def _cause(tried: Content | None, content: Content) -> str:
    if tried is None:
        return "Cairn can't tell why: only digest and output of the trial's checkpoint remain"
    if found := what_changed(made_of(tried), made_of(content)):
        return f"The promotion has {'; '.join(found)}"
    if not content.source_position:
        return "The source records no position, so Cairn can't tell whether the input is the same"
    return "Code, settings and input are the same: the processor's results depend on something else, such as a clock or random numbers"


def _check_inputs(
    spark: SparkSession, pipeline: Pipeline, root: str, trial: Trial, own: Log, together: Sequence[Trial]
) -> None:
    """Raise `UsageError` if production would now read other input than the trial read. `own`: The trial's log."""
    whose = f"trial {trial.name!r} of {trial.pipeline!r}"
    if lines := outdated_lines(root, trial, unknown=False):
        raise UsageError(f"{whose} is out of date:\n" + "\n".join(lines))
    if not isinstance(pipeline.source, Upstreams):
        intervals = intervals_of_trial(trial, made_within(own, trial.span))
        if other := other_input(own, ask_source(spark, pipeline, intervals, root)):
            raise UsageError(
                f"{whose} read other input than the source has now, the first for {other[0]}\nRemove the trial, and try again:\n"
                + command_line("trials", root=root, pipeline=trial.pipeline, remove=trial.name)
            )
        return
    at, chains = root_of_trial(root, trial.pipeline, trial.name), Chains()
    begins = {one.pipeline: one.span.start for one in together}
    for interval, read in reads_of_trial(at, trial):
        name, above = read.edge.pipeline, root_of_edge(read.edge.root, at)
        in_production = production_root(above)
        together_with = name in begins and in_production == production_root(at)
        if above == in_production and together_with and read.span.end > begins[name]:
            raise UsageError(
                f"{whose}, {interval}: it read production's {name}, which the same call would replace\n"
                "Remove this trial, and try both in one call of cairn try, with --chain"
            )
        if above != in_production and not together_with:
            verdict = chains.judge_read(
                root, trial.pipeline, replace(read, edge=replace(read.edge, root=in_production))
            )
            if verdict is not None and verdict.kind != "unknown":
                raise UsageError(
                    f"{whose}, {interval}: it read trial {trial.name!r} of {name!r}, whose results are not those of production: {verdict.why}\n"
                    "Promote the trial of that pipeline first, or both in one call with --chain"
                )


def restore_command(log: Log, plan: PromotionPlan, root: str) -> str | None:
    """Return the `cairn restore` command that makes the state before the promotion production's newest state again.

    Return None if `plan.back` is None, or if its checkpoint can no longer be restored, for example because retention
    has dropped it.
    """
    if plan.back is None:
        return None
    try:
        plan_rewind(log, plan.back.id)
    except CairnError:
        return None
    return command_line("restore", plan.back.id, root=root, pipeline=plan.trial.pipeline, yes=True)


def _check_next(spark: SparkSession, pipeline: Pipeline, newest: Record, there: Log, root: str) -> None:
    interval = newest.content.interval
    length = interval.end - interval.start
    # The input of the next interval may not exist yet. The newest interval's input has the same columns.
    with in_zone_of(spark, pipeline.time_zone):
        read = read_source(spark, pipeline, Interval(interval.end - length, interval.end), root)
    check_fits(spark, pipeline, Interval(interval.end, interval.end + length), read, newest.content, there)


def _in_row(last: Interval, behind: Sequence[Interval]) -> list[Interval]:
    """Return the intervals of `behind` that follow the trial's last interval without a gap.

    Intervals after a gap are left to the user. `cairn status` names them.
    """
    row: list[Interval] = []
    for interval in behind:
        if interval.start != (row or [last])[-1].end:
            break
        row.append(interval)
    return row
