"""Expiry and timers through restore and rescaling, as Flink and Spark show them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.adapters.rocks import RocksStore
from state_backend.formats.spark_hash import key_group
from state_backend.formats.types import parse_struct
from state_backend.state import layout
from state_backend.state.expiry import expire
from state_backend.state.shard_state import ShardState
from state_backend.state.state_variables import ListState, MapState, ValueState
from state_backend.values.key_groups import KeyGroupRange
from tests.support.chains import Chain, Mode
from tests.support.shards import KEY_SCHEMA, KEYS, STATES

GROUPS = 8
NAMES = [f"k{n}" for n in range(20)]


def owner_of(name: str) -> int:
    return key_group((name,), parse_struct(KEY_SCHEMA), GROUPS)


def choose(state: ShardState, owned: KeyGroupRange, name: str) -> bool:
    group = key_group((name,), parse_struct(KEY_SCHEMA), GROUPS)
    if group in owned:
        state.set_key(group, KEYS.encode((name,)))
    return group in owned


def write(state: ShardState, owned: KeyGroupRange) -> None:
    for name in NAMES:
        if choose(state, owned, name):
            ValueState(state, "value_ttl").update((1, None))
            ListState(state, "list_ttl").append_value((state.now_ms, None))
            MapState(state, "map_ttl").update_value((f"at {state.now_ms}",), (1, None))


@pytest.mark.parametrize("mode", ["incremental", "full", "changelog", "savepoint"])
@pytest.mark.long("half a second", runs_in="ci")
def test_expiry_outlives_restore_and_rescaling(tmp_path: Path, mode: Mode) -> None:
    """F88, F89, S37: written at 0, again at 50, for 100 each: at 149 all values are there and the older elements are gone; at
    150, the very end, nothing is, and what is deleted leaves no index and no digest."""
    chain = Chain(tmp_path / "chain", MemoryStorage(), max_parallelism=GROUPS)
    chain.step(1, "incremental", write)
    chain.now_ms = 50
    chain.step(1, mode, write)

    def look(state: ShardState, owned: KeyGroupRange) -> None:
        alive = state.now_ms < 150
        for name in NAMES:
            if choose(state, owned, name):
                assert ValueState(state, "value_ttl").exists() == alive
                assert list(ListState(state, "list_ttl").get()) == [(50, None)][: int(alive)]
                assert [u for u, _ in MapState(state, "map_ttl").iterator()] == [("at 50",)][: int(alive)]
        expire(state)

    for now_ms, parallelism, entries in ((149, 4, 60), (150, 2, 0)):
        chain.now_ms = now_ms
        chain.step(parallelism, mode, look)
        assert chain.entries == entries
    assert chain.digest == 0


def test_a_changed_ttl_applies_only_to_values_written_afterwards(tmp_path: Path) -> None:
    """F89, F90, S37: an expiry that changes counts for what is written from then on; what is there keeps its own. Switched off, what
    is written is permanent, but what has an expiry still expires (Flink makes that permanent too); switched on again, a permanent
    value stays until it is written."""
    chain = Chain(tmp_path / "chain", MemoryStorage(), max_parallelism=GROUPS)
    chain.step(2, "incremental", write)
    chain.states = tuple(replace(d, ttl_ms=None) for d in STATES)
    chain.step(1, "incremental")
    chain.now_ms = 1_000

    def refresh(state: ShardState, owned: KeyGroupRange) -> None:
        choose(state, owned, "k0")
        assert not ValueState(state, "value_ttl").exists()
        ValueState(state, "value_ttl").update((2, None))
        expire(state)

    chain.step(1, "incremental", refresh)
    assert chain.entries == 1
    chain.states, chain.now_ms = STATES, 10**9
    chain.step(1, "incremental", lambda state, owned: expire(state) and None)
    assert chain.entries == 1

    def touch(state: ShardState, owned: KeyGroupRange) -> None:
        choose(state, owned, "k0")
        assert ValueState(state, "value_ttl").get() == (2, None)
        ValueState(state, "value_ttl").update((3, None))
        expire(state)

    chain.step(2, "incremental", lambda state, owned: touch(state, owned) if owner_of("k0") in owned else None)
    chain.now_ms += 99
    chain.step(1, "incremental", lambda state, owned: expire(state) and None)
    assert chain.entries == 1
    chain.now_ms += 1
    chain.step(1, "incremental", lambda state, owned: expire(state) and None)
    assert (chain.entries, chain.digest) == (0, 0)


def test_expired_elements_of_interleaved_lists_are_all_removed_at_once(tmp_path: Path) -> None:
    """The expiry index has the first elements of both lists, then the second ones. All go at once."""
    state = ShardState(RocksStore(tmp_path / "db"), key_groups=(), descriptors=STATES, now_ms=0)
    for state.now_ms in (0, 1, 50):
        for name in "ab":
            state.set_key(1, KEYS.encode((name,)))
            ListState(state, "list_ttl").append_value((1, None))
        state.flush()
    state.now_ms = 101
    assert expire(state) == 4
    positions = [entry for _, entry in state.store.scan(b"", None) if entry and layout.is_positions(entry)]
    assert [*map(layout.unpack_positions, positions)] == [(2, 3)] * 2
    state.now_ms = 150
    assert expire(state) == 2
    assert [*state.store.scan(b"", None)] == []
    state.store.close()


@pytest.mark.long("half a second", runs_in="ci")
def test_iterating_a_map_or_list_while_it_changes_sees_each_entry_once(tmp_path: Path) -> None:
    """F23: each of 10,000 map entries and list elements is seen once, though the loop removes what it sees, adds others behind
    and appends; a snapshot afterwards has what is left."""
    chain = Chain(tmp_path / "chain", MemoryStorage(), max_parallelism=GROUPS)
    users = [f"{n:05d}" for n in range(10_000)]

    def change(state: ShardState, owned: KeyGroupRange) -> None:
        choose(state, owned, "k0")
        entries, elements = MapState(state, "map"), ListState(state, "list")
        for n, user in enumerate(users):
            entries.update_value((user,), (n, None))
        elements.append_list([(n, None) for n in range(10_000)])
        state.flush()
        seen = []
        for (user,), (n, _) in entries.iterator():
            assert user == users[n]
            seen.append(user)
            entries.remove_key((user,))
            entries.update_value((f"~{n % 3}",), (n, None))
            if len(seen) % 1000 == 0:
                state.flush()
        assert seen[:10_000] == users and {*seen[10_000:]} <= {"~0", "~1", "~2"}
        numbers = []
        for n, _ in elements.get():
            numbers.append(n)
            if n % 1000 == 0:
                elements.append_value((-1, None))
                state.flush()
        assert [n for n in numbers if n >= 0] == [*range(10_000)]

    chain.step(1, "incremental", change)
    restored, state = chain.open(chain.manifests[0].key_groups)
    with restored.store:
        assert choose(state, chain.manifests[0].key_groups, "k0")
        left = [n for _, (n, _) in MapState(state, "map").iterator()], [n for n, _ in ListState(state, "list").get()]
    assert left == ([9_999, 9_997, 9_998], [*range(10_000), *[-1] * 10])
