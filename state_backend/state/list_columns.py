"""List state of a shard for many keys at a time, as Arrow tables.

A list's elements have ascending positions. The store also holds two positions for each list: the one of its first
element, and the one that the next appended element gets.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from state_backend.formats.arrow_columns import Fixed, Int64s, Mask, binary_views, concatenate, cut, gather
from state_backend.state import layout
from state_backend.state.entry_columns import Groups, mask_of, stored_keys
from state_backend.state.state_columns import Places, StateColumns, in_order, offsets_of

Positions = Int64s
_META_BYTES = layout.record_bytes(b"", layout.pack_positions(0, 0))


class ListColumns(StateColumns):
    def get(self, wanted: Places) -> tuple[pa.Table, Int64s]:
        rows, owners = self._elements(wanted)
        there = rows.is_valid()
        if rows.null_count:
            rows, owners = rows.filter(there), owners[mask_of(there)]
        return self._table(rows), offsets_of(owners, wanted)

    def exists(self, wanted: Places) -> Mask:
        """Return a mask: whether the list of each key index in `wanted` has an unexpired element."""
        first, next_ = self._positions(wanted)
        filled = next_ > first
        there = np.zeros(len(wanted), np.bool_)
        last = self._read_elements(wanted[filled], next_[filled] - 1)
        there[filled] = mask_of(self._visible(last).is_valid())
        doubtful = filled & ~there
        if doubtful.any():
            rows, owners = self._elements(wanted[doubtful])
            alive = owners[mask_of(rows.is_valid())]
            there[np.searchsorted(wanted, alive)] = True
        return there

    def append(self, owners: Places, rows: pa.Table) -> None:
        """Append `rows[i]` to the list of the key with index `owners[i]`. Rows of one key keep their order."""
        owners, entries = self._sort(owners, self._entries(rows))
        touched, starts, counts, first, next_ = self._lists_of(owners)
        positions = np.repeat(next_ - starts, counts) + np.arange(len(owners))
        # The store holds nothing at the position `next_` of a list or at later ones, so no old entry is read.
        self._write_elements(owners, positions, entries, known=True)
        self._write_positions(touched, (first, next_), (first, next_ + counts))

    def put(self, owners: Places, rows: pa.Table) -> None:
        """Replace the whole list of each key in `owners`: `rows[i]` belongs to the key with index `owners[i]`."""
        owners, entries = self._sort(owners, self._entries(rows))
        touched, starts, counts, first, next_ = self._lists_of(owners)
        self._remove(touched, np.maximum(first, counts), next_)
        positions = np.arange(len(owners)) - np.repeat(starts, counts)
        replaced = positions < np.repeat(next_, counts)
        for some, known in ((replaced, False), (~replaced, True)):
            if some.any():
                self._write_elements(owners[some], positions[some], entries.filter(pa.array(some)), known=known)
        self._write_positions(touched, (first, next_), (np.zeros_like(first), counts))

    def clear(self, wanted: Places) -> None:
        """Remove the lists of the keys with the indexes `wanted`. Positions of new elements begin at 0 again."""
        first, next_ = self._positions(wanted)
        self._remove(wanted, first, next_)
        self._write_positions(wanted, (first, next_), (np.zeros_like(first), np.zeros_like(first)))

    def trim(self, key_groups: Groups, elements: pa.Array) -> None:
        """After the deletion of `elements`, move the first position of each list to its first element that is left.

        If none is left, delete the list's positions. Otherwise a list whose elements expire would keep a growing range
        of positions without elements, all of which each read would look up. `elements`: keys of the deleted elements.
        """
        offsets, raw = binary_views(elements)
        at = offsets[1:] - layout.SEQUENCE_BYTES
        gone = gather(raw, at, np.dtype(">u8")).astype(np.int64)
        keys = cut(elements.buffers()[2], offsets[:-1], at - len(layout.LIST_ELEMENT))
        starts = np.flatnonzero(_begins(keys, key_groups))
        self.begin(key_groups[starts], keys.take(pa.array(starts)))
        lists = np.arange(len(starts))
        # If the state's last elements were deleted, its entry count is 0, but the positions of its lists are still
        # stored. For a count of 0, `_positions` returns zeros without a read. `empty=False` makes it read always.
        first, next_ = self._positions(lists, empty=False)
        moving = np.flatnonzero(first == gone[starts])
        # `now` gets the new first position of each list. If elements at the list's beginning are among the deleted
        # `elements`, it is the position after them. Otherwise it is `first`, the old first position.
        counts = np.diff(np.append(starts, len(gone)))
        nth = np.arange(len(gone)) - np.repeat(starts, counts)
        follows = gone == np.repeat(first, counts) + nth
        now = first + np.minimum.reduceat(np.where(follows, np.repeat(counts, counts), nth), starts)
        moving = moving[now[moving] < next_[moving]]
        # The element at position `now` may have been deleted earlier, while elements before it remained. So `now` moves
        # on, until the store has an element at this position or the list ends.
        while len(moving):
            there = mask_of(self._read_elements(moving, now[moving]).is_valid())
            moving = moving[~there]
            now[moving] += 1
            moving = moving[now[moving] < next_[moving]]
        emptied = now >= next_
        self._write_positions(lists, (first, next_), (np.where(emptied, 0, now), np.where(emptied, 0, next_)))

    def _sort(self, owners: Places, entries: pa.Array) -> tuple[Places, pa.Array]:
        order = in_order(owners)
        return (owners, entries) if order is None else (owners[order], entries.take(pa.array(order)))

    def _lists_of(self, owners: Places) -> tuple[Places, Positions, Positions, Positions, Positions]:
        """Return, for sorted rows, five arrays by key: its index, first row, row count, first and next position."""
        touched, starts, counts = np.unique(owners, return_index=True, return_counts=True)
        return touched, starts, counts, *self._positions(touched)

    def _elements(self, wanted: Places) -> tuple[pa.Array, Places]:
        owners, positions = _ranges(wanted, *self._positions(wanted))
        return self._visible(self._read_elements(owners, positions)), owners

    def _rests(self, owners: Places, positions: Positions) -> pa.Array:
        keys = self._keys.take(pa.array(owners))
        marker = Fixed(np.void(layout.LIST_ELEMENT))
        return concatenate(len(owners), [keys, marker, Fixed(positions.astype(">u8"))])

    def _read_elements(self, owners: Places, positions: Positions) -> pa.Array:
        return self._read(owners, self._locate(owners, self._rests(owners, positions)))

    def _write_elements(self, owners: Places, positions: Positions, entries: pa.Array, *, known: bool) -> None:
        rests = self._rests(owners, positions)
        self._replace(owners, rests, entries, pa.nulls(len(owners), pa.binary()) if known else None)

    def _remove(self, wanted: Places, first: Positions, next_: Positions) -> None:
        owners, positions = _ranges(wanted, first, next_)
        if len(owners):
            self._write_elements(owners, positions, pa.nulls(len(owners), pa.binary()), known=False)

    def _meta_keys(self, wanted: Places) -> list[bytes]:
        keys = self._keys.take(pa.array(wanted))
        return stored_keys(self._groups[wanted], self._state_id, keys, layout.LIST_META)

    def _positions(self, wanted: Places, *, empty: bool = True) -> tuple[Positions, Positions]:
        found = self._read(wanted, self._meta_keys(wanted), empty=empty)
        there = mask_of(found.is_valid())
        packed = np.zeros((len(wanted), 2), np.int64)
        if there.any():
            present = found.drop_null().cast(pa.binary(16))
            image = np.frombuffer(present.buffers()[1], ">u8", 2 * len(present), present.offset * 16)
            packed[there] = image.reshape(-1, 2)
        return packed[:, 0], packed[:, 1]

    def _write_positions(
        self, wanted: Places, before: tuple[Positions, Positions], after: tuple[Positions, Positions]
    ) -> None:
        changed = (before[0] != after[0]) | (before[1] != after[1])
        if not changed.any():
            return
        was, is_ = before[1][changed] > 0, after[1][changed] > 0
        self._seen.clear()
        owners = wanted[changed]
        located = self._meta_keys(owners)
        sizes = _META_BYTES + np.fromiter(map(len, located), np.int64, len(located))
        groups = self._groups[owners]
        changes = np.bincount(groups, sizes * (is_.astype(np.int64) - was))
        for group in np.flatnonzero(changes).tolist():
            self._shard.accounts.resize(group, int(changes[group]))
        packed = np.stack((after[0][changed], after[1][changed]), axis=1).astype(">u8")
        image = pa.Array.from_buffers(pa.binary(16), len(owners), [None, pa.py_buffer(packed)]).cast(pa.binary())
        new = pc.if_else(pa.array(is_), image, pa.scalar(None, pa.binary()))
        self._shard.stored.put_many(located, new.to_pylist())


def _ranges(owners: Places, first: Positions, next_: Positions) -> tuple[Places, Positions]:
    counts = np.maximum(next_ - first, 0)
    begins = np.cumsum(counts) - counts
    return np.repeat(owners, counts), np.arange(counts.sum()) + np.repeat(first - begins, counts)


def _begins(keys: pa.Array, key_groups: Groups) -> Mask:
    other = np.ones(len(keys), np.bool_)
    if len(keys) > 1:
        same = mask_of(pc.equal(keys[1:], keys[:-1]))
        other[1:] = ~same | (key_groups[1:] != key_groups[:-1])
    return other
