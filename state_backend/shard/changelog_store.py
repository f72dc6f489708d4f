"""Changelog mode: the changes of an interval become a segment beside the files of the base.

While the segments stay below the thresholds of `ChangelogOptions`, a checkpoint uploads only the new segment. Above a
threshold, it uploads the store's new SSTs instead, which contain all changes of the segments. A task that dies may
leave a segment under `shared/<attempt>/` that no record names.

Source: the idea is that of Flink's changelog state backend, which writes changes continuously and materialises now and
then.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from pathlib import Path

from state_backend.adapters.change_recorder import ChangeRecorder
from state_backend.adapters.rocks import MIB, RocksStore
from state_backend.formats import changelog, paths, record_codec
from state_backend.ports.storage import Storage
from state_backend.shard.manifest import changes_since, plan_ref
from state_backend.shard.snapshot import INLINE_FILE_BYTES, Snapshot
from state_backend.shard.transfer import upload_all
from state_backend.values.errors import InvariantViolated, UsageError
from state_backend.values.handles import Handle
from state_backend.values.records import (
    FiledShard,
    InSegment,
    KeyGroupState,
    Segment,
    ShardChanges,
    ShardManifest,
    ShardRef,
)

# 256 KiB of segments are allowed for a state of any size. Otherwise the segments of a small state would exceed
# `max_share_of_state` in every interval.
_ALWAYS_BYTES = 256 * 1024
# The most bytes of inline segments: each shard has its equal share of 12 KiB, but at least 2 KiB. A larger segment
# becomes a file.
_INLINE_SEGMENTS_BYTES, _INLINE_SEGMENT_BYTES = 12 * 1024, 2 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangelogOptions:
    """Thresholds up to which a shard's changes stay segments.

    A checkpoint writes files instead of a segment if the segments, this interval's included, would exceed one of the
    thresholds. Every restore replays all segments.

    Attributes:
        max_bytes: The most bytes of keys and values in all segments of a shard.
        max_segments: The most segments of a shard.
        max_share_of_state: The most bytes of keys and values in a shard's segments, as a share of the bytes of the
            shard's files. 256 KiB are always allowed.
    """

    max_bytes: int = 64 * MIB
    max_segments: int = 16
    max_share_of_state: float = 0.5

    def __post_init__(self) -> None:
        if self.max_bytes < 0 or self.max_segments < 0 or not self.max_share_of_state >= 0:
            raise UsageError(f"changelog thresholds can't be negative: {self}")


def changelog_limit(base: ShardManifest, options: ChangelogOptions) -> int:
    """Return the most bytes of keys and values that a shard's segments together may have, given the base's files."""
    return min(options.max_bytes, max(_ALWAYS_BYTES, int(base.files_bytes * options.max_share_of_state)))


def plan_changelog(
    base: ShardManifest, content_bytes: int | None, options: ChangelogOptions, *, most_bytes: int | None = None
) -> bool:
    """Return True if an interval's changes become a segment, and False if the checkpoint writes files.

    `content_bytes`: The size of the changes; None: they were too many to be recorded. `most_bytes`: The most bytes that
    the shard's files and segments may have together, at least 256 KiB; None: no limit. Above it the checkpoint writes
    files, because consolidation can remove obsolete bytes from files only.
    """
    held = kept_segments(base)
    return (
        content_bytes is not None
        and len(held) < options.max_segments
        and sum(s.content_bytes for s in held) + content_bytes <= changelog_limit(base, options)
        and (
            most_bytes is None
            or base.files_bytes + sum(s.size_bytes for s in held) + content_bytes <= max(most_bytes, _ALWAYS_BYTES)
        )
    )


def kept_segments(base: ShardManifest) -> tuple[Segment, ...]:
    """Return the base's segments that the next manifest keeps when a new segment is added.

    These are all segments, except a last one that is inline: its bytes lie in the manifest, not in a file. The new
    segment includes the changes of the inline segment and replaces it. Otherwise each small interval would add an
    inline segment, and after a few intervals they would not fit into the record.
    """
    return base.segments[:-1] if base.segments and base.segments[-1].data is not None else base.segments


def inline_segment_bytes(parallelism: int) -> int:
    """Return the largest size in bytes of a segment that is stored inside its shard's manifest."""
    return max(_INLINE_SEGMENTS_BYTES // parallelism, _INLINE_SEGMENT_BYTES)


class ShardChangelog:
    """Recorder of one interval's changes to one shard, from the restore until a checkpoint stores the changes."""

    def __init__(
        self,
        store: RocksStore,
        base: ShardManifest,
        folder: Path,
        options: ChangelogOptions,
        *,
        base_ref: ShardRef | None = None,
        parallelism: int = 1,
    ) -> None:
        """Begin to collect every write to the store, for the segment of this interval.

        The base's last segment may be inline: its bytes lie in the manifest, not in a file of their own. Then its
        changes are collected first, and the new segment replaces it.
        """
        folder.mkdir()
        # If the base's manifest is a file, the next record can refer to this file again.
        self._base_ref = base_ref if isinstance(base_ref, FiledShard) else None
        self._base, self._parallelism = base, parallelism
        self._segment, self._options = folder / "segment", options
        self._changes = ChangeRecorder(folder / "spilled", changelog_limit(base, options))
        for segment in base.segments[len(kept_segments(base)) :]:
            name = f"the inline segment of shard {base.shard}"
            for kind, pairs in changelog.read_segment(io.BytesIO(segment.data or b""), name):
                if kind == changelog.ENTRIES:
                    self._changes.write(pairs)
                else:
                    for start, end in pairs:
                        self._changes.delete_range(start, end or b"")
        store.recorder = self._changes

    def fits(self, most_bytes: int | None = None) -> bool:
        """Return True if the recorded changes can become a segment, and False if the checkpoint must upload SSTs.

        The answer is False if the shard's segments would exceed a threshold of `ChangelogOptions`, or if files and
        segments together would exceed `most_bytes`.
        """
        return plan_changelog(self._base, self._changes.content_bytes(), self._options, most_bytes=most_bytes)

    def append(
        self,
        storage: Storage,
        *,
        attempt: str,
        task: int,
        key_group_states: tuple[KeyGroupState, ...],
        inline_budget_bytes: int | None = None,
    ) -> Snapshot:
        """Return the base's manifest with the interval's changes as one more segment.

        If the interval changed nothing, the manifest keeps the base's segments.

        A segment of at most `inline_budget_bytes` becomes a part of the manifest. A larger segment is uploaded as a
        file. If the manifest would then be too large for the record, it is appended to the segment's file.
        """
        base, unchanged = self._base, replace(self._base, key_group_states=key_group_states)
        content_bytes = self._changes.content_bytes()
        if content_bytes is None:
            raise InvariantViolated(f"shard {base.shard} has more changes than its segments may hold")
        ranges, entries = self._changes.changes()
        with self._segment.open("xb") as file:
            count = changelog.write_segment(file, ranges, entries)
        if not count:
            return self._snapshot(unchanged, uploaded_files=0, uploaded_bytes=0)
        size_bytes = self._segment.stat().st_size
        budget_bytes = inline_segment_bytes(self._parallelism) if inline_budget_bytes is None else inline_budget_bytes
        if size_bytes <= min(budget_bytes, INLINE_FILE_BYTES):
            data = self._segment.read_bytes()
            inline = Segment(handle=None, data=data, changes=count, content_bytes=content_bytes)
            return self._snapshot(_followed_by(unchanged, inline), uploaded_files=0, uploaded_bytes=size_bytes)
        path = paths.shared(attempt, base.shard, task, 0, "log")
        # `fits_record` estimates the record's size before the upload, when the checksum is not known yet. The record
        # is JSON, so a checksum takes up to 10 decimal digits. The greatest checksum stands for the real one, so that
        # the estimate is never too small.
        handle = Handle(path=path, size_bytes=size_bytes, crc32c=2**32 - 1)
        expected = Segment(handle=handle, data=None, changes=count, content_bytes=content_bytes)
        in_segment = None
        if not self.fits_record(_followed_by(unchanged, expected)):
            path = paths.shared(attempt, base.shard, task, 1, "manifest")
            before = replace(unchanged, segments=kept_segments(base))
            with self._segment.open("r+b") as file:
                offset = changelog.append_manifest(file, record_codec.encode(before))
            in_segment = InSegment(offset=offset, changes=count, content_bytes=content_bytes)
        (handle,) = upload_all(storage, [(path, self._segment)])
        manifest = _followed_by(unchanged, replace(expected, handle=handle))
        return self._snapshot(manifest, uploaded_files=1, uploaded_bytes=handle.size_bytes, in_segment=in_segment)

    def fits_record(self, manifest: ShardManifest) -> bool:
        """Return True if the checkpoint's record has room for the manifest.

        The driver later decides by the same rule (`plan_ref`), so the worker knows the driver's decision beforehand.
        """
        changes = self._changes_to(manifest)
        kept = replace(self._base_ref, changes=changes) if self._base_ref is not None and changes is not None else None
        return plan_ref(manifest, kept, self._parallelism) is not None

    def _changes_to(self, manifest: ShardManifest) -> ShardChanges | None:
        ref = self._base_ref
        return None if ref is None else changes_since(ref.changes, self._base, manifest)

    def _snapshot(
        self, manifest: ShardManifest, *, uploaded_files: int, uploaded_bytes: int, in_segment: InSegment | None = None
    ) -> Snapshot:
        return Snapshot(
            manifest=manifest,
            uploaded_files=uploaded_files,
            uploaded_bytes=uploaded_bytes,
            in_segment=in_segment,
            changes=self._changes_to(manifest),
        )


def _followed_by(manifest: ShardManifest, segment: Segment) -> ShardManifest:
    return replace(manifest, segments=(*kept_segments(manifest), segment))
