"""The storage port: immutable files under one root, created at most once, and matched by generation when rewritten.

What every adapter guarantees, and what the commit protocol rests on:
1. `create` and `upload` never overwrite. Of any number of concurrent creators of a path exactly one succeeds.
2. A file is visible whole or not at all. What a crash leaves half-written never shows in `read`, `stat` or `list`.
3. When a write returns, the file survives a crash of the machine, and every later `read` and `stat` sees it. So does every later
   `list`, except where `lists_late` is true: there a list may be some seconds old.
4. `replace` and `delete` with a generation act on exactly the bytes that the caller saw, or not at all.
5. An error other than UnknownOutcome means that the call changed nothing.
6. `download` yields exactly the bytes of its handle, or nothing.

Methods may be called from several threads at once. A path is never used both as a file and as a folder of other files:
object stores allow it, disks do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from state_backend.values.errors import UsageError
from state_backend.values.handles import TEMP_FOLDER, FileInfo, Handle, check_path

__all__ = ["TEMP_FOLDER", "DeletesMany", "KeepsRoom", "Storage", "check_path", "check_prefix", "lists_late"]


class Storage(Protocol):
    """Files under one root. Every path is relative, passes `check_path`, and raises UsageError if it does not.

    On a disk, `read`, `stat`, `list`, `download` and the source of `copy_from` follow symbolic links below the root. Every other
    method raises BehindLink (a PermissionRefused) where a link stands in the place of a folder: nothing outside the root is changed.

    Any method raises StorageUnavailable if the storage can't be reached or is full, PermissionRefused (a UsageError: only a
    person can mend it) if it refuses permission, or if the storage is read-only. UsageError if what it was opened with is wrong: a bucket that does not exist, credentials that nobody accepts.
    """

    @property
    def url(self) -> str:
        """The root, for messages: ``file:///...``, ``gs://...``, ``memory://...``."""

    def read(self, path: str, *, offset: int = 0) -> bytes:
        """The whole file, or what lies from ``offset`` bytes on, if it has more; for metadata, not for state. Raises: NotFound."""

    def create(self, path: str, data: bytes) -> Handle:
        """Writes a new file, durable when it returns. Raises: AlreadyExists; UnknownOutcome."""

    def replace(self, path: str, data: bytes, *, generation: int) -> Handle:
        """Rewrites a file whose generation is still the given one. Raises: NotFound; PreconditionFailed; UnknownOutcome."""

    def upload(self, path: str, local: Path) -> Handle:
        """Writes a new file from a local one, streaming; the handle tells the bytes that were written.

        Raises: AlreadyExists; UnknownOutcome; NotFound if the local file is absent."""

    def download(self, handle: Handle, destination: Path) -> None:
        """Copies a file to a local path, which appears only when size and crc32c were found right, and replaces what
        was there. Missing parent folders are created. Not synced to disk: a local copy is a cache.

        Raises: NotFound; CorruptFile, naming what was expected and found."""

    def copy_from(self, source: Storage, handle: Handle, path: str) -> Handle:
        """Makes a file of another storage a new file of this one, as cheaply as the two allow: a hard link within one file
        system, a copy by the server within one object store. The source may be deleted afterwards.

        Raises: as `upload`; NotFound if the source lacks the file; CorruptFile if it is not what the handle says, and then
        nothing is made."""

    def stat(self, path: str) -> FileInfo | None:
        """The file, or None if it is absent."""

    def list(self, prefix: str) -> Iterator[FileInfo]:
        """All files whose path starts with the prefix, a plain string (``"checkpoints/"``, ``"shared/3f"``, ``""``),
        sorted by path. Files that are written or deleted meanwhile may be in it or not."""

    def delete(self, path: str, *, generation: int | None = None) -> bool:
        """Removes one file, never a folder; False if it is absent.

        Raises: PreconditionFailed on another generation; UnknownOutcome."""


@runtime_checkable
class KeepsRoom(Protocol):
    """A storage that can be full, and keeps room for what a sweep has to write before it may delete anything."""

    def keep_room(self) -> None:
        """Takes the room, unless it is taken. Where there is none left, nothing happens. Never raises."""

    def free_room(self) -> bool:
        """Gives the room to whoever writes next. False if none was kept."""


@runtime_checkable
class DeletesMany(Protocol):
    """A storage that removes many files by one request."""

    def delete_many(self, paths: Sequence[str]) -> int:
        """Removes files whose names nobody writes again; how many of them the storage said were there. What comes first in ``paths`` is
        gone no later than what comes after, by hundreds.

        Raises: as `Storage.delete`; any of the files may be gone then."""


def lists_late(storage: Storage) -> bool:
    """True if a listing of this storage may miss files that were created some seconds ago, as on a network disk.

    A storage whose listings are always current declares ``lists_what_is_there = True``. All other storages count as late.
    """
    return not getattr(storage, "lists_what_is_there", False)


def check_prefix(prefix: str) -> str:
    """The prefix, if `check_path` allows its folders; what follows the last ``/`` is the beginning of a name."""
    folder, slash, name = prefix.rpartition("/")
    if slash:
        check_path(folder)
    if not name.isprintable() or "\\" in name:
        raise UsageError(f"not a storage prefix: {prefix!r}; expected the beginning of a relative path")
    return prefix
