"""Canonical files against the state that they were made of: every kind of state, at any layout, entry by entry."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.adapters.rocks import RocksStore
from state_backend.formats.canonical_tables import fits_parquet
from state_backend.formats.key_codec import KeyCodec
from state_backend.formats.spark_hash import key_group
from state_backend.formats.types import StructType, parse_struct
from state_backend.shard import canonical_files as canonical
from state_backend.shard.canonical_files import read_canonical, write_canonical
from state_backend.shard.consolidation import count_bytes
from state_backend.state.check_shard import verify_shard
from state_backend.state.expiry import expire
from state_backend.state.shard_state import ShardState
from state_backend.state.state_variables import ListState, MapState, ValueState
from state_backend.state.timers import register_timer
from state_backend.values.key_groups import range_of
from state_backend.values.records import KeyGroupState, SchemaVersion, ShardManifest, StateDescriptor
from tests.support.tiers import at_tier
from tests.support.typed_values import all_types, key_types, struct, structs, values

laws = settings(
    deadline=None, max_examples=at_tier(fast=8, ci=15, all=60), suppress_health_check=[HealthCheck.too_slow]
)


def descriptors(value: Any, user_key: Any) -> tuple[StateDescriptor, ...]:
    """Of each kind one without and one with expiry. The second version has one more field, as a schema that evolved."""
    wider = {**value, "fields": [*value["fields"], {**struct(["long"])["fields"][0], "name": "added"}]}
    found = []
    for state_id, (kind, ttl_ms) in enumerate((k, t) for k in ("value", "list", "map") for t in (None, 100)):
        of_key = user_key if kind == "map" else None
        versions = [SchemaVersion(version=1, value=value, user_key=of_key)]
        if ttl_ms is None:
            versions.append(SchemaVersion(version=2, value=wider, user_key=of_key))
        found.append(
            StateDescriptor(
                name=f"{kind}/{ttl_ms}", kind=kind, state_id=state_id + 1, ttl_ms=ttl_ms, versions=tuple(versions)
            )
        )
    return tuple(found)


def declared(states: tuple[StateDescriptor, ...], version: int) -> tuple[StateDescriptor, ...]:
    """As an earlier deploy declared them."""
    return tuple(replace(d, versions=tuple(v for v in d.versions if v.version <= version)) for d in states)


def fill(store: RocksStore, states: Any, key_schema: StructType, program: Any, max_parallelism: int) -> Any:
    """Runs calls (now, version, name or None, key, what) on one shard that holds every key group."""
    groups: tuple[KeyGroupState, ...] = ()
    codec = KeyCodec(key_schema)
    for now_ms, version, calls in program:
        shard = ShardState(store, key_groups=groups, descriptors=declared(states, version), now_ms=now_ms)
        handles = {
            d.name: {"value": ValueState, "list": ListState, "map": MapState}[d.kind](shard, d.name) for d in states
        }
        for name, key, call in calls:
            shard.set_key(key_group(key, key_schema, max_parallelism), codec.encode(key))
            call(shard if name is None else handles[name], version)
        expire(shard)
        groups = shard.key_group_states()
    return groups


def manifest_of(shard: int, parallelism: int, max_parallelism: int, groups: Any) -> ShardManifest:
    return ShardManifest(
        shard=shard,
        key_groups=range_of(shard, parallelism, max_parallelism),
        files=(),
        inline_files=(),
        segments=(),
        key_group_states=groups,
    )


@st.composite
def cases(draw: Any) -> Any:
    """Schemas, and a program of two deploys over four keys."""
    key = draw(structs(key_types).filter(lambda s: fits_parquet(parse_struct(s))))
    user_key = draw(structs(key_types).filter(lambda s: fits_parquet(parse_struct(s))))
    value = draw(structs(all_types))
    states = descriptors(value, user_key)
    some_keys = draw(st.lists(values(key, False), min_size=1, max_size=4))

    def row(version: int) -> Any:
        return tuple(draw(values(f["type"], f["nullable"])) for f in value["fields"]) + ((7,) if version == 2 else ())

    program = []
    for now_ms, version in ((0, 1), (60, 2), (150, 2)):
        calls: list[Any] = []
        for _ in range(draw(st.integers(0, 6))):
            state = draw(st.sampled_from([*states, None]))
            key_values = draw(st.sampled_from(some_keys))
            if state is None:
                at = draw(st.integers(-100, 100))
                calls.append((None, key_values, lambda shard, v, at=at: register_timer(shard, at)))
                continue
            new = row(version if len(state.versions) > 1 else 1)
            if state.kind == "value":
                calls.append((state.name, key_values, lambda s, v, new=new: s.update(new)))
            elif state.kind == "list":
                calls.append((state.name, key_values, lambda s, v, new=new: s.append_list([new, new])))
            else:
                user = draw(values(user_key, False))
                calls.append((state.name, key_values, lambda s, v, new=new, user=user: s.update_value(user, new)))
        program.append((now_ms, version, calls))
    return key, states, program


def restored(
    files: Any, states: Any, key_schema: Any, storage: Any, folder: Path, parallelism: int, now: int, before: int
) -> list[tuple[RocksStore, ShardManifest]]:
    shards = []
    for shard in range(parallelism):
        store = RocksStore(folder / f"restored-{shard}")
        owned = range_of(shard, parallelism, now)
        groups = read_canonical(
            files, states, key_schema, storage, store, work=folder, owned=owned, max_parallelism=now,
            recorded_max_parallelism=before,
        )  # fmt: skip
        shards.append((store, manifest_of(shard, parallelism, now, groups)))
    return shards


@laws
@given(
    cases(),
    st.sampled_from([(1, 8), (3, 8), (2, 5), (4, 64)]),
    st.sampled_from([(1, 1000), (2, 1000), (1000, 1), (1000, 1000)]),
    st.booleans(),
)
@pytest.mark.long("seconds", runs_in="ci")
def test_any_state_is_restored_from_canonical_files_at_any_parallelism(
    drawn: Any, layout_: tuple[int, int], batch: tuple[int, int], many_files: bool
) -> None:
    """F71: the digest over all shards is that of the source; every index agrees; at the same layout every byte is the same.
    So however the rows are cut into row groups and files."""
    key_json, states, program = drawn
    key_schema, (parallelism, max_parallelism) = parse_struct(key_json), layout_
    with tempfile.TemporaryDirectory(prefix="cairn-test-") as temp:
        folder, storage = Path(temp), MemoryStorage()
        with (
            RocksStore(folder / "db") as store,
            mock.patch.multiple(canonical, _BATCH_ROWS=batch[0], _BATCH_BYTES=batch[1]),
        ):
            groups = fill(store, states, key_schema, program, 8)
            source = manifest_of(0, 1, 8, groups)
            files = write_canonical(
                store, source, states, key_schema, storage, work=folder / "out", savepoint="s", task=0,
                max_file_bytes=1 if many_files else canonical.MAX_FILE_BYTES,
            )  # fmt: skip
            before = dict(store.scan(b"", None))
        shards = restored(files, states, key_schema, storage, folder, parallelism, max_parallelism, 8)
        try:
            for restored_store, manifest in shards:
                assert verify_shard(restored_store, manifest, states, key_json, max_parallelism)[1] == []
                states_of = manifest.key_group_states
                assert count_bytes(restored_store, [replace(s, size_bytes=None) for s in states_of]) == states_of
            assert not many_files or 1 not in batch or all(f.rows == 1 for f in files)
            assert sum(m.digest for _, m in shards) % 2**64 == source.digest
            assert sum(m.entries for _, m in shards) == source.entries == sum(f.rows for f in files)
            if layout_ == (1, 8):
                assert dict(shards[0][0].scan(b"", None)) == before
                assert shards[0][1].key_group_states == groups
        finally:
            for restored_store, _ in shards:
                restored_store.close()
