"""Spark's Python daemon of a session ends when nobody uses it any more. The daemon is Spark's own, started as its server does."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from cairn.spark.idle_daemon import end_idle_daemon, watch_daemon
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the watcher needs Linux")

IDLE_S = 0.3


@pytest.fixture
def daemon() -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "pyspark.daemon", "pyspark.worker"]
    environment = {**os.environ, "PYTHON_WORKER_FACTORY_SECRET": "s", "SPARK_REUSE_WORKER": "1"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as started:
        yield started
        started.kill()


def worker_of(daemon: subprocess.Popen[bytes]) -> tuple[socket.socket, int]:
    """A new worker's connection and pid, as Spark asks the daemon for it."""
    assert daemon.stdout is not None
    (port,) = struct.unpack("!i", daemon.stdout.read(4))
    connection = socket.create_connection(("127.0.0.1", port))
    (pid,) = struct.unpack("!i", connection.recv(4))
    return connection, pid


@pytest.mark.long("seconds", runs_in="ci")
def test_a_daemon_ends_once_its_last_worker_is_gone(daemon: subprocess.Popen[bytes]) -> None:
    """The worker is killed, as Spark does with one whose task was interrupted."""
    connection, worker = worker_of(daemon)
    watcher = watch_daemon(daemon.pid, IDLE_S)
    assert watcher is not None
    assert watch_daemon(daemon.pid, IDLE_S) is None, "a daemon has one watcher"
    time.sleep(3 * IDLE_S)
    assert daemon.poll() is None and watcher.poll() is None, "the daemon has a worker"
    os.kill(worker, 9)
    assert daemon.wait(10) == 1  # its own way out
    assert watcher.wait(10) == 0
    connection.close()


def test_a_watcher_ends_with_its_daemon(daemon: subprocess.Popen[bytes]) -> None:
    watcher = watch_daemon(daemon.pid, 600)
    assert watcher is not None
    daemon.kill()
    assert watcher.wait(10) == 0
    wait_until(
        lambda: (again := watch_daemon(daemon.pid, 600)) is not None and again.wait(10) == 0, 10, "the name is free"
    )


@pytest.mark.parametrize(
    ("environment", "program"),
    [
        ({"SPARK_JOB_ARTIFACT_UUID": "u"}, "a program that is no daemon"),
        ({}, "pyspark.daemon"),
        ({"SPARK_JOB_ARTIFACT_UUID": "u", "CAIRN_DAEMON_IDLE_S": "0"}, "pyspark.daemon"),
    ],
    ids=["no daemon", "no session of its own", "switched off"],
)
def test_no_watcher_starts_for_other_processes_or_when_switched_off(
    environment: dict[str, str], program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a watcher was started")

    monkeypatch.setattr("cairn.spark.idle_daemon.watch_daemon", refuse)
    for name in ("SPARK_JOB_ARTIFACT_UUID", "CAIRN_DAEMON_IDLE_S"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", type("Spec", (), {"name": program})())
    end_idle_daemon()


@pytest.mark.parametrize(("artifacts", "idle_s"), [("default", 600), ("177f8ab8-8dfc-41c9-bb1b-621b195436c3", 30)])
def test_a_daemon_of_one_session_ends_soon(artifacts: str, idle_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that refuses to share its workers starts a daemon for each driver."""
    watched: list[float] = []
    monkeypatch.setattr("cairn.spark.idle_daemon.watch_daemon", lambda _, seconds: watched.append(seconds))
    monkeypatch.setenv("SPARK_JOB_ARTIFACT_UUID", artifacts)
    monkeypatch.delenv("CAIRN_DAEMON_IDLE_S", raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", type("Spec", (), {"name": "pyspark.daemon"})())
    end_idle_daemon()
    assert watched == [idle_s]
