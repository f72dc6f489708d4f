"""The operator and the DAG that restore an earlier checkpoint or a savepoint, or fork a checkpoint."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from airflow.sdk import DAG, Param
from airflow.sdk.exceptions import AirflowFailException

from cairn_operators.ask_person import ask_person, check_approved
from cairn_operators.check_dag_arguments import check_pipeline_and_root
from cairn_operators.driver_operator import DriverOperator
from cairn_operators.failures import failure_of
from cairn_operators.pipeline_source import pipeline_name_of
from cairn_operators.storage_connection import as_storage_identity

if TYPE_CHECKING:
    from state_backend.checkpoint.coordinator import Coordinator

_AGREED_KEY = "cairn_agreed"

_DOC = """Makes an earlier state the pipeline's state: a checkpoint (by id, or by the end of its interval) or a savepoint. Or starts
another pipeline with this state.

1. The task logs which newer checkpoints it would discard, and which output it would delete (`retract_output`). If there are any, it
   **waits for a person** (Required Actions in the UI).
2. The task **validates** the state. If validation refuses the state, nothing is restored.
3. The task commits. Its log has the command that runs the discarded intervals again.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restoration:
    """The plan of one restore."""

    kind: Literal["rewind", "fork", "savepoint"]
    # Id of the checkpoint to restore; None for a savepoint.
    checkpoint: int | None
    discards: frozenset[int]
    text: str
    retracts: frozenset[str] = frozenset()


class RestoreStateOperator(DriverOperator):
    """The task that makes an earlier state the pipeline's state, or starts another pipeline with it.

    The task lists the checkpoints that it would discard, waits for a person if the list is not empty, validates the
    target, and commits. A retry finishes the same restore.

    Args:
        pipeline: The `Pipeline`, as `module:NAME`.
        root: URL of the folder that holds the pipelines.
        pipeline_name: Name of the `Pipeline`.
        target: A checkpoint's id, the end of an interval (ISO format with a time zone), `latest`, or a savepoint's
            folder (a URL or an absolute path).
        pipeline_dag_id: DAG that processes the pipeline, for commands in messages; None for `pipeline_name`.
        fork_as: Name of a new pipeline that begins with the target's state; None restores this pipeline.
        fork_root: Root of the new pipeline; None for `root`.
        validate: Validate the target on Spark first, and restore nothing if it is refused.
        ask: Wait for a person before newer checkpoints are discarded.
        response_timeout: Longest wait for the person; None for no limit.
        claim: NO_CLAIM leaves a savepoint to its owner. CLAIM deletes the savepoint after the restore.
        allow_stale_base: Allow a target that a re-run made stale.
        allow_quarantined: Allow a target that validation refused.
        retract_output: Also delete the output of later intervals, here and in the sink's system. Only for a checkpoint of
            this pipeline.
        **kwargs: More arguments of `DriverOperator` and Airflow's `BaseOperator`.
    """

    template_fields: Sequence[str] = (
        *DriverOperator.template_fields,
        "pipeline_name",
        "target",
        "fork_as",
        "fork_root",
        "claim",
    )
    ui_color = "#f2c9c9"

    def __init__(
        self,
        *,
        pipeline_name: str,
        target: str,
        pipeline_dag_id: str | None = None,
        fork_as: str | None = None,
        fork_root: str | None = None,
        validate: bool = True,
        ask: bool = True,
        response_timeout: timedelta | None = None,
        claim: Literal["NO_CLAIM", "CLAIM"] = "NO_CLAIM",
        allow_stale_base: bool = False,
        allow_quarantined: bool = False,
        retract_output: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**{"doc_md": _DOC, **kwargs})
        self.pipeline_name = pipeline_name
        self.target = target
        self.pipeline_dag_id = pipeline_dag_id or pipeline_name
        self.fork_as = fork_as
        self.fork_root = fork_root
        self.validate = validate
        self.ask = ask
        self.response_timeout = response_timeout
        self.claim = claim
        self.allow_stale_base = allow_stale_base
        self.allow_quarantined = allow_quarantined
        self.retract_output = retract_output

    @property
    def dag_of_pipeline(self) -> str:
        """The id of the DAG that processes the pipeline, for commands in messages."""
        return str(self.pipeline_dag_id)

    def execute(self, context: Any) -> dict[str, Any]:
        """Plan the restore, ask a person if it discards checkpoints, validate the target, and commit.

        Returns:
            `kind` (rewind, fork or savepoint), `checkpoint` (id of the new checkpoint) and `discarded` (ids).

        Raises:
            TaskAwaitingInput: The task waits, without a worker slot, for a person.
            AirflowException: Storage or Spark failed, and a retry may help.
            AirflowFailException: The target is missing, unusable or refused.
        """
        with as_storage_identity(self.storage_conn_id):
            return self._execute(context)

    def _execute(self, context: Any) -> dict[str, Any]:
        if (done := self._into().log().of_attempt(self._attempt(context))) is not None:
            return self._committed_before(context, done.id)
        plan = self._plan()
        self.log.info("%s", plan.text)
        store = context.get("task_state_store")
        agreed = store.get(self._agreed_key(context)) if store is not None else None
        if self.ask and (plan.discards or plan.retracts) and (agreed is None or not plan.discards <= set(agreed)):
            self._ask(context, plan)
        return self._restore(context, plan)

    def _committed_before(self, context: Any, checkpoint: int) -> dict[str, Any]:
        from state_backend.adapters.open_storage import open_storage
        from state_backend.checkpoint.savepoints import read_claim

        which = parse_target(self.target)
        savepoint = which if isinstance(which, str) and which != "latest" else None
        if savepoint is not None and self.claim == "CLAIM":
            claim = read_claim(open_storage(savepoint))
            if claim is not None and claim.attempt == self._attempt(context):
                # With CLAIM the driver deletes the savepoint after the commit. An earlier try may have died before all
                # files were deleted, so this try calls the driver again.
                self._restore_savepoint(context, savepoint)
        self.log.info(
            "an earlier try of this run has already committed checkpoint %d; this try has nothing to do", checkpoint
        )
        kind = "fork" if self.fork_as else "rewind" if savepoint is None else "savepoint"
        return {"kind": kind, "checkpoint": checkpoint, "discarded": []}

    def after_answer(self, context: Any, event: dict[str, Any], agreed: list[int]) -> dict[str, Any]:
        """Restore after a person has answered. Airflow calls this method.

        The restore is planned again. If it would discard more checkpoints than the person has agreed to, nothing is
        restored.

        Args:
            context: Airflow's context of the running task.
            event: Airflow's event with the answer.
            agreed: Ids of the checkpoints that the person was asked about.

        Returns:
            `kind` (rewind, fork or savepoint), `checkpoint` (id of the new checkpoint) and `discarded` (ids).

        Raises:
            AirflowException: Storage or Spark failed, and a retry may help.
            AirflowFailException: The person rejected, did not answer in time, or was not asked about all discarded
                checkpoints; or the target is refused.
        """
        who = check_approved(event, "restore", "restored")
        self.log.info("%s has agreed to discard checkpoints: %s", who, ", ".join(map(str, agreed)) or "none")
        if (store := context.get("task_state_store")) is not None:
            store.set(self._agreed_key(context), agreed)  # A retry reads this and does not ask again.
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

    # --- what would happen --------------------------------------------------------------------------------------------------

    def _plan(self) -> Restoration:
        from state_backend.checkpoint.rewind import plan_rewind, restorable
        from state_backend.values.airflow_commands import with_command
        from state_backend.values.errors import CairnError

        which = parse_target(self.target)
        try:
            if isinstance(which, str) and which != "latest":
                return self._plan_savepoint(which)
            coordinator = self._coordinator()
            log, permissions = coordinator.log(), self._permissions()
            checkpoint_id = which if isinstance(which, int) else coordinator.record(which).id
            if self.fork_as:
                record = restorable(log, checkpoint_id, permissions)
                text = f"{self.pipeline_name}: pipeline {self.fork_as!r} begins with checkpoint {record.id} of {record.content.interval}"
                return Restoration(kind="fork", checkpoint=record.id, discards=frozenset(), text=text)
            plan = plan_rewind(log, checkpoint_id, permissions, retract_output=self.retract_output)
        except CairnError as error:
            raise failure_of(error, self.pipeline_dag_id) from error
        return Restoration(
            kind="rewind",
            checkpoint=checkpoint_id,
            discards=frozenset(d.id for d in plan.discards),
            retracts=frozenset(map(str, plan.retracts)),
            text=with_command(str(plan), self.pipeline_dag_id, plan.rerun),
        )

    def _plan_savepoint(self, folder: str) -> Restoration:
        from state_backend.adapters.open_storage import open_storage
        from state_backend.checkpoint.lineage import discarded_by
        from state_backend.checkpoint.savepoints import read_savepoint

        if self.fork_as:
            raise AirflowFailException(
                "fork_as works only with a checkpoint, and target is a savepoint; leave fork_as out"
            )
        content = read_savepoint(open_storage(folder)).content
        discards = frozenset(d.id for d in discarded_by(self._coordinator().log(), content))
        text = (
            f"{self.pipeline_name}: restore the state at the end of {content.interval} from the savepoint in {folder}."
        )
        if discards:
            text += f" This discards {len(discards)} checkpoint(s): {', '.join(map(str, sorted(discards)))}."
        return Restoration(kind="savepoint", checkpoint=None, discards=discards, text=text)

    def _ask(self, context: Any, plan: Restoration) -> NoReturn:
        question = f"{self.pipeline_name}: discard {len(plan.discards)} newer checkpoint(s)"
        if plan.retracts:
            question += f", and delete the output of {len(plan.retracts)} interval(s)"
        ask_person(self, context, f"{question}?", plan.text, {"agreed": sorted(plan.discards)}, self.response_timeout)

    # --- doing it --------------------------------------------------------------------------------------------------------------

    def _restore(self, context: Any, plan: Restoration) -> dict[str, Any]:
        if self.validate:
            self._validate(plan)
        checkpoint = self._commit(context, plan)
        self.log.info("checkpoint %d now has the restored state", checkpoint)
        return {"kind": plan.kind, "checkpoint": checkpoint, "discarded": sorted(plan.discards)}

    def _validate(self, plan: Restoration) -> None:
        from state_backend.values.requests import Validate

        if plan.checkpoint is None:
            request, what = Validate(**self.of_code(), savepoint=self.target), f"savepoint {self.target}"
        else:
            request, what = Validate(**self.of_code(), checkpoint=str(plan.checkpoint)), f"checkpoint {plan.checkpoint}"
        found = self.run_driver(request)
        if not found["success"]:
            findings = "\n".join(f"- {finding}" for finding in found["findings"])
            raise AirflowFailException(f"validation refused {what}, so nothing is restored:\n{findings}")

    def _commit(self, context: Any, plan: Restoration) -> int:
        from state_backend.checkpoint.rewind import fork, rewind
        from state_backend.values.errors import CairnError
        from state_backend.values.records import RunRef

        if plan.checkpoint is None:
            return self._restore_savepoint(context, self.target)
        ti, dag_run = context["ti"], context["dag_run"]
        call: dict[str, Any] = {
            "run": RunRef(run_id=dag_run.run_id, clear_number=dag_run.clear_number or 0, try_number=ti.try_number),
            "attempt": self._attempt(context),
            "permissions": self._permissions(),
        }
        try:
            if plan.kind == "fork":
                return fork(self._coordinator().storage, plan.checkpoint, self._into(), **call).id
            made = rewind(
                self._coordinator(), plan.checkpoint, agreed=plan.discards, retract_output=self.retract_output, **call
            )
            self._coordinator().clean_up()
            return made.id
        except CairnError as error:
            raise failure_of(error, self.pipeline_dag_id) from error

    def _restore_savepoint(self, context: Any, folder: str) -> int:
        from state_backend.values.requests import RestoreSavepoint

        request = RestoreSavepoint(**self.of_code(), savepoint=folder, claim=self.claim, attempt=self._attempt(context))
        return int(self.run_driver(request)["checkpoint"])

    def _attempt(self, context: Any) -> str:
        """Return the attempt's uuid, which is the same in all tries of a run until the run is cleared.

        So a retry finds what an earlier try committed, and completes it.
        """
        run = context["dag_run"]
        name = f"cairn:{run.dag_id}:{run.run_id}:{self.task_id}:{run.clear_number or 0}"
        return str(uuid.uuid5(uuid.NAMESPACE_URL, name))

    def _coordinator(self) -> Coordinator:
        return _coordinator_of(self.root, self.pipeline_name)

    def _into(self) -> Coordinator:
        """Return the coordinator of the pipeline that gets the restored state: the fork, or this pipeline."""
        return _coordinator_of(self.fork_root or self.root, self.fork_as) if self.fork_as else self._coordinator()

    def _permissions(self) -> Any:
        from state_backend.values.records import Permissions

        return Permissions(allow_stale_base=self.allow_stale_base, allow_quarantined=self.allow_quarantined)

    def _agreed_key(self, context: Any) -> str:
        what = "_and_output" if self.retract_output else ""
        return f"{_AGREED_KEY}{what}_{context['dag_run'].clear_number or 0}"


def _coordinator_of(root: str, name: str) -> Coordinator:
    from state_backend.adapters.open_storage import join_url, open_storage
    from state_backend.checkpoint.coordinator import Coordinator

    return Coordinator(open_storage(join_url(root, name)), name)


def parse_target(text: str) -> int | str | datetime:
    """Parse the target of a restore."""
    text = text.strip()
    if text == "latest" or "://" in text or text.startswith("/"):
        return text
    if text.isdigit():
        return int(text)
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        instant = None
    if instant is None or instant.tzinfo is None:
        raise AirflowFailException(
            f"target is {text!r}; expected a checkpoint's id, an interval's end like 2013-01-02T00:00:00+00:00, 'latest', or the "
            "folder of a savepoint (a URL or an absolute path)"
        )
    return instant


def restore_pipeline(
    dag_id: str,
    pipeline: str,
    root: str,
    *,
    pipeline_name: str | None = None,
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
        pipeline: The `Pipeline`, as `module:NAME`.
        root: URL of the folder that holds the pipelines.
        pipeline_name: Name of the `Pipeline`; None: read from the source of its module.
        spark_conn_id: Connection to Spark.
        storage_conn_id: Connection of type `google_cloud_platform` or `aws` for the root. None: the host's own identity.
        restore: More arguments of the `RestoreStateOperator`.
        **dag_arguments: More arguments of the DAG.

    Returns:
        The DAG with the task `restore`.

    Raises:
        ValueError: `pipeline` is not `module:NAME`, `root` is no storage URL, or the source of the module does not show
            the pipeline's name.
    """
    check_pipeline_and_root(dag_id, pipeline, root)
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
    arguments: dict[str, Any] = {"schedule": None, "catchup": False, "max_active_runs": 1, "params": params}
    with DAG(dag_id, **{**arguments, "doc_md": _DOC, **dag_arguments}) as dag:
        RestoreStateOperator(
            task_id="restore",
            pipeline=pipeline,
            pipeline_name=pipeline_name or pipeline_name_of(pipeline),
            root=root,
            spark_conn_id=spark_conn_id,
            storage_conn_id=storage_conn_id,
            target="{{ params.target }}",
            fork_as="{{ params.fork_as or '' }}",
            **(restore or {}),
        )
    return dag
