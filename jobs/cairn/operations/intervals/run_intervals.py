"""Process many intervals of a pipeline in one call, one after the other, with the same results as single runs.

Each interval has its own attempt, commit, record and output. If the process stops at any point, the storage contains
what `run_interval` would leave at that point: all earlier intervals are committed, and one attempt may have files that
no record names.

One call saves time in four ways:

1. The programs start once.
2. The log's records are read once.
3. The source is asked for the next interval while the shards compute the present one.
4. If the pipeline has no sink, the work after a commit (the clean-up) runs in a thread beside the next interval. It
   ends before the next commit. A sink runs before the next interval begins.

Each interval opens the shards' RocksDB stores again. Keeping them open would not help, because Spark may give a shard
to another worker in the next interval. To open a store costs only milliseconds: its files are linked from the host's
cache.
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

from cairn.operations.intervals.plan_interval import Attempt, in_zone_of, would_be_made_of
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
from cairn.operations.intervals.process_interval import OnShards, process_interval
from cairn.operations.intervals.read_source import Read, read_source
from cairn.operations.intervals.run_interval import finish_commit
from cairn.operations.intervals.what_changed import MadeOf
from cairn.pipeline import Interval, Pipeline
from cairn.shipping.ship_processor import code_of_one_call
from cairn.spark.session import check_running, use_this_python
from cairn.upstream_sources import Upstreams
from state_backend.chains.judge_inputs import Chains
from state_backend.checkpoint.commit_attempt import commit
from state_backend.checkpoint.find_checkpoint import record_of
from state_backend.checkpoint.interval_results import Result, results_of, spoilt_by
from state_backend.checkpoint.location import locate
from state_backend.checkpoint.log import Log, read_log, read_newest
from state_backend.checkpoint.publish_output import unpublished
from state_backend.values.errors import NotAsTried, UsageError
from state_backend.values.records import NO_PERMISSIONS, Content, Permissions, Record, RunRef, own_run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger("cairn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one interval.

    Attributes:
        interval: The interval.
        computed: True if this call computed the interval, False if an earlier result stays.
        ours: True if this run committed the checkpoint, now or in an earlier try.
        checkpoint: Id of the checkpoint; None if a dry run would compute the interval.
        record: The record, if this run committed it, now or in an earlier try. Only `on_outcome` gets it. The outcomes
            that `run_intervals` returns have None, since the records of a long range would fill the memory.
        why: A sentence for the log.
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
    read_ahead: bool = True,
    on_outcome: OnOutcome | None = None,
    on_shards: OnShards | None = None,
    before_commit: Callable[[Content], None] | None = None,
    asked: Mapping[Interval, Read] | None = None,
) -> list[Outcome]:
    """Process and commit intervals in their order, as `run_interval` would one by one. Stop at the first failure.

    A second call with the same arguments continues after the last commit. With `reprocess="all"` this needs the same
    `run`.

    Args:
        spark: A session, classic or Spark Connect.
        pipeline: The pipeline.
        intervals: Each starts where the one before ends.
        root: URL or absolute path of the folder that holds the pipelines.
        mode: How checkpoints are stored: "incremental", "full" or "changelog".
        reprocess: Which intervals with a result are computed again. "changed": those whose code or input has changed;
            a changed input counts only if the source returns a position. "none": only intervals whose result is not
            valid, such as a stale one. "all": every interval, except results that the same `run` committed.
        permissions: Refused actions that the caller allows, such as `allow_gap`. They apply to the first interval that
            is computed. Only `replace_overlapping` applies to later intervals too.
        run: Identifies this run, with the same value in every try; None for this call alone.
        read_ahead: True asks the source for the next interval while this interval is computed. Pass False if the source
            reads the pipeline's own output.
        on_outcome: Function that is called after each interval with its `Outcome`, which has the record, and with the
            `Progress` of the range.
        on_shards: Function that brings the rows to the shards and runs the job on each; None uses Spark.
        before_commit: Function that is called before each commit with the prepared content. If it raises an exception,
            this interval is not committed and the call ends.
        asked: Rows and position that the source has already returned for some intervals. The source is not asked again
            for these intervals.

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
            read_ahead=read_ahead,
            on_shards=on_shards,
            before_commit=before_commit,
            known=asked or {},
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
    permissions: Permissions = NO_PERMISSIONS,
    run: RunRef | None = None,
) -> list[Outcome]:
    """Return what `run_intervals` would do now with each interval, and why. Write nothing.

    A re-run may give another result. Then `run_intervals` also computes later intervals that this plan keeps; their
    outcome says so.
    """
    _check(intervals, reprocess)
    run = run or own_run(f"direct__{uuid.uuid4()}")
    there = _results(pipeline, root, intervals)
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
                    decision = plan_by_input(result, _made_of_now(spark, pipeline, interval, root, permissions))
        if isinstance(decision, Keep):
            why = (
                decision.why
                if again is None
                else f"{decision.why}; computed again if the new result of {again} differs"
            )
            outcomes.append(_kept(interval, decision, why))
        else:
            again = again or (interval if result is not None else None)
            permissions = _of_later(permissions)
            outcomes.append(Outcome(interval=interval, computed=True, why=decision.why))
    return outcomes


def _kept(interval: Interval, decision: Keep, why: str) -> Outcome:
    return Outcome(interval=interval, computed=False, ours=decision.ours, checkpoint=decision.checkpoint, why=why)


def _of_later(permissions: Permissions) -> Permissions:
    """Return the permissions of the intervals after a computed interval.

    They start from its checkpoint, so they need no permission for the first interval's base.
    """
    return Permissions(replace_overlapping=permissions.replace_overlapping)


def _made_of_now(
    spark: SparkSession, pipeline: Pipeline, interval: Interval, root: str, permissions: Permissions
) -> MadeOf:
    return would_be_made_of(spark, pipeline, interval, read_source(spark, pipeline, interval, root), permissions)


def committed_alike(
    spark: SparkSession, pipeline: Pipeline, interval: Interval, root: str, *, run: RunRef, permissions: Permissions
) -> tuple[Result | None, Read | None]:
    """Return another run's committed result of an interval if the same code computed it from the same input.

    A run that was cleared gets no result, since a user clears a run to compute it again.
    """
    there = None if run.clear_number else _results(pipeline, root, [interval]).get(interval)
    if there is None or there.input_hash is None or not isinstance(keep_or_compute(there, "changed", run), AskSource):
        return None, None
    with in_zone_of(spark, pipeline.time_zone):
        read = read_source(spark, pipeline, interval, root)
        alike = isinstance(plan_by_input(there, would_be_made_of(spark, pipeline, interval, read, permissions)), Keep)
    return there if alike else None, read


def _check(intervals: Sequence[Interval], reprocess: str) -> None:
    if reprocess not in REPROCESS:
        raise UsageError(f"reprocess {reprocess!r} is not one of {', '.join(REPROCESS)}")
    check_in_order(intervals)


def _results(pipeline: Pipeline, root: str, intervals: Sequence[Interval]) -> dict[Interval, Result]:
    start = Interval(pipeline.start, pipeline.start + timedelta(milliseconds=1))
    log = read_log(locate(root, pipeline.name).storage)
    found = results_of(log, intervals, start)
    if isinstance(pipeline.source, Upstreams):
        for interval, verdict in Chains().judged(root, pipeline.name, log).items():
            if interval in found and verdict.kind == "stale" and found[interval].spoilt is None:
                found[interval] = replace(found[interval], spoilt=verdict.why)
    return found


def _how_far(outcomes: Sequence[Outcome], intervals: Sequence[Interval]) -> str:
    """Return a note for an error: how many of the intervals were committed before it."""
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
        """Wait for the function that the thread runs, then start `work` in it.

        Raise the earlier function's exception.
        """
        self.wait()
        self._under_way = self._pool.submit(work)

    def wait(self) -> Any:
        under_way, self._under_way = self._under_way, None
        return None if under_way is None else under_way.result()


@dataclass(kw_only=True)
class _Range:
    """One call of `run_intervals`, which makes one attempt and one commit per interval.

    The other fields are the arguments of `run_intervals`.
    """

    spark: SparkSession
    pipeline: Pipeline
    root: str
    mode: str
    reprocess: Reprocess
    run: RunRef
    first: Permissions
    reading: _Aside
    finishing: _Aside
    read_ahead: bool
    on_shards: OnShards | None
    before_commit: Callable[[Content], None] | None
    known: Mapping[Interval, Read]

    def __post_init__(self) -> None:
        self._at = locate(self.root, self.pipeline.name)
        # The log as this process read or wrote it last. Of the next log, only newer records are read.
        self._log: Log | None = None
        self._ahead: Interval | None = None

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
                if not isinstance(error, NotAsTried):  # The same call would fail again: the message says what helps.
                    again = self.reprocess == "all" and not named
                    then = "computes all of them again; to continue, begin there" if again else "continues there"
                    said += f"\nThe same call {then}"
                error.add_note(said)
            raise
        return outcomes

    def outcomes(self, intervals: Sequence[Interval]) -> Iterator[tuple[Outcome, float]]:
        """Run the intervals one after the other. Yield for each its outcome, and the seconds that the interval took.

        An interval either keeps its committed result, or is computed and committed before its outcome is yielded.
        """
        there = _results(self.pipeline, self.root, intervals)
        permissions = self.first
        waiting: set[int] | None = None
        for n, interval in enumerate(intervals):
            started = time.monotonic()
            result, read = there.get(interval), None
            decision = keep_or_compute(result, self.reprocess, self.run)
            if isinstance(decision, AskSource):
                assert result is not None
                read = self._read(interval)
                decision = plan_by_input(
                    result, would_be_made_of(self.spark, self.pipeline, interval, read, permissions)
                )
            if isinstance(decision, Keep):
                if waiting is None:
                    self.finishing.wait()
                    waiting = {checkpoint_id for _, checkpoint_id in unpublished(self._at)}
                if decision.checkpoint in waiting:
                    # An earlier try committed this checkpoint and stopped before the sink accepted its output. Publish
                    # the output now: without a later commit in this range no other step would publish it.
                    self.finishing.wait()
                    finish_commit(self.spark, self.pipeline, self._at, decision.checkpoint)
                why = f"keeps checkpoint {decision.checkpoint}: {decision.why}"
                record = self._record(decision.checkpoint) if decision.ours else None
                yield replace(_kept(interval, decision, why), record=record), time.monotonic() - started
                continue
            following = intervals[n + 1] if n + 1 < len(intervals) else None
            if following is not None and isinstance(keep_or_compute(there.get(following), "none", self.run), Keep):
                # While `_compute` computes `interval`, it asks the source for the interval `following`. But `following`
                # may keep the result that it has in the log. Then no answer of the source is needed for `following`.
                following = None
            record = self._compute(interval, read or self._read(interval), permissions, following)
            there = spoilt_by(there, record)
            permissions = _of_later(permissions)
            why = f"checkpoint {record.id}, because {decision.why}"
            made = Outcome(interval=interval, computed=True, checkpoint=record.id, record=record, why=why)
            yield made, time.monotonic() - started
        self.finishing.wait()

    def _record(self, checkpoint_id: int) -> Record | None:
        """Return the record of a checkpoint that an earlier try of this run has committed; None if it was dropped."""
        self._log = read_newest(self._at.storage, self._log)
        entry = self._log.entries[checkpoint_id]
        return entry if isinstance(entry, Record) else None

    def _compute(self, interval: Interval, read: Read, permissions: Permissions, following: Interval | None) -> Record:
        attempt = Attempt(
            id=str(uuid.uuid4()),
            interval=interval,
            mode=self.mode,
            run=self.run,
            permissions=permissions,
            read=read,
        )
        source = self.pipeline.source
        looks_back = isinstance(source, Upstreams) and any(edge.back for edge in source.edges.values())
        if following is not None and self.read_ahead and not looks_back and following not in self.known:
            self._ahead = following
            self.reading.begin(self._in_thread(partial(self._ask, following)))
        before = read_newest(self._at.storage, self._log)
        prepared = process_interval(
            self.spark, self.pipeline, self._at, attempt, before=before, on_shards=self.on_shards
        )
        if self.before_commit is not None:
            self.before_commit(prepared.content)
        # If the work after the previous commit failed, `wait` raises and this attempt is not committed.
        self.finishing.wait()
        committed = commit(self._at, attempt.id, prepared=prepared, before=before)
        self._log = committed.log or before
        record = committed.record or record_of(self._at, committed.id)
        finish = partial(finish_commit, self.spark, self.pipeline, self._at, committed.id, committed.log)
        if self.pipeline.sink is None:
            self.finishing.begin(finish)
        else:
            # The user's sink runs in this thread and before the next interval begins, as in `run_interval`.
            finish()
        return record

    def _read(self, interval: Interval) -> Read:
        """Return the source's answer for the interval. Ask the source now if the thread `reading` has not asked it.

        If the source failed in that thread, this method raises the error.
        """
        began_ns = time.monotonic_ns()
        return replace(self._asked(interval), waited_ns=time.monotonic_ns() - began_ns)

    def _asked(self, interval: Interval) -> Read:
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            error, read = self.reading.wait()
            if ahead == interval:
                if error is not None:
                    raise error
                found: Read = read
                return found
        return self._ask_now(interval)

    def _ask(self, interval: Interval) -> tuple[Exception | None, Read | None]:
        try:
            return None, self._ask_now(interval)
        except Exception as error:
            return error, None

    def _ask_now(self, interval: Interval) -> Read:
        return self.known.get(interval) or read_source(self.spark, self.pipeline, interval, self.root)

    def _in_thread(self, work: Callable[[], Any]) -> Callable[[], Any]:
        """Bind this thread's Spark tags to the work, so that an interrupt by tag also stops the work's Spark jobs."""
        if not hasattr(self.spark, "addTag"):  # `PipelineTester` passes a session without Spark, which has no tags.
            return work
        from pyspark import inheritable_thread_target

        inherit: Any = inheritable_thread_target(self.spark)
        inherited: Callable[[], Any] = inherit(work)
        return inherited
