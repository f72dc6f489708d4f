"""Which row goes to which shard, in Spark's JVM.

One DataFrame of ticks, initial-state rows and input rows is made, which has all columns side by side:

    __key_group int | __part binary | __kind tinyint | __input_0, __input_1, … | __initial_0, … where there is an initial state

A task puts these rows in order (`arrange_rows`); structs would cost the shuffle a copy of each row. Rows of types that only Spark can
order are sorted here, and laid out as jobs get them:

    __key_group int | __part binary | __kind tinyint | __key_0, __key_1, … | __input struct<source columns>
                                                  | __initial struct<initial state's columns>, where there is such

The key's columns stand by themselves, since the sort compares them more than anything else.

``__part`` is what travels to one shard alone: of ticks only. A tick comes first in its partition. A tick per shard makes sure that a shard without input runs too (its timers may be due) and that adaptive execution can't
drop or merge it. Rows are placed by ``repartitionById`` and sorted by key group, key, kind, ``order_by`` and then every
other column (``row_order``), so that the order within a key is total and depends on neither file splits nor shuffle order.

Of keys that are equal to Spark (0.0 and -0.0) the columns hold one, so that a key does not depend on which row came first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import functions as F
from pyspark.sql.types import (
    BinaryType,
    ByteType,
    DataType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StructField,
    StructType,
)

from cairn.rows.row_order import bytes_of, needs_bytes, normalised, spark_order, tie_breaks
from state_backend.formats.key_codec import check_key_schema
from state_backend.formats.types import parse_struct
from state_backend.values.errors import UsageError
from state_backend.values.key_groups import range_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

TICK, INITIAL, INPUT = 0, 1, 2
KEY_GROUP, PART, KIND = "__key_group", "__part", "__kind"


def key_schema_of(schema: StructType, key: Sequence[str]) -> StructType:
    """The key columns' part of the input's schema. Raises: KeyTypeError if a type can't be a key's."""
    key_schema = StructType([schema[name] for name in key])
    check_key_schema(parse_struct(key_schema.jsonValue()))
    return key_schema


def check_order_by(order_by: Sequence[str], schema: StructType) -> None:
    """Raises: UsageError for a column that the input lacks."""
    unknown = [name for name in order_by if name not in schema.names]
    if unknown:
        raise UsageError(
            f"order_by names {', '.join(unknown)}, which the input lacks; found: {', '.join(schema.names)}"
        )


def route(
    spark: SparkSession,
    rows: DataFrame,
    initial: DataFrame | None = None,
    *,
    key: Sequence[str],
    initial_key: Sequence[str] = (),
    order_by: Sequence[str],
    parts: Sequence[bytes],
    max_parallelism: int,
    in_order: bool = True,
) -> DataFrame:
    """The ticks and rows of all shards, each shard one sorted partition; partition number = shard. ``parts``: for each shard what its
    tick holds. ``initial_key``: what the key's columns are called in ``initial``, in the key's order, if otherwise. ``in_order`` False:
    as `arrange_rows` takes them, not sorted and without structs."""
    parallelism = len(parts)
    schema = rows.schema
    check_order_by(order_by, schema)
    if not in_order:
        flat = _tick_rows(spark, parts, max_parallelism, TICK)
        flat = flat.unionByName(_flat(rows, INPUT, key, max_parallelism), allowMissingColumns=True)
        if initial is not None:
            initial_rows = _flat(initial, INITIAL, initial_key or key, max_parallelism)
            flat = flat.unionByName(initial_rows, allowMissingColumns=True)
        return flat.repartitionById(parallelism, _shard(parallelism, max_parallelism))
    keyed = [_keyed(rows, INPUT, "__input", key, max_parallelism)]
    if initial is not None:
        keyed.append(_keyed(initial, INITIAL, "__initial", initial_key or key, max_parallelism))
    routed = _with_ticks(spark, parts, keyed, max_parallelism)
    by_kind = [("__input", schema, [*order_by, *schema.names], key)]
    if initial is not None:
        by_kind.append(("__initial", initial.schema, initial.schema.names, initial_key or key))
    # Known here: to ask the frame for its columns is a request to a Connect server, which analyses the whole plan for it.
    in_bytes = [_BYTES[name] for name, of, *_ in by_kind if any(needs_bytes(f.dataType) for f in of)]
    placed = routed.repartitionById(parallelism, _shard(parallelism, max_parallelism)).sortWithinPartitions(
        *_sort_prefix(schema[key[0]].dataType),
        F.col("__key_group"),
        *[F.col(name) for name in key_columns(len(key))],
        F.col("__kind"),
        *[column for part in by_kind for column in _in_order(*part)],
        *[column for name, of, *_ in by_kind for column in tie_breaks([(_in(name, f.name), f.dataType) for f in of])],
        *map(F.col, in_bytes),
    )
    return placed.drop(*in_bytes) if in_bytes else placed


# What tells rows apart that nothing in the JVM orders, by the kind's column.
_BYTES = {"__input": "__input_bytes", "__initial": "__initial_bytes"}


def key_columns(count: int) -> list[str]:
    """What the key's columns are called on their way."""
    return [f"__key_{i}" for i in range(count)]


def flat_columns(kind: int, count: int) -> list[str]:
    """What the columns of a kind are called where they travel side by side."""
    return [f"__{'input' if kind == INPUT else 'initial'}_{i}" for i in range(count)]


def _with_ticks(
    spark: SparkSession, parts: Sequence[bytes], keyed: Sequence[DataFrame], max_parallelism: int
) -> DataFrame:
    # Typed nulls rather than columns that are only there on one side: key columns may be NOT NULL. The rows themselves are
    # left to the union, since some types that a source may give (TIME) can't be cast to.
    types = {f.name: f.dataType for part in keyed for f in part.schema if f.name not in (KEY_GROUP, KIND, *_BYTES)}
    routed = _tick_rows(spark, parts, max_parallelism).select(
        "*",
        F.lit(TICK).cast("tinyint").alias(KIND),
        *[F.lit(None).cast(data_type).alias(name) for name, data_type in types.items()],
    )
    for part in keyed:
        routed = routed.unionByName(part, allowMissingColumns=True)
    return routed


def _flat(rows: DataFrame, kind: int, key: Sequence[str], max_parallelism: int) -> DataFrame:
    # As texts: each Column that PySpark makes costs a few requests to the JVM, 1,300 an interval of 13 columns.
    names = rows.schema.names
    return rows.selectExpr(
        _key_group(key, max_parallelism),
        f"cast({kind} as tinyint) as {KIND}",
        *[f"{_quoted(name)} as {flat}" for name, flat in zip(names, flat_columns(kind, len(names)), strict=True)],
    )


def _key_group(key: Sequence[str], max_parallelism: int) -> str:
    hashed = f"xxhash64({', '.join(map(_quoted, key))})"
    return f"cast(pmod({hashed}, {max_parallelism}) as int) as {KEY_GROUP}"


def _keyed(rows: DataFrame, kind: int, column: str, key: Sequence[str], max_parallelism: int) -> DataFrame:
    unordered = [_column(f.name) for f in rows.schema if needs_bytes(f.dataType)]
    return rows.select(
        F.expr(_key_group(key, max_parallelism)),
        F.lit(kind).cast("tinyint").alias("__kind"),
        *[
            normalised(_column(name), rows.schema[name].dataType).alias(alias)
            for name, alias in zip(key, key_columns(len(key)), strict=True)
        ],
        F.struct(*[_one_nan(_column(f.name), f.dataType).alias(f.name) for f in rows.schema]).alias(column),
        *([bytes_of(unordered).alias(_BYTES[column])] if unordered else ()),
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


def _in_order(column: str, schema: StructType, names: Sequence[str], key: Sequence[str]) -> list[Column]:
    columns = [
        spark_order(_in(column, name), schema[name].dataType) for name in dict.fromkeys(names) if name not in key
    ]
    return [column for column in columns if column is not None]


def _in(column: str, name: str) -> Column:
    return F.col(f"{column}.`{name.replace('`', '``')}`")


def _one_nan(column: Column, data_type: DataType) -> Column:
    """Files hold NaN with and without a sign, which nothing in the JVM tells apart, but the bytes of state do."""
    return (
        F.nanvl(column, F.lit(float("nan")).cast(data_type))
        if isinstance(data_type, FloatType | DoubleType)
        else column
    )


def ticks(spark: SparkSession, parts: Sequence[bytes], *, max_parallelism: int) -> DataFrame:
    """One row per shard, with its part, each in its own partition: for jobs that have no input."""
    rows = _tick_rows(spark, parts, max_parallelism)
    return rows.repartitionById(len(parts), _shard(len(parts), max_parallelism))


def place(
    spark: SparkSession, frames: Sequence[DataFrame], *, parts: Sequence[bytes], max_parallelism: int
) -> DataFrame:
    """Rows with a ``__key_group`` in their shards' partitions, in any order behind a tick, of which all but group and part is null. The
    frames may have different columns."""
    rows = _tick_rows(spark, parts, max_parallelism)
    for frame in frames:
        rows = rows.unionByName(frame, allowMissingColumns=True)
    shard = _shard(len(parts), max_parallelism)
    return rows.repartitionById(len(parts), shard).sortWithinPartitions(F.col(PART).isNull())


_TICK = StructType([StructField(KEY_GROUP, IntegerType()), StructField(PART, BinaryType())])
_TICK_OF_KIND = StructType([*_TICK, StructField(KIND, ByteType())])


def _tick_rows(spark: SparkSession, parts: Sequence[bytes], max_parallelism: int, kind: int | None = None) -> DataFrame:
    """In one partition, which is one task. ``kind``: has a column of it too."""
    firsts = [range_of(shard, len(parts), max_parallelism).first for shard in range(len(parts))]
    columns = {KEY_GROUP: pa.array(firsts, pa.int32()), PART: pa.array(parts, pa.binary())}
    if kind is not None:
        columns[KIND] = pa.array([kind] * len(parts), pa.int8())
    # As Arrow: Spark takes that for rows of its own, and reads a list of Python's by an RDD with a decoder.
    return spark.createDataFrame(pa.table(columns), _TICK if kind is None else _TICK_OF_KIND).coalesce(1)


def _shard(parallelism: int, max_parallelism: int) -> Column:
    return F.expr(f"cast(__key_group as bigint) * {parallelism} div {max_parallelism}").cast("int")


def _column(name: str) -> Column:
    return F.col(_quoted(name))


def _quoted(name: str) -> str:
    return f"`{name.replace('`', '``')}`"
