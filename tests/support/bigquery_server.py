"""A server that answers the requests of `cairn.sinks.bigquery` as BigQuery's REST API does, and runs its statements in DuckDB.

The server is a stand-in for BigQuery, which no test can reach. It knows only the statements that the sink sends, and refuses all others.
The rules of transactions are those of BigQuery's documentation. A transaction reads one snapshot. It is aborted if another transaction
has updated or deleted rows of the same table since its snapshot, or has done so and is still open. Inserts never conflict, and a
statement that changes no row doesn't either.
"""

from __future__ import annotations

import base64
import io
import json
import math
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from email.parser import BytesParser
from email.policy import HTTP
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

PROJECT, DATASET, LOCATION = "shop-prod", "shop", "europe-west3"
_DUCKDB = {
    "BOOLEAN": "BOOLEAN",
    "INTEGER": "BIGINT",
    "FLOAT": "DOUBLE",
    "NUMERIC": "DECIMAL(38,9)",
    # DuckDB's decimals have 38 digits at most.
    "BIGNUMERIC": "VARCHAR",
    "STRING": "VARCHAR",
    "BYTES": "BLOB",
    "DATE": "DATE",
    "TIMESTAMP": "TIMESTAMPTZ",
    "DATETIME": "TIMESTAMP",
}
_PARQUET = {
    "BOOLEAN": pa.bool_(),
    "INTEGER": pa.int64(),
    "FLOAT": pa.float64(),
    "NUMERIC": pa.decimal128(38, 9),
    "BIGNUMERIC": pa.decimal256(76, 38),
    "STRING": pa.string(),
    "BYTES": pa.binary(),
    "DATE": pa.date32(),
    "TIMESTAMP": pa.timestamp("us", "UTC"),
    "DATETIME": pa.timestamp("us"),
}
_WIDER = {"INTEGER": ("NUMERIC", "BIGNUMERIC", "FLOAT"), "NUMERIC": ("BIGNUMERIC", "FLOAT"), "BIGNUMERIC": ("FLOAT",)}
_OF_SQL = {"INT64": "INTEGER", "FLOAT64": "FLOAT"}
_T, _C = rf"`{PROJECT}\.{DATASET}\.([\w-]+)`", r"(?:`[^`]+`|interval_start|interval_end)"
_NEAR = r"interval_start = @start\d* AND interval_end = @end\d*"
_SELECTS = (
    rf"SELECT (?P<names>pipeline, interval_start, interval_end, checkpoint_id) FROM {_T} WHERE interval_start IS NULL"
    r"(?: OR interval_start < @end AND interval_end > @start)?",
    rf"SELECT (?P<names>interval_start, interval_end, COUNT\(\*\)) FROM {_T} GROUP BY 1, 2",
    rf"SELECT (?P<names>NULL, NULL, COUNT\(\*\)) FROM {_T}",
    rf"SELECT (?P<names>{_C}(?:, {_C})*) FROM {_T} WHERE {_NEAR}",
    rf"SELECT (?P<names>1) FROM {_T} LIMIT 1",
    rf"SELECT (?P<names>1) FROM {_T} WHERE SAFE_CAST\(CAST\({_C} AS FLOAT64\) AS (?:INT64|NUMERIC)\) IS DISTINCT FROM {_C} LIMIT 1",
)
_CREATE = (
    rf"CREATE TABLE IF NOT EXISTS {_T} AS SELECT @pipeline AS pipeline, CAST\(NULL AS TIMESTAMP\) AS interval_start, "
    r"CAST\(NULL AS TIMESTAMP\) AS interval_end, 0 AS checkpoint_id"
)
_ALTER = rf"ALTER TABLE {_T} ALTER COLUMN ({_C}) SET DATA TYPE (\w+)"
_LOCK = rf"UPDATE {_T} SET checkpoint_id = checkpoint_id \+ 1, pipeline = @pipeline WHERE interval_start IS NULL AND pipeline = @stored AND checkpoint_id = @count"
_CHANGES = (
    rf"DELETE FROM {_T} WHERE {_NEAR}(?: OR {_NEAR})*",
    rf"DELETE FROM {_T} WHERE interval_start IS NOT NULL",
    rf"TRUNCATE TABLE {_T}",
    rf"UPDATE {_T} SET checkpoint_id = @checkpoint WHERE {_NEAR}",
)
_INSERTS = (
    rf"INSERT INTO {_T} \(pipeline, interval_start, interval_end, checkpoint_id\) VALUES \(@pipeline, @start, @end, @checkpoint\)",
    rf"INSERT INTO {_T} \((?P<names>{_C}(?:, {_C})*)\) SELECT (?P<staged>c\d+(?:, c\d+)*) FROM {_T}",
)
_SCRIPT = re.compile(
    rf"BEGIN TRANSACTION;\n(?P<lock>{_LOCK});\nIF @@row_count != 1 THEN RAISE USING MESSAGE = '(?P<message>[^']*)'; END IF;\n"
    r"(?P<changes>(?:.*;\n)+)COMMIT TRANSACTION;\n"
)
_PATH = re.compile(r"(?P<upload>/upload)?/bigquery/v2/projects/(?P<project>[^/]+)/(?P<rest>[^?]+)")


class Refused(Exception):
    """An answer with an error."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason

    def body(self) -> dict[str, Any]:
        errors = [{"reason": self.reason, "message": str(self)}]
        return {"error": {"code": self.code, "message": str(self), "errors": errors}}


@dataclass
class Table:
    """What BigQuery knows of a table; its rows are in DuckDB. `changed`: the transaction that last updated or deleted rows."""

    resource: dict[str, Any]
    changed: int = 0
    changing: int | None = None

    @property
    def fields(self) -> list[dict[str, Any]]:
        return list(self.resource["schema"]["fields"])


@dataclass
class Job:
    resource: dict[str, Any]
    done: threading.Event = field(default_factory=threading.Event)
    fields: list[dict[str, Any]] = field(default_factory=list)
    rows: list[Any] = field(default_factory=list)
    error: Refused | None = None


@dataclass(frozen=True)
class Request:
    method: str
    target: str
    body: bytes
    headers: Any


def client_of(url: str) -> Any:
    """Return a client without credentials that sends its requests to the server at `url`."""
    from google.api_core.client_options import ClientOptions
    from google.auth.credentials import AnonymousCredentials
    from google.cloud import bigquery

    options = ClientOptions(api_endpoint=url)
    return bigquery.Client(project=PROJECT, credentials=AnonymousCredentials(), client_options=options)


class BigQueryServer:
    """The server.

    Attributes:
        requests: Method and path of each request.
        lose: Which requests lose their answer or are lost: called with the request's number and `before` or `after`.
        answer_instead: Called with the request's number and the request. A returned status and reason is the answer; the request has no effect.
        at_statement: Called before each statement of a transaction, with its text.
    """

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.lose: Callable[[int, str], bool] = lambda number, when: False
        self.answer_instead: Callable[[int, Request], tuple[int, str] | None] = lambda number, request: None
        self.at_statement: Callable[[str], None] = lambda text: None
        self.rows_of_a_page = 3
        self.jobs: dict[str, Job] = {}
        self.tables: dict[str, Table] = {}
        self.uploads: dict[str, tuple[dict[str, Any], bytearray]] = {}
        self.database = duckdb.connect()
        self._lock, self._transactions = threading.RLock(), 0
        self._threads: list[threading.Thread] = []
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._serving = threading.Thread(target=self._http.serve_forever, args=(0.02,))

    def __enter__(self) -> BigQueryServer:
        self._serving.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._serving.join()
        self.wait()
        self.database.close()

    def wait(self) -> None:
        """Wait until no job runs."""
        while self._threads:
            self._threads.pop().join()

    def client(self) -> Any:
        """A client without credentials, whose requests go to this server."""
        return client_of(self.url)

    def rows(self, name: str, columns: list[str]) -> list[tuple[Any, ...]]:
        """Return the rows of a table, sorted; none if there is no table or it lacks the columns."""
        if not {*columns} <= {one["name"] for one in self.tables[name].fields} if name in self.tables else True:
            return []
        found = self.database.cursor().execute(
            "SELECT {} FROM {}".format(*(", ".join(f'"{c}"' for c in columns), f'"{name}"'))
        )
        rows = [tuple(v.astimezone(UTC) if isinstance(v, datetime) else v for v in row) for row in found.fetchall()]
        return sorted(rows, key=lambda row: [(value is not None, value) for value in row])

    def forget(self) -> None:
        """Delete all tables, jobs and faults."""
        self.wait()
        for name in self.tables:
            self.database.execute(f'DROP TABLE "{name}"')
        for kept in (self.tables, self.jobs, self.uploads, self.requests):
            kept.clear()
        self.lose = lambda number, when: False
        self.answer_instead = lambda number, request: None
        self.at_statement = lambda text: None

    def answer(self, request: Request) -> tuple[int, dict[str, str], Any]:
        url = urlsplit(request.target)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        match = _PATH.fullmatch(url.path)
        if match is None or match["project"] != PROJECT:
            raise Refused(404, "notFound", f"Not found: {request.target}")
        if match["upload"]:
            return self._upload(request, query)
        body = json.loads(request.body) if request.body else {}
        match request.method, match["rest"].split("/"):
            case "GET", ["datasets", name]:
                if name != DATASET:
                    raise Refused(404, "notFound", f"Not found: Dataset {PROJECT}:{name}")
                reference = {"projectId": PROJECT, "datasetId": name}
                return 200, {}, {"datasetReference": reference, "location": LOCATION}
            case "POST", ["datasets", "shop", "tables"]:
                return 200, {}, self._create(body)
            case "GET", ["datasets", "shop", "tables", name]:
                return 200, {}, self._table(name).resource
            case "PATCH", ["datasets", "shop", "tables", name]:
                return 200, {}, self._patch(name, body, request.headers.get("If-Match"))
            case "DELETE", ["datasets", "shop", "tables", name]:
                with self._lock:
                    self._table(name)
                    self.database.cursor().execute(f'DROP TABLE "{name}"')
                    del self.tables[name]
                return 204, {}, None
            case "POST", ["jobs"]:
                return 200, {}, self._start(body, None)
            case "GET", ["jobs", job_id]:
                job = self._job(job_id, query)
                job.done.wait(10)
                return 200, {}, job.resource
            case "GET", ["queries", job_id]:
                return 200, {}, self._results(self._job(job_id, query), query)
        raise Refused(501, "notImplemented", f"the stand-in does not know {request.method} {request.target}")

    def _job(self, job_id: str, query: dict[str, str]) -> Job:
        if job_id not in self.jobs or query.get("location") != LOCATION:
            raise Refused(404, "notFound", f"Not found: Job {PROJECT}:{job_id}")
        return self.jobs[job_id]

    def _table(self, name: str) -> Table:
        if name not in self.tables:
            raise Refused(404, "notFound", f"Not found: Table {PROJECT}:{DATASET}.{name}")
        return self.tables[name]

    def _create(self, body: dict[str, Any]) -> dict[str, Any]:
        name = body["tableReference"]["tableId"]
        with self._lock:
            if name in self.tables:
                raise Refused(409, "duplicate", f"Already Exists: Table {PROJECT}:{DATASET}.{name}")
            columns = ", ".join(f'"{one["name"]}" {_duckdb_type(one)}' for one in body["schema"]["fields"])
            self.database.cursor().execute(f'CREATE TABLE "{name}" ({columns})')
            body["tableReference"] = {"projectId": PROJECT, "datasetId": DATASET, "tableId": name}
            self.tables[name] = Table(body | {"etag": uuid.uuid4().hex, "type": "TABLE"})
            return self.tables[name].resource

    def _patch(self, name: str, body: dict[str, Any], etag: str | None) -> dict[str, Any]:
        with self._lock:
            table = self._table(name)
            if etag is not None and etag != table.resource["etag"]:
                raise Refused(412, "conditionNotMet", "Precondition check failed.")
            assert body.keys() <= {"schema", "etag"}, body
            self._add(f'ALTER TABLE "{name}" ADD COLUMN ', table.fields, body["schema"]["fields"])
            table.resource |= {"schema": body["schema"], "etag": uuid.uuid4().hex}
            return table.resource

    def _add(self, start: str, old: list[dict[str, Any]], new: list[dict[str, Any]]) -> None:
        """Add columns and fields. All other changes of a schema are refused."""
        if [one["name"] for one in new][: len(old)] != [one["name"] for one in old]:
            raise Refused(400, "invalid", "Provided Schema does not match Table: a field is missing or has moved")
        for before, after in zip(old, new, strict=False):
            if (before["type"], _mode(before)) != (after["type"], _mode(after)):
                raise Refused(400, "invalid", f"Field {after['name']} has changed type")
            inner = f'{start}"{before["name"]}".' + ('"element".' if _mode(before) == "REPEATED" else "")
            self._add(inner, before.get("fields", []), after.get("fields", []))
        for added in new[len(old) :]:
            self.database.cursor().execute(f'{start}"{added["name"]}" {_duckdb_type(added)}')

    def _start(self, body: dict[str, Any], data: bytes | None) -> dict[str, Any]:
        reference, configuration = body["jobReference"], body["configuration"]
        job_id = reference["jobId"]
        if reference["location"] != LOCATION:
            raise Refused(
                404, "notFound", f"Not found: Dataset {PROJECT}:{DATASET} was not found in {reference['location']}"
            )
        with self._lock:
            if job_id in self.jobs:
                raise Refused(409, "duplicate", f"Already Exists: Job {PROJECT}:{LOCATION}.{job_id}")
            resource = body | {"id": job_id, "status": {"state": "RUNNING"}, "statistics": {}}
            job = self.jobs[job_id] = Job(resource)
        if data is None:
            assert configuration["query"]["useLegacySql"] is False
        run = self._query if data is None else self._load

        def work() -> None:
            try:
                run(job, configuration, data)
            except Refused as error:
                job.error = error
            except duckdb.Error as error:
                job.error = Refused(400, "invalidQuery", f"Query error: {error}")
            status = {"state": "DONE"}
            if job.error is not None:
                status |= {"errorResult": {"reason": job.error.reason, "message": str(job.error)}}
            job.resource = job.resource | {"status": status}
            job.done.set()

        thread = threading.Thread(target=work)
        self._threads.append(thread)
        thread.start()
        return resource  # The job may have ended already: then `job.resource` would save the client a request.

    def _results(self, job: Job, query: dict[str, str]) -> dict[str, Any]:
        job.done.wait(10)
        if job.error is not None:
            raise job.error
        if not job.fields:  # A script or DDL without a result.
            return {"jobReference": job.resource["jobReference"], "jobComplete": True}
        start, most = int(query.get("pageToken", 0)), int(query.get("maxResults", self.rows_of_a_page))
        end = start + min(most, self.rows_of_a_page)
        assert query.get("formatOptions.useInt64Timestamp", "true").lower() == "true"
        found = {
            "jobReference": job.resource["jobReference"],
            "jobComplete": True,
            "totalRows": str(len(job.rows)),
            "schema": {"fields": job.fields},
            "rows": [_json_row(row, job.fields) for row in job.rows[start:end]],
        }
        return found | ({"pageToken": str(end)} if end < len(job.rows) else {})

    def _upload(self, request: Request, query: dict[str, str]) -> tuple[int, dict[str, str], Any]:
        if query["uploadType"] == "multipart":
            head = f"Content-Type: {request.headers['Content-Type']}\r\n\r\n".encode()
            body, data = BytesParser(policy=HTTP).parsebytes(head + request.body).iter_parts()  # type: ignore[attr-defined]
            return 200, {}, self._start(json.loads(body.get_content()), data.get_payload(decode=True))
        if request.method == "POST":
            session = uuid.uuid4().hex
            self.uploads[session] = json.loads(request.body), bytearray()
            return 200, {"Location": f"{self.url}{request.target}&upload_id={session}"}, None
        body, received = self.uploads[query["upload_id"]]
        span = re.fullmatch(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)", request.headers["Content-Range"])
        assert span is not None
        if span[1] is not None:
            # A part may come again if its answer was lost.
            assert int(span[1]) <= len(received)
            received[int(span[1]) :] = request.body
        if span[2] == "*" or len(received) < int(span[2]):
            return 308, {"Range": f"bytes=0-{len(received) - 1}"} if received else {}, None
        return 200, {}, self._start(body, bytes(received))

    def _load(self, job: Job, configuration: dict[str, Any], data: bytes | None) -> None:
        load = configuration["load"]
        assert load["sourceFormat"] == "PARQUET" and load["createDisposition"] == "CREATE_NEVER"
        assert load["writeDisposition"] == "WRITE_EMPTY" and load["parquetOptions"]["enableListInference"] is True
        name, fields = load["destinationTable"]["tableId"], load["schema"]["fields"]
        rows = pq.read_table(io.BytesIO(data or b""))
        assert rows.column_names == [one["name"] for one in fields]
        for one in fields:
            if rows.schema.field(one["name"]).type != _parquet_type(one):
                raise Refused(400, "invalid", f"Field {one['name']}: Parquet has {rows.schema.field(one['name']).type}")
        with self._lock:
            table, cursor = self._table(name), self.database.cursor()
            if [_shape(one) for one in table.fields] != [_shape(one) for one in fields]:
                raise Refused(400, "invalid", f"Provided Schema does not match Table {name}")
            if cursor.execute(f'SELECT 1 FROM "{name}" LIMIT 1').fetchone():
                raise Refused(409, "duplicate", f"Already Exists: Table {name}")
            columns = {
                one["name"]: pa.array(
                    [_stored(v, one) for v in rows[one["name"]].to_pylist()], _parquet_type(one, pa.string())
                )
                for one in fields
            }
            cursor.register("loaded", pa.table(columns))
            cursor.execute(f'INSERT INTO "{name}" SELECT * FROM loaded')
        job.resource |= {"statistics": {"load": {"outputRows": str(len(rows))}}}

    def _query(self, job: Job, configuration: dict[str, Any], data: None) -> None:
        query = configuration["query"]
        text, parameters = query["query"], {one["name"]: _parameter(one) for one in query.get("queryParameters", [])}
        cursor = self.database.cursor()
        for shape in _SELECTS:
            if match := re.fullmatch(shape, text):
                name = match[2]
                table = self._table(name)
                job.rows = _run(cursor, text, parameters).fetchall()
                names = [part.strip("`") for part in match["names"].split(", ")]
                known = {one["name"].lower(): one for one in table.fields}
                job.fields = [
                    known.get(part.lower(), {"name": f"f{n}_", "type": "INTEGER"}) for n, part in enumerate(names)
                ]
                return
        if match := re.fullmatch(_CREATE, text):
            with self._lock:
                if match[1] not in self.tables:
                    kinds = {
                        "pipeline": "STRING",
                        "interval_start": "TIMESTAMP",
                        "interval_end": "TIMESTAMP",
                        "checkpoint_id": "INTEGER",
                    }
                    fields = [{"name": name, "type": kind} for name, kind in kinds.items()]
                    self._create({"tableReference": {"tableId": match[1]}, "schema": {"fields": fields}})
                    cursor.execute(f'INSERT INTO "{match[1]}" VALUES (?, NULL, NULL, 0)', [parameters["pipeline"]])
            return
        if match := re.fullmatch(_ALTER, text):
            self._alter(match[1], match[2].strip("`"), _OF_SQL.get(match[3], match[3]))
            return
        match = _SCRIPT.fullmatch(text)
        if match is None:
            raise Refused(400, "invalidQuery", f"the stand-in does not know this statement: {text}")
        self._script(cursor, match, parameters)

    def _alter(self, name: str, column: str, kind: str) -> None:
        with self._lock:
            table = self._table(name)
            fields = [dict(one) for one in table.fields]
            (found,) = (one for one in fields if one["name"].lower() == column.lower())
            if kind not in _WIDER.get(found["type"], ()):
                raise Refused(
                    400, "invalidQuery", f"ALTER TABLE ALTER COLUMN SET DATA TYPE from {found['type']} to {kind}"
                )
            self.database.cursor().execute(f'ALTER TABLE "{name}" ALTER COLUMN "{column}" TYPE {_DUCKDB[kind]}')
            found["type"] = kind
            table.resource |= {"schema": {"fields": fields}, "etag": uuid.uuid4().hex}

    def _script(self, cursor: duckdb.DuckDBPyConnection, match: re.Match[str], parameters: dict[str, Any]) -> None:
        with self._lock:
            self._transactions += 1
            snapshot = own = self._transactions
            cursor.execute("BEGIN TRANSACTION")
            # DuckDB takes its snapshot at the first statement.
            for name in self.tables:
                cursor.execute(f'SELECT 1 FROM "{name}" LIMIT 1').fetchall()
        changed: set[str] = set()
        try:
            for n, text in enumerate([match["lock"], *match["changes"].removesuffix(";\n").split(";\n")]):
                self.at_statement(text)
                rows = self._change(cursor, text, parameters, snapshot, own, changed)
                if n == 0 and rows != 1:
                    raise Refused(400, "invalidQuery", f"Query error: {match['message']} at [3:29]")
            self.at_statement("COMMIT TRANSACTION")
            with self._lock:
                cursor.execute("COMMIT")
                self._transactions += 1
                for name in changed & self.tables.keys():
                    self.tables[name].changed = self._transactions
        except BaseException as error:
            with self._lock:
                cursor.execute("ROLLBACK")
            if isinstance(error, duckdb.TransactionException):
                raise _aborted("another table", own) from error
            raise
        finally:
            with self._lock:
                for table in self.tables.values():
                    table.changing = None if table.changing == own else table.changing

    def _change(
        self,
        cursor: duckdb.DuckDBPyConnection,
        text: str,
        parameters: dict[str, Any],
        snapshot: int,
        own: int,
        changed: set[str],
    ) -> int:
        with self._lock:
            for shape in (_LOCK, *_CHANGES):
                if match := re.fullmatch(shape, text):
                    table = self._table(match[1])
                    # Rows that a later transaction has changed, or changes, are not in this transaction's snapshot.
                    where = text[text.index(" WHERE ") :] if " WHERE " in text else ""
                    now = _run(
                        self.database.cursor(),
                        f"SELECT count(*) FROM `{PROJECT}.{DATASET}.{match[1]}`{where}",
                        parameters,
                    )
                    seen = _run(cursor, f"SELECT count(*) FROM `{PROJECT}.{DATASET}.{match[1]}`{where}", parameters)
                    if (now.fetchall(), seen.fetchall()) != ([(0,)], [(0,)]):
                        if table.changed > snapshot or table.changing not in (None, own):
                            raise _aborted(match[1], own)
                        table.changing = own
                        changed.add(match[1])
                    if text.startswith("TRUNCATE"):
                        text = text.replace("TRUNCATE TABLE", "DELETE FROM")
                    return int(_run(cursor, text, parameters).fetchall()[0][0])
            for shape in _INSERTS:
                if match := re.fullmatch(shape, text):
                    table = self._table(match[1])
                    if "names" in match.groupdict():
                        self._check_types(table, match)
                    return int(_run(cursor, text, parameters).fetchall()[0][0])
        raise Refused(400, "invalidQuery", f"the stand-in does not know this statement: {text}")

    def _check_types(self, table: Table, match: re.Match[str]) -> None:
        """BigQuery converts some types; the sink needs no conversion."""
        there = {one["name"].lower(): one for one in table.fields}
        staged = {one["name"]: one for one in self._table(match[4]).fields}
        for name, part in zip(match["names"].split(", "), match["staged"].split(", "), strict=True):
            column = there.get(name.strip("`").lower())
            if column is None or _shape(column)[1:] != _shape(staged[part])[1:]:
                raise Refused(400, "invalidQuery", f"Query column {part} can't be inserted into column {name}")


def _aborted(name: str, transaction: int) -> Refused:
    text = f"Transaction is aborted due to concurrent update against table {PROJECT}:{DATASET}.{name}. Transaction ID: {transaction}"
    return Refused(400, "invalidQuery", text)


def _run(cursor: duckdb.DuckDBPyConnection, text: str, parameters: dict[str, Any]) -> duckdb.DuckDBPyConnection:
    for old, new in (
        ("SAFE_CAST", "TRY_CAST"),
        ("FLOAT64", "DOUBLE"),
        ("INT64", "BIGINT"),
        ("AS NUMERIC", "AS DECIMAL(38,9)"),
    ):
        text = text.replace(old, new)
    text = re.sub(rf"`{PROJECT}\.{DATASET}\.([\w-]+)`", r'"\1"', text)
    text = re.sub(r"`([^`]+)`", r'"\1"', text)
    text = re.sub(r"@(\w+)", r"$\1", text)
    return cursor.execute(text, {name: value for name, value in parameters.items() if re.search(rf"\${name}\b", text)})


def _mode(column: dict[str, Any]) -> str:
    return str(column.get("mode", "NULLABLE"))


def _shape(column: dict[str, Any]) -> tuple[Any, ...]:
    parts = tuple(_shape(part) for part in column.get("fields", []))
    return column["name"].lower(), column["type"], _mode(column) == "REPEATED", parts


def _duckdb_type(column: dict[str, Any]) -> str:
    parts = ", ".join(f'"{part["name"]}" {_duckdb_type(part)}' for part in column.get("fields", []))
    kind = f"STRUCT({parts})" if column["type"] == "RECORD" else _DUCKDB[column["type"]]
    return f"{kind}[]" if _mode(column) == "REPEATED" else kind


def _parquet_type(column: dict[str, Any], of_bignumeric: pa.DataType | None = None) -> pa.DataType:
    parts = [(part["name"], _parquet_type(part, of_bignumeric)) for part in column.get("fields", [])]
    kind = pa.struct(parts) if column["type"] == "RECORD" else _PARQUET[column["type"]]
    kind = of_bignumeric or kind if column["type"] == "BIGNUMERIC" else kind
    return pa.list_(pa.field("element", kind)) if _mode(column) == "REPEATED" else kind


def _stored(value: Any, column: dict[str, Any]) -> Any:
    """A value of Parquet as BigQuery stores it: a null list is an empty list, and a null in a list is an error."""
    if _mode(column) == "REPEATED":
        if None in (value or []):
            raise Refused(400, "invalid", f"Only optional fields can be set to NULL. Field: {column['name']}")
        return [_stored(part, column | {"mode": "NULLABLE"}) for part in value or []]
    if value is None:
        return None
    if column["type"] == "RECORD":
        return {part["name"]: _stored(value[part["name"]], part) for part in column["fields"]}
    return _digits(value) if column["type"] == "BIGNUMERIC" else value


def _digits(value: Decimal) -> str:
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _parameter(given: dict[str, Any]) -> Any:
    value = given["parameterValue"]["value"]
    match given["parameterType"]["type"]:
        case "INT64":
            return int(value)
        case "TIMESTAMP":
            return datetime.fromisoformat(value)
    return value


def _json_row(row: tuple[Any, ...], fields: list[dict[str, Any]]) -> dict[str, Any]:
    return {"f": [{"v": _json_value(value, column)} for value, column in zip(row, fields, strict=True)]}


def _json_value(value: Any, column: dict[str, Any]) -> Any:
    if _mode(column) == "REPEATED":
        return [{"v": _json_value(part, column | {"mode": "NULLABLE"})} for part in value or []]
    match value:
        case None:
            return None
        case dict():
            return _json_row(tuple(value[part["name"]] for part in column["fields"]), column["fields"])
        case bool():
            return str(value).lower()
        case float():
            return (
                repr(value)
                if math.isfinite(value)
                else {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN"}[str(value)]
            )
        case Decimal():
            return _digits(value)
        case bytes():
            return base64.b64encode(value).decode()
        case datetime() if value.tzinfo is not None:
            since = value.astimezone(UTC) - datetime(1970, 1, 1, tzinfo=UTC)
            return str((since.days * 86_400 + since.seconds) * 10**6 + since.microseconds)
        case datetime():
            return value.isoformat()
    return str(value)


def _handler(server: BigQueryServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # Else each answer waits 40 ms for an acknowledgement of its head.

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

        def _handle(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            request = Request(self.command, self.path, body, self.headers)
            number = len(server.requests)
            server.requests.append(f"{self.command} {urlsplit(self.path).path}")
            if server.lose(number, "before"):
                self.close_connection = True
                return
            try:
                instead = server.answer_instead(number, request)
                if instead is not None:
                    raise Refused(*instead, f"answer {instead} instead")
                status, headers, answer = server.answer(request)
            except Refused as refused:
                status, headers, answer = refused.code, {}, refused.body()
            if server.lose(number, "after"):
                self.close_connection = True
                return
            data = b"" if answer is None else json.dumps(answer).encode()
            self.send_response(status)
            for name, value in {
                "Content-Type": "application/json",
                "Content-Length": str(len(data)),
                **headers,
            }.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _handle

    return Handler


@contextmanager
def bigquery_server() -> Iterator[BigQueryServer]:
    with BigQueryServer() as server:
        yield server
