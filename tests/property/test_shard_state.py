"""Random programs of state calls against a model of plain dicts, with restarts, expiry and timers in between."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from state_backend.adapters.change_recorder import ChangeRecorder
from state_backend.adapters.local_storage import LocalStorage
from state_backend.adapters.rocks import EngineOptions
from state_backend.formats.spark_hash import key_group as key_group_of
from state_backend.formats.types import parse_struct
from state_backend.shard.changelog_store import ChangelogOptions, ShardChangelog
from state_backend.shard.consolidation import count_bytes
from state_backend.shard.restore import RestoredShard, restore_shard
from state_backend.shard.snapshot import Snapshot, take_snapshot
from state_backend.state import shard_state, state_variables, stored_entries
from state_backend.state.check_shard import verify_shard
from state_backend.state.expiry import expire
from state_backend.state.shard_state import ShardState
from state_backend.state.state_columns import ValueColumns
from state_backend.state.state_variables import ListState, MapState, ValueState
from state_backend.state.timers import delete_timer, due_timers, register_timer, timers
from state_backend.values.key_groups import KeyGroupRange, range_of
from state_backend.values.records import ShardManifest
from tests.support.shards import KEY_SCHEMA, KEYS, STATES
from tests.support.tiers import at_tier

MAX_PARALLELISM = 8
# Thresholds so low that some intervals go past them, and some that none does.
CHANGELOGS = [ChangelogOptions(max_bytes=1_500, max_segments=3), ChangelogOptions(max_segments=1), ChangelogOptions()]
KEY = parse_struct(KEY_SCHEMA)
keys = st.sampled_from(["", "a", "b", "\x00", "ä", "zz"])
rows = st.tuples(st.one_of(st.none(), st.integers(-5, 5)), st.one_of(st.none(), st.text(max_size=3)))
ttls = st.sampled_from(["", "_ttl"])
times = st.integers(-300, 1500)

BOUNDS = shard_state.PREFETCH_BYTES, shard_state.GATHERED_BYTES, shard_state.PART_BYTES


def _bound(prefetch_bytes: int, gathered_bytes: int, part_bytes: int) -> None:
    shard_state.PREFETCH_BYTES, shard_state.PART_BYTES = prefetch_bytes, part_bytes
    shard_state.GATHERED_BYTES = state_variables.GATHERED_BYTES = gathered_bytes


Model = dict[str, dict[Any, tuple[tuple[Any, ...], int | None]]]


class StateMachine(RuleBasedStateMachine):
    """One pipeline over several shards; ``model`` is what the state must be: per state, entries with their expiry."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="cairn-test-"))
        self.storage = LocalStorage(self.folder / "root")
        self.now_ms = 0
        self.runs = 0
        self.manifests: list[ShardManifest] = []
        self.values: Model = {"value": {}, "value_ttl": {}}
        self.lists: dict[str, dict[str, list[tuple[tuple[Any, ...], int | None]]]] = {"list": {}, "list_ttl": {}}
        self.maps: Model = {"map": {}, "map_ttl": {}}
        self.timers: set[tuple[str, int]] = set()
        self.shards: list[tuple[KeyGroupRange, Any, ShardState]] = []
        self.recorders: list[tuple[ShardManifest, ChangeRecorder] | None] = []

    def teardown(self) -> None:
        for _, restored, _ in self.shards:
            restored.store.close()
        shutil.rmtree(self.folder)
        stored_entries.MIN_COLUMN_ROWS, stored_entries.MIN_SCAN_ROWS = 64, 16
        _bound(*BOUNDS)

    @initialize(
        parallelism=st.integers(1, 4),
        by_columns=st.booleans(),
        by_scan=st.booleans(),
        changelog=st.sampled_from(CHANGELOGS),
        bounds=st.sampled_from([BOUNDS, (50, 0, 30), (20, 2_000, 1)]),
    )
    def begin(
        self,
        parallelism: int,
        by_columns: bool,
        by_scan: bool,
        changelog: ChangelogOptions,
        bounds: tuple[int, int, int],
    ) -> None:
        _bound(*bounds)
        self.changelog = changelog
        stored_entries.MIN_COLUMN_ROWS = 1 if by_columns else 1_000
        stored_entries.MIN_SCAN_ROWS = 1 if by_scan else 1_000
        self._open(parallelism)

    def _open(self, parallelism: int) -> None:
        self.runs += 1
        self.shards = []
        self.recorders = []
        for shard in range(parallelism):
            owned = range_of(shard, parallelism, MAX_PARALLELISM)
            directory = self.folder / f"db-{self.runs}-{shard}"
            restored = restore_shard(owned, self.manifests, self.storage, directory, EngineOptions())
            state = ShardState(
                restored.store, key_groups=restored.key_group_states, descriptors=STATES, now_ms=self.now_ms
            )
            self.shards.append((owned, restored, state))
            self.recorders.append(self._recorder(restored, shard, owned))

    def _recorder(self, restored: RestoredShard, shard: int, owned: KeyGroupRange) -> ShardChangelog | None:
        base = restored.base
        if not self.manifests:
            base = ShardManifest(
                shard=shard, key_groups=owned, files=(), inline_files=(), segments=(), key_group_states=()
            )
        if base is None:
            return None
        base = replace(base, shard=shard)
        folder = self.folder / f"changes-{self.runs}-{shard}"
        return ShardChangelog(restored.store, base, folder, self.changelog)

    def _at(self, key: str) -> ShardState:
        key_group = key_group_of((key,), KEY, MAX_PARALLELISM)
        state = next(s for owned, _, s in self.shards if key_group in owned)
        state.set_key(key_group, KEYS.encode((key,)))
        return state

    def _expiry(self, name: str) -> int | None:
        return self.now_ms + 100 if name.endswith("_ttl") else None

    def _alive(self, expiry: int | None) -> bool:
        return expiry is None or expiry > self.now_ms

    @rule(key=keys, row=rows, ttl=ttls)
    def update(self, key: str, row: Any, ttl: str) -> None:
        ValueState(self._at(key), "value" + ttl).update(row)
        self.values["value" + ttl][key] = (row, self._expiry("value" + ttl))

    @rule(key=keys, ttl=ttls)
    def clear_value(self, key: str, ttl: str) -> None:
        ValueState(self._at(key), "value" + ttl).clear()
        self.values["value" + ttl].pop(key, None)

    @rule(new=st.dictionaries(keys, st.one_of(st.none(), rows), min_size=1), ttl=ttls)
    def replace_columns(self, new: dict[str, Any], ttl: str) -> None:
        """Several keys at a time, as the vectorised API does it; None clears."""
        name = "value" + ttl
        for _, _, state in self.shards:
            state.flush()
            batch = self._batch(state, new)
            if not batch:
                continue
            columns = ValueColumns(state, next(d for d in STATES if d.name == name))
            groups = np.array([group for group, _, _ in batch], np.uint16)
            table, exists = columns.read(groups, pa.array([encoded for _, encoded, _ in batch], pa.binary()))
            before = [
                tuple(row.values()) if there else None for row, there in zip(table.to_pylist(), exists, strict=True)
            ]
            assert before == [self._visible(self.values[name].get(key)) for _, _, key in batch]
            written = [new[key] or (None, None) for _, _, key in batch]
            table = pa.table(dict(zip(("n", "s"), zip(*written, strict=True), strict=True)), columns.schema)
            columns.write(table, np.array([new[key] is None for _, _, key in batch]))
        for key, row in new.items():
            if row is None:
                self.values[name].pop(key, None)
            else:
                self.values[name][key] = (row, self._expiry(name))

    @rule(wanted=st.sets(keys))
    def begin_batch(self, wanted: set[str]) -> None:
        """What a batch's keys need is read at once: by multi-get, or by a scan where they are many."""
        for _, _, state in self.shards:
            state.flush()
            batch = self._batch(state, wanted)
            if batch:
                for name in ("value", "value_ttl"):
                    ValueState(state, name)
                for name in ("list", "list_ttl"):
                    ListState(state, name)
                groups = np.array([group for group, _, _ in batch], np.uint16)
                state.prefetch(groups, pa.array([encoded for _, encoded, _ in batch], pa.binary()))

    def _batch(self, state: ShardState, wanted: Iterable[str]) -> list[tuple[int, bytes, str]]:
        """(key group, encoded key, key) of those that the state's shard owns, ascending."""
        (owned,) = (owned for owned, _, s in self.shards if s is state)
        located = [(key_group_of((key,), KEY, MAX_PARALLELISM), KEYS.encode((key,)), key) for key in wanted]
        return sorted(entry for entry in located if entry[0] in owned)

    def _visible(self, held: tuple[tuple[Any, ...], int | None] | None) -> tuple[Any, ...] | None:
        return held[0] if held is not None and self._alive(held[1]) else None

    @rule(key=keys, new=st.lists(rows, min_size=1, max_size=3), ttl=ttls, put=st.booleans())
    def extend(self, key: str, new: list[Any], ttl: str, put: bool) -> None:
        state = ListState(self._at(key), "list" + ttl)
        (state.put if put else state.append_list)(new)
        before = [] if put else self.lists["list" + ttl].get(key, [])
        self.lists["list" + ttl][key] = before + [(row, self._expiry("list" + ttl)) for row in new]

    @rule(key=keys, ttl=ttls)
    def clear_list(self, key: str, ttl: str) -> None:
        ListState(self._at(key), "list" + ttl).clear()
        self.lists["list" + ttl].pop(key, None)

    @rule(key=keys, user_key=keys, row=rows, ttl=ttls)
    def put(self, key: str, user_key: str, row: Any, ttl: str) -> None:
        MapState(self._at(key), "map" + ttl).update_value((user_key,), row)
        self.maps["map" + ttl][key, user_key] = (row, self._expiry("map" + ttl))

    @rule(key=keys, user_key=keys, ttl=ttls)
    def remove(self, key: str, user_key: str, ttl: str) -> None:
        MapState(self._at(key), "map" + ttl).remove_key((user_key,))
        self.maps["map" + ttl].pop((key, user_key), None)

    @rule(key=keys, ttl=ttls)
    def clear_map(self, key: str, ttl: str) -> None:
        MapState(self._at(key), "map" + ttl).clear()
        self.maps["map" + ttl] = {k: v for k, v in self.maps["map" + ttl].items() if k[0] != key}

    @rule(key=keys, time_ms=times)
    def register(self, key: str, time_ms: int) -> None:
        register_timer(self._at(key), time_ms)
        self.timers.add((key, time_ms))

    @rule(key=keys, time_ms=times)
    def delete_timer(self, key: str, time_ms: int) -> None:
        delete_timer(self._at(key), time_ms)
        self.timers.discard((key, time_ms))

    @rule()
    def end_of_batch(self) -> None:
        for _, _, state in self.shards:
            state.flush()

    @rule(
        parallelism=st.integers(1, 4),
        passed_ms=st.integers(0, 150),
        mode=st.sampled_from(["incremental", "full", "changelog"]),
    )
    def end_of_interval(self, parallelism: int, passed_ms: int, mode: str) -> None:
        self._end(parallelism, passed_ms, mode)

    @rule(passed_ms=st.integers(0, 150))
    def end_of_a_changelog_interval(self, passed_ms: int) -> None:
        """With the shards as they are, so that segments follow segments."""
        self._end(len(self.shards), passed_ms, "changelog")

    def _end(self, parallelism: int, passed_ms: int, mode: str) -> None:
        """Timers fire, what expired goes, a checkpoint is taken, and the next interval restores it, rescaled."""
        manifests = []
        for shard, (owned, _, state) in enumerate(self.shards):
            fired = [(KEYS.decode(due.key)[0], due.expiry_ms) for due in self._fire(state)]
            expected = {
                t for t in self.timers if t[1] <= self.now_ms and key_group_of((t[0],), KEY, MAX_PARALLELISM) in owned
            }
            assert set(fired) == expected
            assert [t for _, t in fired] == sorted(t for _, t in fired)
            self.timers -= expected
            expire(state)
            manifests.append(self._checkpoint(shard, mode).manifest)
            assert verify_shard(state.store, manifests[-1], STATES, KEY_SCHEMA, MAX_PARALLELISM)[1] == []
            states = manifests[-1].key_group_states
            assert count_bytes(state.store, [replace(s, size_bytes=None) for s in states]) == states
            state.store.close()
        digest = sum(m.digest for m in manifests) % 2**64
        self.manifests = manifests
        self.now_ms += passed_ms
        self._open(parallelism)
        groups = [s for _, restored, _ in self.shards for s in restored.key_group_states]
        for owned, restored, _ in self.shards:
            expected = replace(manifests[0], key_groups=owned, key_group_states=restored.key_group_states)
            assert verify_shard(restored.store, expected, STATES, KEY_SCHEMA, MAX_PARALLELISM)[1] == []
        assert sum(s.digest for s in groups) % 2**64 == digest

    def _checkpoint(self, shard: int, mode: str) -> Snapshot:
        owned, restored, state = self.shards[shard]
        recorder = self.recorders[shard]
        states = state.key_group_states()
        inline_budget_bytes = 0 if self.runs % 2 else 100_000
        if mode == "changelog" and recorder and recorder.fits():
            return recorder.append(
                self.storage,
                attempt=f"attempt-{self.runs}",
                task=0,
                key_group_states=states,
                inline_budget_bytes=inline_budget_bytes,
            )
        return take_snapshot(
            state.store,
            self.storage,
            image=self.folder / f"image-{self.runs}-{shard}",
            attempt=f"attempt-{self.runs}",
            shard=shard,
            task=0,
            key_groups=owned,
            key_group_states=states,
            opened=restored.opened if mode != "full" else None,
            inline_budget_bytes=inline_budget_bytes,
        )

    def _fire(self, state: ShardState) -> Any:
        for due in due_timers(state, self.now_ms):
            yield due
            delete_timer(state, due.expiry_ms)

    @invariant()
    def reads_as_the_model(self) -> None:
        if not self.shards:
            return
        for key in ["", "a", "b", "\x00", "ä", "zz"]:
            state = self._at(key)
            for name, values in self.values.items():
                row, expiry = values.get(key, (None, None))
                expected = row if row is not None and self._alive(expiry) else None
                assert ValueState(state, name).get() == expected
                assert ValueState(state, name).exists() == (expected is not None)
            for name, lists in self.lists.items():
                alive = [row for row, expiry in lists.get(key, []) if self._alive(expiry)]
                assert list(ListState(state, name).get()) == alive
                assert ListState(state, name).exists() == bool(alive)
            for name, maps in self.maps.items():
                alive_map = {u: row for (k, u), (row, expiry) in maps.items() if k == key and self._alive(expiry)}
                found = list(MapState(state, name).iterator())
                assert {u: row for (u,), row in found} == alive_map
                assert [u for (u,), _ in found] == sorted(alive_map, key=lambda u: u.encode())
                assert MapState(state, name).get_value(("a",)) == alive_map.get("a")
            assert list(timers(state)) == sorted(t for k, t in self.timers if k == key)


TestShardState = StateMachine.TestCase
TestShardState.settings = settings(max_examples=at_tier(fast=2, ci=5, all=40), stateful_step_count=25, deadline=None)
