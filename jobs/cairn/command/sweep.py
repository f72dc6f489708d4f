"""The command `cairn sweep`: delete files of attempts that died, and expired trials."""

from __future__ import annotations

from cairn.command.options import Json, open_log
from cairn.command.printing import print_json, print_text
from cairn.command.progress import progress
from state_backend.checkpoint.sweep_files import lines_of_sweep, sweep_all
from state_backend.values.operation_parameters import Sweep


def sweep(request: Sweep, as_json: Json = False) -> int:
    open_log(request.root, request.pipeline)  # Raises an error if the pipeline does not exist.
    with progress("deleting", "files") as on_progress:
        swept = sweep_all(request, on_progress=on_progress)
    if as_json:
        return print_json(swept)
    for line in lines_of_sweep(swept, files=request.dry_run):
        print_text(line)
    return 0
