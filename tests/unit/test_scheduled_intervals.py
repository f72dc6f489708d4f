"""Status, messages and `cairn run` of a pipeline whose intervals have no common length: weekdays at 6 in Berlin.

Clocks go forward on Sunday, 31 March 2024.
"""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from airflow.sdk import DAG
from airflow.timetables import interval as core
from dateutil.relativedelta import relativedelta
from pendulum import timezone
from typer.testing import CliRunner

import cairn
from cairn.command.cli import app
from cairn.operations.intervals.plan_heal import calendar_until, health_of
from cairn.operations.intervals.plan_range import named_intervals
from cairn.operations.intervals.run_range import intervals_of
from cairn.pipeline import Pipeline
from cairn.replay.find_interval import find_interval
from cairn.testing import PipelineTester
from cairn_operators.airflow_versions import CronDataIntervalTimetable, DeltaDataIntervalTimetable
from cairn_operators.dag_schedule import schedule_of_dag
from pipelines.aircraft import AIRCRAFT, READ_SCHEMA
from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.checkpoint.choose_base import choose_base
from state_backend.checkpoint.log import Log
from state_backend.checkpoint.plan_retention import with_schedule
from state_backend.formats import record_codec
from state_backend.inspection.pipeline_status import status_of
from state_backend.values.errors import NoSuchCheckpoint, StaleStateError, StateGapError, UsageError
from state_backend.values.intervals import Interval, format_instant
from state_backend.values.operation_parameters import RunRange
from state_backend.values.records import NO_PERMISSIONS, Record
from state_backend.values.schedule import Cron, Every, Schedule, decode, first_interval, starting_between
from tests.support.airflow_names import CronTriggerTimetable
from tests.support.bare_pipeline import bare_pipeline
from tests.support.checkpoints import PIPELINE, content, record
from tests.support.log_in_memory import log_in_memory

WEEKDAYS = Cron("0 6 * * 1-5", "Europe/Berlin")
START = datetime(2024, 3, 26, 5, tzinfo=UTC)
# Tuesday 26 to Friday 5 April; number 3, of Friday, lasts 71 hours.
DAYS = list(starting_between(WEEKDAYS, START, datetime(2024, 4, 5, 5, tzinfo=UTC)))
START_MS = DAYS[0].start_ms


def log_of(count: int, schedule: Schedule | None = WEEKDAYS, stale: dict[int, int] | None = None) -> Log:
    records = {
        n: record(
            n,
            DAYS[n - 1],
            n - 1 or None,
            retained={m: (stale or {}).get(m) for m in range(1, n + 1)},
            schedule=schedule,
            pipeline_start_ms=START_MS,
        )
        for n in range(1, count + 1)
    }
    return log_in_memory(records)


def test_the_next_interval_after_friday_begins_on_monday_s_boundary() -> None:
    assert DAYS[3].end - DAYS[3].start == timedelta(hours=71)
    for count in (3, 4, 5):
        found = status_of(log_of(count), PIPELINE, MemoryStorage())
        assert (found.next, found.base, found.problem) == (DAYS[count], count, None)
    # Without a schedule, the length of the last interval is all that is known.
    guessed = status_of(log_of(4, None), PIPELINE, MemoryStorage()).next
    assert guessed is not None and guessed.end - guessed.start == timedelta(hours=71)


@pytest.mark.parametrize(("there", "wanted"), [(2, 4), (3, 5), (1, 7), (4, 6)])
def test_a_gap_names_every_interval_that_is_missing(there: int, wanted: int) -> None:
    with pytest.raises(StateGapError) as refused:
        choose_base(log_of(there), PIPELINE, DAYS[wanted], NO_PERMISSIONS, START_MS)
    again = refused.value.rerun
    assert again is not None
    assert list(starting_between(WEEKDAYS, again.first, again.last)) == DAYS[there:wanted]
    assert format_instant(DAYS[wanted - 1].start) in str(refused.value)


def test_a_stale_base_names_every_stale_interval() -> None:
    # Checkpoint 5 ran Wednesday again, and Thursday's and Friday's results are stale: Friday's is Monday's base.
    records: dict[int, Record] = {n: log_of(4).whole(n) for n in range(1, 5)}
    retained = {1: None, 2: None, 3: 5, 4: 5, 5: None}
    newest = record(5, DAYS[1], 1, retained=retained, schedule=WEEKDAYS, pipeline_start_ms=START_MS, attempt="other")
    log = log_in_memory({**records, 5: newest})
    with pytest.raises(StaleStateError) as refused:
        choose_base(log, PIPELINE, DAYS[4], NO_PERMISSIONS, START_MS)
    again = refused.value.rerun
    assert again is not None
    assert (again.first, again.last) == (DAYS[2].start, DAYS[3].start)


def test_the_schedule_of_the_newest_interval_wins_and_a_rewind_keeps_it() -> None:
    log, other = log_of(2), Every(3_600_000)
    made = content(DAYS[2], "a", 2)
    assert with_schedule(log, replace(made, schedule=other)).schedule == other
    assert with_schedule(log, made).schedule == WEEKDAYS
    assert with_schedule(log, replace(made, kind="restore", schedule=other)).schedule == WEEKDAYS
    assert with_schedule(log_of(2, None), replace(made, kind="restore", schedule=other)).schedule == other


@pytest.mark.parametrize("schedule", [None, WEEKDAYS, Every(1), Cron("@daily", "Mars/Olympus")])
def test_a_record_keeps_the_schedule_also_in_a_zone_that_this_host_lacks(schedule: Schedule | None) -> None:
    made = record(1, DAYS[0], schedule=schedule)
    read = record_codec.decode(record_codec.encode(made), "r", Record)
    assert read == made and read.content.schedule == schedule


# --- declarations -----------------------------------------------------------------------------------------------------------


def declared(schedule: object, start: datetime = START) -> Pipeline:
    return bare_pipeline(start=start, schedule=schedule)


def test_a_cron_text_uses_the_time_zone_of_the_pipeline_start() -> None:
    berlin = datetime(2024, 3, 26, 6, tzinfo=ZoneInfo("Europe/Berlin"))
    assert declared("0 6 * * 1-5", berlin).declared_schedule == WEEKDAYS
    assert declared("@daily").declared_schedule == Cron("0 0 * * *", "UTC")
    assert declared(timedelta(hours=1)).declared_schedule == Every(3_600_000)
    assert declared(cairn.Cron("0 6 * * MON-FRI", "Europe/Berlin")).declared_schedule != WEEKDAYS
    assert declared(None).declared_schedule is None


@pytest.mark.parametrize(
    ("schedule", "says"),
    [
        ("every day", "no cron expression"),
        ("0 0 30 2 *", "no cron expression"),
        (3600, "no schedule"),
        (timedelta(0), "no length"),
        (Cron("@daily", "Mars/Olympus"), "no time zone"),
    ],
)
def test_an_invalid_schedule_is_refused(schedule: object, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        declared(schedule)


def test_a_cron_whose_zone_is_no_text_is_refused() -> None:
    with pytest.raises(UsageError, match="both must be texts"):
        Cron("@daily", 3)  # type: ignore[arg-type]


def test_the_schedule_of_the_dag_is_used_and_must_equal_a_declared_schedule() -> None:
    assert declared(None).scheduled_by(WEEKDAYS, "the DAG").declared_schedule == WEEKDAYS
    named = declared(Cron("0 6 * * MON-FRI", "Europe/Berlin"))
    assert named.scheduled_by(WEEKDAYS, "the DAG") == named
    with pytest.raises(
        UsageError, match=r"cron '0 6 \* \* MON-FRI' in Europe/Berlin, but the schedule of the DAG is every 1:00:00"
    ):
        named.scheduled_by(Every(3_600_000), "the DAG")


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (CronDataIntervalTimetable("0 6 * * 1-5", timezone="Europe/Berlin"), WEEKDAYS),
        (CronDataIntervalTimetable("@daily", timezone=timezone("Asia/Kolkata")), Cron("@daily", "Asia/Kolkata")),
        (DeltaDataIntervalTimetable(timedelta(minutes=15)), Every(900_000)),
        # Those of Airflow's core, which a DAG of any version may have.
        (core.CronDataIntervalTimetable("0 6 * * 1-5", timezone="Europe/Berlin"), WEEKDAYS),
        (core.DeltaDataIntervalTimetable(timedelta(hours=5)), Every(5 * 3_600_000)),
        (DeltaDataIntervalTimetable(relativedelta(months=1)), None),
        (CronTriggerTimetable("@daily", timezone="UTC"), None),
        (None, None),
    ],
)
def test_the_schedule_of_a_dag_travels_to_the_driver(schedule: object, expected: Schedule | None) -> None:
    found = schedule_of_dag(DAG("p", schedule=schedule, start_date=START))  # type: ignore[arg-type]
    assert (None if found is None else decode(found)) == expected


# --- cairn run --------------------------------------------------------------------------------------------------------------


def asked(
    newest: Interval | None,
    first: str | None = None,
    last: str | None = None,
    *,
    schedule: Schedule = WEEKDAYS,
    **more: Any,
) -> tuple[Interval, ...]:
    """The intervals that `cairn run` names, behind a log whose newest interval is given."""
    log = log_in_memory({} if newest is None else {1: record(1, newest)})
    return intervals_of(RunRange(root="", code="m:P", first=first, last=last, **more), declared(schedule), log)


def test_run_takes_the_intervals_of_the_schedule() -> None:
    assert asked(None, count=3) == tuple(DAYS[:3])
    assert asked(DAYS[2], count=2) == tuple(DAYS[3:5])
    assert asked(DAYS[2], "2024-03-27T05:00Z") == asked(DAYS[2], "2024-03-27T06:00") == (DAYS[1],)
    # A date is a day of Berlin. Monday's interval begins an hour earlier in UTC than Friday's, since clocks changed.
    assert asked(None, "2024-03-29", "2024-04-01") == tuple(DAYS[3:5])
    assert len(asked(None, "2024-03-31", "2024-03-31", schedule=Cron("@hourly", "Europe/Berlin"))) == 23


@pytest.mark.parametrize(
    ("expression", "zone", "day", "count"),
    [
        ("0 2 * * *", "Europe/Berlin", "2024-03-30", 1),
        ("30 2 * * *", "America/New_York", "2024-03-09", 1),
        ("0 */2 * * *", "Europe/Berlin", "2024-03-31", 12),
        ("0 0 * * *", "America/Sao_Paulo", "2018-11-03", 1),
        ("0 0 * * *", "Africa/Cairo", "2023-04-27", 1),
        ("0 0 * * *", "Asia/Beirut", "2022-03-26", 1),
    ],
)
def test_an_interval_that_ends_at_a_time_that_the_clock_skips_is_planned(
    expression: str, zone: str, day: str, count: int
) -> None:
    """`cairn run --from` and `cairn try --from` left it out, `cairn run` from its start refused it, and `cairn heal` jumped over it."""
    schedule = Cron(expression, zone)
    planned = named_intervals(day, day, schedule)
    assert len(planned) == count
    for one in planned:
        assert asked(None, format_instant(one.start), schedule=schedule) == (one,)
        healed = calendar_until(health_of(log_in_memory({})), one.start, schedule, one.start, one.end)
        assert healed == [one]


def test_a_date_to_replay_counts_in_the_time_zone_of_the_schedule() -> None:
    daily = Cron("@daily", "Europe/Berlin")
    one = first_interval(daily, datetime(2024, 3, 29, 12, tzinfo=UTC))
    log = log_in_memory({1: record(1, one, schedule=daily, pipeline_start_ms=one.start_ms)})
    assert find_interval(log, PIPELINE, "2024-03-30").record.id == 1
    assert find_interval(log, PIPELINE, "2024-03-29T23:00Z").record.id == 1
    with pytest.raises(NoSuchCheckpoint, match="starts at 2024-03-30T00:00:00Z"):
        find_interval(log, PIPELINE, "2024-03-30", Cron("@daily"))


def test_run_refuses_a_start_that_no_interval_has() -> None:
    with pytest.raises(UsageError, match="the nearest begin at 2024-03-29T05:00:00Z and 2024-04-01T04:00:00Z"):
        asked(None, "2024-03-30T05:00Z")
    with pytest.raises(UsageError, match="no interval of the schedule"):
        asked(None, "2024-03-30", "2024-03-31")


AS_PRINTED = ["run", "--code", "pipelines.aircraft:AIRCRAFT", "--root"]
DRY = ["--dry-run", "--reprocess", "none"]


def test_run_demands_an_interval_length_if_the_last_two_intervals_differ(tmp_path: Path) -> None:
    tester = PipelineTester(AIRCRAFT, input_schema=READ_SCHEMA, root=str(tmp_path))
    for hours in (24, 71):
        tester.every = timedelta(hours=hours)
        tester.run()
    refused = CliRunner().invoke(app, [*AS_PRINTED, str(tmp_path), *DRY])
    assert refused.exit_code == 2 and "declares no schedule" in refused.stderr, refused.output
    every = refused.stderr.rpartition("the length of the next interval: ")[2].split()
    result = CliRunner().invoke(app, [*AS_PRINTED, str(tmp_path), *DRY, *every])
    assert "[2013-01-04T23:00:00Z, 2013-01-07T22:00:00Z): would be computed" in result.output, result.output


@pytest.mark.long("half a second", runs_in="ci")
def test_run_and_the_tester_follow_the_schedule_over_a_weekend(tmp_path: Path) -> None:
    scheduled = replace(AIRCRAFT, schedule=Cron("0 0 * * 1-5"))
    tester = PipelineTester(scheduled, input_schema=READ_SCHEMA, root=str(tmp_path))
    lengths = [
        done.interval.end - done.interval.start for done in (tester.run(), tester.run(), tester.run(), tester.run())
    ]
    assert lengths == [timedelta(days=n) for n in (1, 1, 1, 3)]
    assert {c.content.schedule for c in tester.checkpoints} == {Cron("0 0 * * 1-5")}
    # The code behind the command declares no schedule: the record's counts.
    result = CliRunner().invoke(app, [*AS_PRINTED, str(tmp_path), "--count", "5", *DRY])
    assert result.exit_code == 0, result.output
    assert "[2013-01-11T00:00:00Z, 2013-01-14T00:00:00Z): would be computed" in result.output
    heal = ["heal", "--code", AS_PRINTED[2], "--root", str(tmp_path), "--pipeline", "aircraft"]
    result = CliRunner().invoke(app, [*heal, "--to", "2013-01-13", "--dry-run", "--json"])
    assert result.exit_code == 1, result.output
    to_run = [one["start"] for one in json.loads(result.stdout)["to_run"]]
    assert to_run == [f"2013-01-{day:02}T00:00:00Z" for day in (7, 8, 9, 10, 11)]
    tester.run([], Interval(datetime(2013, 1, 7, tzinfo=UTC), datetime(2013, 1, 7, 6, tzinfo=UTC)))
    with pytest.raises(UsageError, match="no interval of the schedule"):
        tester.run()
