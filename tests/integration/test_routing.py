"""The partition of each shard, and the order in which its rows arrive."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from cairn.rows import routing
from cairn.rows.routing import KEY_GROUP, PART, Inputs, route_in_order
from state_backend.values.key_groups import range_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


@pytest.mark.parametrize("max_parallelism", [3, 32_768])
def test_integer_keys_are_sorted_by_key_group_key_kind_and_value(spark: SparkSession, max_parallelism: int) -> None:
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


@pytest.mark.parametrize("parallelism", [1, 2, 3, 7, 64, 1000])
def test_each_row_is_in_the_partition_of_its_shard(spark: SparkSession, parallelism: int) -> None:
    """Every key group has as many rows as its number says, so each partition has a count of its own."""
    max_parallelism = 1500
    rows = spark.range(max_parallelism).selectExpr("cast(id as int) as __key_group", "explode(sequence(0, id)) as n")
    placed = routing._place_by_shard(rows.select(KEY_GROUP), parallelism, max_parallelism)
    found = placed.selectExpr("spark_partition_id() as partition").toArrow()["partition"].to_pylist()
    ranges = [range_of(shard, parallelism, max_parallelism) for shard in range(parallelism)]
    expected = {n: sum(group + 1 for group in range(r.first, r.last + 1)) for n, r in enumerate(ranges)}
    assert Counter(found) == expected


def test_the_hash_of_an_integer_is_that_of_spark(spark: SparkSession) -> None:
    pick = random.Random(57)
    edges = [-(2**31), -(2**31) + 1, -1, 2**31 - 2, 2**31 - 1, *(2**n for n in range(31))]
    numbers = [*edges, *range(3000), *(pick.randrange(-(2**31), 2**31) for _ in range(3000))]
    found = spark.createDataFrame([(n,) for n in numbers], "n int").selectExpr("n", "hash(n) as hash").collect()
    assert {row.n: row.hash for row in found} == {n: routing._hash(n) for n in numbers}
