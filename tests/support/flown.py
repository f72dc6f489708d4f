"""Flights of each aircraft with a timer, for the pandas and the Arrow API. The pipeline of the repository has the row API."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from cairn.arrow_processor import ArrowProcessor, BatchResult, KeyedBatch
from pipelines.aircraft import AIRCRAFT, IDLE_AFTER_MS

STATE = "flights long, miles double, last timestamp_ntz, due_ms long"
OUTPUT = "tailnum string, kind string, flights long, miles double, last timestamp_ntz"


class PandasFlown(StatefulProcessor):
    def init(self, handle: Any) -> None:
        self._handle = handle
        self._flown = handle.getValueState("flown", STATE)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[pd.DataFrame]:
        flights, miles, last, due_ms = self._flown.get() or (0, 0.0, None, None)
        for frame in rows:
            flights, miles = flights + len(frame), miles + float(frame["distance_miles"].sum())
            last = frame["scheduled_departure"].max().to_pydatetime()
        if due_ms is not None:
            self._handle.deleteTimer(due_ms)
        due_ms = timerValues.getCurrentProcessingTimeInMs() + IDLE_AFTER_MS
        self._handle.registerTimer(due_ms)
        self._flown.update((flights, miles, last, due_ms))
        yield pd.DataFrame(
            {"tailnum": [key[0]], "kind": ["flown"], "flights": [flights], "miles": [miles], "last": [last]}
        )

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[pd.DataFrame]:
        flights, miles, last, _ = self._flown.get()
        self._flown.update((flights, miles, last, None))
        yield pd.DataFrame(
            {"tailnum": [key[0]], "kind": ["idle"], "flights": [flights], "miles": [miles], "last": [last]}
        )


class ArrowFlown(ArrowProcessor):
    def init(self, handle: Any) -> None:
        self._handle = handle
        handle.getValueState("flown", STATE)

    def handleBatch(self, batch: KeyedBatch) -> BatchResult:
        offsets, old = np.asarray(batch.row_offsets), batch.states["flown"]
        starts = offsets[:-1]
        flights = np.diff(offsets) + pc.fill_null(old["flights"], 0).to_numpy()
        distances = pc.fill_null(batch.rows["distance_miles"], 0).to_numpy().astype(float)
        miles = np.add.reduceat(distances, starts) + pc.fill_null(old["miles"], 0.0).to_numpy()
        last = batch.rows["scheduled_departure"].take(pa.array(offsets[1:] - 1))
        due = [(n, ms) for n, ms in enumerate(old["due_ms"].to_pylist()) if ms is not None]
        if due:
            self._handle.deleteTimer([n for n, _ in due], [ms for _, ms in due])
        due_ms = batch.time.getCurrentProcessingTimeInMs() + IDLE_AFTER_MS
        self._handle.registerTimer([*range(len(flights))], due_ms)
        state = pa.table({"flights": flights, "miles": miles, "last": last, "due_ms": [due_ms] * len(flights)})
        return BatchResult(states={"flown": state}, output=_output(batch, "flown", state))

    def handleExpiredTimers(self, batch: KeyedBatch) -> BatchResult:
        old = batch.states["flown"]
        state = old.set_column(3, "due_ms", pa.nulls(len(old), pa.int64()))
        return BatchResult(states={"flown": state}, output=_output(batch, "idle", state))


def _output(batch: KeyedBatch, kind: str, state: pa.Table) -> pa.Table:
    kinds = pa.array([kind] * len(state))
    columns = {name: state[name] for name in ("flights", "miles", "last")}
    return pa.table({"tailnum": batch.keys["tailnum"], "kind": kinds, **columns})


# Rows of equal departure are ordered by their other columns, so `last` is that of the last row.
PANDAS_FLOWN = replace(AIRCRAFT, name="flown-pandas", processor=PandasFlown, output_schema=OUTPUT, api="pandas")
ARROW_FLOWN = replace(AIRCRAFT, name="flown-arrow", processor=ArrowFlown, output_schema=OUTPUT, api="arrow")
FLOWN = {"row": AIRCRAFT, "pandas": PANDAS_FLOWN, "arrow": ARROW_FLOWN}
