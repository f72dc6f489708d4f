"""The columnar formats against their scalar twins: equal bytes, equal hashes, equal refusals."""

import math
from datetime import UTC, date, datetime
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from state_backend.formats.arrow_columns import arrow_type
from state_backend.formats.hash_columns import xxh64
from state_backend.formats.key_codec import KeyCodec
from state_backend.formats.key_columns import KeyColumns, key_groups
from state_backend.formats.row_codec import RowCodec
from state_backend.formats.row_columns import RowColumns
from state_backend.formats.spark_hash import key_group
from state_backend.formats.types import parse_struct
from state_backend.values.errors import (
    CorruptFile,
    InvariantViolated,
    KeyTypeError,
    StateSchemaError,
    StateTypeError,
    UnsupportedFormat,
)
from tests.support.schema_json import array, mapping
from tests.support.tiers import at_tier
from tests.support.typed_values import ATOMIC, all_types, atomic, key_types, same, struct, structs, values

laws = settings(
    deadline=None, max_examples=at_tier(fast=10, ci=25, all=100), suppress_health_check=[HealthCheck.too_slow]
)


def tables(types):
    """(schema, up to six rows of it)"""
    return structs(types).flatmap(
        lambda json: st.tuples(
            st.just(parse_struct(json)),
            st.lists(st.tuples(*(values(f["type"], f["nullable"]) for f in json["fields"])), max_size=6),
        )
    )


def column(data, items, data_type):
    """As one array, a slice of a longer one, or in chunks; strings also as Spark may send them."""
    wanted = arrow_type(data_type)
    drawn = data.draw(st.sampled_from(["plain", "slice", "chunks", "large", "dictionary"]))
    if drawn == "chunks":
        cut = data.draw(st.integers(0, len(items)))
        return pa.chunked_array([pa.array(items[:cut], wanted), pa.array(items[cut:], wanted)])
    if drawn == "slice":
        before = data.draw(st.integers(0, 9))
        around = [items[i % len(items)] for i in range(before)] if items else []
        return pa.array([*around, *items, *around], wanted).slice(len(around), len(items))
    if drawn == "large" and wanted == pa.string():
        return pa.array(items, pa.large_string())
    if drawn == "dictionary" and wanted in (pa.string(), pa.int64()):
        return pa.array(items, wanted).dictionary_encode()
    return pa.array(items, wanted)


def columns(data, rows, schema):
    return [column(data, [row[i] for row in rows], f.type) for i, f in enumerate(schema.fields)]


def table_of(columns, schema, count):
    if not columns:
        return pa.RecordBatch.from_struct_array(pa.array([{}] * count, pa.struct([])))
    return pa.table(columns, names=schema.names)


def damaged_bytes(data, stored):
    damaged = bytearray(stored)
    match data.draw(st.sampled_from(["cut", "flip", "append"])):
        case "cut":
            del damaged[data.draw(st.integers(0, len(damaged) - 1)) :]
        case "flip":
            damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
        case "append":
            damaged += data.draw(st.binary(min_size=1, max_size=20))
    return bytes(damaged)


def schema_of(*types, nullable=True):
    return parse_struct(struct(types, [nullable] * len(types)))


def masked(column, nulls):
    """Null where ``nulls`` is True, above whatever value was there, and sliced."""
    bitmap = pa.py_buffer(np.packbits(~nulls, bitorder="little"))
    return pa.Array.from_buffers(column.type, len(column), [bitmap, *column.buffers()[1:]])[3:]


def masked_rows(rows, nulls):
    return [tuple(None if null[i] else v for null, v in zip(nulls, row, strict=True)) for i, row in enumerate(rows)][3:]


def one(data_type, *items):
    """The Arrow type of a Spark type's name, as an array."""
    return pa.array(items, arrow_type(schema_of(data_type).fields[0].type))


# --- hashes -----------------------------------------------------------------------------------------------------------------


def digests(rows, seed):
    return [xxhash.xxh64_intdigest(row, seed) for row in rows]


@pytest.mark.parametrize("block", [range(start, start + 50) for start in range(0, 300, 50)], ids=str)
def test_column_hashes_equal_xxhash_for_rows_of_one_length(block, monkeypatch):
    # So that every length is hashed by NumPy, and in more than one block.
    monkeypatch.setattr("state_backend.formats.hash_columns._MIN_ROWS", np.ones(514))
    monkeypatch.setattr("state_backend.formats.hash_columns._BLOCK_ROWS", 7)
    random = np.random.default_rng(block.start)
    for length in block:
        rows = [random.bytes(length) for _ in range(10)]
        seed = int(random.integers(0, 2**64, dtype=np.uint64))
        found = xxh64(pa.array([b"before", *rows, b"behind"], pa.binary())[1:-1], seed)
        assert found.dtype == np.uint64
        assert found.tolist() == digests(rows, seed)


@laws
@given(st.lists(st.binary(max_size=100), max_size=20), st.integers(0, 2**64 - 1), st.integers(0, 3))
def test_column_hashes_equal_xxhash_for_rows_of_many_lengths(rows, seed, before):
    assert xxh64(pa.array([*[b"x"] * before, *rows], pa.binary())[before:], seed).tolist() == digests(rows, seed)


@pytest.mark.parametrize("lengths", [[16], [16, 40], [3, 40, 600], [0, 1]], ids=str)
def test_column_hashes_equal_xxhash_for_thousands_of_rows(lengths):
    random = np.random.default_rng(0)
    rows = [random.bytes(int(length)) for length in random.choice(lengths, 3000)]
    assert xxh64(pa.array(rows, pa.binary()), 2**64 - 1).tolist() == digests(rows, 2**64 - 1)


def test_null_has_no_hash():
    with pytest.raises(InvariantViolated, match="1 of 2 rows"):
        xxh64(pa.array([b"", None], pa.binary()), 0)


# --- keys -------------------------------------------------------------------------------------------------------------------


@laws
@given(tables(key_types).filter(lambda drawn: drawn[0].fields), st.data())
def test_key_columns_encode_to_the_same_bytes_as_the_key_codec(drawn, data):
    schema, rows = drawn
    codec = KeyCodec(schema)
    found = KeyColumns(schema).encode(columns(data, rows, schema))
    assert found.type == pa.binary()
    assert found.to_pylist() == [codec.encode(row) for row in rows]


@laws
@given(tables(key_types).filter(lambda drawn: drawn[0].fields), st.data())
@pytest.mark.long("half a second", runs_in="ci")
def test_key_columns_decode_keys_with_and_without_trailing_bytes(drawn, data):
    schema, rows = drawn
    codec, twin = KeyCodec(schema), KeyColumns(schema)
    keys = [codec.encode(row) for row in rows]
    stored = pa.array([b"before", *keys], pa.binary())[1:]
    decoded = twin.decode(stored)
    assert [column.type for column in decoded] == [arrow_type(f.type) for f in schema.fields]
    assert twin.encode(decoded).equals(stored)
    found = python_rows(pa.table(decoded, names=schema.names), schema, len(keys))
    assert same(found, [codec.decode(key) for key in keys])
    rests = [data.draw(st.binary(max_size=12)) for _ in keys]
    again, sizes = twin.decode_prefix(pa.array([k + r for k, r in zip(keys, rests, strict=True)], pa.binary()))
    assert sizes.tolist() == [len(key) for key in keys]
    assert twin.encode(again).equals(stored)


@laws
@given(tables(key_types).filter(lambda drawn: drawn[0].fields and drawn[1]), st.data())
@pytest.mark.long("half a second", runs_in="ci")
def test_damaged_keys_are_refused_as_by_the_codec(drawn, data):
    schema, rows = drawn
    twin = KeyColumns(schema)
    same_for_damaged(
        KeyCodec(schema), lambda stored: pa.table(twin.decode(stored), names=schema.names), schema, rows, data
    )


def same_for_damaged(codec, decode, schema, rows, data):
    """One of the encoded rows is damaged: both decoders return the same, or both refuse it by the same error."""
    stored = [codec.encode(row) for row in rows]
    at = data.draw(st.integers(0, len(stored) - 1))
    stored[at] = damaged_bytes(data, stored[at])
    try:
        expected = [codec.decode(row) for row in stored]
    except (CorruptFile, UnsupportedFormat) as error:
        with pytest.raises(type(error)) as raised:
            decode(pa.array(stored, pa.binary()))
        assert str(raised.value) == str(error)
    else:
        assert same(python_rows(decode(pa.array(stored, pa.binary())), schema, len(stored)), expected)


@laws
@given(tables(key_types).filter(lambda drawn: drawn[0].fields), st.integers(1, 32_768), st.data())
@pytest.mark.long("half a second", runs_in="ci")
def test_keys_have_the_key_groups_of_the_hasher(drawn, max_parallelism, data):
    schema, rows = drawn
    arrays = [pa.array([row[i] for row in rows], arrow_type(f.type)) for i, f in enumerate(schema.fields)]
    expected = [key_group(row, schema, max_parallelism) for row in rows]
    assert key_groups(arrays, schema, max_parallelism).tolist() == expected


def test_many_keys_at_once_are_encoded_as_one_by_one():
    """Floats that are equal but for their bytes, zero bytes, nulls, and all widths, in batches that NumPy's loops unroll."""
    schema = schema_of("double", "float", "string", "binary", "decimal(38,0)", "timestamp", "boolean", "byte")
    random = np.random.default_rng(0)
    special = [0.0, -0.0, math.nan, -math.nan, math.inf, -math.inf, 5e-324, -1.5]
    rows = [
        (
            special[i % 8],
            special[i // 8 % 8],
            "a\0b"[: i % 4],
            random.bytes(i % 5) + b"\0\1\xff"[: i % 4],
            Decimal((-1) ** i * 7 ** (i % 45)),
            datetime(1, 1, 1 + i % 28, tzinfo=UTC),
            i % 3 == 0,
            i % 256 - 128,
        )
        for i in range(1000)
    ]
    arrays = [pa.array([row[i] for row in rows], arrow_type(f.type)) for i, f in enumerate(schema.fields)]
    codec, encode = KeyCodec(schema), KeyColumns(schema).encode
    assert encode(arrays).to_pylist() == [codec.encode(row) for row in rows]
    nulls = random.random((8, 1000)) < 0.1
    some = encode([masked(a, null) for a, null in zip(arrays, nulls, strict=True)])
    assert some.to_pylist() == [codec.encode(row) for row in masked_rows(rows, nulls)]
    decoded = KeyColumns(schema).decode(some)
    assert encode(decoded).equals(some)
    expected = [key_group(row, schema, 128) for row in masked_rows(rows, nulls)]
    assert key_groups(decoded, schema, 128).tolist() == expected


def test_equal_values_of_compatible_arrow_types_encode_to_equal_keys():
    encode = KeyColumns(schema_of("long", "timestamp", "string")).encode
    at = datetime(2024, 5, 1, 12, tzinfo=UTC)
    plain = encode([one("long", 7, None), one("timestamp", at, None), one("string", "a", None)])
    zoned = pa.array([at, None], pa.timestamp("us", "Asia/Tokyo"))
    text = pa.array(["a", None], pa.large_string())
    assert encode([pa.array([7, None], pa.uint32()), zoned, text]).equals(plain)
    assert encode([pa.array([7, None], pa.int8()), zoned, text.dictionary_encode()]).equals(plain)


@pytest.mark.parametrize(
    "data_type", [*ATOMIC, "decimal(9,2)", "decimal(20,2)", array("long"), struct(["long"])], ids=str
)
def test_a_column_of_arrow_type_null_encodes_as_nulls(data_type):
    schema = schema_of("long", data_type)
    found = KeyColumns(schema).encode([one("long", 1, 2), pa.nulls(2)])
    assert found.to_pylist() == [KeyCodec(schema).encode((i, None)) for i in (1, 2)]
    found = RowColumns("x", schema, 1).encode(pa.table([one("long", 1, 2), pa.nulls(2)], names=schema.names))
    assert found.to_pylist() == [RowCodec("x", schema, 1).encode((i, None)) for i in (1, 2)]


@pytest.mark.parametrize(
    "data_type, array, says",
    [
        (
            "long",
            pa.array([1.0]),
            r"key column 'c0': expected bigint \(Arrow int64\), found Arrow double; cast the column",
        ),
        ("integer", pa.array([1]), "found Arrow int64"),
        ("long", pa.array([1], pa.uint64()), "found Arrow uint64"),
        ("string", pa.array([b"a"]), "found Arrow binary"),
        ("timestamp", pa.array([0], pa.timestamp("us")), r"found Arrow timestamp\[us\]"),
        ("timestamp", pa.array([0], pa.timestamp("ms", "UTC")), r"found Arrow timestamp\[ms, tz=UTC\]"),
        ("timestamp_ntz", pa.array([0], pa.timestamp("us", "UTC")), r"found Arrow timestamp\[us, tz=UTC\]"),
        ("decimal(9,2)", pa.array([Decimal("1.23")], pa.decimal128(9, 3)), r"found Arrow decimal128\(9, 3\)"),
        (array("long"), pa.array([["a"]]), "found Arrow list"),
        (struct(["long"]), pa.array([{"c1": 1}]), "found Arrow struct"),
        ("date", pa.array([2**31 - 1], pa.int32()).cast(pa.date32()), "does not fit: 2147483647 is not in -719162"),
        ("timestamp", pa.array([-(2**62)], pa.timestamp("us", "UTC")), "does not fit: -4611686018427387904"),
        (
            array("date"),
            pa.array([[-(2**31)]], pa.list_(pa.int32())).cast(pa.list_(pa.date32())),
            "found a value that does not fit",
        ),
        (
            "string",
            pa.array([b"\xff"]).view(pa.string()),
            "'c0': expected string, found a value that does not fit: Invalid UTF8",
        ),
        (
            "decimal(3,0)",
            pa.Array.from_buffers(pa.decimal128(3, 0), 1, pa.array([Decimal(1000)], pa.decimal128(4, 0)).buffers()),
            "1000 does not fit in precision",
        ),
    ],
    ids=str,
)
def test_columns_with_wrong_types_or_unfit_values_are_refused(data_type, array, says):
    schema = schema_of(data_type)
    with pytest.raises(StateTypeError, match=says):
        KeyColumns(schema).encode([array])
    with pytest.raises(StateTypeError, match=says.replace("key column", "state 'x' field")):
        RowColumns("x", schema, 1).encode(pa.table([array], names=["c0"]))


def test_keys_of_the_wrong_shape_are_refused():
    encode = KeyColumns(schema_of("long", "string", nullable=False), what="user key").encode
    with pytest.raises(StateTypeError, match=r"user key: expected 2 columns \(c0, c1\), found 1"):
        encode([one("long", 1)])
    with pytest.raises(StateTypeError, match="user key: expected columns of equal length, found 1, 2 rows"):
        encode([one("long", 1), one("string", "", "")])
    with pytest.raises(StateTypeError, match=r"user key column 'c1': expected string, found null in row 1 \(the field"):
        encode([one("long", 1, 2), one("string", "", None)])
    with pytest.raises(KeyTypeError, match="key column 'c0'"):
        KeyColumns(schema_of(mapping("long", "long", True)))


# --- rows -------------------------------------------------------------------------------------------------------------------


def python_rows(batch, schema, count):
    """As ``RowCodec.decode`` gives them, through the values of single-field rows of the codec's own kind."""
    names = schema.names
    arrays = {name: batch.column(name).to_pylist() for name in names}
    return [tuple(plain(f.type.to_json(), arrays[f.name][i]) for f in schema.fields) for i in range(count)]


def plain(of, value):
    """A value of Arrow as the codec would give it."""
    if value is None:
        return None
    if isinstance(of, dict):
        if of["type"] == "array":
            return [plain(of["elementType"], item) for item in value]
        if of["type"] == "map":
            return {plain(of["keyType"], k): plain(of["valueType"], v) for k, v in value}
        return tuple(plain(f["type"], value[f["name"]]) for f in of["fields"])
    return value.replace(tzinfo=None) if isinstance(value, datetime) else value


@laws
@given(tables(all_types | atomic), st.integers(0, 255), st.data())
def test_row_columns_encode_to_the_same_bytes_as_the_row_codec(drawn, version, data):
    schema, rows = drawn
    codec, twin = RowCodec("x", schema, version), RowColumns("x", schema, version)
    table = table_of(columns(data, rows, schema), schema, len(rows))
    encoded = twin.encode(table)
    assert encoded.type == pa.binary()
    assert encoded.to_pylist() == [codec.encode(row) for row in rows]
    decoded = twin.decode(encoded)
    assert decoded.schema == twin.arrow_schema and decoded.num_rows == len(rows)
    decoded.validate(full=True)
    assert same(python_rows(decoded, schema, len(rows)), list(map(tuple, rows)))
    assert twin.encode(decoded).equals(encoded)


@laws
@given(tables(all_types | atomic), st.data())
def test_rows_that_are_absent_have_only_nulls(drawn, data):
    schema, rows = drawn
    codec, twin = RowCodec("x", schema, 1), RowColumns("x", schema, 1)
    stored = [None if data.draw(st.booleans()) else codec.encode(row) for row in rows]
    found = twin.decode(pa.array([b"before", *stored], pa.binary())[1:])
    absent = (None,) * len(schema.fields)
    expected = [absent if raw is None else tuple(row) for raw, row in zip(stored, rows, strict=True)]
    assert same(python_rows(found, schema, len(rows)), expected)


@laws
@given(tables(all_types | atomic).filter(lambda drawn: drawn[1]), st.data())
@pytest.mark.long("half a second", runs_in="ci")
def test_damaged_rows_are_refused_as_by_the_codec(drawn, data):
    schema, rows = drawn
    same_for_damaged(RowCodec("x", schema, 1), RowColumns("x", schema, 1).decode, schema, rows, data)


def test_many_rows_at_once_are_encoded_as_one_by_one():
    schema = schema_of(
        "string", "long", "boolean", "decimal(38,2)", "binary", "decimal(18,0)", "date", "double", "byte"
    )
    random = np.random.default_rng(0)
    rows = [
        (
            "é" * (i % 7),
            i << i % 50,
            i % 2 == 0,
            Decimal((-1) ** i * 7 ** (i % 45)).scaleb(-2),
            random.bytes(i % 300),
            Decimal((-1) ** i * i),
            date.fromordinal(1 + i),
            i / 3,
            i % 128,
        )
        for i in range(1000)
    ]
    codec, twin = RowCodec("x", schema, 1), RowColumns("x", schema, 1)
    arrays = [pa.array([row[i] for row in rows], t) for i, t in enumerate(twin.arrow_schema.types)]
    encoded = twin.encode(pa.table(arrays, schema=twin.arrow_schema))
    assert encoded.to_pylist() == [codec.encode(row) for row in rows]
    assert python_rows(twin.decode(encoded), schema, 1000) == rows
    nulls = random.random((9, 1000)) < 0.1
    some = masked_rows(rows, nulls)
    encoded = twin.encode(pa.table([masked(*pair) for pair in zip(arrays, nulls, strict=True)], names=schema.names))
    assert encoded.to_pylist() == [codec.encode(row) for row in some]
    assert python_rows(twin.decode(encoded), schema, 997) == some


def test_each_spark_type_maps_to_its_arrow_type():
    types = ["boolean", "byte", "short", "integer", "long", "float", "double", "string", "binary", "date"]
    types += ["timestamp", "timestamp_ntz", "decimal(9,2)"]
    found = RowColumns("x", parse_struct(struct(types, [False])), 1).arrow_schema
    assert found.types == [
        *[pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.string()],
        *[pa.binary(), pa.date32(), pa.timestamp("us", "UTC"), pa.timestamp("us"), pa.decimal128(9, 2)],
    ]
    assert [f.nullable for f in found] == [False] + [True] * 12


AS_ROW = "state 'x': can't decode .* stored bytes as struct<c0: "


@pytest.mark.parametrize(
    "types, damaged, why",
    [
        (["long"], b"", r"unknown format \(no bytes\)"),
        (["long"], b"\0\1\0" + bytes(8), "unknown format 00, expected 1"),
        (["long"], b"\1\2\0" + bytes(8), "it has schema version 02, expected 01"),
        (["long"], b"\1\1\0" + bytes(7), "requires"),
        (["long"], b"\1\1\0" + bytes(9), "requires a buffer of 11 bytes"),
        (["long"], b"\1\1\1" + bytes(8), "null bitmap marks"),
        (["long"], b"\1\1\2" + bytes(8), "null bitmap marks"),
        (["string"], b"\1\1\0", "requires"),
        (["string"], b"\1\1\1", "null bitmap marks"),
        (["string"], b"\1\1\0\1\0\0\0", "it needs 8 bytes"),
        (["string"], b"\1\1\0\xff\xff\xff\xff", "it needs 4294967302 bytes"),
        (["string"], b"\1\1\0\1\0\0\0ab", "it needs 8 bytes"),
        (["string"], b"\1\1\0\1\0\0\0\xff", "utf-8"),
        (["long", "string"], b"\1\1\2" + bytes(9), "it needs 11 bytes"),
        (["date"], b"\1\1\0\xff\xff\xff\x7f", "greater than maximum"),
        (["timestamp"], b"\1\1\0" + b"\xff" * 7 + b"\x7f", "out of range"),
        (["decimal(3,1)"], b"\1\1\0\xe8\3" + bytes(6), "1000 has more than 3 digits"),
        (["decimal(19,0)"], b"\1\1\0\2\0\0\0\0\1", "not in its shortest form"),
        (["decimal(19,0)"], b"\1\1\0\2\0\0\0\xff\x80", "not in its shortest form"),
        (["decimal(19,0)"], b"\1\1\0\0\0\0\0", "not in its shortest form"),
        (["decimal(38,0)"], b"\1\1\0\x11\0\0\0\1" + bytes(15) + b"\5", "more than 38 digits"),
        (["decimal(38,0)"], b"\1\1\0\x10\0\0\0\x7f" + bytes(15), "more than 38 digits"),
        ([array("long")], b"\1\1\0\4\0\0\0\1\0\0\0", "cut off"),
        ([array("byte")], bytes.fromhex("010100 06000000 01000000 0200"), AS_ROW),  # a bit behind the last item
        ([array("byte", False)], bytes.fromhex("010100 06000000 01000000 0100"), AS_ROW),
        ([array("string")], bytes.fromhex("010100 04000000 ffffffff"), AS_ROW),
        ([mapping("byte", "byte", True)], bytes.fromhex("010100 0c000000 010000000001 0100000000 0000"), AS_ROW),
        ([mapping("byte", "byte", True)], bytes.fromhex("010100 0d000000 010000000001 02000000000101"), AS_ROW),
        ([struct(["byte"])], bytes.fromhex("010100 03000000 000100"), AS_ROW),
    ],
    ids=str,
)
def test_corrupt_rows_raise_the_same_error_as_the_row_codec(types, damaged, why):
    schema = parse_struct(struct(types, [False]))
    with pytest.raises(CorruptFile, match=why) as expected:
        RowCodec("x", schema, 1).decode(damaged)
    some = {"string": "abc", "date": date(2024, 5, 1), "timestamp": datetime(2024, 5, 1), "array<string>": ["abc"]}
    some |= {"array<bigint>": [1], "array<tinyint>": [1], "map<tinyint, tinyint>": {1: 1}, "struct<c0: tinyint>": (1,)}
    sound = RowCodec("x", schema, 1).encode([some.get(str(f.type), 1) for f in schema.fields])
    with pytest.raises(CorruptFile) as found:
        RowColumns("x", schema, 1).decode(pa.array([None, sound, damaged, sound], pa.binary()))
    assert str(found.value) == str(expected.value)


def test_columns_are_matched_by_name():
    twin = RowColumns("x", schema_of("long", "string"), 1)
    right = pa.table({"c0": [1], "c1": ["a"]})
    assert twin.encode(right.select(["c1", "c0"])).equals(twin.encode(right))
    assert twin.encode(right.to_batches()[0]).equals(twin.encode(right))


@pytest.mark.parametrize(
    "table, says",
    [
        (pa.table({"c0": [1]}), "state 'x': expected the fields c0, c1; found c0"),
        (pa.table({"c0": [1], "c1": ["a"], "c2": [1]}), "found c0, c1, c2"),
        (pa.table([[1], ["a"], ["a"]], names=["c0", "c1", "c1"]), "found c0, c1, c1"),
        (
            pa.table({"c0": [1, 2, None], "c1": ["a"] * 3}),
            "field 'c0': expected bigint, found null in row 2 .the field is not",
        ),
        (pa.table({"c0": pa.nulls(1), "c1": ["a"]}), "field 'c0': expected bigint, found null in row 0"),
    ],
    ids=str,
)
def test_tables_of_another_shape_are_refused(table, says):
    with pytest.raises(StateTypeError, match=says):
        RowColumns("x", parse_struct(struct(["long", "string"], [False])), 1).encode(table)


def test_values_inside_nested_types_are_checked():
    twin = RowColumns("x", schema_of(mapping(struct(["long"]), array("timestamp", False), True)), 1)
    keyed = pa.map_(pa.struct({"c0": pa.int64()}), pa.list_(pa.timestamp("us", "Asia/Tokyo")))
    at = datetime(2024, 5, 1, tzinfo=UTC)

    def encode(*pairs):
        return twin.encode(pa.table({"c0": pa.array([pairs], keyed)})).to_pylist()

    codec = RowCodec("x", twin.schema, 1)
    assert encode(({"c0": 1}, [at]), ({"c0": 2}, None)) == [codec.encode(({(1,): [at], (2,): None},))]
    with pytest.raises(StateTypeError, match=r"state 'x' field 'c0': .*a map has the same key twice"):
        encode(({"c0": 1}, [at]), ({"c0": 1}, [at]))
    with pytest.raises(StateTypeError, match=r"field 'c0.value\[0\]': expected timestamp, found NoneType"):
        encode(({"c0": 1}, [None]))


def test_an_interval_type_and_schema_version_256_are_refused():
    with pytest.raises(StateSchemaError, match="interval"):
        RowColumns("x", schema_of("interval day"), 1)
    with pytest.raises(StateSchemaError, match="256"):
        RowColumns("x", schema_of("long"), 256)
