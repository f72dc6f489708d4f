"""A real Airflow whose runs are in a PostgreSQL of its own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from local_stack.airflow_server import AirflowServer
from tests.support.tiers import REPOSITORY


@contextmanager
def airflow_on_postgres(folder: Path, env: Mapping[str, str], *, dags: Sequence[str]) -> Iterator[AirflowServer]:
    """Start Airflow, wait until it has read the DAGs, and stop it afterwards.

    Args:
        folder: Folder for Airflow's home and logs.
        env: Variables of its processes.
        dags: Ids of the DAGs to wait for.
    """
    # PostgreSQL does not run as root, and nobody else may enter pytest's own folder.
    database = Path(tempfile.mkdtemp(prefix="cairn-pg-"))
    database.chmod(0o711)
    where = {"home": folder / "home", "log_dir": folder / "logs", "database_dir": database / "data"}
    try:
        with AirflowServer(REPOSITORY, env=env, **where) as server:
            for dag_id in dags:
                server.wait_for_dag(dag_id)
            yield server
    finally:
        shutil.rmtree(database, ignore_errors=True)
