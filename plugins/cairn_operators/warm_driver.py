"""Start warm drivers: forks of a process that has already imported what every driver needs.

That process is the host process, `python -m cairn.driver.driver_host`. Its module describes the messages on the socket.
The imports of a driver take a second of CPU, a fork takes milliseconds. A host process is started after the second
driver within ten minutes on one machine, so a machine with rare tasks pays nothing. If the host process fails in any
way, the task starts its driver as a normal process.
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

# A task starts a host process (it imports a driver's packages once and forks later drivers) only if two drivers began
# within this many seconds on this machine.
_FOLLOWS_S = 600.0
# Longest path of a host's socket in bytes. A Unix socket's path has at most 107 bytes, and a host first binds a name
# that is up to three bytes longer.
_LONGEST_PATH = 104
# Prefixes of environment variables that Python or a library reads only when it starts. A driver is forked from a host
# process, so drivers that differ in one of these variables need different host processes.
_READ_AT_START = (
    *("PYTHON", "LD_", "MALLOC_", "MKL_", "OMP_", "OPENBLAS_", "NUMEXPR_", "ARROW_", "GRPC_", "SPARK_", "PYSPARK_"),
    *("AIRFLOW_HOME", "HOME", "LANG", "LC_", "VIRTUAL_ENV"),
)


class WarmDriver:
    """A driver that was forked from a host process, which has imported a driver's packages before.

    The class has those members of `subprocess.Popen` that `DriverProcess` uses.
    """

    stdin = None

    def __init__(self, pid: int, connection: socket.socket, lifeline: socket.socket, stdout: IO[bytes]) -> None:
        self.pid = pid
        self.stdout = stdout
        self._connection = connection
        self._lifeline = lifeline
        self._code: int | None = None

    def poll(self) -> int | None:
        return self._await(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._await(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("driver", timeout or 0)
        return code

    def close(self) -> None:
        """Close the sockets to the driver and to the host process from which the driver was forked.

        This ends a driver that still runs. The driver holds the other end of the socket `lifeline`, and has asked the
        kernel to send it SIGKILL when our end closes.
        """
        self._lifeline.close()
        self._connection.close()

    def _await(self, timeout: float | None) -> int | None:
        if self._code is None and select.select([self._connection], [], [], timeout)[0]:
            try:
                code = _number(self._connection)
            except OSError:
                code = None
            # No exit code means that the host process has died. The kernel then kills its drivers with SIGKILL.
            self._code = -signal.SIGKILL if code is None else code
        return self._code


def start_warm(
    module: str, arguments: Sequence[str], *, cwd: Path, environment: Mapping[str, str], private: bytes | None
) -> WarmDriver | None:
    if sys.platform != "linux":
        return None
    try:
        folder = _folder()
        path = folder / f"{_key(cwd, environment)}.sock"
        return _ask(path, module, arguments, cwd, environment, private)
    except (OSError, ValueError, struct.error):
        return None


def start_host_if_it_pays(*, cwd: Path, environment: Mapping[str, str]) -> None:
    """Start a host process for later drivers, if the last two drivers on this machine began within ten minutes.

    The host process (`cairn.driver.driver_host`) imports a driver's packages once and forks later drivers. Call this
    function after a driver was started as a normal process. It never starts two host processes within 30 s. If the path
    of the folder for temporary files is too long for a socket, it starts none. It ignores errors of the file system,
    since the next driver tries again.
    """
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError):
        folder = _folder()
        key = _key(cwd, environment)
        if len(os.fsencode(folder / f"{key}.sock")) > _LONGEST_PATH:
            return
        seen = folder / f"{key}.seen"
        now_s = time.time()
        with seen.open("a+") as file:
            # Several tasks may reach this line at once. The lock, and the pause of 30 s between two starts, let only
            # one of them start a host process. A host process needs seconds for its imports.
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
            host.returncode = 0  # Else `Popen` would warn that the host process is still running when the task ends.


def _two_times(text: str) -> tuple[float, float]:
    """Return (last driver, last host): when the last driver and the last host process started, from a `.seen` file.

    A host process forks drivers. Both times are in seconds since the epoch. They are 0 if the text is empty or
    incomplete, as after a crash or on a full disk.
    """
    try:
        last_s, started_s = map(float, text.split())
    except ValueError:
        return 0.0, 0.0
    return last_s, started_s


def _folder() -> Path:
    """Return the folder with the sockets on which this user's host processes accept requests.

    A host process (`cairn.driver.driver_host`) has imported the packages of a driver, and forks warm drivers. Raise
    `PermissionError` if other users can access the folder.
    """
    folder = Path(tempfile.gettempdir(), f"cairn-warm-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077 or folder.is_symlink():
        raise PermissionError(f"other users can access {folder}")
    return folder


def _worker() -> int:
    """Return the pid of the Airflow worker that runs this task.

    The host process, which forks drivers, gets this pid with each request, and ends when all workers are dead.
    """
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
        with contextlib.suppress(BrokenPipeError), feeding:  # Broken pipe: the driver has already ended.
            feeding.write(private or b"")
        connection.settimeout(None)
        ours.pop_all()
        return WarmDriver(pid, connection, lifeline, stdout)


def _number(connection: socket.socket) -> int | None:
    """Read a pid or an exit code (4 bytes) from the host process; None if the host process closed the connection."""
    data = b""
    while len(data) < 4:
        more = connection.recv(4 - len(data))
        if not more:
            return None
        data += more
    number: int = struct.unpack("!i", data)[0]
    return number
