"""Choose the checkpoints that a commit retains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta

from state_backend.checkpoint.log import Log, kept_of
from state_backend.checkpoint.newest_state import newest_of, valid_states
from state_backend.values.records import Content, Record, Retained
from state_backend.values.retention import RetentionPolicy, default_retention, quarantined_days

# The policy for a commit whose content has none: the default policy of daily intervals.
DEFAULT_POLICY: RetentionPolicy = default_retention(timedelta(days=1))


def with_retention(log: Log, content: Content) -> Content:
    """Return the content with the retention policy that applies from its commit on.

    The first policy that exists is taken:

    - An interval: the policy in its pipeline's code (`content.retention`), the newest record's policy, the default
      policy for the interval's length.
    - Any other commit, such as a rewind: the newest record's policy, `content.retention`, the same default. Here
      `content` is copied from an earlier record or a savepoint, so its policy may be out of date.
    """
    newest = log.newest.content.retention if log.newest is not None else None
    own = content.retention
    chosen = own or newest if content.kind == "interval" else newest or own
    length = content.interval.end - content.interval.start
    return replace(content, retention=chosen or default_retention(length))


def with_schedule(log: Log, content: Content) -> Content:
    """Return the content with the schedule that applies from its commit on, chosen as in `with_retention`.

    An interval brings the schedule of its code or DAG. In all other cases, the newest record's schedule stays.
    """
    own = content.schedule
    chosen = own or log.schedule if content.kind == "interval" else log.schedule or own
    return content if chosen == own else replace(content, schedule=chosen)


def plan_retention(
    log: Log,
    new: Record,
    marks: Mapping[int, int],
    policy: RetentionPolicy,
    protected: frozenset[int] = frozenset(),
    validated: Sequence[frozenset[int]] = (),
) -> tuple[Retained, ...]:
    """Return the checkpoints that are retained once `new` is committed and has made those in `marks` stale.

    These checkpoints are always retained: `new`; the newest state, so that a re-run of an old day does not cost today's
    state; the checkpoint of the latest interval, stale or not; for each set in `validated` (the ids that passed in one
    mode), the newest state in it; and the ids in `protected`. The policy chooses among the others without quarantine.

    Quarantined checkpoints and their descendants do not count for the policy, and are dropped if not protected
    (`held_in_quarantine`). A consolidated checkpoint's base is dropped one commit later than the consolidation, because
    a running interval may still restore the base.
    """
    before, valid = log.kept, valid_states(log, new, marks)
    usable = [*(c for c in before if log.quarantine_above(c.id) is None), kept_of(new)]
    newest = [newest_of(valid)]
    newest += [
        newest_of(c for c in valid if c.id in ids) or newest_of(c for c in usable if c.id in ids) for ids in validated
    ]
    replaced = {c.base_id for c in usable if c.kind == "consolidate" and c.id != new.id}
    usable = [c for c in usable if c.id not in replaced]
    newest.append(newest_of(usable))
    keep = {new.id, *(policy.keep(usable)), *(protected & {c.id for c in before})}
    keep |= {c.id for c in newest if c is not None}
    old = log.retained
    return tuple(
        old[i] if i in old and (old[i].stale_by or i not in marks) else Retained(id=i, stale_by=marks.get(i))
        for i in sorted(keep)
    )


def held_in_quarantine(
    log: Log, since_ms: Mapping[int, int | None], now_ms: int | None, policy: RetentionPolicy
) -> frozenset[int]:
    """Return the quarantined checkpoints, and their bases, that a commit must still retain.

    A person may compare a quarantined checkpoint with its base, or release it. The commit retains it until the person
    releases or drops it, or until the days of the policy have passed. `since_ms`: When each quarantine began. An
    unknown time (None) counts as now.
    """
    days_ms = quarantined_days(policy) * 86_400_000
    held = set()
    for kept in log.kept:
        mark, since = log.quarantined.get(kept.id), since_ms.get(kept.id)
        if mark is None or mark.dropped or days_ms == 0:
            continue
        if since is None or now_ms is None or now_ms - since < days_ms:
            held |= {kept.id} if kept.base_id is None else {kept.id, kept.base_id}
    return frozenset(held & log.retained.keys())
