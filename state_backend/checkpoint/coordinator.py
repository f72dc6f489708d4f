"""The `Coordinator`: begin, prepare, commit, publish and clean up the checkpoints of a pipeline.

Other modules of this package decide, over a log in memory. This module reads the log for them, and carries out what
they decide.

A process that stops during one of these steps leaves:

    begin       nothing
    prepare     files that no record names, which a sweep deletes later; prepared.json is there whole or not at all
    commit      before the record is created: the same files. Afterwards: the checkpoint, its output and its retention
    publish     the sink hook ran, but its mark is missing: the hook runs again, with the same checkpoint id
    clean up    some files of a dropped checkpoint are deleted, its record is still whole: the next clean-up continues.
                No reader restores the checkpoint meanwhile, since the newest record does not retain it
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import fields, replace
from datetime import datetime
from typing import Literal, get_args

from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.checkpoint.append_record import append, note_head
from state_backend.checkpoint.choose_base import choose_base
from state_backend.checkpoint.clean_up_dropped import (
    CleanUp,
    clean_up,
    delete_files,
    files_of,
    leased_checkpoints,
    needed_by_retained,
)
from state_backend.checkpoint.decide_commit import Adopted, AlreadyCommitted, Create, plan_commit
from state_backend.checkpoint.forgotten_keys import Returning, check_restored, returning_keys
from state_backend.checkpoint.fresh_listing import note_names
from state_backend.checkpoint.log import (
    Entry,
    Log,
    attempt_of,
    interval_of,
    log_after,
    read_log,
    read_newest,
    read_on,
)
from state_backend.checkpoint.newest_state import checkpoint_named, no_checkpoint, overtaken
from state_backend.checkpoint.output_schemas import spelling
from state_backend.checkpoint.parallel import at_once
from state_backend.checkpoint.plan_retention import DEFAULT_POLICY, held_in_quarantine, with_retention
from state_backend.checkpoint.quarantine_consequences import computed_without, hidden_by_release
from state_backend.checkpoint.record_reader import RecordReader
from state_backend.formats import paths, record_codec
from state_backend.formats.types import names_and_types, parse_struct
from state_backend.ports.storage import KeepsRoom, Storage, lists_late
from state_backend.values.airflow_commands import command_line
from state_backend.values.day_or_instant import parse_checkpoint
from state_backend.values.errors import (
    AlreadyExists,
    CorruptFile,
    CorruptRecord,
    Fenced,
    NotFound,
    PreconditionFailed,
    SinkFailed,
    StateUnusable,
    StorageUnavailable,
    Swept,
    UnknownOutcome,
    UsageError,
    ValidationRefused,
)
from state_backend.values.frozen import frozen
from state_backend.values.hide_secrets import hide, hide_all
from state_backend.values.intervals import Interval, format_instant, from_ms
from state_backend.values.marks import Published, Quarantine, Refused, Released, Validated
from state_backend.values.records import (
    RELEASE,
    Content,
    Permissions,
    Prepared,
    Record,
    SweepRecord,
    ValidationMode,
)
from state_backend.values.retention import RetentionPolicy
from state_backend.values.schedule import Schedule

logger = logging.getLogger("cairn")

_COMMIT_ROUNDS = 100
_READ_ROUNDS = 10
_MARK_ROUNDS = 10
_FEW_FILES = 2
_FEW_DROPPED = 2


@frozen
class Begun:
    """The facts with which an attempt begins: the end of the log, and the base."""

    attempt: str
    # The highest id in the log when the attempt began; 0 for an empty log.
    h0: int
    # Record of the checkpoint that the attempt starts from; None for empty state.
    base: Record | None
    # The log with which the attempt began; None if its output joins no other output.
    log: Log | None = None
    spelling: tuple[str, ...] = ()
    returning: tuple[Returning, ...] = ()


@frozen
class CommitResult:
    """The checkpoint that counts for an attempt."""

    id: int
    # Record of the checkpoint; None if retention has dropped the checkpoint since.
    record: Record | None
    outcome: Literal["committed", "already", "adopted"]


class _HookRaised(Exception):
    """The user's sink hook raised an exception, which `error` holds."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Coordinator:
    """The methods that begin, commit, publish and clean up the checkpoints of one pipeline.

    Any number of processes may use a coordinator of the same pipeline at the same time.

    `remembers`: Keep between calls what this process has read and written; for a process that makes several calls. A
    retained record never changes, so it is read only once. The process does not read its own `prepared.json` and
    record again. Publishing and clean-up use the log as the commit left it, and ignore what other processes have
    written since.
    """

    def __init__(
        self,
        storage: Storage,
        pipeline: str,
        *,
        policy: RetentionPolicy | None = None,
        remembers: bool = False,
    ) -> None:
        self._storage = storage
        # Every writer has a coordinator, so this check stops invalid names, whose records could not be read back.
        self._pipeline = paths.check_name(pipeline)
        self._policy = policy
        self._remembers = remembers
        self._last: Log | None = None
        self._committed: Log | None = None
        self._prepared: Prepared | None = None

    @property
    def storage(self) -> Storage:
        """The storage of the pipeline's folder."""
        return self._storage

    @property
    def pipeline(self) -> str:
        """The pipeline's name."""
        return self._pipeline

    @classmethod
    def of(cls, root: str, pipeline: str, *, remembers: bool = False) -> Coordinator:
        """Return the coordinator of a pipeline below a root."""
        return cls(open_storage(join_url(root, pipeline)), pipeline, remembers=remembers)

    def log(self, before: Log | None = None) -> Log:
        """Read the log as it is now."""
        return self._read(read_log, before)

    def _newest(self, before: Log | None = None) -> Log:
        """Read the newest record, but not the records of the other retained checkpoints.

        This costs fewer requests than `log`. The result's `kept` has most facts about the other retained checkpoints,
        and its `whole` reads a checkpoint's record when a caller asks for it.
        """
        return self._read(read_newest, before)

    def _read(self, read: Callable[[Storage, Log | None], Log], before: Log | None) -> Log:
        log = read(self._storage, self._last if before is None else before)
        if self._remembers:
            self._last = log
        return log

    def begin(
        self,
        interval: Interval,
        *,
        permissions: Permissions,
        pipeline_start_ms: int,
        attempt: str,
        schedule: Schedule | None = None,
    ) -> Begun:
        """Choose the checkpoint that an interval starts from. The method writes nothing."""
        log = self._newest()
        for tried in range(_READ_ROUNDS):
            self._check_start(log, pipeline_start_ms)
            try:
                chosen = choose_base(log, self._pipeline, interval, permissions, pipeline_start_ms, schedule=schedule)
                base = log.whole(chosen.id) if chosen is not None else None
                break
            except (StateUnusable, CorruptRecord):
                # A newer commit may have filled the gap (StateUnusable), or dropped the chosen base (CorruptRecord).
                further = read_on(self._storage, log)
                if further is log or tried == _READ_ROUNDS - 1:
                    raise
                log = further
        return Begun(
            attempt=attempt,
            h0=log.head_id,
            base=base,
            log=log,
            spelling=spelling(log),
            returning=returning_keys(log, interval.start_ms, base.id if base is not None else None),
        )

    def begin_restore(self, content: Content, *, pipeline_start_ms: int, attempt: str) -> Begun:
        """Begin an attempt that restores `content` as the state at the end of its interval. The method writes
        nothing."""
        log = self.log()
        self._check_start(log, pipeline_start_ms)
        check_restored(log, self._pipeline, content)
        if pipeline_start_ms >= content.interval.end_ms:
            raise UsageError(
                f"pipeline {self._pipeline!r} starts with empty state at {format_instant(from_ms(pipeline_start_ms))}. "
                f"The state to restore is the state at {format_instant(content.interval.end)}, so no interval would start from it\n"
                "Set the pipeline's start to an earlier time"
            )
        for entry in log.completed()[-1:]:
            ours, theirs = parse_struct(entry.content.key_schema), parse_struct(content.key_schema)
            if names_and_types(ours) != names_and_types(theirs):
                raise UsageError(
                    f"the state of pipeline {self._pipeline!r} has the key {ours}, but the state to restore has the key {theirs}\n"
                    "Restore it into a pipeline of another name"
                )
        return Begun(attempt=attempt, h0=log.head_id, base=None)

    def _check_start(self, log: Log, pipeline_start_ms: int) -> None:
        for entry in [log.newest] if log.newest is not None else []:
            if entry.content.pipeline_start_ms != pipeline_start_ms:
                raise UsageError(
                    f"pipeline {self._pipeline!r} began at {format_instant(from_ms(entry.content.pipeline_start_ms))}, but its start "
                    f"is {format_instant(from_ms(pipeline_start_ms))} now. The start of a pipeline never changes\n"
                    "Set it back, or give the pipeline another name to begin with empty state\n"
                    "If you never changed it, another pipeline of this name writes below the same root: rename one of the two"
                )

    def prepare(self, prepared: Prepared) -> Prepared:
        """Write `prepared.json`, which says that all shards of the attempt have acknowledged.

        A second call with equal content changes nothing.
        """
        path, data = paths.prepared(prepared.content.attempt), record_codec.encode(prepared)
        # Decoded values are compared, not bytes, because gzip's bytes depend on the host's zlib. `prepared` itself goes
        # through encoding and decoding too, because JSON turns tuples into lists.
        recorded = record_codec.decode(data, path, Prepared)
        try:
            self._storage.create(path, data)
        except AlreadyExists:
            there = record_codec.decode(self._storage.read(path), path, Prepared)
            if there != recorded:
                raise StorageUnavailable(
                    f"{path} exists with other content: two drivers use the same attempt\nClear the task, so that it begins a new attempt"
                ) from None
        if self._remembers:
            self._prepared = recorded
        return recorded

    def load_prepared(self, attempt: str) -> Prepared:
        """Read the `prepared.json` of an attempt."""
        path = paths.prepared(attempt)
        try:
            data = self._storage.read(path)
        except NotFound:
            raise self._never_prepared(attempt) from None
        prepared = record_codec.decode(data, path, Prepared)
        if prepared.content.attempt != attempt:
            raise CorruptRecord(
                f"{path} belongs to another attempt, {prepared.content.attempt}\nRun the interval again"
            )
        return prepared

    def _never_prepared(self, attempt: str) -> StateUnusable:
        path = paths.prepared(attempt)
        return StateUnusable(
            f"attempt {attempt} of {self._pipeline!r} did not finish: {path} does not exist\nRun the interval again"
        )

    def prepared(self) -> list[Prepared]:
        """Return the prepared attempts that are not committed: some still run, others were lost or refused.

        Other files in the folders of attempts are not read.
        """
        listed, log = list(self._storage.list(paths.ATTEMPTS)), self.log()
        found = []
        for info in listed:
            attempt = paths.attempt_of(info.path)
            if attempt is not None and info.path == paths.prepared(attempt) and log.of_attempt(attempt) is None:
                with suppress(NotFound):  # another process deleted the file after the listing
                    found.append(record_codec.decode(self._storage.read(info.path), info.path, Prepared))
        return found

    def is_prepared(self, attempt: str) -> bool:
        """Return True if the attempt's `prepared.json` exists.

        The file exists once all shards have acknowledged, until another process fences or sweeps the attempt or drops
        its checkpoint.
        """
        return self._storage.stat(paths.prepared(attempt)) is not None

    def is_refused(self, attempt: str) -> bool:
        """Return True if validation refused the attempt; `commit` then raises `ValidationRefused`."""
        return self._storage.stat(paths.refused(attempt)) is not None

    # --- commit -------------------------------------------------------------------------------------------------------

    def commit(self, attempt: str) -> CommitResult:
        """Commit a prepared attempt as the newest checkpoint. A repeated call returns the same checkpoint."""
        # Read `prepared.json` before the log. A process deletes this file only after the log says how the attempt
        # ended: by its commit, by a commit that fenced it, or by a sweep. So if the file is missing here, the log that
        # is read next has the reason.
        prepared = self._prepared if self._prepared is not None and self._prepared.content.attempt == attempt else None
        try:
            prepared = prepared or self.load_prepared(attempt)
        except StateUnusable:
            prepared = None
        log = self._newest()
        mine = log.of_attempt(attempt)
        if mine is not None:
            note_head(self._storage, log, log.head_id)
            return CommitResult(id=mine.id, record=mine if isinstance(mine, Record) else None, outcome="already")
        if prepared is None:
            raise self._lost(log, attempt)
        self._check_not_refused(attempt)
        return self._commit(log, prepared)

    def _lost(self, log: Log, attempt: str) -> StateUnusable | Swept:
        sweep = log.abandoned_by(attempt)
        if sweep is None:
            return self._never_prepared(attempt)
        return Swept(
            f"{self._pipeline}, attempt {attempt}: sweep {sweep} abandoned this attempt and deleted its files\n"
            "Clear the task to process the interval again"
        )

    def _commit(self, log: Log, prepared: Prepared) -> CommitResult:
        verified, known_id = False, prepared.h0
        for tried in range(_COMMIT_ROUNDS):
            if tried:
                # The first round uses the log that `commit` read. If another writer committed since, `append` fails.
                log = self._newest(log)
            if log.head_id < known_id:
                log = read_on(self._storage, log)
            try:
                decision = self._plan(log, prepared)
            except Fenced:
                self._delete_own(log, prepared.content)
                raise
            if isinstance(decision, AlreadyCommitted | Adopted):
                entry = log.entries[decision.id]
                note_head(self._storage, log, log.head_id)
                return CommitResult(
                    id=decision.id,
                    record=entry if isinstance(entry, Record) else None,
                    outcome="adopted" if isinstance(decision, Adopted) else "already",
                )
            if not verified:
                try:
                    self._verify(prepared)
                except CorruptFile:
                    if self._newest(log).head_id == log.head_id:
                        raise
                    continue  # a sweep may have deleted the file, after recording it in the log
                verified = True
            try:
                record = append(self._storage, log, decision.record)
            except (AlreadyExists, UnknownOutcome) as error:
                # Another writer has the id, or the storage did not report the outcome: the next round reads the log.
                # If no record has this id, the unreported create may still take effect, so raise the error.
                if isinstance(error, UnknownOutcome) and self._storage.stat(paths.record(decision.record.id)) is None:
                    raise
                known_id = decision.record.id
                continue
            if isinstance(self._storage, KeepsRoom):
                self._storage.keep_room()
            if self._remembers:
                self._last = self._committed = log_after(self._storage, log, record)
            return CommitResult(id=record.id, record=record, outcome="committed")
        raise StorageUnavailable(
            f"{self._pipeline}: nothing is committed, because other commits were faster {_COMMIT_ROUNDS} times in a row; try again"
        )

    def _plan(self, log: Log, prepared: Prepared) -> Create | AlreadyCommitted | Adopted:
        """Decide the commit, so that retention keeps the newest validated checkpoint of each mode (`fast` and `full`).

        The folder `validated/` has a file for each checkpoint and mode that passed. If the commit would drop at most
        `_FEW_DROPPED` checkpoints, the method looks up their files in this folder by name. If no such file exists, the
        commit drops no validated checkpoint. The method then saves the listing of the folder, which costs as much as a
        dozen look-ups.
        """
        held = self._held_in_quarantine(log, prepared.content)
        decision = plan_commit(log, prepared, self._policy, held)
        if not isinstance(decision, Create):
            return decision
        dropped = sorted(log.retained.keys() - {r.id for r in decision.record.retained})
        marks = [paths.validated(n, mode) for n in dropped for mode in get_args(ValidationMode)]
        few = len(dropped) <= _FEW_DROPPED
        looked_at = at_once(self._storage.stat, marks if few or lists_late(self._storage) else [])
        there = [info.path for info in looked_at if info is not None]
        if few and not there:
            return decision
        return plan_commit(log, prepared, self._policy, held, self._find_validated(there))

    def _held_in_quarantine(self, log: Log, content: Content) -> frozenset[int]:
        """Return the quarantined checkpoints that the commit of an attempt must retain, with their bases.

        The quarantine began when its mark was written, and the time now is about the time of the attempt's
        `prepared.json`. Both are times of the storage: the clocks of hosts may differ.
        """
        refused = sorted(log.retained.keys() & log.quarantined.keys())
        if not refused:
            return frozenset()
        files = [paths.prepared(content.attempt), *map(paths.quarantine, refused)]
        now, *since = (None if info is None else info.modified_ms for info in at_once(self._storage.stat, files))
        policy = self._policy or with_retention(log, content).retention or DEFAULT_POLICY
        return held_in_quarantine(log, dict(zip(refused, since, strict=True)), now, policy)

    def _check_not_refused(self, attempt: str) -> None:
        path = paths.refused(attempt)
        try:
            mark = record_codec.decode(self._storage.read(path), path, Refused)
        except NotFound:
            return
        raise ValidationRefused(
            f"attempt {attempt} of {self._pipeline!r} can't be committed: {mark.reason}: {'; '.join(mark.findings[:3])}\n"
            "Fix the cause, then run the interval again"
        )

    def _find_validated(self, there: Collection[str]) -> list[frozenset[int]]:
        """Return, for each validation mode (`fast` and `full`), the ids of the checkpoints that passed."""
        listed = {*there, *(info.path for info in self._storage.list(paths.VALIDATED))}
        marks = [mark for path in listed if (mark := paths.validated_id(path))]
        return [frozenset(n for n, mode in marks if mode == one) for one in get_args(ValidationMode)]

    def _verify(self, prepared: Prepared) -> None:
        """Raise `CorruptFile` unless every file of the attempt exists with the acknowledged size and checksum.

        The checksum (crc32c) is compared only where the storage keeps one. Folders with more than `_FEW_FILES` files
        are listed; files of other folders are looked up by name, because one listing of an object store costs as much
        as a dozen look-ups.
        """
        attempt, written = prepared.content.attempt, prepared.written
        if written is None:
            written = tuple(h for h in files_of(prepared.content, self._storage) if paths.attempt_of(h.path) == attempt)
        folders = Counter(handle.path.rpartition("/")[0] for handle in written)
        listed = [folder for folder, files in folders.items() if files > _FEW_FILES]
        there = {info.path: info for folder in listed for info in self._storage.list(f"{folder}/")}
        # Look up by name: files of unlisted folders, and files that an old listing of a network disk misses.
        missing = [handle.path for handle in written if handle.path not in there]
        there |= {info.path: info for info in at_once(self._storage.stat, missing) if info is not None}
        for handle in written:
            info = there.get(handle.path)
            if info is None:
                raise CorruptFile(
                    f"{handle.path} is missing from {self._storage.url}\nNothing is committed. Run the interval again"
                )
            if info.size_bytes != handle.size_bytes or info.crc32c not in (None, handle.crc32c):
                raise CorruptFile(
                    f"{handle.path}: expected {handle.size_bytes} bytes, crc32c {handle.crc32c:08x}; the storage has "
                    f"{info.size_bytes} bytes, crc32c {'unknown' if info.crc32c is None else f'{info.crc32c:08x}'}\n"
                    "Nothing is committed. Run the interval again"
                )

    def _delete_own(self, log: Log, content: Content) -> None:
        """Delete the files that a fenced attempt's content names, except files that a record needs.

        Other files of the attempt, which only a listing would show, are left to the sweep.
        """
        needed, log = needed_by_retained(self._storage, log, self._newest)
        for _, n in log.outputs_near(content.interval):
            entry = log.entries[n]
            if not isinstance(entry, SweepRecord) and attempt_of(entry) == content.attempt:
                needed.paths.update(o.handle.path for o in log.outputs(n))
        files = {h.path for h in files_of(content, self._storage, gone_before=True)}
        own = {path for path in files if paths.attempt_of(path) == content.attempt}
        delete_files(self._storage, needed.others(own))
        self._storage.delete(paths.prepared(content.attempt))

    # --- publish ------------------------------------------------------------------------------------------------------

    def publish(
        self,
        hook: Callable[[Record], None] | None,
        *,
        in_order: bool = False,
        replaced_last: bool = False,
        only: Collection[datetime] | None = None,
        code: str | None = None,
    ) -> list[tuple[Interval, int]]:
        """Call the sink hook for every current output without a published mark, and return what `unpublished` returned
        before.

        If the hook raises for an interval, that interval gets no mark, and the next call of `publish` tries it again.
        The other intervals are still published; with `in_order`, only those before it.

        If a commit of an overlapping interval replaced an interval's output, the rows must leave the sink. The hook
        then gets a copy of that commit's record with the replaced interval and without files. By default these calls
        come first, so a sink that replaces only the rows of the call's interval never has the same rows twice.
        """
        log = self._committed or self._newest()
        published: list[tuple[Interval, int]] = []
        failed: list[tuple[Interval, int, Exception]] = []
        waiting = sorted(self.unpublished(log), key=lambda told: (self._is_own(log, *told) != replaced_last, told))
        for interval, checkpoint_id in waiting:
            if only is not None and interval.start not in only:
                continue
            try:
                published += self._publish(log, interval, checkpoint_id, hook)
            except _HookRaised as raised:
                failed.append((interval, checkpoint_id, raised.error))
                if in_order:
                    break
        if failed:
            held = {n for _, n in {*waiting} - {*published}} if in_order else set[int]()
            raise SinkFailed(
                self._explain_failed(failed, in_order, code or log.code), frozenset({n for _, n, _ in failed} | held)
            ) from failed[0][2]
        return published

    def unpublished(self, log: Log | None = None) -> list[tuple[Interval, int]]:
        """Return the intervals whose newest output has no published mark."""
        log = self._newest() if log is None else log
        # The commit that this process has just made has no published mark yet, so its mark is not looked up.
        own = log.head_id if log is self._committed else 0
        told = [(u.interval, u.id) for u in log.summary.unpublished]
        return [(i, n) for i, n in told if n == own or self._storage.stat(paths.published(i, n)) is None]

    def skip_publication(self, starts: Collection[datetime]) -> list[tuple[Interval, int]]:
        """Mark the outputs of the intervals with these starts as published, without a call of the sink."""
        waiting = self.unpublished()
        strange = {*starts} - {interval.start for interval, _ in waiting}
        if strange:
            there = ", ".join(format_instant(i.start) for i, _ in waiting) or "none"
            raise UsageError(
                f"the interval that starts at {format_instant(min(strange))} has no unpublished output in pipeline "
                f"{self._pipeline!r}\nIntervals with unpublished output start at: {there}"
            )
        skipped = [(interval, n) for interval, n in waiting if interval.start in starts]
        for interval, checkpoint_id in skipped:
            self._mark_published(interval, checkpoint_id)
        return skipped

    def _explain_failed(self, failed: list[tuple[Interval, int, Exception]], in_order: bool, code: str) -> str:
        root = self._storage.url.rstrip("/").removesuffix(f"/{self._pipeline}")
        where = {"root": root, "pipeline": self._pipeline}
        lines = [f"  {interval} (checkpoint {n}): {type(e).__name__}: {e}" for interval, n, e in failed]
        first = failed[0][0].start
        others = "later intervals wait" if in_order else "the other intervals are published"
        return "\n".join(
            [
                f"the sink of {self._pipeline!r} failed for {len(failed)} interval(s); {others}. The next checkpoint calls the "
                "sink again for:",
                *lines,
                "To call the sink now, or to skip an interval's output:",
                command_line("publish", first, **where, code=code),
                command_line("publish", first, **where, skip=True),
            ]
        )

    def _is_own(self, log: Log, interval: Interval, checkpoint_id: int) -> bool:
        """Return True if the commit `checkpoint_id` is of exactly this interval and made its output.

        False means that the commit is of an overlapping interval, and replaced this interval's output.
        """
        entry = log.entries[checkpoint_id]
        return not isinstance(entry, SweepRecord) and interval_of(entry) == interval

    def _publish(
        self, log: Log, interval: Interval, checkpoint_id: int, hook: Callable[[Record], None] | None
    ) -> list[tuple[Interval, int]]:
        """Call the hook for an interval until the newest output of the interval is published.

        While the hook runs, another process may publish a newer output. The hook may then have overwritten the newer
        output in the sink, so the hook runs again for the newer commit.
        """
        published: list[tuple[Interval, int]] = []
        while True:
            own = log is self._committed and checkpoint_id == log.head_id
            entry = log.entries[checkpoint_id] if own else self._fresh(checkpoint_id)
            if not isinstance(entry, Record):
                return published  # other processes published this output and dropped the checkpoint
            if hook is not None:
                try:
                    hook(as_published(entry, interval))
                except Exception as error:
                    raise _HookRaised(error) from error
            self._mark_published(interval, checkpoint_id)
            published.append((interval, checkpoint_id))
            if hook is None:
                return published  # no hook ran that could have overwritten a newer output
            later = self._newest(log)
            current = later.publication_of(interval) if later.head_id != log.head_id else checkpoint_id
            if current is None or current == checkpoint_id:
                return published
            checkpoint_id, log = current, later

    def _mark_published(self, interval: Interval, checkpoint_id: int) -> None:
        mark = record_codec.encode(Published(id=checkpoint_id, interval=interval))
        with suppress(AlreadyExists):
            self._storage.create(paths.published(interval, checkpoint_id), mark)

    def _fresh(self, checkpoint_id: int) -> Entry | None:
        return RecordReader(self._storage, checkpoint_id).fresh(checkpoint_id)

    # --- clean up -----------------------------------------------------------------------------------------------------

    def clean_up(self) -> CleanUp:
        """Delete the files that only dropped checkpoints need, as `clean_up_dropped.clean_up` does."""
        log, self._committed = self._committed or self._newest(), None
        note_head(self._storage, log, log.head_id)
        return clean_up(self._storage, log, self._newest)

    # --- reading and marking ------------------------------------------------------------------------------------------

    def record(self, which: str | int | datetime) -> Record:
        """Return the record of a checkpoint: its id, the end of its interval, or a text with either, or "latest"."""
        return self._find(self.log(), which)[1]

    def find(self, which: str | int | datetime) -> tuple[Log, Record]:
        """Return the log and the record of a checkpoint. Argument and errors are those of `record`.

        This reads the newest record and the checkpoint's record, but no record of another checkpoint.
        """
        log = self._newest()
        try:
            return self._find(log, which)
        except CorruptRecord:  # A commit may have dropped the checkpoint since the newest record was read.
            return self._find(read_log(self._storage, log), which)

    def id_of(self, which: str) -> int:
        """Return the id of the checkpoint that a person names. An id need not exist."""
        found = parse_checkpoint(which)
        return found if isinstance(found, int) else self.record(found).id

    def _find(self, log: Log, which: str | int | datetime) -> tuple[Log, Record]:
        if isinstance(which, str):
            which = parse_checkpoint(which)
        named = checkpoint_named(log, which) or checkpoint_named(log := read_on(self._storage, log), which)
        if named is not None:
            record = log.whole(named)
            if which == "latest" and (later := overtaken(log, record)) is not None:
                logger.warning("%s: %s", self._pipeline, later)
            return log, record
        if isinstance(which, int) and which in log.summary.dropping:
            leased = leased_checkpoints(self._storage, log)[0]
            if which in leased:
                return log, leased[which]
        raise no_checkpoint(log, self._pipeline, which)

    def quarantine(self, checkpoint_id: int, reason: str, findings: tuple[str, ...] = ()) -> None:
        """Quarantine a checkpoint: no interval starts from the checkpoint or from its descendants."""
        mark = Quarantine(id=checkpoint_id, reason=hide(reason), findings=hide_all(findings))
        path = paths.quarantine(checkpoint_id)
        note_names(self._storage, paths.QUARANTINE, [path.removeprefix(paths.QUARANTINE)])
        try:
            self._storage.create(path, record_codec.encode(mark))
        except AlreadyExists:
            if not self._rewrite_mark(path, Released, mark):
                logger.info("checkpoint %d of pipeline %s is quarantined already", checkpoint_id, self._pipeline)

    def release(self, checkpoint_id: int) -> None:
        """End the quarantine of a checkpoint. The checkpoint and its descendants count again.

        An attempt that started while the checkpoint was quarantined ignores the checkpoint. The log must not have such
        an attempt's commit after the release. So the method takes three steps:

        1. The mark says that a release is under way. From now on, a commit that reads the mark is refused.
        2. The method adds a record without content to the log. The record takes the next id. A commit that wanted this
           id reads the log and the mark again.
        3. If the log has a usable later checkpoint that does not build on this checkpoint, the method restores the mark
           and raises `UsageError`. Otherwise the mark says that the checkpoint is released.

        If the process stops in between, the checkpoint stays quarantined and commits stay refused until the method is
        called again.
        """
        path, log = paths.quarantine(checkpoint_id), self.log()
        found = log.quarantined.get(checkpoint_id)
        if found is None:
            raise self._not_quarantined(checkpoint_id)
        if not found.releasing:
            self._check_release(log, checkpoint_id)
        waiting, before = replace(found, releasing=True), replace(found, releasing=False)
        released = Released(id=found.id, reason=found.reason, findings=found.findings)
        if not self._rewrite_mark(path, found, waiting):
            raise self._not_quarantined(checkpoint_id)
        self._append_fence(f"{RELEASE}{checkpoint_id}")
        try:
            self._check_release(self.log(), checkpoint_id)
        except UsageError:
            self._rewrite_mark(path, waiting, before)
            raise
        if not self._rewrite_mark(path, waiting, released):
            raise self._not_quarantined(checkpoint_id)

    def _append_fence(self, name: str) -> None:
        """Add a record without content to the log. Each commit in progress must then read the log again."""
        for _ in range(_COMMIT_ROUNDS):
            log = self.log()
            retained = tuple(r for _, r in sorted(log.retained.items()))
            fence = SweepRecord(id=log.head_id + 1, retained=retained, sweep=name, abandoned=())
            with suppress(AlreadyExists):
                append(self._storage, log, fence)
                return
        raise StorageUnavailable(
            f"{self._pipeline}: other commits were faster {_COMMIT_ROUNDS} times in a row; try again"
        )

    def drop_quarantined(self, checkpoint_id: int) -> None:
        """Let the next commit drop a quarantined checkpoint. The checkpoint stays quarantined.

        The method rewrites the mark. Until a commit has dropped the checkpoint, `release` still ends the quarantine.
        """
        found = self.log().quarantined.get(checkpoint_id)
        if found is None or not self._rewrite_mark(
            paths.quarantine(checkpoint_id), found, replace(found, dropped=True)
        ):
            raise self._not_quarantined(checkpoint_id)

    def _not_quarantined(self, checkpoint_id: int) -> UsageError:
        return UsageError(
            f"checkpoint {checkpoint_id} of pipeline {self._pipeline!r} is not quarantined\n"
            "cairn checkpoints shows the state of each checkpoint"
        )

    def _check_release(self, log: Log, checkpoint_id: int) -> None:
        other = computed_without(log, checkpoint_id)
        if other is not None:
            raise UsageError(
                f"checkpoint {checkpoint_id} of pipeline {self._pipeline!r} can't be released: checkpoint {other} was computed without it\n"
                f"To make its state the newest instead, use `cairn restore` with checkpoint {checkpoint_id} and --allow-quarantined"
            )
        hidden = hidden_by_release(log, checkpoint_id)
        if hidden is not None:
            raise UsageError(
                f"checkpoint {checkpoint_id} of pipeline {self._pipeline!r} can't be released: its files are deleted, and it would replace "
                f"checkpoint {hidden} of the same interval\nTo replace checkpoint {hidden}, run the interval again"
            )

    def _rewrite_mark(self, path: str, old: Quarantine | type[Released], new: Quarantine | Released) -> bool:
        """Replace a quarantine mark if it equals `old` or is an instance of `old`. Return True if it was replaced."""
        for _ in range(_MARK_ROUNDS):
            info = self._storage.stat(path)  # taken before the read, so that a write in between makes `replace` fail
            found = record_codec.decode(self._storage.read(path), path, Quarantine, Released)
            if info is None or not (isinstance(found, old) if isinstance(old, type) else found == old):
                return False
            with suppress(PreconditionFailed):
                self._storage.replace(path, record_codec.encode(new), generation=info.generation)
                return True
        raise StorageUnavailable(f"{self._storage.url}: other processes rewrote {path} {_MARK_ROUNDS} times in a row")

    def mark_validated(self, checkpoint_id: int, mode: ValidationMode) -> None:
        """Record that a checkpoint passed validation, by a file in `validated/`.

        For each mode, retention keeps the newest state among the checkpoints that passed (`plan_retention`).
        """
        with suppress(AlreadyExists):
            mark = Validated(id=checkpoint_id, mode=mode)
            self._storage.create(paths.validated(checkpoint_id, mode), record_codec.encode(mark))

    def refuse(self, attempt: str, reason: str, findings: tuple[str, ...] = ()) -> None:
        """Mark a prepared attempt as refused: `commit` raises `ValidationRefused` for the attempt from now on."""
        with suppress(AlreadyExists):
            mark = Refused(attempt=attempt, reason=hide(reason), findings=hide_all(findings))
            self._storage.create(paths.refused(attempt), record_codec.encode(mark))


@frozen
class ReplacedOutput(Record):
    """The record of a commit that replaced another interval's output, with that interval and without output files."""


def as_published(record: Record, interval: Interval) -> Record:
    """Return the record that `publish` passes to the sink hook for one interval."""
    if interval == record.content.interval:
        return record
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    return ReplacedOutput(**values | {"content": replace(record.content, interval=interval, outputs=())})
