"""List the files of a folder on storages whose listings may be old.

docs/design-commits.md tells why `settled/names/<folder>.json` exists, and who reads it ("Old listings"). If listings
must not miss a file, its writer adds the file's name to this JSON file before any process depends on the file.

A writer that stops half-way leaves a name without a file, or a file without a name. Readers skip a name without a file.
No process depends on a file without a name, and listings show the file some seconds later. Storages whose listings are
always current get no files in `settled/names/`.
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
from state_backend.values.marks import Names

logger = logging.getLogger("cairn")

_ROUNDS = 100


def list_fresh(storage: Storage, folder: str) -> list[str]:
    """List the paths in a folder, including those that `settled/names/` holds.

    `settled/names/` repeats names that a listing may miss. Their files may be deleted, or not written yet.
    """
    found = {info.path for info in storage.list(folder)}
    if lists_late(storage):
        found |= {folder + name for name in _read_noted(storage, paths.names(folder))}
    return sorted(found)


def listed_files(storage: Storage, folder: str) -> list[FileInfo]:
    """List the files in a folder, including new files that an old listing misses.

    The writers of such files also write their names to a file in `settled/names/` (see the module). The function looks
    up each of these names: a file that exists is returned with its current metadata, and a deleted file is left out.
    """
    found = {info.path: info for info in storage.list(folder)}
    if lists_late(storage):
        noted = [folder + name for name in sorted(_read_noted(storage, paths.names(folder)))]
        now = at_once(storage.stat, noted)
        found = {path: info for path, info in found.items() if path not in noted}
        found |= {info.path: info for info in now if info is not None}
    return [info for _, info in sorted(found.items())]


def note_names(storage: Storage, folder: str, add: Collection[str], drop: Collection[str] = ()) -> None:
    """Note the names of new files, so that `list_fresh` and `listed_files` find them even if a listing misses them.

    The names are kept in `settled/names/`, in one file for each listed folder. If the storage's listings are always
    current, the function does nothing.
    """
    if not lists_late(storage):
        return
    path = paths.names(folder)
    for _ in range(_ROUNDS):
        info = storage.stat(path)  # taken before the read, so that a write in between makes `replace` fail
        known = _read_noted(storage, path) if info is not None else set()
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
    raise StorageUnavailable(f"{storage.url}: other processes rewrote {path} {_ROUNDS} times in a row; try again")


def _read_noted(storage: Storage, path: str) -> set[str]:
    try:
        return {*record_codec.decode(storage.read(path), path, Names).names}
    except NotFound:
        return set()
    except (CorruptRecord, UnsupportedFormat) as error:  # a damaged file may seem to have an unknown format
        # The damaged file holds names of new files in the folder. Without these names, a listing misses at most the
        # files that were created in the last seconds. The next call of `note_names` writes `path` again.
        logger.warning("%s: %s; the folder is listed without the names in this file", storage.url, error)
        return set()
