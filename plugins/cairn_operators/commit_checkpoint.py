"""The operator that commits a prepared attempt: state, source position and output in one write, without Spark."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, get_args

from airflow.sdk import Asset, BaseOperator, XComArg
from airflow.sdk.bases.xcom import BaseXCom

from cairn_operators.airflow_versions import AirflowFailException, DownstreamTasksSkipped, stats
from cairn_operators.data_interval import is_due_in
from cairn_operators.failures import failure_of
from cairn_operators.pipeline_asset import pipeline_asset
from cairn_operators.storage_connection import as_storage_identity
from cairn_operators.task_order import COMMITS_FIRST
from cairn_operators.task_outputs import push_outputs, task_of

if TYPE_CHECKING:
    from state_backend.checkpoint.commit_attempt import CommitResult
    from state_backend.values.records import Record


_DOC = """Commits what `process` prepared: one write makes state, source position and output of the interval current. Then the task
sends the output to the sink, and deletes files that no retained checkpoint needs. It needs no Spark.

* A **retry** finishes what an earlier try left. Nothing is committed twice.
* If you **clear only this task**, it commits nothing new: the attempt is already committed, or lost. To run the interval again, clear
  `process` with downstream.
* Each commit adds an event to the asset `cairn://<pipeline>`, which starts DAGs that are scheduled on the asset. The event has the
  checkpoint's id, interval, rows and bytes.
"""


class CommitCheckpointOperator(BaseOperator):  # type: ignore[misc]  # Airflow is not type-checked here
    """The task that commits a prepared attempt, publishes its output and deletes files of dropped checkpoints.

        process = ProcessIntervalOperator(task_id="process", ...)
        CommitCheckpointOperator(task_id="checkpoint", attempt=process.output["attempt"])

    A retry finishes the steps that an earlier try left; nothing is committed twice. A lost attempt fails the task for
    good, since only a new attempt can replace it. `output["checkpoint"]` is the checkpoint's id. The asset
    `cairn://<pipeline>` gets an event with the id and counts, and so does each `Asset` of `outlets`.

    Args:
        attempt: `process.output["attempt"]` of the task that prepared the attempt, or the attempt's uuid as text. From
            the task, the next four arguments get their defaults. With a uuid, give `pipeline` and `root`.
        pipeline: Name of the `Pipeline`.
        root: URL of the folder that holds the pipelines.
        sink_of: The pipeline with a sink, as `module:NAME`; empty for no sink. Only for a sink the task imports the
            pipeline's code, and with it PySpark.
        storage_conn_id: Connection of type `google_cloud_platform`, `aws` or `wasb` for the root. None: the host's own
            identity.
        validated: `output` of the task that validated the attempt, or the validation that the attempt has passed:
            "fast" or "full". The checkpoint then counts as validated. False: a later task may refuse the checkpoint.
            The asset's event has True or False.
        **kwargs: More arguments of Airflow's `BaseOperator`.

    Raises:
        ValueError: `attempt` is a uuid, and `pipeline` or `root` is missing.
    """

    template_fields: Sequence[str] = ("pipeline", "root", "attempt", "sink_of", "storage_conn_id", "validated")
    ui_color = "#cfe3d4"

    def __init__(
        self,
        *,
        attempt: str | XComArg,
        pipeline: str | None = None,
        root: str | None = None,
        sink_of: str | XComArg | None = None,
        storage_conn_id: str | None = None,
        validated: bool | str | XComArg = False,
        **kwargs: Any,
    ) -> None:
        if (process := task_of(attempt)) is not None:
            pipeline, root = pipeline or process.pipeline, root or process.root
            storage_conn_id = storage_conn_id or process.storage_conn_id
            sink_of = process.output["sink"] if sink_of is None else sink_of
        if pipeline is None or root is None:
            raise ValueError(
                'pipeline or root is missing: pass attempt=process.output["attempt"], or all three as texts'
            )
        self.asset = pipeline_asset(pipeline)
        super().__init__(
            outlets=[self.asset, *kwargs.pop("outlets", [])], **{"doc_md": _DOC, **COMMITS_FIRST, **kwargs}
        )
        self.pipeline = pipeline
        self.root = root
        self.attempt = attempt
        self.sink_of = sink_of or ""
        self.storage_conn_id = storage_conn_id
        self.validated: Any = validated
        # `execute` sets `_committed` and `_tables`. `get_openlineage_facets_on_complete` reads them after the task.
        self._committed: Record | None = None
        self._tables: list[tuple[Callable[[], str], bool]] = []

    def execute(self, context: Any) -> dict[str, Any]:
        """Commit the attempt, publish its output, and delete files that no retained checkpoint needs."""
        with as_storage_identity(self.storage_conn_id):
            summary = self._execute(context)
        push_outputs(context, checkpoint=summary["checkpoint"])
        if skipped := self._not_due(context, dropped="base" not in summary):
            self.log.info(
                "these tasks have nothing to do after this interval, so Airflow does not start them: %s",
                ", ".join(skipped),
            )
            context["ti"].xcom_push(
                key=BaseXCom.XCOM_RETURN_KEY, value=summary
            )  # Airflow pushes no result for a task that raises.
            raise DownstreamTasksSkipped(tasks=skipped)
        return summary

    def _not_due(self, context: Any, *, dropped: bool) -> list[str]:
        """Return the ids of the direct downstream tasks that Airflow must not start now.

        These are savepoint and sweep tasks that are not due after this interval. If retention has already dropped the
        checkpoint (`dropped`), they are also the tasks that read the checkpoint.
        """
        behind = context["task"].downstream_list if self.has_dag() else []
        examine = [task.task_id for task in behind if dropped and getattr(task, "checkpoint", None) is not None]
        others = [task for task in behind if task.task_id not in examine]
        return [*examine, *(one.task_id for one in others if not is_due_in(context, getattr(one, "cadence", None)))]

    def _execute(self, context: Any) -> dict[str, Any]:
        from state_backend.checkpoint.clean_up_dropped import try_clean_up
        from state_backend.checkpoint.commit_attempt import commit
        from state_backend.checkpoint.location import locate
        from state_backend.checkpoint.publish_output import publish
        from state_backend.checkpoint.quarantine import mark_validated
        from state_backend.values.errors import AttemptLost, CairnError, SinkFailed
        from state_backend.values.records import ValidationMode

        started_s = time.monotonic()
        phases_us: dict[str, int] = {}

        def ended(phase: str) -> None:
            """Store, as the duration of `phase`, the microseconds since the previous phase ended."""
            phases_us[phase] = int((time.monotonic() - started_s) * 1e6) - sum(phases_us.values())

        if isinstance(self.validated, Mapping):
            # A person who marks `validate` as success before it starts leaves its result for an older attempt.
            self.validated = self.validated.get("attempt") == self.attempt and self.validated["mode"]
        try:
            pipeline = _pipeline_of(self.sink_of) if self.sink_of else None
            at = locate(self.root, self.pipeline)
            ended("open")
            committed = commit(at, self.attempt)
            ended("commit")
            self._committed = committed.record
            if committed.record is not None and self.validated in get_args(ValidationMode):
                mark_validated(at, committed.id, self.validated)
            failed: SinkFailed | None = None
            try:
                if pipeline is None:
                    # An old `process` may not know the sink, which still waits for output of other commits.
                    of = committed.id if committed.log is None else None
                    publish(at, None, after=committed.log, of=of)
                else:
                    pipeline.call_sink(at, None, after=committed.log, code=self.sink_of)
            except SinkFailed as error:
                failed = error
            ended("publish")
            if failed is None or committed.id not in failed.ids:
                self._tables = [] if pipeline is None else _tables_of(pipeline.sink)
            try_clean_up(at.storage, committed.log)
            ended("clean_up")
            tags = {"pipeline": self.pipeline}
            stats.gauge("cairn.checkpoint.unpublished", len(failed.ids) if failed is not None else 0, tags=tags)
            if failed is not None:
                if committed.id in failed.ids:
                    raise failed
                # The sink refused only output of earlier intervals. The tasks of those intervals have failed already,
                # so this task does not fail.
                self.log.warning("%s", failed)
        except AttemptLost as error:
            raise AirflowFailException(
                f"{failure_of(error, self)}\nThis attempt can't be committed any more. "
                f"Make a new attempt:\n{command_to_clear(context, _maker(context['task']))}"
            ) from error
        except CairnError as error:
            raise failure_of(error, self) from error
        wall_us = int((time.monotonic() - started_s) * 1e6)
        return self._report(context, committed, phases_us, wall_us)

    def _report(self, context: Any, committed: CommitResult, phases_us: dict[str, int], wall_us: int) -> dict[str, Any]:
        from state_backend.inspection.describe import summarise
        from state_backend.values.human_units import in_words

        if committed.record is None:
            self.log.info("the attempt was committed as checkpoint %d, which retention has dropped since", committed.id)
            return {"checkpoint": committed.id}
        summary = summarise(committed.record)
        self.log.info("::group::Checkpoint %d of %s", committed.id, self.pipeline)
        for name, value in summary.items():
            self.log.info("%-15s %s", name, f"{value:>15,}" if isinstance(value, int) else value)
        self.log.info("::endgroup::")
        send_metrics(self.pipeline, committed.record, timedelta(microseconds=wall_us))
        # The record can't hold these durations, since the commit writes the record before the phases end.
        self.log.info("checkpoint %d: %s", committed.id, in_words(phases_us, wall_us))
        # Airflow's `outlet_events` is false while it is empty, so it is compared with None.
        if (outlet_events := context.get("outlet_events")) is not None:
            extra = {
                **summary,
                "rows": summary["output_rows"],
                "bytes": summary["state_bytes"],
                "validated": bool(self.validated),
            }
            for asset in self.outlets:
                if isinstance(asset, Asset):
                    outlet_events[asset].extra = extra
        return summary

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> Any:
        """Return OpenLineage's facets of the interval's inputs, outputs and checkpoint; None if nothing was committed.

        Airflow's OpenLineage provider calls this method when the task has ended, also after a failure. If the commit
        succeeded and the sink failed, the outputs lack the sink's tables.
        """
        if self._committed is None:
            return None
        from cairn_operators.lineage_event import lineage_of
        from state_backend.adapters.open_storage import join_url

        tables = []
        for table_url, late in self._tables:
            try:
                tables.append((table_url(), late))
            except Exception as error:
                self.log.warning("the lineage event lacks a table of the sink: %s", error)
        return lineage_of(self._committed, join_url(self.root, self.pipeline), tables)


def send_metrics(pipeline: str, record: Record, duration: timedelta) -> None:
    """Send the metrics of one committed checkpoint to Airflow, tagged with the pipeline.

    - `cairn.checkpoint.committed` is a counter.
    - `cairn.checkpoint.duration` is the time of commit, publish and clean-up.
    - `cairn.checkpoint.lag_s` is a gauge: the seconds from the interval's end to now, right after the commit.
    - `cairn.checkpoint.<count>` is a gauge for each count of the summary, such as `keys`.
    - `cairn.interval.<phase>` is the time of the slowest shard in a phase, such as restore, process or upload.
    """
    from state_backend.inspection.describe import COUNTS, summarise

    tags, content, summary = {"pipeline": pipeline}, record.content, summarise(record)
    stats.incr("cairn.checkpoint.committed", tags=tags)
    stats.timing("cairn.checkpoint.duration", duration, tags=tags)
    stats.gauge("cairn.checkpoint.lag_s", round(time.time() - content.interval.end.timestamp(), 3), tags=tags)
    for name in COUNTS:
        stats.gauge(f"cairn.checkpoint.{name}", summary[name], tags=tags)
    for phase, spent_us in content.durations_us.items():
        stats.timing(f"cairn.interval.{phase}", timedelta(microseconds=spent_us), tags=tags)


def _pipeline_of(sink_of: str) -> Any:
    module, _, name = sink_of.partition(":")
    return getattr(importlib.import_module(module), name)


def _tables_of(sink: Any) -> list[tuple[Callable[[], str], bool]]:
    """Return (function that returns the URL, True for late rows) of each table that a sink writes."""
    tables = sink.each_table() if hasattr(sink, "each_table") else [(sink, False)]
    return [(table.table_url, late) for table, late in tables if hasattr(table, "table_url")]


def _maker(task: Any) -> Any:
    """Return the nearest upstream task that prepares attempts, or `task` itself if no upstream task does.

    The search passes over a validation task between `process` and `checkpoint`, as in a DAG with `gate=True`.
    """
    before = [task]
    while before:
        makers = [t for t in before if getattr(t, "makes_attempts", False)]
        if makers:
            return makers[0]
        before = [t for one in before for t in one.upstream_list]
    return task


def command_to_clear(context: Any, task: Any) -> str:
    from state_backend.values.airflow_commands import clear_command

    run = context["dag_run"]
    others: set[str] = set()
    if task.has_dag():
        others = set(task.dag.task_ids) - {t.task_id for t in task.get_flat_relatives(upstream=False)}
    return clear_command(run.dag_id, task.task_id, run.logical_date, others)
