"""Placement of rows in shards, in Spark's JVM.

One DataFrame holds ticks, initial-state rows and input rows, with all columns side by side:

    __key_group int | __part binary | __kind tinyint | __input_0, __input_1, … | __initial_0, … where there is an initial state

A task sorts these rows (`arrange_rows`); structs would cost the shuffle a copy of each row. Rows of types that only Spark can order are
sorted here and have the layout that jobs read:

    __key_group int | __part binary | __kind tinyint | __key_0, __key_1, … | __input struct<source columns>
                                                  | __initial struct<initial state's columns>, where there is an initial state

The key's columns are columns of their own, because the sort compares them most often.

``__part`` is the data of one shard; only ticks have a part. A tick is the first row of its partition. Each shard has a tick, because a
shard without input runs too (its timers may be due) and adaptive execution must neither drop nor merge its partition.
``repartitionById`` places the rows. They are sorted by key group, key, kind, ``order_by`` and then by every other column (`row_order`).
So the order within a key is total and depends on neither file splits nor shuffle order.

Spark takes some keys for equal (0.0 and -0.0). The key's columns hold one of them, because the key must not depend on the row that comes
first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    """Return the key columns' part of the input's schema.

    Raises:
        KeyTypeError: A column's type can't be a key's.
    """
    key_schema = StructType([schema[name] for name in key])
    check_key_schema(parse_struct(key_schema.jsonValue()))
    return key_schema


def check_order_by(order_by: Sequence[str], schema: StructType) -> None:
    """Raise UsageError if ``order_by`` names a column that the input lacks."""
    unknown = [name for name in order_by if name not in schema.names]
    if unknown:
        raise UsageError(
            f"order_by names {', '.join(unknown)}, which the input lacks; found: {', '.join(schema.names)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The rows of an interval before they are routed.

    Attributes:
        initial: The initial state's rows; None if the interval has none.
        key: The key's columns in ``rows``.
        initial_key: The key's columns in ``initial``, in the order of ``key``; empty: the names in ``key``.
        order_by: Columns of ``rows`` that order the rows of a key.
    """

    rows: DataFrame
    initial: DataFrame | None = None
    key: Sequence[str]
    initial_key: Sequence[str] = ()
    order_by: Sequence[str] = ()

    def by_kind(self) -> list[tuple[int, DataFrame, Sequence[str]]]:
        """Return kind, rows and key columns of the input and of the initial state, if there is one."""
        kinds: list[tuple[int, DataFrame, Sequence[str]]] = [(INPUT, self.rows, self.key)]
        if self.initial is not None:
            kinds.append((INITIAL, self.initial, self.initial_key or self.key))
        return kinds


def route(spark: SparkSession, inputs: Inputs, *, parts: Sequence[bytes], max_parallelism: int) -> DataFrame:
    """Place the ticks and rows of all shards, unsorted and without structs, as `arrange_rows` takes them.

    Args:
        parts: For each shard the data of its tick.

    Returns:
        A frame with one partition for each shard; the partition's number is the shard.

    Raises:
        UsageError: ``order_by`` names a column that the input lacks.
    """
    check_order_by(inputs.order_by, inputs.rows.schema)
    flat = _tick_rows(spark, parts, max_parallelism, TICK)
    for kind, rows, key in inputs.by_kind():
        flat = flat.unionByName(_flat(rows, kind, key, max_parallelism), allowMissingColumns=True)
    return flat.repartitionById(len(parts), _shard(len(parts), max_parallelism))


def route_in_order(spark: SparkSession, inputs: Inputs, *, parts: Sequence[bytes], max_parallelism: int) -> DataFrame:
    """Place the ticks and rows of all shards as ``route`` does, sorted by Spark and in the layout that jobs read."""
    schema = inputs.rows.schema
    check_order_by(inputs.order_by, schema)
    keyed: list[DataFrame] = []
    values: list[Column] = []
    ties: list[Column] = []
    in_bytes: list[str] = []
    for kind, rows, key in inputs.by_kind():
        of, name = rows.schema, _STRUCT[kind]
        keyed.append(_keyed(rows, kind, key, max_parallelism))
        order_by = inputs.order_by if kind == INPUT else ()
        values += _in_order(name, of, [*order_by, *of.names], key)
        ties += tie_breaks([(_in(name, f.name), f.dataType) for f in of])
        # Read from the schema: to ask a frame for its columns is a request to a Connect server, which analyses the whole plan.
        if any(needs_bytes(f.dataType) for f in of):
            in_bytes.append(_BYTES[name])
    routed = _with_ticks(spark, parts, keyed, max_parallelism)
    placed = routed.repartitionById(len(parts), _shard(len(parts), max_parallelism)).sortWithinPartitions(
        *_sort_prefix(schema[inputs.key[0]].dataType),
        F.col(KEY_GROUP),
        *map(F.col, key_columns(len(inputs.key))),
        F.col(KIND),
        *values,
        *ties,
        *map(F.col, in_bytes),
    )
    return placed.drop(*in_bytes) if in_bytes else placed


_STRUCT = {INPUT: "__input", INITIAL: "__initial"}
# By the kind's struct, the column that breaks ties between rows that nothing in the JVM orders.
_BYTES = {"__input": "__input_bytes", "__initial": "__initial_bytes"}


def key_columns(count: int) -> list[str]:
    """Return the names of the key's columns in a routed frame."""
    return [f"__key_{i}" for i in range(count)]


def flat_columns(kind: int, count: int) -> list[str]:
    """Return the names of a kind's columns where they are side by side."""
    return [f"{_STRUCT[kind]}_{i}" for i in range(count)]


def _with_ticks(
    spark: SparkSession, parts: Sequence[bytes], keyed: Sequence[DataFrame], max_parallelism: int
) -> DataFrame:
    # Ticks get typed nulls: key columns may be NOT NULL, and a union makes no nulls for those. The rows get their missing columns from
    # the union, because nothing can be cast to some types of sources (TIME).
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
    # Expressions are texts: each Column object costs PySpark a few requests to the JVM, 1,300 for an interval of 13 columns.
    names = rows.schema.names
    return rows.selectExpr(
        _key_group(key, max_parallelism),
        f"cast({kind} as tinyint) as {KIND}",
        *[f"{_quoted(name)} as {flat}" for name, flat in zip(names, flat_columns(kind, len(names)), strict=True)],
    )


def _key_group(key: Sequence[str], max_parallelism: int) -> str:
    hashed = f"xxhash64({', '.join(map(_quoted, key))})"
    return f"cast(pmod({hashed}, {max_parallelism}) as int) as {KEY_GROUP}"


def _keyed(rows: DataFrame, kind: int, key: Sequence[str], max_parallelism: int) -> DataFrame:
    column = _STRUCT[kind]
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
    """Return an integer that orders as key group and first key column do, except for ties.

    Spark's sort compares an integer without a look at the rows, in half the time. The key group is in the upper 15 bits. The lower 48 bits
    hold 0 for null, else the key, clamped.
    """
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
    """Replace every NaN by one NaN: files hold NaN with and without a sign, equal in the JVM but not in the bytes of state."""
    return (
        F.nanvl(column, F.lit(float("nan")).cast(data_type))
        if isinstance(data_type, FloatType | DoubleType)
        else column
    )


def ticks(spark: SparkSession, parts: Sequence[bytes], *, max_parallelism: int) -> DataFrame:
    """Make one row for each shard, with its part, in a partition of its own: for jobs without input."""
    rows = _tick_rows(spark, parts, max_parallelism)
    return rows.repartitionById(len(parts), _shard(len(parts), max_parallelism))


def place(
    spark: SparkSession, frames: Sequence[DataFrame], *, parts: Sequence[bytes], max_parallelism: int
) -> DataFrame:
    """Place rows that have a ``__key_group`` in their shards' partitions, in any order behind a tick.

    All columns of a tick but group and part are null. The frames may have different columns.
    """
    rows = _tick_rows(spark, parts, max_parallelism)
    for frame in frames:
        rows = rows.unionByName(frame, allowMissingColumns=True)
    shard = _shard(len(parts), max_parallelism)
    return rows.repartitionById(len(parts), shard).sortWithinPartitions(F.col(PART).isNull())


_TICK = StructType([StructField(KEY_GROUP, IntegerType()), StructField(PART, BinaryType())])
_TICK_OF_KIND = StructType([*_TICK, StructField(KIND, ByteType())])


def _tick_rows(spark: SparkSession, parts: Sequence[bytes], max_parallelism: int, kind: int | None = None) -> DataFrame:
    """Make the ticks in one partition, which is one task; with a column of their kind if ``kind`` is given."""
    firsts = [range_of(shard, len(parts), max_parallelism).first for shard in range(len(parts))]
    columns = {KEY_GROUP: pa.array(firsts, pa.int32()), PART: pa.array(parts, pa.binary())}
    if kind is not None:
        columns[KIND] = pa.array([kind] * len(parts), pa.int8())
    # An Arrow table: Spark turns a list of Python's into an RDD with a decoder.
    return spark.createDataFrame(pa.table(columns), _TICK if kind is None else _TICK_OF_KIND).coalesce(1)


def _shard(parallelism: int, max_parallelism: int) -> Column:
    return F.expr(f"cast(__key_group as bigint) * {parallelism} div {max_parallelism}").cast("int")


def _column(name: str) -> Column:
    return F.col(_quoted(name))


def _quoted(name: str) -> str:
    return f"`{name.replace('`', '``')}`"
