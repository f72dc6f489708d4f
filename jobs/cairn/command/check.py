"""The command `cairn check`: check the log, its files and the state in them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cairn.command.exit_codes import FINDINGS
from cairn.command.options import Json, Pipeline, Root
from cairn.command.printing import print_json, print_text
from cairn.command.progress import progress
from state_backend.adapters.work_folders import work_folder
from state_backend.checkpoint.find_checkpoint import record_of
from state_backend.checkpoint.location import locate
from state_backend.checkpoint.sweep_files import lines_of_unknown
from state_backend.inspection.find_pipelines import refuse_nothing
from state_backend.inspection.verify import Verification, verify_pipeline
from state_backend.ports.storage import TellsChecksums
from state_backend.values.errors import UsageError
from state_backend.values.human_units import plural
from state_backend.values.operation_parameters import NAMED


def check(
    root: Root,
    pipeline: Pipeline,
    checkpoint: Annotated[
        str | None, typer.Argument(help=f"The checkpoint: {NAMED}; left out: all retained checkpoints.")
    ] = None,
    fast: Annotated[
        bool, typer.Option("--fast", help="Read no state: check the log, and that each file is there with its size.")
    ] = False,
    checksums: Annotated[
        bool,
        typer.Option(
            "--checksums",
            help="With --fast, on S3 and Azure: also compare the checksums that the storage keeps, with a request for each "
            "file.",
        ),
    ] = False,
    as_json: Json = False,
) -> int:
    """The state is restored shard by shard into a temporary folder. `cairn validate` also evaluates the expectations of
    the pipeline's code, and quarantines a checkpoint with findings.
    """
    at = locate(root, pipeline)
    storage = at.storage
    if checksums and not fast:
        raise UsageError("--checksums goes with --fast: without --fast, the bytes of every file are compared anyway")
    refuse_nothing(storage, root, pipeline)
    if checksums and not isinstance(storage, TellsChecksums):
        raise UsageError(
            f"--checksums is for S3 and Azure, which keep checksums outside of their listings; {storage.url} is no such storage\nLeave the option out"
        )
    which = None if checkpoint is None else {record_of(at, checkpoint).id}
    with work_folder("verify") as work, progress("checking", "shards") as on_progress:
        deep = None if fast else work
        found = verify_pipeline(storage, which=which, work=deep, checksums=checksums, on_progress=on_progress)
    if as_json:
        print_json(_verification(found, fast))
        return 0 if found.success else FINDINGS
    for finding in found.findings:
        print_text(f"finding: {finding}")
    for checked in found.checkpoints:
        for finding in checked.findings:
            print_text(f"finding: checkpoint {checked.id}: {finding}")
    for line in lines_of_unknown(found.unknown):
        print_text(line)
    if found.without_checksum:
        print_text(f"{plural(found.without_checksum, 'file')} without a checksum on S3: only the size was compared")
    sound = [c for c in found.checkpoints if not c.findings]
    print_text(
        f"{len(sound)} of {len(found.checkpoints)} checkpoints are intact"
        + (
            " by the quick check; leave out --fast to read the state too"
            if fast
            else f", {sum(c.entries for c in sound):,} entries checked"
        )
    )
    if not found.success:
        newest = found.newest_intact
        print_text(
            f"the newest intact state is checkpoint {newest.id} of {newest.interval}"
            if newest is not None
            else "no valid checkpoint is certainly intact"
        )
    return 0 if found.success else FINDINGS


def _verification(found: Verification, fast: bool) -> dict[str, Any]:
    return {
        "success": found.success,
        "fast": fast,
        "newest_intact": None if found.newest_intact is None else found.newest_intact.id,
        "findings": list(found.findings),
        "unknown": list(found.unknown),
        "without_checksum": found.without_checksum,
        "checkpoints": [
            {"id": c.id, "entries": None if fast else c.entries, "findings": list(c.findings)}
            for c in found.checkpoints
        ],
    }
