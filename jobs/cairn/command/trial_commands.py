"""The commands `cairn try`, `cairn compare`, `cairn deploy` and `cairn trials list`.

They run changed code of a pipeline beside production, show what the code changes, and take the code over. Trying and
deploying run Spark where `--spark` says. Comparing needs no Spark.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cairn.command.open_spark import open_spark
from cairn.command.options import Code, ExpectedPipeline, Json, Root, Spark, open_log
from cairn.command.options import Pipeline as Name
from cairn.command.state_commands import load_named
from cairn.trials.compare_trial import compare_trial, comparison_lines
from state_backend.checkpoint.trials import (
    find_trial,
    list_trials,
    remove_trial,
)
from state_backend.inspection.checkpoint_names import parse_duration
from state_backend.inspection.compare_runs import describe_comparison
from state_backend.inspection.describe import describe_trial
from state_backend.values.day_or_instant import first_instant
from state_backend.values.environment import Variable
from state_backend.values.intervals import format_instant, from_ms

if TYPE_CHECKING:
    from cairn.operations.plan_range import Progress
    from cairn.operations.run_intervals import Outcome
    from cairn.trials.try_code import TrialPlan

FINDINGS = 1
_KEEP = "3d"
_LISTED = 10

OfTrial = Annotated[str | None, typer.Argument(help="Name of the trial; left out: the pipeline's only trial.")]
Keys = Annotated[
    list[str] | None,
    typer.Option("--key", help="Column that identifies an output row; may be repeated. Left out: compare whole rows."),
]


def try_(
    root: Root,
    code: Annotated[str, typer.Option(envvar=Variable.CODE, help="module:NAME of the Pipeline with the new code.")],
    from_: Annotated[str, typer.Option("--from", help="A day, as in 2024-01-04, or the start of the first interval.")],
    to: Annotated[str, typer.Option("--to", help="A day, or the start of the last interval; included.")],
    pipeline: ExpectedPipeline = None,
    every: Annotated[
        str | None,
        typer.Option(help="Length of an interval, as in 1h; left out: the pipeline's schedule."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the trial; left out: made from its start and code.")] = None,
    savepoint: Annotated[
        str | None, typer.Option(help="Begin from this native savepoint instead of production's state.")
    ] = None,
    keep: Annotated[str, typer.Option(help="How long the trial stays before a sweep removes it: 12h, 3d.")] = _KEEP,
    spark: Spark = "local[2]",
    as_json: Json = False,
) -> int:
    """Run intervals with other code beside production, from production's state before them. Production does not change.

    No sink is called. After a failure the same command continues.
    """
    from cairn.operations.coordinator_of import coordinator_of
    from cairn.operations.plan_range import boundaries_of, named_intervals
    from cairn.trials.try_code import try_code

    keeps, declared = parse_duration(keep), load_named(code, pipeline)
    length = None if every is None else parse_duration(every)
    rule = boundaries_of(declared, coordinator_of(declared, root).log(), length)
    intervals = named_intervals(from_, to, rule, ("--from", "--to"))
    session = open_spark(spark, f"cairn try {declared.name}", silent=as_json)
    tried = try_code(
        session,
        declared,
        intervals,
        root,
        code=code,
        name=name,
        savepoint=savepoint,
        keep=keeps,
        on_plan=None if as_json else _say_plan,
        on_outcome=None if as_json else _say_outcome,
    )
    trial = tried.trial
    compared = _command("compare", root, declared.name, trial.name)
    if as_json:
        said = describe_trial(trial) | {
            "root": tried.root,
            "computed": sum(o.computed for o in tried.outcomes),
            "fork_seconds": round(tried.fork_s, 3),
            "other_input": [str(i) for i in tried.other_input],
        }
        return _print_json(said)
    typer.echo(f"kept until {format_instant(from_ms(trial.ends_ms))}; the first sweep after that removes the trial")
    typer.echo(f"to see what the trial changes, run:\n{compared}")
    return 0


def _say_plan(plan: TrialPlan) -> None:
    trial = plan.trial
    begins = "empty state" if trial.base is None else f"the state of checkpoint {trial.base.id}"
    typer.echo(
        f"trial {trial.name} of {trial.pipeline}: code {trial.code_version or trial.code_hash[:8]}, from {begins}"
    )
    for interval in plan.other_input[:_LISTED]:
        typer.echo(
            f"{interval}: the input has changed: the source's position differs from that in production's checkpoint"
        )
    if len(plan.other_input) > _LISTED:
        typer.echo(f"the input of {len(plan.other_input) - _LISTED} more intervals has changed too")


def _say_outcome(outcome: Outcome, progress: Progress) -> None:
    if outcome.record is None:
        typer.echo(f"{outcome.interval}: {outcome.why}")
        return
    totals = outcome.record.content.totals
    typer.echo(
        f"{outcome.interval}: {totals.input_rows:,} rows in, {totals.output_rows:,} out, {totals.entries:,} entries ({progress})"
    )


def list_(root: Root, pipeline: Name, as_json: Json = False) -> int:
    """List the trials of a pipeline."""
    there = list_trials(root, pipeline)
    if not there:
        open_log(root, pipeline)  # raises an error if the pipeline does not exist
    if as_json:
        return _print_json([describe_trial(trial) for trial in there])
    for trial in there:
        typer.echo(
            f"{trial.name}: {trial.span}, code {trial.code_version or trial.code_hash[:8]} ({trial.code}), "
            f"kept until {format_instant(from_ms(trial.ends_ms))}"
        )
    if not there:
        typer.echo(f"pipeline {pipeline!r} has no trial")
    return 0


def remove(
    name: Annotated[str, typer.Argument(help="Name of the trial.")], root: Root, pipeline: Name, as_json: Json = False
) -> int:
    """Remove a trial with its state and output."""
    removed = remove_trial(root, find_trial(root, pipeline, name))
    if as_json:
        return _print_json({"name": removed.name, "files": removed.files, "bytes": removed.bytes})
    typer.echo(f"removed trial {removed.name}: {removed.files} files")
    return 0


# --- compare ----------------------------------------------------------------------------------------------------------


def compare(
    root: Root,
    pipeline: Name,
    trial: OfTrial = None,
    key: Keys = None,
    limit: Annotated[int, typer.Option(min=0, help="How many examples of each kind of difference.")] = 3,
    interval: Annotated[
        str | None,
        typer.Option(help="Compare only the interval that starts then, as in 2024-01-04, and the state at its end."),
    ] = None,
    to: Annotated[
        Path | None, typer.Option(help="Folder for all rows that differ: a Parquet file for each interval.")
    ] = None,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with code 1 if the results differ.")] = False,
    as_json: Json = False,
) -> int:
    """Show what a trial changes: output rows, late rows and states beside production's, interval by interval.

    --key names the columns by which output rows of the trial and of production are matched. Results with equal digests
    are not read. Needs no Spark.
    """
    start = None if interval is None else first_instant("--interval", interval)
    found_trial, found = compare_trial(root, pipeline, trial, key or (), limit, to, start)
    said = describe_comparison(found)
    if as_json:
        _print_json({"trial": describe_trial(found_trial)} | said)
    else:
        typer.echo("\n".join(comparison_lines(found_trial, said)))
    return FINDINGS if exit_code and not found.same else 0


# --- deploy -----------------------------------------------------------------------------------------------------------


def deploy(
    root: Root,
    code: Code,
    trial: OfTrial = None,
    pipeline: ExpectedPipeline = None,
    past: Annotated[
        bool,
        typer.Option(
            "--past", help="Run the trial's intervals again in production; commit only results equal to the trial's."
        ),
    ] = False,
    key: Keys = None,
    yes: Annotated[bool, typer.Option("--yes", help="Agree to deploy.")] = False,
    spark: Spark = "local[2]",
    as_json: Json = False,
) -> int:
    """Take over the code of a trial from the next interval on, or with --past also for the trial's intervals.

    Without --yes, only show what the command would do and what the trial changes. For that comparison, --key names the
    columns by which output rows of the trial and of production are matched.
    """
    from cairn.operations.coordinator_of import coordinator_of
    from cairn.trials.deploy_trial import deploy_past, plan_deployment, restore_command

    declared = load_named(code, pipeline)
    session = open_spark(spark, f"cairn deploy {declared.name}", silent=as_json)
    plan = plan_deployment(session, declared, root, name=trial, past=past)
    changes = compare_trial(root, declared.name, plan.trial.name, key or (), 3)
    said = describe_comparison(changes[1])
    what = [
        f"would run again in production: {len(plan.again)} intervals of the trial, {plan.trial.span}"
        if past
        else "this code can continue from production's state: no interval is run again",
        *([f"and {len(plan.behind)} later intervals, which the trial did not run"] if plan.behind else []),
    ]
    if not yes:
        if as_json:
            return _print_json(
                {"deployed": False, "again": len(plan.again), "behind": len(plan.behind), "comparison": said}
            )
        typer.echo("\n".join([*comparison_lines(plan.trial, said), *what]))
        typer.echo("Nothing was done. To agree, run the same command with --yes")
        return 0
    outcomes = []
    if past:
        outcomes = deploy_past(session, declared, root, plan, on_outcome=None if as_json else _say_outcome)
    restore = restore_command(coordinator_of(declared, root).log(), plan, root)
    if as_json:
        deployed = {"deployed": True, "again": len(plan.again), "behind": len(plan.behind)}
        return _print_json({**deployed, "checkpoint": outcomes[-1].checkpoint if outcomes else None, "back": restore})
    if past:
        typer.echo(f"{len(plan.again)} intervals have the results of the trial: their digests are equal")
    _say_next_steps(code, restore, past)
    return 0


def _say_next_steps(code: str, restore: str | None, past: bool) -> None:
    typer.echo(f"Let the DAG run {code} from the next interval on")
    if restore is not None:
        typer.echo(f"To go back, put the old code into the DAG, and restore its state:\n{restore}")
    elif past:
        typer.echo(
            "To go back, put the old code into the DAG, and run these intervals again: no checkpoint is before them"
        )


# --- shared parts -----------------------------------------------------------------------------------------------------


def _command(what: str, root: str, pipeline: str, trial: str) -> str:
    return f"cairn {what} {trial} --root {shlex.quote(root)} --pipeline {pipeline}"


def _print_json(value: Any) -> int:
    typer.echo(json.dumps(value, indent=2))
    return 0
