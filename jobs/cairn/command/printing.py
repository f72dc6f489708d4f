"""Text, tables and JSON on stdout."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import typer

from state_backend.values.human_units import size, span
from state_backend.values.intervals import Interval, format_instant

if TYPE_CHECKING:
    from rich.table import Table

_LEFT = ("", "interval", "kind", "state", "code", "pipeline", "last interval", "problems")
_RED = ("quarantined", "descends from quarantined", "blocked", "unreadable")
_YELLOW = ("stale", "unpublished")


def print_json(value: Any) -> int:
    typer.echo(json.dumps(value, indent=2))
    return 0


def print_text(what: str | Table, style: str = "") -> None:
    """Print plain text or a table.

    Brackets in a text are not markup. A table is as wide as its content, because a truncated path or instant is
    useless. Colours appear on a terminal only, and not if the variable NO_COLOR is set.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, width=1000)
    console.print(Text(what, style) if isinstance(what, str) else what, soft_wrap=isinstance(what, str))


def style_of(state: str) -> str:
    """Return the colour of a row with a state as `cairn checkpoints` and `cairn status` name it; an empty text for
    none."""
    if state.startswith(_RED):
        return "red"
    return "yellow" if state.startswith(_YELLOW) else ""


def table_of(*columns: str) -> Table:
    """Return an empty table. Columns of text are on the left of their cell, all others on the right."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in _LEFT else "right", no_wrap=True)
    return table


def age_of(seconds: float) -> str:
    """Return an age in its largest unit: 40 s, 13 min, 2 h, 3 d."""
    number, unit, *_ = span(max(float(int(seconds)), 1)).split()
    return f"{float(number):.0f} {unit}"


def span_of(interval: Interval) -> str:
    return span_between(format_instant(interval.start), format_instant(interval.end))


def span_between(start: str, end: str) -> str:
    """Return start and end of an interval, without what says nothing: midnight, seconds, and the same day twice."""
    short, until = (at.removesuffix("T00:00:00Z").replace(":00Z", "Z") for at in (start, end))
    return f"{short} to {until.removeprefix(start[:11])}"


def measure(name: str, value: Any) -> str:
    """Return a figure of a record as text with its unit: a size if its name contains `bytes`, else a number."""
    if isinstance(value, int) and "bytes" in name:
        return size(value)
    return cell(value)


def cell(value: Any) -> str:
    """Return a value as text: nothing for None, commas in a whole number, JSON for a list or a struct."""
    if value is None:
        return ""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return value if isinstance(value, str) else json.dumps(value)
