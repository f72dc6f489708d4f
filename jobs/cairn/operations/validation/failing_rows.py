"""Name the keys of rows that fail an expectation, and store the rows as Parquet.

The rows lie in the pipeline's folder, in `failing/<attempt>/`, where `<attempt>` made the checkpoint. Spark's tasks
write the files. A task that fails leaves a file that the driver deletes. If the driver dies, the files stay until the
checkpoint is dropped, or until a sweep.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from cairn.operations.validation.checks import MOST_KEYS, FailingRows, FailingStore
from cairn.operations.validation.expectation_suites import metric_value
from cairn.spark.first_cause import first_cause
from cairn.spark.idle_daemon import end_idle_daemon
from state_backend.adapters.open_storage import open_storage
from state_backend.adapters.work_folders import work_folder
from state_backend.values.frozen import frozen

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@frozen
class SparkRows(FailingStore):
    def source(self, context: Any) -> Any:
        return context.data_sources.add_spark("restored_state", persist=False)  # the caller caches the tables

    def frame(self, table: DataFrame) -> DataFrame:
        return table

    def failing(self, batch: Any, expectation: Any, metric: str, identity: Sequence[str]) -> FailingRows:
        from pyspark.sql import functions as F

        condition, domain, column = metric_value(batch, expectation, f"{metric}.condition")
        table = batch.data.execution_engine.get_domain_records(domain_kwargs={**domain, **column})
        # The condition may hold a window function, which a filter refuses.
        rows = table.withColumn(_FAILS, condition).filter(f"`{_FAILS}`").drop(_FAILS)
        columns = [F.col(f"`{name}`") for name in identity]
        key = F.to_json(F.struct(*columns), {"ignoreNullFields": "false"}).alias("key")
        first = rows.select(key).orderBy("key").limit(MOST_KEYS).collect()
        return self.keep((row.key for row in first), rows.count, partial(_store, rows))


_FAILS = "cairn_fails"
_FILE = pa.schema([("path", pa.string()), ("rows", pa.int64())])


def _store(failing: DataFrame, root: str, folder: str) -> int:
    """Write the rows into a folder, one file for each partition with rows, and return the number of rows."""
    with first_cause():
        files = failing.mapInArrow(partial(_write, root, folder), "path string, rows long").collect()
    storage, written = open_storage(root), {file.path for file in files}
    for info in storage.list(folder):
        if info.path not in written:  # A task that failed has left this file.
            storage.delete(info.path)
    return sum(file.rows for file in files)


def _write(root: str, folder: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Write the rows of one partition in a Spark worker, and yield the path and the number of rows of the file."""
    end_idle_daemon()
    rows, writer = 0, None
    with work_folder("failing") as work:
        local = work / "rows.parquet"
        for batch in batches:
            if batch.num_rows:
                writer = writer or pq.ParquetWriter(local, batch.schema)
                writer.write_batch(batch)
                rows += batch.num_rows
        if writer is not None:
            writer.close()
            handle = open_storage(root).upload(f"{folder}{uuid.uuid4()}.parquet", local)
            yield pa.RecordBatch.from_pydict({"path": [handle.path], "rows": [rows]}, schema=_FILE)
