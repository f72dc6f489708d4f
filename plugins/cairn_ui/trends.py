"""Compute the values of the trends page: charts of sizes, durations and counts over a pipeline's intervals.

This module computes coordinates and labels. A template writes them as SVG.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from typing import Literal, NamedTuple

from cairn_ui.phases import phases_of
from cairn_ui.read_logs import Reading
from state_backend.inspection.describe import keys_of
from state_backend.values.frozen import frozen
from state_backend.values.human_units import count, size, span
from state_backend.values.intervals import Interval
from state_backend.values.records import Record

# Size of a chart in SVG units, and the margins around its plot. The left and the bottom margin hold the axes' labels.
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 640, 200, 70, 10, 24
# Largest number of checkpoints in a chart.
_MOST_POINTS = 600


Words = Callable[[float], str]
Scale = Literal["linear", "log"]


class Series(NamedTuple):
    name: str
    # One value for each checkpoint; None if the checkpoint has no value.
    values: tuple[float | None, ...]


class Tick(NamedTuple):
    at: float
    text: str


class Drawn(NamedTuple):
    name: str
    path: str
    dots: tuple[tuple[float, float], ...]


class Spot(NamedTuple):
    """The vertical strip of a chart that belongs to one checkpoint. Coordinates are in SVG units."""

    id: int
    x: float
    left: float
    width: float
    text: str


@frozen
class Chart:
    key: str
    title: str
    drawn: tuple[Drawn, ...]
    ticks: tuple[Tick, ...]
    spots: tuple[Spot, ...]
    legend: tuple[tuple[str, str], ...]
    logarithmic: bool
    # Times at the horizontal axis, at equal distances: from the start of the first interval to that of the last one.
    times: tuple[datetime, ...]


@frozen
class Trends:
    """All charts over the same checkpoints, one for each interval, in the order of time."""

    charts: tuple[Chart, ...]
    points: tuple[tuple[int, Interval], ...]
    heading: tuple[str, ...]
    table: tuple[tuple[str, ...], ...]
    left_out: int
    dropped: int
    # The retained checkpoints whose interval has a newer one.
    replaced: int


def trends_of(reading: Reading, first: int | None = None, last: int | None = None) -> Trends:
    """Return the charts of each interval's newest retained checkpoint, in the order of the intervals."""
    log = reading.log
    every = [c for c in log.completed() if (first or 0) <= c.id <= (last or log.head_id)]
    newest = {c.content.interval: c for c in sorted(every, key=lambda c: c.id)}
    kept = sorted(newest.values(), key=lambda c: c.content.interval.end)
    records = kept[-_MOST_POINTS:]
    charts = _charts(records)
    columns = [(line, words) for _, _, lines, words, _ in charts for line in lines]
    return Trends(
        charts=tuple(chart_of(key, title, records, lines, words, scale) for key, title, lines, words, scale in charts),
        points=tuple((c.id, c.content.interval) for c in records),
        heading=tuple(line.name for line, _ in columns),
        table=tuple(tuple(_text(line.values[n], words) for line, words in columns) for n in range(len(records))),
        left_out=len(kept) - len(records),
        dropped=log.head_id - len(log.retained),
        replaced=len(every) - len(kept),
    )


def _charts(records: Sequence[Record]) -> list[tuple[str, str, list[Series], Words, Scale]]:
    """Return for each chart its key, title, lines, the words of a value, and the scale."""
    phases = [{p.name: p.seconds for p in phases_of(c.content.durations_us)} for c in records]

    def counts(**names: str) -> list[Series]:
        return [Series(line, tuple(getattr(c.content.totals, name) for c in records)) for line, name in names.items()]

    def seconds(names: Iterable[str]) -> list[Series]:
        return [Series(name, tuple(point.get(name) for point in phases)) for name in names]

    every = dict.fromkeys(name for point in phases for name in point)
    sizes, keys = counts(full="state_bytes", new="uploaded_bytes"), [Series("keys", tuple(map(keys_of, records)))]
    rows = counts(input="input_rows", output="output_rows", late="late_rows")
    return [
        ("bytes", "Bytes: new and full", sizes, lambda v: size(round(v)), "log"),
        ("duration", "Duration of each phase in the slowest shard", seconds(every), span, "linear"),
        ("files", "State files", counts(files="state_files"), _whole, "linear"),
        ("keys", "Keys", keys, _whole, "linear"),
        ("rows", "Rows", rows, _whole, "linear"),
        ("restore", "Time to restore", seconds(["restore"]), span, "linear"),
    ]


def chart_of(
    key: str, title: str, records: Sequence[Record], series: Sequence[Series], words: Words, scale: Scale
) -> Chart:
    every = [v for s in series for v in s.values if v is not None]
    marks, height = _axis(every, scale)
    starts = [record.content.interval.start for record in records]
    whole = starts[-1] - starts[0] if starts else timedelta()
    # A gap of a week is as wide as a week of days.
    xs = [LEFT + 4 + (WIDTH - LEFT - 12) * ((at - starts[0]) / whole if whole else 0.5) for at in starts]
    shown = [s for s in series if any(v is not None for v in s.values)]
    spots = []
    for n, record in enumerate(records):
        figures = [f"{s.name}: {_text(s.values[n], words)}" for s in shown]
        text = "\n".join([f"checkpoint {record.id}, {record.content.interval}", *figures])
        left = (xs[n - 1] + xs[n]) / 2 if n else LEFT
        width = ((xs[n] + xs[n + 1]) / 2 if n + 1 < len(xs) else WIDTH) - left
        spots.append(Spot(record.id, round(xs[n], 1), round(left, 1), round(width, 1), text))
    drawn = tuple(_drawn(s, xs, height) for s in shown)
    ticks = tuple(Tick(round(height(v), 1), words(v)) for v in marks)
    legend = tuple((s.name, _text(next(v for v in reversed(s.values) if v is not None), words)) for s in shown)
    return Chart(
        key=key,
        title=title,
        drawn=drawn,
        ticks=ticks,
        spots=tuple(spots),
        legend=legend,
        logarithmic=scale == "log",
        times=(starts[0], starts[0] + whole / 2, starts[-1]) if whole else tuple(starts[:1]),
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
    return Drawn(series.name, " ".join(path), tuple(dots))


def _axis(values: Sequence[float], scale: Scale) -> tuple[list[float], Callable[[float], float]]:
    """Return the values of the marks at the vertical axis, and a function that converts a value to its y coordinate.

    The bottom of a linear scale is 0. The bottom of a logarithmic scale is a power of two: the greatest one that is not
    above the smallest positive value, but at least 1.
    """
    floor, room = HEIGHT - BOTTOM, HEIGHT - BOTTOM - TOP
    if scale == "linear":
        marks = _linear_ticks(values)
        return marks, lambda v: floor - room * v / marks[-1]
    positive = [v for v in values if v > 0] or [1.0]
    low = max(0, math.floor(math.log2(min(positive))))
    high = max(low + 1, math.ceil(math.log2(max(positive))))
    marks = [float(2**e) for e in range(low, high + 1, max(1, math.ceil((high - low) / 4)))]
    return marks, lambda v: floor - room * (max(0.0, math.log2(max(v, 2**low))) - low) / (high - low)


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
