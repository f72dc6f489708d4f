"""Run a job on every shard of a pipeline.

A job is a value that travels to the workers. Spark runs it once for each shard, and again if a task fails or is run
speculatively. A task returns an ack: the result of the job on one shard, such as the shard's new manifest. The driver
gets the acks of the successful tasks only, and combines them.

A new kind of job is a frozen dataclass with the members of `ShardJob`. `refs_of` says which stored shards a task reads,
and `run_shard` does the work of the task. A job that makes a checkpoint ends with a call of
`state_backend.checkpoint.prepare_content.prepare`.
"""

from __future__ import annotations

import gc
import logging
import pickle
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
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
from cairn.spark.last_words import last_words
from cairn.spark.session import collect_once
from state_backend.adapters.work_folders import work_folder
from state_backend.checkpoint.prepare_content import OfShard, by_shard
from state_backend.values.doing import doing
from state_backend.values.errors import DamagedCopy, InvariantViolated
from state_backend.values.frozen import frozen
from state_backend.values.records import Content, ShardRef

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger("cairn")

Ack = TypeVar("Ack", bound=OfShard)
Ack_co = TypeVar("Ack_co", bound=OfShard, covariant=True)


class ShardJob(Protocol[Ack_co]):
    """Protocol of the jobs that `run_on_shards` accepts. `Ack_co` is the type of a job's result on one shard."""

    @property
    def parallelism(self) -> int:
        """Return the number of shards."""

    @property
    def max_parallelism(self) -> int:
        """Return the number of key groups."""

    def refs_of(self, shard: int) -> tuple[ShardRef, ...]:
        """Return a reference to each stored shard that the job reads to make this shard.

        A `ShardRef` holds a stored shard's manifest, or names the manifest's file. The references travel in the shard's
        tick, so that no task receives the references of all shards.
        """

    def with_refs(self, refs: tuple[ShardRef, ...]) -> Self:
        """Return a copy of the job that has only these references, instead of references to all stored shards."""

    def run_shard(self, batches: Iterator[pa.RecordBatch], shard: int, task: int) -> Ack_co:
        """Run the job on one shard, in a Spark worker or in this process (`run_here`).

        `batches`: The shard's rows. `task`: A number that makes the names of the task's files unique.
        """


@frozen
class JobOnContent:
    """Base of jobs whose shards are those of one checkpoint, prepared attempt or savepoint.

    Each task reads the stored shard of its own number.
    """

    content: Content

    @property
    def parallelism(self) -> int:
        return self.content.parallelism

    @property
    def max_parallelism(self) -> int:
        return self.content.max_parallelism

    def refs_of(self, shard: int) -> tuple[ShardRef, ...]:
        return tuple(ref for ref in self.content.shards if ref.shard == shard)

    def with_refs(self, refs: tuple[ShardRef, ...]) -> Self:
        return replace(self, content=replace(self.content, shards=refs))


def run_on_shards(
    spark: SparkSession,
    job: ShardJob[Ack],
    placed: Callable[[Sequence[bytes]], DataFrame] | None = None,
    arrangement: Arrangement | None = None,
    executed: Callable[[DataFrame], None] | None = None,
) -> list[Ack]:
    """Run the job once on each shard, and return the results (acks) in the order of the shards.

    `placed`: Function that gets the bytes of the ticks and returns the rows, placed by shard; None for no rows.
    `arrangement`: How a task sorts its rows; None if it need not. `executed`: Gets the DataFrame after the query. If a
    host's cached copy of a file is damaged, the job runs again on all shards.
    """
    parts = [zlib.compress(pickle.dumps(job.refs_of(shard)), 1) for shard in range(job.parallelism)]
    rows = ticks(spark, parts, max_parallelism=job.max_parallelism) if placed is None else placed(parts)
    shipped = ship((job.with_refs(()), arrangement))
    for tries_left in range(job.parallelism, -1, -1):
        try:
            with first_cause():
                # Make a new query plan for each try: given the failed plan again, Spark would raise the old error.
                found = collect_once(spark, lambda: rows.mapInArrow(partial(_run_shard, shipped), _ACK_ROW), executed)
            break
        except DamagedCopy as error:
            # With a local master, Spark runs each task only once. So the whole job runs again here. The shard that
            # raised `DamagedCopy` has deleted its damaged copies. Shards whose tasks Spark ended early may still have
            # damaged copies, so each shard may need one more try.
            if not tries_left:
                raise
            log.warning(
                "the cached copy of a state file on a host is damaged; the job runs again with the file from the storage: %s",
                error,
            )
    return by_shard([pickle.loads(row.ack) for row in found], job.parallelism)


def run_here(job: ShardJob[Ack]) -> list[Ack]:
    """Run a job without rows on each shard, one after the other in this process, and return the results (acks)."""
    acks = [job.with_refs(job.refs_of(shard)).run_shard(iter(()), shard, shard) for shard in range(job.parallelism)]
    return by_shard(acks, job.parallelism)


_ACK = pa.schema([("ack", pa.binary())])
_ACK_ROW = StructType([StructField("ack", BinaryType())])


def _run_shard(shipped: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Run a job (`shipped`, by `ship`) on one shard, in a Spark worker. Yield one row with the pickled result (ack)."""
    context = TaskContext.get()
    assert context is not None
    end_idle_daemon()
    job: Any
    arrangement: Arrangement | None
    job, arrangement = unship(shipped)
    if arrangement is not None:
        batches = arrangement.arrange(batches, partial(work_folder, f"sort-{context.partitionId()}"))
    batches = iter(batches)
    first = next(batch for batch in batches if batch.num_rows)
    part = first.column(PART)[0].as_py()
    if part is None:
        raise InvariantViolated(f"partition {context.partitionId()} does not begin with a tick")
    job = job.with_refs(pickle.loads(zlib.decompress(part)))
    batches = (batch.drop_columns([PART]) for batch in chain([first], batches))
    with last_words(f"shard {context.partitionId()}"):
        ack = job.run_shard(batches, context.partitionId(), context.taskAttemptId())
    # Read the remaining batches, such as the tick of a job without input: Spark ends a Python worker that leaves input
    # unread.
    for _ in batches:
        pass
    yield pa.RecordBatch.from_arrays([pa.array([pickle.dumps(ack)], pa.binary())], schema=_ACK)


class StopWatch:
    """Stopwatch for the phases of a task, in microseconds.

    The time of a nested phase does not count for the outer phase, so that all phases add up.
    """

    def __init__(self) -> None:
        self.durations_us: dict[str, int] = {}

    @contextmanager
    def phase(self, name: str, words: str) -> Iterator[None]:
        """Measure the time of the block, also if it raises an error, and tell `doing` what the block does (`words`)."""
        started, inside_us = time.monotonic_ns(), sum(self.durations_us.values())
        try:
            with doing(words):
                yield
        finally:
            inside_us = sum(self.durations_us.values()) - inside_us
            own_us = (time.monotonic_ns() - started) // 1000 - inside_us
            self.durations_us[name] = self.durations_us.get(name, 0) + max(0, own_us)


# `rare_garbage_collection` hides (freezes) old objects from Python's garbage collector, since its checks cost CPU time.
# After this many tasks, a Spark worker unfreezes all objects, so that the collector can free garbage among them.
_LOOK_AT_ALL_EVERY = 32
_tasks = count(1)


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Make Python's garbage collector run rarely during the block.

    By default the collector checks new objects by the hundred, and all objects now and then. With a batch of rows in
    memory and pandas imported, this took two fifths of the time per key. Cycles in user code are still collected, but
    later.

    Objects from before the block stay frozen (invisible to the collector) after the block too, because Spark's worker
    collects after every task, which took 60 ms of CPU for the objects of the imports alone. After every 32nd task all
    objects are unfrozen, so that the garbage of at most 32 tasks accumulates. In a process that is no Spark worker,
    such as a test, all objects are unfrozen after each block.
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
