"""Value, list and map state of the current key: the objects that processors use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakSet

from state_backend.adapters.rocks import Stride
from state_backend.formats.key_codec import KeyCodec
from state_backend.formats.schema_evolution import EvolvingRowCodec
from state_backend.formats.spark_nulls import nulling_encoder
from state_backend.formats.types import parse_struct
from state_backend.state import layout
from state_backend.state.shard_state import CHANGE_BYTES, GATHERED_BYTES, UNREAD, ShardState
from state_backend.values.errors import UsageError
from state_backend.values.records import StateDescriptor, StateKind

_NO_LIST = layout.pack_positions(0, 0)
_READ_AHEAD, _READ_AHEAD_BYTES = 256, 16 * 1024 * 1024


class _KeyedState:
    kind: StateKind
    __slots__ = ("_decode", "_encode", "_group", "_name", "_prefix", "_shard", "_ttl_ms")

    def __init__(self, shard: ShardState, name: str) -> None:
        descriptor = shard.descriptor(name, self.kind)
        codec = EvolvingRowCodec(name, descriptor.versions, shard.struct_factory, shard.zone)
        self._shard = shard
        self._name = name
        self._ttl_ms = descriptor.ttl_ms
        self._encode = codec.encode
        if shard.mismatches is not None:
            self._encode = nulling_encoder(name, codec.schema, shard.zone, codec.encode, shard.mismatches)
        self._decode = codec.decode
        self._group = -2  # unequal to every `ShardState.key_group`, also to -1, which means no key
        self._prefix = bytes([0, 0, descriptor.state_id])
        self._prepare(descriptor)

    def _prepare(self, descriptor: StateDescriptor) -> None:
        """Set up what only this kind of state (value, list or map) needs."""

    def _stored_key(self) -> bytes:
        shard = self._shard
        if shard.key_group != self._group:
            # Keys arrive sorted by key group, so the prefix rarely changes.
            if shard.key_group < 0:
                raise UsageError(f"state {self._name!r} is used outside a key: use state only in the handlers of a key")
            self._group = shard.key_group
            self._prefix = layout.prefix(shard.key_group, self._prefix[2])
        return self._prefix + shard.key


class ValueState(_KeyedState):
    kind = "value"
    __slots__ = ()

    def _prepare(self, descriptor: StateDescriptor) -> None:
        self._shard.prefetch_state(descriptor)

    def exists(self) -> bool:
        return layout.visible(self._shard.read(self._stored_key()), self._shard.now_ms) is not None

    # `get` and `update` run more often than any other method. For speed, they repeat the code of the shard's methods
    # `read` and `write` instead of calling them.

    def get(self) -> tuple[Any, ...] | None:
        shard = self._shard
        key = self._prefix + shard.key if shard.key_group == self._group else self._stored_key()
        entry = shard.cache[key] if key in shard.cache else shard.read(key)
        if entry is None:
            return None
        if entry[0] == 1:  # layout.PLAIN: no expiry
            return self._decode(entry)
        row = layout.visible(entry, shard.now_ms)
        return None if row is None else self._decode(row)

    def update(self, newValue: Any) -> None:  # PySpark's parameter name: callers may pass it by keyword
        row = self._encode(newValue)
        shard = self._shard
        if self._ttl_ms is not None:
            row = layout.entry_of(row, shard.now_ms, self._ttl_ms)
        key = self._prefix + shard.key if shard.key_group == self._group else self._stored_key()
        cache = shard.cache
        shard.before.setdefault(key, cache.get(key, UNREAD))
        cache[key] = row
        shard.gathered_bytes += len(row)
        if shard.gathered_bytes > GATHERED_BYTES:
            shard.flush()

    def clear(self) -> None:
        self._shard.write(self._stored_key(), None)


class _Rest:
    """The positions of a list that an open iterator has not read, or its `entries` there, if the list is rewritten."""

    __slots__ = ("__weakref__", "base", "entries", "first", "next")

    def __init__(self, base: bytes, first: int, next_: int) -> None:
        self.base, self.first, self.next = base, first, next_
        self.entries: list[bytes | None] | None = None


class ListState(_KeyedState):
    """List state: rows in order per key. The cost of an append does not depend on the length of the list."""

    kind = "list"
    __slots__ = ("_open", "_stride")

    def _prepare(self, descriptor: StateDescriptor) -> None:
        self._shard.prefetch_state(descriptor, layout.LIST_META)
        self._open: WeakSet[_Rest] = WeakSet()
        self._stride = Stride(size_bytes=_READ_AHEAD_BYTES, most=_READ_AHEAD)

    def exists(self) -> bool:
        return next(self.get(), None) is not None

    def get(self) -> Iterator[tuple[Any, ...]]:
        """Yield the elements that the list has at the first call of `next`, in order, without expired ones."""
        base = self._stored_key()
        first, next_ = self._positions(base)
        while first < next_:
            ahead, first = self._read_ahead(base, first, next_)
            rest = None
            if first < next_:
                rest = _Rest(base, first, next_)
                self._open.add(rest)
            while ahead:
                for entry in ahead:
                    row = layout.visible(entry, self._shard.now_ms)
                    if row is not None:
                        yield self._decode(row)
                ahead = []
                if rest is not None and rest.entries is not None:
                    ahead, rest, first = rest.entries, None, next_

    def _read_ahead(self, base: bytes, first: int, next_: int) -> tuple[list[bytes | None], int]:
        """Return (entries from position `first` on, position of the next entry to read)."""
        ahead: list[bytes | None] = []
        element, end, size_bytes = base + layout.LIST_ELEMENT, min(first + _READ_AHEAD, next_), 0
        while first < end and size_bytes < _READ_AHEAD_BYTES:
            positions = range(first, min(first + self._stride.rows, end))
            found = self._shard.read_many([element + layout.pack_position(p) for p in positions])
            read_bytes = sum(map(len, filter(None, found)))
            self._stride.seen(len(found), read_bytes)
            ahead += found
            first += len(found)
            size_bytes += read_bytes
        return ahead, first

    def _read_for_iterators(self, base: bytes) -> None:
        """Read the rest of the list for its open iterators, before the list is rewritten."""
        for rest in [one for one in self._open if one.base == base] if self._open else ():
            self._open.discard(rest)
            rest.entries = []
            while rest.first < rest.next:
                found, rest.first = self._read_ahead(base, rest.first, rest.next)
                rest.entries += found

    def put(self, new_state: Iterable[Any]) -> None:
        rows = [self._encode(value) for value in new_state]
        base = self._stored_key()
        _, next_ = self._positions(base)
        self._clear(base, len(rows))
        self._write(base, 0, 0, next_, rows)

    def append_value(self, newState: Any) -> None:  # PySpark's parameter name: callers may pass it by keyword
        # For one element, this code does the same as `_write`. For speed, it repeats the code of the shard's methods
        # `read`, `write_new` and `write_unaccounted` instead of calling them.
        row = self._encode(newState)
        shard = self._shard
        if self._ttl_ms is not None:
            row = layout.entry_of(row, shard.now_ms, self._ttl_ms)
        base = self._prefix + shard.key if shard.key_group == self._group else self._stored_key()
        meta = base + layout.LIST_META
        cache, before, unaccounted = shard.cache, shard.before, shard.unaccounted
        packed = (cache[meta] if meta in cache else shard.read(meta)) or _NO_LIST
        # The last 8 bytes of the list's bounds are the position that the next appended element gets, encoded as in the
        # stored key of an element.
        position = packed[8:]
        element = base + layout.LIST_ELEMENT + position
        if element not in before:
            before[element] = cache.get(element)
        cache[element] = row
        packed = packed[:8] + (int.from_bytes(position, "big") + 1).to_bytes(8, "big")
        if meta in unaccounted and unaccounted[meta] is not None:
            cache[meta] = unaccounted[meta] = packed
        else:
            shard.write_unaccounted(meta, packed)
        shard.gathered_bytes += CHANGE_BYTES + len(row)
        if shard.gathered_bytes > GATHERED_BYTES:
            shard.flush()

    def append_list(self, new_values: Iterable[Any]) -> None:
        rows = [self._encode(value) for value in new_values]
        base = self._stored_key()
        first, next_ = self._positions(base)
        self._write(base, first, next_, next_, rows)

    def clear(self) -> None:
        """Remove the list. Positions of new elements begin at 0 again."""
        base = self._stored_key()
        if self._clear(base, 0):
            self._shard.write_unaccounted(base + layout.LIST_META, None)
            self._shard.relieve()

    def _clear(self, base: bytes, start: int) -> bool:
        """Remove the elements from position `start` on; the bounds stay. Return False if the list has no bounds."""
        self._read_for_iterators(base)
        first, next_ = self._positions(base)
        for position in range(max(first, start), next_):
            self._shard.write(base + layout.LIST_ELEMENT + layout.pack_position(position), None)
        return next_ > 0

    def _write(self, base: bytes, first: int, start: int, end: int, rows: list[bytes]) -> None:
        shard, element = self._shard, base + layout.LIST_ELEMENT
        for position, row in enumerate(rows, start):
            write = shard.write if position < end else shard.write_new
            write(element + layout.pack_position(position), layout.entry_of(row, shard.now_ms, self._ttl_ms))
        shard.write_unaccounted(base + layout.LIST_META, layout.pack_positions(first, start + len(rows)))
        shard.relieve()

    def _positions(self, base: bytes) -> tuple[int, int]:
        """Return (first position, position of the next new element) of the list with the stored key `base`."""
        packed = self._shard.read(base + layout.LIST_META)
        return layout.unpack_positions(packed) if packed else (0, 0)


class MapState(_KeyedState):
    """Map state: one row per user key of each key. Iteration follows the order of encoded user keys."""

    kind = "map"
    __slots__ = ("_user_keys",)

    def _prepare(self, descriptor: StateDescriptor) -> None:
        user_key = descriptor.versions[-1].user_key
        assert user_key is not None
        self._user_keys = KeyCodec(
            parse_struct(user_key),
            what=f"user key of state {descriptor.name!r}",
            struct_factory=self._shard.struct_factory,
            zone=self._shard.zone,
        )

    def exists(self) -> bool:
        shard = self._shard
        entries = (entry for _, entry in shard.scan_map(self._stored_key(), rows=1))
        return any(layout.visible(entry, shard.now_ms) is not None for entry in entries)

    def get_value(self, key: Any) -> tuple[Any, ...] | None:
        row = layout.visible(self._shard.read(self._stored_key() + self._user_keys.encode(key)), self._shard.now_ms)
        return None if row is None else self._decode(row)

    def contains_key(self, key: Any) -> bool:
        entry = self._shard.read(self._stored_key() + self._user_keys.encode(key))
        return layout.visible(entry, self._shard.now_ms) is not None

    def update_value(self, key: Any, value: Any) -> None:
        """Set the value of one user key. Its time to live starts again."""
        base = self._stored_key()
        entry = layout.entry_of(self._encode(value), self._shard.now_ms, self._ttl_ms)
        self._shard.write_map(base, base + self._user_keys.encode(key), entry)
        self._shard.relieve()

    def remove_key(self, key: Any) -> None:
        base = self._stored_key()
        self._shard.write_map(base, base + self._user_keys.encode(key), None)
        self._shard.relieve()

    def iterator(self) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
        """Yield user keys and their values in the order of encoded user keys, without expired entries."""
        base = self._stored_key()
        for stored_key, entry in self._shard.scan_map(base):
            row = layout.visible(entry, self._shard.now_ms)
            if row is not None:
                yield self._user_keys.decode(stored_key[len(base) :]), self._decode(row)

    def clear(self) -> None:
        base = self._stored_key()
        for stored_key, _ in self._shard.scan_map(base):
            self._shard.write_map(base, stored_key, None)
            self._shard.relieve()
