"""Rules for changes of a state's schema, and conversion of entries of older versions.

    entry    u8 format | u8 schema version | body        (row_codec.py draws the body)

An entry keeps the version that it was written with until the processor writes it again. The state digest hashes entries
with their versions, and rewriting all state on a deployment would be too expensive. So the decoder converts an entry
when it reads the entry.

docs/state-schema.md lists the allowed changes ("Change a state's schema"). Besides these, byte and short may become
float. A dropped field that is added again under its name starts from null.

The same rules hold inside structs, array elements and map values. Each conversion is exact. So a value does not depend
on the versions between. Keys of maps must never change, because the digest hashes their bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, tzinfo
from decimal import Decimal
from typing import Any

from state_backend.formats.row_codec import FORMAT, RowCodec
from state_backend.formats.types import (
    EXACT,
    ArrayType,
    AtomicType,
    Convert,
    DataType,
    DecimalType,
    Field,
    MapType,
    StructFactory,
    StructType,
    parse_struct,
    same,
)
from state_backend.values.errors import CorruptFile
from state_backend.values.frozen import frozen
from state_backend.values.records import SchemaVersion

ReadRow = Callable[[bytes], tuple[Any, ...]]

_WIDER = {
    "byte": ("short", "integer", "long", "float", "double"),
    "short": ("integer", "long", "float", "double"),
    "integer": ("long", "double"),
    "float": ("double",),
}


@frozen
class SchemaChange:
    """Differences of a declared schema from a recorded schema.

    Attributes:
        dropped: Paths of recorded fields that are not declared (`a`, `a.element.b`).
        refused: Sentences about changes that are not allowed, each with field, recorded and declared type, and remedy.
    """

    dropped: tuple[str, ...]
    refused: tuple[str, ...]


def compare_schemas(recorded: StructType, declared: StructType) -> SchemaChange:
    """Compare two schemas at every depth, and return the dropped fields and the refused changes.

    Other allowed changes, such as an added field, are in neither list.
    """
    differences = list(_struct_differences("", recorded, declared))
    return SchemaChange(
        dropped=tuple(path for path, refusal in differences if refusal is None),
        refused=tuple(f"field {path!r}: {refusal}" for path, refusal in differences if refusal is not None),
    )


# The differences of two schemas, as pairs: the path of a field, and the reason why its change is refused. The reason is
# None for a dropped field, because drops are allowed.
_Differences = Iterator[tuple[str, str | None]]


def _struct_differences(path: str, recorded: StructType, declared: StructType) -> _Differences:
    dot = f"{path}." if path else ""
    before, now = _by_name(recorded), _by_name(declared)
    gone = {name.lower(): name for name in before if name not in now}
    respelled = {gone[name.lower()]: name for name in now if name not in before and name.lower() in gone}
    yield from ((dot + name, None) for name in gone.values() if name not in respelled)
    for name, spelled in respelled.items():
        yield dot + name, f"declared as {spelled!r}, which differs in case only: declare it as recorded"
    for name, field in now.items():
        was = before.get(name)
        if was is not None:
            yield from _differences(dot + name, was.type, was.nullable, field.type, field.nullable)
        elif not field.nullable and name not in respelled.values():
            why = "older rows lack it: make it nullable"
            yield dot + name, f"not recorded, declared as {field.type} NOT NULL; {why}"


def _differences(path: str, was: DataType, was_nullable: bool, now: DataType, now_nullable: bool) -> _Differences:
    if was_nullable and not now_nullable:
        yield path, f"recorded as {was}, declared as {now} NOT NULL; older rows may be null there: make it nullable"
    match was, now:
        case StructType(), StructType():
            yield from _struct_differences(path, was, now)
        case ArrayType(), ArrayType():
            yield from _differences(f"{path}.element", was.element, was.contains_null, now.element, now.contains_null)
        case MapType(), MapType():
            if was.key != now.key:
                why = f"keys of maps can't change: {_KEEP}"
                yield f"{path}.key", f"recorded as {was.key}, declared as {now.key}; {why}"
            value = f"{path}.value"
            yield from _differences(value, was.value, was.value_contains_null, now.value, now.value_contains_null)
        case _ if was != now and not widens(was, now):
            why = (
                "recorded values may not fit"
                if widens(now, was)
                else "some recorded values have no equal in the new type"
            )
            yield path, f"recorded as {was}, declared as {now}; {why}: {_KEEP}"


_KEEP = "declare it as recorded, or add a field of another name"


def field_types(of: DataType, path: str = "") -> dict[str, DataType]:
    """Return the types of all fields of `of`, by path (`a`, `a.element.b`). Fields in keys of maps are left out."""
    match of:
        case StructType():
            dot = f"{path}." if path else ""
            found: dict[str, DataType] = {}
            for field in of.fields:
                found |= {dot + field.name: field.type} | field_types(field.type, dot + field.name)
            return found
        case ArrayType():
            return field_types(of.element, f"{path}.element")
        case MapType():
            return field_types(of.value, f"{path}.value")
    return {}


def with_names_swapped(schema: Any, one: str, other: str, path: str = "") -> Any:
    """Return a schema (JSON) with two field names of one struct swapped. If one field is missing, the other is renamed.

    If all versions of a state are swapped, its entries read as before: a field that an older version dropped does not
    come back when another field takes its name.

    Args:
        schema: The schema, or a type in the schema.
        one: Path of a field, as in `field_types`.
        other: Path of the other field, in the same struct.
        path: Path of `schema` itself.
    """
    match schema:
        case {"type": "struct", "fields": fields}:
            dot = f"{path}." if path else ""
            names = {one: other.rpartition(".")[2], other: one.rpartition(".")[2]}
            inside = [{**f, "type": with_names_swapped(f["type"], one, other, dot + f["name"])} for f in fields]
            return {**schema, "fields": [{**f, "name": names.get(dot + f["name"], f["name"])} for f in inside]}
        case {"type": "array", "elementType": element}:
            return {**schema, "elementType": with_names_swapped(element, one, other, f"{path}.element")}
        case {"type": "map", "valueType": value}:
            return {**schema, "valueType": with_names_swapped(value, one, other, f"{path}.value")}
    return schema


def widens(was: DataType, now: DataType) -> bool:
    match was, now:
        case AtomicType(), AtomicType():
            return now.name in _WIDER.get(was.name, ())
        case DecimalType(), DecimalType():
            return now.scale >= was.scale and now.precision - now.scale >= was.precision - was.scale
    return False


def _by_name(schema: StructType) -> dict[str, Field]:
    return {f.name: f for f in schema.fields}


class EvolvingRowCodec(RowCodec):
    """Codec of the rows of one state at all recorded versions, which must ascend.

    `encode` writes the latest version. `decode` reads every version and returns the latest version's fields. `decode`
    raises `CorruptFile` for an unknown version and for rows that `RowCodec.decode` refuses.
    """

    __slots__ = ()

    def __init__(
        self,
        state_name: str,
        versions: Sequence[SchemaVersion],
        struct_factory: StructFactory | None = None,
        zone: tzinfo = UTC,
    ) -> None:
        latest = versions[-1]
        super().__init__(state_name, parse_struct(latest.value), latest.version, struct_factory, zone)
        if len(versions) > 1:
            self.decode = _any_version(state_name, self.decode, versions, struct_factory, zone)


def row_reader(state_name: str, versions: Sequence[SchemaVersion]) -> ReadRow:
    """Return a function that decodes a row of any recorded version to the fields of the latest version."""
    return EvolvingRowCodec(state_name, versions).decode


def _any_version(
    state_name: str,
    decode_latest: ReadRow,
    versions: Sequence[SchemaVersion],
    struct_factory: StructFactory | None,
    zone: tzinfo,
) -> ReadRow:
    # The reader of an older version is built when the first entry of that version is read. A long-lived state has many
    # versions, and most of them have no entries left.
    recorded = [v.version for v in versions]
    readers = {recorded[-1]: decode_latest}

    def read(data: bytes) -> tuple[Any, ...]:
        try:
            decode = readers[data[1]]
        except LookupError:
            decode = older(data)
        return decode(data)

    def older(data: bytes) -> ReadRow:
        if len(data) < 2 or data[0] != FORMAT:
            return decode_latest  # It raises an error that names the unknown row format of these bytes.
        version = data[1]
        if version not in recorded:
            raise CorruptFile(
                f"state {state_name!r}: an entry has schema version {version}, expected one of "
                f"{', '.join(map(str, recorded))}; restore an older checkpoint"
            )
        chain = [parse_struct(v.value) for v in versions if v.version >= version]
        readers[version] = reader = _older_reader(state_name, version, chain, struct_factory, zone)
        return reader

    return read


def _older_reader(
    state_name: str, version: int, chain: Sequence[StructType], struct_factory: StructFactory | None, zone: tzinfo
) -> ReadRow:
    # `RowCodec` gets no struct factory here, so it decodes nested structs to tuples. The conversion needs items by
    # index, which the objects of the caller's factory may not have.
    decode = RowCodec(state_name, chain[0], version, zone=zone).decode
    convert = _row_conversion(chain, struct_factory)
    return decode if convert is None else lambda data: convert(decode(data))


def field_sources(
    chain: Sequence[StructType], struct_factory: StructFactory | None = None
) -> list[tuple[int, Convert | None]]:
    """Return how to compute each field of the newest schema from a row of the oldest schema in the chain.

    Args:
        chain: The schemas of all versions from the rows' version to the latest. If one of them lacks a field, the field
            was dropped there, and a later field of the same name is another field.
        struct_factory: The factory of nested structs; None for tuples.

    Returns:
        For each field of the chain's last schema, the field's index in the first schema, and the converter of its
        values. The index is -1 if any schema of the chain lacks the field: its values are null then. The converter
        takes non-null Python values; None means that values stay the same.
    """
    by_name = [_by_name(schema) for schema in chain]
    places = {name: i for i, name in enumerate(chain[0].names)}
    sources: list[tuple[int, Convert | None]] = []
    for name in chain[-1].names:
        types = [schema[name].type for schema in by_name if name in schema]
        kept = len(types) == len(chain)
        sources.append((places[name], _conversion(types, struct_factory)) if kept else (-1, None))
    return sources


def _row_conversion(
    chain: Sequence[StructType], struct_factory: StructFactory | None
) -> Callable[[tuple[Any, ...]], tuple[Any, ...]] | None:
    """Return a function that converts a tuple from the first schema of `chain` to the last; None if none is needed."""
    sources = field_sources(chain, struct_factory)
    places = [place for place, _ in sources]
    converts = [(i, convert) for i, (_, convert) in enumerate(sources) if convert is not None]
    if not converts and places == list(range(len(chain[0].fields))):
        return None

    def convert_row(row: tuple[Any, ...]) -> tuple[Any, ...]:
        padded = (*row, None)  # place -1 is the None
        values = [padded[place] for place in places]
        for i, convert in converts:
            if values[i] is not None:
                values[i] = convert(values[i])
        return tuple(values)

    return convert_row


def _conversion(chain: Sequence[DataType], struct_factory: StructFactory | None) -> Convert | None:
    """Return the function that converts a non-null Python value of the chain's first type to its last type.

    The result is None if values stay the same. Conversions of numbers are exact, so the types between the first and the
    last do not matter. For structs they matter: if one of the types between lacks a field, the field was dropped there.
    A later field of the same name is a new field, which is null in old values.
    """
    first, last = chain[0], chain[-1]
    match last:
        case StructType():
            convert = _row_conversion([t for t in chain if isinstance(t, StructType)], struct_factory)
            if struct_factory is None:
                return convert
            make = struct_factory(last.names)
            return make if convert is None else lambda row: make(convert(row))
        case ArrayType():
            element = _conversion([t.element for t in chain if isinstance(t, ArrayType)], struct_factory)
            if element is None:
                return None
            return lambda items: [None if item is None else element(item) for item in items]
        case MapType():
            key = _conversion([last.key], struct_factory)
            value = _conversion([t.value for t in chain if isinstance(t, MapType)], struct_factory)
            if key is None and value is None:
                return None
            to_key, to_value = key or same, value or same
            return lambda entries: {to_key(k): None if v is None else to_value(v) for k, v in entries.items()}
        case AtomicType("float" | "double") if first not in _FLOATS:
            return float
        case DecimalType() if last.scale != (first.scale if isinstance(first, DecimalType) else None):
            unit = Decimal(1).scaleb(-last.scale)
            return lambda value: value.quantize(unit, context=EXACT)
    return None


_FLOATS = (AtomicType("float"), AtomicType("double"))
