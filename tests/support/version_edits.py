"""RocksDB's MANIFEST, written for tests: version edits, and their framing in a log."""

from __future__ import annotations

from state_backend.formats import rocksdb_manifest as reader

WHOLE = 1


def varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def edit(*numbers: int) -> bytes:
    return b"".join(map(varint, numbers))


def text(value: bytes) -> bytes:
    return varint(len(value)) + value


def piece(kind: int, payload: bytes) -> bytes:
    return reader._HEADER.pack(reader._masked_crc(kind, payload), len(payload), kind) + payload


def log_of(*records: bytes) -> bytes:
    """A log within one block."""
    return b"".join(piece(WHOLE, record) for record in records)
