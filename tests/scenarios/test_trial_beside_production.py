"""A trial and production beside one another, both killed again and again, and swept: neither changes what the other comes to."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest

from cairn.operations.run_interval import coordinator_of
from state_backend.checkpoint.sweep import sweep
from state_backend.checkpoint.trials import find_trial, remove_trial, root_of_trial, sweep_trials
from tests.support.layout import REPOSITORY
from tests.support.range_driver import pipeline, run_days
from tests.support.trial_driver import try_days
from tests.support.trials import bytes_of

LONG = bool(os.environ.get("CAIRN_LONG"))
TRIED, DAYS, KILLS = (8, 12, 12) if LONG else (2, 3, 1)
NAME = "counting"


def results(root: Path | str) -> list[tuple[object, ...]]:
    """What each interval came to, whatever the checkpoints are called."""
    done = coordinator_of(pipeline(), str(root)).log().completed()
    return [
        (r.content.interval, r.content.digest, sorted(o.handle.crc32c for o in r.content.outputs))
        for r in done
        if r.content.kind == "interval"
    ]


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("before")
    run_days(str(root), TRIED, 1)
    return root


@pytest.mark.parametrize("seed", [1, 2] if LONG else [1])
def test_neither_changes_the_other(before: Path, tmp_path: Path, seed: int) -> None:
    quiet, alone, root = (Path(shutil.copytree(before, tmp_path / name)) for name in ("quiet", "alone", "root"))
    run_days(str(quiet), DAYS, 1)
    try_days(str(alone), TRIED)

    chosen = random.Random(seed)
    for number in range(KILLS + 1):
        commands = [["trial_driver", str(root), str(TRIED)], ["range_driver", str(root), str(DAYS), str(number + 2)]]
        processes = [_started(command) for command in commands]
        for process in processes:
            if number < KILLS:
                time.sleep(chosen.uniform(0.0, 0.5))
                process.kill()
        codes = [process.wait() for process in processes]
        for process in processes:
            assert process.stdout is not None
            process.stdout.close()
        # Old enough to be taken for dead, since nobody is at work now.
        later_ms = time.time_ns() // 1_000_000 + 60_000
        sweep(coordinator_of(pipeline(), str(root)).storage, NAME, now_ms=later_ms, min_age=timedelta(seconds=1))
        sweep_trials(str(root), NAME, now_ms=later_ms)
    assert codes == [0, 0]

    trial = find_trial(str(root), NAME)
    assert results(root) == results(quiet)
    assert results(root_of_trial(str(root), NAME, trial.name)) == results(root_of_trial(str(alone), NAME, trial.name))
    # What the trial never touches: with and without it, removed or not.
    there = bytes_of(root / NAME)
    remove_trial(str(root), trial)
    assert bytes_of(root / NAME) == there
    assert not (root / ".trials").exists()
    assert not [path for path in there if path.startswith("leases/")]


def _started(arguments: list[str]) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(REPOSITORY / "jobs"), str(REPOSITORY)])
    process = subprocess.Popen(
        [sys.executable, "-m", f"tests.support.{arguments[0]}", *arguments[1:]],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process
