"""The StatefulProcessors that the benchmarks measure. Cairn and Spark run the same classes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pandas as pd
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import Row

INPUT_SCHEMA = "k bigint, v bigint"
TOTAL_SCHEMA = "n bigint, total bigint, last bigint"
TOTALS_SCHEMA = f"k bigint, {TOTAL_SCHEMA}"
APPENDS_SCHEMA = "k bigint, appended bigint, in_calls_ns bigint"


class RowTotals(StatefulProcessor):
    """Count, sum and last value of each key. Every call yields one row."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._total = handle.getValueState("total", TOTAL_SCHEMA)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        n, total, last = self._total.get() or (0, 0, None)
        for row in rows:
            n, total, last = n + 1, total + row.v, row.v
        self._total.update((n, total, last))
        yield Row(k=key[0], n=n, total=total, last=last)


class PandasTotals(StatefulProcessor):
    """Count, sum and last value of each key, over pandas frames. Every call yields one row."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._total = handle.getValueState("total", TOTAL_SCHEMA)

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        n, total, last = self._total.get() or (0, 0, None)
        for frame in rows:
            values = frame["v"]
            n, total, last = n + len(values), total + int(values.sum()), int(values.iloc[-1])
        self._total.update((n, total, last))
        yield pd.DataFrame({"k": [key[0]], "n": [n], "total": [total], "last": [last]})


class Appends(StatefulProcessor):
    """A list for each key, with one `appendValue` call for each input row.

    The output gives the nanoseconds that the calls took. The first rows of a key fill the key's list by one
    `appendList`, which is not timed.
    """

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._values = handle.getListState("values", "v bigint")
        self._loaded = handle.getValueState("loaded", "loaded boolean")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        values = [(row.v,) for row in rows]
        if not self._loaded.exists():
            self._loaded.update((True,))
            self._values.appendList(values)
            yield Row(k=key[0], appended=len(values), in_calls_ns=0)
            return
        append = self._values.appendValue
        started_ns = time.perf_counter_ns()
        for value in values:
            append(value)
        yield Row(k=key[0], appended=len(values), in_calls_ns=time.perf_counter_ns() - started_ns)
