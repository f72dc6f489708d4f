"""A pipeline as a DAG: process, checkpoint, then validate, savepoint and sweep."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

import pendulum
from airflow.sdk import DAG, CronDataIntervalTimetable, DeltaDataIntervalTimetable, Param

from cairn_operators.checkpoint_operator import IncrementalCheckpointOperator
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
    docs_dir: str | None = None,
    savepoints: str | None = None,
    expectations_every: timedelta | None = None,
    savepoint_every: timedelta | None = timedelta(days=7),
    sweep_every: timedelta | None = None,
    pipeline_name: str | None = None,
    spark_conn_id: str = "cairn_spark",
    gate: bool = False,
    gcp_conn_id: str | None = None,
    spark_conf: Mapping[str, Any] | None = None,
    process: dict[str, Any] | None = None,
    checkpoint: dict[str, Any] | None = None,
    validate: dict[str, Any] | None = None,
    savepoint: dict[str, Any] | None = None,
    sweep: dict[str, Any] | None = None,
    **dag_arguments: Any,
) -> DAG:
    """The DAG of a pipeline: ``process >> checkpoint >> [validate, savepoint, sweep]``, one data interval after the other. With
    ``gate`` nothing is committed that is not validated: ``process >> validate >> checkpoint >> [savepoint, sweep]``.

    ``schedule`` has to give data intervals. A cron text like "@daily", in the time zone of ``start_date``, and a timedelta do here,
    also where Airflow's own setting makes of them ticks without length; a timetable is taken as it is. ``pipeline_name`` is the name in the `Pipeline`;
    ``dag_id`` if left out. Without ``docs_dir`` nothing is validated, without ``savepoints`` (a directory URL) none are
    taken, without ``sweep_every`` nothing is swept. ``gcp_conn_id``: the connection with the key for a ``gs://`` root, if not the
    application's. ``spark_conf``: Spark's configuration for this pipeline. ``process``, ``checkpoint``, ``validate``, ``savepoint`` and ``sweep`` are further arguments of those tasks, as
    in ``savepoint={"consolidate": True}``; ``dag_arguments`` of the DAG. Every task is retried as `retries` says; with a
    ``retry_delay`` of your own, all its retries come after that.

    Raises: ValueError for a ``pipeline`` that is not module:NAME, or a ``root`` that is no storage URL.
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
            allow_gap="{{ params.allow_gap }}",
            allow_stale_base="{{ params.allow_stale_base }}",
            replace_overlapping="{{ params.replace_overlapping }}",
            **where,
            **retry_arguments(process),
        )
        commit = IncrementalCheckpointOperator(
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
        if docs_dir is not None or gate:
            what: dict[str, Any] = {"attempt": _ATTEMPT} if gate else {"checkpoint": _CHECKPOINT}
            validation = ValidateStateOperator(
                task_id="validate",
                docs_dir=docs_dir,
                expectations_every=expectations_every,
                pipeline_name=name,
                **what,
                **where,
                **retry_arguments(validate),
            )
            if gate:
                batch >> validation >> commit
            else:
                commit >> validation
        if savepoints is not None:
            commit >> SavepointOperator(
                task_id="savepoint",
                checkpoint=_CHECKPOINT,
                # With the id of the checkpoint: a re-run of the day is another savepoint, the user's one stays as it is.
                to=f"{savepoints.rstrip('/')}/{{{{ data_interval_end | ds }}}}-{_CHECKPOINT}",
                every=savepoint_every,
                **where,
                **retry_arguments(savepoint),
            )
        if sweep_every is not None:
            commit >> SweepStateOperator(
                task_id="sweep",
                pipeline_name=name,
                root=root,
                gcp_conn_id=gcp_conn_id,
                every=sweep_every,
                **retry_arguments(sweep),
            )
    return dag
