"""The DAG of a pipeline: process, checkpoint, then validate, savepoint and sweep."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from airflow.sdk import DAG, Param

from cairn_operators.check_dag_arguments import checked_place
from cairn_operators.commit_checkpoint import CommitCheckpointOperator
from cairn_operators.dag_schedule import check_same_schedule, timetable_of_pipeline, with_data_intervals
from cairn_operators.pipeline_source import pipeline_name_of
from cairn_operators.process_data_interval import ProcessIntervalOperator
from cairn_operators.retries import retry_arguments
from cairn_operators.savepoint import SavepointOperator
from cairn_operators.sweep_state import SweepStateOperator
from cairn_operators.validate_state import ValidateStateOperator

_PERMISSIONS = {
    "allow_gap": "Start from the latest usable checkpoint before a gap or a quarantined checkpoint",
    "allow_stale_base": "Start from a checkpoint that a re-run made stale",
    "replace_overlapping": "Replace the output of intervals that overlap this interval and have other boundaries",
}


def stateful_pipeline(
    dag_id: str,
    code: str,
    root: str,
    *,
    schedule: Any = ...,
    start_date: datetime,
    pipeline: str | None = None,
    gate: bool = False,
    process: Mapping[str, Any] | None = None,
    checkpoint: Mapping[str, Any] | None = None,
    validate: Mapping[str, Any] | bool = False,
    savepoint: Mapping[str, Any] | None = None,
    sweep: Mapping[str, Any] | None = None,
    spark_conn_id: str = "cairn_spark",
    storage_conn_id: str | None = None,
    spark_conf: Mapping[str, Any] | None = None,
    **dag_arguments: Any,
) -> DAG:
    """Build the DAG of a pipeline: `process >> checkpoint >> [validate, savepoint, sweep]`.

    The intervals are processed one after the other. Each task gets the retries of `retry_arguments`. If you pass a
    `retry_delay` for a task, Airflow's own retries replace them.

    Args:
        dag_id: Id of the DAG.
        code: The `Pipeline`, as `module:NAME`.
        root: URL of the folder that holds the pipelines.
        schedule: A cron text in the time zone of `start_date`, a timedelta, or a timetable with data intervals. Left
            out: the schedule that the `Pipeline` declares, read from the source of its module.
        start_date: Start of the first interval.
        pipeline: Name of the `Pipeline`; None: read from the source of its module, else `dag_id`.
        gate: Validate each attempt before its commit: `process >> validate >> checkpoint >> [savepoint, sweep]`.
        process: More arguments of the `ProcessIntervalOperator`.
        checkpoint: More arguments of the `CommitCheckpointOperator`.
        validate: Arguments of the `ValidateStateOperator`, such as `docs`; True for its defaults, False for no
            validation. With `gate`, False means the defaults.
        savepoint: Arguments of the `SavepointOperator`. `folder` is required: the URL of the folder for all savepoints,
            which get the names `<folder>/<pipeline>/<day>-<checkpoint>`. None takes no savepoints.
        sweep: Arguments of the `SweepStateOperator`, such as `cadence`. None sweeps nothing.
        spark_conn_id: Connection to Spark.
        storage_conn_id: Connection of type `google_cloud_platform`, `aws` or `wasb` for the root. None: the host's own
            identity.
        spark_conf: Spark's configuration for this pipeline.
        **dag_arguments: More arguments of the DAG.

    Returns:
        The DAG with the tasks `process`, `checkpoint` and those of `validate`, `savepoint` and `sweep` that are asked
        for.

    Raises:
        ValueError: `code` is not `module:NAME`, `root` is no storage URL, `savepoint` has no `folder`, an operator
            refuses its arguments, the `Pipeline` declares another schedule, or neither DAG nor `Pipeline` has a
            schedule.
    """
    where = checked_place(dag_id, code, root, spark_conn_id, storage_conn_id) | {"spark_conf": spark_conf}
    if savepoint is not None and "folder" not in savepoint:
        raise ValueError(
            f"DAG {dag_id}: savepoint has no 'folder', the URL of the folder for all savepoints, as in "
            'savepoint={"folder": "gs://bucket/savepoints"}'
        )
    name = pipeline or pipeline_name_of(code, otherwise=dag_id)
    params = {p: Param(False, type="boolean", description=text) for p, text in _PERMISSIONS.items()}
    arguments = {"catchup": False, "max_active_runs": 1, "params": params, **dag_arguments}
    timetable = timetable_of_pipeline(dag_id, code) if schedule is ... else with_data_intervals(schedule, start_date)
    with DAG(dag_id, schedule=timetable, start_date=start_date, **arguments) as dag:
        # The `process` task itself waits for the checkpoint of the interval before. Airflow's `max_active_runs` does
        # not keep intervals in order, since a backfill has its own limit of active runs.
        batch = ProcessIntervalOperator(
            task_id="process",
            pipeline=name,
            permissions={p: f"{{{{ params.{p} }}}}" for p in _PERMISSIONS},
            **where,
            **retry_arguments(process),
        )
        commit = CommitCheckpointOperator(
            task_id="checkpoint", attempt=batch.output["attempt"], **retry_arguments(checkpoint)
        )
        if validate is not False or gate:
            target = {"attempt": batch.output["attempt"]} if gate else {"checkpoint": commit.output["checkpoint"]}
            more = retry_arguments(validate if isinstance(validate, Mapping) else None)
            validation = ValidateStateOperator(task_id="validate", pipeline=name, **target, **where, **more)
            if gate:
                # None if `validate` has no result, as when a person marks it as success. A missing key would fail.
                commit.validated = validation.output
                validation >> commit
        if savepoint is not None:
            _add_savepoint(commit, name, where, savepoint)
        if sweep is not None:
            commit >> SweepStateOperator(
                task_id="sweep",
                pipeline=name,
                root=root,
                storage_conn_id=storage_conn_id,
                **retry_arguments(sweep),
            )
    check_same_schedule(dag, code)
    return dag


def _add_savepoint(
    commit: CommitCheckpointOperator, pipeline: str, where: Mapping[str, Any], arguments: Mapping[str, Any]
) -> None:
    checkpoint = commit.output["checkpoint"]
    # Several pipelines may share the folder. With the checkpoint's id, a re-run has a folder of its own.
    folder = f"{arguments['folder'].rstrip('/')}/{pipeline}/{{{{ data_interval_end | ds }}}}-{checkpoint}"
    SavepointOperator(
        task_id="savepoint", checkpoint=checkpoint, **where, **retry_arguments({**arguments, "folder": folder})
    )
