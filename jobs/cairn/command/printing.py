"""Text, tables and JSON on stdout."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import typer

from state_backend.values.human_units import size, span
from state_backend.values.intervals import Interval, format_instant

_LEFT = ("", "interval", "kind", "state", "code", "pipeline", "last interval", "problems", "entry", "expires", "value")
_RED = ("quarantined", "descends from quarantined", "blocked", "unreadable")
_YELLOW = ("stale", "unpublished")


def print_json(value: Any) -> int:
    typer.echo(json.dumps(value, indent=2))
    return 0


def print_text(text: str, style: str = "") -> None:
    """Print a text in a style, without Rich, whose import is slow. Use colours only on a terminal without NO_COLOR."""
    # `secho` would write the terminal's code for a reset behind each text, even behind a text without a style.
    shown = typer.style(text, fg=style) if style else text
    typer.echo(shown, color=False if os.environ.get("NO_COLOR") else None)


def style_of(state: str) -> str:
    """Return the colour of a state that `cairn checkpoints` or `cairn status` prints; an empty text for none."""
    if state.startswith(_RED):
        return "red"
    return "yellow" if state.startswith(_YELLOW) else ""


def print_table(names: Sequence[str], rows: Sequence[tuple[Sequence[str], str]]) -> None:
    """Print a table. `names`: Titles of the columns. `rows`: (cells, colour) of each row. No cell is cut."""
    widths = [max(map(len, column)) for column in zip(names, *(cells for cells, _ in rows), strict=True)]
    pads = [str.ljust if name in _LEFT else str.rjust for name in names]
    for cells, style in ((names, ""), *rows):
        padded = (pad(text, width) for pad, text, width in zip(pads, cells, widths, strict=True))
        print_text("  ".join(padded).rstrip(), style)


def age_of(seconds: float) -> str:
    """Return an age in its largest unit, such as "40 s", "13 min", "2 h" or "3 d"."""
    number, unit, *_ = span(max(float(int(seconds)), 1)).split()
    return f"{float(number):.0f} {unit}"


def span_of(interval: Interval) -> str:
    return span_between(format_instant(interval.start), format_instant(interval.end))


def span_between(start: str, end: str) -> str:
    """Return "start to end" of an interval in short: without midnight, zero seconds, and a day that repeats."""
    short, until = (at.removesuffix("T00:00:00Z").replace(":00Z", "Z") for at in (start, end))
    return f"{short} to {until.removeprefix(start[:11])}"


def measure(name: str, value: Any) -> str:
    """Return a figure of a record as text: with a unit of size if `name` contains "bytes", else as `cell` does."""
    if isinstance(value, int) and "bytes" in name:
        return size(value)
    return cell(value)


def cell(value: Any) -> str:
    """Return a value as text: "" for None, thousands separators in an integer, JSON for a list or a struct."""
    if value is None:
        return ""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return value if isinstance(value, str) else json.dumps(value)
