"""Folders that are opened, emptied and removed without following a symbolic link.

A path that was checked a moment ago may lead elsewhere now: another user of a shared disk can put a link in the place of a folder.
So each segment is opened relative to the descriptor of the folder above it (openat with O_NOFOLLOW), and files are made, renamed
and removed relative to such a descriptor. A descriptor stays on its folder, whatever happens to the folder's name.
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
    """A symbolic link stands where a folder or a lock is expected. ``link``: its name, with the folders that it was reached by."""

    def __init__(self, link: str) -> None:
        super().__init__(errno.ELOOP, "a symbolic link stands in the way", link)
        self.link = link


def open_folder(folder: Path) -> int:
    """Opens a folder by its path. The last segment must be no link; links above it are followed."""
    return _open(str(folder), None)


def open_root(root: Path) -> int:
    """Opens a folder by its path, through links."""
    return os.open(root, _FOLDER)


def open_below(above: int, name: str, path: str) -> int:
    """Opens a folder of an open one. ``path``: its name in an error.

    Raises: LinkInPath if the name is a symbolic link.
    """
    try:
        return _open(name, above)
    except LinkInPath:
        raise LinkInPath(path) from None


def open_lock(above: int, name: str, path: str) -> int:
    """Opens a file of an open folder to lock it; creates it if it is missing. ``path`` and errors as `open_below`."""
    try:
        return os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=above)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise LinkInPath(path) from None
        raise


def names_in(folder: int) -> list[str]:
    """The names in an open folder."""
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries]


@contextmanager
def closing(descriptor: int) -> Iterator[int]:
    """Closes a descriptor behind the block."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def remove_tree(above: int, name: str) -> None:
    """Removes a folder of an open one with all that is in it, and links in it as links. A name that is a link is removed alone.
    Files that can't be removed stay, without an error."""
    with suppress(FileNotFoundError):
        if S_ISDIR(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
            shutil.rmtree(name, ignore_errors=True, dir_fd=above)  # follows no link, and refuses a name that became one
        else:
            os.unlink(name, dir_fd=above)


def remove_empty_folders(above: int, name: str) -> None:
    """Removes a folder of an open one if no file lies below it; otherwise the folders in it without files."""
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
        # Linux says ENOTDIR of a link, macOS ELOOP. A file is ENOTDIR too.
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            with suppress(FileNotFoundError):
                if S_ISLNK(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
                    raise LinkInPath(name) from None
        raise
