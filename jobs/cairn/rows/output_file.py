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
            self._writer = pq.ParquetWriter(
                self._local, self.schema, compression="zstd", use_dictionary=_with_dictionary(self.schema)
            )
        self._writer.write(rows)
        self.rows += rows.num_rows

    def finish(self, storage: Storage, path: str, *, late: bool = False) -> OutputFile | None:
        """Uploads what was written; None if there was nothing."""
        if self._writer is None:
            return None
        self._writer.close()
        return OutputFile(handle=storage.upload(path, self._local), rows=self.rows, late=late)


def _with_dictionary(schema: pa.Schema) -> bool | list[str]:
    """Columns that a dictionary of their values makes smaller: texts. One of numbers costs more time than to write them, and most often more
    bytes: Parquet gives it up in the middle of a column of which no two values are equal."""
    if any(map(pa.types.is_nested, schema.types)):
        return True  # their leaves would have to be named
    return [f.name for f in schema if not pa.types.is_primitive(f.type) and not pa.types.is_decimal(f.type)]
