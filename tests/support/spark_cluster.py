"""A Spark standalone cluster of processes: a master, and two workers with host names, temp folders and work folders of their own. Their
Python has what Cairn needs, and not Cairn."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from local_stack.owned_process import OwnedProcesses, claim_port, command_line
from tests.support.waiting import wait_until

HOSTS = ("127.0.0.2", "127.0.0.3")
# A third host, whose worker a test may start and end.
SPARE = "127.0.0.4"


class Cluster:
    """``processes``: master, workers, and what workers start. ``events``: where applications leave Spark's event logs. ``temp``: by host,
    TMPDIR of the worker, of its executors and of their Python workers."""

    def __init__(self, folder: Path, cores: int, temp: Mapping[str, Path]) -> None:
        self.folder = folder
        self.cores = cores
        self.temp = {host: temp.get(host, folder / f"temp-{host}") for host in (*HOSTS, SPARE)}
        self.processes = OwnedProcesses(folder / "logs")
        self.port = claim_port(0)
        self.url = f"spark://127.0.0.1:{self.port}"
        self.events = folder / "events"
        self.events.mkdir()
        self._started = 0
        # A Python with all packages of this one, and none of its .pth files: the editable install of Cairn is one of those.
        self.python = folder / "venv/bin/python"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
        (site,) = (folder / "venv/lib").glob("python*/site-packages")
        (site / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")

    @property
    def conf(self) -> dict[str, Any]:
        """Spark's configuration of an application that takes the whole cluster: an executor on each host."""
        return {
            "spark.pyspark.python": str(self.python),
            "spark.driver.host": "127.0.0.1",
            "spark.executor.memory": "512m",
            "spark.executor.cores": self.cores,
            "spark.cores.max": self.cores * len(HOSTS),
            "spark.scheduler.minRegisteredResourcesRatio": 1,
            "spark.sql.shuffle.partitions": 2,
            "spark.ui.enabled": False,
            "spark.eventLog.enabled": True,
            "spark.eventLog.dir": self.events.as_uri(),
            "spark.eventLog.rolling.enabled": False,
            "spark.eventLog.compress": False,
        }

    def start(self) -> None:
        ports = ("--port", str(self.port), "--webui-port", str(claim_port(0)))
        self._start("master", "Master", "127.0.0.1", "--host", "127.0.0.1", *ports)
        for host in HOSTS:
            self.start_worker(host)

    def start_worker(self, host: str) -> None:
        """A worker for the host, which has none or whose worker was ended."""
        work = ("--work-dir", str(self.folder / f"work-{host}"))
        size = ("--cores", str(self.cores), "--memory", "2g", "--webui-port", str(claim_port(0)))
        self._start("worker", "Worker", host, self.url, "--host", host, *size, *work)

    def _start(self, name: str, role: str, host: str, *arguments: str) -> None:
        spec = find_spec("pyspark")
        assert spec is not None and spec.origin is not None
        home = Path(spec.origin).parent
        temp = self.temp.get(host, self.folder / "temp-master")
        temp.mkdir(exist_ok=True)
        inherited = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        own = {
            "SPARK_HOME": str(home),
            "SPARK_LOCAL_IP": host,
            "SPARK_LOCAL_DIRS": str(self.folder / f"local-{host}"),
            "SPARK_WORKER_OPTS": "-Dspark.decommission.enabled=true",
            "TMPDIR": str(temp),
        }
        self._started += 1
        self.processes.start(
            f"{name}-{host}-{self._started}",
            [str(home / "bin/spark-class"), f"org.apache.spark.deploy.{role.lower()}.{role}", *arguments],
            env=inherited | own,
            cwd=self.folder,
        )

    # --- what runs on a host ---------------------------------------------------------------------------------------------------

    def processes_of(self, host: str, what: str = "") -> list[int]:
        """The host's processes: all, or those with this text in their command line."""
        mark = f"SPARK_LOCAL_IP={host}".encode()
        found = []
        for pid in self.processes.pids():
            with suppress(OSError):
                if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") and what in " ".join(
                    command_line(pid)
                ):
                    found.append(pid)
        return found

    def executors(self, host: str) -> list[int]:
        return self.processes_of(host, "CoarseGrainedExecutorBackend")

    def python_workers(self, host: str) -> list[int]:
        return self.processes_of(host, "pyspark.daemon") + self.processes_of(host, "pyspark.worker")

    def kill_host(self, host: str) -> None:
        """kill -9 of all that runs there, as if the host were gone."""
        while pids := self.processes_of(host):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def kill_executor(self, host: str) -> None:
        """kill -9 of the executor's JVM."""
        for pid in self.executors(host):
            os.kill(pid, signal.SIGKILL)

    def decommission(self, host: str) -> None:
        """As a cloud provider announces that a host goes away. Returns when the master knows."""
        (worker,) = self.processes_of(host, "deploy.worker.Worker")
        os.kill(worker, signal.SIGPWR)
        (master,) = self.processes.log_dir.glob("master-*.log")
        said = f"on {host}:"
        wait_until(
            lambda: any("Decommissioning worker" in line and said in line for line in master.read_text().splitlines()),
            60,
            f"{host} is decommissioned",
        )


@contextmanager
def cluster_in(folder: Path, cores: int = 1, temp: Mapping[str, Path] | None = None) -> Iterator[Cluster]:
    """``cores``: of each of the two workers; ``temp``: folders by host, in place of the cluster's own."""
    folder.mkdir()
    cluster = Cluster(folder, cores, temp or {})
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.processes.stop(grace_s=5)


@dataclass(frozen=True, slots=True)
class Seen:
    """What an application's event log says happened. ``added``: hosts of executors; ``executors``: of those that have not gone; ``removed``:
    why each went; ``copies``: speculative tasks that were started; ``failures``: why tasks did not succeed."""

    added: tuple[str, ...]
    executors: tuple[str, ...]
    removed: tuple[str, ...]
    copies: int
    failures: tuple[str, ...]


def seen_in(log: Path, after: int = 0) -> Seen:
    """Of what was logged behind so many bytes."""
    lines = log.read_bytes()[after:].split(b"\n")[:-1]  # behind the last is nothing, or a line that is being written
    events = [json.loads(line) for line in lines]

    def of(kind: str) -> list[dict[str, Any]]:
        return [event for event in events if event["Event"] == f"SparkListener{kind}"]

    reasons = [event["Task End Reason"] for event in of("TaskEnd")]
    gone = {event["Executor ID"] for event in of("ExecutorRemoved")}
    return Seen(
        added=tuple(event["Executor Info"]["Host"] for event in of("ExecutorAdded")),
        executors=tuple(e["Executor Info"]["Host"] for e in of("ExecutorAdded") if e["Executor ID"] not in gone),
        removed=tuple(event["Removed Reason"] for event in of("ExecutorRemoved")),
        copies=sum(event["Task Info"]["Speculative"] for event in of("TaskStart")),
        failures=tuple(r["Reason"] for r in reasons if r["Reason"] != "Success"),
    )
