"""The order in which a shard's rows arrive."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cairn.rows.routing import PART, Inputs, route_in_order

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


@pytest.mark.parametrize("max_parallelism", [3, 32_768])
def test_integers_arrive_by_key_group_key_kind_and_value(spark: SparkSession, max_parallelism: int) -> None:
    """The sort compares a clamped prefix first; nulls and the ends of the range are where it could go wrong."""
    limit = 2**47
    edges = [None, -(2**63), 2**63 - 1, limit - 2, limit - 1, limit, limit + 5, 1 - limit, -limit, -limit - 7]
    keys = [*edges, *range(-50, 50)]
    rows = spark.createDataFrame([(k, n if n % 3 else None) for n, k in enumerate(keys + keys)], "k long, v int")
    initial = spark.createDataFrame([(k, str(n)) for n, k in enumerate(keys)], "k long, s string")
    inputs = Inputs(rows=rows, initial=initial, key=["k"])
    routed = route_in_order(spark, inputs, parts=[b"a", b"b", b"c"], max_parallelism=max_parallelism)
    found = [
        (r["__key_group"], r["__key_0"] is not None, r["__key_0"] or 0, r["__kind"], r["__input"] and r["__input"].v)
        for r in routed.collect()
    ]
    # Partitions are collected in the order of shards, so of key groups.
    assert found == sorted(found, key=lambda row: (*row[:4], row[4] or 0))
    assert len(found) == 3 + 3 * len(keys)
    parts = [r[PART] for r in routed.collect()]
    assert [p for p in parts if p is not None] == [b"a", b"b", b"c"] and parts[0] == b"a"
