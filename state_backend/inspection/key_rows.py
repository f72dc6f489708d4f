"""Find the rows of one key in output files and in files of late rows."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from state_backend.formats import paths
from state_backend.formats.key_columns import KeyColumns
from state_backend.inspection.key_entries import SearchedKey
from state_backend.ports.storage import Storage
from state_backend.shard.transfer import IN_MEMORY_BYTES, read_verified
from state_backend.values.errors import CorruptFile, NotFound, StateTypeError
from state_backend.values.records import OutputFile


def key_columns_in(schema: pa.Schema, key: SearchedKey) -> list[str] | None:
    """Return the names of the key columns in a file's schema; None if a column is missing. The case is ignored."""
    names = {name.lower(): name for name in schema.names}
    found = [names.get(name.lower()) for name in key.schema.names]
    return None if None in found else [name for name in found if name is not None]


def rows_of_key(table: pa.Table | pa.RecordBatch, key: SearchedKey) -> pa.Table | None:
    """Return the rows of a key in a table; None if the table's key columns are missing or have other types."""
    columns = key_columns_in(table.schema, key)
    if columns is None:
        return None
    batches = table.to_batches() if isinstance(table, pa.Table) else [table]
    encoder, found = KeyColumns(key.schema), []
    for batch in batches:
        try:
            encoded = encoder.encode([batch.column(name) for name in columns])
        except StateTypeError:
            return None
        found.append(batch.filter(pc.equal(encoded, pa.scalar(key.encoded, pa.binary()))))
    return pa.Table.from_batches(found, schema=table.schema)


def read_key_rows(
    files: Iterable[OutputFile], attempt: str, shard: int, key: SearchedKey, storage: Storage, work: Path
) -> pa.Table | None:
    """Return the rows of a key in the output files, or the files of late rows, of one commit, file by file.

    Return None if a file lacks a key column, or has it with another type: its rows can't be told apart by key. Files
    that `attempt` wrote for other shards than the key's, `shard`, are skipped.
    """
    found, local = [], work / f"{uuid4().hex}.parquet"
    for file in files:
        if paths.attempt_of(file.handle.path) == attempt and _shard_in(file.handle.path) not in (None, shard):
            continue
        try:
            small = file.handle.size_bytes <= IN_MEMORY_BYTES
            if not small:
                storage.download(file.handle, local)
            with pq.ParquetFile(pa.BufferReader(read_verified(storage, file.handle)) if small else local) as parquet:
                for number in range(parquet.num_row_groups):
                    rows = rows_of_key(parquet.read_row_group(number), key)
                    if rows is None:
                        return None
                    found.append(rows)
        except (NotFound, pa.ArrowException) as error:
            raise CorruptFile(f"{file.handle.path} of {storage.url} can't be read: {error}") from error
        finally:
            local.unlink(missing_ok=True)
    return pa.concat_tables(found, promote_options="permissive") if found else pa.table({})


def _shard_in(path: str) -> int | None:
    number = path.rpartition("/")[2].split("-")[1:2]
    return int(number[0]) if number and number[0].isdecimal() else None
