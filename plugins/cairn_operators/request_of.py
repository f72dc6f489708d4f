"""Build a request from the arguments of a task."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

# Arguments of an operator whose field of a request has another name.
_NAMED = {"code": "pipeline", "pipeline": "pipeline_name"}


def request_of(kind: type[Any], task: Any, **others: Any) -> Any:
    """Return a request: each field is one of `others`, else the task's argument of that name, else its default."""
    names = {field.name: _NAMED.get(field.name, field.name) for field in fields(kind) if field.name not in others}
    return kind(**{field: getattr(task, name) for field, name in names.items() if hasattr(task, name)}, **others)
