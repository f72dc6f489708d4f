"""Byte layout of keyed state in the sorted key space of a shard.

    key group u16 BE | state id u8 | rest                                    all entries of a key group are one range

    value         … | key                                  -> entry
    list          … | key | 00                             -> first position u64 BE | next position u64 BE
                  … | key | 01 | position u64 BE           -> entry
    map           … | key | user key                       -> entry
    timer         … | FB | key | time BE                   -> (empty)
    timer index   … | FC | time BE | key                   -> (empty)     timers of a key group, by time
    expiry index  … | FD | expiry BE | state id u8 | rest  -> (empty)     expiring entries of a key group, by time

    entry         01 … (row codec)                         an entry without expiry
                  02 | expiry i64 LE | 01 …                an entry that is readable while expiry > processing time

`rest` is the part of a stored key behind key group and state id. `…` stands for key group and state id. Bytes such as
`FB` are hexadecimal, and BE and LE mean big-endian and little-endian. A state id of `FB`, `FC` or `FD` marks timers or
an index; declared states have the ids up to `FA`.

The key codec is prefix-free: no encoded key or user key begins with another. So entries of two keys never mix. Times
are signed 64-bit milliseconds since the epoch. Stored keys hold times big-endian with the sign bit flipped, so that
RocksDB sorts entries by time.
"""

from __future__ import annotations

import struct

import xxhash

from state_backend.values.errors import CorruptFile, StateTypeError

TIMERS, TIMER_INDEX, EXPIRY_INDEX = 0xFB, 0xFC, 0xFD
MAX_STATE_ID = 0xFA
TIMERS_NAME = "$timers"
PLAIN, EXPIRING = 1, 2
MIN_TIME_MS, MAX_TIME_MS = -(1 << 63), (1 << 63) - 1
SEQUENCE_BYTES = TIME_BYTES = 8
# An expiry-index key is this much longer than its entry's stored key: 8 bytes of time, 1 byte of state id.
EXPIRY_BYTES = 9
LIST_META, LIST_ELEMENT = b"\x00", b"\x01"

_PREFIX = struct.Struct(">HB")
_EXPIRY = struct.Struct("<Bq")
_POSITIONS = struct.Struct(">QQ")
_U64 = struct.Struct(">Q")
_SIGN = 1 << 63
_COPIED_BYTES = 1 << 16
_TIMER_INDEX = bytes([TIMER_INDEX])


def prefix(key_group: int, state_id: int) -> bytes:
    return _PREFIX.pack(key_group, state_id)


def key_group_bounds(first: int, last: int) -> tuple[bytes, bytes | None]:
    """Return (start, end) of the stored keys of key groups `first` to `last`; `end` is exclusive, None: no end."""
    return first.to_bytes(2, "big"), None if last == 0xFFFF else (last + 1).to_bytes(2, "big")


def after(start: bytes) -> bytes | None:
    """Return the smallest key that is greater than every key with the prefix `start`; None if no key is greater."""
    stripped = start.rstrip(b"\xff")
    return stripped[:-1] + bytes([stripped[-1] + 1]) if stripped else None


def pack_time(time_ms: int) -> bytes:
    try:
        return _U64.pack(time_ms + _SIGN)
    except struct.error:
        raise StateTypeError(
            f"{time_ms} ms is no time: expected {MIN_TIME_MS} to {MAX_TIME_MS}, milliseconds since the epoch"
        ) from None


def later(time_ms: int, duration_ms: int) -> int:
    return min(time_ms + duration_ms, MAX_TIME_MS)


def unpack_time(data: bytes) -> int:
    time_ms: int = _U64.unpack(data)[0]
    return time_ms - _SIGN


def check_timer(rest: bytes, data: bytes) -> None:
    """Raise `CorruptFile` if a stored entry is no timer, such as an early release's entry of all timers of a key."""
    if data or len(rest) < TIME_BYTES:
        raise CorruptFile(
            f"the timer stored under {rest.hex()} has the value {data[:16].hex() or 'nothing'}, expected a key and a time, "
            "and no value; restore an older checkpoint, or process the intervals again from the start"
        )


def timer_index_key(stored_key: bytes) -> bytes:
    return stored_key[:2] + _TIMER_INDEX + stored_key[-8:] + stored_key[3:-8]


def unpack_position(data: bytes) -> int:
    position: int = _U64.unpack(data)[0]
    return position


def pack_position(position: int) -> bytes:
    return _U64.pack(position)


def pack_positions(first: int, next_: int) -> bytes:
    return _POSITIONS.pack(first, next_)


def unpack_positions(data: bytes) -> tuple[int, int]:
    """Decode a list's bounds: the position of its first element, and the one that the next appended element gets."""
    first, next_ = _POSITIONS.unpack(data)
    return first, next_


def is_positions(data: bytes) -> bool:
    """Return True for the bounds of a list, and False for an entry."""
    # The bounds are two positions below 2^56, so their first byte is 0. The first byte of an entry is 1 or 2.
    return data[:1] == b"\x00"


def with_expiry(row: bytes, expiry_ms: int) -> bytes:
    return _EXPIRY.pack(EXPIRING, expiry_ms) + row


def entry_of(row: bytes, now_ms: int, ttl_ms: int | None) -> bytes:
    """Return the stored entry for an encoded row. It expires `ttl_ms` after `now_ms`; with `ttl_ms` None, never."""
    return row if ttl_ms is None else with_expiry(row, later(now_ms, ttl_ms))


def visible(entry: bytes | None, now_ms: int) -> bytes | None:
    """Return the encoded row of an entry; None if there is no entry or it has expired."""
    if entry is None:
        return None
    if entry[0] == EXPIRING:
        return entry[9:] if _EXPIRY.unpack_from(entry)[1] > now_ms else None
    return entry


def expiry_key(stored_key: bytes, entry: bytes) -> bytes | None:
    """Return the expiry-index key of an entry; None if the entry never expires."""
    expiry_ms = expiry_of(entry)
    index = prefix(int.from_bytes(stored_key[:2], "big"), EXPIRY_INDEX)
    return None if expiry_ms is None else index + pack_time(expiry_ms) + stored_key[2:]


def expiry_changes(stored_key: bytes, before: bytes | None, entry: bytes | None) -> dict[bytes, bytes | None]:
    """Return the expiry-index keys to change as `entry` replaces `before`: None deletes the key, b"" adds it."""
    values = ((before, None), (entry, b""))
    keys = ((expiry_key(stored_key, one), value) for one, value in values if one is not None)
    return {key: value for key, value in keys if key is not None}


def expiry_of(entry: bytes) -> int | None:
    """Return the time from which an entry is unreadable, in milliseconds since the epoch; None for never."""
    return _EXPIRY.unpack_from(entry)[1] if entry[0] == EXPIRING else None


def row_of(entry: bytes) -> bytes:
    return entry[9:] if entry[0] == EXPIRING else entry


def record_bytes(stored_key: bytes, data: bytes) -> int:
    """Return the size that RocksDB counts for a stored key and its value, with 8 bytes for sequence number and type."""
    return len(stored_key) + len(data) + SEQUENCE_BYTES


def entry_bytes(stored_key: bytes, entry: bytes) -> int:
    """Return the bytes that RocksDB counts for an entry and for its key in the timer index or expiry index."""
    # For speed, this function repeats the code of `record_bytes`.
    size_bytes = len(stored_key) + len(entry) + SEQUENCE_BYTES
    if stored_key[2] == TIMERS:
        return size_bytes + len(stored_key) + SEQUENCE_BYTES
    return size_bytes + (len(stored_key) + EXPIRY_BYTES + SEQUENCE_BYTES if entry[0] == EXPIRING else 0)


def seed_of(state_name: str) -> int:
    """Return a seed for the hashes of a state's entries, so that equal entries of two states have different hashes."""
    return xxhash.xxh64_intdigest(state_name.encode())


def entry_hash(seed: int, rest: bytes, entry: bytes) -> int:
    if len(entry) > _COPIED_BYTES:
        whole = xxhash.xxh64(rest, seed)
        whole.update(entry)
        return whole.intdigest()
    return xxhash.xxh64_intdigest(rest + entry, seed)
