"""Running aggregates against folds in plain Python, over random nulls, keys, intervals and batches."""

import math
import random
from collections import defaultdict
from datetime import UTC, date, datetime, timedelta
from decimal import ROUND_HALF_UP, Context, Decimal
from fractions import Fraction
from functools import reduce

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql.streaming.stateful_processor import TimerValues
from pyspark.sql.types import ArrayType, LongType, StringType, StructField, StructType

from cairn.aggregates import ApproxDistinct, Count, First, Last, Max, Mean, Min, RunningAggregate, StdDev, Sum, Variance
from cairn.arrow_processor import KeyedBatch
from state_backend.values.errors import InvariantViolated, ProcessorError, UsageError
from tests.support.arrow_driver import EVERYTHING, KEYS, NUMBERS, SCHEMA, TYPES, ArrowDriver, Everything, Handle

EXACT = Context(prec=200)  # Python's own has 28 digits


def some_value(rng, of):
    """Few different ones, so that there are ties; with what is special in each type."""
    if pa.types.is_boolean(of):
        return rng.random() < 0.5
    if pa.types.is_integer(of):
        bound = 2 ** (of.bit_width - 1)
        return rng.choice([0, -1, 5, bound // 2**8, -bound // 2**8, rng.randrange(-100, 100)])
    if pa.types.is_floating(of):
        value = rng.choice([0.0, -0.0, rng.uniform(-5, 5), 1e6 * rng.random(), rng.uniform(-1, 1) * 1e-6])
        return float(np.float32(value)) if of == pa.float32() else value
    if pa.types.is_decimal(of):
        bound = 10 ** min(of.precision, 33)
        return EXACT.scaleb(Decimal(rng.randrange(-bound, bound)), -of.scale)
    if pa.types.is_string(of) or pa.types.is_binary(of):
        text = rng.choice(["", "a", "B", "é", "\U0001f6eb", "zz" * 20, str(rng.randrange(50))])
        return text if pa.types.is_string(of) else text.encode()
    if pa.types.is_date(of):
        return date(1970, 1, 1) + timedelta(days=rng.randrange(-1000, 1000))
    at = datetime(1970, 1, 1) + timedelta(microseconds=rng.randrange(-(10**9), 10**9))
    return at.replace(tzinfo=UTC) if of.tz else at


def some_rows(rng, key_count, null_share):
    """Rows sorted by key; keys have one row, some, or very many, and differ in which columns have nulls."""
    rows = []
    for key in sorted({(rng.choice("ABC"), rng.randrange(30)) for _ in range(key_count)}):
        share = rng.choice([0, null_share, 1]) if null_share else 0
        for _ in range(rng.choice([1, 1, 2, 5, 40, 150])):
            values = (None if rng.random() < share else some_value(rng, of) for of in TYPES.values())
            rows.append(dict(zip(SCHEMA.names, (*key, *values), strict=True)))
    return pa.Table.from_pylist(rows, SCHEMA)


# --- what they should give --------------------------------------------------------------------------------------------


def expected_sum(values, of):
    if not values:
        return None
    if pa.types.is_decimal(of):
        return reduce(EXACT.add, values)
    if pa.types.is_integer(of):
        return sum(values)
    total = 0.0
    for value in values:
        total += value
    return total


def expected_mean(values, of):
    if not values:
        return None
    if not pa.types.is_decimal(of):
        return expected_sum([float(value) for value in values], pa.float64()) / len(values)
    exact = EXACT.divide(expected_sum(values, of), len(values))
    return exact.quantize(Decimal(1).scaleb(-of.scale - 4), ROUND_HALF_UP, EXACT)


def expected_variance(values):
    if len(values) < 2:
        return None
    mean = Fraction(sum(map(Fraction, values))) / len(values)
    return float(sum((Fraction(value) - mean) ** 2 for value in values) / (len(values) - 1))


def without_negative_zero(value):
    return value + 0.0 if isinstance(value, float) else value


def expected(name, rows):
    """The value of one aggregate of ``Everything`` after all ``rows`` of a key."""
    kind, _, column = name.partition("_")
    if kind == "rows":
        return len(rows)
    every = [row[column] for row in rows]
    values, of = [value for value in every if value is not None], TYPES[column]
    as_bytes = (lambda value: value.encode()) if of == pa.string() else None
    match kind:
        case "Count":
            return len(values)
        case "Sum":
            return expected_sum(values, of)
        case "Mean":
            return expected_mean(values, of)
        case "Variance":
            return expected_variance(values)
        case "StdDev":
            variance = expected_variance(values)
            return None if variance is None else math.sqrt(variance)
        case "Min":
            return without_negative_zero(min(values, default=None, key=as_bytes))
        case "Max":
            return without_negative_zero(max(values, default=None, key=as_bytes))
        case "First" | "Last":
            return every[0 if kind == "First" else -1]
        case "SomeFirst" | "SomeLast":
            return values[0 if kind == "SomeFirst" else -1] if values else None
        case "ApproxDistinct":
            return len(set(values))


def assert_agree(name, found, want):
    where = f"{name}: {found!r}, should be {want!r}"
    if want is None or found is None:
        assert found is want, where
    elif name.startswith(("Variance", "StdDev")):
        assert found == pytest.approx(want, rel=1e-11), where
    elif name.startswith("ApproxDistinct"):
        # Four standard errors, and two collisions among few values.
        assert abs(found - want) <= 4 * 1.04 / 64 * want + 2, where
    else:
        assert found == want and str(found) == str(want), where  # tells 0.0 from -0.0


def cuts(rng, rows, count):
    return [rng.randrange(len(rows) + 1) for _ in range(count)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.long("seconds", runs_in="ci")
def test_all_aggregates_equal_folds_in_plain_python(seed):
    rng = random.Random(seed)
    driver, history = ArrowDriver(Everything(), SCHEMA, KEYS), defaultdict(list)
    for null_share in (0, 0.5, 0.9):
        rows = some_rows(rng, 20, null_share)
        output = driver.run(rows, cuts(rng, rows, 6)).to_pylist()
        for row in rows.to_pylist():
            history[row["origin"], row["flight"]].append(row)
        touched = list(dict.fromkeys(zip(*(rows[key].to_pylist() for key in KEYS), strict=True)))
        assert [(row["origin"], row["flight"]) for row in output] == touched
        for row in output:
            for name, found in row.items():
                if name not in KEYS:
                    assert_agree(name, found, expected(name, history[row["origin"], row["flight"]]))


@pytest.mark.long("half a second", runs_in="ci")
def test_aggregates_of_one_row_per_key_equal_folds_in_plain_python():
    """There no values are grouped."""
    rng = random.Random("one row")
    driver, history = ArrowDriver(Everything(), SCHEMA, KEYS), defaultdict(list)
    for share in (0, 0.3, 0, 1):
        rows = pa.Table.from_pylist(
            [
                {"origin": "A", "flight": n}
                | {name: None if rng.random() < share else some_value(rng, of) for name, of in TYPES.items()}
                for n in range(40)
            ],
            SCHEMA,
        )
        for row in rows.to_pylist():
            history[row["flight"]].append(row)
        for row in driver.run(rows).to_pylist():
            for name in EVERYTHING:
                assert_agree(name, row[name], expected(name, history[row["flight"]]))


D, NAN, INF = Decimal, math.nan, math.inf


@pytest.mark.parametrize(
    ("of", "values", "want"),
    [
        (pa.float64(), [None, None], (None, None, None, None, None)),
        (pa.float64(), [1.5], (1.5, 1.5, None, 1.5, 1.5)),
        (pa.float64(), [-0.0, -0.0], (0.0, 0.0, 0.0, 0.0, 0.0)),  # Spark's min and max are -0.0
        (pa.float64(), [NAN, 1.0, INF], (NAN, NAN, NAN, 1.0, NAN)),
        (pa.float64(), [1.0, INF], (INF, INF, NAN, 1.0, INF)),
        (pa.float64(), [1e308, 1e308], (INF, INF, 0.0, 1e308, 1e308)),
        (pa.float64(), [0.1] * 10, (0.9999999999999999, 0.09999999999999999, 0.0, 0.1, 0.1)),
        (pa.float32(), [1.5, 2.25, None], (3.75, 1.875, 0.28125, 1.5, 2.25)),
        (pa.int64(), [2**62, 2**62 - 1], (2**63 - 1, 2.0**62, 0.0, 2**62 - 1, 2**62)),
        (pa.int8(), [127, 127, -3], (251, 83.66666666666667, 5633.333333333333, -3, 127)),
        (pa.decimal128(5, 2), [D("0.01"), D("0"), D("0")], (D("0.01"), D("0.003333"), 3.3333333333333335e-05, D("0.00"), D("0.01"))),
        (pa.decimal128(38, 2), [D("0.50"), D("0.25")], (D("0.75"), D("0.375000"), 0.03125, D("0.25"), D("0.50"))),
    ],
)  # fmt: skip
def test_aggregates_equal_the_results_of_spark(of, values, want):
    """sum, avg, var_samp, min and max of Spark 4.3.0, written down; a variance may differ in its last digits."""
    row = folded(
        pa.array(values, of),
        total=Sum("value"), mean=Mean("value"), spread=Variance("value"), least=Min("value"), most=Max("value"),
    )  # fmt: skip
    total, mean, spread, least, most = want
    found = row.pop("spread")
    assert found is spread or found == pytest.approx(spread, rel=1e-14, nan_ok=True)
    assert str(row) == str({"key": 1, "total": total, "mean": mean, "least": least, "most": most})


# --- doubles ----------------------------------------------------------------------------------------------------------


def folded(values, *, splits=(), **aggregates):
    """The output of one key for ``values`` of one column."""
    rows = pa.table({"key": pa.array([1] * len(values)), "value": values})
    processor = type("Folded", (RunningAggregate,), aggregates)()
    (row,) = ArrowDriver(processor, rows.schema, ["key"]).run(rows, splits).to_pylist()
    return row


def test_every_nan_has_the_same_bits_in_the_state():
    odd = np.array([0xFFF8000000000001, 0x7FF8000000000000], np.uint64).view(np.float64)

    class Extremes(RunningAggregate):
        most = Max("value")
        total = Sum("value")
        mean = Mean("value")

    for value in (odd[:1], odd[1:]):
        rows = pa.table({"key": [1], "value": value})
        driver = ArrowDriver(Extremes(), rows.schema, ["key"])
        output = driver.run(rows)
        (state,) = driver.stored["aggregates"].values()
        for found in [state["most_max"], state["total_sum"], output["mean"][0].as_py()]:
            assert np.float64(found).tobytes() == np.float64(math.nan).tobytes()


@pytest.mark.parametrize("shift", [0.0, 1e6, 1e12])
@pytest.mark.parametrize("count", [2, 31, 5000])
def test_a_variance_keeps_its_digits_far_from_zero(shift, count):
    values = np.random.default_rng(count).normal(shift, 1, count).tolist()
    found = folded(values, spread=Variance("value"))["spread"]
    assert found == pytest.approx(expected_variance(values), rel=1e-12)


def test_a_variance_survives_a_first_value_that_is_far_off():
    """The bound of the formula is about count * condition * 2^-53; the condition is how far off / the deviation."""
    values = [0.0, *np.random.default_rng(1).normal(1e6, 1, 5000)]
    found = folded(values[:1] + values, spread=Variance("value"))["spread"]
    assert found == pytest.approx(expected_variance(values[:1] + values), rel=1e-12)


@pytest.mark.parametrize("value", [0.1, 1e308, -1e9 / 3])
def test_equal_values_have_no_variance(value):
    row = folded([value] * 50, splits=[1, 17], spread=Variance("value"), deviation=StdDev("value"))
    assert row["spread"] == row["deviation"] == 0


def test_a_decimal_mean_has_four_more_digits_and_rounds_half_up():
    half = [Decimal("-0.1")] + [Decimal("0.0")] * 199_999
    found = folded(pa.array(half, pa.decimal128(5, 1)), mean=Mean("value"))["mean"]
    assert found == 0  # from 5e-7, which is less than half of the last digit
    half = [Decimal("-0.1")] + [Decimal("0.0")] * 19_999
    found = folded(pa.array(half, pa.decimal128(5, 1)), mean=Mean("value"))["mean"]
    assert found == Decimal("-0.00001")  # exactly half of it


def test_a_decimal_mean_that_does_not_fit_is_an_error():
    """Spark's type of the mean has four digits less before the point than the widest decimals."""
    values = pa.array([None, Decimal(10**24 - 1), Decimal(10**24 - 1)], pa.decimal128(38, 10))
    assert folded(values, mean=Mean("value"))["mean"] == 10**24 - 1
    with pytest.raises(
        ProcessorError,
        match=r"mean of column 'value' does not fit decimal128\(38, 14\) at key key=1; in the source, cast",
    ):
        folded(pa.array([Decimal(10**24)], pa.decimal128(38, 10)), mean=Mean("value"))

    class Average(RunningAggregate):
        mean = Mean("value")

    rows = pa.table({"key": ["a", "b", "c"], "value": pa.array([1, 10**24, 2], pa.decimal128(38, 10))})
    with pytest.raises(ProcessorError, match="key='b'"):
        ArrowDriver(Average(), rows.schema, ["key"]).run(rows)


def test_each_aggregate_has_its_expected_output_type():
    rows = some_rows(random.Random("types"), 3, 0)
    output = ArrowDriver(Everything(), SCHEMA, KEYS).run(rows)
    found = {name: output.schema.field(name).type for name in output.column_names}
    for column, of in TYPES.items():
        assert {found[f"{kind}_{column}"] for kind in ("Min", "Max", "First", "Last", "SomeFirst", "SomeLast")} == {of}
        assert found[f"ApproxDistinct_{column}"] == found[f"Count_{column}"] == pa.int64()
    sums = {
        "single": pa.float64(),
        "double": pa.float64(),
        "price": pa.decimal128(19, 2),
        "wide": pa.decimal128(38, 10),
    }
    means = {"price": pa.decimal128(13, 6), "wide": pa.decimal128(38, 14)}
    for column in NUMBERS:
        assert found[f"Sum_{column}"] == sums.get(column, pa.int64())
        assert found[f"Mean_{column}"] == means.get(column, pa.float64())
        assert found[f"Variance_{column}"] == found[f"StdDev_{column}"] == pa.float64()


@pytest.mark.parametrize("splits", [[], [1], [1, 2]])
@pytest.mark.parametrize(
    ("of", "most", "type_text"),
    [
        (pa.int64(), 2**63 - 1, "int64"),
        (pa.decimal128(38, 0), 10**38 - 1, r"decimal128\(38, 0\)"),
        (pa.decimal128(38, 2), EXACT.scaleb(10**38 - 1, -2), r"decimal128\(38, 2\)"),
    ],
)
def test_a_sum_that_overflows_is_an_error(of, most, type_text, splits):
    least = -most - 1 if of == pa.int64() else EXACT.minus(Decimal(most))
    step = 1 if of == pa.int64() else Decimal(1).scaleb(-of.scale)
    assert folded(pa.array([most, None, 0], of), splits=splits, total=Sum("value"))["total"] == most
    assert folded(pa.array([least, 0, None], of), splits=splits, total=Sum("value"))["total"] == least
    for values in ([most, step, 0], [least, -step, None], [most, most, most], [least, least, least]):
        with pytest.raises(
            ProcessorError, match=f"sum of column 'value' does not fit {type_text} at key key=1; in the source, cast"
        ):
            folded(pa.array(values, of), splits=splits, total=Sum("value"))


def test_first_and_last_also_take_array_columns():
    of = pa.list_(pa.int64())
    values = pa.array([None, [1, 2], [], None], of)
    aggregates = {"first": First("value"), "last": Last("value")}
    aggregates |= {"some": First("value", ignore_nulls=True), "latest": Last("value", ignore_nulls=True)}
    for splits in ([], [1], [1, 2, 3]):
        row = folded(values, splits=splits, **aggregates)
        assert row == {"key": 1, "first": None, "last": None, "some": [1, 2], "latest": []}


def batch_of(rows, offsets, **values):
    states = pa.table({"rows_count": pa.nulls(len(offsets) - 1, pa.int64())})
    keys = rows.select(["key"]).take(offsets[:-1])
    return KeyedBatch(
        keys=keys, rows=rows, row_offsets=np.array(offsets), states={"aggregates": states}, exists={},
        time=TimerValues(0, 0), **values,
    )  # fmt: skip


class Rows(RunningAggregate):
    rows = Count()


def started(processor):
    schema = StructType([StructField("key", LongType())])
    processor.init(Handle(schema, schema))
    return processor


def test_a_key_that_continues_in_the_next_batch_has_no_output_yet():
    rows = pa.table({"key": [1, 1, 2, 2]})
    result = started(Rows()).handleBatch(batch_of(rows, [0, 2, 4], last_key_continues=True))
    assert result.output.to_pylist() == [{"key": 1, "rows": 2}]
    assert result.states["aggregates"].to_pylist() == [{"rows_count": 2}, {"rows_count": 2}]
    result = started(Rows()).handleBatch(batch_of(rows, [0, 2, 4]))
    assert result.output.to_pylist() == [{"key": 1, "rows": 2}, {"key": 2, "rows": 2}]


def test_a_batch_without_keys_gives_no_rows():
    rows = some_rows(random.Random("none"), 2, 0)
    processor = Everything()
    driver = ArrowDriver(processor, SCHEMA, KEYS)
    states = {"aggregates": driver.handle.states["aggregates"].empty_table()}
    batch = KeyedBatch(
        keys=rows.select(KEYS).slice(0, 0), rows=rows.slice(0, 0), row_offsets=np.zeros(1, np.int64), states=states,
        exists={}, time=TimerValues(0, 0),
    )  # fmt: skip
    result = processor.handleBatch(batch)
    assert result.output.num_rows == result.states["aggregates"].num_rows == 0
    assert result.states["aggregates"].schema.equals(driver.handle.states["aggregates"])


def test_a_key_without_rows_is_a_bug_of_the_caller():
    with pytest.raises(InvariantViolated, match="key 1 of a batch of 3 has no rows"):
        started(Rows()).handleBatch(batch_of(pa.table({"key": [1, 2]}), [0, 1, 1, 2]))


def test_chunked_and_sliced_columns_give_the_same_output():
    rng = random.Random("chunks")
    rows = some_rows(rng, 10, 0.4)
    chunked = pa.concat_tables([rows.slice(0, 7), rows.slice(7, 1), rows.slice(8)])
    assert chunked["text"].num_chunks == 3
    output = ArrowDriver(Everything(), SCHEMA, KEYS).run(rows)
    assert ArrowDriver(Everything(), SCHEMA, KEYS).run(chunked).equals(output)


def test_bytes_under_a_null_do_not_change_the_output():
    """Arrow leaves it open, in rows and in states."""
    garbage = pa.py_buffer(np.full(32, 0x7FF123, "<u8"))

    def under_null(of, count):
        return pa.Array.from_buffers(of, count, [pa.py_buffer(bytes(4)), garbage])

    for name, of in TYPES.items():
        if pa.types.is_string(of) or pa.types.is_binary(of):
            continue
        fitting = {name_: aggregate for name_, aggregate in EVERYTHING.items() if name_.endswith(f"_{name}")}
        processor = type("Fitting", (RunningAggregate,), fitting)()
        some = some_value(random.Random(str(of)), of)
        for values in (pa.concat_arrays([under_null(of, 2), pa.array([some] * 2, of)]), pa.array([some] * 4, of)):
            rows = pa.table({"key": [1, 1, 2, 3], name: values})
            driver = ArrowDriver(processor, rows.schema, ["key"])
            fields = driver.handle.states["aggregates"]
            columns = [pa.nulls(3, f.type) if f.type == pa.binary() else under_null(f.type, 3) for f in fields]
            batch = KeyedBatch(
                keys=pa.table({"key": [1, 2, 3]}), rows=rows, row_offsets=np.array([0, 2, 3, 4]),
                states={"aggregates": pa.table(columns, schema=fields)}, exists={}, time=TimerValues(0, 0),
            )  # fmt: skip
            assert processor.handleBatch(batch).output.equals(driver.run(rows))


# --- declarations -----------------------------------------------------------------------------------------------------


def declared(columns=None, keys=("key",), **aggregates):
    """The handle after ``init`` of a processor with these attributes."""
    schema = StructType([StructField(key, StringType()) for key in keys])
    found = StructType([*schema, *(StructField(name, of) for name, of in (columns or {}).items())])
    handle = Handle(found, schema)
    type("Totals", (RunningAggregate,), aggregates)().init(handle)
    return handle


@pytest.mark.parametrize(
    ("aggregates", "message"),
    [
        ({}, r"Totals declares no aggregates; give it class attributes such as flights = Count\(\)"),
        (
            {"delay": Sum("dely")},
            r"Totals.delay = Sum\('dely'\): the input has no column 'dely'; its columns are key string, delay bigint, tags array<string>",
        ),
        ({"flights": Count("flight")}, "no column 'flight'"),
        (
            {"delay": Sum("key")},
            r"Sum\('key'\): column 'key' is string, and only integers, float, double and decimal can be",
        ),
        ({"delay": Mean("tags")}, r"column 'tags' is array<string>, and only integers"),
        ({"delay": StdDev("key")}, "column 'key' is string, and only integers"),
        (
            {"worst": Max("tags")},
            r"Max\('tags'\): column 'tags' is array<string>, and values of this type can't be ordered here",
        ),
        (
            {"some": ApproxDistinct("tags")},
            "'tags' is array<string>, and values of this type can't be compared by their bytes",
        ),
        ({"some": Min("folded")}, "string collate UTF8_LCASE, and its collation does not compare bytes"),
        ({"some": ApproxDistinct("folded")}, "its collation does not compare bytes"),
        ({"key": Count()}, r"Totals.key = Count\(\): key column 'key' of the output has the same name"),
        ({"KEY": Count()}, "key column 'key'"),
        (
            {"total": Count(), "Total": Count()},
            r"Totals.Total = Count\(\): aggregate 'total' of the output has the same name",
        ),
        ({"close": Last("delay")}, r"Totals.close = Last\('delay'\): every processor already has an attribute 'close'"),
        ({"ttl_ms": Max("delay")}, "every processor already has an attribute 'ttl_ms'"),
    ],
)
def test_wrong_declarations_are_refused_before_the_first_record(aggregates, message):
    columns = {"delay": LongType(), "tags": ArrayType(StringType()), "folded": StringType("UTF8_LCASE")}
    with pytest.raises(UsageError, match=message):
        declared(columns, **aggregates)


def test_an_unreachable_error_bound_is_refused_at_its_declaration():
    with pytest.raises(UsageError, match=r"found 1e-05"):
        ApproxDistinct("carrier", relative_error=0.00001)


def test_state_is_one_value_state_with_the_parts_of_each_aggregate():
    handle = declared({"delay": LongType()}, mean=Mean("delay"), worst=Max("delay"), mean_count=Count())
    assert handle.states["aggregates"] == pa.schema(
        [
            ("mean_count", pa.int64()),
            ("mean_sum", pa.float64()),
            ("worst_max", pa.int64()),
            ("mean_count_count", pa.int64()),
        ]
    )
    assert handle.ttl_ms == {"aggregates": None}
    assert declared(ttl_ms=1000, rows=Count()).ttl_ms == {"aggregates": 1000}


def test_aggregates_of_base_classes_come_first_and_may_be_replaced_or_dropped():
    class Base(RunningAggregate):
        total = Sum("value")
        gone = Count()

    class Derived(Base):
        rows = Count()
        total = Max("value")
        gone = None

    rows = pa.table({"key": [1, 1], "value": [3, 4]})
    output = ArrowDriver(Derived(), rows.schema, ["key"]).run(rows)
    assert output.to_pylist() == [{"key": 1, "total": 4, "rows": 2}]
    assert output.column_names == ["key", "total", "rows"]
