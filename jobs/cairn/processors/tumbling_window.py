"""A ready-made processor that aggregates rows in windows of event time."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import BooleanType, LongType, StructField, StructType

from cairn.aggregates import Aggregate, Groups, aggregate_fields, declared_in, nullable, plan_fields
from cairn.arrow_processor import BatchResult, KeyedBatch
from cairn.numpy_columns import Int64s, array_of, numbers, whole
from cairn.processors.ready_made import (
    MICROSECOND,
    ReadyMade,
    ceil_ms,
    check_choice,
    check_free,
    check_times,
    type_of_event_time,
)
from state_backend.values.errors import UsageError

__all__ = ["TumblingWindow"]

STATE = "windows"
START, END, VERSION, FINAL = "window_start", "window_end", "version", "is_final"


class TumblingWindow(ReadyMade):
    """Processor that puts out aggregates per key and window of event time.

    Windows follow each other without gap and overlap. A row belongs to the window of its event time: from `window_start`
    up to, but not at, `window_end`. A subclass declares its aggregates as class attributes, as for `RunningAggregate`.

    The output has a row for each window with rows: the key columns, `window_start`, `window_end` and the aggregates. A
    window is put out in the interval in which the watermark passes its end. So rows may be late by the pipeline's
    `watermark_delay`.

    The state `windows` is a map from `window_start` to the aggregates of each open window. A timer puts the window out
    and removes it.

    Attributes:
        size: Length of the windows.
        offset: Shift of the windows. Windows begin at 1970-01-01 00:00 UTC plus `offset` plus a multiple of `size`.
        early: True puts out a window in each interval with new rows too. The output then has two more columns: `version`,
            which numbers the rows of a window from 1, and `is_final`.

    Example:
        class Hourly(TumblingWindow):
            size = timedelta(hours=1)
            readings = Count()
            highest = Max("celsius")
    """

    settings: ClassVar[tuple[str, ...]] = ("size", "offset", "early")
    size: timedelta
    offset: timedelta = timedelta(0)
    early: bool = False
    # In the order of declaration, as in `RunningAggregate`.
    declared_aggregates: Mapping[str, Aggregate] = {}

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Collect the aggregates that the new class declares or inherits, and check its settings.

        Raises:
            UsageError: A setting is wrong, or an aggregate has the name of a member of `TumblingWindow`.
        """
        for name, value in vars(cls).items():
            if isinstance(value, Aggregate) and hasattr(TumblingWindow, name):
                raise UsageError(
                    f"{cls.__name__}.{name} = {value}: every processor already has an attribute {name!r}; choose another name"
                )
        cls.declared_aggregates = declared_in(cls)
        super().__init_subclass__(**arguments)

    @classmethod
    def is_setting(cls, name: str, value: Any) -> bool:
        """Return True for settings and aggregates.

        Args:
            name: Name of a class attribute.
            value: Value of this attribute.
        """
        return isinstance(value, Aggregate) or name == "declared_aggregates" or super().is_setting(name, value)

    @classmethod
    def check_settings(cls) -> None:
        """Check the class attributes.

        Raises:
            UsageError: A setting is missing, or has a wrong value.
        """
        size = getattr(cls, "size", None)
        if not isinstance(size, timedelta) or size <= timedelta(0):
            found = f"is {size!r}" if hasattr(cls, "size") else "is missing"
            raise UsageError(f"{cls.__name__}.size {found}; write size = timedelta(hours=1)")
        if not isinstance(cls.offset, timedelta):
            raise UsageError(f"{cls.__name__}.offset is {cls.offset!r}; write offset = timedelta(minutes=15)")
        check_choice(cls, "early", (True, False))

    def init(self, handle: Any) -> None:
        """Declare the map state `windows` with a field for each part of each aggregate.

        Args:
            handle: The handle that Cairn passes to each processor.

        Raises:
            UsageError: The pipeline has no event time, or an aggregate does not fit the input's columns.
        """
        self.check_settings()
        self.deriveOutputSchema(handle)
        owner = type(self).__name__
        of = type_of_event_time(owner, "TumblingWindow", handle)
        fields = plan_fields(owner, self.declared_aggregates, handle.input_schema, handle.key_schema)
        self._parts = {name: [part for part, _ in parts] for name, parts in fields.items()}
        self._handle = handle
        schema = to_arrow_schema(handle.input_schema, timezone="UTC", prefers_large_types=False)
        self._no_rows: pa.Table = schema.empty_table()
        self._size, self._offset = self.size // MICROSECOND, self.offset // MICROSECOND
        self._carried: Int64s = np.zeros(0, np.int64)
        values = [StructField(f"{name}_{part}", type_) for name in fields for part, type_ in fields[name]]
        # No part of an aggregate has this name: all of them contain the aggregate's name.
        values += [StructField(VERSION, LongType())] if self.early else []
        self._windows = handle.getMapState(STATE, StructType([StructField(START, of)]), StructType(values))

    def deriveOutputSchema(self, handle: Any) -> StructType:
        """Return the schema of the output: key columns, `window_start`, `window_end` and aggregates.

        Args:
            handle: The handle that Cairn passes to each processor.

        Raises:
            UsageError: The pipeline has no event time, or two columns of the output have one name.
        """
        owner = type(self).__name__
        of = type_of_event_time(owner, "TumblingWindow", handle)
        plan_fields(owner, self.declared_aggregates, handle.input_schema, handle.key_schema)
        added = [(START, of), (END, of), *([(VERSION, LongType()), (FINAL, BooleanType())] if self.early else [])]
        for name, _ in added:
            check_free(
                owner,
                name,
                [*handle.key_schema.names, *self.declared_aggregates],
                "TumblingWindow",
                "a key column or an aggregate is named",
            )
        window, more = ([StructField(name, of) for name, of in part] for part in (added[:2], added[2:]))
        aggregates = aggregate_fields(self.declared_aggregates, handle)
        return StructType([*nullable(handle.key_schema), *window, *aggregates, *more])

    def handleBatch(self, batch: KeyedBatch) -> BatchResult:
        """Add the rows of a batch to the aggregates of their windows.

        Args:
            batch: The rows of many keys.

        Returns:
            Without `early` no rows; with it the windows that changed.

        Raises:
            ProcessorError: A row has no event time, or an aggregate does not fit its type.
        """
        check_times(type(self).__name__, batch, self._handle.event_time)
        column = whole(batch.rows[self._handle.event_time])
        times, owners = numbers(column), batch.key_of_row
        starts = times - (times - self._offset) % self._size
        order = np.lexsort((starts, owners))
        of_key, of_window = owners[order], starts[order]
        begins = np.flatnonzero((np.diff(of_key, prepend=-1) != 0) | (np.diff(of_window, prepend=0) != 0))
        of_key, of_window = of_key[begins], of_window[begins]
        rows = batch.rows.take(pa.array(order)) if (np.diff(order) != 1).any() else batch.rows
        windows = self._keyed(batch, of_key, of_window, rows, np.append(begins, len(order)))
        entries = pa.table({START: array_of(of_window, column.type)})
        old, exists = self._windows.getValue(of_key, entries)
        new, _ = self._step(windows, old)
        if self.early:
            new[VERSION] = array_of(numbers(whole(old[VERSION])), pa.int64())
        self._windows.updateValue(of_key, entries, pa.table(new))
        self._handle.registerTimer(of_key[~exists], ceil_ms(of_window[~exists] + self._size))
        return BatchResult(output=self._early_rows(batch, of_key, of_window, column.type) if self.early else None)

    def handleExpiredTimers(self, batch: KeyedBatch) -> BatchResult:
        """Put out the windows that the watermark has passed, and remove them.

        Args:
            batch: The keys that have such windows.

        Returns:
            A row for each window.
        """
        entries = self._windows.iterator()
        owners, starts = entries.key_of_row, numbers(whole(entries.keys[START]))
        ended = ceil_ms(starts + self._size) <= batch.time.getCurrentWatermarkInMs()
        chosen = pa.array(ended)
        values = entries.values.filter(chosen)
        output = self._rows(batch, owners[ended], starts[ended], values, whole(entries.keys[START]).type, final=True)
        self._windows.removeKey(owners[ended], entries.keys.filter(chosen))
        # The class had another size when the timers of these windows were set.
        self._handle.registerTimer(owners[~ended], ceil_ms(starts[~ended] + self._size))
        return BatchResult(output=output)

    def _step(self, windows: KeyedBatch, old: pa.Table) -> tuple[dict[str, pa.Array], dict[str, pa.Array]]:
        """Return the new parts of all aggregates, and their values: one element for each window."""
        groups = Groups(windows)
        new: dict[str, pa.Array] = {}
        values: dict[str, pa.Array] = {}
        for name, aggregate in self.declared_aggregates.items():
            parts = {part: whole(old[f"{name}_{part}"]) for part in self._parts[name]}
            changed, values[name] = aggregate.step(groups, parts)
            new.update((f"{name}_{part}", changed[part]) for part in parts)
        return new, values

    @staticmethod
    def _keyed(batch: KeyedBatch, owners: Int64s, starts: Int64s, rows: pa.Table, offsets: Int64s) -> KeyedBatch:
        """Return a batch whose keys are windows of the keys of `batch`."""
        keys = batch.keys.take(pa.array(owners)).append_column(START, array_of(starts, pa.timestamp("us", "UTC")))
        return KeyedBatch(keys=keys, rows=rows, row_offsets=offsets, states={}, exists={}, time=batch.time)

    def _rows(
        self, batch: KeyedBatch, owners: Int64s, starts: Int64s, parts: pa.Table, of: pa.DataType, *, final: bool
    ) -> pa.Table:
        """Return the output rows of some windows."""
        empty = self._keyed(batch, owners, starts, self._no_rows, np.zeros(len(owners) + 1, np.int64))
        _, values = self._step(empty, parts)
        output = {name: empty.keys[name] for name in batch.keys.column_names}
        output |= {START: array_of(starts, of), END: array_of(starts + self._size, of), **values}
        if self.early:
            output[VERSION] = array_of(numbers(whole(parts[VERSION])) + 1, pa.int64())
            output[FINAL] = pa.array(np.full(len(owners), final))
        return pa.table(output)

    def _early_rows(self, batch: KeyedBatch, owners: Int64s, starts: Int64s, of: pa.DataType) -> pa.Table:
        """Return the rows of the windows that changed. A key whose rows continue in the next batch is put out there."""
        carried = np.setdiff1d(self._carried, starts[owners == 0])
        owners = np.concatenate([np.zeros(len(carried), np.int64), owners])
        starts = np.concatenate([carried, starts])
        waits = owners == batch.keys.num_rows - 1 if batch.last_key_continues else np.zeros(len(owners), np.bool_)
        self._carried = starts[waits]
        owners, starts = owners[~waits], starts[~waits]
        entries = pa.table({START: array_of(starts, of)})
        parts, _ = self._windows.getValue(owners, entries)
        output = self._rows(batch, owners, starts, parts, of, final=False)
        counted = parts.set_column(parts.column_names.index(VERSION), VERSION, output[VERSION])
        self._windows.updateValue(owners, entries, counted)
        return output
