"""Start a watcher that ends the idle Python daemon of Spark Connect sessions.

Spark starts a `pyspark.daemon` for each Connect session on each executor, unless the sessions share their workers
(`cairn.spark.session.ISOLATION`). Spark keeps the daemon until the executor ends. Of the daemon's workers, Spark keeps
those that were used in the last minute. A driver can't end a daemon on another machine. So the daemon's first task
starts a watcher there. The watcher is a small process that ends the daemon when it has had no worker for some time. If
a task needs the daemon again, Spark starts another one.

    a worker is killed          The watcher continues, because it watches the daemon only.
    the executor ends           The daemon ends, and then the watcher ends.
    a task arrives while the    The task fails, and Spark or Airflow tries again. This can happen only in the few
    daemon ends                 milliseconds in which the daemon ends.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from state_backend.values.environment import Variable

# A daemon that serves one session is useless after the session's driver: a day's backfill would leave hundreds of them.
_IDLE_OF_ONE_SESSION_S = 30.0
# The value of SPARK_JOB_ARTIFACT_UUID in sessions that share their workers.
_SHARED = "default"

# The watcher runs without site-packages and takes 8 MiB. It holds a pidfd, because the kernel may give the daemon's
# process id to another process later.
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
    """Start a watcher that ends this worker's `pyspark.daemon` when the daemon has had no worker for some time.

    The time is 600 seconds, or 30 seconds if the daemon serves one session only, or the value of the environment
    variable CAIRN_DAEMON_IDLE_S. The function does nothing if the daemon already has a watcher, if the worker serves no
    Connect session, if the system is not Linux, or if the time is 0.
    """
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    if sys.platform != "linux" or "SPARK_JOB_ARTIFACT_UUID" not in os.environ or not main:
        return
    shared = os.environ["SPARK_JOB_ARTIFACT_UUID"] == _SHARED
    idle_s = float(
        Variable.DAEMON_IDLE_S.given or (Variable.DAEMON_IDLE_S.default if shared else _IDLE_OF_ONE_SESSION_S)
    )
    if main.name == "pyspark.daemon" and idle_s > 0:
        with suppress(OSError):
            watch_daemon(os.getppid(), idle_s)


def watch_daemon(daemon: int, idle_s: float) -> subprocess.Popen[bytes] | None:
    """Start a process that ends the daemon when the daemon has had no child process for some time."""
    with socket.socket(socket.AF_UNIX) as lock:
        try:
            # The lock is an abstract socket name, which the kernel frees when the watcher ends. Containers may share
            # these names but have different process ids, so the name holds the namespace of process ids.
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
