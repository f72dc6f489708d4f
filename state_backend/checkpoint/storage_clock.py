"""The time by the storage's clock, which also dates its files: an age is a difference of two times of one clock."""

from __future__ import annotations

from contextlib import suppress

from state_backend.formats import paths
from state_backend.ports.storage import Storage
from state_backend.values.errors import AlreadyExists, PermissionRefused, StorageUnavailable

_ROUNDS = 100


def storage_now_ms(storage: Storage, *, dry_run: bool = False) -> int:
    """Writes a file and reads its time: milliseconds since the epoch. The file is deleted; the next call deletes a file that a stopped
    call left. ``dry_run``: where no file can be written, the time of the newest file counts, which is not later than now.

    Raises: StorageUnavailable, PermissionRefused where no file can be written.
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
    raise StorageUnavailable(f"{storage.url}: others wrote {paths.CLOCK} {_ROUNDS} times meanwhile; try again")
