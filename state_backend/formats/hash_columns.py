"""XXH64 of every element of a binary column, equal to `xxhash.xxh64_intdigest`, for many rows of one length at a time.

    pieces of 32 bytes  four accumulators (`lanes`) of 8 bytes each, merged at the end; only in rows of 32 bytes or more
    the rest            8 bytes at a time, then 4, then 1, and the avalanche

Source: the XXH64 specification, https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

from __future__ import annotations

from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from state_backend.formats.arrow_columns import binary_views
from state_backend.values.errors import InvariantViolated

Hashes = npt.NDArray[np.uint64]

# `MAX_LENGTH` is the longest row, in bytes, that NumPy hashes. `_MIN_ROWS[length]` is the fewest rows of one length for
# which NumPy is faster than `xxhash` row by row. Longer rows need more calls of NumPy, whose overhead is the same for
# any number of rows. Measured: about 450, 1,000 and 1,600 rows of 16, 40 and 80 bytes.
MAX_LENGTH = 512
_ONE_BY_ONE = MAX_LENGTH + 1  # in place of the length of a row that NumPy does not hash
_LENGTHS = np.arange(_ONE_BY_ONE + 1)
_MIN_ROWS = 400 + 15 * _LENGTHS
_BLOCK_ROWS = 16384


def _rotation(bits: Any) -> tuple[Hashes, Hashes]:
    left = np.array(bits, np.uint64)
    return left, np.array(64 - left, np.uint64)  # In NumPy 1, this difference is a float if `bits` is a single number.


# Constants are arrays without dimensions: with numbers of Python, a short call of NumPy takes twice the time.
_P1, _P2, _P3, _P4, _P5 = (
    np.array(prime, np.uint64)
    for prime in (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
)
_LANES = np.array([[_P1 + _P2], [_P2], [0], [-_P1]], np.uint64)
_BY_11, _BY_23, _BY_27, _BY_31 = map(_rotation, (11, 23, 27, 31))
_BY_LANE = _rotation([[1], [7], [12], [18]])
_AVALANCHE = [[np.array(number, np.uint64) for number in step] for step in ((33, _P2), (29, _P3), (32, 1))]


def xxh64(data: pa.BinaryArray, seed: int | Hashes) -> Hashes:
    """Return the hash of each row. `seed`: one seed for all rows, or an array with a seed for each row."""
    if data.null_count:
        raise InvariantViolated(f"{data.null_count} of {len(data)} rows to hash are null")
    if len(data) < _MIN_ROWS[0]:
        return _hash(data, _ONE_BY_ONE, seed)
    lengths = np.minimum(np.diff(binary_views(data)[0]), _ONE_BY_ONE)
    many = np.bincount(lengths, minlength=len(_LENGTHS)) >= _MIN_ROWS
    groups = np.where(many, _LENGTHS, _ONE_BY_ONE).astype(np.uint16)[lengths]
    counts = np.bincount(groups)
    if counts[-1] == len(data):
        return _hash(data, len(counts) - 1, seed)
    # Rows of one group become neighbours, so that each row is copied once.
    order = np.argsort(groups, kind="stable")
    data, hashes, at = data.take(pa.array(order)), np.empty(len(data), np.uint64), 0
    for group in np.flatnonzero(counts).tolist():
        rows = order[at : at + counts[group]]
        hashes[rows] = _hash(data.slice(at, len(rows)), group, seed if isinstance(seed, int) else seed[rows])
        at += len(rows)
    return hashes


def _hash(data: pa.BinaryArray, length: int, seed: int | Hashes) -> Hashes:
    """Return the hash of each row. `length`: the bytes of every row; `_ONE_BY_ONE`: rows differ, don't use NumPy.

    NumPy hashes blocks of rows, so small that a block's accumulators fit the CPU's L2 cache.
    """
    if length == _ONE_BY_ONE:
        seeds = repeat(seed) if isinstance(seed, int) else seed.tolist()
        # Digests are read as bytes, because NumPy is slow with Python integers beyond int64.
        found = b"".join(map(xxhash.xxh64_digest, data.to_pylist(), seeds))
        return np.frombuffer(found, ">u8").astype(np.uint64)
    hashes = np.empty(len(data), np.uint64)
    offsets, raw = binary_views(data)
    # All blocks share one scratch array, because to allocate memory costs more than the arithmetic.
    scratch = np.empty((3, 4 if length >= 32 else 1, min(len(data), _BLOCK_ROWS)), np.uint64)
    for first in range(0, len(data), _BLOCK_ROWS):
        h = hashes[first : first + _BLOCK_ROWS]
        seeds = np.full(1, seed, np.uint64) if isinstance(seed, int) else seed[first : first + _BLOCK_ROWS]
        _Block(h, raw, int(offsets[first]), length, *scratch[:, :, : len(h)]).hash(seeds)
    return hashes


class _Block(NamedTuple):
    """A block of rows that all have the same length."""

    h: Hashes  # the hash of each row, which `hash` computes in place
    raw: npt.NDArray[np.uint8]  # the bytes of all rows, without gaps
    start: int  # the position in `raw` of the first row
    length: int  # bytes of each row
    lanes: Hashes  # the four accumulators of XXH64 for each row
    words: Hashes  # the numbers that `_read` has read last
    spare: Hashes  # scratch memory

    def hash(self, seeds: Hashes) -> None:
        h = self.h
        at = self._hash_lanes(seeds)
        h += np.uint64(self.length)
        self._hash_rest(at)
        spare = self.spare[0]
        for bits, prime in _AVALANCHE:
            np.right_shift(h, bits, out=spare)
            h ^= spare
            h *= prime

    def _hash_lanes(self, seeds: Hashes) -> int:
        """Begin each row's hash in `self.h` with the row's whole pieces of 32 bytes, and return where they end.

        A row of less than 32 bytes has no whole piece. Its hash begins with the seed alone, and the method returns 0.
        `_hash_rest` adds the remaining bytes.
        """
        h, lanes, words, at = self.h, self.lanes, self.words, 0
        if self.length < 32:
            np.add(seeds, _P5, out=h)
            return at
        np.add(seeds, _LANES, out=lanes)
        while at + 32 <= self.length:
            taken = self._read(at, 32)
            taken *= _P2
            lanes += taken
            self._rotate(lanes, _BY_31)
            lanes *= _P1
            at += 32
        words[:] = lanes
        self._rotate(words, _BY_LANE)
        words.sum(axis=0, out=h)
        for lane in self._scramble(lanes):
            h ^= lane
            h *= _P1
            h += _P4
        return at

    def _hash_rest(self, at: int) -> None:
        h = self.h
        while at + 8 <= self.length:
            h ^= self._scramble(self._read(at, 8))
            self._rotate(h, _BY_27)
            h *= _P1
            h += _P4
            at += 8
        if at + 4 <= self.length:
            taken = self._read(at, 4)
            taken *= _P1
            h ^= taken
            self._rotate(h, _BY_23)
            h *= _P2
            h += _P3
            at += 4
        for last in range(at, self.length):
            taken = self._read(last, 1)
            taken *= _P5
            h ^= taken
            self._rotate(h, _BY_11)
            h *= _P1

    def _read(self, at: int, width: int) -> Hashes:
        """Return the number of `width` bytes at byte `at` of each row; for a width of 32, four numbers of 8 bytes."""
        count, four = len(self.h), width == 32
        into: Hashes = self.words if four else self.words[0]
        shape, strides = ((4, count), (8, self.length)) if four else ((count,), (self.length,))
        into[...] = np.ndarray(shape, "<u8" if four else f"<u{width}", self.raw.data, self.start + at, strides)
        return into

    def _rotate(self, x: Hashes, bits: tuple[Hashes, Hashes]) -> None:
        left = self.spare if x.ndim == 2 else self.spare[0]
        np.left_shift(x, bits[0], out=left)
        x >>= bits[1]
        x |= left

    def _scramble(self, x: Hashes) -> Hashes:
        """Replace each number in place by the result of XXH64's round on an accumulator of 0."""
        x *= _P2
        self._rotate(x, _BY_31)
        x *= _P1
        return x
