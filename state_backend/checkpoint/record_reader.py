"""Read entries of the log by name, so that a look-up costs the same at any length of the log.

The writer of a record first writes all settled files about the earlier records (`append_record.py`). So a reader of the
newest record finds the settled files of all earlier ids. Settled files of the newest id or of later ids may exist too;
readers ignore them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from typing import Any, NamedTuple, cast

from state_backend.checkpoint.fresh_listing import list_fresh
from state_backend.checkpoint.parallel import at_once
from state_backend.formats import paths, record_codec
from state_backend.ports.storage import Storage, lists_late
from state_backend.values.airflow_commands import command_line
from state_backend.values.errors import CorruptRecord, NotFound, StorageUnavailable
from state_backend.values.intervals import Interval
from state_backend.values.marks import AttemptEnd, Settled
from state_backend.values.records import Content, OutputFile, Record, Summary, SweepRecord, Tombstone

Entry = Record | SweepRecord | Tombstone


# A file in `settled/commits/` is about one interval, and lies in one folder: that of the day in which the interval
# starts. For an interval longer than a day, it is the folder of a period of 32 days; above 32 days, of 1,024 days; and
# so on. To find the commits of a time span, a reader lists the folders of all days and longer periods in the span. If
# the span is longer than `LISTED_AT_ONCE`, the reader lists all of `settled/commits/` instead, which costs fewer
# requests.
LISTED_AT_ONCE = timedelta(days=400)


class Fact(NamedTuple):
    """An effect of a commit on one interval: the commit computed the interval, or replaced the interval's output.

    With `replace_overlapping`, a commit of one interval replaces the output of overlapping intervals with other
    boundaries. The name of a file in `settled/commits/` contains the three fields.
    """

    interval: Interval
    id: int
    kind: str


class RecordReader(Mapping[int, Entry]):
    """A reader of one pipeline's log: its entries from id 1 to `head_id`, and the files in `settled/` about them.

    An entry is a record or a tombstone. Each is read on first use.
    """

    def __init__(self, storage: Storage, head_id: int, before: Mapping[int, Entry] | None = None) -> None:
        self.head_id = head_id
        self.storage = storage
        self._before = dict(before or {})
        self._here: dict[int, Entry] = {}
        self._folders: dict[str, list[Fact]] = {}
        self._ends: dict[str, int | None] = {}

    def __getitem__(self, checkpoint_id: int) -> Entry:
        entry = self._here.get(checkpoint_id)
        if entry is None:
            if not isinstance(checkpoint_id, int) or not 1 <= checkpoint_id <= self.head_id:
                raise KeyError(checkpoint_id)
            entry = self._recall(checkpoint_id) or self.fresh(checkpoint_id)
            self._here[checkpoint_id] = entry
        return entry

    def __iter__(self) -> Iterator[int]:
        self.load(range(1, self.head_id + 1))
        return iter(range(1, self.head_id + 1))

    def __len__(self) -> int:
        return self.head_id

    def __contains__(self, checkpoint_id: object) -> bool:
        return isinstance(checkpoint_id, int) and 1 <= checkpoint_id <= self.head_id

    def newest(self) -> Record | SweepRecord | None:
        """Return the newest record; None for an empty log."""
        if not self.head_id:
            return None
        newest = self[self.head_id]
        if isinstance(newest, Tombstone):
            raise CorruptRecord(
                f"{paths.record(newest.id + 1)} is missing: {paths.record(newest.id)} is a tombstone, and the newest record never is\n"
                "Put the missing record back from a backup"
            )
        return newest

    @property
    def summary(self) -> Summary:
        """The newest record's summary; an empty summary for an empty log."""
        newest = self.newest()
        return Summary() if newest is None else newest.summary

    @property
    def known(self) -> dict[int, Entry]:
        """The entries that were read so far, by id."""
        return {**self._before, **self._here}

    def load(self, ids: Iterable[int]) -> None:
        at_once(self.__getitem__, [n for n in ids if n not in self._here])

    def find(self, checkpoint_id: int) -> Entry | None:
        """Return the entry of any id, also above `head_id`; None if the log has no such entry."""
        known = self._here.get(checkpoint_id) or self._before.get(checkpoint_id)
        if known is None and (known := self._read(checkpoint_id)) is not None:
            self._before[checkpoint_id] = known
        return known

    def fresh(self, checkpoint_id: int) -> Entry:
        """Read the entry of an id from the storage again: a record that is not retained may have become a tombstone."""
        entry = self._read(checkpoint_id)
        if entry is None:
            raise CorruptRecord(
                f"{paths.record(checkpoint_id)} is missing from the log, but later records exist\nPut it back from a backup"
            )
        return entry

    def content(self, checkpoint_id: int) -> Content | None:
        """Return the content of a record; None for a tombstone and for the record of a sweep.

        The record's lists of other checkpoints are not decoded.
        """
        entry = self._here.get(checkpoint_id) or self._recall(checkpoint_id)
        if entry is None:
            path = paths.record(checkpoint_id)
            with suppress(NotFound):
                found = record_codec.decode_content(self.storage.read(path), path)
                if found is not None and found[0] == checkpoint_id:
                    return found[1]
            entry = self.fresh(checkpoint_id)
        return entry.content if isinstance(entry, Record) else None

    @property
    def root(self) -> str:
        return self.storage.url.rstrip("/").rpartition("/")[0]

    def over(self, storage: Storage) -> RecordReader:
        """Return a reader of the same entries that uses another `Storage` object for the same folder."""
        return RecordReader(storage, self.head_id, self.known)

    def _recall(self, checkpoint_id: int) -> Entry | None:
        """Return the entry if this process has read it before; None if it must be read from the storage.

        A record that the newest record does not retain must be read again: it may be a tombstone by now.
        """
        known = self._before.get(checkpoint_id)
        return known if not isinstance(known, Record) or checkpoint_id in self._whole else None

    @cached_property
    def _whole(self) -> frozenset[int]:
        head = self._here.get(self.head_id) or self.find(self.head_id)
        return frozenset(
            {self.head_id, *(r.id for r in head.retained)} if isinstance(head, Record | SweepRecord) else ()
        )

    def _read(self, checkpoint_id: int) -> Entry | None:
        path = paths.record(checkpoint_id)
        try:
            found: Any = record_codec.decode(self.storage.read(path), path, Record, SweepRecord, Tombstone)
        except NotFound:
            return None
        entry = cast(Entry, found)
        if entry.id != checkpoint_id:
            raise CorruptRecord(f"{path} contains the record of another checkpoint, {entry.id}")
        return entry

    def facts(self, interval: Interval | None, levels: Iterable[int]) -> list[Fact]:
        """Return the facts about the intervals that overlap `interval`, from the file names in `settled/commits/`.

        A `Fact` names an interval and a commit: the commit's own interval, or another interval whose output the commit
        replaced. Facts of the newest record are left out.
        """
        if interval is None or interval.end - interval.start > LISTED_AT_ONCE:
            folders = [paths.SETTLED_COMMITS]
        else:
            folders = paths.settled_folders(interval, levels)
        missing = [folder for folder in folders if folder not in self._folders]
        self._folders |= dict(zip(missing, at_once(self._list, missing), strict=True))
        every = (fact for folder in folders for fact in self._folders[folder])
        return [f for f in every if f.id < self.head_id and (interval is None or f.interval.overlaps(interval))]

    def outputs(self, fact: Fact) -> tuple[OutputFile, ...]:
        """Return the output files of the commit that `fact` names, from the commit's file in `settled/commits/`."""
        found = read_settled(self.storage, fact)
        if found.collected:
            raise StorageUnavailable(
                f"a re-run replaced the output of {fact.interval}, checkpoint {fact.id}, in {self.storage.url} during the read\n"
                "Read again"
            )
        return found.outputs

    def ended(self, attempt: str) -> int | None:
        """Return the id of the record that ended an attempt; None if `settled/attempts/` has no file of the attempt."""
        if attempt not in self._ends:
            self._ends[attempt] = self._read_end(attempt)
        return self._ends[attempt]

    def all_ended(self, asked: Collection[str]) -> set[str]:
        """Return the attempts with a file in `settled/attempts/`. If a listing may be old, look up those in `asked`."""
        found = {paths.ended_attempt(info.path) for info in self.storage.list(paths.SETTLED_ATTEMPTS)} - {None}
        if lists_late(self.storage):
            unknown = sorted({*asked} - found)
            found |= {a for a, end in zip(unknown, at_once(self.ended, unknown), strict=True) if end is not None}
        return {attempt for attempt in found if attempt is not None}

    def _read_end(self, attempt: str) -> int | None:
        path = paths.attempt_end(attempt)
        try:
            end = record_codec.decode(self.storage.read(path), path, AttemptEnd)
        except NotFound:
            return None
        if end.attempt != attempt:
            raise CorruptRecord(
                f"{path} belongs to another attempt, {end.attempt}\nPut the right file back from a backup"
            )
        return end.id

    def _list(self, folder: str) -> list[Fact]:
        parsed = map(paths.parse_settled, list_fresh(self.storage, folder))
        return [Fact(*found) for found in parsed if found is not None]


def sweep_command(storage: Storage) -> str:
    """Return the shell command that sweeps a pipeline, for messages. `storage` is the storage of its folder."""
    root, _, pipeline = storage.url.rstrip("/").rpartition("/")
    return command_line("sweep", root=root, pipeline=pipeline)


def read_settled(storage: Storage, fact: Fact) -> Settled:
    """Read the file in `settled/commits/` whose name contains the fact's interval, commit id and kind."""
    path = paths.settled(*fact)
    try:
        found = record_codec.decode(storage.read(path), path, Settled)
    except NotFound:
        raise CorruptRecord(f"{path} is missing\nTo write it again: {sweep_command(storage)}") from None
    if (found.interval, found.id, found.kind) != fact:
        there = paths.settled(found.interval, found.id, found.kind)
        raise CorruptRecord(f"{path}: its content belongs to {there}\nPut the right file back from a backup")
    return found
