"""Which states a pipeline has, given what the base recorded and what the processor declares now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from state_backend.state.layout import MAX_STATE_ID
from state_backend.values.errors import StateSchemaError
from state_backend.values.records import StateDescriptor


def plan_states(
    pipeline: str, recorded: Sequence[StateDescriptor], declared: Sequence[StateDescriptor]
) -> tuple[StateDescriptor, ...]:
    """The descriptors that the interval runs with, by state id: recorded states keep their id, new ones get the next.

    An expiry may change; it counts for what is written from now on. StateSchemaError names any other difference.
    """
    by_name = {d.name: d for d in recorded}
    taken = max((d.state_id for d in recorded), default=0)
    planned = []
    for now in declared:
        before = by_name.pop(now.name, None)
        if before is None:
            taken += 1
            planned.append(replace(now, state_id=taken))
            continue
        _check_same(pipeline, before, now)
        planned.append(replace(before, ttl_ms=now.ttl_ms))
    if by_name:
        raise StateSchemaError(
            f"pipeline {pipeline!r}: the checkpoint holds the state{'s' * (len(by_name) > 1)} {', '.join(sorted(by_name))}, which "
            "the processor does not declare any more; dropping states is not built yet, so keep declaring them"
        )
    if taken > MAX_STATE_ID:
        raise StateSchemaError(
            f"pipeline {pipeline!r}: {taken} states were declared over time; {MAX_STATE_ID} is the most"
        )
    return tuple(sorted(planned, key=lambda d: d.state_id))


def _check_same(pipeline: str, before: StateDescriptor, now: StateDescriptor) -> None:
    was, is_ = before.versions[-1], now.versions[-1]
    for what, a, b in (
        ("kind", before.kind, now.kind),
        ("value schema", was.value, is_.value),
        ("user key schema", was.user_key, is_.user_key),
    ):
        if a != b:
            raise StateSchemaError(
                f"pipeline {pipeline!r}, state {now.name!r}: its {what} is {_brief(b)} now, but {_brief(a)} in the checkpoint; "
                "changing it is not built yet, so declare it as it was or start the pipeline under another name"
            )


def _brief(schema: object) -> str:
    if isinstance(schema, dict):
        return (
            "("
            + ", ".join(f"{f['name']} {f['type']}{'' if f['nullable'] else ' NOT NULL'}" for f in schema["fields"])
            + ")"
        )
    return repr(schema)
