"""The command `cairn backfill`: create Airflow's backfill, and try again until it is complete."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC
from enum import StrEnum
from typing import Annotated

import typer

from cairn.command.airflow_rest import AirflowRest
from cairn.command.from_request import option_of
from cairn.command.options import Airflow, Json, airflow_wait_s
from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.checkpoint.log import read_log
from state_backend.values.day_or_instant import first_instant, last_instant, needs_zone
from state_backend.values.environment import Variable
from state_backend.values.errors import UsageError
from state_backend.values.operation_parameters import FIRST_INTERVAL, LAST_INTERVAL, RunRange


class Reprocess(StrEnum):
    """Values of `--reprocess`, as Airflow's API names them."""

    none = "none"
    failed = "failed"
    completed = "completed"


def backfill(
    dag: Annotated[str, typer.Option(help="Id of the DAG to run.")],
    from_: Annotated[str, typer.Option("--from", help=f"{FIRST_INTERVAL} See --root for the zone of a day.")],
    to: Annotated[str, typer.Option("--to", help=f"{LAST_INTERVAL}. See --root for the zone of a day.")],
    reprocess: Annotated[
        Reprocess,
        typer.Option(
            help="Which intervals that have an ended run to run again: none, failed (run failed), or completed (all). "
            "Intervals without a run always run."
        ),
    ] = Reprocess.completed,
    max_active_runs: Annotated[
        int,
        typer.Option(
            min=1,
            help="How many runs Airflow keeps active at a time. Intervals are computed one after another; above 1, Airflow validates "
            "one while the next is computed.",
        ),
    ] = 2,
    replace_overlapping: Annotated[bool, option_of(RunRange, "replace_overlapping")] = False,
    root: Annotated[
        str | None,
        typer.Option(
            envvar=Variable.ROOT,
            help="URL of the folder that holds all pipelines, only for the zone of days: that of the pipeline's cron "
            "schedule. Left out, or without a cron schedule: Airflow's default zone.",
        ),
    ] = None,
    pipeline: Annotated[
        str | None, typer.Option(help="With --root: name of the pipeline; left out: the id of the DAG.")
    ] = None,
    airflow: Airflow = Variable.AIRFLOW.default,
    as_json: Json = False,
) -> int:
    """`cairn backfill` checks that Airflow has a run for each interval. `cairn heal` runs only what needs a repair."""
    rest = AirflowRest(airflow)
    for option, text in (("--from", from_), ("--to", to)):
        first_instant(option, text)  # Raises an error for a wrong text, before the first request.
    zone = None
    if needs_zone(from_) or needs_zone(to):
        recorded = None if root is None else read_log(open_storage(join_url(root, pipeline or dag))).schedule
        zone = rest.zone_of_days(dag, recorded)
    rules = UTC if zone is None else zone.rules
    first, last = first_instant("--from", from_, rules), last_instant("--to", to, rules)
    if last < first:
        raise UsageError(
            f"--from {from_} is after --to {to}; --from is the start of the first interval, --to of the last one"
        )
    made = rest.create_backfill(
        dag,
        first,
        last,
        max_active_runs=max_active_runs,
        reprocess=reprocess.value,
        conf={"replace_overlapping": True} if replace_overlapping else None,
        timeout_s=airflow_wait_s(),
        say=lambda text: typer.echo(text, err=True),
    )
    days = "" if zone is None else f" ({zone.name})"
    text = f"backfill {made.id} of DAG {dag}: {made.runs} runs from {from_} to {to}{days}\n{airflow.rstrip('/')}/dags/{dag}"
    typer.echo(json.dumps(asdict(made), indent=2) if as_json else text)
    return 0
