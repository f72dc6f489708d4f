"""Decoder of single stored entries. `cairn diff` compares checkpoints with it, without the processor's code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from state_backend.formats.key_codec import KeyCodec
from state_backend.state import layout
from state_backend.values.errors import CorruptFile
from state_backend.values.records import StateDescriptor


@dataclass(frozen=True, slots=True)
class StoredEntry:
    key_group: int
    key: tuple[Any, ...]
    # The user key's column values of a map entry; None for other states.
    user_key: tuple[Any, ...] | None
    # The position of a list element; None for other states.
    position: int | None
    # The time from which the entry is unreadable, in milliseconds since the epoch; None for never.
    expiry_ms: int | None
    row: bytes


def decode_entry(
    descriptor: StateDescriptor, stored_key: bytes, entry: bytes, keys: KeyCodec, user_keys: KeyCodec | None
) -> StoredEntry | None:
    key, at = keys.decode_prefix(stored_key, 3)
    rest = stored_key[at:]
    user_key, position = None, None
    if descriptor.kind == "list":
        if rest == layout.LIST_META:
            return None
        if len(rest) != 9 or rest[:1] != layout.LIST_ELEMENT:
            raise CorruptFile(
                f"list state {descriptor.name!r}, key {key!r}: the stored key ends with {rest.hex()}, which is neither an element nor the positions of a list"
            )
        position = layout.unpack_position(rest[1:])
    elif descriptor.kind == "map":
        assert user_keys is not None
        user_key = user_keys.decode(rest)
    elif rest:
        raise CorruptFile(f"value state {descriptor.name!r}, key {key!r}: {len(rest)} extra bytes follow the key")
    if entry[:1] not in (bytes([layout.PLAIN]), bytes([layout.EXPIRING])) or (
        entry[0] == layout.EXPIRING and len(entry) < 9
    ):
        raise CorruptFile(
            f"state {descriptor.name!r}, key {key!r}: an entry begins with {entry[:1].hex() or 'nothing'}, expected 01 or 02"
        )
    return StoredEntry(
        key_group=int.from_bytes(stored_key[:2], "big"),
        key=key,
        user_key=user_key,
        position=position,
        expiry_ms=layout.expiry_of(entry),
        row=layout.row_of(entry),
    )
