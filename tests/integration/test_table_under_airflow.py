"""A table sink under a real Airflow with four active runs."""

from __future__ import annotations

import os
from pathlib import Path

import deltalake
import duckdb
import pytest

from cairn import output_files, sinks
from cairn.command.publish import _current
from tests.support.airflow_on_postgres import airflow_on_postgres
from tests.support.clicks_table import hour
from tests.support.tiers import REPOSITORY

pytestmark = [pytest.mark.airflow]
# 60 hours, four processes and no Airflow: `test_four_processes_fill_a_table` in tests/contract/test_sinks.py.
HOURS = 12


@pytest.mark.long("minutes: it starts Airflow")
def test_a_backfill_with_four_active_runs_fills_a_table(tmp_path: Path) -> None:
    dags = tmp_path / "dags"
    dags.mkdir()
    (dags / "clicks.py").symlink_to(REPOSITORY / "tests" / "support" / "clicks_dag.py")
    root, table = f"file://{tmp_path}/state", f"file://{tmp_path}/table"
    env = {
        "AIRFLOW__CORE__DAGS_FOLDER": str(dags),
        "CAIRN_ROOT": root,
        "CAIRN_CLICKS_TABLE": table,
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "jobs"), str(REPOSITORY / "plugins")]),
    }
    with airflow_on_postgres(tmp_path, env, dags=["clicks"]) as airflow:
        first, last = (hour(n).start.isoformat() for n in (0, HOURS - 1))
        airflow.client.backfill("clicks", first, last, max_active_runs=4)
        runs = [run["dag_run_id"] for run in airflow.client.dag_runs("clicks") if run["run_type"] == "backfill"]
        assert len(runs) == HOURS
        assert set(airflow.client.wait_for_runs("clicks", runs, timeout_s=900).values()) == {"success"}
    found = deltalake.DeltaTable(table).to_pyarrow_table()
    assert {*found["interval_start"].to_pylist()} == {hour(n).start for n in range(HOURS) if n % 7 != 3}
    of_table = duckdb.sql("SELECT user, clicks FROM found ORDER BY ALL").fetchall()
    output = duckdb.read_parquet(output_files(root, "clicks"))
    assert of_table == output.project("user, clicks").order("user, clicks").fetchall() != []
    assert sinks.delta(table).check(_current("clicks", f"{root}/clicks")) == []
