"""A pipeline's state over many intervals, without Spark: each batch restores every shard, changes it and checkpoints it.

What an interval's shard task does with state is done here by the same functions, in the same order, shard after shard in
one process, over local storage with its syncs. Checkpoints are kept and dropped as a retention of the last ``retained`` does it.
"""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from state_backend.adapters.local_storage import LocalStorage
from state_backend.adapters.rocks import SST_SUFFIX, EngineOptions
from state_backend.shard.changelog_store import ChangelogOptions, ShardChangelog
from state_backend.shard.consolidation import Consolidation, consolidate, count_bytes, most_bytes
from state_backend.shard.file_cache import FileCache
from state_backend.shard.restore import RestoredShard, restore_shard
from state_backend.shard.snapshot import (
    INLINE_RECORD_BYTES,
    Snapshot,
    take_snapshot,
)
from state_backend.state.layout import prefix
from state_backend.state.shard_state import ShardState
from state_backend.values.key_groups import range_of
from state_backend.values.records import KeyGroupState, SchemaVersion, ShardManifest, StateDescriptor

STATE_ID = 1
STATE = StateDescriptor(
    name="value",
    kind="value",
    state_id=STATE_ID,
    ttl_ms=None,
    versions=(SchemaVersion(version=1, value={"type": "struct", "fields": []}, user_key=None),),
)
MAX_PARALLELISM = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one interval changed and wrote (bytes), what its checkpoint consists of, and what all retained ones keep on the
    storage."""

    changed_bytes: int
    uploaded_bytes: int
    uploaded_files: int
    live_files: int
    checkpoint_bytes: int
    retained_bytes: int
    merged: tuple[Consolidation, ...]


@dataclass(kw_only=True)
class History:
    """Grows by ``run``. Keys are numbers, spread evenly over the key groups; a key with its value makes ``entry_bytes``."""

    folder: Path
    keys: int
    parallelism: int
    entry_bytes: int = 100
    retained: int = 10
    seed: int = 7
    options: EngineOptions = field(default_factory=lambda: EngineOptions(cache_dir=None))
    cache: FileCache | None = None
    states: tuple[StateDescriptor, ...] = (STATE,)
    changelog: ChangelogOptions | None = None
    manifests: list[ShardManifest] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng: Any = np.random.default_rng(self.seed)
        self._storage = LocalStorage(self.folder / "storage")
        self._checkpoints: deque[dict[str, int]] = deque()

    @property
    def storage(self) -> LocalStorage:
        return self._storage

    def load(self) -> Batch:
        """The first interval: every key."""
        return self.run(np.arange(self.keys))

    def update(self, share: float) -> Batch:
        """An interval that changes this share of the keys, uniformly drawn."""
        return self.run(self._rng.choice(self.keys, round(self.keys * share), replace=False))

    def run(self, keys: Any, *, parallelism: int | None = None) -> Batch:
        """An interval that writes a new random value to each of these keys, if ``parallelism`` says so in another layout."""
        parallelism = parallelism or self.parallelism
        of_shard = (keys % MAX_PARALLELISM) * parallelism // MAX_PARALLELISM

        def change(state: ShardState, shard: int) -> None:
            for key in keys[of_shard == shard].tolist():
                stored = prefix(key % MAX_PARALLELISM, STATE_ID) + key.to_bytes(8, "big")
                state.write(stored, b"\x01" + self._rng.bytes(self.entry_bytes - len(stored) - 1))

        return self.run_interval(change, parallelism=parallelism)

    def run_interval(
        self, change: Callable[[ShardState, int], None], *, now_ms: int = 0, parallelism: int | None = None
    ) -> Batch:
        """An interval in which ``change`` is told each shard's state and number."""
        parallelism = parallelism or self.parallelism
        number = len(self.batches)
        snapshots: list[Snapshot] = []
        merged: list[Consolidation] = []
        manifests, changed_bytes = [], 0
        for shard in range(parallelism):
            work = self._work(shard)
            with self.restored(shard, parallelism, cache=self.cache) as restored:
                base, options = restored.base, self.changelog
                changes = ShardChangelog(restored.store, base, work / "changes", options) if base and options else None
                state = ShardState(
                    restored.store, key_groups=restored.key_group_states, descriptors=self.states, now_ms=now_ms
                )
                change(state, shard)
                states = state.key_group_states()
                if not state.stored.changed_bytes and parallelism == len(self.manifests):
                    manifests.append(self.manifests[shard])
                    continue
                most = most_bytes(restored.store, states, self.options)
                if changes and changes.fits(most):
                    snapshot = changes.append(
                        self._storage,
                        attempt=f"batch-{number}",
                        task=0,
                        key_group_states=states,
                        inline_budget_bytes=2048,
                    )
                else:
                    snapshot = self._captured(restored, states, shard, parallelism, merged)
                snapshots.append(snapshot)
                manifests.append(snapshot.manifest)
                changed_bytes += state.stored.changed_bytes
        self.parallelism, self.manifests = parallelism, manifests
        files = {handle.path: handle.size_bytes for m in manifests for handle in m.handles}
        inline_bytes = sum(m.size_bytes for m in manifests) - sum(files.values())
        self._retain(files)
        batch = Batch(
            changed_bytes=changed_bytes,
            uploaded_bytes=sum(s.uploaded_bytes for s in snapshots),
            uploaded_files=sum(s.uploaded_files for s in snapshots),
            live_files=sum(len(m.files) + sum(f.name.endswith(SST_SUFFIX) for f in m.inline_files) for m in manifests),
            checkpoint_bytes=sum(files.values()) + inline_bytes,
            retained_bytes=inline_bytes
            + sum({path: n for files in self._checkpoints for path, n in files.items()}.values()),
            merged=tuple(merged),
        )
        self.batches.append(batch)
        return batch

    def _captured(
        self,
        restored: RestoredShard,
        states: tuple[KeyGroupState, ...],
        shard: int,
        parallelism: int,
        merged: list[Consolidation],
    ) -> Snapshot:
        """The shard's files, consolidated first where the layout stays; ``merged`` is told how."""
        number = len(self.batches)
        states = count_bytes(restored.store, states)
        if not self.manifests or parallelism == len(self.manifests):
            merged.append(
                consolidate(
                    restored.store,
                    key_groups=states,
                    options=self.options,
                    shard=shard,
                    parallelism=parallelism,
                    sequence=number,
                )
            )
        return take_snapshot(
            restored.store,
            self._storage,
            image=self._work(shard) / "image",
            attempt=f"batch-{number}",
            shard=shard,
            task=0,
            key_groups=range_of(shard, parallelism, MAX_PARALLELISM),
            key_group_states=states,
            opened=restored.opened,
            inline_budget_bytes=INLINE_RECORD_BYTES // parallelism,
            cache=self.cache,
        )

    def _retain(self, files: dict[str, int]) -> None:
        """Files that only a checkpoint beyond the retained ones names are deleted, as the clean-up of a commit does."""
        self._checkpoints.append(files)
        if len(self._checkpoints) > self.retained:
            dropped = self._checkpoints.popleft()
            for path in dropped.keys() - {path for checkpoint in self._checkpoints for path in checkpoint}:
                self._storage.delete(path)

    def _work(self, shard: int) -> Path:
        return self.folder / f"work-{shard}"

    @contextmanager
    def restored(self, shard: int, parallelism: int, *, cache: FileCache | None) -> Iterator[RestoredShard]:
        """A shard of this layout, open while the block runs, in a folder that is gone afterwards."""
        owned = range_of(shard, parallelism, MAX_PARALLELISM)
        overlapping = [m for m in self.manifests if m.key_groups.intersect(owned)]
        work = self._work(shard)
        restored = restore_shard(owned, overlapping, self._storage, work / "db", self.options, cache)
        try:
            yield restored
        finally:
            restored.store.close()
            shutil.rmtree(work)

    def compacted_bytes(self) -> int:
        """What the live state takes when every shard is rewritten: the least that a checkpoint can have."""
        total = 0
        for shard in range(self.parallelism):
            with self.restored(shard, self.parallelism, cache=None) as restored:
                restored.store.compact()
                total += sum(run.size_bytes for run in restored.store.sorted_runs())
        return total
