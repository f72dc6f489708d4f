"""What Spark's filters on the table of a state leave to read: shards, key groups, keys.

Spark evaluates every filter again on the rows that come, so that what is read may be too much, never too little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from pyspark.sql.datasource import EqualNullSafe, EqualTo, Filter, In, IsNull

from state_backend.formats.key_codec import KeyCodec
from state_backend.formats.spark_hash import key_group as key_group_of
from state_backend.formats.types import StructType, parse_struct
from state_backend.table import WHOLE, Part
from state_backend.values.errors import CairnError
from state_backend.values.key_groups import range_of, shard_of
from state_backend.values.records import Content

# Beyond these, looking for keys one by one costs more than to pass by them.
MAX_KEYS = 10_000
Columns = Mapping[tuple[str, ...], list[Any]]


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


def plan_read(filters: Sequence[Filter], content: Content) -> ReadPlan:
    """Of filters that all hold, those count that name the values which a column may have: ``shard``, ``key_group``, the whole
    ``key``, or each of its columns. Others, and values that no key can have, leave all to read."""
    allowed = _allowed(filters)
    shards = {*range(content.parallelism)}
    if ("shard",) in allowed:
        shards &= _integers(allowed["shard",])
    keys = _keys(allowed, parse_struct(content.key_schema), content.max_parallelism)
    groups = None
    if ("key_group",) in allowed:
        groups = {g for g in _integers(allowed["key_group",]) if 0 <= g < content.max_parallelism}
        shards &= {shard_of(g, content.parallelism, content.max_parallelism) for g in groups}
    if keys is not None:
        keys = [key for key in keys if groups is None or key[0] in groups]
        shards &= {shard_of(g, content.parallelism, content.max_parallelism) for g, _ in keys}
    part = Part(
        key_groups=tuple(sorted(groups)) if groups is not None and keys is None else None,
        keys=tuple(sorted(keys)) if keys is not None else None,
    )
    return ReadPlan(shards=tuple(sorted(shards)), part=part)


def _allowed(filters: Sequence[Filter]) -> dict[tuple[str, ...], list[Any]]:
    """By column the values of the filter that allows the fewest."""
    found: dict[tuple[str, ...], list[Any]] = {}
    for each in filters:
        values = _values(each)
        if values is not None:
            column = each.attribute
            if column not in found or len(values) < len(found[column]):
                found[column] = values
    return found


def _values(each: Filter) -> list[Any] | None:
    match each:
        case EqualTo() | EqualNullSafe():
            return [each.value]
        case In():
            return [value for value in each.value if value is not None]
        case IsNull():
            return [None]
    return None


def _keys(allowed: Columns, schema: StructType, max_parallelism: int) -> list[tuple[int, bytes]] | None:
    """The keys that may be there, as (key group, encoded key); None: any."""
    columns = [allowed.get(("key", name)) for name in schema.names]
    candidates: list[tuple[Any, ...]]
    if ("key",) in allowed:
        structs = [value for value in allowed["key",] if isinstance(value, Mapping)]
        if any(value.keys() != {*schema.names} for value in structs):
            return None
        candidates = [tuple(value[name] for name in schema.names) for value in structs]
    elif None in columns:
        return None
    else:
        count = 1
        for values in columns:
            count *= len(values or ())
        if count > MAX_KEYS:
            return None
        candidates = list(product(*[values or () for values in columns]))
    codec = KeyCodec(schema)
    try:
        encoded = {(key_group_of(key, schema, max_parallelism), codec.encode(key)) for key in candidates}
    except CairnError:
        return None
    return sorted(encoded)


def _integers(values: Sequence[Any]) -> set[int]:
    return {value for value in values if isinstance(value, int)}
