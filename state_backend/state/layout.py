"""How keyed state lies in the sorted key space of a shard.

    key group u16 BE | state id u8 | rest                                    so that a key group is one contiguous range

    value     … | key                                  -> entry
    list      … | key | 00                             -> first position u64 BE | next position u64 BE
              … | key | 01 | position u64 BE           -> entry
    map       … | key | user key                       -> entry
    timers    … | FB  | key                            -> expiries, i64 BE, ascending
    timer index … | FC | expiry BE | key               -> (empty)           due timers of a key group, in order of time
    expiry index … | FD | expiry BE | state id u8 | rest -> (empty)         due entries of a key group, in order of time

    entry     01 … (row codec)                         no expiry
              02 | expiry i64 LE | 01 …                readable while expiry > processing time

Keys and user keys are prefix-free (key codec), so no entry of one key can be taken for one of another. Expiries are signed
milliseconds since the epoch; in keys they are big-endian with the sign bit flipped, so that they sort.
"""

from __future__ import annotations

import struct

import xxhash

TIMERS, TIMER_INDEX, EXPIRY_INDEX = 0xFB, 0xFC, 0xFD
MAX_STATE_ID = 0xFA
TIMERS_NAME = "$timers"
PLAIN, EXPIRING = 1, 2
LIST_META, LIST_ELEMENT = b"\x00", b"\x01"

_PREFIX = struct.Struct(">HB")
_EXPIRY = struct.Struct("<Bq")
_POSITIONS = struct.Struct(">QQ")
_U64 = struct.Struct(">Q")
_SIGN = 1 << 63


def prefix(key_group: int, state_id: int) -> bytes:
    return _PREFIX.pack(key_group, state_id)


def key_group_bounds(first: int, last: int) -> tuple[bytes, bytes | None]:
    """The span of the key groups first..last: start, and end (exclusive; None: to the very last key)."""
    return first.to_bytes(2, "big"), None if last == 0xFFFF else (last + 1).to_bytes(2, "big")


def after(start: bytes) -> bytes | None:
    """The first key that is greater than every key that begins with ``start``; None if there is none."""
    stripped = start.rstrip(b"\xff")
    return stripped[:-1] + bytes([stripped[-1] + 1]) if stripped else None


def pack_time(time_ms: int) -> bytes:
    """Eight bytes that sort as the times do."""
    return _U64.pack(time_ms + _SIGN)


def unpack_time(data: bytes) -> int:
    time_ms: int = _U64.unpack(data)[0]
    return time_ms - _SIGN


def unpack_times(data: bytes) -> list[int]:
    return [time_ms - _SIGN for (time_ms,) in _U64.iter_unpack(data)]


def unpack_position(data: bytes) -> int:
    position: int = _U64.unpack(data)[0]
    return position


def pack_position(position: int) -> bytes:
    return _U64.pack(position)


def pack_positions(first: int, next_: int) -> bytes:
    return _POSITIONS.pack(first, next_)


def unpack_positions(data: bytes) -> tuple[int, int]:
    first, next_ = _POSITIONS.unpack(data)
    return first, next_


def is_positions(data: bytes) -> bool:
    """Whether a list's positions, and not an entry: positions stay below 2^56, so they begin with a zero byte."""
    return data[0] == 0


def with_expiry(row: bytes, expiry_ms: int) -> bytes:
    return _EXPIRY.pack(EXPIRING, expiry_ms) + row


def expiry_key(key_group: int, expiry_ms: int, state_id: int, rest: bytes) -> bytes:
    """The entry's place in the expiry index."""
    return prefix(key_group, EXPIRY_INDEX) + pack_time(expiry_ms) + bytes([state_id]) + rest


def expiry_of(entry: bytes) -> int | None:
    """When the entry stops being readable, or None."""
    return _EXPIRY.unpack_from(entry)[1] if entry[0] == EXPIRING else None


def row_of(entry: bytes) -> bytes:
    return entry[9:] if entry[0] == EXPIRING else entry


def seed_of(state_name: str) -> int:
    """Tells states apart in the digest by name: ids may differ after a fork, and are not hashed."""
    return xxhash.xxh64_intdigest(state_name.encode())


def entry_hash(seed: int, rest: bytes, entry: bytes) -> int:
    """XXH64 of one entry. ``rest`` is its key without key group and state id, so that the sum over all entries
    survives a new max parallelism. Timers hash their key and expiry, with an empty entry."""
    return xxhash.xxh64_intdigest(rest + entry, seed)
