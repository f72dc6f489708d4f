"""Decide which intervals of a range one Spark job computes together. Pure functions.

The intervals of one job are a chunk. The first chunk has one interval. Chunks grow as long as each is committed whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cairn.operations.intervals.plan_interval import IntervalPlan, event_time_after
from cairn.operations.intervals.plan_range import Compute, Reprocess, keep_or_compute
from cairn.operations.intervals.prove_read import recorded_lengths
from cairn.operations.intervals.read_source import Read
from cairn.operations.intervals.untracked_reads import has_union, looks_up_names, reads_once
from cairn.pipeline import Interval, Pipeline
from cairn.rows.arrange_rows import Arrangement, plan_arrangement
from cairn.rows.routing import Inputs
from cairn.shard_jobs.interval import IntervalJob
from cairn.upstream_sources import Upstreams
from state_backend.checkpoint.begin_attempt import Begun
from state_backend.checkpoint.choose_base import overlapping_outputs
from state_backend.checkpoint.forgotten_keys import returning_keys
from state_backend.checkpoint.interval_results import Result
from state_backend.checkpoint.log import Log
from state_backend.values.frozen import frozen
from state_backend.values.records import Content, LogicalTime, Prepared, Record, RunRef

MIB = 1024 * 1024
# The most intervals after a chunk with fewer rows than intervals: so few rows don't tell the size of the next chunk.
_FEW_INTERVALS = 8
# A chunk was too large if it took this many times the seconds per interval of the smaller chunk before.
_SLOWER = 1.5
# Rows are sorted by an integer of 32 bits: number of the interval in the chunk * number of key groups + key group.
_MOST_INTERVALS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLimits:
    """Limits of the intervals that one Spark job computes together.

    Attributes:
        intervals: The most intervals; 1 computes each interval by a job of its own.
        shards: The most acknowledgements that the driver gets from one job: intervals times shards.
        rows: The most input rows, estimated from the chunk before. More rows than fit in memory are sorted on disk.
        uploaded_bytes: The most bytes that a job uploads, estimated from the chunk before. A shard stops early if it
            has uploaded more than twice its share.
        seconds: The longest time that a job takes, estimated from the chunk before. A shard stops early after twice
            this time.
    """

    intervals: int = 64
    shards: int = 4096
    rows: int = 2_000_000
    uploaded_bytes: int = 512 * MIB
    seconds: float = 10.0


DEFAULT_LIMITS = ChunkLimits()


@frozen
class Chunk:
    """Measurements of a chunk that was computed. An interval that was computed alone is a chunk of one."""

    planned: int  # Number of intervals that were planned together.
    committed: int  # Number of intervals that were committed: fewer if the chunk was cut.
    rows: int  # Input rows of the committed intervals.
    uploaded_bytes: int  # Bytes that the committed intervals uploaded.
    seconds: float  # From the begin of the plan to the last commit.


def chunk_of(done: Sequence[Prepared], *, planned: int, seconds: float) -> Chunk:
    totals = [prepared.content.totals for prepared in done]
    rows, uploaded_bytes = sum(one.input_rows for one in totals), sum(one.uploaded_bytes for one in totals)
    return Chunk(planned=planned, committed=len(done), rows=rows, uploaded_bytes=uploaded_bytes, seconds=seconds)


def next_size(last: Chunk | None, limits: ChunkLimits, parallelism: int) -> int:
    """Return the number of intervals of the next chunk: at most twice as many as in the last one, within the limits.

    The number is 1 if there is no chunk before (`last` is None), and after a chunk that was not committed whole.
    """
    if last is None or last.committed < last.planned:
        return 1
    used = (
        (limits.rows, last.rows),
        (limits.uploaded_bytes, last.uploaded_bytes),
        (limits.seconds, last.seconds),
    )
    fitting = [int(most * last.planned / spent) for most, spent in used if spent > 0]
    if last.planned > 1 and last.rows < last.planned:
        fitting.append(_FEW_INTERVALS)
    return max(1, min(2 * last.planned, limits.intervals, _MOST_INTERVALS, limits.shards // parallelism, *fitting))


def narrowed(limits: ChunkLimits, before: Chunk | None, last: Chunk | None) -> ChunkLimits:
    """Return `limits` with fewer intervals if the chunk `last` took longer per interval than a smaller one, `before`.

    Later chunks then have at most as many intervals as `before`. A source with an expensive plan may take longer for
    many intervals at once. A chunk that is slower because it has more rows does not count, nor does a short chunk.
    """
    if before is None or last is None or not before.planned < last.planned == last.committed:
        return limits
    if last.seconds < limits.seconds / 4:
        return limits
    seconds = (last.seconds / last.committed) / max(before.seconds / before.committed, 1e-9)
    rows = (last.rows / last.committed + 1) / (before.rows / before.committed + 1)
    return replace(limits, intervals=before.planned) if seconds > _SLOWER * max(rows, 1.0) else limits


def surely_computed(
    intervals: Sequence[Interval], there: dict[Interval, Result], reprocess: Reprocess, run: RunRef
) -> int:
    """Return how many of the first intervals must be computed, whatever the results of the intervals before them are.

    A result in `there` that is not valid stays so, but the re-run of an earlier interval may make a valid one invalid.
    """
    return next(
        (
            n
            for n, interval in enumerate(intervals)
            if not isinstance(keep_or_compute(there.get(interval), reprocess, run), Compute)
        ),
        len(intervals),
    )


def why_never(pipeline: Pipeline, mode: str) -> str | None:
    """Return why each interval needs a job of its own; None if intervals of the pipeline may be computed together."""
    if isinstance(pipeline.source, Upstreams) and any(edge.back for edge in pipeline.source.edges.values()):
        return "an upstream is read with `back`, so it may read this pipeline in turn"
    if not pipeline.read_ahead:
        return "the source reads the pipeline's own output"
    if mode == "changelog":
        return "in changelog mode, a shard's segment follows the committed record before"
    return None


def why_not_any(pipeline: Pipeline, plan: IntervalPlan, read: Read | None) -> str | None:
    """Return why the interval can't be in any chunk; None if it can. `read`: The source's answer, if it is known."""
    if pipeline.sink is not None and not _are_never_the_sinks(plan):
        return "the source might read what this pipeline's sink writes; list all files that it reads in its position, with lengths"
    if looks_up_names(plan.inputs.rows):
        return "the source names a table or view, which may be another one when the query runs"
    if read is not None and read.together is not None:
        return None
    # Spark merges the unions of all intervals into one, so the plan would not tell which interval a branch belongs to.
    if recorded_lengths(plan.job.content.source_position) is not None and has_union(plan.inputs.rows):
        return "the source's query has a union"
    return None


def _are_never_the_sinks(plan: IntervalPlan) -> bool:
    """Return True if no row can be of the sink's table: the source reads upstreams, or only files in its position."""
    position = plan.job.content.source_position
    listed = recorded_lengths(position) is not None or position.get("files") == []
    return bool(plan.job.content.inputs) or (listed and reads_once(plan.inputs.rows))


def why_not_first(plan: IntervalPlan) -> str | None:
    """Return why no other interval may follow this one in a chunk; None if others may."""
    job = plan.job
    if arrangement_of(plan.inputs) is None:
        return "a column has a type that only Spark can order"
    if job.base_parallelism != job.parallelism:
        return "the state is empty, or was stored with another number of shards"
    if job.initial_schema is not None or job.returning or job.dropped:
        return "the interval reads initial state, or removes keys or states"
    if any(one.erased for one in job.content.followed):
        return "keys were erased from what another pipeline made"
    return _why_not_untracked(job.content)


def _why_not_untracked(content: Content) -> str | None:
    return "the source reads the output of a pipeline" if content.untracked else None


def arrangement_of(inputs: Inputs, groups_each: int | None = None) -> Arrangement | None:
    """Return how tasks sort the rows of several intervals; None if only Spark can. `groups_each`: See `Arrangement`."""
    return plan_arrangement(
        inputs.rows.schema, None, key=inputs.key, initial_key=(), order_by=inputs.order_by, groups_each=groups_each
    )


def why_not_next(first: IntervalJob, job: IntervalJob, log: Log) -> str | None:
    """Return why an interval can't follow the first one in a chunk; None if it can.

    `job`: The job of the interval, whose base is not committed yet. `log`: The log when the chunk began.
    """
    content, begun = job.content, first.content
    if (why := _why_not_untracked(content)) is not None:
        return why
    if overlapping_outputs(log, content.interval):
        return "output of an interval with other boundaries overlaps the interval"
    if returning_keys(log, content.interval.start_ms, first.content.base_id):
        return "forgotten keys may return"
    same = replace(
        job,
        content=begun,
        event_time=first.event_time,
        h0=first.h0,
        base=first.base,
        base_parallelism=first.base_parallelism,
        processor=first.processor,
    )
    if same != first or of_interval(begun, content) != content:
        return "columns, states or settings differ from those of the interval before"
    return None


def of_interval(first: Content, content: Content) -> Content:
    """Return a copy of `first` that takes from `content` the fields in which the intervals of a chunk may differ.

    The copy shares its schemas with `first`. So a pickled job is smaller with the copy than with `content`.
    """
    names = ("interval", "attempt", "base_id", "time", "source_position", "retention", "input_hash", "inputs")
    return replace(first, **{name: getattr(content, name) for name in names})


def following(begun: Begun, job: IntervalJob) -> Begun:
    """Return the `Begun` of the next interval, assuming that the attempt of `job` is committed next.

    The assumed base has everything that planning needs of a base. Only its shards are not known yet.
    """
    content = replace(job.content, time=job.time_after(None))
    record = Record(id=begun.h0 + 1, retained=(), reproduces=None, content=content)
    return replace(begun, h0=record.id, base=record)


def with_watermarks(jobs: Sequence[IntervalJob], newest_us: Sequence[int | None]) -> list[IntervalJob]:
    """Return copies of a chunk's jobs, each with the watermarks that the interval before will record.

    `newest_us`: The newest event time of each interval, in microseconds; None if no row has one.
    """
    made = [*jobs[:1]]
    for job, newest in zip(jobs[1:], newest_us, strict=False):
        event_time = event_time_after(job, made[-1].time_after(newest))
        time = replace(job.content.time, watermark_ms=event_time.base_ms) if event_time else job.content.time
        made.append(replace(job, event_time=event_time, content=replace(job.content, time=time)))
    return made


def begins_with(job: IntervalJob, base: LogicalTime) -> bool:
    """Return True if the job was planned with the watermarks in `base`, which the interval before has recorded."""
    return job.event_time == event_time_after(job, base)
