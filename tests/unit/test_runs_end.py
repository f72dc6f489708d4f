"""Every run of the tests ends, names the test that crashed or hangs, and fails."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE, STDOUT

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PLANTED = "tests/support/ending_badly.py"


def command_of_make(planted: str) -> str:
    """Return the last command of `make test`, for the planted tests alone."""
    arguments = f"PYTEST_ARGS={planted} -o faulthandler_timeout=3"
    told = subprocess.run(
        ["make", "-n", "-C", str(ROOT), "test", arguments, "WORKERS=1"], capture_output=True, text=True, check=True
    )
    return next(line for line in reversed(told.stdout.splitlines()) if " -m pytest " in line)


@pytest.mark.parametrize("test", ["test_crash", "test_hang_in_c"])
@pytest.mark.long("seconds", runs_in="ci")
def test_a_run_whose_worker_dies_ends_and_names_the_test(test: str) -> None:
    ran = run(command_of_make(f"{PLANTED}::{test}"))
    assert ran.returncode == 1, ran.stdout
    assert f"crashed while running '{PLANTED}::{test}'" in ran.stdout, ran.stdout
    assert "replacing crashed worker" not in ran.stdout
    assert f"in {test}" in ran.stdout.partition("most recent call first")[2], ran.stdout


@pytest.mark.long("seconds", runs_in="ci")
def test_a_teardown_that_hangs_ends_the_run() -> None:
    """In one process, after a failure: pytest's own limit has ended by then."""
    command = command_of_make(f"{PLANTED}::test_hang_after_a_failure")
    ran = run(re.sub(r"-n 1 .*--no-loadscope-reorder", "-p no:xdist", command))
    assert ran.returncode == 1 and "Timeout" in ran.stdout, ran.stdout
    assert "in hangs_at_the_end" in ran.stdout.partition("most recent call first")[2], ran.stdout


@pytest.mark.long("ten seconds: a copy of the repository, and two runs of pytest")
def test_only_the_last_part_of_a_test_run_fails_for_errors_that_no_test_provokes(tmp_path: Path) -> None:
    """The last part fails: its six tests provoke few of the errors that users can meet. The part before it leaves that open."""
    copy = "git ls-files -coz --exclude-standard --deduplicate | xargs -0 cp --parents -t"
    git = "git -c user.name=t -c user.email=t"
    folder, notes = tmp_path / "copy", tmp_path / "notes"
    folder.mkdir()
    assert run(f"{copy} {folder} && cd {folder} && git init -q && git add . && {git} commit -qm x").returncode == 0
    where = f"cd {folder} && PYTHONPATH=jobs:plugins:. CAIRN_TESTS=all CAIRN_PASSED={notes}"
    pytest_ = f"{sys.executable} -m pytest -n 1 -o testpaths=tests/unit/test_phases.py"
    first = run(f"{where} CAIRN_PART=1 CAIRN_PART_SECONDS=0 {pytest_}")
    assert first.returncode == 0 and "no test provokes" not in first.stdout, first.stdout
    last = run(f"{where} CAIRN_PART=2 {pytest_}")
    assert last.returncode == 1 and "no test provokes these" in last.stdout, last.stdout
    shown = re.findall(r"^part (\d), .* minutes: (.*)$", last.stdout, re.MULTILINE)
    assert shown == [("1", "nothing to run; 6 tests left"), ("2", "6 passed; 0 tests left")]


def run(command: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "CAIRN_PART"))}
    with subprocess.Popen(
        ["bash", "-c", command], cwd=ROOT, env=env, stdout=PIPE, stderr=STDOUT, text=True, start_new_session=True
    ) as ran:
        try:
            output, _ = ran.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            os.killpg(ran.pid, signal.SIGABRT)  # faulthandler prints where each process is
            output, _ = ran.communicate()
            pytest.fail(output)
    return subprocess.CompletedProcess(command, ran.returncode, output)


def test_ci_runs_have_limits() -> None:
    """A run that CI starts ends before CI's own limit, so that somebody sees which test it was."""
    limits = re.findall(r"^.*timeout .*--kill-after=1m (\d+)m make ([\w-]+)$", (ROOT / ".ci" / "run").read_text(), re.M)
    assert [target for _, target in limits] == ["lint", "test", "test-versions"]
    assert sum(int(minutes) + 1 for minutes, _ in limits) < 90
    for workflow in (ROOT / ".github" / "workflows").iterdir():
        jobs = yaml.safe_load(workflow.read_text())["jobs"]
        assert jobs and [name for name, job in jobs.items() if "timeout-minutes" not in job] == []
