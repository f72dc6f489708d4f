"""The log of a pipeline as one value: what was committed, what still counts, what was refused.

Everything that is decided about checkpoints is decided over this value; ``read_log`` is the only thing here that reads.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right, insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any, cast
from weakref import WeakKeyDictionary

from state_backend.formats import paths, record_codec
from state_backend.formats.types import names_and_types, parse_struct
from state_backend.ports.storage import Storage
from state_backend.values.errors import CorruptRecord
from state_backend.values.handles import FileInfo
from state_backend.values.intervals import Interval
from state_backend.values.records import (
    Content,
    OutputFile,
    Quarantine,
    Record,
    Retained,
    RunRef,
    SweepRecord,
    Tombstone,
)

Entry = Record | SweepRecord | Tombstone


@dataclass(frozen=True)
class Log:
    """Entries by id, dense from 1, and the ids that validation refused."""

    entries: Mapping[int, Entry] = field(default_factory=dict)
    quarantined: Mapping[int, Quarantine] = field(default_factory=dict)

    @property
    def head_id(self) -> int:
        """The highest id; 0 for an empty log."""
        return max(self.entries, default=0)

    @cached_property
    def retained(self) -> dict[int, Retained]:
        """What is completed, by id: exactly what the head lists. The head is never a tombstone, since it retains itself."""
        if not self.entries:
            return {}
        head = self.entries[self.head_id]
        if isinstance(head, Tombstone):
            raise CorruptRecord(
                f"{paths.record(head.id + 1)} is missing: {paths.record(head.id)} is a tombstone, which the newest record never is"
            )
        return {r.id: r for r in head.retained}

    def completed(self) -> list[Record]:
        """The retained checkpoints, by id."""
        found = []
        for checkpoint_id in sorted(self.retained):
            entry = self.entries.get(checkpoint_id)
            if not isinstance(entry, Record):
                raise CorruptRecord(
                    f"{paths.record(checkpoint_id)}: retained by the newest record, but it is not there whole"
                )
            found.append(entry)
        return found

    def commits(self) -> Iterator[Record | Tombstone]:
        """Every commit of a checkpoint, dropped ones too, by id."""
        for _, entry in sorted(self.entries.items()):
            if not isinstance(entry, SweepRecord):
                yield entry

    def of_attempt(self, attempt: str) -> Record | Tombstone | None:
        """What an attempt committed."""
        return next((e for e in self.commits() if attempt_of(e) == attempt), None)

    @cached_property
    def abandoned(self) -> dict[str, int]:
        """Attempts that a sweep abandoned, with the id of the last sweep that did: none of them is ever committed."""
        sweeps = sorted((e for e in self.entries.values() if isinstance(e, SweepRecord)), key=lambda e: e.id)
        return {attempt: sweep.id for sweep in sweeps for attempt in sweep.abandoned}

    def current_outputs(self) -> dict[Interval, tuple[int, tuple[OutputFile, ...]]]:
        """Per interval the id and files of its current output: those of its highest id, dropped or not. Only the kind
        ``interval`` makes output; a rewind or a consolidation leaves what is there. Output that a commit with
        ``replace_overlapping`` overlapped is not current."""
        return self._outputs[0]

    def publications(self) -> list[tuple[Interval, int]]:
        """What a sink was or is to be told, in the order of commits: an interval, and the id of the commit that changed its
        output. That commit is of the interval itself, or of one that replaced it; then the interval has no output. The last id of
        an interval counts."""
        return self._outputs[1]

    @cached_property
    def _outputs(self) -> tuple[dict[Interval, tuple[int, tuple[OutputFile, ...]]], list[tuple[Interval, int]]]:
        current: dict[Interval, tuple[int, tuple[OutputFile, ...]]] = {}
        publications = []
        in_order, longest = list[Interval](), timedelta(0)
        for entry in self.commits():
            interval = interval_of(entry)
            if kind_of(entry) != "interval" or interval is None:
                continue
            if replaces_overlapping(entry):
                # All that reach into the interval start less than the longest interval before it.
                first = bisect_right(in_order, interval.start - longest, key=lambda i: i.start)
                behind = bisect_right(in_order, interval.end, key=lambda i: i.start)
                for other in in_order[first:behind]:
                    if other != interval and other.overlaps(interval):
                        del current[other]
                        publications.append((other, entry.id))
                in_order[first:behind] = [i for i in in_order[first:behind] if i in current]
            if interval not in current:
                insort(in_order, interval)
                longest = max(longest, interval.end - interval.start)
            current[interval] = (entry.id, outputs_of(entry))
            publications.append((interval, entry.id))
        return current, publications

    def quarantine_above(self, checkpoint_id: int) -> int | None:
        """The nearest quarantined checkpoint among this one and its ancestors, or None: it is usable. Ancestors end at a rewind that
        was allowed to go back to a quarantined one."""
        at: int | None = checkpoint_id
        while at is not None:
            if at in self.quarantined:
                return at
            entry = self.entries.get(at)
            if entry is None or isinstance(entry, SweepRecord):
                raise CorruptRecord(
                    f"{paths.record(at)}: an ancestor of checkpoint {checkpoint_id} is missing from the log"
                )
            at = vouched_base_of(entry)
        return None


# A record and its tombstone answer the same questions.


def kind_of(entry: Record | Tombstone) -> str:
    return entry.kind if isinstance(entry, Tombstone) else entry.content.kind


def interval_of(entry: Record | Tombstone) -> Interval | None:
    return entry.interval if isinstance(entry, Tombstone) else entry.content.interval


def attempt_of(entry: Record | Tombstone) -> str:
    return entry.attempt if isinstance(entry, Tombstone) else entry.content.attempt


def base_of(entry: Record | Tombstone) -> int | None:
    return entry.base_id if isinstance(entry, Tombstone) else entry.content.base_id


def vouched_base_of(entry: Record | Tombstone) -> int | None:
    """The base whose marks count for this one too: none, if whoever went back to it vouched for the state."""
    if isinstance(entry, Record) and entry.content.permissions.allow_quarantined:
        return None
    return base_of(entry)


def run_of(entry: Record | Tombstone) -> RunRef | None:
    return entry.run if isinstance(entry, Tombstone) else entry.content.run


def outputs_of(entry: Record | Tombstone) -> tuple[OutputFile, ...]:
    return entry.outputs if isinstance(entry, Tombstone) else entry.content.outputs


def replaces_overlapping(entry: Record | Tombstone) -> bool:
    """Whether output that the interval overlaps, cut otherwise, is not current any more."""
    return entry.replace_overlapping if isinstance(entry, Tombstone) else entry.content.permissions.replace_overlapping


def left_same_state(one: Record | Tombstone | Content, other: Record | Tombstone | Content) -> bool:
    """Whether two commits of one interval left the same state: they agree in digest, watermarks and descriptors."""
    same = _digest_and_watermarks(one) == _digest_and_watermarks(other)
    return same and not _descriptors_hashes(one).isdisjoint(_descriptors_hashes(other))


def _digest_and_watermarks(entry: Record | Tombstone | Content) -> tuple[int, int | None, int | None]:
    if isinstance(entry, Tombstone):
        return entry.digest, entry.watermark_ms, entry.late_watermark_ms
    content = entry.content if isinstance(entry, Record) else entry
    return content.digest, content.time.watermark_ms, content.time.late_watermark_ms


def _descriptors_hashes(entry: Record | Tombstone | Content) -> frozenset[str]:
    """Tombstones have one of two: roots hold some that were made before comments on the key were left out."""
    if isinstance(entry, Tombstone):
        return frozenset({entry.descriptors_hash})
    content = entry.content if isinstance(entry, Record) else entry
    return frozenset({descriptors_hash(content), _hash(content, content.key_schema)})


def descriptors_hash(content: Content) -> str:
    """``t:`` and 16 hex digits over what the state is made of: names, kinds, schemas, expiry, and names and types of the key."""
    return f"t:{_hash(content, names_and_types(parse_struct(content.key_schema)).to_json())}"


def _hash(content: Content, key: Any) -> str:
    states = [
        [d.name, d.kind, d.ttl_ms, [[v.version, v.value, v.user_key] for v in d.versions]]
        for d in sorted(content.states, key=lambda d: d.name)
    ]
    text = json.dumps([key, states], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_end_of_log(storage: Storage, head_id: int) -> None:
    """A newest record that was lost leaves no hole, and what it replaced or made stale would count again. Publishing marks
    that speak of it give it away: CorruptRecord."""
    for info in storage.list(paths.PUBLISHED):
        spoken_of = paths.published_id(info.path) or 0
        # A look at the record itself: it may have been committed since the log was read.
        if spoken_of > head_id and storage.stat(paths.record(spoken_of)) is None:
            raise CorruptRecord(
                f"{paths.record(spoken_of)} is missing: {info.path} speaks of it, but the log ends at {head_id}; put the record "
                "back from a copy"
            )


_READ_ROUNDS = 10


def read_log(storage: Storage) -> Log:
    """Reads all heads. Raises CorruptRecord for one that can't be decoded or an id that is missing: a checkpoint that is
    left out silently would be an older state taken for the newest.

    Others may commit and shrink meanwhile, so that the newest record seen retains what is a tombstone by now; then it reads
    again, until what it saw fits together.
    """
    for attempt in range(_READ_ROUNDS):
        try:
            log = _read_once(storage)
        except CorruptRecord as error:
            raise CorruptRecord(
                f"{error}. Put it back from a copy: without it no checkpoint can be vouched for"
            ) from error
        try:
            log.completed()
        except CorruptRecord:
            if attempt == _READ_ROUNDS - 1:
                raise
            continue
        break
    return log


# An entry is immutable under its generation, so it is read and checked once per storage; a commit looks at the log several
# times. By path and generation; the oldest go when it is full.
_seen: WeakKeyDictionary[Storage, dict[tuple[str, int], Entry]] = WeakKeyDictionary()
_SEEN_ENTRIES = 4096


def _read_entry(storage: Storage, info: FileInfo, checkpoint_id: int) -> Entry:
    known = _seen.setdefault(storage, {})
    entry = known.get((info.path, info.generation))
    if entry is None:
        found: Any = record_codec.decode(storage.read(info.path), info.path, Record, SweepRecord, Tombstone)
        entry = cast(Entry, found)
        if entry.id != checkpoint_id:
            raise CorruptRecord(f"{info.path}: it says that it is checkpoint {entry.id}")
        while len(known) >= _SEEN_ENTRIES:
            known.pop(next(iter(known)), None)
        known[info.path, info.generation] = entry
    return entry


def _look(storage: Storage, checkpoint_id: int) -> Entry | None:
    """A record by its name. A network disk may list a directory as it was some seconds ago, without what another host created in
    it since; opening a file asks the server."""
    info = storage.stat(paths.record(checkpoint_id))
    return None if info is None else _read_entry(storage, info, checkpoint_id)


def read_on(storage: Storage, log: Log) -> Log:
    """The log with what lies behind its end, each record looked for by its name; the same value if there is nothing. For who is
    about to refuse because of what the log lacks: the listing that it was read by may have been stale."""
    entries = dict(log.entries)
    while (entry := _look(storage, len(entries) + 1)) is not None:
        entries[entry.id] = entry
    return log if len(entries) == len(log.entries) else Log(entries, log.quarantined)


def _read_once(storage: Storage) -> Log:
    entries: dict[int, Entry] = {}
    for info in storage.list(paths.CHECKPOINTS):
        checkpoint_id = paths.record_id(info.path)
        if checkpoint_id is None:
            raise CorruptRecord(f"{info.path}: no such file belongs here")
        entries[checkpoint_id] = _read_entry(storage, info, checkpoint_id)
    for checkpoint_id in sorted(set(range(1, max(entries, default=0) + 1)) - set(entries)):
        unlisted = _look(storage, checkpoint_id)
        if unlisted is None:
            raise CorruptRecord(f"{paths.record(checkpoint_id)}: missing from the log, though later records are there")
        entries[checkpoint_id] = unlisted
    # The newest record is never a tombstone, so that one behind it was created since the listing, or left out by it.
    while entries and isinstance(entries[max(entries)], Tombstone):
        unlisted = _look(storage, max(entries) + 1)
        if unlisted is None:
            break
        entries[unlisted.id] = unlisted
    quarantined = {}
    for info in storage.list(paths.QUARANTINE):
        mark = record_codec.decode(storage.read(info.path), info.path, Quarantine)
        if paths.quarantine(mark.id) != info.path:
            raise CorruptRecord(f"{info.path}: it says that it is of checkpoint {mark.id}")
        quarantined[mark.id] = mark
    return Log(entries, quarantined)
