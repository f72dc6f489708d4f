"""The commands of `cairn` that take, restore and copy state: `savepoint`, `restore` and `fork`.

`savepoint` and `restore --savepoint` run Spark where `--spark` says. `restore CHECKPOINT` and `fork` need no Spark.
With `--dry-run` each command only prints what it would do.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any

import typer

from cairn.command.airflow_rest import AirflowRest
from cairn.command.options import AIRFLOW, LOCAL_SPARK, Dag, Json, Spark, airflow_wait_s, spark_option
from cairn.command.printing import print_json
from cairn.command.repair_command import code_of, command_to_repair
from cairn.command.stop_dag import commit_prepared, stopped
from cairn.command.terminal import Terminal
from state_backend.adapters.open_storage import join_url
from state_backend.checkpoint.location import locate
from state_backend.checkpoint.rewind import describe_rewind, fork_state, plan_restore, restore_checkpoint
from state_backend.checkpoint.trials import check_no_trial
from state_backend.inspection.publication_group import group_in
from state_backend.values.airflow_commands import command_line
from state_backend.values.environment import Variable
from state_backend.values.errors import UsageError
from state_backend.values.intervals import format_instant
from state_backend.values.operation_parameters import Fork, Restore, TakeSavepoint


def savepoint(
    request: TakeSavepoint,
    stop: Annotated[
        bool,
        typer.Option(
            "--stop",
            help="First pause the pipeline's DAG, wait for its running tasks, and commit what they computed. Leave the DAG "
            "paused. Only for latest.",
        ),
    ] = False,
    dag: Annotated[
        str | None, typer.Option(help="With --stop: id of the DAG to pause; left out: the pipeline's name.")
    ] = None,
    airflow: Annotated[
        str, typer.Option(envvar=Variable.AIRFLOW, help=f"With --stop: {AIRFLOW}")
    ] = Variable.AIRFLOW.default,
    spark: Spark = LOCAL_SPARK,
    as_json: Json = False,
) -> int:
    if stop and request.checkpoint != "latest":
        raise UsageError(
            f"--stop saves the newest checkpoint, not checkpoint {request.checkpoint}; leave out --stop or the checkpoint"
        )
    check_no_trial(request.root, "savepoint")
    from cairn.operations.savepoints.take_savepoint import carry_out_savepoint, check_free

    place = Terminal(spark, silent=as_json)
    owner = place.load(request).name
    check_free(join_url(request.root, owner), request)
    paused = (dag or owner) if stop else None
    if request.dry_run:
        said = carry_out_savepoint(request, place) | {"would_pause": paused}
    else:
        at_rest: AbstractContextManager[tuple[str, ...]] = nullcontext(())
        if paused is not None:
            at_rest = stopped(AirflowRest(airflow), paused, timeout_s=airflow_wait_s())
        with at_rest as runs:
            committed = commit_prepared(locate(request.root, owner), runs)
            said = carry_out_savepoint(request, place) | {"paused": paused, "committed": committed}
        if paused is not None:
            place.say(f"DAG {paused} is paused")
    return print_json(said) if as_json else 0


def restore(
    request: Restore,
    dag: Dag = None,
    yes: Annotated[
        bool,
        typer.Option(
            "--yes",
            help="With a checkpoint: agree to the restore. Without --yes, the command only shows what would happen, with exit "
            "code 2.",
        ),
    ] = False,
    spark: Annotated[str, spark_option(" for --savepoint")] = LOCAL_SPARK,
    as_json: Json = False,
) -> int:
    """A restore makes later checkpoints stale, and their intervals must run again."""
    if (request.savepoint is None) == (request.checkpoint is None):
        raise UsageError("give either a checkpoint, as in: cairn restore 7, or --savepoint URL")
    if request.checkpoint is not None:
        return _rewind(request, dag, yes=yes, as_json=as_json)
    if request.retract_output:
        raise UsageError("--retract-output works only with a checkpoint")
    if not request.code:
        raise UsageError("--savepoint also needs --code module:NAME, the pipeline that gets the state")
    from cairn.operations.savepoints.restore_savepoint import carry_out_restore

    said = carry_out_restore(request, Terminal(spark, silent=as_json))
    return print_json(said) if as_json else 0


def _rewind(request: Restore, dag: str | None, *, yes: bool, as_json: bool) -> int:
    if (name := request.pipeline) is None:
        raise UsageError("a checkpoint also needs --pipeline NAME, the pipeline that goes back")
    log, plan = plan_restore(request)
    command = (
        None if plan.rerun is None else command_to_repair(log, plan.rerun, root=request.root, pipeline=name, dag=dag)
    )
    what = str(plan) if command is None else f"{plan}\n{command}"
    if request.dry_run:
        return _say({"dry_run": True, **describe_rewind(plan), "command": command}, what, as_json)
    if not yes:
        raise UsageError(f"{what}\nNothing was done. To agree, run the same command with --yes")
    said = restore_checkpoint(request, plan)
    text = f"checkpoint {said['checkpoint']} is now the newest, with the state of checkpoint {plan.target.id}\n{what}"
    if plan.retracts:
        group = group_in(log)
        starts = [format_instant(interval.start) for interval in plan.retracts] if group is not None else []
        text += (
            "\nThe next checkpoint calls the sink, which deletes the retracted rows."
            if group is None
            else f"\nThe retracted rows stay in the table until group {group!r} publishes."
        )
        publish = command_line("publish", *starts, root=request.root, pipeline=name, code=code_of(log))
        text += f" To call the sink now, run:\n{publish}"
    return _say({**said, "command": command}, text, as_json)


def fork(request: Fork, as_json: Json = False) -> int:
    """The storage links or copies the state's files. Afterwards neither pipeline depends on the other."""
    said = fork_state(request)
    if request.dry_run:
        text = (
            f"would make {said['entries']:,} entries of {said['of']} the state of {said['pipeline']!r} at {said['end']}"
        )
    else:
        text = f"checkpoint {said['checkpoint']} of {said['pipeline']!r}: {said['entries']:,} entries, the state at {said['end']}"
    return _say(said, text, as_json)


def _say(answer: dict[str, Any], text: str, as_json: bool) -> int:
    typer.echo(json.dumps(answer, indent=2) if as_json else text)
    return 0
