"""Several shards' files as the files of one store, without reading an entry of them.

Shards of one checkpoint share no key. So the SSTs of one can lie beside those of another in one store, each in the level that it
has, if RocksDB's MANIFEST lists them all. That holds only as long as no SST reaches out of its shard's key groups. After a shard was
split, both halves have the files of the whole with what is not theirs deleted as a range; laid beside the other half, that deletion would
take the other half's keys away. Such shards are copied entry by entry, until they have been rewritten.

Source: Flink restores in this way with ``createColumnFamilyWithImport``, which rocksdict does not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from state_backend.adapters.rocks import RUNS_WITHIN_INTERVAL, SST_SUFFIX
from state_backend.formats.rocksdb_manifest import SstSpan, Store, store_of, with_stores
from state_backend.state.layout import key_group_bounds
from state_backend.values.errors import CorruptFile
from state_backend.values.records import InlineFile, ShardManifest

# RocksDB begins to merge on its own at ``RUNS_WITHIN_INTERVAL`` files of level 0; the interval's own need some room.
_MOST_RUNS = RUNS_WITHIN_INTERVAL - 4


def join_manifests(
    first: ShardManifest, others: Sequence[ShardManifest]
) -> tuple[ShardManifest, tuple[ShardManifest, ...]]:
    """``first`` with the files and segments of those of the ``others`` that can lie beside it, and which these are, in the order of their
    segments. ``key_groups`` and ``key_group_states`` stay those of ``first``."""
    joined: list[tuple[ShardManifest, Store]] = []
    try:
        log, base = _opened(first)
        runs = _runs(base)
        for other in others:
            _, store = _opened(other)
            taken = [base, *(s for _, s in joined)]
            if (
                runs + _runs(store) <= _MOST_RUNS
                and not any(_reaches(span, other) for s in taken for span in s.spans)
                and all(_is_within(span, other) for span in store.spans)
            ):
                joined.append((other, store))
                runs += _runs(store)
        data, numbers = with_stores(log.data, base, [store for _, store in joined])
    except (CorruptFile, ValueError):  # a log of a RocksDB that is not known here: entries can be copied all the same
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


def _opened(manifest: ShardManifest) -> tuple[InlineFile, Store]:
    """RocksDB's MANIFEST and what it says. Raises: CorruptFile if it can't be followed; ValueError if it is not there, or names other
    SSTs than the shard has."""
    (log,) = (f for f in manifest.inline_files if f.name.startswith("MANIFEST-"))
    store = store_of(log.data, log.name)
    there = [*(f.name for f in manifest.files), *(f.name for f in manifest.inline_files if f.name.endswith(SST_SUFFIX))]
    if sorted(there) != sorted(_name(span.number) for span in store.spans):
        raise ValueError(f"{log.name} of shard {manifest.shard} names other files than are there")
    return log, store


def _name(number: int) -> str:
    return f"{number:06d}{SST_SUFFIX}"


def _runs(store: Store) -> int:
    return sum(span.level == 0 for span in store.spans)


def _is_within(span: SstSpan, manifest: ShardManifest) -> bool:
    low, high = key_group_bounds(manifest.key_groups.first, manifest.key_groups.last)
    return span.smallest >= low and (high is None or span.largest < high)


def _reaches(span: SstSpan, manifest: ShardManifest) -> bool:
    low, high = key_group_bounds(manifest.key_groups.first, manifest.key_groups.last)
    return span.largest >= low and (high is None or span.smallest < high)
