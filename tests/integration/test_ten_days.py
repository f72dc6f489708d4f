"""Ten days of flights on a Spark standalone cluster, by the commands of docs/clusters.md: environment, master, two workers, connection,
backfill. State is on a GCS server. One more day runs in the packed environment. The digest of each day equals that of a run in one
process. Only with CAIRN_TESTS=all: it installs PySpark, and needs a package index.

    CAIRN_TESTS=all pytest tests/integration/test_ten_days.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from local_stack.owned_process import OwnedProcesses, claim_port, python_path
from state_backend.adapters.open_storage import open_storage
from state_backend.checkpoint.log import read_log
from state_backend.values.intervals import format_instant
from tests.support.airflow_on_postgres import airflow_on_postgres
from tests.support.doc_blocks import commands_in
from tests.support.gcs_server import BUCKET, gcs_server
from tests.support.layout import REPOSITORY
from tests.support.local_stack import AirflowServer
from tests.support.printed_commands import run_printed
from tests.support.reading import read_output
from tests.support.spark_cluster import HOSTS
from tests.support.waiting import wait_until
from tests.support.wheel import build_wheel

pytestmark = [pytest.mark.airflow, pytest.mark.spark, pytest.mark.cluster, pytest.mark.gcs]

MASTER = "127.0.0.1"
DAYS = 10
STATE = f"gs://{BUCKET}/state"


@dataclass
class Page:
    """The commands of docs/clusters.md, each of which a test takes once. ``here``: this machine's names for those of the page."""

    here: dict[str, str]
    left: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        text = (REPOSITORY / "docs/clusters.md").read_text()
        section = text.partition("## Spark standalone\n")[2].partition("\n## ")[0]
        self.left = [command for command, _ in commands_in("\n".join(_blocks(section)))]
        self.left += [command for command, _ in commands_in("\n".join(_blocks(text))) if "venv-pack" in command]

    def take(self, words: str) -> str:
        """The one command with these words, with the names of this machine."""
        (command,) = (command for command in self.left if words in command)
        self.left.remove(command)
        for theirs, ours in self.here.items():
            command = command.replace(theirs, ours)
        return command


def _blocks(text: str) -> list[str]:
    return [block.partition("```")[0].rstrip("\n") for block in text.split("```console\n")[1:]]


@dataclass
class Site:
    """A cluster, and the folder of what runs on it."""

    page: Page
    folder: Path

    def type(self, command: str, **variables: str) -> str:
        paths = python_path(*(REPOSITORY / part for part in ("", "jobs", "plugins")))
        own = {"CAIRN_FLIGHTS": str(self.folder / "flights"), "PYTHONPATH": paths, "SPARK_LOCAL_IP": MASTER}
        return run_printed(command, self.folder, **own, **variables)

    def executors(self) -> set[Path]:
        """The folders of executors that have run."""
        return {path.parent for path in (self.folder / "cairn" / "work").glob("app-*/*/stderr")}

    def assert_as_in_one_process(self, root: str, days: int) -> None:
        """Digests and output of all days equal those of a run on this process's cores."""
        local = f"file://{self.folder}/local"
        to = f"--from 2013-01-01 --to 2013-01-{days:02} --every 1d"
        self.type(f"cairn run --code pipelines.aircraft:AIRCRAFT {to} --root {local} --reprocess none")
        found, expected = results(root), results(local)
        assert len(expected) == days and found == expected
        print(
            *(f"{day[:10]} {digest:016x} {len(rows)} rows" for day, (digest, rows) in found.items()),
            sep="\n",
            flush=True,
        )


def results(root: str) -> dict[str, tuple[int, list[str]]]:
    """The digest of the state and the rows of the output, by day."""
    where = f"{root}/aircraft"
    return {
        format_instant(record.content.interval.start): (
            record.content.digest,
            sorted(json.dumps(row, default=str, sort_keys=True) for row in read_output(where, record)),
        )
        for record in read_log(open_storage(where)).completed()
    }


@dataclass
class Stack:
    """The cluster, and an Airflow whose drivers use it."""

    site: Site
    airflow: AirflowServer

    def type(self, command: str) -> str:
        names = ("AIRFLOW", "NO_PROXY", "no_proxy")
        env = {name: value for name, value in self.airflow.env.items() if name.startswith(names)}
        return self.site.type(command, **env, CAIRN_AIRFLOW=self.airflow.client.url)

    def ended(self, days: int) -> None:
        """Wait until the runs of the first days have succeeded."""

        def states() -> list[str]:
            return [run["state"] for run in self.airflow.client.dag_runs("aircraft")]

        def done() -> bool:
            found = states()
            return len(found) == days and {*found} <= {"success", "failed"}

        wait_until(done, 3000, f"{days} runs", poll_s=3)
        assert {*states()} == {"success"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("ten_days")
    land = [sys.executable, "-m", "pipelines.land_flights", "--to", str(made / "flights"), "--days", str(DAYS + 1)]
    subprocess.run(land, cwd=REPOSITORY, check=True, capture_output=True)
    (made / "dags").mkdir()
    (made / "dags" / "aircraft.py").symlink_to(REPOSITORY / "dags" / "aircraft.py")
    (made / "cairn" / "tmp").mkdir(parents=True)
    return made


@contextmanager
def cluster(page: Page, folder: Path, port: int) -> Iterator[None]:
    """Master and workers, by the commands of the page. A real host has an address and a web port of its own."""
    processes = OwnedProcesses(folder / "logs")
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYSPARK", "SPARK", "AIRFLOW"))}
    master, worker = page.take("deploy.master.Master"), page.take("deploy.worker.Worker")
    try:
        for host, command in ((MASTER, master), *((host, worker.replace("HOST", host)) for host in HOSTS)):
            ports = {f"SPARK_{role}_WEBUI_PORT": str(claim_port(0)) for role in ("MASTER", "WORKER")}
            env = {**plain, **ports, "SPARK_LOCAL_IP": host}
            processes.start(f"spark-{host}", ["bash", "-c", command], env=env, cwd=folder)
        said = folder / "logs" / f"spark-{MASTER}.log"
        wait_until(
            lambda: said.read_text().count("Registering worker") == len(HOSTS), 180, f"two workers of port {port}"
        )
        yield
    finally:
        processes.stop(grace_s=5)


@pytest.fixture(scope="module")
def site(folder: Path) -> Iterator[Site]:
    port = claim_port(0)
    wheel = build_wheel(folder)
    wheel.rename(folder / "cairn" / wheel.name)
    page = Page(
        {
            "MASTER:7077": f"{MASTER}:{port}",
            "--host MASTER --port 7077": f"--host {MASTER} --port {port}",
            "/srv/cairn": str(folder / "cairn"),
            "VERSION": wheel.name.split("-")[1],
            "gs://bucket": f"gs://{BUCKET}",
        }
    )
    run_printed(page.take("cd /srv/cairn"), folder)
    with gcs_server(), cluster(page, folder, port):
        yield Site(page, folder)


@pytest.fixture(scope="module")
def stack(site: Site) -> Iterator[Stack]:
    env = {
        "CAIRN_DATA": str(site.folder / "data"),
        "CAIRN_FLIGHTS": str(site.folder / "flights"),
        "CAIRN_ROOT": STATE,
        "CAIRN_EXPECTATIONS_DAYS": "5",
        "SPARK_LOCAL_IP": MASTER,
    }
    with airflow_on_postgres(site.folder, env, dags=["aircraft"]) as airflow:
        yield Stack(site, airflow)


@pytest.mark.long("ten minutes: installs PySpark, and runs ten days on a Spark cluster of processes")
def test_ten_days_in_one_cluster_application_equal_a_run_in_one_process(site: Site) -> None:
    site.type(site.page.take("cairn run"))
    site.assert_as_in_one_process(f"gs://{BUCKET}/run", DAYS)
    assert len(site.executors()) == 2


@pytest.mark.long(
    "twenty minutes: ten days through Airflow, each with two applications on a Spark cluster of processes"
)
def test_ten_days_by_the_documented_cluster_commands_equal_a_run_in_one_process(site: Site, stack: Stack) -> None:
    before = site.executors()
    stack.type(site.page.take("airflow connections add"))
    assert f"{DAYS} runs from 2013-01-01 to 2013-01-10 (UTC)" in stack.type(site.page.take("cairn backfill"))
    stack.ended(DAYS)
    said = stack.type("; ".join((site.page.take("export CAIRN_ROOT"), site.page.take("cairn status; cairn check"))))
    assert said.startswith("next: [2013-01-11T00:00:00Z, 2013-01-12T00:00:00Z)")
    assert f"{DAYS} of {DAYS} checkpoints are intact" in said
    site.assert_as_in_one_process(STATE, DAYS)
    # Processing and validation of each day had an executor on each host.
    assert len(site.executors() - before) >= 2 * DAYS


@pytest.mark.long("ten minutes: packs an environment of 850 MB, and two executors unpack it")
def test_a_day_in_the_packed_environment_equals_a_run_in_one_process(site: Site, stack: Stack) -> None:
    """The day after those of the test before. Without the test before, the first day."""
    day, before = len(results(STATE)) + 1, site.executors()
    run_printed(f"cd {site.folder / 'cairn'} && {site.page.take('venv-pack')}", site.folder)
    packed = {"spark.archives": f"{site.folder}/cairn/env.tar.gz#env", "spark.pyspark.python": "./env/bin/python"}
    conf = {"spark.executor.memory": "1g", "spark.executor.cores": 1, "spark.cores.max": 2, **packed}
    where = {"connection_id": "cairn_spark", "conn_type": "spark", "host": f"spark://{site.page.here['MASTER:7077']}"}
    if day > 1:
        stack.airflow.client.call("DELETE", "/api/v2/connections/cairn_spark")
    stack.airflow.client.call("POST", "/api/v2/connections", {**where, "extra": json.dumps({"conf": conf})})
    stack.type(f"cairn backfill --dag aircraft --from 2013-01-{day:02} --to 2013-01-{day:02}")
    stack.ended(day)
    site.assert_as_in_one_process(STATE, day)
    unpacked = site.executors() - before
    assert len(unpacked) >= 2 and all((folder / "env/bin/python").exists() for folder in unpacked)
