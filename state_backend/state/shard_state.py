"""The keyed state of one shard: what processors read and write, key by key.

Reads see own writes. One batch of input is one round: the entries that a batch's keys will need are prefetched by one
multi-get or scan, changes gather in memory and are written in one batch. With the batch, not with each change, the state
digest and the entry counts of the key groups follow, and what was replaced unread is read then.

Memory is bounded by bytes, and not by rounds alone: a round ends early where much was read ahead, and changes are written early,
also between two calls of one handler, where much has gathered. Only a single call's own values are as large as they are.
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
import numpy.typing as npt
import pyarrow as pa

from state_backend.adapters.rocks import RocksStore
from state_backend.formats.spark_nulls import MismatchCounts
from state_backend.state import layout
from state_backend.state.entry_columns import changes_by_key_group, is_expiring, parts_of, stored_keys
from state_backend.values.errors import InvariantViolated, StateSchemaError
from state_backend.values.records import KeyGroupState, StateDescriptor

UNREAD: Any = object()
_FLUSH_ENTRIES = 10_000
MIB = 1024 * 1024
# Bytes in memory: read ahead for a round; read on demand or changed until a flush; taken into Arrow in one go.
PREFETCH_BYTES, GATHERED_BYTES, PART_BYTES = 16 * MIB, 32 * MIB, 32 * MIB
# Bytes of one write batch. RocksDB holds a batch twice until it is written.
_WRITE_BYTES = 8 * MIB
# What Python needs for one changed entry, or for one that was read, beside the entry.
CHANGE_BYTES, _READ_BYTES = 400, 200
# Timers that fire in one round; timers of one key that are read ahead where the processor lists timers.
_DUE_TIMERS, _LISTED_TIMERS = 4096, 16
# Rows of the first chunk of a scan of one key's entries; each further chunk has 8 times as many, up to the most. A map with more unwritten
# changes than _SCANNED_CHANGES has them written before it is scanned, so that the scan need not merge them.
_FIRST_SCAN_ROWS, _MOST_SCAN_ROWS, _SCANNED_CHANGES = 32, 65_536, 1024
_GET_ROWS = 1024
# From so many rows on, calls into Arrow and NumPy cost less than a loop. For entries larger than MAX_COLUMN_BYTES their copies cost
# more than the loop.
MIN_COLUMN_ROWS, MAX_COLUMN_BYTES = 64, 4096
# A deleted range costs every reader a little, in every file that has one.
RANGE_KEYS = 64
# Passing by an entry in a scan costs about a quarter of looking one up. For fewer than MIN_SCAN_ROWS wanted entries it does not pay to
# begin a scan.
SCAN_SHARE = 4
MIN_SCAN_ROWS = 16


class DueTimer(NamedTuple):
    """A timer whose time has come, and where it lies; the order is that in which timers fire."""

    expiry_ms: int
    key_group: int
    key: bytes
    stored_key: bytes


class Stride:
    """How many entries to read at once, so that they are about ``size_bytes``: by what those before were, since a size is known when
    it is read. Begins with few."""

    __slots__ = ("_most", "_size_bytes", "rows")

    def __init__(self, *, size_bytes: int, most: int) -> None:
        self.rows = 4
        self._size_bytes, self._most = size_bytes, most

    def seen(self, rows: int, size_bytes: int) -> None:
        """So many were read."""
        fitting = self._size_bytes * rows // size_bytes if size_bytes else self._most
        self.rows = max(1, min(4 * self.rows, fitting, self._most))


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Scan:
    """A scan that is under way: entries from ``start`` to ``end`` are still to be read. ``over`` holds those of them that the store
    has otherwise than they were when the scan began; None: there was none."""

    start: bytes
    end: bytes | None
    over: dict[bytes, bytes | None]


class ShardState:
    """State of the key groups of one shard, over a store that holds nothing else.

    ``now_ms`` is the logical processing time: expiry is judged by it, never by a wall clock. The states of
    ``state_variables`` act on the key that ``set_key`` chose last. ``zone``: of naive datetimes in timestamps. ``nulls_for_misfits``:
    store NULL where Spark does (`spark_nulls`), and count that in ``mismatches``.
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
        # What the batch read or wrote, as it is now, and of what it wrote, how it was: UNREAD where nobody looked.
        self.cache: dict[bytes, bytes | None] = {}
        self.before: dict[bytes, bytes | None] = {}
        self.unaccounted: dict[bytes, bytes | None] = {}
        # Of what was read on demand or changed since the last flush.
        self.gathered_bytes = 0
        self._prefetch_stride = Stride(size_bytes=PREFETCH_BYTES, most=1 << 20)
        self._change_stride = Stride(size_bytes=PART_BYTES, most=1024)
        # Maps and timers are scanned by prefix; of these prefixes some entries are not written yet.
        self._changed_maps: dict[bytes, set[bytes]] = {}
        self._scans: WeakSet[_Scan] = WeakSet()
        # Timers of keys as the store has them, for a processor that lists them.
        self._lists_timers = False
        self._listed: dict[bytes, list[tuple[bytes, bytes]]] = {}
        # Key groups whose timers are known to lie one by one.
        self._timers_apart: set[int] = set()
        self._due_ms: int | None = None
        self._registered_while_firing: set[bytes] = set()
        self._deleted_while_firing: set[bytes] = set()
        self._digests: dict[int, int] = {}
        self._counts: dict[tuple[int, str], int] = {}
        self._totals: dict[str, int] = {}
        # Bytes of each key group's records; only what changed of those that were never counted.
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
        """What the driver planned for the state. Raises: StateSchemaError if there is none of this kind."""
        descriptor = self._descriptors.get(name)
        if descriptor is None or descriptor.kind != kind:
            raise StateSchemaError(
                f"{kind} state {name!r} was not declared when the pipeline was planned: init() must not vary"
            )
        return descriptor

    def entries(self, name: str, key_group: int | None = None) -> int:
        """How many entries a state has, in a key group or in all; what was changed key by key counts when it is written."""
        return self._totals.get(name, 0) if key_group is None else self._counts.get((key_group, name), 0)

    def key_groups_of(self, name: str) -> list[int]:
        """The key groups where a state has entries, ascending."""
        return sorted(kg for (kg, of), n in self._counts.items() if of == name and n)

    def descriptor_of(self, state_id: int) -> StateDescriptor | None:
        """The state of this id, if there is one."""
        return self._by_id.get(state_id)

    def key_groups(self) -> list[int]:
        """The key groups with entries, ascending."""
        return sorted({kg for (kg, _), n in self._counts.items() if n})

    def prefetch_state(self, descriptor: StateDescriptor, suffix: bytes = b"") -> None:
        """From now on, what lies under each key of a batch, followed by ``suffix``, is read with the batch."""
        self._prefetched[descriptor.state_id, suffix] = descriptor.name

    def set_key(self, key_group: int, key: bytes) -> None:
        """Chooses the key that states and timers act on; key group -1: none."""
        self.key_group = key_group
        self.key = key

    # --- batches ----------------------------------------------------------------------------------------------------------------

    def prefetch(self, key_groups: npt.NDArray[np.uint16], keys: pa.Array) -> int:
        """Reads what a batch's keys will need, after a flush. Keys are encoded, and ascend with their key groups. Returns of how many
        keys, at least one: it ends where about 16 MiB were read. The next are to be read when these are done."""
        done = size_bytes = 0
        while done < len(keys) and size_bytes < PREFETCH_BYTES:
            end = min(len(keys), done + self._prefetch_stride.rows)
            read, read_bytes = self._read_ahead(key_groups[done:end], keys[done:end])
            done += read
            size_bytes += read_bytes
        return done

    def _read_ahead(self, key_groups: npt.NDArray[np.uint16], keys: pa.Array) -> tuple[int, int]:
        """Of how many keys everything was read, at least one, and the bytes of it."""
        size_bytes = 0
        for (state_id, suffix), name in self._prefetched.items():
            wanted = stored_keys(key_groups, state_id, keys, suffix)
            # Of a state without entries nothing need be read.
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
        """What the store holds under the first of these keys, about so many bytes of it."""
        found: list[bytes | None] = []
        size_bytes = 0
        while len(found) < len(wanted) and size_bytes < most_bytes:
            some = self.store.get_many(wanted[len(found) : len(found) + _GET_ROWS])
            size_bytes += sum(map(len, filter(None, some)))
            found += some
        return found

    def read_sorted(
        self, name: str, key_groups: npt.NDArray[np.uint16], wanted: Sequence[bytes], most_bytes: int | None = None
    ) -> Sequence[bytes | None]:
        """What the store holds under these ascending keys of one state, which has one entry per key. Where they are a good
        part of a key group's entries, all between the first and the last are read in passing: that is several times faster
        per entry than to look for each.

        ``most_bytes``: it may end behind the entry that exceeds them, and tell of the first keys only, at least of one."""
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
        """Writes the gathered changes to the store and forgets what was read."""
        self._write_changes()
        self.cache.clear()
        self._listed.clear()
        self.gathered_bytes = 0

    def relieve(self) -> None:
        """Between two calls of a handler: a flush if much has gathered."""
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
        """The keys of all changes, ascending, and what the store has under them: some 32 MiB at a time, new entries included."""
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
        """Brings digests and counts up to date; what has to be written to the indexes."""
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
                _index_expiry(index, key, entry_before, entry)
        return index

    def _account_columns(
        self, keys: list[bytes], old: list[bytes | None], new: list[bytes | None]
    ) -> dict[bytes, bytes | None]:
        """The same for many entries at once."""
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
            _index_expiry(index, keys[at], old[at], new[at])
        for at in np.flatnonzero(state_ids == layout.TIMERS).tolist():
            index[layout.timer_index_key(keys[at])] = new[at]
        return index

    def put_many(
        self, keys: Sequence[bytes], entries: Sequence[bytes | None], sizes: tuple[int, int] | None = None
    ) -> None:
        """Writes entries past the gathered changes, None to delete: for whoever reads, accounts and indexes by itself. ``sizes``: bytes of
        all keys, and of all entries, if they are known."""
        key_bytes, entry_bytes = sizes or (sum(map(len, keys)), sum(map(len, filter(None, entries))))
        self.changed_bytes += key_bytes + entry_bytes
        if entry_bytes <= _WRITE_BYTES:
            self.store.write_columns(keys, entries)
            return
        begin, size_bytes = 0, 0
        for end, entry in enumerate(entries, 1):
            size_bytes += len(entry or b"")
            if size_bytes >= _WRITE_BYTES or end == len(entries):
                self.store.write_columns(keys[begin:end], entries[begin:end])
                begin, size_bytes = end, 0

    def delete_many(self, keys: Sequence[bytes], start: bytes, end: bytes) -> None:
        """Deletes these keys past the gathered changes: all that the store has from ``start`` on and before ``end``. Many of them
        as one range, which is one record in the files and not one for each."""
        if len(keys) < RANGE_KEYS:
            self.put_many(keys, [None] * len(keys))
        else:
            self.changed_bytes += sum(map(len, keys))
            self.store.delete_range(start, end)

    def put_positions(self, keys: Sequence[bytes], positions: Sequence[bytes]) -> None:
        """Writes the positions of lists that have none yet."""
        for key, packed in zip(keys, positions, strict=True):
            self.resize(int.from_bytes(key[:2], "big"), layout.record_bytes(key, packed))
        self.put_many(keys, positions)

    def account(self, key_group: int, name: str, digest_change: int, count_change: int, size_change_bytes: int) -> None:
        """Adds to what the digest, the entry count and the bytes of a key group are."""
        self.resize(key_group, size_change_bytes)
        self._digests[key_group] = self._digests.get(key_group, 0) + digest_change
        self._counts[key_group, name] = self._counts.get((key_group, name), 0) + count_change
        self._totals[name] = self._totals.get(name, 0) + count_change

    def resize(self, key_group: int, change_bytes: int) -> None:
        """Adds to the bytes that a key group's records take."""
        self._sizes[key_group] = self._sizes.get(key_group, 0) + change_bytes

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
        # Less than nothing: a wrong count costs a rewriting, and must not cost the record, which could not be read. It is counted anew.
        return None if key_group in self._uncounted or size_bytes < 0 else size_bytes

    # --- entries, for the states of a key ----------------------------------------------------------------------------------------------

    def read(self, stored_key: bytes) -> bytes | None:
        """The entry as it is stored, expired or not."""
        entry = self.cache.get(stored_key, UNREAD)
        if entry is UNREAD:
            self.relieve()
            entry = self.cache[stored_key] = self.store.get(stored_key)
            self.gathered_bytes += _READ_BYTES + len(entry or b"")
        return entry  # type: ignore[no-any-return]

    def read_many(self, wanted: Sequence[bytes]) -> list[bytes | None]:
        """``read`` for several, with one multi-get for what is not at hand."""
        self.relieve()
        missing = [key for key in wanted if key not in self.cache]
        if missing:
            found = self.store.get_many(missing)
            self.cache.update(zip(missing, found, strict=True))
            self.gathered_bytes += _READ_BYTES * len(found) + sum(map(len, filter(None, found)))
        return [self.cache[key] for key in wanted]

    def write(self, stored_key: bytes, entry: bytes | None) -> None:
        """Replaces an entry; None removes it. Digest, counts and indexes follow when the batch is written."""
        cache = self.cache
        if stored_key not in self.before:
            self.before[stored_key] = cache.get(stored_key, UNREAD)
        cache[stored_key] = entry
        self.gathered_bytes += CHANGE_BYTES + (len(entry) if entry else 0)

    def write_new(self, stored_key: bytes, entry: bytes) -> None:
        """The same where the store is known to hold nothing, unless this batch wrote it."""
        self.cache.setdefault(stored_key, None)
        self.write(stored_key, entry)

    def write_unaccounted(self, stored_key: bytes, data: bytes | None) -> None:
        """Writes what is no entry: the positions of a list."""
        before = self.read(stored_key)
        if before is None or data is None or len(before) != len(data):
            change_bytes = layout.record_bytes(stored_key, data) if data is not None else 0
            change_bytes -= layout.record_bytes(stored_key, before) if before is not None else 0
            self.resize(int.from_bytes(stored_key[:2], "big"), change_bytes)
        self.cache[stored_key] = data
        self.unaccounted[stored_key] = data

    def visible(self, entry: bytes | None) -> bytes | None:
        """The row in an entry, or None if there is none or it has expired."""
        if entry is None:
            return None
        if entry[0] == layout.EXPIRING:
            expiry_ms = layout.expiry_of(entry)
            return entry[9:] if expiry_ms is not None and expiry_ms > self.now_ms else None
        return entry

    def entry_of(self, row: bytes, ttl_ms: int | None) -> bytes:
        """A row as it is stored; ``ttl_ms`` counts from the interval's processing time, None: it never expires."""
        return row if ttl_ms is None else layout.with_expiry(row, layout.later(self.now_ms, ttl_ms))

    def scan_map(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """All entries under a map's prefix, expired ones too, by user key, as they are when the first one is asked for, whatever is
        written or flushed meanwhile. The store is read no further than entries are asked for."""
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
                # Whoever writes them next need not read them.
                self.cache.setdefault(key, entry)
            self.gathered_bytes += _READ_BYTES * len(chunk) + sum(map(len, entries))
            if not ended:
                scan.start, rows = keys[-1] + b"\x00", min(8 * rows, _MOST_SCAN_ROWS)
            over = scan.over
            yield from _overlaid(chunk, over, None if ended else scan.start) if over else chunk

    def _changes_to_scan(self, prefix: bytes) -> set[bytes]:
        """The changed keys under a map's prefix that are not written yet. Writes them if there are more than _SCANNED_CHANGES, since a
        scan looks at each."""
        changed = self._changed_maps.get(prefix, _NO_CHANGES)
        if len(changed) <= _SCANNED_CHANGES:
            return changed
        self._write_changes()
        return _NO_CHANGES

    def holds_any(self, prefix: bytes) -> bool:
        """Whether a readable entry lies under a map's prefix."""
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
        """``write`` for an entry under a map's prefix."""
        self.write(stored_key, entry)
        self._changed_maps.setdefault(start, set()).add(stored_key)

    # --- timers -------------------------------------------------------------------------------------------------------------------------

    def timers(self) -> Iterator[int]:
        """The current key's timers, ascending, as they are when the first one is asked for."""
        base = self._timers_base()
        self._lists_timers = True
        return (layout.unpack_time(stored_key[-8:]) for stored_key, _ in self.scan_map(base))

    def register_timer(self, expiry_ms: int) -> None:
        """A timer is unique per key and time: again is no change. Raises: StateTypeError for what is no time."""
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
        """One that is not there is no change. Raises: StateTypeError for what is no time."""
        base = self._timers_base()
        stored_key = base + layout.pack_time(expiry_ms)
        if self.cache.get(stored_key, UNREAD) is None:
            return
        if self._due_ms is not None and expiry_ms <= self._due_ms:
            self._deleted_while_firing.add(stored_key)
        self.write_map(base, stored_key, None)
        self.relieve()

    def _timers_base(self) -> bytes:
        """Where the current key's timers lie, one by one."""
        if self.key_group not in self._timers_apart:
            self.lay_timers_apart(self.key_group)
        return layout.prefix(self.key_group, layout.TIMERS) + self.key

    def lay_timers_apart(self, key_group: int) -> None:
        """Rewrites a key group whose timers lie together for each key. Looks at its first one, if it has any."""
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
            if packed:  # else it was written just now
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
        """Timers with expiry <= now_ms in order of (expiry, key group, key), with their key chosen and its state read ahead. A timer
        is deleted when the next one is asked for. One that a handler deletes meanwhile does not fire; one that it registers fires
        in the next interval at the earliest."""
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
                # As `delete_timer` does it.
                held = cache.get(stored_key, UNREAD)
                if held is not None:
                    before.setdefault(stored_key, held)
                    cache[stored_key] = None
                    self._changed_maps.setdefault(stored_key[:-8], set()).add(stored_key)
                    self.gathered_bytes += CHANGE_BYTES
            if len(registered) + len(deleted) > most_noted:
                # Of timers before this one none comes again.
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
        """What the handlers of these timers will need; they are in the store."""
        keys = sorted({timer[1:3] for timer in timers})
        for key_group in {key_group for key_group, _ in keys}:
            self.lay_timers_apart(key_group)
        groups = np.array([key_group for key_group, _ in keys], np.uint16)
        self._read_ahead(groups, pa.array([key for _, key in keys], pa.binary()))
        self.cache.update(dict.fromkeys([timer.stored_key for timer in timers], b""))

    # --- dropping ------------------------------------------------------------------------------------------------------------------------

    def drop(self, descriptor: StateDescriptor) -> None:
        """Removes all entries of a state. Reads each once, since the digest has to give back what each put in."""
        seed = layout.seed_of(descriptor.name)
        if self._descriptors.get(descriptor.name) is descriptor:
            # No other state has its name now; whoever asks for it is told so.
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
                if entry[0] == layout.EXPIRING:
                    self.unaccounted[_expiry_key(stored_key, entry)] = None
                if len(self.unaccounted) + len(self.before) > _FLUSH_ENTRIES:
                    self.flush()
            self.account(key_group, descriptor.name, change, -self._counts[key_group, descriptor.name], -size_bytes)
            self.store.delete_range(start, end)
        self.flush()


_NO_CHANGES: set[bytes] = set()


def ascend(keys: Sequence[bytes]) -> bool:
    """Whether no key is less than the one before it."""
    return all(map(le, keys, islice(keys, 1, None)))


def _overlaid(
    chunk: list[tuple[bytes, bytes]], over: dict[bytes, bytes | None], end: bytes | None
) -> list[tuple[bytes, bytes]]:
    """The entries of a chunk as they were, and those before ``end`` that it lacks. What is done with is taken out of ``over``."""
    entries: dict[bytes, bytes | None] = dict(chunk)
    for key in [key for key in over if end is None or key < end]:
        entries[key] = over.pop(key)
    return sorted((key, entry) for key, entry in entries.items() if entry is not None)


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
