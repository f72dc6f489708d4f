"""Processors with arguments, under real Spark and under us: broadcast variables, accumulators, and what ends a process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import Row

from cairn.operations.intervals.run_interval import run_interval
from state_backend.values import errors
from tests.support.both_engines import run_both, run_under_cairn
from tests.support.counting import DAYS, Counting, counting, day
from tests.support.spark_streaming import Case

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


class Priced(StatefulProcessor):  # type: ignore[misc]
    """Amounts times a price by key; counts its rows in an accumulator, and the tasks that used this copy in a list."""

    def __init__(self, prices: Any, rows: Any, factor: int) -> None:
        self.prices, self.rows, self.factor = prices, rows, factor
        self.used: list[str] = []

    def init(self, handle: Any) -> None:
        self.used.append("init")
        self._total = handle.getValueState("total", "sum bigint")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        total = (self._total.get() or (0,))[0]
        for row in rows:
            self.rows.add(1)
            total += row.amount * self.prices.value[key[0]] * self.factor
        self._total.update((total,))
        yield Row(user=key[0], total=total, used=len(self.used))

    def close(self) -> None: ...


@pytest.mark.long("twenty seconds of Spark")
def test_processor_arguments_accumulators_and_broadcasts_reach_each_task(spark: SparkSession, tmp_path: Path) -> None:
    """Each task has a copy of its own, and what ``init`` does on the driver stays there. Spark 4.3 itself has no broadcasts in a
    processor (BROADCAST_VARIABLE_NOT_LOADED, from its ``init`` on the driver)."""
    by_key = {"ann": 2, "bob": 3}
    rows = spark.sparkContext.accumulator(0)
    instance = Priced(SimpleNamespace(value=by_key), rows, 10)
    case = Case(
        processor=lambda: instance,  # type: ignore[arg-type]
        input_schema="user string, amount bigint, seq bigint",
        output_schema="user string, total bigint, used int",
        key=["user"],
        batches=[[("ann", 1, 0), ("bob", 2, 1), ("ann", 3, 2)], [("ann", 4, 3)]],
        states={"total": "value"},
    )
    both = run_both(spark, case, tmp_path)
    assert both.differences() == []
    expected = [[("ann", 80, 1), ("bob", 60, 1)], [("ann", 160, 1)]]
    assert [sorted((r["user"], r["total"], r["used"]) for r in rows) for rows in both.cairn.outputs] == expected
    assert rows.value == 8, "four rows under each"
    assert instance.used == []

    broadcast: Any = Priced(spark.sparkContext.broadcast(by_key), rows, 10)
    ours, _ = run_under_cairn(
        spark, replace(case, processor=broadcast), both.files, tmp_path / "broadcast", both.spark.processing_times_ms
    )
    assert ours.outputs == both.cairn.outputs


class Ends(Counting):
    """Ends its process where it is told to."""

    def __init__(self, where: str) -> None:
        self._where = where

    def init(self, handle: Any) -> None:
        super().init(handle)
        if self._where == "init":
            sys.exit("enough")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        if self._where == "handler":
            sys.exit(3)
        if self._where == "unprintable":
            raise Unprintable(key)
        return Counting.handleInputRows(self, key, rows, timerValues)


class Unprintable(BaseException):
    def __str__(self) -> str:
        raise ValueError

    def __reduce__(self) -> Any:
        raise TypeError("it can't be pickled")


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("init", "Ends.init failed on the driver: SystemExit: enough; a processor must not end its process"),
        (
            "handler",
            "handleInputRows, key ('ann',), interval [2024-01-01T00:00:00Z, 2024-01-02T00:00:00Z): SystemExit: 3; a proc",
        ),
        ("unprintable", "2024-01-02T00:00:00Z): Unprintable: <its __str__ raised ValueError>; a processor must not"),
    ],
)
def test_a_processor_that_ends_its_process_fails_the_interval_with_the_cause(
    spark: SparkSession, tmp_path: Path, where: str, says: str
) -> None:
    DAYS.clear()
    DAYS[day(0).start] = [("ann", "pear", 1)]
    with pytest.raises(errors.ProcessorError) as raised:
        run_interval(spark, counting(processor=partial(Ends, where), parallelism=1), day(0), str(tmp_path))
    assert says in str(raised.value)
    assert str(raised.value).startswith("pipeline 'counting': ")
