"""Drivers among the processes of a machine, and the processes that belong to a program."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from cairn.driver.driver_host import _Host
from local_stack.owned_process import OwnedProcesses
from local_stack.running_driver import RunningDriver
from state_backend.values.operation_parameters import ProcessInterval, to_json
from state_backend.values.records import RunRef
from tests.support.waiting import wait_until

DAY = datetime(2024, 1, 1, tzinfo=UTC)
ASKED = ProcessInterval(
    root="r",
    code="p:P",
    run=RunRef(run_id="a b", clear_number=0, try_number=1),
    start=DAY,
    end=DAY + timedelta(days=1),
    attempt="a",
)
PROCESS, QUOTED = (f"interval {request} --call {{}}" for request in (to_json(ASKED), shlex.quote(to_json(ASKED))))


@pytest.mark.parametrize(
    ("words", "driver"),
    [
        (f"/venv/bin/python -m cairn.driver.driver {PROCESS}", (7, PROCESS)),
        (f"cairn-driver of task 31: /venv/bin/python -m cairn.driver.driver {PROCESS}", (31, PROCESS)),
        (f"cairn-driver of task 31: python -m cairn.driver.driver {QUOTED}", (31, QUOTED)),
        ("/venv/bin/python -m cairn.driver.driver_host /tmp/a.sock 7", None),
        ("grep -m cairn.driver.driver", None),
        ("", None),
    ],
)
def test_a_running_driver_is_recognized_by_its_command_line(words: str, driver: tuple[int, str] | None) -> None:
    found = RunningDriver.parse(words, 99, 7)
    assert (None if found is None else (found.task, found.command)) == driver
    assert found is None or found.interval_start() == DAY


# As a forked driver: a session of its own, and a title over the memory of its environment. Neither process ends by itself.
FORKS = """
import os, signal, time
from setproctitle import setproctitle
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    setproctitle("cairn-driver of task 31: python -m cairn.driver.driver " + "interval " * 20)
    open(os.environ["TOLD"], "w").write(str(os.getpid()))
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_stopping_owned_processes_also_ends_a_forked_driver(tmp_path: Path) -> None:
    told = tmp_path / "told"
    owned = OwnedProcesses(tmp_path)
    owned.start("forks", [sys.executable, "-c", FORKS], env={**os.environ, "TOLD": str(told)}, cwd=tmp_path)
    with subprocess.Popen(["sleep", "60"]) as other:
        try:
            wait_until(lambda: told.exists() and told.read_text(), 10, "the fork has its title")
            fork, parent = int(told.read_text()), owned._children["forks"]
            found = RunningDriver.of(fork)
            assert found is not None and found.task == 31
            assert fork in set(owned.pids()) and other.pid not in set(owned.pids())
        finally:
            other.kill()
            owned.stop(grace_s=0)
    assert (parent.returncode, RunningDriver.of(fork)) == (-signal.SIGKILL, None)


@pytest.mark.skipif(sys.platform != "linux", reason="warm drivers need Linux")
def test_a_retiring_driver_host_resets_waiting_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # A socket's path has at most 107 characters.
    host = _Host("host.sock", os.getpid(), None)
    listener = host._listener  # As `serve` keeps it until the next event.
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(1)
        client.connect("host.sock")
        host._retire()
        with pytest.raises(ConnectionResetError):
            client.recv(1)
        assert listener is not None and not [*tmp_path.iterdir()]
        host._leave(client)
