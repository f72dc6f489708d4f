"""Ends Spark's Python daemon of a Connect session that nobody uses any more.

Spark starts a ``pyspark.daemon`` for each Connect session on each executor, since each session has an artifact UUID, and keeps it until the
executor ends. Of its workers Spark keeps those that were used in the last minute. A driver can't reach the daemon, so its first task
on an executor starts a watcher there: a small process that ends the daemon after ten minutes without a worker. If the session is used
again, Spark starts another daemon.

    a worker is killed          the watcher goes on: it looks at the daemon alone
    the executor ends           the daemon ends, and the watcher with it
    a task arrives as the       the task fails, and Spark or Airflow tries again. The daemon was idle for ten minutes, and the
    daemon ends                 window is some milliseconds long
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

# Of the server's or executor's environment: seconds; 0 leaves all daemons to Spark.
IDLE_VARIABLE = "CAIRN_DAEMON_IDLE_S"
_IDLE_S = 600.0

# The interpreter starts it without site-packages, in 8 MiB. A pidfd can't name another process by mistake.
_WATCHER = """
import os, select, signal, sys
pid, idle_s = int(sys.argv[1]), float(sys.argv[2])
try:
    daemon = os.pidfd_open(pid)
    unused_s = 0.0
    while unused_s < idle_s:
        if select.select([daemon], [], [], idle_s / 10)[0]:
            sys.exit()
        with open(f"/proc/{pid}/task/{pid}/children") as children:
            unused_s = 0.0 if children.read().strip() else unused_s + idle_s / 10
    signal.pidfd_send_signal(daemon, signal.SIGTERM)
except OSError:
    pass
"""


def end_idle_daemon() -> None:
    """Start the watcher of this worker's daemon, unless the daemon has a watcher or serves no Connect session. Linux only."""
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    if sys.platform != "linux" or "SPARK_JOB_ARTIFACT_UUID" not in os.environ or not main:
        return
    idle_s = float(os.environ.get(IDLE_VARIABLE) or _IDLE_S)
    if main.name == "pyspark.daemon" and idle_s > 0:
        with suppress(OSError):
            watch_daemon(os.getppid(), idle_s)


def watch_daemon(daemon: int, idle_s: float) -> subprocess.Popen[bytes] | None:
    """Start a process that ends the daemon after ``idle_s`` seconds without a child; None if the daemon has a watcher.

    Raises:
        OSError: No process can be started.
    """
    with socket.socket(socket.AF_UNIX) as lock:
        try:
            # A name in no folder; the kernel frees it when the watcher has ended. Containers may share names, but not process ids.
            lock.bind(f"\0cairn-{Path('/proc/self/ns/pid').readlink()}-{daemon}")
        except OSError:
            return None
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _WATCHER, str(daemon), str(idle_s)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            pass_fds=[lock.fileno()],
            start_new_session=True,
        )
