"""The hourly DAG of the pipeline of `clicks_table.py`; a test puts this file into Airflow's DAGs folder."""

import os
from datetime import timedelta

from airflow.sdk import CronDataIntervalTimetable

from cairn_operators import stateful_pipeline
from tests.support.clicks_table import CODE, START

RETRIES = {"retries": 3, "retry_delay": timedelta(seconds=1)}

dag = stateful_pipeline(
    "clicks",
    pipeline=CODE,
    pipeline_name="clicks",
    root=os.environ["CAIRN_ROOT"],
    schedule=CronDataIntervalTimetable("0 * * * *", timezone="UTC"),
    start_date=START,
    max_active_runs=4,
    process={"poll": timedelta(seconds=0.5), "start_patience": timedelta(seconds=30), **RETRIES},
    checkpoint=RETRIES,
)
dag.get_task("process").driver_module = "tests.support.clicks_table"
