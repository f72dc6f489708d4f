"""The commands of `cairn` that take, restore and copy state: `savepoint`, `restore` and `fork`.

`savepoint` and `restore --savepoint` run Spark where `--spark` says. `restore CHECKPOINT` and `fork` need no Spark.
With `--dry-run` each command only prints what it would do.
"""

from __future__ import annotations

import json
import uuid
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from typing import Annotated, Any, Literal

import typer

from cairn.command.airflow_rest import AirflowRest
from cairn.command.options import LOCAL_SPARK, Airflow, Dag, DryRun, Json, Root, Spark, Wanted, airflow_wait_s
from cairn.command.printing import print_json
from cairn.command.repair_command import code_of, repair_command
from cairn.command.stop_dag import commit_prepared, stopped
from cairn.command.terminal import Terminal
from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.checkpoint.coordinator import Coordinator
from state_backend.checkpoint.rewind import fork as fork_state
from state_backend.checkpoint.rewind import plan_fork, plan_rewind, rewind
from state_backend.checkpoint.savepoints import read_savepoint
from state_backend.checkpoint.trials import check_no_trial
from state_backend.inspection.checkpoint_names import parse_checkpoint
from state_backend.values.airflow_commands import command_line
from state_backend.values.environment import Variable
from state_backend.values.errors import UsageError
from state_backend.values.intervals import format_instant, to_ms
from state_backend.values.marks import Savepoint
from state_backend.values.records import Permissions, Record, RunRef
from state_backend.values.requests import RestoreSavepoint, TakeSavepoint

AllowStale = Annotated[bool, typer.Option("--allow-stale", help="Accept a stale checkpoint.")]
AllowQuarantined = Annotated[
    bool, typer.Option("--allow-quarantined", help="Accept a quarantined checkpoint, which validation refused.")
]


def savepoint(
    request: TakeSavepoint,
    stop: Annotated[
        bool,
        typer.Option(
            "--stop", help="First pause the pipeline's DAG, wait for its running tasks, and leave the DAG paused."
        ),
    ] = False,
    dag: Dag = None,
    airflow: Airflow = Variable.AIRFLOW.default,
    spark: Spark = LOCAL_SPARK,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> int:
    """Copy a checkpoint into a folder of its own, which needs no other file and which retention never deletes."""
    if stop and request.checkpoint != "latest":
        raise UsageError(
            f"--stop saves the newest checkpoint, not checkpoint {request.checkpoint}; leave out --stop or the checkpoint"
        )
    check_no_trial(request.root, "savepoint")
    from cairn.operations.take_savepoint import carry_out_savepoint, check_destination, check_free

    place = Terminal(spark, silent=as_json)
    owner = place.load(request)
    folder = join_url(request.root, owner.name)
    coordinator, dag = Coordinator(open_storage(folder), owner.name), dag or owner.name
    check_destination(folder, request.folder, request.format)
    check_free(request.folder)
    if dry_run:
        said = _would_take(request, coordinator.record(parse_checkpoint(request.checkpoint)), dag if stop else None)
        return _say(
            said,
            f"would write checkpoint {said['checkpoint']} of {said['interval']} ({said['entries']:,} entries) to {request.folder}",
            as_json,
        )
    at_rest: AbstractContextManager[tuple[str, ...]] = nullcontext(())
    if stop:
        at_rest = stopped(AirflowRest(airflow), dag, timeout_s=airflow_wait_s())
    with at_rest as runs:
        committed = commit_prepared(coordinator, runs)
        said = carry_out_savepoint(request, place)
    if as_json:
        return print_json(said | {"paused": dag if stop else None, "committed": committed})
    if stop:
        typer.echo(f"DAG {dag} is paused")
    return 0


def restore(
    root: Root,
    checkpoint: Annotated[
        str | None, typer.Argument(help="Go back to this checkpoint of the pipeline: an id, or an interval's end.")
    ] = None,
    from_savepoint: Annotated[
        str | None,
        typer.Option("--savepoint", help="Or restore the savepoint in this folder (URL); needs --code and Spark."),
    ] = None,
    code: Annotated[
        str | None, typer.Option(envvar=Variable.CODE, help="With --savepoint: module:NAME of the Pipeline.")
    ] = None,
    pipeline: Annotated[
        str | None, typer.Option(envvar=Variable.PIPELINE, help="With a checkpoint: name of the pipeline.")
    ] = None,
    dag: Dag = None,
    claim: Annotated[
        Literal["NO_CLAIM", "CLAIM"],
        typer.Option(help="With --savepoint: CLAIM deletes the savepoint after the restore."),
    ] = "NO_CLAIM",
    retract_output: Annotated[
        bool,
        typer.Option(
            "--retract-output",
            help="With a checkpoint: also delete the output of later intervals, here and in the sink's system.",
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Agree that the command discards later checkpoints.")] = False,
    allow_stale: AllowStale = False,
    allow_quarantined: AllowQuarantined = False,
    spark: Spark = LOCAL_SPARK,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> int:
    """Make a savepoint or an earlier checkpoint the state that the next interval starts from."""
    if (from_savepoint is None) == (checkpoint is None):
        raise UsageError("give either a checkpoint, as in: cairn restore 7, or --savepoint URL")
    if checkpoint is not None:
        allowed = Permissions(allow_stale_base=allow_stale, allow_quarantined=allow_quarantined)
        return _rewind(
            root, pipeline, dag, checkpoint, allowed, retract=retract_output, yes=yes, dry_run=dry_run, as_json=as_json
        )
    if retract_output:
        raise UsageError("--retract-output works only with a checkpoint")
    if code is None:
        raise UsageError("--savepoint also needs --code module:NAME, the pipeline that gets the state")
    assert from_savepoint is not None
    from cairn.operations.restore_savepoint import carry_out_restore, plan_restore_savepoint

    request = RestoreSavepoint(root=root, code=code, savepoint=from_savepoint, claim=claim)
    place = Terminal(spark, silent=as_json)
    if dry_run:
        said = plan_restore_savepoint(place.load(request), root, from_savepoint, claim=claim)
        stale = ", ".join(str(row["id"]) for row in said["discards"]) or "none"
        text = (
            f"would restore {said['entries']:,} entries as the state at {said['end']}; checkpoints made stale: {stale}"
        )
        return _say(said, text, as_json)
    said = carry_out_restore(request, place)
    return print_json(said) if as_json else 0


def _rewind(
    root: str,
    name: str | None,
    dag: str | None,
    which: str,
    allowed: Permissions,
    *,
    retract: bool,
    yes: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    if name is None:
        raise UsageError("a checkpoint also needs --pipeline NAME, the pipeline that goes back")
    coordinator = Coordinator(open_storage(join_url(root, name)), name)
    log = coordinator.log()
    plan = plan_rewind(log, _id_of(coordinator, which), allowed, retract_output=retract)
    command = None if plan.rerun is None else repair_command(log, plan.rerun, root=root, pipeline=name, dag=dag)
    said: dict[str, Any] = {
        "target": plan.target.id,
        "end": format_instant(plan.target.content.interval.end),
        "discards": [{"id": d.id, "interval": str(d.interval)} for d in plan.discards],
        "retracts": [str(interval) for interval in plan.retracts],
        "command": command,
    }
    what = str(plan) if command is None else f"{plan}\n{command}"
    if dry_run:
        return _say({"dry_run": True, **said}, what, as_json)
    if (plan.discards or plan.retracts) and not yes:
        raise UsageError(f"{what}\nNothing was done. To agree, run the same command with --yes")
    attempt = str(uuid.uuid4())
    agreed = frozenset(d.id for d in plan.discards)
    done = rewind(
        coordinator,
        plan.target.id,
        run=_run("rewind", attempt),
        attempt=attempt,
        permissions=allowed,
        agreed=agreed,
        retract_output=retract,
    )
    coordinator.clean_up()
    text = f"checkpoint {done.id} is now the newest, with the state of checkpoint {plan.target.id}\n{what}"
    if plan.retracts:
        publish = command_line("publish", root=root, pipeline=name, code=code_of(log))
        text += (
            "\nThe next checkpoint calls the sink, which deletes the retracted rows. To call the sink now, run:\n"
            + publish
        )
    return _say({"checkpoint": done.id, **said}, text, as_json)


def fork(
    root: Root,
    as_: Annotated[str, typer.Option("--as", help="Name of the pipeline that gets the state.")],
    checkpoint: Wanted = "latest",
    pipeline: Annotated[
        str | None, typer.Option(envvar=Variable.PIPELINE, help="Name of the pipeline to fork.")
    ] = None,
    from_savepoint: Annotated[
        str | None,
        typer.Option(
            "--savepoint",
            help="Take the state from the native savepoint in this folder (URL), instead of from --pipeline.",
        ),
    ] = None,
    to_root: Annotated[str | None, typer.Option(help="Root of the new pipeline; left out: the same as --root.")] = None,
    from_: Annotated[
        str | None,
        typer.Option(
            "--from", help="Start of the new pipeline's first interval, with time zone; left out: as in the forked one."
        ),
    ] = None,
    allow_stale: AllowStale = False,
    allow_quarantined: AllowQuarantined = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> int:
    """Give a checkpoint to a pipeline of another name.

    The storage links or copies the files. Afterwards neither pipeline depends on the other.
    """
    allowed = Permissions(allow_stale_base=allow_stale, allow_quarantined=allow_quarantined)
    target: int | Savepoint
    if from_savepoint is not None:
        source = open_storage(from_savepoint)
        target = read_savepoint(source)
    elif pipeline is not None:
        source = open_storage(join_url(root, pipeline))
        target = _id_of(Coordinator(source, pipeline), checkpoint)
    else:
        raise UsageError("give either --pipeline NAME or --savepoint URL")
    into = Coordinator(open_storage(join_url(root if to_root is None else to_root, as_)), as_)
    start_ms = None if from_ is None else to_ms(start_of("--from", from_))
    attempt = str(uuid.uuid4())
    content = plan_fork(source, target, into, pipeline_start_ms=start_ms, permissions=allowed)
    said = {
        "pipeline": as_,
        "of": source.url,
        "end": format_instant(content.interval.end),
        "entries": content.totals.entries,
        "bytes": content.totals.state_bytes,
    }
    if dry_run:
        text = f"would make {said['entries']:,} entries of {source.url} the state of {as_!r} at {said['end']}"
        return _say({"dry_run": True, **said}, text, as_json)
    done = fork_state(
        source,
        target,
        into,
        run=_run("fork", attempt),
        attempt=attempt,
        pipeline_start_ms=start_ms,
        permissions=allowed,
    )
    text = f"checkpoint {done.id} of {as_!r}: {said['entries']:,} entries, the state at {said['end']}"
    return _say({"checkpoint": done.id, **said}, text, as_json)


# --- shared parts -----------------------------------------------------------------------------------------------------


def _would_take(request: TakeSavepoint, record: Record, paused: str | None) -> dict[str, Any]:
    totals = record.content.totals
    return {
        "dry_run": True,
        "checkpoint": record.id,
        "interval": str(record.content.interval),
        "end": format_instant(record.content.interval.end),
        "entries": totals.entries,
        "bytes": totals.state_bytes,
        "savepoint": request.folder,
        "format": request.format,
        "would_pause": paused,
    }


def _id_of(coordinator: Coordinator, which: str) -> int:
    """Return the id of the checkpoint that the user named."""
    found = parse_checkpoint(which)
    return found if isinstance(found, int) else coordinator.record(found).id


def start_of(option: str, text: str) -> datetime:
    """Return the instant that an option gives."""
    found = parse_checkpoint(text)
    if not isinstance(found, datetime):
        raise UsageError(f"{option} {text!r} is not a time with time zone; write it as in 2013-01-02T00:00:00+00:00")
    return found


def _run(what: str, attempt: str) -> RunRef:
    return RunRef(run_id=f"{what}__{attempt}", clear_number=0, try_number=1)


def _say(answer: dict[str, Any], text: str, as_json: bool) -> int:
    typer.echo(json.dumps(answer, indent=2) if as_json else text)
    return 0
