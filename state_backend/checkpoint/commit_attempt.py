"""Commit a prepared attempt: the pure functions of `decide_commit.py` decide, this module reads and writes for them.

A process that stops before the record is created leaves `prepared.json` and files that no record names; a sweep deletes
them later. Once the record exists, the checkpoint counts, with its output and its retention.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from typing import Literal, get_args

from state_backend.checkpoint.append_record import append, note_head
from state_backend.checkpoint.clean_up_dropped import delete_files, files_of, needed_by_retained
from state_backend.checkpoint.decide_commit import Adopted, AlreadyCommitted, Create, plan_commit
from state_backend.checkpoint.location import Location
from state_backend.checkpoint.log import Log, attempt_of, log_after, read_newest, read_on
from state_backend.checkpoint.parallel import at_once
from state_backend.checkpoint.plan_retention import DEFAULT_POLICY, held_in_quarantine, with_retention
from state_backend.checkpoint.prepared_attempts import check_not_refused, load_prepared, never_prepared
from state_backend.formats import paths
from state_backend.ports.storage import KeepsRoom, Storage, lists_late
from state_backend.values.errors import (
    AlreadyExists,
    CorruptFile,
    Fenced,
    StateUnusable,
    StorageUnavailable,
    Swept,
    UnknownOutcome,
)
from state_backend.values.frozen import frozen
from state_backend.values.records import Content, Prepared, Record, SweepRecord, ValidationMode
from state_backend.values.retention import RetentionPolicy

COMMIT_ROUNDS = 100
_FEW_FILES = 2
_FEW_DROPPED = 2


@frozen
class CommitResult:
    """The checkpoint that counts for an attempt."""

    id: int
    # Record of the checkpoint; None if retention has dropped the checkpoint since.
    record: Record | None
    # "already": an earlier call committed the attempt. "adopted": another try's checkpoint serves as its result.
    outcome: Literal["committed", "already", "adopted"]
    # The log as this commit left it, for the publishing and the clean-up; None if the commit created no record.
    log: Log | None = None

    def created(self, checkpoint_id: int) -> bool:
        """Return True if this call of `commit` created the record, and the record has the id `checkpoint_id`.

        The caller may have computed a next attempt from this attempt's state, on the base `checkpoint_id`. If False, it
        must not commit the next attempt: another writer's record with this id, even an adopted one, is another base.
        """
        return self.outcome == "committed" and self.id == checkpoint_id


def commit(
    at: Location,
    attempt: str,
    *,
    prepared: Prepared | None = None,
    before: Log | None = None,
    policy: RetentionPolicy | None = None,
) -> CommitResult:
    """Commit a prepared attempt as the newest checkpoint. A repeated call returns the same checkpoint.

    Args:
        at: The pipeline.
        attempt: The attempt.
        prepared: The attempt's `prepared.json`, if the caller wrote it. If None or of another attempt, it is read.
        before: A log that the caller read earlier. Later records are looked for. The log's own records are not read
            again, because the record of a retained checkpoint never changes.
        policy: A retention policy in place of the attempt's.
    """
    # Read `prepared.json` before the log. A process deletes this file only after the log says how the attempt
    # ended: by its commit, by a commit that fenced it, or by a sweep. So if the file is missing here, the log that
    # is read next has the reason.
    with suppress(StateUnusable):
        if prepared is None or prepared.content.attempt != attempt:
            prepared = None
            prepared = load_prepared(at, attempt)
    log = read_newest(at.storage, before)
    mine = log.of_attempt(attempt)
    if mine is not None:
        note_head(at.storage, log, log.head_id)
        return CommitResult(id=mine.id, record=mine if isinstance(mine, Record) else None, outcome="already")
    if prepared is None:
        raise _lost(at, log, attempt)
    check_not_refused(at, attempt)
    return _commit(at, log, prepared, policy)


def _lost(at: Location, log: Log, attempt: str) -> StateUnusable | Swept:
    sweep = log.abandoned_by(attempt)
    if sweep is None:
        return never_prepared(at, attempt)
    return Swept(
        f"{at.pipeline}, attempt {attempt}: sweep {sweep} abandoned this attempt and deleted its files\n"
        "Clear the task to process the interval again"
    )


def _commit(at: Location, log: Log, prepared: Prepared, policy: RetentionPolicy | None) -> CommitResult:
    verified, known_id = False, prepared.h0
    for tried in range(COMMIT_ROUNDS):
        if tried:
            # The first round uses the log that `commit` read. If another writer committed since, `append` fails.
            log = read_newest(at.storage, log)
        if log.head_id < known_id:
            log = read_on(at.storage, log)
        try:
            decision = _plan(at.storage, log, prepared, policy)
        except Fenced:
            _delete_own(at.storage, log, prepared.content)
            raise
        if isinstance(decision, AlreadyCommitted | Adopted):
            entry = log.entries[decision.id]
            note_head(at.storage, log, log.head_id)
            return CommitResult(
                id=decision.id,
                record=entry if isinstance(entry, Record) else None,
                outcome="adopted" if isinstance(decision, Adopted) else "already",
            )
        if not verified:
            try:
                _verify_written(at.storage, prepared)
            except CorruptFile:
                if read_newest(at.storage, log).head_id == log.head_id:
                    raise
                continue  # a sweep may have deleted the file, after recording it in the log
            verified = True
        try:
            record = append(at.storage, log, decision.record)
        except (AlreadyExists, UnknownOutcome) as error:
            # Another writer has the id, or the storage did not report the outcome: the next round reads the log.
            # If no record has this id, the unreported create may still take effect, so raise the error.
            if isinstance(error, UnknownOutcome) and at.storage.stat(paths.record(decision.record.id)) is None:
                raise
            known_id = decision.record.id
            continue
        if isinstance(at.storage, KeepsRoom):
            at.storage.keep_room()
        return CommitResult(id=record.id, record=record, outcome="committed", log=log_after(at.storage, log, record))
    raise StorageUnavailable(
        f"{at.pipeline}: nothing is committed, because other commits were faster {COMMIT_ROUNDS} times in a row; try again"
    )


def _plan(
    storage: Storage, log: Log, prepared: Prepared, policy: RetentionPolicy | None
) -> Create | AlreadyCommitted | Adopted:
    """Decide the commit, so that retention keeps the newest validated checkpoint of each mode (`fast` and `full`).

    The folder `validated/` has a file for each checkpoint and mode that passed. A listing of the folder costs as much
    as a dozen look-ups. If the commit would drop at most `_FEW_DROPPED` checkpoints, the function looks up their files
    by name, and lists the folder only if one exists.
    """
    held = _held_in_quarantine(storage, log, prepared.content, policy)
    decision = plan_commit(log, prepared, policy, held)
    if not isinstance(decision, Create):
        return decision
    dropped = sorted(log.retained.keys() - {r.id for r in decision.record.retained})
    marks = [paths.validated(n, mode) for n in dropped for mode in get_args(ValidationMode)]
    few = len(dropped) <= _FEW_DROPPED
    looked_at = at_once(storage.stat, marks if few or lists_late(storage) else [])
    there = [info.path for info in looked_at if info is not None]
    if few and not there:
        return decision
    return plan_commit(log, prepared, policy, held, _find_validated(storage, there))


def _held_in_quarantine(storage: Storage, log: Log, content: Content, policy: RetentionPolicy | None) -> frozenset[int]:
    """Return the quarantined checkpoints that the commit of an attempt must retain, with their bases.

    The quarantine began when its mark was written, and the time now is about the time of the attempt's
    `prepared.json`. Both are times of the storage: the clocks of hosts may differ.
    """
    refused = sorted(log.retained.keys() & log.quarantined.keys())
    if not refused:
        return frozenset()
    files = [paths.prepared(content.attempt), *map(paths.quarantine, refused)]
    now, *since = (None if info is None else info.modified_ms for info in at_once(storage.stat, files))
    policy = policy or with_retention(log, content).retention or DEFAULT_POLICY
    return held_in_quarantine(log, dict(zip(refused, since, strict=True)), now, policy)


def _find_validated(storage: Storage, there: Collection[str]) -> list[frozenset[int]]:
    """Return the ids that passed validation, for each mode. `there`: paths of marks that a listing may miss."""
    listed = {*there, *(info.path for info in storage.list(paths.VALIDATED))}
    marks = [mark for path in listed if (mark := paths.validated_id(path))]
    return [frozenset(n for n, mode in marks if mode == one) for one in get_args(ValidationMode)]


def _verify_written(storage: Storage, prepared: Prepared) -> None:
    """Raise `CorruptFile` unless every file of the attempt exists with the acknowledged size and checksum.

    The checksum (crc32c) is compared only where the storage keeps one. Folders with more than `_FEW_FILES` files
    are listed; files of other folders are looked up by name, because one listing of an object store costs as much
    as a dozen look-ups.
    """
    attempt, written = prepared.content.attempt, prepared.written
    if written is None:
        written = tuple(h for h in files_of(prepared.content, storage) if paths.attempt_of(h.path) == attempt)
    folders = Counter(handle.path.rpartition("/")[0] for handle in written)
    listed = [folder for folder, files in folders.items() if files > _FEW_FILES]
    there = {info.path: info for folder in listed for info in storage.list(f"{folder}/")}
    # Look up by name: files of unlisted folders, and files that an old listing of a network disk misses.
    missing = [handle.path for handle in written if handle.path not in there]
    there |= {info.path: info for info in at_once(storage.stat, missing) if info is not None}
    for handle in written:
        info = there.get(handle.path)
        if info is None:
            raise CorruptFile(
                f"{handle.path} is missing from {storage.url}\nNothing is committed. Run the interval again"
            )
        if info.size_bytes != handle.size_bytes or info.crc32c not in (None, handle.crc32c):
            raise CorruptFile(
                f"{handle.path}: expected {handle.size_bytes} bytes, crc32c {handle.crc32c:08x}; the storage has "
                f"{info.size_bytes} bytes, crc32c {'unknown' if info.crc32c is None else f'{info.crc32c:08x}'}\n"
                "Nothing is committed. Run the interval again"
            )


def _delete_own(storage: Storage, log: Log, content: Content) -> None:
    """Delete the files that a fenced attempt's content names, except files that a record needs.

    Other files of the attempt, which only a listing would show, are left to the sweep.
    """
    needed, log = needed_by_retained(storage, log)
    for _, n in log.outputs_near(content.interval):
        entry = log.entries[n]
        if not isinstance(entry, SweepRecord) and attempt_of(entry) == content.attempt:
            needed.paths.update(o.handle.path for o in log.outputs(n))
    files = {h.path for h in files_of(content, storage, gone_before=True)}
    own = {path for path in files if paths.attempt_of(path) == content.attempt}
    delete_files(storage, needed.others(own))
    storage.delete(paths.prepared(content.attempt))
