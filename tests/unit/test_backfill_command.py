"""`cairn backfill` against an Airflow that refuses, fails half-way, or is not there; a real one: tests/integration/test_order_of_days.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any
from unittest import mock

import pytest
from typer.testing import CliRunner

from cairn.command import airflow_rest
from cairn.command.airflow_rest import AirflowRest, RestError
from cairn.command.cli import app
from state_backend.adapters.open_storage import open_storage
from state_backend.checkpoint.log import read_log
from state_backend.values.schedule import Cron, Every, Schedule, starting_between
from tests.support.airflow_schedule import backfilled_by_airflow
from tests.support.checkpoints import Folder, day

DATES = [f"2024-01-0{n}T00:00:00+00:00" for n in (1, 2, 3)]


class FakeAirflow:
    """Backfills as Airflow keeps them. ``answers``: what the next calls that create one meet: "ok", "half" (503, with a part of the
    runs), "lost" (503, although the backfill is whole), "locked" (503, nothing left), "busy" (409: a former one still counts) or
    "colleague" (409: somebody else has just created a backfill of other dates)."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.zone = "UTC"
        self.backfills: list[dict[str, Any]] = []
        self.runs = {d: {"logical_date": d, "state": "success", "queued_at": "2023-06-01T00:00+00:00"} for d in DATES}
        self.paused: list[bool] = []
        self.paused_before = False

    def call_once(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        path = path.partition("?")[0]
        if path.endswith("/dry_run"):
            return {"backfills": [{"logical_date": date} for date in DATES if date >= (body or {})["from_date"]]}
        if path.endswith("/details"):
            return {"timezone": self.zone}
        if (method, path) == ("GET", "/api/v2/backfills"):
            return {"backfills": self.backfills}
        if path.endswith("/dagRuns"):
            return {"dag_runs": list(self.runs.values()), "total_entries": len(self.runs)}
        if path.endswith("/cancel"):
            one = self.backfills[int(path.split("/")[-2]) - 1]
            one["completed_at"] = "2024-02-01T00:00:01+00:00"
            self.runs.clear()
            return one
        if path == "/api/v2/dags/clicks" and method == "GET":
            return {"is_paused": self.paused[-1] if self.paused else self.paused_before}
        if method == "PATCH":
            self.paused.append((body or {})["is_paused"])
            return None
        assert (method, path) == ("POST", "/api/v2/backfills") and body is not None
        return self._create(body, self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])

    def _create(self, body: Mapping[str, Any], answer: str) -> Any:
        if answer == "colleague":
            self._create({"from_date": DATES[0], "to_date": DATES[0], "dag_run_conf": None}, "ok")
        if answer == "busy" or any(b["completed_at"] is None for b in self.backfills):
            raise RestError(409, "There is already a running backfill")
        if answer == "locked":
            raise RestError(503, "Database is locked")
        made = {"id": len(self.backfills) + 1, "created_at": "2024-02-01T00:00:00+00:00", "completed_at": None}
        self.backfills.append({**made, **{name: body[name] for name in ("from_date", "to_date", "dag_run_conf")}})
        for date in DATES[: 1 if answer in ("half", "quiet half") else 3] if body["to_date"] > DATES[0] else ():
            self.runs[date] = {"logical_date": date, "state": "queued", "queued_at": "2024-02-01T00:00:00+00:00"}
        if answer in ("half", "lost"):
            raise RestError(503, "Database is locked")
        return made


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeAirflow]:
    def install(*answers: str) -> FakeAirflow:
        fake = FakeAirflow(*answers)
        monkeypatch.setattr(AirflowRest, "call_once", lambda _, *call: fake.call_once(*call))
        monkeypatch.setattr(airflow_rest.time, "sleep", lambda _: None)
        return fake

    return install


def backfill(*more: str, wait: str = "2m") -> Any:
    dates = ["--dag", "clicks", "--from", "2024-01-01", "--to", "2024-01-03"]
    return CliRunner().invoke(app, ["backfill", *dates, *more], env={"CAIRN_AIRFLOW_WAIT": wait})


@pytest.mark.parametrize(
    ("answers", "tries"),
    [
        (["ok"], 1),
        (["locked", "busy", "ok"], 3),
        (["half", "ok"], 2),
        (["half", "half", "locked", "ok"], 4),
        (["lost"], 1),
        (["quiet half", "ok"], 2),  # Airflow said yes, and yet two runs are missing
    ],
)
def test_a_backfill_is_retried_until_whole(server: Callable[..., FakeAirflow], answers: list[str], tries: int) -> None:
    airflow = server(*answers)
    result = backfill("--json")
    assert result.exit_code == 0, result.output
    made = json.loads(result.stdout)
    assert (made["runs"], made["tries"]) == (3, tries)
    active = [b["id"] for b in airflow.backfills if b["completed_at"] is None]
    assert active == [made["id"]] and sorted(airflow.runs) == DATES
    assert airflow.paused == [True] * (halves := sum("half" in a for a in answers)) + [False] * (2 if halves else 1)


@pytest.mark.parametrize("paused", [False, True])
def test_a_failed_backfill_leaves_the_dag_paused_or_unpaused_as_before(server: Any, paused: bool) -> None:
    airflow = server("half", "busy")
    airflow.paused_before = paused
    assert backfill(wait="0s").exit_code == 3 and airflow.paused == [True] + [False] * (not paused)


def test_dates_are_interpreted_in_the_time_zone_of_the_schedule(server: Callable[..., FakeAirflow]) -> None:
    """The newest checkpoint names the zone; without a checkpoint, Airflow's default zone counts."""
    airflow = server("ok")
    airflow.zone = "Europe/Berlin"
    scheduled("kolkata", Cron("@daily", "Asia/Kolkata"))
    scheduled("hours", Every(3_600_000))
    berlin = ("2023-12-31T23:00:00+00:00", "2024-01-03T22:59:59.999000+00:00")
    kolkata = ("2023-12-31T18:30:00+00:00", "2024-01-03T18:29:59.999000+00:00")
    for more, dates, zone in [
        ([], berlin, "Europe/Berlin"),
        (["--root", "memory://backfill"], berlin, "Europe/Berlin"),  # no pipeline has the DAG's id
        (["--root", "memory://backfill", "--pipeline", "kolkata"], kolkata, "Asia/Kolkata"),
        (["--root", "memory://backfill", "--pipeline", "hours"], berlin, "Europe/Berlin"),
    ]:
        airflow.backfills.clear()
        result = backfill(*more)
        assert f"from 2024-01-01 to 2024-01-03 ({zone})" in result.stdout, result.output
        (made,) = airflow.backfills
        assert (made["from_date"], made["to_date"]) == dates
    airflow.backfills.clear()
    instants = ["--from", "2024-01-01T06:00Z", "--to", "2024-01-03T06:00+00:00"]
    assert backfill(*instants).stdout.splitlines()[0].endswith("from 2024-01-01T06:00Z to 2024-01-03T06:00+00:00")


@pytest.mark.parametrize(
    ("schedule", "first"),
    [
        (Cron("0 2 * * *", "Europe/Berlin"), "2024-03-30T01:00:00+00:00"),  # The clock skips 02:00 on 31 March.
        (Cron("0 2 * * *", "Europe/Berlin"), "2024-03-29T01:00:00+00:00"),
        (Cron("0 2 * * *", "Europe/Berlin"), "2024-03-29T01:00:01+00:00"),
        (Cron("0 0 * * *", "Africa/Cairo"), "2023-04-26T22:00:00+00:00"),
        (Every(86_400_000), "2024-03-30T01:00:00+00:00"),
        (Every(500), "2024-04-02T01:59:57+00:00"),
    ],
)
def test_a_range_has_every_interval_that_begins_in_it(
    monkeypatch: pytest.MonkeyPatch, schedule: Schedule, first: str
) -> None:
    """Airflow leaves an interval out of a range that begins with it, if the clock skips the local time of its end."""

    def dry_run(_: AirflowRest, __: str, ___: str, body: Mapping[str, Any]) -> Any:
        span = (datetime.fromisoformat(body[name]) for name in ("from_date", "to_date"))
        return {"backfills": [{"logical_date": i.start.isoformat()} for i in backfilled_by_airflow(schedule, *span)]}

    monkeypatch.setattr(AirflowRest, "call_once", dry_run)
    last = "2024-04-02T02:00:00+00:00"
    body, dates = AirflowRest("http://airflow").backfill_dates({"from_date": first, "to_date": last})
    starts = [i.start for i in starting_between(schedule, datetime.fromisoformat(first), datetime.fromisoformat(last))]
    assert list(map(datetime.fromisoformat, dates)) == starts
    assert dry_run(AirflowRest("http://airflow"), "", "", body)["backfills"] == [{"logical_date": at} for at in dates]


def scheduled(pipeline: str, schedule: Schedule) -> None:
    """A pipeline with one checkpoint of this schedule."""
    storage = open_storage(f"memory://backfill/{pipeline}")
    if read_log(storage).newest is None:
        Folder(storage).run(day(1), "a", schedule=schedule)


def test_an_incomplete_earlier_backfill_is_cancelled_and_recreated(server: Callable[..., FakeAirflow]) -> None:
    airflow = server("half", "ok")
    with pytest.raises(RestError):
        airflow._create(
            {"from_date": DATES[0], "to_date": "2024-01-03T23:59:59.999000+00:00", "dag_run_conf": None},
            airflow.answers.pop(0),
        )
    result = backfill()
    assert (result.exit_code, sorted(airflow.runs)) == (0, DATES)
    assert "backfill 2 of DAG clicks: 3 runs from 2024-01-01 to 2024-01-03" in result.stdout


@pytest.mark.parametrize("conf", [None, {"replace_overlapping": True}])
def test_a_concurrent_backfill_of_another_user_is_not_cancelled(server: Callable[..., FakeAirflow], conf: Any) -> None:
    """Both calls wait for an earlier backfill, and the other call is first: with other dates, or with another setting."""
    airflow = server("colleague" if conf is None else "busy")
    if conf is not None:
        dates = {"from_date": DATES[0], "to_date": "2024-01-03T23:59:59.999000+00:00", "dag_run_conf": conf}
        create = airflow._create

        def busy(body: Mapping[str, Any], answer: str) -> Any:
            if not airflow.backfills:
                create(dates, "ok")
            return create(body, answer)

        airflow._create = busy  # type: ignore[method-assign]
    result = backfill(wait="0s")
    assert result.exit_code == 3 and "backfill 1 of " in result.stderr, result.output
    assert airflow.backfills[0]["completed_at"] is None and True not in airflow.paused


def test_a_complete_backfill_of_the_same_dates_is_waited_for(server: Callable[..., FakeAirflow]) -> None:
    """The same command twice: what the first one began goes on."""
    airflow = server("ok")
    assert backfill().exit_code == 0
    assert backfill(wait="0s").exit_code == 3
    assert [b["completed_at"] for b in airflow.backfills] == [None]


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (
            RestError(401, "Not authenticated"),
            2,
            "Put the token of a user who may edit DAG clicks into the environment variable CAIRN_AIRFLOW_TOKEN",
        ),
        (RestError(404, "Could not find DAG"), 2, "has no DAG 'clicks'"),
        (RestError(422, "future"), 2, "refuses the request"),
        (RestError(500, "Internal Server Error"), 3, "failed: HTTP 500: Internal Server Error; try again"),
        (ConnectionRefusedError(111, "refused"), 3, "start one with 'make ui'"),
    ],
)
def test_an_airflow_error_that_is_not_retried_exits_with_its_code_and_a_hint(
    server: Callable[..., FakeAirflow], monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, text: str
) -> None:
    airflow, refuse = server("ok"), mock.Mock(side_effect=error)
    monkeypatch.setattr(*((airflow, "_create") if code == 2 else (AirflowRest, "call_once")), refuse)
    result = backfill(wait="0s")
    assert result.exit_code == code and text in result.stderr and refuse.call_count == 1


def test_a_reversed_or_unreadable_date_range_is_refused(server: Callable[..., FakeAirflow]) -> None:
    server("ok")
    for first, says in (("2024-01-09", "is after --to 2024-01-03"), ("monday", "is not a date or time")):
        assert (result := backfill("--from", first)).exit_code == 2 and says in result.stderr


def test_dates_without_an_interval_are_refused(
    server: Callable[..., FakeAirflow], monkeypatch: pytest.MonkeyPatch
) -> None:
    server("ok")
    monkeypatch.setattr(AirflowRest, "call_once", lambda *_: {"backfills": [], "timezone": "UTC"})
    result = backfill()
    assert result.exit_code == 2
    assert "nothing to run for DAG clicks from 2024-01-01T00:00:00Z to 2024-01-03T23:59:59.999Z" in result.stderr
