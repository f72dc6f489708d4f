"""Let Great Expectations evaluate Arrow tables, with the conditions of `arrow_conditions`.

Great Expectations gets a table as a pandas DataFrame whose columns are the Arrow columns, and computes with
`ArrowEngine`. This engine is the pandas engine with other conditions. Great Expectations looks a condition up by the
name of the engine's class, so the pandas engine itself keeps its conditions.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from great_expectations.core.batch import BatchMarkers
from great_expectations.execution_engine import PandasExecutionEngine
from great_expectations.execution_engine.pandas_batch_data import PandasBatchData
from great_expectations.expectations.metrics.map_metric_provider import (
    ColumnMapMetricProvider,
    ColumnPairMapMetricProvider,
    column_condition_partial,
    column_pair_condition_partial,
)

from cairn.operations.validation import arrow_conditions as conditions
from cairn.operations.validation.checks import MOST_KEYS, FailingRows, FailingStore
from cairn.operations.validation.expectation_suites import metric_value
from cairn.operations.validation.row_json import row_json
from state_backend.adapters.open_storage import open_storage
from state_backend.adapters.work_folders import work_folder
from state_backend.values.frozen import frozen


@frozen
class ArrowRows(FailingStore):
    zone: str

    def source(self, context: Any) -> Any:
        source = context.data_sources.add_pandas("state_in_memory")
        source.get_execution_engine()  # This call makes and keeps an engine. The next line replaces that engine.
        source._execution_engine = ArrowEngine()
        return source

    def frame(self, table: pa.Table) -> pd.DataFrame:
        frame: pd.DataFrame = table.to_pandas(types_mapper=pd.ArrowDtype)
        return frame

    def failing(self, batch: Any, expectation: Any, metric: str, identity: Sequence[str]) -> FailingRows:
        fails, _, _ = metric_value(batch, expectation, f"{metric}.condition")
        rows = pa.Table.from_pandas(batch.data.dataframe.loc[fails.index[fails]], preserve_index=False)
        texts = row_json(rows, identity, self.zone)
        first = pc.select_k_unstable(texts, MOST_KEYS, [("", "ascending")])

        def store(root: str, folder: str) -> int:
            with work_folder("failing") as work:
                pq.write_table(rows, work / "rows.parquet")
                open_storage(root).upload(f"{folder}{uuid.uuid4()}.parquet", work / "rows.parquet")
            return int(rows.num_rows)

        return self.keep(texts.take(first).to_pylist(), lambda: int(rows.num_rows), store)


class ArrowEngine(PandasExecutionEngine):  # type: ignore[misc]  # Great Expectations is not type-checked here.
    """Great Expectations' pandas engine, except that Arrow evaluates the conditions on rows (see `_evaluate`)."""

    def get_batch_data_and_markers(self, batch_spec: Any) -> tuple[Any, Any]:
        """Return a batch without the fingerprint that Great Expectations computes.

        The fingerprint is a hash of all values, and appears on no page. It takes longer than all expectations.
        """
        frame, batch_spec.batch_data = batch_spec.batch_data, "PandasDataFrame"
        markers = BatchMarkers({"ge_load_time": f"{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}"})
        return PandasBatchData(execution_engine=self, dataframe=frame), markers


def _array(column: Any) -> pa.Array:
    array = pa.array(column.array)
    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array


def _series(mask: conditions.Mask, column: Any) -> Any:
    return pd.Series(np.asarray(mask, np.bool_), index=column.index)


def _evaluate(name: str, keys: tuple[str, ...], mask: Callable[..., conditions.Mask]) -> None:
    """Let Great Expectations evaluate the condition `name` by `mask`, which gets a column and the arguments `keys`."""

    class _Condition(ColumnMapMetricProvider):  # type: ignore[misc]
        condition_metric_name = name
        condition_value_keys = keys

        @column_condition_partial(engine=ArrowEngine)
        def met(cls, column, **given):  # type: ignore[no-untyped-def]  # noqa: N805
            return _series(mask(_array(column), *map(given.get, keys)), column)


def _evaluate_pair(name: str, keys: tuple[str, ...], mask: Callable[..., conditions.Mask]) -> None:
    class _Condition(ColumnPairMapMetricProvider):  # type: ignore[misc]
        condition_metric_name = name
        condition_domain_keys = (
            *("batch_id", "table", "column_A", "column_B"),
            *("row_condition", "condition_parser", "ignore_row_if"),
        )
        condition_value_keys = keys

        @column_pair_condition_partial(engine=ArrowEngine)
        def met(cls, column_A, column_B, **given):  # type: ignore[no-untyped-def]  # noqa: N805
            return _series(mask(_array(column_A), _array(column_B), *map(given.get, keys)), column_A)


_evaluate(
    "column_values.between",
    ("min_value", "max_value", "strict_min", "strict_max"),
    lambda column, low, high, strict_low, strict_high: conditions.between(
        column, low, high, strict_low=bool(strict_low), strict_high=bool(strict_high)
    ),
)
_evaluate("column_values.in_set", ("value_set",), lambda column, values: conditions.in_set(column, list(values)))
_evaluate("column_values.not_in_set", ("value_set",), lambda column, values: ~conditions.in_set(column, list(values)))
_evaluate("column_values.unique", (), conditions.unique)
_evaluate_pair("column_pair_values.equal", (), conditions.equal)
_evaluate_pair(
    "column_pair_values.a_greater_than_b",
    ("or_equal",),
    lambda first, second, or_equal: conditions.greater(first, second, or_equal=bool(or_equal)),
)
