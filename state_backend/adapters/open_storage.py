"""Which adapter serves a URL."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from state_backend.adapters.local_storage import LocalStorage
from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.ports.storage import Storage, check_path
from state_backend.values.errors import UsageError
from state_backend.values.handles import FileInfo

_ACCEPTED = "file:///absolute/path, /absolute/path, gs://bucket/prefix, or memory://name"

_memories: dict[str, MemoryStorage] = {}
_memories_lock = threading.Lock()


def open_storage(url: str, *, google_key_file: str | None = None) -> Storage:
    """The storage rooted at a URL.

    ``file:///absolute/path`` or the path alone: `LocalStorage`; the path is taken as it stands, without %-decoding.
    ``gs://bucket/prefix``: `GcsStorage`, with the key in ``google_key_file``, which is read now; None: the application's default credentials.
    ``memory://name/folder``: files of this process, the same ones at every call.

    Raises: UsageError for a URL that none serves.
    """
    scheme, separator, rest = url.partition("://")
    if not separator and url.startswith("/"):
        scheme, rest = "file", url
    if scheme == "file" and rest.startswith("/"):
        return LocalStorage(Path(rest))
    if scheme == "memory":
        name, slash, folder = check_path(rest.rstrip("/")).partition("/")
        with _memories_lock:
            memory = _memories.setdefault(name, MemoryStorage(f"memory://{name}"))
        return memory.below(folder) if slash else memory
    if scheme == "gs":
        try:
            # Only who uses it waits for Google's libraries.
            from state_backend.adapters.gcs_storage import GcsStorage, credentials_in
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("google"):
                raise
            raise UsageError(
                f"{url} needs Google's client, which {socket.gethostname()} lacks ({error}); install it there: pip install 'cairn[gcs]'"
            ) from None
        bucket, _, prefix = rest.rstrip("/").partition("/")
        return GcsStorage(bucket, prefix, credentials=credentials_in(google_key_file) if google_key_file else None)
    raise UsageError(f"not a storage URL: {url!r}; expected {_ACCEPTED}")


def forget_memory(url: str) -> None:
    """Drops the files of ``memory://name``; who opens that URL again finds none. Who has it open keeps them."""
    name = url.removeprefix("memory://").partition("/")[0]
    with _memories_lock:
        _memories.pop(name, None)


def remove_all(url: str, *, dry_run: bool = False) -> tuple[int, int]:
    """Deletes every file below a URL, and on a local disk the folder too; how many files there were, and their bytes. A symbolic
    link is removed, and what lies behind it is neither removed nor counted."""
    storage = open_storage(url)
    files = _own_files(storage)
    if dry_run:
        return len(files), sum(f.size_bytes for f in files)
    if isinstance(storage, LocalStorage):
        storage.remove_all()
    with ThreadPoolExecutor(8) as pool:  # on a disk those that the call above could not delete, which says why
        list(pool.map(lambda f: storage.delete(f.path), _own_files(storage)))
    return len(files), sum(f.size_bytes for f in files)


def remove_empty(url: str, *, up_to: str) -> None:
    """Removes folders without files at and below a local URL, and above it those up to ``up_to``, which stays. Elsewhere there are none."""
    storage, last = open_storage(url), open_storage(up_to)
    if isinstance(storage, LocalStorage) and isinstance(last, LocalStorage):
        storage.remove_empty(last)


def folders_in(url: str, path: str) -> list[str]:
    """The names of the folders in a folder below a URL, sorted. On a local disk those without files too, but no symbolic links."""
    storage = open_storage(url)
    if isinstance(storage, LocalStorage):
        return list(storage.folders(path))
    return sorted({f.path.removeprefix(f"{path}/").partition("/")[0] for f in storage.list(f"{path}/")})


def _own_files(storage: Storage) -> list[FileInfo]:
    return [f for f in storage.list("") if not f.behind_link]


def join_url(url: str, *segments: str) -> str:
    """The URL of a folder below a root. Raises: UsageError for segments that `check_path` refuses."""
    for segment in segments:
        url = f"{url if url.endswith('/') else url + '/'}{check_path(segment)}"
    return url
