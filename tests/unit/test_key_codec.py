"""Key bytes: their order is Spark's (taken from ``ORDER BY c0 ASC NULLS FIRST`` of Spark 4.3.0), their layout is durable."""

import math
from datetime import date, datetime
from decimal import Decimal
from itertools import pairwise

import pytest

from state_backend.formats.key_codec import KeyCodec
from state_backend.formats.spark_hash import key_group
from state_backend.formats.types import names_and_types, parse_struct, with_nulls_of
from state_backend.values.errors import CorruptFile, KeyTypeError, StateTypeError
from tests.support.schema_json import array, field, mapping, struct, struct_of

D, INF, NAN = Decimal, math.inf, math.nan


def schema(*types):
    return parse_struct(struct(**{f"c{i}": of for i, of in enumerate(types)}))


# fmt: off
ASCENDING_IN_SPARK = [
    ("boolean", [
        None, False, True,
    ]),
    ("double", [
        None, -INF, -987112318.6209034, -0.8504077426784749, -5e-324, -0.0, 5e-324, 1e-40, 184845723.1742978,
        333704817.68897843, INF, NAN,
    ]),
    ("string", [
        None, "", "\x00z\xe9\u65e5y\xe9zb", "\u0001", "\x01\x01\x00\u65e5\uffffy\U0001f600", "\u0001y",
        "a\x01yyz\U0010ffff\U0001f600", "x\uffff", "y\x00ax\x00\xe9y", "y\u65e5\xe9xx\U0001f600x",
        "\xe9x\xe9bx\x01\U0010ffff", "\u65e5z\x00", "\uffff  ", "\U0001f600",
        "\U0001f600\xe9\u65e5\U0010ffff\u65e5bb", "\U0010ffff\uffff\u65e5\u65e5\xe9aaby",
        "\U0010ffff\U0010ffff", "\U0010ffff\U0010ffffxa\x01\x01\u65e5b",
    ]),
    ("binary", [
        None, b'', b'\x00\xdd\x01\x00\xff\x00\x00\xff', b'\x00\xff\x8b\x00',
        b'\x01\x00\xff\xff\x00\xff\xff\x01', b'\x01\x01\x01\x00\x01\xff\x00\x01',
        b'\x01\x01\\\x00\x01\x01\xff}', b'\x01z\xff\xff\x00>\xff\x01', b'\x01\xff\x01\x00\x00\xf0\xff\xff',
        b'-', b'Z\x00\x01\x04', b'^\x01\xff\x01\x00\x00\xac\x00', b'\xfb\xfd\xff\x00', b'\xffT',
        b'\xff\xa3\x00\xff\x01\x01\x00\x01', b'\xff\xff\xff', b'\xff\xff\xff\x9a',
    ]),
    ("decimal(38,10)", [
        None, D("-54707196410101355327274.1311759088"), D("-319206886038.2597024251"), D("-0.0005229944"),
        D("-0.0000403462"), D("0.0072590891"), D("12365509381310305.4424946716"),
        D("756990303890808017093330.9872370613"), D("5233228762787972146344297.2840164314"),
    ]),
    (array("double"), [
        None, [], [None, 1.5], [None, INF, 0.0], [-1.5, -416577331.69856524, INF], [-1.5, INF, NAN],
        [-5e-324, 1.5], [-0.0, -5e-324, INF], [-0.0, INF, NAN], [5e-324, 1.5, 5e-324], [5e-324, NAN],
        [INF, 0.0, NAN], [NAN, None, 0.0], [NAN, -1.5, 5e-324], [NAN, NAN, 1e-40], [NAN, NAN, 1.5],
    ]),
    (array(array("integer")), [
        None, [], [None, [-1, 2147483647, 0]], [[], [2147483647], None], [[None, 0], [2147483647], [0, -1]],
        [[None, 1, -2147483648]], [[None, 269]], [[-2147483648, 1449022198]], [[-244], [1, None]],
        [[0], [-2132760888, 36], [1]], [[0], [1], None], [[0, 1761614223, 211], [2147483647]],
        [[1], [0], [0, 80, 2147483647]], [[16], None, [-210]], [[282], [0], None], [[307887531, 2147483647]],
        [[2147483647, 2147483647, -2147483648]], [[2147483647, 2147483647, -140]],
    ]),
    (struct(x="long", y="string", z=array("boolean")), [
        None, (None, None, None), (None, "\x00\x01", [False, True, True]), (None, "x\x01ba\x01\u65e5b", None),
        (None, "y\u65e5", [False, True, True]), (None, "\uffffy\u65e5", [None]),
        (-246, "\u65e5\U0010ffff", None), (-1, "\x00\x01", [None]), (-1, "xy\x01 \xe9z\U0001f600", [False]),
        (-1, "\xe9", [True, False, True]), (-1, "\uffff", None), (-1, "\U0001f600", [True, True, True]),
        (0, "\x01\xe9", [True]), (0, "\xe9", [False]), (1, "\x00\x01", []), (1, "\U0001f600\x01", None),
        (9223372036854775807, "\U0001f600", []), (9223372036854775807, "\U0010ffff", []),
    ]),
    (array(struct(x="decimal(38,10)")), [
        None, [], [None, (D("-0.0569345951"),)], [(None,), (D("0E-10"),)],
        [(D("-922337203.6854775808"),), None], [(D("-86.3922955335"),), None, None],
        [(D("0E-10"),), (None,), (D("1E-10"),)], [(D("1E-10"),)], [(D("1E-10"),), (None,), (D("0E-10"),)],
        [(D("1.28E-8"),), (D("0E-10"),), None], [(D("1.28E-8"),), (D("1E-10"),), (None,)],
        [(D("1.28E-8"),), (D("2.55E-8"),)], [(D("2.55E-8"),), None], [(D("2.55E-8"),), (None,), None],
        [(D("6.459E-7"),), (D("0E-10"),)], [(D("922337203.6854775808"),), (None,)],
        [(D("492451910878.3416479276"),)], [(D("52102577606686.9655751864"),)],
    ]),
]

GOLDEN = [
    ("boolean", True, "0101"),
    ("byte", -1, "017f"),
    ("short", 1, "018001"),
    ("integer", -2, "017ffffffe"),
    ("long", 12345, "018000000000003039"),
    ("float", 1.5, "01bfc00000"),
    ("double", -1.5, "014007ffffffffffff"),
    ("double", -0.0, "018000000000000000"),
    ("double", NAN, "01fff8000000000000"),
    ("float", NAN, "01ffc00000"),
    ("string", "aé\0", "0161c3a900ff0001"),
    ("binary", b"\0\1", "0100ff010001"),
    ("date", date(1970, 1, 2), "0180000001"),
    ("timestamp", datetime(1970, 1, 1, 0, 0, 1), "0180000000000f4240"),
    ("timestamp_ntz", datetime(1969, 12, 31, 23, 59, 59, 999999), "017fffffffffffffff"),
    ("decimal(5,2)", D("1.5"), "018000000000000096"),
    ("decimal(19,0)", D(-1), "017fffffffffffffffffffffffffffffff"),
    (array("byte"), [1, None], "010101810100" + "00"),
    (struct(x="byte", y="string"), (None, "b"), "010001620001"),
    ("long", None, "00"),
]
# fmt: on


def same(a, b):
    return repr(a) == repr(b)


@pytest.mark.parametrize(("of", "values"), ASCENDING_IN_SPARK)
def test_the_byte_order_of_keys_is_the_sort_order_of_spark(of, values):
    codec = KeyCodec(schema(of))
    encoded = [codec.encode((value,)) for value in values]
    assert all(a < b for a, b in pairwise(encoded))
    assert [codec.encode(codec.decode(data)) for data in encoded] == encoded


@pytest.mark.parametrize(("of", "value", "expected"), GOLDEN)
def test_each_type_of_key_keeps_its_bytes(of, value, expected):
    codec = KeyCodec(schema(of))
    assert codec.encode((value,)).hex() == expected
    found = codec.decode(bytes.fromhex(expected))
    assert found == (value,) if isinstance(value, D) else same(found, (0.0,) if value == 0 else (value,))


@pytest.mark.parametrize(
    ("of", "why"),
    [
        (mapping("string", "long"), "map<string, bigint>"),
        ("variant", "variant"),
        ("interval day to second", "interval day to second"),
        ("interval year to month", "interval year to month"),
        ("string collate UNICODE_CI", "string collate UNICODE_CI"),
        ("varchar(3)", r"varchar\(3\)"),
        ("void", "void"),
    ],
)
def test_key_columns_of_unsupported_types_are_refused(of, why):
    with pytest.raises(KeyTypeError, match=f"key column 'c0': {why} can't be a key: ."):
        KeyCodec(schema(of))
    with pytest.raises(KeyTypeError, match=r"key column 'c0\.x\.element': "):
        KeyCodec(schema(struct(x=array(of))))


def test_refuses_collations_that_spark_hides_in_metadata():
    json = struct_of(field("a", "string", __COLLATIONS={"a": "icu.UNICODE_CI"}))
    with pytest.raises(KeyTypeError, match=r"key column 'a': string collate icu\.UNICODE_CI can't be a key"):
        KeyCodec(parse_struct(json))
    json["fields"][0] |= {"type": array("string"), "metadata": {"__COLLATIONS": {"a.element": "spark.UTF8_LCASE"}}}
    with pytest.raises(KeyTypeError, match=r"key column 'a\.element'"):
        KeyCodec(parse_struct(json), what="key")


def test_refuses_a_key_without_columns():
    with pytest.raises(KeyTypeError, match="expected at least one column, found none"):
        KeyCodec(schema())


@pytest.mark.parametrize(
    ("types", "values", "message"),
    [
        (["string"], (b"a",), r"key column 'c0': expected string, found bytes b'a'"),
        (["string"], ("\ud800",), r"key column 'c0': expected string, found str .*surrogate"),
        (["string"], 5, r"key: expected struct<c0: string>, found int 5"),
        (["string"], "ab", r"key has 1 field \(c0\); got 2 values"),
        (["string"], ("a", "b"), r"key has 1 field \(c0\); got 2 values"),
        (["long"], (True,), r"key column 'c0': expected bigint, found bool True"),
        (["long"], (2**63,), r"key column 'c0': expected bigint, found int 9223372036854775808 \(out of range\)"),
        (["long", array("date")], (1, [date(2013, 1, 1), 5]), r"key column 'c1\[1\]': expected date, found int 5"),
        (["decimal(5,2)"], (D("1000"),), r"key column 'c0': expected decimal\(5,2\), found Decimal .*out of range"),
    ],
)
def test_key_values_of_a_wrong_type_or_range_are_refused(types, values, message):
    with pytest.raises(StateTypeError, match=message):
        KeyCodec(schema(*types)).encode(values)


@pytest.mark.parametrize(
    ("of", "data"),
    [
        ("long", ""),
        ("long", "02"),
        ("long", "0180"),
        ("long", "01800000000000000000"),
        ("boolean", "0102"),
        ("double", "0180"),
        ("string", "0161"),
        ("string", "01006100" + "01"),
        ("string", "01ff0001"),
        ("date", "01ffffffff"),
        ("timestamp", "01ffffffffffffffff"),
        (array("byte"), "010101"),
        (array("byte"), "0101018102"),
        (struct(x="byte"), "01"),
    ],
)
def test_invalid_key_bytes_raise_corrupt_file(of, data):
    with pytest.raises(CorruptFile, match=r"key: can't decode .* bytes as struct<c0: "):
        KeyCodec(schema(of)).decode(bytes.fromhex(data))


def test_nested_structs_come_from_the_factory():
    codec = KeyCodec(
        schema(struct(x="long")), struct_factory=lambda names: lambda values: dict(zip(names, values, strict=True))
    )
    assert codec.decode(codec.encode(({"x": 1},))) == ({"x": 1},)


def one(data_type, nullable=True, key="k", **metadata):
    return parse_struct(struct_of(field(key, data_type, nullable, **metadata)))


INNER = struct(a=array("string"))
INNER_NOT_NULL = struct_of(field("a", array("string", False), False, comment="x"))


@pytest.mark.parametrize(
    ("first", "second", "both", "value"),
    [
        (one("long"), one("long", comment="who"), one("long"), 7),
        (one("long"), one("long", nullable=False), one("long"), 7),
        (one("long", nullable=False), one("long"), one("long"), 7),
        (one(array("long")), one(array("long", False)), one(array("long")), [1, 2]),
        (one(INNER), one(INNER_NOT_NULL), one(INNER), (["x", "y"],)),
        (one(INNER_NOT_NULL), one(INNER), one(INNER), (["x", "y"],)),
        (one(INNER_NOT_NULL, False), one(INNER_NOT_NULL, False), one(INNER_NOT_NULL, False), (["x"],)),
    ],
)
def test_comments_and_nullability_do_not_change_key_bytes_or_key_group(first, second, both, value):
    """Neither bytes nor key groups are other ones; what may be null in one of them may be in both together."""
    assert names_and_types(first) == names_and_types(second)
    assert KeyCodec(first).encode((value,)) == KeyCodec(second).encode((value,)) == KeyCodec(both).encode((value,))
    assert key_group((value,), first, 128) == key_group((value,), second, 128)
    assert with_nulls_of(first, second) == both


def test_merging_nullability_keeps_the_comments_of_the_current_schema():
    made = with_nulls_of(one("long", nullable=False, comment="now"), one("long", comment="before"))
    assert made.fields[0].nullable and made.fields[0].metadata == {"comment": "now"}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (one("long"), one("integer")),
        (one("long"), one("long", key="other")),
        (one(array("long")), one(array("integer"))),
        (one(INNER), one(struct(b=array("string")))),
    ],
)
def test_names_and_types_make_another_key(first, second):
    assert names_and_types(first) != names_and_types(second)
