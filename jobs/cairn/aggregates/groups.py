"""The rows of a batch, grouped by key."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cairn.arrow_processor import KeyedBatch
from cairn.numpy_columns import Array, Int64s, numbers, valid_rows, whole
from state_backend.values.errors import InvariantViolated
from state_backend.values.frozen import frozen

Doubles = npt.NDArray[np.float64]


@frozen
class Arrivals:
    """When the rows of a batch arrived, by which `First` and `Last` choose. Rows of an earlier interval come first."""

    # End of the interval, in milliseconds since the epoch.
    interval_ms: int
    numbers: Int64s  # Each row's place among the rows of its key in the interval.


class Groups:
    """The rows of a batch, grouped by key.

    Every key has at least one row, or the batch has no rows at all. For a batch without rows, `Aggregate.step` returns
    the stored fields unchanged, and the aggregates' values.
    """

    def __init__(self, batch: KeyedBatch, arrivals: Arrivals | None = None) -> None:
        self.batch = batch
        self.arrivals = arrivals
        self.keys: int = batch.keys.num_rows
        self.starts = batch.row_offsets[:-1]
        self.lengths = np.diff(batch.row_offsets)
        if batch.rows.num_rows and (self.lengths < 1).any():
            raise InvariantViolated(f"key {np.argmin(self.lengths)} of a batch of {self.keys} has no rows")
        self._columns: dict[str, Column] = {}

    @property
    def some(self) -> slice:
        """The slice of those keys that have rows: all keys, or none if the batch has no rows."""
        return slice(None if self.batch.rows.num_rows else 0)

    @cached_property
    def key_of_row(self) -> Int64s:
        every = np.arange(self.keys)
        return every if self.keys == self.batch.rows.num_rows else np.repeat(every, self.lengths)

    def column(self, name: str) -> Column:
        """Return the values of a column, grouped by key. Aggregates of the same column share one `Column`."""
        if name not in self._columns:
            self._columns[name] = Column(whole(self.batch.rows[name]), self)
        return self._columns[name]


def key_text(batch: KeyedBatch, key: Any) -> str:
    """Return the key at the position `key` of a batch as text for messages, such as "user='ann'"."""
    values = batch.keys.slice(int(key), 1).to_pylist()[0]
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


class Column:
    """The non-null values of a column, grouped by key."""

    present: Int64s | slice  # Positions of the keys that have a non-null value.

    def __init__(self, array: pa.Array, groups: Groups) -> None:
        self.array = array
        self.groups = groups
        if array.null_count or not len(array):
            self.rows = np.flatnonzero(valid_rows(array))
            self.owners = groups.key_of_row[self.rows]
            self.counts = np.bincount(self.owners, minlength=groups.keys)
            self.present = np.flatnonzero(self.counts)
            self.starts = (np.cumsum(self.counts) - self.counts)[self.present]
        else:
            self.rows = np.arange(len(array))
            self.owners, self.counts = groups.key_of_row, groups.lengths
            self.present, self.starts = slice(None), groups.starts

    @cached_property
    def values(self) -> Array:
        """The non-null values of the column as a NumPy array, key after key."""
        values = numbers(self.array)
        return values[self.rows] if self.array.null_count else values

    @cached_property
    def doubles(self) -> Doubles:
        """The non-null values of the column as float64, key after key, for means and variances."""
        if pa.types.is_decimal(self.array.type):
            return np.asarray(self.array.drop_null().cast(pa.float64()).to_numpy())
        return self.values.astype(np.float64)

    def reduce(self, fold: np.ufunc, values: Array) -> Array:
        """Reduce `values`, one for each non-null value, to one for each key that has any (`present`)."""
        if len(values) == len(self.starts):
            return values
        folded: Array = fold.reduceat(values, self.starts, axis=0)
        return folded
