"""A group of commands whose modules are imported only when a person calls the command or asks for its help.

The group's help and the completion of names need only the rows of the table of commands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from inspect import getdoc
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

from cairn.command.exit_codes import exit_codes
from state_backend.values.hide_secrets import hide_in


@dataclass(frozen=True, slots=True)
class Row:
    # `module:function`. The command has the function's name, without the `_` at the end of a name such as `try_`.
    function: str
    panel: str
    help: str
    leaves: str

    @property
    def name(self) -> str:
        return self.function.partition(":")[2].rstrip("_")

    def load(self) -> Callable[..., int]:
        module, _, function = self.function.partition(":")
        loaded: Callable[..., int] = getattr(import_module(f"cairn.command.{module}"), function)
        return loaded

    def command(self) -> Any:
        """Import the command's module, and return the Click command with its help and options."""
        from cairn.command.from_request import with_options  # Not needed for `cairn --help`.

        one, function = typer.Typer(add_completion=False), self.load()
        text = "\n\n".join(filter(None, (self.help, getdoc(function))))
        one.command(self.name, help=text)(exit_codes(with_options(function), self.leaves))
        command: Any = typer.main.get_command(one)
        for parameter in command.params:
            if parameter.param_type_name == "argument" and parameter.metavar is None:
                parameter.metavar = parameter.name.upper()
        return command


class LazyCommand(TyperCommand):
    """A command of which only name and short help are loaded. A call imports the real command and runs it instead."""

    def __init__(self, name: str, row: Row, **settings: Any) -> None:
        super().__init__(name, help=row.help, rich_help_panel=row.panel, **settings)
        self._row = row

    def make_context(self, *arguments: Any, **settings: Any) -> Any:
        """Parse the arguments. The returned context belongs to the real command, so Click calls that command."""
        return self._row.command().make_context(*arguments, **settings)


class LazyGroup(TyperGroup):
    """A group whose subclasses name their commands in `rows`."""

    rows: ClassVar[Sequence[Row]] = ()

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for row in self.rows:
            self.add_command(LazyCommand(row.name, row))

    def make_context(self, *arguments: Any, **settings: Any) -> Any:
        """Parse the options before the command's name. Hide credentials in the error for a wrong option."""
        with _hidden():
            return super().make_context(*arguments, **settings)

    def invoke(self, ctx: Any) -> Any:
        """Parse the command's arguments and call the command. Hide credentials in the text of an error."""
        with _hidden():
            return super().invoke(ctx)


@contextmanager
def _hidden() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        hide_in(error)
        raise
