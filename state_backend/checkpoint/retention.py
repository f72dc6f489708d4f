"""Which checkpoints stay, and by whose choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta

from state_backend.checkpoint.log import Log, base_of, kind_of
from state_backend.values.records import Content, Kept, Record, Retained
from state_backend.values.retention import RetentionPolicy, default_retention

# Of days; where nobody said how long the intervals are.
DEFAULT_POLICY: RetentionPolicy = default_retention(timedelta(days=1))


def with_retention(log: Log, content: Content) -> Content:
    """The content with the policy that holds from its commit on: what its pipeline's code says, for an interval; else the newest
    record's, since a rewind or a consolidation takes its content from an older one, whose policy may have been another. The default,
    where nobody chose."""
    newest = log.newest.content.retention if log.newest is not None else None
    own = content.retention
    chosen = own or newest if content.kind == "interval" else newest or own
    length = content.interval.end - content.interval.start
    return replace(content, retention=chosen or default_retention(length))


def plan_retention(
    log: Log, new: Record, marks: Mapping[int, int], policy: RetentionPolicy, protected: frozenset[int] = frozenset()
) -> tuple[Retained, ...]:
    """What is completed once ``new`` is committed, with stale marks.

    Never dropped: ``new``, which is the newest usable one since its base was checked, the one that reaches furthest in time
    (a re-run of an old day must not cost today's state), and ``protected``. Quarantined ones
    and their descendants neither count nor stay, unless they are protected. Nor does what a usable consolidation took the place
    of, from the commit after that one on: until then an interval that started from it may be under way.
    """
    before = log.kept
    every: list[Kept | Record] = [*before, new]
    usable = [c for c in every if c is new or log.quarantine_above(c.id) is None]
    replaced = {base_of(c) for c in usable if kind_of(c) == "consolidate" and c is not new}
    usable = [c for c in usable if c.id not in replaced]
    latest = max(usable, key=lambda c: (c.interval.end, c.id))
    keep = {new.id, latest.id, *(policy.keep(usable)), *(protected & {c.id for c in before})}
    inherited = log.retained
    return tuple(
        Retained(id=i, stale_by=inherited[i].stale_by if i in inherited and inherited[i].stale_by else marks.get(i))
        for i in sorted(keep)
    )
