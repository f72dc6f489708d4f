"""Find out, for messages after a failed validation, which output was made with refused state and must be made again."""

from __future__ import annotations

from dataclasses import dataclass

from state_backend.checkpoint.log import Log, base_of, interval_of
from state_backend.values.errors import Rerun
from state_backend.values.intervals import Interval
from state_backend.values.records import SweepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Consequences:
    """The consequences of refusing a checkpoint."""

    published: tuple[tuple[Interval, int], ...]
    # The intervals to run again, from the first to the last in `published`. If `published` is empty, the interval of
    # the refused checkpoint. None if no commit has the checkpoint's id.
    rerun: Rerun | None


def plan_consequences(log: Log, refused: int) -> Consequences:
    """Return the current output of checkpoint `refused` and of its descendants, and the intervals to run again."""
    descends, published, own = {refused}, [], None
    for checkpoint_id in range(refused, log.head_id + 1):  # a base has a lower id than its descendants
        entry = log.entries[checkpoint_id]
        if isinstance(entry, SweepRecord):
            continue
        interval = interval_of(entry)
        if base_of(entry) in descends:
            descends.add(checkpoint_id)
        if checkpoint_id == refused:
            own = interval
        if checkpoint_id in descends and (interval, checkpoint_id) in log.outputs_near(interval):
            published.append((interval, checkpoint_id))
    published.sort()
    intervals = [interval for interval, _ in published] or ([own] if own is not None else [])
    if not intervals:
        return Consequences(published=(), rerun=None)
    again = Rerun(first=intervals[0].start, last=intervals[-1].start)
    return Consequences(published=tuple(published), rerun=again)
