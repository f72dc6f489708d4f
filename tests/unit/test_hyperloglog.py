"""Sketches of distinct values: their stored bytes, and the error of their estimates.

A property test against a model of registers is in tests/property/test_aggregate_laws.py.
"""

import math
import struct
from datetime import UTC, date, datetime
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
import xxhash

from state_backend.formats.hyperloglog import Sketches, hash_values, precision_for
from state_backend.values.errors import CorruptFile, StateSchemaError, UnsupportedFormat, UsageError

NONE = np.array([], np.int64)


def nothing(count, precision):
    return Sketches.decode(pa.nulls(count, pa.binary()), precision)


def random_hashes(rng, count):
    return rng.integers(0, 2**64, count, np.uint64, endpoint=False)


def sketch_of(hashes, precision):
    return nothing(1, precision).add(np.zeros(len(hashes), np.int64), hashes)


@pytest.mark.parametrize(
    ("relative_error", "precision"), [(0.02, 12), (0.01625, 12), (0.01624, 13), (0.05, 9), (0.9, 4), (0.0021, 18)]
)
def test_precision_is_the_smallest_that_keeps_the_error(relative_error, precision):
    assert precision_for(relative_error) == precision


@pytest.mark.parametrize("relative_error", [0.002, 0.0, -0.1, 1.0, math.nan])
def test_a_relative_error_out_of_range_is_refused(relative_error):
    with pytest.raises(UsageError, match=f"found {relative_error}"):
        precision_for(relative_error)


def int64(value):
    return struct.pack("<q", value)


def double(value):
    return struct.pack("<d", value)


@pytest.mark.parametrize(
    ("values", "as_bytes"),
    [
        (pa.array([-1, 0, 127], pa.int8()), [int64(-1), int64(0), int64(127)]),
        (pa.array([-1, 2**31 - 1], pa.int32()), [int64(-1), int64(2**31 - 1)]),
        (pa.array([-(2**63), 2**63 - 1]), [int64(-(2**63)), int64(2**63 - 1)]),
        (pa.array([False, True]), [int64(0), int64(1)]),
        (pa.array([date(1969, 12, 31), date(1970, 1, 3)]), [int64(-1), int64(2)]),
        (pa.array([datetime(1970, 1, 1, 0, 0, 1, 5)], pa.timestamp("us")), [int64(1_000_005)]),
        (pa.array([datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)], pa.timestamp("us", "UTC")), [int64(1_000_000)]),
        (
            pa.array([1.5, -0.0, 0.0, -math.nan, math.inf]),
            [double(1.5), double(0.0), double(0.0), double(math.nan), double(math.inf)],
        ),
        (pa.array([1.5, -0.0], pa.float32()), [double(1.5), double(0.0)]),
        (
            pa.array([Decimal("-1.25"), Decimal("9" * 36 + ".99")], pa.decimal128(38, 2)),
            [(-125).to_bytes(16, "little", signed=True), (10**38 - 1).to_bytes(16, "little")],
        ),
        (pa.array(["", "é", "a" * 100, "é"]), [b"", "é".encode(), b"a" * 100, "é".encode()]),
        (pa.array(["x"], pa.large_string()), [b"x"]),
        (pa.array([b"\x00", b"\xff"]), [b"\x00", b"\xff"]),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)
def test_each_value_is_hashed_with_xxh64_over_its_canonical_bytes(values, as_bytes):
    expected = [xxhash.xxh64_intdigest(data) for data in as_bytes]
    assert hash_values(values).tolist() == expected
    assert hash_values(values[1:]).tolist() == expected[1:]
    assert hash_values(values[:0]).tolist() == []


def test_stored_sketches_keep_their_bytes():
    """Of form 1, then of form 2: a later release must read them."""
    hashes = hash_values(pa.array(["UA", "AA", "DL"]))
    assert sketch_of(hashes, 4).encode().to_pylist() == [bytes.fromhex("01010400 01010000 41020000 c1020000")]
    letters = hash_values(pa.array([chr(c) for c in range(ord("a"), ord("z") + 1)]))
    assert sketch_of(letters, 4).encode().to_pylist() == [bytes.fromhex("01020400 04010100 040d0401 00030301 04090002")]


def test_a_column_without_values_estimates_zero():
    assert nothing(0, 12).encode().to_pylist() == []
    assert nothing(0, 12).estimate().tolist() == []
    assert nothing(2, 12).estimate().tolist() == [0, 0]
    assert nothing(3, 12).add(NONE, NONE.astype(np.uint64)).encode().to_pylist() == [None] * 3


def test_sketches_beyond_an_arrow_column_are_refused():
    dense = np.broadcast_to(np.uint8(1), (8192, 1 << 18))
    sketches = Sketches(
        precision=18, count=8192, entries=NONE.astype(np.uint64), dense_owners=np.arange(8192), dense=dense
    )
    with pytest.raises(UsageError, match=r"8192 keys take 2147516416 bytes; .*\n.*larger relative_error"):
        sketches.encode()


@pytest.mark.parametrize("precision", [8, 12])
@pytest.mark.parametrize(("distinct", "trials"), [(10, 400), (100, 400), (1000, 200), (10_000, 100), (100_000, 40)])
def test_estimates_are_off_by_no_more_than_declared(precision, distinct, trials):
    """Each within four standard errors, their mean within four of a mean, and their spread about what it should be."""
    rng = np.random.default_rng([precision, distinct])
    standard_error = 1.04 / math.sqrt(1 << precision)
    owners = np.repeat(np.arange(trials), distinct)
    errors = nothing(trials, precision).add(owners, random_hashes(rng, len(owners))).estimate() / distinct - 1
    # A collision of two in so few values is worth more than a standard error.
    assert np.abs(errors).max() < 4 * standard_error + 1 / distinct
    assert abs(errors.mean()) < 4 * standard_error / math.sqrt(trials)
    assert math.sqrt((errors**2).mean()) < 1.25 * standard_error


def ertl(ranks, precision):
    """Algorithm 6 as it is printed, for one sketch."""
    m, q = 1 << precision, 64 - precision
    histogram = np.bincount(ranks, minlength=q + 2)
    x = 1 - histogram[q + 1] / m
    z, y = 0.0, 1.0
    if x not in (0, 1):
        z, before = 1 - x, None
        while z != before:
            x, before, y = math.sqrt(x), z, y / 2
            z -= (1 - x) ** 2 * y
        z /= 3
    z *= m
    for k in range(q, 0, -1):
        z = 0.5 * (z + histogram[k])
    x, y, before = histogram[0] / m, 1.0, None
    if x == 1:
        return 0.0
    sigma = x
    while sigma != before:
        x, before = x * x, sigma
        sigma += x * y
        y += y
    return m * m / (2 * math.log(2)) / (z + m * sigma)


@pytest.mark.parametrize("precision", [4, 5, 9])
@pytest.mark.parametrize("highest", ["some", "full"])
def test_estimates_are_those_of_the_published_algorithm(precision, highest):
    """Also for registers that are full, which no test reaches by adding values."""
    rng = np.random.default_rng(precision)
    m, q = 1 << precision, 64 - precision
    for empty in (0, 1, m // 4, m - m // 4, m - m // 4 + 1):
        ranks = np.minimum(rng.geometric(0.5, m) + (q - 3 if highest == "full" else 0), q + 1)
        ranks[:empty] = 0
        registers = np.flatnonzero(ranks)
        lower = np.where(ranks[registers] > q, 0, 1 << np.maximum(q - ranks[registers], 0))
        hashes = registers.astype(np.uint64) << np.uint64(q) | lower.astype(np.uint64)
        assert sketch_of(hashes, precision).estimate()[0] == pytest.approx(ertl(ranks, precision), rel=1e-12)


def sparse(*words, head=(1, 1, 4, 0)):
    return bytes(head) + struct.pack(f"<{len(words)}I", *words)


DENSE = bytes([1, 2, 4, 0]) + bytes([1] * 4 + [0] * 12)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "length"),
        (sparse(), "length"),
        (sparse(65)[:-1], "length"),
        (sparse(65, head=(0, 1, 4, 0)), "header"),
        (sparse(65, head=(1, 3, 4, 0)), "header"),
        (sparse(65, head=(1, 1, 3, 0)), "header"),
        (sparse(65, head=(1, 1, 19, 0)), "header"),
        (sparse(65, head=(1, 1, 4, 1)), "header"),
        (sparse(64), "out of range"),
        (sparse(64 + 62), "out of range"),
        (sparse(16 << 6 | 1), "out of range"),
        (sparse(130, 65), "not ascending"),
        (sparse(65, 66), "not ascending"),
        (sparse(65, 130, 195, 260), "does not fit its form"),
        (DENSE[:-4], "does not fit its form"),
        (DENSE + bytes(4), "does not fit its form"),
        (DENSE[:4] + bytes([1, 1, 1]) + bytes(13), "too few"),
        (DENSE[:4] + bytes([62]) + DENSE[5:], "out of range"),
    ],
)
def test_damaged_sketch_bytes_are_refused_with_row_and_reason(data, why):
    whole = [sparse(65), None, DENSE]
    assert Sketches.decode(pa.array(whole), 4).encode().to_pylist() == whole
    with pytest.raises(CorruptFile, match=f"row 3 .*{why}"):
        Sketches.decode(pa.array([*whole, data, sparse(65)]), 4)


def test_a_sketch_of_a_newer_format_is_unsupported_and_not_reported_as_damage():
    with pytest.raises(UnsupportedFormat, match=r"wrote format 2; this is Cairn .*, which reads format 1"):
        Sketches.decode(pa.array([sparse(65, head=(2, 1, 4, 0))]), 4)


def test_a_sketch_of_another_precision_is_a_schema_error_and_not_damage():
    column = sketch_of(hash_values(pa.array([1, 2, 3])), 12).encode()
    with pytest.raises(StateSchemaError, match="precision 12, but the aggregate now asks for 14"):
        Sketches.decode(column, 14)
