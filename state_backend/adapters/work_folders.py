"""Local folders of tasks, and what killed tasks left of them.

    <temp>/cairn-work-<user id>/<kernel>-<what>-<random>/    what one task restores, writes and uploads; gone when it ends

A killed process leaves its folder: the state of a shard, and links that keep files of the host's cache on the disk after the cache
dropped them. Whoever makes a work folder next removes the abandoned ones. ``<kernel>`` says how to tell those:
1. The first 8 digits of the kernel's boot id: the task holds a lock (flock) on its folder. Whoever runs on the same kernel, in
   whatever container, gets that lock exactly if the task is dead.
2. The boot id of another kernel: the host has booted since, or the disk is one of several hosts, whose locks may not reach each
   other. Such a folder is abandoned if nothing was made or removed in it, or in a folder in it, for seven days.
3. ``unlocked``: that disk has no locks, so that again only the age tells.
The folders have a parent of their own, so that nobody has to look through a full temp folder, or at what is somebody else's.
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
# What one task looks at and removes at most: a host with a hundred tasks at once has about as many folders, and each task leaves
# one at most.
_MOST_SEEN, _MOST_REMOVED = 1024, 16

FULL_DISK = f"the disk of {socket.gethostname()} is full, not the storage: free some space there, or have TMPDIR name a folder with more"


@contextmanager
def work_folder(what: str) -> Iterator[Path]:
    """A local folder of this task alone, gone afterwards. ``what`` is for the person who finds it.

    Raises: StorageUnavailable, naming the host, if its disk is full, also where something else in the block met that.
    """
    try:
        with _work_folder(what) as folder:
            yield folder
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise StorageUnavailable(f"{tempfile.gettempdir()}: {FULL_DISK}: {error}") from error


@contextmanager
def _work_folder(what: str) -> Iterator[Path]:
    parent = _parent()
    if parent is None:  # somebody else has the name: nothing is collected there
        with tempfile.TemporaryDirectory(prefix=f"cairn-{what}-", ignore_cleanup_errors=True) as name:
            yield Path(name)
        return
    with suppress(OSError):
        remove_abandoned(parent, kernel(), touched_s(parent))
    folder, lock = _make(parent, what)
    try:
        yield folder
    finally:
        # In this order: a folder without a lock is another's to remove.
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def remove_abandoned(parent: Path, kernel: str, now_s: float) -> None:
    """Removes up to 16 abandoned folders of the first 1024 in ``parent``. ``now_s``: seconds since the epoch, by the clock of the
    file system."""
    left = _MOST_REMOVED
    # The parent may be a link to folders of ours by now, where the temp folder lets others rename.
    with no_follow.closing(no_follow.open_folder(parent)) as above, os.scandir(above) as entries:
        for entry in islice(entries, _MOST_SEEN):
            with suppress(OSError):
                left -= _remove_if_abandoned(above, entry.name, kernel, now_s)
            if not left:
                return


def touched_s(folder: Path | int) -> float:
    """The time now by the clock of the folder's file system, which a network disk takes from its server; seconds since the epoch."""
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
        return remove_unlocked(name, above)  # a disk whose locks reach further than we know says who is alive
    except OSError:
        shutil.rmtree(name, ignore_errors=True, dir_fd=above)
        return True


def is_locked_by(name: str, kernel: str) -> bool:
    """Whether the lock on a folder of this name tells if its task lives. ``kernel``: ours."""
    return kernel != _UNLOCKED and name.partition("-")[0] == kernel


def _changed_s(above: int, name: str) -> float:
    """When something was made or removed in the folder or in one of its own folders for the last time, since the epoch."""
    times_s = [os.stat(name, dir_fd=above, follow_symlinks=False).st_mtime]
    with no_follow.closing(no_follow.open_below(above, name, name)) as folder, os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                times_s.append(entry.stat(follow_symlinks=False).st_mtime)
    return max(times_s)


def _parent() -> Path | None:
    """The folder of this user's work folders, made if it is not there; None if somebody else made it, or it can't be made."""
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
    """What tells the running kernel from others, 8 hex digits; ``unlocked`` if it does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    except OSError:
        return _UNLOCKED
