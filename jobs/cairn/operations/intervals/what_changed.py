"""Say what differs between a committed result and a new one: code, input, or settings. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from state_backend.values.frozen import frozen
from state_backend.values.records import Content

_MOST = 3
_MOST_CHARACTERS = 60


@frozen
class MadeOf:
    """Everything that decides an interval's result, except the base checkpoint."""

    code_hash: str
    # The version of the code, for people (`code_version`); None if it has none.
    code_version: str | None
    position: Mapping[str, Any]  # The source's position; empty if the source records none.
    # Hash over code, position and all settings; None if it can't be computed.
    input_hash: str | None
    # Names of the parts of the code whose hash differs between versions of Python.
    by_build: tuple[str, ...] = ()


def made_of(content: Content) -> MadeOf:
    return MadeOf(
        code_hash=content.code_hash,
        code_version=content.code_version,
        position=content.source_position,
        input_hash=content.input_hash,
    )


def what_changed(before: MadeOf, now: MadeOf) -> tuple[str, ...]:
    """Return the differences between two results: other code, other input, or else other settings.

    The input hash tells that a setting differs, but not which one. It also covers code and input, so settings are named
    only if both are equal.
    """
    found = []
    if now.code_hash != before.code_hash:
        compiled = f", or another version of Python, as {now.by_build[0]}" if now.by_build else ""
        found.append(f"other code: {_code(before)} before, {_code(now)} now{compiled}")
    if before.position and now.position != before.position:
        changes = [*_differences(before.position, now.position, "")]
        more = f", and {len(changes) - _MOST} more" if len(changes) > _MOST else ""
        found.append(f"other input: {', '.join(changes[:_MOST])}{more}")
    if not found and None not in (before.input_hash, now.input_hash) and now.input_hash != before.input_hash:
        found.append(
            "other settings: the code of the source, its packages, the pipeline's settings, or the version of Cairn differ"
        )
    return tuple(found)


def _code(made: MadeOf) -> str:
    return made.code_hash[:8] if made.code_version is None else f"{made.code_version} ({made.code_hash[:8]})"


def _differences(before: Any, now: Any, where: str) -> Iterator[str]:
    """Yield in words where two JSON values (the field `where`) differ. Items of lists are compared by their names."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in sorted({*before, *now}):
            yield from _differences(before.get(name), now.get(name), f"{where}.{name}" if where else name)
    elif isinstance(before, list) and isinstance(now, list):
        items, items_now = ({_name(item): item for item in items} for items in (before, now))
        for name in dict.fromkeys([*items, *items_now]):
            if name not in items_now:
                yield f"{name} is gone"
            elif name not in items:
                yield f"{name} is new"
            elif items[name] != items_now[name]:
                yield f"{name} has changed"
        if before != now and {*items} == {*items_now} and [*items.values()] == [*items_now.values()]:
            yield f"{where} has another order or number of items"
    elif before != now:
        yield f"{where} is {_short(now)} instead of {_short(before)}"


def _name(item: Any) -> str:
    """Return the name of a list's item: the first text in it, such as a file's path, else the item itself."""
    inside = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
    return next((value for value in inside if isinstance(value, str)), None) or _short(item)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}…"


def as_json(position: Mapping[str, Any]) -> dict[str, Any]:
    """Return a position as JSON stores it, for example with lists for tuples, so that it equals a recorded one."""
    made: dict[str, Any] = json.loads(json.dumps(position))
    return made
