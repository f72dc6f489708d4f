"""`cairn status`, and the names that messages suggest."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cairn.command.cli import app
from state_backend.adapters.open_storage import folders_in
from state_backend.formats import paths
from state_backend.inspection.find_pipelines import pipelines_below
from state_backend.values.similar_names import did_you_mean
from tests.support.checkpoints import PIPELINE
from tests.support.real_shards import RealPipeline


def cairn(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three pipelines: a healthy one, one with a quarantined checkpoint, one whose log can't be read; and other folders."""
    for name in ("fine", "refused", "damaged"):
        pipeline = RealPipeline(tmp_path / "work")
        for day in (1, 2):
            pipeline.run(day, f"a{day}", {"a": day})
        if name == "refused":
            pipeline.coordinator.quarantine(2, "a test says so", ("total < 0",))
        (tmp_path / "work" / PIPELINE).rename(tmp_path / name)
    (tmp_path / "damaged" / paths.record(2)).write_bytes(b"garbage")
    shutil.copytree(tmp_path / "fine" / "checkpoints", tmp_path / "savepoints" / "sp")
    (tmp_path / "a file").write_bytes(b"")
    return tmp_path


def test_pipelines_with_problems_come_first_and_the_printed_command_works(root: Path) -> None:
    said = cairn("status", "--root", str(root))
    assert said.exit_code == 0, said.output
    _, *rows, _, command = said.stdout.splitlines()
    assert [row.split()[0] for row in rows] == ["damaged", "refused", "fine"]
    assert paths.record(2) in rows[0] and "unreadable" in rows[0]
    assert "2024-01-01 to 2024-01-02" in rows[1] and "blocked" in rows[1] and "1 quarantined" in rows[1]
    assert "2024-01-02 to 2024-01-03" in rows[2] and " ok " in rows[2]
    assert cairn(*shlex.split(command)[1:]).exit_code == 1

    answer = json.loads(cairn("status", "--root", str(root), "--json").stdout)
    assert answer[2] == {
        "name": "fine",
        "last": ["2024-01-02T00:00:00Z", "2024-01-03T00:00:00Z"],
        "state": "ok",
        "problems": [],
        "not_tracked": [],
    }
    assert "no pipeline in" in cairn("status", "--root", str(root / "savepoints")).stdout


@pytest.mark.parametrize("lost", [["checkpoints"], ["checkpoints", "HEAD.json"]])
def test_a_pipeline_that_lost_its_records_is_unreadable(tmp_path: Path, lost: list[str]) -> None:
    pipeline = RealPipeline(tmp_path)
    for day in (1, 2):
        pipeline.run(day, f"a{day}", {"a": day})
    for name in lost:
        path = tmp_path / PIPELINE / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    said = cairn("status", "--root", str(tmp_path))
    row, *_ = [line for line in said.stdout.splitlines() if line.startswith(PIPELINE)]
    assert " unreadable " in row and said.exit_code == 0
    *_, command = said.stdout.splitlines()
    assert cairn(*shlex.split(command)[1:]).exit_code == 1


def test_a_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = cairn("status", "--root", str(tmp_path / "file"))
    assert said.exit_code == 2 and "is a file" in said.stderr


@pytest.mark.long("half a second", runs_in="ci")
def test_only_folders_with_a_log_are_pipelines(root: Path) -> None:
    assert {"savepoints", "work"} < set(folders_in(str(root), ""))
    assert pipelines_below(str(root)) == ["damaged", "fine", "refused"]


@pytest.mark.long("half a second", runs_in="ci")
def test_a_wrong_pipeline_name_gets_a_suggestion_of_a_similar_name(root: Path) -> None:
    key = ['{"key": "a"}', "--dry-run"]
    for command in (
        ["checkpoints"], ["status"], ["check"], ["key", "a"], ["diff", "1", "2"], ["export", "--folder", f"{root}/x"],
        ["quarantine", "1"], ["restore", "1"], ["fork", "--as", "x"], ["erase", *key],
        ["trials"],
    ):  # fmt: skip
        refused = cairn(*command, "--root", str(root), "--pipeline", "refusd")
        assert (refused.exit_code, refused.stderr.splitlines()[-1]) == (2, "Did you mean 'refused'?")
    assert cairn("trials", "--root", str(root), "--pipeline", "fine").stdout == "pipeline 'fine' has no trial\n"
    refused = cairn("checkpoints", "--root", str(root), "--pipeline", "zzz")
    assert refused.stderr.splitlines()[-1] == "These exist: damaged, fine, refused"


@pytest.mark.long("half a second", runs_in="ci")
def test_a_wrong_state_name_gets_a_suggestion_of_a_similar_name(root: Path, tmp_path: Path) -> None:
    where = ["--root", str(root), "--pipeline", "fine", "--state", "valu"]
    for command in (["diff", "1", "2"], ["export", "--folder", str(tmp_path / "to")]):
        refused = cairn(*command, *where)
        assert refused.exit_code == 2 and "Did you mean 'value'" in refused.stderr


@pytest.mark.parametrize("typed", ["chek", "checkpoint", "exprt"])
def test_a_wrong_command_gets_a_suggestion(typed: str) -> None:
    assert "Did you mean" in cairn(typed).stderr


@pytest.mark.parametrize(
    ("known", "line"),
    [
        (["aircraft", "clicks"], "\nDid you mean 'aircraft'?"),
        (["clicks"], "\nThese exist: clicks"),
        ([f"p{n}" for n in range(12)], "\nThese exist: p0, p1, p10, p11, p2, p3, p4, p5, p6, p7 and 2 more"),
        ([], ""),
    ],
)
def test_a_mistyped_name_gets_the_nearest_known_ones(known: list[str], line: str) -> None:
    assert did_you_mean("aircarft", known) == line


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_both_options_print_the_help(option: str) -> None:
    assert "Look" in cairn(option).stdout and "--limit" in cairn("checkpoints", option).stdout


def test_the_version_is_printed() -> None:
    from state_backend.values.release import RELEASE

    assert cairn("--version").stdout == f"cairn {RELEASE}\n"
