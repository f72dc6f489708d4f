"""Airflow on the loopback interface, and a client for its REST API.

The client has the calls that the demo and the tests need.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.parse
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from cairn.command.airflow_rest import ADMIN, AirflowRest, RestError
from cairn.spark.local_server_secret import kept_secret, new_secret
from local_stack.owned_process import OwnedProcesses, Server, claim_port, python_path
from local_stack.patience import Patience
from local_stack.postgres_server import Postgres, PostgresUnavailable
from local_stack.progress_lines import fold

__all__ = ["AirflowClient", "AirflowServer", "RestError", "parse_time"]

# The components whose health Airflow's API server reports.
_PARTS = frozenset({"metadatabase", "scheduler", "dag_processor", "triggerer"})
_DATABASE = "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"
# Airflow's own name for the file that holds the password.
_PASSWORDS = "simple_auth_manager_passwords.json.generated"
# Airflow's log servers bind to every network interface, and no setting changes this. Task logs are on this machine, so
# no log server is needed.
_COMPONENTS = {
    "api-server": ["api-server"],
    "scheduler": ["scheduler", "--skip-serve-logs"],
    "dag-processor": ["dag-processor"],
    "triggerer": ["triggerer", "--skip-serve-logs"],
}


class AirflowClient(AirflowRest):
    """Client of Airflow's REST API. Return values are Airflow's own JSON."""

    def healthy_parts(self) -> frozenset[str]:
        try:
            health = self.call("GET", "/api/v2/monitor/health")
        except (OSError, RestError):
            return frozenset()
        return frozenset(part for part in _PARTS if health[part]["status"] == "healthy")

    def has_dag(self, dag_id: str) -> bool:
        if errors := self.call("GET", "/api/v2/importErrors")["import_errors"]:
            raise RuntimeError("\n".join(f"{e['filename']}: {e['stack_trace']}" for e in errors))
        try:
            self.call("GET", f"/api/v2/dags/{dag_id}")
        except RestError as error:
            if error.status != 404:
                raise
            return False
        return True

    def dag_runs(self, dag_id: str) -> list[dict[str, Any]]:
        """Return all runs, the oldest logical date first."""
        return self._rows(f"/api/v2/dags/{dag_id}/dagRuns", "dag_runs", order_by="logical_date")

    def task_instances(self, dag_id: str, run_id: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.call("GET", f"{run_path(dag_id, run_id)}/taskInstances")["task_instances"]
        return found

    def tries(self, dag_id: str, run_id: str, task_id: str) -> list[dict[str, Any]]:
        """Return all tries of a task, including the present try and tries before a clear."""
        found: list[dict[str, Any]] = self.call("GET", f"{run_path(dag_id, run_id)}/taskInstances/{task_id}/tries")[
            "task_instances"
        ]
        return found

    def xcom(self, dag_id: str, run_id: str, task_id: str) -> Any:
        """Return the task's return value (the XCom `return_value`); None if the task returned no value."""
        path = f"{run_path(dag_id, run_id)}/taskInstances/{task_id}/xcomEntries/return_value?deserialize=true"
        try:
            return self.call("GET", path)["value"]
        except RestError as error:
            if error.status != 404:
                raise
            return None

    def log(self, dag_id: str, run_id: str, task_id: str, try_number: int) -> list[str]:
        """Return the lines of the log of one try."""
        path = f"{run_path(dag_id, run_id)}/taskInstances/{task_id}/logs/{try_number}?full_content=true"
        content = self.call("GET", path)["content"]
        return [line if isinstance(line, str) else _log_line(line) for line in content]

    def fail_run(self, dag_id: str, run_id: str) -> None:
        """Mark a run as failed, as a user can in the UI."""
        self.call("PATCH", run_path(dag_id, run_id), {"state": "failed"})


class AirflowServer(Server):
    """An Airflow on this machine, for use in a `with` block.

        with AirflowServer(repo_root, home=..., log_dir=...) as airflow:
            airflow.client.dag_runs(...)

    `start` does not wait until Airflow is healthy. A caller may start other servers before it calls `wait_until_ready`.

    The database is the one that AIRFLOW__DATABASE__SQL_ALCHEMY_CONN names. Without this variable the database is a
    PostgreSQL server below `home`. If PostgreSQL can't run, the database is SQLite, and the program prints this.

    Every user of the machine can reach the port. So Airflow demands the password of the user `admin`. The password is
    random, and stays the same for every start with the same `home`. Commands of this user find the password in a file.
    """

    def __init__(
        self, repo_root: Path, *, home: Path, port: int = 0, log_dir: Path, env: Mapping[str, str] | None = None
    ) -> None:
        self.repo_root = repo_root
        self.home = home
        home.mkdir(parents=True, exist_ok=True)
        self.python = sys.executable
        self.database = "your own"
        self.postgres = Postgres(home / "airflow.postgres", log_dir=log_dir)
        self.port = claim_port(port)
        self.passwords = home / _PASSWORDS
        self.password = _password(self.passwords)
        self.client = AirflowClient(f"http://127.0.0.1:{self.port}", password=self.password)
        self._kept = ExitStack()
        self.processes = OwnedProcesses(log_dir)
        self.env = {
            **os.environ,
            "AIRFLOW_HOME": str(home),
            "AIRFLOW_CONFIG": str(repo_root / "airflow.cfg"),
            "AIRFLOW__CORE__DAGS_FOLDER": str(repo_root / "dags"),
            "AIRFLOW__CORE__PLUGINS_FOLDER": str(repo_root / "plugins"),
            "AIRFLOW__API__PORT": str(self.port),
            # Tasks send their API requests to this URL, not to host and port in the section [api].
            "AIRFLOW__API__BASE_URL": self.client.url,
            "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "10",
            # Every worker imports Airflow again before its first task. More than two workers would slow down a machine
            # with two cores.
            "AIRFLOW__CORE__PARALLELISM": "2",
            # A run is a few short tasks in sequence. With the default of 1 s, the scheduler's sleep would take most of
            # the run's time.
            "AIRFLOW__SCHEDULER__SCHEDULER_IDLE_SLEEP_TIME": "0.2",
            "PYTHONPATH": python_path(repo_root / "jobs", repo_root),
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
            **(env or {}),
        }

    def start(self) -> None:
        """Create or migrate the database, which takes some seconds, and start the components."""
        if not os.environ.get(_DATABASE) and not self.env.get(_DATABASE):
            self._start_database()
        migrate = [self.python, "-c", "from airflow.utils.db import initdb; initdb()"]
        self.processes.start("database", migrate, env=self.env, cwd=self.repo_root)
        if code := self.processes.wait("database"):
            tail = self.processes.log_path("database").read_text(errors="replace")[-3000:]
            raise RuntimeError(f"Airflow's database could not be set up (code {code}):\n{tail}")
        # Commands of this user read the password from this file. If the file can't be written, the user must pass a
        # token to commands in CAIRN_AIRFLOW_TOKEN.
        with suppress(OSError):
            self._kept.enter_context(kept_secret("airflow", self.port, self.password))
        for name, arguments in _COMPONENTS.items():
            command = [self.python, "-m", "airflow", *arguments]
            self.processes.start(name, command, env=self.env, cwd=self.repo_root)

    def wait_until_ready(self, timeout_s: float = 180) -> None:
        patience = Patience(time.monotonic(), least_s=timeout_s)
        while (healthy := self.client.healthy_parts()) != _PARTS:
            self.processes.check_alive()
            if patience.is_over(healthy, time.monotonic()):
                raise TimeoutError(
                    f"Airflow's {', '.join(sorted(_PARTS - healthy))} did not become healthy within {patience.limit_s:.0f} s; "
                    f"logs: {self.processes.log_dir}"
                )
            time.sleep(0.5)

    def wait_for_dag(self, dag_id: str, timeout_s: float = 60) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not self.client.has_dag(dag_id):
            self.processes.check_alive()
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"Airflow found no DAG {dag_id} in {timeout_s} s; logs: {self.processes.log_dir}")
            time.sleep(0.5)

    @property
    def task_logs(self) -> Path:
        return Path(self.env.get("AIRFLOW__LOGGING__BASE_LOG_FOLDER", self.home / "logs"))

    def stop(self) -> None:
        """Stop Airflow, and then its database.

        The scheduler waits for running tasks. After 10 s, tasks that still run are killed.
        """
        try:
            self.processes.stop(grace_s=10)
        finally:
            self._kept.close()
            self.postgres.stop()

    def _start_database(self) -> None:
        """Start PostgreSQL, and write the database's URL to the file `.airflow-database` in `home`.

        airflow.cfg reads the URL from this file. So Airflow's command line in another terminal uses the same database.
        """
        try:
            self.postgres.start()
            self.postgres.wait_until_ready()
            url, self.database = self.postgres.url, "PostgreSQL in this folder"
        except PostgresUnavailable as error:
            url, self.database = f"sqlite:///{self.home}/airflow.db", "SQLite"
            refused = "Airflow uses SQLite, and may refuse a backfill while the scheduler runs"
            print(fold(f"{refused}: PostgreSQL can't run here ({error})"), flush=True)
        (self.home / ".airflow-database").write_text(url + "\n")


def _password(file: Path) -> str:
    """Return the password of the user `admin`.

    Airflow reads the password from the file. If the file is missing, it is created with a random password, readable by
    this user only.
    """
    with suppress(FileExistsError), os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as made:
        json.dump({ADMIN: new_secret()}, made)
    file.chmod(0o600)
    passwords = json.loads(file.read_text() or "{}")
    if ADMIN not in passwords:
        raise RuntimeError(f"{file} has no password for the user {ADMIN}; delete the file, and start Airflow again")
    return str(passwords[ADMIN])


def parse_time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


def task_log(folder: Path, dag_id: str, run_id: str, task_id: str, try_number: int) -> Path:
    return folder / f"dag_id={dag_id}" / f"run_id={run_id}" / f"task_id={task_id}" / f"attempt={try_number}.log"


def run_path(dag_id: str, run_id: str) -> str:
    return f"/api/v2/dags/{dag_id}/dagRuns/{urllib.parse.quote(run_id, safe='')}"


def _log_line(entry: dict[str, Any]) -> str:
    """Format a structured log entry as text, with one line for each exception in its chain."""
    text = f"{str(entry.get('level', '')).upper():8}{entry.get('event', '')}"
    for problem in entry.get("error_detail") or []:
        text += f"\n    {problem.get('exc_type')}: {problem.get('exc_value')}"
    return text
