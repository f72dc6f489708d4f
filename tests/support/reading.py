"""What a committed checkpoint or an open store holds, read without Spark and entry by entry."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from state_backend.adapters.open_storage import open_storage
from state_backend.adapters.rocks import EngineOptions, RocksStore
from state_backend.checkpoint.log import Log
from state_backend.formats import paths
from state_backend.formats.key_codec import KeyCodec
from state_backend.formats.schema_evolution import row_reader
from state_backend.formats.types import parse_struct
from state_backend.ports.storage import Storage
from state_backend.shard.manifest import manifest_of
from state_backend.shard.restore import restore_shard
from state_backend.state import layout
from state_backend.state.entries import StoredEntry, decode_entry
from state_backend.values.handles import handles_in
from state_backend.values.records import Record, StateDescriptor


def read_state(root: Path, record: Record, name: str, work: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Key (for maps: key and user key) -> fields of the value, of one state. ``root`` is the pipeline's folder."""
    storage = open_storage(str(root))
    descriptor = next(d for d in record.content.states if d.name == name)
    version = descriptor.versions[-1]
    schema = parse_struct(version.value)
    decode = row_reader(name, descriptor.versions)
    keys = KeyCodec(parse_struct(record.content.key_schema))
    user_keys = KeyCodec(parse_struct(version.user_key)) if version.user_key is not None else None
    found = {}
    for ref in record.content.shards:
        manifest = manifest_of(ref, storage)
        directory = work / f"{name}-{record.id}-{ref.shard}"
        restored = restore_shard(manifest.key_groups, [manifest], storage, directory, EngineOptions())
        with restored.store as store:
            for entry in read_entries(store, descriptor, keys, user_keys):
                found[entry.key + (entry.user_key or ())] = dict(zip(schema.names, decode(entry.row), strict=True))
    return found


def read_output(root: Path | str, record: Record) -> list[dict[str, Any]]:
    """The rows that a checkpoint's interval emitted, file by file. ``root`` is the pipeline's folder, or its URL."""
    storage = open_storage(str(root))
    files = (io.BytesIO(storage.read(f.handle.path)) for f in record.content.outputs)
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def read_entries(
    store: RocksStore, descriptor: StateDescriptor, keys: KeyCodec, user_keys: KeyCodec | None
) -> Iterator[StoredEntry]:
    """All entries of one state, expired ones too, by key group and key."""
    for key_group in key_groups_in(store):
        start = layout.prefix(key_group, descriptor.state_id)
        for stored_key, entry in store.scan(start, layout.after(start)):
            decoded = decode_entry(descriptor, stored_key, entry, keys, user_keys)
            if decoded is not None:
                yield decoded


def read_timers(store: RocksStore) -> Iterator[tuple[int, bytes, int]]:
    """(key group, encoded key, expiry) of all timers, by key group and key, then ascending."""
    for key_group in key_groups_in(store):
        start = layout.prefix(key_group, layout.TIMERS)
        for stored_key, data in store.scan(start, layout.after(start)):
            layout.check_timer(stored_key[3:], data)
            yield key_group, stored_key[3:-8], layout.unpack_time(stored_key[-8:])


def key_groups_in(store: RocksStore) -> Iterator[int]:
    """The key groups that have anything stored, ascending."""
    start = b""
    while (found := next(iter(store.scan(start, None)), None)) is not None:
        key_group = int.from_bytes(found[0][:2], "big")
        yield key_group
        if key_group == 0xFFFF:
            return
        start = (key_group + 1).to_bytes(2, "big")


def unnamed_files(storage: Storage, log: Log) -> set[str]:
    """What lies in the folders of state, attempts and outputs, and no checkpoint or current output names. Raises: AssertionError if
    something that one names is missing."""
    whole = [record for record in log.completed() if isinstance(record, Record)]
    named = {h.path for r in whole for ref in r.content.shards for h in handles_in(ref)}
    named |= {h.path for r in whole for ref in r.content.shards for h in manifest_of(ref, storage).handles}
    named |= {o.handle.path for _, found in log.current_outputs().values() for o in found}
    named |= {paths.prepared(r.content.attempt) for r in whole}
    folders = (paths.SHARED, paths.OUTPUT, paths.ATTEMPTS)
    files = {info.path for info in storage.list("") if info.path.startswith(folders)}
    assert named <= files, named - files
    return files - named
