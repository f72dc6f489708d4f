"""The log: all that was ever committed, as one value.

Every decision about checkpoints is a function of a ``Log``. What has been dropped stays in it as a tombstone, and
``Log.summaries`` shows retained and dropped checkpoints alike, so that no decision can depend on whether a record has been
shrunk already.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import TypeVar

import google_crc32c

from state_backend.formats import paths, record_codec
from state_backend.ports.storage import Storage
from state_backend.values.errors import CorruptFile, CorruptRecord, NotFound
from state_backend.values.handles import FileInfo
from state_backend.values.intervals import Interval
from state_backend.values.records import Content, OutputFile, Record, ShardManifest, ShardRef, SweepRecord, Tombstone

Entry = Record | SweepRecord | Tombstone
Cache = dict[str, tuple[int, Entry]]
"""Entries by path, with the generation that they were read at."""

T = TypeVar("T")
R = TypeVar("R")

_READS = 10
_THREADS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """All entries by id, ids from 1 without a gap; and which checkpoints validation refused.

    ``generations``: of the files that the entries were read from; for who rewrites them. Derived: ``summaries``, every
    checkpoint as the tombstone that stays of it (no sweeps); ``unusable``, the checkpoints that are quarantined or have a
    quarantined ancestor.
    """

    entries: Mapping[int, Entry]
    quarantined: frozenset[int] = frozenset()
    generations: Mapping[int, int] = field(default_factory=dict, compare=False)
    summaries: Mapping[int, Tombstone] = field(init=False, compare=False, repr=False)
    unusable: frozenset[int] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        summaries: dict[int, Tombstone] = {}
        unusable = set(self.quarantined)
        for checkpoint_id in sorted(self.entries):
            entry = self.entries[checkpoint_id]
            if isinstance(entry, SweepRecord):
                continue
            summary = tombstone_of(entry) if isinstance(entry, Record) else entry
            summaries[checkpoint_id] = summary
            if summary.base_id in unusable:  # a base has a lower id, so one ascending pass sees all ancestors
                unusable.add(checkpoint_id)
        object.__setattr__(self, "summaries", summaries)
        object.__setattr__(self, "unusable", frozenset(unusable))

    @property
    def head_id(self) -> int:
        """The highest id; 0 if nothing was ever committed."""
        return max(self.entries, default=0)

    def retained(self) -> dict[int, int | None]:
        """The completed checkpoints, ascending, each with the id that made it stale, if any: what the head says."""
        head = self.entries.get(self.head_id)
        return {} if head is None or isinstance(head, Tombstone) else {r.id: r.stale_by for r in head.retained}

    def completed(self) -> list[Record]:
        """The records of the completed checkpoints, ascending."""
        return [entry for id in self.retained() if isinstance(entry := self.entries.get(id), Record)]

    def dropped(self) -> list[Record]:
        """Records that are no longer retained but not yet shrunk, ascending."""
        retained = self.retained()
        return [e for i, e in sorted(self.entries.items()) if isinstance(e, Record) and i not in retained]

    def of_attempt(self, attempt: str) -> Record | Tombstone | None:
        """What an attempt committed, or None."""
        for checkpoint_id, summary in self.summaries.items():
            entry = self.entries[checkpoint_id]
            if summary.attempt == attempt and not isinstance(entry, SweepRecord):
                return entry
        return None

    def current_ids(self) -> dict[Interval, int]:
        """By exact interval, the id whose output is current: the highest, dropped or not. Only kind ``interval`` has
        output: a consolidation or a rewind replaces state, and what was published stays until an interval is run again."""
        return {t.interval: i for i, t in self.summaries.items() if t.kind == "interval" and t.interval is not None}

    def current_outputs(self) -> dict[Interval, tuple[int, tuple[OutputFile, ...]]]:
        """The published output: by interval, the id that made it and its files."""
        return {interval: (i, self.summaries[i].outputs) for interval, i in self.current_ids().items()}


def tombstone_of(record: Record) -> Tombstone:
    """What stays of a record when it is no longer retained."""
    content = record.content
    return Tombstone(
        id=record.id,
        kind=content.kind,
        interval=content.interval,
        run=content.run,
        attempt=content.attempt,
        base_id=content.base_id,
        digest=content.digest,
        watermark_ms=content.time.watermark_ms,
        descriptors_hash=descriptors_hash(content),
        reproduces=record.reproduces,
        outputs=content.outputs,
    )


def descriptors_hash(content: Content) -> str:
    """SHA-256 over the key schema and all state descriptors: equal for states that later intervals read alike."""
    described = {"key_schema": content.key_schema, "states": [asdict(state) for state in content.states]}
    return hashlib.sha256(json.dumps(described, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_log(storage: Storage, cache: Cache | None = None) -> Log:
    """The log as of now: it contains everything that was committed before the call.

    ``cache`` spares reading entries again that did not change; it belongs to one storage root.
    Raises: CorruptRecord for an entry that is missing or can't be decoded. None is skipped: a log with a hole would
    forget a commit.
    """
    for _ in range(_READS):
        log = _read_once(storage, {} if cache is None else cache)
        # While we read, others may commit, drop what our head retains, and shrink it. Then look again.
        if len(log.completed()) == len(log.retained()) and not isinstance(log.entries.get(log.head_id), Tombstone):
            return log
    raise CorruptRecord(
        f"{storage.url}: record {log.head_id} retains checkpoints that are tombstones, or is one itself, after {_READS} reads"
    )


def _read_once(storage: Storage, cache: Cache) -> Log:
    found = {i: info for info in storage.list(paths.CHECKPOINTS) if (i := paths.record_id(info.path)) is not None}
    for missing in set(range(1, max(found, default=0) + 1)) - set(found):
        # A listing may show an entry and miss an older one, if both were created meanwhile.
        info = storage.stat(paths.record(missing))
        if info is None:
            raise CorruptRecord(f"{storage.url}: {paths.record(missing)} is missing, but {max(found)} is there")
        found[missing] = info

    def read(item: tuple[int, FileInfo]) -> Entry:
        checkpoint_id, info = item
        known = cache.get(info.path)
        if known is not None and known[0] == info.generation:
            return known[1]
        entry = record_codec.decode(storage.read(info.path), info.path, Record, SweepRecord, Tombstone)
        if entry.id != checkpoint_id:
            raise CorruptRecord(f"{info.path} of {storage.url}: it says that it is record {entry.id}")
        cache[info.path] = (info.generation, entry)
        return entry

    items = sorted(found.items())
    entries = dict(zip(sorted(found), for_each(read, items), strict=True))
    marks = (paths.record_id(info.path.removeprefix(paths.QUARANTINE)) for info in storage.list(paths.QUARANTINE))
    return Log(
        entries=entries,
        quarantined=frozenset(i for i in marks if i is not None),
        generations={i: info.generation for i, info in items},
    )


def read_manifest(ref: ShardRef, storage: Storage) -> ShardManifest:
    """The manifest of a shard, inline or from its file.

    Raises: NotFound; CorruptFile if the file is not what its handle says."""
    if ref.inline is not None:
        return ref.inline
    if ref.manifest is None:
        raise CorruptRecord(f"{storage.url}: shard {ref.shard} has neither an inline manifest nor a file of one")
    data = storage.read(ref.manifest.path)
    if (len(data), google_crc32c.value(data)) != (ref.manifest.size_bytes, ref.manifest.crc32c):
        raise CorruptFile(f"{ref.manifest.path} of {storage.url} is damaged: size or crc32c differ from its handle")
    return record_codec.decode(data, ref.manifest.path, ShardManifest)


def for_each(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """The results in order; in threads where there is enough to wait for."""
    if len(items) <= _THREADS:
        return [function(item) for item in items]
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(function, items))


def state_files(records: Iterable[Record], storage: Storage, manifests: dict[str, ShardManifest]) -> set[str]:
    """Paths of all shared files, manifests included, that the states of the records need. ``manifests`` caches the files
    of manifests by path: they never change.

    Raises: NotFound if a manifest is gone, CorruptFile if one is damaged."""
    files: set[str] = set()
    todo: dict[str, ShardRef] = {}
    for record in records:
        for ref in record.content.shards:
            if ref.inline is not None:
                files.update(f.handle.path for f in ref.inline.files)
            elif ref.manifest is not None:
                todo[ref.manifest.path] = ref
    unread = [ref for path, ref in todo.items() if path not in manifests]
    for ref, manifest in zip(unread, for_each(lambda r: read_manifest(r, storage), unread), strict=True):
        assert ref.manifest is not None
        manifests[ref.manifest.path] = manifest
    for path in todo:
        files.add(path)
        files.update(f.handle.path for f in manifests[path].files)
    return files


def state_files_left(record: Record, storage: Storage, manifests: dict[str, ShardManifest]) -> set[str]:
    """As ``state_files`` for a dropped record, of which an interrupted clean-up may have deleted manifests. It deletes
    them last, so a manifest that is gone names nothing that is left."""
    files: set[str] = set()
    for ref in record.content.shards:
        try:
            manifest = manifests.get(ref.manifest.path) if ref.manifest is not None else None
            files.update(f.handle.path for f in (manifest or read_manifest(ref, storage)).files)
        except NotFound:
            continue
        if ref.manifest is not None:
            files.add(ref.manifest.path)
    return files
