"""XXH64 of every element of a binary column: what ``xxhash.xxh64_intdigest`` gives, for many rows of one length at a time.

    lanes of 32 bytes   four accumulators of 8 bytes each, merged at the end; only from 32 bytes on
    the rest            8 bytes at a time, then 4, then 1, and the avalanche

Source: the XXH64 specification, https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

from __future__ import annotations

from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from state_backend.formats.arrow_columns import binary_views
from state_backend.values.errors import InvariantViolated

Hashes = npt.NDArray[np.uint64]

# NumPy's calls cost the same for any number of rows, and longer rows need more of them. Measured: about 600, 1,100, 1,700 and
# 2,000 rows of 16, 40, 80 and 128 bytes take as long as one by one.
MAX_LENGTH = 512
_MIN_ROWS = 400 + 15 * np.arange(MAX_LENGTH + 1)
_BLOCK_ROWS = 16384

_U64 = np.uint64
_MASK = (1 << 64) - 1
_P1, _P2, _P3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_P4, _P5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5


def xxh64(data: pa.BinaryArray, seed: int | Hashes) -> Hashes:
    """(n,) uint64, one for each row; ``seed``: one for all, or (n,) uint64. Rows are never null."""
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
        hashes[rows] = _hash_equal(data.filter(pa.array(rows)), length, seed if isinstance(seed, int) else seed[rows])
        others &= ~rows
    few = data if others.all() else data.filter(pa.array(others))
    seeds = repeat(seed) if isinstance(seed, int) else seed[others].tolist()
    # As bytes, since NumPy is slow to take integers beyond int64.
    hashes[others] = np.frombuffer(b"".join(map(xxhash.xxh64_digest, few.to_pylist(), seeds)), ">u8")
    return hashes


def _hash_equal(data: pa.BinaryArray, length: int, seed: int | Hashes) -> Hashes:
    """Of rows that are all ``length`` bytes long. In blocks, so that the accumulators stay in the L2 cache."""
    hashes = np.empty(len(data), np.uint64)
    offsets, raw = binary_views(data)
    # Allocated once: what the allocator gives back to the system and fetches again costs more than the arithmetic.
    scratch = np.empty((3, 4 if length >= 32 else 1, min(len(data), _BLOCK_ROWS)), np.uint64)
    for first in range(0, len(data), _BLOCK_ROWS):
        block, start = hashes[first : first + _BLOCK_ROWS], int(offsets[first])
        seeds = seed if isinstance(seed, int) else seed[first : first + _BLOCK_ROWS]
        _hash_block(block, raw, start, length, seeds, scratch[:, :, : len(block)])
    return hashes


def _rotate(x: Hashes, bits: Any, spare: npt.NDArray[np.uint64]) -> None:
    """Rotate to the left, in place."""
    left = spare if x.ndim == 2 else spare[0]
    np.left_shift(x, bits, out=left)
    x >>= _U64(64) - bits
    x |= left


def _scramble(x: Hashes, spare: npt.NDArray[np.uint64]) -> Hashes:
    """Apply one round of an accumulator that was 0, in place."""
    x *= _P2
    _rotate(x, _U64(31), spare)
    x *= _P1
    return x


def _avalanche(h: Hashes, spare: npt.NDArray[np.uint64]) -> None:
    """Spread each bit over all bits, in place: the last step of the hash."""
    for bits, prime in ((33, _P2), (29, _P3), (32, 1)):
        np.right_shift(h, _U64(bits), out=spare[0])
        h ^= spare[0]
        h *= prime


def _hash_block(
    h: Hashes,
    raw: npt.NDArray[np.uint8],
    start: int,
    length: int,
    seed: int | Hashes,
    scratch: npt.NDArray[np.uint64],
) -> None:
    lanes, words, spare = scratch
    base = np.full(1, seed, np.uint64) if isinstance(seed, int) else seed

    def read(at: int, width: int) -> Hashes:
        """The number that is ``at`` bytes into each row; of 32 bytes four numbers."""
        four = width == 32
        into: Hashes = words if four else words[0]
        shape, strides = ((4, len(h)), (8, length)) if four else ((len(h),), (length,))
        into[...] = np.ndarray(shape, "<u8" if four else f"<u{width}", raw.data, start + at, strides)
        return into

    at = 0
    if length >= 32:
        np.add(base, np.array([[first & _MASK] for first in (_P1 + _P2, _P2, 0, -_P1)], np.uint64), out=lanes)
        while at + 32 <= length:
            taken = read(at, 32)
            taken *= _P2
            lanes += taken
            _rotate(lanes, _U64(31), spare)
            lanes *= _P1
            at += 32
        words[:] = lanes
        _rotate(words, np.array([[1], [7], [12], [18]], np.uint64), spare)
        words.sum(axis=0, out=h)
        for lane in _scramble(lanes, spare):
            h ^= lane
            h *= _P1
            h += _P4
    else:
        np.add(base, _U64(_P5), out=h)
    h += _U64(length)
    while at + 8 <= length:
        h ^= _scramble(read(at, 8), spare)
        _rotate(h, _U64(27), spare)
        h *= _P1
        h += _P4
        at += 8
    if at + 4 <= length:
        taken = read(at, 4)
        taken *= _P1
        h ^= taken
        _rotate(h, _U64(23), spare)
        h *= _P2
        h += _P3
        at += 4
    while at < length:
        taken = read(at, 1)
        taken *= _P5
        h ^= taken
        _rotate(h, _U64(11), spare)
        h *= _P1
        at += 1
    _avalanche(h, spare)
