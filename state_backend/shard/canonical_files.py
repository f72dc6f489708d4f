"""Write a shard's state to the Parquet files of a canonical savepoint, and read such files into a shard's store.

A savepoint writes the files, and a restore of the savepoint reads them. The reading shard may have other key groups
than the writing shard.

The files hold only entries. The reader computes everything else again: the positions of lists (the numbers of a list's
first element and of its next appended element), the index of timers, the index of expiry times, counts and digests. The
reader also computes the key group of each key, although the file records it: no lookup would find an entry that is
stored under a wrong key group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from state_backend.adapters.rocks import RocksStore
from state_backend.formats import paths
from state_backend.formats.arrow_columns import Array
from state_backend.formats.canonical_tables import MAX_FILE_BYTES, CanonicalFiles, read_tables
from state_backend.formats.key_columns import key_groups as key_groups_of
from state_backend.formats.types import StructType
from state_backend.ports.storage import Storage
from state_backend.shard.transfer import upload_all
from state_backend.state import layout
from state_backend.state.canonical_columns import Located, StateRows, TimerRows, check_ascending, keys_of
from state_backend.state.entry_columns import (
    changes_by_key_group,
    expiries,
    expiry_keys,
    is_expiring,
    split_timers,
    stored_keys,
    timer_index_keys,
)
from state_backend.state.stored_entries import StoredEntries
from state_backend.values.errors import CorruptFile, InvariantViolated, NotFound, StateTypeError
from state_backend.values.key_groups import KeyGroupRange
from state_backend.values.marks import CanonicalFile
from state_backend.values.records import KeyGroupState, ShardManifest, StateDescriptor

_BATCH_ROWS, _BATCH_BYTES = 131_072, 64 * 1024 * 1024
# A scan's chunk is converted to Arrow columns right after its read, while its Python objects are in the CPU's cache.
_CHUNK_ROWS, _CHUNK_BYTES = 4096, 16 * 1024 * 1024


def write_canonical(
    store: RocksStore,
    manifest: ShardManifest,
    states: Sequence[StateDescriptor],
    key_schema: StructType,
    storage: Storage,
    *,
    work: Path,
    savepoint: str,
    task: int,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> tuple[CanonicalFile, ...]:
    """Write all entries of a store, expired entries too, to canonical Parquet files, and upload the files.

    Return a `CanonicalFile` for each Parquet file. A state without entries has no file. `savepoint`, a uuid, and
    `task`, the number of the Spark task, are parts of the files' paths.
    """
    files: list[CanonicalFile] = []
    for descriptor in (*states, None):
        rows = TimerRows(key_schema) if descriptor is None else StateRows(descriptor, key_schema)
        name = layout.TIMERS_NAME if descriptor is None else descriptor.name
        state_id = layout.TIMERS if descriptor is None else descriptor.state_id
        groups = [s.key_group for s in manifest.key_group_states if s.entries.get(name)]
        if not groups:
            continue
        local = CanonicalFiles(work / str(state_id), rows.schema, max_bytes=max_file_bytes)
        for stored, entries in stored_batches(store, [layout.prefix(group, state_id) for group in groups]):
            local.write(rows.table(stored, entries))
        local.close()
        uploads = [
            (paths.canonical(savepoint, descriptor.name if descriptor else None, manifest.shard, task, n), file)
            for n, (file, _) in enumerate(local.written)
        ]
        for handle, (file, count) in zip(upload_all(storage, uploads), local.written, strict=True):
            file.unlink()
            files.append(
                CanonicalFile(
                    state=name, shard=manifest.shard, key_groups=manifest.key_groups, handle=handle, rows=count
                )
            )
    return tuple(files)


def stored_batches(store: RocksStore, prefixes: Sequence[bytes]) -> Iterator[tuple[pa.Array, pa.Array]]:
    """Yield batches (stored keys, their entries) of the stored keys that begin with one of the prefixes.

    Batches come in the order of `prefixes`. Each but the last has at least 131,072 entries or 64 MiB.
    """
    rows_of_a_chunk, bytes_of_a_chunk = min(_CHUNK_ROWS, _BATCH_ROWS), min(_CHUNK_BYTES, _BATCH_BYTES)
    chunks: list[tuple[pa.Array, pa.Array]] = []
    rows = size_bytes = 0
    for start in prefixes:
        for keys, values in store.chunks(start, layout.after(start), rows=rows_of_a_chunk, most_bytes=bytes_of_a_chunk):
            chunks.append((pa.array(keys, pa.binary()), pa.array(values, pa.binary())))
            rows, size_bytes = rows + len(keys), size_bytes + sum(column.nbytes for column in chunks[-1])
            if rows >= _BATCH_ROWS or size_bytes >= _BATCH_BYTES:
                yield _joined(chunks)
                chunks, rows, size_bytes = [], 0, 0
    if chunks:
        yield _joined(chunks)


def _joined(chunks: Sequence[tuple[pa.Array, pa.Array]]) -> tuple[pa.Array, pa.Array]:
    keys, values = zip(*chunks, strict=True)
    return pa.concat_arrays(keys), pa.concat_arrays(values)


def read_canonical(
    files: Sequence[CanonicalFile],
    states: Sequence[StateDescriptor],
    key_schema: StructType,
    storage: Storage,
    store: RocksStore,
    *,
    work: Path,
    owned: KeyGroupRange,
    max_parallelism: int,
    recorded_max_parallelism: int,
) -> tuple[KeyGroupState, ...]:
    """Read the entries of key groups in `owned` from canonical files into an empty store.

    Return the entry counts, digest and bytes of each key group that has entries.

    If the savepoint and the pipeline have the same number of key groups, only the files that have key groups of `owned`
    are read. Otherwise every file is read, because the keys belong to other key groups.
    """
    target = EntryWriter(store, key_schema, owned, max_parallelism)
    same = max_parallelism == recorded_max_parallelism
    by_state = {descriptor.name: descriptor for descriptor in states}
    for name in dict.fromkeys(f.state for f in files):
        if name != layout.TIMERS_NAME and name not in by_state:
            raise InvariantViolated(
                f"a savepoint in {storage.url} has a file of state {name!r}, which it does not declare"
            )
        rows = TimerRows(key_schema) if name == layout.TIMERS_NAME else StateRows(by_state[name], key_schema)
        last: tuple[int, bytes] | None = None
        for file in (f for f in files if f.state == name):
            if same and file.key_groups.intersect(owned) is None:
                continue
            local = work / "canonical.parquet"
            download_canonical(storage, file, local)
            where = f"{file.handle.path!r} of {storage.url}"
            for table in read_tables(local, rows.schema, owned if same else None, where):
                if table.num_rows:
                    last = target.take(rows, by_state.get(name), table, last, where, same)
            local.unlink()
    return target.stored.accounts.states()


def download_canonical(storage: Storage, file: CanonicalFile, local: Path) -> None:
    """Download a file of a canonical savepoint. If it is missing, raise `CorruptFile`."""
    try:
        storage.download(file.handle, local)
    except NotFound as error:
        raise CorruptFile(f"a file of the savepoint is missing from {storage.url}: {error}") from error


class EntryWriter:
    """Writer of entries into an empty store. Entries of key groups that the store does not own are skipped.

    For each list, the writer also stores the positions: the number of the list's first element, and the number that the
    next appended element will get. It also writes the index of timers and the index of expiry times, counts the
    entries, and computes the digests. The caller must pass the elements of a list in ascending order, in one call or in
    several calls that follow each other: the positions are computed from the element that comes first.
    """

    def __init__(self, store: RocksStore, key_schema: StructType, owned: KeyGroupRange, max_parallelism: int) -> None:
        self.stored = StoredEntries(store)
        self._key_schema, self._owned, self._max_parallelism = key_schema, owned, max_parallelism

    def take(
        self,
        rows: StateRows | TimerRows,
        descriptor: StateDescriptor | None,
        table: pa.Table,
        last: tuple[int, bytes] | None,
        where: str,
        same: bool,
    ) -> tuple[int, bytes]:
        """Write those rows of `table` whose key groups the store owns. Return (key group, key) of the table's last row.

        `rows`: The converter of the state, or of the timers (`descriptor` is None). `last`: The return value for the
        table before. `same`: The savepoint has as many key groups as the pipeline, so the recorded ones must be right.
        """
        try:
            located = rows.to_entries(table)
            hashed = key_groups_of(keys_of(table), self._key_schema, self._max_parallelism)
        except (CorruptFile, StateTypeError) as error:
            raise CorruptFile(f"{where}: {error}") from error
        recorded = np.asarray(table["key_group"].combine_chunks())
        if same and (recorded != hashed).any():
            raise CorruptFile(f"{where}: a key belongs to another key group than its row says")
        last = check_ascending(recorded, located.rests, last, where)
        mine = (hashed >= self._owned.first) & (hashed <= self._owned.last)
        if descriptor is None:
            self.put_timers(located, hashed, mine)
        else:
            self.put_entries(descriptor, located, hashed, mine)
        return last

    def put_entries(self, descriptor: StateDescriptor, located: Located, groups: Array, mine: Array) -> None:
        """Write the entries of one state for which `mine` is True. `groups`: the key group of each entry."""
        here, rests, entries = self._put(descriptor.name, descriptor.state_id, located, groups, mine)
        if not len(here):
            return
        if located.lists is not None:
            begins, (firsts, nexts) = located.lists
            kept = mine[begins]
            heads = located.rests.take(begins[kept])
            keys = [head[:-9] + layout.LIST_META for head in heads.to_pylist()]
            positions = [*map(layout.pack_positions, firsts[kept].tolist(), nexts[kept].tolist())]
            stored = stored_keys(groups[begins[kept]], descriptor.state_id, pa.array(keys, pa.binary()))
            for group, key, data in zip(groups[begins[kept]].tolist(), stored, positions, strict=True):
                self.stored.accounts.resize(group, layout.record_bytes(key, data))
            self.stored.put_many(stored, positions)
        expiring = is_expiring(entries)
        if expiring.any():
            mask = pa.array(expiring)
            times = expiries(entries.filter(mask), descriptor.name)
            self._index(expiry_keys(here[expiring], times, descriptor.state_id, rests.filter(mask)))

    def put_timers(self, located: Located, groups: Array, mine: Array) -> None:
        """Write the timers for which `mine` is True, and their index keys. `groups`: the key group of each timer."""
        here, rests, _ = self._put(layout.TIMERS_NAME, layout.TIMERS, located, groups, mine)
        if len(here):
            keys, times = split_timers(rests)
            self._index(timer_index_keys(here, times, keys))

    def _put(
        self, name: str, state_id: int, located: Located, groups: Array, mine: Array
    ) -> tuple[Array, pa.Array, pa.Array]:
        """Write and count the entries for which `mine` is True. Return (key groups, rests, entries) by key group."""
        # Sort by key group, so that each key group's digest is updated once. Stored keys begin with the key group, so
        # the store also gets its writes nearly in their order.
        places = np.flatnonzero(mine)
        places = places[np.argsort(groups[places], kind="stable")]
        here, rests, entries = groups[places], located.rests.take(places), located.entries.take(places)
        if len(places):
            nothing = pa.nulls(len(entries), pa.binary())
            for group, *changes in changes_by_key_group(name, here, rests, nothing, entries):
                self.stored.accounts.change(group, name, *changes)
            self.stored.put_many(stored_keys(here, state_id, rests), entries.to_pylist())
        return here, rests, entries

    def _index(self, keys: list[bytes]) -> None:
        self.stored.put_many(keys, [b""] * len(keys))
