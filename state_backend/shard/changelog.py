"""Changelog mode: an interval's changes become a segment beside the files of the base, and nothing is captured.

That goes on until segments outgrow a threshold; then the image is taken as ever, and holds what they said. On disk, if we stop: a
segment under ``shared/<attempt>/`` that no record names.

Source: the idea is that of Flink's changelog state backend, which writes changes continuously and materialises now and then.
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

# Segments of so many bytes are allowed whatever the share of the state: else a small state would write files in every interval.
_ALWAYS_BYTES = 256 * 1024
# Room for inline segments: 12 KiB per record, at least 2 KiB per shard. A larger segment becomes a file.
_INLINE_SEGMENTS_BYTES, _INLINE_SEGMENT_BYTES = 12 * 1024, 2 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangelogOptions:
    """How long a shard's changes stay segments. A checkpoint writes files instead if with its own changes there would be
    more than ``max_segments``, or more bytes of keys and values in them than ``max_bytes`` or than ``max_share_of_state``
    of the bytes of the shard's files (256 KiB are always allowed by the latter). Every restore replays what there is."""

    max_bytes: int = 64 * MIB
    max_segments: int = 16
    max_share_of_state: float = 0.5

    def __post_init__(self) -> None:
        if self.max_bytes < 0 or self.max_segments < 0 or not self.max_share_of_state >= 0:
            raise UsageError(f"thresholds of a changelog can't be less than nothing: {self}")


def changelog_limit(base: ShardManifest, options: ChangelogOptions) -> int:
    """The most bytes of keys and values that segments over the base's files may have, all together."""
    return min(options.max_bytes, max(_ALWAYS_BYTES, int(base.files_bytes * options.max_share_of_state)))


def plan_changelog(
    base: ShardManifest, content_bytes: int | None, options: ChangelogOptions, *, most_bytes: int | None = None
) -> bool:
    """Whether an interval's changes become a segment; else the checkpoint writes files. ``content_bytes``: of the changes,
    and of an inline segment that they take over; None: more than the limit. ``most_bytes``: for files and segments together, since
    only files can be rewritten without what is obsolete; 256 KiB are always allowed."""
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
    """Those that a next segment follows. An inline one is taken over by it: else a few small intervals would fill the
    record, and from then on each would need a file."""
    return base.segments[:-1] if base.segments and base.segments[-1].data is not None else base.segments


def inline_segment_bytes(parallelism: int) -> int:
    """How large a segment may be that travels in its shard's manifest."""
    return max(_INLINE_SEGMENTS_BYTES // parallelism, _INLINE_SEGMENT_BYTES)


class ShardChangelog:
    """What an interval changes in one shard, from the restore on until it becomes a segment, or is given up for files."""

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
        """Sets the store's recorder, which begins with the inline segment that the base ends with.

        base: the shard as it was restored; a segment is added to it. ``folder`` must not exist. ``base_ref``: what the record of the base
        says of this very shard; None for a start from nothing. ``parallelism`` divides the record's room among shards.
        """
        folder.mkdir()
        # Where the base's manifest lies in a file, the next record can name that file again.
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
        """Whether what changed so far becomes a segment; `plan_changelog` has the rule."""
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
        """The base with one more segment, if anything changed; inline if it fits the budget (by default `inline_segment_bytes`). A segment
        in a file takes the manifest along if that would need another.

        Raises: InvariantViolated if it does not fit.
        """
        base, unchanged = self._base, replace(self._base, key_group_states=key_group_states)
        content_bytes = self._changes.content_bytes()
        if content_bytes is None:
            raise InvariantViolated(f"shard {base.shard} changed more than its segments may hold")
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
        # Its checksum is not known yet; this one is as long as any.
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
        """Whether the record has room for what this manifest says; the driver, which has the same rule, will find it too."""
        changes = self._changes_to(manifest)
        kept = replace(self._base_ref, changes=changes) if self._base_ref is not None and changes is not None else None
        return plan_ref(manifest, kept, self._parallelism) is not None

    def _changes_to(self, manifest: ShardManifest) -> ShardChanges | None:
        ref = self._base_ref
        return None if ref is None else changes_since(ref.changes, self._base, manifest)

    def _snapshot(
        self,
        manifest: ShardManifest,
        *,
        uploaded_files: int,
        uploaded_bytes: int,
        in_segment: InSegment | None = None,
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
