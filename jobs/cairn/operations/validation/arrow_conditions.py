"""Evaluate the conditions of expectations on Arrow columns, with the same results as Spark.

Each condition returns a mask that is true for each row that meets the condition. Spark's rules differ from those of
Arrow, NumPy and pandas in three points:

    NaN           Spark sorts NaN above all numbers, and NaN equals NaN.
    zero          0.0 and -0.0 are the same value.
    null          A comparison with null is neither true nor false. Great Expectations then counts no failing row.

`find_unsupported` says which expectations these conditions can evaluate. `tests/property/test_arrow_conditions.py`
compares the results with those of Great Expectations' Spark engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Mask = npt.NDArray[np.bool_]
_LONG = range(-(2**63), 2**63)
_NEAR = 1e-9  # Relative distance from a bound. Arrow's cast from decimal to double has an error below 1e-14.


def between(column: pa.Array, low: Any, high: Any, *, strict_low: bool, strict_high: bool) -> Mask:
    if low is None and high is None:
        raise ValueError("min_value and max_value cannot both be None")
    if low is not None and high is not None and low > high:
        raise ValueError("min_value cannot be greater than max_value")
    met = np.ones(len(column), np.bool_)
    if low is not None:
        met &= _greater(*_with_bound(column, low), or_equal=not strict_low)
    if high is not None:
        values, bound = _with_bound(column, high)
        met &= ~_greater(values, bound, or_equal=strict_high)
    return met


def in_set(column: pa.Array, values: Sequence[Any]) -> Mask:
    if pa.types.is_integer(column.type):
        column = column.cast(pa.int64())
    elif pa.types.is_floating(column.type):
        column, values = _one_zero(column.cast(pa.float64())), [float(value) + 0.0 for value in values]
    return _mask(pc.is_in(column, pa.array(values, column.type)))


def unique(column: pa.Array) -> Mask:
    if pa.types.is_floating(column.type):
        column = _one_zero(pc.if_else(pc.is_nan(column), pa.scalar(float("nan"), column.type), column))
    indices = column.dictionary_encode().indices.to_numpy()
    times: Mask = np.bincount(indices)[indices] == 1 if len(indices) else np.empty(0, np.bool_)
    return times


def equal(left: pa.Array, right: pa.Array) -> Mask:
    """Return a mask of the rows in which two columns of one type are equal. Null equals null, and NaN equals NaN."""
    same = _mask(pc.equal(left, right))
    if pa.types.is_floating(left.type):
        same |= _mask(pc.and_(pc.is_nan(left), pc.is_nan(right)))
    return same | _mask(pc.and_(left.is_null(), right.is_null()))


def greater(left: pa.Array, right: pa.Array, *, or_equal: bool) -> Mask:
    """Return a mask of the rows in which `left` is greater than `right`; with `or_equal`, greater or equal.

    Both columns have the same type. A row with a null counts as one that meets the condition.
    """
    there = ~_mask(pc.or_(left.is_null(), right.is_null()))
    return _greater(left, right, or_equal=or_equal) | ~there


def _greater(left: pa.Array, right: Any, *, or_equal: bool) -> Mask:
    met = _mask(pc.greater_equal(left, right) if or_equal else pc.greater(left, right))
    if pa.types.is_floating(left.type):
        below = _mask(pc.invert(pc.is_nan(right))) if not or_equal else True
        met |= _mask(pc.is_nan(left)) & below
    return met


def _mask(condition: Any) -> Mask:
    """Return a boolean column as a NumPy array that is false where the column is null."""
    if isinstance(condition, pa.Scalar):
        return np.asarray(condition.as_py() is True)
    mask: Mask = pc.fill_null(condition, False).to_numpy(zero_copy_only=False)
    return mask


def _one_zero(column: pa.Array) -> pa.Array:
    """Replace -0.0 by 0.0."""
    return pc.add(column, pa.scalar(0.0, column.type))


def _with_bound(column: pa.Array, bound: Any) -> tuple[pa.Array, pa.Scalar]:
    """Return (column, bound), both converted to the type in which Spark compares them."""
    kind = column.type
    if pa.types.is_decimal(kind):
        if isinstance(bound, float):
            return _doubles(column, bound), pa.scalar(bound)
        exact = Decimal(bound)
        scale = max(kind.scale, -int(exact.as_tuple().exponent), 0)
        common = pa.decimal256(76, scale)
        return column.cast(common), pa.scalar(exact, common)
    if pa.types.is_floating(kind) or isinstance(bound, float):
        return column.cast(pa.float64(), safe=False), pa.scalar(float(bound))
    if isinstance(bound, datetime):
        return column.cast(pa.timestamp("us", "UTC")), pa.scalar(bound.astimezone(UTC), pa.timestamp("us", "UTC"))
    if pa.types.is_integer(kind):
        return column.cast(pa.int64()), pa.scalar(bound, pa.int64())
    return column, pa.scalar(bound, kind)


def _doubles(column: pa.Array, bound: float) -> pa.Array:
    """Convert decimals to the nearest doubles, as Spark does to compare decimals with a double.

    Arrow's cast may be off by some units in the last place. So Python converts the values that are near the bound.
    """
    doubles = column.cast(pa.float64()).to_numpy(zero_copy_only=False).copy()
    near = np.flatnonzero(np.abs(doubles - bound) <= _NEAR * np.abs(doubles))
    doubles[near] = [float(value) for value in column.take(pa.array(near)).to_pylist()]
    return pa.array(doubles)


def find_unsupported(expectation: str, kwargs: Mapping[str, Any], schema: pa.Schema) -> str | None:
    """Return why this module can't evaluate an expectation with Spark's result; None if it can.

    An expectation on a column that does not exist is supported: its evaluation tells which columns exist.
    """
    if expectation not in _ARGUMENTS:
        return f"{expectation} needs Spark"
    given = {name: value for name, value in kwargs.items() if value is not None and value != {} and value is not False}
    if others := given.keys() - _ARGUMENTS[expectation] - _ALWAYS:
        return f"{expectation} with {', '.join(sorted(others))} needs Spark"
    if any(isinstance(value, Mapping) for value in given.values()):
        return f"{expectation} with a suite parameter needs Spark"
    names = [given[name] for name in ("column", "column_A", "column_B") if name in given]
    if any(schema.get_field_index(name) < 0 for name in names):
        return None
    types = [schema.field(name).type for name in names]
    if expectation in _FITS and not _FITS[expectation](types, given):
        return f"{expectation} of {', '.join(map(str, types))} with these arguments needs Spark"
    return None


def _fits_between(types: Sequence[pa.DataType], given: Mapping[str, Any]) -> bool:
    return all(_fits_bound(types[0], given[name]) for name in ("min_value", "max_value") if name in given)


def _fits_bound(kind: pa.DataType, bound: Any) -> bool:
    is_integer, is_double = type(bound) is int and bound in _LONG, type(bound) is float and not math.isnan(bound)
    if pa.types.is_decimal(kind):
        if not isinstance(bound, Decimal) or not bound.is_finite():
            return is_integer or is_double
        return len(bound.as_tuple().digits) <= 18 and bound == round(bound, 18)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return is_integer or is_double
    if pa.types.is_timestamp(kind):
        return kind.tz is not None and isinstance(bound, datetime) and bound.tzinfo is not None
    if pa.types.is_date(kind):
        return type(bound) is date
    return pa.types.is_string(kind) and type(bound) is str


def _fits_set(types: Sequence[pa.DataType], given: Mapping[str, Any]) -> bool:
    kind, values = types[0], given.get("value_set")
    if not isinstance(values, list | tuple | set | frozenset):
        return False
    if pa.types.is_string(kind):
        return all(type(value) is str for value in values)
    if pa.types.is_boolean(kind):
        return all(type(value) is bool for value in values)
    if pa.types.is_integer(kind):
        return all(type(value) is int and value in _LONG for value in values)
    numbers = all(type(value) in (int, float) and abs(value) < 2**53 for value in values)
    return pa.types.is_floating(kind) and numbers


def _is_plain(kind: pa.DataType) -> bool:
    return not pa.types.is_nested(kind) and not pa.types.is_null(kind)


def _fits_pair(types: Sequence[pa.DataType], given: Mapping[str, Any]) -> bool:
    return _is_plain(types[0]) and types[0] == types[1]


def _fits_ordered(types: Sequence[pa.DataType], given: Mapping[str, Any]) -> bool:
    return _fits_pair(types, given) and not pa.types.is_boolean(types[0]) and not pa.types.is_binary(types[0])


_ALWAYS = {"mostly", "batch_id"}
_BOUNDS = {"min_value", "max_value", "strict_min", "strict_max"}
_PAIR = {"column_A", "column_B", "ignore_row_if"}
_ARGUMENTS: dict[str, set[str]] = {
    "expect_column_values_to_be_between": {"column", *_BOUNDS},
    "expect_column_values_to_be_in_set": {"column", "value_set"},
    "expect_column_values_to_not_be_in_set": {"column", "value_set"},
    "expect_column_values_to_be_unique": {"column"},
    "expect_column_values_to_be_null": {"column"},
    "expect_column_values_to_not_be_null": {"column"},
    "expect_column_pair_values_to_be_equal": _PAIR,
    "expect_column_pair_values_a_to_be_greater_than_b": {*_PAIR, "or_equal"},
    "expect_table_row_count_to_be_between": _BOUNDS,
    "expect_table_row_count_to_equal": {"value"},
}
_FITS: dict[str, Callable[[Sequence[pa.DataType], Mapping[str, Any]], bool]] = {
    "expect_column_values_to_be_between": _fits_between,
    "expect_column_values_to_be_in_set": _fits_set,
    "expect_column_values_to_not_be_in_set": _fits_set,
    "expect_column_values_to_be_unique": lambda types, _: _is_plain(types[0]),
    "expect_column_pair_values_to_be_equal": _fits_pair,
    "expect_column_pair_values_a_to_be_greater_than_b": _fits_ordered,
}
