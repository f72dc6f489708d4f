"""What the next record says of all records below it. Pure, over the log; ``append_record.py`` looks up what the storage knows."""

from __future__ import annotations

from collections.abc import Collection

from state_backend.checkpoint.log import Log, facts_of, interval_of, kept_of, kind_of, left_same_state, vouched_base_of
from state_backend.formats import paths
from state_backend.values.records import (
    Judged,
    Record,
    Summary,
    Superseded,
    SweepRecord,
    Tombstone,
    Unpublished,
)

# How far the commits of an empty log reach: before any day.
_BEFORE_ALL_MS = -(2**62)


def summary_so_far(log: Log) -> Summary:
    """The newest record's; of a log without one, what follows from all entries. Then ``unpublished`` lists every interval."""
    known = log.recorded_summary
    if known is not None:
        return known
    current = {n for n, _ in log.current_outputs().values()}
    commits = list(log.commits())
    left = [
        e.id
        for e in commits
        if (isinstance(e, Tombstone) and e.outputs and e.id not in current)
        or (isinstance(e, Record) and e.id not in log.retained)
    ]
    return Summary(
        dropping=tuple(left),
        unpublished=tuple(Unpublished(interval=i, id=n) for i, n in dict(log.publications()).items()),
        superseded=tuple(Superseded(id=c.id, by=by) for c in log.completed() if (by := log.superseding(c))),
        levels=tuple(sorted({paths.settled_level(i) for e in commits if (i := interval_of(e)) is not None})),
    )


def next_summary(
    log: Log,
    new: Record | SweepRecord,
    *,
    published: Collection[Unpublished] = (),
    done: Collection[int] = (),
) -> Summary:
    """The summary of ``new``, whose other fields are final. ``published``: what of the unpublished has its mark by now; ``done``:
    what of the dropping ids is a tombstone without files by now."""
    before, kept = summary_so_far(log), {r.id for r in new.retained}
    dropping = {n for n in before.dropping if n not in done} | (log.retained.keys() - kept)
    waiting = {u.interval: u.id for u in before.unpublished if u not in published}
    superseded = {s.id: s.by for s in before.superseded if s.id in kept}
    levels = {*before.levels}
    still = tuple(k for k in log.kept if k.id in kept)
    replaced, reach_ms = _replaced_before(log), _reach_ms(log)
    settled = _settled_before(log)
    if isinstance(new, Record):
        still = (*still, kept_of(new))
        reach_ms = max(reach_ms, new.content.interval.end_ms)
        interval = new.content.interval
        settled += len(facts_of(new))
        levels.add(paths.settled_level(interval))
        if new.content.kind == "interval":
            gone = _replaced_outputs(log, new)
            dropping |= gone - kept
            replaced |= gone
            waiting |= dict.fromkeys(new.replaced, new.id)
            waiting[interval] = new.id
        if new.content.kind in ("interval", "restore"):
            for old in log.kept:
                if old.id in kept and old.interval == interval and not left_same_state(new, old):
                    superseded[old.id] = (*superseded.get(old.id, ()), new.id)
    return Summary(
        dropping=tuple(sorted(dropping)),
        unpublished=tuple(Unpublished(interval=i, id=n) for i, n in sorted(waiting.items())),
        superseded=tuple(Superseded(id=n, by=by) for n, by in sorted(superseded.items())),
        marks=tuple(sorted(log.quarantined)),
        refused=_refused(log, new, kept | {n for by in superseded.values() for n in by}),
        levels=tuple(sorted(levels)),
        kept=still,
        reach_ms=reach_ms,
        replaced_outputs=tuple(sorted(replaced & (kept | dropping))),
        settled=settled,
    )


def _settled_before(log: Log) -> int:
    """How many files in ``settled/commits/`` all commits of the log have. Lists them where the newest record does not say it."""
    known = log.recorded_summary
    return known.settled if known is not None and known.settled is not None else len({*log.facts()})


def _reach_ms(log: Log) -> int:
    """The latest end of an interval that was ever committed. Lists all that was settled where the newest record does not say it."""
    known = log.recorded_summary
    if known is not None and known.reach_ms is not None:
        return known.reach_ms
    return max((i.end_ms for i in log.committed_intervals()), default=_BEFORE_ALL_MS)


def _replaced_before(log: Log) -> set[int]:
    """Of the retained and the dropping ids those whose output is no longer current."""
    known = log.recorded_summary
    if known is not None and known.replaced_outputs is not None:
        return {*known.replaced_outputs}
    near = {*log.retained, *summary_so_far(log).dropping}
    return {n for n in near if is_replaced(log, log.entries[n])}


def is_replaced(log: Log, entry: Record | SweepRecord | Tombstone) -> bool:
    """Whether a retained or dropping commit made output that is no longer current."""
    if isinstance(entry, SweepRecord) or kind_of(entry) != "interval" or (interval := interval_of(entry)) is None:
        return False
    known = log.recorded_summary
    if known is not None and known.replaced_outputs is not None:
        return entry.id in known.replaced_outputs
    return log.publication_of(interval) != entry.id


def _replaced_outputs(log: Log, new: Record) -> set[int]:
    """The ids of commits whose output is current in ``log`` and no longer once ``new`` is committed."""
    interval = new.content.interval
    return {n for i, n in log.outputs_near(interval) if i == interval or i in new.replaced}


def _refused(log: Log, new: Record | SweepRecord, asked_of: set[int]) -> tuple[Judged, ...]:
    found = {}
    for checkpoint_id in asked_of:
        at: int | None = checkpoint_id
        if checkpoint_id == new.id and isinstance(new, Record):
            at = vouched_base_of(new)
        by = log.quarantine_above(at) if at is not None else None
        if by is not None:
            found[checkpoint_id] = by
    return tuple(Judged(id=n, by=by) for n, by in sorted(found.items()))
