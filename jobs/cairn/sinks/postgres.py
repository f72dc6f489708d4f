"""The sink for a table of PostgreSQL, through psycopg.

The table `cairn_publications` in the same schema holds the id of the newest checkpoint of each interval. If the sink
stops:

    before the commit     PostgreSQL rolls back: the table has the old rows. The next call does all of the work.
    after the commit,     The table has the new rows. The next call finds the checkpoint's id and changes nothing.
    before the answer
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import pyarrow as pa
import pyarrow.csv
from typing_extensions import override

from cairn.sinks.table_sink import (
    END,
    START,
    LongestName,
    Owner,
    Publication,
    TableSink,
    as_json,
    counts_of,
    foreign_rows,
    library,
    must_store_owner,
    nested_text,
    with_type,
)
from state_backend.values.errors import UsageError
from state_backend.values.intervals import Interval

_IDS = "cairn_publications"
# The cursor of the transaction that several calls share.
_SHARED: ContextVar[Any] = ContextVar("shared", default=None)
# PostgreSQL silently shortens a longer name.
_LONGEST_NAME = LongestName("PostgreSQL", 63, "bytes")
_TYPES = {
    pa.bool_(): "boolean",
    pa.int8(): "smallint",
    pa.int16(): "smallint",
    pa.int32(): "integer",
    pa.int64(): "bigint",
    pa.float32(): "real",
    pa.float64(): "double precision",
    pa.string(): "text",
    pa.large_string(): "text",
    pa.binary(): "bytea",
    pa.large_binary(): "bytea",
    pa.date32(): "date",
}
_TIMES = {
    pa.timestamp("us", "UTC"): "timestamp with time zone",
    pa.timestamp("us"): "timestamp without time zone",
}
# Types to which a column can be widened: in each line, a type holds all values of the types before it.
_WIDER = (
    ("smallint", "integer", "bigint"),
    ("smallint", "integer", "double precision"),
    ("real", "double precision"),
    ("date", "timestamp without time zone"),
)
# The number of decimal digits in each type of whole numbers.
_DIGITS = {"smallint": 5, "integer": 10, "bigint": 19}


def postgres(table: str, conninfo: str | Callable[[], str] = "") -> PostgresSink:
    """Return a `Pipeline.sink` that keeps a table of PostgreSQL equal to the pipeline's output.

    The first call with rows creates the table: the columns of the output, and `interval_start` and `interval_end`. The
    sink adds columns that the output gains, and widens their types. Structs, lists and maps become `jsonb`. A table
    belongs to one pipeline.

    Args:
        table: Name of the table, or `schema.table`.
        conninfo: Connection string or URL of libpq, or a function that returns it, such as
            `lambda: os.environ["WAREHOUSE"]`. The function runs in the process that calls the sink. Empty: libpq's
            environment variables (`PGHOST`, `PGUSER`, …) and `~/.pgpass`.

    Raises:
        UsageError: The name is no name of a table, or longer than 63 bytes. A call raises this error if psycopg is
            missing, or if the table belongs to another pipeline.

    Example:
        Pipeline(..., sink=sinks.postgres("clicks", lambda: os.environ["WAREHOUSE"]))
    """
    return PostgresSink(table, conninfo)


class PostgresSink(TableSink):
    longest_column = _LONGEST_NAME

    def __init__(self, table: str, conninfo: str | Callable[[], str]) -> None:
        names = table.split(".")
        if not all(names) or len(names) > 2:
            raise UsageError(f"{table!r} is no table; expected a name, or schema.name")
        for what, name in zip(("the schema", "the table")[-len(names) :], names, strict=True):
            _LONGEST_NAME.check(what, name, "Give the sink a shorter name")
        self._names, self._conninfo = names, conninfo

    def __repr__(self) -> str:
        return f"postgres({'.'.join(self._names)!r})"

    @override
    def publish(self, publication: Publication) -> None:
        with self._transaction() as cursor:
            # Only one call at a time may change the table, so other processes wait here until this transaction ends.
            self._lock(cursor)
            self._create_ids(cursor)
            near = self._read_stored(cursor, publication.owner, publication.interval)
            replaced = publication.replaces(near)
            if replaced is None:
                return
            if self._has_intervals(cursor):
                for interval in replaced:
                    self._delete(cursor, interval)
            for table in publication.tables():
                self._fit(cursor, table)
                self._insert(cursor, table)
            self._store(cursor, publication)

    @override
    def row_counts(self) -> dict[Interval | None, int]:
        with self._transaction() as cursor:
            if not self._columns(cursor):
                return {}
            names, by = (f"{START}, {END}", " GROUP BY 1, 2") if self._has_intervals(cursor) else ("NULL, NULL", "")
            counts = self._sql(f"SELECT {names}, count(*) FROM {{table}}{by}")
            return counts_of(cursor.execute(counts).fetchall())

    @override
    def rows(self, interval: Interval, schema: pa.Schema) -> pa.Table:
        sql = library("psycopg", "postgres").sql
        with self._transaction() as cursor:
            there = self._columns(cursor)
            fields = [field for field in schema if field.name in there]
            # START is selected too, because a query without any column would be an error.
            names = sql.SQL(", ").join(sql.Identifier(name) for name in (START, *(field.name for field in fields)))
            query = self._sql(f"SELECT {{names}} FROM {{table}} WHERE {START} = %s AND {END} = %s", names=names)
            found = cursor.execute(query, (interval.start, interval.end)).fetchall()
        values = {
            field.name: _from_postgres([row[n] for row in found], field.type) for n, field in enumerate(fields, 1)
        }
        return pa.table(values)

    @override
    def table_url(self) -> str:
        # Only an open connection knows address and schema: a service file, search path or variables may set them.
        with self._transaction() as cursor:
            info = cursor.connection.info
            host, port, database = info.host, info.port, info.dbname
            (schema,) = cursor.execute("SELECT current_schema()").fetchone()
        # For a Unix socket, `host` is a path. An IPv6 address needs brackets in a URL.
        host = "localhost" if host.startswith("/") else f"[{host}]" if ":" in host else host
        return f"postgres://{host}:{port}/{database}/{'/'.join([schema, *self._names][-2:])}"

    @override
    def clear(self, owner: Owner, *, takes_over: bool = False) -> None:
        with self._transaction() as cursor:
            self._lock(cursor)
            self._create_ids(cursor)
            self._claim(cursor, owner, takes_over=takes_over)
            deleted = cursor.execute(self._sql("DELETE FROM {ids} WHERE table_name = %s"), (self._names[-1],)).rowcount
            if not self._columns(cursor):
                return
            if not deleted and cursor.execute(self._sql("SELECT 1 FROM {table} LIMIT 1")).fetchone():
                raise foreign_rows(".".join(self._names))
            cursor.execute(self._sql("DELETE FROM {table}"))

    def conninfo(self) -> str:
        """Return the connection string. Sinks with the same connection string can share a transaction."""
        return self._conninfo() if callable(self._conninfo) else self._conninfo

    @contextmanager
    def one_transaction(self) -> Iterator[None]:
        """Let all calls of sinks with this connection string share one transaction while the context is open."""
        with self._transaction() as cursor:
            token = _SHARED.set(cursor)
            try:
                yield
            finally:
                _SHARED.reset(token)

    @contextmanager
    def _transaction(self) -> Iterator[Any]:
        if (shared := _SHARED.get()) is not None:
            yield shared
            return
        psycopg = library("psycopg", "postgres")
        try:
            connection = psycopg.connect(self.conninfo())
        except psycopg.ProgrammingError:
            # The error's text may contain the password.
            raise UsageError(
                f"the connection string of the sink {self!r} can't be read; libpq's docs have the format"
            ) from None
        # READ COMMITTED: a query after the wait for the lock sees what other processes committed during the wait.
        connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
        with connection, connection.cursor() as cursor:
            # psycopg reads instants only in the ISO style, but a role or a database may have another default style.
            cursor.execute("SET LOCAL timezone = 'UTC'; SET LOCAL datestyle = 'ISO'")
            yield cursor

    def _sql(self, text: str, **parts: Any) -> Any:
        sql = library("psycopg", "postgres").sql
        names = {"table": sql.Identifier(*self._names), "ids": sql.Identifier(*self._names[:-1], _IDS)}
        return sql.SQL(text).format(**names, **parts)

    def _lock(self, cursor: Any) -> None:
        cursor.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (f"cairn {self._names[-1]}",))

    def _create_ids(self, cursor: Any) -> None:
        found = cursor.execute("SELECT to_regclass(%s)", (self._sql("{ids}").as_string(cursor),)).fetchone()
        if found == (None,):
            # Two sinks may create this table at the same time. IF NOT EXISTS would then fail in one of them, so each
            # takes a lock first.
            cursor.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (f"cairn {_IDS}",))
            cursor.execute(
                self._sql(
                    "CREATE TABLE IF NOT EXISTS {ids} (table_name text, pipeline text NOT NULL, interval_start timestamptz, "
                    "interval_end timestamptz, checkpoint_id bigint NOT NULL, "
                    "PRIMARY KEY (table_name, interval_start, interval_end))"
                )
            )

    def _claim(self, cursor: Any, owner: Owner, *, takes_over: bool = False) -> None:
        """Make the writer the table's owner, or raise `UsageError` if another pipeline or root owns the table."""
        table = self._names[-1]
        query = self._sql("SELECT pipeline FROM {ids} WHERE table_name = %s AND pipeline <> %s LIMIT 1")
        other = cursor.execute(query, (table, str(owner))).fetchone()
        if other is not None and must_store_owner(other[0], owner, ".".join(self._names), takes_over=takes_over):
            cursor.execute(self._sql("UPDATE {ids} SET pipeline = %s WHERE table_name = %s"), (str(owner), table))

    def _read_stored(self, cursor: Any, owner: Owner, interval: Interval) -> dict[Interval, int]:
        self._claim(cursor, owner)
        query = self._sql(
            f"SELECT {START}, {END}, checkpoint_id FROM {{ids}} WHERE table_name = %s AND {START} < %s AND {END} > %s"
        )
        found = cursor.execute(query, (self._names[-1], interval.end, interval.start)).fetchall()
        return {Interval(start, end): n for start, end, n in found}

    def _store(self, cursor: Any, publication: Publication) -> None:
        query = self._sql(
            "INSERT INTO {ids} VALUES (%s, %s, %s, %s, %s) ON CONFLICT (table_name, interval_start, interval_end) "
            "DO UPDATE SET checkpoint_id = EXCLUDED.checkpoint_id"
        )
        interval = publication.interval
        values = (self._names[-1], str(publication.owner), interval.start, interval.end, publication.checkpoint_id)
        cursor.execute(query, values)

    def _delete(self, cursor: Any, interval: Interval) -> None:
        query = self._sql(f"DELETE FROM {{table}} WHERE {START} = %s AND {END} = %s")
        cursor.execute(query, (interval.start, interval.end))

    def _columns(self, cursor: Any) -> dict[str, str]:
        """Return PostgreSQL's type of each column, by name; empty if there is no table."""
        query = (
            "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute "
            "WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped"
        )
        return dict(cursor.execute(query, (self._sql("{table}").as_string(cursor),)).fetchall())

    def _has_intervals(self, cursor: Any) -> bool:
        """Return True if the table exists and has both columns of the interval."""
        return {START, END} <= self._columns(cursor).keys()

    def _fit(self, cursor: Any, rows: pa.Table) -> None:
        """Create the table, or add columns and widen types until it can hold the rows. Raise if it can't."""
        sql = library("psycopg", "postgres").sql
        there = self._columns(cursor)
        if not there:
            columns = sql.SQL(", ").join(
                sql.SQL("{} {}").format(sql.Identifier(field.name), sql.SQL(column_type(field)))
                for field in rows.schema
            )
            cursor.execute(self._sql("CREATE TABLE {table} ({columns})", columns=columns))
            cursor.execute(self._sql(f"CREATE INDEX ON {{table}} ({START}, {END})"))
            return
        for field in rows.schema:
            wanted, name = column_type(field), sql.Identifier(field.name)
            if field.name not in there:
                cursor.execute(
                    self._sql("ALTER TABLE {table} ADD COLUMN {name} {type}", name=name, type=sql.SQL(wanted))
                )
            elif wider := wider_type(wanted, there[field.name]):
                cursor.execute(
                    self._sql("ALTER TABLE {table} ALTER COLUMN {name} TYPE {type}", name=name, type=sql.SQL(wider))
                )
            elif (
                wanted != there[field.name]
                and (kind := arrow_type(there[field.name])) is not None
                and (wanted != "text" or pa.types.is_integer(kind))
            ):
                # `COPY` would round, or cut off the time of a date. It parses most texts as their owner expects.
                with_type(rows, field.name, kind)

    def _insert(self, cursor: Any, table: pa.Table) -> None:
        sql = library("psycopg", "postgres").sql
        names = sql.SQL(", ").join(sql.Identifier(name) for name in table.column_names)
        with cursor.copy(self._sql("COPY {table} ({names}) FROM STDIN (FORMAT csv)", names=names)) as copy:
            # The batches limit the memory that the CSV text takes.
            for batch in table.to_batches(max_chunksize=50_000):
                copy.write(as_csv(batch))


def column_type(field: pa.Field) -> str:
    """Return PostgreSQL's type for a column of the output."""
    kind = field.type
    if kind in _TYPES:
        return _TYPES[kind]
    if pa.types.is_decimal(kind):
        return f"numeric({kind.precision},{kind.scale})"
    if pa.types.is_timestamp(kind):
        return "timestamp with time zone" if kind.tz else "timestamp without time zone"
    if pa.types.is_nested(kind):
        return "jsonb"
    raise UsageError(
        f"the sink has no type of PostgreSQL for the column {field.name!r} of type {kind}; leave it out of output_schema"
    )


def arrow_type(there: str) -> pa.DataType | None:
    """Return the Arrow type that a column stores unchanged; None for text, and for a type that the sink never makes."""
    if found := re.fullmatch(r"numeric\((\d+),(\d+)\)", there):
        return pa.decimal256(int(found[1]), int(found[2])) if int(found[1]) <= 76 else None
    return {name: kind for kind, name in (*_TYPES.items(), *_TIMES.items()) if name != "text"}.get(there)


def wider_type(wanted: str, there: str) -> str | None:
    """Return the type to which a column of type `there` is widened for values of type `wanted`; None: no change.

    The result holds all values of both types. A type that the table's owner has chosen, such as `varchar`, stays.
    """
    ours, theirs = _digits(wanted), _digits(there)
    if ours and theirs and "numeric" in wanted + there:
        whole, scale = (max(pair) for pair in zip(ours, theirs, strict=True))
        wider = f"numeric({whole + scale},{scale})"
        return None if wider == there else wider
    lines = (line for line in _WIDER if wanted in line and there in line)
    return wanted if any(line.index(wanted) > line.index(there) for line in lines) else None


def _digits(kind: str) -> tuple[int, int] | None:
    """Return (digits before, digits after) the decimal point; None if the type does not limit them."""
    if kind in _DIGITS:
        return _DIGITS[kind], 0
    found = re.fullmatch(r"numeric\((\d+),(\d+)\)", kind)
    return (int(found[1]) - int(found[2]), int(found[2])) if found else None


def as_csv(batch: pa.RecordBatch) -> bytes:
    """Return rows as PostgreSQL's CSV: null is an empty field without quotes."""
    columns = [_for_csv(column) for column in batch.columns]
    out = io.BytesIO()
    options = pa.csv.WriteOptions(include_header=False)
    pa.csv.write_csv(pa.table(columns, names=batch.schema.names), out, options)
    return out.getvalue()


def _for_csv(column: pa.Array) -> pa.Array:
    if pa.types.is_nested(column.type) or pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
        return pa.array([_text(value.as_py(), column.type) for value in column], pa.string())
    if pa.types.is_timestamp(column.type) and column.type.tz:
        # Instants are written without a zone, since pyarrow writes a zone 25 times slower. The session's zone is UTC.
        return column.cast(pa.timestamp(column.type.unit, "UTC")).cast(pa.timestamp(column.type.unit))
    return column


def _text(value: Any, kind: pa.DataType) -> str | None:
    if value is None:
        return None
    return json.dumps(as_json(value)) if pa.types.is_nested(kind) else f"\\x{value.hex()}"


def _from_postgres(values: Any, kind: pa.DataType) -> pa.Array:
    if pa.types.is_nested(kind):
        return pa.array([None if value is None else nested_text(value) for value in values], pa.string())
    return pa.array(values, kind)
