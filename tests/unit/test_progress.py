"""Progress bars, Ctrl-C and the colours of `cairn`: what a terminal shows, and what a pipe gets."""

from __future__ import annotations

import logging
import os
import pty
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from pyspark.core import context
from typer.testing import CliRunner

from cairn.command.cli import app
from cairn.command.exit_codes import exit_codes
from cairn.command.printing import style_of
from cairn.command.progress import progress
from cairn.spark import task_progress
from cairn.spark_versions import ctrl_c_kept
from tests.support.checkpoints import PIPELINE
from tests.support.real_shards import RealPipeline


@pytest.fixture
def root(tmp_path: Path) -> Path:
    pipeline = RealPipeline(tmp_path)
    pipeline.run(1, "a1", {"a": 1})
    pipeline.coordinator.quarantine(1, "a test says so", ("total < 0",))
    return tmp_path


def on_terminal(root: Path, command: str, *more: str, **variables: str) -> bytes:
    """What a terminal gets from a call of `cairn`: stdout and stderr are one."""
    there, ours = pty.openpty()
    words = [sys.executable, "-m", "cairn.command.cli", command, "--root", str(root), "--pipeline", PIPELINE, *more]
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "CI")}
    done = subprocess.run(
        words, stdout=ours, stderr=ours, env={**environment, "TERM": "xterm", **variables}, check=False
    )
    os.close(ours)
    said = b"".join(_all(there))
    os.close(there)
    assert done.returncode in (0, 1), said
    return said


def _all(descriptor: int) -> Iterator[bytes]:
    while True:
        try:
            part = os.read(descriptor, 65_536)
        except OSError:  # Linux' end of a terminal
            return
        if not part:
            return
        yield part


@pytest.mark.long("half a second", runs_in="ci")
def test_a_quarantined_checkpoint_has_a_colour_on_a_terminal_only(root: Path) -> None:
    assert b"\x1b[31m" in on_terminal(root, "checkpoints")
    assert b"\x1b[3" not in on_terminal(root, "checkpoints", NO_COLOR="1")
    piped = CliRunner().invoke(app, ["checkpoints", "--root", str(root), "--pipeline", PIPELINE])
    assert "quarantined" in piped.stdout and "\x1b" not in piped.stdout


@pytest.mark.parametrize(
    ("state", "colour"),
    [
        ("completed", ""),
        ("replaced by 6", ""),
        ("stale by 7", "yellow"),
        ("quarantined", "red"),
        ("descends from quarantined 3", "red"),
        ("blocked", "red"),
        ("ok", ""),
    ],
)
def test_a_stale_state_is_yellow_and_a_quarantined_or_blocked_state_red(state: str, colour: str) -> None:
    assert style_of(state) == colour


@pytest.mark.long("seconds", runs_in="ci")
def test_a_bar_appears_on_a_terminal_only(root: Path) -> None:
    assert b"checking" in on_terminal(root, "check")
    assert b"exporting" in on_terminal(root, "export", "1", "--folder", f"{root}/tables")
    assert b"deleting" in on_terminal(root, "sweep")
    words = [sys.executable, "-m", "cairn.command.cli", "check", "--root", str(root), "--pipeline", PIPELINE]
    piped = subprocess.run(words, capture_output=True, text=True, check=True)
    assert piped.stderr == "" and "checking" not in piped.stdout


def test_ctrl_c_says_how_much_is_done_and_the_command_that_continues(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: Any, on_progress: Any, **__: Any) -> None:
        on_progress(3, 8)
        raise KeyboardInterrupt

    where = ["--root", str(root), "--pipeline", PIPELINE]
    for arguments, place, says in [
        (["check", *where], "cairn.command.check.verify_pipeline", "changed nothing"),
        (["sweep", *where], "cairn.command.sweep.sweep_all", "To continue"),
        (
            ["export", "1", "--folder", "/tmp/of a test", *where],
            "cairn.operations.export_state.export_state",
            "Delete its folder",
        ),
    ]:
        monkeypatch.setattr(place, stopped)
        monkeypatch.setattr(sys, "argv", ["cairn", *arguments])
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 130
        lines = result.stderr.splitlines()
        assert lines[0] == "Stopped by Ctrl-C" and " 3 of 8 " in lines[1] and says in result.stderr
        assert shlex.split(lines[-1]) == ["cairn", *arguments]


def test_ctrl_c_ends_a_call_of_spark_without_a_traceback_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """PySpark's handler calls the JVM inside of the interrupted call. Half of the calls of `cairn run` ended with Py4J's traceback."""
    silenced: list[int] = []
    monkeypatch.setattr(logging, "disable", silenced.append)
    before = signal.getsignal(signal.SIGINT)

    def command() -> int:
        with ctrl_c_kept():
            context.signal.signal(context.signal.SIGINT, lambda *_: pytest.fail("PySpark's handler"))
        assert context.signal is signal
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)  # Python calls the handler between two steps of this thread.
        return 0

    with pytest.raises(typer.Exit) as ended:
        exit_codes(command)()
    assert ended.value.exit_code == 130 and silenced == [logging.CRITICAL]
    assert signal.getsignal(signal.SIGINT) is before


def test_the_thread_of_a_progress_bar_ends_with_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would draw the bar once more."""
    monkeypatch.setattr(task_progress, "_POLL_S", 0)
    began = threading.Event()

    def stages() -> list[int]:
        began.set()
        return [n for n in (1,) if threading.Event().wait(0.1)]

    sparked = SimpleNamespace(statusTracker=lambda: SimpleNamespace(getActiveStageIds=stages))
    with task_progress.task_progress(SimpleNamespace(sparkContext=sparked), lambda *_: None):
        assert began.wait(5)
    assert "cairn-tasks" not in {one.name for one in threading.enumerate()}


def test_an_interrupt_before_any_progress_adds_no_note_to_the_error() -> None:
    with pytest.raises(KeyboardInterrupt) as raised, progress("checking", "shards"):
        raise KeyboardInterrupt
    assert not hasattr(raised.value, "__notes__")
