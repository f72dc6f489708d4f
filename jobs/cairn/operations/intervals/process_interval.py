"""Process one interval of a pipeline, up to *prepared*. The commit is a separate step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from cairn.operations.intervals.plan_interval import Attempt, IntervalPlan, in_zone_of, plan_interval, plan_next
from cairn.operations.intervals.plan_reuse import why_recompute
from cairn.operations.intervals.prove_read import recorded_lengths, unproven
from cairn.operations.intervals.read_source import input_errors
from cairn.pipeline import Interval, Pipeline
from cairn.rows.arrange_rows import plan_arrangement
from cairn.rows.routing import Inputs, route, route_in_order
from cairn.shard_jobs.interval import IntervalJob
from cairn.shard_jobs.run_on_shards import run_on_shards
from cairn.spark.file_scans import Scans, scans_of
from cairn.spark.session import check_running, use_this_python
from cairn.spark_versions import is_connect
from cairn.upstream_sources import Upstreams
from state_backend.chains.judge_inputs import Chains
from state_backend.chains.pin_inputs import Reader, check_earlier
from state_backend.checkpoint.begin_attempt import Begun, begin
from state_backend.checkpoint.location import Location
from state_backend.checkpoint.log import Log, read_log
from state_backend.checkpoint.prepare_content import ShardAck, mismatches_in_words
from state_backend.checkpoint.prepared_attempts import load_prepared
from state_backend.inspection.verify import offering_intact
from state_backend.values.errors import SourceError, StateUnusable
from state_backend.values.human_units import in_words
from state_backend.values.intervals import to_ms
from state_backend.values.records import Prepared

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger("cairn")

OnShards: TypeAlias = "Callable[[SparkSession, IntervalJob, Inputs], list[ShardAck]]"


def process_interval(
    spark: SparkSession,
    pipeline: Pipeline,
    at: Location,
    attempt: Attempt,
    *,
    before: Log | None = None,
    on_begin: Callable[[Mapping[str, str]], None] | None = None,
    on_shards: OnShards | None = None,
) -> Prepared:
    """Compute an attempt from its base to *prepared*, or return what an earlier try of the same run prepared.

    `before`: The log, if the caller has just read it. `on_begin`: Gets the plan's settings before the shards run.
    `on_shards`: Brings the rows to the shards and runs the job on each; None uses Spark.
    """
    check_running(spark)
    use_this_python(spark)
    # The source runs in the pipeline's zone too, because it may parse timestamps from text.
    with in_zone_of(spark, pipeline.time_zone):
        started_ns = time.monotonic_ns() - (attempt.read.waited_ns if attempt.read is not None else 0)
        begun = begin(
            at,
            attempt.interval,
            permissions=attempt.permissions,
            pipeline_start_ms=to_ms(pipeline.start),
            schedule=pipeline.declared_schedule,
            log=before,
        )
        plan = plan_begun(spark, pipeline, at, attempt, begun, chains_at(pipeline, at, attempt, begun))
        if attempt.earlier is not None:
            reused = _reuse(at, plan.job, plan.options, *attempt.earlier)
            if reused is not None:
                return reused
        if on_begin is not None:
            on_begin(plan.options)
        with offering_intact(at.storage, begun.base):
            return _compute(spark, plan, at, on_shards or _on_spark, started_ns)


def chains_at(pipeline: Pipeline, at: Location, attempt: Attempt, begun: Begun) -> Chains | None:
    """Return the logs of the pipeline's upstreams; None for a pipeline without upstreams.

    Raise `StaleStateError` if the base is out of date because of an input, unless the attempt allows a stale base.
    """
    if not isinstance(pipeline.source, Upstreams) or begun.log is None:
        return None
    chains = Chains()
    chains.log(at.root, at.pipeline, begun.log)
    if not attempt.permissions.allow_stale_base:
        reader = Reader(root=at.root, pipeline=at.pipeline, interval=attempt.interval, schedule=None)
        check_earlier(chains, reader, begun.log)
    return chains


def plan_begun(
    spark: SparkSession,
    pipeline: Pipeline,
    at: Location,
    attempt: Attempt,
    begun: Begun,
    chains: Chains | None = None,
    last: IntervalPlan | None = None,
) -> IntervalPlan:
    """Plan an attempt that has begun, and log what it starts from and reads.

    `last`: The plan of the interval before, if the attempt is planned before that interval is committed.
    """
    state = f"checkpoint {begun.base.id} ({begun.base.content.totals.entries} entries)" if begun.base else "empty state"
    log.info("%s %s: attempt %s starts from %s", pipeline.name, attempt.interval, attempt.id, state)
    alike = plan_next(pipeline, attempt, begun, last) if last is not None else None
    plan = alike or plan_interval(spark, pipeline, at.url, attempt, begun, chains)
    if position := plan.job.content.source_position:
        log.info("%s %s: source position %s", pipeline.name, attempt.interval, position)
    return plan


def _compute(spark: SparkSession, plan: IntervalPlan, at: Location, on_shards: OnShards, started_ns: int) -> Prepared:
    job, content = plan.job, plan.job.content
    with input_errors(content.pipeline, content.interval):
        planned_ns = time.monotonic_ns()
        acks = on_shards(spark, job, plan.inputs)
        return finish_attempt(job, at, acks, (planned_ns - started_ns) / 1e9, (time.monotonic_ns() - planned_ns) / 1e9)


def finish_attempt(job: IntervalJob, at: Location, acks: list[ShardAck], plan_s: float, spark_s: float) -> Prepared:
    """Prepare and log an attempt, from the acks of its shards. `plan_s`, `spark_s`: Seconds of planning and job."""
    content, finished_ns, plan_us, spark_us = job.content, time.monotonic_ns(), int(plan_s * 1e6), int(spark_s * 1e6)
    prepared = job.finish(at, acks, plan_us, spark_us)
    totals = prepared.content.totals
    log.info(
        "%s %s: prepared: %d bytes downloaded, %d from caches; %d rows in, %d out, %d keys touched, %d bytes changed, %d uploaded, "
        "state %d bytes in %d files",
        *(content.pipeline, content.interval, totals.downloaded_bytes, totals.cached_bytes),
        *(totals.input_rows, totals.output_rows, totals.keys_touched),
        *(totals.changed_bytes, totals.uploaded_bytes, totals.state_bytes, totals.state_files),
    )
    for text in mismatches_in_words(acks):
        log.warning("%s %s: %s", content.pipeline, content.interval, text)
    # The last log line shows the durations of all phases: a reader sees why an interval was slow.
    prepare_us = (time.monotonic_ns() - finished_ns) // 1000
    phases = prepared.content.durations_us | {"prepare": prepare_us}
    log.info("%s %s: %s", content.pipeline, content.interval, in_words(phases, plan_us + spark_us + prepare_us))
    return prepared


def _on_spark(spark: SparkSession, job: IntervalJob, inputs: Inputs) -> list[ShardAck]:
    arrangement = plan_arrangement(
        inputs.rows.schema,
        inputs.initial.schema if inputs.initial is not None else None,
        key=inputs.key,
        initial_key=inputs.initial_key,
        order_by=inputs.order_by,
    )

    place = route_in_order if arrangement is None else route

    def routed(parts: Sequence[bytes]) -> DataFrame:
        return place(spark, inputs, parts=parts, max_parallelism=job.max_parallelism)

    return run_on_shards(spark, job, routed, arrangement, partial(_check_read, job))


def _check_read(job: IntervalJob, executed: DataFrame) -> None:
    """Raise `SourceError` unless the query has read the files that the source's position lists."""
    shared = is_connect(executed)
    if not shared and recorded_lengths(job.content.source_position) is None:
        return  # There is nothing to compare. To walk over the plan of a classic session would take milliseconds.
    check_read(job, job.content.interval, job.content.source_position, scans_of(executed), shared)


def check_read(job: IntervalJob, of: Interval, position: Mapping[str, Any], scans: Scans, shared: bool) -> None:
    if why := unproven(position, scans, shared_cache=shared):
        raise SourceError(f"pipeline {job.content.pipeline!r}, {of}: {why}\nNothing was committed")


def _reuse(
    at: Location, job: IntervalJob, options: Mapping[str, str], attempt: str, earlier: Mapping[str, str]
) -> Prepared | None:
    """Return the attempt that an earlier try of the same run prepared, if this try would compute the same; else None.

    `attempt`, `earlier`: Id and settings of that attempt. `options`: This try's settings. The decision is logged.
    """
    try:
        prepared = load_prepared(at, attempt)
    except StateUnusable:
        prepared = None
    content = job.content
    why = why_recompute(
        read_log(at.storage), prepared, earlier, content, options, initial_state=job.initial_schema is not None
    )
    if why is not None:
        log.info(
            "%s %s: attempt %s of an earlier try is not used: %s", content.pipeline, content.interval, attempt, why
        )
        return None
    assert prepared is not None
    log.info(
        "%s %s: try %d has prepared attempt %s, and base, code, options and input are unchanged: this attempt is used, and nothing is "
        "computed again",
        *(content.pipeline, content.interval, prepared.content.run.try_number, attempt),
    )
    return prepared
