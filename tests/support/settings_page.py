"""The tables of docs/settings.md, from the code: `make api` writes them.

A setting's meaning stands in its class's docstring, and a variable's in `state_backend/values/environment.py`.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import griffe

from cairn.change_expectations import ChangeExpectations
from cairn.pipeline import Pipeline
from cairn.testing import PipelineTester
from state_backend.adapters.rocks import EngineOptions
from state_backend.shard.changelog_store import ChangelogOptions
from state_backend.values.environment import Variable
from state_backend.values.retention import RetentionPolicy

PAGE = Path(__file__).resolve().parents[2] / "docs" / "settings.md"
TABLES: dict[str, tuple[type, ...]] = {
    **{f"`{thing.__name__}`": (thing,) for thing in (Pipeline, EngineOptions, ChangelogOptions, ChangeExpectations)},
    "`PipelineTester`": (PipelineTester,),
    "Retention policies": get_args(RetentionPolicy),
}
# Where the docs say more about a setting.
MORE = {
    "source": "sources.md",
    "processor": "processors.md",
    "output_schema": "processors.md#aggregates",
    "watermark": "processors.md#event-time",
    "dropped": "state-schema.md#drop-a-field",
    "renamed": "state-schema.md#rename-a-field-and-keep-its-values",
    "stateful_source": "sources.md#one-rule-first",
    "initial_state": "processors.md#state-that-a-pipeline-starts-with",
    "sink": "sinks.md",
    "expectations": "validation.md",
    "expectations_over_time": "#changeexpectations",
    "expectations_memory_bytes": "validation.md#where-expectations-are-evaluated",
    "engine": "#engineoptions",
    "changelog": "#changelogoptions",
    "schedule": "routine.md#schedules",
    "retention": "#retention-policies",
    "pairs": "validation.md#changes-since-the-base",
}


def with_settings(page: str) -> str:
    """Return the text of the page with its tables written again."""
    rows = {
        heading: [row for thing in things for row in _rows(thing, len(things) > 1)]
        for heading, things in TABLES.items()
    }
    rows["Environment"] = [_row(v, v.meaning, default=v.default) for v in Variable]
    for heading, lines in rows.items():
        table = re.compile(rf"(^## {re.escape(heading)}\n(?s:.*?)\n\|---\|---\|\n)(?:\|.*\n)+", re.MULTILINE)
        page, found = table.subn(lambda match, lines=lines: match[1] + "".join(lines), page, count=1)  # type: ignore[misc]
        assert found == 1, f"no table below {heading}"
    return page


def _rows(thing: type, several: bool) -> Iterator[str]:
    said = _meanings(thing)
    for name, default in _defaults(thing):
        if name != "policy":  # The tag of a retention policy, which nobody sets.
            yield _row(f"{thing.__name__}({name})" if several else name, said[name], MORE.get(name), default)


def _row(name: str, meaning: str, more: str | None = None, default: str = "") -> str:
    """Return a row. The default has a code span of its own, so that a narrow screen can break the line before it."""
    shown = (f"[`{name}`]({more})" if more else f"`{name}`") + (f" (`{default}`)" if default else "")
    said = meaning.strip().removesuffix(".").replace("|", "\\|")
    return f"| {shown} | {said[0].upper() + said[1:]} |\n"


def _defaults(thing: type) -> Iterator[tuple[str, str]]:
    """Each setting's name, and its default as an argument has it: `128`; empty if the setting must be given."""
    fields = {f.name: f for f in dataclasses.fields(thing)} if dataclasses.is_dataclass(thing) else {}
    for name, parameter in inspect.signature(thing).parameters.items():
        if (field := fields.get(name)) is not None and field.default_factory is not dataclasses.MISSING:
            yield name, f"{getattr(field.default_factory, '__name__', '')}()"
        else:
            yield name, "" if parameter.default is parameter.empty else repr(parameter.default)


def _meanings(thing: type) -> dict[str, str]:
    found: dict[str, str] = {}
    for section in griffe.Docstring(inspect.getdoc(thing) or "").parse("google", warnings=False):
        if section.kind.value in ("attributes", "parameters"):
            listed: Any = section.value
            found |= {item.name: " ".join(item.description.split()) for item in listed}
    return found


if __name__ == "__main__":
    PAGE.write_text(with_settings(PAGE.read_text()))
