"""The storage port: immutable files under one root, created at most once, and matched by generation when rewritten.

Every adapter gives these guarantees, and the commit protocol depends on them:

1. `create` and `upload` never overwrite. If several callers create a path at the same time, exactly one succeeds.
2. A file is visible whole or not at all. `read`, `stat` and `list` never show a file that a crash left half-written.
3. When a write returns, the file survives a crash of the machine, and every later `read` and `stat` sees the file.
   Every later `list` sees it too, except where `lists_late` is true: there a listing may be some seconds old.
4. `replace` and `delete` with a generation change a file only while it has that generation. Files with other bytes have
   other generations. A caller that rewrites a file to make it younger must change its bytes.
5. An error other than `UnknownOutcome` means that the call changed nothing. Only `DeletesMany.delete_many` may have
   deleted some files when it raises.
6. `download` yields exactly the bytes that its handle describes, or no file.

Several threads may call methods at the same time. Callers never use one path both as a file and as a folder: object
stores allow that, disks do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from state_backend.values.errors import UsageError
from state_backend.values.handles import TEMP_FOLDER, FileInfo, Handle, check_path

__all__ = [
    "TEMP_FOLDER",
    "DeletesMany",
    "KeepsRoom",
    "Storage",
    "TellsChecksums",
    "check_path",
    "check_prefix",
    "lists_late",
]


class Storage(Protocol):
    """Files under one root, each named by a path relative to the root.

    On a disk, `read`, `stat`, `list`, `download` and the source of `copy_from` follow symbolic links below the root.
    Every other method raises `BehindLink` (a `PermissionRefused`) if a folder in the path is a link, so that no method
    changes files outside the root.

    Every method may raise these errors:

    Raises:
        StorageUnavailable: The storage can't be reached or is full.
        PermissionRefused: The storage refuses permission or is read-only. A retry does not help.
        UsageError: `check_path` refuses the path; or the storage was opened with a bucket that does not exist or with
            wrong credentials.
    """

    @property
    def url(self) -> str:
        """The root's URL, for messages: `file:///...`, `gs://...`, `s3://...` or `memory://...`."""

    def read(self, path: str, *, offset: int = 0) -> bytes:
        """Return a file's bytes from `offset` on. For metadata only: state files may be too large for memory.

        Raises:
            NotFound: No file has this path.
        """

    def create(self, path: str, data: bytes) -> Handle:
        """Write a new file, which is durable when the call returns.

        Raises:
            AlreadyExists: A file has this path.
            UnknownOutcome: The storage did not report whether it wrote the file.
        """

    def replace(self, path: str, data: bytes, *, generation: int) -> Handle:
        """Rewrite a file if its generation is still the given one.

        Raises:
            NotFound: No file has this path.
            PreconditionFailed: The file has another generation.
            UnknownOutcome: The storage did not report whether it rewrote the file.
        """

    def upload(self, path: str, local: Path) -> Handle:
        """Stream a local file into a new file.

        Returns:
            A handle with the size and checksum of the bytes that were written.

        Raises:
            AlreadyExists: A file has this path.
            NotFound: The local file does not exist.
            UnknownOutcome: The storage did not report whether it wrote the file.
        """

    def download(self, handle: Handle, destination: Path) -> None:
        """Copy a file to a local path, replacing a local file there.

        The local file appears only after its size and crc32c were checked. Missing parent folders are created.
        This method does not sync the local file to disk, since local copies are only a cache.

        Raises:
            NotFound: No file has the handle's path.
            CorruptFile: Size or crc32c differ from the handle; the message names the expected and the actual values.
        """

    def copy_from(self, source: Storage, handle: Handle, path: str) -> Handle:
        """Copy a file of another storage into a new file of this storage.

        The copy is as cheap as the two storages allow: a hard link within one file system, a copy by the server within
        one object store. The new file does not depend on the source, which may be deleted afterwards.

        Raises:
            AlreadyExists: A file of this storage has the path.
            NotFound: The source has no file at the handle's path.
            CorruptFile: The source file differs from the handle; then no file is created.
            UnknownOutcome: The storage did not report whether it wrote the file.
        """

    def stat(self, path: str) -> FileInfo | None:
        """Return the file's size, generation and modification time, or None if no file has this path."""

    def list(self, prefix: str) -> Iterator[FileInfo]:
        """Yield all files whose path starts with the prefix, sorted by path.

        A storage may compare paths folder by folder: `b/1` then comes before `b-c/1`. In both orders the files of one
        folder are sorted by name.

        The prefix is a plain string, such as `"checkpoints/"`, `"shared/3f"` or `""`. Files that are created or deleted
        during the listing may be missing from it or present in it.
        """

    def delete(self, path: str, *, generation: int | None = None) -> bool:
        """Delete one file, never a folder, and return False if no file has this path.

        Raises:
            PreconditionFailed: The file has another generation than the given one.
            UnknownOutcome: The storage did not report whether it deleted the file.
        """


@runtime_checkable
class KeepsRoom(Protocol):
    """A storage that can be full. It reserves some space for a sweep, which must write before it can delete files."""

    def keep_room(self) -> None:
        """Reserve a fixed amount of space for the next sweep, unless it is reserved. Never raise, even if full."""

    def free_room(self) -> bool:
        """Release the reserved space, and return False if no space was reserved. Any writer may then use the space."""


@runtime_checkable
class DeletesMany(Protocol):
    """A storage that deletes many files with one request."""

    def delete_many(self, paths: Sequence[str]) -> int:
        """Delete files, and return how many of them the storage reported as present.

        Callers pass only paths that are never written again. The storage deletes in batches of hundreds, in the order
        of `paths`: a file of an earlier batch is deleted before any file of a later batch.

        The method raises the errors of `Storage.delete`. Some of the files may be deleted then.
        """


@runtime_checkable
class TellsChecksums(Protocol):
    """A storage that keeps checksums, but leaves them out of its listings."""

    def checksum(self, path: str) -> int | None:
        """Return the crc32c of a file by one request, without its bytes; None if no file or no checksum exists."""


def lists_late(storage: Storage) -> bool:
    """Return True if a listing of this storage may miss files that were created some seconds ago, as on a network disk.

    A storage whose listings are always current declares `lists_what_is_there = True`. All other storages count as late.
    """
    return not getattr(storage, "lists_what_is_there", False)


def check_prefix(prefix: str) -> str:
    """Return the prefix if `check_path` accepts its folders and its last part is printable without a backslash.

    The part after the last `/` is the beginning of a file name, and may be empty.

    Raises:
        UsageError: The prefix is no beginning of a relative path.
    """
    folder, slash, name = prefix.rpartition("/")
    if slash:
        check_path(folder)
    if not name.isprintable() or "\\" in name:
        raise UsageError(f"not a storage prefix: {prefix!r}; expected the beginning of a relative path")
    return prefix
