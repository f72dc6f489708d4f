"""The vectorised API (``api="arrow"``): the rows of many keys and their state as Arrow tables, new state and output as
Arrow tables.

A processor subclasses ``ArrowProcessor``. It sees batches of whole keys, in order of key group and key:

    class Totals(ArrowProcessor):
        def init(self, handle):
            handle.getValueState("total", "amount bigint")

        def handleBatch(self, batch):
            new = numpy.add.reduceat(batch.rows["amount"].to_numpy(), batch.row_offsets[:-1])
            old = batch.states["total"]["amount"].fill_null(0).to_numpy()
            total = pa.table({"amount": old + new})
            return BatchResult(states={"total": total}, output=with_keys(batch, total))

Value states come and go with the batch. Lists, maps and timers are asked and told, for many keys at once:

    def init(self, handle):
        self.handle = handle
        self.visits = handle.getListState("visits", "at timestamp, page string")

    def handleBatch(self, batch):
        self.visits.appendList(batch.key_of_row, batch.rows.select(["at", "page"]))
        self.handle.registerTimer(np.arange(len(batch.keys)), batch.time.getCurrentProcessingTimeInMs() + 1_800_000)
        return BatchResult()

    def handleExpiredTimers(self, batch):
        visits = self.visits.get()
        self.visits.clear()
        return BatchResult(output=with_keys(batch, pa.table({"visits": np.diff(visits.offsets)})))

``cairn.processors.arrow_states`` says what they can do. State, its bytes and its expiry are those of the row API: a pipeline may change from one
API to the other between two intervals.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import TimerValues

__all__ = ["ArrowProcessor", "BatchResult", "KeyedBatch", "with_keys"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedBatch:
    """The input of one call.

    keys: the key columns, one row per key, ascending by key group and key.
    rows: all input columns, sorted as the keys are and within a key by ``order_by``, then by all other columns.
    row_offsets: int64, one more than there are keys; key i has the rows ``row_offsets[i] .. row_offsets[i+1]-1``.
    states: by state name, one row per key; all columns null where a key has no state.
    exists: by state name, one bool per key. Tells no state from a state of nulls.
    time: processing time and watermark in ms, as ``TimerValues`` gives them.
    last_key_continues: more rows of the last key come with the next call. Only for a class with ``splits_keys``.
    """

    keys: pa.Table
    rows: pa.Table
    row_offsets: npt.NDArray[np.int64]
    states: Mapping[str, pa.Table]
    exists: Mapping[str, npt.NDArray[np.bool_]]
    time: TimerValues
    last_key_continues: bool = False

    @property
    def key_of_row(self) -> npt.NDArray[np.int64]:
        """By row the position of its key in ``keys``."""
        return np.repeat(np.arange(len(self.keys)), np.diff(self.row_offsets))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """The result of one call.

    states: by state name, the new state of every key of the batch, with the columns that were declared, matched by name.
        A state that is left out stays as it is.
    cleared: by state name, True for keys whose state is removed; their rows in ``states`` are not looked at.
    output: rows with the columns of the output schema, matched by name; any number of rows.
    """

    states: Mapping[str, pa.Table] = field(default_factory=dict)
    cleared: Mapping[str, npt.NDArray[np.bool_]] = field(default_factory=dict)
    output: pa.Table | None = None


class ArrowProcessor(ABC):
    """A processor that works on many keys at a time.

    ``splits_keys``: False: a batch holds all rows of each of its keys, however many a key has. True: the rows of the last key
    may go on in the next call, which sees the state that this call returned; so memory stays bounded also for a hot key.
    """

    splits_keys = False

    @abstractmethod
    def init(self, handle: Any) -> None:
        """Declares states: ``handle.getValueState(name, schema, ttlDurationMs=None)``, ``getListState`` likewise,
        ``getMapState(name, userKeySchema, valueSchema, ttlDurationMs=None)``. ``handle.input_schema`` and
        ``handle.key_schema`` are the Spark schemas of what ``rows`` and ``keys`` will hold. Runs on the driver and again in
        every shard task; must declare the same each time.

        Kept, the handle takes timers, in milliseconds since the epoch: ``registerTimer(keys, expiries)``,
        ``deleteTimer(keys, expiries)``, ``listTimers(keys=None)``."""

    @abstractmethod
    def handleBatch(self, batch: KeyedBatch) -> BatchResult:
        """New state and output for the keys of a batch."""

    def handleExpiredTimers(self, batch: KeyedBatch) -> BatchResult:
        """New state and output for keys with timers whose time has come; they are deleted afterwards. ``rows`` has one column,
        ``expiry_ms``, ascending within a key. A key comes once in an interval, with all of its due timers; the batches ascend by
        key group and key. A timer that is registered meanwhile fires in the next interval at the earliest. ``time`` has the time
        up to which timers fire."""
        return BatchResult()

    def close(self) -> None:  # noqa: B027
        """After the last batch of a shard; also on the driver, after ``init``."""


def with_keys(batch: KeyedBatch, columns: pa.Table) -> pa.Table:
    """The batch's key columns, then ``columns``: one row per key."""
    names = [*batch.keys.column_names, *columns.column_names]
    return pa.table([*batch.keys.columns, *columns.columns], names=names)
