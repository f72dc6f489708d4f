"""Lists, maps and timers of the vectorised API: what an ``ArrowProcessor`` gets of its handle in ``init``, and uses in
``handleBatch`` and ``handleExpiredTimers``.

Methods have the names of PySpark's states. They act on many keys of the batch at once: ``keys`` says which, by position in
``batch.keys``.

    keys of rows      integers 0 .. number of keys - 1, one per row, in any order; a key may come any number of times.
                      ``batch.key_of_row`` is that of the batch's own rows
    chosen keys       integers that ascend, none twice, or one bool per key, or None for all keys of the batch

What was written is there for the next call. What a call returns lies in memory whole: read the lists or maps of some keys at a time
if they are large. Raises: StateTypeError for keys or rows that do not fit, UsageError outside a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from state_backend.state.list_columns import ListColumns
from state_backend.state.map_columns import MapColumns
from state_backend.state.state_columns import EntryColumns, Mask, Places
from state_backend.state.timer_columns import TimerColumns
from state_backend.values.errors import StateTypeError, UsageError

__all__ = ["ArrowListState", "ArrowMapState", "KeyedEntries", "KeyedRows"]

Keys = npt.ArrayLike
EXPIRY = "expiry_ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedRows:
    """Rows of many keys. offsets: int64, one more than there are keys; the i-th chosen key has the rows
    ``offsets[i] .. offsets[i+1]-1``."""

    rows: pa.Table
    offsets: npt.NDArray[np.int64]

    @property
    def key_of_row(self) -> npt.NDArray[np.int64]:
        """By row the position of its key among the chosen ones."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    def lists(self) -> pa.ListArray:
        """The same as one column: by key the list of its rows, as structs."""
        structs = self.rows.to_struct_array().combine_chunks()
        return pa.ListArray.from_arrays(pa.array(self.offsets, pa.int32()), structs)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedEntries:
    """Map entries of many keys. keys: the user keys. offsets: as of ``KeyedRows``."""

    keys: pa.Table
    values: pa.Table
    offsets: npt.NDArray[np.int64]

    @property
    def key_of_row(self) -> npt.NDArray[np.int64]:
        """By entry the position of its key among the chosen ones."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))


class _OfBatch:
    """What lists, maps and timers share: which keys of the batch are meant."""

    def __init__(self, columns: EntryColumns, what: str) -> None:
        self._columns = columns
        self._what = what

    def _of_rows(self, keys: Keys, *rows: Any) -> Places:
        """One position per row. ``rows``: whatever must have as many."""
        places = self._positions(keys)
        for part in rows:
            if len(part) != len(places):
                raise StateTypeError(f"{self._what}: {len(places)} keys for {len(part)} rows; give one key per row")
        return places

    def _chosen(self, keys: Keys | None) -> Places:
        if keys is None:
            return np.arange(self._count())
        mask = np.asarray(keys)
        if mask.dtype == np.bool_:
            if mask.shape != (self._count(),):
                raise StateTypeError(
                    f"{self._what}: a mask of {mask.size} for {self._count()} keys; give one bool per key"
                )
            return np.flatnonzero(mask)
        places = self._positions(mask)
        if (places[1:] <= places[:-1]).any():
            raise StateTypeError(
                f"{self._what}: chosen keys must ascend, none twice; sort them, or give one bool per key"
            )
        return places

    def _positions(self, keys: Keys) -> Places:
        count = self._count()
        places = np.asarray(keys)
        if not places.size:
            return np.zeros(0, np.int64)
        if places.dtype.kind not in "iu" or places.ndim != 1:
            raise StateTypeError(
                f"{self._what}: keys are positions in batch.keys, one integer per row; found {places.ndim} dimensions of {places.dtype}"
            )
        if places.min() < 0 or places.max() >= count:
            raise StateTypeError(
                f"{self._what}: keys are positions in batch.keys, 0 .. {count - 1}; found {places.min()} .. {places.max()}"
            )
        return places.astype(np.int64)

    def _count(self) -> int:
        count = self._columns.keys
        if count is None:
            raise UsageError(
                f"{self._what} is used outside a batch: only handleBatch and handleExpiredTimers may use state"
            )
        return count


class ArrowListState(_OfBatch):
    """A list per key, as PySpark's ``ListState``. Rows are tables with the columns that were declared, matched by name."""

    _columns: ListColumns

    def exists(self, keys: Keys | None = None) -> Mask:
        """By chosen key whether its list has an element that has not expired."""
        return self._columns.exists(self._chosen(keys))

    def get(self, keys: Keys | None = None) -> KeyedRows:
        """The elements of the chosen keys, each key's in their order, without expired ones."""
        rows, offsets = self._columns.get(self._chosen(keys))
        return KeyedRows(rows=rows, offsets=offsets)

    def put(self, keys: Keys, rows: pa.Table) -> None:
        """Replaces the list of every key that has a row here. ``keys``: one per row."""
        self._columns.put(self._of_rows(keys, rows), rows)

    def appendList(self, keys: Keys, rows: pa.Table) -> None:
        """Adds each row at the end of its key's list; costs the same however long the list is. ``keys``: one per row."""
        self._columns.append(self._of_rows(keys, rows), rows)

    def clear(self, keys: Keys | None = None) -> None:
        """Removes the lists of the chosen keys."""
        self._columns.clear(self._chosen(keys))


class ArrowMapState(_OfBatch):
    """A map per key, as PySpark's ``MapState``. User keys and values are tables with the columns that were declared, matched by
    name; of entries, one row of ``keys`` and of both tables belong together."""

    _columns: MapColumns

    def exists(self, keys: Keys | None = None) -> Mask:
        """By chosen key whether its map has an entry that has not expired."""
        return self._columns.exists(self._chosen(keys))

    def getValue(self, keys: Keys, user_keys: pa.Table) -> tuple[pa.Table, Mask]:
        """The values of these entries, in this order, and which of them there are; all columns are null where there is none."""
        return self._columns.get(self._of_rows(keys, user_keys), self._by_position(user_keys))

    def containsKey(self, keys: Keys, user_keys: pa.Table) -> Mask:
        """Which of these entries there are."""
        return self.getValue(keys, user_keys)[1]

    def updateValue(self, keys: Keys, user_keys: pa.Table, values: pa.Table) -> None:
        """Sets these entries, and starts their time to live anew; of one that comes twice the last counts."""
        self._columns.update(self._of_rows(keys, user_keys, values), self._by_position(user_keys), values)

    def removeKey(self, keys: Keys, user_keys: pa.Table) -> None:
        """Removes these entries; nothing happens for one that is not there."""
        self._columns.remove(self._of_rows(keys, user_keys), self._by_position(user_keys))

    def iterator(self, keys: Keys | None = None) -> KeyedEntries:
        """All entries of the chosen keys, each key's in the order of user keys, without expired ones."""
        columns, values, offsets = self._columns.entries(self._chosen(keys))
        user_keys = pa.table(columns, names=list(self._columns.user_key_names))
        return KeyedEntries(keys=user_keys, values=values, offsets=offsets)

    def clear(self, keys: Keys | None = None) -> None:
        """Removes all entries of the chosen keys."""
        self._columns.clear(self._chosen(keys))

    def _by_position(self, user_keys: pa.Table) -> Sequence[pa.Array]:
        names = self._columns.user_key_names
        if sorted(user_keys.schema.names) != sorted(names):
            raise StateTypeError(
                f"{self._what}: its user key has the fields {', '.join(names)}; found {', '.join(user_keys.schema.names)}"
            )
        return [user_keys.column(name) for name in names]


class ArrowTimers(_OfBatch):
    """The timers of the batch's keys, for the handle."""

    _columns: TimerColumns

    def register(self, keys: Keys, expiries_ms: npt.ArrayLike) -> None:
        """As the handle's ``registerTimer``."""
        self._columns.register(*self._timers(keys, expiries_ms))

    def delete(self, keys: Keys, expiries_ms: npt.ArrayLike) -> None:
        """As the handle's ``deleteTimer``."""
        self._columns.delete(*self._timers(keys, expiries_ms))

    def times(self, keys: Keys | None) -> KeyedRows:
        """As the handle's ``listTimers``."""
        times_ms, offsets = self._columns.times(self._chosen(keys))
        return KeyedRows(rows=pa.table({EXPIRY: times_ms}), offsets=offsets)

    def _timers(self, keys: Keys, expiries_ms: npt.ArrayLike) -> tuple[Places, npt.NDArray[np.int64]]:
        given = np.asarray(expiries_ms)
        places = self._of_rows(keys, *([given] if given.ndim else []))
        if len(places) and given.dtype.kind not in "iu":
            raise StateTypeError(
                f"{self._what}: an expiry is a whole number of milliseconds since the epoch; found {given.dtype}"
            )
        return places, np.broadcast_to(given, places.shape).astype(np.int64)
