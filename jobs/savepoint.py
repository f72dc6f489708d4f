"""Taking a savepoint of a committed checkpoint."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Literal

from jobs.runtime.first_cause import first_cause
from jobs.runtime.keyed_state import KeyedState
from jobs.runtime.routing import ticks
from jobs.runtime.savepoint_task import SavepointTask
from jobs.runtime.shipping import ship
from state_backend.adapters.open_storage import open_storage
from state_backend.checkpoint.savepoints import read_savepoint, remove_leftovers
from state_backend.formats import paths
from state_backend.values.errors import UsageError
from state_backend.values.records import Record, Savepoint
from state_backend.verify import offering_sound

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from jobs.pipeline import Pipeline

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
    (``state_backend.formats.canonical``), which any tool reads and which restore at another max parallelism.

    Raises: CorruptFile naming a damaged file of the checkpoint and what to go back to; UsageError for a folder in use.
    """
    if format not in FORMATS:
        raise UsageError(f"savepoint format {format!r} is not one of {', '.join(FORMATS)}")
    destination = open_storage(to)
    if destination.stat(paths.SAVEPOINT_RECORD) is not None:
        there = read_savepoint(destination)
        if (there.content.attempt, there.format) == (record.content.attempt, format):
            remove_leftovers(destination, there)
            return there
        raise UsageError(f"{to} holds a savepoint already; choose another folder, savepoints are never overwritten")
    content = record.content
    task = SavepointTask(
        root=pipeline_root,
        destination=to,
        savepoint=str(uuid.uuid4()),
        format=format,
        checkpoint_id=record.id,
        content=content,
        engine=pipeline.engine,
    )
    with offering_sound(open_storage(pipeline_root), record):
        _run(spark, task)
    return read_savepoint(destination)


def _run(spark: SparkSession, task: SavepointTask) -> None:
    """All shards, up to the record."""
    spark.dataSource.register(KeyedState)
    shards = ticks(spark, parallelism=task.content.parallelism, max_parallelism=task.content.max_parallelism)
    with first_cause():
        shards.write.format("keyed_state").mode("append").option("task", ship(task, None)).save()
