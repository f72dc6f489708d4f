"""Compute the figures of intervals: the bars below the cells of a strip, and the table of the trends page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cairn_ui.phases import Phase, phases_of
from cairn_ui.read_logs import Reading
from state_backend.inspection.describe import keys_of
from state_backend.values.frozen import frozen
from state_backend.values.human_units import count, size, span
from state_backend.values.intervals import Interval
from state_backend.values.records import Record

# Largest number of intervals on the trends page.
_MOST_POINTS = 600


class Bar(NamedTuple):
    """A bar of a chart. `x` and `width` are in percent of a column's width, `y` and `height` of a row's height."""

    # The CSS class that colours the bar.
    colour: str
    x: float
    y: float
    width: float
    height: float


class Column(NamedTuple):
    """The bars of one interval, in rows: size of the state, time by phase, rows in and out."""

    rows: tuple[tuple[Bar, ...], ...]
    # True if the previous interval ran with other code.
    changed: bool
    text: str


@frozen
class Figures:
    # The columns by checkpoint id.
    columns: Mapping[int, Column]
    # (label, value) for each row of bars: what the row shows, and which value a bar of full height has.
    scales: tuple[tuple[str, str], ...]
    phases: tuple[Phase, ...]


@frozen
class Trends:
    """The figures of the newest retained checkpoint of each interval, in the order of time."""

    figures: Figures
    points: tuple[tuple[int, Interval], ...]
    heading: tuple[str, ...]
    table: tuple[tuple[str, ...], ...]
    left_out: int  # Number of older intervals beyond `_MOST_POINTS`.
    dropped: int  # Number of log records that are not retained.
    # Number of retained checkpoints whose interval also has a newer checkpoint.
    replaced: int


def figures_of(records: Sequence[Record]) -> Figures:
    """Return the bars of checkpoints, which are given in the order of time. All bars in a row have the same scale."""
    times = [phases_of(record.content.durations_us) for record in records]
    totals = [record.content.totals for record in records]
    most_bytes = max((one.state_bytes for one in totals), default=0)
    longest = max((sum(phase.seconds for phase in phases) for phases in times), default=0.0)
    most_rows = max((max(one.input_rows, one.output_rows) for one in totals), default=0)
    columns, code = {}, records[0].content.code_hash if records else ""
    for record, one, phases in zip(records, totals, times, strict=True):
        stacked, below = [], 0.0
        for phase in phases:
            stacked.append(_bar(f"p{phase.colour}", phase.seconds, longest, below=below))
            below += stacked[-1].height
        rows = [_bar("in", one.input_rows, most_rows, 0, 50), _bar("out", one.output_rows, most_rows, 50, 50)]
        changed, code = record.content.code_hash != code, record.content.code_hash
        ran = ", ".join(f"{phase.name} {span(phase.seconds)}" for phase in phases)
        text = [
            f"checkpoint {record.id}, {record.content.interval}",
            f"state: {size(one.state_bytes)}, new: {size(one.uploaded_bytes)}",
            f"time of the slowest shard: {ran or '–'}",
            f"rows: {count(one.input_rows)} in, {count(one.output_rows)} out",
            *(["the code changed here"] if changed else []),
        ]
        bars = (_bar("in", one.state_bytes, most_bytes),), tuple(stacked), tuple(rows)
        columns[record.id] = Column(bars, changed, "\n".join(text))
    known = {phase.name: phase for phases in times for phase in phases}
    return Figures(
        columns=columns,
        scales=(("state", size(most_bytes)), ("time", span(longest)), ("rows in, out", count(most_rows))),
        phases=tuple(sorted(known.values(), key=lambda phase: phase.colour)),
    )


def _bar(colour: str, value: float, most: float, x: float = 0, width: float = 100, below: float = 0) -> Bar:
    height = round(100 * value / most, 2) if most else 0.0
    return Bar(colour, x, round(100 - below - height, 2), width, height)


def trends_of(reading: Reading, first: int | None = None, last: int | None = None) -> Trends:
    """Return the figures of each interval's newest retained checkpoint with an id from `first` to `last`, by time."""
    log = reading.log
    every = [c for c in log.completed() if (first or 0) <= c.id <= (last or log.head_id)]
    newest = {c.content.interval: c for c in sorted(every, key=lambda c: c.id)}
    kept = sorted(newest.values(), key=lambda c: c.content.interval.end)
    records = kept[-_MOST_POINTS:]
    columns = _table(records)
    return Trends(
        figures=figures_of(records),
        points=tuple((c.id, c.content.interval) for c in records),
        heading=tuple(columns),
        table=tuple(zip(*columns.values(), strict=True)),
        left_out=len(kept) - len(records),
        dropped=log.head_id - len(log.retained),
        replaced=len(every) - len(kept),
    )


def _table(records: Sequence[Record]) -> dict[str, list[str]]:
    """Return the cells of each column of the table on the trends page, by heading. The order is that of `records`."""
    totals = [record.content.totals for record in records]
    phases = [{p.name: p.seconds for p in phases_of(record.content.durations_us)} for record in records]

    def counts(name: str) -> list[str]:
        return [count(getattr(one, name)) for one in totals]

    return {
        "full": [size(one.state_bytes) for one in totals],
        "new": [size(one.uploaded_bytes) for one in totals],
        **{name: [span(p.get(name)) for p in phases] for name in dict.fromkeys(n for p in phases for n in p)},
        "files": counts("state_files"),
        "keys": [count(keys_of(record)) for record in records],
        "input": counts("input_rows"),
        "output": counts("output_rows"),
        "late": counts("late_rows"),
    }
