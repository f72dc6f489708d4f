"""Two Celery workers under a real Airflow, each with its own name and TMPDIR, and the kills of tests/integration/test_airflow_kills.py: of a
task's process, of its supervisor, of a whole worker. The broker is a PostgreSQL. One day of a pipeline per kill, drivers with a local
master; at the end state and outputs are those of a run that nobody disturbed. Only with CAIRN_TESTS=all: seven
minutes on two cores, and Celery is installed.

    CAIRN_TESTS=all pytest tests/integration/test_celery.py
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from local_stack.owned_process import OwnedProcesses, python_path
from local_stack.postgres_server import Postgres
from local_stack.running_driver import RunningDriver, parent_of
from state_backend.adapters.open_storage import open_storage
from state_backend.checkpoint.sweep_files import sweep
from tests.support.environments import environment_with
from tests.support.held_days import HeldDay, HeldDays, alive
from tests.support.layout import REPOSITORY
from tests.support.local_stack import AirflowServer, running_drivers
from tests.support.reading import unnamed_files
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.airflow, pytest.mark.spark, pytest.mark.long("seven minutes: installs Celery and Redis")]

ROOT = Path(__file__).resolve().parents[2]
FAR_MS = 4_102_444_800_000  # the year 2100: what nobody needs is old
NAMES = ("worker-a", "worker-b")
# Airflow asks for the name of the machine, which is the same for both.
WORKER_NAME = """
import os

def worker_name():
    return os.environ.get("WORKER_NAME", "elsewhere")
"""


class CeleryWorker:
    """One of Airflow's. ``processes``: it and all that it started."""

    def __init__(self, name: str, host: str, folder: Path, python: Path, env: dict[str, str]) -> None:
        self.name, self._python, self._folder = name, str(python), folder
        self.temp = folder / f"temp-{name}"
        self.temp.mkdir()
        self._env = {**env, "WORKER_NAME": name, "SPARK_LOCAL_IP": host, "TMPDIR": str(self.temp)}
        self.processes = OwnedProcesses(folder / "logs" / name)
        self._starts = 0

    def start(self) -> None:
        self._starts += 1
        command = ["celery", "worker", "-H", self.name, "-c", "1", "-s", "--without-gossip", "--without-mingle"]
        self.processes.start(
            f"celery-{self._starts}", [self._python, "-m", "airflow", *command], env=self._env, cwd=self._folder
        )

    def is_ready(self) -> bool:
        return f"{self.name} ready." in self.processes.log_path(f"celery-{self._starts}").read_text(errors="replace")

    def kill(self) -> None:
        """kill -9 of all of it, as if its host were gone."""
        self.processes.stop(grace_s=0, signal_number=signal.SIGKILL)


@dataclass
class Stack:
    airflow: AirflowServer
    workers: dict[str, CeleryWorker]
    days: HeldDays

    def day(self) -> HeldDay:
        return HeldDay(self.days, self.airflow, "sums")

    def worker_of(self, day: HeldDay, number: int = 1) -> CeleryWorker:
        return self.workers[day.tries()[number - 1]["hostname"]]

    def driver(self) -> RunningDriver:
        (driver,) = [driver for worker in self.workers.values() for driver in running_drivers(worker.processes)]
        return driver


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder: Path = tmp_path_factory.mktemp("celery")
    python = environment_with(folder, REPOSITORY / "tests/support/celery.lock")
    days = HeldDays(folder, f"file://{folder}/state", {"sums": {}})
    (folder / "worker_name.py").write_text(WORKER_NAME)
    # Not below pytest's own folder, which nobody but its owner may enter: PostgreSQL does not run as root.
    database = Path(tempfile.mkdtemp(prefix="cairn-pg-"))
    database.chmod(0o711)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, database, ignore_errors=True)
        stack.enter_context(days.undisturbed(5))
        url = stack.enter_context(Postgres(database / "data", log_dir=folder / "logs")).url
        env = {
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": url,
            "AIRFLOW__CORE__EXECUTOR": "CeleryExecutor",
            "AIRFLOW__CELERY__BROKER_URL": f"sqla+{url}",
            "AIRFLOW__CELERY__RESULT_BACKEND": f"db+{url}",
            # A broker in a database has no broadcasts.
            "AIRFLOW__CELERY__WORKER_ENABLE_REMOTE_CONTROL": "False",
            "AIRFLOW__CORE__HOSTNAME_CALLABLE": "worker_name.worker_name",
            "AIRFLOW__CORE__DAGS_FOLDER": str(folder / "dags"),
            "AIRFLOW_CONN_CAIRN_SPARK": json.dumps({"conn_type": "spark", "host": "local[2]"}),
            "PYTHONPATH": python_path(folder, ROOT, ROOT / "plugins"),
            # A task whose supervisor is gone is retried after this many seconds without a heartbeat; they come every second.
            "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "8",
            "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "1",
        }
        airflow = stack.enter_context(
            AirflowServer(ROOT, home=folder / "home", log_dir=folder / "logs", env=env, python=python)
        )
        airflow.wait_for_dag("sums")
        workers = {
            name: CeleryWorker(name, f"127.0.0.{n}", folder, python, airflow.env) for n, name in enumerate(NAMES, 2)
        }
        for worker in workers.values():
            stack.callback(worker.processes.stop, grace_s=5)
            worker.start()
            # One after the other: workers that start at once both create the broker's tables, and one of them fails.
            wait_until(worker.is_ready, 120, f"{worker.name} is ready")
        yield Stack(airflow, workers, days)
        # The scheduler would wait for the tasks of killed workers.
        airflow.processes.stop(grace_s=1)


@pytest.mark.parametrize("killed", ["task process", "supervisor"])
def test_a_driver_ends_with_the_process_that_was_killed(stack: Stack, killed: str) -> None:
    """With the task process, the kernel ends the driver. The supervisor is a process of Celery's pool: the task sees that it is gone and
    stops its driver."""
    day, driver = stack.day(), stack.driver()
    supervisor = parent_of(driver.task)
    assert supervisor is not None
    os.kill(driver.task if killed == "task process" else supervisor, signal.SIGKILL)
    wait_until(lambda: not alive(driver.pid), 20, "the driver is gone too")
    day.let_go()
    day.succeed()
    assert len(day.tries()) == 2


def test_after_kill_9_of_a_celery_worker_the_other_worker_runs_the_retry(stack: Stack) -> None:
    """As if its host were gone, with the copies that it had: the other one makes the retry, from the storage."""
    day = stack.day()
    lost = stack.worker_of(day)
    lost.kill()
    day.let_go()
    day.succeed()
    assert len(day.tries()) == 2
    assert {lost.name, stack.worker_of(day, 2).name} == set(NAMES)
    lost.start()
    wait_until(lost.is_ready, 120, f"{lost.name} is back")


def test_state_equals_an_undisturbed_run_and_workers_keep_no_file_or_process(stack: Stack) -> None:
    """A day on each worker first: whoever works on a host removes what killed tasks left there."""
    for worker in stack.workers.values():
        for other in stack.workers.values():
            if other is not worker:
                other.kill()
        day = stack.day()
        day.let_go()
        day.succeed()
        assert stack.worker_of(day) is worker
        assert [f for work in worker.temp.glob("cairn-work-*") for f in work.iterdir()] == []
        for other in stack.workers.values():
            if other is not worker:
                other.start()
                wait_until(other.is_ready, 120, f"{other.name} is back")
    stack.days.assert_undisturbed()
    storage = open_storage(f"{stack.days.root}/sums")
    sweep(storage, "sums", now_ms=FAR_MS)
    assert unnamed_files(storage, stack.days.log()) == set()
