"""What set-up and configuration do on a machine that lacks something."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from cryptography.fernet import Fernet

from local_stack import demo, host_check
from local_stack.owned_process import claim_port, free_port

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long("seconds", runs_in="ci")
def test_components_that_start_together_agree_on_keys_that_only_their_user_reads(tmp_path: Path) -> None:
    """A keyfile in a connection lay readable in airflow.db: there was no fernet key."""
    script = "from airflow.configuration import conf; print(conf.get('core', 'fernet_key'), conf.get('api_auth', 'jwt_secret'))"
    env = {**os.environ, "AIRFLOW_HOME": str(tmp_path), "AIRFLOW_CONFIG": str(ROOT / "airflow.cfg")}

    def keys(_: int) -> str:
        ran = subprocess.run(
            [sys.executable, "-c", script], env=env, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout.splitlines()[-1]

    with ThreadPoolExecutor(2) as pool:
        found = set(pool.map(keys, range(2)))
    assert len(found) == 1
    fernet, jwt_secret = found.pop().split()
    cipher = Fernet(fernet)
    assert cipher.decrypt(cipher.encrypt(b"key")) == b"key" and len(jwt_secret) == 64
    made = [tmp_path / ".fernet-key", tmp_path / ".jwt-secret"]
    assert [file.stat().st_mode & 0o777 for file in made] == [0o600, 0o600]
    assert not [file for file in tmp_path.iterdir() if file.name.startswith((".fernet-key.", ".jwt-secret."))]


def test_the_sbom_has_each_package_once_with_its_licence(tmp_path: Path) -> None:
    """`make sbom`, in a folder of its own."""
    virtual_environment = Path(sys.executable).parents[1]
    (tmp_path / ".ci").symlink_to(ROOT / ".ci")
    make = ["make", "-f", f"{ROOT}/Makefile", "-o", "setup", f"VENV={virtual_environment}", "sbom"]
    subprocess.run(make, cwd=tmp_path, check=True)
    listed = json.loads((tmp_path / "sbom.json").read_text())["components"]
    assert len({one["purl"].partition("@")[0] for one in listed}) == len(listed) > 100
    (spark,) = (one for one in listed if one["name"] == "pyspark")
    assert "Apache" in spark["licenses"][0]["license"]["name"]


@pytest.mark.parametrize(
    ("given", "cache"),
    [
        ({"HOME": "/nonexistent"}, f"{ROOT}/.cache/uv"),
        ({"HOME": str(ROOT)}, ""),
        ({"HOME": "/nonexistent", "UV_CACHE_DIR": "/elsewhere"}, "/elsewhere"),
        ({"HOME": "/nonexistent", "XDG_CACHE_HOME": "/elsewhere"}, ""),
    ],
)
def test_set_up_needs_no_home(given: dict[str, str], cache: str) -> None:
    env = {k: v for k, v in os.environ.items() if k not in ("UV_CACHE_DIR", "XDG_CACHE_HOME")}
    told = subprocess.run(
        ["make", "-s", "-C", str(ROOT), "--eval", 'tell:; @echo "$$UV_CACHE_DIR"', "tell"],
        env={**env, **given},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.strip() == cache


def test_the_demo_refuses_an_unfit_machine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without /dev/shm it started Airflow and Spark, and ended in a traceback of SemLock."""

    class Context:
        def Semaphore(self) -> None:
            raise FileNotFoundError(2, "No such file or directory")

    def no_such_user(uid: int) -> None:
        raise KeyError(uid)

    assert host_check.problems() == []
    monkeypatch.setattr(host_check.multiprocessing, "get_context", lambda _: Context())
    monkeypatch.setattr(host_check.pwd, "getpwuid", no_such_user)
    monkeypatch.setattr(demo, "run_demo", lambda days: pytest.fail("it starts all the same"))
    assert demo.main() == 1
    said = capsys.readouterr().out
    assert "\nMount one: mount -t tmpfs tmpfs /dev/shm\n" in said and f"the user id {os.geteuid()} has no entry" in said


def test_set_up_checks_the_machine_before_it_downloads(tmp_path: Path) -> None:
    """A user id without a name, and a missing /dev/shm, were found after three minutes of set-up."""
    fake = tmp_path / "python3"
    # A Python whose system lacks both: the check runs as it is, with two functions that fail as they do there.
    fake.write_text(
        f"""#!/bin/sh
case "$1" in
  -c) exit 0 ;;
  *host_check.py) exec {sys.executable} -c "
import multiprocessing, pwd, runpy
def fail(*_): raise KeyError
class Context:
    def Semaphore(self): raise FileNotFoundError(2, 'No such file or directory')
pwd.getpwuid = fail
multiprocessing.get_context = lambda _: Context()
runpy.run_path('$1', run_name='__main__')" ;;
  *) echo "set-up goes on"; exit 1 ;;
esac
"""
    )
    fake.chmod(0o755)

    def set_up(*more: str) -> str:
        command = ["make", "-s", "-C", str(ROOT), "setup", f"BASE_PYTHON={fake}", f"VENV={tmp_path}/venv", *more]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ran.returncode == 2
        return ran.stdout + ran.stderr

    said = set_up()
    assert "has no entry in /etc/passwd" in said and "mount -t tmpfs" in said and "setting up" not in said
    advice = said.split("To set up in spite of this: ")[1].splitlines()[0]
    assert advice == "make setup HOST_CHECK=no"
    assert "set-up goes on" in set_up("HOST_CHECK=no")


@pytest.mark.parametrize(
    ("states", "log", "last_lines"),
    [
        (
            {"process": "success", "validate": "failed"},
            [
                "INFO    restored",
                "ERROR   Task failed with exception\n    A: cause\n    B: keys are missing",
                "INFO    ::endgroup::",
            ],
            ["failed: 2013-01-03, task validate (failed, try 2): B: keys are missing", "  log: {validate}"],
        ),
        (
            {"process": "up_for_retry", "checkpoint": None},
            ["ERROR   the disk is full"],
            ["failed: 2013-01-03, task process (up_for_retry, try 2): the disk is full", "  log: {process}"],
        ),
        (
            {"process": "failed"},
            [],
            [
                "failed: 2013-01-03, task process (failed, try 2): its log has no error; see data/demo/logs/scheduler.log",
                "  log: {process}",
            ],
        ),
        (
            {"process": None},
            [],
            ["failed: 2013-01-03: no task of the run has started; see data/demo/logs/scheduler.log"],
        ),
    ],
)
def test_a_failed_demo_ends_with_the_task_the_error_and_the_log(
    states: dict[str, str | None],
    log: list[str],
    last_lines: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its last line was the last of the task's log, which is "::endgroup::" as a rule."""

    class Client:
        def task_instances(self, dag_id: str, run_id: str) -> list[dict[str, object]]:
            return [{"task_id": n, "state": s, "try_number": 0 if s is None else 2} for n, s in states.items()]

        def log(self, dag_id: str, run_id: str, task_id: str, try_number: int) -> list[str]:
            return log

    run = {"dag_run_id": "backfill__2013-01-04", "logical_date": "2013-01-03T00:00:00Z"}
    demo.report_failure(Client(), tmp_path, run)  # type: ignore[arg-type]
    # The demo breaks lines at 80 columns, and indents the rest.
    shown = capsys.readouterr().out.replace("\n" + " " * 10, " ").splitlines()[-len(last_lines) :]
    folder = tmp_path / "dag_id=aircraft" / "run_id=backfill__2013-01-04"
    logs = {name: folder / f"task_id={name}" / "attempt=2.log" for name in states}
    assert [line.split(" s  ")[-1] for line in shown] == [line.format(**logs) for line in last_lines]


def test_two_processes_never_choose_one_port() -> None:
    """Two demos that were started together chose the same ports, seconds before their servers bound them."""
    preferred = free_port()
    claim = f"from local_stack.owned_process import claim_port; print(claim_port({preferred}), flush=True); input()"
    with ExitStack() as stack:
        others = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", claim], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            )
            for _ in range(4)
        ]
        ports = [int(other.stdout.readline()) for other in others if other.stdout]
        assert len(set(ports)) == 4 and preferred in ports
        for other in others:
            other.communicate("\n")
    assert claim_port(preferred) == preferred, "a process that ended keeps its claim"


def test_no_outgoing_connection_takes_the_port_of_a_server_that_restarts() -> None:
    """A Spark server was killed, and a connection to elsewhere had its port when the server started again."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max(free_port() for _ in range(200)) < lowest
