"""Write one Parquet file of an attempt: to a local file while the shard runs, which is then uploaded."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from state_backend.formats.content_digest import digest_of
from state_backend.ports.storage import Storage
from state_backend.values.records import OutputFile


class LocalParquet:
    """Writer of one local Parquet file, for batches with exactly the given schema. Without rows there is no file."""

    def __init__(self, schema: pa.Schema, local: Path) -> None:
        self.schema = schema
        self.rows = 0
        self._digest = 0
        self._local = local
        self._writer: pq.ParquetWriter | None = None

    def write(self, rows: pa.RecordBatch | pa.Table) -> None:
        """Append rows. The first call creates the local file."""
        if self._writer is None:
            self._writer = pq.ParquetWriter(
                self._local, self.schema, compression="zstd", use_dictionary=_with_dictionary(self.schema)
            )
        self._writer.write(rows)
        self.rows += rows.num_rows
        self._digest += digest_of(rows)

    def read(self) -> pa.Table:
        """Close the file, and return its rows as a reader of Parquet gets them."""
        if self._writer is None:
            return self.schema.empty_table()
        self._writer.close()
        return pq.read_table(self._local)

    def finish(self, storage: Storage, path: str, *, late: bool = False) -> OutputFile | None:
        """Close the file and upload it to `path`. Return None if `write` was never called."""
        if self._writer is None:
            return None
        self._writer.close()
        handle = storage.upload(path, self._local)
        return OutputFile(handle=handle, rows=self.rows, late=late, digest=self._digest % 2**64)


def _with_dictionary(schema: pa.Schema) -> bool | list[str]:
    """Return the value of PyArrow's option `use_dictionary`: the columns that a Parquet dictionary makes smaller.

    These are strings and binary values. For numbers, a dictionary costs more time, and usually more bytes: in a column
    of different values, Parquet abandons the dictionary half-way.
    """
    if any(map(pa.types.is_nested, schema.types)):
        # To leave out a nested column, PyArrow would need the names of its leaves. So all columns get a dictionary.
        return True
    return [f.name for f in schema if not pa.types.is_primitive(f.type) and not pa.types.is_decimal(f.type)]
