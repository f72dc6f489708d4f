"""Compare two states entry by entry, for `cairn diff` and the comparison of a trial with production.

The comparison reads only the parts of the states that may differ:

    states, key groups   Where counts and digests are equal on both sides, nothing is read.
    shards               Only shards with a differing key group are restored, and only from SSTs whose keys overlap
                         those key groups. A file that both sides need is fetched once.
    entries              The stored bytes of both sides are compared in the order of the keys.

After a schema change, two entries may be stored as different bytes but decode to the same value. Such entries count as
equal. A canonical savepoint records only one digest, for the whole state. If this digest differs, the whole savepoint
is read, with the number of key groups of the other side.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, Protocol

from state_backend.adapters.open_storage import open_storage
from state_backend.adapters.rocks import RocksStore
from state_backend.checkpoint.dropped_checkpoint import telling_drops
from state_backend.checkpoint.savepoints import native_manifest
from state_backend.formats.key_codec import KeyCodec
from state_backend.formats.schema_evolution import row_reader
from state_backend.formats.types import names_and_types, parse_struct
from state_backend.inspection.describe import plain, self_describing
from state_backend.inspection.state_source import StateSource, fill_store, open_shard
from state_backend.ports.storage import Storage
from state_backend.shard.file_cache import FileCache
from state_backend.shard.manifest import manifest_of
from state_backend.state import layout
from state_backend.state.entries import decode_entry
from state_backend.values.errors import UsageError
from state_backend.values.frozen import frozen
from state_backend.values.intervals import format_instant, from_ms, shown_ms
from state_backend.values.key_groups import KeyGroupRange, range_of, shard_of
from state_backend.values.records import Content, KeyGroupState, ShardManifest, StateDescriptor

Groups = Mapping[int, KeyGroupState]
_ALL_BYTES = 1 << 62


@frozen
class Entry:
    """Decoded value, list element or map value of a state, with its expiry time (None: it never expires)."""

    value: dict[str, Any]
    expiry_ms: int | None


@frozen
class EntryChange:
    state: str
    change: Literal["added", "removed", "changed"]
    key: dict[str, Any]
    # The key inside of a map; None for other states.
    user_key: dict[str, Any] | None = None
    # The position inside of a list; None for other states.
    position: int | None = None
    # The entry of the first state; None if it was added. A timer's value is its time, as `at_ms`.
    before: Entry | None
    # The entry of the second state; None if it was removed.
    after: Entry | None


def plan_groups(first: Groups | None, second: Groups | None, max_parallelism: int) -> list[int]:
    """Return the key groups that may differ between two states, ascending: all, if a side does not know its own."""
    if first is None or second is None:
        return [*range(max_parallelism)]
    # Byte counts are not compared, because older releases did not record them.
    held = [{g: (s.entries, s.digest) for g, s in groups.items()} for groups in (first, second)]
    return sorted(g for g in first.keys() | second.keys() if held[0].get(g) != held[1].get(g))


def diff_states(
    first: StateSource, second: StateSource, work: Path, *, states: Collection[str] | None = None
) -> Iterator[EntryChange]:
    """Yield the changes from the first state to the second, by key group, state, key. `states`: names; None: all."""
    keys = [names_and_types(parse_struct(source.content.key_schema)) for source in (first, second)]
    if keys[0] != keys[1]:
        raise UsageError(f"{first} and {second} have different key columns, so they can't be compared")
    for state in states or ():
        if not any(state == d.name for s in (first, second) for d in s.content.states) and state != layout.TIMERS_NAME:
            first.descriptor(state)
    if _same_state(first.content) == _same_state(second.content):
        return
    fixed = [s.content.max_parallelism for s in (first, second) if not s.canonical] or [first.content.max_parallelism]
    if len({*fixed}) > 1:
        raise UsageError(
            f"{first} has {fixed[0]} key groups, but {second} has {fixed[1]}\n"
            "Take a canonical savepoint of one of them and compare that"
        )
    with ExitStack() as stack:
        sides = [
            _ShardSide(source, fixed[0], work / name, stack) for source, name in ((first, "first"), (second, "second"))
        ]
        groups = plan_groups(sides[0].groups, sides[1].groups, fixed[0])
        cache = work / "cache"
        for group in groups:
            # `keeps` closes the side's open shard if that shard does not hold this key group, and then returns False.
            # If both sides' shards are closed, no shard needs the files in the cache: they are deleted to free the
            # disk.
            if not any([side.keeps(group) for side in sides]):
                shutil.rmtree(cache, ignore_errors=True)
            for side in sides:
                side.open(group, groups, FileCache(cache, _ALL_BYTES))
            yield from changes_of_group(sides[0], sides[1], group, states)


def _same_state(content: Content) -> tuple[int, int]:
    """Return digest and number of entries. They are equal for equal states, even with other shards or key groups."""
    return content.digest, content.totals.entries


class Side(Protocol):
    """One of the two compared states, or a part of it."""

    @property
    def keys(self) -> KeyCodec: ...

    @property
    def states(self) -> Mapping[str, StateDescriptor]:
        """The descriptors of the states, by name."""

    def scan(self, group: int, state_id: int | None) -> Iterator[tuple[bytes, bytes]]:
        """Yield the stored entries of one state in a key group, ascending.

        An entry is a pair: the stored key without key group and state id, and the stored value. Without a state id, the
        method yields nothing.
        """


class _ShardSide:
    """One of the two compared states. One shard is open at a time: the shard that holds the compared key group."""

    def __init__(self, source: StateSource, max_parallelism: int, work: Path, stack: ExitStack) -> None:
        self.source, self.work = source, work
        self.max_parallelism = max_parallelism
        self.parallelism = min(source.content.parallelism, max_parallelism)
        self.storage = open_storage(source.url)
        self.keys = KeyCodec(parse_struct(source.content.key_schema))
        self.states: Mapping[str, StateDescriptor] = {d.name: d for d in source.content.states}
        self._store: RocksStore | None = None
        self._open: ExitStack = stack.enter_context(ExitStack())
        self._range: KeyGroupRange | None = None
        self.groups: Groups | None = None
        if not source.canonical:
            manifests = manifests_of(source, self.storage)
            self.groups = {s.key_group: s for m in manifests for s in m.key_group_states}

    def keeps(self, group: int) -> bool:
        """Return True if the open shard holds the key group `group`. Otherwise close the shard, and return False."""
        if self._range is not None and group in self._range:
            return True
        self._close()
        return False

    def open(self, group: int, groups: Sequence[int], cache: FileCache) -> None:
        if self._range is not None:
            return
        shard = shard_of(group, self.parallelism, self.max_parallelism)
        self._range = range_of(shard, self.parallelism, self.max_parallelism)
        self.work.mkdir(parents=True)
        if self.source.canonical:
            filled = fill_store(self.source, self._range, self.max_parallelism, self.storage, self.work)
            self._store = self._open.enter_context(filled)
        else:
            spans = [layout.key_group_bounds(g, g) for g in groups if g in self._range]
            opened = open_shard(self.source, shard, self.storage, self.work, spans=spans, cache=cache)
            self._store, _ = self._open.enter_context(opened)

    def _close(self) -> None:
        self._open.close()
        self._store, self._range = None, None
        shutil.rmtree(self.work, ignore_errors=True)

    def scan(self, group: int, state_id: int | None) -> Iterator[tuple[bytes, bytes]]:
        """Yield the stored entries of one state in a key group of the open shard. `Side.scan` describes them."""
        if state_id is None or self._store is None:
            return
        start = layout.prefix(group, state_id)
        for stored_key, entry in self._store.scan(start, layout.after(start)):
            yield stored_key[3:], entry


def manifests_of(source: StateSource, storage: Storage) -> list[ShardManifest]:
    """Return the manifests of a checkpoint or a native savepoint, by shard; an empty list for a canonical savepoint."""
    if source.savepoint is None:
        with telling_drops(storage, source.checkpoint_id):
            return [manifest_of(ref, storage) for ref in source.content.shards]
    return [native_manifest(source.savepoint, ref.shard, storage) for ref in source.content.shards]


def describe_change(change: EntryChange) -> dict[str, Any]:
    row = {"state": change.state, "change": change.change, "key": plain(change.key)}
    if change.user_key is not None:
        row["user_key"] = plain(change.user_key)
    if change.position is not None:
        row["pos"] = change.position
    for name, entry in (("before", change.before), ("after", change.after)):
        if entry is not None:
            row[name] = plain(entry.value)
        if entry is not None and entry.expiry_ms is not None:
            row[f"{name}_expires_at"] = format_instant(from_ms(shown_ms(entry.expiry_ms)))
    return row


def changes_of_group(
    first: Side, second: Side, group: int, states: Collection[str] | None = None
) -> Iterator[EntryChange]:
    """Yield the changes that turn the first side's entries of a key group into the second side's, state by state."""
    for name in dict.fromkeys([*first.states, *second.states]):
        if states is None or name in states:
            yield from _state_changes(first, second, group, name)
    if states is None or layout.TIMERS_NAME in states:
        yield from _timer_changes(first, second, group)


def _state_changes(first: Side, second: Side, group: int, name: str) -> Iterator[EntryChange]:
    a, b = first.states.get(name), second.states.get(name)
    # If the state was dropped and declared again with another kind or user key, no entry can be compared.
    anew = a is not None and b is not None and _shape(a) != _shape(b)
    for old, new in [(a, None), (None, b)] if anew else [(a, b)]:
        yield from _compare(first, second, group, old, new)


def _shape(descriptor: StateDescriptor) -> tuple[Any, ...]:
    user_key = descriptor.versions[-1].user_key
    return descriptor.kind, parse_struct(user_key) if user_key is not None else None


def _compare(
    first: Side, second: Side, group: int, a: StateDescriptor | None, b: StateDescriptor | None
) -> Iterator[EntryChange]:
    described = b or a
    assert described is not None
    readers = [EntryReader(side.keys, d) if d is not None else None for side, d in ((first, a), (second, b))]
    scans = [side.scan(group, d.state_id if d is not None else None) for side, d in ((first, a), (second, b))]
    for rest, stored in merge_entries(*scans):
        if stored[0] == stored[1]:
            continue
        read = [
            reader.read(layout.prefix(group, reader.state_id) + rest, entry)
            if reader is not None and entry is not None
            else None
            for reader, entry in zip(readers, stored, strict=True)
        ]
        place = next((found[0] for found in read if found is not None), None)
        if place is None:
            # Beside its elements, a list stores where it begins and ends. `read` returns None for this stored key and
            # value, which are no entry of the state.
            continue
        before, after = (found[1] if found is not None else None for found in read)
        if before is not None and after is not None and _same(before, after):
            continue
        yield EntryChange(
            state=described.name,
            change="added" if before is None else "removed" if after is None else "changed",
            **place,
            before=before,
            after=after,
        )


def _same(before: Entry, after: Entry) -> bool:
    """Return True if both entries have equal values and expiry times.

    A field that one side's schema lacks counts as null.
    """
    known = [{name: value for name, value in e.value.items() if value is not None} for e in (before, after)]
    return (repr(known[0]), before.expiry_ms) == (repr(known[1]), after.expiry_ms)


class EntryReader:
    """Decoder of the stored entries of one state variable."""

    def __init__(self, keys: KeyCodec, descriptor: StateDescriptor) -> None:
        version = descriptor.versions[-1]
        self._descriptor, self._keys, self.state_id = descriptor, keys, descriptor.state_id
        self._user_keys = KeyCodec(parse_struct(version.user_key)) if version.user_key is not None else None
        self._schema = parse_struct(version.value)
        self._decode = row_reader(descriptor.name, descriptor.versions)

    def read(self, stored_key: bytes, entry: bytes) -> tuple[dict[str, Any], Entry] | None:
        """Return the place of a stored entry (key, user key and position) and the decoded entry.

        The result is None for the bounds of a list (the position of its first element, and the position that the next
        appended element gets), which are no entry.
        """
        found = decode_entry(self._descriptor, stored_key, entry, self._keys, self._user_keys)
        if found is None:
            return None
        user_key = None
        if self._user_keys is not None and found.user_key is not None:
            user_key = self_describing(found.user_key, self._user_keys.schema)
        key = self_describing(found.key, self._keys.schema)
        place = {"key": key, "user_key": user_key, "position": found.position}
        value = self_describing(self._decode(found.row), self._schema)
        return place, Entry(value=value, expiry_ms=found.expiry_ms)


def _timer_changes(first: Side, second: Side, group: int) -> Iterator[EntryChange]:
    for timer, held in merge_entries(_timers(first, group), _timers(second, group)):
        if held[0] == held[1]:
            continue
        gone = held[0] is not None
        entry = Entry(value={"at_ms": layout.unpack_time(timer[-8:])}, expiry_ms=None)
        yield EntryChange(
            state=layout.TIMERS_NAME,
            change="removed" if gone else "added",
            key=self_describing(first.keys.decode(timer[:-8]), first.keys.schema),
            before=entry if gone else None,
            after=None if gone else entry,
        )


def _timers(side: Side, group: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield each timer as a pair: encoded key with packed time, and an empty value. Pairs ascend."""
    for rest, entry in side.scan(group, layout.TIMERS):
        layout.check_timer(rest, entry)
        yield rest, entry


def merge_entries(
    first: Iterator[tuple[bytes, bytes]], second: Iterator[tuple[bytes, bytes]]
) -> Iterator[tuple[bytes, tuple[bytes | None, bytes | None]]]:
    """Merge two ascending sequences of (key, entry).

    Yield each key once, with the entry of the first side and that of the second; None for a side without the key.
    """
    a, b = next(first, None), next(second, None)
    while a is not None or b is not None:
        if b is None or (a is not None and a[0] < b[0]):
            assert a is not None
            yield a[0], (a[1], None)
            a = next(first, None)
        elif a is None or b[0] < a[0]:
            yield b[0], (None, b[1])
            b = next(second, None)
        else:
            yield a[0], (a[1], b[1])
            a, b = next(first, None), next(second, None)
