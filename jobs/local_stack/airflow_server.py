"""A whole Airflow on the loopback interface, and the few calls of its REST API that the demo and the tests need."""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from cairn.command.airflow_rest import ADMIN, AirflowRest, Backfill, RestError
from cairn.spark.local_server_secret import kept_secret, new_secret
from local_stack.owned_process import OwnedProcesses, Server, claim_port
from local_stack.postgres import Postgres, PostgresUnavailable

__all__ = ["AirflowClient", "AirflowServer", "RestError", "parse_time"]

_ENDED = ("success", "failed")
_DATABASE = "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"
# Airflow's name for the file.
_PASSWORDS = "simple_auth_manager_passwords.json.generated"
# The log servers bind to every interface and can't be told not to; task logs lie on this machine, so they are not needed.
_COMPONENTS = {
    "api-server": ["api-server"],
    "scheduler": ["scheduler", "--skip-serve-logs"],
    "dag-processor": ["dag-processor"],
    "triggerer": ["triggerer", "--skip-serve-logs"],
}


class AirflowClient(AirflowRest):
    """Airflow's REST API. Method names follow what is asked for, values are Airflow's own JSON."""

    def healthy(self) -> bool:
        """Whether API server, scheduler, DAG processor and triggerer all say so."""
        try:
            health = self.call("GET", "/api/v2/monitor/health")
        except (OSError, RestError):
            return False
        parts = ("metadatabase", "scheduler", "dag_processor", "triggerer")
        return all(health[part]["status"] == "healthy" for part in parts)

    def has_dag(self, dag_id: str) -> bool:
        """Whether the DAG is there; RuntimeError with the import errors if there are any."""
        if errors := self.call("GET", "/api/v2/importErrors")["import_errors"]:
            raise RuntimeError("\n".join(f"{e['filename']}: {e['stack_trace']}" for e in errors))
        try:
            self.call("GET", f"/api/v2/dags/{dag_id}")
        except RestError as error:
            if error.status != 404:
                raise
            return False
        return True

    def trigger(self, dag_id: str, logical_date: str | None = None, **more: Any) -> dict[str, Any]:
        """A manual run; ``more``: data_interval_start, data_interval_end, conf."""
        run: dict[str, Any] = self.call(
            "POST", f"/api/v2/dags/{dag_id}/dagRuns", {"logical_date": logical_date, **more}
        )
        return run

    def backfill(
        self,
        dag_id: str,
        first: str,
        last: str,
        *,
        max_active_runs: int = 1,
        reprocess_behavior: str = "completed",
        conf: Mapping[str, Any] | None = None,
        timeout_s: float = 60,
    ) -> Backfill:
        """As ``create_backfill``, of dates as text."""
        return self.create_backfill(
            dag_id,
            datetime.fromisoformat(first),
            datetime.fromisoformat(last),
            max_active_runs=max_active_runs,
            reprocess=reprocess_behavior,
            conf=conf,
            timeout_s=timeout_s,
        )

    def dag_runs(self, dag_id: str) -> list[dict[str, Any]]:
        """Up to 1000 runs, oldest logical date first."""
        runs: list[dict[str, Any]] = []
        while len(runs) < 1000:
            page = f"limit=100&offset={len(runs)}&order_by=logical_date"
            answer = self.call("GET", f"/api/v2/dags/{dag_id}/dagRuns?{page}")
            runs += answer["dag_runs"]
            if not answer["dag_runs"] or len(runs) >= answer["total_entries"]:
                break
        return runs

    def task_instances(self, dag_id: str, run_id: str) -> list[dict[str, Any]]:
        """The tasks of a run, each as Airflow answers it."""
        found: list[dict[str, Any]] = self.call("GET", f"{_run(dag_id, run_id)}/taskInstances")["task_instances"]
        return found

    def tries(self, dag_id: str, run_id: str, task_id: str) -> list[dict[str, Any]]:
        """All tries of a task, the present one included, also those from before a clear."""
        found: list[dict[str, Any]] = self.call("GET", f"{_run(dag_id, run_id)}/taskInstances/{task_id}/tries")[
            "task_instances"
        ]
        return found

    def xcom(self, dag_id: str, run_id: str, task_id: str) -> Any:
        """What the task returned; None if nothing."""
        path = f"{_run(dag_id, run_id)}/taskInstances/{task_id}/xcomEntries/return_value?deserialize=true"
        try:
            return self.call("GET", path)["value"]
        except RestError as error:
            if error.status != 404:
                raise
            return None

    def log(self, dag_id: str, run_id: str, task_id: str, try_number: int) -> list[str]:
        """The lines of a task's log."""
        path = f"{_run(dag_id, run_id)}/taskInstances/{task_id}/logs/{try_number}?full_content=true"
        content = self.call("GET", path)["content"]
        return [line if isinstance(line, str) else _log_line(line) for line in content]

    def clear(
        self, dag_id: str, run_id: str, task_ids: Iterable[str], *, downstream: bool = True, future: bool = False
    ) -> None:
        """``future``: the same tasks of all later runs too."""
        self.call(
            "POST",
            f"/api/v2/dags/{dag_id}/clearTaskInstances",
            {
                "dry_run": False,
                "dag_run_id": run_id,
                "task_ids": list(task_ids),
                "only_failed": False,
                "include_downstream": downstream,
                "include_future": future,
            },
        )

    def fail_task(self, dag_id: str, run_id: str, task_id: str) -> None:
        """As if a person marked it failed: Airflow stops the task if it runs."""
        self.call("PATCH", f"{_run(dag_id, run_id)}/taskInstances/{task_id}", {"new_state": "failed"})

    def fail_run(self, dag_id: str, run_id: str) -> None:
        """As if a person marked the run failed."""
        self.call("PATCH", _run(dag_id, run_id), {"state": "failed"})

    def wait_for_runs(
        self,
        dag_id: str,
        run_ids: Iterable[str],
        *,
        timeout_s: float,
        check: Callable[[], None] = lambda: None,
    ) -> dict[str, str]:
        """State by run id, once all have ended; TimeoutError if they don't."""
        wanted, deadline_s = set(run_ids), time.monotonic() + timeout_s
        while True:
            check()
            states = {run["dag_run_id"]: run["state"] for run in self.dag_runs(dag_id) if run["dag_run_id"] in wanted}
            if states.keys() == wanted and all(state in _ENDED for state in states.values()):
                return states
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"runs of {dag_id} did not end in {timeout_s} s: {states}")
            time.sleep(1)


class AirflowServer(Server):
    """``with AirflowServer(repo_root, home=...) as airflow: airflow.client``. ``start`` alone does not wait until it is
    healthy: other things can start meanwhile, until ``wait_until_ready``.

    ``home`` is AIRFLOW_HOME, for its database and logs; configuration, DAGs and plugins are always the repository's. ``env`` is
    what its components run with, and whoever calls its command line needs. ``python`` is theirs, if not this one.

    Its database is a PostgreSQL in ``database_dir``, or SQLite where that can't run, which it says; or what
    AIRFLOW__DATABASE__SQL_ALCHEMY_CONN names. ``database`` says which, once it has started.

    Every user of the machine can reach its port, so Airflow asks for the ``password`` of the user ``admin``. The password is random, and
    the same for every start in this ``home``. Commands of this user find the password.
    """

    def __init__(
        self,
        repo_root: Path,
        *,
        home: Path,
        port: int = 0,
        log_dir: Path | None = None,
        database_dir: Path | None = None,
        env: Mapping[str, str] | None = None,
        python: Path | None = None,
    ) -> None:
        self.repo_root = repo_root
        self.home = home
        home.mkdir(parents=True, exist_ok=True)
        self.python = str(python or sys.executable)
        self.database = "of your own"
        self._postgres = Postgres(
            database_dir or home / "airflow.postgres", log_dir=log_dir or home / "logs" / "components"
        )
        self.port = claim_port(port)
        self.passwords = home / _PASSWORDS
        self.password = _password(self.passwords)
        self.client = AirflowClient(f"http://127.0.0.1:{self.port}", password=self.password)
        self._kept = ExitStack()
        self.processes = OwnedProcesses(log_dir or home / "logs" / "components")
        self.env = {
            **os.environ,
            "AIRFLOW_HOME": str(home),
            "AIRFLOW_CONFIG": str(repo_root / "airflow.cfg"),
            "AIRFLOW__CORE__DAGS_FOLDER": str(repo_root / "dags"),
            "AIRFLOW__CORE__PLUGINS_FOLDER": str(repo_root / "plugins"),
            "AIRFLOW__API__PORT": str(self.port),
            # Tasks call back here, not to [api] host and port.
            "AIRFLOW__API__BASE_URL": self.client.url,
            "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "10",
            # Every worker imports Airflow anew before its first task: as many as there are cores, no more.
            "AIRFLOW__CORE__PARALLELISM": "2",
            # A run is a few short tasks one after the other: most of its time would be the scheduler's sleep of 1 s.
            "AIRFLOW__SCHEDULER__SCHEDULER_IDLE_SLEEP_TIME": "0.2",
            "PYTHONPATH": os.pathsep.join([str(repo_root / "jobs"), str(repo_root)]),
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
            **(env or {}),
        }

    def start(self) -> None:
        """Creates or migrates the database (some seconds), starts the components."""
        if not os.environ.get(_DATABASE) and not self.env.get(_DATABASE):
            self._start_database()
        migrate = [self.python, "-c", "from airflow.utils.db import initdb; initdb()"]
        self.processes.start("database", migrate, env=self.env, cwd=self.repo_root)
        if code := self.processes.wait("database"):
            tail = self.processes.log_path("database").read_text(errors="replace")[-3000:]
            raise RuntimeError(f"Airflow's database could not be set up (code {code}):\n{tail}")
        # Who can't write there gives the commands a token by CAIRN_AIRFLOW_TOKEN.
        with suppress(OSError):
            self._kept.enter_context(kept_secret("airflow", self.port, self.password))
        for name, arguments in _COMPONENTS.items():
            command = [self.python, "-m", "airflow", *arguments]
            self.processes.start(name, command, env=self.env, cwd=self.repo_root)

    def wait_until_ready(self, timeout_s: float = 180) -> None:
        """Raises: TimeoutError if Airflow is not healthy by then; RuntimeError if a process of it has ended."""
        deadline_s = time.monotonic() + timeout_s
        while not self.client.healthy():
            self.processes.check_alive()
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"Airflow is not healthy after {timeout_s} s; logs: {self.processes.log_dir}")
            time.sleep(0.5)

    def wait_for_dag(self, dag_id: str, timeout_s: float = 60) -> None:
        """Waits until Airflow has parsed a DAG. Raises: as ``wait_until_ready``."""
        deadline_s = time.monotonic() + timeout_s
        while not self.client.has_dag(dag_id):
            self.processes.check_alive()
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"Airflow found no DAG {dag_id} in {timeout_s} s; logs: {self.processes.log_dir}")
            time.sleep(0.5)

    @property
    def task_logs(self) -> Path:
        """The folder of the tasks' logs."""
        return Path(self.env.get("AIRFLOW__LOGGING__BASE_LOG_FOLDER", self.home / "logs"))

    def pids(self) -> Iterator[int]:
        """All of its processes and the database's, as long as they live."""
        yield from self.processes.pids()
        yield from self._postgres.pids()

    def stop(self) -> None:
        """The scheduler waits for running tasks; after 10 s they are killed. The database goes last."""
        try:
            self.processes.stop(grace_s=10)
        finally:
            self._kept.close()
            self._postgres.stop()

    def _start_database(self) -> None:
        """Tells airflow.cfg which one it is, by a file: so does a command line in another terminal."""
        try:
            self._postgres.start()
            self._postgres.wait_until_ready()
            url, self.database = self._postgres.url, "PostgreSQL in this folder"
        except PostgresUnavailable as error:
            url, self.database = f"sqlite:///{self.home}/airflow.db", "SQLite"
            print(
                f"Airflow's database is SQLite, which may refuse a backfill while the scheduler runs ({error})",
                flush=True,
            )
        (self.home / ".airflow-database").write_text(url + "\n")


def _password(file: Path) -> str:
    """Return the password of the user ``admin``, which Airflow reads from the file. Make the file, for this user only, if it is missing."""
    with suppress(FileExistsError), os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as made:
        json.dump({ADMIN: new_secret()}, made)
    file.chmod(0o600)
    passwords = json.loads(file.read_text() or "{}")
    if ADMIN not in passwords:
        raise RuntimeError(f"{file} has no password of the user {ADMIN}; delete the file, and start again")
    return str(passwords[ADMIN])


def parse_time(text: str | None) -> datetime | None:
    """A timestamp of the API."""
    return None if text is None else datetime.fromisoformat(text)


def task_log(folder: Path, dag_id: str, run_id: str, task_id: str, try_number: int) -> Path:
    """Return the path of a try's log, as Airflow's default ``log_filename_template`` lays it out."""
    return folder / f"dag_id={dag_id}" / f"run_id={run_id}" / f"task_id={task_id}" / f"attempt={try_number}.log"


def _run(dag_id: str, run_id: str) -> str:
    return f"/api/v2/dags/{dag_id}/dagRuns/{urllib.parse.quote(run_id, safe='')}"


def _log_line(entry: dict[str, Any]) -> str:
    """One structured log entry as a line; what an exception says comes from its last cause."""
    text = f"{str(entry.get('level', '')).upper():8}{entry.get('event', '')}"
    for problem in entry.get("error_detail") or []:
        text += f"\n    {problem.get('exc_type')}: {problem.get('exc_value')}"
    return text
