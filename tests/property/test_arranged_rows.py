"""Rows that a task puts in order, against the plain sort of the test kit: equal rows in equal order, however they come and spill."""

import math
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from random import Random

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pyspark.sql import types as t

from cairn.rows.arrange_rows import plan_arrangement
from cairn.rows.local_rows import LocalRows, route_locally
from cairn.rows.routing import INITIAL, INPUT, KEY_GROUP, KIND, PART, TICK, flat_columns
from cairn.rows.sort_rows import sorted_batches, total_order
from state_backend.formats.spark_hash import key_hasher
from state_backend.formats.types import parse_struct
from state_backend.values.errors import UsageError
from state_backend.values.zones import zone_of

laws = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
GROUPS = 5
# Few values of each type, so that rows tie; among them what sorts at the ends, or as something else.
TEXTS = [
    "",
    "\0",
    "a",
    "a\0",
    "b",
    "äö",
    "eight888",
    "eight888\0",
    "eight888more",
    *("x" * n for n in (15, 16, 17, 40)),
]
VALUES = {
    t.BooleanType(): [False, True],
    t.ByteType(): [-128, -1, 0, 127],
    t.IntegerType(): [-(2**31), 0, 5, 2**31 - 1],
    t.LongType(): [-(2**63), -(2**47) - 1, -1, 0, 1, 2**47, 2**63 - 1],
    t.FloatType(): [-math.inf, -1.5, -0.0, 0.0, 1.5, math.inf, math.nan],
    t.DoubleType(): [-math.inf, -5e-324, -0.0, 0.0, 1e300, math.inf, math.nan],
    t.DecimalType(38, 2): [Decimal(n) / 100 for n in (-(10**37), -(2**64), -1, 0, 1, 2**63, 2**64, 10**37)],
    t.StringType(): TEXTS,
    t.BinaryType(): [*map(str.encode, TEXTS), b"\xff", b"\x80" * 9, b"\x00" * 17],
    t.DateType(): [date(1, 1, 1), date(1969, 12, 31), date(2024, 2, 29)],
    t.TimestampType(): [datetime(1960, 1, 1, tzinfo=UTC), datetime(2024, 11, 3, 5, 30, tzinfo=UTC)],
    t.TimestampNTZType(): [datetime(1960, 1, 1), datetime(2024, 11, 3, 5, 30, 0, 1)],
    t.DayTimeIntervalType(): [timedelta(microseconds=-1), timedelta(0), timedelta(days=3)],
}
KEYS = [kind for kind in VALUES if not isinstance(kind, t.DayTimeIntervalType)]
TYPES = st.sampled_from([*VALUES, t.NullType()])


def rows_of(schema, most):
    cells = [st.sampled_from([None, *VALUES.get(f.dataType, [])]) for f in schema]
    return st.lists(st.tuples(*cells), max_size=most)


@st.composite
def cases(draw):
    keys = draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=2))
    others = draw(st.lists(TYPES, max_size=3))
    names = draw(st.permutations([*(f"k{n}" for n in range(len(keys))), *(f"v{n}" for n in range(len(others)))]))
    types = {f"k{n}": kind for n, kind in enumerate(keys)} | {f"v{n}": kind for n, kind in enumerate(others)}
    schema = t.StructType([t.StructField(name, types[name]) for name in names])
    key = [f"k{n}" for n in range(len(keys))]
    order_by = draw(st.lists(st.sampled_from(names), max_size=2, unique=True))
    initial = None
    if draw(st.booleans()):
        fields = [t.StructField(name, types[name]) for name in key]
        initial_schema = t.StructType([*fields, t.StructField("s", draw(TYPES))])
        initial = initial_schema, draw(rows_of(initial_schema, 6))
    return schema, draw(rows_of(schema, 40)), initial, key, order_by


def flat(rows, kind, key, other, places):
    """As Spark brings them: key group, part, kind, and the columns of both kinds side by side."""
    count = len(rows.table)
    group_of = key_hasher(parse_struct(t.StructType([rows.schema[name] for name in key]).jsonValue()))
    # Spark takes 0.0 and -0.0 for one before it hashes.
    keys = zip(
        *[[v + 0.0 if isinstance(v, float) else v for v in rows.table[name].to_pylist()] for name in key], strict=True
    )
    columns = {
        KEY_GROUP: pa.array([group_of(row) % GROUPS for row in keys], pa.int32()),
        PART: pa.nulls(count, pa.binary()),
        KIND: pa.array([kind] * count, pa.int8()),
    }
    columns |= dict(zip(flat_columns(kind, len(rows.schema)), rows.table.columns, strict=True))
    if other is not None:
        names = flat_columns(INITIAL + INPUT - kind, len(other.schema))
        columns |= {name: pa.nulls(count, f.type) for name, f in zip(names, other.table.schema, strict=True)}
    table = pa.table(columns)
    return table.select(sorted(table.column_names)).take(pa.array(places(count), pa.int64()))


# Rows that differ in the sign of a zero only: few random rows do.
ZEROS = (
    t.StructType([t.StructField("k0", t.LongType()), t.StructField("v0", t.DoubleType())]),
    [(1, 0.0), (1, -0.0)] * 10,
    None,
    ["k0"],
    [],
)


@laws
@given(
    case=cases(),
    random_=st.randoms(use_true_random=False),
    most_bytes=st.sampled_from([1, 300, 1 << 20]),
    chunk_rows=st.integers(1, 50),
)
@example(case=ZEROS, random_=Random(7), most_bytes=1 << 20, chunk_rows=3)
@pytest.mark.long("half a second", runs_in="ci")
def test_arranged_rows_equal_a_plain_sort_in_any_input_order(tmp_path_factory, case, random_, most_bytes, chunk_rows):
    schema, rows, initial, key, order_by = case
    zone = zone_of("UTC")
    rows = LocalRows(rows, schema, zone)
    initial = None if initial is None else LocalRows(initial[1], initial[0], zone)
    [wanted] = route_locally(rows, initial, key=key, order_by=order_by, parallelism=1, max_parallelism=GROUPS)

    def places(count):
        return random_.sample(range(count), count)

    tables = [flat(rows, INPUT, key, initial, places)]
    if initial is not None:
        tables.append(flat(initial, INITIAL, key, rows, places))
    tick = {
        KEY_GROUP: pa.array([0], pa.int32()),
        PART: pa.array([b"p"], pa.binary()),
        KIND: pa.array([TICK], pa.int8()),
    }
    first = tables[0].schema
    tick = pa.table({f.name: tick.get(f.name, pa.nulls(1, f.type)) for f in first})
    whole = pa.concat_tables([*tables, tick]).combine_chunks()
    whole = whole.take(pa.array(places(len(whole)))).combine_chunks()
    asked = []

    @contextmanager
    def spill():
        folder = tmp_path_factory.mktemp("runs")
        asked.append(folder)
        yield folder

    arrangement = plan_arrangement(
        schema, None if initial is None else initial.schema, key=key, initial_key=[], order_by=order_by
    )
    found = list(arrangement.arrange(whole.to_batches(chunk_rows), spill, most_bytes))
    assert found[0].column(PART).to_pylist() == [b"p"] and found[0].column(KIND).to_pylist() == [TICK]
    names = wanted[0].schema.names
    lists = [[row for batch in batches for row in batch.select(names).to_pylist()] for batches in (found, wanted)]
    is_row = [row for row in lists[0] if row["__kind"] != TICK]
    assert repr(is_row) == repr([row for row in lists[1] if row["__kind"] != TICK])
    assert most_bytes == 300 or len(asked) == (most_bytes == 1 and len(is_row) > 0)


@pytest.mark.parametrize("disjoint", [False, True])
@pytest.mark.long("half a second", runs_in="ci")
def test_spilled_runs_merge_into_the_same_batches_as_an_in_memory_sort(tmp_path, disjoint):
    """Runs of all sizes, also such that one comes wholly before the other. Of large rows a batch has fewer."""
    numbers = np.arange(50_000) // 3
    if not disjoint:
        np.random.default_rng(1).shuffle(numbers)
    rows = pa.record_batch({"n": numbers, "text": [f"{n:09d}" for n in numbers]})
    batches = [rows[at : at + 777] for at in range(0, len(rows), 777)]

    @contextmanager
    def spill():
        yield tmp_path

    def found(most_bytes, of=batches):
        return list(sorted_batches(of, lambda batch: batch.columns, spill, most_bytes=most_bytes, batch_rows=1_000))

    in_memory, spilt = found(1 << 30), found(100_000)
    assert [b.num_rows for b in in_memory] == [1_000] * 50
    assert len(list(tmp_path.iterdir())) == 2  # ten runs, of which two at a time were merged into one
    assert all(a.equals(b) for a, b in zip(in_memory, spilt, strict=True))
    assert np.array_equal(pa.Table.from_batches(spilt)["n"].to_numpy(), np.sort(numbers))
    large = [pa.record_batch({"n": [n], "b": [b"x" * (3 << 20)]}) for n in (3, 1, 2, 5, 4, 0)]
    assert [b["n"].to_pylist() for b in found(1 << 30, large)] == [[0, 1, 2, 3, 4], [5]]
    assert [b["n"].to_pylist() for b in found(1, large)] == [[0, 1, 2, 3, 4], [5]]


@pytest.mark.long("seconds", runs_in="ci")
def test_runs_of_large_rows_are_merged_a_few_at_a_time(tmp_path):
    """Thirty rows of 8 MiB, and small ones between them, one run each: no more than a few of them are in memory, and in one batch."""
    random, most = np.random.default_rng(5), 0
    order = random.permutation(60)
    batches = (pa.record_batch({"n": [n], "b": [bytes([n]) * (8 << 20 if n % 2 else 10)]}) for n in order)

    @contextmanager
    def spill():
        yield tmp_path

    found, before = [], pa.total_allocated_bytes()
    for batch in sorted_batches(batches, lambda batch: batch.columns, spill, most_bytes=8 << 20):
        most = max(most, pa.total_allocated_bytes() - before)
        found.append([(n, len(b)) for n, b in zip(batch["n"].to_pylist(), batch["b"].to_pylist(), strict=True)])
    assert [row for batch in found for row in batch] == [(n, 8 << 20 if n % 2 else 10) for n in range(60)]
    assert max(sum(size for _, size in batch) for batch in found) <= 16 << 20
    assert most < 64 << 20
    assert len(list(tmp_path.iterdir())) == 2


def test_a_sliced_column_is_sorted_by_the_values_in_the_slice():
    words = ["zz", "b", None, "a", "c" * 20, "c" * 21, "a"]
    columns = [pa.array(words)[1:], pa.array([Decimal(n) for n in (9, 3, 2, 1, -1, 0, -5)], pa.decimal128(20, 0))[1:]]
    order = total_order(columns, 6)
    rows = [(words[at + 1], at) for at in order.tolist()]
    assert rows == [(None, 1), ("a", 5), ("a", 2), ("b", 0), ("c" * 20, 3), ("c" * 21, 4)]


def test_rows_with_nested_or_collated_columns_are_left_to_spark_to_sort():
    def planned(kind, order_by=()):
        schema = t.StructType([t.StructField("k", t.LongType()), t.StructField("v", kind)])
        return plan_arrangement(schema, None, key=["k"], initial_key=[], order_by=order_by)

    assert planned(t.StringType(), ["v"]) is not None
    with pytest.raises(UsageError, match="order_by"):
        planned(t.StringType(), ["w"])
    nested = [
        t.ArrayType(t.LongType()),
        t.MapType(t.LongType(), t.LongType()),
        t.StructType([t.StructField("x", t.LongType())]),
    ]
    assert [planned(kind) for kind in [*nested, t.VariantType(), t.StringType("UTF8_LCASE"), t.TimeType()]] == [
        None
    ] * 6
