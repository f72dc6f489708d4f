"""Conversion between Arrow batches and the pandas DataFrames that handlers of the pandas API receive and yield.

The frames are those that Spark makes. Spark makes a key's frames from Python values: every integer is int64 and every
float is float64, whatever the SQL type. Instants are naive, in the session's zone. A frame has 10,000 rows, except the
last frame of a key.

A batch is converted once and then sliced by key. If a column of integers holds nulls, pandas stores floats and NaN. A
key whose own rows hold no null still gets integers. So a handler's frames depend only on the rows of its key. A float
is exact up to 2**53 only. A key with a null and an integer of that size or more gets pandas' nullable integers,
`Int64`.

The frames of a key are small. With pandas' public `frame[start:end].copy()` and `frame[name]`, about a third of a
shard's task was pandas' own overhead for each frame and column. So frames are sliced by pandas' internal blocks
(`cairn.spark_versions`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime, tzinfo
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.errors import PySparkException
from pyspark.sql.types import StructType

from cairn.rows.output_file import LocalParquet
from cairn.runners.input_rows import Slices, SlicesOf
from cairn.runners.mutable_values import copy_of_column
from cairn.runners.output_rows import (
    Predicate,
    column_of,
    flat_arrays,
    no_nulls_if_none_may_be,
    predicate_of,
    refuse_other_values,
)
from cairn.spark_versions import arrays_of_frame, column_of_series, rows_of_frame, series_of, values_of_labels
from state_backend.values.errors import ProcessorError
from state_backend.values.zones import zone_of

# From this absolute value on, two different integers may be the same float.
_FLOAT_LIMIT = 2**53


def frame_slices(zone: str) -> SlicesOf:
    """Return a function that converts a batch's struct column, and returns the DataFrames for a range of positions.

    The rows of one key in the batch become one DataFrame with all columns. Its index begins at 0. `zone`: Of its
    instants.
    """

    def slices_of(column: pa.StructArray) -> Slices:
        batch = pa.RecordBatch.from_arrays(
            [_widen(values) for values in column.flatten()],
            schema=pa.schema([field.with_type(_wide(field.type)) for field in column.type]),
        )
        frame = pd.concat([series_of(values, zone) for values in batch.columns], axis=1)
        frame.columns = pd.Index(batch.schema.names)
        for at, values in enumerate(batch.columns):
            if _null_inside(values):
                frame.isetitem(at, [_exact_cell(cell, values.type.value_type) for cell in frame.iloc[:, at]])
        # The frames of all keys are slices of this frame. `copy` has two purposes. It joins the columns of each dtype
        # into one block, which is fast to slice. And it replaces Arrow's read-only memory, because handlers may write
        # to frames.
        frame = frame.copy()
        names = batch.schema.names
        # All frames share this array of labels. A separate index for each key would cost a lookup table of names for
        # each key.
        labels: Any = frame.columns
        exact = {
            at: (
                values.is_valid().to_numpy(zero_copy_only=False),
                values.fill_null(False if values.type == pa.bool_() else 0).to_numpy(zero_copy_only=False),
            )
            for at, values in enumerate(batch.columns)
            if values.null_count and (values.type == pa.int64() or values.type == pa.bool_())
        }
        large = {at for at, (_, values) in exact.items() if values.dtype == np.int64 and _is_large(values).any()}

        def slices(start: int, end: int) -> Iterable[pd.DataFrame]:
            nonlocal labels
            # A handler may have renamed a column in the shared labels by `frame.columns.values[0] = "x"`.
            if values_of_labels(labels) != names:
                frame.columns = labels = pd.Index(names)
            part = rows_of_frame(frame, start, end)
            for at, (valid, values) in exact.items():
                if valid[start:end].all():
                    part.isetitem(at, values[start:end])
                elif at in large:
                    part.isetitem(at, _integers(values[start:end], valid[start:end]))
            return (part,)

        return slices

    return slices_of


def _integers(values: Any, valid: Any) -> Any:
    """Return integers as int64 if all are `valid`, else as float64 with NaN, or as Int64 if a float can't hold one."""
    if valid.all():
        return values
    if _is_large(values[valid]).any():
        return pd.arrays.IntegerArray(values.copy(), ~valid)
    made = values.astype(np.float64)
    made[~valid] = np.nan
    return made


def _is_large(values: Any) -> Any:
    """Return True for each number that is so large that a float may not hold it exactly."""
    return (values >= _FLOAT_LIMIT) | (values <= -_FLOAT_LIMIT)


def _null_inside(values: pa.Array) -> bool:
    """Return True if the column has arrays of integers or booleans, and one of these arrays holds a null.

    For such a column, pandas makes object arrays in all rows, also in rows without a null.
    """
    if not pa.types.is_list(values.type):
        return False
    inside = values.type.value_type
    return bool((pa.types.is_integer(inside) or pa.types.is_boolean(inside)) and values.flatten().null_count)


def _exact_cell(cell: Any, inside: pa.DataType) -> Any:
    """Return a cell of an array column as an array of the type `inside`, such as int64, instead of objects.

    A cell that holds a null stays an object array.
    """
    if not isinstance(cell, np.ndarray) or any(value is None for value in cell):
        return cell
    return cell.astype(inside.to_pandas_dtype())


def _wide(data_type: pa.DataType) -> pa.DataType:
    if pa.types.is_integer(data_type):
        return pa.int64()
    return pa.float64() if pa.types.is_floating(data_type) else data_type


def _widen(values: pa.Array) -> pa.Array:
    wide = _wide(values.type)
    return values if wide == values.type else values.cast(wide)


_ROWS_PER_FRAME = 10_000


def whole_frames(parts: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
    """Yield the rows of one key as frames of 10,000 rows; only the last frame may be shorter.

    `parts` are the key's rows of each batch. A handler should not be able to see where a batch ends.
    """
    held: list[pd.DataFrame] = []
    rows = 0
    for part in parts:
        held.append(part)
        rows += len(part)
        while rows >= _ROWS_PER_FRAME:
            whole = _join(held)
            yield _as_frame(whole[:_ROWS_PER_FRAME])
            rows -= _ROWS_PER_FRAME
            held = [whole[_ROWS_PER_FRAME:].reset_index(drop=True)] if rows else []
    if rows:
        yield _as_frame(_join(held))


def key_values(column: pa.Array) -> list[Any]:
    """Return a key column as Python values. Instants are naive pandas Timestamps in the zone of the column."""
    values: list[Any] = column.to_pylist()
    if not pa.types.is_timestamp(column.type):
        return values
    return [None if at is None else pd.Timestamp(at.replace(tzinfo=None)) for at in values]


def _join(frames: list[pd.DataFrame]) -> pd.DataFrame:
    """Concatenate the frames of a key. If a column's integers have different dtypes, it becomes `Int64`."""
    if len(frames) == 1:
        return frames[0]
    dtypes = [{*kinds} for kinds in zip(*(frame.dtypes for frame in frames), strict=True)]
    # If int64 and float64 were concatenated, pandas would convert all integers to floats.
    mixed = [at for at, kinds in enumerate(dtypes) if len(kinds) > 1 and kinds & {np.dtype(np.int64), pd.Int64Dtype()}]
    for frame in frames if mixed else ():
        for at in mixed:
            frame.isetitem(at, frame.iloc[:, at].astype("Int64").array)
    return pd.concat(frames, ignore_index=True)


def _as_frame(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the frame with int64 or float64 in place of `Int64` in each column whose values that dtype can hold."""
    joined = [at for at, kind in enumerate(frame.dtypes) if kind == pd.Int64Dtype()]
    if joined:
        frame = frame.copy()
    for at in joined:
        column: Any = frame.iloc[:, at].array
        frame.isetitem(at, _integers(column.to_numpy(np.int64, na_value=0), ~column.isna()))
    return frame


_ROWS_PER_BATCH = 10_000


class OutputFrames:
    """Buffer for the DataFrames that a processor yields.

    If the frame's labels are strings, columns are matched by name, else by position. Columns that the output schema
    lacks are dropped.

    Frames are small and many. The conversion of each single frame to Arrow would cost more than all other work in
    pandas. So values of many frames are concatenated first if their dtypes are equal. If dtypes differ, each frame is
    converted alone, so that no value depends on the dtype of another frame.
    """

    def __init__(self, file: LocalParquet, schema: StructType, zone: str) -> None:
        self._file = file
        self._schema = schema
        self._zone = zone
        self._names = list(file.schema.names)
        # For each column: True if its type is user-defined. Such a type may convert values.
        self._user_defined = ['"type":"udt"' in field.json() for field in schema]
        self._pending: list[list[Any]] = []
        self._pending_rows = 0

    def add(self, frame: Any) -> None:
        """Buffer a copy of a DataFrame that a handler yielded, which the handler may change afterwards."""
        if not isinstance(frame, pd.DataFrame):
            raise ProcessorError(
                f"the processor yielded a {type(frame).__name__}; with api='pandas' it must yield pandas.DataFrame"
            )
        if len(frame):
            # PySpark's worker converts a frame before it resumes the generator. The generator may then refill the
            # frame, so the values are copied here.
            self._pending.append([*map(copy_of_column, self._columns(frame))])
            self._pending_rows += len(frame)

    def settle(self) -> None:
        """Do nothing, because `add` has already copied every frame."""

    @property
    def full(self) -> bool:
        return self._pending_rows >= _ROWS_PER_BATCH

    def _columns(self, frame: Any) -> list[Any]:
        if frame.columns.tolist() == self._names:
            columns = arrays_of_frame(frame)
            if all(type(column) is np.ndarray for column in columns):
                return columns
        try:
            return [_values(_first(frame[name])) for name in self._names]
        except KeyError:
            pass
        labels = list(frame.columns)
        if any(isinstance(label, str) for label in labels):
            missing = [name for name in self._names if name not in labels]
            raise ProcessorError(
                f"the yielded DataFrame lacks the output column{'s' * (len(missing) > 1)} {', '.join(missing)}; it has "
                f"{', '.join(map(str, labels))}"
            )
        if len(labels) < len(self._names):
            raise ProcessorError(
                f"the yielded DataFrame has {len(labels)} columns without names; the output has {len(self._names)}: "
                f"{', '.join(self._names)}"
            )
        return [_values(frame.iloc[:, at]) for at in range(len(self._names))]

    def flush(self) -> None:
        if self._pending:
            columns = zip(*self._pending, strict=True)
            arrays = [self._column(at, parts) for at, parts in enumerate(columns)]
            self._file.write(pa.Table.from_arrays(arrays, schema=self._file.schema))
            self._pending.clear()
            self._pending_rows = 0

    def _column(self, at: int, parts: tuple[Any, ...]) -> pa.Array | pa.ChunkedArray:
        if len({part.dtype for part in parts}) == 1 and isinstance(parts[0], np.ndarray):
            try:
                return self._convert(at, np.concatenate(parts))
            except ProcessorError:
                pass
        arrays = []
        for part, frame in zip(parts, self._pending, strict=True):
            try:
                arrays.append(self._convert(at, part))
            except ProcessorError as error:
                first = ", ".join(f"{name}={values[0]!r}" for name, values in zip(self._names, frame, strict=True))
                raise ProcessorError(f"{error}; the frame begins with ({first})") from error
        return pa.chunked_array(arrays, self._file.schema.field(at).type)

    def _convert(self, at: int, values: Any) -> pa.Array:
        made, field = self._exactly(at, values), self._file.schema.field(at)
        if values.dtype.kind not in "iub" and _holds_large_integer(made):
            wrong = next(filter(predicate_of(field.type, _lost_digits), values), None)
            if wrong is not None:
                raise ProcessorError(
                    f"output column {field.name!r} is {field.type}, and a float in {wrong!r} may have lost digits of a large integer\n"
                    "Use integers: the dtype 'Int64' if the column has nulls"
                )
        return made

    def _exactly(self, at: int, values: Any) -> pa.Array:
        field: pa.Field = self._file.schema.field(at)
        try:
            if isinstance(values, np.ndarray) and _alike(values.dtype, field.type):
                return column_of(field, values, from_pandas=True)
        except ProcessorError as error:
            return self._cast(at, values, error)
        return self._cast(at, values, None)

    def _cast(self, at: int, values: Any, why: ProcessorError | None) -> pa.Array:
        """Return values as an Arrow array of column `at`, as Spark's worker casts. `why`: The error of a first try."""
        field: pa.Field = self._file.schema.field(at)
        series = pd.Series(values)
        if series.dtype == object and pa.types.is_timestamp(field.type) and field.type.tz is not None:
            # With an instant beyond pandas' range, the column stays objects, and Arrow would take naive ones as UTC.
            series = series.map(partial(_in_zone, zone=zone_of(self._zone).rules), na_action="ignore")
        try:
            array = column_of_series(
                series,
                self._schema[at].dataType,
                self._zone,
                # `safe` refuses a loss of digits. It is off for instants, which may lose their nanoseconds.
                safe=not pa.types.is_timestamp(field.type),
            )
        except (pa.ArrowException, PySparkException, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            text = str(error.__cause__ or error).splitlines()[0]
            raise why or ProcessorError(
                f"output column {field.name!r} is {field.type}, and a value does not fit: {text}"
            ) from error
        if values.dtype.kind in "Oiufb" and not self._user_defined[at]:
            refuse_other_values(field, values, array)
        return no_nulls_if_none_may_be(field, array if array.type == field.type else array.cast(field.type))


def _in_zone(value: Any, zone: tzinfo) -> Any:
    # PySpark takes the later of two equal wall times too.
    return value.replace(tzinfo=zone, fold=1) if isinstance(value, datetime) and value.tzinfo is None else value


def _holds_large_integer(values: pa.Array) -> bool:
    """Return True if the column holds an integer, also a nested one, that a float may not hold exactly."""
    bounds = [pc.min_max(flat) for flat in flat_arrays(values) if pa.types.is_int64(flat.type)]
    return any(of.is_valid and bool(_is_large(of.as_py())) for both in bounds for of in both.values())


def _lost_digits(data_type: pa.DataType) -> Predicate | None:
    """Return a test of floats in a bigint that may have lost digits."""
    if not pa.types.is_int64(data_type):
        return None
    return lambda value: isinstance(value, float | np.floating) and bool(_is_large(value))


def _first(columns: pd.Series[Any] | pd.DataFrame) -> pd.Series[Any]:
    """Return the column that pandas found by a name; of several columns with this name, the first one, as in Spark."""
    return columns.iloc[:, 0] if isinstance(columns, pd.DataFrame) else columns


def _values(column: pd.Series[Any]) -> Any:
    # For instants with a zone, `column.values` would lose the zone: it returns naive datetimes in UTC.
    return column.values if isinstance(column.dtype, np.dtype) else column.array


def _alike(dtype: np.dtype[Any], data_type: pa.DataType) -> bool:
    """Return True if `pa.array` converts values of this dtype to the same column as Spark's Python worker does.

    Spark's worker runs PySpark's conversion. The two differ for naive instants, for maps given as dicts, and for NaN in
    binary columns. If this function returns False, the caller runs PySpark's conversion too.
    """
    if pa.types.is_nested(data_type) or pa.types.is_temporal(data_type):
        return False
    number = pa.types.is_integer(data_type) or pa.types.is_floating(data_type) or pa.types.is_boolean(data_type)
    return dtype.kind == "O" or (number and dtype.kind in "iufb")
