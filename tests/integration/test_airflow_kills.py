"""A task and what belongs to it, killed in every way under a real scheduler. One day of a tiny pipeline per way; at the end
state and outputs of all days equal those of a run that nobody disturbed (the fixture `killing`).

The DAGs of the second example run here too, since a server takes longer to start than they take."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import pytest

from cairn_operators.airflow_versions import has
from local_stack.demo import pipeline_env
from local_stack.owned_process import python_path
from local_stack.running_driver import RunningDriver, parent_of
from pipelines.land_weather import FIRST_HOUR, HOUR, land_weather
from state_backend.adapters.open_storage import open_storage
from state_backend.checkpoint.log import read_log
from tests.support.airflow_on_postgres import airflow_on_postgres
from tests.support.held_days import HeldDay, HeldDays, alive
from tests.support.local_stack import AirflowServer, SparkConnectServer
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.airflow,
    pytest.mark.spark,
    pytest.mark.long("minutes: kills of every process of a task; test_airflow kills a driver and a task"),
]

ROOT = Path(__file__).resolve().parents[2]
DAG, DAG_WITH_TIMEOUT = "sums", "sums_with_timeout"
KILLS = 6  # the tests that kill


@pytest.fixture(
    scope="module", params=["warm", pytest.param("cold", marks=pytest.mark.long("the same kills without warm drivers"))]
)
def drivers(request: pytest.FixtureRequest) -> str:
    """Whether tasks start drivers, or have them forked by a warm process."""
    return str(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, drivers: str) -> Path:
    made: Path = tmp_path_factory.mktemp(f"kills-{drivers}")
    land_weather(made / "weather", first=FIRST_HOUR, hours=2)
    return made


@pytest.fixture(scope="module")
def days(folder: Path) -> HeldDays:
    made = HeldDays(folder, f"file://{folder}/state", {DAG: {}, DAG_WITH_TIMEOUT: {"timeout_s": 25}})
    shutil.copy(ROOT / "dags" / "weather.py", folder / "dags")
    return made


@pytest.fixture(scope="module")
def spark_server(folder: Path) -> Iterator[SparkConnectServer]:
    with SparkConnectServer(ROOT, log_dir=folder / "logs") as running:
        yield running


@pytest.fixture(scope="module")
def airflow(folder: Path, days: HeldDays, spark_server: SparkConnectServer, drivers: str) -> Iterator[AirflowServer]:
    env = {
        "AIRFLOW__CAIRN__WARM_DRIVERS": str(drivers == "warm"),
        **pipeline_env(folder, folder / "flights", spark_server),
        "CAIRN_WEATHER": str(folder / "weather"),
        "PYTHONPATH": python_path(folder, ROOT),
        # A task whose supervisor is gone is retried after this many seconds without a heartbeat; they come every second.
        "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "8",
        "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "1",
    }
    with airflow_on_postgres(folder, env, dags=[DAG, DAG_WITH_TIMEOUT, "weather"]) as server:
        yield server
        # The scheduler would wait for the task of the killed supervisor, which nobody runs any more.
        server.processes.stop(grace_s=1)


@pytest.fixture(scope="module")
def killing(airflow: AirflowServer, days: HeldDays) -> Iterator[Begin]:
    """Begins a day whose shards are at work. After all tests, in whatever order: digest and rows of every day are those of a run that
    nobody disturbed, and each day was committed once."""
    with days.undisturbed(KILLS):
        yield lambda dag_id=DAG: HeldDay(days, airflow, dag_id)
        days.assert_undisturbed()


Begin = Callable[..., HeldDay]


def task_of(driver: int) -> int:
    found = RunningDriver.of(driver)
    assert found is not None
    return found.task


def wait_for_interrupt(day: HeldDay) -> None:
    """An older Airflow does not tell the second try of the operation of the first, which goes on."""
    if has("task state store"):
        wait_until(lambda: "interrupted operations of an earlier try" in day.log_of_try(2), 120, "the interrupt")


def test_after_kill_9_of_the_driver_a_retry_succeeds(killing: Begin) -> None:
    """Its operation goes on at the server, until the next try interrupts it. F25: that try begins at the last checkpoint."""
    day = killing()
    os.kill(day.drivers()[0], signal.SIGKILL)
    assert day.still_beats(), "the operation ended by itself, so this shows nothing"
    wait_for_interrupt(day)
    day.let_go()
    day.succeed()
    assert len(day.tries()) == 2
    assert "the Spark driver was killed (SIGKILL)" in day.log_of_try(1)


def test_kill_9_of_the_task_process_ends_its_driver_and_a_retry_succeeds(killing: Begin) -> None:
    """The kernel ends the driver with it."""
    day = killing()
    (driver,) = day.drivers()
    os.kill(task_of(driver), signal.SIGKILL)
    wait_until(lambda: not alive(driver), 20, "the driver is gone too")
    day.let_go()
    day.succeed()
    assert len(day.tries()) == 2


def test_after_kill_9_of_the_supervisor_with_two_live_writers_a_retry_succeeds(killing: Begin) -> None:
    """The task sees that its supervisor is gone and stops its driver; Airflow sees only that heartbeats are missing, and
    starts a second try. The worst case: the driver is frozen and can't interrupt its operation, which goes on writing at
    the server until the second try interrupts it."""
    day = killing()
    (driver,) = day.drivers()
    os.kill(driver, signal.SIGSTOP)
    os.kill(parent_of(task_of(driver)), signal.SIGKILL)
    wait_until(lambda: not alive(driver), 20, "the driver is gone")
    assert day.still_beats(), "nothing writes any more, so this shows nothing"
    wait_for_interrupt(day)
    day.let_go()
    day.succeed()
    assert len(day.tries()) == 2


def test_after_kill_9_of_the_spark_server_a_retry_succeeds(
    airflow: AirflowServer, killing: Begin, spark_server: SparkConnectServer
) -> None:
    """The task says what it lost, and the next try runs on the server that takes its place. (Airflow starts no servers.)"""
    day = killing()
    spark_server.kill()
    day.let_go()
    spark_server.start()
    spark_server.wait_until_ready()
    ended = airflow.client.wait_for_runs(day.dag_id, [day.run_id], timeout_s=180)
    assert ended == {day.run_id: "success"}
    assert "StorageUnavailable: the operation at" in day.log_of_try(1)
    assert "lost its Spark Connect server" in day.log_of_try(1)


def test_marking_a_task_failed_ends_its_driver_and_its_spark_operation(airflow: AirflowServer, killing: Begin) -> None:
    """on_kill ends the task, its driver, and the operation on the server. Cleared, the run succeeds."""
    day = killing()
    airflow.client.fail_task(day.dag_id, day.run_id, "process")
    wait_until(lambda: not day.drivers(), 20, "the driver is gone")
    wait_until(lambda: not day.still_beats(), 20, "the operation is interrupted")
    assert airflow.client.wait_for_runs(DAG, [day.run_id], timeout_s=30) == {day.run_id: "failed"}
    day.let_go()
    airflow.client.clear(DAG, day.run_id, ["process"])
    assert day.succeed().content.run.clear_number == 1
    assert len(day.tries()) == 2


def test_task_timeout_ends_the_driver_and_a_retry_succeeds(killing: Begin) -> None:
    """The driver and its operation end with the try that took too long; the next one is quicker."""
    day = killing(DAG_WITH_TIMEOUT)
    wait_until(lambda: not day.drivers(), 70, "the driver is gone")
    day.let_go()
    day.succeed()
    assert len(day.tries()) == 2
    assert "AirflowTaskTimeout" in day.log_of_try(1)


def weather_hour(n: int) -> datetime:
    return FIRST_HOUR + n * HOUR


def test_two_stateful_tasks_of_a_dag_commit_checkpoints_independently(airflow: AirflowServer, folder: Path) -> None:
    """Two hours under a real scheduler. Each stateful task commits its own checkpoint; the second fails in the second hour
    and takes nothing from the first. The DAG that is scheduled on the asset runs, and knows which checkpoints it is for."""
    client = airflow.client

    def committed(pipeline: str) -> list[tuple[int, int | None, datetime]]:
        made = read_log(open_storage(str(folder / "state" / pipeline))).completed()
        return [(r.id, r.content.base_id, r.content.interval.start) for r in made]

    def trigger(n: int) -> str:
        span = {
            "data_interval_start": weather_hour(n).isoformat(),
            "data_interval_end": weather_hour(n + 1).isoformat(),
        }
        run_id: str = client.trigger("weather", weather_hour(n).isoformat(), **span)["dag_run_id"]
        return run_id

    def started(task_id: str, run_id: str) -> bool:
        return any(t["task_id"] == task_id and t["state"] for t in client.task_instances("weather", run_id))

    first = trigger(0)
    assert client.wait_for_runs("weather", [first], timeout_s=180) == {first: "success"}
    assert committed("weather") == committed("weather_records") == [(1, None, weather_hour(0))]

    # As if the first example had committed a day too, by the same operator: a day of it takes longer.
    (folder / "state" / "aircraft").mkdir()
    (folder / "state" / "aircraft" / "README").touch()  # an empty folder would be refused
    asset = client.call("GET", "/api/v2/assets?uri_pattern=cairn://aircraft")["assets"][0]["id"]
    client.call("POST", "/api/v2/assets/events", {"asset_id": asset, "extra": {"checkpoint": 17}})
    wait_until(lambda: client.dag_runs("flying_weather"), 60, "a run of the DAG that waits for both assets")
    triggered = client.dag_runs("flying_weather")[0]["dag_run_id"]
    assert client.wait_for_runs("flying_weather", [triggered], timeout_s=60) == {triggered: "success"}
    report = client.xcom("flying_weather", triggered, "delays_by_weather")
    assert report["checkpoints"] == {"cairn://weather": [1], "cairn://aircraft": [17]}

    second = trigger(1)
    # While what comes before it runs: marked later, the scheduler may be starting it at that moment and wins.
    wait_until(lambda: started("windows", second), 90, "the first task")
    client.fail_task("weather", second, "records")
    assert client.wait_for_runs("weather", [second], timeout_s=90) == {second: "failed"}
    assert len(committed("weather")) == 2 and len(committed("weather_records")) == 1
    client.clear("weather", second, ["records"])
    assert client.wait_for_runs("weather", [second], timeout_s=90) == {second: "success"}
    assert committed("weather") == committed("weather_records") == [(1, None, weather_hour(0)), (2, 1, weather_hour(1))]
