"""``cairn compare``, and ``cairn try`` where it runs nothing: what they say, their exit codes, and what they refuse."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from cairn.command.cli import app
from cairn.trials.promote_trial import other_than_tried
from state_backend.inspection.compare_logs import Made
from state_backend.values.records import LogicalTime
from tests.support.coordinator import coordinator_of
from tests.support.counting import DAYS, day
from tests.support.trials import SESSION, Averaging, Doubling, Narrowing, pipeline_of, run, try_days

NAME = "counting"


def called(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, list(arguments), env={"CAIRN_ROOT": "", "CAIRN_PIPELINE": NAME})
    assert done.exit_code == code, done.output
    return done.output


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Production and three trials of its last two days."""
    made = tmp_path_factory.mktemp("trials")
    for n in range(3):
        DAYS[day(n).start] = [("ann", "pear", n + 1), ("bob", "fig", 5)]
    run(pipeline_of(version="1.0"), made, range(3))
    for name, changes in (
        ("same", {}),
        ("double", {"processor": Doubling}),
        ("more", {"processor": Averaging, "version": "2.0"}),
    ):
        try_days(pipeline_of(**changes), made, [1, 2], trial=name)
    yield str(made)
    DAYS.clear()


@pytest.mark.long("half a second", runs_in="ci")
def test_compare_reports_no_difference_for_a_trial_of_the_same_code(root: str) -> None:
    said = called("compare", "same", "--root", root)
    assert said.endswith("no difference: every digest is equal\n") and "differs" not in said


def test_compare_reports_changed_output_by_column_with_an_example_row(root: str, tmp_path: Path) -> None:
    how = ["compare", "double", "--root", root, "--match", "user", "--match", "kind"]
    said = called(*how, "--folder", str(tmp_path / "rows"))
    assert "output in 2 intervals, the first from 2024-01-02T00:00:00Z: 2 changed" in said
    assert "  total: 2 changed, by 4.5 on average and 6 at most" in said
    assert '  ~ user="ann", kind="seen": total 3 -> 6' in said
    rows = [row for file in sorted((tmp_path / "rows").iterdir()) for row in pq.read_table(file).to_pylist()]
    assert [(r["change"], r["old"]["total"], r["new"]["total"]) for r in rows] == [
        ("changed", 3, 6),
        ("changed", 6, 12),
    ]
    found = json.loads(called(*how, "--json"))
    assert (found["same"], found["states"], found["trial"]["name"]) == (False, [], "double")
    # As whole rows, where nobody says what tells them apart.
    assert "2 only in production, 2 only in the trial" in called("compare", "double", "--root", root)


def test_compare_reports_differences_of_states_fields_and_timers(root: str) -> None:
    said = called("compare", "more", "--root", root)
    assert "state total at 2024-01-04T00:00:00Z: 2 changed\n  largest: 2 changed" in said
    assert "state seen_at at 2024-01-04T00:00:00Z: 2 added" in said
    assert "state $timers at 2024-01-04T00:00:00Z: 2 changed\n  at_ms: 2 changed, by 8.64e+07 on average" in said
    assert "the state differs in 2 intervals, the first from 2024-01-02T00:00:00Z" in said


def test_trials_are_listed_and_removed(root: str) -> None:
    assert "more: [2024-01-02T00:00:00Z, 2024-01-04T00:00:00Z), code 2.0" in called("trials", "--root", root)
    assert [t["name"] for t in json.loads(called("trials", "--root", root, "--json"))] == ["double", "more", "same"]
    try_days(pipeline_of(), root, [2], trial="short")
    assert called("trials", "--remove", "short", "--root", root).startswith("removed trial short: ")
    of = ["--code", "tests.support.trials:OLD", "--from", "2024-01-02", "--to", "2024-01-02", "--root", f"{root}-none"]
    assert "Or give the length of an interval" in called("try", *of, code=2)
    assert "several trials below" in called("compare", "--root", root, code=2)
    said = called("compare", "same", "2024-01-01", "--root", root, code=2)
    assert (
        "trial 'same' of 'counting' has no interval that starts at 2024-01-01T00:00:00Z\nIts intervals lie in" in said
    )


@pytest.mark.long("half a second", runs_in="ci")
def test_the_checkpoint_list_shows_code_versions_and_marks_code_changes(tmp_path: Path) -> None:
    for n in range(3):
        DAYS.setdefault(day(n).start, [("ann", "pear", n + 1)])
    run(pipeline_of(version="1.0"), tmp_path, [0])
    run(pipeline_of(processor=Averaging, version="2.0"), tmp_path, [1, 2])
    shown = json.loads(called("checkpoints", "--root", str(tmp_path), "--json"))
    assert [(row["code"], row["code_changed"]) for row in shown] == [("2.0", False), ("2.0", True), ("1.0", False)]
    text = called("checkpoints", "--root", str(tmp_path))
    assert "2.0 *" in text and text.endswith("* code differs from that of the checkpoint before\n")
    said = called("diff", "1", "2", "--root", str(tmp_path), "--fast").splitlines()[0]
    assert said == (
        "checkpoint 1 of [2024-01-01T00:00:00Z, 2024-01-02T00:00:00Z) to 2 of [2024-01-02T00:00:00Z, 2024-01-03T00:00:00Z): "
        "another state, by another code (1.0, then 2.0), from other input"
    )
    # Without a version, what git says of the file that the processor is in.
    run(pipeline_of(), tmp_path / "git", [0])
    version = coordinator_of(pipeline_of(), str(tmp_path / "git")).record("latest").content.code_version
    assert version is None or len(version) >= 7


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, None),
        ({"digest": 1}, "its state has digest 0000000000000001"),
        (
            {"digest": 1, "source_position": {"rows": "other"}},
            "The promotion has other input: rows is other instead of",
        ),
        ({"digest": 1, "code_hash": "f" * 64}, "The promotion has other code: "),
        ({"digest": 1, "input_hash": "0" * 32}, "The promotion has other settings: "),
        ({"digest": 1, "source_position": {}}, "The promotion has other input: rows is null instead of"),
        ({"outputs": ()}, "its output (0 rows) differs from the trial's"),
        ({"digest": 1}, "depend on something else, such as a clock or random numbers"),
        ({"time": LogicalTime(mode="none", processing_time_ms=0, watermark_ms=1)}, "its watermarks differ"),
    ],
)
def test_the_reason_why_a_promotion_differs_is_reported(root: str, changes: dict[str, Any], says: str | None) -> None:
    record = coordinator_of(pipeline_of(), root).record("latest")
    content = record.content
    tried = Made(id=record.id, digest=content.digest, outputs=content.outputs, content=content)
    found = other_than_tried(tried, replace(content, **changes))
    assert found is None if says is None else says in (found or "")


@pytest.mark.parametrize(("changes", "same"), [({}, True), ({"digest": 1}, False), ({"digest": None}, False)])
def test_a_promotion_by_other_shards_is_compared_by_its_rows(root: str, changes: dict[str, Any], same: bool) -> None:
    content = coordinator_of(pipeline_of(), root).record("latest").content
    tried = Made(id=1, digest=content.digest, outputs=content.outputs, content=content)
    outputs = tuple(replace(f, handle=replace(f.handle, crc32c=1), **changes) for f in content.outputs)
    found = other_than_tried(tried, replace(content, outputs=outputs, parallelism=content.parallelism + 1))
    assert (found is None) == same and (same or "its output" in (found or ""))


TYPED, CODE = "tests.unit.test_trial_commands", "tests.support.trials:OLD"
SAME = ".trials/counting/roots/same"
KEY, TIME, GROUPS = pipeline_of(key=["item"]), pipeline_of(time_mode="none"), pipeline_of(max_parallelism=32)
STATES = pipeline_of(processor=Narrowing)
OUTPUT = pipeline_of(output_schema="user string, kind string, total string, items array<string>, last array<long>")


@pytest.mark.parametrize(
    ("code", "changes", "says", "way_out"),
    [
        (f"{TYPED}:KEY", {}, "the key is", "name"),
        (f"{TYPED}:TIME", {}, "time_mode is none", "name"),
        (f"{TYPED}:GROUPS", {}, "max_parallelism is 32", "canonical"),
        (f"{TYPED}:STATES", {}, "'total'", "name"),
        (f"{TYPED}:OUTPUT", {}, "does not fit the output of", "name"),
        (CODE, {"gone": 2}, "2024-01-04T00:00:00Z)", "the source raised"),
        (CODE, {"--root": SAME}, "the root of a trial", "Use production's root: "),
        (CODE, {"--to": "2024-01-02T12:00", "--every": "12h"}, "the boundaries differ", "--every 1d"),
        (CODE, {"--from": "2024-02-01", "--to": "2024-02-02"}, "can't begin at", "The trial can begin at"),
    ],
)
def test_an_unsuitable_try_command_is_refused_before_the_first_row_with_advice(
    root: str, monkeypatch: pytest.MonkeyPatch, code: str, changes: dict[str, Any], says: str, way_out: str
) -> None:
    monkeypatch.setattr("cairn.spark.session.connect", lambda *_, **__: SESSION)
    if "gone" in changes:
        monkeypatch.delitem(DAYS, day(changes["gone"]).start)
    words = {"--code": code, "--from": "2024-01-02", "--to": "2024-01-03", "--spark": "sc://none"}
    words |= {name: value for name, value in changes.items() if name.startswith("--")}
    words["--root"] = f"{root}/{words['--root']}" if "--root" in words else root
    before = called("trials", "--root", root, "--json")
    done = CliRunner().invoke(app, ["try", "typed", *(word for pair in words.items() for word in pair)])
    assert done.exit_code in (1, 2) and says in done.output and way_out in done.output.partition(says)[2], done.output
    assert called("trials", "--root", root, "--json") == before
