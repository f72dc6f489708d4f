"""Value state of a shard for many keys at a time, as Arrow tables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from state_backend.state.entry_columns import Groups, stored_keys
from state_backend.state.shard_state import ShardState
from state_backend.state.state_columns import Mask, StateColumns
from state_backend.values.records import StateDescriptor


class ValueColumns(StateColumns):
    """A value state of a shard. `read` returns the values of a batch of keys; `write` or `clear` then changes them."""

    def __init__(self, shard: ShardState, descriptor: StateDescriptor) -> None:
        super().__init__(shard, descriptor)
        self._stored_keys: list[bytes] = []
        self._old: pa.Array = pa.array([], pa.binary())

    def read(self, key_groups: Groups, keys: pa.Array) -> tuple[pa.Table, Mask]:
        """Read the values of a batch of keys."""
        self.begin(key_groups, keys)
        self._stored_keys = stored_keys(key_groups, self._state_id, keys)
        self._old = pa.array(self._read_values(key_groups), pa.binary())
        rows = self._visible(self._old)
        return self._table(rows), rows.is_valid().to_numpy(zero_copy_only=False)

    def _read_values(self, key_groups: Groups) -> Sequence[bytes | None]:
        return self._shard.read_sorted(self._name, key_groups, self._stored_keys)

    def write(self, rows: pa.Table, cleared: Mask | None = None) -> None:
        """Replace the values of all keys of the last `read`."""
        new = self._entries(rows)
        if cleared is not None:
            new = pc.if_else(pa.array(cleared), pa.scalar(None, pa.binary()), new)
        self._write(new)

    def clear(self, cleared: Mask) -> None:
        """Remove the values of some keys of the last `read`."""
        self._write(pc.if_else(pa.array(cleared), pa.scalar(None, pa.binary()), self._old))

    def _write(self, new: pa.Array) -> None:
        self._replace(np.arange(len(self._keys)), self._keys, self._old, new, self._stored_keys)
        self._old = new
