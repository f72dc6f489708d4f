"""A digest of rows that depends on their values alone: not on files, order, parallelism or versions of libraries.

The digest of rows is the sum of their hashes modulo 2^64, so digests of parts add up to the digest of the whole. A
row's hash mixes the hashes of its columns in their order, with their names. Equal numbers have equal hashes in every
width, so that a widened column leaves its content as it was.

    integer, date, time, timestamp, interval   the stored number as 64 bits
    float, double                              the bits as a double; every NaN counts as one
    decimal                                    both halves of the unscaled integer, and the scale
    string, binary                             XXH64 of the bytes
    array, struct, map                         the elements with their positions; the fields with their names; the
                                               pairs in any order
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash
from pyarrow import types

from state_backend.formats.hash_columns import Hashes, xxh64

_U64 = np.uint64
_NULL = _U64(0x9E3779B97F4A7C15)


def digest_of(rows: pa.RecordBatch | pa.Table) -> int:
    """Return the digest of rows: an unsigned 64-bit sum, 0 without rows."""
    batches = rows.to_batches() if isinstance(rows, pa.Table) else [rows]
    return sum(int(_of_fields(b.schema, b.columns, b.num_rows).sum(dtype=_U64)) for b in batches) % 2**64


def _of_fields(fields: Iterable[pa.Field], columns: Iterable[pa.Array], count: int) -> Hashes:
    hashes = np.zeros(count, _U64)
    for field, column in zip(fields, columns, strict=True):
        seed = _U64(xxhash.xxh64_intdigest(f"{_kind(column.type)} {field.name}".encode()))
        hashes += _mix(_of_column(column) ^ seed)
        _mix(hashes)
    return hashes


def _of_column(column: pa.Array) -> Hashes:
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if types.is_null(column.type):
        return np.full(len(column), _NULL)
    hashes = _of_values(column)
    if column.null_count:
        hashes = np.where(column.is_null().to_numpy(zero_copy_only=False), _NULL, hashes)
    return hashes


def _of_values(column: pa.Array) -> Hashes:
    """Return a hash of each value. The hash of a null is an arbitrary number, which the caller replaces."""
    type_ = column.type
    if types.is_struct(type_):
        return _of_fields(type_, (column.field(i) for i in range(type_.num_fields)), len(column))
    if types.is_map(type_):
        pairs = _of_fields(
            (pa.field("key", pa.null()), pa.field("value", pa.null())), (column.keys, column.items), len(column.keys)
        )
        return _of_elements(column.offsets, pairs)
    if types.is_list(type_) or types.is_large_list(type_):
        return _of_elements(column.offsets, _of_column(column.values), ordered=True)
    if types.is_string(type_) or types.is_binary(type_):
        return xxh64(column.view(pa.binary()).fill_null(b""), 0)
    if type_.bit_width == 128:  # decimals, and intervals of months, days and nanoseconds
        halves, scale = _halves(column), type_.scale if types.is_decimal128(type_) else 0
        return _mix(halves[:, 0] + _mix(halves[:, 1] + _U64(scale)))
    if types.is_floating(type_):
        numbers = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
        return _mix(np.where(np.isnan(numbers), np.nan, numbers).view(_U64))
    whole = types.is_boolean(type_) or types.is_integer(type_)
    numbers = column.cast(pa.int64()) if whole else column.view(pa.int32() if type_.bit_width == 32 else pa.int64())
    return _mix(numbers.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64).view(_U64))


def _of_elements(offsets: pa.Array, elements: Hashes, *, ordered: bool = False) -> Hashes:
    """Return a hash of each list, from its elements' hashes and their number; if `ordered`, from their order too."""
    ends = offsets.to_numpy(zero_copy_only=False).astype(np.int64)
    first, lengths = ends[:-1], np.diff(ends)
    inside = elements[ends[0] : ends[-1]] if len(ends) else elements
    if ordered:
        positions = np.arange(len(inside)) - np.repeat(first - ends[0], lengths)
        inside = _mix(inside + _mix(positions.view(_U64)))
    sums = np.concatenate((np.zeros(1, _U64), np.cumsum(inside, dtype=_U64)))
    at = first - ends[0]
    return _mix(sums[at + lengths] - sums[at] + _mix(lengths.astype(_U64)))


def _halves(column: pa.Array) -> npt.NDArray[Any]:
    data = column.buffers()[1]
    if data is None or not len(column):
        return np.zeros((len(column), 2), _U64)
    return np.frombuffer(data, _U64, 2 * len(column), 16 * column.offset).reshape(-1, 2)


def _kind(type_: pa.DataType) -> str:
    """Return the kind of a type, such as "number", so that the number 5 and the instant 5 have different hashes."""
    for kind, is_kind in _KINDS:
        if is_kind(type_):
            return kind
    return str(type_)


_KINDS = (
    ("number", types.is_integer),
    ("float", types.is_floating),
    ("decimal", types.is_decimal),
    ("instant", lambda t: types.is_timestamp(t) and t.tz is not None),
    ("local time", types.is_timestamp),
    ("struct", types.is_struct),
    ("map", types.is_map),
    ("list", lambda t: types.is_list(t) or types.is_large_list(t)),
)


def _mix(x: Hashes) -> Hashes:
    """Mix each number in place with the finalizer of SplitMix64, and return the array."""
    spare = x >> _U64(30)
    for bits, factor in ((27, 0xBF58476D1CE4E5B9), (31, 0x94D049BB133111EB)):
        x ^= spare
        x *= _U64(factor)
        np.right_shift(x, _U64(bits), out=spare)
    x ^= spare
    return x
