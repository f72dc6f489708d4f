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

from cairn.operations.validation.checks import MOST_KEYS, FailingRows, short_key
from cairn.operations.validation.expectation_suites import metric_value
from cairn.spark.first_cause import first_cause
from cairn.spark.idle_daemon import end_idle_daemon
from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.adapters.work_folders import work_folder
from state_backend.formats import paths
from state_backend.values.frozen import frozen

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@frozen
class SparkRows:
    """Tables of Spark, for `Suites`."""

    # URL of the pipeline's folder, where failing rows are stored; None stores none.
    root: str | None
    attempt: str
    # Why failing rows are not stored, if `root` is None.
    not_stored: str = ""

    def source(self, context: Any) -> Any:
        return context.data_sources.add_spark("restored_state", persist=False)  # the caller caches the tables

    def frame(self, table: DataFrame) -> DataFrame:
        return table

    def failing(self, batch: Any, expectation: Any, metric: str, identity: Sequence[str]) -> FailingRows:
        condition, domain, column = metric_value(batch, expectation, f"{metric}.condition")
        table = batch.data.execution_engine.get_domain_records(domain_kwargs={**domain, **column})
        # The condition may hold a window function, which a filter refuses.
        rows = table.withColumn(_FAILS, condition).filter(f"`{_FAILS}`").drop(_FAILS)
        return describe_failing(rows, identity, self)


_FAILS = "cairn_fails"


def describe_failing(failing: DataFrame, identity: Sequence[str], kind: SparkRows) -> FailingRows:
    """Name up to 20 keys of the failing rows, and store all rows as Parquet.

    A failure to store the rows raises no error, because the validation would then mark nothing: the result says why the
    rows are not stored.
    """
    from pyspark.sql import functions as F

    columns = [F.col(f"`{name}`") for name in identity]
    key = F.to_json(F.struct(*columns), {"ignoreNullFields": "false"})
    rows = failing.select(key.alias("key")).orderBy("key").limit(MOST_KEYS).collect()
    keys = tuple(short_key(row.key) for row in rows)
    root = kind.root
    if root is None:
        return FailingRows(number=failing.count(), keys=keys, not_stored=kind.not_stored)
    folder = paths.failing(kind.attempt, str(uuid.uuid4()))
    try:
        with first_cause():
            number = _store(failing, root, folder)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        return FailingRows(number=failing.count(), keys=keys, not_stored=f"the rows could not be stored: {reason}")
    return FailingRows(number=number, keys=keys, url=join_url(root, folder.rstrip("/")))


_FILE = pa.schema([("path", pa.string()), ("rows", pa.int64())])


def _store(failing: DataFrame, root: str, folder: str) -> int:
    """Write the rows into a folder, one file for each partition with rows, and return the number of rows."""
    files = failing.mapInArrow(partial(_write, root, folder), "path string, rows long").collect()
    storage, written = open_storage(root), {file.path for file in files}
    for info in storage.list(folder):
        if info.path not in written:  # A task wrote this file, and failed before it ended.
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
