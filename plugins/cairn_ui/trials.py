"""Compute the values of the pages about trials.

The list of trials and the page of one trial need only records. The page with the rows and entries that differ in one
interval shows the answer of `cairn compare`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from cairn_ui.find_pipelines import PipelineRef
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnRow:
    """One column of the output, or one field of a state."""

    name: str
    changed: int
    # Mean of the absolute differences of numbers, or of times in seconds; None for other values.
    mean: float | None
    # The largest of these differences; None for other values.
    largest: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One output row or state entry that differs."""

    change: str
    tone: str
    what: str
    values: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The differences in the output, in the late rows or in one state."""

    title: str
    counts: str
    notes: tuple[str, ...]
    columns: tuple[ColumnRow, ...]
    examples: tuple[Example, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsPage:
    """The differences in one interval of a trial."""

    trial: TrialRow
    row: IntervalRow
    key: str
    command: str
    # The differences in output, late rows and each state; None if the comparison has no result yet.
    parts: tuple[Part, ...] | None
    notes: tuple[str, ...] = ()
    # Why the comparison failed; None if it did not fail.
    problem: str | None = None
    too_much: bool = False
    # Text for the user while the comparison is running or has to wait; None otherwise.
    pending: str | None = None
    seconds: float = 0.0


def parts_of(found: Mapping[str, Any]) -> tuple[Part, ...]:
    """Return the differences in output, late rows and each state."""
    parts = [_rows_part("Output", rows) for rows in found["outputs"]]
    parts += [_rows_part("Late rows", rows) for rows in found["late"]]
    return tuple(parts + [_state_part(state) for state in found["states"]])


def notes_of(row: IntervalRow, found: Mapping[str, Any]) -> tuple[str, ...]:
    """Return remarks about differences for which the page can't list entries or rows (`parts_of`).

    There are two cases:

    1. The digests show that the states differ, but retention has dropped one of them. So its entries can't be read.
    2. The checksums show that output files differ, but they contain the same rows.
    """
    notes = []
    if row.state.text == _WORDS["other"][0] and found["states_at"] is None:
        notes.append("The states differ, but retention has dropped one of them, so their entries can't be compared.")
    for what, verdict, parts in (("output", row.output, "outputs"), ("late rows", row.late, "late")):
        if verdict.text == _WORDS["other"][0] and not found[parts]:
            notes.append(f"The {what}: the same rows, but in different files.")
    return tuple(notes)


_ROW_WORDS = {"changed": "changed", "only_old": "only in production", "only_new": "only in the trial"}
_TONES = {"changed": "warn", "only_old": "bad", "removed": "bad", "only_new": "info", "added": "info"}
_LONGEST = 400


def _rows_part(title: str, rows: Mapping[str, Any]) -> Part:
    columns = (
        ("columns only in the trial", "columns_added"),
        ("columns only in production", "columns_removed"),
        ("columns with another type", "columns_retyped"),
    )
    notes = [f"{text}: {', '.join(rows[name])}" for text, name in columns if rows[name]]
    if rows["repeated_keys"]:
        notes.append(f"{rows['repeated_keys']:,} keys occur in several rows, so those rows are compared as whole rows")
    return Part(
        title=title,
        counts=_counts(rows, _ROW_WORDS) or "only the columns differ",
        notes=tuple(notes),
        columns=_columns(rows["columns"]),
        examples=tuple(_row_example(one) for one in rows["examples"]),
    )


def _row_example(one: Mapping[str, Any]) -> Example:
    change = one["change"]
    whole = one["key"] if change == "changed" else one["row"]
    values = one["columns"].items() if change == "changed" else ()
    return Example(
        change=_ROW_WORDS[change],
        tone=_TONES[change],
        what=_text(whole),
        values=tuple((name, _text(before), _text(after)) for name, (before, after) in values),
    )


def _state_part(state: Mapping[str, Any]) -> Part:
    words = {name: name for name in ("added", "removed", "changed")}
    return Part(
        title="Timers" if state["state"] == "$timers" else f"State {state['state']}",
        counts=_counts(state, words),
        notes=(),
        columns=_columns(state["fields"]),
        examples=tuple(_entry_example(one) for one in state["examples"]),
    )


def _entry_example(one: Mapping[str, Any]) -> Example:
    place = " ".join(_text(one[name]) for name in ("key", "user_key", "pos") if name in one)
    sides = [dict(one.get(name) or {}) for name in ("before", "after")]
    for side, name in zip(sides, ("before_expires_at", "after_expires_at"), strict=True):
        if name in one:
            side["expires at"] = one[name]
    names = [n for n in dict.fromkeys([*sides[0], *sides[1]]) if sides[0].get(n) != sides[1].get(n)]
    values = tuple((n, *(_text(side[n]) if n in side else "–" for side in sides)) for n in names)
    return Example(change=one["change"], tone=_TONES[one["change"]], what=place, values=values)


def _counts(found: Mapping[str, Any], words: Mapping[str, str]) -> str:
    return ", ".join(f"{found[name]:,} {text}" for name, text in words.items() if found[name])


def _columns(found: Sequence[Mapping[str, Any]]) -> tuple[ColumnRow, ...]:
    return tuple(ColumnRow(**column) for column in found)


def _text(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


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
    return TrialPage(
        trial=row_of(trial, now),
        headline=headline(len(rows), differing, missing),
        tone="good" if not differing and not missing else "warn",
        rows=rows,
        commands=(
            ("Compare row by row and entry by entry", f"cairn compare {name} --root {root} --pipeline {pipeline}"),
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
