"""The servers of `local_stack`, with what only tests and benchmarks ask of them."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cairn.command.airflow_rest import RestError
from local_stack import airflow_server, connect_server
from local_stack.owned_process import OwnedProcesses
from local_stack.postgres_server import Postgres
from local_stack.running_driver import RunningDriver

__all__ = ["AirflowClient", "AirflowServer", "RestError", "SparkConnectServer", "running_drivers"]

_ENDED = ("success", "failed")


class AirflowClient(airflow_server.AirflowClient):
    """A client that also starts, clears, fails and awaits runs."""

    def trigger(self, dag_id: str, logical_date: str | None = None, **more: Any) -> dict[str, Any]:
        """Start a manual run."""
        run: dict[str, Any] = self.call(
            "POST", f"/api/v2/dags/{dag_id}/dagRuns", {"logical_date": logical_date, **more}
        )
        return run

    def clear(
        self, dag_id: str, run_id: str, task_ids: Iterable[str], *, downstream: bool = True, future: bool = False
    ) -> None:
        """Clear tasks of a run, so that Airflow runs them again."""
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
        """Mark a task as failed, as a user can in the UI. Airflow stops the task if it runs."""
        path = f"{airflow_server.run_path(dag_id, run_id)}/taskInstances/{task_id}"
        self.call("PATCH", path, {"new_state": "failed"})

    def wait_for_runs(
        self, dag_id: str, run_ids: Iterable[str], *, timeout_s: float, check: Callable[[], None] = lambda: None
    ) -> dict[str, str]:
        """Wait until all given runs have ended."""
        wanted, deadline_s = set(run_ids), time.monotonic() + timeout_s
        while True:
            check()
            states = {run["dag_run_id"]: run["state"] for run in self.dag_runs(dag_id) if run["dag_run_id"] in wanted}
            if states.keys() == wanted and all(state in _ENDED for state in states.values()):
                return states
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"runs of the DAG {dag_id} did not end within {timeout_s} s: {states}")
            # A page of 100 runs costs the API server a tenth of a second of CPU.
            time.sleep(min(10, max(1, len(wanted) / 30)))


class AirflowServer(airflow_server.AirflowServer):
    """An Airflow whose database may be elsewhere, and whose Python may be another one."""

    client: AirflowClient

    def __init__(
        self,
        repo_root: Path,
        *,
        home: Path,
        log_dir: Path | None = None,
        database_dir: Path | None = None,
        env: Mapping[str, str] | None = None,
        python: Path | None = None,
    ) -> None:
        super().__init__(repo_root, home=home, log_dir=log_dir or home / "logs" / "components", env=env)
        self.client = AirflowClient(self.client.url, password=self.password)
        self.python = str(python or self.python)
        if database_dir is not None:
            self.postgres = Postgres(database_dir, log_dir=self.processes.log_dir)

    def pids(self) -> Iterator[int]:
        """Yield the ids of the running processes of Airflow and of its database."""
        yield from self.processes.pids()
        yield from self.postgres.processes.pids()


class SparkConnectServer(connect_server.SparkConnectServer):
    """A server with a token, a master and settings of its own, which can be killed."""

    def __init__(
        self,
        repo_root: Path,
        *,
        log_dir: Path,
        token: str | None = None,
        master: str | None = None,
        conf: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(repo_root, log_dir=log_dir)
        self.token, self.master, self.conf = token or self.token, master or self.master, {**(conf or {})}

    def pids(self) -> Iterator[int]:
        """Return an iterator over the ids of the running server and its running Python workers."""
        return self.processes.pids()

    def kill(self) -> None:
        """Send SIGKILL to the server and its Python workers. A later `start` uses the same port."""
        self.processes.stop(grace_s=0, signal_number=signal.SIGKILL)
        self._kept.close()


def running_drivers(processes: OwnedProcesses) -> Iterator[RunningDriver]:
    """Yield the drivers among these processes."""
    yield from filter(None, map(RunningDriver.of, processes.pids()))
