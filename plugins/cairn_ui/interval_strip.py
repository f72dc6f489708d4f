"""Compute the strip of a pipeline: a cell for each of its last intervals, whose colour and sign tell its state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from typing import Literal, NamedTuple

from state_backend.inspection.pipeline_health import Facts
from state_backend.values.airflow_runs import DagRun
from state_backend.values.intervals import Interval

# Largest number of cells in a strip. The cell of the next interval comes in addition.
MOST = 30
# Heights in pixels of the tallest and of the shortest cell. On a touch screen, a finger can still hit the shortest.
HIGHEST, LOWEST = 48, 8

Tone = Literal["good", "info", "warn", "bad", "waits", "works", "stale", "next"]
# For each state of an interval: the word on the page, its colour and its sign.
_STATES: dict[str, tuple[str, Tone, str]] = {
    "success": ("done", "good", "✓"),
    "failed": ("failed", "bad", "✗"),
    "failing": ("failing", "warn", "↻"),
    "missing": ("missing", "bad", "∅"),
    "quarantined": ("quarantined", "bad", "!"),
    "descends": ("from a quarantined one", "bad", "!"),
    "stale": ("stale", "stale", "~"),
    "replaced": ("replaced", "stale", "~"),
    "pending": ("pending", "stale", "~"),
    "unknown": ("unknown by inputs", "stale", "~"),
    "deferred": ("waiting", "waits", "‖"),
    "running": ("running", "works", "…"),
    "queued": ("queued", "info", "–"),
    "next": ("next", "next", "○"),
}


class Result(NamedTuple):
    """The newest retained checkpoint of an interval."""

    checkpoint: int
    # Why no interval may start from this checkpoint, such as `stale`; empty if the checkpoint is usable.
    trouble: str


class Cell(NamedTuple):
    interval: Interval
    words: str
    tone: Tone
    sign: str
    height: int
    # Id of the interval's newest retained checkpoint; 0 without one.
    checkpoint: int
    # The interval's newest run; None without one.
    run: DagRun | None
    # Duration from the run's start to its end, or until now; None before the start, or without a run.
    seconds: float | None


class Strip(NamedTuple):
    cells: tuple[Cell, ...]
    legend: tuple[tuple[str, Tone, str], ...]

    @property
    def text(self) -> str:
        """The states in words, such as "17 done, 3 failed"."""
        return ", ".join(words for _, _, words in self.legend)


def strip_of(facts: Facts, results: Mapping[Interval, Result], last: tuple[DagRun, ...]) -> Strip:
    """Return a cell for each of the last intervals, in the order of time, and one for the next interval.

    Args:
        facts: What the log and Airflow's database say about the pipeline.
        results: The newest retained checkpoint of each interval that has one.
        last: The newest runs of the DAG, besides those in `facts`.
    """
    runs: dict[Interval, DagRun] = {}
    for run in (*facts.runs, *last):
        if (i := run.interval) is not None and ((one := runs.get(i)) is None or run.unfinished or not one.unfinished):
            runs[i] = run
    shown = sorted({*results, *runs, *facts.due})[-MOST:]
    seconds = {i: seconds_of(runs[i], facts.now) for i in shown if i in runs}
    # Only ended runs set the scale. A run in progress may wait for days, and would make all other cells low.
    ended = [one for i, one in seconds.items() if one is not None and not runs[i].unfinished]
    longest = max(ended, default=0.0)
    cells = [
        _cell(i, _state_of(facts, results.get(i), runs.get(i)), results, runs, seconds.get(i), longest) for i in shown
    ]
    following = facts.status.next if facts.status is not None else None
    if following is not None and following not in shown:
        cells.append(_cell(following, "next", results, runs, None, longest))
    counts = Counter((cell.sign, cell.tone, cell.words) for cell in cells if cell.tone != "next")
    legend = tuple((sign, tone, f"{number} {words}") for (sign, tone, words), number in counts.most_common())
    return Strip(tuple(cells), legend)


def seconds_of(run: DagRun, now: datetime) -> float | None:
    """Return a run's duration in seconds, until now if it has not ended; None before its start."""
    return None if run.began is None else max(0.0, ((run.ended or now) - run.began).total_seconds())


def _state_of(facts: Facts, result: Result | None, run: DagRun | None) -> str:
    """Return an interval's state: that of its unfinished run, else of its checkpoint, else of its last run."""
    if run is not None and run.unfinished:
        if any(one.run_id == run.run_id for one in facts.failing):
            return "failing"
        return "deferred" if facts.schedule is not None and run.run_id in facts.schedule.waiting else run.state
    if result is not None:
        return result.trouble or "success"
    return "missing" if run is None else run.state


def _cell(
    interval: Interval,
    state: str,
    results: Mapping[Interval, Result],
    runs: Mapping[Interval, DagRun],
    seconds: float | None,
    longest: float,
) -> Cell:
    words, tone, sign = _STATES.get(state, (state, "info", "?"))
    share = min(1.0, seconds / longest) if seconds and longest else 0.0
    height = round(LOWEST + (HIGHEST - LOWEST) * share)
    checkpoint = results[interval].checkpoint if interval in results else 0
    return Cell(interval, words, tone, sign, height, checkpoint, runs.get(interval), seconds)
