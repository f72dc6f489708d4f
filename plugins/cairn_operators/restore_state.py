"""The operator and the DAG that restore an earlier checkpoint or a savepoint, or fork a checkpoint."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from airflow.sdk import DAG, Param

from cairn_operators.airflow_versions import AirflowFailException, say_lacks
from cairn_operators.ask_person import agreed_before, ask_person, check_approved
from cairn_operators.check_dag_arguments import BY_HAND, checked_place
from cairn_operators.driver_operator import DriverOperator
from cairn_operators.failures import convert_errors, repair
from cairn_operators.pipeline_source import pipeline_name_of
from cairn_operators.request_of import request_of, run_of
from cairn_operators.storage_connection import as_storage_identity
from state_backend.values.frozen import frozen

if TYPE_CHECKING:
    from state_backend.checkpoint.log import Log
    from state_backend.checkpoint.rewind import RewindPlan

_AGREED_KEY = "cairn_agreed"

_DOC = """Makes an earlier state the pipeline's state: a checkpoint (by id, or by the end of its interval) or a savepoint. Or starts
another pipeline with this state.

1. The task logs which newer checkpoints it would discard, and which output it would delete (`retract_output`). If there are any, it
   **waits for a person** (Required Actions in the UI).
2. The task **validates** the state. If validation refuses the state, nothing is restored.
3. The task commits. Its log has the command that runs the discarded intervals again.
"""


@frozen
class Restoration:
    kind: Literal["rewind", "fork", "savepoint"]
    # Id of the checkpoint to restore; None for a savepoint.
    checkpoint: int | None
    discards: frozenset[int]  # Ids of the newer checkpoints that the restore discards.
    text: str
    retracts: frozenset[str] = frozenset()  # The outputs that the restore deletes; empty without `retract_output`.
    rewind: RewindPlan | None = None  # None for a fork or a savepoint.


class RestoreStateOperator(DriverOperator):
    """The task that makes an earlier state the pipeline's state, or starts another pipeline with it.

    The task lists the checkpoints that it would discard, waits for a person if the list is not empty, validates the
    target, and commits. A retry finishes the same restore.

    Args:
        code: The `Pipeline`, as `module:NAME`.
        root: URL of the folder that holds the pipelines.
        pipeline: Name of the `Pipeline`.
        target: A checkpoint's id, the end of an interval (ISO format with a time zone), `latest`, or a savepoint's
            folder (a URL or an absolute path).
        pipeline_dag_id: DAG that processes the pipeline, for commands in messages; None for `pipeline`.
        fork_as: Name of a new pipeline that begins with the target's state; None restores this pipeline.
        fork_root: Root of the new pipeline; None for `root`.
        validate: Validate the target on Spark first, and restore nothing if it is refused.
        ask: Wait for a person before newer checkpoints are discarded.
        response_timeout: Longest wait for the person; None for no limit.
        claim: NO_CLAIM leaves a savepoint to its owner. CLAIM deletes the savepoint after the restore.
        allow_stale: Allow a target that a re-run made stale.
        allow_quarantined: Allow a target that validation refused.
        retract_output: Also delete the output of later intervals, here and in the sink's system. Only for a checkpoint
            of this pipeline.
        **kwargs: More arguments of `DriverOperator` and Airflow's `BaseOperator`.
    """

    template_fields: Sequence[str] = (
        *DriverOperator.template_fields,
        "pipeline",
        "target",
        "fork_as",
        "fork_root",
        "claim",
    )
    ui_color = "#f2c9c9"

    def __init__(
        self,
        *,
        pipeline: str,
        target: str,
        pipeline_dag_id: str | None = None,
        fork_as: str | None = None,
        fork_root: str | None = None,
        validate: bool = True,
        ask: bool = True,
        response_timeout: timedelta | None = None,
        claim: Literal["NO_CLAIM", "CLAIM"] = "NO_CLAIM",
        allow_stale: bool = False,
        allow_quarantined: bool = False,
        retract_output: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**{"doc_md": _DOC, **kwargs})
        self.pipeline = pipeline
        self.target = target
        self.pipeline_dag_id = pipeline_dag_id or pipeline
        self.fork_as = fork_as
        self.fork_root = fork_root
        self.validate = validate
        self.ask = ask
        self.response_timeout = response_timeout
        self.claim = claim
        self.allow_stale = allow_stale
        self.allow_quarantined = allow_quarantined
        self.retract_output = retract_output

    @property
    def dag_of_pipeline(self) -> str:
        """The id of the DAG that processes the pipeline, for commands in messages."""
        return str(self.pipeline_dag_id)

    def execute(self, context: Any) -> dict[str, Any]:
        """Plan the restore, ask a person if it discards checkpoints, validate the target, and commit."""
        with as_storage_identity(self.storage_conn_id):
            return self._execute(context)

    def _execute(self, context: Any) -> dict[str, Any]:
        if (done := self._log_of_target().of_attempt(self._attempt(context))) is not None:
            return self._committed_before(context, done.id)
        plan = self._plan()
        self.log.info("%s", plan.text)
        agreed = agreed_before(context, self._agreed_key)
        if self.ask and (plan.discards or plan.retracts) and (agreed is None or not plan.discards <= set(agreed)):
            self._ask(context, plan)
        return self._restore(context, plan)

    def _committed_before(self, context: Any, checkpoint: int) -> dict[str, Any]:
        from state_backend.adapters.open_storage import open_storage
        from state_backend.checkpoint.savepoints import read_claim

        say_lacks(self.log, "clear number of an active run")
        kind = self._kind()
        if kind == "savepoint" and self.claim == "CLAIM":
            claim = read_claim(open_storage(self.target.strip()))
            if claim is not None and claim.attempt == self._attempt(context):
                # With CLAIM the driver deletes the savepoint after the commit. An earlier try may have died before all
                # files were deleted, so this try calls the driver again.
                self.run_driver(self._request(context))
        self.log.info(
            "an earlier try of this run has already committed checkpoint %d; this try has nothing to do", checkpoint
        )
        return {"kind": kind, "checkpoint": checkpoint, "discarded": []}

    def after_answer(self, context: Any, event: dict[str, Any], agreed: list[int]) -> dict[str, Any]:
        """Restore after a person has answered. `agreed`: Ids of the checkpoints that the person agreed to discard.

        Airflow calls this method. The restore is planned again. If it would discard further checkpoints, nothing is
        restored.
        """
        who = check_approved(context, event, "restore", "restored", self._agreed_key, agreed)
        self.log.info("%s has agreed to discard checkpoints: %s", who, ", ".join(map(str, agreed)) or "none")
        with as_storage_identity(self.storage_conn_id):
            return self._as_agreed(context, agreed)

    def _as_agreed(self, context: Any, agreed: list[int]) -> dict[str, Any]:
        plan = self._plan()
        if more := plan.discards - set(agreed):
            raise AirflowFailException(
                f"{plan.text}\nThe restore would now discard more checkpoints than were agreed to: {', '.join(map(str, sorted(more)))}. "
                "Nothing is restored. Clear this task to be asked again"
            )
        return self._restore(context, plan)

    def _kind(self) -> Literal["rewind", "fork", "savepoint"]:
        savepoint = "://" in self.target or self.target.strip().startswith("/")
        if savepoint and self.fork_as:
            raise AirflowFailException(
                "fork_as works only with a checkpoint, and target is a savepoint; leave fork_as out"
            )
        if self.retract_output and (savepoint or self.fork_as):
            raise AirflowFailException(
                "retract_output works only for a restore of the pipeline's own checkpoint; leave out retract_output"
            )
        return "savepoint" if savepoint else "fork" if self.fork_as else "rewind"

    def _request(self, context: Any = None) -> Any:
        """Return the request for the driver. Without `context` it lacks run and attempt, which only a commit needs."""
        from state_backend.values.operation_parameters import Fork, Restore

        kind, target = self._kind(), self.target.strip()
        who = {} if context is None else {"attempt": self._attempt(context), "run": run_of(context)}
        if kind == "fork":
            who |= {"checkpoint": target, "fork_root": self.fork_root or None, "dry_run": context is None}
            return request_of(Fork, self, **who)
        return request_of(Restore, self, **{"savepoint" if kind == "savepoint" else "checkpoint": target}, **who)

    def _plan(self) -> Restoration:
        from state_backend.checkpoint.rewind import fork_state, plan_restore

        kind = self._kind()
        with convert_errors(self):
            if kind == "savepoint":
                return self._plan_savepoint(self.target.strip())
            if kind == "fork":
                said = fork_state(self._request())
                text = f"{self.pipeline}: pipeline {self.fork_as!r} begins with checkpoint {said['target']}, the state at {said['end']}"
                return Restoration(kind=kind, checkpoint=said["target"], discards=frozenset(), text=text)
            _, plan = plan_restore(self._request())
        return Restoration(
            kind=kind,
            checkpoint=plan.target.id,
            discards=frozenset(d.id for d in plan.discards),
            retracts=frozenset(map(str, plan.retracts)),
            text=str(plan) if plan.rerun is None else f"{plan}\n{repair(self, plan.rerun)}",
            rewind=plan,
        )

    def _plan_savepoint(self, folder: str) -> Restoration:
        from state_backend.adapters.open_storage import open_storage
        from state_backend.checkpoint.choose_base import discarded_by
        from state_backend.checkpoint.savepoints import read_savepoint

        content = read_savepoint(open_storage(folder)).content
        discards = frozenset(d.id for d in discarded_by(self._log_of_target(), content))
        text = f"{self.pipeline}: restore the state at the end of {content.interval} from the savepoint in {folder}."
        if discards:
            text += f" This discards {len(discards)} checkpoint(s): {', '.join(map(str, sorted(discards)))}."
        return Restoration(kind="savepoint", checkpoint=None, discards=discards, text=text)

    def _ask(self, context: Any, plan: Restoration) -> NoReturn:
        question = f"{self.pipeline}: discard {len(plan.discards)} newer checkpoint(s)"
        if plan.retracts:
            question += f", and delete the output of {len(plan.retracts)} interval(s)"
        ask_person(self, context, f"{question}?", plan.text, {"agreed": sorted(plan.discards)}, self.response_timeout)

    def _restore(self, context: Any, plan: Restoration) -> dict[str, Any]:
        if self.validate:
            self._validate(plan)
        checkpoint = self._commit(context, plan)
        self.log.info("checkpoint %d now has the restored state", checkpoint)
        return {"kind": plan.kind, "checkpoint": checkpoint, "discarded": sorted(plan.discards)}

    def _validate(self, plan: Restoration) -> None:
        from state_backend.values.operation_parameters import Validate

        checkpoint = "latest" if plan.checkpoint is None else str(plan.checkpoint)
        savepoint = self.target.strip() if plan.checkpoint is None else None
        found = self.run_driver(request_of(Validate, self, checkpoint=checkpoint, savepoint=savepoint))
        if not found["success"]:
            findings = "\n".join(f"- {finding}" for finding in found["findings"])
            what = f"savepoint {savepoint}" if savepoint else f"checkpoint {checkpoint}"
            raise AirflowFailException(f"validation refused {what}, so nothing is restored:\n{findings}")

    def _commit(self, context: Any, plan: Restoration) -> int:
        from state_backend.checkpoint.rewind import fork_state, restore_checkpoint

        request = self._request(context)
        if plan.kind == "savepoint":
            return int(self.run_driver(request)["checkpoint"])
        with convert_errors(self):
            if plan.rewind is None:  # The fork takes the id that was validated: "latest" may mean a newer one by now.
                made = fork_state(replace(request, checkpoint=str(plan.checkpoint)))
            else:
                made = restore_checkpoint(request, plan.rewind)
        return int(made["checkpoint"])

    def _attempt(self, context: Any) -> str:
        """Return the attempt's uuid, which is the same in all tries of a run until the run is cleared.

        So a retry finds what an earlier try committed, and completes it.
        """
        run = context["dag_run"]
        name = f"cairn:{run.dag_id}:{run.run_id}:{self.task_id}:{run.clear_number or 0}"
        return str(uuid.uuid5(uuid.NAMESPACE_URL, name))

    def _log_of_target(self) -> Log:
        """Return the log of the pipeline that gets the restored state: the fork if there is one, else this pipeline."""
        from state_backend.checkpoint.location import locate
        from state_backend.checkpoint.log import read_log

        root, pipeline = (self.fork_root or self.root, self.fork_as) if self.fork_as else (self.root, self.pipeline)
        return read_log(locate(root, pipeline).storage)

    @property
    def _agreed_key(self) -> str:
        return f"{_AGREED_KEY}{'_and_output' if self.retract_output else ''}"


def restore_pipeline(
    dag_id: str,
    code: str,
    root: str,
    *,
    pipeline: str | None = None,
    spark_conn_id: str = "cairn_spark",
    storage_conn_id: str | None = None,
    restore: dict[str, Any] | None = None,
    **dag_arguments: Any,
) -> DAG:
    """Build a DAG without schedule that restores a pipeline.

    The form of the DAG's trigger asks for two parameters. `target` is a checkpoint's id, the end of an interval (ISO
    format with a time zone), `latest`, or a savepoint's folder. `fork_as` is the name of a new pipeline that begins
    with the target's state; if it is empty, this pipeline gets the target's state.

    Args:
        dag_id: Id of the DAG.
        code: The `Pipeline`, as `module:NAME`.
        root: URL of the folder that holds the pipelines.
        pipeline: Name of the `Pipeline`; None: read from the source of its module.
        spark_conn_id: Connection to Spark.
        storage_conn_id: Connection of type `google_cloud_platform`, `aws` or `wasb` for the root. None: the host's own
            identity.
        restore: More arguments of the `RestoreStateOperator`.
        **dag_arguments: More arguments of the DAG.

    Returns:
        The DAG with the task `restore`.

    Raises:
        ValueError: `code` is not `module:NAME`, `root` is no storage URL, or the source of the module does not show
            the pipeline's name.
    """
    where = checked_place(dag_id, code, root, spark_conn_id, storage_conn_id)
    params = {
        "target": Param(
            "",
            type="string",
            minLength=1,
            description="A checkpoint's id, an interval's end like 2013-01-02T00:00:00+00:00, 'latest', or a savepoint's folder",
        ),
        "fork_as": Param(
            None,
            type=["null", "string"],
            description="Name of a new pipeline that begins with this state; empty: restore this pipeline",
        ),
    }
    with DAG(dag_id, **{**BY_HAND, "params": params, "doc_md": _DOC, **dag_arguments}) as dag:
        RestoreStateOperator(
            task_id="restore",
            pipeline=pipeline or pipeline_name_of(code),
            target="{{ params.target }}",
            fork_as="{{ params.fork_as or '' }}",
            **where,
            **(restore or {}),
        )
    return dag
