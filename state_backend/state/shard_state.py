"""Keyed state of one shard, which processors read and write key by key.

Reads see earlier writes of the same interval. One batch of input is one round:
1. `prefetch` reads the entries that the batch's keys will need, by one multi-get or scan.
2. State variables and timers change entries in memory.
3. `flush` writes the changes in one batch. It also updates the indexes, and the digests and entry counts of the key
   groups. The digest needs each replaced entry, so `flush` reads the replaced entries that were not read before.

Memory is bounded in bytes. A round has fewer keys if their entries exceed 16 MiB. Changes are written early, also
between two calls of one handler, once 32 MiB have gathered. Only the values of a single call have no bound.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, tzinfo
from heapq import merge
from itertools import compress, islice, pairwise
from operator import le, ne
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np
import pyarrow as pa

from state_backend.adapters.rocks import RocksStore, Stride
from state_backend.formats.spark_nulls import MismatchCounts
from state_backend.state import layout
from state_backend.state.entry_columns import Groups, changes_by_key_group, is_expiring, parts_of, stored_keys
from state_backend.values.errors import InvariantViolated, StateSchemaError
from state_backend.values.records import KeyGroupState, StateDescriptor

UNREAD: Any = object()
_FLUSH_ENTRIES = 10_000
MIB = 1024 * 1024
# Sizes, in bytes of entries. PREFETCH_BYTES: approximate size of a prefetch. GATHERED_BYTES: a flush comes when changed
# entries and entries that were read on demand exceed this size. PART_BYTES: approximate size that a flush converts to
# Arrow at a time.
PREFETCH_BYTES, GATHERED_BYTES, PART_BYTES = 16 * MIB, 32 * MIB, 32 * MIB
# Bytes of entries in one write batch. RocksDB holds a batch twice in memory until the batch is written.
_WRITE_BYTES = 8 * MIB
# Estimated bytes of Python objects for each changed entry, and for each read entry, in addition to the entry's bytes.
CHANGE_BYTES, _READ_BYTES = 400, 200
# At most _DUE_TIMERS timers fire in one round. If the processor lists timers, the timers of each key that has at most
# _LISTED_TIMERS are prefetched.
_DUE_TIMERS, _LISTED_TIMERS = 4096, 16
# A scan of one key's entries begins with a chunk of _FIRST_SCAN_ROWS. Each later chunk has 8 times as many rows, up to
# _MOST_SCAN_ROWS. A scan merges the map's unwritten changes into each chunk. If there are more than _SCANNED_CHANGES,
# they are written to the store first.
_FIRST_SCAN_ROWS, _MOST_SCAN_ROWS, _SCANNED_CHANGES = 32, 65_536, 1024
_GET_ROWS = 1024
# From MIN_COLUMN_ROWS rows on, Arrow and NumPy calls cost less than a Python loop. For entries that average more than
# MAX_COLUMN_BYTES, the copies that Arrow makes cost more than the loop.
MIN_COLUMN_ROWS, MAX_COLUMN_BYTES = 64, 4096
# From this many keys on, `delete_many` writes one range deletion. A range deletion slows down every read of its file a
# little, so fewer keys are deleted one by one.
RANGE_KEYS = 64
# For each entry, wanted or not, a scan takes about 1/SCAN_SHARE of the time of a lookup. So a scan is worth its time if
# at least 1/SCAN_SHARE of the entries are wanted. Fewer than MIN_SCAN_ROWS wanted entries are always looked up, because
# the start of a scan takes longer than their lookups.
SCAN_SHARE = 4
MIN_SCAN_ROWS = 16


class DueTimer(NamedTuple):
    """A timer that is due. Timers fire in the order of these tuples."""

    # The timer's time, in milliseconds since the epoch.
    expiry_ms: int
    key_group: int
    key: bytes
    stored_key: bytes


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Scan:
    """A scan in progress."""

    start: bytes
    # The end of the scan (exclusive); None for the last key of the store.
    end: bytes | None
    # For each stored key whose entry in the store differs from the entry when the scan began: the entry when the scan
    # began; None for no entry. The scan yields these entries in place of the store's.
    over: dict[bytes, bytes | None]


class ShardState:
    """State of the key groups of one shard, in a store that holds nothing else.

    The state variables of `state_variables` act on the key of the last `set_key`. For speed, they change the attributes
    `cache`, `before` and `unaccounted` themselves instead of calling methods. These three are dicts by stored key, in
    which None stands for no entry.
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
        nulls_for_misfits: bool = False,
    ) -> None:
        self.store = store
        self.mismatches = MismatchCounts() if nulls_for_misfits else None
        self.now_ms = now_ms
        self.changed_bytes = 0
        self.struct_factory = struct_factory
        self.zone = zone
        self._descriptors = {d.name: d for d in descriptors}
        self._by_id = {d.state_id: d for d in descriptors}
        self._accounts = {d.state_id: (d.name, layout.seed_of(d.name)) for d in descriptors}
        self._accounts[layout.TIMERS] = layout.TIMERS_NAME, layout.seed_of(layout.TIMERS_NAME)
        self.cache: dict[bytes, bytes | None] = {}
        self.before: dict[bytes, bytes | None] = {}
        self.unaccounted: dict[bytes, bytes | None] = {}
        # Bytes read on demand or changed since the last flush.
        self.gathered_bytes = 0
        self._prefetch_stride = Stride(size_bytes=PREFETCH_BYTES, most=1 << 20)
        self._change_stride = Stride(size_bytes=PART_BYTES, most=1024)
        # The stored keys of map entries and timers with unwritten changes, grouped by the prefix of the map or of the
        # key's timers. A scan of a prefix merges these changes into the entries that it reads from the store.
        self._changed_maps: dict[bytes, set[bytes]] = {}
        self._scans: WeakSet[_Scan] = WeakSet()
        # True once the processor has listed timers. From then on `prefetch` also reads each key's timers, and puts
        # their stored keys and entries into `_listed`.
        self._lists_timers = False
        self._listed: dict[bytes, list[tuple[bytes, bytes]]] = {}
        # Key groups that certainly have one entry per timer, not the old timer layout.
        self._timers_apart: set[int] = set()
        self._due_ms: int | None = None
        self._registered_while_firing: set[bytes] = set()
        self._deleted_while_firing: set[bytes] = set()
        self._digests: dict[int, int] = {}
        self._counts: dict[tuple[int, str], int] = {}
        self._totals: dict[str, int] = {}
        # `_sizes`: the stored bytes of each key group, including its keys in the timer index and in the expiry index.
        # An older release recorded no size for the key groups in `_uncounted`. Each restore sets their `_sizes` to 0,
        # so these count only the changes since the restore.
        self._sizes: dict[int, int] = {}
        self._uncounted: set[int] = set()
        for s in key_groups:
            self._sizes[s.key_group] = s.size_bytes or 0
            if s.size_bytes is None:
                self._uncounted.add(s.key_group)
            self._digests[s.key_group] = s.digest
            for name, count in s.entries.items():
                self._counts[s.key_group, name] = count
                self._totals[name] = self._totals.get(name, 0) + count
        self._prefetched: dict[tuple[int, bytes], str] = {}
        self.key_group = -1
        self.key = b""

    def descriptor(self, name: str, kind: str) -> StateDescriptor:
        """Return the descriptor that the driver planned for a state."""
        descriptor = self._descriptors.get(name)
        if descriptor is None or descriptor.kind != kind:
            raise StateSchemaError(
                f"init() did not declare {kind} state {name!r} on the driver; it must declare the same states every time"
            )
        return descriptor

    def entries(self, name: str, key_group: int | None = None) -> int:
        """Return the number of entries of a state, in one key group or in all.

        Changes of state variables and timers count only after they are written to the store.
        """
        return self._totals.get(name, 0) if key_group is None else self._counts.get((key_group, name), 0)

    def key_groups_of(self, name: str) -> list[int]:
        """Return the key groups in which a state has entries, ascending."""
        return sorted(kg for (kg, of), n in self._counts.items() if of == name and n)

    def descriptor_of(self, state_id: int) -> StateDescriptor | None:
        """Return the state with this id; None if no state has it."""
        return self._by_id.get(state_id)

    def key_groups(self) -> list[int]:
        """Return the numbers of the key groups that have entries, ascending."""
        return sorted({kg for (kg, _), n in self._counts.items() if n})

    def prefetch_state(self, descriptor: StateDescriptor, suffix: bytes = b"") -> None:
        """Let every later `prefetch` read one entry of this state for each key."""
        self._prefetched[descriptor.state_id, suffix] = descriptor.name

    def set_key(self, key_group: int, key: bytes) -> None:
        """Set the current key, which state variables and timers act on until the next call."""
        self.key_group = key_group
        self.key = key

    # --- batches ------------------------------------------------------------------------------------------------------

    def prefetch(self, key_groups: Groups, keys: pa.Array) -> int:
        """Read the entries that the next keys of a batch need into memory. Call `flush` before."""
        done = size_bytes = 0
        while done < len(keys) and size_bytes < PREFETCH_BYTES:
            end = min(len(keys), done + self._prefetch_stride.rows)
            read, read_bytes = self._read_ahead(key_groups[done:end], keys[done:end])
            done += read
            size_bytes += read_bytes
        return done

    def _read_ahead(self, key_groups: Groups, keys: pa.Array) -> tuple[int, int]:
        """Read the entries of the first of these keys, up to about 16 MiB."""
        size_bytes = 0
        for (state_id, suffix), name in self._prefetched.items():
            wanted = stored_keys(key_groups, state_id, keys, suffix)
            # If the state counts no entries, the store has none of the wanted ones, and no read is needed.
            if not self._totals.get(name):
                self.cache.update(dict.fromkeys(wanted))
                continue
            found = self._get_some(wanted) if suffix else self.read_sorted(name, key_groups, wanted, PREFETCH_BYTES)
            self.cache.update(zip(wanted, found, strict=False))
            size_bytes += sum(map(len, filter(None, found)))
            if len(found) < len(keys):
                key_groups, keys = key_groups[: len(found)], keys[: len(found)]
        if self._lists_timers and self._totals.get(layout.TIMERS_NAME):
            for key_group in np.unique(key_groups).tolist():
                self.lay_timers_apart(key_group)
            wanted = stored_keys(key_groups, layout.TIMERS, keys)
            stored, packed, counts = self.store.read_prefixes(wanted, _LISTED_TIMERS + 1)
            timers = iter(zip(stored, packed, strict=True))
            for base, count in zip(wanted, counts, strict=True):
                some = list(islice(timers, count))
                if count <= _LISTED_TIMERS:
                    self._listed[base] = some
                    self.cache.update(some)
        self._prefetch_stride.seen(len(keys), size_bytes)
        return len(keys), size_bytes

    def _get_some(self, wanted: Sequence[bytes], most_bytes: int = PREFETCH_BYTES) -> list[bytes | None]:
        """Look up stored keys from the first on, until the entries found have about `most_bytes`."""
        found: list[bytes | None] = []
        size_bytes = 0
        while len(found) < len(wanted) and size_bytes < most_bytes:
            some = self.store.get_many(wanted[len(found) : len(found) + _GET_ROWS])
            size_bytes += sum(map(len, filter(None, some)))
            found += some
        return found

    def read_sorted(
        self, name: str, key_groups: Groups, wanted: Sequence[bytes], most_bytes: int | None = None
    ) -> Sequence[bytes | None]:
        """Read entries of a state that has one entry per key.

        If at least a quarter of a key group's entries are wanted, one scan reads all entries from the first to the last
        wanted one. For each entry, a scan takes about a quarter of the time of a lookup.

        Returns the entry of each stored key in the order of `wanted`; None for no entry. If reading stopped because
        of `most_bytes`, the result is shorter than `wanted`: it ends with the last stored key that was read.
        """
        starts = [0, *(np.flatnonzero(key_groups[1:] != key_groups[:-1]) + 1).tolist(), len(wanted)]
        dense = []
        for start, end in pairwise(starts):
            entries = self._counts.get((int(key_groups[start]), name), 0)
            if end - start >= MIN_SCAN_ROWS and (end - start) * SCAN_SHARE >= entries and ascend(wanted[start:end]):
                dense.append((start, end))
        found: list[bytes | None] = []
        left_bytes = sys.maxsize if most_bytes is None else most_bytes
        for start, end in [*dense, (len(wanted), len(wanted))]:
            if start > len(found):
                some = self._get_some(wanted[len(found) : start], left_bytes)
                found += some
                left_bytes -= sum(map(len, filter(None, some)))
            if len(found) < start or left_bytes <= 0:
                break
            if start < end:
                some = self.store.read_wanted(wanted[start:end], left_bytes)
                found += some
                left_bytes -= sum(map(len, filter(None, some)))
                if len(found) < end or left_bytes <= 0:
                    break
        return found

    def flush(self) -> None:
        """Write the gathered changes to the store, and forget all entries in memory."""
        self._write_changes()
        self.cache.clear()
        self._listed.clear()
        self.gathered_bytes = 0

    def relieve(self) -> None:
        """Flush if the entries that were read on demand or changed exceed 32 MiB.

        State methods call this, so that one call of a handler can use much state in little memory.
        """
        if self.gathered_bytes > GATHERED_BYTES:
            self.flush()

    def _write_changes(self) -> None:
        if not self.before and not self.unaccounted:
            return
        for keys, old in self._parts():
            self._write_part(keys, old)
        if self.unaccounted:
            self._put_sorted(self.unaccounted)
        self.before.clear()
        self.unaccounted.clear()
        self._changed_maps.clear()
        self._listed.clear()

    def _parts(self) -> Iterator[tuple[list[bytes], list[bytes | None]]]:
        """Yield the stored keys of all changes, ascending, with the old entries that the store holds under them.

        Each part has about 32 MiB of old and new entries.
        """
        cache, before, stride = self.cache, self.before, self._change_stride
        keys = sorted(before)
        if self.gathered_bytes <= GATHERED_BYTES and UNREAD not in before.values():
            yield keys, list(map(before.__getitem__, keys))
            return
        begin = end = size_bytes = 0
        old: list[bytes | None] = []
        while end < len(keys):
            some = keys[end : end + stride.rows]
            entries = [before[key] for key in some]
            blind = [key for key, entry in zip(some, entries, strict=True) if entry is UNREAD]
            if blind:
                read = iter(self.store.get_many(blind))
                entries = [next(read) if entry is UNREAD else entry for entry in entries]
            read_bytes = sum(map(len, filter(None, entries))) + sum(map(len, filter(None, map(cache.get, some))))
            stride.seen(len(some), read_bytes)
            old += entries
            end += len(some)
            size_bytes += read_bytes
            if size_bytes >= PART_BYTES:
                yield keys[begin:end], old
                begin, size_bytes, old = end, 0, []
        yield keys[begin:], old

    def _write_part(self, keys: list[bytes], old: list[bytes | None]) -> None:
        new = list(map(self.cache.__getitem__, keys))
        kept = list(map(ne, old, new))
        if not all(kept):
            keys, old, new = list(compress(keys, kept)), list(compress(old, kept)), list(compress(new, kept))
        if not keys:
            return
        for scan in tuple(self._scans):
            first = bisect_left(keys, scan.start)
            last = len(keys) if scan.end is None else bisect_left(keys, scan.end)
            for key, entry in zip(keys[first:last], old[first:last], strict=True):
                scan.over.setdefault(key, entry)
        in_columns = len(keys) >= MIN_COLUMN_ROWS and sum(map(len, filter(None, new))) < len(keys) * MAX_COLUMN_BYTES
        beside = (self._account_columns if in_columns else self._account_one_by_one)(keys, old, new)
        self.put_many(keys, new)
        if beside:
            self._put_sorted(beside)

    def _put_sorted(self, changes: dict[bytes, bytes | None]) -> None:
        ordered = sorted(changes)
        self.put_many(ordered, [changes[key] for key in ordered])

    def _account_one_by_one(
        self, keys: list[bytes], old: list[bytes | None], new: list[bytes | None]
    ) -> dict[bytes, bytes | None]:
        """Update digests, counts and sizes of the key groups, one entry at a time."""
        index: dict[bytes, bytes | None] = {}
        for key, entry_before, entry in zip(keys, old, new, strict=True):
            name, seed = self._accounts[key[2]]
            change = 0
            if entry_before is not None:
                change -= layout.entry_hash(seed, key[3:], entry_before)
            if entry is not None:
                change += layout.entry_hash(seed, key[3:], entry)
            count = (entry is not None) - (entry_before is not None)
            size_bytes = -layout.entry_bytes(key, entry_before) if entry_before is not None else 0
            size_bytes += layout.entry_bytes(key, entry) if entry is not None else 0
            self.account(int.from_bytes(key[:2], "big"), name, change, count, size_bytes)
            if key[2] == layout.TIMERS:
                index[layout.timer_index_key(key)] = entry
            else:
                index |= layout.expiry_changes(key, entry_before, entry)
        return index

    def _account_columns(
        self, keys: list[bytes], old: list[bytes | None], new: list[bytes | None]
    ) -> dict[bytes, bytes | None]:
        """Update digests, counts and sizes of the key groups for many changed entries at once.

        The method has the same effect as `_account_one_by_one`. It converts the lists to Arrow columns first, which is
        faster for 64 or more small entries.
        """
        groups, state_ids, rests = parts_of(pa.array(keys, pa.binary()))
        old_entries, new_entries = pa.array(old, pa.binary()), pa.array(new, pa.binary())
        for state_id in np.unique(state_ids).tolist():
            name, _ = self._accounts[state_id]
            rows = state_ids == state_id
            columns = [rests, old_entries, new_entries]
            if not rows.all():
                columns = [column.filter(pa.array(rows)) for column in columns]
            for group, *changes in changes_by_key_group(name, groups[rows], *columns):
                self.account(group, name, *changes)
        index: dict[bytes, bytes | None] = {}
        for at in np.flatnonzero(is_expiring(old_entries) | is_expiring(new_entries)).tolist():
            index |= layout.expiry_changes(keys[at], old[at], new[at])
        for at in np.flatnonzero(state_ids == layout.TIMERS).tolist():
            index[layout.timer_index_key(keys[at])] = new[at]
        return index

    def put_many(
        self,
        keys: Sequence[bytes],
        entries: Sequence[bytes | None],
        sizes: tuple[int, int] | None = None,
        deletions: int | None = None,
    ) -> None:
        """Write entries to the store immediately, not to the changes in memory.

        The caller updates digests, counts and indexes itself.
        """
        key_bytes, entry_bytes = sizes or (sum(map(len, keys)), sum(map(len, filter(None, entries))))
        self.changed_bytes += key_bytes + entry_bytes
        if entry_bytes <= _WRITE_BYTES:
            self.store.write_columns(keys, entries, deletions)
            return
        begin, size_bytes = 0, 0
        for end, entry in enumerate(entries, 1):
            size_bytes += len(entry or b"")
            if size_bytes >= _WRITE_BYTES or end == len(entries):
                self.store.write_columns(keys[begin:end], entries[begin:end])
                begin, size_bytes = end, 0

    def delete_many(self, keys: Sequence[bytes], start: bytes, end: bytes) -> None:
        """Delete keys from the store immediately, not in the changes in memory.

        From 64 keys on, one range deletion replaces the single deletions. So RocksDB writes one deletion marker instead
        of one for each key.
        """
        if len(keys) < RANGE_KEYS:
            self.put_many(keys, [None] * len(keys))
        else:
            self.changed_bytes += sum(map(len, keys))
            self.store.delete_range(start, end)

    def put_positions(self, keys: Sequence[bytes], positions: Sequence[bytes]) -> None:
        """Write the bounds of lists that are not in the store yet, and add their bytes to the sizes of the key groups.

        The restore of a canonical savepoint calls this method after it has written the elements of the lists.
        """
        for key, packed in zip(keys, positions, strict=True):
            self.resize(int.from_bytes(key[:2], "big"), layout.record_bytes(key, packed))
        self.put_many(keys, positions)

    def account(self, key_group: int, name: str, digest_change: int, count_change: int, size_change_bytes: int) -> None:
        """Add changes to the digest, the entry count and the bytes of a key group."""
        self.resize(key_group, size_change_bytes)
        self._digests[key_group] = self._digests.get(key_group, 0) + digest_change
        self._counts[key_group, name] = self._counts.get((key_group, name), 0) + count_change
        self._totals[name] = self._totals.get(name, 0) + count_change

    def resize(self, key_group: int, change_bytes: int) -> None:
        """Add `change_bytes` to the byte count of a key group."""
        self._sizes[key_group] = self._sizes.get(key_group, 0) + change_bytes

    def key_group_states(self) -> tuple[KeyGroupState, ...]:
        """Write all changes, and return the non-empty key groups, ascending, with counts and digests."""
        self._write_changes()
        counts: dict[int, dict[str, int]] = {}
        for (key_group, name), count in sorted(self._counts.items()):
            if count < 0:
                raise InvariantViolated(f"the entry count of state {name!r} in key group {key_group} is {count}")
            if count:
                counts.setdefault(key_group, {})[name] = count
        for key_group, digest in self._digests.items():
            if key_group not in counts and digest % 2**64:
                raise InvariantViolated(f"key group {key_group} is empty, but its digest is {digest % 2**64:016x}")
        return tuple(
            KeyGroupState(
                key_group=key_group,
                entries=entries,
                digest=self._digests.get(key_group, 0) % 2**64,
                size_bytes=self._counted_bytes(key_group),
            )
            for key_group, entries in counts.items()
        )

    def _counted_bytes(self, key_group: int) -> int | None:
        size_bytes = self._sizes.get(key_group, 0)
        # A size below 0 means that a count was wrong. A negative size would make the record unreadable, so this method
        # returns None, which means "not counted". The worst result is that the shard is rewritten once.
        return None if key_group in self._uncounted or size_bytes < 0 else size_bytes

    # --- single entries -----------------------------------------------------------------------------------------------

    def read(self, stored_key: bytes) -> bytes | None:
        """Return the entry as it is stored, expired or not; None for no entry."""
        entry = self.cache.get(stored_key, UNREAD)
        if entry is UNREAD:
            self.relieve()
            entry = self.cache[stored_key] = self.store.get(stored_key)
            self.gathered_bytes += _READ_BYTES + len(entry or b"")
        return entry  # type: ignore[no-any-return]

    def read_many(self, wanted: Sequence[bytes]) -> list[bytes | None]:
        """Return the entries of several stored keys. One multi-get reads those that are not in memory."""
        self.relieve()
        missing = [key for key in wanted if key not in self.cache]
        if missing:
            found = self.store.get_many(missing)
            self.cache.update(zip(missing, found, strict=True))
            self.gathered_bytes += _READ_BYTES * len(found) + sum(map(len, filter(None, found)))
        return [self.cache[key] for key in wanted]

    def write(self, stored_key: bytes, entry: bytes | None) -> None:
        """Replace an entry; None removes it.

        Digests, counts and indexes are updated when the change is written to the store.
        """
        cache = self.cache
        if stored_key not in self.before:
            self.before[stored_key] = cache.get(stored_key, UNREAD)
        cache[stored_key] = entry
        self.gathered_bytes += CHANGE_BYTES + (len(entry) if entry else 0)

    def write_new(self, stored_key: bytes, entry: bytes) -> None:
        """Write an entry under a stored key that has no entry in the store, as the caller knows without a read.

        After `write`, the flush may have to read the old entry from the store for the digest. After `write_new`, it
        need not.
        """
        self.cache.setdefault(stored_key, None)
        self.write(stored_key, entry)

    def write_unaccounted(self, stored_key: bytes, data: bytes | None) -> None:
        """Change the bounds of a list: the position of its first element, and the position of the next appended one.

        Digests and entry counts leave the bounds out. The change is written to the store with the next flush.
        """
        before = self.read(stored_key)
        if before is None or data is None or len(before) != len(data):
            change_bytes = layout.record_bytes(stored_key, data) if data is not None else 0
            change_bytes -= layout.record_bytes(stored_key, before) if before is not None else 0
            self.resize(int.from_bytes(stored_key[:2], "big"), change_bytes)
        self.cache[stored_key] = data
        self.unaccounted[stored_key] = data

    def visible(self, entry: bytes | None) -> bytes | None:
        """Return the encoded row of an entry; None if there is no entry or it has expired."""
        if entry is None:
            return None
        if entry[0] == layout.EXPIRING:
            expiry_ms = layout.expiry_of(entry)
            return entry[9:] if expiry_ms is not None and expiry_ms > self.now_ms else None
        return entry

    def entry_of(self, row: bytes, ttl_ms: int | None) -> bytes:
        """Return a row as a stored entry.

        `ttl_ms`: Time to live from the interval's processing time on, in milliseconds; None for an entry that never
        expires.
        """
        return row if ttl_ms is None else layout.with_expiry(row, layout.later(self.now_ms, ttl_ms))

    def scan_map(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield all entries of one key's map, or all timers of a key. Expired entries are included.

        Map entries come in the order of encoded user keys, timers in the order of time.

        The caller gets the entries as they are when it asks for the first one: later writes and flushes do not change
        the result. The store is read only as far as the caller iterates.
        """
        changed = self._changes_to_scan(prefix)
        scan = _Scan(prefix, layout.after(prefix), {key: self.cache[key] for key in changed})
        if (listed := self._listed.get(prefix)) is not None:
            yield from _overlaid(listed, scan.over, None)
            return
        rows, ended = _FIRST_SCAN_ROWS, False
        while not ended:
            self.relieve()
            keys, entries, ended = self.store.read_range(scan.start, scan.end, rows=rows)
            chunk = list(zip(keys, entries, strict=True))
            (self._scans.discard if ended else self._scans.add)(scan)
            for key, entry in chunk:
                # If the processor changes this entry later, the digest needs the old entry. The cache keeps the old
                # entry, so it need not be read again.
                self.cache.setdefault(key, entry)
            self.gathered_bytes += _READ_BYTES * len(chunk) + sum(map(len, entries))
            if not ended:
                scan.start, rows = keys[-1] + b"\x00", min(8 * rows, _MOST_SCAN_ROWS)
            over = scan.over
            yield from _overlaid(chunk, over, None if ended else scan.start) if over else chunk

    def _changes_to_scan(self, prefix: bytes) -> set[bytes]:
        """Return the stored keys under a map's prefix whose changes are not yet written to the store.

        A scan of the map merges each of them into its result. If there are more than _SCANNED_CHANGES, this method
        writes all changes to the store, and returns the empty set.
        """
        changed = self._changed_maps.get(prefix, _NO_CHANGES)
        if len(changed) <= _SCANNED_CHANGES:
            return changed
        self._write_changes()
        return _NO_CHANGES

    def holds_any(self, prefix: bytes) -> bool:
        """Return True if one key's map has an entry that has not expired."""
        changed = self._changes_to_scan(prefix)
        if any(self.visible(self.cache[key]) is not None for key in changed):
            return True
        start, end, rows, ended = prefix, layout.after(prefix), _FIRST_SCAN_ROWS, False
        while not ended:
            keys, entries, ended = self.store.read_range(start, end, rows=rows)
            if any(
                key not in changed and self.visible(entry) is not None for key, entry in zip(keys, entries, strict=True)
            ):
                return True
            if not ended:
                start, rows = keys[-1] + b"\x00", min(8 * rows, _MOST_SCAN_ROWS)
        return False

    def write_map(self, start: bytes, stored_key: bytes, entry: bytes | None) -> None:
        """Replace an entry of a map, or a timer of a key."""
        self.write(stored_key, entry)
        self._changed_maps.setdefault(start, set()).add(stored_key)

    # --- timers -------------------------------------------------------------------------------------------------------

    def timers(self) -> Iterator[int]:
        """Return the current key's timers, ascending, in milliseconds since the epoch.

        The timers are those at the time when the caller asks for the first one.
        """
        base = self._timers_base()
        self._lists_timers = True
        return (layout.unpack_time(stored_key[-8:]) for stored_key, _ in self.scan_map(base))

    def register_timer(self, expiry_ms: int) -> None:
        """Register a timer of the current key. A timer that is registered already stays as it is."""
        base = self._timers_base()
        stored_key = base + layout.pack_time(expiry_ms)
        if self._due_ms is not None and expiry_ms <= self._due_ms:
            if self.read(stored_key) is not None:
                return
            self._registered_while_firing.add(stored_key)
        elif self.cache.get(stored_key) is not None:
            return
        self.write_map(base, stored_key, b"")
        self.relieve()

    def delete_timer(self, expiry_ms: int) -> None:
        """Delete a timer of the current key. A timer that does not exist is ignored."""
        base = self._timers_base()
        stored_key = base + layout.pack_time(expiry_ms)
        if self.cache.get(stored_key, UNREAD) is None:
            return
        if self._due_ms is not None and expiry_ms <= self._due_ms:
            self._deleted_while_firing.add(stored_key)
        self.write_map(base, stored_key, None)
        self.relieve()

    def _timers_base(self) -> bytes:
        """Return the prefix of the current key's timers.

        Before that, a key group with the old timer layout is rewritten to one entry per timer.
        """
        if self.key_group not in self._timers_apart:
            self.lay_timers_apart(self.key_group)
        return layout.prefix(self.key_group, layout.TIMERS) + self.key

    def lay_timers_apart(self, key_group: int) -> None:
        """Rewrite a key group from the old timer layout, one entry per key, to one entry per timer.

        Reads one timer to learn the layout. A key group without timers, or with known layout, is not read.
        """
        if key_group in self._timers_apart:
            return
        self._timers_apart.add(key_group)
        start = layout.prefix(key_group, layout.TIMERS)
        end = layout.after(start)
        if not self._counts.get((key_group, layout.TIMERS_NAME)):
            return
        _, first, _ = self.store.read_range(start, end, rows=1)
        if not any(first):
            return
        apart: dict[bytes, bytes | None] = {}
        for stored_key, packed in self.store.scan(start, end):
            if packed:  # an empty entry is a timer that this loop wrote
                timers = [start + timer for timer in layout.timers_in(stored_key[3:], packed)]
                self.resize(key_group, sum(layout.record_bytes(timer, b"") for timer in timers))
                self.resize(key_group, -layout.record_bytes(stored_key, packed))
                apart[stored_key] = None
                apart |= dict.fromkeys(timers, b"")
            if len(apart) > _FLUSH_ENTRIES:
                self._put_sorted(apart)
                apart.clear()
        self._put_sorted(apart)

    def due_timers(self, now_ms: int) -> Iterator[DueTimer]:
        """Yield the timers with time <= `now_ms`, ordered by time, key group and key.

        Before a timer is yielded, its key becomes the current key and the key's state is prefetched. A timer is deleted
        when the caller asks for the next one. A timer that a handler deletes meanwhile does not fire. A timer that a
        handler registers meanwhile fires in the next interval at the earliest.
        """
        self.flush()
        due = merge(*(self._due_of_group(kg, now_ms) for kg in self.key_groups_of(layout.TIMERS_NAME)))
        registered, deleted, most_noted = self._registered_while_firing, self._deleted_while_firing, _FLUSH_ENTRIES
        self._due_ms = now_ms
        cache, before = self.cache, self.before
        while round_ := list(islice(due, min(self._prefetch_stride.rows, _DUE_TIMERS))):
            self.flush()
            self._read_due([timer for timer in round_ if timer.stored_key not in deleted])
            for timer in round_:
                _, self.key_group, self.key, stored_key = timer
                if stored_key in registered or stored_key in deleted:
                    continue
                yield timer
                # Delete the fired timer. For speed, this repeats the code of `delete_timer`.
                held = cache.get(stored_key, UNREAD)
                if held is not None:
                    before.setdefault(stored_key, held)
                    cache[stored_key] = None
                    self._changed_maps.setdefault(stored_key[:-8], set()).add(stored_key)
                    self.gathered_bytes += CHANGE_BYTES
            if len(registered) + len(deleted) > most_noted:
                # `registered` and `deleted` are needed only for timers that are still to come. Earlier ones are
                # removed from both sets.
                last = round_[-1].stored_key[-8:]
                for noted in (registered, deleted):
                    noted -= {stored_key for stored_key in noted if stored_key[-8:] < last}
                most_noted = _FLUSH_ENTRIES + 2 * (len(registered) + len(deleted))
        self._due_ms = None
        registered.clear()
        deleted.clear()

    def _due_of_group(self, key_group: int, now_ms: int) -> Iterator[DueTimer]:
        start, base = layout.prefix(key_group, layout.TIMER_INDEX), layout.prefix(key_group, layout.TIMERS)
        unpack, new = layout.unpack_time, DueTimer
        for indexed, _ in self.store.scan(start, start + layout.pack_time(now_ms + 1)):
            key, packed = indexed[11:], indexed[3:11]
            yield new(unpack(packed), key_group, key, base + key + packed)

    def _read_due(self, timers: Sequence[DueTimer]) -> None:
        """Prefetch the state that the handlers of these timers need, and put the timers into the cache.

        The timers are put into the cache without a read: the store holds all of them, and a timer's entry is empty
        bytes.
        """
        keys = sorted({timer[1:3] for timer in timers})
        for key_group in {key_group for key_group, _ in keys}:
            self.lay_timers_apart(key_group)
        groups = np.array([key_group for key_group, _ in keys], np.uint16)
        self._read_ahead(groups, pa.array([key for _, key in keys], pa.binary()))
        self.cache.update(dict.fromkeys([timer.stored_key for timer in timers], b""))

    # --- dropped states -----------------------------------------------------------------------------------------------

    def drop(self, descriptor: StateDescriptor) -> None:
        """Remove all entries of a state. Reads each entry once, because the digest must subtract its hash."""
        seed = layout.seed_of(descriptor.name)
        if self._descriptors.get(descriptor.name) is descriptor:
            # The processor has declared no new state of this name. Forget the dropped state, so that a use of the name
            # is an error.
            del self._descriptors[descriptor.name]
        self.flush()
        for key_group in self.key_groups_of(descriptor.name):
            start = layout.prefix(key_group, descriptor.state_id)
            end = layout.after(start)
            assert end is not None
            change = size_bytes = 0
            for stored_key, entry in self.store.scan(start, end):
                self.changed_bytes += len(stored_key)
                size_bytes += layout.entry_bytes(stored_key, entry)
                if descriptor.kind == "list" and layout.is_positions(entry):
                    continue
                change -= layout.entry_hash(seed, stored_key[3:], entry)
                if (index_key := layout.expiry_key(stored_key, entry)) is not None:
                    self.unaccounted[index_key] = None
                if len(self.unaccounted) + len(self.before) > _FLUSH_ENTRIES:
                    self.flush()
            self.account(key_group, descriptor.name, change, -self._counts[key_group, descriptor.name], -size_bytes)
            self.store.delete_range(start, end)
        self.flush()


_NO_CHANGES: set[bytes] = set()


def ascend(keys: Sequence[bytes]) -> bool:
    """Return True if no key is less than the key before."""
    return all(map(le, keys, islice(keys, 1, None)))


def _overlaid(
    chunk: list[tuple[bytes, bytes]], over: dict[bytes, bytes | None], end: bytes | None
) -> list[tuple[bytes, bytes]]:
    """Return a chunk of a scan as the entries were when the scan began."""
    entries: dict[bytes, bytes | None] = dict(chunk)
    for key in [key for key in over if end is None or key < end]:
        entries[key] = over.pop(key)
    return sorted((key, entry) for key, entry in entries.items() if entry is not None)
