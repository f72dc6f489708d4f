"""What a sink finds in a table that others have changed, whose table it is, and what can't go into it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import deltalake
import psycopg
import pyarrow as pa
import pytest
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from typer.testing import CliRunner

from cairn import sinks
from cairn.command.cli import app
from cairn.errors import SinkFailed, StateUnusable, UsageError
from cairn.sinks.table_sink import TableSink, must_store_owner
from cairn.testing import PipelineTester
from tests.support.clicks_pipeline import ANYTHING, Rows, by_interval, catalog, current, expected, pipeline, run_of
from tests.support.clicks_table import HOUR, OWNER, SCHEMA, clicks, hour, run_hours
from tests.support.coordinator import coordinator_of
from tests.support.sink_calls import SECONDS


@pytest.mark.long("half a second", runs_in="ci")
def test_check_names_planted_differences_and_rebuild_repairs_them(
    kind: str,
    sink: TableSink,
    read: Callable[[], Rows],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    tester = run_of(sink, tmp_path)
    for rows in ([("ann",), ("bob",)], [("ann",)], [], [("cid",)]):
        tester.run(rows)
    monkeypatch.setattr("cairn.command.publish.load_code", lambda code: pipeline(sink))
    variables = {"CAIRN_ROOT": tester.root, "CAIRN_PIPELINE": "clicks", "CAIRN_CODE": "clicks:CLICKS"}

    def typed(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["publish", *words], env=variables)
        return done.exit_code, done.output

    code, text = typed("--check")
    assert (code, text.strip()) == (0, f"{sink!r} is equal to the output of 4 interval(s)")
    plant(kind, tmp_path, request)
    code, text = typed("--check")
    assert code == 1
    assert text.splitlines()[1:] == [
        "[2024-01-01T00:00:00Z, 2024-01-01T01:00:00Z): 2 rows in the output, 1 in the table",
        "[2024-01-01T01:00:00Z, 2024-01-01T02:00:00Z): 1 rows in both, but with other values",
        "[2024-01-01T07:00:00Z, 2024-01-01T08:00:00Z): the table has 1 rows of an interval without output",
    ]
    code, text = typed("--rebuild")
    asked = f"UsageError: {sink!r} has 4 rows, 1 more than the output of 'clicks'; the command would delete all"
    assert (code, text.splitlines()) == (2, [asked, "Nothing was done. To agree, run the same command with --yes"])
    assert typed("--check", "--json")[0] == 1
    code, text = typed("--rebuild", "--yes")
    assert (code, text.strip()) == (0, f"{sink!r} has the output of 4 interval(s)")
    assert read() == expected(tester)
    assert typed("--check")[0] == 0
    tester.run([("ann",)], hour(0), permissions=ANYTHING)
    assert read() == expected(tester)
    assert typed("--check", "--rebuild")[0] == 2


@pytest.mark.parametrize(
    ("stored", "stores", "takes_over"),
    [
        ("clicks@here", False, False),
        ("clicks", True, True),  # A release before stored the name only.
        ("clicks@there", None, True),
        ("others@here", None, None),
        ("others", None, None),
        ("clicks/late@here", None, None),
    ],
)
def test_table_of_another_pipeline_refuses_writes(stored: str, stores: bool | None, takes_over: bool | None) -> None:
    """None: the table refuses the writer."""
    for wanted, agreed in ((stores, False), (takes_over, True)):
        if wanted is None:
            with pytest.raises(UsageError, match=r"has the output of pipeline (?s:.*)Give (each|the) pipeline"):
                must_store_owner(stored, OWNER, "t", takes_over=agreed)
        else:
            assert must_store_owner(stored, OWNER, "t", takes_over=agreed) == wanted


def test_a_table_belongs_to_a_pipeline_and_its_root(
    sink: TableSink, read: Callable[[], Rows], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipeline of the same name in development leaves production's table alone, unless somebody agrees that it takes it over."""
    production = run_of(sink, tmp_path)
    production.run([("ann",)])
    production.run([("ann",)])
    development = run_of(sink, tmp_path / "development")
    for again in (False, True):
        with pytest.raises(SinkFailed, match="'clicks' in another root, so 'clicks' in this root can't write it"):
            development.run([("dev",)], hour(0) if again else None, permissions=ANYTHING)
        assert read() == expected(production) != []
    # A moved folder is the same root.
    shutil.move(tmp_path / "state", tmp_path / "moved")
    moved = PipelineTester(
        pipeline(sink), input_schema=SCHEMA, every=HOUR, root=f"file://{tmp_path}/moved", call_sink=True
    )
    moved.run([("bob",)])
    assert read() == expected(moved)
    monkeypatch.setattr("cairn.command.publish.load_code", lambda code: pipeline(sink))
    variables = {"CAIRN_ROOT": development.root, "CAIRN_PIPELINE": "clicks", "CAIRN_CODE": "clicks:CLICKS"}
    refused = CliRunner().invoke(app, ["publish", "--rebuild"], env=variables)
    assert refused.exit_code == 2 and read() == expected(moved), refused.output
    (tmp_path / "wrong" / "clicks").mkdir(parents=True)
    (tmp_path / "wrong" / "clicks" / "note").touch()
    wrong = CliRunner().invoke(
        app, ["publish", "--rebuild", "--yes"], env=variables | {"CAIRN_ROOT": f"file://{tmp_path}/wrong"}
    )
    assert wrong.exit_code == 2 and "has no checkpoint, so the command does not empty the table" in wrong.output
    taken = CliRunner().invoke(app, ["publish", "--rebuild", "--yes"], env=variables)
    assert taken.exit_code == 0 and read() == expected(development) != [], taken.output
    with pytest.raises(SinkFailed, match="in another root"):
        moved.run([("bob",)])
    assert (read(), coordinator_of(development.pipeline, development.root).unpublished()) == (expected(development), [])


def test_a_name_that_is_too_long_is_refused_before_the_interval(kind: str, sink: TableSink, tmp_path: Path) -> None:
    """PostgreSQL would cut the name off: two tables would become one."""
    for name in ("t" * 64, "ж" * 32, f"{'s' * 64}.t"):
        with pytest.raises(UsageError, match=r"has 64 bytes, and PostgreSQL keeps 63\nGive the sink a shorter name"):
            sinks.postgres(name)
    sinks.postgres(f"{'s' * 63}.{'t' * 63}")
    with pytest.raises(UsageError, match=r"has 979 bytes, and a sink of BigQuery keeps 978"):
        sinks.bigquery(f"shop.{'t' * 979}")
    longest = {"postgres": ("ж" * 31 + "x", 64, 63), "bigquery": ("ж" * 300, 301, 300)}.get(kind, ("ж" * 100, 0, 0))
    name, refused, kept = longest
    tester = PipelineTester(
        pipeline(sink, output_schema=f"user string, `{name}` bigint", processor=partial(Named, name)),
        input_schema=SCHEMA,
        every=HOUR,
        root=f"file://{tmp_path}/state",
        call_sink=True,
    )
    for _ in range(2):
        tester.run([("ann",)])
    assert sink.row_counts() == {hour(0): 1, hour(1): 1}
    assert sink.check(current(tester)) == []
    if refused:
        longer = replace(tester.pipeline, output_schema=f"user string, `{name}` bigint, `{name}y` bigint")
        tester.pipeline = longer
        with pytest.raises(UsageError, match=rf"the column '{name}y' has {refused} \w+, and \w+ keeps {kept}\nRename"):
            tester.run([("ann",)])
        assert coordinator_of(longer, tester.root).log().head_id == 2


def test_an_output_of_another_type_is_refused_before_the_sink(tmp_path: Path) -> None:
    sink = sinks.delta(f"file://{tmp_path}/table")
    tester = run_of(sink, tmp_path)
    tester.run([("ann",)])
    tester.pipeline = pipeline(sink, output_schema="user string, clicks string")
    with pytest.raises(UsageError, match=r"the new output_schema does not fit the output of .*: field 'clicks'"):
        tester.run([("ann",)])
    with pytest.raises(StateUnusable, match="no checkpoint ends where the interval starts"):
        tester.run([("ann",)], hour(2))
    assert sink.row_counts() == {hour(0): 1}
    assert sink.check(current(tester)) == []


class Named(StatefulProcessor):  # type: ignore[misc]
    def __init__(self, name: str) -> None:
        self._name = name

    def init(self, handle: Any) -> None:
        pass

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        yield Row(**{"user": key[0], self._name: 1})


@SECONDS
@pytest.mark.parametrize(
    ("kind", "change"),
    # deltalake renames no column, and Iceberg makes no number a text.
    [(kind, change) for kind in ("bigquery", "postgres") for change in ("renamed", "text", "no interval")]
    + [("iceberg", "renamed"), ("iceberg", "no interval")],
)
def test_check_reports_columns_that_somebody_else_changed(
    change: str, kind: str, sink: TableSink, read: Callable[[], Rows], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    tester = run_of(sink, tmp_path)
    tester.run([("ann",)])
    change_column(kind, change, tmp_path, request)
    (found,) = sink.check(current(tester))
    says = {"renamed": "the table lacks 'clicks'", "no interval": "1 rows in the output, 0 in the table"}
    assert str(found) == f"{hour(0)}: {says.get(change, '1 rows in both, but with other values')}"
    assert sink.row_counts() == ({None: 1} if change == "no interval" else {hour(0): 1})
    if change != "text":  # The next output gets the column again.
        tester.run([("bob",)])
        assert sink.row_counts()[hour(1)] == 1


def change_column(kind: str, change: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Another program changes the table's column `clicks`, or a column of the interval."""
    old, new = ("interval_end", "ends") if change == "no interval" else ("clicks", "count")
    if kind == "iceberg":
        with catalog(tmp_path) as opened, opened.load_table("shop.clicks").update_schema() as update:
            update.rename_column(old, new)
        return
    text = (
        "ALTER TABLE clicks ALTER COLUMN clicks TYPE text USING 'many'"
        if change == "text"
        else f"ALTER TABLE clicks RENAME {old} TO {new}"
    )
    if kind == "postgres":
        with psycopg.connect(request.getfixturevalue("server"), autocommit=True) as connection:
            connection.execute(text.encode())
        return
    server = request.getfixturevalue("stand_in")
    server.database.execute(text)
    (field,) = (field for field in server.tables["clicks"].fields if field["name"] == old)
    field |= {"type": "STRING"} if change == "text" else {"name": new}


@pytest.mark.long("a minute: 60 intervals in four processes")
def test_table_equals_the_output_of_four_concurrent_processes(
    kind: str, sink: TableSink, read: Callable[[], Rows], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """As with four active runs of Airflow: each process waits for the hour before, commits, and publishes all that waits."""
    address, root = "", f"file://{tmp_path}/state"
    if kind == "postgres":
        address = request.getfixturevalue("server")
    if kind == "bigquery":
        address = request.getfixturevalue("stand_in").url
    with ProcessPoolExecutor(4, mp_context=get_context("spawn")) as pool:
        shares = [range(first, 60, 4) for first in range(4)]
        for done in [pool.submit(run_hours, kind, tmp_path, address, root, share) for share in shares]:
            done.result()
    tester = PipelineTester(clicks(sink), input_schema=SCHEMA, every=HOUR, root=root)
    assert read() == expected(tester)
    assert sorted(by_interval(read())) == [hour(n) for n in range(60) if n % 7 != 3]
    assert sink.check(current(tester)) == []


def plant(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Lose a row, change a value, and add rows of an interval that has no output."""
    if kind == "bigquery":
        database = request.getfixturevalue("stand_in").database
        database.execute("DELETE FROM clicks WHERE \"user\" = 'bob'")
        database.execute("UPDATE clicks SET clicks = 7 WHERE interval_start = ?", [hour(1).start])
        database.execute("INSERT INTO clicks SELECT 'eve', 1, ?, ?", [hour(7).start, hour(7).end])
        return
    if kind == "iceberg":
        with catalog(tmp_path) as opened:
            iceberg_table = opened.load_table("shop.clicks")
            iceberg_table.delete("user = 'bob'")
            changed = iceberg_table.scan(f"interval_start = '{hour(1).start.isoformat()}'").to_arrow()
            changed = changed.set_column(changed.schema.get_field_index("clicks"), "clicks", pa.array([7]))
            iceberg_table.overwrite(changed, f"interval_start = '{hour(1).start.isoformat()}'")
            iceberg_table.append(extra_row())
        return
    if kind == "delta":
        table = deltalake.DeltaTable(f"file://{tmp_path}/table")
        table.delete("user = 'bob'")
        table.update({"clicks": "7"}, predicate="interval_start = '2024-01-01T01:00:00+00:00'")
        deltalake.write_deltalake(table, extra_row(), mode="append")
        return
    with psycopg.connect(request.getfixturevalue("server"), autocommit=True) as connection:
        connection.execute("DELETE FROM clicks WHERE \"user\" = 'bob'")
        connection.execute("UPDATE clicks SET clicks = 7 WHERE interval_start = %s", (hour(1).start,))
        values = ("eve", 1, hour(7).start, hour(7).end)
        connection.execute(
            'INSERT INTO clicks ("user", clicks, interval_start, interval_end) VALUES (%s, %s, %s, %s)', values
        )


def extra_row() -> pa.Table:
    instants = {"interval_start": [hour(7).start], "interval_end": [hour(7).end]}
    return pa.table(
        {"user": ["eve"], "clicks": [1], **{n: pa.array(v, pa.timestamp("us", "UTC")) for n, v in instants.items()}}
    )
