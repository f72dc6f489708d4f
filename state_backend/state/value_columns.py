"""A value state of a shard for many keys at a time, as Arrow tables.

The same entries, digests and counts as ``ValueState`` makes key by key; what is per row in Python is the store's own get and
put and their bytes objects.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from state_backend.formats.evolution_columns import columns_reader
from state_backend.formats.hash_columns import xxh64
from state_backend.formats.row_columns import RowColumns
from state_backend.formats.types import parse_struct
from state_backend.state import layout
from state_backend.state.shard_state import ShardState
from state_backend.values.records import StateDescriptor

Mask = npt.NDArray[np.bool_]


class ValueColumns:
    """``read`` the state of a batch's keys, then ``write`` their new state.

    ``schema``: the Arrow schema of the tables that go in and out.
    """

    def __init__(self, shard: ShardState, descriptor: StateDescriptor) -> None:
        version = descriptor.versions[-1]
        self._shard = shard
        self._descriptor = descriptor
        self._codec = RowColumns(descriptor.name, parse_struct(version.value), version.version)
        self._decode = columns_reader(descriptor.name, descriptor.versions)
        self._seed = layout.seed_of(descriptor.name)
        self.schema: pa.Schema = self._codec.arrow_schema
        self._groups: npt.NDArray[np.uint16] = np.zeros(0, np.uint16)
        self._keys: pa.Array = pa.array([], pa.binary())
        self._stored_keys: list[bytes] = []
        self._old: pa.Array = pa.array([], pa.binary())

    def read(self, key_groups: npt.NDArray[np.uint16], keys: pa.Array) -> tuple[pa.Table, Mask]:
        """The rows of these encoded keys, ascending by key group and key and none twice, and which of them exist."""
        self._groups, self._keys = key_groups, keys
        prefixes = np.empty((len(keys), 3), np.uint8)
        prefixes[:, :2] = key_groups.astype(">u2").view(np.uint8).reshape(-1, 2)
        prefixes[:, 2] = self._descriptor.state_id
        self._stored_keys = _joined(_as_binary(prefixes), keys).to_pylist()
        self._old = pa.array(self._shard.store.get_many(self._stored_keys), pa.binary())
        rows = self._visible(self._old)
        return pa.Table.from_batches([self._decode(rows)]), rows.is_valid().to_numpy(zero_copy_only=False)

    def _visible(self, entries: pa.Array) -> pa.Array:
        expiring = _is_expiring(entries)
        if not expiring.any():
            return entries
        mask = pa.array(expiring)
        with_expiry = entries.filter(mask)
        # A slice without a stop fails in Arrow 26.
        rows = pc.binary_slice(with_expiry, 9, pc.max(pc.binary_length(with_expiry)).as_py())
        alive = pa.array(_expiries(with_expiry) > self._shard.now_ms)
        return pc.replace_with_mask(entries, mask, pc.if_else(alive, rows, pa.scalar(None, pa.binary())))

    def write(self, rows: pa.Table, cleared: Mask | None = None) -> None:
        """Replaces the state of every key that was read last; where ``cleared``, removes it. StateTypeError if the rows do
        not fit the schema."""
        new = self._codec.encode(rows)
        ttl_ms = self._descriptor.ttl_ms
        if ttl_ms is not None:
            new = _joined(pa.repeat(pa.scalar(layout.with_expiry(b"", self._shard.now_ms + ttl_ms)), len(new)), new)
        if cleared is not None:
            new = pc.if_else(pa.array(cleared), pa.scalar(None, pa.binary()), new)
        self._replace(new)

    def clear(self, cleared: Mask) -> None:
        """Removes the state of these of the keys that were read last; the others keep theirs, expiry included."""
        self._replace(pc.if_else(pa.array(cleared), pa.scalar(None, pa.binary()), self._old))

    def _replace(self, new: pa.Array) -> None:
        old = self._old
        same = pc.or_(pc.fill_null(pc.equal(old, new), False), pc.and_(old.is_null(), new.is_null()))
        changed = pc.invert(same).to_numpy(zero_copy_only=False)
        if not changed.any():
            return
        groups, keys, stored_keys = self._groups, self._keys, self._stored_keys
        if not changed.all():
            mask = pa.array(changed)
            groups, keys, old, new = groups[changed], keys.filter(mask), old.filter(mask), new.filter(mask)
            stored_keys = [stored_keys[i] for i in np.flatnonzero(changed)]
        self._account(groups, keys, old, new)
        self._shard.put_many(zip(stored_keys, new.to_pylist(), strict=True))
        for entries, data in ((old, None), (new, b"")):
            self._shard.put_many(self._expiry_index(groups, keys, entries, data))
        self._old = new if changed.all() else pc.replace_with_mask(self._old, pa.array(changed), new)

    def _account(self, groups: npt.NDArray[np.uint16], keys: pa.Array, old: pa.Array, new: pa.Array) -> None:
        gone, come = (e.is_valid().to_numpy(zero_copy_only=False) for e in (old, new))
        change = np.zeros(len(keys), np.uint64)
        for entries, there, sign in ((old, gone, np.subtract), (new, come, np.add)):
            if there.any():
                mask = pa.array(there)
                change[there] = sign(change[there], xxh64(_joined(keys.filter(mask), entries.filter(mask)), self._seed))
        starts = np.concatenate([[0], np.flatnonzero(groups[1:] != groups[:-1]) + 1])
        counts = np.add.reduceat(come.astype(np.int64) - gone, starts)
        for group, digest, count in zip(groups[starts], np.add.reduceat(change, starts), counts, strict=True):
            self._shard.account(int(group), self._descriptor.name, int(digest), int(count))

    def _expiry_index(
        self, groups: npt.NDArray[np.uint16], keys: pa.Array, entries: pa.Array, data: bytes | None
    ) -> Iterator[tuple[bytes, bytes | None]]:
        expiring = _is_expiring(entries)
        if expiring.any():
            mask = pa.array(expiring)
            times = _expiries(entries.filter(mask)).tolist()
            for group, key, expiry_ms in zip(
                groups[expiring].tolist(), keys.filter(mask).to_pylist(), times, strict=True
            ):
                yield layout.expiry_key(group, expiry_ms, self._descriptor.state_id, key), data


def _is_expiring(entries: pa.Array) -> Any:
    marker = pc.equal(pc.binary_slice(entries, 0, 1), pa.scalar(bytes([layout.EXPIRING]), pa.binary()))
    return pc.fill_null(marker, False).to_numpy(zero_copy_only=False)


def _expiries(entries: pa.Array) -> Any:
    packed = pc.binary_slice(entries, 1, 9).cast(pa.binary(8))
    return np.frombuffer(packed.buffers()[1], "<i8", len(packed), packed.offset * 8)


def _as_binary(rows: npt.NDArray[np.uint8]) -> pa.Array:
    """Each row of a matrix as one element."""
    fixed = pa.FixedSizeBinaryArray.from_buffers(pa.binary(rows.shape[1]), len(rows), [None, pa.py_buffer(rows)])
    return fixed.cast(pa.binary())


def _joined(first: pa.Array, second: pa.Array) -> pa.Array:
    return pc.binary_join_element_wise(first, second, pa.scalar(b"", pa.binary()))
