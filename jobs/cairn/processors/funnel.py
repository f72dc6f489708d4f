"""A ready-made processor that follows ordered steps."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import ArrayType, BooleanType, IntegerType, ShortType, StructField, StructType

from cairn.aggregates.column_types import is_scalar
from cairn.aggregates.state_fields import nullable
from cairn.arrow_processor import BatchResult, KeyedBatch
from cairn.numpy_columns import Bools, Int64s, array_of, numbers, valid_rows, whole
from cairn.processors.ordering import type_of
from cairn.processors.ready_made import (
    MICROSECOND,
    ReadyMade,
    ceil_ms,
    check_free,
    check_length,
    keys_at,
    made_with,
    type_of_event_time,
    wrong_setting,
)
from cairn.spark_versions import to_arrow_type
from state_backend.values.errors import UsageError
from state_backend.values.frozen import frozen

STATE = "rows"
AT, STEP = "at", "step"
START, END, REACHED, LAST, COMPLETED, TIMES = (
    "funnel_start",
    "funnel_end",
    "steps_reached",
    "last_step",
    "is_completed",
    "step_times",
)
_NO_LIMIT = np.iinfo(np.int64).max
# Each round of `_settled_funnels` finds the next funnel of every key with NumPy. After 32 rounds, Python goes through
# the remaining funnels one by one, because a round over few keys is slower.
_ROUNDS = 32


class Funnel(ReadyMade):
    """Processor that emits one row for each completed or abandoned funnel.

    The rows of a key are read in the order of their event times; rows with equal times in the order of arrival. A row
    of the first step opens a funnel. From there, the next row of the second step counts, then the next row of the third
    step, and so on. Other rows are ignored. A funnel is completed by a row of the last step, if this row comes before
    `within` has passed since the opening row. Otherwise the funnel is abandoned.

    - As long as a funnel has reached the first step only, a further row of the first step opens it anew.
    - The next funnel of the key begins after the last row that counted. So a row counts in one funnel at most.

    The output has a row for each funnel: the key columns, `funnel_start` and `funnel_end` (times of the opening row and
    of the last row that counted), `steps_reached`, `last_step`, `is_completed` and `step_times`, an array with the time
    of each reached step. A completed funnel is emitted in the interval in which the watermark reaches its last step, an
    abandoned one when the watermark has passed `funnel_start` plus `within`.

    The state `rows` is a list of event time and step of the rows that may still count. Timers emit funnels and remove
    rows.

    Attributes:
        step: The column that names the step of a row. Rows with other values in it are ignored.
        steps: Values of this column, in order: at least two, all different.
        within: Length of time in which the last step must follow the first one.

    Example:
        class Checkout(Funnel):
            step = "page"
            steps = ("cart", "address", "payment")
            within = timedelta(hours=1)
    """

    settings: ClassVar[tuple[str, ...]] = ("step", "steps", "within")
    column_settings: ClassVar[tuple[str, ...]] = ("step",)
    step: str
    steps: Sequence[Any]
    within: timedelta

    @classmethod
    def check_settings(cls) -> None:
        step, steps = getattr(cls, "step", None), getattr(cls, "steps", None)
        if not isinstance(step, str) or not step:
            raise wrong_setting(cls, "step", 'name the column with the steps, as in step = "page"')
        if not isinstance(steps, list | tuple) or len(steps) < 2 or None in steps or not _all_different(steps):
            raise wrong_setting(cls, "steps", 'name at least two different steps, as in steps = ("cart", "payment")')
        check_length(cls, "within")

    def init(self, handle: Any) -> None:
        self.check_settings()
        self.deriveOutputSchema(handle)
        self._handle = handle
        self._of_time = type_of_event_time(type(self).__name__, "Funnel", handle)
        self._within = self.within // MICROSECOND
        self._values = self._step_values(handle)
        self._rows = handle.getListState(
            STATE,
            made_with(
                self, ("step", "steps", "within"), [StructField(AT, self._of_time), StructField(STEP, ShortType())]
            ),
        )

    def deriveOutputSchema(self, handle: Any) -> StructType:
        self.check_settings()
        owner = type(self).__name__
        of = type_of_event_time(owner, "Funnel", handle)
        self._step_values(handle)
        added = [
            StructField(START, of),
            StructField(END, of),
            StructField(REACHED, IntegerType()),
            StructField(LAST, type_of(owner, "step", self.step, handle)),
            StructField(COMPLETED, BooleanType()),
            StructField(TIMES, ArrayType(of)),
        ]
        for field in added:
            check_free(owner, field.name, handle.key_schema.names, "Funnel", "a key column is named")
        return StructType([*nullable(handle.key_schema), *added])

    def _step_values(self, handle: Any) -> pa.Array:
        owner = type(self).__name__
        of = type_of(owner, "step", self.step, handle)
        try:
            if is_scalar(of):
                values = pa.array(list(self.steps), to_arrow_type(of))
                # Arrow converts 2.7 to the integer 2 without an error, so integers are compared with the given values.
                if not pa.types.is_integer(values.type) or values.to_pylist() == list(self.steps):
                    return values
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            pass
        raise UsageError(
            f"{owner}.steps is {self.steps!r}, but column {self.step!r} is {of.simpleString()}; name values of this column"
        )

    def handleBatch(self, batch: KeyedBatch) -> BatchResult:
        self._times_of(batch)
        found = pc.index_in(whole(batch.rows[self.step]), value_set=self._values)
        chosen = np.flatnonzero(valid_rows(found))
        steps, owners = numbers(found)[chosen].astype(np.int16), batch.key_of_row[chosen]
        if not len(chosen):
            return BatchResult()
        at = whole(batch.rows[self._handle.event_time]).take(pa.array(chosen))
        times = numbers(at)
        self._rows.appendList(owners, pa.table({AT: at, STEP: array_of(steps, pa.int16())}))
        # Three kinds of timers: at a row of the last step, which may complete a funnel; `within` after a row of the
        # first step, when its funnel is abandoned; and at a key's last row, to remove rows that belong to no funnel.
        last, first = steps == len(self.steps) - 1, steps == 0
        begins = np.flatnonzero(np.diff(owners, prepend=-1))
        self._handle.registerTimer(
            np.concatenate([owners[last], owners[first], owners[begins]]),
            ceil_ms(np.concatenate([times[last], times[first] + self._within, np.maximum.reduceat(times, begins)])),
        )
        return BatchResult()

    def handleExpiredTimers(self, batch: KeyedBatch) -> BatchResult:
        """Emit the funnels that no later row can change, and remove the rows that can't count any more."""
        held = self._rows.get()
        owners, times = held.key_of_row, numbers(whole(held.rows[AT]))
        order = np.lexsort((times, owners))
        steps = numbers(whole(held.rows[STEP]))[order]
        limit = batch.time.getCurrentWatermarkInMs() * 1000
        line = _TimeLine(owners=owners[order], times=times[order], steps=steps, count=len(self.steps))
        funnels = _funnels_of(line, self._within)
        chosen, keep_from = _settled_funnels(line, funnels, limit, batch.keys.num_rows)
        kept = np.zeros(len(order), np.bool_)
        kept[order] = (np.arange(len(order)) >= keep_from[line.owners]) | (line.times > limit)
        counts = np.bincount(owners, minlength=batch.keys.num_rows)
        left = np.bincount(owners[kept], minlength=batch.keys.num_rows)
        self._rows.clear(np.flatnonzero((left == 0) & (counts > 0)))
        write = kept & (left < counts)[owners]
        self._rows.put(owners[write], held.rows.filter(pa.array(write)))
        return BatchResult(output=self._output(batch, line, funnels, chosen))

    def _output(self, batch: KeyedBatch, line: _TimeLine, funnels: _Funnels, chosen: Int64s) -> pa.Table:
        of = to_arrow_type(self._of_time)
        opens, reached = funnels.opens[chosen], funnels.reached[chosen]
        times = funnels.step_times[chosen]
        at = pa.array(np.append(0, np.cumsum(reached)), pa.int32())
        passed = times[np.arange(line.count) < reached[:, None]]
        columns = {
            START: array_of(line.times[opens], of),
            END: array_of(line.times[funnels.last[chosen]], of),
            REACHED: array_of(reached.astype(np.int32), pa.int32()),
            LAST: self._values.take(pa.array(reached - 1)),
            COMPLETED: pa.array(reached == line.count),
            TIMES: pa.ListArray.from_arrays(at, array_of(passed, of)),
        }
        return pa.table({**keys_at(batch, line.owners[opens]), **columns})


@frozen
class _TimeLine:
    """Rows of many keys, ascending by key and time."""

    owners: Int64s  # For each row, the position of its key in the batch.
    times: Int64s  # Event times in microseconds.
    steps: Int64s  # For each row, the number of its step, from 0.
    count: int  # Number of steps in a complete funnel.

    def next_of(self, step: int, rows: Int64s) -> tuple[Int64s, Bools]:
        """Return (next, exists): for each of `rows`, its key's next row with this step; valid if `exists` is True."""
        of_step = np.flatnonzero(self.steps == step)
        if not len(of_step):
            return rows, np.zeros(len(rows), np.bool_)
        place = np.searchsorted(of_step, rows, "right")
        found = of_step[np.minimum(place, len(of_step) - 1)]
        return found, (place < len(of_step)) & (self.owners[found] == self.owners[rows])


@frozen
class _Funnels:
    """The possible funnels of many keys: one for each row of the first step, as if this row opened a funnel."""

    opens: Int64s  # Position of the funnel's opening row.
    restarted: Int64s  # Index of the funnel that replaces this one, since further rows of the first step open it anew.
    last: Int64s  # Position of the last row that counted.
    reached: Int64s  # Number of reached steps.
    step_times: Int64s  # For each step, the event time of its row.
    settled: Int64s  # The watermark from which on no further row can change the funnel.
    next: Int64s  # Index of the first funnel that opens after `last`.


def _funnels_of(line: _TimeLine, within: int) -> _Funnels:
    opens = np.flatnonzero(line.steps == 0)
    begin = line.times[opens]
    last, reached, alive = opens.copy(), np.ones(len(opens), np.int64), np.ones(len(opens), np.bool_)
    step_times = np.zeros((len(opens), line.count), np.int64)
    step_times[:, 0] = begin
    for step in range(1, line.count):
        found, there = line.next_of(step, last)
        alive = alive & there & (line.times[found] < begin + within)
        last = np.where(alive, found, last)
        reached += alive
        step_times[:, step] = line.times[last]
    again = np.zeros(len(opens), np.bool_)
    second, there = line.next_of(1, opens)
    again[:-1] = (line.owners[opens[1:]] == line.owners[opens[:-1]]) & (begin[1:] - begin[:-1] < within)
    again[:-1] &= ~there[:-1] | (opens[1:] < second[:-1])
    ends = np.where(again, _NO_LIMIT, np.arange(len(opens)))
    return _Funnels(
        opens=opens,
        restarted=np.minimum.accumulate(ends[::-1])[::-1],
        last=last,
        reached=reached,
        step_times=step_times,
        settled=np.where(reached == line.count, line.times[last], begin + within),
        next=np.searchsorted(opens, last, "right"),
    )


def _settled_funnels(line: _TimeLine, funnels: _Funnels, limit: int, keys: int) -> tuple[Int64s, Int64s]:
    """Follow the funnels of each of `keys` keys up to the first one that a row after the watermark `limit` can change.

    Return (settled, keep_from): the funnels before that one, and for each key the position of the first row to keep.
    """
    owners = line.owners[funnels.opens]
    keep_from = np.full(keys, len(line.owners))
    current = np.flatnonzero(np.diff(owners, prepend=-1))
    early = np.bincount(owners[line.times[funnels.opens] <= limit], minlength=keys)
    # For each key, the last funnel whose opening row is not after the watermark.
    last_early = np.full(keys, -1)
    last_early[owners[current]] = current + early[owners[current]] - 1
    chosen = []
    for round_ in range(_ROUNDS + 1):
        ends = funnels.restarted[current]
        settled = funnels.settled[ends] <= limit
        opened = np.minimum(ends, last_early[owners[current]])[~settled]
        stopped = current[~settled]
        there = opened >= stopped
        keep_from[owners[stopped[there]]] = funnels.opens[opened[there]]
        ends = ends[settled]
        if not len(ends):
            break
        if round_ == _ROUNDS:
            chosen.append(_one_by_one(funnels, owners, ends, limit, last_early, keep_from))
            break
        chosen.append(ends)
        following = funnels.next[ends]
        inside = following < len(owners)
        ends, following = ends[inside], following[inside]
        current = following[owners[following] == owners[ends]]
    return np.concatenate(chosen) if chosen else np.zeros(0, np.int64), keep_from


def _one_by_one(
    funnels: _Funnels, owners: Int64s, ends: Int64s, limit: int, last_early: Int64s, keep_from: Int64s
) -> Int64s:
    settled, following = (funnels.settled <= limit).tolist(), funnels.next.tolist()
    restarted, of_key, chosen = funnels.restarted.tolist(), owners.tolist(), []
    for end in ends.tolist():
        key, at = of_key[end], end
        while True:
            chosen.append(at)
            current = following[at]
            if current == len(of_key) or of_key[current] != key:
                break
            at = restarted[current]
            if not settled[at]:
                opened = min(at, int(last_early[key]))
                if opened >= current:
                    keep_from[key] = funnels.opens[opened]
                break
    return np.array(chosen, np.int64)


def _all_different(steps: Sequence[Any]) -> bool:
    try:
        return len(set(steps)) == len(steps)
    except TypeError:  # A list or dict has no hash, and is no value of a column of steps.
        return False
