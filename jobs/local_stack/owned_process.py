"""Long-running child processes that never outlive the program that started them."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from state_backend.adapters.die_with_parent import die_with_parent
from state_backend.values.environment import Variable

_claimed_ports: set[int] = set()


class Server(ABC):
    """A server process that runs during a `with` block."""

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def wait_until_ready(self) -> None: ...

    @abstractmethod
    def stop(self) -> None:
        """Stop the server and all processes that it started."""

    def __enter__(self) -> Self:
        try:
            self.start()
            self.wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


class OwnedProcesses:
    """Child processes that share one value of the variable CAIRN_OWNER. `stop` ends them and all their descendants.

    Start the children from a thread that lives as long as the children should: the kernel ends a child when the thread
    that started it ends.
    """

    def __init__(self, log_dir: Path) -> None:
        self.log_dir = log_dir
        self.owner = uuid.uuid4().hex
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._sessions: set[int] = set()

    def start(self, name: str, command: Sequence[str], *, env: Mapping[str, str], cwd: Path, **user: Any) -> None:
        """Start a child whose output goes to `<log_dir>/<name>.log`.

        The output goes to a file, because a pipe without a reader would block the child. The method adds the variable
        CAIRN_OWNER to the child's environment, by which `pids` finds the child and its descendants.
        """
        self.log_dir.mkdir(parents=True, exist_ok=True)
        with self.log_path(name).open("wb") as log:
            self._children[name] = subprocess.Popen(
                command,
                cwd=cwd,
                # Only this user may read Airflow's database, logs and state.
                umask=0o077,
                env={**env, Variable.OWNER: self.owner},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent(signal.SIGTERM),  # noqa: PLW1509  one system call, loaded before the fork
                **user,
            )

        self._sessions.add(self._children[name].pid)

    def pids(self) -> Iterator[int]:
        """Yield the ids of all running children and descendants. On systems other than Linux, it yields nothing.

        A process belongs to this object in one of three cases: its environment has this object's value of the variable
        CAIRN_OWNER, it is in the session of a child, or its parent belongs to this object. Each case alone misses some
        processes. Airflow's workers and forked drivers write their title over the memory that /proc shows as their
        environment, and Spark's drivers have sessions of their own.
        """
        mark = f"{Variable.OWNER}={self.owner}".encode()
        ours: set[int] = set()
        others: dict[int, int] = {}  # Process id of the parent, by the process id of the child.
        for folder in Path("/proc").glob("[0-9]*"):
            # If /proc/<pid> can't be read, the process belongs to another user or has just ended. Skip it.
            with contextlib.suppress(OSError):
                state, parent, _, session = (folder / "stat").read_text().rsplit(")", 1)[1].split()[:4]
                if state == "Z":
                    continue
                pid = int(folder.name)
                others[pid] = int(parent)
                if int(session) in self._sessions or mark in (folder / "environ").read_bytes().split(b"\0"):
                    ours.add(pid)
        yield from ours
        while found := {pid for pid, parent in others.items() if parent in ours} - ours:
            ours |= found
            yield from found

    def log_path(self, name: str) -> Path:
        return self.log_dir / f"{name}.log"

    def check_alive(self) -> None:
        for name, child in self._children.items():
            if child.poll() is not None:
                tail = self.log_path(name).read_text(errors="replace")[-3000:]
                raise RuntimeError(f"{name} ended with code {child.returncode}; the end of its log:\n{tail}")

    def wait(self, name: str) -> int:
        """Wait for a child that ends by itself, and return its exit code. `check_alive` no longer checks this child."""
        return self._children.pop(name).wait()

    def stop(self, *, grace_s: float = 20, signal_number: int = signal.SIGTERM) -> None:
        """Send a signal to the children. After the grace time, send SIGKILL to all processes that still run."""
        for child in self._children.values():
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signal_number)
        deadline_s = time.monotonic() + grace_s
        for child in self._children.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, deadline_s - time.monotonic()))
        while left := list(self.pids()):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        for child in self._children.values():
            child.wait()
        self._children.clear()


def python_path(*folders: Path) -> str:
    """Return a `PYTHONPATH` with these folders first, followed by the `PYTHONPATH` of this process."""
    return os.pathsep.join(filter(None, [*map(str, folders), os.environ.get("PYTHONPATH")]))


def command_line(pid: int) -> list[str]:
    """Return the arguments of a process; empty if the process has ended."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0")
    except OSError:
        return []
    return words.split("\0") if words else []


def claim_port(preferred: int = 0) -> int:
    """Return a port of the loopback interface, and keep other Cairn processes away from it until this process ends.

    A server binds its port seconds after its parent chose the port. Without a claim, two demos that start together
    could choose the same port. Then the second server would fail to start, or its parent would talk to the server of
    the first demo. `preferred`: The port to return if it is free; 0: any port.
    """
    while not _claim(port := free_port(preferred)):
        preferred = 0
    return port


def free_port(preferred: int = 0) -> int:
    """Return a port of the loopback interface that is free now: `preferred` if it is free, else a random one."""
    lowest_outgoing = _lowest_port_of_outgoing_connections()
    others = random.sample(range(20_000, lowest_outgoing), 100) if lowest_outgoing > 20_100 else []
    for port in [*([preferred] if preferred else []), *others]:
        if _is_free(port):
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        chosen: int = probe.getsockname()[1]
        return chosen


def _lowest_port_of_outgoing_connections() -> int:
    """Return the lowest port that the kernel uses for outgoing connections.

    An outgoing connection of any process may take a port at or above this number, for example while a server restarts.
    """
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        return 32_768


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _claim(port: int) -> bool:
    """Claim a port for this process among all Cairn processes of the machine, and return False if it is claimed.

    The claim is an abstract Unix socket with the port number in its name. The kernel lets only one process bind the
    name, and frees it when the process ends. The result is also True for a port that this process has claimed before,
    and on systems other than Linux, which have no such names.
    """
    if port in _claimed_ports or not sys.platform.startswith("linux"):  # Only Linux has abstract socket names.
        return True
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0cairn-port-{port}")
    except OSError:
        claim.close()
        return False
    claim.detach()  # The socket stays open, so the claim lasts as long as this process.
    _claimed_ports.add(port)
    return True
