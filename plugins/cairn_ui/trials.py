"""Compute the values of the pages about trials.

The pages need only records. They print the commands that compare rows and entries.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from cairn_ui.find_pipelines import PipelineRef
from state_backend.inspection.compare_logs import IntervalDifference, Made, Same
from state_backend.values.intervals import Interval, format_instant, from_ms
from state_backend.values.records import Trial

_WORDS: dict[Same, tuple[str, str]] = {
    "same": ("the same", "good"),
    "other": ("differs", "warn"),
    "unknown": ("–", "quiet"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRow:
    """One trial in the list."""

    name: str
    code: str
    # Version of the code; None without one.
    version: str | None
    span: Interval
    # Id of production's checkpoint from which the trial began; None if it began from empty state or a savepoint.
    base: int | None
    # "empty state" or the savepoint from which the trial began; empty if `base` is not None.
    began: str
    ends: datetime
    over: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """The result of one interval in production or in the trial."""

    checkpoint: int
    rows: int
    late_rows: int
    # Time that the interval took to compute; None if the record is a tombstone.
    seconds: float | None
    # Bytes that the interval uploaded; None if the record is a tombstone.
    uploaded_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether production and the trial have the same state, output or late rows in one interval."""

    text: str
    tone: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalRow:
    """One interval of a trial, compared by digests and checksums."""

    interval: Interval
    # Production's result; None if production has no result of the interval.
    old: Side | None
    # The trial's result; None if the trial has no result of the interval.
    new: Side | None
    state: Verdict
    output: Verdict
    late: Verdict
    other_input: bool
    differs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPage:
    """One trial beside production."""

    trial: TrialRow
    headline: str
    tone: str
    rows: tuple[IntervalRow, ...]
    commands: tuple[tuple[str, str], ...]


def row_of(trial: Trial, now: datetime) -> TrialRow:
    """Return a trial as a row of the list of trials."""
    if trial.base is None:
        began = "empty state"
    elif trial.base.savepoint is not None:
        began = f"savepoint {trial.base.savepoint}"
    else:
        began = ""
    return TrialRow(
        name=trial.name,
        code=trial.code,
        version=trial.code_version,
        span=trial.span,
        base=None if began or trial.base is None else trial.base.id,
        began=began,
        ends=from_ms(trial.ends_ms),
        over=from_ms(trial.ends_ms) < now,
    )


def page_of(ref: PipelineRef, trial: Trial, found: Sequence[IntervalDifference], now: datetime) -> TrialPage:
    """Return the page of one trial."""
    rows = tuple(interval_row(one) for one in found)
    differing, missing = sum(row.differs for row in rows), sum(row.old is None or row.new is None for row in rows)
    root, name, pipeline, code = (shlex.quote(part) for part in (ref.root, trial.name, ref.name, trial.code))
    compare = f"cairn compare {name} --root {root} --pipeline {pipeline}"
    one = [format_instant(row.interval.start) for row in rows if row.differs and row.old and row.new][:1]
    return TrialPage(
        trial=row_of(trial, now),
        headline=headline(len(rows), differing, missing),
        tone="good" if not differing and not missing else "warn",
        rows=rows,
        commands=(
            ("Compare row by row and entry by entry", compare),
            *(
                ("Compare only the first interval whose results are not equal", f"{compare} --interval {start}")
                for start in one
            ),
            ("Show what a deployment would do", f"cairn deploy {name} --code {code} --past --root {root}"),
            ("Remove the trial", f"cairn trials remove {name} --root {root} --pipeline {pipeline}"),
        ),
    )


def headline(intervals: int, differing: int, missing: int) -> str:
    """Return the result of a whole trial in one line."""
    if missing == intervals:
        return "nothing to compare yet"
    compared = intervals - missing
    text = f"{differing} of {compared} intervals differ" if differing else "all results are equal"
    return f"{text}; {missing} can't be compared: no result in production or in the trial" if missing else text


def interval_row(found: IntervalDifference) -> IntervalRow:
    """Return one interval of a trial, compared by digests and checksums."""
    state, output, late = (
        Verdict(text=_WORDS[s][0], tone=_WORDS[s][1]) for s in (found.state, found.output, found.late)
    )
    return IntervalRow(
        interval=found.interval,
        old=_side(found.old),
        new=_side(found.new),
        state=state,
        output=output,
        late=late,
        other_input=found.position == "other",
        differs="other" in (found.state, found.output, found.late),
    )


def _side(made: Made | None) -> Side | None:
    if made is None:
        return None
    return Side(
        checkpoint=made.id,
        rows=sum(f.rows for f in made.outputs if not f.late),
        late_rows=sum(f.rows for f in made.outputs if f.late),
        seconds=made.seconds,
        uploaded_bytes=made.content.totals.uploaded_bytes if made.content is not None else None,
    )
