"""DAGs for tests of the order of things; the tests put this file into Airflow's DAGs folder."""

import os
from datetime import UTC, datetime, timedelta

from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import DAG

from cairn_operators import stateful_pipeline
from cairn_operators.airflow_versions import CronDataIntervalTimetable
from tests.support.checkpoints import START

ROOT = f"file://{os.environ['CAIRN_TALLY']}/state"
DRIVER = "tests.support.tally_driver"
DAILY = CronDataIntervalTimetable("0 0 * * *", timezone="UTC")
# Two looks per second: the tests would wait for every one.
WAITING = {"poll": timedelta(seconds=0.5), "start_patience": timedelta(seconds=30)}
RETRIES = {"retries": 3, "retry_delay": timedelta(seconds=1)}


def tally(name: str, **more: object) -> DAG:
    dag = stateful_pipeline(
        name,
        code="unused:TALLY",
        start_date=START,
        process={**WAITING, **RETRIES},
        checkpoint=RETRIES,
        **{"schedule": DAILY, "root": ROOT, **more},
    )
    dag.get_task("process").driver_module = DRIVER
    return dag


by_hand = tally("tally", max_active_runs=4)
# Its end has passed, so the scheduler makes no run of its own after the DAG has come back.
deleted = tally("tally_deleted", end_date=START + timedelta(days=3))
# Its page is read after each trouble.
shown = tally("tally_shown", end_date=START + timedelta(days=20), max_active_runs=4)
# One pipeline with two schedules: days, and halves of days.
whole = tally("tally_whole")
halves = tally(
    "tally_halves", schedule=CronDataIntervalTimetable("0 0,12 * * *", timezone="UTC"), pipeline="tally_whole"
)
# On a storage server, with the login of a connection; only where the tests have the server.
if root := os.environ.get("CAIRN_TALLY_AZURE"):
    on_azure = tally("tally_azure", root=root, storage_conn_id="azurite", max_active_runs=4)

# A real pipeline on Spark, whose first task is killed when its driver is done.
killed = stateful_pipeline(
    "killed",
    code="pipelines.aircraft:AIRCRAFT",
    pipeline="aircraft",
    root=f"{ROOT}/killed",
    schedule=DAILY,
    start_date=datetime(2013, 1, 1, tzinfo=UTC),
    end_date=datetime(2013, 1, 1, tzinfo=UTC),
    catchup=True,
    is_paused_upon_creation=True,
    process={**WAITING, **RETRIES},
)
killed.get_task("process").driver_module = "tests.support.killing_driver"

# For backfills in numbers: their tasks do nothing. Airflow runs one backfill per DAG, and sees its end up to half a minute late.
for number in range(20 if os.environ.get("CAIRN_TESTS") == "all" else 3):
    with DAG(f"created_{number}", schedule="0 * * * *", start_date=START, catchup=False, max_active_runs=16) as created:
        EmptyOperator(task_id="nothing")
