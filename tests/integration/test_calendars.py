"""Calendars through a real Airflow: weekdays in Berlin over both changes of clocks, Los Angeles, Kolkata, month ends, spans of five hours,
a changed schedule, and a first start long after the pipeline's start. Every command that is printed on the way is run, and state and
intervals at the end are those of an oracle, which knows neither croniter nor Airflow's timetables."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from cairn.pipeline import Interval
from state_backend.adapters.open_storage import open_storage
from state_backend.checkpoint.log import Log, read_log
from state_backend.values.intervals import format_instant
from tests.support.airflow_on_postgres import airflow_on_postgres
from tests.support.calendars import CASES, DAGS, INDIA, Case, change, changes_of, fresh_digest, totals_of
from tests.support.local_stack import AirflowServer
from tests.support.printed_commands import run_printed
from tests.support.reading import read_state
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.airflow,
    pytest.mark.long("minutes: runs of Airflow by many calendars; tests/unit tests the calendars themselves"),
]

RECORDED = ["berlin_spring", "berlin_autumn", "los_angeles", "kolkata", "month_ends", "five_hours"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("calendars")
    for name in ("dags", "calendars"):
        (made / name).mkdir()
    (made / "dags" / "calendars.py").write_text(DAGS)
    return made


@pytest.fixture(scope="module")
def airflow(folder: Path) -> Iterator[AirflowServer]:
    """One Airflow for all tests of this file."""
    env = {
        # A test changes DAGs, and waits until Airflow has seen it.
        "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "5",
        "CAIRN_CALENDARS": str(folder / "calendars"),
    }
    with airflow_on_postgres(folder, env, dags=list(CASES)) as server:
        yield server


@dataclass(frozen=True, slots=True)
class Pipe:
    """A pipeline of `tests.support.calendars` under Airflow, and its user."""

    airflow: AirflowServer
    case: Case
    folder: Path

    @property
    def name(self) -> str:
        return self.case.name

    @property
    def root(self) -> str:
        return f"file://{self.folder / 'calendars' / 'state'}"

    def log(self) -> Log:
        return read_log(open_storage(f"{self.root}/{self.name}"))

    def type(self, command: str) -> str:
        """A command in a shell; what it said. AssertionError if it fails."""
        return run_printed(command, self.folder, **self.environment())

    def environment(self) -> dict[str, str]:
        names = ("AIRFLOW", "PYTHONPATH", "CAIRN_CALENDARS", "NO_PROXY", "no_proxy")
        own = {name: value for name, value in self.airflow.env.items() if name.startswith(names)}
        return {**own, "CAIRN_AIRFLOW": self.airflow.client.url}

    def status(self) -> tuple[int, str]:
        program = str(Path(sys.executable).parent / "cairn")
        command = [program, "status", "--root", self.root, "--pipeline", self.name]
        env = {**os.environ, **self.environment()}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout

    def run_of(self, start: datetime) -> str | None:
        for run in self.airflow.client.dag_runs(self.name):
            begun = run["data_interval_start"]
            if begun is not None and datetime.fromisoformat(begun) == start:
                run_id: str = run["dag_run_id"]
                return run_id
        return None

    def ended(self, intervals: list[Interval]) -> set[str]:
        """The states of these intervals' runs, when all have ended."""
        for interval in intervals:
            wait_until(lambda at=interval.start: self.run_of(at), 120, f"a run of {interval}")
        ids = [run_id for i in intervals if (run_id := self.run_of(i.start)) is not None]
        return set(self.airflow.client.wait_for_runs(self.name, ids, timeout_s=400).values())

    def backfill(self, first: Interval, last: Interval) -> None:
        self.type(
            f"cairn backfill --dag {self.name} --from {format_instant(first.start)} --to {format_instant(last.start)}"
        )

    def refusal(self, interval: Interval) -> str:
        """Why the run of an interval failed."""
        assert self.ended([interval]) == {"failed"}
        run_id = self.run_of(interval.start)
        assert run_id is not None
        last = len(self.airflow.client.tries(self.name, run_id, "process"))
        return "\n".join(self.airflow.client.log(self.name, run_id, "process", last))

    def clear(self, interval: Interval) -> None:
        run_id = self.run_of(interval.start)
        assert run_id is not None
        self.airflow.client.clear(self.name, run_id, ["process"])

    def assert_as_the_oracle(self, intervals: list[Interval], root: Path) -> None:
        log = self.log()
        assert sorted(log.current_outputs()) == intervals
        newest = max(log.completed(), key=lambda c: (c.content.interval.end, c.id))
        bumps = changes_of(self.name, self.folder / "calendars").get("bumps", {})
        sums = read_state(self.folder / "calendars" / "state" / self.name, newest, "total", root / "read")
        assert {user: total["sum"] for (user,), total in sums.items()} == totals_of(self.name, intervals, bumps)
        if not bumps:  # In this process the pipelines read no changes.
            assert newest.content.digest == fresh_digest(self.name, intervals, root)


def commands_in(text: str, *programs: str) -> list[str]:
    """The commands that a text prints as lines of their own, the same one once."""
    return list(dict.fromkeys(line for line in text.splitlines() if line.startswith(programs)))


def play(pipe: Pipe, root: Path) -> None:
    """Three problems in turn: the newest interval runs first, an interval is missing, the input of an interval changes. Cairn prints
    commands for each problem. The test runs these commands, and they solve the problem."""
    every = pipe.case.intervals
    # The last interval has no base: nothing is committed yet.
    pipe.backfill(every[-1], every[-1])
    text = pipe.refusal(every[-1])
    assert f"{len(every) - 1} intervals earlier" in text
    (heal,) = commands_in(text, "cairn heal")
    pipe.type(heal)
    wait_until(lambda: pipe.log().head_id == len(every) - 1, 300, "the missing intervals")
    assert pipe.ended(every[:-1]) == {"success"}
    pipe.clear(every[-1])
    assert pipe.ended(every) == {"success"}
    pipe.assert_as_the_oracle(every, root / "first")
    code, said = pipe.status()
    following = pipe.case.bounds[-1].astimezone(UTC)
    assert code == 0 and said.startswith(f"next: [{format_instant(following)}, "), said

    # The second interval gets other input: later ones are stale, and status prints the command that runs exactly those.
    change(pipe.folder / "calendars", pipe.name, bumps={format_instant(every[1].start): 1})
    pipe.clear(every[1])
    assert pipe.ended(every) == {"success"}
    code, said = pipe.status()
    (repair,) = commands_in(said, "cairn heal")
    assert code == 1 and f"--to {format_instant(every[-1].start)} " in repair
    before = pipe.log().head_id
    pipe.type(repair)
    wait_until(lambda: pipe.log().head_id == before + len(every) - 2, 300, "the stale intervals")
    assert pipe.ended(every) == {"success"}
    pipe.assert_as_the_oracle(every, root / "repaired")
    code, said = pipe.status()
    assert code == 0, said
    if pipe.case.name == "kolkata":
        play_days(pipe)


def play_days(pipe: Pipe) -> None:
    """A day in a command is one in India: the UTC day of the same name has the next interval."""
    wanted = pipe.case.intervals[2]
    day = wanted.start.astimezone(INDIA).date()
    before = pipe.log().head_id
    said = pipe.type(f"cairn backfill --dag {pipe.name} --from {day} --to {day} --root {pipe.root}")
    assert f"1 runs from {day} to {day} (Asia/Kolkata)" in said
    wait_until(lambda: pipe.log().head_id == before + 1, 300, f"the interval of {day}")
    newest = pipe.log().newest
    assert newest is not None and newest.content.interval == wanted
    last = pipe.case.intervals[-1].start.astimezone(INDIA).date()
    assert pipe.ended(pipe.case.intervals) == {"success"}
    said = pipe.type(f"cairn heal --root {pipe.root} --pipeline {pipe.name} --to {last} --dry-run")
    assert f"healthy up to {last}" in said


def pipe_of(name: str, airflow: AirflowServer, folder: Path) -> Pipe:
    return Pipe(airflow, CASES[name], folder)


def test_berlin_weekdays_match_oracle_over_clock_change(airflow: AirflowServer, folder: Path, tmp_path: Path) -> None:
    pipe = pipe_of("berlin_spring", airflow, folder)
    assert (pipe.case.intervals[2].end - pipe.case.intervals[2].start) == timedelta(hours=71)
    play(pipe, tmp_path)
    assert str(pipe.log().schedule) == "cron '0 6 * * 1-5' in Europe/Berlin"


def test_each_calendar_gives_the_intervals_of_the_oracle(airflow: AirflowServer, folder: Path, tmp_path: Path) -> None:
    def played(name: str) -> str:
        try:
            play(pipe_of(name, airflow, folder), tmp_path / name)
        except Exception as error:
            return f"{name}: {error!r}"
        return ""

    # Airflow notices the end of a backfill up to half a minute late, so most of the time a calendar waits.
    with ThreadPoolExecutor(3) as pool:
        assert "\n\n".join(filter(None, pool.map(played, RECORDED[1:]))) == ""


@pytest.mark.spark
def test_after_a_change_of_the_schedule_the_printed_command_closes_the_gap(
    airflow: AirflowServer, folder: Path, tmp_path: Path
) -> None:
    pipe = pipe_of("moved", airflow, folder)
    days = pipe.case.intervals
    pipe.backfill(days[0], days[1])
    assert pipe.ended(days[:2]) == {"success"}
    # From now on a day begins at six.
    change_schedule(pipe, 'CronDataIntervalTimetable("0 6 * * *", timezone="UTC")', "0 6 * * *")
    six = Interval(days[2].start + timedelta(hours=6), days[2].end + timedelta(hours=6))
    pipe.backfill(six, six)
    text = pipe.refusal(six)
    (bridge,) = commands_in(text, "cairn run")
    (again,) = commands_in(text, "airflow tasks clear")
    pipe.type(bridge)
    pipe.type(again)
    assert pipe.ended([six]) == {"success"}
    pipe.assert_as_the_oracle([*days[:2], Interval(days[2].start, six.start), six], tmp_path)
    assert str(pipe.log().schedule) == "cron '0 6 * * *' in UTC"


def change_schedule(pipe: Pipe, code: str, expression: str) -> None:
    """Change the DAG's schedule, and wait until Airflow has seen it."""
    change(pipe.folder / "calendars", pipe.name, schedule=code)

    def seen() -> bool:
        return str(pipe.airflow.client.call("GET", f"/api/v2/dags/{pipe.name}")["timetable_summary"]) == expression

    wait_until(seen, 90, f"Airflow knows {expression}", poll_s=1)
