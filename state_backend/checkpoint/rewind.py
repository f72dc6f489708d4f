"""Rewind a pipeline to a checkpoint, or fork another pipeline from it: `restore` records, made without Spark.

docs/design-state.md says which files a rewind and a fork name or copy ("Rewind and fork"). A process that stops during
one of these steps leaves:

    copy        files in the fork's folder that no record names, which a sweep deletes later
    prepare     attempts/<uuid>/prepared.json, whole or not at all
    commit      before the record is created: the same files. Afterwards: the finished rewind or fork

A repeated call with the same attempt continues, and changes nothing once the record exists.

A rewind may retract the output of later intervals: its record replaces this output, as a commit replaces the output of
overlapping intervals. A process that stops leaves:

    before the record         output, files and the sink's rows as before
    after the record, or      readers see no output of the later intervals; the sink has their rows. The record's
    during the clean-up       summary lists each of these intervals as unpublished. The next clean-up deletes the other
                              files
    during the sink's calls   the sink has deleted the rows of some of the intervals. The next publishing calls it for
                              the others: by the next checkpoint or `cairn publish`

The sink gets each interval without files and with the id of the rewind's record. So it ignores a late call with an
older id, and accepts the re-run of the interval, which has a newer id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from typing import Any

from state_backend.adapters.open_storage import open_storage
from state_backend.checkpoint.begin_attempt import Begun, begin_restore
from state_backend.checkpoint.choose_base import Discarded, discarded_by, intervals_of, kept, lines_of, why_stale
from state_backend.checkpoint.clean_up_dropped import try_clean_up
from state_backend.checkpoint.commit_attempt import CommitResult, commit
from state_backend.checkpoint.find_checkpoint import id_of
from state_backend.checkpoint.forgotten_keys import check_target, forgets_of
from state_backend.checkpoint.leases import holding
from state_backend.checkpoint.location import Location, locate
from state_backend.checkpoint.log import Log, interval_of, read_log
from state_backend.checkpoint.newest_state import valid_states
from state_backend.checkpoint.prepare_content import NO_TOTALS
from state_backend.checkpoint.prepared_attempts import create_prepared, load_prepared
from state_backend.checkpoint.savepoints import check_unclaimed, native_manifest, read_savepoint
from state_backend.checkpoint.trials import check_no_trial
from state_backend.formats import paths
from state_backend.ports.storage import Storage
from state_backend.shard.manifest import manifest_of, write_manifests
from state_backend.shard.transfer import copy_all
from state_backend.values.day_or_instant import parse_instant
from state_backend.values.errors import CorruptFile, NotFound, Rerun, StaleStateError, StateUnusable, Swept, UsageError
from state_backend.values.frozen import frozen
from state_backend.values.intervals import Interval, format_instant, to_ms
from state_backend.values.marks import Savepoint
from state_backend.values.operation_parameters import Fork, Restore
from state_backend.values.records import (
    NO_PERMISSIONS,
    Content,
    Permissions,
    Prepared,
    Record,
    RunRef,
    Segment,
    ShardManifest,
    ShardRef,
    SweepRecord,
    Tombstone,
)


@frozen
class RewindPlan:
    target: Record  # of the checkpoint to go back to
    discards: tuple[Discarded, ...]
    # All intervals that were ever committed after the target's end, also those that retention has dropped since; None
    # if there are no such intervals. Their output stays current until they are run again, except for that in
    # `retracts`.
    rerun: Rerun | None
    retracts: tuple[Interval, ...] = ()  # intervals whose output readers no longer see after the rewind

    def __str__(self) -> str:
        """Return the plan as text. `cairn restore` shows it to the user, who must agree before the rewind."""
        content = self.target.content
        text = f"{content.pipeline}: go back to checkpoint {self.target.id}, the state at {format_instant(content.interval.end)}."
        if self.discards:
            text += f"\nIt discards {len(self.discards)} checkpoint(s):"
            text += lines_of(f"{d.id} of {d.interval}" for d in self.discards)
        else:
            text += "\nNothing is discarded."
        if self.retracts:
            text += f"\nIt retracts the output of {len(self.retracts)} interval(s):{lines_of(self.retracts)}"
        return text if self.rerun is None else f"{text}\nThen run again {intervals_of(self.rerun)}."


def plan_rewind(
    log: Log, target: int, permissions: Permissions = NO_PERMISSIONS, *, retract_output: bool = False
) -> RewindPlan:
    record = restorable(log, target, permissions)
    content = record.content
    later = log.outputs_after(content.interval.end) if retract_output else []
    if early := [interval for interval, _ in later if interval.start < content.interval.end]:
        raise UsageError(
            f"the output of {early[0]} can't be retracted alone: the interval begins before {format_instant(content.interval.end)}, the end "
            f"of the interval of checkpoint {target}\nRestore an earlier checkpoint, or do not retract output"
        )
    return RewindPlan(
        target=record,
        discards=discarded_by(log, content),
        rerun=committed_after(log, content.interval.end),
        retracts=tuple(interval for interval, _ in later),
    )


def plan_restore(request: Restore) -> tuple[Log, RewindPlan]:
    at = locate(request.root, str(request.pipeline))
    log, permissions = read_log(at.storage), request.of_record("")["permissions"]
    target = id_of(at, str(request.checkpoint))
    return log, plan_rewind(log, target, permissions, retract_output=request.retract_output)


def describe_rewind(plan: RewindPlan) -> dict[str, Any]:
    return {
        "target": plan.target.id,
        "end": format_instant(plan.target.content.interval.end),
        "discards": [{"id": d.id, "interval": str(d.interval)} for d in plan.discards],
        "retracts": [str(interval) for interval in plan.retracts],
    }


def restore_checkpoint(request: Restore, plan: RewindPlan) -> dict[str, Any]:
    at = locate(request.root, plan.target.content.pipeline)
    made = rewind(
        at,
        plan.target.id,
        agreed=frozenset(d.id for d in plan.discards),
        retract_output=request.retract_output,
        **request.of_record("rewind"),
    )
    try_clean_up(at.storage)
    return {"checkpoint": made.id, **describe_rewind(plan)}


def committed_after(log: Log, end: datetime) -> Rerun | None:
    """Return the intervals to run again after a rewind to the state at `end`; None if no later interval was committed.

    The result extends from `end` to the last interval that was ever committed, and includes intervals whose checkpoints
    retention has dropped: without them, the re-run would have gaps.
    """
    later = {f.interval for f in log.facts(None) if f.kind != "replaced" and f.interval.end > end}
    return Rerun(first=end, last=max(end, *(i.start for i in later))) if later else None


def restorable(log: Log, target: int, permissions: Permissions) -> Record:
    """Return the record of checkpoint `target`, or raise an error that says why it may not be restored."""
    entry = log.entry(target)
    if entry is not None:
        check_target(log, target)
    there = f"usable checkpoints: {_ranges([kept.id for kept in valid_states(log)]) or 'none'}"
    if entry is None or isinstance(entry, SweepRecord):
        raise UsageError(f"the log has no checkpoint {target}; {there}")
    if target not in log.retained or not isinstance(entry, Record):
        raise StateUnusable(f"retention has dropped checkpoint {target} and its files; {there}.{kept(log)}")
    refused = log.quarantine_above(target)
    if refused is not None and not permissions.allow_quarantined:
        what = "is quarantined" if refused == target else f"descends from checkpoint {refused}, which is quarantined"
        raise StateUnusable(
            f"checkpoint {target} {what} ({log.quarantined[refused].reason}); {there}\n"
            "To use it anyway, allow it: --allow-quarantined on the command line, else allow_quarantined"
        )
    stale_by = log.retained[target].stale_by
    if stale_by is not None and not permissions.allow_stale_base:
        raise StaleStateError(
            f"checkpoint {target} is stale: {why_stale(log, stale_by)}\n"
            "To use the state before that change, allow it: --allow-stale on the command line, else allow_stale_base.\n"
            "To have the state after that change, run the intervals since then again.\n"
            f"{there[0].upper()}{there[1:]}"
        )
    return entry


def _ranges(ids: list[int]) -> str:
    """Return the ids as text, three or more neighbours as a range: `3, 4, 8 to 12`."""
    runs: list[list[int]] = []
    for n in ids:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def rewind(
    at: Location,
    target: int,
    *,
    run: RunRef,
    attempt: str,
    permissions: Permissions = NO_PERMISSIONS,
    agreed: frozenset[int] | None = None,
    retract_output: bool = False,
) -> CommitResult:
    """Commit a new checkpoint with the state and interval of checkpoint `target`, which becomes the newest state.

    The next interval then starts where the interval of `target` ends. Checkpoints of later intervals become stale. The
    rewind copies no file: the new record names the files of `target`. The caller publishes and cleans up as after any
    commit. `agreed`: If another checkpoint than these would be discarded, raise `UsageError`; None: discard any.
    """
    begun = begun_before(at, attempt)
    if begun is None:
        log = read_log(at.storage)
        plan = plan_rewind(log, target, permissions, retract_output=retract_output)
        more = sorted({d.id for d in plan.discards} - agreed) if agreed is not None else []
        if more:
            raise UsageError(
                f"{plan}\nYou did not agree to discard these checkpoints: {', '.join(map(str, more))}. Check the plan and agree again",
                rerun=plan.rerun,
            )
        content = as_restored(
            plan.target.content,
            pipeline=plan.target.content.pipeline,
            run=run,
            attempt=attempt,
            base_id=target,
            # In the record of a rewind, this permission means: the output of later intervals is retracted.
            permissions=replace(permissions, replace_overlapping=retract_output),
            shards=plan.target.content.shards,
        )
        create_prepared(at, Prepared(h0=log.head_id, content=content))
    elif begun.base_id != target:
        raise UsageError(
            f"attempt {attempt} began to go back to checkpoint {begun.base_id}, not {target}; use a new uuid"
        )
    return commit(at, attempt)


def fork(
    source: Storage,
    target: int | Savepoint,
    into: Location,
    *,
    run: RunRef,
    attempt: str,
    pipeline_start_ms: int | None = None,
    permissions: Permissions = NO_PERMISSIONS,
) -> CommitResult:
    """Make a checkpoint or a native savepoint the state of another pipeline.

    The storage links or copies the files. The source stays unchanged, except for a lease during the copy.
    `pipeline_start_ms`: None for the start of the forked pipeline.
    """
    if begun_before(into, attempt) is None:
        content, manifests, begun = _plan_fork(source, target, into, pipeline_start_ms, permissions)
        # An earlier call with this attempt's uuid may have left files. Names of files contain a task number. The number
        # of those files serves as task number, so that this call's names are new.
        task = sum(1 for _ in into.storage.list(f"{paths.SHARED}{attempt}/"))
        try:
            with holding(source, target if isinstance(target, int) else None, "a fork"):
                taken = [take_over(m, source, into.storage, attempt, task) for m in manifests()]
        except NotFound as error:
            raise CorruptFile(f"a file of the state to fork is missing from {source.url}: {error}") from error
        made = as_restored(
            content,
            pipeline=into.pipeline,
            run=run,
            attempt=attempt,
            permissions=permissions,
            shards=write_manifests(taken, attempt, into.storage, task=task),
        )
        saved = target.savepoint if isinstance(target, Savepoint) else None
        create_prepared(into, Prepared(h0=begun.h0, content=replace(made, restored_from=saved)))
    return commit(into, attempt)


def fork_state(request: Fork) -> dict[str, Any]:
    """Fork a state into another pipeline; in a dry run, only plan the fork. Return JSON values about the fork."""
    target: int | Savepoint
    if request.savepoint is not None:
        source = open_storage(request.savepoint)
        target = read_savepoint(source)
    elif request.pipeline is not None:
        from_ = locate(request.root, request.pipeline)
        source, target = from_.storage, id_of(from_, request.checkpoint)
    else:
        raise UsageError("give either --pipeline NAME or --savepoint URL")
    into = locate(request.root if request.fork_root is None else request.fork_root, request.fork_as)
    start_ms = None if request.start is None else to_ms(parse_instant("--from", request.start))
    of_record = request.of_record("fork")
    content, *_ = _plan_fork(source, target, into, start_ms, of_record["permissions"])
    said = {
        "pipeline": request.fork_as,
        "of": source.url,
        "target": target if isinstance(target, int) else target.checkpoint_id,
        "end": format_instant(content.interval.end),
        "entries": content.totals.entries,
        "bytes": content.totals.state_bytes,
    }
    if request.dry_run:
        return {"dry_run": True, **said}
    return {"checkpoint": fork(source, target, into, pipeline_start_ms=start_ms, **of_record).id, **said}


def _plan_fork(
    source: Storage, target: int | Savepoint, into: Location, pipeline_start_ms: int | None, permissions: Permissions
) -> tuple[Content, Callable[[], Iterator[ShardManifest]], Begun]:
    """Return (content of the fork, function that reads the manifests to copy, begun attempt). Write nothing."""
    if into.storage.url == source.url:
        raise UsageError(
            f"{source.url} can't be forked into itself\nGive the fork another name, or go back with cairn restore"
        )
    check_no_trial(source.url, "fork")
    content, manifests = _source(source, target, into.storage.url, permissions)
    if pipeline_start_ms is not None:
        content = replace(content, pipeline_start_ms=pipeline_start_ms)
    begun = begin_restore(into, content, pipeline_start_ms=content.pipeline_start_ms)
    _check_free(into, content)
    return content, manifests, begun


def as_restored(
    content: Content,
    *,
    pipeline: str,
    run: RunRef,
    attempt: str,
    base_id: int | None = None,
    permissions: Permissions = NO_PERMISSIONS,
    shards: tuple[ShardRef, ...] = (),
) -> Content:
    """Return the content of a `restore` record that has the state, time and source position of `content`.

    Counts and output of the interval are left out.
    """
    of_state = ("keys", "entries", "state_bytes", "state_files")
    totals = replace(NO_TOTALS, **{name: getattr(content.totals, name) for name in of_state})
    return replace(
        content,
        kind="restore",
        pipeline=pipeline,
        run=run,
        attempt=attempt,
        base_id=base_id,
        permissions=permissions,
        totals=totals,
        shards=shards,
        outputs=(),
        output_schema=None,
        durations_us={},
        worker_pids=(),
        code=content.code if pipeline == content.pipeline else None,
        forget=content.forget if base_id is None else None,
        filtered=(),
    )


def take_over(
    manifest: ShardManifest, source: Storage, storage: Storage, attempt: str, task: int, *, parallelism: int = 8
) -> ShardManifest:
    """Copy a shard's files and segments to `shared/<attempt>/` of `storage`, and return the manifest of the copies."""
    old = list(dict.fromkeys(manifest.handles))
    files = {f.handle for f in manifest.files}
    names = [paths.shared(attempt, manifest.shard, task, n, "sst" if h in files else "log") for n, h in enumerate(old)]
    copies = copy_all(source, storage, list(zip(old, names, strict=True)), parallelism=parallelism)
    new = dict(zip(old, copies, strict=True))

    def moved(segment: Segment) -> Segment:
        return segment if segment.handle is None else replace(segment, handle=new[segment.handle])

    return replace(
        manifest,
        files=tuple(replace(f, handle=new[f.handle]) for f in manifest.files),
        segments=tuple(map(moved, manifest.segments)),
    )


def begun_before(at: Location, attempt: str) -> Content | Tombstone | None:
    """Return what an earlier call with this attempt prepared or committed; None if it did neither."""
    log = read_log(at.storage)
    entry = log.of_attempt(attempt)
    if entry is not None:
        return entry.content if isinstance(entry, Record) else entry
    sweep = log.abandoned_by(attempt)
    if sweep is not None:
        raise Swept(f"{at.pipeline}: sweep {sweep} abandoned attempt {attempt}; use a new uuid")
    if at.storage.stat(paths.prepared(attempt)) is None:
        return None
    return load_prepared(at, attempt).content


def _source(
    source: Storage, target: int | Savepoint, into: str, permissions: Permissions
) -> tuple[Content, Callable[[], Iterator[ShardManifest]]]:
    """Return the content to fork, and a function that reads the manifests of its shards one by one."""
    if isinstance(target, int):
        record = restorable(read_log(source), target, permissions)
        content = replace(record.content, forget=forgets_of(record))
        return content, lambda: (manifest_of(ref, source) for ref in content.shards)
    if target.format != "native":
        raise UsageError(
            f"the savepoint in {source.url} is {target.format}, and only a native savepoint can be forked\n"
            "Restore it: cairn restore, or restore_savepoint in Python"
        )
    check_unclaimed(source, into)
    return target.content, lambda: (native_manifest(target, n, source) for n in range(target.content.parallelism))


def _check_free(into: Location, content: Content) -> None:
    """Raise `UsageError` if the pipeline has results that the fork would replace or make stale."""
    overlapping = [e for e in read_log(into.storage).commits() if content.interval.start < interval_of(e).end]
    if overlapping:
        newest = max(overlapping, key=lambda e: e.id)
        raise UsageError(
            f"pipeline {into.pipeline!r} already has {len(overlapping)} checkpoint(s) at or after {content.interval}; the newest "
            f"is {newest.id} of {interval_of(newest)}. Nothing was copied\n"
            "Fork under another name. To go back in this pipeline, rewind it. To replace its state, restore a savepoint"
        )
