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
            part = frame.iloc[start:end].reset_index(drop=True)
            for name, (valid, exact) in integers.items():
                if valid[start:end].all():
                    part[name] = exact[start:end]
            return (part,)

        return slices

    return slices_of


_ROWS_PER_BATCH = 10_000


class OutputFrames:
    """Collects the DataFrames that a processor yields. Columns are matched by name if their labels are strings, else by
    position; a column that is not asked for is dropped."""

    def __init__(self, file: LocalParquet) -> None:
        self._file = file
        self._names = list(file.schema.names)
        self._pending: list[pa.RecordBatch] = []
        self._pending_rows = 0

    def add(self, frame: Any) -> None:
        if not isinstance(frame, pd.DataFrame):
            raise ProcessorError(
                f"the processor yielded a {type(frame).__name__}; with api='pandas' it must yield pandas.DataFrame"
            )
        if not len(frame):
            return
        columns = [
            column_of(f, s, from_pandas=True) for f, s in zip(self._file.schema, self._series(frame), strict=True)
        ]
        self._pending.append(pa.RecordBatch.from_arrays(columns, schema=self._file.schema))
        self._pending_rows += len(frame)

    @property
    def full(self) -> bool:
        return self._pending_rows >= _ROWS_PER_BATCH

    def _series(self, frame: pd.DataFrame) -> list[Any]:
        labels = list(frame.columns)
        if any(isinstance(label, str) for label in labels):
            missing = [name for name in self._names if name not in labels]
            if missing:
                raise ProcessorError(
                    f"the yielded DataFrame lacks the output column{'s' * (len(missing) > 1)} {', '.join(missing)}; it has "
                    f"{', '.join(map(str, labels))}"
                )
            return [_plain(frame[name]) for name in self._names]
        if len(labels) < len(self._names):
            raise ProcessorError(
                f"the yielded DataFrame has {len(labels)} columns without names; the output has {len(self._names)}: "
                f"{', '.join(self._names)}"
            )
        return [_plain(frame.iloc[:, at]) for at in range(len(self._names))]

    def flush(self) -> None:
        """Writes what has been collected."""
        if self._pending:
            self._file.write(pa.Table.from_batches(self._pending).combine_chunks())
            self._pending.clear()
            self._pending_rows = 0


def _plain(series: Any) -> Any:
    if isinstance(series.dtype, pd.CategoricalDtype):
        return series.astype(series.dtype.categories.dtype)
    # NumPy arrays in cells: lists for Arrow.
    if series.dtype == object:
        return [v.tolist() if isinstance(v, np.ndarray) else v for v in series]
    return series
