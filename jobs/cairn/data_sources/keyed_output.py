"""Spark data source `format("keyed_output")`, which reads the committed output of a pipeline as a table.

Options:

    root, pipeline    Required.
    late              "true" reads the late rows instead of the output. Default: "false".
    start, end        ISO instants with a time zone. Only intervals that lie between these instants are read.
    valid             "true" refuses to read intervals whose result is stale or quarantined. Default: "false", and a
                      warning names these intervals.
    checkpoints       The ids of the checkpoints whose output is read, with commas between them. If the current output
                      is that of other checkpoints, the query fails.
    group             Name of the pipeline's group, or a marker from `group_marker`. Only intervals are read for which
                      the results of all members of the group fit together.
    interval_column   Name of an additional last column, which has the start of the row's interval as a TIMESTAMP.

The checkpoint log says, when the query is planned, which files are current. So a query never sees half an interval,
even on storage that can't replace a folder in one step.

The table has the columns of all schemas that the output has had, whichever intervals are read. Late rows have the
input's columns, by the same rule (`table_schema.py`). A row has null in columns that its interval's file lacks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import combinations
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType, TimestampType

from cairn.data_sources.check_options import check_options
from cairn.data_sources.state_selection import parse_numbers
from cairn.runners.output_schema import arrow_schema, from_record, recorded_schema, schema_of_file
from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.adapters.work_folders import work_folder
from state_backend.checkpoint.current_output import CurrentOutput, current_output
from state_backend.checkpoint.log import Log, read_log, read_newest
from state_backend.checkpoint.output_schemas import newest_output, recorded_schemas, schema_of
from state_backend.checkpoint.parallel import at_once
from state_backend.formats.table_evolution import batch_converter
from state_backend.formats.table_schema import join_schemas, table_schema
from state_backend.formats.types import StructType as SparkStruct
from state_backend.formats.types import names_and_types, parse_struct
from state_backend.inspection.publication_group import end_within_group
from state_backend.ports.storage import Storage
from state_backend.values.errors import CairnError, CorruptFile, NotFound, StateUnusable, StorageUnavailable, UsageError
from state_backend.values.handles import Handle
from state_backend.values.intervals import Interval
from state_backend.values.records import OutputFile

logger = logging.getLogger("cairn")

_INSTANT = pa.timestamp("us", "UTC")
_OPTIONS = frozenset({"root", "pipeline", "late", "start", "end", "valid", "checkpoints", "group", "interval_column"})


@dataclass
class _File(InputPartition):
    interval: Interval
    file: OutputFile


class KeyedOutput(DataSource):
    """The data source `keyed_output`. The module's docstring lists its options."""

    @classmethod
    def name(cls) -> str:
        return "keyed_output"

    def schema(self) -> StructType:
        check_options(self.name(), self.options, _OPTIONS)
        log = self._log()
        if (notice := self._spoilt(log)) is not None:
            logger.warning("%s", notice)
        schema = from_record(self._schema(log), self._root())
        if (column := self.options.get("interval_column")) is not None:
            if column.lower() in map(str.lower, schema.names):
                raise UsageError(f"interval_column {column!r}: the output has a column of this name; give another name")
            schema.add(column, TimestampType())
        return schema

    def reader(self, schema: StructType) -> DataSourceReader:
        of_files = StructType(schema.fields[: len(schema) - ("interval_column" in self.options)])
        log, planned = self._log(), parse_struct(recorded_schema(of_files.jsonValue()))
        self._spoilt(log)
        schema_now = self._schema(log)
        now = parse_struct(schema_now)
        if names_and_types(now) != names_and_types(planned):
            raise StorageUnavailable(
                f"the output of pipeline {self._option('pipeline')!r} now has the columns {now}, but the query was planned for {planned}\n"
                "Run the query again, without a schema of your own"
            )
        files = [_File(interval, file) for interval, file in self._current(log).files_by_interval(late=self._late())]
        return _OutputReader(self._root(), files, schema_now, self.options.get("interval_column"))

    def _schema(self, log: Log) -> dict[str, Any]:
        """Return the schema of the table.

        The records contain the schemas of files. A file without a recorded schema, from an old release, is downloaded.
        """
        recorded, files = recorded_schemas(log, late=self._late()), self._files(log)
        if not recorded and not files:
            # The options select no files. The empty table needs columns too, so they come from the newest file.
            newest = newest_output(log, late=self._late())
            if newest is None:
                raise StateUnusable(
                    f"pipeline {self._option('pipeline')!r} under {self._option('root')} has no committed output yet; run an interval first"
                )
            files = [newest]
        # `read`: for each different schema, the latest file with this schema.
        read = dict[SparkStruct, OutputFile]()
        for file, schema in zip(files, self._schemas_of(files, recorded), strict=True):
            read[schema] = file
        for later, earlier in combinations([*read.items()][::-1], 2):
            if clashes := join_schemas(earlier[0], later[0])[1]:
                fields = "; ".join(f"{c.path!r} is {c.one}, but {c.other} in {later[1].handle.path}" for c in clashes)
                raise UsageError(
                    f"{earlier[1].handle.path}: {fields}; neither type holds all values of the other, so no table can hold both files\n"
                    "Read the intervals before and after this change separately, with the options start and end; or run the file's interval again"
                )
        made: dict[str, Any] = table_schema(map(parse_struct, recorded), [*read][::-1]).to_json()
        return made

    def _schemas_of(self, files: Sequence[OutputFile], recorded: tuple[dict[str, Any], ...]) -> list[SparkStruct]:
        storage = open_storage(self._root())

        def read(file: OutputFile) -> SparkStruct:
            schema = schema_of(file, recorded)
            if schema is not None:
                return schema
            with work_folder("schema") as work:
                try:
                    found = parse_struct(schema_of_file(storage, file.handle, work / "file.parquet"))
                except NotFound as error:
                    raise _gone(file.handle, storage) from error
            # A column that is NOT NULL in this file may be null or missing in another file.
            made = names_and_types(found)
            assert isinstance(made, SparkStruct)
            return made

        return at_once(read, files)

    def _files(self, log: Log) -> list[OutputFile]:
        return self._current(log).list_files(late=self._late())

    def _spoilt(self, log: Log) -> str | None:
        """Return a warning about intervals without a valid result, or None. With the option `valid`, raise an error."""
        notice = self._current(log).notice(self._option("root"), self._option("pipeline"))
        if notice is not None and self._is("valid"):
            raise StateUnusable(f"{notice}\nWithout the option valid, the table has these rows too")
        return notice

    def _current(self, log: Log) -> CurrentOutput:
        end = self._instant("end")
        if (group := self.options.get("group")) is not None:
            end = end_within_group(group, self._option("root"), self._option("pipeline"), log, end)
        current = current_output(log, self._instant("start"), end)
        expected = self.options.get("checkpoints")
        numbers = parse_numbers(str(expected), "checkpoints") if expected else []
        if expected is not None and {*numbers} != {*current.commits.values()}:
            raise StorageUnavailable(
                f"the output of pipeline {self._option('pipeline')!r} is now that of the checkpoints {sorted(current.commits.values())}, and the "
                f"query expects {expected}\nAsk for the current checkpoints, and run the query again"
            )
        return current

    def _log(self) -> Log:
        return read_newest(open_storage(self._root()))

    def _late(self) -> bool:
        return self._is("late")

    def _is(self, name: str) -> bool:
        said = str(self.options.get(name, "false")).lower()
        if said not in ("true", "false"):
            raise UsageError(f"{name} {said!r} is neither true nor false")
        return said == "true"

    def _instant(self, name: str) -> datetime | None:
        text = self.options.get(name)
        try:
            found = None if text is None else datetime.fromisoformat(text)
        except ValueError:
            raise UsageError(f"{name} {text!r} is not a point in time; write it as in 2024-01-04T06:00+00:00") from None
        if found is not None and found.tzinfo is None:
            raise UsageError(f"{name} {text!r} has no time zone; write it as in 2024-01-04T06:00+00:00")
        return found

    def _root(self) -> str:
        return join_url(self._option("root"), self._option("pipeline"))

    def _option(self, name: str) -> str:
        value = self.options.get(name)
        if value is None:
            raise UsageError(f'format("keyed_output") needs the options root and pipeline; {name!r} is missing')
        return str(value)


class _OutputReader(DataSourceReader):
    def __init__(self, root: str, files: list[_File], schema: dict[str, Any], interval_column: str | None) -> None:
        self._root = root
        self._files = files
        self._schema = schema
        self._interval_column = interval_column

    def partitions(self) -> Sequence[InputPartition]:
        return self._files

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, _File):
            return  # Spark calls `read` once with None if there are no partitions.
        with work_folder("output") as work:
            local, storage = work / "file.parquet", open_storage(self._root)
            try:
                storage.download(partition.file.handle, local)
            except NotFound as error:
                raise _gone(partition.file.handle, storage) from error
            rows, file = pq.ParquetFile(local), partition.file
            if rows.metadata.num_rows != file.rows:
                raise CorruptFile(
                    f"{file.handle.path} in {storage.url} has {rows.metadata.num_rows} rows, but its record says {file.rows}; put the file "
                    "back from a copy, or run its interval again"
                )
            convert, starts = batch_converter(arrow_schema(self._schema)), pa.scalar(partition.interval.start, _INSTANT)
            for made in map(convert, rows.iter_batches(batch_size=10_000)):
                column = self._interval_column
                yield made if column is None else made.append_column(column, pa.repeat(starts, made.num_rows))


def _gone(handle: Handle, storage: Storage) -> CairnError:
    """Return the error for a file that was current when the query was planned and is now missing.

    A query never mixes rows of two results of an interval. So the whole query fails if a re-run has replaced a file.
    """
    current = read_log(storage).current_outputs().values()
    if any(file.handle == handle for _, files in current for file in files):
        return CorruptFile(
            f"{handle.path} is missing from {storage.url}; put the file back from a copy, or run its interval again"
        )
    return StorageUnavailable(
        f"a re-run replaced {handle.path} in {storage.url} while this query ran; run the query again"
    )
