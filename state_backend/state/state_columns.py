"""Entries of one state for many keys at a time, as Arrow columns: what values, lists, maps and timers share.

The same entries, digests and counts as the states of one key make; what is per row in Python is the store's own get and put and
their bytes objects. Every call reads the store and writes to it at once: nothing gathers between calls.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from state_backend.formats.arrow_columns import Fixed, binary_views, concatenate, cut
from state_backend.formats.evolution_columns import columns_reader
from state_backend.formats.row_columns import RowColumns
from state_backend.formats.types import parse_struct
from state_backend.state import layout, shard_state
from state_backend.state.entry_columns import (
    PREFIX_BYTES,
    Groups,
    bytes_in,
    changes_by_key_group,
    expiries,
    expiry_keys,
    is_expiring,
    stored_keys,
    without_expiry,
)
from state_backend.state.shard_state import ShardState
from state_backend.values.records import StateDescriptor

Mask = npt.NDArray[np.bool_]
# Which keys of a batch, by position: 0 .. number of keys - 1.
Places = npt.NDArray[np.int64]
_GET_ROWS = 4096
_KEPT_READS = 2


class EntryColumns:
    """Entries below the keys of a batch. ``name`` and ``state_id`` say whose. ``keys``: how many the batch has; None: there is none."""

    def __init__(self, shard: ShardState, name: str, state_id: int) -> None:
        self._shard = shard
        self._name = name
        self._state_id = state_id
        self.keys: int | None = None
        self._groups: Groups = np.zeros(0, np.uint16)
        self._keys: pa.Array = pa.array([], pa.binary())
        # The last reads since the last write: what is read and then replaced is not read twice.
        self._seen: list[tuple[Sequence[bytes], pa.Array]] = []

    def begin(self, key_groups: Groups, keys: pa.Array) -> None:
        """The keys that the next calls mean: encoded, ascending by key group and key, none twice."""
        self._groups, self._keys, self.keys = key_groups, keys, len(keys)
        self._seen.clear()

    def end(self) -> None:
        """There is no batch."""
        self.keys = None
        self._seen.clear()

    def _located(self, owners: Places, rests: pa.Array) -> list[bytes]:
        return stored_keys(self._groups[owners], self._state_id, rests)

    def _prefixes(self, owners: Places) -> list[bytes]:
        return stored_keys(self._groups[owners], self._state_id, self._keys.take(pa.array(owners)))

    def _read(self, owners: Places, located: Sequence[bytes], *, empty: bool = True) -> pa.Array:
        """What the store holds under these stored keys, null for nothing. ``owners`` ascend. Where the wanted entries are a good part
        of a key group's, all that lie from the first to the last are passed by: that is several times as fast. ``empty``: a state without
        entries has nothing at all, so that nothing need be read."""
        if not len(located) or (empty and not self._shard.entries(self._name)):
            return pa.nulls(len(located), pa.binary())
        for wanted, found in self._seen:
            if wanted == located:
                return found
        found = self._look_up(owners, located)
        self._seen = [*self._seen[-_KEPT_READS + 1 :], (located, found)]
        return found

    def _look_up(self, owners: Places, located: Sequence[bytes]) -> pa.Array:
        groups = self._groups[owners]
        starts = np.concatenate(([0], np.flatnonzero(groups[1:] != groups[:-1]) + 1))
        ends = [*starts[1:].tolist(), len(located)]
        found: list[bytes | None] = []
        for start, end in zip(starts.tolist(), ends, strict=True):
            entries = self._shard.entries(self._name, int(groups[start]))
            wanted = located[start:end]
            if len(wanted) < shard_state.MIN_SCAN_ROWS or len(wanted) * shard_state.SCAN_SHARE < entries:
                continue
            if not shard_state.ascend(wanted):
                continue
            found += self._get(located[len(found) : start])
            found += self._shard.store.read_wanted(wanted)
        found += self._get(located[len(found) :])
        return pa.array(found, pa.binary())

    def _get(self, located: Sequence[bytes]) -> list[bytes | None]:
        found: list[bytes | None] = []
        for begin in range(0, len(located), _GET_ROWS):
            found += self._shard.store.get_many(located[begin : begin + _GET_ROWS])
        return found

    def _read_below(self, owners: Places, rows: int | None = None) -> tuple[Places, pa.Array, pa.Array]:
        """Of all entries below these keys, or the first ``rows`` of each: owner, what follows the key, and the entry. In their order."""
        if not self._shard.entries(self._name):
            nothing = pa.array([], pa.binary())
            return np.zeros(0, np.int64), nothing, nothing
        prefixes = self._prefixes(owners)
        keys, entries, counts = self._shard.store.read_prefixes(prefixes, sys.maxsize if rows is None else rows)
        lengths = np.fromiter(map(len, prefixes), np.int64, len(prefixes))
        return np.repeat(owners, counts), _behind(keys, np.repeat(lengths, counts)), pa.array(entries, pa.binary())

    def _replace(self, owners: Places, rests: pa.Array, old: pa.Array, new: pa.Array, located: list[bytes]) -> Mask:
        """Writes entries, null to remove, with digests, counts and index; true where there was a change. ``rests``: stored keys
        without key group and state id, none twice; ``old``: what the store has."""
        changed = _differ(old, new)
        if not changed.any():
            return changed
        self._seen.clear()
        groups = self._groups[owners]
        if not changed.all():
            mask = pa.array(changed)
            groups, rests, old, new = groups[changed], rests.filter(mask), old.filter(mask), new.filter(mask)
            located = [located[i] for i in np.flatnonzero(changed).tolist()]
        for group, *changes in changes_by_key_group(self._name, groups, rests, old, new):
            self._shard.account(group, self._name, *changes)
        sizes = PREFIX_BYTES * len(rests) + bytes_in(rests), bytes_in(new)
        self._shard.put_many(located, new.to_pylist(), sizes)
        self._index(groups, rests, old, new)
        return changed

    def _index(self, groups: Groups, rests: pa.Array, old: pa.Array, new: pa.Array) -> None:
        """Brings the expiry index up to date."""
        for entries, data in ((old, None), (new, b"")):
            expiring = is_expiring(entries)
            if expiring.any():
                mask = pa.array(expiring)
                times = expiries(entries.filter(mask))
                indexed = expiry_keys(groups[expiring], times, self._state_id, rests.filter(mask))
                self._shard.put_many(indexed, [data] * len(indexed))


class StateColumns(EntryColumns):
    """Entries of a declared state. ``schema``: the Arrow schema of the rows that go in and out."""

    def __init__(self, shard: ShardState, descriptor: StateDescriptor) -> None:
        super().__init__(shard, descriptor.name, descriptor.state_id)
        version = descriptor.versions[-1]
        self._ttl_ms = descriptor.ttl_ms
        self._codec = RowColumns(descriptor.name, parse_struct(version.value), version.version)
        self._decode = columns_reader(descriptor.name, descriptor.versions)
        self.schema: pa.Schema = self._codec.arrow_schema

    def _visible(self, entries: pa.Array) -> pa.Array:
        """The encoded rows of entries; null where there is none or it has expired."""
        expiring = is_expiring(entries)
        if not expiring.any():
            return entries
        mask = pa.array(expiring)
        with_expiry = entries.filter(mask)
        alive = pa.array(expiries(with_expiry) > self._shard.now_ms)
        rows = pc.if_else(alive, without_expiry(with_expiry), pa.scalar(None, pa.binary()))
        return pc.replace_with_mask(entries, mask, rows)

    def _entries(self, rows: pa.Table | pa.RecordBatch) -> pa.Array:
        """The rows as they are stored. Raises: StateTypeError if they do not fit the schema."""
        encoded = self._codec.encode(rows)
        if self._ttl_ms is None:
            return encoded
        expiry_ms = layout.later(self._shard.now_ms, self._ttl_ms)
        return concatenate(len(encoded), [Fixed(np.void(layout.with_expiry(b"", expiry_ms))), encoded])

    def _table(self, rows: pa.Array) -> pa.Table:
        return pa.Table.from_batches([self._decode(rows)])


def _differ(old: pa.Array, new: pa.Array) -> Mask:
    """Where entries are not the same; null is none."""
    for some, others in ((old, new), (new, old)):
        if some.null_count == len(some) and not others.null_count:
            return np.ones(len(old), np.bool_)
    same = pc.or_(pc.fill_null(pc.equal(old, new), False), pc.and_(old.is_null(), new.is_null()))
    differ: Mask = pc.invert(same).to_numpy(zero_copy_only=False)
    return differ


def offsets_of(owners: Places, wanted: Places) -> npt.NDArray[np.int64]:
    """Where the rows of each wanted key begin, and the end: one more than there are keys. Both ascend."""
    return np.append(np.searchsorted(owners, wanted), len(owners)).astype(np.int64)


def in_order(owners: Places) -> Any:
    """What sorts rows by owner, those of one in their order; None where they are."""
    return None if (owners[1:] >= owners[:-1]).all() else np.argsort(owners, kind="stable")


def _behind(keys: list[bytes], lengths: npt.NDArray[np.int64]) -> pa.Array:
    """Stored keys without their first bytes."""
    if not keys:
        return pa.array([], pa.binary())
    stored = pa.array(keys, pa.binary())
    offsets, _ = binary_views(stored)
    return cut(stored.buffers()[2], offsets[:-1] + lengths, offsets[1:])
