"""What may change in a state's schema, what is refused and how, and how older entries read."""

from __future__ import annotations

import struct as binary
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from state_backend.adapters.rocks import RocksStore
from state_backend.formats.evolution_columns import columns_reader
from state_backend.formats.row_codec import RowCodec
from state_backend.formats.row_columns import RowColumns
from state_backend.formats.schema_evolution import EvolvingRowCodec, compare_schemas, row_reader
from state_backend.formats.types import parse_struct
from state_backend.state.expiry import expire
from state_backend.state.plan_state_schemas import StatePlan, plan_states
from state_backend.state.shard_state import ShardState
from state_backend.state.state_variables import ListState, MapState, ValueState
from state_backend.values.errors import CorruptFile, StateSchemaError, UnsupportedFormat
from state_backend.values.records import KeyGroupState, SchemaVersion, StateDescriptor
from tests.support.schema_json import array, field, mapping
from tests.support.schema_json import struct_of as struct
from tests.support.shards import KEYS

INTEGRALS = ["byte", "short", "integer", "long"]
TYPES = [*INTEGRALS, "boolean", "float", "double", "string", "binary", "date", "timestamp", "timestamp_ntz"]
DECIMALS = ["decimal(4,0)", "decimal(5,2)", "decimal(6,2)", "decimal(6,3)", "decimal(6,4)", "decimal(38,2)"]

WIDENINGS = {
    *(("byte", to) for to in ("short", "integer", "long", "float", "double")),
    *(("short", to) for to in ("integer", "long", "float", "double")),
    *(("integer", to) for to in ("long", "double")),
    ("float", "double"),
    *(("decimal(4,0)", to) for to in ("decimal(6,2)", "decimal(38,2)")),
    *(("decimal(5,2)", to) for to in ("decimal(6,2)", "decimal(6,3)", "decimal(38,2)")),
    ("decimal(6,2)", "decimal(38,2)"),
}


def versions(*schemas: dict[str, Any]) -> tuple[SchemaVersion, ...]:
    return tuple(SchemaVersion(version=n, value=s, user_key=None) for n, s in enumerate(schemas, start=1))


def state(name: str = "s", *schemas: dict[str, Any], kind: Any = "value", **changes: Any) -> StateDescriptor:
    made = versions(*(schemas or (struct(field("a", "long")),)))
    if kind == "map":
        made = tuple(replace(v, user_key=struct(field("u", "string"))) for v in made)
    return replace(StateDescriptor(name=name, kind=kind, state_id=1, ttl_ms=None, versions=made), **changes)


def evolve(recorded: dict[str, Any], declared: dict[str, Any], **changes: Any) -> StatePlan:
    return plan_states("p", [state("s", recorded)], [state("s", declared)], **changes)


def read(version: int, row: tuple[Any, ...], *schemas: dict[str, Any]) -> tuple[Any, ...]:
    """The row as it reads at the last of the schemas, written at the version (from 1); in columns just the same."""
    data = RowCodec("s", parse_struct(schemas[version - 1]), version).encode(row)
    found = row_reader("s", versions(*schemas))(data)
    columns = columns_reader("s", versions(*schemas))(pa.array([data, None, data]))
    arrow_schema = RowColumns("s", parse_struct(schemas[-1]), len(schemas)).arrow_schema
    assert (columns.schema, columns.num_rows) == (arrow_schema, 3)
    for column, type_, value in zip(columns.columns, arrow_schema.types, found, strict=True):
        assert column.equals(pa.array([value, None, value], type_))
    return found


@pytest.mark.parametrize("was", [*TYPES, *DECIMALS])
def test_numbers_widen_and_nothing_else_changes_its_type(was: str) -> None:
    for now in [*TYPES, *DECIMALS]:
        for wrap in (lambda t: t, array, lambda t: mapping("string", t), lambda t: struct(field("x", t))):
            change = compare_schemas(
                parse_struct(struct(field("a", wrap(was)))), parse_struct(struct(field("a", wrap(now))))
            )
            assert (not change.refused) == (was == now or (was, now) in WIDENINGS), (was, now)


ALLOWED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a nullable field is added": (struct(field("a", "long")), struct(field("a", "long"), field("b", "string"))),
    "one in front": (struct(field("a", "long")), struct(field("b", "string"), field("a", "long"))),
    "a field is dropped": (struct(field("a", "long"), field("b", "long", False)), struct(field("a", "long"))),
    "fields are reordered": (
        struct(field("a", "long"), field("b", "string")),
        struct(field("b", "string"), field("a", "long")),
    ),
    "NOT NULL is given up": (struct(field("a", "long", False)), struct(field("a", "long"))),
    "and below": (
        struct(field("a", array("long", False)), field("b", mapping("string", "long", False))),
        struct(field("a", array("long")), field("b", mapping("string", "long"))),
    ),
    "a NOT NULL field widens": (struct(field("a", "byte", False)), struct(field("a", "double", False))),
    "in an element's struct": (
        struct(field("a", array(struct(field("x", "short"), field("y", "date"))))),
        struct(field("a", array(struct(field("z", "binary"), field("x", "integer"))))),
    ),
    "in a map's value": (
        struct(field("a", mapping(struct(field("k", "long")), struct(field("x", "float"))))),
        struct(field("a", mapping(struct(field("k", "long")), struct(field("x", "double"), field("y", "long"))))),
    ),
}


@pytest.mark.parametrize(("recorded", "declared"), ALLOWED.values(), ids=ALLOWED)
def test_allowed_changes_append_a_version(recorded: dict[str, Any], declared: dict[str, Any]) -> None:
    (planned,) = evolve(recorded, declared, dropped=None).states
    assert [(v.version, v.value) for v in planned.versions] == [(1, recorded), (2, declared)]


ONE = struct(field("a", "long"))
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a NOT NULL field is added": (
        ONE,
        struct(field("a", "long"), field("b", "string", False)),
        "field 'b': not recorded, declared as string NOT NULL; older rows lack it: make it nullable",
    ),
    "NOT NULL is demanded": (
        ONE,
        struct(field("a", "long", False)),
        "field 'a': recorded as bigint, declared as bigint NOT NULL; older rows may be null there: make it nullable",
    ),
    "a number is narrowed": (
        ONE,
        struct(field("a", "integer")),
        "field 'a': recorded as bigint, declared as int; recorded values may not fit: "
        "declare it as recorded, or add a field of another name",
    ),
    "digits are taken from the integer part": (
        struct(field("a", "decimal(5,2)")),
        struct(field("a", "decimal(5,3)")),
        "field 'a': recorded as decimal(5,2), declared as decimal(5,3); some recorded values have no equal in the new type: ",
    ),
    "a type changes": (
        ONE,
        struct(field("a", "double")),
        "field 'a': recorded as bigint, declared as double; some recorded values have no equal in the new type: "
        "declare it as recorded, or add a field of another name",
    ),
    "an atom becomes a struct": (
        ONE,
        struct(field("a", struct(field("x", "long")))),
        "field 'a': recorded as bigint, declared as struct<x: bigint>; ",
    ),
    "an array becomes a map": (
        struct(field("a", array("long"))),
        struct(field("a", mapping("long", "long"))),
        "field 'a': recorded as array<bigint>, declared as map<bigint, bigint>; ",
    ),
    "a key of a map widens": (
        struct(field("a", mapping("integer", "long"))),
        struct(field("a", mapping("long", "long"))),
        "field 'a.key': recorded as int, declared as bigint; keys of maps can't change: "
        "declare it as recorded, or add a field of another name",
    ),
    "elements become NOT NULL": (
        struct(field("a", array("long"))),
        struct(field("a", array("long", False))),
        "field 'a.element': recorded as bigint, declared as bigint NOT NULL; ",
    ),
    "values of a map become NOT NULL": (
        struct(field("a", mapping("string", "long"))),
        struct(field("a", mapping("string", "long", False))),
        "field 'a.value': recorded as bigint, declared as bigint NOT NULL; ",
    ),
    "far inside": (
        struct(field("a", array(mapping("string", struct(field("x", "double")))))),
        struct(field("a", array(mapping("string", struct(field("x", "float"), field("y", "date", False)))))),
        "field 'a.element.value.x': recorded as double, declared as float; recorded values may not fit: declare it "
        "as recorded, or add a field of another name; "
        "field 'a.element.value.y': not recorded, declared as date NOT NULL; ",
    ),
    "an added field can't be stored": (
        ONE,
        struct(field("a", "long"), field("b", "variant")),
        "field 'b': variant can't be stored: ",
    ),
}


@pytest.mark.parametrize(("recorded", "declared", "says"), REFUSED.values(), ids=REFUSED)
def test_refused_changes_name_the_field_and_what_to_do(
    recorded: dict[str, Any], declared: dict[str, Any], says: str
) -> None:
    """F91, S39: before the first record, on the driver."""
    with pytest.raises(StateSchemaError) as refusal:
        evolve(recorded, declared)
    assert str(refusal.value).startswith(f"pipeline 'p', state 's' {says}")


@pytest.mark.parametrize(
    ("recorded", "declared", "says"),
    [
        (
            state(),
            state(kind="list"),
            "its kind is recorded as value, declared as list; it can't change: declare it as",
        ),
        (state(kind="list"), state(kind="map"), "its kind is recorded as list, declared as map"),
        (
            state(kind="map"),
            state(versions=(SchemaVersion(version=1, value=ONE, user_key=struct(field("u", "long"))),), kind="map"),
            "its user key is recorded as struct<u: string>, declared as struct<u: bigint>; it can't change",
        ),
    ],
)
def test_a_changed_kind_or_user_key_type_of_a_state_is_refused(
    recorded: StateDescriptor, declared: StateDescriptor, says: str
) -> None:
    """F91, S39."""
    with pytest.raises(StateSchemaError) as refusal:
        plan_states("p", [recorded], [declared])
    assert str(refusal.value).startswith(f"pipeline 'p', state 's': {says}")


def test_types_that_can_not_be_stored_are_refused_for_new_states_too() -> None:
    with pytest.raises(StateSchemaError, match=r"pipeline 'p', state 's' field 'a\.element': interval .*BIGINT"):
        plan_states("p", [], [state("s", struct(field("a", array("interval day to second"))))])


def test_the_same_schema_makes_no_version() -> None:
    """A comment is no change: entries would be the same bytes but for their version."""
    recorded = state("s", struct(field("a", "long", comment="old")))
    plan = plan_states("p", [recorded], [state("s", struct(field("a", "long", comment="new")), ttl_ms=5)])
    assert plan == StatePlan(states=(replace(recorded, ttl_ms=5),), undeclared=(), dropped=(), warnings=())


def test_going_back_to_an_earlier_schema_appends_a_new_version() -> None:
    first, second = struct(field("a", "long")), struct(field("a", "long"), field("b", "string"))
    (planned,) = plan_states("p", [state("s", first, second)], [state("s", first)], dropped=["s.b"]).states
    assert [(v.version, v.value) for v in planned.versions] == [(1, first), (2, second), (3, first)]


def test_a_removed_field_is_refused_unless_declared_as_renamed_or_dropped() -> None:
    """A rename looks just like it, and would lose what is recorded under the old name."""
    recorded = struct(
        field("a", "long"), field("b", "long"), field("c", struct(field("x", "date"), field("y", "date")))
    )
    declared = struct(field("a", "long"), field("n", "long"), field("c", struct(field("y", "date"))))
    with pytest.raises(StateSchemaError) as refusal:
        evolve(recorded, declared)
    assert str(refusal.value) == (
        "pipeline 'p', state 's' no longer declares b, c.x: the recorded values would be lost\n"
        "If b is now called n, keep the values with Pipeline(renamed={'s.b': 'n'})\n"
        "To give the values up, set Pipeline(dropped=['s.b', 's.c.x']); else declare the field again"
    )
    with pytest.raises(StateSchemaError, match=r"state 's' no longer declares c\.x: "):
        evolve(recorded, declared, renamed={"s.b": "n"})
    plan = evolve(recorded, declared, dropped=["s.b", "s.c.x", "other.b"])
    assert plan.warnings == ()
    assert plan_states("p", plan.states, [state("s", declared)]).states == plan.states
    # The fields of a ready-made processor follow its settings.
    (warning,) = evolve(recorded, declared, dropped=None).warnings
    assert warning.startswith("state 's' no longer declares b, c.x: ")


LONG_B = struct(field("a", "long"), field("b", "integer"))
NESTED = struct(field("l", array(LONG_B)), field("m", mapping("string", LONG_B)))


@pytest.mark.parametrize(
    ("recorded", "declared", "renamed", "rows"),
    [
        # The same schema but for the name: no new version.
        ([LONG_B], struct(field("a", "long"), field("n", "integer")), {"s.b": "n"}, {1: ((1, 2), (1, 2))}),
        # It widens, and moves.
        ([LONG_B], struct(field("n", "long"), field("a", "long")), {"s.b": "n"}, {1: ((1, 2), (2, 1))}),
        ([LONG_B], struct(field("a", "long"), field("B", "integer")), {"s.b": "B"}, {1: ((1, 2), (1, 2))}),
        # Older entries have a field of the new name, which was dropped: they read as before, null if nothing is left.
        (
            [struct(field("n", "long")), struct(field("b", "long"), field("n", "long")), struct(field("b", "long"))],
            struct(field("n", "long")),
            {"s.b": "n"},
            {1: ((7,), (None,)), 2: ((1, 7), (1,)), 3: ((1,), (1,))},
        ),
        # The field was dropped and added again before.
        (
            [struct(field("b", "long")), struct(field("a", "long")), struct(field("a", "long"), field("b", "long"))],
            struct(field("a", "long"), field("n", "long")),
            {"s.b": "n"},
            {1: ((7,), (None, None)), 2: ((1,), (1, None)), 3: ((1, 2), (1, 2))},
        ),
        # The pipeline says what earlier bases called it.
        ([LONG_B], struct(field("a", "long"), field("z", "integer")), {"s.b": "z", "s.n": "z"}, {1: ((1, 2), (1, 2))}),
        # Already renamed, in another state, or not renamed at all.
        ([struct(field("n", "long"))], struct(field("n", "long")), {"s.b": "n", "t.n": "b"}, {1: ((1,), (1,))}),
        ([LONG_B], LONG_B, {"s.b": "n"}, {1: ((1, 2), (1, 2))}),
        # Inside of other types; a struct and its own fields.
        (
            [NESTED],
            struct(field("l", array(struct(field("a", "long"), field("n", "long")))), NESTED["fields"][1]),
            {"s.l.element.b": "n"},
            {1: (([(1, 2)], {"k": (3, 4)}), ([(1, 2)], {"k": (3, 4)}))},
        ),
        (
            [NESTED],
            struct(
                NESTED["fields"][0], field("v", mapping("string", struct(field("b", "integer"), field("n", "long"))))
            ),
            {"s.v.value.a": "n", "s.m": "v"},
            {1: (([(1, 2)], {"k": (3, 4)}), ([(1, 2)], {"k": (4, 3)}))},
        ),
    ],
)
def test_a_renamed_field_keeps_its_values(
    recorded: list[dict[str, Any]],
    declared: dict[str, Any],
    renamed: dict[str, str],
    rows: dict[int, tuple[tuple[Any, ...], tuple[Any, ...]]],
) -> None:
    """Rows by the schema version that they were written with: as written, and as read after the change."""
    before = state("s", *recorded)
    (after,) = plan_states("p", [before], [state("s", declared)], renamed=renamed).states
    assert parse_struct(after.versions[-1].value) == parse_struct(declared)
    for version, (written, found) in rows.items():
        data = RowCodec("s", parse_struct(recorded[version - 1]), version).encode(written)
        assert row_reader("s", after.versions)(data) == found
        columns = columns_reader("s", after.versions)(pa.array([data]))
        arrow_schema = RowColumns("s", parse_struct(declared), after.versions[-1].version).arrow_schema
        # Written now, it is the same.
        now = RowCodec("s", parse_struct(declared), after.versions[-1].version).encode(found)
        assert columns.schema == arrow_schema
        assert columns.equals(columns_reader("s", after.versions)(pa.array([now])))
    # The next interval finds it so.
    assert plan_states("p", [after], [state("s", declared)], renamed=renamed).states == (after,)


@pytest.mark.parametrize(
    ("recorded", "declared", "renamed"),
    [
        # The base has both: whose values?
        (struct(field("b", "long"), field("n", "long")), struct(field("n", "long")), {"s.b": "n"}),
        # No such new field, or no such old one.
        (LONG_B, struct(field("a", "long"), field("z", "integer")), {"s.b": "n"}),
        (LONG_B, struct(field("a", "long"), field("n", "integer")), {"s.x": "n", "b": "n", "t.b": "n"}),
    ],
)
def test_a_rename_that_does_not_match_the_fields_is_refused(
    recorded: dict[str, Any], declared: dict[str, Any], renamed: dict[str, str]
) -> None:
    with pytest.raises(StateSchemaError, match="no longer declares b: "):
        evolve(recorded, declared, renamed=renamed)


@pytest.mark.parametrize("changes", [{"renamed": {"s.b": "n"}}, {"dropped": ["s.b"]}])
@pytest.mark.parametrize("recorded", [LONG_B, struct(field("a", "long"), field("n", "integer"))])
def test_a_name_of_a_renamed_or_dropped_field_is_not_declared_anew(
    recorded: dict[str, Any], changes: dict[str, Any]
) -> None:
    """A base of before the rename would give the new field the values of the old one."""
    with pytest.raises(StateSchemaError, match=r"declares s\.b, which is also in dropped or renamed: "):
        evolve(recorded, struct(field("a", "long"), field("b", "integer"), field("n", "integer")), **changes)


def test_a_renamed_field_obeys_the_rules_of_types() -> None:
    with pytest.raises(StateSchemaError, match="field 'n': recorded as int, declared as string"):
        evolve(LONG_B, struct(field("a", "long"), field("n", "string")), renamed={"s.b": "n"})


def test_a_field_that_differs_in_case_only_is_refused() -> None:
    """Spark ignores case by default, so values under the old spelling would be lost."""
    recorded = struct(field("v", "long"), field("c", struct(field("x", "date"))))
    declared = struct(field("V", "long", nullable=False), field("c", struct(field("X", "date"))))
    told = "field 'v': declared as 'V', which differs in case only: .*; field 'c.x': declared as 'X', which"
    with pytest.raises(StateSchemaError, match=told):
        evolve(recorded, declared)


def test_the_last_version_is_255() -> None:
    wide, narrow = struct(field("a", "long"), field("b", "long")), struct(field("a", "long"))
    recorded = state("s", *[wide if n % 2 else narrow for n in range(254)])
    plan = plan_states("p", [recorded], [state("s", narrow)], dropped=["s.b"])
    assert plan.states[0].versions[-1].version == 255
    with pytest.raises(
        StateSchemaError, match="schema version 255 is the last: declare it as recorded, or under another"
    ):
        plan_states("p", plan.states, [state("s", wide)])
    assert plan_states("p", plan.states, [state("s", narrow)]).states == plan.states


def test_undeclared_states_are_kept_as_they_are_and_found_again() -> None:
    recorded = (state("gone", ttl_ms=7), state("kept", state_id=4))
    plan = plan_states("p", recorded, [state("new"), state("kept", state_id=2)])
    assert [(d.name, d.state_id) for d in plan.states] == [("gone", 1), ("kept", 4), ("new", 5)]
    assert plan.states[0] == recorded[0]
    assert (plan.undeclared, plan.dropped, plan.warnings) == (("gone",), (), ())
    again = plan_states(
        "p", plan.states, [state("gone", struct(field("a", "long"), field("b", "long"))), state("kept")]
    )
    assert [(d.name, d.state_id, len(d.versions)) for d in again.states] == [
        ("gone", 1, 2),
        ("kept", 4, 1),
        ("new", 5, 1),
    ]
    assert again.undeclared == ("new",)


def test_deleted_states_are_dropped_and_start_anew_if_declared() -> None:
    """Whatever else the new one is: it has nothing to do with the old one, and must not meet its entries."""
    old = (state("a", ONE, struct(field("b", "long"))), state("b", state_id=9), state("c", state_id=2))
    plan = plan_states(
        "p", old, [state("b", struct(field("a", "string")), kind="map"), state("c")], ["a", "b", "never"]
    )
    assert plan.dropped == (old[0], old[1])
    assert [(d.name, d.kind, d.state_id, len(d.versions)) for d in plan.states] == [
        ("c", "value", 2, 1),
        ("b", "map", 10, 1),
    ]
    assert (plan.undeclared, plan.warnings) == ((), ())


def test_ids_of_dropped_states_count_towards_the_limit_of_250_states() -> None:
    with pytest.raises(StateSchemaError, match="251 states were declared since its start, and the most is 250"):
        plan_states("p", [state("a", state_id=250)], [state("a")], deleted=["a"])


# --- reading ----------------------------------------------------------------------------------------------------------

FLOAT_MAX = binary.unpack("<f", b"\xff\xff\x7f\x7f")[0]
FLOAT_MIN = binary.unpack("<f", b"\x01\x00\x00\x00")[0]
BITS = {"byte": 8, "short": 16, "integer": 32, "long": 64}


@pytest.mark.parametrize(("was", "now"), sorted(WIDENINGS))
def test_widening_is_exact_at_the_limits(was: str, now: str) -> None:
    """What is read from an older entry is, in value and type, what would be read had it been written now."""
    if was in BITS:
        limit = 1 << BITS[was] - 1
        values: list[Any] = [-limit, -1, 0, limit - 1]
    elif was == "float":
        values = [FLOAT_MAX, -FLOAT_MAX, FLOAT_MIN, -0.0, float("inf"), binary.unpack("<f", b"\xcd\xcc\xcc\x3d")[0]]
    else:
        precision, scale = map(int, was[8:-1].split(","))
        values = [Decimal(sign * n).scaleb(-scale) for sign in (1, -1) for n in (0, 1, 10**precision - 1)]
    schemas = struct(field("a", was)), struct(field("a", now))
    for value in [*values, None]:
        (found,) = read(1, (value,), *schemas)
        (written_now,) = read(2, (value,), *schemas)
        assert repr(found) == repr(written_now)
        assert found == value


def test_the_widest_decimal_is_exact() -> None:
    value = Decimal(f"{'9' * 18}.{'9' * 18}")
    (found,) = read(1, (value,), struct(field("a", "decimal(36,18)")), struct(field("a", "decimal(38,20)")))
    assert (found, found.as_tuple().exponent) == (value, -20)


V1 = struct(field("a", "integer"), field("b", "string"), field("c", "long"))
V2 = struct(field("c", "long"), field("a", "long"))
V3 = struct(field("b", "date"), field("a", "long"), field("d", array("double")), field("c", "long"))


def test_a_struct_factory_makes_every_nested_struct_whatever_its_version() -> None:
    """Also those that no version changed, and those in the keys of maps."""
    unchanged, inner = struct(field("k", "long")), struct(field("x", "long"))
    was = struct(field("m", mapping(unchanged, inner)), field("u", unchanged), field("l", array(unchanged)))
    now = struct(field("m", mapping(unchanged, struct(field("x", "long"), field("y", "long")))), *was["fields"][1:])

    def named(names: tuple[str, ...]) -> Callable[[tuple[Any, ...]], frozenset[tuple[str, Any]]]:
        return lambda values: frozenset(zip(names, values, strict=True))

    codecs = [RowCodec("s", parse_struct(schema), n) for n, schema in enumerate((was, now), start=1)]
    decode = EvolvingRowCodec("s", versions(was, now), named).decode
    assert decode(codecs[0].encode(({(1,): (2,)}, (3,), [(4,), None]))) == (
        {frozenset({("k", 1)}): frozenset({("x", 2), ("y", None)})},
        frozenset({("k", 3)}),
        [frozenset({("k", 4)}), None],
    )
    assert decode(codecs[1].encode(({(1,): (2, None)}, (3,), [(4,), None]))) == decode(
        codecs[0].encode(({(1,): (2,)}, (3,), [(4,), None]))
    )


def test_writing_uses_the_latest_version() -> None:
    codec = EvolvingRowCodec("s", versions(V1, V2, V3))
    row = (None, 5, [0.5], 6)
    assert codec.encode(row) == RowCodec("s", parse_struct(V3), 3).encode(row)
    assert codec.decode(codec.encode(row)) == row


@pytest.mark.parametrize("schemas", [(V3,), (V1, V2, V3)])
@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\x01\x04", "schema version 0?4"),
        (b"\x01\x00" + bytes(40), "schema version 0"),
        (b"\x02\x01" + bytes(40), "an entry in format 2"),
        (b"\x02\x09" + bytes(40), "an entry in format 2"),
        (b"\x01", "schema version"),
        (b"", "unknown format"),
    ],
)
def test_entries_of_unknown_schema_version_or_format_are_refused(schemas: Any, data: bytes, says: str) -> None:
    with pytest.raises((CorruptFile, UnsupportedFormat), match=f"state 's'.*{says}"):
        row_reader("s", versions(*schemas))(data)
    good = RowCodec("s", parse_struct(V3), len(schemas)).encode((None, 5, [0.5], 6))
    for rows in ([data], [None, good, data, good]):
        with pytest.raises((CorruptFile, UnsupportedFormat), match=f"state 's'.*{says}"):
            columns_reader("s", versions(*schemas))(pa.array(rows))


def test_a_damaged_older_entry_is_corrupt() -> None:
    data = RowCodec("s", parse_struct(V1), 1).encode((1, "x", 3))
    with pytest.raises(CorruptFile, match="restore an older checkpoint"):
        row_reader("s", versions(V1, V2, V3))(data[:-1])
    with pytest.raises(CorruptFile, match="restore an older checkpoint"):
        columns_reader("s", versions(V1, V2, V3))(pa.array([data, data[:-1]]))


# --- in a shard -------------------------------------------------------------------------------------------------------

KEY = KEYS.encode(("k",))


def open_shard(
    folder: Path, descriptors: tuple[StateDescriptor, ...], now_ms: int, groups: tuple[KeyGroupState, ...] = ()
) -> tuple[ShardState, dict[str, Any]]:
    shard = ShardState(RocksStore(folder), key_groups=groups, descriptors=descriptors, now_ms=now_ms)
    shard.set_key(3, KEY)
    return shard, {"value": ValueState(shard, "v"), "list": ListState(shard, "l"), "map": MapState(shard, "m")}


def test_entries_keep_their_version_until_they_are_written(tmp_path: Path) -> None:
    """Reading changes neither bytes nor digest; a write replaces the one entry, expiry index and all."""
    old = (state("v", V1, ttl_ms=100), state("l", V1, kind="list", ttl_ms=100), state("m", V1, kind="map", ttl_ms=100))
    recorded = plan_states("p", [], old).states
    shard, states = open_shard(tmp_path, recorded, 0)
    states["value"].update((1, "x", 2))
    states["list"].append_list([(3, "x", 4), (5, None, 6)])
    states["map"].update_value(("u",), (7, "x", 8))
    shard.flush()
    before, entries = shard.key_group_states(), list(shard.store.scan(b"", None))
    shard.store.close()

    new = (state("v", V2, ttl_ms=100), state("l", V2, kind="list", ttl_ms=100), state("m", V2, kind="map", ttl_ms=100))
    evolved = plan_states("p", recorded, new, dropped=["v.b", "l.b", "m.b"]).states
    shard, states = open_shard(tmp_path, evolved, 50, before)
    assert states["value"].get() == (2, 1)
    assert list(states["list"].get()) == [(4, 3), (6, 5)]
    assert states["map"].get_value(("u",)) == (8, 7)
    assert list(states["map"].iterator()) == [(("u",), (8, 7))]
    shard.flush()
    assert shard.key_group_states() == before
    assert list(shard.store.scan(b"", None)) == entries

    states["list"].append_value((10, 9))
    states["value"].update((2, 1))
    shard.flush()
    assert list(states["list"].get()) == [(4, 3), (6, 5), (10, 9)]
    assert states["value"].get() == (2, 1)
    assert shard.key_group_states()[0].digest != before[0].digest
    written = {entry[9:11] for _, entry in shard.store.scan(b"", None) if entry[:1] == b"\x02"}
    assert written == {b"\x01\x01", b"\x01\x02"}
    now = shard.key_group_states()
    shard.store.close()

    # The entries of version 1 expire at 100, the others at 150.
    shard, states = open_shard(tmp_path, evolved, 120, now)
    assert expire(shard) == 3
    shard.set_key(3, KEY)
    assert states["value"].get() == (2, 1)
    assert list(states["list"].get()) == [(10, 9)]
    assert not states["map"].exists()
    shard.store.close()
