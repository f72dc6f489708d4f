"""Take a savepoint of a committed checkpoint, or consolidate it: rewrite its files without deleted entries."""

from __future__ import annotations

import logging
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from cairn.operations.place import Place
from cairn.shard_jobs.consolidate import ConsolidationJob
from cairn.shard_jobs.run_on_shards import run_on_shards
from cairn.shard_jobs.write_savepoint import SavepointJob
from state_backend.adapters.open_storage import check_outside, join_url, open_storage
from state_backend.checkpoint.clean_up_dropped import try_clean_up
from state_backend.checkpoint.commit_attempt import commit
from state_backend.checkpoint.dropped_checkpoint import telling_drops
from state_backend.checkpoint.find_checkpoint import record_of
from state_backend.checkpoint.forgotten_keys import forgets_of
from state_backend.checkpoint.leases import holding
from state_backend.checkpoint.location import locate
from state_backend.checkpoint.log import read_log
from state_backend.checkpoint.newest_state import is_superseded
from state_backend.checkpoint.prepared_attempts import is_prepared
from state_backend.checkpoint.savepoints import read_savepoint, remove_leftovers
from state_backend.formats import paths
from state_backend.inspection.verify import offering_intact
from state_backend.ports.storage import Storage
from state_backend.values.errors import AlreadyExists, StateUnusable, UsageError
from state_backend.values.human_units import size
from state_backend.values.intervals import format_instant
from state_backend.values.marks import Savepoint
from state_backend.values.operation_parameters import TakeSavepoint
from state_backend.values.records import Record

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cairn.pipeline import Pipeline

log = logging.getLogger("cairn")

FORMATS = ("native", "canonical")


def carry_out_savepoint(request: TakeSavepoint, place: Place) -> dict[str, Any]:
    """Take the savepoint that the request names, and return its summary. In a dry run, only say what would be taken."""
    pipeline = place.load(request)
    folder = join_url(request.root, pipeline.name)
    record = record_of(locate(request.root, pipeline.name), request.checkpoint)
    check_destination(folder, request.folder, request.format)
    if request.dry_run:
        return _would_take(request, record, place)
    spark = place.connect(pipeline, "savepoint")
    if request.consolidate:
        record = consolidate_checkpoint(spark, pipeline, request.root, record)
    with place.watching(spark):
        taken = take_savepoint(spark, pipeline, folder, record, request.folder, request.format)
    said = describe_savepoint(taken, request.folder)
    place.say(
        f"{said['format']} savepoint of checkpoint {record.id} of {record.content.interval}: {said['files']} files, "
        f"{size(said['bytes'])} in {request.folder}"
    )
    return said


def _would_take(request: TakeSavepoint, record: Record, place: Place) -> dict[str, Any]:
    interval, totals = record.content.interval, record.content.totals
    place.say(f"would write checkpoint {record.id} of {interval} ({totals.entries:,} entries) to {request.folder}")
    return {
        "dry_run": True,
        "checkpoint": record.id,
        "interval": str(interval),
        "end": format_instant(interval.end),
        "entries": totals.entries,
        "bytes": totals.state_bytes,
        "savepoint": request.folder,
        "format": request.format,
    }


def take_savepoint(
    spark: SparkSession,
    pipeline: Pipeline,
    pipeline_root: str,
    record: Record,
    to: str,
    format: Literal["native", "canonical"] = "native",
) -> Savepoint:
    """Copy a checkpoint's state into a savepoint in the folder `to`, and return the savepoint.

    If an earlier try took this savepoint already, return that one, and delete the files that unfinished tries left in
    the folder.
    """
    check_destination(pipeline_root, to, format)
    destination, content = open_storage(to), record.content
    if (taken := _taken(destination, record, format)) is not None:
        return taken
    job = SavepointJob(
        root=pipeline_root,
        destination=to,
        savepoint=str(uuid.uuid4()),
        format=format,
        checkpoint_id=record.id,
        content=replace(content, forget=forgets_of(record)),
        engine=pipeline.engine,
    )
    try:
        owner = open_storage(pipeline_root)
        with holding(owner, record.id, "a savepoint"), offering_intact(owner, record):
            job.finish(run_on_shards(spark, job))
    except AlreadyExists:  # Another try has written the savepoint's record first.
        if (taken := _taken(destination, record, format)) is not None:
            return taken
        raise
    return read_savepoint(destination)


def _taken(destination: Storage, record: Record, format: str) -> Savepoint | None:
    """Return the folder's savepoint; None without one. Raise `UsageError` if it is of another checkpoint or format."""
    if destination.stat(paths.SAVEPOINT_RECORD) is None:
        return None
    there = read_savepoint(destination)
    if (there.content.attempt, there.format) != (record.content.attempt, format):
        raise UsageError(
            f"{destination.url} holds a savepoint already; choose another folder, savepoints are never overwritten"
        )
    remove_leftovers(destination, there)
    return there


def check_destination(pipeline_root: str, to: str, format: str) -> None:
    if format not in FORMATS:
        raise UsageError(f"savepoint format {format!r} is not one of {', '.join(FORMATS)}")
    check_outside(pipeline_root, to, "savepoint")


def check_free(pipeline_root: str, request: TakeSavepoint) -> None:
    """Raise `UsageError` if the request's folder can't take a new savepoint, for example because it holds one."""
    check_destination(pipeline_root, request.folder, request.format)
    if open_storage(request.folder).stat(paths.SAVEPOINT_RECORD) is not None:
        raise UsageError(
            f"{request.folder} holds a savepoint already; choose another folder, savepoints are never overwritten"
        )


def consolidate_checkpoint(spark: SparkSession, pipeline: Pipeline, root: str, record: Record) -> Record:
    """Commit a checkpoint with the same state, whose files have no deleted and replaced entries. Return its record.

    Return `record` itself if there is nothing to rewrite. The new checkpoint is stale if the old one is. The next
    commit drops the old checkpoint: until then, a running interval may still restore it.
    """
    at = locate(root, pipeline.name)
    checkpoints = read_log(at.storage)
    if record.id not in checkpoints.retained or is_superseded(checkpoints, record):
        raise UsageError(
            f"checkpoint {record.id} of {pipeline.name!r} can't be consolidated: it was dropped, or a re-run of "
            f"{record.content.interval} replaced it\nLeave out consolidate, or choose the newest checkpoint"
        )
    refused = checkpoints.quarantine_above(record.id)
    if refused is not None:  # Refuse now: the commit would fail too, but only after the long rewrite.
        raise StateUnusable(
            f"checkpoint {record.id} of {pipeline.name!r} can't be consolidated: checkpoint {refused} is quarantined "
            f"({checkpoints.quarantined[refused].reason}), with all checkpoints that come from it\nLeave out consolidate, or choose a usable checkpoint"
        )
    earlier = [c for c in checkpoints.completed() if c.content.kind == "consolidate" and c.content.base_id == record.id]
    if earlier and checkpoints.quarantine_above(earlier[-1].id) is None:
        return earlier[-1]  # An earlier try has consolidated this checkpoint.
    attempt = str(uuid.uuid4())
    job = ConsolidationJob(
        root=at.url, attempt=attempt, checkpoint_id=record.id, content=record.content, engine=pipeline.engine
    )
    with telling_drops(at.storage, record.id):
        job.finish(at, checkpoints.head_id, run_on_shards(spark, job))
    if not is_prepared(at, attempt):
        log.info("%s: checkpoint %d has nothing to consolidate", pipeline.name, record.id)
        return record
    consolidated = commit(at, attempt).record
    try_clean_up(at.storage)
    if consolidated is None:
        raise UsageError(
            f"the consolidation of checkpoint {record.id} of {pipeline.name!r} was dropped by retention at once; leave out consolidate"
        )
    before, after = record.content.totals, consolidated.content.totals
    log.info(
        "%s: checkpoint %d is checkpoint %d consolidated: %d files with %d bytes instead of %d with %d",
        *(pipeline.name, consolidated.id, record.id),
        *(after.state_files, after.state_bytes, before.state_files, before.state_bytes),
    )
    return consolidated


def describe_savepoint(savepoint: Savepoint, to: str) -> dict[str, Any]:
    manifests = [ref.inline for ref in savepoint.content.shards if ref.inline is not None]
    return {
        "savepoint": to,
        "format": savepoint.format,
        "checkpoint": savepoint.checkpoint_id,
        "interval": str(savepoint.content.interval),
        "files": sum(len(m.files) for m in manifests) + len(savepoint.files),
        "bytes": sum(m.size_bytes for m in manifests) + sum(f.handle.size_bytes for f in savepoint.files),
    }
