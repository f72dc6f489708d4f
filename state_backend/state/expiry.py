"""What expired goes, at the end of an interval: many entries at a time, as columns."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from state_backend.state import layout
from state_backend.state.entry_columns import parts_of
from state_backend.state.list_columns import ListColumns
from state_backend.state.shard_state import ShardState
from state_backend.state.state_columns import EntryColumns
from state_backend.values.errors import InvariantViolated

_ENTRIES = 32_768


def expire(shard: ShardState) -> int:
    """Physically deletes every entry whose time is up, and returns how many. Runs at the end of an interval, always, so that what is
    in the files depends on the intervals alone."""
    shard.flush()
    expired = 0
    waiting: list[bytes] = []
    for key_group in shard.key_groups():
        start = layout.prefix(key_group, layout.EXPIRY_INDEX)
        end = start + layout.pack_time(shard.now_ms + 1)
        ended = False
        while not ended:
            found, ended = shard.store.scan_chunk(start, end)
            if not ended:
                start = found[-1][0] + b"\x00"
            waiting += [key[:2] + key[11:] for key, _ in found]
            if len(waiting) >= _ENTRIES:
                expired += _remove(shard, waiting)
                waiting = []
    return expired + _remove(shard, waiting)


def _remove(shard: ShardState, stored: list[bytes]) -> int:
    """Deletes these entries of any states, which have an expiry."""
    if not stored:
        return 0
    stored.sort(key=lambda key: (key[2], key))
    groups, state_ids, rests = parts_of(pa.array(stored, pa.binary()))
    for state_id in np.unique(state_ids).tolist():
        descriptor = shard.descriptor_of(state_id)
        if descriptor is None:
            raise InvariantViolated(f"an expiring entry belongs to state id {state_id}, which no state has")
        begin, end = np.searchsorted(state_ids, [state_id, state_id + 1]).tolist()
        entries = ExpiredEntries(shard, descriptor.name, state_id)
        entries.begin(groups[begin:end], rests[begin:end])
        entries.remove(stored[begin:end])
        if descriptor.kind == "list":
            ListColumns(shard, descriptor).trim(groups[begin:end], rests[begin:end])
    return len(stored)


class ExpiredEntries(EntryColumns):
    """Entries that are to go; each is an owner of its own."""

    def remove(self, located: list[bytes]) -> None:
        """Deletes what lies under these stored keys, all of the entries."""
        owners = np.arange(len(located))
        self._replace(owners, self._keys, self._read(owners, located), pa.nulls(len(located), pa.binary()), located)
