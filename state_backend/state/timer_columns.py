"""Timers of a shard for many keys at a time, as Arrow and NumPy columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from state_backend.formats.arrow_columns import Int64s, concatenate
from state_backend.state import layout
from state_backend.state.entry_columns import (
    PREFIX_BYTES,
    Groups,
    bytes_in,
    indexed_timers,
    packed_times,
    split_timers,
    timer_index_keys,
)
from state_backend.state.shard_state import ShardState
from state_backend.state.state_columns import EntryColumns, Places, entry_list, offsets_of
from state_backend.values.frozen import frozen

Times = Int64s
# (keys, start, end): all timer-index keys with start <= key < end, ascending.
Span = tuple[list[bytes], bytes, bytes]
# From this many timers on, read the latest timer of each key group first: later timers then need no look-up.
MIN_LATEST_ROWS = 256


@frozen
class DueTimers:
    """Due timers of several keys. Each key comes with all of its due timers."""

    key_groups: Groups
    keys: pa.Array
    # Milliseconds since the epoch, ascending within a key. Key i has those from `offsets[i]` to `offsets[i + 1] - 1`.
    times_ms: Times
    offsets: Int64s


class TimerColumns(EntryColumns):
    def __init__(self, shard: ShardState) -> None:
        super().__init__(shard, layout.TIMERS_NAME, layout.TIMERS)
        # The time up to which timers have fired in this interval.
        self._fired_ms = layout.MIN_TIME_MS

    def begin(self, key_groups: Groups, keys: pa.Array) -> None:
        super().begin(key_groups, keys)
        self._checked = self._deleted = False
        self._indexed = True
        # Keys and times of the timers that `_set` writes.
        self._given: tuple[pa.Array, Times] = pa.array([], pa.binary()), np.zeros(0, np.int64)

    def register(self, owners: Places, times_ms: Times) -> None:
        """Register timer `times_ms[i]` of the key with index `owners[i]`. A timer that exists stays as it is."""
        self._set(owners, times_ms, pa.array([b""], pa.binary()))

    def delete(self, owners: Places, times_ms: Times) -> None:
        self._deleted = True
        self._set(owners, times_ms, pa.nulls(1, pa.binary()))

    def times(self, wanted: Places) -> tuple[Times, Int64s]:
        self._check()
        owners, packed, _ = self._read_below(wanted)
        times_ms = split_timers(packed)[1] if len(packed) else np.zeros(0, np.int64)
        return times_ms, offsets_of(owners, wanted)

    def due(self, now_ms: int, most: int) -> Iterator[DueTimers]:
        """Yield all timers with time <= `now_ms`, grouped by key, about `most` timers at a time.

        Each key comes once. Timers that a handler registers during the iteration are not yielded. The yielded timers
        are deleted when the caller asks for the next ones.
        """
        self._fired_ms = now_ms
        waiting: list[DueTimers] = []
        fired: list[Span] = []
        for group in self._shard.accounts.key_groups(self._name):
            # All due timers of a key group are read before the handler gets the first one. So a timer that the handler
            # registers does not fire in this interval.
            if (found := self._due_of_group(group, now_ms)) is None:
                continue
            due, index = found
            fired.append(index)
            for part in _parts(due, most):
                waiting.append(part)
                if sum(len(due.times_ms) for due in waiting) >= most:
                    yield from self._delete_fired(_together(waiting), fired)
                    waiting, fired = [], []
        if waiting:
            yield from self._delete_fired(_together(waiting), fired)

    def _delete_fired(self, due: DueTimers, index: Sequence[Span]) -> Iterator[DueTimers]:
        # The fired timers' keys in the timer index are deleted before the handler runs, partly by range deletions. A
        # later range deletion would also delete the index keys of timers that the handler registers in the range.
        for span in index:
            self._shard.stored.delete_many(*span)
        self.begin(due.key_groups, due.keys)
        yield due
        owners, deleted = np.repeat(np.arange(len(due.keys)), np.diff(due.offsets)), self._deleted
        self.begin(due.key_groups, due.keys)
        # Delete the fired timers, also those that the handler deleted and registered again, as Spark does. If the
        # handler deleted no timer, the store holds all fired timers, and the index none. Otherwise the handler may have
        # registered a timer again: `_set` reads which timers there are, and deletes their keys in the index too.
        self._indexed = deleted
        self._set(owners, due.times_ms, pa.nulls(1, pa.binary()), None if deleted else pa.array([b""], pa.binary()))

    def _due_of_group(self, group: int, now_ms: int) -> tuple[DueTimers, Span] | None:
        start = layout.prefix(group, layout.TIMER_INDEX)
        end = start + layout.pack_time(now_ms + 1) if now_ms < layout.MAX_TIME_MS else layout.after(start)
        assert end is not None
        found, _ = self._shard.store.read_keys(start, end)
        if not found:
            return None
        keys, times_ms = indexed_timers(pa.array(found, pa.binary()))
        encoded = keys.dictionary_encode()
        ascending = pc.array_sort_indices(encoded.dictionary)
        rank = np.empty(len(ascending), np.int64)
        rank[ascending.to_numpy()] = np.arange(len(ascending))
        owners = rank[encoded.indices.to_numpy()]
        # The timer index is sorted by time. A stable sort by key keeps the times of each key ascending.
        order = np.argsort(owners, kind="stable")
        due = DueTimers(
            key_groups=np.full(len(rank), group, np.uint16),
            keys=encoded.dictionary.take(ascending),
            times_ms=times_ms[order],
            offsets=np.append(0, np.cumsum(np.bincount(owners))).astype(np.int64),
        )
        return due, (found, start, end)

    def _set(self, owners: Places, times_ms: Times, new: pa.Array, old: pa.Array | None = None) -> None:
        """Write timers (`new`: empty bytes) or remove them (null). `old`: what the store holds; None: read it."""
        self._check()
        same_owner = owners[1:] == owners[:-1]
        if ((owners[1:] < owners[:-1]) | (same_owner & (times_ms[1:] <= times_ms[:-1]))).any():
            order = np.lexsort((times_ms, owners))
            owners, times_ms = owners[order], times_ms[order]
            first = np.append(True, (owners[1:] != owners[:-1]) | (times_ms[1:] != times_ms[:-1]))
            owners, times_ms = owners[first], times_ms[first]
        keys = self._keys.take(pa.array(owners))
        rests = concatenate(len(owners), [keys, packed_times(times_ms)])
        self._given = keys, times_ms
        located = self._locate(owners, rests)
        same = pa.array(np.zeros(len(owners), np.int64))
        before = self._read_stored(owners, times_ms, located) if old is None else old.take(same)
        self._replace(owners, rests, new.take(same), before, located)

    def _read_stored(self, owners: Places, times_ms: Times, located: list[bytes]) -> pa.Array:
        """Return what the store holds for each timer, under `located`: empty bytes, or null for no timer."""
        # Watermarks ascend, so most new timers are later than all timers of their key group. Look up only the others.
        if len(owners) < MIN_LATEST_ROWS or not self._shard.accounts.entries(self._name):
            return self._read(owners, located)
        groups = self._groups[owners]
        starts = np.flatnonzero(np.diff(groups, prepend=-1))
        latest_ms = np.array([self._latest_ms(group) for group in groups[starts].tolist()], np.int64)
        doubtful = times_ms <= np.repeat(latest_ms, np.diff(np.append(starts, len(groups))))
        if doubtful.all():
            return self._read(owners, located)
        at = np.flatnonzero(doubtful)
        found = self._read(owners[at], [located[i] for i in at.tolist()])
        return found.take(pa.array(np.cumsum(doubtful) - 1, mask=~doubtful))

    def _latest_ms(self, group: int) -> int:
        start = layout.prefix(group, layout.TIMER_INDEX)
        end = layout.after(start)
        assert end is not None
        last = self._shard.store.last_key(start, end)
        indexed_ms = layout.MIN_TIME_MS if last is None else layout.unpack_time(last[PREFIX_BYTES : PREFIX_BYTES + 8])
        # A timer leaves the index when it fires. It stays in the store until its handler has ended.
        return max(indexed_ms, self._fired_ms)

    def _index(self, groups: Groups, rests: pa.Array, old: pa.Array, new: pa.Array) -> None:
        if not self._indexed:
            return
        keys, times_ms = self._given
        if len(keys) != len(rests):
            # Only some of the given timers changed.
            keys, times_ms = split_timers(rests)
        indexed = timer_index_keys(groups, times_ms, keys)
        sizes = PREFIX_BYTES * len(rests) + bytes_in(rests), bytes_in(new)
        self._shard.stored.put_many(indexed, entry_list(new), sizes, new.null_count)

    def _check(self) -> None:
        if not self._checked:
            for group in np.unique(self._groups).tolist():
                self._shard.stored.check_timers(group)
            self._checked = True


def _parts(due: DueTimers, most: int) -> Iterator[DueTimers]:
    """Split due timers into parts of whole keys. A part ends with the key with which it has `most` timers or more."""
    begin, keys = 0, len(due.keys)
    while begin < keys:
        end = int(np.searchsorted(due.offsets, due.offsets[begin] + most, "left"))
        end = min(max(end, begin + 1), keys)
        offsets = due.offsets[begin : end + 1]
        yield DueTimers(
            key_groups=due.key_groups[begin:end],
            keys=due.keys[begin:end],
            times_ms=due.times_ms[offsets[0] : offsets[-1]],
            offsets=offsets - offsets[0],
        )
        begin = end


def _together(parts: list[DueTimers]) -> DueTimers:
    counts = np.concatenate([np.diff(part.offsets) for part in parts])
    return DueTimers(
        key_groups=np.concatenate([part.key_groups for part in parts]),
        keys=pa.concat_arrays([part.keys for part in parts]),
        times_ms=np.concatenate([part.times_ms for part in parts]),
        offsets=np.append(0, np.cumsum(counts)).astype(np.int64),
    )
