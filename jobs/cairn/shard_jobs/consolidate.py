"""A checkpoint's shards rewritten, each as few files without anything obsolete, then *prepared* as an equal checkpoint.

A shard that is one sorted run without deletions and segments already stays as it is, whatever its size. Of the others
everything is read and written once, so this belongs where a savepoint reads everything anyway.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pyarrow as pa

from cairn.shard_jobs.interval import rare_garbage_collection
from state_backend.adapters.open_storage import open_storage
from state_backend.adapters.rocks import SST_SUFFIX, EngineOptions
from state_backend.adapters.work_folders import work_folder
from state_backend.checkpoint.coordinator import Coordinator
from state_backend.shard.file_cache import open_cache
from state_backend.shard.manifest import needed_manifest, rewritten_refs
from state_backend.shard.restore import check_whole, restore_shard
from state_backend.shard.snapshot import inline_budget_bytes, take_snapshot
from state_backend.state.check_shard import verify_shard
from state_backend.values.errors import CorruptFile, InvariantViolated
from state_backend.values.records import Content, Permissions, Prepared, RunRef, ShardManifest


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsolidationAck:
    """A shard's new manifest, or None if it stays as it is."""

    shard: int
    manifest: ShardManifest | None
    uploaded_files: int
    uploaded_bytes: int
    downloaded_bytes: int
    cached_bytes: int
    duration_us: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsolidationTask:
    """Travels to the workers. ``checkpoint_id`` and ``content`` are the checkpoint's that is consolidated; ``h0`` is the highest id
    when that was seen to be there."""

    root: str
    attempt: str
    h0: int
    checkpoint_id: int
    content: Content
    run: RunRef
    engine: EngineOptions

    def run_shard(self, batches: Iterator[pa.RecordBatch], shard: int, task: int) -> ConsolidationAck:
        """Rewrites one shard. On disk if it stops: files of the attempt that no record names.

        Raises: CorruptFile if what was rewritten is not what the manifest counts; nothing is committed then.
        """
        for _ in batches:
            pass
        started_ns = time.monotonic_ns()
        storage, cache, content = open_storage(self.root), open_cache(self.engine), self.content
        before = needed_manifest(content.shards[shard], storage)
        with rare_garbage_collection(), work_folder(f"consolidate-{shard}") as work:
            restored = restore_shard(before.key_groups, [before], storage, work / "db", self.engine, cache)
            snapshot = None
            with restored.store as store:
                runs = store.sorted_runs()
                if before.segments or len(runs) > 1 or any(run.deletions for run in runs):
                    store.compact()
                    snapshot = take_snapshot(
                        store,
                        storage,
                        image=work / "image",
                        attempt=self.attempt,
                        shard=shard,
                        task=task,
                        key_groups=before.key_groups,
                        key_group_states=before.key_group_states,
                        opened=restored.opened,
                        opened_inline=restored.opened_inline,
                        full=False,
                        inline_budget_bytes=inline_budget_bytes(content.parallelism),
                        cache=cache,
                    )
                    # The counts were taken over from the base; this says that they are true of what is on disk now.
                    _, problems = verify_shard(
                        store, snapshot.manifest, content.states, content.key_schema, content.max_parallelism
                    )
                    if problems:
                        raise CorruptFile(
                            f"checkpoint {self.checkpoint_id}, shard {shard}, consolidated: {'; '.join(problems[:3])}"
                        )
        return ConsolidationAck(
            shard=shard,
            manifest=snapshot.manifest if snapshot else None,
            uploaded_files=snapshot.uploaded_files if snapshot else 0,
            uploaded_bytes=snapshot.uploaded_bytes if snapshot else 0,
            downloaded_bytes=restored.downloaded_bytes,
            cached_bytes=restored.cached_bytes,
            duration_us=(time.monotonic_ns() - started_ns) // 1000,
            pid=os.getpid(),
        )

    def finish(self, acks: list[ConsolidationAck]) -> None:
        """Writes ``prepared.json``, unless no shard had anything to rewrite."""
        acks, content = sorted(acks, key=lambda ack: ack.shard), self.content
        if [ack.shard for ack in acks] != list(range(content.parallelism)):
            raise InvariantViolated(f"expected acks of {content.parallelism} shards, got {[a.shard for a in acks]}")
        if all(ack.manifest is None for ack in acks):
            return
        storage = open_storage(self.root)
        made = {ack.shard: ack.manifest for ack in acks if ack.manifest is not None}
        manifests = [made.get(ref.shard) or needed_manifest(ref, storage) for ref in content.shards]
        check_whole([m.key_groups for m in manifests], content.max_parallelism)
        digest = sum(m.digest for m in manifests) % 2**64
        if digest != content.digest:
            raise CorruptFile(
                f"checkpoint {self.checkpoint_id} records digest {content.digest:016x}; consolidated it is {digest:016x}"
            )
        totals = replace(
            content.totals,
            input_rows=0,
            output_rows=0,
            late_rows=0,
            keys_touched=0,
            changed_bytes=0,
            uploaded_bytes=sum(a.uploaded_bytes for a in acks),
            uploaded_files=sum(a.uploaded_files for a in acks),
            downloaded_bytes=sum(a.downloaded_bytes for a in acks),
            cached_bytes=sum(a.cached_bytes for a in acks),
            state_bytes=sum(m.size_bytes for m in manifests),
            state_files=sum(
                len(m.handles) + sum(f.name.endswith(SST_SUFFIX) for f in m.inline_files) for m in manifests
            ),
        )
        consolidated = replace(
            content,
            kind="consolidate",
            run=self.run,
            attempt=self.attempt,
            base_id=self.checkpoint_id,
            permissions=Permissions(),
            totals=totals,
            shards=rewritten_refs(content.shards, made, manifests, self.attempt, storage),
            outputs=(),
            durations_us={"consolidate": max(a.duration_us for a in acks)},
            worker_pids=tuple(a.pid for a in acks),
        )
        Coordinator(storage, content.pipeline).prepare(Prepared(h0=self.h0, content=consolidated))
