"""The pandas API, and what a processor that does not keep the contract is told, in each API."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pytest
from pyspark.sql import DataFrame
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import Row

from cairn.data_sources.keyed_output import KeyedOutput
from cairn.operations.intervals.run_interval import run_interval
from cairn.pipeline import Interval
from state_backend.values import errors
from tests.support.counting import START, counting, day

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

ROWS: dict[datetime, list[tuple[Any, ...]]] = {}
SCHEMA = "user string, n int, price decimal(10,2), at timestamp, tags array<string>"


def read_rows(spark: SparkSession, interval: Interval) -> DataFrame:
    return spark.createDataFrame(ROWS.get(interval.start, []), SCHEMA)


@pytest.fixture(autouse=True)
def rows() -> Iterator[None]:
    ROWS.clear()
    yield
    ROWS.clear()


class Frames(StatefulProcessor):
    """Sums by pandas, and tells what it was given."""

    def init(self, handle: Any) -> None:
        self._handle = handle
        self._sum = handle.getValueState("sum", "n long, rows long, newest timestamp")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[pd.DataFrame]:
        total, count, newest = self._sum.get() or (0, 0, None)
        kinds = []
        for frame in rows:
            assert list(frame.columns) == ["user", "n", "price", "at", "tags"]
            assert list(frame.index) == list(range(len(frame)))
            kinds.append(f"{len(frame)} {frame['n'].dtype}")
            total, count, newest = total + frame["n"].sum(), count + len(frame), frame["at"].max()
        self._sum.update((int(total), count, newest))
        self._handle.registerTimer(timerValues.getCurrentProcessingTimeInMs())
        yield pd.DataFrame({"total": [total], "what": ["+".join(kinds)], "user": [key[0]], "extra": [1]})

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[pd.DataFrame]:
        yield pd.DataFrame([[key.user, "timer", self._sum.get()[1]]])


FRAMES = {
    "source": read_rows,
    "processor": Frames,
    "api": "pandas",
    "output_schema": "user string, what string, total long",
    "order_by": ["n"],
}


def emitted(spark: SparkSession, root: Path) -> list[tuple[Any, ...]]:
    spark.dataSource.register(KeyedOutput)
    reader = spark.read.format("keyed_output").option("root", str(root)).option("pipeline", "counting")
    return sorted((tuple(r) for r in reader.load().collect()), key=str)


def test_frames_in_and_out(spark: SparkSession, tmp_path: Path) -> None:
    """Columns by name or, without names, by position; integers stay integers where a key's own rows have no null."""
    price, at = Decimal("1.50"), datetime(2024, 1, 1, 5)
    ROWS[START] = [
        ("ann", 1, price, at, ["x"]),
        ("ann", 2, price, at, None),
        ("bob", 2**31 - 1, price, at, []),
        ("cid", None, None, None, None),
        ("cid", 7, None, None, None),
        (None, 3, price, at, []),
    ]
    record = run_interval(spark, counting(**FRAMES), day(0), str(tmp_path))
    assert emitted(spark, tmp_path) == sorted(
        [
            ("ann", "2 int64", 3),
            ("ann", "timer", 2),
            ("bob", "1 int64", 2**31 - 1),
            ("bob", "timer", 1),
            ("cid", "2 float64", 7),
            ("cid", "timer", 2),
            (None, "1 int64", 3),
            (None, "timer", 1),
        ],
        key=str,
    )
    assert record.content.totals.keys_touched == 4


def test_a_key_of_many_rows_comes_in_several_frames(spark: SparkSession, tmp_path: Path) -> None:
    """Of 10,000 rows but for the last, as under Spark, wherever the Arrow batches of the shard end."""
    others = [(f"{'a' * n}", n, None, None, None) for n in range(1, 300)]
    ROWS[START] = [*others, *[("ann", n, None, None, None) for n in range(25_000)], ("bob", 1, None, None, None)]
    run_interval(spark, counting(**FRAMES), day(0), str(tmp_path))
    totals = {(user, what): total for user, what, total in emitted(spark, tmp_path)}
    assert totals["ann", "timer"] == 25_000
    assert totals["ann", "10000 int64+10000 int64+5000 int64"] == sum(range(25_000))


class Misbehaving(StatefulProcessor):
    """Does what a test sets; shipped by value, so it is set in a subclass."""

    def init(self, handle: Any) -> None:
        self._value = handle.getValueState("value", "n long, s string")
        self._list = handle.getListState("list", "n long")
        self._map = handle.getMapState("map", "k string", "n long")
        self.prepare(handle)

    def prepare(self, handle: Any) -> None:
        pass

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        return self.misbehave(key, rows)

    def misbehave(self, key: Any, rows: Any) -> Any:
        raise NotImplementedError


def raises(self: Any, key: Any, rows: Any) -> Any:
    return iter([1 / 0])


BAD: list[tuple[str, dict[str, Any], str, str]] = [
    (
        "row",
        {"misbehave": lambda s, k, r: s._value.update((1,))},
        "StateTypeError",
        r"has 2 fields \(n, s\); got 1 values",
    ),
    (
        "row",
        {"misbehave": lambda s, k, r: s._value.update(("1", "s"))},
        "StateTypeError",
        r"state 'value' field 'n': expected bigint, found str '1'",
    ),
    ("row", {"misbehave": lambda s, k, r: s._value.update(None)}, "", "found NoneType None"),
    ("row", {"misbehave": lambda s, k, r: s._list.put([])}, "", "an empty list can't be stored"),
    ("row", {"misbehave": lambda s, k, r: None}, "", "handleInputRows returned None"),
    ("row", {"misbehave": lambda s, k, r: iter([(1, 2)])}, "", "yielded a tuple: .*expected pyspark.sql.Row"),
    (
        "row",
        {"misbehave": lambda s, k, r: iter([Row(user=k[0], what=1, total=5)])},
        "",
        r"output column 'what' is string, and a value does not fit.*the row is \(user='ann', what=1, total=5\)",
    ),
    ("row", {"misbehave": raises}, "", r"handleInputRows, key \('ann',\), interval .*ZeroDivisionError"),
    (
        "row",
        {"prepare": lambda s, h: h.registerTimer(5)},
        "",
        "registerTimer can't be called when the handle is CREATED",
    ),
    (
        "row",
        {"prepare": lambda s, h: s._value.get(), "misbehave": raises},
        "",
        "state 'value': get was called outside a handler",
    ),
    ("row", {"close": lambda s: s._value.get()}, "", "called outside a handler"),
    ("pandas", {"misbehave": lambda s, k, r: iter([Row(user="ann")])}, "", "must yield pandas.DataFrame"),
    (
        "pandas",
        {"misbehave": lambda s, k, r: iter([pd.DataFrame({"usr": ["ann"], "what": ["x"], "total": [1]})])},
        "",
        r"lacks the output column user; it has usr, what, total",
    ),
    (
        "pandas",
        {"misbehave": lambda s, k, r: iter([pd.DataFrame({"user": ["ann"], "what": [1], "total": [1]})])},
        "",
        "output column 'what' is string",
    ),
    (
        "pandas",
        {"misbehave": lambda s, k, r: iter([pd.DataFrame([[1, 2]])])},
        "",
        "has 2 columns without names; .* has 3",
    ),
]


@pytest.mark.parametrize(("api", "behaviour", "error", "message"), BAD, ids=[f"{b[0]}-{n}" for n, b in enumerate(BAD)])
def test_a_processor_that_breaks_the_contract_is_told_what_to_do(
    spark: SparkSession, tmp_path: Path, api: Any, behaviour: dict[str, Any], error: str, message: str
) -> None:
    """The message names the mistake, and nothing is committed."""
    ROWS[START] = [("ann", 1, None, None, None)]
    behaviour = {"misbehave": lambda s, k, r: iter([]), **behaviour}
    bad = type("Bad", (Misbehaving,), {"__module__": __name__, **behaviour})
    with pytest.raises((errors.UsageError, errors.UserCodeError), match=f"(?s){message}"):
        run_interval(spark, counting(**{**FRAMES, "api": api, "processor": bad}), day(0), str(tmp_path))
    assert not list((tmp_path / "counting").rglob("checkpoints/*"))
