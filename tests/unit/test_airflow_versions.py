"""What differs between versions of Airflow: the list and its page. That one module of the program knows it, ruff checks (TID251)."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from cairn_operators import airflow_versions
from cairn_operators.airflow_versions import DIFFERENCES, has, minor, say_lacks
from tests.support.layout import REPOSITORY


@pytest.mark.parametrize(("version", "expected"), [("3.1.8", (3, 1)), ("3.2.2rc1", (3, 2)), ("3.10.0", (3, 10))])
def test_the_minor_version_is_read_from_any_release(version: str, expected: tuple[int, int]) -> None:
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
def test_each_airflow_version_lacks_only_features_of_later_versions(version: tuple[int, int], lacks: set[str]) -> None:
    assert {name for name in DIFFERENCES if not has(name, version)} == lacks


def test_the_airflow_page_lists_the_substitute_for_each_missing_feature() -> None:
    page = (REPOSITORY / "docs" / "airflow.md").read_text()
    section = page.partition("## Airflow 3.1 and 3.2\n")[2]
    items = [" ".join(item.split()) for item in re.findall(r"^- (.*?)(?=^- |^$)", section, re.MULTILINE | re.DOTALL)]
    assert items == [
        f"**{one.since[0]}.{one.since[1]}, {name}:** {one.instead}" for name, one in DIFFERENCES.items() if one.instead
    ]


def test_a_missing_airflow_feature_is_logged_with_its_consequence(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    log = SimpleNamespace(info=lambda text, *more: said.append(text % more))
    monkeypatch.setattr(airflow_versions, "has", lambda name: name != "task state store")
    say_lacks(log, "task state store", "waiting for input")
    assert len(said) == 1 and "has no task state store: nothing is kept between tries" in said[0]
