"""Order of rows by the values of columns, as integers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import DataType, StringType

from cairn.aggregates.column_types import is_scalar
from cairn.numpy_columns import Int64s, numbers, valid_rows
from state_backend.values.errors import UsageError
from state_backend.values.frozen import frozen


@frozen
class OrderColumn:
    """A column by which rows are ordered, as a setting such as "score desc" names it."""

    name: str
    descending: bool


def order_columns(owner: str, setting: str, value: Any) -> tuple[OrderColumn, ...]:
    """Return the columns that a setting names: a text such as "score desc", or a sequence of such texts."""
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not texts or not all(isinstance(t, str) and t.strip() for t in texts):
        raise UsageError(
            f'{owner}.{setting} is {value!r}; name one or more columns, as in {setting} = "updated_at" or {setting} = ("day", "number")'
        )
    columns = []
    for text in texts:
        name, _, direction = text.strip().rpartition(" ")
        if direction.lower() in ("asc", "desc") and name.strip():
            columns.append(OrderColumn(name=name.strip(), descending=direction.lower() == "desc"))
        elif name and direction.lower().startswith(("asc", "desc")):
            raise UsageError(
                f'{owner}.{setting} is {value!r}; write {setting} = "{name.strip()} {"desc" if direction[0] in "dD" else "asc"}"'
            )
        else:
            columns.append(OrderColumn(name=text.strip(), descending=False))
    return tuple(columns)


def check_order(owner: str, setting: str, columns: Sequence[OrderColumn], handle: Any) -> None:
    for column in columns:
        of = type_of(owner, setting, column.name, handle)
        if not is_scalar(of) or (isinstance(of, StringType) and not of.isUTF8BinaryCollation()):
            raise UsageError(
                f"{owner}.{setting} names column {column.name!r}, which is {of.simpleString()}; name columns of numbers, plain strings, dates or timestamps"
            )


def type_of(owner: str, setting: str, column: str, handle: Any) -> DataType:
    types = {f.name: f.dataType for f in handle.input_schema.fields}
    if column not in types:
        found = ", ".join(f"{name} {of.simpleString()}" for name, of in types.items())
        raise UsageError(f"{owner}.{setting} names column {column!r}, which the input lacks; its columns are {found}")
    of: DataType = types[column]
    return of


def order_codes(columns: Sequence[OrderColumn], arrays: Sequence[pa.Array]) -> Int64s:
    """Return an integer for each row: a row with a smaller one comes first, equal rows have equal ones.

    `arrays`: The values of `columns`. The order is Spark's: nulls come first, in a descending column last. NaN is above
    all numbers.
    """
    codes = [
        ~_codes(array) if column.descending else _codes(array) for column, array in zip(columns, arrays, strict=True)
    ]
    if len(codes) == 1:
        return codes[0]
    order = np.lexsort(codes[::-1])
    differs = np.zeros(len(order), np.bool_)
    for code in codes:
        differs[1:] |= np.diff(code[order]) != 0
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.cumsum(differs)
    return ranks


def _codes(array: pa.Array) -> Int64s:
    of = array.type
    whole = pa.types.is_integer(of) or pa.types.is_temporal(of) or pa.types.is_boolean(of)
    if whole and not array.null_count:
        return numbers(array).astype(np.int64)
    ranks = np.zeros(len(array), np.int64)
    some = array.drop_null()
    if whole or pa.types.is_floating(of):
        found = np.unique(numbers(some), return_inverse=True)[1]
    else:
        coded = some.dictionary_encode()
        place = np.empty(len(coded.dictionary), np.int64)
        place[pc.sort_indices(coded.dictionary).to_numpy()] = np.arange(len(place))
        found = place[coded.indices.to_numpy()]
    ranks[valid_rows(array)] = found + 1
    return ranks
