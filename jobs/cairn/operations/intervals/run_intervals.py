"""Process many intervals of a pipeline in one call, one after the other, with the same results as single runs.

Each interval has its own attempt, commit, record and output. If the process stops at any point, the storage contains
what `run_interval` would leave at that point: all earlier intervals are committed, and one attempt may have files that
no record names.

One call saves time in five ways:

1. The programs start once.
2. The log's records are read once.
3. The source is asked for the next intervals while the shards compute the present ones.
4. One Spark job computes a chunk of intervals. docs/design.md says which intervals form a chunk, and when the rest of a
   chunk is computed again ("One job for several intervals").
5. If the pipeline has no sink, the work after a commit (the clean-up) runs in a thread beside the next interval. It
   ends before the next commit. A sink runs before the next interval begins or is committed.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from cairn.operations.intervals.plan_chunk import (
    DEFAULT_LIMITS,
    Chunk,
    ChunkLimits,
    begins_with,
    chunk_of,
    narrowed,
    next_size,
    surely_computed,
    why_never,
)
from cairn.operations.intervals.plan_interval import Attempt, IntervalPlan, in_zone_of, would_be_made_of
from cairn.operations.intervals.plan_range import (
    REPROCESS,
    AskSource,
    Compute,
    Keep,
    Progress,
    Reprocess,
    check_in_order,
    keep_or_compute,
    plan_by_input,
)
from cairn.operations.intervals.process_chunk import (
    Unproven,
    as_it_is_now,
    have_changed,
    plan_together,
    plan_watermarks,
    process_chunk,
)
from cairn.operations.intervals.process_interval import OnShards, finish_attempt, process_interval
from cairn.operations.intervals.read_source import Read, read_range, read_source, reads_ranges
from cairn.operations.intervals.run_interval import finish_commit
from cairn.operations.intervals.untracked_reads import reads_below
from cairn.operations.intervals.what_changed import MadeOf
from cairn.pipeline import Interval, Pipeline
from cairn.shipping.ship_processor import code_of_one_call
from cairn.spark.session import check_running, is_lost, use_this_python
from cairn.upstream_sources import Upstreams
from state_backend.chains.judge_inputs import Chains
from state_backend.checkpoint.begin_attempt import begin
from state_backend.checkpoint.commit_attempt import CommitResult, commit
from state_backend.checkpoint.find_checkpoint import record_of
from state_backend.checkpoint.interval_results import Result, results_of, spoilt_by
from state_backend.checkpoint.location import locate
from state_backend.checkpoint.log import Log, read_newest
from state_backend.checkpoint.publish_output import unpublished
from state_backend.values.errors import BaseMoved, InputNotReady, NotAsTried, UsageError
from state_backend.values.intervals import to_ms
from state_backend.values.records import NO_PERMISSIONS, Content, Permissions, Prepared, Record, RunRef, own_run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger("cairn")

# After this many chunks in a row that could not be computed, each interval has a job of its own.
_VAIN_CHUNKS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one interval.

    Attributes:
        interval: The interval.
        computed: True if this call computed the interval, False if an earlier result stays.
        ours: True if this run committed the checkpoint, now or in an earlier try, even before a clear of the run.
        checkpoint: Id of the checkpoint; None if a dry run would compute the interval.
        record: The record, if this run committed it, now or in an earlier try. Only `on_outcome` gets it. The outcomes
            that `run_intervals` returns have None, since the records of a long range would fill the memory.
        why: Why the interval was computed or kept its result, as words for the log.
    """

    interval: Interval
    computed: bool
    why: str
    ours: bool = True
    checkpoint: int | None = None
    record: Record | None = None


OnOutcome = Callable[[Outcome, Progress], None]


@code_of_one_call()
def run_intervals(
    spark: SparkSession,
    pipeline: Pipeline,
    intervals: Sequence[Interval],
    root: str,
    mode: str = "incremental",
    *,
    reprocess: Reprocess = "changed",
    permissions: Permissions = NO_PERMISSIONS,
    run: RunRef | None = None,
    on_outcome: OnOutcome | None = None,
    on_shards: OnShards | None = None,
    before_commit: Callable[[Content], None] | None = None,
    asked: Mapping[Interval, Read] | None = None,
    limits: ChunkLimits = DEFAULT_LIMITS,
) -> list[Outcome]:
    """Process and commit intervals in their order, as `run_interval` would one by one. Stop at the first failure.

    A second call with the same arguments continues after the last commit. With `reprocess="all"` this needs the same
    `run`.

    Args:
        spark: A session, classic or Spark Connect.
        pipeline: The pipeline.
        intervals: The intervals to run. Each starts where the one before ends.
        root: URL or absolute path of the folder that holds the pipelines.
        mode: How checkpoints are stored: "incremental", "full" or "changelog".
        reprocess: Which intervals with a result are computed again. "changed": those whose code or input has changed;
            a changed input counts only if the source returns a position. "none": only intervals whose result is not
            valid, such as a stale one. "all": every interval, except results that the same `run` committed.
        permissions: Refused actions that the caller allows, such as `allow_gap`. They apply to the first interval that
            is computed. Only `replace_overlapping` applies to later intervals too.
        run: Identifies this run, with the same value in every try; None for this call alone.
        on_outcome: Function that is called after each interval with its `Outcome`, which has the record, and with the
            `Progress` of the range.
        on_shards: Function that brings the rows to the shards and runs the job on each; None uses Spark.
        before_commit: Function that is called before each commit with the prepared content. If it raises an exception,
            this interval is not committed and the call ends.
        asked: Rows and position that the source has already returned for some intervals. The source is not asked again
            for these intervals.
        limits: Limits of a chunk, the intervals of one Spark job. `ChunkLimits(intervals=1)`: one job per interval.

    Returns:
        The outcome of each interval.

    Raises:
        CairnError: An interval failed. A note says how many intervals were committed before.

    Example:
        hours = [Interval(start + n * timedelta(hours=1), start + (n + 1) * timedelta(hours=1)) for n in range(24)]
        run_intervals(spark, CLICKS, hours, "file:///data/state")
    """
    _check(intervals, reprocess)
    named = run is not None
    run = run or own_run(f"direct__{uuid.uuid4()}")
    check_running(spark)
    use_this_python(spark)
    # One block around all intervals, because the thread that reads ahead shares the session's zone.
    with in_zone_of(spark, pipeline.time_zone), ExitStack() as stack:
        made = _Range(
            spark=spark,
            pipeline=pipeline,
            root=root,
            mode=mode,
            reprocess=reprocess,
            run=run,
            first=permissions,
            reading=_Aside(stack),
            finishing=_Aside(stack),
            on_shards=on_shards,
            before_commit=before_commit,
            known=asked or {},
            limits=limits,
        )
        return made.run_all(intervals, on_outcome, named)


@code_of_one_call()
def plan_intervals(
    spark: SparkSession | None,
    pipeline: Pipeline,
    intervals: Sequence[Interval],
    root: str,
    *,
    reprocess: Reprocess = "changed",
    run: RunRef | None = None,
) -> list[Outcome]:
    """Return what `run_intervals` would do now with each interval, and why. Write nothing.

    If the re-run of an interval gives another result, `run_intervals` also computes later intervals that this plan
    keeps. The outcomes of such intervals say so. Without `spark`, the source can't be asked: an interval whose input
    must be compared counts as computed.
    """
    _check(intervals, reprocess)
    run = run or own_run(f"direct__{uuid.uuid4()}")
    _, there = _results(pipeline, root, intervals)
    outcomes, again = list[Outcome](), None
    for interval in intervals:
        result = there.get(interval)
        decision = keep_or_compute(result, reprocess, run)
        if isinstance(decision, AskSource):
            assert result is not None
            if spark is None:
                decision = Compute(why=f"except if code and input are the same as for checkpoint {result.id}")
            else:
                with in_zone_of(spark, pipeline.time_zone):
                    decision = plan_by_input(result, _made_of_now(spark, pipeline, interval, root))
        if isinstance(decision, Keep) and result is not None:
            why = (
                decision.why
                if again is None
                else f"{decision.why}; computed again if the new result of {again} differs"
            )
            outcomes.append(_kept(interval, result, run, why))
        else:
            again = again or (interval if result is not None else None)
            outcomes.append(Outcome(interval=interval, computed=True, why=decision.why))
    return outcomes


def _kept(interval: Interval, result: Result, run: RunRef, why: str) -> Outcome:
    # Whether the run was cleared since does not count: if the try that committed failed, its events were not sent.
    ours = result.run.run_id == run.run_id
    return Outcome(interval=interval, computed=False, ours=ours, checkpoint=result.id, why=why)


def _made(record: Record, decision: Keep | Compute | AskSource) -> Outcome:
    assert isinstance(decision, Compute)
    why = f"checkpoint {record.id}, because {decision.why}"
    return Outcome(interval=record.content.interval, computed=True, checkpoint=record.id, record=record, why=why)


def _of_later(permissions: Permissions) -> Permissions:
    """Return the permissions of the intervals after a computed interval.

    Later intervals start from the computed interval's checkpoint, so they need no permission for its base.
    """
    return Permissions(replace_overlapping=permissions.replace_overlapping)


def _made_of_now(spark: SparkSession, pipeline: Pipeline, interval: Interval, root: str) -> MadeOf:
    return would_be_made_of(spark, pipeline, interval, read_source(spark, pipeline, interval, root))


def committed_alike(
    spark: SparkSession, pipeline: Pipeline, interval: Interval, root: str, *, run: RunRef
) -> tuple[Result | None, Read | None]:
    """Return (result, read). `result`: Another run's committed result that the same code computed from the same input.

    `result` is None otherwise, and for a run that was cleared, since a user clears a run to compute it again. A dropped
    result of `run` itself counts too: mostly its base was dropped with it, so the interval can't be computed again.
    `read`: The source's answer; None if the source was not asked.
    """
    there = None if run.clear_number else _results(pipeline, root, [interval])[1].get(interval)
    if there is None or there.input_hash is None or there.spoilt is not None:
        return None, None
    if not there.dropped and not isinstance(keep_or_compute(there, "changed", run), AskSource):
        return None, None
    with in_zone_of(spark, pipeline.time_zone):
        read = read_source(spark, pipeline, interval, root)
        alike = isinstance(plan_by_input(there, would_be_made_of(spark, pipeline, interval, read)), Keep)
    return there if alike else None, read


def _check(intervals: Sequence[Interval], reprocess: str) -> None:
    if reprocess not in REPROCESS:
        raise UsageError(f"reprocess {reprocess!r} is not one of {', '.join(REPROCESS)}")
    check_in_order(intervals)


def _results(pipeline: Pipeline, root: str, intervals: Sequence[Interval]) -> tuple[Log, dict[Interval, Result]]:
    start = Interval(pipeline.start, pipeline.start + timedelta(milliseconds=1))
    log = read_newest(locate(root, pipeline.name).storage)
    found = results_of(log, intervals, start)
    if isinstance(pipeline.source, Upstreams):
        for interval, verdict in Chains().judged(root, pipeline.name, log).items():
            if interval in found and verdict.kind == "stale" and found[interval].spoilt is None:
                found[interval] = replace(found[interval], spoilt=verdict.why)
    return log, found


def _how_far(outcomes: Sequence[Outcome], intervals: Sequence[Interval]) -> str:
    """Return a note for an error: how many of the intervals were committed before the error."""
    computed = sum(outcome.computed for outcome in outcomes)
    return (
        f"{computed} of {len(intervals)} intervals were computed and committed before the failure, {len(outcomes) - computed} kept their result; "
        f"it stopped at {intervals[min(len(outcomes), len(intervals) - 1)]}"
    )


class _Aside:
    """A background thread that runs one function at a time, and ends when the given `ExitStack` closes."""

    def __init__(self, stack: ExitStack) -> None:
        self._pool = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="cairn-range"))
        self._under_way: Future[Any] | None = None

    def begin(self, work: Callable[[], Any]) -> None:
        """Wait until the previous function has ended, and raise an exception of it. Then start `work`."""
        self.wait()
        self._under_way = self._pool.submit(work)

    def wait(self) -> Any:
        under_way, self._under_way = self._under_way, None
        return None if under_way is None else under_way.result()


@dataclass(kw_only=True)
class _Range:
    """One call of `run_intervals`, with its arguments. It makes one attempt and one commit for each interval."""

    spark: SparkSession
    pipeline: Pipeline
    root: str
    mode: str
    reprocess: Reprocess
    run: RunRef
    first: Permissions  # The permissions of the first interval that is computed.
    reading: _Aside  # The thread that asks the source for later intervals.
    finishing: _Aside  # The thread that does the work after a commit.
    on_shards: OnShards | None
    before_commit: Callable[[Content], None] | None
    known: Mapping[Interval, Read]  # The source's answers that the caller already has.
    limits: ChunkLimits

    def __post_init__(self) -> None:
        self._at = locate(self.root, self.pipeline.name)
        # The log as this process read or wrote it last. To bring it up to date, only newer records are read.
        self._log: Log | None = None
        self._ahead: Sequence[Interval] = ()  # Intervals for which the thread `reading` asks the source now.
        self._answers: dict[Interval, Read] = {}  # Answers of the source that were not used yet.
        # Intervals for which the source failed before their turn. It is asked once more, when their turn has come.
        self._failed_early: set[Interval] = set()
        self._last: Chunk | None = None  # The last chunk that was committed.
        self._compared: Chunk | None = None  # The last chunk whose speed was compared with that of the chunk before.
        self._stopped = False  # True: the thread `reading` asks for no further interval.
        # False: the source may read what this pipeline writes, so it is asked after the commit of the interval before.
        self._reads_ahead = self.pipeline.read_ahead
        # `_alone`: how many of the next intervals to compute alone. `_vain`: how many chunks in a row failed.
        self._alone = self._vain = 0
        self._why_alone = (
            "each interval was given a job of its own"
            if self.on_shards is not None or self.limits.intervals < 2
            else why_never(self.pipeline, self.mode)
        )
        # True: the source is asked for several intervals at once. `_schema`: the schema of its last single answer.
        self._asks_together = reads_ranges(self.pipeline.source) and self._why_alone is None
        self._schema: Any = None
        # Intervals for which the thread `reading` asks a `RangeSource` at once: as many as the next chunk probably has.
        self._ahead_together: Sequence[Interval] = ()

    def run_all(self, intervals: Sequence[Interval], on_outcome: OnOutcome | None, named: bool) -> list[Outcome]:
        outcomes: list[Outcome] = []
        progress = Progress(done=0, total=len(intervals), kept=0, recent_s=())
        try:
            for outcome, seconds in self.outcomes(intervals):
                outcomes.append(replace(outcome, record=None))
                progress = progress.count_computed(seconds) if outcome.computed else progress.count_kept()
                log.info("%s %s: %s (%s)", self.pipeline.name, outcome.interval, outcome.why, progress)
                if on_outcome is not None:
                    on_outcome(outcome, progress)
        except Exception as error:
            if len(intervals) > 1:
                said = _how_far(outcomes, intervals)
                if not isinstance(error, NotAsTried):  # After `NotAsTried`, the same call would fail again.
                    again = self.reprocess == "all" and not named
                    then = "computes all of them again; to continue, begin there" if again else "continues there"
                    said += f"\nThe same call {then}"
                error.add_note(said)
            raise
        finally:
            self._stopped = True  # So after an error or Ctrl-C, the call waits for one answer of the source at most.
        return outcomes

    def outcomes(self, intervals: Sequence[Interval]) -> Iterator[tuple[Outcome, float]]:
        """Run the intervals one after the other. Yield for each its outcome, and the seconds that the interval took.

        An interval either keeps its committed result, or is computed and committed before its outcome is yielded.
        """
        self._log, there = _results(self.pipeline, self.root, intervals)
        permissions, n = self.first, 0
        waiting: set[int] | None = None
        if self._why_alone is not None and len(intervals) > 1:
            log.info("%s: each interval has a Spark job of its own: %s", self.pipeline.name, self._why_alone)
        while n < len(intervals):
            interval, started = intervals[n], time.monotonic()
            result, read = there.get(interval), None
            decision = keep_or_compute(result, self.reprocess, self.run)
            if isinstance(decision, AskSource):
                assert result is not None
                read = self._read(interval)
                decision = plan_by_input(result, would_be_made_of(self.spark, self.pipeline, interval, read))
            if isinstance(decision, Keep) and result is not None:
                if waiting is None:
                    self.finishing.wait()
                    waiting = {checkpoint_id for _, checkpoint_id in unpublished(self._at)}
                if decision.checkpoint in waiting:
                    # An earlier try committed this checkpoint and stopped before the sink accepted its output. Publish
                    # the output now: without a later commit in this range no other step would publish it.
                    self.finishing.wait()
                    finish_commit(self.spark, self.pipeline, self._at, decision.checkpoint)
                why = f"keeps checkpoint {decision.checkpoint}: {decision.why}"
                outcome = _kept(interval, result, self.run, why)
                record = self._record(decision.checkpoint) if outcome.ours else None
                yield replace(outcome, record=record), time.monotonic() - started
                n += 1
                continue
            size = self._size() if read is None else 1
            surely = surely_computed(intervals[n : n + 3 * size], there, self.reprocess, self.run) if size > 1 else 1
            if (size := min(surely, size)) > 1:
                first = n
                chunk, ahead = intervals[n : n + size], intervals[n + size : n + surely]
                for record, seconds in self._compute_together(chunk, ahead, permissions):
                    decision = keep_or_compute(there.get(intervals[n]), self.reprocess, self.run)
                    yield _made(record, decision), seconds
                    there, n = spoilt_by(there, record), n + 1
                if n > first:
                    continue
            following = intervals[n + 1 : n + 2]
            if following and isinstance(keep_or_compute(there.get(following[0]), "none", self.run), Keep):
                # While `_compute` computes `interval`, it asks the source for the interval `following`. But `following`
                # may keep the result that it has in the log. Then no answer of the source is needed for `following`.
                following = ()
            if read is not None:
                self._answers[interval] = read
            record = self._compute(interval, permissions, following)
            yield _made(record, decision), time.monotonic() - started
            there, n, permissions = spoilt_by(there, record), n + 1, _of_later(permissions)
        self.finishing.wait()

    def _record(self, checkpoint_id: int) -> Record | None:
        """Return the record of a checkpoint that an earlier try of this run has committed; None if it was dropped."""
        self._log = read_newest(self._at.storage, self._log)
        entry = self._log.entries[checkpoint_id]
        return entry if isinstance(entry, Record) else None

    def _attempt(self, interval: Interval, permissions: Permissions, read: Read | None = None) -> Attempt:
        return Attempt(
            id=str(uuid.uuid4()),
            interval=interval,
            mode=self.mode,
            run=self.run,
            permissions=permissions,
            read=read or self._read(interval),
        )

    def _compute(self, interval: Interval, permissions: Permissions, following: Sequence[Interval]) -> Record:
        began_s, read = time.monotonic(), self._read(interval)
        before = read_newest(self._at.storage, self._log)
        if have_changed(self._at, before, read.inputs):  # An upstream has changed since the source was asked.
            self._answers.clear()
            read = self._read(interval)
        attempt = self._attempt(interval, permissions, read)
        if before.retained:  # Not before the first commit: a source that reads this pipeline's output would fail.
            self._read_ahead(() if self._asks_together else following)
        prepared = process_interval(
            self.spark, self.pipeline, self._at, attempt, before=before, on_shards=self.on_shards
        )
        committed = self._commit(prepared, before)
        self._last = chunk_of([prepared], planned=1, seconds=time.monotonic() - began_s)
        return committed.record or record_of(self._at, committed.id)

    def _commit(self, prepared: Prepared, before: Log) -> CommitResult:
        if self.before_commit is not None:
            self.before_commit(prepared.content)
        # If the work after the previous commit failed, `wait` raises and this attempt is not committed.
        self.finishing.wait()
        committed = commit(self._at, prepared.content.attempt, prepared=prepared, before=before)
        self._log = committed.log or before
        finish = partial(finish_commit, self.spark, self.pipeline, self._at, committed.id, committed.log)
        if self.pipeline.sink is None:
            self.finishing.begin(finish)
        else:
            # The user's sink runs in this thread and before the next interval begins, as in `run_interval`.
            finish()
        return committed

    def _size(self) -> int:
        """Return how many intervals the next Spark job may compute."""
        if self._why_alone is not None or not self._reads_ahead:
            return 1
        if self._alone:
            self._alone -= 1
            return 1
        if self._last is not self._compared:
            self.limits, self._compared = narrowed(self.limits, self._compared, self._last), self._last
        return next_size(self._last, self.limits, self.pipeline.parallelism)

    def _compute_together(
        self, intervals: Sequence[Interval], ahead: Sequence[Interval], permissions: Permissions
    ) -> Iterator[tuple[Record, float]]:
        """Compute intervals by one Spark job, then commit them in their order. Yield each record and its seconds.

        The intervals whose records are not yielded, at the end of the chunk or all of them, must be planned again by
        the caller. `ahead`: The intervals after the chunk that must be computed, whatever the results before them are.
        """
        began_s = time.monotonic()
        before = read_newest(self._at.storage, self._log)
        begun = begin(
            self._at,
            intervals[0],
            permissions=permissions,
            pipeline_start_ms=to_ms(self.pipeline.start),
            schedule=self.pipeline.declared_schedule,
            log=before,
        )
        attempts: list[Attempt] = []
        plans, why = list[IntervalPlan](), None
        at_once = self._read_together(intervals)
        intervals = intervals[: len(at_once) or len(intervals)]  # Leave out those whose upstream is not ready yet.
        for together in (at_once, {}):
            attempts.clear()
            asked = self._attempts(intervals, permissions, attempts, together)
            plans, why = plan_together(self.spark, self.pipeline, self._at, asked, begun)
            if not together or len(plans) == len(intervals):  # Else the answer also has rows of unplanned intervals.
                break
        if len(plans) < 2:
            plans = []
        self._keep_reads(attempts[len(plans) :])
        if not plans:
            self._no_chunk(why or "the source failed, or may read what the pipeline writes")
            return
        if len(plans) == len(intervals):
            following = ahead[: 2 * len(plans)]
            if plans[0].inputs.together is None:
                self._read_ahead(following)
            elif following := following[: self.limits.intervals]:
                self._ahead_together = following
                self.reading.begin(self._in_thread(partial(self._ask_together, following)))
        name, planned_s = self.pipeline.name, time.monotonic()
        try:
            plans = plan_watermarks(self.spark, plans)
            acks = process_chunk(self.spark, plans, self.limits)
        except Exception as error:
            if is_lost(error):
                raise
            self._alone = len(plans) - 1
            self.limits = replace(self.limits, intervals=self.limits.intervals // 2)
            if isinstance(error, Unproven):
                self._why_alone = str(error)
            self._no_chunk(f"the job of {len(plans)} intervals failed: {error}", logging.WARNING)
            return
        self._keep_reads(attempts[: len(plans)])  # If a shard ends the chunk early, the next chunk needs answers.
        done: list[Prepared] = []
        each = (planned_s - began_s) / len(acks), (time.monotonic() - planned_s) / len(acks)
        shards = plans[0].job.base
        for plan, of_shards in zip(plans, acks, strict=False):
            began_commit_s = time.monotonic()
            if done and not begins_with(plan.job, done[-1].content.time):
                self._ask_again("their input changed while it was read")
                return
            job = as_it_is_now(self._at, before, plan.job)
            if job is None:
                self._ask_again("another pipeline has changed what they read")
                return
            prepared = finish_attempt(replace(job, base=shards), self._at, of_shards, *each)
            try:
                committed = self._commit(prepared, before)
            except BaseMoved as error:
                if not done:
                    raise
                log.warning("%s: the rest of the chunk is planned again: %s", name, error)
                return
            done.append(prepared)
            self._answers.pop(plan.job.content.interval, None)
            self._last = chunk_of(done, planned=len(acks), seconds=time.monotonic() - began_s)
            yield committed.record or record_of(self._at, committed.id), sum(each) + time.monotonic() - began_commit_s
            if not committed.created(plan.job.h0 + 1):
                log.warning("%s: the rest of the chunk is planned again, because another commit came between", name)
                return
            before, shards = self._log or before, prepared.content.shards
        self._vain = 0

    def _read_together(self, intervals: Sequence[Interval]) -> dict[Interval, Read]:
        """Return the source's answers from one query for all intervals; empty if each one needs a query of its own."""
        if not self._asks_together or any(one in self.known for one in intervals):
            return {}
        early, answer = self._ahead_together, self._take_answers()
        try:
            reads = answer if early == intervals else None
            reads = reads or read_range(self.spark, self.pipeline, intervals, self.root)
        except Exception as error:
            if is_lost(error) or isinstance(error, InputNotReady):
                raise
            return self._ask_for_each(error)
        if reads[0].rows.schema != self._schema:
            return self._ask_for_each(
                "for several intervals, its columns, types or nullability are others than for one"
            )
        return dict(zip(intervals, reads, strict=False)) if self._may_read_ahead(reads[0]) else {}

    def _ask_together(self, intervals: Sequence[Interval]) -> list[Read] | None:
        """Ask the source early for several intervals. Return None on an error, because the input may still arrive."""
        try:
            return read_range(self.spark, self.pipeline, intervals, self.root)
        except Exception as error:
            log.debug("%s: the source was asked early: %s", intervals[0], error)
            return None

    def _ask_for_each(self, why: object) -> dict[Interval, Read]:
        self._asks_together = False
        log.warning("%s: the rest of this run asks the source for one interval at a time: %s", self.pipeline.name, why)
        return {}

    def _attempts(
        self,
        intervals: Sequence[Interval],
        permissions: Permissions,
        made: list[Attempt],
        together: Mapping[Interval, Read],
    ) -> Iterator[Attempt]:
        """Yield an attempt of each interval, up to the first that can't be read yet. Add each to `made`.

        `together`: The source's answers from one query for all intervals; empty if it is asked for each interval.
        """
        for interval in intervals:
            if made and interval in self._failed_early:
                return
            try:
                attempt = self._attempt(interval, permissions, together.get(interval))
            except Exception as error:
                if is_lost(error) or not made:
                    raise
                self._failed_early.add(interval)
                return
            if not self._reads_ahead:
                return
            made.append(attempt)
            yield attempt

    def _keep_reads(self, attempts: Sequence[Attempt]) -> None:
        """Keep the source's answers for the next plan, except answers with the rows of several intervals."""
        reads = {one.interval: one.read for one in attempts if one.read is not None}
        self._answers |= {interval: read for interval, read in reads.items() if read.together is None}

    def _ask_again(self, why: str) -> None:
        """Give up the rest of a chunk, and drop the source's answers, because they are out of date."""
        self._answers.clear()
        self._no_chunk(f"{why}. Nothing of it is committed", logging.WARNING)

    def _no_chunk(self, why: str, level: int = logging.INFO) -> None:
        """Log that intervals can't be computed together. After `_VAIN_CHUNKS` times in a row, stop trying."""
        self._vain += 1
        log.log(level, "%s: the next intervals are computed one by one: %s", self.pipeline.name, why)
        if self._vain == _VAIN_CHUNKS:
            self._why_alone = why

    def _read(self, interval: Interval) -> Read:
        """Return the source's answer for the interval. Ask the source now if it has not answered yet."""
        began_ns = time.monotonic_ns()
        if interval not in self._answers:
            self._take_answers()  # The user's source never runs in two threads at once.
        read = self._answers.pop(interval, None) or self._ask_now(interval)
        return replace(read, waited_ns=read.waited_ns + time.monotonic_ns() - began_ns)

    def _read_ahead(self, intervals: Sequence[Interval]) -> None:
        """Let the thread `reading` ask the source for those intervals without an answer, up to the first error."""
        source = self.pipeline.source
        looks_back = isinstance(source, Upstreams) and any(edge.back for edge in source.edges.values())
        asked = [i for i in intervals if i not in self.known and i not in self._answers and i not in self._ahead]
        if asked and self._reads_ahead and not looks_back:
            self._take_answers()
        if asked and self._reads_ahead and not looks_back:
            self._ahead = asked
            self.reading.begin(self._in_thread(partial(self._ask_all, asked)))

    def _take_answers(self) -> list[Read] | None:
        """Wait for the thread `reading`, and keep its answers for single intervals.

        If it asked for several intervals by one query, return these answers; None if that failed, or for single
        intervals.
        """
        if self._ahead_together:
            self._ahead_together = ()
            together: list[Read] | None = self.reading.wait()
            return together
        if self._ahead:
            self._ahead = ()
            self._answers |= self.reading.wait()
        return None

    def _ask_all(self, intervals: Sequence[Interval]) -> dict[Interval, Read]:
        answers: dict[Interval, Read] = {}
        for interval in intervals:
            if self._stopped or interval in self._failed_early:
                break
            try:
                read = self._ask_now(interval)
            except Exception as error:  # The input of the interval may still arrive before its turn.
                log.debug("%s: the source was asked early: %s", interval, error)
                self._failed_early.add(interval)
                break
            if not self._reads_ahead:  # This answer lacks what the pipeline writes before the interval's turn.
                break
            answers[interval] = read
        return answers

    def _ask_now(self, interval: Interval) -> Read:
        read = self.known.get(interval) or read_source(self.spark, self.pipeline, interval, self.root)
        self._may_read_ahead(read)
        self._schema = read.rows.schema
        return read

    def _may_read_ahead(self, read: Read) -> bool:
        """Return True if the source may be asked for an interval before the one before it is committed.

        If the query of an answer (`read`) may read what this pipeline writes, the result is False from then on.
        """
        if self._reads_ahead and self._reads_itself(read):
            log.info(
                "%s: each further interval has a Spark job of its own, because the source's query seems to read what this pipeline writes",
                self.pipeline.name,
            )
            self._reads_ahead = False
        return self._reads_ahead

    def _reads_itself(self, read: Read) -> bool:
        """Return True if the source reads what this pipeline writes, as far as the plan of its query shows."""
        if any(one.pipeline == self.pipeline.name for one in read.untracked):
            return True
        try:
            return reads_below(read.rows, self._at.url)
        except Exception as error:
            if is_lost(error):
                raise
            log.debug("the plan of the source could not be read: %s", error)
            return True

    def _in_thread(self, work: Callable[[], Any]) -> Callable[[], Any]:
        """Return `work` bound to this thread's Spark tags, so that an interrupt by tag also stops its Spark jobs."""
        if not hasattr(self.spark, "addTag"):  # `PipelineTester` passes a session without Spark, which has no tags.
            return work
        from pyspark import inheritable_thread_target

        inherit: Any = inheritable_thread_target(self.spark)
        inherited: Callable[[], Any] = inherit(work)
        return inherited
