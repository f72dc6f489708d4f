"""The state of a checkpoint or a savepoint, as a user names it, and its shards as open stores.

A read of a part of a shard fetches only the manifest, the segments, and the SSTs that RocksDB opens (`needed_for`).
"""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.adapters.rocks import SST_SUFFIX, EngineOptions, RocksStore
from state_backend.checkpoint.dropped_checkpoint import telling_drops
from state_backend.checkpoint.find_checkpoint import find_checkpoint
from state_backend.checkpoint.leases import holding
from state_backend.checkpoint.location import Location
from state_backend.checkpoint.prepared_attempts import load_prepared
from state_backend.checkpoint.savepoints import native_manifest, read_savepoint
from state_backend.formats import paths
from state_backend.formats.types import parse_struct
from state_backend.inspection.describe import state_of
from state_backend.ports.storage import Storage
from state_backend.shard.file_cache import FileCache
from state_backend.shard.manifest import needed_manifest, ssts_of
from state_backend.shard.restore import restore_shard
from state_backend.state import layout
from state_backend.values.errors import CorruptFile, UsageError
from state_backend.values.frozen import frozen
from state_backend.values.key_groups import KeyGroupRange, range_of
from state_backend.values.marks import CanonicalFile, Savepoint
from state_backend.values.records import Content, Record, ShardManifest, StateDescriptor
from state_backend.values.similar_names import similar_to

Span = tuple[bytes, bytes | None]


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
        """Return the descriptor of a state by its name, and None for `$timers`. An unknown name raises `UsageError`."""
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


def find_state(
    checkpoint: str = "latest",
    *,
    root: str | None = None,
    pipeline: str | None = None,
    path: str | None = None,
    attempt: str | None = None,
) -> StateSource:
    """Return the state that a user names: a checkpoint of a pipeline, a savepoint, or a prepared attempt.

    `path`: The folder of a pipeline or savepoint. None: `root` and `pipeline` name the folder; a `checkpoint` with "/"
    is such a path. `attempt`: The uuid of a prepared attempt, which is taken instead of `checkpoint`.
    """
    if path is None and "/" in checkpoint:
        path, checkpoint = checkpoint, "latest"
    if path is None:
        if root is None or pipeline is None:
            raise UsageError(
                "no state is named\nGive root and pipeline, or the path of a pipeline's folder or of a savepoint"
            )
        path = join_url(root, pipeline)
    else:
        storage = open_storage(path)
        if storage.stat(paths.record(1)) is not None:
            pipeline = pipeline or path.rstrip("/").rpartition("/")[2]
        elif pipeline is None or storage.stat(paths.SAVEPOINT_RECORD) is not None:
            return StateSource.of_savepoint(path, read_savepoint(storage))
        else:
            path = join_url(path, pipeline)
    at = Location(root=path.rstrip("/").rpartition("/")[0], pipeline=pipeline, storage=open_storage(path))
    if attempt is not None:
        return StateSource(url=path, content=load_prepared(at, attempt).content, checkpoint_id=0)
    log, record = find_checkpoint(at, checkpoint)
    return replace(StateSource.of_record(path, record), status=state_of(log, record))


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
    """Restore a shard below `work`. Yield the open store and the shard's manifest. `spans`: what is read; None: all."""
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
    """Open a shard with the SSTs that `needed_for` names. Return None if a scan of the spans needs other SSTs.

    Where a range deletion covers a key, RocksDB seeks behind the range in all older files. A MANIFEST does not say
    where such a range ends, so each span is scanned once to find out.
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


@contextmanager
def fill_store(
    source: StateSource, owned: KeyGroupRange, max_parallelism: int, storage: Storage, work: Path
) -> Iterator[RocksStore]:
    """Yield a store with the state of a canonical savepoint, limited to `owned` of `max_parallelism` key groups."""
    from state_backend.shard.canonical_files import read_canonical  # imports NumPy and Arrow, needed only here

    content, savepoint = source.content, source.savepoint
    with RocksStore(work / f"filled-{owned.first}") as store:
        read_canonical(
            savepoint.files if savepoint is not None else (),
            content.states,
            parse_struct(content.key_schema),
            storage,
            store,
            work=work,
            owned=owned,
            max_parallelism=max_parallelism,
            recorded_max_parallelism=content.max_parallelism,
        )
        yield store
