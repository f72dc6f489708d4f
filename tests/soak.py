"""Weeks of flights under a real scheduler, disturbed every few days, against the same computed with pandas.

    DAYS=60 SEED=1 python -m tests.soak        # `make soak` sets up what is missing first

Every 2 to 4 days something happens at random: a process of the running task is killed with -9, the Spark server is, the disk
of the state fails for two seconds, a person marks the task failed and clears it, or clears a past day. In the end every
output row of every day, and the whole state, have to be what pandas says, and the checkpoint what its digest says. The seed
decides what happens on which day; when exactly, within a task, the machine decides. Exit code 0 if all of that holds.

Everything lies under data/soak, Airflow's database too; the configuration is that of the repository but for short timeouts.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from local_stack.demo import FIRST_DAY, ROOT, say
from local_stack.running_driver import RunningDriver, parent_of
from state_backend.adapters.open_storage import open_storage
from state_backend.checkpoint.log import Log, read_log
from state_backend.inspection.verify import verify_pipeline
from tests.oracles.aircraft import Expected, expected, row_order
from tests.support.local_stack import AirflowServer, SparkConnectServer, running_drivers
from tests.support.reading import read_state

DATA = ROOT / "data" / "soak"
DAG = "aircraft"
KINDS = (
    "kill -9 of the Spark driver",
    "kill -9 of the task process",
    "kill -9 of its supervisor",
    "kill -9 of the Spark server",
    "the disk fails",
    "marked failed, then cleared",
    "a past day cleared",
    "the last day cleared",
)
STALLED_S = 240

DAGS = """
from datetime import UTC, datetime, timedelta
from cairn_operators.airflow_versions import CronDataIntervalTimetable
from cairn_operators import stateful_pipeline

quick = {"retry_delay": timedelta(seconds=1), "retries": 10}
dag = stateful_pipeline(
    "aircraft", "pipelines.aircraft:AIRCRAFT", "file://@MOUNT@/state",
    schedule=CronDataIntervalTimetable("@daily", timezone="UTC"), start_date=datetime(2013, 1, 1, tzinfo=UTC),
    end_date=datetime(2013, 12, 31, tzinfo=UTC),
    process=quick, checkpoint=quick,
)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """Once ``after`` days are committed: ``kind``, ``delay_s`` after the next task began. ``day`` is the one that is cleared,
    counted from 0, where one is."""

    after: int
    kind: str
    delay_s: float
    day: int


def plan_disturbances(seed: int, days: int) -> list[Disturbance]:
    """What happens when; the same for the same seed. Every kind comes once before any comes again, the first after two days
    and the last before the last day."""
    chance, planned, kinds, after = random.Random(seed), list[Disturbance](), list[str](), 2
    while after < days - 1:
        kinds = kinds or chance.sample(KINDS, len(KINDS))
        kind = kinds.pop()
        day = after - 1 if kind == "the last day cleared" else chance.randrange(after)
        planned.append(Disturbance(after=after, kind=kind, delay_s=round(chance.uniform(0, 1.5), 2), day=day))
        after += chance.randint(2, 4)
    return planned


def main() -> int:
    """0 if all days were processed and state and outputs are pandas's; 1 if not; 130 if interrupted."""
    days, seed = int(os.environ.get("DAYS") or "60"), int(os.environ.get("SEED") or "1")
    if not 1 <= days <= 365:
        print(f"DAYS={days}: the flights are of 2013, so take 1 to 365")
        return 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return run(days, seed)
    except KeyboardInterrupt:
        say("interrupted; everything that was started is stopped")
        return 130
    except (RuntimeError, OSError) as error:
        say(f"failed: {error}")
        return 1


def run(days: int, seed: int) -> int:
    """Runs the soak test; the exit code: 0 if every day is as pandas computes it."""
    plan = plan_disturbances(seed, days)
    say(f"Cairn soak: DAYS={days} SEED={seed}, {len(plan)} disturbances planned")
    shutil.rmtree(DATA, ignore_errors=True)
    for name in ("disk", "dags"):
        (DATA / name).mkdir(parents=True)
    (DATA / "mount").symlink_to("disk")
    (DATA / "dags" / "soak.py").write_text(DAGS.replace("@MOUNT@", str(DATA / "mount")))
    land = [sys.executable, "-m", "pipelines.land_flights", "--to", str(DATA / "flights"), "--days", str(days)]
    subprocess.run(land, cwd=ROOT, check=True, capture_output=True)
    with SparkConnectServer(ROOT, log_dir=DATA / "logs") as spark:
        env = {
            "AIRFLOW_CONN_CAIRN_SPARK": spark.airflow_connection,
            "CAIRN_FLIGHTS": str(DATA / "flights"),
            "AIRFLOW__CORE__DAGS_FOLDER": str(DATA / "dags"),
            "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "10",
            "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "1",
        }
        with AirflowServer(ROOT, home=DATA / "airflow", log_dir=DATA / "logs", env=env) as airflow:
            airflow.wait_for_dag(DAG)
            say("Airflow and Spark are ready")
            soak = _Soak(days, airflow, spark)
            for disturbance in plan:
                soak.wait_for(disturbance.after)
                soak.disturb(disturbance)
            soak.wait_for(days)
            tries, extra = soak.count_tries()
    say(f"all {days} days are done: {tries} tries of `process`, {extra} more than days")
    findings = check(days)
    for finding in findings:
        say(f"WRONG: {finding}")
    for kind, count in sorted(soak.done.items()):
        print(f"  {count:3}  {kind}")
    print(f"survived {soak.done.total()} disturbances: SEED={seed} DAYS={days}" if not findings else "not survived")
    return 1 if findings else 0


class _Soak:
    """The run, and what is done to it."""

    def __init__(self, days: int, airflow: AirflowServer, spark: SparkConnectServer) -> None:
        self.days, self.airflow, self.spark = days, airflow, spark
        self.client = airflow.client
        self.done: Counter[str] = Counter()

    def wait_for(self, days: int) -> None:
        """Waits until so many days have succeeded at Airflow. Raises: RuntimeError if one fails, or nothing goes on."""
        moved_s, last = time.monotonic(), -1
        while (done := self._go_on()) < days:
            if done != last:
                moved_s, last = time.monotonic(), done
            if time.monotonic() - moved_s > STALLED_S:
                raise RuntimeError(
                    f"{done} days are done, and nothing has gone on for {STALLED_S} s; see {DATA / 'logs'}"
                )
            self.airflow.processes.check_alive()
            time.sleep(0.3)

    def _go_on(self) -> int:
        """The number of days that have succeeded. Starts the next day if no other is under way.

        Days are started one by one. A backfill would start the next day also after a failed one, and that would fail too.
        Raises: RuntimeError with the end of the log if a day failed.
        """
        runs = [run for run in self.client.dag_runs(DAG) if run["logical_date"]]
        for run in runs:
            if run["state"] == "failed":
                raise RuntimeError(f"{run['dag_run_id']} failed:\n{self._end_of_log(run['dag_run_id'])}")
        done = sum(run["state"] == "success" for run in runs)
        if done == len(runs) < self.days:
            span = {"data_interval_start": _day(done), "data_interval_end": _day(done + 1)}
            self.client.trigger(DAG, _day(done), **span)
        return done

    def disturb(self, planned: Disturbance) -> None:
        kind = planned.kind
        if kind.endswith("day cleared"):
            self._clear(planned.day)
            what = f"day {planned.day + 1}"
        else:
            driver = self._driver()
            time.sleep(planned.delay_s)
            what = f"{planned.delay_s} s after driver {driver.pid} was seen"
            if kind == "the disk fails":
                self._fail_the_disk(2)
            elif kind == "kill -9 of the Spark server":
                self.spark.kill()
                self.spark.start()
                self.spark.wait_until_ready()
            elif kind == "marked failed, then cleared":
                what = self._mark_failed()
            else:
                generation = ("driver", "process", "supervisor").index(kind.split()[-1])
                if not self._kill(driver, generation):
                    what += ": it was done before"
        self.done[kind] += 1
        say(f"after {planned.after:3} days: {kind} ({what})")

    def _driver(self) -> RunningDriver:
        """A driver at work; waits for one."""
        deadline_s = time.monotonic() + STALLED_S
        while time.monotonic() < deadline_s:
            for driver in running_drivers(self.airflow.processes):
                return driver
            self._go_on()
            time.sleep(0.05)
        raise RuntimeError(f"no driver for {STALLED_S} s")

    def _kill(self, driver: RunningDriver, generation: int) -> bool:
        """Kill the driver, its task or the task's supervisor. Return False if the driver has ended."""
        pid = (driver.pid, driver.task, parent_of(driver.task))[generation]
        # Another process may have taken the pid of a driver or task that has ended.
        if pid in set(self.airflow.processes.pids()) and RunningDriver.of(driver.pid) == driver:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                return True
        return False

    def _fail_the_disk(self, seconds: float) -> None:
        """Every access fails with ELOOP, like one to a dead mount: the link to the disk points to itself meanwhile."""
        for target in ("mount", "disk"):
            fresh = DATA / "fresh"
            fresh.symlink_to(target)
            fresh.replace(DATA / "mount")
            if target == "mount":
                time.sleep(seconds)

    def _mark_failed(self) -> str:
        run = next((r for r in self.client.dag_runs(DAG) if r["state"] == "running"), None)
        if run is None:
            return "none was running any more"
        run_id = run["dag_run_id"]
        self.client.fail_task(DAG, run_id, "process")
        self.client.wait_for_runs(DAG, [run_id], timeout_s=STALLED_S)
        self.client.clear(DAG, run_id, ["process"])
        return str(run["logical_date"])[:10]

    def _clear(self, day: int) -> None:
        for run in self.client.dag_runs(DAG):
            if run["logical_date"] and run["logical_date"][:10] == _day(day)[:10]:
                self.client.clear(DAG, run["dag_run_id"], ["process"])

    def count_tries(self) -> tuple[int, int]:
        tries = sum(len(self.client.tries(DAG, run["dag_run_id"], "process")) for run in self.client.dag_runs(DAG))
        return tries, tries - self.days

    def _end_of_log(self, run_id: str) -> str:
        lines = []
        for task in self.client.task_instances(DAG, run_id):
            if task["state"] == "failed":
                lines += self.client.log(DAG, run_id, task["task_id"], task["try_number"])[-30:]
        return "\n".join(lines)


def check(days: int) -> list[str]:
    """What is not as pandas says; nothing if all is well."""
    oracle = expected(FIRST_DAY.date(), days)
    root = DATA / "disk" / "state" / DAG
    storage = open_storage(f"file://{root}")
    log = read_log(storage)
    with tempfile.TemporaryDirectory(prefix="cairn-soak-") as work:
        verification = verify_pipeline(storage, which={log.completed()[-1].id}, work=Path(work))
        found = [str(f) for f in verification.findings]
        found += [str(f) for checkpoint in verification.checkpoints for f in checkpoint.findings]
        found += _wrong_rows(log, root, oracle, days) + _wrong_state(log, root, oracle, Path(work))
    say(f"compared {sum(map(len, oracle.rows.values())):,} rows of {days} days and {len(oracle.history):,} aircraft")
    return found


def _wrong_rows(log: Log, root: Path, oracle: Expected, days: int) -> list[str]:
    import pyarrow.parquet as pq

    current = {interval.start: files for interval, (_, files) in log.current_outputs().items()}
    found = [] if len(current) == days else [f"{len(current)} intervals have output, not {days}"]
    for n in range(days):
        start = FIRST_DAY + timedelta(days=n)
        files = [root / f.handle.path for f in current.get(start, ()) if not f.late]
        rows = sorted((row for file in files for row in pq.read_table(file).to_pylist()), key=row_order)
        if rows != oracle.rows[start.date()]:
            found.append(f"the rows of {start.date()} are not pandas's")
    return found


def _wrong_state(log: Log, root: Path, oracle: Expected, work: Path) -> list[str]:
    newest = max((r for r in log.completed()), key=lambda r: r.content.interval.end)
    history = {tail: fields for (tail,), fields in read_state(root, newest, "history", work).items()}
    routes: dict[str, dict[tuple[str, str], int]] = {}
    for (tail, origin, dest), fields in read_state(root, newest, "routes", work).items():
        routes.setdefault(tail, {})[origin, dest] = fields["flights"]
    wrong: list[tuple[str, Any, Any]] = [("history", history, oracle.history), ("routes", routes, oracle.routes)]
    return [f"state {name} is not pandas's" for name, ours, theirs in wrong if ours != theirs]


def _day(n: int) -> str:
    return (FIRST_DAY + timedelta(days=n)).isoformat()


if __name__ == "__main__":
    sys.exit(main())
