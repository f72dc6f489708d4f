"""Plan several intervals, and process them by one Spark job, up to the acknowledgements of their shards."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING

from cairn.operations.intervals.plan_chunk import (
    ChunkLimits,
    arrangement_of,
    following,
    of_interval,
    why_not_any,
    why_not_first,
    why_not_next,
    with_watermarks,
)
from cairn.operations.intervals.plan_interval import Attempt, IntervalPlan
from cairn.operations.intervals.process_interval import chains_at, check_read, plan_begun
from cairn.operations.intervals.prove_read import recorded_lengths, unproven
from cairn.pipeline import Interval, Pipeline
from cairn.range_sources import INTERVAL, number_of_interval
from cairn.rows.routing import PART, Inputs, Numbered, newest_events, route_together
from cairn.shard_jobs.chunk import ChunkAck, ChunkJob
from cairn.shard_jobs.interval import IntervalJob
from cairn.shard_jobs.run_on_shards import run_on_shards
from cairn.spark.file_scans import scans_of, scans_of_each
from cairn.spark.session import collect_once, is_lost
from cairn.spark_versions import is_connect
from state_backend.chains.judge_inputs import Chains
from state_backend.checkpoint.begin_attempt import Begun
from state_backend.checkpoint.location import Location
from state_backend.checkpoint.log import Log
from state_backend.checkpoint.prepare_content import ShardAck
from state_backend.values.inputs import InputRead

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger("cairn")

_EPOCH, _MICROSECOND = datetime(1970, 1, 1), timedelta(microseconds=1)


class Unproven(Exception):
    """Raised if the plan of a query over several intervals does not tell which files were read for which interval."""


def plan_together(
    spark: SparkSession, pipeline: Pipeline, at: Location, attempts: Iterable[Attempt], begun: Begun
) -> tuple[list[IntervalPlan], str | None]:
    """Plan the leading attempts that one job can compute. Return (plans, why the next attempt is left out, or None).

    If one query of the source has read all intervals, the first plan has the rows of all. `begun`: What the first
    attempt starts from.
    """
    plans: list[IntervalPlan] = []
    before = begun.log
    assert before is not None
    for attempt in attempts:
        try:
            if not plans:
                chains_at(pipeline, at, attempt, begun)
            plan = plan_begun(spark, pipeline, at, attempt, begun, last=plans[-1] if plans else None)
            why = why_not_any(pipeline, plan, attempt.read) or (
                why_not_next(plans[0].job, plan.job, before) if plans else why_not_first(plan)
            )
        except Exception as error:  # If the error persists, it is raised when the attempt is planned alone.
            if is_lost(error):
                raise
            why = f"{type(error).__name__}: {error}"
        if why is not None:
            log.info("%s %s: not computed together with the intervals before: %s", pipeline.name, attempt.interval, why)
            return plans, why
        if not plans and attempt.read is not None and attempt.read.together is not None:
            plan = _together(plan, *attempt.read.together)
        plans.append(plan)
        begun = following(begun, plan.job)
    return plans, None


def _together(plan: IntervalPlan, intervals: Sequence[Interval], rows: DataFrame) -> IntervalPlan:
    """Return the chunk's first plan with the rows of all intervals, in columns that are spelled as in the plan."""
    names = [*plan.inputs.rows.schema.names, INTERVAL]
    spelled = rows if names == rows.schema.names else rows.toDF(*names)
    together = Numbered(rows=spelled, number=number_of_interval(intervals))
    return replace(plan, inputs=replace(plan.inputs, together=together))


def plan_watermarks(spark: SparkSession, plans: Sequence[IntervalPlan]) -> list[IntervalPlan]:
    """Return the plans of a chunk with their watermarks. With an observed watermark, query the newest event times.

    The rows may change before the job reads them. So the caller checks the watermark at each commit (`begins_with`).
    """
    of = plans[0].job.event_time
    if of is None or of.rule != "observed":
        return [*plans]
    newest_us = _newest_events(spark, [plan.inputs for plan in plans[:-1]], of.column)
    jobs = with_watermarks([plan.job for plan in plans], newest_us)
    return [replace(plan, job=job) for plan, job in zip(plans, jobs, strict=True)]


def _newest_events(spark: SparkSession, inputs: Sequence[Inputs], column: str) -> list[int | None]:
    """Return each interval's newest event time in microseconds (wall times as if in UTC); None if no row has one."""
    rows = collect_once(spark, lambda: newest_events(inputs, column))
    found = {int.from_bytes(row[PART]): row["newest"] for row in rows}
    return [
        at if not isinstance(at, datetime) else (at - _EPOCH) // _MICROSECOND
        for at in map(found.get, range(len(inputs)))
    ]


def have_changed(at: Location, log: Log, inputs: Sequence[InputRead], chains: Chains | None = None) -> bool:
    """Return True if an upstream has replaced what an interval has read (`inputs`).

    `log`: The log of the reading pipeline. `chains`: Keeps the upstreams' logs that are read here, for later questions.
    """
    chains = chains or Chains()
    chains.log(at.root, at.pipeline, log)
    judged = [chains.judge_read(at.root, at.pipeline, read) for read in inputs if read.edge.tracked]
    return any(verdict is not None and verdict.kind != "unknown" for verdict in judged)


def as_it_is_now(at: Location, log: Log, job: IntervalJob) -> IntervalJob | None:
    """Return a copy of `job` that records how far the upstreams' logs are now. Its interval is committed next.

    Return None if an upstream has replaced what the interval has read. `log`: The log of the reading pipeline.
    """
    content, chains = job.content, Chains()
    if not content.inputs:
        return job
    if have_changed(at, log, content.inputs, chains):
        return None
    return replace(job, content=replace(content, fresh_at=chains.fresh_at(at.root, at.pipeline, content.inputs)))


def process_chunk(spark: SparkSession, plans: Sequence[IntervalPlan], limits: ChunkLimits) -> list[list[ShardAck]]:
    """Compute consecutive intervals by one Spark job. Return a list for each interval: the acks of its shards.

    The last intervals are missing if a shard reached a limit and left them out.
    """
    jobs = [plan.job for plan in plans]
    name, span = jobs[0].content.pipeline, (jobs[0].content.interval, jobs[-1].content.interval)
    log.info("%s: one Spark job computes %d intervals, from %s to %s", name, len(jobs), *span)
    job = ChunkJob(
        first=jobs[0],
        each=tuple((of_interval(jobs[0].content, one.content), one.event_time) for one in jobs),
        most_seconds=2 * limits.seconds,
        most_bytes=2 * limits.uploaded_bytes // jobs[0].parallelism,
    )
    found = _on_spark(spark, job, jobs, [plan.inputs for plan in plans])
    return [list(acks) for acks in zip(*(ack.acks for ack in found), strict=False)]


def _on_spark(
    spark: SparkSession, job: ChunkJob, jobs: Sequence[IntervalJob], inputs: Sequence[Inputs]
) -> list[ChunkAck]:
    def routed(parts: Sequence[bytes]) -> DataFrame:
        return route_together(spark, inputs, parts=parts, max_parallelism=job.max_parallelism)

    arrangement = arrangement_of(inputs[0], job.max_parallelism)
    check = _check_reads if inputs[0].together is None else _check_reads_together
    return run_on_shards(spark, job, routed, arrangement, partial(check, jobs))


def _check_reads_together(jobs: Sequence[IntervalJob], executed: DataFrame) -> None:
    """Raise `SourceError` unless the one query for all intervals has read the files that their positions list."""
    listed = [job.content.source_position for job in jobs if recorded_lengths(job.content.source_position) is not None]
    if not listed and not is_connect(executed):
        return
    files = [file for position in listed for file in position["files"]]
    # Equal entries of several intervals may be one file, which the query reads once, or several files: accept both.
    once = [*{json.dumps(file, sort_keys=True): file for file in files}.values()]
    span = Interval(jobs[0].content.interval.start, jobs[-1].content.interval.end)
    scans, shared = scans_of(executed), is_connect(executed)
    if unproven({"files": once}, scans, shared_cache=shared) is not None:
        check_read(jobs[0], span, {"files": files}, scans, shared)


def _check_reads(jobs: Sequence[IntervalJob], executed: DataFrame) -> None:
    """Raise `SourceError` if an interval read other files than its position says, `Unproven` if the plan can't tell."""
    shared = is_connect(executed)
    recorded = [recorded_lengths(job.content.source_position) is not None for job in jobs]
    if not shared and not any(recorded):
        return
    each = scans_of_each(executed, len(jobs))
    if each is None:
        # The plan lacks a branch: Spark removes an interval's branch if it finds that the branch is empty.
        if any(recorded) or scans_of(executed).cached:
            raise Unproven("the query's plan does not tell which interval has read which files")
        return
    if any(scans.reused for of, scans in zip(recorded, each, strict=True) if of):
        raise Unproven("intervals share what the query has read")
    for job, scans in zip(jobs, each, strict=True):
        check_read(job, job.content.interval, job.content.source_position, scans, shared)
