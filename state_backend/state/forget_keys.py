"""Removal of whole keys from the open store of a shard."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pyarrow as pa

from state_backend.adapters.rocks import RocksStore
from state_backend.formats.arrow_columns import binary_views, cut
from state_backend.formats.key_columns import KeyColumns
from state_backend.formats.types import StructType
from state_backend.state import layout
from state_backend.state.stored_entries import StoredEntries
from state_backend.values.frozen import frozen
from state_backend.values.records import KeyGroupState, StateDescriptor


@frozen
class RemovedKeys:
    """Counts and digests of the key groups after a removal of keys. `entries`: number of removed entries by state."""

    key_group_states: tuple[KeyGroupState, ...]
    entries: dict[str, int]
    # True if one of the keys had anything in the store, such as the bounds of an empty list.
    found: bool


def remove_keys(
    store: RocksStore,
    groups: Iterable[KeyGroupState],
    states: Sequence[StateDescriptor],
    keys: Iterable[tuple[int, bytes]],
) -> RemovedKeys:
    stored = StoredEntries(store, groups, states)
    ids = {**{descriptor.state_id: descriptor.name for descriptor in states}, layout.TIMERS: layout.TIMERS_NAME}
    before = {name: stored.accounts.entries(name) for name in ids.values()}
    for key_group, key in sorted({*keys}):
        stored.check_timers(key_group)
        for state_id in ids:
            stored.remove(layout.prefix(key_group, state_id) + key)
    gone = {name: count for name in before if (count := before[name] - stored.accounts.entries(name))}
    return RemovedKeys(key_group_states=stored.accounts.states(), entries=gone, found=stored.changed_bytes > 0)


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
        for stored, _ in store.chunks(start, layout.after(start)):
            rests = pa.array([stored_key[3:] for stored_key in stored], pa.binary())
            offsets = binary_views(rests)[0].astype(np.int64)
            sizes = keys.decode_prefix(rests)[1]
            for key in {*cut(rests.buffers()[2], offsets[:-1], offsets[:-1] + sizes).to_pylist()}:
                if key not in found:
                    found[key] = wanted(key)
    return {key for key, is_wanted in found.items() if is_wanted}
