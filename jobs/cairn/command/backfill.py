"""The command `cairn backfill`: create Airflow's backfill, and try again until it is complete."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated

import typer

from cairn.command.airflow_rest import AirflowRest
from state_backend.inspection.checkpoint_names import parse_duration
from state_backend.values.airflow_commands import DEFAULT_AIRFLOW
from state_backend.values.errors import UsageError
from state_backend.values.intervals import format_instant


class Reprocess(StrEnum):
    """Values of `--reprocess`, as Airflow's API names them."""

    none = "none"
    failed = "failed"
    completed = "completed"


def backfill(
    dag: Annotated[str, typer.Option(help="Id of the DAG to run.")],
    from_: Annotated[
        str, typer.Option("--from", help="Start of the first interval: 2024-01-04, or 2024-01-04T06:00 (UTC).")
    ],
    to: Annotated[str, typer.Option("--to", help="Start of the last interval, included.")],
    reprocess: Annotated[
        Reprocess, typer.Option(help="Which ended runs to repeat: none, failed or completed (all).")
    ] = Reprocess.completed,
    max_active_runs: Annotated[int, typer.Option(min=1, help="How many runs at a time; intervals stay in order.")] = 1,
    replace_overlapping: Annotated[
        bool,
        typer.Option("--replace-overlapping", help="Replace output of overlapping intervals with other boundaries."),
    ] = False,
    timeout: Annotated[str, typer.Option(help="How long to wait until an earlier backfill ends: 90s, 30m.")] = "2m",
    airflow: Annotated[
        str, typer.Option(envvar="CAIRN_AIRFLOW", help="Address of Airflow. CAIRN_AIRFLOW_TOKEN may hold a token.")
    ] = DEFAULT_AIRFLOW,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON value instead of text.")] = False,
) -> int:
    """Run a DAG's intervals again, in order: create Airflow's backfill, and check that it has all of its runs."""
    first, last = day_or_instant("--from", from_), day_or_instant("--to", to)
    if last < first:
        raise UsageError(
            f"--from {from_} is after --to {to}; --from is the start of the first interval, --to of the last one"
        )
    made = AirflowRest(airflow).create_backfill(
        dag,
        first,
        last,
        max_active_runs=max_active_runs,
        reprocess=reprocess.value,
        conf={"replace_overlapping": True} if replace_overlapping else None,
        timeout_s=parse_duration(timeout).total_seconds(),
        say=lambda text: typer.echo(text, err=True),
    )
    span = f"from {format_instant(first)} to {format_instant(last)}"
    text = f"backfill {made.id} of DAG {dag}: {made.runs} runs {span}\n{airflow.rstrip('/')}/dags/{dag}"
    typer.echo(json.dumps(asdict(made), indent=2) if as_json else text)
    return 0


def day_or_instant(option: str, text: str) -> datetime:
    """Parse a day or an instant; without a time zone it is in UTC.

    Raises:
        UsageError: The text is neither. The message names the option.
    """
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise UsageError(
            f"{option} {text!r} is not a date or time like 2024-01-04 or 2024-01-04T06:00+00:00"
        ) from error
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
