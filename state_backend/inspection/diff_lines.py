"""Describe a changed entry or row in one line, for `cairn diff`, `key`, `replay` and `compare`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any


def line_of(change: dict[str, Any]) -> str:
    """Return a changed entry as one line: its sign, state and key, and the fields that differ."""
    place = [change["state"], *(fields_of(change[name]) for name in ("key", "user_key") if name in change)]
    if "pos" in change:
        place.append(f"[{change['pos']}]")
    if change["change"] == "changed":
        differing = changed_fields(change["before"], change["after"])
        expires = [change.get(f"{side}_expires_at", "never") for side in ("before", "after")]
        differing += [("expires", *expires)] if expires[0] != expires[1] else []
        fields = ", ".join(f"{name} {before} -> {after}".strip() for name, before, after in differing)
    else:
        fields = (
            fields_of(change["after" if "after" in change else "before"]) if {"before", "after"} & change.keys() else ""
        )
    sign = {"added": "+", "removed": "-", "changed": "~"}[change["change"]]
    return f"{sign} {' '.join(place)}{': ' if fields else ''}{fields}"


def changed_fields(before: Any, after: Any) -> list[tuple[str, str, str]]:
    """Return the fields that differ between two values: path, old value and new value.

    A path has a `.` before a field of a struct, and the position of an element in brackets: `address.city`, `tags[2]`.
    A field that one of the values lacks has the value `-`.
    """
    sides = [dict(_leaves(value, "")) for value in (before, after)]
    names = dict.fromkeys([*sides[0], *sides[1]])
    values = [(name, sides[0].get(name, "-"), sides[1].get(name, "-")) for name in names]
    return [value for value in values if value[1] != value[2]]


def fields_of(value: Any) -> str:
    """Return a value with its fields, as in `name="ann", tags[0]=1`."""
    return ", ".join(f"{name}={leaf}" if name else leaf for name, leaf in _leaves(value, ""))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, str]]:
    inner: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        inner = [(f"{path}.{name}" if path else name, each) for name, each in value.items()]
    elif isinstance(value, list):
        inner = [(f"{path}[{n}]", each) for n, each in enumerate(value)]
    if not inner:  # A scalar, or an empty struct or list.
        yield path, json.dumps(value, ensure_ascii=False)
    for name, each in inner:
        yield from _leaves(each, name)
