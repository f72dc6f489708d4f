"""A test pipeline keyed by account, in the forms row, pandas and arrow.

Its state has values, lists, maps and timers, and some rows are late: `cairn key --history` and `cairn replay` are tested with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from cairn.arrow_processor import ArrowProcessor, BatchResult, KeyedBatch
from cairn.pipeline import Interval, Pipeline
from state_backend.adapters.local_storage import LocalStorage
from tests.support.checkpoints import DAY, START

IDLE_MS = 2 * 86_400_000
SCHEMA = "account string, amount long, at timestamp"
OUTPUT = "account string, kind string, balance long, rows long"


def at(n: int, hour: int = 12) -> datetime:
    return START + (n - 1) * DAY + timedelta(hours=hour)


class Accounts(StatefulProcessor):
    """Adds up the amounts of an account. A timer two days after its last row closes it."""

    def init(self, handle: Any) -> None:
        self._handle = handle
        self._balance = handle.getValueState("balance", "total long, due_ms long")
        self._amounts = handle.getListState("amounts", "amount long")
        self._days = handle.getMapState("days", "day date", "rows long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        total, due_ms = self._balance.get() or (0, None)
        count = 0
        for row in rows:
            total, count = total + row.amount, count + 1
            self._amounts.appendValue((row.amount,))
            day = (row.at.date(),)
            seen = self._days.getValue(day)
            self._days.updateValue(day, ((seen.rows if seen is not None else 0) + 1,))
        if due_ms is not None:
            self._handle.deleteTimer(due_ms)
        due_ms = timerValues.getCurrentProcessingTimeInMs() + IDLE_MS
        self._handle.registerTimer(due_ms)
        self._balance.update((total, due_ms))
        yield Row(account=key[0], kind="row", balance=total, rows=count)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        total, _ = self._balance.get()
        self._amounts.clear()
        self._balance.update((total, None))
        yield Row(account=key.account, kind="idle", balance=total, rows=0)


class Broken(Accounts):
    """Forgets to add the first amount of a day with several rows."""

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        every = list(rows)
        yield from super().handleInputRows(key, iter(every[1:] if len(every) > 1 else every), timerValues)


class Random(Accounts):
    """Depends on the process's clock."""

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        import time

        for row in super().handleInputRows(key, rows, timerValues):
            yield Row(account=row.account, kind=f"row {time.monotonic_ns()}", balance=row.balance, rows=row.rows)


class PandasAccounts(StatefulProcessor):
    def init(self, handle: Any) -> None:
        self._handle = handle
        self._balance = handle.getValueState("balance", "total long, due_ms long")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[pd.DataFrame]:
        total, due_ms = self._balance.get() or (0, None)
        count = 0
        for frame in rows:
            total, count = total + int(frame["amount"].sum()), count + len(frame)
        if due_ms is not None:
            self._handle.deleteTimer(due_ms)
        due_ms = timerValues.getCurrentProcessingTimeInMs() + IDLE_MS
        self._handle.registerTimer(due_ms)
        self._balance.update((total, due_ms))
        yield pd.DataFrame({"account": [key[0]], "kind": ["row"], "balance": [total], "rows": [count]})

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[pd.DataFrame]:
        total, _ = self._balance.get()
        self._balance.update((total, None))
        yield pd.DataFrame({"account": [key[0]], "kind": ["idle"], "balance": [total], "rows": [0]})


class ArrowAccounts(ArrowProcessor):
    def init(self, handle: Any) -> None:
        self._handle = handle
        handle.getValueState("balance", "total long, due_ms long")

    def handleBatch(self, batch: KeyedBatch) -> BatchResult:
        offsets = np.asarray(batch.row_offsets)
        amounts = batch.rows["amount"].to_numpy()
        old = batch.states["balance"]
        totals = np.add.reduceat(amounts, offsets[:-1]) + np.nan_to_num(old["total"].to_numpy()).astype(np.int64)
        due = [(n, ms) for n, ms in enumerate(old["due_ms"].to_pylist()) if ms is not None]
        if due:
            self._handle.deleteTimer([n for n, _ in due], [ms for _, ms in due])
        due_ms = batch.time.getCurrentProcessingTimeInMs() + IDLE_MS
        self._handle.registerTimer([*range(len(totals))], due_ms)
        state = pa.table(
            {"total": pa.array(totals, pa.int64()), "due_ms": pa.array([due_ms] * len(totals), pa.int64())}
        )
        return BatchResult(states={"balance": state}, output=self._output(batch, "row", totals, np.diff(offsets)))

    def handleExpiredTimers(self, batch: KeyedBatch) -> BatchResult:
        totals = batch.states["balance"]["total"]
        nothing = pa.array([None] * len(totals), pa.int64())
        state = pa.table({"total": totals, "due_ms": nothing})
        return BatchResult(states={"balance": state}, output=self._output(batch, "idle", totals, [0] * len(totals)))

    def _output(self, batch: KeyedBatch, kind: str, totals: Any, rows: Any) -> pa.Table:
        return pa.table(
            {
                "account": batch.keys["account"],
                "kind": pa.array([kind] * len(batch.keys)),
                "balance": totals if isinstance(totals, pa.ChunkedArray) else pa.array(totals, pa.int64()),
                "rows": pa.array(rows, pa.int64()),
            }
        )


PROCESSORS = {"row": Accounts, "pandas": PandasAccounts, "arrow": ArrowAccounts}


def no_source(spark: Any, interval: Interval) -> Any:
    raise AssertionError("the tester gives the rows")


def accounts(api: Any = "row", **settings: Any) -> Pipeline:
    given: dict[str, Any] = {
        "name": "accounts",
        "start": START,
        "source": no_source,
        "key": ["account"],
        "processor": PROCESSORS[api],
        "output_schema": OUTPUT,
        "api": api,
        "schedule": DAY,
        "parallelism": 2,
        "max_parallelism": 16,
        "order_by": ["at"],
    }
    return Pipeline(**{**given, **settings})


# Rows of five days. Carl has rows on day 1 only, so his timer fires on day 3, which has no rows of his.
DAYS: dict[int, list[tuple[str, int, datetime]]] = {
    1: [("ann", 5, at(1)), ("bob", 7, at(1)), ("carl", 1, at(1))],
    2: [("ann", 10, at(2, 9)), ("ann", 1, at(2, 8))],
    3: [("bob", 1, at(3))],
    4: [("ann", 2, at(4))],
    5: [],
}


def days_of(interval: Interval) -> list[tuple[str, int, datetime]]:
    return DAYS[(interval.start - START) // DAY + 1]


def position_of(interval: Interval) -> dict[str, Any]:
    return {"day": f"{interval.start:%Y-%m-%d}"}


def read_days(spark: Any, interval: Interval) -> Any:
    """A source that needs no Spark."""
    return spark.createDataFrame(days_of(interval), SCHEMA), position_of(interval)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Within the block, each call of this process that writes to a storage fails; after it, every folder and byte is as before."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a reader writes below the root")

    before = _listing(folder)
    methods = ("create", "replace", "upload", "copy_from", "delete", "delete_many", "keep_room", "free_room")
    with mock.patch.multiple(LocalStorage, **dict.fromkeys(methods, refuse)):
        yield
    assert _listing(folder) == before


def _listing(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}
