"""Many intervals of a pipeline in one go, one after the other, each as if it had been run alone.

Each interval is an attempt, a commit, a record and an output of its own. What is on disk if we stop anywhere is what `run_interval`
would leave if it stopped there: everything before is committed, and one attempt may have files that no record names.

What is saved: programs are started once; records of the log are read once; the source of the next interval is asked while the shards of
this one work; and what a commit leaves to do (publication without a sink, clean-up) is done beside the next interval, and is
finished before that one is committed. State is not kept open in between: Spark gives a shard to any of its workers, and to link the
files that the host's cache has takes milliseconds.
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

from cairn.operations.coordinator_of import coordinator_of
from cairn.operations.plan_interval import Attempt, Read, in_zone_of, would_be_made_of
from cairn.operations.plan_range import (
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
from cairn.operations.process_interval import OnShards, process_interval
from cairn.operations.read_source import read_source
from cairn.operations.run_interval import finish_commit
from cairn.pipeline import Interval, Pipeline
from cairn.spark.session import check_running, use_this_python
from state_backend.checkpoint.interval_results import Result, results_of, spoilt_by
from state_backend.values.errors import UsageError
from state_backend.values.records import NO_PERMISSIONS, Content, Permissions, Record, RunRef

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
        checkpoint: The id of the checkpoint; None if a dry run would compute the interval.
        record: The record that this call committed, in `OnOutcome` alone. The outcomes that `run_intervals` returns have None, since
            the records of a long range would fill the memory; `Coordinator.record` reads a retained one by its id.
        why: A sentence for the log.
    """

    interval: Interval
    computed: bool
    ours: bool
    checkpoint: int | None
    record: Record | None
    why: str


OnOutcome = Callable[[Outcome, Progress], None]


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

    A second call with the same arguments goes on behind the last commit; with "all" only if the call names the same ``run``.

    Args:
        intervals: Each starts where the one before ends.
        reprocess: Intervals with a result that are computed again. "changed": where code or input changed since, as far as the source
            records its position. "none": only stale results. "all": every interval, except results that the same ``run`` committed.
        permissions: For the first interval that is computed. Later intervals keep ``replace_overlapping`` alone.
        run: Names this run, the same in every try; None for this call alone.
        read_ahead: Ask the source for the next interval while this interval is computed. False if the source reads the pipeline's output.
        on_outcome: Gets each outcome with its record, and the progress.
        on_shards: As in `process_interval`.
        before_commit: Gets the prepared content. An exception stops the range before that commit.
        asked: Answers of the source for some of the intervals; these are not asked again.

    Raises:
        CairnError: As `run_interval`, with a note that says how many intervals were committed.
    """
    _check(intervals, reprocess)
    named = run is not None
    run = run or RunRef(run_id=f"direct__{uuid.uuid4()}", clear_number=0, try_number=1)
    check_running(spark)
    use_this_python(spark)
    # Once around all: the thread that reads ahead reads in the same zone.
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
    """What `run_intervals` would do with each interval now, and why. Nothing is written.

    spark: needed only for "changed", to ask the source; None: what depends on it counts as computed.
    Behind the first interval that would be computed anew in the place of another result, the others are computed too if that one differs.
    """
    _check(intervals, reprocess)
    run = run or RunRef(run_id=f"direct__{uuid.uuid4()}", clear_number=0, try_number=1)
    there = _results(pipeline, root, intervals)
    outcomes, again = list[Outcome](), None
    for interval in intervals:
        result = there.get(interval)
        decision = keep_or_compute(result, reprocess, run)
        if isinstance(decision, AskSource):
            assert result is not None
            if spark is None:
                decision = Compute(why=f"unless code and input of checkpoint {result.id} are what they were")
            else:
                with in_zone_of(spark, pipeline.time_zone):
                    decision = plan_by_input(result, _made_of_now(spark, pipeline, interval, permissions))
        if isinstance(decision, Keep):
            why = decision.why if again is None else f"{decision.why}; computed if the result of {again} differs"
            outcomes.append(
                Outcome(
                    interval=interval,
                    computed=False,
                    ours=decision.ours,
                    checkpoint=decision.checkpoint,
                    record=None,
                    why=why,
                )
            )
        else:
            again = again or (interval if result is not None else None)
            outcomes.append(
                Outcome(interval=interval, computed=True, ours=True, checkpoint=None, record=None, why=decision.why)
            )
    return outcomes


def _made_of_now(spark: SparkSession, pipeline: Pipeline, interval: Interval, permissions: Permissions) -> str | None:
    rows, position = read_source(spark, pipeline, interval)
    return would_be_made_of(spark, pipeline, interval, Read(rows=rows, position=position), permissions)


def committed_alike(
    spark: SparkSession, pipeline: Pipeline, interval: Interval, root: str, *, run: RunRef, permissions: Permissions
) -> tuple[Result | None, Read | None]:
    """The result of an interval that another run has committed, if it counts and the same code made it from the same input. Beside it
    what the source said, if it was asked for that.

    None for a run that was cleared: it computes again on purpose. Raises: SourceError, as `read_source`.
    """
    there = None if run.clear_number else _results(pipeline, root, [interval]).get(interval)
    if there is None or there.input_hash is None or not isinstance(keep_or_compute(there, "changed", run), AskSource):
        return None, None
    with in_zone_of(spark, pipeline.time_zone):
        rows, position = read_source(spark, pipeline, interval)
        read = Read(rows=rows, position=position)
        alike = isinstance(plan_by_input(there, would_be_made_of(spark, pipeline, interval, read, permissions)), Keep)
    return there if alike else None, read


def _check(intervals: Sequence[Interval], reprocess: str) -> None:
    if reprocess not in REPROCESS:
        raise UsageError(f"reprocess {reprocess!r} is not one of {', '.join(REPROCESS)}")
    check_in_order(intervals)


def _results(pipeline: Pipeline, root: str, intervals: Sequence[Interval]) -> dict[Interval, Result]:
    start = Interval(pipeline.start, pipeline.start + timedelta(milliseconds=1))
    return results_of(coordinator_of(pipeline, root).log(), intervals, start)


def _how_far(outcomes: Sequence[Outcome], intervals: Sequence[Interval], *, again: bool) -> str:
    """``again``: another call can't tell what this one has committed from what was there before, and is to compute that anew."""
    computed = sum(outcome.computed for outcome in outcomes)
    return (
        f"{computed} of {len(intervals)} intervals were computed and committed before, {len(outcomes) - computed} stay as they were; "
        f"it stopped at {intervals[min(len(outcomes), len(intervals) - 1)]}\n"
        f"The same call {'computes all of them again; begin there to go on' if again else 'goes on from there'}"
    )


class _Aside:
    """One thing at a time in a thread of its own. The thread ends with the stack."""

    def __init__(self, stack: ExitStack) -> None:
        self._pool = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="cairn-range"))
        self._under_way: Future[Any] | None = None

    def begin(self, work: Callable[[], Any]) -> None:
        """Raises: what the work before raised."""
        self.wait()
        self._under_way = self._pool.submit(work)

    def wait(self) -> Any:
        """What the work under way returns; None if there is none. Raises: what it raised."""
        under_way, self._under_way = self._under_way, None
        return None if under_way is None else under_way.result()


@dataclass(kw_only=True)
class _Range:
    """The shell of `run_intervals`: an attempt and a commit per interval."""

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
        self._coordinator = coordinator_of(self.pipeline, self.root, remembers=True)
        self._ahead: Interval | None = None

    def run_all(self, intervals: Sequence[Interval], on_outcome: OnOutcome | None, named: bool) -> list[Outcome]:
        outcomes: list[Outcome] = []
        progress = Progress(done=0, total=len(intervals), kept=0, recent_s=())
        try:
            for outcome, seconds in self.outcomes(intervals):
                outcomes.append(replace(outcome, record=None))
                progress = progress.computed(seconds) if outcome.computed else progress.left_alone()
                log.info("%s %s: %s (%s)", self.pipeline.name, outcome.interval, outcome.why, progress)
                if on_outcome is not None:
                    on_outcome(outcome, progress)
        except Exception as error:
            if len(intervals) > 1:
                error.add_note(_how_far(outcomes, intervals, again=self.reprocess == "all" and not named))
            raise
        return outcomes

    def outcomes(self, intervals: Sequence[Interval]) -> Iterator[tuple[Outcome, float]]:
        """Each interval's outcome, and the seconds that it took."""
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
                    waiting = {checkpoint_id for _, checkpoint_id in self._coordinator.unpublished()}
                if decision.checkpoint in waiting:
                    # The try that committed it was stopped before its sink was called, or by its sink. Nothing may come behind it that
                    # publishes it.
                    self.finishing.wait()
                    self._finish(decision.checkpoint)
                why = f"stays checkpoint {decision.checkpoint}: {decision.why}"
                kept = Outcome(
                    interval=interval,
                    computed=False,
                    ours=decision.ours,
                    checkpoint=decision.checkpoint,
                    record=None,
                    why=why,
                )
                yield kept, time.monotonic() - started
                continue
            following = intervals[n + 1] if n + 1 < len(intervals) else None
            if following is not None and isinstance(keep_or_compute(there.get(following), "none", self.run), Keep):
                following = None  # it may well stay as it is
            record = self._compute(interval, read or self._read(interval), permissions, following)
            there = spoilt_by(there, record)
            # The ones behind it start from this one, whatever the first was allowed to start from.
            permissions = Permissions(replace_overlapping=self.first.replace_overlapping)
            why = f"checkpoint {record.id}, since {decision.why}"
            yield (
                Outcome(interval=interval, computed=True, ours=True, checkpoint=record.id, record=record, why=why),
                time.monotonic() - started,
            )
        self.finishing.wait()

    def _compute(self, interval: Interval, read: Read, permissions: Permissions, following: Interval | None) -> Record:
        attempt = Attempt(
            id=str(uuid.uuid4()), interval=interval, mode=self.mode, run=self.run, permissions=permissions
        )
        if following is not None and self.read_ahead and following not in self.known:
            self._ahead = following
            self.reading.begin(self._in_thread(partial(self._ask, following)))
        prepared = process_interval(
            self.spark,
            self.pipeline,
            self.root,
            attempt,
            coordinator=self._coordinator,
            on_shards=self.on_shards,
            read=read,
        )
        if self.before_commit is not None:
            self.before_commit(prepared.content)
        self.finishing.wait()  # what the commit before left to do; if that failed, nothing more is committed
        committed = self._coordinator.commit(attempt.id)
        record = committed.record or self._coordinator.record(committed.id)
        if self.pipeline.sink is None:
            self.finishing.begin(partial(self._finish, committed.id))
        else:
            # A sink is the user's: it is called where it always is, and before the next interval is begun.
            self._finish(committed.id)
        return record

    def _finish(self, checkpoint_id: int) -> None:
        finish_commit(self.spark, self.pipeline, self._coordinator, checkpoint_id, self.root)

    # --- the source ------------------------------------------------------------------------------------------------------------

    def _read(self, interval: Interval) -> Read:
        """What the source says of the interval: it was asked ahead, or is asked now.

        Raises: as `read_source`, when it is this interval's turn.
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
        if interval in self.known:
            return self.known[interval]
        rows, position = read_source(self.spark, self.pipeline, interval)
        return Read(rows=rows, position=position)

    def _in_thread(self, work: Callable[[], Any]) -> Callable[[], Any]:
        """The work with this thread's tags, by which what it runs on Spark is interrupted together with the rest."""
        if not hasattr(self.spark, "addTag"):  # a session of tests, without Spark
            return work
        from pyspark import inheritable_thread_target

        inherit: Any = inheritable_thread_target(self.spark)
        inherited: Callable[[], Any] = inherit(work)
        return inherited
