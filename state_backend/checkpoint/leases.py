"""Leases keep a dropped checkpoint's files while a long reader reads them.

A lease is a file whose name contains the checkpoint's id and the lease's duration in seconds. Commits ignore leases:
retention drops the checkpoint as always, and only the deletion of its files waits. The order of the steps makes that
safe:

    reader      1. writes the lease, and its name into `settled/names/` (`fresh_listing.py`)
                2. reads the log, and gives up if the checkpoint is no longer retained
    clean-up    1. reads the log: which checkpoints are dropped?
                2. lists the leases
                3. deletes the files of dropped checkpoints without a lease

If the clean-up's listing misses a lease, the reader wrote the lease after the listing. So the reader reads the log
later than the clean-up did. If the clean-up found the checkpoint dropped, the reader finds it dropped too, and gives
up.

docs/design-commits.md says how long a lease lasts, and which clock counts ("Leases"). If a reader's process was
suspended and could not renew in time, the reader may find files deleted. It then fails as a reader without a lease
does.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from uuid import uuid4

from state_backend.checkpoint.dropped_checkpoint import check_retained, telling_drops
from state_backend.checkpoint.fresh_listing import note_names
from state_backend.formats import paths, record_codec
from state_backend.ports.storage import Storage
from state_backend.values.errors import CairnError, NotFound, PreconditionFailed
from state_backend.values.handles import FileInfo
from state_backend.values.marks import Lease

logger = logging.getLogger("cairn")

# How long a lease lasts after its last renewal. A reader renews its lease every five minutes, a third of this time.
LASTS = timedelta(minutes=15)

_JOIN_S = 10.0
_RENEWED = ", renewals: "


def plan_leases(leases: Sequence[FileInfo], newest_record_ms: int) -> tuple[set[int], list[FileInfo]]:
    """Return the ids of checkpoints with a lease, and the files of leases that ended before `newest_record_ms`."""
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
    name, seconds = str(uuid4()), max(1, int(lasts.total_seconds()))
    path = paths.lease(checkpoint_id, seconds, name)
    holder = f"{what}, on {socket.gethostname()}, process {os.getpid()}"
    lease = Lease(id=checkpoint_id, lease=name, seconds=seconds, holder=holder)
    try:
        storage.create(path, record_codec.encode(lease))
        note_names(storage, paths.LEASES, [path.removeprefix(paths.LEASES)])
    except CairnError as error:
        give_back(storage, path)
        logger.warning(
            "%s: checkpoint %d is read without a lease, so a clean-up may delete its files during the read: %s",
            storage.url,
            checkpoint_id,
            error,
        )
        return None
    try:
        check_retained(storage, checkpoint_id)
    except CairnError:  # on any error: the reader stops, so it will not renew the lease
        give_back(storage, path)
        raise
    return path


def renew(storage: Storage, path: str) -> bool:
    """Write a lease again, so that it lasts from now on, and return False if the lease had ended and was deleted.

    The lease's `holder` counts the renewals, so that the file's bytes change. With equal bytes, an object store could
    keep the file's `generation`, and a clean-up that listed the old lease would delete the new one.
    """
    try:
        info = storage.stat(path)
        if info is None:
            return False
        lease = record_codec.decode(storage.read(path), path, Lease)
        holder, _, count = lease.holder.partition(_RENEWED)
        renewed = replace(lease, holder=f"{holder}{_RENEWED}{int(count or 0) + 1}")
        storage.replace(path, record_codec.encode(renewed), generation=info.generation)
    except (NotFound, PreconditionFailed):
        return False
    return True


def give_back(storage: Storage, path: str) -> None:
    """Delete a lease. If the deletion fails, the lease ends by itself later."""
    with suppress(CairnError):
        delete_lease(storage, path)


def delete_lease(storage: Storage, path: str, generation: int | None = None) -> None:
    """Delete a lease's file, and then its name from `settled/names/` (`fresh_listing.py`).

    With a `generation`, a file that was rewritten since stays.
    """
    storage.delete(path, generation=generation)
    note_names(storage, paths.LEASES, [], drop=[path.removeprefix(paths.LEASES)])


@contextmanager
def holding(storage: Storage, checkpoint_id: int | None, what: str, *, lasts: timedelta = LASTS) -> Iterator[None]:
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
            renewing.join(_JOIN_S)  # before the deletion, since the thread would warn about a deleted lease
            give_back(storage, path)


def _renew_until(over: threading.Event, storage: Storage, path: str | None, lasts: timedelta) -> None:
    while path is not None and not over.wait(lasts.total_seconds() / 3):
        try:
            if not renew(storage, path):
                logger.warning(
                    "%s: the lease %s ended before it was renewed; a clean-up may delete the files that are being read",
                    storage.url,
                    path,
                )
                return
        except CairnError as error:  # the next renewal may succeed
            logger.warning(
                "%s: the lease %s was not renewed, the reader tries again later: %s", storage.url, path, error
            )
