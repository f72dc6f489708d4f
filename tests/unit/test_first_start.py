"""The first run of a pipeline that starts in the past, and of a pipeline whose schedule has changed: what the message says and offers."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from typer.testing import CliRunner

from cairn.command.cli import app
from cairn.driver import driver
from cairn.operations.intervals import process_interval
from cairn.operations.intervals.first_start import with_choices
from cairn.pipeline import Pipeline
from cairn_operators.process_data_interval import _is_newest_first
from pipelines.aircraft import AIRCRAFT
from state_backend.checkpoint.choose_base import choose_base
from state_backend.checkpoint.log import Log
from state_backend.values.errors import StateGapError
from state_backend.values.intervals import Interval, to_ms
from state_backend.values.operation_parameters import Call, ProcessInterval
from state_backend.values.records import NO_PERMISSIONS, RunRef
from state_backend.values.schedule import (
    Cron,
    Every,
    Schedule,
    count_between,
    encode,
    interval_before,
    starting_between,
)
from tests.support.checkpoints import record
from tests.support.log_in_memory import log_in_memory

START = datetime(2024, 1, 1, tzinfo=UTC)
BERLIN = ZoneInfo("Europe/Berlin")


def pipeline(schedule: Any, start: datetime = START) -> Pipeline:
    return replace(AIRCRAFT, name="p", start=start, schedule=schedule)


def refusal(of: Pipeline, interval: Interval, *, newest_first: bool = True) -> StateGapError:
    with pytest.raises(StateGapError) as refused:
        choose_base(
            log_in_memory({}), of.name, interval, NO_PERMISSIONS, to_ms(of.start), schedule=of.declared_schedule
        )
    return with_choices(refused.value, of, interval, newest_first=newest_first)


@pytest.mark.long("seconds", runs_in="ci")
def test_the_refusal_of_a_late_first_interval_lists_choices_with_interval_counts() -> None:
    newest = Interval(datetime(2026, 11, 25, 16, tzinfo=UTC), datetime(2026, 11, 25, 17, tzinfo=UTC))
    error = refusal(pipeline("@hourly"), newest)
    assert str(error).splitlines() == [
        "p [2026-11-25T16:00:00Z, 2026-11-25T17:00:00Z): this is not the pipeline's first interval, and the pipeline has no checkpoint.",
        "Airflow ran the newest interval first, because the DAG's catchup is off. The first interval starts at 2024-01-01T00:00:00Z, "
        "about 25,000 intervals earlier. Nothing was committed. Choose:",
        "- Begin with this interval: in the Pipeline set start=datetime(2026, 11, 25, 16, tzinfo=UTC), and set the DAG's start_date to the "
        "same time. Then clear this task.",
        '- Begin at 2024-01-01T00:00:00Z with longer intervals, if the source can read them: set schedule="@daily" (1,060 intervals) or '
        'schedule="@monthly" (35 intervals) in the DAG, and in the Pipeline if it declares a schedule. Then run the command below.',
        "- Keep start and schedule: run all about 25,000 intervals in order, then clear this task. Command:",
    ]
    assert error.rerun is not None
    assert (error.rerun.first, error.rerun.last) == (START, newest.start - timedelta(hours=1))


@pytest.mark.parametrize(
    ("schedule", "start", "number"),
    [
        ("0 6 * * 1-5", datetime(2024, 3, 26, 6, tzinfo=BERLIN), 7),
        ("0 6 * * 1-5", datetime(2024, 3, 26, 6, tzinfo=BERLIN), 3),
        ("0 0 L * *", datetime(2024, 1, 31, tzinfo=ZoneInfo("Asia/Kolkata")), 13),
        (timedelta(hours=5), START, 40),
    ],
)
def test_the_offered_rerun_covers_every_earlier_interval(schedule: Any, start: datetime, number: int) -> None:
    of = pipeline(schedule, start)
    declared = of.declared_schedule
    assert declared is not None
    every = list(starting_between(declared, start, start + timedelta(days=500)))
    error = refusal(of, every[number], newest_first=False)
    assert error.rerun is not None
    assert list(starting_between(declared, error.rerun.first, error.rerun.last)) == every[:number]
    assert "catchup" not in str(error) and "longer" not in str(error) and f" {number} intervals earlier" in str(error)


def test_the_suggested_start_is_valid_code_in_the_time_zone_of_the_declared_start() -> None:
    of = pipeline("0 6 * * 1-5", datetime(2024, 3, 26, 6, tzinfo=BERLIN))
    newest = interval_before(Cron("0 6 * * 1-5", "Europe/Berlin"), datetime(2024, 4, 9, 6, tzinfo=BERLIN))
    assert newest is not None
    text = str(refusal(of, newest))
    code = text.partition("set start=")[2].partition(", and set")[0]
    later = eval(code, {"datetime": datetime, "ZoneInfo": ZoneInfo})
    assert code == 'datetime(2024, 4, 8, 6, tzinfo=ZoneInfo("Europe/Berlin"))'
    moved = replace(of, start=later)
    assert choose_base(log_in_memory({}), "p", newest, NO_PERMISSIONS, to_ms(moved.start)) is None


@pytest.mark.parametrize(
    ("schedule", "last", "most", "expected"),
    [
        (Every(3_600_000), START + timedelta(hours=5), 3, (6, True)),
        (Every(3_600_000), START - timedelta(hours=2), 3, (0, True)),
        (Cron("0 6 * * 1-5", "Europe/Berlin"), START + timedelta(days=6), 20, (5, True)),
        (Cron("0 * * * *"), START + timedelta(hours=20_000), 1000, (20_000, False)),
        (Cron("0 * * * *"), START + timedelta(hours=999), 1000, (1000, True)),
    ],
)
def test_intervals_are_counted(schedule: Schedule, last: datetime, most: int, expected: tuple[int, bool]) -> None:
    assert count_between(schedule, START, last, most) == expected
    if expected[1]:
        assert expected[0] == len(list(starting_between(schedule, START, last)))


@pytest.mark.parametrize(
    ("kind", "catchup", "said"), [("scheduled", False, True), ("scheduled", True, False), ("manual", False, False)]
)
def test_the_driver_mentions_catchup_only_for_scheduled_runs_with_catchup_off(
    kind: str, catchup: bool, said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("check_running", "use_this_python"):
        monkeypatch.setattr(process_interval, name, lambda *_: None)
    monkeypatch.setattr(process_interval, "in_zone_of", lambda *_: nullcontext())
    monkeypatch.setattr(driver.Driver, "connect", lambda *_: None)
    monkeypatch.setattr(driver, "load_pipeline", lambda _: pipeline(None))
    request = ProcessInterval(
        root=f"file://{tmp_path}",
        code="m:P",
        start=datetime(2024, 2, 1, tzinfo=UTC),
        end=datetime(2024, 2, 2, tzinfo=UTC),
        attempt="a",
        run=RunRef(run_id="r", clear_number=0, try_number=1),
        schedule=encode(Cron("@daily")),
        newest_first=_is_newest_first(
            {"dag_run": SimpleNamespace(run_type=kind), "dag": SimpleNamespace(catchup=catchup)}
        ),
    )
    with pytest.raises(StateGapError, match="31 intervals earlier") as refused:
        driver.process(request, driver.Driver(call=Call(spark="local"), token=None, conf={}))
    assert ("catchup is off" in str(refused.value)) is said
    assert list(tmp_path.iterdir()) == []


def test_status_of_an_empty_pipeline_names_the_commands_for_its_first_interval(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "HEAD.json").write_text("")
    said = CliRunner().invoke(app, ["status", "--root", f"file://{tmp_path}", "--pipeline", "p", "--dag", "d"]).output
    assert "cairn backfill --dag d --from START --to END" in said
    # A DAG whose first run was refused has left no file: its page names this command.
    (tmp_path / "p" / "HEAD.json").unlink()
    none = CliRunner().invoke(app, ["status", "--root", f"file://{tmp_path}", "--pipeline", "p"])
    assert none.exit_code == 2 and "If the pipeline never ran: its first interval begins" in none.stderr
    assert f"\ncairn run --code module:NAME --root file://{tmp_path}\n" in none.stderr


DAILY, SIX = Cron("0 0 * * *"), Cron("0 6 * * *")
DAYS = list(starting_between(DAILY, START, START + timedelta(days=9)))


def daily_log() -> Log:
    made = {n: record(n, DAYS[n - 1], n - 1 or None, schedule=DAILY, pipeline_start_ms=to_ms(START)) for n in (1, 2)}
    return log_in_memory(made)


def gap(schedule: Schedule | None, start: datetime, end: datetime) -> StateGapError:
    with pytest.raises(StateGapError) as refused:
        choose_base(daily_log(), "p", Interval(start, end), NO_PERMISSIONS, to_ms(START), schedule=schedule)
    return refused.value


def test_after_a_change_of_the_schedule_one_interval_closes_the_gap() -> None:
    six = DAYS[2].start + timedelta(hours=6)
    error = gap(SIX, six, six + timedelta(days=1))
    assert error.rerun is None
    assert str(error).splitlines()[1:] == [
        "The schedule has changed from cron '0 0 * * *' in UTC to cron '0 6 * * *' in UTC, and no interval of the new schedule begins at "
        "2024-01-03T00:00:00Z.",
        "Run one interval outside of the schedule, from there to 2024-01-03T06:00:00Z:",
        "cairn run --code module:NAME --root memory:// --from 2024-01-03T00:00:00Z --every 6h",
    ]


def test_a_new_schedule_that_fits_fills_the_gap_with_its_own_intervals() -> None:
    error = gap(Cron("0 */6 * * *"), DAYS[3].start, DAYS[3].start + timedelta(hours=6))
    assert error.rerun is not None
    assert (error.rerun.first, error.rerun.last) == (DAYS[2].start, DAYS[2].start + timedelta(hours=18))
    recorded = gap(None, DAYS[3].start, DAYS[3].start + timedelta(hours=6))
    assert recorded.rerun is not None and recorded.rerun.last == DAYS[2].start
