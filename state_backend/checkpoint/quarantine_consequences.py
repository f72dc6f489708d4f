"""What follows when a checkpoint is refused, and whether its quarantine may end. Pure functions over the log."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from state_backend.checkpoint.log import Log, base_of, base_with_shared_marks, interval_of
from state_backend.values.errors import Rerun
from state_backend.values.frozen import frozen
from state_backend.values.intervals import Interval
from state_backend.values.records import SweepRecord


@frozen
class Consequences:
    published: tuple[tuple[Interval, int], ...]
    # The intervals to run again, from the first to the last in `published`. If `published` is empty, the interval of
    # the refused checkpoint. None if no commit has the checkpoint's id.
    rerun: Rerun | None


def describe_consequences(costs: Consequences | None) -> dict[str, Any]:
    """Return consequences as JSON values. If nothing was refused, `costs` is None, and the values are empty."""
    return {
        "published": [
            {"id": n, "interval": str(interval)} for interval, n in ([] if costs is None else costs.published)
        ],
        "rerun": None if costs is None or costs.rerun is None else costs.rerun.as_json(),
    }


def plan_consequences(log: Log, refused: int) -> Consequences:
    """Return the current output of checkpoint `refused` and of its descendants, and the intervals to run again."""
    entry, descends = log.entries[refused], {refused}
    if isinstance(entry, SweepRecord):
        return Consequences(published=(), rerun=None)
    own = interval_of(entry)
    for later in range(refused + 1, log.head_id + 1):  # a base has a lower id than its descendants
        entry = log.entries[later]
        if not isinstance(entry, SweepRecord) and base_of(entry) in descends:
            descends.add(later)
    # No descendant's interval ends before the refused checkpoint's, so this one listing has the output of all.
    published = tuple((interval, n) for interval, n in log.outputs_after(own.start) if n in descends)
    intervals = [interval for interval, _ in published] or [own]
    return Consequences(published=published, rerun=Rerun(first=intervals[0].start, last=intervals[-1].start))


def computed_without(log: Log, checkpoint_id: int) -> int | None:
    """Return the id of a usable checkpoint whose state would be wrong after a release of this one; None without one.

    Example: interval 3 has checkpoints 3 and 7, which differ. Checkpoint 7 is quarantined, so checkpoint 3 counts
    again, and interval 4 starts from it: checkpoint 8. After a release, checkpoint 7 replaces checkpoint 3 again. But
    only a commit makes later checkpoints stale, so interval 5 would start from checkpoint 8, and nobody would notice.

    A release is harmless if a usable commit has replaced the checkpoint since.
    """
    if (found := _find_released(log, checkpoint_id)) is None:
        return None
    after, interval = found
    for kept in log.kept:
        later = kept.id > checkpoint_id and kept.interval.end > interval.end
        counts = later and log.retained[kept.id].stale_by is None and after.quarantine_above(kept.id) is None
        if counts and not _descends(log, kept.id, checkpoint_id):
            return kept.id
    return None


def hidden_by_release(log: Log, checkpoint_id: int) -> int | None:
    """Return the id of the checkpoint that a release of this dropped checkpoint would put out of use; None without one.

    While a checkpoint is quarantined, an older one of its interval counts instead. After a release, the older one no
    longer counts. If retention has dropped the released one meanwhile, the next interval could start from neither.
    """
    if checkpoint_id in log.retained or (found := _find_released(log, checkpoint_id)) is None:
        return None
    after, interval = found
    older = [k.id for k in log.kept if k.id < checkpoint_id and k.interval == interval]
    return next((n for n in reversed(older) if after.quarantine_above(n) is None), None)


def _find_released(log: Log, checkpoint_id: int) -> tuple[Log, Interval] | None:
    """Return (the log without the checkpoint's quarantine, its interval); None if a later usable commit replaced it."""
    entry = log.entry(checkpoint_id)
    if entry is None or isinstance(entry, SweepRecord):
        return None
    interval = interval_of(entry)
    after = replace(log, quarantined={n: mark for n, mark in log.quarantined.items() if n != checkpoint_id})
    newer = [e.id for e in after.commits_near(interval, after=checkpoint_id) if interval_of(e) == interval]
    return None if any(after.quarantine_above(n) is None for n in newer) else (after, interval)


def _descends(log: Log, checkpoint_id: int, ancestor: int) -> bool:
    at: int | None = checkpoint_id
    while at is not None and at > ancestor:
        entry = log.entry(at)
        at = None if entry is None or isinstance(entry, SweepRecord) else base_with_shared_marks(entry)
    return at == ancestor
