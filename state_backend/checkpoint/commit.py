"""May a prepared attempt be committed now? The pure body of the commit loop.

Creating the next record decides everything at once: what is completed, what is stale, which output is current. So all
that must hold is checked against the very log that the record follows; if another record gets there first, the answer is
void and the question is asked again. What goes wrong otherwise:

1. Checks at begin only: interval 3 begins on c2, interval 1 is run again, interval 3 commits on the dead branch.
2. A freed id: Y sees head 1 and pauses; 2 and 3 are committed, 2 is dropped; Y creates 2 "if absent". Names are never freed.
3. Retention apart from commit: N checks that its base is there, another commit drops it, N commits. Hence ``retained``.
4. Deleting own files on weak proof: X commits 2 and crashes, 3 shares X's files, 2 is dropped; X, called again, must see
   by its tombstone that it won.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from state_backend.checkpoint.lineage import is_consolidation_of, is_reproduction, is_restorable, plan_base, same_base
from state_backend.checkpoint.log import Log
from state_backend.checkpoint.retention import Policy, plan_retention
from state_backend.values.errors import (
    BaseMoved,
    CorruptFile,
    Fenced,
    InvariantViolated,
    StaleStateError,
    StateGapError,
    Swept,
)
from state_backend.values.handles import FileInfo, Handle
from state_backend.values.records import Content, Prepared, Record, RunRef, SweepRecord, Tombstone


@dataclass(frozen=True, slots=True, kw_only=True)
class Create:
    """Commit by creating this record, if its id is still free."""

    record: Record


@dataclass(frozen=True, slots=True, kw_only=True)
class AlreadyCommitted:
    """The attempt is in the log."""

    id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """A later or equal try of the same run won, from the same base: its checkpoint is this attempt's result too. The
    attempt's own files are as useless as those of a fenced one."""

    id: int


CommitPlan = Create | AlreadyCommitted | Adopted


def plan_commit(
    log: Log,
    prepared: Prepared,
    policy: Policy,
    present_files: Mapping[str, FileInfo],
    *,
    new_files: Sequence[Handle],
    protected: frozenset[int] = frozenset(),
) -> CommitPlan:
    """What to do with a prepared attempt, given the log.

    ``new_files``: what the attempt acked; ``present_files``: what the storage has below the attempt's folders, by path.
    Raises: Swept, Fenced, BaseMoved; CorruptFile naming the new file that is missing or differs. Only Fenced proves that
    the attempt's files are nobody's.
    """
    content = prepared.content
    mine = log.of_attempt(content.attempt)
    if mine is not None:
        return AlreadyCommitted(id=mine.id)
    _check_not_swept(log, prepared)
    fence = find_fence(log, prepared)
    if fence is not None:
        if _is_plain_retry(log, content, fence):
            return Adopted(id=fence.id)
        raise Fenced(
            f"{content.pipeline} {content.interval}: attempt {content.attempt} (run {content.run.run_id}) lost to checkpoint "
            f"{fence.id} of {fence.interval}, by attempt {fence.attempt} (run {fence.run.run_id if fence.run else '?'}), "
            f"which was committed after this attempt began at checkpoint {prepared.h0}. Its files are deleted; process the "
            f"interval again if it is still needed"
        )
    _check_base(log, prepared)
    check_files(content, new_files, present_files)
    new_id = log.head_id + 1
    reproduces = is_reproduction(log, content)
    return Create(
        record=Record(
            id=new_id,
            retained=plan_retention(log, content, new_id, reproduces, policy, protected),
            reproduces=reproduces,
            content=content,
        )
    )


def find_fence(log: Log, prepared: Prepared) -> Tombstone | None:
    """The last commit after the attempt's begin that forbids its own: of another attempt, over a common span of time, with
    another result than before. An earlier try of the same run that commits late is no such thing: this try replaces it."""
    content = prepared.content
    fences = [
        t
        for i, t in log.summaries.items()
        if i > prepared.h0
        and t.kind in ("interval", "restore")
        and t.interval is not None
        and t.interval.overlaps(content.interval)
        and t.reproduces is None
        and not _is_earlier_try(t.run, content.run)
    ]
    return fences[-1] if fences else None


def check_files(content: Content, new_files: Sequence[Handle], present_files: Mapping[str, FileInfo]) -> None:
    """Every new file is there, with the size and, where the storage tells it, the crc32c that were acked; else CorruptFile
    names the first that is not."""
    for handle in new_files:
        info = present_files.get(handle.path)
        found = "nothing"
        if info is not None:
            crc32c = handle.crc32c if info.crc32c is None else info.crc32c
            if (info.size_bytes, crc32c) == (handle.size_bytes, handle.crc32c):
                continue
            found = f"{info.size_bytes} bytes with crc32c {crc32c:08x}"
        raise CorruptFile(
            f"{content.pipeline} {content.interval}: attempt {content.attempt} can't be committed: expected {handle.path} with "
            f"{handle.size_bytes} bytes and crc32c {handle.crc32c:08x}, found {found}. Process the interval again"
        )


def _check_not_swept(log: Log, prepared: Prepared) -> None:
    attempt = prepared.content.attempt
    for entry_id in range(prepared.h0 + 1, log.head_id + 1):
        entry = log.entries[entry_id]
        if isinstance(entry, SweepRecord) and attempt in entry.abandoned:
            raise Swept(
                f"{prepared.content.pipeline} {prepared.content.interval}: sweep {entry.sweep} (record {entry_id}) abandoned "
                f"attempt {attempt}; its files may be gone. Process the interval again"
            )


def _check_base(log: Log, prepared: Prepared) -> None:
    """A base must be what a new attempt would start from, or the unconsolidated form of it, and itself still retained:
    files that the consolidation no longer needs go when it is dropped."""
    content = prepared.content
    who = f"{content.pipeline} {content.interval}: attempt {content.attempt}"
    if content.kind in ("consolidate", "restore"):
        _check_target(log, content, prepared.h0)
        return
    if content.kind != "interval":
        raise InvariantViolated(f"{who}: a {content.kind} can't be prepared")
    started = "empty state" if content.base_id is None else f"checkpoint {content.base_id}"
    try:
        base = plan_base(
            log,
            content.interval,
            content.permissions,
            content.pipeline_start_ms,
            pipeline=content.pipeline,
            h0=prepared.h0,
        )
    except (StateGapError, StaleStateError) as error:
        raise BaseMoved(f"{who} started from {started}, which is not its base any more. {error}") from error
    if not is_consolidation_of(log, base.id, content.base_id):
        now = "empty state" if base.id is None else f"checkpoint {base.id}"
        raise BaseMoved(f"{who} started from {started}, but the interval's base is {now} now. Process the interval again")
    if content.base_id is not None and content.base_id not in log.retained():
        raise BaseMoved(f"{who} started from {started}, which has been dropped. Process the interval again")


def _check_target(log: Log, content: Content, h0: int) -> None:
    """A consolidation or a rewind works on one completed, usable checkpoint, whose state it keeps."""
    who = f"{content.pipeline}: {content.kind} of checkpoint {content.base_id}"
    target = next((r for r in log.completed() if r.id == content.base_id), None)
    if target is None or not is_restorable(log, target):
        raise BaseMoved(f"{who}: it is dropped, quarantined or superseded")
    if target.content.digest != content.digest or target.content.interval != content.interval:
        raise InvariantViolated(f"{who}: digest or interval differ from its target's; the state was changed on the way")
    stale_by = log.retained()[target.id]
    covered = content.permissions.allow_stale_base and stale_by is not None and stale_by <= h0
    if content.kind == "restore" and stale_by is not None and not covered:
        raise BaseMoved(f"{who}: checkpoint {stale_by} made it stale; allow_stale_base=True restores it nevertheless")


def _is_plain_retry(log: Log, content: Content, winner: Tombstone) -> bool:
    return (
        content.kind == winner.kind == "interval"
        and winner.run is not None
        and winner.interval == content.interval
        and (winner.run.run_id, winner.run.clear_number) == (content.run.run_id, content.run.clear_number)
        and same_base(log, winner.base_id, content.base_id)
    )


def _is_earlier_try(one: RunRef | None, other: RunRef) -> bool:
    if one is None or one.run_id != other.run_id:
        return False
    return (one.clear_number, one.try_number) < (other.clear_number, other.try_number)
