"""Manifests and the refs of records to them. Apart from ``restore``, since whoever only counts files needs no RocksDB."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import google_crc32c

from state_backend.formats import changelog, paths, record_codec
from state_backend.ports.storage import Storage
from state_backend.values.errors import CorruptFile, NotFound
from state_backend.values.handles import Handle
from state_backend.values.records import (
    FiledShard,
    InlineShard,
    InSegment,
    KeyGroupState,
    Segment,
    ShardChanges,
    ShardManifest,
    ShardRef,
)

# Manifests lie in the record while all of them together stay below this; else each is a file of its own, and in the record is
# what changed since it was written, while that stays below this.
INLINE_MANIFESTS_BYTES = 40 * 1024


def write_manifests(
    manifests: Sequence[ShardManifest], attempt: str, storage: Storage, *, task: int = 0
) -> tuple[ShardRef, ...]:
    """What a record says of an attempt's shards, none of which it shares with a checkpoint before. ``task`` is the number in the
    names of the files; a try that finds files of an earlier one takes another."""
    encoded = [record_codec.encode(m) for m in manifests]
    if sum(map(len, encoded)) <= INLINE_MANIFESTS_BYTES:
        return tuple(InlineShard(shard=m.shard, inline=m) for m in manifests)
    handles = [
        storage.create(paths.shared(attempt, m.shard, task, 0, "manifest"), data)
        for m, data in zip(manifests, encoded, strict=True)
    ]
    return tuple(FiledShard(shard=m.shard, manifest=h) for m, h in zip(manifests, handles, strict=True))


def manifest_of(ref: ShardRef, storage: Storage) -> ShardManifest:
    """The manifest, inline or from its file, verified, with what changed since it was written.

    Raises: NotFound if the file is gone; CorruptFile or CorruptRecord, naming it, if it is not what was written.
    """
    if ref.inline is not None:
        return ref.inline
    handle = ref.manifest
    if ref.in_segment is not None:
        manifest = _manifest_in(ref.in_segment, handle, storage)
    else:
        data = storage.read(handle.path)
        crc32c = google_crc32c.value(data)
        if len(data) != handle.size_bytes or crc32c != handle.crc32c:
            raise CorruptFile(
                f"{handle.path}: {len(data)} bytes, crc32c {crc32c:08x}; expected {handle.size_bytes} bytes, "
                f"{handle.crc32c:08x}; put it back from a copy"
            )
        manifest = record_codec.decode(data, handle.path, ShardManifest)
    return changed(manifest, ref.changes) if ref.changes is not None else manifest


def needed_manifest(ref: ShardRef, storage: Storage) -> ShardManifest:
    """Like `manifest_of`, but for restores. Raises: CorruptFile, not NotFound, if the file is gone."""
    try:
        return manifest_of(ref, storage)
    except NotFound as error:
        path = ref.manifest.path if ref.manifest is not None else "inline"
        raise CorruptFile(
            f"the manifest of shard {ref.shard}, {path}, is missing from {storage.url}; put it back from a copy"
        ) from error


def _manifest_in(where: InSegment, handle: Handle, storage: Storage) -> ShardManifest:
    """The manifest at the end of a segment's file. It can't name the file that it lies in, so that segment is added here. The rest
    of the file is not read.

    Raises: CorruptFile if a checksum is wrong, or the file does not end where the manifest does.
    """
    tail = storage.read(handle.path, offset=where.offset)
    if where.offset + len(tail) != handle.size_bytes:
        raise CorruptFile(
            f"{handle.path}: {where.offset + len(tail)} bytes, expected {handle.size_bytes}; its manifest begins at {where.offset}"
        )
    manifest = record_codec.decode(changelog.read_manifest(tail, handle.path), handle.path, ShardManifest)
    segment = Segment(handle=handle, data=None, changes=where.changes, content_bytes=where.content_bytes)
    return replace(manifest, segments=(*manifest.segments, segment))


def changed(manifest: ShardManifest, changes: ShardChanges) -> ShardManifest:
    """The manifest as it is after the changes."""
    states = {s.key_group: s for s in manifest.key_group_states} | {s.key_group: s for s in changes.key_group_states}
    left = tuple(state for _, state in sorted(states.items()) if state.entries)
    return replace(manifest, segments=changes.segments, key_group_states=left)


def changes_since(earlier: ShardChanges | None, base: ShardManifest, now: ShardManifest) -> ShardChanges | None:
    """The changes from a file that became ``base`` by the ``earlier`` ones to ``now``; None if more than those changed."""
    if replace(now, segments=base.segments, key_group_states=base.key_group_states) != base:
        return None
    states = {s.key_group: s for s in earlier.key_group_states} if earlier is not None else {}
    before = {s.key_group: s for s in base.key_group_states}
    after = {s.key_group: s for s in now.key_group_states}
    for key_group in before.keys() | after.keys():
        state = after.get(key_group) or KeyGroupState(key_group=key_group, entries={}, digest=0)
        if state != before.get(key_group):
            states[key_group] = state
    return ShardChanges(segments=now.segments, key_group_states=tuple(state for _, state in sorted(states.items())))


def plan_ref(manifest: ShardManifest, kept: FiledShard | None, parallelism: int) -> ShardRef | None:
    """What a record says of a shard within that shard's equal part of the room for manifests, so that a worker knows it as well as the
    driver; None: it needs a file. ``kept``: the ref to its manifest's file and what changed since, if only that did."""
    room_bytes = INLINE_MANIFESTS_BYTES // parallelism
    if kept is not None and changes_bytes(kept, manifest) <= room_bytes:
        return kept
    if len(record_codec.encode(manifest)) <= room_bytes:
        return InlineShard(shard=manifest.shard, inline=manifest)
    return None


def changes_bytes(ref: FiledShard, manifest: ShardManifest) -> int:
    """About what the ref's changes take in a record."""
    if ref.changes is None:
        return 0
    states, segments = ref.changes.key_group_states, ref.changes.segments
    changes = replace(manifest, files=(), inline_files=(), segments=segments, key_group_states=states)
    return len(record_codec.encode(changes))
