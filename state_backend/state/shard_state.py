"""The keyed state of one shard: what processors read and write, key by key.

Reads see own writes. One batch of input is one round: the entries that a batch's keys will need are prefetched by one
multi-get, changes gather in memory and are written in one batch. Every change keeps the state digest and the entry counts
of its key group right, which is why each write first reads what it replaces.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from typing import Any, TypeVar

from state_backend.adapters.rocks import RocksStore
from state_backend.formats.key_codec import KeyCodec
from state_backend.formats.schema_evolution import EvolvingRowCodec
from state_backend.formats.types import parse_struct
from state_backend.state import layout
from state_backend.values.errors import InvariantViolated, StateSchemaError, UsageError
from state_backend.values.records import KeyGroupState, StateDescriptor

V = TypeVar("V", bound="ValueState")
L = TypeVar("L", bound="ListState")
M = TypeVar("M", bound="MapState")
_MISSING: Any = object()
_FLUSH_ENTRIES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class DueTimer:
    """A timer whose time has come."""

    expiry_ms: int
    key_group: int
    key: bytes


class ShardState:
    """State of the key groups of one shard, over a store that holds nothing else.

    ``now_ms`` is the logical processing time: expiry is judged by it, never by a wall clock. Values, lists and maps are
    handed out by ``value_state``, ``list_state`` and ``map_state``, and act on the key that ``set_key`` chose last.
    """

    def __init__(
        self,
        store: RocksStore,
        *,
        key_groups: Iterable[KeyGroupState],
        descriptors: Sequence[StateDescriptor],
        now_ms: int,
        struct_factory: Any = None,
    ) -> None:
        self.store = store
        self.now_ms = now_ms
        self.changed_bytes = 0
        self._struct_factory = struct_factory
        self._descriptors = {d.name: d for d in descriptors}
        self._by_id = {d.state_id: d for d in descriptors}
        self._cache: dict[bytes, bytes | None] = {}
        self._dirty: dict[bytes, bytes | None] = {}
        # Maps are scanned by prefix; these are the prefixes that have unwritten changes.
        self._dirty_maps: set[bytes] = set()
        self._firing = False
        self._registered_while_firing: set[tuple[int, int, bytes]] = set()
        self._digests: dict[int, int] = {}
        self._counts: dict[tuple[int, str], int] = {}
        for s in key_groups:
            self._digests[s.key_group] = s.digest
            for name, count in s.entries.items():
                self._counts[s.key_group, name] = count
        self._prefetched: list[tuple[int, bytes]] = [(layout.TIMERS, b"")]
        self._timer_seed = layout.seed_of(layout.TIMERS_NAME)
        self.key_group = -1
        self.key = b""

    # --- what processors hold ---------------------------------------------------------------------------------------------

    def value_state(self, name: str, cls: type[V]) -> V:
        """The value state of that name; its entries are prefetched from now on. ``cls``: ValueState, or a subclass."""
        state = cls(self, self.descriptor(name, "value"))
        self._prefetched.append((state.state_id, b""))
        return state

    def list_state(self, name: str, cls: type[L]) -> L:
        """The list state of that name; its positions are prefetched from now on."""
        state = cls(self, self.descriptor(name, "list"))
        self._prefetched.append((state.state_id, layout.LIST_META))
        return state

    def map_state(self, name: str, cls: type[M]) -> M:
        """The map state of that name."""
        return cls(self, self.descriptor(name, "map"))

    def descriptor(self, name: str, kind: str) -> StateDescriptor:
        """What the driver planned for the state; StateSchemaError if there is none of this kind."""
        descriptor = self._descriptors.get(name)
        if descriptor is None or descriptor.kind != kind:
            raise StateSchemaError(
                f"{kind} state {name!r} was not declared when the pipeline was planned: init() must not vary"
            )
        return descriptor

    def set_key(self, key_group: int, key: bytes) -> None:
        """Chooses the key that states and timers act on."""
        self.key_group = key_group
        self.key = key

    # --- batches ----------------------------------------------------------------------------------------------------------------

    def prefetch(self, keys: Sequence[tuple[int, bytes]]) -> None:
        """Reads what a batch's keys will need: (key group, encoded key), ascending."""
        wanted = [
            layout.prefix(key_group, state_id) + key + suffix
            for state_id, suffix in self._prefetched
            for key_group, key in keys
        ]
        wanted = [key for key in wanted if key not in self._cache]
        self._cache.update(zip(wanted, self.store.get_many(wanted), strict=True))

    def flush(self) -> None:
        """Writes the gathered changes to the store and forgets what was read."""
        self._write_dirty()
        self._cache.clear()

    def _write_dirty(self) -> None:
        if self._dirty:
            self.changed_bytes += sum(len(k) + (len(v) if v is not None else 0) for k, v in self._dirty.items())
            self.store.write(sorted(self._dirty.items()))
            self._dirty.clear()
            self._dirty_maps.clear()

    def put_many(self, changes: Iterable[tuple[bytes, bytes | None]]) -> None:
        """Writes entries, ascending, past the gathered changes: for whoever reads, accounts and indexes by itself."""
        changes = list(changes)
        self.changed_bytes += sum(len(k) + len(v or b"") for k, v in changes)
        self.store.write(changes)

    def account(self, key_group: int, name: str, digest_change: int, count_change: int) -> None:
        """Adds to what the digest and the entry count of a key group are."""
        self._digests[key_group] = self._digests.get(key_group, 0) + digest_change
        self._counts[key_group, name] = self._counts.get((key_group, name), 0) + count_change

    def key_group_states(self) -> tuple[KeyGroupState, ...]:
        """Counts and digests of the non-empty key groups, ascending."""
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

    # --- entries, for the states below ------------------------------------------------------------------------------------------------

    def read(self, stored_key: bytes) -> bytes | None:
        """The entry as it is stored, expired or not."""
        entry = self._cache.get(stored_key, _MISSING)
        if entry is _MISSING:
            entry = self._cache[stored_key] = self.store.get(stored_key)
        return entry  # type: ignore[no-any-return]

    def write(self, stored_key: bytes, entry: bytes | None, name: str, seed: int) -> None:
        """Replaces an entry, keeping digest, counts and the expiry index. ``entry`` None removes it."""
        old = self.read(stored_key)
        if old == entry:
            return
        key_group = self.key_group
        rest = stored_key[3:]
        change = 0
        if old is not None:
            change -= layout.entry_hash(seed, rest, old)
            if old[0] == layout.EXPIRING:
                self._set(self._expiry_key(stored_key, old), None)
        if entry is not None:
            change += layout.entry_hash(seed, rest, entry)
            if entry[0] == layout.EXPIRING:
                self._set(self._expiry_key(stored_key, entry), b"")
        self._digests[key_group] = self._digests.get(key_group, 0) + change
        if old is None:
            self._counts[key_group, name] = self._counts.get((key_group, name), 0) + 1
        elif entry is None:
            self._counts[key_group, name] -= 1
        self._set(stored_key, entry)

    def _set(self, stored_key: bytes, data: bytes | None) -> None:
        self._cache[stored_key] = data
        self._dirty[stored_key] = data

    def _expiry_key(self, stored_key: bytes, entry: bytes) -> bytes:
        expiry_ms = layout.expiry_of(entry)
        assert expiry_ms is not None
        return stored_key[:2] + bytes([layout.EXPIRY_INDEX]) + layout.pack_time(expiry_ms) + stored_key[2:]

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
        if start in self._dirty_maps:
            # Rare (a scan after a write to the same map): writing first is simpler than merging, and as right.
            self._write_dirty()
        return list(self.store.scan(start, layout.after(start)))

    def mark_map(self, start: bytes) -> None:
        self._dirty_maps.add(start)

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
        self._set(
            layout.prefix(self.key_group, layout.TIMERS) + self.key,
            b"".join(map(layout.pack_time, timers)) if timers else None,
        )
        self._set(layout.prefix(self.key_group, layout.TIMER_INDEX) + packed_time + self.key, b"" if sign > 0 else None)
        change = sign * layout.entry_hash(self._timer_seed, self.key + packed_time, b"")
        self._digests[self.key_group] = self._digests.get(self.key_group, 0) + change
        counted = (self.key_group, layout.TIMERS_NAME)
        self._counts[counted] = self._counts.get(counted, 0) + sign

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
            if len(self._dirty) > _FLUSH_ENTRIES:
                self.flush()
        self._firing = False
        self._registered_while_firing.clear()

    # --- dropping ------------------------------------------------------------------------------------------------------------------------

    def drop(self, descriptor: StateDescriptor) -> None:
        """Removes all entries of a state. Reads each once, since the digest has to give back what each put in."""
        seed = layout.seed_of(descriptor.name)
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
                    self._dirty[self._expiry_key(stored_key, entry)] = None
                if len(self._dirty) > _FLUSH_ENTRIES:
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
                self.key_group = key_group
                self.write(stored_key, None, descriptor.name, layout.seed_of(descriptor.name))
                if descriptor.kind == "list":
                    self._trim_list(stored_key[:-9], layout.unpack_position(stored_key[-8:]))
                expired += 1
                if len(self._dirty) > _FLUSH_ENTRIES:
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
        self._set(base + layout.LIST_META, layout.pack_positions(first, next_) if first < next_ else None)


class _KeyedState:
    """What value, list and map share: a descriptor, its codec and its place in the key space."""

    __slots__ = ("_codec", "_name", "_seed", "_shard", "_ttl_ms", "state_id")

    def __init__(self, shard: ShardState, descriptor: StateDescriptor) -> None:
        self._shard = shard
        self._name = descriptor.name
        self._seed = layout.seed_of(descriptor.name)
        self._ttl_ms = descriptor.ttl_ms
        self.state_id = descriptor.state_id
        self._codec = EvolvingRowCodec(descriptor.name, descriptor.versions, shard._struct_factory)

    def _stored_key(self) -> bytes:
        shard = self._shard
        if shard.key_group < 0:
            raise UsageError(f"state {self._name!r} is used outside a key: only the handlers of a key may use state")
        return layout.prefix(shard.key_group, self.state_id) + shard.key


class ValueState(_KeyedState):
    """One row per key."""

    __slots__ = ()

    def exists(self) -> bool:
        return self._shard.visible(self._shard.read(self._stored_key())) is not None

    def get(self) -> tuple[Any, ...] | None:
        row = self._shard.visible(self._shard.read(self._stored_key()))
        return None if row is None else self._codec.decode(row)

    def update(self, new_value: Any) -> None:
        shard = self._shard
        shard.write(
            self._stored_key(), shard.entry_of(self._codec.encode(new_value), self._ttl_ms), self._name, self._seed
        )

    def clear(self) -> None:
        self._shard.write(self._stored_key(), None, self._name, self._seed)


class ListState(_KeyedState):
    """Rows in order per key. Appending touches the positions and the new row only, however long the list."""

    __slots__ = ()

    def exists(self) -> bool:
        return next(self.get(), None) is not None

    def get(self) -> Iterator[tuple[Any, ...]]:
        base = self._stored_key()
        first, next_ = self._positions(base)
        for position in range(first, next_):
            row = self._shard.visible(self._shard.read(base + layout.LIST_ELEMENT + layout.pack_position(position)))
            if row is not None:
                yield self._codec.decode(row)

    def put(self, new_state: Sequence[Any]) -> None:
        rows = [self._codec.encode(value) for value in new_state]
        base = self._stored_key()
        first, next_ = self._positions(base)
        for position in range(first, next_):
            if position >= len(rows):
                self._write_element(base, position, None)
        self._append(base, 0, 0, rows)

    def append_value(self, new_value: Any) -> None:
        base = self._stored_key()
        self._append(base, *self._positions(base), [self._codec.encode(new_value)])

    def append_list(self, new_values: Sequence[Any]) -> None:
        rows = [self._codec.encode(value) for value in new_values]
        base = self._stored_key()
        self._append(base, *self._positions(base), rows)

    def clear(self) -> None:
        base = self._stored_key()
        first, next_ = self._positions(base)
        for position in range(first, next_):
            self._write_element(base, position, None)
        if next_:
            self._shard._set(base + layout.LIST_META, None)

    def _append(self, base: bytes, first: int, next_: int, rows: list[bytes]) -> None:
        for position, row in enumerate(rows, start=next_):
            self._write_element(base, position, self._shard.entry_of(row, self._ttl_ms))
        self._shard._set(base + layout.LIST_META, layout.pack_positions(first, next_ + len(rows)))

    def _positions(self, base: bytes) -> tuple[int, int]:
        """First position and the one after the last; (0, 0) for no list. Expired rows in between may be gone already."""
        packed = self._shard.read(base + layout.LIST_META)
        return layout.unpack_positions(packed) if packed else (0, 0)

    def _write_element(self, base: bytes, position: int, entry: bytes | None) -> None:
        key = base + layout.LIST_ELEMENT + layout.pack_position(position)
        self._shard.write(key, entry, self._name, self._seed)


class MapState(_KeyedState):
    """Rows by user key per key, iterated in the user keys' order."""

    __slots__ = ("_user_keys",)

    def __init__(self, shard: ShardState, descriptor: StateDescriptor) -> None:
        super().__init__(shard, descriptor)
        user_key = descriptor.versions[-1].user_key
        assert user_key is not None
        self._user_keys = KeyCodec(parse_struct(user_key), what=f"user key of state {descriptor.name!r}")

    def exists(self) -> bool:
        return next(self.iterator(), None) is not None

    def get_value(self, key: Any) -> tuple[Any, ...] | None:
        row = self._shard.visible(self._shard.read(self._stored_key() + self._user_keys.encode(key)))
        return None if row is None else self._codec.decode(row)

    def contains_key(self, key: Any) -> bool:
        return self._shard.visible(self._shard.read(self._stored_key() + self._user_keys.encode(key))) is not None

    def update_value(self, key: Any, value: Any) -> None:
        shard = self._shard
        base = self._stored_key()
        shard.mark_map(base)
        entry = shard.entry_of(self._codec.encode(value), self._ttl_ms)
        shard.write(base + self._user_keys.encode(key), entry, self._name, self._seed)

    def remove_key(self, key: Any) -> None:
        base = self._stored_key()
        self._shard.mark_map(base)
        self._shard.write(base + self._user_keys.encode(key), None, self._name, self._seed)

    def iterator(self) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
        base = self._stored_key()
        for stored_key, entry in self._shard.scan_map(base):
            row = self._shard.visible(entry)
            if row is not None:
                yield self._user_keys.decode(stored_key[len(base) :]), self._codec.decode(row)

    def clear(self) -> None:
        base = self._stored_key()
        for stored_key, _ in self._shard.scan_map(base):
            self._shard.write(stored_key, None, self._name, self._seed)
        self._shard.mark_map(base)
