"""Functions that upload, copy or download many files in parallel threads, and a function that reads one file.

Snapshots, restores and savepoints use them. Either all transfers succeed, or the first error is raised.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import google_crc32c

from state_backend.ports.storage import Storage
from state_backend.values.errors import CorruptFile, UnknownOutcome, UsageError
from state_backend.values.handles import Handle

IN_MEMORY_BYTES = 4 << 20
"""The largest file that `content_of` reads into memory."""

T = TypeVar("T")


def upload_all(storage: Storage, files: Sequence[tuple[str, Path]], *, parallelism: int = 8) -> list[Handle]:
    """Upload (path, local file) pairs in parallel, and return their handles in the order of the pairs.

    At the first failure no further upload starts, and running uploads are awaited. Then the files that this call
    created are deleted, unless the outcome of any upload is unknown, and the first error is raised unchanged.
    """
    return _create_all(storage, lambda at: storage.upload(*files[at]), len(files), parallelism)


def copy_all(
    source: Storage, destination: Storage, files: Sequence[tuple[Handle, str]], *, parallelism: int = 8
) -> list[Handle]:
    """Copy (handle, new path) pairs from another storage, and return the new handles in the order of the pairs.

    At the first failure no further copy starts, and running copies are awaited. Then the files that this call created
    are deleted, unless the outcome of any copy is unknown, and the first error is raised unchanged.
    """
    return _create_all(destination, lambda at: destination.copy_from(source, *files[at]), len(files), parallelism)


def download_all(storage: Storage, files: Sequence[tuple[Handle, Path]], *, parallelism: int = 8) -> None:
    """Download (handle, destination) pairs in parallel, and verify each.

    At the first failure no further download starts, and running downloads are awaited. Then the destinations that this
    call wrote are deleted, and the first error is raised unchanged.
    """
    done: list[Path] = []

    def download(file: tuple[Handle, Path]) -> None:
        storage.download(*file)
        done.append(file[1])

    if errors := _run(download, files, parallelism):
        _undo(lambda path: path.unlink(missing_ok=True), done, errors[0])
        raise errors[0]


def read_verified(storage: Storage, handle: Handle) -> bytes:
    """Return the bytes of a small file. If size or checksum differ from the handle, raise `CorruptFile`."""
    data = storage.read(handle.path)
    crc32c = google_crc32c.value(data)
    if len(data) != handle.size_bytes or crc32c != handle.crc32c:
        raise CorruptFile(
            f"{handle.path}: {len(data)} bytes, crc32c {crc32c:08x}; expected {handle.size_bytes} bytes, "
            f"{handle.crc32c:08x}; put it back from a copy"
        )
    return data


@contextmanager
def content_of(storage: Storage, handle: Handle, work: Path) -> Iterator[memoryview]:
    """Yield the bytes of a file. A file above 4 MiB is downloaded to the folder `work` and mapped into memory."""
    if handle.size_bytes <= IN_MEMORY_BYTES:
        yield memoryview(read_verified(storage, handle))
        return
    local = work / uuid4().hex
    storage.download(handle, local)
    try:
        with (
            local.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped) as content,
        ):
            yield content
    finally:
        local.unlink()


def _create_all(storage: Storage, create: Callable[[int], Handle], count: int, parallelism: int) -> list[Handle]:
    done: list[tuple[int, Handle]] = []
    errors = _run(lambda at: done.append((at, create(at))), range(count), parallelism)
    if not errors:
        return [handle for _, handle in sorted(done, key=lambda entry: entry[0])]
    if not any(isinstance(error, UnknownOutcome) for error in errors):
        _undo(lambda handle: storage.delete(handle.path), [handle for _, handle in done], errors[0])
    raise errors[0]


def _run(work: Callable[[T], object], items: Sequence[T], parallelism: int) -> list[BaseException]:
    """Run `work` on all items in `parallelism` threads, and return the errors in the order in which they were raised.

    After the first error, no further item is started. When the function returns, no thread runs any longer.
    """
    if parallelism < 1:
        raise UsageError(f"parallelism of transfers must be at least 1; got {parallelism}")
    errors: list[BaseException] = []

    def attempt(item: T) -> None:
        if errors:
            return
        try:
            work(item)
        except BaseException as error:
            errors.append(error)

    with ThreadPoolExecutor(parallelism, thread_name_prefix="transfer") as pool:
        futures: list[Future[None]] = []
        while True:
            try:
                while len(futures) < len(items) and not errors:
                    futures.append(pool.submit(attempt, items[len(futures)]))
                wait(futures)
                break
            # `wait` was interrupted, for instance by Ctrl-C. The loop waits again: otherwise running transfers would
            # still write after the caller has deleted their files.
            except BaseException as error:
                errors.append(error)
    return errors


def _undo(undo: Callable[[T], object], done: Sequence[T], cause: BaseException) -> None:
    for item in done:
        try:
            undo(item)
        except Exception as error:
            cause.add_note(f"could not delete {item}: {error}")
