"""A checkpoint's shards rewritten, each as few files without anything obsolete, then *prepared* as an equal checkpoint.

A shard that is one sorted run without deletions and segments already stays as it is, whatever its size. Of the others
everything is read and written once, so this belongs where a savepoint reads everything anyway.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pyarrow as pa

from cairn.shard_jobs.run_on_shards import JobOnContent, StopWatch, rare_garbage_collection
from state_backend.adapters.open_storage import open_storage
from state_backend.adapters.rocks import EngineOptions
from state_backend.adapters.work_folders import work_folder
from state_backend.checkpoint.prepare_content import ShardAck, digest_of, prepare, summary_of
from state_backend.shard.file_cache import damage_of_copies, open_cache
from state_backend.shard.manifest import needed_manifest
from state_backend.shard.restore import restore_shard
from state_backend.shard.snapshot import inline_budget_bytes, take_snapshot
from state_backend.state.check_shard import verify_shard
from state_backend.values.errors import CorruptFile
from state_backend.values.records import Permissions, RunRef


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsolidationJob(JobOnContent):
    """Travels to the workers. ``checkpoint_id`` and ``content`` are the checkpoint's that is consolidated; ``h0`` is the highest id
    when that was seen to be there."""

    root: str
    attempt: str
    h0: int
    checkpoint_id: int
    run: RunRef
    engine: EngineOptions

    def run_shard(self, batches: Iterator[pa.RecordBatch], shard: int, task: int) -> ShardAck:
        """Rewrites one shard. On disk if it stops: files of the attempt that no record names.

        Raises: DamagedCopy if this host's copy of a file is damaged; CorruptFile if what was rewritten is not what the manifest
        counts; nothing is committed then.
        """
        clock = StopWatch()
        storage, cache, content = open_storage(self.root), open_cache(self.engine), self.content
        before = needed_manifest(self.refs_of(shard)[0], storage)
        with (
            rare_garbage_collection(),
            clock.phase("consolidate"),
            work_folder(f"consolidate-{shard}") as work,
            damage_of_copies(cache, storage.url, [before]),
        ):
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
                            f"checkpoint {self.checkpoint_id}, shard {shard}, consolidated: {'; '.join(problems[:3])}\n"
                            "Nothing is committed; validate it, and go on from an older checkpoint"
                        )
        return ShardAck(
            shard=shard,
            manifest=snapshot.manifest if snapshot else None,
            summary=summary_of(snapshot.manifest if snapshot else before),
            uploaded_files=snapshot.uploaded_files if snapshot else 0,
            uploaded_bytes=snapshot.uploaded_bytes if snapshot else 0,
            downloaded_bytes=restored.downloaded_bytes,
            cached_bytes=restored.cached_bytes,
            durations_us=clock.durations_us,
            pid=os.getpid(),
        )

    def finish(self, acks: list[ShardAck]) -> None:
        """Writes ``prepared.json``, unless no shard had anything to rewrite."""
        content = self.content
        if all(ack.manifest is None for ack in acks):
            return
        digest = digest_of(acks)
        if digest != content.digest:
            raise CorruptFile(
                f"checkpoint {self.checkpoint_id} records digest {content.digest:016x}; consolidated it is {digest:016x}\n"
                "Nothing is committed; validate it, and go on from an older checkpoint"
            )
        made = replace(
            content,
            kind="consolidate",
            run=self.run,
            attempt=self.attempt,
            base_id=self.checkpoint_id,
            permissions=Permissions(),
            forget=None,
            filtered=(),
            durations_us={},
        )
        prepare(open_storage(self.root), made, acks, h0=self.h0, base=content.shards)
