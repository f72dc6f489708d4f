"""A process that has imported what every driver needs, and forks one for each that asks: a driver starts in milliseconds then.

    python -m cairn.driver.driver_host SOCKET WORKER

Airflow's operators start it (``cairn_operators.warm_driver``), once drivers follow one another on a host. It never imports a pipeline, and
never speaks to Spark: a driver loads its own, with its own environment. Over the socket comes one message per driver: a length (4 bytes,
big-endian) and JSON ``{"module", "arguments", "environment", "cwd", "worker"}``, with three files: stdin, what stdout and stderr are to be,
and a lifeline. ``worker`` is the process that runs the task, WORKER the first of them. Back go the pid, 0 for "start one yourself", and when the driver has ended its code as ``subprocess`` has it (4 bytes, signed).

    the task that asked is gone   its end of the lifeline closes, and the kernel kills the driver, also one that is stopped
    this process is gone          the kernel kills its drivers; their tasks see a killed driver
    a file that it imported has changed, all workers that asked are gone, or nobody asked for ten minutes: it ends, after its drivers
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

_IDLE_S = 600.0
_MAX_MESSAGE_BYTES = 16 << 20
_PR_SET_PDEATHSIG, _PR_SET_NAME, _F_SETSIG = 1, 15, 10
# What drivers spend their start on. No module of a pipeline, and nothing that opens a connection or starts a thread when imported.
_NEEDED = (
    "cairn.driver.driver",
    "cairn.operations.run_intervals",
    "cairn.operations.validate",
    "google_crc32c",
    "great_expectations.expectations",
    "pandas",
    "pyarrow.parquet",
    "pyspark.sql.connect.functions.builtin",
    "pyspark.sql.connect.session",
    "pyspark.sql.pandas.conversion",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A driver to start. ``files``: its stdin, its output, its lifeline."""

    module: str
    arguments: list[str]
    environment: dict[str, str]
    cwd: str
    worker: int
    files: tuple[int, int, int]


def main() -> None:
    """Serves until it is needed no more. In a driver, which is a fork of this process: runs that, and ends with its code."""
    libc = ctypes.CDLL(None, use_errno=True)
    for module in _NEEDED:
        importlib.import_module(module)
    request = _Host(sys.argv[1], int(sys.argv[2]), libc).serve()
    if request is not None:
        _become(request, libc)


class _Host:
    def __init__(self, path: str, worker: int, libc: Any) -> None:
        self._libc = libc
        self._path = Path(path)
        self._files = imported_files()
        self._selector = selectors.DefaultSelector()
        self._drivers: dict[int, tuple[int, socket.socket]] = {}  # by pidfd
        self._ended: dict[int, socket.socket] = {}  # by pid: not reaped yet
        self._workers: dict[int, int] = {}  # pidfd by pid
        self._watch(worker)
        self._listener: socket.socket | None = socket.socket(socket.AF_UNIX)
        # Under its last name only once it listens: whoever sees the file is answered.
        making = self._path.with_suffix(f".{os.getpid()}")
        self._listener.bind(str(making))
        self._listener.listen(64)
        making.replace(self._path)
        self._inode = self._path.stat().st_ino
        self._selector.register(self._listener, selectors.EVENT_READ)

    def serve(self) -> Request | None:
        """None when this process has nothing left to do; in a new driver what that is to run."""
        # The collector of a driver need not look at what is here already.
        gc.collect()
        gc.freeze()
        asked_s = time.monotonic()
        while self._listener is not None or self._drivers or self._ended:
            for key, _ in self._selector.select(timeout=_IDLE_S):
                if key.fileobj is self._listener:
                    asked_s = time.monotonic()
                    request = self._accept()
                    if request is not None:
                        return request
                else:
                    key.data()
            idle = not self._drivers and time.monotonic() - asked_s >= _IDLE_S
            if idle or not self._workers:
                self._retire()
        return None

    def _accept(self) -> Request | None:
        """In a new driver what that is to run; else None. Errors are of this one request: a task that is gone, or no request at all."""
        assert self._listener is not None
        connection, _ = self._listener.accept()
        with contextlib.ExitStack() as closing:
            closing.enter_context(connection)
            connection.settimeout(5)
            try:
                task, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
                if user != os.getuid():
                    return None
                request = _receive(connection)
                for file in request.files:
                    closing.callback(os.close, file)
                if self._files != {file: _stamp(file) for file in self._files}:
                    self._retire()  # an upgrade, or an edit of Cairn itself: a driver runs what is there now
                    connection.sendall(struct.pack("!i", 0))
                    return None
                self._watch(request.worker)
                parent = os.getpid()
                pid = os.fork()
                if pid == 0:
                    closing.pop_all()
                    self._leave(connection)
                    self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                    if os.getppid() != parent:
                        os._exit(1)
                    return request
                # The host ties the driver to its task. A driver that is paused (SIGSTOP) before its first step could not do so, and
                # would outlive a task that is killed then.
                _tie_to(request.files[2], pid)
                pidfd = os.pidfd_open(pid)
                print(f"driver {pid} of task {task}", flush=True)
                self._drivers[pidfd] = (pid, connection)
                self._selector.register(pidfd, selectors.EVENT_READ, partial(self._tell, pidfd))
                connection.sendall(struct.pack("!i", pid))
            except (OSError, ValueError) as error:
                # A driver that was forked is killed by its lifeline, if its task is gone.
                print(f"a request came to nothing: {error!r}", flush=True)
            if any(connection is kept for _, kept in self._drivers.values()):
                closing.pop_all()
                for file in request.files:
                    os.close(file)
        return None

    def _watch(self, worker: int) -> None:
        """Raises: ProcessLookupError if it is gone, and so is its task."""
        if worker not in self._workers:
            pidfd = os.pidfd_open(worker)
            self._workers[worker] = pidfd
            self._selector.register(pidfd, selectors.EVENT_READ, partial(self._forget, worker))

    def _forget(self, worker: int) -> None:
        pidfd = self._workers.pop(worker)
        self._selector.unregister(pidfd)
        os.close(pidfd)

    def _tell(self, pidfd: int) -> None:
        """A driver has ended. Its task hears so before it is reaped: until then nobody else has its pid, nor the group of that number."""
        pid, connection = self._drivers.pop(pidfd)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert found is not None
        code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        with contextlib.suppress(OSError):
            connection.sendall(struct.pack("!i", code))
        # Until the task has ended what the driver left in its group, and hangs up.
        self._ended[pid] = connection
        self._selector.register(connection, selectors.EVENT_READ, partial(self._reap, pid))

    def _reap(self, pid: int) -> None:
        connection = self._ended.pop(pid)
        self._selector.unregister(connection)
        connection.close()
        os.waitpid(pid, 0)

    def _retire(self) -> None:
        """From now on nobody is answered."""
        if self._listener is None:
            return
        self._selector.unregister(self._listener)
        with contextlib.suppress(OSError):
            if self._path.stat().st_ino == self._inode:  # else it is another host's by now
                self._path.unlink()
        self._listener.close()
        self._listener = None

    def _leave(self, connection: socket.socket) -> None:
        """In a driver: nothing of the host stays open."""
        connection.close()
        for other in (*(kept for _, kept in self._drivers.values()), *self._ended.values()):
            other.close()
        for pidfd in (*self._drivers, *self._workers.values()):
            os.close(pidfd)
        if self._listener is not None:
            self._listener.close()
        self._selector.close()


def imported_files() -> dict[str, tuple[int, int] | None]:
    """The files of all modules that are imported, and when and how long each was: `_stamp`."""
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    return {file: _stamp(file) for file in files if isinstance(file, str)}


def _stamp(file: str) -> tuple[int, int] | None:
    try:
        found = Path(file).stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _receive(connection: socket.socket) -> Request:
    """Raises: ValueError for what is no request; OSError."""
    # Not socket.recv_fds: that would let other processes that are started at this moment inherit them.
    data, messages, _, _ = connection.recvmsg(
        4, socket.CMSG_SPACE(3 * array.array("i").itemsize), socket.MSG_CMSG_CLOEXEC
    )
    files = array.array("i")
    for level, kind, content in messages:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            files.frombytes(content[: len(content) - len(content) % files.itemsize])
    try:
        if len(data) != 4 or len(files) != 3:
            raise ValueError(f"{len(data)} bytes and {len(files)} files")
        (length,) = struct.unpack("!I", data)
        if length > _MAX_MESSAGE_BYTES:
            raise ValueError(f"{length} bytes")
        with connection.makefile("rb") as stream:
            said = json.loads(stream.read(length))
        return Request(**said, files=(files[0], files[1], files[2]))
    except (TypeError, ValueError) as error:
        for file in files:
            os.close(file)
        raise ValueError(str(error)) from None


def _become(request: Request, libc: Any) -> None:
    """Runs the driver in this process, as if Python had been started for it."""
    os.setsid()
    libc.prctl(_PR_SET_NAME, b"cairn-driver", 0, 0, 0)
    stdin, output, lifeline = request.files
    # The driver ties itself too: the host may be paused before that step, and the task waits for the host for only five seconds.
    _tie_to(lifeline, os.getpid())
    for file, number in ((stdin, 0), (output, 1), (output, 2)):
        os.dup2(file, number)
    os.close(stdin)
    os.close(output)
    os.environ.clear()
    os.environ.update(request.environment)
    time.tzset()
    os.chdir(request.cwd)
    # Not the random numbers that every other driver of this host has. Python's own see to that.
    import numpy

    numpy.random.seed()
    importlib.invalidate_caches()
    sys.argv = [request.module, *request.arguments]
    # Of what is imported a new one, as __main__; else Python warns of it.
    sys.modules.pop(request.module, None)
    runpy.run_module(request.module, run_name="__main__", alter_sys=True)


def _tie_to(lifeline: int, pid: int) -> None:
    """Have the kernel kill a driver when its task's end of the lifeline is closed, whatever state the driver is in then."""
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, pid)
    fcntl.fcntl(lifeline, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        if os.read(lifeline, 1) == b"":  # closed before the kernel was told
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
