"""The BigQuery sink against the stand-in: lost requests, lost answers, aborted transactions, calls that overtake each other, and types."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import partial
from importlib import import_module
from typing import Any

import pyarrow as pa
import pytest
from google.api_core.exceptions import BadRequest
from google.auth.transport.requests import AuthorizedSession
from google.cloud.bigquery import client as library_client

from cairn import sinks
from cairn.errors import UsageError
from cairn.sinks.bigquery import wider_type
from cairn.sinks.table_sink import Publication, TableSink, hash_of_rows
from tests.support.bigquery_server import BigQueryServer, Request, bigquery_server
from tests.support.clicks_table import OWNER, Killed, die_at, hour, publish

pytestmark = pytest.mark.long("seconds for most tests", runs_in="ci")

SCRIPT = b"BEGIN TRANSACTION"
OLD = pa.table({"user": ["old"], "clicks": [0]})
NEW = pa.table({"user": ["ann", "bob"], "clicks": [1, 2]})


@pytest.fixture(scope="module")
def running() -> Iterator[BigQueryServer]:
    with bigquery_server() as server:
        yield server


@pytest.fixture
def server(running: BigQueryServer, monkeypatch: pytest.MonkeyPatch) -> BigQueryServer:
    running.forget()
    monkeypatch.setattr(import_module("cairn.sinks.bigquery"), "_WAIT_S", 0.05)
    # Google's libraries wait a second and more before they repeat a request.
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(min(seconds, 0.02)))
    return running


@pytest.fixture
def sink(server: BigQueryServer) -> TableSink:
    return sinks.bigquery("shop.clicks", server.client)


def is_script(request: Request) -> bool:
    return request.method == "POST" and SCRIPT in request.body


def staged(server: BigQueryServer) -> list[str]:
    return [name for name in server.tables if name.startswith("cairn_staged")]


@pytest.mark.parametrize("rows", [2, 0])
def test_publish_killed_at_any_request_is_completed_by_the_next_publish(
    rows: int, server: BigQueryServer, sink: TableSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sink dies before or after one of its requests. After the repeated call, the table has each row once."""
    new, done = NEW.slice(0, rows), {hour(0): rows} if rows else {}
    died, at = True, 0
    while died:
        server.forget()
        publish(sink, hour(0, 2), 1, OLD)
        with monkeypatch.context() as patched:
            die_at(patched, at, [(AuthorizedSession, "request")])
            try:
                publish(sink, hour(0), 2, new)
                died = False
            except Killed:
                server.wait()
        counts = sink.row_counts()
        assert counts in ({hour(0, 2): 1}, done), at
        assert died or counts == done
        publish(sink, hour(0, 2), 1, OLD)
        assert sink.row_counts() == counts, "an old call changed the table"
        publish(sink, hour(0), 2, new)
        assert sink.row_counts() == done, at
        left = staged(server)
        assert len(left) <= 1 and (died or not left)
        assert all(0 < int(server.tables[n].resource["expirationTime"]) / 1000 - time.time() <= 86_400 for n in left)
        before = transactions(server)
        publish(sink, hour(0), 2, new)
        publish(sink, hour(0, 2), 1, OLD)
        assert transactions(server) == before, at
        at += 1
    assert at > 12


def transactions(server: BigQueryServer) -> int:
    """The number of transactions that have committed."""
    ((count,),) = server.database.execute(
        "SELECT checkpoint_id FROM cairn_publications_clicks WHERE interval_start IS NULL"
    ).fetchall()
    return int(count)


@pytest.mark.parametrize("when", ["before", "after", "503"])
def test_lost_requests_are_retried_and_each_job_runs_once(when: str, server: BigQueryServer, sink: TableSink) -> None:
    """The client sends the request again. A job keeps its id, so each job runs once."""
    at = lost = 0
    while lost == at:
        server.forget()
        publish(sink, hour(0), 1, OLD)
        first = len(server.requests)
        if when == "503":
            server.answer_instead = lambda n, request, at=first + at: (503, "backendError") if n == at else None  # type: ignore[misc]
        else:
            server.lose = lambda n, phase, at=first + at: (n, phase) == (at, when)  # type: ignore[misc]
        publish(sink, hour(0), 2, NEW)
        lost += len(server.requests) > first + at
        at += 1
        server.wait()
        assert sink.row_counts() == {hour(0): 2}, at
        assert transactions(server) == 2, at
        assert not staged(server) or "DELETE" in server.requests[first + at - 1]
        jobs = [job for job in server.jobs.values() if "load" in job.resource["configuration"]]
        assert len(jobs) == 2, at
    assert at > 8


def test_repeated_publish_writes_nothing_and_first_deletes_no_rows(server: BigQueryServer, sink: TableSink) -> None:
    """A call that changes nothing sends one query. A first call of an interval deletes no rows: BigQuery would bill the day."""
    publish(sink, hour(0), 1, NEW)
    texts: list[str] = []
    server.at_statement = texts.append
    before = len(server.requests)
    publish(sink, hour(0), 1, NEW)
    kinds = [request.split("/")[0] + request.split("/")[-1].split("-")[0] for request in server.requests[before:]]
    assert kinds == ["GET shop", "POST jobs", *["GET cairn"] * 3] and not texts
    publish(sink, hour(1), 2, NEW)
    assert [text.split(" ")[0] for text in texts] == ["UPDATE", "INSERT", "INSERT", "COMMIT"]
    texts.clear()
    publish(sink, hour(1), 3, NEW.slice(0, 1))
    assert [text.split(" ")[0] for text in texts] == ["UPDATE", "DELETE", "INSERT", "UPDATE", "COMMIT"]
    assert not staged(server)
    table = server.tables["clicks"].resource
    assert table["timePartitioning"] == {"type": "DAY", "field": "interval_start"} and "clustering" not in table
    assert all(job.resource["jobReference"]["jobId"].startswith("cairn-") for job in server.jobs.values())


@pytest.mark.parametrize(("slow", "fast"), [(0, 2), (2, 0), (2, 1), (0, 0)])
def test_older_publish_does_not_replace_rows_of_a_newer_one_committed_meanwhile(
    slow: int, fast: int, server: BigQueryServer, sink: TableSink
) -> None:
    """Another process publishes a newer output of the interval, after this call's read and before its transaction."""
    publish(sink, hour(1), 1, OLD)
    newer = partial(publish, sink, hour(0), 3, NEW.slice(0, fast))

    def overtaken(number: int, request: Request) -> None:
        if is_script(request):
            server.answer_instead = lambda number, request: None
            newer()

    server.answer_instead = overtaken
    publish(sink, hour(0), 2, NEW.slice(0, slow))
    assert sink.row_counts() == {hour(1): 1} | ({hour(0): fast} if fast else {})
    assert not staged(server)
    refused = [str(job.error) for job in server.jobs.values() if job.error and job.error.code == 400]
    assert refused == ["Query error: Cairn: another call has changed the table at [3:29]"]


@pytest.mark.parametrize("at", ["UPDATE", "DELETE", "INSERT", "COMMIT"])
def test_concurrent_transactions_end_with_the_newer_rows(at: str, server: BigQueryServer, sink: TableSink) -> None:
    """BigQuery aborts the newer call's transaction while the older call's one is open. Then both have an effect, in this order."""
    publish(sink, hour(0), 1, OLD)
    outcome: list[Any] = []
    newer = threading.Thread(target=lambda: outcome.append(publish(sink, hour(0), 3, NEW)))

    def meanwhile(text: str) -> None:
        if text.startswith(at):
            server.at_statement = lambda text: None
            newer.start()
            if at == "UPDATE":  # The older call has changed nothing yet: the newer call wins.
                newer.join(30)
            until(lambda: bool(outcome) or any("concurrent update" in str(job.error) for job in server.jobs.values()))

    server.at_statement = meanwhile
    publish(sink, hour(0), 2, NEW.slice(0, 1))
    newer.join(30)
    assert outcome == [None] and sink.row_counts() == {hour(0): 2}
    assert transactions(server) == (2 if at == "UPDATE" else 3)
    assert not staged(server)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("first", [False, True])
def test_concurrent_publishes_of_intervals_all_succeed(server: BigQueryServer, sink: TableSink, first: bool) -> None:
    """Each transaction changes the same row, so BigQuery aborts all but one; each call tries again. First calls create each table once."""
    if not first:
        publish(sink, hour(0), 1, OLD)
    calls = [threading.Thread(target=publish, args=(sink, hour(n), n + 1, NEW)) for n in range(4)]
    for call in calls:
        call.start()
    for call in calls:
        call.join(60)
    assert sink.row_counts() == {hour(0): 2 if first else 1, **{hour(n): 2 for n in range(1, 4)}}
    assert transactions(server) == 4


def test_a_job_that_starts_late_changes_nothing(
    server: BigQueryServer, sink: TableSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request hangs in the network, its process dies, and another process publishes a newer output."""
    publish(sink, hour(0), 1, OLD)
    late: list[Request] = []

    called = AuthorizedSession.request

    def dying(self: Any, method: str, url: str, data: Any = None, **more: Any) -> Any:
        if method == "POST" and data and SCRIPT in (data if isinstance(data, bytes) else data.encode()):
            body = data if isinstance(data, bytes) else data.encode()
            late.append(Request(method, url.removeprefix(server.url), body, {}))
            raise Killed("request")
        return called(self, method, url, data=data, **more)

    with monkeypatch.context() as patched:
        patched.setattr(AuthorizedSession, "request", dying)
        with pytest.raises(Killed):
            publish(sink, hour(0), 2, NEW.slice(0, 1))
    publish(sink, hour(0), 3, NEW)
    before = server.rows("clicks", ["user"]), transactions(server)
    status, _, job = server.answer(late[0])
    server.wait()
    assert status == 200 and "another call has changed the table" in str(
        server.jobs[job["jobReference"]["jobId"]].error
    )
    assert (server.rows("clicks", ["user"]), transactions(server)) == before


def test_publish_gives_up_after_twelve_concurrent_update_errors(server: BigQueryServer, sink: TableSink) -> None:
    publish(sink, hour(0), 1, OLD)
    server.tables["cairn_publications_clicks"].changing = -1  # A transaction that never ends.
    before = len(server.jobs)
    with pytest.raises(
        BadRequest, match=r"due to concurrent update against table shop-prod:shop.cairn_publications_clicks"
    ):
        publish(sink, hour(0), 2, NEW)
    tried = [*server.jobs.values()][before:]
    assert sum("load" in job.resource["configuration"] for job in tried) == 1, "the rows are loaded once"
    assert sum(job.error is not None for job in tried) == 12
    assert sink.row_counts() == {hour(0): 1} and not staged(server)


def test_an_error_that_no_retry_heals_is_not_repeated(server: BigQueryServer, sink: TableSink) -> None:
    publish(sink, hour(0), 1, OLD)

    def refuse(number: int, request: Request) -> tuple[int, str] | None:
        return (400, "invalidQuery") if is_script(request) else None

    server.answer_instead = refuse
    before = len(server.jobs)
    with pytest.raises(BadRequest, match="invalidQuery"):
        publish(sink, hour(0), 2, NEW)
    assert len(server.jobs) == before + 2 and not staged(server)


@pytest.mark.parametrize("lose", [None, "before", "after"])
def test_a_large_file_is_sent_in_parts(
    lose: str | None, server: BigQueryServer, sink: TableSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library_client, "_MAX_MULTIPART_SIZE", 0)
    monkeypatch.setattr(library_client, "_DEFAULT_CHUNKSIZE", 256 * 1024)
    pick = random.Random(1)
    rows = pa.table({"user": [f"{pick.getrandbits(512):x}" for _ in range(6000)], "clicks": range(6000)})
    if lose:
        count = [0]

        def once(number: int, when: str) -> bool:
            if when == lose and server.requests[number].startswith("PUT"):
                count[0] += 1
            return when == lose and server.requests[number].startswith("PUT") and count[0] == 2

        server.lose = once
    publish(sink, hour(0), 1, rows)
    assert sum(request.startswith("PUT") for request in server.requests) >= 3
    assert server.rows("clicks", ["clicks"]) == [(n,) for n in range(6000)]


def test_rows_are_read_across_several_pages(server: BigQueryServer, sink: TableSink) -> None:
    rows = pa.table({"user": [f"u{n}" for n in range(11)], "clicks": range(11)})
    publish(sink, hour(0), 1, rows)
    assert hash_of_rows(sink.rows(hour(0), rows.schema)) == hash_of_rows(rows)


def of(kind: pa.DataType, *values: Any) -> pa.Table:
    return pa.table({"v": pa.array([*values], kind)})


LISTS = pa.list_(pa.int64())


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (of(LISTS, None), "'v' has a null instead of a list or map, or a null in a list"),
        (of(LISTS, [1, None]), "or a null in a list"),
        (of(pa.map_(pa.string(), LISTS), [("k", None)]), "'v' has a null instead of a list"),
        (of(pa.struct([("l", LISTS)]), {"l": None}), "'v' has a null instead of a list"),
        (of(pa.list_(LISTS), [[1]]), "no type of BigQuery for the column 'v' of type list"),
        (of(pa.struct([("l", pa.list_(LISTS))]), {"l": []}), "no type of BigQuery for the column 'v' of type struct"),
        (of(pa.struct([]), {}), "no type of BigQuery for the column 'v' of type struct"),
        (of(pa.struct([("a b", pa.int64())]), {"a b": 1}), "no type of BigQuery for the column 'v' of type struct"),
        (of(pa.uint64(), 1), "no type of BigQuery for the column 'v' of type uint64"),
        (of(pa.time64("us"), None), "no type of BigQuery for the column 'v' of type time64"),
        (of(pa.decimal256(60, 10), None), "no type of BigQuery for the column 'v' of type decimal256"),
        (of(pa.null(), None), "no type of BigQuery for the column 'v' of type null"),
        (of(pa.timestamp("ns"), 1), "'v' has the type timestamp.us., and a value of type timestamp.ns. does not fit"),
        (pa.table({"a.b": [1]}), "does not allow the name 'a.b' for a column"),
        (pa.table({"a`b": [1]}), "does not allow the name 'a`b' for a column"),
        (pa.table({"_Partitioned": [1]}), "does not allow the name '_Partitioned' for a column"),
        (
            pa.table({"user": [1], "User": [1]}),
            "ignores case in the names of columns, so it can't hold .'User', 'user'.",
        ),
    ],
    ids=str,
)
def test_values_and_column_names_that_bigquery_can_not_hold_are_refused(
    rows: pa.Table, message: str, server: BigQueryServer, sink: TableSink
) -> None:
    with pytest.raises(UsageError, match=message):
        publish(sink, hour(0), 1, rows)
    assert "clicks" not in server.tables or sink.row_counts() == {}
    assert not staged(server)
    publish(sink, hour(0), 1, NEW)
    assert sink.row_counts() == {hour(0): 2}


@pytest.mark.parametrize(
    ("kind", "column", "value"),
    [
        (pa.int8(), "INTEGER", -128),
        (pa.uint32(), "INTEGER", 2**32 - 1),
        (pa.float32(), "FLOAT", 0.1),
        (pa.decimal128(38, 9), "NUMERIC", Decimal("12345678901234567890123456789.123456789")),
        (pa.decimal128(38, 10), "BIGNUMERIC", Decimal("1234567890123456789012345678.0123456789")),
        (pa.decimal128(30, 0), "BIGNUMERIC", Decimal(10**30 - 1)),
        (pa.decimal128(38, 0), "BIGNUMERIC", Decimal(10**38 - 1)),
        (pa.large_string(), "STRING", "ä"),
        (pa.large_binary(), "BYTES", b"\0\xff"),
        (pa.timestamp("ms", "Asia/Kolkata"), "TIMESTAMP", datetime(1, 1, 1, tzinfo=UTC) + timedelta(1)),
        (pa.timestamp("us"), "DATETIME", datetime(9999, 12, 31, 23, 59, 59, 999999)),
        (pa.large_list(pa.string()), "STRING", ["a", ""]),
        (pa.map_(pa.string(), pa.map_(pa.int64(), pa.float64())), "RECORD", [("k", [(1, 0.5)]), ("l", [])]),
        (pa.struct([("s", pa.struct([("l", pa.list_(pa.date32()))]))]), "RECORD", {"s": {"l": []}}),
    ],
    ids=str,
)
def test_arrow_values_get_bigquery_column_types_and_are_read_back_unchanged(
    kind: pa.DataType, column: str, value: Any, server: BigQueryServer, sink: TableSink
) -> None:
    rows = of(kind, value) if pa.types.is_nested(kind) and not pa.types.is_struct(kind) else of(kind, value, None)
    publish(sink, hour(0), 1, rows)
    assert server.tables["clicks"].fields[0]["type"] == column
    assert hash_of_rows(sink.rows(hour(0), rows.schema)) == hash_of_rows(rows)


@pytest.mark.parametrize(
    ("wanted", "there", "becomes"),
    [
        ("INTEGER", "INTEGER", None),
        ("NUMERIC", "INTEGER", "NUMERIC"),
        ("FLOAT", "BIGNUMERIC", None),
        ("INTEGER", "FLOAT", None),
        ("NUMERIC", "BIGNUMERIC", None),
        ("STRING", "INTEGER", None),
        ("FLOAT", "STRING", None),
    ],
)
def test_a_column_gets_a_wider_type(wanted: str, there: str, becomes: str | None) -> None:
    assert wider_type(wanted, there) == becomes


def test_columns_become_wider_and_structs_gain_fields(server: BigQueryServer, sink: TableSink) -> None:
    struct, more = pa.struct([("p", pa.int64())]), pa.struct([("p", pa.int64()), ("q", pa.string())])
    outputs = [
        pa.table({"v": pa.array([5], pa.int32()), "b": [1], "s": pa.array([{"p": 1}], struct)}),
        pa.table(
            {"v": pa.array([Decimal("1.25")], pa.decimal128(9, 2)), "l": pa.array([[{"p": 1}]], pa.list_(struct))}
        ),
        pa.table({"v": [0.1], "b": pa.array([Decimal("1e-10")], pa.decimal128(20, 10)), "new": ["x"]}),
        pa.table(
            {
                "b": [0.1],
                "s": pa.array([{"p": 1, "q": "x"}], more),
                "l": pa.array([[{"p": 1, "q": "x"}]], pa.list_(more)),
            }
        ),
    ]
    again = [*outputs, *outputs]
    kinds = []
    for n, rows in enumerate(again):
        publish(sink, hour(n), n + 1, rows)
        kinds.append([one["type"] for one in server.tables["clicks"].fields[:2]])
    assert kinds == [["INTEGER", "INTEGER"], ["NUMERIC", "INTEGER"], *[["FLOAT", "BIGNUMERIC"]] * 6]
    for n, rows in enumerate(again):
        assert hash_of_rows(sink.rows(hour(n), rows.schema)) == hash_of_rows(rows), n
    with pytest.raises(
        UsageError,
        match=r"column 's' has the type struct<p: int64, q: string>, and a value of type struct<p: string> does",
    ):
        publish(sink, hour(9), 10, pa.table({"s": pa.array([{"p": "x"}])}))


def test_a_column_is_not_widened_if_its_values_would_change(server: BigQueryServer, sink: TableSink) -> None:
    publish(sink, hour(0), 1, pa.table({"v": [2**53 + 1]}))
    publish(sink, hour(1), 2, pa.table({"v": [2.0]}))
    with pytest.raises(UsageError, match="column 'v' has the type int64, and a value of type double does not fit"):
        publish(sink, hour(2), 3, pa.table({"v": [0.5]}))
    assert server.tables["clicks"].fields[0]["type"] == "INTEGER"
    assert server.rows("clicks", ["v"]) == [(2,), (2**53 + 1,)]


def test_columns_added_by_two_concurrent_publishes_are_both_kept(server: BigQueryServer, sink: TableSink) -> None:
    """The request that adds a column has the ETag of the table: BigQuery refuses the request, and the sink reads the table again."""
    publish(sink, hour(0), 1, NEW)

    def meanwhile(number: int, request: Request) -> None:
        if request.method == "PATCH":
            server.answer_instead = lambda number, request: None
            publish(sink, hour(1), 2, NEW.append_column("theirs", pa.array([1, 2])))

    server.answer_instead = meanwhile
    publish(sink, hour(2), 3, NEW.append_column("ours", pa.array([3, 4])))
    assert {"theirs", "ours"} <= {one["name"] for one in server.tables["clicks"].fields}
    assert server.rows("clicks", ["ours"])[-2:] and sink.row_counts() == {hour(n): 2 for n in range(3)}


def own_table(server: BigQueryServer, **columns: str) -> None:
    fields = [{"name": name, "type": kind} for name, kind in columns.items()]
    server._create({"tableReference": {"tableId": "clicks"}, "schema": {"fields": fields}})


def test_publish_to_an_existing_table_keeps_its_own_rows(server: BigQueryServer, sink: TableSink) -> None:
    own_table(server, note="STRING", clicks="NUMERIC")
    server.database.execute("INSERT INTO clicks VALUES ('mine', 1)")
    with pytest.raises(UsageError, match="has rows, but the sink has never written to it"):
        sink.clear(OWNER)
    assert sink.row_counts() == {None: 1}
    publish(sink, hour(0), 1, NEW)
    assert sink.row_counts() == {hour(0): 2, None: 1}
    assert hash_of_rows(sink.rows(hour(0), NEW.schema)) == hash_of_rows(NEW)
    assert [
        note for (note,) in server.database.execute("SELECT note FROM clicks WHERE note IS NOT NULL").fetchall()
    ] == ["mine"]
    sink.clear(OWNER)
    assert server.rows("clicks", ["note"]) == [] and transactions(server) == 2
    publish(sink, hour(0), 1, NEW)
    assert sink.row_counts() == {hour(0): 2}


def test_unsupported_columns_and_broken_publication_rows_are_refused(server: BigQueryServer, sink: TableSink) -> None:
    sink.clear(OWNER)
    assert sink.row_counts() == {} and not server.tables
    own_table(server, interval_start="DATE")
    sink.clear(OWNER)
    with pytest.raises(
        UsageError, match=r"'interval_start' of the table shop.clicks has the type DATE; the sink needs TIMESTAMP"
    ):
        publish(sink, hour(0), 1, NEW)
    server.forget()
    own_table(server, user="STRING")
    server.tables["clicks"].resource["schema"]["fields"][0]["type"] = "JSON"
    with pytest.raises(
        UsageError, match="column 'user' has the type JSON, which the sink can't write\nName another table"
    ):
        publish(sink, hour(0), 1, NEW)
    server.forget()
    publish(sink, hour(0), 1, NEW)
    server.database.execute("INSERT INTO cairn_publications_clicks VALUES ('clicks', NULL, NULL, 7)")
    with pytest.raises(UsageError, match="cairn_publications_clicks has 2 rows without an interval"):
        publish(sink, hour(0), 2, NEW)


def test_error_for_a_missing_dataset_names_the_command_that_creates_it(server: BigQueryServer) -> None:
    nowhere = sinks.bigquery("nowhere.clicks", server.client)
    command = re.escape("bq --location=LOCATION mk --dataset shop-prod:nowhere")
    with pytest.raises(UsageError, match=f"has no dataset shop-prod.nowhere(?s:.*)\n{command}$"):
        publish(nowhere, hour(0), 1, NEW)


def test_a_client_is_closed_after_each_call(server: BigQueryServer) -> None:
    closed: list[int] = []

    def client() -> Any:
        made = server.client()
        close = made.close
        made.close = lambda: (closed.append(1), close())
        return made

    sink = sinks.bigquery("shop-prod.shop.clicks", client)
    assert repr(sink) == "bigquery('shop-prod.shop.clicks')"
    sink.publish(Publication(OWNER, hour(0), 1))
    sink.row_counts()
    with pytest.raises(UsageError):
        sink.publish(Publication(replace(OWNER, name="others"), hour(0), 2))
    assert len(closed) == 3


def test_the_bigquery_stand_in_refuses_unknown_statements(server: BigQueryServer) -> None:
    """A statement of another shape would not be tested by the stand-in, so it fails."""
    client = server.client()
    for text in ("SELECT 1", "DROP TABLE `shop-prod.shop.clicks`", "BEGIN TRANSACTION;\nCOMMIT TRANSACTION;\n"):
        with pytest.raises(BadRequest, match="the stand-in does not know this statement"):
            client.query(text, location="europe-west3", job_retry=None).result()
    client.close()
