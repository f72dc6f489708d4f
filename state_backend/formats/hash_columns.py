"""XXH64 of every element of a binary column, equal to `xxhash.xxh64_intdigest`, for many rows of one length at a time.

    pieces of 32 bytes  four accumulators (`lanes`) of 8 bytes each, merged at the end; only in rows of 32 bytes or more
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

# `MAX_LENGTH` is the longest row, in bytes, that NumPy hashes. `_MIN_ROWS[length]` is the fewest rows of one length for
# which NumPy is faster than `xxhash` row by row. Longer rows need more calls of NumPy, whose overhead is the same for
# any number of rows. Measured: about 600, 1,100, 1,700 and 2,000 rows of 16, 40, 80 and 128 bytes.
MAX_LENGTH = 512
_MIN_ROWS = 400 + 15 * np.arange(MAX_LENGTH + 1)
_BLOCK_ROWS = 16384

_U64 = np.uint64
_MASK = (1 << 64) - 1
_P1, _P2, _P3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_P4, _P5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5


def xxh64(data: pa.BinaryArray, seed: int | Hashes) -> Hashes:
    """Return the hash of each row. `seed`: one for all rows, or one for each."""
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
    # Digests are read as bytes, because NumPy is slow with Python integers beyond int64.
    hashes[others] = np.frombuffer(b"".join(map(xxhash.xxh64_digest, few.to_pylist(), seeds)), ">u8")
    return hashes


def _hash_equal(data: pa.BinaryArray, length: int, seed: int | Hashes) -> Hashes:
    """Return the hashes of rows that are all `length` bytes long.

    The function works in blocks of rows whose accumulators fit the L2 cache.
    """
    hashes = np.empty(len(data), np.uint64)
    offsets, raw = binary_views(data)
    # All blocks share one scratch array: allocating memory from the system for each block costs more than the
    # arithmetic.
    scratch = np.empty((3, 4 if length >= 32 else 1, min(len(data), _BLOCK_ROWS)), np.uint64)
    for first in range(0, len(data), _BLOCK_ROWS):
        h = hashes[first : first + _BLOCK_ROWS]
        seeds = np.full(1, seed, np.uint64) if isinstance(seed, int) else seed[first : first + _BLOCK_ROWS]
        _Block(h, raw, int(offsets[first]), length, scratch[:, :, : len(h)]).hash(seeds)
    return hashes


class _Block:
    """A block of rows that all have the same length."""

    def __init__(
        self,
        h: Hashes,
        raw: npt.NDArray[np.uint8],
        start: int,
        length: int,
        scratch: npt.NDArray[np.uint64],
    ) -> None:
        self._h, self._raw, self._start, self._length = h, raw, start, length
        self._lanes, self._words, self._spare = scratch

    def hash(self, seeds: Hashes) -> None:
        h = self._h
        at = self._hash_lanes(seeds)
        h += _U64(self._length)
        self._hash_rest(at)
        for bits, prime in ((33, _P2), (29, _P3), (32, 1)):
            np.right_shift(h, _U64(bits), out=self._spare[0])
            h ^= self._spare[0]
            h *= prime

    def _hash_lanes(self, seeds: Hashes) -> int:
        """Begin each row's hash in `self._h` with the row's whole pieces of 32 bytes, and return where they end.

        A row of less than 32 bytes has no whole piece. Its hash begins with the seed alone, and the method returns 0.
        `_hash_rest` adds the remaining bytes.
        """
        h, lanes, words, at = self._h, self._lanes, self._words, 0
        if self._length < 32:
            np.add(seeds, _U64(_P5), out=h)
            return at
        np.add(seeds, np.array([[first & _MASK] for first in (_P1 + _P2, _P2, 0, -_P1)], np.uint64), out=lanes)
        while at + 32 <= self._length:
            taken = self._read(at, 32)
            taken *= _P2
            lanes += taken
            self._rotate(lanes, _U64(31))
            lanes *= _P1
            at += 32
        words[:] = lanes
        self._rotate(words, np.array([[1], [7], [12], [18]], np.uint64))
        words.sum(axis=0, out=h)
        for lane in self._scramble(lanes):
            h ^= lane
            h *= _P1
            h += _P4
        return at

    def _hash_rest(self, at: int) -> None:
        h = self._h
        while at + 8 <= self._length:
            h ^= self._scramble(self._read(at, 8))
            self._rotate(h, _U64(27))
            h *= _P1
            h += _P4
            at += 8
        if at + 4 <= self._length:
            taken = self._read(at, 4)
            taken *= _P1
            h ^= taken
            self._rotate(h, _U64(23))
            h *= _P2
            h += _P3
            at += 4
        for last in range(at, self._length):
            taken = self._read(last, 1)
            taken *= _P5
            h ^= taken
            self._rotate(h, _U64(11))
            h *= _P1

    def _read(self, at: int, width: int) -> Hashes:
        """Return the number at byte `at` of each row; for a width of 32, four numbers of 8 bytes."""
        count, four = len(self._h), width == 32
        into: Hashes = self._words if four else self._words[0]
        shape, strides = ((4, count), (8, self._length)) if four else ((count,), (self._length,))
        into[...] = np.ndarray(shape, "<u8" if four else f"<u{width}", self._raw.data, self._start + at, strides)
        return into

    def _rotate(self, x: Hashes, bits: Any) -> None:
        left = self._spare if x.ndim == 2 else self._spare[0]
        np.left_shift(x, bits, out=left)
        x >>= _U64(64) - bits
        x |= left

    def _scramble(self, x: Hashes) -> Hashes:
        """Replace each number in place by the result of XXH64's round on an accumulator of 0."""
        x *= _P2
        self._rotate(x, _U64(31))
        x *= _P1
        return x
