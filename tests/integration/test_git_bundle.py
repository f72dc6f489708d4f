"""A pipeline beside its DAG in a git bundle: each run takes the code of its own version, processor included. Only with CAIRN_TESTS=all,
since Airflow's provider for git is installed first.

    CAIRN_TESTS=all pytest tests/integration/test_git_bundle.py
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from cairn import output_files
from local_stack.owned_process import python_path
from state_backend.adapters.open_storage import open_storage
from state_backend.checkpoint.log import read_log
from tests.support.layout import REPOSITORY
from tests.support.local_stack import AirflowServer
from tests.support.sums_pipeline import SUMS_PIPELINE

pytestmark = [pytest.mark.airflow, pytest.mark.spark]

DAG = """
# An Airflow DAG.
from datetime import UTC, datetime
from cairn_operators import stateful_pipeline

dag = stateful_pipeline("sums", code="sums_pipeline:SUMS", root={root!r}, schedule="@daily",
                        start_date=datetime(2024, 1, 1, tzinfo=UTC), catchup=False, spark_conf={{"spark.sql.shuffle.partitions": 1}})
"""


def git(repository: Path, *arguments: str) -> str:
    person = ("-c", "user.name=Ann", "-c", "user.email=ann@example.org")
    done = subprocess.run(
        ["git", "-C", str(repository), *person, *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def commit(repository: Path, factor: int) -> str:
    (repository / "team/factor.py").write_text(f"FACTOR = {factor}\n")
    git(repository, "add", "-A")
    git(repository, "commit", "-qm", f"times {factor}")
    return git(repository, "rev-parse", "HEAD")


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Not below pytest's own folder, which nobody but its owner may enter: PostgreSQL does not run as root."""
    made = Path(tempfile.mkdtemp(prefix="cairn-bundle-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.mark.long("minutes: installs a provider and starts Airflow")
def test_a_run_takes_the_code_of_its_version(folder: Path) -> None:
    provider, repository, root = folder / "provider", folder / "repository", folder / "state"
    uv = [str(Path(sys.executable).with_name("uv")), "pip", "install", "-q", "--no-deps", "--python", sys.executable]
    wanted = ["apache-airflow-providers-git", "gitpython", "gitdb", "smmap"]
    subprocess.run([*uv, "--target", str(provider), *wanted], check=True, env={**os.environ, "UV_SYSTEM_CERTS": "true"})
    (repository / "team").mkdir(parents=True)
    git(repository, "init", "-q", "-b", "main")
    (repository / "team/sums_pipeline.py").write_text(SUMS_PIPELINE)
    (repository / "team/sums.py").write_text(DAG.format(root=f"file://{root}"))
    first = commit(repository, 1)
    bundle = {
        "name": "team",
        "classpath": "airflow.providers.git.bundles.git.GitDagBundle",
        "kwargs": {"repo_url": str(repository), "tracking_ref": "main", "subdir": "team", "refresh_interval": 5},
    }
    env = {
        "AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_CONFIG_LIST": json.dumps([bundle]),
        "AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_STORAGE_PATH": str(folder / "bundles"),
        "AIRFLOW_CONN_CAIRN_SPARK": '{"conn_type": "spark", "host": "local[1]"}',
        "PYTHONPATH": python_path(provider, REPOSITORY / "plugins", REPOSITORY),
    }
    with AirflowServer(REPOSITORY, home=folder / "home", env=env) as airflow:
        airflow.wait_for_dag("sums", timeout_s=120)
        client = airflow.client
        client.call("PATCH", "/api/v2/dags/sums", {"is_paused": False})

        def ran(day: int) -> str:
            whole = {
                "data_interval_start": f"2024-01-0{day}T00:00:00Z",
                "data_interval_end": f"2024-01-0{day + 1}T00:00:00Z",
            }
            run = client.trigger("sums", f"2024-01-0{day}T00:00:00Z", **whole)["dag_run_id"]
            assert client.wait_for_runs("sums", [run], timeout_s=300) == {run: "success"}, client.log(
                "sums", run, "process", 1
            )
            return run

        def totals(day: int) -> dict[str, int]:
            start = datetime(2024, 1, day, tzinfo=UTC)
            files = output_files(f"file://{root}", "sums", start=start, end=start + timedelta(days=1))
            return {row["user"]: row["total"] for file in files for row in pq.read_table(file).to_pylist()}

        def version_of(run: str) -> str:
            (bundle_version,) = {
                v["bundle_version"]
                for r in client.dag_runs("sums")
                if r["dag_run_id"] == run
                for v in r["dag_versions"]
            }
            return str(bundle_version)

        run = ran(1)
        assert version_of(run) == first and totals(1) == {"ann": 1, "bob": 2}
        second = commit(repository, 10)
        deadline_s = time.monotonic() + 120
        while client.call("GET", "/api/v2/dags/sums")["bundle_version"] != second:
            assert time.monotonic() < deadline_s, "the bundle was not refreshed"
            time.sleep(0.5)
        assert version_of(ran(2)) == second and totals(2) == {"ann": 11, "bob": 22}
        # A clear runs the version that the run had; its code is the one that processed the first day before.
        client.clear("sums", run, ["process"])
        assert client.wait_for_runs("sums", [run], timeout_s=300) == {run: "success"}
        assert totals(1) == {"ann": 1, "bob": 2}
    records = read_log(open_storage(f"file://{root}/sums")).completed()
    codes = {record.content.interval.start.day: record.content.code_hash for record in records}
    assert codes[1] != codes[2] and records[-1].reproduces == 1
