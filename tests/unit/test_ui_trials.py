"""Trials of other code on the checkpoints' pages: a real trial beside production, without Spark, over HTTP."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from typer.testing import CliRunner

from cairn.command.cli import app as cli
from cairn_ui.pipelines_of_dags import PipelineRef
from cairn_ui.trial_summary import headline
from state_backend.adapters.local_storage import LocalStorage
from tests.support.counting import DAYS, day
from tests.support.trials import OLD, Doubling, pipeline_of, run, try_days

pytestmark = pytest.mark.filterwarnings("ignore:Using `httpx` with")
NAME = "counting"


@pytest.fixture
def shown(tmp_path: Path) -> Iterator[Any]:
    """Three days in production, the last two of them tried with a planted mistake that day 1's rows do not meet."""
    from starlette.testclient import TestClient

    from tests.support.shown_app import shown_app

    DAYS.clear()
    DAYS.update({day(n).start: [("bob", "fig", 5), ("ann", "pear", n)][: 1 + n // 2] for n in range(3)})
    run(OLD, tmp_path, range(3))
    ref = PipelineRef(
        name=NAME, root=f"file://{tmp_path}", dag_id=NAME, code="m:X", process="process", savepoint="savepoint"
    )
    refs, storages = [ref], {NAME: LocalStorage(tmp_path / NAME)}
    with shown_app(storages, refs, refused={"nils": NAME}) as app:
        client = TestClient(app, cookies={"_token": "admin"})
        client.at = f"/cairn/checkpoints/p/{quote(ref.key)}"  # type: ignore[attr-defined]
        client.root = tmp_path  # type: ignore[attr-defined]
        yield client
    DAYS.clear()


def text(answer: Any) -> str:
    assert answer.status_code == 200, answer.text
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]*>", " ", answer.text.partition("</head>")[2])))


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        ((3, 0, 0), "all results are equal"),
        ((3, 2, 0), "2 of 3 intervals differ"),
        ((3, 1, 1), "1 of 2 intervals differ; 1 can't be compared: no result in production or in the trial"),
        ((3, 0, 2), "all results are equal; 2 can't be compared: no result in production or in the trial"),
        ((3, 0, 3), "nothing to compare yet"),
    ],
)
def test_the_headline_of_a_trial_counts_results_that_differ(counts: tuple[int, int, int], says: str) -> None:
    assert headline(*counts) == says


@pytest.mark.long("half a second", runs_in="ci")
def test_a_trial_is_listed_and_shown_beside_production(shown: Any) -> None:
    from starlette.testclient import TestClient

    assert "No trial yet" in text(shown.get(f"{shown.at}/trials"))
    try_days(pipeline_of(processor=Doubling), shown.root, [1, 2], trial="twice", code="mine:TWICE")
    listed = shown.get(f"{shown.at}/trials")
    assert "twice mine:TWICE" in text(listed) and "checkpoint 1" in text(listed)
    assert f"{shown.at}/trials/twice" in listed.text
    page = text(shown.get(f"{shown.at}/trials/twice"))
    assert "1 of 2 intervals differ" in page and f"cairn compare twice --root file://{shown.root}" in page
    same, other = (page.partition("New bytes of the trial")[2]).split("→")[1:3]
    assert same.count("the same") == 3 and "differs" not in same
    assert other.count("differs") == 1 and other.count("the same") == 2, "the mistake is in the output only"

    nils = TestClient(shown.app, cookies={"_token": "nils"})
    assert nils.get(f"{shown.at}/trials").status_code == nils.get(f"{shown.at}/trials/twice").status_code == 404
    # Its commands, as they stand there; the deployment needs Spark, and docs/trying.md runs it.
    root = f"--root file://{shown.root}"
    for command in (
        f"cairn compare twice {root} --pipeline {NAME}",
        f"cairn compare twice 2024-01-03T00:00:00Z {root} --pipeline {NAME}",
        f"cairn trials {root} --pipeline {NAME} --remove twice",
    ):
        assert command in page
        done = CliRunner().invoke(cli, command.split()[1:])
        assert done.exit_code == 0, done.output
    assert f"cairn promote twice --code mine:TWICE --past {root}" in page
    gone = shown.get(f"{shown.at}/trials/twice")
    assert gone.status_code == 404 and "This trial does not exist" in gone.text
