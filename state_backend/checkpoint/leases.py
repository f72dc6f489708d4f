"""Leases: who reads a checkpoint for longer than retention keeps it says so, and its files stay until the reading is over.

A lease is a file whose name says which checkpoint it is on and for how many seconds. It changes nothing that a commit decides:
retention drops the checkpoint when it would, and only the deletion of its files waits. The order of the two sides makes that safe:

    reader      1. writes the lease and notes its name (``fresh_listing.py``)   2. reads the log: is the checkpoint still retained? If not, gives up
    clean-up    1. reads the log: what was dropped?   2. lists the leases   3. deletes what no lease is on

If the clean-up's listing misses the lease, then its log was read before the lease was written, and what that log calls dropped the
reader finds dropped too.

What is on disk if the reader stops: before 1 nothing, after it a lease that nobody renews. It ends when the storage has written a
record more than ``seconds`` after it: both times are the storage's own, so that no clock of a host counts. Then a clean-up deletes
it. A reader that could not renew in time, since its process was suspended, may find files gone: it fails as one without a lease.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from uuid import uuid4

from state_backend.checkpoint.dropped_checkpoint import check_retained, telling_drops
from state_backend.checkpoint.fresh_listing import note_names
from state_backend.formats import paths, record_codec
from state_backend.ports.storage import Storage
from state_backend.values.errors import (
    CairnError,
    NotFound,
    PreconditionFailed,
)
from state_backend.values.handles import FileInfo
from state_backend.values.records import Lease

logger = logging.getLogger("cairn")

LASTS = timedelta(minutes=15)
"""How long a lease stays behind after its reader was killed. It is renewed three times as often."""

_JOIN_S = 10.0


def plan_leases(leases: Sequence[FileInfo], newest_record_ms: int) -> tuple[set[int], list[FileInfo]]:
    """The checkpoints that somebody reads, and the leases that have ended. ``newest_record_ms``: when the storage wrote the newest
    record, by the clock that also dates the leases, in milliseconds since the epoch."""
    held, ended = set(), []
    for info in leases:
        found = paths.leased_id(info.path)
        if found is None:
            continue
        checkpoint_id, seconds = found
        if info.modified_ms + seconds * 1000 < newest_record_ms:
            ended.append(info)
        else:
            held.add(checkpoint_id)
    return held, ended


def take_lease(storage: Storage, checkpoint_id: int, what: str, lasts: timedelta = LASTS) -> str | None:
    """Holds the files of a checkpoint for that long; the path of the lease. None where the storage takes no lease, since the reader
    may not write there, for instance: then it reads without one.

    Raises: CheckpointDropped if it is not retained any more: there may be nothing to hold.
    """
    name, seconds = str(uuid4()), max(1, int(lasts.total_seconds()))
    path = paths.lease(checkpoint_id, seconds, name)
    holder = f"{what}, on {socket.gethostname()}, process {os.getpid()}"
    lease = Lease(id=checkpoint_id, lease=name, seconds=seconds, holder=holder)
    try:
        storage.create(path, record_codec.encode(lease))
        note_names(storage, paths.LEASES, [path.removeprefix(paths.LEASES)])
    except CairnError as error:
        give_back(storage, path)
        logger.warning("%s: checkpoint %d is read without a lease: %s", storage.url, checkpoint_id, error)
        return None
    try:
        check_retained(storage, checkpoint_id)
    except CairnError:  # also if the log can't be read: nobody would renew it
        give_back(storage, path)
        raise
    return path


def renew(storage: Storage, path: str) -> bool:
    """Writes a lease once more, so that it lasts from now on. False if it is gone, since it had ended."""
    try:
        info = storage.stat(path)
        if info is None:
            return False
        storage.replace(path, storage.read(path), generation=info.generation)
    except (NotFound, PreconditionFailed):
        return False
    return True


def give_back(storage: Storage, path: str) -> None:
    """Ends a lease. One that can't be deleted ends by itself."""
    with suppress(CairnError):
        delete_lease(storage, path)


def delete_lease(storage: Storage, path: str, generation: int | None = None) -> None:
    """Deletes a lease, and then its noted name. Raises: as ``Storage.delete``."""
    storage.delete(path, generation=generation)
    note_names(storage, paths.LEASES, [], drop=[path.removeprefix(paths.LEASES)])


@contextmanager
def holding(storage: Storage, checkpoint_id: int | None, what: str, *, lasts: timedelta = LASTS) -> Iterator[None]:
    """Holds a lease on a checkpoint while the block reads it. ``storage``: of the pipeline's folder. ``checkpoint_id``: None or 0 for
    state that is no committed checkpoint; then there is nothing to hold. ``what``: for people.

    Raises: CheckpointDropped if retention dropped it before the lease was there, or in place of the CorruptFile or NotFound of
    a file if it has dropped it by then.
    """
    path = take_lease(storage, checkpoint_id, what, lasts) if checkpoint_id else None
    over = threading.Event()
    renewing = threading.Thread(target=_renew_until, args=(over, storage, path, lasts), name="cairn-lease", daemon=True)
    if path is not None:
        renewing.start()
    try:
        with telling_drops(storage, checkpoint_id):
            yield
    finally:
        over.set()
        if path is not None:
            renewing.join(_JOIN_S)  # else it might find the lease gone, and say that it had ended
            give_back(storage, path)


def _renew_until(over: threading.Event, storage: Storage, path: str | None, lasts: timedelta) -> None:
    while path is not None and not over.wait(lasts.total_seconds() / 3):
        try:
            if not renew(storage, path):
                logger.warning("%s: the lease %s had ended before it was renewed", storage.url, path)
                return
        except CairnError as error:  # the next renewal may get through
            logger.warning("%s: the lease %s was not renewed: %s", storage.url, path, error)
