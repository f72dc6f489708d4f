"""Read the time from the storage's clock, which also dates the files, so that ages of files are exact."""

from __future__ import annotations

from contextlib import suppress

from state_backend.formats import paths
from state_backend.ports.storage import Storage
from state_backend.values.errors import AlreadyExists, PermissionRefused, StorageUnavailable

_ROUNDS = 100


def storage_now_ms(storage: Storage, *, dry_run: bool = False) -> int:
    """Return the time now by the storage's clock, in milliseconds since the epoch.

    The function writes a file, reads the time that the storage gave the file, and deletes the file. If the process is
    killed in between, the next call deletes the file.

    `dry_run`: If the file can't be written, return the time of the newest file, an earlier time, instead of raising.
    """
    try:
        return _written_ms(storage)
    except (PermissionRefused, StorageUnavailable):
        if not dry_run:
            raise
        return max((info.modified_ms for info in storage.list("")), default=0)


def _written_ms(storage: Storage) -> int:
    for _ in range(_ROUNDS):
        with suppress(AlreadyExists):
            storage.create(paths.CLOCK, b"")
            info = storage.stat(paths.CLOCK)
            storage.delete(paths.CLOCK)
            if info is not None:
                return info.modified_ms
            continue
        storage.delete(paths.CLOCK)
    raise StorageUnavailable(f"{storage.url}: other processes wrote {paths.CLOCK} {_ROUNDS} times in a row; try again")
