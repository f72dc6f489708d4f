"""The aircraft pipeline under a real Airflow scheduler and a real Spark Connect server. The tests build on each other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from benchmarks.airflow_server import AirflowServer
from benchmarks.demo import DAG, FIRST_DAY, DriverKiller, pipeline_env
from benchmarks.owned_process import command_line
from benchmarks.spark_server import SparkConnectServer
from state_backend.adapters.local_storage import LocalStorage
from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.checkpoint.log import Log, read_log
from state_backend.checkpoint.savepoints import read_savepoint
from tests.oracles.aircraft import expected, row_order
from tests.support.reading import read_output, read_state

pytestmark = [pytest.mark.airflow, pytest.mark.spark]

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("airflow")
    command = [sys.executable, "-m", "jobs.pipelines.land_flights", "--to", str(folder / "flights"), "--days", "12"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def connect(data: Path) -> Iterator[SparkConnectServer]:
    with SparkConnectServer(ROOT, log_dir=data / "logs") as server:
        yield server


@pytest.fixture(scope="module")
def airflow(data: Path, connect: SparkConnectServer) -> Iterator[AirflowServer]:
    env = pipeline_env(data, data / "flights", connect)
    with AirflowServer(ROOT, home=data / "home", log_dir=data / "logs", env=env) as server:
        server.wait_for_dag(DAG)
        yield server


def day(number: int) -> str:
    return (FIRST_DAY + timedelta(days=number - 1)).isoformat()


def log_of(data: Path) -> Log:
    return read_log(open_storage(join_url(f"file://{data}/state", DAG)))


def drivers(airflow: AirflowServer) -> list[int]:
    return [pid for pid in airflow.processes.pids() if "jobs.driver" in command_line(pid)]


def wait_until(condition: Callable[[], Any], timeout_s: float, what: str) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s: {what}"
        time.sleep(0.1)


def run_of(airflow: AirflowServer, number: int) -> str:
    start = datetime.fromisoformat(day(number))
    for run in airflow.client.dag_runs(DAG):
        if run["logical_date"] and datetime.fromisoformat(run["logical_date"]) == start:
            run_id: str = run["dag_run_id"]
            return run_id
    raise AssertionError(f"no run for day {number}")


def states(airflow: AirflowServer, run_id: str) -> dict[str, str]:
    return {task["task_id"]: task["state"] for task in airflow.client.task_instances(DAG, run_id)}


def test_backfill_survives_a_killed_driver(airflow: AirflowServer, data: Path) -> None:
    killer = DriverKiller(airflow.processes, FIRST_DAY + timedelta(days=1), after_s=0.5)
    airflow.client.backfill(DAG, day(1), day(3))
    runs = [run_of(airflow, number) for number in (1, 2, 3)]
    deadline_s = time.monotonic() + 120
    while not killer.done:
        assert time.monotonic() < deadline_s, "no driver to kill"
        killer.look()
        time.sleep(0.1)
    assert set(airflow.client.wait_for_runs(DAG, runs, timeout_s=240).values()) == {"success"}

    assert [len(airflow.client.tries(DAG, run, "process")) for run in runs] == [1, 2, 1]
    assert "the Spark driver was killed (SIGKILL)" in "\n".join(airflow.client.log(DAG, runs[1], "process", 1))
    completed = log_of(data).completed()
    assert [(record.id, record.content.base_id) for record in completed] == [(1, None), (2, 1), (3, 2)]
    assert [record.content.interval.start.isoformat() for record in completed] == [day(1), day(2), day(3)]
    assert completed[1].content.run.try_number == 2
    assert states(airflow, runs[2]) == {
        "process": "success",
        "checkpoint": "success",
        "validate": "success",
        "savepoint": "skipped",
    }
    assert airflow.client.xcom(DAG, runs[2], "checkpoint")["checkpoint"] == 3

    # And all of it, the killed day included, is what pandas says.
    oracle = expected(FIRST_DAY.date(), 3)
    root = data / "state" / DAG
    for number, record in enumerate(completed):
        rows = sorted(read_output(root, record), key=row_order)
        assert rows == oracle.rows[FIRST_DAY.date() + timedelta(days=number)]
    history = read_state(root, completed[-1], "history", data / "restored")
    assert {tail: fields for (tail,), fields in history.items()} == oracle.history
    routes = read_state(root, completed[-1], "routes", data / "restored")
    counts = {(tail, origin, dest): fields["flights"] for (tail, origin, dest), fields in routes.items()}
    assert counts == {(tail, *route): n for tail, flown in oracle.routes.items() for route, n in flown.items()}
    assert not drivers(airflow)


def test_clearing_a_past_day_reproduces_it(airflow: AirflowServer, data: Path) -> None:
    run = run_of(airflow, 2)
    airflow.client.clear(DAG, run, ["process"])
    assert airflow.client.wait_for_runs(DAG, [run], timeout_s=120) == {run: "success"}
    log = log_of(data)
    records = {record.id: record for record in log.completed()}
    again, first = records[4], records[2]
    assert (again.content.base_id, again.content.interval) == (1, first.content.interval)
    assert again.content.run.clear_number == first.content.run.clear_number + 1
    assert again.content.digest == first.content.digest
    assert not any(retained.stale_by for retained in log.retained.values())


def test_clearing_only_the_checkpoint_commits_nothing(airflow: AirflowServer, data: Path) -> None:
    run = run_of(airflow, 3)
    head = log_of(data).head_id
    airflow.client.clear(DAG, run, ["checkpoint"], downstream=False)
    assert airflow.client.wait_for_runs(DAG, [run], timeout_s=60) == {run: "success"}
    assert log_of(data).head_id == head
    assert airflow.client.xcom(DAG, run, "checkpoint")["checkpoint"] == 3


def test_marking_failed_stops_the_driver(airflow: AirflowServer, data: Path) -> None:
    airflow.client.backfill(DAG, day(4), day(4))
    run = run_of(airflow, 4)
    wait_until(lambda: drivers(airflow), 60, "a driver runs")
    airflow.client.fail_task(DAG, run, "process")
    wait_until(lambda: not drivers(airflow), 15, "the driver is stopped")
    assert airflow.client.wait_for_runs(DAG, [run], timeout_s=60) == {run: "failed"}
    assert log_of(data).head_id == 4

    airflow.client.clear(DAG, run, ["process"])
    assert airflow.client.wait_for_runs(DAG, [run], timeout_s=120) == {run: "success"}
    newest = log_of(data).completed()[-1]
    assert (newest.id, newest.content.base_id) == (5, 3)


def test_a_gap_fails_at_once_and_a_permission_closes_it(airflow: AirflowServer, data: Path) -> None:
    airflow.client.backfill(DAG, day(10), day(10))
    run = run_of(airflow, 10)
    assert airflow.client.wait_for_runs(DAG, [run], timeout_s=120) == {run: "failed"}
    assert len(airflow.client.tries(DAG, run, "process")) == 1
    assert "StateGapError" in "\n".join(airflow.client.log(DAG, run, "process", 1))
    assert log_of(data).head_id == 5

    airflow.client.backfill(DAG, day(10), day(10), conf={"allow_gap": True})
    assert airflow.client.wait_for_runs(DAG, [run], timeout_s=120) == {run: "success"}
    newest = log_of(data).completed()[-1]
    assert (newest.id, newest.content.base_id, newest.content.permissions.allow_gap) == (6, 5, True)


def test_a_run_without_date_is_refused(airflow: AirflowServer) -> None:
    run = airflow.client.trigger(DAG)["dag_run_id"]
    assert airflow.client.wait_for_runs(DAG, [run], timeout_s=60) == {run: "failed"}
    assert "this run has no data interval" in "\n".join(airflow.client.log(DAG, run, "process", 1))


def test_stopping_with_a_savepoint_loses_no_interval(
    airflow: AirflowServer, data: Path, connect: SparkConnectServer
) -> None:
    """F47, F76: `cairn savepoint --stop` while an interval is under way: the DAG is paused, the interval ends and is committed, the
    savepoint has it. Unpaused, the run's own `checkpoint` finds that done, and the run succeeds."""
    # A backfill would be refused up to half a minute after the one before has ended.
    interval = {"data_interval_start": day(5), "data_interval_end": day(6)}
    run = airflow.client.trigger(DAG, day(5), **interval)["dag_run_id"]
    wait_until(lambda: drivers(airflow), 60, "a driver runs")
    (driver, *_) = drivers(airflow)
    os.kill(driver, signal.SIGSTOP)  # so that it ends after the pause, however fast the machine is
    folder = data / "stopped"
    where = ["--root", f"file://{data}/state", "--code", "jobs.pipelines.aircraft:AIRCRAFT", "--spark", connect.url]
    command = [sys.executable, "-m", "jobs.cli", "savepoint", *where, "--to", str(folder), "--stop", "--json"]
    with subprocess.Popen(command, cwd=ROOT, env=airflow.env, stdout=subprocess.PIPE, text=True) as stopping:
        try:
            wait_until(lambda: airflow.client.call("GET", f"/api/v2/dags/{DAG}")["is_paused"], 60, "the DAG is paused")
        finally:
            os.kill(driver, signal.SIGCONT)
        said, _ = stopping.communicate(timeout=180)
    assert stopping.returncode == 0
    answer = json.loads(said)
    assert (answer["committed"], answer["checkpoint"], answer["paused"]) == ([7], 7, DAG)
    assert read_savepoint(LocalStorage(folder)).content.interval.start.isoformat() == day(5)
    assert states(airflow, run)["process"] == "success" and states(airflow, run)["checkpoint"] != "success"
    assert airflow.client.call("GET", f"/api/v2/dags/{DAG}")["is_paused"]

    airflow.client.pause(DAG, False)
    assert airflow.client.wait_for_runs(DAG, [run], timeout_s=120) == {run: "success"}
    assert airflow.client.xcom(DAG, run, "checkpoint")["checkpoint"] == log_of(data).head_id == 7


def test_deleting_the_dag_deletes_no_state(airflow: AirflowServer, data: Path) -> None:
    """All that Airflow knows of the DAG is gone, its runs and XComs too; every file of the pipeline is there as it was."""

    def files() -> dict[str, tuple[int, int]]:
        found = [path.stat() for path in sorted((data / "state").rglob("*")) if path.is_file()]
        names = [str(path) for path in sorted((data / "state").rglob("*")) if path.is_file()]
        return dict(zip(names, [(f.st_size, f.st_mtime_ns) for f in found], strict=True))

    before = files()
    airflow.client.pause(DAG, True)
    airflow.client.call("DELETE", f"/api/v2/dags/{DAG}")
    # The DAG processor finds the file again, and makes a DAG without a past of it.
    airflow.wait_for_dag(DAG)
    assert airflow.client.dag_runs(DAG) == []
    assert files() == before and any(name.endswith(".sst") for name in before)
    assert log_of(data).head_id == 7
