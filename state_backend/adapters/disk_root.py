"""The root folder of a local storage.

The root may be a symbolic link. Folders below it are opened without following links (`no_follow`).

A root inside the folder of trials (`.trials`) has a stricter rule for its own path: links are followed only in the part
of the path above `.trials`. Cairn made `.trials` and everything below it, and makes no links there. So a link there was
made by another program, and writes and deletions raise `BehindLink`.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from state_backend.adapters import no_follow
from state_backend.formats.paths import TRIALS
from state_backend.ports.storage import TEMP_FOLDER, check_path


class DiskRoot:
    def __init__(self, path: Path) -> None:
        self.path = path
        parts = path.parts.index(TRIALS) if TRIALS in path.parts else len(path.parts)
        self._linkable, self._own = Path(*path.parts[:parts]), path.parts[parts:]
        # Another process may have created an existing folder without having synced it yet. So each folder in which a
        # file is written is synced once.
        self._durable: set[str] = set()

    def file(self, path: str) -> Path:
        return self.path / check_path(path)

    @contextmanager
    def folder(self, folder: str, *, make: bool = False) -> Iterator[int]:
        names = (*self._own, *folder.split("/")) if folder else self._own
        with no_follow.closing(self._open(names, make)) as descriptor:
            yield descriptor

    @contextmanager
    def above(self) -> Iterator[int]:
        descriptor = self._open(self._own[:-1], False) if self._own else no_follow.open_root(self.path.parent)
        with no_follow.closing(descriptor):
            yield descriptor

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the root's lock during the block, against every other replace and delete by threads and processes."""
        with (
            self.folder(TEMP_FOLDER, make=True) as temps,
            no_follow.closing(no_follow.open_lock(temps, "lock", f"{TEMP_FOLDER}/lock")) as lock,
        ):
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def is_behind_link(self, folder: str) -> bool:
        """Return True if the path to a folder ("" or ending in "/") leads through a symbolic link."""
        path = self._linkable
        return any((path := path / name).is_symlink() for name in (*self._own, *folder.split("/")[:-1]))

    def _open(self, names: Sequence[str], make: bool) -> int:
        if make and ("" not in self._durable or not self._linkable.is_dir()):
            _make_root(self._linkable)
            self._durable.add("")
        descriptor, path = no_follow.open_root(self._linkable), ""
        for name in names:
            above, path = descriptor, f"{path}/{name}" if path else name
            with no_follow.closing(above):
                descriptor = self._make_and_open(above, name, path) if make else no_follow.open_below(above, name, path)
        return descriptor

    def _make_and_open(self, above: int, name: str, path: str) -> int:
        try:
            descriptor, made = no_follow.open_below(above, name, path), False
        except FileNotFoundError:
            with suppress(FileExistsError):
                os.mkdir(name, dir_fd=above)
            descriptor, made = no_follow.open_below(above, name, path), True
        if made or path not in self._durable:
            with ExitStack() as stack:
                stack.callback(os.close, descriptor)
                no_follow.sync_folder(above)
                stack.pop_all()
            self._durable.add(path)
        return descriptor


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        # A file has the folder's name. `os_errors` would report EEXIST as "the file to create exists already".
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from error


def _make_root(root: Path) -> None:
    """Create the root folder and its missing parents, and sync them. Links in the path are followed."""
    missing = [folder for folder in (root, *root.parents) if not folder.is_dir()]
    for folder in reversed(missing or [root]):
        make_folder(folder)
        # This user may lack permission to open the folder above. Then that folder is not synced.
        with suppress(PermissionError), no_follow.closing(no_follow.open_root(folder.parent)) as parent:
            no_follow.sync_folder(parent)
