"""Flight delays by weather, from the output of the pipelines `aircraft` and `weather`.

The module reads committed output files only. It needs neither state nor Spark.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow.parquet as pq

from cairn import output_files

NEW_YORK = ZoneInfo("America/New_York")
WINDY_KNOTS = 20


def flying_weather(root: str) -> dict[str, Any]:
    """Return the mean departure delay by weather, over all committed output under `root`.

    A flight's weather is the weather of its airport in the six hours of its scheduled departure. The conditions are
    "wet", "windy", "wet and windy" and "fair".
    """
    windows = {(row["origin"], row["window_start"]): _conditions(row) for row in _rows(root, "weather")}
    delays: dict[str, list[int]] = {}
    unknown = 0
    for row in _rows(root, "aircraft"):
        if row["kind"] != "flight" or row["departure_delay_minutes"] is None:
            continue
        conditions = windows.get((row["origin"], _window_of(row["scheduled_departure"])))
        if conditions is None:
            unknown += 1
        else:
            delays.setdefault(conditions, []).append(row["departure_delay_minutes"])
    return {
        "windows": len(windows),
        "flights_without_weather": unknown,
        "conditions": {
            name: {"flights": len(found), "mean_departure_delay_minutes": round(sum(found) / len(found), 2)}
            for name, found in sorted(delays.items())
        },
    }


def _window_of(local: datetime) -> datetime:
    """Return the start of the six-hour window, as naive UTC, for a naive time of New York."""
    utc = local.replace(tzinfo=NEW_YORK).astimezone(UTC)
    return utc.replace(tzinfo=None, hour=utc.hour - utc.hour % 6, minute=0, second=0)


def _conditions(window: dict[str, Any]) -> str:
    wet = "wet" if window["precipitation_hundredths_inch"] > 0 else ""
    windy = "windy" if (window["max_wind_knots"] or 0) >= WINDY_KNOTS else ""
    return " and ".join(filter(None, (wet, windy))) or "fair"


def _rows(root: str, pipeline: str) -> Iterator[dict[str, Any]]:
    for file in output_files(root, pipeline):
        yield from pq.read_table(file).to_pylist()
