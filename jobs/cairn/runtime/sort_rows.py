"""Rows of one shard in a total order, in bounded memory, by columns of Arrow.

The rows are sorted by one column after the other, and each further column is looked at for rows only that all before it leave equal.
A column becomes one or more passes of whole numbers that sort as its values do:

    type                                  passes                             order
    boolean, integers, dates, times       the number                         by value
    float, double                         its bits, so turned that they sort by value; 0.0 equals -0.0; NaN last, all equal
    decimal                               upper half, lower half             by value
    string, binary                        eight bytes, eight more, its size or rank     by bytes
    any, with nulls                       whether it is there, first         nulls first

What exceeds ``most_bytes`` is sorted in runs, each a file of Arrow's IPC format in the task's folder. Of each run the
next rows are read, all sorted together, and put out up to the first row behind which a run has more than was read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from state_backend.formats.arrow_columns import binary_views, valid_rows

MIB = 1024 * 1024
# What one shard's rows may take before they are written to a run. They are held once as they came and once in one piece.
SORT_BYTES = 64 * MIB
# As many rows as Spark puts into a batch; fewer where they are large.
BATCH_ROWS, BATCH_BYTES = 10_000, 16 * MIB
# A run is read by pieces of this size, at least one at a time of each.
_PIECE_OF_RUN_BYTES = MIB // 4

Positions = npt.NDArray[np.int64]
# The columns to sort by, the most significant first, made when they are asked for.
SortColumns = Callable[[pa.RecordBatch], Iterable[pa.Array]]
_Pass = Callable[[Positions], npt.NDArray[Any]]
_PIECE_BYTES, _PIECES = 8, 2


def sorted_batches(
    batches: Iterable[pa.RecordBatch],
    columns_of: SortColumns,
    spill: Callable[[], AbstractContextManager[Path]],
    *,
    most_bytes: int = SORT_BYTES,
    batch_rows: int = BATCH_ROWS,
) -> Iterator[pa.RecordBatch]:
    """All rows, sorted. How they are cut into batches depends on the rows alone, not on how they came.

    spill: a folder for the runs, asked for once ``most_bytes`` are exceeded, and left when the last batch was taken.
    """
    held: list[pa.RecordBatch] = []
    runs: list[Path] = []
    held_bytes = rows = row_bytes = 0
    with ExitStack() as stack:
        for batch in batches:
            held.append(batch)
            held_bytes += batch.nbytes
            rows += batch.num_rows
            row_bytes += _value_bytes(batch)
            if held_bytes >= most_bytes:
                folder = stack.enter_context(spill()) if not runs else runs[0].parent
                runs.append(folder / f"run-{len(runs)}.arrow")
                _write_run(runs[-1], _in_order(held, columns_of, _rows_in(_PIECE_OF_RUN_BYTES, rows, row_bytes)))
                held_bytes = 0
        if not rows:
            return
        batch_rows = min(batch_rows, _rows_in(BATCH_BYTES, rows, row_bytes))
        if not runs:
            yield from _in_order(held, columns_of, batch_rows)
            return
        if held:
            runs.append(runs[0].parent / f"run-{len(runs)}.arrow")
            _write_run(runs[-1], _in_order(held, columns_of, _rows_in(_PIECE_OF_RUN_BYTES, rows, row_bytes)))
        opened = [_Run(stack.enter_context(pa.OSFile(str(run)))) for run in runs]
        # What is looked at is copied into one piece, and once more when it is put in order.
        rows_ahead = _rows_in(most_bytes // (4 * len(runs)), rows, row_bytes)
        yield from _cut(_merged(opened, columns_of, rows_ahead), batch_rows)


def total_order(columns: Iterable[pa.Array], count: int) -> Positions:
    """Positions of the rows in the order of the columns, the first one most significant. Rows that are equal in all may change places."""
    order = np.arange(count)
    # Positions in `order` whose rows are equal so far, and the group of equal ones that each belongs to, ascending.
    tied, group = order.copy(), np.zeros(count, np.int64)
    for values_of in chain.from_iterable(map(_passes, columns)):
        if not len(tied):
            break
        rows = order[tied]
        values = values_of(rows)
        at = _sorted_within(group, values)
        order[tied], values = rows[at], values[at]
        begins = np.empty(len(tied) + 1, bool)
        begins[0] = begins[-1] = True
        np.not_equal(values[1:], values[:-1], out=begins[1:-1])
        begins[1:-1] |= group[1:] != group[:-1]
        kept = ~(begins[:-1] & begins[1:])
        tied, group = tied[kept], np.cumsum(begins[:-1])[kept]
    return order


def _sorted_within(group: Positions, values: npt.NDArray[Any]) -> Positions:
    """Positions in the order of group and value. Groups ascend."""
    low, high = int(values.min()), int(values.max())
    first, last = int(group[0]), int(group[-1])
    bits = (high - low).bit_length()
    if bits + (last - first).bit_length() > 64:
        return np.lexsort((values, group))
    # One number instead of two: less than half the time. Differences are right modulo 2**64.
    packed = values.astype(np.uint64) - np.uint64(low % 2**64)
    if last > first:
        packed |= (group - first).astype(np.uint64) << np.uint64(bits)
    if bits + (last - first).bit_length() <= 16:
        return np.argsort(packed.astype(np.uint16), kind="stable")  # by digits: a fifth of the time
    return np.argsort(packed)


def _passes(column: pa.Array) -> Iterator[_Pass]:
    if column.null_count:
        there = valid_rows(column)
        yield lambda rows: there[rows]
        if column.null_count == len(column):
            return
    kind = column.type
    if pa.types.is_decimal128(kind):
        halves = np.frombuffer(column.buffers()[1], "<i8", 2 * len(column), 16 * column.offset).reshape(-1, 2)
        halves = _zero_where_null(halves, column)
        yield lambda rows: halves[rows, 1]
        yield lambda rows: halves[rows, 0].view(np.uint64)
    elif pa.types.is_floating(kind):
        numbers = _ordered_bits(column)
        yield lambda rows: numbers[rows]
    elif _is_bytes(kind):
        yield from _passes_of_bytes(column.cast(pa.binary()))
    elif not pa.types.is_null(kind):
        numbers = _whole_numbers(column)
        yield lambda rows: numbers[rows]


def _whole_numbers(column: pa.Array) -> npt.NDArray[Any]:
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    size_bytes = column.type.bit_width // 8
    numbers = np.frombuffer(column.buffers()[1], f"<i{size_bytes}", len(column), column.offset * size_bytes)
    return _zero_where_null(numbers, column)


def _ordered_bits(column: pa.Array) -> npt.NDArray[np.int64]:
    """Whole numbers that sort as the floats do: those of negative ones are turned round."""
    numbers = column.cast(pa.float64()).fill_null(0.0).to_numpy() + 0.0  # -0.0 + 0.0 is 0.0
    bits = numbers.view(np.int64)
    bits = np.where(bits < 0, bits ^ np.int64(2**63 - 1), bits)
    return np.where(np.isnan(numbers), np.int64(2**63 - 1), bits)


def _passes_of_bytes(column: pa.Array) -> Iterator[_Pass]:
    offsets, raw = binary_views(column)
    starts, sizes = offsets[:-1].astype(np.int64), _zero_where_null(np.diff(offsets), column)
    # Behind the last value there is nothing to read eight bytes of.
    last = max(len(raw) - _PIECE_BYTES, 0)
    everywhere = np.ndarray((last + 1,), ">u8", raw.data, 0, (1,)) if len(raw) >= _PIECE_BYTES else None

    def piece(number: int) -> _Pass:
        def values(rows: Positions) -> npt.NDArray[Any]:
            begin = starts[rows] + number * _PIECE_BYTES
            left = np.clip(sizes[rows] - number * _PIECE_BYTES, 0, _PIECE_BYTES)
            if everywhere is None:
                return np.array(
                    [int.from_bytes(_padded(raw, b, n)) for b, n in zip(begin, left, strict=True)], np.uint64
                )
            # Where fewer than eight are left to the end of all, an earlier place is read and what comes before is shifted out.
            read = np.minimum(begin, last)
            found = everywhere[read].astype(np.uint64) << (np.minimum(begin - read, 7) * 8).astype(np.uint64)
            unused = ((_PIECE_BYTES - left) * 8).astype(np.uint64)
            # A shift by 64 is none.
            return np.where(left > 0, found >> np.minimum(unused, 63) << np.minimum(unused, 63), np.uint64(0))

        return values

    yield from map(piece, range(_PIECES))

    def rest(rows: Positions) -> npt.NDArray[Any]:
        found = sizes[rows]
        # Equal pieces of equal size are equal.
        if found.max() <= _PIECES * _PIECE_BYTES:
            return found
        ranks: npt.NDArray[Any] = pc.rank(column.take(pa.array(rows)), tiebreaker="dense").to_numpy()
        return ranks

    yield rest


def _padded(raw: npt.NDArray[np.uint8], begin: int, size: int) -> bytes:
    return raw[begin : begin + size].tobytes().ljust(_PIECE_BYTES, b"\0")


def _zero_where_null(values: npt.NDArray[Any], column: pa.Array) -> npt.NDArray[Any]:
    if not column.null_count:
        return values
    values = values.copy()
    values[~valid_rows(column)] = 0
    return values


def _is_bytes(kind: pa.DataType) -> bool:
    is_ = pa.types
    return bool(is_.is_string(kind) or is_.is_large_string(kind) or is_.is_binary(kind) or is_.is_large_binary(kind))


def _value_bytes(batch: pa.RecordBatch) -> int:
    """What the values take: the same however rows are cut into batches."""
    size_bytes = 0
    for column in batch.columns:
        if _is_bytes(column.type):
            size_bytes += 4 * len(column) + (pc.sum(pc.binary_length(column)).as_py() or 0)
        elif not pa.types.is_null(column.type):
            size_bytes += column.type.bit_width * len(column) // 8
    return size_bytes


def _rows_in(size_bytes: int, rows: int, row_bytes: int) -> int:
    """How many of rows take so many bytes; at least one."""
    return max(1, size_bytes * rows // max(row_bytes, 1))


def _in_order(held: list[pa.RecordBatch], columns_of: SortColumns, batch_rows: int) -> Iterator[pa.RecordBatch]:
    """The rows of the batches, sorted. Empties the list, so that they are in memory once."""
    whole = held[0] if len(held) == 1 else pa.concat_batches(held)
    held.clear()
    order = total_order(columns_of(whole), whole.num_rows)
    for start in range(0, len(order), batch_rows):
        yield whole.take(pa.array(order[start : start + batch_rows]))


def _write_run(path: Path, batches: Iterator[pa.RecordBatch]) -> None:
    first = next(batches)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, first.schema) as writer:
        for batch in chain([first], batches):
            writer.write_batch(batch)


class _Run:
    """A run that is read as rows are asked for."""

    def __init__(self, file: pa.NativeFile) -> None:
        self._file = pa.ipc.open_file(file)
        self._read = 0
        self.rows = self._file.schema.empty_table()

    def look(self, count: int) -> None:
        """Makes ``rows`` at least as many, if there are so many left."""
        while self.rows.num_rows < count and not self.is_read:
            piece = self._file.get_batch(self._read)
            self.rows = pa.concat_tables([self.rows, pa.Table.from_batches([piece])])
            self._read += 1

    @property
    def is_read(self) -> bool:
        """Whether nothing lies behind ``rows``."""
        return bool(self._read == self._file.num_record_batches)


def _merged(runs: Sequence[_Run], columns_of: SortColumns, rows_ahead: int) -> Iterator[pa.RecordBatch]:
    """The rows of sorted runs, sorted. ``rows_ahead``: how many rows of each are looked at, at least."""
    while True:
        for run in runs:
            run.look(rows_ahead)
        runs = [run for run in runs if run.rows.num_rows]
        if not runs:
            return
        counts = np.array([run.rows.num_rows for run in runs])
        pool = pa.concat_tables([run.rows for run in runs]).combine_chunks().to_batches()[0]
        order = total_order(columns_of(pool), pool.num_rows)
        # Behind these rows there are more, which may come before what follows these in the pool.
        is_last = np.zeros(pool.num_rows, bool)
        is_last[(np.cumsum(counts) - 1)[[not run.is_read for run in runs]]] = True
        lasts = np.flatnonzero(is_last[order])
        if len(lasts):
            order = order[: lasts[0] + 1]
        taken = np.bincount(np.repeat(np.arange(len(runs)), counts)[order], minlength=len(runs))
        for run, count in zip(runs, taken.tolist(), strict=True):
            run.rows = run.rows.slice(count)
        yield pool.take(pa.array(order))


def _cut(batches: Iterator[pa.RecordBatch], batch_rows: int) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of ``batch_rows``; the last one may have fewer."""
    held: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        held.append(batch)
        rows += batch.num_rows
        if rows < batch_rows:
            continue
        whole = held[0] if len(held) == 1 else pa.concat_batches(held)
        cut = rows - rows % batch_rows
        for start in range(0, cut, batch_rows):
            yield whole[start : start + batch_rows]
        held, rows = ([whole[cut:]], rows - cut) if cut < rows else ([], 0)
    if held:
        yield pa.concat_batches(held)
