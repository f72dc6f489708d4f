"""A table of a sink while Airflow runs a backfill of an hourly pipeline with four active runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deltalake
import duckdb
import pytest

from cairn import output_files
from tests.support.airflow_on_postgres import airflow_on_postgres
from tests.support.clicks_table import hour, rows_of
from tests.support.local_stack import AirflowServer, SparkConnectServer
from tests.support.tiers import REPOSITORY

pytestmark = [pytest.mark.airflow, pytest.mark.spark]

HOURS = 60
PIPELINE = """
import os
from datetime import UTC, datetime
from cairn import Pipeline, sinks
from cairn.aggregates import Count, RunningAggregate

FOLDER = os.environ["CAIRN_CLICKS"]

class Clicks(RunningAggregate):
    clicks = Count()

CLICKS = Pipeline(
    name="clicks", start=datetime(2024, 1, 1, tzinfo=UTC), key=["user"], processor=Clicks,
    source=lambda spark, interval: spark.read.schema("user string").json(f"{FOLDER}/{interval.start:%dT%H}.json"),
    sink=sinks.delta(f"file://{FOLDER}/table"),
)
"""
DAG = """
# An Airflow DAG.
import os
from datetime import UTC, datetime
from airflow.sdk import CronDataIntervalTimetable
from cairn_operators import stateful_pipeline

dag = stateful_pipeline(
    "clicks", code="clicks_pipeline:CLICKS", root=f"file://{os.environ['CAIRN_CLICKS']}/state",
    start_date=datetime(2024, 1, 1, tzinfo=UTC), end_date=datetime(2024, 1, 5, tzinfo=UTC),
    schedule=CronDataIntervalTimetable("0 * * * *", timezone="UTC"), max_active_runs=4,
)
"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    for n in range(HOURS):
        lines = "".join(json.dumps({"user": user}) + "\n" for (user,) in rows_of(n))
        (tmp_path / f"{hour(n).start:%dT%H}.json").write_text(lines)
    for name, text in (("dags/clicks.py", DAG), ("modules/clicks_pipeline.py", PIPELINE)):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    parts = [*(str(REPOSITORY / part) for part in ("", "jobs", "plugins")), str(tmp_path / "modules")]
    return {
        "AIRFLOW__CORE__DAGS_FOLDER": str(tmp_path / "dags"),
        "CAIRN_CLICKS": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(parts),
    }


@pytest.fixture
def airflow(tmp_path: Path, env: dict[str, str]) -> Iterator[AirflowServer]:
    with SparkConnectServer(REPOSITORY, log_dir=tmp_path / "logs") as spark:
        connection = {"AIRFLOW_CONN_CAIRN_SPARK": spark.airflow_connection}
        with airflow_on_postgres(tmp_path, env | connection, dags=["clicks"]) as server:
            yield server


@pytest.mark.long("minutes: 60 runs of Airflow")
def test_a_backfill_with_four_active_runs_fills_the_table(
    airflow: AirflowServer, env: dict[str, str], tmp_path: Path
) -> None:
    first, last = (hour(n).start.isoformat() for n in (0, HOURS - 1))
    airflow.client.backfill("clicks", first, last, max_active_runs=4)
    runs = [run["dag_run_id"] for run in airflow.client.dag_runs("clicks") if run["run_type"] == "backfill"]
    assert len(runs) == HOURS
    assert {*airflow.client.wait_for_runs("clicks", runs, timeout_s=1200).values()} == {"success"}

    url = f"file://{tmp_path}/table"
    found: Any = deltalake.DeltaTable(url).to_pyarrow_table()
    hours = [n for n in range(HOURS) if rows_of(n)]
    assert sorted({*found["interval_start"].to_pylist()}) == [hour(n).start for n in hours]
    of_table = duckdb.sql("SELECT user, clicks FROM found ORDER BY ALL").fetchall()
    output = duckdb.read_parquet(output_files(f"file://{tmp_path}/state", "clicks"))
    assert of_table == output.project("user, clicks").order("user, clicks").fetchall() != []
    # The largest count of a user is the number of the user's rows in all hours.
    every = [user for n in range(HOURS) for (user,) in rows_of(n)]
    largest = dict(duckdb.sql("SELECT user, max(clicks) FROM found GROUP BY user").fetchall())
    assert largest == {user: every.count(user) for user in every}

    def check() -> tuple[int, list[str]]:
        where = ["--root", f"file://{tmp_path}/state", "--pipeline", "clicks", "--code", "clicks_pipeline:CLICKS"]
        command = [str(Path(sys.executable).with_name("cairn")), "publish", "--check", *where]
        done = subprocess.run(command, check=False, env={**os.environ, **env}, capture_output=True, text=True)
        return done.returncode, done.stdout.splitlines()

    name = f"delta({url!r})"
    assert check() == (0, [f"{name} is equal to the output of {HOURS} interval(s)"])
    table = deltalake.DeltaTable(url)
    at = {n: f"interval_start = '{hour(n).start.isoformat()}'" for n in (8, 25)}
    table.delete(f"user = 'bob' AND {at[8]}")
    table.update({"clicks": "clicks + 1"}, predicate=f"user = 'bob' AND {at[25]}")
    twice = duckdb.sql(f"SELECT * FROM found WHERE interval_start = '{hour(42).start.isoformat()}'").arrow()
    deltalake.write_deltalake(table, twice, mode="append")
    rows = {n: len({*rows_of(n)}) for n in (8, 25, 42)}
    assert check() == (
        1,
        [
            f"{name} differs from the output of 3 interval(s):",
            f"{hour(8)}: {rows[8]} rows in the output, {rows[8] - 1} in the table",
            f"{hour(25)}: {rows[25]} rows in both, but with other values",
            f"{hour(42)}: {rows[42]} rows in the output, {2 * rows[42]} in the table",
        ],
    )
