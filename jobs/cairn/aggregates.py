"""A ready-made processor that keeps running aggregates per key.

It outputs a row for each key that has rows in the interval. The aggregates cover all intervals so far.

    class DelayTotals(RunningAggregate):
        flights = Count()
        delay = Sum("arr_delay")
        worst = Max("arr_delay")
        mean = Mean("arr_delay")
        last_dest = Last("dest")
        carriers = ApproxDistinct("carrier", relative_error=0.02)

Nulls are ignored as in SQL: a sum, minimum, maximum or mean of no values is null.

Doubles are added one by one in the order of the rows, never as partial sums. So the boundaries of batches and intervals
do not change even the last bit of a result.

The state is one value state `aggregates` with the fields `<aggregate>_<part>`. An aggregate that is declared later
starts empty and leaves the other aggregates as they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_HALF_UP, Context, Decimal
from functools import cached_property
from numbers import Integral
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from cairn.arrow_processor import ArrowProcessor, BatchResult, KeyedBatch, with_keys
from cairn.numpy_columns import Array, Bools, Int64s, array_of, numbers, valid_rows, whole
from state_backend.formats.hyperloglog import Sketches, hash_values, precision_for
from state_backend.formats.recorded_settings import SETTINGS
from state_backend.state.layout import MAX_TIME_MS
from state_backend.state.plan_state_schemas import MADE_WITH
from state_backend.values.errors import InvariantViolated, ProcessorError, UsageError
from state_backend.values.frozen import frozen

__all__ = [
    "Aggregate",
    "ApproxDistinct",
    "Count",
    "First",
    "Last",
    "Max",
    "Mean",
    "Min",
    "RunningAggregate",
    "StdDev",
    "Sum",
    "Variance",
]

STATE = "aggregates"
MAX_DIGITS = 38
_INTEGERS = (ByteType, ShortType, IntegerType, LongType)
_FLOATS = (FloatType, DoubleType)
_SCALARS = (BooleanType, DateType, TimestampType, TimestampNTZType, BinaryType, StringType)
# `_running_sums` works in rounds: each round adds one value of every key with NumPy. After 32 rounds, or when at most
# 16 keys have values left, it adds the remaining values key by key, because a round over few keys is slower.
_ROUNDS = 32
_FEW_KEYS = 16
_ARRIVAL: dict[str, DataType] = {"interval_ms": LongType(), "number": LongType()}

Doubles = npt.NDArray[np.float64]
# The fields of one aggregate's state by name, each with one element per key.
Parts = Mapping[str, pa.Array]
# The new fields of one aggregate's state, and the aggregate's value for each key.
Step = tuple[Parts, pa.Array]


class RunningAggregate(ArrowProcessor):
    """Base class of processors whose class attributes are aggregates.

    A subclass declares its aggregates as class attributes. Aggregates of base classes come first.

    The output has one row for each key that has rows in the interval: the key columns, then each aggregate under its
    attribute's name, in the order of declaration.

    Attributes:
        ttl_ms: Time to live of a key's state in milliseconds. A key that has no rows for this time starts again with
            empty aggregates. None keeps the state forever.

    Example:
        class ClickTotals(RunningAggregate):
            clicks = Count()
            last_page = Last("page")
    """

    splits_keys = True
    _states_follow_settings = True
    ttl_ms: int | None = None
    # In the order of declaration. `vars(cls)` loses this order: a class that is pickled by value for a worker arrives
    # with its attributes sorted.
    declared_aggregates: Mapping[str, Aggregate] = {}

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Collect the aggregates that the new class declares or inherits."""
        super().__init_subclass__(**arguments)
        for name, value in vars(cls).items():
            if isinstance(value, Aggregate) and hasattr(RunningAggregate, name):
                raise UsageError(
                    f"{cls.__name__}.{name} = {value}: every processor already has an attribute {name!r}; choose another name"
                )
        cls.declared_aggregates = declared_in(cls)

    @classmethod
    def check_pipeline(cls, pipeline: Any) -> None:
        """Check the class attributes when a pipeline is declared.

        Args:
            pipeline: The `Pipeline`.

        Raises:
            UsageError: The class declares no aggregates, or `ttl_ms` has a wrong value or does not fit the pipeline.
        """
        check_declared(cls.__name__, cls.declared_aggregates)
        check_ttl(cls.__name__, cls.ttl_ms, pipeline)

    def _spell_columns(self, names: Sequence[str]) -> None:
        self.declared_aggregates = spelled_aggregates(self.declared_aggregates, names)

    def init(self, handle: Any) -> None:
        """Declare the value state `aggregates` with a field for each part of each aggregate.

        Args:
            handle: The handle that Cairn passes to each processor.

        Raises:
            UsageError: The class declares no aggregates, or an aggregate does not fit the input's columns.
        """
        fields = plan_fields(type(self).__name__, self.declared_aggregates, handle.input_schema, handle.key_schema)
        self._parts = {name: [part for part, _ in parts] for name, parts in fields.items()}
        handle.getValueState(STATE, StructType(state_fields(self.declared_aggregates, fields)), self.ttl_ms)

    def deriveOutputSchema(self, handle: Any) -> StructType:
        """Return the schema of the output: the key columns, then each aggregate.

        Args:
            handle: The handle that Cairn passes to each processor.

        Raises:
            UsageError: The class declares no aggregates, or an aggregate does not fit the input's columns.
        """
        plan_fields(type(self).__name__, self.declared_aggregates, handle.input_schema, handle.key_schema)
        return StructType([*nullable(handle.key_schema), *aggregate_fields(self.declared_aggregates, handle)])

    def handleBatch(self, batch: KeyedBatch) -> BatchResult:
        """Add the rows of a batch to the aggregates of their keys.

        Args:
            batch: The rows of many keys, and the state of these keys.

        Returns:
            The new state of every key, and one output row per key. A last key whose rows continue in the next batch has
            no output row yet.

        Raises:
            ProcessorError: A sum, or a mean of decimals, does not fit its type.
        """
        old, groups = batch.states[STATE], Groups(batch)
        new: dict[str, pa.Array] = {}
        output: dict[str, pa.Array] = {}
        for name, aggregate in self.declared_aggregates.items():
            parts = {part: whole(old[f"{name}_{part}"]) for part in self._parts[name]}
            changed, output[name] = aggregate.step(groups, parts)
            new.update((f"{name}_{part}", changed[part]) for part in parts)
        rows = with_keys(batch, pa.table(output))
        if batch.last_key_continues:
            rows = rows.slice(0, len(rows) - 1)
        return BatchResult(states={STATE: pa.table(new)}, output=rows)


def nullable(schema: StructType) -> list[StructField]:
    """Return the fields of a schema, all nullable and without metadata."""
    return [StructField(f.name, f.dataType) for f in schema.fields]


def spelled_name(name: str, names: Sequence[str]) -> str:
    """Return `name` as `names` spell it, in any upper and lower case. If `names` lack it, return it unchanged."""
    return name if name in names else next((own for own in names if own.lower() == name.lower()), name)


def spelled_aggregates(aggregates: Mapping[str, Aggregate], names: Sequence[str]) -> dict[str, Aggregate]:
    """Return the aggregates with their columns as the input spells them."""
    return {
        name: a if a.column is None else replace(a, column=spelled_name(a.column, names))
        for name, a in aggregates.items()
    }


def aggregate_fields(aggregates: Mapping[str, Aggregate], handle: Any) -> list[StructField]:
    """Return an output field for each aggregate."""
    types = {f.name: f.dataType for f in handle.input_schema.fields}
    return [StructField(name, a.result_type(types.get(a.column))) for name, a in aggregates.items()]


def state_fields(
    aggregates: Mapping[str, Aggregate], parts: Mapping[str, Sequence[tuple[str, DataType]]]
) -> list[StructField]:
    """Return a field of the state for each part of each aggregate.

    The field's metadata names the aggregate's input column and `ignore_nulls`. So Cairn refuses changed code that
    computes the same output column in another way.
    """
    return [
        StructField(f"{name}_{part}", of, metadata=_metadata(name, part, aggregates[name]))
        for name in parts
        for part, of in parts[name]
    ]


def _metadata(name: str, part: str, aggregate: Aggregate) -> dict[str, dict[str, str]]:
    made = f"{name} = {type(aggregate).__name__}({aggregate.column!r})"
    metadata = {MADE_WITH: {f"{name}_{part}": made}}
    if isinstance(aggregate, First | Last):
        metadata[SETTINGS] = {f"{name}_{part}.ignore_nulls": f"{made[:-1]}, ignore_nulls={aggregate.ignore_nulls})"}
    return metadata


def check_declared(owner: str, aggregates: Mapping[str, Aggregate]) -> None:
    """Raise `UsageError` if a processor of aggregates declares none."""
    if not aggregates:
        raise UsageError(f"{owner} declares no aggregates; give it class attributes such as flights = Count()")


def check_ttl(owner: str, ttl_ms: Any, pipeline: Any = None) -> None:
    """Check the setting `ttl_ms`."""
    if ttl_ms is None:
        return
    if isinstance(ttl_ms, bool) or not isinstance(ttl_ms, Integral) or not 0 < int(ttl_ms) <= MAX_TIME_MS:
        raise UsageError(
            f"{owner}.ttl_ms is {ttl_ms!r}; write a number of milliseconds above 0, as in ttl_ms = 86_400_000, or None"
        )
    if pipeline is not None and pipeline.time_mode != "processing":
        raise UsageError(
            f"pipeline {pipeline.name!r}: {owner}.ttl_ms needs time_mode='processing', but the pipeline has time_mode={pipeline.time_mode!r}"
        )


def plan_fields(
    owner: str,
    aggregates: Mapping[str, Aggregate],
    input_schema: StructType,
    key_schema: StructType,
    *,
    merged: bool = False,
) -> dict[str, list[tuple[str, DataType]]]:
    """Return the state fields of each aggregate: by aggregate name, the names and Spark types of its parts."""
    check_declared(owner, aggregates)
    types = {f.name: f.dataType for f in input_schema.fields}
    taken = {name.lower(): f"key column {name!r}" for name in key_schema.names}
    fields = {}
    for name, aggregate in aggregates.items():
        where = f"{owner}.{name} = {aggregate}"
        if name.lower() in taken:
            raise UsageError(f"{where}: {taken[name.lower()]} of the output has the same name; choose another name")
        taken[name.lower()] = f"aggregate {name!r}"
        column = aggregate.column
        if column is not None and column not in types:
            found = ", ".join(f"{known} {type_.simpleString()}" for known, type_ in types.items())
            raise UsageError(f"{where}: the input has no column {column!r}; its columns are {found}")
        of: Any = None if column is None else types[column]
        try:
            fields[name] = list((aggregate.parts_to_merge(of) if merged else aggregate.parts(of)).items())
        except _UnfitError as unfit:
            raise UsageError(f"{where}: column {column!r} is {of.simpleString()}, and {unfit}") from None
    return fields


def declared_in(of: type) -> dict[str, Aggregate]:
    """Return the aggregates that a class declares or inherits, those of base classes first."""
    found: dict[str, Any] = {}
    for cls in reversed(of.__mro__):
        found.update(vars(cls))
    return {name: value for name, value in found.items() if isinstance(value, Aggregate)}


class _UnfitError(Exception):
    """The reason why a column's type does not fit: completes the sentence "column 'x' is array<int>, and ..."."""


# --- the rows of a batch, by key --------------------------------------------------------------------------------------


@frozen
class Arrivals:
    """Order of arrival of the rows of a batch. Rows of an earlier interval come first."""

    # End of the interval, in milliseconds since the epoch.
    interval_ms: int
    numbers: Int64s


class Groups:
    """The rows of a batch, grouped by key.

    Every key has at least one row, or the batch has no rows at all. Without rows, `Aggregate.step` leaves the stored
    fields as they are, and returns the aggregates' values.
    """

    def __init__(self, batch: KeyedBatch, arrivals: Arrivals | None = None) -> None:
        self.batch = batch
        self.arrivals = arrivals
        self.keys: int = batch.keys.num_rows
        self.starts = batch.row_offsets[:-1]
        self.lengths = np.diff(batch.row_offsets)
        if batch.rows.num_rows and (self.lengths < 1).any():
            raise InvariantViolated(f"key {np.argmin(self.lengths)} of a batch of {self.keys} has no rows")
        self._columns: dict[str, _Column] = {}

    @property
    def some(self) -> slice:
        """All keys; without rows no key."""
        return slice(None if self.batch.rows.num_rows else 0)

    @cached_property
    def key_of_row(self) -> Int64s:
        every = np.arange(self.keys)
        return every if self.keys == self.batch.rows.num_rows else np.repeat(every, self.lengths)

    def column(self, name: str) -> _Column:
        """Return a column's values by key. Aggregates of the same column share one `_Column`."""
        if name not in self._columns:
            self._columns[name] = _Column(whole(self.batch.rows[name]), self)
        return self._columns[name]

    def key_text(self, at: np.intp) -> str:
        return ", ".join(
            f"{name}={value!r}" for name, value in self.batch.keys.slice(int(at), 1).to_pylist()[0].items()
        )


class _Column:
    """The non-null values of a column, grouped by key."""

    present: Int64s | slice

    def __init__(self, array: pa.Array, groups: Groups) -> None:
        self.array = array
        self.groups = groups
        if array.null_count or not len(array):
            self.rows = np.flatnonzero(valid_rows(array))
            self.owners = groups.key_of_row[self.rows]
            self.counts = np.bincount(self.owners, minlength=groups.keys)
            self.present = np.flatnonzero(self.counts)
            self.starts = (np.cumsum(self.counts) - self.counts)[self.present]
        else:
            self.rows = np.arange(len(array))
            self.owners, self.counts = groups.key_of_row, groups.lengths
            self.present, self.starts = slice(None), groups.starts

    @cached_property
    def values(self) -> Array:
        values = numbers(self.array)
        return values[self.rows] if self.array.null_count else values

    @cached_property
    def doubles(self) -> Doubles:
        """The column's non-null values as float64, for means and variances."""
        if pa.types.is_decimal(self.array.type):
            return np.asarray(self.array.drop_null().cast(pa.float64()).to_numpy())
        return self.values.astype(np.float64)

    def reduced(self, fold: np.ufunc, values: Array) -> Array:
        """Reduce the values of each key to one value. Keys without a non-null value are left out."""
        if len(values) == len(self.starts):
            return values
        folded: Array = fold.reduceat(values, self.starts, axis=0)
        return folded


# --- aggregates -------------------------------------------------------------------------------------------------------


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
            _UnfitError: The aggregate can't be computed for this type.
        """

    @abstractmethod
    def result_type(self, of: Any) -> DataType:
        """Return the Spark type of the aggregate's value.

        Args:
            of: Spark type of the aggregated column, for which `parts` raises no error; None for whole rows.
        """

    @abstractmethod
    def step(self, groups: Groups, old: Parts) -> Step:
        """Add the rows of a batch to the aggregate of each key.

        Args:
            groups: The rows of the batch, grouped by key.
            old: The fields that `parts` names, as stored before the batch: one element per key, null for a new key.

        Returns:
            The fields to store, and the aggregate's value. Both have one element per key.
        """

    def parts_to_merge(self, of: Any) -> dict[str, DataType]:
        """Return the fields that `merge` needs. They include the fields of `parts`.

        Args:
            of: Spark type of the aggregated column; None for whole rows.
        """
        return self.parts(of)

    @abstractmethod
    def merge(self, stored: Groups) -> Parts:
        """Merge several aggregates of disjoint sets of rows to one aggregate for each key.

        Args:
            stored: In place of rows, the stored aggregates of each key. The columns are the fields of `parts_to_merge`.

        Returns:
            The fields of the merged aggregates, with one element per key.
        """

    def __str__(self) -> str:
        return f"{type(self).__name__}({'' if self.column is None else repr(self.column)})"


@dataclass(frozen=True, slots=True)
class _OfColumn(Aggregate, ABC):
    column: str


@dataclass(frozen=True, slots=True)
class Count(Aggregate):
    """Number of rows, or with a column the number of its non-null values. The type is bigint; 0 without rows."""

    column: str | None = None

    def parts(self, of: Any) -> dict[str, DataType]:
        """Return the only stored field `count`: the number of rows or values so far.

        Args:
            of: Spark type of the counted column; None for whole rows. Every type is allowed.
        """
        return {"count": LongType()}

    def result_type(self, of: Any) -> DataType:
        """Return bigint."""
        return LongType()

    def step(self, groups: Groups, old: Parts) -> Step:
        """Add the number of the batch's rows to the stored number of each key.

        `Count()` counts all rows. `Count("column")` counts only rows in which this column is not null.

        Args:
            groups: The rows of the batch, grouped by key.
            old: The stored field `count`, with one number per key.

        Returns:
            The new field `count`, and the same numbers as the aggregate's value.
        """
        added = groups.lengths if self.column is None else groups.column(self.column).counts
        count = array_of(numbers(old["count"]) + added, pa.int64())
        return {"count": count}, count

    def merge(self, stored: Groups) -> Parts:
        """Return the sums of the numbers."""
        return {"count": array_of(_counts_of(stored), pa.int64())}


@dataclass(frozen=True, slots=True)
class Sum(_OfColumn):
    """Sum of a column's values.

    Integers give bigint. Float and double give double. decimal(p, s) gives decimal(min(38, p + 10), s). A sum that
    exceeds bigint or its decimal type raises `ProcessorError`.
    """

    def parts(self, of: Any) -> dict[str, DataType]:
        """Return the only stored field `sum`. Its type is the type of the aggregate's value.

        Args:
            of: Spark type of the summed column.
        """
        return {"sum": _sum_type(of)}

    def result_type(self, of: Any) -> DataType:
        """Return bigint, double or a decimal, as the class says."""
        return _sum_type(of)

    def step(self, groups: Groups, old: Parts) -> Step:
        """Add the column's values in the batch to the stored sum of each key.

        Args:
            groups: The rows of the batch, grouped by key.
            old: The stored field `sum`, with one element per key.

        Returns:
            The new field `sum`, and the same sums as the aggregate's value.

        Raises:
            ProcessorError: A sum does not fit its type.
        """
        column, before = groups.column(self.column), old["sum"]
        valid = valid_rows(before)
        valid = valid | (column.counts > 0)
        total = _total(column, before, self.column, valid)
        return {"sum": total}, total

    def merge(self, stored: Groups) -> Parts:
        """Return the sums of the sums.

        Raises:
            ProcessorError: A sum does not fit its type.
        """
        column = stored.column("sum")
        return {"sum": _total(column, pa.nulls(stored.keys, column.array.type), self.column, column.counts > 0)}


@dataclass(frozen=True, slots=True)
class Mean(_OfColumn):
    """Mean of a column's values, as Spark's `avg` computes it.

    Numbers give double. decimal(p, s) gives decimal(min(38, p + 4), min(38, s + 4)), rounded half up.
    """

    def parts(self, of: Any) -> dict[str, DataType]:
        """Return the two stored fields: `count` and `sum` of the column's non-null values so far.

        Args:
            of: Spark type of the averaged column.
        """
        return {
            "count": LongType(),
            "sum": _sum_type(of) if isinstance(of, DecimalType) else _numeric(of, DoubleType()),
        }

    def result_type(self, of: Any) -> DataType:
        """Return double, or a decimal with four more digits."""
        if isinstance(of, DecimalType):
            return DecimalType(min(MAX_DIGITS, of.precision + 4), min(MAX_DIGITS, of.scale + 4))
        return DoubleType()

    def step(self, groups: Groups, old: Parts) -> Step:
        """Add the column's values in the batch to the stored count and sum of each key, and divide sum by count.

        Args:
            groups: The rows of the batch, grouped by key.
            old: The stored fields `count` and `sum`, with one element per key.

        Returns:
            The new fields `count` and `sum`, and the mean of each key.

        Raises:
            ProcessorError: A decimal sum or mean does not fit its type.
        """
        column = groups.column(self.column)
        count = numbers(old["count"]) + column.counts
        some = count > 0
        if pa.types.is_decimal(column.array.type):
            total = _total(column, old["sum"], self.column, np.ones(groups.keys, np.bool_))
            mean = _decimal_means(column, total, count, self.column)
        else:
            sums = _double_total(column, old["sum"])
            total = array_of(sums, pa.float64())
            mean = array_of(_nan_as_one(sums / np.maximum(count, 1)), pa.float64(), some)
        return {"count": array_of(count, pa.int64()), "sum": total}, mean

    def merge(self, stored: Groups) -> Parts:
        """Return the sums of the counts and of the sums.

        Raises:
            ProcessorError: A decimal sum does not fit its type.
        """
        column = stored.column("sum")
        nothing, every = pa.nulls(stored.keys, column.array.type), np.ones(stored.keys, np.bool_)
        return {
            "count": array_of(_counts_of(stored), pa.int64()),
            "sum": _total(column, nothing, self.column, every),
        }


@dataclass(frozen=True, slots=True)
class Variance(_OfColumn):
    """Variance of the sample, as Spark's `var_samp` computes it.

    The type is double. The result is null for fewer than two values, and NaN if a value is not finite.

    The state sums differences to the key's first value. So equal values have a variance of exactly 0, and large values
    lose no digits. The formula is as stable as Welford's, and all of it except the sums is computed for many rows at a
    time.

    Source: Youngs and Cramer's updating formula, in Chan, Golub and LeVeque, "Algorithms for computing the sample
    variance" (1983).
    """

    def parts(self, of: Any) -> dict[str, DataType]:
        """Return the four stored fields `count`, `origin`, `sum` and `squares`.

        `count` is the number of the key's values and `origin` the first value. `sum` is the sum of all differences to
        `origin`, and `squares` the sum of squared differences to the mean.

        Args:
            of: Spark type of the column.
        """
        double = _numeric(of, DoubleType())
        return {"count": LongType(), "origin": double, "sum": double, "squares": double}

    def result_type(self, of: Any) -> DataType:
        """Return double."""
        return DoubleType()

    def step(self, groups: Groups, old: Parts) -> Step:
        """Add the column's values in the batch to the stored fields, and compute the variance of each key.

        Args:
            groups: The rows of the batch, grouped by key.
            old: The stored fields that `parts` names, with one element per key.

        Returns:
            The new fields, and the variance of each key.
        """
        column = groups.column(self.column)
        present, added = column.present, column.counts
        count, origin, total, squares = (numbers(old[part]).copy() for part in ("count", "origin", "sum", "squares"))
        with np.errstate(all="ignore"):
            origin[present] = np.where(count[present] > 0, origin[present], column.doubles[column.starts])
            values = column.doubles - origin[column.owners]
            running = _running_sums(values, total[present], column.starts, added[present])
            # For each value, n is its number among its key's values: 1 for the key's first value.
            n = np.arange(1, len(values) + 1) + (count - np.cumsum(added) + added)[column.owners].astype(np.float64)
            np.add.at(squares, column.owners, np.where(n > 1, (n * values - running) ** 2 / (n * (n - 1)), 0.0))
            total[present] = running[column.starts + added[present] - 1]
            count += added
            variance = np.where(np.isfinite(total), squares / np.maximum(count - 1, 1), np.nan)
        doubles = {"origin": origin, "sum": total, "squares": squares}
        state = {part: array_of(_nan_as_one(values), pa.float64()) for part, values in doubles.items()}
        state["count"] = array_of(count, pa.int64())
        return state, array_of(self._of_variance(_nan_as_one(variance)), pa.float64(), count > 1)

    def merge(self, stored: Groups) -> Parts:
        """Return count, origin, sum and squares of the values of all aggregates of a key.

        Source: Chan, Golub and LeVeque's formula for two samples, over all aggregates of a key at once.
        """
        count, origin, total, squares = (
            numbers(whole(stored.batch.rows[part])) for part in ("count", "origin", "sum", "squares")
        )
        some = np.flatnonzero(count > 0)
        owners = stored.key_of_row[some]
        firsts = np.flatnonzero(np.diff(owners, prepend=-1))
        new_origin = np.zeros(stored.keys)
        new_origin[owners[firsts]] = origin[some[firsts]]
        sums, new_squares, counts = np.zeros(stored.keys), np.zeros(stored.keys), _counts_of(stored)
        with np.errstate(all="ignore"):
            moved = total[some] + count[some] * (origin[some] - new_origin[owners])
            np.add.at(sums, owners, moved)
            between = moved / count[some] - (sums / np.maximum(counts, 1))[owners]
            np.add.at(new_squares, owners, squares[some] + count[some] * between**2)
        doubles = {"origin": new_origin, "sum": sums, "squares": new_squares}
        state = {part: array_of(_nan_as_one(values), pa.float64()) for part, values in doubles.items()}
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

    def parts(self, of: Any) -> dict[str, DataType]:
        return {self._part: _scalar(of, "values of this type can't be ordered here")}

    def result_type(self, of: Any) -> DataType:
        found: DataType = of
        return found

    @property
    @abstractmethod
    def _part(self) -> str:
        """Name of the state's only field and of Arrow's aggregation: "min" or "max"."""

    @abstractmethod
    def _fold(self, of: pa.DataType) -> np.ufunc: ...

    @abstractmethod
    def _of_two(self, left: pa.Array, right: pa.Array) -> pa.Array: ...

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

    def _by_numpy(self, column: _Column, before: pa.Array) -> pa.Array:
        fold, present = self._fold(before.type), column.present
        values = column.values
        if pa.types.is_floating(before.type):
            values = _nan_as_one(values + values.dtype.type(0))  # Adding 0 turns -0.0 into 0.0.
        new = column.reduced(fold, values)
        valid, extremes = valid_rows(before), numbers(before).copy()
        extremes[present] = np.where(valid[present], fold(extremes[present], new), new)
        return array_of(extremes, before.type, valid | (column.counts > 0))

    def _by_arrow(self, column: _Column, before: pa.Array) -> pa.Array:
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

    @property
    def _part(self) -> str:
        return "min"

    def _fold(self, of: pa.DataType) -> np.ufunc:
        return np.fmin if pa.types.is_floating(of) else np.minimum

    def _of_two(self, left: pa.Array, right: pa.Array) -> pa.Array:
        return pc.min_element_wise(left, right)


@dataclass(frozen=True, slots=True)
class Max(_Extreme):
    """Largest value of a column, in the column's type.

    The order is Spark's: NaN is above all numbers, strings compare by their UTF-8 bytes, and false is below true. Nulls
    do not count. The result is never -0.0: -0.0 becomes 0.0.
    """

    @property
    def _part(self) -> str:
        return "max"

    def _fold(self, of: pa.DataType) -> np.ufunc:
        return np.maximum

    def _of_two(self, left: pa.Array, right: pa.Array) -> pa.Array:
        return pc.max_element_wise(left, right)


@dataclass(frozen=True, slots=True)
class First(_OfColumn):
    """Value of the key's first row, even if this value is null. Any type that state can hold is allowed.

    Rows of an earlier interval come first. Within an interval, the pipeline's `order_by` decides.

    Attributes:
        ignore_nulls: True takes the first value that is not null.
    """

    ignore_nulls: bool = False

    def parts(self, of: Any) -> dict[str, DataType]:
        """Return the fields that the state stores for each key: `first` and, without `ignore_nulls`, `seen`.

        `first` is the key's first value. `seen` is true once the key has had a row: a null in `first` can then be told
        apart from a key without rows. With `ignore_nulls`, the first value is never null, so `seen` is not needed.

        Args:
            of: Spark type of the aggregated column.
        """
        return {"first": of} if self.ignore_nulls else {"first": of, "seen": BooleanType()}

    def result_type(self, of: Any) -> DataType:
        """Return the type of the column."""
        found: DataType = of
        return found

    def step(self, groups: Groups, old: Parts) -> Step:
        """Keep the stored first value of a key. A key without one gets its first value in the batch.

        Args:
            groups: The rows of the batch, grouped by key.
            old: The stored fields that `parts` names, with one element per key.

        Returns:
            The new fields, and the first value of each key.
        """
        column, before = groups.column(self.column), old["first"]
        if self.ignore_nulls:
            keys, rows = column.present, column.rows[column.starts]
            seen = valid_rows(before)
        else:
            keys, rows = groups.some, groups.starts[groups.some]
            seen = numbers(old["seen"]).astype(np.bool_)
        places = np.arange(groups.keys)
        places[keys] = np.where(seen[keys], places[keys], groups.keys + np.arange(len(rows)))
        new = _picked(before, column.array, rows, places)
        state = {"first": new, "seen": pa.array(np.ones(groups.keys, np.bool_))}
        return {**state, **_arrivals_of(groups, old, keys, rows, ~seen[keys])}, new

    def parts_to_merge(self, of: Any) -> dict[str, DataType]:
        """Return the fields of `parts`, and the arrival of the value's row: `interval_ms` and `number`."""
        return {**self.parts(of), **_ARRIVAL}

    def merge(self, stored: Groups) -> Parts:
        """Return the value whose row came first."""
        rows = stored.batch.rows
        seen = valid_rows(whole(rows["first"])) if self.ignore_nulls else numbers(whole(rows["seen"])).astype(np.bool_)
        chosen = np.lexsort((*_arrived(rows), ~seen, stored.key_of_row))[stored.starts]
        return _taken(rows, chosen)


@dataclass(frozen=True, slots=True)
class Last(_OfColumn):
    """Value of the key's last row so far, even if this value is null.

    The rows have the same order as for `First`, and the same types are allowed.

    Attributes:
        ignore_nulls: True takes the last value that is not null.
    """

    ignore_nulls: bool = False

    def parts(self, of: Any) -> dict[str, DataType]:
        """Return the only stored field `last`: the key's last value so far.

        Args:
            of: Spark type of the column.
        """
        return {"last": of}

    def result_type(self, of: Any) -> DataType:
        """Return the type of the column."""
        found: DataType = of
        return found

    def step(self, groups: Groups, old: Parts) -> Step:
        """Replace the stored value of each key by its last value in the batch.

        Args:
            groups: The rows of the batch, grouped by key.
            old: The stored field `last`, with one element per key.

        Returns:
            The new field `last`, and the same values as the aggregate's value.
        """
        column = groups.column(self.column)
        if self.ignore_nulls:
            keys, rows = column.present, column.rows[column.starts + column.counts[column.present] - 1]
        else:
            keys, rows = groups.some, (groups.starts + groups.lengths - 1)[groups.some]
        places = np.arange(groups.keys)
        places[keys] = groups.keys + np.arange(len(rows))
        new = _picked(old["last"], column.array, rows, places)
        return {"last": new, **_arrivals_of(groups, old, keys, rows, np.ones(len(rows), np.bool_))}, new

    def parts_to_merge(self, of: Any) -> dict[str, DataType]:
        """Return the fields of `parts`, and the arrival of the value's row: `interval_ms` and `number`."""
        return {**self.parts(of), **_ARRIVAL}

    def merge(self, stored: Groups) -> Parts:
        """Return the value whose row came last."""
        rows = stored.batch.rows
        counts = valid_rows(whole(rows["last"])) if self.ignore_nulls else np.ones(rows.num_rows, np.bool_)
        chosen = np.lexsort((*_arrived(rows), counts, stored.key_of_row))[stored.starts + stored.lengths - 1]
        return _taken(rows, chosen)


@dataclass(frozen=True, slots=True)
class ApproxDistinct(_OfColumn):
    """Approximate number of different values, as bigint. Nulls do not count.

    The state is a HyperLogLog sketch. It starts with 4 bytes per value and grows to about (1.04 / relative_error)^2
    bytes, rounded up to a power of two.

    Attributes:
        relative_error: Upper limit of the standard error: at least 0.00204 and below 1. The default 0.02 takes up to 4 KiB
            per key.
    """

    relative_error: float = 0.02

    def __post_init__(self) -> None:
        precision_for(self.relative_error)

    def parts(self, of: Any) -> dict[str, DataType]:
        """Return the only stored field `sketch`: a HyperLogLog sketch of the key's values, as bytes.

        Args:
            of: Spark type of the column.
        """
        _scalar(of, "values of this type can't be compared by their bytes")
        return {"sketch": BinaryType()}

    def result_type(self, of: Any) -> DataType:
        """Return bigint."""
        return LongType()

    def step(self, groups: Groups, old: Parts) -> Step:
        """Add the hashes of the column's values in the batch to each key's sketch, and estimate the counts.

        Args:
            groups: The rows of the batch, grouped by key.
            old: The stored field `sketch`, with one sketch per key.

        Returns:
            The new field `sketch`, and the estimated number of different values of each key.
        """
        column = groups.column(self.column)
        before = Sketches.decode(old["sketch"], precision_for(self.relative_error))
        sketches = before.add(column.owners, hash_values(column.array.drop_null()))
        estimates = np.rint(sketches.estimate()).astype(np.int64)
        return {"sketch": sketches.encode()}, array_of(estimates, pa.int64())

    def merge(self, stored: Groups) -> Parts:
        """Return the sketches of the unions."""
        sketches = Sketches.decode(whole(stored.batch.rows["sketch"]), precision_for(self.relative_error))
        return {"sketch": sketches.united(stored.key_of_row, stored.keys).encode()}


# --- types they take --------------------------------------------------------------------------------------------------


def _numeric(of: Any, result: DataType) -> DataType:
    if not isinstance(of, (*_INTEGERS, *_FLOATS, DecimalType)):
        raise _UnfitError("only integers, float, double and decimal can be summed; cast it in the source")
    return result


def _sum_type(of: Any) -> DataType:
    if isinstance(of, DecimalType):
        return DecimalType(min(MAX_DIGITS, of.precision + 10), of.scale)
    return _numeric(of, DoubleType() if isinstance(of, _FLOATS) else LongType())


def is_scalar(of: Any) -> bool:
    """Return True for a type that ready-made processors can order: numbers, strings, binary, booleans, dates and timestamps.

    The caller checks the collation of a string type.
    """
    return isinstance(of, (*_INTEGERS, *_FLOATS, DecimalType, *_SCALARS))


def _scalar(of: Any, why: str) -> DataType:
    if isinstance(of, StringType) and not of.isUTF8BinaryCollation():
        raise _UnfitError(
            "its collation does not compare bytes; use plain string, in lower case if case does not matter"
        )
    if not is_scalar(of):
        raise _UnfitError(why)
    found: DataType = of
    return found


# --- folds ------------------------------------------------------------------------------------------------------------


def _total(column: _Column, before: pa.Array, name: str, valid: Bools) -> pa.Array:
    if pa.types.is_floating(before.type):
        return array_of(_double_total(column, before), before.type, valid)
    add = _decimal_total if pa.types.is_decimal(before.type) else _long_total
    total, overflows = add(column, before)
    if overflows.any():
        raise _overflow("sum", name, before.type, column, overflows)
    return array_of(total, before.type, valid)


def _double_total(column: _Column, before: pa.Array) -> Doubles:
    """Return each key's old sum plus its values, added one by one from left to right."""
    total = numbers(before).astype(np.float64)
    with np.errstate(all="ignore"):
        np.add.at(total, column.owners, column.doubles)
    return _nan_as_one(total)


def _long_total(column: _Column, before: pa.Array) -> tuple[Int64s, Bools]:
    """Return each key's new sum, and True for each key whose sum exceeds 64 bits.

    The upper and lower 32 bits are summed apart, so that these sums can't overflow. Only the final sum must fit 64
    bits: a partial sum may exceed them.
    """
    low_bits = np.int64(0xFFFFFFFF)
    old, values = numbers(before), column.values.astype(np.int64)
    high, low = old >> 32, old & low_bits
    high[column.present] += column.reduced(np.add, values >> 32)
    low[column.present] += column.reduced(np.add, values & low_bits)
    high += low >> 32
    return high << 32 | low & low_bits, (high < -(1 << 31)) | (high >= 1 << 31)


def _decimal_total(column: _Column, before: pa.Array) -> tuple[Array, Bools]:
    """Return each key's new decimal sum as four 32-bit limbs, and True for each key whose sum exceeds its precision.

    Each limb is summed in an int64 of its own, so that no sum overflows. The carries are added afterwards.
    """
    total = numbers(before)
    total[column.present] += column.reduced(np.add, column.values)
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


def _decimal_means(column: _Column, totals: pa.Array, counts: Int64s, name: str) -> pa.Array:
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


def _overflow(what: str, name: str, of: pa.DataType, column: _Column, overflows: npt.ArrayLike) -> ProcessorError:
    return ProcessorError(
        f"the {what} of column {name!r} does not fit {of} at key {column.groups.key_text(np.argmax(overflows))}; "
        "in the source, cast the column to double, or to a decimal with more digits before the point"
    )


def _running_sums(values: Doubles, before: Doubles, starts: Int64s, lengths: Int64s) -> Doubles:
    """Return for each value the sum of its key's values up to this value, added from left to right."""
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


def _nan_as_one(values: Array) -> Array:
    """Replace every NaN by one NaN with fixed bits.

    CPUs of different makers compute NaNs with different bits, and equal states must have equal bytes and digests.
    """
    return np.where(np.isnan(values), values.dtype.type(np.nan), values)


def _counts_of(stored: Groups) -> Int64s:
    counts: Int64s = np.add.reduceat(numbers(whole(stored.batch.rows["count"])), stored.starts)
    return counts


def _arrivals_of(groups: Groups, old: Parts, keys: Any, rows: Int64s, replaced: Bools) -> Parts:
    """Return the arrival of each key's value; nothing if the state does not have these fields."""
    if groups.arrivals is None:
        return {part: old[part] for part in _ARRIVAL if part in old}
    interval_ms, number = (numbers(old[part]).copy() for part in _ARRIVAL)
    at = np.arange(groups.keys)[keys][replaced]
    interval_ms[at] = groups.arrivals.interval_ms
    number[at] = groups.arrivals.numbers[rows[replaced]]
    return {"interval_ms": array_of(interval_ms, pa.int64()), "number": array_of(number, pa.int64())}


def _arrived(rows: pa.Table) -> tuple[Int64s, Int64s]:
    return numbers(whole(rows["number"])), numbers(whole(rows["interval_ms"]))


def _taken(rows: pa.Table, chosen: Int64s) -> Parts:
    taken = rows.take(pa.array(chosen))
    return {name: whole(taken[name]) for name in taken.column_names}


def _picked(before: pa.Array, array: pa.Array, rows: Int64s, places: Int64s) -> pa.Array:
    """Return one element for each key: its stored element, or a new element from the batch."""
    new = array.take(pa.array(rows)).cast(before.type)
    return pa.concat_arrays([before, new]).take(pa.array(places))
