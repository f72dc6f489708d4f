"""Which states a pipeline has, given what the base recorded and what the processor declares now."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from state_backend.formats.row_codec import RowCodec
from state_backend.formats.schema_evolution import compare_schemas
from state_backend.formats.types import StructType, parse_struct
from state_backend.state.layout import MAX_STATE_ID
from state_backend.values.errors import StateSchemaError
from state_backend.values.records import SchemaVersion, StateDescriptor

MAX_SCHEMA_VERSION = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePlan:
    """What an interval runs with, and what its owner should know.

    states: by state id; what the checkpoint will record.
    undeclared: names of recorded states that are not declared any more; ``states`` has them as they were.
    dropped: recorded states that ``init`` deletes; ``states`` has them no more, and every entry of theirs has to go.
    warnings: sentences about data that can't be read any more.
    """

    states: tuple[StateDescriptor, ...]
    undeclared: tuple[str, ...]
    dropped: tuple[StateDescriptor, ...]
    warnings: tuple[str, ...]


def plan_states(
    pipeline: str,
    recorded: Sequence[StateDescriptor],
    declared: Sequence[StateDescriptor],
    deleted: Collection[str] = (),
) -> StatePlan:
    """Recorded states keep their id, new ones get the next; a changed schema becomes a further version.

    An expiry may change; it counts for what is written from now on. A state that is not declared is kept, so that a
    deploy that is rolled back finds it again. ``deleted``: names given to ``deleteIfExists``; one that is declared too
    starts anew.

    Raises: StateSchemaError, with every field that is in the way, if older entries can't be read as declared.
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
            planned.append(_evolved(pipeline, before, now, warnings))
        _check_storable(pipeline, planned[-1])
    if taken > MAX_STATE_ID:
        raise StateSchemaError(
            f"pipeline {pipeline!r}: {taken} states were declared over time; {MAX_STATE_ID} is the most; start the "
            "pipeline under another name"
        )
    return StatePlan(
        states=tuple(sorted([*planned, *by_name.values()], key=lambda d: d.state_id)),
        undeclared=tuple(sorted(by_name)),
        dropped=tuple(d for d in recorded if d.name in deleted),
        warnings=tuple(warnings),
    )


def _evolved(pipeline: str, before: StateDescriptor, now: StateDescriptor, warnings: list[str]) -> StateDescriptor:
    owner = f"pipeline {pipeline!r}, state {now.name!r}"
    latest = before.versions[-1]
    was, declared = parse_struct(latest.value), parse_struct(now.versions[-1].value)
    for what, a, b in (
        ("kind", before.kind, now.kind),
        ("user key", _user_key(latest), _user_key(now.versions[-1])),
    ):
        if a != b:
            raise StateSchemaError(
                f"{owner}: its {what} is recorded as {a}, declared as {b}; that can't change: declare it as recorded, "
                "or under another name"
            )
    change = compare_schemas(was, declared)
    if change.refused:
        raise StateSchemaError(f"{owner} {'; '.join(change.refused)}")
    if was == declared:
        return replace(before, ttl_ms=now.ttl_ms)
    if latest.version >= MAX_SCHEMA_VERSION:
        raise StateSchemaError(
            f"{owner}: recorded as {was}, declared as {declared}; {latest.version} versions are the most: declare it "
            "as recorded, or under another name"
        )
    if change.dropped:
        warnings.append(
            f"state {now.name!r} drops {', '.join(change.dropped)}: what is recorded there is not read again, not even "
            "after adding it again; a field that was renamed starts from null"
        )
    version = replace(latest, version=latest.version + 1, value=now.versions[-1].value)
    return replace(before, ttl_ms=now.ttl_ms, versions=(*before.versions, version))


def _check_storable(pipeline: str, state: StateDescriptor) -> None:
    """Refuses types that state can't hold here, on the driver, and not in the first shard that meets them."""
    latest = state.versions[-1]
    try:
        RowCodec(state.name, parse_struct(latest.value), latest.version)
    except StateSchemaError as error:
        raise StateSchemaError(f"pipeline {pipeline!r}, {error}") from None


def _user_key(version: SchemaVersion) -> StructType | None:
    return None if version.user_key is None else parse_struct(version.user_key)
