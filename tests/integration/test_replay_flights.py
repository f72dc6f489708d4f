"""Replays of random aircraft on real flights, in the three APIs: each equals what was committed, in values and types."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from cairn.operations.coordinator_of import coordinator_of
from cairn.pipeline import Interval, Pipeline
from cairn.replay.local_session import LocalSession
from cairn.replay.replay_key import replay_key
from cairn.testing import PipelineTester
from pipelines.aircraft import AIRCRAFT, READ_SCHEMA, read_flights
from pipelines.land_flights import day_file, land
from state_backend.adapters.open_storage import join_url
from state_backend.inspection.compare_runs import compare_runs
from state_backend.values.retention import KeepLast
from tests.support.changed_aircraft import WRONG
from tests.support.flown import FLOWN
from tests.support.tiers import at_tier, long_after

# An aircraft is idle after five days without a flight. So its timer fires on the sixth day at the earliest.
DAYS = at_tier(fast=7, ci=7, all=60)
KEYS = at_tier(fast=4, ci=4, all=40)
CHANGED_DAYS = at_tier(fast=2, ci=2, all=12)
pytestmark = pytest.mark.long("seconds", runs_in="ci")


def day(n: int) -> Interval:
    start = AIRCRAFT.start + timedelta(days=n)
    return Interval(start, start + timedelta(days=1))


@pytest.fixture(scope="module")
def flights(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("flights")
    land(folder, first=date(2013, 1, 1), last=date(2013, 1, 1) + timedelta(days=DAYS - 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CAIRN_FLIGHTS", str(folder))
        yield folder


def run_days(pipeline: Pipeline, flights: Path, root: Path, days: int = DAYS) -> PipelineTester:
    tester = PipelineTester(pipeline, input_schema=READ_SCHEMA, root=f"file://{root}")
    session: Any = LocalSession("UTC")
    for n in range(days):
        rows = pq.read_table(flights / day_file(day(n).start.date()))
        tester.run(rows, day(n), position=read_flights(session, day(n))[1])
    return tester


def some_keys(flights: Path, seed: int) -> list[Any]:
    """Random aircraft, the flights without an aircraft, and an aircraft that flew only on the first day of six."""
    seen: list[set[Any]] = []
    for n in range(DAYS):
        seen.append(
            {*pq.read_table(flights / day_file(day(n).start.date()), columns=["tailnum"])["tailnum"].to_pylist()}
        )
    every = sorted(set().union(*seen) - {None})
    idle = sorted(seen[0] - set().union(*seen[1:6]) - {None})[0]
    return [*random.Random(seed).sample(every, KEYS - 2), None, idle]


@pytest.mark.parametrize("api", long_after(1, ["arrow", "row", "pandas"], "minutes"))
def test_every_interval_of_random_aircraft(api: str, flights: Path, tmp_path: Path) -> None:
    pipeline = replace(FLOWN[api], retention=KeepLast(DAYS + 1))
    tester = run_days(pipeline, flights, tmp_path)
    log = coordinator_of(pipeline, tester.root).log()
    calls: dict[tuple[str, ...], int] = {}
    for key in some_keys(flights, 7):
        for n in range(DAYS):
            found = replay_key(pipeline, (key,), day(n), tester.root, log=log)
            assert found.same, (key, n, found.comparison, found.reasons)
            handlers = tuple(call.handler for call in found.run.calls)
            calls[handlers] = calls.get(handlers, 0) + 1
    timer = "handleExpiredTimers" if api == "arrow" else "handleExpiredTimer"
    assert calls[("handleBatch" if api == "arrow" else "handleInputRows",)] > 0
    assert calls[(timer,)] > 0 and calls[()] > 0


def test_changed_code_differs_for_the_keys_of_the_comparison(flights: Path, tmp_path: Path) -> None:
    """The mistake changes rows only, so both runs start each day from the same state."""
    testers = [run_days(p, flights, tmp_path / name, CHANGED_DAYS) for p, name in ((AIRCRAFT, "old"), (WRONG, "new"))]
    sides = []
    for tester in testers:
        coordinator = coordinator_of(AIRCRAFT, tester.root)
        sides.append((join_url(tester.root, "aircraft"), coordinator.log(), coordinator.storage))
    changed: dict[Interval, set[Any]] = {}

    def keep(interval: Interval, rows: Any) -> None:
        changed[interval] = {row["tailnum"] for row in rows.rows()["old"].to_pylist()}

    (tmp_path / "work").mkdir()
    intervals = [day(n) for n in range(CHANGED_DAYS)]
    compare_runs(
        *(sides[0], sides[1], intervals, tmp_path / "work"), key=["kind", "tailnum", "row_number"], on_rows=keep
    )
    keys, found = some_keys(flights, 8), 0
    keys += sorted(changed[intervals[-1]] - {*keys})[:3]
    for interval in intervals:
        for key in keys:
            replayed = replay_key(WRONG, (key,), interval, testers[0].root, log=sides[0][1])
            assert replayed.same == (key not in changed.get(interval, set())), (key, interval)
            assert not replayed.reasons or replayed.reasons[0].startswith("other code: ")
            found += not replayed.same
    assert found >= 3
