"""Trials of other code on the checkpoints' pages: a real trial beside production, without Spark, over HTTP."""

from __future__ import annotations

import html
import re
import shlex
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from typer.testing import CliRunner

from cairn.command.cli import app as cli
from cairn.operations.coordinator_of import coordinator_of
from cairn_ui import trial_rows
from cairn_ui.find_pipelines import PipelineRef
from cairn_ui.limited_process import Ended
from cairn_ui.trial_rows import Busy, Compared, Comparisons, Limits, answer_of, run_limited, too_much
from cairn_ui.trials import headline, interval_row, notes_of, parts_of
from state_backend.adapters.local_storage import LocalStorage
from state_backend.checkpoint.trials import intervals_of_trial
from state_backend.inspection.compare_logs import IntervalDifference, compare_intervals
from tests.support.counting import DAYS, day
from tests.support.trials import OLD, Averaging, Doubling, pipeline_of, run, try_days

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
def test_a_headline(counts: tuple[int, int, int], says: str) -> None:
    assert headline(*counts) == says


@pytest.mark.long("half a second", runs_in="ci")
def test_a_trial_is_listed_and_shown_beside_production(shown: Any) -> None:
    from starlette.testclient import TestClient

    assert "No trial yet" in text(shown.get(f"{shown.at}/trials"))
    try_days(pipeline_of(processor=Doubling), shown.root, [1, 2], name="twice", code="mine:TWICE")
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
        f"cairn trials remove twice {root} --pipeline {NAME}",
    ):
        assert command in page
        done = CliRunner().invoke(cli, command.split()[1:])
        assert done.exit_code == 0, done.output
    assert f"cairn deploy twice --code mine:TWICE --past {root}" in page
    gone = shown.get(f"{shown.at}/trials/twice")
    assert gone.status_code == 404 and "This trial does not exist" in gone.text


# --- rows and entries of one interval ---------------------------------------------------------------------------------------------


def once_read(client: Any, path: str) -> str:
    """The page when it no longer says that it is being read."""
    until_s = time.monotonic() + 60
    while (page := text(client.get(path))) and "This page refreshes by itself" in page:
        assert time.monotonic() < until_s, page
        time.sleep(0.2)
    return page


@pytest.mark.long("seconds", runs_in="ci")
def test_rows_and_entries_of_an_interval_are_read_on_demand_and_once(
    shown: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the real command in a process of its own."""
    ran: list[Sequence[str]] = []

    def run_counted(words: Sequence[str], environment: Mapping[str, str], limits: Limits) -> Compared:
        ran.append(words)
        return run_limited(words, environment, limits)

    monkeypatch.setattr("cairn_ui.routes.comparisons", Comparisons(run=run_counted))
    try_days(pipeline_of(processor=Averaging), shown.root, [1, 2], name="more")
    start = "2024-01-03T00:00:00Z"
    link = f"{shown.at}/trials/more/rows?start={quote(start, safe='')}"
    assert link in html.unescape(shown.get(f"{shown.at}/trials/more").text)
    page = once_read(shown, f"{link}&by=user,%20kind")
    for words in (
        "State total: 2 changed",
        "largest 2 – – Example",
        "State seen_at: 2 added",
        "Timers: 2 changed",
        "at_ms 2 8.64e+07 8.64e+07",
    ):
        assert words in page, page
    assert text(shown.get(f"{link}&by=user,kind")).count("State total: 2 changed") == 1 and len(ran) == 1
    command = (
        f"cairn compare more --root file://{shown.root} --pipeline {NAME} --interval {start} --key user --key kind"
    )
    assert command in page
    done = CliRunner().invoke(cli, shlex.split(command)[1:])
    assert done.exit_code == 0 and "1 intervals, " in done.output and "state total at 2024-01-04" in done.output
    wrong = CliRunner().invoke(cli, [*shlex.split(command)[1:7], "--interval", "2024-01-01"])
    assert wrong.exit_code == 2 and "has no interval that starts at 2024-01-01T00:00:00Z" in wrong.output

    for path in ("more/rows?start=2024-01-09T00:00:00Z", f"gone/rows?start={start}"):
        assert shown.get(f"{shown.at}/trials/{path}").status_code == 404
    from starlette.testclient import TestClient

    nils = TestClient(shown.app, cookies={"_token": "nils"})
    assert nils.get(link).status_code == 404


def differing(root: Path, name: str) -> IntervalDifference:
    trial = try_days(pipeline_of(processor=Doubling), root, [1, 2], name=name)
    old, new = (coordinator_of(OLD, above).log() for above in (str(root), trial.root))
    return compare_intervals(old, new, intervals_of_trial(trial.trial))[1]


@pytest.mark.long("seconds", runs_in="ci")
def test_what_is_too_much_is_said_with_the_command(shown: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the records nothing is begun; what turns out to be too much is ended, and not begun again by the next page."""
    found = differing(shown.root, "twice")
    for limits, says in (
        (Limits(), None),
        (Limits(rows=1), "have 4 rows; a page compares at most 1"),
        (Limits(output_bytes=10), "a page compares at most 10 B"),
        (Limits(entries=0), None),  # its state is the same
    ):
        why = too_much(found, limits)
        assert why is None if says is None else says in (why or ""), why
    assert "entries; a page compares at most 3" in (too_much(replace(found, state="other"), Limits(entries=3)) or "")

    link = f"{shown.at}/trials/twice/rows?start=2024-01-03T00:00:00Z"
    # What is typed is one argument, and no option; what the command refuses is shown.
    refused = once_read(shown, f"{link}&by=--to")
    assert "The comparison failed" in refused and "the key column '--to' is not in the output of both sides" in refused
    for limits, says in (
        (Limits(rows=1), "have 4 rows"),
        (Limits(seconds=0.01), "the comparison took longer than 10 ms"),
        (Limits(memory_bytes=30 << 20), "the comparison needed more than 30 MiB of memory"),
    ):
        ran: list[int] = []
        monkeypatch.setattr(
            "cairn_ui.routes.comparisons",
            Comparisons(limits, lambda *given, ran=ran: ran.append(1) or run_limited(*given)),
        )
        for _ in range(2):
            page = once_read(shown, link)
            assert "Too large for a page" in page and says in page and "cairn compare twice" in page, page
        assert len(ran) == (0 if "rows" in says else 1)


@pytest.mark.parametrize(
    ("code", "said", "errors", "problem", "too_much"),
    [
        (0, b'{"same": true}', "", None, False),
        (0, b" " * (1 << 20) + b"{}", "", "the examples take more than 1.0 MiB", True),
        (2, b"", "UsageError: no such column", "UsageError: no such column", False),
        (3, b"", "", "the comparison ended with exit code 3", False),
        (1, b"", "MemoryError", "the comparison needed more than 2.0 GiB of memory", True),
        (-6, b"", "std::bad_alloc", "the comparison needed more than 2.0 GiB of memory", True),
    ],
)
def test_how_a_comparison_ends(code: int, said: bytes, errors: str, problem: str | None, too_much: bool) -> None:
    found = answer_of(Ended(code=code, said=said, errors=errors, seconds=1.0), Limits())
    assert (found.problem, found.too_much, found.found is None) == (problem, too_much, problem is not None)


@pytest.mark.long("half a second", runs_in="ci")
def test_one_comparison_at_a_time_and_a_failure_is_tried_again_later(shown: Any) -> None:
    found, now_s = differing(shown.root, "twice"), [0.0]
    begun, go_on = threading.Event(), threading.Event()

    def run_slowly(*_: Any) -> Compared:
        begun.set()
        assert go_on.wait(30)
        return Compared(found=None, problem="no answer")

    ours = Comparisons(run=run_slowly, clock=lambda: now_s[0])
    ref = PipelineRef(name=NAME, root="file:///r")
    asked, nothing = ours.known(ref, "twice", found, ["user"])
    assert nothing is None
    thread = threading.Thread(target=ours.compare, args=(asked, [], {}))
    thread.start()
    assert begun.wait(30)
    with pytest.raises(Busy):
        ours.compare(asked, [], {})
    go_on.set()
    thread.join()
    assert (ours.known(ref, "twice", found, ["user"])[1] or Compared(found={})).problem == "no answer"
    assert ours.known(ref, "twice", found, ["kind"])[1] is None, "another question"
    assert found.new is not None
    other = replace(found, new=replace(found.new, digest=1))
    assert ours.known(ref, "twice", other, ["user"])[1] is None, "another result"
    now_s[0] = 61.0
    assert ours.known(ref, "twice", found, ["user"])[1] is None
    for n in range(trial_rows._KEPT):
        ours.compare((n,), [], {})
    assert len(ours._kept) == trial_rows._KEPT


def test_what_a_page_says_of_rows() -> None:
    column = {"name": "total", "changed": 2, "mean": 1.5, "largest": 2.0}
    rows = {
        **{"changed": 2, "only_old": 1, "only_new": 0, "repeated_keys": 3, "columns": [column]},
        **{"columns_added": ["new"], "columns_removed": [], "columns_retyped": []},
        "examples": [
            {"change": "changed", "key": {"user": "<b>"}, "columns": {"total": [3, None]}},
            {"change": "only_old", "row": {"user": "x" * 1000}},
        ],
    }
    (part,) = parts_of({"outputs": [rows], "late": [], "states": []})
    assert part.counts == "2 changed, 1 only in production"
    assert part.notes == (
        "columns only in the trial: new",
        "3 keys occur in several rows, so those rows are compared as whole rows",
    )
    assert part.examples[0].values == (("total", "3", "null"),) and len(part.examples[1].what) == 401
    expiring = {"change": "changed", "key": {"user": "u"}, "before": {"n": 1}, "after": {"n": 1}}
    expiring |= {"before_expires_at": "a", "after_expires_at": "b", "pos": 2}
    state = {"state": "s", "added": 0, "removed": 0, "changed": 1, "fields": [], "examples": [expiring]}
    (part,) = parts_of({"outputs": [], "late": [], "states": [state]})
    assert part.examples[0].what == '{"user": "u"} 2' and part.examples[0].values == (("expires at", '"a"', '"b"'),)
    dropped = interval_row(
        IntervalDifference(
            interval=day(1), old=None, new=None, state="other", output="other", late="same", position="same"
        )
    )
    notes = notes_of(dropped, {"states_at": None, "outputs": [], "late": []})
    assert len(notes) == 2 and "retention has dropped one of them" in notes[0] and "in different files" in notes[1]
