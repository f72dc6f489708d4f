"""Two pipelines over the hourly weather of New York's airports. Their DAG stores checkpoints in changelog mode.

- `weather`: one row for each airport and six-hour window in event time. A timer closes each window. An observation may
  come up to one hour late. The processor uses the pandas API, which gives it the rows of one airport and interval as
  DataFrames.
- `weather_records`: the extremes of each airport so far. The processor is a vectorised aggregate.

The input files are in the folder that the environment variable CAIRN_WEATHER names: an absolute path, by default
`data/weather` in the repository. The program `pipelines.land_weather` writes them.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pandas as pd
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.stateful_processor import (
    ExpiredTimerInfo,
    StatefulProcessor,
    StatefulProcessorHandle,
    TimerValues,
)

from cairn import Interval, Pipeline
from cairn.aggregates import Count, Last, Max, Mean, Min, RunningAggregate, Sum
from cairn.errors import SourceError
from pipelines.land_weather import FIRST_HOUR, HOUR, hour_file

WINDOW_MS = 6 * 3_600_000
READ_SCHEMA = """
    origin string, observed_at timestamp_ntz, temperature_tenths_c int, wind_knots int, precipitation_hundredths_inch int
"""


def weather_folder() -> Path:
    folder = Path(os.environ.get("CAIRN_WEATHER") or Path(__file__).resolve().parents[2] / "data" / "weather")
    if not folder.is_absolute():
        raise SourceError(
            f"CAIRN_WEATHER must be an absolute path, because Spark's server has another working directory; found {folder}"
        )
    return folder


def read_weather(spark: SparkSession, interval: Interval) -> tuple[DataFrame, dict[str, Any]]:
    """Return the observations of an interval, and the source position.

    The source position lists the files that were read. An hour's file may have no rows, so missing observations are not
    an error.
    """
    folder, hour, files, paths = weather_folder(), interval.start, [], []
    while hour < interval.end:
        path = folder / hour_file(hour)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise SourceError(
                f"the weather of {hour} is missing: {error}\nWrite the files up to this hour with:\n"
                f"python -m pipelines.land_weather --to {shlex.quote(str(folder))} --hours {(hour - FIRST_HOUR) // HOUR + 1}"
            ) from None
        files.append({"path": hour_file(hour), "size_bytes": len(data), "etag": f"{google_crc32c.value(data):08x}"})
        paths.append(f"file://{path}")
        hour += HOUR
    return spark.read.schema(READ_SCHEMA).parquet(*paths).drop("hour"), {"files": files}


class WeatherWindows(StatefulProcessor):  # type: ignore[misc]
    """Windows of six hours (UTC) for each airport.

    A window gives one row when the watermark has passed the window's end. A window without observations gives no row.
    Missing values do not count. If a window has no temperature, its mean temperature is null.
    """

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._windows = handle.getMapState(
            "windows",
            "ends_ms long",
            "observations long, temperatures long, temperature_sum_tenths_c long, max_wind_knots int, "
            "precipitation_hundredths_inch long",
        )

    def handleInputRows(
        self, key: Any, rows: Iterator[pd.DataFrame], timerValues: TimerValues
    ) -> Iterator[pd.DataFrame]:
        for frame in rows:
            observed_ms = frame["observed_at"].to_numpy().astype("datetime64[ms]").astype(np.int64)
            ends_ms = observed_ms - observed_ms % WINDOW_MS + WINDOW_MS
            for window in np.unique(ends_ms):
                self._add(int(window), frame[ends_ms == window])
        yield from ()

    def _add(self, ends_ms: int, part: pd.DataFrame) -> None:
        old = self._windows.getValue((ends_ms,))
        if old is None:
            self._handle.registerTimer(ends_ms)
            old = (0, 0, 0, None, 0)
        winds = [wind for wind in (old[3], part["wind_knots"].max()) if not pd.isna(wind)]
        temperatures = part["temperature_tenths_c"].dropna()
        rain = part["precipitation_hundredths_inch"].dropna()
        counts = (old[0] + len(part), old[1] + len(temperatures), old[2] + int(temperatures.sum()))
        self._windows.updateValue((ends_ms,), (*counts, int(max(winds)) if winds else None, old[4] + int(rain.sum())))

    def handleExpiredTimer(
        self, key: Any, timerValues: TimerValues, expiredTimerInfo: ExpiredTimerInfo
    ) -> Iterator[pd.DataFrame]:
        ends_ms = expiredTimerInfo.getExpiryTimeInMs()
        window = self._windows.getValue((ends_ms,))
        self._windows.removeKey((ends_ms,))
        observations, temperatures, total_tenths, wind, rain = window
        yield pd.DataFrame(
            {
                "origin": [key[0]],
                "window_start": [datetime.fromtimestamp((ends_ms - WINDOW_MS) / 1000, UTC).replace(tzinfo=None)],
                "observations": [observations],
                "mean_temperature_c": [total_tenths / temperatures / 10 if temperatures else None],
                "max_wind_knots": pd.array([wind], dtype="Int32"),
                "precipitation_hundredths_inch": [rain],
            }
        )


class WeatherRecords(RunningAggregate):
    """Extremes and sums of each airport so far.

    In each interval, every airport with an observation gives one row.
    """

    observations = Count()
    coldest_tenths_c = Min("temperature_tenths_c")
    warmest_tenths_c = Max("temperature_tenths_c")
    mean_tenths_c = Mean("temperature_tenths_c")
    strongest_wind_knots = Max("wind_knots")
    precipitation_hundredths_inch = Sum("precipitation_hundredths_inch")
    last_observed_at = Last("observed_at")


WEATHER = Pipeline(
    name="weather",
    start=FIRST_HOUR,
    source=read_weather,
    key=["origin"],
    processor=WeatherWindows,
    api="pandas",
    output_schema=(
        "origin string, window_start timestamp_ntz, observations long, mean_temperature_c double, max_wind_knots int, "
        "precipitation_hundredths_inch long"
    ),
    time_mode="event",
    event_time="observed_at",
    # Rows that are two hours or more older than the interval's start are late. With a delay of one hour, an observation
    # exactly one hour before the start would be late too.
    watermark_delay=timedelta(hours=2),
    watermark="interval",
    parallelism=2,
    max_parallelism=16,
)

RECORDS = Pipeline(
    name="weather_records",
    start=FIRST_HOUR,
    source=read_weather,
    key=["origin"],
    processor=WeatherRecords,
    api="arrow",
    order_by=["observed_at"],
    output_schema=(
        "origin string, observations bigint, coldest_tenths_c int, warmest_tenths_c int, mean_tenths_c double, "
        "strongest_wind_knots int, precipitation_hundredths_inch bigint, last_observed_at timestamp_ntz"
    ),
    time_mode="none",
    parallelism=2,
    max_parallelism=16,
)
