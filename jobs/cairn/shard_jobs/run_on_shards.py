"""One place that runs a job on every shard of a pipeline.

A job is a value that travels to the workers. Spark runs it once per shard (again, where a task fails or is speculated) and hands back
the acks of exactly the successful tasks. What is made of them happens in the driver. A new kind of job is a frozen dataclass with
``parallelism``, ``max_parallelism``, the refs that it reads, and ``run_shard``; one that makes a checkpoint ends in `state_backend.checkpoint.prepare_content.prepare`.
"""

from __future__ import annotations

import gc
import logging
import pickle
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.types import BinaryType, StructField, StructType

from cairn.rows.arrange_rows import Arrangement
from cairn.rows.routing import PART, ticks
from cairn.shipping.ship_processor import ship, unship
from cairn.spark.first_cause import first_cause
from cairn.spark.idle_daemon import end_idle_daemon
from cairn.spark.session import collect_once
from state_backend.adapters.work_folders import work_folder
from state_backend.checkpoint.prepare_content import OfShard, by_shard
from state_backend.values.errors import DamagedCopy, InvariantViolated
from state_backend.values.records import Content, ShardRef

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger("cairn")

Ack = TypeVar("Ack", bound=OfShard)
Ack_co = TypeVar("Ack_co", bound=OfShard, covariant=True)


class ShardJob(Protocol[Ack_co]):
    """What `run_on_shards` needs of a job."""

    @property
    def parallelism(self) -> int:
        """How many shards it runs on."""

    @property
    def max_parallelism(self) -> int:
        """How many key groups there are."""

    def refs_of(self, shard: int) -> tuple[ShardRef, ...]:
        """Which shards of a checkpoint before this shard reads. They travel to its task alone."""

    def with_refs(self, refs: tuple[ShardRef, ...]) -> Self:
        """The job with these refs in the place of those of all shards."""

    def run_shard(self, batches: Iterator[pa.RecordBatch], shard: int, task: int) -> Ack_co:
        """Does one shard, in a worker. ``batches``: the shard's routed rows, or its tick alone. ``task``: a number that no other task
        of this job has, not even another try at this shard; it goes into the names of files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOnContent:
    """What jobs on the shards of one content have in common: each shard reads itself, if the content has shards."""

    content: Content

    @property
    def parallelism(self) -> int:
        """The content's."""
        return self.content.parallelism

    @property
    def max_parallelism(self) -> int:
        """The content's."""
        return self.content.max_parallelism

    def refs_of(self, shard: int) -> tuple[ShardRef, ...]:
        """The shard itself; none where the content has no shards yet, or is of a canonical savepoint."""
        return tuple(ref for ref in self.content.shards if ref.shard == shard)

    def with_refs(self, refs: tuple[ShardRef, ...]) -> Self:
        """As `ShardJob` has it."""
        return replace(self, content=replace(self.content, shards=refs))


def run_on_shards(
    spark: SparkSession,
    job: ShardJob[Ack],
    placed: Callable[[Sequence[bytes]], DataFrame] | None = None,
    arrangement: Arrangement | None = None,
) -> list[Ack]:
    """Runs the job once on each shard; returns their acks, in the order of shards.

    placed: makes the rows, as `cairn.rows.routing` does, of what each shard's tick shall hold: a partition per shard that begins with its
    tick. None: the ticks alone.
    Raises: what a shard raised, as it was raised there; InvariantViolated if acks are not exactly one per shard.
    """
    parts = [zlib.compress(pickle.dumps(job.refs_of(shard)), 1) for shard in range(job.parallelism)]
    rows = ticks(spark, parts, max_parallelism=job.max_parallelism) if placed is None else placed(parts)
    shipped = ship((job.with_refs(()), arrangement))
    for tries_left in range(job.parallelism, -1, -1):
        try:
            with first_cause():
                # Made anew for each try: a plan that has failed answers with that failure ever after.
                found = collect_once(spark, lambda: rows.mapInArrow(partial(_run_shard, shipped), _ACK_ROW))
            break
        except DamagedCopy as error:
            # On a cluster Spark runs the shard again by itself; a local master runs each task once. The damaged copies of the shard that
            # raised are gone; tasks that were ended for it may not have come to theirs.
            if not tries_left:
                raise
            log.warning("a host's copy of a file is damaged; all is computed once more, with the storage's: %s", error)
    return by_shard([pickle.loads(row.ack) for row in found], job.parallelism)


_ACK = pa.schema([("ack", pa.binary())])
_ACK_ROW = StructType([StructField("ack", BinaryType())])


def _run_shard(shipped: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """In a worker: one row with the ack."""
    context = TaskContext.get()
    assert context is not None
    end_idle_daemon()
    job: Any
    arrangement: Arrangement | None
    job, arrangement = unship(shipped)
    if arrangement is not None:
        batches = arrangement.arranged(batches, partial(work_folder, f"sort-{context.partitionId()}"))
    batches = iter(batches)
    first = next(batch for batch in batches if batch.num_rows)
    part = first.column(PART)[0].as_py()
    if part is None:
        raise InvariantViolated(f"partition {context.partitionId()} does not begin with a tick")
    job = job.with_refs(pickle.loads(zlib.decompress(part)))
    batches = (batch.drop_columns([PART]) for batch in chain([first], batches))
    ack = job.run_shard(batches, context.partitionId(), context.taskAttemptId())
    for _ in batches:  # a job without input leaves its tick
        pass
    yield pa.RecordBatch.from_arrays([pa.array([pickle.dumps(ack)], pa.binary())], schema=_ACK)


class StopWatch:
    """How long each phase took, in microseconds. A phase within another is not counted for that one too, so that they add up."""

    def __init__(self) -> None:
        self.durations_us: dict[str, int] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times the block, also if it raises."""
        started, inside_us = time.monotonic_ns(), sum(self.durations_us.values())
        try:
            yield
        finally:
            inside_us = sum(self.durations_us.values()) - inside_us
            own_us = (time.monotonic_ns() - started) // 1000 - inside_us
            self.durations_us[name] = self.durations_us.get(name, 0) + max(0, own_us)


# After so many tasks of a worker, what they left is looked at again.
_LOOK_AT_ALL_EVERY = 32
_tasks = count(1)


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Python's collector looks at new objects by the hundreds, and now and then at all there are: with a batch of rows in
    hand and pandas imported that took two fifths of the time per key. Cycles in user code are still found, later.

    What is there before the block stays out of the collector's sight behind it too: Spark's worker collects after every task, which took
    60 ms of CPU for the objects of the imports alone. Every 32nd time all is in sight, so that no more than 32 tasks leave behind stays.
    In any other process, a test's for one, all is in sight again behind the block.
    """
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if TaskContext.get() is None or next(_tasks) % _LOOK_AT_ALL_EVERY == 0:
            gc.unfreeze()
