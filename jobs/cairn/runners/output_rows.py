"""Conversion of the rows that a row-API processor yields into Arrow columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, date, datetime, timedelta, tzinfo
from decimal import Decimal
from difflib import get_close_matches
from functools import cache
from math import inf
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import Row

from cairn.rows.output_file import LocalParquet
from cairn.runners.mutable_values import IMMUTABLE, copy_of, without_rows
from state_backend.formats.types import shorten
from state_backend.values.errors import ProcessorError

_ROWS_PER_BATCH = 10_000
# A function that takes the types of a row's cells, and returns True if user code can change none of the cells. It is
# the body of `all_immutable`, without the cost of another call for each row.
_only_immutable = IMMUTABLE.issuperset
Predicate = Callable[[Any], bool]


class OutputRows:
    """Buffer for output rows. Between keys, the caller calls `flush` when `full` is true.

    PySpark's worker copies values at two points, and this class copies at the same two points:

    1. `add` copies lists and dicts when a row is yielded, as `Row.asDict` does.
    2. `settle` copies other mutable values, such as a bytearray, after the handler has yielded all rows of the key.

    So if a processor refills a bytearray between two rows of a key, both rows get its last content, as under Spark.
    """

    def __init__(self, file: LocalParquet, zone: tzinfo = UTC) -> None:
        self._file = file
        self._zone = zone
        self._names = list(file.schema.names)
        self._known = frozenset(self._names)
        self._nested = any(pa.types.is_nested(t) for t in file.schema.types)
        self._pending: list[tuple[Any, ...]] = []
        # Positions in `_pending` of rows with cells that the processor could still change.
        self._unsettled: list[int] = []

    def add(self, row: Any) -> None:
        """Buffer one row, a PySpark `Row`. Fields become columns by name; a missing field becomes null."""
        if isinstance(row, Row) and getattr(row, "__fields__", None) == self._names and not self._nested:
            if not _only_immutable(map(type, row)):
                self._unsettled.append(len(self._pending))
            self._pending.append(row)
        else:
            others: list[Any] = []
            try:
                values = self._values(row, others)
            except AttributeError:
                raise ProcessorError(f"the processor yielded {_short(row)}; expected pyspark.sql.Row") from None
            except TypeError:
                raise ProcessorError(
                    f"the processor yielded {_short(row)}, which has no field names; use Row(name=value, ...)"
                ) from None
            if others:
                self._unsettled.append(len(self._pending))
            self._pending.append(values)

    def _values(self, row: Any, others: list[Any]) -> tuple[Any, ...]:
        plain = type(row).asDict is Row.asDict
        fields = row.asDict(not plain)
        # An unknown field is usually a misspelt column. Spark drops that field silently, and the column is null in
        # every row.
        if not self._known.issuperset(fields):
            raise ProcessorError(_unknown_fields(fields, self._names))
        if plain:
            return tuple(without_rows(fields.get(name), others) for name in self._names)
        # `asDict` of a user's subclass of Row may return the same list for several rows, and the handler may still
        # change this list. Any element in `others` tells `add` to note the row's position in `_unsettled`. `settle`
        # then copies the row's cells when the handler has yielded all rows of the key, where PySpark copies them too.
        others.append(row)
        return tuple(fields.get(name) for name in self._names)

    def settle(self) -> None:
        """Copy the mutable cells of the current key's rows, so that the processor can no longer change them."""
        for at in self._unsettled:
            self._pending[at] = tuple(map(copy_of, self._pending[at]))
        self._unsettled.clear()

    @property
    def full(self) -> bool:
        """True if at least 10,000 rows are buffered, so that the runner should call `flush`."""
        return len(self._pending) >= _ROWS_PER_BATCH

    def flush(self) -> None:
        if self._pending:
            columns = zip(*self._pending, strict=True)
            arrays = [self._column(field, values) for field, values in zip(self._file.schema, columns, strict=True)]
            self._file.write(pa.RecordBatch.from_arrays(arrays, schema=self._file.schema))
            self._pending.clear()

    def _column(self, field: pa.Field, values: tuple[Any, ...]) -> pa.Array:
        try:
            return column_of(field, self._for_arrow(field, values))
        except ProcessorError:
            for value, row in zip(values, self._pending, strict=True):
                try:
                    column_of(field, self._for_arrow(field, [value]))
                except ProcessorError as error:
                    fields = ", ".join(f"{n}={v!r}" for n, v in zip(self._names, row, strict=True))
                    fields = fields if len(fields) <= 200 else f"{fields[:197]}..."
                    raise ProcessorError(f"{error}; the row is ({fields})") from error
            raise

    def _for_arrow(self, field: pa.Field, values: Any) -> Any:
        convert = _conversion(field.type, self._zone)
        plain = frozenset() if pa.types.is_timestamp(field.type) else _EXACT.get(field.type, frozenset())
        return values if convert is None or plain.issuperset(map(type, values)) else [*map(convert, values)]


def _conversion(data_type: pa.DataType, zone: tzinfo) -> Callable[[Any], Any] | None:
    """Return a function that converts values which Arrow would misread; None if the type holds no such values.

    - A datetime without a zone, which a processor may yield from its state, gets `zone`. Arrow would assume UTC.
    - NaT becomes None; Arrow would store the year 1. A `pd.Timedelta` becomes a timedelta; Arrow would lose its unit.

    The function leaves a value of an unexpected type unchanged. The conversion to Arrow then fails and names the
    column.
    """
    if pa.types.is_timestamp(data_type) and data_type.tz is not None and zone is not UTC:

        def instant(value: Any) -> Any:
            return value.replace(tzinfo=zone) if isinstance(value, datetime) and value.tzinfo is None else value

        return instant
    if pa.types.is_date(data_type) or pa.types.is_duration(data_type):

        def of_pandas(value: Any) -> Any:
            return None if value is pd.NaT else value.to_pytimedelta() if isinstance(value, pd.Timedelta) else value

        return of_pandas
    if pa.types.is_struct(data_type):
        names = [field.name for field in data_type]
        fields = {field.name: found for field in data_type if (found := _conversion(field.type, zone)) is not None}

        def struct(value: Any) -> Any:
            if isinstance(value, tuple) and len(value) == data_type.num_fields:
                value = dict(zip(names, value, strict=True))
            if not isinstance(value, dict):
                return value
            return {name: fields[name](of) if name in fields else of for name, of in value.items()}

        return struct if fields else None
    if pa.types.is_list(data_type) or pa.types.is_large_list(data_type):
        element = _conversion(data_type.value_type, zone)
        if element is None:
            return None

        def elements(value: Any) -> Any:
            value = value.tolist() if isinstance(value, np.ndarray) else value
            return [*map(element, value)] if isinstance(value, list | tuple) else value

        return elements
    if pa.types.is_map(data_type):
        key, item = (_conversion(of, zone) or _as_it_is for of in (data_type.key_type, data_type.item_type))
        if key is item is _as_it_is:
            return None

        def pairs(value: Any) -> Any:
            found = list(value.items()) if isinstance(value, dict) else value
            paired = isinstance(found, list) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in found)
            return [(key(k), item(v)) for k, v in found] if paired else value

        return pairs
    return None


def _as_it_is(value: Any) -> Any:
    return value


def _unknown_fields(fields: Any, names: list[str]) -> str:
    extra = [str(name) for name in fields if name not in names]
    missing = [name for name in names if name not in fields]
    lines = [
        f"the processor yielded a row with {', '.join(map(repr, extra))}, which output_schema lacks",
        f"output_schema has {', '.join(names)}"
        + (f"; the row has no value for {', '.join(missing)}" if missing else ""),
    ]
    for name in extra:
        if close := get_close_matches(name, missing, 1):
            lines.append(f"Did you mean {close[0]!r} instead of {name!r}? Use the same name in both")
    if len(lines) == 2:
        lines.append("Add the field to output_schema with its type, or leave it out of the row")
    return "\n".join(lines)


def column_of(field: pa.Field, values: Any, *, from_pandas: bool = False) -> pa.Array:
    """Return the values as an Arrow array of the type of `field`. Raise `ProcessorError` if a value does not fit."""
    try:
        array = pa.array(values, type=field.type, from_pandas=from_pandas)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise ProcessorError(
            f"output column {field.name!r} is {field.type}, and a value does not fit: {error}"
        ) from error
    refuse_other_values(field, values, array)
    return no_nulls_if_none_may_be(field, array)


def refuse_other_values(field: pa.Field, values: Any, array: pa.Array) -> None:
    """Raise `ProcessorError` if Arrow made another value of a Python value: cut a number, or read it as a time.

    `array`: What Arrow made of `values`.
    """
    overflows = any(pc.any(pc.is_inf(flat)).as_py() for flat in flat_arrays(array) if pa.types.is_float32(flat.type))
    differs = predicate_of(field.type, _changes_or_overflows if overflows else _changes)
    if differs is None or _EXACT.get(field.type, frozenset()).issuperset(map(type, values)):
        return
    if pa.types.is_integer(field.type) and getattr(values, "dtype", np.dtype(object)).kind != "O":
        return  # Arrow refuses to cut the numbers of NumPy and pandas.
    wrong = next(filter(differs, values), None)
    if wrong is not None:
        raise ProcessorError(
            f"output column {field.name!r} is {field.type}, which can't hold {shorten(wrong)} unchanged"
        )


def flat_arrays(values: pa.Array) -> Iterator[pa.Array]:
    """Yield the array, or the arrays of flat types inside a nested one."""
    if pa.types.is_map(values.type):
        inside = [values.keys, values.items]
    elif pa.types.is_list(values.type):
        inside = [values.flatten()]
    elif pa.types.is_struct(values.type):
        inside = values.flatten()
    else:
        yield values
        return
    for part in inside:
        yield from flat_arrays(part)


# For each flat type of a column: the types of Python values that Arrow never changes silently.
_INTEGERS: frozenset[type] = frozenset({int, np.int8, np.int16, np.int32, np.int64, type(None)})
_EXACT: dict[pa.DataType, frozenset[type]] = {
    **dict.fromkeys((pa.int8(), pa.int16(), pa.int32(), pa.int64()), _INTEGERS),
    pa.date32(): frozenset({date, datetime, type(None)}),
    pa.duration("us"): frozenset({timedelta, type(None)}),
    **dict.fromkeys((pa.timestamp("us"), pa.timestamp("us", "UTC")), frozenset({datetime, type(None)})),
}


def _changes(data_type: pa.DataType) -> Predicate | None:
    # Arrow cuts 1.5 to the integer 1, and reads 5 as five days or µs.
    if pa.types.is_integer(data_type):
        return lambda value: type(value) not in _INTEGERS and _is_number(value) and int(value) != value
    return _is_number if pa.types.is_temporal(data_type) else None


def _changes_or_overflows(data_type: pa.DataType) -> Predicate | None:
    # Arrow makes 1e300 an infinite float of 32 bits.
    if pa.types.is_float32(data_type):
        return lambda value: _is_number(value) and _LARGEST_FLOAT <= abs(float(value)) < inf
    return _changes(data_type)


@cache
def predicate_of(data_type: pa.DataType, flat: Callable[[pa.DataType], Predicate | None]) -> Predicate | None:
    """Return a function that tells if a Python value of the type, or a value inside it, meets a condition.

    `flat`: Returns the condition for a flat type. Like this function, it returns None if no value can meet it.
    """
    if pa.types.is_struct(data_type):
        fields = [(field.name, predicate_of(field.type, flat)) for field in data_type]
        names = [name for name, _ in fields]
        by_name = {name: meets for name, meets in fields if meets is not None}

        def struct(value: Any) -> bool:
            pairs = value.items() if isinstance(value, Mapping) else zip(names, _parts(value), strict=False)
            return any(by_name[name](of) for name, of in pairs if name in by_name)

        return struct if by_name else None
    if pa.types.is_map(data_type):
        key, item = (predicate_of(of, flat) or _never for of in (data_type.key_type, data_type.item_type))
        return None if key is item is _never else lambda value: any(key(k) or item(v) for k, v in _pairs(value))
    if not pa.types.is_list(data_type):
        return flat(data_type)
    element = predicate_of(data_type.value_type, flat) or _never
    exact = _EXACT.get(data_type.value_type, frozenset()).issuperset

    def elements(value: Any) -> bool:
        if isinstance(value, np.ndarray):
            # Arrow refuses integers that do not fit, and NumPy's times are no numbers.
            value = (
                () if value.dtype.kind in "iuMm" and not pa.types.is_temporal(data_type.value_type) else value.tolist()
            )
        parts = value if type(value) is list else _parts(value)
        return not exact(map(type, parts)) and any(map(element, parts))

    return None if element is _never else elements


# Half a step above the largest float of 32 bits. From here on, numbers become infinite.
_LARGEST_FLOAT = 2.0**128 - 2.0**103


def _is_number(value: Any) -> bool:
    # NumPy counts its time differences as integers. NaN differs from itself.
    if isinstance(value, Decimal):
        return not value.is_nan()
    numbers = int | float | np.integer | np.floating | np.bool_
    return isinstance(value, numbers) and not isinstance(value, np.timedelta64) and value == value  # noqa: PLR0124


def _never(value: Any) -> bool:
    return False


def _pairs(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, Mapping | pd.Series):
        return value.items()
    return [of for of in _parts(value) if isinstance(of, tuple) and len(of) == 2]


def _parts(value: Any) -> Iterable[Any]:
    # In frames, a null is None, NaN or pandas' NA. Arrow has used up an iterator.
    return value if isinstance(value, Iterable) and not isinstance(value, Iterator) else ()


def no_nulls_if_none_may_be(field: pa.Field, array: pa.Array) -> pa.Array:
    """Return the array unchanged. Raise `ProcessorError` if it has a null and the column `field` is NOT NULL."""
    if not field.nullable and array.null_count:
        raise ProcessorError(
            f"output column {field.name!r} is NOT NULL, but a row has no value for it; yield a value, or declare the column without NOT NULL"
        )
    return array


def _short(value: object) -> str:
    return f"a {type(value).__name__}: {shorten(value)}"
