"""Functions that open, empty and delete folders without following symbolic links.

A path can change after a check: another user of a shared disk can put a link in the place of a folder. So these
functions open each segment relative to the descriptor of the folder above (openat with O_NOFOLLOW). They create, rename
and delete files relative to such a descriptor too. A descriptor stays on its folder, even if the folder is renamed.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_ISDIR, S_ISLNK

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class LinkInPath(OSError):
    """A symbolic link stands where a folder or a lock file is expected."""

    def __init__(self, link: str) -> None:
        super().__init__(errno.ELOOP, "a symbolic link in place of a folder or lock file", link)
        self.link = link


def open_folder(folder: Path) -> int:
    """Open a folder by its path, following links above the last segment only."""
    return _open(str(folder), None)


def open_root(root: Path) -> int:
    """Open a folder by its path. All links in the path are followed."""
    return os.open(root, _FOLDER)


def open_below(above: int, name: str, path: str) -> int:
    try:
        return _open(name, above)
    except LinkInPath:
        raise LinkInPath(path) from None


def open_lock(above: int, name: str, path: str) -> int:
    """Open the lock file `name` in the open folder `above`, or create it. `path` names it in errors."""
    try:
        return os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=above)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise LinkInPath(path) from None
        raise


def names_in(folder: int) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries]


def sync_folder(folder: int) -> None:
    try:
        os.fsync(folder)
    except OSError as error:
        # Some file systems can't sync a directory, and do not need it. Source: restic, internal/backend/local.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise


@contextmanager
def closing(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def remove_tree(above: int, name: str) -> None:
    """Delete `name` in the open folder `above`, with all that is in it. Links are deleted, not the files behind them.

    Files that can't be deleted stay, without an error.
    """
    with suppress(FileNotFoundError):
        if S_ISDIR(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
            # `rmtree` follows no link, and refuses a name that has become a link.
            shutil.rmtree(name, ignore_errors=True, dir_fd=above)
        else:
            os.unlink(name, dir_fd=above)


def remove_empty_folders(above: int, name: str) -> None:
    """Delete the folder `name` in the open folder `above`, and all folders in it, unless they hold a file somewhere."""
    for _, names, _, folder in os.fwalk(name, topdown=False, dir_fd=above):
        for empty in names:
            with suppress(OSError):
                os.rmdir(empty, dir_fd=folder)
    with suppress(OSError):
        os.rmdir(name, dir_fd=above)


def _open(name: str, above: int | None) -> int:
    try:
        return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=above)
    except OSError as error:
        # For a link, Linux reports ENOTDIR and macOS ELOOP. ENOTDIR is reported for a file too.
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            with suppress(FileNotFoundError):
                if S_ISLNK(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
                    raise LinkInPath(name) from None
        raise
