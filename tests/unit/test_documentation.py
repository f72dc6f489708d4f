"""Python in README and docs is what there is. Their commands: test_printed_commands.py; their blocks: tests/integration/test_docs.py."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import tomllib
from datetime import UTC, datetime, timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import cairn_operators
from cairn.pipeline import Pipeline
from cairn_operators.driver_operator import DriverOperator
from state_backend.values.parse_source import parse_source
from tests.support.layout import PUBLIC

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "dags").glob("*.py"))]


def test_python_in_the_docs_parses_and_its_imports_exist() -> None:
    for page in PAGES:
        if page.suffix != ".md":
            continue
        for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
            for node in parse_source(block).body:
                if (
                    isinstance(node, ast.ImportFrom)
                    and node.module
                    and node.module.split(".")[0] in ("cairn", "state_backend")
                ):
                    exec(compile(ast.Module([node], []), str(page), "exec"), {})


def test_recipes_for_duckdb_read_files_with_other_columns() -> None:
    """Without `union_by_name`, DuckDB silently rounds values to the first file's types, and drops columns that file lacks."""
    texts = [path.read_text() for path in (*PAGES, *ROOT.glob("jobs/cairn/**/*.py"))]
    calls = [
        line for text in texts for line in text.splitlines() if re.search(r"read_parquet\((\{|output_files)", line)
    ]
    assert len(calls) == 4 and all("union_by_name" in line for line in calls)


def test_readme_and_the_first_page_begin_with_the_same_pipeline() -> None:
    readme, index = ((ROOT / page).read_text().split("```python\n")[1] for page in ("README.md", "docs/index.md"))
    assert readme.split("```")[0] == index.split("```")[0]


def test_the_retention_example_of_the_docs_is_a_valid_policy() -> None:
    text = (ROOT / "docs" / "operators.md").read_text()
    [block] = [b for b in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "retention=" in b]
    [call] = [n for n in ast.walk(parse_source(block)) if isinstance(n, ast.keyword) and n.arg == "retention"]
    scope: dict[str, object] = {}
    exec(compile(ast.Module(parse_source(block).body[:1], []), "operators.md", "exec"), scope)
    from tests.support.counting import counting

    made = counting(retention=eval(compile(ast.Expression(call.value), "operators.md", "eval"), scope))
    assert made.retention is not None and made.retention.keep([]) == frozenset()


def test_the_dag_examples_of_the_docs_build_valid_dags() -> None:
    text = (ROOT / "docs" / "operators.md").read_text()
    start = datetime(2013, 1, 1, tzinfo=UTC)
    scope: dict[str, Any] = {
        "root": "file:///state",
        "start": start,
        "datetime": datetime,
        "timedelta": timedelta,
        "UTC": UTC,
    }
    for begins in ("# An Airflow DAG.", "from airflow.sdk import DAG"):
        [block] = [b for b in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if b.startswith(begins)]
        exec(compile(block, "operators.md", "exec"), scope)
    assert scope["dag"].task_ids == ["process", "checkpoint", "validate", "savepoint", "sweep"]
    assert scope["restore"].get_task("restore").pipeline == "aircraft"
    checkpoint = scope["by_hand"].get_task("checkpoint")
    assert (checkpoint.upstream_task_ids, checkpoint.pipeline, checkpoint.root) == (
        {"process"},
        "aircraft",
        "file:///state",
    )


def test_the_reference_names_every_argument_of_a_pipeline() -> None:
    """The reference explains each argument in words; the table with the defaults stands in settings.md alone (test_settings_page.py)."""
    text = (ROOT / "docs" / "reference.md").read_text()
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    named = {name for span in re.findall(r"`([^`\n]+)`", prose) for name in re.findall(r"\w+", span)}
    assert {field.name for field in dataclasses.fields(Pipeline)} - named == set()
    assert "(settings.md#pipeline)" in text
    assert not re.search(r"^\| `(output_schema|max_parallelism|watermark_delay)`", text, re.MULTILINE)


def arguments_of(thing: Any) -> set[str]:
    return {name for name, one in inspect.signature(thing).parameters.items() if one.kind is not one.VAR_KEYWORD}


@pytest.mark.parametrize("name", [name for name in cairn_operators.__all__ if name != "retry_arguments"])
def test_the_page_of_the_operators_names_their_arguments(name: str) -> None:
    page = (ROOT / "docs" / "operators.md").read_text()
    sections = [part for part in page.split("\n## ") if f"`{name}`" in part.splitlines()[0]]
    assert len(sections) == 1, f"docs/operators.md needs one section with `{name}` in its heading"
    (section,) = sections
    tables = dict(re.findall(r"^\| argument(?: of `(\w+)`)? .*\n\|---.*\n((?:\|.*\n)+)", section, re.MULTILINE))
    rows = re.findall(r"^\| ([^|]+) \|", tables.get(name) or tables[""], re.MULTILINE)
    named = {argument for row in rows for argument in re.findall(r"`(\w+)`", row)}
    thing = getattr(cairn_operators, name)
    common = (
        arguments_of(DriverOperator.__init__)
        if isinstance(thing, type) and issubclass(thing, DriverOperator)
        else set()
    )
    expected = arguments_of(thing.__init__ if isinstance(thing, type) else thing) - {"self"}
    assert named | common == expected | common


@pytest.mark.parametrize("name", [n for n in cairn_operators.__all__ if n.endswith("Operator")])
def test_the_signatures_of_operators_and_of_the_whole_dag_agree(name: str) -> None:
    """They are explicit, because editors and type checkers need it: what several have has one type and one default."""
    dag = inspect.signature(cairn_operators.stateful_pipeline).parameters
    task: dict[str, inspect.Parameter] = {}
    for base in reversed(getattr(cairn_operators, name).__mro__):
        if base.__module__.startswith("cairn_operators") and "__init__" in vars(base):
            task |= inspect.signature(base.__init__).parameters
    for argument in {"spark_conn_id", "storage_conn_id", "spark_conf"} & {*task}:
        mine, theirs = dag[argument], task[argument]
        assert (mine.annotation, mine.default) == (theirs.annotation, theirs.default), argument
    for argument in {"code", "root", "pipeline"} & {*task}:
        assert str(task[argument].annotation).removesuffix(" | None") == "str", argument


# docs/errors.md has the errors.
@pytest.mark.parametrize("module", sorted(PUBLIC - {"cairn.errors"}))
def test_the_api_page_has_every_public_name(module: str) -> None:
    section = (ROOT / "docs" / "api.md").read_text().split(f"## `{module}`\n")[1].split("\n## ")[0]
    rows = re.findall(r"^- `(\w+)`: ", section, re.MULTILINE)
    # A module hides the function of its name: `cairn.sinks.delta.delta`.
    assert rows == re.findall(rf"^::: {re.escape(module)}\.(\w+)(?:\.\1)?$", section, re.MULTILINE)
    public = import_module(module)
    assert set(rows) == set(getattr(public, "__all__", ["pandas_with_state"]))
    # `dataclass` puts the signature in place of a missing docstring.
    said = {name: inspect.getdoc(getattr(public, name)) or f"{name}(" for name in rows}
    assert [name for name, text in said.items() if text.startswith(f"{name}(")] == []


def test_site_generator_lines_of_the_api_page_are_inside_comments() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    assert ":::" not in re.sub(r"<!-- site\n.*?-->\n", "", page, flags=re.DOTALL)


def test_the_table_of_versions_is_that_of_the_project() -> None:
    text = (ROOT / "docs" / "install.md").read_text()
    rows = dict(re.findall(r"^\| ([\w-]+) \| ([^|]+) \|", text.split("## Versions")[1], re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [Requirement(text) for extra in project["optional-dependencies"].values() for text in extra]
    ranges = {requirement.name: requirement.specifier for requirement in needed}
    named = {"apache-airflow": "Airflow", "pyspark": "PySpark"}
    for name, specifier in {**ranges, "Python": SpecifierSet(project["requires-python"])}.items():
        least = next(s.version for s in specifier if s.operator == ">=")
        below = next(s.version for s in specifier if s.operator == "<")
        row = rows[named.get(name, name)]
        listed = row.removesuffix(f" or newer, below {below}").split(", ")
        assert listed[0] == least and all(specifier.contains(version) for version in listed), row
        assert row.endswith(f"below {below}") or not specifier.contains(_next_minor(listed[-1])), row


def _next_minor(version: str) -> str:
    major, minor = version.split(".")
    return f"{major}.{int(minor) + 1}"


def test_the_versions_that_were_tested_are_those_of_the_lock() -> None:
    text = (ROOT / "docs" / "install.md").read_text()
    rows = dict(
        re.findall(
            r"^\| ([\w-]+) \| [^|]+ \| (?:[\d.]+, )*(\d+\.\d+\.\d+) \|", text.split("## Versions")[1], re.MULTILINE
        )
    )
    locks = "\n".join((ROOT / name).read_text() for name in ("tests/support/celery.lock", "requirements.lock"))
    lock = dict(re.findall(r"^([\w-]+)==([\w.]+)", locks, re.MULTILINE))
    named = {"Airflow": "apache-airflow", "PySpark": "pyspark"}
    assert len(rows) == 13
    assert {name: lock[named.get(name, name)] for name in rows} == rows


def test_the_interval_example_of_the_reference_gives_the_next_interval() -> None:
    text = (ROOT / "docs" / "reference.md").read_text()
    [block] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    scope: dict[str, object] = {}
    exec(compile(block, "reference.md", "exec"), scope)
    assert str(scope["second"]) == "[2024-01-02T00:00:00Z, 2024-01-03T00:00:00Z)"


def test_pages_stay_short() -> None:
    """Users get lost in long pages. A page about a new subject first makes another page shorter."""
    words = {page.name: len(page.read_text().split()) for page in (ROOT / "docs").glob("*.md")}
    assert {name: count for name, count in words.items() if count > 3_000} == {}
    contribute = re.findall(r'"([a-z0-9-]+\.md)"', (ROOT / "zensical.toml").read_text().partition('"Contribute"')[2])
    assert sum(count for name, count in words.items() if name not in contribute) <= 68_900
