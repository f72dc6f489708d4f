"""A pipeline as a DAG: process, checkpoint, then validate and savepoint."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from airflow.sdk import DAG, Param

from cairn_operators.incremental_checkpoint import IncrementalCheckpointOperator
from cairn_operators.micro_batch import StatefulMicroBatchOperator
from cairn_operators.savepoint import SavepointOperator
from cairn_operators.validate_state import ValidateStateOperator

_ATTEMPT = "{{ ti.xcom_pull(task_ids='process')['attempt'] }}"
# The driver says whether the pipeline has a sink: importing it here to ask would import PySpark with every parse.
_IF_SINK = "{%% if ti.xcom_pull(task_ids='process').get('sink') %%}%s{%% endif %%}"
_CHECKPOINT = "{{ ti.xcom_pull(task_ids='checkpoint')['checkpoint'] }}"


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
    consolidate: bool = False,
    pipeline_name: str | None = None,
    spark_conn_id: str = "cairn_spark",
    process: dict[str, Any] | None = None,
    checkpoint: dict[str, Any] | None = None,
    **dag_arguments: Any,
) -> DAG:
    """The DAG of a pipeline: ``process >> checkpoint >> [validate, savepoint]``, one data interval after the other.

    ``schedule`` has to give data intervals: `CronDataIntervalTimetable`. ``pipeline_name`` is the name in the `Pipeline`;
    ``dag_id`` if left out. Without ``docs_dir`` nothing is validated, without ``savepoints`` (a directory URL) none are
    taken; with ``consolidate`` each of them first rewrites the checkpoint without what is obsolete. ``process`` and
    ``checkpoint`` are further arguments of those tasks, ``dag_arguments`` of the DAG.
    """
    where: dict[str, Any] = {"pipeline": pipeline, "root": root, "spark_conn_id": spark_conn_id}
    permissions = {
        "allow_gap": Param(False, type="boolean", description="Start from the latest checkpoint before a gap"),
        "allow_stale_base": Param(
            False, type="boolean", description="Start from a checkpoint that a re-run made stale"
        ),
    }
    arguments = {"catchup": False, "max_active_runs": 1, "params": permissions, **dag_arguments}
    with DAG(dag_id, schedule=schedule, start_date=start_date, **arguments) as dag:
        # In order: an interval starts from the checkpoint of the one before. wait_for_downstream looks at the direct
        # downstream only, so that is exactly `checkpoint`: a refused validation blocks by its quarantine, not here, and
        # savepoints block nobody. A backfill's max_active_runs is its own, so the task itself must not overlap either.
        batch = StatefulMicroBatchOperator(
            task_id="process",
            allow_gap="{{ params.allow_gap }}",
            allow_stale_base="{{ params.allow_stale_base }}",
            **where,
            **{
                "depends_on_past": True,
                "wait_for_downstream": True,
                "max_active_tis_per_dag": 1,
                "retries": 3,
                "retry_delay": timedelta(seconds=5),
                **(process or {}),
            },
        )
        commit = IncrementalCheckpointOperator(
            task_id="checkpoint",
            pipeline_name=pipeline_name or dag_id,
            root=root,
            attempt=_ATTEMPT,
            sink_of=_IF_SINK % pipeline,
            **{"retries": 5, "retry_delay": timedelta(seconds=5), **(checkpoint or {})},
        )
        batch >> commit
        if docs_dir is not None:
            commit >> ValidateStateOperator(
                task_id="validate",
                checkpoint=_CHECKPOINT,
                docs_dir=docs_dir,
                expectations_every=expectations_every,
                retries=1,
                **where,
            )
        if savepoints is not None:
            commit >> SavepointOperator(
                task_id="savepoint",
                checkpoint=_CHECKPOINT,
                # With the id of the checkpoint: a re-run of the day is another savepoint, the user's one stays as it is.
                to=f"{savepoints.rstrip('/')}/{{{{ data_interval_end | ds }}}}-{_CHECKPOINT}",
                every=savepoint_every,
                consolidate=consolidate,
                retries=2,
                retry_delay=timedelta(seconds=5),
                **where,
            )
    return dag
