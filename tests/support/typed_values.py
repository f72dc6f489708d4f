"""Strategies of Hypothesis for types of Spark, and for values and keys of these types."""

import math
import struct as binary
from decimal import Context, Decimal

from hypothesis import strategies as st

from state_backend.formats.types import parse_struct
from tests.support.schema_json import array, field, mapping, struct_of

# Time is no law: a loaded machine must not fail a test.
BITS = {"byte": 8, "short": 16, "integer": 32, "long": 64}
ATOMIC = [*BITS, "boolean", "float", "double", "string", "binary", "date", "timestamp", "timestamp_ntz"]
decimals = st.integers(1, 38).flatmap(lambda p: st.integers(0, p).map(lambda s: f"decimal({p},{s})"))
atomic = st.sampled_from(ATOMIC) | decimals


def struct(types, nullables=()):
    nullable = [*nullables, *[True] * len(types)]
    return struct_of(*(field(f"c{i}", t, nullable[i]) for i, t in enumerate(types)))


def structs(of):
    return st.lists(of, max_size=3).flatmap(
        lambda types: st.lists(st.booleans(), max_size=len(types)).map(lambda nullables: struct(types, nullables))
    )


key_types = st.recursive(atomic, lambda of: st.builds(array, of, st.booleans()) | structs(of), max_leaves=4)
map_keys = st.sampled_from([t for t in ATOMIC if t not in ("float", "double")])
all_types = st.recursive(
    atomic,
    lambda of: st.builds(array, of, st.booleans()) | structs(of) | st.builds(mapping, map_keys, of, st.booleans()),
    max_leaves=5,
)


def values(of, nullable=True):
    some = _values(of)
    return st.none() | some if nullable else some


def _values(of):
    if isinstance(of, dict):
        if of["type"] == "array":
            return st.lists(values(of["elementType"], of["containsNull"]), max_size=10)
        if of["type"] == "map":
            pairs = values(of["keyType"], False), values(of["valueType"], of["valueContainsNull"])
            return st.dictionaries(*pairs, max_size=4)
        return st.tuples(*(values(f["type"], f["nullable"]) for f in of["fields"]))
    if of in BITS:
        return st.integers(-(1 << BITS[of] - 1), (1 << BITS[of] - 1) - 1)
    if of.startswith("decimal"):
        precision, scale = map(int, of[8:-1].split(","))
        unscaled = st.integers(-(10**precision) + 1, 10**precision - 1)
        return unscaled.map(lambda u: Decimal(u).scaleb(-scale, Context(prec=80)))
    return {
        "boolean": st.booleans(),
        "float": st.floats(width=32),
        "double": st.floats(),
        "string": st.text(st.characters(codec="utf-8"), max_size=6) | st.text("\0\1a\uffff", max_size=4),
        "binary": st.binary(max_size=6) | st.text("\0\1\xff", max_size=4).map(lambda s: s.encode("latin-1")),
        "date": st.dates(),
        "timestamp": st.datetimes(),
        "timestamp_ntz": st.datetimes(),
    }[of]


def rows(types, count=1):
    """(schema, that many rows of it)"""
    return structs(types).flatmap(
        lambda json: st.tuples(st.just(parse_struct(json)), *[_values(json) for _ in range(count)])
    )


def key_rows(count=1):
    return rows(key_types, count).filter(lambda drawn: drawn[0].fields)


def sort_key(value):
    """Spark's ascending order, nulls first, written independently of the codec: something that Python compares."""
    if value is None:
        return (0,)
    if isinstance(value, float):
        return (1, math.isnan(value), 0.0 if math.isnan(value) else value)
    if isinstance(value, str):
        return (1, value.encode())
    if isinstance(value, list | tuple):
        return (1, tuple(map(sort_key, value)))
    return (1, value)


def same(a, b):
    """Equal, a NaN to a NaN, and of the same type."""
    if isinstance(a, float) and isinstance(b, float):
        return binary.pack("<d", a) == binary.pack("<d", b) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return type(a) is type(b) and a == b
