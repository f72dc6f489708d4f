"""Process one interval of a pipeline and commit it."""

from __future__ import annotations

import logging
import time
import uuid
from typing import TYPE_CHECKING

from cairn.operations.intervals.plan_interval import Attempt
from cairn.operations.intervals.process_interval import process_interval
from cairn.pipeline import Interval, Pipeline
from cairn.shard_jobs.run_on_shards import StopWatch
from state_backend.checkpoint.clean_up_dropped import try_clean_up
from state_backend.checkpoint.commit_attempt import commit
from state_backend.checkpoint.find_checkpoint import record_of
from state_backend.checkpoint.location import Location, locate
from state_backend.checkpoint.log import Log, read_newest
from state_backend.values.errors import SinkFailed
from state_backend.values.human_units import in_words
from state_backend.values.records import NO_PERMISSIONS, Permissions, Record, RunRef, own_run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger("cairn")


def run_interval(
    spark: SparkSession,
    pipeline: Pipeline,
    interval: Interval,
    root: str,
    mode: str = "incremental",
    *,
    permissions: Permissions = NO_PERMISSIONS,
    run: RunRef | None = None,
) -> Record:
    """Process one interval, commit its checkpoint, and return the checkpoint's record.

    Args:
        spark: A session, classic or Spark Connect.
        pipeline: The pipeline.
        interval: The interval. An interval that has run before runs again.
        root: URL or absolute path of the folder that holds the pipelines.
        mode: How the checkpoint is stored: "incremental", "full" or "changelog". Each mode may follow any other.
        permissions: Refused actions that the caller allows, such as `Permissions(replace_overlapping=True)`.
        run: The Airflow run to record; None for a run of its own.

    Raises:
        CairnError: Nothing is committed, except if the sink failed.

    Example:
        start = CLICKS.start
        run_interval(spark, CLICKS, Interval(start, start + timedelta(hours=1)), "file:///data/state")
    """
    identifier = str(uuid.uuid4())
    attempt = Attempt(
        id=identifier,
        interval=interval,
        mode=mode,
        run=run or own_run(f"direct__{identifier}"),
        permissions=permissions,
    )
    at = locate(root, pipeline.name)
    before = read_newest(at.storage)
    prepared = process_interval(spark, pipeline, at, attempt, before=before)
    clock, began_ns = StopWatch(), time.monotonic_ns()
    with clock.phase("commit", "committing"):
        result = commit(at, attempt.id, prepared=prepared, before=before)
    finish_commit(spark, pipeline, at, result.id, result.log, clock)
    spent = in_words(clock.durations_us, (time.monotonic_ns() - began_ns) // 1000)
    log.info("%s %s: checkpoint %d: %s", pipeline.name, interval, result.id, spent)
    return result.record or record_of(at, result.id)


def finish_commit(
    spark: SparkSession,
    pipeline: Pipeline,
    at: Location,
    checkpoint_id: int,
    after: Log | None = None,
    clock: StopWatch | None = None,
) -> None:
    """Call the sink for all outputs that wait for it, then delete the files that no retained checkpoint needs.

    Raise `SinkFailed` only if the output of `checkpoint_id`, the caller's commit, failed; log another failure. `after`:
    The log as that commit left it; None reads it. `clock`: Measures both steps.
    """
    failed, clock = None, clock or StopWatch()
    try:
        with clock.phase("publish", "publishing"):
            pipeline.call_sink(at, spark, after=after)
    except SinkFailed as error:
        failed = error
    with clock.phase("clean_up", "cleaning up"):
        try_clean_up(at.storage, after)
    if failed is not None:
        if checkpoint_id in failed.ids:
            raise failed
        log.warning("%s: %s", pipeline.name, failed)
