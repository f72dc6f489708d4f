"""``cairn``: what it prints and answers over a small real pipeline, and what it finds when each kind of file is damaged."""

from __future__ import annotations

import importlib
import json
import random
import shlex
import shutil
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cairn.command.cli import COMMANDS, app
from state_backend.adapters.local_storage import LocalStorage
from state_backend.checkpoint.sweep_files import sweep
from state_backend.formats import paths
from state_backend.values import errors
from state_backend.values.day_or_instant import format_duration, parse_duration
from state_backend.values.errors import SinkFailed, UsageError
from state_backend.values.retention import KeepLast
from tests.support.checkpoints import PIPELINE, Folder, day
from tests.support.layout import empty, flip, remove, truncate
from tests.support.real_shards import RealPipeline
from tests.support.tiers import at_tier

FAR_MS = 4_102_444_800_000  # the year 2100: everything is old


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Days 1 to 5, of which 1 and 2 are dropped, with output that stays; a sweep is in the log; 3 was run again, so that 4 and 5
    are stale; 5 is quarantined; an attempt is prepared."""
    root = tmp_path_factory.mktemp("root")
    pipeline = RealPipeline(root, policy=KeepLast(4))
    for n in (1, 2, 3, 4, 5):
        pipeline.run(n, f"a{n}", {key: n for key in "abcdefgh"})
    pipeline.storage.create(paths.shared("crashed", 0, 0, 0, "sst"), b"x")
    sweep(pipeline.storage, PIPELINE, now_ms=FAR_MS)
    pipeline.run(3, "again", {key: 7 for key in "abcd"})
    pipeline.coordinator.quarantine(5, "a test says so", ("total < 0",))
    pipeline.prepare(4, "waiting", {"a": 1})
    return root


@pytest.fixture
def root(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "root"))


def cairn(root: Path, *arguments: str) -> Result:
    command, *rest = arguments
    return CliRunner().invoke(app, [command, "--root", str(root), "--pipeline", PIPELINE, *rest])


def answer(root: Path, *arguments: str) -> Any:
    result = cairn(root, *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.long("half a second", runs_in="ci")
def test_a_savepoint_of_code_with_another_pipeline_name_is_refused(root: Path) -> None:
    """It is the code's own name; another one is refused before anything is read."""
    code = ["--code", "pipelines.aircraft:AIRCRAFT", "--folder", str(root / "sp"), "--dry-run"]
    wrong = cairn(root, "savepoint", *code)
    assert wrong.exit_code == 2
    assert (
        f"AIRCRAFT is named 'aircraft', but '{PIPELINE}' is expected" in wrong.stderr
        and "CAIRN_PIPELINE; make" in wrong.stderr
    )
    right = CliRunner().invoke(app, ["savepoint", "--root", str(root), "--pipeline", "aircraft", *code])
    assert right.exit_code == 2 and "pipeline 'aircraft' has no usable checkpoint" in right.stderr


def test_a_stale_checkpoint_is_repaired_by_a_re_run_with_the_same_state(tmp_path: Path) -> None:
    pipeline = RealPipeline(tmp_path, policy=KeepLast(10))
    for n, value in ((1, 1), (2, 2), (3, 3), (1, 7)):
        pipeline.run(n, f"{n} {value}", {"a": value})
    assert cairn(tmp_path, "status").stdout.count("checkpoint 4 recomputed [2024-01-01T00:00:00Z") == 3
    for n in (2, 3):
        assert pipeline.run(n, f"again {n}", {"a": n}).record.reproduces == n
    said = cairn(tmp_path, "status")
    assert (said.exit_code, len(said.stdout.splitlines())) == (0, 1), said.stdout
    of_state = {row["id"]: row["state"] for row in answer(tmp_path, "checkpoints")}
    assert of_state == {
        6: "completed", 5: "completed", 4: "completed", 3: "replaced by 6", 2: "replaced by 5", 1: "replaced by 4"
    }  # fmt: skip
    said = CliRunner().invoke(app, ["status", "--root", str(tmp_path)])
    assert " ok " in said.stdout and "stale" not in said.stdout


def test_status_after_a_restore_goes_on_from_the_restored_state(tmp_path: Path) -> None:
    """Day 4 runs twice before the restore: its first checkpoint is replaced, not stale."""
    pipeline = RealPipeline(tmp_path, policy=KeepLast(10))
    for n, attempt in ((1, "a1"), (2, "a2"), (3, "a3"), (4, "a4"), (4, "same")):
        pipeline.run(n, attempt, {"a": n})
    again = cairn(tmp_path, "restore", "2", "--yes").stdout.splitlines()[-1]
    heal = f"cairn heal --root {tmp_path} --pipeline counting --to 2024-01-0{{}}T00:00:00Z --dag counting"
    assert again == heal.format(4)
    said = cairn(tmp_path, "status")
    restored = "checkpoint 6 later restored the state at 2024-01-03T00:00:00Z"
    assert (said.exit_code, said.stdout.splitlines()) == (1, [
        "next: [2024-01-03T00:00:00Z, 2024-01-04T00:00:00Z), from checkpoint 6",
        "stale:",
        f"  checkpoint 3: {restored}",
        f"  checkpoint 5: {restored}",
        "to run again what the restore discarded, run:",
        again,
    ])  # fmt: skip
    pipeline.run(3, "b3", {"a": 3})
    assert cairn(tmp_path, "status").stdout.startswith(
        "next: [2024-01-04T00:00:00Z, 2024-01-05T00:00:00Z), from checkpoint 7"
    )
    # An older interval is corrected: days 2 and 3 are stale by that, and day 4 is still what the restore discarded.
    pipeline.run(1, "b1", {"a": 7})
    said = cairn(tmp_path, "status")
    assert said.stdout.startswith("next: [2024-01-04T00:00:00Z, 2024-01-05T00:00:00Z), which can't start")
    assert said.stdout.splitlines()[-1] == heal.format(3)
    for n in (2, 3, 4):
        pipeline.run(n, f"c{n}", {"a": n})
    assert cairn(tmp_path, "status").exit_code == 0


def test_status_reports_stale_quarantined_and_unpublished_intervals_with_a_repair_command(root: Path) -> None:
    """Day 5 is quarantined and was made from day 4, which is stale: both are run again, not day 5 alone."""
    said = cairn(root, "status")
    assert said.exit_code == 1, said.stdout
    lines = said.stdout.splitlines()
    assert lines[0] == "next: [2024-01-06T00:00:00Z, 2024-01-07T00:00:00Z), which can't start"
    changed = "checkpoint 7 recomputed [2024-01-03T00:00:00Z, 2024-01-04T00:00:00Z) with another result"
    assert {f"  checkpoint 4: {changed}", "  checkpoint 5: a test says so"} <= set(lines)
    assert lines[-1] == f"cairn heal --root {root} --pipeline counting --to 2024-01-05T00:00:00Z --dag counting"
    pipeline = RealPipeline(root)
    for n in (4, 5):
        pipeline.run(n, f"again {n}", {"a": n})
    well = cairn(root, "status")
    assert (well.exit_code, well.stdout.splitlines()[0]) == (
        0, "next: [2024-01-06T00:00:00Z, 2024-01-07T00:00:00Z), from checkpoint 9"
    )  # fmt: skip
    # Days 4 and 5 were run again: nothing is to be done about their checkpoints 4 and 5.
    assert "stale" not in well.stdout and "quarantined" not in well.stdout
    states = {row["id"]: row["state"] for row in answer(root, "checkpoints")}
    assert states[5] == "replaced by 9, quarantined"

    (root / PIPELINE / paths.published(day(5), 9)).unlink()  # a sink that raised leaves no mark
    unpublished = cairn(root, "status", "--json")
    found = json.loads(unpublished.stdout)
    assert (unpublished.exit_code, found["command"], found["base"]) == (1, None, 9)
    assert [row["id"] for row in found["unpublished"]] == [9]
    retry, skip = cairn(root, "status").stdout.splitlines()[-2:]
    assert retry.startswith("cairn publish 2024-01-05T00:00:00Z --root ") and retry.endswith(" --code module:NAME")
    assert CliRunner().invoke(app, shlex.split(skip)[1:]).stdout == f"skipped:\n  {day(5)} (checkpoint 9)\n"
    assert cairn(root, "status").exit_code == 0


@pytest.mark.long("half a second", runs_in="ci")
def test_a_checkpoint_can_be_quarantined_released_and_quarantined_again(root: Path) -> None:
    """A person quarantines a checkpoint, releases it, and does both again. `check` finds no fault with the mark of a released one."""
    would = cairn(root, "quarantine", "7", "--dry-run")
    assert (would.exit_code, would.stdout.partition(" of ")[0]) == (0, "would quarantine checkpoint 7")
    assert answer(root, "checkpoints", "7")["state"] == "completed"
    for n in (1, 2):
        done = cairn(root, "quarantine", "7", "--reason", f"reason {n}")
        assert done.exit_code == 0 and "(checkpoint 7)" in done.stdout
        assert done.stdout.splitlines()[-1].endswith(" --to 2024-01-03T00:00:00Z --dag counting")
        shown = answer(root, "checkpoints", "7")
        assert (shown["state"], shown["reason"]) == ("quarantined", f"reason {n}")
        assert "would release checkpoint 7" in cairn(root, "quarantine", "7", "--release", "--dry-run").stdout
        released = cairn(root, "quarantine", "7", "--release")
        said = "checkpoint 7 of [2024-01-03T00:00:00Z, 2024-01-04T00:00:00Z) is released: completed\n"
        assert (released.exit_code, released.stdout) == (0, said)
        verified = cairn(root, "check", "--fast")
        assert verified.exit_code == 0, verified.stdout
    rows = answer(root, "checkpoints", "--all")
    assert [(r["id"], r["state"]) for r in rows if r["kind"] == "release"] == [(n, "of checkpoint 7") for n in (9, 8)]
    assert cairn(root, "quarantine", "7").exit_code == 0
    dropped = cairn(root, "quarantine", "7", "--drop")
    assert (dropped.exit_code, RealPipeline(root).coordinator.log().quarantined[7].dropped) == (0, True), dropped.output
    assert cairn(root, "quarantine", "7", "--release").exit_code == 0
    again = cairn(root, "quarantine", "7", "--release")
    assert again.exit_code == 2 and "checkpoint 7 of pipeline 'counting' is not quarantined" in again.stderr
    assert cairn(root, "quarantine", "99").exit_code == 2
    both = cairn(root, "quarantine", "7", "--release", "--drop")
    assert both.exit_code == 2 and "--release and --drop contradict each other; give one of them" in both.stderr


@pytest.mark.long("half a second", runs_in="ci")
def test_a_checkpoint_that_later_ones_were_computed_without_is_not_released(root: Path) -> None:
    """Day 4 starts from checkpoint 3 again while 7 is quarantined. A release would leave its result on replaced state, unnoticed."""
    assert cairn(root, "quarantine", "7").exit_code == 0
    pipeline = RealPipeline(root)
    done = pipeline.run(4, "without 7", {"a": 1})
    assert done.record is not None and done.record.content.base_id == 3
    for more in ((), ("--dry-run",)):
        refused = cairn(root, "quarantine", "7", "--release", *more)
        assert refused.exit_code == 2 and f"checkpoint {done.id} was computed without it" in refused.stderr
    assert 7 in pipeline.coordinator.log().quarantined


def test_the_checkpoints_command_lists_the_state_of_every_checkpoint(root: Path) -> None:
    rows = json.loads(cairn(root, "checkpoints", "--json").stdout)
    assert [(r["id"], r["base"], r["state"], r["keys"]) for r in rows] == [
        (7, 2, "completed", 8), (5, 4, "quarantined", 8), (4, 3, "stale by 7", 8), (3, 2, "replaced by 7", 8)
    ]  # fmt: skip
    assert (rows[0]["start"], rows[0]["end"]) == ("2024-01-03T00:00:00Z", "2024-01-04T00:00:00Z")
    assert all(r["bytes"] > 1000 and r["files"] == 6 + 2 * (r["id"] - 3) for r in rows[1:][::-1])
    assert all(0 <= r["age_s"] < 3600 for r in rows)
    rest = [r for r in answer(root, "checkpoints", "--all") if r["id"] not in (3, 4, 5, 7)]
    assert [(r["id"], r["kind"], r["state"], r["bytes"]) for r in rest] == [
        (6, "sweep", "abandons 1", None), (2, "interval", "dropped", None), (1, "interval", "dropped", None)
    ]  # fmt: skip
    lines = cairn(root, "checkpoints").stdout.splitlines()
    # Columns that say the same of each checkpoint are left out.
    assert lines[0].split() == ["id", "interval", "base", "state", "keys", "bytes", "files", "age"]
    assert lines[1].split()[:7] == ["7", "2024-01-03", "to", "2024-01-04", "2", "completed", "8"]
    assert max(map(len, lines[:5])) <= 80
    assert "kind" in cairn(root, "checkpoints", "--all").stdout.splitlines()[0]
    assert lines[5] == "not listed: 3 dropped checkpoints and sweeps; --all lists them"


def test_a_descendant_of_a_quarantined_checkpoint_is_listed_as_such(root: Path) -> None:
    RealPipeline(root).coordinator.quarantine(3, "wrong")
    assert {r["id"]: r["state"] for r in answer(root, "checkpoints")} == {
        7: "completed", 5: "quarantined", 4: "descends from quarantined 3", 3: "replaced by 7, quarantined"
    }  # fmt: skip


@pytest.mark.parametrize(("which", "expected"), [("latest", 7), ("4", 4), ("2024-01-04T00:00:00+00:00", 7)])
def test_show_finds_a_checkpoint_by_id_or_end(root: Path, which: str, expected: int) -> None:
    assert answer(root, "checkpoints", which)["id"] == expected


def test_show_lists_every_file_of_the_state(root: Path) -> None:
    shown = answer(root, "checkpoints", "4")
    assert (shown["state"], shown["attempt"], shown["totals"]["entries"]) == ("stale by 7", "a4", 8)
    assert [s["key_groups"] for s in shown["shards"]] == [[0, 7], [8, 15]]
    files = {f["path"] for s in shown["shards"] for f in s["files"]}
    assert {paths.shared("a4", n, 0, 0, "manifest") for n in (0, 1)} <= files
    assert {paths.shared(f"a{n}", shard, shard, 0, "sst") for n in (1, 2, 3, 4) for shard in (0, 1)} <= files
    assert len(files) == 10
    assert [o["late"] for o in shown["outputs"]] == [False, True]
    refused = answer(root, "checkpoints", "5")
    assert (refused["reason"], refused["findings"]) == ("a test says so", ["total < 0"])


def test_diff_counts_what_is_shared_and_which_key_groups_changed(root: Path) -> None:
    found = answer(root, "diff", "3", "4")
    assert (found["same_state"], found["same_code"]) == (False, True)
    assert found["files"]["shared"]["files"] == 6
    assert (found["files"]["only_first"]["files"], found["files"]["only_second"]["files"]) == (0, 2)
    assert found["totals"]["keys"] == [8, 8]
    assert found["states"] == {"added": [], "removed": [], "changed": []}
    assert found["key_groups"]
    assert all(g["first"] == g["second"] for g in found["key_groups"])  # other values, as many of them
    same = answer(root, "diff", "4", "4")
    assert (same["same_state"], same["key_groups"]) == (True, [])
    assert "key groups that differ" in cairn(root, "diff", "3", "4").stdout


@pytest.mark.long("half a second", runs_in="ci")
def test_a_sweep_says_what_it_did_and_a_dry_run_does_nothing(root: Path) -> None:
    before = {p for p in root.rglob("*") if p.is_file()}
    planned = answer(root, "sweep", "--min-age", "0s", "--dry-run")
    assert (planned["abandoned"], planned["record"], planned["deleted_files"]) == (["waiting"], None, 0)
    assert {p for p in root.rglob("*") if p.is_file()} == before
    assert cairn(root, "sweep", "--dry-run").stdout.startswith("would delete 0 files")  # three days are not over
    done = answer(root, "sweep", "--min-age", "0s")
    assert (done["record"], done["deleted_files"]) == (8, len(planned["planned"]))
    assert not [p for p in root.rglob("*") if p.is_file() and "waiting" in p.parts]
    assert answer(root, "sweep", "--min-age", "0s")["deleted_files"] == 0
    assert cairn(root, "check").exit_code == 0


def test_an_unknown_file_is_reported_and_not_deleted(root: Path) -> None:
    stranger = root / PIPELINE / "notes [draft].txt"
    stranger.write_text("x")
    for command in (("sweep", "--min-age", "0s"), ("check", "--fast")):
        said = cairn(root, *command)
        assert said.exit_code == 0
        assert (
            "unknown file, left unchanged: notes [draft].txt\n1 files were not written by Cairn; Cairn ignores them"
            in said.stdout
        )
    assert answer(root, "check", "--fast")["unknown"] == ["notes [draft].txt"]
    refused = cairn(root, "check", "--fast", "--checksums")
    assert refused.exit_code == 2 and "--checksums is for S3" in refused.output
    assert stranger.exists()


def test_a_lost_file_is_written_anew_by_the_command_that_is_printed(root: Path) -> None:
    lost = root / PIPELINE / paths.settled(day(1), 1, "interval")
    whole = lost.read_bytes()
    lost.unlink()
    found = cairn(root, "check", "--fast")
    assert found.exit_code == 1
    (command,) = {
        line.partition("To write it again: ")[2] for line in found.stdout.splitlines() if "To write it again: " in line
    }
    assert (
        f"would write a lost file again: {paths.settled(day(1), 1, 'interval')}"
        in cairn(root, "sweep", "--dry-run").stdout
    )
    swept = CliRunner().invoke(app, shlex.split(command)[1:])
    assert (swept.exit_code, lost.read_bytes()) == (0, whole)
    assert "wrote a lost file again: settled/" in swept.stdout
    assert cairn(root, "check", "--fast").exit_code == 0


def test_a_duration_is_a_number_and_a_unit() -> None:
    assert [parse_duration(t) for t in ("0s", "90m", "12h", "3d")] == [
        timedelta(0), timedelta(minutes=90), timedelta(hours=12), timedelta(days=3)
    ]  # fmt: skip
    seconds = {0: "0d", 60: "1m", 90: "90s", 90_000: "25h", 1_209_600: "14d", 2_160_001: "2160001s"}
    assert {n: format_duration(timedelta(seconds=n)) for n in seconds} == seconds
    for some in (timedelta(seconds=random.Random(k).randrange(86_400 * 10**k)) for k in range(7)):
        assert parse_duration(format_duration(some)) == some
    for wrong in ("", "3", "d", "-1d", "1.5h", "3 d", "9999999d", "9" * 99 + "s"):
        with pytest.raises(UsageError, match="duration"):
            parse_duration(wrong)


@pytest.mark.parametrize(
    "arguments",
    [
        ("checkpoints", "77"),
        ("checkpoints", "yesterday"),
        ("checkpoints", "2024-01-04T00:00:00"),
        ("diff", "1", "4"),
        ("sweep", "--min-age", "soon"),
        ("check", "77"),
        ("checkpoints", "--no-such-option"),
    ],
)
def test_a_wrong_call_exits_with_code_2(root: Path, arguments: tuple[str, ...]) -> None:
    assert cairn(root, *arguments).exit_code == 2


@pytest.mark.parametrize("command", ["checkpoints", "check", "sweep"])
def test_a_storage_failure_exits_with_code_3(tmp_path: Path, command: str) -> None:
    (tmp_path / PIPELINE).symlink_to(PIPELINE)  # a link to itself
    result = cairn(tmp_path, command)
    assert (result.exit_code, result.stderr.startswith("StorageUnavailable")) == (3, True)


@pytest.mark.parametrize(
    ("where", "says"),
    [
        (["--root", "memory://none"], "check the root and the pipeline's name"),
        (["--root", "ftp://host"], "ftp://host"),
        (["--root", "memory://here", "--to-root", ""], "not a storage URL"),
        (["--root", ""], "not a storage URL"),
        (["--root", "s3://"], "not a storage URL"),
    ],
)
def test_an_invalid_root_exits_with_code_2(where: list[str], says: str) -> None:
    """An empty one, as from `--root "$UNSET"`, would be the folder `/`."""
    words = ["fork", "7", "--as", "x"] if "--to-root" in where else ["checkpoints"]
    result = CliRunner().invoke(app, [*words, *where, "--pipeline", PIPELINE])
    assert (result.exit_code, says in result.stderr) == (2, True), result.output


def test_an_unreadable_log_exits_with_code_1(root: Path) -> None:
    (root / PIPELINE / paths.record(4)).write_bytes(b"garbage")
    for command in (("checkpoints",), ("checkpoints", "latest"), ("sweep",)):
        result = cairn(root, *command)
        assert (result.exit_code, paths.record(4) in result.stderr) == (1, True)


def test_root_and_pipeline_come_from_the_environment(root: Path) -> None:
    result = CliRunner().invoke(app, ["checkpoints"], env={"CAIRN_ROOT": str(root), "CAIRN_PIPELINE": PIPELINE})
    assert (result.exit_code, "stale by 7" in result.stdout) == (0, True)


def test_help_lists_every_command() -> None:
    result = CliRunner().invoke(app, ["--help"], env={"TERM": "dumb", "COLUMNS": "200"})
    assert result.exit_code == 0
    rows = [line for line in result.stdout.splitlines() if line.startswith("│ ") and line[2].isalpha()]
    assert {row.split()[1] for row in rows} == {row.name.split()[0] for row in COMMANDS}


def test_check_finds_no_fault_in_intact_checkpoints(root: Path) -> None:
    for fast, entries in ((False, 8), (True, None)):
        found = answer(root, "check", *(["--fast"] if fast else []))
        assert (found["success"], found["newest_intact"], found["findings"]) == (True, 7, [])
        assert [(c["id"], c["entries"], c["findings"]) for c in found["checkpoints"]] == [
            (n, entries, []) for n in (3, 4, 5, 7)
        ]
    assert [c["id"] for c in answer(root, "check", "latest")["checkpoints"]] == [7]


STATE = {
    "sst": paths.shared("a4", 1, 1, 0, "sst"),
    "manifest": paths.shared("a4", 1, 0, 0, "manifest"),
    "output": paths.output(day(4), "a4", 0, 0),
    "late output": paths.output(day(4), "a4", 0, 0, late=True),
}
OUTPUT_OF_A_DROPPED = paths.output(day(1), "a1", 0, 0)


def check_found(root: Path, path: str, *arguments: str) -> Any:
    result = cairn(root, "check", "--json", *arguments)
    assert result.exit_code == 1, result.output
    found = json.loads(result.stdout)
    assert not found["success"]
    text = cairn(root, "check", *arguments)
    assert text.exit_code == 1
    assert path in text.stdout
    return found


@pytest.mark.parametrize(
    "damage", at_tier(fast=[flip], ci=[flip, truncate, empty, remove], all=[flip, truncate, empty, remove])
)
@pytest.mark.parametrize("kind", STATE)
@pytest.mark.long("half a second", runs_in="ci")
def test_check_reports_checkpoints_with_a_damaged_file(root: Path, kind: str, damage: Callable[[Path], None]) -> None:
    """The checkpoints that need it are refused, and only those; the newest sound one is offered."""
    damage(root / PIPELINE / STATE[kind])
    found = check_found(root, STATE[kind])
    damaged = {c["id"] for c in found["checkpoints"] if c["findings"]}
    assert damaged == ({4, 5} if kind == "sst" else {4})
    assert all(STATE[kind] in f for c in found["checkpoints"] for f in c["findings"])
    assert (found["findings"], found["newest_intact"]) == ([], 7)
    if damage is not flip or kind == "manifest":  # of local files no checksum is known without reading them
        check_found(root, STATE[kind], "--fast")


@pytest.mark.parametrize("damage", [flip, remove])
@pytest.mark.long("half a second", runs_in="ci")
def test_check_reports_damaged_output_of_a_dropped_checkpoint(root: Path, damage: Callable[[Path], None]) -> None:
    damage(root / PIPELINE / OUTPUT_OF_A_DROPPED)
    found = check_found(root, OUTPUT_OF_A_DROPPED)
    assert (len(found["findings"]), found["newest_intact"]) == (1, 7)


def test_restore_lists_the_discarded_checkpoints_and_requires_yes(root: Path) -> None:
    """Without --yes nothing is done; with it the named checkpoint is the state again, and what came after it is stale."""
    asked = answer(root, "restore", "3", "--dry-run")
    assert (asked["target"], [d["id"] for d in asked["discards"]]) == (3, [7])
    # A restore of 4 discards nothing, but later intervals then start from 4.
    for words in (["3"], ["4", "--allow-stale"]):
        refused = cairn(root, "restore", *words)
        assert refused.exit_code == 2 and "To agree, run the same command with --yes" in refused.output
    head = RealPipeline(root).coordinator.log().head_id
    assert head == 7
    done = answer(root, "restore", "3", "--yes")
    log = RealPipeline(root).coordinator.log()
    assert done["checkpoint"] == log.head_id == 8
    (made,) = [c for c in log.completed() if c.id == 8]
    assert (made.content.kind, made.content.base_id, made.reproduces) == ("restore", 3, None)
    assert answer(root, "check", "8")["success"]


def test_restore_can_retract_the_output_of_later_intervals(root: Path) -> None:
    before = {i: n for i, (n, _) in RealPipeline(root).coordinator.log().current_outputs().items()}
    later = [str(i) for i in sorted(before) if i.end > RealPipeline(root).coordinator.record(3).content.interval.end]
    asked = answer(root, "restore", "3", "--retract-output", "--dry-run")
    assert asked["retracts"] == later != []
    assert answer(root, "restore", "3", "--dry-run")["retracts"] == []
    done = cairn(root, "restore", "3", "--retract-output", "--yes")
    assert f"It retracts the output of {len(later)} interval(s):" in done.output
    assert "To call the sink now, run:\ncairn publish --root" in done.output
    after = RealPipeline(root).coordinator.log().current_outputs()
    assert [*after] == [i for i in before if str(i) not in later]
    assert answer(root, "check")["success"]
    misplaced = cairn(root, "restore", "--savepoint", "file:///nowhere", "--retract-output")
    assert misplaced.exit_code == 2 and "--retract-output works only with a checkpoint" in misplaced.output


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["4", "--yes"], 1, "is stale"),
        (["5", "--yes"], 1, "is quarantined"),
        (["1", "--yes"], 1, "retention has dropped checkpoint 1"),
        (["77", "--yes"], 2, "no checkpoint 77"),
        ([], 2, "give either a checkpoint, as in: cairn restore 7, or --savepoint URL"),
        (["--savepoint", "/nowhere"], 2, "--code module:NAME"),
        (["--savepoint", "/nowhere", "--code", "tests.support.nothing:P"], 2, "can't load the pipeline"),
    ],
)
def test_restore_refuses_unusable_or_missing_targets(root: Path, arguments: list[str], code: int, says: str) -> None:
    result = cairn(root, "restore", *arguments)
    assert result.exit_code == code and says in result.output
    assert RealPipeline(root).coordinator.log().head_id == 7


@pytest.mark.long("half a second", runs_in="ci")
def test_a_fork_is_a_pipeline_of_its_own(root: Path, tmp_path: Path) -> None:
    """The forked pipeline is deleted: the fork is whole, and says so."""
    other = tmp_path / "other"
    where = ["--as", "twin", "--to-root", str(other)]
    planned = answer(root, "fork", *where, "7", "--dry-run")
    assert (planned["entries"], planned["end"]) == (8, "2024-01-04T00:00:00Z") and not other.exists()
    done = answer(root, "fork", *where, "7")
    assert done["checkpoint"] == 1
    again = cairn(root, "fork", *where, "7")
    assert again.exit_code == 2 and "Nothing was copied" in again.output
    shutil.rmtree(root)
    result = CliRunner().invoke(app, ["check", "--root", str(other), "--pipeline", "twin", "--json"])
    assert json.loads(result.stdout)["success"]
    shown = CliRunner().invoke(app, ["checkpoints", "latest", "--root", str(other), "--pipeline", "twin", "--json"])
    assert (json.loads(shown.stdout)["kind"], json.loads(shown.stdout)["restored_from"]) == ("restore", None)


def test_the_printed_sink_commands_publish_or_skip_the_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two commands of the error, and the command after a restore that retracts output, as they are printed."""
    took = tmp_path / "took"
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "pipeline_with_sink.py").write_text(
        "from datetime import UTC, datetime\n"
        "from pathlib import Path\n"
        "from cairn import Pipeline\n"
        "def sink(spark, files, interval, checkpoint_id):\n"
        "    if checkpoint_id == 2 and not Path(__file__).with_name('mended').exists():\n"
        "        raise ValueError('no partition')\n"
        f"    with open({str(took)!r}, 'a') as file:\n"
        "        file.write(f'{checkpoint_id} ')\n"
        f"PIPELINE = Pipeline(name={PIPELINE!r}, start=datetime(2024, 1, 1, tzinfo=UTC), source=print, key=['k'],\n"
        "    processor=object, output_schema='k string', sink=sink)\n"
    )
    (tmp_path / PIPELINE).mkdir()
    made = Folder(LocalStorage(tmp_path / PIPELINE))
    for n in (1, 2, 3):
        made.run(day(n), f"a{n}", code="pipeline_with_sink:PIPELINE")
    hook = importlib.import_module("pipeline_with_sink").PIPELINE.sink_hook(None, str(tmp_path / PIPELINE))
    with pytest.raises(SinkFailed) as error:
        made.coordinator.publish(hook)
    assert took.read_text() == "1 3 "
    retry, skip = (shlex.split(line)[1:] for line in str(error.value).splitlines()[-2:])
    failed = CliRunner().invoke(app, retry)
    assert failed.exit_code == 3 and "no partition" in failed.output and took.read_text() == "1 3 "
    (tmp_path / "mended").touch()
    assert (
        f"published:\n  {day(2)} (checkpoint 2)\n" in CliRunner().invoke(app, retry).output
        and took.read_text() == "1 3 2 "
    )
    nothing = CliRunner().invoke(app, skip)
    assert nothing.exit_code == 2 and "start at: none" in nothing.output
    made.run(day(4), "a4", code="pipeline_with_sink:PIPELINE")
    skipped = CliRunner().invoke(app, ["publish", "2024-01-04T00:00:00+00:00", *skip[2:]])
    assert f"skipped:\n  {day(4)} (checkpoint 4)\n" in skipped.output and took.read_text() == "1 3 2 "
    assert made.coordinator.unpublished() == []
    where = ["--root", str(tmp_path), "--pipeline", PIPELINE]
    back = CliRunner().invoke(app, ["restore", "2", "--retract-output", "--yes", *where])
    publish = shlex.split(back.output.splitlines()[-1])[1:]
    called = CliRunner().invoke(app, publish)
    assert called.exit_code == 0 and took.read_text() == "1 3 2 5 5 ", called.output
    assert called.stdout == f"published:\n  {day(3)} (checkpoint 5)\n  {day(4)} (checkpoint 5)\n"


# --- what is missing from a call, or from the storage -------------------------------------------------------------------------


OF_PIPELINE = ["--pipeline", PIPELINE]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["publish", *OF_PIPELINE], "--code is missing: give module:NAME of the pipeline whose sink is called"),
        (
            ["publish", *OF_PIPELINE, "--skip"],
            "--skip needs intervals: give the start of each, as in 2024-01-04T00:00Z",
        ),
        (["publish", *OF_PIPELINE, "5", "--skip"], "interval '5' is not a time with time zone; write it as in 2013-01"),
        (["savepoint", "--code", "m:P", "--folder", "/s", "--stop", "3"], "not checkpoint 3"),
        (["restore", "6"], "a checkpoint also needs --pipeline NAME, the pipeline that goes back"),
        (["fork", "--as", "other"], "give either --pipeline NAME or --savepoint URL"),
    ],
)
def test_a_call_with_missing_or_wrong_arguments_exits_with_code_2(root: Path, arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(app, [*arguments, "--root", str(root)])
    assert (result.exit_code, says in result.stderr) == (2, True), result.stderr


@pytest.mark.parametrize("arguments", [["checkpoints", "4"], ["diff", "3", "4", "--fast"]])
def test_the_error_names_a_missing_manifest_and_the_remedy(root: Path, arguments: list[str]) -> None:
    gone = next((root / PIPELINE / "shared" / "a4").glob("*.manifest"))
    gone.unlink()
    result = cairn(root, *arguments)
    assert result.exit_code == 1, result.output
    assert "a manifest is missing: " in result.stderr and gone.name in result.stderr
    assert (
        result.stderr.splitlines()[-1]
        == "Put the manifest back from a backup, or go back to an older checkpoint with cairn restore"
    )


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.StateGapError, 1),
        (errors.StaleStateError, 1),
        (errors.SourceError, 1),
        (errors.ProcessorError, 1),
        (errors.NoSuchCheckpoint, 2),
        (errors.StateSchemaError, 2),
        (errors.PermissionRefused, 3),
        (errors.StorageUnavailable, 3),
    ],
)
def test_each_error_type_has_its_exit_code(monkeypatch: pytest.MonkeyPatch, error: type[Exception], code: int) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error("what went wrong")

    monkeypatch.setattr("state_backend.checkpoint.location.open_storage", fail)
    result = CliRunner().invoke(app, ["checkpoints", "--root", "/r", "--pipeline", "p"])
    assert (result.exit_code, result.stderr) == (code, f"{error.__name__}: what went wrong\n")


@pytest.mark.parametrize("name", ["bad name", "a/../b", ""])
def test_a_fork_to_a_name_that_no_pipeline_can_have_writes_nothing(root: Path, name: str) -> None:
    """`--as 'bad name'` wrote state files, and the record that was to name them was refused as a damaged one."""
    before = {path for path in root.rglob("*")}
    refused = cairn(root, "fork", "--as", name, "7")
    assert (refused.exit_code, {path for path in root.rglob("*")}) == (2, before), refused.stderr
    assert "CorruptRecord" not in refused.stderr


def test_the_error_for_a_checkpoint_time_without_zone_suggests_an_accepted_form(root: Path) -> None:
    """A day without a zone: the answer was `2013-01-03+00:00`, which is refused too."""
    refused = cairn(root, "checkpoints", "2024-01-04")
    assert refused.exit_code == 2 and "checkpoint '2024-01-04' has no time zone" in refused.stderr
    suggested = refused.stderr.split()[-1]
    assert answer(root, "checkpoints", suggested)["id"] == 7


@pytest.mark.parametrize(
    "words",
    [
        ["run", "--code", "here_only:P", "--every", "1d"],
        ["heal", "--to", "2024-01-02", "--every", "1d", "--pipeline", "p", "--code", "here_only:P"],
        ["validate", "--code", "here_only:P"],
        ["savepoint", "--folder", "memory://here/s", "--code", "here_only:P"],
        ["try", "--from", "2024-01-01", "--to", "2024-01-02", "--code", "here_only:P"],
        ["promote", "t", "--code", "here_only:P"],
        ["replay", '{"k": 1}', "2024-01-01", "--code", "here_only:P"],
    ],
)
def test_each_command_imports_modules_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    said = "raise UsageError('this module was found')"
    (tmp_path / "here_only.py").write_text(f"from state_backend.values.errors import UsageError\n{said}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    importlib.invalidate_caches()
    result = CliRunner().invoke(app, [*words, "--root", "memory://here"])
    assert "this module was found" in result.stderr, result.output
