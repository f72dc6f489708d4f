"""Opens the storage of a URL."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module

from state_backend.adapters.local_storage import LocalStorage
from state_backend.adapters.schemes import ACCEPTED, scheme_of
from state_backend.ports.storage import Storage, check_path
from state_backend.values.errors import UsageError
from state_backend.values.handles import FileInfo


def open_storage(url: str, *, google_key_file: str | None = None) -> Storage:
    """Return the storage rooted at a URL (`schemes.py` lists the kinds).

    Args:
        url: URL of a folder, or an absolute path.
        google_key_file: File with the key for Google Cloud Storage, read now; None for application default credentials.

    Raises:
        UsageError: No adapter opens the URL, or the library of its adapter is not installed here.
    """
    scheme = scheme_of(url)
    if scheme is None:
        raise UsageError(f"not a storage URL: {url!r}; expected {ACCEPTED}")
    try:
        # Only users of a kind wait for the import of its libraries.
        adapter = import_module(scheme.module)
    except ModuleNotFoundError as error:
        if scheme.needs is None or (error.name or "").partition(".")[0] != scheme.needs[0]:
            raise
        _, library, command = scheme.needs
        raise UsageError(
            f"{url} needs {library}, which {socket.gethostname()} lacks ({error}); install it there: {command}"
        ) from None
    storage: Storage = adapter.open_url(url, google_key_file=google_key_file)
    return storage


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
