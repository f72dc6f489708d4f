"""The command `cairn erase`: remove keys from the newest state, and list the places that may still hold them.

It needs neither Spark nor Airflow.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from cairn.command.options import DryRun, Json
from cairn.command.printing import print_json
from cairn.operations.erase_keys import erase_keys
from state_backend.inspection.places_of_keys import Place
from state_backend.state.layout import TIMERS_NAME
from state_backend.values.errors import UsageError
from state_backend.values.operation_parameters import Erase


def erase(
    request: Erase,
    yes: Annotated[
        bool,
        typer.Option(
            "--yes",
            help="Do it; what is removed can't be brought back. Without --yes, the command only shows "
            "what would be removed, with exit code 2.",
        ),
    ] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> int:
    said = erase_keys(request, dry_run=dry_run or not yes)
    text = _lines(said, request, done=not said["dry_run"])
    if not dry_run and not yes:
        raise UsageError(f"{text}\nNothing was done. To agree, run the same command with --yes")
    if as_json:
        return print_json(said)
    typer.echo(f"{text}\nplaces that may still hold the key:")
    for place in said["places"]:
        typer.echo(f"  {Place(**place)}")
    return 0


def _lines(said: Mapping[str, Any], request: Erase, *, done: bool) -> str:
    def would(verb: str) -> str:
        return verb if done else f"would be {verb}"

    lines = []
    if done:
        lines.append(
            f"checkpoint {said['checkpoint']} of {said['interval']} has the state of checkpoint {said['base']} without the key"
        )
    named = {("timers" if name == TIMERS_NAME else name): count for name, count in said["entries"].items()}
    entries = ", ".join(f"{count} in {name}" for name, count in sorted(named.items()))
    total = sum(said["entries"].values())
    lines.append(
        f"{total} entries {would('removed')}{f': {entries}' if entries else ''}; {said['shards']} shards {would('rewritten')}"
    )
    if request.drop_checkpoints:
        lines.append(f"checkpoints {would('dropped')}: {', '.join(map(str, said['dropped'])) or 'none'}")
    if request.rewrite_output:
        lines.append(
            f"output files {would('rewritten')}: {said['output_files']}, {said['output_rows']} rows of the key"
        )
    after = "refused" if request.on_rerun == "refuse" else "run without the key"
    lines.append(f"an interval that would bring the key back is {after}")
    return "\n".join(lines)
