"""docs/errors.md is what the code says: its classes, Airflow's retries and the exit codes; and its commands work."""

from __future__ import annotations

import ast
import re
import shlex
from datetime import timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

import cairn.errors
from cairn.command.cli import app
from cairn.testing import PipelineTester
from pipelines.aircraft import AIRCRAFT, READ_SCHEMA
from state_backend.values import errors
from state_backend.values.parse_source import parse_source
from tests.support.errors_page import PAGE, groups, page, sections
from tests.support.printed_commands import commands_of

# What a reader fills in, and the commands that the page only names.
FILLED_IN = {"ID": "1", "MODULE:NAME": "pipelines.aircraft:AIRCRAFT"}
NAMED = {
    "cairn run",
    "cairn try",
    "cairn compare",
    "cairn diff",
    "cairn spark",
    "cairn backfill",
    "cairn heal",
    "cairn pause",
    "cairn trials --remove",
}


def test_errors_md_equals_the_output_of_its_generator() -> None:
    assert PAGE.read_text() == page(), "run: python -m tests.support.errors_page"


def test_every_error_is_on_the_page_below_the_class_of_its_group() -> None:
    shown = [error for group in groups() for error in group.classes]
    tree = parse_source(Path(errors.__file__).read_text())
    assert [e.__name__ for e in shown] == [
        n.name for n in tree.body if isinstance(n, ast.ClassDef) and n.name != "Rerun"
    ]
    for group in groups():
        assert all(issubclass(error, group.classes[0]) for error in group.classes)


def test_users_can_import_every_error_but_those_that_cairn_s_own_code_handles() -> None:
    *public, internal = groups()
    assert internal.classes[0] is errors.StorageError
    assert set(cairn.errors.__all__) == {error.__name__ for group in public for error in group.classes}


@pytest.mark.parametrize("error", [error for group in groups() for error in group.classes])
def test_every_error_says_what_it_means_and_what_to_do(error: type[errors.CairnError]) -> None:
    cause, what = sections(error)
    assert len(cause.split()) > 3
    assert len(what.split()) > 3 and what.endswith(".")


def test_the_commands_of_the_page_work_when_typed(tmp_path: Path) -> None:
    flight = {
        "tailnum": "N14228", "scheduled_departure": AIRCRAFT.start.replace(tzinfo=None), "origin": "EWR", "dest": "IAH",
        "departed": True, "arrived": True,
    }  # fmt: skip
    tester = PipelineTester(AIRCRAFT, input_schema=READ_SCHEMA, every=timedelta(days=1), root=f"file://{tmp_path}")
    for _ in range(2):
        tester.run([flight])
    written = {command for inline in re.findall(r"`([^`\n]+)`", PAGE.read_text()) for command in commands_of(inline)}
    typed = {command for command in written if command not in NAMED}
    assert {"cairn status", "cairn checkpoints", "cairn check", "cairn restore ID --dry-run"} < typed
    for command in sorted(typed):
        words = [FILLED_IN.get(word, word) for word in shlex.split(command)[1:]]
        done = CliRunner().invoke(app, words, env={"CAIRN_ROOT": f"file://{tmp_path}", "CAIRN_PIPELINE": "aircraft"})
        assert done.exit_code == 0, f"{command}: {done.output}"
    assert [record.id for record in tester.checkpoints] == [1, 2]  # the restore was a dry run
