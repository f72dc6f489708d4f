"""A pipeline for the pages' tests that a real scheduler runs, with the driver that starts no Spark. An Airflow DAG file.

Two DAGs wait for the pipeline's asset, one of them through the other's asset.
"""

import os
import time
from datetime import timedelta

from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import DAG, Asset, task

from cairn_operators import stateful_pipeline
from tests.support.checkpoints import START

tolls = stateful_pipeline(
    "tolls",
    "unused:TALLY",
    f"file://{os.environ['CAIRN_SHOWN']}",
    schedule="@daily",
    start_date=START,
    end_date=START + timedelta(days=4),
    process={"retries": 1, "retry_delay": timedelta(seconds=1)},
    checkpoint={"retries": 0},
)
tolls.get_task("process").driver_module = "tests.support.tally_driver"


@task(task_id="validate", dag=tolls)
def _validate() -> None:
    time.sleep(1)


tolls.get_task("checkpoint") >> _validate()

with DAG("report", schedule=[Asset("cairn://tolls")], start_date=START):
    EmptyOperator(task_id="write", outlets=[Asset("file:///reports/tolls")])
with DAG("mail", schedule=[Asset("file:///reports/tolls")], start_date=START):
    EmptyOperator(task_id="send")
