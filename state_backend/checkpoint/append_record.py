"""The one place that creates the next record of the log. What is on disk if we stop, line by line:

    settle      files in settled/ that say of the newest record what it says itself; nobody asks them before there is a next one
    create      the next record, with the summary of all below it
    note head   HEAD.json is behind; a reader looks for the records after it by their names

Settling comes before the create, so that whoever sees a record finds everything of the ids below it by name. Equal records give equal
files: two writers do each other no harm. The summary is told by the very log that the record follows; if another took the id
meanwhile, everything is looked at again.
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
from state_backend.values.records import (
    AttemptEnd,
    Head,
    Record,
    Settled,
    SweepRecord,
    Tombstone,
    Unpublished,
)

E = TypeVar("E", Record, SweepRecord)

FEW = 0
"""So many unpublished intervals, and so many dropping ids, a commit takes over as they are. Of more it looks up which are done, with a
request an id. None: publishing and clean-up, which look at each that was taken over, would ask more."""


def append(storage: Storage, log: Log, entry: E) -> E:
    """Creates the next record, if its id is still free: ``entry`` as decided over ``log``, with its summary. Returns
    what was written.

    Raises: AlreadyExists if the id is taken; UnknownOutcome if that can't be told.
    """
    settle(storage, log)
    summary = next_summary(log, entry, published=_published(storage, log), done=_done(storage, log))
    entry = replace(entry, summary=summary)
    storage.create(paths.record(entry.id), record_codec.encode(entry))
    note_head(storage, log, entry.id)
    return entry


def note_head(storage: Storage, log: Log, head_id: int) -> None:
    """Brings ``HEAD.json`` forward to an id that is there. If another writer is faster, its id is as good."""
    if log.hint >= head_id:
        return
    data = record_codec.encode(Head(id=head_id))
    with suppress(AlreadyExists, NotFound, PreconditionFailed, UnknownOutcome):
        info = storage.stat(paths.HEAD)
        if info is None:
            storage.create(paths.HEAD, data)
        else:
            storage.replace(paths.HEAD, data, generation=info.generation)


# --- settling ------------------------------------------------------------------------------------------------------------------


def settle(storage: Storage, log: Log) -> None:
    """Write the settled files of the newest record."""
    if not log.head_id:
        return
    head = log.entries[log.head_id]
    write_settled(storage, [*(_settled_of(head) if isinstance(head, Record) else ends_of([head]))])


def write_settled(storage: Storage, settled: Collection[Settled | AttemptEnd]) -> None:
    """Writes the files that nobody has written, and notes their names where a listing may be old."""
    noted: dict[str, set[str]] = {}
    for file in settled if lists_late(storage) else ():
        if isinstance(file, Settled):
            folder, slash, name = paths.settled(file.interval, file.id, file.kind).rpartition("/")
            noted.setdefault(folder + slash, set()).add(name)
    creates = [partial(create_settled, storage, file) for file in settled]
    at_once(lambda write: write(), [*creates, *(partial(note_names, storage, *item) for item in noted.items())])


def create_settled(storage: Storage, file: Settled | AttemptEnd) -> None:
    """Writes the file, if nobody has. Raises: UnknownOutcome if it can't be told whether it is there."""
    path = settled_path(file)
    try:
        storage.create(path, record_codec.encode(file))
    except AlreadyExists:
        pass
    except UnknownOutcome:
        if storage.stat(path) is None:
            raise


def settled_path(file: Settled | AttemptEnd) -> str:
    """The path of a settled file."""
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
    """The ends of attempts whose ``prepared.json`` may be gone."""
    for entry in entries:
        if isinstance(entry, SweepRecord):
            yield from (AttemptEnd(attempt=attempt, id=entry.id) for attempt in entry.abandoned)
        elif isinstance(entry, Tombstone):
            yield AttemptEnd(attempt=attempt_of(entry), id=entry.id)


# --- what the storage knows ------------------------------------------------------------------------------------------------------


def _published(storage: Storage, log: Log) -> set[Unpublished]:
    """What of the unpublished has its mark by now."""
    waiting = log.summary.unpublished
    if len(waiting) <= FEW:
        return set()
    marks = at_once(lambda u: storage.stat(paths.published(u.interval, u.id)), waiting)
    return {u for u, mark in zip(waiting, marks, strict=True) if mark is not None}


def _done(storage: Storage, log: Log) -> set[int]:
    """What of the dropping ids is a tombstone by now, and keeps no file that nobody needs."""
    dropping = log.summary.dropping
    if len(dropping) <= FEW:
        return set()

    def is_done(checkpoint_id: int) -> bool:
        entry = log.entries.find(checkpoint_id)  # a tombstone never changes, a record may be one by now
        entry = entry if isinstance(entry, Tombstone) else log.entries.fresh(checkpoint_id)
        return isinstance(entry, Tombstone) and is_collected(storage, log, entry)

    return {n for n, done in zip(dropping, at_once(is_done, dropping), strict=True) if done}


def is_collected(storage: Storage, log: Log, entry: Tombstone) -> bool:
    """Whether the output of a dropped commit is current, or deleted, or was never there."""
    if not is_replaced(log, entry):
        return True
    settled = read_settled(storage, Fact(entry.interval, entry.id, "interval"))
    return settled.collected or not settled.outputs
