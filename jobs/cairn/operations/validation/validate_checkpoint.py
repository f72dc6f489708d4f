"""Validate a checkpoint, a prepared attempt or a savepoint.

docs/validation.md describes the three steps: files, restored state and expectations. A step with a finding is the last
step. Mode "fast" ends after the files. Spark restores the shards; if the state is small, this process restores them.

A checkpoint with findings is quarantined: no interval starts from it. An attempt with findings can't be committed. A
savepoint gets no mark: the caller decides what to do.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from cairn.operations.place import Place
from cairn.operations.validation.checks import Check
from cairn.operations.validation.checks_page import checks_page, page_path, relative_link, write_page
from cairn.operations.validation.evaluate_expectations import Compared, Declared, Engines, evaluate
from cairn.operations.validation.expectation_suites import read_declared
from cairn.spark.session import SessionOnDemand, open_now
from state_backend.adapters.open_storage import open_storage
from state_backend.adapters.work_folders import work_folder
from state_backend.checkpoint.dropped_checkpoint import check_retained, telling_drops
from state_backend.checkpoint.find_checkpoint import find_checkpoint
from state_backend.checkpoint.leases import holding
from state_backend.checkpoint.location import locate
from state_backend.checkpoint.log import read_log, read_newest
from state_backend.checkpoint.prepared_attempts import load_prepared, refuse
from state_backend.checkpoint.quarantine import mark_validated, quarantine_checkpoint
from state_backend.checkpoint.quarantine_consequences import describe_consequences, plan_consequences
from state_backend.checkpoint.savepoints import read_savepoint
from state_backend.formats.paths import interval_name
from state_backend.inspection.state_source import StateSource, find_state
from state_backend.inspection.verify import verify_files
from state_backend.shard.manifest import manifest_of
from state_backend.state.layout import TIMERS_NAME
from state_backend.values.errors import UsageError
from state_backend.values.frozen import frozen
from state_backend.values.human_units import plural
from state_backend.values.marks import CanonicalFile
from state_backend.values.operation_parameters import Validate
from state_backend.values.records import Content, Record, Tombstone, ValidationMode

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cairn.pipeline import Pipeline

log = logging.getLogger("cairn")

REASON = "validation refused it"
# A state up to this size is restored in this process. 100,000 entries take 1.4 s of CPU, and a Spark job 0.7 s more.
_SMALL_STATE_ENTRIES = 100_000
_SMALL_STATE_BYTES = 8 << 20
# With more shards, Spark restores the state, because this process would open the stores one after the other.
_FEW_SHARDS = 8

Spark: TypeAlias = "SparkSession | SessionOnDemand"


@frozen
class StateReport:
    state: str
    entries: int
    expectations: int
    failed: int


@frozen
class Validation:
    what: str
    # Id of the checkpoint, or of the checkpoint that a savepoint copied; None for an attempt.
    checkpoint_id: int | None
    mode: ValidationMode
    findings: tuple[str, ...]
    files: int
    entries: int
    states: tuple[StateReport, ...]
    checks: tuple[Check, ...] = ()
    # Path of the Data Docs page with all checks; None without Data Docs.
    docs: str | None = None
    pids: tuple[int, ...] = ()  # Ids of the processes that restored the shards.

    @property
    def success(self) -> bool:
        return not self.findings

    @property
    def expectations(self) -> int:
        """Number of evaluated expectations over all states."""
        return sum(s.expectations for s in self.states)

    def table(self) -> list[str]:
        width = max([5, *(len(s.state) for s in self.states)])
        lines = [f"{'state':{width}}  {'entries':>13}  {'expectations':>12}  {'failed':>6}"]
        lines += [f"{s.state:{width}}  {s.entries:13,}  {s.expectations:12,}  {s.failed:6,}" for s in self.states]
        return lines


def carry_out_validation(request: Validate, place: Place) -> dict[str, Any]:
    """Validate the target of the request. Return a summary: the findings, and what a quarantine of it affects."""
    pipeline = place.load(request)
    at = locate(request.root, pipeline.name)
    # The workers of a validation are not the processes that wrote the state, so they must read storage. The session is
    # opened only if a step needs Spark.
    opens = partial(place.connect, pipeline, "validate", own_workers=True)
    spark = None if request.fast else SessionOnDemand(opens, place.conf)
    keys, costs = 0, None
    done = None if request.attempt is None else read_newest(at.storage).of_attempt(request.attempt)
    if done is not None:  # The interval kept its result. Or somebody committed without waiting for this validation.
        request = replace(request, attempt=None, checkpoint=str(done.id))
    if isinstance(done, Tombstone):
        what = f"checkpoint {done.id}, which retention has dropped"
        mode: ValidationMode = "fast" if request.fast else "full"
        found = Validation(what=what, checkpoint_id=done.id, mode=mode, findings=(), files=0, entries=0, states=())
    elif request.attempt is not None:
        keys = load_prepared(at, request.attempt).content.totals.keys
        found = validate_attempt(spark, pipeline, request)
    elif request.savepoint is not None:
        found = validate_savepoint(spark, pipeline, request)
    else:
        _, record = find_checkpoint(at, request.checkpoint)
        keys = record.content.totals.keys
        found = validate_checkpoint(spark, pipeline, record, request)
        if not found.success and not request.dry_run:
            costs = plan_consequences(read_log(at.storage), record.id)
    for line in found.table() if found.states else ():
        place.say(line)
    for finding in found.findings:
        place.say(f"finding: {finding}")
    verdict = "no findings" if found.success else plural(len(found.findings), "finding")
    restored = f" restored in processes {', '.join(map(str, found.pids))}" if found.pids else ""
    checked = plural(found.files, "file")
    if not request.fast:
        checked += f", {found.entries} entries{restored}, {found.expectations} expectations"
    place.say(f"{found.what}: {checked} checked, {verdict}")
    if found.docs is not None:
        place.say(f"Data Docs: {found.docs}")
    return {
        "success": found.success,
        "pipeline": pipeline.name,
        "what": found.what,
        "mode": found.mode,
        "checkpoint": found.checkpoint_id,
        "dry_run": request.dry_run,
        "quarantined": costs is not None,
        "findings": list(found.findings),
        "files": found.files,
        "entries": found.entries,
        "keys": keys,
        "expectations": found.expectations,
        "pids": list(found.pids),
        "docs": found.docs,
        **describe_consequences(costs),
    }


def validate_checkpoint(spark: Spark | None, pipeline: Pipeline, record: Record, request: Validate) -> Validation:
    """Validate a committed checkpoint, and mark it as validated or quarantined; a dry run marks nothing.

    `spark`: None only for a fast validation, which does not restore the state.
    """
    at = locate(request.root, pipeline.name)
    before = _before(pipeline, request.root, record)
    target = _Target(
        f"checkpoint {record.id} of {record.content.interval}",
        at.url,
        record.content,
        before,
        {"root": request.root, "pipeline": pipeline.name, "checkpoint": str(record.id)},
        checkpoint_id=record.id,
    )
    base_id = before.id if before else None
    with holding(at.storage, record.id, "a validation"), holding(at.storage, base_id, "a validation"):
        found = _validate(spark, pipeline, target, request)
    found = replace(found, checkpoint_id=record.id)
    if found.success and not request.dry_run:
        mark_validated(at, record.id, found.mode)
    elif not request.dry_run:
        quarantine_checkpoint(at, record.id, REASON, found.findings)
    return found


def validate_attempt(spark: Spark | None, pipeline: Pipeline, request: Validate) -> Validation:
    """Validate a prepared attempt before its commit. `spark`: None only for a fast validation.

    If the validation has findings, `commit` raises `ValidationRefused` for this attempt. If the attempt was committed
    before, by a caller that did not wait for the validation, the validation quarantines its checkpoint.
    """
    root, attempt = request.root, str(request.attempt)
    at = locate(root, pipeline.name)
    content = load_prepared(at, attempt).content
    record = Record(id=0, retained=(), reproduces=None, content=content)
    options = {"root": root, "pipeline": pipeline.name, "attempt": attempt}
    target = _Target(f"attempt {attempt}", at.url, content, _before(pipeline, root, record), options)
    found = _validate(spark, pipeline, target, request)
    if not found.success:
        refuse(at, attempt, REASON, found.findings)
        if (committed := read_newest(at.storage).of_attempt(attempt)) is not None:
            quarantine_checkpoint(at, committed.id, REASON, found.findings)
    return found


def validate_savepoint(spark: Spark | None, pipeline: Pipeline, request: Validate) -> Validation:
    """Validate a native or canonical savepoint, and mark nothing. `spark`: None only for a fast validation."""
    folder = str(request.savepoint)
    savepoint = read_savepoint(open_storage(folder))
    target = _Target(
        f"savepoint {savepoint.savepoint}", folder, savepoint.content, None, {"checkpoint": folder}, savepoint.files
    )
    return replace(_validate(spark, pipeline, target, request), checkpoint_id=savepoint.checkpoint_id)


@dataclass(frozen=True, slots=True)
class _Target:
    """The checkpoint, attempt or savepoint that is validated."""

    name: str  # In words, for messages.
    folder: str  # URL of the folder of the pipeline or savepoint.
    content: Content
    # Record of the base, to evaluate `expectations_over_time`; None skips them.
    before: Record | None
    options: dict[str, str]  # The options by which `format("keyed_state")` finds the target.
    # The canonical files of a savepoint; None for a checkpoint or attempt.
    savepoint: tuple[CanonicalFile, ...] | None = None
    # Id of the checkpoint; None for an attempt or savepoint.
    checkpoint_id: int | None = None


def _before(pipeline: Pipeline, root: str, record: Record) -> Record | None:
    """Return the base's record if it is retained and `expectations_over_time` needs it; else None."""
    base_id = record.content.base_id
    if base_id is None or pipeline.expectations_over_time is None:
        return None
    checkpoints = read_newest(locate(root, pipeline.name).storage)
    entry = checkpoints.entries.get(base_id)
    if base_id in checkpoints.retained and isinstance(entry, Record):
        return entry
    log.info("checkpoint %d, the base, was dropped: expectations_over_time are not evaluated", base_id)
    return None


def _validate(spark: Spark | None, pipeline: Pipeline, target: _Target, request: Validate) -> Validation:
    docs = None if request.docs is None else Path(request.docs)
    content = target.content
    with work_folder("verify") as work:
        files = verify_files(content, open_storage(target.folder), work=work, savepoint=target.savepoint)
    found = Validation(
        what=target.name,
        checkpoint_id=None,
        mode="fast" if request.fast else "full",
        findings=files.findings,
        files=files.files,
        entries=0,
        states=(),
    )
    found = replace(found, checks=_checks_of("files", found.findings, f"{files.files:,} files are intact"))
    storage = open_storage(target.folder)
    if found.findings:
        check_retained(storage, target.checkpoint_id)
        return _with_page(pipeline, target, found, docs)
    with telling_drops(storage, target.checkpoint_id):
        found = replace(found, states=_reports(target))
    if request.fast:
        return found
    if spark is None:
        raise UsageError("a full validation restores the state, so it needs a Spark session; mode fast needs none")
    found = _check_restored(spark, pipeline, target, found)
    if found.findings:
        check_retained(storage, target.checkpoint_id)
    pages: Mapping[str, str] = {}
    if not found.findings and not request.without_expectations:
        found, pages = _check_expected(spark, pipeline, target, found, docs)
    return _with_page(pipeline, target, found, docs, pages)


def _checks_of(what: str, findings: Sequence[str], passed: str) -> tuple[Check, ...]:
    """Return the checks of a step that concerns the whole checkpoint: one that passed, or a failed one per finding."""
    if not findings:
        return (Check(table="", what=what, observed=passed, success=True),)
    return tuple(Check(table="", what=what, observed=finding, success=False) for finding in findings)


def _run_name(target: _Target) -> str:
    # Data Docs put the run name into paths, where a colon is not allowed everywhere. So the interval has the form of
    # Cairn's paths.
    return f"{target.name} {interval_name(target.content.interval)}"


def _with_page(
    pipeline: Pipeline, target: _Target, found: Validation, docs: Path | None, pages: Mapping[str, str] | None = None
) -> Validation:
    """Write the Data Docs page of a validation, and return `found` with its path; unchanged if `docs` is None.

    `pages`: By table, the path of its page in Great Expectations' docs. If the page can't be written, only log the
    reason, because an error would end the validation before it marks the checkpoint.
    """
    if docs is None:
        return found
    folder, run_name = docs / pipeline.name, _run_name(target)
    links = {table: relative_link(page_path(folder, run_name), page) for table, page in (pages or {}).items()}
    html = checks_page(
        pipeline=pipeline.name,
        what=found.what,
        interval=str(target.content.interval),
        mode=found.mode,
        at=datetime.now(UTC),
        checks=found.checks,
        links=links,
    )
    try:
        return replace(found, docs=str(write_page(folder, run_name, html)))
    except OSError as error:
        log.warning("the Data Docs page of %s could not be written: %s", found.what, error)
        return found


def _reports(target: _Target) -> tuple[StateReport, ...]:
    content = target.content
    entries = dict.fromkeys([*(d.name for d in content.states), TIMERS_NAME], 0)
    storage = open_storage(target.folder)
    for ref in content.shards:
        for state in manifest_of(ref, storage).key_group_states:
            for name, count in state.entries.items():
                entries[name] += count
    for file in target.savepoint or ():
        entries[file.state] += file.rows
    return tuple(StateReport(state=name, entries=n, expectations=0, failed=0) for name, n in entries.items())


def restores_here(content: Content) -> bool:
    """Return True if this process restores the state to validate it, and False if a Spark job does."""
    totals = content.totals
    few = totals.entries <= _SMALL_STATE_ENTRIES and content.parallelism <= _FEW_SHARDS
    return few and totals.state_bytes <= _SMALL_STATE_BYTES


def _check_restored(spark: Spark, pipeline: Pipeline, target: _Target, found: Validation) -> Validation:
    """Restore every shard, in this process or in a Spark job, and return `found` with the findings added."""
    from cairn.shard_jobs.check_restored import ValidationJob
    from cairn.shard_jobs.run_on_shards import run_here, run_on_shards

    content = target.content
    job = ValidationJob(
        root=target.folder,
        content=content,
        canonical=target.savepoint or (),
        engine=replace(pipeline.engine, cache_dir=None),
    )
    shards = run_here(job) if restores_here(content) else run_on_shards(open_now(spark), job)
    pids = tuple(sorted({s.pid for s in shards}))
    findings, entries = job.findings(shards), sum(s.entries for s in shards)
    checks = _checks_of("restored state", findings, f"{entries:,} entries are as recorded")
    return replace(found, findings=findings, entries=entries, pids=pids, checks=(*found.checks, *checks))


def _check_expected(
    spark: Spark, pipeline: Pipeline, target: _Target, found: Validation, docs: Path | None
) -> tuple[Validation, Mapping[str, str]]:
    """Evaluate the pipeline's expectations. Return (`found` with the findings, path of each table's page)."""
    entries, before = {s.state: s.entries for s in found.states}, target.before
    rules = Declared(*read_declared(pipeline, [*entries], with_base=before is not None))
    if not rules.states:
        return found, {}
    from cairn.spark.first_cause import first_cause

    base = StateSource.of_record(target.folder, before) if before is not None else None
    compared = Compared(now=find_state(**target.options), before=base)
    options = {name: text for name, text in target.options.items() if name in ("root", "pipeline")}
    stores = None if target.savepoint is not None or "pipeline" not in target.options else target.folder
    with first_cause():
        engines = Engines(
            spark,
            rules,
            compared,
            options=(target.options, {**options, "checkpoint": str(before.id)} if before is not None else {}),
            entries=entries,
            most_bytes=pipeline.expectations_memory_bytes,
            root=stores,
        )
        result = evaluate(pipeline, rules, compared, engines, run_name=_run_name(target), docs=docs)
    counted = ((s, *result.counts.get(s.state, (0, 0))) for s in found.states)
    reports = tuple(replace(s, expectations=evaluated, failed=failed) for s, evaluated, failed in counted)
    findings = tuple(check.finding for check in result.checks if not check.success)
    return replace(found, findings=findings, states=reports, checks=(*found.checks, *result.checks)), result.pages
