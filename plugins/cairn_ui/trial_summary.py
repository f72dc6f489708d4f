"""Compute what the page of a trial says beside the comparison of each interval, which needs only records."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from cairn_ui.pipelines_of_dags import PipelineRef
from state_backend.values.marks import Trial


def differs(row: Mapping[str, Any]) -> bool:
    return "other" in (row["state"], row["output"], row["late"])


def commands_of(ref: PipelineRef, trial: Trial, rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return (what it does, command) for each command about a trial. `rows`: The comparisons of its intervals."""
    root, name, pipeline, code = (shlex.quote(part) for part in (ref.root, trial.name, ref.name, trial.code))
    compare = f"cairn compare {name} --root {root} --pipeline {pipeline}"
    one = next((row["start"] for row in rows if differs(row)), None)
    return [
        ("Compare row by row and entry by entry", compare),
        *(
            [
                (
                    "Compare only the first interval whose results are not equal",
                    f"cairn compare {name} {one} --root {root} --pipeline {pipeline}",
                )
            ]
            if one
            else []
        ),
        ("Show what a promotion would do", f"cairn promote {name} --code {code} --past --root {root}"),
        ("Remove the trial", f"cairn trials --root {root} --pipeline {pipeline} --remove {name}"),
    ]


def headline(intervals: int, differing: int, missing: int) -> str:
    if missing == intervals:
        return "nothing to compare yet"
    compared = intervals - missing
    text = f"{differing} of {compared} intervals differ" if differing else "all results are equal"
    return f"{text}; {missing} can't be compared: no result in production or in the trial" if missing else text
