"""Drivers from a process that has imported what they need (``python -m cairn.driver.driver_host``), which says what holds of it.

Python takes a second of CPU for the imports of a driver; a fork of that process takes milliseconds. It is started behind the second driver
within ten minutes on a host, so that a task that has its machine for itself pays nothing. Whatever is wrong with it, the driver is started as ever.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

_FOLLOWS_S = 600.0
# Read when a program or a library starts, so that another value needs another process.
_READ_AT_START = (
    *("PYTHON", "LD_", "MALLOC_", "MKL_", "OMP_", "OPENBLAS_", "NUMEXPR_", "ARROW_", "GRPC_", "SPARK_", "PYSPARK_"),
    *("AIRFLOW_HOME", "HOME", "LANG", "LC_", "VIRTUAL_ENV"),
)


class WarmDriver:
    """A driver that somebody else forked; what `subprocess.Popen` offers of a child, as far as it is needed here."""

    stdin = None

    def __init__(self, pid: int, connection: socket.socket, lifeline: socket.socket, stdout: IO[bytes]) -> None:
        self.pid = pid
        self.stdout = stdout
        self._connection = connection
        self._lifeline = lifeline
        self._code: int | None = None

    def poll(self) -> int | None:
        """Its code if it has ended."""
        return self._await(0)

    def wait(self, timeout: float | None = None) -> int:
        """Its code. Raises: subprocess.TimeoutExpired."""
        code = self._await(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("driver", timeout or 0)
        return code

    def close(self) -> None:
        """Ends it, if it has not ended."""
        self._lifeline.close()
        self._connection.close()

    def _await(self, timeout: float | None) -> int | None:
        if self._code is None and select.select([self._connection], [], [], timeout)[0]:
            try:
                code = _number(self._connection)
            except OSError:
                code = None
            # The host is gone without a word, and its drivers with it.
            self._code = -signal.SIGKILL if code is None else code
        return self._code


def start_warm(
    module: str, arguments: Sequence[str], *, cwd: Path, environment: Mapping[str, str], private: bytes | None
) -> WarmDriver | None:
    """A driver, if there is a host for this one's environment; None: start one yourself. ``private``: what it reads on its stdin."""
    if sys.platform != "linux":
        return None
    try:
        folder = _folder()
        path = folder / f"{_key(cwd, environment)}.sock"
        return _ask(path, module, arguments, cwd, environment, private)
    except (OSError, ValueError, struct.error):
        return None


def start_host_if_it_pays(*, cwd: Path, environment: Mapping[str, str]) -> None:
    """Called behind the start of a driver that no host could make. Errors are nobody's concern: it is tried again with the next driver."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError):
        folder = _folder()
        key = _key(cwd, environment)
        seen = folder / f"{key}.seen"
        now_s = time.time()
        with seen.open("a+") as file:
            # One starts it, and while it is importing nobody else does.
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            last_s, started_s = _two_times(file.read())
            start = now_s - last_s < _FOLLOWS_S and now_s - started_s > 30
            file.seek(0)
            file.truncate()
            file.write(f"{now_s} {now_s if start else started_s}")
        if not start:
            return
        with (folder / f"{key}.log").open("wb") as log:
            command = [
                sys.executable,
                "-m",
                "cairn.driver.driver_host",
                str(folder / f"{key}.sock"),
                str(_worker()),
            ]
            host = subprocess.Popen(
                command,
                cwd=cwd,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            host.returncode = 0  # not ours to wait for: it outlives this task


def _two_times(text: str) -> tuple[float, float]:
    """When a driver was last started here, and a host; long ago, if a stop or a full disk left half a line."""
    try:
        last_s, started_s = map(float, text.split())
    except ValueError:
        return 0.0, 0.0
    return last_s, started_s


def _folder() -> Path:
    """This user's, and nobody else's. Raises: PermissionError if somebody else made it."""
    folder = Path(tempfile.gettempdir(), f"cairn-warm-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077 or folder.is_symlink():
        raise PermissionError(f"{folder} is not this user's alone")
    return folder


def _worker() -> int:
    """The process that runs this task: while it lives there may be another."""
    return os.getppid()


def _key(cwd: Path, environment: Mapping[str, str]) -> str:
    read = sorted((name, value) for name, value in environment.items() if name.startswith(_READ_AT_START))
    said = json.dumps([sys.executable, sys.prefix, str(cwd), read])
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def _ask(
    path: Path,
    module: str,
    arguments: Sequence[str],
    cwd: Path,
    environment: Mapping[str, str],
    private: bytes | None,
) -> WarmDriver | None:
    message = json.dumps(
        {
            "module": module,
            "arguments": list(arguments),
            "environment": dict(environment),
            "cwd": str(cwd),
            "worker": _worker(),
        }
    ).encode()
    with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
        connection = ours.enter_context(socket.socket(socket.AF_UNIX))
        connection.settimeout(5)
        connection.connect(str(path))
        _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user != os.getuid():
            return None
        lifeline, end = socket.socketpair()
        ours.enter_context(lifeline)
        theirs.enter_context(end)
        read, write = os.pipe()
        stdout = ours.enter_context(os.fdopen(read, "rb", buffering=0))
        theirs.callback(os.close, write)
        stdin, feed = os.pipe()
        theirs.callback(os.close, stdin)
        feeding = ours.enter_context(os.fdopen(feed, "wb"))
        socket.send_fds(connection, [struct.pack("!I", len(message))], [stdin, write, end.fileno()])
        connection.sendall(message)
        pid = _number(connection)
        if not pid:
            return None
        theirs.close()
        with contextlib.suppress(BrokenPipeError), feeding:  # it ended at once: its output says why
            feeding.write(private or b"")
        connection.settimeout(None)
        ours.pop_all()
        return WarmDriver(pid, connection, lifeline, stdout)


def _number(connection: socket.socket) -> int | None:
    """None if the host is gone."""
    data = b""
    while len(data) < 4:
        more = connection.recv(4 - len(data))
        if not more:
            return None
        data += more
    number: int = struct.unpack("!i", data)[0]
    return number
