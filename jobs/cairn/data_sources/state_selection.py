"""Selection of the shards, key groups and keys of a state's table that a query reads.

The selection comes from options, not from Spark's filters. Spark 4.3 could pass filters to a Python data source by
`pushFilters`. But Spark then uses the filtered plan of one query for all queries over the same `load()`. In
`t.filter("k = 1").union(t)`, both sides would give the rows of `k = 1`. The test
`tests/integration/test_keyed_state.py` shows this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from state_backend.formats.key_codec import KeyCodec
from state_backend.formats.spark_hash import key_group as key_group_of
from state_backend.formats.types import parse_struct
from state_backend.inspection.state_source import WHOLE, Part
from state_backend.values.errors import StateTypeError, UsageError
from state_backend.values.frozen import frozen
from state_backend.values.key_groups import range_of, shard_of
from state_backend.values.records import Content


@frozen
class ReadPlan:
    """The selection of a query: the shards to restore, and the key groups or keys to read from them."""

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
