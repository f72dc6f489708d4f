"""Timers of single keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import merge
from itertools import islice
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from state_backend.adapters.rocks import RocksStore
from state_backend.state import layout
from state_backend.state.shard_state import CHANGE_BYTES, UNREAD, ShardState

# The most timers that fire in one round.
_DUE_TIMERS = 4096
_NOTED_TIMERS = 10_000


class DueTimer(NamedTuple):
    """A timer that is due. Timers fire in the order of these tuples."""

    expiry_ms: int
    key_group: int
    key: bytes
    stored_key: bytes


def timers(shard: ShardState) -> Iterator[int]:
    """Return the times of the current key's timers, ascending, as they are when the caller asks for the first one."""
    base = _base(shard)
    shard.lists_timers = True
    return (layout.unpack_time(stored_key[-8:]) for stored_key, _ in shard.scan_map(base))


def register_timer(shard: ShardState, expiry_ms: int) -> None:
    """Register a timer of the current key. A timer that is registered already stays as it is."""
    base, firing = _base(shard), shard.firing
    stored_key = base + layout.pack_time(expiry_ms)
    if firing.due_ms is not None and expiry_ms <= firing.due_ms:
        if shard.read(stored_key) is not None:
            return
        firing.registered.add(stored_key)
    elif shard.cache.get(stored_key) is not None:
        return
    shard.write_map(base, stored_key, b"")
    shard.relieve()


def delete_timer(shard: ShardState, expiry_ms: int) -> None:
    base, firing = _base(shard), shard.firing
    stored_key = base + layout.pack_time(expiry_ms)
    if shard.cache.get(stored_key, UNREAD) is None:
        return
    if firing.due_ms is not None and expiry_ms <= firing.due_ms:
        firing.deleted.add(stored_key)
    shard.write_map(base, stored_key, None)
    shard.relieve()


def due_timers(shard: ShardState, now_ms: int) -> Iterator[DueTimer]:
    """Yield the timers with time <= `now_ms`, in order.

    Before a timer is yielded, its key becomes the current key and the key's state is prefetched. A timer is deleted
    when the caller asks for the next one. A timer that a handler deletes before its turn does not fire. A timer that a
    handler registers fires in the next interval at the earliest.
    """
    shard.flush()
    groups = shard.accounts.key_groups(layout.TIMERS_NAME)
    due = merge(*(_due_of_group(shard.store, group, now_ms) for group in groups))
    firing, most_noted = shard.firing, _NOTED_TIMERS
    registered, deleted = firing.registered, firing.deleted
    firing.due_ms = now_ms
    cache, before = shard.cache, shard.before
    while round_ := list(islice(due, min(shard.prefetch_stride.rows, _DUE_TIMERS))):
        shard.flush()
        _read_due(shard, [timer for timer in round_ if timer.stored_key not in deleted])
        for timer in round_:
            _, shard.key_group, shard.key, stored_key = timer
            if stored_key in registered or stored_key in deleted:
                continue
            yield timer
            # Delete the fired timer. For speed, this repeats the code of `delete_timer`.
            held = cache.get(stored_key, UNREAD)
            if held is not None:
                before.setdefault(stored_key, held)
                cache[stored_key] = None
                shard.changed_maps.setdefault(stored_key[:-8], set()).add(stored_key)
                shard.gathered_bytes += CHANGE_BYTES
        if len(registered) + len(deleted) > most_noted:
            # Forget earlier timers: both sets are needed only for timers that are still to come.
            last = round_[-1].stored_key[-8:]
            for noted in (registered, deleted):
                noted -= {stored_key for stored_key in noted if stored_key[-8:] < last}
            most_noted = _NOTED_TIMERS + 2 * (len(registered) + len(deleted))
    firing.due_ms = None
    registered.clear()
    deleted.clear()


def _base(shard: ShardState) -> bytes:
    if shard.key_group not in shard.stored.checked:
        shard.stored.check_timers(shard.key_group)
    return layout.prefix(shard.key_group, layout.TIMERS) + shard.key


def _due_of_group(store: RocksStore, key_group: int, now_ms: int) -> Iterator[DueTimer]:
    start, base = layout.prefix(key_group, layout.TIMER_INDEX), layout.prefix(key_group, layout.TIMERS)
    unpack, new = layout.unpack_time, DueTimer
    for indexed, _ in store.scan(start, start + layout.pack_time(now_ms + 1)):
        key, packed = indexed[11:], indexed[3:11]
        yield new(unpack(packed), key_group, key, base + key + packed)


def _read_due(shard: ShardState, due: Sequence[DueTimer]) -> None:
    """Prefetch the state that the handlers of these timers need.

    The timers themselves come into the cache without a read: the store holds all of them, and their entries are empty.
    """
    keys = sorted({timer[1:3] for timer in due})
    for key_group in {key_group for key_group, _ in keys}:
        shard.stored.check_timers(key_group)
    groups = np.array([key_group for key_group, _ in keys], np.uint16)
    shard.read_ahead(groups, pa.array([key for _, key in keys], pa.binary()))
    shard.cache.update(dict.fromkeys([timer.stored_key for timer in due], b""))
