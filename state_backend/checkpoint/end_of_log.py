"""Did the log lose a record? One rule for whoever reads the log, verifies it, or deletes by it.

A record that is lost before the end leaves a hole. The newest one leaves none, and what it replaced or made stale would count again.
Marks of that checkpoint give it away: each is written after the record that it speaks of.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from state_backend.formats import paths
from state_backend.ports.storage import Storage


def last_marked(listed: Iterable[str]) -> tuple[int, str]:
    """The highest checkpoint id that a mark among these paths speaks of, and the mark's path; 0 if there is no mark."""
    return max(((paths.marked_id(path) or 0, path) for path in listed), default=(0, ""))


def missing_records(storage: Storage, listed: Collection[str]) -> Iterator[str]:
    """A sentence for each record that a listing of the log and of the marks shows to be missing.

    Each is looked for once more: a network disk may list a folder as it was some seconds ago, and a record may have been
    created while the marks were listed.
    """
    ids = {n for path in listed if path.startswith(paths.CHECKPOINTS) and (n := paths.record_id(path)) is not None}
    last = max(ids, default=0)
    for hole in sorted({*range(1, last)} - ids):
        if storage.stat(paths.record(hole)) is None:
            yield f"{paths.record(hole)}: missing from the log, though later records are there"
    for path in listed:
        marked = paths.marked_id(path) or 0
        if marked > last and storage.stat(paths.record(marked)) is None:
            yield f"{paths.record(marked)} is missing: {path} speaks of it, but the log ends at {last}"
