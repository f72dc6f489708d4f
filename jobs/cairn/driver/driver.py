"""The driver program that Airflow's operators start: one command, one result file.

    python -m cairn.driver.driver process|range|savepoint|restore|validate --pipeline MODULE:NAME --root URL --spark WHERE --result FILE ...

The result is JSON, ``{"ok": {...}}`` or ``{"error": {"type": ..., "message": ...}}`` with exit code 1. A driver that is killed
leaves no result. Lines on stdout are the log.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
import traceback
import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cairn.driver.load_pipeline import load_pipeline
from cairn.pipeline import Interval, Pipeline
from cairn.spark.session import connect, explain, interrupt_former, interrupt_on_sigterm, operation_tag
from state_backend.adapters.open_storage import join_url
from state_backend.inspection.checkpoint_names import parse_checkpoint
from state_backend.inspection.describe import summarise
from state_backend.values.errors import CairnError, ProcessorError, UsageError
from state_backend.values.records import NO_PERMISSIONS, Permissions, RunRef

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cairn.operations.run_intervals import Outcome

log = logging.getLogger("cairn")

# Begins the one line of a ``process`` driver that is for the operator and not for people: attempt and options, as JSON.
BEGUN = "@cairn begun "
# The same of a ``range`` driver, for each interval that the run has committed: what the asset's event says, as JSON.
COMMITTED = "@cairn committed "
_SHOWN_LINES = 60


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; 0 or 1."""
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
    # Great Expectations tells of some 250 of its own functions whenever it is imported.
    for library in ("py4j", "great_expectations"):
        logging.getLogger(library).setLevel(logging.WARNING)
    options = _parser().parse_args(arguments)
    # Behind all else, as in the task: a module beside a DAG must not take the place of one of Python's.
    sys.path += [p for p in os.environ.get("CAIRN_PYTHON_PATH", "").split(os.pathsep) if p and p not in sys.path]
    private = json.load(sys.stdin) if options.settings_on_stdin else {}
    options.token, options.conf = private.get("token"), private.get("conf") or {}
    try:
        result = {"ok": options.command(options)}
    except Exception as raised:
        error = explain(raised, options.spark)
        _print_error(error)
        name = type(error).__name__ if isinstance(error, CairnError) else "UnexpectedError"
        again = error.rerun if isinstance(error, CairnError) else None
        result = {"error": {"type": name, "message": str(error), "rerun": again and again.as_json()}}
    # The result appears whole or not at all. If it is missing, the operator concludes that the driver was killed.
    partial = options.result.with_suffix(".partial")
    partial.write_text(json.dumps(result))
    partial.replace(options.result)
    return 0 if "ok" in result else 1


def _process(options: argparse.Namespace) -> dict[str, Any]:
    from cairn.operations.plan_interval import Attempt
    from cairn.operations.process_interval import process_interval
    from cairn.operations.run_intervals import committed_alike

    pipeline = _named_pipeline(options)
    interval = Interval(datetime.fromisoformat(options.start), datetime.fromisoformat(options.end))
    earlier = json.loads(options.earlier) if options.earlier else None

    def on_begin(settings: Mapping[str, str]) -> None:
        # For the operator, which keeps it where the next try finds it, also if nothing else gets out of this one.
        print(BEGUN + json.dumps({"attempt": options.attempt, "options": settings}), flush=True)

    started = time.monotonic()
    attempt = Attempt(
        id=options.attempt,
        interval=interval,
        mode=options.mode,
        run=RunRef(run_id=options.run_id, clear_number=options.clear_number, try_number=options.try_number),
        permissions=options.permissions,
        earlier=(earlier["attempt"], earlier["options"]) if earlier else None,
    )
    spark = _connect(options, pipeline, "process")
    there, read = None, None
    if options.committed:
        there, read = committed_alike(
            spark, pipeline, interval, options.root, run=attempt.run, permissions=attempt.permissions
        )
    if there is not None:
        log.info(
            "%s %s: checkpoint %d, which run %s committed, was made by the same code from the same input: nothing is computed again. "
            "Clear this task to compute it in any case",
            *(pipeline.name, interval, there.id, there.run.run_id if there.run is not None else "of an older release"),
        )
        return {
            "attempt": there.attempt,
            "reused": True,
            "committed": there.id,
            "interval": str(interval),
            "sink": pipeline.sink is not None,
            "seconds": round(time.monotonic() - started, 3),
        }
    prepared = process_interval(spark, pipeline, options.root, attempt, on_begin=on_begin, read=read)
    content = prepared.content
    return {
        "attempt": content.attempt,
        "reused": content.attempt != options.attempt,
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
        "sink": pipeline.sink is not None,
        "seconds": round(time.monotonic() - started, 3),
    }


def _range(options: argparse.Namespace) -> dict[str, Any]:
    from cairn.operations.plan_range import Progress, intervals_between
    from cairn.operations.run_intervals import plan_intervals, run_intervals

    pipeline = _named_pipeline(options)
    length = timedelta(seconds=options.every_s)
    first, last = (datetime.fromisoformat(text) for text in (options.first, options.last))
    intervals = intervals_between(first, last + length, length)
    run = RunRef(run_id=options.run_id, clear_number=options.clear_number, try_number=options.try_number)
    how: dict[str, Any] = {
        "reprocess": options.reprocess,
        "permissions": options.permissions,
        "run": run,
    }
    if options.dry_run:
        spark = _connect(options, pipeline, "range") if options.reprocess == "changed" else None
        planned = plan_intervals(spark, pipeline, intervals, options.root, **how)
        for one in planned:
            what = "would be computed" if one.computed else f"stays checkpoint {one.checkpoint}"
            log.info("%s %s: %s: %s", pipeline.name, one.interval, what, one.why)
        return _counts(planned)

    def committed(outcome: Outcome, _: Progress) -> None:
        # For the operator, as soon as it is so: a driver that is killed leaves no result.
        if outcome.ours:
            print(COMMITTED + json.dumps(_committed(outcome)), flush=True)

    spark = _connect(options, pipeline, "range")
    return _counts(run_intervals(spark, pipeline, intervals, options.root, options.mode, on_outcome=committed, **how))


def _try(options: argparse.Namespace) -> dict[str, Any]:
    from cairn.operations.plan_range import intervals_between
    from cairn.trials.compare_trial import compare_trial, comparison_lines
    from cairn.trials.try_code import try_code
    from state_backend.inspection.compare_runs import describe_comparison

    pipeline = _named_pipeline(options)
    length = timedelta(seconds=options.every_s)
    first, last = (datetime.fromisoformat(text) for text in (options.first, options.last))
    tried = try_code(
        _connect(options, pipeline, "try"),
        pipeline,
        intervals_between(first, last + length, length),
        options.root,
        code=options.pipeline,
        name=options.trial,
        keep=timedelta(seconds=options.keep_s),
    )
    trial, found = compare_trial(options.root, pipeline.name, tried.trial.name, options.key, 3)
    lines = comparison_lines(trial, describe_comparison(found))
    for line in lines:
        log.info("%s", line)
    # For an XCom and a person: as much as a page has.
    shown = lines if len(lines) <= _SHOWN_LINES else [*lines[:_SHOWN_LINES], "and more, in the log of this task"]
    return {
        "trial": trial.name,
        "same": found.same,
        "comparison": "\n".join(shown),
        "computed": sum(o.computed for o in tried.outcomes),
        "other_input": len(tried.other_input),
    }


def _deploy(options: argparse.Namespace) -> dict[str, Any]:
    from cairn.operations.coordinator_of import coordinator_of
    from cairn.operations.plan_range import Progress
    from cairn.trials.deploy_trial import deploy_past, plan_deployment, restore_command

    def committed(outcome: Outcome, _: Progress) -> None:
        if outcome.ours:
            print(COMMITTED + json.dumps(_committed(outcome)), flush=True)

    pipeline = _named_pipeline(options)
    spark = _connect(options, pipeline, "deploy")
    plan = plan_deployment(spark, pipeline, options.root, name=options.trial, past=options.past)
    if options.past:
        deploy_past(spark, pipeline, options.root, plan, on_outcome=committed)
    back = restore_command(coordinator_of(pipeline, options.root).log(), plan, options.root)
    return {"trial": plan.trial.name, "again": len(plan.again), "behind": len(plan.behind), "back": back}


def _counts(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    computed = sum(outcome.computed for outcome in outcomes)
    return {
        "intervals": len(outcomes),
        "computed": computed,
        "kept": len(outcomes) - computed,
        "checkpoint": outcomes[-1].checkpoint,
    }


def _committed(outcome: Outcome) -> dict[str, Any]:
    """What the asset's event says of a checkpoint, as where one interval is committed by a task of its own."""
    if outcome.record is not None:
        return summarise(outcome.record)
    return {"checkpoint": outcome.checkpoint, "interval": str(outcome.interval)}


def _named_pipeline(options: argparse.Namespace) -> Pipeline:
    """Raises: UsageError if the task calls the pipeline otherwise."""
    pipeline = load_pipeline(options.pipeline)
    if options.name not in (None, pipeline.name):
        raise UsageError(
            f"the task's pipeline_name is {options.name!r}, but {options.pipeline} is named {pipeline.name!r}; make them the same"
        )
    return pipeline


def _savepoint(options: argparse.Namespace) -> dict[str, Any]:
    from cairn.operations.coordinator_of import coordinator_of
    from cairn.operations.take_savepoint import (
        check_destination,
        consolidate_checkpoint,
        describe_savepoint,
        take_savepoint,
    )

    pipeline = load_pipeline(options.pipeline)
    folder = join_url(options.root, pipeline.name)
    record = coordinator_of(pipeline, options.root).record(parse_checkpoint(options.checkpoint))
    check_destination(folder, options.to, options.format)
    spark = _connect(options, pipeline, "savepoint")
    if options.consolidate:
        record = consolidate_checkpoint(spark, pipeline, options.root, record)
    said = describe_savepoint(take_savepoint(spark, pipeline, folder, record, options.to, options.format), options.to)
    log.info(
        "%s savepoint of checkpoint %d: %d files, %d bytes in %s",
        *(said["format"], record.id, said["files"], said["bytes"], options.to),
    )
    return said


def _restore(options: argparse.Namespace) -> dict[str, Any]:
    from cairn.operations.restore_savepoint import restore_savepoint

    pipeline = load_pipeline(options.pipeline)
    spark = _connect(options, pipeline, "restore")
    record = restore_savepoint(
        spark, pipeline, options.root, options.savepoint, claim=options.claim, attempt=options.attempt
    )
    return {
        "checkpoint": record.id,
        "interval": str(record.content.interval),
        "entries": record.content.totals.entries,
        "bytes": record.content.totals.state_bytes,
    }


def _validate(options: argparse.Namespace) -> dict[str, Any]:
    from cairn.operations.coordinator_of import coordinator_of
    from cairn.operations.validate import validate_attempt, validate_checkpoint, validate_savepoint
    from state_backend.checkpoint.quarantine_consequences import plan_consequences

    pipeline = load_pipeline(options.pipeline)
    coordinator = coordinator_of(pipeline, options.root)
    # Never the session of the writer: its workers are other processes, so what they find was not in anybody's memory.
    spark = _connect(options, pipeline, "validate") if options.mode == "full" else None
    how: dict[str, Any] = {
        "mode": options.mode,
        "docs": options.docs,
        "with_expectations": not options.without_expectations,
    }
    keys, published, again = 0, [], None
    if options.attempt is not None:
        keys = coordinator.load_prepared(options.attempt).content.totals.keys
        found = validate_attempt(spark, pipeline, options.root, options.attempt, **how)
    elif options.savepoint is not None:
        found = validate_savepoint(spark, pipeline, options.savepoint, **how)
    else:
        record = coordinator.record(parse_checkpoint(options.checkpoint))
        keys = record.content.totals.keys
        found = validate_checkpoint(spark, pipeline, options.root, record, **how)
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
        *(found.expectations, "all well" if found.success else f"{len(found.findings)} findings: refused"),
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
        "rerun": again and again.as_json(),
    }


def _connect(options: argparse.Namespace, pipeline: Pipeline, command: str) -> SparkSession:
    """The session of this command, without what an earlier try of the same task left running in it."""
    name, task = f"{pipeline.name}/{command}", options.task or str(uuid.uuid4())
    tag = operation_tag(name, options.root, task)
    if options.again:
        interrupt_former(options.spark, name, tag, token=options.token)
    spark = connect(
        options.spark, f"cairn {pipeline.name} {command}", shared_as=name, token=options.token, conf=options.conf
    )
    spark.addTag(tag)
    interrupt_on_sigterm(spark, options.spark, tag, token=options.token)
    return spark


def _print_error(error: Exception) -> None:
    """User code's own traceback, ours in one line; anything else whole, since it is unexpected."""
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


def _permissions(text: str) -> Permissions:
    return Permissions(**json.loads(text))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cairn.driver.driver")
    commands = parser.add_subparsers(required=True)

    def command(name: str, run: Any) -> argparse.ArgumentParser:
        sub = commands.add_parser(name)
        sub.set_defaults(command=run)
        for option in ("--pipeline", "--root", "--spark"):
            sub.add_argument(option, required=True)
        sub.add_argument("--result", required=True, type=Path)
        sub.add_argument(
            "--settings-on-stdin", action="store_true", help='JSON on stdin: {"token": ..., "conf": {...}}, for Spark'
        )
        sub.add_argument("--task", help="names what is run; the same in every try")
        sub.add_argument("--again", action="store_true", help="an earlier try may still run: interrupt it")
        return sub

    process = command("process", _process)
    for option in ("--start", "--end", "--run-id", "--attempt"):
        process.add_argument(option, required=True)
    for option in ("--clear-number", "--try-number"):
        process.add_argument(option, required=True, type=int)
    process.add_argument("--name")
    process.add_argument("--earlier")
    process.add_argument(
        "--committed", action="store_true", help="there is a result: look whether it can stay as it is"
    )
    process.add_argument("--mode", default="incremental")
    process.add_argument("--permissions", type=_permissions, default=NO_PERMISSIONS)
    several = command("range", _range)
    for option in ("--first", "--last", "--run-id"):
        several.add_argument(option, required=True)
    for option in ("--clear-number", "--try-number"):
        several.add_argument(option, required=True, type=int)
    several.add_argument("--every-s", required=True, type=float, help="how long an interval is, in seconds")
    several.add_argument("--name")
    several.add_argument("--mode", default="incremental")
    several.add_argument("--reprocess", default="changed")
    several.add_argument("--permissions", type=_permissions, default=NO_PERMISSIONS)
    several.add_argument("--dry-run", action="store_true")
    tried = command("try", _try)
    for option in ("--first", "--last"):
        tried.add_argument(option, required=True)
    for option in ("--every-s", "--keep-s"):
        tried.add_argument(option, required=True, type=float)
    for option in ("--name", "--trial"):
        tried.add_argument(option)
    tried.add_argument("--key", action="append", default=[])
    deployed = command("deploy", _deploy)
    deployed.add_argument("--name")
    deployed.add_argument("--trial", required=True)
    deployed.add_argument("--past", action="store_true")
    savepoint = command("savepoint", _savepoint)
    savepoint.add_argument("--checkpoint", default="latest")
    savepoint.add_argument("--to", required=True)
    savepoint.add_argument("--format", default="native")
    savepoint.add_argument("--consolidate", action="store_true")
    restore = command("restore", _restore)
    restore.add_argument("--savepoint", required=True)
    restore.add_argument("--claim", default="NO_CLAIM")
    restore.add_argument("--attempt", help="a uuid: the same in every try, which complete one another")
    validate = command("validate", _validate)
    validate.add_argument("--checkpoint", default="latest")
    validate.add_argument("--attempt")
    validate.add_argument("--savepoint")
    validate.add_argument("--mode", choices=("fast", "full"), default="full")
    validate.add_argument("--docs", type=Path)
    validate.add_argument("--without-expectations", action="store_true")
    return parser


if __name__ == "__main__":
    code = main()
    if code and any(argument.startswith("sc://") for argument in sys.argv):
        # An orderly end would wait for Spark's client to tell the server what it needs no more: minutes, if that is gone.
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)
