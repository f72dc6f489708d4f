"""Spark SQL's `xxhash64` in Python. Python and SQL must compute the same key group for a key.

    seed 42; columns left to right, each hash seeding the next; a null leaves the hash unchanged
    boolean (as 0 or 1), byte, short, integer, date   4 bytes, little-endian
    long, timestamp, timestamp_ntz                    8 bytes, little-endian
    float, double                                     IEEE bits, 4 or 8 bytes; -0.0 as 0.0, every NaN as one NaN
    decimal up to 18 digits                           unscaled, 8 bytes
    wider decimal                                     unscaled, shortest big-endian two's complement
    string, binary                                    the bytes
    struct, array                                     their fields or items, hashed like columns

Source: Spark's hash.scala (HashExpression, XxHash64) and XXH64.java.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import xxhash

from state_backend.formats.key_codec import check_key_schema
from state_backend.formats.row_codec import encode_big_integer
from state_backend.formats.types import (
    INTEGER_BITS,
    MAX_LONG_DIGITS,
    ArrayType,
    AtomicType,
    DataType,
    DecimalType,
    Misfit,
    StructType,
    row_to_physical,
)
from state_backend.values.errors import InvariantViolated, StateTypeError

SEED = 42
Fold = Callable[[Any, int], int]
_digest = xxhash.xxh64_intdigest


@lru_cache(maxsize=64)
def key_hasher(key_schema: StructType) -> Callable[[Any], int]:
    """Return Spark's `xxhash64(key columns)` as a function of the key's values. It raises the errors of `KeyCodec`."""
    check_key_schema(key_schema)
    to_physical, fold = row_to_physical(key_schema), fold_struct(key_schema)

    def hash_key(values: Any) -> int:
        try:
            unsigned = fold(to_physical(values), SEED)
        except Misfit as misfit:
            raise StateTypeError(misfit.message("key", "column")) from None
        return unsigned - (1 << 64) if unsigned >> 63 else unsigned

    return hash_key


def key_group(values: Any, key_schema: StructType, max_parallelism: int) -> int:
    """Return the key group of a key: `pmod(xxhash64(key columns), max_parallelism)`."""
    return key_hasher(key_schema)(values) % max_parallelism


def _fold(data_type: DataType) -> Fold:
    """Return a function (non-null physical value, hash of the columns before) -> hash. Both hashes are unsigned."""
    match data_type:
        case AtomicType("string" | "binary"):
            return _digest
        case AtomicType("float"):
            return _fold_float("<f")
        case AtomicType("double"):
            return _fold_float("<d")
        case AtomicType(name):
            wide = name.startswith("timestamp") or INTEGER_BITS.get(name) == 64
            return _fold_packed("<q" if wide else "<i")
        case DecimalType() if data_type.precision <= MAX_LONG_DIGITS:
            return _fold_packed("<q")
        case DecimalType():
            return lambda value, seed: _digest(encode_big_integer(value), seed)
        case StructType():
            return fold_struct(data_type)
        case ArrayType():
            return _fold_array(_fold(data_type.element))
    raise InvariantViolated(f"{data_type} can't be hashed; check_key_schema should have refused it")


def _fold_packed(form: str) -> Fold:
    pack = struct.Struct(form).pack
    return lambda value, seed: _digest(pack(value), seed)


def _fold_float(form: str) -> Fold:
    pack = struct.Struct(form).pack
    negative_zero, zero, nan = pack(-0.0), pack(0.0), pack(abs(float("nan")))

    def fold(value: float, seed: int) -> int:
        raw = nan if value != value else pack(value)  # noqa: PLR0124
        return _digest(zero if raw == negative_zero else raw, seed)

    return fold


def fold_struct(schema: StructType) -> Fold:
    folds = [_fold(f.type) for f in schema.fields]

    def fold(values: Any, seed: int) -> int:
        for value, fold_one in zip(values, folds):  # noqa: B905
            if value is not None:
                seed = fold_one(value, seed)
        return seed

    return fold


def _fold_array(fold_item: Fold) -> Fold:
    def fold(items: Any, seed: int) -> int:
        for item in items:
            if item is not None:
                seed = fold_item(item, seed)
        return seed

    return fold
