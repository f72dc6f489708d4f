"""Create the next record of the log; no other module creates records.

A process that stops after one of these steps leaves:

    settle      files in settled/ that repeat facts of the newest record; readers ignore them until a next record exists
    create      the next record, with the summary of all earlier records
    note head   HEAD.json may name an earlier record; readers then look for later records by name

`append` settles before it creates the record. So every reader who sees a record also finds the settled files of all
earlier records by name. Equal records give equal settled files, so two writers at the same time do no harm. The summary
is computed from the log that the new record follows. If another writer took the id meanwhile, the caller reads the log
again and computes a new summary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

from state_backend.checkpoint.fresh_listing import note_names
from state_backend.checkpoint.log import Log, attempt_of, facts_of
from state_backend.checkpoint.parallel import at_once
from state_backend.checkpoint.record_reader import Fact, read_settled
from state_backend.checkpoint.summary import is_replaced, next_summary
from state_backend.formats import paths, record_codec
from state_backend.ports.storage import Storage, lists_late
from state_backend.values.errors import AlreadyExists, NotFound, PreconditionFailed, UnknownOutcome
from state_backend.values.marks import AttemptEnd, Head, Settled
from state_backend.values.records import Record, SweepRecord, Tombstone, Unpublished

E = TypeVar("E", Record, SweepRecord)

# Each record's summary has two lists of pending work: intervals that are not published yet, and dropped commits whose
# files a clean-up still has to delete. The next commit copies both lists into its own summary. It first removes the
# items that are done. That costs one request for each item, but saves the next publishing or clean-up several requests.


def append(storage: Storage, log: Log, entry: E) -> E:
    """Create the record `entry` after the newest record of `log`, and return it as written, with its summary."""
    settle(storage, log)
    summary = next_summary(log, entry, published=_read_published(storage, log), done=_done(storage, log))
    entry = replace(entry, summary=summary)
    storage.create(paths.record(entry.id), record_codec.encode(entry))
    note_head(storage, log, entry.id)
    return entry


def note_head(storage: Storage, log: Log, head_id: int) -> None:
    """Write the id of an existing record to `HEAD.json`, if the file held a lower id when `log` was read.

    If another writer changes `HEAD.json` at the same time, that writer's id stays. Readers can begin at any record.
    """
    if log.hint >= head_id:
        return
    data = record_codec.encode(Head(id=head_id))
    with suppress(AlreadyExists, NotFound, PreconditionFailed, UnknownOutcome):
        info = storage.stat(paths.HEAD)
        if info is None:
            storage.create(paths.HEAD, data)
        else:
            storage.replace(paths.HEAD, data, generation=info.generation)


def settle(storage: Storage, log: Log) -> None:
    """Write the files in `settled/` that repeat the facts of the newest record of `log`.

    This must happen before the next record is created: readers of that record look these facts up by file name.
    """
    if not log.head_id:
        return
    head = log.entries[log.head_id]
    write_settled(storage, [*(_settled_of(head) if isinstance(head, Record) else ends_of([head]))])


def write_settled(storage: Storage, settled: Collection[Settled | AttemptEnd]) -> None:
    """Write those of the given files in `settled/` that do not exist yet.

    If the storage's listings may be some seconds old, add the names to `settled/names/` too (`fresh_listing.py`).
    """
    noted: dict[str, set[str]] = {}
    for file in settled if lists_late(storage) else ():
        if isinstance(file, Settled):
            folder, slash, name = paths.settled(file.interval, file.id, file.kind).rpartition("/")
            noted.setdefault(folder + slash, set()).add(name)
    creates = [partial(create_settled, storage, file) for file in settled]
    at_once(lambda write: write(), [*creates, *(partial(note_names, storage, *item) for item in noted.items())])


def create_settled(storage: Storage, file: Settled | AttemptEnd) -> None:
    path = settled_path(file)
    try:
        storage.create(path, record_codec.encode(file))
    except AlreadyExists:
        pass
    except UnknownOutcome:
        if storage.stat(path) is None:
            raise


def settled_path(file: Settled | AttemptEnd) -> str:
    if isinstance(file, AttemptEnd):
        return paths.attempt_end(file.attempt)
    return paths.settled(file.interval, file.id, file.kind)


def _settled_of(record: Record) -> Iterator[Settled]:
    for fact in facts_of(record):
        own = fact.kind != "replaced"
        yield Settled(
            id=fact.id,
            kind=fact.kind,  # type: ignore[arg-type]
            interval=fact.interval,
            outputs=record.content.outputs if own else (),
        )


def ends_of(entries: Iterable[Record | SweepRecord | Tombstone]) -> Iterator[AttemptEnd]:
    """Yield an `AttemptEnd` for each attempt that a sweep abandoned or whose commit is a tombstone now.

    A sweep or a clean-up may have deleted the `prepared.json` of these attempts.
    """
    for entry in entries:
        if isinstance(entry, SweepRecord):
            yield from (AttemptEnd(attempt=attempt, id=entry.id) for attempt in entry.abandoned)
        elif isinstance(entry, Tombstone):
            yield AttemptEnd(attempt=attempt_of(entry), id=entry.id)


def _read_published(storage: Storage, log: Log) -> set[Unpublished]:
    """Return those of the summary's `unpublished` intervals that have a file in `published/` now."""
    waiting = log.summary.unpublished
    marks = at_once(lambda u: storage.stat(paths.published(u.interval, u.id)), waiting)
    return {u for u, mark in zip(waiting, marks, strict=True) if mark is not None}


def _done(storage: Storage, log: Log) -> set[int]:
    """Return those of the dropped commits in `Summary.dropping` whose clean-up is finished.

    Their records are tombstones now, and none of their files is left to delete.
    """
    dropping = log.summary.dropping

    def is_done(checkpoint_id: int) -> bool:
        # `find` may return an entry that this process read earlier. A tombstone never changes. But a clean-up may have
        # replaced a record by a tombstone since, so `fresh` reads the record's file again.
        entry = log.entries.find(checkpoint_id)
        entry = entry if isinstance(entry, Tombstone) else log.entries.fresh(checkpoint_id)
        return isinstance(entry, Tombstone) and is_collected(storage, log, entry)

    return {n for n, done in zip(dropping, at_once(is_done, dropping), strict=True) if done}


def is_collected(storage: Storage, log: Log, entry: Tombstone) -> bool:
    """Return True if a clean-up has no output of this dropped commit to delete.

    There are three cases: the output is still current, or is deleted already, or the commit made no output.
    """
    if not is_replaced(log, entry):
        return True
    settled = read_settled(storage, Fact(entry.interval, entry.id, "interval"))
    return settled.collected or not settled.outputs
