"""The history of a key, for `cairn key --history`: the retained checkpoints that changed one key."""

from __future__ import annotations

import json
from typing import Any

from cairn.command.exit_codes import FINDINGS
from cairn.command.options import open_log
from cairn.command.printing import print_json, print_text
from state_backend.adapters.work_folders import work_folder
from state_backend.formats.json_keys import parse_key
from state_backend.formats.types import parse_struct
from state_backend.inspection.describe import plain
from state_backend.inspection.diff_lines import line_of
from state_backend.inspection.history_of_key import describe_step, history_of_key
from state_backend.inspection.key_entries import SearchedKey
from state_backend.values.errors import StateUnusable, UsageError


def show_history(key: str, root: str | None, pipeline: str | None, *, whole: bool, as_json: bool) -> int:
    """Print which retained checkpoints changed a key, and return the exit code. `whole`: With output and late rows."""
    if root is None or pipeline is None:
        raise UsageError("--history needs --root and --pipeline: a savepoint has no history")
    at, log = open_log(root, pipeline, newest=True)
    newest = log.newest
    if newest is None:
        raise StateUnusable(f"pipeline {pipeline!r} has no checkpoint yet; run an interval first")
    schema = parse_struct(newest.content.key_schema)
    searched = SearchedKey.of(parse_key(key, schema), schema, newest.content.max_parallelism)
    with work_folder("history") as work:
        steps = history_of_key(log, searched, at.storage, work, follow_output=whole)
        described = [describe_step(step) for step in steps]
    named = plain(searched.named)
    found = {"pipeline": pipeline, "key": named, "retained": len(log.retained), "checkpoints": described}
    if as_json:
        print_json(found)
    else:
        _print(found, whole)
    return 0 if described else FINDINGS


def _print(found: dict[str, Any], follow_output: bool) -> None:
    changed = [step for step in found["checkpoints"] if _changes(step)]
    print_text(
        f"key {json.dumps(found['key'], ensure_ascii=False)} of {found['pipeline']!r}: {len(changed)} of "
        f"{found['retained']} retained checkpoints changed it"
    )
    for step in found["checkpoints"]:
        for line in lines_of(step, rows=follow_output):
            print_text(line)


def _changes(step: dict[str, Any]) -> bool:
    return any(step[name] for name in ("changes", "timers_set", "timers_fired", "timers_deleted"))


def lines_of(step: dict[str, Any], *, rows: bool) -> list[str]:
    """Return the lines that describe one checkpoint (`step`) in a key's history. `rows`: Include its output rows."""
    run = step["run"]
    code = f", code {step['code']}" if step["code"] is not None else ""
    status = "" if step["status"] == "completed" else f", {step['status']}"
    lines = [
        f"checkpoint {step['checkpoint']} [{step['start']}, {step['end']}){status}{code}, attempt {step['attempt'][:8]}, "
        f"run {run['run_id']} try {run['try_number']}"
    ]
    if step["unknown"] is not None:
        whole = "; all of the key's state:" if step["changes"] else ""
        lines.append(f"  the state before is unknown: {step['unknown']}{whole}")
    elif step["dropped_between"]:
        lines.append(
            f"  changes since checkpoint {step['since']}, with those of {step['dropped_between']} dropped "
            f"checkpoint{'' if step['dropped_between'] == 1 else 's'}:"
        )
    # The key is left out of each line, because the header names it.
    for change in step["changes"]:
        lines.append(f"  {line_of({name: value for name, value in change.items() if name != 'key'})}")
    for name, what in (("timers_set", "set"), ("timers_fired", "fired"), ("timers_deleted", "deleted")):
        lines += [f"  timer {what}: {at}" for at in step[name]]
    for name, what, several in (("output", "row emitted", "rows emitted"), ("late", "late row", "late rows")):
        found = step[name]
        if found is None and name == "output" and step["status"] != "dropped":
            lines.append("  the output has no key columns, so rows of the key can't be told apart")
        elif found:
            lines.append(f"  {len(found)} {what if len(found) == 1 else several}")
            lines += [f"    {json.dumps(row, ensure_ascii=False)}" for row in found] if rows else []
    return lines
