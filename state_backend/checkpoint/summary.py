"""Compute the summary of all earlier records that the next record contains. Pure functions over the log.

`append_record.py` does the look-ups in the storage that the summary needs.
"""

from __future__ import annotations

from collections.abc import Collection

from state_backend.checkpoint.forgotten_keys import next_forgotten
from state_backend.checkpoint.log import Log, base_with_shared_marks, facts_of, kept_of, kind_of
from state_backend.checkpoint.newest_state import superseded_by
from state_backend.formats import paths
from state_backend.values.records import Judged, Record, Summary, Superseded, SweepRecord, Tombstone, Unpublished


def next_summary(
    log: Log, new: Record | SweepRecord, *, published: Collection[Unpublished] = (), done: Collection[int] = ()
) -> Summary:
    """Return the summary of the record `new`. `published`: what the sink has got; `done`: ids that are cleaned up."""
    before, kept = log.summary, {r.id for r in new.retained}
    dropping = {n for n in before.dropping if n not in done} | (log.retained.keys() - kept)
    waiting = {u.interval: u.id for u in before.unpublished if u not in published}
    superseded = {s.id: s.by for s in before.superseded if s.id in kept}
    levels = {*before.levels}
    still = tuple(k for k in log.kept if k.id in kept)
    replaced, latest_end_ms, settled = {*before.replaced_outputs}, before.latest_end_ms, before.settled
    if isinstance(new, Record):
        still = (*still, kept_of(new))
        latest_end_ms = max(latest_end_ms, new.content.interval.end_ms)
        interval = new.content.interval
        settled += len(facts_of(new))
        levels.add(paths.settled_level(interval))
        gone = _replaced_outputs(log, new)
        dropping |= gone - kept
        replaced |= gone
        waiting |= dict.fromkeys(new.replaced, new.id)
        if new.content.kind == "interval":
            waiting[interval] = new.id
        for old in superseded_by(new, log.kept):
            if old.id in kept:
                superseded[old.id] = (*superseded.get(old.id, ()), new.id)
    return Summary(
        dropping=tuple(sorted(dropping)),
        unpublished=tuple(Unpublished(interval=i, id=n) for i, n in sorted(waiting.items())),
        superseded=tuple(Superseded(id=n, by=by) for n, by in sorted(superseded.items())),
        marks=tuple(sorted(log.quarantined)),
        refused=_find_refused(log, new, kept | {n for by in superseded.values() for n in by}),
        levels=tuple(sorted(levels)),
        kept=still,
        latest_end_ms=latest_end_ms,
        replaced_outputs=tuple(sorted(replaced & (kept | dropping))),
        settled=settled,
        forgotten=next_forgotten(before, new) if isinstance(new, Record) else before.forgotten,
    )


def is_replaced(log: Log, entry: Record | SweepRecord | Tombstone) -> bool:
    """Return True if a later commit has replaced or retracted the commit's output.

    The summary tells this only of retained commits and of commits in `Summary.dropping`, whose files a clean-up still
    has to delete. So the commit must be one of these. A sweep's record has no output: the function returns False.
    """
    return (
        kind_of(entry) == "interval" and entry.id in log.summary.replaced_outputs
        if not isinstance(entry, SweepRecord)
        else False
    )


def _replaced_outputs(log: Log, new: Record) -> set[int]:
    """Return the ids of commits whose output is current in `log` but not after `new` is committed."""
    interval = new.content.interval
    if new.content.kind == "interval":
        return {n for i, n in log.outputs_near(interval) if i == interval or i in new.replaced}
    return {n for i, n in log.outputs_after(interval.end) if i in new.replaced} if new.replaced else set()


def _find_refused(log: Log, new: Record | SweepRecord, asked_of: set[int]) -> tuple[Judged, ...]:
    found = {}
    for checkpoint_id in asked_of if log.quarantined else ():
        at: int | None = checkpoint_id
        if checkpoint_id == new.id and isinstance(new, Record):
            at = base_with_shared_marks(new)
        by = log.quarantine_above(at) if at is not None else None
        if by is not None:
            found[checkpoint_id] = by
    return tuple(Judged(id=n, by=by) for n, by in sorted(found.items()))
