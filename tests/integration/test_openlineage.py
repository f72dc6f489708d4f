"""Lineage events of a real Airflow, with the settings and the code of docs/airflow.md. They reach a server on this machine."""

from __future__ import annotations

import configparser
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import deltalake
import pytest

from local_stack.owned_process import python_path
from tests.support.airflow_on_postgres import airflow_on_postgres
from tests.support.http_listener import http_listener
from tests.support.layout import REPOSITORY
from tests.support.local_stack import AirflowServer
from tests.support.openlineage_schemas import check_event
from tests.support.tally import Tally
from tests.support.waiting import wait_until

pytestmark = pytest.mark.airflow

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
with DAG("reader", schedule=table, is_paused_upon_creation=False):
    EmptyOperator(task_id="read", inlets=[table])
"""


@contextmanager
def catalog() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that takes lineage events: its URL, and the events in the order of their arrival."""
    events: list[dict[str, Any]] = []

    def take(path: str, body: bytes) -> int:
        if path != "/api/v1/lineage":
            return 404
        events.append(json.loads(body))
        return 201

    with http_listener(take) as port:
        yield f"http://127.0.0.1:{port}", events


def settings_of_the_page(url: str) -> dict[str, str]:
    """The section of airflow.cfg that the page shows, as environment variables, with the address of this catalog."""
    (block,) = re.findall(r"```ini\n(.*?)```", PAGE, re.DOTALL)
    assert block.count("http://marquez.example.com:5000") == 1
    parser = configparser.ConfigParser(interpolation=None)
    parser.read_string(block.replace("http://marquez.example.com:5000", url))
    return {f"AIRFLOW__OPENLINEAGE__{name.upper()}": value for name, value in parser["openlineage"].items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("openlineage")
    for name, text in (("dags/told.py", DAGS), ("modules/told_pipeline.py", PIPELINE)):
        (made / name).parent.mkdir()
        (made / name).write_text(text)
    return made


@pytest.fixture(scope="module")
def events(folder: Path) -> Iterator[tuple[AirflowServer, list[dict[str, Any]]]]:
    with catalog() as (url, events):
        env = {
            "AIRFLOW__CORE__DAGS_FOLDER": str(folder / "dags"),
            "CAIRN_TALLY": str(folder / "tally"),
            "PYTHONPATH": python_path(*(REPOSITORY / part for part in ("", "jobs", "plugins")), folder / "modules"),
            **settings_of_the_page(url),
        }
        with airflow_on_postgres(folder, env, dags=["told", "reader"]) as airflow:
            days = Tally(airflow.client, folder / "tally", "told")
            for n in (1, 2):
                days.input(n, {"a": n, "b": 10 * n})
            days.backfill(1, 2)
            assert days.wait([1, 2]) == {"success"}
            # A process of the worker sends a task's event after the task has ended.
            wait_until(lambda: len(ended(events)) >= 2, 120, "both commits are told")
            yield airflow, events


def ended(sent: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events of committed checkpoints."""
    return [one for one in list(sent) if one["job"]["name"] == "told.checkpoint" and one["eventType"] == "COMPLETE"]


def test_a_commit_is_an_event_with_datasets_and_checkpoint(
    folder: Path, events: tuple[AirflowServer, list[dict[str, Any]]]
) -> None:
    airflow, sent = events
    tally = folder / "tally"
    commits = ended(sent)
    assert len(commits) == 2 and {one["job"]["namespace"] for one in sent} == {"production"}
    records = Tally(airflow.client, tally, "told").log().completed()
    for event, record in zip(commits, records, strict=True):
        facet = event["run"]["facets"]["cairn_checkpoint"]
        url = facet["_schemaURL"].partition("#")[0]
        # Without a login, since a catalog has none.
        with urlopen(url) as answer:
            schemas = {url: json.load(answer)}
        facets = {"cairn_checkpoint", "dataSource", "outputStatistics", "schema", "version"}
        assert facets <= check_event(event, schemas)
        assert (facet["pipeline"], facet["checkpoint"], facet.get("baseCheckpoint")) == (
            "told",
            record.id,
            record.content.base_id,
        )
        assert (facet["attempt"], facet["stateDigest"]) == (record.content.attempt, f"{record.content.digest:016x}")
        assert [(one["namespace"], one["name"]) for one in event["inputs"]] == [("file", f"{tally}/told/input")]
        output, table = event["outputs"]
        assert (output["namespace"], output["name"]) == ("file", f"{tally}/state/told/output")
        assert (table["namespace"], table["name"]) == ("file", f"{tally}/table")
        columns = [(field["name"], field["type"]) for field in output["facets"]["schema"]["fields"]]
        assert columns == [("key", "string"), ("total", "long"), ("day", "string")]
        in_table = {field["name"] for field in table["facets"]["schema"]["fields"]}
        assert in_table == {field.name for field in deltalake.DeltaTable(f"file://{tally}/table").schema().fields}
        assert {one["outputFacets"]["outputStatistics"]["rowCount"] for one in event["outputs"]} == {2}
    for event in sent:
        check_event(event, {})


def test_other_tasks_have_events_without_datasets(
    folder: Path, events: tuple[AirflowServer, list[dict[str, Any]]]
) -> None:
    _, sent = events
    started = [one for one in sent if one["job"]["name"] == "told.process" and one["eventType"] == "START"]
    # A task that has deferred starts twice.
    assert len(started) >= 2 and all(one["inputs"] == one["outputs"] == [] for one in started)


def test_the_table_is_an_asset_that_starts_a_dag(
    folder: Path, events: tuple[AirflowServer, list[dict[str, Any]]]
) -> None:
    airflow, _ = events
    sent = airflow.client.call("GET", "/api/v2/assets/events?source_dag_id=told")["asset_events"]
    told = sorted((one["uri"].rstrip("/"), one["extra"]["checkpoint"], one["extra"]["rows"]) for one in sent)
    table = f"file://{folder}/tally/table"
    assert told == [("cairn://told", 1, 2), ("cairn://told", 2, 2), (table, 1, 2), (table, 2, 2)]
    runs = [run["dag_run_id"] for run in airflow.client.dag_runs("reader")]
    assert runs and set(airflow.client.wait_for_runs("reader", runs, timeout_s=60).values()) == {"success"}
