"""The decision at the heart of a commit: may this attempt become the next record, given the log as it is now?

Why each check is made at commit, and not only at begin:

- The base is planned anew: interval 3 begins on c2, interval 1 is run again and commits, and 3 would commit a dead branch.
- So is what output the interval overlaps: an interval is run again as before, which fences nobody, and its output becomes current
  again while one of another cut is computed.
- Ids are never freed: a writer that paused would create a dropped id again and win on deleted files.
- ``retained`` is part of the record: else one commit's retention could delete the base of another between check and commit.
- Only ``Fenced`` allows an attempt to delete its own files: whoever merely does not find itself may have been committed,
  inherited by a later checkpoint, and dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from state_backend.checkpoint.forgotten_keys import check_commit
from state_backend.checkpoint.lineage import choose_base, is_forgiven, overlapping_outputs, reproduces, stale_marks
from state_backend.checkpoint.log import Log, attempt_of, base_of, interval_of, kind_of, run_of
from state_backend.checkpoint.output_schemas import next_schemas
from state_backend.checkpoint.retention import DEFAULT_POLICY, plan_retention, with_retention
from state_backend.formats import paths
from state_backend.values.errors import BaseMoved, CairnError, CorruptRecord, Fenced, Swept, UsageError
from state_backend.values.intervals import Interval
from state_backend.values.records import Content, Kept, Prepared, Record, RunRef, Tombstone
from state_backend.values.retention import RetentionPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Create:
    """Write this record, if its id is still free."""

    record: Record


@dataclass(frozen=True, slots=True, kw_only=True)
class AlreadyCommitted:
    """This attempt is in the log; only publishing may be left to do."""

    id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """Another try of the same run committed the interval from the same base; a plain retry takes it for its own."""

    id: int


def plan_commit(
    log: Log, prepared: Prepared, policy: RetentionPolicy | None = None, protected: frozenset[int] = frozenset()
) -> Create | AlreadyCommitted | Adopted:
    """What to do next. ``policy``: None for the one that is recorded.

    Raises: Swept, Fenced (the caller deletes the attempt's files), BaseMoved, or CorruptRecord for a log that lost its newest record
    since the attempt began."""
    content = prepared.content
    if log.head_id < prepared.h0:
        raise CorruptRecord(
            f"{paths.record(prepared.h0)} is missing: {_who(content)} began after it, but the log ends at {log.head_id}; nothing is "
            "committed, put the record back from a copy"
        )
    mine = log.of_attempt(content.attempt)
    if mine is not None:
        return AlreadyCommitted(id=mine.id)
    sweep = log.abandoned_by(content.attempt)
    if sweep is not None:
        raise Swept(f"{_who(content)}: sweep {sweep} abandoned it; clear the task to process the interval again")
    since = log.commits_near(content.interval, after=prepared.h0)
    fence = next((entry for entry in since if _fences(entry, content)), None)
    if fence is not None:
        if _is_plain_retry(fence, content):
            return Adopted(id=fence.id)
        raise Fenced(
            f"{_who(content)}: checkpoint {fence.id} was committed for {interval_of(fence)} by {_run(run_of(fence))} in the "
            "meantime; nothing of this attempt counts. Clear the task to process the interval again."
        )
    _check_base(log, prepared)
    check_commit(log, prepared, _who(content))
    new_id = log.head_id + 1
    reproduced = reproduces(log, content)
    new = _with_schemas(
        log,
        Record(
            id=new_id,
            retained=(),
            reproduces=reproduced,
            content=with_retention(log, content),
            replaced=_replaced(log, content),
        ),
    )
    # A forget changes no other key: what was computed for later intervals stays right, but for the forgotten keys.
    marks = {} if reproduced is not None or content.kind == "forget" else stale_marks(log, content, new_id)
    if reproduced in log.retained:
        # What made the reproduced checkpoint stale makes its equal stale.
        inherited = log.retained[reproduced].stale_by if content.kind == "consolidate" else None
        if inherited is not None:
            marks[new_id] = inherited
    retained = plan_retention(log, new, marks, policy or new.content.retention or DEFAULT_POLICY, protected)
    drops = content.forget.drops if content.kind == "forget" and content.forget is not None else ()
    return Create(record=replace(new, retained=tuple(r for r in retained if r.id not in drops)))


def _replaced(log: Log, content: Content) -> tuple[Interval, ...]:
    """The intervals of other cuts whose output is not current any more."""
    if content.kind != "interval" or not content.permissions.replace_overlapping:
        return ()
    return tuple(interval for interval, _ in overlapping_outputs(log, content.interval))


def _with_schemas(log: Log, record: Record) -> Record:
    """The record with all schemas of output, and its files with the number of theirs; its own is not said twice."""
    content = record.content
    try:
        schemas = next_schemas(log, content)
    except UsageError as error:
        raise BaseMoved(f"{_who(content)}: another commit changed the output's schema meanwhile: {error}") from error
    version = len(schemas) if content.output_schema is not None else None
    outputs = tuple(f if f.late else replace(f, schema_version=version) for f in content.outputs)
    return replace(record, content=replace(content, outputs=outputs, output_schema=None), output_schemas=schemas)


def _fences(entry: Record | Tombstone, content: Content) -> bool:
    """Whether a commit since the begin shuts this attempt out."""
    interval, run = interval_of(entry), run_of(entry)
    if kind_of(entry) not in ("interval", "restore", "forget") or not interval.overlaps(content.interval):
        return False
    if entry.reproduces is not None:
        return False
    # An earlier try of one's own run that commits late fences nobody: what came after it on purpose shall win.
    return run.run_id != content.run.run_id or _order(run) >= _order(content.run)


def _is_plain_retry(entry: Record | Tombstone, content: Content) -> bool:
    """Same run, not cleared by a person since, same interval, same base: the committed result is this try's result too."""
    run = run_of(entry)
    return (
        run.run_id == content.run.run_id
        and run.clear_number == content.run.clear_number
        and interval_of(entry) == content.interval
        and base_of(entry) == content.base_id
        and attempt_of(entry) != content.attempt
    )


def _check_base(log: Log, prepared: Prepared) -> None:
    content = prepared.content
    if content.base_id is not None and content.base_id not in log.retained:
        # Also if an equal one took its place: this attempt shares files that go with the dropped one.
        raise BaseMoved(
            f"{_who(content)}: it started from {_checkpoint(content.base_id)}, which was dropped meanwhile; run the interval again"
        )
    if content.kind == "restore" and content.base_id is None:
        return  # from a savepoint: nothing of the log is its base
    if content.kind != "interval":
        # A rewind or consolidation acts on a checkpoint that it names, not on the one that its interval starts from.
        allowed = content.permissions
        if content.base_id is None or (
            log.quarantine_above(content.base_id) is not None and not allowed.allow_quarantined
        ):
            raise BaseMoved(
                f"{_who(content)}: {_checkpoint(content.base_id)} was quarantined meanwhile; choose one that is usable"
            )
        stale_by = log.retained[content.base_id].stale_by
        if content.kind == "restore" and not is_forgiven(stale_by, allowed, prepared.h0):
            raise BaseMoved(
                f"{_who(content)}: checkpoint {stale_by} made {_checkpoint(content.base_id)} stale meanwhile; look at what is usable, then call again"
            )
        return
    try:
        base: Kept | Record | None = choose_base(
            log, content.pipeline, content.interval, content.permissions, content.pipeline_start_ms, as_of=prepared.h0
        )
    except CairnError as error:
        raise BaseMoved(
            f"{_who(content)}: the interval can't go on any more from what it started from: {error}", rerun=error.rerun
        ) from error
    base_id = base.id if base is not None else None
    while base is not None and base_id != content.base_id and kind_of(base) == "consolidate":
        base_id = base_of(base)
        entry = log.entry(base_id) if base_id is not None else None
        if not isinstance(entry, Record):
            break
        base = entry
    if base_id != content.base_id:
        raise BaseMoved(
            f"{_who(content)}: it started from {_checkpoint(content.base_id)}, but the interval starts from {_checkpoint(base_id)} "
            "now; clear the task to process it again from there"
        )


def _order(run: RunRef) -> tuple[int, int]:
    return run.clear_number, run.try_number


def _checkpoint(checkpoint_id: int | None) -> str:
    return "empty state" if checkpoint_id is None else f"checkpoint {checkpoint_id}"


def _who(content: Content) -> str:
    return f"{content.pipeline} {content.interval}, attempt {content.attempt}"


def _run(run: RunRef) -> str:
    return f"run {run.run_id!r} (clear {run.clear_number}, try {run.try_number})"
