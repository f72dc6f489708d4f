"""Taking a savepoint of a committed checkpoint."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from jobs.runtime.first_cause import first_cause
from jobs.runtime.keyed_state import KeyedState
from jobs.runtime.routing import ticks
from jobs.runtime.savepoint_task import SavepointTask
from jobs.runtime.shipping import ship
from state_backend.adapters.open_storage import open_storage
from state_backend.formats import paths, record_codec
from state_backend.values.errors import UsageError
from state_backend.values.records import Record, Savepoint

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from jobs.pipeline import Pipeline


def take_savepoint(spark: SparkSession, pipeline: Pipeline, pipeline_root: str, record: Record, to: str) -> Savepoint:
    """Writes the checkpoint's state, compacted, into the folder ``to``, which must hold no savepoint yet."""
    destination = open_storage(to)
    if destination.stat(paths.SAVEPOINT_RECORD) is not None:
        raise UsageError(f"{to} holds a savepoint already; choose another folder, savepoints are never overwritten")
    task = SavepointTask(
        root=pipeline_root,
        destination=to,
        savepoint=str(uuid.uuid4()),
        checkpoint_id=record.id,
        content=record.content,
        engine=pipeline.engine,
    )
    spark.dataSource.register(KeyedState)
    option = ship(task, None)
    content = record.content
    with first_cause():
        ticks(spark, parallelism=content.parallelism, max_parallelism=content.max_parallelism).write.format(
            "keyed_state"
        ).mode("append").option("task", option).save()
    return record_codec.decode(destination.read(paths.SAVEPOINT_RECORD), f"{to}/{paths.SAVEPOINT_RECORD}", Savepoint)
