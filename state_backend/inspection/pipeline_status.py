"""Status of a pipeline: its next interval, the obstacles to it, and unusable or unpublished checkpoints. Only reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from state_backend.chains.judge_inputs import Verdict
from state_backend.checkpoint.choose_base import choose_base, restored_away
from state_backend.checkpoint.log import Log, newest_interval
from state_backend.checkpoint.publish_output import unpublished_in
from state_backend.checkpoint.rewind import committed_after
from state_backend.inspection.describe import newest_of_interval, reads_of, start_and_end
from state_backend.inspection.publication_group import group_in
from state_backend.ports.storage import Storage
from state_backend.values.errors import CairnError, Rerun
from state_backend.values.frozen import frozen
from state_backend.values.intervals import Interval, format_instant
from state_backend.values.records import Permissions, SweepRecord
from state_backend.values.schedule import interval_from, next_interval


@frozen
class Status:
    # The next interval, by the recorded schedule: it follows the retained interval with the latest end. After a
    # restore, discarded checkpoints don't count. Without a recorded schedule, it is as long as that interval. None if
    # no checkpoint is retained.
    next: Interval | None
    # The id of the checkpoint that `next` starts from; None if `next` can't start.
    base: int | None
    # The reason why `next` can't start; None if it can.
    problem: str | None
    # The intervals to run first so that `next` can start, or the intervals that a restore discarded; None if there are
    # none, or no run helps.
    rerun: Rerun | None
    # Pairs: (checkpoint, commit that made it stale), (checkpoint, reason), (interval, commit with its output).
    stale: tuple[tuple[int, int], ...]
    quarantined: tuple[tuple[int, str], ...]
    unpublished: tuple[tuple[Interval, int], ...]
    # The group whose sinks are called together, and the outputs that wait for it.
    group: str | None = None
    held: tuple[tuple[Interval, int], ...] = ()
    # The results that are out of date by what they read of other pipelines, in the order of time.
    outdated: tuple[tuple[Interval, Verdict], ...] = ()
    # What the newest interval read of other pipelines without tracking, as `reads_of` describes it.
    not_tracked: tuple[Mapping[str, str | None], ...] = ()

    @property
    def well(self) -> bool:
        """Return True if the next interval can start, no interval must run again, and no output waits for the sink."""
        known = all(verdict.kind == "unknown" for _, verdict in self.outdated)
        return self.problem is None and self.rerun is None and not self.unpublished and known

    @property
    def heal_to(self) -> datetime | None:
        """Return the start of the last interval that `cairn heal --chain` repairs; None if no input is out of date.

        It is None too if output of overlapping intervals must be replaced, which `cairn heal` does not do.
        """
        starts = [interval.start for interval, verdict in self.outdated if verdict.kind in ("stale", "pending")]
        if not starts or (self.rerun is not None and self.rerun.replace_overlapping):
            return None
        return max([*starts, *([self.rerun.last] if self.rerun is not None else [])])


def describe_status(found: Status, command: str | None) -> dict[str, Any]:
    return {
        "well": found.well,
        "next": None if found.next is None else [format_instant(found.next.start), format_instant(found.next.end)],
        "base": found.base,
        "problem": found.problem,
        "stale": [{"id": n, "by": by} for n, by in found.stale],
        "quarantined": [{"id": n, "reason": reason} for n, reason in found.quarantined],
        "unpublished": [
            {"id": n, "interval": str(interval), **start_and_end(interval)} for interval, n in found.unpublished
        ],
        "held": [{"id": n, "interval": str(interval), "group": found.group} for interval, n in found.held],
        "outdated": [
            {"interval": str(interval), **start_and_end(interval), "kind": verdict.kind, "why": verdict.why}
            for interval, verdict in found.outdated
        ],
        "not_tracked": [*found.not_tracked],
        "command": command,
    }


def with_refused_bases(log: Log, pipeline: str, rerun: Rerun, length: timedelta, pipeline_start_ms: int) -> Rerun:
    """Return `rerun`, extended to earlier intervals if Cairn would refuse its first one. `length`: of an interval.

    Cairn refuses an interval whose base is stale or quarantined. The intervals that make a valid base must run first.
    """
    while True:
        try:
            first = interval_from(log.schedule, rerun.first) if log.schedule is not None else None
            first = first or Interval(rerun.first, rerun.first + length)
            choose_base(log, pipeline, first, Permissions(), pipeline_start_ms)
            break
        except CairnError as error:
            if error.rerun is None or error.rerun.first >= rerun.first:
                break
            rerun = replace(rerun, first=error.rerun.first)
    return rerun


def following_interval(log: Log, last: Interval) -> Interval:
    """Return the interval after `last`, by the recorded schedule. Without a schedule, it is as long as `last`."""
    if log.schedule is not None:
        return next_interval(log.schedule, last)
    return Interval(last.end, last.end + (last.end - last.start))


def _still_refused(log: Log, checkpoint_id: int) -> bool:
    """Return True if no usable checkpoint has replaced a quarantined one."""
    entry = log.entry(checkpoint_id)
    return entry is None or isinstance(entry, SweepRecord) or newest_of_interval(log, entry) is None


def status_of(log: Log, pipeline: str, storage: Storage, outdated: Mapping[Interval, Verdict] | None = None) -> Status:
    """Return the status of a pipeline. `outdated`: The verdicts about its inputs (`Chains.judged`)."""
    outdated = outdated or {}
    following = base = problem = rerun = None
    there = {kept.id: kept for kept in log.kept}
    if log.newest is not None:
        # The next interval follows the last one, even if the last one's result is stale. Intervals that a restore
        # discarded do not count.
        discarded = restored_away(log)
        counting = [kept.interval for kept in log.kept if kept.id not in discarded]
        last = max(counting, key=lambda i: (i.end, i.start))
        following = following_interval(log, last)
        try:
            start_ms = log.newest.content.pipeline_start_ms
            found = choose_base(log, pipeline, following, Permissions(), start_ms)
            base = found.id if found is not None else None
            if discarded:
                rerun = committed_after(log, last.end)
        except CairnError as error:
            problem, rerun = str(error), error.rerun
            if rerun is not None:
                rerun = with_refused_bases(log, pipeline, rerun, last.end - last.start, start_ms)
    stale = sorted(interval for interval, verdict in outdated.items() if verdict.kind == "stale")
    if stale and (rerun is None or stale[0].start < rerun.first):
        problem = problem or f"{stale[0]} is out of date: {outdated[stale[0]].why}"
        rerun = Rerun(first=stale[0].start, last=max([stale[-1].start, *(kept.interval.start for kept in log.kept)]))
        rerun = with_refused_bases(log, pipeline, rerun, stale[0].end - stale[0].start, start_ms)
    elif problem is None and (known := sorted(i for i, verdict in outdated.items() if verdict.kind != "unknown")):
        problem = f"{known[0]} is out of date: {outdated[known[0]].why}"
    newest = newest_interval(log)
    waiting, group = tuple(sorted(unpublished_in(storage, log))), group_in(log)
    return Status(
        next=following,
        base=base,
        problem=problem,
        rerun=rerun,
        stale=tuple(
            (n, by)
            for n, by in sorted((n, r.stale_by) for n, r in log.retained.items() if r.stale_by is not None)
            if n not in log.quarantined and newest_of_interval(log, there[n]) is None
        ),
        quarantined=tuple((n, log.quarantined[n].reason) for n in sorted(log.quarantined) if _still_refused(log, n)),
        unpublished=waiting if group is None else (),
        group=group,
        held=waiting if group is not None else (),
        outdated=tuple(sorted(outdated.items(), key=lambda item: item[0])),
        not_tracked=tuple(r for r in reads_of(newest.content) if r["tracked"] != "tracked") if newest else (),
    )
