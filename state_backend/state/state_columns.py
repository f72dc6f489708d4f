"""Base classes of value, list and map state and of timers for a batch of keys, as Arrow columns.

Processors that are functions over many keys use the state through subclasses of these classes. The resulting entries,
digests and counts are those that the state variables of single keys produce. Python works row by row only in the
store's get and put calls and their bytes objects. Each method reads the store and writes to it before it returns: no
changes stay in memory between calls.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from state_backend.formats.arrow_columns import Fixed, Int64s, Mask, binary_views, concatenate, cut
from state_backend.formats.evolution_columns import columns_reader
from state_backend.formats.row_columns import RowColumns
from state_backend.formats.types import parse_struct
from state_backend.state import layout
from state_backend.state.entry_columns import (
    PREFIX_BYTES,
    Groups,
    bytes_in,
    changes_by_key_group,
    expiries,
    expiry_keys,
    is_expiring,
    mask_of,
    split_expiry,
    stored_keys,
)
from state_backend.state.shard_state import ShardState
from state_backend.values.records import StateDescriptor

# Indexes of keys in a batch: from 0 to the number of keys - 1.
Places = Int64s
_KEPT_READS = 2


class EntryColumns:
    """Entries of one state, or timers, of a batch of keys.

    `located`: whole stored keys. `rests`: stored keys without key group and state id. `owners`: for each row, the index
    of its key in the batch.
    """

    def __init__(self, shard: ShardState, name: str, state_id: int) -> None:
        self._shard = shard
        self._name = name
        self._state_id = state_id
        self.keys: int | None = None
        self._groups: Groups = np.zeros(0, np.uint16)
        self._keys: pa.Array = pa.array([], pa.binary())
        # Stored keys and entries of the last two reads since the last write. A write that replaces these entries finds
        # the old ones here, so it need not read them again.
        self._seen: list[tuple[Sequence[bytes], pa.Array]] = []

    def begin(self, key_groups: Groups, keys: pa.Array) -> None:
        """Begin a batch of keys, on which the next calls act."""
        self._groups, self._keys, self.keys = key_groups, keys, len(keys)
        self._seen.clear()

    def end(self) -> None:
        self.keys = None
        self._seen.clear()

    def _locate(self, owners: Places, rests: pa.Array) -> list[bytes]:
        return stored_keys(self._groups[owners], self._state_id, rests)

    def _prefixes(self, owners: Places) -> list[bytes]:
        return stored_keys(self._groups[owners], self._state_id, self._keys.take(pa.array(owners)))

    def _read(self, owners: Places, located: Sequence[bytes], *, empty: bool = True) -> pa.Array:
        """Return the entries under `located` (null: absent). `empty`: read nothing if the state's count is 0."""
        if not len(located) or (empty and not self._shard.accounts.entries(self._name)):
            return pa.nulls(len(located), pa.binary())
        for wanted, found in self._seen:
            if wanted == located:
                return found
        found = pa.array(self._shard.stored.read_sorted(self._name, self._groups[owners], located), pa.binary())
        self._seen = [*self._seen[-_KEPT_READS + 1 :], (located, found)]
        return found

    def _read_below(self, owners: Places, rows: int | None = None) -> tuple[Places, pa.Array, pa.Array]:
        """Return (owners, user keys or times, entries) of the first `rows` map entries or timers of each key."""
        if not self._shard.accounts.entries(self._name):
            nothing = pa.array([], pa.binary())
            return np.zeros(0, np.int64), nothing, nothing
        prefixes = self._prefixes(owners)
        keys, entries, counts = self._shard.store.read_prefixes(prefixes, sys.maxsize if rows is None else rows)
        lengths = np.fromiter(map(len, prefixes), np.int64, len(prefixes))
        return np.repeat(owners, counts), _behind(keys, np.repeat(lengths, counts)), pa.array(entries, pa.binary())

    def _replace(
        self,
        owners: Places,
        rests: pa.Array,
        new: pa.Array,
        old: pa.Array | None = None,
        located: list[bytes] | None = None,
    ) -> None:
        """Write the entries `new` (null: delete), and update digests, counts and the index. `old` None: read it."""
        located = located or self._locate(owners, rests)
        if old is None:
            old = self._read(owners, located)
        changed = _differ(old, new)
        if not changed.any():
            return
        self._seen.clear()
        groups = self._groups[owners]
        if not changed.all():
            mask = pa.array(changed)
            groups, rests, old, new = groups[changed], rests.filter(mask), old.filter(mask), new.filter(mask)
            located = [located[i] for i in np.flatnonzero(changed).tolist()]
        for group, *changes in changes_by_key_group(self._name, groups, rests, old, new):
            self._shard.accounts.change(group, self._name, *changes)
        sizes = PREFIX_BYTES * len(rests) + bytes_in(rests), bytes_in(new)
        self._shard.stored.put_many(located, entry_list(new), sizes, new.null_count)
        self._index(groups, rests, old, new)

    def _index(self, groups: Groups, rests: pa.Array, old: pa.Array, new: pa.Array) -> None:
        for entries, data in ((old, None), (new, b"")):
            expiring = is_expiring(entries)
            if expiring.any():
                mask = pa.array(expiring)
                times = expiries(entries.filter(mask), self._name)
                indexed = expiry_keys(groups[expiring], times, self._state_id, rests.filter(mask))
                self._shard.stored.put_many(indexed, [data] * len(indexed))


class StateColumns(EntryColumns):
    def __init__(self, shard: ShardState, descriptor: StateDescriptor) -> None:
        super().__init__(shard, descriptor.name, descriptor.state_id)
        version = descriptor.versions[-1]
        self._ttl_ms = descriptor.ttl_ms
        self._codec = RowColumns(descriptor.name, parse_struct(version.value), version.version)
        self._decode = columns_reader(descriptor.name, descriptor.versions)
        self.schema: pa.Schema = self._codec.arrow_schema

    def _visible(self, entries: pa.Array) -> pa.Array:
        """Return the encoded rows of entries. Where an entry is null or has expired, the row is null."""
        times, rows = split_expiry(entries, self._name)
        if rows is entries:
            return entries
        alive = pc.fill_null(pc.greater(times, self._shard.now_ms), True)
        return pc.if_else(alive, rows, pa.scalar(None, pa.binary()))

    def _entries(self, rows: pa.Table | pa.RecordBatch) -> pa.Array:
        encoded = self._codec.encode(rows)
        if self._ttl_ms is None:
            return encoded
        expiry_ms = layout.later(self._shard.now_ms, self._ttl_ms)
        return concatenate(len(encoded), [Fixed(np.void(layout.with_expiry(b"", expiry_ms))), encoded])

    def _table(self, rows: pa.Array) -> pa.Table:
        return pa.Table.from_batches([self._decode(rows)])


def entry_list(entries: pa.Array) -> list[bytes | None]:
    """Return entries as Python values. If all are null, or all empty like those of timers, this is fast."""
    if entries.null_count == len(entries):
        return [None] * len(entries)
    if not entries.null_count and not bytes_in(entries):
        return [b""] * len(entries)
    found: list[bytes | None] = entries.to_pylist()
    return found


def _differ(old: pa.Array, new: pa.Array) -> Mask:
    for some, others in ((old, new), (new, old)):
        if some.null_count == len(some) and not others.null_count:
            return np.ones(len(old), np.bool_)
    same = pc.or_(pc.fill_null(pc.equal(old, new), False), pc.and_(old.is_null(), new.is_null()))
    return ~mask_of(same)


def offsets_of(owners: Places, wanted: Places) -> Int64s:
    return np.append(np.searchsorted(owners, wanted), len(owners)).astype(np.int64)


def in_order(owners: Places) -> Any:
    """Return a stable order by owner; None if the rows are sorted already."""
    return None if (owners[1:] >= owners[:-1]).all() else np.argsort(owners, kind="stable")


def _behind(keys: list[bytes], lengths: Int64s) -> pa.Array:
    """Return the bytes of each `keys[i]` that follow its first `lengths[i]` bytes."""
    if not keys:
        return pa.array([], pa.binary())
    stored = pa.array(keys, pa.binary())
    offsets, _ = binary_views(stored)
    return cut(stored.buffers()[2], offsets[:-1] + lengths, offsets[1:])


class ValueColumns(StateColumns):
    """A value state of a shard. `read` returns the values of a batch of keys; `write` or `clear` then changes them."""

    def __init__(self, shard: ShardState, descriptor: StateDescriptor) -> None:
        super().__init__(shard, descriptor)
        self._stored_keys: list[bytes] = []
        self._old: pa.Array = pa.array([], pa.binary())

    def read(self, key_groups: Groups, keys: pa.Array) -> tuple[pa.Table, Mask]:
        self.begin(key_groups, keys)
        self._stored_keys = stored_keys(key_groups, self._state_id, keys)
        self._old = pa.array(self._shard.stored.read_sorted(self._name, key_groups, self._stored_keys), pa.binary())
        rows = self._visible(self._old)
        return self._table(rows), mask_of(rows.is_valid())

    def write(self, rows: pa.Table, cleared: Mask | None = None) -> None:
        new = self._entries(rows)
        if cleared is not None:
            new = pc.if_else(pa.array(cleared), pa.scalar(None, pa.binary()), new)
        self._write(new)

    def clear(self, cleared: Mask) -> None:
        self._write(pc.if_else(pa.array(cleared), pa.scalar(None, pa.binary()), self._old))

    def _write(self, new: pa.Array) -> None:
        self._replace(np.arange(len(self._keys)), self._keys, new, self._old, self._stored_keys)
        self._old = new
