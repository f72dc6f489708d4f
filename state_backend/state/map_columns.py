"""Map state of a shard for many keys at a time, as Arrow tables.

A map belongs to a key of the pipeline. The keys inside the map are called user keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from state_backend.formats.arrow_columns import Int64s, Mask, concatenate
from state_backend.formats.key_columns import KeyColumns
from state_backend.formats.types import parse_struct
from state_backend.state.entry_columns import Groups, mask_of
from state_backend.state.shard_state import ShardState
from state_backend.state.state_columns import Places, StateColumns, offsets_of
from state_backend.values.records import StateDescriptor


class MapColumns(StateColumns):
    """A map state for a batch of keys. `owners`: for each row, its key's index. `user_keys`: columns of user keys."""

    def __init__(self, shard: ShardState, descriptor: StateDescriptor) -> None:
        super().__init__(shard, descriptor)
        user_key = descriptor.versions[-1].user_key
        assert user_key is not None
        self._user_keys = KeyColumns(parse_struct(user_key), what=f"user key of state {descriptor.name!r}")
        self.user_key_names = self._user_keys.schema.names
        self._whole: tuple[pa.Array, pa.Array] | None = None

    def begin(self, key_groups: Groups, keys: pa.Array) -> None:
        super().begin(key_groups, keys)
        self._whole = None

    def end(self) -> None:
        super().end()
        self._whole = None

    def get(self, owners: Places, user_keys: Sequence[pa.Array]) -> tuple[pa.Table, Mask]:
        encoded = self._user_keys.encode(user_keys)
        order = _in_order(owners, encoded)
        if order is not None:
            owners, encoded = owners[order], encoded.take(pa.array(order))
        rows = self._visible(self._read(owners, self._locate(owners, self._rests(owners, encoded))))
        if order is not None:
            rows = rows.take(pa.array(np.argsort(order)))
        return self._table(rows), mask_of(rows.is_valid())

    def update(self, owners: Places, user_keys: Sequence[pa.Array], values: pa.Table) -> None:
        """Set one value for each row's key and user key. If both occur in several rows, the last row counts."""
        self._set(owners, self._user_keys.encode(user_keys), self._entries(values))

    def remove(self, owners: Places, user_keys: Sequence[pa.Array]) -> None:
        self._set(owners, self._user_keys.encode(user_keys), pa.nulls(len(owners), pa.binary()))

    def entries(self, wanted: Places) -> tuple[list[pa.Array], pa.Table, Int64s]:
        owners, encoded, found = self._read_below(wanted)
        # If the maps of all keys were read, keep them: later changes of the batch need not read the old entries again.
        self._whole = (self._rests(owners, encoded), found) if len(wanted) == self.keys else None
        rows = self._visible(found)
        if rows.null_count:
            there = rows.is_valid()
            owners, encoded, rows = owners[mask_of(there)], encoded.filter(there), rows.filter(there)
        return self._user_keys.decode(encoded), self._table(rows), offsets_of(owners, wanted)

    def exists(self, wanted: Places) -> Mask:
        """Return a mask: whether the map of each key index in `wanted` has an unexpired entry."""
        there = np.zeros(len(wanted), np.bool_)
        doubtful = wanted
        for rows in (1, None):
            owners, _, found = self._read_below(doubtful, rows)
            alive = mask_of(self._visible(found).is_valid())
            there[np.searchsorted(wanted, owners[alive])] = True
            doubtful = np.setdiff1d(owners, owners[alive])
            if not len(doubtful):
                break
        return there

    def clear(self, wanted: Places) -> None:
        owners, encoded, old = self._read_below(wanted)
        if len(owners):
            self._whole = None
            rests = self._rests(owners, encoded)
            self._replace(owners, rests, pa.nulls(len(old), pa.binary()), old)

    def _rests(self, owners: Places, encoded: pa.Array) -> pa.Array:
        return concatenate(len(owners), [self._keys.take(pa.array(owners)), encoded])

    def _set(self, owners: Places, encoded: pa.Array, new: pa.Array) -> None:
        order = _in_order(owners, encoded)
        if order is not None:
            at = pa.array(order)
            owners, encoded, new = owners[order], encoded.take(at), new.take(at)
        last = np.append((owners[1:] != owners[:-1]) | _differ(encoded), True)
        if not last.all():
            kept = pa.array(last)
            owners, encoded, new = owners[last], encoded.filter(kept), new.filter(kept)
        rests = self._rests(owners, encoded)
        self._replace(owners, rests, new, None if self._whole is None else _found(rests, *self._whole))
        if self._whole is not None:
            # The new entries come first, because of equal keys `_found` takes the first one.
            known, entries = self._whole
            self._whole = pa.concat_arrays([rests, known]), pa.concat_arrays([new, entries])


def _found(rests: pa.Array, known: pa.Array, entries: pa.Array) -> pa.Array:
    return entries.take(pc.index_in(rests, value_set=known))


def _in_order(owners: Places, encoded: pa.Array) -> Places | None:
    """Return a stable order by owner and user key; None if the rows are sorted already."""
    same_owner = owners[1:] == owners[:-1]
    descends = mask_of(pc.less(encoded[1:], encoded[:-1]))
    if not ((owners[1:] < owners[:-1]) | (same_owner & descends)).any():
        return None
    # User keys often repeat in a batch. Only the distinct user keys are sorted as bytes; rows are sorted by their rank.
    coded = encoded.dictionary_encode()
    ascending = pc.array_sort_indices(coded.dictionary).to_numpy()
    rank = np.empty(len(ascending), np.int64)
    rank[ascending] = np.arange(len(ascending))
    return np.lexsort((rank[coded.indices.to_numpy()], owners))


def _differ(encoded: pa.Array) -> Mask:
    return mask_of(pc.not_equal(encoded[1:], encoded[:-1]))
