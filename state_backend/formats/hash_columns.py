"""XXH64 of every element of a binary column: what ``xxhash.xxh64_intdigest`` gives, for many rows of one length at a time.

    lanes of 32 bytes   four accumulators of 8 bytes each, merged at the end; only from 32 bytes on
    the rest            8 bytes at a time, then 4, then 1, and the avalanche

Source: the XXH64 specification, https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from state_backend.formats.arrow_columns import binary_views
from state_backend.values.errors import InvariantViolated

Hashes = npt.NDArray[np.uint64]

# NumPy's calls cost the same for any number of rows, and longer rows need more of them. Measured: 450, 1300, 2000, 2600 rows
# of 16, 40, 80, 128 bytes take as long as one by one.
MAX_LENGTH = 512
_MIN_ROWS = 256 + 24 * np.arange(MAX_LENGTH + 1)
_BLOCK_ROWS = 16384

_U64 = np.uint64
_MASK = (1 << 64) - 1
_P1, _P2, _P3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_P4, _P5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5


def xxh64(data: pa.BinaryArray, seed: int) -> Hashes:
    """(n,) uint64, one for each row. Rows are never null."""
    if data.null_count:
        raise InvariantViolated(f"{data.null_count} of {len(data)} rows to hash are null")
    hashes = np.empty(len(data), np.uint64)
    lengths = np.diff(binary_views(data)[0])
    others = np.ones(len(data), np.bool_)
    counts = np.bincount(np.minimum(lengths, MAX_LENGTH + 1))[: MAX_LENGTH + 1]
    for length in np.flatnonzero(counts >= _MIN_ROWS[: len(counts)]).tolist():
        if counts[length] == len(data):
            return _hash_equal(data, length, seed)
        rows = lengths == length
        hashes[rows] = _hash_equal(data.filter(pa.array(rows)), length, seed)
        others &= ~rows
    few = data if others.all() else data.filter(pa.array(others))
    # As bytes, since NumPy is slow to take integers beyond int64.
    hashes[others] = np.frombuffer(b"".join(map(xxhash.xxh64_digest, few.to_pylist(), repeat(seed))), ">u8")
    return hashes


def _hash_equal(data: pa.BinaryArray, length: int, seed: int) -> Hashes:
    """Of rows that are all ``length`` bytes long. In blocks, so that the accumulators stay in the L2 cache."""
    hashes = np.empty(len(data), np.uint64)
    offsets, raw = binary_views(data)
    for first in range(0, len(data), _BLOCK_ROWS):
        block, start = hashes[first : first + _BLOCK_ROWS], int(offsets[first])

        def read(at: int, width: int, words: int = 1, start: int = start, count: int = len(block)) -> Hashes:
            shape, strides = (words, count), (width, length)
            return np.ndarray(shape, f"<u{width}", raw.data, start + at, strides).astype(np.uint64, order="C")

        _hash_block(block, read, length, seed)
    return hashes


def _hash_block(h: Hashes, read: Callable[..., Hashes], length: int, seed: int) -> None:
    """``read(at, width, words=1)`` copies (words, n) numbers, the first of which is ``at`` bytes into each row."""
    at = 0
    if length >= 32:
        lanes = np.empty((4, len(h)), np.uint64)
        lanes[:] = np.array([[(seed + start) & _MASK] for start in (_P1 + _P2, _P2, 0, -_P1)], np.uint64)
        while at + 32 <= length:
            lanes += read(at, 8, 4) * _P2
            _rotate(lanes, _U64(31))
            lanes *= _P1
            at += 32
        merged = lanes.copy()
        _rotate(merged, np.array([[1], [7], [12], [18]], np.uint64))
        merged.sum(axis=0, out=h)
        for lane in _scrambled(lanes):
            h ^= lane
            h *= _P1
            h += _P4
    else:
        h[:] = (seed + _P5) & _MASK
    h += _U64(length)
    while at + 8 <= length:
        h ^= _scrambled(read(at, 8)[0])
        _rotate(h, _U64(27))
        h *= _P1
        h += _P4
        at += 8
    if at + 4 <= length:
        h ^= read(at, 4)[0] * _P1
        _rotate(h, _U64(23))
        h *= _P2
        h += _P3
        at += 4
    while at < length:
        h ^= read(at, 1)[0] * _P5
        _rotate(h, _U64(11))
        h *= _P1
        at += 1
    h ^= h >> _U64(33)
    h *= _P2
    h ^= h >> _U64(29)
    h *= _P3
    h ^= h >> _U64(32)


def _scrambled(words: Hashes) -> Hashes:
    """In place, as an accumulator that was 0 takes them in."""
    words *= _P2
    _rotate(words, _U64(31))
    words *= _P1
    return words


def _rotate(x: Hashes, bits: Any) -> None:
    """To the left, in place."""
    left = x << bits
    x >>= _U64(64) - bits
    x |= left
