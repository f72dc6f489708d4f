"""Storage on a local or shared POSIX file system, and the local end of every adapter's transfers.

    <root>/a/b.sst            a file
    <root>/.tmp/<uuid>.part   being written, or left behind by a crash
    <root>/.tmp/room          room for a sweep of a full disk, in the root of a pipeline
    <root>/.tmp/lock          held (flock) while a file is replaced or deleted

A new file is written to `.tmp`, synced, hard-linked to its name (the link fails if the name is taken, which makes it
the one step that decides a race), and the folder is synced. So the file system must support hard links. The lock is
the root's: who replaces or deletes the same files must open the same root, not one above or below it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from stat import S_ISREG
from uuid import uuid4

import google_crc32c

from state_backend.adapters.work_folders import FULL_DISK, touched_s
from state_backend.ports.storage import TEMP_FOLDER, Storage, check_path, check_prefix
from state_backend.values.errors import (
    AlreadyExists,
    CorruptFile,
    NotFound,
    PermissionRefused,
    PreconditionFailed,
    StorageUnavailable,
    UnknownOutcome,
    UsageError,
)
from state_backend.values.handles import FileInfo, Handle

CHUNK_BYTES = 1 << 20

# What a sweep writes before it has deleted much: a record of 64 KiB at most, small files and folders of a block each, and one
# tombstone at a time.
_ROOM, _ROOM_BYTES = "room", 2 << 20

_ADVICE = {
    errno.ENOSPC: "free some space (a sweep needs none), or move the root to a larger disk",
    errno.EDQUOT: "free some space, or have the quota raised",
    errno.EACCES: "give this user read and write permission there",
    errno.EPERM: "give this user permission there; the file system must support hard links",
    errno.EOPNOTSUPP: "the file system must support hard links; use another one",
    errno.EXDEV: "keep the whole root on one file system",
    errno.EROFS: "mount it writable, or use another root",
    errno.ENOTDIR: "a part of the path is a file where a directory is expected; use another root, or move that file",
    errno.ENOENT: "something removed its directory meanwhile; check what else uses it",
}

# Of a file that a storage delivers: the disk is that of the host at work.
_HERE = {errno.ENOSPC: FULL_DISK, errno.EDQUOT: FULL_DISK}

# A network file system may have done what it failed to confirm.
_UNCONFIRMED = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT)


@contextmanager
def os_errors(doing: str, *, may_be_absent: bool = True, advice: Mapping[int, str] | None = None) -> Iterator[None]:
    """The one place that turns an OSError into an answer of the storage port. ``doing`` completes "can't ..." and names
    the file. ``advice``, by errno, is the message for a root.

    Raises: NotFound for a missing file that may be absent; StorageUnavailable for one that may not, since then its folder is gone.
    """
    try:
        yield
    except OSError as error:
        reason = f"can't {doing}: {os.strerror(error.errno) if error.errno else error}"
        if error.errno == errno.EEXIST:
            raise AlreadyExists(reason) from error
        if error.errno in (errno.ENOENT, errno.EISDIR) and may_be_absent:
            raise NotFound(reason) from error
        if error.errno == errno.ENAMETOOLONG:
            raise UsageError(f"{reason}; use a shorter name") from error
        what = {**_ADVICE, **(advice or {})}.get(error.errno or 0, "check the disk or the mount, then try again")
        refused = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
        raise (PermissionRefused if refused else StorageUnavailable)(f"{reason}; {what}") from error


def read_chunks(local: Path, doing: str) -> Iterator[bytes]:
    """The bytes of a file in pieces of at most `CHUNK_BYTES`. Errors as `os_errors`."""
    with os_errors(doing), local.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def verified(chunks: Iterable[bytes], handle: Handle, *, url: str) -> Iterator[bytes]:
    """The chunks. Raises: CorruptFile, behind the last chunk, if they were not what the handle says."""
    size_bytes = crc32c = 0
    for chunk in chunks:
        size_bytes += len(chunk)
        crc32c = google_crc32c.extend(crc32c, chunk)
        yield chunk
    if (size_bytes, crc32c) != (handle.size_bytes, handle.crc32c):
        raise CorruptFile(
            f"{handle.path!r} of {url} is damaged: expected {handle.size_bytes} bytes with crc32c "
            f"{handle.crc32c:08x}, found {size_bytes} bytes with crc32c {crc32c:08x}; restore an older "
            f"checkpoint, or put the file back from a copy"
        )


def write_verified(
    chunks: Iterable[bytes], handle: Handle, destination: Path, *, url: str, room_bytes: int = 0
) -> None:
    """Writes what a storage at ``url`` yields for a handle to a local path, or, if it is not what the handle says,
    nothing. ``room_bytes`` are allocated first: piece by piece takes a fifth longer.

    Raises: CorruptFile if it is not what the handle says.
    """
    temp = destination.with_name(f".{uuid4().hex}.part")
    with os_errors(f"download {handle.path!r} of {url} to {destination}", may_be_absent=False, advice=_HERE):
        _make_folder(destination.parent)
        try:
            with temp.open("xb") as file:
                if room_bytes:
                    with suppress(OSError, AttributeError):  # not on every system; a full disk is told by the write
                        os.posix_fallocate(file.fileno(), 0, room_bytes)
                for chunk in verified(chunks, handle, url=url):
                    file.write(chunk)
            temp.replace(destination)
        finally:
            with suppress(OSError):  # already renamed, or the disk fails: then that error is the one to tell
                temp.unlink()


class LocalStorage:
    """Files under an absolute directory, which the first write creates.

    What crashed writers left in `.tmp` is removed by the first write after ``leftover_min_age_s`` seconds without
    change; a file in the making changes all the time.
    """

    def __init__(self, root: Path, *, leftover_min_age_s: float = 86_400.0) -> None:
        if not root.is_absolute() or ".." in root.parts:
            raise UsageError(f"a local storage root must be an absolute path without '..'; got {str(root)!r}")
        self.url = f"file://{root}"
        self._root = root
        self._temp = root / TEMP_FOLDER
        self._leftover_min_age_s = leftover_min_age_s
        self._leftovers_removed = False
        self._durable: set[Path] = set()

    def read(self, path: str, *, offset: int = 0) -> bytes:
        """See `Storage.read`."""
        with os_errors(self._doing("read", path)), self._file(path).open("rb") as file:
            file.seek(offset)
            return file.read()

    def create(self, path: str, data: bytes) -> Handle:
        """See `Storage.create`."""
        return self._create(path, (data,))

    def replace(self, path: str, data: bytes, *, generation: int) -> Handle:
        """See `Storage.replace`."""
        target, doing = self._file(path), self._doing("replace", path)
        self._expect(path, generation)  # refuses early; what counts is the look under the lock
        with self._written(path, (data,), doing) as (temp, handle), self._locked():
            self._expect(path, generation)
            self._publish(lambda: temp.replace(target), target, doing)
        return handle

    def upload(self, path: str, local: Path) -> Handle:
        """See `Storage.upload`."""
        return self._create(path, read_chunks(local, f"read {local} to upload it to {self.url}"))

    def download(self, handle: Handle, destination: Path) -> None:
        """See `Storage.download`."""
        file, doing = self._file(handle.path), self._doing("download", handle.path)
        with os_errors(doing):
            room_bytes = file.stat().st_size  # not what the handle says, which may be anything
        write_verified(read_chunks(file, doing), handle, destination, url=self.url, room_bytes=room_bytes)

    def copy_from(self, source: Storage, handle: Handle, path: str) -> Handle:
        """See `Storage.copy_from`. A hard link within one file system, if the system allows it."""
        target, doing = self._file(path), self._doing(f"copy {handle.path!r} of {source.url} to", path)
        with os_errors(doing, may_be_absent=False):
            self._make_durable(target.parent)
            if not (isinstance(source, LocalStorage) and self._linked(source, handle, target, doing)):
                self._make_durable(self._temp)
                temp = self._temp / f"{uuid4().hex}.part"
                try:
                    source.download(handle, temp)
                    _sync(temp)
                    self._publish(lambda: target.hardlink_to(temp), target, doing)
                finally:
                    with suppress(OSError):
                        temp.unlink()
        return replace(handle, path=path)

    def _linked(self, source: LocalStorage, handle: Handle, target: Path, doing: str) -> bool:
        """Whether the file could be linked: not across file systems, nor where the system protects another user's files.
        A symbolic link would be linked itself, and what it points to may go."""
        file = source._file(handle.path)
        if file.is_symlink():
            return False
        for _ in verified(read_chunks(file, source._doing("read", handle.path)), handle, url=source.url):
            pass
        _sync(file)  # whoever copied the folder there may not have
        try:
            self._publish(lambda: target.hardlink_to(file), target, doing)
        except OSError as error:
            if error.errno in (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.EOPNOTSUPP):
                return False
            raise
        return True

    def stat(self, path: str) -> FileInfo | None:
        """See `Storage.stat`."""
        with os_errors(self._doing("stat", path)):
            try:
                found = self._file(path).stat()
            except FileNotFoundError:
                return None
        return _info(path, found) if S_ISREG(found.st_mode) else None

    def list(self, prefix: str) -> Iterator[FileInfo]:
        """See `Storage.list`."""
        folder, slash, name = check_prefix(prefix).rpartition("/")
        return self._walk(folder + slash, name)

    def delete(self, path: str, *, generation: int | None = None) -> bool:
        """See `Storage.delete`. Not synced: a file that a power loss brings back is an orphan for the sweeper. Empty
        directories stay, because removing one could race with a creator that has just found it."""
        if self.stat(path) is None:
            return False
        with os_errors(self._doing("delete", path)), self._locked():
            if (found := self.stat(path)) is None:
                return False
            if generation not in (None, found.generation):
                raise PreconditionFailed(
                    f"can't delete {path!r} of {self.url}: it was rewritten since it was looked at"
                )
            self._file(path).unlink()
        return True

    def keep_room(self) -> None:
        """See `KeepsRoom.keep_room`."""
        room = self._temp / _ROOM
        with suppress(OSError):
            if room.exists():
                return
            part = self._temp / f"{uuid4().hex}.part"
            try:
                with part.open("xb") as file:
                    file.write(os.urandom(_ROOM_BYTES))  # which no file system compresses, nor leaves out
                    os.fsync(file.fileno())
                part.replace(room)
            finally:
                part.unlink(missing_ok=True)

    def free_room(self) -> bool:
        """See `KeepsRoom.free_room`."""
        try:
            (self._temp / _ROOM).unlink()
        except OSError:
            return False
        return True

    def _file(self, path: str) -> Path:
        return self._root / check_path(path)

    def _doing(self, verb: str, path: str) -> str:
        return f"{verb} {path!r} of {self.url}"

    def _create(self, path: str, chunks: Iterable[bytes]) -> Handle:
        target, doing = self._file(path), self._doing("create", path)
        with self._written(path, chunks, doing) as (temp, handle):
            self._make_durable(target.parent)
            self._publish(lambda: target.hardlink_to(temp), target, doing)
        return handle

    @contextmanager
    def _written(self, path: str, chunks: Iterable[bytes], doing: str) -> Iterator[tuple[Path, Handle]]:
        """A synced temp file with its handle, gone when the block ends. Maps the errors of the block too."""
        with os_errors(doing, may_be_absent=False):
            self._make_durable(self._temp)
            self._remove_leftovers()
            temp = self._temp / f"{uuid4().hex}.part"
            try:
                size_bytes = crc32c = 0
                with temp.open("xb") as file:
                    for chunk in chunks:
                        file.write(chunk)
                        size_bytes += len(chunk)
                        crc32c = google_crc32c.extend(crc32c, chunk)
                    file.flush()
                    # File systems stamp by ticks of some ms, and reuse inodes at once: without a time of its own, a
                    # file that is deleted and written again within a tick could come back as the same generation.
                    # The time stays that of the file system, less a second at most: the clock of this host may be wrong.
                    stamped_ns = os.fstat(file.fileno()).st_mtime_ns - secrets.randbelow(1_000_000_000)
                    os.utime(file.fileno(), ns=(stamped_ns, stamped_ns))
                    os.fsync(file.fileno())
                yield temp, Handle(path=path, size_bytes=size_bytes, crc32c=crc32c)
            finally:
                with suppress(OSError):  # a leftover is invisible, and the outcome of the write is decided already
                    temp.unlink()

    def _publish(self, step: Callable[[], object], target: Path, doing: str) -> None:
        try:
            step()
        except OSError as error:
            if error.errno in _UNCONFIRMED:
                raise UnknownOutcome(f"can't tell whether this was done: {doing}: {error}") from error
            raise
        try:
            _sync_folder(target.parent)
        except OSError as error:
            raise UnknownOutcome(f"done, but it may not survive a crash: {doing}: {error}") from error

    def _expect(self, path: str, generation: int) -> None:
        if (found := self.stat(path)) is None:
            raise NotFound(f"can't {self._doing('replace', path)}: no such file")
        if found.generation != generation:
            raise PreconditionFailed(f"can't {self._doing('replace', path)}: it was rewritten since it was looked at")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Excludes every other replace and delete under this root, by threads and processes. The system frees the
        lock of a process that dies."""
        self._make_durable(self._temp)
        with (self._temp / "lock").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _make_durable(self, folder: Path) -> None:
        """Creates a directory with its parents such that it survives a crash. One that is found may have been made a
        moment ago by another process that has not synced it yet; so each is synced once per instance."""
        if folder in self._durable and folder.is_dir():
            return
        found = folder.is_dir()
        if not found or self._root in folder.parents:
            self._make_durable(folder.parent)
        if not found:
            _make_folder(folder)
        if not found or folder.is_relative_to(self._root):
            with suppress(PermissionError):  # the parent of the root may be closed to us
                _sync_folder(folder.parent)
        self._durable.add(folder)

    def _remove_leftovers(self) -> None:
        if self._leftovers_removed:
            return
        self._leftovers_removed = True
        with suppress(OSError):
            oldest_s = touched_s(self._temp) - self._leftover_min_age_s
            for temp in self._temp.glob("*.part"):
                with suppress(
                    OSError
                ):  # another cleaner was faster, or it is another user's: no reason to fail a write
                    if temp.stat().st_mtime < oldest_s:
                        temp.unlink()

    def _walk(self, folder: str, start: str) -> Iterator[FileInfo]:
        """Files below ``folder`` ("" or ending in "/") whose next segment begins with ``start``. Symbolic links are followed, but
        for those that lead nowhere, to themselves, or back to a directory that the walk came through."""
        with os_errors(self._doing("list", folder)):
            try:
                with os.scandir(self._root / folder) as entries:
                    # With its '/', a directory sorts among its siblings as the paths of its files do.
                    names = sorted(
                        f"{entry.name}/" if self._is_folder(folder, entry) else entry.name for entry in entries
                    )
            except FileNotFoundError:
                return
        for name in names:
            if not name.startswith(start) or name == f"{TEMP_FOLDER}/":
                continue
            if name.endswith("/"):
                yield from self._walk(folder + name, "")
                continue
            with os_errors(self._doing("list", folder + name)):
                try:
                    found = (self._root / folder / name).stat()
                except FileNotFoundError:
                    continue
                except OSError as error:
                    if error.errno == errno.ELOOP:
                        continue
                    raise
            if S_ISREG(found.st_mode):
                yield _info(folder + name, found)

    def _is_folder(self, folder: str, entry: os.DirEntry[str]) -> bool:
        """True for a directory that a walk may enter. A link to one above it would be entered again and again."""
        if not entry.is_symlink():
            return entry.is_dir()
        try:
            if not entry.is_dir():
                return False
        except OSError as error:
            if error.errno == errno.ELOOP:
                return False
            raise
        here, target = self._root / folder, entry.stat()
        return not any(os.path.samestat(target, above.stat()) for above in (here, *here.parents))


def _info(path: str, found: os.stat_result) -> FileInfo:
    # Only the file system sets the ctime, by its own clock. Anybody may set the mtime: a host whose clock is wrong, a copy of a
    # folder. A hard link to an old file has that file's mtime, and a sweep would take what a fork links now for a leftover. A chown
    # sets the ctime too, which delays a sweep.
    return FileInfo(
        path=path,
        size_bytes=found.st_size,
        generation=found.st_mtime_ns << 64 | found.st_ino,
        modified_ms=found.st_ctime_ns // 1_000_000,
        crc32c=None,
    )


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:  # a file; EEXIST would read as the answer to a create
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from error


def _sync(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems can't sync a directory, and need not. Source: restic, internal/backend/local.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(descriptor)
