"""The same on a Spark Connect server that lives longer than an interval."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from benchmarks.spark_server import SparkConnectServer
from state_backend.adapters.open_storage import open_storage
from state_backend.checkpoint.coordinator import Coordinator

pytestmark = pytest.mark.spark

ROOT = Path(__file__).resolve().parents[2]

PIPELINE = """
from datetime import UTC, datetime
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import Row
from jobs.pipeline import Pipeline
from helper_of_it import GREETING

def source(spark, interval):
    return spark.createDataFrame([("ann", 1), ("bob", 2)], "user string, amount long")

class Greeter(StatefulProcessor):
    def init(self, handle):
        self._count = handle.getValueState("count", "n long")

    def handleInputRows(self, key, rows, timerValues):
        n = (self._count.get() or (0,))[0] + sum(1 for _ in rows)
        self._count.update((n,))
        yield Row(user=key[0], text=f"{GREETING} VERSION {n}")

PIPELINE = Pipeline(name="greeting", start=datetime(2024, 1, 1, tzinfo=UTC), source=source, key=["user"],
                    processor=Greeter, output_schema="user string, text string", max_parallelism=8)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkConnectServer]:
    with SparkConnectServer(ROOT, log_dir=tmp_path_factory.mktemp("spark-logs")) as running:
        yield running


def drive(folder: Path, server: str, command: str, *arguments: str) -> dict[str, Any]:
    """One driver process, as Airflow starts it; its result."""
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    path = os.pathsep.join([str(folder), str(ROOT)])
    common = [
        "--pipeline",
        "pipeline_of_it:PIPELINE",
        "--root",
        str(folder / "root"),
        "--spark",
        server,
        "--result",
        str(result),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "jobs.driver", command, *common, *arguments],
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.exists(), done.stdout + done.stderr
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def process(folder: Path, server: str, day: int, attempt: str) -> dict[str, Any]:
    span = ["--start", f"2024-01-{day:02}T00:00:00+00:00", "--end", f"2024-01-{day + 1:02}T00:00:00+00:00"]
    tried = ["--run-id", f"run-{day}", "--clear-number", "0", "--try-number", "1", "--attempt", attempt]
    return drive(folder, server, "process", *span, *tried)


def write_pipeline(folder: Path, version: str, greeting: str) -> None:
    (folder / "pipeline_of_it.py").write_text(PIPELINE.replace("VERSION", version))
    (folder / "helper_of_it.py").write_text(f"GREETING = {greeting!r}\n")
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)


def test_an_edited_processor_counts_from_the_next_interval_on(server: SparkConnectServer, tmp_path: Path) -> None:
    """The server goes on running, and its workers have imported nothing of the user's: the processor's file, and one that
    it imports, are edited between intervals, and each time the hash in the record changes with them."""
    coordinator = Coordinator(open_storage(str(tmp_path / "root" / "greeting")), "greeting")
    hashes, texts = [], []
    for day, (version, greeting) in enumerate(
        [("one", "hello"), ("two", "hello"), ("two", "servus"), ("two", "servus")], start=1
    ):
        write_pipeline(tmp_path, version, greeting)
        result = process(tmp_path, server.url, day, f"attempt-{day}")
        assert "ok" in result, result
        record = coordinator.commit(f"attempt-{day}").record
        assert record is not None
        hashes.append(record.content.code_hash)
        files = [tmp_path / "root" / "greeting" / f.handle.path for f in record.content.outputs]
        texts.append(sorted(row["text"] for f in files for row in pq.read_table(f).to_pylist()))
    assert texts == [["hello one 1"] * 2, ["hello two 2"] * 2, ["servus two 3"] * 2, ["servus two 4"] * 2]
    assert len(set(hashes)) == 3
    assert hashes[2] == hashes[3]


def test_validation_runs_in_other_processes_than_the_writer(server: SparkConnectServer, tmp_path: Path) -> None:
    """Each driver has its own session, and Spark gives each session Python workers of its own."""
    write_pipeline(tmp_path, "one", "hello")
    process(tmp_path, server.url, 1, "attempt-1")
    record = Coordinator(open_storage(str(tmp_path / "root" / "greeting")), "greeting").commit("attempt-1").record
    assert record is not None
    result = drive(tmp_path, server.url, "validate", "--checkpoint", str(record.id))
    assert result["ok"]["success"], result
    assert result["ok"]["entries"] == 2
    assert result["ok"]["pids"]
    assert not set(result["ok"]["pids"]) & set(record.content.worker_pids)


def test_a_savepoint_is_taken_on_the_server(server: SparkConnectServer, tmp_path: Path) -> None:
    write_pipeline(tmp_path, "one", "hello")
    process(tmp_path, server.url, 1, "attempt-1")
    Coordinator(open_storage(str(tmp_path / "root" / "greeting")), "greeting").commit("attempt-1")
    result = drive(tmp_path, server.url, "savepoint", "--to", str(tmp_path / "savepoint"))
    assert result["ok"]["files"] >= 1
    assert (tmp_path / "savepoint" / "savepoint.json").exists()


def test_errors_of_user_code_come_through_the_server(server: SparkConnectServer, tmp_path: Path) -> None:
    write_pipeline(tmp_path, "one", "hello")
    file = tmp_path / "pipeline_of_it.py"
    file.write_text(file.read_text().replace("self._count.update((n,))", "raise KeyError('on purpose')"))
    error = process(tmp_path, server.url, 1, "attempt-1")["error"]
    assert error["type"] == "ProcessorError"
    assert "handleInputRows, key ('" in error["message"]
    assert "KeyError: 'on purpose'" in error["message"]


def test_a_server_that_is_not_there_is_named_at_once(tmp_path: Path) -> None:
    write_pipeline(tmp_path, "one", "hello")
    error = process(tmp_path, "sc://127.0.0.1:9", 1, "attempt-1")["error"]
    assert error["type"] == "StorageUnavailable"
    assert "sc://127.0.0.1:9" in error["message"]
