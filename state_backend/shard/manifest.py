"""Read and write the manifests of shards, and their refs.

A ref is the part of a checkpoint's record that leads to the manifest of one shard. It holds the manifest itself
(inline), or names the manifest's file and lists the changes since the file was written.

This module is separate from `restore`, because code that only lists files should not import RocksDB.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from state_backend.formats import changelog, paths, record_codec
from state_backend.formats.rocksdb_manifest import SstSpan, live_ssts, mentions
from state_backend.ports.storage import Storage
from state_backend.shard.transfer import read_verified
from state_backend.state.layout import key_group_bounds
from state_backend.values.errors import CorruptFile, NotFound
from state_backend.values.handles import Handle
from state_backend.values.records import (
    FiledShard,
    InlineFile,
    InlineShard,
    InSegment,
    KeyGroupState,
    Segment,
    ShardChanges,
    ShardManifest,
    ShardRef,
)

# A record may hold 40 KiB of manifests. If the manifests of all shards together fit, the record holds all of them.
# Otherwise each shard gets an equal share of the 40 KiB. For each shard, the record holds the changes since the shard's
# last manifest file if they fit into the share, else the whole manifest if it fits. If neither fits, the shard's
# manifest becomes a new file, which the record names.
INLINE_MANIFESTS_BYTES = 40 * 1024


def write_manifests(
    manifests: Sequence[ShardManifest], attempt: str, storage: Storage, *, task: int = 0
) -> tuple[ShardRef, ...]:
    """Store a fork's manifests, and return refs to them for the fork's first record.

    If all manifests together take at most 40 KiB, the refs contain the manifests. Otherwise this function creates a
    file for each manifest, because the fork's pipeline has no older manifest files.
    """
    encoded = [record_codec.encode(m) for m in manifests]
    if sum(map(len, encoded)) <= INLINE_MANIFESTS_BYTES:
        return tuple(InlineShard(shard=m.shard, inline=m) for m in manifests)
    handles = [
        storage.create(paths.shared(attempt, m.shard, task, 0, "manifest"), data)
        for m, data in zip(manifests, encoded, strict=True)
    ]
    return tuple(FiledShard(shard=m.shard, manifest=h) for m, h in zip(manifests, handles, strict=True))


def manifest_of(ref: ShardRef, storage: Storage) -> ShardManifest:
    """Return the manifest that a ref leads to: inline or from its file, with the ref's changes applied."""
    if ref.inline is not None:
        return ref.inline
    handle = ref.manifest
    if ref.in_segment is not None:
        manifest = _manifest_in(ref.in_segment, handle, storage)
    else:
        manifest = record_codec.decode(read_verified(storage, handle), handle.path, ShardManifest)
    return apply_changes(manifest, ref.changes) if ref.changes is not None else manifest


def needed_manifest(ref: ShardRef, storage: Storage) -> ShardManifest:
    """Return the manifest that a ref leads to. If the manifest's file is missing, raise `CorruptFile`."""
    try:
        return manifest_of(ref, storage)
    except NotFound as error:
        path = ref.manifest.path if ref.manifest is not None else "inline"
        raise CorruptFile(
            f"the manifest of shard {ref.shard}, {path}, is missing from {storage.url}; put it back from a copy"
        ) from error


def _manifest_in(where: InSegment, handle: Handle, storage: Storage) -> ShardManifest:
    """Read the manifest at the end of a segment's file, and add this segment to it.

    The stored manifest can't name the segment's file, because it is a part of this file. Only the bytes from the
    manifest's offset on are read.
    """
    tail = storage.read(handle.path, offset=where.offset)
    if where.offset + len(tail) != handle.size_bytes:
        raise CorruptFile(
            f"{handle.path}: {where.offset + len(tail)} bytes, expected {handle.size_bytes} with a manifest at {where.offset}; put it back from a copy"
        )
    manifest = record_codec.decode(changelog.read_manifest(tail, handle.path), handle.path, ShardManifest)
    segment = Segment(handle=handle, data=None, changes=where.changes, content_bytes=where.content_bytes)
    return replace(manifest, segments=(*manifest.segments, segment))


def ssts_of(manifest: ShardManifest) -> tuple[SstSpan, ...]:
    """Return the SSTs of a shard, as RocksDB's MANIFEST describes them. A shard that never had an entry has none."""
    named = ((f"{file.name} of shard {manifest.shard}", file.data) for file in _rocksdb_manifests(manifest))
    return tuple(sst for name, log in named for sst in live_ssts(log, name))


def may_hold_group(manifest: ShardManifest, key_group: int) -> bool:
    """Return True if the shard's files may have entries of a key group.

    Either the group belongs to the shard, or its SSTs still contain the group from the time before a change of the
    parallelism.
    """
    bounds = key_group_bounds(key_group, key_group)
    return key_group in manifest.key_groups or any(sst.touches(*bounds) for sst in ssts_of(manifest))


def mentions_key(manifest: ShardManifest, key: bytes) -> bool:
    """Return True if RocksDB's MANIFEST contains the key, even if only in its entry of a deleted SST."""
    return any(mentions(file.data, file.name, key) for file in _rocksdb_manifests(manifest))


def _rocksdb_manifests(manifest: ShardManifest) -> list[InlineFile]:
    return [file for file in manifest.inline_files if file.name.startswith("MANIFEST-")]


def apply_changes(manifest: ShardManifest, changes: ShardChanges) -> ShardManifest:
    """Return the manifest with the changes applied. Key groups that became empty are left out."""
    states = {s.key_group: s for s in manifest.key_group_states} | {s.key_group: s for s in changes.key_group_states}
    left = tuple(state for _, state in sorted(states.items()) if state.entries)
    return replace(manifest, segments=changes.segments, key_group_states=left)


def changes_since(earlier: ShardChanges | None, base: ShardManifest, now: ShardManifest) -> ShardChanges | None:
    """Return the changes that a new record must list so that it can name an old manifest file of the shard again.

    The base's record names a manifest file, and lists the changes since that file was written (`earlier`). This
    function adds the changes from `base` to `now`. None if the shard's files changed too.
    """
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
    """Return a ref that needs no new file, or None if the manifest must be written as a file.

    A ref without a new file must fit the shard's equal part of the 40 KiB that a record has for manifests. The part
    depends on `parallelism` alone, so a worker and the driver come to the same result.

    Returns `kept` if its changes fit; otherwise the inline manifest if that fits; otherwise None.
    """
    room_bytes = INLINE_MANIFESTS_BYTES // parallelism
    if kept is not None and changes_bytes(kept, manifest) <= room_bytes:
        return kept
    if len(record_codec.encode(manifest)) <= room_bytes:
        return InlineShard(shard=manifest.shard, inline=manifest)
    return None


def changes_bytes(ref: FiledShard, manifest: ShardManifest) -> int:
    """Estimate the bytes that `ref.changes` takes in a record; 0 if it is None.

    To estimate them, this function encodes a copy of `manifest`. The copy lists no files, and has the segments and
    key-group states of `ref.changes` in place of its own.
    """
    if ref.changes is None:
        return 0
    states, segments = ref.changes.key_group_states, ref.changes.segments
    changes = replace(manifest, files=(), inline_files=(), segments=segments, key_group_states=states)
    return len(record_codec.encode(changes))
