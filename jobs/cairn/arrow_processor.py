"""The Arrow interface for processors (`api="arrow"`): rows, state and output of many keys as Arrow tables.

A processor subclasses `ArrowProcessor`. Each call gets a batch of whole keys, ordered by key group and key:

    class Totals(ArrowProcessor):
        def init(self, handle):
            handle.getValueState("total", "amount bigint")

        def handleBatch(self, batch):
            new = numpy.add.reduceat(batch.rows["amount"].to_numpy(), batch.row_offsets[:-1])
            old = batch.states["total"]["amount"].fill_null(0).to_numpy()
            total = pa.table({"amount": old + new})
            return BatchResult(states={"total": total}, output=with_keys(batch, total))

Value states arrive in the batch, and leave in the result. Lists, maps and timers are objects; each of their methods
serves many keys in one call:

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

`cairn.runners.arrow_states` documents these methods. State has the same bytes and expiry as in the row interface. So
a pipeline may change from one interface to the other between two intervals.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import TimerValues

__all__ = ["ArrowProcessor", "BatchResult", "KeyedBatch", "with_keys"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedBatch:
    """Input of one call of an `ArrowProcessor`.

    Attributes:
        keys: The key columns, one row per key, ascending by key group and key.
        rows: All input columns. The keys are in the order of `keys`. Rows of a key are sorted by `order_by`, then by
            all other columns.
        row_offsets: int64, with one element more than `keys` has rows. Key i has the rows `row_offsets[i]` to
            `row_offsets[i + 1] - 1`.
        states: The value states by name, one row per key. All columns are null for a key without state.
        exists: For each value state, True for each key that has state. A state whose fields are all null exists too.
        time: Processing time and watermark in milliseconds since the epoch.
        last_key_continues: True if the next call brings more rows of the last key. Always False without
            `ArrowProcessor.splits_keys`.
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
        """For each row, the position of its key in `keys`."""
        return np.repeat(np.arange(len(self.keys)), np.diff(self.row_offsets))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """Result of one call of an `ArrowProcessor`.

    Attributes:
        states: By state name, the new state of every key of the batch. Columns are matched by name. A state that is
            left out does not change.
        cleared: By state name, True for each key whose state is deleted. The rows of these keys in `states` are
            ignored.
        output: Any number of rows with the columns of the output schema, matched by name. None means no rows.
    """

    states: Mapping[str, pa.Table] = field(default_factory=dict)
    cleared: Mapping[str, npt.NDArray[np.bool_]] = field(default_factory=dict)
    output: pa.Table | None = None


class ArrowProcessor(ABC):
    """Base class of processors that work on many keys at a time.

    Attributes:
        splits_keys: False gives all rows of a key in one batch. True lets the rows of a batch's last key continue in
            the next call, which sees the state that this call returned. So a key with very many rows does not exhaust
            the memory.
    """

    splits_keys = False
    # True: the class's settings and the input decide the fields of the states, so a field may go with its setting or
    # column. False: the author of the class names the fields, so a field that goes may be a mistake.
    _states_follow_settings = False

    @abstractmethod
    def init(self, handle: Any) -> None:
        """Declare the states.

        Cairn calls this method on the driver and again in every shard's task. Each call must declare the same states.

        A processor that keeps the handle can set timers, with times in milliseconds since the epoch:
        `handle.registerTimer(keys, expiries)`, `handle.deleteTimer(keys, expiries)` and `handle.listTimers(keys=None)`.

        Args:
            handle: Declares states by `getValueState(name, schema, ttlDurationMs=None)`, `getListState(name, schema,
                ttlDurationMs=None)` and `getMapState(name, userKeySchema, valueSchema, ttlDurationMs=None)`.
                `handle.input_schema` and `handle.key_schema` are the Spark schemas of the batches' `rows` and `keys`.
                `handle.time_mode` is the pipeline's time mode, and `handle.event_time` the name of the event-time
                column; None in other time modes than "event".
        """

    def deriveOutputSchema(self, handle: Any) -> Any:
        """Return the Spark schema of the output, for a pipeline without `output_schema`.

        Cairn calls this method on the driver. A subclass that knows its output columns overrides it.

        Args:
            handle: The handle has the attributes `input_schema`, `key_schema` and `event_time`, as in `init`.

        Returns:
            A `StructType`; None if the pipeline must declare `output_schema`.
        """
        return None

    def _spell_columns(self, names: Sequence[str]) -> None:  # noqa: B027
        # Cairn calls this before `init` and `deriveOutputSchema` if Spark ignores case in column names. A ready-made
        # processor then spells the columns in its settings as the input spells them.
        pass

    def _counts_until(self, times: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        # Returns for each event time the watermark from which on such a row is late, both in microseconds. A processor
        # of windows returns the end of the row's window.
        return times

    @abstractmethod
    def handleBatch(self, batch: KeyedBatch) -> BatchResult:
        """Process the rows of a batch of keys.

        Args:
            batch: Keys, their rows and their value states.

        Returns:
            New value states and output rows.
        """

    def handleExpiredTimers(self, batch: KeyedBatch) -> BatchResult:
        """Process keys whose timers are due. Cairn deletes these timers after the call.

        An interval brings each key at most once, with all of its due timers. Batches ascend by key group and key. A
        timer that this call registers fires in the next interval at the earliest.

        Args:
            batch: The keys and their value states. `rows` has one column, `expiry_ms`, ascending within a key. `time`
                holds the time up to which timers fire.

        Returns:
            New value states and output rows. The default implementation returns an empty result.
        """
        return BatchResult()

    def close(self) -> None:  # noqa: B027
        """Release resources. Cairn calls this after a shard's last batch, and on the driver after `init`."""


def with_keys(batch: KeyedBatch, columns: pa.Table) -> pa.Table:
    """Join the batch's key columns and `columns` to one table with one row per key.

    Args:
        batch: The batch whose keys come first.
        columns: Columns with one row for each key of the batch.
    """
    names = [*batch.keys.column_names, *columns.column_names]
    return pa.table([*batch.keys.columns, *columns.columns], names=names)
