"""Storage on a local or shared POSIX file system, and the local end of every adapter's transfers.

    <root>/a/b.sst            a file
    <root>/.tmp/<uuid>.part   being written, or left behind by a crash
    <root>/.tmp/room          room for a sweep of a full disk, in the root of a pipeline
    <root>/.tmp/lock          held (flock) while a file is replaced or deleted

A new file is written to `.tmp`, synced, hard-linked to its name (the link fails if the name is taken, which makes it
the one step that decides a race), and the folder is synced. So the file system must support hard links. The lock is
the root's: who replaces or deletes the same files must open the same root, not one above or below it.

The root may be a symbolic link. Below the root, links are read through, but nothing is created, replaced or deleted behind one
(`no_follow`). A link in the place of a file is replaced or deleted itself. The folder of trials in a root counts as below it.
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

# Where the system makes no hard link, a copy serves.
_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.EOPNOTSUPP, errno.ELOOP)

# A network file system may have done what it failed to confirm.
_UNCONFIRMED = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT)


@contextmanager
def os_errors(doing: str, *, may_be_absent: bool = True, advice: Mapping[int, str] | None = None) -> Iterator[None]:
    """The one place that turns an OSError into an answer of the storage port. ``doing`` completes "can't ..." and names
    the file. ``advice``, by errno, is the message for a root.

    Raises: NotFound for a missing file that may be absent; StorageUnavailable for one that may not, since then its folder is gone;
        BehindLink for `LinkInPath`.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, LinkInPath):
            raise BehindLink(
                f"can't {doing}: {error.link!r} is a symbolic link, and nothing is changed behind a link below a root; "
                "put what the link leads to in its place, or remove the link"
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


def open_url(url: str, *, google_key_file: str | None = None) -> LocalStorage:
    """Open ``file:///absolute/path`` or the path alone. The path stays as it is, without %-decoding."""
    return LocalStorage(Path(url.removeprefix("file://")))


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
        # A root below .trials was made by Cairn, never by a user: links are followed up to there only.
        parts = root.parts.index(TRIALS) if TRIALS in root.parts else len(root.parts)
        self._linkable, self._own = Path(*root.parts[:parts]), root.parts[parts:]
        self._leftover_min_age_s = leftover_min_age_s
        self._leftovers_removed = False
        self._durable: set[str] = set()

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
        folder, _, name = check_path(path).rpartition("/")
        doing = self._doing("replace", path)
        self._expect(path, generation)  # refuses early; what counts is the look under the lock
        with self._written(path, (data,), doing) as (temps, temp, handle), self._locked():
            self._expect(path, generation)
            with self._folder(folder) as into:
                self._publish(lambda: os.rename(temp, name, src_dir_fd=temps, dst_dir_fd=into), into, doing)
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
        folder, _, name = check_path(path).rpartition("/")
        doing = self._doing(f"copy {handle.path!r} of {source.url} to", path)
        with os_errors(doing, may_be_absent=False), self._folder(folder, make=True) as into:
            if not (isinstance(source, LocalStorage) and self._linked(source, handle, into, name, doing)):
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

    def _linked(self, source: LocalStorage, handle: Handle, into: int, name: str, doing: str) -> bool:
        """Links a file of another root; False where the system makes no such link, or if the file is or lies behind a symbolic
        link: the file may go with whatever the link leads to."""
        file = source._file(handle.path)
        for _ in verified(read_chunks(file, source._doing("read", handle.path)), handle, url=source.url):
            pass
        _sync(file)  # whoever copied the folder there may not have
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
        """See `Storage.stat`."""
        with os_errors(self._doing("stat", path)):
            try:
                found = self._file(path).stat()
            except FileNotFoundError:
                return None
        return _info(path, found) if S_ISREG(found.st_mode) else None

    def folders(self, path: str) -> tuple[str, ...]:
        """The names of the folders in a folder, sorted, without links; none if the folder is absent."""
        with os_errors(self._doing("list", path)):
            try:
                with self._folder(check_path(path)) as descriptor, os.scandir(descriptor) as entries:
                    return tuple(sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False)))
            except FileNotFoundError:
                return ()

    def list(self, prefix: str) -> Iterator[FileInfo]:
        """See `Storage.list`."""
        folder, slash, name = check_prefix(prefix).rpartition("/")
        return self._walk(folder + slash, name, None)

    def delete(self, path: str, *, generation: int | None = None) -> bool:
        """See `Storage.delete`. Not synced: a file that a power loss brings back is an orphan for the sweeper. Empty
        directories stay, because removing one could race with a creator that has just found it."""
        if self.stat(path) is None:
            return False
        folder, _, name = path.rpartition("/")
        with os_errors(self._doing("delete", path)), ExitStack() as stack:
            stack.enter_context(self._locked())
            try:
                above = stack.enter_context(self._folder(folder))
                found = os.stat(name, dir_fd=above)
            except FileNotFoundError:
                return False
            if not S_ISREG(found.st_mode):
                return False
            if generation not in (None, _info(path, found).generation):
                raise PreconditionFailed(
                    f"can't delete {path!r} of {self.url}: it was rewritten since it was looked at"
                )
            os.unlink(name, dir_fd=above)
        return True

    def remove_all(self) -> None:
        """Removes the root with every file and folder in it, or its link if the root is one. What can't be removed stays."""
        with os_errors(f"remove {self.url}"), suppress(FileNotFoundError), self._above() as above:
            no_follow.remove_tree(above, self._root.name)

    def remove_empty(self, up_to: LocalStorage) -> None:
        """Removes folders without files at and below the root, and above it those up to another root, which stays. With any file
        below the root, nothing is removed."""
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
        """See `KeepsRoom.keep_room`."""
        with suppress(OSError), self._folder(TEMP_FOLDER) as temps:
            if _ROOM in no_follow.names_in(temps):
                return
            part = f"{uuid4().hex}.part"
            try:
                with _new_file(temps, part) as file:
                    file.write(os.urandom(_ROOM_BYTES))  # which no file system compresses, nor leaves out
                    os.fsync(file.fileno())
                os.rename(part, _ROOM, src_dir_fd=temps, dst_dir_fd=temps)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(part, dir_fd=temps)

    def free_room(self) -> bool:
        """See `KeepsRoom.free_room`."""
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
        """A synced temp file, as its folder's descriptor, its name there and its handle; gone when the block ends. Maps the errors
        of the block too."""
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
                    # File systems stamp by ticks of some ms, and reuse inodes at once: without a time of its own, a
                    # file that is deleted and written again within a tick could come back as the same generation.
                    # The time stays that of the file system, less a second at most: the clock of this host may be wrong.
                    stamped_ns = os.fstat(file.fileno()).st_mtime_ns - secrets.randbelow(1_000_000_000)
                    os.utime(file.fileno(), ns=(stamped_ns, stamped_ns))
                    os.fsync(file.fileno())
                yield temps, temp, Handle(path=path, size_bytes=size_bytes, crc32c=crc32c)
            finally:
                with suppress(OSError):  # a leftover is invisible, and the outcome of the write is decided already
                    os.unlink(temp, dir_fd=temps)

    def _publish(self, step: Callable[[], object], folder: int, doing: str) -> None:
        try:
            step()
        except OSError as error:
            if error.errno in _UNCONFIRMED:
                raise UnknownOutcome(f"can't tell whether this was done: {doing}: {error}") from error
            raise
        try:
            _sync_folder(folder)
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
        with ExitStack() as stack:
            temps = stack.enter_context(self._folder(TEMP_FOLDER, make=True))
            lock = stack.enter_context(no_follow.closing(no_follow.open_lock(temps, "lock", f"{TEMP_FOLDER}/lock")))
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    @contextmanager
    def _folder(self, folder: str, *, make: bool = False) -> Iterator[int]:
        """The descriptor of a folder of the root; "" is the root itself. ``make``: missing folders are created and
        synced. A folder that is found may have been made a moment ago by another process
        that has not synced it yet; so each one is synced once per instance.

        Raises: LinkInPath if a folder below the root is a symbolic link.
        """
        with no_follow.closing(
            self._open((*self._own, *folder.split("/")) if folder else self._own, make)
        ) as descriptor:
            yield descriptor

    @contextmanager
    def _above(self) -> Iterator[int]:
        """The descriptor of the folder that the root lies in. Raises: as `_folder`."""
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
                # Another cleaner was faster, or it is another user's: no reason to fail a write.
                with suppress(OSError):
                    found = os.stat(name, dir_fd=temps, follow_symlinks=False)
                    if name.endswith(".part") and found.st_mtime < oldest_s:
                        os.unlink(name, dir_fd=temps)

    def _is_behind_link(self, folder: str) -> bool:
        """True if the way from the root to a folder ("" or ending in "/") leads through a link."""
        path = self._linkable
        return any((path := path / name).is_symlink() for name in (*self._own, *folder.split("/")[:-1]))

    def _walk(self, folder: str, start: str, behind_link: bool | None) -> Iterator[FileInfo]:
        """Files below ``folder`` ("" or ending in "/") whose next segment begins with ``start``. Symbolic links are followed, but
        for those that lead nowhere, to themselves, or back to a directory that the walk came through."""
        with os_errors(self._doing("list", folder)):
            try:
                with os.scandir(self._root / folder) as entries:
                    # With its '/', a directory sorts among its siblings as the paths of its files do.
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
                yield from self._walk(folder + name, "", behind_link or is_link)
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


def _info(path: str, found: os.stat_result, behind_link: bool = False) -> FileInfo:
    # Only the file system sets the ctime, by its own clock. Anybody may set the mtime: a host whose clock is wrong, a copy of a
    # folder. A hard link to an old file has that file's mtime, and a sweep would take what a fork links now for a leftover. A chown
    # sets the ctime too, which delays a sweep.
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
    except FileExistsError as error:  # a file; EEXIST would read as the answer to a create
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from error


def _make_root(root: Path) -> None:
    """Create the root folder and its missing parents, and sync them: they survive a crash of the machine. Links in the path are followed."""
    missing = [folder for folder in (root, *root.parents) if not folder.is_dir()]
    for folder in reversed(missing or [root]):
        _make_folder(folder)
        # The parent of the root may be closed to us.
        with suppress(PermissionError), no_follow.closing(no_follow.open_root(folder.parent)) as parent:
            _sync_folder(parent)


def _sync(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())


def _sync_folder(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems can't sync a directory, and need not. Source: restic, internal/backend/local.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise


def _new_file(folder: int, name: str) -> BinaryIO:
    return os.fdopen(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=folder), "wb")


def _link(from_: int, name: str, to: int, new_name: str) -> None:
    """Makes a hard link. It fails if the new name is taken, by a symbolic link too."""
    os.link(name, new_name, src_dir_fd=from_, dst_dir_fd=to, follow_symlinks=False)


def _path_of(descriptor: int, folder: Path) -> Path:
    """A path that leads to an open folder even if its name leads elsewhere by now; where the system has none, the folder's."""
    path = Path(f"/proc/self/fd/{descriptor}")
    return path if path.exists() else folder
