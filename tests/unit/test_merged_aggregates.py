"""Merged aggregates of some sets of rows equal the aggregate of all rows."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql.streaming.stateful_processor import TimerValues
from pyspark.sql.types import BinaryType, DecimalType, DoubleType, LongType, StringType

from cairn.aggregates import Aggregate, ApproxDistinct, Count, First, Last, Max, Mean, Min, StdDev, Sum, Variance
from cairn.aggregates.groups import Arrivals, Groups
from cairn.arrow_processor import KeyedBatch
from cairn.errors import ProcessorError
from cairn.spark_versions import to_arrow_type

# Two sets of rows of the first key, one of the second, and three of the third. Each set came as a batch of its own.
SETS = [[None], [3, None, 5], [None], [7, 7, 1], [2], [None]]
KEY_OF_SET = [0, 0, 1, 2, 2, 2]
CASES = [
    (LongType(), lambda n: n),
    (DoubleType(), lambda n: None if n is None else n / 4),
    (DecimalType(9, 2), lambda n: None if n is None else Decimal(n) / 4),
    (StringType(), lambda n: None if n is None else f"text {n}"),
    (BinaryType(), lambda n: None if n is None else bytes([n])),
]


def groups(values: list[list[Any]], of: pa.DataType, keys: list[int], name: str = "v") -> Groups:
    """Return rows by key: one list of values for each key."""
    lengths = [len(some) for some in values]
    batch = KeyedBatch(
        keys=pa.table({"k": keys}),
        rows=pa.table({name: pa.array([value for some in values for value in some], of)}),
        row_offsets=np.append(0, np.cumsum(lengths)).astype(np.int64),
        states={},
        exists={},
        time=TimerValues(0, 0),
    )
    return Groups(batch, Arrivals(interval_ms=5, numbers=np.arange(sum(lengths))))


def parts_of(aggregate: Aggregate, of: Any, values: list[list[Any]], keys: list[int]) -> dict[str, pa.Array]:
    types = aggregate.parts_to_merge(None if aggregate.column is None else of)
    nothing = {name: pa.nulls(len(values), to_arrow_type(part)) for name, part in types.items()}
    found = aggregate.step(groups(values, to_arrow_type(of), keys), nothing)[0]
    return {name: found[name] for name in types}


def merged(aggregate: Aggregate, parts: dict[str, pa.Array], at: list[int]) -> dict[str, list[Any]]:
    batch = KeyedBatch(
        keys=pa.table({"k": range(len(at) - 1)}),
        rows=pa.table(parts),
        row_offsets=np.array(at),
        states={},
        exists={},
        time=TimerValues(0, 0),
    )
    return {name: column.to_pylist() for name, column in aggregate.merge(Groups(batch)).items()}


AGGREGATES = [
    Count(),
    Count("v"),
    Sum("v"),
    Mean("v"),
    Variance("v"),
    StdDev("v"),
    Min("v"),
    Max("v"),
    First("v"),
    First("v", ignore_nulls=True),
    Last("v"),
    Last("v", ignore_nulls=True),
    ApproxDistinct("v"),
]
TEXTS = (StringType, BinaryType)


@pytest.mark.parametrize(
    ("aggregate", "of", "value"),
    [
        (aggregate, of, value)
        for aggregate in AGGREGATES
        for of, value in CASES
        if not (isinstance(of, TEXTS) and isinstance(aggregate, Sum | Mean | Variance))
    ],
    # A function's repr has its address, which differs between processes.
    ids=lambda part: None if callable(part) else str(part),
)
def test_merged_aggregates_equal_the_aggregate_of_all_rows(aggregate: Any, of: Any, value: Any) -> None:
    sets = [[value(n) for n in some] for some in SETS]
    of_sets = parts_of(aggregate, of, sets, KEY_OF_SET)
    whole = parts_of(aggregate, of, [[*sets[0], *sets[1]], sets[2], [*sets[3], *sets[4], *sets[5]]], [0, 1, 2])
    found = merged(aggregate, of_sets, [0, 2, 3, 6])
    for name, column in whole.items():
        expected = column.to_pylist()
        if name in ("interval_ms", "number"):
            continue
        if name == "squares":
            assert found[name] == pytest.approx(expected, rel=1e-12)
        else:
            assert found[name] == expected, name


def test_merged_dense_sketches_equal_the_sketch_of_all_rows() -> None:
    coarse = ApproxDistinct("v", relative_error=0.3)
    sets = [list(range(40)), [1], list(range(30, 90)), [], list(range(7))]
    sets[3] = [None]
    parts = parts_of(coarse, LongType(), sets, [0, 0, 0, 1, 2])
    whole = parts_of(coarse, LongType(), [sets[0] + sets[1] + sets[2], sets[3], sets[4]], [0, 1, 2])
    assert merged(coarse, parts, [0, 3, 4, 5])["sketch"] == whole["sketch"].to_pylist()


def test_merged_first_and_last_go_by_the_order_of_arrival() -> None:
    parts = {"interval_ms": pa.array([9, 5, 5]), "number": pa.array([0, 3, 2])}
    values = pa.array(["a", "b", "c"])
    first = merged(First("v"), {"first": values, "seen": pa.array([True] * 3), **parts}, [0, 3])
    last = merged(Last("v"), {"last": values, **parts}, [0, 3])
    assert (first["first"], last["last"]) == (["c"], ["a"])


def test_a_merged_sum_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ProcessorError, match="the sum of column 'v' does not fit int64 at key k=0"):
        merged(Sum("v"), {"sum": pa.array([2**63 - 1, 1])}, [0, 2])
