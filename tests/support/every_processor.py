"""Each ready-made processor, and a processor with timers in each form, over one input with event times."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from cairn import Pipeline
from cairn.aggregates import Count, Max
from cairn.arrow_processor import ArrowProcessor, BatchResult, KeyedBatch
from cairn.processors import (
    Deduplicate,
    Funnel,
    History,
    IntervalJoin,
    Latest,
    LookupJoin,
    SessionWindow,
    SlidingWindow,
    TopN,
    TumblingWindow,
)
from cairn.testing import PipelineTester

HOUR, HALF_HOUR_MS = timedelta(hours=1), 1_800_000
SCHEMA = "user string, kind string, at {}, seq int, gap bigint, page_name string, view_no int"
EVENT = {"time_mode": "event", "event_time": "at", "watermark": "interval", "watermark_delay": timedelta(minutes=90)}
_COUNTED = {"rows": Count(), "latest": Max("at")}
_SIDES = {"left": "page", "right": "view"}
TIMERS = "user string, rows int, due_ms bigint"

# Each ready-made processor with the settings of each case. The names of its settings that are lengths of time come with it.
READY_MADE: dict[str, tuple[type, dict[str, Any]]] = {
    "Deduplicate": (Deduplicate, {"horizon": 2 * HOUR}),
    "Deduplicate, last": (Deduplicate, {"horizon": 2 * HOUR, "keep": "last", "output_duplicates": True}),
    "Latest": (Latest, {"version": "at"}),
    "History": (History, {}),
    "TopN": (TopN, {"n": 2, "order": "at desc"}),
    "TumblingWindow": (TumblingWindow, {"size": HOUR, **_COUNTED}),
    "TumblingWindow, early": (TumblingWindow, {"size": 24 * HOUR, "offset": HOUR, "early": True, **_COUNTED}),
    "TumblingWindow, lateness": (TumblingWindow, {"size": HOUR, "allowed_lateness": HOUR, **_COUNTED}),
    "SlidingWindow": (SlidingWindow, {"size": 2 * HOUR, "slide": HOUR, **_COUNTED}),
    "SlidingWindow, early": (SlidingWindow, {"size": 2 * HOUR, "slide": HOUR, "early": True, **_COUNTED}),
    "SlidingWindow, lateness": (SlidingWindow, {"size": 2 * HOUR, "slide": HOUR, "allowed_lateness": HOUR, **_COUNTED}),
    "SessionWindow": (SessionWindow, {"gap": HOUR, **_COUNTED}),
    "SessionWindow, early": (SessionWindow, {"gap": HOUR, "early": True, **_COUNTED}),
    "SessionWindow, lateness": (SessionWindow, {"gap": HOUR, "allowed_lateness": HOUR, **_COUNTED}),
    "SessionWindow, column": (SessionWindow, {"gap": "gap", "early": True, **_COUNTED}),
    "Funnel": (Funnel, {"step": "kind", "steps": ("page", "view"), "within": 2 * HOUR}),
    "IntervalJoin": (IntervalJoin, {**_SIDES, "lower": -HOUR, "upper": HOUR, "how": "full"}),
    "LookupJoin": (LookupJoin, {"facts": "page", "table": "view"}),
}


def ms_of(at: datetime) -> int:
    """An event time as the watermark counts it: a wall time counts as if the zone were UTC."""
    return round((at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp() * 1000)


class RowTimers(StatefulProcessor):
    """Half an hour after a row, emits the number of rows so far and the time up to which timers fire."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.rows = handle.getValueState("rows", "n int")

    def add(self, times: list[datetime]) -> None:
        self.rows.update(((self.rows.get()[0] if self.rows.exists() else 0) + len(times),))
        for at in times:
            self.handle.registerTimer(ms_of(at) + HALF_HOUR_MS)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        self.add([row.at for row in rows])
        yield from ()

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        yield Row(user=key[0], rows=self.rows.get()[0], due_ms=timerValues.getCurrentWatermarkInMs())


class PandasTimers(RowTimers):
    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        self.add([at.to_pydatetime() for frame in rows for at in frame["at"]])
        yield from ()

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        yield pd.DataFrame([row.asDict() for row in super().handleExpiredTimer(key, timerValues, expiredTimerInfo)])


class ArrowTimers(ArrowProcessor):
    def init(self, handle: Any) -> None:
        self.handle = handle
        handle.getValueState("rows", "n int")

    def handleBatch(self, batch: KeyedBatch) -> BatchResult:
        before = np.where(batch.exists["rows"], batch.states["rows"]["n"].fill_null(0).to_numpy(), 0)
        total = pa.array(before + np.diff(batch.row_offsets), pa.int32())
        at = batch.rows["at"].combine_chunks().cast(pa.int64()).to_numpy()
        self.handle.registerTimer(batch.key_of_row, at // 1000 + HALF_HOUR_MS)
        return BatchResult(states={"rows": pa.table({"n": total})})

    def handleExpiredTimers(self, batch: KeyedBatch) -> BatchResult:
        timers = batch.rows.num_rows
        due = pa.array(np.full(timers, batch.time.getCurrentWatermarkInMs()), pa.int64())
        owners = pa.array(np.repeat(np.arange(batch.keys.num_rows), np.diff(batch.row_offsets)))
        table = pa.table({"rows": batch.states["rows"]["n"].take(owners), "due_ms": due})
        return BatchResult(
            output=pa.table({"user": batch.keys["user"].take(owners), **{n: table[n] for n in table.column_names}})
        )


FORMS: dict[str, tuple[str, type]] = {
    "row": ("row", RowTimers),
    "pandas": ("pandas", PandasTimers),
    "arrow": ("arrow", ArrowTimers),
}


def declared(
    case: str, start: datetime, settings: dict[str, Any] | None = None, source: Any = lambda *_: None, **pipeline: Any
) -> Pipeline:
    """The pipeline of a case of `READY_MADE` or `FORMS`."""
    if case in FORMS:
        api, processor = FORMS[case]
        pipeline["output_schema"] = TIMERS
    else:
        base, given = READY_MADE[case]
        api, processor = "arrow", type("Mine", (base,), {**given, **(settings or {})})
    told: dict[str, Any] = {**EVENT, "key": ["user"], "order_by": ["at", "seq"], **pipeline}
    return Pipeline(name="every", start=start, source=source, processor=processor, api=api, **told)  # type: ignore[arg-type]


def made_tester(
    case: str, start: datetime, of_time: str = "timestamp_ntz", settings: dict[str, Any] | None = None, **pipeline: Any
) -> PipelineTester:
    """A tester of a case over hours."""
    made = declared(case, start, settings, **pipeline)
    return PipelineTester(made, input_schema=SCHEMA.format(of_time), every=HOUR)


def row(at: datetime, seq: int, user: str = "ann", gap: int = 1800) -> tuple[Any, ...]:
    """A row of the input; rows of both kinds take turns."""
    page = seq % 2 == 0
    return (user, "page" if page else "view", at, seq, gap, f"p{seq}" if page else None, None if page else seq)
