"""Run a module of Cairn as a process whose time, memory and output are limited.

The API server itself opens no RocksDB store. So work that needs a store runs in a process of its own.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cairn_operators.driver_process import repo_root
from state_backend.adapters.die_with_parent import die_with_parent

_OUT_OF_MEMORY = (
    "MemoryError",
    "bad_alloc",
    "malloc of size",
    "Memory allocation",
    "Cannot allocate",
    "start new thread",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A process that has ended."""

    # Exit code; negative for the signal that killed the process; None if it took too long and was killed.
    code: int | None
    # At most the first `said_bytes + 1` bytes of the output. If it is longer than `said_bytes`, the output was cut.
    said: bytes
    errors: str
    seconds: float

    @property
    def out_of_memory(self) -> bool:
        """Return True if the process probably ended because it reached its limit of memory.

        Any signal counts, because native code aborts if it can't allocate memory.
        """
        return self.code is not None and (self.code < 0 or any(words in self.errors for words in _OUT_OF_MEMORY))


def run_module(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    seconds: float,
    memory_bytes: int,
    said_bytes: int,
    given: bytes = b"",
) -> Ended:
    """Run `python -m` with these arguments."""
    root, began_s = repo_root(), time.monotonic()
    path = os.pathsep.join(filter(None, [str(root / "jobs"), str(root), os.environ.get("PYTHONPATH")]))
    # Each library gets one thread and uses the common heap. Otherwise memory that libraries reserve without using it
    # would count against the memory limit.
    slim = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}
    # The process writes its output to files, and the API server reads only the first bytes. With pipes, the API server
    # would have to read all output, however large.
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as errors, tempfile.TemporaryFile() as input_:
        input_.write(given)
        input_.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=root,
            env={**os.environ, **slim, **environment, "PYTHONPATH": path},
            stdin=input_,
            stdout=said,
            stderr=errors,
            start_new_session=True,
            preexec_fn=_limited(memory_bytes),  # noqa: PLW1509  system calls only, loaded before the fork
        )
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = None
        texts = []
        for file in (said, errors):
            file.seek(0)
            texts.append(file.read(said_bytes + 1))
    return Ended(code=code, said=texts[0], errors=texts[1].decode(errors="replace"), seconds=time.monotonic() - began_s)


def _limited(memory_bytes: int) -> Callable[[], None]:
    dies = die_with_parent(signal.SIGKILL)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.nice(5)
        if dies is not None:
            dies()

    return limit
