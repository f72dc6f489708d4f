"""What of a state's table is asked for: shards, key groups, keys.

Not by Spark's filters. Spark 4.3 would hand them to a Python data source's ``pushFilters``, but keeps what that made of one query
for every other one over the same ``load()``: of ``t.filter("k = 1").union(t)`` both sides would give the rows of ``k = 1``.
``tests/integration/test_keyed_state.py`` shows it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal, InvalidOperation
from typing import Any

from state_backend.formats.key_codec import KeyCodec
from state_backend.formats.spark_hash import key_group as key_group_of
from state_backend.formats.types import ArrayType, AtomicType, DataType, DecimalType, StructType, parse_struct
from state_backend.inspection.state_table import WHOLE, Part
from state_backend.values.errors import StateTypeError, UsageError
from state_backend.values.key_groups import range_of, shard_of
from state_backend.values.records import Content


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPlan:
    """The shards to read, ascending, and what of them."""

    shards: tuple[int, ...]
    part: Part = WHOLE

    def part_of(self, shard: int, content: Content) -> Part:
        """What of the part lies in this shard."""
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
    """What is in all of these; None: not limited. Raises: UsageError for a key that none of the state can be."""
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
        raise UsageError(f"no key of {content.pipeline!r} is like that: {error}") from error
    wanted = sorted(key for key in encoded if groups is None or key[0] in groups)
    chosen &= {shard_of(group, parallelism, max_parallelism) for group, _ in wanted}
    return ReadPlan(shards=tuple(sorted(chosen)), part=Part(keys=tuple(wanted)))


def parse_numbers(text: str, what: str) -> list[int]:
    """``3`` or ``1,3``. Raises: UsageError for any other text."""
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise UsageError(f"{what}: expected a number or numbers with commas between them, not {text!r}") from None


def parse_keys(text: str, key_schema: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """A key as a JSON object with all its columns, or a list of them; as ``cairn diff --json`` writes them.

    Raises: UsageError for any other text.
    """
    schema = parse_struct(key_schema)
    try:
        given = json.loads(text)
    except ValueError as error:
        raise UsageError(f"key: not JSON: {error}: {text!r}") from None
    return [_struct(schema, one, "key") for one in (given if isinstance(given, list) else [given])]


def _struct(schema: StructType, given: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(given, dict) or given.keys() != {*schema.names}:
        raise UsageError(f"{where}: expected a JSON object with {', '.join(schema.names)}, not {json.dumps(given)}")
    return tuple(_value(field.type, given[field.name], f"{where}.{field.name}") for field in schema.fields)


def _value(data_type: DataType, given: Any, where: str) -> Any:
    """As keys have it. What is not converted here the key codec checks."""
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
