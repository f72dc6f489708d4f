"""The commands of `cairn` that judge a checkpoint: `validate` and `quarantine`.

`validate` runs Spark where `--spark` says, if the state is large or the pipeline has expectations. With `--fast` it
needs no Spark. `quarantine` needs no Spark.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from cairn.command.exit_codes import FINDINGS
from cairn.command.options import LOCAL_SPARK, Dag, DryRun, Json, Pipeline, Root, Wanted, spark_option
from cairn.command.printing import print_json, print_text
from cairn.command.repair_command import command_to_repair
from cairn.command.terminal import Terminal
from state_backend.checkpoint.find_checkpoint import find_checkpoint
from state_backend.checkpoint.location import locate
from state_backend.checkpoint.log import Log, read_log
from state_backend.checkpoint.quarantine import (
    check_release,
    drop_quarantined,
    quarantine_checkpoint,
    release_checkpoint,
)
from state_backend.checkpoint.quarantine_consequences import describe_consequences, plan_consequences
from state_backend.inspection.describe import state_of
from state_backend.values.errors import Rerun, UsageError
from state_backend.values.operation_parameters import Validate


def validate(
    request: Validate,
    dag: Dag = None,
    spark: Annotated[str, spark_option(" without --fast")] = LOCAL_SPARK,
    as_json: Json = False,
) -> int:
    """Exit code 1 says that there are findings."""
    from cairn.operations.validation.validate_checkpoint import carry_out_validation

    said = carry_out_validation(request, Terminal(spark, silent=as_json))
    command = None
    if said["quarantined"]:
        log = read_log(locate(request.root, said["pipeline"]).storage)
        command = _repair(log, said, root=request.root, pipeline=said["pipeline"], dag=dag, code=request.code)
        for line in () if as_json else _lines(said, command):
            print_text(line)
    if as_json:
        print_json(said | {"command": command})
    return 0 if said["success"] else FINDINGS


def quarantine(
    root: Root,
    pipeline: Pipeline,
    checkpoint: Wanted,
    reason: Annotated[
        str, typer.Option(help="Why the checkpoint is quarantined, for messages and web pages.")
    ] = "a person refused it",
    release: Annotated[bool, typer.Option("--release", help="End the quarantine of the checkpoint.")] = False,
    drop: Annotated[
        bool,
        typer.Option(
            "--drop",
            help="Let the next commit delete the state of the checkpoint, which is quarantined already. Without --drop, the "
            "state is kept for 14 days, or as the code's KeepQuarantined says.",
        ),
    ] = False,
    dag: Dag = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> int:
    at = locate(root, pipeline)
    log, record = find_checkpoint(at, checkpoint)
    if release and drop:
        raise UsageError("--release and --drop contradict each other; give one of them")
    if (release or drop) and record.id not in log.quarantined:
        raise UsageError(
            f"checkpoint {record.id} of pipeline {pipeline!r} is not quarantined, but {state_of(log, record)}"
        )
    what = f"checkpoint {record.id} of {record.content.interval}"
    said: dict[str, Any] = {"checkpoint": record.id, "what": what, "dry_run": dry_run}
    if drop:
        if not dry_run:
            drop_quarantined(at, record.id)
        said |= {"dropped": not dry_run}
        drops = "would drop" if dry_run else "drops"
        lines = [f"the next commit {drops} checkpoint {record.id}, which stays quarantined"]
    elif release:
        (check_release if dry_run else release_checkpoint)(at, record.id)
        said |= {"released": not dry_run, "state": state_of(read_log(at.storage), record)}
        lines = [f"would release {what}" if dry_run else f"{what} is released: {said['state']}"]
        if not dry_run and said["state"] != "completed":
            lines.append("cairn status prints which checkpoint the next interval starts from")
    else:
        said |= {"quarantined": not dry_run, **describe_consequences(plan_consequences(log, record.id))}
        said["command"] = _repair(log, said, root=root, pipeline=pipeline, dag=dag)
        if not dry_run:
            quarantine_checkpoint(at, record.id, reason)
        lines = _lines(said, said["command"])
    if as_json:
        return print_json(said)
    for line in lines:
        print_text(line)
    return 0


def _repair(
    log: Log, said: Mapping[str, Any], *, root: str, pipeline: str, dag: str | None, code: str | None = None
) -> str | None:
    """Return the command that runs the intervals `said["rerun"]` of refused checkpoints again; None without any."""
    if said["rerun"] is None:
        return None
    return command_to_repair(log, Rerun.from_json(said["rerun"]), root=root, pipeline=pipeline, dag=dag, code=code)


def _lines(said: Mapping[str, Any], command: str | None) -> list[str]:
    if said["quarantined"]:
        lines = [f"{said['what']} is quarantined: no interval starts from it"]
    else:
        lines = [f"would quarantine {said['what']}"]
    if said["published"]:
        lines.append("published output that was computed with it:")
    lines += [f"  {one['interval']} (checkpoint {one['id']})" for one in said["published"]]
    return lines if command is None else [*lines, f"to compute it again, run:\n{command}"]
