"""Connections to Google Cloud Storage: identities, HTTP sessions, and a pool for each identity."""

from __future__ import annotations

import functools
import json
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import google.auth
import requests
from google.api_core.client_info import ClientInfo
from google.auth.credentials import AnonymousCredentials, Credentials
from google.auth.exceptions import GoogleAuthError
from google.auth.transport.requests import AuthorizedSession
from google.cloud.storage import Client
from google.oauth2 import credentials as oauth2
from google.oauth2 import service_account

from state_backend.adapters.local_storage import CHUNK_BYTES
from state_backend.values.errors import (
    UsageError,
)

EMULATOR_VARIABLE = "STORAGE_EMULATOR_HOST"
SCOPES = ["https://www.googleapis.com/auth/devstorage.read_write"]


class Session(AuthorizedSession):  # type: ignore[misc]
    """HTTP session that reads a whole answer within the timeout of its request.

    The timeout of the requests library begins again with every byte that arrives.
    """

    def send(
        self, request: requests.PreparedRequest, *, timeout: float, stream: bool = False, **options: Any
    ) -> requests.Response:
        until = time.monotonic() + timeout
        response: requests.Response = super().send(request, timeout=timeout, stream=True, **options)
        if not stream or response.status_code >= 400:
            body = BytesIO()
            with response:
                while data := receive(response, CHUNK_BYTES, until, decode=True):
                    body.write(data)
            body.seek(0)
            response.raw = body
        return response


def receive(response: requests.Response, at_most: int, until_s: float, *, decode: bool) -> bytes:
    """Wait for bytes of an answer, and return them."""
    data: bytes = response.raw.read1(at_most, decode_content=decode)
    if time.monotonic() > until_s:
        raise requests.ReadTimeout("the server answers too slowly")
    return data


@dataclass(frozen=True, slots=True)
class Connection:
    client: Client
    session: Session


class Connections:
    """Pool of connections to one endpoint with one identity.

    A connection is lent to one thread at a time. A forked process opens its own connections, because two processes
    can't share a socket.
    """

    def __init__(self, emulator: str | None, credentials: Credentials | None) -> None:
        self._emulator = emulator
        self._credentials = credentials
        self._idle: dict[int, list[Connection]] = {}  # by process id
        weakref.finalize(self, _close_all, self._idle)

    @contextmanager
    def lent(self) -> Iterator[Connection]:
        """Yield a connection that no other thread uses during the block."""
        process = os.getpid()
        for parent in self._idle.keys() - {process}:
            _close_all({parent: self._idle.pop(parent, [])})  # closes this process's sockets; the parent's stay open
        idle = self._idle.setdefault(process, [])
        try:
            connection = idle.pop()
        except IndexError:
            connection = self._open()
        try:
            yield connection
        finally:
            idle.append(connection)

    def _open(self) -> Connection:
        session = Session(self._identity())
        client = Client(
            project=None,
            credentials=session.credentials,
            _http=session,
            client_info=ClientInfo(user_agent="cairn"),
            client_options={"api_endpoint": self._emulator} if self._emulator else None,
        )
        return Connection(client, session)

    def _identity(self) -> Credentials:
        if self._credentials is None:
            if self._emulator:
                self._credentials = AnonymousCredentials()
            else:
                try:
                    self._credentials, _ = google.auth.default(scopes=SCOPES)
                except GoogleAuthError as error:
                    problem = type(error).__name__
                else:
                    return self._credentials
                raise UsageError(
                    f"can't log in to Google Cloud Storage ({problem}): expected application default credentials\n"
                    "Set GOOGLE_APPLICATION_CREDENTIALS to a key file, or run: gcloud auth application-default login\n"
                    f"For a test server set {EMULATOR_VARIABLE}"
                )
        return self._credentials


def _close_all(idle: dict[int, list[Connection]]) -> None:
    for connections in idle.values():
        for connection in connections:
            connection.session.close()


@functools.cache
def connections_of_environment(emulator: str | None, key_file: str | None) -> Connections:
    """Return the connections with the environment's default credentials.

    A process may change the environment later. So each emulator and each key file have connections of their own.
    """
    return Connections(emulator, None)


_KEYS: dict[str, Callable[..., Credentials]] = {
    "service_account": service_account.Credentials.from_service_account_info,
    "authorized_user": oauth2.Credentials.from_authorized_user_info,
}


def credentials_in(key_file: str) -> Credentials:
    """Return the credentials in a key file, independent of the environment."""
    try:
        key = json.loads(Path(key_file).read_bytes())
        return _KEYS[key["type"]](key, scopes=SCOPES)
    except (OSError, ValueError, KeyError, TypeError, GoogleAuthError) as error:
        raise UsageError(
            f"can't log in to Google Cloud Storage: the key file is not usable ({type(error).__name__})\n"
            f"Expected the JSON of a key of type {' or '.join(_KEYS)}"
        ) from None
