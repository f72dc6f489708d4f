"""What a day of flights costs in Airflow's own backfill: with drivers that tasks start, and with warm ones; one run at a time, and several.

    python -m benchmarks.airflow_backfill [--days 12] [--active 1,4] [--flights FOLDER]

One Spark Connect server on two cores and one Airflow (PostgreSQL, LocalExecutor with two workers) for each way, one after the other. Each
number of active runs has a root and a DAG of its own: process, checkpoint and validate, whose expectations are due once. Printed is,
for each, the time from the first task's start to the last one's end, per day, the medians of the seconds of each task, and the CPU seconds per
day of everything together but the database. The first two days of the first DAG of each way warm up, and are in no number. All digests
must be equal, or it fails.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import statistics
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil

from local_stack.airflow_server import AirflowServer, parse_time
from local_stack.spark_server import SparkConnectServer
from pipelines import land_flights
from state_backend.adapters.open_storage import open_storage
from state_backend.checkpoint.log import read_log

ROOT = Path(__file__).resolve().parents[1]
START = datetime(2013, 1, 1, tzinfo=UTC)
WARM_UP = 2
TASKS = ("process", "checkpoint", "validate")
# By a part of the command line.
KINDS = {
    "warm drivers": "cairn.command.driver_host",
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
        f"active_{n}", "pipelines.aircraft:AIRCRAFT", f"file://@FOLDER@/state-{n}", pipeline_name="aircraft",
        docs_dir=f"@FOLDER@/docs-{n}", expectations_every=timedelta(days=365), max_active_runs=n,
        schedule=CronDataIntervalTimetable("@daily", timezone="UTC"), start_date=datetime(2013, 1, 1, tzinfo=UTC),
        end_date=datetime(2013, 12, 31, tzinfo=UTC),
    )
"""


# What Airflow itself takes: three tasks that do nothing.
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--days", type=int, default=12)
    parser.add_argument("--active", default="1,4")
    parser.add_argument("--ways", default="nothing,cold,warm")
    parser.add_argument(
        "--flights", type=Path, help="where the flights are landed; left out: they are landed for this run"
    )
    options = parser.parse_args()
    active = [int(n) for n in options.active.split(",")]
    with tempfile.TemporaryDirectory(prefix="cairn-backfill-") as text:
        folder = Path(text)
        folder.chmod(0o711)  # PostgreSQL runs as another user, if this is root
        flights = options.flights or folder / "flights"
        if options.flights is None:
            land_flights.main(["--to", str(flights), "--from", "2013-01-01", "--days", str(options.days + WARM_UP)])
        found = {}
        digests: list[list[int]] = []
        for way in options.ways.split(","):
            found[way] = measure(folder / way, flights.resolve(), active, options.days, way)
            if way == "nothing":
                continue
            digests += [digests_of(folder / way / f"state-{n}", options.days) for n in active]
    if any(other != digests[0] for other in digests):
        raise RuntimeError("the states of two ways differ")
    print(json.dumps({"days": options.days, **found}, indent=1))


def measure(folder: Path, flights: Path, active: list[int], days: int, way: str) -> dict[str, Any]:
    """By the number of active runs: seconds and CPU seconds per day, medians of the tasks, and the load at the end."""
    warm = way == "warm"
    (folder / "dags").mkdir(parents=True)
    text = NOTHING if way == "nothing" else DAGS
    (folder / "dags" / "ways.py").write_text(text.replace("@ACTIVE@", repr(active)).replace("@FOLDER@", str(folder)))
    found: dict[str, Any] = {}
    with SparkConnectServer(ROOT, log_dir=folder / "logs") as spark:
        env = {
            "CAIRN_FLIGHTS": str(flights),
            "AIRFLOW_CONN_CAIRN_SPARK": spark.airflow_connection,
            "AIRFLOW__CORE__DAGS_FOLDER": str(folder / "dags"),
            "AIRFLOW__CAIRN__WARM_DRIVERS": str(warm),
        }
        with AirflowServer(ROOT, home=folder / "home", log_dir=folder / "logs", env=env) as airflow:
            for number, n in enumerate(active):
                dag_id = f"active_{n}"
                airflow.wait_for_dag(dag_id)
                first = 0
                if not number:
                    backfill(airflow, dag_id, 0, WARM_UP, n)
                    first = WARM_UP
                before = cpu_seconds(airflow, spark)
                tasks = backfill(airflow, dag_id, first, days, n)
                after = cpu_seconds(airflow, spark)
                starts = [parse_time(t["start_date"]) for t in tasks if t["start_date"]]
                ends = [parse_time(t["end_date"]) for t in tasks if t["end_date"]]
                took = max(e for e in ends if e) - min(s for s in starts if s)
                count = days - first
                used_s = {kind: round((after[kind] - before[kind]) / count, 2) for kind in after}
                found[f"{n} active"] = {
                    "seconds_per_day": round(took.total_seconds() / count, 2),
                    "cpu_seconds_per_day": round(sum(used_s.values()), 2),
                    "by": {kind: s for kind, s in used_s.items() if s},
                    "tasks": {
                        name: round(statistics.median(t["duration"] for t in tasks if t["task_id"] == name), 2)
                        for name in TASKS
                    },
                    "load": round(os.getloadavg()[0], 1),
                }
                print(dag_id, way, found[f"{n} active"], flush=True)
    return found


def backfill(airflow: AirflowServer, dag_id: str, first: int, end: int, active: int) -> list[dict[str, Any]]:
    """Runs these days; the task instances of all."""
    dates = [START + timedelta(days=n) for n in (first, end - 1)]
    before = {run["dag_run_id"] for run in airflow.client.dag_runs(dag_id)}
    airflow.client.backfill(dag_id, dates[0].isoformat(), dates[1].isoformat(), max_active_runs=active)
    runs = [r["dag_run_id"] for r in airflow.client.dag_runs(dag_id) if r["dag_run_id"] not in before]
    ended = airflow.client.wait_for_runs(dag_id, runs, timeout_s=900)
    if len(runs) != end - first or set(ended.values()) != {"success"}:
        raise RuntimeError(f"the backfill of {dag_id} did not succeed: {ended}")
    return [task for run in runs for task in airflow.client.task_instances(dag_id, run)]


def cpu_seconds(airflow: AirflowServer, spark: SparkConnectServer) -> collections.Counter[str]:
    """By kind of process: of those that live, and of their children that ended. *tasks* has cold drivers, the children of a task, in it."""
    used_s: collections.Counter[str] = collections.Counter()
    for pid in {*airflow.pids(), *spark.pids()}:
        try:
            process = psutil.Process(pid)
            times, command = process.cpu_times(), " ".join(process.cmdline())
        except psutil.Error:  # it has just ended
            continue
        own_s, children_s = times.user + times.system, times.children_user + times.children_system
        if "LocalExecutor" in command:
            used_s.update({"supervisors": own_s, "tasks": children_s})
        else:
            used_s[next((kind for kind, part in KINDS.items() if part in command), "other")] += own_s + children_s
    return used_s


def digests_of(root: Path, days: int) -> list[int]:
    """Of the retained checkpoints of the last days."""
    completed = read_log(open_storage(str(root / "aircraft"))).completed()
    return [record.content.digest for record in completed][-min(days, 10) :]


if __name__ == "__main__":
    main()
