"""``format("keyed_output")``: published output as a table.

Options ``root`` and ``pipeline``; optional ``late`` ("true" reads the late rows instead), ``start`` and ``end`` (ISO instants:
only intervals inside). Which files are current is what the checkpoint log says when the query is planned, so a reader never
sees half an interval, also where a folder can't be swapped in one step.

The columns are those of the newest ``output_schema``, whichever intervals are read; rows of older ones are converted. No schema is
recorded for late rows, which have the input's columns: the columns are those of the newest late file that is read.
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

from cairn.processors.output_schema import arrow_schema, from_record, recorded_schema, schema_in, schema_of_file
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
    """The data source; its options are in the module's docstring."""

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return "keyed_output"

    def schema(self) -> StructType:
        """The newest output schema that the log records."""
        return from_record(self._schemas(self._log())[-1], self._root())

    def reader(self, schema: StructType) -> DataSourceReader:
        """Reads what is published now. Raises: StorageUnavailable if the schema changed since the query was planned: run it again."""
        log, planned = self._log(), parse_struct(recorded_schema(schema.jsonValue()))
        schemas = self._schemas(log)
        now = parse_struct(schemas[-1])
        if names_and_types(now) != names_and_types(planned):
            raise StorageUnavailable(
                f"the output of pipeline {self._option('pipeline')!r} has the columns {now}; the query was planned for {planned}; query "
                "again, without a schema of your own"
            )
        return _OutputReader(self._root(), self._files(log), schemas)

    def _schemas(self, log: Log) -> tuple[dict[str, Any], ...]:
        """All schemas that the rows have had, as far as it is known, the newest last."""
        schemas = () if self._late() else recorded_schemas(log)
        if schemas:
            return schemas
        # What a filter leaves may be empty, and its rows would still have columns.
        ids = {f.handle: n for n, files in log.current_outputs().values() for f in files}
        newest = max(self._files(log), key=lambda f: ids[f.handle], default=newest_output(log, late=self._late()))
        if newest is None:
            raise StateUnusable(
                f"pipeline {self._option('pipeline')!r} under {self._option('root')} has no published output yet; run an interval first"
            )
        storage = open_storage(self._root())
        with work_folder("schema") as work:
            try:
                schema = schema_of_file(storage, newest.handle, work / "file.parquet")
            except NotFound as error:
                raise _gone(newest.handle, storage) from error
        # Nobody compared it with what was before: what is NOT NULL now may have had nulls, or was not there.
        return (names_and_types(parse_struct(schema)).to_json(),)

    def _files(self, log: Log) -> list[OutputFile]:
        start, end = self._instant("start"), self._instant("end")
        if start is not None and end is not None and start < end:  # only the folders of these days are looked at
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
            raise UsageError(f"{name} {text!r} is no instant; write it as in 2024-01-04T06:00+00:00") from None
        if found is not None and found.tzinfo is None:
            raise UsageError(f"{name} {text!r} has no time zone; write it as in 2024-01-04T06:00+00:00")
        return found

    def _root(self) -> str:
        return join_url(self._option("root"), self._option("pipeline"))

    def _option(self, name: str) -> str:
        value = self.options.get(name)
        if value is None:
            raise UsageError(f'format("keyed_output") needs the option {name!r}: root and pipeline')
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
            return  # Spark asks once, with nothing, when there are no partitions
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
    """A function from batches of the file, whose schema is ``written``, to the last of ``schemas``.

    Raises: UsageError if rows without a recorded schema don't fit; CorruptRecord for a version that is not among the schemas.
    """
    version, chain = file.schema_version, [parse_struct(schema) for schema in schemas]
    if version is not None and not 1 <= version <= len(chain):
        raise CorruptRecord(
            f"{file.handle.path}: its record says that it has output schema {version}; there are {len(chain)}"
        )
    if version is not None:
        chain = chain[version - 1 :]
    elif (own := parse_struct(written)) in chain:
        # Committed by this release, prepared by the one before it.
        chain = chain[len(chain) - 1 - chain[::-1].index(own) :]
    else:
        chain = [own, *chain]
        refused = compare_schemas(chain[0], chain[1]).refused
        if refused:
            raise UsageError(
                f"{file.handle.path}: its rows can't be read as {chain[1]}: {'; '.join(refused)}. Read what is before and what is after "
                "that change apart, with the options start and end; or run its interval again"
            )
    return batch_converter(chain, arrow_schema(schemas[-1]))


def _gone(handle: Handle, storage: Storage) -> CairnError:
    """Why a file that was current when the query was planned is not there: rows of two results of an interval are never mixed,
    so a query that a re-run overtook fails as a whole."""
    current = read_log(storage).current_outputs().values()
    if any(file.handle == handle for _, files in current for file in files):
        return CorruptFile(
            f"{handle.path} is missing from {storage.url}; put it back from a copy, or run its interval again"
        )
    return StorageUnavailable(
        f"{handle.path} of {storage.url} was replaced by a re-run while this query ran; query again"
    )
