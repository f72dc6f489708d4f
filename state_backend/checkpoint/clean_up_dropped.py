"""Delete the files of dropped checkpoints that no retained checkpoint, no current output and no lease needs.

A dropped checkpoint's record stays whole until the files are deleted; then the record becomes a tombstone. If a
clean-up stops half-way, some files of a dropped checkpoint are deleted and its record is still whole; the next clean-up
continues. No reader restores such a checkpoint: once the newest record does not retain a checkpoint, no later record
retains it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from state_backend.checkpoint.append_record import create_settled, note_head
from state_backend.checkpoint.exchange_names import exchange, is_exchanged
from state_backend.checkpoint.fresh_listing import listed_files
from state_backend.checkpoint.leases import delete_lease, plan_leases
from state_backend.checkpoint.log import Log, base_with_shared_marks, descriptors_hash, interval_of, read_newest
from state_backend.checkpoint.parallel import at_once
from state_backend.checkpoint.record_reader import Fact, RecordReader, read_settled
from state_backend.checkpoint.summary import is_replaced
from state_backend.formats import paths, record_codec
from state_backend.ports.storage import DeletesMany, Storage
from state_backend.shard.manifest import manifest_of
from state_backend.values.errors import BehindLink, CorruptFile, CorruptRecord, NotFound, PreconditionFailed
from state_backend.values.frozen import frozen
from state_backend.values.handles import FileInfo, Handle
from state_backend.values.marks import AttemptEnd
from state_backend.values.records import Content, OutputFile, Record, ShardRef, SweepRecord, Tombstone

logger = logging.getLogger("cairn")


@frozen
class CleanUp:
    deleted_files: int
    # The ids of the records that became tombstones.
    shrunk: tuple[int, ...]


@frozen
class Needed:
    """The files that a clean-up must keep: the files in `paths`, and all state files of the `attempts`."""

    paths: set[str]
    attempts: frozenset[str]

    def others(self, files: Iterable[str]) -> set[str]:
        """Return those of the given paths that no retained checkpoint needs, so that the clean-up may delete them."""
        others = {*files} - self.paths
        return {p for p in others if not (p.startswith(paths.SHARED) and paths.attempt_of(p) in self.attempts)}


def clean_up(storage: Storage, after: Log | None = None) -> CleanUp:
    """Delete the files of dropped checkpoints, and turn their records into tombstones.

    A clean-up continues the work of an earlier clean-up that stopped. It is safe beside commits: an id that the newest
    record does not retain never comes back. So `after`, the log as the caller's own commit left it, may be old.
    """
    log = after or read_newest(storage)
    note_head(storage, log, log.head_id)
    if not log.summary.dropping:
        return CleanUp(deleted_files=0, shrunk=())
    needed, log = needed_by_retained(storage, log)
    # List the leases only after reading the log: a reader first writes its lease, then checks that its checkpoint is
    # retained. So a reader whose lease is missing from this listing sees that its checkpoint is dropped.
    leased, ended = leased_checkpoints(storage, log)
    for lease in ended:
        with suppress(PreconditionFailed):  # the reader renewed the lease after the listing
            if not lease.behind_link:
                delete_lease(storage, lease.path, lease.generation)
    for record in leased.values():
        needed.paths.update(h.path for h in _state_files(record.content, storage, gone_before=True))
    waiting = [u for u in log.summary.unpublished if u.id in log.summary.dropping]
    unpublished = {u.id for u in waiting if storage.stat(paths.published(u.interval, u.id)) is None}
    deleted, shrunk = 0, []
    for checkpoint_id in log.summary.dropping:
        # Take the generation before deleting files: the tombstone may replace only the record that was checked here.
        info = storage.stat(paths.record(checkpoint_id))
        entry = RecordReader(storage, checkpoint_id).fresh(checkpoint_id)
        assert info is not None  # no record is ever deleted, so an id of the log has a file
        # A sweep's record has no checkpoint. The sink call for an unpublished output still needs the whole record.
        if isinstance(entry, SweepRecord) or (isinstance(entry, Record) and checkpoint_id in unpublished):
            continue
        if checkpoint_id in leased:
            continue  # a later clean-up deletes the files, when the lease is over
        deleted += _collect(storage, log, entry, needed)
        if isinstance(entry, Record):
            with suppress(PreconditionFailed):  # another clean-up has already written the tombstone
                tombstone = record_codec.encode(tombstone_of(entry))
                storage.replace(paths.record(entry.id), tombstone, generation=info.generation)
                shrunk.append(entry.id)
    return CleanUp(deleted_files=deleted, shrunk=tuple(shrunk))


def try_clean_up(storage: Storage, after: Log | None = None) -> None:
    """Clean up after a commit. If a damaged file stops the clean-up, only log a warning: the commit is valid."""
    try:
        clean_up(storage, after)
    except CorruptFile as error:
        logger.warning(
            "%s: the clean-up deleted nothing, because Cairn can't tell which files are needed: %s", storage.url, error
        )


def leased_checkpoints(storage: Storage, log: Log) -> tuple[dict[int, Record], list[FileInfo]]:
    """Return the records, by id, of the dropped checkpoints that a lease protects, and the leases that have ended.

    Checkpoints whose records are tombstones already are left out: their files are deleted.
    """
    leases = listed_files(storage, paths.LEASES)
    head = storage.stat(paths.record(log.head_id)) if leases else None
    found, ended = plan_leases(leases, head.modified_ms if head is not None else 0)
    dropped = {n: RecordReader(storage, n).fresh(n) for n in found & {*log.summary.dropping}}
    return {n: entry for n, entry in dropped.items() if isinstance(entry, Record)}, ended


def needed_by_retained(storage: Storage, log: Log) -> tuple[Needed, Log]:
    """Return the files that the retained checkpoints need, and the log that names these checkpoints.

    If a manifest is missing because a newer commit dropped its checkpoint, the log is read again. Return the newer log.
    """
    while True:
        try:
            return _find_needed(storage, log), log
        except (CorruptFile, CorruptRecord):
            newer = read_newest(storage, log)
            if newer.head_id == log.head_id:
                raise
            log = newer


def _find_needed(storage: Storage, log: Log) -> Needed:
    """Return the needed files, reading few records and manifests.

    A checkpoint whose base is retained has two kinds of state files: files of its base, and files of its own attempt.
    The function keeps all state files of the attempt, so it need not read the checkpoint's record and manifests. It
    reads record and manifests of the other retained checkpoints. A quarantined checkpoint does not count as such a
    base, because its manifests may be damaged.
    """
    intervals = [
        k for k in log.kept if k.kind == "interval" and k.base_id in log.retained and k.base_id not in log.quarantined
    ]
    inner = {k.id for k in intervals}
    log.entries.load(k.id for k in log.kept if k.id not in inner)
    usable, refused = (
        [k for k in log.kept if k.id not in inner and (k.id in log.quarantined) is one] for one in (False, True)
    )
    beginnings = [log.whole(k.id).content for k in usable]
    # A checkpoint may be quarantined because its manifest is damaged. Such a manifest must not stop all deletions.
    damaged = [log.whole(k.id).content for k in refused]
    named = {h.path for content in (*beginnings, *damaged) for ref in content.shards for h in _list_named(ref)}
    named |= {h.path for h in _manifests_files(beginnings, storage)}
    named |= {h.path for h in _manifests_files(damaged, storage, gone_before=True)}
    return Needed(paths=named, attempts=frozenset(k.attempt for k in intervals))


def _list_named(ref: ShardRef) -> Iterable[Handle]:
    """Yield the files of a shard that the record itself names: the manifest's file, and segments added after it."""
    if ref.manifest is not None:
        yield ref.manifest
    if ref.changes is not None:
        yield from (s.handle for s in ref.changes.segments if s.handle is not None)


def files_of(content: Content, storage: Storage, *, gone_before: bool = False) -> Iterable[Handle]:
    """Yield all files of a checkpoint: state, manifests, output. `gone_before`: skip missing and damaged manifests."""
    yield from _state_files(content, storage, gone_before=gone_before)
    yield from (o.handle for o in (*content.outputs, *rewritten_outputs(content)))


def rewritten_outputs(content: Content) -> tuple[OutputFile, ...]:
    """Return the output files that a commit of `cairn erase` rewrote in place of earlier ones; empty for others."""
    rewritten = content.forget.rewritten if content.forget is not None else ()
    return tuple(output for one in rewritten for output in one.outputs)


def _state_files(content: Content, storage: Storage, *, gone_before: bool = False) -> Iterable[Handle]:
    for ref in content.shards:
        yield from _list_named(ref)
    yield from _manifests_files([content], storage, gone_before=gone_before)


def _manifests_files(contents: Iterable[Content], storage: Storage, *, gone_before: bool = False) -> list[Handle]:
    """Return the files that the checkpoints' manifests name. A manifest that several checkpoints share is read once."""
    refs = [(ref, c) for c in contents for ref in c.shards]
    # An inline manifest costs no read. Two records may name one manifest file but different segments added since. Each
    # combination of file and segments is therefore read once.
    distinct = {
        n if ref.manifest is None else (ref.manifest, ref.changes and ref.changes.segments): (ref, c)
        for n, (ref, c) in enumerate(refs)
    }

    def files(of: tuple[ShardRef, Content]) -> list[Handle]:
        ref, content = of
        try:
            return list(manifest_of(ref, storage).handles)
        except (NotFound, CorruptFile) as error:
            if gone_before:
                return []
            raise CorruptFile(
                f"can't read the manifest of shard {ref.shard} of the checkpoint of {content.interval}: {error}"
            ) from error

    return [handle for found in at_once(files, distinct.values()) for handle in found]


def _collect(storage: Storage, log: Log, entry: Record | Tombstone, needed: Needed) -> int:
    """Delete the files of a dropped commit that are not needed, and return how many were deleted.

    The function first writes the attempt's file in `settled/attempts/`. Since `prepared.json` is deleted too, only this
    file tells a late retry that the attempt was committed.
    """
    doomed: set[str] = set()
    if isinstance(entry, Record):
        create_settled(storage, AttemptEnd(attempt=entry.content.attempt, id=entry.id))
        doomed |= {h.path for h in _state_files(entry.content, storage, gone_before=True)}
        doomed.add(paths.prepared(entry.content.attempt))
        # The exchange may have stopped. Only the record of the `cairn erase` names the new files that are not current.
        if not is_exchanged(storage, entry.content):
            doomed.update(*exchange(storage, entry.content))
        if entry.id in log.quarantined:  # only a refused checkpoint has rows that failed an expectation
            doomed |= {info.path for info in storage.list(paths.failing_of(entry.content.attempt))}
    interval, path, settled = interval_of(entry), "", None
    if is_replaced(log, entry):
        path = paths.settled(interval, entry.id, "interval")
        info, settled = storage.stat(path), read_settled(storage, Fact(interval, entry.id, "interval"))
        doomed |= {o.handle.path for o in settled.outputs}
    deleted = delete_files(storage, needed.others(doomed))
    if settled is not None and info is not None and settled.outputs:
        with suppress(PreconditionFailed):  # another clean-up marked the output as deleted
            collected = replace(settled, outputs=(), collected=True)
            storage.replace(path, record_codec.encode(collected), generation=info.generation)
    return deleted


def delete_files(storage: Storage, doomed: set[str]) -> int:
    """Delete files, and return how many existed.

    Manifests are deleted last: they name the other files, which the next clean-up must find if this clean-up stops.
    """
    manifests = {path for path in doomed if path.endswith(".manifest")}
    if isinstance(storage, DeletesMany):
        return storage.delete_many([*sorted(doomed - manifests), *sorted(manifests)])
    delete = partial(delete_file, storage)
    return sum(sum(at_once(delete, sorted(some))) for some in (doomed - manifests, manifests))


def delete_file(storage: Storage, path: str, *, generation: int | None = None) -> bool:
    """Delete a file as `Storage.delete` does, but keep a file behind a symbolic link and log a warning.

    The link shows that a person moved the folder out of the root. An error would stop the clean-up of all other files.
    """
    try:
        return storage.delete(path, generation=generation)
    except BehindLink as error:
        logger.warning("%s", error)
        return False


def tombstone_of(record: Record) -> Tombstone:
    content = record.content
    return Tombstone(
        id=record.id,
        kind=content.kind,
        interval=content.interval,
        run=content.run,
        attempt=content.attempt,
        base_id=base_with_shared_marks(record),
        digest=content.digest,
        watermark_ms=content.time.watermark_ms,
        late_watermark_ms=content.time.late_watermark_ms,
        descriptors_hash=descriptors_hash(content),
        reproduces=record.reproduces,
        outputs=content.outputs,
        replace_overlapping=content.permissions.replace_overlapping,
        input_hash=content.input_hash,
        inputs=content.inputs,
        rewritten=record.rewritten,
    )
