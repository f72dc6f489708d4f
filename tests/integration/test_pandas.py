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

from cairn.operations.intervals.run_interval import run_interval
from cairn.pipeline import Interval
from tests.support.counting import START, counting, day
from tests.support.spark_tables import output_rows

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


def test_frames_keep_integers_and_their_columns_map_by_name_or_position(spark: SparkSession, tmp_path: Path) -> None:
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
    assert output_rows(spark, tmp_path) == sorted(
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
    totals = {(user, what): total for user, what, total in output_rows(spark, tmp_path)}
    assert totals["ann", "timer"] == 25_000
    assert totals["ann", "10000 int64+10000 int64+5000 int64"] == sum(range(25_000))
