"""A real Airflow whose runs are in a PostgreSQL of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from local_stack.owned_process import python_path
from tests.support.local_stack import AirflowServer
from tests.support.postgres_server import folder_of_a_server
from tests.support.tiers import REPOSITORY


@contextmanager
def airflow_on_postgres(folder: Path, env: Mapping[str, str], *, dags: Sequence[str]) -> Iterator[AirflowServer]:
    """Start Airflow, wait until it has read the DAGs, and stop it afterwards.

    Args:
        folder: Folder with Airflow's home, its logs and the folder `dags`.
        env: More variables of Airflow's processes. Without PYTHONPATH, the processes import from the repository.
        dags: Ids of the DAGs to wait for.
    """
    with folder_of_a_server() as database:
        where = {"home": folder / "home", "log_dir": folder / "logs", "database_dir": database / "data"}
        path = python_path(*(REPOSITORY / part for part in ("", "jobs", "plugins")))
        given = {"AIRFLOW__CORE__DAGS_FOLDER": str(folder / "dags"), "PYTHONPATH": path, **env}
        with AirflowServer(REPOSITORY, env=given, **where) as server:
            # Its processes import from the same overlay (tests/support/overlays.py) as this one.
            assert server.client.call("GET", "/api/v2/version")["version"] == version("apache-airflow-core")
            for dag_id in dags:
                server.wait_for_dag(dag_id)
            yield server
