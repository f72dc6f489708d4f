"""Every error that the code can raise, and which of them the tests met.

A run of the whole suite names each place where an error is made that no test reached, and fails by it with CAIRN_TESTS=all
(`tests/conftest.py`). So who adds an error adds a test that meets it as a user would.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from state_backend.values import errors
from state_backend.values.parse_source import parse_source
from tests.support.layout import REPOSITORY

CLASSES = {name for name, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.CairnError)}
# Nobody can meet these but by a bug; they are assertions that say where.
ASSERTIONS = {"InvariantViolated"}
# Raises again what a process of Spark's raised, so that its place is not where the message was made.
SECOND_HAND = "jobs/cairn/spark/first_cause.py"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """An error that was made. ``file``: relative to the repository; ``kind``: the name of its class."""

    file: str
    line: int
    kind: str
    message: str


@cache
def sites() -> tuple[Site, ...]:
    """All of the code's, file by file."""
    return tuple(_sites())


def _sites() -> Iterator[Site]:
    for folder in ("state_backend", "jobs", "plugins"):
        for file in sorted((REPOSITORY / folder).rglob("*.py")):
            for node in ast.walk(parse_source(file.read_text())):
                if not (isinstance(node, ast.Call) and node.args):
                    continue
                # A call of one of two classes makes either.
                made = [node.func.body, node.func.orelse] if isinstance(node.func, ast.IfExp) else [node.func]
                for kind in CLASSES & {*map(_name, made)}:
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


class Recorder:
    """What errors of ours this process makes from now on: the first of each place, and each that came second-hand."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, int, str]] = set()
        self.made: list[Made] = []
        plain = errors.CairnError.__init__
        own = {(__file__, "recording"), (errors.__file__, "__init__")}

        def recording(error: errors.CairnError, *args: object, **more: Any) -> None:
            plain(error, *args, **more)
            frame = inspect.currentframe()
            while frame is not None and (frame.f_code.co_filename, frame.f_code.co_name) in own:
                frame = frame.f_back
            if frame is not None and args:
                self._note(frame.f_code.co_filename, frame.f_lineno, error)

        errors.CairnError.__init__ = recording  # type: ignore[method-assign]

    def _note(self, file: str, line: int, error: errors.CairnError) -> None:
        message = str(error.args[0]) if file.endswith(SECOND_HAND) else ""
        if (file, line, message) in self._seen:
            return
        within = file.removeprefix(f"{REPOSITORY}/")
        if within.startswith(("state_backend/", "jobs/", "plugins/")):
            self.made.append(Made(file=within, line=line, kind=type(error).__name__, message=str(error.args[0])))
        # Last: at the end of Python's stack all of this may fail, and be tried again by a caller further up.
        self._seen.add((file, line, message))


def as_plain(made: Iterable[Made]) -> list[list[Any]]:
    """For what knows lists and texts only."""
    return [[one.file, one.line, one.kind, one.message] for one in made]


def from_plain(plain: Iterable[list[Any]]) -> list[Made]:
    """The inverse of ``as_plain``."""
    return [Made(file=file, line=line, kind=kind, message=message) for file, line, kind, message in plain]


def missing(made: Collection[Made], every: Iterable[Site]) -> list[Site]:
    """Return the places that a whole run should have reached. A second-hand error counts for each place of its class whose words it has."""
    second_hand = [one for one in made if one.file == SECOND_HAND]

    def is_met(site: Site) -> bool:
        line = site.template.split("\n", 1)[0]
        words = re.compile(".*".join(map(re.escape, line.split("…"))))
        return any(one.file == site.file and site.first <= one.line <= site.last for one in made) or (
            len(line.replace("…", "")) >= 15
            and any(one.kind == site.kind and words.search(one.message) for one in second_hand)
        )

    return [site for site in every if site.kind not in ASSERTIONS and not is_met(site)]


def is_whole_run(config: pytest.Config, exitstatus: int) -> bool:
    """Whether every test was to run, and none failed."""
    narrowed = ["keyword", "markexpr", "deselect", "ignore", "ignore_glob", "lf", "last_failed", "stepwise"]
    return (
        exitstatus == pytest.ExitCode.OK
        and config.args_source == pytest.Config.ArgsSource.TESTPATHS
        and not any(config.getoption(name, None) for name in [*narrowed, "collectonly"])
    )
