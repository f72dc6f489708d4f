"""Deletes what a dropped checkpoint leaves: files that no retained checkpoint, no current output and no reader needs.

Records that are no longer retained stay whole until their files are gone; then they become tombstones. What is on disk if this stops:
some files of a dropped checkpoint are gone, its record is still whole, and the next clean-up goes on. Nobody restores it meanwhile, since
what the newest record does not retain no later one does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from state_backend.checkpoint.append_record import create_settled
from state_backend.checkpoint.fresh_listing import listed_files
from state_backend.checkpoint.leases import delete_lease, plan_leases
from state_backend.checkpoint.log import Log, base_with_shared_marks, descriptors_hash, interval_of
from state_backend.checkpoint.parallel import at_once
from state_backend.checkpoint.record_reader import Fact, RecordReader, read_settled
from state_backend.checkpoint.summary import is_replaced
from state_backend.formats import paths, record_codec
from state_backend.ports.storage import DeletesMany, Storage
from state_backend.shard.manifest import manifest_of
from state_backend.values.errors import BehindLink, CorruptFile, CorruptRecord, NotFound, PreconditionFailed
from state_backend.values.handles import FileInfo, Handle
from state_backend.values.records import AttemptEnd, Content, OutputFile, Record, ShardRef, SweepRecord, Tombstone

logger = logging.getLogger("cairn")


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanUp:
    """What a clean-up removed; ``shrunk`` are the ids that became tombstones."""

    deleted_files: int
    shrunk: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed:
    """Files that stay: these ``paths``, and every state file that one of these ``attempts`` wrote."""

    paths: set[str]
    attempts: frozenset[str]

    def others(self, files: Iterable[str]) -> set[str]:
        """Those of the files that may go."""
        return {p for p in files if p not in self.paths and not self._is_state_of(p)}

    def _is_state_of(self, path: str) -> bool:
        return path.startswith(paths.SHARED) and paths.attempt_of(path) in self.attempts


def clean_up(storage: Storage, log: Log, read: Callable[[Log], Log]) -> CleanUp:
    """Deletes the files and shrinks the records. Continues what others began, and does nothing that a concurrent commit could miss.
    ``read``: the log as it is then, given the one that was read.

    Raises: CorruptFile if a manifest that says what is needed can't be read: nothing is deleted.
    """
    if not log.summary.dropping:
        return CleanUp(deleted_files=0, shrunk=())
    needed, log = needed_by_retained(storage, log, read)
    # After the log was read: whoever holds a lease made sure, with the lease there, that the checkpoint was still retained.
    leased, ended = leased_checkpoints(storage, log)
    for lease in ended:
        with suppress(PreconditionFailed):  # renewed at the last moment; its holder may find files gone all the same
            if not lease.behind_link:
                delete_lease(storage, lease.path, lease.generation)
    for record in leased.values():
        needed.paths.update(h.path for h in _state_files(record.content, storage, gone_before=True))
    waiting = [u for u in log.summary.unpublished if u.id in log.summary.dropping]
    unpublished = {u.id for u in waiting if storage.stat(paths.published(u.interval, u.id)) is None}
    deleted, shrunk = 0, []
    for checkpoint_id in log.summary.dropping:
        # Before the deletes: the generation says that it is still what was judged.
        info = storage.stat(paths.record(checkpoint_id))
        entry = RecordReader(storage, checkpoint_id).fresh(checkpoint_id)
        assert (
            info is not None
        )  # an entry that was read after the look was there when it was looked for: ids are never given twice
        if isinstance(entry, SweepRecord) or (isinstance(entry, Record) and checkpoint_id in unpublished):
            continue  # its sink hook needs the whole record; whoever publishes it cleans up after
        if checkpoint_id in leased:
            continue  # a later clean-up finds it again
        deleted += _collect(storage, log, entry, needed)
        if isinstance(entry, Record):
            with suppress(PreconditionFailed):  # somebody else shrank it
                tombstone = record_codec.encode(tombstone_of(entry))
                storage.replace(paths.record(entry.id), tombstone, generation=info.generation)
                shrunk.append(entry.id)
    return CleanUp(deleted_files=deleted, shrunk=tuple(shrunk))


def leased_checkpoints(storage: Storage, log: Log) -> tuple[dict[int, Record], list[FileInfo]]:
    """The dropped checkpoints that somebody still reads, by id, and the leases that have ended."""
    leases = listed_files(storage, paths.LEASES)
    head = storage.stat(paths.record(log.head_id)) if leases else None
    found, ended = plan_leases(leases, head.modified_ms if head is not None else 0)
    dropped = {n: RecordReader(storage, n).fresh(n) for n in found & {*log.summary.dropping}}
    return {n: entry for n, entry in dropped.items() if isinstance(entry, Record)}, ended


def needed_by_retained(storage: Storage, log: Log, read: Callable[[Log], Log]) -> tuple[Needed, Log]:
    """What the retained checkpoints need, and the log that says so: a newer one than ``log`` if a commit dropped a checkpoint
    meanwhile and its manifest is gone."""
    while True:
        try:
            return _needed(storage, log), log
        except (CorruptFile, CorruptRecord):
            newer = read(log)
            if newer.head_id == log.head_id:
                raise
            log = newer


def _needed(storage: Storage, log: Log) -> Needed:
    """Of an interval whose base is retained neither record nor manifest is read: it wrote each of its files itself, manifests too, or
    has it from its base. What it wrote itself, whoever has it has it from there."""
    intervals = [k for k in log.kept if k.kind == "interval" and k.base_id in log.retained]
    inner = {k.id for k in intervals}
    log.entries.load(k.id for k in log.kept if k.id not in inner)
    beginnings = [log.whole(k.id).content for k in log.kept if k.id not in inner]
    named = {h.path for content in beginnings for ref in content.shards for h in _named(ref)}
    named |= {h.path for h in _manifests_files(beginnings, storage)}
    return Needed(paths=named, attempts=frozenset(k.attempt for k in intervals))


def _named(ref: ShardRef) -> Iterable[Handle]:
    """What a record itself names of a shard's files."""
    if ref.manifest is not None:
        yield ref.manifest
    if ref.changes is not None:
        yield from (s.handle for s in ref.changes.segments if s.handle is not None)


def files_of(content: Content, storage: Storage, *, gone_before: bool = False) -> Iterable[Handle]:
    """State files, manifests and outputs of a checkpoint. ``gone_before``: as a clean-up that stopped may have left it,
    which may have taken a manifest, after all that it names; one that is damaged there hides nothing that anybody
    needs, only what the sweeper finds.

    Raises: CorruptFile if a manifest can't be read, since it hides what is needed, unless ``gone_before``.
    """
    yield from _state_files(content, storage, gone_before=gone_before)
    yield from (o.handle for o in (*content.outputs, *rewritten_outputs(content)))


def rewritten_outputs(content: Content) -> tuple[OutputFile, ...]:
    """Return the output files that a forget replaces those of other commits by."""
    rewritten = content.forget.rewritten if content.forget is not None else ()
    return tuple(output for one in rewritten for output in one.outputs)


def _state_files(content: Content, storage: Storage, *, gone_before: bool = False) -> Iterable[Handle]:
    for ref in content.shards:
        yield from _named(ref)
    yield from _manifests_files([content], storage, gone_before=gone_before)


def _manifests_files(contents: Iterable[Content], storage: Storage, *, gone_before: bool = False) -> list[Handle]:
    """What the manifests of these checkpoints name. One that several share is read once."""
    refs = [(ref, c) for c in contents for ref in c.shards]
    # An inline one is no read. Of one that lies in a file, a record may say that it has other segments since.
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
                f"the manifest of shard {ref.shard} of {content.interval} can't be read: {error}"
            ) from error

    return [handle for found in at_once(files, distinct.values()) for handle in found]


def _collect(storage: Storage, log: Log, entry: Record | Tombstone, needed: Needed) -> int:
    """Deletes the files of a commit that nobody needs; how many. How its attempt ended is written first, since its
    ``prepared.json`` goes, which leads there otherwise."""
    doomed: set[str] = set()
    if isinstance(entry, Record):
        create_settled(storage, AttemptEnd(attempt=entry.content.attempt, id=entry.id))
        doomed |= {h.path for h in _state_files(entry.content, storage, gone_before=True)}
        doomed.add(paths.prepared(entry.content.attempt))
    interval, path, settled = interval_of(entry), "", None
    if is_replaced(log, entry):
        path = paths.settled(interval, entry.id, "interval")
        info, settled = storage.stat(path), read_settled(storage, Fact(interval, entry.id, "interval"))
        doomed |= {o.handle.path for o in settled.outputs}
    deleted = delete_files(storage, needed.others(doomed))
    if settled is not None and info is not None and settled.outputs:
        with suppress(PreconditionFailed):  # somebody else did
            collected = replace(settled, outputs=(), collected=True)
            storage.replace(path, record_codec.encode(collected), generation=info.generation)
    return deleted


def delete_files(storage: Storage, doomed: set[str]) -> int:
    """Deletes files, many at a time; how many were there. Manifests go last: they name the others, should this stop half-way."""
    manifests = {path for path in doomed if path.endswith(".manifest")}
    if isinstance(storage, DeletesMany):
        return storage.delete_many([*sorted(doomed - manifests), *sorted(manifests)])
    delete = partial(delete_file, storage)
    return sum(sum(at_once(delete, sorted(some))) for some in (doomed - manifests, manifests))


def delete_file(storage: Storage, path: str, *, generation: int | None = None) -> bool:
    """As `Storage.delete`, but a file behind a symbolic link stays, with a warning: somebody moved it out of the root, and the clean-up
    of all other files must go on."""
    try:
        return storage.delete(path, generation=generation)
    except BehindLink as error:
        logger.warning("%s", error)
        return False


def tombstone_of(record: Record) -> Tombstone:
    """What stays of a record that is no longer retained."""
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
    )
