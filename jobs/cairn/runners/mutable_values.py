"""Copies of values that user code may change after it has yielded them.

A processor may refill one list, buffer or array for every row. The output rows wait in memory until a batch is full.
They must not share memory with the processor.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import numpy as np
import pandas as pd
from pyspark.sql.types import Row

# Types of values that user code can't change. A value of a subclass takes the slower way through `_copy_of_other`.
IMMUTABLE = frozenset(
    [
        *(type(None), bool, int, float, complex, str, bytes, Decimal, date, datetime, time, timedelta, UUID),
        *(pd.Timestamp, pd.Timedelta, type(pd.NaT), type(pd.NA)),
        *(np.dtype(code).type for code in np.typecodes["All"] if code not in "OV"),
    ]
)
_only_immutable = IMMUTABLE.issuperset
_IMMUTABLE_BASES = (int, float, complex, str, bytes, Decimal, date, time, timedelta)


def all_immutable(values: Iterable[Any]) -> bool:
    return _only_immutable(map(type, values))


def without_rows(value: Any, others: list[Any]) -> Any:
    """Return the value with copied lists and dicts, and with a dict in place of each PySpark row.

    The result equals that of `Row.asDict(True)`, in a fraction of its time. Other mutable values are added to `others`.
    """
    kind = type(value)
    if kind in IMMUTABLE:
        return value
    if isinstance(value, list):
        return value.copy() if kind is list and all_immutable(value) else [without_rows(of, others) for of in value]
    if isinstance(value, Row):
        value = value.asDict()
    if isinstance(value, dict):
        return {key: without_rows(of, others) for key, of in value.items()}
    others.append(value)
    return value


def copy_of(value: Any) -> Any:
    """Return a value that user code can no longer change: an immutable value itself, or a deep copy."""
    kind = type(value)
    if kind in IMMUTABLE:
        return value
    if kind is list:
        return value.copy() if all_immutable(value) else [*map(copy_of, value)]
    if kind is dict:
        return {key: copy_of(of) for key, of in value.items()}
    if kind is tuple:
        return tuple(map(copy_of, value))
    if isinstance(value, np.ndarray):
        if value.dtype.kind == "M":
            return value.astype("M8[us]")  # Arrow would read other units, inside a list, as microseconds too.
        return _copy_of_cells(value) if value.dtype.hasobject else value.copy()
    return _copy_of_other(value)


def copy_of_column(values: Any) -> Any:
    """Return a deep copy of one column of a DataFrame, a NumPy or pandas array."""
    if isinstance(values, np.ndarray):
        if values.dtype == object and not all_immutable(values.tolist()):
            return _copy_of_cells(values)
        return values.copy()
    # For an Arrow-backed pandas array, `copy` would share Arrow's buffers, which user code may change through NumPy.
    # `take` copies the buffers.
    return values.take(np.arange(len(values))) if isinstance(values, pd.arrays.ArrowExtensionArray) else values.copy()


def _copy_of_cells(values: Any) -> Any:
    if values.dtype != object:
        return copy.deepcopy(values)
    copied = values.copy()
    for at in np.ndindex(values.shape):
        copied[at] = copy_of(values[at])
    return copied


def _copy_of_other(value: Any) -> Any:
    if isinstance(value, _IMMUTABLE_BASES):
        return value
    if isinstance(value, memoryview):
        return memoryview(value.tobytes()).cast(value.format, value.shape)  # type: ignore[call-overload]
    if isinstance(value, pd.Series | pd.Index):
        return type(value)(copy_of_column(value.array if value.dtype != object else value.to_numpy()))
    try:
        return copy.deepcopy(value)
    except Exception:
        return value  # A value that can't be copied can't be converted by Arrow either: its error names the column.
