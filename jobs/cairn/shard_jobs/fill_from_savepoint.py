"""Restore a savepoint as the state of a pipeline, in the pipeline's own files under `shared/<attempt>/`.

The job ends with a `prepared.json`. A native savepoint: each file is linked, or copied if the storage can't link. The
shards stay as they are, and the next interval restores them into its own parallelism, as with any checkpoint. A
canonical savepoint: each shard of the pipeline reads its own entries, at any parallelism and max parallelism. In both
cases, the digest over all shards must equal the digest that the savepoint records.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa

from cairn.shard_jobs.acks import ack_of
from cairn.shard_jobs.run_on_shards import StopWatch, rare_garbage_collection
from state_backend.adapters.open_storage import open_storage
from state_backend.adapters.rocks import EngineOptions, RocksStore
from state_backend.adapters.work_folders import work_folder
from state_backend.checkpoint.location import Location
from state_backend.checkpoint.prepare_content import ShardAck, digest_of, entries_of, prepare
from state_backend.checkpoint.rewind import take_over
from state_backend.checkpoint.savepoints import native_manifest
from state_backend.formats.types import parse_struct
from state_backend.ports.storage import Storage
from state_backend.shard.canonical_files import read_canonical
from state_backend.shard.snapshot import Snapshot, inline_budget_bytes, take_snapshot
from state_backend.values.errors import CorruptFile, NotFound
from state_backend.values.frozen import frozen
from state_backend.values.key_groups import range_of
from state_backend.values.marks import Savepoint
from state_backend.values.records import Content, ShardManifest, ShardRef


@frozen
class RestoreJob:
    root: str
    source: str
    savepoint: Savepoint
    # The content of the new record before the shards are filled.
    made: Content
    h0: int
    engine: EngineOptions
    first_task: int = 0

    @property
    def parallelism(self) -> int:
        return self.made.parallelism

    @property
    def max_parallelism(self) -> int:
        return self.made.max_parallelism

    def refs_of(self, shard: int) -> tuple[ShardRef, ...]:
        # A canonical savepoint has no manifests, so it has no refs: the job reads `savepoint.files` instead.
        return tuple(ref for ref in self.savepoint.content.shards if ref.shard == shard)

    def with_refs(self, refs: tuple[ShardRef, ...]) -> RestoreJob:
        content = replace(self.savepoint.content, shards=refs)
        return replace(self, savepoint=replace(self.savepoint, content=content))

    def run_shard(self, batches: Iterator[pa.RecordBatch], shard: int, task: int) -> ShardAck:
        """Make one shard of the pipeline's new state, in a Spark task. If the task stops, no record names its files."""
        clock, task = StopWatch(), self.first_task + task
        source, storage = open_storage(self.source), open_storage(self.root)
        native = self.savepoint.format == "native"
        with clock.phase("restore", "restoring from a savepoint"):
            manifest = (self._link if native else self._read)(source, storage, shard, task)
        snapshot = Snapshot(
            manifest=manifest,
            uploaded_bytes=0 if native else manifest.size_bytes,  # Native files are linked, not uploaded.
            uploaded_files=len(manifest.files),
        )
        return ack_of(shard, snapshot, None, clock.durations_us)

    def _link(self, source: Storage, storage: Storage, shard: int, task: int) -> ShardManifest:
        manifest = native_manifest(self.savepoint, shard, source)
        try:
            return take_over(manifest, source, storage, self.made.attempt, task)
        except NotFound as error:
            raise CorruptFile(f"a file of the savepoint is missing from {source.url}: {error}") from error

    def _read(self, source: Storage, storage: Storage, shard: int, task: int) -> ShardManifest:
        content, owned = self.savepoint.content, range_of(shard, self.parallelism, self.max_parallelism)
        with (
            rare_garbage_collection(),
            work_folder(f"restore-{shard}") as work,
            RocksStore(work / "db", self.engine) as store,
        ):
            states = read_canonical(
                self.savepoint.files,
                content.states,
                parse_struct(content.key_schema),
                source,
                store,
                work=work,
                owned=owned,
                max_parallelism=self.max_parallelism,
                recorded_max_parallelism=content.max_parallelism,
            )
            return take_snapshot(
                store,
                storage,
                image=work / "image",
                attempt=self.made.attempt,
                shard=shard,
                task=task,
                key_groups=owned,
                key_group_states=states,
                inline_budget_bytes=inline_budget_bytes(self.parallelism),
            ).manifest

    def finish(self, at: Location, acks: list[ShardAck]) -> None:
        recorded = self.savepoint.content
        digest, entries = digest_of(acks), entries_of(acks)
        if (digest, entries) != (recorded.digest, recorded.totals.entries):
            raise CorruptFile(
                f"the savepoint in {self.source} records {recorded.totals.entries} entries with digest "
                f"{recorded.digest:016x}, but the restored state has {entries} entries with digest {digest:016x}\n"
                "The savepoint is damaged. Restore another savepoint"
            )
        prepare(at, self.made, acks, h0=self.h0, first_task=self.first_task)
