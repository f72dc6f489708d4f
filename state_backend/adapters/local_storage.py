"""Storage on a local or shared POSIX file system, and file transfers that other adapters use too.

    <root>/a/b.sst            a file
    <root>/.tmp/<uuid>.part   a file that is being written, or that a crash left behind
    <root>/.tmp/room          2 MiB that a sweep frees if the disk is full; only in the root of a pipeline
    <root>/.tmp/lock          locked (flock) while a file is replaced or deleted

A new file is created in three steps:
1. Write the file to `.tmp` and sync it.
2. Hard-link it to its name. The link fails if the name is taken, so this step decides which of several writers wins.
   The file system must support hard links.
3. Sync the folder.

The lock belongs to the root. Processes that replace or delete the same files must open the same root, not a folder
above or below it.

Reads follow links below the root. Writes and deletions raise `BehindLink` where a link stands in the place of a folder
(`disk_root`). A link in the place of a file is replaced or deleted itself.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from stat import S_ISLNK, S_ISREG
from typing import BinaryIO
from uuid import uuid4

import google_crc32c

from state_backend.adapters import no_follow
from state_backend.adapters.disk_root import DiskRoot, make_folder
from state_backend.adapters.no_follow import LinkInPath
from state_backend.adapters.work_folders import FULL_DISK
from state_backend.ports.storage import TEMP_FOLDER, Storage, check_path, check_prefix
from state_backend.values.errors import (
    AlreadyExists,
    BehindLink,
    CairnError,
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

# Name and size in bytes of the file that reserves disk space for a sweep. A sweep of a full disk deletes this file
# first, because it must write before it can delete others: a record of at most 64 KiB, small files and folders of one
# block each, and one tombstone at a time. 2 MiB are enough for these.
_ROOM, _ROOM_BYTES = "room", 2 << 20

_ADVICE = {
    errno.ENOSPC: "free some space (`cairn sweep` works on a full disk), or move the root to a larger disk",
    errno.EDQUOT: "free some space, or raise the quota",
    errno.EACCES: "give this user read and write permission there",
    errno.EPERM: "give this user permission there; the file system must support hard links",
    errno.EOPNOTSUPP: "the file system must support hard links; use another one",
    errno.EXDEV: "keep the whole root on one file system",
    errno.EROFS: "mount it writable, or use another root",
    errno.ENOTDIR: "a part of the path is a file where a folder is expected; use another root, or move that file",
    errno.ENOENT: "another program deleted its folder; check what else uses it",
}

# Advice for downloads: the full disk is that of this host, not the storage.
_HERE = {errno.ENOSPC: FULL_DISK, errno.EDQUOT: FULL_DISK}

# Errors after which `copy_from` copies a file, because the system refuses the hard link.
_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.EOPNOTSUPP, errno.ELOOP)

# Errors after which a network file system may still have done the operation. So `_publish` raises `UnknownOutcome`.
_UNCONFIRMED = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT)


@contextmanager
def os_errors(doing: str, *, may_be_absent: bool = True, advice: Mapping[int, str] | None = None) -> Iterator[None]:
    """Turn an OSError in the block into an error of the storage port.

    A missing file or folder raises `NotFound`; if `may_be_absent` is false, it raises `StorageUnavailable`. `doing` and
    `advice`, by error number, are parts of the message.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, LinkInPath):
            raise BehindLink(
                f"can't {doing}: {error.link!r} is a symbolic link, and Cairn changes no files behind a link below a root\n"
                "Replace the link by the folder that it leads to, or delete the link"
            ) from error
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


def mismatch(found: object, doing: str) -> CairnError:
    if not found:
        return NotFound(f"can't {doing}: the file does not exist")
    return PreconditionFailed(f"can't {doing}: another process has rewritten the file meanwhile")


def read_chunks(local: Path, doing: str) -> Iterator[bytes]:
    """Yield the bytes of a local file in pieces of at most `CHUNK_BYTES`."""
    with os_errors(doing), local.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def verify_chunks(chunks: Iterable[bytes], handle: Handle, *, url: str) -> Iterator[bytes]:
    """Yield the chunks. After the last one, raise `CorruptFile` if their size or checksum differs from the handle."""
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
    """Write bytes to `destination`, which appears only if they match `handle`. `room_bytes`: disk space to allocate."""
    temp = destination.with_name(f".{uuid4().hex}.part")
    with os_errors(f"download {handle.path!r} of {url} to {destination}", may_be_absent=False, advice=_HERE):
        make_folder(destination.parent)
        try:
            with temp.open("xb") as file:
                if room_bytes:
                    # Not every system can allocate. On a full disk, the write below raises.
                    with suppress(OSError, AttributeError):
                        os.posix_fallocate(file.fileno(), 0, room_bytes)
                for chunk in verify_chunks(chunks, handle, url=url):
                    file.write(chunk)
            temp.replace(destination)
        finally:
            with suppress(OSError):  # After success the file has another name. After a failure the first error counts.
                temp.unlink()


def open_url(url: str, *, credentials: Mapping[str, str] | None = None) -> LocalStorage:
    """Open `file:///absolute/path` or an absolute path. The path is taken as it is, without %-decoding."""
    root = Path(url.removeprefix("file://"))
    storage = LocalStorage(root)
    with suppress(OSError):  # The first read or write reports that the path can't be read.
        there = next((path for path in (root, *root.parents) if os.path.lexists(path)), root)
        if there.exists() and not there.is_dir():
            raise UsageError(f"{there} is a file, but {storage.url} must be a folder\nGive the URL of the folder")
    return storage


class LocalStorage:
    """Storage in an absolute directory, which the first write creates.

    The first write also deletes old files that crashed writers left in `.tmp`. A live writer writes to its file all the
    time, so its file stays.
    """

    def __init__(self, root: Path, *, leftover_min_age_s: float = 86_400.0) -> None:
        if not root.is_absolute() or ".." in root.parts:
            raise UsageError(f"a local storage root must be an absolute path without '..'; got {str(root)!r}")
        self.url = f"file://{root}"
        self._root = DiskRoot(root)
        self._leftover_min_age_s = leftover_min_age_s
        self._leftovers_removed = False

    def read(self, path: str, *, offset: int = 0) -> bytes:
        with os_errors(self._doing("read", path)), self._root.file(path).open("rb") as file:
            file.seek(offset)
            return file.read()

    def create(self, path: str, data: bytes) -> Handle:
        return self._create(path, (data,))

    def replace(self, path: str, data: bytes, *, generation: int) -> Handle:
        folder, _, name = check_path(path).rpartition("/")
        doing = self._doing("replace", path)
        self._expect(path, generation)  # Fail before the bytes are written. The check under the lock decides.
        with self._written(path, (data,), doing) as (temps, temp, handle), self._root.lock():
            self._expect(path, generation)
            with self._root.folder(folder) as into:
                _publish(lambda: os.rename(temp, name, src_dir_fd=temps, dst_dir_fd=into), into, doing)
        return handle

    def upload(self, path: str, local: Path) -> Handle:
        return self._create(path, read_chunks(local, f"read {local} to upload it to {self.url}"))

    def download(self, handle: Handle, destination: Path) -> None:
        file, doing = self._root.file(handle.path), self._doing("download", handle.path)
        with os_errors(doing):
            room_bytes = file.stat().st_size  # the size on disk: a damaged handle may claim any size
        write_verified(read_chunks(file, doing), handle, destination, url=self.url, room_bytes=room_bytes)

    def copy_from(self, source: Storage, handle: Handle, path: str) -> Handle:
        """Make a hard link if both files are on one file system and the system allows it."""
        folder, _, name = check_path(path).rpartition("/")
        doing = self._doing(f"copy {handle.path!r} of {source.url} to", path)
        with os_errors(doing, may_be_absent=False), self._root.folder(folder, make=True) as into:
            if not (isinstance(source, LocalStorage) and self._link_file(source, handle, into, name, doing)):
                with self._root.folder(TEMP_FOLDER, make=True) as temps, _temp_name(temps) as temp:
                    local = _path_of(temps, self._root.path / TEMP_FOLDER) / temp
                    source.download(handle, local)
                    _sync(local)
                    _publish(lambda: _link(temps, temp, into, name), into, doing)
        return replace(handle, path=path)

    def _link_file(self, source: LocalStorage, handle: Handle, into: int, name: str, doing: str) -> bool:
        file = source._root.file(handle.path)
        for _ in verify_chunks(read_chunks(file, source._doing("read", handle.path)), handle, url=source.url):
            pass
        _sync(file)  # The file may have been copied there without a sync.
        folder, _, own = handle.path.rpartition("/")
        try:
            with source._root.folder(folder) as there:
                if S_ISLNK(os.stat(own, dir_fd=there, follow_symlinks=False).st_mode):
                    return False
                _publish(lambda: _link(there, own, into, name), into, doing)
        except OSError as error:
            if error.errno in _NO_LINK:
                return False
            raise
        return True

    def stat(self, path: str) -> FileInfo | None:
        with os_errors(self._doing("stat", path)):
            try:
                found = self._root.file(path).stat()
            except FileNotFoundError:
                return None
        return _info(path, found) if S_ISREG(found.st_mode) else None

    def folders(self, path: str) -> tuple[str, ...]:
        """Return the sorted names of the folders directly in a folder. Symbolic links are left out."""
        with os_errors(self._doing("list", path)):
            try:
                with (
                    self._root.folder(check_path(path) if path else "") as descriptor,
                    os.scandir(descriptor) as entries,
                ):
                    return tuple(sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False)))
            except (FileNotFoundError, NotADirectoryError):
                return ()

    def list(self, prefix: str) -> Iterator[FileInfo]:
        folder, slash, name = check_prefix(prefix).rpartition("/")
        return _walk(self._root, folder + slash, name, None)

    def list_own(self) -> Iterator[FileInfo]:
        """Return all files, sorted by path; of a folder behind a symbolic link, only the files directly in it."""
        return _walk(self._root, "", "", None, far=False)

    def delete(self, path: str, *, generation: int | None = None) -> bool:
        """Delete one file without a sync: if a power loss brings it back, a sweep deletes it.

        Empty folders stay, because another process may be about to create a file there.
        """
        if self.stat(path) is None:
            return False
        folder, _, name = path.rpartition("/")
        with os_errors(self._doing("delete", path)), ExitStack() as stack:
            stack.enter_context(self._root.lock())
            try:
                above = stack.enter_context(self._root.folder(folder))
                found = os.stat(name, dir_fd=above)
            except FileNotFoundError:
                return False
            if not S_ISREG(found.st_mode):
                return False
            if generation not in (None, _info(path, found).generation):
                raise mismatch(found, self._doing("delete", path))
            os.unlink(name, dir_fd=above)
        return True

    def remove_all(self) -> None:
        """Delete the root folder with all files; if it is a symbolic link, only the link. Skip undeletable files."""
        with os_errors(f"remove {self.url}"), suppress(FileNotFoundError), self._root.above() as above:
            no_follow.remove_tree(above, self._root.path.name)

    def remove_empty(self, up_to: LocalStorage) -> None:
        """If no file exists below the root, delete it, and then the empty folders above, up to the root of `up_to`."""
        if next(iter(self.list("")), None) is not None:
            return
        with suppress(OSError):
            with suppress(FileNotFoundError), self._root.folder(TEMP_FOLDER) as temps:
                for name in no_follow.names_in(temps):
                    os.unlink(name, dir_fd=temps)
            with self._root.above() as above:
                no_follow.remove_empty_folders(above, self._root.path.name)
            folder = self._root.path.parent
            while folder != up_to._root.path:
                with DiskRoot(folder).above() as above:
                    os.rmdir(folder.name, dir_fd=above)
                folder = folder.parent

    def keep_room(self) -> None:
        with suppress(OSError), self._root.folder(TEMP_FOLDER) as temps:
            if _ROOM in no_follow.names_in(temps):
                return
            with _temp_name(temps) as part:
                with _new_file(temps, part) as file:
                    # The bytes are random, because a file system might compress or skip equal bytes and reserve less.
                    file.write(os.urandom(_ROOM_BYTES))
                    os.fsync(file.fileno())
                os.rename(part, _ROOM, src_dir_fd=temps, dst_dir_fd=temps)

    def free_room(self) -> bool:
        try:
            with self._root.folder(TEMP_FOLDER) as temps:
                os.unlink(_ROOM, dir_fd=temps)
        except OSError:
            return False
        return True

    def _doing(self, verb: str, path: str) -> str:
        return f"{verb} {path!r} of {self.url}"

    def _create(self, path: str, chunks: Iterable[bytes]) -> Handle:
        folder, _, name = check_path(path).rpartition("/")
        doing = self._doing("create", path)
        with self._written(path, chunks, doing) as (temps, temp, handle), self._root.folder(folder, make=True) as into:
            _publish(lambda: _link(temps, temp, into, name), into, doing)
        return handle

    @contextmanager
    def _written(self, path: str, chunks: Iterable[bytes], doing: str) -> Iterator[tuple[int, str, Handle]]:
        """Write and sync a temp file. Yield (its folder's descriptor, its name, the handle for `path`) for a rename."""
        with os_errors(doing, may_be_absent=False), self._root.folder(TEMP_FOLDER, make=True) as temps:
            if not self._leftovers_removed:
                self._leftovers_removed = True
                _remove_leftovers(temps, self._leftover_min_age_s)
            with _temp_name(temps) as temp:
                size_bytes = crc32c = 0
                with _new_file(temps, temp) as file:
                    for chunk in chunks:
                        file.write(chunk)
                        size_bytes += len(chunk)
                        crc32c = google_crc32c.extend(crc32c, chunk)
                    file.flush()
                    # File systems set the mtime in ticks of some milliseconds, and reuse inodes at once. A file that is
                    # deleted and written again within a tick could get the same generation. So each file gets an mtime
                    # of its own: the file system's time less a random part of a second. The clock of this host is not
                    # used, because it may be wrong.
                    stamped_ns = os.fstat(file.fileno()).st_mtime_ns - secrets.randbelow(1_000_000_000)
                    os.utime(file.fileno(), ns=(stamped_ns, stamped_ns))
                    os.fsync(file.fileno())
                yield temps, temp, Handle(path=path, size_bytes=size_bytes, crc32c=crc32c)

    def _expect(self, path: str, generation: int) -> None:
        found = self.stat(path)
        if found is None or found.generation != generation:
            raise mismatch(found, self._doing("replace", path))


@contextmanager
def _temp_name(temps: int) -> Iterator[str]:
    name = f"{uuid4().hex}.part"
    try:
        yield name
    finally:
        # The write has already succeeded or failed. If the temp file stays, a later writer deletes it.
        with suppress(OSError):
            os.unlink(name, dir_fd=temps)


def _publish(step: Callable[[], object], folder: int, doing: str) -> None:
    """Call `step`, which makes a file visible, and sync its folder. In doubt about success, raise `UnknownOutcome`."""
    try:
        step()
    except OSError as error:
        if error.errno in _UNCONFIRMED:
            raise UnknownOutcome(
                f"can't tell whether this was done: {doing}: {error}; check the file before you try again"
            ) from error
        raise
    try:
        no_follow.sync_folder(folder)
    except OSError as error:
        raise UnknownOutcome(f"done, but a crash of the machine may undo it: {doing}: {error}") from error


def _remove_leftovers(temps: int, min_age_s: float) -> None:
    with suppress(OSError):
        os.utime(temps)
        oldest_s = os.fstat(temps).st_mtime - min_age_s
        for name in no_follow.names_in(temps):
            # Another process may have deleted the file, or another user may own it.
            with suppress(OSError):
                found = os.stat(name, dir_fd=temps, follow_symlinks=False)
                if name.endswith(".part") and found.st_mtime < oldest_s:
                    os.unlink(name, dir_fd=temps)


def _walk(root: DiskRoot, folder: str, start: str, behind_link: bool | None, *, far: bool = True) -> Iterator[FileInfo]:
    """Yield the files below `folder`, sorted by path: only those whose names in `folder` begin with `start`.

    `behind_link`: True if a symbolic link leads to `folder`; None: find out. `far`: enter subfolders behind a link too.

    Symbolic links are followed, except links without a target, links to themselves, and links to a folder above.
    """
    here = root.path / folder
    with os_errors(f"list {folder!r} of file://{root.path}"):
        try:
            with os.scandir(here) as entries:
                # A folder's name gets a '/', so that it sorts among its siblings as the paths of its files do.
                names = sorted(
                    (f"{entry.name}/" if _is_folder(here, entry) else entry.name, entry.is_symlink())
                    for entry in entries
                )
        except FileNotFoundError:
            return
    if behind_link is None:
        behind_link = root.is_behind_link(folder)
    for name, is_link in names:
        if not name.startswith(start) or name == f"{TEMP_FOLDER}/":
            continue
        if name.endswith("/"):
            if far or not behind_link:
                yield from _walk(root, folder + name, "", behind_link or is_link, far=far)
            continue
        with os_errors(f"list {folder + name!r} of file://{root.path}"):
            try:
                found = (here / name).stat()
            except FileNotFoundError:
                continue
            except OSError as error:
                if error.errno == errno.ELOOP:
                    continue
                raise
        if S_ISREG(found.st_mode):
            yield _info(folder + name, found, behind_link)


def _is_folder(here: Path, entry: os.DirEntry[str]) -> bool:
    """Return True if a listing may enter `entry`: a folder, but no link to a folder above (an endless listing)."""
    if not entry.is_symlink():
        return entry.is_dir()
    try:
        if not entry.is_dir():
            return False
    except OSError as error:
        if error.errno == errno.ELOOP:
            return False
        raise
    target = entry.stat()
    return not any(os.path.samestat(target, above.stat()) for above in (here, *here.parents))


def _info(path: str, found: os.stat_result, behind_link: bool = False) -> FileInfo:
    # The age of a file is its ctime, because only the file system sets the ctime, by its own clock. The mtime can be
    # wrong: users, copies, and hosts with a wrong clock set it. A hard link to an old file has the old mtime, so a
    # sweep would delete a file that a fork has just linked. A chown sets the ctime too, which only delays a sweep.
    return FileInfo(
        path=path,
        size_bytes=found.st_size,
        generation=found.st_mtime_ns << 64 | found.st_ino,
        modified_ms=found.st_ctime_ns // 1_000_000,
        crc32c=None,
        behind_link=behind_link,
    )


def _sync(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())


def _new_file(folder: int, name: str) -> BinaryIO:
    return os.fdopen(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=folder), "wb")


def _link(from_: int, name: str, to: int, new_name: str) -> None:
    os.link(name, new_name, src_dir_fd=from_, dst_dir_fd=to, follow_symlinks=False)


def _path_of(descriptor: int, folder: Path) -> Path:
    """Return a path that leads to an open folder even after a rename."""
    path = Path(f"/proc/self/fd/{descriptor}")
    return path if path.exists() else folder
