"""Read the log of a pipeline as one value, which all decisions about checkpoints use.

`read_log` reads little: the newest record, and the records of the checkpoints that it retains. The newest record's
summary repeats the facts of earlier records that still matter. All other facts are in files that are looked up by name
(`record_reader.py`). Only `commits` and the iteration over `entries` read the whole log.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any, NamedTuple

from state_backend.checkpoint.end_of_log import missing_records
from state_backend.checkpoint.fresh_listing import list_fresh
from state_backend.checkpoint.parallel import at_once
from state_backend.checkpoint.record_reader import LISTED_AT_ONCE, Entry, Fact, RecordReader, sweep_command
from state_backend.formats import paths, record_codec
from state_backend.formats.recorded_settings import without_settings
from state_backend.formats.types import names_and_types, parse_struct
from state_backend.ports.storage import Storage, lists_late
from state_backend.values.errors import CorruptRecord, NotFound, UnsupportedFormat
from state_backend.values.intervals import Interval, from_ms, to_ms
from state_backend.values.marks import Head, Quarantine, Released
from state_backend.values.records import (
    Content,
    Kept,
    OutputFile,
    Record,
    Retained,
    RunRef,
    Summary,
    SweepRecord,
    Tombstone,
)
from state_backend.values.schedule import Schedule

__all__ = ["Entry", "Fact", "Log", "read_log", "read_on"]


class ById(NamedTuple):
    """The newest record's summary by checkpoint id, for questions about each of many checkpoints."""

    kept: dict[int, Kept]
    superseded: dict[int, tuple[int, ...]]
    # The nearest quarantined one among the checkpoint and its ancestors, as of the newest record; None: there was none.
    refused: dict[int, int | None]
    # The lowest id that was quarantined since the newest record was written; without one, the next record's id.
    lowest_since: int


@dataclass(frozen=True)
class Log:
    entries: RecordReader
    quarantined: Mapping[int, Quarantine] = field(default_factory=dict)
    hint: int = field(default=0, compare=False)  # the id in HEAD.json when the log was read; 0 without one

    @property
    def head_id(self) -> int:
        """The highest id; 0 for an empty log."""
        return self.entries.head_id

    @cached_property
    def retained(self) -> dict[int, Retained]:
        """The retained checkpoints, by id: exactly those that the newest record lists."""
        newest = self.entries.newest()
        return {} if newest is None else {r.id: r for r in newest.retained}

    @property
    def summary(self) -> Summary:
        """The newest record's summary of all records below it; an empty summary for an empty log."""
        return self.entries.summary

    def completed(self) -> list[Record]:
        """Return the records of the retained checkpoints, by id."""
        return [self.whole(checkpoint_id) for checkpoint_id in sorted(self.retained)]

    def whole(self, checkpoint_id: int) -> Record:
        """Return the record of a retained checkpoint."""
        entry = self.entry(checkpoint_id)
        if not isinstance(entry, Record):
            raise shrunk(checkpoint_id)
        return entry

    @property
    def kept(self) -> tuple[Kept, ...]:
        """What planning needs of the retained checkpoints, ascending by id. The newest record contains it."""
        return self.summary.kept

    @cached_property
    def newest(self) -> Record | None:
        """The retained checkpoint with the highest id: the newest record, or the last record before a sweep record."""
        entry = self.entry(max(self.retained, default=0))
        return entry if isinstance(entry, Record) else None

    @property
    def schedule(self) -> Schedule | None:
        """The schedule in the newest record; None if no commit has recorded one."""
        return self.newest.content.schedule if self.newest is not None else None

    @property
    def code(self) -> str:
        """The pipeline's recorded code, for printed commands. Without one, the placeholder `module:NAME`."""
        return (self.newest.content.code if self.newest is not None else None) or "module:NAME"

    def entry(self, checkpoint_id: int) -> Entry | None:
        """Return the record or tombstone of an id, or None if the log has no such id."""
        return self.entries.get(checkpoint_id)

    def commits(self) -> Iterator[Record | Tombstone]:
        """Yield the record or tombstone of every commit, by id. Reads the whole log."""
        for _, entry in sorted(self.entries.items()):
            if not isinstance(entry, SweepRecord):
                yield entry

    # --- attempts -----------------------------------------------------------------------------------------------------

    def of_attempt(self, attempt: str) -> Record | Tombstone | None:
        """Return the commit of an attempt; None if the attempt committed nothing."""
        entry = self._end_of(attempt)
        return None if isinstance(entry, SweepRecord) else entry

    def abandoned_by(self, attempt: str) -> int | None:
        """Return the id of the record by which a sweep abandoned the attempt; None if no sweep abandoned it.

        A sweep abandons an attempt that it takes for dead. Then the attempt can't be committed any more.
        """
        entry = self._end_of(attempt)
        return entry.id if isinstance(entry, SweepRecord) else None

    def _end_of(self, attempt: str) -> Entry | None:
        """Return the record that ended an attempt: its commit, or the sweep that abandoned it.

        The method looks in this order: the newest record, if it is a sweep's; the retained commits; the dropped commits
        that a clean-up still has to process; and the file in `settled/attempts/`. Such a file exists for each older
        sweep's attempts and for each dropped commit that a clean-up has processed.
        """
        if not self.head_id:
            return None
        head = self.entries[self.head_id]
        if isinstance(head, SweepRecord) and attempt in head.abandoned:
            return head
        for kept in self.kept:
            if kept.attempt == attempt:
                return self.entry(kept.id)
        near = at_once(self.entries.find, sorted(self.summary.dropping))
        for entry in near:
            if entry is not None and not isinstance(entry, SweepRecord) and attempt_of(entry) == attempt:
                return entry
        ended = self.entries.ended(attempt)
        return self.entry(ended) if ended is not None else None

    # --- intervals ----------------------------------------------------------------------------------------------------

    def commits_near(self, interval: Interval, *, after: int = 0) -> list[Record | Tombstone]:
        """Return the commits with an id above `after` whose interval overlaps this interval, in the order of ids.

        A dropped commit is in the result as a tombstone.
        """
        if after >= self.head_id:
            return []
        ids = sorted({f.id for f in self.facts(interval) if f.kind != "replaced" and f.id > after})
        self.entries.load(ids)
        found = (self.entries[n] for n in ids)
        return [e for e in found if not isinstance(e, SweepRecord)]

    def outputs_near(self, interval: Interval) -> list[tuple[Interval, int]]:
        """Return the intervals that overlap this one and have current output, by time, each with the id of its commit.

        The interval itself may be among them. Output may have no rows.
        """
        last = last_facts(self.facts(interval))
        return sorted((fact.interval, fact.id) for fact in last if fact.kind == "interval")

    def outputs_after(self, instant: datetime) -> list[tuple[Interval, int]]:
        """Return the intervals with current output that end after this instant, as `outputs_near` returns them."""
        latest_ms = self.summary.latest_end_ms
        if not self.head_id or latest_ms <= to_ms(instant):
            return []
        return self.outputs_near(Interval(instant, from_ms(latest_ms)))

    def outputs(self, checkpoint_id: int) -> tuple[OutputFile, ...]:
        """Return the output files of a commit whose output is current. The commit may be dropped."""
        entry = self.entries[checkpoint_id]
        if isinstance(entry, Record):
            return entry.content.outputs
        if isinstance(entry, SweepRecord):
            return ()
        return self.entries.outputs(Fact(entry.interval, checkpoint_id, "interval"))

    def current_outputs(self, within: Interval | None = None) -> dict[Interval, tuple[int, tuple[OutputFile, ...]]]:
        """Return the current output of each interval: the id of its commit, and the files.

        `within`: Only of intervals that lie wholly within this span. For each dropped commit, one file is read.
        """
        facts = [f for f in last_facts(self.facts(within)) if f.kind == "interval"]
        if within is not None:
            facts = [f for f in facts if within.start <= f.interval.start and f.interval.end <= within.end]
        self.entries.load(f.id for f in facts if f.id in self.retained)
        files = at_once(lambda f: self.outputs(f.id) if f.id in self.retained else self.entries.outputs(f), facts)
        return {f.interval: (f.id, files[n]) for n, f in enumerate(facts)}

    def facts(self, interval: Interval | None) -> list[Fact]:
        """Return the facts about the intervals that overlap `interval`; None: about all intervals, from a listing."""
        if not self.head_id:
            return []
        if lists_late(self.entries.storage) and (interval is None or interval.end - interval.start > LISTED_AT_ONCE):
            return [f for f in self._facts_by_record if interval is None or f.interval.overlaps(interval)]
        if interval is not None and interval.start_ms >= self.summary.latest_end_ms:
            return []
        head = self.entries[self.head_id]
        own = facts_of(head) if isinstance(head, Record) else []
        below = self.entries.facts(interval, self.summary.levels)
        if interval is None:
            self._check_settled(below, own)
        else:
            below += sorted({f for f in self._kept_facts if f.interval.overlaps(interval)} - {*below})
        return [*below, *(f for f in own if interval is None or f.interval.overlaps(interval))]

    @cached_property
    def _kept_facts(self) -> set[Fact]:
        """A `Fact` for each retained commit, whose file in `settled/commits/` may be lost or not listed yet."""
        return {Fact(k.interval, k.id, k.kind) for k in self.kept if k.id < self.head_id}

    def _check_settled(self, below: list[Fact], own: list[Fact]) -> None:
        """Raise `CorruptRecord` if fewer files exist in `settled/commits/` than the newest record counts.

        Readers would not see the commits that the lost files name.
        """
        lost = self.summary.settled - len(own) - len({*below})
        if lost > 0:
            raise CorruptRecord(
                f"{paths.SETTLED_COMMITS}: {lost} files are missing, {len({*below})} exist\n"
                f"To write them again: {sweep_command(self.entries.storage)}"
            )

    @cached_property
    def _facts_by_record(self) -> list[Fact]:
        """The facts about all commits (each commit's own interval, replaced outputs), computed from all records.

        Usually these facts come from a listing of `settled/commits/`. On a network disk, the listing may be some
        seconds old and miss a new folder. `settled/names/` repeats the names of new files, but not of new folders. So
        on such a storage, all records are read instead if a caller asks for the facts of all intervals.
        """
        return facts_of_entries(self.entries)

    # --- marks --------------------------------------------------------------------------------------------------------

    @cached_property
    def by_id(self) -> ById:
        known = self.summary
        refused = {j.id: j.by for j in known.refused}
        judged = {*self.retained, *(n for s in known.superseded for n in s.by)}
        return ById(
            kept={k.id: k for k in known.kept},
            superseded={s.id: s.by for s in known.superseded},
            refused={n: refused.get(n) for n in judged},
            lowest_since=min(self.quarantined.keys() - {*known.marks}, default=self.head_id + 1),
        )

    def quarantine_above(self, checkpoint_id: int) -> int | None:
        """Return the id of the nearest quarantined one among this checkpoint and its ancestors; None without one.

        The ancestors are the base, the base's base, and so on. They end at a commit with `allow_quarantined`.
        """
        if not self.quarantined:
            return None
        near, _, refused, lowest_since = self.by_id
        judged = refused.get(checkpoint_id)
        # Ids fall from a checkpoint to its base, so the loop below ends once the id is below every quarantined id. If
        # the newest record found no quarantined ancestor, or one that is quarantined still, the loop only looks for
        # checkpoints that were quarantined since that record.
        known = checkpoint_id in refused and (judged is None or judged in self.quarantined)
        lowest = lowest_since if known else min(self.quarantined)
        at: int | None = checkpoint_id
        while at is not None and at >= lowest:
            if at in self.quarantined:
                return at
            entry = near.get(at) or self.entry(at)
            if entry is None or isinstance(entry, SweepRecord):
                raise CorruptRecord(
                    f"{paths.record(at)} is missing from the log: it is an ancestor of checkpoint {checkpoint_id}\n"
                    "Put it back from a backup"
                )
            at = base_with_shared_marks(entry)
        return judged if judged in self.quarantined else None


def shrunk(checkpoint_id: int) -> CorruptRecord:
    return CorruptRecord(
        f"{paths.record(checkpoint_id)} does not contain a whole record, but the newest record retains its checkpoint\n"
        "Put it back from a backup"
    )


def facts_of(record: Record) -> list[Fact]:
    """Return a `Fact` for the commit's own interval, and one for each other interval whose output it replaced."""
    own = Fact(record.content.interval, record.id, record.content.kind)
    return [own, *(Fact(interval, record.id, "replaced") for interval in record.replaced)]


def facts_of_entries(entries: Mapping[int, Entry]) -> list[Fact]:
    """Return the facts about all commits, from all records and tombstones instead of the files in `settled/`."""
    current = dict[Interval, int]()
    in_order, longest = list[Interval](), timedelta(0)
    facts = []
    for _, entry in sorted(entries.items()):
        if isinstance(entry, SweepRecord):
            continue
        interval = interval_of(entry)
        facts.append(Fact(interval, entry.id, kind_of(entry)))
        if kind_of(entry) not in ("interval", "restore"):
            continue
        if replaces_overlapping(entry):
            retracts = kind_of(entry) == "restore"
            # An interval that starts `longest` or more before `interval` can't overlap it: the search skips these.
            # A restore retracts the output of all later intervals.
            first = bisect_right(in_order, interval.start - longest, key=lambda i: i.start)
            behind = len(in_order) if retracts else bisect_right(in_order, interval.end, key=lambda i: i.start)
            for other in in_order[first:behind]:
                if retracts and isinstance(entry, Record):
                    gone = other in entry.replaced
                elif retracts:
                    gone = other.end > interval.end
                else:
                    gone = other != interval and other.overlaps(interval)
                if gone:
                    del current[other]
                    facts.append(Fact(other, entry.id, "replaced"))
            in_order[first:behind] = [i for i in in_order[first:behind] if i in current]
        if kind_of(entry) == "restore":
            continue
        if interval not in current:
            insort(in_order, interval)
            longest = max(longest, interval.end - interval.start)
        current[interval] = entry.id
    return facts


def last_facts(facts: Iterable[Fact]) -> list[Fact]:
    """Return the last change of the output of each interval that ever had output, by the highest id of a commit.

    Kind `interval`: the commit made the current output. Kind `replaced`: the interval has no current output.
    """
    last: dict[Interval, Fact] = {}
    for fact in facts:
        if fact.kind in ("interval", "replaced") and (fact.interval not in last or last[fact.interval].id < fact.id):
            last[fact.interval] = fact
    return list(last.values())


def kept_of(record: Record) -> Kept:
    """Return the facts about this record that later records repeat while its checkpoint is retained."""
    content = record.content
    return Kept(
        id=record.id,
        kind=content.kind,
        interval=content.interval,
        attempt=content.attempt,
        base_id=content.base_id,
        quarantine_allowed=content.permissions.allow_quarantined,
        digest=content.digest,
        watermark_ms=content.time.watermark_ms,
        late_watermark_ms=content.time.late_watermark_ms,
        descriptors_hash=descriptors_hash(content),
    )


# Each function below reads one property from a record, from its tombstone, or from its `Kept` in a summary.


def kind_of(entry: Record | Tombstone | Kept) -> str:
    """Return the kind of commit: `interval`, `consolidate`, `restore` (also for rewinds and imports) or `forget`."""
    return entry.content.kind if isinstance(entry, Record) else entry.kind


def interval_of(entry: Record | Tombstone | Kept) -> Interval:
    return entry.content.interval if isinstance(entry, Record) else entry.interval


def attempt_of(entry: Record | Tombstone) -> str:
    return entry.attempt if isinstance(entry, Tombstone) else entry.content.attempt


def id_of_log(storage: Storage) -> str:
    """Return a text that tells this log from all other logs: the uuid of the attempt that made the first record.

    The text stays the same when the first record becomes a tombstone, and in a copy of the folder.
    """
    first = RecordReader(storage, 1).fresh(1)
    return first.sweep if isinstance(first, SweepRecord) else attempt_of(first)


def base_of(entry: Record | Tombstone | Kept) -> int | None:
    """Return the id of the checkpoint that a commit started from.

    None means empty state. A tombstone has None also if its commit had the permission `allow_quarantined`.
    """
    return entry.content.base_id if isinstance(entry, Record) else entry.base_id


def base_with_shared_marks(entry: Record | Tombstone | Kept) -> int | None:
    """Return the id of a checkpoint's base if a quarantine mark on the base also applies to the checkpoint; else None.

    Usually the mark applies. It does not if the commit had the permission `allow_quarantined`; the result is then None.
    The result is also None if the commit started from empty state.
    """
    if isinstance(entry, Kept):
        return None if entry.quarantine_allowed else entry.base_id
    if isinstance(entry, Record) and entry.content.permissions.allow_quarantined:
        return None
    return base_of(entry)


def run_of(entry: Record | Tombstone) -> RunRef:
    return entry.run if isinstance(entry, Tombstone) else entry.content.run


def outputs_of(entry: Record | Tombstone) -> tuple[OutputFile, ...]:
    """Return the output files that a commit made. If the commit is a tombstone, a clean-up may have deleted them."""
    return entry.outputs if isinstance(entry, Tombstone) else entry.content.outputs


def replaces_overlapping(entry: Record | Tombstone) -> bool:
    """Return True if the commit replaces the output of intervals that overlap its own but have other boundaries.

    For a rewind, True means that the rewind retracts the output of all later intervals.
    """
    return entry.replace_overlapping if isinstance(entry, Tombstone) else entry.content.permissions.replace_overlapping


def left_same_state(one: Record | Tombstone | Kept | Content, other: Record | Tombstone | Kept | Content) -> bool:
    """Return True if two commits of one interval left the same state: digest, watermarks and descriptors are equal."""
    same = _digest_and_watermarks(one) == _digest_and_watermarks(other)
    return same and _descriptors_hash(one) == _descriptors_hash(other)


def _digest_and_watermarks(entry: Record | Tombstone | Kept | Content) -> tuple[int, int | None, int | None]:
    if isinstance(entry, Tombstone | Kept):
        return entry.digest, entry.watermark_ms, entry.late_watermark_ms
    content = entry.content if isinstance(entry, Record) else entry
    return content.digest, content.time.watermark_ms, content.time.late_watermark_ms


def _descriptors_hash(entry: Record | Tombstone | Kept | Content) -> str:
    if isinstance(entry, Tombstone | Kept):
        return entry.descriptors_hash
    return descriptors_hash(entry.content if isinstance(entry, Record) else entry)


def descriptors_hash(content: Content) -> str:
    """Return `t:` and 16 hex digits, a hash of the state descriptors and the key's columns.

    The hash covers name, kind, expiry and schemas of each state, and names and types of the key's columns.
    """
    states = [
        [d.name, d.kind, d.ttl_ms, [[v.version, without_settings(v.value), v.user_key] for v in d.versions]]
        for d in sorted(content.states, key=lambda d: d.name)
    ]
    text = json.dumps([names_and_types(parse_struct(content.key_schema)).to_json(), states], sort_keys=True)
    return f"t:{hashlib.sha256(text.encode()).hexdigest()[:16]}"


# --- reading ----------------------------------------------------------------------------------------------------------

_READ_ROUNDS = 10


def read_log(storage: Storage, before: Log | None = None) -> Log:
    """Read the newest record and the checkpoints that it retains. `before`: an earlier log, whose records are reused.

    Other processes may commit and clean up during the read, so that a retained checkpoint is a tombstone already. The
    function then reads again, until the newest record and the checkpoints fit together.
    """
    known = _still_needed(before) if before is not None else {}
    for attempt in range(_READ_ROUNDS):
        try:
            log = _read_once(storage, known)
        except CorruptRecord as error:
            raise _unusable(error) from error
        try:
            log.entries.load(log.retained)
            log.completed()
        except CorruptRecord as error:
            if attempt == _READ_ROUNDS - 1 or storage.stat(paths.record(log.head_id + 1)) is None:
                raise _unusable(error) from error
            continue
        break
    return log


def read_newest(storage: Storage, before: Log | None = None) -> Log:
    """Read the newest record and the newest one of an interval. `before`: An earlier log, whose records are reused.

    `Log.kept` has most facts about retained checkpoints. `Log.whole` reads a record when a caller asks. If a commit has
    dropped the checkpoint since, `Log.whole` raises `CorruptRecord`; the caller should then call `read_on`.
    """
    known = _still_needed(before) if before is not None else {}
    try:
        log = _read_once(storage, known, start=before.hint if known and before is not None else None)
    except CorruptRecord as error:
        raise _unusable(error) from error
    if log.head_id and log.newest is None:
        return read_log(storage, log)
    try:
        newest_interval(log)
    except CorruptRecord:
        # A later commit has dropped the checkpoint. If the record is damaged instead, the callers that need it say so.
        with suppress(CorruptRecord):
            return read_log(storage, log)
    return log


def newest_interval(log: Log) -> Record | None:
    """Return the newest retained checkpoint that an interval made; later ones may be of a savepoint or an erasure."""
    newest = max((kept.id for kept in log.kept if kept.kind == "interval"), default=None)
    return None if newest is None else log.whole(newest)


def _unusable(error: CorruptRecord) -> CorruptRecord:
    return CorruptRecord(f"{error}\nUntil it is put back from a backup, Cairn can't tell which checkpoints are usable")


def log_after(storage: Storage, log: Log, record: Record) -> Log:
    """Return the log that results from creating `record` after `log`. Nothing is read."""
    return Log(RecordReader(storage, record.id, {**log.entries.known, record.id: record}), log.quarantined, record.id)


def _still_needed(log: Log) -> dict[int, Entry]:
    """Return the entries of an earlier log that a next read may use: newest, retained, or about to be dropped.

    Other entries are left out, since they would fill the memory over a thousand commits.
    """
    needed = {log.head_id, *log.retained, *log.summary.dropping}
    return {n: entry for n, entry in log.entries.known.items() if n >= log.head_id or n in needed}


def read_whole_log(storage: Storage) -> Log:
    log = read_log(storage)
    log.entries.load(range(1, log.head_id + 1))
    return log


def read_on(storage: Storage, log: Log) -> Log:
    """Return a log that includes records created since `log` was read; the same log if there are no new records.

    Callers use this before they report a missing checkpoint: another process may have committed it since.
    """
    newer = read_log(storage, log)
    return log if newer.head_id == log.head_id else newer


def _read_once(storage: Storage, known: Mapping[int, Entry], start: int | None = None) -> Log:
    """Find and read the newest record, and read the quarantine marks. `known`: entries that are not read again.

    The search tries ids one by one, from the highest one in `known` if `start` is given, else from that in `HEAD.json`.
    Without this file, the log is listed. `start`: The id in `HEAD.json`, if the caller knows it.
    """
    hint = start or _read_hint(storage)
    probe, head_id = RecordReader(storage, 0, known), max(known, default=0) if start else hint or _last_listed(storage)
    head = probe.find(head_id) if head_id else None
    if head_id and head is None:
        raise CorruptRecord(
            f"{paths.record(head_id)} is missing: {paths.HEAD} refers to it, but the log ends before it"
        )
    while (following := probe.find(head_id + 1)) is not None:
        head_id, head = head_id + 1, following
    before = known if head is None else {**known, head_id: head}
    return Log(RecordReader(storage, head_id, before), _read_quarantined(storage), hint)


def _read_hint(storage: Storage) -> int:
    """Return the id in `HEAD.json`; 0 if the file is lost or damaged.

    Readers then list the log, and the next writer writes the file again.
    """
    try:
        return record_codec.decode(storage.read(paths.HEAD), paths.HEAD, Head).id
    except (NotFound, CorruptRecord, UnsupportedFormat):  # a damaged file may seem to have an unknown format
        return 0


def _last_listed(storage: Storage) -> int:
    """Return the highest id in a full listing of the log, for a pipeline without `HEAD.json`."""
    records = [info.path for info in storage.list(paths.CHECKPOINTS)]
    marks = [info.path for folder in paths.MARKS for info in storage.list(folder)]
    for finding in missing_records(storage, [*records, *marks]):
        raise CorruptRecord(finding)
    return max((paths.record_id(path) or 0 for path in records), default=0)


def _read_quarantined(storage: Storage) -> dict[int, Quarantine]:
    quarantined: dict[int, Quarantine] = {}
    for path in list_fresh(storage, paths.QUARANTINE):
        if paths.quarantined_id(path) is None:
            continue
        try:
            mark: Any = record_codec.decode(storage.read(path), path, Quarantine, Released)
        except NotFound:
            # `list_fresh` also returns names from `settled/names/`. The writer of a mark first adds the mark's name
            # there, so a name can be without a mark: the writer stopped, or has not written the mark yet.
            continue
        if paths.quarantine(mark.id) != path:
            raise CorruptRecord(f"{path} contains the mark of another checkpoint, {mark.id}")
        if isinstance(mark, Quarantine):
            quarantined[mark.id] = mark
    return quarantined
