"""Sort the rows of one shard within the Spark task of the shard, in Python instead of in Spark's JVM.

The job of a shard gets the tick first (the row that starts the shard's task), and then the rows in the same order as
from Spark's sort. The sort columns are the key group, the key, the kind (initial state before input), `order_by`, and
all other columns. Last, a mask orders rows that differ only in 0.0 and -0.0. `cairn.rows.routing` describes the
columns. docs/design.md compares the costs with Spark's sort ("Sort").

If a column is an array, a struct, or of a type that only Spark can order (such as a map), `plan_arrangement` returns
None. Then Spark sorts the rows (`routing.route_in_order`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import ArrayType, StructType

from cairn.rows.routing import INITIAL, INPUT, KEY_GROUP, KIND, PART, TICK, check_order_by, flat_columns, key_columns
from cairn.rows.row_order import MASK_BITS, find_unordered_type
from cairn.rows.sort_rows import SORT_BYTES, cut_by_part, sorted_batches
from state_backend.formats.arrow_columns import Int64s, valid_rows
from state_backend.values.frozen import frozen


@frozen
class Columns:
    """Columns of the input or of the initial state."""

    names: tuple[str, ...]
    key: tuple[int, ...]  # Positions of the key columns in `names`.
    order: tuple[int, ...]  # Positions of the other columns, in the order in which rows are sorted by them.


@frozen
class Arrangement:
    """Order and layout of a shard's rows. The driver sends it to the workers."""

    input: Columns
    # The columns of the initial state; None if the interval has no initial state.
    initial: Columns | None
    # Number of key groups, if the rows are of several intervals (`routing.route_together`). None: of one interval.
    groups_each: int | None = None

    def arrange(
        self,
        batches: Iterable[pa.RecordBatch],
        spill: Callable[[], AbstractContextManager[Path]],
        most_bytes: int = SORT_BYTES,
    ) -> Iterator[pa.RecordBatch]:
        """Yield the shard's rows in order, in the layout that a job reads.

        If the first batch has a tick, yield the tick before reading other batches. `spill`: Makes a folder for sorted
        rows beyond `most_bytes` of memory.
        """
        ticks: list[pa.RecordBatch] = []
        rows = self._without_ticks(batches, ticks)
        first = next(rows, None)
        sorted_rows = sorted_batches(
            (batch for batch in chain([] if first is None else [first], rows) if batch.num_rows),
            self._sort_columns,
            spill,
            most_bytes=most_bytes,
        )
        if self.groups_each is not None:
            sorted_rows = cut_by_part(sorted_rows, self._numbers)
        head = [] if ticks else [batch for batch in [next(sorted_rows, None)] if batch is not None]
        given = len(ticks)
        yield from map(self._laid_out, ticks[:given])
        yield from map(self._laid_out, chain(head, sorted_rows))
        # A shard has exactly one tick. More ticks mean that Spark has placed rows of other shards here too. Yield them,
        # because the shard's job counts the ticks and raises an error for two.
        yield from map(self._laid_out, ticks[given:])

    def _without_ticks(
        self, batches: Iterable[pa.RecordBatch], ticks: list[pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            is_tick = batch.column(KIND).to_numpy() == TICK
            some = batch
            if is_tick.any():
                ticks.append(batch.filter(pa.array(is_tick)))
                some = batch.filter(pa.array(~is_tick))
            if self.groups_each is not None and some.num_rows:
                some = _numbered(some, self.groups_each)
            yield some.drop_columns([PART])

    def _numbers(self, rows: pa.RecordBatch) -> Int64s:
        assert self.groups_each is not None
        numbers: Int64s = rows.column(KEY_GROUP).to_numpy().astype(np.int64) // self.groups_each
        return numbers

    def _sort_columns(self, rows: pa.RecordBatch) -> Iterator[pa.Array]:
        yield rows.column(KEY_GROUP)
        yield from self._keys(rows)
        if self.initial is not None:
            yield rows.column(KIND)
        for kind, columns in self._by_kind:
            flat = _flat(rows, kind, columns)
            yield from (flat[at] for at in columns.order)
        for kind, columns in self._by_kind:
            floats = [column for column in _flat(rows, kind, columns) if pa.types.is_floating(column.type)]
            yield from (_zero_signs(floats[at : at + MASK_BITS]) for at in range(0, len(floats), MASK_BITS))

    @property
    def _by_kind(self) -> list[tuple[int, Columns]]:
        return [(INPUT, self.input), *([(INITIAL, self.initial)] if self.initial is not None else [])]

    def _keys(self, rows: pa.RecordBatch) -> list[pa.Array]:
        keys = [_flat(rows, INPUT, self.input)[at] for at in self.input.key]
        if self.initial is None:
            return keys
        is_initial = pa.array(rows.column(KIND).to_numpy() == INITIAL)
        others = [_flat(rows, INITIAL, self.initial)[at] for at in self.initial.key]
        return [pc.if_else(is_initial, other, key) for other, key in zip(others, keys, strict=True)]

    def _laid_out(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        count = rows.num_rows
        parts = rows.column(PART) if PART in rows.schema.names else pa.nulls(count, pa.binary())
        found = {KEY_GROUP: rows.column(KEY_GROUP), PART: parts, KIND: rows.column(KIND)}
        found |= dict(zip(key_columns(len(self.input.key)), map(_normalise, self._keys(rows)), strict=True))
        for kind, columns in self._by_kind:
            others = None if self.initial is None else pa.array(rows.column(KIND).to_numpy() != kind)
            flat = [*map(one_nan, _flat(rows, kind, columns))]
            name = "__input" if kind == INPUT else "__initial"
            found[name] = pa.StructArray.from_arrays(flat, names=list(columns.names), mask=others)
        return pa.RecordBatch.from_pydict(found)


def plan_arrangement(
    rows: StructType,
    initial: StructType | None,
    *,
    key: Sequence[str],
    initial_key: Sequence[str],
    order_by: Sequence[str],
    groups_each: int | None = None,
) -> Arrangement | None:
    """Plan how a shard's task sorts rows of these schemas; None if only Spark can sort them."""
    check_order_by(order_by, rows)
    schemas = [rows, *([initial] if initial is not None else [])]
    if any(isinstance(f.dataType, _NESTED) or find_unordered_type(f.dataType) is not None for s in schemas for f in s):
        return None
    return Arrangement(
        input=_columns(rows.names, key, order_by),
        initial=None if initial is None else _columns(initial.names, initial_key or key, ()),
        groups_each=groups_each,
    )


_NESTED = (ArrayType, StructType)


def _columns(names: Sequence[str], key: Sequence[str], order_by: Sequence[str]) -> Columns:
    return Columns(
        names=tuple(names),
        key=tuple(map(names.index, key)),
        order=tuple(names.index(name) for name in dict.fromkeys([*order_by, *names]) if name not in key),
    )


def _flat(rows: pa.RecordBatch, kind: int, columns: Columns) -> list[pa.Array]:
    return [rows.column(name) for name in flat_columns(kind, len(columns.names))]


def _numbered(rows: pa.RecordBatch, groups_each: int) -> pa.RecordBatch:
    """Add n * `groups_each` to the key groups of the rows of interval n, counted from 0.

    So a sort by key group puts the rows of each interval before the rows of the next one.
    """
    parts = rows.column(PART).dictionary_encode()
    numbers = np.array([int.from_bytes(part) for part in parts.dictionary.to_pylist()], np.int32)
    groups = rows.column(KEY_GROUP).to_numpy() + numbers[parts.indices.to_numpy()] * groups_each
    at = rows.schema.get_field_index(KEY_GROUP)
    return rows.set_column(at, KEY_GROUP, pa.array(groups, pa.int32()))


def _zero_signs(floats: Sequence[pa.Array]) -> pa.Array:
    """Return a bit mask for each row, from at most 62 columns: bit n is set if the value in column n is -0.0."""
    mask = np.zeros(len(floats[0]), np.int64)
    for bit, column in enumerate(floats):
        numbers = column.to_numpy(zero_copy_only=False)
        mask |= ((numbers == 0) & np.signbit(numbers) & valid_rows(column)).astype(np.int64) << bit
    return pa.array(mask)


def one_nan(column: pa.Array) -> pa.Array:
    """Replace every NaN by the same NaN.

    Files may hold NaN with and without a sign. Every sort treats both as equal, but they would differ in stored state.
    """
    if not pa.types.is_floating(column.type):
        return column
    return pc.if_else(pc.is_nan(column), pa.scalar(float("nan"), column.type), column)


def _normalise(column: pa.Array) -> pa.Array:
    """Replace -0.0 by 0.0 and every NaN by one NaN in a key column."""
    return pc.add(one_nan(column), pa.scalar(0.0, column.type)) if pa.types.is_floating(column.type) else column
