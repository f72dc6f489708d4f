"""Verify the files on the storage against the log: by metadata only (fast), or by a restore of every shard (deep).

Fast: every record, every manifest, and every mark (a file in `quarantine/`, `validated/` or `published/` about one
checkpoint) is read and checked. Every file that a record names is compared with one listing by size, and by crc32c if
the listing has checksums. Some storages tell a file's checksum only by a request for each file: the fast verification
sends these requests if the caller wishes. Deep: every file is also downloaded and compared with its handle. Every shard
is restored into an empty folder, and its entries are compared with the counts and digests of their key groups.

`verify_files` checks one checkpoint or savepoint before it is used or published. It does what the fast verification
does, and also asks for the checksum of every file, or reads the file if the storage keeps none. It decodes no entry: if
a file and its recorded checksum were both changed, it finds nothing.

The log is read before the files are listed, so that a commit or a drop during the verification causes no finding.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from state_backend.adapters.rocks import EngineOptions
from state_backend.checkpoint.choose_base import intervals_of, plan_base
from state_backend.checkpoint.dropped_checkpoint import telling_drops
from state_backend.checkpoint.end_of_log import missing_records
from state_backend.checkpoint.log import Log, read_log, read_whole_log
from state_backend.checkpoint.newest_state import newest_of, valid_states
from state_backend.checkpoint.parallel import at_once
from state_backend.checkpoint.savepoints import shared_by_states
from state_backend.checkpoint.settled_files import lost_findings
from state_backend.formats import paths, record_codec
from state_backend.ports.storage import Storage, TellsChecksums
from state_backend.shard.manifest import manifest_of
from state_backend.shard.restore import restore_shard
from state_backend.state.check_shard import verify_shard
from state_backend.state.layout import MAX_STATE_ID, TIMERS_NAME
from state_backend.values.errors import (
    CairnError,
    CorruptFile,
    CorruptRecord,
    NotFound,
    Rerun,
    StateUnusable,
    StorageError,
    UnsupportedFormat,
)
from state_backend.values.frozen import frozen
from state_backend.values.handles import FileInfo, Handle, handles_in
from state_backend.values.intervals import Interval, format_instant, from_ms
from state_backend.values.key_groups import check_whole, range_of
from state_backend.values.marks import (
    AttemptEnd,
    CanonicalFile,
    Head,
    Lease,
    Names,
    Published,
    Quarantine,
    Refused,
    Released,
    Settled,
    Validated,
)
from state_backend.values.records import (
    Content,
    Kept,
    Permissions,
    Prepared,
    Record,
    ShardManifest,
    SweepRecord,
    Tombstone,
)

# For each kind of JSON file (`paths.kind_of`): the types of its content, and a function that returns its path.
_DECODED: Mapping[str, tuple[tuple[type, ...], Callable[[Any], str]]] = {
    "record": ((Record, SweepRecord, Tombstone), lambda found: paths.record(found.id)),
    "quarantine": ((Quarantine, Released), lambda found: paths.quarantine(found.id)),
    "published": ((Published,), lambda found: paths.published(found.interval, found.id)),
    "validated": ((Validated,), lambda found: paths.validated(found.id, found.mode)),
    "prepared": ((Prepared,), lambda found: paths.prepared(found.content.attempt)),
    "refused": ((Refused,), lambda found: paths.refused(found.attempt)),
    "settled": ((Settled,), lambda found: paths.settled(found.interval, found.id, found.kind)),
    "attempt-end": ((AttemptEnd,), lambda found: paths.attempt_end(found.attempt)),
    "names": ((Names,), lambda found: paths.names(found.folder)),
    "lease": ((Lease,), lambda found: paths.lease(found.id, found.seconds, found.lease)),
    "head": ((Head,), lambda found: paths.HEAD),
}

_READERS = 8


@frozen
class VerifiedCheckpoint:
    id: int
    entries: int
    findings: tuple[str, ...]


@frozen
class Verification:
    findings: tuple[str, ...]
    checkpoints: tuple[VerifiedCheckpoint, ...]
    unknown: tuple[str, ...] = ()
    # The newest state among the checkpoints without findings; None without one, or if the log can't be read.
    newest_intact: Kept | None = None
    without_checksum: int = 0

    @property
    def success(self) -> bool:
        return not self.findings and not any(c.findings for c in self.checkpoints)


def verify_pipeline(
    storage: Storage,
    *,
    which: Collection[int] | None = None,
    work: Path | None = None,
    checksums: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> Verification:
    """Verify a pipeline's log and those of its retained checkpoints that `which` names; None: all.

    `work`: A folder for restores: verify deep; None: fast. `checksums`: Ask for each file's checksum. Problems are
    returned as findings that name the file. Only an unreachable storage raises an error.
    """
    log, findings = _verified_log(storage)
    files = {info.path: info for info in storage.list("")}
    without = 0
    if checksums:
        asked = _with_checksums(storage, [i for p, i in files.items() if p.startswith((paths.SHARED, paths.OUTPUT))])
        without = sum(info.crc32c is None for info in asked.values())
        files |= asked
    unknown = tuple(path for path in files if paths.kind_of(path) is None)
    findings += [*_marks(storage, files), *missing_records(storage, files)]
    if log is None:
        return Verification(findings=tuple(dict.fromkeys(findings)), checkpoints=(), unknown=unknown)
    findings += _lost_marks(storage, log)
    lost = [*lost_findings(storage, log, files)]
    findings += lost or _outputs(storage, log, files, work)
    checkpoints, verified_shards = [], 0
    wanted = [record for record in log.completed() if which is None or record.id in which]
    shards = sum(len(record.content.shards) for record in wanted)
    for record in wanted:
        verified = _checkpoint(record, storage, files, work, _plus(verified_shards, shards, on_progress))
        verified_shards += len(record.content.shards)
        if verified.findings and record.id not in read_log(storage).retained:
            # A clean-up dropped the checkpoint and deleted its files during the verification.
            continue
        checkpoints.append(verified)
    newest_intact, intact = None, {c.id for c in checkpoints if not c.findings}
    with suppress(CorruptRecord):  # `findings` has the lost record
        newest_intact = newest_of(kept for kept in valid_states(log) if kept.id in intact)
    return Verification(
        findings=tuple(dict.fromkeys(findings)),
        checkpoints=tuple(checkpoints),
        unknown=unknown,
        newest_intact=newest_intact,
        without_checksum=without,
    )


def _plus(before: int, total: int, on_progress: Callable[[int, int], None] | None) -> Callable[[int], None]:
    return (lambda done: None) if on_progress is None else lambda done: on_progress(before + done, total)


def _lost_marks(storage: Storage, log: Log) -> Iterator[str]:
    """Yield a finding for each quarantine mark that the newest record lists but that is missing.

    The mark of a released checkpoint does not count in `log.quarantined`, but its file exists.
    """
    for checkpoint_id in sorted({*log.summary.marks} - log.quarantined.keys()):
        if storage.stat(paths.quarantine(checkpoint_id)) is None:
            yield (
                f"{paths.quarantine(checkpoint_id)} is missing: checkpoint {checkpoint_id} was quarantined, but counts as usable now\n"
                "Put the file back from a backup"
            )


def _outputs(storage: Storage, log: Log, files: Mapping[str, FileInfo], work: Path | None) -> list[str]:
    """Return a finding for each missing or damaged output file of a dropped checkpoint, and for overlapping outputs.

    Output of a dropped checkpoint may still be current. That of retained ones is verified with their state.
    """
    try:
        current = sorted(log.current_outputs().items())
        findings = [
            f"output of {interval}, checkpoint {checkpoint_id}: {finding}"
            for interval, (checkpoint_id, outputs) in current
            if checkpoint_id not in log.retained
            for finding in _files(storage, [o.handle for o in outputs], files, work)
        ]
    except (CorruptRecord, UnsupportedFormat) as error:
        return [str(error)]
    # Readers of two outputs that overlap get the same rows twice.
    return findings + [
        f"output of {before}, checkpoint {n}, and of {interval}, checkpoint {other}, overlap\n"
        "Run one of them again with replace_overlapping"
        for (before, (n, _)), (interval, (other, _)) in pairwise(current)
        if before.overlaps(interval)
    ]


def intact_before(storage: Storage, damaged: Content) -> Record | None:
    """Return the newest intact checkpoint before the damaged checkpoint's interval; None if there is none.

    The checkpoint ends no later than that interval starts. It is neither stale nor quarantined, and the fast
    verification finds no problem in it.
    """
    log, files = read_log(storage), {info.path: info for info in storage.list("")}
    ends = {r.content.interval.end for r in log.completed() if r.content.interval.end <= damaged.interval.start}
    for end in sorted(ends, reverse=True):
        following = Interval(end, end + (damaged.interval.end - damaged.interval.start))
        # `plan_base` raises an error for a stale or quarantined checkpoint.
        with suppress(StateUnusable):
            # Only the state matters here, so output of overlapping intervals must not be a reason to refuse.
            allowed = Permissions(replace_overlapping=True)
            base = plan_base(log, damaged.pipeline, following, allowed, damaged.pipeline_start_ms)
            if base is not None and not _checkpoint(base, storage, files, None, lambda _: None).findings:
                return base
    return None


@contextmanager
def offering_intact(storage: Storage, restored: Record | None) -> Iterator[None]:
    """Add advice to a `CorruptFile` that the block raises while it restores a checkpoint.

    The advice names the checkpoint that can be restored instead. `restored` is the checkpoint that the block restores;
    None for empty state.
    """
    try:
        with telling_drops(storage, restored.id if restored is not None else None):
            yield
    except CorruptFile as error:
        try:
            offer, again = _offer(storage, restored)
        except CairnError as problem:
            offer, again = f"Cairn can't tell now whether another checkpoint is intact: {problem}", None
        raise type(error)(f"{error}\n{offer}", rerun=again) from error


def _offer(storage: Storage, damaged: Record | None) -> tuple[str, Rerun | None]:
    if damaged is None:
        return "Put the file back from a backup, then try again", None
    content, sound = damaged.content, intact_before(storage, damaged.content)
    start = sound.content.interval.end if sound is not None else from_ms(content.pipeline_start_ms)
    again = Rerun(first=start, last=max(start, content.interval.start))
    text = (
        f"This file is needed to restore checkpoint {damaged.id}, the state at {format_instant(content.interval.end)}. "
    )
    if sound is None:
        text += "No earlier checkpoint is intact. Put the file back from a backup, restore a savepoint, or begin at the pipeline's start"
    else:
        text += (
            f"By a quick check, the newest intact checkpoint before it is {sound.id}, the state at {format_instant(start)}. "
            "Put the file back from a backup, or start from that checkpoint again"
        )
    return f"{text}: run {intervals_of(again)}", again


@frozen
class VerifiedFiles:
    files: int
    size_bytes: int
    findings: tuple[str, ...]


def verify_files(
    content: Content, storage: Storage, *, work: Path, savepoint: Sequence[CanonicalFile] | None = None
) -> VerifiedFiles:
    """Verify that the files of a checkpoint or savepoint match their recorded sizes and checksums.

    The record's states, shards, key-group ranges, counts and digests are compared with those of the manifests, and the
    digests of all key groups must sum up to the recorded digest. Problems are returned as findings. Only an unreachable
    storage raises an error.

    `savepoint`: The canonical files of a savepoint, empty for a native one; None for a checkpoint. The number of
    bytes in a savepoint's record is not checked, because it is copied from the checkpoint.
    """
    findings, canonical = [*_contradictions(content)], savepoint or ()
    manifests, damaged = _manifests(content, storage)
    handles = dict.fromkeys([*handles_in(content), *handles_in(tuple(manifests)), *(f.handle for f in canonical)])
    folders = sorted({f"{handle.path.rpartition('/')[0]}/" for handle in handles})
    listed = {info.path: info for folder in folders for info in storage.list(folder)}
    # A listing of a network disk may be some seconds old. So a file that the listing lacks is looked up by its path.
    missing = at_once(storage.stat, [handle.path for handle in handles if handle.path not in listed])
    listed |= {info.path: info for info in missing if info is not None}
    listed |= _with_checksums(storage, [listed[h.path] for h in handles if h.path in listed])
    wrong = {h: finding for h in handles if (finding := _check_listed(h, listed.get(h.path))) is not None}
    unread = [h for h in handles if h not in wrong and listed[h.path].crc32c is None]
    with ThreadPoolExecutor(_READERS, thread_name_prefix="verify") as pool:
        read = pool.map(lambda at: _check_downloaded(unread[at], storage, work / str(at)), range(len(unread)))
        wrong |= {h: finding for h, finding in zip(unread, read, strict=True) if finding is not None}
    findings += [*(wrong[h] for h in handles if h in wrong), *damaged]
    if canonical or not content.shards:
        rows = sum(f.rows for f in canonical)
        if rows != content.totals.entries:
            findings.append(f"the files have {rows} rows, but {content.totals.entries} are recorded")
    elif not damaged:
        findings += _sums(content, manifests)
        found_bytes = sum(m.size_bytes for m in manifests)
        if savepoint is None and found_bytes != content.totals.state_bytes:
            findings.append(
                f"bytes of state: the record says {content.totals.state_bytes}, its shards have {found_bytes}"
            )
    return VerifiedFiles(
        files=len(handles), size_bytes=sum(h.size_bytes for h in handles), findings=tuple(dict.fromkeys(findings))
    )


def _verified_log(storage: Storage) -> tuple[Log | None, list[str]]:
    try:
        return read_whole_log(storage), []
    except (CorruptRecord, UnsupportedFormat) as error:
        return None, [str(error)]


def _marks(storage: Storage, files: Mapping[str, FileInfo]) -> Iterator[str]:
    """Yield a finding for each JSON file that can't be decoded, or whose content belongs to another path."""
    for path in files:
        known = _DECODED.get(paths.kind_of(path) or "")
        if known is None:
            continue
        types, path_of = known
        try:
            found: Any = record_codec.decode(storage.read(path), path, *types)
        except NotFound:
            # A clean-up deleted the file after the listing. The file is no record, since records are never deleted.
            continue
        except (CorruptRecord, UnsupportedFormat) as error:
            rebuilt = (
                "\nThe file is only a hint: the next commit or sweep writes it again" if path == paths.HEAD else ""
            )
            yield f"{error}{rebuilt}"
            continue
        if (name := path_of(found)) != path:
            yield f"{path}: its content belongs to {name}"


def _files(
    storage: Storage, handles: Iterable[Handle], files: Mapping[str, FileInfo], work: Path | None
) -> Iterator[str]:
    """Yield a finding for each file that is missing or differs from its handle.

    Sizes and checksums are compared with the listing `files`. With a `work` folder, each file is also downloaded.
    """
    for handle in dict.fromkeys(handles):
        # The listing may be some seconds old, so a file that the listing lacks is looked up by its path.
        finding = _check_listed(handle, files.get(handle.path) or storage.stat(handle.path))
        if finding is None and work is not None:
            finding = _check_downloaded(handle, storage, work / "file")
        if finding is not None:
            yield finding


def _check_listed(handle: Handle, info: FileInfo | None) -> str | None:
    if info is None:
        return f"{handle.path} is missing"
    if info.size_bytes != handle.size_bytes:
        return f"{handle.path}: expected {handle.size_bytes} bytes, found {info.size_bytes}"
    if info.crc32c not in (None, handle.crc32c):
        return f"{handle.path}: expected crc32c {handle.crc32c:08x}, found {info.crc32c:08x}"
    return None


def _with_checksums(storage: Storage, files: Iterable[FileInfo]) -> dict[str, FileInfo]:
    """Return, by path, the files that the listing gave without a checksum, with the checksum that the storage tells."""
    unknown = [info for info in files if info.crc32c is None] if isinstance(storage, TellsChecksums) else []
    told = at_once(lambda info: cast(TellsChecksums, storage).checksum(info.path), unknown)
    return {info.path: replace(info, crc32c=crc32c) for info, crc32c in zip(unknown, told, strict=True)}


def _check_downloaded(handle: Handle, storage: Storage, local: Path) -> str | None:
    try:
        storage.download(handle, local)
    except (StateUnusable, NotFound) as error:
        return str(error)
    local.unlink()
    return None


def _checkpoint(
    record: Record, storage: Storage, files: Mapping[str, FileInfo], work: Path | None, on_shard: Callable[[int], None]
) -> VerifiedCheckpoint:
    content = record.content
    findings = [*_files(storage, (o.handle for o in content.outputs), files, work)]
    manifests, damaged = _manifests(content, storage)
    findings += [*damaged, *_contradictions(content)]
    entries, refs = 0, {ref.shard: ref for ref in content.shards}
    on_shard(0)
    for done, manifest in enumerate(manifests, 1):
        handles = [*handles_in(refs.get(manifest.shard)), *handles_in(manifest)]
        wrong = [*_files(storage, handles, files, None)]
        if not wrong and work is not None:
            walked, wrong = _walk(manifest, content, storage, work)
            entries += walked
            # A restore stops at the first damaged file. A download of each file finds the other damaged files too.
            wrong = [*_files(storage, handles, files, work)] or wrong if wrong and not walked else wrong
        findings += wrong
        on_shard(done)
    if not damaged:
        findings += _sums(content, manifests)
    return VerifiedCheckpoint(id=record.id, entries=entries, findings=tuple(dict.fromkeys(findings)))


def _manifests(content: Content, storage: Storage) -> tuple[list[ShardManifest], list[str]]:
    """Return the readable manifests, and a finding for each manifest that can't be read."""
    manifests, findings = [], []
    for ref in content.shards:
        try:
            manifests.append(manifest_of(ref, storage))
        except (StateUnusable, UnsupportedFormat, NotFound) as error:
            path = ref.manifest.path if ref.manifest is not None else "inline"
            findings.append(f"manifest of shard {ref.shard}, {path}: {error}")
    return manifests, findings


def _walk(manifest: ShardManifest, content: Content, storage: Storage, work: Path) -> tuple[int, list[str]]:
    directory = work / f"shard-{manifest.shard}"
    try:
        restored = restore_shard(manifest.key_groups, [manifest], storage, directory, EngineOptions())
    except (StateUnusable, StorageError, UnsupportedFormat) as error:
        return 0, [f"shard {manifest.shard}: {error}"]
    try:
        return verify_shard(restored.store, manifest, content.states, content.key_schema, content.max_parallelism)
    finally:
        restored.store.close()
        shutil.rmtree(directory, ignore_errors=True)


def _contradictions(content: Content) -> Iterator[str]:
    """Yield a finding for each impossible declaration of a state, such as two states with one name or id."""
    if (shared := shared_by_states(content)) is not None:
        yield shared
    for descriptor in content.states:
        versions = [v.version for v in descriptor.versions]
        if not versions or versions != sorted({*versions}) or not 1 <= descriptor.state_id <= MAX_STATE_ID:
            yield f"state {descriptor.name!r} has an invalid id or schema versions: id {descriptor.state_id}, versions {versions}"


def _sums(content: Content, manifests: Sequence[ShardManifest]) -> Iterator[str]:
    """Yield a finding for each contradiction between the record's shards, counts and digest and the manifests."""
    shards = [*range(content.parallelism)]
    if [ref.shard for ref in content.shards] != shards:
        yield f"the record has shards {[ref.shard for ref in content.shards]}, but its parallelism is {content.parallelism}"
    try:
        check_whole([m.key_groups for m in manifests], content.max_parallelism)
    except StateUnusable as error:
        yield str(error)
    names = {TIMERS_NAME, *(d.name for d in content.states)}
    keys = dict.fromkeys((d.name for d in content.states if d.kind == "value"), 0)
    for ref, manifest in zip(content.shards, manifests, strict=True):
        owned = manifest.key_groups
        if manifest.shard != ref.shard:
            yield f"shard {ref.shard} has the manifest of shard {manifest.shard}"
        elif ref.shard in shards and owned != range_of(ref.shard, content.parallelism, content.max_parallelism):
            yield f"shard {ref.shard} of {content.parallelism} has the wrong key groups: {owned.first} to {owned.last}"
        groups = [s.key_group for s in manifest.key_group_states]
        if groups != sorted({*groups}) or any(g not in owned for g in groups):
            yield f"shard {manifest.shard} has key groups {owned.first} to {owned.last}, but counts entries of {groups}"
        for state in manifest.key_group_states:
            if not state.entries or min(state.entries.values()) < 1 or not state.entries.keys() <= names:
                yield f"shard {manifest.shard}: key group {state.key_group} has invalid counts of entries: {state.entries}"
            for name in keys.keys() & state.entries.keys():
                keys[name] += state.entries[name]
    totals = content.totals
    for what, recorded, found in (
        ("entries", totals.entries, sum(m.entries for m in manifests)),
        ("digest", content.digest, sum(m.digest for m in manifests) % 2**64),
        ("keys", totals.keys, max(keys.values(), default=0)),
    ):
        if recorded != found:
            yield f"{what}: the record says {recorded}, its shards have {found}"
