"""A task and what belongs to it, killed in every way under a real scheduler. One day of a tiny pipeline per way; at the end
state and outputs of all days equal those of a run that nobody disturbed (the fixture `like_an_undisturbed_run`).

The DAGs of the second example run here too, since a server takes longer to start than they take."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from local_stack.demo import pipeline_env
from local_stack.running_driver import RunningDriver, parent_of
from pipelines.land_weather import FIRST_HOUR, HOUR, land_weather
from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.checkpoint.log import Log, read_log
from state_backend.values.records import Record
from tests.support.airflow_on_postgres import airflow_on_postgres
from tests.support.local_stack import AirflowServer, RestError, SparkConnectServer, running_drivers
from tests.support.reading import read_output
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.airflow,
    pytest.mark.spark,
    pytest.mark.long("minutes: kills of every process of a task; test_airflow kills a driver and a task"),
]

ROOT = Path(__file__).resolve().parents[2]
DAG, DAG_WITH_TIMEOUT = "counts", "counts_with_timeout"
START = datetime(2024, 1, 1, tzinfo=UTC)

PIPELINE = """
import pathlib, time
from datetime import UTC, datetime
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import Row
from cairn.pipeline import Pipeline

FOLDER = pathlib.Path("@FOLDER@")

def source(spark, interval):
    day = interval.start.day
    return spark.createDataFrame([("ann", day), ("bob", 10 * day)], "user string, amount long")

class Counts(StatefulProcessor):
    def init(self, handle):
        self._sums = handle.getListState("sums", "total long")

    def handleInputRows(self, key, rows, timerValues):
        before = [total for total, in self._sums.get()]
        for beat in range(1200):
            if not (FOLDER / "slow").exists():
                break
            (FOLDER / "beat").write_text(str(beat))
            time.sleep(0.05)
        total = sum(row.amount for row in rows) + (before[-1] if before else 0)
        self._sums.appendValue((total,))
        yield Row(user=key[0], total=total, intervals=len(before) + 1)

COUNTS = Pipeline(name="counts", start=datetime(2024, 1, 1, tzinfo=UTC), source=source, key=["user"], processor=Counts,
                  output_schema="user string, total long, intervals long", max_parallelism=8)
"""

DAGS = """
from datetime import UTC, datetime, timedelta
from airflow.sdk import CronDataIntervalTimetable
from cairn_operators import stateful_pipeline

def counts(dag_id, **process):
    return stateful_pipeline(
        dag_id, "counts_pipeline:COUNTS", "file://@FOLDER@/state", pipeline="counts",
        schedule=CronDataIntervalTimetable("@daily", timezone="UTC"), start_date=datetime(2024, 1, 1, tzinfo=UTC),
        end_date=datetime(2024, 12, 31, tzinfo=UTC),
        process={"retry_delay": timedelta(seconds=1), "retries": 5, **process}, checkpoint={"retry_delay": timedelta(seconds=1)},
    )

plain = counts("counts")
with_timeout = counts("counts_with_timeout", execution_timeout=timedelta(seconds=25))
"""

# Without Airflow, and nobody is killed.
UNDISTURBED = """
import sys
from datetime import timedelta
from counts_pipeline import COUNTS
from cairn.pipeline import Interval
from cairn.operations.intervals.run_interval import run_interval
from cairn.spark.session import connect
spark = connect(sys.argv[1], "undisturbed")
for n in range(int(sys.argv[3])):
    start = COUNTS.start + timedelta(days=n)
    run_interval(spark, COUNTS, Interval(start, start + timedelta(days=1)), sys.argv[2])
"""


@pytest.fixture(
    scope="module",
    params=[
        "warm",
        pytest.param("cold", marks=pytest.mark.long("the same kills without warm drivers")),
    ],
)
def drivers(request: pytest.FixtureRequest) -> str:
    """Whether tasks start drivers, or have them forked by a warm process."""
    return str(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, drivers: str) -> Path:
    made: Path = tmp_path_factory.mktemp(f"kills-{drivers}")
    for name, text in (("counts_pipeline.py", PIPELINE), ("dags/counts.py", DAGS), ("undisturbed.py", UNDISTURBED)):
        (made / name).parent.mkdir(exist_ok=True)
        (made / name).write_text(text.replace("@FOLDER@", str(made)))
    shutil.copy(ROOT / "dags" / "weather.py", made / "dags")
    land_weather(made / "weather", first=FIRST_HOUR, hours=2)
    return made


@pytest.fixture(scope="module")
def spark_server(folder: Path) -> Iterator[SparkConnectServer]:
    with SparkConnectServer(ROOT, log_dir=folder / "logs") as running:
        yield running


@pytest.fixture(scope="module")
def airflow(folder: Path, spark_server: SparkConnectServer, drivers: str) -> Iterator[AirflowServer]:
    env = {
        "AIRFLOW__CAIRN__WARM_DRIVERS": str(drivers == "warm"),
        **pipeline_env(folder, folder / "flights", spark_server),
        "CAIRN_WEATHER": str(folder / "weather"),
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "AIRFLOW__CORE__DAGS_FOLDER": str(folder / "dags"),
        # A task whose supervisor is gone is retried after this many seconds without a heartbeat; they come every second.
        "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "8",
        "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "1",
    }
    with airflow_on_postgres(folder, env, dags=[DAG, DAG_WITH_TIMEOUT, "weather"]) as server:
        yield server
        # The scheduler would wait for the task of the killed supervisor, which nobody runs any more.
        server.processes.stop(grace_s=1)


@pytest.fixture(scope="module", autouse=True)
def like_an_undisturbed_run(airflow: AirflowServer, folder: Path, spark_server: SparkConnectServer) -> Iterator[None]:
    """After all tests, in whatever order: digest and rows of every day are those of a run that nobody disturbed, and each day was
    committed once."""
    yield
    disturbed = log_of(folder).completed()
    days = len(disturbed)
    if not days:  # none of the tests that kill was chosen
        return
    assert [(r.id, r.content.base_id, r.content.interval.start) for r in disturbed] == [
        (n + 1, n or None, START + timedelta(days=n)) for n in range(days)
    ]
    root = folder / "undisturbed"
    path = os.pathsep.join([str(folder), str(ROOT)])
    command = [sys.executable, str(folder / "undisturbed.py"), spark_server.url, str(root), str(days)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    undisturbed = read_log(open_storage(str(root / "counts"))).completed()
    assert [r.content.digest for r in disturbed] == [r.content.digest for r in undisturbed]
    for ours, theirs in zip(disturbed, undisturbed, strict=True):
        rows = read_output(folder / "state" / "counts", ours)
        assert rows == read_output(root / "counts", theirs)
        assert len(rows) == 2


class Day:
    """One interval, which Airflow runs and whose first try is at work on the Spark server until ``let_go``."""

    def __init__(self, airflow: AirflowServer, folder: Path, dag_id: str = DAG) -> None:
        self.airflow, self.folder, self.dag_id = airflow, folder, dag_id
        self.beat, self.slow = folder / "beat", folder / "slow"
        self.start = START + timedelta(days=len(log_of(folder).completed()))
        self.beat.unlink(missing_ok=True)
        self.slow.touch()
        span = {"data_interval_start": self.start.isoformat(), "data_interval_end": self.end.isoformat()}
        self.run_id: str = airflow.client.trigger(dag_id, self.start.isoformat(), **span)["dag_run_id"]
        wait_until(self.beat.exists, 180, f"the processor of {self.run_id} is at work")
        self.driver = self.drivers()[0]

    @property
    def end(self) -> datetime:
        return self.start + timedelta(days=1)

    def drivers(self) -> list[int]:
        return [driver.pid for driver in running_drivers(self.airflow.processes)]

    def still_beats(self) -> bool:
        before = self.beat.read_text()
        time.sleep(0.3)
        return self.beat.read_text() != before

    def let_go(self) -> None:
        """From now on the processor is quick; what still runs of the first try ends soon."""
        self.slow.unlink()

    def tries(self) -> list[dict[str, Any]]:
        return self.airflow.client.tries(self.dag_id, self.run_id, "process")

    def log_of_try(self, number: int) -> str:
        """Its lines; none if there is no such try yet."""
        if number > len(self.tries()):
            return ""
        try:
            return "\n".join(self.airflow.client.log(self.dag_id, self.run_id, "process", number))
        except RestError as error:
            if error.status != 404:  # Airflow is just making the next try of it
                raise
            return ""

    def succeed(self, *, tries: int) -> Record:
        """Waits for the run; its record."""
        ended = self.airflow.client.wait_for_runs(self.dag_id, [self.run_id], timeout_s=180)
        assert ended == {self.run_id: "success"}
        assert len(self.tries()) == tries
        newest = log_of(self.folder).completed()[-1]
        assert (newest.content.interval.start, newest.content.run.try_number) == (self.start, tries)
        assert not self.drivers()
        return newest


def log_of(folder: Path) -> Log:
    return read_log(open_storage(join_url(f"file://{folder}/state", "counts")))


def task_of(driver: int) -> int:
    found = RunningDriver.of(driver)
    assert found is not None
    return found.task


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_kill_9_of_the_driver(airflow: AirflowServer, folder: Path) -> None:
    """Its operation goes on at the server, until the next try interrupts it. F25: that try begins at the last checkpoint."""
    day = Day(airflow, folder)
    os.kill(day.driver, signal.SIGKILL)
    assert day.still_beats(), "the operation ended by itself, so this shows nothing"
    wait_until(lambda: "interrupted operations of an earlier try" in day.log_of_try(2), 60, "the interrupt")
    day.let_go()
    day.succeed(tries=2)
    assert "the Spark driver was killed (SIGKILL)" in day.log_of_try(1)


def test_kill_9_of_the_task_process(airflow: AirflowServer, folder: Path) -> None:
    """The kernel ends the driver with it."""
    day = Day(airflow, folder)
    os.kill(task_of(day.driver), signal.SIGKILL)
    wait_until(lambda: not alive(day.driver), 20, "the driver is gone too")
    day.let_go()
    day.succeed(tries=2)


def test_kill_9_of_the_supervisor_with_two_live_writers(airflow: AirflowServer, folder: Path) -> None:
    """The task sees that its supervisor is gone and stops its driver; Airflow sees only that heartbeats are missing, and
    starts a second try. The worst case: the driver is frozen and can't interrupt its operation, which goes on writing at
    the server until the second try interrupts it."""
    day = Day(airflow, folder)
    os.kill(day.driver, signal.SIGSTOP)
    os.kill(parent_of(task_of(day.driver)), signal.SIGKILL)
    wait_until(lambda: not alive(day.driver), 20, "the driver is gone")
    assert day.still_beats(), "nothing writes any more, so this shows nothing"
    wait_until(lambda: "interrupted operations of an earlier try" in day.log_of_try(2), 60, "the interrupt")
    day.let_go()
    day.succeed(tries=2)


def test_kill_9_of_the_spark_server(airflow: AirflowServer, folder: Path, spark_server: SparkConnectServer) -> None:
    """The task says what it lost, and the next try runs on the server that takes its place. (Airflow starts no servers.)"""
    day = Day(airflow, folder)
    spark_server.kill()
    day.let_go()
    spark_server.start()
    spark_server.wait_until_ready()
    ended = airflow.client.wait_for_runs(day.dag_id, [day.run_id], timeout_s=180)
    assert ended == {day.run_id: "success"}
    assert "StorageUnavailable: the operation at" in day.log_of_try(1)
    assert "lost its Spark Connect server" in day.log_of_try(1)


def test_marked_failed_by_a_person(airflow: AirflowServer, folder: Path) -> None:
    """on_kill ends the task, its driver, and the operation on the server. Cleared, the run succeeds."""
    day = Day(airflow, folder)
    airflow.client.fail_task(day.dag_id, day.run_id, "process")
    wait_until(lambda: not day.drivers(), 20, "the driver is gone")
    wait_until(lambda: not day.still_beats(), 20, "the operation is interrupted")
    assert airflow.client.wait_for_runs(DAG, [day.run_id], timeout_s=30) == {day.run_id: "failed"}
    day.let_go()
    airflow.client.clear(DAG, day.run_id, ["process"])
    assert day.succeed(tries=2).content.run.clear_number == 1


def test_execution_timeout(airflow: AirflowServer, folder: Path) -> None:
    """The driver and its operation end with the try that took too long; the next one is quicker."""
    day = Day(airflow, folder, DAG_WITH_TIMEOUT)
    wait_until(lambda: not alive(day.driver), 70, "the driver is gone")
    day.let_go()
    day.succeed(tries=2)
    assert "AirflowTaskTimeout" in day.log_of_try(1)


def weather_hour(n: int) -> datetime:
    return FIRST_HOUR + n * HOUR


def test_two_stateful_tasks_and_who_waits_for_them(airflow: AirflowServer, folder: Path) -> None:
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
