"""Stored entries of one key in many checkpoints of a pipeline, read from SSTs and segments without a RocksDB store.

Checkpoints share most of their files. Each file is read once, and only the versions of the key stay in memory. To open
a RocksDB store for each checkpoint, all of its files would be written to the local disk each time.

The files of a shard have an order: a segment is newer than any SST, a later segment newer than an earlier one.
RocksDB's MANIFEST orders the SSTs: a lower level is newer, and within level 0 a higher epoch.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar

from state_backend.adapters.rocks import SST_SUFFIX
from state_backend.checkpoint.parallel import at_once
from state_backend.formats import changelog
from state_backend.formats.rocksdb_table import Span, UnknownTable, Versions, versions_in
from state_backend.ports.storage import Storage
from state_backend.shard.manifest import ssts_of
from state_backend.shard.transfer import content_of
from state_backend.values.errors import CorruptFile, NotFound
from state_backend.values.frozen import frozen
from state_backend.values.handles import Handle
from state_backend.values.records import Segment, ShardManifest

T = TypeVar("T")
Source = Handle | bytes
Stored = tuple[bytes, bytes]


@frozen
class KeyFiles:
    # For each SST, newest first: its handle (a hash for an inline SST), and its smallest and largest key.
    ssts: tuple[tuple[Source, bytes, bytes], ...]
    segments: tuple[Source, ...]


class KeyVersions:
    """The versions of one key in the files that were read so far."""

    def __init__(self, spans: Sequence[Span], storage: Storage, work: Path) -> None:
        self._spans, self._storage, self._work = spans, storage, work
        # None for an SST that only RocksDB can read.
        self._ssts: dict[Source, Versions | None] = {}
        self._segments: dict[Source, list[tuple[int, list[changelog.Pair]]]] = {}

    def files_of(self, manifest: ShardManifest) -> KeyFiles | None:
        """Return the files of a shard that may hold the key; None if only RocksDB can read the shard.

        Inline files, whose bytes the manifest holds, are read by this call already.
        """
        try:
            touched = [span for span in ssts_of(manifest) if any(span.touches(*wanted) for wanted in self._spans)]
            if sum(span.level == 0 and not span.epoch for span in touched) > 1:
                return None
            touched.sort(key=lambda span: (span.level, -span.epoch))
            handles = {f.name: f.handle for f in manifest.files}
            inline = {f.name: f.data for f in manifest.inline_files}
            ssts = []
            for span in touched:
                name = f"{span.number:06d}{SST_SUFFIX}"
                source = handles.get(name) or self._keep_sst(inline[name])
                ssts.append((source, span.smallest, span.largest))
            return KeyFiles(ssts=tuple(ssts), segments=tuple(map(self._keep_segment, manifest.segments)))
        except (CorruptFile, KeyError):
            return None

    def fetch(self, files: Iterable[KeyFiles]) -> None:
        """Read the SSTs and segments of some checkpoints that were not read before, in parallel."""
        every = [*files]
        self._fetch(self._ssts, lambda file, _: self._versions_in(file), (s for f in every for s, _, _ in f.ssts))
        self._fetch(
            self._segments,
            lambda file, path: self._blocks(io.BytesIO(file), path),
            (s for f in every for s in f.segments),
        )

    def _fetch(self, known: dict[Source, T], read: Callable[[memoryview, str], T], sources: Iterable[Source]) -> None:
        """Add what `read` returns for the content and the path of each file that is not known yet."""

        def fetched(handle: Handle) -> T:
            try:
                with content_of(self._storage, handle, self._work) as content:
                    return read(content, handle.path)
            except NotFound as error:
                raise CorruptFile(f"a file of the checkpoint is missing from {self._storage.url}: {error}") from error

        missing = dict.fromkeys(s for s in sources if isinstance(s, Handle) and s not in known)
        known.update(zip(missing, at_once(fetched, missing), strict=True))

    def forget_all_but(self, files: Iterable[KeyFiles]) -> None:
        """Forget the versions in all other files than these. Inline files stay, since they are small."""
        every = [*files]
        needed = {s for f in every for s, _, _ in f.ssts} | {s for f in every for s in f.segments}
        self._ssts = {s: v for s, v in self._ssts.items() if isinstance(s, bytes) or s in needed}
        self._segments = {s: b for s, b in self._segments.items() if isinstance(s, bytes) or s in needed}

    def read_stored(self, files: KeyFiles) -> list[Stored]:
        """Return the current entries of the key in a checkpoint's files: (stored key, value), ascending by stored key.

        `fetch` must have read the files before. Deleted entries are left out.
        """
        found: dict[bytes, bytes | None] = {}
        newer: list[tuple[bytes, bytes, int]] = []
        for source, smallest, largest in files.ssts:
            versions = self._ssts[source]
            if versions is None:
                raise UnknownTable("another format")
            # After RocksDB has split an SST, a deleted range can reach beyond the keys of its SST. RocksDB ignores that
            # part of the range; this reader can't.
            if any(start < smallest or end > largest for start, end, _ in versions.ranges):
                raise UnknownTable("a deleted range reaches beyond its SST")
            for key, sequence, value in versions.entries:
                hidden = any(start <= key < end for start, end, _ in newer)
                hidden = hidden or any(start <= key < end and sequence < at for start, end, at in versions.ranges)
                found.setdefault(key, None if hidden else value)
            newer += versions.ranges
        for segment in files.segments:
            for kind, pairs in self._segments[segment]:
                if kind == changelog.RANGES:
                    found = {k: None if any(a <= k < (b or b"") for a, b in pairs) else v for k, v in found.items()}
                else:
                    found |= dict(pairs)
        return [(key, value) for key, value in sorted(found.items()) if value is not None]

    def _keep_sst(self, data: bytes) -> bytes:
        name = blake2b(data, digest_size=16).digest()
        if name not in self._ssts:
            self._ssts[name] = self._versions_in(memoryview(data))
        return name

    def _keep_segment(self, segment: Segment) -> Source:
        if segment.data is None:
            assert segment.handle is not None
            return segment.handle
        name = blake2b(segment.data, digest_size=16).digest()
        if name not in self._segments:
            self._segments[name] = self._blocks(io.BytesIO(segment.data), "an inline segment")
        return name

    def _versions_in(self, table: memoryview) -> Versions | None:
        try:
            return versions_in(table, self._spans)
        except UnknownTable:
            return None

    def _blocks(self, file: io.BytesIO, name: str) -> list[tuple[int, list[changelog.Pair]]]:
        """Return (kind, pairs) of each block of a segment, with only the ranges or entries that concern the key."""
        blocks = []
        for kind, pairs in changelog.read_segment(file, name):
            if kind == changelog.RANGES:
                near = [
                    (a, b) for a, b in pairs if any((b or b"") > s and (e is None or a < e) for s, e in self._spans)
                ]
            else:
                near = [(k, v) for k, v in pairs if any(k >= s and (e is None or k < e) for s, e in self._spans)]
            if near:
                blocks.append((kind, near))
        return blocks
