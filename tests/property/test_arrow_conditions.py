"""Expectations on Arrow tables have the results of Great Expectations' Spark engine: checks, keys and stored rows."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from cairn.operations.validation import arrow_conditions, arrow_tables, state_tables
from cairn.operations.validation.arrow_conditions import find_unsupported
from cairn.operations.validation.checks import Check
from cairn.operations.validation.expectation_suites import Rows, Suites, Table
from cairn.spark_versions import from_arrow_schema
from tests.support.tiers import at_tier

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.long("seconds", runs_in="ci")]

NAN, INF = float("nan"), float("inf")
LONGS = [-(2**63), -1, 0, 1, 2, 2**53, 2**53 + 1, 2**63 - 1]
DOUBLES = [NAN, -INF, INF, -0.0, 0.0, 0.1, 1.0, 2.0, -1.5, float(2**53), 1e308]
SMALL = [Decimal(t) for t in ("-999.99", "-0.01", "0.00", "0.10", "1.00", "2.50")]
LARGE = [
    Decimal(t) for t in ("-1.000000", "0.100000", "1.000000", "9007199254740993.000000", f"{10**31}.000001", "0.000001")
]
TEXTS = ["", "a", "b", "B", "ä", "😀", 'q"\\', "\x00\x1f\n", "\x7f\u2028", "\\u00ab"]
DAYS = [date(1900, 1, 1), date(1970, 1, 1), date(2024, 2, 29), date(9999, 12, 31)]
TIMES = [
    datetime(1970, 1, 1),
    datetime(2024, 3, 31, 1, 30),
    datetime(2024, 10, 27, 0, 30, 0, 123456),
    datetime(9998, 1, 1),
]
COLUMNS: dict[str, tuple[pa.DataType, list[Any]]] = {
    "byte": (pa.int8(), [-128, -1, 0, 1, 127]),
    "n": (pa.int64(), LONGS),
    "m": (pa.int64(), LONGS),
    "x": (pa.float64(), DOUBLES),
    "y": (pa.float64(), DOUBLES),
    "f": (pa.float32(), [NAN, -INF, -0.0, 0.0, 0.5, 1.0]),
    "d": (pa.decimal128(5, 2), SMALL),
    "e": (pa.decimal128(38, 6), LARGE),
    "s": (pa.string(), TEXTS),
    "t": (pa.string(), TEXTS),
    "flag": (pa.bool_(), [False, True]),
    "day": (pa.date32(), DAYS),
    "at": (pa.timestamp("us", "UTC"), [t.replace(tzinfo=UTC) for t in TIMES]),
    "until": (pa.timestamp("us", "UTC"), [t.replace(tzinfo=UTC) for t in TIMES]),
    "wall": (pa.timestamp("us"), TIMES),
    "raw": (pa.binary(), [b"", b"a", b"\xff\x00"]),
}
SCHEMA = pa.schema([("k", pa.int32()), *((name, kind) for name, (kind, _) in COLUMNS.items())])
IDENTITY = ["k", "byte", "n", "d", "e", "s", "flag", "day", "at", "wall", "raw"]
ZONE = "Asia/Kolkata"


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    rows = draw(st.integers(0, 12))
    columns = {"k": pa.array(range(rows), pa.int32())}
    for name, (kind, values) in COLUMNS.items():
        some = draw(st.lists(st.none() | st.sampled_from(values), min_size=rows, max_size=rows))
        columns[name] = pa.array(some, kind)
    return pa.table(columns)


@st.composite
def arguments(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A type of expectation and its arguments."""
    name = draw(st.sampled_from([*COLUMNS]))
    mostly = draw(st.sampled_from([{}, {}, {"mostly": 0.5}]))
    kind = draw(
        st.sampled_from(["Between", "InSet", "NotInSet", "Unique", "Null", "NotNull", "Equal", "Greater", "Rows"])
    )
    values = [value for value in COLUMNS[name][1] if value is not NAN]
    match kind:
        case "Between":
            bounds = sorted(draw(st.lists(st.sampled_from(values), min_size=1, max_size=2)))
            if draw(st.booleans()) and isinstance(bounds[0], Decimal):
                bounds = sorted(float(bound) for bound in bounds)
            low, high = (bounds[0], bounds[1]) if len(bounds) == 2 else draw(st.permutations([bounds[0], None]))
            strict = {"strict_min": draw(st.booleans()), "strict_max": draw(st.booleans())}
            return "ExpectColumnValuesToBeBetween", {
                "column": name,
                "min_value": low,
                "max_value": high,
                **strict,
                **mostly,
            }
        case "InSet" | "NotInSet":
            chosen = draw(st.lists(st.sampled_from(values), unique_by=repr))
            what = "ExpectColumnValuesToBeInSet" if kind == "InSet" else "ExpectColumnValuesToNotBeInSet"
            return what, {"column": name, "value_set": chosen, **mostly}
        case "Unique":
            return "ExpectColumnValuesToBeUnique", {"column": name, **mostly}
        case "Null" | "NotNull":
            return f"ExpectColumnValuesTo{'Be' if kind == 'Null' else 'NotBe'}Null", {"column": name, **mostly}
        case "Rows":
            return "ExpectTableRowCountToBeBetween", {"min_value": draw(st.integers(0, 12))}
    ignored = st.sampled_from(["both_values_are_missing", "either_value_is_missing", "neither"])
    left, right = draw(st.sampled_from([("n", "m"), ("x", "y"), ("s", "t"), ("at", "until")]))
    pair = {"column_A": left, "column_B": right, "ignore_row_if": draw(ignored), **mostly}
    if kind == "Equal":
        return "ExpectColumnPairValuesToBeEqual", pair
    return "ExpectColumnPairValuesAToBeGreaterThanB", {**pair, "or_equal": draw(st.booleans())}


def expectations(drawn: list[tuple[str, dict[str, Any]]], schema: pa.Schema) -> list[Any]:
    import great_expectations.expectations as gxe

    made = []
    for name, arguments_of_it in drawn:
        with suppress(ValueError):  # Great Expectations refuses some types of bounds and sets.
            made.append(getattr(gxe, name)(**arguments_of_it))
    return [e for e in made if find_unsupported(e.configuration.type, e.configuration.kwargs, schema) is None]


def checks(rows: Rows, frame: Any, made: list[Any], docs: Path | None = None) -> list[Check]:
    suites = Suites(SimpleNamespace(name="p"), "run", docs)  # type: ignore[arg-type]  # Only the name is used.
    suites.run("state", [Table("", frame, IDENTITY, made)], rows)
    suites.build_docs()
    return suites.checks


def told(check: Check) -> tuple[Any, ...]:
    failing = check.failing
    rows = None if failing is None or failing.url is None else repr(sorted_rows(failing.url))
    named = None if failing is None else (failing.number, failing.keys, failing.not_stored)
    observed = check.observed
    if (
        check.what == "expect_column_values_to_be_unique"
    ):  # Spark sorts the rows by the column, so it shows other values.
        observed = observed.partition(", with values")[0]
    return check.what, check.column, check.expected, observed, check.success, named, rows


def sorted_rows(folder: str) -> list[dict[str, Any]]:
    tables = [pq.read_table(file) for file in Path(folder.removeprefix("file://")).glob("*.parquet")]
    columns = SCHEMA.names
    rows = [
        row for t in tables for row in t.select(columns).cast(SCHEMA).to_pylist()
    ]  # Spark writes times in its zone.
    return sorted(rows, key=lambda row: row["k"])


def on_spark(spark: SparkSession, table: pa.Table) -> DataFrame:
    return spark.createDataFrame(table, from_arrow_schema(table.schema))


@pytest.fixture(scope="module")
def in_zone(spark: SparkSession) -> Any:
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", ZONE)
    yield spark
    spark.conf.set("spark.sql.session.timeZone", str(before))


@pytest.mark.long("half a minute of Spark")
def test_arrow_checks_equal_spark_checks(in_zone: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> None:
    from cairn.operations.validation.arrow_rows import ArrowRows
    from cairn.operations.validation.failing_rows import SparkRows

    evaluated: dict[str, set[bool]] = {}

    @settings(
        max_examples=at_tier(fast=1, ci=3, all=40), database=None, phases=[Phase.generate]
    )  # Shrinking takes minutes.
    @given(table=tables(), drawn=st.lists(arguments(), min_size=12, max_size=20))
    def equal(table: pa.Table, drawn: list[tuple[str, dict[str, Any]]]) -> None:
        root = tmp_path_factory.mktemp("rows")
        kept = {"root": str(root), "attempt": "a"}
        here = checks(ArrowRows(zone=ZONE, **kept), table, expectations(drawn, table.schema), root / "docs")
        there = checks(SparkRows(**kept), on_spark(in_zone, table), expectations(drawn, table.schema))
        assert [*map(told, here)] == [*map(told, there)]
        for check in here:
            evaluated.setdefault(check.what, set()).add(check.success)

    equal()
    if at_tier(fast=0, ci=0, all=1):
        assert all(found == {True, False} for found in evaluated.values()) and len(evaluated) == 9


@pytest.mark.parametrize(("or_equal", "met"), [(True, [True, True, False]), (False, [False, True, False])])
def test_nan_is_the_greatest_number_and_equal_to_itself(or_equal: bool, met: list[bool]) -> None:
    left, right = pa.array([NAN, NAN, 1.0]), pa.array([NAN, 1.0, NAN])
    assert arrow_conditions._greater(left, right, or_equal=or_equal).tolist() == met


KEY = pa.struct([("user", pa.string()), ("n", pa.int32())])
STATE = pa.schema(
    [
        pa.field("key", KEY, False),
        pa.field("value", pa.struct([("sum", pa.int64()), ("x", pa.float64())]), False),
        ("expires_at", pa.timestamp("ms", "UTC")),
        ("key_group", pa.int32()),
        ("shard", pa.int32()),
    ]
)
NOW = datetime(2024, 3, 31, 1, 30, tzinfo=UTC)
KEYS = st.tuples(st.sampled_from([None, "", "a", "b", 'q"']), st.sampled_from([None, 0, 1]))
EXPIRIES = st.none() | st.sampled_from([NOW - timedelta(hours=1), NOW, NOW + timedelta(hours=1)])


def state_of(entries: dict[Any, tuple[Any, Any, Any]]) -> pa.Table:
    rows = [
        {"key": {"user": user, "n": n}, "value": {"sum": total, "x": x}, "expires_at": at, "key_group": 3, "shard": 0}
        for (user, n), (total, x, at) in entries.items()
    ]
    return pa.Table.from_pylist(rows, schema=STATE)


def test_arrow_and_spark_find_the_same_state_changes(in_zone: SparkSession) -> None:
    """Keys with nulls have one partner. The rows may come in another order."""
    entries = st.dictionaries(KEYS, st.tuples(st.sampled_from([None, 1, 2]), st.sampled_from([None, 0.5]), EXPIRIES))
    now_ms, removable, fates = round(NOW.timestamp() * 1000), "value.sum = 1", set[str]()

    def selected(table: pa.Table) -> pa.Array:
        return pc.equal(pc.struct_field(table["value"].combine_chunks(), "sum"), 1)

    @settings(max_examples=at_tier(fast=1, ci=5, all=40), database=None, phases=[Phase.generate])
    @given(before=entries, now=entries)
    def equal(before: dict[Any, Any], now: dict[Any, Any]) -> None:
        old, new = state_of(before), state_of(now)
        here = arrow_tables.pairs(old, new, now_ms=now_ms, removable=selected, zone=ZONE)
        frames = (on_spark(in_zone, old), on_spark(in_zone, new))
        there = state_tables.pairs(*frames, now_ms=now_ms, removable=removable).toArrow()
        assert here.column_names == there.column_names
        assert sorted(map(str, here.to_pylist())) == sorted(map(str, there.cast(here.schema).to_pylist()))
        fates.update(here["fate"].to_pylist())

    equal()
    if at_tier(fast=0, ci=0, all=1):
        assert fates == {"new", "kept", "expired", "removed", "lost"}


CASES: list[tuple[str, dict[str, Any], pa.DataType, bool]] = [
    ("expect_column_values_to_be_between", {"column": "v", "min_value": 1}, pa.int64(), True),
    ("expect_column_values_to_be_between", {"column": "v", "min_value": 1}, pa.string(), False),
    ("expect_column_values_to_be_between", {"column": "v", "min_value": "a"}, pa.string(), True),
    ("expect_column_values_to_be_between", {"column": "v", "min_value": NAN}, pa.float64(), False),
    ("expect_column_values_to_be_between", {"column": "v", "min_value": 2**63}, pa.int64(), False),
    (
        "expect_column_values_to_be_between",
        {"column": "v", "min_value": datetime(2024, 1, 1)},
        pa.timestamp("us", "UTC"),
        False,
    ),
    (
        "expect_column_values_to_be_between",
        {"column": "v", "min_value": 1, "row_condition": "k > 1"},
        pa.int64(),
        False,
    ),
    ("expect_column_values_to_be_between", {"column": "v", "min_value": {"$PARAMETER": "p"}}, pa.int64(), False),
    ("expect_column_values_to_be_in_set", {"column": "v", "value_set": [1, None]}, pa.int64(), False),
    ("expect_column_values_to_be_in_set", {"column": "v", "value_set": [1, "a"]}, pa.int64(), False),
    ("expect_column_values_to_be_unique", {"column": "v"}, pa.list_(pa.int64()), False),
    ("expect_column_values_to_match_regex", {"column": "v", "regex": "a"}, pa.string(), False),
    ("expect_column_values_to_be_null", {"column": "another"}, pa.string(), True),
]


@pytest.mark.parametrize(("expectation", "kwargs", "kind", "supported"), CASES)
def test_only_expectations_with_sparks_results_are_supported(
    expectation: str, kwargs: dict[str, Any], kind: pa.DataType, supported: bool
) -> None:
    assert (find_unsupported(expectation, kwargs, pa.schema([("v", kind)])) is None) == supported
