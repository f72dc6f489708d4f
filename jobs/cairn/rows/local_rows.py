"""Hold rows in this process instead of in a DataFrame, and route them to shards without a JVM.

`route_locally` gives each shard the same batches as `routing.route_in_order`: equal columns, key groups and order of
rows. `LocalRows` raises an error for a column whose type only the JVM can sort.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql import types as t

from cairn.rows.arrange_rows import one_nan
from cairn.rows.routing import INITIAL, INPUT, TICK, check_order_by, key_columns
from cairn.rows.row_order import MASK_BITS, find_unordered_type, without_zones
from cairn.spark_versions import to_arrow_schema
from state_backend.formats.spark_hash import key_hasher
from state_backend.formats.types import parse_struct, shorten
from state_backend.values.errors import UsageError
from state_backend.values.key_groups import range_of
from state_backend.values.zones import Zone

# The default of Spark's setting spark.sql.execution.arrow.maxRecordsPerBatch.
BATCH_ROWS = 10_000
Convert = Callable[[Any], Any]


class LocalRows:
    """Rows with a Spark schema, in this process's memory."""

    isStreaming = False

    def __init__(self, rows: Any, schema: t.StructType, zone: Zone, what: str = "the rows") -> None:
        for field in schema.fields:
            if (found := find_unordered_type(field.dataType)) is not None:
                raise UsageError(
                    f"{what}: column {field.name!r} is {field.dataType.simpleString()}; only Spark can sort values of type {found.simpleString()}\n"
                    "Leave the column out here, or test this pipeline with run_interval and a Spark session"
                )
        self.schema = schema
        self.zone = zone
        self.table = _table(rows, schema, zone, what)

    @classmethod
    def of_table(cls, table: pa.Table, schema: t.StructType, zone: Zone) -> LocalRows:
        made = cls.__new__(cls)
        made.schema, made.zone = schema, zone
        made.table = table.cast(to_arrow_schema(schema, zone.name))
        return made


def route_locally(
    rows: LocalRows,
    initial: LocalRows | None = None,
    *,
    key: Sequence[str],
    initial_key: Sequence[str] = (),
    order_by: Sequence[str],
    parallelism: int,
    max_parallelism: int,
) -> list[list[pa.RecordBatch]]:
    """Return for each shard its batches, in the layout of jobs (`routing`). The first row of a shard is its tick."""
    check_order_by(order_by, rows.schema)
    parts = [_Part(rows, INPUT, key, [*order_by, *rows.schema.names], max_parallelism)]
    if initial is not None:
        parts.append(_Part(initial, INITIAL, initial_key or key, initial.schema.names, max_parallelism))
    firsts = [range_of(shard, parallelism, max_parallelism).first for shard in range(parallelism)]
    # A tick has no key: it gets the sort key of nulls, before all other keys. It has no row: it gets the position -1.
    nothing = tuple((0,) for _ in key)
    places = [(first, nothing, TICK, (), -1) for first in firsts]
    for part in parts:
        places += part.places()
    places.sort()
    shards: list[list[_Place]] = [[] for _ in range(parallelism)]
    for place in places:
        shards[place[0] * parallelism // max_parallelism].append(place)
    return [_batches(of_shard, parts) for of_shard in shards]


# What one row is sorted by: key group, key, kind (`TICK`, `INITIAL` or `INPUT`), sort key among the rows of its key,
# and last its position among the rows of its kind.
_Place = tuple[int, tuple[Any, ...], int, tuple[Any, ...], int]


class _Part:
    """Rows of the input or of the initial state, with their sort keys."""

    def __init__(
        self, rows: LocalRows, kind: int, key: Sequence[str], names: Sequence[str], max_parallelism: int
    ) -> None:
        self.rows, self.kind = rows, kind
        self.name = "__input" if kind == INPUT else "__initial"
        schema, table = rows.schema, rows.table
        columns = {f.name: table.column(n).combine_chunks() for n, f in enumerate(schema.fields)}
        self.keys = [_normalise(columns[name], schema[name].dataType) for name in key]
        self.struct = pa.StructArray.from_arrays(
            [one_nan(columns[f.name]) for f in schema.fields], fields=list(table.schema)
        )
        of_key = t.StructType([schema[name] for name in key])
        group_of = key_hasher(parse_struct(of_key.jsonValue()))
        values = [column.to_pylist() for column in self.keys]
        self._groups = [group_of(row) % max_parallelism for row in zip(*values, strict=True)]
        self._keys = _order_of([(c, schema[name].dataType) for c, name in zip(self.keys, key, strict=True)], order_key)
        in_order = [name for name in dict.fromkeys(names) if name not in key]
        orders = _order_of([(columns[name], schema[name].dataType) for name in in_order], order_key, len(table))
        floats = [columns[f.name] for f in schema.fields if _is_float(f.dataType)]
        nested = [(columns[f.name], f.dataType) for f in schema.fields if not _is_float(f.dataType) and _has_float(f)]
        exact = _order_of(nested, exact_key, len(table))
        self._orders = list(zip(orders, _zero_signs(floats, len(table)), exact, strict=True))

    def places(self) -> list[_Place]:
        return [
            (group, key, self.kind, order, at)
            for at, (group, key, order) in enumerate(zip(self._groups, self._keys, self._orders, strict=True))
        ]


def _batches(places: Sequence[_Place], parts: Sequence[_Part]) -> list[pa.RecordBatch]:
    table = pa.table(
        {
            "__key_group": pa.array([place[0] for place in places], pa.int32()),
            "__kind": pa.array([place[2] for place in places], pa.int8()),
            **{
                name: _gather(places, {part.kind: part.keys[n] for part in parts})
                for n, name in enumerate(key_columns(len(parts[0].keys)))
            },
            **{part.name: _gather(places, {part.kind: part.struct}) for part in parts},
        }
    )
    return [batch for batch in table.combine_chunks().to_batches(BATCH_ROWS) if batch.num_rows]


def _gather(places: Sequence[_Place], columns: Mapping[int, pa.Array]) -> pa.Array:
    """Return a column for the sorted rows: a value from the column of its row's kind in `columns`, else null."""
    start, offsets = 0, {}
    for kind, column in columns.items():
        offsets[kind] = start
        start += len(column)
    types = [column.type for column in columns.values()]
    joined = pa.concat_arrays([column.cast(types[0]) for column in columns.values()])
    indices = [offsets[place[2]] + place[4] if place[2] in offsets else None for place in places]
    return joined.take(pa.array(indices, pa.int64()))


def order_key(data_type: t.DataType) -> Convert:
    """Return a function that maps a value or None to a sort key in Spark's order.

    Nulls come first, NaN comes last, and 0.0 equals -0.0.
    """
    return _nulls_first(data_type, lambda value: (math.isnan(value), 0.0 if math.isnan(value) else value))


def exact_key(data_type: t.DataType) -> Convert:
    """Return a function as `order_key` does, but 0.0 comes before -0.0, so that different values never tie."""
    return _nulls_first(
        data_type, lambda value: (math.isnan(value), 0.0 if math.isnan(value) else value, _is_negative_zero(value))
    )


def _nulls_first(data_type: t.DataType, of_float: Convert) -> Convert:
    match data_type:
        case t.FloatType() | t.DoubleType():
            inner = of_float
        case t.ArrayType():
            of = _nulls_first(data_type.elementType, of_float)

            def inner(value: Any) -> Any:
                return tuple(map(of, value))
        case t.StructType():
            fields = [(f.name, _nulls_first(f.dataType, of_float)) for f in data_type.fields]

            def inner(value: Any) -> Any:
                return tuple(convert(value[name]) for name, convert in fields)
        case _:
            return lambda value: (0,) if value is None else (1, value)
    return lambda value: (0,) if value is None else (1, inner(value))


def _order_of(
    columns: Sequence[tuple[pa.Array, t.DataType]], key_of: Callable[[t.DataType], Convert], count: int | None = None
) -> list[tuple[Any, ...]]:
    if not columns:
        return [()] * (count or 0)
    keys = [map(key_of(data_type), without_zones(column).to_pylist()) for column, data_type in columns]
    return list(zip(*keys, strict=True))


def _zero_signs(floats: Sequence[pa.Array], count: int) -> list[tuple[int, ...]]:
    """Return for each row the bit masks that mark the float columns whose value is -0.0.

    A mask has 62 bits, one for each column. If there are more float columns, a row has several masks.
    """
    masks = []
    for start in range(0, len(floats), MASK_BITS):
        signs = [map(_is_negative_zero, column.to_pylist()) for column in floats[start : start + MASK_BITS]]
        masks.append([sum(bit << n for n, bit in enumerate(bits)) for bits in zip(*signs, strict=True)])
    return list(zip(*masks, strict=True)) if masks else [()] * count


def _is_negative_zero(value: float | None) -> bool:
    return value is not None and value == 0 and math.copysign(1, value) < 0


def _is_float(data_type: t.DataType) -> bool:
    return isinstance(data_type, t.FloatType | t.DoubleType)


def _has_float(field: Any) -> bool:
    data_type = getattr(field, "dataType", field)
    match data_type:
        case t.ArrayType():
            return _has_float(data_type.elementType)
        case t.StructType():
            return any(map(_has_float, data_type.fields))
    return _is_float(data_type)


def _normalise(column: pa.Array, data_type: t.DataType) -> pa.Array:
    """Replace -0.0 by 0.0 in a key column, also inside of arrays and structs."""
    if not _has_float(data_type):
        return column

    def plain(value: Any, of: t.DataType) -> Any:
        match of:
            case t.ArrayType() if value is not None:
                return [plain(item, of.elementType) for item in value]
            case t.StructType() if value is not None:
                return {f.name: plain(value[f.name], f.dataType) for f in of.fields}
            case t.FloatType() | t.DoubleType() if value is not None:
                return value + 0.0
        return value

    return pa.array([plain(value, data_type) for value in column.to_pylist()], column.type)


def sorted_rows(rows: Sequence[dict[str, Any]], columns: Sequence[tuple[str, t.DataType]]) -> list[dict[str, Any]]:
    """Return the rows in Spark's order of these columns. Rows with equal values keep their order."""
    keys = [(name, order_key(data_type)) for name, data_type in columns]
    return sorted(rows, key=lambda row: tuple(of(row[name]) for name, of in keys))


def _table(rows: Any, schema: t.StructType, zone: Zone, what: str) -> pa.Table:
    arrow = to_arrow_schema(schema, zone.name)
    if isinstance(rows, pa.Table):
        rows = rows.to_pylist()
    elif isinstance(rows, pd.DataFrame):
        rows = _of_frame(rows)
    columns = _columns(list(rows), schema, what)
    arrays = [
        _array(values, field.dataType, wanted, zone, f"{what}: column {field.name!r}", field.nullable)
        for values, field, wanted in zip(columns, schema.fields, arrow, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=arrow)


def _of_frame(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return a pandas DataFrame's rows with null instead of NaN, NaT and NA, as Spark reads them."""
    columns = {
        str(name): [None if _is_missing(value) else value for value in frame[name].tolist()] for name in frame.columns
    }
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _is_missing(value: Any) -> bool:
    return value is None or value is pd.NaT or value is pd.NA or (isinstance(value, float) and math.isnan(value))


def _columns(rows: Sequence[Any], schema: t.StructType, what: str) -> list[list[Any]]:
    names = schema.names
    columns: list[list[Any]] = [[] for _ in names]
    for n, row in enumerate(rows):
        if isinstance(row, Mapping) or (isinstance(row, t.Row) and hasattr(row, "__fields__")):
            fields = row if isinstance(row, Mapping) else row.asDict()
            unknown = [str(name) for name in fields if name not in names]
            if unknown:
                raise UsageError(
                    f"{what}: row {n} has {', '.join(map(repr, unknown))}, which the schema lacks; the schema has {', '.join(names)}"
                )
            values: Iterable[Any] = [fields.get(name) for name in names]
        elif isinstance(row, tuple | list):
            if len(row) != len(names):
                raise UsageError(
                    f"{what}: row {n} has {len(row)} values, but the schema has {len(names)} columns: {', '.join(names)}"
                )
            values = row
        else:
            raise UsageError(f"{what}: row {n} is a {type(row).__name__}; expected a dict, a tuple or a Row")
        for column, value in zip(columns, values, strict=True):
            column.append(value)
    return columns


def _array(
    values: list[Any], data_type: t.DataType, wanted: pa.Field, zone: Zone, what: str, nullable: bool
) -> pa.Array:
    convert = _converter(data_type, zone)
    plain = []
    for n, value in enumerate(values):
        try:
            plain.append(convert(value))
            if plain[-1] is None and not nullable:
                raise TypeError("it is null, and the column is NOT NULL")
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise _misfit(what, n, data_type, value, error) from None
    try:
        return pa.array(plain, wanted.type)
    except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, OverflowError, ValueError):
        for n, value in enumerate(plain):
            try:
                pa.array([value], wanted.type)
            except Exception as error:
                raise _misfit(what, n, data_type, values[n], error) from None
        raise


def _misfit(what: str, n: int, data_type: t.DataType, value: Any, error: Exception) -> UsageError:
    return UsageError(
        f"{what}, row {n}: expected {data_type.simpleString()}, found {type(value).__name__} {shorten(value, 60)}: {error}"
    )


def _converter(data_type: t.DataType, zone: Zone) -> Convert:
    """Return a function that converts a user's value to the value that Arrow takes for this type.

    As in Spark, datetimes without a zone are taken to be in the session's time zone.
    """
    match data_type:
        case t.TimestampType():
            return lambda value: None if _is_missing(value) else _instant(value, zone)
        case t.TimestampNTZType():
            return lambda value: None if _is_missing(value) else _wall_time(value)
        case t.ArrayType():
            item = _converter(data_type.elementType, zone)
            return lambda value: None if value is None else [item(v) for v in value]
        case t.StructType():
            fields = [(f.name, _converter(f.dataType, zone)) for f in data_type.fields]
            return lambda value: None if value is None else _struct(value, fields)
        case t.StringType():
            return lambda value: None if value is None else _text(value)
        case t.BooleanType():
            return lambda value: None if value is None else _boolean(value)
        case t.ByteType() | t.ShortType() | t.IntegerType() | t.LongType():
            return lambda value: None if value is None else _integer(value)
    return lambda value: None if value is pd.NA or value is pd.NaT else value


def _instant(value: Any, zone: Zone) -> datetime:
    if not isinstance(value, datetime):
        raise TypeError("expected a datetime")
    return value if value.tzinfo is not None else value.replace(tzinfo=zone.rules)


def _wall_time(value: Any) -> datetime:
    if not isinstance(value, datetime):
        raise TypeError("expected a datetime")
    if value.tzinfo is not None:
        raise TypeError("expected a datetime without time zone")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("expected a str")
    return value


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise TypeError("expected a bool")
    return bool(value)


def _integer(value: Any) -> Any:
    if isinstance(value, bool | np.bool_):
        raise TypeError("expected an int")
    # pandas stores a column of integers with a null as floats. So a float without a fraction counts as an integer.
    if isinstance(value, float | np.floating) and not float(value).is_integer():
        raise TypeError("expected an int")
    return int(value) if isinstance(value, int | float | np.integer | np.floating) else value


def _struct(value: Any, fields: Sequence[tuple[str, Convert]]) -> dict[str, Any]:
    if isinstance(value, t.Row) and hasattr(value, "__fields__"):
        value = value.asDict()
    if isinstance(value, Mapping):
        unknown = [name for name in value if name not in {n for n, _ in fields}]
        if unknown:
            raise TypeError(f"no field {unknown[0]!r}")
        return {name: convert(value.get(name)) for name, convert in fields}
    if len(value) != len(fields):
        raise TypeError(f"expected {len(fields)} fields")
    return {name: convert(v) for (name, convert), v in zip(fields, value, strict=True)}
