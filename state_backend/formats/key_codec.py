"""Codec of keys.

The `memcmp` order of the bytes is Spark's ascending order, nulls first. No key is a prefix of another key.

    key     column …
    column  0x00 null
            0x01 value

    boolean                               0x00 | 0x01
    byte short integer long, date,        big-endian, sign bit flipped, 1 2 4 8 bytes (date 4, timestamps 8)
    timestamp, timestamp_ntz
    decimal                               the unscaled value in the same form, 8 bytes up to 18 digits, else 16
    float double                          IEEE bits, big-endian: positive numbers with the sign bit flipped, negative
                                          ones with all bits flipped; -0.0 as 0.0, every NaN as the one that sorts last
    string binary                         bytes (UTF-8) with 0x00 as 0x00 0xFF, then 0x00 0x01
    struct                                column … of its fields
    array                                 (0x01 column) … 0x00

Since no key is a prefix of another, keys can be concatenated: a map state's entries sort behind their key, by user key.
Floats are normalised because Spark groups -0.0 with 0.0, and all NaN together.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from datetime import UTC, tzinfo
from typing import Any

from state_backend.formats.types import (
    INTEGER_BITS,
    MAX_LONG_DIGITS,
    ArrayType,
    AtomicType,
    DataType,
    DecimalType,
    Field,
    MapType,
    Misfit,
    StructFactory,
    StructType,
    UnsupportedType,
    row_to_physical,
    to_python,
    walk,
)
from state_backend.values.errors import CorruptFile, InvariantViolated, KeyTypeError, StateTypeError

Encode = Callable[[Any], bytes]
Decode = Callable[[bytes, int], tuple[Any, int]]

_BITS = INTEGER_BITS | {"date": 32, "timestamp": 64, "timestamp_ntz": 64}
_UNSIGNED = {8: "B", 16: "H", 32: "I", 64: "Q"}


class KeyCodec:
    """Codec of the keys of one schema.

    Attributes:
        what: How error messages name the key, such as "key" or "user key of state 'x'".
        encode: Function that encodes a row or tuple of the key's columns as bytes. It raises `StateTypeError` with the
            column's name.

    Raises:
        KeyTypeError: A column's type can't be part of a key, because equal values may be encoded as different bytes.
    """

    __slots__ = ("_decode_row", "_to_python", "encode", "schema", "what")

    encode: Callable[[Any], bytes]

    def __init__(
        self,
        key_schema: StructType,
        *,
        what: str = "key",
        struct_factory: StructFactory | None = None,
        zone: tzinfo = UTC,
    ) -> None:
        check_key_schema(key_schema, what)
        self.schema, self.what = key_schema, what
        self.encode = _key_encoder(key_schema, what, zone)
        self._decode_row = _row_decoder(key_schema)
        fields = enumerate(key_schema.fields)
        self._to_python = [(i, f) for i, field in fields if (f := to_python(field.type, struct_factory, zone))]

    def decode_prefix(self, data: bytes, offset: int = 0) -> tuple[tuple[Any, ...], int]:
        """Decode the key that begins at the offset, and return its values and the offset behind the key.

        Raises:
            CorruptFile: The bytes are no key.
        """
        try:
            physical, end = self._decode_row(data, offset)
            for i, convert in self._to_python:
                if physical[i] is not None:
                    physical[i] = convert(physical[i])
        except (struct.error, ValueError, OverflowError, IndexError) as error:
            raise self._corrupt(data, error) from error
        return tuple(physical), end

    def decode(self, data: bytes) -> tuple[Any, ...]:
        values, end = self.decode_prefix(data)
        if end != len(data):
            raise self._corrupt(data, f"{len(data) - end} bytes too many")
        return values

    def _corrupt(self, data: bytes, why: object) -> CorruptFile:
        return CorruptFile(
            f"{self.what}: can't decode {len(data)} bytes as {self.schema}: {why}; restore an older checkpoint"
        )


def check_key_schema(key_schema: StructType, what: str = "key") -> None:
    """Check that each column of a schema can be part of a key: equal values must always be encoded as equal bytes.

    `what` is the keys' name at the beginning of error messages, such as "key" or "user key of state 'x'".

    Raises:
        KeyTypeError: The schema has no columns. Or it contains a map, whose equal values may differ in order, or
            another type whose equal values may be encoded as different bytes.
    """
    if not key_schema.fields:
        raise KeyTypeError(f"{what}: expected at least one column, found none")
    for path, data_type in walk(key_schema):
        why = data_type.why if isinstance(data_type, UnsupportedType) else ""
        if isinstance(data_type, MapType):
            why = "equal maps may differ in the order of their entries; use a sorted array of structs"
        if why:
            raise KeyTypeError(f"{what} column {path!r}: {data_type} can't be a key: {why}")


def _key_encoder(schema: StructType, what: str, zone: tzinfo) -> Encode:
    to_physical, encode_row = row_to_physical(schema, zone), _row_encoder(schema)

    def encode(values: Any) -> bytes:
        try:
            return encode_row(to_physical(values))
        except Misfit as misfit:
            raise StateTypeError(misfit.message(what, "column")) from None

    def encode_string(values: Any) -> bytes:
        if isinstance(values, tuple) and len(values) == 1 and type(values[0]) is str and "\0" not in values[0]:
            try:
                return b"\x01%b\x00\x01" % values[0].encode()
            except UnicodeEncodeError:
                pass
        return encode(values)

    pack = struct.Struct(">BQ").pack

    def encode_long(values: Any) -> bytes:
        if isinstance(values, tuple) and len(values) == 1 and type(values[0]) is int:
            try:
                return pack(1, values[0] + 0x8000_0000_0000_0000)
            except struct.error:
                pass
        return encode(values)

    # Most keys have one string or long column, so these have a fast encoder. It passes unusual values on to `encode`.
    match schema.fields[0].type if len(schema.fields) == 1 else None:
        case AtomicType("string"):
            return encode_string
        case AtomicType("long"):
            return encode_long
    return encode


def _row_encoder(schema: StructType) -> Encode:
    encodes = [_encoder(f.type) for f in schema.fields]

    def encode(values: Any) -> bytes:
        return b"".join([b"\0" if v is None else b"\1" + e(v) for v, e in zip(values, encodes)])  # noqa: B905

    return encode


def _row_decoder(schema: StructType) -> Callable[[bytes, int], tuple[list[Any], int]]:
    decodes = [_decoder(f.type) for f in schema.fields]

    def decode(data: bytes, at: int) -> tuple[list[Any], int]:
        values: list[Any] = []
        for decode_one in decodes:
            value = None
            at += 1
            if _flag(data, at - 1):
                value, at = decode_one(data, at)
            values.append(value)
        return values, at

    return decode


def _flag(data: bytes, at: int) -> bool:
    flag = data[at]
    if flag > 1:
        raise ValueError(f"byte {flag:#04x} at {at} is neither 0 nor 1")
    return flag == 1


def _encoder(data_type: DataType) -> Encode:
    match data_type:
        case AtomicType("boolean"):
            return lambda value: b"\1" if value else b"\0"
        case AtomicType("float" | "double" as name):
            return _float_encoder(name)
        case AtomicType("string" | "binary"):
            return lambda raw: raw.replace(b"\0", b"\0\xff") + b"\0\1"
        case AtomicType(name):
            return _integer_encoder(_BITS[name])
        case DecimalType():
            return _integer_encoder(64 if data_type.precision <= MAX_LONG_DIGITS else 128)
        case ArrayType():
            encode_item = _row_encoder(_item_row(data_type))
            return lambda items: b"".join([*[b"\1" + encode_item((item,)) for item in items], b"\0"])
        case StructType():
            return _row_encoder(data_type)
    raise InvariantViolated(f"{data_type} can't be a key; check_key_schema should have refused it")


def _decoder(data_type: DataType) -> Decode:
    match data_type:
        case AtomicType("boolean"):
            return lambda data, at: (_flag(data, at), at + 1)
        case AtomicType("float" | "double" as name):
            return _float_decoder(name)
        case AtomicType("string" | "binary"):
            return _decode_bytes
        case AtomicType(name):
            return _integer_decoder(_BITS[name])
        case DecimalType():
            return _integer_decoder(64 if data_type.precision <= MAX_LONG_DIGITS else 128)
        case ArrayType():
            return _array_decoder(_row_decoder(_item_row(data_type)))
        case StructType():
            decode_row = _row_decoder(data_type)

            def decode(data: bytes, at: int) -> tuple[Any, int]:
                values, end = decode_row(data, at)
                return tuple(values), end

            return decode
    raise InvariantViolated(f"{data_type} can't be a key; check_key_schema should have refused it")


def _item_row(data_type: ArrayType) -> StructType:
    return StructType((Field("element", data_type.element),))


def _integer_encoder(bits: int) -> Encode:
    offset, size = 1 << bits - 1, bits // 8
    if bits == 128:
        return lambda value: (value + offset).to_bytes(size, "big")
    pack = struct.Struct(f">{_UNSIGNED[bits]}").pack
    return lambda value: pack(value + offset)


def _integer_decoder(bits: int) -> Decode:
    offset, size = 1 << bits - 1, bits // 8

    def decode(data: bytes, at: int) -> tuple[int, int]:
        return _unsigned(data, at, size) - offset, at + size

    return decode


def _unsigned(data: bytes, at: int, size: int) -> int:
    if at + size > len(data):
        raise ValueError("it is cut off")
    return int.from_bytes(data[at : at + size], "big")


def _float_encoder(name: str) -> Encode:
    bits = 64 if name == "double" else 32
    from_float, to_bytes = struct.Struct(">d" if bits == 64 else ">f").pack, struct.Struct(f">{_UNSIGNED[bits]}").pack
    sign, ones = 1 << bits - 1, (1 << bits) - 1
    nan = to_bytes(int.from_bytes(from_float(float("nan")), "big") & ~sign | sign)

    def encode(value: float) -> bytes:
        if value != value:  # noqa: PLR0124
            return nan
        # The value is rounded to its width before the test for -0.0, because a tiny negative double becomes -0.0 as a
        # float.
        image = int.from_bytes(from_float(value), "big")
        if image < sign:
            return to_bytes(image | sign)
        return to_bytes(sign if image == sign else image ^ ones)

    return encode


def _float_decoder(name: str) -> Decode:
    form, size = (">d", 8) if name == "double" else (">f", 4)
    sign, ones = 1 << size * 8 - 1, (1 << size * 8) - 1

    def decode(data: bytes, at: int) -> tuple[float, int]:
        image = _unsigned(data, at, size)
        image = image ^ sign if image & sign else image ^ ones
        value: float = struct.unpack(form, image.to_bytes(size, "big"))[0]
        return value, at + size

    return decode


def _decode_bytes(data: bytes, at: int) -> tuple[bytes, int]:
    # 0xFF follows every zero byte inside the string, so the first 0x00 0x01 is the string's end.
    end = data.index(b"\0\1", at)
    raw = data[at:end]
    if b"\0" in raw:
        if raw.count(b"\0") != raw.count(b"\0\xff"):
            raise ValueError("a zero byte is not escaped")
        raw = raw.replace(b"\0\xff", b"\0")
    return raw, end + 2


def _array_decoder(decode_item: Callable[[bytes, int], tuple[list[Any], int]]) -> Decode:
    def decode(data: bytes, at: int) -> tuple[list[Any], int]:
        items: list[Any] = []
        while _flag(data, at):
            (item,), at = decode_item(data, at + 1)
            items.append(item)
        return items, at + 1

    return decode
