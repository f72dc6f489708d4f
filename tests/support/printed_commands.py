"""Every command that a person is told to type: by README, docs and DAGs, and by strings of the code (messages, logs, help texts)."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from cairn.command.cli import COMMANDS as ROWS
from state_backend.values.parse_source import parse_source
from tests.support.layout import REPOSITORY

PAGES = [
    REPOSITORY / "README.md",
    REPOSITORY / "CONTRIBUTING.md",
    REPOSITORY / "benchmarks" / "REPORT.md",
    *sorted((REPOSITORY / "docs").glob("*.md")),
    *sorted((REPOSITORY / "dags").glob("*.py")),
]
CODE = [
    *(file for folder in ("state_backend", "jobs", "plugins") for file in sorted((REPOSITORY / folder).rglob("*.py"))),
    *(REPOSITORY / "jobs/cairn/command/templates").iterdir(),
]
TARGETS = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
# Each command of `cairn` with its options, by its words: {"status": {"--root", …}, "trials list": {…}}.
COMMANDS = {
    **{row.name.split()[0]: set() for row in ROWS},  # The groups too.
    **{row.name: {option for parameter in row.command().params for option in parameter.opts} for row in ROWS},
}
_KNOWN = {
    "cairn": set(COMMANDS),
    "make": TARGETS,
    "airflow": {"backfill", "connections", "dags", "db", "pools", "providers", "standalone", "tasks", "variables"},
    "gcloud": {"auth", "composer", "dataproc", "storage"},
    "aws": {"emr-serverless", "glue", "s3"},
    "databricks": {"fs"},
    "pip": {"install"},
    "python": {"-m"},
    "python3": {"-m"},
    "spark-submit": {"--master", "--py-files"},
}
_BLOCK = re.compile(r"```console\n(.*?)```|`([^`\n]+)`", re.DOTALL)
# Where a command may begin and end in a line of a shell.
_NEXT = re.compile(r"\s*(?:;|&&|\|\|?)\s*")
_BEGIN = re.compile(
    r"(?<![\w./@-])(?:\.venv/bin/|env/bin/)?(cairn|airflow|make|gcloud|aws|databricks|spark-submit|pip|python3?) ([a-z-][\w-]*)"
)


def run_printed(command: str, folder: Path, **variables: str) -> str:
    """A line in a shell with .venv/bin on the PATH, as the docs have it; what it said. AssertionError if it fails."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # `make test` sets these, and a `make` below it then prints "Entering directory".
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    }
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**environment, **variables, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}"
    return done.stdout


@cache
def in_docs() -> dict[str, set[str]]:
    """Each command as it is printed, without prompt, comment and variables before it, with the pages that have it."""
    found: dict[str, set[str]] = {}
    for page in PAGES:
        for block, inline in _BLOCK.findall(page.read_text()):
            for line in (block or inline).splitlines():
                if not block or line.startswith("$ "):
                    for text in commands_of(line):
                        found.setdefault(text, set()).add(page.relative_to(REPOSITORY).as_posix())
    return found


def commands_of(line: str) -> Iterator[str]:
    """Those of our programs in a line of a shell."""
    if re.match(r"cairn \w+ \| ", line):  # a list of commands
        return
    for part in _NEXT.split(re.sub(r"\s{2,}#.*", "", line.strip().removeprefix("$ "))):
        text = re.sub(r"^(?:export )?(?:\w+=\S+ )*", "", part)
        begun = _BEGIN.match(text)
        if begun and begun[2] in _KNOWN[begun[1]]:
            yield text.removeprefix(".venv/bin/").removeprefix("env/bin/")


@cache
def in_code() -> dict[str, set[str]]:
    """Each command with its options, … for what is filled in, and the files that print it."""
    found: dict[str, set[str]] = {}
    for file in CODE:
        texts = _strings(parse_source(file.read_text())) if file.suffix == ".py" else [file.read_text()]
        for text in texts:
            for begun in _BEGIN.finditer(text):
                if begun[2] in _KNOWN[begun[1]] and (begun[1], text[begun.end() :]) != ("python", " …"):
                    end = begun.end()
                    inner = re.match(r" ([a-z]+)", text[end:])
                    if inner and f"{begun[2]}{inner[0]}" in COMMANDS:
                        end += inner.end()
                    words = [text[begun.start(1) : end], *_options(text[end:], after_option=begun[2] == "-m")]
                    found.setdefault(" ".join(words), set()).add(file.relative_to(REPOSITORY).as_posix())
    return found


def _options(text: str, after_option: bool) -> Iterator[str]:
    """The words that go on a command; prose goes on with a plain word or a sign."""
    quoted = re.match(r" '[^'\n]+'", text)
    if quoted:
        yield quoted[0].strip()
        return
    for word in re.split(r"[\n'`\"();,]| {2,}", text[1:])[0].split():
        option = word.startswith("-")
        if text[:1] != " " or not (option or after_option or re.search(r"[…=/.:-]", word)):
            return
        yield word
        after_option = option


def _strings(tree: ast.Module) -> Iterator[str]:
    """Strings, but for docstrings of what is no command; lists of words as a line."""
    inner: set[int] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Module(body=[ast.Expr(value=ast.Constant() as text), *_]):
                inner.add(id(text))
            case ast.ClassDef(body=[ast.Expr(value=ast.Constant() as text), *_]):
                inner.add(id(text))
            case ast.FunctionDef(body=[ast.Expr(value=ast.Constant() as text), *_], args=arguments):
                if not any("typer" in ast.dump(a) for a in arguments.args):
                    inner.add(id(text))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "command_line":
            yield _built(node)
        if isinstance(node, ast.JoinedStr | ast.List) and id(node) not in inner:
            parts = node.values if isinstance(node, ast.JoinedStr) else node.elts
            inner.update(map(id, parts))
            texts = [p.value if isinstance(p, ast.Constant) and isinstance(p.value, str) else "…" for p in parts]
            yield ("" if isinstance(node, ast.JoinedStr) else " ").join(texts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            yield node.value


def _built(call: ast.Call) -> str:
    """The command that `command_line` builds, with all of its options; `**` of a dict counts as none."""
    words = ["cairn", *(str(a.value) if isinstance(a, ast.Constant) else "…" for a in call.args)]
    for one in call.keywords:
        if one.arg is not None:
            words.append(f"--{one.arg.rstrip('_').replace('_', '-')}")
            if not (isinstance(one.value, ast.Constant) and one.value.value is True):
                words.append("…")
    return " ".join(words)
