"""Union of the files of several shards in one store, without a read of their entries.

Shards of one checkpoint have no key in common. So one store can hold the SSTs of several shards, each SST in its level,
if RocksDB's MANIFEST lists all of them. The condition is that no SST has a key outside of its shard's key groups.

A shard that was split does not meet this condition. Each half has all files of the former shard, and hides the other
half's keys with a range deletion: an entry in RocksDB that deletes a range of keys. If both halves were in one store,
their range deletions would hide the keys of both. So a restore copies the entries of such a shard to the store, until
consolidation has rewritten the shard.

Source: Flink restores in this way with `createColumnFamilyWithImport`, which rocksdict does not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from state_backend.adapters.rocks import RUNS_WITHIN_INTERVAL, SST_SUFFIX
from state_backend.formats.rocksdb_manifest import SstSpan, Store, store_of, with_stores
from state_backend.state.layout import key_group_bounds
from state_backend.values.errors import CorruptFile
from state_backend.values.records import InlineFile, ShardManifest

# The most files of level 0 that the joined store may have. RocksDB starts merges of its own at `RUNS_WITHIN_INTERVAL`
# files, and the interval itself may add up to four before that.
_MOST_RUNS = RUNS_WITHIN_INTERVAL - 4


def join_manifests(
    first: ShardManifest, others: Sequence[ShardManifest]
) -> tuple[ShardManifest, tuple[ShardManifest, ...]]:
    """Return one manifest with the files of `first` and of those `others` whose files can be in the same store.

    A restore opens the files of the joint manifest as one store. Each of the `others` is joined if three conditions
    hold. Each of the other shard's SSTs stays within that shard's key groups. No SST that is in the joint store already
    has a key in these key groups. The joint store has at most `_MOST_RUNS` files in level 0. If a MANIFEST can't be
    parsed, no shard is joined.
    """
    joined: list[tuple[ShardManifest, Store]] = []
    try:
        log, base = _open(first)
        runs = _runs(base)
        for other in others:
            _, store = _open(other)
            taken = [base, *(s for _, s in joined)]
            if (
                runs + _runs(store) <= _MOST_RUNS
                and not any(_overlaps(span, other) for s in taken for span in s.spans)
                and all(_is_within(span, other) for span in store.spans)
            ):
                joined.append((other, store))
                runs += _runs(store)
        data, numbers = with_stores(log.data, base, [store for _, store in joined])
    except (
        CorruptFile,
        ValueError,
    ):
        # This code can't parse the MANIFEST, perhaps of another RocksDB version. The caller copies the entries instead.
        return first, ()
    if not joined:
        return first, ()
    files = list(first.files)
    inline = [replace(log, data=data) if f is log else f for f in first.inline_files]
    for (other, _), new in zip(joined, numbers, strict=True):
        names = {_name(old): _name(number) for old, number in new.items()}
        files += [replace(f, name=names[f.name]) for f in other.files]
        inline += [replace(f, name=names[f.name]) for f in other.inline_files if f.name in names]
    return replace(
        first,
        files=tuple(files),
        inline_files=tuple(inline),
        segments=(*first.segments, *(segment for other, _ in joined for segment in other.segments)),
    ), tuple(other for other, _ in joined)


def _open(manifest: ShardManifest) -> tuple[InlineFile, Store]:
    """Return a shard's file MANIFEST of RocksDB, and the store that this file describes."""
    (log,) = (f for f in manifest.inline_files if f.name.startswith("MANIFEST-"))
    store = store_of(log.data, log.name)
    there = [*(f.name for f in manifest.files), *(f.name for f in manifest.inline_files if f.name.endswith(SST_SUFFIX))]
    if sorted(there) != sorted(_name(span.number) for span in store.spans):
        raise ValueError(f"{log.name} of shard {manifest.shard} names other files than the shard has")
    return log, store


def _name(number: int) -> str:
    return f"{number:06d}{SST_SUFFIX}"


def _runs(store: Store) -> int:
    return sum(span.level == 0 for span in store.spans)


def _is_within(span: SstSpan, manifest: ShardManifest) -> bool:
    low, high = key_group_bounds(manifest.key_groups.first, manifest.key_groups.last)
    return span.smallest >= low and (high is None or span.largest < high)


def _overlaps(span: SstSpan, manifest: ShardManifest) -> bool:
    low, high = key_group_bounds(manifest.key_groups.first, manifest.key_groups.last)
    return span.largest >= low and (high is None or span.smallest < high)
