"""What a call may read, hold and cost, however large a key's state is."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from state_backend.adapters.rocks import RocksStore
from state_backend.state import shard_state, stored_entries
from state_backend.state.shard_state import ShardState
from state_backend.state.state_variables import ListState, MapState, ValueState
from state_backend.state.timers import delete_timer, due_timers, register_timer, timers
from tests.support.shards import KEYS, STATES, open_state

MIB = 1024 * 1024


def filled(tmp_path: Path, entries: int) -> ShardState:
    """A map of one key, in the store."""
    state = open_state(tmp_path, now_ms=0)
    state.set_key(1, KEYS.encode(("a",)))
    map_ = MapState(state, "map")
    for n in range(entries):
        map_.update_value((f"{n:05d}",), (n, None))
    state.flush()
    return state


def test_the_first_map_entry_is_read_without_the_other_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = filled(tmp_path, 5_000)
    read, read_range = list[int](), RocksStore.read_range

    def counted(*args: Any, **named: Any) -> Any:
        found = read_range(*args, **named)
        read.append(len(found[0]))
        return found

    monkeypatch.setattr(RocksStore, "read_range", counted)
    map_ = MapState(state, "map")
    assert map_.exists() and next(map_.iterator()) == (("00000",), (0, None))
    assert sum(read) <= 64
    map_.remove_key(("00000",))
    assert map_.exists() and next(map_.iterator())[0] == ("00001",)
    assert len(list(map_.iterator())) == 4_999
    map_.clear()
    assert not map_.exists()
    map_.update_value(("x",), (1, None))
    assert map_.exists()
    state.store.close()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.long("seconds", runs_in="ci")
def test_a_map_iterator_does_not_see_later_writes(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is written and flushed while it is under way, and whatever was not flushed before."""
    monkeypatch.setattr(shard_state, "_SCANNED_CHANGES", 50)
    pick = random.Random(seed)
    state = filled(tmp_path, 600)
    map_ = MapState(state, "map")
    model: dict[str, int] = {f"{n:05d}": n for n in range(600)}
    for _ in range(3):
        # It begins with its first entry, before any change of this round.
        begun = [(sorted(model.items()), map_.iterator())]
        found: list[list[tuple[str, int]]] = [[]]
        while begun:
            at = pick.randrange(len(begun))
            for _ in range(pick.choice([1, 40, 300])):
                entry = next(begun[at][1], None)
                if entry is None:
                    assert found.pop(at) == begun.pop(at)[0]
                    break
                found[at].append((entry[0][0], entry[1][0]))
            for _ in range(pick.choice([0, 1, 30, 100])):
                key = f"{pick.randrange(700):05d}{pick.choice(['', 'x'])}"
                if pick.random() < 0.4:
                    map_.remove_key((key,))
                    model.pop(key, None)
                else:
                    model[key] = pick.randrange(1_000)
                    map_.update_value((key,), (model[key], None))
            if pick.random() < 0.3:
                state.flush()
            if pick.random() < 0.2 and len(begun) < 4:
                now, iterator = sorted(model.items()), map_.iterator()
                first = next(iterator)
                begun.append((now, iterator))
                found.append([(first[0][0], first[1][0])])
    assert [(u, n) for (u,), (n, _) in map_.iterator()] == sorted(model.items())


@pytest.mark.parametrize("seed", range(8))
def test_a_list_iterator_yields_the_list_as_it_was_at_its_first_element(tmp_path: Path, seed: int) -> None:
    """Whatever rewrites or flushes the list meanwhile, for lists that are longer than what is read ahead."""
    pick, state = random.Random(seed), open_state(tmp_path, now_ms=0)
    state.set_key(1, KEYS.encode(("a",)))
    list_, model = ListState(state, "list"), [*range(1_000)]
    list_.put([(n, None) for n in model])
    for _ in range(30):
        expected, iterator = [*model], list_.get()
        found = [n for n, _ in islice(iterator, pick.choice([1, 255, 256, 300]))]
        for _ in range(pick.choice([1, 3])):
            change = pick.choice(["put", "clear", "append", "flush"])
            rows = [pick.randrange(1_000) for _ in range(pick.choice([1, 300, 900]))]
            if change == "flush":
                state.flush()
            elif change == "append":
                list_.append_list([(n, None) for n in rows])
                model += rows
            else:
                list_.put([(n, None) for n in rows]) if change == "put" else list_.clear()
                model = rows if change == "put" else []
        list_.append_value((7, None))
        model.append(7)
        assert [*found, *(n for n, _ in iterator)] == expected
        assert [n for n, _ in list_.get()] == model


def test_timers_of_a_key_with_initial_state_and_input_are_all_listed(tmp_path: Path) -> None:
    state, key = open_state(tmp_path, now_ms=0), KEYS.encode(("a",))
    state.set_key(1, key)
    assert [*timers(state)] == []
    for at_ms in range(18):
        register_timer(state, at_ms)
        state.flush()
        # The runner reads ahead in one call: the key's initial rows, and then its input.
        state.read_ahead(np.array([1, 1], np.uint16), pa.array([key, key], pa.binary()))
        assert [*timers(state)] == [*range(at_ms + 1)]


def test_an_iterator_that_is_not_used_up_keeps_no_store_open(tmp_path: Path) -> None:
    state = filled(tmp_path, 500)
    iterator = MapState(state, "map").iterator()
    next(iterator)
    state.store.close()
    with RocksStore(tmp_path) as store:
        assert next(iter(store.scan(b"", None)))


@pytest.mark.parametrize("kind", ["list", "map"])
def test_small_entries_count_toward_the_memory_limit_with_their_python_overhead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Ten bytes an entry: by these alone thousands would be held."""
    state = open_state(tmp_path, now_ms=0)
    state.set_key(1, KEYS.encode(("a",)))
    lists, maps = ListState(state, "list"), MapState(state, "map")
    for n in range(5_000):
        lists.append_value((n, None))
        maps.update_value((f"{n:05d}",), (n, None))
    state.flush()
    monkeypatch.setattr(shard_state, "GATHERED_BYTES", 100_000)
    monkeypatch.setattr(shard_state, "_MOST_SCAN_ROWS", 256)
    held, read = 0, 0
    for _ in lists.get() if kind == "list" else maps.iterator():
        held, read = max(held, len(state.cache)), read + 1
    assert read == 5_000
    assert held <= 100_000 // 200 + 256 + 2
    state.store.close()


def test_a_prefetch_stops_when_its_byte_limit_is_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_state, "PREFETCH_BYTES", 10_000)
    state = open_state(tmp_path, now_ms=0)
    value = ValueState(state, "value")
    keys = [KEYS.encode((f"{n:03d}",)) for n in range(100)]
    for key in keys:
        state.set_key(1, key)
        value.update((1, "x" * 1_000))
    state = ShardState(state.store, key_groups=state.key_group_states(), descriptors=STATES, now_ms=0)
    value = ValueState(state, "value")
    groups, done, rounds = np.ones(100, np.uint16), 0, []
    while done < len(keys):
        state.flush()
        rounds.append(state.prefetch(groups[done:], pa.array(keys[done:], pa.binary())))
        assert len(state.cache) == rounds[-1]
        done += rounds[-1]
    assert done == 100 and max(rounds) <= 20 + 4


def test_entries_that_are_written_in_parts_are_all_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_entries, "_WRITE_BYTES", 10)
    state = open_state(tmp_path, now_ms=0)
    entries = {b"%d" % n: b"x" * n for n in (9, 1, 2, 30, 3)}
    state.stored.put_many([*entries], [*entries.values()])
    assert dict(state.store.scan(b"", None)) == entries
    state.store.close()


def test_many_timers_of_one_key_take_bounded_time_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """30,000 took minutes when each call wrote all of a key's."""
    monkeypatch.setattr(shard_state, "GATHERED_BYTES", MIB)
    state = open_state(tmp_path, now_ms=0)
    state.set_key(1, KEYS.encode((None,)))
    begun = time.process_time()
    for change, step in ((register_timer, 1), (delete_timer, 3)):
        for at_ms in range(0, 30_000, step):
            change(state, at_ms)
        assert state.gathered_bytes <= MIB
    assert sum(1 for _ in due_timers(state, 30_000)) == 20_000
    assert time.process_time() - begun < 15
    assert state.key_group_states() == ()


GIGABYTES = pytest.mark.long("minutes, and gigabytes on disk")
LARGE = [
    (1_000, 400_000, "value", 600 * MIB),
    pytest.param(75, 30_000_000, "value", 1024 * MIB, marks=GIGABYTES),
    pytest.param(10_000, 250_000, "value", 1024 * MIB, marks=GIGABYTES),
    pytest.param(2_500, 1_000_000, "map", 1024 * MIB, marks=GIGABYTES),
]


@pytest.mark.parametrize(("keys", "value_bytes", "kind", "most_bytes"), LARGE)
@pytest.mark.long("seconds", runs_in="ci")
def test_large_state_takes_bounded_memory(keys: int, value_bytes: int, kind: str, most_bytes: int) -> None:
    """All keys come in one batch, and are changed in two intervals."""
    command = [sys.executable, "-m", "tests.support.large_values", str(keys), str(value_bytes), kind]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < most_bytes
