"""The lineage event of the checkpoint task, as Airflow's OpenLineage provider asks for it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from airflow.providers.openlineage.extractors.base import DefaultExtractor
from jsonschema import ValidationError
from openlineage.client import OpenLineageClient
from openlineage.client.event_v2 import Job, Run, RunEvent, RunState
from openlineage.client.serde import Serde
from openlineage.client.transport import Config, Transport

from cairn_operators import CommitCheckpointOperator
from cairn_operators.lineage_datasets import inputs_of
from cairn_operators.lineage_event import PRODUCER, SCHEMA, lineage_of
from cairn_ui.render_template import STATIC
from state_backend.values import errors
from state_backend.values.inputs import Edge, InputPart, InputRead, Untracked
from state_backend.values.records import Record
from tests.support.checkpoints import day, record
from tests.support.layout import REPOSITORY
from tests.support.openlineage_schemas import SCHEMA as COLUMNS
from tests.support.openlineage_schemas import check_event, output
from tests.support.operator_calls import context, run

AIRFLOW = "http://localhost:8080"
FACET = {f"{AIRFLOW}{SCHEMA}": json.loads((STATIC / SCHEMA.rpartition("/")[2]).read_text())}
POSITION = {"orders": {"table": "s3://lake/orders", "version": 41}, "clicks": ["file:///landed/a.parquet"]}


def committed() -> Record:
    made = record(7, day(2), 6, source_position=POSITION, outputs=(output("a", 10, 2),))
    return replace(made, output_schemas=(COLUMNS,))


def run_event(lineage: Any) -> RunEvent:
    return RunEvent(
        eventType=RunState.COMPLETE,
        eventTime="2024-01-03T00:00:00+00:00",
        run=Run("01941f29-7c00-7aaa-8000-000000000000", lineage.run_facets),
        job=Job("namespace", "dag.checkpoint", lineage.job_facets),
        inputs=lineage.inputs,
        outputs=lineage.outputs,
        producer="https://example.com",
    )


def event_of(lineage: Any) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(Serde.to_json(run_event(lineage)))
    return made


def names(datasets: list[Any]) -> list[tuple[str, str]]:
    return [(one["namespace"], one["name"]) for one in datasets]


def test_the_event_fits_the_schemas_of_openlineage_and_of_the_facet() -> None:
    event = event_of(
        lineage_of(committed(), "s3://lake/state/counting", [("postgres://db:5432/shop/public/clicks", False)])
    )
    assert check_event(event, FACET) == {"cairn_checkpoint", "dataSource", "outputStatistics", "schema", "version"}
    assert names(event["inputs"]) == [("s3://lake", "orders"), ("file", "/landed")]
    assert event["inputs"][0]["facets"]["version"]["datasetVersion"] == "41"
    folder, table = event["outputs"]
    assert names([folder, table]) == [
        ("s3://lake", "state/counting/output"),
        ("postgres://db:5432", "shop.public.clicks"),
    ]
    assert [field["name"] for field in folder["facets"]["schema"]["fields"]] == ["user", "pages", "sums", "other"]
    statistics = folder["outputFacets"]["outputStatistics"]
    assert (statistics["rowCount"], statistics["size"], statistics["fileCount"]) == (2, 10, 1)
    facet = event["run"]["facets"]["cairn_checkpoint"]
    assert (facet["checkpoint"], facet["baseCheckpoint"], facet["attempt"]) == (7, 6, "a7")
    assert facet["_producer"] == PRODUCER and facet["_schemaURL"].startswith(f"{AIRFLOW}{SCHEMA}#")


def test_the_upstreams_of_a_chain_are_inputs_by_the_names_that_they_have_as_outputs() -> None:
    urls = ("s3://lake/state/sales", "gs://other/state/clicks", "/data/rates")
    parts = tuple(InputPart(span=day(n), intervals=1, last_id=n, rows=1, digest=1) for n in (1, 5))
    edges = (Edge(pipeline="sales"), Edge(pipeline="clicks", root="gs://other/state/"))
    reads = [InputRead(edge=e, span=day(2), log="x", head=9, parts=parts[n:]) for n, e in enumerate(edges)]
    more = {"untracked": (Untracked(pipeline="rates", root="/data"),), "source_position": {"url": urls[0]}}
    made = record(7, day(2), inputs=tuple(reads), **more)
    event = event_of(lineage_of(made, "s3://lake/state/report"))
    check_event(event, FACET)
    outputs = [names(event_of(lineage_of(record(5, day(2)), url))["outputs"])[0] for url in urls]
    assert names(event["inputs"]) == [*outputs, ("s3://lake", "state/sales")]
    assert [one["facets"].get("version", {}).get("datasetVersion") for one in event["inputs"][:3]] == [None, "5", None]


def test_the_first_checkpoint_has_no_base_and_the_facets_schema_knows_its_fields() -> None:
    event = event_of(lineage_of(record(1, day(1)), "s3://lake/state/counting"))
    facet = event["run"]["facets"]["cairn_checkpoint"]
    assert "cairn_checkpoint" in check_event(event, FACET) and "baseCheckpoint" not in facet
    described = next(iter(FACET.values()))["$defs"]["CairnCheckpointRunFacet"]["allOf"][1]["properties"]
    assert {*facet, "baseCheckpoint"} - {"_producer", "_schemaURL"} == {*described}
    for wrong in ({"checkpoint": "1"}, {"stateDigest": "ff"}, {"attempt": None}):
        broken = {**event, "run": {**event["run"], "facets": {"cairn_checkpoint": {**facet, **wrong}}}}
        with pytest.raises(ValidationError):
            check_event(broken, FACET)


@pytest.mark.skipif(
    find_spec("openlineage.client.dataset") is None, reason="this openlineage-python is older than the setting"
)
def test_the_documented_setting_merges_day_folders_into_one_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (REPOSITORY / "docs" / "airflow.md").read_text()
    ((name, value),) = re.findall(r"`(OPENLINEAGE__\w+)=(\w+)`", page)
    made = record(7, day(2), 6, source_position={"orders": [f"s3://lake/orders/2024-01-0{n}" for n in (1, 2)]})
    sent: list[Any] = []

    class Kept(Transport):
        kind = "kept"
        config_class = Config

        def emit(self, event: Any) -> None:
            sent.append(json.loads(Serde.to_json(event)))

    for value_or_none in (None, value):
        if value_or_none is not None:
            monkeypatch.setenv(name, value_or_none)
        client = OpenLineageClient(transport=Kept(), config={"transport": {"type": "console"}})
        client.emit(run_event(lineage_of(made, "memory://r")))
    assert names(sent[0]["inputs"]) == [("s3://lake", "orders/2024-01-01"), ("s3://lake", "orders/2024-01-02")]
    assert names(sent[1]["inputs"]) == [("s3://lake", "orders")]
    assert "subset" in check_event(sent[1], FACET)


def test_the_code_of_the_page_gives_the_datasets_and_the_asset_that_it_names() -> None:
    page = (REPOSITORY / "docs" / "airflow.md").read_text()
    scope: dict[str, Any] = {}
    for line in ("def read_orders(", '"outlets": [Asset('):
        (block,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if line in block)
        exec(compile(block, "airflow.md", "exec"), scope)
    _, position = scope["read_orders"](MagicMock(), day(1))
    found = [(one.namespace, one.name, one.version) for one in inputs_of(position)]
    assert found == [("s3://lake", "orders/2024-01-01", None), ("s3://lake", "rates", "41")]
    outlets = scope["dag"].get_task("checkpoint").outlets
    # Airflow stores `cairn://clicks` as `cairn://clicks/`.
    assert [asset.uri.rstrip("/") for asset in outlets] == ["cairn://clicks", "s3://warehouse/clicks"]


def task(
    monkeypatch: pytest.MonkeyPatch,
    *,
    table_url: Callable[[], str] = lambda: "s3://warehouse/clicks",
    commit: Callable[[], Record] = committed,
    sink_fails_for: int | None = None,
) -> CommitCheckpointOperator:
    """The task of a pipeline with a table sink, before its try; which commits as told."""

    def made(*_: Any) -> Any:
        record = commit()
        return SimpleNamespace(id=record.id, record=record, log=None)

    def publish(*_: Any, **__: Any) -> None:
        if sink_fails_for is not None:
            raise errors.SinkFailed("the sink failed", frozenset({sink_fails_for}))

    for name, stand_in in (
        ("commit_attempt.commit", made),
        ("publish_output.publish", publish),
        ("clean_up_dropped.try_clean_up", lambda *_: None),
    ):
        monkeypatch.setattr(f"state_backend.checkpoint.{name}", stand_in)
    late = SimpleNamespace(table_url=lambda: "s3://warehouse/late")
    sink = SimpleNamespace(each_table=lambda: [(SimpleNamespace(table_url=table_url), False), (late, True)])
    pipeline = SimpleNamespace(sink=sink, call_sink=lambda at, *_, **__: publish())
    monkeypatch.setitem(sys.modules, "some_pipelines", SimpleNamespace(MINE=pipeline))
    return CommitCheckpointOperator(
        task_id="c", pipeline="clicks", root="memory://r", attempt="a1", sink_of="some_pipelines:MINE"
    )


def lineage(operator: CommitCheckpointOperator, *, failed: bool = False) -> Any:
    """As the provider asks: through its extractor, which logs an exception and goes on without datasets."""
    extractor = DefaultExtractor(operator)
    return extractor.extract_on_failure(None) if failed else extractor.extract_on_complete(None)


def test_the_provider_gets_the_committed_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = task(monkeypatch)
    assert lineage(operator) is None
    run(operator)
    event = event_of(lineage(operator))
    assert names(event["inputs"]) == [("s3://lake", "orders"), ("file", "/landed")]
    assert names(event["outputs"]) == [
        ("s3://warehouse", "clicks"),
        ("s3://warehouse", "late"),
    ]  # The root is in memory, which has no name.
    assert event["run"]["facets"]["cairn_checkpoint"]["checkpoint"] == 7


def test_the_lineage_of_a_failed_try_has_only_committed_results(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> Record:
        raise errors.BaseMoved("the base is gone")

    nothing = task(monkeypatch, commit=lost)
    with pytest.raises(Exception, match="the base is gone"):
        run(nothing, context(task=SimpleNamespace(task_id="c", upstream_list=[], has_dag=lambda: False)))
    assert lineage(nothing, failed=True) is None

    without_table = task(monkeypatch, sink_fails_for=7)
    with pytest.raises(Exception, match="the sink failed"):
        run(without_table)
    event = event_of(lineage(without_table, failed=True))
    assert event["outputs"] == [] and event["run"]["facets"]["cairn_checkpoint"]["checkpoint"] == 7

    of_an_older_interval = task(monkeypatch, sink_fails_for=3)
    run(of_an_older_interval)
    tables = names(event_of(lineage(of_an_older_interval))["outputs"])
    assert tables == [("s3://warehouse", "clicks"), ("s3://warehouse", "late")]


def test_a_table_without_an_address_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def gone() -> str:
        raise OSError("the database does not answer")

    operator = task(monkeypatch, table_url=gone)
    run(operator, context())
    made = event_of(lineage(operator))
    assert names(made["outputs"]) == [("s3://warehouse", "late")] and len(made["inputs"]) == 2
    assert "the lineage event lacks a table of the sink: the database does not answer" in capsys.readouterr().out


@pytest.mark.long("seconds", runs_in="ci")
def test_operators_import_nothing_of_openlineage() -> None:
    """Cairn runs without the provider: only the provider's call imports the module that needs OpenLineage's client."""
    code = """
import sys
sys.modules["openlineage"] = None
from cairn_operators import CommitCheckpointOperator
operator = CommitCheckpointOperator(task_id="c", pipeline="p", root="file:///r", attempt="a")
assert operator.get_openlineage_facets_on_complete(None) is None
print("cairn_operators.lineage_event" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
