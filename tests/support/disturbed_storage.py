"""A local storage as a process of a random history has it: the process stops or dies at a call, and listings may be old.

A journal beside the root gets whatever may become a record before it is created, so that a test knows each record as it was committed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote
from uuid import uuid4

from state_backend.adapters import local_storage
from state_backend.adapters.local_storage import LocalStorage
from state_backend.formats import paths
from state_backend.ports.storage import TEMP_FOLDER, Storage
from state_backend.values.handles import FileInfo, Handle

R = TypeVar("R")
JOURNALED = (paths.CHECKPOINTS, paths.ATTEMPTS, paths.TRIAL_RECORDS, paths.SAVEPOINT_RECORD)


@dataclass(kw_only=True)
class Disturbances:
    """What befalls one process. Calls are numbered from 1; 0: never. ``stale_s``: a listing may be so old; 0: listings are current.
    ``skew_s``: what the process's clock is ahead; ``jump_at``: the call at which the clock jumps by ``jump_s``."""

    kill_at: int = 0
    kill_after: bool = False
    stop_at: int = 0
    stale_s: float = 0.0
    skew_s: float = 0.0
    jump_at: int = 0
    jump_s: float = 0.0


@dataclass(kw_only=True)
class Process:
    """This process. ``folder``: of the history. ``host``: whose listings it shares."""

    folder: Path
    host: str
    number: int
    disturbances: Disturbances
    calls: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    skew_s: float = 0.0


_HERE: list[Process] = []
_time, _time_ns, _scandir = time.time, time.time_ns, os.scandir


def disturb(process: Process) -> None:
    """From now on every storage of this process is disturbed, and its clock is skewed."""
    _HERE[:] = [process]
    process.skew_s = process.disturbances.skew_s
    local_storage.open_url = _open_disturbed
    time.time = lambda: _time() + process.skew_s
    time.time_ns = lambda: _time_ns() + int(process.skew_s * 1e9)
    os.fsync = lambda descriptor: None  # a process that dies loses nothing that it has written


def _open_disturbed(url: str, **_: object) -> LocalStorage:
    return DisturbedStorage(Path(url.removeprefix("file://")))


class DisturbedStorage(LocalStorage):
    """See the module."""

    def read(self, path: str, *, offset: int = 0) -> bytes:
        return self._disturbed("read", path, lambda: super(DisturbedStorage, self).read(path, offset=offset))

    def create(self, path: str, data: bytes) -> Handle:
        self._note(path, data)
        return self._wrote(path, lambda: super(DisturbedStorage, self).create(path, data))

    def replace(self, path: str, data: bytes, *, generation: int) -> Handle:
        if path.startswith(paths.TRIAL_RECORDS):
            self._note(path, data)
        return self._wrote(path, lambda: super(DisturbedStorage, self).replace(path, data, generation=generation))

    def upload(self, path: str, local: Path) -> Handle:
        return self._wrote(path, lambda: super(DisturbedStorage, self).upload(path, local))

    def copy_from(self, source: Storage, handle: Handle, path: str) -> Handle:
        return self._wrote(path, lambda: super(DisturbedStorage, self).copy_from(source, handle, path))

    def download(self, handle: Handle, destination: Path) -> None:
        self._disturbed("download", handle.path, lambda: super(DisturbedStorage, self).download(handle, destination))

    def stat(self, path: str) -> FileInfo | None:
        return self._disturbed("stat", path, lambda: super(DisturbedStorage, self).stat(path))

    def list(self, prefix: str) -> Iterator[FileInfo]:
        return self._disturbed("list", prefix, lambda: iter([*self._listed(prefix)]))

    def delete(self, path: str, *, generation: int | None = None) -> bool:
        return self._wrote(path, lambda: super(DisturbedStorage, self).delete(path, generation=generation))

    # --- stale listings ---------------------------------------------------------------------------------------------------------

    def _listed(self, prefix: str) -> Iterator[FileInfo]:
        """The names are those of the host's cache of directories, each file's size and times are current."""
        stale_s = _HERE[0].disturbances.stale_s
        if not stale_s:
            return super().list(prefix)
        folder, slash, start = prefix.rpartition("/")
        return self._below(folder + slash, start, stale_s)

    def _below(self, folder: str, start: str, stale_s: float) -> Iterator[FileInfo]:
        for name in self._names(folder, stale_s):
            if not name.startswith(start) or name == f"{TEMP_FOLDER}/":
                continue
            if name.endswith("/"):
                yield from self._below(folder + name, "", stale_s)
            elif (info := super().stat(folder + name)) is not None:
                yield info

    def _names(self, folder: str, stale_s: float) -> list[str]:
        cached, now_s = self._cached(folder), time.monotonic()
        with suppress(OSError, ValueError):
            at_s, names = json.loads(cached.read_text())
            if now_s - at_s < stale_s:
                return names  # type: ignore[no-any-return]
        names = []
        with suppress(FileNotFoundError), _scandir(self._root.path / folder) as entries:
            names = sorted(f"{e.name}/" if e.is_dir() else e.name for e in entries)
        part = cached.with_suffix(f".{uuid4().hex}")
        part.write_text(json.dumps([now_s, names]))
        part.replace(cached)
        return names

    def _cached(self, folder: str) -> Path:
        process = _HERE[0]
        return process.folder / "hosts" / process.host / sha256(str(self._root.path / folder).encode()).hexdigest()[:24]

    def _wrote(self, path: str, action: Callable[[], R]) -> R:
        """A client that writes into a directory looks at that directory anew, and so at those above that it had to make."""
        try:
            return self._disturbed("write", path, action)
        finally:
            if _HERE[0].disturbances.stale_s:
                while path:
                    path = path.rpartition("/")[0]
                    self._cached(f"{path}/" if path else "").unlink(missing_ok=True)

    # --- stops and deaths -------------------------------------------------------------------------------------------------------

    def _disturbed(self, name: str, path: str, action: Callable[[], R]) -> R:
        process, how = _HERE[0], _HERE[0].disturbances
        with process.lock:
            process.calls += 1
            number = process.calls
        if number == how.jump_at:
            process.skew_s += how.jump_s
        if number == how.stop_at:
            os.kill(os.getpid(), signal.SIGSTOP)
        if number == how.kill_at:
            with (process.folder / "deaths").open("a") as file:
                file.write(
                    f"{process.number}: {name} {path} of {self.url}, {'after' if how.kill_after else 'before'}\n"
                )
            if how.kill_after:
                action()
            os.kill(os.getpid(), signal.SIGKILL)
        return action()

    def _note(self, path: str, data: bytes) -> None:
        if path.startswith(JOURNALED):
            note(_HERE[0].folder, self._root.path, path, data)


def note(history: Path, root: Path, path: str, data: bytes) -> None:
    """Keeps bytes that may become the file."""
    folder = _journal_of(history, root, path)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / uuid4().hex).write_bytes(data)


def noted(history: Path, root: Path, path: str) -> list[bytes]:
    """Read the contents that the journal has of a file."""
    return [file.read_bytes() for file in sorted(_journal_of(history, root, path).glob("*"))]


def noted_at_ns(history: Path, root: Path, path: str) -> int | None:
    """Tell when the file system made the first entry of a file in the journal."""
    return min((file.stat().st_ctime_ns for file in _journal_of(history, root, path).glob("*")), default=None)


def _journal_of(history: Path, root: Path, path: str) -> Path:
    return history / "journal" / quote(str(root.relative_to(history)), safe="") / quote(path, safe="")


def drawn(chosen: random.Random, kinds: Any, stale_s: float, skew_s: float) -> Disturbances:
    """Disturbances of one process. ``kinds``: of "kill", "stop", "skew", "stale"."""
    how = Disturbances(stale_s=stale_s if "stale" in kinds else 0.0)
    if "kill" in kinds and chosen.random() < 0.25:
        how.kill_at, how.kill_after = int(chosen.expovariate(1 / 60)) + 1, chosen.random() < 0.5
    if "stop" in kinds and chosen.random() < 0.3:
        how.stop_at = int(chosen.expovariate(1 / 60)) + 1
    if "skew" in kinds:
        how.skew_s = skew_s
        if chosen.random() < 0.2:
            how.jump_at, how.jump_s = chosen.randint(1, 100), chosen.choice([-3600.0, 3600.0])
    return how
