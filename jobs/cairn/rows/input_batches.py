"""Read the routed Arrow batches of one shard, without its ticks and late rows.

Late rows are written to a separate Parquet file, which the record names beside the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cairn.numpy_columns import Int64s, numbers
from cairn.rows.forgotten_rows import ForgottenRows
from cairn.rows.output_file import LocalParquet
from cairn.rows.routing import INPUT, TICK
from cairn.rows.watermark import EventTime
from state_backend.values.errors import InvariantViolated
from state_backend.values.key_groups import KeyGroupRange


class InputBatches:
    """Iterator over non-empty batches of input and initial-state rows, with the columns that `routing` lists."""

    def __init__(
        self,
        batches: Iterator[pa.RecordBatch],
        owned: KeyGroupRange,
        event_time: EventTime | None,
        late: LocalParquet,
        forgotten: ForgottenRows | None = None,
    ) -> None:
        self.ticks = 0
        self.input_rows = 0
        self.newest_event_us: int | None = None
        # From event times in microseconds, until when each row counts: the end of its window. None: the event time.
        self.counts_until: Callable[[Int64s], Int64s] | None = None
        self._batches = batches
        self._owned = owned
        self._event_time = event_time
        self._late = late
        self._forgotten = forgotten

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for batch in self._batches:
            kinds = batch.column("__kind").to_numpy()
            ticks = int((kinds == TICK).sum())
            self.ticks += ticks
            self.input_rows += int((kinds == INPUT).sum())
            rows = batch.filter(pa.array(kinds != TICK)) if ticks else batch
            if self._forgotten is not None and rows.num_rows:
                rows = self._forgotten.without(rows)
            if self._event_time is not None and rows.num_rows:
                rows = self._on_time(rows, self._event_time)
            if rows.num_rows:
                self._check_owned(rows)
                yield rows

    def _on_time(self, rows: pa.RecordBatch, event_time: EventTime) -> pa.RecordBatch:
        # Rows of the initial state, and rows without event time, have null as event time. They are never late.
        inputs = rows.column("__input")
        events = pc.struct_field(inputs, [inputs.type.get_field_index(event_time.column)])
        events = events.cast(pa.timestamp("us", events.type.tz)).cast(pa.int64())
        newest = pc.max(events).as_py()
        if newest is not None:
            self.newest_event_us = max(newest, self.newest_event_us or newest)
        if event_time.late_until_us is None:
            return rows
        late = pc.fill_null(pc.less_equal(events, event_time.late_until_us), False)
        if self.counts_until is not None and pc.any(late).as_py():
            # A row is not late if its window is still open, although its event time is before the watermark.
            chosen = late.to_numpy(zero_copy_only=False).copy()
            at = np.flatnonzero(chosen)
            chosen[at] = self.counts_until(numbers(events.take(pa.array(at)))) <= event_time.late_until_us
            late = pa.array(chosen)
        if not pc.any(late).as_py():
            return rows
        # Spark delivers instants in the session's time zone. Files store them in UTC.
        columns = [
            column if column.type == field.type else column.cast(field.type)
            for column, field in zip(inputs.filter(late).flatten(), self._late.schema, strict=True)
        ]
        self._late.write(pa.RecordBatch.from_arrays(columns, schema=self._late.schema))
        return rows.filter(pc.invert(late))

    def _check_owned(self, rows: pa.RecordBatch) -> None:
        groups = rows.column("__key_group")
        first, last = groups[0].as_py(), groups[-1].as_py()
        if not (first in self._owned and last in self._owned):
            raise InvariantViolated(f"rows of key groups {first} .. {last} reached the shard of {self._owned}")
