"""The command `cairn export`: state as Parquet files."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from cairn.command.options import AnyPipeline, AnyRoot, Json, States
from cairn.command.printing import print_json, print_text
from cairn.command.progress import progress
from cairn.operations.export_state import export_state
from state_backend.inspection.checkpoint_names import find_state
from state_backend.values.human_units import plural, size

_LARGE_BYTES = 64 << 20


def export(
    folder: Annotated[str, typer.Option(help="Empty folder for the files: a path or URL.")],
    checkpoint: Annotated[
        str, typer.Argument(help="The state: latest, an id, an interval's end, or a savepoint's folder.")
    ] = "latest",
    root: AnyRoot = None,
    pipeline: AnyPipeline = None,
    states: States = None,
    as_json: Json = False,
) -> int:
    """Write state as Parquet files, one folder for each state."""
    source = find_state(checkpoint, root=root, pipeline=pipeline)
    # A process of its own for each shard pays off for a large state only.
    jobs = (os.cpu_count() or 1) if source.content.totals.state_bytes > _LARGE_BYTES else 1
    with progress("exporting", "shards") as on_progress:
        on_progress(0, source.content.parallelism)
        files = export_state(source, folder, states=states or None, jobs=jobs, on_progress=on_progress)
    if as_json:
        return print_json([{"state": f.state, "path": f.path, "rows": f.rows, "bytes": f.size_bytes} for f in files])
    for state in dict.fromkeys(f.state for f in files):
        of_state = [f for f in files if f.state == state]
        rows, size_bytes = sum(f.rows for f in of_state), sum(f.size_bytes for f in of_state)
        print_text(f"{state}: {rows:,} rows in {plural(len(of_state), 'file')} with {size(size_bytes)}")
    print_text(f"exported {source} to {folder}")
    return 0
