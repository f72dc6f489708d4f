"""Compute the bars of the last runs of a DAG: one bar for each run, whose colour and sign tell its outcome."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Literal, NamedTuple

from state_backend.values.airflow_runs import DagRun
from state_backend.values.intervals import Interval

# Largest number of runs.
MOST = 20
# Height of the highest bar, and of the lowest one, in pixels. The lowest one can still be seen and hit by a finger.
HIGHEST, LOWEST = 48, 8

Tone = Literal["good", "info", "warn", "bad"]
# For each state of a run, or of its unusable checkpoint: the word on the page, its colour and its sign.
_OUTCOMES: dict[str, tuple[str, Tone, str]] = {
    "success": ("succeeded", "good", "✓"),
    "failed": ("failed", "bad", "✗"),
    "quarantined": ("quarantined", "bad", "!"),
    "descends": ("from a quarantined one", "bad", "!"),
    "stale": ("stale", "warn", "~"),
    "replaced": ("replaced", "warn", "~"),
    "running": ("running", "info", "…"),
    "queued": ("queued", "info", "–"),
}


class Bar(NamedTuple):
    run: DagRun
    outcome: str
    tone: Tone
    sign: str
    height: int
    # Duration from the run's start to its end, or until now; None before the start.
    seconds: float | None


class Bars(NamedTuple):
    bars: tuple[Bar, ...]
    legend: tuple[tuple[str, Tone, str], ...]

    @property
    def text(self) -> str:
        """The outcomes in words, such as "17 succeeded, 3 failed"."""
        return ", ".join(words for _, _, words in self.legend)


def bars_of(runs: Sequence[DagRun], unusable: Mapping[Interval, str], now: datetime) -> Bars:
    shown = runs[-MOST:]
    longest = max((seconds for run in shown if (seconds := seconds_of(run, now)) is not None), default=0.0)
    bars = tuple(_bar(run, unusable, longest, now) for run in shown)
    counts = Counter((bar.sign, bar.tone, bar.outcome) for bar in bars)
    legend = tuple((sign, tone, f"{number} {outcome}") for (sign, tone, outcome), number in counts.most_common())
    return Bars(bars, legend)


def seconds_of(run: DagRun, now: datetime) -> float | None:
    """Return a run's duration in seconds, until now if it has not ended; None before its start."""
    return None if run.began is None else max(0.0, ((run.ended or now) - run.began).total_seconds())


def _bar(run: DagRun, unusable: Mapping[Interval, str], longest: float, now: datetime) -> Bar:
    state = run.state
    if state == "success" and run.interval is not None:
        state = unusable.get(run.interval, state)
    outcome, tone, sign = _OUTCOMES.get(state, (state, "info", "?"))
    seconds = seconds_of(run, now)
    share = seconds / longest if seconds and longest else 0.0
    return Bar(run, outcome, tone, sign, round(LOWEST + (HIGHEST - LOWEST) * share), seconds)
