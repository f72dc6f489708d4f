"""Upload an open shard's state as durable files: the snapshot of a checkpoint.

1. Capture an image of the store, a folder of hard links to its files, after a flush. The caller must not write to the
   store during the capture. A crash leaves a local folder that nothing refers to.
2. Upload the SSTs that the base does not have. SSTs never change, so the manifest refers to the base's files for all
   others. A crash leaves files under `shared/<attempt>/` that no record names, and `cairn sweep` deletes them.

The state counts only when a record names the files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from state_backend.adapters.rocks import RocksStore
from state_backend.formats import paths
from state_backend.ports.storage import Storage
from state_backend.shard.file_cache import FileCache
from state_backend.shard.transfer import upload_all
from state_backend.values.errors import InvariantViolated
from state_backend.values.frozen import frozen
from state_backend.values.handles import Handle
from state_backend.values.key_groups import KeyGroupRange
from state_backend.values.records import InlineFile, InSegment, KeyGroupState, LocalFile, ShardChanges, ShardManifest

INLINE_FILE_BYTES = 20 * 1024
INLINE_RECORD_BYTES, INLINE_SHARD_BYTES = 256 * 1024, 8 * 1024


def inline_budget_bytes(parallelism: int) -> int:
    """Return the bytes of small files that one shard's manifest may carry inline.

    The budget is the shard's equal share of 256 KiB, but at least 8 KiB. With more than 32 shards, the sum may exceed
    256 KiB: then each changed shard writes its manifest as a file, so the inline files do not make the record larger.
    """
    return max(INLINE_RECORD_BYTES // parallelism, INLINE_SHARD_BYTES)


@frozen
class SnapshotPlan:
    """SSTs of a store, by what happens to each: the base's file is shared, or the SST is stored inline or uploaded."""

    shared: tuple[LocalFile, ...]
    # The names of SSTs whose bytes are stored in the manifest itself.
    inline: tuple[str, ...]
    upload: tuple[str, ...]


@frozen
class Snapshot:
    """Manifest of a shard, and the cost of writing it."""

    manifest: ShardManifest
    uploaded_files: int
    uploaded_bytes: int
    # The position of the manifest in the newest segment's file; None if the manifest is stored elsewhere.
    in_segment: InSegment | None = None
    # Changes since the manifest file that the base's record names. The new record names that file again and adds the
    # changes, so the shard writes no new manifest file. None if the base's record names no manifest file of the shard,
    # or if more than segments and key-group states (counts and digests) changed, such as a new SST.
    changes: ShardChanges | None = None


def plan_snapshot(sizes: dict[str, int], opened: Sequence[LocalFile], *, inline_budget_bytes: int) -> SnapshotPlan:
    """Plan for each of the store's SSTs: share the base's file, put the SST into the manifest (inline), or upload it.

    `sizes`: The bytes of the SSTs by name. `opened`: The base's files that the store was opened from. Only these are
    shared, by name: RocksDB uses no file number twice in a store, but two stores of one base use the same numbers.
    """
    known = {f.name: f for f in opened}
    shared, inline, upload = [], [], []
    for name, size_bytes in sorted(sizes.items()):
        base = known.get(name)
        if base is not None:
            if base.handle.size_bytes != size_bytes:
                raise InvariantViolated(
                    f"{name} has {size_bytes} bytes, but the base's file of that name, {base.handle.path}, has {base.handle.size_bytes}"
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
    inline_budget_bytes: int,
    opened: ShardManifest | None = None,
    cache: FileCache | None = None,
) -> Snapshot:
    """Flush the store, link its files into the folder `image`, and upload the SSTs that the base lacks.

    Small SSTs, up to `inline_budget_bytes`, and RocksDB's metadata go into the manifest instead. `opened` is the
    manifest that the store was opened from. Without it, no SST is shared.
    """
    ssts, small = store.capture(image)
    sizes = {f.name: f.stat().st_size for f in ssts}
    plan = plan_snapshot(sizes, opened.files if opened else (), inline_budget_bytes=inline_budget_bytes)
    uploads = [(paths.shared(attempt, shard, task, n, "sst"), image / name) for n, name in enumerate(plan.upload)]
    handles: list[Handle] = upload_all(storage, uploads)
    if cache is not None and handles:
        cache.keep(storage.url, [(handle, image / name) for name, handle in zip(plan.upload, handles, strict=True)])
    new = [LocalFile(name=name, handle=handle) for name, handle in zip(plan.upload, handles, strict=True)]
    inline = [InlineFile(name=name, data=(image / name).read_bytes()) for name in plan.inline]
    metadata = [InlineFile(name=f.name, data=f.read_bytes()) for f in small]
    known = {f.name for f in opened.inline_files} if opened else set()
    fresh = [f for f in inline if f.name not in known]
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
