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

The root may be a symbolic link. Reads follow links below the root. Writes and deletions raise `BehindLink` where a link
stands in the place of a folder (`no_follow`). A link in the place of a file is replaced or deleted itself.

A root inside the folder of trials (`.trials`) has a stricter rule for its own path: writes and deletions follow links
only in the part of the path above `.trials`. Cairn made `.trials` and everything below it, and makes no links there. So
a link there was made by another program, and writes and deletions raise `BehindLink`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from stat import S_ISLNK, S_ISREG
from typing import BinaryIO
from uuid import uuid4

import google_crc32c

from state_backend.adapters import no_follow
from state_backend.adapters.no_follow import LinkInPath
from state_backend.adapters.work_folders import FULL_DISK
from state_backend.formats.paths import TRIALS
from state_backend.ports.storage import TEMP_FOLDER, Storage, check_path, check_prefix
from state_backend.values.errors import (
    AlreadyExists,
    BehindLink,
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

    `may_be_absent`: A missing file raises `NotFound`. False: it raises `StorageUnavailable`, because the file's
    folder was deleted.
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


def read_chunks(local: Path, doing: str) -> Iterator[bytes]:
    """Yield the bytes of a local file in pieces of at most `CHUNK_BYTES`."""
    with os_errors(doing), local.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def verify_chunks(chunks: Iterable[bytes], handle: Handle, *, url: str) -> Iterator[bytes]:
    """Yield the chunks, and compare their size and checksum with a handle after the last one."""
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
    """Write the bytes of a file to a local path. The path appears only if the bytes match the handle."""
    temp = destination.with_name(f".{uuid4().hex}.part")
    with os_errors(f"download {handle.path!r} of {url} to {destination}", may_be_absent=False, advice=_HERE):
        _make_folder(destination.parent)
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

    The first write of an instance also deletes files that crashed writers left in `.tmp`: those that were last written
    more than `leftover_min_age_s` seconds ago. A live writer writes to its file all the time, so its file stays.
    """

    def __init__(self, root: Path, *, leftover_min_age_s: float = 86_400.0) -> None:
        if not root.is_absolute() or ".." in root.parts:
            raise UsageError(f"a local storage root must be an absolute path without '..'; got {str(root)!r}")
        self.url = f"file://{root}"
        self._root = root
        # Cairn made every folder below .trials, and makes no links there. So links are followed only up to the folder
        # above .trials.
        parts = root.parts.index(TRIALS) if TRIALS in root.parts else len(root.parts)
        self._linkable, self._own = Path(*root.parts[:parts]), root.parts[parts:]
        self._leftover_min_age_s = leftover_min_age_s
        self._leftovers_removed = False
        self._durable: set[str] = set()

    def read(self, path: str, *, offset: int = 0) -> bytes:
        """Return the bytes of a file from `offset` on, as `Storage.read` specifies."""
        with os_errors(self._doing("read", path)), self._file(path).open("rb") as file:
            file.seek(offset)
            return file.read()

    def create(self, path: str, data: bytes) -> Handle:
        """Write a new file, as `Storage.create` specifies."""
        return self._create(path, (data,))

    def replace(self, path: str, data: bytes, *, generation: int) -> Handle:
        """Rewrite a file that still has the given generation, as `Storage.replace` specifies."""
        folder, _, name = check_path(path).rpartition("/")
        doing = self._doing("replace", path)
        self._expect(path, generation)  # Fail before the bytes are written. The check under the lock decides.
        with self._written(path, (data,), doing) as (temps, temp, handle), self._lock():
            self._expect(path, generation)
            with self._folder(folder) as into:
                self._publish(lambda: os.rename(temp, name, src_dir_fd=temps, dst_dir_fd=into), into, doing)
        return handle

    def upload(self, path: str, local: Path) -> Handle:
        """Write a new file from a local file, as `Storage.upload` specifies."""
        return self._create(path, read_chunks(local, f"read {local} to upload it to {self.url}"))

    def download(self, handle: Handle, destination: Path) -> None:
        """Copy a file to a local path and check its bytes, as `Storage.download` specifies."""
        file, doing = self._file(handle.path), self._doing("download", handle.path)
        with os_errors(doing):
            room_bytes = file.stat().st_size  # the size on disk: a damaged handle may claim any size
        write_verified(read_chunks(file, doing), handle, destination, url=self.url, room_bytes=room_bytes)

    def copy_from(self, source: Storage, handle: Handle, path: str) -> Handle:
        """Copy a file of another storage to a new file, as `Storage.copy_from` specifies.

        Makes a hard link if both files are on one file system and the system allows it.
        """
        folder, _, name = check_path(path).rpartition("/")
        doing = self._doing(f"copy {handle.path!r} of {source.url} to", path)
        with os_errors(doing, may_be_absent=False), self._folder(folder, make=True) as into:
            if not (isinstance(source, LocalStorage) and self._link_file(source, handle, into, name, doing)):
                with self._folder(TEMP_FOLDER, make=True) as temps:
                    temp = f"{uuid4().hex}.part"
                    local = _path_of(temps, self._root / TEMP_FOLDER) / temp
                    try:
                        source.download(handle, local)
                        _sync(local)
                        self._publish(lambda: _link(temps, temp, into, name), into, doing)
                    finally:
                        with suppress(OSError):
                            os.unlink(temp, dir_fd=temps)
        return replace(handle, path=path)

    def _link_file(self, source: LocalStorage, handle: Handle, into: int, name: str, doing: str) -> bool:
        """Hard-link a file of another root to a new name in this root."""
        file = source._file(handle.path)
        for _ in verify_chunks(read_chunks(file, source._doing("read", handle.path)), handle, url=source.url):
            pass
        _sync(file)  # The file may have been copied there without a sync.
        folder, _, own = handle.path.rpartition("/")
        try:
            with source._folder(folder) as there:
                if S_ISLNK(os.stat(own, dir_fd=there, follow_symlinks=False).st_mode):
                    return False
                self._publish(lambda: _link(there, own, into, name), into, doing)
        except OSError as error:
            if error.errno in _NO_LINK:
                return False
            raise
        return True

    def stat(self, path: str) -> FileInfo | None:
        """Return the metadata of a file, or None if it is absent, as `Storage.stat` specifies."""
        with os_errors(self._doing("stat", path)):
            try:
                found = self._file(path).stat()
            except FileNotFoundError:
                return None
        return _info(path, found) if S_ISREG(found.st_mode) else None

    def folders(self, path: str) -> tuple[str, ...]:
        """Return the sorted names of the folders in a folder, without symbolic links. The path "" is the storage
        itself."""
        with os_errors(self._doing("list", path)):
            try:
                with self._folder(check_path(path) if path else "") as descriptor, os.scandir(descriptor) as entries:
                    return tuple(sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False)))
            except (FileNotFoundError, NotADirectoryError):
                return ()

    def list(self, prefix: str) -> Iterator[FileInfo]:
        """Return the files whose path begins with a prefix, sorted by path, as `Storage.list` specifies."""
        folder, slash, name = check_prefix(prefix).rpartition("/")
        return self._walk(folder + slash, name, None)

    def list_own(self) -> Iterator[FileInfo]:
        """Return all files, sorted by path; of a folder behind a symbolic link, only the files directly in it."""
        return self._walk("", "", None, far=False)

    def delete(self, path: str, *, generation: int | None = None) -> bool:
        """Delete one file; return False if it is absent. See `Storage.delete`.

        The deletion is not synced. If a power loss brings the file back, a sweep deletes it. Empty folders stay,
        because another process may be about to create a file there.
        """
        if self.stat(path) is None:
            return False
        folder, _, name = path.rpartition("/")
        with os_errors(self._doing("delete", path)), ExitStack() as stack:
            stack.enter_context(self._lock())
            try:
                above = stack.enter_context(self._folder(folder))
                found = os.stat(name, dir_fd=above)
            except FileNotFoundError:
                return False
            if not S_ISREG(found.st_mode):
                return False
            if generation not in (None, _info(path, found).generation):
                raise PreconditionFailed(
                    f"can't delete {path!r} of {self.url}: another process has rewritten the file meanwhile"
                )
            os.unlink(name, dir_fd=above)
        return True

    def remove_all(self) -> None:
        """Delete the root with all files and folders in it. If the root is a symbolic link, delete the link.

        Files that can't be deleted stay.
        """
        with os_errors(f"remove {self.url}"), suppress(FileNotFoundError), self._above() as above:
            no_follow.remove_tree(above, self._root.name)

    def remove_empty(self, up_to: LocalStorage) -> None:
        """Delete the root and its folders, and the empty folders above it, unless a file exists below the root."""
        if next(iter(self.list("")), None) is not None:
            return
        with suppress(OSError):
            with suppress(FileNotFoundError), self._folder(TEMP_FOLDER) as temps:
                for name in no_follow.names_in(temps):
                    os.unlink(name, dir_fd=temps)
            with self._above() as above:
                no_follow.remove_empty_folders(above, self._root.name)
            folder = self._root.parent
            while folder != up_to._root:
                with LocalStorage(folder)._above() as above:
                    os.rmdir(folder.name, dir_fd=above)
                folder = folder.parent

    def keep_room(self) -> None:
        """Write the file that reserves disk space for a sweep, unless it exists. See `KeepsRoom.keep_room`."""
        with suppress(OSError), self._folder(TEMP_FOLDER) as temps:
            if _ROOM in no_follow.names_in(temps):
                return
            part = f"{uuid4().hex}.part"
            try:
                with _new_file(temps, part) as file:
                    # The bytes are random, because a file system might compress or skip equal bytes and reserve less.
                    file.write(os.urandom(_ROOM_BYTES))
                    os.fsync(file.fileno())
                os.rename(part, _ROOM, src_dir_fd=temps, dst_dir_fd=temps)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(part, dir_fd=temps)

    def free_room(self) -> bool:
        """Delete the file that reserves disk space; return False if it is absent. See `KeepsRoom.free_room`."""
        try:
            with self._folder(TEMP_FOLDER) as temps:
                os.unlink(_ROOM, dir_fd=temps)
        except OSError:
            return False
        return True

    def _file(self, path: str) -> Path:
        return self._root / check_path(path)

    def _doing(self, verb: str, path: str) -> str:
        return f"{verb} {path!r} of {self.url}"

    def _create(self, path: str, chunks: Iterable[bytes]) -> Handle:
        folder, _, name = check_path(path).rpartition("/")
        doing = self._doing("create", path)
        with self._written(path, chunks, doing) as (temps, temp, handle), self._folder(folder, make=True) as into:
            self._publish(lambda: _link(temps, temp, into, name), into, doing)
        return handle

    @contextmanager
    def _written(self, path: str, chunks: Iterable[bytes], doing: str) -> Iterator[tuple[int, str, Handle]]:
        """Write a temp file, sync it, yield it, and delete its temp name after the caller's `with` block.

        In the block, the caller links or renames the temp file to `path`. `os_errors` turns an OSError of the write or
        of the block into an error of the storage port.
        """
        with os_errors(doing, may_be_absent=False), self._folder(TEMP_FOLDER, make=True) as temps:
            self._remove_leftovers(temps)
            temp = f"{uuid4().hex}.part"
            try:
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
            finally:
                # The write has already succeeded or failed. A file that stays in `.tmp` is in no listing, and a later
                # writer deletes it.
                with suppress(OSError):
                    os.unlink(temp, dir_fd=temps)

    def _publish(self, step: Callable[[], object], folder: int, doing: str) -> None:
        try:
            step()
        except OSError as error:
            if error.errno in _UNCONFIRMED:
                raise UnknownOutcome(
                    f"can't tell whether this was done: {doing}: {error}; check the file before you try again"
                ) from error
            raise
        try:
            _sync_folder(folder)
        except OSError as error:
            raise UnknownOutcome(f"done, but a crash of the machine may undo it: {doing}: {error}") from error

    def _expect(self, path: str, generation: int) -> None:
        if (found := self.stat(path)) is None:
            raise NotFound(f"can't {self._doing('replace', path)}: the file does not exist")
        if found.generation != generation:
            raise PreconditionFailed(
                f"can't {self._doing('replace', path)}: another process has rewritten the file meanwhile"
            )

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Hold the root's lock during the block, against every other replace and delete by threads and processes.

        The system releases the lock of a process that dies.
        """
        with ExitStack() as stack:
            temps = stack.enter_context(self._folder(TEMP_FOLDER, make=True))
            lock = stack.enter_context(no_follow.closing(no_follow.open_lock(temps, "lock", f"{TEMP_FOLDER}/lock")))
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    @contextmanager
    def _folder(self, folder: str, *, make: bool = False) -> Iterator[int]:
        """Open a folder of the root for the block.

        Another process may have created an existing folder without having synced it yet. So with `make`, each folder is
        synced once per instance.
        """
        with no_follow.closing(
            self._open((*self._own, *folder.split("/")) if folder else self._own, make)
        ) as descriptor:
            yield descriptor

    @contextmanager
    def _above(self) -> Iterator[int]:
        """Open the folder that holds the root, for the block."""
        descriptor = self._open(self._own[:-1], False) if self._own else no_follow.open_root(self._root.parent)
        with no_follow.closing(descriptor):
            yield descriptor

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
                _sync_folder(above)
                stack.pop_all()
            self._durable.add(path)
        return descriptor

    def _remove_leftovers(self, temps: int) -> None:
        if self._leftovers_removed:
            return
        self._leftovers_removed = True
        with suppress(OSError):
            os.utime(temps)
            oldest_s = os.fstat(temps).st_mtime - self._leftover_min_age_s
            for name in no_follow.names_in(temps):
                # Another process may have deleted the file, or another user may own it. Neither is a reason to fail a
                # write.
                with suppress(OSError):
                    found = os.stat(name, dir_fd=temps, follow_symlinks=False)
                    if name.endswith(".part") and found.st_mtime < oldest_s:
                        os.unlink(name, dir_fd=temps)

    def _is_behind_link(self, folder: str) -> bool:
        """Return True if the path from the root to a folder ("" or ending in "/") leads through a symbolic link."""
        path = self._linkable
        return any((path := path / name).is_symlink() for name in (*self._own, *folder.split("/")[:-1]))

    def _walk(self, folder: str, start: str, behind_link: bool | None, *, far: bool = True) -> Iterator[FileInfo]:
        """Yield the files below a folder, sorted by path.

        Symbolic links are followed, except links without a target, links to themselves, and links to a folder above.
        """
        with os_errors(self._doing("list", folder)):
            try:
                with os.scandir(self._root / folder) as entries:
                    # A folder's name gets a '/', so that it sorts among its siblings as the paths of its files do.
                    names = sorted(
                        (f"{entry.name}/" if self._is_folder(folder, entry) else entry.name, entry.is_symlink())
                        for entry in entries
                    )
            except FileNotFoundError:
                return
        if behind_link is None:
            behind_link = self._is_behind_link(folder)
        for name, is_link in names:
            if not name.startswith(start) or name == f"{TEMP_FOLDER}/":
                continue
            if name.endswith("/"):
                if far or not behind_link:
                    yield from self._walk(folder + name, "", behind_link or is_link, far=far)
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
                yield _info(folder + name, found, behind_link)

    def _is_folder(self, folder: str, entry: os.DirEntry[str]) -> bool:
        """Return True for a folder that a listing may enter.

        A link to a folder above is not entered, because the listing would never end.
        """
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


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        # A file has the folder's name. `os_errors` would report EEXIST as "the file to create exists already".
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from error


def _make_root(root: Path) -> None:
    """Create the root folder and its missing parents, and sync them, so that they survive a crash of the machine.

    Links in the path are followed.
    """
    missing = [folder for folder in (root, *root.parents) if not folder.is_dir()]
    for folder in reversed(missing or [root]):
        _make_folder(folder)
        # This user may lack permission to open the folder above. Then that folder is not synced.
        with suppress(PermissionError), no_follow.closing(no_follow.open_root(folder.parent)) as parent:
            _sync_folder(parent)


def _sync(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())


def _sync_folder(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems can't sync a directory, and do not need it. Source: restic, internal/backend/local.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise


def _new_file(folder: int, name: str) -> BinaryIO:
    return os.fdopen(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=folder), "wb")


def _link(from_: int, name: str, to: int, new_name: str) -> None:
    """Make a hard link. It fails if the new name is taken, also by a symbolic link."""
    os.link(name, new_name, src_dir_fd=from_, dst_dir_fd=to, follow_symlinks=False)


def _path_of(descriptor: int, folder: Path) -> Path:
    """Return a path that leads to an open folder even after the folder was renamed or replaced by a link."""
    path = Path(f"/proc/self/fd/{descriptor}")
    return path if path.exists() else folder
