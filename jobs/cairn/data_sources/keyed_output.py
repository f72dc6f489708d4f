"""Spark data source `format("keyed_output")`, which reads the committed output of a pipeline as a table.

Options:

    root, pipeline    Required.
    late              "true" reads the late rows instead of the output. Default: "false".
    start, end        ISO instants with a time zone. Only intervals that lie between these instants are read.

The checkpoint log says, when the query is planned, which files are current. So a query never sees half an interval,
even on storage that can't replace a folder in one step.

The table has the columns of the newest `output_schema`, whichever intervals are read. Rows of intervals with an older
schema are converted. Late rows have the input's columns, and no record holds their schema. Their columns are those of
the newest late file that is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from cairn.runners.output_schema import arrow_schema, from_record, recorded_schema, schema_in, schema_of_file
from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.adapters.work_folders import work_folder
from state_backend.checkpoint.log import Log, read_log
from state_backend.checkpoint.output_schemas import newest_output, recorded_schemas
from state_backend.formats.schema_evolution import compare_schemas
from state_backend.formats.table_evolution import ConvertBatch, batch_converter
from state_backend.formats.types import names_and_types, parse_struct
from state_backend.ports.storage import Storage
from state_backend.values.errors import (
    CairnError,
    CorruptFile,
    CorruptRecord,
    NotFound,
    StateUnusable,
    StorageUnavailable,
    UsageError,
)
from state_backend.values.handles import Handle
from state_backend.values.intervals import Interval
from state_backend.values.records import OutputFile


@dataclass
class _File(InputPartition):
    file: OutputFile


class KeyedOutput(DataSource):
    """The data source `keyed_output`. The module's docstring lists its options."""

    @classmethod
    def name(cls) -> str:
        """Return the format's name."""
        return "keyed_output"

    def schema(self) -> StructType:
        """Return the newest output schema, from the log or, if the log has none, from the newest file."""
        return from_record(self._schemas(self._log())[-1], self._root())

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return a reader of the files that the log now names.

        Raises:
            StorageUnavailable: The output schema has changed since the query was planned. A new query succeeds.
        """
        log, planned = self._log(), parse_struct(recorded_schema(schema.jsonValue()))
        schemas = self._schemas(log)
        now = parse_struct(schemas[-1])
        if names_and_types(now) != names_and_types(planned):
            raise StorageUnavailable(
                f"the output of pipeline {self._option('pipeline')!r} now has the columns {now}, but the query was planned for {planned}\n"
                "Run the query again, without a schema of your own"
            )
        return _OutputReader(self._root(), self._files(log), schemas)

    def _schemas(self, log: Log) -> tuple[dict[str, Any], ...]:
        """Return the known schemas of the output, the newest last.

        If the log records no schemas, the result is the schema of the newest file alone.

        Raises:
            StateUnusable: The pipeline has no output yet.
        """
        schemas = () if self._late() else recorded_schemas(log)
        if schemas:
            return schemas
        # The options may select no files. The empty table still needs columns, so the newest file of all intervals
        # decides then.
        ids = {f.handle: n for n, files in log.current_outputs().values() for f in files}
        newest = max(self._files(log), key=lambda f: ids[f.handle], default=newest_output(log, late=self._late()))
        if newest is None:
            raise StateUnusable(
                f"pipeline {self._option('pipeline')!r} under {self._option('root')} has no committed output yet; run an interval first"
            )
        storage = open_storage(self._root())
        with work_folder("schema") as work:
            try:
                schema = schema_of_file(storage, newest.handle, work / "file.parquet")
            except NotFound as error:
                raise _gone(newest.handle, storage) from error
        # The log has no schemas for these rows: late rows, or output without a recorded schema. So the schema comes from
        # the newest file alone. A column that is NOT NULL in this file may be null or missing in an older file. So
        # `names_and_types` makes all columns nullable.
        return (names_and_types(parse_struct(schema)).to_json(),)

    def _files(self, log: Log) -> list[OutputFile]:
        start, end = self._instant("start"), self._instant("end")
        # Read only the settled records of the days in this range.
        if start is not None and end is not None and start < end:
            current = log.current_outputs_within(Interval(start, end))
        else:
            current = log.current_outputs()
        return [
            file
            for interval, (_, files) in sorted(current.items())
            for file in files
            if file.late == self._late() and _within(interval, start, end)
        ]

    def _log(self) -> Log:
        return read_log(open_storage(self._root()))

    def _late(self) -> bool:
        return str(self.options.get("late", "false")).lower() == "true"

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


def _within(interval: Interval, start: datetime | None, end: datetime | None) -> bool:
    return (start is None or interval.start >= start) and (end is None or interval.end <= end)


class _OutputReader(DataSourceReader):
    def __init__(self, root: str, files: list[OutputFile], schemas: tuple[dict[str, Any], ...]) -> None:
        self._root = root
        self._files = files
        self._schemas = schemas

    def partitions(self) -> Sequence[InputPartition]:
        return [_File(file) for file in self._files]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, _File):
            return  # Spark calls `read` once with None if there are no partitions.
        with work_folder("output") as work:
            local, storage = work / "file.parquet", open_storage(self._root)
            try:
                storage.download(partition.file.handle, local)
            except NotFound as error:
                raise _gone(partition.file.handle, storage) from error
            rows = pq.ParquetFile(local)
            convert = converter(partition.file, schema_in(rows.schema_arrow), self._schemas)
            yield from map(convert, rows.iter_batches(batch_size=10_000))


def converter(file: OutputFile, written: dict[str, Any], schemas: Sequence[dict[str, Any]]) -> ConvertBatch:
    """Return a function that converts batches of an output file to the newest schema.

    Args:
        file: The recorded output file.
        written: The Spark schema of the file, as JSON.
        schemas: All schemas of the pipeline's output, as JSON, the newest last.

    Raises:
        UsageError: The record names no schema version, and the file's columns can't be converted to the first of the
            schemas.
        CorruptRecord: The record names a schema version that does not exist.
    """
    version, chain = file.schema_version, [parse_struct(schema) for schema in schemas]
    if version is not None and not 1 <= version <= len(chain):
        raise CorruptRecord(
            f"{file.handle.path}: the record gives this file output schema {version}, but the pipeline has only {len(chain)}"
        )
    if version is not None:
        chain = chain[version - 1 :]
    elif (own := parse_struct(written)) in chain:
        # `chain` lists all schemas of the output, oldest first. The record gives this file no schema version if Cairn's
        # previous release prepared the interval and this release committed it. The file's own schema is one of `chain`.
        # So the conversion starts at this schema.
        chain = chain[len(chain) - 1 - chain[::-1].index(own) :]
    else:
        chain = [own, *chain]
        refused = compare_schemas(chain[0], chain[1]).refused
        if refused:
            raise UsageError(
                f"{file.handle.path}: its rows can't be converted to {chain[1]}: {'; '.join(refused)}\n"
                "Read the intervals before and after this change separately, with the options start and end; or run the file's interval again"
            )
    return batch_converter(chain, arrow_schema(schemas[-1]))


def _gone(handle: Handle, storage: Storage) -> CairnError:
    """Return the error for a file that was current when the query was planned and is now missing.

    A query never mixes rows of two results of an interval. So the whole query fails if a re-run has replaced a file.

    Returns:
        CorruptFile if the file is still current, else StorageUnavailable.
    """
    current = read_log(storage).current_outputs().values()
    if any(file.handle == handle for _, files in current for file in files):
        return CorruptFile(
            f"{handle.path} is missing from {storage.url}; put the file back from a copy, or run its interval again"
        )
    return StorageUnavailable(
        f"a re-run replaced {handle.path} in {storage.url} while this query ran; run the query again"
    )
