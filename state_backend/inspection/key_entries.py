"""Read all entries of one key in a checkpoint: states and timers, as they are stored.

Only the SSTs that may hold the key are fetched. Expired entries are not among the entries: each interval deletes them
at its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import field
from pathlib import Path
from typing import Any

from state_backend.adapters.rocks import RocksStore
from state_backend.formats.key_codec import KeyCodec
from state_backend.formats.spark_hash import key_group as key_group_of
from state_backend.formats.types import StructType
from state_backend.inspection.describe import self_describing
from state_backend.inspection.state_diff import EntryReader
from state_backend.inspection.state_source import Span, StateSource, fill_store, open_shard
from state_backend.ports.storage import Storage
from state_backend.shard.file_cache import FileCache
from state_backend.state import layout
from state_backend.values.frozen import frozen
from state_backend.values.key_groups import KeyGroupRange, shard_of
from state_backend.values.records import StateDescriptor

Stored = tuple[bytes, bytes]


@frozen
class SearchedKey:
    values: tuple[Any, ...]
    schema: StructType
    encoded: bytes
    group: int

    @classmethod
    def of(cls, values: tuple[Any, ...], schema: StructType, max_parallelism: int) -> SearchedKey:
        encoded, group = KeyCodec(schema).encode(values), key_group_of(values, schema, max_parallelism)
        return cls(values=values, schema=schema, encoded=encoded, group=group)

    @property
    def named(self) -> dict[str, Any]:
        """The key's values by column name, as a read of state returns them: a decimal has the scale of its type."""
        found: dict[str, Any] = self_describing(KeyCodec(self.schema).decode(self.encoded), self.schema)
        return found


@frozen
class KeyEntries:
    """The stored entries of one key. Two `KeyEntries` can be compared with `changes_of_group`."""

    keys: KeyCodec
    states: Mapping[str, StateDescriptor]
    stored: tuple[Stored, ...] = ()
    _by_prefix: dict[bytes, list[Stored]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        for stored_key, entry in self.stored:
            self._by_prefix.setdefault(stored_key[:3], []).append((stored_key[3:], entry))

    def scan(self, group: int, state_id: int | None) -> Iterator[Stored]:
        """Yield the entries of one state, as `Side.scan` does."""
        if state_id is not None:
            yield from self._by_prefix.get(layout.prefix(group, state_id), [])

    def timers(self) -> list[int]:
        return [layout.unpack_time(key[-8:]) for key, _ in self.stored if key[2] == layout.TIMERS]

    def rows(self, name: str) -> list[dict[str, Any]]:
        reader, rows = EntryReader(self.keys, self.states[name]), []
        for stored_key, entry in self.stored:
            if stored_key[2] != reader.state_id or (found := reader.read(stored_key, entry)) is None:
                continue
            place, decoded = found
            row = {"user_key": place["user_key"], "pos": place["position"], "expiry_ms": decoded.expiry_ms}
            rows.append({name: value for name, value in row.items() if value is not None} | {"value": decoded.value})
        return rows


def read_keys(
    source: StateSource,
    keys: Sequence[SearchedKey],
    states: Sequence[StateDescriptor],
    storage: Storage,
    work: Path,
    cache: FileCache | None = None,
) -> Iterator[tuple[SearchedKey, KeyEntries]]:
    """Yield some keys, each with its timers and its entries in some states. Each shard is opened once."""
    shards, groups, places = source.content.parallelism, source.content.max_parallelism, dict[int, list[SearchedKey]]()
    for key in keys:
        places.setdefault(key.group if source.canonical else shard_of(key.group, shards, groups), []).append(key)
    for place, there in places.items():
        with ExitStack() as stack:
            if source.canonical:
                owned = KeyGroupRange(first=place, last=place)
                store = stack.enter_context(fill_store(source, owned, groups, storage, work))
            else:
                spans = [span for key in there for span in spans_of(key, states)]
                store, _ = stack.enter_context(open_shard(source, place, storage, work, spans=spans, cache=cache))
            yield from ((key, entries_in(store, key, states)) for key in there)


def entries_in(store: RocksStore, key: SearchedKey, states: Sequence[StateDescriptor]) -> KeyEntries:
    stored = [entry for start, end in spans_of(key, states) for entry in store.scan(start, end)]
    return entries_of(key, states, stored)


def spans_of(key: SearchedKey, states: Sequence[StateDescriptor]) -> list[Span]:
    """Return the ranges of stored keys that hold the states and timers of a key, ascending."""
    ids = {*(d.state_id for d in states), layout.TIMERS}
    starts = [layout.prefix(key.group, state_id) + key.encoded for state_id in sorted(ids)]
    return [(start, layout.after(start)) for start in starts]


def entries_of(key: SearchedKey, states: Sequence[StateDescriptor], stored: Sequence[Stored]) -> KeyEntries:
    for stored_key, entry in stored:
        if stored_key[2] == layout.TIMERS:
            layout.check_timer(stored_key[3:], entry)
    return KeyEntries(keys=KeyCodec(key.schema), states={d.name: d for d in states}, stored=tuple(stored))
