"""What a processor of the row API yields, as columns."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from pyspark.sql.types import Row

from cairn.runtime.output_file import LocalParquet
from state_backend.values.errors import ProcessorError

_ROWS_PER_BATCH = 10_000


class OutputRows:
    """Collects output rows; the caller writes them by ``flush`` when ``full``, between keys."""

    def __init__(self, file: LocalParquet) -> None:
        self._file = file
        self._names = list(file.schema.names)
        self._nested = any(pa.types.is_nested(t) for t in file.schema.types)
        self._pending: list[tuple[Any, ...]] = []

    def add(self, row: Any) -> None:
        """One row; fields are matched by name, a missing one is null, an extra one is dropped."""
        if isinstance(row, Row) and getattr(row, "__fields__", None) == self._names and not self._nested:
            self._pending.append(row)
        else:
            try:
                fields = row.asDict(True)
            except AttributeError:
                raise ProcessorError(f"the processor yielded {_short(row)}; expected pyspark.sql.Row") from None
            except TypeError:
                raise ProcessorError(
                    f"the processor yielded {_short(row)}, which has no field names; use Row(name=value, ...)"
                ) from None
            self._pending.append(tuple(fields.get(name) for name in self._names))

    @property
    def full(self) -> bool:
        """Whether a batch of rows waits."""
        return len(self._pending) >= _ROWS_PER_BATCH

    def flush(self) -> None:
        """Writes what has been collected. Raises: ProcessorError, naming column and row, if one does not fit."""
        if self._pending:
            columns = zip(*self._pending, strict=True)
            arrays = [self._column(field, values) for field, values in zip(self._file.schema, columns, strict=True)]
            self._file.write(pa.RecordBatch.from_arrays(arrays, schema=self._file.schema))
            self._pending.clear()

    def _column(self, field: pa.Field, values: tuple[Any, ...]) -> pa.Array:
        try:
            return column_of(field, values)
        except ProcessorError:
            for value, row in zip(values, self._pending, strict=True):
                try:
                    column_of(field, [value])
                except ProcessorError as error:
                    fields = ", ".join(f"{n}={v!r}" for n, v in zip(self._names, row, strict=True))
                    raise ProcessorError(f"{error}; the row is ({_cut(fields, 200)})") from error
            raise


def column_of(field: pa.Field, values: Any, *, from_pandas: bool = False) -> pa.Array:
    """Values as a column of the output. Raises: ProcessorError, naming the column, if one does not fit."""
    try:
        array = pa.array(values, type=field.type, from_pandas=from_pandas)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise ProcessorError(
            f"output column {field.name!r} is {field.type}, and a value does not fit: {error}"
        ) from error
    return no_nulls_if_none_may_be(field, array)


def no_nulls_if_none_may_be(field: pa.Field, array: pa.Array) -> pa.Array:
    """The array. Raises: ProcessorError if it holds nulls and the column may not."""
    if not field.nullable and array.null_count:
        raise ProcessorError(
            f"output column {field.name!r} is NOT NULL, but a row has no value for it; yield one, or declare it without NOT NULL"
        )
    return array


def _short(value: object) -> str:
    return f"a {type(value).__name__}: {_cut(repr(value), 80)}"


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."
