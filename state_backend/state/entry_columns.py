"""Entries of many keys as Arrow columns: where they are stored, when they expire, and what they add to the digest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from state_backend.formats.arrow_columns import Array, Fixed, binary_views, concatenate, cut
from state_backend.formats.hash_columns import xxh64
from state_backend.state import layout
from state_backend.values.errors import CorruptFile

Groups = npt.NDArray[np.uint16]


def stored_keys(key_groups: Groups, state_id: int, keys: pa.Array, suffix: bytes = b"") -> list[bytes]:
    """Where the entries of these keys lie."""
    behind = [Fixed(np.void(suffix))] if suffix else []
    located: list[bytes] = concatenate(len(keys), [_prefixes(key_groups, state_id), keys, *behind]).to_pylist()
    return located


def parts_of(stored: pa.Array) -> tuple[Groups, npt.NDArray[np.uint8], pa.Array]:
    """Key groups, state ids and what is left of stored keys."""
    offsets, raw = binary_views(stored)
    starts = offsets[:-1]
    groups = (raw[starts].astype(np.uint16) * 256 + raw[starts + 1]).astype(np.uint16)
    return groups, raw[starts + 2], pc.binary_slice(stored, 3, int(np.diff(offsets).max()))


def expiry_keys(key_groups: Groups, times_ms: Array, state_id: int, rests: pa.Array) -> list[bytes]:
    """``layout.expiry_key`` of each."""
    pieces = [
        _prefixes(key_groups, layout.EXPIRY_INDEX),
        packed_times(times_ms),
        Fixed(np.void(bytes([state_id]))),
        rests,
    ]
    located: list[bytes] = concatenate(len(rests), pieces).to_pylist()
    return located


def timer_index_keys(key_groups: Groups, times_ms: Array, keys: pa.Array) -> list[bytes]:
    """``layout.timer_index_key`` of the timers of encoded keys."""
    pieces = [_prefixes(key_groups, layout.TIMER_INDEX), packed_times(times_ms), keys]
    located: list[bytes] = concatenate(len(keys), pieces).to_pylist()
    return located


def packed_times(times_ms: Array) -> Fixed:
    """``layout.pack_time`` of each, which are int64."""
    return Fixed((times_ms.astype(np.int64).view(np.uint64) ^ np.uint64(1 << 63)).astype(">u8"))


def _prefixes(key_groups: Groups, state_id: int) -> Fixed:
    """``layout.prefix`` of each."""
    prefixes = np.empty(len(key_groups), [("key_group", ">u2"), ("state_id", "u1")])
    prefixes["key_group"], prefixes["state_id"] = key_groups, state_id
    return Fixed(prefixes)


def changes_by_key_group(
    name: str, key_groups: Groups, rests: pa.Array, old: pa.Array, new: pa.Array
) -> Iterator[tuple[int, int, int, int]]:
    """(key group, change of its digest, of its count, of its bytes) of entries of one state that were replaced; null is none.
    A key group comes once if they ascend. ``rests``: stored keys without key group and state id."""
    seed = layout.seed_of(name)
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
    key_sizes = 3 + np.diff(binary_views(rests)[0]).astype(np.int64)
    sizes = np.add.reduceat(_entry_bytes(name, key_sizes, new) - _entry_bytes(name, key_sizes, old), starts)
    yield from zip(key_groups[starts].tolist(), digests.tolist(), counts.tolist(), sizes.tolist(), strict=True)


def _entry_bytes(name: str, key_sizes: npt.NDArray[np.int64], entries: pa.Array) -> npt.NDArray[np.int64]:
    """``layout.entry_bytes`` of each; 0 for null. ``key_sizes``: of the stored keys."""
    there = entries.is_valid().to_numpy(zero_copy_only=False)
    if not there.any():
        return np.zeros(len(entries), np.int64)
    sizes = (
        pc.fill_null(pc.binary_length(entries), 0).to_numpy(zero_copy_only=False) + key_sizes + layout.SEQUENCE_BYTES
    )
    if name == layout.TIMERS_NAME:
        sizes += key_sizes + layout.SEQUENCE_BYTES
    else:
        sizes += is_expiring(entries) * (key_sizes + layout.EXPIRY_BYTES + layout.SEQUENCE_BYTES)
    counted: npt.NDArray[np.int64] = sizes * there
    return counted


def timers_of(groups: Groups, rests: pa.Array, entries: pa.Array) -> tuple[Groups, pa.Array]:
    """Key group, and key with expiry as the digest hashes them, of each timer in entries of either layout, in their
    order.

    Raises: CorruptFile for an entry that is of neither.
    """
    (starts, raw), key_sizes = binary_views(entries), np.diff(binary_views(rests)[0])
    sizes = np.diff(starts)
    odd = (sizes % 8 != 0) | ((sizes == 0) & (key_sizes < 8))
    if odd.any():
        at = int(np.flatnonzero(odd)[0])
        raise CorruptFile(f"the timers of a key in key group {groups[at]} are not times of 8 bytes: {sizes[at]} bytes")
    if not sizes.any():
        return groups, rests
    owners = np.repeat(np.arange(len(rests)), np.maximum(sizes // 8, 1))
    offsets = np.concatenate(([0], np.cumsum(np.where(sizes[owners] > 0, 8, 0)))).astype(np.int32)
    packed = np.ascontiguousarray(raw[starts[0] : starts[-1]])
    times = pa.Array.from_buffers(pa.binary(), len(owners), [None, pa.py_buffer(offsets), pa.py_buffer(packed)])
    return groups[owners], joined(rests.take(pa.array(owners)), times)


def split_timers(timers: pa.Array) -> tuple[pa.Array, Array]:
    """Keys, and expiries in milliseconds, of what ``timers_of`` gives."""
    offsets, raw = binary_views(timers)
    times = np.ascontiguousarray(raw[(offsets[1:] - 8)[:, None] + np.arange(8)]).view(">u8")[:, 0].astype(np.uint64)
    return cut(timers.buffers()[2], offsets[:-1], offsets[1:] - 8), (times ^ np.uint64(1 << 63)).view(np.int64)


def is_expiring(entries: pa.Array) -> Any:
    """Which entries have an expiry; not those that are null."""
    marker = pc.equal(pc.binary_slice(entries, 0, 1), pa.scalar(bytes([layout.EXPIRING]), pa.binary()))
    return pc.fill_null(marker, False).to_numpy(zero_copy_only=False)


def expiries(entries: pa.Array) -> Any:
    """The expiry of each entry, in milliseconds. Every entry must have one (`is_expiring`)."""
    packed = pc.binary_slice(entries, 1, 9).cast(pa.binary(8))
    return np.frombuffer(packed.buffers()[1], "<i8", len(packed), packed.offset * 8)


def without_expiry(entries: pa.Array) -> pa.Array:
    """Rows of entries that all have an expiry."""
    # A slice without a stop fails in Arrow 26.
    return pc.binary_slice(entries, 9, pc.max(pc.binary_length(entries)).as_py())


def joined(*parts: pa.Array | pa.Scalar) -> pa.Array:
    """The binary columns concatenated row by row; a scalar is the same in every row."""
    return pc.binary_join_element_wise(*parts, pa.scalar(b"", pa.binary()))
