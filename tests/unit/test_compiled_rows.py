"""Which rows the function written out for a schema takes itself; that it writes the same bytes is what the codec's tests hold."""

import struct
from datetime import date
from decimal import Decimal

import pytest

from state_backend.formats.compiled_rows import compiled_decoder, compiled_encoder
from state_backend.formats.row_codec import RowCodec, _columns
from state_backend.formats.types import parse_struct
from state_backend.values.zones import zone_of
from tests.support.schema_json import struct as struct_json

TYPES = {
    "long": 7,
    "string": "seven é",
    "double": 7.0,
    "date": date(2024, 2, 29),
    "binary": b"",
    "decimal(30,2)": Decimal("7.00"),
}
SHAPES = [
    ["long"],
    ["string"],
    ["string", "long"],
    ["binary", "string", "date", "decimal(30,2)"],
    [*TYPES],
    [*TYPES] * 9,
]


def schema_of(types):
    return parse_struct(struct_json(**{f"f{n}": kind for n, kind in enumerate(types)}))


@pytest.mark.parametrize("types", SHAPES, ids=len)
def test_valid_rows_use_the_compiled_codec_and_other_rows_fall_back(types):
    schema = schema_of(types)
    columns = _columns(schema, None, zone_of("UTC").rules)
    clean = b"\x01\x01" + bytes((len(types) + 7) // 8)
    encode = compiled_encoder(columns, clean, lambda row: b"the long way")
    row = tuple(TYPES[kind] for kind in types)
    data = encode(row)
    assert data == encode(list(row)) == RowCodec("s", schema, 1).encode(dict(zip(schema.names, row, strict=True)))
    wrong = [(None, *row[1:]), row[1:], (*row, 1), {"f0": row[0]}, (True, *row[1:]), "f" * len(row)]
    assert {encode(other) for other in wrong} == {b"the long way"}
    if any(column.code is None for column in columns):
        decode = compiled_decoder(columns, clean, lambda data: ("the long way",))
        assert decode(data) == row
        # Cut, with a byte more, of another version, and with a null.
        damaged = [
            *(data[:at] for at in range(len(data))),
            data + b"\0",
            b"\x01\x02" + data[2:],
            data[:2] + b"\1" + data[3:],
        ]
        assert {decode(other) for other in damaged} == {("the long way",)}


def test_out_of_range_numbers_and_invalid_utf_8_fall_back_to_the_general_encoder():
    columns = _columns(schema_of(["long", "string"]), None, zone_of("UTC").rules)
    encode = compiled_encoder(columns, b"\1\1\0", lambda row: b"the long way")
    assert encode((2**63 - 1, "")) == struct.pack("<3sqI", b"\1\1\0", 2**63 - 1, 0)
    assert {encode((2**63, "")), encode((0, "\ud800"))} == {b"the long way"}
