"""Compare two Arrow tables: rows that only one table has, rows that changed, and changes by column. Pure functions.

If the caller names key columns, rows with the same key are compared field by field. Without key columns, and where
several rows of a table have the same key, two rows match only if all their fields are equal. Null equals null, and NaN
equals NaN. The order of rows does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from state_backend.inspection.describe import plain
from state_backend.values.errors import UsageError
from state_backend.values.frozen import frozen

# A numpy array of whole numbers, one for each row.
Numbers = Any


@frozen
class ColumnChange:
    """Changes of one column, counted over the keys that each table has in exactly one row."""

    name: str
    changed: int
    # The mean absolute difference of numbers, or of times in seconds; None if the column has no such values.
    mean: float | None = None
    # The largest absolute difference; None as for `mean`.
    largest: float | None = None


@frozen
class TableDifference:
    old: pa.Table
    new: pa.Table
    # The key columns; empty: rows match only as a whole.
    key: tuple[str, ...]
    # Positions of rows that only one side has; pairs of positions of rows with the same key and other values.
    only_old: Numbers
    only_new: Numbers
    changed: Numbers
    repeated: int  # number of keys that one side has in several rows
    columns: tuple[ColumnChange, ...]
    added: tuple[str, ...]  # columns
    removed: tuple[str, ...]
    retyped: tuple[str, ...]

    @property
    def same(self) -> bool:
        columns = self.added or self.removed or self.retyped
        return not (columns or len(self.only_old) or len(self.only_new) or len(self.changed))

    def examples(self, limit: int) -> list[dict[str, Any]]:
        """Return some differing rows as JSON values, at most `limit` of each kind.

        Changed rows come first, with only the columns that differ.
        """
        found = []
        names = [c.name for c in self.columns if c.changed]
        for position, other in self.changed[:limit]:
            before, after = _row(self.old, position), _row(self.new, other)
            columns = {n: [before[n], after[n]] for n in names if repr(before[n]) != repr(after[n])}
            found.append({"change": "changed", "key": {k: before[k] for k in self.key}, "columns": columns})
        for change, table, positions in (("only_old", self.old, self.only_old), ("only_new", self.new, self.only_new)):
            found += [{"change": change, "row": _row(table, n)} for n in positions[:limit]]
        return found

    def rows(self) -> pa.Table:
        """Return all differing rows as a table.

        The column `change` holds `changed`, `only_old` or `only_new`. The columns `old` and `new` hold the row of each
        table as a struct; null if the table has no such row.
        """
        none_old, none_new = (pa.array([None] * n, pa.int64()) for n in (len(self.only_new), len(self.only_old)))
        taken = pa.chunked_array(
            [pa.array(self.changed[:, 0], pa.int64()), pa.array(self.only_old, pa.int64()), none_old]
        )
        given = pa.chunked_array(
            [pa.array(self.changed[:, 1], pa.int64()), none_new, pa.array(self.only_new, pa.int64())]
        )
        kinds = np.repeat(
            ["changed", "only_old", "only_new"], [len(self.changed), len(self.only_old), len(self.only_new)]
        )
        sides = [_structs(table, positions) for table, positions in ((self.old, taken), (self.new, given))]
        return pa.table({"change": pa.array(kinds.tolist(), pa.string()), "old": sides[0], "new": sides[1]})


def compare_tables(old: pa.Table, new: pa.Table, key: Sequence[str] = ()) -> TableDifference:
    """Compare two tables, in any order of rows. `key`: columns that identify a row; without, whole rows are matched."""
    common = [name for name in old.column_names if name in new.column_names]
    missing = [name for name in key if name not in common]
    if missing:
        raise UsageError(
            f"the key column {missing[0]!r} is not in the output of both sides\nColumns of both: {', '.join(common) or 'none of them'}"
        )
    codes = {name: codes_of(old.column(name), new.column(name)) for name in common}
    whole = combine_codes([codes[name] for name in common], old.num_rows, new.num_rows)
    # For each row: True if no row of the other table is its partner by key. These rows are matched as a whole below.
    alone = np.ones(old.num_rows, bool), np.ones(new.num_rows, bool)
    pairs, repeated = np.empty((0, 2), np.int64), 0
    if key:
        by_key = combine_codes([codes[name] for name in key], old.num_rows, new.num_rows)
        pairs, repeated = _pairs(*by_key)
        alone[0][pairs[:, 0]] = alone[1][pairs[:, 1]] = False
    only_old, only_new = _find_unmatched(*(np.where(side, c, -1) for side, c in zip(alone, whole, strict=True)))
    changed = pairs[whole[0][pairs[:, 0]] != whole[1][pairs[:, 1]]]
    columns = [_column(name, codes[name], old, new, changed) for name in common if name not in key]
    return TableDifference(
        old=old,
        new=new,
        key=tuple(key),
        only_old=only_old,
        only_new=only_new,
        changed=changed,
        repeated=repeated,
        columns=tuple(c for c in columns if c.changed),
        added=tuple(n for n in new.column_names if n not in common),
        removed=tuple(n for n in old.column_names if n not in common),
        retyped=tuple(n for n in common if old.column(n).type != new.column(n).type),
    )


def codes_of(old: pa.ChunkedArray, new: pa.ChunkedArray) -> tuple[Numbers, Numbers]:
    """Return a code for each value of both columns: two codes are equal if and only if the values are equal."""
    try:
        if old.type != new.type:
            fields = [pa.schema([pa.field("v", c.type)]) for c in (old, new)]
            wanted = pa.unify_schemas(fields, promote_options="permissive").field("v").type
            old, new = old.cast(wanted), new.cast(wanted)
        both = pa.chunked_array([*old.chunks, *new.chunks], old.type).combine_chunks()
        numbers = pc.dictionary_encode(both, null_encoding="encode").indices.to_numpy(zero_copy_only=False)
    # Arrow can't encode lists and structs as a dictionary, and can't convert some types into each other.
    except pa.ArrowException:
        known: dict[str, int] = {}
        values = [*old.to_pylist(), *new.to_pylist()]
        numbers = np.fromiter((known.setdefault(repr(v), len(known)) for v in values), np.int64, len(values))
    numbers = numbers.astype(np.int64)
    return numbers[: len(old)], numbers[len(old) :]


def combine_codes(codes: Sequence[tuple[Numbers, Numbers]], old_rows: int, new_rows: int) -> tuple[Numbers, Numbers]:
    """Return a code for each row of both tables. Rows have equal codes if their codes are equal in every column."""
    made = np.zeros(old_rows + new_rows, np.int64)
    for old, new in codes:
        both = np.concatenate([old, new])
        numbers = pa.array(made * (both.max(initial=0) + 1) + both).dictionary_encode().indices
        made = numbers.to_numpy().astype(np.int64)
    return made[:old_rows], made[old_rows:]


def _pairs(old: Numbers, new: Numbers) -> tuple[Numbers, int]:
    """Return (row in `old`, row in `new`) of each key that both have once, and how many keys one of them repeats."""
    size = max(old.max(initial=-1), new.max(initial=-1)) + 1
    counts = np.bincount(old, minlength=size), np.bincount(new, minlength=size)
    position = np.zeros(size, np.int64)
    position[new] = np.arange(len(new))
    first = np.flatnonzero((counts[0][old] == 1) & (counts[1][old] == 1))
    return np.stack([first, position[old[first]]], axis=1), int(np.sum((counts[0] > 1) | (counts[1] > 1)))


def _find_unmatched(old: Numbers, new: Numbers) -> tuple[Numbers, Numbers]:
    """Return, for each side, the positions of rows without an equal row on the other side. Skip rows of code -1.

    Each row matches at most one row, so of three equal rows on one side and two on the other, one is returned.
    """
    size = max(old.max(initial=-1), new.max(initial=-1)) + 1
    counts = [np.bincount(side[side >= 0], minlength=size) for side in (old, new)]
    return tuple(  # type: ignore[return-value]
        np.flatnonzero((side >= 0) & (_rank(side) >= other[side])) if size else np.empty(0, np.int64)
        for side, other in ((old, counts[1]), (new, counts[0]))
    )


def _rank(codes: Numbers) -> Numbers:
    """Return for each row the number of earlier rows with the same code. Equal rows have the same code (`codes_of`)."""
    order = np.argsort(codes, kind="stable")
    ordered = codes[order]
    begins = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]]) if len(codes) else np.empty(0, np.int64)
    ranks = np.empty(len(codes), np.int64)
    ranks[order] = np.arange(len(codes)) - np.repeat(begins, np.diff(np.r_[begins, len(codes)]))
    return ranks


def _column(name: str, codes: tuple[Numbers, Numbers], old: pa.Table, new: pa.Table, changed: Numbers) -> ColumnChange:
    moved = changed[codes[0][changed[:, 0]] != codes[1][changed[:, 1]]]
    if not len(moved):
        return ColumnChange(name=name, changed=0)
    sides = [_as_numbers(table.column(name).take(moved[:, n])) for n, table in enumerate((old, new))]
    if sides[0] is None or sides[1] is None:
        return ColumnChange(name=name, changed=len(moved))
    by = np.abs(sides[1] - sides[0])
    by = by[np.isfinite(by)]
    if not len(by):
        return ColumnChange(name=name, changed=len(moved))
    return ColumnChange(name=name, changed=len(moved), mean=float(by.mean()), largest=float(by.max()))


def _as_numbers(column: pa.ChunkedArray) -> Numbers | None:
    """Return a column as 64-bit floats, times in seconds and nulls as NaN; None if the column has another type."""
    kind = column.type
    if pa.types.is_timestamp(kind):
        column = column.cast(pa.timestamp("us", kind.tz), safe=False).cast(pa.int64())
    elif pa.types.is_date(kind):
        column = column.cast(pa.date32()).cast(pa.int32())
    elif not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)):
        return None
    scale = 1e-6 if pa.types.is_timestamp(kind) else 86_400.0 if pa.types.is_date(kind) else 1.0
    return column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False) * scale


def _structs(table: pa.Table, positions: pa.ChunkedArray) -> pa.Array:
    """Return the rows at the positions as structs; null for a null position."""
    positions = positions.combine_chunks()
    columns = [c.take(positions).combine_chunks() for c in table.columns]
    absent = pc.is_null(positions)
    return pa.StructArray.from_arrays(columns, fields=[f.with_nullable(True) for f in table.schema], mask=absent)


def _row(table: pa.Table, position: int) -> dict[str, Any]:
    found: dict[str, Any] = plain(table.slice(int(position), 1).to_pylist()[0])
    return found
