"""Combine the results of all shards into `prepared.json`: the content of the record that a commit would create.

Every job that makes a checkpoint (an interval, a restore, an import, a consolidation) uses this module, so that totals,
digest and shard references are computed in one way. A process that stops before `prepared.json` is written leaves files
of the attempt that no record names; a sweep deletes them later.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Protocol, TypeVar

from state_backend.checkpoint.clean_up_dropped import rewritten_outputs
from state_backend.checkpoint.location import Location
from state_backend.checkpoint.prepared_attempts import create_prepared
from state_backend.formats import paths, record_codec
from state_backend.ports.storage import Storage
from state_backend.shard.manifest import INLINE_MANIFESTS_BYTES, plan_ref
from state_backend.values.errors import InvariantViolated
from state_backend.values.frozen import frozen
from state_backend.values.handles import Handle
from state_backend.values.key_groups import KeyGroupRange, check_whole
from state_backend.values.records import (
    Content,
    FiledShard,
    InlineShard,
    InSegment,
    OutputFile,
    Prepared,
    ShardChanges,
    ShardManifest,
    ShardRef,
    StateDescriptor,
    Totals,
)

_SST = ".sst"

# The totals of a content until `prepare` computes them from the results of the shards.
NO_TOTALS = Totals(
    input_rows=0,
    output_rows=0,
    late_rows=0,
    keys_touched=0,
    keys=0,
    entries=0,
    changed_bytes=0,
    uploaded_bytes=0,
    uploaded_files=0,
    state_bytes=0,
    state_files=0,
)


class OfShard(Protocol):
    """An object that a job returns for one shard, such as `ShardAck`: `by_shard` needs only the shard's number."""

    @property
    def shard(self) -> int:
        """The number of the shard, from 0."""


Ack = TypeVar("Ack", bound=OfShard)


def by_shard(acks: Sequence[Ack], parallelism: int) -> list[Ack]:
    """Return the acks in the order of shards, and check that each of the `parallelism` shards has exactly one."""
    ordered = sorted(acks, key=lambda ack: ack.shard)
    if [ack.shard for ack in ordered] != list(range(parallelism)):
        raise InvariantViolated(f"expected one ack of each of {parallelism} shards, got {[a.shard for a in ordered]}")
    return ordered


@frozen
class ShardSummary:
    """Facts about one shard's manifest that the checkpoint's totals need.

    With the summaries, the driver need not read the manifests of unchanged shards.
    """

    key_groups: KeyGroupRange
    entries: dict[str, int]
    digest: int
    size_bytes: int
    files: int


def summary_of(manifest: ShardManifest) -> ShardSummary:
    entries: Counter[str] = Counter()
    for group in manifest.key_group_states:
        entries.update(group.entries)
    return ShardSummary(
        key_groups=manifest.key_groups,
        entries=dict(entries),
        digest=manifest.digest,
        size_bytes=manifest.size_bytes,
        files=len(manifest.handles) + sum(f.name.endswith(_SST) for f in manifest.inline_files),
    )


@frozen
class ShardAck:
    """A shard's acknowledgement: the result of a job on the shard."""

    shard: int
    # The shard's new manifest; None if the shard did not change and its manifest in the base is still right.
    manifest: ShardManifest | None
    summary: ShardSummary
    durations_us: dict[str, int]
    pid: int = field(default_factory=os.getpid)
    uploaded_bytes: int = 0
    uploaded_files: int = 0
    downloaded_bytes: int = 0
    cached_bytes: int = 0
    # Difference between the new manifest and the manifest file that the base's record names. The new record then names
    # the same file and adds this difference, so that no new manifest file is written. None if the base's record names
    # no manifest file, or if the SSTs differ.
    changes: ShardChanges | None = None
    # In changelog mode, the job may append the new manifest to the file of the shard's newest segment. The place of the
    # manifest in that file; None if the manifest was not written there.
    in_segment: InSegment | None = None
    outputs: tuple[OutputFile, ...] = ()
    # The latest event time that was seen, in microseconds since the epoch; None if none was seen.
    newest_event_us: int | None = None
    input_rows: int = 0
    keys_touched: int = 0
    changed_bytes: int = 0
    # For each (state, field): how many values did not fit and were stored as NULL, and the first error message.
    mismatches: Mapping[tuple[str, str], tuple[int, str]] = field(default_factory=dict)


def mismatches_in_words(acks: Sequence[ShardAck]) -> list[str]:
    """Return a sentence for each field of a state where values that did not fit were stored as NULL."""
    counts: Counter[tuple[str, str]] = Counter()
    first: dict[tuple[str, str], str] = {}
    for ack in acks:
        for place, (count, message) in ack.mismatches.items():
            counts[place] += count
            first.setdefault(place, message)
    return [
        f"stored NULL for {count:,} values that do not fit; the first: {first[place]}"
        for place, count in sorted(counts.items())
    ]


def digest_of(acks: Sequence[ShardAck]) -> int:
    return sum(ack.summary.digest for ack in acks) % 2**64


def entries_of(acks: Sequence[ShardAck]) -> int:
    return sum(sum(ack.summary.entries.values()) for ack in acks)


def prepare(
    at: Location,
    made: Content,
    acks: Sequence[ShardAck],
    *,
    h0: int,
    base: Sequence[ShardRef] = (),
    first_task: int = 0,
) -> Prepared:
    """Write an attempt's `prepared.json`: `made`, completed from the acks. Write manifests that don't fit in as files.

    `h0`: The highest id in the log at the attempt's begin. `base`: The base's references to its shards, for those that
    did not change. `first_task`: The task number in the names of new manifest files.
    """
    check_whole([ack.summary.key_groups for ack in acks], made.max_parallelism)
    outputs = tuple(file for ack in acks for file in ack.outputs)
    content = replace(
        made,
        totals=_totals(acks, outputs, made.states),
        digest=digest_of(acks),
        shards=_refs(acks, base, made.attempt, at.storage, first_task),
        outputs=outputs,
        durations_us={**made.durations_us, **slowest(acks)},
        worker_pids=tuple(ack.pid for ack in acks),
    )
    prepared = Prepared(h0=h0, content=content, written=_written(content, acks))
    return create_prepared(at, prepared)


def _written(content: Content, acks: Sequence[ShardAck]) -> tuple[Handle, ...]:
    """Return every file of this attempt that the record needs.

    Files that are shared with earlier checkpoints are left out: the commits of these checkpoints verified them.
    """
    files = [h for ack in acks if ack.manifest is not None for h in ack.manifest.handles]
    files += [
        *(ref.manifest for ref in content.shards if ref.manifest is not None),
        *(o.handle for o in content.outputs),
        *(o.handle for o in rewritten_outputs(content)),
    ]
    return tuple(h for h in dict.fromkeys(files) if paths.attempt_of(h.path) == content.attempt)


def _refs(
    acks: Sequence[ShardAck], base: Sequence[ShardRef], attempt: str, storage: Storage, first_task: int
) -> tuple[ShardRef, ...]:
    """Return the record's reference to each shard: a manifest inline, or the handle of a manifest's file.

    New manifests that do not fit into the record are written to files. Files of unchanged shards are not read.
    """
    previous = {ref.shard: ref for ref in base}
    before = [previous.get(ack.shard) for ack in acks]
    known = [ack.manifest or (ref.inline if ref else None) for ack, ref in zip(acks, before, strict=True)]
    encoded = [record_codec.encode(m) if m is not None else b"" for m in known]
    if all(encoded) and sum(map(len, encoded)) <= INLINE_MANIFESTS_BYTES:
        return tuple(InlineShard(shard=m.shard, inline=m) for m in known if m is not None)
    refs = []
    for ack, ref, manifest, data in zip(acks, before, known, encoded, strict=True):
        kept = None
        if ref is not None and ref.manifest is not None and (ack.manifest is None or ack.changes is not None):
            kept = ref if ack.manifest is None else replace(ref, changes=ack.changes)
        new = kept if manifest is None else plan_ref(manifest, kept, len(acks))
        last = manifest.segments[-1].handle if manifest is not None and ack.in_segment is not None else None
        if new is None and last is not None:
            new = FiledShard(shard=ack.shard, manifest=last, in_segment=ack.in_segment)
        if new is None:
            handle = storage.create(paths.shared(attempt, ack.shard, first_task, 0, "manifest"), data)
            new = FiledShard(shard=ack.shard, manifest=handle)
        refs.append(new)
    return tuple(refs)


def _totals(acks: Sequence[ShardAck], outputs: Sequence[OutputFile], states: Sequence[StateDescriptor]) -> Totals:
    entries: Counter[str] = Counter()
    for ack in acks:
        entries.update(ack.summary.entries)
    return Totals(
        input_rows=sum(a.input_rows for a in acks),
        output_rows=sum(o.rows for o in outputs if not o.late),
        late_rows=sum(o.rows for o in outputs if o.late),
        keys_touched=sum(a.keys_touched for a in acks),
        keys=max((entries[d.name] for d in states if d.kind == "value"), default=0),
        entries=entries.total(),
        changed_bytes=sum(a.changed_bytes for a in acks),
        uploaded_bytes=sum(a.uploaded_bytes for a in acks),
        uploaded_files=sum(a.uploaded_files for a in acks),
        downloaded_bytes=sum(a.downloaded_bytes for a in acks),
        cached_bytes=sum(a.cached_bytes for a in acks),
        state_bytes=sum(a.summary.size_bytes for a in acks),
        state_files=sum(a.summary.files for a in acks),
    )


def slowest(acks: Sequence[ShardAck]) -> dict[str, int]:
    """Return the microseconds of each phase on the slowest shard.

    Shards run in parallel, so the slowest shard determines the job's duration.
    """
    return max((ack.durations_us for ack in acks), key=lambda phases: sum(phases.values()), default={})
