"""Folders that are locked (flock) as long as their process lives, so that others can tell which ones a killed process left.

Processes are not asked for by their ids, since containers may share a disk or memory and not the ids. The kernel drops a lock with
the last process that holds its descriptor, and there is no lock between making a folder and locking it: whoever looks meanwhile
takes it for an abandoned one. Therefore a lock counts only if the folder is still there under its name.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path


def make_locked_folder(parent: str, prefix: str) -> tuple[Path, int]:
    """A new folder and the descriptor that holds its lock; closing that gives it up.

    Raises: OSError if nothing can be locked there: no folder is left then.
    """
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        try:
            lock = lock_folder(folder)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        if lock is not None:  # else somebody took it for an abandoned one: it had no lock yet
            return folder, lock


def lock_folder(folder: Path | str, above: int | None = None) -> int | None:
    """The descriptor that holds the lock, which other processes that we start do not get; None if another has it, or
    the folder went meanwhile. ``above``: the descriptor of the folder that a name is of.

    Raises: OSError if it can't be locked at all.
    """
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
    """Removes a folder that nobody has locked; whether it did. ``above`` as `lock_folder`. Raises: OSError if it can't be locked at all."""
    lock = lock_folder(folder, above)
    if lock is None:
        return False
    shutil.rmtree(folder, ignore_errors=True, dir_fd=above)
    with suppress(OSError):
        os.close(lock)
    return True
