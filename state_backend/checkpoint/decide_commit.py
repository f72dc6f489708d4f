"""Decide whether a prepared attempt may become the next record, given the log as it is now.

Other attempts may commit between an attempt's begin and its commit. Therefore a commit repeats checks of begin:

- The base is chosen again. Example: interval 3 begins on checkpoint 2, then interval 1 is run again and changes the
  state. Without the check, interval 3 would commit a result of a stale base.
- Overlapping output is checked again. A re-run that reproduces its state fences no attempt, but makes the output of its
  interval current. Without the check, an attempt of an overlapping interval that began before the re-run's commit would
  be committed too, and readers would get the same rows twice.

Three rules keep a late or paused writer from doing harm:

- Ids are never used twice. Otherwise a paused writer could create the record of a dropped id again, which names deleted
  files.
- Each record itself lists the retained checkpoints (`retained`). So another commit can drop this attempt's base only by
  creating the record with the next id. Then this attempt can't create its own record with that id, and checks its base
  again. If the list were a separate file, the base could be dropped between the check and the commit.
- Only `Fenced` allows an attempt to delete its own files. An attempt that does not find its own record may have been
  committed, and a later checkpoint may share its files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from state_backend.checkpoint.choose_base import choose_base, is_forgiven, overlapping_outputs, reproduces, stale_marks
from state_backend.checkpoint.forgotten_keys import check_commit
from state_backend.checkpoint.log import Log, attempt_of, base_of, interval_of, kind_of, run_of
from state_backend.checkpoint.output_schemas import with_schemas
from state_backend.checkpoint.plan_retention import DEFAULT_POLICY, plan_retention, with_retention, with_schedule
from state_backend.formats import paths
from state_backend.values.errors import (
    BaseMoved,
    CairnError,
    CorruptFile,
    CorruptRecord,
    Fenced,
    RetryableError,
    StorageUnavailable,
    Swept,
    UsageError,
)
from state_backend.values.frozen import frozen
from state_backend.values.intervals import Interval
from state_backend.values.records import Content, Kept, Prepared, Record, RunRef, Tombstone
from state_backend.values.retention import RetentionPolicy


@frozen
class Create:
    record: Record


@frozen
class AlreadyCommitted:
    """The decision that record `id` is this attempt's own commit, made by an earlier call."""

    id: int


@frozen
class Adopted:
    """The decision to take checkpoint `id` as this attempt's result, and to commit nothing.

    Another try of the same run has committed the checkpoint from the same base.
    """

    id: int


def plan_commit(
    log: Log,
    prepared: Prepared,
    policy: RetentionPolicy | None = None,
    protected: frozenset[int] = frozenset(),
    validated: Sequence[frozenset[int]] = (),
) -> Create | AlreadyCommitted | Adopted:
    content = prepared.content
    if log.head_id < prepared.h0:
        raise CorruptRecord(
            f"{paths.record(prepared.h0)} is missing: {_who(content)} began after it, but the log ends at {log.head_id}\n"
            "Nothing is committed. Put the record back from a backup"
        )
    mine = log.of_attempt(content.attempt)
    if mine is not None:
        return AlreadyCommitted(id=mine.id)
    sweep = log.abandoned_by(content.attempt)
    if sweep is not None:
        raise Swept(
            f"{_who(content)}: sweep {sweep} abandoned this attempt\nClear the task to process the interval again"
        )
    since = log.commits_near(content.interval, after=prepared.h0)
    fence = next((entry for entry in since if _fences(entry, content)), None)
    if fence is not None:
        if _is_plain_retry(fence, content):
            return Adopted(id=fence.id)
        raise Fenced(
            f"{_who(content)}: {_run(run_of(fence))} committed checkpoint {fence.id} for {interval_of(fence)} first, "
            "so this attempt does not count\nClear the task to process the interval again"
        )
    _check_no_release(log, _who(content))
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
            content=with_schedule(log, with_retention(log, content)),
            replaced=_find_replaced(log, prepared),
        ),
    )
    # A forget leaves the entries of all other keys as they are, so it makes no checkpoint stale. Checkpoints from
    # before the forget may still hold the forgotten keys: `check_commit` refuses a commit that would bring such a key
    # back.
    marks = {} if reproduced is not None or content.kind == "forget" else stale_marks(log, content, new_id)
    if reproduced in log.retained:
        # A consolidated checkpoint inherits the stale mark of its base.
        inherited = log.retained[reproduced].stale_by if content.kind == "consolidate" else None
        if inherited is not None:
            marks[new_id] = inherited
    retained = plan_retention(log, new, marks, policy or new.content.retention or DEFAULT_POLICY, protected, validated)
    drops = content.forget.drops if content.kind == "forget" and content.forget is not None else ()
    return Create(record=replace(new, retained=tuple(r for r in retained if r.id not in drops)))


def _check_no_release(log: Log, who: str) -> None:
    """Raise if a checkpoint is being released from quarantine: afterwards, the attempt may need another base."""
    for checkpoint_id in sorted(n for n, mark in log.quarantined.items() if mark.releasing):
        raise StorageUnavailable(
            f"{who}: checkpoint {checkpoint_id} is being released from quarantine, so nothing is committed\n"
            "If a release is running, wait until it ends. Otherwise a release stopped before its end. To finish it, run:\n"
            f"cairn quarantine {checkpoint_id} --release"
        )


def _find_replaced(log: Log, prepared: Prepared) -> tuple[Interval, ...]:
    """Return the intervals, other than the committed one, whose output is no longer current after the commit."""
    content = prepared.content
    if not content.permissions.replace_overlapping:
        return ()
    if content.kind == "interval":
        return tuple(interval for interval, _ in overlapping_outputs(log, content.interval))
    if content.kind != "restore" or content.base_id is None:
        return ()
    later = log.outputs_after(content.interval.end)
    if newer := [(interval, n) for interval, n in later if n > prepared.h0]:
        interval, checkpoint_id = newer[0]
        raise BaseMoved(
            f"{_who(content)}: checkpoint {checkpoint_id} has made output of {interval} since the restore was planned, and nobody has agreed "
            "to retract this output. Nothing is committed\nPlan the restore again: type the command again, or clear the task"
        )
    return tuple(interval for interval, _ in later)


def _with_schemas(log: Log, record: Record) -> Record:
    """Return the record with lists of all output and input schemas. Its files name their schemas by number."""
    try:
        content, output, read = with_schemas(log, record.content)
    except UsageError as error:
        raise BaseMoved(
            f"{_who(record.content)}: another commit has changed the output schema since this attempt began: {error}"
        ) from error
    return replace(record, content=content, output_schemas=output, input_schemas=read)


def _fences(entry: Record | Tombstone, content: Content) -> bool:
    """Return True if the commit `entry`, made since this attempt began, fences it: the attempt can't be committed."""
    interval, run = interval_of(entry), run_of(entry)
    if kind_of(entry) not in ("interval", "restore", "forget") or not interval.overlaps(content.interval):
        return False
    if entry.reproduces is not None:
        return False
    # An earlier try of the same run may commit late. That commit must not fence this later try.
    return run.run_id != content.run.run_id or _order(run) >= _order(content.run)


def _is_plain_retry(entry: Record | Tombstone, content: Content) -> bool:
    """Return True if another try of the same Airflow run made the commit `entry`.

    Interval, base and `clear_number` must be equal too: no person has cleared the task between the two tries.
    """
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
        # An equal checkpoint can't replace the base: this attempt shares files that are deleted with the dropped base.
        raise BaseMoved(
            f"{_who(content)}: it started from {_checkpoint(content.base_id)}, which retention has dropped since\n"
            "Run the interval again"
        )
    if content.kind == "restore" and content.base_id is None:
        return  # a restore from a savepoint has no base in this log
    if content.kind != "interval":
        # The base of a rewind or a consolidation is the checkpoint that it restores or rewrites.
        allowed = content.permissions
        if content.base_id is None or (
            log.quarantine_above(content.base_id) is not None and not allowed.allow_quarantined
        ):
            raise BaseMoved(
                f"{_who(content)}: {_checkpoint(content.base_id)} has been quarantined since this attempt began\n"
                "Choose a usable checkpoint"
            )
        stale_by = log.retained[content.base_id].stale_by
        if content.kind == "restore" and not is_forgiven(stale_by, allowed, prepared.h0):
            raise BaseMoved(
                f"{_who(content)}: checkpoint {stale_by} has made {_checkpoint(content.base_id)} stale since this attempt began\n"
                "Check which checkpoints are usable, then call again"
            )
        return
    try:
        base: Kept | Record | None = choose_base(
            log, content.pipeline, content.interval, content.permissions, content.pipeline_start_ms, as_of=prepared.h0
        )
    except (RetryableError, CorruptFile):  # The log could not be read. The same commit may succeed later.
        raise
    except CairnError as error:
        raise BaseMoved(
            f"{_who(content)}: the interval can no longer start from its base: {error}", rerun=error.rerun
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
            f"{_who(content)}: it started from {_checkpoint(content.base_id)}, but the interval now starts from "
            f"{_checkpoint(base_id)}\nClear the task to process the interval again"
        )


def _order(run: RunRef) -> tuple[int, int]:
    return run.clear_number, run.try_number


def _checkpoint(checkpoint_id: int | None) -> str:
    return "empty state" if checkpoint_id is None else f"checkpoint {checkpoint_id}"


def _who(content: Content) -> str:
    return f"{content.pipeline} {content.interval}, attempt {content.attempt}"


def _run(run: RunRef) -> str:
    return f"run {run.run_id!r} (clear {run.clear_number}, try {run.try_number})"
