"""Docs, templates, examples and DAGs import public modules only, and each name that they import exists."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import get_args

import pytest

import cairn
from cairn.operations.intervals.run_intervals import OnOutcome
from tests.support.layout import PUBLIC, REPOSITORY

OURS = re.compile(
    r"^[ >]*(?:from|import) ((?:cairn|state_backend|local_stack)[\w.]*)(?: import ([\w, ]+))?", re.MULTILINE
)
# docs/design.md and docs/design-*.md explain the inside.
TEXTS = [
    *(p for p in (REPOSITORY / "docs").rglob("*.md") if not p.name.startswith("design")),
    REPOSITORY / "README.md",
    *(REPOSITORY / "jobs/cairn/command/templates").iterdir(),
    *(REPOSITORY / "jobs/pipelines").glob("*.py"),
    *(REPOSITORY / "dags").glob("*.py"),
]


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_only_public_modules_are_imported(text: Path) -> None:
    for module, names in OURS.findall(text.read_text()):
        assert module in PUBLIC, f"{module} is internal"
        for name in filter(None, (part.split(" as ")[0].strip() for part in names.split(","))):
            found = f"{module}.{name}" in PUBLIC or hasattr(import_module(module), name)
            assert found, f"{module} has no {name}"


def test_import_regex_finds_plain_from_and_indented_imports() -> None:
    seen = OURS.findall(
        "from cairn import Pipeline, register_data_sources\n    from state_backend.values import x\nimport cairn\n"
    )
    assert [module for module, _ in seen] == ["cairn", "state_backend.values", "cairn"]


def test_on_outcome_callback_gets_only_public_types() -> None:
    """`run_intervals` calls `on_outcome` with two values, and a user's function has annotations for them."""
    assert {*get_args(OnOutcome)[0]} == {cairn.Outcome, cairn.Progress}
