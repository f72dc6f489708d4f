"""Delays by weather: the published output of ``aircraft`` beside that of ``weather``. No state and no Spark: what two
pipelines have committed, read by the rule that the checkpoint log gives."""

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
    """Over all that is committed under ``root``: by conditions ("wet", "windy", "wet and windy", "fair"; those of the six
    hours and the airport of the scheduled departure) the departed flights and their mean departure delay in minutes; how
    many flights have no window of weather yet; and how many windows there are. Empty where a pipeline has no output."""
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
    """The start of the window, naive UTC, of a naive local time."""
    utc = local.replace(tzinfo=NEW_YORK).astimezone(UTC)
    return utc.replace(tzinfo=None, hour=utc.hour - utc.hour % 6, minute=0, second=0)


def _conditions(window: dict[str, Any]) -> str:
    wet = "wet" if window["precipitation_hundredths_inch"] > 0 else ""
    windy = "windy" if (window["max_wind_knots"] or 0) >= WINDY_KNOTS else ""
    return " and ".join(filter(None, (wet, windy))) or "fair"


def _rows(root: str, pipeline: str) -> Iterator[dict[str, Any]]:
    for file in output_files(root, pipeline):
        yield from pq.read_table(file).to_pylist()
