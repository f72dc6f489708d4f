"""The weather pipelines computed with pandas, from all landed rows at once."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pandas as pd

SIX_HOURS = timedelta(hours=6)
LATENESS = timedelta(hours=2)

Row = tuple[Any, ...]
Interval = tuple[datetime, datetime]


def windows(landed: dict[Interval, pd.DataFrame]) -> tuple[dict[Interval, list[Row]], dict[Interval, int]]:
    """``landed``: the rows by the interval (start, end; naive UTC) that they were landed in, without a gap. Returns by interval
    the rows of the windows that close at its end (airport, start, observations, mean °C, strongest wind, precipitation),
    sorted; and how many of its rows are late: two hours and more before its start."""
    all_rows = pd.concat(
        [frame.assign(landed=start) for (start, _), frame in landed.items() if len(frame)], ignore_index=True
    )
    is_late = all_rows.observed_at <= all_rows.landed - LATENESS
    late = is_late.groupby(all_rows.landed).sum()
    closed: dict[Interval, list[Row]] = {interval: [] for interval in landed}
    for (window, origin), rows in all_rows[~is_late].groupby([all_rows.observed_at.dt.floor("6h"), "origin"]):
        closes = next((i for i in landed if i[1] - LATENESS >= window + SIX_HOURS), None)
        if closes is not None:
            mean = rows.temperature_tenths_c.sum() / rows.temperature_tenths_c.count() / 10
            values = (len(rows), mean, int(rows.wind_knots.max()), int(rows.precipitation_hundredths_inch.sum()))
            closed[closes].append((origin, window.to_pydatetime(), *values))
    return {i: sorted(rows) for i, rows in closed.items()}, {i: int(late.get(i[0], 0)) for i in landed}


def records(landed: dict[Interval, pd.DataFrame]) -> dict[str, Row]:
    """By airport, after the last hour: observations, coldest, warmest, mean, strongest wind, precipitation, last time."""
    rows = pd.concat([frame for frame in landed.values() if len(frame)])
    return {
        origin: (
            len(of),
            int(of.temperature_tenths_c.min()),
            int(of.temperature_tenths_c.max()),
            float(of.temperature_tenths_c.sum() / of.temperature_tenths_c.count()),
            int(of.wind_knots.max()),
            int(of.precipitation_hundredths_inch.sum()),
            of.observed_at.max().to_pydatetime(),
        )
        for origin, of in rows.groupby("origin")
    }
