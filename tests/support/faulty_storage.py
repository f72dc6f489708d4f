"""A storage that fails where a test tells it to: a decorator over the port."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from state_backend.ports.storage import Storage, lists_late
from state_backend.values.errors import CairnError, UnknownOutcome
from state_backend.values.handles import FileInfo, Handle

R = TypeVar("R")


class StopHere(BaseException):
    """The process dies here. A BaseException, so that no handler of ordinary failures sees it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What to raise, and whether the call takes effect first."""

    error: BaseException
    when: Literal["before", "after"]


@dataclass(slots=True)
class _Process:
    """What the storages of one process share."""

    plan: Mapping[int, Fault]
    calls: list[tuple[str, str]] = field(default_factory=list)
    dead: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class FaultyStorage:
    """Numbers the calls 0, 1, ... over all threads and raises the faults that are planned for their numbers.

    After a StopHere every later call raises it too and does nothing: the dead don't clean up. ``late``: as if the inner storage might
    list what was there some seconds ago.
    """

    def __init__(self, inner: Storage, plan: Mapping[int, Fault], *, late: bool = False) -> None:
        self.inner = inner
        self.lists_what_is_there = not (late or lists_late(inner))
        self._process = _Process(plan)

    @property
    def calls(self) -> list[tuple[str, str]]:
        """(method, path or prefix) of all calls that the process made, those that failed included."""
        return self._process.calls

    def beside(self, other: Storage) -> FaultyStorage:
        """Another storage that the same process uses: one numbering for both, and one death."""
        twin = FaultyStorage(other, {})
        twin._process = self._process
        return twin

    @property
    def url(self) -> str:
        """The root of the inner storage."""
        return self.inner.url

    def read(self, path: str, *, offset: int = 0) -> bytes:
        """See `Storage.read`."""
        return self._call("read", path, lambda: self.inner.read(path, offset=offset))

    def create(self, path: str, data: bytes) -> Handle:
        """See `Storage.create`."""
        return self._call("create", path, lambda: self.inner.create(path, data))

    def replace(self, path: str, data: bytes, *, generation: int) -> Handle:
        """See `Storage.replace`."""
        return self._call("replace", path, lambda: self.inner.replace(path, data, generation=generation))

    def upload(self, path: str, local: Path) -> Handle:
        """See `Storage.upload`."""
        return self._call("upload", path, lambda: self.inner.upload(path, local))

    def download(self, handle: Handle, destination: Path) -> None:
        """See `Storage.download`."""
        self._call("download", handle.path, lambda: self.inner.download(handle, destination))

    def copy_from(self, source: Storage, handle: Handle, path: str) -> Handle:
        """See `Storage.copy_from`. One call of this storage, none of the source."""
        while isinstance(source, FaultyStorage):
            source = source.inner
        return self._call("copy_from", path, lambda: self.inner.copy_from(source, handle, path))

    def stat(self, path: str) -> FileInfo | None:
        """See `Storage.stat`."""
        return self._call("stat", path, lambda: self.inner.stat(path))

    def list(self, prefix: str) -> Iterator[FileInfo]:
        """See `Storage.list`. One call, however many files it yields."""
        return self._call("list", prefix, lambda: iter([*self.inner.list(prefix)]))

    def delete(self, path: str, *, generation: int | None = None) -> bool:
        """See `Storage.delete`."""
        return self._call("delete", path, lambda: self.inner.delete(path, generation=generation))

    def _call(self, name: str, path: str, action: Callable[[], R]) -> R:
        process = self._process
        with process.lock:
            if process.dead:
                raise StopHere(f"{name} {path!r} after the process died")
            fault = process.plan.get(len(process.calls))
            process.calls.append((name, path))
            process.dead = fault is not None and isinstance(fault.error, StopHere)
        if fault is None:
            return action()
        if fault.when == "after":
            try:
                action()
            except CairnError:
                if not isinstance(fault.error, StopHere):  # who dies after a call does so whatever it answered
                    raise
        raise fault.error


def stop_at(call: int, when: Literal["before", "after"]) -> dict[int, Fault]:
    """The plan of a process that dies at one call."""
    return {call: Fault(error=StopHere(f"{when} call {call}"), when=when)}


def lost_answer_at(call: int, when: Literal["before", "after"]) -> dict[int, Fault]:
    """The plan of a write whose answer is lost: it never arrived (before), or it took effect (after)."""
    return {call: Fault(error=UnknownOutcome(f"injected {when} call {call}"), when=when)}


class StaleStorage(FaultyStorage):
    """Another host's view of a network disk: from ``freeze`` on, folders that begin so are listed as they were then."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner, {}, late=True)
        self._frozen: dict[str, list[FileInfo]] = {}

    def freeze(self, *prefixes: str) -> None:
        """Remembers what is there below each prefix."""
        self._frozen = {prefix: [*self.inner.list(prefix)] for prefix in prefixes}

    def list(self, prefix: str) -> Iterator[FileInfo]:
        """See `Storage.list`."""
        now = [info for info in super().list(prefix) if not info.path.startswith(tuple(self._frozen))]
        then = [info for files in self._frozen.values() for info in files if info.path.startswith(prefix)]
        return iter(sorted([*now, *then], key=lambda info: info.path))
