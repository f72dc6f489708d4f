"""Random histories of a few pipelines by many processes, which are paused and killed, with skewed clocks and stale listings.

Processes run and re-run intervals, rewind, quarantine, fork, take and restore savepoints, try and deploy other code, read by leases,
verify and sweep, all on one folder. An oracle in plain Python computes each state and output from the inputs that the log names.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.layout import REPOSITORY
from tests.support.planted_faults import PLANTED
from tests.support.tiers import ALL

LONG = ALL
# First seed and number of histories, each in a process of its own.
PARTS = [(first, 20) for first in range(1000, 1040, 20)] if LONG else [(1, 2)]
OPERATIONS = 40 if LONG else 16
MOST_UNTIL_FOUND = 50


@pytest.mark.parametrize(("first", "count"), PARTS)
@pytest.mark.long("seconds", runs_in="ci")
def test_states_outputs_and_reads_match_the_oracle_and_no_needless_file_remains(
    tmp_path: Path, first: int, count: int
) -> None:
    """Also after everything was let finish and swept. A difference keeps the folder of its history.

    Checkpoints share files, each of which goes with the last checkpoint that names it: F16, F26, F28, F29, F32, F34, F40. Processes that
    stop go on beside the next try, and write after its commit: S9, S11. Older states are read along several branches: S15.
    """
    reports = histories(tmp_path, first, count)
    assert [report["differences"] for report in reports] == [[]] * count
    outcomes = sum((Counter(report["outcomes"]) for report in reports), Counter[str]())
    print(f"{count} histories: {sum(r['commits'] for r in reports)} records, {dict(sorted(outcomes.items()))}")
    if LONG:
        done = {name for name, _, outcome in (o.partition(": ") for o in outcomes) if outcome == "ok"}
        assert done == OPERATIONS_DONE
        assert sum(r["kills"] for r in reports) > count and sum(r["stops"] for r in reports) > count


OPERATIONS_DONE = {
    *("run_range", "process", "commit", "go_back", "quarantine", "fork_off", "take_savepoint", "restore_savepoint"),
    *("try_changed", "deploy", "remove_trials", "read_leased", "export", "read_output", "verify"),
    *("sweep_some", "clean_up", "change_input"),
}


@pytest.mark.long("minutes")
@pytest.mark.parametrize("fault", PLANTED)
def test_random_histories_find_each_planted_fault(tmp_path: Path, fault: str) -> None:
    reports = histories(tmp_path, 2000, MOST_UNTIL_FOUND, "--plant", fault, "--until-found")
    assert reports[-1]["differences"], f"not within {len(reports)} histories"
    print(f"{fault}: found in history {len(reports)}: {reports[-1]['differences'][0][:200]}")


def histories(folder: Path, first: int, count: int, *more: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.support.histories", str(folder), str(first), str(count), *more]
    path = os.pathsep.join([str(REPOSITORY / "jobs"), str(REPOSITORY)])
    done = subprocess.run(
        [*command, "--operations", str(OPERATIONS)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
