"""Count the program: lines of its files, and tokens without comments and docstrings, for each room.

    python -m tests.tools.mass

A room is a folder with Python files. `tests/unit/test_mass.py` has a budget for each room.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

from state_backend.values.parse_source import parse_source

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("state_backend", "jobs", "plugins", "dags")
_COUNTED = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def mass() -> tuple[Counter[str], Counter[str]]:
    """Return the lines and the tokens of each room."""
    lines: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            if path.name != "_version.py":  # The build writes it.
                source, room = path.read_text(), path.parent.relative_to(ROOT).as_posix()
                lines[room] += source.count("\n")
                tokens[room] += tokens_in(source)
    return lines, tokens


def tokens_in(source: str) -> int:
    """Return the number of names, operators, numbers and strings of a source, without docstrings."""
    nodes = [node for node in ast.walk(parse_source(source)) if isinstance(node, _DOCUMENTED)]
    docstrings = {node.body[0].lineno for node in nodes if ast.get_docstring(node, clean=False) is not None}
    return sum(
        one.type in _COUNTED and not (one.type == tokenize.STRING and one.start[0] in docstrings)
        for one in tokenize.generate_tokens(io.StringIO(source).readline)
    )


if __name__ == "__main__":
    lines, tokens = mass()
    for room in sorted(lines):
        print(f"{lines[room]:7,} {tokens[room]:8,}  {room}")
    print(f"{lines.total():7,} {tokens.total():8,}  together")
