"""Read name and schedule of a pipeline from the source of its module, without an import.

If a DAG file imported the module, each parse of the DAG file would import PySpark.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta, timezone
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

from state_backend.values.parse_source import parse_source

if TYPE_CHECKING:
    from state_backend.values.schedule import Schedule


def pipeline_name_of(code: str, *, otherwise: str | None = None) -> str:
    module, _, variable = code.partition(":")
    name = _name_in_source(module, variable) or otherwise
    if name is None:
        raise ValueError(
            f"Cairn can't read the name of pipeline {code!r} from the source of {module!r}. "
            "Give the name to the operator: pipeline=…"
        )
    return name


def declared_schedule(code: str) -> Schedule | None:
    from state_backend.values.schedule import schedule_of
    from state_backend.values.zones import name_of

    module, _, variable = code.partition(":")
    tree = _parse(module)
    call = _assigned_call(tree, variable)
    arguments = _arguments(call)
    if "schedule" not in arguments:
        match call:
            case ast.Call(func=ast.Name(id="Pipeline") | ast.Attribute(attr="Pipeline")) if None not in arguments:
                return None
        raise ValueError(f"the source of {module!r} has no {variable} = Pipeline(…) that shows a schedule")
    assigned = {
        target.id: statement.value
        for statement in tree.body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }
    value = _shown(arguments["schedule"], assigned, "schedule")
    if value is None:
        return None
    if not isinstance(value, str):
        return schedule_of(value, "UTC")
    start = _shown(arguments.get("start", ast.Constant(None)), assigned, "start")
    return schedule_of(value, name_of(getattr(start, "tzinfo", None)))


def _shown(node: ast.expr, assigned: Mapping[str, ast.expr], argument: str) -> Any:
    from state_backend.values.schedule import Cron

    makers = {"datetime": datetime, "timedelta": timedelta, "ZoneInfo": ZoneInfo, "timezone": timezone, "Cron": Cron}

    def value_of(node: ast.expr, assigned: Mapping[str, ast.expr]) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name) if name in assigned:
                # Inside its own value, a name counts as unknown. Otherwise `x = x + 1` would recurse without end.
                return value_of(assigned[name], {other: assigned[other] for other in assigned if other != name})
            case ast.Name(id="UTC") | ast.Attribute(attr="UTC" | "utc"):
                return UTC
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value_of(operand, assigned)
            case ast.Call(func=ast.Name(id=maker) | ast.Attribute(attr=maker)) if maker in makers:
                given = {part.arg: value_of(part.value, assigned) for part in node.keywords if part.arg is not None}
                return makers[maker](*(value_of(part, assigned) for part in node.args), **given)
            case _:
                raise ValueError(ast.unparse(node))

    try:
        return value_of(node, assigned)
    except (ValueError, TypeError, LookupError) as error:
        raise ValueError(f"{argument}={ast.unparse(node)} can't be read without an import ({error})") from None


def _name_in_source(module: str, variable: str) -> str | None:
    try:
        arguments = _arguments(_assigned_call(_parse(module), variable))
    except ValueError:
        return None
    match arguments.get("name"):
        case ast.Constant(value=str(name)):
            return name
    return None


def _assigned_call(tree: ast.Module, variable: str) -> ast.Call | None:
    """Return the last call, such as `Pipeline(...)`, that a module assigns to `variable`; None without one."""
    for statement in reversed(tree.body):
        match statement:
            case ast.Assign(targets=[ast.Name(id=target)], value=ast.Call() as call) if target == variable:
                return call
            case ast.AnnAssign(target=ast.Name(id=target), value=ast.Call() as call) if target == variable:
                return call
    return None


def _arguments(call: ast.Call | None) -> dict[str | None, ast.expr]:
    """Return the values of the keyword arguments of a call by name; `**more` has the name None. Empty for no call."""
    return {} if call is None else {keyword.arg: keyword.value for keyword in call.keywords}


def _parse(module: str) -> ast.Module:
    """Return the syntax tree of a module. Raise `ValueError` if its source is not found or is not Python."""
    file = _source_file(module)
    if file is None:
        raise ValueError(f"there is no source of a module {module!r}")
    try:
        return parse_source(file.read_text())
    except (ValueError, OSError, SyntaxError) as error:
        raise ValueError(f"the source of {module!r} can't be read: {error}") from None


def _source_file(module: str) -> Path | None:
    """Return the source file of a module; None if it is not found.

    The search does not use `importlib.util.find_spec`, which imports the packages that contain the module.
    """
    folders = None
    for part in module.split("."):
        spec = PathFinder.find_spec(part, folders)
        if spec is None:
            return None
        folders = spec.submodule_search_locations
    return Path(spec.origin) if spec is not None and spec.origin is not None else None
