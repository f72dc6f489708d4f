"""The log of a pipeline as one value: what was committed, what still counts, what was refused.

Everything that is decided about checkpoints is decided over this value. ``read_log`` reads little: the newest record, whose summary
says what still matters of all below it, and the checkpoints that it retains. What else is asked of a log is looked up by name, as
``record_reader.py`` describes; ``commits`` and ``entries`` give everything, and read everything.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right, insort
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property

from state_backend.checkpoint.end_of_log import missing_records
from state_backend.checkpoint.fresh_listing import listed
from state_backend.checkpoint.parallel import at_once
from state_backend.checkpoint.record_reader import LISTED_AT_ONCE, Entry, Fact, RecordReader
from state_backend.formats import paths, record_codec
from state_backend.formats.types import names_and_types, parse_struct
from state_backend.ports.storage import Storage
from state_backend.values.errors import CorruptRecord, NotFound, UnsupportedFormat
from state_backend.values.intervals import Interval
from state_backend.values.records import (
    Content,
    Head,
    Kept,
    OutputFile,
    Quarantine,
    Record,
    Retained,
    RunRef,
    Summary,
    SweepRecord,
    Tombstone,
)

__all__ = ["Entry", "Fact", "Log", "read_log", "read_on"]


@dataclass(frozen=True)
class Log:
    """The log of a pipeline.

    Attributes:
        entries: The entries by id, dense from 1. The reader reads an entry when somebody asks for the entry.
        quarantined: The ids that validation refused.
        hint: The id in ``HEAD.json``; 0 if there is no such file.
    """

    entries: RecordReader
    quarantined: Mapping[int, Quarantine] = field(default_factory=dict)
    hint: int = field(default=0, compare=False)

    @property
    def head_id(self) -> int:
        """The highest id; 0 for an empty log."""
        return self.entries.head_id

    @cached_property
    def retained(self) -> dict[int, Retained]:
        """The completed checkpoints, by id: exactly those that the newest record lists.

        Raises:
            CorruptRecord: The newest record is a tombstone, so a later record is missing.
        """
        newest = self.entries.newest()
        return {} if newest is None else {r.id: r for r in newest.retained}

    @property
    def summary(self) -> Summary:
        """The newest record's summary of all records below it; an empty summary for an empty log."""
        return self.entries.summary

    def completed(self) -> list[Record]:
        """The retained checkpoints, by id."""
        return [self.whole(checkpoint_id) for checkpoint_id in sorted(self.retained)]

    def whole(self, checkpoint_id: int) -> Record:
        """The record of a retained checkpoint. Raises: CorruptRecord if it is shrunk: damaged, or dropped since this log was read."""
        entry = self.entry(checkpoint_id)
        if not isinstance(entry, Record):
            raise CorruptRecord(
                f"{paths.record(checkpoint_id)}: retained by the newest record, but it is not there whole\nPut it back from a copy"
            )
        return entry

    @property
    def kept(self) -> tuple[Kept, ...]:
        """The properties of the retained checkpoints that planning needs, by id. The newest record contains them."""
        return self.summary.kept

    @property
    def newest(self) -> Record | None:
        """The retained checkpoint of the highest id: the newest record itself, unless that is a sweep's."""
        entry = self.entry(max(self.retained, default=0))
        return entry if isinstance(entry, Record) else None

    def entry(self, checkpoint_id: int) -> Entry | None:
        """The entry of an id, or None if the log has no such id."""
        return self.entries.get(checkpoint_id)

    def commits(self) -> Iterator[Record | Tombstone]:
        """Every commit of a checkpoint, dropped ones too, by id. Reads the whole log."""
        for _, entry in sorted(self.entries.items()):
            if not isinstance(entry, SweepRecord):
                yield entry

    # --- attempts ------------------------------------------------------------------------------------------------------------

    def of_attempt(self, attempt: str) -> Record | Tombstone | None:
        """The commit of an attempt; None if the attempt committed nothing."""
        entry = self._end_of(attempt)
        return None if isinstance(entry, SweepRecord) else entry

    def abandoned_by(self, attempt: str) -> int | None:
        """The id of a sweep that abandoned the attempt: the attempt is never committed."""
        entry = self._end_of(attempt)
        return entry.id if isinstance(entry, SweepRecord) else None

    def _end_of(self, attempt: str) -> Entry | None:
        """The entry that ended an attempt. A commit is retained; or it is dropped, and its files are to be deleted; or they are,
        and a file by the attempt's name was written first. The attempts of a sweep have such files once a record follows it."""
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

    @cached_property
    def abandoned(self) -> dict[str, int]:
        """Attempts that a sweep abandoned, with the id of the last sweep that did: none of them is ever committed. Reads the whole
        log."""
        sweeps = sorted((e for e in self.entries.values() if isinstance(e, SweepRecord)), key=lambda e: e.id)
        return {attempt: sweep.id for sweep in sweeps for attempt in sweep.abandoned}

    def ended_attempts(self, asked: Collection[str] = ()) -> set[str]:
        """Every attempt that was committed or abandoned, by a listing; those of ``asked`` also if the listing is old."""
        if not self.head_id:
            return set()
        near = [self.entries[n] for n in sorted({self.head_id, *self.retained, *self.summary.dropping})]
        own = {attempt_of(e) for e in near if not isinstance(e, SweepRecord)}
        return own.union(self.entries.all_ended(asked), *(e.abandoned for e in near if isinstance(e, SweepRecord)))

    # --- intervals -----------------------------------------------------------------------------------------------------------

    def commits_near(self, interval: Interval, *, after: int = 0) -> list[Record | Tombstone]:
        """Every commit, dropped ones too, with a higher id than ``after`` and of an interval that overlaps this one, by id."""
        if after >= self.head_id:
            return []
        ids = sorted({f.id for f in self._facts(interval) if f.kind != "replaced" and f.id > after})
        self.entries.load(ids)
        found = (self.entries[n] for n in ids)
        return [e for e in found if not isinstance(e, SweepRecord)]

    def committed_intervals(self) -> set[Interval]:
        """The interval of every commit, dropped ones too. Lists all that was settled, and reads none of it."""
        return {f.interval for f in self._facts(None) if f.kind != "replaced"}

    def outputs_near(self, interval: Interval) -> list[tuple[Interval, int]]:
        """The intervals with current output that overlap ``interval``, itself included, with the id of that output, by time. An
        interval without rows has output too."""
        last = last_facts(self._facts(interval))
        return sorted((fact.interval, fact.id) for fact in last if fact.kind == "interval")

    def publication_of(self, interval: Interval) -> int | None:
        """The id of the last commit that made the output of exactly this interval, or replaced it."""
        return next((f.id for f in last_facts(self._facts(interval)) if f.interval == interval), None)

    def superseding(self, candidate: Record | Kept) -> tuple[int, ...]:
        """The ids of later commits, dropped ones too, of the same interval that left another state than this completed checkpoint."""
        return next((s.by for s in self.summary.superseded if s.id == candidate.id), ())

    def outputs(self, checkpoint_id: int) -> tuple[OutputFile, ...]:
        """The files of a commit whose output is current, also after its record was shrunk.

        Raises: StorageUnavailable if they were deleted since this log was read.
        """
        entry = self.entries[checkpoint_id]
        if isinstance(entry, Record):
            return entry.content.outputs
        if isinstance(entry, SweepRecord):
            return ()
        return self.entries.outputs(Fact(entry.interval, checkpoint_id, "interval"))

    def current_outputs(self) -> dict[Interval, tuple[int, tuple[OutputFile, ...]]]:
        """Per interval the id and files of its current output: those of its highest id, dropped or not. Only the kind
        ``interval`` makes output; a rewind or a consolidation leaves what is there. Output that a commit with
        ``replace_overlapping`` overlapped is not current. Reads a file per interval."""
        return self._with_files([f for f in last_facts(self._facts(None)) if f.kind == "interval"])

    def current_outputs_within(self, span: Interval) -> dict[Interval, tuple[int, tuple[OutputFile, ...]]]:
        """Those of ``current_outputs`` whose interval lies within the span. Reads a file for each of them."""
        last = [f for f in last_facts(self._facts(span)) if f.kind == "interval"]
        return self._with_files([f for f in last if span.start <= f.interval.start and f.interval.end <= span.end])

    def _with_files(self, facts: list[Fact]) -> dict[Interval, tuple[int, tuple[OutputFile, ...]]]:
        whole = {c.id: c.content.outputs for c in self.completed()}
        there = at_once(self.entries.outputs, [f for f in facts if f.id not in whole])
        files = whole | dict(zip((f.id for f in facts if f.id not in whole), there, strict=True))
        return {f.interval: (f.id, files[f.id]) for f in facts}

    def publications(self) -> list[tuple[Interval, int]]:
        """What a sink was or is to be told, in the order of commits: an interval, and the id of the commit that changed its
        output. That commit is of the interval itself, or of one that replaced it; then the interval has no output. The last id of
        an interval counts. Lists all that was settled."""
        told = [f for f in self._facts(None) if f.kind in ("interval", "replaced")]
        return [(f.interval, f.id) for f in sorted(told, key=lambda f: (f.id, f.kind == "interval", f.interval))]

    def _facts(self, interval: Interval | None) -> list[Fact]:
        """Return the facts of the intervals that overlap this interval, or of all intervals (None)."""
        if not self.head_id:
            return []
        if self.entries.lists_late and (interval is None or interval.end - interval.start > LISTED_AT_ONCE):
            return [f for f in self._facts_by_record if interval is None or f.interval.overlaps(interval)]
        if interval is not None and interval.start_ms >= self.summary.latest_end_ms:
            return []
        head = self.entries[self.head_id]
        own = facts_of(head) if isinstance(head, Record) else []
        below = self.entries.facts(interval, self.summary.levels)
        if interval is None:
            self._check_settled(below, own)
        else:
            below += sorted({f for f in self._kept_facts() if f.interval.overlaps(interval)} - {*below})
        return [*below, *(f for f in own if interval is None or f.interval.overlaps(interval))]

    def _kept_facts(self) -> set[Fact]:
        """Return the facts of the retained commits from the newest record: a lost settled file or an old listing can't hide these."""
        return {Fact(k.interval, k.id, k.kind) for k in self.kept if k.id < self.head_id}

    def facts(self) -> list[Fact]:
        """The facts of every commit, dropped commits too. Lists all settled files."""
        return self._facts(None)

    def _check_settled(self, below: list[Fact], own: list[Fact]) -> None:
        """Raises: CorruptRecord if fewer files are there than the newest record says: a reader would miss intervals."""
        lost = self.summary.settled - len(own) - len({*below})
        if lost > 0:
            raise CorruptRecord(
                f"{paths.SETTLED_COMMITS}: {lost} files are missing, {len({*below})} are there\n"
                f"Write them anew: {self.entries.sweep_command}"
            )

    @cached_property
    def _facts_by_record(self) -> list[Fact]:
        """What happened to all intervals. Reads every record: an old listing may lack a folder, and nothing else names the folders."""
        return facts_of_entries(self.entries)

    # --- marks ---------------------------------------------------------------------------------------------------------------

    def quarantine_above(self, checkpoint_id: int) -> int | None:
        """The nearest quarantined checkpoint among this one and its ancestors, or None: it is usable. Ancestors end at a rewind that
        was allowed to go back to a quarantined one."""
        if not self.quarantined:
            return None
        judged = None
        lowest = min(self.quarantined)  # an ancestor has a smaller id than each of its descendants
        known = self.summary
        if checkpoint_id in {*self.retained, *(n for s in known.superseded for n in s.by)}:
            judged = next((j.by for j in known.refused if j.id == checkpoint_id), None)
            if judged is None or judged in self.quarantined:
                lowest = min(self.quarantined.keys() - {*known.marks}, default=self.head_id + 1)
        at: int | None = checkpoint_id
        near = {k.id: k for k in self.kept}
        while at is not None and at >= lowest:
            if at in self.quarantined:
                return at
            entry = near.get(at) or self.entry(at)
            if entry is None or isinstance(entry, SweepRecord):
                raise CorruptRecord(
                    f"{paths.record(at)}: an ancestor of checkpoint {checkpoint_id} is missing from the log\nPut it back from a copy"
                )
            at = base_with_shared_marks(entry)
        return judged if judged in self.quarantined else None


def facts_of(record: Record) -> list[Fact]:
    """What a commit did, to its own interval and to those that it replaced."""
    own = Fact(record.content.interval, record.id, record.content.kind)
    return [own, *(Fact(interval, record.id, "replaced") for interval in record.replaced)]


def facts_of_entries(entries: Mapping[int, Entry]) -> list[Fact]:
    """Return the facts of every commit, dropped commits too, from the entries alone. Reads all entries."""
    current = dict[Interval, int]()
    in_order, longest = list[Interval](), timedelta(0)
    facts = []
    for _, entry in sorted(entries.items()):
        if isinstance(entry, SweepRecord):
            continue
        interval = interval_of(entry)
        facts.append(Fact(interval, entry.id, kind_of(entry)))
        if kind_of(entry) != "interval":
            continue
        if replaces_overlapping(entry):
            # Every interval that overlaps this interval starts at most the longest length before it.
            first = bisect_right(in_order, interval.start - longest, key=lambda i: i.start)
            behind = bisect_right(in_order, interval.end, key=lambda i: i.start)
            for other in in_order[first:behind]:
                if other != interval and other.overlaps(interval):
                    del current[other]
                    facts.append(Fact(other, entry.id, "replaced"))
            in_order[first:behind] = [i for i in in_order[first:behind] if i in current]
        if interval not in current:
            insort(in_order, interval)
            longest = max(longest, interval.end - interval.start)
        current[interval] = entry.id
    return facts


def last_facts(facts: Iterable[Fact]) -> list[Fact]:
    """Return, for each interval with output, the fact with the highest id: the current output, or its replacement."""
    last: dict[Interval, Fact] = {}
    for fact in facts:
        if fact.kind in ("interval", "replaced") and (fact.interval not in last or last[fact.interval].id < fact.id):
            last[fact.interval] = fact
    return list(last.values())


def kept_of(record: Record) -> Kept:
    """What the summaries of later records say of this one, as long as it is retained."""
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


# A record, its tombstone, and what a summary says of it answer the same questions.


def kind_of(entry: Record | Tombstone | Kept) -> str:
    """As `Content.kind`."""
    return entry.content.kind if isinstance(entry, Record) else entry.kind


def interval_of(entry: Record | Tombstone | Kept) -> Interval:
    """The interval that was committed."""
    return entry.content.interval if isinstance(entry, Record) else entry.interval


def attempt_of(entry: Record | Tombstone) -> str:
    """The attempt that was committed."""
    return entry.attempt if isinstance(entry, Tombstone) else entry.content.attempt


def base_of(entry: Record | Tombstone | Kept) -> int | None:
    """The id of the checkpoint that it started from; None: empty state, or a tombstone whose marks count no more."""
    return entry.content.base_id if isinstance(entry, Record) else entry.base_id


def base_with_shared_marks(entry: Record | Tombstone | Kept) -> int | None:
    """The base whose marks count for this one too: none, if whoever went back to it vouched for the state."""
    if isinstance(entry, Kept):
        return None if entry.quarantine_allowed else entry.base_id
    if isinstance(entry, Record) and entry.content.permissions.allow_quarantined:
        return None
    return base_of(entry)


def run_of(entry: Record | Tombstone) -> RunRef:
    """The run of Airflow that committed the checkpoint."""
    return entry.run if isinstance(entry, Tombstone) else entry.content.run


def outputs_of(entry: Record | Tombstone) -> tuple[OutputFile, ...]:
    """The output files that the commit made. A clean-up deletes the files of a tombstone once their output is replaced."""
    return entry.outputs if isinstance(entry, Tombstone) else entry.content.outputs


def replaces_overlapping(entry: Record | Tombstone) -> bool:
    """Whether output that the interval overlaps, cut otherwise, is not current any more."""
    return entry.replace_overlapping if isinstance(entry, Tombstone) else entry.content.permissions.replace_overlapping


def left_same_state(one: Record | Tombstone | Kept | Content, other: Record | Tombstone | Kept | Content) -> bool:
    """Whether two commits of one interval left the same state: they agree in digest, watermarks and descriptors."""
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
    """``t:`` and 16 hex digits over what the state is made of: names, kinds, schemas, expiry, and names and types of the key."""
    states = [
        [d.name, d.kind, d.ttl_ms, [[v.version, v.value, v.user_key] for v in d.versions]]
        for d in sorted(content.states, key=lambda d: d.name)
    ]
    text = json.dumps([names_and_types(parse_struct(content.key_schema)).to_json(), states], sort_keys=True)
    return f"t:{hashlib.sha256(text.encode()).hexdigest()[:16]}"


# --- reading -------------------------------------------------------------------------------------------------------------------

_READ_ROUNDS = 10


def read_log(storage: Storage, before: Log | None = None) -> Log:
    """Reads the newest record and the checkpoints that it retains.

    Others may commit and shrink meanwhile, so that the newest record seen retains what is a tombstone by now; then it reads
    again, until what it saw fits together. ``before``: what the same call has read already; checkpoints that are retained still are
    not read again.

    Raises: CorruptRecord for one that can't be decoded or is missing: a checkpoint that is left out silently would be
    an older state taken for the newest.
    """
    known = _still_needed(before) if before is not None else {}
    for attempt in range(_READ_ROUNDS):
        try:
            log = _read_once(storage, known)
        except CorruptRecord as error:
            raise CorruptRecord(
                f"{error}. Put it back from a copy: without it no checkpoint can be vouched for"
            ) from error
        try:
            log.entries.load(log.retained)
            log.completed()
        except CorruptRecord as error:
            if attempt == _READ_ROUNDS - 1 or storage.stat(paths.record(log.head_id + 1)) is None:
                raise CorruptRecord(
                    f"{error}. Put it back from a copy: without it no checkpoint can be vouched for"
                ) from error
            continue
        break
    return log


def read_newest(storage: Storage, before: Log | None = None) -> Log:
    """Reads the newest record, and of the checkpoints that it retains none besides: for who goes by ``Log.kept``.

    What is asked for later may be shrunk by then, since a commit dropped the checkpoint meanwhile: whoever gets a CorruptRecord from
    ``Log.whole`` looks whether the log goes on.
    ``before``: what the same process has read already. Then the newest record is looked for behind that one's end.

    Raises: CorruptRecord as ``read_log``.
    """
    known = _still_needed(before) if before is not None else {}
    try:
        log = _read_once(storage, known, start=before.hint if known and before is not None else None)
    except CorruptRecord as error:
        raise CorruptRecord(f"{error}. Put it back from a copy: without it no checkpoint can be vouched for") from error
    return log if log.head_id == 0 or isinstance(log.newest, Record) else read_log(storage, log)


def log_after(storage: Storage, log: Log, record: Record) -> Log:
    """The log as whoever created ``record`` over ``log`` knows it, without asking."""
    return Log(RecordReader(storage, record.id, {**log.entries.known, record.id: record}), log.quarantined, record.id)


def _still_needed(log: Log) -> dict[int, Entry]:
    """What was read of the newest record and of what it retains or is about to drop. The rest would pile up over a thousand commits."""
    needed = {log.head_id, *log.retained, *log.summary.dropping}
    return {n: entry for n, entry in log.entries.known.items() if n >= log.head_id or n in needed}


def read_whole_log(storage: Storage) -> Log:
    """Reads every record, for who looks at all of them, some at a time.

    Raises: CorruptRecord as ``read_log``, and for any id that is missing.
    """
    log = read_log(storage)
    log.entries.load(range(1, log.head_id + 1))
    return log


def read_on(storage: Storage, log: Log) -> Log:
    """The log with what lies behind its end; the same value if there is nothing. For who is about to refuse because of what the log
    lacks."""
    newer = read_log(storage, log)
    return log if newer.head_id == log.head_id else newer


def _read_once(storage: Storage, known: Mapping[int, Entry], start: int | None = None) -> Log:
    """``start``: what ``HEAD.json`` said when the same process looked last; None: it is read."""
    hint = start or _read_hint(storage)
    probe, head_id = RecordReader(storage, 0, known), max(known, default=0) if start else hint or _last_listed(storage)
    head = probe.find(head_id) if head_id else None
    if head_id and head is None:
        raise CorruptRecord(
            f"{paths.record(head_id)} is missing: {paths.HEAD} speaks of it, but the log ends before it"
        )
    while (following := probe.find(head_id + 1)) is not None:
        head_id, head = head_id + 1, following
    before = known if head is None else {**known, head_id: head}
    return Log(RecordReader(storage, head_id, before), _read_quarantined(storage), hint)


def _read_hint(storage: Storage) -> int:
    """The id in ``HEAD.json``; 0 if the file is lost or damaged. Then the log is listed, and the next writer writes the file anew."""
    try:
        return record_codec.decode(storage.read(paths.HEAD), paths.HEAD, Head).id
    except (NotFound, CorruptRecord, UnsupportedFormat):  # a flipped bit makes another format of it too
        return 0


def _last_listed(storage: Storage) -> int:
    """The highest id of a full listing, for a root without ``HEAD.json``.

    Raises: CorruptRecord if the listing shows that a record is missing (``end_of_log.py``).
    """
    records = [info.path for info in storage.list(paths.CHECKPOINTS)]
    marks = [info.path for folder in paths.MARKS for info in storage.list(folder)]
    for finding in missing_records(storage, [*records, *marks]):
        raise CorruptRecord(finding)
    return max((paths.record_id(path) or 0 for path in records), default=0)


def _read_quarantined(storage: Storage) -> dict[int, Quarantine]:
    quarantined = {}
    for path in listed(storage, paths.QUARANTINE):
        if paths.quarantined_id(path) is None:
            continue
        try:
            mark = record_codec.decode(storage.read(path), path, Quarantine)
        except NotFound:
            continue  # its name is noted before it is there
        if paths.quarantine(mark.id) != path:
            raise CorruptRecord(f"{path}: it says that it is of checkpoint {mark.id}")
        quarantined[mark.id] = mark
    return quarantined
