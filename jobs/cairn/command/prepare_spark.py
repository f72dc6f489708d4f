"""The command `cairn spark --prepare`: write the archive of Spark's classes (`cairn.spark.class_archive`)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from cairn.spark.class_archive import archive_path, folder_for_new, install, recording
from cairn.spark.java_runtime import require_java
from cairn.spark.local_server_secret import new_secret
from cairn.spark.server_command import answers, server_command, server_environment
from state_backend.values.errors import StorageUnavailable, UsageError
from state_backend.values.human_units import size

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from state_backend.values.intervals import Interval

_PATIENCE_S = 300.0
_START = datetime(2024, 1, 1, tzinfo=UTC)


def prepare_spark() -> int:
    require_java("Spark")
    path = archive_path()
    if path is None:
        raise UsageError("PySpark is not installed here; install Cairn with the extra `spark`")
    try:
        with folder_for_new(path) as folder:
            made = folder / path.name
            _record(made, folder)
            install(made, path)
    except OSError as error:
        raise UsageError(
            f"can't write {path}: {error}\nThe command needs 220 MiB of disk there, and the rights of the owner of this Python environment"
        ) from error
    typer.echo(f"Spark's classes are in {path} ({size(path.stat().st_size)})")
    return 0


def _record(archive: Path, work: Path) -> None:
    """Run a small pipeline on a Spark server, which at its end writes the classes that it has loaded into `archive`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = server_environment(new_secret())
    log = work / "server.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            server_command(port, "local[2]", 2),
            env=recording(environment, archive),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            deadline_s = time.monotonic() + _PATIENCE_S
            while not answers(port):
                if server.poll() is not None or time.monotonic() > deadline_s:
                    raise StorageUnavailable(f"the Spark server did not start:\n{_end_of(log)}")
                time.sleep(0.2)
            client = subprocess.run(
                [sys.executable, "-m", __name__, f"sc://127.0.0.1:{port}", str(work)],
                env=environment,
                stdout=output,
                stderr=output,
                timeout=_PATIENCE_S,
                check=False,
            )
            if client.returncode:
                raise StorageUnavailable(f"the pipeline failed on the Spark server:\n{_end_of(log)}")
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired as error:
            raise StorageUnavailable(f"Spark took more than {_PATIENCE_S:.0f} s:\n{_end_of(log)}") from error
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()
    if not archive.exists():
        raise StorageUnavailable(f"the Spark server wrote no archive of its classes:\n{_end_of(log)}")


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:]


class _Counting(StatefulProcessor):  # type: ignore[misc]
    def init(self, handle: Any) -> None:
        self._count = handle.getValueState("count", "n long")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        n = (self._count.get() or (0,))[0] + sum(1 for _ in rows)
        self._count.update((n,))
        yield Row(k=key[0], n=n)


def _run_pipeline(url: str, work: Path) -> None:
    """Run three intervals of a pipeline on the Spark server at `url`, and read its state as a table."""
    from cairn import Interval, Pipeline, run_interval
    from cairn.data_sources.register import register_data_sources
    from cairn.spark.session import connect

    session = connect(url, "cairn spark --prepare")
    folder = str(work / "input")

    def source(spark: SparkSession, interval: Interval) -> DataFrame:
        return spark.read.parquet(folder).where(f"at < timestamp '{interval.end:%Y-%m-%d %H:%M:%S}'")

    rows = [(f"key {n % 50}", n, _START + timedelta(hours=n % 72)) for n in range(1000)]
    session.createDataFrame(rows, "k string, v long, at timestamp").write.parquet(folder)
    pipeline = Pipeline(
        name="prepare",
        start=_START,
        source=source,
        key=["k"],
        processor=_Counting,
        output_schema="k string, n long",
        parallelism=2,
    )
    root = f"file://{work}/state"
    for n in range(3):
        interval = Interval(_START + timedelta(days=n), _START + timedelta(days=n + 1))
        run_interval(session, pipeline, interval, root)
    register_data_sources(session)
    table = session.read.format("keyed_state").option("state", "count").load(f"{root}/prepare")
    table.groupBy("value.n").count().orderBy("n").collect()


if __name__ == "__main__":
    _run_pipeline(sys.argv[1], Path(sys.argv[2]))
