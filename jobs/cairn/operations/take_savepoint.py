"""Taking a savepoint of a committed checkpoint, and consolidating the checkpoint itself first."""

from __future__ import annotations

import logging
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from cairn.operations.coordinator_of import coordinator_of
from cairn.shard_jobs.consolidate import ConsolidationJob
from cairn.shard_jobs.run_on_shards import run_on_shards
from cairn.shard_jobs.take_savepoint import SavepointJob
from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.checkpoint.dropped_checkpoint import telling_drops
from state_backend.checkpoint.forgotten_keys import forgets_of
from state_backend.checkpoint.leases import holding
from state_backend.checkpoint.lineage import is_superseded
from state_backend.checkpoint.savepoints import read_savepoint, remove_leftovers
from state_backend.formats import paths
from state_backend.inspection.verify import offering_intact
from state_backend.ports.storage import Storage
from state_backend.values.errors import AlreadyExists, CorruptFile, StateUnusable, UsageError
from state_backend.values.records import Record, RunRef, Savepoint

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cairn.pipeline import Pipeline

log = logging.getLogger("cairn")

FORMATS = ("native", "canonical")


def take_savepoint(
    spark: SparkSession,
    pipeline: Pipeline,
    pipeline_root: str,
    record: Record,
    to: str,
    format: Literal["native", "canonical"] = "native",
) -> Savepoint:
    """Writes the checkpoint's state into the folder ``to``, which must hold no savepoint yet; if it holds the one that this
    call would take, an earlier try took it, and that is returned. What tries that stopped left there is removed.

    native: compacted SSTs, to restore soon and as they are. canonical: Parquet files per state
    (``state_backend.formats.canonical_tables``), which any tool reads and which restore at another max parallelism.

    Raises: CorruptFile naming a damaged file of the checkpoint and what to go back to; CheckpointDropped if retention dropped it
    meanwhile; UsageError for a folder in use.
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
    except AlreadyExists:  # another try of this call was faster
        if (taken := _taken(destination, record, format)) is not None:
            return taken
        raise
    return read_savepoint(destination)


def _taken(destination: Storage, record: Record, format: str) -> Savepoint | None:
    """The savepoint of this checkpoint that is there already, or None for none. Raises: UsageError for another one."""
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
    """Raises: UsageError if savepoints can't be written there: inside the pipeline's own folder one would not outlive
    the pipeline, and no sweep would know it.
    """
    if format not in FORMATS:
        raise UsageError(f"savepoint format {format!r} is not one of {', '.join(FORMATS)}")
    destination, owner = open_storage(to), open_storage(pipeline_root)
    if f"{destination.url.rstrip('/')}/".startswith(f"{owner.url.rstrip('/')}/"):
        raise UsageError(
            f"{to} lies inside the pipeline's own folder {owner.url}; choose one elsewhere, so that the savepoint outlives it"
        )


def check_free(to: str) -> None:
    """Raises: UsageError if a savepoint lies there already."""
    if open_storage(to).stat(paths.SAVEPOINT_RECORD) is not None:
        raise UsageError(f"{to} holds a savepoint already; choose another folder, savepoints are never overwritten")


def consolidate_checkpoint(spark: SparkSession, pipeline: Pipeline, root: str, record: Record) -> Record:
    """Puts an equal checkpoint in the place of this one, whose shards are rewritten without what is obsolete; returns its record,
    or ``record`` if there was nothing to rewrite. It inherits what made the old one stale. The old one goes with the commit
    after it, since an interval that started from it may be under way.

    Only intervals that begin after it start from the rewritten files.

    Raises: UsageError if a re-run of the interval has taken the checkpoint's place already; StateUnusable if it is quarantined.
    Nothing is rewritten then. Fenced or BaseMoved if one of these happens meanwhile; CheckpointDropped if retention drops it
    while it is read.
    """
    coordinator = coordinator_of(pipeline, root)
    checkpoints = coordinator.log()
    if record.id not in checkpoints.retained or is_superseded(checkpoints, record):
        raise UsageError(
            f"checkpoint {record.id} of {pipeline.name!r} was dropped, or another run of {record.content.interval} took its "
            "place: consolidated it would be the newest again\nLeave consolidate out, or choose the newest one"
        )
    refused = checkpoints.quarantine_above(record.id)
    if refused is not None:  # its commit would refuse it, after everything was rewritten
        raise StateUnusable(
            f"checkpoint {record.id} of {pipeline.name!r} is quarantined, or descends from checkpoint {refused}, which is "
            f"({checkpoints.quarantined[refused].reason})\nLeave consolidate out, or choose a usable checkpoint"
        )
    earlier = [c for c in checkpoints.completed() if c.content.kind == "consolidate" and c.content.base_id == record.id]
    if earlier and checkpoints.quarantine_above(earlier[-1].id) is None:
        return earlier[-1]  # a try before this one got so far
    attempt = str(uuid.uuid4())
    job = ConsolidationJob(
        root=join_url(root, pipeline.name),
        attempt=attempt,
        h0=checkpoints.head_id,
        checkpoint_id=record.id,
        content=record.content,
        run=RunRef(run_id=f"consolidate__{attempt}", clear_number=0, try_number=1),
        engine=pipeline.engine,
    )
    with telling_drops(coordinator.storage, record.id):
        job.finish(run_on_shards(spark, job))
    if not coordinator.is_prepared(attempt):
        log.info("%s: checkpoint %d has nothing to consolidate", pipeline.name, record.id)
        return record
    consolidated = coordinator.commit(attempt).record
    try:
        coordinator.clean_up()
    except CorruptFile as error:  # of another checkpoint: this one counts
        log.warning("%s: nothing was deleted, since it can't be told what is needed: %s", pipeline.name, error)
    if consolidated is None:
        raise UsageError(
            f"the consolidation of checkpoint {record.id} of {pipeline.name!r} was dropped by retention at once; leave consolidate out"
        )
    before, after = record.content.totals, consolidated.content.totals
    log.info(
        "%s: checkpoint %d is checkpoint %d consolidated: %d files with %d bytes instead of %d with %d",
        *(pipeline.name, consolidated.id, record.id),
        *(after.state_files, after.state_bytes, before.state_files, before.state_bytes),
    )
    return consolidated


def describe_savepoint(savepoint: Savepoint, to: str) -> dict[str, Any]:
    """What there is to say of one that was just taken, as JSON values."""
    manifests = [ref.inline for ref in savepoint.content.shards if ref.inline is not None]
    return {
        "savepoint": to,
        "format": savepoint.format,
        "checkpoint": savepoint.checkpoint_id,
        "files": sum(len(m.files) for m in manifests) + len(savepoint.files),
        "bytes": sum(m.size_bytes for m in manifests) + sum(f.handle.size_bytes for f in savepoint.files),
    }
