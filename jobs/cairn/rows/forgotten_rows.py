"""Remove the rows of forgotten keys (`cairn erase`) from a shard's input. Records hold only hashes of these keys."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cairn.rows.routing import KEY_GROUP, key_columns
from state_backend.checkpoint.forgotten_keys import is_key
from state_backend.formats.key_columns import KeyColumns
from state_backend.formats.types import StructType
from state_backend.values.records import ForgottenKey


class ForgottenRows:
    """Filter that removes the rows of forgotten keys from the batches that a shard's job reads."""

    def __init__(self, keys: Sequence[ForgottenKey], key_schema: StructType, max_parallelism: int) -> None:
        self._keys = keys
        self._encoder = KeyColumns(key_schema)
        self._names = key_columns(len(key_schema.fields))
        # `without` hashes only keys in the key groups of forgotten keys. After the restore of a savepoint, the number
        # of key groups may differ from that at the time of `cairn erase`. Then `without` hashes the key of every row.
        same = all(key.max_parallelism == max_parallelism for key in keys)
        self._groups = np.array([key.key_group for key in keys]) if same else None

    def without(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return the batch without the rows of forgotten keys. Only keys in their key groups are hashed (faster)."""
        near = np.ones(rows.num_rows, bool)
        if self._groups is not None:
            near = np.isin(rows.column(KEY_GROUP).to_numpy(), self._groups)
        if not near.any():
            return rows
        some = rows.filter(pa.array(near))
        encoded = self._encoder.encode([some.column(name) for name in self._names])
        gone = [key for key in pc.unique(encoded).to_pylist() if any(is_key(f, key) for f in self._keys)]
        if not gone:
            return rows
        near[near] = pc.is_in(encoded, pa.array(gone, pa.binary())).to_numpy(zero_copy_only=False)
        return rows.filter(pa.array(~near))
