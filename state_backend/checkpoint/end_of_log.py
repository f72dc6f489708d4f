"""Find records that are missing from the log, for readers, `cairn check` and sweeps.

A missing record in the middle of the log leaves a hole in the ids. If the newest record is missing, the ids have no
hole, and results that the record replaced or made stale would count again. Marks of that checkpoint (published,
validated, quarantined) show the loss, since a mark is written after its checkpoint's record.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from state_backend.formats import paths
from state_backend.ports.storage import Storage


def last_marked(listed: Iterable[str]) -> tuple[int, str]:
    """Return the highest checkpoint id that the path of a mark contains, and that path. Without a mark: 0 and "".

    A mark is a file in `published/`, `validated/` or `quarantine/` about one checkpoint. Callers compare the id with
    the end of the log: a mark of a later checkpoint shows that the newest record is lost.
    """
    return max(((paths.marked_id(path) or 0, path) for path in listed), default=(0, ""))


def missing_records(storage: Storage, listed: Collection[str]) -> Iterator[str]:
    """Yield a sentence for each record that is missing from the log.

    A record is missing if a later record exists, or if a mark of its checkpoint exists. A mark is a file in
    `published/`, `validated/` or `quarantine/` about one checkpoint.

    Each missing record is looked up by name before it is reported: a network disk may list a folder as it was some
    seconds ago, and a record may have been created while the marks were listed.
    """
    ids = {n for path in listed if path.startswith(paths.CHECKPOINTS) and (n := paths.record_id(path)) is not None}
    last = max(ids, default=0)
    for hole in sorted({*range(1, last)} - ids):
        if storage.stat(paths.record(hole)) is None:
            yield f"{paths.record(hole)} is missing from the log, but later records exist"
    for path in listed:
        marked = paths.marked_id(path) or 0
        if marked > last and storage.stat(paths.record(marked)) is None:
            yield f"{paths.record(marked)} is missing: {path} refers to it, but the log ends at {last}"
