"""Make the acknowledgement of a job on one shard. This module needs no Spark, because `cairn erase` uses it too."""

from __future__ import annotations

from dataclasses import replace

from state_backend.checkpoint.prepare_content import ShardAck, summary_of
from state_backend.shard.restore import RestoredShard
from state_backend.shard.snapshot import Snapshot
from state_backend.values.errors import InvariantViolated
from state_backend.values.records import ShardManifest


def ack_of(
    shard: int,
    snapshot: Snapshot | None,
    base: ShardManifest | None,
    durations_us: dict[str, int],
    restored: RestoredShard | None = None,
) -> ShardAck:
    """Return the acknowledgement of a shard.

    `snapshot`: The uploaded files; None if the shard has not changed and keeps its manifest `base`. `restored`: Counts
    the downloads; None without a restore.
    """
    manifest = base if snapshot is None else snapshot.manifest
    if manifest is None:
        raise InvariantViolated(f"shard {shard} did not change, and has no manifest in the base")
    ack = ShardAck(shard=shard, manifest=None, summary=summary_of(manifest), durations_us=durations_us)
    if restored is not None:
        ack = replace(ack, downloaded_bytes=restored.downloaded_bytes, cached_bytes=restored.cached_bytes)
    if snapshot is None:
        return ack
    return replace(
        ack,
        manifest=manifest,
        uploaded_bytes=snapshot.uploaded_bytes,
        uploaded_files=snapshot.uploaded_files,
        changes=snapshot.changes,
        in_segment=snapshot.in_segment,
    )
