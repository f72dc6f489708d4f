"""Codec of changelog segments. A segment holds the net changes of one interval to one shard, sorted.

    segment   "CAIRNLOG" | version u8 | block … | end
    block     kind u8 | pairs u64 | raw size u32 | stored size u32 | crc32c u32 | stored bytes: zstd of the raw bytes
    end       a block of kind 0: the number of pairs in all blocks before, both sizes 0
    raw bytes length of each first u32 … | length of each second u32 … | firsts | seconds
    kind 1    deleted ranges: first start (included), then end (excluded), in the order of their deletion
    kind 2    entries: key and value, length FFFFFFFF for a deleted key; keys ascend over all blocks
    kind 3    the shard's manifest, as a pair of an empty key and the manifest: at most one, last before the end

All numbers are big-endian. `crc32c` covers the block's other head fields and its stored bytes. The reader checks it
before it uses the block. Ranges come first: a replay deletes the ranges, then puts and deletes the entries. Lengths,
keys and values are stored separately, because each compresses better beside its like and can be cut out faster.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, pairwise
from typing import BinaryIO

import google_crc32c

from state_backend.values.errors import CorruptFile, UsageError
from state_backend.values.release import unsupported

FORMAT = 1
MAGIC = b"CAIRNLOG" + bytes([FORMAT])
END, RANGES, ENTRIES, MANIFEST = 0, 1, 2, 3
Pair = tuple[bytes, bytes | None]

_HEAD = struct.Struct(">BQII")
_CRC = struct.Struct(">I")
_DELETED = 0xFFFFFFFF
_END_BYTES = _HEAD.size + _CRC.size
_BLOCK_PAIRS = 4096
_BLOCK_BYTES = 1024 * 1024
# One large entry can make a block exceed _BLOCK_BYTES, but never this limit. A head that names a larger size is
# damaged, so the reader raises an error instead of allocating memory for the block.
_MOST_BLOCK_BYTES = 256 * _BLOCK_BYTES


def write_segment(file: BinaryIO, ranges: Sequence[tuple[bytes, bytes]], entries: Iterable[Pair]) -> int:
    """Write one complete segment, and return the number of its ranges and entries together.

    `ranges`: (start, excluded end) of each deleted range. `entries`: key and value (None: deleted), ascending by key.
    """
    file.write(MAGIC)
    written = 0
    parts: list[tuple[int, Iterable[Pair]]] = [(RANGES, ranges), (ENTRIES, entries)]
    for kind, pairs in parts:
        for block in _blocks(pairs):
            written += len(block)
            _write_block(file, kind, len(block), _pack(block))
    _write_block(file, END, written, b"")
    return written


def append_manifest(segment: BinaryIO, manifest: bytes) -> int:
    """Write a manifest's block before the end block of a complete segment, and return the block's offset."""
    end = segment.seek(-_END_BYTES, io.SEEK_END)
    last = segment.read(_END_BYTES)
    segment.seek(end)
    _write_block(segment, MANIFEST, 1, _pack([(b"", manifest)]))
    segment.write(last)
    return end


def read_manifest(tail: bytes, name: str) -> bytes:
    """Return the manifest in `tail`: a segment's bytes from the offset on that `append_manifest` returned."""
    file = io.BytesIO(tail)
    kind, count, raw = _read_block(file, name)
    if (kind, count) != (MANIFEST, 1) or _read_block(file, name)[0] != END or file.read(1):
        raise CorruptFile(f"{name}: expected one manifest and the end; found a block of kind {kind} with {count} pairs")
    ((key, manifest),) = _unpack(raw, 1, name)
    if key or manifest is None:
        raise CorruptFile(f"{name}: the block for the manifest has no manifest")
    return manifest


def read_segment(file: BinaryIO, name: str) -> Iterator[tuple[int, list[Pair]]]:
    """Yield the blocks of a changelog segment: first the deleted ranges of keys, then the changed entries.

    Each block is verified before it is yielded. Only the last block proves that the segment is complete. So
    `CorruptFile` may be raised after intact blocks have been yielded.

    Args:
        file: The segment, open for reading at its first byte.
        name: The segment's name, for error messages.

    Yields:
        The kind of the block, and its pairs. In a block of kind `RANGES`, a pair is a deleted range: its first key, and
        its end (excluded). In a block of kind `ENTRIES`, a pair is a key and its new value; None for a deleted key.

    Raises:
        CorruptFile: A block of the file `name` is damaged or missing.
        UnsupportedFormat: Another release of Cairn wrote the segment.
    """
    magic = file.read(len(MAGIC))
    if magic != MAGIC:
        if magic[:-1] == MAGIC[:-1]:
            raise unsupported(name, f"format {magic[-1]}", f"format {FORMAT}")
        raise CorruptFile(f"{name}: not a changelog segment: begins with {magic!r}, expected {MAGIC!r}")
    at, last, seen = RANGES, None, 0
    while True:
        kind, count, raw = _read_block(file, name)
        if kind == END:
            if count != seen or raw or file.read(1):
                raise CorruptFile(f"{name}: found {seen} changes, expected {count} and then the end of the file")
            return
        if kind == MANIFEST and at != MANIFEST:
            at = kind
            continue
        if kind not in (RANGES, ENTRIES) or kind < at:
            raise CorruptFile(f"{name}: blocks out of order: kind {kind} follows kind {at}")
        pairs = _unpack(raw, count, name)
        if kind == RANGES:
            if any(end is None or start >= end for start, end in pairs):
                raise CorruptFile(f"{name}: a deleted range ends before it starts")
        else:
            keys = [key for key, _ in pairs]
            if any(key >= following for key, following in pairwise(keys if last is None else [last, *keys])):
                raise CorruptFile(f"{name}: keys do not ascend")
            last = keys[-1]
        at, seen = kind, seen + count
        yield kind, pairs


def content_bytes(pairs: Iterable[Pair]) -> int:
    """Return the size of all keys and values before compression, to which thresholds for consolidation apply."""
    return sum(len(first) + len(second or b"") for first, second in pairs)


def _blocks(pairs: Iterable[Pair]) -> Iterator[list[Pair]]:
    """Yield the pairs in order, in blocks that stay within the limits of pairs and bytes."""
    pairs = iter(pairs)
    while block := list(islice(pairs, _BLOCK_PAIRS)):
        start = size = 0
        for at, (first, second) in enumerate(block):
            size += len(first) + len(second or b"")
            if size >= _BLOCK_BYTES:
                yield block[start : at + 1]
                start, size = at + 1, 0
        if start < len(block):
            yield block[start:]


def _pack(block: Sequence[Pair]) -> bytes:
    lengths = [len(first) for first, _ in block]
    lengths += [_DELETED if second is None else len(second) for _, second in block]
    packed = struct.pack(f">{len(lengths)}I", *lengths)
    return b"".join([packed, *(first for first, _ in block), *(second for _, second in block if second)])


def _unpack(raw: bytes, count: int, name: str) -> list[Pair]:
    import numpy as np

    if not count or len(raw) < 8 * count:
        raise CorruptFile(f"{name}: damaged block: {len(raw)} bytes can't hold {count} changes")
    lengths = np.frombuffer(raw, ">u4", 2 * count).astype(np.int64).reshape(2, count)
    deleted = lengths[1] == _DELETED
    lengths[1][deleted] = 0
    if 8 * count + int(lengths.sum()) != len(raw):
        raise CorruptFile(
            f"{name}: damaged block: it has {len(raw)} bytes, but its parts have {8 * count + int(lengths.sum())}"
        )
    ends = 8 * count + np.cumsum(lengths.ravel())
    parts = [raw[a:b] for a, b in pairwise([8 * count, *ends.tolist()])]
    seconds: list[bytes | None] = [*parts[count:]]
    for at in np.flatnonzero(deleted).tolist():
        seconds[at] = None
    return list(zip(parts[:count], seconds, strict=True))


def _write_block(file: BinaryIO, kind: int, count: int, raw: bytes) -> None:
    if len(raw) > _MOST_BLOCK_BYTES:
        raise UsageError(
            f"an entry of {len(raw)} bytes is too large for changelog mode (at most {_MOST_BLOCK_BYTES} bytes); store less "
            "under one key, or use checkpoint mode incremental"
        )
    import pyarrow as pa

    stored = pa.Codec("zstd", 1).compress(raw, asbytes=True) if raw else b""
    head = _HEAD.pack(kind, count, len(raw), len(stored))
    file.write(head + _CRC.pack(google_crc32c.extend(google_crc32c.value(head), stored)) + stored)


def _read_block(file: BinaryIO, name: str) -> tuple[int, int, bytes]:
    head = file.read(_END_BYTES)
    if len(head) < _END_BYTES:
        raise CorruptFile(f"{name}: truncated: found {len(head)} bytes of a block's head, expected {_END_BYTES}")
    kind, count, raw_size, stored_size = _HEAD.unpack_from(head)
    if max(raw_size, stored_size) > _MOST_BLOCK_BYTES + 1024:
        raise CorruptFile(
            f"{name}: damaged block: its head says {max(raw_size, stored_size)} bytes, and {_MOST_BLOCK_BYTES} is the most"
        )
    stored = file.read(stored_size)
    if len(stored) < stored_size:
        raise CorruptFile(f"{name}: truncated: found {len(stored)} bytes of a block, expected {stored_size}")
    expected = _CRC.unpack_from(head, _HEAD.size)[0]
    found = google_crc32c.extend(google_crc32c.value(head[: _HEAD.size]), stored)
    if found != expected:
        raise CorruptFile(f"{name}: crc32c of a block is {found:08x}, expected {expected:08x}")
    if not stored_size:
        return kind, count, b""
    try:
        # Imported here, because `cairn key` needs no Arrow without segments, and this import would double its time.
        import pyarrow as pa

        raw: bytes = pa.Codec("zstd", 1).decompress(stored, decompressed_size=raw_size, asbytes=True)
    except (OSError, ValueError) as error:
        raise CorruptFile(f"{name}: a block can't be decompressed to {raw_size} bytes: {error}") from None
    return kind, count, raw
