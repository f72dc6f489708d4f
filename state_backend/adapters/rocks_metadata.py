"""RocksDB's metadata in memory while a store is open.

Opening a store writes a new MANIFEST, CURRENT and OPTIONS and syncs each of them and their folder: most of the time that a restore
takes beside its transfer, and on a busy disk much more. A store is durable nowhere before it is captured, so that nothing is lost
if these files are. They go into a folder of their own in memory, and back beside the state when it is closed:

    <memory>/cairn-<pid>-<random>/CURRENT, MANIFEST-n, LOCK, ...    what is not state; RocksDB holds a lock on LOCK

A killed process leaves its folder. Whoever opens a store next removes those whose lock nobody holds; it asks no process by its id, since
containers may share the memory and not the ids.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

_PREFIX = "cairn-"
_NEEDED_BYTES = 64 * 1024 * 1024
_NO_LOCK_MIN_AGE_S = 3600.0


def borrow_metadata(directory: Path, memory: str | None) -> Path | None:
    """A new folder in ``memory`` with all that lies in ``directory`` and is no state, which is moved there; None if there is no such
    memory, or less than 64 MiB left of it."""
    if memory is None:
        return None
    try:
        found = os.statvfs(memory)
        if found.f_bavail * found.f_frsize < _NEEDED_BYTES:
            return None
        _remove_abandoned(Path(memory))
        directory.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=memory))
    except OSError:
        return None
    try:
        for name in ("CURRENT", "IDENTITY", "rocksdict-config.json"):
            with suppress(FileNotFoundError):
                shutil.move(directory / name, folder / name)
        for manifest in directory.glob("MANIFEST-*"):
            shutil.move(manifest, folder / manifest.name)
    except OSError:
        return_metadata(folder, directory)
        return None
    return folder


def return_metadata(folder: Path, directory: Path) -> None:
    """Moves what is needed to open the state again back beside it, unless that is gone."""
    with suppress(OSError):
        for path in folder.iterdir():
            if path.name in ("CURRENT", "IDENTITY", "rocksdict-config.json") or path.name.startswith("MANIFEST-"):
                shutil.move(path, directory / path.name)
    shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(memory: Path) -> None:
    # Not our own: whoever opens and closes a file gives up all locks that the process holds on it.
    own = f"{_PREFIX}{os.getpid()}-"
    with suppress(OSError):
        for folder in memory.glob(f"{_PREFIX}*-*"):
            if not folder.name.startswith(own) and _is_abandoned(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    try:
        if folder.stat().st_uid != os.geteuid():
            return False
        with (folder / "LOCK").open("r+b") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:  # just being made, or by a process that was killed there
        with suppress(OSError):
            return folder.stat().st_mtime < time.time() - _NO_LOCK_MIN_AGE_S
        return False
    except OSError:
        return False
    return True
