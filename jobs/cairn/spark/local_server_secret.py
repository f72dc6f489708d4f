"""Keep the secret of a server on this machine in a file that only the server's user can read.

Every user of the machine can connect to the server's port, and a client of the server runs code as the server's user.
So the server demands the secret. Programs of the same user find the secret's file by the server's port.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from state_backend.values.environment import Variable
from state_backend.values.errors import UsageError
from state_backend.values.hide_secrets import hide

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


def new_secret() -> str:
    return secrets.token_urlsafe(32)


def secret_file(server: str, port: int) -> Path:
    """Return the path of the file with a server's secret, such as ~/.local/state/cairn/spark-connect.host.15002."""
    state = Variable.STATE_HOME.given or Path(Variable.STATE_HOME.default).expanduser()
    # The host's name is part of the file's name, because several machines may share a home directory.
    return Path(state, "cairn", f"{server}.{socket.gethostname()}.{port}")


@contextmanager
def kept_secret(server: str, port: int, secret: str) -> Iterator[Path]:
    """Write the secret to its file, and delete the file when the block ends."""
    file = secret_file(server, port)
    file.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
    # Delete the file that a killed server has left. O_EXCL then refuses a symbolic link that another user puts in the
    # file's place.
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
        opened.write(f"{secret}\n")
    try:
        yield file
    finally:
        with suppress(OSError):
            # Another server may have started on this port since, and have written its own secret into the file. Then
            # keep the file.
            if file.read_text().strip() == secret:
                file.unlink()


def checked_token(text: str | None, source: str) -> str | None:
    """Return a token without white space around it, such as a file's last line break; None for an empty text."""
    token = (text or "").strip()
    if not all(" " <= character <= "~" for character in token):
        raise UsageError(
            f"{source} is no token: it has a line break or a character beyond ASCII inside\nSet it to the token alone"
        )
    return token or None


def check_address(url: str, instead: str) -> None:
    """Raise `UsageError` if the address of a server contains credentials, which commands and logs would repeat."""
    if hide(url) != url:
        raise UsageError(
            f"the address {hide(url)!r} contains credentials\nLeave them out of the address, and {instead}"
        )


def find_secret(server: str, port: int) -> str | None:
    """Return the secret of a server that this user runs on this machine; None if there is no readable file."""
    file = secret_file(server, port)
    try:
        with file.open() as opened:
            status = os.fstat(opened.fileno())
            if status.st_uid != os.getuid() or status.st_mode & 0o077:
                raise UsageError(f"other users can read {file}: delete the file, and start the server again")
            return opened.read().strip() or None
    except OSError:
        return None
