"""Check, entry by entry, that a restored shard is the state that its manifest records.

Entries are read as Arrow columns, up to 65,536 entries or 32 MiB at a time. Some entries must agree with data elsewhere
in the shard: timers with the timer index, expiring entries with the expiry index, and all entries with the recorded
digest. For these three, the check compares only sums of hashes, one sum for each key group. So memory stays bounded for
a shard of any size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from state_backend.adapters.rocks import RocksStore
from state_backend.formats.arrow_columns import Array, Fixed, Mask, binary_views, concatenate, cut
from state_backend.formats.hash_columns import xxh64
from state_backend.formats.key_columns import KeyColumns
from state_backend.formats.key_columns import key_groups as key_groups_of
from state_backend.formats.row_columns import RowColumns
from state_backend.formats.types import parse_struct
from state_backend.state import layout
from state_backend.state.accounts import Accounts
from state_backend.state.entry_columns import (
    Groups,
    changes_by_key_group,
    check_timers,
    list_parts,
    mask_of,
    numbers_at,
    packed_times,
    parts_of,
    row_versions,
    split_expiry,
    split_timers,
)
from state_backend.values.errors import CairnError
from state_backend.values.records import KeyGroupState, ShardManifest, StateDescriptor

MAX_FINDINGS = 20
_BATCH_ROWS, _BATCH_BYTES = 65_536, 32 * 1024 * 1024

Sums = npt.NDArray[np.uint64]


def verify_shard(
    store: RocksStore,
    manifest: ShardManifest,
    states: Sequence[StateDescriptor],
    key_schema: dict[str, Any],
    max_parallelism: int,
) -> tuple[int, list[str]]:
    """Check every entry of a shard against its manifest. Return the number of entries, and at most 20 findings.

    1. Each key belongs to the shard and to the key group that it is stored under.
    2. Each entry can be decoded with its recorded schema version.
    3. Each element of a list lies within the list's positions. Positions may have no element: if the expiry of the
       state was changed or removed, elements expire in any order.
    4. The timer index and the expiry index agree with the timers and the expiring entries.
    5. The entry counts and digests of the key groups are the recorded ones.
    """
    try:
        check = _Check(manifest, states, key_schema, max_parallelism)
    except CairnError as error:
        return 0, [f"shard {manifest.shard}: {error}"]
    try:
        for stored, entries in store.chunks(b"", None, rows=_BATCH_ROWS, most_bytes=_BATCH_BYTES):
            check.look_at(pa.array(stored, pa.binary()), pa.array(entries, pa.binary()))
    except CairnError as error:
        check.found(str(error))
    check.compare()
    return check.entries, check.findings


class _OpenList(NamedTuple):
    """A list that may continue in the next batch: positions `first` to `next` - 1."""

    group: int
    key: bytes
    first: int
    next: int


class _State:
    def __init__(self, descriptor: StateDescriptor) -> None:
        self.descriptor, self.name = descriptor, descriptor.name
        self.codecs = {
            v.version: RowColumns(descriptor.name, parse_struct(v.value), v.version) for v in descriptor.versions
        }
        user_key = descriptor.versions[-1].user_key
        what = f"user key of state {descriptor.name!r}"
        self.user_keys = KeyColumns(parse_struct(user_key), what=what) if user_key is not None else None
        self.open_list = _OpenList(-1, b"", 0, 0)


class _Check:
    def __init__(
        self,
        manifest: ShardManifest,
        states: Sequence[StateDescriptor],
        key_schema: dict[str, Any],
        max_parallelism: int,
    ) -> None:
        self.findings: list[str] = []
        self.entries = 0
        self._manifest = manifest
        self._max_parallelism = max_parallelism
        self._key_schema = parse_struct(key_schema)
        self._keys = KeyColumns(self._key_schema)
        self._by_id = {d.state_id: _State(d) for d in states}
        self._accounts = Accounts()
        # Checks of the timer index and of the expiry index: one sum for each key group. The check adds the hash of each
        # index key that a timer or an expiring entry must have, and subtracts the hash of each index key in the store.
        # A sum of 0 at the end means that the store has exactly the right index keys.
        self._timer_balance, self._expiry_balance = np.zeros((2, manifest.key_groups.last + 1), np.uint64)

    def found(self, text: str) -> None:
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(f"shard {self._manifest.shard}: {text}")

    def look_at(self, stored: pa.Array, entries: pa.Array) -> None:
        """Check one batch of entries, the next in the order of the stored keys `stored`."""
        long_enough = np.diff(binary_views(stored)[0]) >= 3
        if not long_enough.all():
            self.found(f"{np.count_nonzero(~long_enough)} stored keys are too short for a key group and a state id")
            mask = pa.array(long_enough)
            stored, entries = stored.filter(mask), entries.filter(mask)
            if not len(stored):
                return
        groups, ids, rests = parts_of(stored)
        owned = self._manifest.key_groups
        inside = (groups >= owned.first) & (groups <= owned.last)
        for key_group in np.unique(groups[~inside]).tolist():
            self.found(f"key group {key_group} belongs to another shard, but has entries here")
        for state_id in np.unique(ids[inside]).tolist():
            rows = inside & (ids == state_id)
            if rows.all():
                self._dispatch(state_id, groups, rests, entries)
            else:
                mask = pa.array(rows)
                self._dispatch(state_id, groups[rows], rests.filter(mask), entries.filter(mask))

    def _dispatch(self, state_id: int, groups: Groups, rests: pa.Array, entries: pa.Array) -> None:
        try:
            if state_id in (layout.TIMER_INDEX, layout.EXPIRY_INDEX):
                balance = self._timer_balance if state_id == layout.TIMER_INDEX else self._expiry_balance
                _add(balance, groups, _U64_ZERO - xxh64(rests, 0))
                if np.diff(binary_views(entries)[0]).any():
                    self.found("an index key has a value, expected none")
            elif state_id == layout.TIMERS:
                self._timers(groups, rests, entries)
            elif state_id not in self._by_id:
                self.found(f"{len(rests)} entries have the unknown state id {state_id}")
            else:
                self._entries(self._by_id[state_id], groups, rests, entries)
        except CairnError as error:
            self.found(str(error))

    def _entries(self, state: _State, groups: Groups, rests: pa.Array, entries: pa.Array) -> None:
        keys, sizes = self._keys.decode_prefix(rests)
        self._check_owned(keys, groups)
        lengths = np.diff(binary_views(rests)[0])
        if state.descriptor.kind == "list":
            elements = self._lists(state, groups, rests, entries, sizes)
            mask = pa.array(elements)
            groups, rests, entries = groups[elements], rests.filter(mask), entries.filter(mask)
        elif state.user_keys is not None:
            offsets = binary_views(rests)[0]
            state.user_keys.decode(cut(rests.buffers()[2], offsets[:-1] + sizes, offsets[1:]))
        elif (lengths != sizes).any():
            self.found(f"value state {state.name!r}: extra bytes follow a key")
        if len(rests):
            self._count(state.name, groups, rests, entries)
            self._values(state, groups, rests, entries)

    def _values(self, state: _State, groups: Groups, rests: pa.Array, entries: pa.Array) -> None:
        """Check that each entry of `state` decodes with its schema version. Note which expiry-index keys must exist."""
        times, rows = split_expiry(entries, state.name)
        expiring = mask_of(times.is_valid())
        if expiring.any():
            packed = packed_times(np.asarray(times.drop_null()))
            state_id = Fixed(np.void(bytes([state.descriptor.state_id])))
            indexed = concatenate(len(times) - times.null_count, [packed, state_id, rests.filter(pa.array(expiring))])
            _add(self._expiry_balance, groups[expiring], xxh64(indexed, 0))
        versions = row_versions(rows, state.name)
        for version in np.unique(versions).tolist():
            codec = state.codecs.get(version)
            if codec is None:
                self.found(f"state {state.name!r}: an entry has schema version {version}, which is not recorded")
            elif (versions == version).all():
                codec.decode(rows)
            else:
                codec.decode(rows.filter(pa.array(versions == version)))

    def _check_owned(self, keys: Sequence[pa.Array], groups: Groups) -> None:
        expected = key_groups_of(keys, self._key_schema, self._max_parallelism)
        for at in np.flatnonzero(expected != groups)[:MAX_FINDINGS].tolist():
            key = tuple(column[at].as_py() for column in keys)
            self.found(f"key {key!r} is stored in key group {groups[at]}, but belongs to {expected[at]}")

    def _count(self, name: str, groups: Groups, rests: pa.Array, entries: pa.Array) -> None:
        self.entries += len(groups)
        for group, *changes in changes_by_key_group(name, groups, rests, pa.nulls(len(rests), pa.binary()), entries):
            self._accounts.change(group, name, *changes)

    def _lists(self, state: _State, groups: Groups, rests: pa.Array, entries: pa.Array, sizes: Array) -> Mask:
        """Check the rows of a list state. Return a mask: True for an element, False for the bounds of a list."""
        offsets, raw = binary_views(rests)
        heads, elements = list_parts(rests, sizes)
        if not (heads | elements).all():
            at = int(np.flatnonzero(~(heads | elements))[0])
            self.found(
                f"list state {state.name!r}: the stored key {rests[at].as_py().hex()} is neither an element nor the positions of a list"
            )
        starts, data = binary_views(entries)
        if (np.diff(starts)[heads] != 16).any():
            self.found(f"list state {state.name!r}: the positions of a list are not 16 bytes")
            return elements
        keys = cut(rests.buffers()[2], offsets[:-1], offsets[:-1] + sizes)
        # List 0 is the list that was still open at the end of the batch before.
        open_ = state.open_list
        list_of, begun = np.cumsum(heads), keys.filter(pa.array(heads))
        list_groups = np.append(open_.group, groups[heads])
        list_keys = pa.concat_arrays([pa.array([open_.key], pa.binary()), begun])
        firsts, nexts = (
            np.append(carried, numbers_at(data, starts[:-1][heads] + behind))
            for carried, behind in ((open_.first, 0), (open_.next, 8))
        )
        mine = (list_groups[list_of] == groups) & mask_of(pc.equal(list_keys.take(pa.array(list_of)), keys))
        if not mine.all():
            self.found(f"list state {state.name!r}: a list has elements, but no positions")
        inside = elements & mine
        of, positions = list_of[inside], numbers_at(raw, offsets[1:][inside] - 8)
        for wrong in np.flatnonzero((positions < firsts[of]) | (positions >= nexts[of]))[:1].tolist():
            self.found(
                f"list state {state.name!r}: a list with positions {firsts[of[wrong]]} .. {nexts[of[wrong]]} (exclusive) has an element at "
                f"{positions[wrong]}"
            )
        for wrong in np.flatnonzero(firsts > nexts)[:1].tolist():
            self.found(
                f"list state {state.name!r}: a list begins at position {firsts[wrong]}, but ends at {nexts[wrong]}"
            )
        state.open_list = _OpenList(list_groups[-1].item(), list_keys[-1].as_py(), firsts[-1].item(), nexts[-1].item())
        return elements

    def _timers(self, groups: Groups, rests: pa.Array, entries: pa.Array) -> None:
        check_timers(rests, entries)
        keys, times_ms = split_timers(rests)
        self._check_owned(self._keys.decode(keys), groups)
        same_key = mask_of(pc.equal(keys[1:], keys[:-1])) & (groups[1:] == groups[:-1])
        again = same_key & (times_ms[1:] <= times_ms[:-1])
        if again.any():
            self.found(f"{np.count_nonzero(again)} timers are out of order or occur twice")
        self._count(layout.TIMERS_NAME, groups, rests, entries)
        _add(self._timer_balance, groups, xxh64(concatenate(len(rests), [packed_times(times_ms), keys]), 0))

    def compare(self) -> None:
        recorded = {s.key_group: s for s in self._manifest.key_group_states}
        seen = {s.key_group: s for s in self._accounts.states()}
        balances = np.flatnonzero(self._timer_balance | self._expiry_balance).tolist()
        for key_group in sorted({*recorded, *seen, *balances}):
            empty = KeyGroupState(key_group=key_group, entries={}, digest=0)
            expected, found = recorded.get(key_group, empty), seen.get(key_group, empty)
            if key_group not in self._manifest.key_groups:
                self.found(f"key group {key_group} belongs to another shard, but is recorded here")
                continue
            if found.entries != expected.entries:
                self.found(f"key group {key_group} has the entry counts {found.entries}, expected {expected.entries}")
            elif found.digest != expected.digest:
                self.found(f"key group {key_group} has digest {found.digest:016x}, expected {expected.digest:016x}")
            if self._timer_balance[key_group]:
                self.found(f"key group {key_group}: timers and timer index differ")
            if self._expiry_balance[key_group]:
                self.found(f"key group {key_group}: expiring entries and expiry index differ")


_U64_ZERO = np.uint64(0)


def _add(sums: Sums, groups: Groups, hashes: Sums) -> None:
    if len(groups):
        starts = np.concatenate([[0], np.flatnonzero(groups[1:] != groups[:-1]) + 1])
        sums[groups[starts]] += np.add.reduceat(hashes, starts)
