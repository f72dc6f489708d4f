"""The aggregates: the fields of their state, and how rows change them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import BinaryType, BooleanType, DataType, DecimalType, DoubleType, LongType

from cairn.aggregates.column_types import MAX_DIGITS, numeric_type, scalar_type, sum_type
from cairn.aggregates.folds import (
    ARRIVAL,
    Parts,
    arrival_keys,
    arrivals_of,
    counts_of,
    decimal_means,
    double_total,
    nan_as_one,
    pick_values,
    running_sums,
    taken_rows,
    total_of,
)
from cairn.aggregates.groups import Column, Doubles, Groups
from cairn.numpy_columns import array_of, booleans, numbers, valid_rows, whole
from state_backend.formats.hyperloglog import Sketches, hash_values, precision_for

# Result of `Aggregate.step`: (new state fields of the aggregate, the aggregate's value for each key).
Step = tuple[Parts, pa.Array]


@dataclass(frozen=True, slots=True)
class Aggregate(ABC):
    """Definition of one aggregate: the fields of its state, and how rows change them.

    Attributes:
        column: Name of the aggregated input column. None aggregates whole rows.
    """

    column: str | None

    @abstractmethod
    def parts(self, of: Any) -> dict[str, DataType]:
        """Return the fields that this aggregate stores for each key.

        Args:
            of: Spark type of the aggregated column; None for whole rows.

        Returns:
            Spark type of each stored field, by the field's name.

        Raises:
            UnfitError: The aggregate can't be computed for this type.
        """

    @abstractmethod
    def result_type(self, of: Any) -> DataType:
        """Return the Spark type of the aggregate's value.

        Args:
            of: Spark type of the aggregated column, one that `parts` accepts; None for whole rows.
        """

    @abstractmethod
    def step(self, groups: Groups, old: Parts) -> Step:
        """Add the rows of a batch to the aggregate of each key.

        Args:
            groups: The rows of the batch, grouped by key.
            old: The fields that `parts` names, as stored before the batch: one element per key, null for a new key.

        Returns:
            (fields, values): the fields to store, by name, and the aggregate's values. All have one element per key.
        """

    def parts_to_merge(self, of: Any) -> dict[str, DataType]:
        """Return the fields that `merge` needs, by name: those of `parts`, and perhaps further ones.

        Args:
            of: Spark type of the aggregated column; None for whole rows.
        """
        return self.parts(of)

    @abstractmethod
    def merge(self, stored: Groups) -> Parts:
        """Merge the stored aggregates of each key, which cover different rows, to one aggregate for each key.

        Args:
            stored: The stored aggregates, one per row, grouped by key. Columns are the fields of `parts_to_merge`.

        Returns:
            The fields of the merged aggregates, by name, with one element per key.
        """

    def __str__(self) -> str:
        return f"{type(self).__name__}({'' if self.column is None else repr(self.column)})"


@dataclass(frozen=True, slots=True)
class _OfColumn(Aggregate, ABC):
    column: str

    def result_type(self, of: Any) -> DataType:
        found: DataType = of
        return found


@dataclass(frozen=True, slots=True)
class Count(Aggregate):
    """Number of rows, or with a column the number of its non-null values. The type is bigint; 0 without rows."""

    column: str | None = None

    def parts(self, of: Any) -> dict[str, DataType]:
        return {"count": LongType()}

    def result_type(self, of: Any) -> DataType:
        return LongType()

    def step(self, groups: Groups, old: Parts) -> Step:
        added = groups.lengths if self.column is None else groups.column(self.column).counts
        count = array_of(numbers(old["count"]) + added, pa.int64())
        return {"count": count}, count

    def merge(self, stored: Groups) -> Parts:
        return {"count": array_of(counts_of(stored), pa.int64())}


@dataclass(frozen=True, slots=True)
class Sum(_OfColumn):
    """Sum of a column's values.

    Integers give bigint. Float and double give double. decimal(p, s) gives decimal(min(38, p + 10), s). A sum that
    exceeds bigint or its decimal type raises `ProcessorError`.
    """

    def parts(self, of: Any) -> dict[str, DataType]:
        return {"sum": sum_type(of)}

    def result_type(self, of: Any) -> DataType:
        return sum_type(of)

    def step(self, groups: Groups, old: Parts) -> Step:
        column, before = groups.column(self.column), old["sum"]
        valid = valid_rows(before)
        valid = valid | (column.counts > 0)
        total = total_of(column, before, self.column, valid)
        return {"sum": total}, total

    def merge(self, stored: Groups) -> Parts:
        column = stored.column("sum")
        return {"sum": total_of(column, pa.nulls(stored.keys, column.array.type), self.column, column.counts > 0)}


@dataclass(frozen=True, slots=True)
class Mean(_OfColumn):
    """Mean of a column's values, as Spark's `avg` computes it.

    Numbers give double. decimal(p, s) gives decimal(min(38, p + 4), min(38, s + 4)), rounded half up.
    """

    def parts(self, of: Any) -> dict[str, DataType]:
        return {
            "count": LongType(),
            "sum": sum_type(of) if isinstance(of, DecimalType) else numeric_type(of, DoubleType()),
        }

    def result_type(self, of: Any) -> DataType:
        if isinstance(of, DecimalType):
            return DecimalType(min(MAX_DIGITS, of.precision + 4), min(MAX_DIGITS, of.scale + 4))
        return DoubleType()

    def step(self, groups: Groups, old: Parts) -> Step:
        column = groups.column(self.column)
        count = numbers(old["count"]) + column.counts
        some = count > 0
        if pa.types.is_decimal(column.array.type):
            total = total_of(column, old["sum"], self.column, np.ones(groups.keys, np.bool_))
            mean = decimal_means(column, total, count, self.column)
        else:
            sums = double_total(column, old["sum"])
            total = array_of(sums, pa.float64())
            mean = array_of(nan_as_one(sums / np.maximum(count, 1)), pa.float64(), some)
        return {"count": array_of(count, pa.int64()), "sum": total}, mean

    def merge(self, stored: Groups) -> Parts:
        column = stored.column("sum")
        nothing, every = pa.nulls(stored.keys, column.array.type), np.ones(stored.keys, np.bool_)
        return {
            "count": array_of(counts_of(stored), pa.int64()),
            "sum": total_of(column, nothing, self.column, every),
        }


@dataclass(frozen=True, slots=True)
class Variance(_OfColumn):
    """Variance of the sample, as Spark's `var_samp` computes it.

    The type is double. The result is null for fewer than two values, and NaN if a value is not finite.

    The state sums differences to the key's first value. So equal values have a variance of exactly 0, and large values
    lose no digits. The formula is as stable as Welford's. Everything except the running sums is computed for many rows
    at a time.

    Source: Youngs and Cramer's updating formula, in Chan, Golub and LeVeque, "Algorithms for computing the sample
    variance" (1983).
    """

    def parts(self, of: Any) -> dict[str, DataType]:
        """Return the four stored fields `count`, `origin`, `sum` and `squares`.

        `count` is the number of the key's values, and `origin` its first value. `sum` is the sum of the differences
        between the values and `origin`. `squares` is the sum of the squared differences between values and mean.
        """
        double = numeric_type(of, DoubleType())
        return {"count": LongType(), "origin": double, "sum": double, "squares": double}

    def result_type(self, of: Any) -> DataType:
        return DoubleType()

    def step(self, groups: Groups, old: Parts) -> Step:
        column = groups.column(self.column)
        present, added = column.present, column.counts
        count, origin, total, squares = (numbers(old[part]).copy() for part in ("count", "origin", "sum", "squares"))
        with np.errstate(all="ignore"):
            origin[present] = np.where(count[present] > 0, origin[present], column.doubles[column.starts])
            values = column.doubles - origin[column.owners]
            running = running_sums(values, total[present], column.starts, added[present])
            # For each value, n is its number among its key's values: 1 for the key's first value.
            n = np.arange(1, len(values) + 1) + (count - np.cumsum(added) + added)[column.owners].astype(np.float64)
            np.add.at(squares, column.owners, np.where(n > 1, (n * values - running) ** 2 / (n * (n - 1)), 0.0))
            total[present] = running[column.starts + added[present] - 1]
            count += added
            variance = np.where(np.isfinite(total), squares / np.maximum(count - 1, 1), np.nan)
        doubles = {"origin": origin, "sum": total, "squares": squares}
        state = {part: array_of(nan_as_one(values), pa.float64()) for part, values in doubles.items()}
        state["count"] = array_of(count, pa.int64())
        return state, array_of(self._of_variance(nan_as_one(variance)), pa.float64(), count > 1)

    def merge(self, stored: Groups) -> Parts:
        """Merge the stored variances of each key to one: `count`, `origin`, `sum` and `squares` of all their values.

        Source: Chan, Golub and LeVeque's formula for two samples, applied to all stored variances of a key at once.
        """
        count, origin, total, squares = (
            numbers(whole(stored.batch.rows[part])) for part in ("count", "origin", "sum", "squares")
        )
        some = np.flatnonzero(count > 0)
        owners = stored.key_of_row[some]
        firsts = np.flatnonzero(np.diff(owners, prepend=-1))
        new_origin = np.zeros(stored.keys)
        new_origin[owners[firsts]] = origin[some[firsts]]
        sums, new_squares, counts = np.zeros(stored.keys), np.zeros(stored.keys), counts_of(stored)
        with np.errstate(all="ignore"):
            moved = total[some] + count[some] * (origin[some] - new_origin[owners])
            np.add.at(sums, owners, moved)
            between = moved / count[some] - (sums / np.maximum(counts, 1))[owners]
            np.add.at(new_squares, owners, squares[some] + count[some] * between**2)
        doubles = {"origin": new_origin, "sum": sums, "squares": new_squares}
        state = {part: array_of(nan_as_one(values), pa.float64()) for part, values in doubles.items()}
        return {"count": array_of(counts, pa.int64()), **state}

    def _of_variance(self, variance: Doubles) -> Doubles:
        return variance


@dataclass(frozen=True, slots=True)
class StdDev(Variance):
    """Standard deviation of the sample: the square root of `Variance`, as Spark's `stddev_samp` computes it."""

    def _of_variance(self, variance: Doubles) -> Doubles:
        return np.sqrt(variance)


@dataclass(frozen=True, slots=True)
class _Extreme(_OfColumn, ABC):
    """Base class of `Min` and `Max`."""

    # "min" or "max": the name of the state's only field, and of the aggregation in Arrow's `group_by`.
    _part: ClassVar[str]
    _fold: ClassVar[np.ufunc]  # NumPy's function for two values, such as `np.fmin`.
    _of_two: ClassVar[Any]  # The same for Arrow arrays.

    def parts(self, of: Any) -> dict[str, DataType]:
        return {self._part: scalar_type(of, "values of this type can't be ordered here")}

    def step(self, groups: Groups, old: Parts) -> Step:
        column, before = groups.column(self.column), old[self._part]
        if pa.types.is_decimal(before.type) or not pa.types.is_primitive(before.type):
            new = self._by_arrow(column, before)
        else:
            new = self._by_numpy(column, before)
        return {self._part: new}, new

    def merge(self, stored: Groups) -> Parts:
        nothing = pa.nulls(stored.keys, stored.column(self._part).array.type)
        return type(self)(self._part).step(stored, {self._part: nothing})[0]

    def _by_numpy(self, column: Column, before: pa.Array) -> pa.Array:
        fold, present = self._fold, column.present
        values = column.values
        if pa.types.is_floating(before.type):
            values = nan_as_one(values + values.dtype.type(0))  # Adding 0 turns -0.0 into 0.0.
        new = column.reduce(fold, values)
        valid, extremes = valid_rows(before), numbers(before).copy()
        extremes[present] = np.where(valid[present], fold(extremes[present], new), new)
        return array_of(extremes, before.type, valid | (column.counts > 0))

    def _by_arrow(self, column: Column, before: pa.Array) -> pa.Array:
        new = column.array
        if not len(new):
            return before
        if len(new) > column.groups.keys:
            rows = pa.table({"key": column.groups.key_of_row, "value": new})
            new = rows.group_by("key", use_threads=False).aggregate([("value", self._part)])[f"value_{self._part}"]
            new = whole(new)
        return self._of_two(before, new.cast(before.type))


@dataclass(frozen=True, slots=True)
class Min(_Extreme):
    """Smallest value of a column, in the column's type.

    The order is Spark's: NaN is above all numbers, strings compare by their UTF-8 bytes, and false is below true. The
    result is never -0.0: -0.0 becomes 0.0. Columns of arrays, maps, structs or collated strings raise `UsageError` when
    the interval is planned.
    """

    _part = "min"
    # `fmin` ignores a NaN if the other value is a number, so NaN counts as larger than all numbers.
    _fold = np.fmin
    _of_two = staticmethod(pc.min_element_wise)


@dataclass(frozen=True, slots=True)
class Max(_Extreme):
    """Largest value of a column, in the column's type.

    The order is Spark's: NaN is above all numbers, strings compare by their UTF-8 bytes, and false is below true. Nulls
    do not count. The result is never -0.0: -0.0 becomes 0.0.
    """

    _part = "max"
    _fold = np.maximum
    _of_two = staticmethod(pc.max_element_wise)


@dataclass(frozen=True, slots=True)
class OfOneRow(_OfColumn, ABC):
    """Base class of `First` and `Last`, whose value is the column's value in one chosen row."""

    ignore_nulls: bool = False

    def parts_to_merge(self, of: Any) -> dict[str, DataType]:
        """Return the fields of `parts`, and `interval_ms` and `number`, which say when the value's row arrived."""
        return {**self.parts(of), **ARRIVAL}


@dataclass(frozen=True, slots=True)
class First(OfOneRow):
    """Value of the key's first row, even if this value is null. Any type that state can hold is allowed.

    Rows of an earlier interval come first. Within an interval, the pipeline's `order_by` decides.

    Attributes:
        ignore_nulls: True takes the first value that is not null.
    """

    def parts(self, of: Any) -> dict[str, DataType]:
        """Return the fields that the state stores for each key: `first` and, without `ignore_nulls`, `seen`.

        `first` is the key's first value. `seen` is true once the key has had a row: a null in `first` can then be told
        apart from a key without rows. With `ignore_nulls`, the first value is never null, so `seen` is not needed.
        """
        return {"first": of} if self.ignore_nulls else {"first": of, "seen": BooleanType()}

    def step(self, groups: Groups, old: Parts) -> Step:
        column, before = groups.column(self.column), old["first"]
        if self.ignore_nulls:
            keys, rows = column.present, column.rows[column.starts]
            seen = valid_rows(before)
        else:
            keys, rows = groups.some, groups.starts[groups.some]
            seen = booleans(old["seen"])
        places = np.arange(groups.keys)
        places[keys] = np.where(seen[keys], places[keys], groups.keys + np.arange(len(rows)))
        new = pick_values(before, column.array, rows, places)
        state = {"first": new, "seen": pa.array(np.ones(groups.keys, np.bool_))}
        return {**state, **arrivals_of(groups, old, keys, rows, ~seen[keys])}, new

    def merge(self, stored: Groups) -> Parts:
        rows = stored.batch.rows
        seen = valid_rows(whole(rows["first"])) if self.ignore_nulls else booleans(rows["seen"])
        chosen = np.lexsort((*arrival_keys(rows), ~seen, stored.key_of_row))[stored.starts]
        return taken_rows(rows, chosen)


@dataclass(frozen=True, slots=True)
class Last(OfOneRow):
    """Value of the key's last row so far, even if this value is null.

    The rows have the same order as for `First`, and the same types are allowed.

    Attributes:
        ignore_nulls: True takes the last value that is not null.
    """

    def parts(self, of: Any) -> dict[str, DataType]:
        return {"last": of}

    def step(self, groups: Groups, old: Parts) -> Step:
        column = groups.column(self.column)
        if self.ignore_nulls:
            keys, rows = column.present, column.rows[column.starts + column.counts[column.present] - 1]
        else:
            keys, rows = groups.some, (groups.starts + groups.lengths - 1)[groups.some]
        places = np.arange(groups.keys)
        places[keys] = groups.keys + np.arange(len(rows))
        new = pick_values(old["last"], column.array, rows, places)
        return {"last": new, **arrivals_of(groups, old, keys, rows, np.ones(len(rows), np.bool_))}, new

    def merge(self, stored: Groups) -> Parts:
        rows = stored.batch.rows
        counts = valid_rows(whole(rows["last"])) if self.ignore_nulls else np.ones(rows.num_rows, np.bool_)
        chosen = np.lexsort((*arrival_keys(rows), counts, stored.key_of_row))[stored.starts + stored.lengths - 1]
        return taken_rows(rows, chosen)


@dataclass(frozen=True, slots=True)
class ApproxDistinct(_OfColumn):
    """Approximate number of different values, as bigint. Nulls do not count.

    The state is a HyperLogLog sketch. It starts with 4 bytes per value and grows to about (1.04 / relative_error)^2
    bytes, rounded up to a power of two.

    Attributes:
        relative_error: Upper limit of the standard error: at least 0.00204 and below 1. The default 0.02 takes up to 4
            KiB per key.
    """

    relative_error: float = 0.02

    def __post_init__(self) -> None:
        precision_for(self.relative_error)

    def parts(self, of: Any) -> dict[str, DataType]:
        scalar_type(of, "values of this type can't be compared by their bytes")
        return {"sketch": BinaryType()}

    def result_type(self, of: Any) -> DataType:
        return LongType()

    def step(self, groups: Groups, old: Parts) -> Step:
        column = groups.column(self.column)
        before = Sketches.decode(old["sketch"], precision_for(self.relative_error))
        sketches = before.add(column.owners, hash_values(column.array.drop_null()))
        estimates = np.rint(sketches.estimate()).astype(np.int64)
        return {"sketch": sketches.encode()}, array_of(estimates, pa.int64())

    def merge(self, stored: Groups) -> Parts:
        sketches = Sketches.decode(whole(stored.batch.rows["sketch"]), precision_for(self.relative_error))
        return {"sketch": sketches.united(stored.key_of_row, stored.keys).encode()}
