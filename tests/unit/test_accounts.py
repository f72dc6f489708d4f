"""The account of a shard's entries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from state_backend.shard.consolidation import count_bytes
from state_backend.state import stored_entries
from state_backend.state.accounts import Accounts, Entries, account_one_by_one
from state_backend.state.state_variables import ListState, MapState, ValueState
from state_backend.state.stored_entries import MIN_COLUMN_ROWS
from state_backend.state.timers import register_timer
from state_backend.values.errors import InvariantViolated
from state_backend.values.records import KeyGroupState
from tests.support.shards import KEYS, STATES, open_state


def group(number: int, size_bytes: int | None, digest: int = 7, **entries: int) -> KeyGroupState:
    return KeyGroupState(key_group=number, entries=entries, digest=digest, size_bytes=size_bytes)


@pytest.mark.parametrize(
    ("before", "change", "after"),
    [
        ([group(3, 50, total=2)], lambda a: a.change(3, "total", -3, -1, -20), [group(3, 30, digest=4, total=1)]),
        ([group(3, 50, total=2)], lambda a: a.change(3, "total", -7, -2, -50), []),
        ([], lambda a: a.change(1, "total", -1, 1, 9), [group(1, 9, digest=2**64 - 1, total=1)]),
        ([group(3, 50, total=2)], lambda a: a.resize(3, 12), [group(3, 62, total=2)]),
        # What no record counted, or what was counted wrongly, counts as not counted.
        ([group(3, None, total=2)], lambda a: a.resize(3, 12), [group(3, None, total=2)]),
        ([group(3, 50, total=2)], lambda a: a.resize(3, -51), [group(3, None, total=2)]),
    ],
)
def test_each_change_of_a_state_changes_its_counts(
    before: list[KeyGroupState], change: Callable[[Accounts], None], after: list[KeyGroupState]
) -> None:
    accounts = Accounts(before)
    change(accounts)
    assert list(accounts.states()) == after
    assert accounts.key_groups() == accounts.key_groups("total") == [state.key_group for state in after]
    assert accounts.entries("total") == sum(state.entries["total"] for state in after)
    assert accounts.key_groups("other") == [] and accounts.entries("other", 3) == 0


@pytest.mark.parametrize(
    ("count", "says"),
    [(-3, "the entry count of state 'total' in key group 3 is -1"), (-2, "key group 3 is empty, but its digest is")],
)
def test_a_negative_entry_count_or_an_empty_key_group_with_a_digest_is_refused(count: int, says: str) -> None:
    accounts = Accounts([group(3, 50, total=2)])
    accounts.change(3, "total", 0, count, 0)
    with pytest.raises(InvariantViolated, match=says):
        accounts.states()


@pytest.mark.parametrize("removed_at_once", [3, 10_000])
def test_dropping_a_state_removes_its_entries_and_byte_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed_at_once: int
) -> None:
    state = open_state(tmp_path, now_ms=0)
    monkeypatch.setattr(state.store, "chunks", partial(state.store.chunks, rows=removed_at_once))
    for user in range(8):
        state.set_key(user % 2, KEYS.encode((str(user),)))
        register_timer(state, user)
        for ttl in ("", "_ttl"):
            ValueState(state, f"value{ttl}").update((user, None))
            for n in range(3):
                ListState(state, f"list{ttl}").append_value((n, "x"))
                MapState(state, f"map{ttl}").update_value((str(n),), (n, "x"))
        if user == 0:
            ListState(state, "list").put([])  # Only its bounds are left.
    state.flush()
    left = {d.name for d in STATES}
    for descriptor in STATES:
        state.stored.drop(descriptor)
        left.discard(descriptor.name)
        groups = state.key_group_states()
        assert {name for group in groups for name in group.entries} == {*left, "$timers"}
        assert count_bytes(state.store, [replace(group, size_bytes=None) for group in groups]) == groups
        assert {key[2] for key, _ in state.store.scan(b"", None)} >= {d.state_id for d in STATES if d.name in left}
    assert len(list(state.store.scan(b"", None))) == 8 * 2
    state.store.close()


def test_a_dropped_state_of_large_values_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrow would copy large values, and takes no column above 2 GiB."""
    state, read = open_state(tmp_path, now_ms=0), list[int]()
    for user in range(2 * MIN_COLUMN_ROWS):
        state.set_key(0, KEYS.encode((str(user),)))
        ListState(state, "list").put([(user, "x" * 500_000)])
    state.flush()

    def account(accounts: Accounts, names: Any, keys: list[bytes], old: Entries, new: Entries) -> Any:
        read.append(sum(map(len, filter(None, old))))
        return account_one_by_one(accounts, names, keys, old, new)

    monkeypatch.setattr(stored_entries, "account_one_by_one", account)
    monkeypatch.delattr(stored_entries, "account_columns")
    state.stored.drop(next(d for d in STATES if d.name == "list"))
    assert not state.key_group_states() and sum(read) >= 64_000_000 and max(read) < 20_000_000
    state.store.close()
