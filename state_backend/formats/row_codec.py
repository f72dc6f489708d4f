"""Codec of state values.

    row    u8 format (1) | u8 schema version | body
    body   null bitmap | fixed region | var region
             null bitmap   ceil(n/8) bytes; field i is bit i%8 of byte i//8, least significant first
             fixed region  every fixed-width field in schema order, packed without padding; a null field holds zeros
             var region    every non-null variable-width field in schema order: u32 length | bytes

    fixed-width     boolean 1 (0 or 1) | byte 1 | short 2 | integer 4 | long 8 | float 4 | double 8 | date 4 (days)
                    timestamp, timestamp_ntz 8 (µs) | decimal up to 18 digits 8 (unscaled)
    variable-width  string UTF-8 | binary unchanged | wider decimal: unscaled, shortest big-endian two's complement
                    struct  body (no header)
                    array   u32 count | null bitmap | items
                            (fixed-width items packed as above; for others u32 length | bytes, non-null items only)
                    map     array of keys | array of values; entries ordered by the encoded key

Lengths and numbers are little-endian, unlike in keys: no code sorts by encoded values, and Arrow and NumPy hold numbers
in this order. If all fields have a fixed width, all rows have one length and fixed offsets. A structured dtype then
reads the columns of concatenated rows without a loop. Map entries are ordered because equal values must have equal
bytes: the state digest hashes the bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, tzinfo
from decimal import Decimal
from operator import itemgetter
from typing import Any

from state_backend.formats.compiled_rows import UNDECODABLE, Column, compiled_decoder, compiled_encoder
from state_backend.formats.types import (
    INTEGER_BITS,
    MAX_LONG_DIGITS,
    ArrayType,
    AtomicType,
    Convert,
    DataType,
    DecimalType,
    MapType,
    Misfit,
    StructFactory,
    StructType,
    UnsupportedType,
    row_to_physical,
    to_physical,
    to_python,
    walk,
)
from state_backend.values.errors import CairnError, CorruptFile, StateSchemaError, StateTypeError
from state_backend.values.release import unsupported

FORMAT = 1
_U32 = struct.Struct("<I")
_FIXED = {"boolean": "?", "float": "f", "double": "d", "date": "i", "timestamp": "q", "timestamp_ntz": "q"}
_FIXED |= {name: {8: "b", 16: "h", 32: "i", 64: "q"}[bits] for name, bits in INTEGER_BITS.items()}
_NUMBERS = (bool, int, float)
_PYTHON: dict[str, type] = {
    "boolean": bool,
    "float": float,
    "double": float,
    "string": str,
    "binary": bytes,
    "date": date,
}
_PYTHON |= {"timestamp": datetime, "timestamp_ntz": datetime} | dict.fromkeys(INTEGER_BITS, int)

Encode = Callable[[Any], bytes]
Decode = Callable[[bytes], Any]


class RowCodec:
    """Codec of the rows of one state at one version of its schema.

    `encode` and `decode` are closures instead of methods for speed, because they run once for each entry.

    Attributes:
        encode: The encoder. It takes a dict by name, or another iterable by position. It raises `StateTypeError` with
            state, field, expected and found type.
        decode: The decoder. It takes the bytes of `encode` and returns a tuple. It raises `CorruptFile` for other bytes
            and for another schema version, and `UnsupportedFormat` for a later format.

    Raises:
        StateSchemaError: State can't hold a type of the schema.
    """

    __slots__ = ("decode", "encode", "schema", "schema_version", "state_name")

    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], tuple[Any, ...]]

    def __init__(
        self,
        state_name: str,
        schema: StructType,
        schema_version: int,
        struct_factory: StructFactory | None = None,
        zone: tzinfo = UTC,
    ) -> None:
        if not 0 <= schema_version <= 255:
            raise StateSchemaError(f"state {state_name!r}: schema version {schema_version} is not in 0 .. 255")
        _check_schema(state_name, schema)
        self.state_name, self.schema, self.schema_version = state_name, schema, schema_version
        header = bytes([FORMAT, schema_version])
        self.encode = _row_encoder(state_name, schema, header, zone)
        self.decode = _row_decoder(state_name, schema, header, struct_factory, zone)


def _check_schema(state_name: str, schema: StructType) -> None:
    for path, data_type in walk(schema):
        if isinstance(data_type, UnsupportedType):
            raise StateSchemaError(f"state {state_name!r} field {path!r}: {data_type} can't be stored: {data_type.why}")
        if isinstance(data_type, MapType) and any(isinstance(t, ArrayType) for _, t in walk(data_type.key)):
            why = "its keys hold a list, which can't be the key of a Python dict"
            raise StateSchemaError(f"state {state_name!r} field {path!r}: {data_type} can't be stored: {why}")


def _row_encoder(state_name: str, schema: StructType, header: bytes, zone: tzinfo) -> Encode:
    row_physical, encode_body = row_to_physical(schema, zone), _struct_encoder(schema, header)
    owner = f"state {state_name!r}"

    def encode(row: Any) -> bytes:
        try:
            return encode_body(row_physical(row))
        except Misfit as misfit:
            raise StateTypeError(misfit.message(owner, "field")) from None

    # The usual row has no null, and each value has exactly the Python type that `decode` returns. For these rows a
    # comparison of types replaces most checks, and `struct` checks the ranges of numbers. `encode` handles unusual
    # rows: with a null, an int for a double, a NumPy scalar, or a wrong value.
    if not (columns := _columns(schema, None, zone)):
        return encode
    return compiled_encoder(columns, header + bytes(_bitmap_size(len(columns))), encode)


def _columns(schema: StructType, struct_factory: StructFactory | None, zone: tzinfo) -> list[Column]:
    """Return a description of each field, from which `compiled_rows` compiles a fast encoder or decoder of rows.

    The list is empty if a field is nested: the caller then uses its encoder or decoder without compiled code.
    """
    if any(isinstance(f.type, ArrayType | MapType | StructType) for f in schema.fields):
        return []
    return [_column(f.type, struct_factory, zone) for f in schema.fields]


def _column(data_type: DataType, struct_factory: StructFactory | None, zone: tzinfo) -> Column:
    exact = _PYTHON[data_type.name] if isinstance(data_type, AtomicType) else Decimal
    code, convert = _code(data_type), to_physical(data_type, zone)
    back = to_python(data_type, struct_factory, zone)
    if exact in _NUMBERS or exact is bytes:
        return Column(code=code, exact=exact, to_physical=None, to_python=back)
    if exact is str:
        return Column(code=code, exact=exact, to_physical=str.encode, to_python=back)
    if isinstance(data_type, DecimalType) and code is None:
        assert back is not None
        return Column(
            code=code,
            exact=exact,
            to_physical=lambda value: encode_big_integer(convert(value)),
            to_python=lambda data: back(_decode_big_integer(data)),
        )
    return Column(code=code, exact=exact, to_physical=convert, to_python=back)


def _row_decoder(
    state_name: str, schema: StructType, header: bytes, struct_factory: StructFactory | None, zone: tzinfo
) -> Decode:
    decode_body = _struct_decoder(schema, header)
    converts = [(i, f) for i, field in enumerate(schema.fields) if (f := to_python(field.type, struct_factory, zone))]

    def fail(data: bytes, why: object) -> CairnError:
        if data[:1] > header[:1]:
            return unsupported(f"state {state_name!r}", f"an entry in format {data[0]}", f"format {FORMAT}")
        if data[:1] != header[:1]:
            why = f"unknown format {data[:1].hex() or '(no bytes)'}, expected {FORMAT}"
        elif data[:2] != header:
            why = f"it has schema version {data[1:2].hex() or '(none)'}, expected {header[1]:02x}"
        return CorruptFile(
            f"state {state_name!r}: can't decode {len(data)} stored bytes as {schema}: {why}; restore an older checkpoint"
        )

    def decode(data: bytes) -> tuple[Any, ...]:
        try:
            physical = decode_body(data)
            if not converts:
                return tuple(physical)
            values = list(physical)
            for i, convert in converts:
                if values[i] is not None:
                    values[i] = convert(values[i])
            return tuple(values)
        except UNDECODABLE as error:
            raise fail(data, error) from error

    columns = _columns(schema, struct_factory, zone)
    if not columns or (converts and all(column.code for column in columns)):
        return decode
    clean = header + bytes(_bitmap_size(len(columns)))
    if not all(column.code for column in columns):
        return compiled_decoder(columns, clean, decode)
    unpack = _unpacker(schema, header).unpack

    def decode_numbers(data: bytes) -> tuple[Any, ...]:
        if data.startswith(clean):
            try:
                return unpack(data)
            except struct.error as error:
                raise fail(data, error) from error
        return decode(data)

    return decode_numbers


def _code(data_type: DataType) -> str | None:
    """Return the `struct` code of a fixed-width type, None for other types."""
    if isinstance(data_type, DecimalType):
        return "q" if data_type.precision <= MAX_LONG_DIGITS else None
    return _FIXED.get(data_type.name) if isinstance(data_type, AtomicType) else None


def _bitmap_size(count: int) -> int:
    return (count + 7) // 8


def _codes(schema: StructType) -> str:
    return "".join(code for f in schema.fields if (code := _code(f.type)))


def _unpacker(schema: StructType, header: bytes) -> struct.Struct:
    """Return a `Struct` that skips a row's header and null bitmap, and unpacks the row's values of fixed width."""
    return struct.Struct(f"<{len(header) + _bitmap_size(len(schema.fields))}x{_codes(schema)}")


def _struct_encoder(schema: StructType, header: bytes) -> Callable[[Sequence[Any]], bytes]:
    size, u32 = _bitmap_size(len(schema.fields)), _U32.pack
    clean = header + bytes(size)
    # `pack` takes one bytes object with header and null bitmap, and then each value of fixed width.
    pack = struct.Struct(f"<{len(clean)}s{_codes(schema)}").pack
    fixed = [i for i, f in enumerate(schema.fields) if _code(f.type)]
    variable = [(i, _variable_encoder(f.type)) for i, f in enumerate(schema.fields) if not _code(f.type)]

    def encode(values: Sequence[Any]) -> bytes:
        if None in values:
            nulls = sum(1 << i for i, value in enumerate(values) if value is None)
            zeros = [0 if values[i] is None else values[i] for i in fixed]
            parts = [pack(header + nulls.to_bytes(size, "little"), *zeros)]
        else:
            parts = [pack(clean, *[values[i] for i in fixed])]
        for i, encode_field in variable:
            if (value := values[i]) is not None:
                raw = encode_field(value) if encode_field else value
                parts.append(u32(len(raw)))
                parts.append(raw)
        return b"".join(parts)

    return encode


def _struct_decoder(schema: StructType, header: bytes) -> Callable[[bytes], Sequence[Any]]:
    unpacker, u32 = _unpacker(schema, header), _U32.unpack_from
    unpack, fixed_size = unpacker.unpack_from, unpacker.size
    start, stop = len(header), len(header) + _bitmap_size(len(schema.fields))
    clean = header + bytes(stop - start)
    fixed = [i for i, f in enumerate(schema.fields) if _code(f.type)]
    variable = [(i, _variable_decoder(f.type)) for i, f in enumerate(schema.fields) if not _code(f.type)]
    may_be_null = sum(1 << i for i, f in enumerate(schema.fields) if f.nullable)
    order = [*fixed, *(i for i, _ in variable)]
    permute: Callable[[list[Any]], Sequence[Any]] | None = None
    if order != sorted(order):
        permute = itemgetter(*(order.index(i) for i in range(len(order))))

    def decode(data: bytes) -> Sequence[Any]:
        # A field whose length exceeds the data moves `at` beyond the end. So the one comparison of `at` with the end,
        # below, detects every truncated row.
        values, at, nulls = list(unpack(data)), fixed_size, 0
        if not data.startswith(clean):
            if not data.startswith(header):
                raise ValueError("wrong header")
            nulls = int.from_bytes(data[start:stop], "little")
            if nulls & ~may_be_null:
                raise ValueError("its null bitmap marks a field that is missing or not nullable")
        for i, decode_field in variable:
            if nulls >> i & 1:
                values.append(None)
                continue
            begin = at + 4
            at = begin + u32(data, at)[0]
            raw = data[begin:at]
            values.append(decode_field(raw) if decode_field else raw)
        if at != len(data):
            raise ValueError(f"it needs {at} bytes")
        if nulls:
            for slot, i in enumerate(fixed):
                if nulls >> i & 1:
                    values[slot] = None
        return permute(values) if permute else values

    return decode


def _variable_encoder(data_type: DataType) -> Encode | None:
    """Return an encoder from the physical value to bytes; None for strings and binaries, which are bytes already."""
    match data_type:
        case DecimalType():
            return encode_big_integer
        case ArrayType():
            return _array_encoder(data_type.element)
        case MapType():
            return _map_encoder(data_type)
        case StructType():
            encode_body = _struct_encoder(data_type, b"")
            return encode_body
    return None


def _variable_decoder(data_type: DataType) -> Decode | None:
    match data_type:
        case DecimalType():
            return _decode_big_integer
        case ArrayType():
            decode_array = _array_decoder(data_type.element, data_type.contains_null)
            return lambda data: _whole(data, *decode_array(data, 0))
        case MapType():
            return _map_decoder(data_type)
        case StructType():
            decode_body = _struct_decoder(data_type, b"")
            return lambda data: tuple(decode_body(data))
    return None


def _whole(data: bytes, value: list[Any], end: int) -> list[Any]:
    if end != len(data):
        raise ValueError(f"an array needs {end} bytes, has {len(data)}")
    return value


def encode_big_integer(value: int) -> bytes:
    """Return the shortest big-endian two's complement of an integer, at least one byte.

    Source: Java's `BigInteger.toByteArray`.
    """
    return value.to_bytes((value if value >= 0 else ~value).bit_length() // 8 + 1, "big", signed=True)


def _decode_big_integer(data: bytes) -> int:
    value = int.from_bytes(data, "big", signed=True)
    if encode_big_integer(value) != data:
        raise ValueError("a decimal is not in its shortest form")
    return value


def _array_encoder(element: DataType) -> Callable[[Sequence[Any]], bytes]:
    code, encode_item = _code(element), _variable_encoder(element)

    def encode(items: Sequence[Any]) -> bytes:
        count = len(items)
        nulls = bytearray(_bitmap_size(count))
        if None in items:
            for i, item in enumerate(items):
                if item is None:
                    nulls[i >> 3] |= 1 << (i & 7)
        if code:
            zeros = items if not any(nulls) else [0 if item is None else item for item in items]
            return struct.pack(f"<I{len(nulls)}s{count}{code}", count, nulls, *zeros)
        parts: list[bytes | bytearray] = [_U32.pack(count), nulls]
        for item in items:
            if item is not None:
                raw = encode_item(item) if encode_item else item
                parts += (_U32.pack(len(raw)), raw)
        return b"".join(parts)

    return encode


def _array_decoder(element: DataType, contains_null: bool) -> Callable[[bytes, int], tuple[list[Any], int]]:
    code, decode_item = _code(element), _variable_decoder(element)

    def decode(data: bytes, at: int) -> tuple[list[Any], int]:
        (count,) = _U32.unpack_from(data, at)
        bits_at = at + 4
        at = bits_at + _bitmap_size(count)
        if at > len(data):
            raise ValueError("an array is cut off")
        nulls = data[bits_at:at]
        has_null = any(nulls)
        if has_null and (not contains_null or nulls[-1] >> ((count - 1) % 8 + 1)):
            raise ValueError("an array's null bitmap marks an item that is missing or not nullable")
        items: list[Any] = []
        if code:
            form = f"<{count}{code}"
            items += struct.unpack_from(form, data, at)
            at += struct.calcsize(form)
            if has_null:
                items = [None if nulls[i >> 3] >> (i & 7) & 1 else item for i, item in enumerate(items)]
            return items, at
        for i in range(count):
            if nulls[i >> 3] >> (i & 7) & 1:
                items.append(None)
                continue
            begin = at + 4
            at = begin + _U32.unpack_from(data, at)[0]
            raw = data[begin:at]
            items.append(decode_item(raw) if decode_item else raw)
        return items, at

    return decode


def _map_encoder(data_type: MapType) -> Callable[[Sequence[tuple[Any, Any]]], bytes]:
    encode_keys, encode_values = _array_encoder(data_type.key), _array_encoder(data_type.value)
    code = _code(data_type.key)
    encode_key: Convert | None = struct.Struct(f"<{code}").pack if code else _variable_encoder(data_type.key)

    def encode(pairs: Sequence[tuple[Any, Any]]) -> bytes:
        ordered = sorted(pairs, key=lambda pair: encode_key(pair[0]) if encode_key else pair[0])
        return encode_keys([key for key, _ in ordered]) + encode_values([value for _, value in ordered])

    return encode


def _map_decoder(data_type: MapType) -> Decode:
    decode_keys = _array_decoder(data_type.key, False)
    decode_values = _array_decoder(data_type.value, data_type.value_contains_null)

    def decode(data: bytes) -> list[tuple[Any, Any]]:
        keys, at = decode_keys(data, 0)
        values = _whole(data, *decode_values(data, at))
        return list(zip(keys, values, strict=True))

    return decode
