"""Delete files that crashed, lost and repeated tries left behind, but no file that a record or a reader needs.

A sweep takes three steps:

1. The sweep lists the files before it reads the records. A file that is written after the listing is not in the
   listing; a file that is committed before the read is in the log. In the other order, an interval that is committed in
   between would look like an orphan.
2. The sweep creates a record that names the abandoned attempts, and only then deletes their files. An attempt that was
   silent for long may still commit. The sweep's record takes the next id, and from then on the attempt's commit raises
   `Swept`. Without the record, the attempt could commit between the read and the deletion.
3. The sweep deletes files one by one, only with the generation that was listed, and never whole folders.

A sweep that stops before the record has abandoned no attempt. A sweep that stops after the record leaves some files of
abandoned attempts, which the next sweep deletes. Two sweeps at the same time do no harm.

A full disk has no room for the sweep's record, nor for the tombstones of the clean-up before it. So commits reserve
some room in advance (`KeepsRoom`). A sweep that fails on a full disk frees the room, starts again, and reserves the
room again at the end. If the sweep stops in between, the next sweep finds the room reserved or free. If another process
has used the freed room, a person must make space.

In doubt a sweep deletes nothing. It stops if it can't read a record, a quarantine mark, or a manifest of a retained
checkpoint. It also stops if a file in `published/`, `validated/` or `quarantine/` is about a checkpoint after the end
of the log: then the newest record is missing, and its files look like orphans. Files with unknown paths stay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import count
from typing import Any
from uuid import uuid4

from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.checkpoint.append_record import append
from state_backend.checkpoint.clean_up_dropped import clean_up, delete_file
from state_backend.checkpoint.end_of_log import last_marked
from state_backend.checkpoint.fresh_listing import note_names
from state_backend.checkpoint.log import Log, attempt_of, read_log, read_on
from state_backend.checkpoint.parallel import at_once
from state_backend.checkpoint.record_reader import Fact, read_settled
from state_backend.checkpoint.settled_files import rebuild_settled
from state_backend.checkpoint.storage_clock import storage_now_ms
from state_backend.checkpoint.trials import sweep_trials
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
from state_backend.values.frozen import frozen
from state_backend.values.handles import FileInfo, Handle, handles_in
from state_backend.values.human_units import plural, size
from state_backend.values.marks import Savepoint
from state_backend.values.operation_parameters import Sweep
from state_backend.values.records import Record, SweepRecord, Tombstone

logger = logging.getLogger("cairn")

_ROUNDS = 100
_OF_ATTEMPTS = ("state", "prepared", "refused", "failing", "output")
_OF_LOG = ("record", "head", "clock", "settled", "attempt-end", "names", "quarantine")


@frozen
class SweepPlan:
    abandon: tuple[str, ...]  # attempts
    delete: tuple[FileInfo, ...]
    unknown: tuple[str, ...]  # paths of files that Cairn did not write


@frozen
class SweepResult:
    """The result of a sweep, including the clean-up that runs before it."""

    plan: SweepPlan
    # The record that names the abandoned attempts; None if no attempt had to be abandoned.
    record: SweepRecord | None
    deleted_files: int
    deleted_bytes: int
    # The ids of the records that became tombstones.
    shrunk: tuple[int, ...]
    rebuilt: tuple[str, ...] = ()  # paths of lost files in `settled/` that were written again


def sweep_all(request: Sweep, *, on_progress: Callable[[int, int], None] | None = None) -> dict[str, Any]:
    """Sweep the pipeline's folder and its trials. Return JSON values: what was deleted, or in a dry run would be."""
    trials = sweep_trials(request.root, request.pipeline, dry_run=request.dry_run)
    done = sweep(
        open_storage(join_url(request.root, request.pipeline)),
        request.pipeline,
        min_age=request.min_age,
        dry_run=request.dry_run,
        on_progress=on_progress,
    )
    abandoned = done.plan.abandon if request.dry_run else () if done.record is None else done.record.abandoned
    return {
        "dry_run": request.dry_run,
        "record": None if done.record is None else done.record.id,
        "abandoned": [*abandoned],
        "planned": [{"path": file.path, "bytes": file.size_bytes} for file in done.plan.delete],
        "deleted_files": done.deleted_files,
        "deleted_bytes": done.deleted_bytes,
        "shrunk": [*done.shrunk],
        "unknown": [*done.plan.unknown],
        "rebuilt": [*done.rebuilt],
        "trials": [{"name": one.name, "files": one.files, "bytes": one.bytes} for one in trials],
    }


def lines_of_sweep(swept: Mapping[str, Any], *, files: bool) -> Iterator[str]:
    """Yield the result of `sweep_all` as lines of text. `files`: Also a line for each file to delete."""
    dry_run, planned, rebuilt = swept["dry_run"], swept["planned"], swept["rebuilt"]
    for file in planned if files else ():
        yield f"{size(file['bytes']):>10} {file['path']}"
    for attempt in swept["abandoned"]:
        yield f"{'would abandon' if dry_run else 'abandoned'} attempt {attempt}"
    for path in rebuilt:
        yield f"{'would write' if dry_run else 'wrote'} a lost file again: {path}"
    yield from lines_of_unknown(swept["unknown"])
    for trial in swept["trials"]:
        yield f"{'would remove' if dry_run else 'removed'} expired trial {trial['name']}: {trial['files']} files"
    if dry_run and rebuilt:
        yield f"would write {len(rebuilt)} lost files again; a dry run can list the files to delete only after a sweep has written them"
    elif dry_run:
        yield f"would delete {plural(len(planned), 'file')} with {size(sum(file['bytes'] for file in planned))}"
    else:
        deleted = f"deleted {plural(swept['deleted_files'], 'file')}"
        yield f"{deleted}; {size(swept['deleted_bytes'])} were in files that no record names"


def lines_of_unknown(unknown: Sequence[str]) -> Iterator[str]:
    """Yield the files of a pipeline's folder that Cairn did not write, as lines of text."""
    for path in unknown:
        yield f"unknown file, left unchanged: {path}"
    if unknown:
        yield f"{len(unknown)} files were not written by Cairn; Cairn ignores them"


def plan_sweep(
    files: Sequence[FileInfo], log: Log, needed: frozenset[str], *, now_ms: int, min_age_ms: int
) -> SweepPlan:
    """Decide which of the listed files a sweep may delete.

    A file of a committed or abandoned attempt may be deleted if it is old and not needed. Rows that failed an
    expectation stay as long as their checkpoint is retained. Files of any other attempt may be deleted if all files of
    the attempt are old. The sweep must first abandon the attempt: it creates a record that names the attempt, and from
    then on the attempt can't be committed. A lease may be deleted if it ended more than `min_age_ms` ago.
    """
    _check_end_of_log(files, log)
    oldest_ms = now_ms - min_age_ms
    finished = _ended(log, {a for f in files if (a := _attempt_of(f.path)) is not None})
    alive = {a for f in files if f.modified_ms > oldest_ms and (a := _attempt_of(f.path)) is not None} - finished
    outdated, kept = _outdated_marks(files, log), {k.attempt for k in log.kept}
    abandon, delete, unknown = set(), [], []
    for file in files:
        attempt = _attempt_of(file.path)
        if file.path in needed or (file.path.startswith(paths.FAILING) and attempt in kept):
            continue
        if file.behind_link:  # the file lies outside the root, so its path says nothing about it
            if paths.kind_of(file.path) not in _OF_LOG:
                unknown.append(file.path)
            continue
        lease = paths.leased_id(file.path)
        if lease is not None:
            # A clean-up deletes ended leases only if a commit has dropped checkpoints. So the sweep deletes them too.
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
    storage: Storage,
    pipeline: str,
    *,
    now_ms: int | None = None,
    min_age: timedelta = Sweep.min_age,
    dry_run: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> SweepResult:
    """Finish earlier clean-ups, then plan and carry out a sweep of the pipeline's folder. A dry run only plans."""
    if min_age < timedelta(0):
        raise UsageError(f"min_age must not be negative; got {min_age}")
    try:
        return _sweep(storage, pipeline, now_ms, min_age, dry_run, on_progress)
    except StorageUnavailable as error:
        if dry_run or not isinstance(storage, KeepsRoom) or not storage.free_room():
            raise
        logger.warning("%s: %s; trying again with the disk space that is reserved for sweeps", pipeline, error)
        return _sweep(storage, pipeline, now_ms, min_age, dry_run, on_progress)
    finally:
        if not dry_run and isinstance(storage, KeepsRoom):
            storage.keep_room()


def _sweep(
    storage: Storage,
    pipeline: str,
    now_ms: int | None,
    min_age: timedelta,
    dry_run: bool,
    on_progress: Callable[[int, int], None] | None,
) -> SweepResult:
    # Rebuild lost settled files before deleting: without its settled file, an interval's output looks like an orphan.
    rebuilt = rebuild_settled(storage, dry_run=dry_run)
    if dry_run and rebuilt:
        unknown = tuple(info.path for info in storage.list("") if paths.kind_of(info.path) is None)
        plan = SweepPlan(abandon=(), delete=(), unknown=unknown)
        return SweepResult(plan=plan, record=None, deleted_files=0, deleted_bytes=0, shrunk=(), rebuilt=rebuilt)
    cleaned = None if dry_run else clean_up(storage)
    if now_ms is None:
        now_ms = storage_now_ms(storage, dry_run=dry_run)
    files = list(storage.list(""))
    plan, record = _agreed_plan(storage, files, now_ms, min_age // timedelta(milliseconds=1), dry_run)
    if record is not None:
        logger.info("%s: sweep %d abandons these attempts: %s", pipeline, record.id, ", ".join(record.abandoned))
    gone = [] if dry_run else _delete(storage, plan.delete, on_progress)
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
    """Return the sweep's plan, and the record that names the abandoned attempts; None if this sweep created no record.

    If another writer takes the record's id, the function reads the log and plans again. A dry run creates no record.
    """
    name, known_id, told, log = str(uuid4()), 0, 0, None
    for _ in range(_ROUNDS):
        log = read_log(storage, log)
        if log.head_id < max(known_id, last_marked(f.path for f in files)[0]):
            log = read_on(storage, log)
        try:
            needed = _find_needed(log, storage)
        except (NotFound, StorageUnavailable) as error:
            if read_log(storage, log).head_id != log.head_id:
                continue  # a newer commit dropped the checkpoint or replaced the output, and its clean-up deleted files
            if isinstance(error, StorageUnavailable):
                raise
            raise CorruptFile(
                f"nothing is deleted, because a manifest of a retained checkpoint is missing: {error}"
            ) from error
        plan = plan_sweep(files, log, needed, now_ms=now_ms, min_age_ms=min_age_ms)
        if dry_run or not plan.abandon:
            # `told` is the id with which an earlier pass of this loop tried to create the sweep's record, and the
            # storage did not report whether it wrote the file (`UnknownOutcome`); 0 without this case. If the log has a
            # record with this id and this sweep's uuid (`name`), the earlier pass did create the record.
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
            # Another writer has the id, or the storage did not report the outcome: the next round reads the log.
            # If no record has this id, the unreported create may still take effect, so raise the error.
            if isinstance(error, UnknownOutcome) and storage.stat(paths.record(record.id)) is None:
                raise
            known_id = record.id
            told = record.id if isinstance(error, UnknownOutcome) else told
            continue
        return plan, record
    raise StorageUnavailable(
        f"{storage.url}: nothing is deleted, because commits were faster than the sweep {_ROUNDS} times in a row; try again"
    )


def _find_needed(log: Log, storage: Storage) -> frozenset[str]:
    """Return every path that a record or a savepoint names."""
    named = {o.handle.path for _, outputs in log.current_outputs().values() for o in outputs}
    near = {n: log.entries[n] for n in {*log.retained, *log.summary.dropping}}
    named |= {h.path for entry in near.values() for h in handles_in(entry)}
    # The sweep keeps the files in `named`. The clean-up may still have to delete output files of a dropped commit,
    # since a later commit replaced this output. The clean-up gets their paths from the dropped commit's file in
    # `settled/commits/`. The same paths are added to `named`, so that only the clean-up deletes these files.
    shrunk = (e for n, e in near.items() if n in log.summary.dropping and isinstance(e, Tombstone))
    settled = (Fact(e.interval, e.id, e.kind) for e in shrunk if e.kind == "interval")
    named |= {h.path for fact in settled for h in handles_in(read_settled(storage, fact))}
    whole = [e for e in near.values() if isinstance(e, Record)]
    named |= {paths.prepared(record.content.attempt) for record in whole}
    # A checkpoint may be quarantined because its manifest is damaged. Such a manifest must not stop all sweeps.
    retained = [r.content for r in whole if r.id in log.retained and r.id not in log.quarantined]
    # A dropped checkpoint has a full record until a clean-up has deleted the checkpoint's files and made the record a
    # tombstone. A clean-up that stopped before may have deleted some manifests of the checkpoint. So `paths_in` accepts
    # that a manifest of a dropped checkpoint is missing.
    dropped = [r.content for r in whole if r.id not in log.retained or r.id in log.quarantined]
    # Look up the savepoint by name: a listing may miss files that were written some seconds ago.
    if storage.stat(paths.SAVEPOINT_RECORD) is not None:
        saved = record_codec.decode(storage.read(paths.SAVEPOINT_RECORD), paths.SAVEPOINT_RECORD, Savepoint)
        named |= {paths.SAVEPOINT_RECORD, *(h.path for h in handles_in(saved))}
        retained.append(saved.content)
    strict = {ref.manifest: ref for c in retained for ref in c.shards if ref.manifest is not None}
    loose = {ref.manifest: ref for c in dropped for ref in c.shards if ref.manifest is not None}

    def paths_in(handle: Handle) -> list[str]:
        """Return the paths of all files that the manifest file `handle` lists, so that the sweep keeps these files.

        A record may name the manifest file of an earlier checkpoint and the changes since (`FiledShard.changes`). The
        changes are ignored here, so the result may have segments that the record no longer uses.
        """
        ref = strict.get(handle) or loose[handle]
        try:
            manifest = manifest_of(replace(ref, changes=None), storage)
        except (NotFound, CorruptFile):
            if handle in strict:
                raise
            # Manifests that are not in `strict` belong to dropped checkpoints, whose files the sweep need not keep, or
            # to quarantined ones, which nobody can restore without the manifest.
            return []
        return [h.path for h in handles_in(manifest)]

    for found in at_once(paths_in, strict | loose):
        named.update(found)
    return frozenset(named)


def _delete(
    storage: Storage, files: Sequence[FileInfo], on_progress: Callable[[int, int], None] | None
) -> list[FileInfo]:
    """Delete files in parallel, and return those that this call deleted. After an error, no further deletion begins."""
    done = count(1)

    def delete(file: FileInfo) -> FileInfo | None:
        try:
            return file if delete_file(storage, file.path, generation=file.generation) else None
        except PreconditionFailed:  # the file was rewritten after the plan, so it stays
            return None
        finally:
            if on_progress is not None:
                on_progress(next(done), len(files))

    gone = [file for file in at_once(delete, files) if file is not None]
    leases = [f.path.removeprefix(paths.LEASES) for f in gone if paths.leased_id(f.path) is not None]
    if leases:
        note_names(storage, paths.LEASES, [], drop=leases)
    return gone


def _attempt_of(path: str) -> str | None:
    return paths.attempt_of(path) if paths.kind_of(path) in _OF_ATTEMPTS else None


def _ended(log: Log, asked: Collection[str]) -> set[str]:
    """Return every attempt that was committed or abandoned.

    A listing of settled files may be some seconds old, so the attempts in `asked` are looked up by name too.
    """
    if not log.head_id:
        return set()
    near = [log.entries[n] for n in sorted({log.head_id, *log.retained, *log.summary.dropping})]
    own = {attempt_of(e) for e in near if not isinstance(e, SweepRecord)}
    return own.union(log.entries.all_ended(asked), *(e.abandoned for e in near if isinstance(e, SweepRecord)))


def _outdated_marks(files: Sequence[FileInfo], log: Log) -> set[str]:
    """Return the paths of files in `published/` and `validated/` that are no longer needed.

    A file in `published/` says that an interval's output was published; it is not needed once a later commit has
    replaced the output. A file in `validated/` says that a checkpoint passed validation; it is not needed once the
    checkpoint is no longer retained.
    """
    # Sort by commit: so `dict(told)` has the last change of each interval's output.
    facts = sorted(log.facts(None), key=lambda f: (f.id, f.kind == "interval", f.interval))
    told = [(f.interval, f.id) for f in facts if f.kind in ("interval", "replaced")]
    validated = {f.path: mark[0] for f in files if (mark := paths.validated_id(f.path)) is not None}
    return {path for path, n in validated.items() if n <= log.head_id and n not in log.retained} | {
        paths.published(interval, n) for interval, n in {*told} - {*dict(told).items()}
    }


def _check_end_of_log(files: Sequence[FileInfo], log: Log) -> None:
    last, path = last_marked(f.path for f in files)
    if last > log.head_id:
        raise CorruptRecord(
            f"{paths.record(last)} is missing: {path} refers to checkpoint {last}, but the log ends at {log.head_id}\n"
            "Nothing is deleted, because the files of the missing record would be deleted too. Put the record back from a backup"
        )
