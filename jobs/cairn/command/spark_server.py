"""The command `cairn spark`: a Spark Connect server on this machine's loopback interface, in the foreground.

Drivers that connect to a server do not start a JVM for every interval. Every process that can send requests to the
server can run code as the server's user. So the server listens only on 127.0.0.1 and asks for a token, and only this
user can read the token.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from cairn.spark.class_archive import with_jvm_options
from cairn.spark.java_runtime import require_java
from cairn.spark.local_server_secret import kept_secret, new_secret
from cairn.spark.server_command import answers, server_command, server_environment
from state_backend.values.environment import Variable
from state_backend.values.errors import StorageUnavailable, UsageError


def _free_behind(port: int) -> int:
    """Return the next port above `port` on which a server can listen now; 15002 if none is free.

    A port that an outgoing connection uses counts as taken too.
    """
    for other in range(port + 1, 65536):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", other))
            except OSError:
                continue
            return other
    return 15002


def spark(
    master: Annotated[
        str, typer.Argument(help="Spark master that runs the server's tasks: local[*], local[2], spark://host:port.")
    ] = "local[*]",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port on 127.0.0.1 where the server listens.")] = 15002,
    prepare: Annotated[
        bool,
        typer.Option(
            "--prepare",
            help="Run no server: write an archive of Spark's classes, with which Spark starts faster, and exit.",
        ),
    ] = False,
) -> int:
    """With --prepare, the command runs a small pipeline on a Spark server, and writes an archive into the Python
    environment. Drivers and servers of this environment use the archive. Prepare again after an update of Java or
    PySpark.
    """
    if prepare:
        from cairn.command.prepare_spark import prepare_spark

        return prepare_spark()
    require_java("A Spark Connect server")
    if answers(port):
        raise UsageError(
            f"port {port} is in use by another process; use another port, as in: cairn spark --port {_free_behind(port)}"
        )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    token = Variable.SPARK_TOKEN.given or new_secret()
    with ExitStack() as stack:
        try:
            file = stack.enter_context(kept_secret("spark-connect", port, token))
        except OSError as error:
            raise UsageError(
                f"can't write the token of the Spark server to a file: {error}\nSet XDG_STATE_HOME to a folder that you may write to"
            ) from error
        return _serve(port, master, token, file)


def _serve(port: int, master: str, token: str, file: Path) -> int:
    command = server_command(port, master, os.cpu_count() or 2)
    environment = with_jvm_options(server_environment(token))
    with subprocess.Popen(command, env=environment, start_new_session=True) as server:
        try:
            _await_answer(server, port)
            connection = f'{{"conn_type": "spark_connect", "host": "sc://127.0.0.1", "port": {port}}}'
            typer.echo(
                f"Its token:     {file}   (only you can read it; your cairn commands and Airflow tasks find it there)"
            )
            typer.echo(f"Spark Connect: sc://127.0.0.1:{port}   (Ctrl-C stops it)")
            typer.echo(f"For PySpark:   export {Variable.SPARK_TOKEN}=$(cat {shlex.quote(str(file))})")
            typer.echo(f"For Airflow:   export AIRFLOW_CONN_CAIRN_SPARK='{connection}'")
            server.wait()
        except KeyboardInterrupt:
            typer.echo("Spark Connect is stopped")
            return 130
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGTERM)
    raise StorageUnavailable(f"the Spark server ended with code {server.returncode}; see its output above")


def _await_answer(server: subprocess.Popen[bytes], port: int) -> None:
    deadline_s = time.monotonic() + 120
    while not answers(port):
        if server.poll() is not None:
            raise StorageUnavailable(f"the Spark server ended with code {server.returncode}; see its output above")
        if time.monotonic() > deadline_s:
            raise StorageUnavailable(
                f"the Spark server does not answer on port {port} after two minutes; see its output above, then try again"
            )
        time.sleep(0.3)
