"""The command `cairn checkpoints`: one line for each checkpoint."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from cairn.command.options import Json, Pipeline, Root, open_log
from cairn.command.printing import age_of, cell, print_json, print_table, print_text, span_between, style_of
from cairn.command.show_checkpoint import show_checkpoint
from state_backend.checkpoint.parallel import at_once
from state_backend.formats import paths
from state_backend.inspection.describe import describe_log
from state_backend.values.human_units import size
from state_backend.values.operation_parameters import NAMED


def checkpoints(
    root: Root,
    pipeline: Pipeline,
    checkpoint: Annotated[
        str | None, typer.Argument(help=f"The checkpoint to show: {NAMED}; left out: list the checkpoints.")
    ] = None,
    all_: Annotated[
        bool, typer.Option("--all", help="List dropped checkpoints too, and past runs of cairn sweep.")
    ] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="List only this many, the newest; left out: all.")] = None,
    as_json: Json = False,
) -> int:
    if checkpoint is not None:
        return show_checkpoint(root, pipeline, checkpoint, as_json=as_json)
    at, log = open_log(root, pipeline)
    wanted = range(1, log.head_id + 1) if all_ else sorted({*log.retained, *log.quarantined})
    ids = wanted[-limit:] if limit is not None else wanted
    infos = at_once(lambda n: at.storage.stat(paths.record(n)), ids)
    written = {n: info.modified_ms for n, info in zip(ids, infos, strict=True) if info is not None}
    shown = describe_log(log, ids, written, now_ms=time.time_ns() // 1_000_000)
    if as_json:
        return print_json(shown)
    names = ["id", "interval", "kind", "base", "state", "keys", "bytes", "files", "code", "age"]
    usual = {
        "kind": all(row["kind"] == "interval" for row in shown),
        "code": len({row["code"] for row in shown}) < 2 and not any(row["code_changed"] for row in shown),
    }
    kept = [n for n, name in enumerate(names) if not usual.get(name)]
    cells = [(_cells(row), style_of(row["state"] or "")) for row in shown]
    print_table([names[n] for n in kept], [([texts[n] for n in kept], style) for texts, style in cells])
    if any(row["code_changed"] for row in shown):
        print_text("* code differs from that of the checkpoint before")
    older = len(wanted) - len(ids)
    if older:
        print_text(f"not listed: {older} older; a larger --limit lists them")
    hidden = log.head_id - len(wanted)
    if hidden:
        print_text(f"not listed: {hidden} dropped checkpoints and sweeps; --all lists them")
    return 0


def _cells(row: dict[str, Any]) -> Sequence[str]:
    interval = span_between(row["start"], row["end"]) if row["start"] is not None else ""
    age = "" if row["age_s"] is None else age_of(row["age_s"])
    code = row["code"] if not row["code_changed"] else f"{row['code']} *"
    values: Sequence[Any] = (row["base"], row["state"], row["keys"])
    bytes_ = "" if row["bytes"] is None else size(row["bytes"])
    return str(row["id"]), interval, row["kind"], *map(cell, values), bytes_, cell(row["files"]), cell(code), age
