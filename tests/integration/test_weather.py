"""The second example without Airflow: two pipelines over the weather of six days, against pandas."""

from __future__ import annotations

from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cairn.operations.intervals.run_interval import run_interval
from cairn.pipeline import Interval, Pipeline
from pipelines.aircraft import AIRCRAFT
from pipelines.flying_weather import flying_weather
from pipelines.land_flights import ARCHIVE, find_file, land, write_file
from pipelines.land_weather import FIRST_HOUR, HOUR, OBSERVATIONS, hour_file, land_weather, read_observations
from pipelines.weather import RECORDS, WEATHER
from state_backend.values.errors import SourceError, UsageError
from state_backend.values.records import Record
from tests.oracles.weather import records, windows
from tests.support.printed_commands import run_printed
from tests.support.reading import read_state

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

# Ten intervals of an hour, then five of a day.
STEPS = [*range(11), *range(44, 141, 24)]


def hour(n: int) -> datetime:
    return FIRST_HOUR + n * HOUR


def naive(n: int) -> datetime:
    return hour(n).replace(tzinfo=None)


@pytest.fixture(scope="module")
def landed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[tuple[datetime, datetime], pd.DataFrame]]:
    """The weather, with four observations that came later than they were made: two by an hour, across the end of a window
    or not, one by five hours, and one that is the only one of its airport in its file."""
    folder: Path = tmp_path_factory.mktemp("weather")
    land_weather(folder, first=FIRST_HOUR, hours=STEPS[-1])
    for made, origin, came in ((5, "JFK", 6), (6, "EWR", 7), (4, "LGA", 9), (37, "EWR", 38)):
        rows = pq.read_table(folder / hour_file(hour(made)))
        moves = pa.compute.equal(rows["origin"], origin)
        late = rows.filter(moves)
        assert len(late) == 1
        write_file(folder / hour_file(hour(made)), rows.filter(pa.compute.invert(moves)))
        write_file(
            folder / hour_file(hour(came)), pa.concat_tables([pq.read_table(folder / hour_file(hour(came))), late])
        )
    frames = {
        (naive(start), naive(end)): pa.concat_tables(
            pq.read_table(folder / hour_file(hour(n))) for n in range(start, end)
        ).to_pandas()
        for start, end in pairwise(STEPS)
    }
    return folder, frames


def run(spark: SparkSession, pipeline: Pipeline, root: Path, steps: list[int]) -> list[Record]:
    return [
        run_interval(spark, pipeline, Interval(hour(start), hour(end)), str(root), "changelog")
        for start, end in pairwise(steps)
    ]


def rows_of(root: Path, name: str, record: Record) -> list[tuple[Any, ...]]:
    files = [root / name / f.handle.path for f in record.content.outputs if not f.late]
    return sorted(tuple(row.values()) for file in files for row in pq.read_table(file).to_pylist())


@pytest.mark.long("a quarter of a minute of Spark")
def test_windows_close_when_pandas_says(
    spark: SparkSession,
    landed: tuple[Path, dict[tuple[datetime, datetime], pd.DataFrame]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """F80, without the failures: each window exactly once, in the hour in which the watermark passes its end; what is late
    is in a file of its own and in no window; and what is left in the state are the windows that are still open."""
    folder, frames = landed
    monkeypatch.setenv("CAIRN_WEATHER", str(folder))
    closed, late = windows(frames)
    made = run(spark, WEATHER, tmp_path, STEPS)
    for interval, record in zip(frames, made, strict=True):
        assert rows_of(tmp_path, "weather", record) == closed[interval]
        assert sum(f.rows for f in record.content.outputs if f.late) == late[interval]
    assert sum(late.values()) == 1, "the one that came five hours later"
    assert [len(rows) for rows in closed.values()] == [*[0] * 7, 3, 0, 0, 18, *[12] * 4]
    open_windows = read_state(tmp_path / "weather", made[-1], "windows", tmp_path / "restored")
    assert {(origin, ends) for origin, ends in open_windows} == {
        (origin, int((FIRST_HOUR + ends * HOUR).timestamp() * 1000))
        for origin in ("EWR", "JFK", "LGA")
        for ends in (144,)
    }


def test_records_are_those_of_pandas(
    spark: SparkSession,
    landed: tuple[Path, dict[tuple[datetime, datetime], pd.DataFrame]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the intervals are. A row that came in a later one is the last there, whenever it was observed."""
    folder, frames = landed
    monkeypatch.setenv("CAIRN_WEATHER", str(folder))
    made = run(spark, RECORDS, tmp_path, [0, 7, 9, 44, 140])
    rows = {row[0]: row[1:] for row in rows_of(tmp_path, "weather_records", made[-1])}
    assert rows == records(frames)


def test_the_command_in_the_error_of_a_missing_hour_lands_its_weather(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAIRN_WEATHER", str(tmp_path))
    with pytest.raises(SourceError, match=r"the weather of 2013-01-01 06:00:00.* is missing") as error:
        run(spark, WEATHER, tmp_path / "root", [0, 1])
    run_printed(str(error.value).splitlines()[-1], tmp_path)
    assert [r.content.totals.input_rows > 0 for r in run(spark, WEATHER, tmp_path / "root", [0, 1])] == [True]
    with pytest.raises(SourceError, match="not of all hours from 2012"):
        land_weather(tmp_path, first=FIRST_HOUR - 10 * HOUR, hours=3)


def test_landed_weather_converts_back_to_the_published_figures() -> None:
    """Converted back they are the published figures, to the digits that those have: nothing was rounded away."""
    rows = read_observations().to_pandas().sort_values(["observed_at", "origin"], ignore_index=True)
    published = pd.read_csv(find_file(OBSERVATIONS)).sort_values(["time_hour", "origin"], ignore_index=True)
    assert len(rows) == 26_115
    assert (rows.temperature_tenths_c * 0.18 + 32 - published.temp).abs().max() < 0.011
    assert (rows.wind_knots * 1.15078 - published.wind_speed).abs().max() < 0.001
    assert (rows.precipitation_hundredths_inch / 100 - published.precip).abs().max() < 1e-9
    nulls = rows[["temperature_tenths_c", "wind_knots"]].isna().sum()
    assert nulls.tolist() == published[["temp", "wind_speed"]].isna().sum().tolist() == [1, 4]


def test_delays_by_weather_match_pandas(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every flight of a day meets the window of its airport and hour, found by the hours in UTC that the data have too."""
    with pytest.raises(UsageError, match="no pipeline at"):
        flying_weather(str(tmp_path))
    monkeypatch.setenv("CAIRN_WEATHER", str(tmp_path / "weather"))
    monkeypatch.setenv("CAIRN_FLIGHTS", str(tmp_path / "flights"))
    land_weather(tmp_path / "weather", first=FIRST_HOUR, hours=20)
    land(tmp_path / "flights", first=AIRCRAFT.start.date(), last=AIRCRAFT.start.date())
    run_interval(spark, AIRCRAFT, Interval(AIRCRAFT.start, AIRCRAFT.start + timedelta(days=1)), str(tmp_path))
    run(spark, WEATHER, tmp_path, [0, 20])
    found = flying_weather(str(tmp_path))

    weather = pd.read_csv(find_file(OBSERVATIONS), parse_dates=["time_hour"]).query("time_hour < '2013-01-02T00:00Z'")
    windows_of_day = weather.groupby(["origin", weather.time_hour.dt.floor("6h")])
    known = windows_of_day.agg(wind=("wind_speed", "max"), rain=("precip", "sum"))
    flights = (
        pd.read_csv(find_file(ARCHIVE), parse_dates=["time_hour"])
        .query("month == 1 and day == 1")
        .dropna(subset="dep_delay")
    )
    index = pd.MultiIndex.from_arrays([flights.origin, flights.time_hour.dt.floor("6h")])
    met = known.reindex(index)
    assert found["windows"] == len(known) == 9
    assert found["flights_without_weather"] == int(met.rain.isna().sum()) > 0
    windy = met.wind.to_numpy() >= 19.5 * 1.15078
    delays = flights.dep_delay[~met.rain.isna().to_numpy()].groupby(windy[~met.rain.isna().to_numpy()])
    assert not (met.rain > 0).any(), "it was a dry day"
    assert found["conditions"] == {
        name: {
            "flights": int(delays.count()[is_windy]),
            "mean_departure_delay_minutes": round(delays.mean()[is_windy], 2),
        }
        for name, is_windy in (("fair", False), ("windy", True))
        if is_windy in delays.groups
    }
