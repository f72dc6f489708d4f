"""From an open shard to durable files: what a checkpoint uploads.

Synchronous part: capture an image (flush, hard links). Then upload: only SSTs that the base does not have, since SSTs never
change. On disk, if we stop: after the capture, a local folder that nobody refers to; during the upload, files under
``shared/<attempt>/`` that no record names and the sweeper removes. Nothing counts before the record of the commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from state_backend.adapters.rocks import RocksStore
from state_backend.formats import paths
from state_backend.ports.storage import Storage
from state_backend.shard.file_cache import FileCache
from state_backend.shard.transfer import upload_all
from state_backend.values.errors import InvariantViolated
from state_backend.values.handles import Handle
from state_backend.values.key_groups import KeyGroupRange
from state_backend.values.records import InlineFile, InSegment, KeyGroupState, LocalFile, ShardChanges, ShardManifest

INLINE_FILE_BYTES = 20 * 1024
INLINE_RECORD_BYTES, INLINE_SHARD_BYTES = 256 * 1024, 8 * 1024


def inline_budget_bytes(parallelism: int) -> int:
    """How many bytes of small files one shard keeps in its manifest: its part of a record's, and never less than 8 KiB, since of
    many shards each that changes writes a file for its manifest anyway."""
    return max(INLINE_RECORD_BYTES // parallelism, INLINE_SHARD_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotPlan:
    """What to do with each SST of an image: share the base's file, carry it inline, or upload it."""

    shared: tuple[LocalFile, ...]
    inline: tuple[str, ...]
    upload: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A shard's manifest and what writing it cost: files and bytes that are new on the storage, inlined ones included.
    ``in_segment``: the file of the last segment holds the manifest, too. ``changes``: the base's manifest lies in a file, and this is
    all that is other than there."""

    manifest: ShardManifest
    uploaded_files: int
    uploaded_bytes: int
    in_segment: InSegment | None = None
    changes: ShardChanges | None = None


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
