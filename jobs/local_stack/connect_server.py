"""Spark Connect server on the loopback interface.

The server runs in the foreground, so its process is a child of this program.
"""

from __future__ import annotations

import json
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from cairn.spark.class_archive import with_jvm_options
from cairn.spark.local_server_secret import kept_secret, new_secret
from cairn.spark.server_command import answers, server_command, server_environment
from local_stack.owned_process import OwnedProcesses, Server, claim_port, python_path
from local_stack.patience import Patience

_NAME = "spark-connect"
_CORES = 2


class SparkConnectServer(Server):
    """A Spark Connect server, for use in a `with` block.

        with SparkConnectServer(root, log_dir=...) as spark:
            connect(spark.url, ...)

    `start` does not wait until the server is ready. A caller may start other servers before `wait_until_ready`.

    Every client that reaches the port can run code in the server. So the server demands a token. Drivers of this user
    find the token in a file.
    """

    def __init__(self, repo_root: Path, *, log_dir: Path, port: int = 0) -> None:
        self.repo_root = repo_root
        self.port = claim_port(port)
        self.token = new_secret()
        self.master = f"local[{_CORES}]"
        self.conf: dict[str, str] = {}
        self.processes = OwnedProcesses(log_dir)
        self._kept = ExitStack()

    @property
    def url(self) -> str:
        return f"sc://127.0.0.1:{self.port}"

    @property
    def airflow_connection(self) -> str:
        """Return the Airflow connection to the server, as JSON for an environment variable `AIRFLOW_CONN_...`."""
        connection = {"conn_type": "spark_connect", "host": "sc://127.0.0.1", "port": self.port}
        return json.dumps({**connection, "password": self.token})

    def start(self) -> None:
        paths = python_path(self.repo_root / "jobs", self.repo_root)
        self.processes.start(
            _NAME,
            server_command(self.port, self.master, _CORES, self.conf),
            # The token goes into the environment, because every user of the machine can read a process's arguments.
            env=with_jvm_options(server_environment(self.token)) | {"PYTHONPATH": paths},
            cwd=self.repo_root,
        )
        # Drivers of this user read the token from this file. If the file can't be written, the caller must pass the
        # token to drivers in the Airflow connection.
        with suppress(OSError):
            self._kept.enter_context(kept_secret("spark-connect", self.port, self.token))

    def wait_until_ready(self, timeout_s: float = 120) -> None:
        patience = Patience(time.monotonic(), least_s=timeout_s)
        while True:
            self.processes.check_alive()
            if answers(self.port):
                return
            log = self.processes.log_path(_NAME)
            if patience.is_over(log.stat().st_size, time.monotonic()):
                raise TimeoutError(
                    f"the Spark Connect server does not answer, and its log did not grow for {patience.limit_s:.0f} s: {log}"
                )
            time.sleep(0.3)

    def stop(self) -> None:
        self.processes.stop(grace_s=10)
        self._kept.close()
