"""The cost of a day of flights in Airflow's own backfill.

    python -m benchmarks.airflow_backfill [--days 12] [--active 1,4] [--ways alone,nothing,range,cold,warm,streaming] [--flights FOLDER]
        [--setting NAME=VALUE]

The ways are:

- *alone*: `run_intervals` in one process, without Airflow.
- *nothing*: three tasks that do nothing.
- *range*: the DAG of `backfill_pipeline`, which runs all days in one task, and validates the last checkpoint.
- *cold*: Cairn with drivers that tasks start.
- *warm*: Cairn with warm drivers.
- *streaming*: Spark's Structured Streaming. One DAG has a task whose query with `Trigger.AvailableNow` reads the run's
  day. It has one active run, because two queries can't share a checkpoint. A second DAG reads all days in
  one run.

Each way has one Spark Connect server on two cores and one Airflow (PostgreSQL, LocalExecutor with four workers, as in
`airflow.cfg`). The ways run one after the other. Each number of active runs has a root and a DAG of its own: process, checkpoint and
validate. Expectations run once. `--days 365` runs the whole year. `--setting` sets an environment variable of Airflow.

For each DAG the program prints the time from the first task's start to the last task's end for each day, the median
seconds of each task, and the CPU seconds of each day by kind of process. The first two days of each way's first DAG
warm up and do not count. `seconds` is the time of all other days. The program fails if the digests or the totals of each aircraft differ between the ways.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil

from benchmarks.available_now import Totals, totals_of_pipeline, totals_of_query
from cairn.operations.intervals.run_intervals import run_intervals
from cairn.pipeline import Interval
from cairn.spark.session import connect
from local_stack.airflow_server import parse_time
from pipelines import land_flights
from pipelines.aircraft import AIRCRAFT
from state_backend.adapters.open_storage import open_storage
from state_backend.checkpoint.log import read_log
from tests.support.local_stack import AirflowServer, SparkConnectServer

ROOT = Path(__file__).resolve().parents[1]
START = datetime(2013, 1, 1, tzinfo=UTC)
WARM_UP = 2
# For each kind of process, a part of its command line.
KINDS = {
    "warm drivers": "cairn.driver.driver_host",
    "Spark": "java",
    "Spark's Python": "pyspark.daemon",
    "scheduler": "airflow scheduler",
    "DAG processor": "dag-processor",
    "triggerer": "triggerer",
    "API server": "api",
    "database": "postgres",
}

DAGS = """
# An Airflow DAG: where a file says neither word, Airflow skips it.
from datetime import UTC, datetime, timedelta
from airflow.sdk import CronDataIntervalTimetable
from cairn_operators import stateful_pipeline

for n in @ACTIVE@:
    globals()[f"active_{n}"] = stateful_pipeline(
        f"active_{n}", "pipelines.aircraft:AIRCRAFT", f"file://@FOLDER@/state-{n}", pipeline="aircraft",
        validate={"docs": f"@FOLDER@/docs-{n}", "expectations_every": timedelta(days=365)}, max_active_runs=n,
        schedule=CronDataIntervalTimetable("@daily", timezone="UTC"), start_date=datetime(2013, 1, 1, tzinfo=UTC),
        end_date=datetime(2013, 12, 31, tzinfo=UTC),
    )
"""


RANGE = """
# An Airflow DAG: where a file says neither word, Airflow skips it.
from datetime import timedelta
from cairn_operators import backfill_pipeline

dag = backfill_pipeline(
    "active_1", "pipelines.aircraft:AIRCRAFT", "file://@FOLDER@/state-1", pipeline="aircraft", every=timedelta(days=1), validate=True
)
"""


# DAGs of three tasks that do nothing: they measure the cost of Airflow itself.
NOTHING = """
from datetime import UTC, datetime
from airflow.sdk import DAG, CronDataIntervalTimetable, task

for n in @ACTIVE@:
    with DAG(
        f"active_{n}", schedule=CronDataIntervalTimetable("@daily", timezone="UTC"), start_date=datetime(2013, 1, 1, tzinfo=UTC),
        end_date=datetime(2013, 12, 31, tzinfo=UTC), catchup=False, max_active_runs=n,
    ) as dag:
        one, two, three = (task(task_id=name)(lambda: None)() for name in ("process", "checkpoint", "validate"))
        one >> two >> three
    globals()[f"active_{n}"] = dag
"""


# DAGs for Structured Streaming. The query starts in the task's process, which imports only pyspark's client.
STREAMING = """
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from airflow.sdk import DAG, BaseHook, CronDataIntervalTimetable, get_current_context, task

def read(folder, days):
    from benchmarks.available_now import land_and_run

    at = BaseHook.get_connection("cairn_spark")
    land_and_run(f"{at.host}:{at.port}", Path("@FLIGHTS@"), Path("@FOLDER@", folder), days)

def the_day():
    read("streaming", [get_current_context()["data_interval_start"].date()])

def all_days():
    read("streaming-once", [date(2013, 1, 1) + timedelta(days=n) for n in range(@DAYS@)])

for dag_id, what in (("active_1", the_day), ("once", all_days)):
    with DAG(
        dag_id, schedule=CronDataIntervalTimetable("@daily", timezone="UTC"), start_date=datetime(2013, 1, 1, tzinfo=UTC),
        end_date=datetime(2013, 12, 31, tzinfo=UTC), catchup=False, max_active_runs=1,
    ) as dag:
        task(task_id="process")(what)()
    globals()[dag_id] = dag
"""
TEXTS = {"alone": "", "nothing": NOTHING, "range": RANGE, "cold": DAGS, "warm": DAGS, "streaming": STREAMING}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--days", type=int, default=12)
    parser.add_argument("--active", default="1,4")
    parser.add_argument("--ways", default="nothing,cold,warm,streaming", help=f"of {','.join(TEXTS)}")
    parser.add_argument(
        "--flights", type=Path, help="where the flights are landed; left out: they are landed for this run"
    )
    parser.add_argument("--setting", action="append", default=[], metavar="NAME=VALUE", help="a variable of Airflow")
    options = parser.parse_args()
    settings = settings_of(options.setting)
    with tempfile.TemporaryDirectory(prefix="cairn-backfill-") as text:
        folder = Path(text)
        folder.chmod(0o711)  # If this process runs as root, PostgreSQL runs as another user, who must enter the folder.
        active = [int(n) for n in options.active.split(",")]
        found = compare(folder, options.days, options.ways.split(","), active, options.flights, settings)
    print(json.dumps({"days": options.days, **found}, indent=1))


def settings_of(given: Sequence[str]) -> dict[str, str]:
    """Return environment variables that the command line gives as NAME=VALUE."""
    return dict(one.split("=", 1) for one in given)


def compare(
    folder: Path,
    days: int,
    ways: Sequence[str],
    active: Sequence[int],
    flights: Path | None = None,
    settings: Mapping[str, str] | None = None,
) -> dict[str, dict[str, dict[str, Any]]]:
    """Measure the given ways.

    Returns:
        The figures, by way and by number of active runs.

    Raises:
        RuntimeError: The states of two ways differ.
    """
    if unknown := {*ways} - TEXTS.keys():
        raise SystemExit(f"no way {', '.join(sorted(unknown))}; there are {', '.join(TEXTS)}")
    if flights is None:
        flights = folder / "flights"
        land_flights.main(["--to", str(flights), "--from", "2013-01-01", "--days", str(days)])
    found: dict[str, dict[str, dict[str, Any]]] = {}
    digests: list[list[int]] = []
    totals: list[Totals] = []
    for way in ways:
        if way == "alone":
            found[way] = {"": alone(folder / way, flights.resolve(), days)}
            print(way, found[way], flush=True)
            digests.append(digests_of(folder / way, days))
            continue
        found[way], known = measure(folder / way, flights.resolve(), active, days, way, settings)
        totals += known
        if way == "range":
            digests.append(digests_of(folder / way / "state-1", days))
        if way in ("cold", "warm"):
            digests += [digests_of(folder / way / f"state-{n}", days) for n in active]
    if any(other != digests[0] for other in digests) or any(other != totals[0] for other in totals):
        raise RuntimeError("the states of two ways differ")
    return found


def alone(folder: Path, flights: Path, days: int) -> dict[str, Any]:
    """Run the days with `run_intervals`, and return the seconds for each day."""
    folder.mkdir(parents=True)
    os.environ["CAIRN_FLIGHTS"] = str(flights)
    starts = [START + timedelta(days=n) for n in range(days)]
    with SparkConnectServer(ROOT, log_dir=folder / "logs") as spark:
        session = connect(spark.url, "alone", token=spark.token)
        began_s = time.monotonic()
        run_intervals(session, AIRCRAFT, [Interval(start, start + timedelta(days=1)) for start in starts], str(folder))
        seconds = time.monotonic() - began_s
        session.stop()
    return {
        "seconds": round(seconds),
        "seconds_per_day": round(seconds / days, 2),
        "load": round(os.getloadavg()[0], 1),
    }


def measure(
    folder: Path,
    flights: Path,
    active: Sequence[int],
    days: int,
    way: str,
    settings: Mapping[str, str] | None = None,
) -> tuple[dict[str, dict[str, Any]], list[Totals]]:
    """Measure one of the ways to run the days that the module's docstring lists.

    Args:
        folder: The folder for Airflow, the servers and the state.
        flights: The folder of the landed flights.
        active: The numbers of active runs.
        days: The number of days.
        way: The name of the way.
        settings: More environment variables for Airflow.

    Returns:
        The figures by number of active runs, and the totals of each aircraft in each final state.
    """
    (folder / "dags").mkdir(parents=True)
    text = TEXTS[way].replace("@ACTIVE@", repr([*active])).replace("@DAYS@", str(days))
    text = text.replace("@FOLDER@", str(folder)).replace("@FLIGHTS@", str(flights))
    (folder / "dags" / "ways.py").write_text(text)
    found: dict[str, dict[str, Any]] = {}
    with SparkConnectServer(ROOT, log_dir=folder / "logs") as spark:
        env = {
            "CAIRN_FLIGHTS": str(flights),
            "AIRFLOW_CONN_CAIRN_SPARK": spark.airflow_connection,
            "AIRFLOW__CORE__DAGS_FOLDER": str(folder / "dags"),
            "AIRFLOW__CAIRN__WARM_DRIVERS": str(way == "warm"),
            "AIRFLOW__CORE__PARALLELISM": "4",
            **(settings or {}),
        }
        with AirflowServer(ROOT, home=folder / "home", log_dir=folder / "logs", env=env) as airflow:
            for number, n in enumerate([1] if way in ("range", "streaming") else active):
                dag_id = f"active_{n}"
                airflow.wait_for_dag(dag_id)
                if not number and way != "range":
                    backfill(airflow, dag_id, 0, WARM_UP, n)
                if way == "range":
                    found["one run"] = usage(airflow, spark, dag_id, 0, 1, 0, days)
                    print(dag_id, way, found["one run"], flush=True)
                    break
                first = 0 if number else WARM_UP
                found[f"{n} active"] = usage(airflow, spark, dag_id, first, days, n)
                print(dag_id, way, found[f"{n} active"], flush=True)
            if way == "streaming":
                airflow.wait_for_dag("once")
                found["once"] = usage(airflow, spark, "once", 0, 1, 1, days)
                print("once", way, found["once"], flush=True)
                ends = [folder / "streaming", folder / "streaming-once"]
                return found, [totals_of_query(spark.url, end) for end in ends]
        if way == "nothing":
            return found, []
        return found, [totals_of_pipeline(spark.url, end) for end in sorted(folder.glob("state-*"))]


def usage(
    airflow: AirflowServer, spark: SparkConnectServer, dag_id: str, first: int, end: int, active: int, count: int = 0
) -> dict[str, Any]:
    """Run a backfill and return its figures for each day.

    Args:
        airflow: The Airflow server.
        spark: The Spark Connect server.
        dag_id: The DAG.
        first: The number of the first day.
        end: The number of the day after the last day.
        active: The number of active runs; 0 for the one run of *range*.
        count: The number of days that the runs read; 0 for one day in each run.
    """
    count = count or end - first
    before = cpu_seconds(airflow, spark)
    tasks = ranged(airflow, dag_id, count) if active == 0 else backfill(airflow, dag_id, first, end, active)
    after = cpu_seconds(airflow, spark)
    starts = [start for t in tasks if (start := parse_time(t["start_date"]))]
    ends = [end for t in tasks if (end := parse_time(t["end_date"]))]
    used_s = {kind: round((after[kind] - before[kind]) / count, 2) for kind in after}
    seconds = (max(ends) - min(starts)).total_seconds()
    return {
        "seconds": round(seconds),
        "seconds_per_day": round(seconds / count, 2),
        "cpu_seconds_per_day": round(sum(used_s.values()), 2),
        "by": {kind: s for kind, s in used_s.items() if s},
        "tasks": {
            name: round(statistics.median(t["duration"] for t in tasks if t["task_id"] == name), 2)
            for name in dict.fromkeys(t["task_id"] for t in tasks)
        },
        "load": round(os.getloadavg()[0], 1),
    }


def backfill(airflow: AirflowServer, dag_id: str, first: int, end: int, active: int) -> list[dict[str, Any]]:
    """Run a backfill and return the task instances of all its runs.

    Raises:
        RuntimeError: A run failed.
    """
    dates = [START + timedelta(days=n) for n in (first, end - 1)]
    before = {run["dag_run_id"] for run in airflow.client.dag_runs(dag_id)}
    airflow.client.create_backfill(dag_id, *dates, max_active_runs=active)
    runs = [r["dag_run_id"] for r in airflow.client.dag_runs(dag_id) if r["dag_run_id"] not in before]
    ended = airflow.client.wait_for_runs(dag_id, runs, timeout_s=600 + 60 * len(runs))
    if len(runs) != end - first or set(ended.values()) != {"success"}:
        raise RuntimeError(f"the backfill of {dag_id} did not succeed: {ended}")
    return [task for run in runs for task in airflow.client.task_instances(dag_id, run)]


def ranged(airflow: AirflowServer, dag_id: str, days: int) -> list[dict[str, Any]]:
    """Run the days by the DAG of `backfill_pipeline` and return the task instances of its run."""
    first, last = (START + timedelta(days=n) for n in (0, days - 1))
    run = airflow.client.trigger(dag_id, conf={"from": first.isoformat(), "to": last.isoformat()})["dag_run_id"]
    if airflow.client.wait_for_runs(dag_id, [run], timeout_s=600 + 10 * days) != {run: "success"}:
        raise RuntimeError(f"the run of {dag_id} did not succeed")
    tasks: list[dict[str, Any]] = airflow.client.task_instances(dag_id, run)
    return tasks


def cpu_seconds(airflow: AirflowServer, spark: SparkConnectServer) -> collections.Counter[str]:
    """Return the CPU seconds so far by kind of process, including children that have ended.

    The kind *tasks* includes cold drivers, because they are children of a task.
    """
    used_s: collections.Counter[str] = collections.Counter()
    for pid in {*airflow.pids(), *spark.pids()}:
        try:
            process = psutil.Process(pid)
            times, command = process.cpu_times(), " ".join(process.cmdline())
        except psutil.Error:  # The process has just ended.
            continue
        own_s, children_s = times.user + times.system, times.children_user + times.children_system
        if "LocalExecutor" in command:
            used_s.update({"supervisors": own_s, "tasks": children_s})
        else:
            used_s[next((kind for kind, part in KINDS.items() if part in command), "other")] += own_s + children_s
    return used_s


def digests_of(root: Path, days: int) -> list[int]:
    """Return the digests of the retained checkpoints of the last days."""
    completed = read_log(open_storage(str(root / "aircraft"))).completed()
    return [record.content.digest for record in completed][-min(days, 10) :]


if __name__ == "__main__":
    main()
