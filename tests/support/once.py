"""A pipeline that outputs each key once in seven days, and what a tester of it has committed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, cast

from cairn import Pipeline
from cairn.processors import Deduplicate
from cairn.testing import PipelineTester
from state_backend.adapters.open_storage import open_storage
from state_backend.shard.manifest import needed_manifest
from state_backend.values.records import ShardManifest

START, HOUR = datetime(2024, 1, 1, tzinfo=UTC), timedelta(hours=1)


class Once(Deduplicate):
    horizon = timedelta(days=7)


ONCE = Pipeline(
    name="once",
    start=START,
    source=cast(Any, lambda spark, interval: None),
    key=["k"],
    processor=Once,
    time_mode="event",
    event_time="t",
    watermark_delay=HOUR,
    watermark="interval",
    parallelism=2,
    max_parallelism=16,
)


def manifests_of(tester: PipelineTester) -> list[ShardManifest]:
    """Of the newest checkpoint, one of each shard."""
    storage = open_storage(f"{tester.root}/once")
    return [needed_manifest(ref, storage) for ref in tester.checkpoints[-1].content.shards]
