"""Pipelines with calendars of many kinds, their DAGs, and the intervals that they must have, computed without croniter and Airflow.

Below the folder `CAIRN_CALENDARS`, `<name>.json` changes a pipeline while its DAG runs: `start` (its start), `schedule` (of the DAG) and
`bumps` (by the start of an interval: a number that changes its input).
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

from cairn import testing
from cairn.operations.intervals.run_intervals import run_intervals
from cairn.pipeline import Interval, Pipeline
from cairn.rows.local_rows import LocalRows
from cairn.spark.ddl import parse_ddl_locally
from state_backend.adapters.open_storage import open_storage
from state_backend.checkpoint.log import read_log
from state_backend.values.intervals import format_instant
from state_backend.values.zones import zone_of
from tests.support.counting import INPUT_SCHEMA, Counting, counting


@dataclass(frozen=True, slots=True)
class Case:
    """A calendar.

    Attributes:
        name: Name of the pipeline and its DAG.
        schedule: The DAG's schedule, as Python code.
        bounds: Boundaries of its intervals.
        declared: The pipeline's own `schedule`, a cron text; None: it declares none.
    """

    name: str
    schedule: str
    bounds: tuple[datetime, ...]
    declared: str | None = None

    @property
    def intervals(self) -> list[Interval]:
        """The intervals that the DAG must run."""
        utc = [bound.astimezone(UTC) for bound in self.bounds]
        return [Interval(start, end) for start, end in pairwise(utc)]


def _days(first: str, count: int, at: time, zone: tzinfo, weekdays: str = "0123456") -> tuple[datetime, ...]:
    days = (date.fromisoformat(first) + timedelta(days=n) for n in range(count))
    return tuple(datetime.combine(day, at, zone) for day in days if str(day.weekday()) in weekdays)


BERLIN, LOS_ANGELES = ZoneInfo("Europe/Berlin"), ZoneInfo("America/Los_Angeles")
INDIA = timezone(timedelta(hours=5, minutes=30))
_CRON = 'CronDataIntervalTimetable("{}", timezone="{}")'
_WEEKDAYS = _CRON.format("0 6 * * 1-5", "Europe/Berlin")
START = datetime(2024, 1, 1, tzinfo=UTC)
CASES = {
    case.name: case
    for case in (
        Case("berlin_spring", _WEEKDAYS, _days("2024-03-27", 8, time(6), BERLIN, "01234"), "0 6 * * 1-5"),
        Case("berlin_autumn", _WEEKDAYS, _days("2024-10-23", 8, time(6), BERLIN, "01234")),
        # On 10 March, 02:30 does not exist: its boundary is 03:30 PDT, 10:30 UTC.
        Case(
            "los_angeles",
            _CRON.format("30 2 * * *", "America/Los_Angeles"),
            tuple(datetime(2024, 3, day, 10 if day <= 10 else 9, 30, tzinfo=UTC) for day in range(8, 14)),
        ),
        Case("kolkata", _CRON.format("@daily", "Asia/Kolkata"), _days("2024-02-26", 6, time(0), INDIA)),
        Case(
            "month_ends",
            _CRON.format("0 0 L * *", "UTC"),
            tuple(datetime(2024, month, day, tzinfo=UTC) for month, day in enumerate((31, 29, 31, 30, 31, 30), 1)),
        ),
        Case(
            "five_hours",
            "DeltaDataIntervalTimetable(timedelta(hours=5))",
            tuple(START + n * timedelta(hours=5) for n in range(6)),
        ),
        Case("moved", _CRON.format("0 0 * * *", "UTC"), _days("2024-01-01", 6, time(0), UTC)),
    )
}

DAGS = """
# Airflow DAGs.
from datetime import timedelta
from cairn_operators.airflow_versions import CronDataIntervalTimetable, DeltaDataIntervalTimetable
from cairn_operators import stateful_pipeline
from tests.support.calendars import CASES, ROOT, changes_of

for case in CASES.values():
    made = stateful_pipeline(
        case.name, f"tests.support.calendars:{case.name.upper()}", ROOT, pipeline=case.name,
        schedule=eval(changes_of(case.name).get("schedule", case.schedule)), start_date=case.bounds[0],
        end_date=case.bounds[-2],
        process={"retries": 0, "retry_delay": timedelta(seconds=1)}, checkpoint={"retries": 0, "retry_delay": timedelta(seconds=1)},
        is_paused_upon_creation=True,
    )
    made.get_task("process").driver_module = "tests.support.calendar_driver"
    globals()[case.name] = made
"""

FOLDER = Path(os.environ.get("CAIRN_CALENDARS", "/nowhere"))
ROOT = f"file://{FOLDER}/state"


def changes_of(name: str, folder: Path | None = None) -> dict[str, Any]:
    """What a test has changed."""
    file = (folder or FOLDER) / f"{name}.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found


def change(folder: Path, name: str, **changes: Any) -> None:
    """Change a pipeline or its DAG, as a person changes the code."""
    (folder / f"{name}.json").write_text(json.dumps({**changes_of(name, folder), **changes}))


def rows_of(name: str, interval: Interval, bump: int = 0) -> list[tuple[str, str, int]]:
    """The input of an interval: the same in every process."""
    chosen = random.Random(f"{name} {interval} {bump}")
    return [(f"u{chosen.randrange(9)}", f"i{chosen.randrange(9)}", chosen.randrange(100)) for _ in range(20)]


def totals_of(name: str, intervals: Sequence[Interval], bumps: dict[str, int]) -> dict[str, int]:
    """The oracle's state: the sum by user."""
    sums: Counter[str] = Counter()
    for interval in intervals:
        for user, _, amount in rows_of(name, interval, bumps.get(format_instant(interval.start), 0)):
            sums[user] += amount
    return dict(sums)


def _read(spark: Any, interval: Interval, name: str) -> Any:
    bump = changes_of(name).get("bumps", {}).get(format_instant(interval.start), 0)
    rows = rows_of(name, interval, bump)
    if not isinstance(spark, testing.PlanningSession):
        return spark.createDataFrame(rows, INPUT_SCHEMA), {"rows": repr(rows)}
    return LocalRows(rows, parse_ddl_locally(INPUT_SCHEMA), zone_of("UTC"), "the input"), {"rows": repr(rows)}


def pipeline_of(name: str) -> Pipeline:
    """The pipeline of a case, as its module declares it."""
    case, start = CASES[name], changes_of(name).get("start")
    made = counting(
        name=name,
        start=case.bounds[0] if start is None else datetime.fromisoformat(start),
        source=partial(_read, name=name),
        schedule=case.declared,
        time_zone="UTC",
    )
    return replace(made, engine=replace(made.engine, cache_dir=None))


def fresh_digest(name: str, intervals: Sequence[Interval], root: Path) -> int:
    """The digest of the state after these intervals, without Airflow."""
    on_shards = partial(testing._on_shards, Counting)
    piped = replace(pipeline_of(name), schedule=None, start=intervals[0].start)
    session: Any = testing.PlanningSession("UTC")
    run_intervals(session, piped, intervals, str(root), on_shards=on_shards)
    newest = read_log(open_storage(f"{root}/{name}")).newest
    assert newest is not None
    return newest.content.digest


for _name in CASES:
    globals()[_name.upper()] = pipeline_of(_name)
