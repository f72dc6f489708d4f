"""Restore: open one shard of any key-group range from the manifests of a checkpoint.

Source: the plan follows Flink's incremental restore. docs/design-state.md describes it ("Changed parallelism").

Each file's size and checksum are compared with the manifest while the file is fetched, because RocksDB opens a damaged
SST without an error, and its iterators end early. Segments are replayed last, limited to the range. Each key group's
segments come from the manifest that held the key group.
"""

from __future__ import annotations

import io
import shutil
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

from state_backend.adapters.rocks import EngineOptions, RocksStore
from state_backend.formats import changelog
from state_backend.ports.storage import Storage
from state_backend.shard.file_cache import FileCache
from state_backend.shard.transfer import download_all
from state_backend.state.layout import key_group_bounds
from state_backend.values.errors import CorruptFile, InvariantViolated, NotFound
from state_backend.values.frozen import frozen
from state_backend.values.key_groups import KeyGroupRange
from state_backend.values.records import KeyGroupState, ShardManifest


@frozen
class RestoredShard:
    """An open store with the state of a shard's key groups, and the manifest that the store was opened from."""

    store: RocksStore
    key_group_states: tuple[KeyGroupState, ...]
    # The manifest whose files were opened; None if the store was empty.
    opened: ShardManifest | None = None
    # `opened` if it has exactly this shard's key groups, else None. Changelog mode adds segments only to this base.
    base: ShardManifest | None = None
    # The number of bytes that the storage delivered.
    downloaded_bytes: int = 0
    # The number of bytes that the host's cache had.
    cached_bytes: int = 0


def plan_restore(target: KeyGroupRange, manifests: Sequence[ShardManifest]) -> list[ShardManifest]:
    """Return the manifests with key groups of `target`: first the one to open, then those to copy entries from.

    The first is the manifest with the most key groups of `target`. If two manifests have equally many, the first is the
    manifest with fewer key groups outside of `target`.
    """
    wanted = [(len(i), len(i) / len(m.key_groups), m) for m in manifests if (i := m.key_groups.intersect(target))]
    return [m for *_, m in sorted(wanted, key=lambda w: (w[0], w[1], -w[2].key_groups.first), reverse=True)]


def restore_shard(
    target: KeyGroupRange,
    manifests: Sequence[ShardManifest],
    storage: Storage,
    directory: Path,
    options: EngineOptions,
    cache: FileCache | None = None,
    *,
    partial: bool = False,
) -> RestoredShard:
    """Open the state of `target` in `directory`, from the storage or from the host's cache.

    `partial`: the manifests may lack SSTs that RocksDB's MANIFEST lists. Reads must not need these.
    """
    found = plan_restore(target, manifests)
    states = tuple(s for m in manifests for s in m.key_group_states if s.key_group in target)
    states = tuple(sorted(states, key=lambda s: s.key_group))
    if not found:
        return RestoredShard(store=RocksStore(directory, options), key_group_states=())
    first, *others = found
    try:
        downloaded_bytes, cached_bytes = fetch(first, storage, directory, cache)
        store = RocksStore(directory, options, partial=partial)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    try:
        _clip(store, first.key_groups, target)
        _replay(first, directory, store, target)
        for n, other in enumerate(others):
            beside = directory.with_name(f"{directory.name}.from-{n}")
            try:
                fetched = fetch(other, storage, beside, cache)
                downloaded_bytes, cached_bytes = downloaded_bytes + fetched[0], cached_bytes + fetched[1]
                with RocksStore(beside, options) as source:
                    source.copy_range(store, *key_group_bounds(target.first, target.last))
                _replay(other, beside, store, target)
            finally:
                shutil.rmtree(beside, ignore_errors=True)
    except BaseException:
        store.close()
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return RestoredShard(
        store=store,
        key_group_states=states,
        opened=first,
        base=first if first.key_groups == target else None,
        downloaded_bytes=downloaded_bytes,
        cached_bytes=cached_bytes,
    )


def fetch(
    manifest: ShardManifest, storage: Storage, directory: Path, cache: FileCache | None = None
) -> tuple[int, int]:
    """Make a folder with the files that RocksDB opens, and with the shard's segments as files beside them.

    Return (downloaded bytes, bytes from the host's cache). `restore_shard` replays the segments into the open store.
    """
    directory.mkdir(parents=True)
    for file in manifest.inline_files:
        _inside(directory, file.name).write_bytes(file.data)
    files = [(f.handle, _inside(directory, f.name)) for f in manifest.files]
    files += [(s.handle, _segment(directory, n)) for n, s in enumerate(manifest.segments) if s.handle is not None]
    missing = [file for file in files if cache is None or not cache.link(storage.url, *file)]
    try:
        download_all(storage, missing)
    except NotFound as error:
        raise CorruptFile(
            f"shard {manifest.shard}: a file of the checkpoint is missing from {storage.url}: {error}"
        ) from error
    if cache is not None and missing:
        cache.keep(storage.url, missing)
    downloaded_bytes = sum(handle.size_bytes for handle, _ in missing)
    return downloaded_bytes, sum(handle.size_bytes for handle, _ in files) - downloaded_bytes


def _segment(directory: Path, number: int) -> Path:
    """Return the local path of the manifest's segment with this number. RocksDB ignores files of this name."""
    return directory / f"segment-{number}"


def _replay(manifest: ShardManifest, directory: Path, store: RocksStore, target: KeyGroupRange) -> None:
    """Write the changes of the manifest's segments into the store, limited to key groups of `target`.

    Segments are replayed in the order of the manifest.
    """
    owned = manifest.key_groups.intersect(target)
    if owned is None:
        return
    low, high = key_group_bounds(owned.first, owned.last)
    for number, segment in enumerate(manifest.segments):
        path = _segment(directory, number)
        name = segment.handle.path if segment.handle is not None else f"segment {number} of shard {manifest.shard}"
        changes = 0
        with path.open("rb") if segment.data is None else io.BytesIO(segment.data) as file:
            for kind, pairs in changelog.read_segment(file, name):
                changes += len(pairs)
                if kind == changelog.RANGES:
                    for start, end in pairs:
                        within = max(start, low), min(end or b"", high or end or b"")
                        if within[0] < within[1]:
                            store.delete_range(*within)
                else:
                    keys = [key for key, _ in pairs]
                    store.write(pairs[bisect_left(keys, low) : None if high is None else bisect_left(keys, high)])
        if changes != segment.changes:
            raise CorruptFile(f"{name}: found {changes} changes, expected {segment.changes}")
        path.unlink(missing_ok=True)


def _inside(directory: Path, name: str) -> Path:
    """Return the path of a file in the folder. Raise if the name leads out of the folder."""
    if "/" in name or name in ("", ".", "..") or "\\" in name:
        raise InvariantViolated(f"a manifest names the local file {name!r}, which is outside of {directory}")
    return directory / name


def _clip(store: RocksStore, held: KeyGroupRange, target: KeyGroupRange) -> None:
    start, end = key_group_bounds(target.first, target.last)
    if held.first < target.first:
        store.delete_range(b"", start)
    if held.last > target.last:
        assert end is not None
        store.delete_range(end, b"\xff" * 64)
