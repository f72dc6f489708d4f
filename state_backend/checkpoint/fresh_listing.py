"""The files of a folder on storages whose listings may be old.

A network disk answers a listing from a cache that may be some seconds old: files that others created since are missing. A read of one
file by its name is current. So whoever creates a file that a listing must not miss notes its name in ``settled/names/<folder>.json``
first, or before anybody depends on the file; whoever lists the folder reads that file by its name and adds what it names.

What is on disk if this stops: a name without a file, which readers skip or whose writer tries again; or a file without a name, which
nobody depends on yet, and which a listing shows some seconds later. Storages whose listings are always current get no such file.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from contextlib import suppress

from state_backend.checkpoint.parallel import at_once
from state_backend.formats import paths, record_codec
from state_backend.ports.storage import Storage, lists_late
from state_backend.values.errors import (
    AlreadyExists,
    CorruptRecord,
    NotFound,
    PreconditionFailed,
    StorageUnavailable,
    UnknownOutcome,
    UnsupportedFormat,
)
from state_backend.values.handles import FileInfo
from state_backend.values.records import Names

logger = logging.getLogger("cairn")

_ROUNDS = 100


def listed(storage: Storage, folder: str) -> list[str]:
    """List the paths in a folder, and add the paths whose names are noted. Some of these files may be gone, or not written yet."""
    found = {info.path for info in storage.list(folder)}
    if lists_late(storage):
        found |= {folder + name for name in _noted(storage, paths.names(folder))}
    return sorted(found)


def listed_files(storage: Storage, folder: str) -> list[FileInfo]:
    """List the files in a folder as `listed` does, with the current `FileInfo` of each noted file, and without files that are gone."""
    found = {info.path: info for info in storage.list(folder)}
    if lists_late(storage):
        noted = [folder + name for name in sorted(_noted(storage, paths.names(folder)))]
        now = at_once(storage.stat, noted)
        found = {path: info for path, info in found.items() if path not in noted}
        found |= {info.path: info for info in now if info is not None}
    return [info for _, info in sorted(found.items())]


def note_names(storage: Storage, folder: str, add: Collection[str], drop: Collection[str] = ()) -> None:
    """Add names to the folder's file in ``settled/names/``, and drop others from it. Do nothing if listings are always current.

    Raises: UnknownOutcome, StorageUnavailable if it can't be told whether the names are noted.
    """
    if not lists_late(storage):
        return
    path = paths.names(folder)
    for _ in range(_ROUNDS):
        info = storage.stat(path)  # before the read: a later write has another generation
        known = _noted(storage, path) if info is not None else set()
        wanted = (known | {*add}) - {*drop}
        if wanted == known:
            return
        data = record_codec.encode(Names(folder=folder, names=tuple(sorted(wanted))))
        with suppress(AlreadyExists, NotFound, PreconditionFailed, UnknownOutcome):
            if info is None:
                storage.create(path, data)
            elif not wanted:
                storage.delete(path, generation=info.generation)
            else:
                storage.replace(path, data, generation=info.generation)
            return
    raise StorageUnavailable(f"{storage.url}: others wrote {path} {_ROUNDS} times meanwhile; try again")


def _noted(storage: Storage, path: str) -> set[str]:
    try:
        return {*record_codec.decode(storage.read(path), path, Names).names}
    except NotFound:
        return set()
    except (CorruptRecord, UnsupportedFormat) as error:  # a flipped bit makes another format of it too
        # What it named a listing shows by now, and the next writer writes it anew.
        logger.warning("%s: %s; the folder is listed without it", storage.url, error)
        return set()
