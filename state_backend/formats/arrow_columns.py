"""Check of Arrow columns against the types of a schema, and conversion between Arrow columns and NumPy arrays.

    boolean              bool               byte short integer long   int8 int16 int32 int64
    float double         float32 float64    decimal(p,s)              decimal128(p,s)
    string | binary      string | binary    date                      date32
    timestamp            timestamp[us, UTC] timestamp_ntz             timestamp[us]
    array | map | struct list | map | struct of the same

The checks are as strict as the conversion of single Python values in `types.to_physical`. They refuse a value before it
is stored if Python could not read the value back, such as a year beyond 9999.

The *physical value* of a field is the value that the codecs store: days since 1970 for a date, microseconds since 1970
for a timestamp, the unscaled integer for a decimal. The module `types` has the whole list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from state_backend.formats.types import (
    INTEGER_BITS,
    MAX_LONG_DIGITS,
    ArrayType,
    AtomicType,
    Convert,
    DataType,
    DecimalType,
    Field,
    MapType,
    StructType,
    UnsupportedType,
)
from state_backend.values.errors import StateSchemaError, StateTypeError

Array = npt.NDArray[Any]
Int64s = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_ATOMIC = {
    "boolean": pa.bool_(),
    "byte": pa.int8(),
    "short": pa.int16(),
    "integer": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}
_DTYPES = {"boolean": "?", "float": "<f4", "double": "<f8", "date": "<i4", "timestamp": "<i8", "timestamp_ntz": "<i8"}
_DTYPES |= {name: f"<i{bits // 8}" for name, bits in INTEGER_BITS.items()}
_PACKED_BYTES = 64
_EPOCH = datetime(1970, 1, 1)
_US = timedelta(microseconds=1)
_TIMES_US = ((datetime.min - _EPOCH) // _US, (datetime.max - _EPOCH) // _US)
_RANGES = {
    "date": ((date.min - _EPOCH.date()).days, (date.max - _EPOCH.date()).days),
    "timestamp": _TIMES_US,
    "timestamp_ntz": _TIMES_US,
}


def arrow_type(data_type: DataType) -> pa.DataType:
    match data_type:
        case AtomicType(name):
            return _ATOMIC[name]
        case DecimalType(precision, scale):
            return pa.decimal128(precision, scale)
        case ArrayType(element, contains_null):
            return pa.list_(pa.field("element", arrow_type(element), contains_null))
        case MapType(key, value, contains_null):
            return pa.map_(arrow_type(key), pa.field("value", arrow_type(value), contains_null))
        case StructType(fields):
            return pa.struct([arrow_field(f) for f in fields])
        case UnsupportedType():
            raise StateSchemaError(f"{data_type} can't be stored: {data_type.why}")


def arrow_field(field: Field) -> pa.Field:
    return pa.field(field.name, arrow_type(field.type), field.nullable)


def dtype_of(data_type: DataType) -> np.dtype[Any] | None:
    """Return the little-endian NumPy dtype in which rows store values of a Spark type, such as `<i4` for a date.

    Returns:
        The dtype; None for types whose stored values differ in width: strings, binaries, nested types, and decimals of
        more than 18 digits.
    """
    if isinstance(data_type, DecimalType):
        return np.dtype("<i8") if data_type.precision <= MAX_LONG_DIGITS else None
    code = _DTYPES.get(data_type.name) if isinstance(data_type, AtomicType) else None
    return np.dtype(code) if code else None


def _fits(found: pa.DataType, expected: DataType) -> bool:
    """Return True if every value of the Arrow type `found` has an equal value in the Spark type `expected`.

    This function compares only types. `check_values` and the encoders check nulls and ranges.
    """
    if pa.types.is_dictionary(found):
        return _fits(found.value_type, expected)
    if pa.types.is_null(found):
        return True
    match expected:
        case AtomicType(name) if name in INTEGER_BITS:
            wanted = _ATOMIC[name]
            return found == wanted or bool(pa.types.is_integer(found) and found.bit_width < wanted.bit_width)
        case AtomicType("timestamp"):
            # A timestamp's zone only affects display. Spark sends the session's zone, so any zone fits.
            return bool(pa.types.is_timestamp(found) and found.unit == "us" and found.tz)
        case AtomicType("string" | "binary" as name):
            return found in (_ATOMIC[name], pa.large_string() if name == "string" else pa.large_binary())
        case ArrayType():
            return bool(pa.types.is_list(found) or pa.types.is_large_list(found)) and _fits(
                found.value_type, expected.element
            )
        case MapType():
            return (
                bool(pa.types.is_map(found))
                and _fits(found.key_type, expected.key)
                and _fits(found.item_type, expected.value)
            )
        case StructType(fields):
            return (
                bool(pa.types.is_struct(found))
                and tuple(f.name for f in found) == expected.names
                and all(_fits(f.type, e.type) for f, e in zip(found, fields, strict=True))
            )
    return bool(found == arrow_type(expected))


def checked_column(column: pa.Array | pa.ChunkedArray, field: Field, owner: str) -> pa.Array:
    """Return the column in one piece, cast to the field's Arrow type. A nested column keeps its own type.

    Raise `StateTypeError` for a type or value that does not fit. `owner` begins the message.
    """
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    found, wanted = column.type, arrow_type(field.type)
    if found != wanted:
        if not _fits(found, field.type):
            raise StateTypeError(
                f"{owner}: expected {field.type} (Arrow {wanted}), found Arrow {found}; cast the column"
            )
        if pa.types.is_dictionary(found):
            column = column.dictionary_decode()
        if isinstance(field.type, AtomicType | DecimalType) or pa.types.is_null(found):
            column = column.cast(wanted)
    if not field.nullable and column.null_count:
        row = int(np.flatnonzero(~valid_rows(column))[0])
        raise StateTypeError(f"{owner}: expected {field.type}, found null in row {row} (the field is not nullable)")
    try:
        check_values(column, field.type)
    except ValueError as error:
        raise StateTypeError(f"{owner}: expected {field.type}, found a value that does not fit: {error}") from error
    return column


def check_values(column: pa.Array, data_type: DataType) -> None:
    """Raise ValueError for a value that Arrow can hold, but the Spark type or Python can't. Skip nested values."""
    if isinstance(data_type, DecimalType) or data_type == AtomicType("string"):
        column.validate(full=True)
    elif isinstance(data_type, AtomicType) and len(column) and (bounds := _RANGES.get(data_type.name)):
        values = fixed_values(column, data_type)
        low, high = int(values.min()), int(values.max())
        if low < bounds[0] or bounds[1] < high:
            raise ValueError(f"{low if low < bounds[0] else high} is not in {bounds[0]} .. {bounds[1]}")


def valid_rows(column: pa.Array) -> Mask:
    mask: Mask = column.is_valid().to_numpy(zero_copy_only=False)
    return mask


def fixed_values(column: pa.Array, data_type: DataType) -> Array:
    """Return the numbers that the codecs store for a column of numbers, booleans, dates, timestamps or decimals.

    A date becomes its days since 1970, a timestamp its microseconds since 1970, a decimal its unscaled integer. Null
    becomes 0.

    Returns:
        An array of the shape (n,) of `dtype_of(data_type)`. For decimals of more than 18 digits: an array of the shape
        (n, 2) of uint64, with the low half of each integer first.
    """
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    if isinstance(data_type, DecimalType):
        values = _buffer(column, np.dtype(("<u8", 2)))
    else:
        dtype = dtype_of(data_type)
        assert dtype is not None
        values = _buffer(column, dtype)
    if column.null_count:
        values = values.copy()
        values[~valid_rows(column)] = 0
    if values.ndim == 2 and dtype_of(data_type) is not None:
        values = np.ascontiguousarray(values[:, 0]).view("<i8")
    return values


def _buffer(column: pa.Array, dtype: np.dtype[Any]) -> Array:
    data = column.buffers()[1]
    if data is None or not len(column):
        return np.empty(0, dtype)
    return np.frombuffer(data, dtype, len(column), column.offset * dtype.itemsize)


def binary_views(column: pa.Array) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    """Return the buffers of a string or binary column as arrays, without a copy.

    Returns:
        The offsets, one more than the column has rows, and the bytes that they point into. Value i is the bytes
        `offsets[i]` to `offsets[i + 1] - 1`.
    """
    _, offsets, data = column.buffers()
    if not len(column):
        return np.zeros(1, np.int32), np.empty(0, np.uint8)
    views = np.frombuffer(offsets, np.int32, len(column) + 1, column.offset * 4)
    return views, np.frombuffer(data or b"", np.uint8)


def gather(raw: Array, positions: Array, dtype: np.dtype[Any]) -> Array:
    """Return an array with the value of type `dtype` at each byte position in `raw`, in the order of `positions`."""
    if not len(positions):
        return np.empty(0, dtype)
    everywhere = np.ndarray((len(raw) - dtype.itemsize + 1,), dtype, raw.data, 0, (1,))
    values: Array = everywhere[positions]
    return values


def fixed_column(values: Array, data_type: DataType, nulls: Mask | None) -> pa.Array:
    """Return an Arrow column of numbers, booleans, dates, timestamps or decimals: the inverse of `fixed_values`.

    Args:
        values: The stored number of each row: days since 1970 for a date, microseconds since 1970 for a timestamp, the
            unscaled integer for a decimal. For decimals of more than 18 digits, the array has the shape (n, 2): the low
            and the high 64 bits of each integer.
        data_type: The Spark type of the column.
        nulls: True for each row that becomes null, whatever its number is; None for a column without nulls.
    """
    wanted, count = arrow_type(data_type), len(values)
    if pa.types.is_boolean(wanted):
        values = np.packbits(values, bitorder="little")
    elif isinstance(data_type, DecimalType) and values.ndim == 1:
        values = np.stack((values, values >> 63), axis=1)
    validity = None if nulls is None else pa.py_buffer(np.packbits(~nulls, bitorder="little"))
    return pa.Array.from_buffers(wanted, count, [validity, pa.py_buffer(np.require(values, requirements=["C", "A"]))])


def binary_column(offsets: Array, data: pa.Buffer) -> pa.BinaryArray:
    """Return a binary column without nulls.

    Raises:
        ArrowInvalid: The bytes take 2 GiB or more, the limit of the type's offsets.
    """
    if offsets.dtype != np.int32:
        offsets = pa.array(offsets).cast(pa.int32()).to_numpy()
    return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), data])


def cut(data: pa.Buffer, begins: Array, ends: Array) -> pa.BinaryArray:
    """Return a binary column whose value i is the bytes `begins[i]` to `ends[i] - 1` of `data`. The slices must ascend.

    The slices and the gaps between them become one column without a copy. `take` then copies only the slices.
    """
    offsets = np.stack((begins, ends), axis=1).astype(np.int32)
    every = pa.Array.from_buffers(pa.binary(), offsets.size - 1, [None, pa.py_buffer(offsets), data])
    return every.take(pa.array(np.arange(0, offsets.size, 2)))


@dataclass(frozen=True, slots=True)
class Fixed:
    """Bytes that `concatenate` puts into each row as one part. The part has the same width in all rows.

    Attributes:
        values: Either an array of shape (n,), whose item i has in its own memory the bytes for row i. Or a single NumPy
            value of shape (), whose bytes go into every row.
        keep: A mask with one item for each row. A row where the mask is False gets no bytes of this part. None: every
            row gets the part.
    """

    values: Array | np.void
    keep: Mask | None = None


def one_batch(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Return the rows of one or more batches of one schema as one batch."""
    if len(batches) == 1:
        return batches[0]
    # `pa.concat_batches` does the same since PyArrow 19.
    columns = [pa.concat_arrays(parts) for parts in zip(*(batch.columns for batch in batches), strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=batches[0].schema)


def concatenate(count: int, pieces: Sequence[Fixed | pa.Array]) -> pa.BinaryArray:
    """Join columns of bytes row by row: value i is the bytes of row i of all `pieces`, in their order."""
    joined: list[pa.Array] = []
    # NumPy packs neighbouring `Fixed` columns into one column if they have the same mask `keep`, which tells which rows
    # get bytes of a column. Arrow joins the packed columns and all others. NumPy takes a third of Arrow's time, so a
    # binary column whose values have one width becomes `Fixed` first.
    pieces = [piece if isinstance(piece, Fixed) else _of_one_width(piece) for piece in pieces]
    for _, run in groupby(pieces, lambda piece: id(piece.keep) if isinstance(piece, Fixed) else None):
        neighbours = list(run)
        joined += [_pack(count, neighbours)] if isinstance(neighbours[0], Fixed) else neighbours
    return joined[0] if len(joined) == 1 else pc.binary_join_element_wise(*joined, b"")


def _of_one_width(column: pa.Array) -> Fixed | pa.Array:
    """Return a binary column as `Fixed` if all its values have the same size, 1 to 64 bytes; otherwise unchanged."""
    offsets, raw = binary_views(column)
    width = int(offsets[1] - offsets[0]) if len(column) else 0
    if not 0 < width <= _PACKED_BYTES or (np.diff(offsets) != width).any():
        return column
    return Fixed(np.ndarray((len(column),), f"V{width}", raw.data, int(offsets[0])))


def _pack(count: int, pieces: Sequence[Any]) -> pa.BinaryArray:
    dtype = np.dtype([(str(i), piece.values.dtype) for i, piece in enumerate(pieces)])
    packed = np.empty(count, dtype)
    for i, piece in enumerate(pieces):
        packed[str(i)] = piece.values
    keep = pieces[0].keep
    if keep is None:
        small = count * dtype.itemsize < 1 << 31
        offsets = np.arange(count + 1, dtype=np.int32 if small else np.int64) * dtype.itemsize
        return binary_column(offsets, pa.py_buffer(packed))
    ends = np.cumsum(keep) * dtype.itemsize
    return binary_column(np.concatenate(([0], ends)), pa.py_buffer(packed[keep]))


def encode_each(column: pa.Array, field: Field, owner: str, encode: Callable[[Any], bytes]) -> pa.BinaryArray:
    """Return a binary column: `encode(value)` for each value of the column. `owner` begins messages of errors."""
    try:
        return pa.array([encode(value) for value in python_values(column, field.type)], pa.binary())
    except (ValueError, OverflowError) as error:
        raise StateTypeError(f"{owner}: expected {field.type}, found a value that does not fit: {error}") from error


def python_values(column: pa.Array, data_type: DataType) -> list[Any]:
    """Return a column's values as users pass them to state: structs as tuples, maps as dicts, nulls as None."""
    convert = _from_arrow(data_type)
    return [None if v is None else convert(v) for v in column.to_pylist()]


def _from_arrow(data_type: DataType) -> Convert:
    """Return a converter of single values from Arrow's `to_pylist` (struct: dict; map: pairs) to tuples and dicts."""
    match data_type:
        case ArrayType(element):
            item = _from_arrow(element)
            return lambda items: [None if i is None else item(i) for i in items]
        case StructType(fields):
            converts = [(f.name, _from_arrow(f.type)) for f in fields]
            return lambda row: tuple(None if (v := row[name]) is None else convert(v) for name, convert in converts)
        case MapType(key_type, value_type):
            key, value = _from_arrow(key_type), _from_arrow(value_type)

            def from_pairs(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
                entries = {key(k): None if v is None else value(v) for k, v in pairs}
                if len(entries) < len(pairs):
                    raise ValueError("a map has the same key twice")
                return entries

            return from_pairs
    return lambda value: value
