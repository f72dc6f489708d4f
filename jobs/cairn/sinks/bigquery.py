"""The sink for a table of BigQuery, through google-cloud-bigquery.

The table `cairn_publications_TABLE` in the same dataset holds the id of the newest checkpoint of each interval. One
more row, without an interval, holds the pipeline and counts the transactions. Two transactions conflict in BigQuery
only if both update or delete rows of one table; inserts never conflict. So each transaction first adds 1 to this row's
count, and fails if the sink has read another count before. If the sink stops:

    before the load        The table has the old rows. The next call does all of the work.
    after the load,        The table has the old rows. The staging table expires after a day. The next call does all of
    before the commit      the work.
    after the commit,      The table has the new rows. The next call finds the checkpoint's id and changes nothing.
    before the answer

A request whose answer was lost is sent again with the same job id, so the job runs once. A job that starts late, after
another call has committed, finds another count and changes nothing.
"""

from __future__ import annotations

import random
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from typing_extensions import override

from cairn.sinks.table_sink import (
    END,
    START,
    LongestName,
    Owner,
    Publication,
    TableSink,
    counts_of,
    foreign_rows,
    library,
    must_store_owner,
    with_type,
)
from state_backend.adapters.work_folders import work_folder
from state_backend.values.errors import UsageError
from state_backend.values.intervals import Interval

# Largest number of tries, if other processes commit first. The random wait grows from at most 1 s to at most 30 s.
_REFUSALS = 12
_WAIT_S, _MAX_WAIT_S = 1.0, 30.0
# Timeout of one request, in seconds. A request that starts a job returns before the job ends.
_REQUEST_S = 120
_UPLOAD_S = 600
_STAGING_LIFE = timedelta(days=1)
_IDS, _STAGED = "cairn_publications", "cairn_staged"
_LONGEST_COLUMN = LongestName("BigQuery", 300, "characters")
# BigQuery allows 1,024 bytes. The name of a staging table has `cairn_staged_`, `_` and 32 digits besides the table's.
_LONGEST_TABLE = LongestName("a sink of BigQuery", 1_024 - len(_STAGED) - 34, "bytes")
# The types to which BigQuery can widen a column of numbers. FLOAT has 53 bits, so it may lose digits.
_WIDER = {"INTEGER": ("NUMERIC", "BIGNUMERIC", "FLOAT"), "NUMERIC": ("BIGNUMERIC", "FLOAT")}
_SQL_NAMES = {"INTEGER": "INT64", "FLOAT": "FLOAT64"}
_ARROW = {
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
_TABLE = re.compile(r"(?:(?P<project>[\w.:-]+)\.)?(?P<dataset>\w+)\.(?P<table>[\w-]+)", re.ASCII)
# Matches names that a column can't have: with a forbidden character, or with a prefix that BigQuery reserves.
_NO_NAME = re.compile(
    r"""[!"$()*,./;?@\[\]\\^`{}~\n]|^$|^_(table_|file_|partition|row_timestamp|_root__|colidentifier|change_)""", re.I
)
_NO_PART = re.compile(r"\W|^\d|^$", re.ASCII)
_OVERTAKEN = "Cairn: another call has changed the table"
# The sink tries again after an error whose message contains one of these. BigQuery has no error code for these cases.
_CONFLICTS = (_OVERTAKEN, "due to concurrent update")
# The sink also tries again after these errors: too many jobs, or too many changes of one table, at the same time.
_LIMITS = ("rateLimitExceeded", "jobRateLimitExceeded", "Exceeded rate limits")


def bigquery(table: str, client: Callable[[], Any] | None = None) -> BigQuerySink:
    """Return a `Pipeline.sink` that keeps a table of BigQuery equal to the pipeline's output.

    The first call with rows creates the table: the columns of the output, `interval_start` and `interval_end`, and a
    partition for each day of `interval_start`. The sink adds columns that the output gains, and widens numbers. Structs
    become `STRUCT`, lists and maps become `ARRAY`. A table belongs to one pipeline. The dataset must exist.

    Args:
        table: `dataset.table`, or `project.dataset.table`.
        client: A function that returns a `google.cloud.bigquery.Client`. It runs in the process that calls the sink,
            and the sink closes the client. None: a client with the application default credentials, whose jobs run in
            the table's project, or else in the default project.

    Raises:
        UsageError: The name is no name of a table. A call raises this error if google-cloud-bigquery or the dataset is
            missing, if the table belongs to another pipeline, if BigQuery lacks the type of a column, or if a value
            does not fit the type of its column.

    Example:
        Pipeline(..., sink=sinks.bigquery("shop.clicks"))
    """
    return BigQuerySink(table, client)


@dataclass(frozen=True, slots=True)
class _Stored:
    """What the sink's own table stores: the owner, and the number of transactions (`count`)."""

    owner: str
    count: int = 0
    ids: Mapping[Interval, int] | None = None  # Checkpoint id of each interval that overlaps the published one.


@dataclass(frozen=True, slots=True)
class _Dataset:
    """An open client, and the location of the dataset, where its jobs run."""

    client: Any
    location: str

    def run(self, text: str, **parameters: Any) -> Any:
        bq = _bigquery()
        kinds = {str: "STRING", int: "INT64", datetime: "TIMESTAMP"}
        given = [bq.ScalarQueryParameter(name, kinds[type(value)], value) for name, value in parameters.items()]
        config = bq.QueryJobConfig(query_parameters=given, use_query_cache=False)
        job_id = _new_job_id()

        def start() -> Any:
            return self.client.query(text, config, job_id, location=self.location, timeout=_REQUEST_S, job_retry=None)

        return self.ask(job_id, start).result()

    def ask(self, job_id: str, start: Callable[[], Any]) -> Any:
        """Start a job by calling `start`, and return the job.

        If the answer to the first request was lost, the client sends the request again, and BigQuery answers with a
        conflict, since the job exists. Then this method returns that job.
        """
        from google.api_core.exceptions import Conflict

        try:
            return start()
        except Conflict:
            return self.client.get_job(job_id, location=self.location, timeout=_REQUEST_S)


class _Call:
    """The publication that a call of `publish` writes. `staged`: Name of the staging table that `_stage` makes."""

    def __init__(self, publication: Publication) -> None:
        self.publication = publication
        self.staged: str | None = None
        self.fields: list[Any] = []

    @cached_property
    def rows(self) -> pa.Table:
        rows = self.publication.table()
        for field in rows.schema:
            column_of(field)
            if any(map(_loses_nulls, rows[field.name].cast(_plain(field.type)).chunks)):
                raise UsageError(
                    f"the column {field.name!r} has a null instead of a list or map, or a null in a list, and BigQuery has no such nulls\n"
                    "Return an empty list or map instead, or leave the column out of output_schema"
                )
        twice = {name for name in rows.column_names if [*map(str.lower, rows.column_names)].count(name.lower()) > 1}
        if twice:
            raise UsageError(
                f"BigQuery ignores case in the names of columns, so it can't hold {sorted(twice)}; rename one in output_schema"
            )
        return rows


class BigQuerySink(TableSink):
    longest_column = _LONGEST_COLUMN

    def __init__(self, table: str, client: Callable[[], Any] | None) -> None:
        found = _TABLE.fullmatch(table)
        if found is None:
            raise UsageError(
                f"{table!r} is no table of BigQuery; expected dataset.table or project.dataset.table, such as shop.clicks"
            )
        _LONGEST_TABLE.check("the table", found["table"], "Give the sink a shorter name")
        self._project, self._dataset_name, self._name = found["project"], found["dataset"], found["table"]
        self._text, self._client = table, client

    def __repr__(self) -> str:
        return f"bigquery({self._text!r})"

    @override
    def publish(self, publication: Publication) -> None:
        call = _Call(publication)
        with self._open() as dataset:
            try:
                self._repeat(lambda: self._publish(dataset, call))
            finally:
                if call.staged is not None:
                    self._drop(dataset, call.staged)

    @override
    def row_counts(self) -> dict[Interval | None, int]:
        with self._open() as dataset:
            there = {field.name for field in self._fields(dataset)}
            if not there:
                return {}
            # If the table lacks these columns, there is no GROUP BY: BigQuery refuses a constant such as NULL in it.
            names, by = (f"{START}, {END}", " GROUP BY 1, 2") if {START, END} <= there else ("NULL, NULL", "")
            return counts_of(
                row.values() for row in dataset.run(f"SELECT {names}, COUNT(*) FROM {self._sql(dataset)}{by}")
            )

    @override
    def rows(self, interval: Interval, schema: pa.Schema) -> pa.Table:
        with self._open() as dataset:
            there = {field.name.lower() for field in self._fields(dataset)}
            fields = [field for field in schema if field.name.lower() in there]
            # START is selected too, because a query without any column would be an error.
            columns = ", ".join([START, *(_quote(field.name) for field in fields)])
            text = f"SELECT {columns} FROM {self._sql(dataset)} WHERE {START} = @start AND {END} = @end"
            found = [row.values() for row in dataset.run(text, start=interval.start, end=interval.end)]
        values = [pa.array([_read(row[n], f.type) for row in found], f.type) for n, f in enumerate(fields, 1)]
        return pa.table(values, schema=pa.schema(fields))

    @override
    def table_url(self) -> str:
        project = self._project
        if project is None:
            with closing(self._new_client()) as client:
                project = client.project
        return f"bigquery://{project}/{self._dataset_name}/{self._name}"

    @override
    def clear(self, owner: Owner, *, takes_over: bool = False) -> None:
        with self._open() as dataset:
            self._repeat(lambda: self._clear(dataset, owner, takes_over))

    def _repeat(self, change: Callable[[], None]) -> None:
        """Call `change`, and call it again if another process committed first or BigQuery's rate limit was reached."""
        from google.api_core.exceptions import BadRequest, Forbidden, PreconditionFailed

        for left in reversed(range(_REFUSALS)):
            try:
                return change()
            except (BadRequest, Forbidden, PreconditionFailed) as error:
                parts = {BadRequest: _CONFLICTS, Forbidden: _LIMITS}.get(type(error))
                if not left or (parts is not None and not any(part in str(error) for part in parts)):
                    raise
            time.sleep(random.uniform(0, min(_WAIT_S * 2 ** (_REFUSALS - left - 1), _MAX_WAIT_S)))

    def _publish(self, dataset: _Dataset, call: _Call) -> None:
        publication = call.publication
        interval, owner = publication.interval, publication.owner
        stored = self._read_stored(dataset, owner, interval)
        ids = (stored and stored.ids) or {}
        replaced = publication.replaces(ids)
        if replaced is None:
            return
        rows = call.rows
        if stored is None:
            stored = self._create_ids(dataset, owner)
        # Delete only the rows of intervals with a stored id. Other intervals have no rows, and BigQuery bills each
        # partition that a delete reads.
        old = sorted(replaced & ids.keys())
        changes = []
        if len(rows) or old:
            fields = self._fit(dataset, rows.schema)
            if old:
                where = " OR ".join(f"{START} = @start{n} AND {END} = @end{n}" for n in range(len(old)))
                changes.append(f"DELETE FROM {self._sql(dataset)} WHERE {where}")
            if len(rows):
                self._stage(dataset, call, fields)
                names = ", ".join(_quote(field.name) for field in fields)
                staged = ", ".join(f"c{n}" for n in range(len(fields)))
                changes.append(
                    f"INSERT INTO {self._sql(dataset)} ({names}) SELECT {staged} FROM {self._sql(dataset, call.staged)}"
                )
        own = self._sql(dataset, self._ids)
        if interval in ids:
            changes.append(f"UPDATE {own} SET checkpoint_id = @checkpoint WHERE {START} = @start AND {END} = @end")
        else:
            changes.append(
                f"INSERT INTO {own} (pipeline, {START}, {END}, checkpoint_id) VALUES (@pipeline, @start, @end, @checkpoint)"
            )
        parameters = {"start": interval.start, "end": interval.end, "checkpoint": publication.checkpoint_id}
        for n, other in enumerate(old):
            parameters |= {f"start{n}": other.start, f"end{n}": other.end}
        self._write(dataset, owner, stored, changes, parameters)

    def _clear(self, dataset: _Dataset, owner: Owner, takes_over: bool) -> None:
        stored, there = self._read_stored(dataset, owner, takes_over=takes_over), self._fields(dataset)
        if stored is None:
            if there and [*dataset.run(f"SELECT 1 FROM {self._sql(dataset)} LIMIT 1")]:
                raise foreign_rows(self._text)
            return
        changes = [f"TRUNCATE TABLE {self._sql(dataset)}"] if there else []
        changes.append(f"DELETE FROM {self._sql(dataset, self._ids)} WHERE {START} IS NOT NULL")
        self._write(dataset, owner, stored, changes, {})

    def _write(
        self, dataset: _Dataset, owner: Owner, stored: _Stored, changes: Sequence[str], parameters: Mapping[str, Any]
    ) -> None:
        """Run the SQL `changes` in one transaction. It fails if another call has committed since `stored` was read."""
        own = self._sql(dataset, self._ids)
        script = [
            "BEGIN TRANSACTION",
            f"UPDATE {own} SET checkpoint_id = checkpoint_id + 1, pipeline = @pipeline "
            f"WHERE {START} IS NULL AND pipeline = @stored AND checkpoint_id = @count",
            f"IF @@row_count != 1 THEN RAISE USING MESSAGE = '{_OVERTAKEN}'; END IF",
            *changes,
            "COMMIT TRANSACTION",
        ]
        given = {"pipeline": str(owner), "stored": stored.owner, "count": stored.count, **parameters}
        dataset.run("".join(f"{line};\n" for line in script), **given)

    def _read_stored(
        self, dataset: _Dataset, owner: Owner, interval: Interval | None = None, *, takes_over: bool = False
    ) -> _Stored | None:
        """Return what the sink's own table stores, with ids of intervals that overlap `interval`; None if missing."""
        from google.api_core.exceptions import NotFound

        near = f" OR {START} < @end AND {END} > @start" if interval else ""
        text = f"SELECT pipeline, {START}, {END}, checkpoint_id FROM {self._sql(dataset, self._ids)} WHERE {START} IS NULL{near}"
        try:
            given = {"start": interval.start, "end": interval.end} if interval else {}
            found = [row.values() for row in dataset.run(text, **given)]
        except NotFound:
            return None
        counts = [(there, n) for there, start, _, n in found if start is None]
        if len(counts) != 1:
            raise UsageError(
                f"the table {self._ids} has {len(counts)} rows without an interval, but the sink keeps one such row\n"
                f"If nobody needs the table {self._text}, delete both tables, and fill the table anew:\ncairn publish --rebuild"
            )
        ((there, count),) = counts
        # `must_store_owner` only checks the owner here. The sink's next transaction stores the owner.
        must_store_owner(there, owner, self._text, takes_over=takes_over)
        return _Stored(there, count, {Interval(start, end): n for _, start, end, n in found if start is not None})

    def _create_ids(self, dataset: _Dataset, owner: Owner) -> _Stored:
        """Create, in one statement, the sink's own table and its row without an interval."""
        from google.api_core.exceptions import Conflict

        with suppress(Conflict):  # Another process has created the table first.
            dataset.run(
                f"CREATE TABLE IF NOT EXISTS {self._sql(dataset, self._ids)} AS SELECT @pipeline AS pipeline, CAST(NULL AS TIMESTAMP) AS {START}, "
                f"CAST(NULL AS TIMESTAMP) AS {END}, 0 AS checkpoint_id",
                pipeline=str(owner),
            )
        return _Stored(str(owner))

    def _fit(self, dataset: _Dataset, schema: pa.Schema) -> list[Any]:
        """Create the table, or add columns and widen numbers to hold rows of `schema`. Return the table's columns."""
        bq, wanted = _bigquery(), [column_of(field) for field in schema]
        table = self._table(dataset)
        if table is None:
            made = bq.Table(self._reference(dataset, self._name), schema=wanted)
            made.time_partitioning = bq.TimePartitioning(type_=bq.TimePartitioningType.DAY, field=START)
            table = dataset.client.create_table(made, exists_ok=True, timeout=_REQUEST_S)
        there = {field.name.lower(): field for field in table.schema}
        for name in (START, END):
            if name in there and there[name].field_type != "TIMESTAMP":
                raise UsageError(
                    f"the column {name!r} of the table {self._text} has the type {there[name].field_type}; the sink needs TIMESTAMP\n"
                    "Name another table"
                )
        before = dict(there)
        for field in wanted:
            name = field.name.lower()
            there[name] = _with_fields(there[name], field) if name in there else field
        if there != before:
            table.schema = [*there.values()]
            # The request has the table's ETag, so BigQuery refuses it if another process has changed the table since.
            dataset.client.update_table(table, ["schema"], timeout=_REQUEST_S)
        return [self._widen(dataset, there[field.name.lower()], field) for field in wanted]

    def _widen(self, dataset: _Dataset, there: Any, wanted: Any) -> Any:
        """Widen a column of numbers if the wider type holds its stored and new values. Return the resulting column."""
        wider = wider_type(wanted.field_type, there.field_type)
        if wider is None or "REPEATED" in (there.mode, wanted.mode) or there.precision is not None:
            return there
        table, name, kind = self._sql(dataset), _quote(there.name), _SQL_NAMES.get(wider, wider)
        if wider == "FLOAT":
            old = _SQL_NAMES.get(there.field_type, there.field_type)
            changed = f"SELECT 1 FROM {table} WHERE SAFE_CAST(CAST({name} AS FLOAT64) AS {old}) IS DISTINCT FROM {name} LIMIT 1"
            if [*dataset.run(changed)]:
                return there
        dataset.run(f"ALTER TABLE {table} ALTER COLUMN {name} SET DATA TYPE {kind}")
        return _bigquery().SchemaField(there.name, wider)

    def _stage(self, dataset: _Dataset, call: _Call, fields: list[Any]) -> None:
        """Load the call's rows into a staging table with the columns `fields`, unless an earlier try has done so."""
        if call.staged is not None:
            if call.fields == fields:
                return
            # Since the earlier try, another process has widened a column. So the staging table has the wrong types.
            self._drop(dataset, call.staged)
        bq, rows = _bigquery(), call.rows
        for field, name in zip(fields, rows.column_names, strict=True):
            rows = with_type(rows, name, _plain(rows[name].type))
            rows = with_type(rows, name, _arrow_type(field))
        # BigQuery can't load every column name from a Parquet file. So the staging table has names such as `c0`.
        names = [f"c{n}" for n in range(len(fields))]
        schema = [_rename(field, name) for field, name in zip(fields, names, strict=True)]
        call.staged, call.fields = f"{_STAGED}_{self._name}_{uuid.uuid4().hex}", fields
        reference = self._reference(dataset, call.staged)
        staging = bq.Table(reference, schema=schema)
        staging.expires = datetime.now(UTC) + _STAGING_LIFE
        dataset.client.create_table(staging, exists_ok=True, timeout=_REQUEST_S)
        lists = bq.ParquetOptions()
        lists.enable_list_inference = True
        config = bq.LoadJobConfig(
            source_format=bq.SourceFormat.PARQUET,
            schema=schema,
            create_disposition=bq.CreateDisposition.CREATE_NEVER,
            # The job's id lets the load run only once. A second run would fail, because the staging table would not be
            # empty.
            write_disposition=bq.WriteDisposition.WRITE_EMPTY,
            decimal_target_types=[bq.DecimalTargetType.NUMERIC, bq.DecimalTargetType.BIGNUMERIC],
            parquet_options=lists,
        )
        with work_folder("sink") as folder:
            path = folder / "staged.parquet"
            pq.write_table(rows.rename_columns(names), path)
            job_id, size = _new_job_id(), path.stat().st_size

            def upload() -> Any:
                with path.open("rb") as file:
                    return dataset.client.load_table_from_file(
                        file,
                        reference,
                        size=size,
                        job_id=job_id,
                        job_config=config,
                        location=dataset.location,
                        timeout=_UPLOAD_S,
                    )

            dataset.ask(job_id, upload).result()

    def _drop(self, dataset: _Dataset, name: str) -> None:
        from google.api_core.exceptions import GoogleAPIError
        from requests import RequestException

        # A failed request does no harm: the staging table expires after a day.
        with suppress(GoogleAPIError, RequestException):
            dataset.client.delete_table(
                self._reference(dataset, name), not_found_ok=True, retry=None, timeout=_REQUEST_S
            )

    @contextmanager
    def _open(self) -> Iterator[_Dataset]:
        with closing(self._new_client()) as client:
            from google.api_core.exceptions import NotFound

            name = f"{self._project or client.project}.{self._dataset_name}"
            try:
                # Requests for a job need the dataset's location, unless it is in the US or the EU.
                location = client.get_dataset(name, timeout=_REQUEST_S).location
            except NotFound:
                raise UsageError(
                    f"BigQuery has no dataset {name}, so the sink can't create the table {self._text}\n"
                    f"Create the dataset in the location of your choice:\nbq --location=LOCATION mk --dataset {name.replace('.', ':')}"
                ) from None
            yield _Dataset(client, location)

    def _new_client(self) -> Any:
        bq = _bigquery()
        return bq.Client(project=self._project) if self._client is None else self._client()

    @property
    def _ids(self) -> str:
        return f"{_IDS}_{self._name}"

    def _reference(self, dataset: _Dataset, name: str) -> Any:
        return _bigquery().TableReference.from_string(
            f"{self._dataset_name}.{name}", default_project=self._project or dataset.client.project
        )

    def _sql(self, dataset: _Dataset, name: str | None = None) -> str:
        return f"`{self._project or dataset.client.project}.{self._dataset_name}.{name or self._name}`"

    def _table(self, dataset: _Dataset) -> Any:
        """Return the table as BigQuery describes it now; None if there is no table."""
        from google.api_core.exceptions import NotFound

        try:
            return dataset.client.get_table(self._reference(dataset, self._name), timeout=_REQUEST_S)
        except NotFound:
            return None

    def _fields(self, dataset: _Dataset) -> list[Any]:
        """Return the columns of the table; an empty list if there is no table."""
        table = self._table(dataset)
        return [] if table is None else list(table.schema)


def column_of(field: pa.Field) -> Any:
    """Return the `SchemaField` of BigQuery for a column of the output.

    Raises:
        UsageError: BigQuery lacks the type, or does not allow the name.
    """
    if _NO_NAME.search(field.name):
        raise UsageError(
            f"BigQuery does not allow the name {field.name!r} for a column\nRename the column in output_schema"
        )
    return _schema_field(field.name, _plain(field.type), field)


def wider_type(wanted: str, there: str) -> str | None:
    """Return the type to which a column of type `there` is widened for numbers of type `wanted`; None: no change."""
    return wanted if wanted in _WIDER.get(there, ()) else None


def _schema_field(name: str, kind: pa.DataType, column: pa.Field) -> Any:
    _LONGEST_COLUMN.check("the column or field", name, "Rename it in output_schema")
    mode, fields = "NULLABLE", ()
    if pa.types.is_list(kind):
        mode, kind = "REPEATED", kind.value_type
    if pa.types.is_struct(kind) and kind.num_fields and not any(_NO_PART.search(part.name) for part in kind):
        fields = tuple(_schema_field(part.name, part.type, column) for part in kind)
    found = "RECORD" if fields else _scalar(kind)
    if found is None:
        raise UsageError(
            f"the sink has no type of BigQuery for the column {column.name!r} of type {column.type}; leave it out of output_schema"
        )
    return _bigquery().SchemaField(name, found, mode=mode, fields=fields)


def _scalar(kind: pa.DataType) -> str | None:
    match kind:
        case _ if pa.types.is_boolean(kind):
            return "BOOLEAN"
        case _ if pa.types.is_integer(kind) and kind != pa.uint64():
            return "INTEGER"
        case _ if pa.types.is_floating(kind):
            return "FLOAT"
        case _ if pa.types.is_decimal(kind):
            whole = kind.precision - kind.scale
            if whole <= 29 and 0 <= kind.scale <= 9:
                return "NUMERIC"
            return "BIGNUMERIC" if whole <= 38 and 0 <= kind.scale <= 38 else None
        case _ if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            return "STRING"
        case _ if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
            return "BYTES"
        case _ if pa.types.is_date(kind):
            return "DATE"
        case _ if pa.types.is_timestamp(kind):
            return "TIMESTAMP" if kind.tz else "DATETIME"
    return None


def _plain(kind: pa.DataType) -> pa.DataType:
    """Return the type with each map as a list of structs with the fields `key` and `value`."""
    if pa.types.is_map(kind):
        pair = pa.struct([("key", _plain(kind.key_type)), ("value", _plain(kind.item_type))])
        return pa.list_(pair)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(_plain(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(part.name, _plain(part.type)) for part in kind])
    return kind


def _loses_nulls(column: pa.Array) -> bool:
    """Return True if the column has a null in place of a list, or a null in a list: BigQuery has no such nulls."""
    kind = column.type
    if pa.types.is_struct(kind):
        there = column.drop_null()
        return any(_loses_nulls(there.field(n)) for n in range(kind.num_fields))
    if pa.types.is_list(kind):
        parts = column.flatten()
        return column.null_count > 0 or parts.null_count > 0 or _loses_nulls(parts)
    return False


def _arrow_type(field: Any) -> pa.DataType:
    """Return the Arrow type of the values for a column of BigQuery."""
    if field.field_type == "RECORD":
        kind = pa.struct([(part.name, _arrow_type(part)) for part in field.fields])
    elif field.field_type in _ARROW:
        kind = _ARROW[field.field_type]
    else:
        raise UsageError(
            f"the table's column {field.name!r} has the type {field.field_type}, which the sink can't write\nName another table"
        )
    return pa.list_(kind) if field.mode == "REPEATED" else kind


def _with_fields(there: Any, wanted: Any) -> Any:
    """Return the column `there` with the fields added that only the struct `wanted` has, at any depth."""
    if there.field_type != "RECORD" or wanted.field_type != "RECORD":
        return there
    fields = {field.name.lower(): field for field in there.fields}
    for field in wanted.fields:
        name = field.name.lower()
        if name in fields and fields[name].name != field.name:
            raise UsageError(
                f"the column {there.name!r} has a field {fields[name].name!r} in the table and {field.name!r} in the output, and BigQuery "
                "ignores the case of names\nRename the field in output_schema, or give the sink a new table"
            )
        fields[name] = _with_fields(fields[name], field) if name in fields else field
    made = there.to_api_repr() | {"fields": [field.to_api_repr() for field in fields.values()]}
    return _bigquery().SchemaField.from_api_repr(made)


def _rename(field: Any, name: str) -> Any:
    """Return the staging table's column for `field`: with the given name, without limits, and with nulls allowed."""
    mode = "REPEATED" if field.mode == "REPEATED" else "NULLABLE"
    return _bigquery().SchemaField(
        name, field.field_type, mode=mode, fields=[_rename(part, part.name) for part in field.fields]
    )


def _read(value: Any, kind: pa.DataType) -> Any:
    """Convert a value from BigQuery to the type of the output's column, which may be narrower for numbers."""
    if value is None:
        return None
    match kind:
        case _ if pa.types.is_map(kind):
            return [(_read(pair["key"], kind.key_type), _read(pair["value"], kind.item_type)) for pair in value]
        case _ if pa.types.is_list(kind) or pa.types.is_large_list(kind):
            return [_read(part, kind.value_type) for part in value]
        case _ if pa.types.is_struct(kind):
            return {part.name: _read(value.get(part.name), part.type) for part in kind}
        case _ if pa.types.is_integer(kind):
            return int(value)
        case _ if pa.types.is_floating(kind):
            return float(value)
        case _ if pa.types.is_decimal(kind):
            return Decimal(str(value))
    return value


def _quote(name: str) -> str:
    return f"`{name}`"


def _new_job_id() -> str:
    return f"cairn-{uuid.uuid4()}"


def _bigquery() -> Any:
    return library("google.cloud.bigquery", "bigquery")
