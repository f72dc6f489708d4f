"""How keyed state lies in the sorted key space of a shard.

    key group u16 BE | state id u8 | rest                                    so that a key group is one contiguous range

    value     … | key                                  -> entry
    list      … | key | 00                             -> first position u64 BE | next position u64 BE
              … | key | 01 | position u64 BE           -> entry
    map       … | key | user key                       -> entry
    timers    … | FB  | key | expiry BE                -> (empty)
    as once   … | FB  | key                            -> expiries, BE, ascending, of all the key's timers
    timer index … | FC | expiry BE | key               -> (empty)           due timers of a key group, in order of time
    expiry index … | FD | expiry BE | state id u8 | rest -> (empty)         due entries of a key group, in order of time

    entry     01 … (row codec)                         no expiry
              02 | expiry i64 LE | 01 …                readable while expiry > processing time

Keys and user keys are prefix-free (key codec), so no entry of one key can be taken for one of another. Expiries are signed
milliseconds since the epoch; in keys they are big-endian with the sign bit flipped, so that they sort.

Timers of a key lay in one entry once. A key group that was written so is read as it is, and rewritten when a timer of it is next
looked at or changed by a processor; all of its timers lie the one way or the other. Digests are the same.
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
SEQUENCE_BYTES = 8
# By which a key in the expiry index is longer than that of its entry.
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
    """What every stored key of a state in a key group begins with."""
    return _PREFIX.pack(key_group, state_id)


def key_group_bounds(first: int, last: int) -> tuple[bytes, bytes | None]:
    """The span of the key groups first..last: start, and end (exclusive; None: to the very last key)."""
    return first.to_bytes(2, "big"), None if last == 0xFFFF else (last + 1).to_bytes(2, "big")


def after(start: bytes) -> bytes | None:
    """The first key that is greater than every key that begins with ``start``; None if there is none."""
    stripped = start.rstrip(b"\xff")
    return stripped[:-1] + bytes([stripped[-1] + 1]) if stripped else None


def pack_time(time_ms: int) -> bytes:
    """Eight bytes that sort as the times do. Raises: StateTypeError for what is not a signed 64-bit number."""
    try:
        return _U64.pack(time_ms + _SIGN)
    except struct.error:
        raise StateTypeError(
            f"{time_ms} ms is no time: expected {MIN_TIME_MS} to {MAX_TIME_MS}, milliseconds since the epoch"
        ) from None


def later(time_ms: int, duration_ms: int) -> int:
    """The sum; the latest time there is, where that is exceeded."""
    return min(time_ms + duration_ms, MAX_TIME_MS)


def unpack_time(data: bytes) -> int:
    """The time that `pack_time` packed, in milliseconds since the epoch; before it too."""
    time_ms: int = _U64.unpack(data)[0]
    return time_ms - _SIGN


def timers_in(rest: bytes, data: bytes) -> list[bytes]:
    """Key and expiry of each timer in an entry of either layout, as the digest hashes them. ``rest``: the stored key
    without key group and state id.

    Raises: CorruptFile if the entry is of neither.
    """
    if len(data) % 8 or (not data and len(rest) < 8):
        raise CorruptFile(f"the timers under {rest.hex()} are not times of 8 bytes each: {data[:16].hex()}")
    return [rest + data[at : at + 8] for at in range(0, len(data), 8)] if data else [rest]


def timer_index_key(stored_key: bytes) -> bytes:
    """The place in the timer index of what is stored as ``FB | key | expiry``."""
    return stored_key[:2] + _TIMER_INDEX + stored_key[-8:] + stored_key[3:-8]


def unpack_position(data: bytes) -> int:
    """The position that `pack_position` packed."""
    position: int = _U64.unpack(data)[0]
    return position


def pack_position(position: int) -> bytes:
    """A list element's position, so that bytes order as numbers do."""
    return _U64.pack(position)


def pack_positions(first: int, next_: int) -> bytes:
    """Where a key's list begins, and where its next element goes."""
    return _POSITIONS.pack(first, next_)


def unpack_positions(data: bytes) -> tuple[int, int]:
    """What `pack_positions` packed."""
    first, next_ = _POSITIONS.unpack(data)
    return first, next_


def is_positions(data: bytes) -> bool:
    """Whether a list's positions, and not an entry: positions stay below 2^56, so they begin with a zero byte."""
    return data[0] == 0


def with_expiry(row: bytes, expiry_ms: int) -> bytes:
    """An entry whose row counts until this instant, in milliseconds since the epoch."""
    return _EXPIRY.pack(EXPIRING, expiry_ms) + row


def expiry_key(key_group: int, expiry_ms: int, state_id: int, rest: bytes) -> bytes:
    """The entry's place in the expiry index."""
    return prefix(key_group, EXPIRY_INDEX) + pack_time(expiry_ms) + bytes([state_id]) + rest


def expiry_of(entry: bytes) -> int | None:
    """When the entry stops being readable, or None."""
    return _EXPIRY.unpack_from(entry)[1] if entry[0] == EXPIRING else None


def row_of(entry: bytes) -> bytes:
    """The encoded row of an entry, with or without expiry."""
    return entry[9:] if entry[0] == EXPIRING else entry


def record_bytes(stored_key: bytes, data: bytes) -> int:
    """What RocksDB counts for one record: key, value, and 8 bytes of sequence number and type."""
    return len(stored_key) + len(data) + SEQUENCE_BYTES


def entry_bytes(stored_key: bytes, entry: bytes) -> int:
    """``record_bytes`` of an entry and of its record in an index, if it has one."""
    size_bytes = len(stored_key) + len(entry) + SEQUENCE_BYTES
    if stored_key[2] == TIMERS:
        return size_bytes + len(stored_key) + SEQUENCE_BYTES
    return size_bytes + (len(stored_key) + EXPIRY_BYTES + SEQUENCE_BYTES if entry[0] == EXPIRING else 0)


def seed_of(state_name: str) -> int:
    """Tells states apart in the digest by name: ids may differ after a fork, and are not hashed."""
    return xxhash.xxh64_intdigest(state_name.encode())


def entry_hash(seed: int, rest: bytes, entry: bytes) -> int:
    """XXH64 of one entry. ``rest`` is its key without key group and state id, so that the sum over all entries
    survives a new max parallelism. Timers hash their key and expiry, with an empty entry."""
    if len(entry) > _COPIED_BYTES:
        whole = xxhash.xxh64(rest, seed)
        whole.update(entry)
        return whole.intdigest()
    return xxhash.xxh64_intdigest(rest + entry, seed)
