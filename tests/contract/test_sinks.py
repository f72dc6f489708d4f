"""Every sink of `cairn.sinks` against a real table: after any history the table has the rows of `output_files`."""

from __future__ import annotations

import os
import random
import re
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from functools import partial
from importlib import import_module
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import deltalake
import duckdb
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from psycopg.conninfo import make_conninfo
from pyiceberg import exceptions
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.schema import Schema
from pyiceberg.types import IntegerType, NestedField, StringType, TimestamptzType
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from typer.testing import CliRunner

from cairn import Interval, Pipeline, sinks
from cairn.command.cli import app
from cairn.errors import SinkFailed, StateUnusable, UsageError
from cairn.sinks.postgres import wider_type
from cairn.sinks.table_sink import (
    Owner,
    Publication,
    TableSink,
    hash_of_rows,
    must_store_owner,
    owner_of,
    published_output,
    with_type,
)
from cairn.testing import PipelineTester
from state_backend.adapters.open_storage import open_storage
from state_backend.checkpoint.log import read_log
from state_backend.checkpoint.rewind import rewind
from state_backend.values.records import OutputFile, Permissions, RunRef
from tests.support.bigquery_server import BigQueryServer, bigquery_server
from tests.support.clicks_table import (
    HOUR,
    OWNER,
    SCHEMA,
    START,
    Killed,
    clicks,
    die_at,
    hour,
    iceberg_properties,
    publish,
    run_hours,
    sink_of,
)
from tests.support.coordinator import Coordinator, coordinator_of
from tests.support.s3_server import BUCKET, SEAWEEDFS, s3_server
from tests.support.sink_calls import CALLS, SECONDS
from tests.support.tiers import ALL, REPOSITORY, at_tier

LATE = Owner("clicks/late", "here")
ANYTHING = Permissions(allow_stale_base=True, allow_gap=True, replace_overlapping=True)


class Clicks(StatefulProcessor):  # type: ignore[misc]
    def init(self, handle: Any) -> None:
        self._count = handle.getValueState("count", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        n = (self._count.get() or (0,))[0] + sum(1 for _ in rows)
        self._count.update((n,))
        yield Row(user=key[0], clicks=n)


def pipeline(sink: Any, **changes: Any) -> Pipeline:
    declared = Pipeline(
        name="clicks",
        start=START,
        source=lambda spark, interval: None,
        key=["user"],
        processor=Clicks,
        output_schema="user string, clicks bigint",
        sink=sink,
    )
    return replace(declared, **changes)


@pytest.fixture(scope="module")
def stand_in() -> Iterator[BigQueryServer]:
    """A server that answers like BigQuery."""
    with bigquery_server() as server:
        yield server


Rows = list[tuple[Any, ...]]


@pytest.fixture(params=["delta", *(pytest.param(kind, marks=SECONDS) for kind in ("bigquery", "iceberg", "postgres"))])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def sink(kind: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> TableSink:
    address = ""
    if kind == "bigquery":
        stand_in = request.getfixturevalue("stand_in")
        stand_in.forget()
        monkeypatch.setattr(import_module("cairn.sinks.bigquery"), "_WAIT_S", 0.05)
        address = stand_in.url
    if kind == "iceberg":
        return iceberg(tmp_path)
    if kind == "postgres":
        address = request.getfixturevalue("server")
        with psycopg.connect(address, autocommit=True) as connection:
            connection.execute("DROP TABLE IF EXISTS clicks, cairn_publications")
    return sink_of(kind, tmp_path, address)


def iceberg(tmp_path: Path) -> TableSink:
    with catalog(tmp_path) as opened:
        opened.create_namespace_if_not_exists("shop")
    return sink_of("iceberg", tmp_path, "")


def catalog(tmp_path: Path) -> Catalog:
    return load_catalog("tests", **iceberg_properties(tmp_path))


@pytest.fixture
def read(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[], Rows]:
    """Reads the table without the sink: interval and output columns of all rows, sorted."""
    columns = ["interval_start", "interval_end", "user", "clicks"]
    if kind == "bigquery":
        stand_in = request.getfixturevalue("stand_in")
        return lambda: stand_in.rows("clicks", columns)
    if kind == "delta":

        def read_delta() -> Rows:
            if not (tmp_path / "table").exists():
                return []
            found = deltalake.DeltaTable(f"file://{tmp_path}/table").to_pyarrow_table()
            if "user" not in found.column_names:
                assert len(found) == 0
                return []
            found = found.select(columns)
            return sorted(tuple(row.values()) for row in found.to_pylist())

        return read_delta
    if kind == "iceberg":

        def read_iceberg() -> Rows:
            with catalog(tmp_path) as opened:
                table = opened.load_table("shop.clicks") if opened.table_exists("shop.clicks") else None
                if table is None or table.current_snapshot() is None:
                    return []
                found = table.scan().to_arrow()
            if "user" not in found.column_names:
                assert len(found) == 0
                return []
            return duckdb.sql(
                "SET TimeZone = 'UTC'; SELECT interval_start, interval_end, user, clicks FROM found ORDER BY ALL"
            ).fetchall()

        return read_iceberg
    address = request.getfixturevalue("server")

    def read_postgres() -> Rows:
        with psycopg.connect(address, options="-c timezone=UTC") as connection:
            if connection.execute("SELECT to_regclass('clicks')").fetchone() == (None,):
                return []
            names = ", ".join(f'"{name}"' for name in columns)
            return sorted(connection.execute(f"SELECT {names} FROM clicks".encode()).fetchall())

    return read_postgres


def expected(tester: PipelineTester) -> Rows:
    """The rows of the current output."""
    found = []
    for interval, (_, files) in read_log(open_storage(f"{tester.root}/clicks")).current_outputs().items():
        for file in files:
            if file.late:
                continue
            table = pq.read_table(output_path(tester, file))
            found += [(interval.start, interval.end, row["user"], row["clicks"]) for row in table.to_pylist()]
    return sorted(found)


def run_of(sink: Any, tmp_path: Path) -> PipelineTester:
    return PipelineTester(
        pipeline(sink), input_schema=SCHEMA, every=HOUR, root=f"file://{tmp_path}/state", call_sink=True
    )


@pytest.mark.parametrize(
    ("stored", "call", "replaced"),
    [
        ({}, (hour(0), 1), {hour(0)}),
        ({hour(0): 1}, (hour(0), 1), None),
        ({hour(0): 2}, (hour(0), 1), None),
        ({hour(0): 1, hour(1): 2}, (hour(0), 3), {hour(0)}),
        ({hour(0, 24): 1}, (hour(0), 2), {hour(0), hour(0, 24)}),
        # An hour replaced the day: the call for the day comes late, and a day that hung must not come back.
        ({hour(0, 24): 1, hour(0): 2}, (hour(0, 24), 2), {hour(0, 24)}),
        ({hour(0): 2}, (hour(0, 24), 1), None),
        ({hour(0): 2, hour(1): 3}, (hour(0, 24), 4), {hour(0), hour(1), hour(0, 24)}),
        # Restore 5 retracted the hour: its own call, a call from before, and the re-run of the hour.
        ({hour(0): 1, hour(1): 2}, (hour(1), 5), {hour(1)}),
        ({hour(0): 1, hour(1): 5}, (hour(1), 2), None),
        ({hour(0): 1, hour(1): 5}, (hour(1), 6), {hour(1)}),
        ({hour(0): 1, hour(1): 6}, (hour(1), 5), None),
        # Restore 5 retracted the day. The hour ran again before the sink heard of the restore.
        ({hour(0, 24): 2, hour(1): 6}, (hour(0, 24), 5), None),
    ],
)
def test_the_rows_that_a_call_replaces(
    stored: dict[Interval, int], call: tuple[Interval, int], replaced: set[Interval] | None
) -> None:
    assert Publication(Owner("p", "log"), *call).replaces(stored) == replaced
    # The call for a replaced interval leaves the rows of other intervals to their own calls.
    newer = stored.get(call[0], 0) < call[1]
    assert Publication(Owner("p", "log"), *call, replaced=True).replaces(stored) == ({call[0]} if newer else None)


def test_one_transaction_replaces_the_rows_of_an_overlapping_interval(
    sink: TableSink, read: Callable[[], Rows], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader sees the old rows or the new rows, between the two calls too."""
    tester = run_of(sink, tmp_path)
    tester.run([("ann",), ("bob",)], hour(0, 2), permissions=ANYTHING)
    called, seen = type(sink).publish, list[Rows]()

    def publish_and_read(self: TableSink, call: Publication) -> None:
        called(self, call)
        seen.append(read())

    monkeypatch.setattr(type(sink), "publish", publish_and_read)
    tester.run([("cid",)], hour(0), permissions=ANYTHING)
    assert seen == [[(hour(0).start, hour(0).end, "cid", 1)]] * 2
    assert read() == expected(tester)


def test_an_empty_call_before_there_is_a_table_stops_an_old_call(sink: TableSink, read: Callable[[], Rows]) -> None:
    users = pa.table({"user": ["ann"], "clicks": [1]})
    sink.publish(Publication(OWNER, hour(0), 2))
    publish(sink, hour(0), 1, users)
    assert read() == []
    publish(sink, hour(1), 3, users)
    assert [row[2:] for row in read()] == [("ann", 1)]


@pytest.mark.parametrize("healed_by", ["the next checkpoint", "publish", "rebuild"])
def test_a_table_goes_back_with_the_output(
    healed_by: str, sink: TableSink, read: Callable[[], Rows], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is killed between the restore and the table's change."""
    tester = run_of(sink, tmp_path)
    for name in ("ann", "bob", "cid"):
        tester.run([(name,)])
    hung = {call.interval: call for call in current(tester)}
    coordinator = restored(tester, 1)
    assert [user for *_, user, _ in read()] == ["ann", "bob", "cid"]
    assert {user for *_, user, _ in expected(tester)} == {"ann"}
    assert [str(found) for found in sink.check(current(tester))] == [
        f"{hour(n)}: the table has 1 rows of an interval without output" for n in (1, 2)
    ]
    hook = tester.pipeline.sink_hook(None, f"{tester.root}/clicks")
    with monkeypatch.context() as patched:
        kill(patched, type(sink), "publish", after=False)
        with pytest.raises(SinkFailed):
            coordinator.publish(hook)
    if healed_by == "the next checkpoint":
        tester.run([("dan",)], hour(1))
    elif healed_by == "publish":
        assert [n for _, n in coordinator.publish(hook)] == [4, 4]
    else:
        sink.clear(owner_of("clicks", f"{tester.root}/clicks", late=False))
        for call in current(tester):
            sink.publish(call)
        coordinator.publish(hook)
    after = read()
    assert after == expected(tester)
    assert [user for *_, user, _ in after] == ["ann", *(["dan"] if healed_by == "the next checkpoint" else [])]
    for interval in (hour(1), hour(2)):
        sink.publish(hung[interval])
        assert read() == after, "a call from before the restore changed the table"
    tester.run([("eve",)], hour(1), permissions=ANYTHING)
    tester.run([("eve",)], hour(2), permissions=ANYTHING)
    assert read() == expected(tester)
    assert [user for *_, user, _ in read()] == ["ann", "eve", "eve"]


def restored(tester: PipelineTester, target: int) -> Coordinator:
    """The pipeline went back to a checkpoint, and retracted the output of later intervals. Nobody has called the sink."""
    coordinator = coordinator_of(tester.pipeline, tester.root)
    run = RunRef(run_id="restore", clear_number=0, try_number=1)
    rewind(coordinator.at, target, run=run, attempt=str(uuid.uuid4()), retract_output=True)
    coordinator.clean_up()
    return coordinator


def test_an_old_call_a_repeated_call_and_calls_at_the_same_time_change_nothing(
    sink: TableSink, read: Callable[[], Rows], tmp_path: Path
) -> None:
    tester = run_of(sink, tmp_path)
    interval = tester.run([("ann",), ("bob",)]).interval
    (old,) = current(tester)
    tester.run([("cid",)], interval)
    empty = replace(old, checkpoint_id=2, files=())
    for call in (old, replace(empty, checkpoint_id=1), empty):
        sink.publish(call)
        assert read() == expected(tester) == [(interval.start, interval.end, "cid", 1)]
    rows = {n: pa.table({"user": [f"u{n}"] * n, "clicks": range(n)}) for n in (9, 10)}
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: publish(sink, interval, n, rows[n], owner=old.owner), (9, 10, 9, 10)))
    assert [user for *_, user, _ in read()] == ["u10"] * 10


@dataclass
class History:
    """A random history of one pipeline, and the table of its sink.

    Attributes:
        ran: Hours that have run, or that a restore left.
        waits: True if the sink has not accepted all output: each interval may have its old rows.
        calls: All calls of the sink so far that may come again, late.
        seen: How often each kind of step happened.
    """

    seed: int
    kind: str
    sink: TableSink
    read: Callable[[], Rows]
    tester: PipelineTester
    monkeypatch: pytest.MonkeyPatch
    ran: int = 0
    waits: bool = False

    def __post_init__(self) -> None:
        self.pick, self.calls, self.seen = random.Random(self.seed), list[Publication](), Counter[str]()
        self.coordinator = coordinator_of(self.tester.pipeline, self.tester.root)

    def step(self) -> None:
        weights = {
            "next": 4,
            "again": 3,
            "hours over day": 2,
            "restore": 3,
            "quarantine": 1,
            "release": 1,
            "late call": 2,
            "publish": 1,
        }
        (what,) = self.pick.choices([*weights], [*weights.values()])
        change = {
            "restore": self.restore,
            "quarantine": self.quarantine,
            "release": self.release,
            "late call": self.call_late,
            "publish": lambda: self.changes(self.publish),
        }.get(what, lambda: self.run(what))
        change()
        if self.waits:
            return
        assert self.read() == expected(self.tester), (self.seed, what)
        self.calls += [call for call in current(self.tester) if call not in self.calls]

    def run(self, what: str) -> None:
        rows = [(self.pick.choice("abc"),) for _ in range(self.pick.choice([0, 1, 4]))]
        if what == "next" or not self.ran:
            interval = hour(self.ran)
        elif what == "again":
            interval = hour(self.pick.randrange(self.ran))
        else:  # Two hours become one interval, or one again.
            interval = hour(0, self.pick.choice([1, 2])) if self.ran > 1 else hour(0)
        try:
            self.changes(lambda: self.tester.run(rows, interval, permissions=ANYTHING))
        except StateUnusable:
            return  # The history has no base for this interval.
        self.ran = max(self.ran, (interval.end - START) // HOUR)
        self.seen[what] += 1

    def restore(self) -> None:
        """Back, or forward again, to any checkpoint. The command may end before anybody calls the sink."""
        log, before = self.coordinator.log(), self.read()
        if not log.retained:
            return
        target = self.pick.choice([*log.retained])
        retracts = self.pick.random() < 0.7
        end = log.whole(target).content.interval.end
        alone = all(interval.start >= end for interval, _ in log.outputs_after(end))
        try:
            rewind(
                self.coordinator.at,
                target,
                run=RunRef(run_id="restore", clear_number=0, try_number=1),
                attempt=str(uuid.uuid4()),
                permissions=Permissions(allow_stale_base=True, allow_quarantined=True),
                retract_output=retracts,
            )
        except UsageError as refused:
            assert retracts and not alone and "can't be retracted alone" in str(refused)
            self.seen["refused restore"] += 1
            return
        assert alone or not retracts
        self.coordinator.clean_up()
        assert self.read() == before, "the command itself does not change the table"
        if retracts:
            until = log.whole(target).content.interval.end
            assert all(interval.end <= until for interval in by_interval(expected(self.tester)))
            self.waits, self.ran = True, (until - START) // HOUR
        self.seen["restore that retracts" if retracts else "restore"] += 1
        if self.pick.random() < 0.7:
            self.changes(self.publish)

    def publish(self) -> None:
        self.coordinator.publish(self.tester.pipeline.sink_hook(None, f"{self.tester.root}/clicks"))

    def quarantine(self) -> None:
        kept = [*self.coordinator.log().retained]
        if kept:
            self.coordinator.quarantine(self.pick.choice(kept), "wrong")
            self.seen["quarantine"] += 1

    def release(self) -> None:
        refused = [*self.coordinator.log().quarantined]
        if refused:
            with suppress(UsageError):  # A checkpoint was computed without this one.
                self.coordinator.release(self.pick.choice(refused))
                self.seen["release"] += 1

    def call_late(self) -> None:
        """A process that hung calls the sink. The table has newer rows, or these rows."""
        if self.calls and not self.waits:
            before = self.read()
            self.sink.publish(self.pick.choice(self.calls))
            assert self.read() == before, self.seed
            self.seen["late call"] += 1

    def changes(self, change: Callable[[], object]) -> None:
        """Call the sink. In half of the calls, the process is killed before or after a request to the table."""
        before = by_interval(self.read())
        with self.monkeypatch.context() as patched:
            if self.pick.random() < 0.5:
                kill(patched, type(self.sink), self.pick.choice(CALLS[self.kind]), self.pick.random() < 0.5)
            try:
                change()
                self.waits = False
            except SinkFailed as failed:
                assert "Killed" in str(failed)
                self.waits = True
                self.seen["kill"] += 1
                after, wanted = by_interval(self.read()), by_interval(expected(self.tester))
                for near in before.keys() | after.keys() | wanted.keys():
                    assert after.get(near) in (before.get(near), wanted.get(near)), (self.seed, near)


SEEN = Counter[str]()
HISTORIES = int(os.environ.get("CAIRN_HISTORIES", at_tier(fast=1, ci=4, all=25)))


@pytest.mark.parametrize("seed", range(HISTORIES))
def test_any_history_of_runs_restores_quarantines_and_kills(
    seed: int, kind: str, sink: TableSink, read: Callable[[], Rows], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is killed before or after a call of the other system. The next call publishes the rest."""
    history = History(seed, kind, sink, read, run_of(sink, tmp_path), monkeypatch)
    for _ in range(at_tier(fast=8, ci=16, all=30)):
        history.step()
    history.publish()
    assert read() == expected(history.tester)
    assert sink.check(current(history.tester)) == []
    SEEN.update({f"{kind}: {what}": n for what, n in history.seen.items()} | {kind: 1})
    if ALL and SEEN[kind] == HISTORIES:  # A second run leaves out histories that passed in the first.
        for what in (
            "restore",
            "restore that retracts",
            "quarantine",
            "release",
            "late call",
            "hours over day",
            "kill",
        ):
            assert SEEN[f"{kind}: {what}"] > HISTORIES // 5, (kind, what)


def by_interval(rows: Rows) -> dict[Interval, Rows]:
    return {Interval(*key): [*group] for key, group in groupby(rows, lambda row: row[:2])}


def kill(patched: pytest.MonkeyPatch, owner: type, name: str, after: bool) -> None:
    called = getattr(owner, name)

    def killed(*arguments: Any) -> Any:
        if after:
            called(*arguments)
        raise Killed(name)

    patched.setattr(owner, name, killed)


def test_columns_that_the_output_gains(kind: str, sink: TableSink, tmp_path: Path) -> None:
    interval = hour(0)
    narrow = pa.table(
        {"a": pa.array([1, None], pa.int32()), "d": pa.array([Decimal("1.5"), None], pa.decimal128(5, 2))}
    )
    publish(sink, interval, 1, narrow)
    fits = 2 if kind == "delta" else 2**40  # Delta keeps the type.
    wide = pa.table(
        {
            "a": pa.array([fits, None], pa.int64()),
            "d": pa.array([Decimal("1.5"), None], pa.decimal128(5, 2)),
            "b": ["x", None],
        }
    )
    publish(sink, hour(1), 2, wide)
    assert hash_of_rows(sink.rows(hour(1), wide.schema)) == hash_of_rows(wide)
    publish(sink, hour(2), 3, narrow)  # code of before runs again
    assert sink.row_counts() == {hour(0): 2, hour(1): 2, hour(2): 2}


EVERY_TYPE = pa.table(
    {
        "flag": pa.array([True, None]),
        "small": pa.array([-(2**15), None], pa.int16()),
        "whole": pa.array([2**31 - 1, None], pa.int32()),
        "long": pa.array([-(2**63), None], pa.int64()),
        "real": pa.array([0.1, float("inf")], pa.float32()),
        "double": pa.array([1e300, float("nan")]),
        "money": pa.array([Decimal("12345678901234567890.123456"), None], pa.decimal128(38, 6)),
        "text": ['a "quoted", \n line \\N ä', ""],
        "empty": pa.array([None, ""]),
        "bytes": pa.array([b"\x00\xff\n", None]),
        "day": pa.array([date(1969, 12, 31), None]),
        "at": pa.array([datetime(2024, 3, 10, 7, 0, 0, 1, UTC), None], pa.timestamp("us", "UTC")),
        "wall": pa.array([datetime(2024, 3, 10, 7, 0, 0, 1), None], pa.timestamp("us")),
        "list": pa.array([[1, None, 3], []], pa.list_(pa.int64())),
        "struct": pa.array([{"p": 1.0, "q": "x"}, None], pa.struct([("p", pa.float64()), ("q", pa.string())])),
        "map": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int64())),
        "structs": pa.array([[{"p": 1}, None], []], pa.list_(pa.struct([("p", pa.int64())]))),
        'a name; with "signs"': pa.array([1, 2]),
    }
)


@pytest.mark.parametrize(
    ("wanted", "there", "becomes"),
    [
        ("integer", "integer", None),
        ("bigint", "integer", "bigint"),
        ("integer", "bigint", None),
        ("double precision", "integer", "double precision"),
        ("double precision", "bigint", None),
        ("double precision", "real", "double precision"),
        ("numeric(12,2)", "numeric(10,4)", "numeric(14,4)"),
        ("numeric(5,2)", "bigint", "numeric(21,2)"),
        ("bigint", "numeric(5,2)", "numeric(21,2)"),
        ("integer", "numeric(20,2)", None),
        ("numeric(5,2)", "numeric", None),
        ("text", "character varying(20)", None),
        ("timestamp without time zone", "date", "timestamp without time zone"),
    ],
)
def test_a_column_gets_a_type_that_holds_old_and_new_values(wanted: str, there: str, becomes: str | None) -> None:
    assert wider_type(wanted, there) == becomes


def test_every_type_comes_back(kind: str, sink: TableSink, tmp_path: Path) -> None:
    rows = EVERY_TYPE.drop_columns(['a name; with "signs"']) if kind in ("bigquery", "delta") else EVERY_TYPE
    if kind == "bigquery":  # A list can't be null, and can't have nulls.
        filled = {"list": [[1, 3], []], "map": [[("k", 1)], []], "structs": [[{"p": 1}, {"p": None}], []]}
        for name, values in filled.items():
            rows = rows.set_column(rows.column_names.index(name), name, pa.array(values, rows[name].type))
    publish(sink, hour(0), 1, rows)
    found = sink.rows(hour(0), rows.schema)
    assert hash_of_rows(found) == hash_of_rows(rows)
    for name in rows.column_names:
        assert hash_of_rows(found.select([name])) == hash_of_rows(rows.select([name])), name


def current(tester: PipelineTester, *, late: bool = False) -> list[Publication]:
    root = f"{tester.root}/clicks"
    outputs = read_log(open_storage(root)).current_outputs()
    owner = owner_of("clicks", root, late=late) if outputs else OWNER
    return [published_output(owner, root, interval, n, files, late=late) for interval, (n, files) in outputs.items()]


LATE_SCHEMA = pa.schema([("user", pa.string()), ("at", pa.timestamp("us", "UTC")), ("checkpoint_id", pa.int64())])


def late_sink(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> TableSink:
    if kind == "bigquery":
        return sinks.bigquery("shop.late_clicks", request.getfixturevalue("stand_in").client)
    if kind == "delta":
        return sinks.delta(f"file://{tmp_path}/late")
    if kind == "iceberg":
        return sinks.iceberg("shop.late_clicks", "tests", lambda: iceberg_properties(tmp_path))
    address = request.getfixturevalue("server")
    with psycopg.connect(address, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS late_clicks")
    return sinks.postgres("late_clicks", lambda: address)


def late_rows(tester: PipelineTester) -> dict[Interval, list[dict[str, Any]]]:
    """The late rows of the current output, each with the checkpoint that found it."""
    found = {}
    for interval, (n, files) in read_log(open_storage(f"{tester.root}/clicks")).current_outputs().items():
        of_files = [pq.read_table(output_path(tester, file)).to_pylist() for file in files if file.late]
        rows = [{**row, "checkpoint_id": n} for rows in of_files for row in rows]
        if rows:
            found[interval] = sorted(rows, key=repr)
    return found


def kill_in(patched: pytest.MonkeyPatch, owner: type, late: bool, after: bool) -> None:
    """The process is killed before or after the transaction of the late rows' table, or of the other table."""
    called = owner.publish  # type: ignore[attr-defined]

    def publish(self: Any, publication: Publication) -> None:
        if publication.late != late or after:
            called(self, publication)
        if publication.late == late:
            raise Killed

    patched.setattr(owner, "publish", publish)


def output_path(tester: PipelineTester, file: OutputFile) -> str:
    return f"{tester.root.removeprefix('file://')}/clicks/{file.handle.path}"


def test_late_rows_get_a_table_of_their_own(
    kind: str,
    sink: TableSink,
    read: Callable[[], Rows],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    late = late_sink(kind, tmp_path, request)
    both = sink.with_late_rows(late)
    event_time = {"time_mode": "event", "event_time": "at", "watermark_delay": timedelta(0), "watermark": "interval"}
    tester = PipelineTester(
        pipeline(both, **event_time),
        input_schema="user string, at timestamp",
        every=HOUR,
        root=f"file://{tmp_path}/state",
        call_sink=True,
    )
    at = [START + n * HOUR + timedelta(minutes=5) for n in range(3)]

    def same() -> int:
        """Both tables are equal to output and late rows; returns the number of late rows."""
        wanted = late_rows(tester)
        assert late.row_counts() == {interval: len(rows) for interval, rows in wanted.items()}
        for interval, rows in wanted.items():
            assert sorted(late.rows(interval, LATE_SCHEMA).to_pylist(), key=repr) == rows
        assert read() == expected(tester)
        return sum(map(len, wanted.values()))

    tester.run([("ann", at[0])])
    assert same() == 0
    tester.run([("ann", at[1]), ("bob", at[0]), ("cid", at[0])])
    assert same() == 2
    # A run again: the process is killed before or after one of the two transactions.
    for late_dies, after in ((False, True), (True, False), (True, True)):
        with monkeypatch.context() as patched:
            kill_in(patched, type(late), late_dies, after)
            with pytest.raises(SinkFailed):
                tester.run([("ann", at[1]), ("dan", at[0])], hour(1))
        coordinator_of(tester.pipeline, tester.root).publish(tester.pipeline.sink_hook(None, f"{tester.root}/clicks"))
        assert same() == 1
    tester.run([("ann", at[1])], hour(1))
    assert same() == 0
    tester.run([("ann", at[2]), ("eve", at[0])])
    assert same() == 1
    (call,) = [p for p in current(tester, late=True) if p.interval == hour(2)]
    # Two hours replace what the hours had; then a call of before comes late.
    tester.run([("fay", at[2])], hour(1, 2), permissions=ANYTHING)
    assert same() == 0
    late.publish(call)
    assert same() == 0
    tester.run([("gus", at[0])], hour(3))
    assert same() == 1
    restored(tester, 1).publish(tester.pipeline.sink_hook(None, f"{tester.root}/clicks"))
    assert same() == 0
    tester.run([("ann", at[1]), ("bob", at[0])], hour(1))
    assert same() == 1

    monkeypatch.setattr("cairn.command.publish.load_code", lambda code: tester.pipeline)
    variables = {"CAIRN_ROOT": tester.root, "CAIRN_PIPELINE": "clicks", "CAIRN_CODE": "clicks:CLICKS"}

    def typed(*words: str) -> list[str]:
        return CliRunner().invoke(app, ["publish", *words], env=variables).output.splitlines()

    equal = [
        f"{sink!r} is equal to the output of 2 interval(s)",
        f"{late!r} is equal to the late rows of 2 interval(s)",
    ]
    assert typed("--check") == equal
    late.clear(owner_of("clicks", f"{tester.root}/clicks", late=True))
    assert typed("--check") == [
        equal[0],
        f"{late!r} differs from the late rows of 1 interval(s):",
        f"{hour(1)}: 1 rows in the output, 0 in the table",
    ]
    assert typed("--rebuild") == [
        f"{sink!r} has the output of 2 interval(s)",
        f"{late!r} has the late rows of 2 interval(s)",
    ]
    assert typed("--check") == equal and same() == 1


@pytest.mark.parametrize(
    ("value", "old", "new", "fits"),
    [
        (Decimal("1.5"), pa.decimal128(38, 9), pa.float64(), True),
        (Decimal("12345678901234567890.123456789"), pa.decimal128(38, 9), pa.float64(), False),
        (1e-12, pa.float64(), pa.decimal128(38, 9), False),
        (0.1, pa.float64(), pa.float32(), False),
        (float("nan"), pa.float64(), pa.float32(), True),
        (2**40, pa.int64(), pa.int32(), False),
        ("01", pa.string(), pa.int64(), False),
        (START.replace(tzinfo=None, hour=5), pa.timestamp("us"), pa.date32(), False),
        ([1, None], pa.list_(pa.int32()), pa.list_(pa.int64()), True),
        ({"a": 0.1}, pa.struct([("a", pa.float64())]), pa.struct([("a", pa.float32())]), False),
        ({"a": 1}, pa.struct([("a", pa.int32())]), pa.struct([("a", pa.int64()), ("b", pa.string())]), True),
    ],
)
def test_a_value_that_a_cast_would_change_is_refused(
    value: Any, old: pa.DataType, new: pa.DataType, fits: bool
) -> None:
    rows = pa.table({"v": pa.array([value, None], old)})
    if fits:
        assert with_type(rows, "v", new)["v"].type == new
        return
    with pytest.raises(UsageError, match="does not fit"):
        with_type(rows, "v", new)


def test_mistakes_with_a_table_of_late_rows(sink: TableSink) -> None:
    with pytest.raises(UsageError, match="has a table for late rows already"):
        sink.with_late_rows(sinks.delta("file:///late")).with_late_rows(sinks.delta("file:///late"))
    other = sinks.delta("file:///other")
    with pytest.raises(UsageError, match="has a table for late rows already"):
        sink.with_late_rows(other.with_late_rows(sinks.delta("file:///late")))
    with pytest.raises(UsageError, match="is the table of the output; give late rows another table"):
        sink.with_late_rows(sink)
    rows = pa.table({"user": ["ann"], "clicks": [1]})
    publish(sink, hour(0), 1, rows)
    with pytest.raises(UsageError, match="Give each pipeline a table of its own"):
        sink.publish(Publication(LATE, hour(0), 1, late=True))
    for name, what in (
        ("interval_end", "interval"),
        ("checkpoint_id", "checkpoint's id"),
        ("Interval_Start", "interval"),
        ("CHECKPOINT_ID", "checkpoint's id"),
    ):
        with pytest.raises(
            UsageError, match=rf"a late row of .* has a column '{name}', but the sink writes the {what}"
        ):
            sink.check_columns("clicks", [name], late=True)


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
    assert typed("--check", "--json")[0] == 1
    code, text = typed("--rebuild")
    asked = f"UsageError: {sink!r} has 4 rows, 1 more than the output of 'clicks'; the command would delete all"
    assert (code, text.splitlines()) == (2, [asked, "Nothing was done. To agree, run the same command with --yes"])
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
def test_the_owner_that_a_table_stores(stored: str, stores: bool | None, takes_over: bool | None) -> None:
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
    assert read() == expected(development)


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
def test_four_processes_fill_a_table(
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


def test_the_url_of_a_table(kind: str, sink: TableSink, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if kind == "bigquery":
        assert sink.table_url() == "bigquery://shop-prod/shop/clicks"
        assert sinks.bigquery("other.shop.clicks").table_url() == "bigquery://other/shop/clicks"
        return
    if kind == "delta":
        assert sink.table_url() == f"file://{tmp_path}/table"
        return
    if kind == "iceberg":
        publish(sink, hour(0), 1, pa.table({"user": ["ann"]}))
        assert sink.table_url() == f"file://{tmp_path}/warehouse/shop/clicks"
        return
    address = request.getfixturevalue("server")
    with psycopg.connect(address) as connection:
        info = connection.info
        # A socket has a path instead of a host.
        host = "localhost" if info.host.startswith("/") else info.host
        where = f"postgres://{host}:{info.port}/{info.dbname}"
    assert sink.table_url() == f"{where}/public/clicks"
    assert sinks.postgres("shop.clicks", address).table_url() == f"{where}/shop/clicks"
    with psycopg.connect(address, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA IF NOT EXISTS mine")
    # The server decides what a name without a schema means.
    own = make_conninfo(address, options="-c search_path=mine")
    assert sinks.postgres("clicks", own).table_url() == f"{where}/mine/clicks"


def test_mistakes_are_named(kind: str, sink: TableSink, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no scheme; expected a URL"):
        sinks.delta("/data/tables/clicks")
    with pytest.raises(UsageError, match=r"'a.b.c' is no table"):
        sinks.postgres("a.b.c")
    for name in ("clicks", "shop.clicks;", "shop.`clicks", ".shop.clicks"):
        with pytest.raises(
            UsageError, match=r"is no table of BigQuery; expected dataset.table or project.dataset.table"
        ):
            sinks.bigquery(name)
    with pytest.raises(UsageError, match=r"'clicks' is no table of an Iceberg catalog; expected namespace.name"):
        sinks.iceberg("clicks")
    with pytest.raises(UsageError, match=r"column 'interval_end', but the sink writes the interval"):
        publish(sink, hour(0), 1, pa.table({"interval_end": [1]}))
    publish(sink, hour(0), 1, pa.table({"user": ["ann"], "clicks": [1]}))
    with pytest.raises(UsageError, match="Give each pipeline a table of its own"):
        sink.publish(Publication(replace(OWNER, name="others"), hour(0), 2))
    if kind != "postgres":
        with pytest.raises(
            UsageError, match=r"column 'clicks' has the type int64, and a value of type string does not fit"
        ):
            publish(sink, hour(1), 2, pa.table({"user": ["ann"], "clicks": ["many"]}))


def test_a_value_that_a_table_can_not_hold_is_named(kind: str, sink: TableSink, tmp_path: Path) -> None:
    spans = pa.table({"span": pa.array([timedelta(1)])})
    with pytest.raises(UsageError, match="can't write a value of type timedelta"):
        hash_of_rows(spans)
    if kind == "postgres":
        with pytest.raises(UsageError, match="no type of PostgreSQL for the column 'span' of type duration"):
            publish(sink, hour(0), 1, spans)
        with pytest.raises(psycopg.DataError, match="0x00"):
            publish(sink, hour(0), 1, pa.table({"user": ["a\0b"]}))
    if kind == "bigquery":
        with pytest.raises(UsageError, match=r"no type of BigQuery for the column 'span' of type duration\[us\]"):
            publish(sink, hour(0), 1, spans)
    if kind == "iceberg":
        with pytest.raises(UsageError, match=r"can't hold the column 'span' of type duration\[us\]"):
            publish(sink, hour(0), 1, spans)


def test_a_table_of_its_owner_keeps_its_types_and_columns(server: str, tmp_path: Path) -> None:
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA shop")
        connection.execute(
            'CREATE TABLE shop.clicks (id bigserial PRIMARY KEY, "user" varchar(20), clicks smallint, '
            "interval_start timestamptz, interval_end timestamptz)"
        )
        tester = run_of(sinks.postgres("shop.clicks", server), tmp_path)
        tester.run([("ann",), ("ann",)])
        assert connection.execute('SELECT id, "user", clicks FROM shop.clicks').fetchall() == [(1, "ann", 2)]
        found = connection.execute(
            "SELECT column_name, data_type FROM information_schema.columns WHERE table_schema = 'shop' AND table_name = 'clicks'"
        )
        assert {("user", "character varying"), ("clicks", "bigint")} <= {*found.fetchall()}


def test_a_role_with_another_zone_and_date_style(server: str) -> None:
    address = make_conninfo(server, options="-c timezone=Asia/Kolkata -c datestyle=German")
    sink = sinks.postgres("dated", address)
    rows = EVERY_TYPE.select(["at", "day", "wall"])
    publish(sink, hour(0), 1, rows)
    publish(sink, hour(0), 2, rows)
    publish(sink, hour(0), 1, rows.slice(0, 1))
    assert sink.row_counts() == {hour(0): 2}
    assert hash_of_rows(sink.rows(hour(0), rows.schema)) == hash_of_rows(rows)


@pytest.mark.parametrize("shared", ["turns", "cairn_publications"], ids=["of the table", "of all tables"])
def test_a_call_of_postgres_waits_for_the_lock_of_another(shared: str, server: str) -> None:
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS turns, cairn_publications")  # the first call creates them
    with ThreadPoolExecutor(1) as pool, psycopg.connect(server) as other:
        other.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (f"cairn {shared}",))
        called = pool.submit(publish, sinks.postgres("turns", server), hour(0), 1, EVERY_TYPE.select(["at"]))
        with pytest.raises(TimeoutError):
            called.result(0.5)
        other.commit()
        called.result(60)


def test_a_rebuild_keeps_rows_that_the_sink_did_not_write(server: str) -> None:
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS kept, cairn_publications")
        connection.execute('CREATE TABLE kept ("user" text, interval_start timestamptz, interval_end timestamptz)')
        sink = sinks.postgres("kept", server)
        sink.clear(OWNER)
        connection.execute("INSERT INTO kept VALUES ('ann')")
        with pytest.raises(UsageError, match="has rows, but the sink has never written to it"):
            sink.clear(OWNER)
        assert connection.execute('SELECT "user" FROM kept').fetchall() == [("ann",)]
        assert sink.row_counts() == {None: 1}


def test_the_blocks_of_the_page(
    server: str,
    stand_in: BigQueryServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = (REPOSITORY / "docs" / "tables.md").read_text().replace("/data/tables", f"{tmp_path}/tables")
    declaration, *others, reader, reader_of_iceberg = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    scope: dict[str, Any] = {}
    exec(declaration, scope)
    stand_in.forget()
    monkeypatch.setattr(type(sinks.bigquery("shop.t")), "_new_client", lambda sink: stand_in.client())
    monkeypatch.setenv("WAREHOUSE", server)
    monkeypatch.setenv("CATALOG", f"sqlite:///{tmp_path}/catalog.db")
    with load_catalog("warehouse", type="sql", uri=f"sqlite:///{tmp_path}/catalog.db") as opened:
        opened.create_namespace("shop")
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS clicks, cairn_publications")
        for n, block in enumerate(["", *others]):
            # A table belongs to one root.
            exec(block.replace(f"{tmp_path}/tables", f"{tmp_path}/tables{n}"), scope)
            declared = replace(scope["CLICKS"], sink=scope["sink"]) if block else scope["CLICKS"]
            root = f"file://{tmp_path}/state{n}"
            tester = PipelineTester(declared, input_schema=SCHEMA, every=HOUR, root=root, call_sink=True)
            tester.run([("ann",), ("bob",)])
            tester.run([("ann",)])
        rows = connection.execute('SELECT "user", max(clicks) FROM clicks GROUP BY 1 ORDER BY 1').fetchall()
    assert rows == [("ann", 2), ("bob", 1)]
    assert [user for (user,) in stand_in.rows("clicks", ["user"])] == ["ann", "ann", "bob"]
    for block in (reader, reader_of_iceberg):
        exec(block, scope)
        assert re.findall(r"│ (\w+) +│ +(\d+) │", capsys.readouterr().out) == [("ann", "2"), ("bob", "1")]


def test_a_connection_string_that_cannot_be_read_is_not_shown() -> None:
    secret = sinks.postgres("clicks", "host=there password=very secret")
    with pytest.raises(UsageError) as raised:
        secret.publish(Publication(OWNER, hour(0), 1))
    assert "secret" not in f"{raised.value} {secret!r}" and raised.value.__cause__ is None


@pytest.mark.parametrize(
    ("library", "extra", "sink"),
    [
        ("google.cloud.bigquery", "bigquery", sinks.bigquery("shop.t")),
        ("deltalake", "delta", sinks.delta("file:///t")),
        ("psycopg", "postgres", sinks.postgres("t")),
        ("pyiceberg", "iceberg", sinks.iceberg("shop.t")),
    ],
)
def test_a_missing_library_is_named_with_its_command(
    library: str, extra: str, sink: TableSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, library, None)
    with pytest.raises(UsageError, match=rf"the sink needs {library}, which .* lacks; .*\[{extra}\]'"):
        sink.publish(Publication(OWNER, hour(0), 1))


@SECONDS
@pytest.mark.parametrize("rows", [1, 0])
def test_a_call_of_iceberg_that_dies_at_any_request(rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process dies before or after each request to the catalog and to the files. Then the call is repeated."""
    old, new = (
        pa.table({"user": users, "clicks": range(len(users))}) for users in (["old"], ["ann", "bob"][: 2 * rows])
    )
    died, at = True, 0
    while died:
        folder = tmp_path / str(at)
        folder.mkdir()
        sink = iceberg(folder)
        publish(sink, hour(0, 2), 1, old)
        with monkeypatch.context() as patched:
            die_at(patched, at, REQUESTS_OF_ICEBERG)
            try:
                publish(sink, hour(0), 2, new)
                died = False
            except Killed:
                pass
        counts = sink.row_counts()
        assert counts in ({hour(0, 2): 1}, {hour(0): 2} if rows else {}), at
        assert died or counts == ({hour(0): 2} if rows else {})
        publish(sink, hour(0, 2), 1, old)
        assert sink.row_counts() == counts, "an old call changed the table"
        publish(sink, hour(0), 2, new)
        assert sink.row_counts() == ({hour(0): 2} if rows else {}), at
        before = snapshots(folder)
        publish(sink, hour(0), 2, new)
        publish(sink, hour(0, 2), 1, old)
        assert snapshots(folder) == before, at
        at += 1
    assert at > 10


REQUESTS_OF_ICEBERG = [(SqlCatalog, name) for name in ("load_table", "commit_table", "create_table")]
REQUESTS_OF_ICEBERG += [(PyArrowFileIO, name) for name in ("new_output", "new_input")]


def snapshots(tmp_path: Path) -> list[tuple[int, str | None]]:
    """The snapshots of the table, each with the checkpoint in its summary."""
    with catalog(tmp_path) as opened:
        found = opened.load_table("shop.clicks").snapshots()
    return [(one.snapshot_id, one.summary["cairn.checkpoint"] if one.summary else None) for one in found]


@pytest.mark.parametrize("error", [exceptions.CommitStateUnknownException, exceptions.CommitFailedException])
@pytest.mark.parametrize("landed", [True, False])
def test_a_result_that_the_iceberg_catalog_can_not_tell(
    landed: bool, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal may be that of a repeated request: the HTTP client repeats a request whose answer was lost."""
    sink, commit, calls = iceberg(tmp_path), SqlCatalog.commit_table, []

    def unknown(*arguments: Any) -> Any:
        calls.append(arguments)
        if landed or len(calls) > 1:
            made = commit(*arguments)
        if len(calls) == 1:
            raise error("502 Bad Gateway, or 409 Conflict")
        return made

    monkeypatch.setattr(SqlCatalog, "commit_table", unknown)
    publish(sink, hour(0), 1, pa.table({"user": ["ann"], "clicks": [1]}))
    assert sink.row_counts() == {hour(0): 1}
    assert [checkpoint for _, checkpoint in snapshots(tmp_path)] == ["1"]
    assert len(calls) == (1 if landed else 2)


@SECONDS
def test_a_call_of_iceberg_that_is_overtaken_reads_the_ids_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process publishes a newer output of the interval, between this call's read and its commit. Both outputs may be empty."""
    sink, commit = iceberg(tmp_path), SqlCatalog.commit_table
    user = pa.table({"user": ["ann"], "clicks": [1]})
    publish(sink, hour(1), 1, user)
    for n, (slow, fast) in enumerate([(0, 1), (1, 0), (1, 1), (0, 0)]):
        interval, older = hour(2 + n), 10 * n + 2
        newer = partial(publish, sink, interval, older + 1, user.slice(0, fast))

        def overtaken(*arguments: Any, _newer: Callable[[], None] = newer) -> Any:
            monkeypatch.setattr(SqlCatalog, "commit_table", commit)
            _newer()
            return commit(*arguments)

        monkeypatch.setattr(SqlCatalog, "commit_table", overtaken)
        publish(sink, interval, older, user.slice(0, slow))
        assert sink.row_counts().get(interval, 0) == fast
        assert snapshots(tmp_path)[-1][1] == str(older + 1)
    monkeypatch.setattr(import_module("cairn.sinks.iceberg"), "_WAIT_S", 0)

    for error, calls in ((exceptions.CommitFailedException, 30), (exceptions.CommitStateUnknownException, 3)):
        failing = Mock(side_effect=error("failed"))
        monkeypatch.setattr(SqlCatalog, "commit_table", failing)
        with pytest.raises(error):
            publish(sink, hour(9), 99, user)
        assert failing.call_count == calls


def test_an_iceberg_table_of_its_owner(tmp_path: Path) -> None:
    """Own types, no partitions, other rows, files of several intervals, and manifests that pyiceberg merges at once."""
    sink = iceberg(tmp_path)
    schema = Schema(
        NestedField(1, "note", StringType(), required=False),
        NestedField(2, "clicks", IntegerType(), required=False),
        NestedField(3, "interval_start", TimestamptzType(), required=False),
        NestedField(4, "interval_end", TimestamptzType(), required=False),
    )
    own = {"commit.manifest-merge.enabled": "true", "commit.manifest.min-count-to-merge": "2"}
    rows = pa.table({"user": ["ann", "bob"], "clicks": [1, 2]})
    with catalog(tmp_path) as opened:
        table = opened.create_table("shop.clicks", schema, properties=own)
        table.append(pa.table({"note": ["mine"]}))
        with pytest.raises(UsageError, match="has rows, but the sink has never written to it"):
            sink.clear(OWNER)
        assert sink.row_counts() == {None: 1}
        for n in range(4):
            publish(sink, hour(n), n + 1, rows)
        table.refresh()
        # Stands in for the owner's compaction: one file, in which a call must rewrite the rows of other intervals.
        table.overwrite(table.scan().to_arrow())
        assert len(table.inspect.files()) == 1
        for n, again in ((1, rows.slice(0, 1)), (2, rows.slice(0, 0)), (5, rows)):
            publish(sink, hour(n), n + 10, again)
        assert sink.row_counts() == {hour(0): 2, hour(1): 1, hour(3): 2, hour(5): 2, None: 1}
        assert hash_of_rows(sink.rows(hour(3), rows.schema)) == hash_of_rows(rows)
        assert [*filter(None, table.refresh().scan().to_arrow()["note"].to_pylist())] == ["mine"]
        assert table.spec().is_unpartitioned()
        sink.clear(OWNER)
        assert len(table.refresh().scan().to_arrow()) == 0
        assert not [name for name in table.properties if name.startswith("cairn.checkpoint")]
    publish(sink, hour(0), 1, rows)
    assert sink.row_counts() == {hour(0): 2}


def test_an_iceberg_table_without_columns_of_the_interval(tmp_path: Path) -> None:
    sink = iceberg(tmp_path)
    with catalog(tmp_path) as opened:
        opened.create_table("shop.clicks", Schema(NestedField(1, "user", StringType(), required=False)))
    assert sink.row_counts() == {}
    publish(sink, hour(0), 1, pa.table({"user": ["ann"]}))
    assert sink.row_counts() == {hour(0): 1}


def test_the_files_and_ids_of_an_iceberg_table(tmp_path: Path) -> None:
    """Partitions are days. The owner may expire all old snapshots: the ids stay. Metadata files do not become more and more."""
    sink = iceberg(tmp_path)
    user = pa.table({"user": ["ann"], "clicks": [1]})
    for n in (0, 1, 25):
        publish(sink, hour(n), n + 1, user)
    publish(sink, hour(26), 27, user.slice(0, 0))
    with catalog(tmp_path) as opened:
        table = opened.load_table("shop.clicks")
        assert table.inspect.partitions()["partition"].to_pylist() == [
            {"interval_start_day": date(2024, 1, day)} for day in (2, 1)
        ]
        assert table.properties["cairn.pipeline"] == "clicks@here"
        assert table.properties["cairn.checkpoint.2024-01-02T02:00:00Z/2024-01-02T03:00:00Z"] == "27"
        summary = table.current_snapshot().summary
        assert summary["cairn.interval"] == "2024-01-02T02:00:00Z/2024-01-02T03:00:00Z"
        table.maintenance.expire_snapshots().by_ids([s.snapshot_id for s in table.snapshots()[:-1]]).commit()
        with table.transaction() as transaction:
            transaction.set_properties({"write.metadata.previous-versions-max": "2"})
    sink.publish(Publication(OWNER, hour(0), 1))
    assert sink.row_counts() == {hour(0): 1, hour(1): 1, hour(25): 1}
    for n in range(30, 36):
        publish(sink, hour(n), n, user)
    assert len([*(tmp_path / "warehouse" / "shop" / "clicks" / "metadata").glob("*.metadata.json")]) < 6


def test_nested_columns_of_an_iceberg_table_gain_fields(tmp_path: Path) -> None:
    sink = iceberg(tmp_path)
    narrow = pa.table(
        {"s": pa.array([{"p": 1}], pa.struct([("p", pa.int32())])), "l": pa.array([[1]], pa.list_(pa.int32()))}
    )
    wide = pa.table(
        {
            "s": pa.array([{"p": 2**40, "q": "x"}], pa.struct([("p", pa.int64()), ("q", pa.string())])),
            "l": pa.array([[2**40, None]], pa.list_(pa.int64())),
        }
    )
    for n, rows in enumerate((narrow, wide, narrow)):
        publish(sink, hour(n), n + 1, rows)
    for n, rows in enumerate((narrow, wide, narrow)):
        assert hash_of_rows(sink.rows(hour(n), rows.schema)) == hash_of_rows(rows)
    with pytest.raises(UsageError, match=r"can't hold the column 's' of type struct<p: string>"):
        publish(sink, hour(4), 5, pa.table({"s": pa.array([{"p": "x"}])}))
    required = pa.schema([pa.field("s", narrow.schema.field("s").type), pa.field("n", pa.int64(), nullable=False)])
    publish(sink, hour(4), 5, pa.table([narrow["s"], [1]], schema=required))
    assert sink.row_counts()[hour(4)] == 1


STRUCT = pa.struct([("p", pa.int64()), ("l", pa.list_(pa.int64()))])


@pytest.mark.parametrize(
    ("kind_of_column", "loses"),
    [
        (pa.list_(STRUCT), True),
        (pa.list_(pa.list_(STRUCT)), False),
        (pa.list_(pa.map_(pa.string(), pa.int64())), False),
        (pa.list_(pa.struct([("s", STRUCT)])), True),
        (pa.list_(pa.struct([("l", pa.list_(STRUCT))])), True),
        (pa.map_(pa.string(), STRUCT), True),
        (pa.map_(pa.string(), pa.list_(STRUCT)), False),
        (pa.struct([("l", pa.list_(STRUCT))]), True),
        (pa.struct([("l", pa.list_(pa.int64())), ("s", STRUCT)]), False),
    ],
    ids=str,
)
def test_nested_values_of_an_iceberg_table(
    kind_of_column: pa.DataType, loses: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nulls or without, the values come back. pyiceberg loses nulls of some types: a call with a null in such a column fails."""
    sink, pick = iceberg(tmp_path), random.Random(1)
    for n, share in enumerate((0.0, 0.3)):
        column = pa.array([nested(kind_of_column, pick, share) for _ in range(40)], kind_of_column)
        rows = pa.table({"v": column})
        if share and loses:
            with pytest.raises(UsageError, match="'v' has a null instead of a list or map of structs"):
                publish(sink, hour(n), n + 1, rows)
            monkeypatch.setattr(import_module("cairn.sinks.iceberg"), "_loses_nulls", lambda column: False)
        publish(sink, hour(n), n + 1, rows)
        # The refusal can go as soon as pyiceberg keeps these nulls.
        same = hash_of_rows(sink.rows(hour(n), rows.schema)) == hash_of_rows(rows)
        assert same != bool(share and loses)


def nested(kind: pa.DataType, pick: random.Random, nulls: float) -> Any:
    if pick.random() < nulls:
        return None
    if pa.types.is_list(kind):
        return [nested(kind.value_type, pick, nulls) for _ in range(pick.randrange(3))]
    if pa.types.is_map(kind):
        return [(f"k{n}", nested(kind.item_type, pick, nulls)) for n in range(pick.randrange(3))]
    if pa.types.is_struct(kind):
        return {field.name: nested(field.type, pick, nulls) for field in kind}
    return pick.randrange(9)


@pytest.mark.s3
@pytest.mark.long("seconds", runs_in="ci")
@pytest.mark.parametrize("catalog_type", ["sql", "glue"])
def test_an_iceberg_table_on_s3(catalog_type: str, tmp_path: Path) -> None:
    """moto stands in for S3 and Glue. It ignores the version that Glue compares in a commit, so no calls overtake each other here."""
    if catalog_type == "glue" and SEAWEEDFS:
        pytest.skip("SeaweedFS has no Glue")
    with s3_server() as server:
        keys = {
            "access-key-id": "tests",
            "secret-access-key": "tests",
            "region": "us-east-1",
            "endpoint": server.server_url,
        }
        given = {f"{service}.{name}": value for service in ("s3", "glue") for name, value in keys.items()}
        given |= {
            "type": catalog_type,
            "uri": f"sqlite:///{tmp_path}/catalog.db",
            "warehouse": f"s3://{BUCKET}/warehouse",
        }
        with load_catalog("tests", **given) as opened:
            opened.create_namespace("shop")
        sink = sinks.iceberg("shop.clicks", "tests", given)
        rows = pa.table({"user": ["ann", "bob"], "clicks": [1, 2]})
        for interval, n, made in (
            (hour(0), 1, rows),
            (hour(1), 2, rows),
            (hour(0, 2), 3, rows.slice(0, 1)),
            (hour(1), 2, rows),
            (hour(2), 4, rows.slice(0, 0)),
            (hour(3), 5, pa.table({"user": ["cid"], "more": [0.5]})),
        ):
            publish(sink, interval, n, made)
        assert sink.row_counts() == {hour(0, 2): 1, hour(3): 1}
        assert hash_of_rows(sink.rows(hour(0, 2), rows.schema)) == hash_of_rows(rows.slice(0, 1))
        sink.clear(OWNER)
        publish(sink, hour(1), 2, rows)
        assert sink.row_counts() == {hour(1): 2}


def test_a_namespace_that_the_iceberg_catalog_lacks(tmp_path: Path) -> None:
    sink = sinks.iceberg("nowhere.clicks", "tests", iceberg_properties(tmp_path))
    with pytest.raises(UsageError, match=r"'tests' has no namespace 'nowhere'(?s:.*)create_namespace\('nowhere'\)"):
        publish(sink, hour(0), 1, pa.table({"user": ["ann"]}))
