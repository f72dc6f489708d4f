"""Process one interval of a pipeline, up to *prepared*. The commit is a separate step."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from cairn.operations.coordinator_of import coordinator_of
from cairn.operations.plan_interval import Attempt, IntervalPlan, Read, ask_pipeline, in_zone_of, plan_interval
from cairn.operations.plan_reuse import Earlier, Now, Recompute, plan_reuse
from cairn.operations.prove_read import recorded_lengths, unproven
from cairn.operations.read_source import input_errors
from cairn.pipeline import Pipeline
from cairn.rows.arrange_rows import plan_arrangement
from cairn.rows.routing import Inputs, route, route_in_order
from cairn.shard_jobs.interval import IntervalJob
from cairn.shard_jobs.run_on_shards import run_on_shards
from cairn.spark.file_scans import scans_of
from cairn.spark.session import check_running, use_this_python
from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.checkpoint.coordinator import Begun, Coordinator
from state_backend.checkpoint.prepare_content import ShardAck, mismatches_in_words
from state_backend.inspection.verify import offering_intact
from state_backend.values.errors import SourceError, StateUnusable
from state_backend.values.intervals import to_ms
from state_backend.values.phases import in_words
from state_backend.values.records import Prepared

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger("cairn")

OnShards: TypeAlias = "Callable[[SparkSession, IntervalJob, Inputs], list[ShardAck]]"


def process_interval(
    spark: SparkSession,
    pipeline: Pipeline,
    root: str,
    attempt: Attempt,
    *,
    coordinator: Coordinator | None = None,
    on_begin: Callable[[Mapping[str, str]], None] | None = None,
    on_shards: OnShards | None = None,
    read: Read | None = None,
) -> Prepared:
    """Compute an attempt from its base to *prepared*, or return what an earlier try prepared if nothing changed since."""
    check_running(spark)
    use_this_python(spark)
    coordinator = coordinator or coordinator_of(pipeline, root)
    # The source runs in the pipeline's zone too, because it may parse timestamps from text.
    with in_zone_of(spark, pipeline.time_zone):
        started_ns = time.monotonic_ns() - (read.waited_ns if read is not None else 0)
        begun = coordinator.begin(
            attempt.interval,
            permissions=attempt.permissions,
            pipeline_start_ms=to_ms(pipeline.start),
            attempt=attempt.id,
            schedule=pipeline.declared_schedule,
        )
        _log_begin(pipeline, attempt, begun)
        declared = ask_pipeline(spark, pipeline, attempt, begun, read)
        if declared.position:
            log.info("%s %s: source position %s", pipeline.name, attempt.interval, declared.position)
        plan = plan_interval(pipeline, root, attempt, begun, declared)
        if attempt.earlier is not None:
            reused = _reuse(coordinator, plan.job, plan.options, *attempt.earlier)
            if reused is not None:
                return reused
        if on_begin is not None:
            on_begin(plan.options)
        with offering_intact(open_storage(join_url(root, pipeline.name)), begun.base):
            return _compute(spark, plan, coordinator, on_shards or _on_spark, started_ns)


def _log_begin(pipeline: Pipeline, attempt: Attempt, begun: Begun) -> None:
    state = f"checkpoint {begun.base.id} ({begun.base.content.totals.entries} entries)" if begun.base else "empty state"
    log.info("%s %s: attempt %s starts from %s", pipeline.name, attempt.interval, attempt.id, state)


def _compute(
    spark: SparkSession, plan: IntervalPlan, coordinator: Coordinator, on_shards: OnShards, started_ns: int
) -> Prepared:
    job = plan.job
    with input_errors(job.pipeline, job.interval):
        planned_ns = time.monotonic_ns()
        acks = on_shards(spark, job, plan.inputs)
        spark_us = (time.monotonic_ns() - planned_ns) // 1000
        prepared = replace(job, plan_us=(planned_ns - started_ns) // 1000).finish(acks, spark_us, coordinator)
    totals = prepared.content.totals
    log.info(
        "%s %s: prepared: %d bytes downloaded, %d from caches; %d rows in, %d out, %d keys touched, %d bytes changed, %d uploaded, "
        "state %d bytes in %d files",
        *(job.pipeline, job.interval, totals.downloaded_bytes, totals.cached_bytes),
        *(totals.input_rows, totals.output_rows, totals.keys_touched),
        *(totals.changed_bytes, totals.uploaded_bytes, totals.state_bytes, totals.state_files),
    )
    for text in mismatches_in_words(acks):
        log.warning("%s %s: %s", job.pipeline, job.interval, text)
    # The last log line shows the durations of all phases: a reader sees why an interval was slow.
    phases = prepared.content.durations_us | {"prepare": (time.monotonic_ns() - planned_ns) // 1000 - spark_us}
    log.info("%s %s: %s", job.pipeline, job.interval, in_words(phases, (time.monotonic_ns() - started_ns) // 1000))
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
    """Raise `SourceError` if the query has perhaps not read the files that the source's position lists."""
    shared = type(executed).__module__.startswith("pyspark.sql.connect")
    if not shared and recorded_lengths(job.source_position) is None:
        return  # A walk over the plan of a classic session takes milliseconds.
    if why := unproven(job.source_position, scans_of(executed), shared_cache=shared):
        raise SourceError(f"pipeline {job.pipeline!r}, {job.interval}: {why}\nNothing was committed")


def _reuse(
    coordinator: Coordinator, job: IntervalJob, options: Mapping[str, str], attempt: str, earlier: Mapping[str, str]
) -> Prepared | None:
    """Return what an earlier try of the same run prepared, if this try would compute the same.

    Python's logger `cairn` gets the decision and its reason.
    """
    try:
        prepared = coordinator.load_prepared(attempt)
    except StateUnusable:
        prepared = None
    decision = plan_reuse(
        Earlier(attempt=attempt, options=earlier, prepared=prepared),
        Now(
            log=coordinator.log(),
            run=job.run,
            interval=job.interval,
            permissions=job.permissions,
            code_hash=job.code_hash,
            options=options,
            source_position=json.loads(json.dumps(job.source_position)),  # Tuples become lists.
            initial_state=job.initial_schema is not None,
        ),
    )
    if isinstance(decision, Recompute):
        log.info(
            "%s %s: attempt %s of an earlier try is not used: %s",
            *(job.pipeline, job.interval, attempt, decision.reason),
        )
        return None
    assert prepared is not None
    log.info(
        "%s %s: try %d has prepared attempt %s, and base, code, options and input are unchanged: this attempt is used, and nothing is "
        "computed again",
        *(job.pipeline, job.interval, prepared.content.run.try_number, attempt),
    )
    return prepared
