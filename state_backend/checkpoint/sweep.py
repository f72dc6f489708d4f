"""The sweeper: deletes what crashed, lost and repeated tries left behind, and nothing that anybody may still need.

Three steps, and why in this order:

1. *Files are listed first, records are read last.* What was written after the listing is not in it; what was committed before
   the reading is in the log. The other way round, an interval that is committed in between would look like an orphan.
2. *A record names the attempts that are abandoned, then their files go.* An attempt that is silent for long may still wake up
   and commit; the record takes the next id from it, and from then on its commit raises ``Swept``. Without it the attempt
   could be committed between the reading and the deletion.
3. *Files go one by one, by the generation that was listed*, never by folder.

If it stops: before the record, nothing has happened; after it, the attempts are lost but not all of their files are gone. The
next sweep finds them abandoned in the log and deletes the rest. Two sweepers at once do each other no harm.

A disk that is full has no room for that record, nor for the tombstones of the clean-up before it. So commits keep some in advance
(``KeepsRoom``), and a sweep that fails frees it and begins again; afterwards it is kept anew. If it stops in between, the next sweep
finds either the room or what it became: free space, or a file that somebody else wrote meanwhile; then space has to be made by hand.

In doubt it deletes nothing: a record, a mark or the manifest of a retained checkpoint that can't be read stops it, and so does
a mark of a checkpoint that the log does not know, for then the newest record is missing and what it names looks like orphans.
Files whose path it does not know stay where they are.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from uuid import uuid4

from state_backend.checkpoint.append_record import append
from state_backend.checkpoint.clean_up_dropped import delete_file
from state_backend.checkpoint.coordinator import Coordinator
from state_backend.checkpoint.end_of_log import last_marked
from state_backend.checkpoint.fresh_listing import note_names
from state_backend.checkpoint.log import Log, read_log, read_on
from state_backend.checkpoint.parallel import at_once
from state_backend.checkpoint.record_reader import Fact, read_settled
from state_backend.checkpoint.settled_files import rebuild_settled
from state_backend.checkpoint.storage_clock import storage_now_ms
from state_backend.formats import paths, record_codec
from state_backend.ports.storage import KeepsRoom, Storage
from state_backend.shard.manifest import manifest_of
from state_backend.values.errors import (
    AlreadyExists,
    CorruptFile,
    CorruptRecord,
    NotFound,
    PreconditionFailed,
    StorageUnavailable,
    UnknownOutcome,
    UsageError,
)
from state_backend.values.handles import FileInfo, Handle, handles_in
from state_backend.values.records import Record, Savepoint, SweepRecord, Tombstone

logger = logging.getLogger("cairn")

MIN_AGE = timedelta(days=3)
"""An attempt that wrote nothing for so long is taken for dead: a weekend in which nobody cleared its tasks."""

_ROUNDS = 100
_OF_ATTEMPTS = ("state", "prepared", "refused", "output")
_OF_LOG = ("record", "head", "clock", "settled", "attempt-end", "names", "quarantine")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """``abandon``: attempts to name in the log before any file goes. ``delete``: what goes, by path. ``unknown``: paths that
    no part of this system writes, or that lie behind a symbolic link; they stay."""

    abandon: tuple[str, ...]
    delete: tuple[FileInfo, ...]
    unknown: tuple[str, ...]

    @property
    def delete_bytes(self) -> int:
        """What deleting frees."""
        return sum(f.size_bytes for f in self.delete)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """The plan and what came of it, with what the clean-up before it did. ``record``: what was written to the log, None if
    nothing had to be abandoned. ``rebuilt``: lost files in ``settled/`` that were written anew. A dry run leaves all but the plan
    and ``rebuilt`` empty; with lost files it plans nothing, since until they are there again orphans can't be told."""

    plan: SweepPlan
    record: SweepRecord | None
    deleted_files: int
    deleted_bytes: int
    shrunk: tuple[int, ...]
    rebuilt: tuple[str, ...] = ()


def plan_sweep(
    files: Sequence[FileInfo], log: Log, needed: frozenset[str], *, now_ms: int, min_age_ms: int
) -> SweepPlan:
    """What may go of the files that were listed before the log was read.

    ``needed``: every path that a record or a savepoint names. A file of an attempt that was committed or abandoned before goes
    when it is old and not needed, and a lease when it ended so long ago; the files of any other attempt when all of them are old,
    and then the attempt has to be abandoned first. Raises: CorruptRecord if a mark speaks of a checkpoint behind the end of the log.
    """
    _check_end_of_log(files, log)
    oldest_ms = now_ms - min_age_ms
    finished = log.ended_attempts({a for f in files if (a := _attempt_of(f.path)) is not None})
    alive = {a for f in files if f.modified_ms > oldest_ms and (a := _attempt_of(f.path)) is not None} - finished
    outdated = _outdated_marks(files, log)
    abandon, delete, unknown = set(), [], []
    for file in files:
        attempt = _attempt_of(file.path)
        if file.path in needed:
            continue
        if file.behind_link:  # outside of the root, whatever it is called here
            if paths.kind_of(file.path) not in _OF_LOG:
                unknown.append(file.path)
            continue
        lease = paths.leased_id(file.path)
        if lease is not None:  # of a pipeline that commits no more, so that no clean-up finds it
            if file.modified_ms + lease[1] * 1000 < oldest_ms:
                delete.append(file)
            continue
        if attempt is None and paths.published_id(file.path) is None and paths.validated_id(file.path) is None:
            if paths.kind_of(file.path) is None:
                unknown.append(file.path)
            continue
        if file.modified_ms > oldest_ms or attempt in alive or (attempt is None and file.path not in outdated):
            continue
        delete.append(file)
        if attempt is not None and attempt not in finished:
            abandon.add(attempt)
    return SweepPlan(abandon=tuple(sorted(abandon)), delete=tuple(delete), unknown=tuple(unknown))


def sweep(
    storage: Storage, pipeline: str, *, now_ms: int | None = None, min_age: timedelta = MIN_AGE, dry_run: bool = False
) -> SweepResult:
    """Finishes what a clean-up left, then plans and carries out a sweep of the pipeline's folder; ``dry_run`` only plans.

    ``now_ms``: milliseconds since the epoch; None: by the storage's clock. A host's clock may be an hour ahead, and files in use would
    look old enough.
    Raises: CorruptFile, CorruptRecord in doubt, having deleted nothing; UnknownOutcome if it can't tell whether its record is
    in the log: nothing is deleted, and the next sweep goes on from there.
    """
    if min_age < timedelta(0):
        raise UsageError(f"min_age must not be negative; got {min_age}")
    try:
        return _sweep(storage, pipeline, now_ms, min_age, dry_run)
    except StorageUnavailable as error:
        if dry_run or not isinstance(storage, KeepsRoom) or not storage.free_room():
            raise
        logger.warning("%s: %s; trying again with the room that was kept for that", pipeline, error)
        return _sweep(storage, pipeline, now_ms, min_age, dry_run)
    finally:
        if not dry_run and isinstance(storage, KeepsRoom):
            storage.keep_room()


def _sweep(storage: Storage, pipeline: str, now_ms: int | None, min_age: timedelta, dry_run: bool) -> SweepResult:
    # Before anything is deleted: to whoever lists `settled/`, an interval whose file is lost has no output.
    rebuilt = rebuild_settled(storage, dry_run=dry_run)
    if dry_run and rebuilt:
        unknown = tuple(info.path for info in storage.list("") if paths.kind_of(info.path) is None)
        plan = SweepPlan(abandon=(), delete=(), unknown=unknown)
        return SweepResult(plan=plan, record=None, deleted_files=0, deleted_bytes=0, shrunk=(), rebuilt=rebuilt)
    cleaned = None if dry_run else Coordinator(storage, pipeline).clean_up()
    if now_ms is None:
        now_ms = storage_now_ms(storage, dry_run=dry_run)
    files = list(storage.list(""))
    plan, record = _agreed_plan(storage, files, now_ms, min_age // timedelta(milliseconds=1), dry_run)
    if record is not None:
        logger.info("%s: sweep %d abandons %s", pipeline, record.id, ", ".join(record.abandoned))
    gone = [] if dry_run else _delete(storage, plan.delete)
    return SweepResult(
        plan=plan,
        record=record,
        deleted_files=len(gone) + (cleaned.deleted_files if cleaned else 0),
        deleted_bytes=sum(f.size_bytes for f in gone),
        shrunk=cleaned.shrunk if cleaned else (),
        rebuilt=rebuilt,
    )


def _agreed_plan(
    storage: Storage, files: Sequence[FileInfo], now_ms: int, min_age_ms: int, dry_run: bool
) -> tuple[SweepPlan, SweepRecord | None]:
    """A plan whose abandoned attempts are in the log, and the record that says so if it is this sweep's."""
    name, known_id, told, log = str(uuid4()), 0, 0, None
    for _ in range(_ROUNDS):
        log = read_log(storage, log)
        if log.head_id < max(known_id, last_marked(f.path for f in files)[0]):
            log = read_on(storage, log)
        try:
            needed = _needed(log, storage)
        except (NotFound, StorageUnavailable) as error:
            if read_log(storage, log).head_id != log.head_id:
                continue  # a commit dropped that checkpoint or replaced that output meanwhile, and its files went
            if isinstance(error, StorageUnavailable):
                raise
            raise CorruptFile(f"a manifest of a retained checkpoint is missing, nothing is deleted: {error}") from error
        plan = plan_sweep(files, log, needed, now_ms=now_ms, min_age_ms=min_age_ms)
        if dry_run or not plan.abandon:
            # Also after a lost answer: what this sweep abandoned is in the log by now, so there is nothing more to abandon.
            mine = log.entry(told)
            return plan, mine if isinstance(mine, SweepRecord) and mine.sweep == name else None
        record = SweepRecord(
            id=log.head_id + 1,
            retained=tuple(r for _, r in sorted(log.retained.items())),
            sweep=name,
            abandoned=plan.abandon,
        )
        try:
            record = append(storage, log, record)
        except (AlreadyExists, UnknownOutcome) as error:
            # Another took the id, or we can't tell: the log tells, unless a refused create is still under way.
            if isinstance(error, UnknownOutcome) and storage.stat(paths.record(record.id)) is None:
                raise
            known_id = record.id
            told = record.id if isinstance(error, UnknownOutcome) else told
            continue
        return plan, record
    raise StorageUnavailable(f"{storage.url}: a sweep lost the race for the next id {_ROUNDS} times; try again")


def _needed(log: Log, storage: Storage) -> frozenset[str]:
    """Every path that a record names.

    Raises: NotFound if a retained checkpoint's manifest is gone, which hides what it needs.
    """
    named = {o.handle.path for _, outputs in log.current_outputs().values() for o in outputs}
    near = {n: log.entries[n] for n in {*log.retained, *log.summary.dropping}}
    named |= {h.path for entry in near.values() for h in handles_in(entry)}
    # A clean-up deletes output that was replaced.
    shrunk = (e for n, e in near.items() if n in log.summary.dropping and isinstance(e, Tombstone))
    settled = (Fact(e.interval, e.id, e.kind) for e in shrunk if e.kind == "interval")
    named |= {h.path for fact in settled for h in handles_in(read_settled(storage, fact))}
    whole = [e for e in near.values() if isinstance(e, Record)]
    named |= {paths.prepared(record.content.attempt) for record in whole}
    retained = [r.content for r in whole if r.id in log.retained]
    # Whole but dropped: its clean-up waits for the sink hook, or stopped half-way and has taken manifests already.
    dropped = [r.content for r in whole if r.id not in log.retained]
    # Looked up by its name: a listing may miss files that were written some seconds ago.
    if storage.stat(paths.SAVEPOINT_RECORD) is not None:
        saved = record_codec.decode(storage.read(paths.SAVEPOINT_RECORD), paths.SAVEPOINT_RECORD, Savepoint)
        named |= {paths.SAVEPOINT_RECORD, *(h.path for h in handles_in(saved))}
        retained.append(saved.content)
    strict = {ref.manifest: ref for c in retained for ref in c.shards if ref.manifest is not None}
    loose = {ref.manifest: ref for c in dropped for ref in c.shards if ref.manifest is not None}

    def paths_in(handle: Handle) -> list[str]:
        """What a manifest names as it was written, which may be more than what a record still takes from it."""
        ref = strict.get(handle) or loose[handle]
        try:
            manifest = manifest_of(replace(ref, changes=None), storage)
        except (NotFound, CorruptFile):
            if handle in strict:
                raise
            return []  # nobody needs the state of a dropped checkpoint
        return [h.path for h in handles_in(manifest)]

    for found in at_once(paths_in, strict | loose):
        named.update(found)
    return frozenset(named)


def _delete(storage: Storage, files: Iterable[FileInfo]) -> list[FileInfo]:
    """The files that this call deleted. The first error is raised; those that were begun then are waited for."""

    def delete(file: FileInfo) -> FileInfo | None:
        try:
            return file if delete_file(storage, file.path, generation=file.generation) else None
        except PreconditionFailed:  # written anew since: not what was judged
            return None

    gone = [file for file in at_once(delete, files) if file is not None]
    leases = [f.path.removeprefix(paths.LEASES) for f in gone if paths.leased_id(f.path) is not None]
    if leases:
        note_names(storage, paths.LEASES, [], drop=leases)
    return gone


def _attempt_of(path: str) -> str | None:
    """The attempt that wrote a file, or None if no attempt writes such files."""
    return paths.attempt_of(path) if paths.kind_of(path) in _OF_ATTEMPTS else None


def _outdated_marks(files: Sequence[FileInfo], log: Log) -> set[str]:
    """Marks of outputs that a later commit replaced: what is published never goes back to them; and of validated checkpoints that
    are not there any more."""
    told = log.publications()
    validated = {f.path: mark[0] for f in files if (mark := paths.validated_id(f.path)) is not None}
    return {path for path, n in validated.items() if n <= log.head_id and n not in log.retained} | {
        paths.published(interval, n) for interval, n in {*told} - {*dict(told).items()}
    }


def _check_end_of_log(files: Sequence[FileInfo], log: Log) -> None:
    last, path = last_marked(f.path for f in files)
    if last > log.head_id:
        raise CorruptRecord(
            f"{paths.record(last)} is missing: {path} speaks of checkpoint {last}, but the log ends at {log.head_id}\n"
            "Nothing is deleted, since what the missing record names can't be told from orphans. Put the record back from a copy"
        )
