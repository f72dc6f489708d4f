"""Rows as pandas DataFrames, for the pandas API: what handlers get, and what they yield.

A batch is converted once and sliced per key. Where a column of integers holds nulls, pandas has floats and NaN for it; a key
whose own rows have no null gets integers all the same, so that what a handler sees depends on its key's rows only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql.conversion import ArrowBatchTransformer
from pyspark.sql.types import StructType

from jobs.runtime.input_rows import Slices, SlicesOf
from jobs.runtime.output_file import LocalParquet
from jobs.runtime.output_rows import column_of
from state_backend.values.errors import ProcessorError


def frame_slices(schema: StructType) -> SlicesOf:
    """For the pandas API: one DataFrame with all columns per run of rows, its index from 0."""

    def slices_of(column: pa.StructArray) -> Slices:
        batch = pa.RecordBatch.from_arrays(column.flatten(), names=schema.names)
        series = ArrowBatchTransformer.to_pandas(batch, timezone="UTC", schema=schema)
        frame = pd.concat(series, axis=1)
        integers = {
            name: (values.is_valid().to_numpy(zero_copy_only=False), values.fill_null(0).to_numpy())
            for name, values in zip(schema.names, batch.columns, strict=True)
            if pa.types.is_integer(values.type) and values.null_count
        }

        def slices(start: int, end: int) -> Iterable[pd.DataFrame]:
            part = frame[start:end].copy()
            part.index = pd.RangeIndex(end - start)
            for name, (valid, exact) in integers.items():
                if valid[start:end].all():
                    part[name] = exact[start:end]
            return (part,)

        return slices

    return slices_of


_ROWS_PER_BATCH = 10_000


class OutputFrames:
    """Collects the DataFrames that a processor yields. Columns are matched by name if their labels are strings, else by
    position; a column that is not asked for is dropped.

    Frames are small and many, and to convert each for itself costs more than all that pandas does: so the values of many are
    put together first, where they have one dtype. Where not, one by one, so that no value depends on another frame's dtype.
    """

    def __init__(self, file: LocalParquet) -> None:
        self._file = file
        self._names = list(file.schema.names)
        self._pending: list[list[Any]] = []
        self._pending_rows = 0

    def add(self, frame: Any) -> None:
        if not isinstance(frame, pd.DataFrame):
            raise ProcessorError(
                f"the processor yielded a {type(frame).__name__}; with api='pandas' it must yield pandas.DataFrame"
            )
        if len(frame):
            self._pending.append(self._columns(frame))
            self._pending_rows += len(frame)

    @property
    def full(self) -> bool:
        return self._pending_rows >= _ROWS_PER_BATCH

    def _columns(self, frame: pd.DataFrame) -> list[Any]:
        try:
            return [frame[name].values for name in self._names]
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
        return [frame.iloc[:, at].values for at in range(len(self._names))]

    def flush(self) -> None:
        """Writes what has been collected. ProcessorError names the column, and the frame's first row, that do not fit."""
        if self._pending:
            columns = zip(*self._pending, strict=True)
            arrays = [self._column(field, parts) for field, parts in zip(self._file.schema, columns, strict=True)]
            self._file.write(pa.Table.from_arrays(arrays, schema=self._file.schema))
            self._pending.clear()
            self._pending_rows = 0

    def _column(self, field: pa.Field, parts: tuple[Any, ...]) -> pa.Array | pa.ChunkedArray:
        if len({part.dtype for part in parts}) == 1 and isinstance(parts[0], np.ndarray):
            try:
                return _converted(field, np.concatenate(parts))
            except ProcessorError:
                pass
        arrays = []
        for part, frame in zip(parts, self._pending, strict=True):
            try:
                arrays.append(_converted(field, part))
            except ProcessorError as error:
                first = ", ".join(f"{name}={values[0]!r}" for name, values in zip(self._names, frame, strict=True))
                raise ProcessorError(f"{error}; the frame begins with ({first})") from error
        return pa.chunked_array(arrays, field.type)


def _converted(field: pa.Field, values: Any) -> pa.Array:
    if isinstance(values, pd.Categorical):
        values = np.asarray(values)
    elif values.dtype == object and pa.types.is_nested(field.type):
        # NumPy arrays in cells: lists for Arrow.
        values = [v.tolist() if isinstance(v, np.ndarray) else v for v in values]
    return column_of(field, values, from_pandas=True)
