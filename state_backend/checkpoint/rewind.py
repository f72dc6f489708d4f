"""Going back to a checkpoint, and going on from one under another name: `restore` records, without Spark.

A **rewind** references the files of its target: one more record in the same log. A **fork** has files of its own in the other
pipeline's folder, linked or copied by the storage, so that neither folder ever depends on the other. What is on disk if one
stops, line by line:

    copy        files of the attempt in the fork's folder that no record names (for the sweeper)
    prepare     attempts/<uuid>/prepared.json, whole or not at all
    commit      up to the create: as before. After it: done

The same call with the same attempt goes on from there, and is a no-op once it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime

from state_backend.checkpoint.coordinator import Begun, CommitResult, Coordinator
from state_backend.checkpoint.forgotten_keys import check_target, forgets_of
from state_backend.checkpoint.leases import holding
from state_backend.checkpoint.lineage import Discarded, discarded_by, intervals_of, kept, lines_of
from state_backend.checkpoint.log import Log, interval_of, read_log
from state_backend.checkpoint.savepoints import check_unclaimed, native_manifest
from state_backend.checkpoint.trials import check_no_trial
from state_backend.formats import paths
from state_backend.ports.storage import Storage
from state_backend.shard.manifest import manifest_of, write_manifests
from state_backend.shard.transfer import copy_all
from state_backend.values.errors import CorruptFile, NotFound, Rerun, StaleStateError, StateUnusable, Swept, UsageError
from state_backend.values.intervals import format_instant
from state_backend.values.records import (
    Content,
    Permissions,
    Prepared,
    Record,
    RunRef,
    Savepoint,
    Segment,
    ShardManifest,
    ShardRef,
    SweepRecord,
    Tombstone,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewindPlan:
    """What a rewind to ``target`` would do: ``discards`` by id. ``rerun``: all that was ever committed after the target's end, also
    what retention has dropped since, or None if nothing was. Output of those intervals stays current until they are run again."""

    target: Record
    discards: tuple[Discarded, ...]
    rerun: Rerun | None

    def __str__(self) -> str:
        """For the person who has to agree."""
        content = self.target.content
        text = f"{content.pipeline}: back to checkpoint {self.target.id}, the state at {format_instant(content.interval.end)}."
        if self.discards:
            text += f"\nIt discards {len(self.discards)} checkpoint(s):"
            text += lines_of(f"{d.id} of {d.interval}" for d in self.discards)
        else:
            text += "\nNothing is discarded."
        return text if self.rerun is None else f"{text}\nThen run again {intervals_of(self.rerun)}."


def plan_rewind(log: Log, target: int, permissions: Permissions = Permissions()) -> RewindPlan:  # noqa: B008
    """Whether the state can go back to checkpoint ``target``, and what no interval would start from afterwards.

    Raises: UsageError if there never was such a checkpoint; StateUnusable if it was dropped, or is quarantined or descends from
    one that is (without ``allow_quarantined``); StaleStateError if it is stale (without ``allow_stale_base``).
    """
    record = restorable(log, target, permissions)
    content = record.content
    return RewindPlan(
        target=record, discards=discarded_by(log, content), rerun=_committed_after(log, content.interval.end)
    )


def _committed_after(log: Log, end: datetime) -> Rerun | None:
    """The intervals from ``end`` to the last one that was ever committed. From a tombstone as well: whoever ran only the retained
    ones again would meet a gap where retention dropped one."""
    later = [i for i in log.committed_intervals() if i.end > end]
    return Rerun(first=end, last=max(end, *(i.start for i in later))) if later else None


def restorable(log: Log, target: int, permissions: Permissions) -> Record:
    """The completed checkpoint ``target``, if it may be used. Raises as ``plan_rewind``."""
    entry = log.entry(target)
    if entry is not None:
        check_target(log, target)
    usable = [c.id for c in log.completed() if log.quarantine_above(c.id) is None]
    there = f"usable are {_ranges(usable) or 'none'}"
    if entry is None or isinstance(entry, SweepRecord):
        raise UsageError(f"there is no checkpoint {target} in the log; {there}")
    if target not in log.retained or not isinstance(entry, Record):
        raise StateUnusable(f"checkpoint {target} was dropped by retention, and its files with it; {there}.{kept(log)}")
    refused = log.quarantine_above(target)
    if refused is not None and not permissions.allow_quarantined:
        what = "is quarantined" if refused == target else f"descends from checkpoint {refused}, which is quarantined"
        raise StateUnusable(
            f"checkpoint {target} {what} ({log.quarantined[refused].reason}); {there}. To use it all the same: allow_quarantined"
        )
    stale_by = log.retained[target].stale_by
    if stale_by is not None and not permissions.allow_stale_base:
        raise StaleStateError(
            f"checkpoint {target} is stale: checkpoint {stale_by} changed what it was made from\n"
            f"To go back to the state before that change: allow_stale_base; else run the intervals since then again.\n"
            f"{there[0].upper()}{there[1:]}"
        )
    return entry


def _ranges(ids: list[int]) -> str:
    """All of the ids, more than two neighbours as a range: `3, 4, 8 to 12`."""
    runs: list[list[int]] = []
    for n in ids:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def rewind(
    coordinator: Coordinator,
    target: int,
    *,
    run: RunRef,
    attempt: str,
    permissions: Permissions = Permissions(),  # noqa: B008
    agreed: frozenset[int] | None = None,
) -> CommitResult:
    """Makes checkpoint ``target`` the state at its interval's end again; what came after it is stale. No file is copied.

    ``attempt``: a uuid of this call; the same again completes it, once. ``agreed``: the ids that a person agreed to lose; None:
    whatever it takes. With ``allow_quarantined`` the new checkpoint is usable whatever mark lies on its target. Clean up and
    publish as after any commit.

    Raises: as ``plan_rewind``; UsageError if it would discard more than was agreed, or if the attempt was begun for another
    target; Fenced or BaseMoved if somebody else committed that interval, dropped or changed the target meanwhile.
    """
    begun = begun_before(coordinator, attempt)
    if begun is None:
        log = coordinator.log()
        plan = plan_rewind(log, target, permissions)
        more = sorted({d.id for d in plan.discards} - agreed) if agreed is not None else []
        if more:
            raise UsageError(
                f"{plan}\nThat is more than was agreed to: {', '.join(map(str, more))}; look again, and agree again",
                rerun=plan.rerun,
            )
        content = as_restored(
            plan.target.content,
            pipeline=plan.target.content.pipeline,
            run=run,
            attempt=attempt,
            base_id=target,
            permissions=permissions,
            shards=plan.target.content.shards,
        )
        coordinator.prepare(Prepared(h0=log.head_id, content=content))
    elif begun.base_id != target:
        raise UsageError(f"attempt {attempt} goes back to checkpoint {begun.base_id}, not {target}; take a new uuid")
    return coordinator.commit(attempt)


def fork(
    source: Storage,
    target: int | Savepoint,
    into: Coordinator,
    *,
    run: RunRef,
    attempt: str,
    pipeline_start_ms: int | None = None,
    permissions: Permissions = Permissions(),  # noqa: B008
    parallelism: int = 8,
) -> CommitResult:
    """Makes a checkpoint of the pipeline in ``source``, or the native savepoint whose folder ``source`` is, the state of the
    pipeline ``into``. Files are linked or copied by the storage, ``parallelism`` at a time; of the source nothing
    changes, but that a lease lies there meanwhile.

    ``pipeline_start_ms``: the start of the new pipeline; None: the source's. ``attempt``: as for ``rewind``.

    Raises: as ``plan_rewind`` about the source; UsageError if ``into`` has checkpoints that the fork would make stale or replace,
    is the source itself, or can't take that state; CorruptFile naming a file of the source that is missing or damaged;
    CheckpointDropped if retention dropped the checkpoint of the source meanwhile.
    Nothing is committed then. UnknownOutcome if a copy's or the commit's fate can't be told: call again with the same attempt.
    """
    if begun_before(into, attempt) is None:
        content, manifests, begun = _plan_fork(source, target, into, pipeline_start_ms, permissions, attempt)
        # A try before this one may have left files: names are given once, so that nobody has to ask what is in them.
        task = sum(1 for _ in into.storage.list(f"{paths.SHARED}{attempt}/"))
        try:
            with holding(source, target if isinstance(target, int) else None, "a fork"):
                taken = [
                    take_over(m, source, into.storage, attempt, task, parallelism=parallelism) for m in manifests()
                ]
        except NotFound as error:
            raise CorruptFile(f"a file of what is forked is missing from {source.url}: {error}") from error
        made = as_restored(
            content,
            pipeline=into.pipeline,
            run=run,
            attempt=attempt,
            base_id=None,
            permissions=permissions,
            shards=write_manifests(taken, attempt, into.storage, task=task),
        )
        saved = target.savepoint if isinstance(target, Savepoint) else None
        into.prepare(Prepared(h0=begun.h0, content=replace(made, restored_from=saved)))
    return into.commit(attempt)


def plan_fork(
    source: Storage,
    target: int | Savepoint,
    into: Coordinator,
    *,
    pipeline_start_ms: int | None = None,
    permissions: Permissions = Permissions(),  # noqa: B008
) -> Content:
    """What a fork would give to ``into``, with its start. Only reads; raises as ``fork`` does before it copies."""
    return _plan_fork(source, target, into, pipeline_start_ms, permissions, attempt="")[0]


def _plan_fork(
    source: Storage,
    target: int | Savepoint,
    into: Coordinator,
    pipeline_start_ms: int | None,
    permissions: Permissions,
    attempt: str,
) -> tuple[Content, Callable[[], Iterator[ShardManifest]], Begun]:
    if into.storage.url == source.url:
        raise UsageError(f"{source.url} can't be forked into itself; go back with a rewind, or take another name")
    check_no_trial(source.url, "fork")
    content, manifests = _source(source, target, into.storage.url, permissions)
    if pipeline_start_ms is not None:
        content = replace(content, pipeline_start_ms=pipeline_start_ms)
    begun = into.begin_restore(content, pipeline_start_ms=content.pipeline_start_ms, attempt=attempt)
    _check_free(into, content)
    return content, manifests, begun


def as_restored(
    content: Content,
    *,
    pipeline: str,
    run: RunRef,
    attempt: str,
    base_id: int | None,
    permissions: Permissions,
    shards: tuple[ShardRef, ...],
) -> Content:
    """The content of a ``restore`` record: the state, time and source position of ``content``, and nothing that an interval did."""
    totals = replace(
        content.totals,
        input_rows=0,
        output_rows=0,
        late_rows=0,
        keys_touched=0,
        changed_bytes=0,
        uploaded_bytes=0,
        uploaded_files=0,
        downloaded_bytes=0,
        cached_bytes=0,
    )
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
        forget=content.forget if base_id is None else None,
        filtered=(),
    )


def take_over(
    manifest: ShardManifest, source: Storage, storage: Storage, attempt: str, task: int, *, parallelism: int = 8
) -> ShardManifest:
    """The shard with files and segments of its own under ``shared/<attempt>/`` of ``storage``.

    Raises: NotFound if the source lacks a file; else as ``copy_all``.
    """
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


def begun_before(coordinator: Coordinator, attempt: str) -> Content | Tombstone | None:
    """What an earlier call with this attempt prepared or committed.

    Raises: Swept if a sweep abandoned it: it is never committed.
    """
    log = coordinator.log()
    entry = log.of_attempt(attempt)
    if entry is not None:
        return entry.content if isinstance(entry, Record) else entry
    sweep = log.abandoned_by(attempt)
    if sweep is not None:
        raise Swept(f"{coordinator.pipeline}: sweep {sweep} abandoned attempt {attempt}; take a new uuid")
    if coordinator.storage.stat(paths.prepared(attempt)) is None:
        return None
    return coordinator.load_prepared(attempt).content


def _source(
    source: Storage, target: int | Savepoint, into: str, permissions: Permissions
) -> tuple[Content, Callable[[], Iterator[ShardManifest]]]:
    """What is forked, and the manifests of its shards, read one by one."""
    if isinstance(target, int):
        record = restorable(read_log(source), target, permissions)
        content = replace(record.content, forget=forgets_of(record))
        return content, lambda: (manifest_of(ref, source) for ref in content.shards)
    if target.format != "native":
        raise UsageError(
            f"the savepoint in {source.url} is {target.format}: its state is read and written anew, which a fork does not do; "
            "restore it with restore_savepoint"
        )
    check_unclaimed(source, into)
    return target.content, lambda: (native_manifest(target, n, source) for n in range(target.content.parallelism))


def _check_free(into: Coordinator, content: Content) -> None:
    """Raises: UsageError if the pipeline has results that the fork would replace or make stale."""
    overlapping = [e for e in into.log().commits() if content.interval.start < interval_of(e).end]
    if overlapping:
        newest = max(overlapping, key=lambda e: e.id)
        raise UsageError(
            f"pipeline {into.pipeline!r} has {len(overlapping)} checkpoint(s) at or after {content.interval} already, the newest "
            f"is {newest.id} of {interval_of(newest)}; nothing was copied\n"
            "Fork under another name, rewind this pipeline if it is about its own past, or restore a savepoint to replace its state"
        )
