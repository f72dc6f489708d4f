"""Base class of the ready-made processors that aggregate rows in windows of event time."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from pyspark.sql.types import BooleanType, LongType, StructField, StructType

from cairn.aggregates import Aggregate
from cairn.aggregates.groups import Arrivals, Groups
from cairn.aggregates.running_aggregate import step_aggregates
from cairn.aggregates.state_fields import (
    aggregate_fields,
    check_declared,
    declared_in,
    nullable,
    plan_fields,
    spelled_aggregates,
    state_fields,
)
from cairn.arrow_processor import KeyedBatch
from cairn.numpy_columns import Bools, Int64s, array_of, numbers, whole
from cairn.processors.ready_made import (
    MICROSECOND,
    ReadyMade,
    ceil_ms,
    check_choice,
    check_free,
    keys_at,
    ready_made,
    type_of_event_time,
    with_settings,
    wrong_setting,
)
from cairn.spark_versions import to_arrow_schema
from state_backend.values.errors import UsageError
from state_backend.values.frozen import frozen
from state_backend.values.time_bounds import check_length_of_time

VERSION, FINAL, DELETED = "version", "is_final", "is_deleted"


class Windows(ReadyMade, ABC):
    """Base class of processors that emit aggregates per key and window."""

    settings: ClassVar[tuple[str, ...]] = ("early", "allowed_lateness")
    bounds: ClassVar[tuple[str, str]] = ("window_start", "window_end")  # Output columns for start and end.
    merges: ClassVar[bool] = False  # True: stored aggregates of several sessions or panes are merged.
    early: bool = False
    allowed_lateness: timedelta = timedelta(0)
    # The aggregates by attribute name, in the order of declaration, as in `RunningAggregate`.
    declared_aggregates: Mapping[str, Aggregate] = {}

    def __init_subclass__(cls, **arguments: Any) -> None:
        cls.declared_aggregates = declared_in(cls, ready_made(cls))
        super().__init_subclass__(**arguments)

    @classmethod
    def is_setting(cls, name: str, value: Any) -> bool:
        return isinstance(value, Aggregate) or name == "declared_aggregates" or super().is_setting(name, value)

    @classmethod
    def check_settings(cls) -> None:
        check_choice(cls, "early", (True, False))
        lateness = cls.allowed_lateness
        if not isinstance(lateness, timedelta) or lateness < timedelta(0):
            raise wrong_setting(cls, "allowed_lateness", "write allowed_lateness = timedelta(hours=1)")
        check_length_of_time(f"{cls.__name__}.allowed_lateness", lateness)
        if cls.early and lateness:
            raise UsageError(
                f"{cls.__name__}.early is True and allowed_lateness is set: early rows include those that late rows change; leave out allowed_lateness"
            )

    @classmethod
    def check_pipeline(cls, pipeline: Any) -> None:
        super().check_pipeline(pipeline)
        check_declared(cls.__name__, cls.declared_aggregates)
        delay = pipeline.watermark_delay
        if delay is not None and cls.allowed_lateness > delay:
            raise UsageError(
                f"pipeline {pipeline.name!r}: {cls.__name__}.allowed_lateness is {cls.allowed_lateness}, longer than watermark_delay = {delay}: "
                "windows would be emitted before they end\nallowed_lateness is a part of watermark_delay; set a longer watermark_delay"
            )

    def _spell_columns(self, names: Sequence[str]) -> None:
        super()._spell_columns(names)
        self.declared_aggregates = spelled_aggregates(self.declared_aggregates, names)

    def deriveOutputSchema(self, handle: Any) -> StructType:
        owner, ours = type(self).__name__, ready_made(type(self)).__name__
        of = type_of_event_time(owner, ours, handle)
        plan_fields(owner, self.declared_aggregates, handle.input_schema, handle.key_schema)
        more = [StructField(name, LongType() if name == VERSION else BooleanType()) for name in self._more()]
        for name in (*self.bounds, *(f.name for f in more)):
            check_free(
                owner,
                name,
                [*handle.key_schema.names, *self.declared_aggregates],
                ours,
                "a key column or an aggregate is named",
            )
        window = [StructField(name, of) for name in self.bounds]
        aggregates = aggregate_fields(self.declared_aggregates, handle)
        return StructType([*nullable(handle.key_schema), *window, *aggregates, *more])

    def _more(self) -> list[str]:
        """Return the names of the output columns that `early` and `allowed_lateness` add, such as `version`."""
        return [VERSION] * self._is_versioned + [FINAL] * self.early

    @property
    def _is_versioned(self) -> bool:
        return self.early or bool(self.allowed_lateness)

    def _declare(self, handle: Any) -> list[StructField]:
        """Check the settings against the schemas of `handle`. Return a state field for each part of each aggregate."""
        self.check_settings()
        self.deriveOutputSchema(handle)
        owner = type(self).__name__
        fields = plan_fields(
            owner, self.declared_aggregates, handle.input_schema, handle.key_schema, merged=self.merges
        )
        self._parts = {name: [part for part, _ in parts] for name, parts in fields.items()}
        self._handle = handle
        self._of_time = type_of_event_time(owner, ready_made(type(self)).__name__, handle)
        schema = to_arrow_schema(handle.input_schema)
        self._no_rows: pa.Table = schema.empty_table()
        self._lateness = self.allowed_lateness // MICROSECOND
        self._numbered_before = 0
        settings = {name: f"{name} = {getattr(self, name)}" for name in Windows.settings}
        return with_settings(settings, state_fields(self.declared_aggregates, fields, handle.input_schema))

    def _windows_of(self, batch: KeyedBatch, owners: Int64s, begins: Int64s, rows: pa.Table, at: Int64s) -> KeyedBatch:
        """Return a batch whose keys are windows (key and start). Window i has the rows `at[i]` to `at[i + 1] - 1`."""
        of_window = array_of(begins, pa.timestamp("us", "UTC"))
        keys = batch.keys.take(pa.array(owners)).append_column(self.bounds[0], of_window)
        return KeyedBatch(keys=keys, rows=rows, row_offsets=at, states={}, exists={}, time=batch.time)

    def _step(self, groups: Groups, old: pa.Table) -> tuple[pa.Table, dict[str, pa.Array]]:
        """Return (state, values), per window: the aggregates' fields after the rows in `groups`, and their values."""
        return step_aggregates(self.declared_aggregates, self._parts, groups, old)

    def _values(self, batch: KeyedBatch, owners: Int64s, begins: Int64s, parts: pa.Table) -> dict[str, pa.Array]:
        none = np.zeros(len(owners) + 1, np.int64)
        return self._step(Groups(self._windows_of(batch, owners, begins, self._no_rows, none)), parts)[1]

    def _merge(self, batch: KeyedBatch, owners: Int64s, begins: Int64s, parts: pa.Table, at: Int64s) -> pa.Table:
        """Merge aggregates: window i, of key `owners[i]`, gets the rows `at[i]` to `at[i + 1] - 1` of `parts`."""
        if len(parts) == len(owners):
            return parts.select(self._part_names())
        merged: dict[str, pa.Array] = {}
        for name, aggregate in self.declared_aggregates.items():
            stored = pa.table({part: whole(parts[f"{name}_{part}"]) for part in self._parts[name]})
            new = aggregate.merge(Groups(self._windows_of(batch, owners, begins, stored, at)))
            merged.update((f"{name}_{part}", new[part]) for part in self._parts[name])
        return pa.table(merged)

    def _part_names(self) -> list[str]:
        return [f"{name}_{part}" for name, parts in self._parts.items() for part in parts]

    def _arrivals(self, batch: KeyedBatch) -> Arrivals:
        """Return each row's number among the rows of its key in the interval, counted on from the batch before."""
        of_key = np.arange(batch.rows.num_rows) - np.repeat(batch.row_offsets[:-1], np.diff(batch.row_offsets))
        if self._numbered_before:
            of_key[: batch.row_offsets[1]] += self._numbered_before
        self._numbered_before = int(of_key[-1]) + 1 if batch.last_key_continues else 0
        return Arrivals(interval_ms=batch.time.getCurrentProcessingTimeInMs(), numbers=of_key)

    def _output(
        self,
        batch: KeyedBatch,
        owners: Int64s,
        bounds: tuple[Int64s, Int64s],
        values: Mapping[str, pa.Array],
        versions: Int64s,
        final: Bools,
    ) -> pa.Table:
        """Return an output row for each window. `bounds`: (starts, ends). `final`: True for closed windows."""
        output = keys_at(batch, owners)
        output |= {name: self._times(us) for name, us in zip(self.bounds, bounds, strict=True)}
        output |= values
        more = {
            VERSION: lambda: array_of(versions.astype(np.int64), pa.int64()),
            FINAL: lambda: pa.array(final),
            DELETED: lambda: pa.array(np.zeros(len(owners), np.bool_)),
        }
        output |= {name: more[name]() for name in self._more()}
        return pa.table(output)

    def _times(self, times_us: Int64s) -> pa.Array:
        return array_of(times_us.astype(np.int64), self._no_rows.schema.field(self._handle.event_time).type)

    def _is_due(self, ends: Int64s, versions: Int64s, due_ms: int) -> Bools:
        """Return True for each window that a timer emits now; with `allowed_lateness`, only for its first result."""
        due: Bools = ceil_ms(ends - self._lateness) <= due_ms
        return due & (versions == 0) if self._lateness else due

    def _user_keys(self, times_us: Int64s, name: str = "") -> pa.Table:
        return pa.table({name or self.bounds[0]: self._times(times_us)})

    def _due_after(self, ends: Int64s, versions: Int64s) -> Int64s:
        """Return each open window's next timer in ms: for its first result or, if that was emitted, for its end."""
        return ceil_ms(ends - np.where(versions > 0, 0, self._lateness))


@frozen
class RowsByWindow:
    """Rows of a batch, grouped by key and window."""

    order: Int64s  # Positions of the rows, sorted by key and window.
    owners: Int64s  # For each window, the position of its key in the batch.
    begins: Int64s  # For each window, its start in microseconds.
    at: Int64s  # Window i has the sorted rows `at[i]` to `at[i + 1] - 1`.

    def take(self, rows: pa.Table) -> pa.Table:
        return rows if is_sorted(self.order) else rows.take(pa.array(self.order))


def rows_by_window(owners: Int64s, windows: Int64s) -> RowsByWindow:
    same_key = np.diff(owners) == 0
    descends = ((np.diff(windows) < 0) & same_key).any()
    order = np.lexsort((windows, owners)) if descends else np.arange(len(owners))
    of_key, of_window = owners[order], windows[order]
    begins = group_begins(of_key, of_window)
    return RowsByWindow(
        order=order, owners=of_key[begins], begins=of_window[begins], at=np.append(begins, len(order)).astype(np.int64)
    )


def group_begins(owners: Int64s, windows: Int64s) -> Int64s:
    return np.flatnonzero((np.diff(owners, prepend=-1) != 0) | (np.diff(windows, prepend=0) != 0))


def of_open_key(batch: KeyedBatch, owners: Int64s) -> Bools:
    """Return True for each window whose key, at `owners`, has more rows in the next batch: only the last key can."""
    of_last: Bools = owners == (batch.keys.num_rows - 1 if batch.last_key_continues else -1)
    return of_last


def is_sorted(order: Int64s) -> bool:
    return not len(order) or bool(order[0] == 0 and (np.diff(order) == 1).all())


def check_offset(cls: Any) -> None:
    if not isinstance(cls.offset, timedelta):
        raise wrong_setting(cls, "offset", "write offset = timedelta(minutes=15)")
    check_length_of_time(f"{cls.__name__}.offset", cls.offset)


def join_tables(tables: Sequence[pa.Table]) -> pa.Table:
    """Return the rows of all tables, which have the same columns, in one table with one chunk per column."""
    return tables[0] if len(tables) == 1 else pa.concat_tables(tables).combine_chunks()


def versions_of(state: pa.Table) -> Int64s:
    """Return the stored version of each window: the number of rows emitted for it; 0 if it was not emitted."""
    found: Int64s = numbers(whole(state[VERSION])) if VERSION in state.column_names else np.zeros(len(state), np.int64)
    return found


def are_in(pairs: tuple[Int64s, Int64s], wanted: tuple[Int64s, Int64s]) -> Bools:
    """Return True for each (key, time) in `pairs` that also occurs in `wanted`."""
    places, codes = np.unique(np.concatenate([pairs[1], wanted[1]]), return_inverse=True)
    keys = np.concatenate([pairs[0], wanted[0]]) * len(places) + codes
    return np.isin(keys[: len(pairs[0])], keys[len(pairs[0]) :])
