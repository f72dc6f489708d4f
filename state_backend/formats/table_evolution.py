"""Conversion of batches of Parquet files with other schemas to the schema of their table (`table_schema.py`).

Columns are matched by name at every depth. A missing column becomes null. Arrow's exact casts widen values.
"""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

ConvertBatch = Callable[[pa.RecordBatch], pa.RecordBatch]


def batch_converter(target: pa.Schema) -> ConvertBatch:
    """Return a function that converts a record batch of any of a table's files to the table's schema, `target`."""
    whole = pa.struct(list(target))

    def convert(batch: pa.RecordBatch) -> pa.RecordBatch:
        columns = _children(dict(zip(batch.schema.names, batch.columns, strict=True)), batch.num_rows, whole)
        if not columns:
            return pa.RecordBatch.from_struct_array(pa.array([{}] * batch.num_rows, whole))
        return pa.RecordBatch.from_arrays(columns, schema=target)

    return convert


def _children(arrays: dict[str, pa.Array], rows: int, target: pa.StructType) -> list[pa.Array]:
    return [
        _convert(arrays[field.name], field.type) if field.name in arrays else pa.nulls(rows, field.type)
        for field in target
    ]


def _convert(array: pa.Array, target: pa.DataType) -> pa.Array:
    if array.type == target:
        return array
    if pa.types.is_struct(target):
        names = [field.name for field in array.type]
        children = _children(dict(zip(names, array.flatten(), strict=True)), len(array), target)
        if not children:
            return array.cast(target)
        return pa.StructArray.from_arrays(children, fields=list(target), mask=array.is_null())
    if pa.types.is_list(target):
        values = _convert(array.values, target.value_type)
        return pa.ListArray.from_arrays(_offsets(array), values, type=target, mask=array.is_null())
    if pa.types.is_map(target):
        keys, items = _convert(array.keys, target.key_type), _convert(array.items, target.item_type)
        return pa.MapArray.from_arrays(_offsets(array), keys, items, type=target, mask=array.is_null())
    return array.cast(target)


def _offsets(array: pa.Array) -> pa.Array:
    """Return a copy of a list's or map's offsets.

    The original may be a slice, and Arrow's `from_arrays` refuses slices together with a mask.
    """
    return pa.array(array.offsets.to_numpy(), pa.int32())
