"""RocksDB's metadata files in memory while a store is open.

At each open, RocksDB writes a new MANIFEST, CURRENT and OPTIONS, and syncs each file and the folder. A restore first
transfers the state's files. Most of its other time goes to these syncs, and on a busy disk they take much longer. They
are not needed: a store is not durable before `capture`, so a crash may lose the metadata. While a store is open, its
metadata are in a folder in memory. After the close they are beside the state again:

    <memory>/.cairn-rocksdb-<random>/CURRENT, MANIFEST-n, LOCK, ...    all files other than SSTs

A process holds a lock on the folder while its store is open (`folder_lock`). If the process is killed, its folder
stays, and the kernel releases the lock. The next process that opens a store deletes the folders without a lock.
RocksDB's own lock on the file LOCK can't replace this lock, for two reasons. First, RocksDB locks the file some time
after its creation. Until then, the folder of a live store would seem abandoned. Second, RocksDB's lock is a POSIX lock
(`fcntl`): a process loses the lock as soon as it opens and closes the file once more, for instance to test the lock.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from state_backend.adapters.folder_lock import make_locked_folder, remove_unlocked

# This prefix must differ from "cairn-", the prefix of work folders. If TMPDIR is a folder in memory, both kinds of
# folders may lie side by side, and each clean-up must delete only its own kind.
_PREFIX = ".cairn-rocksdb-"
_NEEDED_BYTES = 64 * 1024 * 1024
_SMALL = ("CURRENT", "IDENTITY", "rocksdict-config.json")


class BorrowedMetadata:
    """Metadata files of an open store, in a folder in memory. Not thread-safe."""

    def __init__(self, directory: Path, folder: Path, lock: int) -> None:
        self.folder = folder
        self._directory = directory
        self._lock = lock

    def give_back(self) -> None:
        """Move the metadata files from memory to the store's folder, and delete the folder in memory.

        RocksDB needs these files to open the store again. If the store's folder was deleted, the files are deleted too.
        """
        with suppress(OSError):
            for path in _metadata_in(self.folder):
                _carry(path, self._directory)
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


def borrow_metadata(directory: Path, memory: str | None) -> BorrowedMetadata | None:
    if memory is None:
        return None
    try:
        found = os.statvfs(memory)
        if found.f_bavail * found.f_frsize < _NEEDED_BYTES:
            return None
        for abandoned in Path(memory).glob(f"{_PREFIX}*"):
            with suppress(OSError):
                if abandoned.stat().st_uid == os.geteuid():
                    remove_unlocked(abandoned)
        folder, lock = make_locked_folder(memory, _PREFIX)
    except OSError:
        return None
    borrowed = BorrowedMetadata(directory, folder, lock)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path in _metadata_in(directory):
            _carry(path, folder)
    except OSError:
        borrowed.give_back()
        return None
    return borrowed


def _metadata_in(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name in _SMALL or path.name.startswith("MANIFEST-")]


def _carry(path: Path, folder: Path) -> None:
    """Copy a file to a folder, and delete it. A rename would fail: memory and disk are different file systems."""
    shutil.copyfile(path, folder / path.name)
    path.unlink()
