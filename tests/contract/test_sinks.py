"""Every sink of `cairn.sinks` against a real table: after any history the table has the rows of `output_files`."""

from __future__ import annotations

import os
import random
import re
import uuid
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from importlib import import_module
from pathlib import Path
from typing import Any

import deltalake
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from psycopg.conninfo import make_conninfo
from pyiceberg.catalog import load_catalog

from cairn import Interval, sinks
from cairn.errors import SinkFailed, StateUnusable, UsageError
from cairn.sinks.postgres import wider_type
from cairn.sinks.table_sink import Owner, Publication, TableSink, hash_of_rows, owner_of
from cairn.testing import PipelineTester
from state_backend.checkpoint.rewind import rewind
from state_backend.values.records import Permissions, RunRef
from tests.support.bigquery_server import BigQueryServer
from tests.support.clicks_pipeline import ANYTHING, Rows, by_interval, current, expected, kill, restored, run_of
from tests.support.clicks_table import HOUR, OWNER, SCHEMA, START, Made, hour, publish
from tests.support.coordinator import coordinator_of
from tests.support.sink_calls import CALLS
from tests.support.tiers import ALL, REPOSITORY, at_tier


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
def test_publication_replaces_only_older_rows_of_overlapping_intervals(
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


def test_empty_publish_without_a_table_blocks_an_older_publish(sink: TableSink, read: Callable[[], Rows]) -> None:
    users = pa.table({"user": ["ann"], "clicks": [1]})
    sink.publish(Publication(OWNER, hour(0), 2))
    publish(sink, hour(0), 1, users)
    assert read() == []
    publish(sink, hour(1), 3, users)
    assert [row[2:] for row in read()] == [("ann", 1)]


@pytest.mark.parametrize("healed_by", ["the next checkpoint", "publish", "rebuild"])
def test_rows_retracted_by_a_restore_leave_the_table_even_after_a_kill(
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


def test_old_repeated_and_concurrent_publications_leave_the_newest_rows(
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
def test_table_equals_the_output_after_random_runs_restores_and_kills(
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
        runs, restores = ["late call", "hours over day", "kill"], ["restore", "restore that retracts"]
        for what in (*runs, *restores, "quarantine", "release"):
            assert SEEN[f"{kind}: {what}"] > HISTORIES // 5, (kind, what)


def test_columns_and_fields_of_the_output_are_added_to_the_table(kind: str, sink: TableSink, tmp_path: Path) -> None:
    def rows(whole: pa.DataType, a: int, more: dict[str, Any]) -> pa.Table:
        part = pa.struct([*((name, pa.string()) for name in more if name != "b"), ("p", whole)])
        value = {"p": a, "z": "x"}
        nested = {
            "s": pa.array([value, None], part),
            "l": pa.array([[value], []], pa.list_(part)),
            "m": pa.array([[("k", value)], []], pa.map_(pa.string(), part)),
        }
        money = pa.array([Decimal("1.5"), None], pa.decimal128(5, 2))
        return pa.table({"a": pa.array([a, None], whole), "d": money, **nested, **more})

    narrow = rows(pa.int32(), 1, {})
    publish(sink, hour(0), 1, narrow)
    wide = rows(pa.int64(), 2, {"b": ["x", None], "z": ["y", None]})
    if kind != "delta":  # Delta keeps the type.
        wide = wide.set_column(0, "a", pa.array([2**40, None]))
    publish(sink, hour(1), 2, wide)
    publish(sink, hour(2), 3, narrow)  # code of before runs again
    assert sink.check([Made(OWNER, hour(n), n + 1, made=a) for n, a in enumerate((narrow, wide, narrow))]) == []


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


def test_a_column_without_nulls_may_have_nulls_later(kind: str, sink: TableSink, tmp_path: Path) -> None:
    whole = pa.field("p", pa.int64(), nullable=False)
    schema = pa.schema([whole, pa.field("s", pa.struct([whole]), nullable=False)])
    full = pa.table({"p": [1], "s": [{"p": 1}]}, schema)
    nulls = pa.table({"p": pa.array([None], pa.int64()), "s": pa.array([{"p": None}], pa.struct([("p", pa.int64())]))})
    for n, rows in enumerate((full, nulls, pa.table({"a": [1]}))):
        publish(sink, hour(n), n + 1, rows)
    assert sink.row_counts() == {hour(n): 1 for n in range(3)}
    if kind == "delta":  # Old releases made columns that take no null.
        old, url = Made(OWNER, hour(0), 1, made=full).table(), f"file://{tmp_path}/old"
        deltalake.write_deltalake(
            url, old, partition_by=old.column_names[2:], description="Output of Cairn's pipeline clicks"
        )
        publish(sinks.delta(url), hour(0), 1, full)
        parts = pa.table(
            {"l": [[{"p": 1}]]},
            pa.schema([pa.field("l", pa.list_(pa.field("element", pa.struct([whole]), nullable=False)))]),
        )
        deltalake.write_deltalake(
            url2 := f"{url}2",
            Made(OWNER, hour(0), 1, made=parts).table(),
            partition_by=old.column_names[2:],
            description="Output of Cairn's pipeline clicks",
        )
        publish(sinks.delta(url2), hour(0), 1, parts)
        for rows in (full.take(pa.array([None], pa.int64())), full.drop_columns("p")):
            with pytest.raises(UsageError, match=r"(takes no null|does not fit)(?s:.*)publish --rebuild"):
                publish(sinks.delta(url), hour(1), 2, rows)


@pytest.mark.parametrize("old", [False, True])
def test_filter_of_a_delta_reader_loses_no_rows(old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink, large = sinks.delta(f"file://{tmp_path}/table"), pa.scalar(Decimal(12 * 10**18), pa.decimal128(38))
    exact = pa.scalar(Decimal("123456789012345678.12"), pa.decimal128(20, 2))
    rows = pa.table({"a": pa.array([large]), "b": pa.array([exact])})
    with monkeypatch.context() as patched:
        if old:  # The first release of the sink made the table.
            patched.setattr(import_module("cairn.sinks.delta"), "_NO_STATISTICS", {})
        publish(sink, hour(0), 1, rows)
    publish(sink, hour(1), 2, rows.append_column("n", pa.array([1])))
    there = deltalake.DeltaTable(sink.table_url()).to_pyarrow_dataset()
    for n, filtered in ((2, pc.field("a") == large), (2, pc.field("b") == exact), (1, pc.field("n").is_null())):
        assert there.count_rows(filter=filtered) == n


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
    assert hash_of_rows(found) == hash_of_rows(rows) != hash_of_rows(rows.take([0, 0, 1]))
    for name in rows.column_names:
        assert hash_of_rows(found.select([name])) == hash_of_rows(rows.select([name])), name


def test_table_url_locates_a_table(kind: str, sink: TableSink, tmp_path: Path, request: pytest.FixtureRequest) -> None:
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


def test_wrong_tables_columns_and_owners_are_refused(kind: str, sink: TableSink, tmp_path: Path) -> None:
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
    with pytest.raises(
        UsageError, match=r"column 'clicks' has the type int64, and a value of type string does not fit"
    ):
        publish(sink, hour(1), 2, pa.table({"user": ["ann"], "clicks": ["many"]}))


def test_error_names_a_column_that_the_table_can_not_hold(kind: str, sink: TableSink, tmp_path: Path) -> None:
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


def test_existing_postgres_table_keeps_its_columns_and_gets_wider_types(server: str, tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("of", "value", "fits"),
    [
        ("date", datetime(2024, 1, 1, 12), True),
        ("date", datetime(2024, 1, 1, 12, tzinfo=UTC), False),
        ("numeric(10,2)", 1.005, False),
        ("numeric(10,2)", 1.5, True),
        ("numeric(60,2)", Decimal("1.5"), True),
        ("double precision", 2**53 + 1, False),
        ("double precision", 2**53, True),
        ("bigint", "007", False),
        ("bigint", "7", True),
        ("boolean", "t", True),
        ("double precision", Decimal("1.13"), True),
        ("numeric(80,2)", 1.5, True),
        ("numeric", 1.005, True),
        ("character varying(9)", 7, True),
        ("timestamp without time zone", date(2024, 1, 1), True),
    ],
)
def test_postgres_refuses_a_value_that_a_column_would_change(server: str, of: str, value: Any, fits: bool) -> None:
    sink = sinks.postgres("typed", server)
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS typed, cairn_publications")
        connection.execute(
            f"CREATE TABLE typed (v {of}, interval_start timestamptz, interval_end timestamptz)".encode()
        )
        with nullcontext() if fits else pytest.raises(UsageError, match="does not fit"):
            publish(sink, hour(0), 1, pa.table({"v": [value]}))
        kept = connection.execute("SELECT v FROM typed").fetchall()
    assert not fits or str(kept[0][0]).lower().startswith(str(value)[:10])


def test_time_zone_and_date_style_of_a_postgres_role_do_not_change_values(server: str) -> None:
    address = make_conninfo(server, options="-c timezone=Asia/Kolkata -c datestyle=German")
    sink = sinks.postgres("dated", address)
    rows = EVERY_TYPE.select(["at", "day", "wall"])
    publish(sink, hour(0), 1, rows)
    publish(sink, hour(0), 2, rows)
    publish(sink, hour(0), 1, rows.slice(0, 1))
    assert sink.row_counts() == {hour(0): 2}
    assert hash_of_rows(sink.rows(hour(0), rows.schema)) == hash_of_rows(rows)


@pytest.mark.parametrize("shared", ["turns", "cairn_publications"], ids=["of the table", "of all tables"])
def test_postgres_publish_waits_for_the_advisory_lock_of_another_transaction(shared: str, server: str) -> None:
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS turns, cairn_publications")  # the first call creates them
    sink = sinks.postgres("turns", server)
    with ThreadPoolExecutor(2) as pool, psycopg.connect(server) as other:
        other.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (f"cairn {shared}",))
        calls = [pool.submit(publish, sink, hour(0), 1, EVERY_TYPE.select(["at"])), pool.submit(sink.clear, OWNER)]
        assert not wait(calls, 0.5).done
        other.commit()
        assert [call.result(60) for call in calls] == [None, None]


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


def test_code_examples_of_the_tables_page_run(
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
def test_error_for_a_missing_sink_library_names_the_install_command(
    library: str, extra: str, sink: TableSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, library, None)
    with pytest.raises(UsageError, match=rf"the sink needs {library}, which .* lacks; .*\[{extra}\]'"):
        sink.publish(Publication(OWNER, hour(0), 1))
