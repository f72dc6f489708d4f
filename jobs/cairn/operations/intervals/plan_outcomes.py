"""Plan what a run of several intervals keeps and computes, before anything runs."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING

from cairn.operations.intervals.plan_interval import in_zone_of, would_be_made_of
from cairn.operations.intervals.plan_range import (
    REPROCESS,
    AskSource,
    Compute,
    Keep,
    Reprocess,
    check_in_order,
    keep_or_compute,
    plan_by_input,
)
from cairn.operations.intervals.read_source import Read, read_source
from cairn.operations.intervals.what_changed import MadeOf
from cairn.pipeline import Interval, Pipeline
from cairn.shipping.ship_processor import code_of_one_call
from cairn.upstream_sources import Upstreams
from state_backend.chains.judge_inputs import Chains
from state_backend.checkpoint.interval_results import Result, results_of
from state_backend.checkpoint.location import locate
from state_backend.checkpoint.log import Log, read_newest
from state_backend.values.errors import UsageError
from state_backend.values.records import NO_PERMISSIONS, Permissions, Record, RunRef, own_run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one interval.

    Attributes:
        interval: The interval.
        computed: True if this call computed the interval, False if an earlier result stays.
        ours: True if this run committed the checkpoint, now or in an earlier try.
        checkpoint: Id of the checkpoint; None if a dry run would compute the interval.
        record: The record, if this run committed it, now or in an earlier try. Only `on_outcome` gets it. The outcomes
            that `run_intervals` returns have None, since the records of a long range would fill the memory.
        why: A sentence for the log.
    """

    interval: Interval
    computed: bool
    why: str
    ours: bool = True
    checkpoint: int | None = None
    record: Record | None = None


@code_of_one_call()
def plan_intervals(
    spark: SparkSession | None,
    pipeline: Pipeline,
    intervals: Sequence[Interval],
    root: str,
    *,
    reprocess: Reprocess = "changed",
    permissions: Permissions = NO_PERMISSIONS,
    run: RunRef | None = None,
) -> list[Outcome]:
    """Return what `run_intervals` would do now with each interval, and why. Write nothing.

    A re-run may give another result. Then `run_intervals` also computes later intervals that this plan keeps; their
    outcome says so.
    """
    check_range(intervals, reprocess)
    run = run or own_run(f"direct__{uuid.uuid4()}")
    _, there = results_there(pipeline, root, intervals)
    outcomes, again = list[Outcome](), None
    for interval in intervals:
        result = there.get(interval)
        decision = keep_or_compute(result, reprocess, run)
        if isinstance(decision, AskSource):
            assert result is not None
            if spark is None:
                decision = Compute(why=f"except if code and input are the same as for checkpoint {result.id}")
            else:
                with in_zone_of(spark, pipeline.time_zone):
                    decision = plan_by_input(result, made_of_now(spark, pipeline, interval, root, permissions))
        if isinstance(decision, Keep):
            why = (
                decision.why
                if again is None
                else f"{decision.why}; computed again if the new result of {again} differs"
            )
            outcomes.append(kept(interval, decision, why))
        else:
            again = again or (interval if result is not None else None)
            permissions = of_later(permissions)
            outcomes.append(Outcome(interval=interval, computed=True, why=decision.why))
    return outcomes


def kept(interval: Interval, decision: Keep, why: str) -> Outcome:
    return Outcome(interval=interval, computed=False, ours=decision.ours, checkpoint=decision.checkpoint, why=why)


def of_later(permissions: Permissions) -> Permissions:
    """Return the permissions of the intervals after a computed interval.

    They start from its checkpoint, so they need no permission for the first interval's base.
    """
    return Permissions(replace_overlapping=permissions.replace_overlapping)


def made_of_now(
    spark: SparkSession, pipeline: Pipeline, interval: Interval, root: str, permissions: Permissions
) -> MadeOf:
    return would_be_made_of(spark, pipeline, interval, read_source(spark, pipeline, interval, root), permissions)


def committed_alike(
    spark: SparkSession, pipeline: Pipeline, interval: Interval, root: str, *, run: RunRef, permissions: Permissions
) -> tuple[Result | None, Read | None]:
    """Return another run's committed result of an interval if the same code computed it from the same input.

    A run that was cleared gets no result, since a user clears a run to compute it again.
    """
    there = None if run.clear_number else results_there(pipeline, root, [interval])[1].get(interval)
    if there is None or there.input_hash is None or not isinstance(keep_or_compute(there, "changed", run), AskSource):
        return None, None
    with in_zone_of(spark, pipeline.time_zone):
        read = read_source(spark, pipeline, interval, root)
        alike = isinstance(plan_by_input(there, would_be_made_of(spark, pipeline, interval, read, permissions)), Keep)
    return there if alike else None, read


def check_range(intervals: Sequence[Interval], reprocess: str) -> None:
    if reprocess not in REPROCESS:
        raise UsageError(f"reprocess {reprocess!r} is not one of {', '.join(REPROCESS)}")
    check_in_order(intervals)


def results_there(pipeline: Pipeline, root: str, intervals: Sequence[Interval]) -> tuple[Log, dict[Interval, Result]]:
    start = Interval(pipeline.start, pipeline.start + timedelta(milliseconds=1))
    log = read_newest(locate(root, pipeline.name).storage)
    found = results_of(log, intervals, start)
    if isinstance(pipeline.source, Upstreams):
        for interval, verdict in Chains().judged(root, pipeline.name, log).items():
            if interval in found and verdict.kind == "stale" and found[interval].spoilt is None:
                found[interval] = replace(found[interval], spoilt=verdict.why)
    return log, found
