"""The fields that the aggregates of a processor have in its state and its output, and checks of its settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

from pyspark.sql.types import DataType, StructField, StructType

from cairn.aggregates.column_types import UnfitError, hashed_as
from cairn.aggregates.definitions import Aggregate, ApproxDistinct, OfOneRow
from state_backend.formats.recorded_settings import SETTINGS
from state_backend.state.layout import MAX_TIME_MS
from state_backend.state.plan_state_schemas import MADE_WITH
from state_backend.values.errors import UsageError


def nullable(schema: StructType) -> list[StructField]:
    return [StructField(f.name, f.dataType) for f in schema.fields]


def spelled_name(name: str, names: Sequence[str]) -> str:
    """Return `name` as it is spelled in `names`, ignoring case. A name that `names` lacks is returned unchanged."""
    return name if name in names else next((own for own in names if own.lower() == name.lower()), name)


def spelled_aggregates(aggregates: Mapping[str, Aggregate], names: Sequence[str]) -> dict[str, Aggregate]:
    return {
        name: a if a.column is None else replace(a, column=spelled_name(a.column, names))
        for name, a in aggregates.items()
    }


def aggregate_fields(aggregates: Mapping[str, Aggregate], handle: Any) -> list[StructField]:
    types = {f.name: f.dataType for f in handle.input_schema.fields}
    return [StructField(name, a.result_type(types.get(a.column))) for name, a in aggregates.items()]


def state_fields(
    aggregates: Mapping[str, Aggregate], parts: Mapping[str, Sequence[tuple[str, DataType]]], input_schema: StructType
) -> list[StructField]:
    """Return the fields of a state: one for each part (name, type) of each aggregate.

    The field's metadata records the aggregate's input column, `ignore_nulls`, and for a sketch the kind of values. So
    Cairn can refuse changed code that computes the same output column in another way.
    """
    return [
        StructField(f"{name}_{part}", of, metadata=_metadata(name, part, aggregates[name], input_schema))
        for name in parts
        for part, of in parts[name]
    ]


def _metadata(name: str, part: str, aggregate: Aggregate, input_schema: StructType) -> dict[str, dict[str, str]]:
    made = f"{name} = {type(aggregate).__name__}({aggregate.column!r})"
    metadata = {MADE_WITH: {f"{name}_{part}": made}}
    if isinstance(aggregate, OfOneRow):
        metadata[SETTINGS] = {f"{name}_{part}.ignore_nulls": f"{made[:-1]}, ignore_nulls={aggregate.ignore_nulls})"}
    if isinstance(aggregate, ApproxDistinct):
        of = hashed_as(input_schema[aggregate.column].dataType)
        metadata[SETTINGS] = {f"{name}_{part}.hashed_as": f"{made} of {of}"}
    return metadata


def check_declared(owner: str, aggregates: Mapping[str, Aggregate]) -> None:
    """Raise `UsageError` if a processor of aggregates declares none."""
    if not aggregates:
        raise UsageError(f"{owner} declares no aggregates; give it class attributes such as flights = Count()")


def check_ttl(owner: str, ttl_ms: Any, pipeline: Any = None) -> None:
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
    """Return (name, Spark type) of the stored fields of each aggregate. `merged`: Also the fields for `merge`."""
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
        except UnfitError as unfit:
            raise UsageError(f"{where}: column {column!r} is {of.simpleString()}, and {unfit}") from None
    return fields


def declared_in(of: type, base: type) -> dict[str, Aggregate]:
    """Return the aggregates that the class `of` declares or inherits, by attribute name, those of base classes first.

    Raise `UsageError` if an aggregate has the name of an attribute of `base`, which every processor has.
    """
    for name, value in vars(of).items():
        if isinstance(value, Aggregate) and hasattr(base, name):
            raise UsageError(
                f"{of.__name__}.{name} = {value}: every processor already has an attribute {name!r}; choose another name"
            )
    found: dict[str, Any] = {}
    for cls in reversed(of.__mro__):
        found.update(vars(cls))
    return {name: value for name, value in found.items() if isinstance(value, Aggregate)}
