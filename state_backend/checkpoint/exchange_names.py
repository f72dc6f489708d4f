"""Exchange the names of the output files that a commit of `cairn erase` rewrote (`rewrite_outputs.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast

from state_backend.checkpoint.record_reader import Fact, read_settled
from state_backend.formats import paths, record_codec
from state_backend.ports.storage import Storage
from state_backend.values.errors import PreconditionFailed, StorageUnavailable
from state_backend.values.marks import Settled
from state_backend.values.records import Content, Record, RewrittenOutput, SweepRecord, Tombstone

_ROUNDS = 20


def is_exchanged(storage: Storage, content: Content) -> bool:
    """Return True if no output waits for its exchange: the last replaced files, which are deleted last, are gone."""
    rewritten = content.forget.rewritten if content.forget is not None else ()
    return not rewritten or all(storage.stat(path) is None for path in rewritten[-1].replaces)


def exchange(storage: Storage, content: Content) -> Iterator[set[str]]:
    """Make the commit's rewritten output files current one by one, and yield the paths that each replaces."""
    for rewritten in content.forget.rewritten if content.forget is not None else ():
        fact = Fact(rewritten.interval, rewritten.id, "interval")
        _exchange(storage, paths.settled(*fact), rewritten, partial(read_settled, storage, fact))
        path = paths.record(rewritten.id)
        _exchange(storage, path, rewritten, partial(_read_entry, storage, path))
        yield {*rewritten.replaces}


def _read_entry(storage: Storage, path: str) -> Record | Tombstone:
    found: Any = record_codec.decode(storage.read(path), path, Record, SweepRecord, Tombstone)
    return cast(Record | Tombstone, found)


def _exchange(
    storage: Storage, path: str, rewritten: RewrittenOutput, read: Callable[[], Record | Tombstone | Settled]
) -> None:
    for _ in range(_ROUNDS):
        info = storage.stat(path)
        entry = read()
        holder: Any = entry.content if isinstance(entry, Record) else entry
        if info is None or not any(output.handle.path in rewritten.replaces for output in holder.outputs):
            return
        now = replace(holder, outputs=rewritten.outputs)
        data = record_codec.encode(replace(entry, content=now) if isinstance(entry, Record) else now)
        with suppress(PreconditionFailed):  # a clean-up wrote the file meanwhile: read it again
            storage.replace(path, data, generation=info.generation)
            return
    raise StorageUnavailable(f"{path}: other processes rewrote the file {_ROUNDS} times meanwhile; repeat cairn erase")
