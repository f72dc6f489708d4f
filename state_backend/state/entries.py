"""Reading what a shard's store holds, without a processor: for tables, exports and checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from state_backend.adapters.rocks import RocksStore
from state_backend.formats.key_codec import KeyCodec
from state_backend.state import layout
from state_backend.values.errors import CorruptFile
from state_backend.values.records import StateDescriptor


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """One value, list element or map entry. ``row`` is encoded; ``user_key`` is for maps, ``position`` for lists."""

    key_group: int
    key: tuple[Any, ...]
    user_key: tuple[Any, ...] | None
    position: int | None
    expiry_ms: int | None
    row: bytes


def read_entries(
    store: RocksStore, descriptor: StateDescriptor, keys: KeyCodec, user_keys: KeyCodec | None
) -> Iterator[StoredEntry]:
    """All entries of one state, expired ones too, by key group and key."""
    for key_group in key_groups_in(store):
        start = layout.prefix(key_group, descriptor.state_id)
        for stored_key, entry in store.scan(start, layout.after(start)):
            decoded = decode_entry(descriptor, stored_key, entry, keys, user_keys)
            if decoded is not None:
                yield decoded


def decode_entry(
    descriptor: StateDescriptor, stored_key: bytes, entry: bytes, keys: KeyCodec, user_keys: KeyCodec | None
) -> StoredEntry | None:
    """The entry under a stored key of this state; None for the positions of a list. CorruptFile if it is no entry."""
    key, at = keys.decode_prefix(stored_key, 3)
    rest = stored_key[at:]
    user_key, position = None, None
    if descriptor.kind == "list":
        if rest == layout.LIST_META:
            return None
        if len(rest) != 9 or rest[:1] != layout.LIST_ELEMENT:
            raise CorruptFile(f"list state {descriptor.name!r}, key {key!r}: {rest.hex()} names no element")
        position = layout.unpack_position(rest[1:])
    elif descriptor.kind == "map":
        assert user_keys is not None
        user_key = user_keys.decode(rest)
    elif rest:
        raise CorruptFile(f"value state {descriptor.name!r}, key {key!r}: {len(rest)} bytes follow the key")
    if entry[:1] not in (bytes([layout.PLAIN]), bytes([layout.EXPIRING])) or (
        entry[0] == layout.EXPIRING and len(entry) < 9
    ):
        raise CorruptFile(
            f"state {descriptor.name!r}, key {key!r}: an entry begins with {entry[:1].hex() or 'nothing'}"
        )
    return StoredEntry(
        key_group=int.from_bytes(stored_key[:2], "big"),
        key=key,
        user_key=user_key,
        position=position,
        expiry_ms=layout.expiry_of(entry),
        row=layout.row_of(entry),
    )


def read_timers(store: RocksStore) -> Iterator[tuple[int, bytes, int]]:
    """(key group, encoded key, expiry) of all timers, by key group and key, then ascending."""
    for key_group in key_groups_in(store):
        start = layout.prefix(key_group, layout.TIMERS)
        for stored_key, packed in store.scan(start, layout.after(start)):
            for timer in layout.timers_in(stored_key[3:], packed):
                yield key_group, timer[:-8], layout.unpack_time(timer[-8:])


def key_groups_in(store: RocksStore) -> Iterator[int]:
    """The key groups that have anything stored, ascending."""
    start = b""
    while (found := next(iter(store.scan(start, None)), None)) is not None:
        key_group = int.from_bytes(found[0][:2], "big")
        yield key_group
        if key_group == 0xFFFF:
            return
        start = (key_group + 1).to_bytes(2, "big")
