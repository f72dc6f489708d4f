"""Local work folders of tasks, and the removal of folders that killed tasks left.

    <temp>/cairn-work-<user id>/<kernel>-<what>-<random>/    files that one task restores, writes and uploads

A task deletes its folder when it ends. A killed task leaves its folder: the state of a shard, and hard links that keep
files of the host's cache on disk after the cache dropped them. The next task that makes a work folder removes the
abandoned ones. `<kernel>` decides which folders are abandoned:
1. The first 8 hex digits of the running kernel's boot id: a live task holds a lock (flock) on its folder, and all
   containers of the kernel see the lock. The folder is abandoned if it is not locked.
2. The boot id of another kernel: the host has rebooted since, or several hosts share the disk. Locks of other hosts may
   be invisible here. The folder is abandoned if for seven days no file was created or deleted in the folder or in one
   of its own folders.
3. `unlocked`: the disk has no locks. The folder is abandoned as in rule 2.
Work folders have a parent folder of their own, so that a task need not list a full temp folder or files of other users.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import islice
from pathlib import Path

from state_backend.adapters import no_follow
from state_backend.adapters.folder_lock import make_locked_folder, remove_unlocked
from state_backend.values.errors import StorageUnavailable

_UNLOCKED = "unlocked"
_MIN_AGE_S = 7 * 86_400.0
# `_MOST_SEEN` is the largest number of work folders that one task checks, and `_MOST_REMOVED` is the largest number
# that it deletes. A host with a hundred tasks at once has about a hundred folders, and each killed task leaves at most
# one.
_MOST_SEEN, _MOST_REMOVED = 1024, 16

FULL_DISK = f"the local disk of {socket.gethostname()} is full (not the storage); free some space there, or set TMPDIR to a folder with more"


@contextmanager
def work_folder(what: str) -> Iterator[Path]:
    """Yield a local folder for this task alone, and delete it afterwards. `what`: its purpose, for people.

    A full disk, also in the block, raises `StorageUnavailable` with the name of this host.
    """
    try:
        parent = _parent()
        # If another user owns the parent folder, or it can't be made, the work folder lies directly in the temp folder.
        # If this process dies then, nothing removes that work folder.
        if parent is None:
            with tempfile.TemporaryDirectory(prefix=f"cairn-{what}-", ignore_cleanup_errors=True) as name:
                yield Path(name)
            return
        with suppress(OSError):
            remove_abandoned(parent, kernel(), touched_s(parent))
        folder, lock = _make(parent, what)
        try:
            yield folder
        finally:
            # The lock is released last: another task may delete a folder without a lock.
            shutil.rmtree(folder, ignore_errors=True)
            if lock is not None:
                os.close(lock)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise StorageUnavailable(f"{tempfile.gettempdir()}: {FULL_DISK}: {error}") from error


def remove_abandoned(parent: Path, kernel: str, now_s: float) -> None:
    """Delete up to 16 abandoned work folders of this user; check at most 1,024 folders."""
    left = _MOST_REMOVED
    # Where other users may rename files in the temp folder, the parent may be a link by now. `no_follow` refuses a
    # link.
    with no_follow.closing(no_follow.open_folder(parent)) as above, os.scandir(above) as entries:
        for entry in islice(entries, _MOST_SEEN):
            with suppress(OSError):
                left -= _remove_if_abandoned(above, entry.name, kernel, now_s)
            if not left:
                return


def touched_s(folder: Path | int) -> float:
    """Set a folder's mtime to the present time by the clock of its file system, and return it."""
    os.utime(folder)
    return os.stat(folder).st_mtime  # noqa: PTH116


def _remove_if_abandoned(above: int, name: str, kernel: str, now_s: float) -> bool:
    if os.stat(name, dir_fd=above, follow_symlinks=False).st_uid != os.geteuid():
        return False
    if is_locked_by(name, kernel):
        return remove_unlocked(name, above)
    if now_s - _changed_s(above, name) < _MIN_AGE_S:
        return False
    try:
        # A visible lock of a live task keeps the folder. On a disk without locks (OSError), only the age decides.
        return remove_unlocked(name, above)
    except OSError:
        shutil.rmtree(name, ignore_errors=True, dir_fd=above)
        return True


def is_locked_by(name: str, kernel: str) -> bool:
    """Return True if the folder's task runs under this kernel, so that this process can see the task's lock."""
    return kernel != _UNLOCKED and name.partition("-")[0] == kernel


def _changed_s(above: int, name: str) -> float:
    """Return when a file was last created or deleted in a work folder or its subfolders."""
    times_s = [os.stat(name, dir_fd=above, follow_symlinks=False).st_mtime]
    with no_follow.closing(no_follow.open_below(above, name, name)) as folder, os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                times_s.append(entry.stat(follow_symlinks=False).st_mtime)
    return max(times_s)


def _parent() -> Path | None:
    """Make and return the parent of this user's work folders; None if another user owns it or it can't be made."""
    parent = Path(tempfile.gettempdir(), f"cairn-work-{os.geteuid()}")
    try:
        with suppress(FileExistsError):
            parent.mkdir(mode=0o700)
        found = parent.stat(follow_symlinks=False)
    except OSError:
        return None
    return parent if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() else None


def _make(parent: Path, what: str) -> tuple[Path, int | None]:
    if kernel() != _UNLOCKED:
        with suppress(OSError):
            return make_locked_folder(str(parent), f"{kernel()}-{what}-")
    return Path(tempfile.mkdtemp(prefix=f"{_UNLOCKED}-{what}-", dir=parent)), None


@cache
def kernel() -> str:
    """Return the first part of the names of new work folders: the boot id of the running kernel, or `unlocked`."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    except OSError:
        return _UNLOCKED
