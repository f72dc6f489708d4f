"""Which row goes to which shard, and in which order: all of it in Spark's JVM.

One DataFrame of ticks, initial-state rows and input rows is made:

    __key_group int | __kind tinyint | __key_0, __key_1, … | __input struct<source columns>
                                                  | __initial struct<initial state's columns>, where there is such

The key's columns stand by themselves, since the sort compares them more than anything else.

A tick per shard makes sure that a shard without input runs too (its timers may be due) and that adaptive execution can't
drop or merge it. Rows are placed by ``repartitionById`` and sorted by key group, key, kind, ``order_by`` and then every
other column, so that the order within a key is total and depends on neither file splits nor shuffle order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark.sql import functions as F
from pyspark.sql.types import (
    ByteType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StructType,
    VariantType,
)

from state_backend.formats.key_codec import check_key_schema
from state_backend.formats.types import parse_struct
from state_backend.values.errors import SourceError, UsageError
from state_backend.values.key_groups import range_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

TICK, INITIAL, INPUT = 0, 1, 2


def key_schema_of(schema: StructType, key: Sequence[str], pipeline: str) -> StructType:
    """The key columns' part of the input's schema. SourceError if one is missing, KeyTypeError if its type can't be a key."""
    missing = [name for name in key if name not in schema.names]
    if missing:
        raise SourceError(
            f"pipeline {pipeline!r}: the input lacks the key column{'s' * (len(missing) > 1)} {', '.join(missing)}; "
            f"found: {', '.join(schema.names)}"
        )
    key_schema = StructType([schema[name] for name in key])
    check_key_schema(parse_struct(key_schema.jsonValue()))
    return key_schema


def route(
    spark: SparkSession,
    rows: DataFrame,
    initial: DataFrame | None = None,
    *,
    key: Sequence[str],
    order_by: Sequence[str],
    parallelism: int,
    max_parallelism: int,
) -> DataFrame:
    """The ticks and rows of all shards, each shard one sorted partition; partition number = shard."""
    schema = rows.schema
    unknown = [name for name in order_by if name not in schema.names]
    if unknown:
        raise UsageError(
            f"order_by names {', '.join(unknown)}, which the input lacks; found: {', '.join(schema.names)}"
        )
    keyed = [_keyed(rows, INPUT, "__input", key, max_parallelism)]
    if initial is not None:
        keyed.append(_keyed(initial, INITIAL, "__initial", key, max_parallelism))
    ticks = _tick_rows(spark, parallelism, max_parallelism).withColumn("__kind", F.lit(TICK).cast("tinyint"))
    for part in keyed:
        # Typed nulls rather than columns that are only there on one side: key columns may be NOT NULL.
        for field in part.schema.fields:
            if field.name not in ticks.columns:
                ticks = ticks.withColumn(field.name, F.lit(None).cast(field.dataType))
    routed = ticks
    for part in keyed:
        routed = routed.unionByName(part, allowMissingColumns=True)
    return routed.repartitionById(parallelism, _shard(parallelism, max_parallelism)).sortWithinPartitions(
        *_sort_prefix(schema[key[0]].dataType),
        F.col("__key_group"),
        *[F.col(name) for name in key_columns(len(key))],
        F.col("__kind"),
        *_total_order("__input", schema, [*order_by, *schema.names], key),
        *(_total_order("__initial", initial.schema, initial.schema.names, key) if initial is not None else ()),
    )


def key_columns(count: int) -> list[str]:
    """What the key's columns are called on their way."""
    return [f"__key_{i}" for i in range(count)]


def _keyed(rows: DataFrame, kind: int, column: str, key: Sequence[str], max_parallelism: int) -> DataFrame:
    key_group = F.pmod(F.xxhash64(*[_column(name) for name in key]), F.lit(max_parallelism)).cast("int")
    return rows.select(
        key_group.alias("__key_group"),
        F.lit(kind).cast("tinyint").alias("__kind"),
        *[_column(name).alias(alias) for name, alias in zip(key, key_columns(len(key)), strict=True)],
        F.struct(*[_column(name) for name in rows.schema.names]).alias(column),
    )


def _sort_prefix(first_key: DataType) -> list[Column]:
    """An integer that orders as key group and first key column do, but for ties: what Spark's sort compares without looking
    at the rows, which halves its time. Key group in the upper 15 bits; below them 0 for null, else the key, clamped."""
    if not isinstance(first_key, ByteType | ShortType | IntegerType | LongType):
        return []
    limit = 2**47 - 1
    clamped = F.greatest(F.lit(1 - limit), F.least(F.lit(limit), F.col("__key_0").cast("bigint"))) + F.lit(limit + 1)
    null_first = F.when(F.col("__key_0").isNull(), F.lit(0)).otherwise(clamped)
    return [F.shiftleft(F.col("__key_group").cast("bigint"), 48) + null_first]


def _total_order(column: str, schema: StructType, names: Sequence[str], key: Sequence[str]) -> list[Column]:
    return [
        _sortable(F.col(column).getField(name), schema[name].dataType)
        for name in dict.fromkeys(names)
        if name not in key
    ]


def ticks(spark: SparkSession, *, parallelism: int, max_parallelism: int) -> DataFrame:
    """One row per shard, each in its own partition: for tasks that have no input."""
    rows = _tick_rows(spark, parallelism, max_parallelism)
    return rows.repartitionById(parallelism, _shard(parallelism, max_parallelism))


def place(spark: SparkSession, frames: Sequence[DataFrame], *, parallelism: int, max_parallelism: int) -> DataFrame:
    """Rows with a ``__key_group`` in their shards' partitions, in any order, and a tick in each, all else of which is null. The
    frames may have different columns."""
    rows = _tick_rows(spark, parallelism, max_parallelism)
    for frame in frames:
        rows = rows.unionByName(frame, allowMissingColumns=True)
    return rows.repartitionById(parallelism, _shard(parallelism, max_parallelism))


def _tick_rows(spark: SparkSession, parallelism: int, max_parallelism: int) -> DataFrame:
    firsts = [range_of(shard, parallelism, max_parallelism).first for shard in range(parallelism)]
    return spark.createDataFrame([(first,) for first in firsts], "__key_group int")


def _shard(parallelism: int, max_parallelism: int) -> Column:
    return F.expr(f"cast(__key_group as bigint) * {parallelism} div {max_parallelism}").cast("int")


def _column(name: str) -> Column:
    return F.col(f"`{name.replace('`', '``')}`")


def _sortable(column: Column, data_type: DataType) -> Column:
    """Maps and variants have no order of their own; their JSON text has one."""
    return F.to_json(column) if _unordered(data_type) else column


def _unordered(data_type: DataType) -> bool:
    if isinstance(data_type, StructType):
        return any(_unordered(f.dataType) for f in data_type.fields)
    element = getattr(data_type, "elementType", None)
    return isinstance(data_type, MapType | VariantType) or (element is not None and _unordered(element))
