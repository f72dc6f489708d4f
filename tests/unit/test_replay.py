"""`cairn replay`: one key of a committed interval runs again, and equals what was committed, or the reason is told."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cairn import testing
from cairn.command.cli import app
from cairn.command.replay import text_of_test
from cairn.operations.intervals.run_intervals import run_intervals
from cairn.pipeline import Pipeline
from cairn.replay.debug import Debugger
from cairn.replay.local_session import LocalSession
from cairn.replay.replay_key import Replay, replay_key
from cairn.rows.local_rows import LocalRows
from cairn.testing import PipelineTester
from state_backend.values.errors import UsageError
from tests.support import replayed as replayed_pipelines
from tests.support.accounts import DAYS, SCHEMA, accounts, at, position_of, read_days, read_only
from tests.support.checkpoints import day
from tests.support.layout import REPOSITORY
from tests.support.replayed import ROW
from tests.support.terminal import Terminal
from tests.support.tiers import long_after

ACCOUNTS = ("ann", "bob", "carl")


def run_days(folder: Path, pipeline: Pipeline, days: Any = DAYS) -> PipelineTester:
    tester = PipelineTester(pipeline, input_schema=SCHEMA, root=f"file://{folder}")
    for n in days:
        tester.run(DAYS[n], day(n), position=position_of(day(n)))
    return tester


def replayed(folder: Path, pipeline: Pipeline, key: str, n: int, **settings: Any) -> Replay:
    return replay_key(pipeline, key, day(n), f"file://{folder}", **settings)


@pytest.mark.parametrize("api", long_after(1, ["row", "pandas", "arrow"], "seconds", runs_in="ci"))
def test_a_replay_equals_what_was_committed(tmp_path: Path, api: str) -> None:
    pipeline = accounts(api, source=read_days)
    run_days(tmp_path, pipeline)
    outputs = 0
    for n in DAYS:
        for account in ACCOUNTS:
            with read_only(tmp_path):
                found = replayed(tmp_path, pipeline, account, n)
            assert (found.comparison.state, found.same, found.reasons) == ((), True, ()), (n, account)
            outputs += found.run.output.num_rows
    # Seven handlers of rows, and two timers: that of carl on day 3, and that of bob on day 5.
    assert outputs == 8


def replay(folder: Path, *arguments: str, code: str = "tests.support.replayed:ROW") -> Result:
    return CliRunner().invoke(app, ["replay", *arguments, "--root", f"file://{folder}", "--code", code])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("root")
    run_days(folder, ROW)
    return folder


@pytest.mark.long("half a second", runs_in="ci")
def test_replay_prints_each_handler_call_with_its_state_accesses(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        result = replay(root, "ann", "2024-01-02")
    assert not re.search(r"\bann\b", caplog.text)  # No key and no row is written to a log.
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        'checkpoint 2 of \'accounts\', [2024-01-02T00:00:00Z, 2024-01-03T00:00:00Z), key {"account": "ann"}: 2 rows, from checkpoint 1',
        "call 1: handleInputRows, processing time 2024-01-03T00:00:00Z, watermark 1970-01-01T00:00:00Z",
        '  in    {"account": "ann", "amount": 1, "at": "2024-01-02T08:00:00+00:00"}',
        '  in    {"account": "ann", "amount": 10, "at": "2024-01-02T09:00:00+00:00"}',
        "  read  balance.get() -> [5, 1704326400000]",
        "  write amounts.appendValue([1])",
        '  read  days.getValue(["2024-01-02"]) -> null',
        '  write days.updateValue(["2024-01-02"], [1])',
        "  write amounts.appendValue([10])",
        '  read  days.getValue(["2024-01-02"]) -> {"rows": 1}',
        '  write days.updateValue(["2024-01-02"], [2])',
        "  timer deleteTimer(2024-01-04T00:00:00Z)",
        "  timer registerTimer(2024-01-05T00:00:00Z)",
        "  write balance.update([16, 1704412800000])",
        '  out   {"account": "ann", "kind": "row", "balance": 16, "rows": 2}',
        "state: equals the committed state",
        "output: equals the committed output",
        "late rows: equal the committed rows",
    ]


def test_replay_of_a_key_without_rows_prints_its_timer_call(root: Path) -> None:
    lines = replay(root, "carl", "3").stdout.splitlines()
    assert lines[1].startswith("call 1: handleExpiredTimer of the timer 2024-01-04T00:00:00Z, processing time")
    assert '  out   {"account": "carl", "kind": "idle", "balance": 1, "rows": 0}' in lines
    assert "no call: the key had no rows and no timer was due" in replay(root, "carl", "4").stdout


def test_json_output_lists_the_handler_calls_with_their_state_uses(root: Path) -> None:
    said = json.loads(replay(root, "ann", "2024-01-02", "--json").stdout)
    assert (said["checkpoint"], said["base"], said["same"], said["with_spark"]) == (2, 1, True, False)
    assert [use["method"] for use in said["calls"][0]["uses"]][:2] == ["get", "appendValue"]


@pytest.mark.parametrize("api", ["ROW", "PANDAS", "ARROW"])
@pytest.mark.long("half a second", runs_in="ci")
def test_a_replay_becomes_a_test_that_needs_neither_root_nor_source(
    tmp_path: Path, api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "root"
    folder.mkdir()
    run_days(folder, getattr(replayed_pipelines, api))
    for n, (account, day_) in enumerate([("ann", "2024-01-02"), ("carl", "2024-01-03"), ("bob", "2024-01-01")]):
        file = tmp_path / f"test_made_{n}.py"
        result = replay(folder, account, day_, "--to-test", str(file), code=f"tests.support.replayed:{api}")
        assert result.exit_code == 0 and result.stdout.endswith(f"the test is in {file}\n")
        assert replay(folder, account, day_, "--to-test", str(file)).exit_code == 2
    shutil.rmtree(folder)
    for file in tmp_path.glob("test_made_*.py"):
        made: dict[str, Any] = {}
        text = file.read_text()
        exec(compile(text, str(file), "exec"), made)
        (test,) = [of for name, of in made.items() if name.startswith("test_")]
        test()
        for part, more in ((r"balance': \d", 9), (r"total': \d", 9), (r"timers': \[", "0,"), (r"late': \[", "0,")):
            exec(re.sub(rf"(?s)(EXPECTED = .*'{part})", rf"\g<1>{more}", text), made)
            with pytest.raises(AssertionError):
                made[test.__name__]()


@pytest.mark.parametrize("zone", ["UTC", "America/St_Johns"])
@pytest.mark.long("seconds", runs_in="ci")
def test_a_value_of_every_type_becomes_a_literal(tmp_path: Path, zone: str) -> None:
    from tests.support.replayed import KEYS, TYPED, TYPED_ROWS, TYPED_SCHEMA

    tester = PipelineTester(TYPED, input_schema=TYPED_SCHEMA, root=f"file://{tmp_path}", time_zone=zone)
    for n in (1, 2, 3):
        tester.run(TYPED_ROWS if n < 3 else [], day(n), position=position_of(day(n)))
    for name, key in KEYS.items():
        for n in (1, 2, 3):
            found = replay_key(TYPED, key, day(n), tester.root)
            assert (found.comparison.state, len(found.run.calls), len(found.planned.rows())) == ((), 1, 3 * (n < 3)), (
                name
            )
            text = text_of_test(found, "tests.support.replayed:TYPED")
            made: dict[str, Any] = {}
            exec(compile(text, f"{name} {n}", "exec"), made)
            made[f"test_accounts_2024_01_0{n}T0000_checkpoint_{n}"]()
            assert ("'time_zone': 'America/St_Johns'" in text) == (zone != "UTC")


def test_a_test_is_written_into_a_new_file_only(root: Path, tmp_path: Path) -> None:
    there = tmp_path / "test_there.py"
    there.touch()
    # The command looks before it runs the interval again, so nothing is printed.
    for file, printed in ((there, False), (tmp_path / "no" / "test.py", False), (tmp_path / ("x" * 300), True)):
        result = replay(root, "ann", "2024-01-02", "--to-test", str(file))
        assert (result.exit_code, bool(result.stdout)) == (2, printed), result.output
        assert f"{file} can't be written; give the name of a new file" in result.stderr


@pytest.mark.long("half a second", runs_in="ci")
def test_the_tester_replays_a_key_from_recorded_or_given_state() -> None:
    tester = PipelineTester(accounts(), input_schema=SCHEMA)
    for n, rows in DAYS.items():
        tester.run(rows, day(n))
    found = tester.replay({"account": "ann"}, day(2), DAYS[2])
    assert (found.same, found.reasons) == (True, [])
    assert found.state["balance"] == [{"total": 16, "due_ms": 1704412800000}]
    other = tester.replay(("ann",), day(2), DAYS[2][:1])
    assert other.same is False and other.output[0]["balance"] == 15
    started = tester.replay("ann", day(2), DAYS[2], state={"balance": [{"total": 100}]}, timers=[at(1)])
    assert started.handlers == ["handleInputRows", "handleExpiredTimer"] and started.same is None
    assert [row["balance"] for row in started.output] == [111, 111]
    with pytest.raises(UsageError, match="declares no state 'balanc'"):
        tester.replay("ann", day(2), state={"balanc": []})
    with pytest.raises(UsageError, match="an entry has 'sum'"):
        tester.replay("ann", day(2), state={"balance": [{"sum": 1}]})
    with pytest.raises(UsageError, match="must have exactly the columns account"):
        tester.replay({"user": "ann"}, day(2), state={})


def test_changed_code_is_reported_as_the_reason_of_a_difference(root: Path) -> None:
    result = replay(root, "ann", "2024-01-02", code="tests.support.replayed:BROKEN")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert "state: differs from the committed state" in lines
    assert "  ~ balance: total 16 -> 15" in lines
    assert '  - {"account": "ann", "kind": "row", "balance": 16, "rows": 2}' in lines
    assert '  + {"account": "ann", "kind": "row", "balance": 15, "rows": 1}' in lines
    assert next(line for line in lines if line.startswith("because: ")).startswith("because: other code: ")
    same = replay(root, "bob", "2024-01-03", code="tests.support.replayed:BROKEN")
    assert same.exit_code == 0
    assert "note: the code is not the recorded code, but gives the same result for this key" in same.stdout


def test_a_changed_source_offset_is_reported_as_the_reason_of_a_difference(root: Path) -> None:
    result = replay(root, "ann", "2024-01-02", code="tests.support.replayed:MOVED")
    assert "because: other input: " in result.stdout


def test_changed_rows_at_the_same_source_offset_are_reported_as_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_shards(session: Any, job: Any, inputs: Any) -> Any:
        rows = LocalRows.of_table(inputs.rows._tables[0], inputs.rows.schema, inputs.rows.zone)
        return testing._on_shards(ROW.processor, session, job, replace(inputs, rows=rows))

    session: Any = LocalSession("UTC")
    run_intervals(session, ROW, [day(1)], f"file://{tmp_path}", on_shards=on_shards)
    monkeypatch.setitem(DAYS, 1, DAYS[1][1:])
    result = replay(tmp_path, "ann", "1")
    assert "two replays agree: the source returned other rows for the same position" in result.stdout


def test_a_nondeterministic_processor_is_reported_as_the_reason_of_a_difference(tmp_path: Path) -> None:
    run_days(tmp_path, replayed_pipelines.RANDOM, (1,))
    result = replay(tmp_path, "ann", "1", code="tests.support.replayed:RANDOM")
    assert result.exit_code == 1
    assert "because: the processor is not deterministic: two replays of the same rows and state differ" in result.stdout


def pdb_of(root: Path, key: str, n: str) -> Terminal:
    command = [sys.executable, "-m", "cairn.command.cli", "replay", key, n, "--pdb"]
    settings = {"CAIRN_ROOT": f"file://{root}", "CAIRN_CODE": "tests.support.replayed:ROW"}
    return Terminal(command, {**os.environ, **settings}, REPOSITORY)


@pytest.mark.parametrize(
    ("key", "n", "handler"), [("ann", "2", "handleInputRows"), ("carl", "3", "handleExpiredTimer")]
)
@pytest.mark.long("seconds", runs_in="ci")
def test_pdb_stops_in_the_handler_and_shows_its_variables(root: Path, key: str, n: str, handler: str) -> None:
    with closing(pdb_of(root, key, n)) as terminal:
        stopped = terminal.wait_for("(Pdb) ")
        assert "accounts.py(" in stopped and f"{handler}()" in stopped
        terminal.type("n")
        terminal.wait_for("(Pdb) ")
        terminal.type("p total, 6 * 7")
        assert "42" in terminal.wait_for("(Pdb) ")
        terminal.type("c")
        assert terminal.end() == 0
        assert "state: equals the committed state" in terminal.said


@pytest.mark.long("seconds", runs_in="ci")
def test_quit_in_pdb_stops_the_replay(root: Path) -> None:
    with closing(pdb_of(root, "ann", "2")) as terminal:
        terminal.wait_for("(Pdb) ")
        terminal.type("q")
        assert terminal.end() == 130
        assert "Traceback" not in terminal.said


def test_ctrl_c_ends_a_replay_that_pdb_let_go_on() -> None:
    before = signal.getsignal(signal.SIGINT)
    Debugger()._pdb.onecmd("continue")
    assert signal.getsignal(signal.SIGINT) is before
