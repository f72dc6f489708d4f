"""Which intervals of a range are computed, what the log says of those that are there, and how progress reads."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from typer.testing import CliRunner

from cairn.command.cli import app
from cairn.operations.intervals.plan_range import (
    AskSource,
    Compute,
    Keep,
    Progress,
    boundaries_of,
    check_in_order,
    intervals_between,
    keep_or_compute,
    named_intervals,
    plan_by_input,
)
from cairn.operations.intervals.run_intervals import Outcome
from cairn.operations.intervals.run_range import run_range
from cairn.operations.intervals.what_changed import MadeOf
from cairn.testing import PipelineTester
from pipelines.aircraft import AIRCRAFT, READ_SCHEMA
from state_backend.checkpoint.interval_results import Result, results_of, spoilt_by
from state_backend.values.errors import Rerun, StaleStateError, UsageError
from state_backend.values.intervals import Interval, format_instant
from state_backend.values.operation_parameters import RunRange
from state_backend.values.records import Permissions, Record
from state_backend.values.retention import KeepLast
from state_backend.values.schedule import Cron
from tests.support.checkpoints import START, Folder, content, day, record, run
from tests.support.log_in_memory import log_in_memory

DAY = timedelta(days=1)
BEGINNING = Interval(START, START + timedelta(milliseconds=1))
OTHERS, MINE = run("other"), run("mine", clear_number=2, try_number=1)
THERE = Result(id=7, attempt="a", run=OTHERS, input_hash="m", content=None, dropped=False, spoilt=None)
SPOILT = replace(THERE, spoilt="checkpoint 9 made it stale")
BY_ME = replace(THERE, run=MINE)
EARLIER_CLEAR = replace(THERE, run=run("mine", clear_number=1))


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        (None, (Compute, Compute, Compute)),
        (THERE, (AskSource, Keep, Compute)),
        (SPOILT, (Compute, Compute, Compute)),
        (BY_ME, (Keep, Keep, Keep)),
        (EARLIER_CLEAR, (AskSource, Keep, Compute)),
        (replace(BY_ME, spoilt="checkpoint 9 is quarantined"), (Compute, Compute, Compute)),
    ],
)
def test_reprocess_mode_decides_if_a_logged_result_is_kept(there: Result | None, expected: tuple[type, ...]) -> None:
    again = replace(MINE, try_number=2)
    assert tuple(type(keep_or_compute(there, how, again)) for how in ("changed", "none", "all")) == expected  # type: ignore[arg-type]


NOW = MadeOf(code_hash="0" * 16, code_version=None, position={"files": []}, input_hash="n")
OTHER = "other code, other settings or other input; only its hash remains, so Cairn can't tell which"


@pytest.mark.parametrize(
    ("recorded", "now", "said"),
    [
        ("m", "m", None),
        ("m", "n", OTHER),
        ("m", None, "the source records no position"),
        (None, "m", "the source recorded no position then"),
        (None, None, "the source records no position"),
    ],
)
def test_only_a_result_of_equal_code_and_input_is_kept(recorded: str | None, now: str | None, said: str | None) -> None:
    decision = plan_by_input(replace(THERE, input_hash=recorded), replace(NOW, input_hash=now))
    if said is None:
        assert decision == Keep(checkpoint=7, why="code and input are the same")
    else:
        assert isinstance(decision, Compute) and said in decision.why


A, B = ({"path": f"{name}.json", "bytes": 5, "sha256": name * 64} for name in "ab")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"position": {"files": [B, {**A, "bytes": 9}]}}, "other input: a.json has changed, b.json is new"),
        ({"position": {"files": []}}, "other input: a.json is gone"),
        ({"position": {"files": [A, A]}}, "other input: files has another order or number of items"),
        ({"position": {"files": [A], "version": 3}}, "other input: version is 3 instead of null"),
        ({"position": {}}, "other input: files is null instead of "),
        (
            {"position": {"files": [A, *({"path": str(n)} for n in range(5))]}},
            "other input: 0 is new, 1 is new, 2 is new, and 2 more",
        ),
        (
            {"code_hash": "f" * 16, "code_version": "2.0", "position": {"files": [B]}},
            "other code: 00000000 before, 2.0 (ffffffff) now; other input: a.json is gone, b.json is new",
        ),
        (
            {"code_hash": "f" * 16, "by_build": ("m.f has no source text", "numpy has compiled files")},
            "other code: 00000000 before, ffffffff now, or another version of Python, as m.f has no source text",
        ),
        (
            {},
            "other settings: the code of the source, its packages, the pipeline's settings, or the version of Cairn differ",
        ),
    ],
)
def test_a_dry_run_names_the_input_code_or_settings_that_changed(changes: dict[str, Any], said: str) -> None:
    there = replace(THERE, content=content(day(1), "a", source_position={"files": [A]}, input_hash="m"))
    decision = plan_by_input(there, replace(NOW, **({"position": {"files": [A]}} | changes)))
    assert decision.why.startswith(f"checkpoint 7 had {said}")


# --- what the log has ----------------------------------------------------------------------------------------------------------


def days(folder: Folder, *numbers: int) -> dict[int, str | None]:
    """Of each day that has a result: why it does not count."""
    results = results_of(folder.coordinator.log(), [day(n) for n in numbers], BEGINNING)
    return {n: results[day(n)].spoilt for n in numbers if day(n) in results}


@pytest.mark.parametrize("kept", [10, 2])
def test_results_that_a_rerun_made_stale_do_not_count_even_if_already_dropped(kept: int) -> None:
    folder = Folder(policy=KeepLast(kept))
    for n in range(1, 6):
        folder.run(day(n), f"a{n}", input_hash=f"m{n}")
        folder.coordinator.clean_up()
    assert days(folder, 1, 2, 3, 4, 5, 6) == dict.fromkeys(range(1, 6))
    results = results_of(folder.coordinator.log(), [day(n) for n in range(1, 7)], BEGINNING)
    assert [(r.id, r.input_hash) for r in results.values()] == [(n, f"m{n}") for n in range(1, 6)]
    assert [r.dropped for r in results.values()] == [n <= 5 - kept for n in range(1, 6)]

    # Day 1 starts from nothing, so that it can be run again however much was dropped.
    folder.run(day(1), "another")
    folder.coordinator.clean_up()
    found = days(folder, 1, 2, 3, 4, 5)
    assert found[1] is None
    assert all(found[n] == "checkpoint 6 made it stale" for n in range(2, 6))


def test_the_same_result_again_makes_nothing_stale() -> None:
    folder = Folder(policy=KeepLast(2))
    first = folder.run(day(1), "a1").record
    assert first is not None
    for n in range(2, 5):
        folder.run(day(n), f"a{n}")
    folder.run(day(1), "again", digest=first.content.digest)
    assert days(folder, 1, 2, 3, 4) == dict.fromkeys(range(1, 5))


def test_a_result_does_not_count_after_a_rewind_to_another_result_of_its_interval() -> None:
    folder = Folder(days=1)
    earlier = folder.run(day(2), "a2").record
    folder.run(day(2), "again")
    assert earlier is not None and days(folder, 1, 2) == {1: None, 2: None}
    folder.run(day(2), "back", kind="restore", base_id=2, h0=3, digest=earlier.content.digest, outputs=())
    assert days(folder, 1, 2) == {1: None, 2: f"checkpoint 4 restored other state at {format_instant(day(2).end)}"}


def test_quarantined_results_and_those_replaced_by_other_intervals_do_not_count() -> None:
    folder = Folder(days=3)
    folder.coordinator.quarantine(2, "wrong")
    found = days(folder, 1, 2, 3)
    assert found == {1: None, 2: "checkpoint 2 is quarantined", 3: "checkpoint 2 is quarantined"}

    folder = Folder(days=1)
    whole = Interval(day(1).start, day(1).start + DAY / 2)
    folder.run(whole, "half", permissions=Permissions(replace_overlapping=True))
    assert days(folder, 1) == {}


def test_a_changed_result_in_the_range_makes_later_results_stale() -> None:
    folder = Folder(days=3)
    results = results_of(folder.coordinator.log(), [day(n) for n in range(1, 4)], BEGINNING)
    changed = folder.run(day(2), "changed").record
    assert isinstance(changed, Record)
    after = spoilt_by(results, changed)
    assert [after[day(n)].spoilt for n in (1, 2, 3)] == [None, None, "checkpoint 4 made it stale"]
    assert [days(folder, 1, 3)[n] for n in (1, 3)] == [None, "checkpoint 4 made it stale"]


def test_an_empty_log_and_an_empty_range_have_no_results() -> None:
    assert results_of(Folder().coordinator.log(), [day(1)], BEGINNING) == {}
    folder = Folder(days=1)
    assert results_of(folder.coordinator.log(), [], BEGINNING) == {}


def test_a_range_with_a_gap_or_a_partial_interval_is_refused() -> None:
    assert intervals_between(START, START + 3 * DAY, DAY) == tuple(
        Interval(START + n * DAY, START + (n + 1) * DAY) for n in range(3)
    )
    with pytest.raises(UsageError, match="would end at 2024-01-04"):
        intervals_between(START, START + 2.5 * DAY, DAY)
    with pytest.raises(UsageError, match="the end must be after the start"):
        intervals_between(START, START, DAY)
    check_in_order([day(1), day(2), day(3)])
    with pytest.raises(UsageError, match="without gaps"):
        check_in_order([day(1), day(3)])


BERLIN = Cron("0 6 * * 1-5", "Europe/Berlin")
HOURS = timedelta(hours=1)


@pytest.mark.parametrize(
    ("first", "last", "rule", "starts"),
    [
        # Thursday and Friday; no interval begins on Saturday.
        ("2024-01-04", "2024-01-06", BERLIN, ["2024-01-04T05:00Z", "2024-01-05T05:00Z"]),
        ("2024-01-04T05:00Z", "2024-01-04T06:00+01:00", BERLIN, ["2024-01-04T05:00Z"]),
        # The day of 23 hours, in hours: a day means all of its intervals.
        ("2024-03-31", "2024-03-31", Cron("0 */12 * * *", "Europe/Berlin"), ["2024-03-30T23:00Z", "2024-03-31T10:00Z"]),
        ("2024-01-04", "2024-01-04T01:00", HOURS, ["2024-01-04T00:00Z", "2024-01-04T01:00Z"]),
        ("2024-01-04", "2024-01-04", HOURS, ["2024-01-04T00:00Z"]),
        ("20240104", " 2024-01-04 ", DAY, ["2024-01-04T00:00Z"]),
    ],
)
def test_from_and_to_select_intervals_by_their_start(first: str, last: str, rule: Any, starts: list[str]) -> None:
    assert [i.start for i in named_intervals(first, last, rule)] == [datetime.fromisoformat(s) for s in starts]


@pytest.mark.parametrize(
    ("first", "last", "rule", "says"),
    [
        ("yesterday", "2024-01-04", DAY, "from 'yesterday' is not a date or time like"),
        ("2024-01-04", "", BERLIN, "to '' is not a date or time like"),
        ("2024-01-05", "2024-01-04", BERLIN, "from 2024-01-05 is after to 2024-01-04"),
        ("2024-01-06", "2024-01-07", BERLIN, "no interval of the schedule .* begins from 2024-01-06 to 2024-01-07"),
        ("2024-01-04", "2024-01-05T06:00", DAY, "not a whole number of intervals"),
    ],
)
def test_invalid_dates_and_ranges_without_interval_are_refused(first: str, last: str, rule: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        named_intervals(first, last, rule)


def test_interval_length_is_that_given_else_the_schedules_else_the_newest_intervals() -> None:
    folder = Folder(days=1)
    log, plain, declared = folder.coordinator.log(), AIRCRAFT, replace(AIRCRAFT, schedule=BERLIN)
    assert boundaries_of(declared, log, HOURS) == HOURS
    assert boundaries_of(declared, log, None) == BERLIN
    assert boundaries_of(plain, log, None) == DAY
    folder.run(Interval(day(2).start, day(2).start + HOURS), "hour")
    assert boundaries_of(plain, folder.coordinator.log(), None) == HOURS
    folder.run(Interval(day(2).start + HOURS, day(2).end), "rest", schedule=BERLIN)
    assert boundaries_of(plain, folder.coordinator.log(), None) == BERLIN
    with pytest.raises(UsageError, match="has no checkpoint and declares no schedule"):
        boundaries_of(plain, Folder().coordinator.log(), None)


def test_progress_says_the_recent_rate_and_what_is_left() -> None:
    progress = Progress(done=0, total=400, kept=0, recent_s=())
    assert str(progress.count_kept()) == "1 of 400"
    slow = progress.count_computed(60.0)
    assert str(slow) == "1 of 400, 60.00 s each, 6 h 39 min left"
    for _ in range(20):
        slow = slow.count_computed(0.5)
    assert str(slow) == "21 of 400, 0.50 s each, 3 min 10 s left"
    assert str(Progress(done=9, total=10, kept=0, recent_s=(0.4,)).count_computed(0.4)) == "10 of 10, 0.40 s each"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--to", "2024-01-01"], "--to needs --from, the start of the first interval; leave out --count"),
        (["--from", "2024-01-01", "--to", "2024-01-02", "--count", "2"], "leave out --count"),
        (
            ["--from", "2024-01-02", "--to", "2024-01-01"],
            "from 2024-01-02 is after to 2024-01-01; from is the start of the first interval",
        ),
        (["--from", "yesterday"], "from 'yesterday' is not a date or time like 2024-01-04"),
        (["--every", "1w"], "not a duration: '1w'"),
    ],
)
def test_an_invalid_range_is_refused_before_spark_starts(tmp_path: Path, options: list[str], says: str) -> None:
    command = ["run", "--code", "pipelines.aircraft:AIRCRAFT", "--root", str(tmp_path), "--every", "1d"]
    result = CliRunner().invoke(app, [*command, *options])
    assert (result.exit_code, says in result.stderr, "Spark" in result.stderr) == (2, True, False), result.output


def test_a_changed_interval_length_is_refused_unless_from_is_given(tmp_path: Path) -> None:
    """A source with a file per interval would lose the files that begin elsewhere."""
    tester = PipelineTester(AIRCRAFT, input_schema=READ_SCHEMA, every=DAY, root=str(tmp_path))
    tester.run()
    command = ["run", "--code", "pipelines.aircraft:AIRCRAFT", f"--root={tmp_path}", "--dry-run", "--reprocess=none"]
    refused = CliRunner().invoke(app, [*command, "--every", "12h"])
    assert refused.exit_code == 2, refused.output
    lines = refused.stderr.splitlines()
    assert lines[0].endswith(
        "--every 12:00:00 differs from the length of its newest interval, [2013-01-01T00:00:00Z, 2013-01-02T00:00:00Z)"
    )
    assert lines[1] == "To continue with intervals of 1 day, 0:00:00, leave out --every"
    for options in (["--every", "12h", *lines[2].partition("add ")[2].split()], [], ["--every", "1d"]):
        result = CliRunner().invoke(app, [*command, *options])
        assert result.exit_code == 0 and "1 of 1 intervals would be computed" in result.output, result.output


@pytest.mark.parametrize(
    ("asked", "more", "printed"),
    [
        (["--count", "9"], {"last": START}, "--to 2024-01-01T00:00:00Z --reprocess all"),
        (
            ["--spark", "sc://h:1"],
            {"last": START + 2 * DAY},
            "--to 2024-01-03T00:00:00Z --reprocess all --spark sc://h:1",
        ),
        (
            ["--every", "12h", "--from", "2024-01-09T00:00Z"],
            {"last": START + DAY - timedelta(seconds=1), "replace_overlapping": True},
            "--to 2024-01-01T12:00:00Z --every 12h --reprocess all --replace-overlapping",
        ),
    ],
)
def test_a_refusal_of_cairn_run_ends_with_the_command_that_repairs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[str], more: dict[str, Any], printed: str
) -> None:
    """The printed command, in its turn, asks for just those intervals."""
    there = log_in_memory(entries={1: record(1, day(1))})
    monkeypatch.setattr("cairn.operations.intervals.run_range.read_newest", lambda *_: there)
    calls: list[list[Interval]] = []

    def refuse(session: object, pipeline: object, intervals: Sequence[Interval], *_: object, **options: Any) -> Any:
        calls.append([*intervals])
        raise StaleStateError("it is stale.", rerun=Rerun(first=START, **more))

    session = SimpleNamespace(sparkContext=SimpleNamespace(setLogLevel=lambda _: None))
    monkeypatch.setattr("cairn.spark.session.connect", lambda *_, **__: session)
    monkeypatch.setattr("cairn.operations.intervals.run_range.run_intervals", refuse)
    command = ["run", "--code", "pipelines.aircraft:AIRCRAFT", "--root", f"file://{tmp_path}"]
    words = command + asked
    for _ in range(2):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 1, result.output
        starts, ready, *_, before, line = result.stderr.splitlines()
        assert starts in ("starting Spark", "connecting to Spark") and ready.startswith("Spark is ready after ")
        assert before == "StaleStateError: it is stale."
        expected = f"cairn {shlex.join(command)} --from 2024-01-01T00:00:00Z {printed}"
        assert line == expected
        words = shlex.split(line)[1:]
    assert calls[1][0].start == START and format_instant(calls[1][-1].start) == printed.split()[1]


@pytest.mark.parametrize(
    ("words", "at", "says"),
    [
        (
            ["--from", "2024-01-01", "--to", "2024-01-03"],
            1,
            "1 of 3 intervals are done; their commits stay\nTo continue, run:\nMORE",
        ),
        (["--from", "2024-01-01", "--to", "2024-01-03"], 3, "3 of 3 intervals are done; their commits stay\n"),
        (
            ["--from", "2024-01-01", "--count", "3"],
            0,
            "0 of 3 intervals are done; their commits stay\nTo continue, run:\nMORE --reprocess all",
        ),
        (["--count", "3", "--reprocess", "none", "--dry-run"], 0, "To continue, run:\ncairn as typed"),
        (["--count", "3"], None, "To continue, run:\ncairn as typed"),
    ],
)
def test_ctrl_c_names_what_is_left_of_the_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], at: int | None, says: str
) -> None:
    """`at`: After how many intervals; None: while the pipeline is loaded, before Cairn knows which intervals are meant."""

    def stop(*_: object, on_outcome: Any = None, **__: object) -> None:
        for n in range(at or 0):
            outcome = Outcome(
                interval=day(n + 1), computed=False, ours=False, checkpoint=n, record=None, why="it is kept"
            )
            on_outcome(outcome, Progress(done=n + 1, total=3, kept=n + 1, recent_s=()))
        raise KeyboardInterrupt

    session = SimpleNamespace(sparkContext=SimpleNamespace(setLogLevel=lambda _: None))
    monkeypatch.setattr("cairn.spark.session.connect", lambda *_, **__: session)
    for place in ("run_intervals", "plan_intervals", *(["read_newest"] if at is None else [])):
        monkeypatch.setattr(f"cairn.operations.intervals.run_range.{place}", stop)
    monkeypatch.setattr("sys.argv", ["cairn", "as", "typed"])
    command = ["run", "--code", "pipelines.aircraft:AIRCRAFT", "--root", str(tmp_path), "--every", "1d"]
    result = CliRunner().invoke(app, [*command, *words])
    left = f"cairn {shlex.join(command[:-2])} --from {format_instant(day((at or 0) + 1).start)} --to 2024-01-03T00:00:00Z --every 1d"
    assert result.exit_code == 130 and result.stderr.split("Stopped by Ctrl-C\n")[1].rstrip("\n") == (
        says.replace("MORE", left).rstrip("\n")
    ), result.output


@pytest.mark.parametrize("kept", [1, 2])
def test_a_range_says_whether_its_last_checkpoint_is_dropped(monkeypatch: pytest.MonkeyPatch, kept: int) -> None:
    there, place = log_in_memory(entries={2: record(2, day(2), retained={2: None})}), mock.MagicMock()
    outcome = Outcome(interval=day(kept), computed=False, checkpoint=kept, why="it is kept")
    for name, answer in (("read_newest", there), ("run_intervals", [outcome]), ("intervals_of", []), ("locate", place)):
        monkeypatch.setattr(f"cairn.operations.intervals.run_range.{name}", mock.Mock(return_value=answer))
    assert run_range(RunRange(root="memory://r", code="m:P"), place)["dropped"] == (kept == 1)
