"""Drives a vectorised processor without Spark and RocksDB: states in memory, rows in batches cut where a test says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import TimerValues
from pyspark.sql.types import StructType

from cairn.aggregates import ApproxDistinct, Count, First, Last, Max, Mean, Min, RunningAggregate, StdDev, Sum, Variance
from cairn.arrow_processor import ArrowProcessor, KeyedBatch
from cairn.spark_versions import from_arrow_schema, to_arrow_schema


class Handle:
    """What ``init`` sees."""

    def __init__(self, input_schema: StructType, key_schema: StructType) -> None:
        self.input_schema = input_schema
        self.key_schema = key_schema
        self.states: dict[str, pa.Schema] = {}
        self.ttl_ms: dict[str, int | None] = {}

    def getValueState(self, name: str, schema: StructType, ttlDurationMs: int | None = None) -> None:
        assert name not in self.states
        self.states[name] = to_arrow_schema(schema)
        self.ttl_ms[name] = ttlDurationMs


class ArrowDriver:
    """One processor over one input schema. ``stored``: by state name, by key the values, by field name."""

    def __init__(self, processor: ArrowProcessor, schema: pa.Schema, keys: Sequence[str]) -> None:
        spark = from_arrow_schema(schema)
        self.handle = Handle(spark, StructType([spark[key] for key in keys]))
        processor.init(self.handle)
        self.stored: dict[str, dict[tuple[Any, ...], dict[str, Any]]] = {name: {} for name in self.handle.states}
        self._processor = processor
        self._keys = list(keys)

    def run(self, rows: pa.Table, cuts: Sequence[int] = ()) -> pa.Table:
        """One interval. Rows must be sorted by key. A batch ends before each row that is in ``cuts``; a cut within a
        key moves to the key's end unless the processor splits keys. The output of all batches."""
        keys = list(zip(*(rows[key].to_pylist() for key in self._keys), strict=True))
        first = [at for at in range(len(keys)) if not at or keys[at] != keys[at - 1]]
        assert len({keys[at] for at in first}) == len(first), "rows are not sorted by key"
        inner = {at for at in cuts if 0 < at < len(keys)}
        if not self._processor.splits_keys:
            inner &= set(first)
        bounds = sorted({0, len(keys)} | inner)
        outputs = [self._call(rows, keys, first, begin, end) for begin, end in pairwise(bounds)]
        return pa.concat_tables([table for table in outputs if table is not None])

    def _call(self, rows: pa.Table, keys: list[Any], first: list[int], begin: int, end: int) -> pa.Table | None:
        starts = [begin, *(at for at in first if begin < at < end)]
        batch_keys = [keys[at] for at in starts]
        states = dict(self._states_of(batch_keys))
        batch = KeyedBatch(
            keys=rows.select(self._keys).take(starts),
            rows=rows.slice(begin, end - begin),
            row_offsets=np.array([*starts, end], np.int64) - begin,
            states=states,
            exists={name: np.array([key in self.stored[name] for key in batch_keys]) for name in states},
            time=TimerValues(0, 0),
            last_key_continues=end < len(keys) and keys[end - 1] == keys[end],
        )
        result = self._processor.handleBatch(batch)
        for name, table in result.states.items():
            declared = self.handle.states[name]
            assert sorted(table.column_names) == sorted(declared.names)
            ordered = table.select(declared.names)
            assert ordered.schema.types == declared.types
            ordered.validate(full=True)
            self.stored[name] |= zip(batch_keys, ordered.to_pylist(), strict=True)
        if result.output is not None:
            result.output.validate(full=True)
        return result.output

    def _states_of(self, keys: list[Any]) -> Iterator[tuple[str, pa.Table]]:
        for name, schema in self.handle.states.items():
            nothing = dict.fromkeys(schema.names)
            yield name, pa.Table.from_pylist([self.stored[name].get(key, nothing) for key in keys], schema)


TYPES = {
    "flag": pa.bool_(),
    "tiny": pa.int8(),
    "small": pa.int16(),
    "whole": pa.int32(),
    "big": pa.int64(),
    "single": pa.float32(),
    "double": pa.float64(),
    "price": pa.decimal128(9, 2),
    "wide": pa.decimal128(38, 10),
    "text": pa.string(),
    "raw": pa.binary(),
    "day": pa.date32(),
    "instant": pa.timestamp("us", "UTC"),
    "local": pa.timestamp("us"),
}
SCHEMA = pa.schema([("origin", pa.string()), ("flight", pa.int64()), *TYPES.items()])
KEYS = ["origin", "flight"]
NUMBERS = ("tiny", "small", "whole", "big", "single", "double", "price", "wide")
EVERYTHING: dict[str, Any] = {"rows": Count()}
for _column in TYPES:
    for _kind in (Count, Min, Max, First, Last, ApproxDistinct):
        EVERYTHING[f"{_kind.__name__}_{_column}"] = _kind(_column)
    for _kind in (First, Last):
        EVERYTHING[f"Some{_kind.__name__}_{_column}"] = _kind(_column, ignore_nulls=True)
for _column in NUMBERS:
    for _kind in (Sum, Mean, Variance, StdDev):
        EVERYTHING[f"{_kind.__name__}_{_column}"] = _kind(_column)
Everything = type("Everything", (RunningAggregate,), EVERYTHING)
