"""What differs between versions of Airflow: the table, its page, and that one module of the program knows it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from airflow.sdk import DAG
from airflow.timetables import interval as core

from cairn_operators import airflow_versions
from cairn_operators.airflow_versions import DIFFERENCES, has, minor, say_lacks
from cairn_operators.dag_schedule import schedule_of_dag
from state_backend.values.schedule import Cron, Every, encode
from tests.support.layout import REPOSITORY

# Modules and names that not every version has, or that tell the version.
DIFFERING = {"airflow.exceptions", "airflow.stats", "airflow.version", "airflow.timetables", "packaging.version"}
NAMES = {
    "CronDataIntervalTimetable",
    "DeltaDataIntervalTimetable",
    "RetryPolicy",
    "RetryDecision",
    "__version__",
    "conf",
}


@pytest.mark.parametrize(("version", "expected"), [("3.1.8", (3, 1)), ("3.2.2rc1", (3, 2)), ("3.10.0", (3, 10))])
def test_the_minor_version(version: str, expected: tuple[int, int]) -> None:
    assert minor(version) == expected


@pytest.mark.parametrize(
    ("version", "lacks"),
    [
        ((3, 1), set(DIFFERENCES)),
        (
            (3, 2),
            {
                *[
                    "conf for runs that exist",
                    "metrics as functions",
                    "retry policy",
                    "task state store",
                    "waiting for input",
                    "retry reason",
                ]
            },
        ),
        ((3, 3), set()),
        ((3, 10), set()),
    ],
)
def test_what_a_version_lacks(version: tuple[int, int], lacks: set[str]) -> None:
    assert {name for name in DIFFERENCES if not has(name, version)} == lacks


def test_the_page_has_the_table() -> None:
    page = (REPOSITORY / "docs" / "airflow.md").read_text()
    rows = [line for line in page.partition("## Airflow 3.1 and 3.2\n")[2].splitlines() if line.startswith("| 3.")]
    assert rows == [
        f"| {one.since[0]}.{one.since[1]} | {name} | {one.instead} |"
        for name, one in DIFFERENCES.items()
        if one.instead
    ]


def test_a_task_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    log = SimpleNamespace(info=lambda text, *more: said.append(text % more))
    monkeypatch.setattr(airflow_versions, "has", lambda name: name != "task state store")
    say_lacks(log, "task state store", "waiting for input")
    assert len(said) == 1 and "has no task state store: nothing is kept between tries" in said[0]


@pytest.mark.parametrize(
    ("timetable", "expected"),
    [
        (core.CronDataIntervalTimetable("0 6 * * 1-5", timezone="Europe/Berlin"), Cron("0 6 * * 1-5", "Europe/Berlin")),
        (core.DeltaDataIntervalTimetable(timedelta(hours=5)), Every(5 * 3_600_000)),
    ],
)
def test_a_timetable_of_any_version_is_a_schedule(timetable: object, expected: Cron | Every) -> None:
    dag = DAG("d", schedule=timetable, start_date=datetime(2024, 1, 1, tzinfo=UTC))
    assert schedule_of_dag(dag) == encode(expected)


def versions_asked(text: str) -> Iterator[str]:
    """What a module imports that depends on Airflow's version, or tries to import from Airflow."""
    for node in ast.walk(ast.parse(text)):
        found = [node] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.Try) and any(
            isinstance(h.type, ast.Name) and "Import" in h.type.id for h in node.handlers
        ):
            tried = [
                n for n in ast.walk(node) if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("airflow")
            ]
            yield from (f"try: from {n.module}" for n in tried)
        for one in found:
            modules = [one.module or ""] if isinstance(one, ast.ImportFrom) else [alias.name for alias in one.names]
            names = {alias.name for alias in one.names}
            for module in modules:
                sdk = module in {"airflow.sdk", "airflow"}
                within = any(f"{module}.".startswith(f"{known}.") for known in DIFFERING)
                moved = any(
                    f"{module}.".startswith(f"{known}.") for known in DIFFERENCES if known.startswith("airflow.")
                )
                if within or moved or (sdk and names & NAMES):
                    yield f"{module}: {', '.join(sorted(names))}"


def test_one_module_knows_the_versions() -> None:
    plugins = REPOSITORY / "plugins"
    files = [path for path in plugins.rglob("*.py") if path.name != "airflow_versions.py"]
    found = {path.relative_to(plugins): list(versions_asked(path.read_text())) for path in files}
    assert {path: asked for path, asked in found.items() if asked} == {}
    assert list(versions_asked((plugins / "cairn_operators" / "airflow_versions.py").read_text()))


@pytest.mark.parametrize(
    "text",
    [
        "from airflow.sdk.exceptions import AirflowFailException",
        "def f():\n    from airflow.exceptions import AirflowException",
        "from airflow import __version__",
        "import airflow.version",
        "from airflow.sdk import DAG, RetryPolicy",
        "try:\n    from airflow.models.dag import DagModel\nexcept ImportError:\n    DagModel = None",
    ],
)
def test_a_planted_question_is_found(text: str) -> None:
    assert list(versions_asked(text))
