"""The timers of a shard for many keys at a time, as columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from state_backend.formats.arrow_columns import concatenate
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
from state_backend.state.state_columns import EntryColumns, Places, offsets_of

Times = npt.NDArray[np.int64]
# Keys of an index, ascending, and from where to where it has no others.
Span = tuple[list[bytes], bytes, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class DueTimers:
    """Timers whose time has come: of each key all of them. keys: encoded, ascending by key group and key, none twice. offsets: key i
    has the timers ``times_ms[offsets[i]] .. times_ms[offsets[i + 1] - 1]``, which ascend."""

    key_groups: Groups
    keys: pa.Array
    times_ms: Times
    offsets: npt.NDArray[np.int64]


class TimerColumns(EntryColumns):
    """Timers of the keys that ``begin`` named. ``owners``: which of them, by position; times in milliseconds since the epoch."""

    def __init__(self, shard: ShardState) -> None:
        super().__init__(shard, layout.TIMERS_NAME, layout.TIMERS)

    def begin(self, key_groups: Groups, keys: pa.Array) -> None:
        """As `EntryColumns.begin`."""
        super().begin(key_groups, keys)
        self._apart = self._deleted = False
        self._indexed = True

    def register(self, owners: Places, times_ms: Times) -> None:
        """A timer is unique per key and time: again is no change."""
        self._set(owners, times_ms, pa.array([b""], pa.binary()))

    def delete(self, owners: Places, times_ms: Times) -> None:
        """One that is not there is no change."""
        self._deleted = True
        self._set(owners, times_ms, pa.nulls(1, pa.binary()))

    def times(self, wanted: Places) -> tuple[Times, npt.NDArray[np.int64]]:
        """The timers of these keys, which ascend, in the order of time, and where those of each key begin."""
        self._lay_apart()
        owners, packed, _ = self._read_below(wanted)
        times_ms = split_timers(packed)[1] if len(packed) else np.zeros(0, np.int64)
        return times_ms, offsets_of(owners, wanted)

    def due(self, now_ms: int, most: int) -> Iterator[DueTimers]:
        """All timers up to this time, some ``most`` of them at once, or as many as one key has. A key comes once; a timer that is
        registered meanwhile does not come. Those that were given are deleted when the next ones are asked for."""
        waiting: list[DueTimers] = []
        fired: list[Span] = []
        for group in self._shard.key_groups_of(self._name):
            # All that are due in a key group are read before its first one is given.
            if (found := self._due_of_group(group, now_ms)) is None:
                continue
            due, index = found
            fired.append(index)
            for part in _parts(due, most):
                waiting.append(part)
                if sum(len(due.times_ms) for due in waiting) >= most:
                    yield from self._fired(_together(waiting), fired)
                    waiting, fired = [], []
        if waiting:
            yield from self._fired(_together(waiting), fired)

    def _fired(self, due: DueTimers, index: Sequence[Span]) -> Iterator[DueTimers]:
        # Before the handler, which may register timers that are due already.
        for span in index:
            self._shard.delete_many(*span)
        self.begin(due.key_groups, due.keys)
        yield due
        owners, deleted = np.repeat(np.arange(len(due.keys)), np.diff(due.offsets)), self._deleted
        self.begin(due.key_groups, due.keys)
        # All are there, and none in the index, unless the handler deleted some, which it may have registered again.
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
        # The index is in the order of time.
        order = np.argsort(owners, kind="stable")
        due = DueTimers(
            key_groups=np.full(len(rank), group, np.uint16),
            keys=encoded.dictionary.take(ascending),
            times_ms=times_ms[order],
            offsets=np.append(0, np.cumsum(np.bincount(owners))).astype(np.int64),
        )
        return due, (found, start, end)

    def _set(self, owners: Places, times_ms: Times, new: pa.Array, old: pa.Array | None = None) -> None:
        """``new``, ``old``: of every timer the same; without ``old`` it is read."""
        self._lay_apart()
        same_owner = owners[1:] == owners[:-1]
        if ((owners[1:] < owners[:-1]) | (same_owner & (times_ms[1:] <= times_ms[:-1]))).any():
            order = np.lexsort((times_ms, owners))
            owners, times_ms = owners[order], times_ms[order]
            first = np.append(True, (owners[1:] != owners[:-1]) | (times_ms[1:] != times_ms[:-1]))
            owners, times_ms = owners[first], times_ms[first]
        rests = concatenate(len(owners), [self._keys.take(pa.array(owners)), packed_times(times_ms)])
        located = self._located(owners, rests)
        same = pa.array(np.zeros(len(owners), np.int64))
        before = self._read(owners, located) if old is None else old.take(same)
        self._replace(owners, rests, before, new.take(same), located)

    def _index(self, groups: Groups, rests: pa.Array, old: pa.Array, new: pa.Array) -> None:
        if not self._indexed:
            return
        keys, times_ms = split_timers(rests)
        indexed = timer_index_keys(groups, times_ms, keys)
        self._shard.put_many(indexed, new.to_pylist(), (PREFIX_BYTES * len(rests) + bytes_in(rests), bytes_in(new)))

    def _lay_apart(self) -> None:
        if not self._apart:
            for group in np.unique(self._groups).tolist():
                self._shard.lay_timers_apart(group)
            self._apart = True


def _parts(due: DueTimers, most: int) -> Iterator[DueTimers]:
    """Whole keys, until they have ``most`` timers."""
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
