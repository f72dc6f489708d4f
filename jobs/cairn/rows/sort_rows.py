"""Sort the rows of one shard by Arrow columns, in bounded memory.

The rows are sorted by one column after the other. Each further column is read only for rows that are equal in all
earlier columns. A column is turned into one or more passes. Each pass is an array of integers, and all passes together
sort as the column's values do:

    type                                  passes                                        order
    boolean, integers, dates, times       the number                                    by value
    float, double                         its bits, negative numbers inverted           by value, NaN last
    decimal                               upper half, lower half                        by value
    string, binary                        bytes 1-8, bytes 9-16, size or rank           by bytes
    any, with nulls                       first a pass that marks nulls                 nulls first

0.0 equals -0.0, and all NaN are equal. The last pass of strings is their size if no value has more than 16 bytes, and
else the rank of the whole value among the rows that are still tied.

If the rows exceed `most_bytes`, they are sorted in runs. Each run is an Arrow IPC file in the task's folder. A merge
reads the next rows of each run and sorts them together. It yields them up to the first row that an unread row may
precede. If there are too many runs for the memory, a few runs at a time are first merged into a longer run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from itertools import chain, groupby, pairwise
from operator import itemgetter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from state_backend.formats.arrow_columns import Array, Int64s, binary_views, one_batch, valid_rows

MIB = 1024 * 1024
# The most bytes of a shard's rows in memory before they are written to a run. Memory holds the rows twice: as the
# incoming batches, and as one concatenated batch.
SORT_BYTES = 64 * MIB
# The most rows and the most bytes of a batch. Spark's batches also have 10,000 rows.
BATCH_ROWS, BATCH_BYTES = 10_000, 16 * MIB
# A run is written and read in pieces of this size, which have at least one row.
_PIECE_OF_RUN_BYTES = MIB // 4
# At least this many runs are merged at once, however large the rows are.
_LEAST_MERGED = 2

Positions = Int64s
# A function from a batch to its sort columns, the most significant first. Columns are computed only when the sort needs
# them.
SortColumns = Callable[[pa.RecordBatch], Iterable[pa.Array]]
_Pass = Callable[[Positions], Array]
_PIECE_BYTES, _PIECES = 8, 2


def sorted_batches(
    batches: Iterable[pa.RecordBatch],
    columns_of: SortColumns,
    spill: Callable[[], AbstractContextManager[Path]],
    *,
    most_bytes: int = SORT_BYTES,
    batch_rows: int = BATCH_ROWS,
) -> Iterator[pa.RecordBatch]:
    """Yield all rows of `batches`, sorted. `spill`: Makes a folder for runs, if the rows exceed `most_bytes`.

    The sizes of the yielded batches depend on the rows alone, not on the incoming batches.
    """
    held: list[pa.RecordBatch] = []
    runs: list[_Written] = []
    held_bytes = 0
    with ExitStack() as stack:
        for batch in batches:
            held.append(batch)
            held_bytes += batch.nbytes
            if held_bytes >= most_bytes:
                if not runs:
                    folder = stack.enter_context(spill())
                runs.append(_write_run(folder, len(runs), _in_order(held, columns_of, _PIECE_OF_RUN)))
                held_bytes = 0
        cut = _Cut(rows=batch_rows, size_bytes=BATCH_BYTES)
        if not runs:
            if held:
                yield from _in_order(held, columns_of, cut)
            return
        written = len(runs)
        if held:
            runs.append(_write_run(folder, written, _in_order(held, columns_of, _PIECE_OF_RUN)))
            written += 1
        at_once = max(_LEAST_MERGED, most_bytes // (4 * max(run.piece_bytes for run in runs)))
        while len(runs) > at_once:
            merged = _merge(runs[:at_once], columns_of, most_bytes)
            longer = _write_run(folder, written, _even(merged, _PIECE_OF_RUN))
            for run in runs[:at_once]:
                run.path.unlink()
            runs, written = [*runs[at_once:], longer], written + 1
        yield from _even(_merge(runs, columns_of, most_bytes), cut)


def cut_by_part(
    batches: Iterable[pa.RecordBatch], part_of: Callable[[pa.RecordBatch], Int64s]
) -> Iterator[pa.RecordBatch]:
    """Yield sorted rows in batches as `sorted_batches` does, but no batch has rows of two parts, such as intervals.

    `part_of`: Function that returns the part's number for each row of a batch. The rows must be sorted by part first.
    """
    cut = _Cut(rows=BATCH_ROWS, size_bytes=BATCH_BYTES)
    for _, slices in groupby(_slices(batches, part_of), key=itemgetter(0)):
        yield from _even((rows for _, rows in slices), cut)


def _slices(
    batches: Iterable[pa.RecordBatch], part_of: Callable[[pa.RecordBatch], Int64s]
) -> Iterator[tuple[int, pa.RecordBatch]]:
    for batch in batches:
        parts = part_of(batch)
        begins = [0, *(np.flatnonzero(parts[1:] != parts[:-1]) + 1).tolist(), batch.num_rows]
        yield from ((int(parts[begin]), batch[begin:end]) for begin, end in pairwise(begins))


def total_order(columns: Iterable[pa.Array], count: int) -> Positions:
    """Return the positions of the rows in the order of the columns, the most significant first.

    Rows that are equal in all columns may change places.
    """
    order = np.arange(count)
    # `tied` are the positions in `order` whose rows equal a neighbour in all columns so far. `group` numbers the groups
    # of such equal rows, ascending.
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


def _sorted_within(group: Positions, values: Array) -> Positions:
    """Return the positions that sort the rows by `group`, then by `values`. `group` is ascending."""
    low, high = int(values.min()), int(values.max())
    first, last = int(group[0]), int(group[-1])
    bits = (high - low).bit_length()
    if bits + (last - first).bit_length() > 64:
        return np.lexsort((values, group))
    # Pack group and value into one number, which sorts in less than half the time. The differences of unsigned numbers
    # are right, because they are computed modulo 2**64.
    packed = values.astype(np.uint64) - np.uint64(low % 2**64)
    if last > first:
        packed |= (group - first).astype(np.uint64) << np.uint64(bits)
    if bits + (last - first).bit_length() <= 16:
        # NumPy sorts 16 bits by radix, in a fifth of the time.
        return np.argsort(packed.astype(np.uint16), kind="stable")
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
        column = column.cast(pa.uint8()) if pa.types.is_boolean(kind) else column
        size_bytes = column.type.bit_width // 8
        numbers = np.frombuffer(column.buffers()[1], f"<i{size_bytes}", len(column), column.offset * size_bytes)
        numbers = _zero_where_null(numbers, column)
        yield lambda rows: numbers[rows]


def _ordered_bits(column: pa.Array) -> Int64s:
    """Return an integer for each float of a column, so that the integers sort as the floats do.

    The integer has the float's 64 bits. For a negative float, all bits except the sign bit are inverted. -0.0 and 0.0
    get the same integer, and NaN gets the largest. Null gets the integer of 0.0.
    """
    numbers = column.cast(pa.float64()).fill_null(0.0).to_numpy() + 0.0  # -0.0 + 0.0 is 0.0
    bits = numbers.view(np.int64)
    bits = np.where(bits < 0, bits ^ np.int64(2**63 - 1), bits)
    return np.where(np.isnan(numbers), np.int64(2**63 - 1), bits)


def _passes_of_bytes(column: pa.Array) -> Iterator[_Pass]:
    offsets, raw = binary_views(column)
    starts, sizes = offsets[:-1].astype(np.int64), _zero_where_null(np.diff(offsets), column)
    # The last offset from which eight bytes can be read.
    last = max(len(raw) - _PIECE_BYTES, 0)
    everywhere = np.ndarray((last + 1,), ">u8", raw.data, 0, (1,)) if len(raw) >= _PIECE_BYTES else None

    def piece(number: int) -> _Pass:
        def values(rows: Positions) -> Array:
            begin = starts[rows] + number * _PIECE_BYTES
            left = np.clip(sizes[rows] - number * _PIECE_BYTES, 0, _PIECE_BYTES)
            if everywhere is None:
                pieces = [raw[b : b + n].tobytes() for b, n in zip(begin, left, strict=True)]
                return np.array([int.from_bytes(p.ljust(_PIECE_BYTES, b"\0")) for p in pieces], np.uint64)
            # Near the end of the data, eight bytes can't be read from `begin`. So they are read from an earlier offset,
            # and the bytes before the value are shifted out.
            read = np.minimum(begin, last)
            found = everywhere[read].astype(np.uint64) << (np.minimum(begin - read, 7) * 8).astype(np.uint64)
            unused = ((_PIECE_BYTES - left) * 8).astype(np.uint64)
            # Shift by at most 63 bits, because a shift by 64 bits is undefined. Values without a byte left get 0.
            return np.where(left > 0, found >> np.minimum(unused, 63) << np.minimum(unused, 63), np.uint64(0))

        return values

    yield from map(piece, range(_PIECES))

    def rest(rows: Positions) -> Array:
        found = sizes[rows]
        # The passes before this one compared the first 16 bytes of each value, and padded shorter values with zero
        # bytes. Tied values of at most 16 bytes differ only in the number of zero bytes at their end. So their sizes
        # give the order: b"a" comes before b"a\0".
        if found.max() <= _PIECES * _PIECE_BYTES:
            return found
        ranks: Array = pc.rank(column.take(pa.array(rows)), tiebreaker="dense").to_numpy()
        return ranks

    yield rest


def _zero_where_null(values: Array, column: pa.Array) -> Array:
    if not column.null_count:
        return values
    values = values.copy()
    values[~valid_rows(column)] = 0
    return values


def _is_bytes(kind: pa.DataType) -> bool:
    is_ = pa.types
    return bool(is_.is_string(kind) or is_.is_large_string(kind) or is_.is_binary(kind) or is_.is_large_binary(kind))


def _row_bytes(batch: pa.RecordBatch) -> Int64s:
    """Return the size in bytes of each row's values.

    A row has the same size in every batch, so that the boundaries of the sorted batches do not depend on the input's
    batches.
    """
    sizes = np.zeros(batch.num_rows, np.int64)
    for column in batch.columns:
        if _is_bytes(column.type):
            sizes += 4 + pc.fill_null(pc.binary_length(column), 0).to_numpy(zero_copy_only=False)
        elif not pa.types.is_null(column.type):
            sizes += -(-column.type.bit_width // 8)
    return sizes


@dataclass(frozen=True, slots=True)
class _Cut:
    """The size limit of a batch: at most `rows` rows and `size_bytes` bytes, but at least one row."""

    rows: int
    size_bytes: int

    def end(self, ends_bytes: Int64s, start: int, rows: int = 0, size_bytes: int = 0) -> int | None:
        """Return the position where a batch that begins at `start` ends; None if it has room after the last row.

        A batch is full when it has `self.rows` rows, or when the next row would exceed `self.size_bytes`. `rows` and
        `size_bytes`: What the batch already holds. `ends_bytes`: Sizes of the rows, added up.
        """
        before = int(ends_bytes[start - 1]) if start else 0
        most = before + self.size_bytes - size_bytes
        fitting = start + int(np.searchsorted(ends_bytes[start:], most, side="right"))
        full = start + self.rows - rows
        end = min(max(fitting, start + (rows == 0)), full)
        return end if end < len(ends_bytes) or end == full else None


_PIECE_OF_RUN = _Cut(rows=1 << 31, size_bytes=_PIECE_OF_RUN_BYTES)
_TAKEN_AT_ONCE = _Cut(rows=1 << 31, size_bytes=BATCH_BYTES)


def _in_order(held: list[pa.RecordBatch], columns_of: SortColumns, cut: _Cut) -> Iterator[pa.RecordBatch]:
    """Yield the rows of `held`, sorted, in batches of the size that `cut` allows.

    The function empties the list `held`, so that memory holds the rows only once.
    """
    whole = one_batch(held)
    held.clear()
    yield from _cut(whole, total_order(columns_of(whole), whole.num_rows), cut)


def _cut(rows: pa.RecordBatch, order: Positions, cut: _Cut) -> Iterator[pa.RecordBatch]:
    """Yield the rows in the order of the positions in `order`, in batches of the size that `cut` allows."""
    ends_bytes = np.cumsum(_row_bytes(rows)[order])
    start = 0
    while start < len(order):
        end = cut.end(ends_bytes, start) or len(order)
        yield rows.take(pa.array(order[start:end]))
        start = end


@dataclass(frozen=True, slots=True)
class _Written:
    """A sorted run on disk: an Arrow IPC file."""

    path: Path
    # The bytes that the largest record batch of the file takes in memory. A merge reads one record batch at a time.
    piece_bytes: int


def _write_run(folder: Path, number: int, batches: Iterator[pa.RecordBatch]) -> _Written:
    first, path, piece_bytes = next(batches), folder / f"run-{number}.arrow", 1
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, first.schema) as writer:
        for batch in chain([first], batches):
            writer.write_batch(batch)
            piece_bytes = max(piece_bytes, batch.nbytes)
    return _Written(path, piece_bytes)


class _Run:
    """Reader of a sorted run on disk. `rows` holds the rows that were read and not yet yielded."""

    def __init__(self, file: pa.NativeFile) -> None:
        self._file = pa.ipc.open_file(file)
        self._read = 0
        self.rows = self._file.schema.empty_table()

    def look(self, size_bytes: int) -> None:
        """Read the next pieces of the run until `rows` has at least `size_bytes` bytes, or the run ends."""
        while self.rows.nbytes < size_bytes and not self.is_read:
            piece = self._file.get_batch(self._read)
            self.rows = pa.concat_tables([self.rows, pa.Table.from_batches([piece])])
            self._read += 1

    @property
    def is_read(self) -> bool:
        return bool(self._read == self._file.num_record_batches)


def _merge(written: Sequence[_Written], columns_of: SortColumns, most_bytes: int) -> Iterator[pa.RecordBatch]:
    """Merge sorted runs: yield all their rows in one sorted order."""
    with ExitStack() as stack:
        runs = [_Run(stack.enter_context(pa.OSFile(str(run.path)))) for run in written]
        # The rows that are read ahead take only a quarter of `most_bytes`, divided among the runs. The rest is for the
        # copies that `_first_of` makes: first all these rows in one batch, then the same rows in sorted order.
        ahead_bytes = max(1, most_bytes // (4 * len(runs)))
        while True:
            for run in runs:
                run.look(ahead_bytes)
            runs = [run for run in runs if run.rows.num_rows]
            if not runs:
                return
            yield from _first_of(runs, columns_of)


def _first_of(runs: Sequence[_Run], columns_of: SortColumns) -> Iterator[pa.RecordBatch]:
    """Yield the read rows of all runs in sorted order, up to the first row that an unread row may precede.

    The read rows that are not yielded stay in each run's `rows`.
    """
    counts = np.array([run.rows.num_rows for run in runs])
    pool = pa.concat_tables([run.rows for run in runs]).combine_chunks().to_batches()[0]
    # The runs keep slices of the pool, so that memory holds the rows only once.
    for run, end in zip(runs, np.cumsum(counts).tolist(), strict=True):
        run.rows = pa.Table.from_batches([pool.slice(end - run.rows.num_rows, run.rows.num_rows)])
    order = total_order(columns_of(pool), pool.num_rows)
    # The unread rows of a run sort after its last read row. So only rows up to the smallest of these last rows can be
    # yielded now: an unread row may have to come before a later row. Runs that are read to their end set no limit.
    is_last = np.zeros(pool.num_rows, bool)
    is_last[(np.cumsum(counts) - 1)[[not run.is_read for run in runs]]] = True
    lasts = np.flatnonzero(is_last[order])
    if len(lasts):
        order = order[: lasts[0] + 1]
    taken = np.bincount(np.repeat(np.arange(len(runs)), counts)[order], minlength=len(runs))
    for run, count in zip(runs, taken.tolist(), strict=True):
        run.rows = run.rows.slice(count)
    yield from _cut(pool, order, _TAKEN_AT_ONCE)


def _even(batches: Iterator[pa.RecordBatch], cut: _Cut) -> Iterator[pa.RecordBatch]:
    """Yield the rows, unsorted, in batches of the size that `cut` allows.

    The boundaries depend on the rows alone, not on the sizes of the incoming batches.
    """
    held: list[pa.RecordBatch] = []
    rows = size_bytes = 0
    for batch in batches:
        ends_bytes = np.cumsum(_row_bytes(batch))
        start = 0
        while (end := cut.end(ends_bytes, start, rows, size_bytes)) is not None:
            part = batch[start:end]
            yield one_batch([*held, part])
            held, rows, size_bytes, start = [], 0, 0, end
        if start < batch.num_rows:
            held.append(batch[start:])
            rows += batch.num_rows - start
            size_bytes += int(ends_bytes[-1]) - (int(ends_bytes[start - 1]) if start else 0)
    if held:
        yield one_batch(held)
