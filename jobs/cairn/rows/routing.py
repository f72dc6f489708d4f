"""Place the rows of an interval in Spark partitions, one for each shard.

One DataFrame holds rows of three kinds. The column `__kind` is 0 for a tick, 1 for a row of the initial state, and 2
for an input row.

The job of a shard reads sorted rows in this layout, called the layout of jobs:

    __key_group int | __part binary | __kind tinyint | __key_0, __key_1, … | __input struct<source columns>
                                                     | __initial struct<initial state's columns>

There are two ways to this layout:

1. `route` sends unsorted rows through Spark's shuffle in a flat layout: each source column is a column of its own,
   because structs would cost the shuffle a copy of each row. Then the shard's task calls `arrange_rows`, which sorts
   the rows and converts them to the layout of jobs. The flat layout:

       __key_group int | __part binary | __kind tinyint | __input_0, __input_1, … | __initial_0, …

2. `route_in_order` makes the layout of jobs directly, and Spark sorts the rows. This slower way is only for rows with a
   column of a type that `arrange_rows` can't sort.

The `__initial` columns exist only if the interval has an initial state. The key has columns of its own, because the
sort compares the key most often.

A tick is the first row of each partition. Only ticks have a value in `__part`: bytes that the driver sends to the job
of the tick's shard. A shard has a tick for two reasons. A shard without input must run too, because its timers may be
due. And Spark's adaptive execution must neither drop nor merge the shard's partition.

`route_together` places the rows of several intervals, in the flat layout. In these rows, the `__part` of an input row
is the number of its interval, from 0, as four bytes.

A job gets the rows sorted by key group, key, kind, `order_by` and then by every other column (`row_order`). So the
order within a key is total and depends on neither file splits nor shuffle order.

Spark treats some different keys as equal, such as 0.0 and -0.0. The columns `__key_0`, … hold 0.0 for both, because the
stored key must not depend on which row comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import count, zip_longest
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
    TimestampType,
)

from cairn.rows.row_order import bytes_of, needs_bytes, normalise_zeros, spark_order, tie_breaks
from cairn.spark_versions import with_schema
from state_backend.formats.key_codec import check_key_schema
from state_backend.formats.types import parse_struct
from state_backend.values.errors import UsageError
from state_backend.values.frozen import frozen
from state_backend.values.key_groups import range_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

TICK, INITIAL, INPUT = 0, 1, 2
KEY_GROUP, PART, KIND = "__key_group", "__part", "__kind"


def key_schema_of(schema: StructType, key: Sequence[str]) -> StructType:
    key_schema = StructType([schema[name] for name in key])
    check_key_schema(parse_struct(key_schema.jsonValue()))
    return key_schema


def check_order_by(order_by: Sequence[str], schema: StructType) -> None:
    unknown = [name for name in order_by if name not in schema.names]
    if unknown:
        raise UsageError(
            f"order_by names {', '.join(unknown)}, which the input lacks; the input has {', '.join(schema.names)}"
        )


@frozen
class Numbered:
    """Rows of one or several intervals.

    `number`: SQL expression for the index of a row's interval, from 0, as four bytes. It is no integer, because Spark
    compiles a query again if an integer literal in it changes, but not if a bytes literal changes.
    """

    rows: DataFrame
    number: str


@frozen
class Inputs:
    """Rows of an interval, before `route` or `route_in_order` places them in shards."""

    rows: DataFrame
    # The rows of all intervals of the chunk, if one query of the source reads all of them; else None.
    together: Numbered | None = None
    # The initial state's rows; None if the interval has none.
    initial: DataFrame | None = None
    key: Sequence[str]
    # The key columns of `initial`, in the order of `key`; empty: the names in `key`.
    initial_key: Sequence[str] = ()
    order_by: Sequence[str] = ()

    def by_kind(self) -> list[tuple[int, DataFrame, Sequence[str]]]:
        """Return (kind, rows, key columns) of the input and, if there is one, of the initial state."""
        kinds: list[tuple[int, DataFrame, Sequence[str]]] = [(INPUT, self.rows, self.key)]
        if self.initial is not None:
            kinds.append((INITIAL, self.initial, self.initial_key or self.key))
        return kinds


def route(spark: SparkSession, inputs: Inputs, *, parts: Sequence[bytes], max_parallelism: int) -> DataFrame:
    """Return the ticks and rows of all shards, each in the partition of its shard, in the flat layout (see the module).

    The rows are unsorted. The task of each partition sorts them later, in `arrange_rows`. `parts`: The bytes that the
    tick of each shard carries.
    """
    check_order_by(inputs.order_by, inputs.rows.schema)
    flat = _tick_rows(spark, parts, max_parallelism, TICK)
    columns = [*_TICK_OF_KIND]
    for kind, rows, key in inputs.by_kind():
        flat = flat.unionByName(_flat(rows, kind, key, max_parallelism), allowMissingColumns=True)
        names = flat_columns(kind, len(rows.schema.names))
        columns += [StructField(name, field.dataType) for name, field in zip(names, rows.schema, strict=True)]
    placed = _place_by_shard(flat, len(parts), max_parallelism)
    return with_schema(placed, StructType(columns))


def route_together(
    spark: SparkSession, inputs: Sequence[Inputs], *, parts: Sequence[bytes], max_parallelism: int
) -> DataFrame:
    """As `route`, return the ticks of all shards, and the rows of several intervals with equal schemas and keys."""
    schema, key = inputs[0].rows.schema, inputs[0].key
    flat = [
        _flat(one.rows, INPUT, key, max_parallelism, f"{one.number} as {PART}", names=schema.names)
        for one in _numbered(inputs)
    ]
    ticks = _tick_rows(spark, parts, max_parallelism, TICK)
    rows = ticks.unionByName(_union(flat), allowMissingColumns=True)
    columns = [
        StructField(name, field.dataType)
        for name, field in zip(flat_columns(INPUT, len(schema.names)), schema, strict=True)
    ]
    return with_schema(_place_by_shard(rows, len(parts), max_parallelism), StructType([*_TICK_OF_KIND, *columns]))


def newest_events(inputs: Sequence[Inputs], column: str) -> DataFrame:
    """Return a row for each interval with event times: its number as column PART, and its newest event time.

    The newest time of a TIMESTAMP column is in microseconds since the epoch. That of TIMESTAMP_NTZ is not converted.
    """
    instants = isinstance(inputs[0].rows.schema[column].dataType, TimestampType)
    times = [one.rows.selectExpr(f"{one.number} as {PART}", f"{_quote(column)} as at") for one in _numbered(inputs)]
    newest = F.expr("unix_micros(max(at))" if instants else "max(at)").alias("newest")
    return _union(times).where("at is not null").groupBy(PART).agg(newest)


def _numbered(inputs: Sequence[Inputs]) -> list[Numbered]:
    if inputs[0].together is not None:
        return [inputs[0].together]
    return [Numbered(rows=one.rows, number=f"X'{number:08x}'") for number, one in enumerate(inputs)]


def _union(frames: Sequence[DataFrame]) -> DataFrame:
    """Return the union of frames with equal columns, as a balanced tree. A deep tree would overflow Spark's stack."""
    while len(frames) > 1:
        pairs = zip_longest(frames[::2], frames[1::2])
        frames = [left if right is None else left.union(right) for left, right in pairs]
    return frames[0]


def route_in_order(spark: SparkSession, inputs: Inputs, *, parts: Sequence[bytes], max_parallelism: int) -> DataFrame:
    """Return the ticks and rows of all shards, each in the partition of its shard, sorted by Spark.

    This function is for rows with a column of a type that `arrange_rows` can't sort in Python. The source's columns are
    fields of the struct `__input`, as the jobs of the shards read them.
    """
    schema = inputs.rows.schema
    check_order_by(inputs.order_by, schema)
    keyed: list[DataFrame] = []
    values: list[Column] = []
    ties: list[Column] = []
    in_bytes: list[str] = []
    for kind, rows, key in inputs.by_kind():
        of, name = rows.schema, _STRUCT[kind]
        keyed.append(_add_key(rows, kind, key, max_parallelism))
        order_by = inputs.order_by if kind == INPUT else ()
        values += _in_order(name, of, [*order_by, *of.names], key)
        ties += tie_breaks([(_in(name, f.name), f.dataType) for f in of])
        # The loop uses the columns of the schema in the variable `of`: `DataFrame.columns` would make the Connect
        # server analyse the whole plan.
        if any(needs_bytes(f.dataType) for f in of):
            in_bytes.append(_BYTES[name])
    routed = _with_ticks(spark, parts, keyed, max_parallelism)
    placed = _place_by_shard(routed, len(parts), max_parallelism).sortWithinPartitions(
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
# For each struct column, the name of a column with bytes that Python computes (`bytes_of`). It breaks ties between rows
# that Spark sorts as equal, and exists only if the struct has a type that the JVM can't order.
_BYTES = {"__input": "__input_bytes", "__initial": "__initial_bytes"}


def key_columns(count: int) -> list[str]:
    """Return the names of `count` key columns in the rows that the shards' jobs read: `__key_0`, `__key_1`, …"""
    return [f"__key_{i}" for i in range(count)]


def flat_columns(kind: int, count: int) -> list[str]:
    """Return the names that `route` gives to source columns, such as `__input_0` and `__input_1`."""
    return [f"{_STRUCT[kind]}_{i}" for i in range(count)]


def _with_ticks(
    spark: SparkSession, parts: Sequence[bytes], keyed: Sequence[DataFrame], max_parallelism: int
) -> DataFrame:
    # Missing columns are filled with nulls in two ways. The ticks get their nulls here, with a cast for each column of
    # the rows, because `unionByName` can't fill a column that is NOT NULL, as key columns may be. The rows get nulls
    # for `__part`, and for the columns of the other kind, from `unionByName`, because Spark can't cast null to TIME.
    types = {f.name: f.dataType for part in keyed for f in part.schema if f.name not in (KEY_GROUP, KIND, *_BYTES)}
    routed = _tick_rows(spark, parts, max_parallelism).select(
        "*",
        F.lit(TICK).cast("tinyint").alias(KIND),
        *[F.lit(None).cast(data_type).alias(name) for name, data_type in types.items()],
    )
    for part in keyed:
        routed = routed.unionByName(part, allowMissingColumns=True)
    return routed


def _flat(
    rows: DataFrame, kind: int, key: Sequence[str], max_parallelism: int, *part: str, names: Sequence[str] = ()
) -> DataFrame:
    # The expressions are strings, because PySpark makes a few requests to the JVM for each Column object: 1,300 for an
    # interval of 13 columns.
    names = names or rows.schema.names
    return rows.selectExpr(
        _key_group(key, max_parallelism),
        *part,
        f"cast({kind} as tinyint) as {KIND}",
        *[f"{_quote(name)} as {flat}" for name, flat in zip(names, flat_columns(kind, len(names)), strict=True)],
    )


def _key_group(key: Sequence[str], max_parallelism: int) -> str:
    hashed = f"xxhash64({', '.join(map(_quote, key))})"
    return f"cast(pmod({hashed}, {max_parallelism}) as int) as {KEY_GROUP}"


def _add_key(rows: DataFrame, kind: int, key: Sequence[str], max_parallelism: int) -> DataFrame:
    column = _STRUCT[kind]
    unordered = [(_column(f.name), f.dataType) for f in rows.schema if needs_bytes(f.dataType)]
    return rows.select(
        F.expr(_key_group(key, max_parallelism)),
        F.lit(kind).cast("tinyint").alias("__kind"),
        *[
            normalise_zeros(_column(name), rows.schema[name].dataType).alias(alias)
            for name, alias in zip(key, key_columns(len(key)), strict=True)
        ],
        F.struct(*[_one_nan(_column(f.name), f.dataType).alias(f.name) for f in rows.schema]).alias(column),
        *([bytes_of(unordered).alias(_BYTES[column])] if unordered else ()),
    )


def _sort_prefix(first_key: DataType) -> list[Column]:
    """Return a sort column that is fast to compare, to stand before key group and key; none if the key is no integer.

    The column is an integer with the order of key group and first key column. Spark's sort compares an integer without
    reading the rows, in half the time. The key group is in the upper 15 bits. The lower 48 bits hold 0 for null, else
    the key plus 2^47. Keys beyond +-(2^47 - 1) get the nearest limit. So different keys may be equal in this column:
    then the following sort columns decide.
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
    """Replace every NaN by the same NaN, as `arrange_rows.one_nan` does."""
    return (
        F.nanvl(column, F.lit(float("nan")).cast(data_type))
        if isinstance(data_type, FloatType | DoubleType)
        else column
    )


def ticks(spark: SparkSession, parts: Sequence[bytes], *, max_parallelism: int) -> DataFrame:
    """Return a DataFrame with only the ticks, for a job without input."""
    rows = _tick_rows(spark, parts, max_parallelism)
    return with_schema(_place_by_shard(rows, len(parts), max_parallelism), _TICK)


def place(
    spark: SparkSession, frames: Sequence[DataFrame], *, parts: Sequence[bytes], max_parallelism: int
) -> DataFrame:
    """Return the ticks and the rows of `frames`, each in the partition of its shard: the tick first, the rows unsorted.

    In a tick, all columns except `__key_group` and `__part` are null.
    """
    rows = _tick_rows(spark, parts, max_parallelism)
    for frame in frames:
        rows = rows.unionByName(frame, allowMissingColumns=True)
    return _place_by_shard(rows, len(parts), max_parallelism).sortWithinPartitions(F.col(PART).isNull())


_BITS = 2**32 - 1
_TICK = StructType([StructField(KEY_GROUP, IntegerType()), StructField(PART, BinaryType())])
_TICK_OF_KIND = StructType([*_TICK, StructField(KIND, ByteType())])


def _tick_rows(spark: SparkSession, parts: Sequence[bytes], max_parallelism: int, kind: int | None = None) -> DataFrame:
    """Return the ticks of all shards as one partition, so that one task makes them."""
    firsts = [range_of(shard, len(parts), max_parallelism).first for shard in range(len(parts))]
    columns = {KEY_GROUP: pa.array(firsts, pa.int32()), PART: pa.array(parts, pa.binary())}
    if kind is not None:
        columns[KIND] = pa.array([kind] * len(parts), pa.int8())
    # Pass an Arrow table: Spark would turn a Python list into an RDD of pickled rows, which costs more time.
    return spark.createDataFrame(pa.table(columns), _TICK if kind is None else _TICK_OF_KIND).coalesce(1)


def _place_by_shard(rows: DataFrame, parallelism: int, max_parallelism: int) -> DataFrame:
    """Place each row in the partition that has the number of its shard.

    `repartition` places a row by the hash of an expression, modulo the number of partitions. So the expression is a
    number whose hash gives the shard's partition. Spark 4.0 lacks `repartitionById`, which would do the same.
    """
    shard = f"cast(cast(__key_group as bigint) * {parallelism} div {max_parallelism} as int)"
    numbers = ", ".join(map(str, numbers_by_partition(parallelism)))
    return rows.repartition(parallelism, F.expr(f"element_at(array({numbers}), {shard} + 1)"))


@cache
def numbers_by_partition(partitions: int) -> tuple[int, ...]:
    """Return, for each partition, a number whose hash makes Spark's `repartition` place a row in this partition."""
    found: dict[int, int] = {}
    for number in count():
        found.setdefault(_hash(number) % partitions, number)
        if len(found) == partitions:
            break
    return tuple(found[partition] for partition in range(partitions))


def _hash(number: int) -> int:
    """Return Spark's hash of an INT: Murmur3 of 32 bits with the seed 42, as a signed number."""
    mixed = _rotated(number * 0xCC9E2D51, 15) * 0x1B873593 & _BITS
    found = _rotated(42 ^ mixed, 13) * 5 + 0xE6546B64 & _BITS ^ 4
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        found = (found ^ found >> shift) * factor & _BITS
    return found - (found >> 31 << 32)


def _rotated(number: int, bits: int) -> int:
    number &= _BITS
    return number << bits & _BITS | number >> 32 - bits


def _column(name: str) -> Column:
    return F.col(_quote(name))


def _quote(name: str) -> str:
    return f"`{name.replace('`', '``')}`"
