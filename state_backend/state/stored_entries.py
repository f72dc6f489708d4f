"""Reads and writes of many entries in the store of a shard, and the account of them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import compress, islice, pairwise
from operator import le, ne

import numpy as np

from state_backend.adapters.rocks import RocksStore
from state_backend.state import layout
from state_backend.state.accounts import Accounts, Entries, Names, account_columns, account_one_by_one
from state_backend.state.entry_columns import Groups
from state_backend.values.records import KeyGroupState, StateDescriptor

MIB = 1024 * 1024
# The most bytes of a write batch, because RocksDB holds a batch twice in memory until it is written.
_WRITE_BYTES = 8 * MIB
_GET_ROWS = 1024
# From MIN_COLUMN_ROWS rows on, Arrow and NumPy calls cost less than a Python loop. For entries that average more than
# MAX_COLUMN_BYTES, the copies that Arrow makes cost more than the loop.
MIN_COLUMN_ROWS, MAX_COLUMN_BYTES = 64, 4096
# Fewer keys than this are deleted one by one, because a range deletion slows down every read of its file a little.
RANGE_KEYS = 64
# For each entry, wanted or not, a scan takes about 1/SCAN_SHARE of the time of a lookup. So a scan is worth its time if
# at least 1/SCAN_SHARE of the entries are wanted. Fewer than MIN_SCAN_ROWS wanted entries are always looked up, because
# the start of a scan takes longer than their lookups.
SCAN_SHARE = 4
MIN_SCAN_ROWS = 16


class StoredEntries:
    """The entries in a shard's store. Each write goes to the store immediately."""

    def __init__(
        self, store: RocksStore, key_groups: Iterable[KeyGroupState] = (), states: Iterable[StateDescriptor] = ()
    ) -> None:
        self.store = store
        self.accounts = Accounts(key_groups)
        self.changed_bytes = 0
        self._names = {layout.TIMERS: (layout.TIMERS_NAME, layout.seed_of(layout.TIMERS_NAME))} | _names_of(states)
        self.checked: set[int] = set()

    def look_up(self, wanted: Sequence[bytes], most_bytes: int = sys.maxsize) -> Entries:
        """Return the entries under the stored keys `wanted`, in order (None: absent), and stop beyond `most_bytes`."""
        found: Entries = []
        size_bytes = 0
        while len(found) < len(wanted) and size_bytes < most_bytes:
            some = self.store.get_many(wanted[len(found) : len(found) + _GET_ROWS])
            size_bytes += sum(map(len, filter(None, some)))
            found += some
        return found

    def read_sorted(
        self, name: str, key_groups: Groups, wanted: Sequence[bytes], most_bytes: int = sys.maxsize
    ) -> Entries:
        """Return the entries of a state under the stored keys `wanted`, in order (None: absent); stop at `most_bytes`.

        If a quarter or more of a key group's entries is wanted, scan the key group instead of looking up each key.
        """
        starts = [0, *(np.flatnonzero(key_groups[1:] != key_groups[:-1]) + 1).tolist(), len(wanted)]
        dense = []
        for start, end in pairwise(starts):
            entries = self.accounts.entries(name, int(key_groups[start]))
            if end - start >= MIN_SCAN_ROWS and (end - start) * SCAN_SHARE >= entries and ascend(wanted[start:end]):
                dense.append((start, end))
        found: Entries = []
        for start, end in [*dense, (len(wanted), len(wanted))]:
            for read, until in ((self.look_up, start), (self.store.read_wanted, end)):
                if len(found) < until:
                    some = read(wanted[len(found) : until], most_bytes)
                    found += some
                    most_bytes -= sum(map(len, filter(None, some)))
                    if len(found) < until or most_bytes <= 0:
                        return found
        return found

    def put_many(
        self,
        keys: Sequence[bytes],
        entries: Sequence[bytes | None],
        sizes: tuple[int, int] | None = None,
        deletions: int | None = None,
    ) -> None:
        """Write entries; None deletes a key. The caller updates digests, counts and indexes.

        `sizes`: (bytes of keys, bytes of entries), if the caller knows them. `deletions`: likewise the number of None.
        """
        key_bytes, entry_bytes = sizes or (sum(map(len, keys)), sum(map(len, filter(None, entries))))
        self.changed_bytes += key_bytes + entry_bytes
        if entry_bytes <= _WRITE_BYTES:
            self.store.write_columns(keys, entries, deletions)
            return
        begin, size_bytes = 0, 0
        for end, entry in enumerate(entries, 1):
            size_bytes += len(entry or b"")
            if size_bytes >= _WRITE_BYTES or end == len(entries):
                self.store.write_columns(keys[begin:end], entries[begin:end])
                begin, size_bytes = end, 0

    def put_sorted(self, changes: dict[bytes, bytes | None]) -> None:
        """Write the entries (None: delete the key) in the order of their keys, as `put_many` does."""
        if changes:
            ordered = sorted(changes)
            self.put_many(ordered, [changes[key] for key in ordered])

    def delete_many(self, keys: Sequence[bytes], start: bytes, end: bytes) -> None:
        """Delete `keys`, which are all keys of a range: many by one deletion marker of RocksDB, few by one for each."""
        if len(keys) < RANGE_KEYS:
            self.put_many(keys, [None] * len(keys))
        else:
            self.changed_bytes += sum(map(len, keys))
            self.store.delete_range(start, end)

    def replace(self, keys: list[bytes], old: Entries, new: Entries) -> None:
        """Write the entries `new` in place of `old` (None: absent), and update digests, counts and indexes."""
        kept = list(map(ne, old, new))
        if not all(kept):
            keys, old, new = list(compress(keys, kept)), list(compress(old, kept)), list(compress(new, kept))
        index = self._account(keys, old, new)
        if keys:
            self.put_many(keys, new)
        self.put_sorted(index)

    def _account(self, keys: list[bytes], old: Entries, new: Entries) -> dict[bytes, bytes | None]:
        """Update digests and counts as entries `old` become `new`. Return the index keys to write (None: delete)."""
        size_bytes = max(sum(map(len, filter(None, entries))) for entries in (old, new))
        in_columns = len(keys) >= MIN_COLUMN_ROWS and size_bytes < len(keys) * MAX_COLUMN_BYTES
        return (account_columns if in_columns else account_one_by_one)(self.accounts, self._names, keys, old, new)

    def remove(self, start: bytes, *, as_range: bool = False) -> None:
        """Remove all that is stored under the prefix `start`: with one range deletion, or key by key."""
        end = layout.after(start)
        assert end is not None
        for keys, found in self.store.chunks(start, end):
            entries = {key: data for key, data in zip(keys, found, strict=True) if not layout.is_positions(data)}
            for key, data in zip(keys, found, strict=True):
                if key not in entries:
                    self.accounts.resize(int.from_bytes(key[:2], "big"), -layout.record_bytes(key, data))
            self.put_sorted(self._account(list(entries), list(entries.values()), [None] * len(entries)))
            if as_range:
                self.changed_bytes += sum(map(len, keys))
            else:
                self.put_many(keys, [None] * len(keys))
        if as_range:
            self.store.delete_range(start, end)

    def drop(self, state: StateDescriptor) -> None:
        """Remove all entries of a state. Each entry is read first, because its hash is subtracted from the digest."""
        self._names |= _names_of([state])
        for key_group in self.accounts.key_groups(state.name):
            self.remove(layout.prefix(key_group, state.state_id), as_range=True)

    def check_timers(self, key_group: int) -> None:
        """Raise `CorruptFile` if the first timer has the layout of an early release. Read each key group once."""
        if key_group in self.checked:
            return
        self.checked.add(key_group)
        if self.accounts.entries(layout.TIMERS_NAME, key_group):
            start = layout.prefix(key_group, layout.TIMERS)
            for stored_key, data in zip(*self.store.read_range(start, layout.after(start), rows=1)[:2], strict=True):
                layout.check_timer(stored_key[3:], data)


def _names_of(states: Iterable[StateDescriptor]) -> Names:
    return {state.state_id: (state.name, layout.seed_of(state.name)) for state in states}


def ascend(keys: Sequence[bytes]) -> bool:
    return all(map(le, keys, islice(keys, 1, None)))
