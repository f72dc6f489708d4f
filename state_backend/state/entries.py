"""One stored entry decoded without a processor, for comparisons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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


def decode_entry(
    descriptor: StateDescriptor, stored_key: bytes, entry: bytes, keys: KeyCodec, user_keys: KeyCodec | None
) -> StoredEntry | None:
    """The entry under a stored key of this state; None for the positions of a list.

    Raises: CorruptFile if it is no entry.
    """
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
