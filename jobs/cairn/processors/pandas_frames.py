"""Rows as pandas DataFrames, for the pandas API: what handlers get, and what they yield.

Spark makes a key's frames from Python values: every integer is int64 there and every float float64, whatever the SQL type,
and instants are naive, in the session's zone. So it is here. A frame has 10,000 rows unless it is a key's last one.

A batch is converted once and sliced per key. Where a column of integers holds nulls, pandas has floats and NaN for it; a key
whose own rows have no null gets integers all the same, so that what a handler sees depends on its key's rows only.

Frames of a key are small. What pandas does in ``frame[start:end].copy()`` and in ``frame[name]``, for each frame and column anew, took
about a third of a shard's task. So both go by the blocks that a frame is made of, which are the same in pandas 2.2 and 2.3; the
package allows no others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql.conversion import ArrowBatchTransformer, PandasToArrowConversion
from pyspark.sql.types import StructType

from cairn.processors.input_rows import Slices, SlicesOf
from cairn.processors.mutable_values import copy_of_column
from cairn.processors.output_rows import column_of, no_nulls_if_none_may_be
from cairn.rows.output_file import LocalParquet
from state_backend.values.errors import ProcessorError


def frame_slices(zone: str) -> SlicesOf:
    """For the pandas API: one DataFrame with all columns per run of rows, its index from 0. ``zone``: of its instants."""

    def slices_of(column: pa.StructArray) -> Slices:
        batch = pa.RecordBatch.from_arrays(
            [_widened(values) for values in column.flatten()],
            schema=pa.schema([field.with_type(_wide(field.type)) for field in column.type]),
        )
        frame = pd.concat(ArrowBatchTransformer.to_pandas(batch, timezone=zone), axis=1)
        frame.columns = pd.Index(batch.schema.names)
        for at, values in enumerate(batch.columns):
            if _null_inside(values):
                frame.isetitem(at, [_exact_cell(cell, values.type.value_type) for cell in frame.iloc[:, at]])
        # One block for each dtype, which may be written to, as a copy for each key would have them.
        frame = frame.copy()
        names = batch.schema.names
        # All frames share the array of labels: an index of their own would cost each key a lookup table of names.
        labels: Any = frame.columns
        exact = {
            at: (
                values.is_valid().to_numpy(zero_copy_only=False),
                values.fill_null(False if values.type == pa.bool_() else 0).to_numpy(zero_copy_only=False),
            )
            for at, values in enumerate(batch.columns)
            if values.null_count and (values.type == pa.int64() or values.type == pa.bool_())
        }

        def slices(start: int, end: int) -> Iterable[pd.DataFrame]:
            nonlocal labels
            # A handler may have renamed a column by `frame.columns.values[0] = "x"`.
            if labels._values.tolist() != names:
                frame.columns = labels = pd.Index(names)
            part = _rows_of(frame, start, end)
            for at, (valid, values) in exact.items():
                if valid[start:end].all():
                    part.isetitem(at, values[start:end])
            return (part,)

        return slices

    return slices_of


def _rows_of(frame: Any, start: int, end: int) -> Any:
    """These rows as a frame with an index from 0. It has the memory of ``frame``, of which no other frame gets the same rows."""
    blocks = frame._mgr.get_slice(slice(start, end), axis=1)
    # Whoever names an index names it for all frames that have the same object.
    blocks.axes[:] = frame.columns.view(), pd.RangeIndex(end - start)
    made: Any = pd.DataFrame
    return made._from_mgr(blocks, blocks.axes)


def _null_inside(values: pa.Array) -> bool:
    """True if a column of arrays of integers or booleans has a null in some array: pandas then has objects in all of them."""
    if not pa.types.is_list(values.type):
        return False
    inside = values.type.value_type
    return bool((pa.types.is_integer(inside) or pa.types.is_boolean(inside)) and values.flatten().null_count)


def _exact_cell(cell: Any, inside: pa.DataType) -> Any:
    """An array without nulls with the dtype that it has where no other array has one either."""
    if not isinstance(cell, np.ndarray) or any(value is None for value in cell):
        return cell
    return cell.astype(inside.to_pandas_dtype())


def _wide(data_type: pa.DataType) -> pa.DataType:
    if pa.types.is_integer(data_type):
        return pa.int64()
    return pa.float64() if pa.types.is_floating(data_type) else data_type


def _widened(values: pa.Array) -> pa.Array:
    wide = _wide(values.type)
    return values if wide == values.type else values.cast(wide)


_ROWS_PER_FRAME = 10_000


def whole_frames(parts: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
    """The frames of one key, cut and put together to 10,000 rows each but for the last: where a batch ends is nothing that a
    handler should see."""
    held: list[pd.DataFrame] = []
    rows = 0
    for part in parts:
        held.append(part)
        rows += len(part)
        while rows >= _ROWS_PER_FRAME:
            whole = _joined(held)
            yield whole[:_ROWS_PER_FRAME]
            rows -= _ROWS_PER_FRAME
            held = [whole[_ROWS_PER_FRAME:].reset_index(drop=True)] if rows else []
    if rows:
        yield _joined(held)


def key_values(column: pa.Array) -> list[Any]:
    """A key column as Python values; instants are naive timestamps of pandas, in the zone of the column, as in frames."""
    values: list[Any] = column.to_pylist()
    if not pa.types.is_timestamp(column.type):
        return values
    return [None if at is None else pd.Timestamp(at.replace(tzinfo=None)) for at in values]


def _joined(frames: list[pd.DataFrame]) -> pd.DataFrame:
    return frames[0] if len(frames) == 1 else pd.concat(frames, ignore_index=True)


_ROWS_PER_BATCH = 10_000


class OutputFrames:
    """Collects the DataFrames that a processor yields. Columns are matched by name if their labels are strings, else by
    position; a column that is not asked for is dropped.

    Frames are small and many, and to convert each for itself costs more than all that pandas does: so the values of many are
    put together first, where they have one dtype. Where not, one by one, so that no value depends on another frame's dtype.
    """

    def __init__(self, file: LocalParquet, schema: StructType, zone: str) -> None:
        self._file = file
        self._schema = schema
        self._zone = zone
        self._names = list(file.schema.names)
        self._pending: list[list[Any]] = []
        self._pending_rows = 0

    def add(self, frame: Any) -> None:
        """Takes a frame that a handler yielded. Raises: ProcessorError for what is no DataFrame or does not fit the schema."""
        if not isinstance(frame, pd.DataFrame):
            raise ProcessorError(
                f"the processor yielded a {type(frame).__name__}; with api='pandas' it must yield pandas.DataFrame"
            )
        if len(frame):
            # PySpark's worker converts a frame before it resumes the generator, which may then refill the frame.
            self._pending.append([*map(copy_of_column, self._columns(frame))])
            self._pending_rows += len(frame)

    def settle(self) -> None:
        """Does nothing: ``add`` has copied every frame."""

    @property
    def full(self) -> bool:
        """Whether a batch of rows waits."""
        return self._pending_rows >= _ROWS_PER_BATCH

    def _columns(self, frame: Any) -> list[Any]:
        if frame.columns.tolist() == self._names:
            columns = [frame._mgr.iget_values(at) for at in range(len(self._names))]
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
        """Writes what has been collected.

        Raises: ProcessorError, naming the column and the frame's first row, if a frame does not fit.
        """
        if self._pending:
            columns = zip(*self._pending, strict=True)
            arrays = [self._column(at, parts) for at, parts in enumerate(columns)]
            self._file.write(pa.Table.from_arrays(arrays, schema=self._file.schema))
            self._pending.clear()
            self._pending_rows = 0

    def _column(self, at: int, parts: tuple[Any, ...]) -> pa.Array | pa.ChunkedArray:
        if len({part.dtype for part in parts}) == 1 and isinstance(parts[0], np.ndarray):
            try:
                return self._converted(at, np.concatenate(parts))
            except ProcessorError:
                pass
        arrays = []
        for part, frame in zip(parts, self._pending, strict=True):
            try:
                arrays.append(self._converted(at, part))
            except ProcessorError as error:
                first = ", ".join(f"{name}={values[0]!r}" for name, values in zip(self._names, frame, strict=True))
                raise ProcessorError(f"{error}; the frame begins with ({first})") from error
        return pa.chunked_array(arrays, self._file.schema.field(at).type)

    def _converted(self, at: int, values: Any) -> pa.Array:
        field: pa.Field = self._file.schema.field(at)
        try:
            if isinstance(values, np.ndarray) and _alike(values.dtype, field.type):
                return column_of(field, values, from_pandas=True)
        except ProcessorError as error:
            return self._cast(at, values, error)
        return self._cast(at, values, None)

    def _cast(self, at: int, values: Any, why: ProcessorError | None) -> pa.Array:
        """The values with the casts that Spark's worker makes, by its own code; what would lose digits is refused."""
        field: pa.Field = self._file.schema.field(at)
        try:
            batch = PandasToArrowConversion.convert(
                [pd.Series(values)],
                StructType([self._schema[at]]),
                timezone=self._zone,
                # Of an instant, nanoseconds are dropped; of a number nothing.
                safecheck=not pa.types.is_timestamp(field.type),
                arrow_cast=True,
            )
        except (pa.ArrowException, PySparkException, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            text = str(error.__cause__ or error).splitlines()[0]
            raise why or ProcessorError(
                f"output column {field.name!r} is {field.type}, and a value does not fit: {text}"
            ) from error
        array = batch.column(0)
        return no_nulls_if_none_may_be(field, array if array.type == field.type else array.cast(field.type))


def _first(columns: pd.Series[Any] | pd.DataFrame) -> pd.Series[Any]:
    """Return the first column of a name that a frame has twice, as Spark does."""
    return columns.iloc[:, 0] if isinstance(columns, pd.DataFrame) else columns


def _values(column: pd.Series[Any]) -> Any:
    # `values` of instants with a zone are naive ones in UTC.
    return column.values if isinstance(column.dtype, np.dtype) else column.array


def _alike(dtype: np.dtype[Any], data_type: pa.DataType) -> bool:
    """True if Arrow alone makes of such values what Spark's worker makes of them. It does not of naive instants, nor of maps as
    dicts; and of NaN it makes an empty binary."""
    if pa.types.is_nested(data_type) or pa.types.is_temporal(data_type):
        return False
    number = pa.types.is_integer(data_type) or pa.types.is_floating(data_type) or pa.types.is_boolean(data_type)
    return dtype.kind == "O" or (number and dtype.kind in "iufb")
