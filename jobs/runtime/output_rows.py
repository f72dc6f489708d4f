"""What a processor yields, as one Parquet file per shard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import Row, StructType

from state_backend.ports.storage import Storage
from state_backend.values.errors import ProcessorError
from state_backend.values.records import OutputFile

_ROWS_PER_BATCH = 10_000


class OutputRows:
    """Collects output rows by column and writes them to a local file, then to the storage."""

    def __init__(self, schema: StructType, local: Path) -> None:
        self.rows = 0
        self._names = list(schema.names)
        self._arrow: pa.Schema = to_arrow_schema(schema, timezone="UTC", prefers_large_types=False)
        self._nested = any(pa.types.is_nested(t) for t in self._arrow.types)
        self._local = local
        self._pending: list[tuple[Any, ...]] = []
        self._writer: pq.ParquetWriter | None = None

    def add(self, row: Any) -> None:
        """One row; fields are matched by name, a missing one is null, an extra one is dropped."""
        if isinstance(row, Row) and getattr(row, "__fields__", None) == self._names and not self._nested:
            self._pending.append(row)
        else:
            try:
                fields = row.asDict(True)
            except AttributeError:
                raise ProcessorError(f"the processor yielded {_short(row)}; expected pyspark.sql.Row") from None
            except TypeError:
                raise ProcessorError(
                    f"the processor yielded {_short(row)}, which has no field names; use Row(name=value, ...)"
                ) from None
            self._pending.append(tuple(fields.get(name) for name in self._names))
        self.rows += 1
        if len(self._pending) >= _ROWS_PER_BATCH:
            self._write()

    def _write(self) -> None:
        columns = [
            self._array(field, values)
            for field, values in zip(self._arrow, zip(*self._pending, strict=True), strict=True)
        ]
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._local, self._arrow, compression="zstd")
        self._writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=self._arrow))
        self._pending.clear()

    def _array(self, field: pa.Field, values: Any) -> pa.Array:
        try:
            array = pa.array(values, type=field.type)
        except (pa.ArrowException, TypeError, OverflowError) as error:
            raise ProcessorError(
                f"output column {field.name!r} is {field.type}, and a value does not fit: {error}"
            ) from error
        if not field.nullable and array.null_count:
            raise ProcessorError(f"output column {field.name!r} is NOT NULL, but a row has no value for it")
        return array

    def finish(self, storage: Storage, path: str) -> OutputFile | None:
        """Uploads what was written; None if there was nothing."""
        if self._pending:
            self._write()
        if self._writer is None:
            return None
        self._writer.close()
        return OutputFile(handle=storage.upload(path, self._local), rows=self.rows)


def _short(value: object) -> str:
    text = repr(value)
    return f"a {type(value).__name__}: {text if len(text) <= 80 else text[:77] + '...'}"
