"""Trials of other code: which there are, what each came to beside production, interval by interval, by the logs alone; and what was found where an
interval's rows and entries were read. Pure."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnRow:
    """A column or a field: in how many rows or entries it changed, and by how much, where it is a number."""

    name: str
    changed: int
    mean: float | None
    largest: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A row or an entry that differs. ``tone``: as of a chip. ``what``: its key, or all of it. ``values``: name, before and after of each part
    that changed."""

    change: str
    tone: str
    what: str
    values: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What differs in the output, in the late rows or in one state. ``counts``: in words; ``notes``: what else is to be said of it."""

    title: str
    counts: str
    notes: tuple[str, ...]
    columns: tuple[ColumnRow, ...]
    examples: tuple[Example, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsPage:
    """One interval of a trial, read. ``parts``: None if it was not read; then ``problem`` says why, or ``pending`` that it is under way.
    ``key``: the columns that tell rows apart, as they were typed. ``command``: the same on the command line."""

    trial: TrialRow
    row: IntervalRow
    key: str
    command: str
    parts: tuple[Part, ...] | None
    notes: tuple[str, ...] = ()
    problem: str | None = None
    too_much: bool = False
    pending: str | None = None
    seconds: float = 0.0


def parts_of(found: Mapping[str, Any]) -> tuple[Part, ...]:
    """What `describe_comparison` says of one interval, part by part."""
    parts = [_rows_part("Output", rows) for rows in found["outputs"]]
    parts += [_rows_part("Late rows", rows) for rows in found["late"]]
    return tuple(parts + [_state_part(state) for state in found["states"]])


def notes_of(row: IntervalRow, found: Mapping[str, Any]) -> tuple[str, ...]:
    """What the parts do not say: a state that can't be read, and output that is only cut otherwise."""
    notes = []
    if row.state.text == _WORDS["other"][0] and found["states_at"] is None:
        notes.append("The states differ, and retention has dropped one of them: their entries can't be read any more.")
    for what, verdict, parts in (("output", row.output, "outputs"), ("late rows", row.late, "late")):
        if verdict.text == _WORDS["other"][0] and not found[parts]:
            notes.append(f"The {what}: the same rows, in other files.")
    return tuple(notes)


_ROW_WORDS = {"changed": "changed", "only_old": "only in production", "only_new": "only in the trial"}
_TONES = {"changed": "warn", "only_old": "bad", "removed": "bad", "only_new": "info", "added": "info"}
_LONGEST = 400


def _rows_part(title: str, rows: Mapping[str, Any]) -> Part:
    columns = (
        ("columns only in the trial", "columns_added"),
        ("columns only in production", "columns_removed"),
        ("columns of another type", "columns_retyped"),
    )
    notes = [f"{text}: {', '.join(rows[name])}" for text, name in columns if rows[name]]
    if rows["repeated_keys"]:
        notes.append(f"{rows['repeated_keys']:,} keys are of several rows, which are compared as a whole")
    return Part(
        title=title,
        counts=_counts(rows, _ROW_WORDS) or "other columns",
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
    rows = tuple(interval_row(one) for one in found)
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
            ("Remove it", f"cairn trials remove {name} --root {root} --pipeline {pipeline}"),
        ),
    )


def headline(intervals: int, differing: int, missing: int) -> str:
    """What a trial came to in all. ``missing``: intervals of which one side has no result."""
    if missing == intervals:
        return "nothing to compare yet"
    compared = intervals - missing
    text = f"{differing} of {compared} intervals differ" if differing else "every digest is equal"
    return f"{text}; {missing} without a result on both sides" if missing else text


def interval_row(found: IntervalDifference) -> IntervalRow:
    """One interval of a trial, by its digests."""
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
