"""Conversion of Arrow tables that were written with an older schema to the newest schema.

The rules are those of state values (`schema_evolution.py`), whose entries hold their version. Here the data are columns
of Parquet files. Columns are matched by name at every depth. A missing column becomes null. Arrow's exact casts widen
values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pyarrow as pa

from state_backend.formats.types import ArrayType, DataType, MapType, StructType

ConvertBatch = Callable[[pa.RecordBatch], pa.RecordBatch]


def batch_converter(chain: Sequence[StructType], target: pa.Schema) -> ConvertBatch:
    """Return a function that converts batches of the chain's first schema to `target`.

    Args:
        chain: The schemas of all versions from the batches' version to the newest. If one of them lacks a column, the
            column was dropped there, and a later column of the same name is another column. `compare_schemas` must
            allow each step.
        target: The chain's last schema as Arrow schema.
    """
    whole = pa.struct(list(target))

    def convert(batch: pa.RecordBatch) -> pa.RecordBatch:
        columns = _children(batch.columns, batch.num_rows, chain, whole)
        if not columns:
            return pa.RecordBatch.from_struct_array(pa.array([{}] * batch.num_rows, whole))
        return pa.RecordBatch.from_arrays(columns, schema=target)

    return convert


def _children(
    arrays: Sequence[pa.Array], rows: int, chain: Sequence[StructType], target: pa.StructType
) -> list[pa.Array]:
    by_name = [{f.name: f.type for f in schema.fields} for schema in chain]
    places = {name: i for i, name in enumerate(chain[0].names)}
    columns = []
    for field in target:
        types = [types[field.name] for types in by_name if field.name in types]
        if len(types) < len(chain):
            columns.append(pa.nulls(rows, field.type))
        else:
            columns.append(_converted(arrays[places[field.name]], types, field.type))
    return columns


def _converted(array: pa.Array, chain: Sequence[DataType], target: pa.DataType) -> pa.Array:
    """Convert the column to the target's type.

    Args:
        array: The column.
        chain: The types of the field in all versions from the rows' version to the newest.
        target: The Arrow type of the result.
    """
    last = chain[-1]
    if array.type == target and all(t == last for t in chain):
        return array
    match last:
        case StructType():
            structs = [t for t in chain if isinstance(t, StructType)]
            children = _children(array.flatten(), len(array), structs, target)
            if not children:
                return array.cast(target)
            return pa.StructArray.from_arrays(children, fields=list(target), mask=array.is_null())
        case ArrayType():
            lists = [t.element for t in chain if isinstance(t, ArrayType)]
            values = _converted(array.values, lists, target.value_type)
            return pa.ListArray.from_arrays(_offsets(array), values, type=target, mask=array.is_null())
        case MapType():
            maps = [t for t in chain if isinstance(t, MapType)]
            keys = _converted(array.keys, [m.key for m in maps], target.key_type)
            items = _converted(array.items, [m.value for m in maps], target.item_type)
            return pa.MapArray.from_arrays(_offsets(array), keys, items, type=target, mask=array.is_null())
    return array.cast(target)


def _offsets(array: pa.Array) -> pa.Array:
    """Return a copy of a list's or map's offsets.

    The original may be a slice, and Arrow's `from_arrays` refuses slices together with a mask.
    """
    return pa.array(array.offsets.to_numpy(), pa.int32())
