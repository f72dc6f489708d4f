"""Many files up or down at once: all of them, or none and the first error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

from state_backend.ports.storage import Storage
from state_backend.values.errors import UnknownOutcome, UsageError
from state_backend.values.handles import Handle

T = TypeVar("T")


def upload_all(storage: Storage, files: Sequence[tuple[str, Path]], *, parallelism: int = 8) -> list[Handle]:
    """Uploads (path, local file) pairs; handles in their order.

    At the first failure nothing more is begun, what runs is waited for, the files that this call created are deleted,
    and that first error is raised as it came. If any outcome is unknown, nothing is deleted.
    """
    return _create_all(storage, lambda at: storage.upload(*files[at]), len(files), parallelism)


def copy_all(
    source: Storage, destination: Storage, files: Sequence[tuple[Handle, str]], *, parallelism: int = 8
) -> list[Handle]:
    """Takes (handle, new path) pairs over from another storage; handles in their order. A failure as in `upload_all`."""
    return _create_all(destination, lambda at: destination.copy_from(source, *files[at]), len(files), parallelism)


def download_all(storage: Storage, files: Sequence[tuple[Handle, Path]], *, parallelism: int = 8) -> None:
    """Downloads (handle, destination) pairs, verified. At the first failure as `upload_all`; the destinations that
    this call wrote are removed."""
    done: list[Path] = []

    def download(file: tuple[Handle, Path]) -> None:
        storage.download(*file)
        done.append(file[1])

    if errors := _run(download, files, parallelism):
        _undo(lambda path: path.unlink(missing_ok=True), done, errors[0])
        raise errors[0]


def _create_all(storage: Storage, create: Callable[[int], Handle], count: int, parallelism: int) -> list[Handle]:
    done: list[tuple[int, Handle]] = []
    errors = _run(lambda at: done.append((at, create(at))), range(count), parallelism)
    if not errors:
        return [handle for _, handle in sorted(done, key=lambda entry: entry[0])]
    if not any(isinstance(error, UnknownOutcome) for error in errors):
        _undo(lambda handle: storage.delete(handle.path), [handle for _, handle in done], errors[0])
    raise errors[0]


def _run(work: Callable[[T], object], items: Sequence[T], parallelism: int) -> list[BaseException]:
    """Runs the work on all items in threads; the errors, the first one first. No thread runs when it returns."""
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
            except BaseException as error:  # an interrupt: what runs would write on after we cleaned up, so wait again
                errors.append(error)
    return errors


def _undo(undo: Callable[[T], object], done: Sequence[T], cause: BaseException) -> None:
    for item in done:
        try:
            undo(item)
        except Exception as error:
            cause.add_note(f"left behind: {item}: {error}")
