"""Codec of columns of state values: many rows of `RowCodec` at a time.

The docstring of `row_codec` has a drawing of an encoded row.

If all fields have a fixed width, the rows are one structured array of NumPy. Otherwise a structured array holds the
header, bitmap and fixed region of each row, and Arrow joins the variable-width lengths and bytes to it. The decoder
cuts them out again. Arrays, maps and structs go through `RowCodec`, value by value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa

from state_backend.formats.arrow_columns import (
    Array,
    Fixed,
    Mask,
    arrow_field,
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
    valid_rows,
)
from state_backend.formats.row_codec import FORMAT, RowCodec
from state_backend.formats.types import ArrayType, DecimalType, MapType, StructType
from state_backend.values.errors import CorruptFile, InvariantViolated, StateTypeError

_WIDE_BYTES = 16


class RowColumns:
    """Codec of many rows of one state at one version of its schema. It raises the errors of `RowCodec`.

    Attributes:
        arrow_schema: The schema of decoded rows. `encode` takes rows that can be cast to it without loss.
    """

    __slots__ = ("_codec", "_fixed", "_header", "_nested", "_variable", "arrow_schema", "schema", "state_name")

    def __init__(self, state_name: str, schema: StructType, schema_version: int) -> None:
        self._codec = RowCodec(state_name, schema, schema_version)
        self.state_name, self.schema = state_name, schema
        self.arrow_schema = pa.schema([arrow_field(f) for f in schema.fields])
        self._header = bytes([FORMAT, schema_version])
        self._variable = [i for i, f in enumerate(schema.fields) if dtype_of(f.type) is None]
        self._nested = {
            i: RowCodec(state_name, StructType((f,)), schema_version)
            for i, f in enumerate(schema.fields)
            if isinstance(f.type, ArrayType | MapType | StructType)
        }
        dtypes: list[Any] = [("header", "<u2"), ("nulls", "u1", ((len(schema.fields) + 7) // 8,))]
        dtypes += [(str(i), dtype) for i, f in enumerate(schema.fields) if (dtype := dtype_of(f.type))]
        self._fixed = np.dtype(dtypes)

    def encode(self, rows: pa.RecordBatch | pa.Table) -> pa.BinaryArray:
        """Encode every row. Columns are matched by name and may come in any order."""
        names = self.schema.names
        if sorted(rows.schema.names) != sorted(names):
            raise StateTypeError(
                f"state {self.state_name!r}: expected the fields {', '.join(names)}; found {', '.join(rows.schema.names)}"
            )
        columns = [
            checked_column(rows.column(f.name), f, f"state {self.state_name!r} field {f.name!r}")
            for f in self.schema.fields
        ]
        valid = [valid_rows(column) if column.null_count else None for column in columns]
        pieces: list[Fixed | pa.Array] = [Fixed(np.void(self._header)), *_bitmap(rows.num_rows, valid)]
        for i, field in enumerate(self.schema.fields):
            if i not in self._variable:
                pieces.append(Fixed(fixed_values(columns[i], field.type)))
        for i in self._variable:
            pieces += self._variable_pieces(i, columns[i], valid[i])
        return concatenate(rows.num_rows, pieces)

    def _variable_pieces(self, i: int, column: pa.Array, valid: Mask | None) -> Iterator[Fixed | pa.Array]:
        field = self.schema.fields[i]
        if codec := self._nested.get(i):
            # The codec encodes the value as a row with one field. The row's header and bitmap, 3 bytes, are cut off.
            yield encode_each(
                column,
                field,
                f"state {self.state_name!r} field {field.name!r}",
                lambda value: b"" if value is None else codec.encode((value,))[3:],
            )
            return
        if isinstance(field.type, DecimalType):
            raw = _shortest(fixed_values(column, field.type), valid)
        else:
            raw = column.cast(pa.binary())
            if valid is not None:
                raw = raw.fill_null(b"")
        yield Fixed(np.diff(binary_views(raw)[0]).astype("<u4"), valid)
        yield raw

    def decode(self, rows: pa.BinaryArray) -> pa.RecordBatch:
        """Decode each element to a row of `arrow_schema`.

        All columns of a null element are null, even for fields that are not nullable.

        Raises:
            CorruptFile: `RowCodec` refuses a row.
        """
        if rows.null_count:
            valid = valid_rows(rows)
            places = pa.array(np.cumsum(valid) - 1, mask=~valid)
            return self.decode(rows.drop_null()).take(places)
        try:
            columns = self._columns(rows) if len(rows) else [pa.array([], t) for t in self.arrow_schema.types]
        except (ValueError, CorruptFile) as error:
            self._refuse(rows, error)
        return batch_of(columns, self.arrow_schema, len(rows))

    def _refuse(self, rows: pa.BinaryArray, error: Exception) -> NoReturn:
        for row in rows.to_pylist():
            self._codec.decode(row)
        raise InvariantViolated(
            f"state {self.state_name!r}: the rows can be decoded one by one, but not as columns: {error}"
        ) from error

    def _columns(self, rows: pa.BinaryArray) -> list[pa.Array]:
        offsets, raw = binary_views(rows)
        at, ends = offsets[:-1].astype(np.int64), offsets[1:].astype(np.int64)
        size, fields = self._fixed.itemsize, self.schema.fields
        if (ends - at).min() < size:
            raise ValueError("a row is cut off")
        if self._variable:
            fixed = gather(raw, at, np.dtype(("V", size))).view(self._fixed)
        else:
            fixed = np.ndarray((len(rows),), self._fixed, raw.data, int(at[0]))
        at += size
        if not self._variable and (at != ends).any():
            raise ValueError("a row is too long")
        if (fixed["header"] != int.from_bytes(self._header, "little")).any():
            raise ValueError("wrong header")
        nulls = self._nulls(fixed["nulls"])
        columns: list[Any] = [
            None if i in self._variable else fixed_column(fixed[str(i)], field.type, nulls[i])
            for i, field in enumerate(fields)
        ]
        data = rows.buffers()[2]
        for i in self._variable:
            begins, at = _extents(raw, at, ends, nulls[i])
            columns[i] = self._variable_column(i, data, begins, at, nulls[i])
        if (at != ends).any():
            raise ValueError("a row is too long")
        for column, field in zip(columns, fields, strict=True):
            check_values(column, field.type)
        return columns

    def _nulls(self, bitmaps: Array) -> list[Mask | None]:
        """Return, for each field, a mask with True for each row where it is null; None for a field without nulls."""
        fields = self.schema.fields
        if not bitmaps.any():
            return [None] * len(fields)
        bits = np.unpackbits(bitmaps, axis=1, bitorder="little").T.astype(np.bool_)
        if any(bits[i].any() and not (i < len(fields) and fields[i].nullable) for i in range(len(bits))):
            raise ValueError("a null bitmap marks a field that is missing or not nullable")
        return [mask if mask.any() else None for mask in bits[: len(fields)]]

    def _variable_column(self, i: int, data: pa.Buffer, begins: Array, ends: Array, nulls: Mask | None) -> pa.Array:
        """Decode the column of field `i`, which has variable width.

        In row r, the field's length and bytes are `data[begins[r]:ends[r]]`. `nulls`: True where null; None: never.
        """
        data_type = self.schema.fields[i].type
        if codec := self._nested.get(i):
            # The codec decodes the value as a row with one field, so a header and a bitmap without nulls are put before
            # the bytes.
            prefix = self._header + b"\0"
            values = [codec.decode(prefix + raw)[0] if raw else None for raw in cut(data, begins, ends).to_pylist()]
            return pa.array(values, arrow_type(data_type))
        column = cut(data, np.minimum(begins + 4, ends), ends)
        if isinstance(data_type, DecimalType):
            return fixed_column(_from_shortest(column, nulls), data_type, nulls)
        validity = None if nulls is None else pa.py_buffer(np.packbits(~nulls, bitorder="little"))
        return pa.Array.from_buffers(arrow_type(data_type), len(column), [validity, *column.buffers()[1:]])


def _bitmap(count: int, valid: list[Mask | None]) -> Iterator[Fixed]:
    size = (len(valid) + 7) // 8
    if all(mask is None for mask in valid):
        yield Fixed(np.void(bytes(size)))
        return
    nulls = np.zeros((count, len(valid)), np.bool_)
    for i, mask in enumerate(valid):
        if mask is not None:
            nulls[:, i] = ~mask
    yield Fixed(np.packbits(nulls, axis=1, bitorder="little").view(("V", size))[:, 0])


def _extents(raw: Array, at: Array, row_ends: Array, nulls: Mask | None) -> tuple[Array, Array]:
    """Return where a variable-width field, which begins at `at` in the bytes `raw`, begins and ends in each row.

    `nulls`: True where the field is null, so that it takes no bytes; None if it is never null.
    """
    present = slice(None) if nulls is None else ~nulls
    ends = at.copy()
    ends[present] += 4
    if (ends > row_ends).any():
        raise ValueError("a row is cut off")
    ends[present] += gather(raw, at[present], np.dtype("<u4"))
    if (ends > row_ends).any():
        raise ValueError("a row is cut off")
    return at, ends


def _shortest(halves: Array, valid: Mask | None) -> pa.BinaryArray:
    """Encode integers, (n, 2) uint64 with the low half first, as the shortest big-endian bytes; no bytes for null."""
    image = halves[:, ::-1].astype(">u8").view(np.uint8)
    sign = (image[:, :1] >> 7) * np.uint8(0xFF)
    differs = image != sign
    differs[:, -1] = True
    first = differs.argmax(axis=1)
    # The highest bit of the first byte must show the number's sign. If it does not, one more byte of sign bits is kept
    # before it.
    first -= (image[np.arange(len(image)), first] ^ sign[:, 0]) >> 7
    if valid is not None:
        first = np.where(valid, first, _WIDE_BYTES)
    offsets = np.concatenate(([0], np.cumsum(_WIDE_BYTES - first)))
    return binary_column(offsets, pa.py_buffer(image[np.arange(_WIDE_BYTES) >= first[:, None]]))


def _from_shortest(column: pa.BinaryArray, nulls: Mask | None) -> Array:
    """Return big-endian two's complement integers of 1 to 16 bytes as (n, 2) uint64, the low half first."""
    offsets, raw = binary_views(column)
    sizes = np.diff(offsets)
    if sizes.max() > _WIDE_BYTES or (sizes == 0).sum() > (0 if nulls is None else nulls.sum()):
        raise ValueError("a decimal has no bytes, or too many")
    padded = np.concatenate((np.zeros(_WIDE_BYTES, np.uint8), raw[: offsets[-1]]))
    image = gather(padded, offsets[1:], np.dtype(("V", _WIDE_BYTES))).view(np.uint8).reshape(-1, _WIDE_BYTES)
    first = np.minimum(_WIDE_BYTES - sizes, _WIDE_BYTES - 1)[:, None]
    leading = np.take_along_axis(image, first, axis=1)
    sign = (leading >> 7) * np.uint8(0xFF)
    image = np.where(np.arange(_WIDE_BYTES) < first, sign, image)
    following = np.take_along_axis(image, np.minimum(first + 1, _WIDE_BYTES - 1), axis=1)
    if ((sizes[:, None] > 1) & (leading == sign) & (following >> 7 == sign >> 7)).any():
        raise ValueError("a decimal is not in its shortest form")
    return image.view(">u8")[:, ::-1].astype("<u8")


def batch_of(columns: Sequence[pa.Array], schema: pa.Schema, rows: int) -> pa.RecordBatch:
    """Return columns as a batch. Without columns, the batch still has `rows` rows."""
    if not columns:
        return pa.RecordBatch.from_struct_array(pa.array([{}] * rows, pa.struct([])))
    return pa.RecordBatch.from_arrays(columns, schema=schema)
