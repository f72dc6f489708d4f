"""Columns of keys as bytes: column by column what ``KeyCodec`` makes row by row; its module draws the bytes.

Numbers of one width, flags and terminators are pieces that NumPy packs; the bytes of strings are joined in by Arrow. Arrays
and structs go through ``KeyCodec``, value by value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from state_backend.formats.arrow_columns import (
    Array,
    Fixed,
    binary_views,
    checked_column,
    concatenate,
    encode_each,
    fixed_values,
    valid_rows,
)
from state_backend.formats.key_codec import KeyCodec, check_key_schema
from state_backend.formats.types import ArrayType, AtomicType, Field, StructType
from state_backend.values.errors import StateTypeError

_ONE, _END = np.void(b"\1"), np.void(b"\0\1")


class KeyColumns:
    """Keys of one schema, many at a time. ``what`` names them in errors, as in ``KeyCodec``, which raises the same
    ``KeyTypeError``."""

    __slots__ = ("_nested", "schema", "what")

    def __init__(self, key_schema: StructType, *, what: str = "key") -> None:
        check_key_schema(key_schema, what)
        self.schema, self.what = key_schema, what
        self._nested = {
            f.name: KeyCodec(StructType((f,)), what=what)
            for f in key_schema.fields
            if isinstance(f.type, ArrayType | StructType)
        }

    def encode(self, columns: Sequence[pa.Array | pa.ChunkedArray]) -> pa.BinaryArray:
        """The key of every row; columns by position. ``StateTypeError`` names the column that doesn't fit the schema."""
        fields = self.schema.fields
        if len(columns) != len(fields):
            raise StateTypeError(
                f"{self.what}: has {len(fields)} columns ({', '.join(self.schema.names)}), found {len(columns)}"
            )
        if len({len(column) for column in columns}) > 1:
            raise StateTypeError(f"{self.what}: its columns have {', '.join(str(len(c)) for c in columns)} rows")
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
            yield _escaped(array)
            yield Fixed(_END, valid)
        else:
            yield Fixed(_sortable(fixed_values(array, field.type)), valid)


def _sortable(values: Array) -> Array:
    """Numbers in a dtype whose bytes sort as the numbers do."""
    if values.ndim == 2:
        # The two halves of a wide decimal.
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
        # + 0.0 makes 0.0 of -0.0.
        bits = np.where(np.isnan(values), values.dtype.type(np.nan), values + 0).view(unsigned)
        bits = np.where(bits & sign, ~bits, bits | sign)
    return bits.astype(unsigned.newbyteorder(">"))


def _escaped(array: pa.Array) -> pa.BinaryArray:
    """Bytes with 0x00 as 0x00 0xFF, and none where the row is null."""
    array = array.cast(pa.binary())
    if array.null_count:
        array = array.fill_null(b"")
    offsets, raw = binary_views(array)
    if raw[offsets[0] : offsets[-1]].all():
        return array
    return pc.replace_substring(array, pattern=b"\0", replacement=b"\0\xff")
