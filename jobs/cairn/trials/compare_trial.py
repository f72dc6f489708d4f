"""Compare a trial with production: which rows and states differ, and text lines that describe the differences."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from state_backend.adapters.work_folders import work_folder
from state_backend.chains.judge_inputs import Chains
from state_backend.checkpoint.location import locate
from state_backend.checkpoint.log import read_log
from state_backend.checkpoint.trials import find_trial, intervals_of_trial, root_of_trial
from state_backend.inspection.compare_logs import made_within
from state_backend.inspection.compare_runs import Comparison, compare_runs
from state_backend.inspection.compare_tables import TableDifference
from state_backend.inspection.diff_lines import changed_fields, fields_of, line_of
from state_backend.values.errors import UsageError
from state_backend.values.intervals import Interval, format_instant
from state_backend.values.marks import Trial

_LISTED = 10


def compare_trial(
    root: str,
    pipeline: str,
    trial: str | None,
    match: Sequence[str],
    limit: int,
    folder: Path | None = None,
    start: datetime | None = None,
) -> tuple[Trial, Comparison]:
    """Compare the output, late rows and state of a trial with production's.

    Args:
        root: URL of the folder that holds the pipelines.
        pipeline: Name of the pipeline.
        trial: Name of the trial; None for the pipeline's only trial.
        match: Columns that identify an output row. If empty, whole rows are compared.
        limit: Number of examples for each kind of difference.
        folder: Local folder that gets all rows that differ, one Parquet file per interval; None writes none.
        start: Only the interval that starts at this instant is compared; None compares all intervals.

    Returns:
        The trial, and the comparison.

    Raises:
        UsageError: There is no such trial, no interval of the trial starts at `start`, or a column of `match` is
            missing.
        CheckpointDropped: Files were deleted while they were compared.
    """
    tried = find_trial(root, pipeline, trial)
    sides = []
    for above in (root, root_of_trial(root, pipeline, tried.name)):
        at = locate(above, pipeline)
        sides.append((at.url, read_log(at.storage), at.storage))
    ran = (interval for interval, _ in sides[1][1].outputs_near(tried.span))
    intervals = [i for i in intervals_of_trial(tried, ran) if start in (None, i.start)]
    if start is not None and not intervals:
        raise UsageError(
            f"trial {tried.name!r} of {pipeline!r} has no interval that starts at {format_instant(start)}\n"
            f"Its intervals lie in {tried.span}, each {timedelta(milliseconds=tried.length_ms)} long"
        )
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)

    def write(interval: Interval, rows: TableDifference) -> None:
        if folder is not None:
            table: pa.Table = rows.rows()
            pq.write_table(table, folder / f"{interval.start:%Y%m%dT%H%M%S}.parquet")

    with work_folder("compare") as work:
        found = compare_runs(sides[0], sides[1], intervals, work, key=match, limit=limit, on_rows=write)
    return tried, found


def match_of(match: Sequence[str], pipeline: str, head: str) -> tuple[str, ...]:
    """Return the columns that identify an output row of `pipeline`.

    `match`: Texts like COLUMN or PIPELINE=COLUMN. `head`: The pipeline of a text without PIPELINE.
    """
    named = [one.rpartition("=")[::2] for one in match]
    return tuple(column for of, column in named if (of or head) == pipeline)


def outdated_lines(root: str, trial: Trial, *, unknown: bool = True) -> list[str]:
    """Return lines that name the trial's results that are out of date, each with the cause.

    `unknown`: False leaves out results about which the records can't tell whether they are out of date.
    """
    at, chains = (root_of_trial(root, trial.pipeline, trial.name), trial.pipeline), Chains()
    # A shorter repeat with other code leaves the results of later intervals as they are.
    made = made_within(chains.log(*at), trial.span).items()
    other = [i for i, one in made if one.content is not None and one.content.code_hash != trial.code_hash]
    found = dict.fromkeys(other, "of other code than the trial's newest")
    found |= {interval: f"stale: {why}" for interval, why in chains.node(*at).spoilt.items()}
    judged = {interval: v for interval, v in chains.judged(*at).items() if unknown or v.kind != "unknown"}
    again = found or any(verdict.kind != "unknown" for verdict in judged.values())
    found |= {interval: f"{verdict.kind}: {verdict.why}" for interval, verdict in judged.items()}
    lines = [f"{interval}: the trial's result is {why}" for interval, why in sorted(found.items())]
    if len(lines) > _LISTED:
        lines[_LISTED:] = [f"and {len(lines) - _LISTED} more intervals"]
    return [*lines, "To try these intervals again, run cairn try for the whole trial again"] if again else lines


def comparison_lines(trial: Trial, said: dict[str, Any]) -> list[str]:
    """Return a comparison (`describe_comparison`) as lines of text, without the parts that are equal."""
    intervals = said["intervals"]
    lines = [f"trial {trial.name} of {trial.pipeline}: {len(intervals)} intervals, {trial.span}"]
    missing = [i for i in intervals if i["old"] is None or i["new"] is None]
    for one in missing[:_LISTED]:
        who = "production" if one["old"] is None else "the trial"
        lines.append(f"{one['start']}: {who} has no result, so nothing is compared")
    if len(missing) > _LISTED:
        lines.append(f"and {len(missing) - _LISTED} more intervals without a result")
    other = [i["start"] for i in intervals if i["position"] == "other"]
    if other:
        lines.append(f"input: the source's position differs in {len(other)} intervals, the first from {other[0]}")
    for what, rows in (("output", said["outputs"]), ("late rows", said["late"])):
        lines += _rows_lines(what, rows)
    for state in said["states"]:
        counts = ", ".join(f"{state[k]:,} {k}" for k in ("added", "removed", "changed") if state[k])
        lines.append(f"state {state['state']} at {said['states_at']}: {counts}")
        lines += [f"  {_column(field)}" for field in state["fields"]]
        for example in state["examples"]:
            lines.append(f"  {line_of({**example, 'state': state['state']})}")
    differing = [i["start"] for i in intervals if i["state"] == "other"]
    if differing:
        lines.append(f"the state differs in {len(differing)} intervals, the first from {differing[0]}")
    lines += _cost(intervals)
    if said["same"]:
        lines.append("no difference: every digest is equal")
    return lines


def _rows_lines(what: str, found: list[dict[str, Any]]) -> list[str]:
    if not found:
        return []
    totals = {kind: sum(one[kind] for one in found) for kind in ("changed", "only_old", "only_new")}
    words = {"changed": "changed", "only_old": "only in production", "only_new": "only in the trial"}
    counts = ", ".join(f"{n:,} {words[kind]}" for kind, n in totals.items() if n)
    lines = [f"{what} in {len(found)} intervals, the first from {found[0]['start']}: {counts or 'other columns'}"]
    for which, text in (
        ("added", "columns only in the trial"),
        ("removed", "columns only in production"),
        ("retyped", "columns of another type"),
    ):
        names = dict.fromkeys(name for one in found for name in one[f"columns_{which}"])
        if names:
            lines.append(f"  {text}: {', '.join(names)}")
    columns: dict[str, dict[str, Any]] = {}
    for one in found:
        for column in one["columns"]:
            columns[column["name"]] = _add(columns.get(column["name"]), column)
    lines += [f"  {_column(column)}" for column in columns.values()]
    repeated = sum(one["repeated_keys"] for one in found)
    if repeated:
        lines.append(f"  {repeated:,} keys have several rows, which are compared as whole rows")
    for one in [one for one in found if one["examples"]][:1]:
        for example in one["examples"]:
            if example["change"] == "changed":
                sides = ({n: both[side] for n, both in example["columns"].items()} for side in (0, 1))
                changes = ", ".join(f"{n} {b} -> {a}".strip() for n, b, a in changed_fields(*sides))
                lines.append(f"  ~ {fields_of(example['key'])}: {changes}")
            else:
                lines.append(f"  {'-' if example['change'] == 'only_old' else '+'} {fields_of(example['row'])}")
    return lines


def _add(before: dict[str, Any] | None, more: dict[str, Any]) -> dict[str, Any]:
    if before is None or before["mean"] is None or more["mean"] is None:
        return more if before is None else {**before, "changed": before["changed"] + more["changed"]}
    changed = before["changed"] + more["changed"]
    mean = (before["mean"] * before["changed"] + more["mean"] * more["changed"]) / changed
    return {**more, "changed": changed, "mean": mean, "largest": max(before["largest"], more["largest"])}


def _column(column: dict[str, Any]) -> str:
    by = "" if column["mean"] is None else f", by {column['mean']:,.6g} on average and {column['largest']:,.6g} at most"
    return f"{column['name']}: {column['changed']:,} changed{by}"


def _cost(intervals: list[dict[str, Any]]) -> list[str]:
    """Return lines that compare the rows, bytes, entries and seconds of the trial with those of production.

    An interval counts only if both sides still have its full record, and not just a tombstone.
    """
    both = [
        (i["old"], i["new"])
        for i in intervals
        if i["old"] and i["new"] and "seconds" in i["old"] and "seconds" in i["new"]
    ]
    if not both:
        return []
    lines = []
    for what, name in (
        ("rows in", "input_rows"),
        ("rows out", "output_rows"),
        ("late rows", "late_rows"),
        ("bytes uploaded", "uploaded_bytes"),
    ):
        before, after = (sum(side[name] for side in sides) for sides in zip(*both, strict=True))
        if before != after or name == "uploaded_bytes":
            lines.append(f"{what}: {before:,} -> {after:,}")
    seconds = [sum(side["seconds"] for side in sides) for sides in zip(*both, strict=True)]
    last = both[-1]
    lines.append(f"entries at the end: {last[0]['entries']:,} -> {last[1]['entries']:,}")
    return [*lines, f"seconds: {seconds[0]:,.1f} -> {seconds[1]:,.1f}"]
