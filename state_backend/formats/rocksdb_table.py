"""Reads all versions of a few keys from one RocksDB SST, without opening a RocksDB store.

    SST        data blocks … | other blocks | metaindex block | footer
    footer     53 bytes: checksum kind u8 | magic 3E 00 7A 00 | footer checksum u32 | base context checksum u32
               | size of the metaindex block u32 | 24 zeros | format version u32, always 6 | magic u64
    block      stored bytes | compression u8 | checksum u32. The uncompressed bytes are: entries …
               | restart offsets u32 … | number of restarts u32, whose highest bit marks a hash index
    entry      length of the key prefix shared with the entry before, varint | length of the rest of the key, varint
               | length of the value, varint | rest of the key | value
    index      one entry for each data block. Its key is equal to or greater than the block's last key. Its value is
               offset and size of the block, as varints. With delta encoding (`_delta_handles`), entries have no length
               of the value
    key        user key | u64: (sequence number << 8) + kind

Numbers are little-endian. The reader supports only files that were written with the options of `EngineOptions`. For any
other file it raises `UnknownTable`, and the caller reads the file with RocksDB. The reader does not check the checksums
of blocks, because callers have checked the checksum of the whole file.

Source: RocksDB's `table/format.cc`, `table/block_based/block.cc` and `db/dbformat.h`.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterator, Sequence

import pyarrow as pa

from state_backend.formats.rocksdb_manifest import number_at
from state_backend.values.frozen import frozen

_FOOTER_BYTES, _TRAILER_BYTES = 53, 5
_VERSION = 6
_MAGIC = struct.pack("<Q", 0x88E241B785F4CFF7)
_EXTENDED_MAGIC = b"\x3e\x00\x7a\x00"
_CODECS = {4: "lz4_raw", 7: "zstd"}
_DELETION, _VALUE, _SINGLE_DELETION, _RANGE_DELETION = 0x0, 0x1, 0x7, 0xF
_HASH_INDEX = 1 << 31
_PROPERTIES, _INDEX, _RANGES = b"rocksdb.properties", b"rocksdb.index", b"rocksdb.range_del"

Span = tuple[bytes, bytes | None]


class UnknownTable(Exception):
    """The bytes are no SST that this reader knows."""


@frozen
class Versions:
    """The versions of some keys in one SST.

    Attributes:
        entries: Key, sequence number and value, None for a deletion. Keys ascend, and of one key the newest is first.
        ranges: Deleted ranges: start, end (excluded) and sequence number. A range deletes older versions only.
    """

    entries: tuple[tuple[bytes, int, bytes | None], ...]
    ranges: tuple[tuple[bytes, bytes, int], ...]


def versions_in(table: memoryview, spans: Sequence[Span]) -> Versions:
    """Return the versions of the keys in some spans, and the deleted ranges that overlap them.

    Args:
        table: The content of the SST.
        spans: First key and end (excluded) of each span, ascending; None: the span has no end.

    Raises:
        UnknownTable: The table has another format, or entries of an unknown kind.
    """
    try:
        return _versions(table, spans)
    except (LookupError, ValueError, OverflowError, MemoryError, OSError, struct.error, pa.ArrowException) as error:
        raise UnknownTable(f"can't parse the table: {error}") from error


def _versions(table: memoryview, spans: Sequence[Span]) -> Versions:
    meta = dict(_pairs(_block(table, *_metaindex(table))))
    properties = dict(_pairs(_block(table, *_handle(meta[_PROPERTIES]))))
    if _flag(properties, b"rocksdb.block.based.table.index.type", 4):
        raise UnknownTable("another kind of index")
    # An ingested file has sequence number 0 in all entries. The real number is in MANIFEST, which is not read here.
    if _RANGES in meta and b"rocksdb.external_sst_file.version" in properties:
        raise UnknownTable("an ingested file with deleted ranges")
    with_user_keys = _flag(properties, b"rocksdb.index.key.is.user.key", 8)
    index = _block(table, *_handle(meta[_INDEX]))
    delta = _flag(properties, b"rocksdb.index.value.is.delta.encoded", 8)
    blocks = [*(_delta_handles(index) if delta else ((key, _handle(value)) for key, value in _pairs(index)))]
    lasts = [last if with_user_keys else last[:-8] for last, _ in blocks]
    entries = []
    for start, end in spans:
        for _, handle in blocks[bisect_left(lasts, start) :]:
            following = False
            for stored, value in _pairs(_block(table, *handle)):
                key = stored[:-8]
                if key < start:
                    continue
                if following := end is not None and key >= end:
                    break
                sequence, kind = _unpack(stored)
                if kind not in (_DELETION, _VALUE, _SINGLE_DELETION):
                    raise UnknownTable(f"an entry has the unknown kind {kind}")
                entries.append((key, sequence, value if kind == _VALUE else None))
            if following:
                break
    ranges = []
    if _RANGES in meta:
        for stored, until in _pairs(_block(table, *_handle(meta[_RANGES]))):
            begin, (sequence, kind) = stored[:-8], _unpack(stored)
            if kind != _RANGE_DELETION:
                raise UnknownTable(f"a deleted range has the unknown kind {kind}")
            if any(until > start and (end is None or begin < end) for start, end in spans):
                ranges.append((begin, until, sequence))
    return Versions(entries=tuple(entries), ranges=tuple(ranges))


def _metaindex(table: memoryview) -> tuple[int, int]:
    footer = bytes(table[-_FOOTER_BYTES:])
    if len(footer) < _FOOTER_BYTES or footer[-8:] != _MAGIC or footer[1:5] != _EXTENDED_MAGIC:
        raise UnknownTable("no table of RocksDB with a footer of format 6")
    (version,) = struct.unpack_from("<I", footer, 41)
    if version != _VERSION:
        raise UnknownTable(f"a table of format {version}")
    (size,) = struct.unpack_from("<I", footer, 13)
    return len(table) - _FOOTER_BYTES - _TRAILER_BYTES - size, size


def _block(table: memoryview, offset: int, size: int) -> bytes:
    """Return the uncompressed bytes of the block of `size` stored bytes at an offset of an SST."""
    if offset < 0 or offset + size + _TRAILER_BYTES > len(table):
        raise ValueError("a block is outside of the table")
    stored, compression = bytes(table[offset : offset + size]), table[offset + size]
    if compression == 0:
        return stored
    raw_bytes, at = number_at(stored, 0)
    if compression not in _CODECS:
        raise UnknownTable(f"the unknown compression {compression}")
    return pa.Codec(_CODECS[compression]).decompress(stored[at:], raw_bytes, asbytes=True)  # type: ignore[no-any-return]


def _entries_end(block: bytes) -> int:
    restarts: int = struct.unpack_from("<I", block, len(block) - 4)[0]
    if restarts & _HASH_INDEX:
        raise UnknownTable("a block with a hash index")
    return len(block) - 4 * (restarts + 1)


def _pairs(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    at, end, key = 0, _entries_end(block), b""
    while at < end:
        shared, at = number_at(block, at)
        other, at = number_at(block, at)
        size, at = number_at(block, at)
        if shared > len(key) or at + other + size > end:
            raise ValueError("an entry is cut off")
        key = key[:shared] + block[at : at + other]
        at += other
        yield key, block[at : at + size]
        at += size


def _delta_handles(block: bytes) -> Iterator[tuple[bytes, tuple[int, int]]]:
    """Yield (key, (offset, size) of the data block) for each entry of a delta-encoded index.

    An entry that shares no bytes with the key before has the offset and the size of its block. Any other entry has only
    the difference between its block's size and the size before. This block follows directly after the one before.
    """
    at, end, key, handle = 0, _entries_end(block), b"", (0, 0)
    while at < end:
        shared, at = number_at(block, at)
        other, at = number_at(block, at)
        if shared > len(key) or at + other > end:
            raise ValueError("an entry is cut off")
        key = key[:shared] + block[at : at + other]
        at += other
        first, at = number_at(block, at)
        if shared == 0:
            size, at = number_at(block, at)
            handle = (first, size)
        else:
            handle = (handle[0] + handle[1] + _TRAILER_BYTES, handle[1] + (first >> 1 ^ -(first & 1)))
        yield key, handle


def _handle(value: bytes) -> tuple[int, int]:
    offset, at = number_at(value, 0)
    size, _ = number_at(value, at)
    return offset, size


def _unpack(stored: bytes) -> tuple[int, int]:
    (packed,) = struct.unpack_from("<Q", stored, len(stored) - 8)
    return packed >> 8, packed & 0xFF


def _flag(properties: dict[bytes, bytes], name: bytes, size: int) -> int:
    """Return an SST's property `name` as a number; 0 if absent. `size`: the bytes it takes, if it is no varint."""
    value = properties.get(name, b"")
    return int.from_bytes(value, "little") if len(value) == size else number_at(value, 0)[0] if value else 0
