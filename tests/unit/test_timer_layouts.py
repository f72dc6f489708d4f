"""Timers that lie as the first code laid them, and times for which there is no date."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from state_backend.adapters.open_storage import open_storage
from state_backend.formats.types import parse_struct
from state_backend.inspection.key_entries import SearchedKey, entries_in
from state_backend.inspection.state_diff import EntryChange, describe_change, diff_states
from state_backend.inspection.state_source import StateSource
from state_backend.inspection.state_table import read_table
from state_backend.shard.consolidation import count_bytes
from state_backend.shard.restore import restore_shard
from state_backend.state import layout
from state_backend.state.canonical_columns import TimerRows
from state_backend.state.check_shard import verify_shard
from state_backend.state.forget_keys import remove_keys
from state_backend.state.shard_state import ShardState
from state_backend.state.state_variables import ListState, MapState, ValueState
from state_backend.state.timer_columns import TimerColumns
from state_backend.state.timers import delete_timer, due_timers, register_timer, timers
from state_backend.values.errors import CorruptFile, StateTypeError
from state_backend.values.key_groups import range_of
from tests.support.chains import ENGINE
from tests.support.shards import KEY_SCHEMA, KEYS, STATES, open_state
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
        register_timer(state, at_ms)


NEVER = [10**16, 1 << 62, layout.MAX_TIME_MS, layout.MIN_TIME_MS]


def packed(folder: Path, **options: Any) -> ShardState:
    """A state whose timers lie as the first code laid them: all of a key in one entry."""
    first = open_state(folder, now_ms=0)
    first.set_key(1, KEYS.encode(("a",)))
    register(first, "a")
    first.flush()
    start = layout.prefix(1, layout.TIMERS)
    stored = [key for key, _ in first.store.scan(start, layout.after(start))]
    first.store.write([*((key, None) for key in stored), (stored[0][:-8], b"".join(key[-8:] for key in stored))])
    state = ShardState(first.store, key_groups=first.key_group_states(), descriptors=STATES, now_ms=0)
    state.set_key(1, KEYS.encode(("a",)))
    return state


def columns_of(state: ShardState) -> TimerColumns:
    columns = TimerColumns(state)
    columns.begin(np.ones(1, np.uint16), pa.array([state.key], pa.binary()))
    return columns


def stored_timers(state: ShardState) -> tuple[pa.Array, pa.Array]:
    start = layout.prefix(1, layout.TIMERS)
    keys, entries = zip(*state.store.scan(start, layout.after(start)), strict=True)
    return pa.array(keys, pa.binary()), pa.array(entries, pa.binary())


SEARCHED = SearchedKey(schema=parse_struct(KEY_SCHEMA), values=("a",), encoded=KEYS.encode(("a",)), group=1)


@pytest.mark.parametrize(
    "use",
    [
        lambda state: register_timer(state, 5_000),
        lambda state: delete_timer(state, 5_000),
        lambda state: list(timers(state)),
        lambda state: list(due_timers(state, 6_000)),
        lambda state: columns_of(state).times(np.zeros(1, np.int64)),
        lambda state: columns_of(state).register(np.zeros(1, np.int64), np.ones(1, np.int64)),
        lambda state: list(columns_of(state).due(6_000, 1)),
        lambda state: TimerRows(parse_struct(KEY_SCHEMA)).table(*stored_timers(state)),
        lambda state: entries_in(state.store, SEARCHED, STATES),
        lambda state: remove_keys(state.store, state.key_group_states(), STATES, [(1, state.key)]),
    ],
)
def test_timers_in_a_layout_of_earlier_code_are_refused(tmp_path: Path, use: Any) -> None:
    state = packed(tmp_path)
    with pytest.raises(CorruptFile, match=r"the timer stored under .* expected a key and a time, and no value"):
        use(state)
    state.store.close()


def test_timers_beyond_the_calendar_are_kept_and_shown_as_its_first_or_last_date(tmp_path: Path) -> None:
    chain = StateChain(tmp_path / "chain")
    empty = chain.step(2, "incremental")
    chain.chain.states = [replace(d, ttl_ms=layout.MAX_TIME_MS if d.ttl_ms else None) for d in STATES]

    def never(state: ShardState, user: Any) -> None:
        if user == "a":
            for at_ms in NEVER:
                register_timer(state, at_ms)
            assert list(timers(state)) == sorted(NEVER)
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
def test_a_timer_at_a_time_out_of_range_is_refused(tmp_path: Path, at_ms: int) -> None:
    state = open_state(tmp_path, now_ms=0)
    state.set_key(0, KEYS.encode(("a",)))
    for call in (register_timer, delete_timer):
        with pytest.raises(StateTypeError, match=f"{at_ms} ms is no time"):
            call(state, at_ms)
    assert list(timers(state)) == []


def test_removing_a_key_subtracts_its_bytes_from_the_state_size(tmp_path: Path) -> None:
    state = open_state(tmp_path, now_ms=0)
    for user in "ab":
        state.set_key(1, KEYS.encode((user,)))
        for name in ("value", "value_ttl"):
            ValueState(state, name).update((1, user))
        for name in ("list", "list_ttl"):
            ListState(state, name).append_value((1, user))
        register(state, user)
    left = remove_keys(state.store, state.key_group_states(), STATES, [(1, KEYS.encode(("a",)))]).key_group_states
    assert count_bytes(state.store, [replace(group, size_bytes=None) for group in left]) == left
    state.store.close()
