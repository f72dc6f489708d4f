"""The shell around the decisions: begin, prepare, commit, publish, clean up.

What is on disk if we stop, line by line:

    begin       nothing
    prepare     attempts/<uuid>/prepared.json, whole or not at all; before it, files that no record names (for the sweeper)
    commit      up to the create: as before. After it: the checkpoint, its output and what is retained, all in that record
    publish     the hook ran, but its mark is missing: it runs again, with the same checkpoint id
    clean up    files of a dropped checkpoint are gone, its record is still whole: the next one deletes what is left and
                shrinks it. It is no longer retained, so nobody restores it meanwhile
"""

from __future__ import annotations

import logging
import shlex
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal, get_args

from state_backend.checkpoint.append_record import append, note_head
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
from state_backend.checkpoint.lineage import choose_base
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
from state_backend.checkpoint.output_schemas import output_so_far
from state_backend.checkpoint.parallel import at_once
from state_backend.checkpoint.record_reader import RecordReader
from state_backend.formats import paths, record_codec
from state_backend.formats.types import names_and_types, parse_struct
from state_backend.ports.storage import KeepsRoom, Storage, lists_late
from state_backend.values.errors import (
    AlreadyExists,
    CorruptFile,
    CorruptRecord,
    Fenced,
    NoSuchCheckpoint,
    NotFound,
    SinkFailed,
    StateUnusable,
    StorageUnavailable,
    Swept,
    UnknownOutcome,
    UsageError,
    ValidationRefused,
)
from state_backend.values.intervals import Interval, format_instant, from_ms
from state_backend.values.records import (
    Content,
    Permissions,
    Prepared,
    Published,
    Quarantine,
    Record,
    Refused,
    RunRef,
    SweepRecord,
    Tombstone,
    Validated,
    ValidationMode,
)
from state_backend.values.retention import RetentionPolicy

logger = logging.getLogger("cairn")

_COMMIT_ROUNDS = 100
_READ_ROUNDS = 10
_FEW_FILES = 2
_FEW_DROPPED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """An attempt: the highest id when it began, and the checkpoint that it starts from (None: empty state). ``output``: the
    newest output schema. ``returning``: the forgotten keys that the attempt's shards have to leave out."""

    attempt: str
    h0: int
    base: Record | None
    output: dict[str, Any] | None = None
    returning: tuple[Returning, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitResult:
    """The checkpoint that counts for the attempt. ``adopted``: it is another try's, with the same base. ``record`` is None
    if retention dropped it since."""

    id: int
    record: Record | None
    outcome: Literal["committed", "already", "adopted"]


class _HookRaised(Exception):
    """The user's hook did, and not the storage."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Coordinator:
    """Checkpoints of one pipeline, over the storage of its own folder. Any number of processes may use one pipeline at a time.

    policy: None for the one that the pipeline's records say.
    remembers: each call takes over from the last one the records that are retained still, and reads only what is new. For a process
        that makes several calls: a retained record is never changed, so it is read once. What this process has prepared or committed
        itself it does not read again: publishing and cleaning up after a commit go by the log as that commit left it, as if this
        process had read it then and been slow since. Without it nothing is kept between calls.
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
        # Here, since every writer has a coordinator: a record with another name could be written and never read.
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

    def log(self, before: Log | None = None) -> Log:
        """The log as it is now. ``before``: what the same call has read already."""
        log = read_log(self._storage, self._last if before is None else before)
        if self._remembers:
            self._last = log
        return log

    def _newest(self, before: Log | None = None) -> Log:
        """As ``log``, without the records that are retained besides the newest."""
        log = read_newest(self._storage, self._last if before is None else before)
        if self._remembers:
            self._last = log
        return log

    def begin(
        self, interval: Interval, *, run: RunRef, permissions: Permissions, pipeline_start_ms: int, attempt: str
    ) -> Begun:
        """Picks the base. Nothing durable.

        Raises: as ``plan_base``; UsageError if ``start`` is not the recorded one; CorruptRecord for a log that can't be read, or that
        marks of a later checkpoint show to have lost its end.
        """
        log = self._newest()
        for tried in range(_READ_ROUNDS):
            self._check_start(log, pipeline_start_ms)
            try:
                chosen = choose_base(log, self._pipeline, interval, permissions, pipeline_start_ms)
                base = log.whole(chosen.id) if chosen is not None else None
                break
            except (StateUnusable, CorruptRecord):
                # A commit may have mended the one, or dropped the checkpoint whose record is the other.
                further = read_on(self._storage, log)
                if further is log or tried == _READ_ROUNDS - 1:
                    raise
                log = further
        return Begun(
            attempt=attempt,
            h0=log.head_id,
            base=base,
            output=output_so_far(log),
            returning=returning_keys(log, interval.start_ms, base.id if base is not None else None),
        )

    def begin_restore(self, content: Content, *, pipeline_start_ms: int, attempt: str) -> Begun:
        """Begins to restore state with this content, a savepoint's or another pipeline's, as that at its interval's end. Nothing
        durable.

        Raises: UsageError if no interval of this pipeline could start from it, or if the pipeline has state by another key.
        """
        log = self.log()
        self._check_start(log, pipeline_start_ms)
        check_restored(log, self._pipeline, content)
        if pipeline_start_ms >= content.interval.end_ms:
            raise UsageError(
                f"pipeline {self._pipeline!r} starts at {format_instant(from_ms(pipeline_start_ms))}, and the interval that starts "
                f"there starts empty; none would start from what is restored, the state at {format_instant(content.interval.end)}\n"
                "Set the pipeline's start to an earlier instant"
            )
        for entry in log.completed()[-1:]:
            ours, theirs = parse_struct(entry.content.key_schema), parse_struct(content.key_schema)
            if names_and_types(ours) != names_and_types(theirs):
                raise UsageError(
                    f"pipeline {self._pipeline!r} has state by {ours}, what is restored by {theirs}; restore it under another name"
                )
        return Begun(attempt=attempt, h0=log.head_id, base=None)

    def _check_start(self, log: Log, pipeline_start_ms: int) -> None:
        for entry in [log.newest] if log.newest is not None else []:
            if entry.content.pipeline_start_ms != pipeline_start_ms:
                raise UsageError(
                    f"pipeline {self._pipeline!r} began at {format_instant(from_ms(entry.content.pipeline_start_ms))}, and its start "
                    f"is {format_instant(from_ms(pipeline_start_ms))} now; the start of a pipeline never changes\n"
                    "Set it back, or give the pipeline another name to begin anew\n"
                    "If it never was otherwise, another pipeline of this name writes below the same root: rename one of the two"
                )

    def prepare(self, prepared: Prepared) -> Prepared:
        """Records that all shards have acked; returns what ``load_prepared`` would. Again with the same content is fine."""
        path, data = paths.prepared(prepared.content.attempt), record_codec.encode(prepared)
        # Of values: gzip's bytes depend on the zlib of the host, and JSON has no tuples.
        recorded = record_codec.decode(data, path, Prepared)
        try:
            self._storage.create(path, data)
        except AlreadyExists:
            there = record_codec.decode(self._storage.read(path), path, Prepared)
            if there != recorded:
                raise StorageUnavailable(
                    f"{path} exists with other content: two drivers share one attempt; clear the task, so that it begins another one"
                ) from None
        if self._remembers:
            self._prepared = recorded
        return recorded

    def load_prepared(self, attempt: str) -> Prepared:
        """What an attempt prepared. Raises: StateUnusable if it never got there."""
        path = paths.prepared(attempt)
        try:
            data = self._storage.read(path)
        except NotFound:
            raise self._never_prepared(attempt) from None
        prepared = record_codec.decode(data, path, Prepared)
        if prepared.content.attempt != attempt:
            raise CorruptRecord(f"{path}: it says that it is of attempt {prepared.content.attempt}")
        return prepared

    def _never_prepared(self, attempt: str) -> StateUnusable:
        path = paths.prepared(attempt)
        return StateUnusable(
            f"attempt {attempt} of {self._pipeline!r} never got as far as {path}; run the interval again"
        )

    def prepared(self) -> list[Prepared]:
        """What lies prepared and is not committed: of attempts under way, and of some that were lost or refused.

        Raises: CorruptRecord naming a ``prepared.json`` that can't be decoded. What else lies beside it is not read.
        """
        listed, log = list(self._storage.list(paths.ATTEMPTS)), self.log()
        found = []
        for info in listed:
            attempt = paths.attempt_of(info.path)
            if attempt is not None and info.path == paths.prepared(attempt) and log.of_attempt(attempt) is None:
                with suppress(NotFound):  # fenced or swept meanwhile
                    found.append(record_codec.decode(self._storage.read(info.path), info.path, Prepared))
        return found

    def is_prepared(self, attempt: str) -> bool:
        """True if all shards of the attempt have acked, and nobody fenced or swept it since."""
        return self._storage.stat(paths.prepared(attempt)) is not None

    def is_refused(self, attempt: str) -> bool:
        """True if validation refused the attempt: its commit would raise ValidationRefused."""
        return self._storage.stat(paths.refused(attempt)) is not None

    # --- commit --------------------------------------------------------------------------------------------------------------

    def commit(self, attempt: str) -> CommitResult:
        """Makes a prepared attempt the newest checkpoint, once.

        Raises: Fenced after deleting the attempt's own files; BaseMoved, Swept; CorruptFile naming a new file that is not
        there as it was acked; ValidationRefused; UnknownOutcome if it can't tell. Only Fenced deletes anything.
        """
        # Before the log: who deletes it says so there first, by how this attempt ended, or by what fences it.
        prepared = self._prepared if self._prepared is not None and self._prepared.content.attempt == attempt else None
        try:
            prepared = prepared or self.load_prepared(attempt)
        except StateUnusable:
            prepared = None
        log = self._newest()
        mine = log.of_attempt(attempt)
        if mine is not None:
            note_head(self._storage, log, log.head_id)
            return _already(mine)
        if prepared is None:
            raise self._lost(log, attempt)
        self._check_not_refused(attempt)
        return self._commit(log, prepared)

    def _lost(self, log: Log, attempt: str) -> StateUnusable | Swept:
        sweep = log.abandoned_by(attempt)
        if sweep is None:
            return self._never_prepared(attempt)
        return Swept(
            f"{self._pipeline}, attempt {attempt}: sweep {sweep} abandoned it and deleted its files; clear the task to "
            "process the interval again"
        )

    def _commit(self, log: Log, prepared: Prepared) -> CommitResult:
        verified, known_id = False, prepared.h0
        for tried in range(_COMMIT_ROUNDS):
            if tried:
                # The first try goes by what was read above: whoever came between has the id, and the create says so.
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
                    continue  # it may be a sweep that took the file, after saying so in the log
                verified = True
            try:
                record = append(self._storage, log, decision.record)
            except (AlreadyExists, UnknownOutcome) as error:
                # Lost the id to another, or can't tell: the log tells, unless a refused create is still under way.
                if isinstance(error, UnknownOutcome) and self._storage.stat(paths.record(decision.record.id)) is None:
                    raise
                known_id = decision.record.id
                continue
            if isinstance(self._storage, KeepsRoom):
                self._storage.keep_room()
            if self._remembers:
                self._last = self._committed = log_after(self._storage, log, record)
            return CommitResult(id=record.id, record=record, outcome="committed")
        raise StorageUnavailable(f"{self._pipeline}: lost the race for the next id {_COMMIT_ROUNDS} times; try again")

    def _plan(self, log: Log, prepared: Prepared) -> Create | AlreadyCommitted | Adopted:
        """The decision. What was validated is looked at only if a checkpoint would be dropped that may be the newest of them."""
        decision = plan_commit(log, prepared, self._policy)
        if not isinstance(decision, Create):
            return decision
        dropped = sorted(log.retained.keys() - {r.id for r in decision.record.retained})
        marks = [paths.validated(n, mode) for n in dropped for mode in get_args(ValidationMode)]
        few = len(dropped) <= _FEW_DROPPED
        looked_at = at_once(self._storage.stat, marks if few or lists_late(self._storage) else [])
        there = [info.path for info in looked_at if info is not None]
        if few and not there:
            return decision
        return plan_commit(log, prepared, self._policy, self._newest_validated(log, there))

    def _check_not_refused(self, attempt: str) -> None:
        path = paths.refused(attempt)
        try:
            mark = record_codec.decode(self._storage.read(path), path, Refused)
        except NotFound:
            return
        raise ValidationRefused(
            f"attempt {attempt} of {self._pipeline!r} can't be committed: {mark.reason}: {'; '.join(mark.findings[:3])}. "
            "Mend the cause and run the interval again"
        )

    def _newest_validated(self, log: Log, there: Collection[str]) -> frozenset[int]:
        """The newest usable checkpoint that was validated, of each mode. ``there``: marks that a listing may miss yet."""
        listed = {*there, *(info.path for info in self._storage.list(paths.VALIDATED))}
        marks = [mark for path in listed if (mark := paths.validated_id(path))]
        usable = [(n, mode) for n, mode in marks if n in log.retained and log.quarantine_above(n) is None]
        return frozenset({mode: n for n, mode in sorted(usable)}.values())

    def _verify(self, prepared: Prepared) -> None:
        """Every file that this attempt wrote is there, with the size and, where the storage keeps one, the crc32c acked. Looks at
        them by folder, but one by one where a folder has few: an object store's listing costs what a dozen looks cost."""
        attempt, written = prepared.content.attempt, prepared.written
        if written is None:
            written = tuple(h for h in files_of(prepared.content, self._storage) if paths.attempt_of(h.path) == attempt)
        folders = Counter(handle.path.rpartition("/")[0] for handle in written)
        listed = [folder for folder, files in folders.items() if files > _FEW_FILES]
        there = {info.path: info for folder in listed for info in self._storage.list(f"{folder}/")}
        # A network disk may list a folder as it was some seconds ago.
        missing = [handle.path for handle in written if handle.path not in there]
        there |= {info.path: info for info in at_once(self._storage.stat, missing) if info is not None}
        for handle in written:
            info = there.get(handle.path)
            if info is None:
                raise CorruptFile(
                    f"{handle.path} is missing from {self._storage.url}; nothing is committed, run the interval again"
                )
            if info.size_bytes != handle.size_bytes or info.crc32c not in (None, handle.crc32c):
                raise CorruptFile(
                    f"{handle.path}: expected {handle.size_bytes} bytes, crc32c {handle.crc32c:08x}; the storage has "
                    f"{info.size_bytes} bytes, crc32c {'unknown' if info.crc32c is None else f'{info.crc32c:08x}'}; "
                    "nothing is committed, run the interval again"
                )

    def _delete_own(self, log: Log, content: Content) -> None:
        """A fenced attempt's files: by name, from its handles, and none that a record refers to."""
        needed, log = needed_by_retained(self._storage, log, self._newest)
        for _, n in log.outputs_near(content.interval):
            entry = log.entries[n]
            if not isinstance(entry, SweepRecord) and attempt_of(entry) == content.attempt:
                needed.paths.update(o.handle.path for o in log.outputs(n))
        files = {h.path for h in files_of(content, self._storage, gone_before=True)}
        own = {path for path in files if paths.attempt_of(path) == content.attempt}
        delete_files(self._storage, needed.others(own))
        self._storage.delete(paths.prepared(content.attempt))

    # --- publish --------------------------------------------------------------------------------------------------------------

    def publish(
        self,
        hook: Callable[[Record], None] | None,
        *,
        in_order: bool = False,
        only: Collection[datetime] | None = None,
        code: str = "MODULE:NAME",
    ) -> list[int]:
        """Runs the sink hook for every newest output that has not been recorded as published; returns their ids. Where it raises, the
        mark is missing, the others go on, and the next call runs it again.

        For an interval whose output another one replaced, the hook gets the record of that one as if it were the interval's own,
        without files. Those come first, so that a sink has nothing twice.

        in_order: nothing is published after an interval that failed. ``only``: starts of intervals; others are left as they are.
        code: where the pipeline is, for the commands of the error.
        Raises: SinkFailed, from the first error, when all that could be published is.
        """
        log = self._committed or self._newest()
        published: list[int] = []
        failed: list[tuple[Interval, int, Exception]] = []
        waiting = sorted(self.unpublished(log), key=lambda told: (self._is_own(log, *told), told))
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
            held = {n for _, n in waiting} - {*published} if in_order else set[int]()
            raise SinkFailed(
                self._failed(failed, in_order, code), frozenset({n for _, n, _ in failed} | held)
            ) from failed[0][2]
        return published

    def unpublished(self, log: Log | None = None) -> list[tuple[Interval, int]]:
        """The intervals whose newest output is not recorded as published, each with the commit that made it, or replaced it."""
        log = self._newest() if log is None else log
        # What this process has just committed nobody else has published.
        own = log.head_id if log is self._committed else 0
        told = [(u.interval, u.id) for u in log.summary.unpublished]
        return [(i, n) for i, n in told if n == own or self._storage.stat(paths.published(i, n)) is None]

    def skip_publication(self, starts: Collection[datetime]) -> list[int]:
        """Records the output of the intervals that start then as published, without a call of the sink; the ids.

        Raises: UsageError for a start at which nothing waits; nothing is recorded then."""
        waiting = self.unpublished()
        strange = {*starts} - {interval.start for interval, _ in waiting}
        if strange:
            there = ", ".join(format_instant(i.start) for i, _ in waiting) or "none"
            raise UsageError(
                f"no output of an interval that starts at {format_instant(min(strange))} waits for the sink of "
                f"{self._pipeline!r}; waiting: {there}"
            )
        skipped = [(interval, n) for interval, n in waiting if interval.start in starts]
        for interval, checkpoint_id in skipped:
            self._mark_published(interval, checkpoint_id)
        return [n for _, n in skipped]

    def _failed(self, failed: list[tuple[Interval, int, Exception]], in_order: bool, code: str) -> str:
        root = self._storage.url.rstrip("/").removesuffix(f"/{self._pipeline}")
        command = f"cairn publish --root {shlex.quote(root)} --pipeline {self._pipeline}"
        lines = [f"  {interval} (checkpoint {n}): {type(e).__name__}: {e}" for interval, n, e in failed]
        first = format_instant(failed[0][0].start)
        others = "later ones wait for it" if in_order else "the others are published"
        return "\n".join(
            [
                f"the sink of {self._pipeline!r} failed for {len(failed)} interval(s); {others}, and each is tried again with the "
                "next checkpoint:",
                *lines,
                "To try it now, or to give one up:",
                f"{command} --code {code} --retry {first}",
                f"{command} --skip {first}",
            ]
        )

    def _is_own(self, log: Log, interval: Interval, checkpoint_id: int) -> bool:
        """Whether the commit is of this interval, and not of one that replaced it."""
        entry = log.entries[checkpoint_id]
        return not isinstance(entry, SweepRecord) and interval_of(entry) == interval

    def _publish(
        self, log: Log, interval: Interval, checkpoint_id: int, hook: Callable[[Record], None] | None
    ) -> list[int]:
        """Runs the hook until what it ran for last is current. A newer output may have been published while this hook ran;
        then this one has written over it, and the newer one's hook has to run again."""
        published: list[int] = []
        while True:
            own = log is self._committed and checkpoint_id == log.head_id
            entry = log.entries[checkpoint_id] if own else self._fresh(checkpoint_id)
            if not isinstance(entry, Record):
                return published  # published, dropped and shrunk by others meanwhile
            if hook is not None:
                try:
                    hook(as_published(entry, interval))
                except Exception as error:
                    raise _HookRaised(error) from error
            self._mark_published(interval, checkpoint_id)
            published.append(checkpoint_id)
            if hook is None:
                return published  # nothing was written over what a newer commit has published
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
        """The entry as it is now."""
        return RecordReader(self._storage, checkpoint_id).fresh(checkpoint_id)

    # --- clean up --------------------------------------------------------------------------------------------------------------

    def clean_up(self) -> CleanUp:
        """Deletes what nobody needs any more of the records that are no longer retained (`checkpoint/clean_up_dropped.py`)."""
        log, self._committed = self._committed or self._newest(), None
        note_head(self._storage, log, log.head_id)
        return clean_up(self._storage, log, self._newest)

    # --- reading and marking ------------------------------------------------------------------------------------------------------

    def record(self, which: str | int | datetime) -> Record:
        """The completed checkpoint of an id, of an interval end (the newest), or ``"latest"``: the highest id that is
        usable. An id may also be that of a dropped one on which somebody holds a lease.

        Raises: NoSuchCheckpoint, naming what there is, if that is not among it.
        """
        log = self.log()
        fitting = _fitting(log, which) or _fitting(log := read_on(self._storage, log), which)
        if not fitting and isinstance(which, int) and which in log.summary.dropping:
            fitting = [entry for n, entry in leased_checkpoints(self._storage, log)[0].items() if n == which]
        if not fitting:
            completed = log.completed()
            there = ", ".join(f"{c.id} (to {format_instant(c.content.interval.end)})" for c in completed[-10:])
            if len(completed) > 10:
                there = f"{len(completed)}, the newest of them {there}"
            raise NoSuchCheckpoint(
                f"pipeline {self._pipeline!r} has no usable checkpoint {which}; there are: {there or 'none'}"
            )
        return max(fitting, key=lambda c: c.id)

    def quarantine(self, checkpoint_id: int, reason: str, findings: tuple[str, ...] = ()) -> None:
        """Marks a checkpoint as refused: neither it nor what descends from it is a base any more."""
        mark, path = Quarantine(id=checkpoint_id, reason=reason, findings=findings), paths.quarantine(checkpoint_id)
        note_names(self._storage, paths.QUARANTINE, [path.removeprefix(paths.QUARANTINE)])
        try:
            self._storage.create(path, record_codec.encode(mark))
        except AlreadyExists:
            logger.info("checkpoint %d of %s is quarantined already", checkpoint_id, self._pipeline)

    def mark_validated(self, checkpoint_id: int, mode: ValidationMode) -> None:
        """Marks a checkpoint as found right. Of the marked ones retention keeps the newest, of each mode."""
        with suppress(AlreadyExists):
            mark = Validated(id=checkpoint_id, mode=mode)
            self._storage.create(paths.validated(checkpoint_id, mode), record_codec.encode(mark))

    def refuse(self, attempt: str, reason: str, findings: tuple[str, ...] = ()) -> None:
        """Marks a prepared attempt as refused: its commit raises ValidationRefused from now on."""
        with suppress(AlreadyExists):
            mark = Refused(attempt=attempt, reason=reason, findings=findings)
            self._storage.create(paths.refused(attempt), record_codec.encode(mark))


def _fitting(log: Log, which: str | int | datetime) -> list[Record]:
    """The completed checkpoints that ``Coordinator.record`` chooses from."""
    completed = log.completed()
    if isinstance(which, int):
        return [c for c in completed if c.id == which]
    usable = [c for c in completed if log.quarantine_above(c.id) is None]
    if isinstance(which, datetime):
        return [c for c in usable if c.content.interval.end == which]
    if which != "latest":
        raise UsageError(f"checkpoint {which!r} is neither 'latest', an id, nor an interval end")
    return usable


def _already(mine: Record | Tombstone) -> CommitResult:
    return CommitResult(id=mine.id, record=mine if isinstance(mine, Record) else None, outcome="already")


def as_published(record: Record, interval: Interval) -> Record:
    """The record as the sink hook gets it for an interval: itself, or, for one that it replaced, that interval without output."""
    content = record.content
    return (
        record
        if interval == content.interval
        else replace(record, content=replace(content, interval=interval, outputs=()))
    )
