"""Lineage events of a real Airflow, with the settings and the code of docs/airflow.md. They reach a server on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import deltalake
import pytest

from tests.support.local_stack import AirflowServer
from tests.support.openlineage_schemas import check_event
from tests.support.tally import Tally
from tests.support.waiting import wait_until

pytestmark = pytest.mark.airflow


@pytest.fixture(scope="module")
def told(airflow: AirflowServer, data: Path) -> Tally:
    return Tally(airflow.client, data / "tally", "told")


@pytest.fixture(scope="module")
def events(told: Tally, catalog: tuple[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What two days have told the catalog."""
    for n in (1, 2):
        told.input(n, {"a": n, "b": 10 * n})
    told.backfill(1, 2)
    assert told.wait([1, 2]) == {"success"}
    # A process of the worker sends a task's event after the task has ended.
    wait_until(lambda: len(ended(catalog[1])) >= 2, 120, "both commits are told")
    return catalog[1]


def ended(sent: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events of committed checkpoints."""
    return [one for one in list(sent) if one["job"]["name"] == "told.checkpoint" and one["eventType"] == "COMPLETE"]


def test_a_commit_is_an_event_with_datasets_and_checkpoint(told: Tally, events: list[dict[str, Any]]) -> None:
    tally, commits = told.base, ended(events)
    assert len(commits) == 2 and {one["job"]["namespace"] for one in events} == {"production"}
    for event, record in zip(commits, told.log().completed(), strict=True):
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
    for event in events:
        check_event(event, {})


def test_start_events_of_the_process_task_have_no_datasets(events: list[dict[str, Any]]) -> None:
    started = [one for one in events if one["job"]["name"] == "told.process" and one["eventType"] == "START"]
    # A task that has deferred starts twice.
    assert len(started) >= 2 and all(one["inputs"] == one["outputs"] == [] for one in started)


@pytest.mark.usefixtures("events")
def test_the_table_is_an_asset_that_starts_a_dag(airflow: AirflowServer, told: Tally) -> None:
    sent = airflow.client.call("GET", "/api/v2/assets/events?source_dag_id=told")["asset_events"]
    found = sorted((one["uri"].rstrip("/"), one["extra"]["checkpoint"], one["extra"]["rows"]) for one in sent)
    table = f"file://{told.base}/table"
    assert found == [("cairn://told", 1, 2), ("cairn://told", 2, 2), (table, 1, 2), (table, 2, 2)]
    runs = [run["dag_run_id"] for run in airflow.client.dag_runs("reader")]
    assert runs and set(airflow.client.wait_for_runs("reader", runs, timeout_s=60).values()) == {"success"}
