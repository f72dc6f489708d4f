"""A stand-in for a Spark session, without a JVM, for sources that only read files or make rows.

The stand-in knows `spark.read.parquet`, `spark.read.schema(…)` with `parquet`, `csv` or `json` and the options `header`
and `mode`, `spark.createDataFrame` and `select` of columns by name. For all else it raises `NeedsSpark`, and the caller
takes a real session. So a source gets either exactly Spark's rows, or Spark.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import types as t

from cairn.replay.text_files import Doubtful, read_csv, read_json
from cairn.rows.local_rows import LocalRows
from cairn.rows.row_order import find_unordered_type
from cairn.spark.ddl import parse_ddl_locally
from cairn.spark_versions import from_arrow_type, to_arrow_schema, to_arrow_type
from state_backend.formats.types import parse_struct
from state_backend.inspection.key_entries import SearchedKey
from state_backend.inspection.key_rows import rows_of_key
from state_backend.values.errors import StateTypeError, UsageError
from state_backend.values.zones import Zone, zone_of

_SIMPLE = (
    *(t.BooleanType, t.ByteType, t.ShortType, t.IntegerType, t.LongType, t.FloatType, t.DoubleType),
    *(t.StringType, t.BinaryType, t.DateType, t.DecimalType, t.TimestampType, t.TimestampNTZType),
)


class NeedsSpark(BaseException):
    """The error for a source or an initial state that uses more of Spark than `LocalSession` has.

    It is a `BaseException`, because a source that catches `Exception` would otherwise go on and return other rows.
    """


class PlanningSession:
    """A stand-in for a Spark session with the parts that planning an interval uses."""

    is_stopped = False

    def __init__(self, zone: str) -> None:
        self.conf = _Conf({"spark.sql.session.timeZone": zone})

    def _parse_ddl(self, ddl: str) -> t.StructType:
        return parse_ddl_locally(ddl)


class LocalSession(PlanningSession):
    """A stand-in for a Spark session with the parts that planning an interval and simple sources use."""

    @property
    def read(self) -> _Reader:
        return _Reader(self)

    @property
    def zone(self) -> Zone:
        """The time zone of the session, which `in_zone_of` changes for a `with` block."""
        return zone_of(self.conf["spark.sql.session.timeZone"])

    def createDataFrame(self, data: Any, schema: Any = None, **other: Any) -> LocalFrame:
        """Return the rows as a frame. Raise `NeedsSpark` if the call gives no schema or has other arguments."""
        if other or not isinstance(schema, str | t.StructType):
            raise NeedsSpark("createDataFrame without a schema")
        try:
            declared = parse_ddl_locally(schema) if isinstance(schema, str) else schema
            return LocalFrame.of_rows(LocalRows([*data] if not hasattr(data, "columns") else data, declared, self.zone))
        except (UsageError, TypeError) as error:
            raise NeedsSpark(str(error)) from None

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise NeedsSpark(f"spark.{name}")


class _Conf(dict[str, str]):
    def set(self, name: str, value: str) -> None:
        self[name] = value


class _Reader:
    def __init__(
        self, session: LocalSession, schema: t.StructType | None = None, options: Mapping[str, str] | None = None
    ) -> None:
        self._session, self._schema, self._options = session, schema, options or {}

    def schema(self, schema: str | t.StructType) -> _Reader:
        try:
            declared = parse_ddl_locally(schema) if isinstance(schema, str) else schema
        except UsageError as error:
            raise NeedsSpark(str(error)) from None
        return _Reader(self._session, declared, self._options)

    def option(self, key: str, value: Any) -> _Reader:
        return _Reader(self._session, self._schema, {**self._options, key.lower(): str(value).lower()})

    def options(self, **options: Any) -> _Reader:
        found = self
        for key, value in options.items():
            found = found.option(key, value)
        return found

    def csv(self, path: Any, schema: Any = None, **options: Any) -> LocalFrame:
        reader = self._with(schema, options)
        header = reader._options.get("header", "false") == "true"
        return reader._text(path, partial(read_csv, header=header), {"header": ("true", "false")})

    def json(self, path: Any, schema: Any = None, **options: Any) -> LocalFrame:
        return self._with(schema, options)._text(path, read_json, {})

    def _with(self, schema: Any, options: Mapping[str, Any]) -> _Reader:
        return (self if schema is None else self.schema(schema)).options(**options)

    def _text(self, path: Any, read: Any, known: Mapping[str, Sequence[str]]) -> LocalFrame:
        """Return the rows of CSV or JSON files, by `read`. `known`: The allowed options; `mode` has no effect."""
        known = {**known, "mode": ("permissive", "dropmalformed", "failfast")}
        unknown = [name for name, value in self._options.items() if value not in known.get(name, ())]
        if self._schema is None or "_corrupt_record" in self._schema.names or unknown:
            raise NeedsSpark(f"text files without a schema, or with the options {', '.join(unknown)}")
        # As in Spark, every column of a file is nullable, even if the schema says otherwise.
        schema = t.StructType([t.StructField(f.name, f.dataType, True) for f in self._schema.fields])
        zone = self._session.zone
        try:
            tables = [read(_local_file(one), schema, zone) for one in ([path] if isinstance(path, str) else path)]
        except Doubtful as error:
            raise NeedsSpark(str(error)) from None
        return LocalFrame(schema, zone, tables=tables)

    def parquet(self, *paths: str) -> LocalFrame:
        if self._options:
            raise NeedsSpark("options of Parquet files")
        files = [_local_file(path) for path in paths]
        declared = self._schema if self._schema is not None else _common_schema(files)
        # As in Spark, every column of a file is nullable, even if the schema says otherwise.
        schema = t.StructType([t.StructField(f.name, f.dataType, True) for f in declared.fields])
        for field in schema.fields:
            if not isinstance(field.dataType, _SIMPLE) or find_unordered_type(field.dataType) is not None:
                raise NeedsSpark(f"a column of type {field.dataType.simpleString()}")
        return LocalFrame(schema, self._session.zone, files=files)

    def __getattr__(self, name: str) -> NoReturn:
        raise NeedsSpark(f"spark.read.{name}")


class LocalFrame(LocalRows):
    """A stand-in for a DataFrame: rows of Parquet files, or in memory. `rows_of` reads the rows of one key."""

    def __init__(
        self, schema: t.StructType, zone: Zone, *, files: Sequence[Path] = (), tables: Sequence[pa.Table] = ()
    ) -> None:
        self.schema, self.zone = schema, zone
        self._files, self._tables = files, tables

    @classmethod
    def of_rows(cls, rows: LocalRows) -> LocalFrame:
        return cls(rows.schema, rows.zone, tables=[rows.table])

    def select(self, *names: Any) -> LocalFrame:
        """Return the frame with only the named columns, in this order."""
        flat = names[0] if len(names) == 1 and isinstance(names[0], list | tuple) else names
        if not all(isinstance(name, str) and name in self.schema.names for name in flat) or len({*flat}) < len(flat):
            raise NeedsSpark("select of expressions")
        schema = t.StructType([self.schema[name] for name in flat])
        tables = [table.select([*flat]) for table in self._tables]
        return LocalFrame(schema, self.zone, files=self._files, tables=tables)

    def rows_of(self, key: SearchedKey, names: Sequence[str]) -> LocalRows:
        wanted = to_arrow_schema(self.schema, self.zone.name)
        found = [_filter(part, key, names) for part in self._parts(wanted)]
        table = pa.concat_tables(found) if found else wanted.empty_table()
        return LocalRows.of_table(table, self.schema, self.zone)

    def _parts(self, wanted: pa.Schema) -> Iterator[pa.Table]:
        yield from self._tables
        for path in self._files:
            with pq.ParquetFile(path) as file:
                names = [name for name in self.schema.names if name in file.schema_arrow.names]
                for group in range(file.num_row_groups):
                    part = file.read_row_group(group, columns=names)
                    columns = [
                        _column(part.column(field.name), field)
                        if field.name in names
                        else pa.nulls(part.num_rows, field.type)
                        for field in wanted
                    ]
                    yield pa.Table.from_arrays(columns, schema=wanted)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise NeedsSpark(f"DataFrame.{name}")


def _filter(part: pa.Table, key: SearchedKey, names: Sequence[str]) -> pa.Table:
    named = part.select([*names]).rename_columns([*key.schema.names])
    at = pa.array(range(part.num_rows), pa.int64())
    found = rows_of_key(named.append_column("__at", at), key)
    if found is None:
        raise StateTypeError(f"the input's key columns {', '.join(names)} don't fit the recorded key {key.schema}")
    return part.take(found["__at"])


def _column(column: pa.ChunkedArray, field: pa.Field) -> pa.ChunkedArray:
    """Return a column of a file, cast to the type of `field`. Raise `NeedsSpark` if Spark might read other values."""
    if column.type == field.type:
        return column
    both = column.type, field.type
    if all(map(pa.types.is_timestamp, both)) and (both[0].tz is None, both[0].unit in ("ms", "us")) == (
        both[1].tz is None,
        True,
    ):
        return column.cast(field.type)
    if pa.types.is_large_string(column.type) and pa.types.is_string(field.type):
        return column.cast(field.type)
    raise NeedsSpark(f"column {field.name!r} is {column.type} in the file")


def _local_file(path: str) -> Path:
    parts = urlsplit(path)
    if parts.scheme not in ("", "file") or parts.netloc:
        raise NeedsSpark(f"files of {parts.scheme}")
    local = Path(unquote(parts.path) if parts.scheme else path)
    # Only single files are read here. In a folder, Spark would add columns for subfolders such as `day=2013-01-01`, and
    # it would expand the signs below.
    plain = not any(sign in str(local) for sign in "*?[]{}")
    if not (plain and local.is_absolute() and local.is_file()) or local.name.startswith((".", "_")):
        raise NeedsSpark(f"{path} is not the name of one local file")
    return local


def _common_schema(files: Sequence[Path]) -> t.StructType:
    schemas = []
    for path in files:
        with pq.ParquetFile(path) as file:
            found = file.schema_arrow
        try:
            fields = [t.StructField(f.name, from_arrow_type(f.type)) for f in found]
        except Exception:
            raise NeedsSpark(f"a column of {path}") from None
        exact = all(to_arrow_type(s.dataType) == f.type for s, f in zip(fields, found, strict=True))
        if not exact:
            raise NeedsSpark(f"a column of {path}")
        schemas.append(t.StructType(fields))
    if not schemas or any(schema != schemas[0] for schema in schemas):
        raise NeedsSpark("files of several schemas")
    parse_struct(schemas[0].jsonValue())
    return schemas[0]
