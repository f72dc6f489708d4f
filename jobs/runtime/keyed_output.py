"""``format("keyed_output")``: published output as a table.

Options ``root`` and ``pipeline``; optional ``late`` ("true" reads the late rows instead), ``start`` and ``end`` (ISO instants:
only intervals inside). Which files are current is what the checkpoint log says when the query is planned, so a reader never
sees half an interval, also where a folder can't be swapped in one step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.adapters.work_folders import work_folder
from state_backend.checkpoint.log import read_log
from state_backend.ports.storage import Storage
from state_backend.values.errors import CairnError, CorruptFile, NotFound, StateUnusable, StorageUnavailable, UsageError
from state_backend.values.handles import Handle
from state_backend.values.intervals import Interval
from state_backend.values.records import OutputFile


@dataclass
class _File(InputPartition):
    handle: Handle


class KeyedOutput(DataSource):
    """The data source; its options are in the module's docstring."""

    @classmethod
    def name(cls) -> str:
        return "keyed_output"

    def schema(self) -> StructType:
        # Of any interval: what a filter leaves may be empty, and its rows would still have these columns.
        files = [f for _, files in self._outputs().values() for f in files if f.late == self._late()]
        if not files:
            raise StateUnusable(
                f"pipeline {self._option('pipeline')!r} under {self._option('root')} has no published output yet"
            )
        with work_folder("schema") as work:
            open_storage(self._root()).download(files[0].handle, work / "file.parquet")
            schema: StructType = from_arrow_schema(pq.read_schema(work / "file.parquet"))
        return schema

    def reader(self, schema: StructType) -> DataSourceReader:
        return _OutputReader(self._root(), self._files())

    def _files(self) -> list[OutputFile]:
        start, end = self.options.get("start"), self.options.get("end")
        return [
            file
            for interval, (_, files) in sorted(self._outputs().items())
            for file in files
            if file.late == self._late()
            and (start is None or interval.start >= datetime.fromisoformat(start))
            and (end is None or interval.end <= datetime.fromisoformat(end))
        ]

    def _outputs(self) -> dict[Interval, tuple[int, tuple[OutputFile, ...]]]:
        return read_log(open_storage(self._root())).current_outputs()

    def _late(self) -> bool:
        return str(self.options.get("late", "false")).lower() == "true"

    def _root(self) -> str:
        return join_url(self._option("root"), self._option("pipeline"))

    def _option(self, name: str) -> str:
        value = self.options.get(name)
        if value is None:
            raise UsageError(f'format("keyed_output") needs the option {name!r}: root and pipeline')
        return str(value)


class _OutputReader(DataSourceReader):
    def __init__(self, root: str, files: list[OutputFile]) -> None:
        self._root = root
        self._files = files

    def partitions(self) -> Sequence[InputPartition]:
        return [_File(f.handle) for f in self._files]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, _File):
            return  # Spark asks once, with nothing, when there are no partitions
        with work_folder("output") as work:
            local, storage = work / "file.parquet", open_storage(self._root)
            try:
                storage.download(partition.handle, local)
            except NotFound as error:
                raise _gone(partition.handle, storage) from error
            yield from pq.ParquetFile(local).iter_batches(batch_size=10_000)


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
