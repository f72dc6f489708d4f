"""The base class of processors that keep running aggregates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.types import StructType

from cairn.aggregates.definitions import Aggregate
from cairn.aggregates.groups import Groups
from cairn.aggregates.state_fields import (
    aggregate_fields,
    check_declared,
    check_ttl,
    declared_in,
    nullable,
    plan_fields,
    spelled_aggregates,
    state_fields,
)
from cairn.arrow_processor import ArrowProcessor, BatchResult, KeyedBatch, with_keys
from cairn.numpy_columns import whole

STATE = "aggregates"


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
    # The aggregates by attribute name, in the order of declaration. `vars(cls)` loses this order: a class that is
    # pickled by value arrives in the worker with its attributes sorted by name.
    declared_aggregates: Mapping[str, Aggregate] = {}

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        cls.declared_aggregates = declared_in(cls, RunningAggregate)

    @classmethod
    def check_pipeline(cls, pipeline: Any) -> None:
        check_declared(cls.__name__, cls.declared_aggregates)
        check_ttl(cls.__name__, cls.ttl_ms, pipeline)

    def _spell_columns(self, names: Sequence[str]) -> None:
        self.declared_aggregates = spelled_aggregates(self.declared_aggregates, names)

    def init(self, handle: Any) -> None:
        fields = plan_fields(type(self).__name__, self.declared_aggregates, handle.input_schema, handle.key_schema)
        self._parts = {name: [part for part, _ in parts] for name, parts in fields.items()}
        stored = state_fields(self.declared_aggregates, fields, handle.input_schema)
        handle.getValueState(STATE, StructType(stored), self.ttl_ms)

    def deriveOutputSchema(self, handle: Any) -> StructType:
        plan_fields(type(self).__name__, self.declared_aggregates, handle.input_schema, handle.key_schema)
        return StructType([*nullable(handle.key_schema), *aggregate_fields(self.declared_aggregates, handle)])

    def handleBatch(self, batch: KeyedBatch) -> BatchResult:
        old, groups = batch.states[STATE], Groups(batch)
        new, output = step_aggregates(self.declared_aggregates, self._parts, groups, old)
        rows = with_keys(batch, pa.table(output))
        if batch.last_key_continues:
            rows = rows.slice(0, len(rows) - 1)
        return BatchResult(states={STATE: new}, output=rows)


def step_aggregates(
    aggregates: Mapping[str, Aggregate], parts_of: Mapping[str, Sequence[str]], groups: Groups, old: pa.Table
) -> tuple[pa.Table, dict[str, pa.Array]]:
    """Return (state, values), per key: new fields of all aggregates, after the rows in `groups`, and their values."""
    new: dict[str, pa.Array] = {}
    values: dict[str, pa.Array] = {}
    for name, aggregate in aggregates.items():
        parts = {part: whole(old[f"{name}_{part}"]) for part in parts_of[name]}
        changed, values[name] = aggregate.step(groups, parts)
        new.update((f"{name}_{part}", changed[part]) for part in parts)
    return pa.table(new), values
