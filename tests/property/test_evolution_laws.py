"""Random chains of allowed evolutions against a model that knows each field by a number of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from decimal import Context, Decimal
from itertools import count
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from state_backend.formats.evolution_columns import columns_reader
from state_backend.formats.row_codec import RowCodec
from state_backend.formats.row_columns import RowColumns
from state_backend.formats.schema_evolution import row_reader
from state_backend.formats.types import parse_struct
from state_backend.state.plan_state_schemas import plan_states
from state_backend.values.errors import StateSchemaError
from state_backend.values.records import SchemaVersion, StateDescriptor
from tests.support.schema_json import array, field, mapping, struct_of

laws = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


# --- the model: a value is kept by the numbers of its fields, and is cast to whatever its type is now -----------------


@dataclass(frozen=True)
class Atom:
    name: str


@dataclass(frozen=True)
class Array:
    element: Any
    contains_null: bool


@dataclass(frozen=True)
class Map:
    """Keys are strings, or structs of one long: their type never changes."""

    struct_keys: bool
    value: Any
    contains_null: bool


@dataclass(frozen=True)
class Member:
    number: int
    name: str
    type: Any
    nullable: bool


@dataclass(frozen=True)
class Struct:
    members: tuple[Member, ...]


def to_json(of: Any) -> Any:
    match of:
        case Atom(name):
            return name
        case Array(element, contains_null):
            return array(to_json(element), contains_null)
        case Map(struct_keys, value, contains_null):
            key = to_json(Struct((Member(0, "k", Atom("long"), False),))) if struct_keys else "string"
            return mapping(key, to_json(value), contains_null)
        case Struct(members):
            return struct_of(*(field(m.name, to_json(m.type), m.nullable) for m in members))


def remember(value: Any, of: Any) -> Any:
    """A row as the model keeps it."""
    if value is None:
        return None
    match of:
        case Array(element):
            return [remember(v, element) for v in value]
        case Map(_, item):
            return {k: remember(v, item) for k, v in value.items()}
        case Struct(members):
            return {m.number: remember(v, m.type) for m, v in zip(members, value, strict=True)}
    return value


def recall(kept: Any, of: Any) -> Any:
    """What is kept, as a row of the type that it has now."""
    if kept is None:
        return None
    match of:
        case Array(element):
            return [recall(v, element) for v in kept]
        case Map(_, item):
            return {k: recall(v, item) for k, v in kept.items()}
        case Struct(members):
            return tuple(recall(kept.get(m.number), m.type) for m in members)
        case Atom("float" | "double"):
            return float(kept)
        case Atom(name) if name.startswith("decimal"):
            return Decimal(f"{kept:.{name[:-1].split(',')[1]}f}")
    return kept


def spelt(value: Any) -> str:
    """Tells 1 from 1.0, 0.1 from 0.10 and a list from a tuple, but not dicts of another order."""
    if isinstance(value, dict):
        return f"{{{sorted((repr(k), spelt(v)) for k, v in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}{[spelt(v) for v in value]}"
    return repr(value)


# --- what may be drawn ------------------------------------------------------------------------------------------------

BITS = {"byte": 8, "short": 16, "integer": 32, "long": 64}
OTHERS = {"string": st.text(max_size=3), "boolean": st.booleans(), "binary": st.binary(max_size=3)}
OTHERS |= {"float": st.floats(width=32, allow_nan=False), "double": st.floats(allow_nan=False), "date": st.dates()}
NEXT = {"byte": ["short", "float"], "short": ["integer", "float"], "integer": ["long", "double"], "float": ["double"]}
names = st.sampled_from("abcd")


@st.composite
def decimals(draw: Any, digits: int = 1, scale: int = 0) -> Atom:
    """With at least so many digits before the point and behind it."""
    scale = draw(st.integers(scale, min(scale + 4, 38 - digits)))
    digits = draw(st.integers(digits, min(digits + 4, 38 - scale)))
    return Atom(f"decimal({digits + scale},{scale})")


@st.composite
def types(draw: Any, numbers: Any, depth: int = 2) -> Any:
    kinds = ["atom", "atom", "decimal", *(["array", "map", "struct"] if depth else [])]
    match draw(st.sampled_from(kinds)):
        case "atom":
            return Atom(draw(st.sampled_from([*BITS, *OTHERS])))
        case "decimal":
            return draw(decimals())
        case "array":
            return Array(draw(types(numbers, depth - 1)), draw(st.booleans()))
        case "map":
            return Map(draw(st.booleans()), draw(types(numbers, depth - 1)), draw(st.booleans()))
    return draw(structs(numbers, depth - 1))


@st.composite
def structs(draw: Any, numbers: Any, depth: int = 2) -> Struct:
    chosen = draw(st.lists(names, max_size=3, unique=True))
    return Struct(tuple(Member(next(numbers), n, draw(types(numbers, depth)), draw(st.booleans())) for n in chosen))


@st.composite
def evolutions(draw: Any, of: Any, numbers: Any) -> Any:
    """A type that ``of`` may become."""
    match of:
        case Array(element, contains_null):
            return Array(draw(evolutions(element, numbers)), contains_null or draw(st.booleans()))
        case Map(struct_keys, value, contains_null):
            return Map(struct_keys, draw(evolutions(value, numbers)), contains_null or draw(st.booleans()))
        case Struct(members):
            kept = [
                replace(m, type=draw(evolutions(m.type, numbers)), nullable=m.nullable or draw(st.booleans()))
                for m in members
                if draw(st.integers(0, 3))
            ]
            # A name that an earlier version had may come back, for another field.
            free = [n for n in "abcdef" if n not in {m.name for m in members}]
            added = draw(st.lists(st.sampled_from(free), max_size=2, unique=True)) if free else []
            new = [Member(next(numbers), name, draw(types(numbers, 1)), True) for name in added]
            return Struct(tuple(draw(st.permutations([*kept, *new]))))
        case Atom(name) if name in NEXT:
            return draw(st.sampled_from([of, *map(Atom, NEXT[name])]))
        case Atom(name) if name.startswith("decimal"):
            precision, scale = map(int, name[8:-1].split(","))
            return draw(st.just(of) | decimals(precision - scale, scale))
    return of


@st.composite
def new_names(draw: Any, before: Any, now: Any, path: str = "s") -> tuple[Any, dict[str, str]]:
    """The evolved type with new names for some of the kept fields, and these names as a pipeline declares them."""
    renamed: dict[str, str] = {}
    match before, now:
        case Array(was), Array(element, contains_null):
            element, renamed = draw(new_names(was, element, f"{path}.element"))
            return Array(element, contains_null), renamed
        case Map(_, was), Map(struct_keys, value, contains_null):
            value, renamed = draw(new_names(was, value, f"{path}.value"))
            return Map(struct_keys, value, contains_null), renamed
        case Struct(members), Struct(evolved):
            known = {m.number: m for m in members}
            free = [n for n in "abcdef" if n not in {m.name for m in (*members, *evolved)}]
            made = []
            for m in evolved:
                name, type_ = m.name, m.type
                if m.number in known:
                    if free and draw(st.booleans()):
                        name = free.pop(draw(st.integers(0, len(free) - 1)))
                        renamed[f"{path}.{m.name}"] = name
                    type_, inside = draw(new_names(known[m.number].type, type_, f"{path}.{name}"))
                    renamed |= inside
                made.append(replace(m, name=name, type=type_))
            return Struct(tuple(made)), renamed
    return now, renamed


def values(of: Any, nullable: bool) -> Any:
    some = _values(of)
    return st.none() | some if nullable else some


def _values(of: Any) -> Any:
    match of:
        case Array(element, contains_null):
            return st.lists(values(element, contains_null), max_size=3)
        case Map(struct_keys, value, contains_null):
            keys = st.tuples(st.integers(-9, 9)) if struct_keys else st.text(max_size=2)
            return st.dictionaries(keys, values(value, contains_null), max_size=2)
        case Struct(members):
            return st.tuples(*(values(m.type, m.nullable) for m in members))
        case Atom(name) if name in BITS:
            return st.integers(-(1 << BITS[name] - 1), (1 << BITS[name] - 1) - 1)
        case Atom(name) if name in OTHERS:
            return OTHERS[name]
        case Atom(name):
            precision, scale = map(int, name[8:-1].split(","))
            unscaled = st.integers(1 - 10**precision, 10**precision - 1)
            return unscaled.map(lambda n: Decimal(n).scaleb(-scale, Context(prec=80)))


def declared(of: Struct) -> StateDescriptor:
    version = SchemaVersion(version=1, value=to_json(of), user_key=None)
    return StateDescriptor(name="s", kind="value", state_id=1, ttl_ms=None, versions=(version,))


# --- the laws ---------------------------------------------------------------------------------------------------------


@laws
@given(st.data())
@pytest.mark.long("half a second", runs_in="ci")
def test_rows_of_every_schema_version_are_read_as_the_newest_version(data: st.DataObject) -> None:
    numbers = count()
    schema = data.draw(structs(numbers))
    recorded: tuple[StateDescriptor, ...] = ()
    renamed: dict[str, str] = {}
    written: list[tuple[bytes, Any]] = []
    for _ in range(data.draw(st.integers(1, 5))):
        recorded = plan_states("p", recorded, [declared(schema)], dropped=None, renamed=renamed).states
        latest = recorded[0].versions[-1]
        note(f"version {latest.version}: {parse_struct(latest.value)}")
        row = data.draw(_values(schema))
        codec = RowCodec("s", parse_struct(latest.value), latest.version)
        written.append((codec.encode(row), remember(row, schema)))
        read = row_reader("s", recorded[0].versions)
        for encoded, kept in written:
            found = read(encoded)
            assert spelt(found) == spelt(recall(kept, schema))
            # What is read can be written back, and then reads the same.
            assert spelt(read(codec.encode(found))) == spelt(found)
        schema, renamed = data.draw(new_names(schema, data.draw(evolutions(schema, numbers))))


@laws
@given(st.data())
@pytest.mark.long("half a second", runs_in="ci")
def test_columns_of_mixed_versions_read_as_their_rows_do(data: st.DataObject) -> None:
    """In any order, from the middle of an array, and with elements that are not there."""
    numbers = count()
    schema = data.draw(structs(numbers))
    recorded: tuple[StateDescriptor, ...] = ()
    renamed: dict[str, str] = {}
    written: list[bytes | None] = [None]
    for _ in range(data.draw(st.integers(1, 4))):
        recorded = plan_states("p", recorded, [declared(schema)], dropped=None, renamed=renamed).states
        latest = recorded[0].versions[-1]
        note(f"version {latest.version}: {parse_struct(latest.value)}")
        codec = RowCodec("s", parse_struct(latest.value), latest.version)
        written += [codec.encode(row) for row in data.draw(st.lists(_values(schema), max_size=3))]
        schema, renamed = data.draw(new_names(schema, data.draw(evolutions(schema, numbers))))
    shuffled = data.draw(st.lists(st.sampled_from(written), max_size=12))
    start = data.draw(st.integers(0, len(shuffled)))
    columns = columns_reader("s", recorded[0].versions)(pa.array(shuffled, pa.binary())[start:])

    arrow_schema = RowColumns("s", parse_struct(latest.value), latest.version).arrow_schema
    read = row_reader("s", recorded[0].versions)
    rows = [(None,) * len(arrow_schema) if row is None else read(row) for row in shuffled[start:]]
    assert (columns.schema, columns.num_rows) == (arrow_schema, len(rows))
    for i, column in enumerate(arrow_schema):
        assert columns.column(i).equals(pa.array([row[i] for row in rows], column.type))


@laws
@given(st.data())
def test_a_new_schema_version_is_recorded_only_if_the_schema_changes(data: st.DataObject) -> None:
    numbers = count()
    schema = data.draw(structs(numbers))
    recorded = plan_states("p", [], [declared(schema)]).states
    evolved = data.draw(evolutions(schema, numbers))
    planned = plan_states("p", recorded, [declared(evolved)], dropped=None).states
    assert len(planned[0].versions) == 1 + (to_json(evolved) != to_json(schema))
    assert planned[0].versions[-1].value == to_json(evolved)


@laws
@given(st.data())
@pytest.mark.long("half a second", runs_in="ci")
def test_a_widened_or_loosened_schema_can_not_be_taken_back(data: st.DataObject) -> None:
    """Where fields neither come nor go, only one direction of a change is ever allowed."""
    numbers = count()
    schema = data.draw(structs(numbers))
    evolved = data.draw(evolutions(schema, numbers).filter(lambda e: _shape(e) == _shape(schema)))
    recorded = plan_states("p", [], [declared(evolved)]).states
    if _sorted(evolved) == _sorted(schema):
        assert plan_states("p", recorded, [declared(schema)]).states[0].versions[0].version == 1
    else:
        with pytest.raises(StateSchemaError):
            plan_states("p", recorded, [declared(schema)])


def _shape(of: Any) -> Any:
    """The numbers of all fields, without order."""
    match of:
        case Struct(members):
            return {(m.number, str(_shape(m.type))) for m in members}
        case Array(inner) | Map(_, inner):
            return _shape(inner)
    return set()


def _sorted(of: Any) -> Any:
    match of:
        case Struct(members):
            return [(m.number, m.nullable, _sorted(m.type)) for m in sorted(members, key=lambda m: m.number)]
        case Array(inner, nullable) | Map(_, inner, nullable):
            return nullable, _sorted(inner)
    return of
