"""DAGs `weather` and `flying_weather`.

- `weather` runs hourly and processes two pipelines of jobs/pipelines/weather.py. Each pipeline has a task that
  processes the interval, and a task that commits the checkpoint. This file makes the four tasks from operators, because
  the helper `cairn_operators.stateful_pipeline` builds a DAG of only one pipeline.
- `flying_weather` has no state. It runs when the pipelines `aircraft` and `weather` have both committed a checkpoint.
"""

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from airflow.sdk import DAG, Asset, task

# Airflow 3.1 does not have it in `airflow.sdk`.
from airflow.timetables.interval import CronDataIntervalTimetable

from cairn_operators import CommitCheckpointOperator, ProcessIntervalOperator, retry_arguments

DATA = Path(os.environ.get("CAIRN_DATA", Path(__file__).resolve().parents[1] / "data"))
ROOT = os.environ.get("CAIRN_ROOT", f"file://{DATA}/state")


def interval_and_checkpoint(name: str, code: str) -> tuple[Any, Any]:
    """Return the task that processes an interval of a pipeline, and the task that commits its checkpoint.

    If one pipeline of a DAG fails, the checkpoints of the pipelines before it stay committed.
    """
    process = ProcessIntervalOperator(task_id=name, code=code, root=ROOT, mode="changelog", **retry_arguments())
    checkpoint = CommitCheckpointOperator(
        task_id=f"{name}_checkpoint", attempt=process.output["attempt"], **retry_arguments()
    )
    return process, checkpoint


with DAG(
    "weather",
    # The text "@hourly" would give intervals of zero length in an Airflow whose configuration does not set
    # `create_cron_data_intervals`.
    schedule=CronDataIntervalTimetable("@hourly", timezone="UTC"),
    start_date=datetime(2013, 1, 1, 6, tzinfo=UTC),
    end_date=datetime(2013, 12, 30, 23, tzinfo=UTC),
    catchup=False,
    max_active_runs=1,
    tags=["cairn"],
    doc_md="""
The DAG processes the weather at New York's airports hour by hour. `windows` adds up windows of six hours for each airport,
which event-time timers close. Then `records` keeps the extremes so far, as a vectorised aggregate. Each task has its own
pipeline and checkpoints, in changelog mode.

The first hour is 2013-01-01T06:00Z. To run the first day, type
`airflow backfill create --dag-id weather --from-date 2013-01-01T06:00 --to-date 2013-01-02T05:00 --max-active-runs 1 --reprocess-behavior completed`
""",
) as weather:
    _, windows_checkpoint = interval_and_checkpoint("windows", "pipelines.weather:WEATHER")
    records, _ = interval_and_checkpoint("records", "pipelines.weather:RECORDS")
    windows_checkpoint >> records

with DAG(
    "flying_weather",
    # Every committed checkpoint emits an event of its pipeline's asset. This DAG runs when both assets have had an
    # event since its last run.
    schedule=Asset("cairn://aircraft") & Asset("cairn://weather"),
    start_date=datetime(2013, 1, 1, tzinfo=UTC),
    catchup=False,
    max_active_runs=1,
    tags=["cairn"],
    doc_md="Mean departure delays by weather, from the committed output of `aircraft` and `weather`. A checkpoint of both triggers a run.",
) as flying_weather_dag:

    @task
    def delays_by_weather(triggering_asset_events: Any = None) -> dict[str, Any]:
        """Return the mean departure delay by weather, and the ids of the checkpoints that triggered this run."""
        from pipelines.flying_weather import flying_weather

        checkpoints = {
            asset.name: [event.extra.get("checkpoint") for event in events]
            for asset, events in triggering_asset_events.items()
        }
        return {"checkpoints": checkpoints, **flying_weather(ROOT)}

    delays_by_weather()
