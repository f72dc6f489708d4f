"""One Parquet file of an attempt: written locally while the shard runs, uploaded when it is done."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from state_backend.ports.storage import Storage
from state_backend.values.records import OutputFile


class LocalParquet:
    """``write`` takes batches of exactly this schema; nothing is made where there are no rows."""

    def __init__(self, schema: pa.Schema, local: Path) -> None:
        self.schema = schema
        self.rows = 0
        self._local = local
        self._writer: pq.ParquetWriter | None = None

    def write(self, rows: pa.RecordBatch | pa.Table) -> None:
        """Appends rows; the first call makes the file."""
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._local, self.schema, compression="zstd")
        self._writer.write(rows)
        self.rows += rows.num_rows

    def finish(self, storage: Storage, path: str, *, late: bool = False) -> OutputFile | None:
        """Uploads what was written; None if there was nothing."""
        if self._writer is None:
            return None
        self._writer.close()
        return OutputFile(handle=storage.upload(path, self._local), rows=self.rows, late=late)
