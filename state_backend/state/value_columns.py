"""A value state of a shard for many keys at a time, as Arrow tables.

The same entries, digests and counts as ``ValueState`` makes key by key; what is per row in Python is the store's own get and
put and their bytes objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from state_backend.formats.evolution_columns import columns_reader
from state_backend.formats.row_columns import RowColumns
from state_backend.formats.types import parse_struct
from state_backend.state import layout
from state_backend.state.entry_columns import (
    Groups,
    changes_by_key_group,
    expiries,
    is_expiring,
    joined,
    stored_keys,
    without_expiry,
)
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
        self.schema: pa.Schema = self._codec.arrow_schema
        self._groups: Groups = np.zeros(0, np.uint16)
        self._keys: pa.Array = pa.array([], pa.binary())
        self._stored_keys: list[bytes] = []
        self._old: pa.Array = pa.array([], pa.binary())

    def read(self, key_groups: Groups, keys: pa.Array) -> tuple[pa.Table, Mask]:
        """The rows of these encoded keys, ascending by key group and key and none twice, and which of them exist."""
        self._groups, self._keys = key_groups, keys
        self._stored_keys = stored_keys(key_groups, self._descriptor.state_id, keys)
        self._old = pa.array(self._read(key_groups), pa.binary())
        rows = self._visible(self._old)
        return pa.Table.from_batches([self._decode(rows)]), rows.is_valid().to_numpy(zero_copy_only=False)

    def _read(self, key_groups: Groups) -> Sequence[bytes | None]:
        return self._shard.read_sorted(self._descriptor.name, key_groups, self._stored_keys)

    def _visible(self, entries: pa.Array) -> pa.Array:
        expiring = is_expiring(entries)
        if not expiring.any():
            return entries
        mask = pa.array(expiring)
        with_expiry = entries.filter(mask)
        alive = pa.array(expiries(with_expiry) > self._shard.now_ms)
        rows = pc.if_else(alive, without_expiry(with_expiry), pa.scalar(None, pa.binary()))
        return pc.replace_with_mask(entries, mask, rows)

    def write(self, rows: pa.Table, cleared: Mask | None = None) -> None:
        """Replaces the state of every key that was read last; where ``cleared``, removes it.

        Raises: StateTypeError if the rows do not fit the schema.
        """
        new = self._codec.encode(rows)
        ttl_ms = self._descriptor.ttl_ms
        if ttl_ms is not None:
            new = joined(pa.scalar(layout.with_expiry(b"", layout.later(self._shard.now_ms, ttl_ms)), pa.binary()), new)
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
        groups, keys, located = self._groups, self._keys, self._stored_keys
        if not changed.all():
            mask = pa.array(changed)
            groups, keys, old, new = groups[changed], keys.filter(mask), old.filter(mask), new.filter(mask)
            located = [located[i] for i in np.flatnonzero(changed).tolist()]
        name = self._descriptor.name
        for group, *changes in changes_by_key_group(name, groups, keys, old, new):
            self._shard.account(group, name, *changes)
        self._shard.put_many(located, new.to_pylist())
        for entries, data in ((old, None), (new, b"")):
            indexed = list(self._expiry_index(groups, keys, entries))
            self._shard.put_many(indexed, [data] * len(indexed))
        self._old = new if changed.all() else pc.replace_with_mask(self._old, pa.array(changed), new)

    def _expiry_index(self, groups: Groups, keys: pa.Array, entries: pa.Array) -> Iterator[bytes]:
        expiring = is_expiring(entries)
        if expiring.any():
            mask = pa.array(expiring)
            times = expiries(entries.filter(mask)).tolist()
            for group, key, expiry_ms in zip(
                groups[expiring].tolist(), keys.filter(mask).to_pylist(), times, strict=True
            ):
                yield layout.expiry_key(group, expiry_ms, self._descriptor.state_id, key)
