"""A process that has imported the modules that every driver needs, and forks a driver for each request.

    python -m cairn.driver.driver_host SOCKET WORKER

A forked driver starts in milliseconds. Airflow's operators (`cairn_operators.warm_driver`) start this host when drivers
follow one another on a machine. The host never imports a pipeline and never connects to Spark. Each driver loads its
own pipeline, in its own environment.

A client sends one message per driver over the socket: a length (4 bytes, big-endian), then JSON `{"module",
"arguments", "environment", "cwd", "worker"}`, with three open files: stdin, the file for stdout and stderr, and a
lifeline. `worker` is the process id of the Airflow worker that runs the task. WORKER on the command line is the first
such process.

The host answers with the driver's pid, or with 0 for "start the driver yourself". When the driver has ended, the host
sends its exit code in the form of `subprocess` (4 bytes, signed).

    the task dies        its end of the lifeline closes, and the kernel kills the driver, even a suspended driver
    this host dies       the kernel kills its drivers; their tasks see a killed driver
    this host ends       after its last driver, when an imported file has changed, all workers are dead, or ten minutes
                         have passed without a request
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
import shlex
import signal
import socket
import struct
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from state_backend.values.frozen import frozen

_IDLE_S = 600.0
_MAX_MESSAGE_BYTES = 16 << 20
_PR_SET_PDEATHSIG, _PR_SET_NAME, _F_SETSIG = 1, 15, 10
# Modules whose import takes most of a driver's start. A module that opens a connection or starts a thread when it is
# imported must not be listed here, nor a module of a pipeline.
_NEEDED = (
    "cairn.driver.driver",
    "cairn.operations.intervals.run_intervals",
    "cairn.operations.validation.validate_checkpoint",
    "google_crc32c",
    "great_expectations.expectations",
    "pandas",
    "pyarrow.parquet",
    "pyspark.sql.connect.functions.builtin",
    "pyspark.sql.connect.session",
    "pyspark.sql.pandas.conversion",
)
# Packages that pipelines often import. An attempt records their versions, so the host reads them once for all drivers.
_OFTEN_IMPORTED = ("google_crc32c", "great_expectations", "numpy", "pandas", "pyarrow")


@frozen
class Request:
    """A driver to start."""

    module: str
    arguments: list[str]
    environment: dict[str, str]
    cwd: str
    worker: int  # Process id of the Airflow worker that runs the task.
    task: int  # Process id of the Airflow task that asks for the driver.
    files: tuple[int, int, int]  # Descriptors of stdin, of the file for stdout and stderr, and of the lifeline.


def main() -> None:
    """Serve requests until the host is no longer needed.

    In a driver, which is a fork of this process, run the requested module and end with its exit code.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for module in _NEEDED:
        importlib.import_module(module)
    _compute_once()
    request = _Host(sys.argv[1], int(sys.argv[2]), libc).serve()
    if request is not None:
        _become(request, libc)


def _compute_once() -> None:
    """Compute values once that every driver would compute otherwise: a forked driver inherits them.

    They are the codecs' adapters, the parser of the command line, the version of Cairn's sources, and the versions of
    packages that pipelines often import.
    """
    from cairn.driver.driver import parser
    from cairn.shipping.distributions import distribution_of
    from cairn.shipping.ship_processor import runtime_version
    from cairn.shipping.user_modules import is_runtime
    from state_backend.formats.record_codec import build_adapters

    build_adapters()
    runtime_version()
    is_runtime(__file__)
    parser()
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        often = name.partition(".")[0] in _OFTEN_IMPORTED and name.count(".") < 2
        if often and spec is not None and spec.has_location and spec.origin is not None:
            distribution_of(spec.origin, name)


class _Host:
    """Server that listens on the socket, forks drivers, and reports their exit codes."""

    def __init__(self, path: str, worker: int, libc: Any) -> None:
        self._libc = libc
        self._path = Path(path)
        self._files = watched_files()
        self._selector = selectors.DefaultSelector()
        self._drivers: dict[int, tuple[int, socket.socket]] = {}  # Pid and connection of each driver, by its pidfd.
        self._ended: dict[int, socket.socket] = {}  # Connections of ended drivers that are not reaped yet, by pid.
        self._workers: dict[int, int] = {}  # The pidfd of each Airflow worker, by its pid.
        self._watch(worker)
        self._listener: socket.socket | None = socket.socket(socket.AF_UNIX)
        # The socket gets its final name only after `listen`: a client that sees the file must get an answer.
        making = self._path.with_suffix(f".{os.getpid()}")
        self._listener.bind(str(making))
        self._listener.listen(64)
        making.replace(self._path)
        self._inode = self._path.stat().st_ino
        self._selector.register(self._listener, selectors.EVENT_READ)

    def serve(self) -> Request | None:
        """Answer requests until this host process is no longer needed. Fork a driver process for each request.

        Because of the forks, this method returns once in the host (None) and once in each driver (its request).
        """
        # Freeze all present objects: the garbage collector of a driver then skips them.
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
        """Accept one request, and fork a driver process for it. Return the request in the driver, and None in the host.

        Errors concern this request only, such as a dead task or an invalid message. They are logged.
        """
        assert self._listener is not None
        connection, _ = self._listener.accept()
        with contextlib.ExitStack() as closing:
            closing.enter_context(connection)
            connection.settimeout(5)
            try:
                task, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
                if user != os.getuid():
                    return None
                request = _receive(connection, task)
                for file in request.files:
                    closing.callback(os.close, file)
                if any(_stamp(file) != stamp for file, stamp in self._files.items()):
                    self._retire()  # An imported file has changed, and the driver must run the new code.
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
                # The host ties the driver to its task. A driver that is suspended (SIGSTOP) before its first step could
                # not tie itself. If the task was killed then, the driver would outlive it.
                _tie_to(request.files[2], pid)
                pidfd = os.pidfd_open(pid)
                print(f"driver {pid} of task {task}", flush=True)
                self._drivers[pidfd] = (pid, connection)
                self._selector.register(pidfd, selectors.EVENT_READ, partial(self._tell, pidfd))
                connection.sendall(struct.pack("!i", pid))
            except (OSError, ValueError) as error:
                # An already forked driver needs no cleanup here. If its Airflow task is dead, the task's end of the
                # socket `lifeline` is closed, and the kernel kills the driver (`_tie_to`).
                print(f"a request failed: {error!r}", flush=True)
            if any(connection is kept for _, kept in self._drivers.values()):
                closing.pop_all()
                for file in request.files:
                    os.close(file)
        return None

    def _watch(self, worker: int) -> None:
        """Watch the process of an Airflow worker. The host ends after the last watched worker."""
        if worker not in self._workers:
            pidfd = os.pidfd_open(worker)
            self._workers[worker] = pidfd
            self._selector.register(pidfd, selectors.EVENT_READ, partial(self._forget, worker))

    def _forget(self, worker: int) -> None:
        pidfd = self._workers.pop(worker)
        self._selector.unregister(pidfd)
        os.close(pidfd)

    def _tell(self, pidfd: int) -> None:
        """Send the exit code of a driver that has ended to the Airflow task that asked for the driver.

        The host reaps the driver (`waitpid`) only after the task has closed its connection to the host. Before that,
        the task kills the remaining processes of the driver's process group. A driver that is not reaped keeps its pid
        and process group, so the task can't kill a new process by mistake.
        """
        pid, connection = self._drivers.pop(pidfd)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert found is not None
        code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        with contextlib.suppress(OSError):
            connection.sendall(struct.pack("!i", code))
        # The task now kills the remaining processes of the driver's group and closes its connection. Then `_reap` runs.
        self._ended[pid] = connection
        self._selector.register(connection, selectors.EVENT_READ, partial(self._reap, pid))

    def _reap(self, pid: int) -> None:
        connection = self._ended.pop(pid)
        self._selector.unregister(connection)
        connection.close()
        os.waitpid(pid, 0)

    def _retire(self) -> None:
        """Stop accepting requests, and remove the socket's file."""
        if self._listener is None:
            return
        self._selector.unregister(self._listener)
        with contextlib.suppress(OSError):
            if self._path.stat().st_ino == self._inode:  # Else it is the file of a newer host process.
                self._path.unlink()
        self._listener.close()
        self._listener = None

    def _leave(self, connection: socket.socket) -> None:
        """Close the host's sockets and process descriptors in a forked driver process, which inherited them."""
        connection.close()
        for other in (*(kept for _, kept in self._drivers.values()), *self._ended.values()):
            other.close()
        for pidfd in (*self._drivers, *self._workers.values()):
            os.close(pidfd)
        if self._listener is not None:
            self._listener.close()
        self._selector.close()


def watched_files() -> dict[str, tuple[int, int] | None]:
    """Return the files of all imported modules and of Cairn, each with its modification time (ns) and size (bytes).

    The folders with installed packages are in the result too, because the host remembers the packages' versions. A file
    that no longer exists, or that this process can't access, has None.
    """
    from cairn.shipping.distributions import listed_folders
    from cairn.shipping.user_modules import runtime_sources

    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    # The host has computed the version of Cairn from all its sources, imported or not.
    files |= {file for _, file, _ in runtime_sources()} | listed_folders()
    return {file: _stamp(file) for file in files if isinstance(file, str)}


def _stamp(file: str) -> tuple[int, int] | None:
    # The host checks about 3,100 files before it starts each driver. `Path.stat` would take twice as long.
    try:
        found = os.stat(file)  # noqa: PTH116
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _receive(connection: socket.socket, task: int) -> Request:
    """Read a request of the Airflow task `task` (a process id). Raise `ValueError` for any other message."""
    # `socket.recv_fds` would not set close-on-exec, and a process that starts at the same time would inherit the files.
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
        return Request(**said, task=task, files=(files[0], files[1], files[2]))
    except (TypeError, ValueError) as error:
        for file in files:
            os.close(file)
        raise ValueError(str(error)) from None


def _become(request: Request, libc: Any) -> None:
    """Run a driver in this forked process as if Python had been started for it."""
    os.setsid()
    _set_title(request)
    libc.prctl(_PR_SET_NAME, b"cairn-driver", 0, 0, 0)
    stdin, output, lifeline = request.files
    # `_tie_to` makes the kernel kill this driver when the task dies or closes its end of `lifeline`. The host calls
    # `_tie_to` too, but the host may be suspended before its call. The task waits five seconds for the host's answer,
    # then closes its end and starts another driver. Without this call, both drivers would then run.
    _tie_to(lifeline, os.getpid())
    for file, number in ((stdin, 0), (output, 1), (output, 2)):
        os.dup2(file, number)
    os.close(stdin)
    os.close(output)
    os.environ.clear()
    os.environ.update(request.environment)
    time.tzset()
    os.chdir(request.cwd)
    # Without a new seed all drivers of this host would draw the same random numbers from NumPy. Python's own `random`
    # module needs no call: it reseeds after a fork.
    import numpy

    numpy.random.seed()
    importlib.invalidate_caches()
    sys.argv = [request.module, *request.arguments]
    # `run_module` imports the module again as `__main__`, and would warn that the module is imported already.
    sys.modules.pop(request.module, None)
    runpy.run_module(request.module, run_name="__main__", alter_sys=True)


def _set_title(request: Request) -> None:
    """Make `ps` show this forked process as a driver, and no longer with the command line of the host process."""
    # Airflow depends on setproctitle. Without Airflow, `ps` keeps showing the host's command line.
    with contextlib.suppress(ImportError):
        from setproctitle import setproctitle

        from state_backend.values.hide_secrets import hide

        command = shlex.join([sys.executable, "-m", request.module, *request.arguments])
        setproctitle(hide(f"cairn-driver of task {request.task}: {command}"))


def _tie_to(lifeline: int, pid: int) -> None:
    """Make the kernel kill a driver, even a suspended one, when the Airflow task that asked for the driver dies."""
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, pid)
    fcntl.fcntl(lifeline, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        if os.read(lifeline, 1) == b"":  # The task closed its end before `fcntl` took effect: kill the driver now.
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
