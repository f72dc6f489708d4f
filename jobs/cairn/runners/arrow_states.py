"""Lists, maps and timers of the vectorised API.

An `ArrowProcessor` receives these objects from its handle in `init`, and uses them in `handleBatch` and
`handleExpiredTimers`. The methods have the names of PySpark's states, but act on many keys of the batch at once. The
argument `keys` gives positions in `batch.keys`, in one of two forms:

    keys of rows      Integers from 0 to the number of keys - 1, one for each row, in any order. A key may occur several
                      times. `batch.key_of_row` has this form for the batch's own rows.
    chosen keys       Ascending integers without repetition, or one bool for each key, or None for all keys.

The next call sees all changes. A method returns its whole result in memory. If lists or maps are large, read a few
keys at a time.

Every method raises StateTypeError if keys or rows do not fit, and UsageError outside a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from state_backend.formats.arrow_columns import Int64s, Mask
from state_backend.state.list_columns import ListColumns
from state_backend.state.map_columns import MapColumns
from state_backend.state.state_columns import EntryColumns, Places
from state_backend.state.timer_columns import TimerColumns
from state_backend.values.errors import StateTypeError, UsageError
from state_backend.values.frozen import frozen

__all__ = ["ArrowListState", "ArrowMapState", "KeyedEntries", "KeyedRows"]

Keys = npt.ArrayLike
EXPIRY = "expiry_ms"


@frozen
class _OfKeys:
    offsets: Int64s

    @property
    def key_of_row(self) -> Int64s:
        """For each row or entry, the position of its key among the keys that the caller passed."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))


@frozen
class KeyedRows(_OfKeys):
    # The rows, key after key, of the keys that the caller passed to the state's method. If the caller passed None, the
    # rows of all keys of the batch.
    rows: pa.Table

    def lists(self) -> pa.ListArray:
        """Return the rows as one Arrow column: for each key that the caller passed, a list of structs."""
        structs = self.rows.to_struct_array().combine_chunks()
        return pa.ListArray.from_arrays(pa.array(self.offsets, pa.int32()), structs)


@frozen
class KeyedEntries(_OfKeys):
    """Entries of the maps of many keys, as `ArrowMapState.iterator` returns them.

    `keys`, `values`: The user keys and values of the entries. The entries are in the order of the keys that the caller
    passed to `iterator`. A caller that passed None gets the entries of all keys of the batch.
    """

    keys: pa.Table
    values: pa.Table


class _OfBatch:
    """Base of lists, maps and timers, which checks the `keys` argument."""

    def __init__(self, columns: EntryColumns, what: str) -> None:
        self._columns = columns
        self._what = what

    def _of_rows(self, keys: Keys, *rows: Any) -> Places:
        """Return `keys`, the positions that a processor gave, as int64. Raise an error if `rows` has another length."""
        places = self._positions(keys)
        for part in rows:
            if len(part) != len(places):
                raise StateTypeError(
                    f"{self._what}: found {len(places)} keys for {len(part)} rows; give one key for each row"
                )
        return places

    def _chosen(self, keys: Keys | None) -> Places:
        if keys is None:
            return np.arange(self._count())
        mask = np.asarray(keys)
        if mask.dtype == np.bool_:
            if mask.shape != (self._count(),):
                raise StateTypeError(
                    f"{self._what}: found a mask of {mask.size} values for {self._count()} keys; give one bool for each key"
                )
            return np.flatnonzero(mask)
        places = self._positions(mask)
        if (places[1:] <= places[:-1]).any():
            raise StateTypeError(
                f"{self._what}: chosen keys must ascend without repetition; sort them, or give one bool for each key"
            )
        return places

    def _positions(self, keys: Keys) -> Places:
        count = self._count()
        places = np.asarray(keys)
        if not places.size:
            return np.zeros(0, np.int64)
        if places.dtype.kind not in "iu" or places.ndim != 1:
            raise StateTypeError(
                f"{self._what}: keys must be positions in batch.keys, one integer for each row; found an array of {places.dtype} with {places.ndim} dimensions"
            )
        if places.min() < 0 or places.max() >= count:
            raise StateTypeError(
                f"{self._what}: keys must be positions in batch.keys from 0 to {count - 1}; found {places.min()} to {places.max()}"
            )
        return places.astype(np.int64)

    def _count(self) -> int:
        count = self._columns.keys
        if count is None:
            raise UsageError(
                f"{self._what} was used outside a batch; only handleBatch and handleExpiredTimers may use state"
            )
        return count


class _Collections(_OfBatch):
    """Base of lists and maps."""

    _columns: ListColumns | MapColumns

    def exists(self, keys: Keys | None = None) -> Mask:
        """Return True for each of `keys` (None: all of the batch) whose list or map has an unexpired entry."""
        return self._columns.exists(self._chosen(keys))

    def clear(self, keys: Keys | None = None) -> None:
        """Remove the lists or maps of the given keys. With None, remove the lists or maps of all keys of the batch."""
        self._columns.clear(self._chosen(keys))


class ArrowListState(_Collections):
    """A list for each key, like PySpark's `ListState`.

    Rows are tables with the columns of the declared schema. Columns are matched by name.
    """

    _columns: ListColumns

    def get(self, keys: Keys | None = None) -> KeyedRows:
        """Return the unexpired elements of the lists of `keys` (None: all keys of the batch), in list order."""
        rows, offsets = self._columns.get(self._chosen(keys))
        return KeyedRows(rows=rows, offsets=offsets)

    def put(self, keys: Keys, rows: pa.Table) -> None:
        """Replace the lists of some keys. `keys`: For each of `rows`, the position of its key in the batch."""
        self._columns.put(self._of_rows(keys, rows), rows)

    def appendList(self, keys: Keys, rows: pa.Table) -> None:
        """Append each row to its key's list. The cost does not depend on the length of the list."""
        self._columns.append(self._of_rows(keys, rows), rows)


class ArrowMapState(_Collections):
    """A map for each key, like PySpark's `MapState`.

    Keys inside a map (user keys) and values are tables with the columns of the declared schemas. Columns are matched by
    name. Row i of `keys`, of `user_keys` and of `values` describes the same entry.
    """

    _columns: MapColumns

    def getValue(self, keys: Keys, user_keys: pa.Table) -> tuple[pa.Table, Mask]:
        """Return (values, exists) of the entries that `keys` and `user_keys` name, in their order.

        All value columns are null for an entry that does not exist.
        """
        return self._columns.get(self._of_rows(keys, user_keys), self._by_position(user_keys))

    def containsKey(self, keys: Keys, user_keys: pa.Table) -> Mask:
        """Return True for each entry, named by `keys` and `user_keys`, that exists."""
        return self.getValue(keys, user_keys)[1]

    def updateValue(self, keys: Keys, user_keys: pa.Table, values: pa.Table) -> None:
        """Set the entries, and restart their time to live. If an entry is given twice, the last one counts."""
        self._columns.update(self._of_rows(keys, user_keys, values), self._by_position(user_keys), values)

    def removeKey(self, keys: Keys, user_keys: pa.Table) -> None:
        """Remove the entries that `keys` and `user_keys` name. An entry that does not exist is ignored."""
        self._columns.remove(self._of_rows(keys, user_keys), self._by_position(user_keys))

    def iterator(self, keys: Keys | None = None) -> KeyedEntries:
        """Return the unexpired entries of the maps of `keys` (None: all of the batch), by user key for each key."""
        columns, values, offsets = self._columns.entries(self._chosen(keys))
        user_keys = pa.table(columns, names=list(self._columns.user_key_names))
        return KeyedEntries(keys=user_keys, values=values, offsets=offsets)

    def _by_position(self, user_keys: pa.Table) -> Sequence[pa.Array]:
        names = self._columns.user_key_names
        if sorted(user_keys.schema.names) != sorted(names):
            raise StateTypeError(
                f"{self._what}: its user key has the fields {', '.join(names)}; the given table has {', '.join(user_keys.schema.names)}"
            )
        return [user_keys.column(name) for name in names]


class ArrowTimers(_OfBatch):
    """The timers of the batch's keys, which `ArrowHandle` uses."""

    _columns: TimerColumns

    def register(self, keys: Keys, expiries_ms: npt.ArrayLike) -> None:
        self._columns.register(*self._timers(keys, expiries_ms))

    def delete(self, keys: Keys, expiries_ms: npt.ArrayLike) -> None:
        self._columns.delete(*self._timers(keys, expiries_ms))

    def times(self, keys: Keys | None) -> KeyedRows:
        times_ms, offsets = self._columns.times(self._chosen(keys))
        return KeyedRows(rows=pa.table({EXPIRY: times_ms}), offsets=offsets)

    def _timers(self, keys: Keys, expiries_ms: npt.ArrayLike) -> tuple[Places, Int64s]:
        given = np.asarray(expiries_ms)
        places = self._of_rows(keys, *([given] if given.ndim else []))
        if len(places) and given.dtype.kind not in "iu":
            raise StateTypeError(
                f"{self._what}: an expiry must be a whole number of milliseconds since the epoch; found {given.dtype}"
            )
        return places, np.broadcast_to(given, places.shape).astype(np.int64)
