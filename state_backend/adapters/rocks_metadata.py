"""RocksDB's metadata in memory while a store is open.

Opening a store writes a new MANIFEST, CURRENT and OPTIONS and syncs each of them and their folder: most of the time that a restore
takes beside its transfer, and on a busy disk much more. A store is durable nowhere before it is captured, so that nothing is lost
if these files are. They go into a folder of their own in memory, and back beside the state when it is closed:

    <memory>/.cairn-rocksdb-<random>/CURRENT, MANIFEST-n, LOCK, ...    what is not state

Whoever has a store open holds a lock on its folder (``folder_lock``). A killed process leaves the folder, and the kernel drops the lock:
whoever opens a store next removes folders that nobody has locked. RocksDB's own lock on LOCK does not do: it is taken some time after
the file is made, and a look at it from the same process would drop it.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from state_backend.adapters.folder_lock import make_locked_folder, remove_unlocked

# Other folders of ours, which begin with "cairn-", lie beside these if TMPDIR is the same memory.
_PREFIX = ".cairn-rocksdb-"
_NEEDED_BYTES = 64 * 1024 * 1024
_SMALL = ("CURRENT", "IDENTITY", "rocksdict-config.json")


class BorrowedMetadata:
    """What lies in ``folder`` until it is given back to ``directory``. Not safe to use from several threads."""

    def __init__(self, directory: Path, folder: Path, lock: int) -> None:
        self.folder = folder
        self._directory = directory
        self._lock = lock

    def give_back(self) -> None:
        """Moves what is needed to open the state again back beside it, unless that is gone."""
        with suppress(OSError):
            for path in _metadata_in(self.folder):
                shutil.move(path, self._directory / path.name)
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


def borrow_metadata(directory: Path, memory: str | None) -> BorrowedMetadata | None:
    """A new folder in ``memory`` with all that lies in ``directory`` and is no state, which is moved there; None if there is no such
    memory, or less than 64 MiB left of it."""
    if memory is None:
        return None
    try:
        found = os.statvfs(memory)
        if found.f_bavail * found.f_frsize < _NEEDED_BYTES:
            return None
        _remove_abandoned(Path(memory))
        folder, lock = make_locked_folder(memory, _PREFIX)
    except OSError:
        return None
    borrowed = BorrowedMetadata(directory, folder, lock)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path in _metadata_in(directory):
            shutil.move(path, folder / path.name)
    except OSError:
        borrowed.give_back()
        return None
    return borrowed


def _metadata_in(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name in _SMALL or path.name.startswith("MANIFEST-")]


def _remove_abandoned(memory: Path) -> None:
    for folder in memory.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if folder.stat().st_uid == os.geteuid():
                remove_unlocked(folder)
