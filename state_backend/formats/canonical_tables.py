"""The Parquet files of a canonical savepoint, which any tool can read: a table for each state and one for the timers.

    state    key struct | user_key struct (maps) | value struct | position long, next_position long (lists)
             | expires_at_ms long | key_group int | schema_version int | encoded_row binary
    timers   key struct | expires_at_ms long | key_group int

    key, user_key    columns by name, of Spark's types; floats without -0.0, and with one NaN only
    value            the entry's value, converted to the latest schema version
    position         the position of a list's element
    next_position    the position of the list's next new element; equal in all rows of the list
    expires_at_ms    milliseconds since the epoch; null means never. For a timer, the time when it fires
    key_group        pmod(xxhash64(key columns), max_parallelism)
    schema_version   the version that the entry was written with
    encoded_row      the entry's bytes from the row codec, for entries of older schema versions. `value` can't give
                     these bytes back. The column exists if the state has older versions. It also exists, without
                     `value`, if the state's value has a struct without fields, which Parquet can't hold

Rows ascend by key group, then by encoded key (key codec: Spark's ascending order with nulls first), then by user key,
position or time. No two rows are equal in all of these. All timers of a key are in one row group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from state_backend.formats.arrow_columns import arrow_type
from state_backend.formats.types import StructType, parse_struct, walk
from state_backend.values.errors import CorruptFile, UsageError
from state_backend.values.key_groups import KeyGroupRange
from state_backend.values.records import StateDescriptor

MAX_FILE_BYTES = 512 * 1024 * 1024
KEY_GROUP = pa.field("key_group", pa.int32(), False)


def state_schema(descriptor: StateDescriptor, key_schema: StructType) -> pa.Schema:
    """Return the Arrow schema of the Parquet files that hold one state of a canonical savepoint."""
    latest = descriptor.versions[-1]
    value = parse_struct(latest.value)
    fields = [_key_field("key", key_schema)]
    if latest.user_key is not None:
        fields.append(_key_field("user_key", parse_struct(latest.user_key)))
    if fits_parquet(value):
        fields.append(pa.field("value", arrow_type(value), False))
    if descriptor.kind == "list":
        fields += [pa.field("position", pa.int64(), False), pa.field("next_position", pa.int64(), False)]
    fields += [pa.field("expires_at_ms", pa.int64()), KEY_GROUP, pa.field("schema_version", pa.int32(), False)]
    if len(descriptor.versions) > 1 or not fits_parquet(value):
        fields.append(pa.field("encoded_row", pa.binary()))
    return pa.schema(fields)


def timers_schema(key_schema: StructType) -> pa.Schema:
    """Return the Arrow schema of the Parquet files that hold the timers of a canonical savepoint."""
    return pa.schema([_key_field("key", key_schema), pa.field("expires_at_ms", pa.int64(), False), KEY_GROUP])


def fits_parquet(schema: StructType) -> bool:
    """Return True if Parquet can store the schema: every struct has at least one field."""
    return all(t.fields for _, t in walk(schema) if isinstance(t, StructType))


def _key_field(name: str, schema: StructType) -> pa.Field:
    if not fits_parquet(schema):
        raise UsageError(
            f"{name} {schema} has a struct without fields, which Parquet can't hold; take a native savepoint"
        )
    return pa.field(name, arrow_type(schema), False)


class CanonicalFiles:
    """Writer of tables to local Parquet files. Each table becomes a row group.

    The writer begins a new file when the next table would probably make the current file larger than `max_bytes`.

    Attributes:
        written: The path and the number of rows of each closed file, in order.
    """

    def __init__(self, folder: Path, schema: pa.Schema, *, max_bytes: int = MAX_FILE_BYTES) -> None:
        folder.mkdir(parents=True)
        self.written: list[tuple[Path, int]] = []
        self._folder, self._schema, self._max_bytes = folder, schema, max_bytes
        self._writer: pq.ParquetWriter | None = None
        self._file: Any = None
        self._rows = self._largest_bytes = 0

    def write(self, table: pa.Table) -> None:
        if not table.num_rows:
            return
        if self._writer is not None and self._file.tell() + self._largest_bytes > self._max_bytes:
            self.close()
        if self._writer is None:
            self._file = (self._folder / f"{len(self.written)}.parquet").open("wb")
            # A dictionary makes repeating values smaller. Columns of keys and values get none: to try to build one
            # would cost as much time as the write.
            repeating = [n for n in ("key_group", "schema_version", "next_position") if n in self._schema.names]
            # DELTA_BINARY_PACKED writes integers in two thirds of the time of plain encoding, and in less space.
            encoding = {name: "DELTA_BINARY_PACKED" for name in _integers("", self._schema) if name not in repeating}
            self._writer = pq.ParquetWriter(
                self._file,
                self._schema,
                compression="zstd",
                compression_level=1,
                use_dictionary=repeating,
                column_encoding=encoding,
            )
        before = self._file.tell()
        self._writer.write_table(table, row_group_size=table.num_rows)
        self._largest_bytes = max(self._largest_bytes, self._file.tell() - before)
        self._rows += table.num_rows

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._file.close()
            self.written.append((Path(self._file.name), self._rows))
            self._writer, self._rows = None, 0


def _integers(above: str, fields: Iterable[pa.Field]) -> Iterator[str]:
    """Yield the dotted paths of all fields, also in structs, that Parquet stores as integers. `above`: their prefix."""
    for field in fields:
        if pa.types.is_struct(field.type):
            yield from _integers(f"{above}{field.name}.", field.type)
        elif pa.types.is_integer(field.type) or pa.types.is_timestamp(field.type):
            yield above + field.name


def read_tables(file: Path, schema: pa.Schema, key_groups: KeyGroupRange | None, name: str) -> Iterator[pa.Table]:
    """Yield those row groups of a Parquet file, in order, that may hold rows of `key_groups`; None: all row groups.

    Raise `CorruptFile` if the file, called `name` in the message, is damaged or has another schema.
    """
    try:
        parquet = pq.ParquetFile(file)
        if not parquet.schema_arrow.equals(schema):
            raise CorruptFile(f"{name}: found the columns {_line(parquet.schema_arrow)}; expected {_line(schema)}")
        for at in range(parquet.num_row_groups):
            if key_groups is None or _may_hold(parquet, at, key_groups):
                table = parquet.read_row_group(at)
                table.validate(full=True)  # Invalid UTF-8 fails here.
                yield table
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CorruptFile(f"can't read {name} as Parquet: {error}") from error


def _may_hold(parquet: pq.ParquetFile, at: int, key_groups: KeyGroupRange) -> bool:
    """Read the small `key_group` column of row group `at`, and return True if it may hold rows of these key groups.

    The function does not use the statistics in the file's footer. Another program may have written the file with
    statistics that are no numbers, and then Arrow would end the process.
    """
    rows = parquet.read_row_group(at, columns=[KEY_GROUP.name])
    if not rows.num_columns:
        # A damaged row group may lack the column. The read of the whole row group then raises the error.
        return True
    found = pc.min_max(rows[0]).as_py()
    return found["min"] is not None and found["min"] <= key_groups.last and key_groups.first <= found["max"]


def _line(schema: pa.Schema) -> str:
    return ", ".join(f"{f.name} {f.type}" for f in schema)
