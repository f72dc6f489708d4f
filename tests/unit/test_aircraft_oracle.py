"""The processor against the oracle, without Spark: on real days through a small handle, and on hand-made cases that say
what must come out, so that processor and oracle can't agree on something wrong."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import (
    ExpiredTimerInfo,
    MapState,
    StatefulProcessorHandle,
    TimerValues,
    ValueState,
)

from pipelines.aircraft import AIRCRAFT, AircraftHistory, History
from pipelines.land_flights import day_file, land
from state_backend.values.intervals import to_ms
from tests.oracles.aircraft import OUTPUT_COLUMNS, Expected, archive, expected, row_order

DAY = date(2013, 1, 1)
DAY_MS = 86_400_000


# --- a handle over dicts: Spark's rules for TTL and timers, TwsTester has no TTL and fires timers before the input -------------


class DictHandle(StatefulProcessorHandle):
    def __init__(self) -> None:
        self.key: tuple[str | None, ...] = ()
        self.now_ms = 0
        self.values: dict[str, DictValue] = {}
        self.maps: dict[str, DictMap] = {}
        self.timers: set[tuple[int, tuple[str | None, ...]]] = set()

    def getValueState(self, stateName: str, schema: Any, ttlDurationMs: int | None = None) -> ValueState:
        assert ttlDurationMs is None
        return self.values.setdefault(stateName, DictValue(self))

    def getMapState(
        self, stateName: str, userKeySchema: Any, valueSchema: Any, ttlDurationMs: int | None = None
    ) -> MapState:
        assert ttlDurationMs is not None
        return self.maps.setdefault(stateName, DictMap(self, ttlDurationMs))

    def registerTimer(self, expiryTimestampMs: int) -> None:
        assert (expiryTimestampMs, self.key) not in self.timers
        self.timers.add((expiryTimestampMs, self.key))

    def deleteTimer(self, expiryTimestampMs: int) -> None:
        self.timers.remove((expiryTimestampMs, self.key))


class DictValue(ValueState):
    def __init__(self, handle: DictHandle) -> None:
        self.handle, self.entries, self.updates = handle, {}, 0

    def get(self) -> tuple[Any, ...] | None:
        return self.entries.get(self.handle.key)

    def update(self, newValue: tuple[Any, ...]) -> None:
        self.updates += 1
        self.entries[self.handle.key] = newValue


class DictMap(MapState):
    def __init__(self, handle: DictHandle, ttl_ms: int) -> None:
        self.handle, self.ttl_ms = handle, ttl_ms
        self.entries: dict[Any, dict[Any, tuple[int, Any]]] = defaultdict(dict)

    def getValue(self, key: tuple[Any, ...]) -> Any:
        expiry_ms, value = self.entries[self.handle.key].get(key, (0, None))
        return Row(flights=value[0]) if expiry_ms > self.handle.now_ms else None

    def updateValue(self, key: tuple[Any, ...], value: tuple[Any, ...]) -> None:
        self.entries[self.handle.key][key] = (self.handle.now_ms + self.ttl_ms, value)

    def expire(self) -> None:
        for key, entries in list(self.entries.items()):
            self.entries[key] = {k: e for k, e in entries.items() if e[0] > self.handle.now_ms}


def run(rows_of_day: dict[date, list[Row]]) -> tuple[Expected, DictHandle]:
    """One interval per day, with the same call order as Spark's; the outcome in the oracle's form."""
    handle, processor, output = DictHandle(), AircraftHistory(), {}
    processor.init(handle)
    for day, rows in rows_of_day.items():
        handle.now_ms = to_ms(datetime(day.year, day.month, day.day, tzinfo=UTC) + timedelta(days=1))
        clock, produced = TimerValues(handle.now_ms, 0), []
        by_key = defaultdict(list)
        for row in sorted(rows, key=lambda r: tuple(r[c] for c in AIRCRAFT.order_by)):
            by_key[row.tailnum].append(row)
        for tail, of_key in by_key.items():
            handle.key = (tail,)
            produced += processor.handleInputRows((tail,), iter(of_key), clock)
        for expiry_ms, key in sorted(t for t in handle.timers if t[0] <= handle.now_ms):
            handle.key = key
            produced += processor.handleExpiredTimer(
                key=Row(tailnum=key[0]), timerValues=clock, expiredTimerInfo=ExpiredTimerInfo(expiry_ms)
            )
            handle.deleteTimer(expiry_ms)
        processor.close()
        handle.maps["routes"].expire()
        output[day] = sorted((row.asDict(True) for row in produced), key=row_order)
    history = {key[0]: History(*value)._asdict() for key, value in handle.values["history"].entries.items()}
    routes = {
        key[0]: {tuple(r): v[0] for r, (_, v) in of_key.items()}
        for key, of_key in handle.maps["routes"].entries.items()
        if of_key
    }
    return Expected(history=history, routes=routes, rows=output), handle


def landed_rows(folder: Path, days: int) -> dict[date, list[Row]]:
    rows = {}
    for day in (DAY + timedelta(days=n) for n in range(days)):
        table = pq.ParquetFile(folder / day_file(day)).read()
        make = Row(*table.column_names)
        rows[day] = [make(*values) for values in zip(*(c.to_pylist() for c in table.columns), strict=True)]
    return rows


def assert_same(found: Expected, wanted: Expected) -> None:
    """Day by day first: a diff of everything at once could not be read."""
    assert found.rows.keys() == wanted.rows.keys()
    for day, rows in wanted.rows.items():
        for got, want in zip(found.rows[day], rows, strict=True):
            assert got == want, day
    assert found.history == wanted.history
    assert found.routes == wanted.routes


@pytest.mark.parametrize("days", [14, pytest.param(100, marks=pytest.mark.long("twenty seconds"))])
@pytest.mark.long("seconds", runs_in="ci")
def test_processor_matches_oracle_on_real_flights(tmp_path: Path, days: int) -> None:
    land(tmp_path, first=DAY, last=DAY + timedelta(days=days - 1))
    found, handle = run(landed_rows(tmp_path, days))
    assert_same(found, expected(DAY, days))
    assert {key[0]: at for at, key in handle.timers} == {
        tail: h["idle_timer_ms"] for tail, h in found.history.items() if h["idle_timer_ms"] is not None
    }


@pytest.mark.long("half a second", runs_in="ci")
def test_every_flight_comes_out_exactly_once() -> None:
    source, rows = archive(), expected(DAY, 31).rows
    numbers = [row["row_number"] for of_day in rows.values() for row in of_day if row["kind"] == "flight"]
    assert sorted(numbers) == sorted(source.index[source.month == 1] + 1)


# --- hand-made flights --------------------------------------------------------------------------------------------------------

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


def as_rows(flights: list[Flight], days: int) -> dict[date, list[Row]]:
    rows: dict[date, list[Row]] = {DAY + timedelta(days=n): [] for n in range(days)}
    for number, f in enumerate(flights, 1):
        day, departed = DAY + timedelta(days=f["day"]), f["fate"] != "cancelled"
        row = Row(
            row_number=number,
            scheduled_departure=datetime(day.year, day.month, day.day, f["hour"]),
            carrier="UA",
            flight=1,
            tailnum=f["tailnum"],
            origin=f["origin"],
            dest=f["dest"],
            departed=departed,
            arrived=f["fate"] == "arrived",
            departure_delay_minutes=0 if departed else None,
            arrival_delay_minutes=f["delay"],
            air_time_minutes=None,
            distance_miles=187,
        )
        if day in rows:
            rows[day].append(row)
    return rows


def both(flights: list[Flight], days: int) -> Expected:
    """What processor and oracle agree on."""
    found, wanted = run(as_rows(flights, days))[0], expected(DAY, days, as_archive(flights))
    assert_same(found, wanted)
    return wanted


def column(outcome: Expected, name: str, kind: str = "flight") -> list[Any]:
    return [row[name] for rows in outcome.rows.values() for row in rows if row["kind"] == kind]


def idle_days(outcome: Expected) -> list[int]:
    return [(day - DAY).days for day, rows in outcome.rows.items() for row in rows if row["kind"] == "idle"]


def test_features_are_what_was_known_before() -> None:
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


def test_ten_delays_are_recent() -> None:
    outcome = both([flight(n, delay=n) for n in range(13)], 13)
    assert column(outcome, "prior_recent_mean_delay_minutes") == [None, *(n / 2 for n in range(10)), 5.5, 6.5]
    assert outcome.history["N1"]["recent_delays"] == list(range(3, 13))


def test_cancelled_flights_get_features_and_change_nothing() -> None:
    flights = [flight(0, delay=7), flight(1, fate="cancelled"), flight(5, fate="cancelled"), flight(6, route="BOS-JFK")]
    outcome = both(flights, 7)
    assert column(outcome, "prior_flights") == [0, 1, 1, 1]
    assert column(outcome, "prior_flights_on_route") == [0, 1, 1, 0]
    assert column(outcome, "continuity_break") == [None, True, True, False]
    assert idle_days(outcome) == [5]
    assert outcome.history["N1"]["flights"] == 2


def test_an_aircraft_whose_flights_are_all_cancelled_has_no_state() -> None:
    outcome = both([flight(0, fate="cancelled")], 8)
    assert column(outcome, "prior_flights") == [0]
    assert (outcome.history, outcome.routes, idle_days(outcome)) == ({}, {}, [])


def test_a_diverted_flight_counts_and_leaves_the_airport_unknown() -> None:
    outcome = both(
        [flight(0, delay=7), flight(1, route="BOS-JFK", fate="diverted"), flight(2, route="JFK-ORD"), flight(3)], 4
    )
    assert column(outcome, "prior_flights") == [0, 1, 2, 3]
    assert column(outcome, "prior_mean_delay_minutes") == [None, 7.0, 7.0, 3.5]
    assert column(outcome, "last_known_airport") == [None, "BOS", None, "ORD"]
    assert column(outcome, "continuity_break") == [None, False, None, True]


def test_an_arrival_without_delay_leaves_the_statistics() -> None:
    outcome = both([flight(0, delay=7), flight(1, delay=None), flight(2)], 3)
    assert column(outcome, "prior_mean_delay_minutes") == [None, 7.0, 7.0]
    assert column(outcome, "prior_last_delay_minutes") == [None, 7, 7]
    assert column(outcome, "last_known_airport") == [None, "BOS", "BOS"]


def test_flights_without_tail_number_come_out_without_features_or_state() -> None:
    outcome = both([flight(0, tail=None), flight(0, 9, tail=None), flight(1, tail=None, fate="cancelled")], 8)
    assert column(outcome, "row_number") == [1, 2, 3]
    assert column(outcome, "prior_flights") == column(outcome, "prior_flights_on_route") == [None] * 3
    assert (outcome.history, outcome.routes, idle_days(outcome)) == ({}, {}, [])


@pytest.mark.parametrize(("next_day", "fires"), [(4, []), (5, []), (6, [5])])
def test_idle_after_five_days_unless_it_flew_by_then(next_day: int, fires: list[int]) -> None:
    outcome = both([flight(0, delay=7), flight(next_day)], next_day + 1)
    assert idle_days(outcome) == fires
    assert column(outcome, "idle_since", "idle") == [DAY for _ in fires]
    assert column(outcome, "prior_mean_delay_minutes", "idle") == [7.0 for _ in fires]


def test_idle_is_said_once_per_rest() -> None:
    assert idle_days(both([flight(0)], 20)) == [5]
    assert idle_days(both([flight(0), flight(8)], 20)) == [5, 13]


@pytest.mark.parametrize(("gap", "prior"), [(89, 1), (90, 0), (91, 0)])
def test_a_route_is_forgotten_after_ninety_days(gap: int, prior: int) -> None:
    outcome = both([flight(0), flight(gap, 8), flight(gap, 12)], gap + 1)
    assert column(outcome, "prior_flights_on_route") == [0, prior, prior + 1]
    assert outcome.routes == {"N1": {("JFK", "BOS"): prior + 2}}
    assert column(outcome, "prior_flights") == [0, 1, 2]


def test_each_flight_keeps_its_route_alive_and_a_cancelled_one_does_not() -> None:
    outcome = both(
        [flight(0), flight(60), flight(120), flight(150, fate="cancelled"), flight(209, fate="cancelled"), flight(211)],
        212,
    )
    assert column(outcome, "prior_flights_on_route") == [0, 1, 2, 3, 3, 0]


@pytest.mark.parametrize(("days", "kept"), [(90, True), (91, False)])
def test_a_forgotten_route_leaves_the_state_at_the_end_of_its_interval(days: int, kept: bool) -> None:
    """Flown on day 0, so it expires at the end of day 90, which is the 91st interval."""
    assert both([flight(0)], days).routes == ({"N1": {("JFK", "BOS"): 1}} if kept else {})


def test_history_is_written_once_per_key_and_interval() -> None:
    _, handle = run(as_rows([flight(0, hour) for hour in range(5, 15)], 1))
    assert handle.values["history"].updates == 1


def test_output_columns_are_the_declared_ones() -> None:
    declared = tuple(part.split()[0] for part in AIRCRAFT.output_schema.split(","))
    assert sorted(declared) == sorted(OUTPUT_COLUMNS)
    found, _ = run(as_rows([flight(0), flight(0, tail=None)], 7))
    rows: Iterator[dict[str, Any]] = (row for of_day in found.rows.values() for row in of_day)
    assert {tuple(row) for row in rows} == {declared}
