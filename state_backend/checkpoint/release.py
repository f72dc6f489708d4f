"""Decide whether the quarantine of a checkpoint may end. A pure function over the log."""

from __future__ import annotations

from dataclasses import replace

from state_backend.checkpoint.log import Log, base_with_shared_marks, interval_of
from state_backend.values.records import SweepRecord


def computed_without(log: Log, checkpoint_id: int) -> int | None:
    """Return a usable checkpoint that would rest on replaced state if this checkpoint were released; None without one.

    Example: interval 3 has checkpoints 3 and 7, which differ. Checkpoint 7 is quarantined, so checkpoint 3 counts again,
    and interval 4 starts from it: checkpoint 8. After a release, checkpoint 7 replaces checkpoint 3 again. But only a
    commit makes later checkpoints stale, so interval 5 would start from checkpoint 8, and nobody would notice.

    A release is harmless if a usable commit has replaced the checkpoint since.

    Args:
        log: The log.
        checkpoint_id: The id of the quarantined checkpoint.
    """
    entry = log.entry(checkpoint_id)
    if entry is None or isinstance(entry, SweepRecord):
        return None
    interval = interval_of(entry)
    after = replace(log, quarantined={n: mark for n, mark in log.quarantined.items() if n != checkpoint_id})
    newer = [e.id for e in after.commits_near(interval, after=checkpoint_id) if interval_of(e) == interval]
    if any(after.quarantine_above(n) is None for n in newer):
        return None
    for kept in log.kept:
        later = kept.id > checkpoint_id and kept.interval.end > interval.end
        counts = later and log.retained[kept.id].stale_by is None and after.quarantine_above(kept.id) is None
        if counts and not _descends(log, kept.id, checkpoint_id):
            return kept.id
    return None


def _descends(log: Log, checkpoint_id: int, ancestor: int) -> bool:
    at: int | None = checkpoint_id
    while at is not None and at > ancestor:
        entry = log.entry(at)
        at = None if entry is None or isinstance(entry, SweepRecord) else base_with_shared_marks(entry)
    return at == ancestor
