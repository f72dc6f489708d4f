"""Compute the values of the trends page: charts of sizes, durations and counts over a pipeline's intervals.

This module computes coordinates and labels. A template writes them as SVG.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from cairn_ui.phases import phases_of
from cairn_ui.read_logs import Reading
from state_backend.inspection.describe import keys_of
from state_backend.values.human_units import count, size, span
from state_backend.values.intervals import Interval
from state_backend.values.records import Record

# Size of a chart in SVG units, and the margins around its plot. The left and the bottom margin hold the axes' labels.
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 640, 200, 70, 10, 24
# Largest number of checkpoints in a chart.
_MOST_POINTS = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line of a chart, as values."""

    name: str
    # One value for each checkpoint; None if the checkpoint has no value.
    values: tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A mark at the vertical axis of a chart."""

    at: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One line of a chart, as it is drawn."""

    name: str
    path: str
    dots: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """The vertical strip of a chart that belongs to one checkpoint. Coordinates are in SVG units."""

    id: int
    x: float
    left: float
    width: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One chart."""

    key: str
    title: str
    drawn: tuple[Drawn, ...]
    ticks: tuple[Tick, ...]
    spots: tuple[Spot, ...]
    legend: tuple[tuple[str, str], ...]
    logarithmic: bool
    # Time at the left end of the horizontal axis: the start of the first interval. None without values.
    first: datetime | None
    # Time at the right end: the start of the last interval. None without values.
    last: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trends:
    """All charts over the same checkpoints, oldest first."""

    charts: tuple[Chart, ...]
    points: tuple[tuple[int, Interval], ...]
    heading: tuple[str, ...]
    table: tuple[tuple[str, ...], ...]
    left_out: int
    dropped: int


def trends_of(reading: Reading, first: int | None = None, last: int | None = None) -> Trends:
    """Return the charts of a pipeline's retained checkpoints, in the order of their intervals."""
    log = reading.log
    kept = [c for c in log.completed() if (first or 0) <= c.id <= (last or log.head_id)]
    kept.sort(key=lambda c: (c.content.interval.end, c.id))
    records = kept[-_MOST_POINTS:]
    charts = _charts(records)
    heading = tuple(name for _, _, series, _, _ in charts for name in (s.name for s in series))
    table = tuple(
        tuple(_text(s.values[n], words) for _, _, series, words, _ in charts for s in series)
        for n in range(len(records))
    )
    return Trends(
        charts=tuple(
            chart_of(key, title, records, series, words, scale) for key, title, series, words, scale in charts
        ),
        points=tuple((c.id, c.content.interval) for c in records),
        heading=heading,
        table=table,
        left_out=len(kept) - len(records),
        dropped=log.head_id - len(log.retained),
    )


Words = Callable[[float], str]
Scale = Literal["linear", "log"]


def _charts(records: Sequence[Record]) -> list[tuple[str, str, list[Series], Words, Scale]]:
    totals = [c.content.totals for c in records]

    def series(name: str, values: Sequence[float | None]) -> Series:
        return Series(name=name, values=tuple(values))

    phases = [{p.name: p.seconds for p in phases_of(c.content.durations_us)} for c in records]
    names = dict.fromkeys(name for point in phases for name in point)
    return [
        (
            "bytes",
            "Bytes: new and full",
            [
                series("full", [t.state_bytes for t in totals]),
                series("new", [t.uploaded_bytes for t in totals]),
            ],
            lambda v: size(round(v)),
            "log",
        ),
        (
            "duration",
            "Duration of each phase in the slowest shard",
            [series(name, [point.get(name) for point in phases]) for name in names],
            span,
            "linear",
        ),
        ("files", "State files", [series("files", [t.state_files for t in totals])], _whole, "linear"),
        ("keys", "Keys", [series("keys", [keys_of(c) for c in records])], _whole, "linear"),
        (
            "rows",
            "Rows",
            [
                series("input", [t.input_rows for t in totals]),
                series("output", [t.output_rows for t in totals]),
                series("late", [t.late_rows for t in totals]),
            ],
            _whole,
            "linear",
        ),
        (
            "restore",
            "Time to restore",
            [series("restore", [point.get("restore") for point in phases])],
            span,
            "linear",
        ),
    ]


def chart_of(
    key: str, title: str, records: Sequence[Record], series: Sequence[Series], words: Words, scale: Scale
) -> Chart:
    """Return one chart, with the coordinates of its lines, marks and strips."""
    every = [v for s in series for v in s.values if v is not None]
    height = _heights(every, scale)
    step = (WIDTH - LEFT - 12) / max(1, len(records) - 1)
    xs = [LEFT + 4 + n * step for n in range(len(records))] if len(records) > 1 else [(WIDTH + LEFT) / 2]
    shown = [s for s in series if any(v is not None for v in s.values)]
    spots = []
    for n, record in enumerate(records):
        figures = [f"{s.name}: {_text(s.values[n], words)}" for s in shown]
        text = "\n".join([f"checkpoint {record.id}, {record.content.interval}", *figures])
        left = max(LEFT, xs[n] - step / 2)
        spots.append(
            Spot(
                id=record.id,
                x=round(xs[n], 1),
                left=round(left, 1),
                width=round(min(WIDTH, xs[n] + step / 2) - left, 1),
                text=text,
            )
        )
    drawn = tuple(_drawn(s, xs, height) for s in shown)
    ticks = tuple(Tick(at=round(height(v), 1), text=words(v)) for v in _ticks(every, scale))
    legend = tuple((s.name, _text(next(v for v in reversed(s.values) if v is not None), words)) for s in shown)
    return Chart(
        key=key,
        title=title,
        drawn=drawn,
        ticks=ticks,
        spots=tuple(spots),
        legend=legend,
        logarithmic=scale == "log",
        first=records[0].content.interval.start if records else None,
        last=records[-1].content.interval.start if records else None,
    )


def _drawn(series: Series, xs: Sequence[float], height: Callable[[float], float]) -> Drawn:
    path, pen_down, dots = [], False, []
    for x, value in zip(xs, series.values, strict=False):
        if value is None:
            pen_down = False
            continue
        y = round(height(value), 1)
        path.append(f"{'L' if pen_down else 'M'}{x:.1f} {y}")
        dots.append((round(x, 1), y))
        pen_down = True
    return Drawn(name=series.name, path=" ".join(path), dots=tuple(dots))


def _heights(values: Sequence[float], scale: Scale) -> Callable[[float], float]:
    """Return a function that converts a value to its y coordinate in the chart.

    The bottom of a linear scale is 0. The bottom of a logarithmic scale is a power of two: the greatest one that is not
    above the smallest positive value, but at least 1.
    """
    floor, room = HEIGHT - BOTTOM, HEIGHT - BOTTOM - TOP
    if scale == "log":
        low, high = _powers(values)
        return lambda v: floor - room * (max(0.0, math.log2(max(v, 2**low))) - low) / (high - low)
    most = max(_linear_ticks(values))
    return lambda v: floor - room * v / most


def _ticks(values: Sequence[float], scale: Scale) -> list[float]:
    if scale == "linear":
        return _linear_ticks(values)
    low, high = _powers(values)
    step = max(1, math.ceil((high - low) / 4))
    return [float(2**e) for e in range(low, high + 1, step)]


def _powers(values: Sequence[float]) -> tuple[int, int]:
    positive = [v for v in values if v > 0] or [1.0]
    low, high = math.floor(math.log2(min(positive))), math.ceil(math.log2(max(positive)))
    return max(0, low), max(max(0, low) + 1, high)


def _linear_ticks(values: Sequence[float]) -> list[float]:
    """Return the values of the marks at a linear axis: round numbers from 0 to at least the highest value."""
    most = max(values, default=0) or 1.0
    magnitude = 10 ** math.floor(math.log10(most / 4))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude * 5 >= most)
    return [n * step for n in range(math.ceil(most / step - 1e-9) + 1)]


def _whole(value: float) -> str:
    return count(round(value)) if value == round(value) or value >= 10 else f"{value:g}"


def _text(value: float | None, words: Words) -> str:
    return "–" if value is None else words(value)
