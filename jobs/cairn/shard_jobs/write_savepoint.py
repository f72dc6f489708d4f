"""Take a savepoint: restore each shard, and write it whole to the user's folder as compacted SSTs or as Parquet.

A savepoint is self-contained: its handles are relative to its folder, so the folder can be moved or copied, and a
restore needs nothing from the pipeline's root. `savepoint.json` is written last. A folder without it is no savepoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import pyarrow as pa

from cairn.shard_jobs.run_on_shards import JobOnContent, rare_garbage_collection
from state_backend.adapters.open_storage import open_storage
from state_backend.adapters.rocks import EngineOptions
from state_backend.adapters.work_folders import work_folder
from state_backend.checkpoint.savepoints import remove_leftovers
from state_backend.formats import paths, record_codec
from state_backend.formats.types import parse_struct
from state_backend.shard.canonical_files import write_canonical
from state_backend.shard.manifest import needed_manifest
from state_backend.shard.restore import restore_shard
from state_backend.shard.snapshot import take_snapshot
from state_backend.values.frozen import frozen
from state_backend.values.marks import CanonicalFile, Savepoint
from state_backend.values.records import InlineShard, ShardManifest


@frozen
class SavepointAck:
    shard: int
    # The manifest of the shard's files in a native savepoint; None for a canonical one.
    manifest: ShardManifest | None
    files: tuple[CanonicalFile, ...]  # The shard's files in a canonical savepoint; empty for a native one.


@frozen
class SavepointJob(JobOnContent):
    root: str
    destination: str
    savepoint: str
    format: Literal["native", "canonical"]
    checkpoint_id: int
    engine: EngineOptions

    def run_shard(self, batches: Iterator[pa.RecordBatch], shard: int, task: int) -> SavepointAck:
        """Write one shard, in a Spark task. If the task stops, `savepoint.json` does not name the files it leaves."""
        source, destination = open_storage(self.root), open_storage(self.destination)
        manifest = needed_manifest(self.refs_of(shard)[0], source)
        written: ShardManifest | None = None
        files: tuple[CanonicalFile, ...] = ()
        with rare_garbage_collection(), work_folder(f"savepoint-{shard}") as work:
            restored = restore_shard(manifest.key_groups, [manifest], source, work / "db", self.engine)
            with restored.store as store:
                if self.format == "canonical":
                    files = write_canonical(
                        store,
                        manifest,
                        self.content.states,
                        parse_struct(self.content.key_schema),
                        destination,
                        work=work,
                        savepoint=self.savepoint,
                        task=task,
                    )
                else:
                    store.compact()
                    written = take_snapshot(
                        store,
                        destination,
                        image=work / "image",
                        attempt=self.savepoint,
                        shard=manifest.shard,
                        task=task,
                        key_groups=manifest.key_groups,
                        key_group_states=manifest.key_group_states,
                        inline_budget_bytes=0,
                    ).manifest
        return SavepointAck(shard=shard, manifest=written, files=files)

    def finish(self, acks: list[SavepointAck]) -> None:
        """Write `savepoint.json`, which makes the folder a savepoint. Then delete files of failed tasks."""
        storage = open_storage(self.destination)
        files = tuple(f for a in acks for f in a.files)
        shards = tuple(InlineShard(shard=a.shard, inline=a.manifest) for a in acks if a.manifest)
        # A savepoint contains only state. The output files stay in the pipeline's folder.
        content = replace(self.content, shards=shards, outputs=())
        record = Savepoint(
            savepoint=self.savepoint, format=self.format, checkpoint_id=self.checkpoint_id, content=content, files=files
        )
        storage.create(paths.SAVEPOINT_RECORD, record_codec.encode(record))
        remove_leftovers(storage, record)
