"""What a live pipeline does with changed settings of a ready-made processor, as docs/ready-made.md says."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from cairn import Interval, Pipeline
from cairn.aggregates import Count, Max, RunningAggregate, Sum
from cairn.errors import UsageError
from cairn.processors import Deduplicate, Latest, TopN, TumblingWindow
from cairn.testing import PipelineTester

START = datetime(2024, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)
SCHEMA = "k string, at timestamp, v long, w long"
TIMED = {"time_mode": "event", "event_time": "at", "watermark_delay": timedelta(0), "watermark": "interval"}


def at(hour: int, minute: int = 0) -> datetime:
    return START + timedelta(hours=hour, minutes=minute)


def outputs(
    folder: Path,
    old: type,
    new: type,
    before: Sequence[list[tuple[Any, ...]]],
    after: Sequence[list[tuple[Any, ...]]],
    schemas: tuple[str, str] = (SCHEMA, SCHEMA),
    **settings: Any,
) -> list[list[tuple[Any, ...]]]:
    """Run hours with the old processor and the following hours with the new one; return the new one's output, sorted."""
    found = []
    for n, rows in enumerate([*before, *after]):
        changed = n >= len(before)
        pipeline = Pipeline(
            name="changed",
            start=START,
            source=lambda spark, interval: None,
            key=["k"],
            processor=new if changed else old,
            **settings,
        )
        tester = PipelineTester(pipeline, input_schema=schemas[changed], every=HOUR, root=f"file://{folder}")
        made = tester.run(rows, Interval(START + n * HOUR, START + (n + 1) * HOUR)).output
        if changed:
            found.append(sorted(tuple(row.values()) for row in made))
    return found


class Totals(RunningAggregate):
    n = Count()
    total = Sum("v")


class MoreTotals(Totals):
    other = Sum("w")
    most = Max("v")


class OtherColumn(RunningAggregate):
    n = Count()
    total = Sum("w")


class OtherFunction(RunningAggregate):
    n = Count()
    total = Max("v")


@pytest.mark.parametrize(
    ("new", "row"),
    [
        # A new aggregate counts from the first row after the change on.
        (MoreTotals, ("a", 2, 3, 20, 2)),
        # The sum of v continues as a sum of w.
        (OtherColumn, ("a", 2, 21)),
        (OtherFunction, ("a", 2, 2)),
    ],
)
def test_aggregates(new: type, row: tuple[Any, ...], tmp_path: Path) -> None:
    assert outputs(tmp_path, Totals, new, [[("a", at(0), 1, 10)]], [[("a", at(1), 2, 20)]]) == [[row]]


class FourHours(Deduplicate):
    horizon = 4 * HOUR


class EightHours(Deduplicate):
    horizon = 8 * HOUR


class TwoHours(Deduplicate):
    horizon = 2 * HOUR


@pytest.mark.parametrize(
    ("new", "hours"),
    [(EightHours, [8]), (TwoHours, [2, 4, 6, 8])],
)
def test_a_new_horizon_holds_for_keys_that_are_remembered(new: type, hours: list[int], tmp_path: Path) -> None:
    after = [[("a", at(n, 30), n, 0)] if n in (2, 4, 6, 8) else [] for n in range(1, 10)]
    found = outputs(tmp_path, FourHours, new, [[("a", at(0), 0, 0)]], after, **TIMED)
    assert [row[1].hour for rows in found for row in rows] == hours


class TwoBest(TopN):
    n = 2
    order = "v desc"


class ThreeBest(TwoBest):
    n = 3


def test_a_longer_list_lacks_rows_that_were_dropped(tmp_path: Path) -> None:
    before = [[("a", at(0), v, 0) for v in (5, 4, 3)]]
    (found,) = outputs(tmp_path, TwoBest, ThreeBest, before, [[("a", at(1), 1, 0)]])
    assert sorted(row[2] for row in found) == [1, 4, 5]


class ShortWindows(TumblingWindow):
    size = 2 * HOUR
    n = Count()


class LongWindows(TumblingWindow):
    size = 4 * HOUR
    n = Count()


def test_windows_of_another_size_get_wrong_numbers(tmp_path: Path) -> None:
    """The page says not to change the size. Windows that are open keep their starts, so old and new windows overlap."""
    before = [[], [], [("a", at(2), 1, 0)]]
    found = outputs(tmp_path, ShortWindows, LongWindows, before, [[("a", at(3), 1, 0)], [], [], []], **TIMED)
    windows = [(row[1].hour, row[2].hour, row[3]) for rows in found for row in rows]
    assert windows == [(0, 4, 1), (2, 6, 1)]


def test_columns_of_the_input(tmp_path: Path) -> None:
    short, long = "k string, v long", "k string, v long, z string"
    rows = [("a", 1), ("b", 1)]
    assert outputs(tmp_path / "more", Latest, Latest, [rows], [[("a", 2, "z")]], (short, long), order_by=["v"]) == [
        [("a", 2, "z")]
    ]
    with pytest.raises(UsageError, match="field 'v': recorded as bigint, declared as string"):
        outputs(tmp_path / "type", Latest, Latest, [rows], [[("a", "2")]], (short, "k string, v string"))
