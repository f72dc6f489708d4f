"""The command `cairn export`: state as Parquet files."""

from __future__ import annotations

from cairn.command.options import Json
from cairn.command.printing import print_json, print_text
from cairn.command.progress import progress
from cairn.operations.export_state import carry_out_export
from state_backend.values.human_units import plural, size
from state_backend.values.operation_parameters import Export


def export(request: Export, as_json: Json = False) -> int:
    with progress("exporting", "shards") as on_progress:
        said = carry_out_export(request, on_progress)
    if as_json:
        return print_json(said)
    for state, rows in said["rows"].items():
        if of_state := [file["bytes"] for file in said["files"] if file["state"] == state]:
            print_text(f"{state}: {rows:,} rows in {plural(len(of_state), 'file')} with {size(sum(of_state))}")
    print_text(f"exported {said['of']} to {request.folder}")
    return 0
