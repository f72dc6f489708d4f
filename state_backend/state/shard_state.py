"""The keyed state of one shard: what processors read and write, key by key.

Reads see own writes. One batch of input is one round: the entries that a batch's keys will need are prefetched by one
multi-get or scan, changes gather in memory and are written in one batch. With the batch, not with each change, the state
digest and the entry counts of the key groups follow, and what was replaced unread is read then.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, tzinfo
from heapq import merge
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from state_backend.adapters.rocks import RocksStore
from state_backend.state import layout
from state_backend.state.entry_columns import changes_by_key_group, is_expiring, parts_of, stored_keys
from state_backend.values.errors import InvariantViolated, StateSchemaError
from state_backend.values.records import KeyGroupState, StateDescriptor

UNREAD: Any = object()
_FLUSH_ENTRIES = 10_000
# From here on, calls into Arrow and NumPy cost less than a loop.
MIN_COLUMN_ROWS = 64
# An entry that is passed by in a scan costs about a quarter of one that is looked for; to begin a scan costs some of those.
SCAN_SHARE = 4
MIN_SCAN_ROWS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DueTimer:
    """A timer whose time has come."""

    expiry_ms: int
    key_group: int
    key: bytes


class ShardState:
    """State of the key groups of one shard, over a store that holds nothing else.

    ``now_ms`` is the logical processing time: expiry is judged by it, never by a wall clock. The states of
    ``keyed_states`` act on the key that ``set_key`` chose last. ``zone``: of naive datetimes in timestamps.
    """

    def __init__(
        self,
        store: RocksStore,
        *,
        key_groups: Iterable[KeyGroupState],
        descriptors: Sequence[StateDescriptor],
        now_ms: int,
        struct_factory: Any = None,
        zone: tzinfo = UTC,
    ) -> None:
        self.store = store
        self.now_ms = now_ms
        self.changed_bytes = 0
        self.struct_factory = struct_factory
        self.zone = zone
        self._descriptors = {d.name: d for d in descriptors}
        self._by_id = {d.state_id: d for d in descriptors}
        self._accounts = {d.state_id: (d.name, layout.seed_of(d.name)) for d in descriptors}
        # What the batch read or wrote, as it is now, and of what it wrote, how it was: UNREAD where nobody looked.
        self.cache: dict[bytes, bytes | None] = {}
        self.before: dict[bytes, bytes | None] = {}
        self._unaccounted: dict[bytes, bytes | None] = {}
        # Maps are scanned by prefix; of these prefixes some entries are not written yet.
        self._changed_maps: dict[bytes, set[bytes]] = {}
        self._firing = False
        self._registered_while_firing: set[tuple[int, int, bytes]] = set()
        self._digests: dict[int, int] = {}
        self._counts: dict[tuple[int, str], int] = {}
        self._totals: dict[str, int] = {}
        for s in key_groups:
            self._digests[s.key_group] = s.digest
            for name, count in s.entries.items():
                self._counts[s.key_group, name] = count
                self._totals[name] = self._totals.get(name, 0) + count
        self._prefetched = {(layout.TIMERS, b""): layout.TIMERS_NAME}
        self._timer_seed = layout.seed_of(layout.TIMERS_NAME)
        self.key_group = -1
        self.key = b""

    def descriptor(self, name: str, kind: str) -> StateDescriptor:
        """What the driver planned for the state; StateSchemaError if there is none of this kind."""
        descriptor = self._descriptors.get(name)
        if descriptor is None or descriptor.kind != kind:
            raise StateSchemaError(
                f"{kind} state {name!r} was not declared when the pipeline was planned: init() must not vary"
            )
        return descriptor

    def prefetch_state(self, descriptor: StateDescriptor, suffix: bytes = b"") -> None:
        """From now on, what lies under each key of a batch, followed by ``suffix``, is read with the batch."""
        self._prefetched[descriptor.state_id, suffix] = descriptor.name

    def set_key(self, key_group: int, key: bytes) -> None:
        """Chooses the key that states and timers act on; key group -1: none."""
        self.key_group = key_group
        self.key = key

    # --- batches ----------------------------------------------------------------------------------------------------------------

    def prefetch(self, key_groups: npt.NDArray[np.uint16], keys: pa.Array) -> None:
        """Reads what a batch's keys will need. Keys are encoded, and ascend with their key groups."""
        for (state_id, suffix), name in self._prefetched.items():
            wanted = stored_keys(key_groups, state_id, keys, suffix)
            # Of a state without entries nothing need be read.
            if not self._totals.get(name):
                self.cache.update(dict.fromkeys(wanted))
            elif suffix:
                self.cache.update(zip(wanted, self.store.get_many(wanted), strict=True))
            else:
                self.cache.update(zip(wanted, self.read_sorted(name, key_groups, wanted), strict=True))

    def read_sorted(
        self, name: str, key_groups: npt.NDArray[np.uint16], wanted: Sequence[bytes]
    ) -> Sequence[bytes | None]:
        """What the store holds under these ascending keys of one state, which has one entry per key. Where they are a good
        part of a key group's entries, all between the first and the last are read in passing: that is several times faster
        per entry than to look for each."""
        starts = [0, *(np.flatnonzero(key_groups[1:] != key_groups[:-1]) + 1).tolist(), len(wanted)]
        dense = []
        for start, end in pairwise(starts):
            entries = self._counts.get((int(key_groups[start]), name), 0)
            if end - start >= MIN_SCAN_ROWS and (end - start) * SCAN_SHARE >= entries:
                dense.append((start, end))
        if not dense:
            return self.store.get_many(wanted)
        found: list[bytes | None] = []
        for start, end in dense:
            if start > len(found):
                found += self.store.get_many(wanted[len(found) : start])
            held = dict(self.store.scan(wanted[start], wanted[end - 1] + b"\x00"))
            found += [held.get(key) for key in wanted[start:end]]
        if len(found) < len(wanted):
            found += self.store.get_many(wanted[len(found) :])
        return found

    def flush(self) -> None:
        """Writes the gathered changes to the store and forgets what was read."""
        self._write_changes()
        self.cache.clear()

    def _write_changes(self) -> None:
        cache, before = self.cache, self.before
        if not before and not self._unaccounted:
            return
        if UNREAD in before.values():
            blind = sorted([key for key, entry in before.items() if entry is UNREAD])
            before.update(zip(blind, self.store.get_many(blind), strict=True))
        changed = sorted([key for key, entry in before.items() if cache[key] != entry])
        new = [cache[key] for key in changed]
        beside = dict(self._unaccounted)
        if changed:
            account = self._account_columns if len(changed) >= MIN_COLUMN_ROWS else self._account_one_by_one
            beside |= account(changed, [before[key] for key in changed], new)
        self.put_many(changed, new)
        if beside:
            ordered = sorted(beside)
            self.put_many(ordered, [beside[key] for key in ordered])
        before.clear()
        self._unaccounted.clear()
        self._changed_maps.clear()

    def _account_one_by_one(
        self, keys: list[bytes], old: list[bytes | None], new: list[bytes | None]
    ) -> dict[bytes, bytes | None]:
        """Brings digests and counts up to date; what has to be written to the expiry index."""
        index: dict[bytes, bytes | None] = {}
        for key, entry_before, entry in zip(keys, old, new, strict=True):
            name, seed = self._accounts[key[2]]
            change = 0
            if entry_before is not None:
                change -= layout.entry_hash(seed, key[3:], entry_before)
            if entry is not None:
                change += layout.entry_hash(seed, key[3:], entry)
            count = (entry is not None) - (entry_before is not None)
            self.account(int.from_bytes(key[:2], "big"), name, change, count)
            _index_expiry(index, key, entry_before, entry)
        return index

    def _account_columns(
        self, keys: list[bytes], old: list[bytes | None], new: list[bytes | None]
    ) -> dict[bytes, bytes | None]:
        """The same for many entries at once."""
        groups, state_ids, rests = parts_of(pa.array(keys, pa.binary()))
        old_entries, new_entries = pa.array(old, pa.binary()), pa.array(new, pa.binary())
        for state_id in np.unique(state_ids).tolist():
            name, seed = self._accounts[state_id]
            rows = state_ids == state_id
            columns = [rests, old_entries, new_entries]
            if not rows.all():
                columns = [column.filter(pa.array(rows)) for column in columns]
            for change in changes_by_key_group(seed, groups[rows], *columns):
                self.account(change[0], name, change[1], change[2])
        index: dict[bytes, bytes | None] = {}
        for at in np.flatnonzero(is_expiring(old_entries) | is_expiring(new_entries)).tolist():
            _index_expiry(index, keys[at], old[at], new[at])
        return index

    def put_many(self, keys: Sequence[bytes], entries: Sequence[bytes | None]) -> None:
        """Writes entries past the gathered changes, None to delete: for whoever reads, accounts and indexes by itself."""
        self.changed_bytes += sum(map(len, keys)) + sum(map(len, filter(None, entries)))
        self.store.write(zip(keys, entries, strict=True))

    def account(self, key_group: int, name: str, digest_change: int, count_change: int) -> None:
        """Adds to what the digest and the entry count of a key group are."""
        self._digests[key_group] = self._digests.get(key_group, 0) + digest_change
        self._counts[key_group, name] = self._counts.get((key_group, name), 0) + count_change
        self._totals[name] = self._totals.get(name, 0) + count_change

    def key_group_states(self) -> tuple[KeyGroupState, ...]:
        """Counts and digests of the non-empty key groups, ascending, after all changes."""
        self._write_changes()
        counts: dict[int, dict[str, int]] = {}
        for (key_group, name), count in sorted(self._counts.items()):
            if count < 0:
                raise InvariantViolated(f"state {name!r} counts {count} entries in key group {key_group}")
            if count:
                counts.setdefault(key_group, {})[name] = count
        for key_group, digest in self._digests.items():
            if key_group not in counts and digest % 2**64:
                raise InvariantViolated(f"key group {key_group} is empty, but its digest is {digest % 2**64:016x}")
        return tuple(
            KeyGroupState(key_group=key_group, entries=entries, digest=self._digests.get(key_group, 0) % 2**64)
            for key_group, entries in counts.items()
        )

    # --- entries, for the states of a key ----------------------------------------------------------------------------------------------

    def read(self, stored_key: bytes) -> bytes | None:
        """The entry as it is stored, expired or not."""
        entry = self.cache.get(stored_key, UNREAD)
        if entry is UNREAD:
            entry = self.cache[stored_key] = self.store.get(stored_key)
        return entry  # type: ignore[no-any-return]

    def read_many(self, wanted: Sequence[bytes]) -> list[bytes | None]:
        """``read`` for several, with one multi-get for what is not at hand."""
        missing = [key for key in wanted if key not in self.cache]
        if missing:
            self.cache.update(zip(missing, self.store.get_many(missing), strict=True))
        return [self.cache[key] for key in wanted]

    def write(self, stored_key: bytes, entry: bytes | None) -> None:
        """Replaces an entry; None removes it. Digest, counts and expiry index follow when the batch is written."""
        cache = self.cache
        if stored_key not in self.before:
            self.before[stored_key] = cache.get(stored_key, UNREAD)
        cache[stored_key] = entry

    def write_new(self, stored_key: bytes, entry: bytes) -> None:
        """The same where the store is known to hold nothing, unless this batch wrote it."""
        self.cache.setdefault(stored_key, None)
        self.write(stored_key, entry)

    def write_unaccounted(self, stored_key: bytes, data: bytes | None) -> None:
        """Writes what is no entry: positions, timers, indexes."""
        self.cache[stored_key] = data
        self._unaccounted[stored_key] = data

    def visible(self, entry: bytes | None) -> bytes | None:
        """The row in an entry, or None if there is none or it has expired."""
        if entry is None:
            return None
        if entry[0] == layout.EXPIRING:
            expiry_ms = layout.expiry_of(entry)
            return entry[9:] if expiry_ms is not None and expiry_ms > self.now_ms else None
        return entry

    def entry_of(self, row: bytes, ttl_ms: int | None) -> bytes:
        return row if ttl_ms is None else layout.with_expiry(row, self.now_ms + ttl_ms)

    def scan_map(self, start: bytes) -> list[tuple[bytes, bytes]]:
        """All entries under a map's prefix, expired ones too, by user key."""
        entries: dict[bytes, bytes | None] = dict(self.store.scan(start, layout.after(start)))
        for key, entry in entries.items():
            # Whoever writes them next need not read them.
            self.cache.setdefault(key, entry)
        changed = self._changed_maps.get(start)
        if not changed:
            return list(entries.items())  # type: ignore[arg-type]
        entries |= {key: self.cache[key] for key in changed}
        return sorted((key, entry) for key, entry in entries.items() if entry is not None)

    def write_map(self, start: bytes, stored_key: bytes, entry: bytes | None) -> None:
        """``write`` for an entry under a map's prefix."""
        self.write(stored_key, entry)
        self._changed_maps.setdefault(start, set()).add(stored_key)

    # --- timers -------------------------------------------------------------------------------------------------------------------------

    def timers(self) -> list[int]:
        """The current key's timers, ascending."""
        packed = self.read(layout.prefix(self.key_group, layout.TIMERS) + self.key)
        return layout.unpack_times(packed) if packed else []

    def register_timer(self, expiry_ms: int) -> None:
        """A timer is unique per key and time: again is no change."""
        timers = self.timers()
        at = bisect_left(timers, expiry_ms)
        if at < len(timers) and timers[at] == expiry_ms:
            return
        insort(timers, expiry_ms)
        self._store_timers(timers, expiry_ms, 1)
        if self._firing:
            self._registered_while_firing.add((expiry_ms, self.key_group, self.key))

    def delete_timer(self, expiry_ms: int) -> None:
        """One that is not there is no change."""
        timers = self.timers()
        if expiry_ms in timers:
            timers.remove(expiry_ms)
            self._store_timers(timers, expiry_ms, -1)

    def _store_timers(self, timers: list[int], changed_ms: int, sign: int) -> None:
        packed_time = layout.pack_time(changed_ms)
        self.write_unaccounted(
            layout.prefix(self.key_group, layout.TIMERS) + self.key,
            b"".join(map(layout.pack_time, timers)) if timers else None,
        )
        self.write_unaccounted(
            layout.prefix(self.key_group, layout.TIMER_INDEX) + packed_time + self.key, b"" if sign > 0 else None
        )
        change = sign * layout.entry_hash(self._timer_seed, self.key + packed_time, b"")
        self.account(self.key_group, layout.TIMERS_NAME, change, sign)

    def due_timers(self, now_ms: int) -> Iterator[DueTimer]:
        """Timers with expiry <= now_ms in order of (expiry, key group, key), with their key chosen. A timer that a handler
        deletes meanwhile does not fire; one that it registers fires in the next interval at the earliest."""

        def of_group(key_group: int) -> Iterator[tuple[int, int, bytes]]:
            start = layout.prefix(key_group, layout.TIMER_INDEX)
            for stored_key, _ in self.store.scan(start, start + layout.pack_time(now_ms + 1)):
                yield layout.unpack_time(stored_key[3:11]), key_group, stored_key[11:]

        groups = sorted(kg for (kg, name), n in self._counts.items() if name == layout.TIMERS_NAME and n)
        self.flush()
        self._firing = True
        for due in merge(*(of_group(kg) for kg in groups)):
            expiry_ms, key_group, key = due
            self.set_key(key_group, key)
            if due not in self._registered_while_firing and expiry_ms in self.timers():
                yield DueTimer(expiry_ms=expiry_ms, key_group=key_group, key=key)
            if len(self._unaccounted) + len(self.before) > _FLUSH_ENTRIES:
                self.flush()
        self._firing = False
        self._registered_while_firing.clear()

    # --- dropping ------------------------------------------------------------------------------------------------------------------------

    def drop(self, descriptor: StateDescriptor) -> None:
        """Removes all entries of a state. Reads each once, since the digest has to give back what each put in."""
        seed = layout.seed_of(descriptor.name)
        if self._descriptors.get(descriptor.name) is descriptor:
            # No other state has its name now; whoever asks for it is told so.
            del self._descriptors[descriptor.name]
        self.flush()
        for key_group in sorted(kg for (kg, name), n in self._counts.items() if name == descriptor.name and n):
            start = layout.prefix(key_group, descriptor.state_id)
            end = layout.after(start)
            assert end is not None
            change = 0
            for stored_key, entry in self.store.scan(start, end):
                self.changed_bytes += len(stored_key)
                if descriptor.kind == "list" and layout.is_positions(entry):
                    continue
                change -= layout.entry_hash(seed, stored_key[3:], entry)
                if entry[0] == layout.EXPIRING:
                    self._unaccounted[_expiry_key(stored_key, entry)] = None
                if len(self._unaccounted) + len(self.before) > _FLUSH_ENTRIES:
                    self.flush()
            self.account(key_group, descriptor.name, change, -self._counts[key_group, descriptor.name])
            self.store.delete_range(start, end)
        self.flush()

    # --- expiry --------------------------------------------------------------------------------------------------------------------------

    def expire(self) -> int:
        """Physically deletes every entry whose time is up, and returns how many. Runs at the end of an interval, always, so
        that what is in the files depends on the intervals alone."""
        self.flush()
        expired = 0
        for key_group in sorted({kg for (kg, _), n in self._counts.items() if n}):
            start = layout.prefix(key_group, layout.EXPIRY_INDEX)
            for index_key, _ in self.store.scan(start, start + layout.pack_time(self.now_ms + 1)):
                stored_key = index_key[:2] + index_key[11:]
                descriptor = self._by_id.get(stored_key[2])
                if descriptor is None:
                    raise InvariantViolated(
                        f"an expiring entry belongs to state id {stored_key[2]}, which no state has"
                    )
                self.write(stored_key, None)
                if descriptor.kind == "list":
                    self._trim_list(stored_key[:-9], layout.unpack_position(stored_key[-8:]))
                expired += 1
                if len(self._unaccounted) + len(self.before) > _FLUSH_ENTRIES:
                    self.flush()
        self.flush()
        return expired

    def _trim_list(self, base: bytes, expired_position: int) -> None:
        """Moves a list's first position past rows that are gone, so that a list that lives by expiry keeps no history."""
        packed = self.read(base + layout.LIST_META)
        first, next_ = layout.unpack_positions(packed) if packed else (0, 0)
        if expired_position != first:
            return
        while first < next_ and self.read(base + layout.LIST_ELEMENT + layout.pack_position(first)) is None:
            first += 1
        self.write_unaccounted(base + layout.LIST_META, layout.pack_positions(first, next_) if first < next_ else None)


def _index_expiry(
    index: dict[bytes, bytes | None], stored_key: bytes, before: bytes | None, entry: bytes | None
) -> None:
    """Notes what replacing an entry changes in the expiry index."""
    if before is not None and before[0] == layout.EXPIRING:
        index[_expiry_key(stored_key, before)] = None
    if entry is not None and entry[0] == layout.EXPIRING:
        index[_expiry_key(stored_key, entry)] = b""


def _expiry_key(stored_key: bytes, entry: bytes) -> bytes:
    expiry_ms = layout.expiry_of(entry)
    assert expiry_ms is not None
    return layout.expiry_key(int.from_bytes(stored_key[:2], "big"), expiry_ms, stored_key[2], stored_key[3:])
