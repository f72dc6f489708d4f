"""Removal of forgotten keys from a shard's files: all other entries are copied to a new store.

`cairn erase` removes keys in this way, and so does each interval whose base may still have a forgotten key.

A deletion in RocksDB leaves the key's bytes in three places: in older SSTs, in the deletion marker, and in the
MANIFEST, which lists the smallest and largest keys of deleted files too. So the remaining entries are copied to an
empty store, and the new store shares no file with the old one.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from state_backend.adapters.rocks import EngineOptions, RocksStore
from state_backend.shard.restore import RestoredShard
from state_backend.state.forget_keys import RemovedKeys, remove_keys
from state_backend.state.layout import key_group_bounds
from state_backend.values.key_groups import KeyGroupRange
from state_backend.values.records import StateDescriptor


def rewrite_without(
    restored: RestoredShard,
    owned: KeyGroupRange,
    states: Sequence[StateDescriptor],
    keys: Iterable[tuple[int, bytes]],
    directory: Path,
    options: EngineOptions,
) -> tuple[RestoredShard, RemovedKeys]:
    """Remove keys from a restored shard, and copy the remaining entries to a new store in `directory`.

    Return the shard with the new store, and what was removed. `keys`: (key group, encoded key) of each key. The
    restored shard's own store is closed and its folder deleted, also if the copy fails.
    """
    old = restored.store
    try:
        removed = remove_keys(old, restored.key_group_states, states, keys)
        store = RocksStore(directory, options)
        try:
            old.copy_range(store, *key_group_bounds(owned.first, owned.last))
        except BaseException:
            store.close()
            raise
    finally:
        old.close()
        shutil.rmtree(old.directory, ignore_errors=True)
    return replace(restored, store=store, key_group_states=removed.key_group_states, opened=None, base=None), removed
