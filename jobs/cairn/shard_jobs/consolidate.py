"""Consolidate a checkpoint: rewrite its shards without obsolete entries.

The job ends with a `prepared.json` for a checkpoint with equal entries. A shard that is already one sorted run without
deletions and segments stays as it is. All other shards are read and written as a whole. That is expensive, so the job
runs only before a savepoint, which reads every shard anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa

from cairn.shard_jobs.acks import ack_of
from cairn.shard_jobs.run_on_shards import JobOnContent, StopWatch, rare_garbage_collection
from state_backend.adapters.open_storage import open_storage
from state_backend.adapters.rocks import EngineOptions
from state_backend.adapters.work_folders import work_folder
from state_backend.checkpoint.location import Location
from state_backend.checkpoint.prepare_content import ShardAck, digest_of, prepare
from state_backend.shard.file_cache import damage_of_copies, open_cache
from state_backend.shard.manifest import needed_manifest
from state_backend.shard.restore import restore_shard
from state_backend.shard.snapshot import inline_budget_bytes, take_snapshot
from state_backend.state.check_shard import verify_shard
from state_backend.values.errors import CorruptFile
from state_backend.values.frozen import frozen
from state_backend.values.records import Permissions, own_run


@frozen
class ConsolidationJob(JobOnContent):
    """Job that reads the shards of a checkpoint, and writes them for a new checkpoint without obsolete entries."""

    root: str
    attempt: str
    checkpoint_id: int
    engine: EngineOptions

    def run_shard(self, batches: Iterator[pa.RecordBatch], shard: int, task: int) -> ShardAck:
        """Rewrite one shard in a Spark task, and return its ack. If the task stops, no record names its files."""
        clock = StopWatch()
        storage, cache, content = open_storage(self.root), open_cache(self.engine), self.content
        before = needed_manifest(self.refs_of(shard)[0], storage)
        with (
            rare_garbage_collection(),
            clock.phase("consolidate", "merging files"),
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
                        inline_budget_bytes=inline_budget_bytes(content.parallelism),
                        cache=cache,
                    )
                    # The manifest has the counts of the base. `verify_shard` compares these counts with the entries
                    # that are on disk now.
                    _, problems = verify_shard(
                        store, snapshot.manifest, content.states, content.key_schema, content.max_parallelism
                    )
                    if problems:
                        raise CorruptFile(
                            f"checkpoint {self.checkpoint_id}, shard {shard}: the consolidated state is wrong: {'; '.join(problems[:3])}\n"
                            "Nothing was committed. Validate this checkpoint, and restore an older one if it is damaged"
                        )
        return ack_of(shard, snapshot, before, clock.durations_us, restored)

    def finish(self, at: Location, h0: int, acks: list[ShardAck]) -> None:
        """Write `prepared.json` if at least one shard was rewritten. `h0`: The log's newest id before the job."""
        content = self.content
        if all(ack.manifest is None for ack in acks):
            return
        digest = digest_of(acks)
        if digest != content.digest:
            raise CorruptFile(
                f"checkpoint {self.checkpoint_id} records digest {content.digest:016x}, but the consolidated state has {digest:016x}\n"
                "Nothing was committed. Validate this checkpoint, and restore an older one if it is damaged"
            )
        made = replace(
            content,
            kind="consolidate",
            run=own_run(f"consolidate__{self.attempt}"),
            attempt=self.attempt,
            base_id=self.checkpoint_id,
            permissions=Permissions(),
            forget=None,
            filtered=(),
            durations_us={},
        )
        prepare(at, made, acks, h0=h0, base=content.shards)
