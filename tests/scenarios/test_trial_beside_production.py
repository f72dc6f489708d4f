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

from cairn.operations.coordinator_of import coordinator_of
from cairn.pipeline import Interval
from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.adapters.work_folders import work_folder
from state_backend.checkpoint.log import read_log
from state_backend.checkpoint.sweep_files import sweep
from state_backend.checkpoint.trials import find_trial, remove_trial, root_of_trial, sweep_trials
from state_backend.inspection.compare_logs import made_within
from state_backend.inspection.verify import verify_pipeline
from tests.support import sized_driver
from tests.support.counting import day
from tests.support.layout import REPOSITORY
from tests.support.range_driver import pipeline, run_days
from tests.support.trial_driver import try_days
from tests.support.trials import bytes_of

TRIED, DAYS, KILLS = 2, 3, 1
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


@pytest.mark.long("seconds", runs_in="ci")
def test_neither_changes_the_other(before: Path, tmp_path: Path) -> None:
    quiet, alone, root = (Path(shutil.copytree(before, tmp_path / name)) for name in ("quiet", "alone", "root"))
    run_days(str(quiet), DAYS, 1)
    try_days(str(alone), TRIED)

    chosen = random.Random(1)
    for number in range(KILLS + 1):
        commands = [["trial_driver", str(root), str(TRIED)], ["range_driver", str(root), str(DAYS), str(number + 2)]]
        processes = [_started(command) for command in commands]
        for process in processes:
            if number < KILLS:
                time.sleep(chosen.uniform(0.0, 0.5))
                process.kill()
        codes = [_ended(process) for process in processes]
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


# --- at size ------------------------------------------------------------------------------------------------------------------------

LAST = 30  # of the days that are tried: 1 to 30
SIZED = "sums"
# What production does meanwhile, as (first day, last day), each a run of its own: a new day, a past day cleared that comes to the same, one
# that comes to something else since its input is another, all behind that one, and a new day again.
DOES = [(31, 31), (10, 10), (20, 20), (21, 31), (32, 32)]
CHANGES = 2


@pytest.fixture(scope="module")
def sized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200,000 keys on day 0, 500 of them on each of 30 more days."""
    root = tmp_path_factory.mktemp("sized")
    sized_driver.run_days(str(root), 0, LAST, 0)
    return root


@pytest.mark.long("minutes")
@pytest.mark.parametrize("seed", [1, 2])
def test_neither_changes_the_other_at_size(sized: Path, tmp_path: Path, seed: int) -> None:
    """Production is killed, cleared, run on and swept while a trial of its 30 days is killed and goes on. Whenever production rests, no byte of
    its folder changes; in the end it is what it comes to without a trial, and the trial what it comes to alone."""
    quiet, alone, root = (Path(shutil.copytree(sized, tmp_path / name)) for name in ("quiet", "alone", "root"))
    took_s = []
    for number, (first, last) in enumerate(DOES):
        if number == CHANGES:
            (quiet / "changed").write_text("20")
        started_s = time.monotonic()
        sized_driver.run_days(str(quiet), first, last, number + 1)
        took_s.append(time.monotonic() - started_s)
    (alone / "changed").write_text("20")
    undisturbed = sized_driver.try_days(str(alone), LAST)

    chosen, kills, rested = random.Random(seed), 0, 0
    for number, (first, last) in enumerate(DOES):
        if number == CHANGES:
            (root / "changed").write_text("20")
        tries = ["sized_driver", str(root), "try", str(LAST)]
        runs = ["sized_driver", str(root), "run", str(first), str(last), str(number + 1)]
        # The first trial begins late: on a fast machine it would end before production rests. After the change of the input, a trial has
        # much to do again; that one begins early.
        trial = _started(tries) if number else None
        for killed in (True, False):
            process = _started(runs)
            if killed:
                # Within what the run takes on this machine, undisturbed.
                time.sleep(chosen.uniform(0.0, 0.8) * took_s[number])
                kills += process.poll() is None
                process.kill()
            assert _ended(process) in ((0, -9) if killed else (0,))
        trial = trial or _started(tries)
        # Production rests, and is swept while the trial works.
        later_ms = time.time_ns() // 1_000_000 + 60_000
        storage = coordinator_of(sized_driver.pipeline(str(root)), str(root)).storage
        sweep(storage, SIZED, now_ms=later_ms, min_age=timedelta(seconds=1))
        sweep_trials(str(root), SIZED, now_ms=later_ms)
        there = _without_leases(root / SIZED)
        time.sleep(chosen.uniform(0.5, 2.0))
        rested += trial.poll() is None
        assert _without_leases(root / SIZED) == there
        kills += trial.poll() is None
        trial.kill()
        assert _ended(trial) in (0, -9)
    there = _without_leases(root / SIZED)
    sized_driver.try_days(str(root), LAST)
    assert kills >= 4 and rested >= 1, f"it was hardly disturbed: {kills} kills, {rested} rests"

    trial = find_trial(str(root), SIZED)
    assert current(root, SIZED) == current(quiet, SIZED) and len(current(root, SIZED)) == 33
    assert current(root_of_trial(str(root), SIZED, trial.name), SIZED) == current(undisturbed.root, SIZED)
    remove_trial(str(root), trial)
    assert not (root / ".trials").exists()
    assert bytes_of(root / SIZED) == there, "leases are gone too"
    with work_folder("verify") as work:
        found = verify_pipeline(storage, which=[storage_newest(root)], work=work)
    assert found.success, found


def current(root: Path | str, name: str) -> dict[Interval, tuple[int, list[tuple[int, int]]]]:
    """Of each interval the digest of its state and its output's bytes, as they are current; also of those whose state is gone."""
    log = read_log(open_storage(join_url(str(root), name)))
    span = Interval(day(0).start, day(LAST + 10).start)
    return {
        interval: (made.digest, sorted((o.handle.size_bytes, o.handle.crc32c) for o in made.outputs))
        for interval, made in made_within(log, span).items()
    }


def storage_newest(root: Path) -> int:
    return read_log(open_storage(join_url(str(root), SIZED))).head_id


def _without_leases(folder: Path) -> dict[str, str]:
    """A trial that begins holds the checkpoint which it is forked from."""
    return {path: found for path, found in bytes_of(folder).items() if not path.startswith("leases/")}


def _ended(process: subprocess.Popen[str]) -> int:
    code = process.wait()
    assert process.stdout is not None
    process.stdout.close()
    return code
