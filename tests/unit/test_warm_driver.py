"""Drivers that are forked by a warm process: to the operator they are the drivers that it starts itself, however anything ends."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from cairn.driver import driver_host
from cairn.shipping import distributions, ship_processor
from cairn_operators.airflow_versions import AirflowException
from cairn_operators.driver_process import DriverProcess, repo_root
from cairn_operators.warm_driver import WarmDriver, _ask, start_host_if_it_pays, start_warm
from local_stack.owned_process import command_line
from state_backend.formats import record_codec
from tests.support.operator_calls import FAKE_DRIVER, alive, gone, pids
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="warm drivers need Linux"),
    pytest.mark.long("ten seconds: it starts processes", runs_in="ci"),
]

TELLS = """
import json, os, random, sys, threading
from pathlib import Path
said = {"pid": os.getpid(), "parent": os.getppid(), "group": os.getpgid(0), "threads": threading.active_count(), "cwd": os.getcwd(),
        "stdin": sys.stdin.read(), "warm": "pyarrow.parquet" in sys.modules, "random": random.random(), "zone": __import__("time").tzname[0],
        "environment": dict(os.environ), "arguments": sys.argv[1:], "open": sorted(os.listdir("/proc/self/fd")), "version": VERSION}
Path(sys.argv[sys.argv.index("--result") + 1]).write_text(json.dumps({"ok": said}))
"""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Where the fake driver is, on the path of the host. Not below pytest's folder: a socket's path has at most 107 characters."""
    with tempfile.TemporaryDirectory(prefix="cw-") as made, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", None)
        patch.setenv("TMPDIR", made)
        patch.setenv("PYTHONPATH", os.pathsep.join([made, *filter(None, [os.environ.get("PYTHONPATH")])]))
        patch.setenv("FAKE_DRIVER_DIR", made)
        patch.setenv("AIRFLOW__CAIRN__WARM_DRIVERS", "True")
        patch.setenv("SECRET_OF_THE_FIRST", "x")
        # As the worker of these tasks, by which the host knows when it is needed no more.
        with subprocess.Popen(["sleep", "300"]) as worker, ExitStack() as ending:
            ending.callback(worker.kill)
            patch.setattr("cairn_operators.warm_driver._worker", lambda: worker.pid)
            code(Path(made), "one")
            for _ in range(2):  # the first driver starts none, nor does a task that is alone on its host
                assert not host_of(Path(made))
                assert not ask()["warm"]
            wait_until(lambda: list(Path(made).glob("cairn-warm-*/*.sock")), 30, "the host listens")
            patch.delenv("SECRET_OF_THE_FIRST")
            yield Path(made)
            [host] = host_of(Path(made))
            worker.kill()
            worker.wait()
            assert gone([host], timeout_s=10), "the host outlives the worker"
        assert not list(Path(made).glob("cairn-warm-*/*.sock"))


def host_of(folder: Path) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes()
            driver = (entry / "comm").read_text().startswith("cairn-driver")
        except OSError:
            continue
        if b"cairn.driver.driver_host" in command and str(folder).encode() in command and not driver:
            found.append(int(entry.name))
    return found


def task(folder: Path) -> int:
    """Forks a process that runs a driver as a task does, and leaves there what that raised; its pid."""
    pid = os.fork()
    if pid == 0:
        try:
            DriverProcess("warm_fake").run([], lambda _: None)
        except AirflowException as error:
            (folder / f"{os.getpid()}.raised").write_text(str(error))
        finally:
            os._exit(0)
    return pid


def code(folder: Path, version: str) -> None:
    (folder / "warm_fake.py").write_text(TELLS.replace("VERSION", repr(version)))


def ask(environment: dict[str, str] | None = None, private: dict[str, Any] | None = None) -> dict[str, Any]:
    return DriverProcess("warm_fake").run(["--more"], print, environment, private)


def test_a_warm_driver_runs_like_a_newly_started_driver(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code(folder, "one")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    said = ask({"CREDENTIALS": "mine"}, {"token": "t", "conf": {}})
    assert said["warm"] and said["parent"] == host_of(folder)[0]
    assert said["group"] == said["pid"] and said["threads"] == 1 and said["cwd"] == str(repo_root())
    assert json.loads(said["stdin"]) == {"token": "t", "conf": {}}
    assert said["arguments"][:1] == ["--more"] and said["zone"] == "JST"
    assert said["environment"]["CREDENTIALS"] == "mine"
    assert "SECRET_OF_THE_FIRST" not in said["environment"]
    # stdin, stdout, stderr, lifeline, and the listing itself; no connection of the host, nor of another driver.
    assert len(said["open"]) == 5

    code(folder, "two, and longer")  # what a person edits between two tries
    again = ask()
    assert again["version"] == "two, and longer" and again["pid"] != said["pid"]
    assert again["random"] != said["random"] and again["stdin"] == "" and "CREDENTIALS" not in again["environment"]


@pytest.fixture
def fake(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    (folder / "warm_fake.py").write_text(FAKE_DRIVER)
    (folder / "pids").unlink(missing_ok=True)

    def behave(what: str) -> Path:
        monkeypatch.setenv("FAKE_DRIVER", what)
        return folder

    return behave


@pytest.mark.parametrize(("what", "says"), [("kill", "SIGKILL"), ("exit 7", "7"), ("error X", "what went wrong")])
def test_a_bad_exit_of_a_warm_driver_fails_its_task(fake: Callable[[str], Path], what: str, says: str) -> None:
    fake(what)
    with pytest.raises(AirflowException, match=says):
        ask()


@pytest.mark.parametrize("stopped", [False, True])
def test_the_kernel_kills_the_driver_of_a_killed_task(fake: Callable[[str], Path], *, stopped: bool) -> None:
    folder = fake("hang")
    running = task(folder)
    driver, child = pids(folder)
    assert Path(f"/proc/{driver}/comm").read_text() == "cairn-driver\n", "not a warm one"
    assert " ".join(command_line(driver)).startswith(
        f"cairn-driver of task {running}: {sys.executable} -m warm_fake --result"
    )
    if stopped:
        os.kill(driver, signal.SIGSTOP)
    os.kill(running, signal.SIGKILL)
    os.waitpid(running, 0)
    assert gone([driver])
    os.kill(child, signal.SIGKILL)  # as with any driver: its group is the next try's, or the server's, to end
    assert len(list(folder.glob("cairn-work-*/*-driver-*"))) == 1
    fake("ok {}")
    ask()  # removes what the killed task left
    assert not list(folder.glob("cairn-work-*/*-driver-*"))


STOPPING_HOST = """
import os, signal, sys
from cairn.driver import driver_host
step = sys.argv.pop()
real = getattr(os, step)
def stopping(*arguments):
    if step != "fork":
        os.kill(os.getpid(), signal.SIGSTOP)
    found = real(*arguments)
    if step == "fork" and found == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    return found
setattr(os, step, stopping)
driver_host._NEEDED = ()
driver_host.main()
"""


@pytest.mark.parametrize("step", ["fork", "getppid", "setsid", "dup2", "chdir"])
def test_a_driver_that_is_stopped_as_it_begins_ends_with_its_task(fake: Callable[[str], Path], step: str) -> None:
    """The driver itself asked the kernel to end it with its task; stopped before that, it lived on."""
    folder = fake("hang")
    path = folder / f"{step}.sock"
    command = [sys.executable, "-c", STOPPING_HOST, str(path), str(os.getpid()), step]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as host, ExitStack() as ending:
        ending.callback(host.kill)
        wait_until(path.exists, 30, "the host listens")
        driver = _ask(path, "warm_fake", [], folder, os.environ, None)
        assert driver is not None
        stopped = Path(f"/proc/{driver.pid}/stat")
        wait_until(lambda: stopped.read_text().rsplit(")", 1)[1].split()[0] == "T", 10, "the driver is stopped")
        driver.close()
        driver.stdout.close()
        assert gone([driver.pid])


# A host that is stopped between the fork of a driver and the step that ties the driver to its task.
HALF_DONE_HOST = """
import os, signal, sys
from cairn.driver import driver_host
host, tie = os.getpid(), driver_host._tie_to
def stopping(*arguments):
    if os.getpid() == host:
        os.kill(host, signal.SIGSTOP)
    tie(*arguments)
driver_host._tie_to = stopping
driver_host._NEEDED = ("numpy",)
driver_host.main()
"""


@pytest.mark.parametrize("continues", [False, True])
def test_a_driver_whose_host_is_stopped_ends_with_its_task(fake: Callable[[str], Path], *, continues: bool) -> None:
    """The task waits five seconds for the host, and starts a driver of its own then: two would share its attempt."""
    folder = fake("hang")
    path = folder / f"half-{continues}.sock"
    command = [sys.executable, "-c", HALF_DONE_HOST, str(path), str(os.getpid())]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as host, ExitStack() as ending:
        ending.callback(host.kill)
        wait_until(path.exists, 30, "the host listens")
        running = os.fork()
        if running == 0:
            try:
                _ask(path, "warm_fake", ["--result", "r"], folder, os.environ, None)
            finally:
                os._exit(0)
        driver, child = pids(folder)
        os.kill(running, signal.SIGKILL)
        os.waitpid(running, 0)
        if continues:
            os.kill(host.pid, signal.SIGCONT)
        assert gone([driver])
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("manner", ["", "stubborn"])
def test_stop_ends_the_whole_group(fake: Callable[[str], Path], manner: str) -> None:
    folder = fake(f"hang {manner}")
    driver = DriverProcess("warm_fake")

    def stop(*_: object) -> None:
        driver.stop()
        raise SystemExit

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.8)
    try:
        with pytest.raises(SystemExit):
            driver.run([], print)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert gone(pids(folder))


@pytest.mark.long("ten seconds of processes")
def test_drivers_of_a_killed_host_end_and_a_new_host_is_started(fake: Callable[[str], Path]) -> None:
    """Its drivers end with it, their tasks see killed drivers, and the next driver is started cold, and a host for those behind it."""
    folder = fake("hang")
    drivers = list[int]()
    tasks = list[int]()
    for _ in range(2):
        (folder / "pids").unlink(missing_ok=True)
        tasks.append(task(folder))
        drivers += pids(folder)
    [host] = host_of(folder)
    os.kill(host, signal.SIGKILL)
    for running in tasks:
        os.waitpid(running, 0)
        assert "SIGKILL" in (folder / f"{running}.raised").read_text()
    assert gone(drivers)
    for seen in folder.glob("cairn-warm-*/*.seen"):
        seen.write_text(f"{time.time()} 0")  # half a minute goes by
    code(folder, "three")
    assert not ask()["warm"]
    wait_until(lambda: host_of(folder) and ask()["warm"], 30, "another host")


def test_a_host_whose_own_code_changed_makes_no_driver(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upgrade, or an edit of Cairn: what is there now runs, as with every driver."""
    code(folder, "four")
    monkeypatch.setenv("PYTHONHASHSEED", "7")  # read at start, so of no use to the drivers of the other host
    copy = folder / "cairn_of_another_version"
    copy.mkdir()
    (copy / "sitecustomize.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(copy), os.environ["PYTHONPATH"]]))
    assert not ask()["warm"]
    assert not ask()["warm"]
    wait_until(lambda: len(host_of(folder)) == 2, 30, "its host")
    wait_until(lambda: ask()["warm"], 30, "its host listens")
    (copy / "sitecustomize.py").write_text("# edited\n")
    assert not ask()["warm"]
    wait_until(lambda: len(host_of(folder)) == 1, 10, "the host ends")


def test_a_folder_that_somebody_else_can_write_to_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="cw-") as made:  # Where the socket's path is short enough for a host.
        monkeypatch.setattr(tempfile, "tempdir", made)
        where = Path(made, f"cairn-warm-{os.getuid()}")
        where.mkdir()
        where.chmod(0o777)
        how: dict[str, Any] = {"cwd": Path(made), "environment": {}}
        started: WarmDriver | None = start_warm("warm_fake", [], private=None, **how)
        start_host_if_it_pays(**how)
        assert started is None and not list(where.iterdir())
        assert alive(os.getpid())


@pytest.mark.parametrize("left", ["", "176", "176 x", "1 2 3"])
def test_a_damaged_file_of_start_times_does_not_stop_a_driver_start(left: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read under the lock, and written anew, so that the next driver knows of this one."""
    with tempfile.TemporaryDirectory(prefix="cw-") as made:
        monkeypatch.setattr(tempfile, "tempdir", made)
        how: dict[str, Any] = {"cwd": Path(made), "environment": {}}
        start_host_if_it_pays(**how)
        (seen,) = Path(made).glob("cairn-warm-*/*.seen")
        monkeypatch.setattr(fcntl, "flock", lambda *_: seen.write_text(left))
        monkeypatch.setattr(subprocess, "Popen", None)  # No host is started.
        start_host_if_it_pays(**how)
        last_s, started_s = map(float, seen.read_text().split())
        assert time.time() - last_s < 60 and started_s == 0.0


def test_no_host_is_started_whose_socket_could_not_be_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (long := tmp_path / ("t" * 100)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    for _ in range(2):
        start_host_if_it_pays(cwd=tmp_path, environment={})
    assert not list(long.glob("cairn-warm-*/*"))


ENDS = """
import atexit, sys, threading, time
from cairn.driver.driver import end_quickly
atexit.register(print, "atexit")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
sys.stdout.write("last words")
end_quickly(int(sys.argv[1]))
"""


@pytest.mark.parametrize(("code", "says"), [(0, {"thread", "atexit", "last words"}), (3, {"last words"})])
def test_a_driver_runs_exit_handlers_after_success_and_skips_them_after_an_error(code: int, says: set[str]) -> None:
    """After a success, threads of the user and functions of `atexit` end as in any Python. After an error, they do not delay."""
    done = subprocess.run([sys.executable, "-c", ENDS, str(code)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, "")
    assert {word for word in ("thread", "atexit", "last words") if word in done.stdout} == says


def test_a_host_fills_the_drivers_caches_once_and_watches_all_source_files() -> None:
    for filled in (record_codec._adapter, ship_processor.runtime_version, distributions.distribution_of):
        filled.cache_clear()
    driver_host._compute_once()
    assert record_codec._adapter.cache_info().currsize >= len(record_codec._TYPES)
    assert ship_processor.runtime_version.cache_info().currsize == 1
    asked = distributions.distribution_of.cache_info().misses
    assert distributions.distribution_of(str(pyarrow.__file__), "pyarrow") is not None
    assert distributions.distribution_of.cache_info().misses == asked
    # The version depends on all sources, so the host also watches those that it has not imported.
    watched = driver_host.watched_files()
    assert {str(file) for file in Path(driver_host.__file__).parents[1].rglob("*.py")} <= watched.keys()
    # An installation may give a package another version, whose files the host has not imported.
    assert str(Path(str(pyarrow.__file__)).parents[1]) in watched
    assert None not in watched.values()
