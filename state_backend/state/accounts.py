"""The account of a shard's entries: digest, entry counts and stored bytes of each key group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from state_backend.state import layout
from state_backend.state.entry_columns import changes_by_key_group, is_expiring, parts_of
from state_backend.values.errors import InvariantViolated
from state_backend.values.records import KeyGroupState

# Start of a key group's bytes if the record has no count: so low that no later changes make the sum positive.
_NOT_COUNTED = -(1 << 62)

# For each state id: the state's name, and the seed of the hashes of its entries.
Names = dict[int, tuple[str, int]]


class Accounts:
    """Digest, entry counts and stored bytes of each key group of a shard. Changes still in memory do not count yet."""

    def __init__(self, key_groups: Iterable[KeyGroupState] = ()) -> None:
        self._digests = defaultdict[int, int](int)
        self._counts = defaultdict[tuple[int, str], int](int)
        self._totals = defaultdict[str, int](int)
        # Bytes of each key group, with its keys in the timer index and in the expiry index.
        self._sizes = defaultdict[int, int](int)
        for group in key_groups:
            self._digests[group.key_group] = group.digest
            self._sizes[group.key_group] = _NOT_COUNTED if group.size_bytes is None else group.size_bytes
            for name, count in group.entries.items():
                self._counts[group.key_group, name] = count
                self._totals[name] += count

    def entries(self, name: str, key_group: int | None = None) -> int:
        return self._totals.get(name, 0) if key_group is None else self._counts.get((key_group, name), 0)

    def key_groups(self, name: str | None = None) -> list[int]:
        """Return the key groups that have entries of the named state (None: of any state), ascending."""
        return sorted({group for (group, of), count in self._counts.items() if count and name in (None, of)})

    def change(self, key_group: int, name: str, digest: int, count: int, size_bytes: int) -> None:
        self._sizes[key_group] += size_bytes
        self._digests[key_group] += digest
        self._counts[key_group, name] += count
        self._totals[name] += count

    def resize(self, key_group: int, change_bytes: int) -> None:
        """Count stored bytes that belong to no entry, such as a list's bounds (its first and next position)."""
        self._sizes[key_group] += change_bytes

    def states(self) -> tuple[KeyGroupState, ...]:
        counts: dict[int, dict[str, int]] = {}
        for (key_group, name), count in sorted(self._counts.items()):
            if count < 0:
                raise InvariantViolated(f"the entry count of state {name!r} in key group {key_group} is {count}")
            if count:
                counts.setdefault(key_group, {})[name] = count
        for key_group, digest in self._digests.items():
            if key_group not in counts and digest % 2**64:
                raise InvariantViolated(f"key group {key_group} is empty, but its digest is {digest % 2**64:016x}")
        return tuple(
            KeyGroupState(
                key_group=key_group,
                entries=entries,
                digest=self._digests[key_group] % 2**64,
                # Below 0, the size was not counted, or counted wrongly. For None, `count_bytes` reads the entries.
                size_bytes=None if self._sizes[key_group] < 0 else self._sizes[key_group],
            )
            for key_group, entries in counts.items()
        )


Entries = list[bytes | None]


def account_one_by_one(
    accounts: Accounts, names: Names, keys: list[bytes], old: Entries, new: Entries
) -> dict[bytes, bytes | None]:
    """Change digests, counts and bytes as entries `old` under the stored keys `keys` become `new` (None: no entry).

    Return the changes to write to the timer index and the expiry index: index keys, with None for a key to delete.
    """
    index: dict[bytes, bytes | None] = {}
    for key, entry_before, entry in zip(keys, old, new, strict=True):
        name, seed = names[key[2]]
        digest = size_bytes = 0
        if entry_before is not None:
            digest -= layout.entry_hash(seed, key[3:], entry_before)
            size_bytes -= layout.entry_bytes(key, entry_before)
        if entry is not None:
            digest += layout.entry_hash(seed, key[3:], entry)
            size_bytes += layout.entry_bytes(key, entry)
        count = (entry is not None) - (entry_before is not None)
        accounts.change(int.from_bytes(key[:2], "big"), name, digest, count, size_bytes)
        if key[2] == layout.TIMERS:
            index[layout.timer_index_key(key)] = entry
        else:
            index |= layout.expiry_changes(key, entry_before, entry)
    return index


def account_columns(
    accounts: Accounts, names: Names, keys: list[bytes], old: Entries, new: Entries
) -> dict[bytes, bytes | None]:
    """Do what `account_one_by_one` does, with Arrow columns. For 64 or more small entries, this is faster."""
    groups, state_ids, rests = parts_of(pa.array(keys, pa.binary()))
    old_entries, new_entries = pa.array(old, pa.binary()), pa.array(new, pa.binary())
    for state_id in np.unique(state_ids).tolist():
        name, _ = names[state_id]
        rows = state_ids == state_id
        columns = [rests, old_entries, new_entries]
        if not rows.all():
            columns = [column.filter(pa.array(rows)) for column in columns]
        for group, *changes in changes_by_key_group(name, groups[rows], *columns):
            accounts.change(group, name, *changes)
    index: dict[bytes, bytes | None] = {}
    for at in np.flatnonzero(is_expiring(old_entries) | is_expiring(new_entries)).tolist():
        index |= layout.expiry_changes(keys[at], old[at], new[at])
    for at in np.flatnonzero(state_ids == layout.TIMERS).tolist():
        index[layout.timer_index_key(keys[at])] = new[at]
    return index
