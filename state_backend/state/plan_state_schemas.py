"""Plan the states of an interval from the states that its base recorded and those that the processor declares.

The driver plans before the shards' tasks start. So a schema that does not fit fails once, and not in each shard.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from state_backend.formats.recorded_settings import INSTEAD_OF, SETTINGS, with_settings_of
from state_backend.formats.row_codec import RowCodec
from state_backend.formats.schema_evolution import compare_schemas, field_types, widens, with_names_swapped
from state_backend.formats.types import StructType, parse_struct
from state_backend.state.layout import MAX_STATE_ID
from state_backend.values.errors import StateSchemaError
from state_backend.values.frozen import frozen
from state_backend.values.records import SchemaVersion, StateDescriptor

MAX_SCHEMA_VERSION = 255
_NO_NAMES: Mapping[str, str] = MappingProxyType({})
# Key in the metadata of a field, like `SETTINGS`: the settings that early releases recorded. A comparison of states
# includes them, because recorded hashes include them.
MADE_WITH = "cairn.made_with"


@frozen
class StatePlan:
    """Which states an interval has, and which it deletes."""

    states: tuple[StateDescriptor, ...]
    undeclared: tuple[str, ...]  # names of recorded states that the processor no longer declares, and that are kept
    dropped: tuple[StateDescriptor, ...]  # states whose entries the interval deletes
    warnings: tuple[str, ...]


def plan_states(
    pipeline: str,
    recorded: Sequence[StateDescriptor],
    declared: Sequence[StateDescriptor],
    deleted: Collection[str] = (),
    *,
    dropped: Collection[str] | None = (),
    renamed: Mapping[str, str] = _NO_NAMES,
) -> StatePlan:
    """Plan the states of an interval from those that the base recorded and those that the processor declares.

    A recorded state keeps its id. A new state gets the next id. A changed schema becomes a new schema version. A
    changed expiry applies to entries written from now on. A state that is no longer declared is kept: after a rollback
    of the deployed code, the older code finds the state again. Settings in the metadata of a schema can't change.

    `deleted`: States to delete. `dropped`: Fields, as `state.path`, whose values may be lost; any other dropped field
    is an error. None: a dropped field is only a warning. `renamed`: New names of fields by `state.path`.
    """
    by_name = {d.name: d for d in recorded if d.name not in deleted}
    taken = max((d.state_id for d in recorded), default=0)
    planned: list[StateDescriptor] = []
    warnings: list[str] = []
    for now in declared:
        before = by_name.pop(now.name, None)
        if before is None:
            taken += 1
            planned.append(replace(now, state_id=taken))
        else:
            planned.append(_evolve(pipeline, _rename(before, now, renamed), now, dropped, warnings))
        _check_storable(pipeline, planned[-1])
        _check_not_reused(pipeline, now, dropped or (), renamed)
    new = {d.name for d in declared} - {d.name for d in recorded}
    for now in (d for d in declared if d.name in new):
        _check_instead_of(pipeline, now, by_name)
    if taken > MAX_STATE_ID:
        raise StateSchemaError(
            f"pipeline {pipeline!r}: {taken} states were declared since its start, and the most is {MAX_STATE_ID}; start the "
            "pipeline under another name"
        )
    return StatePlan(
        states=tuple(sorted([*planned, *by_name.values()], key=lambda d: d.state_id)),
        undeclared=tuple(sorted(by_name)),
        dropped=tuple(d for d in recorded if d.name in deleted),
        warnings=tuple(warnings),
    )


def _rename(before: StateDescriptor, now: StateDescriptor, renamed: Mapping[str, str]) -> StateDescriptor:
    """Return the recorded state `before` with new field names in all schema versions, where `now` declares them."""
    wanted = field_types(parse_struct(now.versions[-1].value))
    # Rename a struct before its fields: the paths of the fields in `renamed` begin with the struct's new name.
    for name, new in sorted(renamed.items(), key=lambda item: item[0].count(".")):
        state, _, old = name.partition(f"{now.name}.")
        parent, dot, _ = old.rpartition(".")
        to = f"{parent}{dot}{new}"
        have = field_types(parse_struct(before.versions[-1].value))
        if not state and old in have and old not in wanted and to in wanted and to not in have:
            versions = (replace(v, value=with_names_swapped(v.value, old, to)) for v in before.versions)
            before = replace(before, versions=tuple(versions))
    return before


def _evolve(
    pipeline: str, before: StateDescriptor, now: StateDescriptor, dropped: Collection[str] | None, warnings: list[str]
) -> StateDescriptor:
    owner = f"pipeline {pipeline!r}, state {now.name!r}"
    latest = before.versions[-1]
    was, declared = parse_struct(latest.value), parse_struct(now.versions[-1].value)
    for what, a, b in (("kind", before.kind, now.kind), ("user key", _user_key(latest), _user_key(now.versions[-1]))):
        if a != b:
            raise StateSchemaError(
                f"{owner}: its {what} is recorded as {a}, declared as {b}; it can't change: declare it as recorded, "
                "or under another name"
            )
    made, wanted = _settings(latest), _settings(now.versions[-1])
    for name in sorted(made.keys() & wanted.keys()):
        if made[name] != wanted[name]:
            raise _changed_setting(owner, made[name], wanted[name], "the state would mix both")
    change = compare_schemas(was, declared)
    if change.refused:
        raise StateSchemaError(f"{owner} {'; '.join(change.refused)}")
    lost = [path for path in change.dropped if dropped is not None and f"{now.name}.{path}" not in dropped]
    if lost:
        raise StateSchemaError(f"{owner} no longer declares {', '.join(lost)}: {_lost(now.name, lost, was, declared)}")
    if was == declared:
        # An older release may have recorded no settings, so record those of the declared schema.
        same = replace(latest, value=with_settings_of(latest.value, now.versions[-1].value))
        return replace(before, ttl_ms=now.ttl_ms, versions=(*before.versions[:-1], same))
    if latest.version >= MAX_SCHEMA_VERSION:
        raise StateSchemaError(
            f"{owner}: recorded as {was}, declared as {declared}; schema version {latest.version} is the last: declare it "
            "as recorded, or under another name"
        )
    if change.dropped and dropped is None:
        warnings.append(
            f"state {now.name!r} no longer declares {', '.join(change.dropped)}: their recorded values can't be read any more, even "
            "if the field is declared again later; a renamed field starts from null"
        )
    version = replace(latest, version=latest.version + 1, value=now.versions[-1].value)
    return replace(before, ttl_ms=now.ttl_ms, versions=(*before.versions, version))


def _lost(state: str, lost: Sequence[str], was: StructType, declared: StructType) -> str:
    """Return advice for an error: how to keep or give up the values of the fields `lost`, in `was` but not declared."""
    had, has = field_types(was), field_types(declared)
    keep = ""
    for path in lost:
        parent = path.rpartition(".")[0]
        names = [
            new.rpartition(".")[2]
            for new, type_ in has.items()
            if new not in had and new.rpartition(".")[0] == parent and (type_ == had[path] or widens(had[path], type_))
        ]
        if names:
            given = repr({f"{state}.{path}": names[0]})
            keep += f"\nIf {path} is now called {' or '.join(names)}, keep the values with Pipeline(renamed={given})"
    return (
        f"the recorded values would be lost{keep}\n"
        f"To give the values up, set Pipeline(dropped={[f'{state}.{path}' for path in lost]!r}); else declare the field again"
    )


def _check_storable(pipeline: str, state: StateDescriptor) -> None:
    latest = state.versions[-1]
    try:
        RowCodec(state.name, parse_struct(latest.value), latest.version)
    except StateSchemaError as error:
        raise StateSchemaError(f"pipeline {pipeline!r}, {error}") from None


def _check_not_reused(
    pipeline: str, now: StateDescriptor, dropped: Collection[str], renamed: Mapping[str, str]
) -> None:
    """Raise if `now` reuses a dropped or renamed field's name: an older base has the old values under that name."""
    wanted = {f"{now.name}.{path}" for path in field_types(parse_struct(now.versions[-1].value))}
    moved = [name for name, new in renamed.items() if f"{name.rpartition('.')[0]}.{new}" in wanted]
    if reused := sorted(wanted & {*dropped, *moved}):
        raise StateSchemaError(
            f"pipeline {pipeline!r} declares {', '.join(reused)}, which is also in dropped or renamed: a run from an older state "
            "would read the old field's values\nGive a new field another name. Remove an old field from dropped or renamed"
        )


def _check_instead_of(pipeline: str, declared: StateDescriptor, left: Mapping[str, StateDescriptor]) -> None:
    """Raise for a new state if a state in `left`, which is no longer declared, is the same one with another setting."""
    of_declared = declared.versions[-1]
    for name, (made, wanted) in _in_metadata(of_declared, INSTEAD_OF).items():
        if name in left and _first_field(left[name].versions[-1]) == _first_field(of_declared):
            raise _changed_setting(
                f"pipeline {pipeline!r}, state {name!r}", made, wanted, "nothing would read the state"
            )


def _first_field(version: SchemaVersion) -> str | None:
    return next((field["name"] for field in version.value["fields"]), None)


def _settings(version: SchemaVersion) -> dict[str, str]:
    return _in_metadata(version, MADE_WITH) | _in_metadata(version, SETTINGS)


def _changed_setting(owner: str, made: str, wanted: str, effect: str) -> StateSchemaError:
    return StateSchemaError(
        f"{owner}: its entries were made with {made}, but the code has {wanted}; {effect}\n"
        "Set the old value again, or declare a pipeline with another name"
    )


def _in_metadata(version: SchemaVersion, key: str) -> dict[str, Any]:
    fields = [field for schema in (version.user_key, version.value) if schema is not None for field in schema["fields"]]
    return {name: value for field in fields for name, value in field.get("metadata", {}).get(key, {}).items()}


def _user_key(version: SchemaVersion) -> StructType | None:
    return None if version.user_key is None else parse_struct(version.user_key)
