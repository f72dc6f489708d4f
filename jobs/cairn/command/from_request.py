"""Options of a command from the fields of its request, and the request from the options' values."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from datetime import timedelta
from functools import wraps
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from state_backend.values.day_or_instant import format_duration, parse_duration
from state_backend.values.operation_parameters import Operation


def with_options(command: Callable[..., int]) -> Callable[..., int]:
    """Return a command for Typer with an option for each field of the request, the first parameter of `command`.

    Its other options are kept. A command whose first parameter is not a request is returned unchanged.
    """
    hints = get_type_hints(command, include_extras=True)
    (_, own), *others = [(one, hints[one]) for one in inspect.signature(command).parameters] or [("", None)]
    if not (isinstance(own, type) and issubclass(own, Operation)):
        return command
    request: type[Any] = own
    offered = {field.name: field for field in fields(request) if "help" in field.metadata}
    request_hints = get_type_hints(request)
    parameters = [_parameter(request, field, request_hints[name]) for name, field in offered.items()]
    defaults = inspect.signature(command).parameters
    parameters += [
        inspect.Parameter(one, inspect.Parameter.KEYWORD_ONLY, annotation=hint, default=defaults[one].default)
        for one, hint in others
    ]

    @wraps(command)
    def call(**values: Any) -> int:
        given = {name: _value(request_hints[name], values.pop(name)) for name in offered}
        return command(request(**given), **values)

    del call.__wrapped__  # With it, Typer would read the signature of `command` instead of that of `call`.
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {one.name: one.annotation for one in parameters}
    return call


def option_of(request: type[Any], name: str) -> Any:
    """Return the `typer.Option` or `typer.Argument` for the field `name` of a request class, from its metadata."""
    told = next(field.metadata for field in fields(request) if field.name == name)
    option = told["option"] or f"--{name.replace('_', '-')}"
    if not option.startswith("--"):
        return typer.Argument(help=told["help"], metavar=option.upper())
    return typer.Option(option, help=told["help"], envvar=told["env"] or None, min=told["least"])


def _parameter(request: type[Any], field: Field[Any], hint: Any) -> inspect.Parameter:
    default = inspect.Parameter.empty if field.default is MISSING else _shown(field.default)
    kind = option_of(request, field.name)
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[_find_type(hint), kind], default=default
    )


def _find_type(hint: Any) -> Any:
    if timedelta in (hint, *get_args(hint)):
        return str if hint is timedelta else str | None
    if get_origin(hint) is tuple:
        return list[str] | None
    return hint


def _shown(default: Any) -> Any:
    if isinstance(default, timedelta):
        return format_duration(default)
    return None if default == () else default


def _value(hint: Any, value: Any) -> Any:
    if timedelta in (hint, *get_args(hint)):
        return None if value is None else parse_duration(value)
    if get_origin(hint) is tuple:
        return tuple(value or ())
    return value
