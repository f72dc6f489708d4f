"""A PostgreSQL server for tests."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from local_stack.postgres_server import Postgres


@contextmanager
def folder_of_a_server() -> Iterator[Path]:
    """Yield a folder that every user may enter.

    If root runs the tests, PostgreSQL runs as the user nobody, and nobody can't enter pytest's folder.
    """
    folder = Path(tempfile.mkdtemp(prefix="cairn-pg-"))
    folder.chmod(0o711)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def postgres_server() -> Iterator[str]:
    """Start a server, yield its URL, and stop it afterwards."""
    with folder_of_a_server() as folder, Postgres(folder / "data", log_dir=folder / "logs") as postgres:
        yield postgres.url.replace("+psycopg", "")
