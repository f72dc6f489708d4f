"""State values: what goes in, what comes out, and the bytes between, which are durable."""

import math
from collections import deque
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import IntEnum, StrEnum
from types import SimpleNamespace
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import pytest

from state_backend.formats.row_codec import RowCodec
from state_backend.formats.types import DecimalType, parse_struct, walk
from state_backend.values.errors import CorruptFile, StateSchemaError, StateTypeError, UnsupportedFormat
from tests.support.schema_json import array, field, mapping, struct, struct_of

D = Decimal
AT = datetime(2013, 1, 1, 5, 17, 0, 250)


def codec(version=3, **fields):
    return RowCodec("x", parse_struct(struct(**fields)), version)


# --- schemas ---------------------------------------------------------------------------------------------------------------

EVERY_TYPE = struct(
    flag="boolean", b="byte", s="short", i="integer", n="long", f="float", d="double", text="string", raw="binary",
    day="date", at="timestamp", local="timestamp_ntz", price="decimal(10,2)", wide="decimal(38,10)",
    tags=array("string", False), counts=mapping("string", "long"), inner=struct(a="long", b=array(struct(c="string"))),
)  # fmt: skip


def test_schema_json_round_trip():
    assert parse_struct(EVERY_TYPE).to_json() == EVERY_TYPE
    odd = struct(v="variant", i="interval day to second", c="char(3)", t="time(6)", k="string collate UNICODE")
    odd["fields"].append(field("u", {"type": "udt", "class": "x.Y", "sqlType": "string"}))
    odd["fields"].append(field("a", array("string")) | {"metadata": {"__COLLATIONS": {"a.element": "icu.UNICODE"}}})
    assert parse_struct(odd).to_json() == odd


def test_schema_text_names_sql_types():
    assert str(parse_struct(struct(a="long", b=array("integer"), m=mapping("string", "decimal(5,2)")))) == (
        "struct<a: bigint, b: array<int>, m: map<string, decimal(5,2)>>"
    )
    inner = parse_struct(struct(a=array(struct(b="decimal(5,2)"))))
    assert list(walk(inner))[-1] == ("a.element.b", DecimalType(5, 2))


def test_metadata_is_carried_but_not_compared():
    plain = parse_struct(struct(a="long"))
    noted = parse_struct(struct_of(field("a", "long", comment="n")))
    assert plain == noted
    assert hash(plain) == hash(noted)
    assert noted.to_json()["fields"][0]["metadata"] == {"comment": "n"}


@pytest.mark.parametrize("json", [{}, {"type": "struct"}, array("long"), {"type": "struct", "fields": [{"name": "a"}]}])
def test_json_that_is_no_spark_struct_is_refused(json):
    with pytest.raises(StateSchemaError, match="Spark struct type in JSON"):
        parse_struct(json)


def test_two_fields_of_one_name_are_refused():
    with pytest.raises(StateSchemaError, match="two fields share a name: a, a"):
        parse_struct(struct_of(field("a", "long"), field("a", "string")))


@pytest.mark.parametrize(
    ("of", "name"),
    [
        ("variant", "variant"),
        ("interval year to month", "interval year to month"),
        ("interval", "interval"),
        ("char(3)", r"char\(3\)"),
        ("string collate UTF8_LCASE", "string collate UTF8_LCASE"),
        ("decimal(39,0)", r"decimal\(39,0\)"),
        ({"type": "udt", "class": "x.Y", "sqlType": "string"}, "udt"),
    ],
)
def test_types_that_state_cannot_store_are_refused(of, name):
    with pytest.raises(StateSchemaError, match=f"state 'x' field 'a': {name} can't be stored: "):
        codec(a=of)
    with pytest.raises(StateSchemaError, match=rf"state 'x' field 'a\.value\.b': {name} can't"):
        codec(a=mapping("string", struct(b=of)))


def test_map_keys_that_python_cannot_hash_are_refused():
    with pytest.raises(StateSchemaError, match=r"state 'x' field 'a': map<array<int>, int> can't be stored"):
        codec(a=mapping(array("integer"), "integer"))


@pytest.mark.parametrize("version", [-1, 256])
def test_versions_fit_a_byte(version):
    with pytest.raises(StateSchemaError, match=r"not in 0 \.\. 255"):
        codec(version, a="long")


# --- layout ------------------------------------------------------------------------------------------------------------------

LAYOUT = [
    (struct(a="long", b="boolean"), (1, True), "01 03 00 0100000000000000 01"),
    (struct(a="long", b="boolean"), (None, True), "01 03 01 0000000000000000 01"),
    (struct(a="string", b="short", c="binary"), ("é", -2, b"\0"), "01 03 00 feff 02000000 c3a9 01000000 00"),
    (struct(a="string", b="short", c="binary"), (None, -2, b""), "01 03 01 feff 00000000"),
    (struct(a="float", b="double", c="byte"), (1.5, -2.0, -1), "01 03 00 0000c03f 00000000000000c0 ff"),
    (struct(a="date", b="timestamp"), (date(1970, 1, 3), datetime(1970, 1, 1, 0, 0, 1)),
     "01 03 00 02000000 40420f0000000000"),
    (struct(a="decimal(5,2)", b="decimal(20,1)"), (D("1.5"), D("-12.8")), "01 03 00 9600000000000000 01000000 80"),
    (struct(a="decimal(20,0)"), (D(128),), "01 03 00 02000000 0080"),
    (struct(a=array("short")), ([1, None, 3],), "01 03 00 0b000000 03000000 02 0100 0000 0300"),
    (struct(a=array("string")), (["a", None, ""],), "01 03 00 0e000000 03000000 02 01000000 61 00000000"),
    (struct(a=array("string")), ([],), "01 03 00 04000000 00000000"),
    (struct(a=mapping("string", "byte")), ({"b": 1, "a": None},),
     "01 03 00 16000000 02000000 00 01000000 61 01000000 62 02000000 01 0001"),
    (struct(a=mapping("short", "byte")), ({2: 1, 1: 2},),
     "01 03 00 10000000 02000000 00 0100 0200 02000000 00 02 01"),
    (struct(a=struct(x="byte", y="string")), ((7, None),), "01 03 00 02000000 02 07"),
    (struct(**{f"c{i}": "boolean" for i in range(9)}), (*[True] * 8, None), "01 03 0001 01010101010101 01 00"),
    (struct(), (), "01 03"),
]  # fmt: skip


@pytest.mark.parametrize(("json", "row", "expected"), LAYOUT)
def test_each_type_is_encoded_as_its_specified_bytes(json, row, expected):
    coder = RowCodec("x", parse_struct(json), 3)
    data = bytes.fromhex(expected.replace(" ", ""))
    assert coder.encode(row).hex() == data.hex()
    assert coder.decode(data) == row


def test_nested_structs_come_from_the_factory():
    made = RowCodec(
        "x",
        parse_struct(struct(a=array(struct(p="long", q="string")))),
        1,
        lambda names: lambda values: dict(zip(names, values, strict=True)),
    )
    assert made.decode(made.encode(([(1, "z")],))) == ([{"p": 1, "q": "z"}],)


# --- what Python values are taken ------------------------------------------------------------------------------------------


class Colour(IntEnum):
    RED = 3


class Word(StrEnum):
    YES = "yes"


class RowLike:
    __fields__ = ("p", "q")

    def __iter__(self):
        return iter((1, "z"))


TAKEN = [
    ("long", np.int64(5), 5),
    ("long", Colour.RED, 3),
    ("byte", np.int8(-5), -5),
    ("boolean", np.bool_(True), True),
    ("double", 3, 3.0),
    ("float", 3, 3.0),
    ("float", 0.1, float(np.float32(0.1))),
    ("float", math.nan, math.nan),
    ("double", math.nan, math.nan),
    ("double", -0.0, -0.0),
    ("double", np.float32(0.5), 0.5),
    ("double", np.float64(0.1), 0.1),
    ("double", np.int32(2), 2.0),
    ("double", math.inf, math.inf),
    ("float", -math.inf, -math.inf),
    ("string", np.str_("a"), "a"),
    ("string", Word.YES, "yes"),
    ("binary", bytearray(b"a"), b"a"),
    ("binary", memoryview(b"a"), b"a"),
    ("date", np.datetime64("2013-01-01"), date(2013, 1, 1)),
    ("timestamp", AT, AT),
    ("timestamp", AT.replace(tzinfo=UTC), AT),
    ("timestamp", AT.replace(tzinfo=timezone(timedelta(hours=2))), AT - timedelta(hours=2)),
    ("timestamp", pd.Timestamp(AT), AT),
    ("timestamp", pd.Timestamp("2013-01-01T00:00:00.000000999"), datetime(2013, 1, 1)),
    ("timestamp", pd.Timestamp("2013-01-01T02:00", tz="Europe/Berlin"), datetime(2013, 1, 1, 1)),
    ("timestamp_ntz", pd.Timestamp(AT), AT),
    ("timestamp_ntz", np.datetime64("2013-01-01T05:17:00.000250"), AT),
    ("decimal(5,2)", 3, D("3.00")),
    ("decimal(5,2)", D("1.50000"), D("1.50")),
    ("decimal(5,2)", D("-0"), D("0.00")),
    ("decimal(5,2)", D("1E+2"), D("100.00")),
    ("decimal(38,0)", 10**38 - 1, D(10**38 - 1)),
    (array("long"), (1, np.int64(2)), [1, 2]),
    (array("long"), np.array([1, 2]), [1, 2]),
    (array("double"), [1, 2.5], [1.0, 2.5]),
    (mapping("string", "long"), {np.str_("a"): np.int64(1)}, {"a": 1}),
    (struct(p="long", q="string"), [1, "z"], (1, "z")),
    (struct(p="long", q="string"), {"q": "z", "p": 1}, (1, "z")),
    (struct(p="long", q="string"), {"q": "z"}, (None, "z")),
    (struct(p="long", q="string"), RowLike(), (1, "z")),
    (struct(p="long", q="string"), SimpleNamespace(q="z", p=1, r=0), (1, "z")),
    # The casts that Spark makes right.
    ("string", 5, "5"),
    ("string", np.int64(-5), "-5"),
    ("string", Colour.RED, "3"),
    ("string", True, "true"),
    ("string", D("1.50"), "1.50"),
    ("string", D("1E-7"), "1E-7"),
    ("string", 1.5, "1.5"),
    ("string", -0.0, "-0.0"),
    ("string", 1e10, "1.0E10"),
    ("string", 123456.789, "123456.789"),
    ("string", 9999999.0, "9999999.0"),
    ("string", 1e-3, "0.001"),
    ("string", 1.25e-5, "1.25E-5"),
    ("string", -math.inf, "-Infinity"),
    ("string", math.nan, "NaN"),
    ("binary", "é", "é".encode()),
    ("date", AT, date(2013, 1, 1)),
    ("date", pd.Timestamp(AT), date(2013, 1, 1)),
    ("date", datetime(2013, 1, 1, 23, tzinfo=timezone(timedelta(hours=-9))), date(2013, 1, 1)),
    ("timestamp_ntz", AT.replace(tzinfo=timezone(timedelta(hours=2))), AT),
    ("decimal(5,2)", D("1.555"), D("1.56")),
    ("decimal(5,2)", D("-1.545"), D("-1.55")),
    ("decimal(5,2)", D("999.994"), D("999.99")),
    ("decimal(5,2)", D("1E-999999"), D("0.00")),
    (array("string"), [1, True, None], ["1", "true", None]),
    (mapping("string", "long"), {5: 1}, {"5": 1}),
]


@pytest.mark.parametrize(
    "row", ["12", iter(("1", "2")), (c for c in "12"), deque("12"), np.array(["1", "2"]), {"b": "2", "a": "1"}]
)
def test_any_iterable_is_a_row_by_position_and_a_dict_one_by_name(row):
    coder = codec(a="string", b="string")
    assert coder.decode(coder.encode(row)) == ("1", "2")


NEW_YORK, KOLKATA = ZoneInfo("America/New_York"), ZoneInfo("Asia/Kolkata")


def test_instants_are_wall_time_in_the_zone():
    """Both ways; the hour that comes twice is told apart by its fold, and the one that is left out counts as one later."""
    first, second = datetime(2024, 11, 3, 5, 30, tzinfo=UTC), datetime(2024, 11, 3, 6, 30, tzinfo=UTC)
    coder = RowCodec("x", parse_struct(struct(a="timestamp", b=array("timestamp"))), 1, zone=NEW_YORK)
    in_utc = RowCodec("x", parse_struct(struct(a="timestamp", b=array("timestamp"))), 1)
    for instant, fold in ((first, 0), (second, 1)):
        a, (b,) = coder.decode(coder.encode((instant, [instant])))
        assert (a, a.fold, b, b.fold) == (datetime(2024, 11, 3, 1, 30), fold, a, fold)
        assert coder.encode((a, [b])) == in_utc.encode((instant, [instant]))
    assert in_utc.decode(coder.encode((datetime(2024, 3, 10, 2, 30), None)))[0] == datetime(2024, 3, 10, 7, 30)
    assert coder.encode((datetime(2024, 1, 1), None)) == in_utc.encode((datetime(2024, 1, 1, 5), None))


def test_the_maximum_timestamp_is_decoded_in_a_zone_east_of_utc():
    """9999-12-31 23:59:59 in UTC is beyond what a datetime can be east of it."""
    at = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
    coder = RowCodec("x", parse_struct(struct(a="timestamp")), 1, zone=KOLKATA)
    assert coder.decode(coder.encode((at,))) == (datetime.max,)


@pytest.mark.parametrize(("of", "value", "expected"), TAKEN)
@pytest.mark.parametrize("beside", [None, "text"])
def test_a_value_of_a_fitting_type_is_taken(of, value, expected, beside):
    coder = codec(a=of, b="string") if beside else codec(a=of)
    row = (value, beside) if beside else [value]
    (found, *_) = coder.decode(coder.encode(row))
    assert repr(found) == repr(expected)


REFUSED = [
    ("long", True, "expected bigint, found bool True"),
    ("long", 1.0, r"expected bigint, found float 1\.0"),
    ("long", np.float64(1.0), r"expected bigint, found float64 .*1\.0"),
    ("long", "x", "expected bigint, found str 'x'"),
    ("long", 2**63, r"expected bigint, found int 9223372036854775808 \(out of range\)"),
    ("long", -(2**63) - 1, "out of range"),
    ("integer", 2**31, r"expected int, found int 2147483648 \(out of range\)"),
    ("short", -32769, "expected smallint"),
    ("byte", 128, "expected tinyint"),
    ("byte", np.int64(128), "out of range"),
    ("boolean", 1, "expected boolean, found int 1"),
    ("boolean", np.int8(1), "expected boolean, found int8"),
    ("double", True, "expected double, found bool True"),
    ("double", "1", "expected double, found str '1'"),
    ("double", D(1), "expected double, found Decimal"),
    ("double", 2**53 + 1, "not exact in this type"),
    ("double", 10**400, "not exact"),
    ("float", 2**24 + 1, "not exact in this type"),
    ("float", 1e39, r"expected float, found float 1e\+39 \(out of range\)"),
    ("string", b"x", "expected string, found bytes b'x'"),
    ("string", "\ud800", "lone surrogate"),
    ("binary", [1], "expected binary, found list"),
    ("date", "2013-01-01", "expected date, found str"),
    ("timestamp", date(2013, 1, 1), "expected timestamp, found date"),
    ("timestamp", 5, "expected timestamp, found int 5"),
    ("timestamp", datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=5))), "out of range in UTC"),
    ("decimal(5,2)", 1.5, r"expected decimal\(5,2\), found float 1\.5"),
    ("decimal(5,2)", D("999.995"), r"expected decimal\(5,2\), found Decimal Decimal\('999\.995'\) \(out of range\)"),
    ("decimal(5,2)", 1000, "out of range"),
    ("decimal(5,2)", D("NaN"), "out of range"),
    ("decimal(5,2)", D("-Infinity"), "out of range"),
    ("decimal(38,0)", D("1E+999999"), "out of range"),
    ("decimal(38,38)", D("1"), "out of range"),
    ("string", date(2013, 1, 1), "expected string, found date"),
    ("string", D("NaN"), "expected string, found Decimal"),
    (array("long"), "ab", "expected array<bigint>, found str 'ab'"),
    (array("long"), {1}, "expected array<bigint>, found set"),
    (mapping("string", "long"), [("a", 1)], "expected map<string, bigint>, found list"),
    (mapping("timestamp", "long"), {AT: 1, AT.replace(tzinfo=UTC): 2}, "two keys have the same stored value"),
    (struct(p="long"), 5, "expected struct<p: bigint>, found int 5"),
    (struct(p="long"), {"P": 1}, r"no such field: 'P'"),
    (struct(p="long"), (1, 2), r" has 1 field \(p\); got 2 values"),
    ("string", list(range(1000)), r"found list \[0, 1, .{70}\.\.\.$"),
]


@pytest.mark.parametrize(("of", "null"), [("timestamp", pd.NaT), ("long", pd.NA), ("string", pd.NA)])
def test_the_nulls_of_pandas_are_null(of, null):
    assert codec(a=of, b="string").decode(codec(a=of, b="string").encode((null, "x"))) == (None, "x")


@pytest.mark.parametrize(("of", "value", "message"), REFUSED)
@pytest.mark.parametrize("beside", [None, "text"])
def test_a_value_of_a_wrong_type_is_refused_with_state_and_field(of, value, message, beside):
    coder = codec(a=of, b="string") if beside else codec(a=of)
    with pytest.raises(
        StateTypeError, match=f"^state 'x' field 'a'(: )?{message}|^state 'x' field 'a': expected.*{message}"
    ):
        coder.encode((value, beside) if beside else [value])


@pytest.mark.parametrize(
    ("of", "value", "path"),
    [
        (array("long"), [1, "x"], r"a\[1\]"),
        (array("long", False), [1, None], r"a\[1\]"),
        (array(struct(p="long")), [(1,), ("x",)], r"a\[1\]\.p"),
        (mapping("string", "long"), {b"x": 1}, r"a\.key"),
        (mapping("string", array("long")), {"k": ["x"]}, r"a\.value\[0\]"),
        (mapping("string", "long", False), {"k": None}, r"a\.value"),
        (struct(p=struct(q="date")), ((1,),), r"a\.p\.q"),
    ],
)
def test_errors_give_the_path(of, value, path):
    with pytest.raises(StateTypeError, match=f"^state 'x' field '{path}': expected "):
        codec(a=of).encode((value,))


def test_a_null_in_a_field_that_is_not_nullable_is_refused():
    coder = RowCodec("x", parse_struct(struct_of(field("a", "long", False), field("b", "long"))), 1)
    assert coder.decode(coder.encode((1, None))) == (1, None)
    with pytest.raises(
        StateTypeError, match=r"state 'x' field 'a': expected bigint, found NoneType None \(.*not nullable\)"
    ):
        coder.encode((None, 1))
    with pytest.raises(CorruptFile, match="null bitmap marks"):
        coder.decode(b"\x01\x01\x01" + bytes(16))


@pytest.mark.parametrize("row", [None, 5, object()])
def test_a_value_that_is_no_row_is_refused(row):
    with pytest.raises(StateTypeError, match=r"^state 'x': expected struct<a: bigint, b: string>, found "):
        codec(a="long", b="string").encode(row)
    with pytest.raises(TypeError):
        codec(a="long", b="long").encode(row)
    with pytest.raises(TypeError):
        codec(a="string", b="string").encode(row)


@pytest.mark.parametrize("row", [(1,), (1, 2, 3), ()])
def test_a_row_of_a_wrong_length_is_refused(row):
    with pytest.raises(StateTypeError, match=rf"^state 'x' has 2 fields \(a, b\); got {len(row)} values$"):
        codec(a="long", b="long").encode(row)


@pytest.mark.parametrize(("json", "row", "expected"), LAYOUT)
def test_truncated_or_longer_bytes_are_refused(json, row, expected):
    coder = RowCodec("x", parse_struct(json), 3)
    data = bytes.fromhex(expected.replace(" ", ""))
    for size in range(len(data)):
        with pytest.raises(CorruptFile, match="state 'x': "):
            coder.decode(data[:size])
    with pytest.raises(CorruptFile, match="state 'x': "):
        coder.decode(data + b"\0")


@pytest.mark.parametrize("fields", [{"a": "long"}, {"a": "string"}, {"a": "date"}])
def test_an_entry_of_another_schema_version_or_format_is_refused(fields):
    data = codec(3, **fields).encode((None,))
    with pytest.raises(CorruptFile, match=r"state 'x': .* it has schema version 03, expected 04"):
        codec(4, **fields).decode(data)
    with pytest.raises(UnsupportedFormat, match=r"state 'x': .* an entry in format 2; .* reads format 1"):
        codec(3, **fields).decode(b"\x02" + data[1:])
