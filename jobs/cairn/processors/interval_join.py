"""A ready-made processor that joins rows of two inputs whose times are close to each other."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
from pyspark.sql.types import BooleanType, StructField, StructType

from cairn.arrow_processor import BatchResult, KeyedBatch
from cairn.numpy_columns import Int64s, array_of, booleans, numbers, whole
from cairn.processors.ready_made import MICROSECOND, ReadyMade, ceil_ms, check_choice, made_with, wrong_setting
from cairn.processors.two_inputs import (
    SideRows,
    check_kinds,
    earliest,
    held_rows,
    no_rows,
    output_rows,
    output_schema,
    positions,
    register_first,
    remove_rows,
    sides_of,
    split_sides,
)
from cairn.spark_versions import to_arrow_schema
from state_backend.values.errors import UsageError
from state_backend.values.time_bounds import check_length_of_time

STATES = ("left", "right")
_FIXED = ("left", "right", "how")
MATCHED = "matched"


class IntervalJoin(ReadyMade):
    """Processor that joins rows of two inputs with equal keys and close event times.

    A left row and a right row match if the right row's event time minus the left row's is at least `lower` and at most
    `upper`. The source returns both inputs as one, as `union_by_kind` does.

    The output has the key columns, the columns of the left row, and those of the right row. A pair is emitted in the
    interval in which the later of its rows arrives. An outer join emits a row without partner, with nulls for the
    other side, in the interval in which the watermark passes the row's last possible partner.

    As in SQL, a row with a null in its key or its event time matches nothing.

    The states `left` and `right` are lists of the rows that may find more partners. A timer removes them.

    Attributes:
        left: The value of the column `kind` in rows of the left input.
        right: The value of the column `kind` in rows of the right input.
        lower: The least time from a left row to its right row. If negative, the right row may be earlier.
        upper: The greatest time from a left row to its right row.
        how: "inner" emits pairs. "left", "right" and "full" also emit rows of the left, the right or both inputs
            that found no partner.

    Example:
        class PaidOrders(IntervalJoin):
            left, right = "order", "payment"
            lower, upper = timedelta(0), timedelta(days=3)
            how = "left"
    """

    settings: ClassVar[tuple[str, ...]] = ("left", "right", "lower", "upper", "how")
    left: str
    right: str
    lower: timedelta
    upper: timedelta
    how: Literal["inner", "left", "right", "full"] = "inner"

    @classmethod
    def check_settings(cls) -> None:
        check_kinds(cls, "left", "right")
        for name in ("lower", "upper"):
            value = getattr(cls, name, None)
            if not isinstance(value, timedelta):
                raise wrong_setting(cls, name, f"write {name} = timedelta(hours=1)")
            check_length_of_time(f"{cls.__name__}.{name}", value)
        if cls.lower > cls.upper:
            raise UsageError(
                f"{cls.__name__}.lower is {cls.lower!r}, which is more than upper = {cls.upper!r}; no rows would match"
            )
        check_choice(cls, "how", ("inner", "left", "right", "full"))

    def init(self, handle: Any) -> None:
        self.check_settings()
        self._handle = handle
        self._sides = sides_of(type(self).__name__, "IntervalJoin", handle, (self.left, self.right))
        self._outer = (self.how in ("left", "full"), self.how in ("right", "full"))
        # A left row finds its last partner at its time plus `upper`; a right row at its time minus `lower`.
        self._lower, self._upper = self.lower // MICROSECOND, self.upper // MICROSECOND
        self._lasts = (self._upper, -self._lower)
        matched = [StructField(MATCHED, BooleanType())]
        self._none = [no_rows(side) for side in self._sides]
        self._schema = to_arrow_schema(output_schema(handle, self._sides))
        self._states = [
            handle.getListState(name, made_with(self, _FIXED, [*side.fields, *(matched if outer else [])]))
            for name, side, outer in zip(STATES, self._sides, self._outer, strict=True)
        ]

    def deriveOutputSchema(self, handle: Any) -> StructType:
        self.check_settings()
        return output_schema(handle, sides_of(type(self).__name__, "IntervalJoin", handle, (self.left, self.right)))

    def handleBatch(self, batch: KeyedBatch) -> BatchResult:
        sides = split_sides(type(self).__name__, batch, self._handle.event_time, self._sides)
        held = [held_rows(state.get(), side) for state, side in zip(self._states, self._sides, strict=True)]
        rows = [old.followed_by(new) for old, (new, _) in zip(held, sides, strict=True)]
        at_left, at_right = self._pairs(rows[0], rows[1], len(held[0].owners), len(held[1].owners))
        owners = [rows[0].owners[at_left]]
        output = [self._output(batch, owners[0], rows, (at_left, at_right))]
        # A row in the state already has a timer. But that timer is too late if `lower` or `upper` allowed more before.
        lasts = ((part.owners, part.times + last) for part, last in zip(rows, self._lasts, strict=True))
        register_first(self._handle, earliest(batch.keys.num_rows, *lasts))
        for side, pairs in enumerate((at_left, at_right)):
            self._store(side, held[side], sides[side][0], rows[side], pairs)
            alone = sides[side][1]
            if self._outer[side] and len(alone.owners):
                output.append(self._alone(batch, side, alone))
        return BatchResult(output=pa.concat_tables(output))

    def handleExpiredTimers(self, batch: KeyedBatch) -> BatchResult:
        """Remove the rows that can find no more partners. An outer join emits the removed rows that never found one."""
        watermark_ms = batch.time.getCurrentWatermarkInMs()
        output: list[pa.Table] = []
        left: list[tuple[Int64s, Int64s]] = []
        for side, (state, last) in enumerate(zip(self._states, self._lasts, strict=True)):
            held = held_rows(state.get(), self._sides[side])
            over = ceil_ms(held.times + last) <= watermark_ms
            kept, gone = remove_rows(state, held, over), held.chosen(over)
            left.append((kept.owners, kept.times + last))
            if self._outer[side]:
                alone = gone.chosen(numbers(whole(gone.rows[MATCHED])) == 0)
                output.append(self._alone(batch, side, alone))
        register_first(self._handle, earliest(batch.keys.num_rows, *left))
        return BatchResult(output=pa.concat_tables(output) if output else None)

    def _pairs(self, left: SideRows, right: SideRows, held_left: int, held_right: int) -> tuple[Int64s, Int64s]:
        """Return (left, right): the rows of each pair with a new row. The first `held_left`, `held_right` are old."""
        new_left, old_left = slice(held_left, None), slice(0, held_left)
        of_new = self._matches(left, new_left, right, slice(0, None))
        of_old = self._matches(left, old_left, right, slice(held_right, None))
        return np.concatenate([of_new[0], of_old[0]]), np.concatenate([of_new[1], of_old[1]])

    def _matches(self, left: SideRows, of_left: slice, right: SideRows, of_right: slice) -> tuple[Int64s, Int64s]:
        owners, times = left.owners[of_left], left.times[of_left]
        right_owners, right_times = right.owners[of_right], right.times[of_right]
        if not len(owners) or not len(right_owners):
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        order, (begins, ends) = positions(
            right_owners, right_times, [(owners, times + self._lower, "left"), (owners, times + self._upper, "right")]
        )
        counts = ends - begins
        at_left = np.repeat(np.arange(len(owners)), counts)
        within = np.arange(len(at_left)) - np.repeat(np.cumsum(counts) - counts, counts)
        at_right = order[np.repeat(begins, counts) + within]
        return at_left + (of_left.start or 0), at_right + (of_right.start or 0)

    def _store(self, side: int, held: SideRows, new: SideRows, rows: SideRows, pairs: Int64s) -> None:
        """Add the rows `new` to the state of a side. In an outer join, mark the rows with a partner (`pairs`)."""
        state = self._states[side]
        if not self._outer[side]:
            state.appendList(new.owners, new.rows)
            return
        count = len(held.owners)
        before = booleans(held.rows[MATCHED])
        matched = np.concatenate([before, np.zeros(len(new.owners), np.bool_)])
        matched[pairs] = True
        changed = np.unique(held.owners[matched[:count] & ~before])
        again = np.isin(rows.owners, changed)
        columns = rows.rows.select(list(self._sides[side].columns.values()))
        flagged = replace(rows, rows=columns.append_column(MATCHED, array_of(matched, pa.bool_())))
        rewritten, added = flagged.chosen(again), flagged.chosen(~again & (np.arange(len(rows.owners)) >= count))
        state.put(rewritten.owners, rewritten.rows)
        state.appendList(added.owners, added.rows)

    def _alone(self, batch: KeyedBatch, side: int, rows: SideRows) -> pa.Table:
        none, every = np.full(len(rows.owners), -1), np.arange(len(rows.owners))
        at = (every, none) if side == 0 else (none, every)
        both = list(self._none)
        both[side] = rows
        return self._output(batch, rows.owners, both, at)

    def _output(self, batch: KeyedBatch, owners: Int64s, rows: Any, at: tuple[Int64s, Int64s]) -> pa.Table:
        parts = [(side, of_side.rows, places) for side, of_side, places in zip(self._sides, rows, at, strict=True)]
        return output_rows(batch, owners, parts, self._schema)
