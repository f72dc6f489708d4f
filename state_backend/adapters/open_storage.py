"""Open the storage that a URL names, and delete or list folders below a URL."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module

from state_backend.adapters.local_storage import LocalStorage
from state_backend.adapters.schemes import check_url
from state_backend.ports.storage import Storage, check_path
from state_backend.values.errors import UsageError
from state_backend.values.handles import FileInfo
from state_backend.values.release import WHEEL


def open_storage(url: str, *, credentials: Mapping[str, str] | None = None) -> Storage:
    """Return the storage rooted at a URL (`schemes.py` lists the kinds).

    `credentials`: Variables of a login, with their values, which take the place of the environment's. The files that
    they name may be deleted afterwards.
    """
    scheme = check_url(url)
    try:
        # The import happens here, so that only users of a kind of storage wait for its libraries.
        adapter = import_module(scheme.module)
    except ModuleNotFoundError as error:
        if scheme.needs is None or (error.name or "").partition(".")[0] != scheme.needs[0]:
            raise
        _, library, extra = scheme.needs
        raise UsageError(
            f"{url} needs {library}, which {socket.gethostname()} lacks ({error}); install it there: "
            f"pip install './{WHEEL}[{extra}]'"
        ) from None
    storage: Storage = adapter.open_url(url, credentials=credentials)
    return storage


def remove_all(url: str, *, dry_run: bool = False) -> tuple[int, int]:
    """Delete all files below a URL, and on a local disk the folders too. Return (number of files, bytes).

    A symbolic link is deleted itself. Files behind a link are neither deleted nor counted.
    """
    storage = open_storage(url)
    files = [f for f in list_own(storage) if not f.behind_link]
    if dry_run:
        return len(files), sum(f.size_bytes for f in files)
    if isinstance(storage, LocalStorage):
        storage.remove_all()
    # On a disk, only files that `remove_all` could not delete are left, and `delete` raises the reason.
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda f: storage.delete(f.path), [f for f in list_own(storage) if not f.behind_link]))
    return len(files), sum(f.size_bytes for f in files)


def remove_empty(url: str, *, up_to: str) -> None:
    """If no file exists below a URL of a local disk, delete its folder, and empty folders above it up to `up_to`."""
    storage, last = open_storage(url), open_storage(up_to)
    if isinstance(storage, LocalStorage) and isinstance(last, LocalStorage):
        storage.remove_empty(last)


def folders_in(url: str, path: str) -> list[str]:
    """Return the sorted names of the folders in a folder: on a disk also empty ones, but no symbolic links."""
    storage = open_storage(url)
    if hasattr(storage, "folders"):  # An adapter has this method if it can list folders without their files.
        return list(storage.folders(path))
    prefix = f"{path}/" if path else ""
    inner = [f.path.removeprefix(prefix).partition("/") for f in storage.list(prefix)]
    return sorted({name for name, slash, _ in inner if slash})


def list_own(storage: Storage) -> list[FileInfo]:
    """Return the files below a storage's root. Of a folder behind a symbolic link, only files directly in it.

    A link may lead anywhere, such as to a whole disk. Files behind a link have `behind_link=True`.
    """
    return list(storage.list_own() if isinstance(storage, LocalStorage) else storage.list(""))


def check_outside(folder: str, to: str, what: str) -> None:
    """Raise `UsageError` if the new folder `to`, for `what`, lies inside `folder`, that of a pipeline or savepoint.

    The new folder would be deleted with the pipeline, and `cairn sweep` would report its files as unknown.
    """
    destination, owner = open_storage(to).url.rstrip("/"), open_storage(folder).url.rstrip("/")
    if f"{destination}/".startswith(f"{owner}/"):
        raise UsageError(
            f"{to} lies inside the folder {owner}; choose a folder elsewhere, or the {what} would be deleted with that folder"
        )


def join_url(url: str, *segments: str) -> str:
    check_url(url)
    for segment in segments:
        url = f"{url if url.endswith('/') else url + '/'}{check_path(segment)}"
    return url
