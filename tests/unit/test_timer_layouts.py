"""Timers as they lay once, all of a key in one entry, and as they lie now: what reads either sees the same. And times for which there
is no date."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from state_backend.adapters.open_storage import open_storage
from state_backend.inspection.state_diff import EntryChange, describe_change, diff_states
from state_backend.inspection.state_table import StateSource, read_table
from state_backend.shard.consolidation import count_bytes
from state_backend.shard.restore import restore_shard
from state_backend.state import layout
from state_backend.state.check_shard import verify_shard
from state_backend.state.forget_keys import remove_keys
from state_backend.state.shard_state import ShardState
from state_backend.state.state_variables import ListState, MapState, ValueState
from state_backend.state.timer_columns import TimerColumns
from state_backend.values.errors import StateTypeError
from state_backend.values.key_groups import range_of
from tests.support.chains import ENGINE
from tests.support.reading import read_timers
from tests.support.shards import KEY_SCHEMA, KEYS, STATES, lay_timers_together, open_state
from tests.support.state_sources import StateChain


def rows_of(source: StateSource, state: str, work: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for shard in range(source.content.parallelism):
        folder = work / f"table-{shard}"
        folder.mkdir(parents=True)
        for table in read_table(source, state, shard, open_storage(source.url), folder):
            found += [{k: v for k, v in row.items() if k != "shard"} for row in table.to_pylist()]
    return found


def diff(first: StateSource, second: StateSource, work: Path) -> list[EntryChange]:
    work.mkdir()
    return list(diff_states(first, second, work))


def findings(chain: StateChain) -> list[str]:
    """What verification finds in the restored shards."""
    found: list[str] = []
    for shard, manifest in enumerate(chain.chain.manifests):
        owned = range_of(shard, chain.parallelism, chain.chain.max_parallelism)
        folder = chain.folder / f"verified-{chain.chain.runs}-{shard}"
        with restore_shard(owned, [manifest], chain.chain.storage, folder, ENGINE).store as store:
            found += verify_shard(store, manifest, STATES, KEY_SCHEMA, chain.chain.max_parallelism)[1]
    return found


def register(state: ShardState, user: Any) -> None:
    for at_ms in (5_000, -7, 5_000 + len(user or "") * 3, 1 << 62):
        state.register_timer(at_ms)


@pytest.mark.parametrize("mode", ["incremental", "changelog", "savepoint"])
@pytest.mark.long("seconds", runs_in="ci")
def test_older_timers_are_read_compared_verified_and_continued(tmp_path: Path, mode: Any) -> None:
    now, once = StateChain(tmp_path / "now"), StateChain(tmp_path / "once")
    now.step(2, "incremental", register)
    once.step(2, "incremental", register)
    once.chain.step(2, mode, lambda state, owned: lay_timers_together(state))
    assert once.chain.digest == now.chain.digest
    assert findings(once) == []
    tables = [rows_of(chain.source(), "$timers", tmp_path / str(n)) for n, chain in enumerate((now, once))]
    assert tables[0] == tables[1] != []
    canonical = once.savepoint("canonical", "canonical")
    assert rows_of(canonical, "$timers", tmp_path / "canonical") == tables[0]
    assert rows_of(once.savepoint("native", "native"), "$timers", tmp_path / "native") == tables[0]

    # The one differs from the other in a timer of one key.
    before = once.source()
    now.step(2, "incremental", lambda state, user: state.delete_timer(-7) if user == "a" else None)
    (change,) = diff(before, now.source(), tmp_path / "diff")
    assert (change.state, change.change, change.key) == ("$timers", "removed", {"k": "a"})
    assert change.before is not None and change.before.value == {"at_ms": -7}

    # Continued, at another parallelism: key groups that are touched, and those that are not.
    def go_on(state: ShardState, user: Any) -> None:
        if user == "a":
            state.delete_timer(-7)
        elif user == "b":
            assert list(state.timers()) == sorted({5_000, -7, 5_003, 1 << 62})
            state.register_timer(5_000)

    for parallelism in (3, 1):
        once.step(parallelism, mode, go_on)
        assert once.chain.digest == now.chain.digest
        assert findings(once) == []
    assert sorted(once.seen()["$timers"], key=repr) == sorted(now.seen()["$timers"], key=repr)
    assert diff(once.source(), now.source(), tmp_path / "again") == []


def test_older_timers_fire_and_go(tmp_path: Path) -> None:
    state = open_state(tmp_path, now_ms=0)
    for name in ("a", "b"):
        state.set_key(1, KEYS.encode((name,)))
        for at_ms in range(20, 0, -1):
            state.register_timer(at_ms)
    lay_timers_together(state)
    state = ShardState(state.store, key_groups=state.key_group_states(), descriptors=STATES, now_ms=0)
    fired = []
    for due in state.due_timers(15):
        fired.append((due.expiry_ms, KEYS.decode(due.key)[0]))
        if due.expiry_ms == 3:
            state.delete_timer(4)  # this key's, that would be next but one
    assert fired == [(at, name) for at in range(1, 16) for name in ("a", "b") if at != 4]
    assert [s.entries for s in state.key_group_states()] == [{"$timers": 10}]
    assert [at for _, _, at in read_timers(state.store)] == [16, 17, 18, 19, 20] * 2
    for due in state.due_timers(layout.MAX_TIME_MS - 1):
        assert due.expiry_ms > 15
    assert state.key_group_states() == () and list(state.store.scan(b"", None)) == []


NEVER = [10**16, 1 << 62, layout.MAX_TIME_MS, layout.MIN_TIME_MS]


@pytest.mark.parametrize("reads_first", [True, False])
def test_older_timers_of_many_keys_are_read_and_changed_at_once(tmp_path: Path, reads_first: bool) -> None:
    state = open_state(tmp_path, now_ms=0)
    encoded = [KEYS.encode((name,)) for name in ("a", "b")]
    for key in encoded:
        state.set_key(1, key)
        for at_ms in (10, 20, 30):
            state.register_timer(at_ms)
    lay_timers_together(state)
    state = ShardState(state.store, key_groups=state.key_group_states(), descriptors=STATES, now_ms=0)
    timers, both = TimerColumns(state), np.arange(2)
    timers.begin(np.full(2, 1, np.uint16), pa.array(encoded, pa.binary()))
    if reads_first:
        assert timers.times(both)[0].tolist() == [10, 20, 30] * 2
    timers.delete(both, np.full(2, 20, np.int64))
    times_ms, offsets = timers.times(both)
    assert (times_ms.tolist(), offsets.tolist()) == ([10, 30] * 2, [0, 2, 4])


def test_a_time_without_a_date_is_kept_and_shown(tmp_path: Path) -> None:
    chain = StateChain(tmp_path / "chain")
    empty = chain.step(2, "incremental")
    chain.chain.states = [replace(d, ttl_ms=layout.MAX_TIME_MS if d.ttl_ms else None) for d in STATES]

    def never(state: ShardState, user: Any) -> None:
        if user == "a":
            for at_ms in NEVER:
                state.register_timer(at_ms)
            assert list(state.timers()) == sorted(NEVER)
            ValueState(state, "value_ttl").update((1, "x"))
            ListState(state, "list_ttl").append_value((1, "x"))
            MapState(state, "map_ttl").update_value(("u",), (1, "x"))

    chain.step(2, "incremental", never)
    assert findings(chain) == []
    sources = [chain.source(), chain.savepoint("canonical", "canonical"), chain.savepoint("native", "native")]
    for n, source in enumerate(sources):
        shown = [row["expires_at"].isoformat() for row in rows_of(source, "$timers", tmp_path / f"timers-{n}")]
        assert shown == ["0001-01-02T00:00:00+00:00"] + ["9999-12-31T00:00:00+00:00"] * 3
        for state in ("value_ttl", "list_ttl", "map_ttl"):
            (row,) = rows_of(source, state, tmp_path / f"{state}-{n}")
            assert row["expires_at"].isoformat() == "9999-12-31T00:00:00+00:00"
    described = [describe_change(change) for change in diff(empty, chain.source(), tmp_path / "diff")]
    assert sorted(row["after"]["at_ms"] for row in described if row["state"] == "$timers") == sorted(NEVER)
    assert [row["after_expires_at"] for row in described if row["state"] != "$timers"] == ["9999-12-31T00:00:00Z"] * 3
    assert {at for _, at in chain.seen()["$timers"]} == {*NEVER}


@pytest.mark.parametrize("at_ms", [layout.MAX_TIME_MS + 1, layout.MIN_TIME_MS - 1])
def test_what_is_no_time_is_refused(tmp_path: Path, at_ms: int) -> None:
    state = open_state(tmp_path, now_ms=0)
    state.set_key(0, KEYS.encode(("a",)))
    for call in (state.register_timer, state.delete_timer):
        with pytest.raises(StateTypeError, match=f"{at_ms} ms is no time"):
            call(at_ms)
    assert list(state.timers()) == []


@pytest.mark.parametrize("together", [False, True])
def test_a_removed_key_takes_its_bytes_with_it(tmp_path: Path, together: bool) -> None:
    state = open_state(tmp_path, now_ms=0)
    for user in "ab":
        state.set_key(1, KEYS.encode((user,)))
        for name in ("value", "value_ttl"):
            ValueState(state, name).update((1, user))
        for name in ("list", "list_ttl"):
            ListState(state, name).append_value((1, user))
        register(state, user)
    if together:
        lay_timers_together(state)
    left = remove_keys(state.store, state.key_group_states(), STATES, [(1, KEYS.encode(("a",)))]).key_group_states
    assert count_bytes(state.store, [replace(group, size_bytes=None) for group in left]) == left
    state.store.close()
