"""Conversions between Arrow arrays and NumPy arrays, for processors that compute with NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Array = npt.NDArray[Any]
Bools = npt.NDArray[np.bool_]
Int64s = npt.NDArray[np.int64]


def whole(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def valid_rows(array: pa.Array) -> Bools:
    if not array.null_count:
        return np.ones(len(array), np.bool_)
    valid: Bools = array.is_valid().to_numpy(zero_copy_only=False)
    return valid


def same_values(one: pa.Array, other: pa.Array) -> Bools:
    """Return True for each position at which two columns of the same type have the same value.

    Null is the same as null, and NaN the same as NaN. But 0.0 and -0.0 differ.
    """
    if pa.types.is_nested(one.type):
        pairs = zip(one.to_pylist(), other.to_pylist(), strict=True)
        return np.fromiter((repr(a) == repr(b) for a, b in pairs), np.bool_, len(one))
    if pa.types.is_floating(one.type):  # Compare bits: as a float, NaN differs from itself, and 0.0 equals -0.0.
        whole_number = {16: pa.int16(), 32: pa.int32(), 64: pa.int64()}[one.type.bit_width]
        one, other = one.view(whole_number), other.view(whole_number)
    both_null = pc.and_(one.is_null(), other.is_null())
    same: Bools = pc.or_(pc.equal(one, other).fill_null(False), both_null).to_numpy(zero_copy_only=False)
    return same


def booleans(column: Any) -> Bools:
    return np.asarray(column.fill_null(False).to_numpy(zero_copy_only=False)).astype(np.bool_)


def numbers(array: pa.Array) -> Array:
    """Return the values of a fixed-width Arrow array as a NumPy array. Null is 0.

    Dates become days, timestamps microseconds, and booleans 0 and 1. A decimal becomes four 32-bit limbs in int64, the
    lowest first; only the last limb is signed. The result may share memory with the Arrow array, so callers must not
    change it in place.
    """
    of = array.type
    if pa.types.is_boolean(of):
        return np.asarray(array.fill_null(False).to_numpy(zero_copy_only=False)).astype(np.uint8)
    if pa.types.is_decimal(of):
        limbs = np.frombuffer(array.buffers()[1] or b"", "<u4").reshape(-1, 4)[array.offset : array.offset + len(array)]
        values = limbs.astype(np.int64)
        values[:, 3] = limbs.view("<i4")[:, 3]
        return np.where(valid_rows(array)[:, None], values, 0) if array.null_count else values
    dtype = np.dtype(f"i{of.bit_width // 8}" if pa.types.is_temporal(of) else of.to_pandas_dtype())
    values = np.frombuffer(array.buffers()[1] or b"", dtype)[array.offset : array.offset + len(array)]
    return np.where(valid_rows(array), values, dtype.type(0)) if array.null_count else values


def array_of(values: Array, of: pa.DataType, valid: Bools | None = None) -> pa.Array:
    """Return NumPy values as an Arrow array of the type `of`. `valid`: False makes null; None: nothing is null.

    This is the inverse of `numbers`, except that decimals come as four unsigned 32-bit limbs.
    """
    count = len(values)
    if pa.types.is_boolean(of):
        values = np.packbits(values, bitorder="little")
    bitmap = None if valid is None or valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))
    return pa.Array.from_buffers(of, count, [bitmap, pa.py_buffer(np.ascontiguousarray(values))])
