"""Storage in memory, as strict as storage on disk, for tests and trials within one process."""

from __future__ import annotations

import copy
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import google_crc32c

from state_backend.adapters.local_storage import CHUNK_BYTES, read_chunks, write_verified
from state_backend.adapters.work_folders import work_folder
from state_backend.ports.storage import Storage, check_path, check_prefix
from state_backend.values.errors import AlreadyExists, NotFound, PreconditionFailed
from state_backend.values.frozen import frozen
from state_backend.values.handles import FileInfo, Handle


@frozen
class _File:
    data: bytes
    crc32c: int
    generation: int
    modified_ms: int


_memories: dict[str, MemoryStorage] = {}
_memories_lock = threading.Lock()


def open_url(url: str, *, credentials: Mapping[str, str] | None = None) -> MemoryStorage:
    """Open `memory://name/folder`. Within a process, each call with the same name opens the same files."""
    name, slash, folder = check_path(url.removeprefix("memory://").rstrip("/")).partition("/")
    with _memories_lock:
        memory = _memories.setdefault(name, MemoryStorage(f"memory://{name}"))
    return memory.below(folder) if slash else memory


def forget_memory(url: str) -> None:
    """Forget the files of `memory://name`: the next `open_url` with this name opens an empty storage.

    A storage object that was opened before this call keeps its files.
    """
    name = url.removeprefix("memory://").partition("/")[0]
    with _memories_lock:
        _memories.pop(name, None)


class MemoryStorage:
    lists_what_is_there = True

    def __init__(
        self, url: str = "memory://", *, now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000
    ) -> None:
        self.url = url
        self._now_ms = now_ms
        self._prefix = ""
        self._files: dict[str, _File] = {}
        self._generations = itertools.count(1)
        self._lock = threading.Lock()

    def below(self, folder: str) -> MemoryStorage:
        view = copy.copy(self)
        view._prefix = f"{self._prefix}{check_path(folder)}/"
        view.url = f"{self.url.rstrip('/')}/{folder}"
        return view

    def read(self, path: str, *, offset: int = 0) -> bytes:
        return self._get(path).data[offset:]

    def create(self, path: str, data: bytes) -> Handle:
        key = self._key(path)
        with self._lock:
            if key in self._files:
                raise AlreadyExists(f"can't create {path!r} of {self.url}: the file exists already")
            return self._put(path, data)

    def replace(self, path: str, data: bytes, *, generation: int) -> Handle:
        with self._lock:
            self._expect(path, self._get(path), generation)
            return self._put(path, data)

    def upload(self, path: str, local: Path) -> Handle:
        check_path(path)
        return self.create(path, b"".join(read_chunks(local, f"read {local} to upload it to {self.url}")))

    def download(self, handle: Handle, destination: Path) -> None:
        data = self._get(handle.path).data
        chunks = (data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES))
        write_verified(chunks, handle, destination, url=self.url)

    def copy_from(self, source: Storage, handle: Handle, path: str) -> Handle:
        check_path(path)
        with work_folder("copy") as folder:
            source.download(handle, folder / "file")
            return self.upload(path, folder / "file")

    def stat(self, path: str) -> FileInfo | None:
        file = self._files.get(self._key(path))
        return None if file is None else _info(path, file)

    def list(self, prefix: str) -> Iterator[FileInfo]:
        start = self._prefix + check_prefix(prefix)
        with self._lock:
            found = [(key, self._files[key]) for key in sorted(self._files) if key.startswith(start)]
        return (_info(key.removeprefix(self._prefix), file) for key, file in found)

    def delete(self, path: str, *, generation: int | None = None) -> bool:
        key = self._key(path)
        with self._lock:
            if key not in self._files:
                return False
            if generation is not None:
                self._expect(path, self._files[key], generation)
            del self._files[key]
            return True

    def _key(self, path: str) -> str:
        return self._prefix + check_path(path)

    def _get(self, path: str) -> _File:
        file = self._files.get(self._key(path))
        if file is None:
            raise NotFound(f"{path!r} of {self.url} does not exist")
        return file

    def _expect(self, path: str, file: _File, generation: int) -> None:
        if file.generation != generation:
            raise PreconditionFailed(f"{path!r} of {self.url} was rewritten by another process meanwhile")

    def _put(self, path: str, data: bytes) -> Handle:
        crc32c: int = google_crc32c.value(data)
        self._files[self._key(path)] = _File(
            data=data, crc32c=crc32c, generation=next(self._generations), modified_ms=self._now_ms()
        )
        return Handle(path=path, size_bytes=len(data), crc32c=crc32c)


def _info(path: str, file: _File) -> FileInfo:
    return FileInfo(
        path=path,
        size_bytes=len(file.data),
        generation=file.generation,
        modified_ms=file.modified_ms,
        crc32c=file.crc32c,
    )
