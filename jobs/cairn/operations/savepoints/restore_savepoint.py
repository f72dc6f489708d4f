"""Restore a savepoint into a pipeline: commit a record of kind `restore`, from which the next interval starts."""

from __future__ import annotations

import logging
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from cairn.operations.place import Place
from cairn.shard_jobs.fill_from_savepoint import RestoreJob
from cairn.shard_jobs.run_on_shards import run_on_shards
from state_backend.adapters.open_storage import open_storage
from state_backend.checkpoint.begin_attempt import begin_restore
from state_backend.checkpoint.choose_base import discarded_by
from state_backend.checkpoint.clean_up_dropped import try_clean_up
from state_backend.checkpoint.commit_attempt import commit
from state_backend.checkpoint.location import Location, locate
from state_backend.checkpoint.log import read_log
from state_backend.checkpoint.newest_state import newest_state
from state_backend.checkpoint.rewind import as_restored, begun_before
from state_backend.checkpoint.savepoints import (
    check_unclaimed,
    claim_savepoint,
    delete_savepoint,
    read_claim,
    read_savepoint,
    release_claim,
    remove_leftovers,
)
from state_backend.formats import paths
from state_backend.ports.storage import Storage
from state_backend.values.errors import Fenced, UsageError
from state_backend.values.intervals import format_instant, to_ms
from state_backend.values.marks import Claim, Savepoint
from state_backend.values.operation_parameters import Restore
from state_backend.values.records import Content, Record, own_run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cairn.pipeline import Pipeline

log = logging.getLogger("cairn")

CLAIM_MODES = ("NO_CLAIM", "CLAIM")
# File names contain task numbers. The first task number of a try is random: it is the upper 48 bits of a uuid, whose
# lower 80 bits are shifted out.
_BITS_BEHIND_TASK = 80


def carry_out_restore(request: Restore, place: Place) -> dict[str, Any]:
    """Restore the request's savepoint, and return a summary of the new checkpoint. A dry run only returns the plan."""
    pipeline, savepoint = place.load(request), str(request.savepoint)
    if request.dry_run:
        said = _would_restore(pipeline, request.root, savepoint, request.claim)
        stale = ", ".join(str(row["id"]) for row in said["discards"]) or "none"
        what = f"{said['entries']:,} entries as the state at {said['end']}"
        place.say(f"would restore {what}; checkpoints made stale: {stale}")
        return said
    spark = place.connect(pipeline, "restore")
    record = restore_savepoint(spark, pipeline, request.root, savepoint, claim=request.claim, attempt=request.attempt)
    content = record.content
    said = {
        "checkpoint": record.id,
        "interval": str(content.interval),
        "end": format_instant(content.interval.end),
        "entries": content.totals.entries,
        "bytes": content.totals.state_bytes,
        "restored_from": content.restored_from,
    }
    place.say(f"checkpoint {record.id}: {said['entries']:,} entries, the state at {said['end']}")
    return said


def restore_savepoint(
    spark: SparkSession,
    pipeline: Pipeline,
    root: str,
    savepoint_path: str,
    *,
    claim: Literal["NO_CLAIM", "CLAIM"] = "NO_CLAIM",
    attempt: str | None = None,
) -> Record:
    """Commit the savepoint's state as the pipeline's state at the end of the savepoint's interval.

    The pipeline's checkpoints of later intervals become stale. The pipeline may have another name and parallelism than
    the savepoint. If the savepoint is canonical, the pipeline may also have another max parallelism. After the restore
    the pipeline needs no file of the savepoint. `claim`: "CLAIM" deletes the savepoint afterwards. `attempt`: Uuid of
    the restore. A second call with the same uuid continues the first; None makes a uuid.
    """
    _check_mode(claim)
    source, at = open_storage(savepoint_path), locate(root, pipeline.name)
    if claim == "CLAIM" and (finished := _finish_claim(source, at, attempt)) is not None:
        return finished
    if attempt is not None and read_log(at.storage).of_attempt(attempt) is not None:
        return _find_committed(at, attempt)
    begun = begun_before(at, attempt) if attempt is not None else None
    savepoint = read_savepoint(source)
    check_unclaimed(source, at.storage.url)
    if isinstance(begun, Content) and begun.restored_from != savepoint.savepoint:
        raise UsageError(
            f"attempt {begun.attempt} began to restore savepoint {begun.restored_from}, but {savepoint_path} holds savepoint {savepoint.savepoint}; "
            "use a new uuid"
        )
    # An earlier try of this attempt may still run and write files. Random task numbers keep their file names apart.
    first_task = 0 if attempt is None else uuid.uuid4().int >> _BITS_BEHIND_TASK
    attempt = attempt or str(uuid.uuid4())
    job = _plan(pipeline, at, savepoint_path, savepoint, attempt, first_task)
    if claim == "CLAIM":
        claim_savepoint(source, Claim(savepoint=savepoint.savepoint, owner=at.storage.url, attempt=attempt))
    if begun is None:
        job.finish(at, run_on_shards(spark, job))
    try:
        commit(at, attempt)
    except Fenced:
        # This attempt can never be committed. So release the savepoint: another pipeline may claim it.
        release_claim(source, attempt)
        raise
    if claim == "CLAIM":
        delete_savepoint(source, savepoint)
    try_clean_up(at.storage)
    record = _find_committed(at, attempt)
    log.info(
        "%s: checkpoint %d is the %s savepoint in %s: the state at the end of %s, %d entries",
        *(pipeline.name, record.id, savepoint.format, savepoint_path),
        *(record.content.interval, record.content.totals.entries),
    )
    return record


def _finish_claim(source: Storage, at: Location, attempt: str | None) -> Record | None:
    """If an earlier `restore_savepoint` with `claim="CLAIM"` stopped after its commit, delete the savepoint for it.

    Return the record that the earlier call committed. Return None if there was no such call, or if this call must
    restore the savepoint again: it has another `attempt`, or it has none and a later commit has changed the state.
    """
    earlier, log = read_claim(source), read_log(at.storage)
    if earlier is None or earlier.owner != at.storage.url or log.of_attempt(earlier.attempt) is None:
        return None
    if attempt not in (None, earlier.attempt):
        return None
    if source.stat(paths.SAVEPOINT_RECORD) is not None:
        savepoint, newest = read_savepoint(source), newest_state(log)
        if savepoint.savepoint != earlier.savepoint:
            return None  # The claimed savepoint is gone, and the folder holds a newer one.
        if attempt is None and (newest is None or newest.attempt != earlier.attempt):
            return None
        delete_savepoint(source, savepoint)
    remove_leftovers(source, None, earlier.savepoint)
    return _find_committed(at, earlier.attempt)


def _would_restore(pipeline: Pipeline, root: str, savepoint_path: str, claim: str) -> dict[str, Any]:
    """Return what `restore_savepoint` would do, as JSON values. Read records only, no state, and write nothing."""
    _check_mode(claim)
    source, at = open_storage(savepoint_path), locate(root, pipeline.name)
    savepoint = read_savepoint(source)
    check_unclaimed(source, at.storage.url)
    job = _plan(pipeline, at, savepoint_path, savepoint, str(uuid.uuid4()), 0)
    content = savepoint.content
    return {
        "dry_run": True,
        "savepoint": savepoint_path,
        "format": savepoint.format,
        "of": {"pipeline": content.pipeline, "checkpoint": savepoint.checkpoint_id},
        "end": format_instant(content.interval.end),
        "entries": content.totals.entries,
        "parallelism": job.parallelism,
        "max_parallelism": job.max_parallelism,
        "discards": [{"id": d.id, "interval": str(d.interval)} for d in discarded_by(read_log(at.storage), content)],
        "deletes_savepoint": claim == "CLAIM",
    }


def _check_mode(claim: str) -> None:
    if claim not in CLAIM_MODES:
        raise UsageError(f"claim mode {claim!r} is not one of {', '.join(CLAIM_MODES)}")


def _plan(
    pipeline: Pipeline, at: Location, source: str, savepoint: Savepoint, attempt: str, first_task: int
) -> RestoreJob:
    content = savepoint.content
    _check_fits(pipeline, savepoint)
    begun = begin_restore(at, content, pipeline_start_ms=to_ms(pipeline.start))
    # Native shards stay as they are: the next interval restores them into the pipeline's parallelism.
    shape = content if savepoint.format == "native" else pipeline
    restored = as_restored(content, pipeline=pipeline.name, run=own_run(f"restore__{attempt}"), attempt=attempt)
    made = replace(
        restored,
        pipeline_start_ms=to_ms(pipeline.start),
        parallelism=shape.parallelism,
        max_parallelism=shape.max_parallelism,
        restored_from=savepoint.savepoint,
        retention=pipeline.retention,
    )
    return RestoreJob(
        root=at.url,
        source=source,
        savepoint=savepoint,
        made=made,
        h0=begun.h0,
        first_task=first_task,
        engine=pipeline.engine,
    )


def _check_fits(pipeline: Pipeline, savepoint: Savepoint) -> None:
    """Raise `UsageError` if the next interval would refuse the savepoint's state. The input's schema is not checked."""
    content: Content = savepoint.content
    # Key columns are compared in lower case, because Spark ignores the case of column names by default. If the Spark
    # session distinguishes case, the next interval refuses a key whose names differ in case.
    key = [field["name"].lower() for field in content.key_schema["fields"]]
    for what, recorded, now in (
        ("key", key, [name.lower() for name in pipeline.key]),
        ("time_mode", content.time.mode, pipeline.time_mode),
    ):
        if recorded != now:
            raise UsageError(
                f"pipeline {pipeline.name!r}: {what} is {now}, but the savepoint of {content.pipeline!r} has {recorded}\n"
                "Declare it as in the savepoint, or choose another savepoint"
            )
    if savepoint.format == "native" and content.max_parallelism != pipeline.max_parallelism:
        raise UsageError(
            f"pipeline {pipeline.name!r}: max_parallelism is {pipeline.max_parallelism}, but the native savepoint has "
            f"{content.max_parallelism}, and its files are split by key group; use a canonical savepoint, or keep {content.max_parallelism}"
        )


def _find_committed(at: Location, attempt: str) -> Record:
    entry = read_log(at.storage).of_attempt(attempt)
    if not isinstance(entry, Record):
        raise UsageError(
            f"attempt {attempt} was committed, but its checkpoint has been dropped since; nothing is left to do"
        )
    return entry
