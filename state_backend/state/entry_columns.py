"""Functions that build and split stored keys and entries, many at a time, as Arrow and NumPy columns.

The module `layout` has the same functions for one entry at a time, and its docstring has a drawing of the bytes. A
`rest` is a stored key without key group and state id.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from state_backend.formats.arrow_columns import (
    Array,
    Fixed,
    Int64s,
    Mask,
    binary_views,
    concatenate,
    cut,
    gather,
    valid_rows,
)
from state_backend.formats.hash_columns import xxh64
from state_backend.formats.row_codec import FORMAT
from state_backend.state import layout
from state_backend.values.errors import CorruptFile

Groups = npt.NDArray[np.uint16]
# Length of the key group (2) and the state id (1), which begin each stored key.
PREFIX_BYTES = 3


def stored_keys(key_groups: Groups, state_id: int, keys: pa.Array, suffix: bytes = b"") -> list[bytes]:
    behind = [Fixed(np.void(suffix))] if suffix else []
    return _located(key_groups, state_id, [keys, *behind])


def parts_of(stored: pa.Array) -> tuple[Groups, npt.NDArray[np.uint8], pa.Array]:
    offsets, raw = binary_views(stored)
    starts = offsets[:-1]
    groups = (raw[starts].astype(np.uint16) * 256 + raw[starts + 1]).astype(np.uint16)
    return groups, raw[starts + 2], pc.binary_slice(stored, 3, int(np.diff(offsets).max()))


def indexed_entries(expiry_keys: pa.Array) -> tuple[Groups, Array, npt.NDArray[np.uint8], pa.Array]:
    offsets, raw = binary_views(expiry_keys)
    starts = offsets[:-1]
    groups = gather(raw, starts, np.dtype(">u2")).astype(np.uint16)
    rests = cut(expiry_keys.buffers()[2], starts + 12, offsets[1:])
    return groups, gather(raw, starts + 3, np.dtype(">u8")), raw[starts + 11], rests


def expiry_keys(key_groups: Groups, times_ms: Array, state_id: int, rests: pa.Array) -> list[bytes]:
    return _located(key_groups, layout.EXPIRY_INDEX, [packed_times(times_ms), Fixed(np.void(bytes([state_id]))), rests])


def timer_index_keys(key_groups: Groups, times_ms: Array, keys: pa.Array) -> list[bytes]:
    return _located(key_groups, layout.TIMER_INDEX, [packed_times(times_ms), keys])


def indexed_timers(index_keys: pa.Array) -> tuple[pa.Array, Int64s]:
    offsets, raw = binary_views(index_keys)
    packed = gather(raw, offsets[:-1] + PREFIX_BYTES, np.dtype(">u8")).astype(np.uint64)
    times_ms = (packed ^ np.uint64(1 << 63)).view(np.int64)
    return cut(index_keys.buffers()[2], offsets[:-1] + PREFIX_BYTES + 8, offsets[1:]), times_ms


def packed_times(times_ms: Array) -> Fixed:
    return Fixed((times_ms.astype(np.int64).view(np.uint64) ^ np.uint64(1 << 63)).astype(">u8"))


def _located(key_groups: Groups, state_id: int, pieces: list[Fixed | pa.Array]) -> list[bytes]:
    prefixes = np.empty(len(key_groups), [("key_group", ">u2"), ("state_id", "u1")])
    prefixes["key_group"], prefixes["state_id"] = key_groups, state_id
    located: list[bytes] = concatenate(len(key_groups), [Fixed(prefixes), *pieces]).to_pylist()
    return located


def changes_by_key_group(
    name: str, key_groups: Groups, rests: pa.Array, old: pa.Array, new: pa.Array
) -> Iterator[tuple[int, int, int, int]]:
    """Yield (key group, change of its digest, of its entry count, of its bytes), as entries `old` become `new`.

    `name`: the state. `rests`: stored keys without key group and state id. A null in `old` or `new` means no entry.
    """
    seed = layout.seed_of(name)
    gone, come = (mask_of(entries.is_valid()) for entries in (old, new))
    change = np.zeros(len(rests), np.uint64)
    for entries, there, combine in ((old, gone, np.subtract), (new, come, np.add)):
        if there.all():
            change = combine(change, xxh64(_behind(rests, entries), seed))
        elif there.any():
            mask = pa.array(there)
            change[there] = combine(change[there], xxh64(_behind(rests.filter(mask), entries.filter(mask)), seed))
    starts = np.concatenate([[0], np.flatnonzero(key_groups[1:] != key_groups[:-1]) + 1])
    counts = np.add.reduceat(come.astype(np.int64) - gone, starts)
    digests = np.add.reduceat(change, starts)
    key_sizes = 3 + np.diff(binary_views(rests)[0]).astype(np.int64)
    sizes = np.add.reduceat(_entry_bytes(name, key_sizes, new) - _entry_bytes(name, key_sizes, old), starts)
    yield from zip(key_groups[starts].tolist(), digests.tolist(), counts.tolist(), sizes.tolist(), strict=True)


def _behind(rests: pa.Array, entries: pa.Array) -> pa.Array:
    return concatenate(len(rests), [rests, entries])


def _entry_bytes(name: str, key_sizes: Int64s, entries: pa.Array) -> Int64s:
    """Return the bytes that RocksDB counts for each entry and its keys, as `layout.entry_bytes` does; 0 for null."""
    there = mask_of(entries.is_valid())
    if not there.any():
        return np.zeros(len(entries), np.int64)
    sizes = (
        pc.fill_null(pc.binary_length(entries), 0).to_numpy(zero_copy_only=False) + key_sizes + layout.SEQUENCE_BYTES
    )
    if name == layout.TIMERS_NAME:
        sizes += key_sizes + layout.SEQUENCE_BYTES
    else:
        sizes += is_expiring(entries) * (key_sizes + layout.EXPIRY_BYTES + layout.SEQUENCE_BYTES)
    counted: Int64s = sizes * there
    return counted


def mask_of(column: pa.Array) -> Mask:
    """Convert a column of booleans that has no nulls to a NumPy mask."""
    mask: Mask = column.to_numpy(zero_copy_only=False)
    return mask


def check_timers(rests: pa.Array, entries: pa.Array) -> None:
    """Raise `CorruptFile` unless all entries are timers. `rests`: stored keys without key group and state id."""
    wrong = (np.diff(binary_views(entries)[0]) > 0) | (np.diff(binary_views(rests)[0]) < layout.TIME_BYTES)
    for at in np.flatnonzero(wrong)[:1].tolist():
        layout.check_timer(rests[at].as_py(), entries[at].as_py())


def split_timers(timers: pa.Array) -> tuple[pa.Array, Array]:
    """Split stored timers, without key group and state id, into encoded keys and times."""
    offsets, raw = binary_views(timers)
    times = np.ascontiguousarray(raw[(offsets[1:] - 8)[:, None] + np.arange(8)]).view(">u8")[:, 0].astype(np.uint64)
    return cut(timers.buffers()[2], offsets[:-1], offsets[1:] - 8), (times ^ np.uint64(1 << 63)).view(np.int64)


def list_parts(rests: pa.Array, key_sizes: Array) -> tuple[Mask, Mask]:
    """Return two masks of a list state's stored keys (`rests`): which belong to bounds of a list, which to elements.

    `rests` lack the key group and the state id. `key_sizes`: the bytes of the encoded key that each begins with.
    """
    offsets, raw = binary_views(rests)
    sizes = np.diff(offsets)
    marks = raw[offsets[:-1] + np.minimum(key_sizes, sizes - 1)]
    heads = (sizes - key_sizes == 1) & (marks == layout.LIST_META[0])
    return heads, (sizes - key_sizes == 9) & (marks == layout.LIST_ELEMENT[0])


def numbers_at(raw: Array, places: Array) -> Int64s:
    """Return, as int64, the big-endian u64 at each of the byte positions `places` in `raw`."""
    return gather(raw, places, np.dtype(">u8")).astype(np.int64)


def is_expiring(entries: pa.Array) -> Mask:
    offsets, raw = binary_views(entries)
    if not len(raw):
        return np.zeros(len(entries), np.bool_)
    starts = offsets[:-1]
    expiring: Mask = (raw[np.minimum(starts, len(raw) - 1)] == layout.EXPIRING) & (offsets[1:] > starts)
    if entries.null_count:
        expiring &= valid_rows(entries)
    return expiring


def expiries(entries: pa.Array, name: str) -> Int64s:
    offsets, raw = binary_views(entries)
    if len(entries) and np.diff(offsets).min() < 9:
        raise CorruptFile(f"state {name!r}: an entry with an expiry time is truncated")
    return gather(raw, offsets[:-1] + 1, np.dtype("<i8")).astype(np.int64)


def split_expiry(entries: pa.Array, name: str) -> tuple[pa.Array, pa.Array]:
    """Return (expiry times in ms, null for never; encoded rows) of the stored entries of state `name`."""
    expiring = is_expiring(entries)
    if not expiring.any():
        return pa.nulls(len(entries), pa.int64()), entries
    mask = pa.array(expiring)
    some = entries.filter(mask)
    times = np.zeros(len(entries), np.int64)
    times[expiring] = expiries(some, name)
    # `binary_slice` without a stop fails in Arrow 26, so the length of the longest entry is the stop.
    rows = pc.binary_slice(some, 9, pc.max(pc.binary_length(some)).as_py())
    return pa.array(times, mask=~expiring), rows if expiring.all() else pc.replace_with_mask(entries, mask, rows)


def row_versions(rows: pa.Array, name: str) -> npt.NDArray[np.uint8]:
    offsets, raw = binary_views(rows)
    if (np.diff(offsets) < 2).any() or (raw[offsets[:-1]] != FORMAT).any():
        raise CorruptFile(f"state {name!r}: an entry does not begin with a row's header")
    return raw[offsets[:-1] + 1]


def bytes_in(column: pa.Array) -> int:
    return int(pc.sum(pc.binary_length(column)).as_py() or 0)


def join_columns(*parts: pa.Array | pa.Scalar) -> pa.Array:
    return pc.binary_join_element_wise(*parts, pa.scalar(b"", pa.binary()))
