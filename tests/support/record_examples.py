"""A record of a checkpoint with each of its fields, and one value of each kind that files of the log hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from state_backend.values.handles import Handle
from state_backend.values.key_groups import KeyGroupRange
from state_backend.values.marks import CanonicalFile, Claim, Published, Quarantine, Savepoint
from state_backend.values.records import (
    FiledShard,
    InlineShard,
    OutputFile,
    Prepared,
    Record,
    Retained,
    Segment,
    ShardChanges,
    ShardManifest,
    SweepRecord,
    Tombstone,
)
from tests.support.checkpoints import content, day, manifest, record, run

HANDLE = Handle(path="shared/a/0-0-0.sst", size_bytes=7, crc32c=2**32 - 1)
SEGMENTS = (
    Segment(handle=replace(HANDLE, path="shared/a/0-0-0.log"), data=None, changes=2, content_bytes=9),
    Segment(handle=None, data=b"\x00\xff", changes=0, content_bytes=0),
)
MANIFEST = replace(manifest([HANDLE], digest=2**64 - 1), segments=SEGMENTS)
SHARDS = (
    InlineShard(shard=0, inline=MANIFEST),
    FiledShard(
        shard=1,
        manifest=replace(HANDLE, path="shared/a/1-0-0.manifest"),
        changes=ShardChanges(segments=SEGMENTS, key_group_states=MANIFEST.key_group_states),
    ),
)
OUTPUTS = (OutputFile(handle=replace(HANDLE, path="output/i/a/part-0.parquet"), rows=3, schema_version=2),)
SCHEMA = {"type": "struct", "fields": [{"name": "ä", "type": "long", "nullable": True, "metadata": {"default": -1}}]}
RECORD = replace(
    record(
        2, day(2), 1, parallelism=2, shards=SHARDS, outputs=OUTPUTS, source_position={"näme": [1, 2.5, None, "\u2028"]}
    ),
    output_schemas=(SCHEMA, SCHEMA),
)
VALUES: list[Any] = [
    RECORD,
    record(1, day(1)),
    SweepRecord(
        id=3, retained=(Retained(id=1, stale_by=2),), sweep="s", abandoned=("a", "b"), summary=record(1, day(1)).summary
    ),
    Tombstone(
        id=1,
        kind="interval",
        interval=day(1),
        run=run(),
        attempt="a",
        base_id=None,
        digest=2**64 - 1,
        watermark_ms=-5,
        late_watermark_ms=-6,
        descriptors_hash="ab",
        reproduces=None,
        outputs=OUTPUTS,
    ),
    Prepared(h0=0, content=content(day(1), "a", parallelism=2, shards=SHARDS, output_schema=SCHEMA)),
    manifest([HANDLE]),
    Quarantine(id=1, reason='it "lies"', findings=("x",)),
    Published(id=1, interval=day(1)),
    Savepoint(savepoint="s", format="native", checkpoint_id=1, content=content(day(1), "a")),
    Savepoint(
        savepoint="s",
        format="canonical",
        checkpoint_id=1,
        content=content(day(1), "a"),
        files=(
            CanonicalFile(
                state="ä/b",
                shard=0,
                key_groups=KeyGroupRange(first=0, last=15),
                handle=replace(HANDLE, path="s/state-%C3%A4%2Fb/00000-7-0.parquet"),
                rows=5,
            ),
        ),
    ),
    Claim(savepoint="s", owner="file:///root/counting", attempt="a"),
]
ALL = (Record, SweepRecord, Tombstone, Prepared, ShardManifest, Quarantine, Published, Savepoint, Claim)
