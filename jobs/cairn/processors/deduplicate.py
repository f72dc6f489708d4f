"""A ready-made processor that lets one row per key through."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import LongType, StructField, StructType

from cairn.aggregates.state_fields import nullable
from cairn.arrow_processor import BatchResult, KeyedBatch
from cairn.numpy_columns import Bools, Int64s, array_of, numbers, valid_rows, whole
from cairn.processors.ready_made import (
    MICROSECOND,
    ReadyMade,
    ceil_ms,
    check_choice,
    check_free,
    check_span,
    fields_beside_key,
    type_of_event_time,
)
from state_backend.formats.recorded_settings import INSTEAD_OF
from state_backend.values.errors import UsageError
from state_backend.values.frozen import frozen

STATES = {"first": "seen", "last": "waiting"}
NUMBER = "duplicate_number"
# `_ENDED` is the end of a horizon before every event time, `_NEVER` the end of a horizon that never ends.
_ENDED, _NEVER = np.iinfo(np.int64).min, np.iinfo(np.int64).max
# `opening_rows` finds the rows that open a horizon. It works in rounds: each round finds the next such row of every key
# with NumPy. After 32 rounds few keys have rows left, and a loop over their rows is faster than more rounds.
_ROUNDS = 32


class Deduplicate(ReadyMade):
    """Processor that emits one row per key within a horizon, across intervals.

    The pipeline's `key` says which rows are duplicates of each other. Rows come interval by interval, and within an
    interval in the order of `order_by`. The first row of a key opens a horizon at its event time. As long as the
    horizon lasts, all further rows of the key are duplicates, also rows with an earlier event time. The first row with
    an event time after the horizon opens the next horizon.

    A row whose event time is null is emitted at once. It opens no horizon and is never a duplicate.

    The output has the columns of the input.

    The state `seen` has for each open horizon its beginning, `opened_at`, and the number of its `duplicates` so far.
    With `keep = "last"` the state is named `waiting`, and its fields `row_...` have the row that will be emitted. A
    timer deletes the state when the watermark has passed the end of the horizon.

    Attributes:
        horizon: Length of time. None remembers every key for ever, and needs no event time.
        keep: "first" emits the row that opens the horizon, at once. "last" emits the row with the latest event time in
            the horizon, after the horizon has ended. Of rows with equal event times, it emits the one that came last.
        output_duplicates: True emits duplicates too. The output then has the column `duplicate_number`: 0 for the row
            that is no duplicate, and 1, 2, ... for the duplicates of its horizon in the order in which they came.

    Example:
        class OncePerOrder(Deduplicate):
            horizon = timedelta(days=7)
    """

    settings: ClassVar[tuple[str, ...]] = ("horizon", "keep", "output_duplicates")
    horizon: timedelta | None
    keep: Literal["first", "last"] = "first"
    output_duplicates: bool = False

    @classmethod
    def check_settings(cls) -> None:
        check_span(cls, "horizon", "remember every key for ever")
        check_choice(cls, "keep", ("first", "last"))
        check_choice(cls, "output_duplicates", (True, False))
        if cls.keep == "last" and cls.horizon is None:
            raise UsageError(
                f"{cls.__name__}.keep is 'last' and horizon is None: the last row would never be known; set a horizon, or use Latest, which emits every newer row"
            )

    def init(self, handle: Any) -> None:
        self.check_settings()
        self._handle = handle
        self._state = STATES[self.keep]
        self._time: str | None = None
        self._row_names: list[str] = []
        self._horizon_us = 0
        self._number_is_free(handle)
        # The state's name under the other value of `keep`, with the texts of that setting and of this class's setting.
        others = {
            state: [f"keep = {keep}", f"keep = {self.keep}"] for keep, state in STATES.items() if keep != self.keep
        }
        fields = [StructField("duplicates", LongType(), metadata={INSTEAD_OF: others})]
        if self.horizon is not None:
            owner = type(self).__name__
            fields.append(StructField("opened_at", type_of_event_time(owner, f"horizon = {self.horizon!r}", handle)))
            self._time, self._horizon_us = handle.event_time, self.horizon // MICROSECOND
        if self.keep == "last":
            row = fields_beside_key(handle)
            self._row_names = [f.name for f in row]
            # One field for each column: a struct would be coded row by row in Python.
            fields += [StructField(f"row_{f.name}", f.dataType) for f in row]
        handle.getValueState(self._state, StructType(fields))

    def deriveOutputSchema(self, handle: Any) -> StructType:
        self._number_is_free(handle)
        number = [StructField(NUMBER, LongType())] if self.output_duplicates else []
        return StructType([*nullable(handle.input_schema), *number])

    def _number_is_free(self, handle: Any) -> None:
        if self.output_duplicates:
            check_free(type(self).__name__, NUMBER, handle.input_schema.names, "output_duplicates = True")

    def handleBatch(self, batch: KeyedBatch) -> BatchResult:
        seen = _Seen(
            known=batch.exists[self._state],
            duplicates=numbers(whole(batch.states[self._state]["duplicates"])),
            opened=None if self._time is None else numbers(whole(batch.states[self._state]["opened_at"])),
            for_ever=np.zeros(batch.keys.num_rows, np.bool_)
            if self._time is None
            else batch.exists[self._state] & ~valid_rows(whole(batch.states[self._state]["opened_at"])),
        )
        if self.keep == "first":
            rows, owners, stored = batch.rows, batch.key_of_row, np.zeros(batch.rows.num_rows, np.bool_)
        else:
            rows, owners, stored = self._with_stored_rows(batch)
        walk = self._walk(rows, owners, stored, seen)
        states = {"duplicates": array_of(walk.duplicates, pa.int64())}
        known = seen.known | (walk.opened_by >= 0)
        if self._time is not None and seen.opened is not None:
            opened = seen.opened.copy()
            new = walk.opened_by >= 0
            opened[new] = numbers(whole(rows[self._time]))[walk.opened_by[new]]
            of_time = batch.states[self._state]["opened_at"].type
            states["opened_at"] = pc.if_else(pa.array(seen.for_ever), None, array_of(opened, of_time))
            # A known key's timer is too late for its row if `horizon` was longer before.
            has = new | (seen.known & ~seen.for_ever) if self.keep == "last" else new
            self._move_timers(seen.known & new, seen.opened, has, opened)
        if self.keep == "first":
            output = self._output(rows, ~walk.timed | walk.opens, walk.numbers)
        else:
            output, last = self._last_rows(rows, owners, walk)
            kept = rows.take(pa.array(last, mask=last < 0))
            states |= {f"row_{name}": kept[name] for name in self._row_names}
        return BatchResult(states={self._state: pa.table(states)}, cleared={self._state: ~known}, output=output)

    def handleExpiredTimers(self, batch: KeyedBatch) -> BatchResult:
        """Delete the state of horizons that have ended. With `keep = "last"`, emit the row stored in it."""
        if self._time is None:
            return BatchResult()  # These timers are from an earlier interval, when `horizon` was not None.
        column = whole(batch.states[self._state]["opened_at"])
        # `opened_at` is null if the key got its state while `horizon` was None. Such a state is never deleted.
        opened, has_horizon = numbers(column), batch.exists[self._state] & valid_rows(column)
        ended = has_horizon & (ceil_ms(opened + self._horizon_us) <= batch.time.getCurrentWatermarkInMs())
        # These timers were set when `horizon` was shorter. Their keys get a new timer.
        moved = np.flatnonzero(has_horizon & ~ended)
        self._handle.registerTimer(moved, ceil_ms(opened[moved] + self._horizon_us))
        output = None
        if self.keep == "last":
            rows = self._rows_of_state(batch, ended)
            output = self._output(rows, np.ones(rows.num_rows, np.bool_), np.zeros(rows.num_rows, np.int64))
        return BatchResult(cleared={self._state: ended}, output=output)

    def _walk(self, rows: pa.Table, owners: Int64s, stored: Bools, seen: _Seen) -> _Walk:
        count, keys = rows.num_rows, len(seen.known)
        starts = np.flatnonzero(np.diff(owners, prepend=-1))
        if self._time is None:
            timed, opens = np.ones(count, np.bool_), np.zeros(count, np.bool_)
            opens[starts] = ~seen.known[owners[starts]]
        else:
            column = whole(rows[self._time])
            timed = valid_rows(column)
            opened = np.zeros(keys, np.int64) if seen.opened is None else seen.opened
            limits = np.where(seen.known, opened + self._horizon_us, _ENDED)
            limits[seen.for_ever] = _NEVER
            opens = opening_rows(numbers(column), timed & ~stored, owners, limits, self._horizon_us)
        return walk_of(owners, starts, stored, timed, opens, seen)

    def _move_timers(self, had: Bools, old: Int64s, has: Bools, opened: Int64s) -> None:
        """Delete the timer at the end of each old horizon, and set one at the end of each present horizon.

        `had`, `has`: True for each key with such a horizon. `old`, `opened`: When it began, in microseconds.
        """
        was, now = np.flatnonzero(had), np.flatnonzero(has)
        self._handle.deleteTimer(was, ceil_ms(old[was] + self._horizon_us))
        self._handle.registerTimer(now, ceil_ms(opened[now] + self._horizon_us))

    def _output(self, rows: pa.Table, chosen: Bools, numbers_of_rows: Int64s) -> pa.Table:
        if not self.output_duplicates:
            return rows.filter(pa.array(chosen))
        return rows.append_column(NUMBER, array_of(numbers_of_rows, pa.int64()))

    def _rows_of_state(self, batch: KeyedBatch, chosen: Bools) -> pa.Table:
        keys, where = batch.keys.filter(pa.array(chosen)), pa.array(chosen)
        columns = dict(zip(keys.column_names, keys.columns, strict=True))
        columns |= {name: batch.states[self._state][f"row_{name}"].filter(where) for name in self._row_names}
        names = self._handle.input_schema.names
        return pa.table([columns[name] for name in names], names=names)

    def _with_stored_rows(self, batch: KeyedBatch) -> tuple[pa.Table, Int64s, Bools]:
        """Return (rows, keys, stored): each key's stored row (True) before its new rows, and the rows' keys."""
        known = batch.exists[self._state]
        old = self._rows_of_state(batch, known).cast(batch.rows.schema)
        owners = np.concatenate([np.flatnonzero(known), batch.key_of_row])
        order = np.argsort(owners, kind="stable")
        rows = pa.concat_tables([old, batch.rows]).take(pa.array(order))
        return rows, owners[order], order < old.num_rows

    def _last_rows(self, rows: pa.Table, owners: Int64s, walk: _Walk) -> tuple[pa.Table, Int64s]:
        """Return (output, last): the output rows, and for each key the position of the row to store; -1 stores none."""
        winners, displaced = running_winners(numbers(whole(rows[self._handle.event_time])), walk)
        at_end = np.append(walk.begins[1:] - 1, len(owners) - 1)
        of_horizon = winners[at_end]
        is_last = np.append(np.diff(owners[walk.begins]) != 0, [True])
        last = np.full(len(walk.duplicates), -1, np.int64)
        last[owners[walk.begins[is_last]]] = of_horizon[is_last]
        ended = of_horizon[~is_last & (of_horizon >= 0)]
        at = [np.flatnonzero(~walk.timed), ended]
        number = [np.zeros(len(part), np.int64) for part in at]
        if self.output_duplicates:
            came = np.flatnonzero(displaced >= 0)
            at.append(displaced[came])
            number.append(walk.numbers[came])
        chosen = rows.take(pa.array(np.concatenate(at)))
        return self._output(chosen, np.ones(chosen.num_rows, np.bool_), np.concatenate(number)), last


@frozen
class _Seen:
    known: Bools
    duplicates: Int64s
    # Event time in microseconds that opened each key's horizon; None if the setting `horizon` is None.
    opened: Int64s | None
    # True for each key that got its state while `horizon` was None. The horizon of such a key never ends.
    for_ever: Bools


@frozen
class _Walk:
    """Rows of a batch, sorted by key and cut into horizons: a horizon is a row and the duplicates of this row."""

    timed: Bools  # For each row, True if its event time is not null.
    opens: Bools  # For each row, True if it opens a horizon.
    begins: Int64s  # For each horizon, the position of its first row in the batch.
    horizon_of_row: Int64s  # For each row, the index of its horizon.
    numbers: Int64s  # For each row, its number among the horizon's duplicates; 0 if it is none.
    duplicates: Int64s  # For each key, the number of duplicates of its last horizon.
    opened_by: Int64s  # For each key, the last row that opened a horizon; -1 if no row did.


def opening_rows(times: Int64s, candidates: Bools, owners: Int64s, limits: Int64s, horizon: int) -> Bools:
    """Return True for each row that opens a horizon. `candidates`: True for rows that may open one.

    `owners`, `limits`: The key of each row, and the end of each key's open horizon. The first candidate row of the key
    at or after its limit opens the next horizon, whose end becomes the key's new limit.
    """
    limits = limits.copy()
    opens = np.zeros(len(times), np.bool_)
    left = np.flatnonzero(candidates)
    for _ in range(_ROUNDS):
        left = left[times[left] >= limits[owners[left]]]
        if not len(left):
            return opens
        first = left[np.flatnonzero(np.diff(owners[left], prepend=-1))]
        opens[first] = True
        limits[owners[first]] = times[first] + horizon
    limit_of = limits.tolist()
    for row, owner, time in zip(left.tolist(), owners[left].tolist(), times[left].tolist(), strict=True):
        if time >= limit_of[owner]:
            opens[row] = True
            limit_of[owner] = time + horizon
    return opens


def walk_of(owners: Int64s, starts: Int64s, stored: Bools, timed: Bools, opens: Bools, seen: _Seen) -> _Walk:
    """Cut rows, sorted by key, into horizons, and number their duplicates. `starts`: The first row of each key."""
    duplicate = timed & ~opens & ~stored
    is_begin = opens.copy()
    is_begin[starts] = True
    begins = np.flatnonzero(is_begin)
    horizon_of_row = np.cumsum(is_begin) - 1
    running = np.cumsum(duplicate)
    before: Int64s = running[begins] - duplicate[begins]
    carried = np.where(opens[begins], 0, seen.duplicates[owners[begins]])
    number = running + (carried - before)[horizon_of_row]
    ends = np.append(starts[1:], len(owners)) - 1
    duplicates, opened_by = seen.duplicates.copy(), np.full(len(seen.known), -1, np.int64)
    duplicates[owners[starts]] = number[ends]
    last = np.maximum.accumulate(np.where(opens, np.arange(len(owners)), -1))[ends]
    opened_by[owners[starts]] = np.where(last >= starts, last, -1)
    return _Walk(
        timed=timed,
        opens=opens,
        begins=begins,
        horizon_of_row=horizon_of_row,
        numbers=np.where(duplicate, number, 0),
        duplicates=duplicates,
        opened_by=opened_by,
    )


def running_winners(times: Int64s, walk: _Walk) -> tuple[Int64s, Int64s]:
    """Return (winners, losers): for each row, its horizon's winner up to this row, and the row that loses at this row.

    The winner is the row with the latest event time, and the last one of rows with equal event times. If a row wins,
    the former winner loses. Otherwise the row itself loses. Rows are given by position; -1 stands for no row.
    """
    rows = np.arange(len(times))
    rank = np.zeros(len(times), np.int64)
    rank[walk.timed] = np.unique(times[walk.timed], return_inverse=True)[1] + 1
    # A rank is at most the number of rows. So one running maximum serves all horizons: each value of a later horizon is
    # greater than all values of an earlier horizon.
    placed = walk.horizon_of_row * (len(times) + 1) + rank
    counts = walk.timed & (placed == np.maximum.accumulate(placed))
    winners = np.maximum.accumulate(np.where(counts, rows, -1))
    begin_of_row = walk.begins[walk.horizon_of_row]
    winners = np.where(winners >= begin_of_row, winners, -1)
    before = np.where(rows > begin_of_row, np.roll(winners, 1), -1)
    displaced = np.where(walk.numbers > 0, np.where(counts, before, rows), -1)
    return winners, displaced
