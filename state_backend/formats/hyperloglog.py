"""HyperLogLog sketches, which estimate a key's number of distinct values in bounded space.

The code handles the sketches of many keys at a time.

A sketch has m = 2^precision registers. A value's 64-bit hash has two parts: the upper `precision` bits choose a
register, and the lower q = 64 - precision bits give a rank, 1 + their leading zeros (1 .. q + 1). A register keeps its
highest rank, 0 at first.

    sketch  := 1 (version, u8) | form (u8) | precision (u8) | 0 (u8) | body
    form 1  : entry*, u32 little-endian: register << 6 | rank; registers ascend, each at most once; rank > 0
    form 2  : m bytes: the rank of each register

A sketch with fewer than m / 4 set registers has form 1, every other sketch has form 2. A key without a value has null
in place of a sketch.

A set of values always has the same sketch, byte for byte, in any order of values and batches. The sketch of a union has
the maximum of each register.

    value, hashed with XXH64, seed 0                    as bytes
    boolean, integers, date, timestamps (µs)            int64, little-endian
    float, double                                       float64; -0.0 as 0.0, every NaN as the canonical NaN
    decimal                                             unscaled, int128, little-endian; the column has the scale
    string, binary                                      the bytes

Source: Flajolet, Fusy, Gandouet and Meunier, "HyperLogLog" (2007). For the estimate: Ertl, "New cardinality
estimation algorithms for HyperLogLog sketches" (2017, arXiv 1702.01284), algorithm 6, which needs no table of biases
and no switch between estimators. For the hash: the xxHash specification.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from numpy.lib.stride_tricks import sliding_window_view

from state_backend.formats.arrow_columns import binary_column, binary_views
from state_backend.formats.hash_columns import xxh64
from state_backend.values.errors import CorruptFile, StateSchemaError, UsageError
from state_backend.values.frozen import frozen
from state_backend.values.release import unsupported

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
U8 = npt.NDArray[np.uint8]

MIN_PRECISION, MAX_PRECISION = 4, 18
VERSION = 1
SPARSE, DENSE = 1, 2
_RANK_BITS = 6
_RANK = np.uint64((1 << _RANK_BITS) - 1)
_OWNER_SHIFT = np.uint64(32)
_BITS_OF_BYTE = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(axis=1, dtype=np.uint8)
# NumPy has `bitwise_count` since 2.0. An older NumPy uses the table, which takes three times as long.
_count_bits = getattr(np, "bitwise_count", _BITS_OF_BYTE.take)
_WORD = 4
# Bytes of dense sketches in one step of the estimate, small enough for the step's arrays to stay in the CPU's cache.
_BLOCK_BYTES = 1 << 17


def precision_for(relative_error: float) -> int:
    """Return the smallest precision whose standard error, 1.04 / sqrt(2^precision), is at most `relative_error`.

    Raises:
        UsageError: The error is not in (0, 1), or is below 0.00203: a sketch would exceed 2^18 bytes per key.
    """
    finest = 1.04 / math.sqrt(1 << MAX_PRECISION)
    if not finest <= relative_error < 1:
        raise UsageError(
            f"expected relative_error to be at least {finest:.5f} (256 KiB for each key) and below 1, found {relative_error}; "
            "with 0.02 a key takes 4 KiB"
        )
    return next(p for p in range(MIN_PRECISION, MAX_PRECISION + 1) if 1.04 / math.sqrt(1 << p) <= relative_error)


@frozen
class Sketches:
    """A column of sketches of one precision, with at most one sketch in each row. The row number is called the *owner*.

    A sketch with few set registers is sparse (form 1): only its registers of rank > 0 are held. A sketch with more set
    registers is dense (form 2): the ranks of all its registers are held.

    Attributes:
        count: The number of rows, with and without a sketch.
        entries: The registers of all sparse sketches, each as `owner << 32 | register << 6 | rank`, ascending. Each
            register of an owner occurs once.
        dense_owners: The row numbers of the dense sketches, ascending.
        dense: For each of `dense_owners`, a row of 2^precision ranks.
    """

    precision: int
    count: int
    entries: U64
    dense_owners: I64
    dense: U8

    @classmethod
    def decode(cls, column: pa.Array, precision: int) -> Sketches:
        """Decode a binary column of encoded sketches. A null stands for a row without a sketch: no distinct values.

        Raises:
            CorruptFile: A value is no sketch.
            StateSchemaError: A sketch has another precision.
            UnsupportedFormat: A newer release of Cairn wrote a sketch in a format that this release can't read.
        """
        owners = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
        offsets, data = binary_views(column.drop_null())
        offsets = offsets.astype(np.int64)
        sizes = np.diff(offsets)
        _refuse((sizes < 2 * _WORD) | (sizes % _WORD != 0), owners, "no sketch has this length")
        words = data[offsets[0] : offsets[-1]].view("<u4")
        starts = (offsets[:-1] - offsets[0]) // _WORD
        is_dense = _forms(words[starts], sizes, owners, precision) == DENSE
        in_entries = np.repeat(~is_dense, sizes // _WORD)
        in_entries[starts] = False
        entry_owners = np.repeat(owners[~is_dense], sizes[~is_dense] // _WORD - 1)
        entries = (entry_owners.astype(np.uint64) << _OWNER_SHIFT) | words[in_entries]
        _check_entries(entries, entry_owners, precision)
        dense = np.empty((0, 1 << precision), np.uint8)
        if is_dense.any():
            dense = sliding_window_view(words, dense.shape[1] // _WORD)[starts[is_dense] + 1].view(np.uint8)
        _check_dense(dense, owners[is_dense], precision)
        return cls(precision=precision, count=len(column), entries=entries, dense_owners=owners[is_dense], dense=dense)

    def encode(self) -> pa.Array:
        """Return the sketches as a binary column: the inverse of `decode`."""
        entry_owners = (self.entries >> _OWNER_SHIFT).astype(np.int64)
        entry_counts = np.bincount(entry_owners, minlength=self.count)
        body_words = entry_counts.copy()
        body_words[self.dense_owners] = (1 << self.precision) // _WORD
        present = body_words > 0
        ends = np.cumsum(body_words + present)
        if self.count and ends[-1] * _WORD >= 1 << 31:
            raise UsageError(
                f"the distinct-value sketches of {self.count} keys take {ends[-1] * _WORD} bytes; a batch must have less than 2 GiB\n"
                f"One sketch of precision {self.precision} takes up to {1 << self.precision} bytes; choose a larger relative_error"
            )
        starts = ends - body_words - present
        words = np.empty(ends[-1] if self.count else 0, "<u4")
        words[starts[present]] = _header(SPARSE, self.precision)
        # The place of an entry in `words` is its sketch's start, plus 1 for the header, plus the entry's number within
        # the sketch.
        first_entry = np.cumsum(entry_counts) - entry_counts
        places = np.arange(len(self.entries)) + np.repeat(starts + 1 - first_entry, entry_counts)
        words[places] = self.entries.astype(np.uint32)
        for owner, ranks in zip(self.dense_owners, self.dense, strict=True):
            words[starts[owner]] = _header(DENSE, self.precision)
            words[starts[owner] + 1 : ends[owner]] = ranks.view("<u4")
        offsets = np.concatenate([[0], ends * _WORD]).astype(np.int32)
        bitmap = np.packbits(present, bitorder="little")
        buffers = [pa.py_buffer(bitmap), pa.py_buffer(offsets), pa.py_buffer(words)]
        return pa.Array.from_buffers(pa.binary(), self.count, buffers)

    def add(self, owners: I64, hashes: U64) -> Sketches:
        """Return new sketches with the value of hash `hashes[i]` added to row `owners[i]`, which may have no sketch."""
        rest_bits = np.uint64(64 - self.precision)
        rest = hashes & ((np.uint64(1) << rest_bits) - np.uint64(1))
        # `length` is the bit length of `rest`, read from the exponent of `rest` as a float. A float has only 53 bits,
        # so the conversion could round a number such as 2^60 - 1 up to 2^60, which is one bit longer. To prevent this,
        # each 1 bit directly below another 1 bit is cleared first. The highest 1 bit stays, and so does the length.
        length = np.frexp((rest & ~(rest >> np.uint64(1))).astype(np.float64))[1].astype(np.uint64)
        rank = rest_bits + np.uint64(1) - length
        register = hashes >> rest_bits
        added = (owners.astype(np.uint64) << _OWNER_SHIFT) | (register << np.uint64(_RANK_BITS)) | rank
        return self._with_entries(np.concatenate([self.entries, np.sort(added)]))

    def union(self, other: Sketches) -> Sketches:
        """Return, for each row, the sketch of the union of the row's two sets of values."""
        owners = np.union1d(self.dense_owners, other.dense_owners)
        dense = np.zeros((len(owners), 1 << self.precision), np.uint8)
        for side in (self, other):
            rows = np.searchsorted(owners, side.dense_owners)
            dense[rows] = np.maximum(dense[rows], side.dense)
        both = replace(self, dense_owners=owners, dense=dense)
        return both._with_entries(np.concatenate([self.entries, other.entries]))

    def united(self, groups: I64, count: int) -> Sketches:
        """Return `count` sketches: sketch i is the union of those of the rows with group i. `groups` must ascend."""
        owners = groups[(self.entries >> _OWNER_SHIFT).astype(np.int64)].astype(np.uint64)
        entries = (owners << _OWNER_SHIFT) | (self.entries & np.uint64(0xFFFFFFFF))
        dense_groups = groups[self.dense_owners]
        starts = np.flatnonzero(np.diff(dense_groups, prepend=-1))
        dense = np.maximum.reduceat(self.dense, starts, axis=0) if len(starts) else self.dense
        both = replace(self, count=count, dense_owners=dense_groups[starts], dense=dense)
        return both._with_entries(entries)

    def estimate(self) -> F64:
        """Return the estimated number of distinct values of each row's sketch; 0.0 for a row without a sketch."""
        m, q = 1 << self.precision, 64 - self.precision
        weights, pair_weights = _weights(self.precision)
        owners = (self.entries >> _OWNER_SHIFT).astype(np.int64)
        ranks = (self.entries & _RANK).astype(np.int64)
        set_registers = np.bincount(owners, minlength=self.count)
        harmonic = np.bincount(owners, weights[ranks], minlength=self.count).astype(np.float64)
        full = np.bincount(owners[ranks > q], minlength=self.count)
        rows = max(1, _BLOCK_BYTES // m)
        for at in range(0, len(self.dense), rows):
            block, to = self.dense[at : at + rows], self.dense_owners[at : at + rows]
            set_registers[to] = _set_registers(block)
            harmonic[to] = pair_weights.take(block.view("<u2")).sum(axis=1)
            if block.max() > q:
                full[to] = np.count_nonzero(block > q, axis=1)
        harmonic += m * _sigmas(self.precision)[m - set_registers]
        for owner in np.flatnonzero(full):
            harmonic[owner] += m * _tau(1 - full[owner] / m) * 0.5**q
        estimates: F64 = m * m / (2 * math.log(2)) / harmonic
        return estimates

    def _with_entries(self, entries: U64) -> Sketches:
        """Return new sketches: this object's dense sketches, to which the registers in `entries` are added.

        The object's own `self.entries` is ignored, so callers pass its registers too. A register goes into the dense
        sketch of its row if the row has one. The other registers become the `entries` of the new object, except if a
        row has too many of them for a sparse sketch: then the row's sketch becomes dense.
        """
        dense_owners, dense = self.dense_owners, self.dense
        entries = np.sort(entries, kind="stable")  # the stable sort merges ascending runs
        # Entries of one register are neighbours now, and the last of them has the highest rank. Only that entry stays.
        registers = entries >> np.uint64(_RANK_BITS)
        entries = entries[np.append(registers[1:] != registers[:-1], True)] if len(entries) else entries
        owners = (entries >> _OWNER_SHIFT).astype(np.int64)
        grown = np.bincount(owners, minlength=self.count) >= (1 << self.precision) // _WORD
        grown[dense_owners] = False
        if grown.any():
            promoted = np.flatnonzero(grown)
            zeros = np.zeros((len(promoted), 1 << self.precision), np.uint8)
            order = np.argsort(all_owners := np.concatenate([dense_owners, promoted]))
            dense_owners, dense = all_owners[order], np.concatenate([dense, zeros])[order]
        if len(dense_owners):
            slots = np.full(self.count, -1)
            slots[dense_owners] = np.arange(len(dense_owners))
            of_dense = slots[owners] >= 0
            moved = entries[of_dense]
            register = (moved & np.uint64(0xFFFFFFFF)) >> np.uint64(_RANK_BITS)
            places = (slots[owners[of_dense]] << self.precision) + register.astype(np.int64)
            flat = dense.flatten()
            flat[places] = np.maximum(flat[places], (moved & _RANK).astype(np.uint8))
            entries, dense = entries[~of_dense], flat.reshape(dense.shape)
        return replace(self, entries=entries, dense_owners=dense_owners, dense=dense)


def _header(form: int, precision: int) -> int:
    return VERSION | form << 8 | precision << 16


def _forms(headers: U32, sizes: I64, owners: I64, precision: int) -> U32:
    """Check header and size of each sketch, and return the forms: SPARSE or DENSE. `owners`: the rows, for messages."""
    forms, precisions = (headers >> 8 & 0xFF).astype(np.uint32), headers >> 16
    if (newer := headers & 0xFF > VERSION).any():
        found = int(headers[np.argmax(newer)] & 0xFF)
        raise unsupported("a distinct-value sketch in a state column", f"format {found}", f"format {VERSION}")
    known = (headers & 0xFF == VERSION) & ((forms == SPARSE) | (forms == DENSE))
    _refuse(
        ~known | (precisions < MIN_PRECISION) | (precisions > MAX_PRECISION),
        owners,
        "it does not begin with a sketch's header",
    )
    if (other := precisions != precision).any():
        raise StateSchemaError(
            f"recorded distinct values have precision {precisions[other][0]}, but the aggregate now asks for "
            f"{precision}; set relative_error back, or give the aggregate a new name, which starts from zero"
        )
    sparse_end = _WORD + (1 << precision)
    _refuse(
        np.where(forms == DENSE, sizes != sparse_end, sizes >= sparse_end), owners, "its length does not fit its form"
    )
    return forms


def _check_entries(entries: U64, owners: I64, precision: int) -> None:
    rank, registers = entries & _RANK, entries >> np.uint64(_RANK_BITS)
    beyond = (entries & np.uint64(0xFFFFFFFF)) >> np.uint64(_RANK_BITS + precision) != 0
    _refuse(beyond | (rank == 0) | (rank > 65 - precision), owners, "a register or rank is out of range")
    _refuse(registers[1:] <= registers[:-1], owners[1:], "its registers are not ascending")


def _check_dense(dense: U8, owners: I64, precision: int) -> None:
    if not len(dense):
        return
    highest = 65 - precision
    if dense.max() > highest:
        _refuse(np.any(dense > highest, axis=1), owners, "a rank is out of range")
    _refuse(_set_registers(dense) < (1 << precision) // _WORD, owners, "it has too few set registers for its form")


def _set_registers(dense: U8) -> I64:
    """Return the number of registers with a rank > 0 in each row of dense sketches.

    The function packs the registers to bits, and counts the bits: three times as fast as counting bytes.
    """
    counts: I64 = dense.shape[1] - _count_bits(np.packbits(dense == 0, axis=1)).sum(axis=1, dtype=np.int64)
    return counts


def _refuse(wrong: npt.NDArray[np.bool_], owners: I64, why: str) -> None:
    if wrong.any():
        raise CorruptFile(
            f"the distinct-value sketch in row {owners[np.argmax(wrong)]} of a state column is damaged: {why}; "
            "restore an older checkpoint"
        )


@lru_cache(maxsize=4)
def _weights(precision: int) -> tuple[F64, F64]:
    """Return the tables with which `estimate` sums up 2^-rank over the registers of a sketch.

    Two ranks have the weight 0 in both tables: rank 0 (an unset register) and the highest rank, 65 - precision. For
    registers of these two ranks, `estimate` adds the corrections of `_sigmas` and `_tau` instead.
    """
    weights, q = np.zeros(1 << 8), 64 - precision
    weights[1 : q + 1] = 0.5 ** np.arange(1, q + 1)
    return weights, (weights[:, None] + weights).ravel()


@lru_cache(maxsize=4)
def _sigmas(precision: int) -> F64:
    """Return a table of Ertl's function sigma, with one value for each possible count of zero registers.

    A sketch that has seen few distinct values has many zero registers. `Sketches.estimate` adds m * sigma(zeros / m) to
    the denominator of such a sketch's estimate. The function is sigma(x) = x + the sum of x ** 2**k * 2 ** (k - 1) over
    k = 1, 2, … (the paper is cited at the top of this module).
    """
    x = np.arange((1 << precision) + 1) / (1 << precision)
    total, scale = x.copy(), 1.0
    total[-1] = np.inf
    growing = np.ones(len(x), np.bool_)
    growing[-1] = False
    while growing.any():
        x = x * x
        larger = np.where(growing, total + x * scale, total)
        growing = larger != total
        total, scale = larger, scale * 2
    return total


def _tau(x: float) -> float:
    """Return Ertl's function tau, which corrects the estimate of sketches in which registers have the highest rank.

    It is tau(x) = (1 - x - the sum of (1 - x ** 2**-k) ** 2 * 2**-k over k = 1, 2, …) / 3 (paper: see the module).
    """
    if x in (0.0, 1.0):
        return 0.0
    scale, total, before = 1.0, 1 - x, math.inf
    while total != before:
        x, before, scale = math.sqrt(x), total, scale / 2
        total -= (1 - x) ** 2 * scale
    return total / 3


def hash_values(values: pa.Array) -> U64:
    """Return the hash of each value, none of them null or nested, by the table in the module's docstring."""
    of, count = values.type, len(values)
    if pa.types.is_decimal128(of):
        return _hash_fixed(values.buffers()[1].slice(16 * values.offset, 16 * count), 16, count)
    if pa.types.is_floating(of):
        doubles = values.to_numpy().astype("<f8") + 0.0  # turns -0.0 into 0.0
        doubles[np.isnan(doubles)] = np.nan
        return _hash_fixed(pa.py_buffer(doubles), 8, count)
    if pa.types.is_integer(of) or pa.types.is_boolean(of) or pa.types.is_temporal(of):
        plain = values.cast(pa.int32()) if pa.types.is_date32(of) else values
        return _hash_fixed(pa.py_buffer(plain.cast(pa.int64()).to_numpy().astype("<i8")), 8, count)
    return xxh64(values.cast(pa.binary()), 0)


def _hash_fixed(data: pa.Buffer, width_bytes: int, count: int) -> U64:
    return xxh64(binary_column(np.arange(count + 1) * width_bytes, data), 0)
