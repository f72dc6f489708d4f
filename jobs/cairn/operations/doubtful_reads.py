"""Results that may have been computed from old input, although their source position is that of the new input.

Older releases had a fault: drivers of one name shared a Spark session of a Connect server for an hour, and Spark answered a later
driver with the lists of files of an earlier one. Only an interval that was read more than once can have read old input.
"""

from __future__ import annotations

from collections import Counter

from state_backend.checkpoint.coordinator import Coordinator
from state_backend.checkpoint.log import Log, interval_of, kind_of, last_facts, run_of
from state_backend.values.intervals import Interval
from state_backend.values.records import SweepRecord

_REASON = "the interval was read more than once, and may have old input; cairn heal runs it again"


def doubtful_results(log: Log, until: int) -> list[tuple[Interval, int]]:
    """Return the intervals whose current result a retry, a cleared task or a re-run made, with the id of its commit."""
    commits = Counter(interval_of(commit) for commit in log.commits() if kind_of(commit) == "interval")
    found = []
    for fact in sorted(last_facts(log.all_facts()), key=lambda fact: fact.interval):
        entry = log.entry(fact.id)
        if fact.kind != "interval" or fact.id > until or entry is None or isinstance(entry, SweepRecord):
            continue
        run = run_of(entry)
        if commits[fact.interval] > 1 or run.try_number > 1 or run.clear_number:
            found.append((fact.interval, fact.id))
    return found


def refuse_doubtful(coordinator: Coordinator, doubtful: list[tuple[Interval, int]]) -> None:
    """Quarantine the doubtful results, so that `cairn heal` runs their intervals and all later ones again."""
    for _, checkpoint_id in doubtful:
        coordinator.quarantine(checkpoint_id, _REASON)
