"""Shards from checkpoint to checkpoint without Spark: restored at any parallelism, changed, captured in any mode."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from state_backend.adapters.rocks import EngineOptions
from state_backend.ports.storage import Storage
from state_backend.shard.changelog_store import ChangelogOptions, ShardChangelog
from state_backend.shard.consolidation import Consolidation, consolidate, count_bytes, most_bytes
from state_backend.shard.file_cache import FileCache
from state_backend.shard.restore import RestoredShard, restore_shard
from state_backend.shard.snapshot import Snapshot, take_snapshot
from state_backend.state.shard_state import ShardState
from state_backend.values.key_groups import KeyGroupRange, check_whole, range_of
from state_backend.values.records import ShardManifest, StateDescriptor
from tests.support.shards import STATES

ENGINE = EngineOptions()
Mode = Literal["incremental", "full", "changelog", "savepoint"]
Change = Callable[[ShardState, KeyGroupRange], None]


class Chain:
    """A pipeline's shards; ``manifests`` is its last checkpoint, and ``snapshots`` what taking that cost per shard.

    A savepoint here is the native one: compacted, everything written anew, nothing inline. With ``consolidates`` files are merged
    as in a pipeline's interval; ``merged`` is told how. With ``saves`` a shard that nothing changed keeps its manifest, and segments
    are bounded, as there.
    """

    def __init__(
        self,
        folder: Path,
        storage: Storage,
        *,
        max_parallelism: int,
        states: Sequence[StateDescriptor] = STATES,
        engine: EngineOptions = ENGINE,
        inline_budget_bytes: int = 0,
        changelog: ChangelogOptions = ChangelogOptions(),  # noqa: B008
        consolidates: bool = False,
        saves: bool = False,
        cache: FileCache | None = None,
    ) -> None:
        self.storage = storage
        self.max_parallelism = max_parallelism
        self.states = states
        self.engine = engine
        self.inline_budget_bytes = inline_budget_bytes
        self.changelog = changelog
        self.consolidates, self.merged = consolidates, list[Consolidation]()
        self.saves, self.cache = saves, cache
        self.parallelism, self.changed_bytes = 1, 0
        self.manifests: list[ShardManifest] = []
        self.snapshots: list[Snapshot] = []
        self.now_ms = 0
        self.runs = 0
        self.attempt = ""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def digest(self) -> int:
        return sum(m.digest for m in self.manifests) % 2**64

    @property
    def entries(self) -> int:
        return sum(m.entries for m in self.manifests)

    def open(self, owned: KeyGroupRange, name: str = "db") -> tuple[RestoredShard, ShardState]:
        directory = self._folder / f"{name}-{self.runs}-{owned.first}"
        restored = restore_shard(owned, self.manifests, self.storage, directory, self.engine, self.cache)
        state = ShardState(
            restored.store, key_groups=restored.key_group_states, descriptors=self.states, now_ms=self.now_ms
        )
        return restored, state

    def step(
        self, parallelism: int, mode: Mode, change: Change | None = None, *, attempt: str | None = None
    ) -> list[ShardManifest]:
        """Restores all shards at ``parallelism``, changes them, and takes the next checkpoint. Of a changelog a shard that has
        no base of its own range takes files, as a pipeline does."""
        self.runs += 1
        self.attempt = attempt or f"attempt-{self.runs}"
        self.parallelism, self.merged, self.changed_bytes = parallelism, [], 0
        taken = []
        for shard in range(parallelism):
            owned = range_of(shard, parallelism, self.max_parallelism)
            taken.append(self._shard(shard, owned, mode, change))
        self.snapshots = [one for one in taken if isinstance(one, Snapshot)]
        self.manifests = [one.manifest if isinstance(one, Snapshot) else one for one in taken]
        check_whole([m.key_groups for m in self.manifests], self.max_parallelism)
        return self.manifests

    def _shard(self, shard: int, owned: KeyGroupRange, mode: Mode, change: Change | None) -> Snapshot | ShardManifest:
        restored, state = self.open(owned)
        scratch = self._folder / f"scratch-{self.runs}-{shard}"
        scratch.mkdir()
        with restored.store as store:
            snapshot: Snapshot | ShardManifest
            recorder = None
            if mode == "changelog" and restored.base is not None:
                base = replace(restored.base, shard=shard)
                recorder = ShardChangelog(store, base, scratch / "changes", self.changelog)
            if change is not None:
                change(state, owned)
            states = state.key_group_states()
            self.changed_bytes += state.stored.changed_bytes
            most = most_bytes(store, states, self.engine) if self.saves else None
            if self.saves and not state.stored.changed_bytes and self.parallelism == len(self.manifests):
                snapshot = self.manifests[shard]
            elif recorder is not None and recorder.fits(most):
                snapshot = recorder.append(
                    self.storage,
                    attempt=self.attempt,
                    task=shard,
                    key_group_states=states,
                    inline_budget_bytes=self.inline_budget_bytes,
                )
            else:
                if mode == "savepoint":
                    store.compact()
                elif self.consolidates:
                    states = count_bytes(store, states)
                    if len(self.manifests) in (0, self.parallelism):
                        merged = consolidate(
                            store,
                            key_groups=states,
                            options=self.engine,
                            shard=shard,
                            parallelism=self.parallelism,
                            sequence=self.runs,
                        )
                        self.merged.append(merged)
                snapshot = take_snapshot(
                    store,
                    self.storage,
                    image=scratch / "image",
                    attempt=self.attempt,
                    shard=shard,
                    task=shard,
                    key_groups=owned,
                    key_group_states=states,
                    opened=restored.opened if mode not in ("full", "savepoint") else None,
                    inline_budget_bytes=self.inline_budget_bytes,
                    cache=self.cache,
                )
        shutil.rmtree(scratch)
        shutil.rmtree(store.directory)
        return snapshot
