"""Process several intervals on each shard, one after the other, in one task that keeps its store open.

    restore -> interval 0: process -> ... -> upload -> interval 1: process -> ... -> upload -> ... -> one ack for each

Each interval has an attempt of its own, with files under the attempt's name, as if a separate task had written them. A
task that stops at any point leaves files that no record names, because the driver gets no ack before the task ends. If
Spark runs a task twice, each run writes under other names.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa

from cairn.rows.routing import KEY_GROUP, KIND, TICK
from cairn.rows.watermark import EventTime
from cairn.shard_jobs.interval import IntervalJob
from cairn.shard_jobs.run_on_shards import StopWatch
from state_backend.checkpoint.prepare_content import ShardAck
from state_backend.shard.restore import RestoredShard
from state_backend.values.errors import InvariantViolated
from state_backend.values.frozen import frozen
from state_backend.values.records import Content, ShardRef


@frozen
class ChunkAck:
    """The acknowledgements of one shard: one for each interval of the chunk that the shard has processed."""

    shard: int
    acks: tuple[ShardAck, ...]


@frozen
class ChunkJob:
    """Job that processes the intervals of a chunk, one after the other. `first` is the job of the first interval."""

    first: IntervalJob
    # For each interval, the fields in which its job differs from `first`: content and event-time settings.
    each: tuple[tuple[Content, EventTime | None], ...]
    # A task that has taken more seconds, or uploaded more bytes, leaves the remaining intervals out.
    most_seconds: float
    most_bytes: int

    @property
    def parallelism(self) -> int:
        return self.first.parallelism

    @property
    def max_parallelism(self) -> int:
        return self.first.max_parallelism

    def refs_of(self, shard: int) -> tuple[ShardRef, ...]:
        return self.first.refs_of(shard)

    def with_refs(self, refs: tuple[ShardRef, ...]) -> ChunkJob:
        return replace(self, first=self.first.with_refs(refs))

    def job_of(self, number: int) -> IntervalJob:
        """Return the job of interval `number` of the chunk, from 0. Its `base` is that of the whole chunk."""
        content, event_time = self.each[number]
        return replace(self.first, content=content, event_time=event_time, h0=self.first.h0 + number)

    def run_shard(self, batches: Iterator[pa.RecordBatch], shard: int, task: int) -> ChunkAck:
        began_s, rows = time.monotonic(), _RowsByInterval(batches, self.max_parallelism)
        acks: list[ShardAck] = []
        with self.first.open_shard(shard, task) as (opened, at):
            restored = opened
            for number in range(len(self.each)):
                # A folder for each interval, deleted afterwards: its links to files would keep merged files on disk.
                work = at.work / str(number)
                work.mkdir()
                clock = at.clock if not number else StopWatch()
                acks.append(self.job_of(number).process(rows.of(number), restored, replace(at, work=work, clock=clock)))
                shutil.rmtree(work)
                uploaded_bytes = sum(ack.uploaded_bytes for ack in acks)
                if time.monotonic() - began_s > self.most_seconds or uploaded_bytes > self.most_bytes:
                    break
                restored = _after(restored, acks[-1])
        return ChunkAck(shard=shard, acks=tuple(acks))


def _after(restored: RestoredShard, ack: ShardAck) -> RestoredShard:
    """Return the open store as if the shard's new checkpoint, with the acknowledgement `ack`, had been restored."""
    made = ack.manifest
    if made is None:
        return replace(restored, downloaded_bytes=0, cached_bytes=0)
    restored.store.refresh()
    return RestoredShard(store=restored.store, key_group_states=made.key_group_states, opened=made, base=made)


class _RowsByInterval:
    """The rows of a shard, which are sorted by interval. No batch has rows of two intervals."""

    def __init__(self, batches: Iterator[pa.RecordBatch], groups_each: int) -> None:
        first = next(batches)
        self._tick, self._groups_each, self._batches = first[:1], groups_each, batches
        if self._tick.column(KIND)[0].as_py() != TICK:
            raise InvariantViolated("the rows of a shard do not begin with a tick")
        self._held = first[1:]

    def of(self, number: int) -> Iterator[pa.RecordBatch]:
        """Yield a tick and the rows of interval `number`, with key groups as if the job had only this interval."""
        yield self._tick
        while True:
            while not self._held.num_rows:
                held = next(self._batches, None)
                if held is None:
                    return
                self._held = held
            groups = self._held.column(KEY_GROUP)
            of = groups[0].as_py() // self._groups_each
            if of > number:
                return
            if of < number:
                raise InvariantViolated(f"rows of interval {of} follow those of interval {number} of a chunk")
            rows, self._held = self._held, self._held[:0]
            at = rows.schema.get_field_index(KEY_GROUP)
            yield rows.set_column(at, KEY_GROUP, pa.array(groups.to_numpy() - number * self._groups_each, pa.int32()))
