"""Removal of whole keys from the open store of a shard.

For each removed key, the module deletes the entries of all states, the timers, and their keys in the timer index and
the expiry index, which list timers and expiring entries by time. It subtracts entries and timers from the counts and
the digest of the key group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from state_backend.adapters.rocks import RocksStore
from state_backend.formats.arrow_columns import binary_views, cut
from state_backend.formats.key_columns import KeyColumns
from state_backend.formats.types import StructType
from state_backend.state import layout
from state_backend.values.frozen import frozen
from state_backend.values.records import KeyGroupState, StateDescriptor

_BATCH = 4096


@frozen
class RemovedKeys:
    """Key groups that are left after a removal of keys, and the number and bytes of the removed entries."""

    # The shard's key groups afterwards, without those that became empty.
    key_group_states: tuple[KeyGroupState, ...]
    entries: dict[str, int]
    # The bytes that RocksDB counted for all removed keys and values: entries, timers, bounds of lists, and keys of the
    # timer index and the expiry index.
    size_bytes: int


def remove_keys(
    store: RocksStore,
    groups: Iterable[KeyGroupState],
    states: Sequence[StateDescriptor],
    keys: Iterable[tuple[int, bytes]],
) -> RemovedKeys:
    """Delete all entries and timers of some keys from a shard's store, and return what is left of its key groups.

    The function also deletes their keys in the timer index and the expiry index, which list timers and expiring entries
    by time. Keys without state are ignored.
    """
    by_group = {group.key_group: group for group in groups}
    removed: Counter[str] = Counter()
    removed_bytes = 0
    for key_group, key in sorted({*keys}):
        group = by_group.get(key_group)
        if group is None:
            continue
        deletions: list[bytes] = []
        counts: Counter[str] = Counter()
        digest = size_bytes = 0
        for descriptor in states:
            seed, start = layout.seed_of(descriptor.name), layout.prefix(key_group, descriptor.state_id) + key
            for stored_key, entry in store.scan(start, layout.after(start)):
                deletions.append(stored_key)
                size_bytes += layout.entry_bytes(stored_key, entry)
                if descriptor.kind == "list" and layout.is_positions(entry):
                    continue
                digest += layout.entry_hash(seed, stored_key[3:], entry)
                counts[descriptor.name] += 1
                if (index_key := layout.expiry_key(stored_key, entry)) is not None:
                    deletions.append(index_key)
        seed, start = layout.seed_of(layout.TIMERS_NAME), layout.prefix(key_group, layout.TIMERS) + key
        for stored_key, data in store.scan(start, layout.after(start)):
            layout.check_timer(stored_key[3:], data)
            deletions += stored_key, layout.timer_index_key(stored_key)
            size_bytes += layout.entry_bytes(stored_key, data)
            digest += layout.entry_hash(seed, stored_key[3:], data)
            counts[layout.TIMERS_NAME] += 1
        for at in range(0, len(deletions), _BATCH):
            store.write([(stored_key, None) for stored_key in deletions[at : at + _BATCH]])
        by_group[key_group] = _less(group, counts, digest, size_bytes)
        removed += counts
        removed_bytes += size_bytes
    left = tuple(group for _, group in sorted(by_group.items()) if any(group.entries.values()))
    return RemovedKeys(key_group_states=left, entries=dict(removed), size_bytes=removed_bytes)


def _less(group: KeyGroupState, counts: Counter[str], digest: int, size_bytes: int) -> KeyGroupState:
    entries = {name: left for name, count in group.entries.items() if (left := count - counts[name])}
    known_bytes = group.size_bytes
    return replace(
        group,
        entries=entries,
        digest=(group.digest - digest) % 2**64,
        size_bytes=None if known_bytes is None or known_bytes < size_bytes else known_bytes - size_bytes,
    )


def find_keys(
    store: RocksStore,
    states: Sequence[StateDescriptor],
    key_schema: StructType,
    key_group: int,
    wanted: Callable[[bytes], bool],
) -> set[bytes]:
    """Return the encoded keys of a key group for which `wanted` returns True. The whole key group is read."""
    keys = KeyColumns(key_schema)
    found: dict[bytes, bool] = {}
    for state_id in [*(descriptor.state_id for descriptor in states), layout.TIMERS]:
        start = layout.prefix(key_group, state_id)
        end, ended = layout.after(start), False
        while not ended:
            stored, _, ended = store.read_range(start, end)
            if not stored:
                break
            rests = pa.array([stored_key[3:] for stored_key in stored], pa.binary())
            offsets = binary_views(rests)[0].astype(np.int64)
            sizes = keys.decode_prefix(rests)[1]
            for key in {*cut(rests.buffers()[2], offsets[:-1], offsets[:-1] + sizes).to_pylist()}:
                if key not in found:
                    found[key] = wanted(key)
            start = stored[-1] + b"\x00"
    return {key for key, is_wanted in found.items() if is_wanted}
