"""Deletion of a shard's expired entries at the end of an interval, many entries at a time as Arrow columns.

The expiry index lists the entries by time, so no other entries are read.
"""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from state_backend.formats.arrow_columns import Fixed, concatenate
from state_backend.state import layout
from state_backend.state.entry_columns import Groups, indexed_entries
from state_backend.state.list_columns import ListColumns
from state_backend.state.shard_state import ShardState
from state_backend.state.state_columns import EntryColumns
from state_backend.values.errors import InvariantViolated

_ENTRIES = 32_768


class _Span(NamedTuple):
    """All expiry-index keys with start <= key < end. They belong to one key group."""

    keys: list[bytes]
    start: bytes
    end: bytes


def expire(shard: ShardState) -> int:
    """Delete all entries that expired up to `shard.now_ms`, and return how many.

    Each interval ends with `expire`, so the stored state depends only on the intervals that have run.
    """
    shard.flush()
    expired = held = 0
    waiting: list[_Span] = []
    for key_group in shard.accounts.key_groups():
        start = layout.prefix(key_group, layout.EXPIRY_INDEX)
        end = start + layout.pack_time(shard.now_ms + 1)
        ended = False
        while not ended:
            keys, ended = shard.store.read_keys(start, end, rows=_ENTRIES)
            next_ = end if ended else keys[-1] + b"\x00"
            if keys:
                waiting.append(_Span(keys, start, next_))
                held += len(keys)
            start = next_
            if held >= _ENTRIES:
                expired += _remove(shard, waiting)
                waiting, held = [], 0
    return expired + _remove(shard, waiting)


def _remove(shard: ShardState, spans: list[_Span]) -> int:
    """Delete the entries that the expiry-index keys in `spans` name, then these keys. Return the number of entries."""
    if not spans:
        return 0
    groups, times, state_ids, rests = indexed_entries(
        pa.array(chain.from_iterable(span.keys for span in spans), pa.binary())
    )
    other_time = (times[1:] != times[:-1]) & (groups[1:] == groups[:-1])
    if (state_ids[1:] != state_ids[:-1]).any() or other_time.any():
        order = _in_order(groups, state_ids, rests)
        groups, state_ids, rests = groups[order], state_ids[order], rests.take(pa.array(order))
    by_id = {descriptor.state_id: descriptor for descriptor in shard.descriptors.values()}
    for state_id in np.unique(state_ids).tolist():
        descriptor = by_id.get(state_id)
        if descriptor is None:
            raise InvariantViolated(f"an expiring entry has the unknown state id {state_id}")
        begin, end = np.searchsorted(state_ids, [state_id, state_id + 1]).tolist()
        entries = ExpiredEntries(shard, descriptor.name, state_id)
        entries.begin(groups[begin:end], rests[begin:end])
        entries.remove()
        if descriptor.kind == "list":
            ListColumns(shard, descriptor).trim(groups[begin:end], rests[begin:end])
    for span in spans:
        shard.stored.delete_many(*span)
    return len(groups)


def _in_order(groups: Groups, state_ids: np.ndarray, rests: pa.Array) -> np.ndarray:
    pieces = [Fixed(state_ids), Fixed(groups.astype(">u2")), rests]
    order: np.ndarray = pc.array_sort_indices(concatenate(len(rests), pieces)).to_numpy()
    return order


class ExpiredEntries(EntryColumns):
    """Expired entries of one state.

    Here `begin` gets entries instead of keys: each entry's stored key without key group and state id. `remove` leaves
    the keys of the expiry index, which the caller deletes.
    """

    def remove(self) -> None:
        owners = np.arange(len(self._keys))
        self._replace(owners, self._keys, pa.nulls(len(owners), pa.binary()))

    def _index(self, groups: Groups, rests: pa.Array, old: pa.Array, new: pa.Array) -> None:
        pass
