"""The pipeline `aircraft`: for each flight of 2013, the history of its aircraft before the flight.

The input files are in the folder that the environment variable CAIRN_FLIGHTS names: an absolute path, by default
`data/flights` in the repository. The program `pipelines.land_flights` writes them.
"""

from __future__ import annotations

import io
import logging
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
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

from cairn import Interval, Pipeline, range_source
from cairn.errors import SourceError
from pipelines.land_flights import FLIGHT_SCHEMA, FlightCounts, count_flights, day_file

log = logging.getLogger(__name__)

IDLE_AFTER_MS = 5 * 86_400_000
ROUTE_TTL_MS = 90 * 86_400_000
RECENT_DELAYS = 10


READ_SCHEMA = """
    row_number long, scheduled_departure timestamp_ntz, carrier string, flight int, tailnum string, origin string, dest string,
    departed boolean, arrived boolean, departure_delay_minutes int, arrival_delay_minutes int, air_time_minutes int, distance_miles int
"""


def flights_folder() -> Path:
    folder = Path(os.environ.get("CAIRN_FLIGHTS") or Path(__file__).resolve().parents[2] / "data" / "flights")
    if not folder.is_absolute():
        raise SourceError(
            f"CAIRN_FLIGHTS must be an absolute path, because Spark's server has another working directory; found {folder}"
        )
    return folder


@range_source
def read_flights(spark: SparkSession, intervals: Sequence[Interval]) -> tuple[DataFrame, list[dict[str, Any]]]:
    """Return the flights of intervals, and the source position of each.

    An interval must be whole days. An interval is in UTC and a flight's day is local (New York). The interval of day D
    in UTC gives all flights that were scheduled for local day D.

    The driver itself reads each file, because the files are small. So it can count the flights and describe a damaged
    file.
    """
    folder = flights_folder()
    positions = [_position(folder, interval) for interval in intervals]
    days = [day for interval in intervals for day in _days(interval)]
    rows = spark.read.schema(READ_SCHEMA).parquet(*(f"file://{folder / day_file(day)}" for day in days))
    if len(intervals) > 1:
        local_day = "timestamp_seconds(86400L * unix_date(cast(scheduled_departure as date))) as cairn_interval"
        return rows.selectExpr(*FLIGHT_SCHEMA.names, local_day), positions
    return rows.select(*FLIGHT_SCHEMA.names), positions


def _position(folder: Path, interval: Interval) -> dict[str, Any]:
    files, counts = [], FlightCounts()
    for day in _days(interval):
        data, flights = _read_day(folder / day_file(day), folder, day)
        files.append({"path": day_file(day), "size_bytes": len(data), "etag": f"{google_crc32c.value(data):08x}"})
        counts += count_flights(flights)
    log.info("flights of %s: files=%d %s", interval, len(files), counts)
    return {"files": files, "counts": asdict(counts)}


def _days(interval: Interval) -> list[date]:
    first, end = interval.start.date(), interval.end.date()
    if interval.start.time() != time() or interval.end.time() != time():
        raise SourceError(
            f"the flights have one file for each day, so an interval must start and end at midnight UTC; found {interval}"
        )
    return [first + timedelta(days=n) for n in range((end - first).days)]


def _read_day(path: Path, folder: Path, day: date) -> tuple[bytes, pa.Table]:
    again = f"python -m pipelines.land_flights --to {shlex.quote(str(folder))} --from {day} --days 1"
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise SourceError(f"the flights of {day} are missing: no file {path}\nWrite the file with:\n{again}") from None
    except OSError as error:
        raise SourceError(f"the flights of {day} can't be read: {error}") from error
    try:
        with pq.ParquetFile(io.BytesIO(data), page_checksum_verification=True) as file:
            _check_columns(path, file.schema_arrow)
            return data, file.read(columns=FLIGHT_SCHEMA.names)
    except (OSError, pa.ArrowException) as error:
        message = f"the flights of {day} can't be read: {path} ({len(data)} bytes) is not a complete Parquet file ({error})\nWrite the file again with:\n{again}"
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
# Every output row has all columns in this order. Then Cairn need not match the columns by name.
_ALL_NULL = dict.fromkeys(field.split()[0] for field in OUTPUT_SCHEMA.split(","))


class History(NamedTuple):
    """The fields of the state `history`.

    Delays are arrival delays in minutes. Only flights that departed count.

    The mean delay is stored as a count and a sum, because sums of whole numbers are the same in every order and on
    every machine.
    """

    flights: int
    delays_count: int
    delay_sum_minutes: int
    last_delay_minutes: int | None
    # The airport where the aircraft last arrived; None if its last flight was diverted.
    last_airport: str | None
    last_flown_day: date | None
    recent_delays: list[int]
    # The time of the registered idle timer, in milliseconds since the epoch; None if none is registered.
    idle_timer_ms: int | None

    def after(self, flight: Row) -> History:
        """Return the history after one more flight."""
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
    """The running history of each aircraft.

    Every flight gives one output row of kind `flight`, with the history *before* the flight. An aircraft that has not
    flown for 5 days gives one row of kind `idle`, with its history and the day of its last flight (`idle_since`).

    - A *departed* flight counts. Its delay is the arrival delay. If the delay is missing, the delay statistics stay
      unchanged.
    - A *cancelled* flight gets features but changes nothing, because the aircraft did not move. The idle timer stays
      too.
    - A *diverted* flight departed but has no arrival time. It counts. The last known airport becomes null, so the next
      `continuity_break` is null.
    - `continuity_break` is true if the origin is not the last known airport. It is null before the first flight. The
      data hold only departures from New York, so it is true wherever it is not null. With all flights of an airline it
      would be rare.
    - `prior_flights_on_route` counts departed flights from this origin to this destination. The count of a route is
      removed 90 days after the end of the last interval with a flight on the route.
    - A flight *without a tail number* belongs to the null key. It gets null features and leaves no state. In contrast,
      `prior_flights` is 0 for the first flight of an aircraft.

    Processing time is the interval's end. So the idle timer is set to 5 days after the end of the interval of the last
    flight. The rows of a key must arrive in the order of scheduled departure.
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
        # Update the state once for each key and interval, not for each flight, because each update writes an entry of
        # the store.
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


_FROM_INPUT = frozenset(_ALL_NULL).intersection(FLIGHT_SCHEMA.names)


def _flight_row(flight: Row, features: dict[str, Any]) -> Row:
    """Return the output row of a flight: its input columns, its features, and null in all other columns."""
    # A look-up of a Row's field by name searches all names, so take the fields in their order.
    given = {name: value for name, value in zip(flight.__fields__, flight, strict=True) if name in _FROM_INPUT}
    return Row(**(_ALL_NULL | {"kind": "flight"} | given | features))


def expectations() -> dict[str, list[Any]]:
    """Return, by state name, the Great Expectations rules that every checkpoint must meet."""
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
