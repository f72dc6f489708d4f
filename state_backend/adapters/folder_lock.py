"""Folders that are locked (flock) while their process lives, so that other processes can recognise abandoned folders.

Process ids can't tell this: containers may share a disk or memory without sharing process ids. The kernel releases a
lock when the last process with the lock's descriptor ends. Between the creation of a folder and its lock, another
process may take the folder for abandoned and delete it. Therefore a lock counts only if the folder still exists under
its name.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path


def make_locked_folder(parent: str, prefix: str) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        try:
            lock = lock_folder(folder)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        if lock is not None:
            return folder, lock
        # Another process deleted the folder as abandoned, because the folder had no lock yet. Try again.


def lock_folder(folder: Path | str, above: int | None = None) -> int | None:
    """Lock a folder. Return the lock's descriptor; None if another process has the lock, or the folder is gone."""
    descriptor, held = -1, False
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held = os.stat(folder, dir_fd=above).st_ino == os.fstat(descriptor).st_ino
    except (BlockingIOError, FileNotFoundError):
        pass
    finally:
        if not held and descriptor >= 0:
            os.close(descriptor)
    return descriptor if held else None


def remove_unlocked(folder: Path | str, above: int | None = None) -> bool:
    lock = lock_folder(folder, above)
    if lock is None:
        return False
    shutil.rmtree(folder, ignore_errors=True, dir_fd=above)
    with suppress(OSError):
        os.close(lock)
    return True
