"""`cairn heal` against an Airflow that answers from memory, and without Airflow; a real one: tests/integration/test_heal.py."""

from __future__ import annotations

import json
import re
import shlex
import time
import urllib.parse
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from typer.testing import CliRunner

from cairn.command import airflow_rest, heal
from cairn.command.airflow_rest import AirflowRest, RestError
from cairn.command.cli import app
from cairn.command.heal_in_airflow import InAirflow
from cairn.command.repair_command import ran_here
from cairn.command.terminal import Terminal
from state_backend.adapters.open_storage import open_storage
from state_backend.checkpoint.log import read_log
from state_backend.values.airflow_commands import heal_command, repair_command
from state_backend.values.errors import Rerun
from state_backend.values.inputs import Edge
from state_backend.values.operation_parameters import Heal
from state_backend.values.schedule import Cron, Every, Schedule
from tests.support.chain_world import World
from tests.support.checkpoints import PIPELINE, START, Folder, day, run
from tests.support.counting import counting

ROOT = "memory://heal"


class FakeAirflow:
    """A DAG whose days end with day 4. A backfill runs all its days at once: ``fails`` names the days whose run fails.
    A range that begins with a day of ``left_out`` lacks this day."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.runs: dict[int, dict[str, Any]] = {}
        self.backfills: list[dict[str, Any]] = []
        self.fails: set[int] = set()
        self.left_out: set[int] = set()
        self.paused = False
        self.changes: list[str] = []
        self.start_date: str | None = START.isoformat()
        self.last, self.zone = "", "Europe/Berlin"  # `last`: the latest of the dry runs

    def ended(self, n: int, state: str) -> None:
        at = f"2024-02-01T00:{len(self.changes):02}:{n:02}+00:00"
        self.runs[n] = {
            "dag_run_id": f"day{n}",
            "data_interval_start": day(n).start.isoformat(),
            "logical_date": day(n).start.isoformat(),
            "run_type": "backfill",
            "state": state,
            **dict.fromkeys(("queued_at", "start_date", "end_date"), at),
        }

    def call_once(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        path, _, query = path.partition("?")
        asked = urllib.parse.parse_qs(query)
        if path.endswith("/details"):
            dates = {"start_date": self.start_date, "end_date": None, "timezone": self.zone}
            return {"is_paused": self.paused, **dates}
        if path.endswith("/dry_run"):
            first, last = (body or {})["from_date"], (body or {})["to_date"]
            self.last = max(self.last, last)
            at_work = {n for n, run in self.runs.items() if run["state"] in ("queued", "running")}
            starts = {n: day(n).start.isoformat() for n in range(1, 5)}
            days = [n for n in starts if n not in at_work and not (n in self.left_out and starts[n] == first)]
            return {"backfills": [{"logical_date": starts[n]} for n in days if first <= starts[n] <= last]}
        if path.endswith("/taskInstances"):
            return {"task_instances": [{"operator_name": "CommitCheckpointOperator", "state": "upstream_failed"}]}
        if path.endswith("/dagRuns"):
            found = [run for run in self.runs.values() if run["state"] in asked.get("state", [run["state"]])]
            return {"dag_runs": found, "total_entries": len(found)}
        if (method, path) == ("GET", "/api/v2/backfills"):
            return {"backfills": self.backfills}
        self.changes.append(f"{method} {path.rpartition('/')[2]}")
        if method == "PATCH":
            self.paused = (body or {})["is_paused"]
            return None
        if method == "PUT":
            self.backfills.clear()
            raise RestError(409, "Backfill is already completed.")
        assert (method, path) == ("POST", "/api/v2/backfills") and body is not None
        for n in range(1, 5):
            start = day(n).start.isoformat()
            if body["from_date"] <= start <= body["to_date"] and not (
                n in self.left_out and start == body["from_date"]
            ):
                self.ended(n, "failed" if n in self.fails else "success")
                if n in self.fails:
                    break
                self.folder.run(day(n), f"b{n}-{len(self.changes)}", run=run(f"day{n}"))
        return {"id": 5, "created_at": "2024-01-31T00:00:00+00:00", "completed_at": "now"}


@pytest.fixture
def folder() -> Folder:
    """Days 1 to 3; then day 1 with another state."""
    storage = open_storage(f"{ROOT}/{PIPELINE}")
    for info in list(storage.list("")):
        storage.delete(info.path)
    made = Folder(storage, days=3)
    made.run(day(1), "again")
    return made


@pytest.fixture
def airflow(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> FakeAirflow:
    fake = FakeAirflow(folder)
    answer(monkeypatch, lambda _, *call: fake.call_once(*call))
    return fake


def answer(monkeypatch: pytest.MonkeyPatch, call_once: Any) -> None:
    monkeypatch.setattr(AirflowRest, "call_once", call_once)
    monkeypatch.setattr(AirflowRest, "_missing", lambda *_: [])
    for module in (airflow_rest, heal):
        monkeypatch.setattr(module.time, "sleep", lambda _: None)


def type_heal(*more: str) -> Any:
    return CliRunner().invoke(app, ["heal", "--root", ROOT, "--pipeline", PIPELINE, "--to", "2024-01-04", *more])


def test_heal_runs_failed_stale_and_missing_intervals_and_a_second_heal_runs_none(airflow: FakeAirflow) -> None:
    airflow.paused = True
    airflow.ended(1, "failed")  # The interval has a result, but the task `checkpoint` of its last run did not succeed.
    planned = type_heal("--dry-run")
    assert planned.exit_code == 1 and airflow.changes == []
    assert "2024-01-01T00:00:00Z to 2024-01-04T00:00:00Z: 1 failed, 2 stale, 1 missing" in planned.stdout
    done = type_heal()
    assert done.exit_code == 0, done.output
    assert f"unpause DAG {PIPELINE}" in done.stdout and all(f"done, {n} of 4" in done.stdout for n in (1, 2, 3, 4))
    assert done.stdout.splitlines()[-1] == f"{PIPELINE} is healthy up to 2024-01-04; 4 intervals ran"
    changes = [*airflow.changes]
    again = type_heal("--json")
    assert (again.exit_code, airflow.changes) == (0, changes)
    assert json.loads(again.stdout) | {"verdict": ""} == {
        "pipeline": PIPELINE, "healthy": True, "ran": 0, "verdict": "", "command": None, "to_run": [], "steps": []
    }  # fmt: skip


@pytest.mark.parametrize(
    ("schedule", "to", "last"),
    [
        (Cron("@daily", "Asia/Kolkata"), "2024-01-04", "2024-01-04T18:29:59.999000+00:00"),
        (Cron("@daily", "Asia/Kolkata"), "2024-01-04T06:00", "2024-01-04T00:30:00+00:00"),
        (Cron("@daily", "Asia/Kolkata"), "2024-01-04T06:00Z", "2024-01-04T06:00:00+00:00"),
        (Every(3_600_000), "2024-01-04", "2024-01-04T22:59:59.999000+00:00"),
        (None, "2024-01-04", "2024-01-04T22:59:59.999000+00:00"),
    ],
)
def test_the_option_to_is_read_in_the_zone_of_the_schedule_else_of_airflow(
    folder: Folder, airflow: FakeAirflow, schedule: Schedule | None, to: str, last: str
) -> None:
    folder.run(day(2), "scheduled", schedule=schedule)
    type_heal("--dry-run", "--to", to)
    assert airflow.last == last


def test_without_airflow_the_option_to_is_read_in_the_zone_of_the_declared_schedule() -> None:
    storage, terminal = open_storage("memory://heal/berlin_spring"), Terminal("", silent=True)
    code: dict[str, Any] = {"code": "tests.support.calendars:BERLIN_SPRING", "pipeline": "berlin_spring"}
    for every, last in (
        (None, "2024-03-29T22:59:59.999000+00:00"),
        (timedelta(days=1), "2024-03-29T23:59:59.999000+00:00"),
    ):
        asked = Heal(root=ROOT, last="2024-03-29", every=every, **code)
        assert heal._Here(asked, storage, terminal, print).last.isoformat() == last


def test_heal_runs_an_interval_that_airflow_omits_at_the_start_of_a_range(airflow: FakeAirflow) -> None:
    """As Airflow does if the clock skips the local time at which the interval ends."""
    airflow.left_out = {1, 2, 3, 4}
    done = type_heal()
    assert done.exit_code == 0, done.output
    assert sorted(airflow.runs) == [2, 3, 4]


def test_heal_stops_at_a_failed_run_and_the_printed_command_continues(airflow: FakeAirflow) -> None:
    airflow.ended(3, "failed")
    airflow.fails = {3}
    stopped = type_heal()
    assert stopped.exit_code == 1
    *_, where, _, command = stopped.stdout.splitlines()
    assert "stop: run day3 of the interval that starts at 2024-01-03T00:00:00Z failed" in stopped.stdout
    assert where == f"Its log says why: http://127.0.0.1:8080/dags/{PIPELINE}/runs/day3"
    assert command == heal_command(ROOT, PIPELINE, "2024-01-04")
    airflow.fails = set()
    assert CliRunner().invoke(app, shlex.split(command)[1:]).exit_code == 0


def test_a_backfill_that_has_ended_meanwhile_is_no_error(airflow: FakeAirflow) -> None:
    airflow.ended(4, "queued")
    later = {"from_date": day(4).start.isoformat(), "to_date": day(4).start.isoformat(), "is_paused": True}
    made = {"id": 3, "created_at": "2024-01-31T00:00:00+00:00", "completed_at": None}
    airflow.backfills.append({**later, **made})

    original = airflow.call_once

    def call(method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        if method == "PUT":
            airflow.ended(4, "failed")
        return original(method, path, body)

    airflow.call_once = call  # type: ignore[method-assign]
    done = type_heal()
    assert done.exit_code == 0, done.output
    assert "end backfill 3 of 2024-01-04T00:00:00Z to 2024-01-04T00:00:00Z" in done.stdout
    # Its run was at work when Airflow was asked for the schedule, and is not forgotten now that it has ended.
    ran = [line for line in done.stdout.splitlines() if "done, " in line]
    assert [line[:12] for line in ran] == [f"[2024-01-{n:02}T" for n in (2, 3, 4)]


def test_intervals_of_manual_airflow_runs_are_not_planned(airflow: FakeAirflow) -> None:
    place = InAirflow(AirflowRest("http://a"), PIPELINE, airflow.folder.storage, day(4).start, print)
    noon = dict.fromkeys(("data_interval_start", "logical_date"), "2024-01-03T12:00:00+00:00")
    for state in ("running", "success"):
        airflow.ended(9, state)
        airflow.runs[9] |= {"run_type": "manual", **noon}
        planned, _ = place.plan(datetime.now(UTC), fresh=False)
    assert [one.interval for one in planned.to_run] == [day(2), day(3), day(4)]


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (RestError(404, "Could not find DAG"), 2, "has no DAG"),
        (RestError(403, "Forbidden"), 2, "CAIRN_AIRFLOW_TOKEN"),
        (ConnectionRefusedError(111, "refused"), 3, "no Airflow answers"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_an_error_of_airflow_is_reported_with_its_cause_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, text: str
) -> None:
    monkeypatch.setattr(AirflowRest, "call_once", mock.Mock(side_effect=error))
    result = type_heal()
    assert result.exit_code == code and text in result.stderr


def test_without_a_checkpoint_the_dag_needs_a_start_date(airflow: FakeAirflow, folder: Folder) -> None:
    airflow.start_date = None
    for info in list(folder.storage.list("")):
        folder.storage.delete(info.path)
    result = type_heal("--dag", "d")
    assert result.exit_code == 2 and "DAG d has no start_date, and its pipeline has no checkpoint" in result.stderr


def test_a_pipeline_that_ran_without_airflow_needs_its_code(folder: Folder) -> None:
    folder.run(day(2), "here", run=run("direct__1"))
    result = type_heal()
    assert result.exit_code == 2 and "add --code module:NAME" in result.stderr
    # The command that `status` prints runs without Airflow too.
    status = ["status", "--root", ROOT, "--pipeline", PIPELINE]
    repaired = f"cairn heal --root {ROOT} --pipeline {PIPELINE} --to 2024-01-03T00:00:00Z --code module:NAME"
    assert CliRunner().invoke(app, status).stdout.endswith(f"\n{repaired}\n")
    in_airflow = CliRunner().invoke(app, [*status, "--dag", "d"]).stdout
    assert in_airflow.splitlines()[-1] == repaired.replace("--code module:NAME", "--dag d")
    # A record with the name needs no option. --code runs here too, unless --dag contradicts it.
    both = type_heal("--code", "m:X", "--dag", "d")
    assert both.exit_code == 2 and "--code runs the intervals here, --dag runs them in Airflow; give one" in both.stderr
    folder.run(day(3), "named", run=run("direct__2"), code="tests.nothing:P")
    assert "can't load the pipeline 'tests.nothing:P'" in type_heal().stderr


def test_a_second_heal_calls_the_sink_for_commits_of_a_killed_heal(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = list[Any]()
    declared = counting(name=PIPELINE, schedule="@daily", sink=lambda *call: told.append(call[2]))
    monkeypatch.setattr(Terminal, "load", lambda *_: declared)
    monkeypatch.setattr(Terminal, "connect", lambda *_: None)
    folder.coordinator.publish(None)
    folder.run(day(2), "killed", run=run("direct__1"), code="module:NAME")
    assert type_heal("--to", "2024-01-02", "--dry-run").exit_code == 0 and told == []
    with monkeypatch.context() as patched:  # The output waits for the group: no session is needed.
        patched.setattr(Terminal, "connect", pytest.fail)
        patched.setattr(Terminal, "load", lambda *_: replace(declared, group="board"))
        assert type_heal("--to", "2024-01-02").exit_code == 0 and told == []
    for _ in range(2):
        assert type_heal("--to", "2024-01-02").exit_code == 0 and told == [day(2)]
    folder.run(day(2), "wrong", run=run("direct__2"), code="module:NAME", digest=7)
    folder.coordinator.quarantine(folder.coordinator.log().head_id, "the sink refuses the rows")
    right = {"run": run("direct__3"), "code": "module:NAME"}
    monkeypatch.setattr(heal._Here, "carry_out", lambda *_: told.append(folder.run(day(2), "right", **right).id))
    assert type_heal("--to", "2024-01-02").exit_code == 0
    assert told == [day(2), folder.coordinator.log().head_id, day(2)], "the sink is called after the repair"


def test_a_restore_does_not_move_a_pipeline_to_airflow(folder: Folder) -> None:
    folder.run(day(2), "here", run=run("direct__1"))
    assert ran_here(read_log(folder.storage))
    words = ["restore", "1", "--root", ROOT, "--pipeline", PIPELINE, "--yes"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    log = read_log(folder.storage)
    assert log.newest is not None and log.newest.content.kind == "restore"
    assert ran_here(log)


def test_without_airflow_overlapping_output_is_replaced_by_cairn_run(folder: Folder) -> None:
    """`cairn heal` replaces no output of intervals with other boundaries."""
    folder.run(day(2), "here", run=run("direct__1"))
    again = Rerun(first=day(2).start, last=day(3).start, replace_overlapping=True)
    command = repair_command(ROOT, PIPELINE, again, code="m:X")
    span = "--from 2024-01-02T00:00:00Z --to 2024-01-03T00:00:00Z"
    assert command == f"cairn run --code m:X --root {ROOT} {span} --reprocess all --replace-overlapping"
    valid = repair_command(ROOT, PIPELINE, Rerun(first=again.first, last=again.last, though_valid=True), code="m:X")
    assert f"{valid} --replace-overlapping" == command
    refused = CliRunner().invoke(app, shlex.split(command)[1:])
    assert refused.exit_code == 2 and "can't load the pipeline 'm:X'" in refused.stderr


def test_without_airflow_each_commit_is_printed_at_once_and_counted_on_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines came after the last commit, and counted "2 of 2" for the second of three."""

    def run_two(_: Any, __: Any, intervals: Any, *___: Any, on_outcome: Any, **____: Any) -> None:
        for interval in intervals[:2]:
            on_outcome(SimpleNamespace(interval=interval), None)
        raise KeyboardInterrupt

    monkeypatch.setattr("cairn.operations.intervals.run_intervals.run_intervals", run_two)
    monkeypatch.setattr(
        "cairn.spark.session.connect", lambda *_, **__: SimpleNamespace(sparkContext=SimpleNamespace(setLogLevel=str))
    )
    code, root = "tests.support.calendars:BERLIN_SPRING", "memory://heal here"
    words = ["--code", code, "--root", root, "--pipeline", "berlin_spring", "--to", "2024-03-29"]
    result = CliRunner().invoke(app, ["heal", *words])
    assert result.exit_code == 130, result.output
    wanted = int(result.stdout.split(" intervals to run")[0].split()[-1])
    assert wanted > 2
    assert [line.split(": ")[1] for line in result.stdout.splitlines()[-2:]] == [
        f"done, {n} of {wanted}" for n in (1, 2)
    ]
    _starting, _ready, stopped, done, *_, command = result.stderr.splitlines()
    assert (stopped, done) == ("Stopped by Ctrl-C", "2 intervals ran; their commits stay")
    assert shlex.split(command) == ["cairn", "heal", *words]


def test_ctrl_c_prints_the_command_that_continues(airflow: FakeAirflow, monkeypatch: pytest.MonkeyPatch) -> None:
    airflow.ended(2, "running")
    stop = mock.Mock(side_effect=KeyboardInterrupt)
    # Not `time.sleep` itself: a thread of another test may sleep too.
    monkeypatch.setattr(heal, "time", SimpleNamespace(**{**vars(time), "sleep": stop}))
    result = type_heal()
    assert result.exit_code == 130
    assert result.stderr.splitlines()[:2] == ["Stopped by Ctrl-C", "0 intervals ran; what Airflow has begun goes on"]
    assert result.stderr.endswith(f"To continue, run:\n{heal_command(ROOT, PIPELINE, '2024-01-04')}\n")


class SlowAirflow(FakeAirflow):
    """The runs of a backfill go on while Airflow is asked twice. ``told`` gets what begins and ends, of all DAGs."""

    def __init__(self, world: World, name: str, told: list[str]) -> None:
        super().__init__(world.folders[name])
        self.world, self.name, self.told, self.asked = world, name, told, 0

    def call_once(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        running = [n for n, run in self.runs.items() if run["state"] == "running"]
        if method == "POST" and path == "/api/v2/backfills" and body is not None:
            for n in (n for n in range(1, 5) if body["from_date"] <= day(n).start.isoformat() <= body["to_date"]):
                self.ended(n, "running")
            self.told.append(f"{self.name} begins")
            return {"id": 5, "created_at": "2024-01-31T00:00:00+00:00", "completed_at": "now"}
        if running and "/dagRuns?" in path:
            self.asked += 1
            for n in running if self.asked > 2 else ():
                self.world.run(self.name, n)
                self.ended(n, "success")
                self.told.append(f"{self.name} ends")
        return super().call_once(method, path, body)


def test_pipelines_that_do_not_depend_on_each_other_heal_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a chain: `mail` and `board` after `sales`, and `all` after both."""
    sales, both = (Edge(pipeline="sales"),), (Edge(pipeline="mail"), Edge(pipeline="board"))
    world = World({"sales": (), "mail": sales, "board": sales, "all": both}, root=f"file://{tmp_path}")
    for name in world.edges:
        for n in (1, 2):
            world.run(name, n)
    world.raw["sales", 2] = 4
    world.run("sales", 2)
    told: list[str] = []
    dags = {name: SlowAirflow(world, name, told) for name in world.edges}
    dags["all"].zone = "Asia/Kolkata"

    def call_once(_: object, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        (name,) = {*re.split("[?=&/]", path), (body or {}).get("dag_id")} & {*dags}
        return dags[name].call_once(method, path, body)

    answer(monkeypatch, call_once)
    where = ["--root", world.root, "--pipeline", "mail", "--to", "2024-01-02", "--chain"]
    done = CliRunner().invoke(app, ["heal", *where])
    assert done.exit_code == 0, done.output
    assert [*map(sorted, (told[:2], told[2:4]))] == [["board begins", "mail begins"], ["board ends", "mail ends"]]
    # The day of `mail` is in Berlin's zone. `all`, whose DAG has another zone, gets the end of the interval of `mail`.
    assert (dags["mail"].last, dags["all"].last) == ("2024-01-02T22:59:59.999000+00:00", "2024-01-02T23:59:59+00:00")
    assert told[4:] == ["all begins", "all ends"] and f"mail: {day(2)}: done, 1 of 1" in done.stdout
    assert world.out_of_date() == {name: set() for name in world.edges}
