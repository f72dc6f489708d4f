"""Processes, memory and files that intervals of five minutes leave behind under Airflow and Spark Connect.

    python -m benchmarks.footprint [--cold 100] [--warm 200] [--every 50] [--validate] [--daemon-idle-s 30]

One Spark Connect server and one Airflow with PostgreSQL run one tiny pipeline, first with drivers that tasks start,
then with warm drivers. The program takes figures after ten intervals, after every `--every` intervals, and at the end
of each part, `--settle-s` seconds after its last interval.

The intervals follow each other without waiting for the wall clock: an interval takes some seconds instead of five
minutes. In production, drivers share a session for an hour. So the pipeline's module takes the hour from the interval,
and twelve drivers share one session here too. The server closes a session that was idle for two minutes. Spark's Python
daemon of a session ends `--daemon-idle-s` seconds after its last worker; with 0 it never ends.

For each kind of process the figures are the count, the memory (PSS, in which a shared page counts once), the threads
and the open files. For each folder they are the number of files and the bytes.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil

from state_backend.values.environment import Variable
from tests.support.local_stack import AirflowServer, SparkConnectServer

ROOT = Path(__file__).resolve().parents[1]
START = datetime(2024, 1, 1, tzinfo=UTC)
EVERY = timedelta(minutes=5)
WARM_UP = 10
DAG = "tiny"

PIPELINE = """
import json
import sys
from datetime import UTC, datetime
import cairn.spark.session
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import Row
from cairn.pipeline import Pipeline
from state_backend.adapters.rocks import EngineOptions

if sys.argv[1:2] == ["interval"]:
    hour = int(datetime.fromisoformat(json.loads(sys.argv[2])["start"]).timestamp() // 3600)
    cairn.spark.session._hour = lambda: hour

def source(spark, interval):
    n = int(interval.start.timestamp() // 300)
    return spark.createDataFrame([(f"user {(n + k) % 50}", k) for k in range(20)], "user string, amount long")

class Tiny(StatefulProcessor):
    def init(self, handle):
        self._sum = handle.getValueState("sum", "n long")

    def handleInputRows(self, key, rows, timerValues):
        n = (self._sum.get() or (0,))[0] + sum(row.amount for row in rows)
        self._sum.update((n,))
        yield Row(user=key[0], n=n)

TINY = Pipeline(name="tiny", start=datetime(2024, 1, 1, tzinfo=UTC), source=source, key=["user"], processor=Tiny,
                output_schema="user string, n long", parallelism=2, max_parallelism=8,
                engine=EngineOptions(metadata_dir="@MEMORY@"))
"""

DAGS = """
# An Airflow DAG: where a file says neither word, Airflow skips it.
from datetime import datetime, timedelta
from airflow.sdk import CronDataIntervalTimetable
from cairn_operators import stateful_pipeline

dag = stateful_pipeline(
    "tiny", "tiny_pipeline:TINY", "file://@FOLDER@/state", validate=@VALIDATE@,
    schedule=CronDataIntervalTimetable("*/5 * * * *", timezone="UTC"), start_date=datetime.fromisoformat("@START@"),
    end_date=datetime.fromisoformat("@END@"), catchup=True,
)
"""

# For each kind of process, a part of its command line. The first kind that fits counts.
KINDS = {
    "daemon's watcher": "pidfd_open",
    "warm driver host": "cairn.driver.driver_host",
    "driver": "cairn.driver.driver",
    "Spark server": "java",
    "scheduler": "airflow scheduler",
    "DAG processor": "dag-processor",
    "triggerer": "triggerer",
    "API server": "api",
    "database": "postgres",
    "executor worker": "LocalExecutor",
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cold", type=int, default=100, help="intervals with drivers that tasks start")
    parser.add_argument("--warm", type=int, default=200, help="intervals with warm drivers")
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--validate", action="store_true", help="each checkpoint is validated by a driver of its own")
    parser.add_argument("--daemon-idle-s", type=float, default=30)
    parser.add_argument("--settle-s", type=float, default=120, help="Spark keeps a worker for a minute")
    options = parser.parse_args()
    os.environ[Variable.DAEMON_IDLE_S] = str(options.daemon_idle_s)
    with tempfile.TemporaryDirectory(prefix="cairn-fp-") as text, memory_folder() as memory:
        folder = Path(text)
        folder.chmod(0o711)  # If this process runs as root, PostgreSQL runs as another user, who must enter the folder.
        for made in ("code", "tmp"):
            (folder / made).mkdir()
        (folder / "code" / "tiny_pipeline.py").write_text(PIPELINE.replace("@MEMORY@", str(memory)))
        os.environ["TMPDIR"] = str(folder / "tmp")
        conf = {
            "spark.local.dir": str(folder / "tmp"),
            "spark.connect.session.manager.defaultSessionTimeout": "2min",
            "spark.driver.extraJavaOptions": f"-Djava.io.tmpdir={folder / 'tmp'}",
        }
        with SparkConnectServer(ROOT, log_dir=folder / "logs-spark", conf=conf) as spark:
            run_part(folder, memory, spark, "cold", 0, options.cold, options)
            run_part(folder, memory, spark, "warm", options.cold, options.warm, options)


@contextmanager
def memory_folder() -> Iterator[Path]:
    """Create a folder in memory for the metadata of open stores.

    The user's default folder would also hold the metadata of other processes.
    """
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="cairn-fp-", dir=shared if shared.is_dir() else None) as text:
        yield Path(text)


def run_part(
    folder: Path, memory: Path, spark: SparkConnectServer, way: str, first: int, count: int, options: argparse.Namespace
) -> None:
    """Run `count` intervals from interval number `first` on, and print the figures.

    Raises:
        RuntimeError: An interval failed.
    """
    if not count:
        return
    home = folder / f"airflow-{way}"
    (home / "dags").mkdir(parents=True)
    named = {
        "@FOLDER@": str(folder),
        "@VALIDATE@": f'{{"docs": "{folder / "docs"}", "expectations_every": timedelta(days=365)}}'
        if options.validate
        else "False",
        "@START@": (START + first * EVERY).isoformat(),
        "@END@": (START + (first + count - 1) * EVERY).isoformat(),
    }
    text = DAGS
    for name, value in named.items():
        text = text.replace(name, value)
    (home / "dags" / "tiny.py").write_text(text)
    env = {
        "AIRFLOW_CONN_CAIRN_SPARK": spark.airflow_connection,
        "AIRFLOW__CORE__DAGS_FOLDER": str(home / "dags"),
        "AIRFLOW__CAIRN__WARM_DRIVERS": str(way == "warm"),
        "PYTHONPATH": os.pathsep.join([*(str(ROOT / name) for name in ("jobs", "plugins", "")), str(folder / "code")]),
    }
    with AirflowServer(ROOT, home=home, log_dir=folder / f"logs-{way}", env=env) as airflow:
        airflow.wait_for_dag(DAG)
        began_s = time.monotonic()
        for wanted in sorted({min(WARM_UP, count), *range(options.every, count, options.every), count}):
            wait_for(airflow, wanted, 60.0 * count + 600)
            if wanted == count:
                time.sleep(options.settle_s)
            figures = {
                "part": way,
                "intervals": wanted,
                "seconds": round(time.monotonic() - began_s),
                "load": round(os.getloadavg()[0], 1),
                "processes": processes(airflow, spark),
                "folders": {
                    name: folder_size(path)
                    for name, path in {
                        "state": folder / "state",
                        "temp": folder / "tmp",
                        "memory": memory,
                        "Spark's log": folder / "logs-spark",
                        "task logs": home / "logs",
                        "component logs": folder / f"logs-{way}",
                        "database": home / "airflow.postgres",
                    }.items()
                },
                "temp": top_of(folder / "tmp"),
                "XCom bytes of a run": xcom_bytes(airflow),
            }
            print(json.dumps(figures), flush=True)


def wait_for(airflow: AirflowServer, wanted: int, timeout_s: float) -> None:
    """Wait until a number of runs have succeeded.

    Raises:
        RuntimeError: A run failed.
        TimeoutError: The runs did not succeed within the timeout.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        airflow.processes.check_alive()
        states = collections.Counter(run["state"] for run in airflow.client.dag_runs(DAG))
        if states["failed"]:
            raise RuntimeError(f"a run failed: {dict(states)}; logs: {airflow.task_logs}")
        if states["success"] >= wanted:
            return
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{dict(states)} after {timeout_s} s")
        time.sleep(1)


def processes(airflow: AirflowServer, spark: SparkConnectServer) -> dict[str, dict[str, float]]:
    """Return the count, the PSS in MiB, the threads and the open files of each kind of process."""
    found: dict[str, dict[str, float]] = {}
    for pid in {*airflow.pids(), *spark.pids()}:
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            command = " ".join(process.cmdline())
            if "pyspark.daemon" in command:
                parent = process.parent()
                kind = "pyspark.daemon" if parent is not None and parent.name() == "java" else "Python worker"
            else:
                kind = next((kind for kind, part in KINDS.items() if part in command), "other")
            seen = {
                "count": 1,
                "pss_mib": process.memory_full_info().pss / 2**20,
                "threads": process.num_threads(),
                "files": process.num_fds(),
            }
            total = found.setdefault(kind, dict.fromkeys(seen, 0.0))
            for name, value in seen.items():
                total[name] = round(total[name] + value, 1)
    return dict(sorted(found.items()))


def folder_size(folder: Path) -> dict[str, int]:
    """Return the number and the bytes of the files below a folder. Files that are deleted meanwhile do not count."""
    files = size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                size += Path(parent, name).lstat().st_size
                files += 1
    return {"files": files, "bytes": size}


def top_of(folder: Path) -> dict[str, int]:
    """Count the entries of a folder by the part of their names before the first hyphen."""
    return dict(collections.Counter(entry.name.split("-")[0][:24] for entry in folder.iterdir()))


def xcom_bytes(airflow: AirflowServer) -> int:
    """Return the bytes, as JSON, of the return values of all tasks in the newest successful run."""
    run = next(run for run in reversed(airflow.client.dag_runs(DAG)) if run["state"] == "success")
    tasks: list[Any] = airflow.client.task_instances(DAG, run["dag_run_id"])
    return sum(len(json.dumps(airflow.client.xcom(DAG, run["dag_run_id"], t["task_id"]))) for t in tasks)


if __name__ == "__main__":
    main()
