"""Small shards for tests: descriptors, a state over a store in a folder, and a snapshot of a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from state_backend.adapters.rocks import RocksStore
from state_backend.formats.key_codec import KeyCodec
from state_backend.formats.types import parse_struct
from state_backend.ports.storage import Storage
from state_backend.shard.snapshot import Snapshot, take_snapshot
from state_backend.state.shard_state import ShardState
from state_backend.values.key_groups import KeyGroupRange
from state_backend.values.records import KeyGroupState, SchemaVersion, StateDescriptor


def struct(*fields: tuple[str, str]) -> dict[str, Any]:
    return {
        "type": "struct",
        "fields": [{"name": name, "type": type_, "nullable": True, "metadata": {}} for name, type_ in fields],
    }


KEY_SCHEMA = struct(("k", "string"))
KEYS = KeyCodec(parse_struct(KEY_SCHEMA))


def descriptor(name: str, kind: Any, state_id: int, ttl_ms: int | None = None) -> StateDescriptor:
    user_key = struct(("u", "string")) if kind == "map" else None
    version = SchemaVersion(version=1, value=struct(("n", "long"), ("s", "string")), user_key=user_key)
    return StateDescriptor(name=name, kind=kind, state_id=state_id, ttl_ms=ttl_ms, versions=(version,))


STATES = (
    descriptor("value", "value", 1),
    descriptor("list", "list", 2),
    descriptor("map", "map", 3),
    descriptor("value_ttl", "value", 4, ttl_ms=100),
    descriptor("list_ttl", "list", 5, ttl_ms=100),
    descriptor("map_ttl", "map", 6, ttl_ms=100),
)


def open_state(directory: Path, now_ms: int, key_groups: tuple[KeyGroupState, ...] = ()) -> ShardState:
    return ShardState(RocksStore(directory), key_groups=key_groups, descriptors=STATES, now_ms=now_ms)


def snapshot_of(store: RocksStore, storage: Storage, image: Path, key_groups: KeyGroupRange, **given: Any) -> Snapshot:
    """Of shard 0, without counts, with each SST in a file of its own, unless ``given`` says otherwise."""
    plain: dict[str, Any] = {"attempt": "a", "shard": 0, "task": 0, "key_group_states": (), "inline_budget_bytes": 0}
    return take_snapshot(store, storage, image=image, key_groups=key_groups, **plain | given)
