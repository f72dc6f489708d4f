"""Decoder of many stored rows of any recorded schema version to Arrow columns of the latest version.

The values are those that `EvolvingRowCodec.decode` returns row by row. The decoder decodes the rows of each older
version together, casts their columns with Arrow, and puts all rows back in order. Arrays, maps and structs whose values
change are converted value by value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from state_backend.formats.row_codec import RowCodec
from state_backend.formats.row_columns import RowColumns, batch_of
from state_backend.formats.schema_evolution import field_sources, row_reader
from state_backend.formats.types import parse_struct
from state_backend.values.errors import InvariantViolated
from state_backend.values.records import SchemaVersion

ReadColumns = Callable[[pa.BinaryArray], pa.RecordBatch]


def columns_reader(state_name: str, versions: Sequence[SchemaVersion]) -> ReadColumns:
    """Return a function that decodes a column of encoded rows, of any recorded version, to the latest version.

    For a null in the column, such as a key without a value, all fields are null.
    """
    latest = RowColumns(state_name, parse_struct(versions[-1].value), versions[-1].version)
    if len(versions) == 1:
        return latest.decode
    recorded, newest = {v.version for v in versions}, bytes([versions[-1].version])
    readers: dict[int, ReadColumns] = {versions[-1].version: latest.decode}

    def read(rows: pa.BinaryArray) -> pa.RecordBatch:
        # Nulls in the column `rows` count as rows of the latest version, whose reader decodes them to nulls.
        numbers = pc.fill_null(pc.binary_slice(rows, 1, 2), newest)
        present = pc.unique(numbers).to_pylist() or [newest]
        if len(present) == 1:
            return reader_of(present[0], rows)(rows)
        parts, places = [], []
        for number in present:
            mask = pc.equal(numbers, pa.scalar(number, pa.binary()))
            some = rows.filter(mask)
            parts.append(reader_of(number, some)(some).to_struct_array())
            places.append(np.flatnonzero(mask.to_numpy(zero_copy_only=False)))
        order = pa.array(np.argsort(np.concatenate(places)))
        return pa.RecordBatch.from_struct_array(pa.concat_arrays(parts).take(order))

    def reader_of(number: bytes, rows: pa.BinaryArray) -> ReadColumns:
        version = number[0] if number else -1
        if version not in recorded:
            # The reader of single rows raises an error that names the row's format or schema version.
            row_reader(state_name, versions)(rows[0].as_py())
            raise InvariantViolated(
                f"state {state_name!r}: found an entry with schema version {version}, which is not recorded"
            )
        if version not in readers:
            readers[version] = _older_reader(state_name, [v for v in versions if v.version >= version], latest)
        return readers[version]

    return read


def _older_reader(state_name: str, versions: Sequence[SchemaVersion], latest: RowColumns) -> ReadColumns:
    chain = [parse_struct(v.value) for v in versions]
    older = RowColumns(state_name, chain[0], versions[0].version)
    codec = RowCodec(state_name, chain[0], versions[0].version)
    sources = field_sources(chain)
    schema = latest.arrow_schema

    def read(rows: pa.BinaryArray) -> pa.RecordBatch:
        batch = older.decode(rows)
        columns = []
        for field, (place, convert) in zip(schema, sources, strict=True):
            if place < 0:
                columns.append(pa.nulls(len(rows), field.type))
            elif pa.types.is_nested(field.type) and convert is not None:
                values = [codec.decode(row)[place] for row in rows.to_pylist()]
                values = [None if value is None else convert(value) for value in values]
                columns.append(pa.array(values, field.type))
            else:
                columns.append(batch.column(place).cast(field.type))
        return batch_of(columns, schema, len(rows))

    return read
