"""A ready-made processor that aggregates rows in sessions."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from pyspark.sql.types import ByteType, DayTimeIntervalType, IntegerType, LongType, ShortType, StructField, StructType

from cairn.aggregates.groups import Groups
from cairn.arrow_processor import BatchResult, KeyedBatch
from cairn.numpy_columns import Int64s, array_of, numbers, valid_rows, whole
from cairn.processors.ordering import type_of
from cairn.processors.ready_made import MICROSECOND, ceil_ms, key_of_row_text, within_bounds, wrong_setting
from cairn.processors.windows import DELETED, VERSION, Windows, are_in, is_sorted, join_tables, of_open_key, versions_of
from state_backend.values.errors import ProcessorError, UsageError
from state_backend.values.frozen import frozen
from state_backend.values.time_bounds import LONGEST_US, check_length_of_time

STATE = "sessions"
START, END = "session_start", "session_end"
_SECOND = 1_000_000


class SessionWindow(Windows):
    """Processor that emits aggregates per key and session.

    A row keeps its session open for a gap: from its event time up to event time plus gap. A row within this time, or
    exactly at its end, belongs to the same session. A late row may join two sessions: they merge. A subclass declares
    its aggregates as class attributes, as for `RunningAggregate`.

    The output has a row for each session: the key columns, `session_start`, `session_end` and the aggregates.
    `session_start` is the event time of the first row. `session_end` is the latest event time plus gap. A session is
    emitted in the interval in which the watermark passes its end. A row counts until the watermark passes its event
    time plus `gap`. If `gap` is a column, the row counts until the watermark passes its event time.

    The state `sessions` is a map from `session_start` to `session_end` and the aggregates of each open session. A timer
    emits the session and removes it. A session that opens and closes in the same interval never enters the state.

    With `early` or `allowed_lateness`, a session is emitted before it closes. `version` numbers the rows of a
    `session_start` from 1. If a late row changes the begin of a session, or merges two sessions, then the rows that
    were emitted under another `session_start` are wrong. The output has one more row for each such `session_start`, in
    which `is_deleted` is true, and `session_end` and the aggregates are null. A sink deletes the session with the same
    key and `session_start`.

    Attributes:
        gap: Length of time, or the name of a column with the gap of each row: an interval, or an integer of seconds.
        early: True also emits a session in each interval with new rows for it, as one row. The output then has the
            columns `version`, `is_final` and `is_deleted`.
        allowed_lateness: Part of the watermark delay. A session is emitted when the watermark reaches its end minus
            this time. Later rows lead to corrected rows. The output has the columns `version` and `is_deleted`.

    Example:
        class Visits(SessionWindow):
            gap = timedelta(minutes=30)
            pages = Count()
            last_page = Last("page")
    """

    settings: ClassVar[tuple[str, ...]] = ("gap", "early", "allowed_lateness")
    column_settings: ClassVar[tuple[str, ...]] = ("gap",)
    bounds: ClassVar[tuple[str, str]] = (START, END)
    merges: ClassVar[bool] = True
    gap: timedelta | str

    @classmethod
    def check_settings(cls) -> None:
        gap = getattr(cls, "gap", None)
        if not (isinstance(gap, timedelta) and gap > timedelta(0)) and not (isinstance(gap, str) and gap):
            raise wrong_setting(
                cls, "gap", 'write gap = timedelta(minutes=30), or name a column, as in gap = "gap_seconds"'
            )
        if isinstance(gap, timedelta):
            check_length_of_time(f"{cls.__name__}.gap", gap)
        super().check_settings()

    def _more(self) -> list[str]:
        return [*super()._more(), *([DELETED] if self._is_versioned else [])]

    def init(self, handle: Any) -> None:
        parts = self._declare(handle)
        if isinstance(self.gap, str):
            owner = type(self).__name__
            of = type_of(owner, "gap", self.gap, handle)
            if not isinstance(of, DayTimeIntervalType | LongType | IntegerType | ShortType | ByteType):
                raise UsageError(
                    f"{owner}.gap names column {self.gap!r}, which is {of.simpleString()}; name a column with an interval, or with an integer of seconds"
                )
            self._gap_unit = 1 if isinstance(of, DayTimeIntervalType) else _SECOND
        self._carried: Int64s = np.zeros(0, np.int64)
        values = [StructField(END, self._of_time), *parts, *([StructField(VERSION, LongType())] * self._is_versioned)]
        self._sessions = handle.getMapState(STATE, StructType([StructField(START, self._of_time)]), StructType(values))

    def handleBatch(self, batch: KeyedBatch) -> BatchResult:
        times, gaps = self._times_of(batch), self._gaps(batch)
        starts = within_bounds(times, 0, gaps)
        stored = self._read_stored()
        line = _sessions_of(stored, batch.key_of_row, starts, starts + gaps, self._carried)
        old = self._old_parts(batch, stored, line)
        order = np.argsort(line.of_row, kind="stable")
        rows = batch.rows if is_sorted(order) else batch.rows.take(pa.array(order))
        counts = np.bincount(line.of_row, minlength=len(line.owners))
        arrivals = self._arrivals(batch)
        arrivals.numbers[:] = arrivals.numbers[order]
        some = np.flatnonzero(counts)
        at = np.append(0, np.cumsum(counts[some])).astype(np.int64)
        keyed = self._windows_of(batch, line.owners[some], line.begins[some], rows, at)
        if len(some) == len(counts):
            parts, values = self._step(Groups(keyed, arrivals), old)
        else:
            parts, values = self._with_untouched(
                batch, line, old, some, self._step(Groups(keyed, arrivals), old.take(pa.array(some)))
            )
        return BatchResult(output=self._settle(batch, stored, line, parts, values))

    def handleExpiredTimers(self, batch: KeyedBatch) -> BatchResult:
        """Emit the sessions that are due, and remove those that the watermark has passed."""
        stored = self._read_stored()
        due_ms = batch.time.getCurrentWatermarkInMs()
        ended = ceil_ms(stored.ends) <= due_ms
        put_out = self._is_due(stored.ends, stored.versions, due_ms)
        at = np.flatnonzero(put_out)
        owners, begins, ends = stored.owners[at], stored.begins[at], stored.ends[at]
        values = self._values(batch, owners, begins, stored.parts.take(pa.array(at)))
        output = self._output(batch, owners, (begins, ends), values, stored.versions[at] + 1, ended[at])
        gone = np.flatnonzero(ended)
        self._sessions.removeKey(stored.owners[gone], self._user_keys(stored.begins[gone]))
        first = np.flatnonzero(put_out & ~ended)
        if len(first):
            versions = np.ones(len(first), np.int64)
            self._write(
                stored.owners[first],
                stored.begins[first],
                stored.ends[first],
                stored.parts.take(pa.array(first)),
                versions,
            )
        stays = np.flatnonzero(~ended)
        self._handle.registerTimer(
            stored.owners[stays], self._due_after(stored.ends[stays], (stored.versions + put_out)[stays])
        )
        return BatchResult(output=output)

    def _counts_until(self, times: Int64s) -> Int64s:
        # If each row has its own gap, a row is late from its event time on: else it could reopen a closed session.
        if not isinstance(self.gap, timedelta):
            return times
        gap = self.gap // MICROSECOND
        return within_bounds(times, 0, gap) + gap

    def _gaps(self, batch: KeyedBatch) -> Int64s:
        if isinstance(self.gap, timedelta):
            return np.full(batch.rows.num_rows, self.gap // MICROSECOND, np.int64)
        column = whole(batch.rows[self.gap])
        gaps = numbers(column).astype(np.int64)
        wrong = (gaps <= 0) | ~valid_rows(column)
        if wrong.any():
            row = int(np.argmax(wrong))
            raise ProcessorError(
                f"{type(self).__name__}: a row of key {key_of_row_text(batch, row)} has no gap: its {self.gap!r} is {column[row].as_py()}; filter or fill such rows in the source"
            )
        return np.minimum(gaps, LONGEST_US // self._gap_unit) * self._gap_unit

    def _read_stored(self) -> _Stored:
        entries = self._sessions.iterator()
        return _Stored(
            owners=entries.key_of_row,
            begins=numbers(whole(entries.keys[START])),
            ends=numbers(whole(entries.values[END])),
            versions=versions_of(entries.values),
            parts=entries.values.select(self._part_names()),
        )

    def _old_parts(self, batch: KeyedBatch, stored: _Stored, line: _Sessions) -> pa.Table:
        """Return the stored aggregates of each changed session (null: a new one), merged if several became one."""
        counts = np.bincount(line.of_member, minlength=len(line.owners))
        first = np.full(len(line.owners), -1, np.int64)
        first[line.of_member[::-1]] = line.members[::-1]
        many = np.flatnonzero(counts > 1)
        if not len(many):
            return stored.parts.take(pa.array(first, mask=first < 0))
        merging = counts[line.of_member] > 1
        at = np.append(0, np.cumsum(counts[many])).astype(np.int64)
        merged = self._merge(
            batch, line.owners[many], line.begins[many], stored.parts.take(pa.array(line.members[merging])), at
        )
        first[many] = len(stored.owners) + np.arange(len(many))
        return join_tables([stored.parts, merged.cast(stored.parts.schema)]).take(pa.array(first, mask=first < 0))

    def _with_untouched(self, batch: KeyedBatch, line: _Sessions, old: pa.Table, some: Int64s, step: Any) -> Any:
        """Add to `step`, the result for the sessions `some`, those that only an earlier batch changed, in order."""
        parts, values = step
        rest = np.setdiff1d(np.arange(len(line.owners)), some)
        untouched = old.take(pa.array(rest))
        more = self._values(batch, line.owners[rest], line.begins[rest], untouched)
        place = pa.array(np.argsort(np.concatenate([some, rest])))
        values = {name: pa.concat_arrays([values[name], more[name]]).take(place) for name in values}
        return join_tables([parts, untouched.select(parts.column_names).cast(parts.schema)]).take(place), values

    def _settle(
        self, batch: KeyedBatch, stored: _Stored, line: _Sessions, parts: pa.Table, values: Any
    ) -> pa.Table | None:
        """Store the changed sessions, move their timers, and return the output rows; None if there are none."""
        owners, begins, ends, due_ms = line.owners, line.begins, line.ends, self._handle.due_ms
        waits = of_open_key(batch, owners)
        self._carried = begins[waits]
        # Arrays with one element for each session after merging. `versions`: number of rows emitted earlier with this
        # `session_start`. `known`: True if the session contains a stored session that was emitted.
        member_owners, member_versions = stored.owners[line.members], stored.versions[line.members]
        same_begin = stored.begins[line.members] == begins[line.of_member]
        versions = np.zeros(len(owners), np.int64)
        versions[line.of_member[same_begin]] = member_versions[same_begin]
        known = np.zeros(len(owners), np.bool_)
        known[line.of_member[member_versions > 0]] = True
        closes = ~waits & (ceil_ms(ends) <= due_ms)
        put_out = ~waits & (self.early | known | (ceil_ms(ends - self._lateness) <= due_ms))
        changed = versions + put_out
        keep = np.flatnonzero(~closes)
        # Remove stored sessions that close or whose start changed.
        gone = line.members[closes[line.of_member] | ~same_begin]
        self._sessions.removeKey(stored.owners[gone], self._user_keys(stored.begins[gone]))
        self._write(owners[keep], begins[keep], ends[keep], parts.take(pa.array(keep)), changed[keep])
        old_due = self._due_after(stored.ends[line.members], member_versions)
        new_due = self._due_after(ends, changed)
        stays = same_begin & ~closes[line.of_member] & (old_due == new_due[line.of_member])
        moved = np.flatnonzero(~stays)
        if len(moved):
            # Do not delete a timer that another open session of the key shares.
            other = np.ones(len(stored.owners), np.bool_)
            other[line.members[moved]] = False
            dues = self._due_after(stored.ends[other], stored.versions[other])
            moved = moved[~are_in((member_owners[moved], old_due[moved]), (stored.owners[other], dues))]
            self._handle.deleteTimer(member_owners[moved], old_due[moved])
        has_timer = closes.copy()
        has_timer[line.of_member[stays]] = True
        self._handle.registerTimer(owners[~has_timer], new_due[~has_timer])
        wrong = np.flatnonzero(~same_begin & (member_versions > 0))
        outputs = []
        if put_out.any():
            at = np.flatnonzero(put_out)
            chosen = values if len(at) == len(owners) else {n: c.take(pa.array(at)) for n, c in values.items()}
            outputs.append(self._output(batch, owners[at], (begins[at], ends[at]), chosen, changed[at], closes[at]))
        if len(wrong):
            outputs.append(
                self._deletions(
                    batch, member_owners[wrong], stored.begins[line.members[wrong]], member_versions[wrong] + 1, values
                )
            )
        return pa.concat_tables(outputs) if outputs else None

    def _deletions(self, batch: KeyedBatch, owners: Int64s, begins: Int64s, versions: Int64s, values: Any) -> pa.Table:
        count = len(owners)
        nothing = {name: pa.nulls(count, column.type) for name, column in values.items()}
        rows = self._output(batch, owners, (begins, begins), nothing, versions, np.zeros(count, np.bool_))
        for name, column in ((END, pa.nulls(count, rows[END].type)), (DELETED, pa.array(np.ones(count, np.bool_)))):
            rows = rows.set_column(rows.column_names.index(name), name, column)
        return rows

    def _write(self, owners: Int64s, begins: Int64s, ends: Int64s, parts: pa.Table, versions: Int64s) -> None:
        values = parts.append_column(END, self._times(ends))
        if self._is_versioned:
            values = values.append_column(VERSION, array_of(versions.astype(np.int64), pa.int64()))
        self._sessions.updateValue(owners, self._user_keys(begins), values)


@frozen
class _Stored:
    """Open sessions in the state, ascending by key and begin."""

    owners: Int64s  # For each session, the position of its key in the batch.
    begins: Int64s  # Event time of the first row, in microseconds.
    ends: Int64s  # Latest event time plus gap, in microseconds.
    versions: Int64s  # Number of rows that were emitted for each session.
    parts: pa.Table  # The stored fields of the aggregates.


@frozen
class _Sessions:
    """Changed sessions of many keys, ascending by key and begin."""

    owners: Int64s  # For each session, the position of its key in the batch.
    begins: Int64s
    ends: Int64s
    of_row: Int64s  # For each row of the batch, the index of its session.
    members: Int64s  # Indexes of the stored sessions that became part of a changed session.
    of_member: Int64s  # For each element of `members`, the index of the changed session.


def _sessions_of(stored: _Stored, owners: Int64s, starts: Int64s, ends: Int64s, carried: Int64s) -> _Sessions:
    """Merge rows and stored sessions. Return the sessions with new rows, and those whose begins `carried` has."""
    held = len(stored.owners)
    all_owners = np.concatenate([stored.owners, owners])
    all_starts = np.concatenate([stored.begins, starts])
    all_ends = np.concatenate([stored.ends, ends])
    same_key = np.diff(all_owners) == 0
    if held or ((np.diff(all_starts) < 0) & same_key).any():
        order = np.lexsort((all_starts, all_owners))
        all_owners, all_starts, all_ends = all_owners[order], all_starts[order], all_ends[order]
    else:
        order = np.arange(len(all_owners))
    opens = np.ones(len(order), np.bool_)
    opens[1:] = (np.diff(all_owners) != 0) | (all_starts[1:] > _latest_so_far(all_owners, all_ends)[:-1])
    session = np.cumsum(opens) - 1
    of_all = np.empty(len(order), np.int64)
    of_all[order] = session
    begins = np.flatnonzero(opens)
    changed = np.zeros(len(begins), np.bool_)
    changed[of_all[held:]] = True
    if len(carried):
        changed[of_all[np.flatnonzero((stored.owners == 0) & np.isin(stored.begins, carried))]] = True
    index = np.cumsum(changed) - 1
    members = np.flatnonzero(changed[of_all[:held]])
    return _Sessions(
        owners=all_owners[begins][changed],
        begins=all_starts[begins][changed],
        ends=np.maximum.reduceat(all_ends, begins)[changed] if len(begins) else all_ends,
        of_row=index[of_all[held:]],
        members=members,
        of_member=index[of_all[members]],
    )


def _latest_so_far(owners: Int64s, ends: Int64s) -> Int64s:
    """Return for each row the maximum of `ends` over the rows of its key up to this row. Rows are sorted by key."""
    if ((np.diff(ends) >= 0) | (np.diff(owners) != 0)).all():
        return ends
    latest, codes = np.unique(ends, return_inverse=True)
    # One running maximum serves all keys, since each key's values are greater than all values of earlier keys.
    running = np.maximum.accumulate(owners * len(latest) + codes)
    return latest[running - owners * len(latest)]
