"""One line for each pipeline of a root, for `cairn status`."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from cairn.command.printing import age_of, print_json, print_table, print_text, span_of, style_of
from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.chains.judge_inputs import Chains
from state_backend.checkpoint.newest_state import newest_state
from state_backend.checkpoint.parallel import at_once
from state_backend.formats import paths
from state_backend.inspection.find_pipelines import pipelines_below
from state_backend.inspection.pipeline_health import BLOCKED, Facts, findings
from state_backend.inspection.pipeline_status import Status, status_of
from state_backend.values.errors import CairnError
from state_backend.values.frozen import frozen
from state_backend.values.intervals import Interval, format_instant


@frozen
class Line:
    name: str
    # The interval of the newest valid checkpoint; None without such a checkpoint.
    last: Interval | None
    # Time of the newest record, in milliseconds since the epoch; None if the log can't be read.
    written_ms: int | None
    # One word: `ok`, `blocked`, `unpublished`, `empty` or `unreadable`.
    state: str
    problems: tuple[str, ...]
    not_tracked: tuple[Mapping[str, str | None], ...] = ()


def list_pipelines(root: str, *, as_json: bool) -> int:
    """Print the pipelines of a root, those with problems first."""
    chains, names = Chains(), pipelines_below(root)
    at_once(lambda name: _read(chains, root, name), names)
    lines = sorted((_line(root, name, chains) for name in names), key=lambda line: (line.state == "ok", line.name))
    if as_json:
        return print_json([_describe(line) for line in lines])
    if not lines:
        print_text(f"no pipeline in {root}")
        return 0
    rows = []
    for line in lines:
        age = "" if line.written_ms is None else age_of((time.time_ns() // 1_000_000 - line.written_ms) // 1000)
        last = "" if line.last is None else span_of(line.last)
        rows.append(((line.name, last, line.state, ", ".join(line.problems), age), style_of(line.state)))
    print_table(("pipeline", "last interval", "state", "problems", "age"), rows)
    if lines[0].state != "ok":
        command = shlex.join(["cairn", "status", "--root", root, "--pipeline", lines[0].name])
        print_text(f"for the problems of {lines[0].name}, run:\n{command}")
    return 0


def state_of(status: Status) -> tuple[str, tuple[str, ...]]:
    found = findings(Facts(now=datetime.now(UTC), status=status))
    problems = tuple(one.text for one in found if one.tone in ("bad", "warn") and one.text != BLOCKED)
    if untracked := sum(read["tracked"] == "not tracked" for read in status.not_tracked):
        problems += (f"{untracked} not tracked",)
    if status.problem is not None:
        return "blocked", problems
    if status.unpublished:
        return "unpublished", problems
    return ("empty" if status.next is None else "ok"), problems


def _read(chains: Chains, root: str, name: str) -> None:
    with suppress(CairnError):  # `_line` meets the same error, and prints it in the pipeline's line.
        chains.log(root, name)


def _line(root: str, name: str, chains: Chains) -> Line:
    storage = open_storage(join_url(root, name))
    try:
        log = chains.log(root, name)
        found = status_of(log, name, storage, chains.judged(root, name))
        state, problems = state_of(found)
        state_now, newest = newest_state(log), storage.stat(paths.record(log.head_id))
    except CairnError as error:
        first, *_ = str(error).splitlines()
        return Line(name=name, last=None, written_ms=None, state="unreadable", problems=(first,))
    written_ms = newest.modified_ms if newest is not None else None
    last = None if state_now is None else state_now.interval
    return Line(
        name=name, last=last, written_ms=written_ms, state=state, problems=problems, not_tracked=found.not_tracked
    )


def _describe(line: Line) -> dict[str, Any]:
    return {
        "name": line.name,
        "last": None if line.last is None else [format_instant(line.last.start), format_instant(line.last.end)],
        "state": line.state,
        "problems": list(line.problems),
        "not_tracked": list(line.not_tracked),
    }
