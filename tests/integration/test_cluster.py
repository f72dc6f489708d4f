"""A Spark standalone cluster of processes: a master, and two workers with host names, temp folders and work folders of their own that
share nothing but the GCS server. Their Python has what Cairn needs, and not Cairn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from local_stack.owned_process import OwnedProcesses, free_port
from state_backend.adapters.open_storage import open_storage
from state_backend.checkpoint.coordinator import Coordinator
from state_backend.values.records import Record
from tests.support.gcs_server import BUCKET, gcs_server

pytestmark = pytest.mark.spark

ROOT = Path(__file__).resolve().parents[2]

PIPELINE = """
from datetime import UTC, datetime
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import Row
from cairn import Pipeline

def source(spark, interval):
    return spark.range(0, 2_000, 1, 4).selectExpr("concat('user-', id % 500) as user", "id as amount")

class Sum(StatefulProcessor):
    def init(self, handle):
        self._sum = handle.getValueState("sum", "total long, padding string")

    def handleInputRows(self, key, rows, timerValues):
        total = (self._sum.get() or (0, ""))[0] + sum(row.amount for row in rows)
        self._sum.update((total, f"{key[0]}-{total}-" * 20))
        yield Row(user=key[0], total=total)

SUMS = Pipeline(name="sums", start=datetime(2024, 1, 1, tzinfo=UTC), source=source, key=["user"], processor=Sum,
                output_schema="user string, total long", parallelism=2, max_parallelism=16)
"""


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes = OwnedProcesses(folder / "logs")
        self.port = free_port(0)
        self.url = f"spark://127.0.0.1:{self.port}"
        # A Python with all packages of this one, and none of its .pth files: the editable install of Cairn is one of those.
        self.python = folder / "venv/bin/python"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
        (site,) = (folder / "venv/lib").glob("python*/site-packages")
        (site / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def start(self) -> None:
        self._start(
            "master", "Master", "--host", "127.0.0.1", "--port", str(self.port), "--webui-port", str(free_port(0))
        )
        for number in (2, 3):
            self.start_worker(number)

    def start_worker(self, number: int, name: str = "") -> None:
        host = f"127.0.0.{number}"
        self._start(
            name or f"worker-{number}",
            *("Worker", self.url, "--host", host, "--cores", "1", "--memory", "1g"),
            *("--webui-port", str(free_port(0)), "--work-dir", str(self.folder / f"work-{number}")),
            host=host,
            temp=self.folder / f"temp-{number}",
        )

    def _start(self, name: str, role: str, *arguments: str, host: str = "127.0.0.1", temp: Path | None = None) -> None:
        spec = find_spec("pyspark")
        assert spec is not None and spec.origin is not None
        home = Path(spec.origin).parent
        temp = temp or self.folder / "temp-master"
        temp.mkdir(exist_ok=True)
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        self.processes.start(
            name,
            [str(home / "bin/spark-class"), f"org.apache.spark.deploy.{role.lower()}.{role}", *arguments],
            env={**env, "SPARK_HOME": str(home), "SPARK_LOCAL_IP": host, "TMPDIR": str(temp)},
            cwd=self.folder,
        )


@contextmanager
def cluster_in(folder: Path) -> Iterator[Cluster]:
    folder.mkdir()
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.processes.stop(grace_s=5)


def start(folder: Path, where: str, root: str, python: Path | None = None) -> subprocess.Popen[str]:
    conf = {} if python is None else {"spark.pyspark.python": str(python), "spark.executor.memory": "512m"}
    conf |= {"spark.sql.shuffle.partitions": "2"}
    arguments = ["--pipeline", "sums_pipeline:SUMS", "--root", root, "--spark", where, "--settings-on-stdin"]
    arguments += ["--start", "2024-01-01T00:00:00+00:00", "--end", "2024-01-02T00:00:00+00:00"]
    arguments += ["--run-id", "run-1", "--clear-number", "0", "--try-number", "1", "--attempt", "attempt-1"]
    (folder / "result.json").unlink(missing_ok=True)
    driver = subprocess.Popen(
        [sys.executable, "-m", "cairn.command.driver", "process", *arguments, "--result", str(folder / "result.json")],
        env={**os.environ, "PYTHONPATH": str(folder), "PYSPARK_DRIVER_PYTHON": sys.executable},
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert driver.stdin is not None
    driver.stdin.write(json.dumps({"conf": conf}))
    driver.stdin.close()
    driver.stdin = None
    return driver


def finish(folder: Path, driver: subprocess.Popen[str]) -> dict[str, Any]:
    output, _ = driver.communicate(timeout=300)
    assert (folder / "result.json").exists(), output
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    assert "ok" in result, f"{result}\n{output}"
    return result


def commit(root: str) -> Record:
    record = Coordinator(open_storage(f"{root}/sums"), "sums").commit("attempt-1").record
    assert record is not None
    return record


if os.environ.get("CAIRN_LONG"):  # 149 s on two busy cores

    def test_executors_without_the_package_get_it_from_the_driver(tmp_path: Path) -> None:
        """A day on the cluster, with state on the server alone, has the digest of a day in one process."""
        (tmp_path / "sums_pipeline.py").write_text(PIPELINE)
        with gcs_server(), cluster_in(tmp_path / "cluster") as cluster:
            finish(tmp_path, start(tmp_path, cluster.url, f"gs://{BUCKET}/cluster", python=cluster.python))
            on_cluster = commit(f"gs://{BUCKET}/cluster")
            assert list((tmp_path / "cluster").glob("temp-*/cairn-*")), "no worker has worked, so this shows nothing"
            finish(tmp_path, start(tmp_path, "local[2]", f"gs://{BUCKET}/alone"))
            alone = commit(f"gs://{BUCKET}/alone")
        assert on_cluster.content.digest == alone.content.digest
