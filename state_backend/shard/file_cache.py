"""Local recovery: immutable files that this host wrote or fetched, kept for the next interval that is restored here.

    <folder>/<40 hex digits>-<crc32c>   a file of some root: SHA-256 over the root's URL, path, size and crc32c, so that
                                        neither shards nor pipelines can meet under one name
    <folder>/.<uuid>.part               a copy in the making, or left behind by a crash

A hit is a hard link into the shard's folder: RocksDB deletes its SSTs, but never changes them. The cache is shared by all
processes of one user on the host, without a lock; whatever it can't do, it answers as a miss, which costs a download:
1. A file is verified before it gets in. Then its time of modification is set to one that its name implies; whoever writes to
   it, through whatever link, sets another, and a file of a wrong size or time is a miss and is removed. What the disk itself
   damaged, RocksDB's block checksums find; who sees that calls `forget`.
2. Removing an entry takes nothing from those who linked it. Two who remove or insert the same one end up the same.
3. The least recently used go, by the time of access, which every hit sets. To look at all entries costs time, so one
   insertion in some does, picked by its checksum: once per 1/16 of the limit in bytes, and per 1/64 of the most files.
4. Where the shard's folder is on another file system, files are copied, and verified on the way out as well.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import google_crc32c

from state_backend.adapters import no_follow
from state_backend.adapters.rocks import EngineOptions
from state_backend.adapters.work_folders import touched_s
from state_backend.values.errors import CorruptFile, DamagedCopy
from state_backend.values.handles import Handle
from state_backend.values.records import ShardManifest

_CHUNK_BYTES = 1 << 20
_NAME = re.compile(r"[0-9a-f]{40}-([0-9a-f]{8})")
_MOST_FILES = 16_384
_LEFTOVER_MIN_AGE_S = 3600.0
# Whole even seconds, which every file system can keep, from September 2001 on: no file that is written now has such a time.
_SEALED_FROM_S = 1_000_000_000
_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.EACCES)


class FileCache:
    """Files of any number of roots, about ``limit_bytes`` of them at most, in a folder of this user's own."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes

    def link(self, url: str, handle: Handle, destination: Path) -> bool:
        """Puts the file of a root at ``destination``, which must not exist, if the cache has it whole."""
        name = _entry(url, handle)
        try:
            with self._opened() as folder:
                found = os.stat(name, dir_fd=folder, follow_symlinks=False)
                if not stat.S_ISREG(found.st_mode):
                    return False
                if found.st_size != handle.size_bytes or found.st_mtime_ns != _sealed_ns(name):
                    os.unlink(name, dir_fd=folder)
                    return False
                try:
                    os.link(name, destination, src_dir_fd=folder, follow_symlinks=False)
                except OSError as error:
                    if error.errno not in _NO_LINK:
                        raise
                    if not _copied(self._folder / name, destination, handle):
                        os.unlink(name, dir_fd=folder)
                        return False
                os.utime(name, ns=(time.time_ns(), found.st_mtime_ns), dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            # Never there, or somebody evicted it; if that was after the link, ours stays.
            return destination.exists()
        except OSError:
            destination.unlink(missing_ok=True)
            return False
        return True

    def keep(self, url: str, files: Iterable[tuple[Handle, Path]]) -> None:
        """Takes files in that were just verified against their handles, and makes room for them. The local files go on to
        be used, but must not be written to any more. With the disk full, or the folder not ours, nothing is kept."""
        with suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._opened() as folder:
                full = False
                for handle, local in files:
                    if handle.size_bytes <= self._limit_bytes:
                        self._insert(folder, _entry(url, handle), handle, local)
                        share = 16 * handle.size_bytes / self._limit_bytes + 64 / _MOST_FILES
                        full = full or handle.crc32c < share * 2**32
                if full:
                    self._evict(folder)

    def forget(self, url: str, handles: Iterable[Handle]) -> int:
        """Drops files that were found damaged after all, so that the next try fetches them; how many there were."""
        forgotten = 0
        with suppress(OSError), self._opened() as folder:
            for handle in handles:
                with suppress(OSError):
                    os.unlink(_entry(url, handle), dir_fd=folder)
                    forgotten += 1
        return forgotten

    def _insert(self, folder: int, name: str, handle: Handle, local: Path) -> None:
        sealed_ns = _sealed_ns(name)
        times_ns = (time.time_ns(), sealed_ns)
        if local.stat().st_size != handle.size_bytes:
            return
        try:
            # The two names are of one file, so this is what the entry's time will be, from its first moment on.
            os.utime(local, ns=times_ns)
            os.link(local, name, dst_dir_fd=folder, follow_symlinks=False)
        except FileExistsError:
            pass
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
            copy = self._folder / f".{uuid4().hex}.part"
            try:
                if _copied(local, copy, handle):
                    os.utime(copy, ns=times_ns)
                    os.rename(copy.name, name, src_dir_fd=folder, dst_dir_fd=folder)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(copy.name, dir_fd=folder)

    def _evict(self, folder: int) -> None:
        """Removes the least recently used while there are more files or bytes than the limits, or more bytes than half of what
        the disk could give: work folders need the rest."""
        entries = []
        now_s = touched_s(folder)
        for name in no_follow.names_in(folder):
            with suppress(OSError):
                found = os.stat(name, dir_fd=folder, follow_symlinks=False)
                if name.endswith(".part") and found.st_mtime < now_s - _LEFTOVER_MIN_AGE_S:
                    os.unlink(name, dir_fd=folder)
                elif _NAME.fullmatch(name):
                    entries.append((found.st_atime_ns, found.st_size, name))
        used_bytes = sum(size_bytes for _, size_bytes, _ in entries)
        room_bytes = (used_bytes + shutil.disk_usage(folder).free) // 2
        most_bytes = min(self._limit_bytes, room_bytes)
        for n, (_, size_bytes, name) in enumerate(sorted(entries)):
            if used_bytes <= most_bytes and len(entries) - n <= _MOST_FILES:
                return
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
            used_bytes -= size_bytes

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """The descriptor of the folder. Below a shared temp folder anybody could have made the folder first, or may lay a link in its
        place at any time.

        Raises: OSError if the folder is not a real one of this user's.
        """
        with no_follow.closing(no_follow.open_folder(self._folder)) as descriptor:
            if os.fstat(descriptor).st_uid != os.geteuid():
                raise PermissionError(errno.EPERM, "the folder of another user", str(self._folder))
            yield descriptor


def _entry(url: str, handle: Handle) -> str:
    crc32c = f"{handle.crc32c:08x}"
    identity = f"{url}\0{handle.path}\0{handle.size_bytes}\0{crc32c}"
    return f"{hashlib.sha256(identity.encode()).hexdigest()[:40]}-{crc32c}"


def open_cache(options: EngineOptions) -> FileCache | None:
    """The cache of this host, or None where the options want none."""
    folder = options.cache_folder()
    return None if folder is None else FileCache(folder, options.cache_bytes)


@contextmanager
def damage_of_copies(cache: FileCache | None, url: str, manifests: Iterable[ShardManifest]) -> Iterator[None]:
    """What is found damaged in the block may be this host's copy only.

    Raises: DamagedCopy in place of a CorruptFile if the cache had files of these manifests. They are dropped: another try fetches them
    from the storage, and tells whether those are damaged too.
    """
    try:
        yield
    except CorruptFile as error:
        handles = [f.handle for m in manifests for f in m.files]
        handles += [s.handle for m in manifests for s in m.segments if s.handle is not None]
        if cache is not None and cache.forget(url, handles):
            raise DamagedCopy(str(error)) from error
        raise


def _sealed_ns(name: str) -> int:
    return (_SEALED_FROM_S + 2 * int(name[:7], 16)) * 1_000_000_000


def _copied(source: Path, destination: Path, handle: Handle) -> bool:
    """Copies a file; False, and no copy, if it is not what the handle says."""
    shutil.copyfile(source, destination)
    if (destination.stat().st_size, _crc32c_of(destination)) == (handle.size_bytes, handle.crc32c):
        return True
    destination.unlink()
    return False


def _crc32c_of(path: Path) -> int:
    crc32c = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            crc32c = google_crc32c.extend(crc32c, chunk)
    return crc32c
