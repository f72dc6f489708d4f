"""A real Airflow API server with the DAGs of ``shown_dags`` and the folders of ``shown_pipelines``; nothing schedules or runs. With users of
roles, and a storage that takes connections and never answers."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from local_stack.owned_process import OwnedProcesses, claim_port, python_path
from state_backend.adapters.local_storage import LocalStorage
from tests.support.checkpoints import day
from tests.support.layout import REPOSITORY
from tests.support.shown_pipelines import eventful, run_id, steady

USERS = {"ada": "admin", "vera": "viewer", "nils": "viewer"}
HOSTILE = "<script>pwned=1<!--"
SET_UP = """
# ``dags`` is the folder of the DAGs.
from airflow.utils.db import initdb
initdb()
from airflow.dag_processing.bundles.manager import DagBundlesManager
DagBundlesManager().sync_bundles_to_db()
from tests.support.airflow_names import store_dags
store_dags(dags)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownAirflow:
    """``tokens``: of each user, for the cookie ``_token``. ``data``: above the pipelines' folders."""

    url: str
    tokens: dict[str, str]
    data: Path
    log: Path

    def get(self, path: str, user: str | None, form: dict[str, str] | None = None) -> tuple[int, str]:
        """Status and body of a page, as a user or as nobody; with a form, of the page that answers it."""
        data = None if form is None else urlencode(form).encode()
        request = urllib.request.Request(f"{self.url}{path}", data)
        if user is not None:
            request.add_header("Cookie", f"_token={self.tokens[user]}")
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON that Airflow's API answers to `ada`."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.tokens['ada']}"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data=data, method=method, headers=headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def trigger(self, dag_id: str, number: int) -> None:
        """Make the run of a day, which stays queued where nothing schedules."""
        start, end = day(number).start.isoformat(), day(number).end.isoformat()
        body = {
            "dag_run_id": run_id(number),
            "logical_date": start,
            "data_interval_start": start,
            "data_interval_end": end,
        }
        self.call("POST", f"/api/v2/dags/{dag_id}/dagRuns", body)


def write_docs(docs: Path, checkpoint: int) -> str:
    """A page of Data Docs, where Great Expectations would put it; its path below the folder of all docs."""
    path = f"rides/validations/rides/total/checkpoint {checkpoint} 20240108_20240109/20240109T010000Z/0f.html"
    page = docs / path
    page.parent.mkdir(parents=True)
    page.write_text("<html><head><title>GE</title></head><body><h1>Expectations of total</h1></body></html>")
    return path


@contextmanager
def black_hole() -> Iterator[int]:
    """The port of a server that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken: list[socket.socket] = []

        def take() -> None:
            with suppress(OSError):
                while True:
                    taken.append(server.accept()[0])

        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
        for connection in taken:
            connection.close()


@contextmanager
def shown_airflow(
    folder: Path,
    *,
    more_env: dict[str, str] | None = None,
    port: int = 0,
    python: Path = Path(sys.executable),
    users: Iterable[str] = tuple(USERS),
    set_up: str = SET_UP,
    more_dags: Iterable[str] = (),
) -> Iterator[ShownAirflow]:
    """Runs while the block does. Each user's password is the name. ``set_up``: a script that makes the database, users and DAGs.
    ``more_dags``: modules of ``tests.support`` with DAGs that a real scheduler runs, once they are unpaused."""
    data, home, dags = folder / "state", folder / "home", folder / "dags"
    for new in (data, home, dags):
        new.mkdir(parents=True)
    eventful(LocalStorage(data / "rides"))
    steady(LocalStorage(data / "clicks"))
    steady(LocalStorage(data / "secret"), 3)
    steady(LocalStorage(data / HOSTILE), 2)
    write_docs(folder / "docs", 11)
    (dags / "shown_dags.py").write_text((REPOSITORY / "tests/support/shown_dags.py").read_text())
    for name in more_dags:
        (dags / f"{name}.py").write_text((REPOSITORY / f"tests/support/{name}.py").read_text())
    passwords = home / "passwords.json"
    passwords.write_text(json.dumps({name: name for name in USERS}))
    port = claim_port(port)
    url = f"http://127.0.0.1:{port}"
    with black_hole() as hole:
        env = {
            **os.environ,
            "AIRFLOW_HOME": str(home),
            "AIRFLOW_CONFIG": str(REPOSITORY / "airflow.cfg"),
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{home}/airflow.db",
            "AIRFLOW__CORE__DAGS_FOLDER": str(dags),
            "AIRFLOW__CORE__PLUGINS_FOLDER": str(home / "plugins"),
            "AIRFLOW__CORE__AUTH_MANAGER": "tests.support.refusing_auth_manager.RefusingAuthManager",
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "False",
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": ",".join(f"{n}:{role}" for n, role in USERS.items()),
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(passwords),
            "AIRFLOW__API__PORT": str(port),
            "AIRFLOW__API__BASE_URL": url,
            "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{hole}",
            "CAIRN_SHOWN": str(data),
            "CAIRN_DOCS": str(folder / "docs"),
            "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": str(bool(more_dags)),
            "PYTHONPATH": python_path(REPOSITORY, REPOSITORY / "jobs", REPOSITORY / "plugins"),
            "NO_PROXY": "127.0.0.1,localhost",
            **(more_env or {}),
        }
        processes = OwnedProcesses(folder / "logs")
        try:
            script = f"dags = {str(dags)!r}\n{set_up}"
            processes.start("database", [str(python), "-c", script], env=env, cwd=REPOSITORY)
            if processes.wait("database"):
                raise RuntimeError(processes.log_path("database").read_text()[-3000:])
            processes.start("api-server", [str(python), "-m", "airflow", "api-server"], env=env, cwd=REPOSITORY)
            deadline_s = time.monotonic() + 120
            tokens: dict[str, str] = {}
            while not tokens:
                processes.check_alive()
                assert time.monotonic() < deadline_s, processes.log_path("api-server").read_text()[-3000:]
                with suppress(OSError):
                    tokens = {name: _token(url, name) for name in users}
                time.sleep(0.3)
            if more_dags:
                processes.start("scheduler", [str(python), "-m", "airflow", "scheduler"], env=env, cwd=REPOSITORY)
            yield ShownAirflow(url=url, tokens=tokens, data=data, log=processes.log_path("api-server"))
        finally:
            processes.stop(grace_s=10)


def _token(url: str, name: str) -> str:
    body = json.dumps({"username": name, "password": name}).encode()
    request = urllib.request.Request(f"{url}/auth/token", data=body, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return str(json.load(answer)["access_token"])


__all__ = ["HOSTILE", "SET_UP", "USERS", "ShownAirflow", "day", "run_id", "shown_airflow", "write_docs"]
