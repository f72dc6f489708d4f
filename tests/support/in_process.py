"""Jobs of shards without Spark: each shard's part in this process, one after the other."""

from __future__ import annotations

from typing import Any, TypeVar

from cairn.shard_jobs.run_on_shards import ShardJob
from state_backend.checkpoint.prepare_content import OfShard, by_shard

Ack = TypeVar("Ack", bound=OfShard)


def run_here(spark: Any, job: ShardJob[Ack], rows: Any = None, *, first_task: int = 0) -> list[Ack]:
    """In the place of ``run_on_shards``, for jobs without input; ``spark`` is not looked at."""
    own = [job.with_refs(job.refs_of(shard)) for shard in range(job.parallelism)]
    acks = [job.run_shard(iter(()), shard, first_task + shard) for shard, job in enumerate(own)]
    return by_shard(acks, job.parallelism)
