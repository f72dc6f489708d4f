"""Local recovery: immutable files that this host wrote or fetched, kept for the next interval that is restored here.

    <folder>/<40 hex digits>-<crc32c>   a file of some root: SHA-256 over the root's URL, path, size and crc32c, so that
                                        files of different shards or pipelines have different names
    <folder>/.<uuid>.part               an unfinished copy, perhaps left behind by a crash

A hit is a hard link into the shard's folder: RocksDB deletes its SSTs, but never changes them. All processes of one
user on the host share the cache, without a lock. Every failure of the cache counts as a miss, which costs a download:
1. A file is verified before it is added. Then its modification time is set to a value computed from its name. A process
   that writes to the file through any link changes this time. A file with a wrong size or time is a miss and is
   removed. Damage by the disk itself changes neither. RocksDB detects this damage by its block checksums, and
   `damage_of_copies` then removes the file from the cache.
2. Removal of an entry does not affect processes that have linked the file. Two processes that remove or add the same
   entry at once end with the same result.
3. When the cache is too large, the least recently used files are removed, by access time. Every hit sets the access
   time. To learn the cache's size, all its files are listed, which takes time. So only some additions list the files:
   on average once for each 1/16 of `limit_bytes` that is added, and once for every 256 added files. The checksum of the
   added file serves as the random number that selects these additions.
4. If the shard's folder is on another file system, files are copied instead of linked, and each copy is verified.
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
# The earliest modification time of a cached file, in seconds since the epoch: September 2001. `FileCache.keep` sets
# each file's modification time to a value between 2001 and 2018 that is computed from the file's name. A process that
# writes to the file changes this time, so `FileCache.link` recognises the changed file and removes it. The values are
# whole even seconds, because every file system can store these.
_SEALED_FROM_S = 1_000_000_000
_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.EACCES)


class FileCache:
    """Cache of files of any number of roots, in a folder that this user owns."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes

    def link(self, url: str, handle: Handle, destination: Path) -> bool:
        """Link a file of the root `url` from the cache to `destination`. Return False if the cache can't deliver it."""
        name = _entry(url, handle)
        try:
            with self._open() as folder:
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
                    if not _copy(self._folder / name, destination, handle):
                        os.unlink(name, dir_fd=folder)
                        return False
                os.utime(name, ns=(time.time_ns(), found.st_mtime_ns), dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            # The cache has no such file, or another process evicted it just now. If this process made its link before
            # the eviction, the link is valid, and this is a hit.
            return destination.exists()
        except OSError:
            destination.unlink(missing_ok=True)
            return False
        return True

    def keep(self, url: str, files: Iterable[tuple[Handle, Path]]) -> None:
        """Add files of the root `url` that were just verified against their handles, and evict old files if needed.

        The local files may still be read, but nothing may write to them afterwards, because they are links to the
        cache's files. An `OSError`, such as a full disk or a folder of another user, ends the call: the remaining files
        are not cached.
        """
        with suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._open() as folder:
                full = False
                for handle, local in files:
                    if handle.size_bytes <= self._limit_bytes:
                        self._insert(folder, _entry(url, handle), handle, local)
                        share = 16 * handle.size_bytes / self._limit_bytes + 64 / _MOST_FILES
                        full = full or handle.crc32c < share * 2**32
                if full:
                    self._evict(folder)

    def forget(self, url: str, handles: Iterable[Handle]) -> int:
        """Remove files of the root `url`, of which one is damaged, from the cache. Return how many were there."""
        forgotten = 0
        with suppress(OSError), self._open() as folder:
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
            # The cached file is a link to this local file. The time is set before the link is made, so no process ever
            # sees the cached file with another time.
            os.utime(local, ns=times_ns)
            os.link(local, name, dst_dir_fd=folder, follow_symlinks=False)
        except FileExistsError:
            pass
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
            copy = self._folder / f".{uuid4().hex}.part"
            try:
                if _copy(local, copy, handle):
                    os.utime(copy, ns=times_ns)
                    os.rename(copy.name, name, src_dir_fd=folder, dst_dir_fd=folder)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(copy.name, dir_fd=folder)

    def _evict(self, folder: int) -> None:
        """Remove the least recently used files until files and bytes are within the limits.

        The limit in bytes is `limit_bytes`, or half of the disk space that the cache and the free space have together,
        if this is less: work folders need the other half.
        """
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
    def _open(self) -> Iterator[int]:
        """Yield a descriptor of the cache's folder.

        Raise `PermissionError` if another user owns the folder. In a shared temp folder, other users may create the
        folder first, or replace it by a symbolic link at any time.
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
    """Return the cache of immutable files on this host; None if the options disable it."""
    folder = options.cache_folder()
    return None if folder is None else FileCache(folder, options.cache_bytes)


@contextmanager
def damage_of_copies(cache: FileCache | None, url: str, manifests: Iterable[ShardManifest]) -> Iterator[None]:
    """Raise `DamagedCopy` in place of the block's `CorruptFile`, if files in the cache may have caused the error.

    A file may be damaged in this host's cache only. So this function removes the files of the manifests from the cache.
    If the caller tries again, it downloads them, and fails only if the storage's files are damaged too.
    """
    try:
        yield
    except CorruptFile as error:
        if cache is not None and cache.forget(url, [handle for m in manifests for handle in m.handles]):
            raise DamagedCopy(str(error)) from error
        raise


def _sealed_ns(name: str) -> int:
    return (_SEALED_FROM_S + 2 * int(name[:7], 16)) * 1_000_000_000


def _copy(source: Path, destination: Path, handle: Handle) -> bool:
    """Copy a file, and return True. If the copy has another size or checksum than the handle, delete it and return
    False."""
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
