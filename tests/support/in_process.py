"""Jobs of shards without Spark: each shard's part in this process, one after the other."""

from __future__ import annotations

from typing import Any, TypeVar
from unittest import mock

import pyarrow as pa

from cairn import testing
from cairn.data_sources.keyed_output import KeyedOutput
from cairn.data_sources.keyed_state import KeyedState
from cairn.rows.local_rows import LocalRows
from cairn.shard_jobs.run_on_shards import ShardJob
from state_backend.checkpoint.prepare_content import OfShard, by_shard
from state_backend.values.zones import zone_of

Ack = TypeVar("Ack", bound=OfShard)


def run_here(spark: Any, job: ShardJob[Ack], rows: Any = None, *, first_task: int = 0) -> list[Ack]:
    """In the place of ``run_on_shards``, for jobs without input; ``spark`` is not looked at."""
    own = [job.with_refs(job.refs_of(shard)) for shard in range(job.parallelism)]
    acks = [job.run_shard(iter(()), shard, first_task + shard) for shard, job in enumerate(own)]
    return by_shard(acks, job.parallelism)


UTC_ZONE = zone_of("UTC")


class _Frame(LocalRows):
    def limit(self, n: int) -> _Frame:
        return _Frame.of_table(self.table.slice(0, n), self.schema, self.zone)  # type: ignore[return-value]


class _Session(testing.PlanningSession):
    """It reads the two formats by their own data sources, in this process."""

    dataSource = mock.Mock()
    read = property(lambda self: self)

    def format(self, name: str) -> Any:
        made: Any = {"keyed_output": KeyedOutput, "keyed_state": KeyedState}[name]
        given = lambda **options: mock.Mock(load=lambda: self._load(made({n: str(v) for n, v in options.items()})))  # noqa: E731
        return mock.Mock(options=given)

    def _load(self, source: Any) -> LocalRows:
        reader = source.reader(schema := source.schema())
        batches = [batch for part in reader.partitions() for batch in reader.read(part)]
        arrow = LocalRows([], schema, UTC_ZONE).table.schema
        return _Frame.of_table(pa.Table.from_batches(batches, None if batches else arrow).cast(arrow), schema, UTC_ZONE)


SESSION: Any = _Session("UTC")
