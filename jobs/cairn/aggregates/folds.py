"""Totals, means and choices of the values of each key: the arithmetic of the aggregates."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import ROUND_HALF_UP, Context, Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import DataType, LongType

from cairn.aggregates.column_types import MAX_DIGITS
from cairn.aggregates.groups import Column, Doubles, Groups, key_text
from cairn.numpy_columns import Array, Bools, Int64s, array_of, numbers, whole
from state_backend.values.errors import ProcessorError

# `running_sums` works in rounds: each round adds one value of every key with NumPy. After 32 rounds, or when at most
# 16 keys have values left, it adds the remaining values key by key, because a round over few keys is slower.
_ROUNDS = 32
_FEW_KEYS = 16
ARRIVAL: dict[str, DataType] = {"interval_ms": LongType(), "number": LongType()}

# The state fields of one aggregate, by name. Each array has one element per key.
Parts = Mapping[str, pa.Array]


def total_of(column: Column, before: pa.Array, name: str, valid: Bools) -> pa.Array:
    """Return each key's sum: the stored one (`before`) plus the batch's values. `valid`: False makes it null."""
    if pa.types.is_floating(before.type):
        return array_of(double_total(column, before), before.type, valid)
    add = _decimal_total if pa.types.is_decimal(before.type) else _long_total
    total, overflows = add(column, before)
    if overflows.any():
        raise _overflow("sum", name, before.type, column, overflows)
    return array_of(total, before.type, valid)


def double_total(column: Column, before: pa.Array) -> Doubles:
    """Return each key's sum: the stored one (`before`), plus the batch's values one by one, from left to right."""
    total = numbers(before).astype(np.float64)
    with np.errstate(all="ignore"):
        np.add.at(total, column.owners, column.doubles)
    return nan_as_one(total)


def _long_total(column: Column, before: pa.Array) -> tuple[Int64s, Bools]:
    """Return (sums, overflows): the new sum of each key, and True where it does not fit 64 bits. `before`: Stored sums.

    The upper and lower 32 bits are summed separately, so that neither sum can overflow. Only the final sum must fit 64
    bits: a partial sum may exceed them.
    """
    low_bits = np.int64(0xFFFFFFFF)
    old, values = numbers(before), column.values.astype(np.int64)
    high, low = old >> 32, old & low_bits
    high[column.present] += column.reduce(np.add, values >> 32)
    low[column.present] += column.reduce(np.add, values & low_bits)
    high += low >> 32
    return high << 32 | low & low_bits, (high < -(1 << 31)) | (high >= 1 << 31)


def _decimal_total(column: Column, before: pa.Array) -> tuple[Array, Bools]:
    """Return (sums, overflows): the new decimal sum of each key, and True where it exceeds the precision.

    A sum has four 32-bit limbs. Each limb is summed in its own int64, so that none overflows. Carries are added last.
    """
    total = numbers(before)
    total[column.present] += column.reduce(np.add, column.values)
    for lower, upper in ((0, 1), (1, 2), (2, 3)):
        total[:, upper] += total[:, lower] >> 32
        total[:, lower] &= 0xFFFFFFFF
    bound = 10**before.type.precision
    above, below = _less(total, _limbs(bound)), _less(_limbs(-bound), total)
    return (total & 0xFFFFFFFF).astype("<u4"), ~(above & below)


def _limbs(value: int) -> Int64s:
    return np.array([[value >> shift & 0xFFFFFFFF for shift in (0, 32, 64)] + [value >> 96]])


def _less(left: Int64s, right: Int64s) -> Bools:
    less = np.zeros(max(len(left), len(right)), np.bool_)
    for limb in range(4):
        less = (left[:, limb] < right[:, limb]) | ((left[:, limb] == right[:, limb]) & less)
    return less


def decimal_means(column: Column, totals: pa.Array, counts: Int64s, name: str) -> pa.Array:
    """Return the mean of each key, `totals` / `counts`, rounded half up to four more decimals; null for no values."""
    of = column.array.type
    result = pa.decimal128(min(MAX_DIGITS, of.precision + 4), min(MAX_DIGITS, of.scale + 4))
    wide, step = Context(prec=2 * MAX_DIGITS, rounding=ROUND_HALF_UP), Decimal(1).scaleb(-result.scale)
    means = [
        None if total is None else wide.quantize(wide.divide(total, Decimal(count)), step)
        for total, count in zip(pc.if_else(counts > 0, totals, None).to_pylist(), counts.tolist(), strict=True)
    ]
    try:
        return pa.array(means, result)
    except pa.ArrowInvalid:
        bound = Decimal(10) ** (result.precision - result.scale)
        raise _overflow(
            "mean", name, result, column, [mean is not None and abs(mean) >= bound for mean in means]
        ) from None


def _overflow(what: str, name: str, of: pa.DataType, column: Column, overflows: npt.ArrayLike) -> ProcessorError:
    return ProcessorError(
        f"the {what} of column {name!r} does not fit {of} at key {key_text(column.groups.batch, np.argmax(overflows))}; "
        "in the source, cast the column to double, or to a decimal with more digits before the point"
    )


def running_sums(values: Doubles, before: Doubles, starts: Int64s, lengths: Int64s) -> Doubles:
    """Return the running sums of `values` for each key: the key's `before`, plus its values up to and with this one."""
    running = values.copy()
    running[starts] += before
    at, left = starts, lengths
    for _ in range(_ROUNDS):
        more = left > 1
        at, left = at[more], left[more]
        if len(at) <= _FEW_KEYS:
            break
        running[at + 1] += running[at]
        at, left = at + 1, left - 1
    for start, length in zip(at.tolist(), left.tolist(), strict=True):
        np.add.accumulate(running[start : start + length], out=running[start : start + length])
    return running


def nan_as_one(values: Array) -> Array:
    """Replace every NaN by one NaN with fixed bits.

    CPUs of different makers compute NaNs with different bits, and equal states must have equal bytes and digests.
    """
    return np.where(np.isnan(values), values.dtype.type(np.nan), values)


def counts_of(stored: Groups) -> Int64s:
    counts: Int64s = np.add.reduceat(numbers(whole(stored.batch.rows["count"])), stored.starts)
    return counts


def arrivals_of(groups: Groups, old: Parts, keys: Any, rows: Int64s, replaced: Bools) -> Parts:
    """Return the new fields `ARRIVAL`: when the row arrived whose value each key has. Empty if the state lacks them."""
    if groups.arrivals is None:
        return {part: old[part] for part in ARRIVAL if part in old}
    interval_ms, number = (numbers(old[part]).copy() for part in ARRIVAL)
    at = np.arange(groups.keys)[keys][replaced]
    interval_ms[at] = groups.arrivals.interval_ms
    number[at] = groups.arrivals.numbers[rows[replaced]]
    return {"interval_ms": array_of(interval_ms, pa.int64()), "number": array_of(number, pa.int64())}


def arrival_keys(rows: pa.Table) -> tuple[Int64s, Int64s]:
    """Return (numbers, interval ends) of the arrivals in `rows`: keys for `np.lexsort`, whose last key counts most."""
    return numbers(whole(rows["number"])), numbers(whole(rows["interval_ms"]))


def taken_rows(rows: pa.Table, chosen: Int64s) -> Parts:
    taken = rows.take(pa.array(chosen))
    return {name: whole(taken[name]) for name in taken.column_names}


def pick_values(before: pa.Array, array: pa.Array, rows: Int64s, places: Int64s) -> pa.Array:
    """Return for each key the element at `places` in `before`, the stored values, followed by `array` at `rows`."""
    new = array.take(pa.array(rows)).cast(before.type)
    return pa.concat_arrays([before, new]).take(pa.array(places))
