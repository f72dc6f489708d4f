"""Python in README and docs is what there is. Their commands: test_printed_commands.py; their blocks: tests/integration/test_docs.py."""

from __future__ import annotations

import ast
import dataclasses
import re
import sqlite3
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd

from cairn.pipeline import Interval, Pipeline

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "dags").glob("*.py"))]


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


def test_the_dags_that_the_docs_show_are_dags() -> None:
    text = (ROOT / "docs" / "airflow.md").read_text()
    start = datetime(2013, 1, 1, tzinfo=UTC)
    scope: dict[str, Any] = {
        "root": "file:///state",
        "start": start,
        "datetime": datetime,
        "timedelta": timedelta,
        "UTC": UTC,
    }
    for begins in ("# An Airflow DAG:", "from airflow.sdk import DAG"):
        [block] = [b for b in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if b.startswith(begins)]
        exec(compile(block, "airflow.md", "exec"), scope)
    assert scope["dag"].task_ids == ["process", "checkpoint", "validate", "savepoint", "sweep"]
    assert scope["restore"].get_task("restore").pipeline_name == "aircraft"
    checkpoint = scope["by_hand"].get_task("checkpoint")
    assert (checkpoint.upstream_task_ids, checkpoint.pipeline_name, checkpoint.root) == (
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


def test_the_interval_of_the_reference_is_one() -> None:
    scope = run_block_of_the_reference("first = Interval(")
    assert str(scope["second"]) == "[2024-01-02T00:00:00Z, 2024-01-03T00:00:00Z)"


def test_the_sink_of_the_reference_stores_each_commit_once(tmp_path: Path) -> None:
    """Also if it is called twice, late, or for an interval that has no output any more."""
    load: Any = run_block_of_the_reference("def load(spark", at=str(tmp_path))["load"]
    hours = [Interval(datetime(2024, 1, 1, n, tzinfo=UTC), datetime(2024, 1, 1, n + 1, tzinfo=UTC)) for n in (0, 1)]
    for n in (1, 2, 3):
        pd.DataFrame({"user": ["ann"] * n, "n": [n] * n}).to_parquet(tmp_path / f"{n}.parquet")

    def stored() -> list[int]:
        with closing(sqlite3.connect(tmp_path / "warehouse.db")) as db:
            return [n for (n,) in db.execute("SELECT n FROM clicks ORDER BY n")]

    load(None, [f"file://{tmp_path}/1.parquet"], hours[0], 1)
    load(None, [f"file://{tmp_path}/2.parquet"], hours[1], 2)
    load(None, [f"file://{tmp_path}/1.parquet"], hours[0], 1)
    assert stored() == [1, 2, 2]
    load(None, [f"file://{tmp_path}/3.parquet"], hours[0], 3)
    load(None, [f"file://{tmp_path}/1.parquet"], hours[0], 1)
    assert stored() == [2, 2, 3, 3, 3]
    load(None, [], hours[1], 4)
    assert stored() == [3, 3, 3]


def run_block_of_the_reference(line: str, at: str = "") -> dict[str, object]:
    text = (ROOT / "docs" / "reference.md").read_text()
    [block] = [b for b in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if line in b]
    scope: dict[str, object] = {}
    exec(compile(block.replace("/data", at or "/data"), "reference.md", "exec"), scope)
    return scope
