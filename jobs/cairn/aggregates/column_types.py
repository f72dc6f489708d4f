"""Types of columns that aggregates take, and the types of their results."""

from __future__ import annotations

from typing import Any

from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    TimestampNTZType,
    TimestampType,
)

MAX_DIGITS = 38
_INTEGERS = (ByteType, ShortType, IntegerType, LongType)
_FLOATS = (FloatType, DoubleType)
_SCALARS = (BooleanType, DateType, TimestampType, TimestampNTZType, BinaryType, StringType)


class UnfitError(Exception):
    """The error for a column type that an aggregate refuses. Its text completes "column 'x' is array<int>, and ..."."""


def numeric_type(of: Any, result: DataType) -> DataType:
    if not isinstance(of, (*_INTEGERS, *_FLOATS, DecimalType)):
        raise UnfitError("only integers, float, double and decimal can be summed; cast it in the source")
    return result


def sum_type(of: Any) -> DataType:
    if isinstance(of, DecimalType):
        return DecimalType(min(MAX_DIGITS, of.precision + 10), of.scale)
    return numeric_type(of, DoubleType() if isinstance(of, _FLOATS) else LongType())


def hashed_as(of: DataType) -> str:
    """Return the same name for two scalar types if `hash_values` gives equal values of both the same hash."""
    if isinstance(of, DecimalType):
        return f"decimals of scale {of.scale}"
    classes = {"integers": (*_INTEGERS, BooleanType), "floats": _FLOATS, "text or binary": (StringType, BinaryType)}
    return next((name for name, types in classes.items() if isinstance(of, types)), of.simpleString())


def is_scalar(of: Any) -> bool:
    """Return True for a Spark type that can be ordered: numbers, strings, binary, booleans, dates and timestamps.

    The result is True for a string with any collation, so the caller must check the collation.
    """
    return isinstance(of, (*_INTEGERS, *_FLOATS, DecimalType, *_SCALARS))


def scalar_type(of: Any, why: str) -> DataType:
    if isinstance(of, StringType) and not of.isUTF8BinaryCollation():
        raise UnfitError(
            "its collation does not compare bytes; use plain string, in lower case if case does not matter"
        )
    if not is_scalar(of):
        raise UnfitError(why)
    found: DataType = of
    return found
