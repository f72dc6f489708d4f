"""Each form keeps the digits of a number, or refuses the value. A time that a form can't hold is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DateType,
    DayTimeIntervalType,
    LongType,
    MapType,
    StringType,
    StructType,
    UserDefinedType,
)

from cairn.errors import ProcessorError
from cairn.pandas_with_state import pandas_with_state
from cairn.runners.pandas_frames import frame_slices, whole_frames
from cairn.testing import PipelineTester
from tests.support.bare_pipeline import bare_pipeline

LARGE = 2**53 + 1


class Frames(StatefulProcessor):  # type: ignore[misc]
    def __init__(self, call: Callable[[Any, pd.DataFrame], pd.DataFrame]) -> None:
        self._call = call

    def init(self, handle: Any) -> None:
        self.state = handle.getValueState("state", "n long")

    def handleInputRows(self, key: Any, frames: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        for frame in frames:
            yield self._call(self, frame)


def run(processor: Any, rows: list[Any], input_schema: str, output_schema: str, **changes: Any) -> list[Any]:
    given = {"api": "pandas", "time_zone": "UTC", "output_schema": output_schema, **changes}
    declared = bare_pipeline(processor, **given)
    tester = PipelineTester(declared, input_schema=input_schema, every=timedelta(hours=1))
    return [tuple(row.values()) for row in tester.run(rows).output]


@pytest.mark.parametrize(
    ("kind", "numbers", "dtype"),
    [
        ("bigint", [LARGE, None], "Int64"),
        ("bigint", [-LARGE, None], "Int64"),
        ("bigint", [2**53, None], "Int64"),
        ("bigint", [-(2**63), 2**63 - 1, None], "Int64"),
        ("bigint", [LARGE, 1], "int64"),
        ("bigint", [2**53 - 1, None], "float64"),
        ("bigint", [None, None], "float64"),
        ("int", [2**31 - 1, None], "float64"),
        ("smallint", [-(2**15), None], "float64"),
        ("tinyint", [127, None], "float64"),
    ],
)
def test_a_key_s_integers_beside_a_null_keep_their_digits(kind: str, numbers: list[Any], dtype: str) -> None:
    """Rows, state and output of the key; a key without a null, and a key of small numbers, are as before."""

    def note(processor: Any, frame: pd.DataFrame) -> pd.DataFrame:
        n = frame["n"].max()
        processor.state.update((int(n) if pd.notna(n) else 0,))
        (stored,) = processor.state.get()
        frame["n"] += 0  # A handler may write into its frame.
        return frame.assign(kind=str(frame["n"].dtype), stored=stored)

    rows = [("a", n) for n in numbers] + [("b", None), ("b", 1), ("c", 7)]
    found = run(partial_of(note), rows, f"k string, n {kind}", f"k string, n {kind}, kind string, stored bigint")
    assert sorted((row[:2] for row in found), key=repr) == sorted(rows, key=repr)
    largest = max((n for n in numbers if n is not None), default=0)
    assert {row[:1] + row[2:] for row in found} == {("a", dtype, largest), ("b", "float64", 1), ("c", "int64", 7)}


def partial_of(call: Callable[[Any, pd.DataFrame], pd.DataFrame]) -> Callable[[], Frames]:
    return lambda: Frames(call)


@pytest.mark.parametrize(
    "sizes", [[1, 1, 1], [1, 2], [2, 1], [9_999, 1, 1], [5_000, 7_000, 8_001], [10_000, 10_000], [20_001]]
)
@pytest.mark.parametrize("nulls", [[], [0], [1], [-1], range(0, 3_000, 7)])
def test_frames_of_several_batches_keep_digits(sizes: list[int], nulls: Any) -> None:
    numbers: list[Any] = [LARGE + n for n in range(sum(sizes))]
    for at in nulls:
        if at < len(numbers):
            numbers[at] = None
    parts, at = [], 0
    for size in sizes:
        column = pa.array(numbers[at : at + size], pa.int64())
        parts += frame_slices("UTC")(pa.StructArray.from_arrays([column], ["n"]))(0, size)
        at += size
    frames = [*whole_frames(iter(parts))]
    found = [n if pd.notna(n) else None for frame in frames for n in frame["n"].tolist()]
    assert found == numbers
    assert all(len(frame) == 10_000 for frame in frames[:-1])
    for frame in frames:
        some = frame["n"].notna()
        assert str(frame["n"].dtype) == ("int64" if some.all() else "Int64" if some.any() else "float64")


NESTED = [
    pa.list_(pa.int64()),
    pa.list_(pa.list_(pa.int64())),
    pa.map_(pa.string(), pa.int64()),
    pa.struct([("a", pa.int64()), ("b", pa.list_(pa.int64()))]),
    pa.list_(pa.struct([("a", pa.int64())])),
]
VALUES: list[Any] = [[LARGE, None], [[LARGE, None]], [("x", LARGE), ("y", None)], {"a": LARGE, "b": [LARGE, None]}]
VALUES += [[{"a": LARGE}, {"a": None}]]


@pytest.mark.parametrize(("kind", "value"), [*zip(NESTED, VALUES, strict=True)], ids=str)
def test_nested_integers_keep_their_digits(kind: pa.DataType, value: Any) -> None:
    column = pa.array([value, None], kind)
    (frame,) = frame_slices("UTC")(pa.StructArray.from_arrays([column], ["v"]))(0, 2)
    assert pa.array(frame["v"].tolist(), kind).to_pylist() == column.to_pylist()


@pytest.mark.parametrize(
    ("kind", "value", "is_refused"),
    [
        ("bigint", float(2**53), True),
        ("bigint", np.float64(-(2**53)), True),
        ("bigint", float(2**53 - 1), False),
        ("bigint", LARGE, False),
        ("double", float(2**53), False),
        ("array<bigint>", [float(LARGE)], True),
        ("array<bigint>", np.array([float(LARGE)]), True),
        ("struct<a:bigint,b:double>", np.array([float(LARGE), 1.0]), True),
        ("array<bigint>", [LARGE, 1.0], False),
        ("struct<a:bigint,b:double>", {"a": LARGE, "b": 1e300}, False),
        ("struct<a:bigint,b:double>", {"a": float(LARGE), "b": 1.0}, True),
        ("struct<a:bigint,b:double>", Row(a=float(LARGE), b=1.0), True),
        ("map<string,array<bigint>>", {"x": [1, float(LARGE)]}, True),
        ("map<string,array<bigint>>", {"x": [1, LARGE], "y": None}, False),
    ],
)
def test_a_float_that_may_stand_for_another_integer_is_refused_in_output(
    kind: str, value: Any, is_refused: bool
) -> None:
    def call(processor: Any, frame: pd.DataFrame) -> pd.DataFrame:
        return pd.DataFrame(
            {"k": ["a", "b"], "v": pd.Series([value, None], dtype=None if isinstance(value, float) else object)}
        )

    def made() -> list[Any]:
        return run(partial_of(call), [("a", 1)], "k string, n int", f"k string, v {kind}")

    if not is_refused:
        assert len(made()) == 2
        return
    with pytest.raises(
        ProcessorError, match=r"'v' is .*, and a float in .* may have lost digits(?s:.*)Use integers: the dtype 'Int64'"
    ):
        made()


def test_a_function_of_apply_in_pandas_with_state_gets_each_digit() -> None:
    def call(key: Any, frames: Any, state: Any) -> Iterator[pd.DataFrame]:
        for frame in frames:
            state.update((int(frame["n"].max()),))
            yield pd.DataFrame({"k": key[0], "n": frame["n"], "m": state.get[0]})

    processor = pandas_with_state(call, key=["k"], input_schema="k string, n bigint", state_schema="n bigint")
    found = run(processor, [("a", LARGE), ("a", None)], "k string, n bigint", "k string, n bigint, m bigint")
    assert sorted(found, key=repr) == [("a", LARGE, LARGE), ("a", None, LARGE)]


class Rows(StatefulProcessor):  # type: ignore[misc]
    def init(self, handle: Any) -> None:
        pass

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        yield from (Row(k=str(row.k), v=row.v) for row in rows)


FAR, NEAR = datetime(9999, 12, 31, 23, tzinfo=UTC), datetime(2024, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize("far", [FAR, datetime(1, 1, 1, tzinfo=UTC)])
@pytest.mark.parametrize("kind", ["timestamp", "timestamp_ntz"])
def test_a_timestamp_outside_the_range_of_pandas_is_refused_and_named(kind: str, far: datetime) -> None:
    """The error names pipeline, column, value, key and interval, and says what to do. The row form accepts the time."""
    strip = (lambda at: at) if kind == "timestamp" else (lambda at: at.replace(tzinfo=None))
    rows = [("a", strip(NEAR)), ("b", strip(NEAR)), ("b", strip(far))]
    schemas = f"k string, v {kind}", f"k string, v {kind}"
    with pytest.raises(ProcessorError) as raised:
        run(partial_of(lambda processor, frame: frame), rows, *schemas)
    first, way_on = str(raised.value).splitlines()
    assert first.startswith(f"pipeline 'p': input column 'v', value {far:%Y-%m-%d}".replace("value 1-", "value 0001-"))
    assert (
        "key (b), interval [2024-01-01T00:00:00Z, 2024-01-01T01:00:00Z): pandas holds instants of the years 1678 to 2261 only"
        in first
    )
    assert (
        way_on
        == "Use the row form (api='row') or the Arrow form (api='arrow'), or convert the column in the source, for example to a text"
    )
    assert len(run(Rows, rows, *schemas, api="row")) == 3


def test_a_timestamp_outside_the_range_of_python_in_its_time_zone_is_refused() -> None:
    says = r"pipeline 'p': input column 'v', .*, interval .*: Python holds the years 1 to 9999 only, in the time zone 'Asia/Tokyo'\nUse the Arrow form"
    rows, schema = [("a", NEAR), ("a", FAR)], "k string, v timestamp"
    with pytest.raises(ProcessorError, match=says):
        run(Rows, rows, schema, schema, api="row", time_zone="Asia/Tokyo")


@pytest.mark.parametrize("form", ["row", "pandas"])
@pytest.mark.parametrize(
    ("kind", "value", "stored"),
    [
        ("int", 1.5, None),
        ("int", np.float64(1.5), None),
        ("int", Decimal("1.5"), None),
        ("int", 2.0, 2),
        ("float", 1e300, None),
        ("float", 2.0**128 - 2.0**103, None),
        ("float", 3.4028235e38, np.float32(3.4028235e38)),
        ("float", float("inf"), float("inf")),
        ("timestamp_ntz", 5, None),
        ("date", 5, None),
        ("date", date(2024, 1, 1), date(2024, 1, 1)),
        ("array<int>", [1, 1.5], None),
        ("array<int>", np.array([1.5]), None),
        ("array<int>", np.array([1, 2]), [1, 2]),
        ("array<float>", np.array([1e300]), None),
        ("array<timestamp_ntz>", np.array(["2024-01-01"], "M8[s]"), [datetime(2024, 1, 1)]),
        ("array<int>", [1, None, 2.0], [1, None, 2]),
        ("map<string,float>", {"x": 1e300}, None),
        ("map<int,string>", {1.5: "x"}, None),
        ("struct<a:string,b:int>", ("x", 1.5), None),
        ("struct<a:string,b:int>", Row(a="x", b=1.5), None),
        ("struct<a:string,b:array<timestamp_ntz>>", {"b": [5]}, None),
        ("struct<a:string,b:int>", {"b": 1}, {"a": None, "b": 1}),
    ],
    ids=str,
)
def test_output_that_arrow_would_cut_or_read_as_a_time_is_refused(
    form: str, kind: str, value: Any, stored: Any
) -> None:
    """`stored`: None if the value is refused."""
    if stored is None:
        with pytest.raises(ProcessorError, match=r"output column 'v' is .*, which can't hold .* unchanged"):
            stored_of(value, f"v {kind}", form)
    else:
        assert stored_of(value, f"v {kind}", form) == stored


def stored_of(value: Any, schema: Any, form: str) -> Any:
    class Yields(Rows):
        def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
            yield Row(v=value) if form == "row" else pd.DataFrame({"v": pd.Series([value, None], dtype=object)})

    return run(Yields, [("a", 1)], "k string, n int", schema, api=form)[0][0]


TWO_DAYS = pd.Timestamp("2024-01-03") - pd.Timestamp("2024-01-01")


@pytest.mark.parametrize(
    ("kind", "value", "stored", "forms"),
    [
        (DateType(), pd.NaT, None, "row pandas"),
        (ArrayType(DateType()), [pd.NaT, date(2024, 1, 1)], [None, date(2024, 1, 1)], "row pandas"),
        (MapType(StringType(), DateType()), {"x": pd.NaT}, [("x", None)], "row pandas"),
        (DayTimeIntervalType(), TWO_DAYS, timedelta(2), "row pandas"),
        (DayTimeIntervalType(), pd.NaT, None, "row"),
        (ArrayType(DayTimeIntervalType()), [TWO_DAYS], [timedelta(2)], "row"),
        (ArrayType(DayTimeIntervalType()), np.array([5], "m8[s]"), [timedelta(seconds=5)], "row"),
        (StructType().add("a", DateType()), Row(a=pd.NaT), {"a": None}, "row pandas"),
    ],
    ids=str,
)
def test_nat_is_stored_as_null_and_a_time_difference_of_pandas_keeps_its_length(
    kind: DataType, value: Any, stored: Any, forms: str
) -> None:
    for form in forms.split():
        assert stored_of(value, StructType().add("v", kind), form) == stored


class Money(float):
    pass


class MoneyType(UserDefinedType):  # type: ignore[misc]
    """Stores cents."""

    sqlType = classmethod(lambda cls: LongType())
    module = classmethod(lambda cls: __name__)

    def serialize(self, money: Money) -> int:
        return round(money * 100)


Money.__UDT__ = MoneyType()  # type: ignore[attr-defined]


def test_a_user_defined_type_converts_its_values_itself() -> None:
    assert stored_of(Money(1.55), StructType().add("v", MoneyType()), "pandas") == 155
