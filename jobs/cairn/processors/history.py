"""A ready-made processor that keeps the history of each key: a slowly changing dimension of type 2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from pyspark.sql.types import BooleanType, StructField, StructType

from cairn.aggregates import nullable
from cairn.arrow_processor import BatchResult, KeyedBatch
from cairn.numpy_columns import Bools, Int64s, array_of, numbers, whole
from cairn.processors.ordering import type_of
from cairn.processors.ready_made import ReadyMade, ceil_ms, check_free, check_times, type_of_event_time, with_deleted
from state_backend.values.errors import UsageError

__all__ = ["History"]

STATE = "changes"
VALID_FROM, VALID_TO = "valid_from", "valid_to"


class History(ReadyMade):
    """Processor that emits the versions of each key, with the time in which each version is valid.

    A row of the input is a change: at its event time, the values of its key become those of the row. The version is
    valid until the key's next change. A later row with the same key and event time replaces the earlier row.

    The output has the columns of the input, without the event time and `deleted`, and the columns `valid_from` and
    `valid_to`. `valid_to` is null for the version that is valid now. In each interval, the output has each version that
    is new or changed. A sink that replaces the row with the same key and `valid_from` keeps the history. A version with
    equal `valid_from` and `valid_to` is to be deleted: a row that deletes the key at that time has replaced it.

    Out-of-order rows are allowed up to the pipeline's `watermark_delay`: a row between two changes ends the earlier
    version, and is valid until the later change.

    The state `changes` is a list of each key's changes: those after the watermark, and the last one before it. A
    deleted key leaves the state when the watermark has passed the deletion.

    Attributes:
        deleted: A boolean column; True in it deletes the key at the row's event time. None: no row deletes.

    Example:
        class CustomerHistory(History):
            deleted = "is_deleted"
    """

    # One call must have all rows of a key: an interval emits a version once, with its final `valid_to`.
    splits_keys = False
    settings: ClassVar[tuple[str, ...]] = ("deleted",)
    deleted: str | None = None

    @classmethod
    def check_settings(cls) -> None:
        """Check the class attributes.

        Raises:
            UsageError: A setting has a wrong value.
        """
        if cls.deleted is not None and not isinstance(cls.deleted, str):
            raise UsageError(
                f'{cls.__name__}.deleted is {cls.deleted!r}; name a boolean column, as in deleted = "is_deleted"'
            )

    def init(self, handle: Any) -> None:
        """Declare the list state `changes` with all input columns except the key.

        Args:
            handle: The handle that Cairn passes to each processor.

        Raises:
            UsageError: The pipeline has no event time, or a column does not fit.
        """
        owner = type(self).__name__
        self.deriveOutputSchema(handle)
        for name, setting in ((handle.event_time, "the event time"), (self.deleted, "deleted")):
            if name in handle.key_schema.names:
                raise UsageError(
                    f"{owner}: {setting} is the key column {name!r}; key=[...] must name the columns that stay equal"
                )
        if self.deleted is not None:
            of = type_of(owner, "deleted", self.deleted, handle)
            if not isinstance(of, BooleanType):
                raise UsageError(
                    f"{owner}.deleted names column {self.deleted!r}, which is {of.simpleString()}; name a boolean column"
                )
        self._handle = handle
        row = [f for f in nullable(handle.input_schema) if f.name not in handle.key_schema.names]
        self._names = [f.name for f in row]
        self._values = [name for name in self._names if name not in (handle.event_time, self.deleted)]
        self._changes = handle.getListState(STATE, StructType(with_deleted(self.deleted, row)))

    def deriveOutputSchema(self, handle: Any) -> StructType:
        """Return the schema of the output: the input columns, `valid_from` and `valid_to`.

        Args:
            handle: The handle that Cairn passes to each processor.

        Raises:
            UsageError: The pipeline has no event time, or the input has a column of the output.
        """
        owner = type(self).__name__
        of = type_of_event_time(owner, "History", handle)
        for name in (VALID_FROM, VALID_TO):
            check_free(owner, name, handle.input_schema.names, "History")
        values = [f for f in nullable(handle.input_schema) if f.name not in (handle.event_time, self.deleted)]
        return StructType([*values, StructField(VALID_FROM, of), StructField(VALID_TO, of)])

    def handleBatch(self, batch: KeyedBatch) -> BatchResult:
        """Merge the changes of a batch into the changes of their keys.

        Args:
            batch: All rows of many keys.

        Returns:
            The versions that are new or changed.

        Raises:
            ProcessorError: A row has no event time.
        """
        check_times(type(self).__name__, batch, self._handle.event_time)
        held = self._changes.get()
        columns = {
            name: pa.concat_arrays([whole(held.rows[name]).cast(batch.rows[name].type), whole(batch.rows[name])])
            for name in self._names
        }
        times = numbers(columns[self._handle.event_time])
        owners = np.concatenate([held.key_of_row, batch.key_of_row])
        line = _time_line(owners, times, self._deletions(columns), len(held.rows))
        self._keep(line, times, columns, batch.time.getCurrentWatermarkInMs())
        at = np.concatenate([line.order[line.put_out], line.replaced])
        ends = np.concatenate([line.ends[line.put_out], times[line.replaced]])
        valid = np.concatenate([line.has_end[line.put_out], np.ones(len(line.replaced), np.bool_)])
        of_key, rows = pa.array(owners[at]), pa.array(at)
        time_type = columns[self._handle.event_time].type
        output = {name: batch.keys[name].take(of_key) for name in batch.keys.column_names}
        output |= {name: columns[name].take(rows) for name in self._values}
        output[VALID_FROM] = array_of(times[at], time_type)
        output[VALID_TO] = array_of(ends, time_type, valid)
        return BatchResult(output=pa.table(output))

    def handleExpiredTimers(self, batch: KeyedBatch) -> BatchResult:
        """Drop changes that no later row can affect.

        Args:
            batch: The keys whose last change is before the watermark.

        Returns:
            An empty result: the versions have been emitted.
        """
        held = self._changes.get()
        columns = {name: whole(held.rows[name]) for name in self._names}
        times = numbers(columns[self._handle.event_time])
        line = _time_line(held.key_of_row, times, self._deletions(columns), len(times))
        self._keep(line, times, columns, batch.time.getCurrentWatermarkInMs())
        return BatchResult()

    def _deletions(self, columns: dict[str, pa.Array]) -> Bools:
        if self.deleted is None:
            return np.zeros(len(columns[self._handle.event_time]), np.bool_)
        return numbers(columns[self.deleted]).astype(np.bool_)

    def _keep(self, line: _TimeLine, times: Int64s, columns: dict[str, pa.Array], watermark_ms: int) -> None:
        """Store the changes that a later row can affect.

        A key with several changes, or with a deletion, gets a timer at its last change. Then the others can be removed.
        """
        # A missing watermark is 0 too. Then no change is settled, not even one before 1970.
        settled = times[line.order] <= (watermark_ms * 1000 if watermark_ms else np.iinfo(np.int64).min)
        next_settled = np.append(settled[1:], [False]) & line.has_end
        keep = ~(settled & (next_settled | line.deletes))
        of_key = line.owners
        self._changes.clear(np.unique(of_key[~keep]))
        kept = pa.array(line.order[keep])
        self._changes.put(of_key[keep], pa.table({name: columns[name].take(kept) for name in self._names}))
        old = self._handle.listTimers(np.unique(of_key))
        self._handle.deleteTimer(np.unique(of_key)[old.key_of_row], old.rows["expiry_ms"])
        last = ~line.has_end & keep
        many = np.bincount(of_key[keep], minlength=of_key.max(initial=0) + 1)[of_key] > 1
        timed = last & (many | line.deletes) & ~settled
        self._handle.registerTimer(of_key[timed], ceil_ms(times[line.order[timed]]))


@dataclass(frozen=True, slots=True, kw_only=True)
class _TimeLine:
    """The changes of many keys in the order of their times: one for each key and time.

    Attributes:
        order: Position of each change in the rows.
        owners: Index of each change's key.
        deletes: True for each change that deletes its key.
        has_end: True for each change that is followed by another change of its key.
        ends: Time of the next change; 0 without one.
        put_out: True for each version that is new, or that ends at another time than before.
        replaced: Positions, in the rows, of the versions that a deletion at the same time has replaced.
    """

    order: Int64s
    owners: Int64s
    deletes: Bools
    has_end: Bools
    ends: Int64s
    put_out: Bools
    replaced: Int64s


def _time_line(owners: Int64s, times: Int64s, deletes: Bools, held: int) -> _TimeLine:
    """Order the changes by key and time. Of changes with equal key and time, the last row counts.

    Args:
        owners: Index of each row's key.
        times: Event time of each row.
        deletes: True for each row that deletes its key.
        held: Number of rows that come from the state. They are the first rows. No two of them have equal key and time.
    """
    order = np.lexsort((times, owners))
    of_key, at = owners[order], times[order]
    same = np.append((np.diff(of_key) == 0) & (np.diff(at) == 0), [False]) if len(order) else np.zeros(0, np.bool_)
    # Of rows with equal key and time, the held row is the first one, and the last one counts.
    begins = np.append([True], ~same[:-1]) if len(order) else same
    first_of_time = order[begins]
    order = order[~same]
    of_key, at, is_deletion, is_held = owners[order], times[order], deletes[order], order < held
    has_end = np.append(np.diff(of_key) == 0, [False]) if len(order) else np.zeros(0, np.bool_)
    ends = np.where(has_end, np.append(at[1:], [0]), 0) if len(order) else at
    old_order = np.lexsort((times[:held], owners[:held]))
    old_has_end = np.append(np.diff(owners[old_order]) == 0, [False]) if held else np.zeros(0, np.bool_)
    old_ends = np.zeros(held, np.int64)
    old_ends[old_order[:-1]] = np.where(old_has_end[:-1], times[old_order[1:]], 0)
    had_end = np.zeros(held, np.bool_)
    had_end[old_order] = old_has_end
    was = np.where(is_held, order, 0)
    moved = np.ones(len(order), np.bool_) if not held else (had_end[was] != has_end) | (old_ends[was] != ends)
    gone = is_deletion & (first_of_time < held) & ~deletes[first_of_time] & ~is_held
    return _TimeLine(
        order=order,
        owners=of_key,
        deletes=is_deletion,
        has_end=has_end,
        ends=ends,
        put_out=~is_deletion & (~is_held | moved),
        replaced=first_of_time[gone],
    )
