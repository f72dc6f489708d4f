"""A pipeline's state over many intervals, without Spark: each batch restores every shard, changes it and checkpoints it.

What an interval's shard task does with state is done here by the same functions, in the same order, shard after shard in
one process, over local storage with its syncs. Checkpoints are kept and dropped as a retention of the last ``retained`` does it.
"""

from __future__ import annotations

import math
import random
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
from state_backend.formats.key_codec import KeyCodec
from state_backend.formats.types import parse_struct
from state_backend.shard.changelog_store import ChangelogOptions
from state_backend.shard.consolidation import Consolidation
from state_backend.shard.file_cache import FileCache
from state_backend.shard.restore import RestoredShard
from state_backend.shard.snapshot import INLINE_RECORD_BYTES
from state_backend.state.expiry import expire
from state_backend.state.layout import prefix
from state_backend.state.shard_state import ShardState
from state_backend.state.state_variables import ListState, MapState, ValueState
from state_backend.state.timers import delete_timer, due_timers, register_timer, timers
from state_backend.values.key_groups import KeyGroupRange, range_of, shard_of
from state_backend.values.records import SchemaVersion, ShardManifest, StateDescriptor, StateKind
from tests.support.chains import Chain
from tests.support.shards import struct

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
    batches: list[Batch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng: Any = np.random.default_rng(self.seed)
        self._storage = LocalStorage(self.folder / "storage")
        self._checkpoints: deque[dict[str, int]] = deque()
        self._chain = Chain(
            self.folder / "work",
            self._storage,
            max_parallelism=MAX_PARALLELISM,
            states=self.states,
            engine=self.options,
            changelog=self.changelog or ChangelogOptions(),
            consolidates=True,
            saves=True,
            cache=self.cache,
        )

    @property
    def manifests(self) -> list[ShardManifest]:
        """The last checkpoint."""
        return self._chain.manifests

    @manifests.setter
    def manifests(self, manifests: list[ShardManifest]) -> None:
        self._chain.manifests = manifests

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
        chain = self._chain
        chain.now_ms, chain.inline_budget_bytes = now_ms, INLINE_RECORD_BYTES // parallelism

        def change_shard(state: ShardState, owned: KeyGroupRange) -> None:
            change(state, shard_of(owned.first, parallelism, MAX_PARALLELISM))

        manifests = chain.step(parallelism, "changelog" if self.changelog else "incremental", change_shard)
        self.parallelism = parallelism
        files = {handle.path: handle.size_bytes for m in manifests for handle in m.handles}
        inline_bytes = sum(m.size_bytes for m in manifests) - sum(files.values())
        self._retain(files)
        batch = Batch(
            changed_bytes=chain.changed_bytes,
            uploaded_bytes=sum(s.uploaded_bytes for s in chain.snapshots),
            uploaded_files=sum(s.uploaded_files for s in chain.snapshots),
            live_files=sum(len(m.files) + sum(f.name.endswith(SST_SUFFIX) for f in m.inline_files) for m in manifests),
            checkpoint_bytes=sum(files.values()) + inline_bytes,
            retained_bytes=inline_bytes
            + sum({path: n for files in self._checkpoints for path, n in files.items()}.values()),
            merged=tuple(chain.merged),
        )
        self.batches.append(batch)
        return batch

    def _retain(self, files: dict[str, int]) -> None:
        """Files that only a checkpoint beyond the retained ones names are deleted, as the clean-up of a commit does."""
        self._checkpoints.append(files)
        if len(self._checkpoints) > self.retained:
            dropped = self._checkpoints.popleft()
            for path in dropped.keys() - {path for checkpoint in self._checkpoints for path in checkpoint}:
                self._storage.delete(path)

    @contextmanager
    def restored(self, shard: int, parallelism: int) -> Iterator[RestoredShard]:
        """A shard of this layout, open while the block runs, in a folder that is gone afterwards."""
        restored, _ = self._chain.open(range_of(shard, parallelism, MAX_PARALLELISM), "look")
        try:
            yield restored
        finally:
            restored.store.close()
            shutil.rmtree(restored.store.directory)

    def compacted_bytes(self) -> int:
        """What the live state takes when every shard is rewritten: the least that a checkpoint can have."""
        total = 0
        for shard in range(self.parallelism):
            with self.restored(shard, self.parallelism) as restored:
                restored.store.compact()
                total += sum(run.size_bytes for run in restored.store.sorted_runs())
        return total


HOUR_MS = 3_600_000
GAP_MS = 2 * HOUR_MS


_KEYS = KeyCodec(parse_struct(struct(("user", "string"))))


def _descriptor(state_id: int, name: str, kind: StateKind, ttl_ms: int | None = None) -> StateDescriptor:
    version = SchemaVersion(
        version=1,
        value=struct(("at_ms", "long"), ("what", "string")),
        user_key=struct(("page", "string")) if kind == "map" else None,
    )
    return StateDescriptor(name=name, kind=kind, state_id=state_id, ttl_ms=ttl_ms, versions=(version,))


SESSION_STATES = (
    _descriptor(1, "session", "value"),
    _descriptor(2, "events", "list"),
    _descriptor(3, "pages", "map"),
    _descriptor(4, "recent", "list", 3 * HOUR_MS),
    _descriptor(5, "seen", "map", 5 * HOUR_MS),
)


class SessionHistory(History):
    """Grows by ``hour``. ``keys`` is the number of users; a third of them is active in a busy hour."""

    def hour(self) -> Batch:
        """The next hour: events, then timers, then expiry, as an interval's task does it."""
        number = len(self.batches)
        now_ms = number * HOUR_MS
        rng = random.Random(self.seed * 1_000_003 + number)
        # From a twentieth of the busiest hour, at night, to all of it.
        active = round(self.keys / 3 * (0.525 - 0.475 * math.cos(2 * math.pi * number / 24)))
        users = sorted(rng.sample(range(self.keys), active), key=lambda user: user % MAX_PARALLELISM)

        def change(state: ShardState, shard: int) -> None:
            session, events, pages = (
                ValueState(state, "session"),
                ListState(state, "events"),
                MapState(state, "pages"),
            )
            recent, seen = ListState(state, "recent"), MapState(state, "seen")
            for user in users:
                key_group = user % MAX_PARALLELISM
                if key_group * self.parallelism // MAX_PARALLELISM != shard:
                    continue
                state.set_key(key_group, _KEYS.encode((f"user-{user}",)))
                for _ in range(rng.randint(1, 6)):
                    page = f"/page/{rng.randint(0, 500)}"
                    row = (now_ms, f"{page}?{rng.getrandbits(rng.choice((32, 256))):x}")
                    events.append_value(row)
                    pages.update_value((page,), row)
                    recent.append_value(row)
                    seen.update_value((page,), (now_ms, None))
                for expiry_ms in list(timers(state)):
                    delete_timer(state, expiry_ms)
                register_timer(state, now_ms + GAP_MS + rng.randrange(HOUR_MS))
                session.update((now_ms, f"{rng.getrandbits(128):x}"))
            state.flush()
            for _ in due_timers(state, now_ms):
                session.clear()
                events.clear()
                pages.clear()
            expire(state)

        return self.run_interval(change, now_ms=now_ms)


def session_history(
    folder: Path, users: int, parallelism: int, changelog: ChangelogOptions | None = None
) -> SessionHistory:
    """An empty one in ``folder``, without a cache."""
    return SessionHistory(
        folder=folder, keys=users, parallelism=parallelism, states=SESSION_STATES, changelog=changelog
    )
