"""The driver program that Airflow's operators start: it runs one command and writes one result file.

    python -m cairn.driver.driver COMMAND REQUEST --call CALL --result FILE

`state_backend.values.operation_parameters` declares the commands, and the requests and calls, which are passed as JSON.
Secrets are passed on stdin, because any user of the host can read a command line. The result is JSON: `{"ok": {...}}`,
or `{"error": {"type": ..., "message": ...}}` with exit code 1. A driver that is killed leaves no result. The driver
writes its log to stdout.
"""

from __future__ import annotations

import argparse
import atexit
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from cairn.driver.load_pipeline import load_pipeline
from cairn.operations.place import check_name
from cairn.pipeline import Interval, Pipeline
from cairn.spark.session import connect, end_session, explain, interrupt_on_sigterm
from state_backend.inspection.describe import summarise
from state_backend.values.environment import Variable
from state_backend.values.errors import CairnError, InputNotReady, StateGapError, UsageError
from state_backend.values.frozen import frozen
from state_backend.values.hide_secrets import hide_all
from state_backend.values.operation_parameters import (
    BEGUN,
    COMMITTED,
    REQUESTS,
    Call,
    OfCode,
    ProcessInterval,
    Request,
    from_json,
    to_json,
)
from state_backend.values.release import RELEASE
from state_backend.values.schedule import decode

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cairn.operations.intervals.plan_range import Progress
    from cairn.operations.intervals.run_intervals import Outcome

log = logging.getLogger("cairn")

# By command, the function that carries out the request, as "module:function" in the package `cairn`.
_OPERATIONS = {
    "run": "operations.intervals.run_range:run_range",
    "try": "trials.try_code:carry_out_try",
    "promote": "trials.promote_trial:carry_out_promotion",
    "savepoint": "operations.savepoints.take_savepoint:carry_out_savepoint",
    "restore": "operations.savepoints.restore_savepoint:carry_out_restore",
    "validate": "operations.validation.validate_checkpoint:carry_out_validation",
}


@frozen
class Driver:
    """The `Place` of a request that an Airflow operator sends: this process, whose lines go into the task's log."""

    call: Call
    # Token of the Spark Connect server; None if stdin gave no token.
    token: str | None
    conf: Mapping[str, str]

    def load(self, request: OfCode) -> Pipeline:
        return check_name(load_pipeline(request.code), request)

    def connect(self, pipeline: Pipeline, what: str, *, own_workers: bool = False) -> SparkSession:
        """Open the driver's session. First end the session of an earlier try of the same task, and its running jobs."""
        call = self.call
        if call.former is not None:
            end_session(call.spark, call.former, token=self.token)
        spark = connect(
            call.spark,
            f"cairn {pipeline.name} {what}",
            session_id=call.session,
            own_workers=own_workers,
            token=self.token,
            conf=self.conf,
        )
        interrupt_on_sigterm(spark, call.spark, token=self.token)
        return spark

    def say(self, text: str) -> None:
        log.info("%s", text)

    def tell_plan(self, intervals: Sequence[Interval]) -> None:
        """Say nothing: `run_intervals` logs the intervals."""

    def watching(self, spark: SparkSession) -> AbstractContextManager[None]:
        """Show nothing: a log is no terminal."""
        return nullcontext()

    def on_outcome(self, outcome: Outcome, _: Progress) -> None:
        """Print a commit at once for the Airflow operator, because a driver that is killed later returns no result."""
        if outcome.ours:
            # The `extra` of the interval's asset event. The task `checkpoint` of a DAG sends the same fields.
            told = {"checkpoint": outcome.checkpoint, "interval": str(outcome.interval)}
            if outcome.record is not None:
                told = summarise(outcome.record)
            print(COMMITTED + json.dumps(told), flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Carry out one request, write its result or its error to the file of `--result`, and return the exit code."""
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
    # At level INFO each import of Great Expectations logs some 250 lines about its own functions.
    for library in ("py4j", "great_expectations"):
        logging.getLogger(library).setLevel(logging.WARNING)
    asked = parser().parse_args(arguments)
    # The task's own folders come last in `sys.path`: a module beside a DAG must not hide a module of Python's library.
    sys.path += [p for p in (Variable.PYTHON_PATH.given or "").split(os.pathsep) if p and p not in sys.path]
    where = ""
    try:
        call, request = _decode(asked.command, asked.request, asked.call)
        where = call.spark
        private = json.load(sys.stdin) if call.settings_on_stdin else {}
        place = Driver(call=call, token=private.get("token"), conf=private.get("conf") or {})
        result = {"ok": _operation(request)(request, place)}
    except Exception as raised:
        error = explain(raised, where)
        _print_error(error)
        result = {"error": _describe_error(error)}
    # Rename, so that the file appears whole or not at all. If it is missing, the operator assumes a killed driver.
    file = Path(asked.result)
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(hide_all(result)))
    partial.replace(file)
    return 0 if "ok" in result else 1


def _describe_error(error: Exception) -> dict[str, Any]:
    again = error.rerun if isinstance(error, CairnError) else None
    awaited = error.awaited if isinstance(error, InputNotReady) else None
    return {
        "type": type(error).__name__ if isinstance(error, CairnError) else "UnexpectedError",
        "message": str(error),
        "rerun": again and again.as_json(),
        "awaited": awaited and to_json(awaited),
    }


def _decode(command: str, request: str, call: str) -> tuple[Call, Request]:
    """Decode what an operator sent. If another version of Cairn sent it, an error names both versions."""
    try:
        if command not in REQUESTS:
            raise UsageError(f"the driver has no command {command!r}")
        return from_json(Call, call), from_json(REQUESTS[command], request)
    except UsageError as error:
        release = json.loads(call).get("release")
        if release == RELEASE:
            raise
        sender = f"Cairn {release}" if release else "an older Cairn"
        raise UsageError(
            f"{error}\nThe Airflow task runs {sender}, its driver runs Cairn {RELEASE}\n"
            "Install one version on this host, restart Airflow's components there, and clear the task"
        ) from error


def process(request: ProcessInterval, place: Driver) -> dict[str, Any]:
    """Compute an interval, up to *prepared*, and return facts about the attempt.

    If the interval has a committed checkpoint of the same code and input, prepare no attempt: `committed` in the result
    is then the checkpoint's id.
    """
    from cairn.operations.intervals.first_start import with_choices
    from cairn.operations.intervals.plan_interval import Attempt
    from cairn.operations.intervals.process_interval import process_interval
    from cairn.operations.intervals.run_intervals import committed_alike
    from state_backend.checkpoint.location import locate
    from state_backend.checkpoint.log import read_newest

    pipeline = place.load(request)
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
        run=request.run,
        permissions=request.permissions,
        earlier=(earlier["attempt"], earlier["options"]) if earlier else None,
    )
    spark = place.connect(pipeline, "process")
    there, read = None, None
    if request.committed:
        there, read = committed_alike(spark, pipeline, interval, request.root, run=attempt.run)
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
            "sink": request.code if pipeline.sink is not None else "",
            "seconds": round(time.monotonic() - started, 3),
        }
    at = locate(request.root, pipeline.name)
    try:
        prepared = process_interval(spark, pipeline, at, replace(attempt, read=read), on_begin=on_begin)
    except StateGapError as error:
        if read_newest(at.storage).newest is not None:
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
        # Keys are counted in value states. A pipeline without value states has the count 0, which says nothing.
        "keys": content.totals.keys or None,
        "changed_bytes": content.totals.changed_bytes,
        "uploaded_bytes": content.totals.uploaded_bytes,
        "state_bytes": content.totals.state_bytes,
        "durations_us": content.durations_us,
        "counts": content.source_position.get("counts", {}),
        "sink": request.code if pipeline.sink is not None else "",
        "seconds": round(time.monotonic() - started, 3),
    }


def _operation(request: Request) -> Callable[[Any, Driver], dict[str, Any]]:
    if isinstance(request, ProcessInterval):
        return process
    module, _, function = _OPERATIONS[request.command].partition(":")
    found: Callable[[Any, Driver], dict[str, Any]] = getattr(import_module(f"cairn.{module}"), function)
    return found


@cache
def parser() -> argparse.ArgumentParser:
    """Return the parser of a driver's command line. `driver_host` makes the parser once for all its drivers."""
    made = argparse.ArgumentParser(prog="python -m cairn.driver.driver")
    made.add_argument("command")
    made.add_argument("request")
    for name in ("--call", "--result"):
        made.add_argument(name, required=True)
    return made


def _print_error(error: Exception) -> None:
    """Print an error into the task's log.

    For a `CairnError`, print its notes and then its type and message. A note of a `ProcessorError` has the traceback of
    the user's code. For any other error, print the whole traceback.
    """
    if isinstance(error, CairnError):
        for note in getattr(error, "__notes__", []):
            print(note)
        print(f"{type(error).__name__}: {error}")
    else:
        traceback.print_exception(error, file=sys.stdout)
    sys.stdout.flush()


def end_quickly(code: int) -> NoReturn:
    """End this process as Python does, but without freeing the objects of all modules one by one.

    A warm driver shares the memory of its host process, and the kernel copies each page that Python touches to free an
    object. On a host with a load of 26 this took 1.3 s, and the task waited for it.

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
