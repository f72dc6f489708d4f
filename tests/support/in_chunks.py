"""Several intervals by one job without Spark: each shard runs in this process, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.compute as pc

from cairn import testing
from cairn.operations.intervals import process_chunk, process_interval
from cairn.pipeline import Pipeline
from cairn.replay.run_key import InProcess
from cairn.rows.local_rows import route_locally
from cairn.shard_jobs.chunk import ChunkAck, ChunkJob
from state_backend.checkpoint.log import Log
from state_backend.shard.manifest import manifest_of
from state_backend.values.records import Record
from tests.support.coordinator import coordinator_of


def chunk_on_shards(
    processor: Any, session: Any, job: ChunkJob, jobs: Any, inputs: Sequence[Any], first_task: int = 1000
) -> list[ChunkAck]:
    """In the place of ``process_chunk._on_spark``."""
    here: Any = InProcess(processor, job.first.content.pipeline)
    job = replace(job, first=replace(job.first, processor=here))
    shards: list[list[pa.RecordBatch]] = [[] for _ in range(job.parallelism)]
    for number, one in enumerate(inputs):
        routed = route_locally(
            one.rows,
            key=one.key,
            order_by=one.order_by,
            parallelism=job.parallelism,
            max_parallelism=job.max_parallelism,
        )
        for batches, routed_here in zip(shards, routed, strict=True):
            batches.extend(_numbered(routed_here, number * job.max_parallelism) if number else routed_here)
    return [
        job.with_refs(job.refs_of(n)).run_shard(iter(batches), n, first_task + n) for n, batches in enumerate(shards)
    ]


def _newest_events(session: Any, inputs: Sequence[Any], column: str) -> list[int | None]:
    """In the place of ``process_chunk._newest_events``."""
    columns = [one.rows.table.column(column) for one in inputs]
    return [pc.max(one.cast(pa.timestamp("us", one.type.tz)).cast(pa.int64())).as_py() for one in columns]


def _numbered(batches: list[pa.RecordBatch], more: int) -> Iterator[pa.RecordBatch]:
    """The rows without the tick, with the key groups of a later interval."""
    for n, batch in enumerate(batches):
        rows = batch if n else batch[1:]
        groups = pa.array(rows.column("__key_group").to_numpy() + more, pa.int32())
        yield rows.set_column(rows.schema.get_field_index("__key_group"), "__key_group", groups)


@contextmanager
def without_spark(pipeline: Pipeline) -> Iterator[None]:
    """``run_intervals`` processes intervals of the pipeline in this process, alone and together."""
    with ExitStack() as stack:
        for module, here in ((process_interval, testing._on_shards), (process_chunk, chunk_on_shards)):

            def on_spark(*given: Any, here: Any = here) -> Any:
                return here(pipeline.processor, *given)

            stack.enter_context(mock.patch.object(module, "_on_spark", on_spark))
        stack.enter_context(mock.patch.object(process_chunk, "_newest_events", _newest_events))
        yield


def results(pipeline: Pipeline, root: Any) -> list[dict[str, Any]]:
    """What intervals that are computed together have in common with intervals that are computed one by one."""
    coordinator = coordinator_of(pipeline, str(root))
    log = coordinator.log()
    return [_result(record, log, coordinator.at.storage) for record in log.completed()]


def _result(record: Record, log: Log, storage: Any) -> dict[str, Any]:
    content, stale_by = record.content, log.retained[record.id].stale_by
    totals = content.totals
    logical = ("input_rows", "output_rows", "late_rows", "keys_touched", "keys", "entries", "changed_bytes")
    return {
        "record": (record.id, record.reproduces, record.retained, record.replaced, stale_by, content.base_id),
        "filtered": [forget and forget.id for forget in map(log.of_attempt, content.filtered)],
        "schemas": (record.output_schemas, record.input_schemas),
        "groups": [manifest_of(ref, storage).key_group_states for ref in content.shards],
        "outputs": [(o.handle.size_bytes, o.handle.crc32c, o.rows, o.late, o.digest) for o in content.outputs],
        "totals": {name: getattr(totals, name) for name in logical},
    } | {
        name: getattr(content, name)
        for name in (
            *("interval", "digest", "time", "states", "source_position", "input_hash", "code_hash", "permissions"),
            *("key_schema", "parallelism", "retention", "schedule", "inputs", "followed", "untracked"),
        )
    }
