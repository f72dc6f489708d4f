"""A Spark Connect server on the loopback interface, in the foreground so that its process is ours."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from cairn.command.spark_server import answers, server_command, server_environment
from cairn.spark.local_server_secret import kept_secret, new_secret
from local_stack.owned_process import OwnedProcesses, Server, claim_port

_NAME = "spark-connect"


class SparkConnectServer(Server):
    """``with SparkConnectServer(root, log_dir=...) as spark: spark.url``. ``start`` alone does not wait: other things can
    start meanwhile, until ``wait_until_ready``.

    Whoever reaches the port can have the server run any code, so the server asks for a ``token``. The default token is random. Drivers
    of this user find the token. ``master``: where its tasks run, if not in the server on ``cores`` cores; ``conf``: more of Spark's
    configuration.
    """

    def __init__(
        self,
        repo_root: Path,
        *,
        log_dir: Path,
        port: int = 0,
        cores: int = 2,
        token: str | None = None,
        master: str | None = None,
        conf: Mapping[str, str] | None = None,
    ) -> None:
        self.repo_root = repo_root
        self.port = claim_port(port)
        self.cores = cores
        self.token = token or new_secret()
        self.master = master or f"local[{cores}]"
        self.conf = dict(conf or {})
        self._processes = OwnedProcesses(log_dir)
        self._kept = ExitStack()

    @property
    def url(self) -> str:
        """Of the server, for Spark Connect."""
        return f"sc://127.0.0.1:{self.port}"

    @property
    def airflow_connection(self) -> str:
        """The Airflow connection to it, for an environment variable ``AIRFLOW_CONN_...``."""
        connection = {"conn_type": "spark_connect", "host": "sc://127.0.0.1", "port": self.port}
        return json.dumps({**connection, "password": self.token})

    def start(self) -> None:
        """Starts the server; ``wait_until_ready`` waits for it."""
        paths = os.pathsep.join([str(self.repo_root / "jobs"), str(self.repo_root)])
        self._processes.start(
            _NAME,
            server_command(self.port, self.master, self.cores, self.conf),
            # The token not among the options, which everybody on the machine can read.
            env=server_environment(self.token) | {"PYTHONPATH": paths},
            cwd=self.repo_root,
        )
        # Who can't write there gives the drivers the token by the connection.
        with suppress(OSError):
            self._kept.enter_context(kept_secret("spark-connect", self.port, self.token))

    def wait_until_ready(self, timeout_s: float = 120) -> None:
        """Raises: TimeoutError if it does not answer by then; RuntimeError if its process has ended."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._processes.check_alive()
            if answers(self.port):
                return
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"no Spark Connect server after {timeout_s} s: {self._processes.log_path(_NAME)}")
            time.sleep(0.3)

    def pids(self) -> Iterator[int]:
        """The server's process, and those of its Python workers, as long as they live."""
        return self._processes.pids()

    def kill(self) -> None:
        """kill -9 of the server and of its Python workers. ``start`` starts another one on the same port."""
        self._processes.stop(grace_s=0, signal_number=signal.SIGKILL)
        self._kept.close()

    def stop(self) -> None:
        """Stops the server and its Python workers."""
        self._processes.stop(grace_s=10)
        self._kept.close()
