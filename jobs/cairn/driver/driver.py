"""The driver program that Airflow's operators start: it runs one command and writes one result file.

    python -m cairn.driver.driver COMMAND --pipeline MODULE:NAME --root URL --spark WHERE --result FILE ...

COMMAND is process, range, try, deploy, savepoint, restore or validate. The result is JSON: `{"ok": {...}}`, or
`{"error": {"type": ..., "message": ...}}` with exit code 1. A driver that is killed leaves no result. The driver writes
its log to stdout.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from cairn.driver.driver_protocol import (
    BEGUN,
    COMMITTED,
    Call,
    Deploy,
    DeployResult,
    Process,
    ProcessResult,
    Range,
    RangeResult,
    RestoreResult,
    RestoreSavepoint,
    TakeSavepoint,
    Try,
    TryResult,
    Validate,
    ValidateResult,
    parse_call,
)
from cairn.driver.load_pipeline import load_pipeline
from cairn.pipeline import Interval, Pipeline
from cairn.spark.session import (
    SessionOnDemand,
    connect,
    end_session,
    explain,
    interrupt_on_sigterm,
)
from state_backend.adapters.open_storage import join_url
from state_backend.inspection.checkpoint_names import parse_checkpoint
from state_backend.inspection.describe import summarise
from state_backend.values.environment import Variable
from state_backend.values.errors import CairnError, ProcessorError, StateGapError, UsageError
from state_backend.values.hide_secrets import hide_all
from state_backend.values.records import RunRef
from state_backend.values.schedule import decode

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cairn.operations.run_intervals import Outcome

log = logging.getLogger("cairn")

_SHOWN_LINES = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """The call of a driver, and the secrets that came on stdin."""

    call: Call
    # Token of the Spark Connect server; None if stdin gave no token.
    token: str | None
    conf: Mapping[str, str]

    def load(self, name: str | None = None) -> Pipeline:
        """Load the pipeline that the call names as `module:NAME`."""
        pipeline = load_pipeline(self.call.pipeline)
        if name not in (None, pipeline.name):
            raise UsageError(
                f"the task's pipeline_name is {name!r}, but {self.call.pipeline} is named {pipeline.name!r}; make them the same"
            )
        return pipeline

    def connect(self, pipeline: Pipeline, command: str, *, own_workers: bool = False) -> SparkSession:
        """Open the driver's session, and end that of an earlier try of the same task, with the jobs that it left."""
        call = self.call
        if call.former is not None:
            end_session(call.spark, call.former, token=self.token)
        spark = connect(
            call.spark,
            f"cairn {pipeline.name} {command}",
            session_id=call.session,
            own_workers=own_workers,
            token=self.token,
            conf=self.conf,
        )
        interrupt_on_sigterm(spark, call.spark, token=self.token)
        return spark


def main(arguments: list[str] | None = None) -> int:
    """Run one command."""
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
    # At level INFO each import of Great Expectations logs some 250 lines about its own functions.
    for library in ("py4j", "great_expectations"):
        logging.getLogger(library).setLevel(logging.WARNING)
    call, request, more = parse_call(arguments, ["result"])
    # The task's own folders come last in `sys.path`: a module beside a DAG must not hide a module of Python's library.
    sys.path += [p for p in (Variable.PYTHON_PATH.given or "").split(os.pathsep) if p and p not in sys.path]
    private = json.load(sys.stdin) if call.settings_on_stdin else {}
    session = Session(call=call, token=private.get("token"), conf=private.get("conf") or {})
    try:
        result = {"ok": COMMANDS[type(request)](session, request)}
    except Exception as raised:
        error = explain(raised, call.spark)
        _print_error(error)
        name = type(error).__name__ if isinstance(error, CairnError) else "UnexpectedError"
        again = error.rerun if isinstance(error, CairnError) else None
        result = {"error": {"type": name, "message": str(error), "rerun": again and again.as_json()}}
    # The result appears whole or not at all. If it is missing, the operator concludes that the driver was killed.
    file = Path(more["result"])
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(hide_all(result)))
    partial.replace(file)
    return 0 if "ok" in result else 1


def _process(session: Session, request: Process) -> ProcessResult:
    from cairn.operations.coordinator_of import coordinator_of
    from cairn.operations.first_start import with_choices
    from cairn.operations.plan_interval import Attempt
    from cairn.operations.process_interval import process_interval
    from cairn.operations.run_intervals import committed_alike

    pipeline = session.load(request.name)
    if request.schedule is not None:
        pipeline = pipeline.scheduled_by(decode(request.schedule), "the DAG")
    interval = Interval(request.start, request.end)
    earlier = request.earlier

    def on_begin(settings: Mapping[str, str]) -> None:
        # The operator stores this line for the next try, which can then use the attempt even if this driver is killed.
        print(BEGUN + json.dumps({"attempt": request.attempt, "options": settings}), flush=True)

    started = time.monotonic()
    attempt = Attempt(
        id=request.attempt,
        interval=interval,
        mode=request.mode,
        run=RunRef(run_id=request.run_id, clear_number=request.clear_number, try_number=request.try_number),
        permissions=request.permissions,
        earlier=(earlier["attempt"], earlier["options"]) if earlier else None,
    )
    spark = session.connect(pipeline, "process")
    there, read = None, None
    if request.committed:
        there, read = committed_alike(
            spark, pipeline, interval, session.call.root, run=attempt.run, permissions=attempt.permissions
        )
    if there is not None:
        log.info(
            "%s %s: nothing is computed, because code and input are the same as for checkpoint %d, which run %s committed. "
            "To compute the interval again, clear this task",
            *(pipeline.name, interval, there.id, there.run.run_id),
        )
        return {
            "attempt": there.attempt,
            "reused": True,
            "committed": there.id,
            "interval": str(interval),
            "sink": session.call.pipeline if pipeline.sink is not None else "",
            "seconds": round(time.monotonic() - started, 3),
        }
    try:
        prepared = process_interval(spark, pipeline, session.call.root, attempt, on_begin=on_begin, read=read)
    except StateGapError as error:
        if coordinator_of(pipeline, session.call.root).log().newest is not None:
            raise
        raise with_choices(error, pipeline, interval, newest_first=request.newest_first) from error
    content = prepared.content
    return {
        "attempt": content.attempt,
        "reused": content.attempt != request.attempt,
        "checkpoint_base": content.base_id,
        "interval": str(interval),
        "input_rows": content.totals.input_rows,
        "output_rows": content.totals.output_rows,
        "keys": content.totals.keys,
        "changed_bytes": content.totals.changed_bytes,
        "uploaded_bytes": content.totals.uploaded_bytes,
        "state_bytes": content.totals.state_bytes,
        "durations_us": content.durations_us,
        "counts": content.source_position.get("counts", {}),
        "sink": session.call.pipeline if pipeline.sink is not None else "",
        "seconds": round(time.monotonic() - started, 3),
    }


def _range(session: Session, request: Range) -> RangeResult:
    from cairn.operations.plan_range import Progress
    from cairn.operations.run_intervals import plan_intervals, run_intervals

    pipeline = session.load(request.name)
    intervals = _intervals(session, pipeline, request)
    run = RunRef(run_id=request.run_id, clear_number=request.clear_number, try_number=request.try_number)
    how: dict[str, Any] = {
        "reprocess": request.reprocess,
        "permissions": request.permissions,
        "run": run,
    }
    if request.dry_run:
        spark = session.connect(pipeline, "range") if request.reprocess == "changed" else None
        planned = plan_intervals(spark, pipeline, intervals, session.call.root, **how)
        for one in planned:
            what = "would be computed" if one.computed else f"keeps checkpoint {one.checkpoint}"
            log.info("%s %s: %s: %s", pipeline.name, one.interval, what, one.why)
        return _counts(planned)

    def committed(outcome: Outcome, _: Progress) -> None:
        # The operator reads each commit from this line at once, because a driver that is killed leaves no result.
        if outcome.ours:
            print(COMMITTED + json.dumps(_committed(outcome)), flush=True)

    spark = session.connect(pipeline, "range")
    return _counts(
        run_intervals(spark, pipeline, intervals, session.call.root, request.mode, on_outcome=committed, **how)
    )


def _try(session: Session, request: Try) -> TryResult:
    from cairn.trials.compare_trial import compare_trial, comparison_lines
    from cairn.trials.try_code import try_code
    from state_backend.inspection.compare_runs import describe_comparison

    pipeline = session.load(request.name)
    tried = try_code(
        session.connect(pipeline, "try"),
        pipeline,
        _intervals(session, pipeline, request),
        session.call.root,
        code=session.call.pipeline,
        name=request.trial,
        keep=request.keep,
    )
    trial, found = compare_trial(session.call.root, pipeline.name, tried.trial.name, request.key, 3)
    lines = comparison_lines(trial, describe_comparison(found))
    for line in lines:
        log.info("%s", line)
    # The comparison goes into an XCom that a person reads. So it has at most 60 lines; the log has all of them.
    shown = lines if len(lines) <= _SHOWN_LINES else [*lines[:_SHOWN_LINES], "the rest is in the log of this task"]
    return {
        "trial": trial.name,
        "same": found.same,
        "comparison": "\n".join(shown),
        "computed": sum(o.computed for o in tried.outcomes),
        "other_input": len(tried.other_input),
    }


def _deploy(session: Session, request: Deploy) -> DeployResult:
    from cairn.operations.coordinator_of import coordinator_of
    from cairn.operations.plan_range import Progress
    from cairn.trials.deploy_trial import deploy_past, plan_deployment, restore_command

    def committed(outcome: Outcome, _: Progress) -> None:
        if outcome.ours:
            print(COMMITTED + json.dumps(_committed(outcome)), flush=True)

    pipeline = session.load(request.name)
    spark = session.connect(pipeline, "deploy")
    plan = plan_deployment(spark, pipeline, session.call.root, name=request.trial, past=request.past)
    if request.past:
        deploy_past(spark, pipeline, session.call.root, plan, on_outcome=committed)
    back = restore_command(coordinator_of(pipeline, session.call.root).log(), plan, session.call.root)
    return {"trial": plan.trial.name, "again": len(plan.again), "behind": len(plan.behind), "back": back}


def _intervals(session: Session, pipeline: Pipeline, request: Range | Try) -> tuple[Interval, ...]:
    from cairn.operations.coordinator_of import coordinator_of
    from cairn.operations.plan_range import boundaries_of, named_intervals

    rule = boundaries_of(pipeline, coordinator_of(pipeline, session.call.root).log(), request.every)
    return named_intervals(request.first, request.last, rule)


def _counts(outcomes: Sequence[Outcome]) -> RangeResult:
    computed = sum(outcome.computed for outcome in outcomes)
    return {
        "intervals": len(outcomes),
        "computed": computed,
        "kept": len(outcomes) - computed,
        "checkpoint": outcomes[-1].checkpoint,
    }


def _committed(outcome: Outcome) -> dict[str, Any]:
    """Return the `extra` of the interval's asset event, with the same fields as in an event of the task `checkpoint`."""
    if outcome.record is not None:
        return summarise(outcome.record)
    return {"checkpoint": outcome.checkpoint, "interval": str(outcome.interval)}


def _savepoint(session: Session, request: TakeSavepoint) -> dict[str, Any]:
    from cairn.operations.coordinator_of import coordinator_of
    from cairn.operations.take_savepoint import (
        check_destination,
        consolidate_checkpoint,
        describe_savepoint,
        take_savepoint,
    )

    pipeline = session.load()
    folder = join_url(session.call.root, pipeline.name)
    record = coordinator_of(pipeline, session.call.root).record(parse_checkpoint(request.checkpoint))
    check_destination(folder, request.to, request.format)
    spark = session.connect(pipeline, "savepoint")
    if request.consolidate:
        record = consolidate_checkpoint(spark, pipeline, session.call.root, record)
    said = describe_savepoint(take_savepoint(spark, pipeline, folder, record, request.to, request.format), request.to)
    log.info(
        "%s savepoint of checkpoint %d: %d files, %d bytes in %s",
        *(said["format"], record.id, said["files"], said["bytes"], request.to),
    )
    return said


def _restore(session: Session, request: RestoreSavepoint) -> RestoreResult:
    from cairn.operations.restore_savepoint import restore_savepoint

    pipeline = session.load()
    spark = session.connect(pipeline, "restore")
    record = restore_savepoint(
        spark, pipeline, session.call.root, request.savepoint, claim=request.claim, attempt=request.attempt
    )
    return {
        "checkpoint": record.id,
        "interval": str(record.content.interval),
        "entries": record.content.totals.entries,
        "bytes": record.content.totals.state_bytes,
    }


def _validate(session: Session, request: Validate) -> ValidateResult:
    from cairn.operations.coordinator_of import coordinator_of
    from cairn.operations.validate import validate_attempt, validate_checkpoint, validate_savepoint
    from state_backend.checkpoint.quarantine_consequences import plan_consequences

    pipeline = session.load()
    coordinator = coordinator_of(pipeline, session.call.root)
    # The workers of a validation are not the processes that wrote the state, so they must read storage. The session is
    # opened only if a step needs Spark.
    spark = None
    if request.mode == "full":
        spark = SessionOnDemand(partial(session.connect, pipeline, "validate", own_workers=True), session.conf)
    how: dict[str, Any] = {
        "mode": request.mode,
        "docs": None if request.docs is None else Path(request.docs),
        "with_expectations": not request.without_expectations,
    }
    keys, published, again = 0, [], None
    if request.attempt is not None:
        keys = coordinator.load_prepared(request.attempt).content.totals.keys
        found = validate_attempt(spark, pipeline, session.call.root, request.attempt, **how)
    elif request.savepoint is not None:
        found = validate_savepoint(spark, pipeline, request.savepoint, **how)
    else:
        _, record = coordinator.find(parse_checkpoint(request.checkpoint))
        keys = record.content.totals.keys
        found = validate_checkpoint(spark, pipeline, session.call.root, record, **how)
        if not found.success:
            consequences = plan_consequences(coordinator.log(), record.id)
            published = [f"{interval} (checkpoint {n})" for interval, n in consequences.published]
            again = consequences.rerun
    for line in found.table() if found.states else ():
        log.info("%s", line)
    for finding in found.findings:
        log.info("finding: %s", finding)
    log.info(
        "%s, %s: %d files, %d entries%s, %d expectations, %s",
        *(found.what, found.mode, found.files, found.entries),
        f" restored in processes {', '.join(map(str, found.pids))}" if found.pids else "",
        *(found.expectations, "no findings" if found.success else f"{len(found.findings)} findings: refused"),
    )
    return {
        "success": found.success,
        "what": found.what,
        "mode": found.mode,
        "checkpoint": found.checkpoint_id,
        "findings": list(found.findings),
        "files": found.files,
        "entries": found.entries,
        "keys": keys,
        "expectations": found.expectations,
        "pids": list(found.pids),
        "docs": found.docs,
        "published": published,
        "rerun": None if again is None else again.as_json(),
    }


COMMANDS: dict[type[Any], Callable[[Session, Any], Mapping[str, Any]]] = {
    Process: _process,
    Range: _range,
    Try: _try,
    Deploy: _deploy,
    TakeSavepoint: _savepoint,
    RestoreSavepoint: _restore,
    Validate: _validate,
}


def _print_error(error: Exception) -> None:
    """Print an error into the task's log.

    For a `CairnError`, print its notes and then one line with its type and message. For a `ProcessorError`, print the
    traceback of the user's code first. For any other error, print the whole traceback.
    """
    if isinstance(error, CairnError):
        cause = error.__cause__
        if isinstance(error, ProcessorError) and cause is not None:
            traceback.print_exception(cause, file=sys.stdout)
        for note in getattr(error, "__notes__", []):
            print(note)
        print(f"{type(error).__name__}: {error}")
    else:
        traceback.print_exception(error, file=sys.stdout)
    sys.stdout.flush()


def end_quickly(code: int) -> NoReturn:
    """End this process as Python does, but without freeing the objects of all modules one by one.

    A warm driver shares the memory of its host process, and the kernel copies each page that Python touches to free an
    object. At a load of 26 this took 1.3 s, for which the task waited.

    After an error, the functions of `atexit` are not called either: Spark's client would speak to a server that may be
    dead, and retry for minutes.
    """
    if not code:
        threading._shutdown()  # type: ignore[attr-defined]  # Python's own exit begins with these two calls.
        atexit._run_exitfuncs()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    code = main()
    if any(argument.startswith("sc://") for argument in sys.argv):
        end_quickly(code)
    sys.exit(code)  # On a master, Python's own exit stops the JVM.
