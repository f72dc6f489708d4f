"""Keyed state of one shard, which processors read and write key by key.

Reads see earlier writes of the same interval. One batch of input is one round:
1. `prefetch` reads the entries that the batch's keys will need, by one multi-get or scan.
2. State variables and timers change entries in memory.
3. `flush` writes the changes in one batch. The digest needs each replaced entry, so `flush` reads the replaced entries
   that were not read before.

Memory is bounded in bytes, as docs/design-state.md says ("Reads and writes"). Only the values of a single call have no
bound.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, tzinfo
from itertools import islice
from typing import Any
from weakref import WeakSet

import numpy as np
import pyarrow as pa

from state_backend.adapters.rocks import RocksStore, Stride
from state_backend.formats.spark_nulls import MismatchCounts
from state_backend.state import layout
from state_backend.state.entry_columns import Groups, stored_keys
from state_backend.state.stored_entries import MIB, StoredEntries
from state_backend.values.errors import StateSchemaError
from state_backend.values.records import KeyGroupState, StateDescriptor

UNREAD: Any = object()
# Sizes, in bytes of entries. PREFETCH_BYTES: approximate size of a prefetch. GATHERED_BYTES: a flush comes when changed
# entries and entries that were read on demand exceed this size. PART_BYTES: approximate size that a flush converts to
# Arrow at a time.
PREFETCH_BYTES, GATHERED_BYTES, PART_BYTES = 16 * MIB, 32 * MIB, 32 * MIB
# Estimated bytes of Python objects for each changed entry, and for each read entry, in addition to the entry's bytes.
CHANGE_BYTES, _READ_BYTES = 400, 200
# If the processor lists timers, a prefetch reads the timers of each key that has at most this many.
_LISTED_TIMERS = 16
# A scan of one key's entries begins with a chunk of _FIRST_SCAN_ROWS. Each later chunk has 8 times as many rows, up to
# _MOST_SCAN_ROWS. A scan merges the map's unwritten changes into each chunk. If there are more than _SCANNED_CHANGES,
# they are written to the store first.
_FIRST_SCAN_ROWS, _MOST_SCAN_ROWS, _SCANNED_CHANGES = 32, 65_536, 1024


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Scan:
    start: bytes
    # The scan ends before this key. None: the scan ends with the last key of the store.
    end: bytes | None
    # For each stored key whose entry in the store differs from the entry when the scan began: the entry when the scan
    # began; None for no entry. The scan yields these entries in place of the store's.
    over: dict[bytes, bytes | None]


@dataclass(slots=True, eq=False)
class Firing:
    """The timers that handlers registered and deleted while timers fire."""

    # Timers with this time or an earlier one fire now; None while no timers fire.
    due_ms: int | None = None
    registered: set[bytes] = field(default_factory=set)
    deleted: set[bytes] = field(default_factory=set)


class ShardState:
    """Entries of one shard that were read or changed, in memory, over the shard's store.

    State variables and timers act on the key of the last `set_key`. For speed, they change three dicts by stored key
    themselves: `cache` (current entries), `before` (the store's entries, for changed keys) and `unaccounted` (changed
    bounds of lists). In these dicts, None stands for no entry.
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
        self.stored = StoredEntries(store, key_groups, descriptors)
        self.accounts = self.stored.accounts
        self.mismatches = MismatchCounts() if nulls_for_misfits else None
        self.now_ms = now_ms
        self.struct_factory = struct_factory
        self.zone = zone
        self.descriptors = {d.name: d for d in descriptors}
        self.cache: dict[bytes, bytes | None] = {}
        self.before: dict[bytes, bytes | None] = {}
        self.unaccounted: dict[bytes, bytes | None] = {}
        # Bytes read on demand or changed since the last flush.
        self.gathered_bytes = 0
        self.firing = Firing()
        # True once the processor has listed timers. From then on `prefetch` also reads each key's timers, and puts
        # their stored keys and entries into `_listed`.
        self.lists_timers = False
        self._listed: dict[bytes, list[tuple[bytes, bytes]]] = {}
        self.prefetch_stride = Stride(size_bytes=PREFETCH_BYTES, most=1 << 20)
        self._change_stride = Stride(size_bytes=PART_BYTES, most=1024)
        # The stored keys of map entries and timers with unwritten changes, grouped by the prefix of the map or of the
        # key's timers. A scan of a prefix merges these changes into the entries that it reads from the store.
        self.changed_maps: dict[bytes, set[bytes]] = {}
        self._scans: WeakSet[_Scan] = WeakSet()
        self._prefetched: dict[tuple[int, bytes], str] = {}
        self.key_group = -1
        self.key = b""

    def descriptor(self, name: str, kind: str) -> StateDescriptor:
        """Return the driver's descriptor of a state. Raise if `init` did not declare the state on the driver."""
        descriptor = self.descriptors.get(name)
        if descriptor is None or descriptor.kind != kind:
            raise StateSchemaError(
                f"init() did not declare {kind} state {name!r} on the driver; it must declare the same states every time"
            )
        return descriptor

    def prefetch_state(self, descriptor: StateDescriptor, suffix: bytes = b"") -> None:
        """Let every later `prefetch` read, for each key, the entry of this state whose stored key ends in `suffix`."""
        self._prefetched[descriptor.state_id, suffix] = descriptor.name

    def set_key(self, key_group: int, key: bytes) -> None:
        self.key_group = key_group
        self.key = key

    # --- batches ------------------------------------------------------------------------------------------------------

    def prefetch(self, key_groups: Groups, keys: pa.Array) -> int:
        """Read the entries of the first keys into memory, and return the number of these keys. Call `flush` before."""
        done = size_bytes = 0
        while done < len(keys) and size_bytes < PREFETCH_BYTES:
            end = min(len(keys), done + self.prefetch_stride.rows)
            read, read_bytes = self.read_ahead(key_groups[done:end], keys[done:end])
            done += read
            size_bytes += read_bytes
        return done

    def read_ahead(self, key_groups: Groups, keys: pa.Array) -> tuple[int, int]:
        """Read the entries of the first keys into memory, up to about 16 MiB. Return (number of these keys, bytes)."""
        size_bytes = 0
        for (state_id, suffix), name in self._prefetched.items():
            wanted = stored_keys(key_groups, state_id, keys, suffix)
            # If the state counts no entries, the store has none of the wanted ones, and no read is needed.
            if not self.accounts.entries(name):
                self.cache.update(dict.fromkeys(wanted))
                continue
            # With a suffix, the wanted entry is the bounds of a list. A scan would also read the list's elements.
            found = (
                self.stored.look_up(wanted, PREFETCH_BYTES)
                if suffix
                else self.stored.read_sorted(name, key_groups, wanted, PREFETCH_BYTES)
            )
            self.cache.update(zip(wanted, found, strict=False))
            size_bytes += sum(map(len, filter(None, found)))
            if len(found) < len(keys):
                key_groups, keys = key_groups[: len(found)], keys[: len(found)]
        if self.lists_timers and self.accounts.entries(layout.TIMERS_NAME):
            for key_group in np.unique(key_groups).tolist():
                self.stored.check_timers(key_group)
            # A key with initial state and input stands twice in `keys`, and `read_prefixes` finds its timers only once.
            wanted = list(dict.fromkeys(stored_keys(key_groups, layout.TIMERS, keys)))
            stored, entries, counts = self.store.read_prefixes(wanted, _LISTED_TIMERS + 1)
            timers = iter(zip(stored, entries, strict=True))
            for base, count in zip(wanted, counts, strict=True):
                some = list(islice(timers, count))
                if count <= _LISTED_TIMERS:
                    self._listed[base] = some
                    self.cache.update(some)
        self.prefetch_stride.seen(len(keys), size_bytes)
        return len(keys), size_bytes

    def flush(self) -> None:
        """Write the gathered changes to the store, and forget all entries in memory."""
        self._write_changes()
        self.cache.clear()
        self._listed.clear()
        self.gathered_bytes = 0

    def relieve(self) -> None:
        """Flush if the entries that were read on demand or changed exceed 32 MiB."""
        if self.gathered_bytes > GATHERED_BYTES:
            self.flush()

    def _write_changes(self) -> None:
        if not self.before and not self.unaccounted:
            return
        for keys, old in self._parts():
            for scan in tuple(self._scans):
                first = bisect_left(keys, scan.start)
                last = len(keys) if scan.end is None else bisect_left(keys, scan.end)
                for key, entry in zip(keys[first:last], old[first:last], strict=True):
                    if entry != self.cache[key]:
                        scan.over.setdefault(key, entry)
            self.stored.replace(keys, old, list(map(self.cache.__getitem__, keys)))
        self.stored.put_sorted(self.unaccounted)
        self.before.clear()
        self.unaccounted.clear()
        self.changed_maps.clear()
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

    def key_group_states(self) -> tuple[KeyGroupState, ...]:
        self._write_changes()
        return self.accounts.states()

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
        """Return what `read` does for several stored keys, with one multi-get."""
        self.relieve()
        missing = [key for key in wanted if key not in self.cache]
        if missing:
            found = self.store.get_many(missing)
            self.cache.update(zip(missing, found, strict=True))
            self.gathered_bytes += _READ_BYTES * len(found) + sum(map(len, filter(None, found)))
        return [self.cache[key] for key in wanted]

    def write(self, stored_key: bytes, entry: bytes | None) -> None:
        cache = self.cache
        if stored_key not in self.before:
            self.before[stored_key] = cache.get(stored_key, UNREAD)
        cache[stored_key] = entry
        self.gathered_bytes += CHANGE_BYTES + (len(entry) if entry else 0)

    def write_new(self, stored_key: bytes, entry: bytes) -> None:
        """Write an entry under a stored key that, as the caller knows, is not in the store: no old entry is read."""
        self.cache.setdefault(stored_key, None)
        self.write(stored_key, entry)

    def write_unaccounted(self, stored_key: bytes, data: bytes | None) -> None:
        """Change the bounds of a list; `data` None: delete them. Digests and entry counts leave bounds out."""
        before = self.read(stored_key)
        if before is None or data is None or len(before) != len(data):
            change_bytes = layout.record_bytes(stored_key, data) if data is not None else 0
            change_bytes -= layout.record_bytes(stored_key, before) if before is not None else 0
            self.accounts.resize(int.from_bytes(stored_key[:2], "big"), change_bytes)
        self.cache[stored_key] = data
        self.unaccounted[stored_key] = data

    # --- maps and timers ----------------------------------------------------------------------------------------------

    def write_map(self, start: bytes, stored_key: bytes, entry: bytes | None) -> None:
        """Write an entry of a map or a timer of a key; None: delete. `start`: prefix of the map or the timers."""
        self.write(stored_key, entry)
        self.changed_maps.setdefault(start, set()).add(stored_key)

    def scan_map(self, prefix: bytes, rows: int = _FIRST_SCAN_ROWS) -> Iterator[tuple[bytes, bytes]]:
        """Yield all entries of one map, or all timers of one key: what is stored under `prefix`, by stored key.

        Expired entries are included.

        The caller gets the entries as they are when it asks for the first one: later writes and flushes do not change
        the result. The store is read only as far as the caller iterates, `rows` at first.
        """
        changed = self._changes_to_scan(prefix)
        scan = _Scan(prefix, layout.after(prefix), {key: self.cache[key] for key in changed})
        if (listed := self._listed.get(prefix)) is not None:
            yield from _overlaid(listed, scan.over, None)
            return
        ended = False
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
        """Return the stored keys below `prefix` with unwritten changes. If they are many, write all changes first."""
        changed = self.changed_maps.get(prefix, _NO_CHANGES)
        if len(changed) <= _SCANNED_CHANGES:
            return changed
        self._write_changes()
        return _NO_CHANGES


_NO_CHANGES: set[bytes] = set()


def _overlaid(
    chunk: list[tuple[bytes, bytes]], over: dict[bytes, bytes | None], end: bytes | None
) -> list[tuple[bytes, bytes]]:
    """Return a chunk of a scan as it was when the scan began. `over`: entries that have changed since (None: absent).

    Only keys below `end` are taken from `over`; None: all keys.
    """
    entries: dict[bytes, bytes | None] = dict(chunk)
    for key in [key for key in over if end is None or key < end]:
        entries[key] = over.pop(key)
    return sorted((key, entry) for key, entry in entries.items() if entry is not None)
