"""The operator that processes the data interval of a run in one Spark job."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from cairn_operators.airflow_versions import AirflowFailException, say_lacks, stats
from cairn_operators.commit_checkpoint import CommitCheckpointOperator, command_to_clear
from cairn_operators.dag_schedule import schedule_of_dag
from cairn_operators.data_interval import check_ended, data_interval
from cairn_operators.failures import InputMissing, StaleBase, convert_errors, failure, repair
from cairn_operators.pipeline_source import pipeline_name_of
from cairn_operators.request_of import request_of, run_of
from cairn_operators.storage_connection import as_storage_identity
from cairn_operators.task_order import THEN_PROCESSES
from cairn_operators.task_outputs import push_outputs
from cairn_operators.wait_for_input import WaitingOperator
from state_backend.adapters.schemes import is_over_network

if TYPE_CHECKING:
    from cairn_operators.predecessor import Go, Wait
    from cairn_operators.previous_checkpoint_trigger import PreviousCheckpointTrigger
    from state_backend.checkpoint.log import Log
    from state_backend.values.errors import Rerun
    from state_backend.values.records import Permissions

# Key in Airflow's state store of the task: the attempt of the latest try. Later tries of the same run can read it.
_ATTEMPT_KEY = "cairn_attempt"
# Seconds between two reads of a log on a local disk, while a task waits in its worker slot. One read takes 0.02 ms.
_LOOK_S = 0.05
# Seconds between two requests to Airflow, while a task waits in its worker slot for another run's commit. Only Airflow
# shows that the other run ended without a commit: that run failed, or its interval already had the same result.
_ASK_AIRFLOW_S = 1.0
# Pause of a task that waits until a stale interval has run again, if its trigger can't see commits.
_LOOK_FOR_COMMIT = timedelta(minutes=5)

MODES = ("incremental", "full", "changelog")

_DOC = """Processes the run's data interval on Spark: restores the state of the checkpoint that ends where the interval starts,
processes the interval's rows, and uploads the changes. The next task commits them.

* **Deferred**: the task waits, without a worker slot, for the checkpoint of the interval before, or for another pipeline.
* **Retry**: the task takes what an earlier try prepared if base, code, options and input are unchanged. Otherwise it begins
  again from the last checkpoint. The log says which, and why.
* **Clear** (with downstream): the interval is computed again from the checkpoint before it. If the result differs, checkpoints of
  later intervals are stale. Their next interval waits; its log has the command that runs them again.
* **The schedule changed**: output of intervals with other boundaries is only replaced if you set the run's parameter
  `replace_overlapping`.
* **Gap**: no retry helps. The last lines of the log have the command that does.
"""


class ProcessIntervalOperator(WaitingOperator):
    """The task that processes a data interval. It commits nothing.

    The task restores the state of the checkpoint that ends where the interval starts, processes the rows of the
    interval, and uploads the changes. `CommitCheckpointOperator` commits `output["attempt"]` of this task. A retry
    takes the attempt that an earlier try of the same run prepared, if base, code, options and input are unchanged.

    While the run of the interval before is queued or running, the task waits for its checkpoint. If the pipeline reads
    other pipelines, it also waits until they have committed what the interval reads.

    Args:
        code: The `Pipeline`, as `module:NAME`.
        root: URL of the folder that holds the pipelines.
        pipeline: Name of the `Pipeline`; None: read from the source of its module.
        mode: Form of the checkpoint: incremental, full or changelog.
        permissions: `allow_gap`: start from the latest checkpoint before a gap. `allow_stale_base`: start from a
            checkpoint that a re-run made stale. `replace_overlapping`: replace output of intervals that overlap this
            interval and have other boundaries. Values may be templates, for a permission of one run.
        wait_timeout: Longest wait for the checkpoint of the interval before and for other pipelines.
        start_patience: Longest wait for a run of the interval before that is still queued, while no run with an earlier
            logical date is running. After this time the task goes on without that run, to avoid a deadlock: by
            `max_active_runs`, Airflow may not start the queued run before this task's own run has ended.
        poll: Time between two requests to the storage.
        wait_in_slot: Longest wait in the worker slot before the task defers. A short wait is cheaper than a second
            start of the task.
        reuse_prepared: True lets a retry take the attempt that an earlier try prepared. False computes again in every
            try. A cleared task always computes again.
        **kwargs: More arguments of `DriverOperator` and Airflow's `BaseOperator`.

    Raises:
        ValueError: `mode` is unknown, the source of the module does not show the pipeline's name, or `depends_on_past`
            or `max_active_tis_per_dag` is set.
    """

    # When an attempt is lost, `CommitCheckpointOperator` searches upstream for a task with this attribute, and its
    # message names that task.
    makes_attempts = True
    template_fields: Sequence[str] = (
        *WaitingOperator.template_fields,
        "pipeline",
        "mode",
        "permissions",
    )

    def __init__(
        self,
        *,
        pipeline: str | None = None,
        mode: Literal["incremental", "full", "changelog"] = "incremental",
        permissions: Mapping[str, bool | str] | None = None,
        wait_timeout: timedelta = timedelta(days=1),
        start_patience: timedelta = timedelta(seconds=20),
        poll: timedelta = timedelta(seconds=0.4),
        wait_in_slot: timedelta = timedelta(seconds=5),
        reuse_prepared: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**{"doc_md": _DOC, **THEN_PROCESSES, **kwargs})
        check_mode(self.task_id, mode)
        if self.depends_on_past or self.max_active_tis_per_dag is not None:
            raise ValueError(
                f"{self.task_id}: remove depends_on_past and max_active_tis_per_dag. The task itself keeps the intervals in order. "
                "Airflow counts a deferred task as active, so with these limits it would block the run that it waits for. To limit "
                "how many of these tasks run at a time, give them a pool"
            )
        self.pipeline = pipeline or pipeline_name_of(kwargs["code"])
        self.mode = mode
        self.permissions = {**(permissions or {})}
        self.wait_timeout = wait_timeout
        self.start_patience = start_patience
        self.poll = poll
        self.wait_in_slot = wait_in_slot
        self._waits = False
        self.reuse_prepared = reuse_prepared

    def execute(self, context: Any) -> dict[str, Any]:
        """Wait for the checkpoint of the interval before, then process the interval in a driver."""
        before = before_us(context["dag_run"], context["ti"], datetime.now(tz=UTC))
        return self._in_order(context, before, since_ms=_now_ms(), alone_since_ms=None)

    def after_wait(
        self,
        context: Any,
        event: Any,
        since_ms: int,
        alone_since_ms: int | None,
        by_input: bool = False,
        waits: str = "",
    ) -> dict[str, Any]:
        """Continue the task after a wait in the triggerer: process the interval, wait again, or fail.

        Airflow calls this method when the trigger has fired. The task again asks Airflow for the awaited runs (those of
        the interval before) and reads the log, since a person may have cleared a task during the wait. `wait_timeout`
        counts from `since_ms`, and `start_patience` from `alone_since_ms`, as in `_wait_or_refuse`. `by_input`: True if
        the driver refused the base because its inputs have changed. `waits`: Text for Cairn's pages; this method does
        not read it.
        """
        waited_ms = max(0, _now_ms() - since_ms)
        self.log.info(
            "waited %.0f s for the checkpoint of the interval before: %s", waited_ms / 1000, (event or {}).get("why")
        )
        before = {"wait": waited_ms * 1000}
        return self._in_order(context, before, since_ms=since_ms, alone_since_ms=alone_since_ms, by_input=by_input)

    def go_on(self, context: Any, since_ms: int) -> dict[str, Any]:
        """Continue the task after a wait for another pipeline: check again whether the interval may be processed."""
        waited_us = max(0, _now_ms() - since_ms) * 1000
        return self._in_order(context, {"wait": waited_us}, since_ms=since_ms, alone_since_ms=None)

    def _in_order(
        self,
        context: Any,
        before: dict[str, int],
        *,
        since_ms: int,
        alone_since_ms: int | None,
        by_input: bool = False,
    ) -> dict[str, Any]:
        start, end = data_interval(context)
        check_ended(context, end)
        while True:
            began_s = time.monotonic()
            there = self._wait_or_refuse(
                context, start, end, since_ms=since_ms, alone_since_ms=alone_since_ms, by_input=by_input
            )
            try:
                order_us = int((time.monotonic() - began_s) * 1e6)
                return self._process(context, start, end, there, before | {"order": order_us})
            except InputMissing as missing:
                self.wait_for_input(context, missing, since_ms)
            except StaleBase:
                if by_input:
                    raise
                by_input = True  # The next round also checks the inputs of the base checkpoint, and waits for them.

    def _wait_or_refuse(
        self,
        context: Any,
        start: datetime,
        end: datetime,
        *,
        since_ms: int,
        alone_since_ms: int | None,
        by_input: bool,
    ) -> bool:
        """Wait until the interval may be processed. Return True if it already has a result that the driver may keep.

        The awaited runs are those of the interval before, whose checkpoint this interval starts from. `since_ms`: When
        the task began to wait. `by_input`: Check also whether the inputs of the base have changed.

        `alone_since_ms`: The time, in ms since the epoch, from which `start_patience` counts. Since this time all
        awaited runs have been queued, and no run with an earlier logical date has been running. None if the task has
        not waited in this state. After `start_patience` the task no longer waits, because Airflow may start the queued
        runs only after the task's own run has ended.
        """
        from cairn_operators.predecessor import Wait

        until_s = time.monotonic() + self.wait_in_slot.total_seconds()
        while True:
            log, decision = self._decide(context, start, end, alone_since_ms, by_input)
            if not isinstance(decision, Wait):
                break
            now_s = time.monotonic()
            if not decision.soon or now_s >= until_s:
                self._defer(
                    context, log, start, decision, since_ms=since_ms, alone_since_ms=alone_since_ms, by_input=by_input
                )
            self._await_commit(min(until_s, now_s + _ASK_AIRFLOW_S), context, log, start, decision)
        if decision.reason:
            self.log.warning("%s", decision.reason)
        return decision.there

    def _decide(
        self, context: Any, start: datetime, end: datetime, alone_since_ms: int | None, by_input: bool
    ) -> tuple[Log, Go | Wait]:
        """Ask Airflow for earlier runs, and read the log. Return (log, decision). Raise an error for a refusal."""
        from cairn_operators.earlier_runs import is_earlier_blocked, is_earlier_running, predecessor_runs
        from cairn_operators.predecessor import Refuse, Wait, plan_start
        from state_backend.adapters.open_storage import open_storage
        from state_backend.chains.judge_inputs import Chains
        from state_backend.chains.pin_inputs import Reader, check_earlier
        from state_backend.checkpoint.log import read_newest
        from state_backend.values.intervals import Interval
        from state_backend.values.schedule import decode

        schedule = schedule_of_dag(context.get("dag"))
        permissions = parse_permissions(self.permissions)
        runs = predecessor_runs(context, start, end, self._checkpoint_tasks(context))
        queued = any(run.state == "queued" for run in runs)
        with convert_errors(self):
            # The log is read after Airflow was asked, so it has the commits of all tasks that Airflow reported as
            # succeeded.
            interval = Interval(start, end)
            reader = Reader(root=self.root, pipeline=self.pipeline, interval=interval, schedule=None)
            with as_storage_identity(self.storage_conn_id):
                log, chains = read_newest(open_storage(self._url())), Chains()
                if by_input:  # Reads now what `check_base` needs, so that the check itself sends no request.
                    chains.judged(self.root, self.pipeline)
            decide = partial(
                plan_start,
                log,
                self.pipeline,
                interval,
                permissions,
                runs,
                alone_for=timedelta(milliseconds=0 if alone_since_ms is None else _now_ms() - alone_since_ms),
                patience=self.start_patience,
                schedule=None if schedule is None else decode(schedule),
                check_base=partial(check_earlier, chains, reader, log) if by_input else None,
            )
            decision = decide(earlier_running=queued and is_earlier_running(context, start))
            if isinstance(decision, Wait) and decision.heal_to is not None and is_earlier_blocked(context, start):
                decision = decide(earlier_running=is_earlier_running(context, start), earlier_queued=True)
        if isinstance(decision, Refuse):
            raise failure(decision.error, f"{decision.message}\n{self._repair_text(context, decision.rerun, start)}")
        return log, decision

    def _url(self) -> str:
        from state_backend.adapters.open_storage import join_url

        return join_url(self.root, self.pipeline)

    def _await_commit(self, until_s: float, context: Any, log: Log, start: datetime, wait: Wait) -> None:
        trigger = self._trigger(context, log, start, wait, until_ms=0)
        url = self._url()
        pause_s = self.poll.total_seconds() if is_over_network(url) else min(_LOOK_S, self.poll.total_seconds())
        self._waits = True
        try:
            with as_storage_identity(self.storage_conn_id):
                while time.monotonic() < until_s and trigger.find_committed(url) is None:
                    time.sleep(pause_s)
        finally:
            self._waits = False

    def on_kill(self) -> None:
        """Stop the driver, or the wait for the checkpoint of the interval before, and end this process.

        Airflow calls this method when it stops the task. A deferred task has no process, so the method is not called.

        Raises:
            SystemExit: A driver was running, or the task was waiting in its worker slot.
        """
        if self._waits:
            raise SystemExit("Airflow stopped this task while it waited for the checkpoint of the interval before")
        super().on_kill()

    def _defer(
        self,
        context: Any,
        log: Log,
        start: datetime,
        wait: Wait,
        *,
        since_ms: int,
        alone_since_ms: int | None,
        by_input: bool,
    ) -> NoReturn:
        now_ms, deadline_ms = _now_ms(), since_ms + _ms(self.wait_timeout)
        heal = self._heal_text(wait.heal_to, by_input) if wait.heal_to is not None else None
        if now_ms >= deadline_ms:
            repair = "Find out why that run is not done." if heal is None else heal
            raise AirflowFailException(
                f"waited {self.wait_timeout} for the checkpoint of the interval before, from {wait.reason}\n"
                f"{repair}\nThen run this interval again:\n{command_to_clear(context, self)}"
            )
        alone_since_ms = (alone_since_ms or now_ms) if wait.alone else None
        until_ms, waits = deadline_ms, f"{self.pipeline} waits for {wait.reason}"
        if alone_since_ms is not None:
            until_ms = min(deadline_ms, alone_since_ms + _ms(self.start_patience))
        if heal is not None:
            # The trigger can't see the change if it has no URL, or if an input becomes valid without a commit of this
            # pipeline. So the task then wakes up every `_LOOK_FOR_COMMIT`, and looks itself.
            sees = self.storage_conn_id is None and not by_input
            until_ms = until_ms if sees else min(until_ms, now_ms + _ms(_LOOK_FOR_COMMIT))
            self.log.warning("waiting, without a worker slot, until a stale interval was run again: %s", wait.reason)
            self.log.warning("%s", heal)
        else:
            self.log.info("waiting, without a worker slot, for the checkpoint of the interval before: %s", wait.reason)
        self.defer(
            trigger=self._trigger(context, log, start, wait, until_ms=until_ms),
            method_name="after_wait",
            kwargs={
                "since_ms": since_ms,
                "alone_since_ms": alone_since_ms,
                **({"by_input": True} if by_input else {}),
                "waits": waits if heal is None else f"{waits}\n{heal}",
            },
            # The trigger itself ends the wait at the deadline. If the triggerer is down, Airflow's timeout ends the
            # wait ten minutes later.
            timeout=timedelta(milliseconds=deadline_ms - now_ms) + timedelta(minutes=10),
        )
        raise AssertionError("deferring raises")

    def _heal_text(self, heal_to: datetime, by_input: bool) -> str:
        from state_backend.values.errors import Rerun

        command = repair(self, Rerun(first=heal_to, last=heal_to), chain=by_input)
        return f"To run every interval again that is not healthy, in order:\n{command}"

    def _repair_text(self, context: Any, again: Rerun | None, start: datetime) -> str:
        """Return the commands that first repair the intervals `again`, if any, and then run the one at `start`."""
        if again is not None and again.though_valid:
            return repair(self, again)  # This command and the next one run the task's own interval too.
        if again is not None and not again.replace_overlapping:
            return self._heal_text(start, by_input=False)
        first = "" if again is None else f"{repair(self, again)}\n"
        return f"{first}Then run this interval again:\n{command_to_clear(context, self)}"

    def _trigger(
        self, context: Any, log: Log, start: datetime, wait: Wait, *, until_ms: int
    ) -> PreviousCheckpointTrigger:
        from cairn_operators.previous_checkpoint_trigger import PreviousCheckpointTrigger
        from state_backend.values.intervals import to_ms

        return PreviousCheckpointTrigger(
            # All triggers of a triggerer share its environment variables, so they can't carry the Google identity of
            # one pipeline. Without a URL the trigger asks only Airflow.
            url=self._url() if self.storage_conn_id is None else None,
            head_id=log.head_id,
            end_ms=to_ms(start),
            dag_id=context["dag_run"].dag_id,
            clear_numbers={run.run_id: run.clear_number for run in wait.runs},
            task_ids=self._checkpoint_tasks(context),
            queued=[run.run_id for run in wait.runs if run.state == "queued"],
            until_ms=until_ms,
            poll_s=self.poll.total_seconds(),
            begins_ms=to_ms(wait.begins) if wait.begins is not None and self._fits_in_slot(log) else None,
        )

    def _fits_in_slot(self, log: Log) -> bool:
        """Return True if the newest interval took at most `wait_in_slot`: a wait for such a run needs no deferral."""
        assert log.newest is not None
        return sum(log.newest.content.durations_us.values()) <= _ms(self.wait_in_slot) * 1000

    def _checkpoint_tasks(self, context: Any) -> list[str]:
        commits = [
            task.task_id for task in context["task"].downstream_list if isinstance(task, CommitCheckpointOperator)
        ]
        return [self.task_id, *commits]

    def _process(
        self, context: Any, start: datetime, end: datetime, there: bool, before: dict[str, int]
    ) -> dict[str, Any]:
        from state_backend.values.human_units import in_words
        from state_backend.values.intervals import Interval
        from state_backend.values.operation_parameters import BEGUN, ProcessInterval

        store = context.get("task_state_store")
        # Each try gets a new attempt uuid. An earlier try may still be writing, and its files bear the earlier uuid.
        attempt = str(uuid.uuid4())
        # A first try has no earlier attempt, so it saves the request to Airflow's task state store.
        known = self.reuse_prepared and context["ti"].try_number > 1
        if known:
            say_lacks(self.log, "task state store")
        if _run_type(context) == "backfill":
            say_lacks(self.log, "conf for runs that exist")
        request = request_of(
            ProcessInterval,
            self,
            start=start,
            end=end,
            run=run_of(context),
            attempt=attempt,
            permissions=parse_permissions(self.permissions),
            committed=there,
            schedule=schedule_of_dag(context.get("dag")),
            newest_first=_is_newest_first(context),
            earlier=(store.get(_ATTEMPT_KEY) or None) if known and store is not None else None,
        )

        of = f"{self.pipeline} {Interval(start, end)}"
        self.log.info("%s", of)

        def line(text: str) -> None:
            if not text.startswith(BEGUN):
                self.log.info("%s", text.removeprefix(f"{of}: "))  # A line above names pipeline and interval already.
            elif store is not None:
                store.set(_ATTEMPT_KEY, json.loads(text.removeprefix(BEGUN)))

        began_s = time.monotonic()
        result = self.run_driver(request, on_line=line)
        wall_us = int((time.monotonic() - began_s) * 1e6)
        # The phase `start` is the time that the driver can't measure itself: process start, imports, and process end.
        driver_s = result.get("seconds", 0)
        start_us = max(0, wall_us - int(driver_s * 1e6))
        phases_us = {**before, "start": start_us, **result.get("durations_us", {})}
        did = "".join(f"{result[key]:,} {name}, " for name, key in _COUNTS.items() if result.get(key) is not None)
        self.log.info("%s%s", did, in_words(phases_us, wall_us + sum(before.values())))
        stats.timing("cairn.process.duration", timedelta(seconds=driver_s), tags={"pipeline": self.pipeline})
        prepared = result["attempt"] if result.get("reused") else attempt
        push_outputs(context, attempt=prepared, sink=result["sink"])
        return {**result, "attempt": prepared}


# Counts in the last line of the task's log: the words there, and the key of the count in the driver's result.
_COUNTS = {"rows in": "input_rows", "rows out": "output_rows", "keys": "keys"}


def _run_type(context: Any) -> str:
    kind = getattr(context["dag_run"], "run_type", None)
    return str(getattr(kind, "value", kind))


def _is_newest_first(context: Any) -> bool:
    """Return True if Airflow makes a run only for the newest interval: a scheduled run of a DAG without catchup."""
    return _run_type(context) == "scheduled" and not getattr(context.get("dag"), "catchup", True)


def check_mode(task_id: str, mode: str) -> None:
    if mode not in MODES and "{" not in mode:
        raise ValueError(f"{task_id}: mode {mode!r} is not one of {', '.join(MODES)}")


def before_us(run: Any, ti: Any, now: datetime) -> dict[str, int]:
    """Return the microseconds that passed before `now`, when the task's own code began to run, by phase.

    The phase `scheduler` lasts from the run's start to the task's start. A retry and a cleared run have no such phase,
    because this time then contains more than the scheduler's work. The phase `task` is the start of Airflow's task
    process.

    The operator adds later phases. In the phase `order` the task asks Airflow and the log about the interval before,
    and may wait in its worker slot. After a wait in the triggerer, the phase `wait` replaces `scheduler` and `task`.
    """
    if (started := getattr(ti, "start_date", None)) is None:
        return {}
    # Timestamps are subtracted, because the difference of Airflow's pendulum datetimes is not a `timedelta`.
    spans_s = {"task": now.timestamp() - started.timestamp()}
    if ti.try_number == 1 and not run.clear_number and getattr(run, "start_date", None) is not None:
        spans_s["scheduler"] = started.timestamp() - run.start_date.timestamp()
    return {name: max(0, round(span_s * 1e6)) for name, span_s in spans_s.items()}


def parse_permissions(permissions: Mapping[str, bool | str]) -> Permissions:
    from state_backend.values.errors import UsageError
    from state_backend.values.records import Permissions

    try:
        return Permissions.from_texts(permissions)
    except UsageError as error:
        raise AirflowFailException(str(error)) from None


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _ms(span: timedelta) -> int:
    return span // timedelta(milliseconds=1)
