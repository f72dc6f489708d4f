"""The command `cairn sweep`: delete files of attempts that died, and expired trials."""

from __future__ import annotations

from typing import Annotated

import typer

from cairn.command.options import Json, Pipeline, Root, open_log
from cairn.command.printing import print_json, print_text, print_unknown
from cairn.command.progress import progress
from state_backend.checkpoint.sweep import MIN_AGE
from state_backend.checkpoint.sweep import sweep as sweep_pipeline
from state_backend.checkpoint.trials import sweep_trials
from state_backend.inspection.checkpoint_names import parse_duration
from state_backend.values.human_units import plural, size


def sweep(
    root: Root,
    pipeline: Pipeline,
    min_age: Annotated[
        str, typer.Option(help="An attempt that wrote nothing for this time counts as dead: 90m, 12h, 3d.")
    ] = f"{MIN_AGE.days}d",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be deleted; delete nothing.")] = False,
    as_json: Json = False,
) -> int:
    """Delete the files of attempts that died, and expired trials."""
    storage, _ = open_log(root, pipeline)
    trials = sweep_trials(root, pipeline, dry_run=dry_run)
    with progress("deleting", "files") as on_progress:
        result = sweep_pipeline(
            storage, pipeline, min_age=parse_duration(min_age), dry_run=dry_run, on_progress=on_progress
        )
    plan = result.plan
    abandoned = plan.abandon if dry_run else result.record.abandoned if result.record is not None else ()
    if as_json:
        return print_json(
            {
                "dry_run": dry_run,
                "record": result.record.id if result.record is not None else None,
                "abandoned": list(abandoned),
                "planned": [{"path": f.path, "bytes": f.size_bytes} for f in plan.delete],
                "deleted_files": result.deleted_files,
                "deleted_bytes": result.deleted_bytes,
                "shrunk": list(result.shrunk),
                "unknown": list(plan.unknown),
                "rebuilt": list(result.rebuilt),
                "trials": [{"name": t.name, "files": t.files, "bytes": t.bytes} for t in trials],
            }
        )
    for file in plan.delete if dry_run else ():
        print_text(f"{size(file.size_bytes):>10} {file.path}")
    for attempt in abandoned:
        print_text(f"{'would abandon' if dry_run else 'abandoned'} attempt {attempt}")
    for path in result.rebuilt:
        print_text(f"{'would write' if dry_run else 'wrote'} a lost file again: {path}")
    print_unknown(plan.unknown)
    for trial in trials:
        print_text(f"{'would remove' if dry_run else 'removed'} expired trial {trial.name}: {trial.files} files")
    if dry_run and result.rebuilt:
        print_text(
            f"would write {len(result.rebuilt)} lost files again; a dry run can list the files to delete only after a sweep has written them"
        )
    elif dry_run:
        print_text(f"would delete {plural(len(plan.delete), 'file')} with {size(plan.delete_bytes)}")
    else:
        print_text(
            f"deleted {plural(result.deleted_files, 'file')}; {size(result.deleted_bytes)} were in files that no record names"
        )
    return 0
