"""Read, claim and delete savepoints. At most one pipeline claims a savepoint, and only that pipeline deletes it.

A claim is the file `claimed.json` in the savepoint's folder. A restore that claims a savepoint creates the file before
it does anything else. A restore that stops after one of these steps leaves:

    claimed       no other pipeline restores the savepoint; the same pipeline may try again
    committed     the pipeline has its own files and no longer needs the savepoint; a repeated call deletes it
    deleting      savepoint.json is deleted first: the folder is no longer a savepoint. A repeated call deletes the rest
"""

from __future__ import annotations

from contextlib import suppress

from state_backend.formats import paths, record_codec
from state_backend.formats.types import parse_struct
from state_backend.ports.storage import Storage
from state_backend.shard.manifest import manifest_of, needed_manifest
from state_backend.state.layout import MAX_STATE_ID, TIMERS_NAME
from state_backend.values.errors import (
    AlreadyExists,
    CorruptRecord,
    NotFound,
    PreconditionFailed,
    RetryableError,
    UnknownOutcome,
    UsageError,
)
from state_backend.values.handles import handles_in
from state_backend.values.key_groups import check_parallelism, range_of
from state_backend.values.marks import Claim, Savepoint
from state_backend.values.records import Content, ShardManifest


def read_savepoint(storage: Storage) -> Savepoint:
    """Read and check the savepoint in the folder that `storage` opens."""
    where = f"{storage.url}/{paths.SAVEPOINT_RECORD}"
    try:
        data = storage.read(paths.SAVEPOINT_RECORD)
    except NotFound:
        claim = read_claim(storage)
        what = (
            f"{claim.owner} claimed it and has taken over its state" if claim else f"it has no {paths.SAVEPOINT_RECORD}"
        )
        raise UsageError(f"{storage.url} is not a savepoint: {what}") from None
    savepoint = record_codec.decode(data, where, Savepoint)
    problem = _problem(savepoint)
    if problem is not None:
        raise CorruptRecord(f"{where}: {problem}")
    return savepoint


def _problem(savepoint: Savepoint) -> str | None:
    """Return a sentence about a contradiction in the savepoint; None if there is none. Cairn never writes one."""
    content = savepoint.content
    try:
        check_parallelism(content.parallelism, content.max_parallelism)
        parse_struct(content.key_schema)
        for state in content.states:
            for version in state.versions:
                parse_struct(version.value)
    except UsageError as error:
        return str(error)
    names = [d.name for d in content.states]
    if (shared := shared_by_states(content)) is not None:
        return shared
    if any(not 1 <= d.state_id <= MAX_STATE_ID for d in content.states) or any(not d.versions for d in content.states):
        return f"a state has no schema, or its id is not from 1 to {MAX_STATE_ID}"
    shards = list(range(content.parallelism)) if savepoint.format == "native" else []
    if [ref.shard for ref in content.shards] != shards or (savepoint.format == "native" and savepoint.files):
        return f"a {savepoint.format} savepoint of {content.parallelism} shards lists {len(content.shards)} shards"
    for at, file in enumerate(savepoint.files):
        if file.state not in (*names, TIMERS_NAME) or not 0 <= file.shard < content.parallelism:
            return f"file {file.handle.path!r} belongs to state {file.state!r}, shard {file.shard}, which the savepoint lacks"
        if file.key_groups != range_of(file.shard, content.parallelism, content.max_parallelism):
            return f"file {file.handle.path!r} has {file.key_groups}, not those of shard {file.shard}"
        if at and file.shard < savepoint.files[at - 1].shard:
            return "its files are not in the order of their shards"
    return None


def shared_by_states(content: Content) -> str | None:
    """Return a sentence if two states, or a state and the timers, share a name or an id; else None."""
    states = content.states
    names = {TIMERS_NAME, *(d.name for d in states)}
    if len(names) == len(states) + 1 and len({d.state_id for d in states}) == len(states):
        return None
    return f"two states share a name or an id: {', '.join(f'{d.name} ({d.state_id})' for d in states)}"


def native_manifest(savepoint: Savepoint, shard: int, storage: Storage) -> ShardManifest:
    content = savepoint.content
    ref = next(ref for ref in content.shards if ref.shard == shard)
    manifest = needed_manifest(ref, storage)
    where = f"{storage.url}, manifest of shard {shard}"
    if manifest.shard != shard or manifest.key_groups != range_of(shard, content.parallelism, content.max_parallelism):
        raise CorruptRecord(f"{where}: the file belongs to shard {manifest.shard}, {manifest.key_groups}")
    return manifest


def read_claim(storage: Storage) -> Claim | None:
    """Return the claim by which one pipeline alone may restore and delete this savepoint; None without a claim."""
    try:
        data = storage.read(paths.CLAIM)
    except NotFound:
        return None
    return record_codec.decode(data, f"{storage.url}/{paths.CLAIM}", Claim)


def check_unclaimed(storage: Storage, owner: str) -> Claim | None:
    """Raise `UsageError` if a pipeline other than `owner` has claimed the savepoint. Else return the claim or None."""
    claim = read_claim(storage)
    if claim is not None and claim.owner != owner:
        raise UsageError(
            f"the savepoint {storage.url} was claimed by {claim.owner}, which may delete it at any time\n"
            f"Restore another savepoint. If that pipeline no longer exists, delete {paths.CLAIM} in the savepoint's folder"
        )
    return claim


def claim_savepoint(storage: Storage, claim: Claim) -> None:
    """Claim a savepoint for a pipeline. If several pipelines claim it at the same time, one of them succeeds.

    The same pipeline may claim the savepoint again; its new claim replaces the old claim.
    """
    data = record_codec.encode(claim)
    try:
        storage.create(paths.CLAIM, data)
        return
    except AlreadyExists:
        check_unclaimed(storage, claim.owner)
    # An earlier try of the same owner made this claim. Replace it, if no other process changes it at the same time.
    info = storage.stat(paths.CLAIM)
    try:
        if info is None:
            raise NotFound(f"{paths.CLAIM} in {storage.url} was deleted just now")
        storage.replace(paths.CLAIM, data, generation=info.generation)
    except (NotFound, PreconditionFailed) as error:
        raise UnknownOutcome(
            f"{storage.url}: another process claims this savepoint at the same time; try again: {error}"
        ) from error


def release_claim(storage: Storage, attempt: str) -> None:
    """Delete `claimed.json` from a savepoint's folder, so that another pipeline may restore the savepoint.

    A restore calls this after its attempt was fenced: the attempt can never be committed. If `claimed.json` names
    another attempt, the file stays. If the storage is unavailable, the file stays too, and the function raises no
    error: only the same pipeline can then restore the savepoint, and its next claim replaces the file.
    """
    with suppress(PreconditionFailed, RetryableError):
        info, claim = storage.stat(paths.CLAIM), read_claim(storage)
        if info is not None and claim is not None and claim.attempt == attempt:
            storage.delete(paths.CLAIM, generation=info.generation)


def delete_savepoint(storage: Storage, savepoint: Savepoint) -> int:
    """Delete the files of a claimed savepoint, and return how many existed.

    `claimed.json` stays, to name the pipeline that has the state now.
    """
    manifests = [manifest_of(ref, storage) for ref in savepoint.content.shards]
    handles = [f.handle for f in savepoint.files] + [f.handle for m in manifests for f in m.files]
    handles += [ref.manifest for ref in savepoint.content.shards if ref.manifest is not None]
    deleted = storage.delete(paths.SAVEPOINT_RECORD)
    return deleted + sum(storage.delete(handle.path) for handle in handles)


def remove_leftovers(storage: Storage, savepoint: Savepoint | None, of: str | None = None) -> int:
    """Delete files that earlier tries left in a savepoint's folder, and return how many existed.

    `of`: Id of the savepoint whose files are deleted, if another savepoint may be on its way into the folder.

    Readers of a folder of Parquet files read every file in it, so leftovers would appear as rows. Files that are not
    named like files of a savepoint belong to the folder's owner and stay. In a pipeline's folder all files stay, since
    state files have the same names.
    """
    found = [info.path for info in storage.list("") if not info.behind_link]
    if any(path.startswith(paths.CHECKPOINTS) for path in found):
        return 0
    named = {handle.path for handle in handles_in(savepoint)}
    found = [path for path in found if of is None or of in path.split("/")]
    return sum(storage.delete(path) for path in found if path not in named and paths.is_of_savepoint(path))
