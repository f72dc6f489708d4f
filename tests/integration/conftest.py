"""One Airflow, one Spark Connect server and one Azurite for the tests of several files (tests/support/parallel.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.azure_server import VARIABLE, azure_server
from tests.support.http_listener import http_listener
from tests.support.layout import REPOSITORY
from tests.support.local_stack import AirflowServer, SparkConnectServer
from tests.support.shared_airflow import shared_airflow


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("airflow")
    command = [sys.executable, "-m", "pipelines.land_flights", "--to", str(folder / "flights"), "--days", "12"]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def connect(data: Path) -> Iterator[SparkConnectServer]:
    with SparkConnectServer(REPOSITORY, log_dir=data / "logs") as server:
        yield server


@pytest.fixture(scope="session")
def pages() -> Iterator[tuple[str, list[str]]]:
    """Somebody who is called by a web hook: its URL, and the texts that it got."""
    texts: list[str] = []

    def take(_: str, body: bytes) -> int:
        texts.append(json.loads(body)["text"])
        return 204

    with http_listener(take) as port:
        yield f"http://127.0.0.1:{port}", texts


@pytest.fixture(scope="session")
def catalog() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that takes lineage events: its URL, and the events in the order of their arrival."""
    events: list[dict[str, Any]] = []

    def take(path: str, body: bytes) -> int:
        if path != "/api/v1/lineage":
            return 404
        events.append(json.loads(body))
        return 201

    with http_listener(take) as port:
        yield f"http://127.0.0.1:{port}", events


@pytest.fixture(scope="session")
def azurite() -> Iterator[str | None]:
    """The connection string of a server that stands in for Azure; None where Azurite can't be installed."""
    with ExitStack() as stack:
        try:
            stack.enter_context(azure_server())
        except pytest.skip.Exception:
            yield None
            return
        yield os.environ[VARIABLE]


@pytest.fixture(scope="session")
def airflow(
    data: Path,
    connect: SparkConnectServer,
    pages: tuple[str, list[str]],
    catalog: tuple[str, list[dict[str, Any]]],
    azurite: str | None,
) -> Iterator[AirflowServer]:
    with shared_airflow(data, connect, pager=pages[0], catalog=catalog[0], azurite=azurite) as server:
        yield server
