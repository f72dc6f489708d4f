"""The schema of a table whose files have different schemas.

Columns are matched by name at every depth. The table has the columns of all schemas, and a column has the type that
holds the values of all files. So no value is lost, and neither the order in which files were written nor the newest
file decides. A file that lacks a column has null there. Arrow's exact casts widen values.

docs/state-schema.md has the table of types ("Change the output's schema").
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from state_backend.formats.schema_evolution import widens
from state_backend.formats.types import ArrayType, DataType, Field, MapType, StructType


@dataclass(frozen=True, slots=True)
class Clash:
    """Two types of one field, neither of which can hold all values of the other: the field's path, and both types."""

    path: str
    one: DataType
    other: DataType


def join_schemas(one: StructType, other: StructType) -> tuple[StructType, tuple[Clash, ...]]:
    """Return a schema that holds rows of both schemas, and the clashes: fields for which no type holds both.

    The fields of the first schema come first. A field that clashes has its type of the first schema.
    """
    clashes: list[Clash] = []
    return _joined_structs("", one, other, clashes), tuple(clashes)


def table_schema(recorded: Iterable[StructType], read: Iterable[StructType] = ()) -> StructType:
    """Return the schema of a table, given all schemas that its files ever had and those of the files that are read.

    Args:
        recorded: All schemas, oldest first; empty if no record has them. The newest gives the order of the columns.
        read: The schemas of the files that are read, which must not clash. They decide the type of a column whose
            recorded types clash.
    """
    made, others = _fold([*dict.fromkeys(recorded)][::-1])
    used, _ = _fold([*read])
    if made is None or used is None:
        return made or used or StructType(())
    made, clashes = join_schemas(made, used)
    clashing = {clash.path.partition(".")[0] for clash in (*others, *clashes)}
    types = {field.name: field.type for field in used.fields if field.name in clashing}
    return StructType(tuple(replace(field, type=types.get(field.name, field.type)) for field in made.fields))


def _fold(schemas: Sequence[StructType]) -> tuple[StructType | None, list[Clash]]:
    made, clashes = next(iter(schemas), None), list[Clash]()
    for schema in schemas[1:]:
        assert made is not None
        made, more = join_schemas(made, schema)
        clashes += more
    return made, clashes


def _joined_structs(path: str, one: StructType, other: StructType, clashes: list[Clash]) -> StructType:
    others = {field.name: field for field in other.fields}
    fields = []
    for field in one.fields:
        there = others.pop(field.name, None)
        made = replace(field, nullable=field.nullable or there is None or there.nullable)
        if there is not None:
            made = replace(made, type=_join(f"{path}{field.name}", field.type, there.type, clashes))
        fields.append(made)
    return StructType((*fields, *(Field(f.name, f.type, True, f.metadata) for f in others.values())))


def _join(path: str, one: DataType, other: DataType, clashes: list[Clash]) -> DataType:
    match one, other:
        case StructType(), StructType():
            return _joined_structs(f"{path}.", one, other, clashes)
        case ArrayType(), ArrayType():
            element = _join(f"{path}.element", one.element, other.element, clashes)
            return ArrayType(element, one.contains_null or other.contains_null)
        case MapType(), MapType() if one.key == other.key:
            value = _join(f"{path}.value", one.value, other.value, clashes)
            return MapType(one.key, value, one.value_contains_null or other.value_contains_null)
        case _ if one == other or widens(other, one):
            return one
        case _ if widens(one, other):
            return other
    clashes.append(Clash(path, one, other))
    return one
