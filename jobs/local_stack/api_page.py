"""Print the signatures of the public names into `docs/api.md`: `make api`.

The page has one block for each list of names, which a reader of the repository sees as Python. The names themselves are
in a comment behind the block, as lines `::: module.name`:

    <!-- signatures -->
    ```pyi
    def run_interval(spark, ...) -> Record: ...
    ```
    <!-- site
    ::: cairn.run_interval
    -->

For the docs site, an extension of Markdown takes the lines out of the comment in place of the block, so that
mkdocstrings shows the full text and all arguments.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import griffe
from markdown import Extension, Markdown  # type: ignore[import-untyped]
from markdown.preprocessors import Preprocessor  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "api.md"
PACKAGES = ("cairn", "cairn_operators", "state_backend")
_BLOCK = re.compile(r"<!-- signatures -->\n(?:```pyi\n.*?```\n)?<!-- site\n(.*?)-->\n", re.DOTALL)
_NAME = re.compile(r"::: (\S+)\n(?: +options: \{members: \[(.*)\]\}\n)?")


def with_signatures(page: str) -> str:
    """Return the text of the page with a new block of signatures before each list of names."""
    loader = griffe.GriffeLoader(search_paths=[ROOT / "jobs", ROOT / "plugins", ROOT])
    for package in PACKAGES:
        loader.load(package)
    loader.resolve_aliases(implicit=True, external=False)

    def printed(block: re.Match[str]) -> str:
        shown = [
            _signature(loader.modules_collection[name], [m for m in re.split(r",\s*", members) if m])
            for name, members in _NAME.findall(block[1])
        ]
        text = _format("\n".join(shown))
        return f"<!-- signatures -->\n```pyi\n{text}```\n<!-- site\n{block[1]}-->\n"

    return _BLOCK.sub(printed, page)


def for_site(page: str) -> str:
    """Return the text of the page for mkdocstrings: each block of signatures is replaced by its names."""
    return _BLOCK.sub(lambda block: block[1], page)


def _signature(found: Any, members: list[str]) -> str:
    """Return a function, or a class with its constructor or settings and with these methods, as a stub of Python."""
    target = found.final_target if found.is_alias else found
    if target.is_function:
        return _function(target, "")
    bases = ", ".join(str(base) for base in target.bases)
    own = [target.members[name] for name in ("__init__", *members) if name in target.members]
    settings = {
        name: f"    {name}: {member.annotation}" + (f" = {member.value}" if member.value is not None else "")
        for owner in [*reversed(target.mro()), target]
        for name, member in owner.members.items()
        # A class variable is no setting.
        if member.is_attribute
        and member.annotation is not None
        and "instance-attribute" in member.labels
        and not name.startswith("_")
    }
    constructed = "__init__" in target.members or bases.endswith("Error")
    lines = [*({} if constructed else settings).values(), *(_function(one, "    ") for one in own)]
    head = f"class {target.name}{f'({bases})' if bases else ''}:"
    return "\n".join([head, *lines]) if lines else f"{head} ..."


def _function(function: Any, margin: str) -> str:
    if function.is_attribute:
        return f"{margin}{function.name}: {function.annotation}"
    words: list[str] = []
    for parameter in function.parameters:
        if str(parameter.annotation) == f"Literal[{parameter.default}]":
            continue  # The tag of a value in the record: it takes no other value.
        kind = parameter.kind.value
        if kind == "keyword-only" and not any(word.startswith("*") for word in words):
            words.append("*")
        stars = {"variadic positional": "*", "variadic keyword": "**"}.get(kind, "")
        typed = f": {parameter.annotation}" if parameter.annotation is not None else ""
        default = f" = {parameter.default}" if parameter.default is not None and not stars else ""
        words.append(f"{stars}{parameter.name}{typed}{default}")
    returns = f" -> {function.returns}" if function.returns is not None else ""
    return f"{margin}def {function.name}({', '.join(words)}){returns}: ..."


def _format(stub: str) -> str:
    """Return a stub as `ruff format` has it, which also checks the page."""
    command = [str(Path(sys.executable).with_name("ruff")), "format", "--stdin-filename", str(PAGE.with_suffix(".pyi"))]
    return subprocess.run(command, input=stub, capture_output=True, text=True, check=True, cwd=ROOT).stdout


class _ForSite(Preprocessor):  # type: ignore[misc]
    def run(self, lines: list[str]) -> list[str]:
        return for_site("\n".join(lines) + "\n").split("\n")


class ApiPage(Extension):  # type: ignore[misc]
    def extendMarkdown(self, md: Markdown) -> None:
        """Take the names out of their comments before any other extension sees the page."""
        md.preprocessors.register(_ForSite(md), "cairn_api_page", 1000)


def makeExtension(**settings: Any) -> ApiPage:
    """Return the extension: zensical.toml names this module."""
    return ApiPage(**settings)


if __name__ == "__main__":
    PAGE.write_text(with_signatures(PAGE.read_text()))
