"""Pipeline ``aircraft``: what is known of an aircraft before each of its flights, from the flights of 2013.

Its input is landed by ``pipelines.land_flights`` in the folder that CAIRN_FLIGHTS names (absolute; default
``data/flights`` in the repository).
"""

from __future__ import annotations

import io
import logging
import os
import shlex
from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming.stateful_processor import (
    ExpiredTimerInfo,
    StatefulProcessor,
    StatefulProcessorHandle,
    TimerValues,
)

from cairn import Interval, Pipeline
from cairn.errors import SourceError
from pipelines.land_flights import FLIGHT_SCHEMA, FlightCounts, count_flights, day_file

log = logging.getLogger(__name__)

IDLE_AFTER_MS = 5 * 86_400_000
ROUTE_TTL_MS = 90 * 86_400_000
RECENT_DELAYS = 10


# --- source ------------------------------------------------------------------------------------------------------------

READ_SCHEMA = """
    row_number long, scheduled_departure timestamp_ntz, carrier string, flight int, tailnum string, origin string, dest string,
    departed boolean, arrived boolean, departure_delay_minutes int, arrival_delay_minutes int, air_time_minutes int, distance_miles int
"""


def flights_folder() -> Path:
    """Where the landed flights are, absolute."""
    folder = Path(os.environ.get("CAIRN_FLIGHTS") or Path(__file__).resolve().parents[2] / "data" / "flights")
    if not folder.is_absolute():
        raise SourceError(
            f"CAIRN_FLIGHTS must be an absolute path, since Spark's server has its own working directory; found {folder}"
        )
    return folder


def read_flights(spark: SparkSession, interval: Interval) -> tuple[DataFrame, dict[str, Any]]:
    """The flights of all days in ``[start, end)``, and the source position: files (path relative to the folder, size in
    bytes, crc32c in hex) and counts (``FlightCounts``).

    Whole days only. An interval is in UTC and a flight's day is local (New York): the interval of UTC day D means the
    flights scheduled for local day D, whatever the hour.

    The files are small, so the driver reads each one: for the counts, and to say what is wrong with it in words.

    Raises: SourceError for a missing or unreadable file, or one that lacks a column or has it in another type.
    """
    folder, days, counts = flights_folder(), _days(interval), FlightCounts()
    paths = [folder / day_file(day) for day in days]
    files = []
    for day, path in zip(days, paths, strict=True):
        data, flights = _read_day(path, folder, day)
        files.append({"path": day_file(day), "size_bytes": len(data), "etag": f"{google_crc32c.value(data):08x}"})
        counts += count_flights(flights)
    log.info("flights of %s: files=%d %s", interval, len(files), counts)
    frame = spark.read.schema(READ_SCHEMA).parquet(*(f"file://{path}" for path in paths))
    return frame.select(*FLIGHT_SCHEMA.names), {"files": files, "counts": counts.to_json()}


def _days(interval: Interval) -> list[date]:
    first, end = interval.start.date(), interval.end.date()
    if interval.start.time() != time() or interval.end.time() != time():
        raise SourceError(f"flights are landed by day; an interval must start and end at midnight UTC, not {interval}")
    return [first + timedelta(days=n) for n in range((end - first).days)]


def _read_day(path: Path, folder: Path, day: date) -> tuple[bytes, pa.Table]:
    """A file's bytes and rows."""
    again = f"python -m pipelines.land_flights --to {shlex.quote(str(folder))} --from {day} --days 1"
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise SourceError(f"the flights of {day} are not landed: no file {path}. Land them with:\n{again}") from None
    except OSError as error:
        raise SourceError(f"the flights of {day} can't be read: {error}") from error
    try:
        with pq.ParquetFile(io.BytesIO(data), page_checksum_verification=True) as file:
            _check_columns(path, file.schema_arrow)
            return data, file.read(columns=FLIGHT_SCHEMA.names)
    except (OSError, pa.ArrowException) as error:
        message = f"the flights of {day} can't be read: {path} ({len(data)} bytes) is no whole Parquet file ({error}). Land them again with:\n{again}"
        raise SourceError(message) from error


def _check_columns(path: Path, found: pa.Schema) -> None:
    found_text = ", ".join(f"{f.name} {f.type}" for f in found)
    for expected in FLIGHT_SCHEMA:
        if expected.name not in found.names:
            raise SourceError(f"{path} has no column {expected.name!r} ({expected.type}); found {found_text}")
        if (found_type := found.field(expected.name).type) != expected.type:
            raise SourceError(
                f"{path}: column {expected.name!r} must be {expected.type}, but is {found_type}; found {found_text}"
            )


# --- state and output --------------------------------------------------------------------------------------------------

HISTORY_SCHEMA = """
    flights long, delays_count long, delay_sum_minutes long, last_delay_minutes int, last_airport string,
    last_flown_day date, recent_delays array<int>, idle_timer_ms long
"""

OUTPUT_SCHEMA = """
    kind string, tailnum string,
    row_number long, scheduled_departure timestamp_ntz, carrier string, flight int, origin string, dest string, distance_miles int,
    departed boolean, arrived boolean, departure_delay_minutes int, arrival_delay_minutes int,
    prior_flights long, prior_mean_delay_minutes double, prior_last_delay_minutes int, prior_recent_mean_delay_minutes double,
    prior_flights_on_route long, days_since_last_flight int, last_known_airport string, continuity_break boolean,
    idle_since date
"""
# Every output row has all columns, in this order, so that the runtime needn't match them by name.
_ALL_NULL = dict.fromkeys(field.split()[0] for field in OUTPUT_SCHEMA.split(","))


class History(NamedTuple):
    """State ``history``, field by field. Delays are arrival delays in minutes; only flights that departed count.

    The mean is kept as count and sum: whole numbers give the same mean in every order and on every machine.
    """

    flights: int
    delays_count: int
    delay_sum_minutes: int
    last_delay_minutes: int | None
    last_airport: str | None
    last_flown_day: date | None
    recent_delays: list[int]
    idle_timer_ms: int | None

    def after(self, flight: Row) -> History:
        """The history once this flight, which departed, is known."""
        delay: int | None = flight.arrival_delay_minutes
        moved = self._replace(
            flights=self.flights + 1,
            last_airport=flight.dest if flight.arrived else None,
            last_flown_day=flight.scheduled_departure.date(),
        )
        if delay is None:
            return moved
        return moved._replace(
            delays_count=self.delays_count + 1,
            delay_sum_minutes=self.delay_sum_minutes + delay,
            last_delay_minutes=delay,
            recent_delays=[*self.recent_delays, delay][-RECENT_DELAYS:],
        )

    def features(self) -> dict[str, Any]:
        """Output columns that depend on nothing else."""
        return {
            "prior_flights": self.flights,
            "prior_mean_delay_minutes": self.delay_sum_minutes / self.delays_count if self.delays_count else None,
            "prior_last_delay_minutes": self.last_delay_minutes,
            "prior_recent_mean_delay_minutes": sum(self.recent_delays) / len(self.recent_delays)
            if self.recent_delays
            else None,
            "last_known_airport": self.last_airport,
        }


NO_HISTORY = History(0, 0, 0, None, None, None, [], None)


class AircraftHistory(StatefulProcessor):  # type: ignore[misc]
    """Running history of each aircraft. Every flight gives one ``flight`` row, with what was known *before* it; an aircraft
    that has not flown for 5 days gives one ``idle`` row, with what is known and since when (``idle_since``, its last day).

    - *Departed* flights count. A delay is an arrival delay; where it is missing, the delay statistics stay as they are.
    - *Cancelled* flights get features but change nothing, the idle timer included: the aircraft did not move.
    - *Diverted* flights (departed, without arrival time) count, and leave the last known airport unknown (null), so the next
      ``continuity_break`` is null, as it is before the first flight.
    - ``continuity_break``: the origin is not the last known airport. These data have departures from New York only, so it is
      true wherever it is known: the flight back is never seen. With all flights of an airline it would be rare.
    - ``prior_flights_on_route``: departed flights from this origin to this destination. A route is forgotten, and its count
      starts again, 90 days after the end of the interval in which it was last flown.
    - *Without tail number* there is no aircraft: such flights come under a null key, get null features (``prior_flights``
      too, which is 0 for an aircraft that is seen for the first time), and leave no state.

    Processing time is the interval's end: the idle timer is set to 5 days after the end of the interval of the last flight.
    Rows of a key must arrive in order of scheduled departure.
    """

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._history = handle.getValueState("history", HISTORY_SCHEMA)
        self._routes = handle.getMapState(
            "routes", "origin string, dest string", "flights long", ttlDurationMs=ROUTE_TTL_MS
        )

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: TimerValues) -> Iterator[Row]:
        if key[0] is None:
            for flight in rows:
                yield _flight_row(flight, {})
            return
        stored = self._history.get()
        before = history = NO_HISTORY if stored is None else History(*stored)
        routes: dict[tuple[str, str], int] = {}
        flown = set()
        for flight in rows:
            route = (flight.origin, flight.dest)
            if route not in routes:
                known = self._routes.getValue(route)
                routes[route] = 0 if known is None else known[0]
            yield _flight_row(flight, _features(history, flight, routes[route]))
            if flight.departed:
                history = history.after(flight)
                routes[route] += 1
                flown.add(route)
        if not flown:
            return
        for route in sorted(flown):
            self._routes.updateValue(route, (routes[route],))
        idle_timer_ms = timerValues.getCurrentProcessingTimeInMs() + IDLE_AFTER_MS
        if before.idle_timer_ms is not None:
            self._handle.deleteTimer(before.idle_timer_ms)
        self._handle.registerTimer(idle_timer_ms)
        # Once per key and interval, not per flight: every update reads and writes an entry of the store.
        self._history.update(tuple(history._replace(idle_timer_ms=idle_timer_ms)))

    def handleExpiredTimer(
        self, key: Any, timerValues: TimerValues, expiredTimerInfo: ExpiredTimerInfo
    ) -> Iterator[Row]:
        history = History(*self._history.get())
        self._history.update(tuple(history._replace(idle_timer_ms=None)))
        idle = {"kind": "idle", "tailnum": key[0], "idle_since": history.last_flown_day}
        yield Row(**(_ALL_NULL | idle | history.features()))


def _features(history: History, flight: Row, flights_on_route: int) -> dict[str, Any]:
    known_airport, last_day = history.last_airport, history.last_flown_day
    return {
        **history.features(),
        "prior_flights_on_route": flights_on_route,
        "days_since_last_flight": None if last_day is None else (flight.scheduled_departure.date() - last_day).days,
        "continuity_break": None if known_airport is None else flight.origin != known_airport,
    }


_FROM_INPUT = [name for name in _ALL_NULL if name in FLIGHT_SCHEMA.names]


def _flight_row(flight: Row, features: dict[str, Any]) -> Row:
    """Columns of the same name are those of the input; what neither it nor the features have is null."""
    return Row(**(_ALL_NULL | {"kind": "flight"} | {name: flight[name] for name in _FROM_INPUT} | features))


def expectations() -> dict[str, list[Any]]:
    """What the owner of this state expects of it, whatever the day."""
    import great_expectations.expectations as gxe

    minutes = {"min_value": -24 * 60, "max_value": 48 * 60}
    return {
        "history": [
            gxe.ExpectColumnValuesToBeUnique(column="key_tailnum"),
            gxe.ExpectColumnValuesToNotBeNull(column="key_tailnum"),
            gxe.ExpectColumnValuesToBeBetween(column="flights", min_value=1),
            gxe.ExpectColumnPairValuesAToBeGreaterThanB(column_A="flights", column_B="delays_count", or_equal=True),
            gxe.ExpectColumnValuesToBeBetween(column="last_delay_minutes", **minutes),
            gxe.ExpectColumnValuesToNotBeNull(column="last_flown_day"),
        ],
        "routes": [
            gxe.ExpectColumnValuesToBeInSet(column="user_key_origin", value_set=["EWR", "JFK", "LGA"]),
            gxe.ExpectColumnValuesToBeBetween(column="flights", min_value=1),
            gxe.ExpectColumnValuesToNotBeNull(column="expires_at"),
        ],
    }


AIRCRAFT = Pipeline(
    name="aircraft",
    start=datetime(2013, 1, 1, tzinfo=UTC),
    source=read_flights,
    key=["tailnum"],
    processor=AircraftHistory,
    api="row",
    output_schema=OUTPUT_SCHEMA,
    time_mode="processing",
    order_by=["scheduled_departure", "row_number"],
    parallelism=2,
    max_parallelism=128,
    expectations=expectations,
)
