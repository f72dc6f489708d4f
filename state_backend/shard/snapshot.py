"""From an open shard to durable files: what a checkpoint uploads.

Synchronous part: capture an image (flush, hard links). Then upload: only SSTs that the base does not have, since SSTs never
change. On disk, if we stop: after the capture, a local folder that nobody refers to; during the upload, files under
``shared/<attempt>/`` that no record names and the sweeper removes. Nothing counts before the record of the commit.

In changelog mode nothing is captured: the interval's changes become a segment beside the files of the base, until segments
outgrow a threshold; then the image is taken as ever, and holds what they said. Source: the idea is that of Flink's
changelog state backend, which writes changes continuously and materialises now and then.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from state_backend.adapters.change_recorder import ChangeRecorder
from state_backend.adapters.rocks import MIB, RocksStore
from state_backend.formats import changelog, paths, record_codec
from state_backend.ports.storage import Storage
from state_backend.shard.file_cache import FileCache
from state_backend.shard.transfer import upload_all
from state_backend.values.errors import InvariantViolated, UsageError
from state_backend.values.handles import Handle
from state_backend.values.key_groups import KeyGroupRange
from state_backend.values.records import InlineFile, InSegment, KeyGroupState, LocalFile, Segment, ShardManifest

INLINE_FILE_BYTES = 20 * 1024
INLINE_RECORD_BYTES, INLINE_SHARD_BYTES = 256 * 1024, 8 * 1024
# So that a state that is small yet does not write files in every interval.
_ALWAYS_BYTES = 256 * 1024


def inline_budget_bytes(parallelism: int) -> int:
    """How many bytes of small files one shard keeps in its manifest: its part of a record's, and never less than 8 KiB, since of
    many shards each that changes writes a file for its manifest anyway."""
    return max(INLINE_RECORD_BYTES // parallelism, INLINE_SHARD_BYTES)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotPlan:
    """What to do with each SST of an image: share the base's file, carry it inline, or upload it."""

    shared: tuple[LocalFile, ...]
    inline: tuple[str, ...]
    upload: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A shard's manifest and what writing it cost: files and bytes that are new on the storage, inlined ones included.
    ``in_segment``: the file of the last segment holds the manifest, too."""

    manifest: ShardManifest
    uploaded_files: int
    uploaded_bytes: int
    in_segment: InSegment | None = None


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


def record_changes(store: RocksStore, base: ShardManifest, folder: Path, options: ChangelogOptions) -> ChangeRecorder:
    """Sets the store's recorder, which begins with the inline segment that the base ends with. ``folder`` must not exist."""
    recorder = ChangeRecorder(folder, changelog_limit(base, options))
    for segment in base.segments[len(kept_segments(base)) :]:
        name = f"the inline segment of shard {base.shard}"
        for kind, pairs in changelog.read_segment(io.BytesIO(segment.data or b""), name):
            if kind == changelog.ENTRIES:
                recorder.write(pairs)
            else:
                for start, end in pairs:
                    recorder.delete_range(start, end or b"")
    store.recorder = recorder
    return recorder


def append_segment(
    changes: ChangeRecorder,
    storage: Storage,
    *,
    base: ShardManifest,
    local: Path,
    attempt: str,
    task: int,
    key_group_states: tuple[KeyGroupState, ...],
    inline_budget_bytes: int,
    fits_record: Callable[[ShardManifest], bool] = lambda manifest: True,
) -> Snapshot:
    """The base with one more segment, if anything changed; inline if it fits the budget. ``local``: a file to write it to,
    which must not exist. A segment in a file takes the manifest along if that would need another: ``fits_record`` says so of a
    manifest whose last segment has a handle as long as the one to come."""
    unchanged = replace(base, key_group_states=key_group_states)
    content_bytes = changes.content_bytes()
    if content_bytes is None:
        raise InvariantViolated(f"shard {base.shard} changed more than its segments may hold")
    ranges, entries = changes.changes()
    with local.open("xb") as file:
        count = changelog.write_segment(file, ranges, entries)
    if not count:
        return Snapshot(manifest=unchanged, uploaded_files=0, uploaded_bytes=0)
    size_bytes = local.stat().st_size
    inline = size_bytes <= min(inline_budget_bytes, INLINE_FILE_BYTES)
    if inline:
        segment = Segment(handle=None, data=local.read_bytes(), changes=count, content_bytes=content_bytes)
        manifest = replace(unchanged, segments=(*kept_segments(base), segment))
        return Snapshot(manifest=manifest, uploaded_files=0, uploaded_bytes=size_bytes)
    path = paths.shared(attempt, base.shard, task, 0, "log")
    expected = Segment(
        handle=Handle(path=path, size_bytes=size_bytes, crc32c=2**32 - 1),
        data=None,
        changes=count,
        content_bytes=content_bytes,
    )
    in_segment = None
    if not fits_record(replace(unchanged, segments=(*kept_segments(base), expected))):
        path = paths.shared(attempt, base.shard, task, 1, "manifest")
        before = replace(unchanged, segments=kept_segments(base))
        with local.open("r+b") as file:
            offset = changelog.append_manifest(file, record_codec.encode(before))
        in_segment = InSegment(offset=offset, changes=count, content_bytes=content_bytes)
    (handle,) = upload_all(storage, [(path, local)])
    segment = replace(expected, handle=handle)
    return Snapshot(
        manifest=replace(unchanged, segments=(*kept_segments(base), segment)),
        uploaded_files=1,
        uploaded_bytes=handle.size_bytes,
        in_segment=in_segment,
    )


def plan_snapshot(
    sizes: dict[str, int], opened: Sequence[LocalFile], *, full: bool, inline_budget_bytes: int
) -> SnapshotPlan:
    """``sizes``: the image's SSTs by name. ``opened``: the files that this very store was opened from.

    A name is shared only with the file that the store was opened from under that name: RocksDB never gives a number twice
    within one store, but two stores opened from one checkpoint both go on at the same number. ``full`` shares nothing.
    """
    known = {} if full else {f.name: f for f in opened}
    shared, inline, upload = [], [], []
    for name, size_bytes in sorted(sizes.items()):
        base = known.get(name)
        if base is not None:
            if base.handle.size_bytes != size_bytes:
                raise InvariantViolated(
                    f"{name} has {size_bytes} bytes, but {base.handle.path} has {base.handle.size_bytes}"
                )
            shared.append(base)
        elif size_bytes <= INLINE_FILE_BYTES and size_bytes <= inline_budget_bytes:
            inline.append(name)
            inline_budget_bytes -= size_bytes
        else:
            upload.append(name)
    return SnapshotPlan(shared=tuple(shared), inline=tuple(inline), upload=tuple(upload))


def take_snapshot(
    store: RocksStore,
    storage: Storage,
    *,
    image: Path,
    attempt: str,
    shard: int,
    task: int,
    key_groups: KeyGroupRange,
    key_group_states: tuple[KeyGroupState, ...],
    opened: Sequence[LocalFile],
    opened_inline: frozenset[str],
    full: bool,
    inline_budget_bytes: int,
    cache: FileCache | None = None,
) -> Snapshot:
    """Captures the store into the folder ``image`` and uploads what the base lacks; ``cache`` keeps it for this host's next
    interval. ``opened_inline``: names of SSTs that the base carried inline; carrying them on writes nothing new but counts
    against the budget."""
    ssts, small = store.capture(image)
    sizes = {f.name: f.stat().st_size for f in ssts}
    plan = plan_snapshot(sizes, opened, full=full, inline_budget_bytes=inline_budget_bytes)
    uploads = [(paths.shared(attempt, shard, task, n, "sst"), image / name) for n, name in enumerate(plan.upload)]
    handles: list[Handle] = upload_all(storage, uploads)
    if cache is not None and handles:
        cache.keep(storage.url, [(handle, image / name) for name, handle in zip(plan.upload, handles, strict=True)])
    new = [LocalFile(name=name, handle=handle) for name, handle in zip(plan.upload, handles, strict=True)]
    inline = [InlineFile(name=name, data=(image / name).read_bytes()) for name in plan.inline]
    metadata = [InlineFile(name=f.name, data=f.read_bytes()) for f in small]
    fresh = [f for f in inline if f.name not in opened_inline]
    return Snapshot(
        manifest=ShardManifest(
            shard=shard,
            key_groups=key_groups,
            files=tuple(sorted([*plan.shared, *new], key=lambda f: f.name)),
            inline_files=tuple(sorted([*inline, *metadata], key=lambda f: f.name)),
            segments=(),
            key_group_states=key_group_states,
        ),
        uploaded_files=len(new),
        uploaded_bytes=sum(h.size_bytes for h in handles) + sum(len(f.data) for f in [*fresh, *metadata]),
    )
