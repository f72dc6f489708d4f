"""Event times of type TIMESTAMP_NTZ are wall times of the pipeline's zone: for each processor, form, rule and zone."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from itertools import pairwise, product
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from cairn.rows.watermark import EventTime
from cairn.testing import PipelineTester
from state_backend.values.errors import UsageError
from state_backend.values.intervals import to_ms
from state_backend.values.zones import settled_wall_ms, zone_of
from tests.support.every_processor import FORMS, HOUR, READY_MADE, SCHEMA, declared, made_tester, row
from tests.support.tiers import long_after

MONDAY = datetime(2024, 1, 15, 6, tzinfo=UTC)


def text(ms: int) -> str:
    return (datetime(1970, 1, 1) + timedelta(milliseconds=ms)).isoformat()


@pytest.mark.parametrize(
    ("zone", "at", "wall"),
    [
        ("UTC", "2024-03-10T07:59Z", "2024-03-10T07:59:00"),
        ("+05:30", "2024-03-10T07:59Z", "2024-03-10T13:29:00"),
        # Chicago goes from 02:00 to 03:00.
        ("America/Chicago", "2024-03-10T07:59Z", "2024-03-10T01:59:00"),
        ("America/Chicago", "2024-03-10T08:00Z", "2024-03-10T03:00:00"),
        # Chicago goes from 02:00 back to 01:00: in the first hour, the wall time waits for the second one.
        ("America/Chicago", "2024-11-03T05:59Z", "2024-11-03T00:59:00"),
        ("America/Chicago", "2024-11-03T06:00Z", "2024-11-03T01:00:00"),
        ("America/Chicago", "2024-11-03T06:59:59.999Z", "2024-11-03T01:00:00"),
        ("America/Chicago", "2024-11-03T07:00Z", "2024-11-03T01:00:00"),
        ("America/Chicago", "2024-11-03T07:30Z", "2024-11-03T01:30:00"),
        ("Australia/Lord_Howe", "2024-04-06T14:45Z", "2024-04-07T01:30:00"),
        ("Australia/Lord_Howe", "2024-04-06T15:15Z", "2024-04-07T01:45:00"),
        ("Asia/Tokyo", "0001-01-01T00:00Z", "0001-01-01T09:18:59"),
        ("Asia/Tokyo", "9999-12-31T23:00Z", "9999-12-31T23:00:00"),
    ],
)
def test_the_settled_wall_time_stands_still_in_the_first_of_two_repeated_hours(zone: str, at: str, wall: str) -> None:
    assert text(settled_wall_ms(to_ms(datetime.fromisoformat(at)), zone_of(zone).rules)) == wall


@pytest.mark.parametrize(
    ("zone", "day"),
    [
        ("Europe/Berlin", "2024-10-27"),
        ("Australia/Lord_Howe", "2024-04-06"),
        ("Antarctica/Casey", "2022-03-12"),
        ("Africa/Cairo", "2024-10-31"),
    ],
)
def test_the_settled_wall_time_is_the_least_wall_time_of_all_later_instants(zone: str, day: str) -> None:
    rules = ZoneInfo(zone)
    instants = [datetime.fromisoformat(day).replace(tzinfo=UTC) + timedelta(minutes=m) for m in range(0, 2880)]
    walls = [to_ms(at.astimezone(rules).replace(tzinfo=UTC)) for at in instants]
    assert any(later < wall for wall, later in pairwise(walls))
    for n in range(0, 2880 - 300, 5):
        assert settled_wall_ms(to_ms(instants[n]), rules) == min(walls[n:])


@pytest.mark.parametrize(
    ("zone", "rule"),
    long_after(1, product(("America/Chicago", "Asia/Tokyo"), ("interval", "observed")), "one zone and rule is enough"),
)
@pytest.mark.parametrize("case", [*long_after(2, READY_MADE, "a second for each processor", runs_in="ci"), *FORMS])
def test_a_pipeline_in_a_zone_gives_the_results_of_utc_for_the_same_wall_times(case: str, zone: str, rule: str) -> None:
    """Intervals of hours in a zone have the rows, late rows, timers and state of the intervals of UTC with the same wall times."""
    wall = MONDAY.replace(tzinfo=None)
    start = wall.replace(tzinfo=zone_of(zone).rules)
    there = made_tester(case, start.astimezone(UTC), time_zone=zone, watermark=rule)
    here = made_tester(case, MONDAY, time_zone="UTC", watermark=rule)
    late = 0
    for hour in range(6):
        minutes = (10, 50, -30, -400)
        rows = [row(wall + hour * HOUR + timedelta(minutes=m), 4 * hour + n) for n, m in enumerate(minutes)]
        results = [tester.run(rows) for tester in (there, here)]
        late += len(results[0].late)
        assert results[0].output == results[1].output, hour
        assert results[0].late == results[1].late
        assert there.timers() == here.timers()
    assert late > 0 or case == "TumblingWindow, early"  # Its windows last a day.
    for state in [named.name for named in there.checkpoints[-1].content.states]:
        assert there.state(state) == here.state(state)


@pytest.mark.parametrize(
    ("zone", "start", "hours"),
    [
        ("America/Chicago", "2024-11-03T03:00Z", 8),
        ("America/Chicago", "2024-03-10T05:00Z", 8),
        ("Europe/Berlin", "2024-10-26T22:00Z", 8),
    ],
)
@pytest.mark.parametrize("case", ["TumblingWindow", "row"])
def test_over_a_change_of_clocks_no_row_is_late_and_each_hour_of_the_wall_comes_once(
    case: str, zone: str, start: str, hours: int
) -> None:
    rules, begin = zone_of(zone).rules, datetime.fromisoformat(start)
    tester = made_tester(case, begin, time_zone=zone, watermark_delay=timedelta(0))
    walls: list[datetime] = []
    found: list[dict[str, Any]] = []
    for hour in range(hours + 2):
        at = [begin + hour * HOUR + timedelta(minutes=m) for m in (5, 35)] if hour < hours else []
        rows = [one.astimezone(rules).replace(tzinfo=None) for one in at]
        walls += rows
        result = tester.run([row(one, 10 * hour + n) for n, one in enumerate(rows)])
        assert result.late == []
        found += result.output
    if case == "row":
        assert len(found) == len(set(walls)) and found[-1]["rows"] == len(walls)
    else:
        expected: dict[datetime, int] = {}
        for wall in walls:
            expected[wall.replace(minute=0)] = expected.get(wall.replace(minute=0), 0) + 1
        assert {one["window_start"]: one["rows"] for one in found} == expected and len(found) == len(expected)


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("timestamp Japan", "timestamp EST", None),
        ("timestamp_ntz UTC", "timestamp Japan", None),
        ("timestamp_ntz UTC", "timestamp_ntz Etc/UTC", None),
        ("timestamp Japan", "timestamp_ntz Japan", "timestamp_ntz. is in zone 'Japan', but .* in zone 'UTC'"),
        ("timestamp_ntz Japan", "timestamp Japan", "timestamp. is in zone 'UTC', but .* in zone 'Japan'"),
        ("timestamp_ntz Japan", "timestamp_ntz UTC", "timestamp_ntz. is in zone 'UTC', but .* in zone 'Japan'"),
        ("timestamp_ntz Japan older", "timestamp_ntz UTC", "is in zone 'UTC', but .* in zone 'Japan'"),
        ("timestamp Japan older", "timestamp EST", None),
    ],
)
def test_the_zone_in_which_watermarks_count_can_not_change(
    before: str, after: str, says: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows would be late, or none. An older release recorded the zone of the processor alone."""
    for n, (of, zone, *older) in enumerate((before.split(), after.split())):
        if older:
            monkeypatch.setattr(EventTime, "advance", lambda _, time, *__: time)
        pipeline = declared("row", MONDAY, time_zone=zone)
        tester = PipelineTester(pipeline, input_schema=SCHEMA.format(of), every=HOUR, root=f"file://{tmp_path}")
        with pytest.raises(UsageError, match=says) if n and says else nullcontext():
            tester.run([row(MONDAY.replace(tzinfo=None), n)])
