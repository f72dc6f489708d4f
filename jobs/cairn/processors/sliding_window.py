"""A ready-made processor that aggregates rows in windows of event time that overlap."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from math import gcd
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
    are_in,
    check_offset,
    group_begins,
    of_open_key,
    rows_by_window,
    versions_of,
)
from state_backend.values.errors import UsageError

PANES, PUT_OUT = "panes", "put_out"
PANE = "pane_start"
START = Windows.bounds[0]
# Upper limit of the pairs of pane and window in memory at a time, except for a key that has more.
_PAIRS = 1 << 19


class SlidingWindow(Windows):
    """Processor that emits aggregates per key and window of event time, where windows overlap.

    A window has the length `size`, and a window begins every `slide`. So a row belongs to several windows. A subclass
    declares its aggregates as class attributes, as for `RunningAggregate`.

    The output has a row for each window with rows: the key columns, `window_start`, `window_end` and the aggregates. A
    window is emitted in the interval in which the watermark passes its end. A window counts its rows as long as it is
    open.

    The state `panes` is a map from `pane_start` to aggregates. A pane is a span in which no window begins or ends. Its
    length is the greatest common divisor of `size` and `slide`. Each row is added to one pane. A window merges the
    aggregates of its panes when it is emitted. A pane leaves the state with its last window.

    Attributes:
        size: Length of the windows.
        slide: Distance between the beginnings of two windows. At most `size`.
        offset: Shift of the windows. Windows begin at 1970-01-01 00:00 UTC plus `offset` plus a multiple of `slide`.
        early: True also emits a window in each interval with new rows for it, as one row. The output then has the
            columns `version`, which numbers the output rows of a window from 1, and `is_final`. The state
            `put_out` has the version of each open window.
        allowed_lateness: Part of the watermark delay. A window is emitted when the watermark reaches its end minus
            this time. Each later interval with late rows emits a corrected row. The output has the column `version`.

    Example:
        class LastDay(SlidingWindow):
            size = timedelta(days=1)
            slide = timedelta(hours=1)
            readings = Count()
    """

    settings: ClassVar[tuple[str, ...]] = ("size", "slide", "offset", "early", "allowed_lateness")
    merges: ClassVar[bool] = True
    size: timedelta
    slide: timedelta
    offset: timedelta = timedelta(0)

    @classmethod
    def check_settings(cls) -> None:
        check_length(cls, "size")
        check_length(cls, "slide")
        if cls.slide > cls.size:
            raise UsageError(
                f"{cls.__name__}.slide is {cls.slide!r}, longer than size = {cls.size!r}: rows between two windows would be lost"
            )
        check_offset(cls)
        super().check_settings()

    def init(self, handle: Any) -> None:
        values = self._declare(handle)
        self._size, self._slide, self._offset = (span // MICROSECOND for span in (self.size, self.slide, self.offset))
        self._pane = gcd(self._size, self._slide)
        self._carried: Int64s = np.zeros(0, np.int64)
        key = made_with(self, ("size", "slide", "offset"), [StructField(PANE, self._of_time)])
        self._panes = handle.getMapState(PANES, key, StructType(values))
        if self._is_versioned:
            of_version = StructType([StructField(VERSION, LongType())])
            self._put_out = handle.getMapState(PUT_OUT, StructType([StructField(START, self._of_time)]), of_version)

    def handleBatch(self, batch: KeyedBatch) -> BatchResult:
        times = self._times_of(batch)
        times = within_bounds(times, self._size, self._size)
        arrivals = self._arrivals(batch)
        cut = rows_by_window(batch.key_of_row, times - (times - self._offset) % self._pane)
        user_keys = self._user_keys(cut.begins, PANE)
        old, exists = self._panes.getValue(cut.owners, user_keys)
        groups = self._windows_of(batch, cut.owners, cut.begins, cut.take(batch.rows), cut.at)
        arrivals.numbers[:] = arrivals.numbers[cut.order]
        parts, _ = self._step(Groups(groups, arrivals), old)
        self._panes.updateValue(cut.owners, user_keys, parts)
        new = np.flatnonzero(~exists)
        first = self._first_end(cut.begins[new])
        if self._handle.late_ms is not None:
            # The first windows of the pane may have closed already. The timer is for the first one that is still open.
            first = np.maximum(first, self._end_after(self._handle.late_ms * 1000))
        self._handle.registerTimer(cut.owners[new], ceil_ms(first - self._lateness))
        if not self._is_versioned:
            return BatchResult()
        return BatchResult(output=self._changed_rows(batch, cut.owners, cut.begins))

    def handleExpiredTimers(self, batch: KeyedBatch) -> BatchResult:
        """Emit the windows that are due, and remove panes (spans of aggregated rows) that belong to no open window."""
        entries = self._panes.iterator()
        owners, panes = entries.key_of_row, numbers(whole(entries.keys[PANE]))
        due_us = batch.time.getCurrentWatermarkInMs() * 1000
        # The first expired timer of a key belongs to its first window that is not emitted yet.
        first_fired_us = (numbers(whole(batch.rows["expiry_ms"]))[batch.row_offsets[:-1]] - 1) * 1000
        low = self._end_after(first_fired_us + self._lateness)[owners]
        high = np.full(len(owners), self._end_up_to(due_us + self._lateness))
        outputs = [
            self._rows(batch, *windows, due_us, changed=False)
            for windows in self._windows_with(owners, panes, entries.values, low, high)
        ]
        closed = self._last_end(panes) <= due_us
        self._panes.removeKey(owners[closed], entries.keys.filter(pa.array(closed)))
        waiting_for = np.maximum(self._first_end(panes), self._end_after(due_us + self._lateness)) - self._lateness
        if self._is_versioned:
            self._close(owners, due_us)
            # With `allowed_lateness`, a pane also needs a timer at the end of its last window, because the pane closes
            # then.
            waiting_for = np.minimum(waiting_for, self._last_end(panes))
        for_key = np.full(batch.keys.num_rows, np.iinfo(np.int64).max)
        np.minimum.at(for_key, owners[~closed], waiting_for[~closed])
        open_keys = np.unique(owners[~closed])
        self._handle.registerTimer(open_keys, ceil_ms(for_key[open_keys]))
        return BatchResult(output=pa.concat_tables(outputs) if outputs else None)

    def _counts_until(self, times: Int64s) -> Int64s:
        return self._last_end(within_bounds(times, self._size, self._size))

    def _last_end(self, panes: Int64s) -> Int64s:
        return panes - (panes - self._offset) % self._slide + self._size

    def _first_end(self, panes: Int64s) -> Int64s:
        last = self._last_end(panes)
        return last - (last - panes - 1) // self._slide * self._slide

    def _end_up_to(self, times: Any) -> Any:
        """Return for each time the latest window end at or before it."""
        return times - (times - self._offset - self._size) % self._slide

    def _end_after(self, times: Any) -> Any:
        """Return for each time the earliest window end after it."""
        return self._end_up_to(times) + self._slide

    def _windows_with(
        self, owners: Int64s, panes: Int64s, parts: pa.Table, low: Int64s, high: Int64s
    ) -> Iterator[tuple[Int64s, Int64s, pa.Table, Int64s]]:
        """Yield (keys, ends, aggregates, offsets) of the windows that end from `low` to `high`, in slices.

        Window i has the rows `offsets[i]` to `offsets[i + 1] - 1` of the aggregates (`parts`), one for each of its
        `panes`.
        """
        first = np.maximum(self._first_end(panes), low)
        counts = np.maximum((np.minimum(self._last_end(panes), high) - first) // self._slide + 1, 0)
        until = np.cumsum(counts)
        begin = 0
        while begin < len(owners):
            before = until[begin - 1] if begin else 0
            end = max(int(np.searchsorted(until, before + _PAIRS, "right")), begin + 1)
            # Extend the slice, so that it has all panes of its last key.
            end = int(np.searchsorted(owners, owners[end - 1], "right"))
            at = np.repeat(np.arange(begin, end), counts[begin:end])
            nth = np.arange(len(at)) - (until - counts)[at] + before
            ends = first[at] + nth * self._slide
            order = np.lexsort((ends, owners[at]))
            at, ends = at[order], ends[order]
            begins = group_begins(owners[at], ends)
            if len(at):
                of_pairs = parts.take(pa.array(at))
                yield owners[at][begins], ends[begins], of_pairs, np.append(begins, len(at)).astype(np.int64)
            begin = end

    def _rows(
        self,
        batch: KeyedBatch,
        owners: Int64s,
        ends: Int64s,
        parts: pa.Table,
        at: Int64s,
        due_us: int,
        *,
        changed: bool,
    ) -> pa.Table:
        """Return output rows of windows, and store versions of open ones. `changed`: For new rows, not a timer."""
        begins = ends - self._size
        parts = self._merge(batch, owners, begins, parts, at)
        versions = np.zeros(len(owners), np.int64)
        if self._is_versioned:
            versions = versions_of(self._put_out.getValue(owners, self._user_keys(begins))[0])
            if self._lateness:
                chosen = (versions > 0) == changed
                owners, begins, ends, versions = owners[chosen], begins[chosen], ends[chosen], versions[chosen]
                parts = parts.filter(pa.array(chosen))
            versions = versions + 1
            stays = np.flatnonzero(ends > due_us)
            new = pa.table({VERSION: array_of(versions[stays], pa.int64())})
            self._put_out.updateValue(owners[stays], self._user_keys(begins[stays]), new)
        values = self._values(batch, owners, begins, parts)
        return self._output(batch, owners, (begins, ends), values, versions, ends <= due_us)

    def _changed_rows(self, batch: KeyedBatch, owners: Int64s, panes: Int64s) -> pa.Table | None:
        """Return the output rows of the windows that contain one of the changed `panes`; None if there are none.

        If the last key has more rows in the next batch, its windows are emitted with its last batch.
        """
        carried = np.setdiff1d(self._carried, panes[owners == 0])
        owners = np.concatenate([np.zeros(len(carried), np.int64), owners])
        panes = np.concatenate([carried, panes])
        waits = of_open_key(batch, owners)
        self._carried = panes[waits]
        owners, panes = owners[~waits], panes[~waits]
        if not len(owners):
            return None
        wanted = self._ends_of(owners, panes)
        of_keys = np.unique(owners)
        entries = self._panes.iterator(of_keys)
        all_owners, all_panes = of_keys[entries.key_of_row], numbers(whole(entries.keys[PANE]))
        # Windows that end up to `due_us` are left out with `early`: a timer emits them in this interval.
        due_us = self._handle.due_ms * 1000
        low = np.full(len(all_owners), self._end_after(due_us) if self.early else np.iinfo(np.int64).min)
        high = np.full(len(all_owners), np.iinfo(np.int64).max)
        outputs = []
        for of_key, ends, parts, at in self._windows_with(all_owners, all_panes, entries.values, low, high):
            chosen = are_in((of_key, ends), wanted)
            if chosen.any():
                lengths = np.diff(at)
                kept = parts.filter(pa.array(np.repeat(chosen, lengths)))
                begins = np.append(0, np.cumsum(lengths[chosen])).astype(np.int64)
                outputs.append(self._rows(batch, of_key[chosen], ends[chosen], kept, begins, due_us, changed=True))
        return pa.concat_tables(outputs) if outputs else None

    def _ends_of(self, owners: Int64s, panes: Int64s) -> tuple[Int64s, Int64s]:
        """Return (keys, ends) of all windows that contain one of `panes`, once for each pane."""
        first = self._first_end(panes)
        counts = (self._last_end(panes) - first) // self._slide + 1
        nth = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.repeat(owners, counts), np.repeat(first, counts) + nth * self._slide

    def _close(self, owners: Int64s, due_us: int) -> None:
        """Delete the stored versions of the windows of some keys that ended at or before `due_us`."""
        of_keys = np.unique(owners)
        entries = self._put_out.iterator(of_keys)
        closed = numbers(whole(entries.keys[START])) + self._size <= due_us
        self._put_out.removeKey(of_keys[entries.key_of_row][closed], entries.keys.filter(pa.array(closed)))
