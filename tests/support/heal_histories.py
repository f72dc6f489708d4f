"""Random troubles of a pipeline of `tally_driver` under Airflow, and `cairn heal`, which ends them."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from state_backend.adapters.open_storage import open_storage
from state_backend.values.errors import StorageUnavailable
from tests.support.checkpoints import day
from tests.support.coordinator import Coordinator
from tests.support.local_stack import RestError
from tests.support.tally import Tally, day_of
from tests.support.waiting import wait_until

DAYS = 6

DAGS = """
# Airflow DAGs.
import os
from datetime import timedelta
from cairn_operators.airflow_versions import CronDataIntervalTimetable
from cairn_operators import stateful_pipeline
from tests.support.checkpoints import START
from tests.support.tally_dags import DRIVER, ROOT

for seed in range(@FIRST@, @LAST@):
    made = stateful_pipeline(
        f"heal_{seed}", "unused:TALLY", ROOT, schedule=CronDataIntervalTimetable("0 0 * * *", timezone="UTC"),
        start_date=START, end_date=START + timedelta(days=20), pipeline=f"heal_{seed}",
        process={"retries": 0, "retry_delay": timedelta(seconds=1), "start_patience": timedelta(seconds=5)},
        checkpoint={"retries": 0, "retry_delay": timedelta(seconds=1)},
    )
    made.get_task("process").driver_module = DRIVER
    globals()[made.dag_id] = made
"""


class History:
    """One pipeline, what happens to it, and how it is healed. `told` says what happened."""

    def __init__(self, days: Tally, seed: int, env: Mapping[str, str]) -> None:
        self.days = days
        self.env = env
        self.chance = random.Random(seed)
        self.told: list[str] = [f"seed {seed}"]
        self.fails = False
        self.number = 0  # Another one in each input, so that each correction changes the state.

    # --- troubles -----------------------------------------------------------------------------------------------------

    def happen(self) -> None:
        """Let some days run, then spoil, fail, refuse and leave out some of them."""
        chance, days = self.chance, self.days
        for n in range(1, DAYS + 1):
            self.correct(n)
        done = chance.randint(2, DAYS - 1)
        self.tell(f"days 1 to {done} run")
        days.backfill(1, done, max_active_runs=1)
        states = days.wait(range(1, done + 1))
        assert states == {"success"}, states
        for n in chance.sample(range(1, done + 1), chance.randint(1, 2)):
            self.run_again(n, fails=chance.random() < 0.4)
        if chance.random() < 0.4:
            self.refuse(chance.randint(1, done))
        trouble = chance.choice([self.no_backfill, self.open_backfill, self.paused_backfill, self.cancelled_backfill])
        trouble()
        if chance.random() < 0.2:
            self.tell("the DAG is paused")
            days.client.pause(days.name, True)

    def correct(self, n: int) -> None:
        self.number += 1
        self.days.input(n, {"every": n, f"only{n}": self.number})

    def run_again(self, n: int, *, fails: bool) -> None:
        self.tell(f"day {n} is corrected and cleared{', and fails' if fails else ''}")
        self.correct(n)
        if fails:
            self.days.fails_once(n)
        self.days.clear(n)
        wait_until(lambda: self.has_ended_or_waits(n), 600, f"day {n} has ended, or waits")

    def has_ended_or_waits(self, n: int) -> bool:
        """It waits behind a stale day."""
        run = self.days.runs()[n]
        tasks = {t["task_id"]: t["state"] for t in self.days.client.task_instances(self.days.name, run["dag_run_id"])}
        return run["state"] in ("success", "failed") or tasks["process"] == "deferred"

    def refuse(self, n: int) -> None:
        records = [r for r in self.days.log().completed() if r.content.interval == day(n)]
        self.tell(f"day {n} is quarantined, and corrected")
        self.correct(n)
        url = f"file://{self.days.base}/state/{self.days.name}"
        Coordinator(open_storage(url), self.days.name).quarantine(max(r.id for r in records), "a person says so")

    def no_backfill(self) -> None:
        self.tell("no backfill")

    def backfill(self) -> int | None:
        """Create a backfill; None if an earlier one is still open, since one of its runs waits behind a stale day."""
        first = self.chance.randint(1, DAYS)
        last = self.chance.randint(first, DAYS)
        if self.chance.random() < 0.3:
            self.days.fails_once(first)
            self.fails = True
        self.days.slow(first, 3.0)
        self.tell(f"a backfill of days {first} to {last}{', the first of which fails' if self.fails else ''}")
        try:
            return self.days.backfill(first, last, max_active_runs=self.chance.choice([1, 2]))
        except StorageUnavailable as error:
            self.tell(f"it is refused: {error}")
            return None

    def open_backfill(self) -> None:
        self.backfill()

    def paused_backfill(self) -> None:
        made = self.backfill()
        time.sleep(self.chance.choice([0, 3]))
        self.put(made, "pause")

    def cancelled_backfill(self) -> None:
        made = self.backfill()
        self.put(made, "cancel")
        failed = [n for n, run in self.days.runs().items() if run["state"] == "failed"]
        if failed and self.chance.random() < 0.5:
            n = self.chance.choice(failed)
            self.tell(f"day {n}, which it cancelled, is cleared: Airflow never starts it")
            self.days.clear(n)

    def put(self, backfill: int | None, what: str) -> None:
        if backfill is None:
            return
        self.tell(f"it is set to {what}")
        with suppress(RestError):  # It has ended.
            self.days.client.call("PUT", f"/api/v2/backfills/{backfill}/{what}")

    def tell(self, text: str) -> None:
        self.told.append(text)

    # --- healing ------------------------------------------------------------------------------------------------------

    def heal(self, *more: str, kill_after_s: float | None = None) -> int | None:
        """Type the command; its exit code, None if it was killed."""
        words = ["heal", "--root", f"file://{self.days.base}/state", "--pipeline", self.days.name]
        words += ["--to", day_of(DAYS)[:10], "--airflow", self.days.client.url, *more]
        command = [sys.executable, "-m", "cairn.command.cli", *words]
        env = {**os.environ, **self.env}
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as healing:
            try:
                said, _ = healing.communicate(timeout=kill_after_s or 1800)
            except subprocess.TimeoutExpired:
                healing.kill()
                said, _ = healing.communicate()
                self.tell(f"heal, killed after {kill_after_s} s:\n{said}")
                return None
        self.tell(f"heal {' '.join(more)}, exit code {healing.returncode}:\n{said}")
        return healing.returncode

    def heal_and_check(self) -> None:
        """Heal, sometimes with a kill in between; then everything is what a fresh run gives, and there is nothing to do."""
        if self.chance.random() < 0.3:
            self.heal(kill_after_s=self.chance.uniform(4, 20))
        code = self.heal()
        if code == 1 and self.fails:  # The day that failed has no other cause, so it succeeds now.
            code = self.heal()
        assert code == 0
        assert self.days.mine(DAYS) == self.days.undisturbed(DAYS)
        states = {n: run["state"] for n, run in self.days.runs().items() if n <= DAYS}
        assert states == dict.fromkeys(range(1, DAYS + 1), "success")
        before = self.days.log().head_id
        assert self.heal("--dry-run") == 0 and self.days.log().head_id == before


def play(days: Tally, seed: int, env: Mapping[str, str], notes: Path) -> Any:
    """One history to its end; an error with all that happened if it ends badly."""
    history = History(days, seed, env)
    try:
        history.happen()
        history.heal_and_check()
    except Exception as error:
        history.tell(f"{type(error).__name__}: {error}")
        raise AssertionError("\n".join(history.told)) from error
    finally:
        notes.mkdir(exist_ok=True)
        (notes / f"{seed}.txt").write_text("\n".join(history.told))
