"""The commands of `cairn` that judge a checkpoint: `validate` and `quarantine`.

`validate` runs Spark where `--spark` says, if the state is large or the pipeline has expectations. With `--fast` it
needs no Spark. `quarantine` needs no Spark.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cairn.command.exit_codes import FINDINGS
from cairn.command.options import LOCAL_SPARK, Dag, DryRun, Json, Pipeline, Root, Spark, Wanted
from cairn.command.printing import print_json, print_text
from cairn.command.repair_command import repair_command
from cairn.command.terminal import Terminal
from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.checkpoint.coordinator import Coordinator
from state_backend.checkpoint.log import Log
from state_backend.checkpoint.quarantine_consequences import Consequences, plan_consequences
from state_backend.inspection.describe import state_of
from state_backend.values.errors import UsageError
from state_backend.values.records import Record
from state_backend.values.requests import Validate


def validate(request: Validate, dag: Dag = None, spark: Spark = LOCAL_SPARK, as_json: Json = False) -> int:
    """Validate a checkpoint: files, restored state, and the expectations of the pipeline's code.

    A checkpoint with findings is quarantined.
    """
    from cairn.operations.validate import carry_out_validation

    place = Terminal(spark, silent=as_json)
    said = carry_out_validation(request, place)
    command = None
    if said["quarantined"]:
        pipeline = place.load(request).name
        coordinator = Coordinator(open_storage(join_url(request.root, pipeline)), pipeline)
        log, record = coordinator.log(), coordinator.record(said["checkpoint"])
        costs = plan_consequences(log, record.id)
        command = _repair(log, costs, root=request.root, pipeline=pipeline, dag=dag, code=request.code)
        if not as_json:
            _print_refusal(record, costs, command)
    if as_json:
        print_json(said | {"command": command})
    return 0 if said["success"] else FINDINGS


def quarantine(
    root: Root,
    pipeline: Pipeline,
    checkpoint: Wanted,
    reason: Annotated[str, typer.Option(help="Why the checkpoint is refused.")] = "a person refused it",
    release: Annotated[bool, typer.Option("--release", help="Accept the checkpoint again.")] = False,
    drop: Annotated[
        bool, typer.Option("--drop", help="Keep it no longer: let the next commit drop the quarantined checkpoint.")
    ] = False,
    dag: Dag = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> int:
    """Refuse a checkpoint, or with --release accept a refused one again.

    No interval starts from a refused checkpoint or from its descendants.
    """
    coordinator = Coordinator(open_storage(join_url(root, pipeline)), pipeline)
    record = coordinator.record(checkpoint)
    if release and drop:
        raise UsageError("--release and --drop contradict each other; give one of them")
    if release or drop:
        if record.id not in coordinator.log().quarantined:
            raise UsageError(
                f"checkpoint {record.id} of pipeline {pipeline!r} is not quarantined, but {state_of(coordinator.log(), record)}"
            )
        if drop:
            return _drop(coordinator, record.id, dry_run=dry_run, as_json=as_json)
        if not dry_run:
            coordinator.release(record.id)
        return _say_released(coordinator, record, dry_run=dry_run, as_json=as_json)
    log = coordinator.log()
    costs = plan_consequences(log, record.id)
    command = _repair(log, costs, root=root, pipeline=pipeline, dag=dag)
    if not dry_run:
        coordinator.quarantine(record.id, reason)
    if as_json:
        said = {"checkpoint": record.id, "dry_run": dry_run, "quarantined": not dry_run}
        return print_json(said | _costs(costs, command))
    _print_refusal(record, costs, command, dry_run=dry_run)
    return 0


def _drop(coordinator: Coordinator, checkpoint_id: int, *, dry_run: bool, as_json: bool) -> int:
    if not dry_run:
        coordinator.drop_quarantined(checkpoint_id)
    if as_json:
        return print_json({"checkpoint": checkpoint_id, "dry_run": dry_run, "dropped": not dry_run})
    drops = "would drop" if dry_run else "drops"
    print_text(f"the next commit {drops} checkpoint {checkpoint_id}, which stays quarantined")
    return 0


def _say_released(coordinator: Coordinator, record: Record, *, dry_run: bool, as_json: bool) -> int:
    log = coordinator.log()
    state = state_of(log, record)
    if as_json:
        return print_json({"checkpoint": record.id, "dry_run": dry_run, "released": not dry_run, "state": state})
    if dry_run:
        print_text(f"would release checkpoint {record.id} of {record.content.interval}")
        return 0
    print_text(f"checkpoint {record.id} of {record.content.interval} is released: {state}")
    if state != "completed":
        print_text("cairn status prints which checkpoint the next interval starts from")
    return 0


def _repair(
    log: Log, costs: Consequences | None, *, root: str, pipeline: str, dag: str | None, code: str | None = None
) -> str | None:
    """Return the command that computes the refused intervals again; None if there is nothing to compute."""
    if costs is None or costs.rerun is None:
        return None
    return repair_command(log, costs.rerun, root=root, pipeline=pipeline, dag=dag, code=code)


def _print_refusal(record: Record, costs: Consequences, command: str | None, *, dry_run: bool = False) -> None:
    interval = record.content.interval
    if dry_run:
        print_text(f"would quarantine checkpoint {record.id} of {interval}")
    else:
        print_text(f"checkpoint {record.id} of {interval} is quarantined: no interval starts from it")
    if costs.published:
        print_text("published output that was computed with it:")
    for published, checkpoint_id in costs.published:
        print_text(f"  {published} (checkpoint {checkpoint_id})")
    if command is not None:
        print_text(f"to compute it again, run:\n{command}")


def _costs(costs: Consequences | None, command: str | None) -> dict[str, Any]:
    published = () if costs is None else costs.published
    return {
        "published": [{"id": n, "interval": str(interval)} for interval, n in published],
        "command": command,
    }
