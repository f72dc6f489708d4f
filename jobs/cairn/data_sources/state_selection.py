"""Selection of the shards, key groups and keys of a state's table that a query reads.

The selection comes from options, not from Spark's filters. Spark 4.3 could pass filters to a Python data source by
`pushFilters`. But Spark then uses the filtered plan of one query for all queries over the same `load()`. In
`t.filter("k = 1").union(t)`, both sides would give the rows of `k = 1`. The test
`tests/integration/test_keyed_state.py` shows this.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from decimal import Decimal, InvalidOperation
from typing import Any

from state_backend.formats.key_codec import KeyCodec
from state_backend.formats.spark_hash import key_group as key_group_of
from state_backend.formats.types import ArrayType, AtomicType, DataType, DecimalType, StructType, parse_struct
from state_backend.inspection.state_table import WHOLE, Part
from state_backend.values.errors import StateTypeError, UsageError
from state_backend.values.frozen import frozen
from state_backend.values.key_groups import range_of, shard_of
from state_backend.values.records import Content


@frozen
class ReadPlan:
    """The selection of a query."""

    shards: tuple[int, ...]
    part: Part = WHOLE

    def part_of(self, shard: int, content: Content) -> Part:
        owned = range_of(shard, content.parallelism, content.max_parallelism)
        groups, keys = self.part.key_groups, self.part.keys
        return Part(
            key_groups=None if groups is None else tuple(g for g in groups if g in owned),
            keys=None if keys is None else tuple(key for key in keys if key[0] in owned),
        )


def plan_read(
    content: Content,
    *,
    keys: Sequence[tuple[Any, ...]] | None = None,
    key_groups: Sequence[int] | None = None,
    shards: Sequence[int] | None = None,
) -> ReadPlan:
    parallelism, max_parallelism = content.parallelism, content.max_parallelism
    chosen = {*range(parallelism)} if shards is None else {*shards} & {*range(parallelism)}
    groups = None if key_groups is None else {*key_groups} & {*range(max_parallelism)}
    if groups is not None:
        chosen &= {shard_of(group, parallelism, max_parallelism) for group in groups}
    if keys is None:
        return ReadPlan(
            shards=tuple(sorted(chosen)), part=Part(key_groups=None if groups is None else tuple(sorted(groups)))
        )
    schema = parse_struct(content.key_schema)
    codec = KeyCodec(schema)
    try:
        encoded = {(key_group_of(key, schema, max_parallelism), codec.encode(key)) for key in keys}
    except StateTypeError as error:
        raise UsageError(f"the key does not fit the key columns of pipeline {content.pipeline!r}: {error}") from error
    wanted = sorted(key for key in encoded if groups is None or key[0] in groups)
    chosen &= {shard_of(group, parallelism, max_parallelism) for group, _ in wanted}
    return ReadPlan(shards=tuple(sorted(chosen)), part=Part(keys=tuple(wanted)))


def parse_numbers(text: str, what: str) -> list[int]:
    """Parse numbers with commas between them, such as `3` or `1,3`."""
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise UsageError(f"{what}: expected a number or numbers with commas between them, not {text!r}") from None


def parse_keys(text: str, key_schema: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Parse a key or a list of keys."""
    schema = parse_struct(key_schema)
    try:
        given = json.loads(text)
    except ValueError as error:
        raise UsageError(f"key: {text!r} is not JSON: {error}") from None
    return [_struct(schema, one, "key") for one in (given if isinstance(given, list) else [given])]


def _struct(schema: StructType, given: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(given, dict) or given.keys() != {*schema.names}:
        raise UsageError(f"{where}: expected a JSON object with {', '.join(schema.names)}, not {json.dumps(given)}")
    return tuple(_value(field.type, given[field.name], f"{where}.{field.name}") for field in schema.fields)


def _value(data_type: DataType, given: Any, where: str) -> Any:
    """Return a JSON value as the Python type that the key codec takes, such as a date for the text "2013-01-31".

    Types that JSON has itself, such as integers and strings, are returned unchanged. The key codec checks these values.
    """
    if given is None:
        return None
    try:
        match data_type:
            case StructType():
                return _struct(data_type, given, where)
            case ArrayType():
                return [_value(data_type.element, item, where) for item in given]
            case DecimalType():
                return Decimal(str(given))
            case AtomicType("float" | "double"):
                return float(given)
            case AtomicType("binary"):
                return bytes.fromhex(given)
            case AtomicType("date"):
                return date.fromisoformat(given)
            case AtomicType("timestamp" | "timestamp_ntz"):
                return datetime.fromisoformat(given)
    except (TypeError, ValueError, InvalidOperation):
        raise UsageError(f"{where}: expected {data_type}, not {json.dumps(given)}") from None
    return given
