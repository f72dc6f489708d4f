"""The secret of a server on this machine: a file that only this user can read, found by the server's port.

Whoever reaches the port of such a server runs code as its user, and every user of the machine reaches the port. The server asks for
the secret; the programs of the same user find the file.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from state_backend.values.errors import UsageError

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


def new_secret() -> str:
    """Return a random secret."""
    return secrets.token_urlsafe(32)


def secret_file(server: str, port: int) -> Path:
    """Return where the secret of a server is, as in ~/.local/state/cairn/spark-connect.host.15002."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    # Several machines may share a home directory.
    return Path(state, "cairn", f"{server}.{socket.gethostname()}.{port}")


@contextmanager
def kept_secret(server: str, port: int, secret: str) -> Iterator[Path]:
    """Keep the secret in its file while the server runs.

    Raises: OSError if this user can't write the file.
    """
    file = secret_file(server, port)
    file.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
    # A server that was killed leaves its file; a link in its place is not followed.
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
        opened.write(f"{secret}\n")
    try:
        yield file
    finally:
        with suppress(OSError):
            # Another server may have taken the port, and the file, since.
            if file.read_text().strip() == secret:
                file.unlink()


def find_secret(server: str, port: int) -> str | None:
    """Return the secret of a server that this user runs on this machine; None if there is no file.

    Raises: UsageError if another user could read or write the file.
    """
    file = secret_file(server, port)
    try:
        with file.open() as opened:
            status = os.fstat(opened.fileno())
            if status.st_uid != os.getuid() or status.st_mode & 0o077:
                raise UsageError(f"other users can read {file}: delete the file, and start the server again")
            return opened.read().strip() or None
    except OSError:
        return None
