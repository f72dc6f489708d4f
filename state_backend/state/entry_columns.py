"""Entries of many keys as Arrow columns: where they are stored, when they expire, and what they add to the digest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from state_backend.formats.arrow_columns import binary_views
from state_backend.formats.hash_columns import xxh64
from state_backend.state import layout

Groups = npt.NDArray[np.uint16]


def stored_keys(key_groups: Groups, state_id: int, keys: pa.Array, suffix: bytes = b"") -> list[bytes]:
    """Where the entries of these keys lie."""
    prefixes = np.empty((len(keys), 3), np.uint8)
    prefixes[:, :2] = key_groups.astype(">u2").view(np.uint8).reshape(-1, 2)
    prefixes[:, 2] = state_id
    fixed = pa.FixedSizeBinaryArray.from_buffers(pa.binary(3), len(prefixes), [None, pa.py_buffer(prefixes)])
    parts = [fixed.cast(pa.binary()), keys, *([pa.scalar(suffix, pa.binary())] if suffix else [])]
    located: list[bytes] = joined(*parts).to_pylist()
    return located


def parts_of(stored: pa.Array) -> tuple[Groups, npt.NDArray[np.uint8], pa.Array]:
    """Key groups, state ids and what is left of stored keys."""
    offsets, raw = binary_views(stored)
    starts = offsets[:-1]
    groups = (raw[starts].astype(np.uint16) * 256 + raw[starts + 1]).astype(np.uint16)
    return groups, raw[starts + 2], pc.binary_slice(stored, 3, int(np.diff(offsets).max()))


def changes_by_key_group(
    seed: int, key_groups: Groups, rests: pa.Array, old: pa.Array, new: pa.Array
) -> Iterator[tuple[int, int, int]]:
    """(key group, change of its digest, change of its count) of entries of one state that were replaced; null is none.
    Key groups ascend. ``rests``: stored keys without key group and state id."""
    gone, come = (entries.is_valid().to_numpy(zero_copy_only=False) for entries in (old, new))
    change = np.zeros(len(rests), np.uint64)
    for entries, there, combine in ((old, gone, np.subtract), (new, come, np.add)):
        if there.all():
            change = combine(change, xxh64(joined(rests, entries), seed))
        elif there.any():
            mask = pa.array(there)
            change[there] = combine(change[there], xxh64(joined(rests.filter(mask), entries.filter(mask)), seed))
    starts = np.concatenate([[0], np.flatnonzero(key_groups[1:] != key_groups[:-1]) + 1])
    counts = np.add.reduceat(come.astype(np.int64) - gone, starts)
    digests = np.add.reduceat(change, starts)
    yield from zip(key_groups[starts].tolist(), digests.tolist(), counts.tolist(), strict=True)


def is_expiring(entries: pa.Array) -> Any:
    """Which entries have an expiry; not those that are null."""
    marker = pc.equal(pc.binary_slice(entries, 0, 1), pa.scalar(bytes([layout.EXPIRING]), pa.binary()))
    return pc.fill_null(marker, False).to_numpy(zero_copy_only=False)


def expiries(entries: pa.Array) -> Any:
    """Milliseconds; of entries that all have one."""
    packed = pc.binary_slice(entries, 1, 9).cast(pa.binary(8))
    return np.frombuffer(packed.buffers()[1], "<i8", len(packed), packed.offset * 8)


def without_expiry(entries: pa.Array) -> pa.Array:
    """Rows of entries that all have an expiry."""
    # A slice without a stop fails in Arrow 26.
    return pc.binary_slice(entries, 9, pc.max(pc.binary_length(entries)).as_py())


def joined(*parts: pa.Array | pa.Scalar) -> pa.Array:
    """Element by element, one behind the other."""
    return pc.binary_join_element_wise(*parts, pa.scalar(b"", pa.binary()))
