"""A ready-made processor that keeps the history of each key: a slowly changing dimension of type 2."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from pyspark.sql.types import BooleanType, StructField, StructType

from cairn.aggregates.state_fields import nullable
from cairn.arrow_processor import BatchResult, KeyedBatch
from cairn.numpy_columns import Bools, Int64s, array_of, booleans, numbers, same_values, whole
from cairn.processors.ordering import type_of
from cairn.processors.ready_made import (
    ReadyMade,
    ceil_ms,
    check_deleted,
    check_deleted_column,
    check_free,
    fields_beside_key,
    keys_at,
    type_of_event_time,
    with_deleted,
    wrong_setting,
)
from state_backend.values.errors import UsageError
from state_backend.values.frozen import frozen

STATE = "changes"
VALID_FROM, VALID_TO = "valid_from", "valid_to"
# Field of the state: True for a row that was emitted as a version. Null also means True: an old release without this
# field wrote the row.
MAKES_VERSION = "makes_version"


class History(ReadyMade):
    """Processor that emits the versions of each key, with the time in which each version is valid.

    A row of the input has the values of its key from the row's event time on. A row is a change, and begins a version,
    if it differs in a tracked column from the key's previous row by event time. The version is valid until the key's
    next change. Of two rows with the same key and event time, the one that came later replaces the other.

    The output has the columns of the input, without the event time and `deleted`, and the columns `valid_from` and
    `valid_to`. `valid_to` is null for the version that is valid now. In each interval, the output has each version that
    is new or changed. A sink that replaces the row with the same key and `valid_from` keeps the history. A version with
    equal `valid_from` and `valid_to` is to be deleted: a row that deletes the key at that time has replaced it, or a
    row that came later shows that nothing changed at that time.

    Out-of-order rows are allowed up to the pipeline's `watermark_delay`: a row between two changes ends the earlier
    version, and is valid until the later change.

    The state `changes` is a list of each key's rows: all rows after the watermark, and the last change before it. The
    field `makes_version` says which of them were emitted as versions. A deleted key leaves the state when the watermark
    has passed the deletion.

    Attributes:
        tracked: The columns whose change begins a version: a name, or a tuple of names. None: all columns except the
            key, the event time, `deleted`, and the columns of `Pipeline.order_by`. With the event time among them, each
            row begins a version.
        deleted: A boolean column; True in it deletes the key at the row's event time. None: no row deletes.

    Example:
        class CustomerHistory(History):
            tracked = ("city", "plan")
            deleted = "is_deleted"
    """

    # One call must have all rows of a key: an interval emits a version once, with its final `valid_to`.
    splits_keys = False
    settings: ClassVar[tuple[str, ...]] = ("tracked", "deleted")
    column_settings: ClassVar[tuple[str, ...]] = ("tracked", "deleted")
    tracked: str | tuple[str, ...] | None = None
    deleted: str | None = None

    @classmethod
    def check_settings(cls) -> None:
        check_deleted(cls)
        names = _find_tracked(cls.tracked)
        if names is not None and (not names or not all(isinstance(name, str) and name for name in names)):
            raise wrong_setting(cls, "tracked", 'name columns, as in tracked = ("city", "plan")')

    def init(self, handle: Any) -> None:
        owner = type(self).__name__
        self.deriveOutputSchema(handle)
        for name, setting in ((handle.event_time, "the event time"), (self.deleted, "deleted")):
            if name in handle.key_schema.names:
                raise UsageError(
                    f"{owner}: {setting} is the key column {name!r}; key=[...] must name the columns that stay equal"
                )
        if self.deleted is not None:
            check_deleted_column(self, handle)
        self._handle = handle
        row = fields_beside_key(handle)
        self._names = [f.name for f in row]
        self._values = [name for name in self._names if name not in (handle.event_time, self.deleted)]
        for name in _find_tracked(self.tracked) or ():
            type_of(owner, "tracked", name, handle)
            if name in (*handle.key_schema.names, self.deleted):
                raise UsageError(
                    f"{owner}.tracked names column {name!r}, which is a key column or `deleted`; leave it out"
                )
        self._compared = _find_tracked(self.tracked) or [name for name in self._values if name not in handle.order_by]
        check_free(owner, MAKES_VERSION, handle.input_schema.names, "History", "the state")
        fields = [*with_deleted(self.deleted, row), StructField(MAKES_VERSION, BooleanType())]
        self._changes = handle.getListState(STATE, StructType(fields))

    def deriveOutputSchema(self, handle: Any) -> StructType:
        owner = type(self).__name__
        of = type_of_event_time(owner, "History", handle)
        for name in (VALID_FROM, VALID_TO):
            check_free(owner, name, handle.input_schema.names, "History")
        values = [f for f in nullable(handle.input_schema) if f.name not in (handle.event_time, self.deleted)]
        return StructType([*values, StructField(VALID_FROM, of), StructField(VALID_TO, of)])

    def handleBatch(self, batch: KeyedBatch) -> BatchResult:
        self._times_of(batch)
        held = self._changes.get()
        columns = {
            name: pa.concat_arrays([whole(held.rows[name]).cast(batch.rows[name].type), whole(batch.rows[name])])
            for name in self._names
        }
        times = numbers(columns[self._handle.event_time])
        owners = np.concatenate([held.key_of_row, batch.key_of_row])
        deletes = self._deletions(columns)
        line = _time_line(owners, times)
        begins = self._begins(line, columns, deletes)
        self._keep(line, times, columns, deletes, begins, batch.time.getCurrentWatermarkInMs())
        was = self._select_emitted(held.rows, deletes)
        emitted = _select_emitted(
            line, owners, times, deletes, begins, was, self._replaced_alike(line, columns, len(was))
        )
        rows = pa.array(emitted.rows)
        time_type = columns[self._handle.event_time].type
        output = keys_at(batch, owners[emitted.rows])
        output |= {name: columns[name].take(rows) for name in self._values}
        output[VALID_FROM] = array_of(times[emitted.rows], time_type)
        output[VALID_TO] = array_of(emitted.ends, time_type, emitted.has_end)
        return BatchResult(output=pa.table(output))

    def handleExpiredTimers(self, batch: KeyedBatch) -> BatchResult:
        """Remove from the state the rows that no later row can affect, since the watermark has passed them."""
        held = self._changes.get()
        columns = {name: whole(held.rows[name]) for name in self._names}
        times, deletes = numbers(columns[self._handle.event_time]), self._deletions(columns)
        line = _time_line(held.key_of_row, times)
        # No new row has come, so the emitted versions stay, even if `tracked` or the release has changed since then.
        begins = self._select_emitted(held.rows, deletes)[line.order]
        self._keep(line, times, columns, deletes, begins, batch.time.getCurrentWatermarkInMs())
        return BatchResult()

    def _deletions(self, columns: dict[str, pa.Array]) -> Bools:
        if self.deleted is None:
            return np.zeros(len(columns[self._handle.event_time]), np.bool_)
        return booleans(columns[self.deleted])

    def _select_emitted(self, held: pa.Table, deletes: Bools) -> Bools:
        """Return True for each row of the state (`held`) that was emitted as a version; False for deletions."""
        made: Bools = booleans(held[MAKES_VERSION].fill_null(True)) & ~deletes[: len(held)]
        return made

    def _begins(self, line: _TimeLine, columns: dict[str, pa.Array], deletes: Bools) -> Bools:
        """Return True for each row that begins a version: the key's previous row differs, deletes, or is missing."""
        if not len(line.order):
            return np.zeros(0, np.bool_)
        later, earlier = pa.array(line.order[1:]), pa.array(line.order[:-1])
        same = ~line.begins_key[1:] & ~deletes[line.order[:-1]]
        for name in self._compared:
            same &= same_values(columns[name].take(later), columns[name].take(earlier))
        begins: Bools = ~deletes[line.order] & np.append([True], ~same)
        return begins

    def _replaced_alike(self, line: _TimeLine, columns: dict[str, pa.Array], held: int) -> Bools:
        """Return True for each row that the state has too, with equal key, time and values. `held`: Rows in state."""
        alike = line.first_of_time < held
        at = np.flatnonzero(alike & (line.order >= held))
        for name in self._values:
            new, old = (columns[name].take(pa.array(rows[at])) for rows in (line.order, line.first_of_time))
            alike[at] &= same_values(new, old)
        return alike

    def _keep(
        self,
        line: _TimeLine,
        times: Int64s,
        columns: dict[str, pa.Array],
        deletes: Bools,
        begins: Bools,
        watermark_ms: int,
    ) -> None:
        """Store the rows that a later row can affect. `begins`: True for rows that begin a version.

        A key with several rows or a deletion gets a timer at its last row. When it fires, other rows can be removed.
        """
        # A watermark of 0 means that there is none yet. Then no change is settled, not even one before 1970.
        settled = times[line.order] <= (watermark_ms * 1000 if watermark_ms else np.iinfo(np.int64).min)
        is_deletion = deletes[line.order]
        is_change = begins | is_deletion
        next_change = _next(is_change & settled, line.begins_key)
        keep = ~settled | (begins & (next_change < 0))
        of_key = line.owners
        self._changes.clear(np.unique(of_key[~keep]))
        kept = pa.array(line.order[keep])
        rows = {name: columns[name].take(kept) for name in self._names}
        self._changes.put(of_key[keep], pa.table({**rows, MAKES_VERSION: pa.array(begins[keep])}))
        old = self._handle.listTimers(np.unique(of_key))
        self._handle.deleteTimer(np.unique(of_key)[old.key_of_row], old.rows["expiry_ms"])
        last = line.ends_key & keep
        many = np.bincount(of_key[keep], minlength=of_key.max(initial=0) + 1)[of_key] > 1
        timed = last & (many | is_deletion) & ~settled
        self._handle.registerTimer(of_key[timed], ceil_ms(times[line.order[timed]]))


@frozen
class _TimeLine:
    """The rows of many keys, ascending by key and time: one row for each key and time."""

    order: Int64s  # Position of each row in the unsorted rows.
    owners: Int64s  # For each row, the position of its key in the batch.
    begins_key: Bools  # True for the first row of each key.
    ends_key: Bools  # True for the last row of each key.
    first_of_time: Int64s  # Of all rows with this key and time, the position of the one that came first.


def _time_line(owners: Int64s, times: Int64s) -> _TimeLine:
    """Sort rows by key and time, and leave out each row that a later row with the same key and time replaces."""
    order = np.lexsort((times, owners))
    of_key, at = owners[order], times[order]
    # True for a row that the next row replaces.
    same = np.append((np.diff(of_key) == 0) & (np.diff(at) == 0), [False])[: len(order)]
    first_of_time = order[np.append([True], ~same[:-1])[: len(order)]]
    order = order[~same]
    changes_key = np.diff(owners[order]) != 0
    return _TimeLine(
        order=order,
        owners=owners[order],
        begins_key=np.append([True], changes_key)[: len(order)],
        ends_key=np.append(changes_key, [True])[: len(order)],
        first_of_time=first_of_time,
    )


def _next(marks: Bools, begins_key: Bools) -> Int64s:
    """Return for each row the index of the next row of its key that `marks` marks; -1 if there is none."""
    count = len(marks)
    places = np.where(marks, np.arange(count), count)
    following = np.append(np.minimum.accumulate(places[::-1])[::-1][1:], [count])[:count]
    key = np.cumsum(begins_key)
    there = np.minimum(following, max(count - 1, 0))
    return np.where((following < count) & (key[there] == key), following, -1)


@frozen
class _Emitted:
    rows: Int64s
    ends: Int64s
    has_end: Bools


def _select_emitted(
    line: _TimeLine, owners: Int64s, times: Int64s, deletes: Bools, begins: Bools, was: Bools, alike: Bools
) -> _Emitted:
    """Return the versions to emit: new ones, changed ones, and those to delete, whose end equals their begin.

    `was`: For each row of the state, which come first in `owners`, `times` and `deletes`, True if it was emitted.
    `begins`, `alike`: For each row of `line`, True if it begins a version, and if the state has its equal.
    """
    held = len(was)
    following = _next(begins | deletes[line.order], line.begins_key)
    ends = np.where(following >= 0, times[line.order[following]], 0)
    # `before` and the `old_…` arrays describe the versions in the state, as they were before this batch.
    before = _time_line(owners[:held], times[:held])
    old_following = _next((was | deletes[:held])[before.order], before.begins_key)
    old_ends, had_end = np.zeros(held, np.int64), np.zeros(held, np.bool_)
    had_end[before.order] = old_following >= 0
    old_ends[before.order] = np.where(old_following >= 0, times[before.order[old_following]], 0)
    replaced = np.where(line.first_of_time < held, line.first_of_time, 0)
    was_version = (line.first_of_time < held) & (was[replaced] if held else False)
    unchanged = was_version & alike
    if held:
        unchanged &= (had_end[replaced] == (following >= 0)) & (old_ends[replaced] == ends)
    put_out = begins & ~unchanged
    gone = line.first_of_time[was_version & ~begins]
    return _Emitted(
        rows=np.concatenate([line.order[put_out], gone]),
        ends=np.concatenate([ends[put_out], times[gone]]),
        has_end=np.concatenate([(following >= 0)[put_out], np.ones(len(gone), np.bool_)]),
    )


def _find_tracked(value: Any) -> tuple[Any, ...] | None:
    return None if value is None else tuple(value) if isinstance(value, tuple | list) else (value,)
