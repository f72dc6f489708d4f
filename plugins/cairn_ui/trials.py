"""Trials of other code: which there are, and what each came to beside production, interval by interval. Pure; by the logs alone, so that no output
and no state is read in the API server: the command that reads them is there to copy."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from cairn_ui.found import PipelineRef
from state_backend.inspection.compare_logs import IntervalDifference, Made, Same
from state_backend.values.intervals import Interval, from_ms
from state_backend.values.records import Trial

_WORDS: dict[Same, tuple[str, str]] = {
    "same": ("the same", "good"),
    "other": ("differs", "warn"),
    "unknown": ("–", "quiet"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRow:
    """A trial. ``base``: the checkpoint of production that it began from; None: another start, which ``began`` says in words. ``over``: its time
    is over, and a sweep removes it."""

    name: str
    code: str
    version: str | None
    span: Interval
    base: int | None
    began: str
    ends: datetime
    over: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """What one of the two came to. Figures are None where the record was shrunk."""

    checkpoint: int
    rows: int
    late_rows: int
    seconds: float | None
    uploaded_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether one thing is the same, in words and by a colour's name."""

    text: str
    tone: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalRow:
    """An interval of a trial; None for a side that has no result. ``differs``: by digest or checksum."""

    interval: Interval
    old: Side | None
    new: Side | None
    state: Verdict
    output: Verdict
    late: Verdict
    other_input: bool
    differs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPage:
    """One trial beside production. ``commands``: what for, and the command."""

    trial: TrialRow
    headline: str
    tone: str
    rows: tuple[IntervalRow, ...]
    commands: tuple[tuple[str, str], ...]


def row_of(trial: Trial, now: datetime) -> TrialRow:
    """A trial in a list."""
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
    """One trial; ``found`` as `compare_intervals` gives it."""
    rows = tuple(_row(one) for one in found)
    differing, missing = sum(row.differs for row in rows), sum(row.old is None or row.new is None for row in rows)
    root, name, pipeline, code = (shlex.quote(part) for part in (ref.root, trial.name, ref.name, trial.code))
    return TrialPage(
        trial=row_of(trial, now),
        headline=headline(len(rows), differing, missing),
        tone="good" if not differing and not missing else "warn",
        rows=rows,
        commands=(
            ("Row by row and entry by entry", f"cairn compare {name} --root {root} --pipeline {pipeline}"),
            ("What deploying it would do", f"cairn deploy {name} --code {code} --past --root {root}"),
            ("Remove it", f"cairn try --remove {name} --root {root} --pipeline {pipeline}"),
        ),
    )


def headline(intervals: int, differing: int, missing: int) -> str:
    """What a trial came to in all. ``missing``: intervals of which one side has no result."""
    if missing == intervals:
        return "nothing to compare yet"
    compared = intervals - missing
    text = f"{differing} of {compared} intervals differ" if differing else "every digest is equal"
    return f"{text}; {missing} without a result on both sides" if missing else text


def _row(found: IntervalDifference) -> IntervalRow:
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
