"""Sort expressions for a total order of rows in Spark's JVM, for columns of every type that reaches Python.

Spark's own order treats some different values as equal: 0.0 and -0.0, and strings that are equal under their collation.
Spark can't sort maps, variants and geographic values. With Spark's order alone, the state of a processor that keeps the
last row of a key would depend on the order in which Spark happens to read the rows. So rows are sorted by two
expressions for each column: first by one that Spark can sort (`spark_order`), then, for equal rows, by a tie-break:

    type                        first sorted         tie-break
    float, double               by value, NaN last   a bit per column: set for -0.0
    string with a collation     by the collation     UTF-8 bytes
    map                         by JSON, in UTC      entries in their stored order
    variant                     by JSON, in UTC      bytes of value and metadata
    geography, geometry         not at all           SRID and WKB
    array, struct               element by element   element by element

The order does not depend on the session's time zone or ANSI mode. Spark evaluates a tie-break only for the few rows
that are equal in all columns before it. Only variants and values of user-defined types are sent through Python, which
computes bytes for the tie-break.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from functools import reduce
from typing import Any

import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DayTimeIntervalType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    Row,
    ShortType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
    UserDefinedType,
    VariantType,
    VariantVal,
)

from cairn.spark_versions import GeographyType, GeometryType, has

MASK_BITS = 62
# Types whose values have the same order in Python as in the JVM.
_IN_PYTHON = (
    BooleanType,
    ByteType,
    ShortType,
    IntegerType,
    LongType,
    FloatType,
    DoubleType,
    DecimalType,
    StringType,
    BinaryType,
    DateType,
    TimestampType,
    TimestampNTZType,
    DayTimeIntervalType,
    NullType,
)


def spark_order(column: Column, data_type: DataType) -> Column | None:
    """Return the expression that Spark sorts the column by; None for geographic values, which Spark can't sort.

    Spark can't sort maps and variants either. So their expression is the value as JSON, which Spark can sort.
    """
    if _has(data_type, lambda t: isinstance(t, GeographyType | GeometryType)):
        return None
    if _has(data_type, lambda t: isinstance(t, MapType | VariantType)):
        return F.to_json(column, {"timeZone": "UTC", "ignoreNullFields": "true"})
    return column


def tie_breaks(columns: Sequence[tuple[Column, DataType]]) -> list[Column]:
    """Return sort expressions for rows that are equal by Spark's order in all columns, such as 0.0 and -0.0.

    No expression is returned for variants and some user-defined types (`needs_bytes`), because Spark can't order them
    completely. The caller breaks their ties by a further sort column of bytes that Python computes (`bytes_of`).
    """
    floats = [column for column, data_type in columns if isinstance(data_type, FloatType | DoubleType)]
    masks = [_zero_signs(floats[i : i + MASK_BITS]) for i in range(0, len(floats), MASK_BITS)]
    others = [
        _exact(column, data_type)
        for column, data_type in columns
        if not (isinstance(data_type, FloatType | DoubleType) or _is_total(data_type) or needs_bytes(data_type))
    ]
    return masks + others


def find_unordered_type(data_type: DataType) -> DataType | None:
    """Return the first type in `data_type` that only the JVM can order; None if Python can order all of them."""
    match data_type:
        case ArrayType():
            return find_unordered_type(data_type.elementType)
        case StructType():
            return next(
                (found for f in data_type.fields if (found := find_unordered_type(f.dataType)) is not None), None
            )
    known = type(data_type) in _IN_PYTHON
    if isinstance(data_type, StringType):
        known = known and data_type.isUTF8BinaryCollation()
    return None if known else data_type


def needs_bytes(data_type: DataType) -> bool:
    """Return True if no expression in the JVM orders values of the type, so that Python must turn them into bytes."""
    if isinstance(data_type, UserDefinedType):
        return not _is_total(data_type.sqlType())
    return isinstance(data_type, VariantType) or any(map(needs_bytes, _inner(data_type)))


def bytes_of(columns: Sequence[tuple[Column, DataType]]) -> Column:
    """Return a binary column that is equal for two rows exactly if these columns are equal."""
    if has("arrow_udf"):
        return F.arrow_udf(_row_bytes, BinaryType())(*[column for column, _ in columns])
    return bytes_of_values(columns)


def bytes_of_values(columns: Sequence[tuple[Column, DataType]]) -> Column:
    """Return what `bytes_of` returns, by a UDF that gets Python values, because PySpark 4.0 has no `arrow_udf`.

    The UDF uses no Arrow, because PySpark 4.0 would convert through pandas, which makes floats of integers with nulls.
    """
    return F.udf(_value_bytes, BinaryType(), useArrow=False)(
        *[_for_python(column, data_type) for column, data_type in columns]
    )


def normalise_zeros(column: Column, data_type: DataType) -> Column:
    """Replace -0.0 by 0.0 in a key column, also inside of arrays and structs, because Spark treats both as one key."""
    if not _has(data_type, lambda t: isinstance(t, FloatType | DoubleType)):
        return column
    if isinstance(data_type, ArrayType | StructType):
        return _each(column, data_type, normalise_zeros)
    # By IEEE 754, -0.0 + 0.0 is 0.0.
    return column + F.lit(0.0).cast(data_type)


def _each(column: Column, data_type: DataType, change: Callable[[Column, DataType], Column]) -> Column:
    """Return the column with `change` applied to each item of its array, or to each field of its struct."""
    match data_type:
        case ArrayType():
            return F.transform(column, lambda item: change(item, data_type.elementType))
        case StructType():
            fields = [change(column.getField(f.name), f.dataType).alias(f.name) for f in data_type.fields]
            return F.when(column.isNotNull(), F.struct(*fields))
    return column


def _for_python(column: Column, data_type: DataType) -> Column:
    """Return the column with maps, instants and UDTs replaced, because a UDF would not get their exact values."""
    match data_type:
        case UserDefinedType():
            return _for_python(F.unwrap_udt(column), data_type.sqlType())
        case TimestampType():
            return F.unix_micros(column)
        case MapType():
            # A UDF would get a map's entries in another order than they are stored.
            return _for_python(F.map_entries(column), _entries(data_type))
    return _each(column, data_type, _for_python)


def _exact(column: Column, data_type: DataType) -> Column:
    """Return an expression whose order distinguishes all different values of the column, such as 0.0 and -0.0."""
    if _is_total(data_type):
        return column
    match data_type:
        case FloatType() | DoubleType():
            return F.struct(column, _is_negative_zero(column))
        case StringType():
            return column.cast("binary")
        case GeographyType() | GeometryType():
            return F.struct(F.st_srid(column), F.st_asbinary(column))
        case MapType():
            return _exact(F.map_entries(column), _entries(data_type))
        case ArrayType() | StructType():
            return _each(column, data_type, _exact)
    raise NotImplementedError(f"no total order of {data_type.simpleString()}")


def _is_total(data_type: DataType) -> bool:
    """Return True if Spark can sort the type and treats no two different values as equal."""
    if isinstance(data_type, UserDefinedType):
        return _is_total(data_type.sqlType())
    if isinstance(data_type, StringType):
        return bool(data_type.isUTF8BinaryCollation())
    ties = FloatType | DoubleType | MapType | VariantType | GeographyType | GeometryType
    return not isinstance(data_type, ties) and all(map(_is_total, _inner(data_type)))


def _is_negative_zero(column: Column) -> Column:
    # -0.0 to the power of -1 is -Infinity. Spark's atan2 and 1/x do not distinguish the zeros.
    return (column == F.lit(0)) & (F.pow(column, F.lit(-1.0)) < F.lit(0))


def _zero_signs(floats: Sequence[Column]) -> Column:
    """Return a mask with one bit for each of at most 62 columns. The bit is set where the value is -0.0."""
    bits = [
        F.when(_is_negative_zero(c), F.lit(1 << i)).otherwise(F.lit(0)).cast("bigint") for i, c in enumerate(floats)
    ]
    return reduce(Column.bitwiseOR, bits)


def _inner(data_type: DataType) -> list[DataType]:
    match data_type:
        case ArrayType():
            return [data_type.elementType]
        case MapType():
            return [data_type.keyType, data_type.valueType]
        case StructType():
            return [f.dataType for f in data_type.fields]
    return []


def _entries(of: MapType) -> ArrayType:
    return ArrayType(StructType().add("key", of.keyType).add("value", of.valueType))


def _has(data_type: DataType, what: Callable[[DataType], bool]) -> bool:
    return what(data_type) or any(_has(inner, what) for inner in _inner(data_type))


def _row_bytes(*columns: pa.Array) -> pa.Array:
    plain: list[Any] = [without_zones(column).to_pylist() for column in columns]
    return pa.array([repr(row).encode() for row in zip(*plain, strict=True)], pa.binary())


def _value_bytes(*values: Any) -> bytes:
    return repr(tuple(map(_as_arrow, values))).encode()


def _as_arrow(value: Any) -> Any:
    """Return a value of a UDF in the form that Arrow gives to `_row_bytes`."""
    match value:
        case VariantVal():
            return {"value": bytes(value.value), "metadata": bytes(value.metadata)}
        case Row():
            parts = list(map(_as_arrow, value))
            # Arrow gives entries of maps as tuples. A struct with these field names may become a tuple too: the bytes
            # are still equal only for equal values.
            return (
                tuple(parts)
                if value.__fields__ == ["key", "value"]
                else dict(zip(value.__fields__, parts, strict=True))
            )
        case list():
            return list(map(_as_arrow, value))
        case bytearray():
            return bytes(value)
        case datetime():
            return (value - datetime(1970, 1, 1)) // timedelta(microseconds=1)
    return value


def without_zones(column: pa.Array) -> pa.Array:
    """Replace instants in a column by integers, because Python's datetimes would sort by the session's time zone."""
    plain = _instants_as_numbers(column.type)
    return column if plain == column.type else column.cast(plain)


def _instants_as_numbers(data_type: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(data_type):
        return pa.int64()
    if pa.types.is_list(data_type):
        return pa.list_(data_type.value_field.with_type(_instants_as_numbers(data_type.value_type)))
    if pa.types.is_map(data_type):
        return pa.map_(
            data_type.key_field.with_type(_instants_as_numbers(data_type.key_type)),
            data_type.item_field.with_type(_instants_as_numbers(data_type.item_type)),
        )
    if pa.types.is_struct(data_type):
        return pa.struct([f.with_type(_instants_as_numbers(f.type)) for f in data_type])
    return data_type
