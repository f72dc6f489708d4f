"""A ready-made processor that keeps the newest row of each key: a slowly changing dimension of type 1."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from pyspark.sql.types import StructType

from cairn.aggregates.state_fields import nullable
from cairn.arrow_processor import BatchResult, KeyedBatch, with_keys
from cairn.numpy_columns import Bools, Int64s, booleans, same_values, whole
from cairn.processors.ordering import OrderColumn, check_order, order_codes, order_columns
from cairn.processors.ready_made import (
    ReadyMade,
    check_deleted,
    check_deleted_column,
    check_span,
    fields_beside_key,
    with_deleted,
    with_settings,
)
from state_backend.values.errors import UsageError

STATE = "latest"
_MILLISECOND = timedelta(milliseconds=1)


class Latest(ReadyMade):
    """Processor that emits the newest row of each key, and keeps it as state.

    In each interval, the output has one row for each key whose newest row at the interval's end differs from the one at
    its start. A row that is sent again unchanged is not emitted again. A sink that replaces the row of the key, such as
    a MERGE, keeps a table of the newest rows. The state `latest` is this table too.

    Rows come interval by interval, and within an interval in the order of `order_by`. A row replaces the newest row
    unless its `version` is smaller. So out-of-order rows change nothing.

    A deleted key has one output row too: the columns of key, `version` and `deleted`. All other columns are null. The
    state keeps these columns. So an older row that comes later does not bring the key back.

    Attributes:
        version: One or more columns whose values order the rows, such as "updated_at" or ("day", "number"). Nulls are
            the smallest values. None: each row is newer than the rows before.
        deleted: A boolean column; True in it deletes the key. None: no row deletes.
        horizon: Length of time that a deleted key stays in the state after the end of its interval. Needed with
            `deleted`; None keeps deleted keys for ever.

    Example:
        class Customers(Latest):
            version = "updated_at"
            deleted = "is_deleted"
            horizon = timedelta(days=30)
    """

    settings: ClassVar[tuple[str, ...]] = ("version", "deleted", "horizon")
    column_settings: ClassVar[tuple[str, ...]] = ("version", "deleted")
    version: str | tuple[str, ...] | None = None
    deleted: str | None = None
    horizon: timedelta | None

    @classmethod
    def check_settings(cls) -> None:
        for column in _version(cls.__name__, cls.version):
            if column.descending:
                raise UsageError(
                    f"{cls.__name__}.version has a descending column {column.name!r}; a larger version is newer, so leave out desc"
                )
        check_deleted(cls)
        if cls.deleted is not None:
            check_span(cls, "horizon", "keep deleted keys for ever")
        elif getattr(cls, "horizon", None) is not None:
            raise UsageError(
                f'{cls.__name__}.horizon is set without deleted; it says how long a deleted key is remembered, so name the column: deleted = "is_deleted"'
            )

    def init(self, handle: Any) -> None:
        self.check_settings()
        owner = type(self).__name__
        self._handle = handle
        # (row, exists) of a key whose rows continue in the next batch: its stored row from before the interval, if any.
        self._begun: tuple[pa.Table, bool] | None = None
        self._columns = _version(owner, self.version)
        check_order(owner, "version", self._columns, handle)
        if self.deleted is not None:
            check_deleted_column(self, handle)
            if self.horizon is not None and handle.time_mode == "none":
                raise UsageError(
                    f"{owner}.horizon needs a clock; declare the pipeline with time_mode='processing' or 'event'"
                )
        row = fields_beside_key(handle)
        if not row:
            raise UsageError(
                f"{owner}: all columns of the input are in the key, and no column is left that could change; take columns out of the key"
            )
        handle.getValueState(
            STATE,
            StructType(
                with_settings(
                    {"version": f"version = {', '.join(c.name for c in self._columns) or None}"},
                    with_deleted(self.deleted, row),
                )
            ),
        )

    def deriveOutputSchema(self, handle: Any) -> StructType:
        return StructType(nullable(handle.input_schema))

    def handleBatch(self, batch: KeyedBatch) -> BatchResult:
        keys, old = batch.keys.num_rows, batch.states[STATE]
        newest, replaces = self._newest(batch)
        places = np.where(replaces, keys + newest, np.arange(keys))
        was_deleted = is_deleted = None
        if self.deleted:
            was_deleted = booleans(old[self.deleted])
            is_deleted = np.concatenate([was_deleted, booleans(batch.rows[self.deleted])])[places]
        kept = {column.name for column in self._columns} | {self.deleted}
        new = {}
        for name in old.column_names:
            before = whole(old[name])
            values = pa.concat_arrays([before, whole(batch.rows[name]).cast(before.type)])
            empty = is_deleted if name not in kept else None
            new[name] = values.take(pa.array(places, mask=empty))
        if was_deleted is not None and is_deleted is not None and self.horizon is not None:
            self._move_timers(batch, replaces, was_deleted, is_deleted)
        state = pa.table(new)
        return BatchResult(states={STATE: state}, output=self._output(batch, state))

    def handleExpiredTimers(self, batch: KeyedBatch) -> BatchResult:
        if self.deleted is None or self.horizon is None:
            return BatchResult()
        return BatchResult(cleared={STATE: booleans(batch.states[STATE][self.deleted])})

    def _newest(self, batch: KeyedBatch) -> tuple[Int64s, Bools]:
        """Return (newest, replaces): the position of each key's newest row, and True if it replaces the stored row."""
        starts = batch.row_offsets[:-1]
        if not self._columns:
            return batch.row_offsets[1:] - 1, np.ones(len(starts), np.bool_)
        old, exists, keys = batch.states[STATE], batch.exists[STATE], len(starts)
        arrays = []
        for column in self._columns:
            new = whole(batch.rows[column.name])
            if column.name in batch.keys.column_names:
                arrays.append(pa.concat_arrays([whole(batch.keys[column.name]).cast(new.type), new]))
            else:
                arrays.append(pa.concat_arrays([whole(old[column.name]).cast(new.type), new]))
        codes = order_codes(self._columns, arrays)
        stored, given = codes[:keys], codes[keys:]
        best = np.maximum.reduceat(given, starts)
        of_best = np.where(given == best[batch.key_of_row], np.arange(len(given)), -1)
        return np.maximum.reduceat(of_best, starts), ~exists | (best >= stored)

    def _move_timers(self, batch: KeyedBatch, replaces: Bools, was_deleted: Bools, is_deleted: Bools) -> None:
        """Give each deleted key a timer that removes its state after `horizon`. Delete the timers of replaced rows."""
        gone = was_deleted & replaces
        timers = self._handle.listTimers(gone)
        self._handle.deleteTimer(np.flatnonzero(gone)[timers.key_of_row], timers.rows["expiry_ms"])
        horizon_ms = 0 if self.horizon is None else -(-self.horizon // _MILLISECOND)
        expiry = batch.time.getCurrentProcessingTimeInMs() + horizon_ms
        self._handle.registerTimer(np.flatnonzero(is_deleted & replaces), expiry)

    def _output(self, batch: KeyedBatch, state: pa.Table) -> pa.Table:
        """Return the output: the row in `state` of each key that has changed in the interval.

        A key whose rows continue in the next batch is left out. Its row is emitted with the last of its batches.
        """
        before, existed = batch.states[STATE], batch.exists[STATE].copy()
        if self._begun is not None:
            row, existed[0] = self._begun
            before = pa.concat_tables([row, before.slice(1)])
        last = len(existed) - 1
        self._begun = (before.slice(last), bool(existed[last])) if batch.last_key_continues else None
        changed = ~existed
        for name in before.column_names:
            changed |= ~same_values(whole(before[name]), whole(state[name]))
        if batch.last_key_continues:
            changed[last] = False
        return with_keys(batch, state).filter(pa.array(changed)).select(self._handle.input_schema.names)


def _version(owner: str, value: str | Sequence[str] | None) -> tuple[OrderColumn, ...]:
    return () if value is None else order_columns(owner, "version", value)
