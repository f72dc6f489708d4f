"""Every error that the code can raise, with what the tests made it say.

CAIRN_MESSAGES=/tmp/messages pytest tests/unit
python -m tests.support.messages /tmp/messages          # read aloud; --missing: only what no test provoked
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from state_backend.values import errors
from tests.support.layout import REPOSITORY

CLASSES = {name for name, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.CairnError)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where an error is made: the lines of the call, and its message with … for what is filled in."""

    file: str
    first: int
    last: int
    kind: str
    template: str

    def __str__(self) -> str:
        return f"{self.file}:{self.first} {self.kind}"


def sites() -> Iterator[Site]:
    """All of the code's, file by file."""
    for folder in ("state_backend", "jobs", "plugins"):
        for file in sorted((REPOSITORY / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Call) and (kind := _name(node.func)) in CLASSES and node.args:
                    yield Site(
                        file=file.relative_to(REPOSITORY).as_posix(),
                        first=node.lineno,
                        last=node.end_lineno or node.lineno,
                        kind=kind,
                        template=_template(node.args[0]),
                    )


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _template(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values)
    return "…"


def record_to(path: Path) -> None:
    """From now on each error of ours that this process makes goes into a file beside ``path``, one JSON object a line."""
    out = path.with_name(f"{path.name}.{os.getpid()}").open("a")
    plain = errors.CairnError.__init__

    def recording(self: errors.CairnError, *args: object, **more: Any) -> None:
        plain(self, *args, **more)
        frame = inspect.currentframe()
        while frame is not None and frame.f_code.co_filename in (__file__, errors.__file__):
            frame = frame.f_back
        if frame is not None and args:
            where = {"file": frame.f_code.co_filename, "line": frame.f_lineno, "kind": type(self).__name__}
            out.write(json.dumps({**where, "message": str(args[0])}) + "\n")
            out.flush()

    errors.CairnError.__init__ = recording  # type: ignore[method-assign]


def provoked(path: Path) -> dict[Site, str]:
    """The first message of each site that was recorded."""
    made: dict[str, list[Site]] = {}
    for site in sites():
        made.setdefault(site.file, []).append(site)
    found: dict[Site, str] = {}
    for part in path.parent.glob(f"{path.name}.*"):
        for line in part.read_text().splitlines():
            one = json.loads(line)
            file = one["file"].removeprefix(f"{REPOSITORY}/")
            for site in made.get(file, ()):
                if site.first <= one["line"] <= site.last:
                    found.setdefault(site, one["message"])
    return found


def main(arguments: list[str]) -> None:
    said = provoked(Path(arguments[0]))
    everything = list(sites())
    for site in everything:
        if site not in said:
            print(f"{site}   NOT PROVOKED\n    {site.template}\n")
        elif "--missing" not in arguments:
            text = "\n    ".join(said[site].splitlines())
            print(f"{site}\n    {text}\n")
    print(f"{len(said)} of {len(everything)} were provoked")


if __name__ == "__main__":
    main(sys.argv[1:])
