"""The processor against the oracle, through `PipelineTester`: on real days, and on hand-made cases that say
what must come out, so that processor and oracle can't agree on something wrong."""

from __future__ import annotations

from collections import defaultdict
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest

from cairn.pipeline import Interval
from cairn.testing import PipelineTester
from pipelines.aircraft import AIRCRAFT, READ_SCHEMA
from pipelines.land_flights import day_file, land
from state_backend.values.intervals import to_ms
from tests.oracles.aircraft import OUTPUT_COLUMNS, Expected, archive, expected, row_order

DAY = date(2013, 1, 1)


def run(flights_of_day: dict[date, Any]) -> Expected:
    """One interval per day; the outcome in the oracle's form."""
    tester, output = PipelineTester(AIRCRAFT, input_schema=READ_SCHEMA), {}
    for day, flights in flights_of_day.items():
        start = datetime(day.year, day.month, day.day, tzinfo=UTC)
        ran = tester.run(flights, Interval(start, start + timedelta(days=1)))
        output[day] = sorted(ran.output, key=row_order)
    history = {row.pop("key_tailnum"): row for row in tester.state("history")}
    routes: dict[str, dict[tuple[str, str], int]] = defaultdict(dict)
    for row in tester.state("routes"):
        routes[row["key_tailnum"]][row["user_key_origin"], row["user_key_dest"]] = row["flights"]
    idle_at = {row["key_tailnum"]: to_ms(row["expires_at"]) for row in tester.timers()}
    assert idle_at == {tail: h["idle_timer_ms"] for tail, h in history.items() if h["idle_timer_ms"] is not None}
    return Expected(history=history, routes=dict(routes), rows=output)


def assert_same(found: Expected, wanted: Expected) -> None:
    """Day by day first: a diff of everything at once could not be read."""
    assert found.rows.keys() == wanted.rows.keys()
    for day, rows in wanted.rows.items():
        for got, want in zip(found.rows[day], rows, strict=True):
            assert got == want, day
    assert found.history == wanted.history
    assert found.routes == wanted.routes


@pytest.mark.long("seconds", runs_in="ci")
def test_processor_matches_oracle_on_real_flights(tmp_path: Path) -> None:
    land(tmp_path, first=DAY, last=DAY + timedelta(days=13))
    days = [DAY + timedelta(days=n) for n in range(14)]
    found = run({day: pq.ParquetFile(tmp_path / day_file(day)).read() for day in days})
    assert_same(found, expected(DAY, 14))
    numbers = [row["row_number"] for rows in found.rows.values() for row in rows if row["kind"] == "flight"]
    source = archive()
    assert sorted(numbers) == sorted(source.index[(source.month == 1) & (source.day <= 14)] + 1)


Flight = dict[str, Any]


def flight(
    day: int,
    hour: int = 8,
    *,
    tail: str | None = "N1",
    route: str = "JFK-BOS",
    delay: int | None = 0,
    fate: str = "arrived",
) -> Flight:
    """``day`` counts from 0 (2013-01-01). fate: arrived, diverted or cancelled."""
    origin, dest = route.split("-")
    return {"day": day, "hour": hour, "tailnum": tail, "origin": origin, "dest": dest, "delay": delay if fate == "arrived" else None, "fate": fate}  # fmt: skip


def as_archive(flights: list[Flight]) -> pd.DataFrame:
    days = [DAY + timedelta(days=f["day"]) for f in flights]
    departed, arrived = [f["fate"] != "cancelled" for f in flights], [f["fate"] == "arrived" for f in flights]
    return pd.DataFrame(
        {
            "year": [d.year for d in days],
            "month": [d.month for d in days],
            "day": [d.day for d in days],
            "sched_dep_time": [f["hour"] * 100 for f in flights],
            "dep_time": [float(f["hour"] * 100) if d else None for f, d in zip(flights, departed, strict=True)],
            "arr_time": [float(f["hour"] * 100) if a else None for f, a in zip(flights, arrived, strict=True)],
            "dep_delay": [0.0 if d else None for d in departed],
            "arr_delay": pd.Series([f["delay"] for f in flights], dtype=float),
            "carrier": "UA",
            "flight": 1,
            "tailnum": pd.Series([f["tailnum"] for f in flights], dtype=object),
            "origin": [f["origin"] for f in flights],
            "dest": [f["dest"] for f in flights],
            "distance": 187,
        }
    )


def as_rows(flights: list[Flight], days: int) -> dict[date, list[dict[str, Any]]]:
    rows: dict[date, list[dict[str, Any]]] = {DAY + timedelta(days=n): [] for n in range(days)}
    for number, f in enumerate(flights, 1):
        day, departed = DAY + timedelta(days=f["day"]), f["fate"] != "cancelled"
        row = {
            "row_number": number,
            "scheduled_departure": datetime(day.year, day.month, day.day, f["hour"]),
            "carrier": "UA",
            "flight": 1,
            **{name: f[name] for name in ("tailnum", "origin", "dest")},
            "departed": departed,
            "arrived": f["fate"] == "arrived",
            "departure_delay_minutes": 0 if departed else None,
            "arrival_delay_minutes": f["delay"],
            "distance_miles": 187,
        }
        if day in rows:
            rows[day].append(row)
    return rows


def both(flights: list[Flight], days: int) -> Expected:
    """What processor and oracle agree on."""
    found, wanted = run(as_rows(flights, days)), expected(DAY, days, as_archive(flights))
    assert_same(found, wanted)
    return wanted


def column(outcome: Expected, name: str, kind: str = "flight", tail: str | None = "N1") -> list[Any]:
    return [
        row[name] for rows in outcome.rows.values() for row in rows if (row["kind"], row["tailnum"]) == (kind, tail)
    ]


def idle_days(outcome: Expected, tail: str | None = "N1") -> list[int]:
    of_tail = [
        day for day, rows in outcome.rows.items() for row in rows if (row["kind"], row["tailnum"]) == ("idle", tail)
    ]
    return [(day - DAY).days for day in of_tail]


def test_features_of_a_flight_use_only_earlier_flights() -> None:
    outcome = both([flight(0, 8, delay=10), flight(0, 12, route="BOS-JFK", delay=-4), flight(2, 9, delay=3)], 4)
    assert column(outcome, "prior_flights") == [0, 1, 2]
    assert column(outcome, "prior_mean_delay_minutes") == [None, 10.0, 3.0]
    assert column(outcome, "prior_last_delay_minutes") == [None, 10, -4]
    assert column(outcome, "prior_flights_on_route") == [0, 0, 1]
    assert column(outcome, "last_known_airport") == [None, "BOS", "JFK"]
    assert column(outcome, "continuity_break") == [None, False, False]
    assert column(outcome, "days_since_last_flight") == [None, 0, 2]
    assert outcome.history == {
        "N1": {
            "flights": 3,
            "delays_count": 3,
            "delay_sum_minutes": 9,
            "last_delay_minutes": 3,
            "last_airport": "BOS",
            "last_flown_day": date(2013, 1, 3),
            "recent_delays": [10, -4, 3],
            "idle_timer_ms": to_ms(datetime(2013, 1, 9, tzinfo=UTC)),
        }
    }
    assert outcome.routes == {"N1": {("JFK", "BOS"): 2, ("BOS", "JFK"): 1}}


def test_an_aircraft_is_idle_once_per_rest_of_five_days() -> None:
    flown = {"rests": [0], "again": [0, 8], "fourth day": [0, 4], "fifth day": [0, 5], "sixth day": [0, 6]}
    outcome = both([flight(day, tail=tail, delay=7) for tail, days in flown.items() for day in days], 20)
    assert {tail: idle_days(outcome, tail) for tail in flown} == {
        "rests": [5],
        "again": [5, 13],
        "fourth day": [9],
        "fifth day": [10],
        "sixth day": [5, 11],
    }
    assert column(outcome, "idle_since", "idle", "again") == [DAY, DAY + timedelta(days=8)]
    assert column(outcome, "prior_mean_delay_minutes", "idle", "again") == [7.0, 7.0]


def test_a_route_is_forgotten_ninety_days_after_its_last_flight() -> None:
    """Flown on day 1, it expires at the end of day 91, which is the last interval. A cancelled flight does not keep it."""
    flown = {"after 89": [0, 89, 89], "after 90": [0, 90, 90], "after 91": [0, 91, 91], "kept": [2], "gone": [1]}
    flights = [flight(day, hour, tail=tail) for tail, days in flown.items() for hour, day in enumerate(days)]
    cancelled = [
        flight(0, tail="cancelled"),
        flight(50, tail="cancelled", fate="cancelled"),
        flight(91, tail="cancelled"),
    ]
    renewed = [flight(day, tail="renewed") for day in (0, 2, 91)]
    outcome = both([*flights, *cancelled, *renewed], 92)
    assert {
        tail: column(outcome, "prior_flights_on_route", tail=tail) for tail in (*flown, "cancelled", "renewed")
    } == {
        "after 89": [0, 1, 2],
        "after 90": [0, 0, 1],
        "after 91": [0, 0, 1],
        "kept": [0],
        "gone": [0],
        "cancelled": [0, 1, 0],
        "renewed": [0, 1, 2],
    }
    left = {"after 89": 3, "after 90": 2, "after 91": 2, "kept": 1, "cancelled": 1, "renewed": 3}
    assert outcome.routes == {tail: {("JFK", "BOS"): count} for tail, count in left.items()}
    assert column(outcome, "prior_flights", tail="after 90") == [0, 1, 2]


def test_output_columns_are_the_declared_ones() -> None:
    declared = tuple(part.split()[0] for part in AIRCRAFT.output_schema.split(","))
    assert sorted(declared) == sorted(OUTPUT_COLUMNS)
