"""A Spark Connect server on the loopback interface, in the foreground so that its process is ours."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from benchmarks.owned_process import OwnedProcesses, Server, free_port

_CLASS = "org.apache.spark.sql.connect.service.SparkConnectServer"
_NAME = "spark-connect"


class SparkConnectServer(Server):
    """``with SparkConnectServer(root, log_dir=...) as spark: spark.url``. ``start`` alone does not wait: other things can
    start meanwhile, until ``wait_until_ready``.

    Whoever reaches the port has the server run any code. With a ``token`` only who knows it: then the host is "localhost", since
    Spark's client sends a token without TLS to no other.
    """

    def __init__(
        self, repo_root: Path, *, log_dir: Path, port: int = 0, cores: int = 2, token: str | None = None
    ) -> None:
        self.repo_root = repo_root
        self.port = free_port(port)
        self.cores = cores
        self.token = token
        self._processes = OwnedProcesses(log_dir)

    @property
    def url(self) -> str:
        return f"sc://{self._host}:{self.port}"

    @property
    def airflow_connection(self) -> str:
        """The Airflow connection to it, for an environment variable ``AIRFLOW_CONN_...``."""
        connection = {"conn_type": "spark_connect", "host": f"sc://{self._host}", "port": self.port}
        return json.dumps(connection | ({"password": self.token} if self.token else {}))

    @property
    def _host(self) -> str:
        return "127.0.0.1" if self.token is None else "localhost"

    def start(self) -> None:
        spec = find_spec("pyspark")
        assert spec is not None and spec.origin is not None
        home = Path(spec.origin).parent
        conf = {
            "spark.master": f"local[{self.cores}]",
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": str(self.port),
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.ui.enabled": "false",
            "spark.sql.session.timeZone": "UTC",
            # Two cores and small intervals: the default of 200 shuffle partitions is all overhead here.
            "spark.sql.shuffle.partitions": str(self.cores),
        }
        options = [part for name, value in conf.items() for part in ("--conf", f"{name}={value}")]
        self._processes.start(
            _NAME,
            [str(home / "bin/spark-submit"), *options, "--class", _CLASS, "--name", "Cairn", "spark-internal"],
            env={
                **os.environ,
                "SPARK_HOME": str(home),
                "PYTHONPATH": os.pathsep.join([str(self.repo_root / "jobs"), str(self.repo_root)]),
                "PYSPARK_PYTHON": sys.executable,
                "SPARK_LOCAL_IP": "127.0.0.1",
                # Not among the options, which everybody on the machine can read.
                **({} if self.token is None else {"SPARK_CONNECT_AUTHENTICATE_TOKEN": self.token}),
            },
            cwd=self.repo_root,
        )

    def wait_until_ready(self, timeout_s: float = 120) -> None:
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._processes.check_alive()
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                if time.monotonic() > deadline_s:
                    raise TimeoutError(
                        f"no Spark Connect server after {timeout_s} s: {self._processes.log_path(_NAME)}"
                    ) from None
                time.sleep(0.3)

    def kill(self) -> None:
        """kill -9 of the server and of its Python workers. ``start`` starts another one on the same port."""
        self._processes.stop(grace_s=0, signal_number=signal.SIGKILL)

    def stop(self) -> None:
        self._processes.stop(grace_s=10)
