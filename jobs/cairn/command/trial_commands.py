"""The commands `cairn try`, `cairn compare`, `cairn promote` and `cairn trials`.

They run changed code of a pipeline beside production, show what the code changes, and take the code over. Trying and
promoting run Spark where `--spark` says. Comparing needs no Spark.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cairn.command.from_request import option_of
from cairn.command.options import LOCAL_SPARK, Json, Root, Spark, open_log
from cairn.command.options import Pipeline as Name
from cairn.command.printing import print_json
from cairn.command.terminal import Terminal
from cairn.trials.compare_trial import compare_trial, comparison_lines, match_of, outdated_lines
from state_backend.checkpoint.trials import find_trial, list_trials, remove_trial
from state_backend.inspection.chain_of import trials_of_chain
from state_backend.inspection.compare_runs import describe_comparison
from state_backend.inspection.describe import describe_trial
from state_backend.values.airflow_commands import command_line
from state_backend.values.day_or_instant import first_instant
from state_backend.values.intervals import format_instant, from_ms
from state_backend.values.operation_parameters import MATCH, PromoteTrial, TryCode

OfTrial = Annotated[str | None, option_of(PromoteTrial, "trial")]


def try_(request: TryCode, spark: Spark = LOCAL_SPARK, as_json: Json = False) -> int:
    """A trial calls no sink. After a failure, the same command continues."""
    from cairn.trials.try_code import carry_out_try

    said = carry_out_try(request, Terminal(spark, silent=as_json))
    if as_json:
        return print_json(said)
    compare = command_line("compare", said["name"], root=request.root, pipeline=said["pipeline"], chain=request.chain)
    typer.echo(f"kept until {said['kept_until']}; the first sweep after that removes the trial")
    typer.echo(f"to see what the trial changes, run:\n{compare}")
    return 0


def trials(
    root: Root,
    pipeline: Name,
    remove: Annotated[
        str | None, typer.Option(help="Remove the trial of this name now, with its state and output.")
    ] = None,
    as_json: Json = False,
) -> int:
    if remove is not None:
        removed = remove_trial(root, find_trial(root, pipeline, remove))
        if as_json:
            return print_json({"name": removed.name, "files": removed.files, "bytes": removed.bytes})
        typer.echo(f"removed trial {removed.name}: {removed.files} files")
        return 0
    there = list_trials(root, pipeline)
    if not there:
        open_log(root, pipeline)  # Raises an error if the pipeline does not exist.
    if as_json:
        return print_json([describe_trial(trial) for trial in there])
    for trial in there:
        typer.echo(
            f"{trial.name}: {trial.span}, code {trial.code_version or trial.code_hash[:8]} ({trial.code}), "
            f"kept until {format_instant(from_ms(trial.ends_ms))}"
        )
    if not there:
        typer.echo(f"pipeline {pipeline!r} has no trial")
    return 0


def compare(
    root: Root,
    pipeline: Name,
    name: OfTrial = None,
    interval: Annotated[
        str | None,
        typer.Argument(
            help="Compare only the interval with this start, and the state at its end; left out: all intervals. A day (its "
            "00:00), or a time without a zone, is in UTC."
        ),
    ] = None,
    match: Annotated[list[str] | None, typer.Option(help=MATCH)] = None,
    chain: Annotated[
        bool, typer.Option("--chain", help="Compare also the trials of this name of the pipelines that read this one.")
    ] = False,
    limit: Annotated[int, typer.Option(min=0, help="How many examples of each kind of difference to list.")] = 3,
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Local folder for all rows that differ, a Parquet file for each interval; left out: none is written."
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """--match names the columns by which output rows of the trial and of production are matched. Results with equal
    digests are not read. Needs no Spark.
    """
    start = None if interval is None else first_instant("interval", interval)
    first = find_trial(root, pipeline, name)
    shown = list[dict[str, Any]]()
    for trial in trials_of_chain(root, first)[0] if chain else [first]:
        into = folder / trial.pipeline if folder is not None and chain else folder
        columns = match_of(match or (), trial.pipeline, pipeline)
        _, found = compare_trial(root, trial.pipeline, trial.name, columns, limit, into, start)
        outdated = outdated_lines(root, trial)
        shown.append({"trial": describe_trial(trial)} | describe_comparison(found) | {"outdated": outdated})
        if not as_json:
            typer.echo("\n".join([*comparison_lines(trial, shown[-1]), *outdated]))
    if as_json:
        print_json(shown if chain else shown[0])
    return 0


def promote(
    request: PromoteTrial,
    yes: Annotated[
        bool,
        typer.Option(
            "--yes", help="Do what --past says. Without --yes, only check the code, and show what the trial changes."
        ),
    ] = False,
    spark: Spark = LOCAL_SPARK,
    as_json: Json = False,
) -> int:
    """Without --past, nothing is written: production changes when its DAG runs the code, from the next interval on.
    With --past, an interval is committed only if its result equals the trial's.
    """
    from cairn.trials.promote_trial import carry_out_promotion

    said = carry_out_promotion(request, Terminal(spark, silent=as_json), agreed=yes)
    if as_json:
        return print_json(said)
    if not yes:
        typer.echo("Nothing was done. To agree, run the same command with --yes")
    return 0
