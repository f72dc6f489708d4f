"""The operator and the DAG that process a range of intervals in one driver. Each interval gets its own checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from airflow.sdk import DAG, Asset, AssetAlias, Param
from airflow.sdk.bases.xcom import BaseXCom

from cairn_operators.airflow_versions import AirflowFailException, DownstreamTasksSkipped, say_lacks
from cairn_operators.check_dag_arguments import BY_HAND, checked_place
from cairn_operators.failures import InputMissing, StaleBase
from cairn_operators.pipeline_asset import pipeline_asset
from cairn_operators.pipeline_source import pipeline_name_of
from cairn_operators.process_data_interval import check_mode, parse_permissions
from cairn_operators.request_of import request_of, run_of
from cairn_operators.retries import retry_arguments
from cairn_operators.task_outputs import push_outputs
from cairn_operators.validate_state import ValidateStateOperator
from cairn_operators.wait_for_input import WaitingOperator

REPROCESS = ("changed", "none", "all")

_DOC = """Runs a range of intervals, one after the other, on one Spark session. Each interval gets its own checkpoint, output and event on
the asset, as if it had run alone.

* **Results that exist**: `changed` computes a result again if code or input has changed. `none` computes only missing results. `all`
  computes all results again.
* **Dry run**: the task only logs which intervals would be computed, and why.
* **Deferred**: another pipeline has not committed what an interval reads. The task waits, without a worker slot, and goes on after
  its last commit.
* **Failure**: the run stops; the intervals before are committed. A **retry** goes on after the last commit.
* **Clear**: the run begins again with the answers of its form. With `all`, it computes everything again.
"""


class RunIntervalsOperator(WaitingOperator):
    """The task that processes and commits a range of intervals on one Spark session.

    The asset `cairn://<pipeline>` gets an event for each commit, after the task succeeded.

    Args:
        code: The `Pipeline`, as `module:NAME`.
        root: URL of the folder that holds the pipelines.
        pipeline: Name of the `Pipeline`.
        first: A day, or the start of the first interval as an ISO instant. With a schedule, a day is in its time zone
            and means all intervals that begin on this day. Otherwise it is in UTC and means the interval that begins
            with the day.
        last: A day, or the start of the last interval; included.
        every: Length of an interval; None for the pipeline's schedule.
        reprocess: Which intervals with a result are computed again: "changed" (other code or input made the result),
            "none" or "all".
        permissions: `allow_gap`: start from the latest checkpoint before a gap. `allow_stale_base`: start from a
            checkpoint that a re-run made stale. Both apply only to the first interval that is computed.
            `replace_overlapping`: replace output of intervals that overlap these intervals and have other boundaries.
        dry_run: Log what would be computed; compute nothing.
        mode: Form of the checkpoints: incremental, full or changelog.
        wait_timeout: Longest wait of each interval for upstream pipelines.
        **kwargs: More arguments of `DriverOperator` and Airflow's `BaseOperator`.

    Raises:
        ValueError: `mode` is unknown, or `every` is not positive.
    """

    template_fields: Sequence[str] = (
        *WaitingOperator.template_fields,
        "pipeline",
        "first",
        "last",
        "reprocess",
        "permissions",
        "only_plan",
        "mode",
    )

    def __init__(
        self,
        *,
        pipeline: str,
        first: str,
        last: str,
        every: timedelta | None = None,
        reprocess: str = "changed",
        permissions: Mapping[str, bool | str] | None = None,
        dry_run: bool | str = False,
        mode: str = "incremental",
        wait_timeout: timedelta = timedelta(days=1),
        **kwargs: Any,
    ) -> None:
        # A task can add only one event to an asset in its `outlets`. Through an asset alias it can add one event for
        # each interval.
        self.alias = AssetAlias(f"cairn_{pipeline}_range")
        self.asset = pipeline_asset(pipeline)
        super().__init__(**{"doc_md": _DOC, **kwargs, "outlets": [self.alias, *kwargs.pop("outlets", [])]})
        check_mode(self.task_id, mode)
        if every is not None and every <= timedelta(0):
            raise ValueError(f"{self.task_id}: every is {every}; an interval must be longer than zero")
        self.pipeline = pipeline
        self.first = first
        self.last = last
        self.every = every
        self.reprocess = reprocess
        self.permissions = {**(permissions or {})}
        self.only_plan = dry_run  # Airflow's `BaseOperator` has a method `dry_run`.
        self.mode = mode
        self.wait_timeout = wait_timeout

    def execute(self, context: Any) -> dict[str, Any]:
        """Process the range in a driver, and add an event to the asset for each commit."""
        return self.go_on(context, 0)

    def go_on(self, context: Any, since_ms: int) -> dict[str, Any]:
        """Process the range, or defer until another pipeline commits. A later call continues after the last commit."""
        from state_backend.values.operation_parameters import RunRange

        if self.reprocess not in REPROCESS:
            raise AirflowFailException(f"reprocess is {self.reprocess!r}; expected one of {', '.join(REPROCESS)}")
        request = request_of(
            RunRange,
            self,
            first=day_or_instant("first", self.first),
            last=day_or_instant("last", self.last),
            run=run_of(context),
            permissions=parse_permissions(self.permissions),
            dry_run=_yes("dry_run", self.only_plan),
        )
        if context["ti"].try_number > 1:
            say_lacks(self.log, "clear number of an active run")
        try:
            try:
                result, committed = self.run_and_collect(request)
            except StaleBase as stale:
                # An upstream was corrected while the range ran. A new call computes again from the stale interval on.
                self.log.warning("%s\nThe range runs once more", stale)
                result, committed = self.run_and_collect(request)
        except InputMissing as missing:
            if request.dry_run:
                raise AirflowFailException(str(missing)) from missing
            self.wait_for_input(context, missing, self.wait_since_ms(missing, since_ms))
        # The result keeps only the number of intervals, because a list for a long range would make a large XCom.
        result["intervals"] = len(result["intervals"])
        tell_asset(context, self.alias, self.asset, committed)
        if request.dry_run:  # The checkpoint of a kept result: the tasks behind a dry run must not validate it.
            result["checkpoint"] = None
        push_outputs(context, checkpoint=result["checkpoint"])
        if skipped := self._without_checkpoint(request.dry_run, dropped=result.pop("dropped", False)):
            self.log.info("these tasks have no checkpoint, so Airflow does not start them: %s", ", ".join(skipped))
            context["ti"].xcom_push(key=BaseXCom.XCOM_RETURN_KEY, value=result)
            raise DownstreamTasksSkipped(tasks=skipped)
        return result

    def _without_checkpoint(self, dry_run: bool, *, dropped: bool) -> list[str]:
        """Return the ids of the downstream tasks that Airflow must not start: those that would read no checkpoint."""
        behind = self.downstream_list if self.has_dag() else []
        return sorted(o.task_id for o in behind if dry_run or (dropped and getattr(o, "checkpoint", None) is not None))


def tell_asset(context: Any, alias: AssetAlias, asset: Asset, committed: Sequence[dict[str, Any]]) -> None:
    if (events := context.get("outlet_events")) is None:
        return
    for summary in committed:
        extra = {**summary, "validated": False}
        if "output_rows" in summary:
            extra |= {"rows": summary["output_rows"], "bytes": summary["state_bytes"]}
        events[alias].add(asset, extra=extra)


def day_or_instant(name: str, text: str) -> str:
    """Return `text` without outer spaces. Raise an error for argument `name` if it is neither a day nor an instant."""
    from state_backend.values.day_or_instant import first_instant
    from state_backend.values.errors import UsageError

    try:
        first_instant(name, str(text))
    except UsageError:
        raise AirflowFailException(
            f"{name} is {text!r}; expected a day or an instant like 2024-01-04 or 2024-01-04T06:00+00:00"
        ) from None
    return str(text).strip()


def _yes(name: str, value: bool | str) -> bool:
    text = str(value).strip().lower()
    if text not in ("true", "false", ""):
        raise AirflowFailException(f"{name} is {value!r}; expected true or false")
    return text == "true"


# The fields `from` and `to` of a DAG's trigger form, for the first and the last interval.
FROM_TO = {
    "from": Param(
        "",
        type="string",
        minLength=1,
        title="From",
        description="A day, such as 2024-01-04, or the start of the first interval, such as 2024-01-04T06:00+01:00",
    ),
    "to": Param(
        "", type="string", minLength=1, title="To", description="A day, or the start of the last interval; included"
    ),
}
_PARAMS = {
    **FROM_TO,
    "reprocess": Param(
        "changed",
        type="string",
        enum=[*REPROCESS],
        title="Results that exist",
        description="changed: compute again if code or input has changed; none: compute only missing results; all: compute all again",
    ),
    "replace_overlapping": Param(
        False,
        type="boolean",
        description="Replace the output of intervals that overlap these and have other boundaries",
    ),
    "dry_run": Param(
        False, type="boolean", title="Dry run", description="Only log which intervals would be computed, and why"
    ),
}


def backfill_pipeline(
    dag_id: str,
    code: str,
    root: str,
    *,
    pipeline: str | None = None,
    every: timedelta | None = None,
    spark_conn_id: str = "cairn_spark",
    storage_conn_id: str | None = None,
    backfill: Mapping[str, Any] | None = None,
    validate: Mapping[str, Any] | bool = False,
    **dag_arguments: Any,
) -> DAG:
    """Build a DAG without schedule that runs a range of a pipeline's intervals in one driver.

    The form of its trigger asks for the first and the last interval, for the treatment of results that exist, and for a
    dry run.

    Args:
        dag_id: Id of the DAG.
        code: The `Pipeline`, as `module:NAME`.
        root: URL of the folder that holds the pipelines.
        pipeline: Name of the `Pipeline`; None: read from the source of its module.
        every: Length of an interval; None for the pipeline's schedule.
        spark_conn_id: Connection to Spark.
        storage_conn_id: Connection of type `google_cloud_platform`, `aws` or `wasb` for the root. None: the host's own
            identity.
        backfill: More arguments of the `RunIntervalsOperator`.
        validate: Arguments of the `ValidateStateOperator`, which validates the last checkpoint only; True for its
            defaults, False for no validation.
        **dag_arguments: More arguments of the DAG.

    Returns:
        The DAG with the tasks `backfill` and, with validation, `validate`.

    Raises:
        ValueError: `code` is not `module:NAME`, `root` is no storage URL, or the source of the module does not show
            the pipeline's name.
    """
    where = checked_place(dag_id, code, root, spark_conn_id, storage_conn_id)
    with DAG(dag_id, **{**BY_HAND, "params": _PARAMS, "doc_md": _DOC, **dag_arguments}) as dag:
        run = RunIntervalsOperator(
            task_id="backfill",
            pipeline=pipeline or pipeline_name_of(code),
            first="{{ params.from }}",
            last="{{ params.to }}",
            every=every,
            reprocess="{{ params.reprocess }}",
            permissions={"replace_overlapping": "{{ params.replace_overlapping }}"},
            dry_run="{{ params.dry_run }}",
            **where,
            **retry_arguments(backfill),
        )
        if validate is not False:
            ValidateStateOperator(
                task_id="validate",
                checkpoint=run.output["checkpoint"],
                **where,
                **retry_arguments(validate if isinstance(validate, Mapping) else None),
            )
    return dag
