"""What README, docs and DAGs tell a person to type: each command is one that exists, with options that exist.

Those whose effect is checked by running them as they stand are named here with the test that does it; the others with the reason why not.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import re
import shlex
from pathlib import Path

import pytest
import typer

from cairn.command.cli import app
from cairn.pipeline import Pipeline

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "dags").glob("*.py"))]

# Who runs it, and looks at what it did; or why nobody does.
RUN = {
    "airflow backfill": "tests/integration/test_airflow.py, as refusals print it",
    "airflow tasks": "tests/integration/test_airflow.py, as refusals print it",
    "airflow connections": "not run: it writes into the database of whoever runs it; parsed here",
    "airflow db": "not run as it stands: USER and HOST are the reader's; every test of Airflow migrates a PostgreSQL",
    "airflow dags": "not run: it only lists; parsed here",
    "airflow providers": "not run: it only lists; parsed here",
    "cairn backfill": "tests/integration/test_airflow.py",
    "cairn diff": "tests/unit/test_cli.py",
    "cairn export": "tests/unit/test_cli.py",
    "cairn fork": "tests/unit/test_savepoints.py",
    "cairn list": "tests/unit/test_cli.py",
    "cairn new": "tests/integration/test_new_pipeline.py",
    "cairn restore": "tests/integration/test_savepoints.py",
    "cairn run": "tests/integration/test_docs.py",
    "cairn savepoint": "tests/integration/test_airflow.py, with --stop",
    "cairn show": "tests/unit/test_cli.py",
    "cairn spark": "tests/integration/test_connect.py, all but the waiting",
    "cairn status": "tests/unit/test_cli.py",
    "cairn sweep": "tests/unit/test_cli.py",
    "cairn verify": "tests/unit/test_cli.py",
}
_CODE = re.compile(r"```console\n(.*?)```|`([^`\n]+)`", re.DOTALL)


def commands() -> list[tuple[str, str]]:
    """Of each page the lines that begin with one of our programs, without prompt and comment."""
    found = []
    for page in PAGES:
        for block, inline in _CODE.findall(page.read_text()):
            for line in (block or inline).splitlines():
                text = line.strip().removeprefix("$ ").partition("  #")[0].strip()
                text = re.sub(r"^(?:\w+=\S+ )+", "", text).removeprefix(".venv/bin/")
                if re.match(r"(airflow|cairn|make) [a-z]", text):
                    found.append((page.relative_to(ROOT).as_posix(), text))
    return found


COMMANDS = sorted(set(commands()))


def test_there_are_commands_and_each_says_who_runs_it() -> None:
    assert len(COMMANDS) > 20
    kinds = {" ".join(text.split()[:2]) for _, text in COMMANDS if not text.startswith("make ")}
    assert kinds - RUN.keys() == set()


@pytest.mark.parametrize(("page", "text"), COMMANDS, ids=[f"{page}: {text}" for page, text in COMMANDS])
def test_a_documented_command_exists_with_its_options(page: str, text: str) -> None:
    program, *words = shlex.split(text.replace("…", "").replace("\\n", " "), comments=True)
    if program == "make":
        targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        assert {word for word in words if "=" not in word} <= targets
    elif program == "cairn":
        group = typer.main.get_command(app)
        command = group.commands[words[0]]  # type: ignore[attr-defined]
        known = {option for parameter in command.params for option in parameter.opts}
        assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known, (page, text)
    elif not text.endswith(("create", "add")):  # only named, not written out
        from airflow.cli import cli_parser

        assert isinstance(cli_parser.get_parser(), argparse.ArgumentParser)
        cli_parser.get_parser().parse_args(words)


def test_python_in_the_docs_compiles_and_imports_what_there_is() -> None:
    for page in PAGES:
        if page.suffix != ".md":
            continue
        for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
            for node in ast.parse(block).body:
                if (
                    isinstance(node, ast.ImportFrom)
                    and node.module
                    and node.module.split(".")[0] in ("cairn", "state_backend")
                ):
                    exec(compile(ast.Module([node], []), str(page), "exec"), {})


def test_the_retention_that_the_docs_show_is_one() -> None:
    text = (ROOT / "docs" / "airflow.md").read_text()
    [block] = [b for b in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "retention=" in b]
    [call] = [n for n in ast.walk(ast.parse(block)) if isinstance(n, ast.keyword) and n.arg == "retention"]
    scope: dict[str, object] = {}
    exec(compile(ast.Module(ast.parse(block).body[:1], []), "airflow.md", "exec"), scope)
    from tests.support.counting import counting

    made = counting(retention=eval(compile(ast.Expression(call.value), "airflow.md", "eval"), scope))
    assert made.retention is not None and made.retention.keep([]) == frozenset()


def test_the_reference_names_every_argument_of_a_pipeline() -> None:
    table = (ROOT / "docs" / "reference.md").read_text().split("## Interval")[0]
    named = {
        name for row in re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    }
    assert named == {field.name for field in dataclasses.fields(Pipeline)}


def test_the_interval_of_the_reference_is_one() -> None:
    text = (ROOT / "docs" / "reference.md").read_text()
    [block] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    scope: dict[str, object] = {}
    exec(compile(block, "reference.md", "exec"), scope)
    assert str(scope["second"]) == "[2024-01-02T00:00:00Z, 2024-01-03T00:00:00Z)"
