"""A ready-made processor that aggregates rows in windows of event time that do not overlap."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from pyspark.sql.types import LongType, StructField, StructType

from cairn.aggregates.groups import Groups
from cairn.arrow_processor import BatchResult, KeyedBatch
from cairn.numpy_columns import Int64s, array_of, numbers, whole
from cairn.processors.ready_made import MICROSECOND, ceil_ms, check_length, made_with, within_bounds
from cairn.processors.windows import (
    VERSION,
    Windows,
    check_offset,
    join_tables,
    of_open_key,
    rows_by_window,
    versions_of,
)

STATE = "windows"
START = Windows.bounds[0]


class TumblingWindow(Windows):
    """Processor that emits aggregates per key and window of event time.

    Windows follow each other without gap and overlap. A row belongs to the window of its event time: from
    `window_start` up to, but not at, `window_end`. A subclass declares its aggregates as class attributes, as for
    `RunningAggregate`.

    The output has a row for each window with rows: the key columns, `window_start`, `window_end` and the aggregates. A
    window is emitted in the interval in which the watermark passes its end. A window counts its rows as long as it is
    open.

    The state `windows` is a map from `window_start` to the aggregates of each open window. A timer emits the window
    and removes it. A window that opens and closes in the same interval never enters the state.

    Attributes:
        size: Length of the windows.
        offset: Shift of the windows. Windows begin at 1970-01-01 00:00 UTC plus `offset` plus a multiple of `size`.
        early: True also emits a window in each interval with new rows for it, as one row. The output then has the
            columns `version`, which numbers the output rows of a window from 1, and `is_final`.
        allowed_lateness: Part of the watermark delay. A window is emitted when the watermark reaches its end minus
            this time. Each later interval with late rows emits a corrected row. The output has the column `version`.

    Example:
        class Hourly(TumblingWindow):
            size = timedelta(hours=1)
            readings = Count()
            highest = Max("celsius")
    """

    settings: ClassVar[tuple[str, ...]] = ("size", "offset", "early", "allowed_lateness")
    size: timedelta
    offset: timedelta = timedelta(0)

    @classmethod
    def check_settings(cls) -> None:
        check_length(cls, "size")
        check_offset(cls)
        super().check_settings()

    def init(self, handle: Any) -> None:
        values = self._declare(handle)
        self._size, self._offset = self.size // MICROSECOND, self.offset // MICROSECOND
        self._carried: Int64s = np.zeros(0, np.int64)
        # No aggregate has a state field of this name: the names of its fields are `<aggregate>_<part>`.
        values += [StructField(VERSION, LongType())] if self._is_versioned else []
        key = made_with(self, ("size", "offset"), [StructField(START, self._of_time)])
        self._windows = handle.getMapState(STATE, key, StructType(values))

    def handleBatch(self, batch: KeyedBatch) -> BatchResult:
        times = self._times_of(batch)
        times = within_bounds(times, self._size, self._size)
        cut = rows_by_window(batch.key_of_row, times - (times - self._offset) % self._size)
        owners, begins = cut.owners, cut.begins
        old, exists = self._windows.getValue(owners, self._user_keys(begins))
        parts, values = self._step(Groups(self._windows_of(batch, owners, begins, cut.take(batch.rows), cut.at)), old)
        versions = versions_of(old)
        carried = np.setdiff1d(self._carried, begins[owners == 0])
        if len(carried):
            # An earlier batch of the first key changed these windows. They are emitted with this batch.
            of_first = np.zeros(len(carried), np.int64)
            stored, there = self._windows.getValue(of_first, self._user_keys(carried))
            more = self._values(batch, of_first, carried, stored)
            values = {name: pa.concat_arrays([values[name], more[name]]) for name in values}
            parts = join_tables([parts, stored.select(parts.column_names).cast(parts.schema)])
            owners, begins = np.concatenate([owners, of_first]), np.concatenate([begins, carried])
            exists, versions = np.concatenate([exists, there]), np.concatenate([versions, versions_of(stored)])
        waits = of_open_key(batch, owners)
        self._carried = begins[waits]
        ends, due_ms = begins + self._size, self._handle.due_ms
        closes = ~waits & (ceil_ms(ends) <= due_ms)
        put_out = ~waits & (self.early | (ceil_ms(ends - self._lateness) <= due_ms))
        changed = versions + put_out
        keep = np.flatnonzero(~closes)
        kept = parts if len(keep) == len(owners) else parts.take(pa.array(keep))
        if self._is_versioned:
            kept = kept.append_column(VERSION, array_of(changed[keep], pa.int64()))
        self._windows.updateValue(owners[keep], self._user_keys(begins[keep]), kept)
        new = np.flatnonzero(~closes & ~exists)
        self._handle.registerTimer(owners[new], self._due_after(ends[new], changed[new]))
        gone = np.flatnonzero(closes & exists)
        if len(gone):
            self._windows.removeKey(owners[gone], self._user_keys(begins[gone]))
            # Two windows of a key may share a timer in two cases: windows are shorter than a millisecond; or, with
            # `allowed_lateness`, one window closes at the time at which another is emitted. In these cases the timer is
            # not deleted. If it fires after its window was removed, nothing happens.
            if self._size >= 1000 and not self._lateness:
                self._handle.deleteTimer(owners[gone], ceil_ms(ends[gone]))
        if not put_out.any():
            return BatchResult()
        at = np.flatnonzero(put_out)
        if len(at) < len(owners):
            values = {name: column.take(pa.array(at)) for name, column in values.items()}
        return BatchResult(
            output=self._output(batch, owners[at], (begins[at], ends[at]), values, changed[at], closes[at])
        )

    def handleExpiredTimers(self, batch: KeyedBatch) -> BatchResult:
        """Emit the windows that are due, and remove those that the watermark has passed."""
        entries = self._windows.iterator()
        owners, begins = entries.key_of_row, numbers(whole(entries.keys[START]))
        ends, versions, due_ms = begins + self._size, versions_of(entries.values), batch.time.getCurrentWatermarkInMs()
        ended = ceil_ms(ends) <= due_ms
        put_out = self._is_due(ends, versions, due_ms)
        chosen = pa.array(np.flatnonzero(put_out))
        values = self._values(batch, owners[put_out], begins[put_out], entries.values.take(chosen))
        output = self._output(
            batch, owners[put_out], (begins[put_out], ends[put_out]), values, versions[put_out] + 1, ended[put_out]
        )
        self._windows.removeKey(owners[ended], entries.keys.filter(pa.array(ended)))
        versions = versions + put_out
        first = np.flatnonzero(put_out & ~ended)
        if len(first):
            at = pa.array(first)
            parts = entries.values.take(at).select(self._part_names())
            parts = parts.append_column(VERSION, array_of(versions[first], pa.int64()))
            self._windows.updateValue(owners[first], entries.keys.take(at), parts)
        # Windows that stay open need a new timer: theirs has fired to emit a result before the window closes.
        self._handle.registerTimer(owners[~ended], self._due_after(ends[~ended], versions[~ended]))
        return BatchResult(output=output)

    def _counts_until(self, times: Int64s) -> Int64s:
        times = within_bounds(times, self._size, self._size)
        return times - (times - self._offset) % self._size + self._size
