"""The PostgreSQL sink of docs/sinks.md, as it stands there, against a real PostgreSQL: what the page says of retries and re-runs."""

from __future__ import annotations

import importlib
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from typer.testing import CliRunner

import pipelines
from cairn import Interval, Pipeline, output_files
from cairn.command.cli import app
from cairn.errors import SinkFailed
from cairn.testing import PipelineTester
from state_backend.values.records import Permissions
from tests.support.layout import REPOSITORY
from tests.support.postgres_server import postgres_server

PAGE = (REPOSITORY / "docs" / "sinks.md").read_text()
SCHEMA = "user string"
START = datetime(2024, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with postgres_server() as address:
        yield address


@pytest.fixture
def database(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[psycopg.Connection[Any]]:
    (schema,) = blocks("sql")
    monkeypatch.setenv("CLICKS_DATABASE", server)
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS clicks, cairn_published")
        connection.execute(schema.encode())
        yield connection


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the page's module, which can be imported as `pipelines.clicks`; its name has a blank."""
    (code,) = blocks("python")
    made = tmp_path / "a folder"
    made.mkdir()
    (made / "clicks.py").write_text(code)
    monkeypatch.setattr(pipelines, "__path__", [*pipelines.__path__, str(made)])
    yield made
    sys.modules.pop("pipelines.clicks", None)


@pytest.fixture
def clicks(folder: Path) -> Pipeline:
    pipeline: Pipeline = importlib.import_module("pipelines.clicks").CLICKS
    return pipeline


def runner(pipeline: Pipeline, folder: Path, every: timedelta = HOUR) -> PipelineTester:
    root = f"file://{folder}/state"
    return PipelineTester(pipeline, input_schema=SCHEMA, every=every, root=root, call_sink=True)


def table(database: psycopg.Connection[Any]) -> list[tuple[Any, ...]]:
    found = database.execute("SELECT interval_start, user_name, clicks FROM clicks ORDER BY 1, 2").fetchall()
    return [((start - START) // HOUR, user, n) for start, user, n in found]


def published(database: psycopg.Connection[Any]) -> list[tuple[Any, ...]]:
    found = database.execute(
        "SELECT interval_start, checkpoint_id FROM cairn_published ORDER BY interval_start, interval_end"
    )
    return [((start - START) // HOUR, n) for start, n in found.fetchall()]


@pytest.mark.long("seconds", runs_in="ci")
def test_intervals_arrive_and_a_rerun_replaces_its_rows(
    clicks: Pipeline, folder: Path, database: psycopg.Connection[Any]
) -> None:
    tester = runner(clicks, folder)
    first = tester.run([("ann",), ("ann",), ("bob",)])
    tester.run([("ann",)])
    tester.run([])
    assert table(database) == [(0, "ann", 2), (0, "bob", 1), (1, "ann", 3)]
    assert published(database) == [(0, 1), (1, 2), (2, 3)]
    tester.run([("ann",)], first.interval)
    assert table(database) == [(0, "ann", 1), (1, "ann", 3)]
    assert published(database) == [(0, 4), (1, 2), (2, 3)]
    tester.run([], first.interval)
    assert table(database) == [(1, "ann", 3)]


@pytest.mark.long("half a second", runs_in="ci")
def test_publishing_the_same_or_an_older_checkpoint_again_changes_no_rows(
    clicks: Pipeline, folder: Path, database: psycopg.Connection[Any]
) -> None:
    sink: Any = clicks.sink
    tester = runner(clicks, folder)
    interval = tester.run([("ann",)]).interval
    old = output_files(tester.root, "clicks")
    kept = [shutil.copy(file, folder / f"old-{n}.parquet") for n, file in enumerate(old)]
    tester.run([("bob",), ("bob",)], interval)
    new = output_files(tester.root, "clicks")
    before = (table(database), published(database))
    assert before == ([(0, "bob", 2)], [(0, 2)])
    database.execute("UPDATE clicks SET clicks = 7")  # would be undone by a sink that writes again
    for files, checkpoint_id in ((new, 2), (kept, 1), ([], 1), ([], 2)):
        sink(None, [f"file://{file}" for file in files], interval, checkpoint_id)
        assert (table(database), published(database)) == ([(0, "bob", 7)], [(0, 2)])
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: sink(None, [f"file://{file}" for file in new], interval, 3), range(8)))
    assert (table(database), published(database)) == ([(0, "bob", 2)], [(0, 3)])


def test_an_error_in_the_middle_leaves_the_rows_as_they_were(
    clicks: Pipeline, folder: Path, database: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tester = runner(clicks, folder)
    interval = tester.run([("ann",)]).interval
    with pytest.raises(SinkFailed, match="NotNullViolation"):
        tester.run([("ann",), ("bob",), (None,)], interval)
    assert (table(database), published(database)) == ([(0, "ann", 1)], [(0, 1)])
    database.execute("ALTER TABLE clicks ALTER COLUMN user_name DROP NOT NULL")
    tester.run([])
    assert table(database) == [(0, "ann", 1), (0, "bob", 1), (0, None, 1)]
    assert published(database) == [(0, 2), (1, 3)]


def test_an_hour_that_replaces_a_day_deletes_the_rows_of_the_day(
    clicks: Pipeline, folder: Path, database: psycopg.Connection[Any]
) -> None:
    tester = runner(clicks, folder, every=timedelta(days=1))
    tester.run([("ann",), ("bob",)])
    tester.run([("ann",)], Interval(START, START + HOUR), permissions=Permissions(replace_overlapping=True))
    assert table(database) == [(0, "ann", 1)]
    assert published(database) == [(0, 2), (0, 2)]


@pytest.mark.long("half a second", runs_in="ci")
def test_documented_commands_publish_or_skip(clicks: Pipeline, folder: Path, database: psycopg.Connection[Any]) -> None:
    def broken(*call: Any) -> None:
        raise ConnectionError("no database")

    tester = runner(replace(clicks, sink=broken), folder)
    for _ in range(3):
        with pytest.raises(SinkFailed):
            tester.run([("ann",)])
    (block,) = blocks("console")
    export, *commands = [line.removeprefix("$ ").partition("  #")[0] for line in block.splitlines()]
    variables = dict(word.split("=") for word in shlex.split(export)[1:])
    assert variables == {"CAIRN_ROOT": "file:///data/state", "CAIRN_PIPELINE": "clicks"}

    def said(command: str) -> str:
        program, *words = shlex.split(command)
        done = CliRunner().invoke(app, words, env={**variables, "CAIRN_ROOT": tester.root})
        assert program == "cairn" and done.exit_code == 0, done.output
        return done.stdout

    every, retry, skip = commands
    assert every.strip() == "cairn publish --code pipelines.clicks:CLICKS"
    assert (
        said(skip) == "skipped:\n  [2024-01-01T01:00:00Z, 2024-01-01T02:00:00Z) (checkpoint 2)\n"
        and table(database) == []
    )
    assert said(retry) == "published:\n  [2024-01-01T00:00:00Z, 2024-01-01T01:00:00Z) (checkpoint 1)\n" and table(
        database
    ) == [(0, "ann", 1)]
    assert said(every) == "published:\n  [2024-01-01T02:00:00Z, 2024-01-01T03:00:00Z) (checkpoint 3)\n" and published(
        database
    ) == [(0, 1), (2, 3)]
    assert said(every) == "all output is published already\n"
