"""A range whose process is killed again and again comes to what it comes to undisturbed, and leaves nothing behind."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from cairn.operations.coordinator_of import coordinator_of
from state_backend.checkpoint.sweep_files import sweep
from tests.support.counting import day
from tests.support.layout import REPOSITORY
from tests.support.local_stack import SparkConnectServer
from tests.support.range_driver import pipeline, run_days
from tests.support.tiers import ALL

LONG = ALL
DAYS, KILLS = (12, 40) if LONG else (3, 2)
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f-]{27}")
_TASK = re.compile(r"((?:part|late|shared/…)[-/]\d+)-\d+")
# What the sweep itself adds to the log; and what a storage was writing when its process died, which the storage takes away after a while.
_NOT_COMPARED = ("settled/", "HEAD.json", "checkpoints/", ".tmp/")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("undisturbed")
    run_days(str(root), DAYS, 1)
    return root


def results(root: Path) -> list[Any]:
    return [
        (r.id, r.content.interval, r.content.base_id, r.content.digest, [o.handle.crc32c for o in r.content.outputs])
        for r in coordinator_of(pipeline(), str(root)).log().completed()
    ]


def files(root: Path) -> Counter[str]:
    """How many files there are of each name, whatever the attempts are called, and which numbers Spark gave their tasks."""
    found = (str(p.relative_to(root / "counting")) for p in root.rglob("*") if p.is_file())
    return Counter(_TASK.sub(r"\1", _UUID.sub("…", name)) for name in found if not name.startswith(_NOT_COMPARED))


def started(command: list[str]) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(REPOSITORY / "jobs"), str(REPOSITORY)])
    return subprocess.Popen(
        command, cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True
    )


def run_and_kill(root: Path, number: int, after_s: float | None) -> tuple[int, list[str]]:
    """The exit code, and what it printed. ``after_s``: from its first line to its end; None: it is left alone."""
    command = [sys.executable, "-m", "tests.support.range_driver", str(root), str(DAYS), str(number)]
    with started(command) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        if after_s is not None:
            time.sleep(after_s)
            process.kill()
        lines = process.stdout.read().splitlines()
    return process.returncode, lines


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("seed", [1, 2] if LONG else [1])
@pytest.mark.long("seconds", runs_in="ci")
def test_a_range_that_is_killed_comes_to_the_same(
    undisturbed: Path, tmp_path: Path, seed: int, with_sink: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what its sink has of every day."""
    root, to = tmp_path / "root", tmp_path / "sink"
    to.mkdir()
    if with_sink:
        monkeypatch.setenv("CAIRN_TEST_SINK", str(to))
    chosen, number = random.Random(seed), 0
    for number in range(1, KILLS + 1):
        code, _ = run_and_kill(root, number, chosen.uniform(0.0, 0.6))
        if code == 0:
            break
    code, lines = run_and_kill(root, number + 1, None)
    assert code == 0 and len(lines) == DAYS
    check_as_undisturbed(root, undisturbed)
    days = [f"{day(n).start:%Y-%m-%d}" for n in range(DAYS)] if with_sink else []
    assert {file.name: file.read_text() for file in to.iterdir()} == {d: str(n) for n, d in enumerate(days, 1)}


def check_as_undisturbed(root: Path, undisturbed: Path) -> None:
    committed = coordinator_of(pipeline(), str(root)).log().head_id
    assert committed == DAYS  # each day once: a try goes on behind the last commit
    assert results(root) == results(undisturbed)

    storage = coordinator_of(pipeline(), str(root)).storage
    later_ms = time.time_ns() // 1_000_000 + 60_000
    sweep(storage, "counting", now_ms=later_ms, min_age=timedelta(seconds=1), dry_run=False)
    assert files(root) == files(undisturbed)


@pytest.mark.spark
@pytest.mark.long("minutes")
@pytest.mark.parametrize("seed", [1, 2])
def test_a_range_on_spark_that_is_killed_comes_to_the_same(undisturbed: Path, tmp_path: Path, seed: int) -> None:
    """kill -9 of the driver, of the Spark server, and of one of its Python workers, in turns, a random time after a try began. What a
    killed driver left running on the server goes on beside the next try. The undisturbed range ran without Spark."""
    chosen, code, hit, root = random.Random(seed), None, Counter[str](), tmp_path / "root"
    with SparkConnectServer(REPOSITORY, log_dir=tmp_path / "spark") as server:
        for number in range(1, 60):
            command = [sys.executable, "-m", "tests.support.range_driver", str(root), str(DAYS), str(number)]
            with started([*command, server.url]) as process:
                while await_days(process, chosen.randint(1, 2)):
                    time.sleep(chosen.uniform(0.0, 1.0))
                    victim = VICTIMS[hit.total() % len(VICTIMS)]
                    hit[victim] += kill(victim, process, server)
                code = process.wait()
            if code == 0:
                break
    assert code == 0 and set(hit) == set(VICTIMS), hit
    check_as_undisturbed(root, undisturbed)


VICTIMS = ("server", "worker", "driver")


def await_days(process: subprocess.Popen[str], days: int) -> bool:
    """False: the process ended before, or as, it had computed that many more."""
    assert process.stdout is not None
    while days and (line := process.stdout.readline()):
        days -= line.endswith("True\n")
    return not days and process.poll() is None


def kill(victim: str, process: subprocess.Popen[str], server: SparkConnectServer) -> bool:
    """Whether it was still there."""
    if victim == "driver":
        process.kill()
        return process.wait() == -signal.SIGKILL
    if victim == "server":
        server.kill()
        server.start()
        server.wait_until_ready()
        return True
    workers = [pid for pid in server.pids() if b"pyspark.daemon" in _command_of(pid)]
    for pid in workers:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(workers)


def _command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
