"""Make the command line and the environment of a Spark Connect server on this machine."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from cairn.spark.session import FRESH_TABLES
from state_backend.values.environment import Variable
from state_backend.values.errors import UsageError

_CLASS = "org.apache.spark.sql.connect.service.SparkConnectServer"


def server_command(port: int, master: str, shuffle_partitions: int, more: Mapping[str, str] | None = None) -> list[str]:
    conf = {
        "spark.master": master,
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.sql.session.timeZone": "UTC",
        # On one machine Spark's default of 200 partitions only adds overhead.
        "spark.sql.shuffle.partitions": str(shuffle_partitions),
        # At level INFO Spark writes hundreds of lines per interval into the terminal.
        "spark.log.level": "WARN",
        **FRESH_TABLES,
        # Without authentication Spark's internal ports deserialize Java objects from every user of this machine.
        **({"spark.authenticate": "true"} if master.startswith("local") else {}),
        **(more or {}),
    }
    options = [part for name, value in conf.items() for part in ("--conf", f"{name}={value}")]
    submit = str(_spark_home() / "bin/spark-submit")
    return [submit, *options, "--class", _CLASS, "--name", "Cairn", "spark-internal"]


def server_environment(token: str) -> dict[str, str]:
    """Return the environment of the server's process: SPARK_HOME, this Python for the workers, and the token.

    The token is not an option of the command line, because every user of the machine can read the options of a process.
    """
    return {
        **os.environ,
        "SPARK_HOME": str(_spark_home()),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        Variable.SPARK_TOKEN: token,
    }


def _spark_home() -> Path:
    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise UsageError("PySpark is not installed here; install Cairn with the extra `spark`")
    return Path(spec.origin).parent


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True
