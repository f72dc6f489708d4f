"""State of a checkpoint or a savepoint as Arrow tables. Shards are read one by one, in bounded memory, without Spark.

docs/state-table.md describes the columns.

A time outside of the calendar's range is shown as 9999-12-31T00:00:00Z or 0001-01-02T00:00:00Z (`shown_ms`). Expired
entries are left out, because processors do not see them. Rows ascend by key group and encoded key, then by user key,
position or time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from state_backend.formats.arrow_columns import arrow_type
from state_backend.formats.canonical_tables import read_tables
from state_backend.formats.evolution_columns import columns_reader
from state_backend.formats.key_columns import KeyColumns
from state_backend.formats.types import parse_struct
from state_backend.inspection.state_source import WHOLE, Part, Span, StateSource, open_shard
from state_backend.ports.storage import Storage
from state_backend.shard.canonical_files import download_canonical, stored_batches
from state_backend.state import layout
from state_backend.state.canonical_columns import StateRows, TimerRows
from state_backend.values.errors import CorruptFile
from state_backend.values.intervals import shown_ms
from state_backend.values.key_groups import KeyGroupRange
from state_backend.values.marks import CanonicalFile
from state_backend.values.records import ShardManifest, StateDescriptor

_INSTANT = pa.timestamp("ms", "UTC")
Shape = Callable[[pa.Table], Iterator[pa.Table]]


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
