"""The operator that validates a checkpoint, a prepared attempt or a savepoint."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from airflow.sdk import XComArg

from cairn_operators.airflow_versions import AirflowFailException, stats
from cairn_operators.data_docs_link import DataDocsLink
from cairn_operators.data_interval import is_due_in
from cairn_operators.driver_operator import DriverOperator
from cairn_operators.failures import repair
from cairn_operators.pipeline_asset import pipeline_asset
from cairn_operators.request_of import request_of
from cairn_operators.task_order import THEN_VALIDATES
from cairn_operators.task_outputs import task_of


class ValidateStateOperator(DriverOperator):
    """The task that validates a checkpoint, a prepared attempt or a savepoint, and fails if it finds damage.

    Give exactly one of `checkpoint`, `attempt` and `savepoint`.

    Args:
        code: The `Pipeline`, as `module:NAME`.
        root: URL of the folder that holds the pipelines.
        checkpoint: Id of a checkpoint. A refused checkpoint is quarantined: no later interval starts from it.
        attempt: A prepared attempt. A refused attempt can't be committed: the task is a gate in front of
            `CommitCheckpointOperator`.
        savepoint: URL of a savepoint's folder.
        docs: Folder for Data Docs, to which the task links; None writes no Data Docs.
        fast: True only compares files with their records, without Spark. A full validation also restores the state,
            compares every entry with the recorded digests, and evaluates the pipeline's expectations.
        full_every: With `fast`, validate in full at intervals that end a whole number of `full_every` after the DAG's
            start date; None never does.
        expectations_every: In a full validation, evaluate expectations only at intervals that end a whole number of
            `expectations_every` after the DAG's start date; None always does.
        pipeline: Name of the `Pipeline`, whose asset `cairn://<pipeline>` gets an event for a checkpoint that
            passed. By default it is taken from the task whose output `checkpoint` is; without such a task no asset
            gets an event.
        **kwargs: More arguments of `DriverOperator` and Airflow's `BaseOperator`.

    Raises:
        ValueError: None or several of `checkpoint`, `attempt` and `savepoint` are given.
    """

    template_fields: Sequence[str] = (*DriverOperator.template_fields, "checkpoint", "attempt", "savepoint", "docs")
    operator_extra_links = (DataDocsLink(),)

    def __init__(
        self,
        *,
        checkpoint: str | XComArg | None = None,
        attempt: str | XComArg | None = None,
        savepoint: str | None = None,
        docs: str | None = None,
        fast: bool = False,
        full_every: timedelta | None = None,
        expectations_every: timedelta | None = None,
        pipeline: str | None = None,
        **kwargs: Any,
    ) -> None:
        if (before := task_of(checkpoint)) is not None:
            pipeline = pipeline or getattr(before, "pipeline", None)
        asset = None
        if pipeline is not None and checkpoint is not None:
            asset = pipeline_asset(pipeline)
            kwargs["outlets"] = [asset, *kwargs.get("outlets", [])]
        super().__init__(**{**THEN_VALIDATES, **kwargs})
        if sum(given is not None for given in (checkpoint, attempt, savepoint)) != 1:
            raise ValueError(f"{self.task_id}: give exactly one of checkpoint, attempt and savepoint")
        self.asset = asset
        self.checkpoint = checkpoint
        self.attempt = attempt
        self.savepoint = savepoint
        self.docs = docs
        self.fast = fast
        self.full_every = full_every
        self.expectations_every = expectations_every
        self.pipeline = pipeline
        self.docs_page: str | None = None  # `DataDocsLink` reads this when the task has ended.

    def execute(self, context: Any) -> dict[str, Any]:
        """Validate the target in a driver. If the state is refused, the task fails without a retry."""
        from state_backend.values.operation_parameters import Validate

        request = request_of(
            Validate,
            self,
            checkpoint="latest" if self.checkpoint is None else str(self.checkpoint),
            attempt=None if self.attempt is None else str(self.attempt),
            fast=self.fast and (self.full_every is None or not is_due_in(context, self.full_every)),
            without_expectations=not is_due_in(context, self.expectations_every),
        )
        result = self.run_driver(request)
        self.docs_page = result.get("docs")
        if self.docs_page:
            self.log.info("Data Docs: %s", self.docs_page)
        verdict = "passed" if result["success"] else "refused"
        stats.incr(f"cairn.validation.{verdict}", tags={"pipeline": self.pipeline or self.dag_of_pipeline})
        if not result["success"]:
            raise AirflowFailException(self._refusal(result))
        if self.asset is not None and (events := context.get("outlet_events")) is not None:
            told = ("checkpoint", "mode", "entries", "expectations")
            events[self.asset].extra = {**{name: result.get(name) for name in told}, "validated": True}
        return {**result, "attempt": self.attempt}

    def _target(self) -> str:
        for name in ("attempt", "savepoint", "checkpoint"):
            if (value := getattr(self, name)) is not None:
                return f"{name} {value}"
        raise AssertionError("the constructor refuses a task without a target")

    def _refusal(self, result: dict[str, Any]) -> str:
        """Return the error message for a refused target: findings, affected published output, and what to do."""
        findings = "\n".join(f"- {finding}" for finding in result["findings"])
        what = self._target()
        head = f"validation refused {what}: {len(result['findings'])} finding(s)\n{findings}\n"
        if self.docs_page:
            head += f"Data Docs: {self.docs_page}\n"
        if self.attempt is not None and not result.get("quarantined"):
            return (
                f"{head}The attempt is neither committed nor published. Remove the cause. Then clear this run's process task with "
                "downstream."
            )
        if self.savepoint is not None:
            return f"{head}Do not restore this savepoint. Take another one."
        from state_backend.values.errors import Rerun

        published = "\n".join(f"- {one['interval']} (checkpoint {one['id']})" for one in result.get("published", ()))
        text = (
            f"{head}The checkpoint is quarantined: no interval starts from it. Published output that depends on it:\n"
            f"{published or '- none'}\nRemove the cause. Then clear the process tasks of this run and of later runs with "
            "downstream"
        )
        if not (again := result.get("rerun")):
            return f"{text}."
        return f"{text}, or run every interval again that is not healthy:\n{repair(self, Rerun.from_json(again))}"
