"""A pipeline of ``tally_driver`` under Airflow: its input, its runs by day, and what it would have come to undisturbed."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

from state_backend.adapters.open_storage import open_storage
from state_backend.checkpoint.log import Log, read_log
from tests.support.checkpoints import day
from tests.support.coordinator import Coordinator
from tests.support.local_stack import AirflowClient
from tests.support.reading import read_output
from tests.support.tally_driver import day_name, write_input

_UNDISTURBED = """
import sys
from tests.support.coordinator import Coordinator
from state_backend.values.records import Permissions, RunRef
from tests.support.checkpoints import day
from tests.support.tally_driver import prepare
from state_backend.adapters.open_storage import join_url, open_storage
root, pipeline, attempts = sys.argv[1], sys.argv[2], sys.argv[3:]
for n, attempt in enumerate(attempts, 1):
    run = RunRef(run_id=attempt, clear_number=0, try_number=1)
    prepare(root, pipeline, day(n), attempt=attempt, run=run, permissions=Permissions())
    Coordinator(open_storage(join_url(root, pipeline)), pipeline).commit(attempt)
"""

# By day: the digest of the state, and the rows of the output.
Results = dict[int, tuple[int, list[dict[str, Any]]]]


class Tally:
    """``name`` is both the DAG's and the pipeline's. Days count from 1."""

    def __init__(self, client: AirflowClient, folder: Path, name: str) -> None:
        self.client = client
        self.name = name
        self.base = folder
        self.folder = folder / name

    # --- what it gets ---------------------------------------------------------------------------------------------------------

    def input(self, n: int, numbers: dict[str, int]) -> None:
        write_input(self.folder, n, numbers)

    def fails_once(self, n: int) -> None:
        self._mark("fail", n, "")

    def slow(self, n: int, seconds: float) -> None:
        self._mark("slow", n, str(seconds))

    def _mark(self, kind: str, n: int, text: str) -> None:
        (self.folder / kind).mkdir(parents=True, exist_ok=True)
        (self.folder / kind / day_name(n)).write_text(text)

    # --- what a person does -----------------------------------------------------------------------------------------------------

    def backfill(self, first: int, last: int, **more: Any) -> int:
        asked = {"max_active_runs": 4, "timeout_s": 60, **more}
        return self.client.create_backfill(self.name, day(first).start, day(last).start, **asked).id

    def clear(self, n: int, *, future: bool = False) -> None:
        self.client.clear(self.name, self.run_of(n), ["process"], future=future)

    def trigger(self, logical_date: str) -> str:
        run_id: str = self.client.trigger(self.name, logical_date)["dag_run_id"]
        return run_id

    # --- what came of it ----------------------------------------------------------------------------------------------------------

    def runs(self) -> dict[int, dict[str, Any]]:
        """The scheduled and backfill runs by day."""
        return {
            datetime.fromisoformat(run["logical_date"]).day: run
            for run in self.client.dag_runs(self.name)
            if run["run_type"] != "manual"
        }

    def run_of(self, n: int) -> str:
        run_id: str = self.runs()[n]["dag_run_id"]
        return run_id

    def wait(self, days: Iterable[int]) -> set[str]:
        runs = self.runs()
        return set(self.client.wait_for_runs(self.name, [runs[n]["dag_run_id"] for n in days], timeout_s=600).values())

    def tries(self, n: int) -> int:
        return len(self.client.tries(self.name, self.run_of(n), "process"))

    def process_log(self, n: int) -> str:
        run = self.run_of(n)
        tries = range(1, self.tries(n) + 1)
        return "\n".join(line for number in tries for line in self.client.log(self.name, run, "process", number))

    def log(self) -> Log:
        return read_log(open_storage(f"file://{self.base}/state/{self.name}"))

    def mine(self, last: int | None = None) -> Results:
        """What counts for each day, up to the ``last``."""
        return _results(self.base / "state" / self.name, last)

    def undisturbed(self, last: int) -> Results:
        """What the same input comes to, one day after the other, without Airflow."""
        with tempfile.TemporaryDirectory(prefix="cairn-tally-") as text:
            folder = Path(text)
            shutil.copytree(self.folder / "input", folder / self.name / "input")
            attempts = [str(uuid.uuid4()) for _ in range(last)]
            command = [sys.executable, "-c", _UNDISTURBED, f"file://{folder}/state", self.name, *attempts]
            subprocess.run(command, check=True, env={**os.environ, "CAIRN_TALLY": text}, timeout=600)
            return _results(folder / "state" / self.name, last)

    def assert_one_at_a_time(self) -> None:
        """No two tries computed at the same time."""
        lines = (self.folder / "trace").read_text().splitlines()
        tries = sorted((json.loads(line) for line in lines), key=lambda t: t[3])
        assert all(before[4] <= after[3] for before, after in itertools.pairwise(tries)), tries


def _results(root: Path, last: int | None) -> Results:
    coordinator = Coordinator(open_storage(str(root)), root.name)
    found = {}
    for end in sorted({record.content.interval.end for record in coordinator.log().completed()}):
        n = (end - day(1).start).days
        if last is None or n <= last:
            record = coordinator.record(end)
            found[n] = (record.content.digest, read_output(root, record))
    return found


def day_of(n: int) -> str:
    return day(n).start.isoformat()
