"""Text, tables and JSON on stdout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

_LEFT = ("", "interval", "kind", "state", "code")


def print_json(value: Any) -> int:
    """Print one JSON value.

    Returns:
        0, the exit code.
    """
    typer.echo(json.dumps(value, indent=2))
    return 0


def print_text(what: str | Table) -> None:
    """Print plain text or a table.

    Brackets in a text are not markup. A table is as wide as its content, because a truncated path or instant is
    useless.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, width=1000)
    console.print(Text(what) if isinstance(what, str) else what, soft_wrap=isinstance(what, str))


def table_of(*columns: str) -> Table:
    """Return an empty table. Columns of text are on the left of their cell, all others on the right."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in _LEFT else "right", no_wrap=True)
    return table


def cell(value: Any) -> str:
    """Return a value as text: nothing for None, commas in a whole number, JSON for a list or a struct."""
    if value is None:
        return ""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return value if isinstance(value, str) else json.dumps(value)


def print_unknown(unknown: Sequence[str]) -> None:
    """Print the files of a pipeline's folder that Cairn did not write."""
    for path in unknown:
        print_text(f"unknown file, left unchanged: {path}")
    if unknown:
        print_text(f"{len(unknown)} files were not written by Cairn; Cairn ignores them")
