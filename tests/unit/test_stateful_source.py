"""Plans of Spark Connect that compare rows with each other or read other pipelines, without a server. tests/integration/test_sources_page.py has those of classic Spark."""

from __future__ import annotations

import json
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from pyspark.sql.connect import functions as F
from pyspark.sql.connect import proto
from pyspark.sql.connect.dataframe import DataFrame
from pyspark.sql.connect.plan import SQL, DataSource, Read
from pyspark.sql.connect.window import Window
from typer.testing import CliRunner

from cairn import Pipeline, output_files
from cairn.command.cli import app
from cairn.errors import UsageError
from cairn.operations.intervals import stateful_source
from cairn.operations.intervals.read_source import read_source
from cairn.operations.intervals.stateful_source import (
    DEDUPLICATE,
    RANGE_JOIN,
    TIME_WINDOW,
    WINDOW_FUNCTION,
    stateful_operations,
    warn_of_stateful_source,
)
from cairn.operations.intervals.untracked_reads import reads_below, untracked_in
from cairn.processors import Deduplicate
from state_backend.adapters.open_storage import open_storage
from state_backend.values.inputs import Edge, InputRead, Untracked
from tests.support.bare_pipeline import bare_pipeline
from tests.support.checkpoints import Folder, day
from tests.support.counting import DAYS
from tests.support.stateful_plans import stateful_frames
from tests.support.trials import read as read_rows

SESSION: Any = SimpleNamespace(client=SimpleNamespace(), session_id="one")


def frame(plan: Any) -> DataFrame:
    return DataFrame(plan, SESSION)


FRAMES = stateful_frames(frame(Read("events")), frame(Read("others")), F, Window, lambda text: frame(SQL(text)))


@pytest.mark.parametrize("name", FRAMES)
def test_stateful_operations_are_found_in_a_plan_of_connect(name: str) -> None:
    rows, expected = FRAMES[name]
    assert stateful_operations(rows) == expected


def pipeline(**settings: Any) -> Pipeline:
    once = type("Once", (Deduplicate,), {"horizon": None})
    return bare_pipeline(once, name="orders", key=["user"], api="arrow", **settings)


@pytest.fixture(autouse=True)
def nothing_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stateful_source, "_warned", set())


def test_a_stateful_source_is_warned_about_once_per_process(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        warn_of_stateful_source(pipeline(), FRAMES["dropDuplicates"][0])
    (warning,) = caplog.messages
    assert warning.startswith(f"pipeline 'orders': the source has {DEDUPLICATE}. In a source")
    assert warning.endswith("set Pipeline(stateful_source='allow')")


def test_every_stateful_operation_of_a_source_is_listed() -> None:
    both = FRAMES["window function"][0].groupBy(F.window("at", "1 hour")).count()
    assert stateful_operations(both) == [WINDOW_FUNCTION, TIME_WINDOW]
    assert stateful_operations(frame(SQL("select distinct a from x join y on x.at < y.at"))) == [
        DEDUPLICATE,
        RANGE_JOIN,
    ]


def test_no_warning_is_logged_if_a_stateful_source_is_allowed(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_stateful_source(pipeline(stateful_source="allow"), FRAMES["dropDuplicates"][0])
    warn_of_stateful_source(pipeline(), object())  # Its plan can't be read.
    assert caplog.messages == []
    with pytest.raises(UsageError, match="stateful_source='never' is not one of warn, allow"):
        pipeline(stateful_source="never")


SALES, SPAN = Untracked(pipeline="sales", root="file:///r"), {"root": "file:///r/", "pipeline": "sales"}
QUERIES: tuple[tuple[str, list[str], dict[str, str], bool], ...] = (
    ("keyed_output", [], SPAN | {"start": "2024-01-01"}, True),
    ("keyed_state", [], {"Root": "file:///r", "Pipeline": "sales", "checkpoint": "2024-01-02T00:00:00Z"}, True),
    ("keyed_state", ["file:///r/sales"], {"state": "total"}, True),
    ("Keyed_State", [], {"checkpoint": "file:///r/sales", "state": "total"}, True),
    ("keyed_output", [], SPAN | {"checkpoints": ""}, False),
    ("keyed_state", [], SPAN | {"checkpoint": "7"}, False),
    ("parquet", ["file:///r/sales"], {}, False),
)


def test_untracked_reads_of_pipelines_are_found_in_a_spark_connect_plan() -> None:
    others = frame(DataSource("keyed_output", options={"root": "s3://b", "pipeline": "prices"}))
    for source, paths, options, noticed in QUERIES:
        rows = frame(DataSource(source, paths=paths, options=options))
        assert untracked_in(rows) == ({SALES} if noticed else set()), (source, options)
        assert len(untracked_in(rows.join(others, "k").filter("n > 1"))) == 1 + noticed
        assert reads_below(rows, "file:///r/sales") and not reads_below(rows, "file:///r/prices")
    deep = proto.Relation()
    reduce(lambda relation, _: relation.project.input, range(600), deep).read.data_source.format = "keyed_output"
    with mock.patch("cairn.operations.intervals.untracked_reads.connect_plan", lambda _: deep):
        assert untracked_in(others)


def test_an_untracked_read_through_output_files_is_recorded_and_shown_in_status(tmp_path: Path) -> None:
    root = f"file://{tmp_path}"
    Folder(open_storage(f"{root}/sales"), days=1)
    DAYS[day(1).start] = []
    source = bare_pipeline(source=lambda spark, interval: (output_files(root, "sales"), read_rows(spark, interval))[1])
    read = read_source(SESSION, source, day(1), root)
    assert read.untracked == (Untracked(pipeline="sales", root=root),)
    chosen = InputRead(edge=Edge(pipeline="prices", tracked=False), span=day(1), log="x", head=1, parts=())
    Folder(open_storage(f"{root}/report")).run(day(1), "a", untracked=read.untracked, inputs=(chosen,))

    def said(*arguments: str) -> str:
        return CliRunner().invoke(app, [*arguments, "--root", root]).stdout

    text, shown = (said("status", "--pipeline", "report", *more) for more in ([], ["--json"]))
    assert f"sales below {root}: not tracked" in text and "prices (output): not tracked by choice" in text
    reads = json.loads(shown)["not_tracked"]
    names = [(one["pipeline"], one["tracked"]) for one in reads]
    assert names == [("prices", "not tracked by choice"), ("sales", "not tracked")]
    assert f"sales below {root}: not tracked" in said("checkpoints", "1", "--pipeline", "report")
    (line,) = [one for one in json.loads(said("status", "--json")) if one["name"] == "report"]
    assert line["not_tracked"] == reads and "1 not tracked" in line["problems"]
