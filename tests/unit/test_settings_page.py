"""docs/settings.md lists every setting, with its default."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

import cairn
from cairn.change_expectations import OverTime
from cairn.pipeline import Pipeline
from cairn.testing import PipelineTester
from state_backend.adapters.rocks import EngineOptions
from state_backend.shard.changelog import ChangelogOptions
from state_backend.values.retention import RetentionPolicy

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "settings.md").read_text()


def settings_of(thing: type) -> Iterator[tuple[str, str]]:
    """Each setting's name and default, as Python writes it."""
    if dataclasses.is_dataclass(thing):
        for field in dataclasses.fields(thing):
            default: Any = field.default
            if field.default_factory is not dataclasses.MISSING:
                default = f"{getattr(field.default_factory, '__name__', '')}()"
                yield field.name, default
            else:
                yield field.name, "needed" if default is dataclasses.MISSING else repr(default)
        return
    for parameter in list(inspect.signature(thing).parameters.values())[1:]:
        yield parameter.name, "needed" if parameter.default is parameter.empty else repr(parameter.default)


def table_under(heading: str) -> dict[str, str]:
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([\w.]+)` \| ([^|]+) \| ([^|].*) \|$", section, re.MULTILINE)
    return {name: default.strip("`") for name, default, _ in rows}


@pytest.mark.parametrize("thing", [Pipeline, EngineOptions, ChangelogOptions, OverTime, PipelineTester])
def test_every_setting_is_listed_with_its_default(thing: type) -> None:
    expected = dict(settings_of(thing))
    assert table_under(f"`{thing.__name__}`") == expected


def test_every_policy_is_listed() -> None:
    policies = get_args(RetentionPolicy)
    expected = {f"{p.__name__}.{name}": default for p in policies for name, default in settings_of(p)}
    assert table_under("Retention policies") == expected
    assert {p.__name__ for p in policies} <= {*cairn.__all__}


def test_every_variable_is_listed() -> None:
    code = Path(__file__).resolve().parents[2]
    sources = [file for folder in ("jobs", "plugins", "dags") for file in (code / folder).rglob("*.py")]
    used = {name for file in sources for name in re.findall(r"\bCAIRN_[A-Z_]*[A-Z]\b", file.read_text())}
    # These two are between a task and its driver. (Templates of `cairn new` end theirs with the pipeline's name.)
    assert used - {"CAIRN_OWNER", "CAIRN_PYTHON_PATH"} == set(re.findall(r"`(CAIRN_[A-Z_]+)`", PAGE))
