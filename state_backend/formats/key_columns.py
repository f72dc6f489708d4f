"""Codec of columns of keys, which encodes and decodes many keys of `KeyCodec` at a time.

The docstring of `key_codec` has a drawing of an encoded key. NumPy packs the parts of fixed width: numbers, flags and
terminators. Arrow joins the bytes of strings to them, and the decoder cuts strings out at their terminators. Arrays and
structs go through `KeyCodec`, value by value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from state_backend.formats.arrow_columns import (
    Array,
    Fixed,
    Mask,
    arrow_type,
    binary_column,
    binary_views,
    check_values,
    checked_column,
    concatenate,
    cut,
    dtype_of,
    encode_each,
    fixed_column,
    fixed_values,
    gather,
    python_values,
    valid_rows,
)
from state_backend.formats.hash_columns import xxh64
from state_backend.formats.key_codec import KeyCodec, check_key_schema
from state_backend.formats.spark_hash import SEED, fold_struct
from state_backend.formats.types import ArrayType, AtomicType, DataType, Field, StructType, row_to_physical
from state_backend.values.errors import CorruptFile, InvariantViolated, StateTypeError

_ONE, _END = np.void(b"\1"), np.void(b"\0\1")


class KeyColumns:
    """Codec of many keys of one schema. It raises the errors of `KeyCodec`.

    Attributes:
        what: The keys' name at the beginning of error messages, such as "key" or "user key of state 'x'".
    """

    __slots__ = ("_codec", "_nested", "schema", "what")

    def __init__(self, key_schema: StructType, *, what: str = "key") -> None:
        check_key_schema(key_schema, what)
        self.schema, self.what = key_schema, what
        self._codec = KeyCodec(key_schema, what=what)
        self._nested = {
            f.name: KeyCodec(StructType((f,)), what=what)
            for f in key_schema.fields
            if isinstance(f.type, ArrayType | StructType)
        }

    def encode(self, columns: Sequence[pa.Array | pa.ChunkedArray]) -> pa.BinaryArray:
        """Encode the key of every row. `columns` are in the order of the schema's fields."""
        fields = self.schema.fields
        if len(columns) != len(fields):
            raise StateTypeError(
                f"{self.what}: expected {len(fields)} columns ({', '.join(self.schema.names)}), found {len(columns)}"
            )
        if len({len(column) for column in columns}) > 1:
            raise StateTypeError(
                f"{self.what}: expected columns of equal length, found {', '.join(str(len(c)) for c in columns)} rows"
            )
        pieces: list[Fixed | pa.Array] = []
        for column, field in zip(columns, fields, strict=True):
            pieces += self._pieces(column, field)
        return concatenate(len(columns[0]), pieces)

    def _pieces(self, column: pa.Array | pa.ChunkedArray, field: Field) -> Iterator[Fixed | pa.Array]:
        owner = f"{self.what} column {field.name!r}"
        array = checked_column(column, field, owner)
        if codec := self._nested.get(field.name):
            yield encode_each(array, field, owner, lambda value: codec.encode((value,)))
            return
        valid = valid_rows(array) if array.null_count else None
        yield Fixed(_ONE if valid is None else valid)
        if field.type in (AtomicType("string"), AtomicType("binary")):
            yield _escape(array)
            yield Fixed(_END, valid)
        else:
            yield Fixed(_sortable(fixed_values(array, field.type)), valid)

    def decode(self, keys: pa.BinaryArray) -> list[pa.Array]:
        columns, ends = self.decode_prefix(keys)
        if (ends != np.diff(binary_views(keys)[0])).any():
            self._refuse(keys, "bytes follow a key", whole=True)
        return columns

    def decode_prefix(self, data: pa.BinaryArray) -> tuple[list[pa.Array], Array]:
        """Decode the key that begins each value of `data`. Return the key columns, and the keys' sizes in bytes."""
        if not len(data):
            return [pa.array([], arrow_type(f.type)) for f in self.schema.fields], np.zeros(0, np.int64)
        offsets, raw = binary_views(data)
        starts, ends = offsets[:-1].astype(np.int64), offsets[1:].astype(np.int64)
        columns, at = [], starts
        try:
            for field in self.schema.fields:
                column, at = self._column(field, data, raw, at, ends)
                columns.append(column)
        except (ValueError, OverflowError, CorruptFile) as error:
            self._refuse(data, error)
        return columns, at - starts

    def _refuse(self, rows: pa.BinaryArray, why: object, *, whole: bool = False) -> NoReturn:
        for row in rows.to_pylist():
            (self._codec.decode if whole else self._codec.decode_prefix)(row)
        raise InvariantViolated(f"{self.what}: the rows can be decoded one by one, but not as columns: {why}")

    def _column(self, field: Field, data: pa.BinaryArray, raw: Array, at: Array, ends: Array) -> tuple[pa.Array, Array]:
        if codec := self._nested.get(field.name):
            rows = cut(data.buffers()[2], at, ends).to_pylist()
            decoded = [codec.decode_prefix(row) for row in rows]
            values = pa.array([value for (value,), _ in decoded], arrow_type(field.type))
            return values, at + np.array([size for _, size in decoded], np.int64)
        if (at >= ends).any():
            raise ValueError("a key is cut off")
        flags = raw[at]
        if (flags > 1).any():
            raise ValueError("a flag is neither 0 nor 1")
        valid = flags == 1
        nulls = None if valid.all() else ~valid
        begins = at + 1
        if field.type in (AtomicType("string"), AtomicType("binary")):
            stops = _terminators(raw, begins, ends, valid)
            column = _unescape(cut(data.buffers()[2], begins, stops))
            validity = None if nulls is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
            column = pa.Array.from_buffers(arrow_type(field.type), len(column), [validity, *column.buffers()[1:]])
            after = stops + 2 * valid
        else:
            stored = dtype_of(field.type) or np.dtype("V16")
            after = begins + stored.itemsize * valid
            if (after > ends).any():
                raise ValueError("a key is cut off")
            if valid.any():
                # A null row has no bytes, so the first bytes of the data are read in its place. `nulls` masks them
                # below.
                image = gather(raw, np.where(valid, begins, 0), np.dtype(("V", stored.itemsize)))
                column = fixed_column(_physical(image, field.type, nulls), field.type, nulls)
            else:
                column = pa.nulls(len(at), arrow_type(field.type))
        check_values(column, field.type)
        return column, after


def key_groups(columns: Sequence[pa.Array], key_schema: StructType, max_parallelism: int) -> npt.NDArray[np.uint16]:
    """Return an array with the key group of each row of the key columns.

    The columns must be as `KeyColumns.decode` returns them. Nested types and wide decimals are hashed row by row.
    """
    hashes = np.full(len(columns[0]), SEED, np.uint64)
    for column, field in zip(columns, key_schema.fields, strict=True):
        if isinstance(field.type, AtomicType) or dtype_of(field.type) is not None:
            valid = valid_rows(column)
            hashes[valid] = xxh64(_hashed_bytes(column.drop_null(), field.type), hashes[valid])
        else:
            fold, convert = fold_struct(StructType((field,))), row_to_physical(StructType((field,)))
            values = zip(python_values(column, field.type), hashes.tolist(), strict=True)
            hashes = np.array([fold(convert((value,)), seed) for value, seed in values], np.uint64)
    return (hashes.view(np.int64) % max_parallelism).astype(np.uint16)


def _hashed_bytes(column: pa.Array, data_type: DataType) -> pa.BinaryArray:
    if data_type in (AtomicType("string"), AtomicType("binary")):
        return column.cast(pa.binary())
    values = fixed_values(column, data_type)
    if values.dtype.kind == "f":
        # Adding 0 turns -0.0 into 0.0.
        values = np.where(np.isnan(values), values.dtype.type(np.nan), values + 0)
    elif values.dtype.itemsize < 4:
        values = values.astype("<i4")
    return binary_column(np.arange(len(values) + 1) * values.dtype.itemsize, pa.py_buffer(np.ascontiguousarray(values)))


def _sortable(values: Array) -> Array:
    """Return the numbers of a key column as keys store them: big-endian bytes that sort as the numbers do."""
    if values.ndim == 2:
        # A wide decimal is an array of two 8-byte halves, the low half first.
        halves = values[:, ::-1].astype(">u8")
        halves[:, 0] ^= np.uint64(1 << 63)
        return np.ascontiguousarray(halves).view("V16")[:, 0]
    size = values.dtype.itemsize
    if values.dtype.kind == "b":
        return values
    bits: Array
    unsigned = np.dtype(f"u{size}")
    sign = unsigned.type(1 << size * 8 - 1)
    if values.dtype.kind == "i":
        bits = values.view(unsigned) ^ sign
    else:
        # Adding 0 turns -0.0 into 0.0.
        bits = np.where(np.isnan(values), values.dtype.type(np.nan), values + 0).view(unsigned)
        bits = np.where(bits & sign, ~bits, bits | sign)
    return bits.astype(unsigned.newbyteorder(">"))


def _escape(array: pa.Array) -> pa.BinaryArray:
    """Return the strings with each byte 0x00 replaced by 0x00 0xFF. Null becomes the empty string."""
    array = array.cast(pa.binary())
    if array.null_count:
        array = array.fill_null(b"")
    offsets, raw = binary_views(array)
    if raw[offsets[0] : offsets[-1]].all():
        return array
    return pc.replace_substring(array, pattern=b"\0", replacement=b"\0\xff")


def _physical(image: Array, data_type: DataType, nulls: Mask | None) -> Array:
    """Convert the bytes that keys store for the numbers of one column back to numbers: the inverse of `_sortable`."""
    dtype = dtype_of(data_type)
    if dtype is None:
        halves = image.view(">u8").reshape(-1, 2).astype(np.uint64)
        halves[:, 0] ^= np.uint64(1 << 63)
        return halves[:, ::-1]
    bits: Array = image.view(f">u{dtype.itemsize}").astype(f"<u{dtype.itemsize}")
    if nulls is not None:
        bits[nulls] = 0
    if dtype.kind == "b":
        if (bits > 1).any():
            raise ValueError("a boolean is neither 0 nor 1")
        return bits.view(np.bool_)
    sign = bits.dtype.type(1 << dtype.itemsize * 8 - 1)
    bits = bits ^ sign if dtype.kind == "i" else np.where(bits & sign, bits ^ sign, ~bits)
    return bits.view(dtype)


def _terminators(raw: Array, begins: Array, ends: Array, valid: Mask) -> Array:
    """Return the position in `raw` of the terminator (0x00 0x01) of each key's string; `begins` where not `valid`."""
    found = np.flatnonzero((raw[:-1] == 0) & (raw[1:] == 1))
    stops = begins.copy()
    nearest = np.searchsorted(found, begins[valid])
    if len(nearest) and nearest.max(initial=0) >= len(found):
        raise ValueError("a string has no end")
    stops[valid] = found[nearest]
    if (stops + 2 * valid > ends).any():
        raise ValueError("a string has no end")
    return stops


def _unescape(column: pa.BinaryArray) -> pa.BinaryArray:
    offsets, raw = binary_views(column)
    used = raw[offsets[0] : offsets[-1]]
    if used.all():
        return column
    plain = pc.replace_substring(column, pattern=b"\0\xff", replacement=b"\0")
    removed = (offsets[-1] - offsets[0]) - np.diff(binary_views(plain)[0]).sum()
    if removed != np.count_nonzero(used == 0):
        raise ValueError("a zero byte is not escaped")
    return plain
