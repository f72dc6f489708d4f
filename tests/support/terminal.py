"""A command in a pseudo-terminal, to which a test types as a person does."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path


class Terminal:
    """A process whose input and output are a pseudo-terminal.

    ``said`` has all output so far, with plain line ends.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], cwd: Path | None = None) -> None:
        self._main, other = pty.openpty()
        self.process = subprocess.Popen(
            command, stdin=other, stdout=other, stderr=other, env={**env, "TERM": "dumb"}, cwd=cwd, close_fds=True
        )
        os.close(other)
        self.said = ""

    def wait_for(self, text: str, *, seconds: float = 60) -> str:
        """Read until ``text`` was said after the last call, and return what was said since."""
        began, until = len(self.said), time.monotonic() + seconds
        while text not in self.said[began:]:
            if time.monotonic() > until or not self._read(until - time.monotonic()):
                raise AssertionError(f"{text!r} was not said:\n{self.said}")
        return self.said[began:]

    def type(self, line: str) -> None:
        os.write(self._main, f"{line}\n".encode())

    def rest(self, *, seconds: float = 60) -> str:
        """Read until the process ends, and return what was said since the last call."""
        began = len(self.said)
        self.end(seconds=seconds)
        return self.said[began:]

    def end(self, *, seconds: float = 60) -> int:
        """Read until the process ends, and return its exit code."""
        until = time.monotonic() + seconds
        while self._read(until - time.monotonic()):
            pass
        return self.process.wait(timeout=max(1, until - time.monotonic()))

    def _read(self, seconds: float) -> bool:
        if not select.select([self._main], [], [], max(0, seconds))[0]:
            return False
        try:
            data = os.read(self._main, 65536)
        except OSError:  # Linux: the other end is closed.
            return False
        self.said += data.decode(errors="replace").replace("\r\n", "\n")
        return bool(data)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._main)
