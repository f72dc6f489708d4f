"""docs/settings.md lists every setting and every environment variable, as the code defines them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import get_args

import pytest

import cairn
from state_backend.values.environment import Variable
from state_backend.values.parse_source import parse_source
from state_backend.values.retention import RetentionPolicy
from tests.support.settings_page import PAGE, with_settings

CODE = PAGE.parents[1]
# Examples and templates may import public modules only.
EXAMPLES = ("jobs/pipelines", "dags")


def sources() -> Iterator[tuple[str, str]]:
    for folder in ("state_backend", "jobs", "plugins", "dags"):
        for file in (CODE / folder).rglob("*.py"):
            yield str(file.relative_to(CODE)), file.read_text()


def templates() -> list[str]:
    return [file.read_text() for file in (CODE / "jobs/cairn/command/templates").iterdir()]


def test_the_tables_of_the_page_list_the_settings_and_variables_of_the_code() -> None:
    page = PAGE.read_text()
    assert with_settings(page) == page, "to write the page again: make api"
    assert page.count("\n| `max_parallelism` (`128`) | Number of key groups") == 1
    assert page.count("\n| `CAIRN_ROOT` | Storage URL") == 1
    assert {policy.__name__ for policy in get_args(RetentionPolicy)} <= {*cairn.__all__}


def test_every_environment_variable_named_in_code_or_templates_is_defined() -> None:
    # Templates of `cairn new` end theirs with the pipeline's name.
    texts = [*(text for _, text in sources()), *templates()]
    named = {name for text in texts for name in re.findall(r"\bCAIRN_[A-Z_0-9]*[A-Z0-9]\b", text)}
    assert named == {str(variable) for variable in Variable if variable.startswith("CAIRN_")}


def test_code_names_environment_variables_only_by_members_of_the_enum() -> None:
    """Such a reader can have no default of its own."""
    for path, text in sources():
        if path != "state_backend/values/environment.py" and not path.startswith(EXAMPLES):
            texts = {n.value for n in ast.walk(parse_source(text)) if isinstance(n, ast.Constant)}
            assert not texts & {*Variable}, path


@pytest.mark.parametrize(("value", "given"), [(None, None), ("", None), ("file:///x", "file:///x")])
def test_an_empty_variable_counts_as_absent(
    value: str | None, given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is None:
        monkeypatch.delenv("CAIRN_ROOT", raising=False)
    else:
        monkeypatch.setenv("CAIRN_ROOT", value)
    assert Variable.ROOT.given == given
