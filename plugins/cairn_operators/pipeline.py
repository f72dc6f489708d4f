"""A pipeline as a DAG: process, checkpoint, then validate, savepoint and sweep."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

import pendulum
from airflow.sdk import DAG, CronDataIntervalTimetable, DeltaDataIntervalTimetable, Param

from cairn_operators.checkpoint_operator import CheckpointOperator
from cairn_operators.micro_batch import StatefulMicroBatchOperator
from cairn_operators.parse_time import check_pipeline_and_root
from cairn_operators.retries import retry_arguments
from cairn_operators.savepoint import SavepointOperator
from cairn_operators.sweep_state import SweepStateOperator
from cairn_operators.validate_state import ValidateStateOperator

_NOT_CRON = ("@once", "@continuous")
_ATTEMPT = "{{ ti.xcom_pull(task_ids='process')['attempt'] }}"
# The driver says whether the pipeline has a sink: importing it here to ask would import PySpark with every parse.
_IF_SINK = "{%% if ti.xcom_pull(task_ids='process').get('sink') %%}%s{%% endif %%}"
_CHECKPOINT = "{{ ti.xcom_pull(task_ids='checkpoint')['checkpoint'] }}"


def with_data_intervals(schedule: Any, start_date: datetime) -> Any:
    """The schedule with a data interval from each tick to the next, where it is a cron text or a timedelta; any other as it is."""
    if isinstance(schedule, str) and schedule not in _NOT_CRON:
        return CronDataIntervalTimetable(schedule, timezone=pendulum.instance(start_date).timezone)
    return DeltaDataIntervalTimetable(schedule) if isinstance(schedule, timedelta) else schedule


def stateful_pipeline(
    dag_id: str,
    pipeline: str,
    root: str,
    *,
    schedule: Any,
    start_date: datetime,
    pipeline_name: str | None = None,
    gate: bool = False,
    process: Mapping[str, Any] | None = None,
    checkpoint: Mapping[str, Any] | None = None,
    validate: Mapping[str, Any] | bool = False,
    savepoint: Mapping[str, Any] | None = None,
    sweep: Mapping[str, Any] | None = None,
    spark_conn_id: str = "cairn_spark",
    gcp_conn_id: str | None = None,
    spark_conf: Mapping[str, Any] | None = None,
    **dag_arguments: Any,
) -> DAG:
    """Build the DAG of a pipeline: ``process >> checkpoint >> [validate, savepoint, sweep]``, one data interval after the other.

    Every task is retried as `retry_arguments` says. A ``retry_delay`` of your own replaces these retries.

    Args:
        dag_id: Id of the DAG.
        pipeline: The `Pipeline`, as ``module:NAME``.
        root: URL of the folder that holds the pipelines.
        schedule: A cron text in the time zone of ``start_date``, a timedelta, or a timetable with data intervals.
        start_date: Start of the first interval.
        pipeline_name: Name of the `Pipeline`; None for ``dag_id``.
        gate: Validate each attempt before its commit: ``process >> validate >> checkpoint >> [savepoint, sweep]``.
        process: More arguments of the `StatefulMicroBatchOperator`.
        checkpoint: More arguments of the `CheckpointOperator`.
        validate: Arguments of the `ValidateStateOperator`, such as ``docs_dir``; True for its defaults, False for no validation.
        savepoint: Arguments of the `SavepointOperator`. ``to`` is the URL of the folder for all savepoints. None takes no savepoints.
        sweep: Arguments of the `SweepStateOperator`. ``every`` is required. None sweeps nothing.
        spark_conn_id: Connection to Spark.
        gcp_conn_id: Connection with the key for a ``gs://`` root; None for application default credentials.
        spark_conf: Spark's configuration for this pipeline.
        **dag_arguments: More arguments of the DAG.

    Raises:
        ValueError: ``pipeline`` is not ``module:NAME``, or ``root`` is no storage URL.
    """
    where: dict[str, Any] = {
        "pipeline": pipeline,
        "root": root,
        "spark_conn_id": spark_conn_id,
        "gcp_conn_id": gcp_conn_id,
        "spark_conf": spark_conf,
    }
    name = pipeline_name or dag_id
    permissions = {
        "allow_gap": Param(False, type="boolean", description="Start from the latest checkpoint before a gap"),
        "allow_stale_base": Param(
            False, type="boolean", description="Start from a checkpoint that a re-run made stale"
        ),
        "replace_overlapping": Param(
            False, type="boolean", description="Replace output of intervals that overlap this one, cut otherwise"
        ),
    }
    check_pipeline_and_root(dag_id, pipeline, root)
    arguments = {"catchup": False, "max_active_runs": 1, "params": permissions, **dag_arguments}
    with DAG(dag_id, schedule=with_data_intervals(schedule, start_date), start_date=start_date, **arguments) as dag:
        # The order of intervals is process's own business: it waits for the checkpoint before its own, also in a backfill,
        # whose max_active_runs is its own.
        batch = StatefulMicroBatchOperator(
            task_id="process",
            pipeline_name=name,
            permissions={name: f"{{{{ params.{name} }}}}" for name in permissions},
            **where,
            **retry_arguments(process),
        )
        commit = CheckpointOperator(
            task_id="checkpoint",
            pipeline_name=name,
            root=root,
            gcp_conn_id=gcp_conn_id,
            attempt=_ATTEMPT,
            sink_of=_IF_SINK % pipeline,
            validated=gate,
            **retry_arguments(checkpoint),
        )
        batch >> commit
        if validate is not False or gate:
            what: dict[str, Any] = {"attempt": _ATTEMPT} if gate else {"checkpoint": _CHECKPOINT}
            validation = ValidateStateOperator(
                task_id="validate",
                pipeline_name=name,
                **what,
                **where,
                **retry_arguments(validate if isinstance(validate, Mapping) else None),
            )
            if gate:
                batch >> validation >> commit
            else:
                commit >> validation
        if savepoint is not None:
            # The name has the checkpoint's id: a re-run of the day takes another savepoint, and the first one stays as it is.
            to = f"{savepoint['to'].rstrip('/')}/{{{{ data_interval_end | ds }}}}-{_CHECKPOINT}"
            commit >> SavepointOperator(
                task_id="savepoint",
                checkpoint=_CHECKPOINT,
                **where,
                **retry_arguments({**savepoint, "to": to}),
            )
        if sweep is not None:
            commit >> SweepStateOperator(
                task_id="sweep",
                pipeline_name=name,
                root=root,
                gcp_conn_id=gcp_conn_id,
                **retry_arguments(sweep),
            )
    return dag
