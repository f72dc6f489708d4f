"""State of a checkpoint or a savepoint as Arrow tables. Shards are read one by one, in bounded memory, without Spark.

docs/state-table.md describes the columns.

A time outside of the calendar's range is shown as 9999-12-31T00:00:00Z or 0001-01-02T00:00:00Z (`shown_ms`). Expired
entries are left out, because processors do not see them. Rows ascend by key group and encoded key, then by user key,
position or time.

A read of a part of a shard fetches only the shard's manifest, its segments, and the SSTs that RocksDB opens for the
part (`needed_for`).
"""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from state_backend.adapters.open_storage import open_storage
from state_backend.adapters.rocks import SST_SUFFIX, EngineOptions, RocksStore
from state_backend.checkpoint.dropped_checkpoint import telling_drops
from state_backend.checkpoint.leases import holding
from state_backend.checkpoint.savepoints import native_manifest
from state_backend.formats.arrow_columns import arrow_type
from state_backend.formats.canonical_tables import read_tables
from state_backend.formats.evolution_columns import columns_reader
from state_backend.formats.key_columns import KeyColumns
from state_backend.formats.types import parse_struct
from state_backend.ports.storage import Storage
from state_backend.shard.canonical_files import download_canonical, stored_batches
from state_backend.shard.file_cache import FileCache
from state_backend.shard.manifest import needed_manifest, ssts_of
from state_backend.shard.restore import restore_shard
from state_backend.state import layout
from state_backend.state.canonical_columns import StateRows, TimerRows
from state_backend.values.errors import CorruptFile, UsageError
from state_backend.values.frozen import frozen
from state_backend.values.intervals import shown_ms
from state_backend.values.key_groups import KeyGroupRange, range_of
from state_backend.values.marks import CanonicalFile, Savepoint
from state_backend.values.records import Content, Record, ShardManifest, StateDescriptor
from state_backend.values.similar_names import similar_to

_INSTANT = pa.timestamp("ms", "UTC")
Span = tuple[bytes, bytes | None]
Shape = Callable[[pa.Table], Iterator[pa.Table]]


@frozen
class StateSource:
    """State of one checkpoint or savepoint."""

    url: str
    content: Content
    checkpoint_id: int
    # The savepoint; None for a checkpoint, whose `url` is the pipeline's folder.
    savepoint: Savepoint | None = None
    # The status of the checkpoint, as `cairn checkpoints` names it; None if nobody asked for it.
    status: str | None = None

    @classmethod
    def of_record(cls, url: str, record: Record) -> StateSource:
        return cls(url=url, content=record.content, checkpoint_id=record.id)

    @classmethod
    def of_savepoint(cls, url: str, savepoint: Savepoint) -> StateSource:
        return cls(url=url, content=savepoint.content, checkpoint_id=savepoint.checkpoint_id, savepoint=savepoint)

    @property
    def canonical(self) -> bool:
        return self.savepoint is not None and self.savepoint.format == "canonical"

    def __str__(self) -> str:
        what = f"checkpoint {self.checkpoint_id} of {self.content.pipeline!r}, {self.content.interval}"
        return what if self.savepoint is None else f"the {self.savepoint.format} savepoint of {what} in {self.url}"

    def descriptor(self, state: str) -> StateDescriptor | None:
        """Return the descriptor of a state by its name; None for the timers."""
        if state == layout.TIMERS_NAME:
            return None
        for descriptor in self.content.states:
            if descriptor.name == state:
                return descriptor
        known = [d.name for d in self.content.states] + [layout.TIMERS_NAME]
        raise UsageError(f"{self} has no state {state!r}{similar_to(state, known)}\nIts states: {', '.join(known)}")

    def key_groups(self, shard: int) -> KeyGroupRange:
        return range_of(shard, self.content.parallelism, self.content.max_parallelism)

    def held(self, what: str) -> AbstractContextManager[None]:
        """Hold a lease on the checkpoint while the `with` block reads its files. A savepoint needs no lease."""
        return holding(open_storage(self.url), self.checkpoint_id if self.savepoint is None else None, what)

    def files(self, shard: int, state: str) -> list[CanonicalFile]:
        """Return the files of one state in one shard of a canonical savepoint, in the order of their rows."""
        listed = self.savepoint.files if self.savepoint is not None else ()
        return [f for f in listed if (f.shard, f.state) == (shard, state)]


@frozen
class Part:
    # The key groups to read, ascending; None: all.
    key_groups: tuple[int, ...] | None = None
    # The keys to read, as (key group, encoded key), ascending; None: all. If given, `key_groups` is ignored.
    keys: tuple[tuple[int, bytes], ...] | None = None


WHOLE = Part()


def table_schema(source: StateSource, state: str) -> pa.Schema:
    descriptor = source.descriptor(state)
    fields = [pa.field("key", arrow_type(parse_struct(source.content.key_schema)), False)]
    if descriptor is not None:
        version = descriptor.versions[-1]
        fields.append(pa.field("value", arrow_type(parse_struct(version.value)), False))
        if version.user_key is not None:
            fields.append(pa.field("user_key", arrow_type(parse_struct(version.user_key)), False))
        if descriptor.kind == "list":
            fields.append(pa.field("pos", pa.int64(), False))
    fields += [pa.field("expires_at", _INSTANT), pa.field("key_group", pa.int32(), False)]
    return pa.schema([*fields, pa.field("shard", pa.int32(), False)])


def read_table(
    source: StateSource, state: str, shard: int, storage: Storage, work: Path, part: Part = WHOLE
) -> Iterator[pa.Table]:
    return (table for _, table in read_shard(source, [state], shard, storage, work, part))


def read_shard(
    source: StateSource, states: Sequence[str], shard: int, storage: Storage, work: Path, part: Part = WHOLE
) -> Iterator[tuple[str, pa.Table]]:
    """Yield the rows of several states in one shard as (state, table), state by state, with one restore of the shard.

    Raises:
        CorruptFile: The whole shard is read, and a state has another number of entries than the manifest records.
    """
    descriptors = [source.descriptor(state) for state in states]
    rows = [_rows(source, descriptor) for descriptor in descriptors]
    shapes = [_shape(source, state, shard) for state in states]
    if source.canonical:
        for state, reader, shape in zip(states, rows, shapes, strict=True):
            for file in source.files(shard, state):
                for table in _file_tables(source, reader, file, storage, work, part):
                    yield from ((state, shaped) for shaped in shape(table))
        return
    ids = [layout.TIMERS if descriptor is None else descriptor.state_id for descriptor in descriptors]
    with open_shard(source, shard, storage, work, spans=_spans(part, ids)) as (store, manifest):
        for state, state_id, reader, shape in zip(states, ids, rows, shapes, strict=True):
            found = 0
            for stored, entries in stored_batches(store, _prefixes(manifest, state, state_id, part)):
                table = reader.table(stored, entries)
                found += table.num_rows
                yield from ((state, shaped) for shaped in shape(table))
            recorded = sum(s.entries.get(state, 0) for s in manifest.key_group_states)
            if part == WHOLE and found != recorded:
                raise CorruptFile(
                    f"{source}: shard {shard} has {found} entries of state {state!r}, but its manifest says {recorded}"
                )


def _rows(source: StateSource, descriptor: StateDescriptor | None) -> StateRows | TimerRows:
    key_schema = parse_struct(source.content.key_schema)
    return TimerRows(key_schema) if descriptor is None else StateRows(descriptor, key_schema)


def _prefixes(manifest: ShardManifest, state: str, state_id: int, part: Part) -> list[bytes]:
    """Return the prefixes of stored keys to scan for one state, ascending.

    Key groups in which the state has no entry are left out.
    """
    groups = {s.key_group for s in manifest.key_group_states if s.entries.get(state)}
    if part.keys is not None:
        return [layout.prefix(group, state_id) + key for group, key in part.keys if group in groups]
    wanted = groups if part.key_groups is None else groups & {*part.key_groups}
    return [layout.prefix(group, state_id) for group in sorted(wanted)]


def _shape(source: StateSource, state: str, shard: int) -> Shape:
    """Return a function that converts tables from the columns of a canonical savepoint to those of `table_schema`."""
    descriptor, schema = source.descriptor(state), table_schema(source, state)
    now_ms = source.content.time.processing_time_ms

    def shape(table: pa.Table) -> Iterator[pa.Table]:
        if descriptor is not None:
            times = table["expires_at_ms"]
            if times.null_count < len(times):
                table = table.filter(pc.fill_null(pc.greater(times, now_ms), True))
        if not table.num_rows:
            return
        columns = {name: table[name] for name in table.column_names}
        if descriptor is not None and "value" not in columns:  # Parquet can't store this value's type.
            decode = columns_reader(descriptor.name, descriptor.versions)
            columns["value"] = decode(table["encoded_row"].combine_chunks()).to_struct_array()
        if "position" in columns:
            columns["pos"] = columns["position"]
        earliest, latest = shown_ms(layout.MIN_TIME_MS), shown_ms(layout.MAX_TIME_MS)
        times = columns["expires_at_ms"]
        times = pc.max_element_wise(pc.min_element_wise(times, latest, skip_nulls=False), earliest, skip_nulls=False)
        columns["expires_at"] = times.cast(_INSTANT)
        columns["shard"] = pa.array(np.full(table.num_rows, shard, np.int32))
        yield pa.table([columns[name] for name in schema.names], schema=schema)

    return shape


def _file_tables(
    source: StateSource, rows: StateRows | TimerRows, file: CanonicalFile, storage: Storage, work: Path, part: Part
) -> Iterator[pa.Table]:
    """Yield those rows of a canonical savepoint's Parquet file that the read asks for, one table for each row group."""
    groups = part.key_groups if part.keys is None else tuple(sorted({group for group, _ in part.keys}))
    if groups is not None and not groups:
        return
    local = work / "canonical.parquet"
    download_canonical(storage, file, local)
    reach = None if groups is None else KeyGroupRange(first=groups[0], last=groups[-1])
    keys = KeyColumns(parse_struct(source.content.key_schema))
    for table in read_tables(local, rows.schema, reach, f"{file.handle.path!r} of {storage.url}"):
        found = table
        if groups is not None:
            found = found.filter(pc.is_in(found["key_group"], pa.array(groups, pa.int32())))
        if part.keys is not None and found.num_rows:
            encoded = keys.encode(found["key"].combine_chunks().flatten())
            found = found.filter(pc.is_in(encoded, pa.array([key for _, key in part.keys], pa.binary())))
        yield found
    local.unlink()


@contextmanager
def open_shard(
    source: StateSource,
    shard: int,
    storage: Storage,
    work: Path,
    *,
    spans: Sequence[Span] | None = None,
    cache: FileCache | None = None,
) -> Iterator[tuple[RocksStore, ShardManifest]]:
    """Restore a shard into a folder below `work`, and yield the open store and the manifest of the restored files."""
    with telling_drops(storage, source.checkpoint_id if source.savepoint is None else None):
        manifest = _manifest(source, shard, storage)
        folder = work / f"shard-{shard}"
        store = None if spans is None else open_part(manifest, spans, storage, folder, cache)
        if store is None:
            store = restore_shard(manifest.key_groups, [manifest], storage, folder, EngineOptions(), cache).store
    try:
        yield store, manifest
    finally:
        store.close()


def open_part(
    manifest: ShardManifest, spans: Sequence[Span], storage: Storage, folder: Path, cache: FileCache | None
) -> RocksStore | None:
    """Open a shard with the SSTs that `needed_for` names; None if the scans of the spans need others.

    Where a range deletion covers a key, RocksDB seeks behind the range in all older files. A MANIFEST does not say
    where such a range ends, so each span is scanned once.
    """
    needed = needed_for(manifest, spans)
    store = restore_shard(manifest.key_groups, [needed], storage, folder, EngineOptions(), cache, partial=True).store
    try:
        for span in spans:
            deque(store.chunks(*span), maxlen=0)
    except BaseException as error:
        store.close()
        shutil.rmtree(folder)
        if isinstance(error, CorruptFile):
            return None
        raise
    return store


def _manifest(source: StateSource, shard: int, storage: Storage) -> ShardManifest:
    if source.savepoint is not None:
        return native_manifest(source.savepoint, shard, storage)
    manifest = needed_manifest(source.content.shards[shard], storage)
    if manifest.shard != shard or manifest.key_groups != source.key_groups(shard):
        raise CorruptFile(
            f"{source}: the manifest of shard {shard} belongs to shard {manifest.shard}, {manifest.key_groups}; expected "
            f"{source.key_groups(shard)}"
        )
    return manifest


def _spans(part: Part, state_ids: Sequence[int]) -> list[Span] | None:
    """Return the ranges of stored keys that a read needs; None if it needs all stored keys of the shard."""
    if part.keys is not None:
        behind = part.keys
    elif part.key_groups is not None:
        behind = tuple((group, b"") for group in part.key_groups)
    else:
        return None
    starts = [layout.prefix(group, state_id) + key for group, key in behind for state_id in state_ids]
    return [(start, layout.after(start)) for start in starts]


def needed_for(manifest: ShardManifest, spans: Sequence[Span]) -> ShardManifest:
    """Return the manifest without the SSTs that RocksDB does not open while it scans the spans.

    RocksDB opens all SSTs of level 0. In each deeper level, it opens the SSTs that may have a key of the span, and the
    next SST: a seek behind the last key ends there. It opens more only where a range deletion covers a key of the span.
    """
    ordered = sorted(ssts_of(manifest), key=lambda sst: (sst.level, sst.smallest, sst.largest))
    needed = set[int]()
    for level, of_level in groupby(ordered, key=lambda sst: sst.level):
        run = list(of_level)
        for start, end in spans:
            behind = next((sst for sst in run if end is not None and sst.smallest >= end), None)
            needed |= {sst.number for sst in run if level == 0 or sst is behind or sst.touches(start, end)}
    names = {f"{number:06d}{SST_SUFFIX}" for number in needed}
    return replace(manifest, files=tuple(f for f in manifest.files if f.name in names))
