"""The Airflow that the tests of several files share: its DAGs, and what a person does with it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path

from local_stack.demo import DAG, FIRST_DAY, pipeline_env
from local_stack.owned_process import python_path
from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.checkpoint.log import Log, read_log
from tests.support import corrections, told_dags
from tests.support.airflow_names import DEADLINES
from tests.support.airflow_on_postgres import airflow_on_postgres
from tests.support.azure_server import BUCKET, VARIABLE
from tests.support.layout import REPOSITORY as ROOT
from tests.support.local_stack import AirflowServer, SparkConnectServer, running_drivers


def write_alarms(dags: Path, plugins: Path) -> None:
    """The code of docs/checkpoints-page.md as it stands there, for the pipeline of the tests and with a deadline of seconds."""
    pager, dag = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "checkpoints-page.md").read_text(), re.DOTALL)
    plugins.mkdir()
    (plugins / "pager.py").write_text(pager)
    for said, here in (
        ('"clicks"', '"tally_alarms"'),
        ("pipelines.clicks:CLICKS", "unused:TALLY"),
        ('"file:///data/state"', "ROOT"),
        ("@hourly", "@daily"),
        ("minutes=30", "seconds=4"),
        ("/data/docs", str(plugins)),
        ("from airflow.sdk import AsyncCallback", f"from {DEADLINES} import AsyncCallback"),
    ):
        assert said in dag
        dag = dag.replace(said, here)
    own = "from tests.support.tally_dags import DRIVER, ROOT\n"
    (dags / "alarms.py").write_text(f"{own}{dag}dag.get_task('process').driver_module = DRIVER\n")


RANGE = """
# An Airflow DAG.
import os
from datetime import timedelta
from cairn_operators import backfill_pipeline

data = os.environ["CAIRN_DATA"]
dag = backfill_pipeline("aircraft_range", "pipelines.aircraft:AIRCRAFT", f"file://{data}/range", pipeline="aircraft",
                        every=timedelta(days=1), validate={"docs": f"{data}/range-docs"}, backfill={"spark_conf": {"@AZURE@": "@KEY@", "spark.sql.shuffle.partitions": 2}})
"""
CHAINED = """
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from cairn import Pipeline, upstream, upstreams

class Step(StatefulProcessor):
    "Gives rows of one day; its state is the number of days."

    def init(self, handle):
        self.state = handle.getValueState("state", "n long")

    def handleInputRows(self, key, rows, timerValues):
        (before,), rows = self.state.get() or (0,), list(rows)
        self.state.update((self.after(before, rows),))
        yield Row(user=key[0], n=self.given(before, rows))

    def after(self, before, rows):
        return before + 1

    def given(self, before, rows):
        return sum(row.n for row in rows)

class Sessions(Step):
    def given(self, before, rows):
        return sum(-(-row.n // 10) for row in rows)

class Total(Step):
    after = given = lambda self, before, rows: before + sum(row.n for row in rows)

def landed(spark, interval):
    read = json.loads(Path(os.environ["CAIRN_DATA"], "landed", f"{interval.start.day}.json").read_text())
    return spark.createDataFrame([*read.items()], "user string, n long")

def both(spark, interval, sessions, events):
    return sessions.unionByName(events)

common = {"start": datetime(2024, 1, 1, tzinfo=UTC), "key": ["user"], "parallelism": 1, "output_schema": "user string, n long"}
EVENTS = Pipeline(name="events", source=landed, processor=Step, **common)
SESSIONS = Pipeline(name="sessions", source=upstream("events"), processor=Sessions, **common)
REPORT = Pipeline(name="report", source=upstreams(both, sessions=upstream("sessions"), events=upstream("events", back=1)), processor=Total, **common)
"""
CHAIN = """
# Three Airflow DAGs.
import os
from datetime import UTC, datetime
from cairn_operators import stateful_pipeline

for name in ("events", "sessions", "report"):
    globals()[name] = stateful_pipeline(
        name, f"chained:{name.upper()}", f"file://{os.environ['CAIRN_DATA']}/chain/state", pipeline=name, schedule="@daily",
        catchup=True, start_date=datetime(2024, 1, 1, tzinfo=UTC), end_date=datetime(2024, 1, 30, tzinfo=UTC), is_paused_upon_creation=True,
    )
"""
CHAIN_OF_DAGS = ("events", "sessions", "report")
ON_AZURE = f"az://{BUCKET}/airflow"
AZURE, KEY = "spark.hadoop.fs.azure.account.key.store.dfs.core.windows.net", "bm90LWEtcmVhbC1rZXk="
# Pipelines whose input is corrected, and the number of their hours.
CORRECTED, HOURS = ("c_lookup", "c_folder", corrections.FIRST_OF_CHAIN, "c_chained"), 2


@contextmanager
def shared_airflow(
    data: Path, connect: SparkConnectServer, *, pager: str, catalog: str, azurite: str | None
) -> Iterator[AirflowServer]:
    """Run an Airflow whose DAGs are the repository's and the tests' own.

    Args:
        data: Folder of inputs, DAGs, state and logs.
        connect: The Spark Connect server of its drivers.
        pager: URL of who is called.
        catalog: URL of the server that takes lineage events.
        azurite: Connection string of the server that stands in for Azure; None: there is none.
    """
    dags = data / "dags"
    dags.mkdir()
    write_alarms(dags, data / "plugins")
    (dags / "aircraft.py").symlink_to(ROOT / "dags" / "aircraft.py")
    (dags / "range.py").write_text(RANGE.replace("@AZURE@", AZURE).replace("@KEY@", KEY))
    (dags / "chain.py").write_text(CHAIN)
    (dags / "chained.py").write_text(CHAINED)
    (data / "landed").mkdir()
    (dags / "tally.py").symlink_to(ROOT / "tests" / "support" / "tally_dags.py")
    (dags / "told.py").write_text(told_dags.DAGS)
    (data / "plugins" / "told_pipeline.py").write_text(told_dags.PIPELINE)
    corrected = corrections.write_pipelines(data / "corrected", CORRECTED, HOURS)
    (dags / "corrected.py").symlink_to(data / "corrected" / "dags" / "corrected.py")
    env = {
        **pipeline_env(data, data / "flights", connect),
        **corrected,
        **told_dags.settings_of_the_page(catalog),
        "CAIRN_TALLY": str(data / "tally"),
        "PAGER_URL": pager,
        "CAIRN_TALLY_AZURE": ON_AZURE if azurite else "",
        "AIRFLOW_CONN_AZURITE": json.dumps({"conn_type": "wasb", "extra": {"connection_string": azurite}}),
        VARIABLE: "",
        # The scheduler's loop would take a tenth of a core for as long as the tests run.
        "AIRFLOW__SCHEDULER__SCHEDULER_IDLE_SLEEP_TIME": "0.5",
        "PYTHONPATH": python_path(ROOT, ROOT / "plugins", data / "plugins", data / "corrected" / "modules"),
    }
    own = "killed aircraft_restore aircraft_range tally tally_deleted tally_shown tally_whole tally_halves tally_alarms created_0"
    dag_ids = [DAG, *own.split(), *CHAIN_OF_DAGS, *CORRECTED, "told", "reader", *(["tally_azure"] if azurite else [])]
    with airflow_on_postgres(data, env, dags=dag_ids) as server:
        yield server


def day(number: int) -> str:
    return (FIRST_DAY + timedelta(days=number - 1)).isoformat()


def log_of(data: Path) -> Log:
    return read_log(open_storage(join_url(f"file://{data}/state", DAG)))


def drivers(airflow: AirflowServer) -> list[int]:
    return [driver.pid for driver in running_drivers(airflow.processes)]


def run_of(airflow: AirflowServer, number: int) -> str:
    start = datetime.fromisoformat(day(number))
    for run in airflow.client.dag_runs(DAG):
        if run["logical_date"] and datetime.fromisoformat(run["logical_date"]) == start:
            run_id: str = run["dag_run_id"]
            return run_id
    raise AssertionError(f"no run for day {number}")


def printed_commands(text: str) -> list[str]:
    """The commands of a log, each a line of its own."""
    return [line for line in text.splitlines() if line.startswith(("airflow ", "cairn backfill ", "cairn heal "))]


def run_as_printed(airflow: AirflowServer, command: str) -> str:
    """Runs a line in a shell, with what ``make ui`` says that a terminal needs: AIRFLOW_HOME, Airflow's address, and .venv/bin on the
    PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**airflow.env, "PATH": path, "CAIRN_AIRFLOW": airflow.client.url}
    done = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def states(airflow: AirflowServer, run_id: str, dag_id: str = DAG) -> dict[str, str]:
    return {task["task_id"]: task["state"] for task in airflow.client.task_instances(dag_id, run_id)}
