"""A savepoint: each shard restored, compacted and written whole under the user's own folder.

Self-contained: its handles are relative to the savepoint's folder, so it can be moved or copied; nothing of the pipeline's
root is needed to restore it. Written last is ``savepoint.json``; without it the folder is no savepoint.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from jobs.runtime.interval_task import ShardAck, work_folder
from state_backend.adapters.open_storage import open_storage
from state_backend.adapters.rocks import EngineOptions
from state_backend.formats import paths, record_codec
from state_backend.manifest import manifest_of
from state_backend.restore import restore_shard
from state_backend.snapshot import take_snapshot
from state_backend.values.errors import InvariantViolated
from state_backend.values.records import Content, Savepoint, ShardRef


@dataclass(frozen=True, slots=True, kw_only=True)
class SavepointTask:
    """Travels to the workers. ``root`` is the pipeline's, ``destination`` the savepoint's folder."""

    root: str
    destination: str
    savepoint: str
    checkpoint_id: int
    content: Content
    engine: EngineOptions

    def run_shard(self, batches: Iterator[pa.RecordBatch], shard: int, task: int) -> ShardAck:
        """Writes one shard. On disk if it stops: files that no savepoint.json names."""
        for _ in batches:
            pass
        source, destination = open_storage(self.root), open_storage(self.destination)
        started_ns = time.monotonic_ns()
        manifest = manifest_of(self.content.shards[shard], source)
        with work_folder(f"savepoint-{shard}-") as work:
            restored = restore_shard(manifest.key_groups, [manifest], source, work / "db", self.engine)
            try:
                restored.store.compact()
                snapshot = take_snapshot(
                    restored.store,
                    destination,
                    image=work / "image",
                    attempt=self.savepoint,
                    shard=shard,
                    task=task,
                    key_groups=manifest.key_groups,
                    key_group_states=manifest.key_group_states,
                    opened=(),
                    opened_inline=frozenset(),
                    full=True,
                    inline_budget_bytes=0,
                )
            finally:
                restored.store.close()
        return ShardAck(
            shard=shard,
            manifest=snapshot.manifest,
            changes=None,
            output=None,
            late=None,
            newest_event_us=None,
            input_rows=0,
            keys_touched=0,
            changed_bytes=0,
            uploaded_bytes=snapshot.uploaded_bytes,
            uploaded_files=snapshot.uploaded_files,
            downloaded_bytes=restored.downloaded_bytes,
            durations_us={"savepoint": (time.monotonic_ns() - started_ns) // 1000},
            pid=0,
        )

    def finish(self, acks: list[ShardAck]) -> None:
        """Writes the savepoint's record: from here on it is one."""
        manifests: list[Any] = [a.manifest for a in sorted(acks, key=lambda a: a.shard)]
        if [m.shard for m in manifests] != list(range(self.content.parallelism)):
            raise InvariantViolated(
                f"a savepoint of {self.content.parallelism} shards got acks of {[m.shard for m in manifests]}"
            )
        storage = open_storage(self.destination)
        shards = tuple(ShardRef(shard=m.shard, manifest=None, inline=m) for m in manifests)
        # The outputs stay with the pipeline; a savepoint is state.
        content = replace(self.content, shards=shards, outputs=())
        record = Savepoint(savepoint=self.savepoint, format="native", checkpoint_id=self.checkpoint_id, content=content)
        storage.create(paths.SAVEPOINT_RECORD, record_codec.encode(record))
