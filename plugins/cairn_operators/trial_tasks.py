"""The operators and the DAG that try other code beside production, and promote it when a person has agreed."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from airflow.sdk import DAG, AssetAlias, Param, XComArg

from cairn_operators.airflow_versions import AirflowFailException, AirflowSkipException
from cairn_operators.ask_person import agreed_before, ask_person, check_approved
from cairn_operators.check_dag_arguments import BY_HAND, checked_place
from cairn_operators.driver_operator import DriverOperator
from cairn_operators.pipeline_asset import pipeline_asset
from cairn_operators.pipeline_source import pipeline_name_of
from cairn_operators.range_tasks import FROM_TO, day_or_instant, tell_asset
from cairn_operators.request_of import request_of
from cairn_operators.retries import retry_arguments
from cairn_operators.task_outputs import push_outputs

PROMOTE = ("ask, from the next interval on", "ask, for the past too", "no")
_AGREED_KEY = "cairn_promote_agreed"
_SHOWN_LINES = 60

_DOC = """Runs intervals with other code beside production, shows what the code changes, and promotes the code if a person agrees.

1. **try** forks production's state, runs the intervals in a separate root, and compares the results. Its log has the differences. The task
   only reads production: it calls no sink and adds no event to the asset.
2. **promote** shows the comparison to a person and waits for an answer (Required Actions). With *for the past too*, the intervals run again
   in production, and each is committed only if its result equals the trial's.

A sweep removes the trial when its time is over.
"""


class TryCodeOperator(DriverOperator):
    """The task that runs intervals with other code beside production, and compares the results.

    The task only reads production. A retry goes on where the earlier try stopped.

    Args:
        code: The `Pipeline` with the new code, as `module:NAME`.
        root: URL of the folder that holds the pipelines.
        pipeline: Name of the `Pipeline` in production.
        first: A day, or the start of the first interval as an ISO instant. With a schedule, a day is in its time zone
            and means all intervals that begin on this day. Otherwise it is in UTC and means the interval that begins
            with the day.
        last: A day, or the start of the last interval; included.
        every: Length of an interval; None for the pipeline's schedule.
        trial: Name of the trial; if empty, Cairn derives a name from the first interval and the code.
        match: Columns that identify output rows, separated by commas; empty compares whole rows.
        keep_for: How long the trial stays before a sweep removes it.
        **kwargs: More arguments of `DriverOperator` and Airflow's `BaseOperator`.

    Raises:
        ValueError: `every` or `keep_for` is not positive.
    """

    template_fields: Sequence[str] = (
        *DriverOperator.template_fields,
        "pipeline",
        "first",
        "last",
        "trial",
        "match",
    )
    ui_color = "#d5e3f0"

    def __init__(
        self,
        *,
        pipeline: str,
        first: str,
        last: str,
        every: timedelta | None = None,
        trial: str = "",
        match: str = "",
        keep_for: timedelta = timedelta(days=3),
        **kwargs: Any,
    ) -> None:
        super().__init__(**{"doc_md": _DOC, **kwargs})
        if (every is not None and every <= timedelta(0)) or keep_for <= timedelta(0):
            raise ValueError(
                f"{self.task_id}: every is {every} and keep_for is {keep_for}; both must be longer than zero"
            )
        self.pipeline = pipeline
        self.first = first
        self.last = last
        self.every = every
        self.trial = trial
        self.match = match
        self.keep_for = keep_for

    def execute(self, context: Any) -> dict[str, Any]:
        from state_backend.values.operation_parameters import TryCode

        request = request_of(
            TryCode,
            self,
            first=day_or_instant("first", self.first),
            last=day_or_instant("last", self.last),
            trial=self.trial.strip() or None,
            compare=True,
            match=tuple(filter(None, map(str.strip, self.match.split(",")))),
        )
        # The checkpoints belong to the trial, not to production. So the pipeline's asset gets no event.
        result, _ = self.run_and_collect(request)
        # A person reads the comparison in an XCom, so it has at most 60 lines; the log has all of them.
        lines = result.pop("comparison")
        shown = lines if len(lines) <= _SHOWN_LINES else [*lines[:_SHOWN_LINES], "the rest is in the log of this task"]
        result |= {"trial": result["name"], "comparison": "\n".join(shown), "other_input": len(result["other_input"])}
        push_outputs(context, trial=result["trial"], comparison=result["comparison"])
        return result


class PromoteTrialOperator(DriverOperator):
    """The task that promotes the code of a trial after a person agreed.

    The task does not change the DAG of the pipeline: its log asks the user to give that DAG the new code.
    The asset `cairn://<pipeline>` gets an event for each interval that ran again in production.

    Args:
        code: The `Pipeline` with the new code, as `module:NAME`.
        root: URL of the folder that holds the pipelines.
        pipeline: Name of the `Pipeline` in production.
        trial: Name of the trial.
        how: "ask, from the next interval on": ask the person, then check that the code can continue from production's
            state; no interval runs again. "ask, for the past too": ask the person, then run the trial's intervals and
            the processed later intervals again in production. "no": skip the task and ask no person.
        comparison: Text that the person sees.
        response_timeout: Longest wait for the person; None for no limit.
        **kwargs: More arguments of `DriverOperator` and Airflow's `BaseOperator`.
    """

    template_fields: Sequence[str] = (*DriverOperator.template_fields, "pipeline", "trial", "how", "comparison")
    ui_color = "#d5e3f0"

    def __init__(
        self,
        *,
        pipeline: str,
        trial: str | XComArg,
        how: str,
        comparison: str | XComArg = "",
        response_timeout: timedelta | None = None,
        **kwargs: Any,
    ) -> None:
        self.alias = AssetAlias(f"cairn_{pipeline}_promote")
        self.asset = pipeline_asset(pipeline)
        super().__init__(**{"doc_md": _DOC, **kwargs, "outlets": [self.alias, *kwargs.pop("outlets", [])]})
        self.pipeline = pipeline
        self.trial = trial
        self.how = how
        self.comparison = comparison
        self.response_timeout = response_timeout

    def execute(self, context: Any) -> dict[str, Any]:
        """Ask a person whether to promote. Promote at once if the person agreed in an earlier try."""
        if self.how not in PROMOTE:
            raise AirflowFailException(f"promote is {self.how!r}; expected one of: {'; '.join(PROMOTE)}")
        if self.how == "no":
            raise AirflowSkipException("the run's parameter promote is 'no', so nothing is promoted")
        if agreed_before(context, _AGREED_KEY) == self._question():
            return self._promote(context)
        past = self.how == PROMOTE[1]
        what = "and run its intervals again in production" if past else "from the next interval on"
        question = f"{self.pipeline}: promote trial {self.trial}, {what}?"
        ask_person(self, context, question, self.comparison, {"asked": self._question()}, self.response_timeout)

    def after_answer(self, context: Any, event: dict[str, Any], asked: str) -> dict[str, Any]:
        """Promote the trial after a person has answered (`event`). Airflow calls this method.

        Returns:
            `again` (number of the trial's intervals that ran again in production), `behind` (number of later intervals
            that ran again too) and `back` (the command that undoes the promotion; None if that is impossible).
        """
        who = check_approved(context, event, "promotion", "promoted", _AGREED_KEY, asked)
        self.log.info("%s has agreed to promote trial %s", who, self.trial)
        return self._promote(context)

    def _promote(self, context: Any) -> dict[str, Any]:
        from state_backend.values.operation_parameters import PromoteTrial

        request = request_of(PromoteTrial, self, trial=str(self.trial), past=self.how == PROMOTE[1])
        done, committed = self.run_and_collect(request)
        tell_asset(context, self.alias, self.asset, committed)
        return done

    def _question(self) -> str:
        return f"{self.trial}: {self.how}"


_PARAMS = {
    **FROM_TO,
    "match": Param(
        "",
        type="string",
        title="Match",
        description="Columns that identify an output row, separated by commas; empty: compare whole rows",
    ),
    "promote": Param(PROMOTE[0], type="string", enum=[*PROMOTE], title="Promote"),
}


def trial_pipeline(
    dag_id: str,
    code: str,
    root: str,
    *,
    pipeline: str | None = None,
    every: timedelta | None = None,
    keep_for: timedelta = timedelta(days=3),
    spark_conn_id: str = "cairn_spark",
    storage_conn_id: str | None = None,
    try_: dict[str, Any] | None = None,
    promote: dict[str, Any] | None = None,
    **dag_arguments: Any,
) -> DAG:
    """Build a DAG without schedule that tries other code of a pipeline, and promotes it when a person agrees.

    The form of its trigger asks for the new code, for the first and the last interval, and whether to promote.

    Args:
        dag_id: Id of the DAG.
        code: The `Pipeline`, as `module:NAME`. The form proposes it as the new code.
        root: URL of the folder that holds the pipelines.
        pipeline: Name of the `Pipeline`; None: read from the source of its module.
        every: Length of an interval; None for the pipeline's schedule.
        keep_for: How long a trial stays before a sweep removes it.
        spark_conn_id: Connection to Spark.
        storage_conn_id: Connection of type `google_cloud_platform`, `aws` or `wasb` for the root. None: the host's own
            identity.
        try_: More arguments of the `TryCodeOperator`.
        promote: More arguments of the `PromoteTrialOperator`.
        **dag_arguments: More arguments of the DAG.

    Returns:
        The DAG with the tasks `try` and `promote`.

    Raises:
        ValueError: `code` is not `module:NAME`, `root` is no storage URL, the source of the module does not show
            the pipeline's name, or `every` or `keep_for` is not positive.
    """
    place = checked_place(dag_id, code, root, spark_conn_id, storage_conn_id)
    proposed = Param(
        code, type="string", minLength=3, title="Code", description="The Pipeline with the new code, as module:NAME"
    )
    where = {**place, "code": "{{ params.code }}", "pipeline": pipeline or pipeline_name_of(code)}
    with DAG(dag_id, **{**BY_HAND, "params": {"code": proposed, **_PARAMS}, "doc_md": _DOC, **dag_arguments}) as dag:
        tried = TryCodeOperator(
            task_id="try",
            first="{{ params.from }}",
            last="{{ params.to }}",
            match="{{ params.match }}",
            every=every,
            keep_for=keep_for,
            **where,
            **retry_arguments(try_),
        )
        trial = {"trial": tried.output["trial"], "comparison": tried.output["comparison"]}
        PromoteTrialOperator(
            task_id="promote", how="{{ params.promote }}", **trial, **where, **retry_arguments(promote)
        )
    return dag
