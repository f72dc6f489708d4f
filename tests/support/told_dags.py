"""A pipeline whose commits are lineage events, by the settings and the code of docs/airflow.md."""

from __future__ import annotations

import configparser
import re

from tests.support.layout import REPOSITORY

PAGE = (REPOSITORY / "docs" / "airflow.md").read_text().split("\n## Lineage\n")[1].split("\n## ")[0]
# The pipeline of the tally's driver, with a sink. Its rows come from the driver, so source and processor are never called.
PIPELINE = """
import os
from datetime import UTC, datetime
from cairn import Pipeline, sinks
from cairn.aggregates import Count, RunningAggregate

class Nothing(RunningAggregate):
    n = Count()

TOLD = Pipeline(
    name="told", start=datetime(2024, 1, 1, tzinfo=UTC), source=lambda spark, interval: None, key=["key"],
    api="arrow", processor=Nothing, sink=sinks.delta(f"file://{os.environ['CAIRN_TALLY']}/table"),
)
"""
DAGS = """
# An Airflow DAG.
import os
from datetime import timedelta
from airflow.sdk import DAG, Asset
from cairn_operators.airflow_versions import CronDataIntervalTimetable
from airflow.providers.standard.operators.empty import EmptyOperator
from cairn_operators import stateful_pipeline
from airflow.providers.openlineage.utils.selective_enable import enable_lineage
from tests.support.checkpoints import START

tally = f"file://{os.environ['CAIRN_TALLY']}"
table = Asset(f"{tally}/table")
# Its end has passed, so that the scheduler makes no run of its own.
told = stateful_pipeline(
    "told", code="unused:TALLY", root=f"{tally}/state", start_date=START, end_date=START + timedelta(days=3),
    schedule=CronDataIntervalTimetable("0 0 * * *", timezone="UTC"), checkpoint={"outlets": [table]},
)
told.get_task("process").driver_module = "tests.support.tally_driver"
told.get_task("checkpoint").sink_of = "told_pipeline:TOLD"
enable_lineage(told)
with DAG("reader", schedule=table, is_paused_upon_creation=False):
    EmptyOperator(task_id="read", inlets=[table])
"""


def settings_of_the_page(url: str) -> dict[str, str]:
    """The section of airflow.cfg that the page shows, as environment variables, with the address of this catalog."""
    (block,) = re.findall(r"```ini\n(.*?)```", PAGE, re.DOTALL)
    assert block.count("http://marquez.example.com:5000") == 1
    parser = configparser.ConfigParser(interpolation=None)
    parser.read_string(block.replace("http://marquez.example.com:5000", url))
    # The DAGs of other tests send nothing.
    settings = {**parser["openlineage"], "selective_enable": "True"}
    return {f"AIRFLOW__OPENLINEAGE__{name.upper()}": value for name, value in settings.items()}
