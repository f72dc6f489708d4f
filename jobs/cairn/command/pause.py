"""The command `cairn pause`: pause a pipeline's DAG, and wait until none of its tasks runs."""

from __future__ import annotations

from typing import Annotated

import typer

from cairn.command.airflow_rest import AirflowRest
from cairn.command.options import Airflow, Json, Pipeline, airflow_wait_s
from cairn.command.printing import print_json
from cairn.command.stop_dag import pause_dag
from state_backend.values.environment import Variable


def pause(
    pipeline: Pipeline,
    dag: Annotated[str | None, typer.Option(help="Id of the DAG; left out: the pipeline's name.")] = None,
    airflow: Airflow = Variable.AIRFLOW.default,
    as_json: Json = False,
) -> int:
    """After Ctrl-C, and if a task runs too long, the DAG stays paused. If intervals are missing afterwards, `cairn
    heal` runs them and unpauses the DAG; otherwise unpause it in Airflow. A result that the task `checkpoint` has not
    committed yet is committed after the DAG is unpaused.
    """
    paused = dag or pipeline
    say = (lambda text: None) if as_json else typer.echo
    runs = pause_dag(AirflowRest(airflow), paused, "The DAG is paused", timeout_s=airflow_wait_s(), say=say)
    if as_json:
        return print_json({"paused": paused, "waiting_runs": list(runs)})
    typer.echo(f"DAG {paused} is paused, and none of its tasks runs")
    return 0
